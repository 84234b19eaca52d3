"""Exact search over vectors in memory: what the measures, the demo and every rival of the same encoder are run on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from hce.encoding.encoder import Encoder

SCORES_AT_ONCE = 1 << 26  # floats in a block of the score matrix: 256 MB


class Scored(NamedTuple):
    """A document's id and its score for a query; more is better."""

    id: str
    score: float


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


class DenseSearcher:
    """An encoder and the vectors of a collection, searched exactly."""

    def __init__(self, encoder: Encoder, ids: Sequence[str], vectors: np.ndarray) -> None:
        self.encoder = encoder
        self.ids = ids
        self.vectors = vectors

    def search(self, queries: Sequence[str], k: int) -> list[list[Scored]]:
        """The k nearest documents of each query, best first."""
        scores, numbers = nearest(self.encoder.encode(queries, "query"), self.vectors, k)
        return [
            [Scored(self.ids[number], float(score)) for score, number in zip(*row, strict=True)]
            for row in zip(scores, numbers, strict=True)
        ]
