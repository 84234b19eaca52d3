"""Exact search with ties settled by number, whatever holds the vectors.

Equal texts have equal vectors, so ties are common, at the last place too. There, a search that returns any k of the
best is not enough: more candidates are fetched until one of them is clearly worse than the k-th.
"""

from __future__ import annotations

from collections.abc import Callable

import faiss
import numpy as np
import torch

from hce.search.engine import Found

SPARE = 8  # candidates beyond k, which tell whether the last place is shared
SLACK = 1e-5  # how far the scores of equal unit vectors may lie apart in a matrix product
VALUES_AT_ONCE = 1 << 24  # floats of candidates fetched at a time: 64 MB

Nearest = Callable[[np.ndarray, int], Found]

"""(queries, depth) → the `depth` best of each query, in any order; there are so many."""


def nothing(queries: int, k: int) -> Found:
    """What is found where there is nothing."""
    return Found(np.full((queries, k), -np.inf, np.float32), np.full((queries, k), -1, np.int64))


def ranked(candidates: Found, k: int) -> Found:
    """The k best of each query's candidates, equal scores in order of number; −1 is no candidate."""
    if candidates.scores.shape[1] >= k and (candidates.scores[:, 1:] < candidates.scores[:, :-1]).all():
        return Found(candidates.scores[:, :k], candidates.numbers[:, :k])  # as faiss leaves them where none are equal
    scores = np.where(candidates.numbers < 0, -np.inf, candidates.scores).astype(np.float32)
    order = np.lexsort((candidates.numbers, -scores), axis=1)[:, :k]
    found = nothing(len(scores), k)
    found.scores[:, : order.shape[1]] = np.take_along_axis(scores, order, axis=1)
    found.numbers[:, : order.shape[1]] = np.take_along_axis(candidates.numbers, order, axis=1)
    return found


def search_exactly(nearest: Nearest, available: int, queries: np.ndarray, k: int, slack: float = 0.0) -> Found:
    """The k best of `available` vectors, ties settled by number.

    Args:
        nearest: fetches candidates.
        available: how many vectors there are to be found.
        queries: unit rows of shape (Q, n).
        k: 1 or more.
        slack: how far the scores of equal vectors may lie apart when `nearest` chooses.
    """
    depth = min(k + SPARE, available)
    if not depth or not len(queries):
        return nothing(len(queries), k)
    candidates = nearest(queries, depth)
    found = ranked(candidates, k)
    if depth < available:
        shared = found.scores[:, k - 1] - candidates.scores.min(axis=1) <= slack
        for query in np.flatnonzero(shared):
            wider = _past_the_tie(nearest, available, queries[query : query + 1], k, slack)
            found.scores[query], found.numbers[query] = wider.scores[0], wider.numbers[0]
    return found


def _past_the_tie(nearest: Nearest, available: int, query: np.ndarray, k: int, slack: float) -> Found:
    """The k best for one query of shape (1, n), with as many candidates as it takes."""
    depth = k + SPARE
    while True:
        depth = min(4 * depth, available)
        candidates = nearest(query, depth)
        found = ranked(candidates, k)
        if depth == available or found.scores[0, k - 1] - candidates.scores.min() > slack:
            return found


def completed(found: Found, queries: np.ndarray, exactly: Callable[[np.ndarray], Found]) -> Found:
    """What was found, and, for queries of which too few were, what an exact search finds; there are k vectors."""
    short = np.flatnonzero(found.numbers[:, -1] < 0)
    if len(short):
        found.scores[short], found.numbers[short] = exactly(queries[short])
    return found


def search_rows(
    storage: faiss.Index, numbers: np.ndarray, queries: np.ndarray, k: int, among: np.ndarray | None = None
) -> Found:
    """Search the rows of a faiss index of flat codes exactly.

    A matrix product may score two equal rows a rounding apart, depending on where in a block they stand. So the
    candidates are scored once more, each by itself.

    Args:
        storage: the index, of N rows.
        numbers: of its rows, of shape (N,), int64.
        queries: unit rows of shape (Q, n).
        k: 1 or more.
        among: which rows may be found, of shape (N,), bool; by default all.
    """
    chosen = None if among is None else faiss.SearchParameters(sel=row_selector(among))

    def nearest(block: np.ndarray, depth: int) -> Found:
        _, rows = storage.search(block, depth, params=chosen)
        return Found(_scores(storage, block, rows), numbers[rows])

    return search_exactly(nearest, len(numbers) if among is None else int(among.sum()), queries, k, SLACK)


def row_selector(rows: np.ndarray) -> faiss.IDSelector:
    """Make faiss look at these rows only: of shape (N,), bool."""
    return faiss.IDSelectorBitmap(np.packbits(rows, bitorder="little"))


def _scores(storage: faiss.Index, queries: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Inner products of each query with its candidate rows of shape (Q, C)."""
    flat, of_query = rows.reshape(-1), np.repeat(np.arange(len(rows)), rows.shape[1])
    scores = np.empty(len(flat), np.float32)
    step = max(1, VALUES_AT_ONCE // storage.d)
    for start in range(0, len(flat), step):
        part = slice(start, start + step)
        scores[part] = np.einsum("pn,pn->p", storage.reconstruct_batch(flat[part]), queries[of_query[part]])
    return scores.reshape(rows.shape)


SCORES_AT_ONCE = 1 << 26  # floats in a block of the score matrix: 256 MB


def nearest(queries: np.ndarray, documents: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k documents of the largest inner product with each query, best first; equal ones among them in order.

    Args:
        queries: of shape (Q, n).
        documents: of shape (N, n), a memory map included.
        k: how many; N if that is less.

    Returns:
        Scores and document numbers, each of shape (Q, min(k, N)).
    """
    k = min(k, len(documents))
    table = torch.from_numpy(np.asarray(documents))
    scores, numbers = [], []
    for start in range(0, len(queries), max(1, SCORES_AT_ONCE // max(len(documents), 1))):
        block = torch.from_numpy(queries[start : start + max(1, SCORES_AT_ONCE // max(len(documents), 1))]) @ table.T
        best, where = block.topk(k, dim=1)
        order = np.lexsort((where.numpy(), -best.numpy()), axis=1)
        scores.append(np.take_along_axis(best.numpy(), order, axis=1))
        numbers.append(np.take_along_axis(where.numpy(), order, axis=1))
    if not scores:
        return np.empty((0, k), np.float32), np.empty((0, k), np.int64)
    return np.concatenate(scores), np.concatenate(numbers)
