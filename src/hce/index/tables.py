"""Tables: the schema of a store, and what one transaction reads and writes.

Document numbers rise and are never reused. So an engine catches up by adding all numbers above its last one and
dropping those removed since.

SQLite detects damage to the structure of its pages, but not to the values in them: a flipped bit only makes another
text. So each row has a checksum.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from itertools import groupby, islice
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from hce.data.text import Document, Passage, hash64
from hce.errors import FormatError, InputError
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

STORE_FILE = "documents.sqlite"
PARAMETERS_AT_ONCE = 4096
MOST_DIMENSIONS = 1 << 20
ROWS_PER_FETCH = 8192


# ------------------------------------------------------------------------------------------------- schema

# The on-disk format: a change here needs a new `FORMAT` in `hce.index.manifest`.

SCHEMA = """
CREATE TABLE documents (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    content INTEGER NOT NULL,
    metadata TEXT NOT NULL CHECK (json_valid(metadata)),
    title TEXT NOT NULL,
    text TEXT NOT NULL, checksum INTEGER
);
CREATE INDEX documents_by_content ON documents (content);
CREATE TABLE vectors (number INTEGER PRIMARY KEY, vector BLOB NOT NULL, checksum INTEGER);
CREATE TABLE changes (
    change INTEGER PRIMARY KEY, token TEXT NOT NULL, at TEXT NOT NULL, documents INTEGER NOT NULL, last INTEGER NOT NULL
    , checksum INTEGER
);
CREATE TABLE removed (change INTEGER NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (change, number)) WITHOUT ROWID;
"""

# This table is created when first needed. Passage numbers rise too, and AUTOINCREMENT never reuses one.
_PASSAGE_COLUMNS = (
    "(number INTEGER PRIMARY KEY AUTOINCREMENT, document INTEGER NOT NULL, start INTEGER NOT NULL, "
    "stop INTEGER NOT NULL, vector BLOB NOT NULL, checksum INTEGER)"
)
PASSAGES_SCHEMA = f"CREATE TABLE passages {_PASSAGE_COLUMNS}"

# Vectors of the standby encoder: see `hce.index.create`. Activating it swaps the names of two pairs of tables. The swap
# does not rename their SQLite indexes, so each table's index needs a name of its own.
STANDBY_SCHEMA = (
    "CREATE TABLE vectors_beside (number INTEGER PRIMARY KEY, vector BLOB NOT NULL, checksum INTEGER)",
    f"CREATE TABLE passages_beside {_PASSAGE_COLUMNS}",
)
BY_DOCUMENT = ("passages_by_document", "passages_by_document_too")

COLUMNS = {
    "documents": ("number", "id", "content", "metadata", "title", "text"),
    "vectors": ("number", "vector"),
    "passages": ("document", "start", "stop", "vector"),
    "vectors_beside": ("number", "vector"),
    "passages_beside": ("document", "start", "stop", "vector"),
    "changes": ("change", "token", "at", "documents", "last"),
}
"""The columns of each table that has checksums; a row's checksum covers all of these."""
MOMENTS = f"SELECT {', '.join(COLUMNS['changes'])} FROM changes"  # noqa: S608  all are from here
REQUIRED = {"documents", "documents_by_content", "vectors", "changes", "removed"}
FROM_A_COPY = "restore it from a copy or index again"


def _normal(statement: str) -> str:
    """Normalize a CREATE statement: ALTER TABLE changes white space and quotes."""
    one_line = " ".join(statement.split()).rstrip(";").replace("IF NOT EXISTS ", "").replace('"', "")
    return one_line.replace(" ,", ",").replace("( ", "(").replace(" )", ")")


_SQLITES_OWN = "CREATE TABLE sqlite_sequence(name,seq)"  # for AUTOINCREMENT
_ALL = (*filter(str.strip, SCHEMA.split(";")), PASSAGES_SCHEMA, *STANDBY_SCHEMA, _SQLITES_OWN)
KNOWN = {each.split("(")[0].split()[2]: {each} for each in map(_normal, _ALL)}
KNOWN |= {
    name: {f"CREATE INDEX {name} ON {table} (document)" for table in ("passages", "passages_beside")}
    for name in BY_DOCUMENT
}


