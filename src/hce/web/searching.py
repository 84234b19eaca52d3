"""A search as the page shows it: hits with passages and marks, and beside them the untrained encoder's ranking."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hce.index.filters import parse_clauses
from hce.index.hits import Hit
from hce.index.index import Index
from hce.web.answers import Before, SearchAnswer, Shown
from hce.web.passages import best_passage, marks_in, query_words
from hce.web.untrained import Ranking, Untrained


def answer_search(
    index: Index,
    untrained: Untrained,
    query: str,
    vector: np.ndarray,
    k: int,
    where: Sequence[str],
    compare: bool,
) -> SearchAnswer:
    """Search, and rank by the untrained encoder too if asked and if that is ready.

    Args:
        index: what is searched.
        untrained: what is compared with.
        query: the text.
        vector: its vector by the index's encoder, of shape (n,).
        k: how many documents.
        where: conditions on metadata.
        compare: whether to compare.

    Raises:
        InputError: a condition is none.
    """
    start = time.perf_counter()
    conditions = parse_clauses(where) if where else None
    (found,) = index.search_vectors(vector[None], k, conditions)
    took = round(1000 * (time.perf_counter() - start), 2)
    words = query_words(query)
    hits = [shown(hit, words) for hit in found]
    before = None
    if compare:
        readiness = untrained.readiness()
        before = Before(readiness, [])
        if readiness.state == "ready":
            ranking = untrained.rank(query, conditions)
            hits = _with_ranks(index, hits, ranking)
            before = Before(readiness, _first(index, ranking, k, words))
    return SearchAnswer(query, k, took, hits, before)


def shown(hit: Hit, words: re.Pattern[str] | None) -> Shown:
    """A hit with the passage that answers."""
    passage = best_passage(hit.text, words)
    return Shown(
        rank=hit.rank,
        score=hit.score,
        id=hit.id,
        title=hit.title,
        title_marks=marks_in(hit.title, words),
        passage=passage.text,
        passage_start=passage.start,
        passage_is_whole=passage.whole,
        passage_marks=passage.marks,
        metadata=hit.metadata,
    )


def _with_ranks(index: Index, hits: list[Shown], ranking: Ranking) -> list[Shown]:
    """Hits with their ranks by the untrained encoder."""
    with index.reading() as reader:
        present = reader.present(hit.id for hit in hits)
    numbers = np.array([present[hit.id][0] if hit.id in present else -1 for hit in hits], dtype=np.int64)
    return [replace(hit, before=rank) for hit, rank in zip(hits, ranking.ranks_of(numbers), strict=True)]


def _first(index: Index, ranking: Ranking, k: int, words: re.Pattern[str] | None) -> list[Shown]:
    best = ranking.first(k)
    with index.reading() as reader:
        documents = reader.documents(number for number, _ in best)
    hits = []
    for rank, (number, score) in enumerate(best, start=1):
        if number in documents:  # else it was removed this moment
            document = documents[number]
            hits.append(Hit(rank, score, document.id, document.title, document.text, document.metadata))
    return [shown(hit, words) for hit in hits]
