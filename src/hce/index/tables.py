"""Tables: the schema of a store, its rows and their checksums.

This is the on-disk format of `hce.index.store`. A change here needs a new `FORMAT` in `hce.index.manifest`.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from typing import Any

import numpy as np

from hce.data.documents import Document
from hce.data.text import hash64
from hce.errors import FormatError, InputError

STORE_FILE = "documents.sqlite"


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


# ------------------------------------------------------------------------------------------------- the tables


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

# Created with the first long document. Passage numbers rise too, and AUTOINCREMENT never reuses one.
_PASSAGE_COLUMNS = (
    "(number INTEGER PRIMARY KEY AUTOINCREMENT, document INTEGER NOT NULL, start INTEGER NOT NULL, "
    "stop INTEGER NOT NULL, vector BLOB NOT NULL, checksum INTEGER)"
)
PASSAGES_SCHEMA = f"CREATE TABLE passages {_PASSAGE_COLUMNS}"

# Vectors of the standby encoder: see `hce.index.create`. Activating it swaps the names of two pairs of tables. SQLite's
# index keeps its own name through that, so each table's index needs a name of its own.
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
    """Compute the checksum of a vector; its number is the start value."""
    return zlib.crc32(vector, number & 0xFFFFFFFF)


def change_checksum(connection: sqlite3.Connection, change: Iterable[Any]) -> int:
    """Compute the checksum of a change and the numbers that it removed."""
    number, *rest = change
    removed = connection.execute("SELECT number FROM removed WHERE change = ? ORDER BY number", (number,))
    return row_checksum(number, *rest, *(each for (each,) in removed))
