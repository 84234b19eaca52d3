"""Exact search: the k best with ties settled by number, whatever holds the vectors.

Equal texts have equal vectors, so ties are common, at the last place too. There, a search that returns any k of the
best is not enough: more candidates are fetched until one of them is clearly worse than the k-th.

For vectors that are plain arrays, and need no engine, there are `nearest` and the blocks of scores underneath.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

EXTRA_CANDIDATES = 8  # candidates beyond k, which show whether the last place is shared
SLACK = 1e-5  # how far the scores of equal unit vectors may lie apart in a matrix product
SCORES_AT_ONCE = 1 << 26  # floats in a block of the score matrix: 256 MB


class Found(NamedTuple):
    """The best vectors for each query, best first; equal scores in order of number.

    Attributes:
        numbers: of shape (Q, k), int64; −1 where there are fewer than k vectors.
        scores: of shape (Q, k), float32; −inf there.
    """

    numbers: np.ndarray
    scores: np.ndarray


Fetch = Callable[[np.ndarray, int], Found]
"""(queries, count) → the `count` best of each query, in any order; `count` is at most the number of vectors."""


# ----------------------------------------------------------------------------------------- candidates


def nothing(queries: int, k: int) -> Found:
    """Return an empty result: numbers −1 and scores −∞, each of shape (queries, k)."""
    return Found(np.full((queries, k), -1, np.int64), np.full((queries, k), -np.inf, np.float32))


def k_best(candidates: Found, k: int) -> Found:
    """Return each query's k best candidates, ties in order of number.

    −1 is no candidate.
    """
    is_in_order = (candidates.scores[:, 1:] < candidates.scores[:, :-1]).all() and (candidates.numbers >= 0).all()
    if candidates.scores.shape[1] >= k and is_in_order:
        return Found(candidates.numbers[:, :k], candidates.scores[:, :k])  # as faiss leaves them where none are equal
    scores = np.where(candidates.numbers < 0, -np.inf, candidates.scores).astype(np.float32)
    order = np.lexsort((candidates.numbers, -scores), axis=1)[:, :k]
    found = nothing(len(scores), k)
    found.scores[:, : order.shape[1]] = np.take_along_axis(scores, order, axis=1)
    found.numbers[:, : order.shape[1]] = np.take_along_axis(candidates.numbers, order, axis=1)
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
    """Find the k best for one query (1, n), among as many as it takes."""
    count = k + EXTRA_CANDIDATES
    while True:
        count = min(4 * count, available)
        candidates = fetch(query, count)
        found = k_best(candidates, k)
        if count == available or found.scores[0, k - 1] - candidates.scores.min() > slack:
            return found


# ----------------------------------------------------------------------------------------- rows of an array


def inner_products(vectors: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Compute the inner products of rows (m, n) with a query, one by one.

    A matrix product may score two equal rows a rounding apart, depending on where in a block they are.
    """
    products: np.ndarray = np.einsum("mn,n->m", vectors, query)
    return products


def score_blocks(queries: np.ndarray, documents: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Compute all inner products of queries (Q, n) and documents (N, n).

    As many queries are scored at a time as memory allows.

    Yields:
        Which queries, and their scores of shape (queries, N).
    """
    table, at_once = np.asarray(documents).T, max(1, SCORES_AT_ONCE // max(len(documents), 1))
    for start in range(0, len(queries), at_once):
        rows = slice(start, min(start + at_once, len(queries)))
        yield rows, queries[rows] @ table


def nearest(queries: np.ndarray, documents: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the k documents of the largest inner product with each query.

    The best come first, and ties in the order of documents.

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
    """Return the positions of the k highest scores, ties in order."""
    k = min(k, len(scores))
    if k < 1:
        return np.empty(0, dtype=np.int64)
    lowest = np.partition(scores, len(scores) - k)[len(scores) - k]
    candidates = np.flatnonzero(scores >= lowest)
    best: np.ndarray = candidates[np.argsort(-scores[candidates], kind="stable")[:k]]
    return best
