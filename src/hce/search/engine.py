"""What the index asks of an engine: a mapping from numbers to unit vectors, searched by inner product.

An engine is derived from the store and can be thrown away at any time. It knows numbers and vectors, and nothing of
documents, files of the user, or encoders. Here are the protocol, engines by name, how a vector is kept (as it is, in
half the space, or in a quarter of it), and an engine on disk: plain arrays with their checksums. The readers of faiss
trust what they read, so none of them is used: what is read is no larger than its file, and checked before faiss has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import faiss
import numpy as np
from safetensors.numpy import load_file, save_file

from hce.checksums import damage_in, write_checksums
from hce.errors import FormatError, InputError, one_line
from hce.tree.hierarchy import Hierarchy

ENGINES = {"flat": ("hce.search.exact", "FlatEngine"), "tree": ("hce.search.tree_engine", "TreeEngine")}
"""Module and class of each engine; each module is built on this one, so it is imported when it is asked for."""

ELSEWHERE = ("milvus",)
"""Engines that are no part of this process, and have an address: see `hce.milvus.engine`."""

FLAT_IS_FAST = 500_000  # documents; above, comparing each with the query takes a tenth of a second and more

CODECS = {"float32": "Flat", "float16": "SQfp16", "int8": "SQ8"}
"""The name of each kind of number, and faiss's name of it."""

VECTORS_AT_ONCE = 65_536
SAMPLE, BLOCK = 65_536, 64  # rows that tell the range of each dimension, and how many of them lie together
FEW = 1024  # rows that tell too little of the range of each dimension
FILES = 2  # the format of an engine on disk; 1 was faiss's own
ARRAYS = "arrays.safetensors"


class Found(NamedTuple):
    """The best vectors for each query, best first; equal scores in order of number.

    Attributes:
        numbers: of shape (Q, k), int64; −1 where there are fewer than k vectors.
        scores: of shape (Q, k), float32; −inf there.
    """

    numbers: np.ndarray
    scores: np.ndarray


