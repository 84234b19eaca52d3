"""Files and folders: safe reading of untrusted ones, atomic writes, locks, checksums, and mapped arrays.

An index or a model may come from a stranger. Nothing outside its folder is opened, listed or deleted. The folder itself
may be a link. A link, a pipe or a device inside it raises OutsideError; only links within the hub's cache are followed.
Our readers open files with `open_file` or `read_bytes`. A library that opens paths itself gets a `plain_path`, or a
folder that passed `check_tree`. transformers and sentence-transformers open any path that a setting names, such as
`tokenizer_file`, so call `require_inside` on a model's folder first. Delete with `delete_file` or `delete_folder`.

A file or folder is written under a temporary name next to its final one, flushed to disk, then renamed. The writer
locks it meanwhile. The next write of the same name deletes temporary files that no process locks, left by a kill.
Unfinished work stays next to its output with the run's identity, so only the same run can continue it.

CRC-32 finds any single flipped bit and any burst of up to 32 bits, and misses other damage once in four billion times.
It reads 2.8 GB a second (docs/LOG.md). It protects against accidents only: an attacker can change the checksum too.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import logging
import math
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
from typing import IO, TYPE_CHECKING, Any, BinaryIO, TypeVar, Union, get_args, get_origin, get_type_hints

from hce.errors import FormatError, HceError, InputError, OutsideError, one_line, system_reason
from hce.progress import Advance, every

if TYPE_CHECKING:
    import numpy as np

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)
T = TypeVar("T")

CHECKSUMS = "checksums.json"
LEFT_OUT = {CHECKSUMS, "README.md"}  # users may edit the README
SEAL = "checksum"
LEFTOVER = re.compile(r"\.(.+)\.[0-9a-f]{8}\.partial", re.DOTALL)  # the temporary name of a write
# Names of files that hce and tantivy write into an index without listing them in a `checksums.json`.
OWN_FILE = re.compile(
    r"(checksums|snapshot|manifest|labels|meta|\.managed)\.json|(arrays|hierarchy|space)\.safetensors|[a-z0-9_]+\.npy"
    r"|[0-9a-f]{32}\.[a-z.]+|\.tantivy-[a-z]+\.lock|\.?codes-[0-9a-f]{8}(-[0-9]+)?\.sqlite(-journal|\.partial)?"
)

MOST_TEXT = 128 << 20  # bytes of a JSON or text file; these are read into memory at once
TEXTS = (".json", ".txt", ".jinja", ".model")  # files of a model that libraries read into memory at once
BYTES_AT_ONCE = 1 << 22

NOT_SETTINGS = ("tokenizer.json", "vocab.json", "words.json", CHECKSUMS, "hce.json", "labels.json")  # data only
NAMES_A_FILE = re.compile(r".*(file|path|folder|dir)s?")
ONLY_SHOWN = ("_name_or_path", "name_or_path")  # a model's origin; no library opens these

# Without O_NONBLOCK, opening a pipe that has no writer would hang. Windows has none of these flags.
NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
READ = os.O_RDONLY | getattr(os, "O_BINARY", 0) | NO_LINK

KINDS = {stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device"}
KINDS |= {stat.S_IFBLK: "a device", stat.S_IFDIR: "a folder", stat.S_IFREG: "a file"}

HELD = 1 << 30  # bytes of vectors kept in memory; more are read from a file
PIECE = 1 << 16  # bytes written at once to a file that will be mapped
SECONDS_BETWEEN_RELEASES = 0.1  # in this time a process reads less than a gigabyte of a mapped file
_released: list[mmap.mmap] = []  # the files of the active `released` blocks


# ------------------------------------------------------------------------------------------------- reading


def open_file(path: str | Path, within: str | Path | None = None, *, most: float = math.inf) -> BinaryIO:
    """Open a regular file for reading, along a path without links.

    `within` is the folder of the index or model, by default the file's folder; that folder itself may be a link.
    Anything but a regular file raises OutsideError, and a file of more than `most` bytes FormatError.
    """
    path = Path(path)
    _check_size(path, _require_plain(path, within, stat.S_ISREG), most)
    try:
        descriptor = _opened(path, within)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):  # replaced since the check above
            raise _outside(path, stat.S_IFLNK) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _outside(path, 0)
    return os.fdopen(descriptor, "rb")


def read_bytes(path: str | Path, within: str | Path | None = None) -> bytes:
    """Read all of a regular file, opened with `open_file`."""
    with open_file(path, within, most=MOST_TEXT) as file:
        content = file.read(MOST_TEXT + 1)
    if len(content) > MOST_TEXT:  # the file grew since its size was checked
        raise FormatError(f"{path}: damaged (more than {MOST_TEXT:,} bytes)")
    return content


def read_json_value(path: str | Path) -> Any:
    """Read a JSON value, with None for NaN and infinity."""
    try:
        return json.loads(read_bytes(path).decode(), parse_constant=lambda name: None)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: damaged ({str(error) or type(error).__name__})") from error


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
    except TypeError as error:  # the error's message names the missing fields
        raise FormatError(one_line(error)) from error


def _fits(value: Any, hint: Any, may_be_nan: bool) -> bool:
    """Return whether a JSON value is of the type `hint`."""
    origin, of = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, each, may_be_nan) for each in of)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(each, of[1], may_be_nan) for each in value.values())
    if origin in (list, tuple):
        return isinstance(value, origin) and all(_fits(each, of[0], may_be_nan) for each in value)
    if hint is Any or isinstance(value, bool):
        return hint in (Any, bool)
    return isinstance(value, (int, float) if hint is float else hint) or (
        may_be_nan and hint is float and value is None
    )


def plain_path(path: str | Path, within: str | Path | None = None) -> Path:
    """Return a path for a library to open; OutsideError for a link, pipe or folder."""
    is_file(path, within)
    return Path(path)


def is_file(path: str | Path, within: str | Path | None = None) -> bool:
    """Return whether a regular file exists; OutsideError for anything else there."""
    return _found(Path(path), within, stat.S_ISREG)


def is_folder(path: str | Path, within: str | Path | None = None) -> bool:
    """Return whether a folder exists; OutsideError for anything else there."""
    return _found(Path(path), within, stat.S_ISDIR)


def names_in(folder: str | Path, within: str | Path | None = None) -> list[str]:
    """Return the sorted names in a folder; an empty list if it does not exist."""
    if within is None or is_folder(folder, within):
        with suppress(FileNotFoundError):
            return sorted(path.name for path in Path(folder).iterdir())
    return []


def check_tree(folder: str | Path, within: str | Path | None = None) -> dict[str, os.stat_result]:
    """Return all files below a folder by name; fail unless all are regular files.

    A link, a pipe or a device raises OutsideError; without `within`, the folder itself may be a link. A text file of
    more than `MOST_TEXT` bytes raises FormatError. Files that others delete meanwhile are left out.
    """
    folder, files = Path(folder), {}
    if within is not None and not is_folder(folder, within):
        return {}
    for place, folders, names in os.walk(folder, onerror=_raise_unless_missing):
        for path in (Path(place, name) for name in sorted((*folders, *names))):
            with suppress(FileNotFoundError):
                found = path.lstat()
                if stat.S_ISDIR(found.st_mode):
                    continue
                if stat.S_ISLNK(found.st_mode) and _is_of_hub(path):
                    found = path.stat()
                if not stat.S_ISREG(found.st_mode):
                    raise _outside(path, found.st_mode)
                _check_size(path, found, MOST_TEXT if path.suffix in TEXTS else math.inf)
                files[path] = found
    return {path.relative_to(folder).as_posix(): files[path] for path in sorted(files)}


def require_inside(folder: Path) -> None:
    """Raise OutsideError if a model has links, or a setting names a file elsewhere."""
    for name in check_tree(folder):
        path = folder / name
        if path.suffix != ".json" or path.name in NOT_SETTINGS:
            continue
        for key, value in _named_files(read_json_value(path)):
            # Libraries resolve names of `…_file` settings from the current folder too.
            bases = (path.parent, Path.cwd()) if key.endswith("_file") else (path.parent,)
            found = [base / value for base in bases if os.path.lexists(base / value)]
            if any(not each.resolve().is_relative_to(folder.resolve()) for each in found):
                raise OutsideError(
                    f"{path}: {key!r} is {value!r}, which is not in {folder}; hce opens no other file for a model: "
                    "remove the setting, or put a copy of the file there"
                )


def _named_files(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the settings that name files, at any depth, with their values."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _named_files(each, "weight_file" if key == "weight_map" else name)
    elif isinstance(value, list):
        for each in value:
            yield from _named_files(each, key)
    elif isinstance(value, str) and NAMES_A_FILE.fullmatch(key) and key not in ONLY_SHOWN:
        yield key, value


def _require_plain(path: Path, within: str | Path | None, is_wanted: Callable[[int], bool]) -> os.stat_result:
    """Return the status of a path that goes through real folders only."""
    place = path.parent if within is None else Path(within)
    names = path.relative_to(place).parts
    if ".." in names:
        raise _outside(path, "outside of its folder")
    for name in names[:-1]:
        place /= name
        above = place.lstat()
        if not stat.S_ISDIR(above.st_mode):
            raise _outside(place, above.st_mode)
    found = path.lstat() if names else path.stat()
    if stat.S_ISLNK(found.st_mode) and _is_of_hub(path):
        found = path.stat()
    if not is_wanted(found.st_mode):
        raise _outside(path, found.st_mode)
    return found


def _found(path: Path, within: str | Path | None, is_wanted: Callable[[int], bool]) -> bool:
    try:
        _require_plain(path, within, is_wanted)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _opened(path: Path, within: str | Path | None) -> int:
    """Open a file from `within` down, one folder at a time, following no link.

    If the path were opened in one step, a folder replaced by a link after the check would be followed.
    """
    root = path.parent if within is None else Path(within)
    if path.is_symlink() and _is_of_hub(path):
        return os.open(os.path.realpath(path), READ)
    if os.open not in os.supports_dir_fd:
        return os.open(path, READ)
    *above, last = path.relative_to(root).parts
    place = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in above:
            below = os.open(name, READ | os.O_DIRECTORY, dir_fd=place)
            os.close(place)
            place = below
        return os.open(last, READ, dir_fd=place)
    finally:
        os.close(place)


def _is_of_hub(path: Path) -> bool:
    """Return whether a link stays in the hub's cache: from snapshots/ into blobs/."""
    target, folder = Path(os.path.realpath(path)), Path(os.path.realpath(path.parent))
    blobs = target.parent
    return blobs.name == "blobs" and folder.is_relative_to(blobs.parent / "snapshots") and target.is_file()


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _check_size(path: Path, found: os.stat_result, most: float) -> None:
    if found.st_size > most:
        raise FormatError(f"{path}: damaged ({found.st_size:,} bytes, where at most {most:,} are expected)")


