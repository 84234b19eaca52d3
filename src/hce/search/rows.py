"""Rows: a large array on disk, mapped into memory, and behind it the rows added since."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

AT_ONCE = 65_536  # rows


class Rows:
    """Rows of one width and type: those of an array that is never changed, and more behind them.

    A file may be mapped twice. Where the system reads ahead of every row that is picked, a search of five million
    vectors reads 256 MB from a cold disk, else 2 MB. Reading all rows in order needs what it reads ahead.
    """

    def __init__(self, base: np.ndarray, scattered: np.ndarray | None = None) -> None:
        self._base = base
        self._scattered = base if scattered is None else scattered  # the same rows, to pick some of
        self._more = np.empty((0, base.shape[1]), base.dtype)  # with room for rows to come
        self._count = len(base)

    def __len__(self) -> int:
        return self._count

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows, and their width."""
        return self._count, self._base.shape[1]

    def append(self, rows: np.ndarray) -> None:
        """Add rows; the room for them is doubled whenever it is used up."""
        start = self._count - len(self._base)
        if start + len(rows) > len(self._more):
            room = np.empty((max(2 * len(self._more), start + len(rows)), self._base.shape[1]), self._base.dtype)
            room[:start] = self._more[:start]
            self._more = room
        self._more[start : start + len(rows)] = rows
        self._count += len(rows)

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        """Copy some rows, of shape (m,), int64."""
        if self._count == len(self._base):
            return np.asarray(self._scattered[rows])
        is_more = rows >= len(self._base)
        found = np.empty((len(rows), self._base.shape[1]), self._base.dtype)
        found[~is_more] = self._scattered[rows[~is_more]]
        found[is_more] = self._more[rows[is_more] - len(self._base)]
        return found

    def blocks(self, chosen: np.ndarray | None = None) -> Iterator[tuple[int, np.ndarray]]:
        """Yield rows block by block, with the place of each block's first row.

        Args:
            chosen: which rows, rising; they are copied, where all rows are not.
        """
        if chosen is not None:
            for start in range(0, len(chosen), AT_ONCE):
                yield start, self[chosen[start : start + AT_ONCE]]
            return
        for start, part in ((0, self._base), (len(self._base), self._more[: self._count - len(self._base)])):
            for first in range(0, len(part), AT_ONCE):
                yield start + first, np.asarray(part[first : first + AT_ONCE])

    def write(self, path: Path, chosen: np.ndarray | None = None) -> None:
        """Write some rows, or all, as an array into a file, without a copy of them all."""
        shape = (self._count if chosen is None else len(chosen), self._base.shape[1])
        with path.open("wb") as file:
            header = {"descr": self._base.dtype.str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for _, block in self.blocks(chosen):
                file.write(np.ascontiguousarray(block).data)
