"""Snippets: what to show of a hit: the passage that was found; else the part that holds most of the query's words.

An encoder finds by meaning and not by words; the marked words do not explain the score.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from hce.data.text import ANY_WORD, Passage

SNIPPET_CHARACTERS = 320
PASSAGE_CHARACTERS = 2000  # a passage is shown in full if it is no longer; hardly one is
READ_CHARACTERS = 20_000  # of a document; what comes later is not looked through
READ_IN_ALL = 1_000_000  # characters, of all documents of an answer: with many of them, less of each is looked through
MOST_WORDS = 64  # of a query that are marked, the first ones; a text all in yellow is no help
MOST_MARKS = 200  # in a text
BLANK = re.compile(r"\s")
ENDING = 3  # letters: "thread" marks "threads" and "threaded"
FUNCTION_WORDS = frozenset(  # of English, which stand in every text; scikit-learn's list takes a second to import
    ANY_WORD.findall("""
    a about above after again against all also am an and any are as at be because been before being below between both
    but by can could did do does doing down during each few for from further had has have having he her here hers
    him his how i if in into is it its itself just me more most my no nor not now of off on once only or other our ours
    out over own same she should so some such than that the their theirs them then there these they this those through
    to too under until up very was we were what when where which while who whom why will with would you your
    yours""")
)

Mark = tuple[int, int]
"""Where a marked word begins and ends, in code points."""


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


class QueryWords:
    """The words of a query that are marked in texts; words that stand in every text only if there is no other.

    Args:
        query: a text.
        texts: in how many texts they will be looked for.
    """

    def __init__(self, query: str, texts: int = 1) -> None:
        words = list(dict.fromkeys(word.casefold() for word in ANY_WORD.findall(query)))
        telling = [word for word in telling_words(words) if len(word) > 1] or words
        self._words = frozenset(telling[:MOST_WORDS])
        self._longest = max(map(len, self._words), default=0) + ENDING
        self._met: set[str] = set()  # words of texts, in their spelling there
        self._marked: set[str] = set()  # those of them that are the query's
        self._read = min(READ_CHARACTERS, max(PASSAGE_CHARACTERS, READ_IN_ALL // texts))

    def __contains__(self, word: str) -> bool:
        """Return whether a word of a text is one of the query's, with an ending or without."""
        if len(word) > self._longest:
            return False
        word = word.casefold()
        return word in self._words or any(
            word[:-letters] in self._words and word[-letters:].isalpha() for letters in range(1, ENDING + 1)
        )

    def marks_in(self, text: str) -> list[Mark]:
        """Find where the query's words stand in a text.

        Each different word of the texts is compared once.
        """
        if not self._words:
            return []
        met = set(ANY_WORD.findall(text, 0, self._read))
        self._marked.update(word for word in met - self._met if word in self)
        self._met |= met
        if met.isdisjoint(self._marked):
            return []
        found = (match.span() for match in ANY_WORD.finditer(text, 0, self._read) if match[0] in self._marked)
        return list(islice(found, MOST_MARKS))


def telling_words(words: Sequence[str], language: str = "english") -> Sequence[str]:
    """Return the words of an English query without those that stand in every text; all, if there is no other.

    >>> telling_words(["play", "music", "from", "the", "shell"]), telling_words(["to", "be"])
    (['play', 'music', 'shell'], ['to', 'be'])
    """
    if language != "english":
        return words
    return [word for word in words if word.casefold() not in FUNCTION_WORDS] or words


def snippet_of(text: str, passage: Passage | None, words: QueryWords, length: int = SNIPPET_CHARACTERS) -> Snippet:
    """Show the passage that a document was found by; without a passage, its best snippet of a length."""
    if passage is None:
        return best_snippet(text, words, length)
    found = best_snippet(text[passage.start : passage.stop], words, PASSAGE_CHARACTERS)
    return found._replace(start=passage.start + found.start, whole=len(found.text) == len(text))


def best_snippet(text: str, words: QueryWords, length: int = SNIPPET_CHARACTERS) -> Snippet:
    """Find the snippet with most different words of the query; the beginning of the text where that has as many."""
    if len(text) <= length:
        return Snippet(text, 0, True, words.marks_in(text))
    marks = words.marks_in(text)
    start = _word_start(text, _best_start(text, marks, length))
    beginning, best = _cut(text, 0, length, marks), _cut(text, start, length, marks)
    return beginning if _different(beginning) >= _different(best) else best


def _cut(text: str, start: int, length: int, marks: Sequence[Mark]) -> Snippet:
    end = _word_end(text, start + length)
    inside = [(first - start, last - start) for first, last in marks if first >= start and last <= end]
    return Snippet(text[start:end], start, False, inside)


def _different(snippet: Snippet) -> int:
    """Count the different words that are marked in a snippet."""
    return len({snippet.text[first:last].casefold() for first, last in snippet.marks})


def _best_start(text: str, marks: Sequence[Mark], length: int) -> int:
    """Return a position a little before the first mark of the window that holds most different words."""
    best, start, left = 0, 0, 0
    inside: Counter[str] = Counter()  # the words of the window, from the mark `left` to the last one seen
    spelled = [text[first:last].casefold() for first, last in marks]
    for right, (_, last) in enumerate(marks):
        inside[spelled[right]] += 1
        while left <= right and marks[left][0] + length * 3 // 4 < last:
            inside[spelled[left]] -= 1
            if not inside[spelled[left]]:
                del inside[spelled[left]]
            left += 1
        if len(inside) > best:
            best, start = len(inside), marks[left][0]
    return max(0, min(start - length // 4, len(text) - length))


def _word_start(text: str, position: int) -> int:
    """Return the beginning of the first full word at or after a position."""
    gap = BLANK.search(text, position - 1, position + 40) if position else None
    return gap.end() if gap else position


def _word_end(text: str, position: int) -> int:
    """Return the end of the last full word before a position."""
    if position >= len(text):
        return len(text)
    gap = max(text.rfind(" ", position - 40, position), text.rfind("\n", position - 40, position))
    return gap if gap > 0 else position
