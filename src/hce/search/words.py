"""Words: BM25 over numbered texts, by tantivy; derived from the store, like an engine of vectors.

tantivy was chosen over SQLite's FTS5 by measurement (docs/LOG.md): level with bm25s in quality, and at 118 thousand
documents five times faster than bm25s and seventy times faster than FTS5. An index of words lives in a folder: a
snapshot that is only read, or a private copy from the first change on.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import tantivy

from hce.checksums import CHECKSUMS, damage_in, write_checksums
from hce.data.terms import analyzer, checked_language, spelled_out, terms
from hce.deadline import check
from hce.errors import FormatError
from hce.files import ScratchFolder

WORD = re.compile(r"\w+")
BODY, NUMBER, ANALYZER = "body", "number", "words"
HEAP = 64 << 20
SPARE = 8  # hits beyond k, so that ties at the last place are settled by number


class Matches(NamedTuple):
    """Documents that share a word with a query.

    Attributes:
        numbers: best first, of shape (m,), int64.
        scores: by BM25, of shape (m,), float32.
    """

    numbers: np.ndarray
    scores: np.ndarray


NOTHING = Matches(np.empty(0, np.int64), np.empty(0, np.float32))


class Words:
    """The words of numbered texts.

    Attributes:
        FORMAT: of a snapshot: tantivy's own, and how texts are cut into words.
        language: whose endings are cut off, one of `LANGUAGES` or "none".
    """

    FORMAT: ClassVar[str] = f"{tantivy.__version__.rpartition(', ')[2]}, words 2"  # type: ignore[attr-defined]

    def __init__(self, folder: Path, language: str, private: ScratchFolder | None = None) -> None:
        self.language = checked_language(language)
        self._folder = folder
        self._private = private  # where changes may be made; deleted along with this object
        self._index = _opened(folder, language)
        self._searcher = self._index.searcher()

    @classmethod
    def new(cls, language: str = "english") -> Words:
        """Make an index of words without a text."""
        private = _private_folder()
        _opened(private.path, checked_language(language), new=True)
        return cls(private.path, language, private)

    @classmethod
    def load(cls, folder: Path, language: str) -> Words:
        """Open what `save` wrote.

        Raises:
            FormatError: nothing is there, or it is damaged.
        """
        with _damage_told(folder, ValueError, OSError, FormatError):
            if damaged := damage_in(folder):
                raise FormatError("; ".join(damaged))
            return cls._readable(folder, language)

    @classmethod
    def _readable(cls, folder: Path, language: str) -> Words:
        """Open a folder, or a private copy where that cannot be: tantivy writes a lock into what it reads."""
        try:
            return cls(folder, language)
        except (ValueError, OSError):
            private = _private_folder()
            _copy(folder, private.path)
            return cls(private.path, language, private)

    def save(self, folder: Path) -> None:
        """Write the index into an existing, empty folder."""
        _copy(self._folder, folder)
        write_checksums(folder)

    def __len__(self) -> int:
        return int(self._searcher.num_docs)

    def add(self, texts: Iterable[tuple[int, str]]) -> int:
        """Take texts in, each under a number that is not there yet; return how many there were."""
        count = 0
        with self._changing() as writer:
            for number, text in texts:
                document = tantivy.Document()
                document.add_text(BODY, spelled_out(text))
                document.add_unsigned(NUMBER, number)
                writer.add_document(document)
                count += 1
        return count

    def remove(self, numbers: np.ndarray) -> None:
        """Take texts out; numbers that are not there are passed over."""
        with self._changing() as writer:
            gone = tantivy.Query.term_set_query(self._index.schema, NUMBER, [int(number) for number in numbers])
            writer.delete_documents_by_query(gone)

    def search(self, query: str, k: int, allowed: np.ndarray | None = None) -> Matches:
        """Return the k documents with the highest scores that share a word with the query, ties in order of number.

        Args:
            query: a text.
            k: 1 or more.
            allowed: search among these numbers only (rising, int64).
        """
        asked = self._asked(query)
        depth = k + SPARE
        while asked is not None:
            found = self._found(asked, min(depth, max(1, len(self))))
            kept = found if allowed is None else _among(found, allowed)
            if len(kept.numbers) >= k or len(found.numbers) < depth:
                return Matches(kept.numbers[:k], kept.scores[:k])
            depth *= 8  # the filter has left too few: look further down
        return NOTHING

    def scores(self, query: str, numbers: np.ndarray) -> np.ndarray:
        """Return the score of each of these documents, of shape (m,), float32; 0 where no word is shared."""
        asked = self._asked(query)
        scores = np.zeros(len(numbers), np.float32)
        if asked is None or not len(numbers):
            return scores
        these = tantivy.Query.term_set_query(self._index.schema, NUMBER, [int(number) for number in numbers])
        only = tantivy.Query.boolean_query(
            [(tantivy.Occur.Must, asked), (tantivy.Occur.Must, tantivy.Query.const_score_query(these, 0.0))]
        )
        found = self._found(only, len(numbers))
        place = np.argsort(numbers, kind="stable")
        scores[place[np.searchsorted(numbers, found.numbers, sorter=place)]] = found.scores
        return scores

    def matched(self, query: str, texts: Iterable[str]) -> list[tuple[str, ...]]:
        """Return for each text the words of a query, as the query spells them, that the text has in any form."""
        words = {word: set(terms(word, self.language)) for word in WORD.findall(query)}
        found = []
        for text in texts:
            check()  # texts may be many and long
            there = set(terms(text, self.language))
            found.append(tuple(word for word, forms in words.items() if forms & there))
        return found

    def _asked(self, query: str) -> Any:
        """Build tantivy's query: any of the words, a repeated one counting as often as it stands there."""
        schema = self._index.schema
        each = [
            (tantivy.Occur.Should, tantivy.Query.term_query(schema, BODY, term, index_option="freq"))
            for term in terms(query, self.language)
        ]
        return tantivy.Query.boolean_query(each) if each else None

    def _found(self, asked: Any, depth: int) -> Matches:
        with _damage_told(self._folder):
            hits = self._searcher.search(asked, depth, count=False).hits
            numbers = np.array(self._searcher.fast_field_values(NUMBER, [place for _, place in hits]), np.int64)
        scores = np.array([score for score, _ in hits], np.float32)
        order = np.lexsort((numbers, -scores))
        return Matches(numbers[order], scores[order])

    @contextmanager
    def _changing(self) -> Iterator[Any]:
        """Yield a writer on a private copy; what is written is searched afterwards.

        Raises:
            FormatError: the snapshot to copy has been replaced by another process.
        """
        if self._private is None:
            private = _private_folder()
            try:
                _copy(self._folder, private.path)
                self._index = _opened(private.path, self.language)
            except (FileNotFoundError, ValueError) as error:
                raise FormatError(f"{self._folder}: the index of words is gone; load the one that is there") from error
            self._private, self._folder = private, private.path
        with _damage_told(self._folder):
            writer = self._index.writer(HEAP, 1)
            yield writer
            writer.commit()
            writer.wait_merging_threads()
            self._index.reload()
        self._searcher = self._index.searcher()


