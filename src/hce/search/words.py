"""Words: BM25 over numbered texts, by tantivy; derived from the store, like an engine of vectors.

tantivy was chosen by measurement (docs/LOG.md). It is level with bm25s in quality. With 118 thousand documents it is
five times faster than bm25s, and seventy times faster than SQLite's FTS5. An index of words is a folder: a snapshot
that is only read, or a private copy from the first change on.

The passages of a long text are indexed too, each under the number of the text. The text gets the score of its best
passage, or its own if that is higher. BM25 counts document frequencies and the mean length over texts and passages.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import tantivy

from hce.data.text import ANY_WORD, analyzer, checked_language, inverse_document_frequency, spelled_out, terms
from hce.errors import FormatError, HceError
from hce.files import CHECKSUMS, ScratchFolder, damage_in, write_checksums
from hce.progress import check_deadline

BODY, NUMBER, PASSAGE, ANALYZER = "body", "number", "passage", "words"
HEAP = 64 << 20
PRIVATE = "hce-words-"  # prefix of the folders of private copies
WRITER_ENDED = ("writer was killed", "orker thread")  # parts of tantivy's errors after its writer thread has died
MOST_LOOKED_FOR = 64  # first words of a query that `Words.matched` looks for
SHORT = range(1, 4000)  # lengths in characters of texts that are faster to read than to look up in tantivy
SPARE = 8  # hits beyond k to search for; with these, few ties at the last place need a second search


class FoundByWords(NamedTuple):
    """Documents that share a word with a query, best first."""

    numbers: np.ndarray  # (m,), int64
    scores: np.ndarray  # by BM25, (m,), float32
    passage_numbers: np.ndarray  # of the passages with these scores, (m,), int64; 0 if the entire text has it

    def at(self, rows: np.ndarray | slice) -> FoundByWords:
        """Return the rows at some positions, or of a slice."""
        return FoundByWords(*(column[rows] for column in self))


NOTHING = FoundByWords(np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.int64))


class PassageText(NamedTuple):
    """The text of a passage, with its document's number and the passage's number, from 1 on."""

    number: int
    passage_number: int
    text: str


class Words:
    """An index of the words of numbered texts."""

    # The format of a snapshot: tantivy's version, and a number for the way texts become words.
    FORMAT: ClassVar[str] = f"{tantivy.__version__.rpartition(', ')[2]}, words 4"  # type: ignore[attr-defined]

    def __init__(self, folder: Path, language: str, private: ScratchFolder | None = None) -> None:
        self.language = checked_language(language)
        self._folder = folder
        self._private = private  # the folder for changes, deleted along with this object
        self._index = _tantivy_index(folder, language)
        self._look()

    def _look(self) -> None:
        """Open a searcher on the current state, and count texts and passages."""
        self._searcher = self._index.searcher()
        found = self._searcher.search(self._whole_texts(), 1, count=True) if self._searcher.num_docs else None
        self._texts = int(found.count) if found else 0
        self._passages = int(self._searcher.num_docs) - self._texts

    @classmethod
    def new(cls, language: str = "english") -> Words:
        """Create an empty index of words."""
        private = ScratchFolder(PRIVATE)
        _tantivy_index(private.path, checked_language(language), new=True)
        return cls(private.path, language, private)

    @classmethod
    def load(cls, folder: Path, language: str) -> Words:
        """Open a saved index of words; FormatError if it is missing or damaged."""
        with _as_damage(folder, ValueError, OSError, FormatError):
            if damaged := damage_in(folder):
                raise FormatError("; ".join(damaged))
            with suppress(ValueError, OSError):
                return cls(folder, language)
            private = ScratchFolder(PRIVATE)  # tantivy writes a lock file, which a read-only folder refuses
            _copy(folder, private.path)
            return cls(private.path, language, private)

    def save(self, folder: Path) -> None:
        """Write the index into an existing, empty folder."""
        _copy(self._folder, folder)
        write_checksums(folder)

    def __len__(self) -> int:
        return self._texts

    def add(self, texts: Iterable[tuple[int, str]], passages: Iterable[PassageText] = ()) -> int:
        """Add texts under new numbers, and their passages; return how many texts."""
        count = 0
        with self._changing() as writer:
            for number, text in texts:
                writer.add_document(_entry(number, 0, text))
                count += 1
            for each in passages:
                writer.add_document(_entry(*each))
        return count

    def remove(self, numbers: np.ndarray) -> None:
        """Remove texts and their passages; numbers that are not there are ignored."""
        with self._changing() as writer:
            writer.delete_documents_by_query(self._numbered(numbers))

    def search(self, query: str, k: int, allowed: np.ndarray | None = None) -> FoundByWords:
        """Return the k best documents that share a word with the query, ties by number.

        `allowed` has the numbers to search among, rising, int64; by default all.
        """
        tantivy_query = self._tantivy_query(query)
        wanted = k + SPARE
        while tantivy_query is not None:
            found = self._found(tantivy_query, min(wanted, max(1, self._texts + self._passages)))
            kept = self._each_once(found)
            if allowed is not None:
                kept = kept.at(np.isin(kept.numbers, allowed))
            is_past_the_tie = len(kept.numbers) >= k and kept.scores[k - 1] > found.scores[-1]
            if is_past_the_tie or len(found.numbers) < wanted:
                return kept.at(slice(k))
            # Too few are left after the filter and after merging passages, or the last place is tied: fetch more.
            wanted *= 8
        return NOTHING

    def among(self, query: str, numbers: np.ndarray) -> FoundByWords:
        """Score some documents; return those that share a word, best first."""
        tantivy_query = self._tantivy_query(query)
        if tantivy_query is None or not len(numbers):
            return NOTHING
        these = tantivy.Query.const_score_query(self._numbered(numbers), 0.0)
        only = tantivy.Query.boolean_query([(tantivy.Occur.Must, tantivy_query), (tantivy.Occur.Must, these)])
        return self._each_once(self._found(only, len(numbers) + self._passages))

    def matched(
        self, query: str, numbers: Sequence[int], texts: Mapping[int, str] = MappingProxyType({})
    ) -> list[tuple[str, ...]]:
        """Return the query's words that each document has, in any form.

        Words are spelled as in the query; only the first `MOST_LOOKED_FOR` count. Short documents are read. Long ones,
        and those without a text at hand, are looked up in tantivy word by word: reading many long texts took seconds.
        """
        words = _distinct_words(query)
        short = {number for number in numbers if len(texts.get(number, "")) in SHORT}
        long = [number for number in numbers if number not in short]
        found: dict[int, list[str]] = {number: [] for number in numbers}
        forms = {word: set(terms(word, self.language)) for word in words}
        for number in short:
            check_deadline()  # documents may be many
            there = set(terms(texts[number], self.language))
            found[number] = [word for word in words if not forms[word].isdisjoint(there)]
        for word in words if long else ():
            check_deadline()
            for number in self._having(word, long):
                found[number].append(word)
        return [tuple(found[number]) for number in numbers]

    def rarity(self, query: str) -> dict[str, float]:
        """Return the rarity of each word of a query: BM25's idf of its rarest term.

        The words are the same as in `matched`.
        """
        words = _distinct_words(query)
        frequencies = ([self._searcher.doc_freq(BODY, term) for term in terms(word, self.language)] for word in words)
        counts = np.array([min(each, default=0) for each in frequencies], np.int64)  # of the rarest term of each word
        most = counts.max(initial=self._searcher.num_docs)  # counts include removed texts until a merge
        idf = inverse_document_frequency(counts, int(most))
        return dict(zip(words, idf.tolist(), strict=True))

    def _having(self, word: str, numbers: Sequence[int]) -> list[int]:
        """Return which of these documents have a word in any form."""
        tantivy_query = self._tantivy_query(word)
        if tantivy_query is None or not numbers:
            return []
        wanted = tantivy_query, self._numbered(numbers), self._whole_texts()
        unscored = [(tantivy.Occur.Must, tantivy.Query.const_score_query(each, 0.0)) for each in wanted]
        with _as_damage(self._folder, ValueError):
            hits = self._searcher.search(tantivy.Query.boolean_query(unscored), len(numbers), count=False).hits
            return [int(number) for number in self._searcher.fast_field_values(NUMBER, [place for _, place in hits])]

    def _tantivy_query(self, query: str) -> Any:
        """Build tantivy's query for any of the words; a repeated word counts each time."""
        schema = self._index.schema
        each = [
            (tantivy.Occur.Should, tantivy.Query.term_query(schema, BODY, term, index_option="freq"))
            for term in terms(query, self.language)
        ]
        return tantivy.Query.boolean_query(each) if each else None

    def _numbered(self, numbers: Iterable[int]) -> Any:
        """Build tantivy's query for the texts and passages of some numbers."""
        return tantivy.Query.term_set_query(self._index.schema, NUMBER, [int(number) for number in numbers])

    def _whole_texts(self) -> Any:
        """Build tantivy's query for all texts, without passages."""
        return tantivy.Query.term_query(self._index.schema, PASSAGE, 0)

    def _found(self, tantivy_query: Any, wanted: int) -> FoundByWords:
        """Find texts and passages, best first."""
        with _as_damage(self._folder, ValueError):
            hits = self._searcher.search(tantivy_query, wanted, count=False).hits
            places = [place for _, place in hits]
            numbers = np.array(self._searcher.fast_field_values(NUMBER, places), np.int64)
            passage_numbers = np.zeros(len(hits), np.int64)
            if self._passages:
                passage_numbers = np.array(self._searcher.fast_field_values(PASSAGE, places), np.int64)
        scores = np.array([score for score, _ in hits], np.float32)
        order = np.lexsort((passage_numbers, numbers, -scores))
        return FoundByWords(numbers[order], scores[order], passage_numbers[order])

    def _each_once(self, found: FoundByWords) -> FoundByWords:
        """Keep the best row of each document."""
        if not self._passages:
            return found
        return found.at(np.sort(np.unique(found.numbers, return_index=True)[1]))

    @contextmanager
    def _changing(self) -> Iterator[Any]:
        """Yield a writer on a private copy, and commit afterwards.

        Fails if another process has replaced the snapshot to copy, or if tantivy's thread ran out of memory or disk.
        """
        if self._private is None:
            private = ScratchFolder(PRIVATE)
            try:
                _copy(self._folder, private.path)
                self._index = _tantivy_index(private.path, self.language)
            except (FileNotFoundError, ValueError) as error:
                raise FormatError(f"{self._folder}: the index of words was replaced; load the new one") from error
            self._private, self._folder = private, private.path
        with _as_damage(self._folder), _as_shortage():
            writer = self._index.writer(HEAP, 1)
            yield writer
            writer.commit()
            writer.wait_merging_threads()
            self._index.reload()
            self._look()


