"""An engine of passages, and a ranking of documents by their own vectors or their nearest passages."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from hce.search.engine import (
    Found,
    VectorEngine,
    checked,
    load_engine,
    new_engine,
    nothing,
    reading,
    require,
    rising,
    write_arrays,
)

WIDER = 4  # times as many passages are fetched if those found belong to too few documents
ENGINE_FOLDER = "engine"


class Nearest(NamedTuple):
    """The documents nearest to each query, as in `Found`."""

    numbers: np.ndarray
    scores: np.ndarray
    passage_numbers: np.ndarray  # of the passages with these scores, (Q, k); 0 is the document's own vector


class PassageEngine:
    """Vectors of passages by number, and the document of each."""

    def __init__(self, engine: VectorEngine, passage_numbers: np.ndarray, documents: np.ndarray) -> None:
        self.engine = engine
        self.passage_numbers = passage_numbers  # rising, (P,), int64
        self.documents = documents  # the number of each passage's document, (P,), int64

    @classmethod
    def build(
        cls, name: str, dim: int, passage_numbers: np.ndarray, documents: np.ndarray, vectors: np.ndarray
    ) -> PassageEngine:
        """Build an engine of passages, of shapes (P,), (P,) and (P, n)."""
        engine = new_engine(name, dim, numbers=passage_numbers, vectors=vectors)
        return cls(engine, passage_numbers, documents)

    def __len__(self) -> int:
        return len(self.passage_numbers)

    def add(self, passage_numbers: np.ndarray, documents: np.ndarray, vectors: np.ndarray) -> None:
        """Add passages; their numbers rise, and are above those that were ever added."""
        self.engine.add(passage_numbers, vectors)
        self.passage_numbers = np.concatenate([self.passage_numbers, passage_numbers])
        self.documents = np.concatenate([self.documents, documents])

    def remove(self, documents: np.ndarray) -> None:
        """Remove the passages of documents; a document that has none is ignored."""
        gone = np.isin(self.documents, documents)
        if gone.any():
            self.engine.remove(self.passage_numbers[gone])
            self.passage_numbers, self.documents = self.passage_numbers[~gone], self.documents[~gone]

    def merged_with(self, whole: Found, queries: np.ndarray, k: int, allowed: np.ndarray | None = None) -> Nearest:
        """Merge passages into the documents found; return the k nearest, each once.

        A document is as near as its own vector or its nearest passage. `whole` has the k documents whose own vectors
        are nearest to the queries (Q, n). `allowed` has the documents to search among, rising.
        """
        allowed_passages = None if allowed is None else self.passage_numbers[np.isin(self.documents, allowed)]
        available = len(self) if allowed_passages is None else len(allowed_passages)
        nearest = Nearest(*nothing(len(queries), k), np.zeros((len(queries), k), np.int64))
        unsure, count = np.arange(len(queries)), min(k, available)
        while len(unsure):
            found = self.engine.search(queries[unsure], count, allowed_passages) if count else nothing(len(unsure), 0)
            self._fill(nearest, unsure, whole, found, k)
            if count == available:
                break
            # If the last passage is as good as the last document, a passage not fetched yet may still beat that one.
            unsure = unsure[found.scores[:, -1] >= nearest.scores[unsure, -1]]
            count = min(WIDER * count, available)
        return nearest

    def _fill(self, nearest: Nearest, rows: np.ndarray, whole: Found, found: Found, k: int) -> None:
        """Rank documents by their own vectors and by the passages found."""
        for row, numbers, scores in zip(rows.tolist(), found.numbers, found.scores, strict=True):
            there = numbers >= 0
            passage_numbers = np.concatenate([np.zeros(whole.numbers.shape[1], np.int64), numbers[there]])
            of_passages = self.documents[np.searchsorted(self.passage_numbers, numbers[there])]
            documents = np.concatenate([whole.numbers[row], of_passages])
            both = np.concatenate([whole.scores[row], scores[there]])
            order = np.lexsort((passage_numbers, documents, -both))
            order = order[documents[order] >= 0]
            order = order[np.sort(np.unique(documents[order], return_index=True)[1])][:k]  # the best of each document
            for column, values in zip(nearest, (documents, both, passage_numbers), strict=True):
                column[row, : len(order)] = values[order]

    def save(self, folder: Path) -> None:
        """Write everything into an existing, empty folder."""
        (folder / ENGINE_FOLDER).mkdir()
        self.engine.save(folder / ENGINE_FOLDER)
        write_arrays(folder, {"numbers": self.passage_numbers, "documents": self.documents})

    @classmethod
    def load(cls, name: str, folder: Path, dim: int) -> PassageEngine:
        """Load a saved engine; FormatError if it is damaged or missing."""
        engine = load_engine(name, folder / ENGINE_FOLDER, dim)
        with reading(folder) as arrays:
            numbers, documents = rising(arrays["numbers"]), checked(arrays["documents"], np.int64, (len(engine),))
            require(np.array_equal(engine.numbers, numbers), f"{len(engine)} vectors, {len(numbers)} numbers")
        return cls(engine, numbers, documents)
