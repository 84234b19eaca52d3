"""Store: the durable truth of an index in one SQLite file, and the transactions on it.

A write is one transaction: when it returns it survives a power cut, and until then nothing of it is there. Readers see
one moment, whatever is written meanwhile. Numbers of documents rise and are never given again, so an engine catches up
by "all above the last number I know, less what was removed since".
"""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import datetime, timezone
from functools import lru_cache, partial
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hce.data.documents import Document
from hce.data.text import Passage, hash64
from hce.errors import FormatError, HceError, InputError, WriterBusyError
from hce.index.connections import (
    COLUMNS,
    SCHEMA,
    SECONDS_TO_WAIT,
    Connection,
    Connections,
    change_checksum,
    drop_beside,
    has_table,
    heeding_deadlines,
    make_beside,
    make_passages,
    row_checksum,
    swap_beside,
    vector_checksum,
)
from hce.index.filters import (
    SAMPLE,
    FieldSummary,
    Filter,
    compile_filter,
    facet_query,
    field_exists,
    field_names,
    summarize_fields,
)

LONGEST_REMEMBERED = 2000  # characters of a text whose key is remembered; thousands of long texts would fill the memory
STORE_FILE = "documents.sqlite"

# Pages of 16 KB waste little around vectors of a few KB. A log of up to 64 MB keeps the copying of pages into the main
# file out of most writes.
PAGE = 16_384
LOG_BYTES = 64 * 2**20
WORTH_A_COPY = 0.02  # of the pages that are free

PARAMETERS_AT_ONCE = 4096
MOST_DIMENSIONS = 1 << 20
ROWS_PER_FETCH = 8192
MOMENTS = f"SELECT {', '.join(COLUMNS['changes'])} FROM changes"  # noqa: S608  all are from here


class MomentPassedError(HceError):
    """A derived part has gone on to a later moment than a reader sees; open another reader, and look again."""


class Moment(NamedTuple):
    """A moment of a store.

    Attributes:
        change: how many writes there had been.
        token: drawn at random for each write, to distinguish two stores with the same number of writes. It has this
            name on disk and in Milvus, and nothing to do with tokens of texts.
        at: when the write was, in ISO 8601.
        documents: how many documents there were.
        last: the last number given so far.
    """

    change: int
    token: str
    at: str
    documents: int
    last: int


class WriteMark(NamedTuple):
    """The identity of a write of a store: see `Moment`."""

    change: int
    token: str


class Entry(NamedTuple):
    """A document with its number and its vector, of shape (n,), float32."""

    number: int
    document: Document
    vector: np.ndarray


class FacetCount(NamedTuple):
    """A value of a field, and how many documents have it."""

    value: str | int | float | bool
    documents: int


class CutPassages(NamedTuple):
    """The passages of a long document: their places in its `full_text`, in order, and vectors, of shape (P, n)."""

    extents: Sequence[Passage]
    vectors: np.ndarray


class PassageVectors(NamedTuple):
    """Passages by number: numbers, rising, and those of their documents, of shape (P,); vectors of shape (P, n)."""

    numbers: np.ndarray
    documents: np.ndarray
    vectors: np.ndarray