class Moment(NamedTuple):
    """The state of a store after one write. Its `token` is unrelated to tokens of texts."""

    change: int  # how many writes there have been
    token: str  # random for each write: two stores with equally many writes differ in it
    at: str  # the time of the write, in ISO 8601
    documents: int
    last: int  # the highest number of a document so far


class WriteMark(NamedTuple):
    """The identity of a write: its number and its random token, see `Moment`."""

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
    """The passages of a long document: their extents in its `full_text`, in order, and their vectors, (P, n)."""

    extents: Sequence[Passage]
    vectors: np.ndarray


class PassageVectors(NamedTuple):
    """Passages in order of number: their numbers (P,), their documents' numbers (P,), and their vectors (P, n)."""

    numbers: np.ndarray
    documents: np.ndarray
    vectors: np.ndarray


class Reader:
    """A view of a store at one moment."""

    def __init__(self, connection: sqlite3.Connection, dim: int) -> None:
        self._connection = connection
        self.dim = self._one("PRAGMA user_version")[0] or dim  # recorded by a reindexing, and in a replica
        if not 0 < self.dim <= MOST_DIMENSIONS:
            raise damaged("the length of its vectors")

    def moment(self) -> Moment:
        """Return the moment that this reader sees."""
        if (row := self._one(f"{MOMENTS} ORDER BY change DESC LIMIT 1")) is None:
            raise FormatError(f"{STORE_FILE} is damaged (it records no write); {FROM_A_COPY}")
        return Moment(*row)

    def moment_at(self, change: int, token: str) -> Moment | None:
        """Return an earlier moment; None if it is not of this store, or was forgotten."""
        row = self._one(f"{MOMENTS} WHERE change = ? AND token = ?", (change, token))
        return Moment(*row) if row else None

    def find(self, doc_id: str) -> Document | None:
        """Return the document with this id, or None."""
        row = self._one("SELECT id, title, text, metadata FROM documents WHERE id = ?", (doc_id,))
        return document_of(*row) if row else None

    def present(self, ids: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Return those ids that exist: id → number and content key."""
        rows = self._each_in("SELECT id, number, content FROM documents WHERE id IN ({})", ids)
        return {doc_id: (number, content) for doc_id, number, content in rows}

    def documents(self, numbers: Iterable[int]) -> dict[int, Document]:
        """Return documents by number; skip numbers that do not exist."""
        rows = self._each_in("SELECT number, id, title, text, metadata FROM documents WHERE number IN ({})", numbers)
        return {number: document_of(*row) for number, *row in rows}

    def entries(self, after: int = 0) -> Iterator[Entry]:
        """Yield documents above `after` with number and vector, in order of number."""
        query = (
            "SELECT number, vector, id, title, text, metadata FROM documents JOIN vectors USING (number) "
            "WHERE number > ? ORDER BY number"
        )
        for number, vector, *row in self._connection.execute(query, (after,)):
            yield Entry(number, document_of(*row), vectors_from([vector], self.dim)[0])

    def texts(self, after: int = 0) -> Iterator[tuple[int, str]]:
        """Yield number and full text of each document above `after`, in order."""
        query = "SELECT number, title, text FROM documents WHERE number > ? ORDER BY number"
        for number, title, text in self._connection.execute(query, (after,)):
            yield number, Document("", text, title).full_text

    def numbers(self) -> np.ndarray:
        """Return the numbers of all documents, rising, of shape (N,), int64."""
        return np.sort(self._numbers("SELECT number FROM documents"))  # SQLite scans an index, in another order

    def contents(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of all documents, rising, int64, and their content keys."""
        return self._two_columns("SELECT number, content FROM documents")  # SQLite scans an index, not the texts

    def are_there(self, numbers: np.ndarray) -> np.ndarray:
        """Return for each number, in an array of any shape, whether it exists."""
        found = self._each_in("SELECT number FROM documents WHERE number IN ({})", np.unique(numbers).tolist())
        return np.isin(numbers, np.fromiter((number for (number,) in found), np.int64))

    def count_after(self, number: int) -> int:
        """Count the documents above a number."""
        return int(self._one("SELECT count(*) FROM vectors WHERE number > ?", (number,))[0])

    def removed_since(self, change: int) -> np.ndarray:
        """Return the numbers removed by the writes after a change."""
        return self._numbers("SELECT number FROM removed WHERE change > ?", (change,))

    def removed_up_to(self, number: int) -> int:
        """Count how many of the first `number` documents were removed."""
        return int(self._one("SELECT count(*) FROM removed WHERE number <= ?", (number,))[0])

    def numbers_at(self, moment: Moment) -> np.ndarray:
        """Return the numbers of the documents that existed at a moment, rising."""
        numbers = np.union1d(self.numbers(), self.removed_since(moment.change))
        return numbers[numbers <= moment.last]

    def vectors(self, after: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Read the numbers above `after`, rising, (N,), and their vectors, (N, n)."""
        query = "SELECT number, vector FROM vectors WHERE number > ? ORDER BY number"
        (numbers,), vectors = self._with_vectors(query, after, self.count_after(after))
        return numbers, vectors

    def vectors_at(self, numbers: np.ndarray) -> np.ndarray:
        """Return the vectors of documents, in the order given, of shape (m, n)."""
        rows = self._each_in("SELECT number, vector FROM vectors WHERE number IN ({})", numbers.tolist())
        found = {number: vectors_from([vector], self.dim)[0] for number, vector in rows}
        return np.array([found[number] for number in numbers.tolist()], np.float32).reshape(len(numbers), self.dim)

    def vectors_of(self, texts: Iterable[str]) -> dict[str, np.ndarray]:
        """Return the vectors of those texts that a document here already has."""
        wanted = {content_key(text): text for text in texts}
        query = "SELECT content, title, text, vector FROM documents JOIN vectors USING (number) WHERE content IN ({})"
        found = {}
        for content, title, text, vector in self._each_in(query, wanted):
            if Document("", text, title).full_text == wanted[content]:  # two texts can have the same key
                found[wanted[content]] = vectors_from([vector], self.dim)[0]
        return found

    def has_passages(self) -> bool:
        """Return whether any document is long enough to have passages."""
        return self._has_table("passages") and bool(self._one("SELECT 1 FROM passages LIMIT 1"))

    def passages(self, after: int = 0) -> PassageVectors:
        """Read the passages of documents above `after`; needs `has_passages`."""
        (count,) = self._one("SELECT count(*) FROM passages WHERE document > ?", (after,))
        # Ordered by document, so that SQLite uses its index and reads only these rows. Passage numbers mostly rise too.
        query = "SELECT number, document, vector FROM passages WHERE document > ? ORDER BY document, number"
        (numbers, documents), vectors = self._with_vectors(query, after, count)
        if (np.diff(numbers) < 0).any():  # an interrupted rebuild can leave them out of order
            order = np.argsort(numbers)
            return PassageVectors(numbers[order], documents[order], vectors[order])
        return PassageVectors(numbers, documents, vectors)

    def passages_of(self, documents: Iterable[int]) -> PassageVectors:
        """Read the passages of some documents; needs `has_passages`."""
        rows = sorted(self._each_in("SELECT number, document, vector FROM passages WHERE document IN ({})", documents))
        numbers, of, blobs = list(zip(*rows, strict=True)) or ((), (), ())
        return PassageVectors(np.array(numbers, np.int64), np.array(of, np.int64), vectors_from(blobs, self.dim))

    def passage_numbers(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of all passages, rising, int64, and of their documents."""
        return self._two_columns("SELECT number, document FROM passages")

    def extents(self, numbers: Iterable[int]) -> dict[int, Passage]:
        """Return the extents of passages in their `full_text`, by number."""
        rows = self._each_in("SELECT number, start, stop FROM passages WHERE number IN ({})", numbers)
        return {number: Passage(*extent) for number, *extent in rows}

    def all_extents(self, after: int = 0) -> Iterator[tuple[int, dict[int, Passage]]]:
        """Yield each long document above `after` with its passages: number → extent."""
        if not self._has_table("passages"):
            return
        query = "SELECT document, number, start, stop FROM passages WHERE document > ? ORDER BY document, number"
        for document, rows in groupby(self._connection.execute(query, (after,)), key=itemgetter(0)):
            yield document, {number: Passage(*extent) for _, number, *extent in rows}

    def last_standby(self) -> int | None:
        """Return the last number with a standby vector, or 0; None without a standby."""
        if not self._has_table("vectors_beside"):
            return None
        return int(self._one("SELECT coalesce(max(number), 0) FROM vectors_beside")[0])

    def numbers_where(self, conditions: Filter) -> np.ndarray:
        """Return the rising numbers of documents whose metadata match a filter."""
        condition = compile_filter(conditions)
        query = f"SELECT number FROM documents WHERE {condition.sql} ORDER BY number"  # noqa: S608  see hce.index.filters
        numbers = self._numbers(query, condition.parameters)
        self._require_fields(condition.loose if len(numbers) else condition.fields)
        return numbers

    def facet(self, field: str, conditions: Filter | None, most: int) -> list[FacetCount]:
        """Count, by a field's values, documents that match a filter; most first."""
        query = facet_query(field, conditions, most)
        # JSON may hold half a surrogate pair, which no filter can match: show it as a replacement character.
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
        """Fail on a field that no document has, unless there are no documents."""
        for field in fields:
            condition = field_exists(field)
            query = f"SELECT count(*) FROM (SELECT 1 FROM documents WHERE {condition.sql} LIMIT 1)"  # noqa: S608
            if self._one(query, condition.parameters) == (1,):
                continue
            rows = self._connection.execute("SELECT metadata FROM documents LIMIT ?", (SAMPLE,)).fetchall()
            if rows:
                known = ", ".join(field_names(json.loads(metadata) for (metadata,) in rows)) or "none"
                raise InputError(f"no document has a field {field!r} to filter by; known fields: {known}")

    def raw_rows(self, table: str) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a table unchecked, with texts as bytes and the checksum last."""
        self._connection.text_factory = bytes
        try:
            query = f"SELECT {', '.join(COLUMNS[table])}, checksum FROM {table}"  # noqa: S608  all are from here
            yield from self._connection.execute(query)
        finally:
            self._connection.text_factory = str

    def change_checksum(self, change: Sequence[Any]) -> int:
        """Compute the checksum that a raw row of `changes` should have."""
        return change_checksum(self._connection, change)

    def row_count(self, table: str) -> int:
        """Count the rows of a table; 0 if it does not exist."""
        return int(self._one(f"SELECT count(*) FROM {table}")[0]) if self._has_table(table) else 0  # noqa: S608

    def faults(self) -> list[str]:
        """Return the faults that SQLite finds in its own pages, one line each."""
        lines = [str(line) for (line,) in self._connection.execute("PRAGMA integrity_check")]
        return [] if lines == ["ok"] else lines

    def _one(self, query: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> Any:
        return self._connection.execute(query, parameters).fetchone()

    def _has_table(self, name: str) -> bool:
        return self._one("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (name,)) is not None

    def _numbers(self, query: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> np.ndarray:
        """Read a column of numbers, of shape (rows,), int64."""
        return np.fromiter((number for (number,) in self._connection.execute(query, parameters)), dtype=np.int64)

    def _two_columns(self, query: str) -> tuple[np.ndarray, np.ndarray]:
        """Read two columns of numbers, sorted by the first, each (rows,), int64."""
        rows = sorted(self._connection.execute(query))
        first, second = np.array(rows, dtype=np.int64).reshape(len(rows), 2).T
        return first, second

    def _with_vectors(self, query: str, after: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Read rows of numbers and a vector: (columns, count) and (count, n)."""
        rows = self._connection.execute(query, (after,))
        numbers = np.empty((len(rows.description) - 1, count), np.int64)
        vectors = np.empty((count, self.dim), np.float32)
        for start in range(0, count, ROWS_PER_FETCH):
            if not (fetched := rows.fetchmany(ROWS_PER_FETCH)):
                raise damaged("a table")
            *columns, blobs = zip(*fetched, strict=True)
            numbers[:, start : start + len(blobs)] = columns
            vectors[start : start + len(blobs)] = vectors_from(blobs, self.dim)
        return numbers, vectors

    def _each_in(self, query: str, values: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
        values = iter(values)
        while some := list(islice(values, PARAMETERS_AT_ONCE)):
            yield from self._connection.execute(query.format(", ".join("?" * len(some))), some)


class Writer(Reader):
    """An open transaction."""

    def __init__(self, connection: sqlite3.Connection, dim: int) -> None:
        super().__init__(connection, dim)
        self._before = self.moment()
        self._last, self._documents = self._before.last, self._before.documents
        self._touched = False
        self.next = WriteMark(self._before.change + 1, secrets.token_hex(8))  # identity of this write, if it commits

    def insert(
        self, documents: Sequence[Document], vectors: np.ndarray, passages: Mapping[int, CutPassages] | None = None
    ) -> None:
        """Insert documents with vectors (B, n), and passages by position."""
        numbers = range(self._last + 1, self._last + 1 + len(documents))
        rows = [(number, *row_of(document)) for number, document in zip(numbers, documents, strict=True)]
        try:
            self._insert("documents", rows, row_checksum)
        except sqlite3.IntegrityError as error:
            raise self._refused(documents) from error
        self._insert("vectors", zip(numbers, blobs_of(vectors), strict=True), vector_checksum)
        for position, each in (passages or {}).items():
            self._make_passages()
            self._insert_passages("passages", numbers[position], each)
        self._last += len(documents)
        self._documents += len(documents)
        self._touched |= bool(documents)

    def delete(self, numbers: Sequence[int]) -> None:
        """Delete documents with their vectors and passages, standby ones included."""
        for table in filter(self._has_table, ("documents", "vectors", "passages", "vectors_beside", "passages_beside")):
            column = "document" if table.startswith("passages") else "number"
            query = f"DELETE FROM {table} WHERE {column} = ?"  # noqa: S608  both are from here
            self._connection.executemany(query, ((number,) for number in numbers))
        gone = ((self.next.change, number) for number in numbers)
        self._connection.executemany("INSERT INTO removed VALUES (?, ?)", gone)
        self._documents -= len(numbers)
        self._touched |= bool(numbers)

    def replace(self, documents: Sequence[Document]) -> None:
        """Update documents whose `full_text` did not change, and keep their vectors."""
        numbers = {doc_id: number for doc_id, (number, _) in self.present(each.id for each in documents).items()}
        rows = [(numbers[row[0]], *row) for row in map(row_of, documents) if row[0] in numbers]
        query = "UPDATE documents SET content = ?, metadata = ?, title = ?, text = ?, checksum = ? WHERE number = ?"
        self._connection.executemany(query, ((*row[2:], row_checksum(*row), row[0]) for row in rows))
        self._touched |= bool(documents)

    # The next three methods keep a replica, a copy of another store without vectors: see `hce.milvus.replica`.

    def start_over(self, dim: int) -> None:
        """Delete everything, and set the length of vectors."""
        self._make_passages()
        for table in ("documents", "vectors", "passages", "removed", "changes"):
            self._connection.execute(f"DELETE FROM {table}")  # noqa: S608  all are from here
        self._connection.execute(f"PRAGMA user_version = {int(dim)}")

    def copy(self, documents: Mapping[int, Document], extents: Mapping[int, tuple[int, Passage]]) -> None:
        """Insert documents by number, and passages: number → document and extent."""
        self._insert("documents", ((number, *row_of(each)) for number, each in documents.items()), row_checksum)
        rows = ((number, document, *extent) for number, (document, extent) in extents.items())
        query = "INSERT OR REPLACE INTO passages (number, document, start, stop, vector) VALUES (?, ?, ?, ?, x'')"
        self._connection.executemany(query, rows)

    def go_to(self, moment: Moment, removed: Iterable[int]) -> None:
        """Delete documents, and record a moment of the other store as this one's."""
        for number in removed:
            self._connection.execute("DELETE FROM documents WHERE number = ?", (number,))
            self._connection.execute("DELETE FROM passages WHERE document = ?", (number,))
            self._connection.execute("INSERT OR IGNORE INTO removed VALUES (?, ?)", (moment.change, number))
        self._insert_change(moment)

    # Standby vectors are made by another encoder. No search finds them before `swap_standby`.

    def make_standby(self) -> None:
        """Drop old standby vectors, and create empty tables for new ones."""
        self.drop_standby()
        self._make_passages()  # the swap needs both tables
        for statement in STANDBY_SCHEMA:
            self._connection.execute(statement)
        self._index_by_document("passages_beside")

    def fill_standby(self, numbers: Sequence[int], vectors: np.ndarray, passages: Mapping[int, CutPassages]) -> None:
        """Insert standby vectors and passages; skip documents removed meanwhile."""
        there = {number for (number,) in self._each_in("SELECT number FROM vectors WHERE number IN ({})", numbers)}
        rows = ((number, blob) for number, blob in zip(numbers, blobs_of(vectors), strict=True) if number in there)
        self._insert("vectors_beside", rows, vector_checksum)
        for position, each in passages.items():
            if numbers[position] in there:
                self._insert_passages("passages_beside", numbers[position], each)

    def drop_standby(self) -> None:
        """Drop the standby vectors."""
        for table in ("vectors", "passages"):
            self._connection.execute(f"DROP TABLE IF EXISTS {table}_beside")

    def swap_standby(self, dim: int) -> None:
        """Swap the active vectors with the standby ones, which have length `dim`."""
        for table in ("vectors", "passages"):
            for name, new in ((table, "in_force"), (f"{table}_beside", table), ("in_force", f"{table}_beside")):
                self._connection.execute(f"ALTER TABLE {name} RENAME TO {new}")
        self._connection.execute(f"PRAGMA user_version = {int(dim)}")
        self._touched = True

    def reindex(self) -> None:
        """Have SQLite rebuild its own indexes from the tables."""
        self._connection.execute("REINDEX")

    def recount(self, documents: int) -> None:
        """Recount the documents, and record which of the first `documents` are missing."""
        there = self._connection.execute("SELECT number FROM vectors UNION SELECT number FROM documents").fetchall()
        numbers = {number for (number,) in there}
        self._last = max([self._last, documents, *numbers])
        self._documents = self.row_count("documents")
        self._connection.execute("DELETE FROM removed")
        gone = ((self._before.change, number) for number in range(1, documents + 1) if number not in numbers)
        self._connection.executemany("INSERT INTO removed VALUES (?, ?)", gone)
        self._connection.execute("DELETE FROM changes")
        self._touched = True

    def forget(self, documents: int) -> None:
        """Delete records of earlier moments; keep removals of numbers 1 to `documents`."""
        change = self._before.change
        self._connection.execute("DELETE FROM changes WHERE change < ?", (change,))
        self._connection.execute("DELETE FROM removed WHERE change < ? AND number > ?", (change, documents))

    def record(self) -> None:
        """Record this write as a change, if it changed anything."""
        if self._touched:
            self._insert_change(Moment(*self.next, now(), self._documents, self._last))

    def _insert(self, table: str, rows: Iterable[tuple[Any, ...]], checksum: Callable[..., int]) -> None:
        """Insert rows into a table, each with its checksum."""
        columns, rows = (*COLUMNS[table], "checksum"), ((*row, checksum(*row)) for row in rows)
        marks = ", ".join("?" * len(columns))
        query = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})"  # noqa: S608  all three are from here
        self._connection.executemany(query, rows)

    def _insert_passages(self, table: str, number: int, passages: CutPassages) -> None:
        blobs = blobs_of(passages.vectors)
        rows = [(number, *extent, blob) for extent, blob in zip(passages.extents, blobs, strict=True)]
        self._insert(table, rows, row_checksum)

    def _insert_change(self, moment: Moment) -> None:
        self._insert("changes", [moment], lambda *change: change_checksum(self._connection, change))

    def _make_passages(self) -> None:
        if not self._has_table("passages"):
            self._connection.execute(PASSAGES_SCHEMA)
            self._index_by_document("passages")

    def _index_by_document(self, table: str) -> None:
        taken = {name for (name,) in self._connection.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}
        name = next(name for name in BY_DOCUMENT if name not in taken)
        self._connection.execute(f"CREATE INDEX {name} ON {table} (document)")

    def _refused(self, documents: Sequence[Document]) -> InputError:
        """Return the error for a failed insert: a repeated id, or unusable metadata."""
        present = self.present(each.id for each in documents).items()
        seen = {doc_id for doc_id, (number, _) in present if number <= self._last}
        for document in documents:
            if document.id in seen:
                return InputError(f"id {document.id!r} comes twice; make ids unique")
            seen.add(document.id)
        return InputError(
            f"SQLite refuses the metadata of {documents[0].id!r} or of a later document as JSON; simplify it"
        )


# ------------------------------------------------------------------------------------------------- rows


def content_key(text: str) -> int:
    """Hash a document's full text to 64 bits, to find the vector of an equal text."""
    return hash64(text, signed=True)


def now() -> str:
    """Return the current time in UTC, in ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def row_of(document: Document) -> tuple[str, int, str, str, str]:
    """Return the columns of a document, without its number."""
    key = content_key(document.full_text)
    return document.id, key, _metadata_json(document) if document.metadata else "{}", document.title, document.text


def document_of(doc_id: str, title: str, text: str, metadata: str) -> Document:
    """Make a document from its columns; FormatError if its metadata is damaged."""
    try:
        return Document(doc_id, text, title, json.loads(metadata) if metadata != "{}" else {})
    except (TypeError, ValueError, RecursionError) as error:
        raise damaged(f"the metadata of {doc_id!r}") from error


def blobs_of(vectors: np.ndarray) -> Iterator[bytes]:
    """Yield vectors (N, n) as blobs: little-endian float32."""
    return map(bytes, np.ascontiguousarray(vectors, dtype="<f4"))


def vectors_from(blobs: Sequence[bytes], dim: int) -> np.ndarray:
    """Convert blobs to vectors, of shape (blobs, n)."""
    try:
        return np.frombuffer(b"".join(blobs), dtype="<f4").reshape(len(blobs), dim)
    except (TypeError, ValueError) as error:
        raise damaged("a vector") from error


def damaged(what: str) -> FormatError:
    """Return the error for a damaged value."""
    return FormatError(f"{STORE_FILE}: {what} is damaged; 'hce check' names it and says whether it can be repaired")


def _metadata_json(document: Document) -> str:
    """Convert metadata to JSON that SQLite accepts: NaN and infinity become null."""
    try:
        try:
            line = json.dumps(document.metadata, ensure_ascii=False, default=str, allow_nan=False)
        except ValueError:
            line = json.dumps(_without_nan(document.metadata), ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the metadata of {document.id!r} cannot be written as JSON ({error}); simplify it") from error
    return line.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair becomes its JSON escape


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def check_schema(connection: sqlite3.Connection, where: str) -> None:
    """Refuse a file with another schema: views and triggers could do anything."""
    try:
        rows = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    except sqlite3.OperationalError as error:
        if "decode" not in str(error):
            raise
        raise FormatError(f"{where} is damaged ({error}); {FROM_A_COPY}") from error
    missing = REQUIRED - {name for _, name, _ in rows}
    if missing:
        raise FormatError(f"{where} is damaged or empty (no {min(missing)}); {FROM_A_COPY}")
    for kind, name, statement in rows:
        made_by_sqlite = kind == "index" and statement is None and str(name).startswith("sqlite_autoindex_")
        if not made_by_sqlite and _normal(str(statement)) not in KNOWN.get(name, ()):
            raise FormatError(
                f"{where} is damaged, or was changed by other software (hce did not create the {kind} {name!r}); "
                f"{FROM_A_COPY}"
            )


def row_checksum(*values: int | str | bytes | None) -> int:
    """Compute the checksum of a row's values."""
    return zlib.crc32(b"\0".join([each if type(each) is bytes else str(each).encode() for each in values]))


def vector_checksum(number: int, vector: bytes) -> int:
    """Compute the checksum of a vector together with its document's number."""
    return zlib.crc32(vector, number & 0xFFFFFFFF)


def change_checksum(connection: sqlite3.Connection, change: Iterable[Any]) -> int:
    """Compute the checksum of a change and the numbers that it removed."""
    number, *rest = change
    removed = connection.execute("SELECT number FROM removed WHERE change = ? ORDER BY number", (number,))
    return row_checksum(number, *rest, *(each for (each,) in removed))
