"""Store: the durable truth of an index in one SQLite file, and the transactions on it.

A write is one transaction. Before the commit, no reader sees any of it; after the commit, it survives a power cut. A
reader sees one moment, whatever others write meanwhile.

A connection belongs to the process and the file it was opened for. A forked process opens its own, and a file that was
replaced is refused. SQLite appends writes to its write-ahead log, here "the log". A checkpoint copies the log into the
main file, only while nobody can write. Without a log, a folder can be read without write permission.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

from hce.errors import FormatError, HceError, InputError, OutsideError, WriterBusyError
from hce.files import is_file, open_file
from hce.index.tables import (
    FROM_A_COPY,
    SCHEMA,
    STORE_FILE,
    Reader,
    Writer,
    change_checksum,
    check_schema,
    damaged,
    now,
)
from hce.progress import check_deadline

SECONDS_TO_WAIT = 5.0  # for another writer
PAGE = 16_384  # pages of 16 KB waste little space around vectors of a few KB
CACHE_KILOBYTES = 4096  # small, so that pages reach the log while texts are encoded, and not all at the end
LOG_BYTES = 64 * 2**20  # a shorter log is not copied, so most writes need not wait for a checkpoint
WORTH_A_COPY = 0.02  # share of free pages above which compacting rewrites the file
SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")  # ends a journal that names another file
STEPS_BETWEEN_LOOKS = 1000  # SQLite instructions (tens of rows) between checks of a deadline; the checks are cheap


class MomentPassedError(HceError):
    """A derived part is at a later moment than the reader; search again with a new reader."""


class _Stamp(NamedTuple):
    """Values of a store's files that change with each write."""

    file: tuple[int, int]  # device and inode
    size: int
    modified: int
    log: int  # length of the log


class Connection(sqlite3.Connection):
    """A connection, the process that opened it, and the file's stamp if it was opened as immutable."""

    process: int = 0
    stamp: _Stamp | None = None

    @property
    def is_inherited(self) -> bool:
        """Whether a parent process opened this connection, before a fork."""
        return self.process != os.getpid()


