"""Fusion: one ranking from a search by words and a search by meaning, and the share of each.

Both scores are scaled to 0 … 1 over the candidates of a query, weighted by their shares, and added. BM25 is scaled from
0, for no shared word, to the best candidate's score. Cosines are scaled from the worst candidate's to the best one's.
The worst is taken from the first 200 candidates of each kind, however many there are. So asking for more documents does
not change the order of the first ones. This fusion beat reciprocal rank fusion on seven of eight collections. Scoring
all documents was hardly better than scoring 200 candidates of each kind (docs/LOG.md).

If the encoder is a transformer, its tokens then reorder the first hits. `hce.training.calibration` chooses the shares;
models and indexes keep them, with the measurements behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from hce.errors import FormatError

if TYPE_CHECKING:
    from hce.search.words import Words  # imports tantivy, which `hce.index.manifest` does not need

CANDIDATE_COUNT = 200  # of each kind, at least; the first 200 set the scale of cosines
SAME = 2e-6  # tolerance of a tie: scores are rounded to six digits before they are compared
TOKENS_FIRST = 50  # hits that tokens reorder; 30 and 100 were as good


class Ranked(NamedTuple):
    """Candidates of a query, best first; a score is the sum of a part from meaning and a part from words.

    If a search is by meaning alone, the parts are the cosine and 0; if by words alone, 0 and the BM25 score.
    """

    numbers: np.ndarray  # (m,), int64
    from_meaning: np.ndarray  # the scaled cosine times the share of meaning, (m,)
    from_words: np.ndarray  # the scaled BM25 score times the share of words, (m,)
    word_passages: np.ndarray  # the passage with the BM25 score, (m,); 0 if the document itself has it

    def best(self, k: int) -> Ranked:
        """Return the first k candidates."""
        return Ranked(*(column[:k] for column in self))


def candidate_count_for(k: int) -> int:
    """Return how many candidates of each kind a search for k documents needs."""
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
    """Search by words, and fuse the result with that of a search by meaning.

    A document that only words found gets its cosine. A document that only meaning found gets its BM25 score if that
    could lift it to the k best, else 0.

    `numbers` and `cosines`, of shape (m,), are the result of the search by meaning, best first. `cosines_at` computes
    the cosines of other documents. The search by words returns up to `candidate_count` documents. If k is None, all
    candidates are ranked, and all get their BM25 scores.
    """
    by_words = words.search(query, candidate_count, allowed)
    place = places_of(by_words.numbers, numbers)
    is_new = place < 0
    place[is_new] = np.arange(len(numbers), len(numbers) + np.count_nonzero(is_new))
    only_words = by_words.numbers[is_new]
    together, cosines = np.concatenate([numbers, only_words]), np.concatenate([cosines, cosines_at(only_words)])
    bm25, word_passages = np.zeros(len(together)), np.zeros(len(together), np.int64)
    bm25[place], word_passages[place] = by_words.scores, by_words.passage_numbers
    first = np.concatenate([np.arange(min(len(numbers), CANDIDATE_COUNT)), place[:CANDIDATE_COUNT]])
    low = float(cosines[first].min(initial=1.0))
    if len(by_words.numbers) == candidate_count:  # if fewer, no other document shares a word
        unknown = np.ones(len(together), bool)
        unknown[place] = False
        if k is not None and k < len(together):
            # A document that words did not find scores at most as much as the last one found. Could that lift it to the
            # k best? Only then look up its score.
            most = words_share * float(by_words.scores[-1]) / bm25.max()
            from_meaning, from_words = _scaled_scores(cosines, bm25, words_share, low)
            kth = np.partition(from_meaning + from_words, -k)[-k]
            unknown &= from_meaning + most >= kth - SAME
        rows = np.flatnonzero(unknown)
        if len(rows):
            again = words.among(query, together[rows])
            found = rows[places_of(again.numbers, together[rows])]
            bm25[found], word_passages[found] = again.scores, again.passage_numbers
    return fuse(together, cosines, bm25, words_share, word_passages, low).best(len(together) if k is None else k)


def places_of(wanted: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return the position of each wanted number; −1 for missing ones."""
    if not len(numbers):
        return np.full(len(wanted), -1)
    order = np.argsort(numbers)
    place = order[np.minimum(np.searchsorted(numbers, wanted, sorter=order), len(numbers) - 1)]
    return np.where(numbers[place] == wanted, place, -1)


def fuse(
    numbers: np.ndarray,
    cosines: np.ndarray,
    bm25: np.ndarray,
    words_share: float,
    word_passages: np.ndarray | None = None,
    low: float | None = None,
) -> Ranked:
    """Rank candidates by both kinds of scores; order ties by number.

    >>> fused = fuse(np.array([7, 8, 9]), np.array([0.9, 0.5, 0.1]), np.array([0.0, 4.0, 2.0]), words_share=0.5)
    >>> fused.numbers, fused.from_meaning, fused.from_words
    (array([8, 7, 9]), array([0.25, 0.5 , 0.  ]), array([0.5 , 0.  , 0.25]))

    All arrays are of shape (m,). A cosine of `low` or less adds nothing; by default, `low` is the worst cosine.
    """
    low = cosines.min(initial=1.0) if low is None else low
    passages = np.zeros(len(numbers), np.int64) if word_passages is None else word_passages
    return _sorted(Ranked(numbers, *_scaled_scores(cosines, bm25, words_share, low), passages))


def by_shares(halves: Ranked, words_share: float) -> Ranked:
    """Rank again, by another share of words, candidates fused with share 0.5."""
    meaning, words = 2 * (1 - words_share) * halves.from_meaning, 2 * words_share * halves.from_words
    return _sorted(halves._replace(from_meaning=meaning, from_words=words))


