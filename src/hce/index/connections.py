"""The SQLite file of a store: connections to it, its tables, and checksums of their rows.

A connection belongs to the process that opened it and to the file that was there then: a forked process opens its own,
and a file that was replaced meanwhile is refused. A folder without the right to write can be read. The log, into which
SQLite writes first, is copied into the file only while nobody can write.

SQLite notices damage to its own pages, but not to the values in them: a flipped bit in a text is another text. So each
row has a checksum.
"""

from __future__ import annotations

import ctypes
import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

from hce.contained import is_file, open_file
from hce.deadline import check_deadline
from hce.errors import FormatError, InputError, OutsideError, WriterBusyError

SECONDS_TO_WAIT = 5.0  # for another writer
CACHE_KILOBYTES = 4096  # small: pages go to the log along the way, while texts are encoded, and not all at the end

SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")  # ends a journal that names another file

STEPS_BETWEEN_LOOKS = 1000  # of SQLite's machine, some tens of rows; a look costs less than one of these


class Stamp(NamedTuple):
    """What changes when a file is written to: device and inode, size, time, and the length of SQLite's log."""

    file: tuple[int, int]
    size: int
    modified: int
    log: int


class Connection(sqlite3.Connection):
    """A connection with the process that opened it; and the stamp of a file that is read without write access."""

    process: int = 0
    stamp: Stamp | None = None

    @property
    def is_inherited(self) -> bool:
        """Whether the process that this one was forked from opened it."""
        return self.process != os.getpid()