class Store:
    """One SQLite file, read and written from any number of threads and processes.

    One writes at a time.
    """

    def __init__(self, folder: str | Path, dim: int) -> None:
        self.path = Path(folder) / STORE_FILE
        self.dim = dim
        self._connections = Connections(self.path)

    @classmethod
    def create(cls, folder: str | Path, dim: int) -> Store:
        """Make an empty store in a folder that has none."""
        store = cls(folder, dim)
        with store._errors(), closing(sqlite3.connect(store.path, isolation_level=None)) as connection:
            connection.execute(f"PRAGMA page_size = {PAGE}")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(SCHEMA)
            first = (0, secrets.token_hex(8), now(), 0, 0)
            row = (*first, change_checksum(connection, first))
            connection.execute("INSERT INTO changes VALUES (?, ?, ?, ?, ?, ?)", row)
        return store

    @contextmanager
    def reading(self) -> Iterator[Reader]:
        """Open one consistent view, whatever is written meanwhile."""
        with self._errors(), self._connections.lend() as connection, heeding_deadlines(connection):
            connection.execute("BEGIN")
            yield Reader(connection, self.dim)

    @contextmanager
    def reading_beside(self, dim: int) -> Iterator[Reader]:
        """Open one moment with the standby vectors, of length `dim`, as the active ones."""
        with self._errors(), self._connections.lend() as connection, heeding_deadlines(connection):
            connection.execute("BEGIN")
            for table in ("vectors", "passages"):  # names that are temporary go before all others
                connection.execute(f"CREATE TEMP VIEW {table} AS SELECT * FROM main.{table}_beside")  # noqa: S608
            reader = Reader(connection, dim)
            reader.dim = dim
            yield reader

    @contextmanager
    def writing(self, wait: float | None = None) -> Iterator[Writer]:
        """Open one transaction: all of it is durable, or on any error nothing.

        Raises:
            InputError: someone else is still writing after `wait` seconds, by default `SECONDS_TO_WAIT`; or the folder
                was replaced since it was opened.
        """
        with self._errors(), self._connections.lend() as connection:
            if not self._connections.can_write(connection):
                raise sqlite3.OperationalError("attempt to write a readonly database")
            try:
                _be_patient(connection, SECONDS_TO_WAIT if wait is None else wait)
                connection.execute("BEGIN IMMEDIATE")
                writer = Writer(connection, self.dim)
                yield writer
                self._commit(connection, writer)
            finally:
                _be_patient(connection, SECONDS_TO_WAIT)

    def compact(self) -> None:
        """Give the space of removed documents back, if it is worth a copy of the rest."""
        with self._errors(), self._connections.lend() as connection:
            (pages,), (free,) = (connection.execute(f"PRAGMA {each}_count").fetchone() for each in ("page", "freelist"))
            if free > WORTH_A_COPY * pages:
                connection.execute("VACUUM")
            self._connections.copy_log(connection)
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            connection.execute(f"PRAGMA user_version = {version}")  # a write, which starts the log again

    def close(self) -> None:
        """Close the file; nothing is lost by not doing so."""
        self._connections.close()

    def _commit(self, connection: Connection, writer: Writer) -> None:
        """Make a transaction durable, and keep the log short."""
        if connection.is_inherited:
            raise InputError(f"{self.path.parent}: a forked process cannot finish what its parent writes; write anew")
        writer.record()
        connection.execute("COMMIT")
        if self._connections.log_size() > LOG_BYTES:
            with suppress(sqlite3.Error, HceError):  # the write is done; who writes next copies the log
                _be_patient(connection, 0)
                self._connections.copy_log(connection)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn errors of SQLite into ours, which say what to do."""
        folder = self.path.parent
        try:
            yield
        except sqlite3.OperationalError as error:
            if "locked" in str(error) or "busy" in str(error):
                raise WriterBusyError(
                    f"{folder}: another process is writing to this index; try again when it is done"
                ) from error
            if "decode" in str(error):  # a text that is no Unicode any more
                raise _damaged("a text") from error
            raise InputError(
                f"{folder}: {error}; nothing was changed: check the disk's space and permissions"
            ) from error
        # What the caller passed, not the file: a wrong argument must not look like lost data.
        except (sqlite3.ProgrammingError, sqlite3.InterfaceError) as error:
            raise InputError(f"{folder}: {error}; nothing was changed: pass texts and whole numbers") from error
        except OverflowError as error:
            if "SQLite" not in str(error):
                raise
            raise InputError(f"{folder}: {error}; nothing was changed: pass numbers below 2^63") from error
        except sqlite3.DatabaseError as error:
            raise FormatError(
                f"{folder}: {STORE_FILE} is damaged ({error}); restore it from a copy or index anew"
            ) from error


class Reader:
    """One moment of a store.

    Attributes:
        dim: the length of a vector; the store notes it once it has had another one than at creation.
    """

    def __init__(self, connection: sqlite3.Connection, dim: int) -> None:
        self._connection = connection
        self.dim = self._one("PRAGMA user_version")[0] or dim
        if not 0 < self.dim <= MOST_DIMENSIONS:
            raise _damaged("the length of its vectors")

    def moment(self) -> Moment:
        """Return the moment that this reader sees."""
        row = self._one(f"{MOMENTS} ORDER BY change DESC LIMIT 1")
        if row is None:
            raise FormatError(f"{STORE_FILE} is damaged (it knows of no change); restore it from a copy or index anew")
        return Moment(*row)

    def moment_at(self, change: int, token: str) -> Moment | None:
        """Return an earlier moment of this store; None if the store never was in it."""
        row = self._one(f"{MOMENTS} WHERE change = ? AND token = ?", (change, token))
        return Moment(*row) if row else None

    def find(self, doc_id: str) -> Document | None:
        """Return the document of an id, or None."""
        row = self._one("SELECT id, title, text, metadata FROM documents WHERE id = ?", (doc_id,))
        return _document(*row) if row else None

    def present(self, ids: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Return which of these ids there are: id → number, and the key of its content."""
        rows = self._each_in("SELECT id, number, content FROM documents WHERE id IN ({})", ids)
        return {doc_id: (number, content) for doc_id, number, content in rows}

    def documents(self, numbers: Iterable[int]) -> dict[int, Document]:
        """Return documents by number; those that are not there are left out."""
        rows = self._each_in("SELECT number, id, title, text, metadata FROM documents WHERE number IN ({})", numbers)
        return {number: _document(*row) for number, *row in rows}

    def entries(self, after: int = 0) -> Iterator[Entry]:
        """Read all documents above `after` with number and vector, in order of number."""
        query = (
            "SELECT number, vector, id, title, text, metadata FROM documents JOIN vectors USING (number) "
            "WHERE number > ? ORDER BY number"
        )
        for number, vector, *row in self._connection.execute(query, (after,)):
            yield Entry(number, _document(*row), _vectors([vector], self.dim)[0])

    def numbers(self) -> np.ndarray:
        """Return the numbers of all documents, rising, of shape (N,), int64."""
        return np.sort(self._numbers("SELECT number FROM documents"))  # by way of a small index, in its order

    def contents(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of all documents, rising, int64, and their content keys."""
        rows = self._connection.execute("SELECT number, content FROM documents").fetchall()  # of a small index
        table = np.array(sorted(rows), dtype=np.int64).reshape(len(rows), 2)
        return table[:, 0], table[:, 1]

    def vectors(self, after: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Read the numbers above `after`, rising, (N,), and their vectors, (N, n)."""
        query = "SELECT number, vector FROM vectors WHERE number > ? ORDER BY number"
        (numbers,), vectors = self._with_vectors(query, after, self.count_after(after))
        return numbers, vectors

    def texts(self, after: int = 0) -> Iterator[tuple[int, str]]:
        """Read number and full text of each document above `after`, in order."""
        query = "SELECT number, title, text FROM documents WHERE number > ? ORDER BY number"
        for number, title, text in self._connection.execute(query, (after,)):
            yield number, Document("", text, title).full_text

    def vectors_at(self, numbers: np.ndarray) -> np.ndarray:
        """Return the vectors of documents, in the order given, of shape (m, n)."""
        rows = self._each_in("SELECT number, vector FROM vectors WHERE number IN ({})", numbers.tolist())
        found = {number: _vectors([vector], self.dim)[0] for number, vector in rows}
        return np.array([found[number] for number in numbers.tolist()], np.float32).reshape(len(numbers), self.dim)

    def vectors_of(self, texts: Iterable[str]) -> dict[str, np.ndarray]:
        """Return the vectors of those texts that some document here has."""
        wanted = {content_key(text): text for text in texts}
        query = "SELECT content, title, text, vector FROM documents JOIN vectors USING (number) WHERE content IN ({})"
        found = {}
        for content, title, text, vector in self._each_in(query, wanted):
            if Document("", text, title).full_text == wanted[content]:  # and not another text of the same key
                found[wanted[content]] = _vectors([vector], self.dim)[0]
        return found

    def has_passages(self) -> bool:
        """Return whether a document here is long enough to be read in passages."""
        return has_table(self._connection, "passages") and bool(self._one("SELECT 1 FROM passages LIMIT 1"))

    def passages(self, after: int = 0) -> PassageVectors:
        """Read the passages of documents above `after`; where `has_passages`."""
        (count,) = self._one("SELECT count(*) FROM passages WHERE document > ?", (after,))
        # By way of the index, which leads to the last documents alone; numbers of passages rise with their documents'.
        query = "SELECT number, document, vector FROM passages WHERE document > ? ORDER BY document, number"
        (numbers, documents), vectors = self._with_vectors(query, after, count)
        if (np.diff(numbers) < 0).any():  # they do not where a rebuild was broken off
            order = np.argsort(numbers)
            return PassageVectors(numbers[order], documents[order], vectors[order])
        return PassageVectors(numbers, documents, vectors)

    def passage_numbers(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of all passages, rising, int64, and of their documents."""
        rows = self._connection.execute("SELECT number, document FROM passages ORDER BY number").fetchall()
        table = np.array(rows, dtype=np.int64).reshape(len(rows), 2)
        return table[:, 0], table[:, 1]

    def passages_of(self, documents: Iterable[int]) -> PassageVectors:
        """Read the passages of some documents; where `has_passages`."""
        query = "SELECT number, document, vector FROM passages WHERE document IN ({})"
        rows = sorted(self._each_in(query, documents))
        numbers, of, blobs = list(zip(*rows, strict=True)) or ((), (), ())
        return PassageVectors(np.array(numbers, np.int64), np.array(of, np.int64), _vectors(blobs, self.dim))

    def extents(self, numbers: Iterable[int]) -> dict[int, Passage]:
        """Return the places of passages in their `full_text`, by number."""
        rows = self._each_in("SELECT number, start, stop FROM passages WHERE number IN ({})", numbers)
        return {number: Passage(*extent) for number, *extent in rows}

    def all_extents(self, after: int = 0) -> Iterator[tuple[int, dict[int, Passage]]]:
        """Yield each long document above `after` with its passages: number → extent."""
        if not has_table(self._connection, "passages"):
            return
        query = "SELECT document, number, start, stop FROM passages WHERE document > ? ORDER BY document, number"
        for document, rows in groupby(self._connection.execute(query, (after,)), key=itemgetter(0)):
            yield document, {number: Passage(*extent) for _, number, *extent in rows}

    def last_beside(self) -> int | None:
        """Return the last number with a standby vector, or 0; None without the table."""
        if not has_table(self._connection, "vectors_beside"):
            return None
        return int(self._one("SELECT coalesce(max(number), 0) FROM vectors_beside")[0])

    def count_after(self, number: int) -> int:
        """Count the documents above a number."""
        return int(self._one("SELECT count(*) FROM vectors WHERE number > ?", (number,))[0])

    def removed_since(self, change: int) -> np.ndarray:
        """Return the numbers removed by later writes than this one."""
        return self._numbers("SELECT number FROM removed WHERE change > ?", (change,))

    def raw_rows(self, table: str) -> Iterator[tuple[Any, ...]]:
        """Read the rows of a table unchecked, texts as bytes, and last the checksum."""
        self._connection.text_factory = bytes
        try:
            query = f"SELECT {', '.join(COLUMNS[table])}, checksum FROM {table}"  # noqa: S608  all are from here
            yield from self._connection.execute(query)
        finally:
            self._connection.text_factory = str

    def change_checksum(self, change: Sequence[Any]) -> int:
        """Return what the checksum of a raw row of `changes` has to be."""
        return change_checksum(self._connection, change)

    def row_count(self, table: str) -> int:
        """Count the rows of a table; 0 if there is none of this name."""
        if not has_table(self._connection, table):
            return 0
        return int(self._one(f"SELECT count(*) FROM {table}")[0])  # noqa: S608

    def faults(self) -> list[str]:
        """Return what SQLite finds wrong with its own pages, a line each."""
        lines = [str(line) for (line,) in self._connection.execute("PRAGMA integrity_check")]
        return [] if lines == ["ok"] else lines

    def numbers_at(self, moment: Moment) -> np.ndarray:
        """Return the numbers of the documents up to a moment, rising."""
        numbers = np.union1d(self.numbers(), self.removed_since(moment.change))
        return numbers[numbers <= moment.last]

    def removed_up_to(self, number: int) -> int:
        """Count how many of the first `number` documents are not there any more."""
        return int(self._one("SELECT count(*) FROM removed WHERE number <= ?", (number,))[0])

    def numbers_where(self, conditions: Filter) -> np.ndarray:
        """Return the numbers of documents whose metadata fit, rising.

        Raises:
            InputError: a filter that is not valid, or a field that no document has.
        """
        condition = compile_filter(conditions)
        query = f"SELECT number FROM documents WHERE {condition.sql} ORDER BY number"  # noqa: S608  see hce.index.filters
        numbers = self._numbers(query, condition.parameters)
        self._require_fields(condition.loose if len(numbers) else condition.fields)
        return numbers

    def facet(self, field: str, conditions: Filter | None, most: int) -> list[FacetCount]:
        """Count the documents that fulfil conditions by a field's values, most first.

        Raises:
            InputError: a filter that is not valid, or a field that no document has.
        """
        query = facet_query(field, conditions, most)
        # Half a surrogate pair, which JSON may hold and no filter can ask for, is shown as what cannot be read.
        self._connection.text_factory = partial(str, encoding="utf-8", errors="replace")
        try:
            rows = self._connection.execute(query.sql, query.parameters).fetchall()
        finally:
            self._connection.text_factory = str
        if not rows:
            self._require_fields(query.fields)
        return [FacetCount(bool(value) if kind == "bool" else value, documents) for value, kind, documents in rows]

    def fields(self) -> list[FieldSummary]:
        """Summarize the metadata of the first and the last documents, `SAMPLE` in all."""
        query = "SELECT number, metadata FROM documents ORDER BY number {} LIMIT ?"
        ends = [self._connection.execute(query.format(order), (SAMPLE // 2,)).fetchall() for order in ("ASC", "DESC")]
        rows = dict(ends[0] + ends[1][::-1])
        return summarize_fields(json.loads(metadata) for metadata in rows.values())

    def _require_fields(self, fields: Iterable[str]) -> None:
        """Refuse fields that no document has, unless there are no documents."""
        for field in fields:
            condition = field_exists(field)
            query = f"SELECT count(*) FROM (SELECT 1 FROM documents WHERE {condition.sql} LIMIT 1)"  # noqa: S608
            if self._connection.execute(query, condition.parameters).fetchone() == (1,):
                continue
            rows = self._connection.execute("SELECT metadata FROM documents LIMIT ?", (SAMPLE,)).fetchall()
            if rows:
                known = ", ".join(field_names(json.loads(metadata) for (metadata,) in rows)) or "none"
                raise InputError(f"no document has a field {field!r} to filter by; known fields: {known}")

    def _one(self, query: str, parameters: Sequence[Any] = ()) -> Any:
        return self._connection.execute(query, parameters).fetchone()

    def _numbers(self, query: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> np.ndarray:
        """Read a column of numbers, of shape (rows,), int64."""
        return np.fromiter((number for (number,) in self._connection.execute(query, parameters)), dtype=np.int64)

    def _with_vectors(self, query: str, after: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Read rows of numbers and a vector: (columns, count) and (count, n)."""
        rows = self._connection.execute(query, (after,))
        numbers = np.empty((len(rows.description) - 1, count), np.int64)
        vectors = np.empty((count, self.dim), np.float32)
        for start in range(0, count, ROWS_PER_FETCH):
            if not (fetched := rows.fetchmany(ROWS_PER_FETCH)):
                raise _damaged("a table")
            *columns, blobs = zip(*fetched, strict=True)
            numbers[:, start : start + len(blobs)] = columns
            vectors[start : start + len(blobs)] = _vectors(blobs, self.dim)
        return numbers, vectors

    def are_there(self, numbers: np.ndarray) -> np.ndarray:
        """Return which of some numbers, of any shape, are there, as bool."""
        asked = np.unique(numbers)
        found = self._each_in("SELECT number FROM documents WHERE number IN ({})", asked.tolist())
        return np.isin(numbers, np.fromiter((number for (number,) in found), np.int64))

    def _each_in(self, query: str, values: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
        values = iter(values)
        while some := list(islice(values, PARAMETERS_AT_ONCE)):
            yield from self._connection.execute(query.format(", ".join("?" * len(some))), some)


class Writer(Reader):
    """One transaction under way."""

    def __init__(self, connection: sqlite3.Connection, dim: int) -> None:
        super().__init__(connection, dim)
        self._before = self.moment()
        self._last, self._documents = self._before.last, self._before.documents
        self._touched = False
        self.next = WriteMark(self._before.change + 1, secrets.token_hex(8))  # of this write, once it is done

    def insert(
        self, documents: Sequence[Document], vectors: np.ndarray, passages: Mapping[int, CutPassages] | None = None
    ) -> None:
        """Add documents with vectors, of shape (B, n), and passages by position.

        Raises:
            InputError: an id is there already.
        """
        numbers = range(self._last + 1, self._last + 1 + len(documents))
        rows = [(number, *_row(document)) for number, document in zip(numbers, documents, strict=True)]
        try:
            self._insert("documents", rows, row_checksum)
        except sqlite3.IntegrityError as error:
            raise self._refused(documents) from error
        self._insert("vectors", zip(numbers, _blobs(vectors), strict=True), vector_checksum)
        for position, each in (passages or {}).items():
            self.insert_passages(numbers[position], each)
        self._last += len(documents)
        self._documents += len(documents)
        self._touched |= bool(documents)

    def insert_passages(self, number: int, passages: CutPassages) -> None:
        """Add the passages of a document that has none yet."""
        make_passages(self._connection)
        self._insert_passages("passages", number, passages)
        self._touched = True

    def _insert_passages(self, table: str, number: int, passages: CutPassages) -> None:
        blobs = _blobs(passages.vectors)
        rows = [(number, *extent, blob) for extent, blob in zip(passages.extents, blobs, strict=True)]
        self._insert(table, rows, row_checksum)

    def delete(self, numbers: Sequence[int]) -> None:
        """Take documents out, and their passages."""
        queries = ["DELETE FROM documents WHERE number = ?", "DELETE FROM vectors WHERE number = ?"]
        if has_table(self._connection, "passages"):
            queries.append("DELETE FROM passages WHERE document = ?")
        if self.last_beside() is not None:
            queries.append("DELETE FROM vectors_beside WHERE number = ?")
            queries.append("DELETE FROM passages_beside WHERE document = ?")
        for query in queries:
            self._connection.executemany(query, ((number,) for number in numbers))
        gone = ((self.next.change, number) for number in numbers)
        self._connection.executemany("INSERT INTO removed VALUES (?, ?)", gone)
        self._documents -= len(numbers)
        self._touched |= bool(numbers)

    # The next three make a store a copy of another one, without vectors: see `hce.milvus.replica`.

    def start_over(self, dim: int) -> None:
        """Take everything out, and expect vectors of another length."""
        make_passages(self._connection)
        for table in ("documents", "vectors", "passages", "removed", "changes"):
            self._connection.execute(f"DELETE FROM {table}")  # noqa: S608  all are from here
        self._connection.execute(f"PRAGMA user_version = {int(dim)}")

    def copy(self, documents: Mapping[int, Document], extents: Mapping[int, tuple[int, Passage]]) -> None:
        """Add documents by number, and passages: number → document's number and extent."""
        self._insert("documents", ((number, *_row(each)) for number, each in documents.items()), row_checksum)
        rows = ((number, document, *extent) for number, (document, extent) in extents.items())
        query = "INSERT OR REPLACE INTO passages (number, document, start, stop, vector) VALUES (?, ?, ?, ?, x'')"
        self._connection.executemany(query, rows)

    def go_to(self, moment: Moment, removed: Iterable[int]) -> None:
        """Take documents out, and be at a moment of the other store."""
        for number in removed:
            self._connection.execute("DELETE FROM documents WHERE number = ?", (number,))
            self._connection.execute("DELETE FROM passages WHERE document = ?", (number,))
            self._connection.execute("INSERT OR IGNORE INTO removed VALUES (?, ?)", (moment.change, number))
        self._insert_change(moment)

    def replace(self, documents: Sequence[Document]) -> None:
        """Write documents again whose `full_text` is what it was."""
        numbers = {doc_id: number for doc_id, (number, _) in self.present(each.id for each in documents).items()}
        rows = [(numbers[row[0]], *row) for row in map(_row, documents) if row[0] in numbers]
        query = "UPDATE documents SET content = ?, metadata = ?, title = ?, text = ? WHERE number = ?"
        self._connection.executemany(query, ((*rest, number) for number, _, *rest in rows))
        query = "UPDATE documents SET checksum = ? WHERE number = ?"
        self._connection.executemany(query, ((row_checksum(*row), row[0]) for row in rows))
        self._touched |= bool(documents)

    # Standby vectors are those of another encoder. Nothing of them can be found before `swap_beside`.

    def make_beside(self) -> None:
        """Make empty tables for standby vectors."""
        make_beside(self._connection)

    def fill_beside(self, numbers: Sequence[int], vectors: np.ndarray, passages: Mapping[int, CutPassages]) -> None:
        """Insert standby vectors, of shape (numbers, n), and passages; not of documents removed meanwhile."""
        there = {number for (number,) in self._each_in("SELECT number FROM vectors WHERE number IN ({})", numbers)}
        rows = ((number, blob) for number, blob in zip(numbers, _blobs(vectors), strict=True) if number in there)
        self._insert("vectors_beside", rows, vector_checksum)
        for position, each in passages.items():
            if numbers[position] in there:
                self._insert_passages("passages_beside", numbers[position], each)

    def drop_beside(self) -> None:
        """Drop the standby vectors."""
        drop_beside(self._connection)

    def swap_beside(self, dim: int) -> None:
        """Exchange the active vectors and the standby ones, of length `dim`."""
        swap_beside(self._connection)
        self._connection.execute(f"PRAGMA user_version = {int(dim)}")
        self._touched = True

    def reindex(self) -> None:
        """Have SQLite make its indexes again from the tables."""
        self._connection.execute("REINDEX")

    def recount(self, documents: int) -> None:
        """Count the documents again, and find which of the first `documents` are gone."""
        there = self._connection.execute("SELECT number FROM vectors UNION SELECT number FROM documents").fetchall()
        numbers = {number for (number,) in there}
        self._last = max([self._last, documents, *numbers])
        self._documents = self.row_count("documents")
        self._connection.execute("DELETE FROM removed")
        gone = ((self._before.change, number) for number in range(1, documents + 1) if number not in numbers)
        self._connection.executemany("INSERT INTO removed VALUES (?, ?)", gone)
        self._connection.execute("DELETE FROM changes")
        self._touched = True

    def _insert(self, table: str, rows: Iterable[tuple[Any, ...]], checksum: Callable[..., int]) -> None:
        """Put rows into a table, each with its checksum."""
        columns, rows = (*COLUMNS[table], "checksum"), ((*row, checksum(*row)) for row in rows)
        marks = ", ".join("?" * len(columns))
        query = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})"  # noqa: S608  all three are from here
        self._connection.executemany(query, rows)

    def forget(self, documents: int) -> None:
        """Delete what is known of earlier moments, without any derived part.

        It stays known which of the first `documents`, those at creation, were removed.
        """
        change = self._before.change
        self._connection.execute("DELETE FROM changes WHERE change < ?", (change,))
        self._connection.execute("DELETE FROM removed WHERE change < ? AND number > ?", (change, documents))

    def _refused(self, documents: Sequence[Document]) -> InputError:
        """Return why these were not inserted: an id that comes twice, or metadata."""
        seen = {
            doc_id
            for doc_id, (number, _) in self.present(each.id for each in documents).items()
            if number <= self._last
        }
        for document in documents:
            if document.id in seen:
                return InputError(f"id {document.id!r} comes twice; make ids unique")
            seen.add(document.id)
        return InputError(f"the metadata of {documents[0].id!r} or a later document is no JSON for SQLite; simplify it")

    def record(self) -> None:
        """Write down that there was a change, if there was one."""
        if self._touched:
            self._insert_change(Moment(*self.next, now(), self._documents, self._last))

    def _insert_change(self, moment: Moment) -> None:
        self._insert("changes", [moment], lambda *change: change_checksum(self._connection, change))


def content_key(text: str) -> int:
    """Hash what an encoder reads of a document to 64 bits."""
    return _remembered_key(text) if len(text) <= LONGEST_REMEMBERED else hash64(text, signed=True)


@lru_cache(maxsize=4096)  # a text is looked for just before it is written
def _remembered_key(text: str) -> int:
    return hash64(text, signed=True)


def now() -> str:
    """Return the time, in ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _row(document: Document) -> tuple[str, int, str, str, str]:
    key = content_key(document.full_text)
    return document.id, key, _metadata_json(document) if document.metadata else "{}", document.title, document.text


def _document(doc_id: str, title: str, text: str, metadata: str) -> Document:
    try:
        return Document(doc_id, text, title, json.loads(metadata) if metadata != "{}" else {})
    except (TypeError, ValueError, RecursionError) as error:
        raise _damaged(f"the metadata of {doc_id!r}") from error


def _blobs(vectors: np.ndarray) -> Iterator[bytes]:
    """Yield vectors, of shape (N, n), as the store keeps them."""
    return map(bytes, np.ascontiguousarray(vectors, dtype="<f4"))


def _vectors(blobs: Sequence[bytes], dim: int) -> np.ndarray:
    """Return blobs as vectors, of shape (blobs, n)."""
    try:
        return np.frombuffer(b"".join(blobs), dtype="<f4").reshape(len(blobs), dim)
    except (TypeError, ValueError) as error:
        raise _damaged("a vector") from error


def _damaged(what: str) -> FormatError:
    return FormatError(f"{STORE_FILE}: {what} is damaged; 'hce check' tells which and what can be healed")


def _metadata_json(document: Document) -> str:
    """Write metadata as JSON for SQLite: NaN and infinity become null."""
    try:
        try:
            line = json.dumps(document.metadata, ensure_ascii=False, default=str, allow_nan=False)
        except ValueError:
            line = json.dumps(_without_nan(document.metadata), ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the metadata of {document.id!r} cannot be written as JSON ({error}); simplify it") from error
    return line.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair goes back to its JSON escape


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _be_patient(connection: sqlite3.Connection, seconds: float) -> None:
    connection.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")
