"""Questions to calibrate a search by: people's own where there are labels, else sentences cut out of the documents.

Each document that is asked about stands in the pool with the question cut out, so the question does not find itself.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from hce.data.corpus import Corpus
from hce.data.documents import Document
from hce.data.text import Span, cut_span
from hce.encoding.encoder import Encoder
from hce.encoding.reranker import QueryTokens, TokenSpace
from hce.encoding.tables import joined_rows
from hce.search.shares import Kind
from hce.training.heldout import DevSet, first_sentence_of, with_random_others

MOST_ASKED = 300  # documents; each is encoded once more
LEAST_ASKED = 10
LEAST_PART = {"written": 0.5, "cut": 0.25, "titles": 0.0}  # of the documents, from which on a kind stands for them
LEAST_WORDS = 24  # of a text without sentences whose first words are cut
POOL = 8192  # documents that are searched
# A quoted text or a comment in a program, which says in words what the code does.
REMARK = re.compile(
    r'"""(.+?)"""|\'\'\'(.+?)\'\'\'|/\*+(.+?)\*/|((?:^[ \t]*(?:#|//)[^\n]*\n)+)', re.DOTALL | re.MULTILINE
)
MARKS = re.compile(r"^[ \t]*(?:#+|//+|\*)", re.MULTILINE)


@dataclass(frozen=True)
class Questions:
    """Questions and the pool of documents that is searched for their answers.

    Attributes:
        kind: "labeled": people's queries; "written": what people wrote about a program, cut out of it; "cut": titles
            and first sentences, cut out of their document; "titles": titles alone, of documents too short to cut.
        texts: the questions.
        answers: for each question the rows of the pool that answer it.
        pool: positions in the corpus of the documents that are searched, rising.
        changed: by row of the pool, the text of a document that a question was cut out of.
    """

    kind: Kind
    texts: list[str]
    answers: list[np.ndarray]
    pool: np.ndarray
    changed: dict[int, str]

    def pool_texts(self, corpus: Corpus) -> list[str]:
        """Return the texts that are searched."""
        return [self.changed.get(row, corpus[position].full_text) for row, position in enumerate(self.pool.tolist())]


class Cut(NamedTuple):
    """What one document is asked by, and what is left of it."""

    questions: list[str]
    rest: str


def labeled_questions(devset: DevSet) -> Questions:
    """Return people's queries with their pool."""
    queries = devset.panel[0]
    return Questions("labeled", queries.texts, queries.answers, devset.pool, {})


def cut_questions(corpus: Corpus, seed: int, among: np.ndarray | None = None) -> Questions | None:
    """Cut questions out of some documents; return None if the documents are too few or too short."""
    asked = _some_of(np.arange(len(corpus)) if among is None or not len(among) else among, len(corpus), seed)
    pool = with_random_others(len(corpus), asked, POOL, [seed, 17])
    rows = np.searchsorted(pool, asked).tolist()
    documents = [corpus[position] for position in asked.tolist()]
    titles = Counter(corpus[position].title.strip() for position in pool.tolist())
    texts = Counter(corpus[position].full_text for position in pool.tolist())
    unique = [(row, each) for row, each in zip(rows, documents, strict=True) if texts[each.full_text] == 1]
    for kind, cuts in _ways(unique, titles):
        if len(cuts) >= max(LEAST_ASKED, LEAST_PART[kind] * len(unique)):
            asked_by = [(text, row) for row, cut in cuts for text in cut.questions]
            return Questions(
                kind,
                [text for text, _ in asked_by],
                [np.array([row]) for _, row in asked_by],
                pool,
                {row: cut.rest for row, cut in cuts},
            )
    return None


def _ways(documents: list[tuple[int, Document]], titles: Counter[str]) -> Iterator[tuple[Kind, list[tuple[int, Cut]]]]:
    """Yield each kind of question with what it makes of the documents, the most trusted kind first."""
    yield "written", [(row, cut) for row, each in documents if (cut := remark_of(each))]
    yield "cut", [(row, cut) for row, each in documents if (cut := _sentence_and_title(each, titles))]
    yield "titles", [(row, cut) for row, each in documents if (cut := _title_alone(each, titles))]


