"""Exact search: the k best with ties settled by number, whatever holds the vectors.

Equal texts have equal vectors, so ties are common, at the last place too. There, a search that returns any k of the
best is not enough: more candidates are fetched until one of them is clearly worse than the k-th.

The engine `flat` compares every vector with the query; it is the measure of `tree`. For vectors that are plain arrays,
and need no engine, there are `nearest` and the blocks of scores underneath.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import faiss
import numpy as np

from hce.files import released
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
from hce.tree.hierarchy import Hierarchy

EXTRA_CANDIDATES = 8  # candidates beyond k, which tell whether the last place is shared
SLACK = 1e-5  # how far the scores of equal unit vectors may lie apart in a matrix product
VALUES_AT_ONCE = 1 << 24  # floats of candidates fetched at a time: 64 MB
SCORES_AT_ONCE = 1 << 26  # floats in a block of the score matrix: 256 MB

Fetch = Callable[[np.ndarray, int], Found]
"""(queries, count) → the `count` best of each query, in any order; `count` is at most the number of vectors."""


# ----------------------------------------------------------------------------------------- candidates


def nothing(queries: int, k: int) -> Found:
    """Return an empty result: numbers −1 and scores −∞, each of shape (queries, k)."""
    return Found(np.full((queries, k), -1, np.int64), np.full((queries, k), -np.inf, np.float32))


def k_best(candidates: Found, k: int) -> Found:
    """Return the k best of each query's candidates, equal scores in order of number; −1 is no candidate."""
    is_in_order = (candidates.scores[:, 1:] < candidates.scores[:, :-1]).all() and (candidates.numbers >= 0).all()
    if candidates.scores.shape[1] >= k and is_in_order:
        return Found(candidates.numbers[:, :k], candidates.scores[:, :k])  # as faiss leaves them where none are equal
    scores = np.where(candidates.numbers < 0, -np.inf, candidates.scores).astype(np.float32)
    order = np.lexsort((candidates.numbers, -scores), axis=1)[:, :k]
    found = nothing(len(scores), k)
    found.scores[:, : order.shape[1]] = np.take_along_axis(scores, order, axis=1)
    found.numbers[:, : order.shape[1]] = np.take_along_axis(candidates.numbers, order, axis=1)
    return found


def completed(found: Found, queries: np.ndarray, exactly: Callable[[np.ndarray], Found]) -> Found:
    """Search exactly, in place, for the queries that found fewer than k; only where k vectors exist."""
    short = np.flatnonzero(found.numbers[:, -1] < 0)
    if len(short):
        found.numbers[short], found.scores[short] = exactly(queries[short])
    return found


def search_exactly(fetch: Fetch, available: int, queries: np.ndarray, k: int, slack: float = 0.0) -> Found:
    """Find the k best of `available` vectors, ties settled by number.

    Args:
        fetch: gets candidates.
        available: how many vectors there are to be found.
        queries: unit rows of shape (Q, n).
        k: 1 or more.
        slack: how far the scores of equal vectors may lie apart when `fetch` chooses.
    """
    count = min(k + EXTRA_CANDIDATES, available)
    if not count or not len(queries):
        return nothing(len(queries), k)
    candidates = fetch(queries, count)
    found = k_best(candidates, k)
    if count < available:
        shared = found.scores[:, k - 1] - candidates.scores.min(axis=1) <= slack
        for query in np.flatnonzero(shared):
            wider = _past_the_tie(fetch, available, queries[query : query + 1], k, slack)
            found.scores[query], found.numbers[query] = wider.scores[0], wider.numbers[0]
    return found


def _past_the_tie(fetch: Fetch, available: int, query: np.ndarray, k: int, slack: float) -> Found:
    """Find the k best for one query of shape (1, n), with as many candidates as it takes."""
    count = k + EXTRA_CANDIDATES
    while True:
        count = min(4 * count, available)
        candidates = fetch(query, count)
        found = k_best(candidates, k)
        if count == available or found.scores[0, k - 1] - candidates.scores.min() > slack:
            return found


# ----------------------------------------------------------------------------------------- rows of a faiss index


