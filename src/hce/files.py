"""Files and folders that appear whole or not at all, and work that a crash leaves unfinished.

What is written is written next to its place, flushed to disk, then renamed. What is on its way is locked, so that what
a killed process left of it is known by its open lock, and deleted when the same is written again. Unfinished work is
kept next to its output, with a mapping of what it belongs to, so that only the same work is ever continued.

At the end: pages of mapped files, which count as memory of the process until they are given back.
"""

from __future__ import annotations

import gzip
import json
import mmap
import os
import re
import reprlib
import secrets
import shutil
import stat
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import UnionType
from typing import IO, TYPE_CHECKING, Any, BinaryIO, TypeVar, Union, get_args, get_origin, get_type_hints

from hce.contained import names_in, read_json_value
from hce.errors import FormatError, HceError, InputError, one_line, system_reason
from hce.progress import every

if TYPE_CHECKING:
    import numpy as np

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")

LEFTOVER = re.compile(r"\.(.+)\.[0-9a-f]{8}\.partial", re.DOTALL)  # what a killed write of a name leaves

PIECE = 1 << 16  # bytes of a file that is to be mapped, written at once
SECONDS_BETWEEN_RELEASES = 0.1  # in which a process reads less than a gigabyte of a mapped file
_released: list[mmap.mmap] = []  # what is mapped within `released`


@contextmanager
def open_atomically(path: str | Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a temporary file next to `path`; on success it replaces `path`.

    Raises:
        InputError: when `path` is a folder, or the system refuses what is written: the disk is full, or read-only.
    """
    path = Path(path)
    with writing_to(path):
        if path.is_dir():
            raise InputError(f"{path}: is a folder; give the name of a file")
        if path.exists() and not path.is_file():  # to put a file in the place of /dev/null would break the machine
            raise InputError(f"{path}: is a device or a pipe; give the name of a file")
        text = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
        with _neighbour(path, lambda temporary: temporary.touch(exist_ok=False)) as temporary:
            with temporary.open(mode, **text) as file:  # type: ignore[call-overload]
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(path.parent)


@contextmanager
def writing_to(path: str | Path) -> Iterator[None]:
    """Turn any failure of writing within this block into one line.

    Raises:
        InputError: the disk is full, read-only or failing, or the folder is not ours to write to.
    """
    try:
        yield
    except HceError:
        raise
    except Exception as error:
        reason = system_reason(error)
        if reason is None:
            raise
        parent = Path(path).absolute().parent
        if isinstance(error, FileNotFoundError) and not parent.is_dir():
            raise InputError(f"{path}: there is no folder {parent}; make it first") from error
        raise InputError(
            f"{path}: cannot be written ({reason}); check the disk's space and the folder it is to stand in"
        ) from error


@contextmanager
def open_text(path: str | Path) -> Iterator[IO[str]]:
    """Open a text file for writing, atomically, compressed where the name says so."""
    if Path(path).suffix.lower() != ".gz":
        with open_atomically(path) as file:
            yield file
    else:
        with open_atomically(path, "wb") as raw, gzip.open(raw, "wt", encoding="utf-8", newline="") as file:
            yield file


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as readable JSON, atomically."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    with open_atomically(path, "wb") as file:
        file.write(text.encode("utf-8", "backslashreplace"))  # what a file's name holds besides Unicode is an escape


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON object that `write_json` wrote.

    Raises:
        FormatError: nothing is there, or it is not a JSON object.
        OutsideError: it is no regular file.
    """
    value = read_json_value(path)
    if not isinstance(value, dict):
        raise FormatError(f"{path}: damaged (a JSON {type(value).__name__} where an object should be)")
    return value


def checked_fields(kind: type[T], values: Any, *, may_be_nan: Collection[str] = ()) -> T:
    """Make a dataclass or a named tuple of JSON values, checked by type.

    Args:
        kind: the class; names that it does not have are passed over.
        values: what the file says.
        may_be_nan: fields among whose numbers there may be None, which is what NaN is read as.

    Raises:
        FormatError: a value is missing or of another type; the file is not named.
    """
    if not isinstance(values, dict):
        raise FormatError(f"a {type(values).__name__} where an object should be")
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name in values}
    for name, hint in hints.items():
        if not _fits(values[name], hint, name in may_be_nan):
            raise FormatError(f"{name!r} is not what it has to be: {reprlib.repr(values[name])}")
    try:
        return kind(**{name: values[name] for name in hints})
    except TypeError as error:  # names what is missing
        raise FormatError(one_line(error)) from error


