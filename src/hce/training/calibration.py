"""Calibration: choose how much words, companions and tokens count in a search, for this corpus and this encoder.

Each share starts from what is usual for the kind of encoder. Questions move it: the choice maximizes

    mean nDCG@10 over the questions - pull * sum of (share - usual share)²

How strongly the usual shares pull depends on how far the questions can be trusted. A sentence cut out of a document
shares fewer words with the rest of it than a person's question does, so it favors vectors over words and pulls weakly.
What a programmer wrote about a function is nearly a question. Labels are trusted by their number. docs/LOG.md has the
measurements, with each collection and each encoder left out in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hce.data.corpus import Corpus
from hce.encoding.encoder import Encoder
from hce.encoding.reranker import TokenSpace
from hce.search.fusion import CANDIDATE_COUNT, TOKENS_FIRST, Ranked, by_shares, order_by_tokens, search_both
from hce.search.shares import Calibration, Shares
from hce.search.words import Words
from hce.training.heldout import ndcg_of_rankings
from hce.training.questions import KnownCodes, PoolTokens, Questions, cut_questions, encoded_parts

LADDERS = {
    "companions": (0.0, 0.1, 0.2, 0.3, 0.4),
    "words": (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8),
    "tokens": (0.0, 0.1, 0.2, 0.3, 0.4, 0.5),
}
PULL = {"cut": 1.0, "titles": 1.0, "written": 0.1}
LABELED_PULL = 3.0  # divided by the number of labeled queries
FEW = 200  # questions; of fewer, chance decides more, and the pull grows
ROUNDS = 2  # of choosing each share in turn
# Standard errors by which a simpler search has to be ahead to replace the chosen one. Where people's queries said
# otherwise, cut sentences preferred a simpler search by up to 4.4 standard errors.
HARM = 5.0

Similarities = Callable[[int, np.ndarray], np.ndarray]
"""From a question's place and rows of the pool to how well the question's tokens are met by each, of shape (rows,)."""
VectorsAt = Callable[[float], tuple[np.ndarray, np.ndarray]]
"""From the companions' share to unit rows of the questions, (Q, n), and of the pool, (P, n)."""


def usual_shares(encoder: Encoder, *, companions: bool = False) -> Shares:
    """Return the shares that calibration starts from.

    A table knows less than a transformer, so words count more. The token states of an encoder that averages them carry
    meaning one by one; of an encoder that reads out one state, the others hardly do.
    """
    first = encoder.parts[0]
    if first.is_table:
        return Shares(words=0.5, tokens=0.0, companions=0.2 if companions else 0.0)
    tokens = 0.0
    if first.has_states:
        tokens = 0.4 if any("mean" in str(getattr(module, "pooling_mode", "")) for module in first.model) else 0.1
    return Shares(words=0.35, tokens=tokens, companions=0.3 if companions else 0.0)


def calibrate(
    questions: Questions | None,
    corpus: Corpus,
    vectors_at: VectorsAt,
    usual: Shares,
    *,
    language: str,
    similarities: Similarities | None = None,
) -> Calibration:
    """Choose the shares by questions."""
    usual = usual if similarities else usual._replace(tokens=0.0)
    if questions is None:
        return Calibration(usual._replace(companions=0.0))
    evidence = _Evidence(questions, questions.pool_texts(corpus), vectors_at, language, similarities)
    free = [name for name in LADDERS if getattr(usual, name) > 0]
    if questions.kind == "written":  # spans of programs teach companions little: they start from nothing
        usual = usual._replace(companions=0.0)
    chosen = usual._replace(companions=0.0) if questions.kind == "titles" else _best(evidence, questions, usual, free)
    simpler = {
        "vectors": Shares(0.0),
        "words": Shares(1.0),
        "both": usual._replace(companions=0.0, tokens=0.0),
    }
    chosen = _without_harm(evidence, chosen, list(simpler.values()))
    steps = {
        "+ words": chosen._replace(companions=0.0, tokens=0.0),
        "+ companions": chosen._replace(tokens=0.0),
        "+ tokens": chosen,
    }
    shown = {name: shares for name, shares in steps.items() if name == "+ words" or getattr(chosen, name[2:])}
    best = max(simpler.values(), key=evidence.mean)
    return Calibration(
        chosen,
        questions.kind,
        len(questions.texts),
        {name: evidence.mean(shares) for name, shares in {**simpler, **shown}.items()},
        _interval(evidence.ndcg(chosen) - evidence.ndcg(best)),
        {name: [(x, evidence.mean(chosen._replace(**{name: x}))) for x in LADDERS[name]] for name in free},
    )


def calibrate_unlabeled(
    corpus: Corpus,
    encoder: Encoder,
    vectors: np.ndarray,
    language: str,
    *,
    space: TokenSpace | None = None,
    known: KnownCodes | None = None,
) -> Calibration:
    """Choose how much words and tokens count in a search of this corpus, by questions cut out of some documents."""
    questions = cut_questions(corpus, seed=0)
    usual = usual_shares(encoder)
    if questions is None:
        usual = usual if space else usual._replace(tokens=0.0)
        return Calibration(usual)
    tokens = None
    if space is not None:
        tokens = PoolTokens(encoder, space, questions, questions.pool_texts(corpus), known)
    parts = encoded_parts(questions, corpus, [encoder], vectors[questions.pool], tokens)
    similarities = tokens.similarities if tokens else None
    return calibrate(questions, corpus, lambda share: parts[0], usual, language=language, similarities=similarities)


