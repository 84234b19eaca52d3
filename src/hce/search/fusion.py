"""Fusion: one ranking of what words and what meaning found.

Scores of both kinds are scaled to 0 … 1 over the candidates of a query, weighted by their shares, and added. Cosines
are scaled from the worst candidate's to the best one's; BM25 from 0, the score of sharing no word, to the best one's.
The worst is that of the first 200 candidates of each kind, however many are looked at: so whoever asks for more
documents does not get the first ones in another order. That beat reciprocal ranks on seven of eight collections, and
scoring all documents hardly beat scoring 200 candidates of each kind (docs/LOG.md).

Where the encoder is a transformer, its tokens then reorder the first hits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hce.search.words import Words

CANDIDATE_COUNT = 200  # of each kind, at the least; cosines are scaled by these
SAME = 2e-6  # scores are rounded to six digits before they are compared
TOKENS_FIRST = 50  # hits that tokens reorder; 30 and 100 were as good


class Ranked(NamedTuple):
    """Candidates of a query in order, best first; the score of each is the sum of what meaning and words gave.

    Attributes:
        numbers: of the documents, of shape (m,), int64.
        from_meaning: what the cosine gave, scaled to the share of meaning, of shape (m,); in a search by meaning alone,
            the cosine itself; in one by words alone, 0.
        from_words: what BM25 gave, scaled to the share of words, of shape (m,); in a search by words alone, BM25
            itself; in one by meaning alone, 0.
        word_passages: the number of the passage that got the BM25 score, of shape (m,); 0 where the whole document did.
    """

    numbers: np.ndarray
    from_meaning: np.ndarray
    from_words: np.ndarray
    word_passages: np.ndarray

    def best(self, k: int) -> Ranked:
        """Return the first k candidates."""
        return Ranked(*(column[:k] for column in self))


def candidate_count_for(k: int) -> int:
    """Return how many candidates of each kind a search for k documents looks at."""
    return max(CANDIDATE_COUNT, 2 * k)


def search_both(
    words: Words,
    query: str,
    *,
    numbers: np.ndarray,
    cosines: np.ndarray,
    cosines_at: Callable[[np.ndarray], np.ndarray],
    candidate_count: int,
    words_share: float,
    allowed: np.ndarray | None = None,
    k: int | None = None,
) -> Ranked:
    """Fuse what meaning found with what words find.

    A document that words found gets its cosine. A document that only meaning found gets its BM25 score if that could
    bring it among the k best, else 0.

    Args:
        words: of all documents.
        query: a text.
        numbers: of the documents that meaning found, of shape (m,).
        cosines: of these documents, of shape (m,).
        cosines_at: from the numbers of other documents to their cosines.
        candidate_count: how many documents to take from words.
        words_share: the weight of words in the sum, from 0 to 1.
        allowed: search among these numbers only, rising.
        k: how many of the best are wanted; by default all candidates. With k, tantivy is asked again only for the
            candidates that could be among the k best.
    """
    by_words = words.search(query, candidate_count, allowed)
    place, is_new = _places(by_words.numbers, numbers)
    only_words = by_words.numbers[is_new]
    together = np.concatenate([numbers, only_words])
    cosines = np.concatenate([cosines, cosines_at(only_words)])
    bm25, word_passages = np.zeros(len(together)), np.zeros(len(together), np.int64)
    place[is_new] = np.arange(len(numbers), len(together))
    bm25[place], word_passages[place] = by_words.scores, by_words.passage_numbers
    first = np.concatenate([np.arange(min(len(numbers), CANDIDATE_COUNT)), place[:CANDIDATE_COUNT]])
    low = float(cosines[first].min(initial=1.0))
    if len(by_words.numbers) == candidate_count:  # else these are all that share a word
        unknown = np.ones(len(together), bool)
        unknown[place] = False
        ceiling = float(by_words.scores[-1])  # whatever words did not find has no more
        from_meaning, from_words = _scaled_scores(cosines, bm25, words_share, low)
        most = words_share * ceiling / bm25.max()  # which is not 0: the ceiling is a score
        rows = _in_question(from_meaning, from_words, unknown, most, k)
        if len(rows):
            rescored = words.among(query, together[rows])
            found, _ = _places(rescored.numbers, together[rows])
            bm25[rows[found]], word_passages[rows[found]] = rescored.scores, rescored.passage_numbers
    return fuse(together, cosines, bm25, words_share, word_passages, low).best(len(together) if k is None else k)


def by_shares(halves: Ranked, words_share: float) -> Ranked:
    """Rank candidates that were fused half and half by another share of words."""
    from_meaning, from_words = 2 * (1 - words_share) * halves.from_meaning, 2 * words_share * halves.from_words
    order = np.lexsort((halves.numbers, -(from_meaning + from_words).round(6)))
    return Ranked(halves.numbers[order], from_meaning[order], from_words[order], halves.word_passages[order])


def _places(wanted: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the position of each wanted number, and which are missing."""
    if not len(numbers):
        return np.zeros(len(wanted), np.int64), np.ones(len(wanted), bool)
    order = np.argsort(numbers)
    place = order[np.minimum(np.searchsorted(numbers, wanted, sorter=order), len(numbers) - 1)]
    return place, numbers[place] != wanted


