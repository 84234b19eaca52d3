"""flat: every vector is compared with the query. Exact, and the measure of `tree`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import faiss
import numpy as np

from hce.memory import released
from hce.search.engine import (
    VECTORS_AT_ONCE,
    EngineFiles,
    Found,
    as_format_error,
    checked_numbers,
    code_ranges,
    codec_of,
    dtype_of,
    range_sample,
    read_files,
    require_sound,
    set_code_ranges,
    write_files,
)
from hce.search.exact import scores_of_rows, search_rows
from hce.tree.hierarchy import Hierarchy


class FlatEngine:
    """Rows of codes, and the number of each row."""

    name: ClassVar[str] = "flat"

    def __init__(self, storage: faiss.Index, numbers: np.ndarray) -> None:
        self._storage = storage
        self._numbers = numbers
        self._order: np.ndarray | None = None  # rows by number; made when it is needed

    @classmethod
    def build(
        cls,
        dim: int,
        numbers: np.ndarray,
        vectors: np.ndarray,
        dtype: str = "float32",
        hierarchy: Hierarchy | None = None,
    ) -> FlatEngine:
        """Build an engine of these vectors; `hce.search.engine.new_engine` says what the arguments are."""
        storage = faiss.index_factory(dim, codec_of(dtype), faiss.METRIC_INNER_PRODUCT)
        if not storage.is_trained:
            storage.train(range_sample(vectors, dim))
        engine = cls(storage, np.empty(0, np.int64))
        for start in range(0, len(numbers), VECTORS_AT_ONCE):
            engine.add(numbers[start : start + VECTORS_AT_ONCE], vectors[start : start + VECTORS_AT_ONCE])
        return engine

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def numbers(self) -> np.ndarray:
        """The numbers of all vectors."""
        return self._numbers

    def add(self, numbers: np.ndarray, vectors: np.ndarray) -> None:
        """Append rows."""
        self._storage.add(np.ascontiguousarray(vectors, dtype=np.float32))
        self._numbers, self._order = np.concatenate([self._numbers, numbers]), None

    def remove(self, numbers: np.ndarray) -> None:
        """Fill the gaps with the last rows, so that the work is that of the rows removed and not of all."""
        gone = np.isin(self._numbers, numbers)
        kept = len(gone) - int(gone.sum())
        gaps, movers = np.flatnonzero(gone[:kept]), kept + np.flatnonzero(~gone[kept:])
        codes = self._codes()
        codes[gaps] = codes[movers]
        self._numbers[gaps] = self._numbers[movers]
        self._numbers, self._order = self._numbers[:kept].copy(), None
        self._resize(kept)

    def search(self, queries: np.ndarray, k: int, allowed: np.ndarray | None = None) -> Found:
        """Find the k vectors of the largest inner product, exactly."""
        among = None if allowed is None else np.isin(self._numbers, allowed)
        return search_rows(self._storage, self._numbers, queries, k, among)

    def scores(self, query: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return the inner products of a query with some vectors."""
        order = self._order
        if order is None:  # several threads may do this at once, to the same end
            order = self._order = np.argsort(self._numbers)
        rows = order[np.searchsorted(self._numbers, numbers, sorter=order)] if len(numbers) else numbers
        return scores_of_rows(self._storage, query[None], rows[None])[0]

    def save(self, folder: Path) -> None:
        """Write the rows and their numbers."""
        arrays = {"numbers": self._numbers, "ranges": code_ranges(self._storage)}
        write_files(folder, EngineFiles({"storage": self._codes()}, arrays))

    @classmethod
    def load(cls, folder: Path, dim: int) -> FlatEngine:
        """Read what `save` wrote.

        Raises:
            FormatError: it is damaged, or not there.
        """
        with as_format_error(folder):
            files = read_files(folder, ["storage"])
            codes, numbers = np.asarray(files.codes["storage"]), checked_numbers(files.arrays["numbers"], "numbers")
            require_sound(len(codes) == len(numbers), f"{len(codes)} vectors and {len(numbers)} numbers")
            storage = faiss.index_factory(dim, codec_of(dtype_of(codes, dim)), faiss.METRIC_INNER_PRODUCT)
            set_code_ranges(storage, files.arrays["ranges"])
            engine = cls(storage, numbers)
            engine._resize(len(codes))
            with released(files.codes["storage"]):
                engine._codes()[:] = codes
        return engine

    def _codes(self) -> np.ndarray:
        """Return the rows in faiss's memory, of shape (N, bytes of one), uint8."""
        codes, width = self._storage.codes, self._storage.code_size
        if not codes.size():
            return np.empty((0, width), np.uint8)
        return np.asarray(faiss.rev_swig_ptr(codes.data(), codes.size())).reshape(-1, width)

    def _resize(self, rows: int) -> None:
        self._storage.codes.resize(rows * self._storage.code_size)
        self._storage.ntotal = rows