def _sorted(ranked: Ranked) -> Ranked:
    order = np.lexsort((ranked.numbers, -(ranked.from_meaning + ranked.from_words).round(6)))
    return Ranked(*(column[order] for column in ranked))


def _scaled_scores(
    cosines: np.ndarray, bm25: np.ndarray, words_share: float, low: float
) -> tuple[np.ndarray, np.ndarray]:
    """Scale both kinds of scores to their shares of the sum."""
    from_meaning = (1 - words_share) * _scaled(cosines, low).clip(min=0.0)
    return from_meaning, words_share * _scaled(bm25, 0.0)


def _scaled(scores: np.ndarray, low: float) -> np.ndarray:
    """Scale scores so that `low` gets 0 and the highest 1; 0 if none is above `low`."""
    above = scores.max(initial=low) - low
    return (scores - low) / above if above > 1e-9 else np.zeros(len(scores))


def order_by_tokens(
    numbers: np.ndarray, scores: np.ndarray, similarities: np.ndarray, tokens_share: float
) -> tuple[np.ndarray, np.ndarray]:
    """Reorder the first hits by their tokens; return the order, and what tokens add.

    Ties are ordered by number. The additions are in the order of the hits given.

    >>> hits, scores = np.array([7, 8, 9]), np.array([0.9, 0.5, 0.3])
    >>> order, added = order_by_tokens(hits, scores, np.array([0.1, 0.4, 0.7]), 0.4)
    >>> order, added.round(4)
    (array([0, 1, 2]), array([0. , 0.2, 0.4]))

    `scores` come from meaning and words. `similarities` compare the query's tokens with each text's, see
    `QueryTokens.max_similarities`. All arrays are of shape (m,). The share is from 0 to below 1.
    """
    if not len(scores):
        return np.zeros(0, np.int64), np.zeros(0)
    most = tokens_share / (1 - tokens_share) * np.ptp(scores)
    added = np.asarray(most * _scaled(similarities, similarities.min()))
    return np.lexsort((numbers, -(scores + added).round(6))), added


# ------------------------------------------------------------------------------------------------- shares


Kind = Literal["labeled", "written", "cut", "titles"]
ASKED = {
    "labeled": "held-out queries",
    "written": "remarks of programmers",
    "cut": "titles and first sentences cut out of documents",
    "titles": "titles cut out of documents",
}


class Shares(NamedTuple):
    """How much each part of a search counts, from 0 to 1; `hce.training.calibration` chooses them."""

    words: float  # of BM25 in the sum of words and meaning
    tokens: float = 0.0  # of late interaction in the order of the first hits
    companions: float = 0.0  # of an encoder's companions in the cosine


FIXED = {"table": Shares(0.5), "transformer": Shares(0.25)}
"""The shares that were best on average, for a search without calibration; calibration has to beat them."""


@dataclass(frozen=True)
class Calibration:
    """The chosen shares, and the measurements behind them.

    `ndcg` has the mean nDCG@10 on the questions: of vectors alone, of words alone, of both with the usual shares, and
    of the search after each part was added with its chosen share.
    """

    shares: Shares
    kind: Kind | None = None  # of the questions, see `hce.training.calibration.Questions`; None if there were none
    asked: int = 0  # how many questions there were
    ndcg: dict[str, float] = field(default_factory=dict)
    interval: tuple[float, float] | None = None  # 95 % interval of the gain over the best simpler search
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # each share's values, with nDCG@10

    @classmethod
    def read(cls, values: dict[str, Any]) -> Calibration:
        """Convert the dictionary of `as_dict` back; FormatError if it is damaged."""
        try:
            calibration = cls(**{**values, "shares": Shares(**values["shares"])})
            if all(0 <= share <= 1 for share in calibration.shares):
                return calibration
        except (TypeError, KeyError) as error:
            raise FormatError(f"'calibration' is damaged ({error})") from error
        raise FormatError(f"'calibration' has shares that are not between 0 and 1: {values['shares']}")

    def as_dict(self) -> dict[str, Any]:
        """Return the calibration for JSON."""
        return {**asdict(self), "shares": self.shares._asdict()}

    def summary(self) -> str:
        """Return a sentence about the shares and what the search gains by them.

        >>> print(Calibration(Shares(0.35)).summary())
        words count 0.35 (usual: no questions could be cut out of the documents)
        >>> ndcg = {"vectors": 0.4, "words": 0.3, "both": 0.42, "+ words": 0.43}
        >>> for part in Calibration(Shares(0.25), "cut", 120, ndcg, (-0.01, 0.03)).summary().split(" by "):
        ...     print(part)
        nDCG@10 0.430 (vectors 0.400, words 0.300, both 0.420; 95 % of the gain over these: -0.010 to +0.030)
        120 titles and first sentences cut out of documents; words count 0.25
        """
        counted = ", ".join(f"{name} count {share:.2f}" for name, share in self.shares._asdict().items() if share)
        counted = counted or "vectors alone count"
        if self.kind is None or self.interval is None:
            return f"{counted} (usual: no questions could be cut out of the documents)"
        simple = ", ".join(f"{name} {self.ndcg[name]:.3f}" for name in ("vectors", "words", "both"))
        low, high = self.interval
        gain = f"; 95 % of the gain over these: {low:+.3f} to {high:+.3f}" if high > low else ""
        return f"nDCG@10 {self.value:.3f} ({simple}{gain}) by {self.asked} {ASKED[self.kind]}; {counted}"

    @property
    def value(self) -> float:
        """nDCG@10 of the chosen search."""
        return list(self.ndcg.values())[-1]