def _in_question(
    from_meaning: np.ndarray, from_words: np.ndarray, unknown: np.ndarray, most: float, k: int | None
) -> np.ndarray:
    """Return the rows whose unknown BM25 score could make them k-best.

    That score gives them `most` at the most.
    """
    if k is None or k >= len(unknown):
        return np.flatnonzero(unknown)
    kth = np.partition(from_meaning + from_words, -k)[-k]
    return np.flatnonzero(unknown & (from_meaning + most >= kth - SAME))


def fuse(
    numbers: np.ndarray,
    cosines: np.ndarray,
    bm25: np.ndarray,
    words_share: float,
    word_passages: np.ndarray | None = None,
    low: float | None = None,
) -> Ranked:
    """Rank candidates by both kinds of scores; ties go by number.

    >>> fused = fuse(np.array([7, 8, 9]), np.array([0.9, 0.5, 0.1]), np.array([0.0, 4.0, 2.0]), words_share=0.5)
    >>> fused.numbers, fused.from_meaning, fused.from_words
    (array([8, 7, 9]), array([0.25, 0.5 , 0.  ]), array([0.5 , 0.  , 0.25]))

    Args:
        numbers: of the documents, of shape (m,).
        cosines: of the documents to the query, of shape (m,).
        bm25: the documents' BM25 scores, 0 where no word is shared, of shape (m,).
        words_share: the weight of words in the sum, from 0 to 1.
        word_passages: the numbers of the passages that got the BM25 scores, of shape (m,); by default, none did.
        low: the cosine that gives nothing, as does any below; by default that of the worst candidate.
    """
    low = cosines.min(initial=1.0) if low is None else low
    from_meaning, from_words = _scaled_scores(cosines, bm25, words_share, low)
    order = np.lexsort((numbers, -(from_meaning + from_words).round(6)))
    if word_passages is None:
        word_passages = np.zeros(len(numbers), np.int64)
    return Ranked(numbers[order], from_meaning[order], from_words[order], word_passages[order])


def _scaled_scores(
    cosines: np.ndarray, bm25: np.ndarray, words_share: float, low: float
) -> tuple[np.ndarray, np.ndarray]:
    """Scale both kinds of scores to their shares of the sum."""
    from_meaning = (1 - words_share) * _scaled(cosines, low).clip(min=0.0)
    return from_meaning, words_share * _scaled(bm25, 0.0)


def _scaled(scores: np.ndarray, low: float) -> np.ndarray:
    """Scale scores from `low` … the highest to 0 … 1, or all to 0."""
    above = scores.max(initial=low) - low
    return (scores - low) / above if above > 1e-9 else np.zeros(len(scores))


def given_by_tokens(scores: np.ndarray, similarities: np.ndarray, tokens_share: float) -> np.ndarray:
    """Return what tokens add to the scores of the first hits.

    >>> given_by_tokens(np.array([0.9, 0.5, 0.3]), np.array([0.1, 0.4, 0.7]), 0.4).round(4)
    array([0. , 0.2, 0.4])

    Args:
        scores: by meaning and words, of shape (m,).
        similarities: of the query's tokens to those of each text, of shape (m,); see `QueryTokens.max_similarities`.
        tokens_share: the weight of tokens in the sum, from 0 to below 1.
    """
    if not len(scores):
        return np.zeros(0)
    most = tokens_share / (1 - tokens_share) * np.ptp(scores)
    return np.asarray(most * _scaled(similarities, similarities.min()))


def order_by_tokens(
    numbers: np.ndarray, scores: np.ndarray, similarities: np.ndarray, tokens_share: float
) -> tuple[np.ndarray, np.ndarray]:
    """Find the order of the first hits after tokens; ties go by number.

    Args:
        numbers: of the documents, of shape (m,).
        scores: see `given_by_tokens`, as `similarities`.
        similarities: see `given_by_tokens`.
        tokens_share: see `given_by_tokens`.

    Returns:
        The positions of the hits in the new order, and what tokens add to each in the order that was given.
    """
    added = given_by_tokens(scores, similarities, tokens_share)
    return np.lexsort((numbers, -(scores + added).round(6))), added