class _Evidence:
    """nDCG@10 of the questions by shares, each set of shares computed once."""

    def __init__(
        self,
        questions: Questions,
        pool_texts: Sequence[str],
        vectors_at: VectorsAt,
        language: str,
        similarities: Similarities | None,
    ) -> None:
        self._questions, self._vectors_at, self._similarities = questions, vectors_at, similarities
        self._words = Words.new(language)
        self._words.add(enumerate(pool_texts))
        self._ranked: dict[float, list[Ranked]] = {}
        self._ndcg: dict[Shares, np.ndarray] = {}
        self._met: list[dict[int, float]] = [{} for _ in questions.texts]

    def mean(self, shares: Shares) -> float:
        """Return mean nDCG@10."""
        return float(self.ndcg(shares).mean())

    def ndcg(self, shares: Shares) -> np.ndarray:
        """Return nDCG@10 of each question, of shape (Q,)."""
        if shares not in self._ndcg:
            rankings = [self._order(place, each, shares) for place, each in enumerate(self._fused(shares.companions))]
            self._ndcg[shares] = ndcg_of_rankings(rankings, self._questions.answers)
        return self._ndcg[shares]

    def _fused(self, companions: float) -> list[Ranked]:
        """Return each question's candidates with both scores, halves of each."""
        if companions not in self._ranked:
            query_vectors, pool_vectors = self._vectors_at(companions)
            count = min(CANDIDATE_COUNT, len(pool_vectors))
            rows = []
            for text, vector in zip(self._questions.texts, query_vectors, strict=True):
                cosines = pool_vectors @ vector
                nearest = np.argpartition(-cosines, count - 1)[:count]
                nearest = nearest[np.lexsort((nearest, -cosines[nearest]))]
                rows.append(
                    search_both(
                        *(self._words, text),
                        numbers=nearest,
                        cosines=cosines[nearest],
                        cosines_at=cosines.__getitem__,
                        candidate_count=CANDIDATE_COUNT,
                        words_share=0.5,
                    )
                )
            self._ranked[companions] = rows
        return self._ranked[companions]

    def _order(self, place: int, halves: Ranked, shares: Shares) -> np.ndarray:
        """Return rows of the pool in the order that these shares give."""
        ranked = by_shares(halves, shares.words)
        if not shares.tokens:
            return ranked.numbers
        first = ranked.best(TOKENS_FIRST)
        scores = first.from_meaning + first.from_words
        order, _ = order_by_tokens(first.numbers, scores, self._similar(place, first.numbers), shares.tokens)
        return np.concatenate([first.numbers[order], ranked.numbers[len(order) :]])

    def _similar(self, place: int, rows: np.ndarray) -> np.ndarray:
        known = self._met[place]
        unknown = np.array([row for row in rows.tolist() if row not in known], np.int64)
        if len(unknown) and self._similarities is not None:
            known.update(zip(unknown.tolist(), self._similarities(place, unknown).tolist(), strict=True))
        return np.array([known[row] for row in rows.tolist()])


def _best(evidence: _Evidence, questions: Questions, usual: Shares, free: Sequence[str]) -> Shares:
    """Choose each free share in turn, the others fixed; of equal ones, the nearest to the usual."""
    asked = len(questions.texts)
    pull = LABELED_PULL / asked if questions.kind == "labeled" else PULL[questions.kind] * max(1.0, FEW / asked)

    def value(shares: Shares) -> float:
        away = sum((getattr(shares, name) - getattr(usual, name)) ** 2 for name in free)
        return round(evidence.mean(shares) - pull * away, 6)

    chosen = usual
    for name in [*free] * ROUNDS:
        near = sorted(LADDERS[name], key=lambda share, name=name: abs(share - getattr(usual, name)))  # type: ignore[misc]
        chosen = max([chosen, *(chosen._replace(**{name: share}) for share in near)], key=value)
    return chosen


def _without_harm(evidence: _Evidence, chosen: Shares, simpler: Sequence[Shares]) -> Shares:
    """Return the best of the simpler searches if it is ahead of the chosen one beyond doubt, else the chosen one."""
    best = max(simpler, key=evidence.mean)
    ahead = evidence.ndcg(best) - evidence.ndcg(chosen)
    error = ahead.std(ddof=1) / np.sqrt(len(ahead)) if len(ahead) > 1 else np.inf
    return best if ahead.mean() > HARM * error and ahead.mean() > 0 else chosen


def _interval(differences: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of a mean difference."""
    mean = float(differences.mean())
    error = float(differences.std(ddof=1) / np.sqrt(len(differences))) if len(differences) > 1 else 0.0
    return mean - 1.96 * error, mean + 1.96 * error
