"""What to show of a hit: the passage that was found; else the snippet that holds most of the query's words.

An encoder finds by meaning and not by words; the marked words do not explain the score.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

from hce.data.passages import Passage

SNIPPET_CHARACTERS = 320
PASSAGE_CHARACTERS = 2000  # a passage is shown in full if it is no longer; hardly one is
READ_CHARACTERS = 20_000  # of a document; what comes later is not looked through
MOST_MARKS = 200
ANY_WORD = re.compile(r"\w+")
ENDING = r"\w{0,3}"  # "thread" marks "threads" and "threaded"

Mark = tuple[int, int]
"""Where a marked word begins and ends, in characters."""


class Snippet(NamedTuple):
    """What is shown of a text.

    Attributes:
        text: its characters, white space as in the document.
        start: where the snippet begins in the document.
        whole: whether the snippet is all of the document.
        marks: where the query's words stand in it.
    """

    text: str
    start: int
    whole: bool
    marks: list[Mark]


def query_words(query: str) -> re.Pattern[str] | None:
    """Return a pattern of the words to mark; words that stand in every text only if there is no other."""
    words = list(dict.fromkeys(word.casefold() for word in ANY_WORD.findall(query)))
    telling = [word for word in words if word not in ENGLISH_STOP_WORDS and len(word) > 1] or words
    if not telling:
        return None
    return re.compile(rf"\b(?:{'|'.join(map(re.escape, telling))}){ENDING}\b", re.IGNORECASE)


def marks_in(text: str, words: re.Pattern[str] | None) -> list[Mark]:
    """Find where a query's words stand in a text."""
    found = words.finditer(text[:READ_CHARACTERS]) if words else ()
    return [match.span() for match, _ in zip(found, range(MOST_MARKS), strict=False)]


def snippet_of(text: str, passage: Passage | None, words: re.Pattern[str] | None) -> Snippet:
    """Show the passage that a document was found by; where it was found as a whole, its best snippet."""
    if passage is None:
        return best_snippet(text, words)
    found = best_snippet(text[passage.start : passage.stop], words, PASSAGE_CHARACTERS)
    return found._replace(start=passage.start + found.start, whole=len(found.text) == len(text))


def best_snippet(text: str, words: re.Pattern[str] | None, length: int = SNIPPET_CHARACTERS) -> Snippet:
    """Find the snippet with most different words of the query, the first of several; the beginning where none is."""
    if len(text) <= length:
        return Snippet(text, 0, True, marks_in(text, words))
    marks = marks_in(text, words)
    start = _word_start(text, _best_start(text, marks, length))
    end = _word_end(text, start + length)
    inside = [(first - start, last - start) for first, last in marks if first >= start and last <= end]
    return Snippet(text[start:end], start, False, inside)


def _best_start(text: str, marks: Sequence[Mark], length: int) -> int:
    """Return a position a little before the first mark of the window that holds most different words."""
    best, start = 0, 0
    spelled = [text[first:last].casefold() for first, last in marks]
    for number, (first, _) in enumerate(marks):
        end = bisect_right(marks, first + length * 3 // 4, key=lambda mark: mark[1])
        inside = len(set(spelled[number:end]))
        if inside > best:
            best, start = inside, first
    return max(0, min(start - length // 4, len(text) - length))


def _word_start(text: str, position: int) -> int:
    """Return the beginning of the first whole word at or after a position."""
    gap = re.compile(r"\s").search(text, position - 1, position + 40) if position else None
    return gap.end() if gap else position


def _word_end(text: str, position: int) -> int:
    """Return the end of the last whole word before a position."""
    if position >= len(text):
        return len(text)
    gap = max(text.rfind(" ", position - 40, position), text.rfind("\n", position - 40, position))
    return gap if gap > 0 else position