class Connections:
    """The connections of this process to one SQLite file, lent to one thread at a time each."""

    def __init__(self, path: Path) -> None:
        self._idle: list[Connection] = []
        self._closed = False
        self._folder = path.parent  # as errors name it
        self._path = path.absolute()  # whatever folder the process goes to
        self._file: tuple[int, int] | None = None  # device and inode of the first one opened
        heed_forks(self)

    def __del__(self) -> None:
        self.close()

    @contextmanager
    def lend(self) -> Iterator[Connection]:
        """Lend a connection to one thread, and roll back what is not committed.

        Raises:
            InputError: the file was replaced since it was opened, or written to while it was read without write access.
            FormatError: there is no file.
        """
        if self._closed:
            raise InputError(f"{self._folder}: the index is closed; open it again")
        connection = self._idle_one() or self._connect()
        try:
            yield connection
            self._check_unchanged(connection)
        except sqlite3.DatabaseError:
            self._check_unchanged(connection)  # what looks like damage may be pages of two moments
            raise
        finally:
            self._take_back(connection)

    def can_write(self, connection: Connection) -> bool:
        """Return whether there is a right to write, before SQLite would notice."""
        return connection.stamp is None and os.access(self._path, os.W_OK)

    def close(self) -> None:
        """Close the file."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    def after_fork(self) -> None:
        """Leave the parent's connections alone after a fork."""
        while self._idle:
            _abandon(self._idle.pop())

    def log_size(self) -> int:
        """Return the length of SQLite's log; 0 if there is none."""
        try:
            return self._path.with_name(f"{self._path.name}-wal").stat().st_size
        except OSError:
            return 0

    def copy_log(self, connection: Connection) -> None:
        """Copy the log into the file while nobody can write.

        SQLite would copy at the end of a write, when others may be writing already. Its versions up to 3.51.2 (but not
        3.44.6 and 3.50.7) can then lose what was written: https://sqlite.org/wal.html#walresetbug
        """
        connection.execute("BEGIN IMMEDIATE")  # others have to wait, and a second connection may copy
        try:
            with self.lend() as second:
                second.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        finally:
            connection.execute("ROLLBACK")

    # ------------------------------------------------------------------------------------------------- one of them

    def _idle_one(self) -> Connection | None:
        self._check_place()
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            if connection.stamp is None or connection.stamp == self._stamp():
                return connection
            connection.close()
        return None

    def _take_back(self, connection: Connection) -> None:
        if connection.is_inherited:
            _abandon(connection)
            return
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except sqlite3.Error:
            connection.close()
            raise
        self._idle.append(connection)
        if self._closed:
            self.close()

    def _connect(self) -> Connection:
        """Open the file, for reading alone where there is no right to write, or no room."""
        stamp = self._stamp()
        try:
            connection = self._opened("mode=rw")  # or read-only, where there is a log already that can be read
        except sqlite3.OperationalError as error:
            if "locked" in str(error) or "busy" in str(error):
                raise
            if stamp.log:
                raise self._unreadable(error) from error
            connection = self._opened("mode=ro&immutable=1")
            connection.stamp = stamp
        try:
            self._check_place()  # it may have been replaced just before it was opened
        except Exception:
            connection.close()
            raise
        return connection

    def _opened(self, options: str) -> Connection:
        connection = sqlite3.connect(
            f"{self._path.as_uri()}?{options}",
            uri=True,
            timeout=SECONDS_TO_WAIT,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=64,
            factory=Connection,
        )
        connection.process = os.getpid()
        try:
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA wal_autocheckpoint = 0")  # see `copy_log`
            connection.execute("PRAGMA journal_size_limit = 0")  # so that the file is as long as what is in it
            connection.execute(f"PRAGMA cache_size = -{CACHE_KILOBYTES}")
            check_schema(connection, str(self._folder / self._path.name))  # which opens the log
        except BaseException:
            connection.close()
            raise
        return connection

    def _unreadable(self, error: sqlite3.OperationalError) -> Exception:
        if "unable to open" not in str(error) and "readonly" not in str(error):
            return error
        return InputError(
            f"{self._folder}: there is a log ({self._folder}/{self._path.name}-wal) that only who may write here can "
            "read; have its owner open the index once"
        )

    # ------------------------------------------------------------------------------------------------- the file

    def _check_place(self) -> None:
        """Refuse another file than the one that was opened first."""
        found = self._found()
        if self._file is None:
            self._file = found.st_dev, found.st_ino
        elif self._file != (found.st_dev, found.st_ino):
            raise InputError(
                f"{self._folder}: the index was replaced by another one since it was opened; open it again"
            )

    def _check_unchanged(self, connection: Connection) -> None:
        """Refuse what was read as unchangeable from a file that has changed."""
        if connection.stamp is not None and connection.stamp != self._stamp():
            raise WriterBusyError(f"{self._folder}: someone wrote to this index while it was read; try again")

    def _stamp(self) -> Stamp:
        found = self._found()
        return Stamp((found.st_dev, found.st_ino), found.st_size, found.st_mtime_ns, self.log_size())

    def _found(self) -> os.stat_result:
        try:
            require_own_files(self._path)
            found = self._path.stat()
        except FileNotFoundError:
            raise self._missing() from None
        except OSError as error:
            raise InputError(f"{self._folder}: cannot be read ({error.strerror}); check its permissions") from error
        return found

    def _missing(self) -> FormatError:
        if self._file is not None:
            return FormatError(f"{self._folder}: the index was moved or deleted since it was opened; open it again")
        return FormatError(f"{self._folder}: the index is incomplete ({self._path.name} is missing); index anew")


@contextmanager
def heeding_deadlines(connection: Connection) -> Iterator[None]:
    """Interrupt statements by a DeadlineError once nobody waits for them."""
    connection.set_progress_handler(check_deadline, STEPS_BETWEEN_LOOKS)
    try:
        yield
    except sqlite3.OperationalError as error:
        if "interrupted" in str(error):
            check_deadline()
        raise
    finally:
        connection.set_progress_handler(None, 0)


