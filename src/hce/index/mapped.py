"""All vectors of a store as one array: in memory as long as they are few, in a temporary file mapped into it if not."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from hce.files import released, write_to_be_mapped
from hce.index.store import Reader
from hce.memory import HELD
from hce.progress import progress_bar

ROWS_AT_ONCE = 16_384


@contextmanager
def all_vectors(reader: Reader, folder: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the numbers of all documents, rising, of shape (N,), int64, and their vectors, of shape (N, n).

    Args:
        reader: of the moment.
        folder: where there is room for a temporary file; a kill leaves nothing of it.
    """
    numbers = reader.numbers()
    if _are_few(reader, numbers):
        yield reader.vectors()
        return
    with tempfile.TemporaryFile(dir=folder, prefix=".vectors-") as file:
        with progress_bar("fetching vectors", len(numbers), "vectors") as advance:
            for start in range(0, len(numbers), ROWS_AT_ONCE):
                some = numbers[start : start + ROWS_AT_ONCE]
                write_to_be_mapped(file, reader.vectors_at(some))
                advance(len(some))
        file.flush()
        vectors = np.memmap(file, dtype=np.float32, mode="r", shape=(len(numbers), reader.dim))
        with released(vectors):
            yield numbers, vectors


def _are_few(reader: Reader, numbers: np.ndarray) -> bool:
    return 4 * reader.dim * len(numbers) <= HELD


class StoredVectors:
    """The vectors of numbered documents, read from the store when they are asked for, by row.

    Args:
        reader: of the moment.
        numbers: the document of each row, rising, of shape (N,).
    """

    def __init__(self, reader: Reader, numbers: np.ndarray) -> None:
        self._reader = reader
        self._numbers = numbers
        self.shape = (len(numbers), reader.dim)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        return self._reader.vectors_at(self._numbers[rows])


def vectors_by_row(reader: Reader) -> tuple[np.ndarray, np.ndarray | StoredVectors]:
    """Return the numbers of all documents, rising, and their vectors: in memory, or of many those asked for."""
    numbers = reader.numbers()
    return reader.vectors() if _are_few(reader, numbers) else (numbers, StoredVectors(reader, numbers))
