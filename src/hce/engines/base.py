"""What the index asks of an engine: a mapping from numbers to unit vectors, searched by inner product.

An engine is derived from the store and can be thrown away at any time. It knows numbers and vectors, and nothing of
documents, files of the user, or encoders.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

import numpy as np


class Found(NamedTuple):
    """The best vectors for each query, best first; equal scores in order of number.

    Attributes:
        scores: of shape (Q, k), float32; −inf where there are fewer than k vectors.
        numbers: of shape (Q, k), int64; −1 there.
    """

    scores: np.ndarray
    numbers: np.ndarray


class Engine(Protocol):
    """Vectors by number. Numbers rise: one that was removed never comes back."""

    name: ClassVar[str]

    def __len__(self) -> int:
        """How many vectors there are."""
        ...

    def add(self, numbers: np.ndarray, vectors: np.ndarray) -> None:
        """Take vectors in.

        Args:
            numbers: of shape (B,), int64, rising, all above those that were ever added.
            vectors: unit rows of shape (B, n), float32.
        """
        ...

    def remove(self, numbers: np.ndarray) -> None:
        """Take vectors out; numbers that are not there are passed over."""
        ...

    def search(self, queries: np.ndarray, k: int, allowed: np.ndarray | None = None) -> Found:
        """The k vectors of the largest inner product; k of them if there are k.

        Args:
            queries: unit rows of shape (Q, n), float32.
            k: 1 or more.
            allowed: search among these numbers only (rising, int64), and exactly.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write everything into an existing, empty folder."""
        ...
