"""What the page asks of an index beyond its verbs: one moment of the store, and the vectors of queries."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from hce.index.index import Index
from hce.index.tables import Reader


def reading(index: Index) -> AbstractContextManager[Reader]:
    """One consistent view of the documents, with their numbers."""
    return index._store.reading()


def encode_queries(index: Index, texts: Sequence[str]) -> np.ndarray:
    """The unit vectors of queries, of shape (texts, n); safe from several threads."""
    return index._for_queries.encode(texts, "query")


def display_name(encoder: str) -> str:
    """An encoder's name without the folders above it, which are nobody else's business."""
    return Path(encoder).name if Path(encoder).is_absolute() else encoder
