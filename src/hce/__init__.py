"""Adapt a text retriever to your corpus: a tree of the documents and a better encoder, learned together."""

from hce._version import __version__

__all__ = ["__version__"]