def _outside(path: Path, kind: int | str) -> OutsideError:
    """Make the error for a path; `kind` is its file mode, or a description."""
    if not isinstance(kind, str):
        kind = KINDS.get(stat.S_IFMT(kind), "no regular file")
    why = "hce opens nothing outside of an index or a model"
    if kind in ("a file", "a folder"):
        why = f"hce expects {'a folder' if kind == 'a file' else 'a file'} there"
    return OutsideError(f"{path} is {kind}, and {why}; delete it, or replace it with the right file or folder")


# ------------------------------------------------------------------------------------------------- deleting


def delete_file(path: str | Path, within: str | Path | None = None) -> None:
    """Delete a regular file, if it exists; OutsideError for anything else there."""
    if is_file(path, within):
        Path(path).unlink(missing_ok=True)


def delete_folder(path: str | Path, within: str | Path | None = None) -> bool:
    """Delete a folder if hce wrote everything in it; return whether it is gone.

    A file is hce's if a `checksums.json` in the folder lists it, or if it has a name that hce gives (`OWN_FILE`).
    """
    path = Path(path)
    if not is_folder(path, within):
        return True
    strange = _strange(path)
    if strange is not None:
        logger.warning("%s was not deleted (%s); move your own files out, then delete the folder", path, strange)
        return False
    hidden = _hidden(path)  # after a kill, the next write deletes it
    with suppress(OSError):  # another process was faster, or there is no permission
        path.replace(hidden)
        _delete(hidden)
    return not os.path.lexists(path)


