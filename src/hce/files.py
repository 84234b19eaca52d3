"""Atomic writes of files and folders, unfinished work, locks and checksums.

A file or folder is written under a temporary name next to its final one, flushed to disk, then renamed. The writer
locks it meanwhile. The next write of the same name deletes temporary files without a lock: their writer was killed.
Unfinished work stays next to its output with a record of what it belongs to, so only the same work is continued.

CRC-32 finds every flipped bit and every burst of up to 32 bits, and misses other damage once in four billion. It reads
2.8 GB a second (docs/LOG.md). It protects against accidents only: an attacker can change the checksum too.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import mmap
import os
import re
import reprlib
import secrets
import shutil
import stat
import tempfile
import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import reduce
from pathlib import Path
from types import UnionType
from typing import IO, TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from hce.contained import CHECKSUMS as CHECKSUMS
from hce.contained import check_tree, is_file, names_in, open_file, plain_path, read_json_value
from hce.errors import FormatError, HceError, InputError, one_line, system_reason
from hce.progress import Advance, every

if TYPE_CHECKING:
    import numpy as np

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)
T = TypeVar("T")

LEFTOVER = re.compile(r"\.(.+)\.[0-9a-f]{8}\.partial", re.DOTALL)  # the temporary name of a write
SEAL = "checksum"
LEFT_OUT = {CHECKSUMS, "README.md"}  # users may edit the README
BYTES_AT_ONCE = 1 << 22

HELD = 1 << 30  # bytes of vectors kept in memory; more are read from a file
PIECE = 1 << 16  # bytes written at once to a file that will be mapped
SECONDS_BETWEEN_RELEASES = 0.1  # in this time a process reads less than a gigabyte of a mapped file
_released: list[mmap.mmap] = []  # the files of the active `released` blocks


# ------------------------------------------------------------------------------------------------- files


@contextmanager
def open_atomically(path: str | Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a temporary file, and rename it to `path` on success."""
    path = Path(path)
    with writing_to(path):
        if path.is_dir():
            raise InputError(f"{path}: is a folder; give the name of a file")
        if path.exists() and not path.is_file():  # a rename would replace /dev/null and break the machine
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
    """Turn any write error in this block into an InputError of one line."""
    try:
        yield
    except HceError:
        raise
    except Exception as error:
        reason = system_reason(error)
        if reason is None:
            raise
        if isinstance(error, FileNotFoundError):
            require_parent(Path(path))
        raise InputError(
            f"{path}: cannot be written ({reason}); check the disk's space and the file's folder"
        ) from error


@contextmanager
def open_text(path: str | Path) -> Iterator[IO[str]]:
    """Open a text file for writing, atomically; `.gz` names are compressed."""
    is_compressed = Path(path).suffix.lower() == ".gz"
    with (
        open_atomically(path, "wb" if is_compressed else "w") as file,
        gzip.open(file, "wt", encoding="utf-8", newline="") if is_compressed else nullcontext(file) as text,
    ):
        yield text


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as readable JSON, atomically."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    with open_atomically(path, "wb") as file:
        file.write(text.encode("utf-8", "backslashreplace"))  # file names need not be valid Unicode


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON object that `write_json` wrote; FormatError if it is damaged."""
    value = read_json_value(path)
    if not isinstance(value, dict):
        raise FormatError(f"{path}: damaged (a JSON {type(value).__name__} where an object should be)")
    return value


def checked_fields(kind: type[T], values: Any, *, may_be_nan: Collection[str] = ()) -> T:
    """Check JSON values by type, and make a dataclass or a named tuple of them.

    Names that `kind` does not have are skipped. `read_json` reads NaN as None, so fields in `may_be_nan` accept None. A
    wrong type raises FormatError; the caller adds the file's name.
    """
    if not isinstance(values, dict):
        raise FormatError(f"a {type(values).__name__} where an object should be")
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name in values}
    for name, hint in hints.items():
        if not _fits(values[name], hint, name in may_be_nan):
            raise FormatError(f"{name!r} has a wrong value: {reprlib.repr(values[name])}")
    try:
        return kind(**{name: values[name] for name in hints})
    except TypeError as error:  # its message names the missing fields
        raise FormatError(one_line(error)) from error


def _fits(value: Any, hint: Any, may_be_nan: bool) -> bool:
    """Return whether a JSON value has a type."""
    origin, of = get_origin(hint), get_args(hint)
    if hint is Any or (value is None and hint is float and may_be_nan):
        return True
    if origin in (Union, UnionType):
        return any(_fits(value, each, may_be_nan) for each in of)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(each, of[1], may_be_nan) for each in value.values())
    if origin in (list, tuple):
        return isinstance(value, origin) and all(_fits(each, of[0], may_be_nan) for each in value)
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


# ------------------------------------------------------------------------------------------------- folders


def require_parent(output: Path) -> None:
    """Raise InputError for an output under a folder that does not exist."""
    if not output.absolute().parent.is_dir():
        raise InputError(f"{output}: there is no folder {output.absolute().parent}; make it first")


def require_new(path: str | Path) -> None:
    """Raise InputError for an output folder that is a file, or not empty."""
    path = Path(path)
    try:
        holds_something = any(path.iterdir()) if path.is_dir() else os.path.lexists(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); choose another place") from error
    if holds_something:
        raise InputError(f"{path} exists and is not an empty folder: choose another place or remove it first")


def require_free(output: str | Path, resume: bool) -> None:
    """Raise InputError if an output folder exists or has an unfinished run."""
    require_new(output)
    if not resume and unfinished(output).exists():
        raise InputError(f"{unfinished(output)} holds an unfinished run: add --resume to continue it, or delete it")


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` on success."""
    path = Path(path).absolute()  # "." has no name for a temporary one to begin with
    require_new(path)
    with writing_to(path):
        make_folder(path.parent)
        with _neighbour(path, Path.mkdir) as temporary:
            mode = temporary.stat().st_mode
            yield temporary
            _sync_tree(temporary, mode)
            temporary.replace(path)  # replaces an empty folder, fails on a full one
            sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, and sync their names to disk."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_folder(each.parent)


