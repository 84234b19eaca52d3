"""Ranking: from queries to hits, at one moment of an index.

A search by meaning finds the nearest documents; a long document is as near as its own vector or its nearest passage. A
search by words finds documents that share a word with the query. A hybrid search fuses both. The search ranks document
numbers; then the store supplies the documents.

The end of this module decides whether the best hit is a good match. For comparison, it searches for spans cut out of
random documents, ignores these documents, and measures the best other hit: its cosine, and its share of the span's
words. A threshold for each measure cuts off its lowest fifth (`FARTHEST`). If a query's best hit is below both
thresholds, nothing in the index is a good match.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from hce.data.text import (
    ANY_WORD,
    SNIPPET_CHARACTERS,
    Document,
    Passage,
    QueryWords,
    Snippet,
    cut_span,
    is_unicode,
    snippet_of,
    telling_words,
)
from hce.errors import InputError
from hce.index.derived import Derived
from hce.index.store import MomentPassedError
from hce.index.tables import Reader
from hce.index.tree import NumberedHierarchy, TreePath, paths_of
from hce.progress import check_deadline
from hce.search.engine import Engine, Nearest, PassageEngine
from hce.search.fusion import Ranked, candidate_count_for, search_both
from hce.search.words import Words

if TYPE_CHECKING:
    from hce.encoding.reranker import Reranker

SearchMode = Literal["hybrid", "dense", "words"]

RERANKED = 50  # hits that a cross-encoder reads by default
# Thresholds from which two documents are near-equal. At 0.95 and 0.8, `Decimal.min` was folded under `.max` (LOG.md).
SAME_MEANING = 0.97  # the cosine of their vectors
SAME_WORDS = 0.9  # the share of their distinct words that both have


class Hit(NamedTuple):
    """A document that was found.

    Attributes:
        rank: 1 for the best.
        score: in a hybrid search, the sum of the three parts below, at most 1. By meaning alone, the cosine to the
            query; by words alone, BM25. After a cross-encoder, its score.
        number: the number of the document in the store.
        from_meaning: the part of the score that comes from the vectors.
        from_words: the part of the score that comes from shared words.
        from_tokens: the part of the score that comes from tokens, see `hce.encoding.reranker`.
        matched: those of the query's first 64 words that the document has, in any form. Very common words
            ("the", "from") are left out, unless the query has no others.
        passage: the passage of a long document that matched, `text[start:stop]`; None if no passage was better than the
            entire document. In a hybrid search, words chose it if `from_words` exceeds `from_meaning`.
        first_rank: the rank before a cross-encoder reordered the hits; None without one.
        folded: the ids of near-equal documents that ranked below this one and were left out, best first.
        path: the nodes above the document in the tree, from the top; empty if the index has no tree.
    """

    rank: int
    score: float
    id: str
    title: str
    text: str
    metadata: dict[str, Any]
    number: int = 0
    from_meaning: float = 0.0
    from_words: float = 0.0
    from_tokens: float = 0.0
    matched: tuple[str, ...] = ()
    passage: Passage | None = None
    first_rank: int | None = None
    folded: tuple[str, ...] = ()
    path: TreePath = ()

    @classmethod
    def of(cls, rank: int, number: int, document: Document, from_meaning: float, from_words: float = 0.0) -> Hit:
        """Make a hit of a document."""
        shown = document.id, document.title, document.text, document.metadata
        return cls(rank, from_meaning + from_words, *shown, number, from_meaning, from_words)

    def as_dict(self, query: str | None = None) -> dict[str, Any]:
        """Return the fields for JSON, except the number, which is internal.

        Args:
            query: the text that was searched for. If given, the result also has the snippet, its start, and the places
                of the query's words in snippet and title, in code points.
        """
        shown = {name: value for name, value in self._asdict().items() if name != "number"}
        shown["path"] = [dict(vars(node)) for node in self.path]
        if query is None:
            return shown
        snippet = self.snippet(query)
        shown |= {"snippet": snippet.text, "snippet_start": snippet.start, "snippet_marks": snippet.marks}
        return shown | {"title_marks": QueryWords(query).marks_in(self.title)}

    def snippet(self, query: str, length: int = SNIPPET_CHARACTERS) -> Snippet:
        """Return the passage found, or else the part with most of the query's words.

        >>> hit = Hit(1, 0.5, "a", "", "No shoes. " * 40 + "Red hats of felt.", {})
        >>> snippet = hit.snippet("hat")
        >>> [snippet.text[start:stop] for start, stop in snippet.marks]
        ['hats']

        Args:
            query: the text that was searched for.
            length: how long that part is, in characters; a passage is not shortened.
        """
        return snippet_of(self.text, self.passage, QueryWords(query), length)


def checked_queries(queries: str | Sequence[str]) -> list[str]:
    """Return the queries as a list; InputError if one is empty or not a text."""
    if not isinstance(queries, Iterable) or isinstance(queries, bytes):
        raise InputError(f"a query is a text or a list of texts, not a {type(queries).__name__}")
    texts = [queries] if isinstance(queries, str) else list(queries)
    for text in texts:
        if not isinstance(text, str):
            raise InputError(f"a query is a text, not a {type(text).__name__}")
        if not is_unicode(text):
            raise InputError(f"query {text!r} holds half a surrogate pair; remove it")
        if not text.strip():
            raise InputError("the query is empty; write what to look for")
    return texts


def checked_vectors(vectors: np.ndarray, dim: int) -> np.ndarray:
    """Return queries' vectors, (Q, n), float32; InputError for another shape or NaN."""
    try:
        rows = np.ascontiguousarray(vectors, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise InputError(f"vectors of queries are an array of numbers, not a {type(vectors).__name__}") from error
    if rows.ndim != 2 or np.ndim(vectors) != 2 or rows.shape[1] != dim:
        raise InputError(f"vectors of queries are of shape (queries, {dim}) in this index, not {np.shape(vectors)}")
    if not np.isfinite(rows).all():
        raise InputError("the vector of a query holds NaN or infinity; encode it again")
    return rows


def check_k(k: int, name: str = "k") -> None:
    """Fail unless k is a positive integer."""
    if isinstance(k, bool) or not isinstance(k, int | np.integer):
        raise InputError(f"{name} = {k!r}: give a whole number")
    if k < 1:
        raise InputError(f"{name} = {k}: ask for 1 hit or more")


def check_mode(mode: str) -> None:
    """Fail if there is no such mode of search."""
    if mode not in get_args(SearchMode):
        raise InputError(f"mode {mode!r}: choose one of {', '.join(get_args(SearchMode))}")


class Searched(NamedTuple):
    """The parts of an index at one moment; parts that a search does not need are None."""

    reader: Reader
    engine: Engine | None
    passages: PassageEngine | None
    words: Words | None


@contextmanager
def searched_at(reader: Reader, derived: Derived, mode: SearchMode) -> Iterator[Searched]:
    """Lend the parts that a search needs, in a fixed order to avoid deadlocks."""
    with ExitStack() as stack:
        engine = stack.enter_context(derived.engine_part.lend(reader)) if mode != "words" else None
        has_passages = engine is not None and reader.has_passages()
        passages = stack.enter_context(derived.passages_part.lend(reader)) if has_passages else None
        words = stack.enter_context(derived.words_part.lend(reader)) if mode != "dense" else None
        yield Searched(reader, engine, passages, words)


def find_hits(
    reader: Reader,
    derived: Derived,
    queries: Sequence[str],
    vectors: np.ndarray | None,
    k: int,
    mode: SearchMode,
    words_share: float = 0.0,
    *,
    allowed: np.ndarray | None = None,
    unique: bool = False,
    matched: bool = True,
) -> list[list[Hit]]:
    """Find the k best documents for each query, best first.

    The queries' vectors (queries, n) are None in a search by words alone. `allowed` has the numbers to search among,
    rising; None is all. If a derived part is at a later moment, this raises MomentPassedError.
    """
    with searched_at(reader, derived, mode) as searched:
        most = max(1, reader.moment().documents)
        depth = min(2 * k, most) if unique else k
        while True:
            check_deadline()
            hits = _hits(reader, _rankings(searched, queries, vectors, depth, words_share, allowed))
            if matched and searched.words is not None:
                hits = _with_matched(searched.words, queries, hits)
            if not unique:
                return hits
            folded = [fold_near_equal(reader, row) for row in hits]
            if depth == most or all(len(kept) >= k or len(row) < depth for kept, row in zip(folded, hits, strict=True)):
                return [kept[:k] for kept in folded]
            depth = min(2 * depth, most)


def with_matched(reader: Reader, derived: Derived, queries: Sequence[str], hits: list[list[Hit]]) -> list[list[Hit]]:
    """Fill in `Hit.matched`, unless the words are at a later moment."""
    with suppress(MomentPassedError), derived.words_part.lend(reader) as words:
        return _with_matched(words, queries, hits)
    return hits


def with_paths(reader: Reader, tree: NumberedHierarchy | None, hits: list[list[Hit]]) -> list[list[Hit]]:
    """Fill in `Hit.path`; without a tree, return the hits unchanged."""
    if tree is None or not any(hits):
        return hits
    paths = paths_of(reader, tree, (hit.number for row in hits for hit in row))
    return [[hit._replace(path=paths.get(hit.number, ())) for hit in row] for row in hits]


Ranking = tuple[Ranked, dict[int, int]]
"""Documents, best first; and document → its nearest passage, 0 if the document's own vector is nearer."""


def _rankings(
    searched: Searched,
    queries: Sequence[str],
    vectors: np.ndarray | None,
    k: int,
    words_share: float,
    allowed: np.ndarray | None,
) -> list[Ranking]:
    """Rank documents for each query by meaning, by words, or by both fused."""
    _, engine, passages, words = searched
    if engine is None or vectors is None:  # compare with None, as an empty index of words is false
        found = [] if words is None else [words.search(query, k, allowed) for query in queries]
        return [(Ranked(each.numbers, np.zeros(len(each.numbers)), *each[1:]), {}) for each in found]
    count = k if words is None else candidate_count_for(k)
    whole = engine.search(vectors, count, allowed)
    nearest = Nearest(*whole, np.zeros(whole.numbers.shape, np.int64))
    if passages is not None:
        nearest = passages.merged_with(whole, vectors, count, allowed)
    rankings: list[Ranking] = []
    for query, vector, *row in zip(queries, vectors, *nearest, strict=True):
        numbers, cosines, passage_numbers = (column[row[0] >= 0] for column in row)
        passage_of = dict(zip(numbers.tolist(), passage_numbers.tolist(), strict=True)) if passages else {}
        if words is None:
            zeros = np.zeros(len(numbers), np.int64)
            ranked = Ranked(numbers, cosines, zeros, zeros)
        else:
            ranked = search_both(
                *(words, query),
                numbers=numbers,
                cosines=cosines,
                cosines_at=partial(cosines_of, searched, vector, passage_of),
                candidate_count=count,
                words_share=words_share,
                allowed=allowed,
                k=k,
            )
        rankings.append((ranked, passage_of))
    return rankings


def cosines_of(
    searched: Searched, query_vector: np.ndarray, passage_of: dict[int, int], numbers: np.ndarray
) -> np.ndarray:
    """Return each document's cosine, or a passage's if higher; fill `passage_of`."""
    if not len(numbers) or searched.engine is None:
        return np.zeros(0, np.float32)
    cosines = searched.engine.scores(query_vector, numbers)
    if searched.passages is None:
        return cosines
    further = searched.reader.passages_of(numbers.tolist())
    nearer = further.vectors @ query_vector
    places = {number: place for place, number in enumerate(numbers.tolist())}
    for row in np.argsort(nearer, kind="stable").tolist():  # the nearest comes last, and overwrites the others
        document = int(further.documents[row])
        if nearer[row] > cosines[places[document]]:
            cosines[places[document]] = nearer[row]
            passage_of[document] = int(further.numbers[row])
    return cosines


# ------------------------------------------------------------------------------------------------- hits


def _hits(reader: Reader, rankings: list[Ranking]) -> list[list[Hit]]:
    """Look up the ranked documents, and the passages that matched."""
    documents = reader.documents({number for ranked, _ in rankings for number in ranked.numbers.tolist()})
    hits = []
    for ranked, passage_of in rankings:
        row: list[Hit] = []
        found_by: list[int] = []
        for number, meaning, words, by_words in zip(*map(np.ndarray.tolist, ranked), strict=True):
            row.append(Hit.of(len(row) + 1, number, documents[number], meaning, words))
            by_meaning = passage_of.get(number, 0)
            found_by.append((by_words or by_meaning) if words > meaning else (by_meaning or by_words))
        if any(found_by):
            extents = reader.extents(filter(None, found_by))
            found = [extents.get(passage) for passage in found_by]
            row = [
                hit._replace(passage=each and extent_in_text(hit, each)) for hit, each in zip(row, found, strict=True)
            ]
        hits.append(row)
    return hits


def extent_in_text(document: Document | Hit, extent: Passage) -> Passage:
    """Convert the place of a passage in `full_text` to its place in the text."""
    joined = f"{document.title} {document.text}"
    before = len(document.title) + 1 - (len(joined) - len(joined.lstrip()))  # `full_text` is stripped at its start
    start, stop = (min(max(end - before, 0), len(document.text)) for end in extent)
    return Passage(start, stop)


def _with_matched(words: Words, queries: Sequence[str], hits: list[list[Hit]]) -> list[list[Hit]]:
    """Fill in `Hit.matched` for each hit."""
    rows = []
    for query, row in zip(queries, hits, strict=True):
        texts = {hit.number: f"{hit.title} {hit.text}" for hit in row}
        kept = frozenset(telling_words(ANY_WORD.findall(query), words.language))
        found = words.matched(query, list(texts), texts)
        rows.append(
            [hit._replace(matched=tuple(filter(kept.__contains__, each))) for hit, each in zip(row, found, strict=True)]
        )
    return rows


# ------------------------------------------------------------------------------------------------- near-equal ones


def fold_near_equal(reader: Reader, hits: list[Hit]) -> list[Hit]:
    """Leave out each hit that is near-equal to a better one, whose `folded` lists it.

    Two documents are near-equal if the cosine of their vectors is at least `SAME_MEANING`, and they share at least
    `SAME_WORDS` of their distinct words, ignoring case.
    """
    vectors = reader.vectors_at(np.array([hit.number for hit in hits], np.int64))
    words = [frozenset(ANY_WORD.findall(f"{hit.title} {hit.text}".casefold())) for hit in hits]
    below: dict[int, list[str]] = {}
    for row, hit in enumerate(hits):
        better = list(below)
        near = np.flatnonzero(vectors[better] @ vectors[row] >= SAME_MEANING).tolist() if better else []
        similar = (other for other in map(better.__getitem__, near) if _are_same(words[other], words[row]))
        same = next(similar, None)
        if same is None:
            below[row] = []
        else:
            below[same].append(hit.id)
    return [hits[row]._replace(rank=rank, folded=tuple(ids)) for rank, (row, ids) in enumerate(below.items(), 1)]


def _are_same(words: frozenset[str], others: frozenset[str]) -> bool:
    return len(words & others) >= SAME_WORDS * len(words | others)


# ------------------------------------------------------------------------------------------------- re-ranking


def reranked(reranker: Reranker, query: str, hits: list[Hit], depth: int) -> list[Hit]:
    """Sort the first `depth` hits by a cross-encoder's scores; ties keep their order.

    `first_rank` keeps their earlier rank. For a long document, the cross-encoder reads the title and the passage that
    was found. The other hits follow in their order, with scores shifted below theirs.
    """
    first, others = hits[:depth], hits[depth:]
    scores = reranker.scores(query, [read_text(hit) for hit in first])
    order = np.argsort(-scores, kind="stable").tolist()
    ordered = [
        first[row]._replace(rank=rank, score=float(scores[row]), first_rank=first[row].rank)
        for rank, row in enumerate(order, 1)
    ]
    lower = ordered[-1].score - 1 - others[0].score if others else 0.0
    return [*ordered, *(hit._replace(score=hit.score + lower) for hit in others)]


def read_text(hit: Hit) -> str:
    """Return the text of a hit to encode: all of it, or title and passage found."""
    return read_passage(hit, hit.passage) if hit.passage else Document(hit.id, hit.text, hit.title).full_text


def read_passage(document: Document | Hit, passage: Passage) -> str:
    """Return the text of a passage to encode: the title, then the passage."""
    return Document(document.id, document.text[passage.start : passage.stop], document.title).full_text


# ------------------------------------------------------------------------------------------------- a good match


BETWEEN_SPACES = re.compile(r"\S+")
SPANS = 240  # spans to search for
LENGTHS = (3, 8, 20)  # of the spans, in words
LEAST = 60  # spans that thresholds need
SECONDS = 10.0  # time limit of these searches
AT_ONCE = 24  # spans per search
DEPTH = 10  # hits of a span; the first one whose vector is not near that of the span's document is measured
FARTHEST = 0.2  # share of the spans' best hits that counts as too far off; measured in docs/LOG.md


@dataclass(frozen=True)
class MatchThresholds:
    """Thresholds taken from the best hits of spans: a good match reaches one of them."""

    fingerprint: str  # of the encoder that the cosine belongs to
    cosine: float
    coverage: float  # even if this is 0, a hit reaches it only with one of the words

    @classmethod
    def of(cls, fingerprint: str, found: Sequence[HitCloseness]) -> MatchThresholds:
        """Compute thresholds from the best hits of spans, without their own documents."""
        return cls(fingerprint, *np.quantile(np.array(found), FARTHEST, axis=0).tolist())

    def is_good(self, found: HitCloseness) -> bool:
        """Return whether a best hit is a good match."""
        return found.cosine >= self.cosine or (found.coverage > 0 and found.coverage >= self.coverage)


class HitCloseness(NamedTuple):
    """How close a hit is to a query; a long document's cosine may be that of its nearest passage."""

    cosine: float
    coverage: float  # the share of the query's words that the hit has; a rare word counts for more


def closeness(reader: Reader, derived: Derived, query: str, vector: np.ndarray, hit: Hit) -> HitCloseness:
    """Measure how close a hit is to a query with a vector of shape (n,)."""
    vectors = reader.vectors_at(np.array([hit.number], np.int64))
    if reader.has_passages():
        vectors = np.concatenate([vectors, reader.passages_of([hit.number]).vectors])
    with derived.words_part.lend(reader) as words:
        rarity = words.rarity(query)
        (matched,) = [hit.matched] if hit.matched else words.matched(query, [hit.number])
    total = sum(rarity.values())
    coverage = sum(rarity[word] for word in matched) / total if total else 0.0
    return HitCloseness(float((vectors @ vector).max()), coverage)


def find_thresholds(
    reader: Reader,
    derived: Derived,
    encode: Callable[[list[str]], np.ndarray],
    fingerprint: str,
    words_share: float,
) -> MatchThresholds | None:
    """Find thresholds by searching for spans of random documents, within `SECONDS`.

    Returns None for too few spans, or if the moment has passed.
    """
    numbers = reader.numbers()
    if len(numbers) < LEAST:
        return None
    rng = np.random.default_rng(0)
    chosen = rng.permutation(numbers)[:SPANS].tolist()
    documents, until, measured = reader.documents(chosen), time.monotonic() + SECONDS, []
    texts = []
    for number, length in zip(chosen, cycle(LENGTHS)):
        text = documents[number].full_text  # count words by spaces, as code has many marks
        spans = [match.span() for match in BETWEEN_SPACES.finditer(text)]
        texts.append(cut_span(text, length, rng.random(), spans).inside)
    with suppress(MomentPassedError):
        for start in range(0, len(texts), AT_ONCE):
            if time.monotonic() > until:
                break
            some = texts[start : start + AT_ONCE]
            vectors = encode(some)
            found = find_hits(reader, derived, some, vectors, DEPTH, "hybrid", words_share)
            for number, text, vector, hits in zip(chosen[start:], some, vectors, found, strict=False):
                if others := _others(reader, number, hits):
                    measured.append(closeness(reader, derived, text, vector, others[0]))
        return MatchThresholds.of(fingerprint, measured) if len(measured) >= LEAST else None
    return None


def _others(reader: Reader, number: int, hits: list[Hit]) -> list[Hit]:
    """Leave out a document, and hits whose vectors are near its own."""
    vectors = reader.vectors_at(np.array([number, *(hit.number for hit in hits)], np.int64))
    is_near = vectors[1:] @ vectors[0] >= SAME_MEANING
    return [hit for hit, near in zip(hits, is_near.tolist(), strict=True) if hit.number != number and not near]
