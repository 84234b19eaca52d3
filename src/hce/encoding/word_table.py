"""Where models of 0.2.0 have their tables of words: sentence-transformers imports a module by this name."""

from hce.encoding.side_by_side import WordTable as WordTable