def remark_of(document: Document) -> Cut | None:
    r"""Cut the first sentence of the first remark out of a program; None if there is no such remark.

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
    """Cut the title and the first sentence.

    A title that several documents have is no question.
    """
    span = first_sentence_of(document) or _first_words(document.text.strip())
    if span is None:
        return None
    title = document.title.strip()
    return Cut([span.inside, *([title] if title and titles[title] == 1 else [])], span.outside)


def _first_words(text: str) -> Span | None:
    """Cut the first words of a text that has no sentences; None if it is short."""
    count = len(text.split())
    return cut_span(text, min(12, count // 3), 0.0) if count >= LEAST_WORDS else None


def _title_alone(document: Document, titles: Counter[str]) -> Cut | None:
    title, text = document.title.strip(), document.text.strip()
    return Cut([title], text) if title and text and titles[title] == 1 else None


def _some_of(positions: np.ndarray, document_count: int, seed: int) -> np.ndarray:
    """Draw the documents that are asked about: at most a tenth of all, so that the pool stays what it is."""
    count = min(len(positions), MOST_ASKED, max(2 * LEAST_ASKED, document_count // 10))
    return np.sort(np.random.default_rng([seed, 19]).choice(positions, count, replace=False))


# ------------------------------------------------------------------------------------------------- as encoders see them


KnownCodes = Callable[[list[str]], Mapping[str, np.ndarray]]
"""From texts to the codes of their tokens, for those that are kept."""


class EncodedQuestions(NamedTuple):
    """Questions and pool as one encoder sees them: unit rows of shape (Q, n) and (P, n)."""

    queries: np.ndarray
    pool: np.ndarray


class PoolTokens:
    """The tokens of questions and of the pool's texts, kept while these are encoded.

    Args:
        encoder: encodes what `known` does not have.
        space: of the tokens.
        questions: what is asked.
        pool_texts: what is searched.
        known: from texts to codes of those that were kept elsewhere.
    """

    def __init__(
        self,
        encoder: Encoder,
        space: TokenSpace,
        questions: Questions,
        pool_texts: Sequence[str],
        known: KnownCodes | None = None,
    ) -> None:
        self._encoder, self._space, self._known = encoder, space, known
        self._questions, self._texts = questions, pool_texts
        self._wanted = frozenset(pool_texts)
        self._codes: dict[str, np.ndarray] = {}
        self._queries: dict[str, QueryTokens] = {}

    @classmethod
    def of(cls, encoder: Encoder, corpus: Corpus, questions: Questions | None) -> PoolTokens | None:
        """Return a place for tokens.

        It is None if the encoder has no token states, or nothing is asked.
        """
        space = TokenSpace.fit(encoder, corpus) if questions is not None and encoder.has_states else None
        if space is None or questions is None:
            return None
        return cls(encoder, space, questions, questions.pool_texts(corpus))

    def keep_text(self, text: str, ids: np.ndarray, states: Tensor) -> None:
        """Take the tokens of a text that is encoded, if it is in the pool."""
        if text in self._wanted:
            self._codes[text] = self._space.codes(states)

    def keep_query(self, text: str, ids: np.ndarray, states: Tensor) -> None:
        """Take the tokens of a question."""
        self._queries[text] = self._space.query(ids, states)

    def similarities(self, place: int, rows: np.ndarray) -> np.ndarray:
        """Return how well a question's tokens are met by each of these rows of the pool, of shape (rows,)."""
        texts = [self._texts[row] for row in rows.tolist()]
        if missing := [text for text in texts if text not in self._codes]:
            self._codes.update(self._known(missing) if self._known else {})
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
) -> list[EncodedQuestions]:
    """Encode questions and the texts that they are cut out of; companions encode the pool too."""
    if questions is None:
        return []
    first, *companions = encoders
    pool_vectors = np.array(pool_vectors, np.float32)
    if questions.changed:
        changed = first.encode(list(questions.changed.values()), on_tokens=tokens.keep_text if tokens else None)
        pool_vectors[list(questions.changed)] = changed
    queries = first.encode(questions.texts, "query", on_tokens=tokens.keep_query if tokens else None)
    pool_texts = questions.pool_texts(corpus) if companions else []
    return [
        EncodedQuestions(queries, pool_vectors),
        *(
            EncodedQuestions(each.encode(questions.texts, "query", zeros=True), each.encode(pool_texts, zeros=True))
            for each in companions
        ),
    ]


def joined_parts(
    parts: Sequence[EncodedQuestions], shares: Sequence[float], centers: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Join the vectors of an encoder and its companions, as `Encoder.beside` does; at 1 for the first, it is alone."""
    if shares[0] == 1:
        return parts[0]
    query_center, document_center = (None, None) if centers is None else centers
    queries = joined_rows([part.queries for part in parts], shares, query_center)
    return queries, joined_rows([part.pool for part in parts], shares, document_center)
