"""An engine of passages, and one ranking of documents by what is nearest of each: a passage, or the whole."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from hce.search.engine import (
    Engine,
    EngineFiles,
    Found,
    as_format_error,
    checked_numbers,
    load_engine,
    new_engine,
    read_files,
    require_sound,
    write_files,
)
from hce.search.exact import nothing

WIDER = 4  # times as many passages are looked at where those of too few documents came first
ENGINE_FOLDER = "engine"


class Nearest(NamedTuple):
    """The documents nearest to each query, best first; equal scores in order of number.

    Attributes:
        numbers: of the documents, of shape (Q, k), int64; −1 where there are fewer than k.
        scores: of shape (Q, k), float32; −inf there.
        passages: the number of the passage that gave the score, of shape (Q, k); 0 where the document's own vector did.
    """

    numbers: np.ndarray
    scores: np.ndarray
    passages: np.ndarray


class PassageEngine:
    """Vectors of passages by number, and the document of each.

    Attributes:
        engine: the vectors.
        numbers: of the passages, rising, of shape (P,), int64.
        documents: the number of each one's document, of shape (P,), int64.
    """

    def __init__(self, engine: Engine, numbers: np.ndarray, documents: np.ndarray) -> None:
        self.engine = engine
        self.numbers = numbers
        self.documents = documents

    @classmethod
    def build(
        cls, name: str, dim: int, numbers: np.ndarray, documents: np.ndarray, vectors: np.ndarray, dtype: str
    ) -> PassageEngine:
        """Build an engine, by its name, of these passages, of shapes (P,), (P,) and (P, n)."""
        return cls(new_engine(name, dim, numbers=numbers, vectors=vectors, dtype=dtype), numbers, documents)

    def __len__(self) -> int:
        return len(self.numbers)

    def add(self, numbers: np.ndarray, documents: np.ndarray, vectors: np.ndarray) -> None:
        """Take passages in; their numbers rise, and are above those that were ever added."""
        self.engine.add(numbers, vectors)
        self.numbers = np.concatenate([self.numbers, numbers])
        self.documents = np.concatenate([self.documents, documents])

    def remove(self, documents: np.ndarray) -> None:
        """Take the passages of documents out; a document that has none is passed over."""
        gone = np.isin(self.documents, documents)
        if gone.any():
            self.engine.remove(self.numbers[gone])
            self.numbers, self.documents = self.numbers[~gone], self.documents[~gone]

    def nearest(self, whole: Found, queries: np.ndarray, k: int, allowed: np.ndarray | None = None) -> Nearest:
        """Find the k documents of which the whole or a passage is nearest to each query, each document once.

        Args:
            whole: the k documents whose own vectors are nearest.
            queries: unit rows of shape (Q, n), float32.
            k: 1 or more.
            allowed: search among these documents only, rising.
        """
        among = None if allowed is None else self.numbers[np.isin(self.documents, allowed)]
        available = len(self) if among is None else len(among)
        nearest = Nearest(*nothing(len(queries), k), np.zeros((len(queries), k), np.int64))
        unsure, count = np.arange(len(queries)), min(k, available)
        while len(unsure):
            found = self.engine.search(queries[unsure], count, among) if count else nothing(len(unsure), 0)
            self._fill(nearest, unsure, whole, found, k)
            if count == available:
                break
            # Where the last passage is no worse than the last document, one further down may come before that.
            unsure = unsure[found.scores[:, -1] >= nearest.scores[unsure, -1]]
            count = min(WIDER * count, available)
        return nearest

    def _fill(self, nearest: Nearest, rows: np.ndarray, whole: Found, found: Found, k: int) -> None:
        """Rank the documents of some queries by their own vectors and by the passages that were found."""
        for row, numbers, scores in zip(rows.tolist(), found.numbers, found.scores, strict=True):
            passages = np.concatenate([np.zeros(whole.numbers.shape[1], np.int64), numbers[numbers >= 0]])
            documents = np.concatenate([whole.numbers[row], self._documents_of(numbers[numbers >= 0])])
            both = np.concatenate([whole.scores[row], scores[numbers >= 0]])
            order = np.lexsort((passages, documents, -both))
            order = order[documents[order] >= 0]
            order = order[np.sort(np.unique(documents[order], return_index=True)[1])][:k]  # the best of each document
            for column, values in zip(nearest, (documents, both, passages), strict=True):
                column[row, : len(order)] = values[order]

    def _documents_of(self, numbers: np.ndarray) -> np.ndarray:
        return self.documents[np.searchsorted(self.numbers, numbers)]

    def save(self, folder: Path) -> None:
        """Write everything into an existing, empty folder."""
        (folder / ENGINE_FOLDER).mkdir()
        self.engine.save(folder / ENGINE_FOLDER)
        write_files(folder, EngineFiles({}, {"numbers": self.numbers, "documents": self.documents}))

    @classmethod
    def load(cls, name: str, folder: Path, dim: int) -> PassageEngine:
        """Read what `save` wrote.

        Raises:
            FormatError: it is damaged, or not there.
        """
        engine = load_engine(name, folder / ENGINE_FOLDER, dim)
        with as_format_error(folder):
            arrays = read_files(folder).arrays
            numbers, documents = checked_numbers(arrays["numbers"], "numbers"), arrays["documents"]
            require_sound(
                bool((np.diff(numbers) > 0).all()) and documents.dtype == np.int64, "numbers that do not rise"
            )
            require_sound(
                np.array_equal(np.sort(engine.numbers), numbers), f"{len(engine)} vectors, {len(numbers)} numbers"
            )
            require_sound(numbers.shape == documents.shape, f"{len(numbers)} numbers, {len(documents)} documents")
        return cls(engine, numbers, documents)
