"""Write the tree of an index as Markdown files, a folder for each node of the first levels."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hce.data.text import ANY_WORD, Document
from hce.files import new_folder, open_atomically
from hce.index.index import Index
from hce.index.tables import Reader
from hce.index.tree import LiveTree, NotThereError
from hce.tree.hierarchy import Hierarchy
from hce.tree.names import name_nodes

ROOT_FILE, NODE_FILE = "SKILL.md", "INDEX.md"  # agents look for SKILL.md
WORDS = 12
REPRESENTATIVES = 5
READ_CHARACTERS = 20_000  # of a document, searched for a typical sentence
SENTENCE_CHARACTERS = 300
READ_AT_ONCE = 1000
NAME_CHARACTERS = 40  # in the name of a folder
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|[。！？\n]+")
MARKS = re.compile(r"([\\`*_\[\]<>#|!&~])")  # characters with a meaning in Markdown or HTML
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]+")


class _Page(NamedTuple):
    """A node, and the folder to write its file to."""

    level: int
    node: int
    name: str
    folder: Path


class _Skills:
    """Writes the tree of an index as files, from one moment of the store."""

    def __init__(self, index: Index, reader: Reader, levels: int) -> None:
        self._reader = reader
        self._places = LiveTree(index).places_at(reader)
        self._tree = self._places.tree.hierarchy
        if not self._tree.levels:
            raise NotThereError("the tree of this index has no nodes: too few documents")
        self._levels = min(levels, len(self._tree.levels))
        starts = self._places.leaf_start
        leaves = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        texts = (document.full_text for document in self._documents(self._places.numbers.tolist()))
        # Find each node's words in the current documents: the tree's own names are from when it was grown.
        self._words = name_nodes(Hierarchy(self._tree.levels, leaves, (), {}), texts, WORDS)

    def write(self, page: _Page) -> int:
        """Write the files of a node and of the nodes below; return their number."""
        children = list(self._children(page)) if page.level < self._levels else []
        page.folder.mkdir(exist_ok=True)
        with open_atomically(page.folder / (NODE_FILE if page.level else ROOT_FILE)) as file:
            file.writelines(f"{line}\n" for line in self._lines(page, children))
        return 1 + sum(map(self.write, children))

    def _documents(self, numbers: Sequence[int]) -> Iterator[Document]:
        for start in range(0, len(numbers), READ_AT_ONCE):
            some = numbers[start : start + READ_AT_ONCE]
            yield from map(self._reader.documents(some).__getitem__, some)

    def _children(self, page: _Page) -> Iterator[_Page]:
        """Yield the children that have documents, in folders numbered from the largest."""
        children = self._places.children(page.level, page.node).tolist()
        digits = len(str(len(children)))
        for place, child in enumerate(children, start=1):
            words = self._tree.name(page.level + 1, child)
            folder = page.folder / f"{place:0{digits}}-{_safe(words)}".rstrip("-")
            yield _Page(page.level + 1, child, " · ".join(words) or f"node {child}", folder)

    def _size(self, page: _Page) -> str:
        return f"{self._places.sizes[page.level][page.node]:,} documents"

    def _lines(self, page: _Page, children: list[_Page]) -> Iterator[str]:
        if page.level == 0:  # agents first read a skill's name and description
            slug = re.sub(r"[^a-z0-9]+", "-", page.name.lower()).strip("-")[:64] or "documents"
            about = f"{self._size(page)} sorted by topic: {'; '.join(child.name for child in children[:12])}"
            description = json.dumps(CONTROL.sub(" ", about)[:1000])
            yield from ("---", f"name: {slug}", f"description: {description}", "---", "")
        yield from (f"# {_plain(page.name)}", "", f"{self._size(page)}, node {page.level}:{page.node}.", "")
        words = self._words[page.level - 1][page.node] if page.level else []
        yield from (f"Words: {_plain(', '.join(words))}", "") if words else ()
        yield from ("## Typical sentences", "")
        for document in self._documents(self._places.central(self._reader, page.level, page.node, REPRESENTATIVES)):
            parts = (document.title[:SENTENCE_CHARACTERS], typical_sentence(document.text, words))
            yield f"- “{_plain(': '.join(filter(None, parts)))}”"  # the quote keeps "1. …" from opening a list
        yield ""
        if children:
            yield from ("## Parts", "")
            for child in children:
                yield f"- [{_plain(child.name)}](<{child.folder.name}/{NODE_FILE}>), {self._size(child)}"
        else:
            yield from ("## Documents", "", "Ids, one JSON string per line:", "", "```json")
            leaves = np.arange(len(self._places.leaf_start) - 1)
            under = self._tree.ancestors(len(self._tree.levels), leaves)[:, page.level] == page.node
            for leaf in leaves[under]:
                yield from (json.dumps(each.id) for each in self._documents(self._places.documents_of(leaf).tolist()))
            yield "```"


def write_skills(index: Index, folder: str | Path, levels: int = 2) -> int:
    """Write the first levels of a tree to a new folder; return the number of files."""
    with new_folder(folder) as new, index.state.reading() as reader:
        return _Skills(index, reader, levels).write(_Page(0, 0, index.path.absolute().name, new))


def typical_sentence(text: str, words: Iterable[str]) -> str:
    """Return the sentence that has most of these words, cut if it is long.

    >>> typical_sentence("A first one. Wings flutter in flight! The end.", ["wings", "flutter"])
    'Wings flutter in flight!'
    """
    wanted = set(words)
    sentences = [each for each in SENTENCE_END.split(text[:READ_CHARACTERS]) if each.strip()] or [""]
    best = max(sentences, key=lambda each: len(wanted.intersection(map(str.lower, ANY_WORD.findall(each)))))
    return best if len(best) <= SENTENCE_CHARACTERS else f"{best[:SENTENCE_CHARACTERS]}…"


def _safe(words: Iterable[str]) -> str:
    """Return words as part of a folder name that is valid on every file system."""
    return "-".join(re.findall(r"\w+", " ".join(words).casefold()))[:NAME_CHARACTERS]


def _plain(text: str) -> str:
    """Put a text on one line, escaped for Markdown and HTML."""
    return MARKS.sub(r"\\\1", " ".join(CONTROL.sub(" ", text).split()))
