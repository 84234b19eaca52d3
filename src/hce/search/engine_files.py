"""Files of an engine: plain arrays with their checksums, checked before faiss gets them.

The readers of faiss trust what they read, so none of them is used.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike
from safetensors.numpy import load_file, save_file

from hce.contained import plain_path
from hce.errors import FormatError, one_line
from hce.files import damage_in, write_checksums

ARRAYS = "arrays.safetensors"


def write_arrays(folder: Path, arrays: dict[str, np.ndarray], *others: str) -> None:
    """Write small arrays, and checksums of their file and of others in the folder."""
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, folder / ARRAYS)
    write_checksums(folder, [ARRAYS, *others])


def read_arrays(folder: Path) -> dict[str, np.ndarray]:
    """Read what `write_arrays` wrote, once all checksums are right; call it within `as_format_error`.

    Raises:
        ValueError: a file has changed, or is missing.
    """
    damaged = damage_in(folder)
    require_sound(damaged is not None, "it has no checksums")
    require_sound(not damaged, "; ".join(damaged or []))
    return load_file(plain_path(folder / ARRAYS))


def mapped(path: Path, dtype: DTypeLike, *, scattered: bool = False) -> np.ndarray:
    """Map rows of a type into memory; call it within `as_format_error`.

    Args:
        path: of the file.
        dtype: the type.
        scattered: rows will be read here and there, so the system shall not read ahead.

    Raises:
        ValueError: the file holds something else, or less than it says.
    """
    rows: np.ndarray = np.load(plain_path(path), mmap_mode="r", allow_pickle=False)
    require_sound(rows.dtype == dtype and rows.ndim == 2 and rows.flags.c_contiguous, f"{path.name} has no such rows")
    if scattered and isinstance(rows.base, mmap.mmap) and hasattr(mmap, "MADV_RANDOM"):
        rows.base.madvise(mmap.MADV_RANDOM)
    return rows


def checked(
    array: np.ndarray,
    dtype: DTypeLike,
    shape: tuple[int | None, ...],
    least: float = -np.inf,
    most: float = np.inf,
) -> np.ndarray:
    """Return an array that was read if it has a type and a shape, and numbers within bounds; None is any length.

    Raises:
        ValueError: it is another one, or has NaN or infinity.
    """
    fits = len(shape) == array.ndim and all(w in (None, h) for w, h in zip(shape, array.shape, strict=True))
    require_sound(array.dtype == dtype and fits, f"an array of shape {array.shape} and {array.dtype}")
    within = np.isfinite(array) & (array >= least) & (array <= most)
    require_sound(bool(within.all()), "an array with a number out of bounds")
    return array


def checked_numbers(array: np.ndarray, name: str) -> np.ndarray:
    """Return an array that was read if it holds rising numbers; call it within `as_format_error`.

    Raises:
        ValueError: they do not rise, or one is below 0.
    """
    is_rising = bool((np.diff(checked(array, np.int64, (None,), 0)) > 0).all())
    require_sound(is_rising, f"{name} do not rise")
    return array


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
