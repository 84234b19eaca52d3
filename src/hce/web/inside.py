"""What the page asks of an index beyond its verbs: one moment of the store, and a query's vector."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from hce.index import Index
from hce.tables import Reader


def reading(index: Index) -> AbstractContextManager[Reader]:
    """One consistent view of the documents, with their numbers."""
    return index._store.reading()


def encode_query(index: Index, text: str) -> np.ndarray:
    """The unit vector of a query, of shape (n,); safe from several threads."""
    return np.asarray(index._for_queries.encode([text], "query")[0])


def display_name(encoder: str) -> str:
    """An encoder's name without the folders above it, which are nobody else's business."""
    return Path(encoder).name if Path(encoder).is_absolute() else encoder
