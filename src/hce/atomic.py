"""Files and folders that appear whole or not at all: written beside their place, flushed to disk, then renamed."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from hce.errors import InputError


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


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as readable JSON, atomically."""
    with open_atomically(path) as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` on success; `path` must not exist or be an empty folder.

    Raises:
        InputError: when `path` is a file or a folder that holds something, or nothing can be written beside it.
    """
    path = Path(path).absolute()  # "." has no name to build a neighbour's from
    if any(path.iterdir()) if path.is_dir() else os.path.lexists(path):
        raise InputError(f"{path} exists and is not an empty folder: choose another place or remove it first")
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


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` durable. Windows has no such call; its renames are journalled."""
    if os.name == "posix":
        _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