def delete_whole(path: Path) -> None:
    """Delete a folder; after a kill it is complete, or hidden as a leftover."""
    with suppress(OSError):
        path.replace(_hidden(path))
        sync_folder(path.parent)
    delete_leftovers(path.parent, path.name)


class ScratchFolder:
    """A temporary folder, deleted with this object.

    A forked process does not delete it. After a kill, the next scratch folder with this prefix deletes it.
    """

    def __init__(self, prefix: str) -> None:
        delete_stale(Path(tempfile.gettempdir()).glob(f"{prefix}*"))
        lock = None
        while lock is None:
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            lock = _lock(self.path)
        weakref.finalize(self, _delete_own, self.path, lock, os.getpid())


def unfinished(output: str | Path) -> Path:
    """Return the path of the unfinished work for `output`."""
    output = Path(output)
    return output.with_name(f"{output.name}.unfinished")


def other_identity(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """Return the first name whose value differs, or None."""
    return next((name for name in wanted if found.get(name) != wanted[name]), None)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable; Windows journals renames by default."""
    if os.name == "posix":
        _sync(folder)


# ------------------------------------------------------------------------------------------------- locks


@contextmanager
def held_alone(folder: Path, refusal: str) -> Iterator[None]:
    """Lock a folder for this process, or raise InputError with this message."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(refusal) from None
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _neighbour(path: Path, make: Callable[[Path], None]) -> Iterator[Path]:
    """Make a temporary file or folder next to `path`, and lock it in this block."""
    delete_leftovers(path.parent, path.name)
    lock = None
    while lock is None:
        temporary = _hidden(path)
        make(temporary)
        lock = _lock(temporary)
    try:
        yield temporary
    except BaseException as error:
        _delete(temporary)
        if isinstance(error, HceError):  # users know only the final name
            error.args = (str(error).replace(str(temporary), str(path)),)
        raise
    finally:
        if lock >= 0:
            os.close(lock)


def delete_leftovers(folder: Path, of: str | None = None, within: Path | None = None) -> None:
    """Delete temporary files of killed writes, of one name or of all."""
    found = ((name, LEFTOVER.fullmatch(name)) for name in names_in(folder, within))
    delete_stale([folder / name for name, match in found if match and of in (None, match[1])])


def delete_stale(leftovers: Iterable[Path]) -> None:
    """Delete this user's files and folders that no living process locks."""
    if fcntl is None:
        return
    for path in leftovers:
        with suppress(OSError):  # locked, another user's, or deleted meanwhile
            lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.geteuid():
                    _delete(path)
            finally:
                os.close(lock)


def _lock(path: Path) -> int | None:
    """Lock a path; None if it was deleted meanwhile, −1 on a system without locks."""
    if fcntl is None:
        return -1
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with suppress(OSError):  # no locks here: `delete_stale` cannot lock it either, so it deletes nothing
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    # `delete_stale` may have held the lock first and deleted the path: the caller then makes another.
    if os.path.lexists(path):
        return descriptor
    os.close(descriptor)
    return None


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _delete_own(path: Path, lock: int, process: int) -> None:
    """Delete a folder, unless this is a fork of the owner's process."""
    if os.getpid() == process:
        _delete(path)
    if lock >= 0:
        os.close(lock)


def _sync_tree(folder: Path, mode: int) -> None:
    """Flush all files to disk, and give them the folder's mode; libraries set others."""
    for path in (*folder.rglob("*"), folder):
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            continue
        wanted = stat.S_IMODE(mode) if path.is_dir() else mode & 0o666
        if stat.S_IMODE(path.stat().st_mode) != wanted:
            with suppress(OSError):  # a file system without modes
                path.chmod(wanted)
        if path.is_file() or os.name == "posix":
            _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------------------- checksums


def write_checksums(folder: Path, names: Iterable[str] | None = None) -> None:
    """Write the checksums of these files, by default all, to `checksums.json`."""
    chosen = check_tree(folder).keys() - LEFT_OUT if names is None else names
    write_json(folder / CHECKSUMS, {name: file_checksum(folder / name) for name in sorted(chosen)})


def damage_in(folder: Path, advance: Advance = lambda count: None) -> list[str] | None:
    """Return a line for each missing or changed file; None without checksums.

    `advance` gets the number of bytes just read. A link, a pipe or a device raises OutsideError.
    """
    if not is_file(folder / CHECKSUMS):
        return None
    files = check_tree(folder)
    try:
        known = read_json(folder / CHECKSUMS)
    except FormatError as error:
        return [str(error)]
    damaged = []
    for name, checksum in known.items():
        found = None
        with suppress(OSError):
            found = file_checksum(folder / name, advance) if name in files else None
        if name not in files:
            damaged.append(f"{name} is missing, or is not a regular file in this folder")
        elif found is None or found != checksum:
            damaged.append(f"{name} is not as it was written")
    return damaged


def require_undamaged(folder: Path, remedy: str) -> None:
    """Raise FormatError if a file is damaged; a folder without checksums passes."""
    if damaged := damage_in(folder):
        more = f" (and {len(damaged) - 1:,} more)" if len(damaged) > 1 else ""
        raise FormatError(f"{folder}: damaged ({damaged[0]}){more}; {remedy}")


def sealed(values: dict[str, Any]) -> dict[str, Any]:
    """Add a checksum to the values of a small JSON file."""
    return {**values, SEAL: zlib.crc32(json.dumps(values, sort_keys=True).encode())}


def unsealed(values: dict[str, Any]) -> tuple[dict[str, Any], bool | None]:
    """Remove the checksum; return the values and whether it fits, None without one."""
    rest = {name: value for name, value in values.items() if name != SEAL}
    return rest, values[SEAL] == sealed(rest)[SEAL] if SEAL in values else None


class KeptArrays(NamedTuple):
    """Arrays from a cache file, in the order requested, and the facts saved with them."""

    arrays: list[np.ndarray]
    facts: dict[str, str]


def keep_arrays(path: Path, arrays: dict[str, np.ndarray], facts: Mapping[str, str]) -> None:
    """Cache arrays in a file, if it can be written; `facts` identify their source."""
    from safetensors.numpy import save

    try:
        with open_atomically(path, "wb") as file:
            file.write(save(arrays, {**facts, SEAL: str(checksum_of_arrays(arrays.values()))}))
    except (HceError, OSError) as error:
        logger.debug("%s was not cached: %s", path, error)


def kept_arrays(path: Path, names: Iterable[str]) -> KeptArrays | None:
    """Read cached arrays by name; None if missing or damaged.

    The names must be in the order written: the checksum depends on it.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(plain_path(path), "numpy") as file:
            facts, arrays = file.metadata() or {}, [file.get_tensor(name) for name in names]
    except (OSError, SafetensorError):
        return None
    return KeptArrays(arrays, facts) if facts.get(SEAL) == str(checksum_of_arrays(arrays)) else None


def checksum_of_arrays(arrays: Iterable[np.ndarray]) -> int:
    """Return one checksum of all arrays, in this order."""
    return reduce(lambda checksum, array: zlib.crc32(array.tobytes(), checksum), arrays, 0)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BYTES_AT_ONCE):
            digest.update(block)
    return digest.hexdigest()


def file_checksum(path: Path, advance: Advance = lambda count: None) -> int:
    """Return the CRC-32 of a file."""
    value = 0
    with open_file(path) as file:
        while block := file.read(BYTES_AT_ONCE):
            value = zlib.crc32(block, value)
            advance(len(block))
    return value


# ------------------------------------------------------------------------------------------------- mapped files


def write_to_be_mapped(file: BinaryIO, rows: np.ndarray) -> None:
    """Write rows in small pieces, so that scattered reads map little memory.

    Linux caches a large write in blocks of up to 2 MB. Reading one row may map its entire block, and all of the block
    counts as memory of the process.
    """
    data = memoryview(rows.tobytes())
    for start in range(0, len(data), PIECE):
        file.write(data[start : start + PIECE])


@contextmanager
def released(vectors: object) -> Iterator[None]:
    """Release the pages of a mapped, read-only array again and again in this block.

    Without this, every page that was read once counts as memory of the process.
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
    """Release the pages of all arrays in `released` now, after scattered reads.

    The system maps 64 KB around each row, so scattered reads may map an entire file between two timed releases.
    """
    for mapped in list(_released):
        mapped.madvise(mmap.MADV_DONTNEED)
