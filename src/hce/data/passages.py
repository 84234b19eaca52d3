"""Passages: where a text that is longer than an encoder reads at once is cut, and cut again with some overlap.

A passage ends where a sentence ends, if one does in its last quarter; else between two words; else between two tokens.
The next one begins some way before that end, so that what stands at a cut is read whole in one of the two.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LOOK_BACK = 4  # the last quarter of a passage is where it may end, and where the next may begin
OVERLAP = 8  # an eighth of a passage, at the least, is in the next one too
SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]]*\s+|[。！？]|\n\s*")


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
