"""Safe access to the files of an index or a model that may come from a stranger.

Nothing outside its folder is opened, listed or deleted. The path that the user gives may be a link. A link, a pipe or a
device inside the folder raises OutsideError.

Our readers open files with `open_file` or `read_bytes`. A library that opens paths itself gets a `plain_path`, or a
folder that passed `check_tree`. transformers and sentence-transformers open any path that a setting names, such as
`tokenizer_file`, so call `require_inside` on a model's folder first. Delete with `delete_file` or `delete_folder`.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from hce.errors import FormatError, HceError, OutsideError

logger = logging.getLogger(__name__)

MOST_TEXT = 128 << 20  # bytes of a JSON or text file; these are read into memory at once
TEXTS = (".json", ".txt", ".jinja", ".model")  # files of a model that libraries read into memory at once
CHECKSUMS = "checksums.json"

NOT_SETTINGS = ("tokenizer.json", "vocab.json", "words.json", CHECKSUMS, "hce.json", "labels.json")  # data only
NAMES_A_FILE = re.compile(r".*(file|path|folder|dir)s?")
ONLY_SHOWN = ("_name_or_path", "name_or_path")  # a model's origin; no library opens these

# Without O_NONBLOCK, opening a pipe that has no writer would hang. Windows has none of these flags.
NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
READ = os.O_RDONLY | getattr(os, "O_BINARY", 0) | NO_LINK
HAS_DIR_FD = os.open in os.supports_dir_fd

KINDS = {stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device"}
KINDS |= {stat.S_IFBLK: "a device", stat.S_IFDIR: "a folder", stat.S_IFREG: "a file"}

# Names of files that hce and tantivy write into an index without listing them in a `checksums.json`.
OWN_FILE = re.compile(
    r"(checksums|snapshot|manifest|labels|meta|\.managed)\.json|(arrays|hierarchy|space)\.safetensors|[a-z0-9_]+\.npy"
    r"|[0-9a-f]{32}\.[a-z.]+|\.tantivy-[a-z]+\.lock|\.?codes-[0-9a-f]{8}(-[0-9]+)?\.sqlite(-journal|\.partial)?"
)


def open_file(path: str | Path, within: str | Path | None = None, *, most: int | None = None) -> BinaryIO:
    """Open a regular file for reading, along a path without links.

    Args:
        path: the file.
        within: the folder of the index or model, by default the file's folder; its own path may be a link.
        most: the largest allowed size in bytes.

    Raises:
        OutsideError: the file is a link, a pipe, a device or a folder, or the path goes through a link.
        FormatError: the file is larger than `most`.
        FileNotFoundError: the file does not exist.
    """
    path = Path(path)
    found = _require_plain(path, within, stat.S_ISREG)
    if most is not None:
        _check_size(path, found, most)
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


def read_bytes(path: str | Path, within: str | Path | None = None, *, most: int = MOST_TEXT) -> bytes:
    """Read all of a regular file, opened with `open_file`."""
    with open_file(path, within, most=most) as file:
        content = file.read(most + 1)
    if len(content) > most:  # the file grew since its size was checked
        raise FormatError(f"{path}: damaged (more than {most:,} bytes)")
    return content


def read_json_value(path: str | Path) -> Any:
    """Read a JSON value, with None for NaN and infinity."""
    try:
        return json.loads(read_bytes(path).decode(), parse_constant=lambda name: None)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: damaged ({str(error) or type(error).__name__})") from error


def plain_path(path: str | Path, within: str | Path | None = None) -> Path:
    """Return a path for a library to open; OutsideError unless regular or missing."""
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
    folder = Path(folder)
    if within is not None and not is_folder(folder, within):
        return []
    try:
        return sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return []


def check_tree(folder: str | Path, within: str | Path | None = None) -> dict[str, os.stat_result]:
    """Return all files below a folder; fail unless all are regular files.

    Raises:
        OutsideError: there is a link, a pipe or a device; without `within`, the folder itself may be a link.
        FormatError: a text file is larger than `MOST_TEXT`.
    """
    folder = Path(folder)
    if within is not None and not is_folder(folder, within):
        return {}
    return {path.relative_to(folder).as_posix(): found for path, found in sorted(_walk(folder))}


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
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")  # after a kill, the next write deletes it
    with suppress(OSError):  # another process was faster, or there is no permission
        path.replace(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
    return not os.path.lexists(path)


# ------------------------------------------------------------------------------------------------- paths without links


def _require_plain(path: Path, within: str | Path | None, is_wanted: Callable[[int], bool]) -> os.stat_result:
    """Return the status of a path that goes through real folders only."""
    root = path.parent if within is None else Path(within)
    names = path.relative_to(root).parts
    if ".." in names:
        raise _outside(path, "outside of it")
    place = root
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
    """Open a file folder by folder from the root, following no link.

    If the path were opened in one step, a folder replaced by a link after the check would be followed.
    """
    root = path.parent if within is None else Path(within)
    if path.is_symlink() and _is_of_hub(path):
        return os.open(os.path.realpath(path), READ)
    if not HAS_DIR_FD:
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


def _walk(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the regular files below a folder; others may delete some meanwhile."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    for entry in entries:
        path = Path(entry.path)
        with suppress(FileNotFoundError):  # deleted meanwhile
            found = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                yield from _walk(path)
                continue
            if stat.S_ISLNK(found.st_mode) and _is_of_hub(path):
                found = path.stat()
            if not stat.S_ISREG(found.st_mode):
                raise _outside(path, found.st_mode)
            if path.suffix in TEXTS:
                _check_size(path, found, MOST_TEXT)
            yield path, found


def _check_size(path: Path, found: os.stat_result, most: int) -> None:
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


# ------------------------------------------------------------------------------------------------- what hce wrote


def _strange(folder: Path) -> str | None:
    """Return why hce may not delete a folder; None if it wrote everything in it."""
    try:
        files, device = check_tree(folder), folder.stat().st_dev
    except (OutsideError, FormatError, OSError) as error:
        return str(error)
    listed: set[str] = set()
    for name in files:
        place, _, last = name.rpartition("/")
        if last == CHECKSUMS:
            with suppress(HceError, TypeError, ValueError):  # a damaged checksums.json lists nothing
                listed |= {f"{place}/{each}" if place else each for each in dict(read_json_value(folder / name))}
    for name, found in files.items():
        is_own = name in listed or OWN_FILE.fullmatch(name.rpartition("/")[2])
        if not is_own or found.st_dev != device:
            return f"it contains {name}, which hce did not write"
    return None


def require_inside(folder: Path) -> None:
    """Raise OutsideError if a model has links, or a setting names a file elsewhere."""
    for name in check_tree(folder):
        path = folder / name
        if path.suffix != ".json" or path.name in NOT_SETTINGS:
            continue
        for key, value in _named_files(read_json_value(path)):
            if _leads_out(folder, path.parent, key, value):
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


def _leads_out(folder: Path, place: Path, key: str, value: str) -> bool:
    """Return whether a file name leads out of a model's folder.

    Libraries resolve names of `…_file` settings from the current folder too.
    """
    bases = (place, Path.cwd()) if key.endswith("_file") else (place,)
    found = [base / value for base in bases if os.path.lexists(base / value)]
    return any(not path.resolve().is_relative_to(folder.resolve()) for path in found)
