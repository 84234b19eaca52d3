"""Store: the durable truth of an index, one SQLite file, and the transactions on it.

A write is one transaction: when it returns it survives a pulled plug, and until then nothing of it is there. Readers
see one moment, whatever is written meanwhile.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from hce.errors import FormatError, InputError, WriterBusyError
from hce.index.tables import SCHEMA, Reader, Writer, now

FILE = "documents.sqlite"
SECONDS_TO_WAIT = 5.0  # for another writer

# Pages of 16 KB waste little around vectors of a few KB. A write-ahead log of up to 64 MB keeps the copying of pages
# into the main file out of most writes.
PAGE = 16_384
LOG_PAGES = 64 * 2**20 // PAGE
# A small cache makes SQLite write pages to the log along the way, while texts are encoded, and not all at the end.
CACHE_KILOBYTES = 4096


class Store:
    """One SQLite file, read and written from any number of threads and processes; one writes at a time."""

    def __init__(self, folder: str | Path, dim: int) -> None:
        self.path = Path(folder) / FILE
        self.dim = dim
        self._idle: list[sqlite3.Connection] = []
        self._closed = False

    @classmethod
    def create(cls, folder: str | Path, dim: int) -> Store:
        """Make an empty store in a folder that has none."""
        store = cls(folder, dim)
        with store._errors(), closing(sqlite3.connect(store.path, isolation_level=None)) as connection:
            connection.execute(f"PRAGMA page_size = {PAGE}")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(SCHEMA)
            connection.execute("INSERT INTO changes VALUES (0, ?, ?, 0, 0)", (secrets.token_hex(8), now()))
        return store

    @contextmanager
    def reading(self) -> Iterator[Reader]:
        """One consistent view, however long it is held and whatever is written meanwhile."""
        with self._errors(), self._connection() as connection:
            connection.execute("BEGIN")
            try:
                yield Reader(connection, self.dim)
            finally:
                _end(connection, "COMMIT")

    @contextmanager
    def writing(self, wait: float | None = None) -> Iterator[Writer]:
        """One transaction: on success all of it is durable, on any error nothing of it is there.

        Args:
            wait: seconds to wait for another writer to be done, `SECONDS_TO_WAIT` by default.

        Raises:
            InputError: someone else is writing, and was not done by then.
        """
        with self._errors(), self._connection() as connection:
            try:
                _be_patient(connection, SECONDS_TO_WAIT if wait is None else wait)
                connection.execute("BEGIN IMMEDIATE")
                writer = Writer(connection, self.dim)
                yield writer
                writer.record()
                connection.execute("COMMIT")
            finally:
                _end(connection, "ROLLBACK")
                _be_patient(connection, SECONDS_TO_WAIT)

    def compact(self) -> None:
        """Give the space of removed documents back to the disk."""
        with self._errors(), self._connection() as connection:
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Let go of the file; nothing is lost by not doing so."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """Lend out a connection that nobody else uses meanwhile."""
        if self._closed:
            raise InputError(f"{self.path.parent}: the index is closed; open it again")
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect()
        try:
            yield connection
        finally:
            self._idle.append(connection)
            if self._closed:
                self.close()

    def _connect(self) -> sqlite3.Connection:
        if not self.path.is_file():
            raise FormatError(f"{self.path.parent}: the index is incomplete ({FILE} is missing); index anew")
        connection = sqlite3.connect(
            self.path, timeout=SECONDS_TO_WAIT, isolation_level=None, check_same_thread=False, cached_statements=64
        )
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {LOG_PAGES}")
        connection.execute(f"PRAGMA cache_size = -{CACHE_KILOBYTES}")
        return connection

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Say what SQLite says in one line with a way out."""
        folder = self.path.parent
        try:
            yield
        except sqlite3.OperationalError as error:
            if "locked" in str(error) or "busy" in str(error):
                raise WriterBusyError(
                    f"{folder}: another process is writing to this index; try again when it is done"
                ) from error
            raise InputError(
                f"{folder}: {error}; nothing was changed: check the disk's space and permissions"
            ) from error
        except sqlite3.DatabaseError as error:
            raise FormatError(f"{folder}: {FILE} is damaged ({error}); restore it from a copy or index anew") from error


def _end(connection: sqlite3.Connection, how: str) -> None:
    if connection.in_transaction:
        connection.execute(how)


def _be_patient(connection: sqlite3.Connection, seconds: float) -> None:
    connection.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")
