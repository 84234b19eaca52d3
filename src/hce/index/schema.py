"""The tables of a store: what they are made of, that a file has these and nothing else, and a checksum for each row.

SQLite notices damage to its own pages, and not to what is written in them: a flipped bit in a text is another text. So
each row has the checksum of all that is in it.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable
from typing import Any

from hce.errors import FormatError

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

# Made when the first long document comes. Numbers of passages rise too, and none is given again (AUTOINCREMENT).
_PASSAGE_COLUMNS = (
    "(number INTEGER PRIMARY KEY AUTOINCREMENT, document INTEGER NOT NULL, start INTEGER NOT NULL, "
    "stop INTEGER NOT NULL, vector BLOB NOT NULL, checksum INTEGER)"
)
PASSAGES_SCHEMA = f"CREATE TABLE passages {_PASSAGE_COLUMNS}"

# Vectors of another encoder, beside those in force: see `hce.index.reindex`. The two pairs of tables change places by
# their names; an index of SQLite keeps its name, whichever table it then belongs to.
BESIDE_SCHEMA = (
    "CREATE TABLE vectors_beside (number INTEGER PRIMARY KEY, vector BLOB NOT NULL, checksum INTEGER)",
    f"CREATE TABLE passages_beside {_PASSAGE_COLUMNS}",
)
BY_DOCUMENT = ("passages_by_document", "passages_by_document_too")
SQLITES_OWN = "CREATE TABLE sqlite_sequence(name,seq)"  # for AUTOINCREMENT

COLUMNS = {
    "documents": ("number", "id", "content", "metadata", "title", "text"),
    "vectors": ("number", "vector"),
    "passages": ("document", "start", "stop", "vector"),
    "vectors_beside": ("number", "vector"),
    "passages_beside": ("document", "start", "stop", "vector"),
    "changes": ("change", "token", "at", "documents", "last"),
}
"""The columns of each table with checksums, which are of all of them."""
REQUIRED = ("documents", "documents_by_content", "vectors", "changes", "removed")


def _normal(statement: str) -> str:
    """Write a statement as SQLite keeps it, whatever white space it had; ALTER TABLE leaves some, and quotes names."""
    one_line = " ".join(statement.split()).rstrip(";").replace("IF NOT EXISTS ", "").replace('"', "")
    return one_line.replace(" ,", ",").replace("( ", "(").replace(" )", ")")


def _name(statement: str) -> str:
    return statement.split("(")[0].split()[2]


_ALL = (*filter(str.strip, SCHEMA.split(";")), PASSAGES_SCHEMA, *BESIDE_SCHEMA, SQLITES_OWN)
KNOWN = {_name(each): {each} for each in map(_normal, _ALL)}
KNOWN |= {
    name: {f"CREATE INDEX {name} ON {table} (document)" for table in ("passages", "passages_beside")}
    for name in BY_DOCUMENT
}


def check_schema(connection: sqlite3.Connection, where: str) -> None:
    """Refuse a file that is not made of these tables: a view, a trigger or another table could do anything when used.

    Raises:
        FormatError: `where` is no store, or a damaged one.
    """
    try:
        rows = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    except sqlite3.OperationalError as error:
        if "decode" not in str(error):
            raise
        raise FormatError(f"{where} is damaged ({error}); restore it from a copy or index anew") from error
    missing = set(REQUIRED) - {name for _, name, _ in rows}
    if missing:
        raise FormatError(f"{where} is damaged or empty (no {min(missing)}); restore it from a copy or index anew")
    for kind, name, statement in rows:
        made_by_sqlite = kind == "index" and statement is None and str(name).startswith("sqlite_autoindex_")
        if not made_by_sqlite and _normal(str(statement)) not in KNOWN.get(name, ()):
            raise FormatError(
                f"{where} is damaged, or was changed by other software (the {kind} {name!r} is not as hce makes it); "
                "restore it from a copy or index anew"
            )


def make_passages(connection: sqlite3.Connection) -> None:
    """Make the table of passages, where there is none."""
    if not has_table(connection, "passages"):
        connection.execute(PASSAGES_SCHEMA)
        _index_by_document(connection, "passages")


def make_beside(connection: sqlite3.Connection) -> None:
    """Make empty tables for the vectors of another encoder, in the place of any that are there."""
    drop_beside(connection)
    make_passages(connection)  # to change places with
    for statement in BESIDE_SCHEMA:
        connection.execute(statement)
    _index_by_document(connection, "passages_beside")


def drop_beside(connection: sqlite3.Connection) -> None:
    """Drop the vectors of another encoder."""
    for table in ("vectors", "passages"):
        connection.execute(f"DROP TABLE IF EXISTS {table}_beside")


def swap_beside(connection: sqlite3.Connection) -> None:
    """Have the vectors in force and those beside them change places."""
    for table in ("vectors", "passages"):
        for name, new in ((table, "in_force"), (f"{table}_beside", table), ("in_force", f"{table}_beside")):
            connection.execute(f"ALTER TABLE {name} RENAME TO {new}")


def has_table(connection: sqlite3.Connection, name: str) -> bool:
    """Tell whether there is a table of this name."""
    query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    return connection.execute(query, (name,)).fetchone() is not None


def _index_by_document(connection: sqlite3.Connection, table: str) -> None:
    taken = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}
    name = next(name for name in BY_DOCUMENT if name not in taken)
    connection.execute(f"CREATE INDEX {name} ON {table} (document)")


# ------------------------------------------------------------------------------------------------- checksums


def row_checksum(*values: int | str | bytes | None) -> int:
    """Return the checksum of a row, given as what it holds."""
    return zlib.crc32(b"\0".join([each if type(each) is bytes else str(each).encode() for each in values]))


def vector_checksum(number: int, vector: bytes) -> int:
    """Return the checksum of a vector and of the number that it has: an integer as start tells numbers apart."""
    return zlib.crc32(vector, number & 0xFFFFFFFF)


def change_checksum(connection: sqlite3.Connection, change: Iterable[Any]) -> int:
    """Return the checksum of a row of `changes` and of the numbers that this change removed."""
    number, *rest = change
    removed = connection.execute("SELECT number FROM removed WHERE change = ? ORDER BY number", (number,))
    return row_checksum(number, *rest, *(each for (each,) in removed))
