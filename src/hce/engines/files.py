"""An engine on disk: faiss indexes and a few arrays with their checksums, never pickled.

The readers of faiss trust what they read, so a damaged file is found out before it gets there. Whoever calls makes
the folder durable.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import faiss
import numpy as np
from safetensors.numpy import load_file, save_file

from hce.atomic import write_json
from hce.errors import FormatError

ARRAYS, CHECKSUMS = "arrays.safetensors", "checksums.json"
BYTES_AT_ONCE = 1 << 24


class Parts(NamedTuple):
    """What an engine is made of: faiss indexes and arrays, by name."""

    indexes: dict[str, faiss.Index]
    arrays: dict[str, np.ndarray]


def write_parts(folder: Path, parts: Parts) -> None:
    """Write an engine into an existing folder."""
    for name, index in parts.indexes.items():
        faiss.write_index(index, str(folder / f"{name}.faiss"))
    save_file({name: np.ascontiguousarray(array) for name, array in parts.arrays.items()}, folder / ARRAYS)
    files = [ARRAYS, *(f"{name}.faiss" for name in parts.indexes)]
    write_json(folder / CHECKSUMS, {name: _checksum(folder / name) for name in files})


def read_parts(folder: Path, dim: int) -> Parts:
    """Read what `write_parts` wrote; call it within `reading`.

    Raises:
        ValueError: a file has changed, or the vectors are not of length `dim`.
    """
    checksums = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
    for name, known in checksums.items():
        require(_checksum(folder / name) == known, f"{name} is not as it was written")
    paths = [folder / name for name in checksums if name != ARRAYS]
    indexes = {path.stem: faiss.read_index(str(path)) for path in paths}
    for name, index in indexes.items():
        require(index.d == dim, f"{name} is of vectors of length {index.d}, not {dim}")
    return Parts(indexes, load_file(folder / ARRAYS))


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Turn whatever a damaged file makes its reader raise into one sentence.

    Raises:
        FormatError: something went wrong inside.
    """
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise FormatError(f"{folder}: the search engine is damaged ({reason}); it has to be rebuilt") from error


def require(condition: bool, complaint: str) -> None:
    """Refuse parts that do not fit together; call it within `reading`.

    Raises:
        ValueError: they do not.
    """
    if not condition:
        raise ValueError(complaint)


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(BYTES_AT_ONCE):
            value = zlib.crc32(block, value)
    return value
