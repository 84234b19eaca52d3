"""Files and folders that appear whole or not at all: written beside their place, flushed to disk, then renamed."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from hce.errors import InputError


@contextmanager
def open_atomically(path: str | Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a temporary neighbour of `path` for writing; on success it takes the place of `path`, else it is removed."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    try:
        with os.fdopen(handle, mode, **text) as file:  # type: ignore[call-overload]
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o666 & ~_umask())  # mkstemp gives 0600; a plain open() would not
        Path(temporary).replace(path)
        sync_folder(path.parent)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
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
        InputError: when `path` is a file or a folder that holds something.
    """
    path = Path(path)
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise InputError(f"{path} exists and is not an empty folder: choose another place or remove it first")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial"))
    try:
        yield temporary
        for file in (file for file in temporary.rglob("*") if file.is_file()):
            _sync(file)
        temporary.chmod(0o777 & ~_umask())
        temporary.replace(path)  # replaces an empty folder, refuses a full one
        sync_folder(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


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


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
