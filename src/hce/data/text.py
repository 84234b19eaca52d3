"""What a text is, and the pieces that training, held-out queries and the drift of an index cut: tokens, spans."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple

TOKEN = re.compile(r"\w+|[^\w\s]")  # a word or a mark: near what BERT's tokenizer splits first, and the same for all


class Span(NamedTuple):
    """A piece of a text, and the text without it."""

    inside: str
    outside: str


Offsets = Sequence[tuple[int, int]]
"""Where each token of a text begins and ends."""


def word_offsets(text: str) -> Offsets:
    """Return where the words and marks of a text begin and end."""
    return [match.span() for match in TOKEN.finditer(text)]


def cut_span(text: str, length: int, place: float, offsets: Offsets | None = None) -> Span:
    """Take `length` tokens out of a text, the first of them `place` (0 … 1) of the way to the last possible start.

    A text of fewer than 2·`length` tokens gives up half of them, so that something is left to be found.

    >>> cut_span("The quick brown fox jumps over the lazy dog.", 2, 0.25)
    Span(inside='brown fox', outside='The quick jumps over the lazy dog.')
    """
    tokens = word_offsets(text) if offsets is None else offsets
    length = min(length, len(tokens) // 2)
    if length < 1:
        return Span(text, text)
    start = min(int(place * (len(tokens) - length + 1)), len(tokens) - length)
    first, last = tokens[start][0], tokens[start + length - 1][1]
    return Span(text[first:last], f"{text[:first].rstrip()} {text[last:].lstrip()}".strip())


def first_tokens(text: str, count: int) -> str:
    """Return the first `count` tokens of a text; all of a shorter one.

    >>> first_tokens("one two three, four", 4)
    'one two three,'
    """
    for seen, match in enumerate(TOKEN.finditer(text), start=1):
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
    """Tell whether UTF-8 can write a text: not where it holds half a surrogate pair, which JSON can spell.

    >>> is_unicode("é"), is_unicode(chr(0xD800))
    (True, False)
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
