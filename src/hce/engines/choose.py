"""Engines by name: built from vectors, or read back from disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hce.engines.base import Engine
from hce.engines.flat import FlatEngine
from hce.engines.hnsw import HnswEngine
from hce.engines.ivf import IvfEngine
from hce.engines.quantise import codec_of
from hce.engines.tree import TreeEngine
from hce.errors import InputError
from hce.tree.hierarchy import Hierarchy

ENGINES: dict[str, type[Any]] = {each.name: each for each in (FlatEngine, HnswEngine, IvfEngine, TreeEngine)}


def new_engine(
    name: str,
    dim: int,
    *,
    numbers: np.ndarray,
    vectors: np.ndarray,
    dtype: str = "float32",
    hierarchy: Hierarchy | None = None,
    seed: int = 0,
) -> Engine:
    """Build an engine of all these vectors; none is fine too.

    Args:
        name: one of `ENGINES`.
        dim: the length n of a vector.
        numbers: of shape (N,), int64, rising.
        vectors: unit rows of shape (N, n), float32, a memory map included.
        dtype: "float32"; "float16" and "int8" take a half and a quarter of the space, and lose a little.
        hierarchy: the trained tree of these vectors, whose document i is row i. `tree` searches by it, and grows
            one of its own where none is given; the others have no use for it.
        seed: of whatever is drawn at random.

    Raises:
        InputError: an engine or a dtype that does not exist.
    """
    codec_of(dtype)
    kind = _class_of(name)
    if kind is TreeEngine:
        return TreeEngine.build(dim, numbers, vectors, dtype, hierarchy, seed)
    if kind is IvfEngine:
        return IvfEngine.build(dim, numbers, vectors, dtype, seed)
    return kind.build(dim, numbers, vectors, dtype)


def load_engine(name: str, folder: str | Path, dim: int) -> Engine:
    """Read what `Engine.save` wrote.

    Raises:
        InputError: there is no such engine.
        FormatError: the files are damaged or of another shape; build the engine anew.
    """
    return _class_of(name).load(Path(folder), dim)


def _class_of(name: str) -> type[Any]:
    if name not in ENGINES:
        raise InputError(f"engine {name!r}: choose one of {', '.join(ENGINES)}")
    return ENGINES[name]
