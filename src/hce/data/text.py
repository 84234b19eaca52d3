"""Words and marks of a text, and spans cut out of it, for training, held-out queries and drift."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Vowel signs and accents that are characters of their own: part of a word to tantivy, and to Python's \w not.
COMBINING = "".join(chr(code) for code in range(0x300, 0x1E94B) if unicodedata.category(chr(code))[0] == "M")
ANY_WORD = re.compile(rf"[\w{COMBINING}]+")
# Near what BERT's tokenizer splits first, and the same for all encoders.
WORD_OR_MARK = re.compile(rf"[\w{COMBINING}]+|[^\w\s{COMBINING}]")


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
    is taken are the pieces that these tell of.

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
    """Tell whether a text is the address of a server, and not a path."""
    return text.lower().startswith(("http://", "https://"))