@contextmanager
def _damage_told(folder: Path, *errors: type[Exception]) -> Iterator[None]:
    """Turn some errors, and tantivy's panics, which no one else would catch, into one sentence.

    Raises:
        FormatError: one of these came.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, errors) and type(error).__name__ != "PanicException":
            raise
        raise FormatError(f"{folder}: the index of words is damaged ({error}); it has to be rebuilt") from error


def _among(found: Matches, allowed: np.ndarray) -> Matches:
    kept = np.isin(found.numbers, allowed)
    return Matches(found.numbers[kept], found.scores[kept])


def _private_folder() -> ScratchFolder:
    return ScratchFolder("hce-words-")


def _copy(folder: Path, new: Path) -> None:
    """Copy tantivy's files into a folder that is there."""
    for file in folder.iterdir():
        if file.suffix != ".lock" and file.name not in (CHECKSUMS, "snapshot.json"):
            shutil.copyfile(file, new / file.name)


def _opened(folder: Path, language: str, *, new: bool = False) -> Any:
    if new:
        schema = tantivy.SchemaBuilder()
        schema.add_text_field(BODY, tokenizer_name=ANALYZER, index_option="freq")
        schema.add_unsigned_field(NUMBER, indexed=True, fast=True)
        index = tantivy.Index(schema.build(), str(folder))
    else:
        index = tantivy.Index.open(str(folder))
    index.register_tokenizer(ANALYZER, analyzer(language))
    return index
