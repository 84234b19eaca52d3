"""Vectors on disk: one .npy file that grows chunk by chunk, can be continued after a crash, and is complete or absent.

In a folder: `vectors.partial` and `progress.json` while it grows; `vectors.npy` and, last, `manifest.json` when done.
What the rows mean (which encoder, which corpus) is a small `identity` mapping that a continued run must match.
"""

from __future__ import annotations

import json
import os
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from hce.atomic import sync_folder, write_json
from hce.errors import InputError

FORMAT = 1


class VectorFile:
    """A float32 array of shape (rows, n) that is written once, front to back, and then only read.

    Attributes:
        done: how many rows are safe on disk.
    """

    def __init__(self, folder: str | Path, rows: int, dim: int, identity: dict[str, Any]) -> None:
        self.folder = Path(folder)
        self.rows, self.dim = rows, dim
        self.identity = {"format": FORMAT, "rows": rows, "dim": dim, "dtype": "float32", **identity}
        self.done = 0

    @property
    def is_complete(self) -> bool:
        """Whether the array is whole and of this identity.

        Raises:
            InputError: the folder holds vectors of another identity.
        """
        manifest = self.folder / "manifest.json"
        if not manifest.is_file():
            return False
        self._require_same(json.loads(manifest.read_text()))
        return True

    def start(self) -> None:
        """Begin, or take up where an earlier run of the same identity stopped.

        Raises:
            InputError: the folder holds something else.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        progress = self.folder / "progress.json"
        if progress.is_file():
            state = json.loads(progress.read_text())
            self.done = state.pop("done")
            self._require_same(state)
        elif any(not path.name.startswith(".") for path in self.folder.iterdir()):
            raise InputError(f"{self.folder} holds other files: choose an empty or new folder for the vectors")
        if self._final.is_file():  # stopped between the last rename and the manifest
            return
        if not self._partial.is_file() or self._partial.stat().st_size < self._size(self.done):
            self.done = 0
        self._save_progress()
        with self._partial.open("ab") as file:
            file.truncate(self._size(self.done) if self.done else 0)  # drop a chunk that was not acknowledged
            if not self.done:
                file.write(self._header())

    def append(self, chunk: np.ndarray) -> None:
        """Write the next rows; when this returns, they survive a crash."""
        # Plain writes and not a writable memory map: a full disk is then an error, and not a bus error.
        with self._partial.open("ab") as file:
            file.write(np.ascontiguousarray(chunk, dtype="<f4").tobytes())
            file.flush()
            os.fsync(file.fileno())
        self.done += len(chunk)
        self._save_progress()

    def finish(self) -> None:
        """Give the file its final name; the manifest comes last and means "complete"."""
        if self._partial.is_file():
            self._partial.replace(self._final)
            sync_folder(self.folder)
        write_json(self.folder / "manifest.json", self.identity)
        (self.folder / "progress.json").unlink(missing_ok=True)

    def open(self) -> np.ndarray:
        """The whole array, memory-mapped and read-only."""
        return np.load(self._final, mmap_mode="r", allow_pickle=False)

    @property
    def _partial(self) -> Path:
        return self.folder / "vectors.partial"

    @property
    def _final(self) -> Path:
        return self.folder / "vectors.npy"

    def _header(self) -> bytes:
        return npy_header(self.rows, self.dim)

    def _size(self, rows: int) -> int:
        return len(self._header()) + rows * self.dim * 4

    def _save_progress(self) -> None:
        write_json(self.folder / "progress.json", {**self.identity, "done": self.done})

    def _require_same(self, found: dict[str, Any]) -> None:
        for key, wanted in self.identity.items():
            if found.get(key) != wanted:
                raise InputError(
                    f"{self.folder} holds vectors with {key} {found.get(key)!r}, not {wanted!r}; "
                    "choose another folder, or delete it to encode anew"
                )


def npy_header(rows: int, dim: int) -> bytes:
    """What stands before the numbers in a .npy file of float32 rows."""
    buffer = BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<f4", "fortran_order": False, "shape": (rows, dim)})
    return buffer.getvalue()
