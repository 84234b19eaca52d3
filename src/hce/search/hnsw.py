"""hnsw: faiss's graph of near neighbours. Quick to search, slow to build, and the most memory.

The graph forgets nothing: a removed vector stays as a stepping stone that is never returned, until such stones are
so many that the graph is built anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import faiss
import numpy as np

from hce.search.engine import (
    ROWS_AT_ONCE,
    Found,
    Parts,
    codec_of,
    range_sample,
    read_parts,
    reading,
    require,
    write_parts,
)
from hce.search.exact import SPARE, completed, ranked, row_selector, search_rows
from hce.tree.hierarchy import Hierarchy

NEIGHBOURS = 32
EFFORT = 128  # faiss's efSearch
MOST_GONE = 1 / 3  # share of the rows


class HnswEngine:
    """A graph of rows, the number of each row, and which of them are still there.

    Attributes:
        effort: how many vectors a search keeps at hand; more find more and take longer.
    """

    name: ClassVar[str] = "hnsw"

    def __init__(self, index: faiss.IndexHNSW, numbers: np.ndarray, live: np.ndarray, effort: int = EFFORT) -> None:
        self._index = index
        self._numbers = numbers  # rising
        self._live = live
        self._count = int(live.sum())
        self.effort = effort

    @classmethod
    def build(
        cls,
        dim: int,
        numbers: np.ndarray,
        vectors: np.ndarray,
        dtype: str = "float32",
        hierarchy: Hierarchy | None = None,
        seed: int = 0,
    ) -> HnswEngine:
        """An engine of these vectors; `hce.search.engine.new_engine` says more."""
        index = faiss.index_factory(dim, f"HNSW{NEIGHBOURS},{codec_of(dtype)}", faiss.METRIC_INNER_PRODUCT)
        if not index.is_trained:
            index.train(range_sample(vectors, dim))
        engine = cls(index, np.empty(0, np.int64), np.empty(0, bool))
        for start in range(0, len(numbers), ROWS_AT_ONCE):
            engine.add(numbers[start : start + ROWS_AT_ONCE], vectors[start : start + ROWS_AT_ONCE])
        return engine

    def __len__(self) -> int:
        return self._count

    def add(self, numbers: np.ndarray, vectors: np.ndarray) -> None:
        """Link rows into the graph."""
        self._index.add(np.ascontiguousarray(vectors, dtype=np.float32))
        self._numbers = np.concatenate([self._numbers, numbers])
        self._live = np.concatenate([self._live, np.ones(len(numbers), bool)])
        self._count += len(numbers)

    def remove(self, numbers: np.ndarray) -> None:
        """Pass rows over from now on; where they have become too many, build the graph of the others anew."""
        self._live &= ~np.isin(self._numbers, numbers)
        self._count = int(self._live.sum())
        if len(self._live) - self._count > MOST_GONE * len(self._live):
            self._rebuild()

    def search(self, queries: np.ndarray, k: int, allowed: np.ndarray | None = None) -> Found:
        """The k vectors of about the largest inner product; exactly these among `allowed`."""
        if allowed is not None:
            return self._exactly(queries, k, self._live & np.isin(self._numbers, allowed))
        if k + SPARE >= self._count or not len(queries):
            return self._exactly(queries, k, self._live)
        only = row_selector(self._live)
        options = faiss.SearchParametersHNSW(efSearch=max(self.effort, 2 * (k + SPARE)), sel=only)
        scores, rows = self._index.search(queries, k + SPARE, params=options)
        found = ranked(Found(scores, np.where(rows < 0, -1, self._numbers[rows])), k)
        return completed(found, queries, lambda few: self._exactly(few, k, self._live))

    def save(self, folder: Path) -> None:
        """Write the graph, the numbers and what is still there."""
        write_parts(folder, Parts({"graph": self._index}, {"numbers": self._numbers, "live": self._live}))

    @classmethod
    def load(cls, folder: Path, dim: int) -> HnswEngine:
        """Read what `save` wrote.

        Raises:
            FormatError: it is damaged, or not there.
        """
        with reading(folder):
            indexes, arrays = read_parts(folder, dim)
            graph, numbers, live = indexes["graph"], arrays["numbers"], arrays["live"]
            require(isinstance(graph, faiss.IndexHNSW), f"a {type(graph).__name__} is no graph")
            require(graph.ntotal == len(numbers) == len(live), f"{graph.ntotal} vectors and {len(numbers)} numbers")
        return cls(graph, numbers, live)

    def _exactly(self, queries: np.ndarray, k: int, among: np.ndarray) -> Found:
        return search_rows(faiss.downcast_index(self._index.storage), self._numbers, queries, k, among)

    def _rebuild(self) -> None:
        rows = np.flatnonzero(self._live)
        storage = faiss.downcast_index(self._index.storage)
        numbers, codes = self._numbers[rows], storage.reconstruct_batch(rows)
        self._index.reset()
        self._numbers, self._live, self._count = np.empty(0, np.int64), np.empty(0, bool), 0
        self.add(numbers, codes)