def _fits(value: Any, hint: Any, may_be_nan: bool) -> bool:
    """Tell whether a JSON value is of a type."""
    origin, of = get_origin(hint), get_args(hint)
    if hint is Any or (value is None and hint is float and may_be_nan):
        return True
    if origin in (Union, UnionType):
        return any(_fits(value, each, may_be_nan) for each in of)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(each, of[1], may_be_nan) for each in value.values())
    if origin is list:
        return isinstance(value, list) and all(_fits(each, of[0], may_be_nan) for each in value)
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def require_parent(output: Path) -> None:
    """Refuse, before any work, an output under a folder that does not exist.

    Raises:
        InputError: there is no such folder.
    """
    if not output.absolute().parent.is_dir():
        raise InputError(f"{output}: there is no folder {output.absolute().parent}; make it first")


def require_new(path: str | Path) -> None:
    """Refuse an output folder that holds something already.

    Raises:
        InputError: `path` is a file, or a folder that is not empty.
    """
    path = Path(path)
    try:
        holds_something = any(path.iterdir()) if path.is_dir() else os.path.lexists(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be looked into ({error.strerror}); choose another place") from error
    if holds_something:
        raise InputError(f"{path} exists and is not an empty folder: choose another place or remove it first")


def require_free(output: str | Path, resume: bool) -> None:
    """Fail if an output folder is taken, or has an unfinished run.

    Raises:
        InputError: either of them.
    """
    require_new(output)
    if not resume and unfinished(output).exists():
        raise InputError(f"{unfinished(output)} holds an unfinished run: add --resume to continue it, or delete it")


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` on success.

    `path` must not exist, or be an empty folder.

    Raises:
        InputError: when `path` is a file or a folder that holds something, or the system refuses what is written: the
            disk is full, or read-only.
    """
    path = Path(path).absolute()  # "." has no name to build a neighbour's from
    require_new(path)
    with writing_to(path):
        make_folder(path.parent)
        with _neighbour(path, Path.mkdir) as temporary:
            mode = temporary.stat().st_mode
            yield temporary
            _sync_tree(temporary, mode)
            temporary.replace(path)  # replaces an empty folder, refuses a full one
            sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, and sync their names."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_folder(each.parent)


def delete_whole(path: Path) -> None:
    """Delete a folder, if it is there: after a kill, all of it or none.

    What is left under another name then is deleted the next time.
    """
    with suppress(OSError):
        path.replace(path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial"))
        sync_folder(path.parent)
    delete_leftovers(path.parent, path.name)


class ScratchFolder:
    """A folder for temporary files, deleted along with this object; after a kill, when the next one is made.

    Attributes:
        path: the folder; of this process alone, whichever processes are forked from it.
    """

    def __init__(self, prefix: str) -> None:
        delete_stale(Path(tempfile.gettempdir()).glob(f"{prefix}*"))
        lock = None
        while lock is None:
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            lock = _lock(self.path)
        self._deletion = weakref.finalize(self, _delete_own, self.path, lock, os.getpid())


def delete_stale(leftovers: Iterable[Path]) -> None:
    """Delete this user's files and folders that no living process locks."""
    if fcntl is None:
        return
    for path in leftovers:
        with suppress(OSError):  # held, another's, or deleted by someone else meanwhile
            lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.geteuid():
                    _delete(path)
            finally:
                os.close(lock)


@contextmanager
def held_alone(folder: Path, refusal: str) -> Iterator[None]:
    """Hold a folder for work that one process may do at a time.

    A kill releases it.

    Raises:
        InputError: another process holds it; `refusal` is what it says.
    """
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(refusal) from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(descriptor)


def unfinished(output: str | Path) -> Path:
    """Name the place of work that will become `output`, next to it."""
    output = Path(output)
    return output.with_name(f"{output.name}.unfinished")


def other_identity(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """Return the first name under which unfinished work differs, or None."""
    return next((name for name in wanted if found.get(name) != wanted[name]), None)


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` durable.

    Windows has no such call; it journals renames.
    """
    if os.name == "posix":
        _sync(folder)


@contextmanager
def _neighbour(path: Path, make: Callable[[Path], None]) -> Iterator[Path]:
    """Make and lock a temporary file or folder next to `path`.

    It is locked until it is renamed, and deleted on an error.

    What killed processes left of the like is deleted first.
    """
    delete_leftovers(path.parent, path.name)
    lock = None
    while lock is None:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        make(temporary)
        lock = _lock(temporary)
    try:
        yield temporary
    except BaseException as error:
        _delete(temporary)
        if isinstance(error, HceError):  # nobody has heard of the temporary one
            error.args = (str(error).replace(str(temporary), str(path)),)
        raise
    finally:
        if lock >= 0:
            os.close(lock)


def delete_leftovers(folder: Path, of: str | None = None, within: Path | None = None) -> None:
    """Delete what killed writes of a name, or of any, left in a folder.

    A living process holds its own locked.

    Raises:
        OutsideError: the folder is reached through a link; see `hce.contained`.
    """
    found = ((name, LEFTOVER.fullmatch(name)) for name in names_in(folder, within))
    delete_stale([folder / name for name, match in found if match and of in (None, match[1])])


def _lock(path: Path) -> int | None:
    """Lock a file or folder; return None if someone deleted it meanwhile.

    Returns −1 on a file system without locks.
    """
    if fcntl is None:
        return -1
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with suppress(OSError):  # a file system without locks: nobody can lock it, so nobody deletes it
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    if os.path.lexists(path):
        return descriptor
    os.close(descriptor)
    return None


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _delete_own(path: Path, lock: int, process: int) -> None:
    """Delete a folder, unless this is a fork of the process that made it."""
    if os.getpid() == process:
        _delete(path)
    if lock >= 0:
        os.close(lock)


def _sync_tree(folder: Path, mode: int) -> None:
    """Flush all to disk, with the rights of the folder.

    Libraries write files for their user alone.
    """
    for path in (*folder.rglob("*"), folder):
        if path.is_symlink():
            continue
        wanted = stat.S_IMODE(mode) if path.is_dir() else mode & 0o666
        if stat.S_IMODE(path.stat().st_mode) != wanted:
            with suppress(OSError):  # a file system that knows no rights
                path.chmod(wanted)
        if path.is_dir():
            sync_folder(path)
        elif path.is_file():
            _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ----------------------------------------------------------------------------------------- mapped files


def write_to_be_mapped(file: BinaryIO, rows: np.ndarray) -> None:
    """Write rows that are read later from a mapped file, some here and some there.

    Linux keeps what is written at once as one piece of its cache, of up to 2 MB, and where a row is read it may map the
    whole piece it lies in, all of which then counts as memory of the process. So the pieces are made small.
    """
    data = memoryview(rows.tobytes())
    for start in range(0, len(data), PIECE):
        file.write(data[start : start + PIECE])


@contextmanager
def released(vectors: object) -> Iterator[None]:
    """Let the system drop pages of a mapped array while inside this block.

    The array must not be changed.

    Otherwise all of a file that is read through counts as memory of the process, however little of it is in use.
    """
    mapped = getattr(vectors, "_mmap", None)
    if mapped is None or not hasattr(mmap, "MADV_DONTNEED"):
        yield
        return
    _released.append(mapped)
    try:
        with every(SECONDS_BETWEEN_RELEASES, lambda: mapped.madvise(mmap.MADV_DONTNEED)):
            yield
    finally:
        _released.remove(mapped)


def give_back() -> None:
    """Let the system drop pages of the arrays within `released` now.

    Call it when rows from all over were read.

    Around each of them the system maps 64 KB that it has at hand, so that in the time between two releases all of a
    file may be mapped.
    """
    for mapped in list(_released):
        mapped.madvise(mmap.MADV_DONTNEED)
