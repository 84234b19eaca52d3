"""Confidence: whether the best hit of a query is a good match, by what the index's own documents find of each other.

Spans of some documents are searched for as if these documents were not there. The best hit is then near the subject of
the span, as most hits of real queries are. Where the best hit of a query is as far off as the
farthest fifth of those (`FARTHEST`), by its cosine and also by the words that it shares with the query, nothing in the
index is a good match.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import NamedTuple

import numpy as np

from hce.data.text import cut_span
from hce.index.derived import Derived
from hce.index.ranking import SAME_MEANING, Hit, SearchRequest, find_hits
from hce.index.store import MomentPassedError, Reader

BETWEEN_SPACES = re.compile(r"\S+")
SPANS = 240  # that are searched for
LENGTHS = (3, 8, 20)  # of the spans, in words
LEAST = 60  # spans to judge by
SECONDS = 10.0  # after which no further spans are searched for
AT_ONCE = 24  # spans
DEPTH = 10  # hits, among which there is one that is not near-equal to the span's own document
FARTHEST = 0.2  # the share of those best hits that are too far off; measured in docs/LOG.md


@dataclass(frozen=True)
class MatchThresholds:
    """Thresholds above which a hit is a good match, taken from the best hits of spans.

    Attributes:
        fingerprint: of the encoder whose cosines these are.
        cosine: a hit that has less, and also a lower coverage than below, is no good match.
        coverage: see `HitCloseness`; that of a hit without any of the words is lower than every threshold.
    """

    fingerprint: str
    cosine: float
    coverage: float

    @classmethod
    def of(cls, fingerprint: str, found: Sequence[HitCloseness]) -> MatchThresholds:
        """Sum up how close the best hits of spans were, without the spans' own documents."""
        return cls(fingerprint, *np.quantile(np.array(found), FARTHEST, axis=0).tolist())

    def is_good(self, found: HitCloseness) -> bool:
        """Tell whether a best hit is a good match."""
        return found.cosine >= self.cosine or (found.coverage > 0 and found.coverage >= self.coverage)


class HitCloseness(NamedTuple):
    """How close a hit is to a query.

    Attributes:
        cosine: of their vectors, of a long document that of its nearest passage.
        coverage: the share of the query's words that the hit has, a rare word counting for more.
    """

    cosine: float
    coverage: float


def closeness(reader: Reader, derived: Derived, query: str, vector: np.ndarray, hit: Hit) -> HitCloseness:
    """Measure how close a hit, which is there at the reader's moment, is to a query with a vector of shape (n,).

    Raises:
        MomentPassedError: the words have gone on to a later moment.
    """
    vectors = reader.vectors_at(np.array([hit.number], np.int64))
    if reader.has_passages():
        vectors = np.concatenate([vectors, reader.passages_of([hit.number]).vectors])
    with derived.words_part.lend(reader) as words:
        rarity = words.rarity(query)
        (matched,) = [hit.matched] if hit.matched else words.matched(query, [hit.number])
    whole = sum(rarity.values())
    shared = sum(rarity[word] for word in matched)
    return HitCloseness(float((vectors @ vector).max()), shared / whole if whole else 0.0)


def find_thresholds(
    reader: Reader,
    derived: Derived,
    encode: Callable[[list[str]], np.ndarray],
    fingerprint: str,
    words_share: float,
) -> MatchThresholds | None:
    """Search for spans of documents; None where there are too few to judge by, or the moment has passed.

    Args:
        reader: of the moment.
        derived: what is searched.
        encode: from queries to unit vectors of shape (queries, n).
        fingerprint: of the encoder.
        words_share: of words in a hybrid search.
    """
    try:
        measured = list(_measured_spans(reader, derived, encode, words_share))
    except MomentPassedError:
        return None
    return MatchThresholds.of(fingerprint, measured) if len(measured) >= LEAST else None


def _measured_spans(
    reader: Reader, derived: Derived, encode: Callable[[list[str]], np.ndarray], words_share: float
) -> Iterator[HitCloseness]:
    """Search for spans while there is time, and yield how close the best hit of each is, its own document aside."""
    spans, until = _spans(reader), time.monotonic() + SECONDS
    while spans and time.monotonic() <= until:
        some, spans = spans[:AT_ONCE], spans[AT_ONCE:]
        texts = [text for _, text in some]
        vectors = encode(texts)
        found = find_hits(reader, derived, SearchRequest(texts, vectors, DEPTH, None, "hybrid", words_share))
        for (number, text), vector, hits in zip(some, vectors, found, strict=True):
            if others := _others(reader, number, hits):
                yield closeness(reader, derived, text, vector, others[0])


def _spans(reader: Reader) -> list[tuple[int, str]]:
    """Cut spans out of some documents, drawn at random: the number of each document, and its span; none of too few."""
    numbers = reader.numbers()
    if len(numbers) < LEAST:
        return []
    rng = np.random.default_rng(0)
    chosen = rng.permutation(numbers)[:SPANS].tolist()
    documents = reader.documents(chosen)
    texts = (documents[number].full_text for number in chosen)
    return [(number, _span(text, length, rng.random())) for number, text, length in zip(chosen, texts, cycle(LENGTHS))]


def _span(text: str, length: int, place: float) -> str:
    """Cut a span as long as a query; in code, where marks are many, words and marks would make it shorter than one."""
    return cut_span(text, length, place, [match.span() for match in BETWEEN_SPACES.finditer(text)]).inside


def _others(reader: Reader, number: int, hits: list[Hit]) -> list[Hit]:
    """Leave out a document and those that are near-equal to it."""
    vectors = reader.vectors_at(np.array([number, *(hit.number for hit in hits)], np.int64))
    is_near = vectors[1:] @ vectors[0] >= SAME_MEANING
    return [hit for hit, near in zip(hits, is_near.tolist(), strict=True) if hit.number != number and not near]