def search_rows(
    storage: faiss.Index, numbers: np.ndarray, queries: np.ndarray, k: int, is_allowed: np.ndarray | None = None
) -> Found:
    """Search the rows of a faiss index of flat codes exactly.

    A matrix product may score two equal rows a rounding apart, depending on where in a block they stand. So the
    candidates are scored once more, each by itself.

    Args:
        storage: the index, of N rows.
        numbers: of its rows, of shape (N,), int64.
        queries: unit rows of shape (Q, n).
        k: 1 or more.
        is_allowed: which rows may be found, of shape (N,), bool; by default all.
    """
    chosen = None if is_allowed is None else faiss.SearchParameters(sel=selector(is_allowed))

    def fetch(block: np.ndarray, count: int) -> Found:
        _, rows = storage.search(block, count, params=chosen)
        return Found(numbers[rows], scores_of_rows(storage, block, rows))

    return search_exactly(fetch, len(numbers) if is_allowed is None else int(is_allowed.sum()), queries, k, SLACK)


def selector(chosen: np.ndarray) -> faiss.IDSelector:
    """Make faiss look only at the ids i for which `chosen[i]` holds, of shape (ids,), bool."""
    return faiss.IDSelectorBitmap(np.packbits(chosen, bitorder="little"))


def scores_of_rows(storage: faiss.Index, queries: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Compute the inner products of each query with its candidate rows of shape (Q, C)."""
    flat, of_query = rows.reshape(-1), np.repeat(np.arange(len(rows)), rows.shape[1])
    scores = np.empty(len(flat), np.float32)
    at_once = max(1, VALUES_AT_ONCE // storage.d)
    for start in range(0, len(flat), at_once):
        block = slice(start, start + at_once)
        scores[block] = np.einsum("pn,pn->p", storage.reconstruct_batch(flat[block]), queries[of_query[block]])
    return scores.reshape(rows.shape)


# ----------------------------------------------------------------------------------------- rows of an array


def score_blocks(queries: np.ndarray, documents: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Compute all inner products of queries (Q, n) with documents (N, n), as many queries at a time as memory allows.

    Yields:
        Which queries, and their scores of shape (queries, N).
    """
    table, at_once = np.asarray(documents).T, max(1, SCORES_AT_ONCE // max(len(documents), 1))
    for start in range(0, len(queries), at_once):
        rows = slice(start, min(start + at_once, len(queries)))
        yield rows, queries[rows] @ table


def nearest(queries: np.ndarray, documents: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the k documents of the largest inner product with each query, best first; equal ones among them in order.

    Args:
        queries: of shape (Q, n).
        documents: of shape (N, n), a memory map included.
        k: how many; N if that is less.

    Returns:
        Positions of documents and their scores, each of shape (Q, min(k, N)).
    """
    import torch  # whose topk is much the fastest; a search of an index does without

    shape = (len(queries), min(k, len(documents)))
    positions, scores = np.empty(shape, np.int64), np.empty(shape, np.float32)
    for rows, block in score_blocks(queries, documents):
        best, where = (each.numpy() for each in torch.from_numpy(block).topk(shape[1], dim=1))
        order = np.lexsort((where, -best), axis=1)
        scores[rows] = np.take_along_axis(best, order, axis=1)
        positions[rows] = np.take_along_axis(where, order, axis=1)
    return positions, scores


def best_first(scores: np.ndarray, k: int) -> np.ndarray:
    """Return the positions of the k highest of scores of shape (N,), best first, equal ones in order."""
    k = min(k, len(scores))
    if k < 1:
        return np.empty(0, dtype=np.int64)
    lowest = np.partition(scores, len(scores) - k)[len(scores) - k]
    candidates = np.flatnonzero(scores >= lowest)
    best: np.ndarray = candidates[np.argsort(-scores[candidates], kind="stable")[:k]]
    return best


# ----------------------------------------------------------------------------------------- the engine `flat`


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
        is_allowed = None if allowed is None else np.isin(self._numbers, allowed)
        return search_rows(self._storage, self._numbers, queries, k, is_allowed)

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
