"""Reciprocal rank fusion (Cormack, Clarke and Büttcher, 2009): what most vector databases fuse by, as a rival.

A document scores 1 / (60 + rank) in each list that it is in; the lists are BM25's and the untrained encoder's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hce.comparison.bm25 import BM25Searcher
from hce.comparison.task import Built, Task, searched_by_vectors
from hce.evaluation.evaluate import Ranked, Searcher
from hce.evaluation.runs import Scored
from hce.search.fusion import candidates_for

OFFSET = 60


class ReciprocalRanks(NamedTuple):
    """Searchers of the same documents, fused by rank."""

    searchers: tuple[Searcher, ...]

    def search(self, queries: Sequence[str], k: int) -> list[list[Scored]]:
        """Find the k documents of each query with the highest sums, best first, equal ones in order of id."""
        found = [searcher.search(queries, candidates_for(k)) for searcher in self.searchers]
        return [fused_by_rank(lists)[:k] for lists in zip(*found, strict=True)]


def fused_by_rank(lists: Iterable[Sequence[Ranked]]) -> list[Scored]:
    """Add up 1 / (60 + rank) over ranked lists.

    >>> [(hit.id, round(hit.score, 4)) for hit in fused_by_rank([[Scored("a", 9), Scored("b", 5)], [Scored("b", 0.7)]])]
    [('b', 0.0325), ('a', 0.0164)]
    """
    sums: dict[str, float] = {}
    for hits in lists:
        for rank, hit in enumerate(hits, start=1):
            sums[hit.id] = sums.get(hit.id, 0.0) + 1 / (OFFSET + rank)
    return [Scored(each, score) for each, score in sorted(sums.items(), key=lambda pair: (-pair[1], pair[0]))]


def build_rrf(task: Task) -> Built:
    """Fuse BM25 and the encoder as given."""
    built = searched_by_vectors(task.load_encoder(), task.corpus)
    start = time.perf_counter()
    words = BM25Searcher.index(task.corpus.ids, task.corpus.texts())
    seconds = built.indexing_seconds + time.perf_counter() - start
    return built._replace(searcher=ReciprocalRanks((built.searcher, words)), indexing_seconds=seconds)
