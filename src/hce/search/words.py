"""Words: BM25 over numbered texts, by tantivy; derived from the store, like an engine of vectors.

tantivy was chosen over SQLite's FTS5 by measurement (docs/LOG.md): level with bm25s in quality, and at 118 thousand
documents five times faster than bm25s and seventy times faster than FTS5. An index of words lives in a folder: a
snapshot that is only read, or a private copy from the first change on.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import tantivy

from hce.errors import FormatError, InputError

LANGUAGES = (
    *("arabic", "danish", "dutch", "english", "finnish", "french", "german", "greek", "hungarian", "italian"),
    *("norwegian", "portuguese", "romanian", "russian", "spanish", "swedish", "tamil", "turkish"),
)
"""The languages whose words are stemmed; "none" matches words as they are written."""

BODY, NUMBER, ANALYZER = "body", "number", "words"
HEAP = 64 << 20
SPARE = 8  # hits beyond k, so that ties at the last place are settled by number
LONGEST_WORD = 255  # bytes; what is longer is no word

WORD = re.compile(r"\w+")
# From the beginning of a word only: tried at each letter, it took most of the time of a search.
IDENTIFIER = re.compile(r"(?<!\w)\w*?(?:[^\W_]_[^\W_]|[a-z][A-Z]|[A-Z]{2}[a-z])\w*")
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_A-Za-z]+|\d+")
# Scripts that put no spaces between words: Thai, Lao, Myanmar, Khmer, Hiragana, Katakana, Han.
UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]+")


class Matches(NamedTuple):
    """Documents that share a word with a query.

    Attributes:
        numbers: best first, of shape (m,), int64.
        scores: by BM25, of shape (m,), float32.
    """

    numbers: np.ndarray
    scores: np.ndarray


def spelled_out(text: str) -> str:
    """Prepare a text for a tokenizer that knows words between spaces only.

    An identifier is followed by its parts; a run of a script without spaces becomes its pairs of characters.

    >>> spelled_out("call getUserName or parse_url")
    'call getUserName get User Name or parse_url parse url'
    >>> spelled_out("東京都 in Japan")
    ' 東京 京都  in Japan'
    """
    text = IDENTIFIER.sub(lambda found: " ".join([found[0], *PART.findall(found[0])]), text)
    return UNSPACED.sub(lambda found: f" {' '.join(_pairs(found[0]))} ", text)


def _pairs(run: str) -> list[str]:
    return [run] if len(run) == 1 else [run[place : place + 2] for place in range(len(run) - 1)]


NOTHING = Matches(np.empty(0, np.int64), np.empty(0, np.float32))


class Words:
    """The words of numbered texts.

    Attributes:
        FORMAT: of a snapshot: tantivy's own, and how texts are cut into words.
        language: whose endings are cut off, one of `LANGUAGES` or "none".
    """

    FORMAT: ClassVar[str] = f"{tantivy.__version__.rpartition(', ')[2]}, words 1"  # type: ignore[attr-defined]

    def __init__(self, folder: Path, language: str, private: tempfile.TemporaryDirectory[str] | None = None) -> None:
        self.language = checked_language(language)
        self._folder = folder
        self._private = private  # where changes may be made; deleted along with this object
        self._index = _opened(folder, language)
        self._searcher = self._index.searcher()

    @classmethod
    def new(cls, language: str = "english") -> Words:
        """Make an index of words without a text."""
        private = _private_folder()
        _opened(Path(private.name), checked_language(language), new=True)
        return cls(Path(private.name), language, private)

    @classmethod
    def load(cls, folder: Path, language: str) -> Words:
        """Open what `save` wrote.

        Raises:
            FormatError: nothing is there, or it is damaged.
        """
        try:
            return cls(folder, language)
        except (ValueError, OSError) as error:
            raise FormatError(f"{folder}: the index of words is damaged ({error}); it has to be rebuilt") from error

    def save(self, folder: Path) -> None:
        """Copy the index into an existing, empty folder."""
        shutil.copytree(self._folder, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.lock"))

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

    def terms(self, text: str) -> list[str]:
        """Return the terms of a text in order, as documents are indexed by: lower case, without endings."""
        return list(_analyzer(self.language).analyze(spelled_out(text)))

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
        words = {word: set(self.terms(word)) for word in WORD.findall(query)}
        found = (set(self.terms(text)) for text in texts)
        return [tuple(word for word, terms in words.items() if terms & there) for there in found]

    def _asked(self, query: str) -> Any:
        """Build tantivy's query: any of the words, a repeated one counting as often as it stands there."""
        terms = self.terms(query)
        schema = self._index.schema
        each = [
            (tantivy.Occur.Should, tantivy.Query.term_query(schema, BODY, term, index_option="freq")) for term in terms
        ]
        return tantivy.Query.boolean_query(each) if each else None

    def _found(self, asked: Any, depth: int) -> Matches:
        hits = self._searcher.search(asked, depth, count=False).hits
        numbers = np.array(self._searcher.fast_field_values(NUMBER, [place for _, place in hits]), np.int64)
        scores = np.array([score for score, _ in hits], np.float32)
        order = np.lexsort((numbers, -scores))
        return Matches(numbers[order], scores[order])

    @contextmanager
    def _changing(self) -> Iterator[Any]:
        """Yield a writer on a private copy; what is written is searched afterwards."""
        if self._private is None:
            self._private = _private_folder()
            self.save(Path(self._private.name))
            self._folder = Path(self._private.name)
            self._index = _opened(self._folder, self.language)
        writer = self._index.writer(HEAP, 1)
        yield writer
        writer.commit()
        writer.wait_merging_threads()
        self._index.reload()
        self._searcher = self._index.searcher()


def _among(found: Matches, allowed: np.ndarray) -> Matches:
    kept = np.isin(found.numbers, allowed)
    return Matches(found.numbers[kept], found.scores[kept])


def _private_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="hce-words-")


def checked_language(language: str) -> str:
    """Return a language whose words can be stemmed.

    Raises:
        InputError: there is no stemmer for it.
    """
    if language not in (*LANGUAGES, "none"):
        raise InputError(f"language {language!r}: choose one of {', '.join(LANGUAGES)}, or none")
    return language


@cache
def _analyzer(language: str) -> Any:
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.regex(r"\w+"))
    builder = builder.filter(tantivy.Filter.remove_long(LONGEST_WORD)).filter(tantivy.Filter.lowercase())
    return (builder if language == "none" else builder.filter(tantivy.Filter.stemmer(language))).build()


def _opened(folder: Path, language: str, *, new: bool = False) -> Any:
    if new:
        schema = tantivy.SchemaBuilder()
        schema.add_text_field(BODY, tokenizer_name=ANALYZER, index_option="freq")
        schema.add_unsigned_field(NUMBER, indexed=True, fast=True)
        index = tantivy.Index(schema.build(), str(folder))
    else:
        index = tantivy.Index.open(str(folder))
    index.register_tokenizer(ANALYZER, _analyzer(language))
    return index