def require_own_files(path: Path) -> None:
    """Refuse a file if SQLite would use or delete others on opening it.

    A journal can name a file that SQLite deletes as soon as it has undone the write; hce never makes such a journal.
    """
    for suffix in ("", "-wal", "-shm"):
        is_file(f"{path}{suffix}")
    with suppress(FileNotFoundError), open_file(f"{path}-journal") as journal:
        if journal.seek(0, os.SEEK_END) >= len(SUPER_JOURNAL):
            journal.seek(-len(SUPER_JOURNAL), os.SEEK_END)
            if journal.read() == SUPER_JOURNAL:
                raise OutsideError(f"{path}-journal names another file, which SQLite would delete; delete the journal")


def _abandon(connection: Connection) -> None:
    """Never close a connection: SQLite would tidy up while the parent writes."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


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

# Made when the first long document comes. Numbers of passages rise too, and none is given again (AUTOINCREMENT).
_PASSAGE_COLUMNS = (
    "(number INTEGER PRIMARY KEY AUTOINCREMENT, document INTEGER NOT NULL, start INTEGER NOT NULL, "
    "stop INTEGER NOT NULL, vector BLOB NOT NULL, checksum INTEGER)"
)
PASSAGES_SCHEMA = f"CREATE TABLE passages {_PASSAGE_COLUMNS}"

# Standby vectors, of another encoder: see `hce.index.create`. Two pairs of tables exchange their names; an index of
# SQLite keeps its name, whichever table it then belongs to.
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
    """Return a statement without the white space and quotes of ALTER TABLE."""
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
    """Refuse a file of other tables: a view or a trigger could do anything."""
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
    """Make empty tables for standby vectors, and drop any that are there."""
    drop_beside(connection)
    make_passages(connection)  # to change places with
    for statement in BESIDE_SCHEMA:
        connection.execute(statement)
    _index_by_document(connection, "passages_beside")


def drop_beside(connection: sqlite3.Connection) -> None:
    """Drop the standby vectors."""
    for table in ("vectors", "passages"):
        connection.execute(f"DROP TABLE IF EXISTS {table}_beside")


def swap_beside(connection: sqlite3.Connection) -> None:
    """Exchange the active and the standby vectors."""
    for table in ("vectors", "passages"):
        for name, new in ((table, "in_force"), (f"{table}_beside", table), ("in_force", f"{table}_beside")):
            connection.execute(f"ALTER TABLE {name} RENAME TO {new}")


def has_table(connection: sqlite3.Connection, name: str) -> bool:
    """Return whether there is a table of this name."""
    query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    return connection.execute(query, (name,)).fetchone() is not None


def _index_by_document(connection: sqlite3.Connection, table: str) -> None:
    taken = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}
    name = next(name for name in BY_DOCUMENT if name not in taken)
    connection.execute(f"CREATE INDEX {name} ON {table} (document)")


# ------------------------------------------------------------------------------------------------- checksums


def row_checksum(*values: int | str | bytes | None) -> int:
    """Return the checksum of the values of a row."""
    return zlib.crc32(b"\0".join([each if type(each) is bytes else str(each).encode() for each in values]))


def vector_checksum(number: int, vector: bytes) -> int:
    """Return the checksum of a vector and its number, which is the start value."""
    return zlib.crc32(vector, number & 0xFFFFFFFF)


def change_checksum(connection: sqlite3.Connection, change: Iterable[Any]) -> int:
    """Return the checksum of a change and of the numbers that it removed."""
    number, *rest = change
    removed = connection.execute("SELECT number FROM removed WHERE change = ? ORDER BY number", (number,))
    return row_checksum(number, *rest, *(each for (each,) in removed))


# ------------------------------------------------------------------------------------------------- forks


_heeding: WeakSet[Any] = WeakSet()


def heed_forks(thing: Any) -> None:
    """Call `thing.after_fork()` in every process that is forked from this one."""
    _heeding.add(thing)


def _after_fork() -> None:
    for thing in list(_heeding):
        thing.after_fork()


with suppress(AttributeError):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_fork)
