"""An engine on disk: a faiss index and a few arrays, never pickled; whoever calls makes the folder durable."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import faiss
import numpy as np
from safetensors.numpy import load_file, save_file

from hce.errors import FormatError


class Parts(NamedTuple):
    """What an engine is made of: faiss indexes and arrays, by name."""

    indexes: dict[str, faiss.Index]
    arrays: dict[str, np.ndarray]


def write_parts(folder: Path, parts: Parts) -> None:
    """Write an engine into an existing folder."""
    for name, index in parts.indexes.items():
        faiss.write_index(index, str(folder / f"{name}.faiss"))
    arrays = {name: np.ascontiguousarray(array) for name, array in parts.arrays.items()}
    save_file(arrays, folder / "arrays.safetensors")


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


def read_parts(folder: Path, dim: int) -> Parts:
    """Read what `write_parts` wrote; call it within `reading`.

    Raises:
        ValueError: the vectors are not of length `dim`.
    """
    arrays = load_file(folder / "arrays.safetensors")
    indexes = {path.stem: faiss.read_index(str(path)) for path in folder.glob("*.faiss")}
    for name, index in indexes.items():
        if index.d != dim:
            raise ValueError(f"{name} is of vectors of length {index.d}, not {dim}")
    return Parts(indexes, arrays)


def require(condition: bool, complaint: str) -> None:
    """Refuse parts that do not fit together; call it within `reading`.

    Raises:
        ValueError: they do not.
    """
    if not condition:
        raise ValueError(complaint)