def _strange(folder: Path) -> str | None:
    """Return why hce may not delete a folder; None if hce wrote all files in it."""
    try:
        files, device = check_tree(folder), folder.stat().st_dev
    except (OutsideError, FormatError, OSError) as error:
        return str(error)
    own: set[str] = {name for name in files if OWN_FILE.fullmatch(Path(name).name)}
    for path in [Path(name) for name in own if Path(name).name == CHECKSUMS]:
        with suppress(HceError, TypeError, ValueError):  # a damaged checksums.json lists nothing
            own |= {(path.parent / each).as_posix() for each in dict(read_json_value(folder / path))}
    strange = (name for name, found in files.items() if name not in own or found.st_dev != device)
    return next((f"it contains {name}, which hce did not write" for name in strange), None)


def delete_whole(path: Path) -> None:
    """Delete a folder; if killed midway, leave it complete, or hidden as a leftover."""
    with suppress(OSError):
        path.replace(_hidden(path))
        sync_folder(path.parent)
    delete_leftovers(path.parent, path.name)


def delete_leftovers(folder: Path, of: str | None = None, within: Path | None = None) -> None:
    """Delete temporary files of killed writes, of one name or of all."""
    found = ((name, LEFTOVER.fullmatch(name)) for name in names_in(folder, within))
    delete_stale([folder / name for name, match in found if match and of in (None, match[1])])