class Engine(Protocol):
    """Vectors by number. Numbers rise: one that was removed never comes back."""

    name: ClassVar[str]

    def __len__(self) -> int:
        """Return how many vectors there are."""
        ...

    @property
    def numbers(self) -> np.ndarray:
        """The numbers of all vectors, of shape (N,), int64, in any order."""
        ...

    def add(self, numbers: np.ndarray, vectors: np.ndarray) -> None:
        """Take vectors in.

        Args:
            numbers: of shape (B,), int64, rising, all above those that were ever added.
            vectors: unit rows of shape (B, n), float32.
        """
        ...

    def remove(self, numbers: np.ndarray) -> None:
        """Take vectors out; numbers that are not there are passed over."""
        ...

    def search(self, queries: np.ndarray, k: int, allowed: np.ndarray | None = None) -> Found:
        """Find the k vectors of the largest inner product; k of them if there are k.

        Args:
            queries: unit rows of shape (Q, n), float32.
            k: 1 or more.
            allowed: search among these numbers only (rising, int64), and exactly.
        """
        ...

    def scores(self, query: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return the inner products of a query, of shape (n,), with vectors that are there, of shape (m,), float32."""
        ...

    def save(self, folder: Path) -> None:
        """Write everything into an existing, empty folder."""
        ...


# ----------------------------------------------------------------------------------------- by name


def check_engine(name: str, at: str | None, dtype: str, *others: str) -> None:
    """Refuse an engine that does not exist, or not with this address or kind of number.

    Args:
        name: of the engine.
        at: the address of an engine that lives elsewhere.
        dtype: what it is to keep vectors in.
        others: what else may stand in the place of a name.

    Raises:
        InputError: there is no such engine, or not with these.
    """
    codec_of(dtype)
    if name not in (*others, *ENGINES, *ELSEWHERE):
        raise InputError(f"engine {name!r}: choose one of {', '.join((*others, *ENGINES, *ELSEWHERE))}")
    if name not in ELSEWHERE:
        if at is not None:
            raise InputError(f"--at {at}: only the engine milvus has an address; add --engine milvus")
        return
    if at is None:
        raise InputError("engine milvus: where is it? Give --at http://HOST:19530, or the path of a file ending in .db")
    if dtype != "float32":
        raise InputError(f"dtype {dtype!r}: Milvus keeps vectors in float32")


def engine_for(documents: int) -> str:
    """Name the engine for so many documents: flat, which is exact, as long as that is fast."""
    return "flat" if documents <= FLAT_IS_FAST else "tree"


def new_engine(
    name: str,
    dim: int,
    *,
    numbers: np.ndarray,
    vectors: np.ndarray,
    dtype: str = "float32",
    hierarchy: Hierarchy | None = None,
) -> Engine:
    """Build an engine of all these vectors; none is fine too.

    Args:
        name: one of `ENGINES`.
        dim: the length n of a vector.
        numbers: of shape (N,), int64, rising.
        vectors: unit rows of shape (N, n), float32, a memory map included.
        dtype: "float32"; "float16" and "int8" take a half and a quarter of the space, and lose a little.
        hierarchy: the trained tree of these vectors, whose document i is row i. `tree` searches by it, and grows
            one of its own where none is given; flat has no use for it.

    Raises:
        InputError: an engine or a dtype that does not exist.
    """
    codec_of(dtype)
    engine: Engine = _class_of(name).build(dim, numbers, vectors, dtype, hierarchy)
    return engine


def load_engine(name: str, folder: str | Path, dim: int) -> Engine:
    """Read what `Engine.save` wrote.

    Raises:
        InputError: there is no such engine.
        FormatError: the files are damaged or of another shape; build the engine anew.
    """
    engine: Engine = _class_of(name).load(Path(folder), dim)
    return engine


def _class_of(name: str) -> Any:
    if name not in ENGINES:
        raise InputError(f"engine {name!r}: choose one of {', '.join(ENGINES)}")
    module, class_name = ENGINES[name]
    return getattr(import_module(module), class_name)


# ----------------------------------------------------------------------------------------- how vectors are kept


def codec_of(dtype: str) -> str:
    """Return the name that faiss has for a kind of number.

    Raises:
        InputError: there is no such kind.
    """
    if dtype not in CODECS:
        raise InputError(f"dtype {dtype!r}: choose one of {', '.join(CODECS)}")
    return CODECS[dtype]


def range_sample(vectors: np.ndarray, dim: int) -> np.ndarray:
    """Make rows that span what later rows may hold: a quarter more than those seen, or −1 … 1 where few are seen."""
    ends = np.ones((1, dim), np.float32)
    if len(vectors) < FEW:
        return np.concatenate([ends, -ends])
    # From all over, in memory. In blocks: of a mapped file, the system maps many pages around each row that is read.
    starts = np.arange(0, len(vectors), max(BLOCK, len(vectors) * BLOCK // SAMPLE))
    sample = np.concatenate([np.asarray(vectors[start : start + BLOCK], dtype=np.float32) for start in starts])
    low, high = sample.min(axis=0, keepdims=True), sample.max(axis=0, keepdims=True)
    return np.concatenate([low - (high - low) / 8, high + (high - low) / 8])


def code_ranges(index: faiss.Index) -> np.ndarray:
    """Return the ranges that an index's codes are made for, float32; none where codes need none."""
    return faiss.vector_to_array(index.sq.trained) if hasattr(index, "sq") else np.empty(0, np.float32)


def set_code_ranges(index: faiss.Index, ranges: np.ndarray) -> None:
    """Have an index without vectors make codes for the ranges that `code_ranges` returned.

    Raises:
        ValueError: they are not the ranges of such an index.
    """
    has_ranges = hasattr(index, "sq") and index.sq.qtype == faiss.ScalarQuantizer.QT_8bit
    right = ranges.dtype == np.float32 and ranges.shape == (2 * index.d if has_ranges else 0,)
    require_sound(right and bool(np.isfinite(ranges).all()), "codes of another range")
    if has_ranges:
        faiss.copy_array_to_vector(np.ascontiguousarray(ranges), index.sq.trained)
    index.is_trained = True


# ----------------------------------------------------------------------------------------- on disk


class EngineFiles(NamedTuple):
    """What an engine is saved as, by name.

    Attributes:
        codes: vectors as an engine keeps them, of shape (N, bytes of one), uint8; each in a file of its own, and mapped
            into memory when read. To be written, they may come in blocks of rows.
        arrays: all that is small.
    """

    codes: dict[str, np.ndarray | list[np.ndarray]]
    arrays: dict[str, np.ndarray]


def write_files(folder: Path, files: EngineFiles) -> None:
    """Write an engine into an existing folder."""
    for name, codes in files.codes.items():
        _write_codes(folder / f"{name}.npy", [codes] if isinstance(codes, np.ndarray) else codes)
    save_file({name: np.ascontiguousarray(array) for name, array in files.arrays.items()}, folder / ARRAYS)
    write_checksums(folder, [ARRAYS, *(f"{name}.npy" for name in files.codes)])


def read_files(folder: Path, names: Iterable[str] = ()) -> EngineFiles:
    """Read what `write_files` wrote, with the codes of these names; call it within `as_format_error`.

    Raises:
        ValueError: a file has changed, or is not what it has to be.
    """
    damaged = damage_in(folder)
    require_sound(damaged is not None, "it has no checksums")
    require_sound(not damaged, "; ".join(damaged or []))
    codes: dict[str, np.ndarray | list[np.ndarray]] = {}
    for name in names:
        codes[name] = rows = np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        require_sound(
            rows.dtype == np.uint8 and rows.ndim == 2 and rows.flags.c_contiguous, f"{name} has no rows of codes"
        )
    return EngineFiles(codes, load_file(folder / ARRAYS))


def dtype_of(codes: np.ndarray, dim: int) -> str:
    """Tell what codes, of shape (N, bytes of one), keep vectors of a length in; call it within `as_format_error`.

    Raises:
        ValueError: they are of another length.
    """
    width = codes.shape[1]
    widths = {4 * dim: "float32", 2 * dim: "float16", dim: "int8"}
    require_sound(width in widths, f"vectors of {width} bytes are not of length {dim}")
    return widths[width]


def checked_numbers(array: np.ndarray, name: str) -> np.ndarray:
    """Return an array that was read if it holds distinct numbers; call it within `as_format_error`.

    Raises:
        ValueError: a number is there twice, or is below 0.
    """
    require_sound(array.dtype == np.int64 and array.ndim == 1, f"{name} is no row of numbers")
    require_sound(
        bool((array >= 0).all()) and len(np.unique(array)) == len(array), f"{name} has a number twice, or below 0"
    )
    return array


def _write_codes(path: Path, blocks: list[np.ndarray]) -> None:
    """Write blocks of rows as one array, block by block, so that no copy of them all is made."""
    rows, width = sum(map(len, blocks)), blocks[0].shape[1]
    with path.open("wb") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": (rows, width)}
        np.lib.format.write_array_header_1_0(file, header)
        for block in blocks:
            file.write(np.ascontiguousarray(block).data)


@contextmanager
def as_format_error(folder: Path) -> Iterator[None]:
    """Turn whatever a damaged file makes its reader raise into one sentence.

    Raises:
        FormatError: something went wrong inside.
    """
    try:
        yield
    except Exception as error:
        raise FormatError(
            f"{folder}: the search engine is damaged ({one_line(error)}); it has to be rebuilt"
        ) from error


def require_sound(condition: bool, complaint: str) -> None:
    """Refuse files that do not fit together; call it within `as_format_error`.

    Raises:
        ValueError: the condition does not hold.
    """
    if not condition:
        raise ValueError(complaint)
