"""Files and folders that appear whole or not at all, and work that a crash leaves unfinished.

What is written is written beside its place, flushed to disk, then renamed. Unfinished work is kept beside its output,
with a mapping of what it belongs to, so that only the same work is ever continued.
"""

from __future__ import annotations

import gzip
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from hce.errors import FormatError, InputError


@contextmanager
def open_atomically(path: str | Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a temporary neighbour of `path` for writing; on success it takes the place of `path`, else it is removed.

    Raises:
        InputError: when `path` is a folder, or nothing can be written beside it.
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{path}: is a folder; give the name of a file")
    temporary = _neighbour(path)
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    try:
        file = temporary.open(mode.replace("w", "x"), **text)  # type: ignore[call-overload]
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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
    with open_atomically(path) as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON object that `write_json` wrote.

    Raises:
        FormatError: nothing is there, or it is not a JSON object.
    """
    value = read_json_value(path)
    if not isinstance(value, dict):
        raise FormatError(f"{path}: damaged (a JSON {type(value).__name__} where an object should be)")
    return value


def read_json_value(path: str | Path) -> Any:
    """Read any value that `write_json` wrote; NaN and infinities, which only Python's JSON has, become None.

    Raises:
        FormatError: nothing is there, or it is not JSON.
    """
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda name: None)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: damaged ({error})") from error


def require_new(path: str | Path) -> None:
    """Refuse an output folder that holds something already.

    Raises:
        InputError: `path` is a file, or a folder that is not empty.
    """
    path = Path(path)
    if any(path.iterdir()) if path.is_dir() else os.path.lexists(path):
        raise InputError(f"{path} exists and is not an empty folder: choose another place or remove it first")


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` on success; `path` must not exist or be an empty folder.

    Raises:
        InputError: when `path` is a file or a folder that holds something, or nothing can be written beside it.
    """
    path = Path(path).absolute()  # "." has no name to build a neighbour's from
    require_new(path)
    temporary = _neighbour(path)
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        yield temporary
        _sync_tree(temporary)
        temporary.replace(path)  # replaces an empty folder, refuses a full one
        sync_folder(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def unfinished(output: str | Path) -> Path:
    """Name the place of work that is to become `output`: beside it, under a name that says so."""
    output = Path(output)
    return output.with_name(f"{output.name}.unfinished")


def other_identity(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """Return the first name under which unfinished work differs from the work at hand; None where all is the same."""
    return next((name for name in wanted if found.get(name) != wanted[name]), None)


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` durable. Windows has no such call; its renames are journalled."""
    if os.name == "posix":
        _sync(folder)


def _neighbour(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(f"{path}: cannot be written ({error.strerror}); check the folder it is to stand in")


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            _sync(path)
        elif path.is_dir():
            sync_folder(path)
    sync_folder(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