@contextmanager
def _as_damage(folder: Path, *errors: type[Exception]) -> Iterator[None]:
    """Convert some errors, and tantivy's panics, to a FormatError."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, errors) and type(error).__name__ != "PanicException":
            raise
        raise FormatError(f"{folder}: the index of words is damaged ({error}); it has to be rebuilt") from error


@contextmanager
def _as_shortage() -> Iterator[None]:
    """Replace the error of a writer whose thread has died by a single sentence."""
    try:
        yield
    except ValueError as error:
        if not any(each in str(error) for each in WRITER_ENDED):
            raise
        raise HceError("words could not be written, since memory or disk space ran out; free some") from error


def _distinct_words(query: str) -> list[str]:
    """Return the distinct words of a query, `MOST_LOOKED_FOR` at most."""
    return list(islice(dict.fromkeys(ANY_WORD.findall(query)), MOST_LOOKED_FOR))


def _entry(number: int, passage_number: int, text: str) -> tantivy.Document:
    """Make tantivy's document from a text or a passage."""
    document = tantivy.Document()
    document.add_text(BODY, spelled_out(text))
    document.add_unsigned(NUMBER, number)
    document.add_unsigned(PASSAGE, passage_number)
    return document


def _copy(folder: Path, new: Path) -> None:
    """Copy tantivy's files into an existing folder."""
    for file in folder.iterdir():
        if file.suffix != ".lock" and file.name not in (CHECKSUMS, "snapshot.json"):
            shutil.copyfile(file, new / file.name)


def _tantivy_index(folder: Path, language: str, *, new: bool = False) -> Any:
    if new:
        schema = tantivy.SchemaBuilder()
        schema.add_text_field(BODY, tokenizer_name=ANALYZER, index_option="freq")
        for name in (NUMBER, PASSAGE):
            schema.add_unsigned_field(name, indexed=True, fast=True)
        index = tantivy.Index(schema.build(), str(folder))
    else:
        index = tantivy.Index.open(str(folder))
    index.register_tokenizer(ANALYZER, analyzer(language))
    return index
