"""Fusion: one ranking of what words and what meaning found.

Scores of both kinds are scaled to 0 … 1 over the candidates of a query and added, words by their share: cosines from
the worst candidate's to the best one's, BM25 from 0, which is what sharing no word scores, to the best one's. That
beat reciprocal ranks on seven of eight collections, and full scores of all documents hardly beat those of 200
candidates of each kind (docs/LOG.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hce.search.words import Words

CANDIDATES = 200  # of each kind, at the least
STATIC_SHARE, TRANSFORMER_SHARE = 0.5, 0.25  # of words: a static encoder knows less by itself


class Fused(NamedTuple):
    """Candidates of a query in order, best first; the score of each is the sum of its two parts.

    Attributes:
        numbers: of the documents, of shape (m,), int64.
        meaning: the part of the dense score, of shape (m,).
        words: the part of BM25, of shape (m,).
    """

    numbers: np.ndarray
    meaning: np.ndarray
    words: np.ndarray

    def best(self, k: int) -> Fused:
        """Return the first k candidates."""
        return Fused(*(column[:k] for column in self))


def candidates_for(k: int) -> int:
    """Return how many candidates of each kind a search for k documents looks at."""
    return max(CANDIDATES, 2 * k)


def search_both(
    words: Words,
    text: str,
    vector: np.ndarray,
    *,
    numbers: np.ndarray,
    cosines: np.ndarray,
    vectors_at: Callable[[np.ndarray], np.ndarray],
    candidates: int,
    words_share: float,
    allowed: np.ndarray | None = None,
) -> Fused:
    """Fuse what meaning found with what words find; each candidate gets both its scores.

    Args:
        words: of all documents.
        text: the query.
        vector: its vector, of shape (n,).
        numbers: of the documents that meaning found, of shape (m,).
        cosines: of these documents, of shape (m,).
        vectors_at: from numbers to the vectors of documents.
        candidates: how many to take from words.
        words_share: of words in the sum, from 0 to 1.
        allowed: search among these numbers only, rising.
    """
    matches = words.search(text, candidates, allowed)
    only_words, only_meaning = np.setdiff1d(matches.numbers, numbers), np.setdiff1d(numbers, matches.numbers)
    together = np.concatenate([numbers, only_words])
    meaning = np.concatenate([cosines, vectors_at(only_words) @ vector])
    bm25 = dict(zip(matches.numbers.tolist(), matches.scores.tolist(), strict=True))
    if len(matches.numbers) == candidates:  # else these are all that share a word
        bm25 |= zip(only_meaning.tolist(), words.scores(text, only_meaning).tolist(), strict=True)
    return fuse(together, meaning, np.array([bm25.get(number, 0.0) for number in together.tolist()]), words_share)


def fuse(numbers: np.ndarray, meaning: np.ndarray, words: np.ndarray, words_share: float) -> Fused:
    """Rank candidates by both kinds of scores; ties go by number.

    >>> fuse(np.array([7, 8, 9]), np.array([0.9, 0.5, 0.1]), np.array([0.0, 4.0, 2.0]), words_share=0.5)
    Fused(numbers=array([8, 7, 9]), meaning=array([0.25, 0.5 , 0.  ]), words=array([0.5 , 0.  , 0.25]))

    Args:
        numbers: of the documents, of shape (m,).
        meaning: their cosines, of shape (m,).
        words: their BM25 scores, 0 where no word is shared, of shape (m,).
        words_share: of words in the sum, from 0 to 1.
    """
    from_meaning = (1 - words_share) * _scaled(meaning, meaning.min(initial=1.0))
    from_words = words_share * _scaled(words, 0.0)
    order = np.lexsort((numbers, -(from_meaning + from_words).round(6)))
    return Fused(numbers[order], from_meaning[order], from_words[order])


def _scaled(scores: np.ndarray, low: float) -> np.ndarray:
    """Scale scores to 0 … 1 from `low` up; where none is above it they say nothing, and become 0."""
    above = scores.max(initial=low) - low
    return (scores - low) / above if above > 1e-9 else np.zeros(len(scores))