def delete_stale(leftovers: Iterable[Path]) -> None:
    """Delete each of these paths that is this user's and that no process locks."""
    for path in leftovers if fcntl else ():
        with suppress(OSError):  # locked, another user's, or deleted meanwhile
            lock = os.open(path, os.O_RDONLY | NO_LINK)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.geteuid():
                    _delete(path)
            finally:
                os.close(lock)


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------- writing


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
        with _neighbor(path, lambda temporary: temporary.touch(exist_ok=False)) as temporary:
            with temporary.open(mode, **text) as file:  # type: ignore[call-overload]
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(path.parent)


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` on success."""
    path = Path(path).absolute()  # "." has no name to make a temporary one from
    require_new(path)
    with writing_to(path):
        make_folder(path.parent)
        with _neighbor(path, Path.mkdir) as temporary:
            mode = temporary.stat().st_mode
            yield temporary
            _sync_tree(temporary, mode)
            temporary.replace(path)  # replaces an empty folder, fails on a full one
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
    """Raise InputError if an output folder is not empty or has an unfinished run."""
    require_new(output)
    if not resume and unfinished(output).exists():
        raise InputError(f"{unfinished(output)} holds an unfinished run: add --resume to continue it, or delete it")


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, and sync their names to disk."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_folder(each.parent)


def unfinished(output: str | Path) -> Path:
    """Return the path of the unfinished work for `output`."""
    output = Path(output)
    return output.with_name(f"{output.name}.unfinished")


def other_identity(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """Return the first name in `wanted` whose value differs in `found`, or None."""
    return next((name for name in wanted if found.get(name) != wanted[name]), None)


class ScratchFolder:
    """A temporary folder, deleted with this object.

    A forked process does not delete it. After a kill, the next scratch folder with this prefix deletes it.
    """

    def __init__(self, prefix: str) -> None:
        delete_stale(Path(tempfile.gettempdir()).glob(f"{prefix}*"))
        self.path, lock = _made_and_locked(lambda: Path(tempfile.mkdtemp(prefix=prefix)))
        weakref.finalize(self, _delete_own, self.path, lock, os.getpid())


def _delete_own(path: Path, lock: int, process: int) -> None:
    """Delete a folder, unless this is a fork of the owner's process."""
    if os.getpid() == process:
        _delete(path)
    if lock >= 0:
        os.close(lock)


@contextmanager
def _neighbor(path: Path, make: Callable[[Path], None]) -> Iterator[Path]:
    """Make a temporary file or folder next to `path`, and lock it in this block."""

    def made() -> Path:
        temporary = _hidden(path)
        make(temporary)
        return temporary

    delete_leftovers(path.parent, path.name)
    temporary, lock = _made_and_locked(made)
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


def _made_and_locked(make: Callable[[], Path]) -> tuple[Path, int]:
    """Make a path and lock it; the lock is −1 on a system without locks."""
    while True:
        path = make()
        if fcntl is None:
            return path, -1
        with suppress(FileNotFoundError):  # `delete_stale` locked the path first, and deleted it: make another
            lock = os.open(path, os.O_RDONLY)
            with suppress(OSError):  # no locks here; then `delete_stale` cannot lock the path, and leaves it
                fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.lexists(path):
                return path, lock
            os.close(lock)


@contextmanager
def held_alone(folder: Path, refusal: str) -> Iterator[None]:
    """Lock a folder in this block; if another process holds it, raise InputError."""
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


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable; Windows journals renames by default."""
    if os.name == "posix":
        _sync(folder)


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
        if name not in files:
            damaged.append(f"{name} is missing, or is not a regular file in this folder")
            continue
        with suppress(OSError):
            if file_checksum(folder / name, advance) == checksum:
                continue
        damaged.append(f"{name} has changed since it was written")
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
    """Remove the checksum; return the values, and whether it fits (None if missing)."""
    rest = {name: value for name, value in values.items() if name != SEAL}
    return rest, values[SEAL] == sealed(rest)[SEAL] if SEAL in values else None


def keep_arrays(path: Path, arrays: dict[str, np.ndarray], facts: Mapping[str, str]) -> None:
    """Cache arrays in a file, if it can be written; `facts` identify their source."""
    from safetensors.numpy import save

    try:
        with open_atomically(path, "wb") as file:
            file.write(save(arrays, {**facts, SEAL: str(checksum_of_arrays(arrays.values()))}))
    except (HceError, OSError) as error:
        logger.debug("%s was not cached: %s", path, error)


def kept_arrays(path: Path, names: Iterable[str], facts: Mapping[str, str] | None = None) -> list[np.ndarray] | None:
    """Read cached arrays by name; None if missing, damaged or with other facts.

    The names must be in the order written: the checksum depends on it.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(plain_path(path), "numpy") as file:
            found, arrays = file.metadata() or {}, [file.get_tensor(name) for name in names]
    except (OSError, SafetensorError):
        return None
    expected = {**(facts or {}), SEAL: str(checksum_of_arrays(arrays))}
    return arrays if expected.items() <= found.items() else None


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
    """Release the pages of the arrays in all active `released` blocks now.

    The system maps 64 KB around each row, so scattered reads may map an entire file between two timed releases.
    """
    for mapped in list(_released):
        mapped.madvise(mmap.MADV_DONTNEED)
