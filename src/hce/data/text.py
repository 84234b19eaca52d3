"""Words and marks of a text, spans cut out of it, and the passages that a long text is cut into.

A passage ends where a sentence ends, if one does in its last quarter; else between two words; else between two tokens.
The next one begins some way before that end, so that what stands at a cut is read in full in one of the two.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

# Vowel signs and accents that are characters of their own: part of a word to tantivy, and to Python's \w not.
COMBINING = "".join(chr(code) for code in range(0x300, 0x1E94B) if unicodedata.category(chr(code))[0] == "M")
ANY_WORD = re.compile(rf"[\w{COMBINING}]+")
# Near what BERT's tokenizer splits first, and the same for all encoders.
WORD_OR_MARK = re.compile(rf"[\w{COMBINING}]+|[^\w\s{COMBINING}]")
LOOK_BACK = 4  # the last quarter of a passage is where it may end, and where the next may begin
OVERLAP = 8  # an eighth of a passage, at the least, is in the next one too
SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]]*\s+|[。！？]|\n\s*")
READ_AT_ONCE = 1 << 20  # characters; tokenizers need a hundred times as much memory


class Span(NamedTuple):
    """A piece of a text, and the text without it."""

    inside: str
    outside: str


Offsets = Sequence[tuple[int, int]]
"""Where each word or mark of a text, or each token of an encoder, begins and ends."""


def word_offsets(text: str) -> Offsets:
    """Return where the words and marks of a text begin and end."""
    return [match.span() for match in WORD_OR_MARK.finditer(text)]


def cut_span(text: str, length: int, place: float, offsets: Offsets | None = None) -> Span:
    """Cut out `length` words and marks; `place` says where: 0 at the beginning, 1 at the last possible start.

    A text of fewer than 2·`length` of them gives up half, so that something is left to be found. With `offsets`, what
    is taken are these pieces.

    >>> cut_span("The quick brown fox jumps over the lazy dog.", 2, 0.25)
    Span(inside='brown fox', outside='The quick jumps over the lazy dog.')
    """
    pieces = word_offsets(text) if offsets is None else offsets
    length = min(length, len(pieces) // 2)
    if length < 1:
        return Span(text, text)
    start = min(int(place * (len(pieces) - length + 1)), len(pieces) - length)
    first, last = pieces[start][0], pieces[start + length - 1][1]
    return Span(text[first:last], f"{text[:first].rstrip()} {text[last:].lstrip()}".strip())


def text_pieces(text: str) -> Iterator[str]:
    """Cut a long text into pieces for a tokenizer, before blanks: tokens do not go across these.

    Only a word of more than a million characters is cut within.
    """
    start = 0
    while len(text) - start > READ_AT_ONCE:
        stop = text.rfind(" ", start + 1, start + READ_AT_ONCE)
        stop = stop if stop > 0 else text.rfind("\n", start + 1, start + READ_AT_ONCE)
        stop = stop if stop > 0 else start + READ_AT_ONCE
        yield text[start:stop]
        start = stop
    yield text[start:]


def first_words(text: str, count: int) -> str:
    """Return a text as far as its first `count` words and marks; all of a shorter one.

    >>> first_words("one two three, four", 4)
    'one two three,'
    """
    for seen, match in enumerate(WORD_OR_MARK.finditer(text), start=1):
        if seen == count:
            return text[: match.end()]
    return text


def hash64(text: str, *, signed: bool = False) -> int:
    """Return 64 bits of a text's BLAKE2b digest, the same on every machine; from −2⁶³ on where `signed`.

    >>> hash64("a"), hash64("a", signed=True)
    (3405396810240292928, 3405396810240292928)
    """
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=signed)


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can write a text: not where it holds half a surrogate pair, which JSON can spell.

    >>> is_unicode("é"), is_unicode(chr(0xD800))
    (True, False)
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_url(text: str) -> bool:
    """Return whether a text is the address of a server, and not a path."""
    return text.lower().startswith(("http://", "https://"))


# ------------------------------------------------------------------------------------------------- passages


class Passage(NamedTuple):
    """A part of a text, from the character `start` up to `stop`."""

    start: int
    stop: int


def cut_passages(text: str, tokens: Sequence[tuple[int, int]] | np.ndarray, most: int) -> list[Passage]:
    """Cut a text into overlapping passages that cover all of it, in order; a text that fits is one passage.

    >>> text = "One fish swims. Two fish swim. Three fish sink. Four fish rest."
    >>> tokens = [match.span() for match in re.finditer("[A-Za-z]+", text)]
    >>> [text[slice(*passage)] for passage in cut_passages(text, tokens, 8)]
    ['One fish swims. Two fish swim. ', 'fish swim. Three fish sink. Four fish rest.']

    Args:
        text: what is cut.
        tokens: where the encoder's tokens begin and end in it, in order.
        most: how many tokens a passage has at most. What cannot be cut (the tokens of one character) may be more.
    """
    places = np.asarray(tokens, dtype=np.int64).reshape(-1, 2)
    if len(places) <= most:
        return [Passage(0, len(text))]
    cuts = _Cuts(text, places)
    first, passages = 0, []
    while True:
        if len(places) - first <= most:
            passages.append(Passage(cuts.character(first), len(text)))
            return passages
        last = max(cuts.latest(first + most - most // LOOK_BACK, first + most), cuts.after(first))
        passages.append(Passage(cuts.character(first), cuts.character(last)))
        if last == len(places):
            return passages
        earliest, latest = last - most // LOOK_BACK, last - most // OVERLAP
        if len(places) - latest <= most:  # the last one is as long as it may be: a few words alone say little
            earliest = min(latest, len(places) - most)
        first = max(cuts.earliest(earliest, latest), cuts.after(first))


class _Cuts:
    """Where a text can be cut: before which of its tokens, numbered from 0 to their count."""

    def __init__(self, text: str, places: np.ndarray) -> None:
        starts, stops = places[:, 0], places[:, 1]
        self._starts, self._length = starts, len(text)
        apart = np.ones(len(places), dtype=bool)  # whether a token begins where all before it have ended
        apart[1:] = starts[1:] >= np.maximum.accumulate(stops)[:-1]
        self._any = np.append(np.flatnonzero(apart), len(places))
        ends = np.array([match.end() for match in SENTENCE_END.finditer(text)], dtype=np.int64)
        self._sentences = np.intersect1d(self._any, np.searchsorted(starts, ends))
        gaps = np.array([match.end() for match in re.finditer(r"\s+", text)], dtype=np.int64)
        self._words = np.intersect1d(self._any, np.searchsorted(starts, gaps))

    def character(self, token: int) -> int:
        """Return the character that a token begins at; the text's end after the last."""
        if token == 0:
            return 0
        return int(self._starts[token]) if token < len(self._starts) else self._length

    def latest(self, low: int, high: int) -> int:
        """Return the last place from `low` to `high` where a sentence ends, or a word, or a token."""
        for places in (self._sentences, self._words, self._any):
            place = np.searchsorted(places, high, side="right") - 1
            if place >= 0 and places[place] >= low:
                return int(places[place])
        return int(self._any[np.searchsorted(self._any, high, side="right") - 1])

    def earliest(self, low: int, high: int) -> int:
        """Return the first place from `low` to `high` where a sentence begins, or a word, or a token."""
        for places in (self._sentences, self._words, self._any):
            place = np.searchsorted(places, low)
            if place < len(places) and places[place] <= high:
                return int(places[place])
        return int(self._any[np.searchsorted(self._any, high, side="right") - 1])

    def after(self, token: int) -> int:
        """Return the first place after a token."""
        return int(self._any[np.searchsorted(self._any, token, side="right")])
