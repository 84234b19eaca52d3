"""Exact search: the k best, with ties ordered by number, in an engine or among plain arrays.

Equal texts have equal vectors, so ties are common, also at the last place. To order such a tie by number, all tied
vectors are needed: more candidates are fetched until one of them is clearly worse than the last one wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

EXTRA_CANDIDATES = 8  # candidates beyond those wanted, to see whether the last place is tied
SLACK = 1e-5  # how much the scores of equal unit vectors may differ in a matrix product
SCORES_AT_ONCE = 1 << 26  # floats in a block of the score matrix: 256 MB


class Found(NamedTuple):
    """The best vectors for each query, best first; equal scores in order of number.

    Attributes:
        numbers: of shape (Q, k), int64; −1 where there are fewer than k vectors.
        scores: of shape (Q, k), float32; −inf there.
    """

    numbers: np.ndarray
    scores: np.ndarray


def nothing(queries: int, k: int) -> Found:
    """Return an empty result: numbers −1 and scores −∞, each of shape (queries, k)."""
    return Found(np.full((queries, k), -1, np.int64), np.full((queries, k), -np.inf, np.float32))


def k_best(candidates: Found, k: int) -> Found:
    """Return each query's k best candidates, ties by number; −1 is no candidate."""
    is_in_order = (candidates.scores[:, 1:] < candidates.scores[:, :-1]).all() and (candidates.numbers >= 0).all()
    if candidates.scores.shape[1] >= k and is_in_order:
        return Found(candidates.numbers[:, :k], candidates.scores[:, :k])  # in order already: no ties
    scores = np.where(candidates.numbers < 0, -np.inf, candidates.scores).astype(np.float32)
    order = np.lexsort((candidates.numbers, -scores), axis=1)[:, :k]
    found = nothing(len(scores), k)
    found.scores[:, : order.shape[1]] = np.take_along_axis(scores, order, axis=1)
    found.numbers[:, : order.shape[1]] = np.take_along_axis(candidates.numbers, order, axis=1)
    return found


def search_exactly(
    fetch: Callable[[np.ndarray, int], Found],
    available: int,
    queries: np.ndarray,
    k: int,
    slack: float = 0.0,
    *,
    wanted: int | None = None,
    score: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
) -> Found:
    """Find the k best of `available` vectors among candidates, ties by number.

    Whether a candidate is ranked depends only on its score, not on excluded vectors or on other queries. Of vectors
    with equal scores, either all are candidates or none.

    Args:
        fetch: returns `count` candidates for each query, best first. A number of −1 marks an excluded one, and a score
            of −∞ the end. `count` is at most `available`; then all are fetched.
        available: how many vectors can be found.
        queries: unit rows of shape (Q, n).
        k: 1 or more.
        slack: how much the scores of equal vectors may differ in `fetch`.
        wanted: how many candidates to rank, k or more; by default k.
        score: returns the final scores of candidates for a query (n,); by default, the scores of `fetch` stay.
    """
    wanted = min(wanted or k, available)
    found, left, count = nothing(len(queries), k), np.arange(len(queries)), wanted + EXTRA_CANDIDATES
    while available and len(left):
        count = min(count, available)
        again = []
        for query, numbers, scores in zip(left.tolist(), *fetch(queries[left], count), strict=True):
            last, there = scores[-1], numbers >= 0
            if not there.all():
                numbers, scores = numbers[there], scores[there]
            least = scores[wanted - 1] - slack if len(numbers) >= wanted else -np.inf
            if least <= last > -np.inf and count < available:
                again.append(query)
                continue
            numbers, scores = numbers[scores >= least], scores[scores >= least]
            if score is not None:
                scores = score(queries[query], numbers)
            order = np.lexsort((numbers, -scores))[:k]
            found.numbers[query, : len(order)] = numbers[order]
            found.scores[query, : len(order)] = scores[order]
        left, count = np.array(again, np.int64), 4 * count
    return found


def inner_products(vectors: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Compute the inner products of rows (m, n) with a query, one by one.

    In a matrix product, rounding can differ between equal rows, depending on their places in a block.
    """
    products: np.ndarray = np.einsum("mn,n->m", vectors, query)
    return products


def score_blocks(queries: np.ndarray, documents: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield slices of queries (Q, n), and their inner products with documents (N, n).

    Slices are as large as memory allows.
    """
    table, at_once = np.asarray(documents).T, max(1, SCORES_AT_ONCE // max(len(documents), 1))
    for start in range(0, len(queries), at_once):
        rows = slice(start, min(start + at_once, len(queries)))
        yield rows, queries[rows] @ table


def nearest(queries: np.ndarray, documents: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the nearest min(k, N) documents of (N, n) for each query of (Q, n).

    The best come first, with ties in the order of documents. Returns positions and scores, of shape (Q, min(k, N)). The
    documents may be mapped.
    """
    import torch  # its topk is by far the fastest; searching an index does not need it

    shape = (len(queries), min(k, len(documents)))
    positions, scores = np.empty(shape, np.int64), np.empty(shape, np.float32)
    for rows, block in score_blocks(queries, documents):
        best, where = (each.numpy() for each in torch.from_numpy(block).topk(shape[1], dim=1))
        order = np.lexsort((where, -best), axis=1)
        scores[rows] = np.take_along_axis(best, order, axis=1)
        positions[rows] = np.take_along_axis(where, order, axis=1)
    return positions, scores
