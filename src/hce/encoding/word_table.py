"""Word tables for models of 0.2.0: their modules.json names this module, and sentence-transformers imports it."""

from hce.encoding.side_by_side import WordTable as WordTable