class Store:
    """One SQLite file, read and written from any number of threads and processes; one writes at a time."""

    def __init__(self, folder: str | Path, dim: int) -> None:
        self._idle: list[Connection] = []  # free connections; each is lent to one thread at a time
        self._closed = False
        self._file: tuple[int, int] | None = None  # device and inode of the file when first opened
        self.path = Path(folder) / STORE_FILE  # as errors name it
        self._path = self.path.absolute()  # still right if the process changes its working directory
        self.dim = dim
        heed_forks(self)

    def __del__(self) -> None:
        self.close()

    @classmethod
    def create(cls, folder: str | Path, dim: int) -> Store:
        """Create an empty store in a folder that has none."""
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
        """Open a consistent view that later writes do not change."""
        with self._lend() as connection, heeding_deadlines(connection):
            connection.execute("BEGIN")
            yield Reader(connection, self.dim)

    @contextmanager
    def reading_standby(self, dim: int) -> Iterator[Reader]:
        """Open a view in which the standby vectors, of length `dim`, are the active ones."""
        with self.reading() as reader:
            for table in ("vectors", "passages"):  # a temporary view hides the table of the same name
                view = f"CREATE TEMP VIEW {table} AS SELECT * FROM main.{table}_beside"  # noqa: S608
                reader._connection.execute(view)
            reader.dim = dim
            yield reader

    @contextmanager
    def writing(self, wait: float | None = None) -> Iterator[Writer]:
        """Open a transaction: on exit all of it is durable; after an error, none of it.

        Raises:
            WriterBusyError: another process or thread still writes after `wait` seconds, by default `SECONDS_TO_WAIT`.
            InputError: the index was replaced since it was opened, or may not be written to.
        """
        with self._lend() as connection:
            if connection.stamp is not None or not os.access(self._path, os.W_OK):  # SQLite would notice only later
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
        """Free the space of removed documents, if there is enough to justify a rewrite."""
        with self._lend() as connection:
            (pages,), (free,) = (connection.execute(f"PRAGMA {each}_count").fetchone() for each in ("page", "freelist"))
            if free > WORTH_A_COPY * pages:
                connection.execute("VACUUM")
            self._copy_log(connection)
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            connection.execute(f"PRAGMA user_version = {version}")  # any write makes the copied log start over

    def close(self) -> None:
        """Close the file; nothing is lost without this call."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    def after_fork(self) -> None:
        """Leave the parent's connections alone after a fork."""
        while self._idle:
            _abandon(self._idle.pop())

    def _commit(self, connection: Connection, writer: Writer) -> None:
        """Make a transaction durable, and keep the log short."""
        if connection.is_inherited:
            raise InputError(
                f"{self.path.parent}: a forked process cannot finish a write that its parent began; write again"
            )
        writer.record()
        connection.execute("COMMIT")
        if self._log_size() > LOG_BYTES:
            with suppress(sqlite3.Error, HceError):  # this write is durable anyway; the next one can copy the log
                _be_patient(connection, 0)
                self._copy_log(connection)

    @contextmanager
    def _lend(self) -> Iterator[Connection]:
        """Lend a connection to one thread, and roll back what is not committed.

        Raises:
            InputError: the file was replaced since it was opened.
            WriterBusyError: the file was opened as immutable, and has changed.
            FormatError: there is no file.
        """
        if self._closed:
            raise InputError(f"{self.path.parent}: the index is closed; open it again")
        with self._errors():
            connection = self._idle_one() or self._connect()
            try:
                yield connection
                self._check_unchanged(connection)
            except sqlite3.DatabaseError:
                self._check_unchanged(connection)  # a file that changed meanwhile looks damaged: pages of two moments
                raise
            finally:
                self._take_back(connection)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Convert SQLite's errors into ours, which name the remedy."""
        folder = self.path.parent
        try:
            yield
        except sqlite3.OperationalError as error:
            if _is_busy(error):
                raise WriterBusyError(
                    f"{folder}: another process is writing to this index; try again when it is done"
                ) from error
            if "decode" in str(error):  # damage has left a text that is not UTF-8
                raise damaged("a text") from error
            raise InputError(
                f"{folder}: {error}; nothing was changed: check the disk's space and permissions"
            ) from error
        # The argument is wrong, not the file: do not let it look like lost data.
        except (sqlite3.ProgrammingError, sqlite3.InterfaceError) as error:
            raise InputError(f"{folder}: {error}; nothing was changed: pass texts and whole numbers") from error
        except OverflowError as error:
            if "SQLite" not in str(error):
                raise
            raise InputError(f"{folder}: {error}; nothing was changed: pass numbers below 2^63") from error
        except sqlite3.DatabaseError as error:
            raise FormatError(f"{folder}: {STORE_FILE} is damaged ({error}); {FROM_A_COPY}") from error

    def _log_size(self) -> int:
        """Return the length of SQLite's log; 0 if there is none."""
        try:
            return self._path.with_name(f"{self.path.name}-wal").stat().st_size
        except OSError:
            return 0

    def _copy_log(self, connection: Connection) -> None:
        """Copy the log into the main file while nobody can write.

        SQLite's automatic copy comes at the end of a write, when others may be writing again. Versions up to 3.51.2
        (except 3.44.6 and 3.50.7) can then lose a write: https://sqlite.org/wal.html#walresetbug
        """
        connection.execute("BEGIN IMMEDIATE")  # keeps writers out, but lets a second connection copy
        try:
            with self._lend() as second:
                second.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        finally:
            connection.execute("ROLLBACK")

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
        """Open the file; read-only if there is no write permission, or no disk space."""
        stamp = self._stamp()
        try:
            connection = self._opened("mode=rw")  # without write permission, read-only if a readable log exists
        except sqlite3.OperationalError as error:
            if _is_busy(error):
                raise
            if stamp.log:
                if "unable to open" not in str(error) and "readonly" not in str(error):
                    raise
                raise InputError(
                    f"{self.path.parent}: there is a log ({self.path}-wal), which needs write permission to be read; "
                    "have its owner open the index once"
                ) from error
            connection = self._opened("mode=ro&immutable=1")
            connection.stamp = stamp
        try:
            self._check_place()  # the file may have been replaced just before it was opened
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
            connection.execute("PRAGMA wal_autocheckpoint = 0")  # see `_copy_log`
            connection.execute("PRAGMA journal_size_limit = 0")  # a copied log shrinks when it is written again
            connection.execute(f"PRAGMA cache_size = -{CACHE_KILOBYTES}")
            check_schema(connection, str(self.path))  # the first read, which opens the log
        except BaseException:
            connection.close()
            raise
        return connection

    def _check_place(self) -> None:
        """Fail if the file is not the one that was opened first."""
        found = self._stamp().file
        if self._file is None:
            self._file = found
        elif self._file != found:
            raise InputError(
                f"{self.path.parent}: the index was replaced by another one since it was opened; open it again"
            )

    def _check_unchanged(self, connection: Connection) -> None:
        """Fail if a file that was opened as immutable has changed."""
        if connection.stamp is not None and connection.stamp != self._stamp():
            raise WriterBusyError(
                f"{self.path.parent}: another process wrote to this index while it was read; try again"
            )

    def _stamp(self) -> _Stamp:
        try:
            require_own_files(self._path)
            found = self._path.stat()
        except FileNotFoundError:
            what = "the index was moved or deleted since it was opened; open it again"
            if self._file is None:
                what = f"the index is incomplete ({self.path.name} is missing); index again"
            raise FormatError(f"{self.path.parent}: {what}") from None
        except OSError as error:
            raise InputError(f"{self.path.parent}: cannot be read ({error.strerror}); check its permissions") from error
        return _Stamp((found.st_dev, found.st_ino), found.st_size, found.st_mtime_ns, self._log_size())


# ------------------------------------------------------------------------------------------------- connections


@contextmanager
def heeding_deadlines(connection: Connection) -> Iterator[None]:
    """Interrupt statements with a DeadlineError once their caller has given up."""
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
    """Refuse a file if opening it would make SQLite use or delete another file.

    A journal can name another file, which SQLite deletes after a rollback. hce never makes such a journal.
    """
    for suffix in ("", "-wal", "-shm"):
        is_file(f"{path}{suffix}")
    with suppress(FileNotFoundError), open_file(f"{path}-journal") as journal:
        if journal.seek(0, os.SEEK_END) >= len(SUPER_JOURNAL):
            journal.seek(-len(SUPER_JOURNAL), os.SEEK_END)
            if journal.read() == SUPER_JOURNAL:
                raise OutsideError(f"{path}-journal names another file, which SQLite would delete; delete the journal")


def _is_busy(error: sqlite3.OperationalError) -> bool:
    return "locked" in str(error) or "busy" in str(error)


def _be_patient(connection: sqlite3.Connection, seconds: float) -> None:
    connection.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")


def _abandon(connection: Connection) -> None:
    """Keep a connection open: on closing, SQLite would touch the parent's log."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


_heeding: WeakSet[Any] = WeakSet()


def heed_forks(thing: Any) -> None:
    """Call `thing.after_fork()` in every process forked from this one."""
    _heeding.add(thing)


def _after_fork() -> None:
    for thing in list(_heeding):
        thing.after_fork()


with suppress(AttributeError):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_fork)
