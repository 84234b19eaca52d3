"""Calibration: choose how much words, companions and tokens count in a search, for this corpus and this encoder.

Each kind of encoder has usual shares. Questions move the shares away from these; the choice maximizes

    mean nDCG@10 over the questions - pull * sum of (share - usual share)²

The questions are labeled queries, if there are any, else sentences cut out of the documents. A document is searched
without the question cut out of it, so that the question does not find itself. The pull is strong for questions that
differ from people's. A sentence shares fewer words with the rest of its document than people's questions share with
their answers. So cut sentences favor vectors over words, and the pull is 1. A programmer's remark about a function is
nearly a question, and the pull is 0.1. For labeled queries, the pull is 3 divided by their number. docs/LOG.md has
the measurements of these pulls, with each collection and each encoder left out in turn.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from hce.data.corpus import Corpus
from hce.data.text import Document, cut_span
from hce.encoding.encoder import Encoder
from hce.encoding.reranker import QueryTokens, TokenSpace
from hce.encoding.tables import joined_rows
from hce.search.fusion import (
    CANDIDATE_COUNT,
    TOKENS_FIRST,
    Calibration,
    Kind,
    Ranked,
    Shares,
    by_shares,
    order_by_tokens,
    search_both,
)
from hce.search.words import Words
from hce.training.pairs import first_sentence_of, ndcg_of_rankings, with_random_others

LADDERS = {
    "companions": (0.0, 0.1, 0.2, 0.3, 0.4),
    "words": (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8),
    "tokens": (0.0, 0.1, 0.2, 0.3, 0.4, 0.5),
}
PULL = {"cut": 1.0, "titles": 1.0, "written": 0.1}
LABELED_PULL = 3.0  # divided by the number of labeled queries
FEW = 200  # questions; with fewer, chance decides more, so the pull grows
ROUNDS = 2  # each chooses every share in turn
# A simpler search replaces the chosen one if it is ahead by this many standard errors. Cut sentences have preferred a
# simpler search by up to 4.4 standard errors where people's queries did not.
HARM = 5.0

MOST_ASKED = 300  # documents to cut questions from; the rest of each is encoded again
LEAST_ASKED = 10
LEAST_PART = {"written": 0.5, "cut": 0.25, "titles": 0.0}  # share of documents that must give a question of this kind
LEAST_WORDS = 24  # a text without sentences needs this many, for its first words to be a question
POOL = 8192  # documents that are searched
# A docstring or a comment in a program.
REMARK = re.compile(
    r'"""(.+?)"""|\'\'\'(.+?)\'\'\'|/\*+(.+?)\*/|((?:^[ \t]*(?:#|//)[^\n]*\n)+)', re.DOTALL | re.MULTILINE
)
MARKS = re.compile(r"^[ \t]*(?:#+|//+|\*)", re.MULTILINE)

KnownCodes = Callable[[list[str]], Mapping[str, np.ndarray]]
"""From texts to the token codes of those that have kept codes."""

# ------------------------------------------------------------------------------------------------- questions


@dataclass(frozen=True)
class Questions:
    """Questions, and the pool of documents to search for answers.

    The kind "labeled" means people's queries; "written" means remarks cut out of programs. "cut" means first sentences
    and titles cut out of their documents; "titles" means only titles, because the documents are too short to cut.
    """

    kind: Kind
    texts: list[str]
    answers: list[np.ndarray]  # for each question, the rows of the pool that answer it
    pool: np.ndarray  # corpus positions of the documents to search, rising
    changed: dict[int, str]  # by row of the pool, the text left after a question was cut out

    def pool_texts(self, corpus: Corpus) -> list[str]:
        """Return the texts that are searched."""
        return [self.changed.get(row, corpus[position].full_text) for row, position in enumerate(self.pool.tolist())]


class Cut(NamedTuple):
    """The questions cut out of a document, and the rest of its text."""

    questions: list[str]
    rest: str


def cut_questions(corpus: Corpus, seed: int, among: np.ndarray | None = None) -> Questions | None:
    """Cut questions out of some documents; None if documents are few or short.

    `among` has the positions of the documents to choose from, such as those held out of training; by default all.
    """
    positions = np.arange(len(corpus)) if among is None or not len(among) else among
    # Cut questions out of at most a tenth of the documents (20 of a small corpus), so that the pool hardly changes.
    count = min(len(positions), MOST_ASKED, max(2 * LEAST_ASKED, len(corpus) // 10))
    asked = np.sort(np.random.default_rng([seed, 19]).choice(positions, count, replace=False))
    pool = with_random_others(len(corpus), asked, POOL, [seed, 17])
    titles = Counter(corpus[position].title.strip() for position in pool.tolist())
    texts = Counter(corpus[position].full_text for position in pool.tolist())
    documents = zip(np.searchsorted(pool, asked).tolist(), map(corpus.__getitem__, asked.tolist()), strict=True)
    unique = [(row, each) for row, each in documents if texts[each.full_text] == 1]
    ways: dict[Kind, Callable[[Document, Counter[str]], Cut | None]] = {  # the most trusted kind first
        "written": lambda document, titles: remark_of(document),
        "cut": _sentence_and_title,
        "titles": _title_alone,
    }
    for kind, way in ways.items():
        cuts = [(row, cut) for row, each in unique if (cut := way(each, titles))]
        if len(cuts) >= max(LEAST_ASKED, LEAST_PART[kind] * len(unique)):
            texts_of_all = [text for _, cut in cuts for text in cut.questions]
            answers = [np.array([row]) for row, cut in cuts for _ in cut.questions]
            return Questions(kind, texts_of_all, answers, pool, {row: cut.rest for row, cut in cuts})
    return None


def remark_of(document: Document) -> Cut | None:
    r"""Cut out the first comment, and ask its first sentence; None without a comment.

    >>> remark_of(Document("a", "/* Add one to a number. Slow. */ int f(int x) { return x + 1; }"))
    Cut(questions=['Add one to a number.'], rest='int f(int x) { return x + 1; }')
    """
    found = REMARK.search(document.text)
    if found is None:
        return None
    remark = " ".join(MARKS.sub("", next(filter(None, found.groups()))).split())
    sentence = re.split(r"(?<=[.!?])\s+", remark, maxsplit=1)[0]
    rest = f"{document.title} {document.text[: found.start()]}{document.text[found.end() :]}".strip()
    return Cut([sentence], rest) if len(sentence.split()) >= 3 and len(rest.split()) >= 5 else None


def _sentence_and_title(document: Document, titles: Counter[str]) -> Cut | None:
    """Ask the first sentence, or a long text's first words, and a unique title."""
    text, title = document.text.strip(), document.title.strip()
    span, count = first_sentence_of(document), len(text.split())
    if span is None and count >= LEAST_WORDS:
        span = cut_span(text, min(12, count // 3), 0.0)
    if span is None:
        return None
    return Cut([span.inside, *([title] if title and titles[title] == 1 else [])], span.outside)


def _title_alone(document: Document, titles: Counter[str]) -> Cut | None:
    title, text = document.title.strip(), document.text.strip()
    return Cut([title], text) if title and text and titles[title] == 1 else None


# ------------------------------------------------------------------------------------------------- encoded questions


class Part(NamedTuple):
    """One encoder's unit vectors of the questions, (Q, n), and of the pool, (P, n); a companion may give zeros."""

    queries: np.ndarray
    pool: np.ndarray


class PoolTokens:
    """Tokens of the questions and of the pool's texts, collected while these are encoded.

    `known` returns token codes that were kept earlier.
    """

    def __init__(
        self, encoder: Encoder, space: TokenSpace, questions: Questions, corpus: Corpus, known: KnownCodes | None = None
    ) -> None:
        self._encoder, self._space, self._known = encoder, space, known or (lambda texts: {})
        self._questions, self._texts = questions, questions.pool_texts(corpus)
        self._wanted = frozenset(self._texts)
        self._codes: dict[str, np.ndarray] = {}
        self._queries: dict[str, QueryTokens] = {}

    @classmethod
    def of(cls, encoder: Encoder, corpus: Corpus, questions: Questions | None) -> PoolTokens | None:
        """Return an empty collection of tokens; None without token states or questions."""
        space = TokenSpace.fit(encoder, corpus) if questions is not None and encoder.has_states else None
        return None if space is None or questions is None else cls(encoder, space, questions, corpus)

    def keep_text(self, text: str, ids: np.ndarray, states: Tensor) -> None:
        """Keep the tokens of an encoded text, if it is in the pool."""
        if text in self._wanted:
            self._codes[text] = self._space.codes(states)

    def keep_query(self, text: str, ids: np.ndarray, states: Tensor) -> None:
        """Keep the tokens of a question."""
        self._queries[text] = self._space.query(ids, states)

    def similarities(self, place: int, rows: np.ndarray) -> np.ndarray:
        """Return how well rows of the pool match a question's tokens, of shape (rows,)."""
        texts = [self._texts[row] for row in rows.tolist()]
        if missing := [text for text in texts if text not in self._codes]:
            self._codes.update(self._known(missing))
        if missing := [text for text in missing if text not in self._codes]:
            self._encoder.encode(missing, on_tokens=self.keep_text)
        none = np.zeros((0, self._space.basis.shape[1]), np.int8)
        query = self._queries[self._questions.texts[place]]
        return query.max_similarities([self._codes.get(text, none) for text in texts])


def encoded_parts(
    questions: Questions | None,
    corpus: Corpus,
    encoders: Sequence[Encoder],
    pool_vectors: np.ndarray,
    tokens: PoolTokens | None = None,
) -> list[Part]:
    """Encode questions and changed texts; companions encode the entire pool.

    `pool_vectors` are the encoder's vectors of the pool's full texts, of shape (P, n). `tokens` collects the tokens of
    the questions and of the changed texts.
    """
    if questions is None:
        return []
    first, *companions = encoders
    pool_vectors = np.array(pool_vectors, np.float32)
    if questions.changed:
        changed = first.encode(list(questions.changed.values()), on_tokens=tokens.keep_text if tokens else None)
        pool_vectors[list(questions.changed)] = changed
    queries = first.encode(questions.texts, "query", on_tokens=tokens.keep_query if tokens else None)
    parts = [Part(queries, pool_vectors)]
    texts = questions.pool_texts(corpus) if companions else []
    for each in companions:  # zeros: a companion may know no word of a text
        parts.append(Part(each.encode(questions.texts, "query", zeros=True), each.encode(texts, zeros=True)))
    return parts


# ------------------------------------------------------------------------------------------------- shares


def usual_shares(encoder: Encoder, *, companions: bool = False) -> Shares:
    """Return the shares that calibration starts from.

    A table knows less than a transformer, so words count more next to it. If an encoder averages its token states, each
    state carries meaning, so tokens count much. If it reads out one state, the others carry little.
    """
    first = encoder.parts[0]
    if first.is_table:
        return Shares(words=0.5, tokens=0.0, companions=0.2 if companions else 0.0)
    tokens = 0.0
    if first.has_states:
        tokens = 0.4 if any("mean" in str(getattr(module, "pooling_mode", "")) for module in first.model) else 0.1
    return Shares(words=0.35, tokens=tokens, companions=0.3 if companions else 0.0)


def divided(share: float, companions: int) -> list[float]:
    """Return each part's share; a token table counts twice as much as a word table."""
    if not share:
        return [1.0] + [0.0] * companions
    weights = [2, 1] if companions == 2 else [1] * companions
    return [1 - share, *(share * weight / sum(weights) for weight in weights)]


def calibrate(
    questions: Questions | None,
    corpus: Corpus,
    parts: Sequence[Part],
    usual: Shares,
    *,
    language: str,
    centers: np.ndarray | None = None,
    tokens: PoolTokens | None = None,
) -> Calibration:
    """Choose shares by questions; without any, keep the usual ones, companions at 0.

    `parts` hold the vectors by the encoder and by each companion. `centers`, (2, n), are the encoder's mean question
    and its mean document.
    """
    usual = usual if tokens else usual._replace(tokens=0.0)
    alone = usual._replace(companions=0.0)
    if questions is None:
        return Calibration(alone)
    evidence = _Evidence(questions, questions.pool_texts(corpus), parts, language, centers, tokens)
    free = [name for name in LADDERS if getattr(usual, name) > 0]
    if questions.kind == "written":  # programs teach companions little, so companions start at share 0
        usual = alone
    chosen = alone if questions.kind == "titles" else _best(evidence, questions, usual, free)
    simpler = {"vectors": Shares(0.0), "words": Shares(1.0), "both": alone._replace(tokens=0.0)}
    best = max(simpler.values(), key=evidence.mean)
    ahead = evidence.ndcg(best) - evidence.ndcg(chosen)
    if ahead.mean() > 0 and len(ahead) > 1 and ahead.mean() > HARM * _error(ahead):  # beyond doubt
        chosen = best
    shown = {"+ words": chosen._replace(companions=0.0, tokens=0.0)}
    if chosen.companions:
        shown["+ companions"] = chosen._replace(tokens=0.0)
    if chosen.tokens:
        shown["+ tokens"] = chosen
    gain = evidence.ndcg(chosen) - evidence.ndcg(best)
    return Calibration(
        chosen,
        questions.kind,
        len(questions.texts),
        {name: evidence.mean(shares) for name, shares in {**simpler, **shown}.items()},
        (float(gain.mean()) - 1.96 * _error(gain), float(gain.mean()) + 1.96 * _error(gain)),
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
    """Choose the shares of words and tokens by questions cut out of the documents.

    `vectors` are those of the documents, of shape (N, n). Without a `space`, tokens get no share; `known` returns token
    codes that were kept earlier.
    """
    questions, usual = cut_questions(corpus, seed=0), usual_shares(encoder)
    if questions is None:
        return Calibration(usual if space else usual._replace(tokens=0.0))
    tokens = PoolTokens(encoder, space, questions, corpus, known) if space else None
    parts = encoded_parts(questions, corpus, [encoder], vectors[questions.pool], tokens)
    return calibrate(questions, corpus, parts, usual, language=language, tokens=tokens)


class _Evidence:
    """nDCG@10 of the questions for any shares; each set of shares is computed once."""

    def __init__(
        self,
        questions: Questions,
        pool_texts: Sequence[str],
        parts: Sequence[Part],
        language: str,
        centers: np.ndarray | None,
        tokens: PoolTokens | None,
    ) -> None:
        self._questions, self._parts, self._tokens = questions, parts, tokens
        self._centers = (None, None) if centers is None else centers
        self._words = Words.new(language)
        self._words.add(enumerate(pool_texts))
        self._ranked: dict[float, list[Ranked]] = {}
        self._ndcg: dict[Shares, np.ndarray] = {}
        self._met: list[dict[int, float]] = [{} for _ in questions.texts]

    def mean(self, shares: Shares) -> float:
        return float(self.ndcg(shares).mean())

    def ndcg(self, shares: Shares) -> np.ndarray:
        """Return nDCG@10 of each question, of shape (Q,)."""
        if shares not in self._ndcg:
            rankings = [self._order(place, each, shares) for place, each in enumerate(self._fused(shares.companions))]
            self._ndcg[shares] = ndcg_of_rankings(rankings, self._questions.answers)
        return self._ndcg[shares]

    def _fused(self, companions: float) -> list[Ranked]:
        """Return each question's candidates, scored half by meaning and half by words."""
        if companions not in self._ranked:
            query_vectors, pool_vectors = self._joined(companions)
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

    def _joined(self, companions: float) -> Part:
        """Join the parts' vectors as `Encoder.beside` does."""
        if not companions:
            return self._parts[0]
        shares, (query_center, document_center) = divided(companions, len(self._parts) - 1), self._centers
        queries = joined_rows([part.queries for part in self._parts], shares, query_center)
        return Part(queries, joined_rows([part.pool for part in self._parts], shares, document_center))

    def _order(self, place: int, halves: Ranked, shares: Shares) -> np.ndarray:
        """Rank a question's candidates by these shares."""
        ranked = by_shares(halves, shares.words)
        if not shares.tokens or self._tokens is None:
            return ranked.numbers
        first, known = ranked.best(TOKENS_FIRST), self._met[place]
        unknown = np.array([row for row in first.numbers.tolist() if row not in known], np.int64)
        if len(unknown):
            known.update(zip(unknown.tolist(), self._tokens.similarities(place, unknown).tolist(), strict=True))
        similar = np.array([known[row] for row in first.numbers.tolist()])
        order, _ = order_by_tokens(first.numbers, first.from_meaning + first.from_words, similar, shares.tokens)
        return np.concatenate([first.numbers[order], ranked.numbers[len(order) :]])


def _best(evidence: _Evidence, questions: Questions, usual: Shares, free: Sequence[str]) -> Shares:
    """Choose each share in `free` in turn: the best; in a tie, the most usual."""
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


def _error(differences: np.ndarray) -> float:
    """Return the standard error of a mean difference."""
    return float(differences.std(ddof=1) / np.sqrt(len(differences))) if len(differences) > 1 else 0.0
