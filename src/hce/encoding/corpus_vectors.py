"""The vectors of a corpus: encoded once, in memory or in a file that a crash cannot spoil, by one process or several.

A folder of vectors holds `vectors.partial` and `progress.json` while it grows; `vectors.npy` and, last,
`manifest.json` when it is whole. What the rows mean (which encoder, which corpus) is a small `identity` mapping that a
continued run must match. Each block of rows has a checksum: what was damaged since it was written is encoded anew.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch

from hce.data.corpus import Corpus
from hce.encoding.encoder import Encoder, OnTokens
from hce.errors import InputError
from hce.files import (
    delete_whole,
    make_folder,
    other_identity,
    read_json,
    sync_folder,
    write_json,
    write_to_be_mapped,
)
from hce.processes import gather_rows, is_first_process, own_rows, process_count, process_rank, wait_for_all
from hce.progress import progress_bar

logger = logging.getLogger(__name__)

FORMAT = 1
ROWS_AT_ONCE = 4096
TEXTS_AT_ONCE = 16_384
# By a transformer: half a minute on a CPU, which a kill loses, and for which a bar stands still. As texts are sorted by
# length, fewer would be padded more: 512 cost 1.5 to 4 % of the tokens of 4,096, and 256 3 to 8 %.
FEW_AT_ONCE = 512


def encode_corpus(
    encoder: Encoder,
    corpus: Corpus,
    folder: str | Path | None = None,
    *,
    chunk_size: int | None = None,
    replace: bool = False,
    progress: bool | None = False,
    on_tokens: OnTokens | None = None,
) -> np.ndarray:
    """Encode all documents, in order; processes that work together encode a part each.

    Args:
        encoder: what encodes.
        corpus: the documents.
        folder: keep the vectors there, where all processes must see them, and return them memory-mapped (changes stay
            in memory). Killed at any point, the next call goes on after the last finished round, by as many processes
            as there are then, and the file is byte for byte what an uninterrupted run of one process would have
            written. By default the vectors are held in memory.
        chunk_size: rows that a process writes at a time; by default 4,096, and 512 where a transformer encodes them.
        replace: delete vectors of another encoder or corpus that the folder holds, where they would be refused.
        progress: show a bar; None: within `hce.progress.bars_shown`.
        on_tokens: told of the tokens of what is encoded now, see `Encoder.encode`.

    Returns:
        Unit rows of shape (N, n), float32.

    Raises:
        InputError: the folder holds vectors of another encoder or corpus, or other files, or cannot be written.
    """
    encode = encoder.encode if on_tokens is None else partial(encoder.encode, on_tokens=on_tokens)
    if folder is None:
        show = progress if is_first_process() else False
        own = partial(encode_among_processes, at_once=TEXTS_AT_ONCE if encoder.is_table else FEW_AT_ONCE)
        return own(corpus, lambda _, texts: encode(texts), encoder.dim, encoder.device, progress=show)
    if chunk_size is None:
        chunk_size = ROWS_AT_ONCE if encoder.is_table else FEW_AT_ONCE
    identity = {"encoder": encoder.fingerprint, "corpus": corpus.fingerprint, "chunk_size": chunk_size}
    file = VectorFile(folder, len(corpus), encoder.dim, identity)
    try:
        if replace:
            file.delete_other()
        if not file.is_complete():
            _encode_to_file(encode, corpus, file, chunk_size, progress and is_first_process())
    except OSError as error:
        raise InputError(f"{folder}: the vectors cannot be written ({error.strerror}); free some space") from error
    return file.open()


def _encode_to_file(
    encode: Callable[[list[str]], np.ndarray],
    corpus: Corpus,
    file: VectorFile,
    chunk_size: int,
    progress: bool | None,
) -> None:
    """Encode in rounds: each process a chunk, then the first one notes that all of the round are safe."""
    file.start()
    with progress_bar("encoding", len(corpus), "documents", show=progress) as advance:
        advance(file.done)
        for start in range(file.done, len(corpus), chunk_size * process_count()):
            mine = start + chunk_size * process_rank()
            file.write(mine, encode([document.full_text for document in corpus[mine : mine + chunk_size]]))
            wait_for_all()
            safe = min(start + chunk_size * process_count(), len(corpus))
            advance(safe - file.done)
            file.acknowledge(safe)
    file.finish()


def encode_among_processes(
    corpus: Corpus,
    encode: Callable[[np.ndarray, list[str]], np.ndarray],
    dim: int,
    device: torch.device,
    *,
    at_once: int = TEXTS_AT_ONCE,
    progress: bool | None = False,
) -> np.ndarray:
    """Encode this process's part of the documents to memory, and gather those of all; all parts are of one size.

    Args:
        corpus: the documents.
        encode: turns positions and the texts that stand there into rows of shape (texts, n).
        dim: n.
        device: by which processes exchange rows.
        at_once: how many texts are encoded together.
        progress: as in `encode_corpus`.
    """
    padded = -(-len(corpus) // process_count()) * process_count()
    rows = np.minimum(np.arange(padded)[own_rows(padded)], len(corpus) - 1)  # the last one fills the last part up
    vectors = np.empty((len(rows), dim), dtype=np.float32)
    with progress_bar("encoding", len(rows), "documents", show=progress) as advance:
        for start in range(0, len(rows), at_once):
            block = rows[start : start + at_once]
            vectors[start : start + len(block)] = encode(block, [corpus[row].full_text for row in block.tolist()])
            advance(len(block))
    return vectors if process_count() == 1 else gather_rows(vectors, device)[: len(corpus)]


class Block(NamedTuple):
    """Rows that were written together: up to which row, and their checksum."""

    stop: int
    checksum: int


class VectorFile:
    """A float32 array of shape (rows, n) that is written once and then only read."""

    def __init__(self, folder: str | Path, rows: int, dim: int, identity: dict[str, Any]) -> None:
        self.folder = Path(folder)
        self.rows, self.dim = rows, dim
        self.identity = {"format": FORMAT, "rows": rows, "dim": dim, "dtype": "float32", **identity}
        self._blocks: list[Block] = []

    @property
    def done(self) -> int:
        """How many rows are safe on disk, from the first on."""
        return self._blocks[-1].stop if self._blocks else 0

    def delete_other(self) -> None:
        """Delete what the folder holds of another identity, unfinished or not; all processes call it."""
        told = [self.folder / "manifest.json", self.folder / "progress.json"]
        if is_first_process() and any(
            path.is_file() and other_identity(self.identity, read_json(path)) is not None for path in told
        ):
            delete_whole(self.folder)
        wait_for_all()

    def is_complete(self) -> bool:
        """Tell whether the array is whole, as it was written, and of this identity; all processes call it.

        Raises:
            InputError: the folder holds vectors of another identity.
        """
        manifest = self.folder / "manifest.json"
        if not manifest.is_file():
            return False
        state = read_json(manifest)
        self._require_same(state)
        self._blocks = self._sound_blocks(self._final, state, self.rows)
        if self.done == self.rows:
            return True
        wait_for_all()  # each has looked before the first one writes
        if is_first_process():
            self._save_progress()
            manifest.unlink()
        wait_for_all()
        return False

    def start(self) -> None:
        """Begin, or take up where an earlier run of the same identity stopped; all processes call it.

        Raises:
            InputError: the folder holds something else.
        """
        progress = self.folder / "progress.json"
        if progress.is_file():
            state = read_json(progress)
            self._require_same(state)
        elif self.folder.is_dir() and any(not path.name.startswith(".") for path in self.folder.iterdir()):
            raise InputError(f"{self.folder} holds other files: choose an empty or new folder for the vectors")
        else:
            state = {}
        whole = self._final.is_file()  # stopped between the last rename and the manifest, or damaged later
        claimed = state.get("done", 0)
        self._blocks = self._sound_blocks(self._final if whole else self._partial, state, claimed)
        wait_for_all()  # each has looked before the first one writes
        if is_first_process() and (not whole or self.done < self.rows):
            make_folder(self.folder)
            if whole:
                self._final.replace(self._partial)
            self._save_progress()
            with self._partial.open("ab") as file:
                file.truncate(self._size(self.done) if self.done else 0)  # drop rows that were not acknowledged
                if not self.done:
                    file.write(self._header())
        wait_for_all()

    def write(self, start: int, chunk: np.ndarray) -> None:
        """Write rows from `start` on; when this returns, they survive a crash."""
        if not len(chunk):
            return
        # Plain writes and not a writable memory map: a full disk is then an error, and not a bus error.
        with self._partial.open("r+b") as file:
            file.seek(self._size(start))
            write_to_be_mapped(file, np.asarray(chunk, dtype="<f4"))
            file.flush()
            os.fsync(file.fileno())

    def acknowledge(self, done: int) -> None:
        """Note that all rows up to `done` are written; a run that is continued begins there."""
        if not is_first_process():
            self._blocks.append(Block(done, 0))
            return
        with self._partial.open("rb") as file:  # in which other processes have written too
            self._blocks.append(Block(done, self._checksum(file, self.done, done)))
        self._save_progress()

    def finish(self) -> None:
        """Give the file its final name; the manifest comes last and means "complete"."""
        if is_first_process():
            if self._partial.is_file():
                self._partial.replace(self._final)
                sync_folder(self.folder)
            write_json(self.folder / "manifest.json", {**self.identity, "blocks": self._blocks})
            (self.folder / "progress.json").unlink(missing_ok=True)
        wait_for_all()

    def open(self) -> np.ndarray:
        """Map the whole array into memory; what is changed in it stays there."""
        return np.load(self._final, mmap_mode="c", allow_pickle=False)

    @property
    def _partial(self) -> Path:
        return self.folder / "vectors.partial"

    @property
    def _final(self) -> Path:
        return self.folder / "vectors.npy"

    def _header(self) -> bytes:
        buffer = BytesIO()
        shape = {"descr": "<f4", "fortran_order": False, "shape": (self.rows, self.dim)}
        np.lib.format.write_array_header_1_0(buffer, shape)
        return buffer.getvalue()

    def _size(self, rows: int) -> int:
        return len(self._header()) + rows * self.dim * 4

    def _save_progress(self) -> None:
        write_json(self.folder / "progress.json", {**self.identity, "done": self.done, "blocks": self._blocks})

    def _sound_blocks(self, path: Path, state: dict[str, Any], claimed: Any) -> list[Block]:
        """Read the blocks through that are said to be in a file, up to the first that is not as it was written.

        Args:
            path: the file.
            state: what is said of it; an earlier version said nothing of blocks, and its rows are taken as they are.
            claimed: how many rows are said to be done.
        """
        try:
            known = [Block(*map(int, each)) for each in state.get("blocks", [(claimed, -1)])]
            sound = self._read_through(path, known)
        except (OSError, TypeError, ValueError):
            sound = []
        done = sound[-1].stop if sound else 0
        if claimed and done != claimed and is_first_process():
            logger.warning("%s: vectors after row %s were damaged, and are encoded anew", self.folder, f"{done:,}")
        return sound

    def _read_through(self, path: Path, known: list[Block]) -> list[Block]:
        sound: list[Block] = []
        if not known or not path.is_file():
            return sound
        with path.open("rb") as file:
            if file.read(len(self._header())) != self._header():
                return sound
            for block in known:
                start = sound[-1].stop if sound else 0
                if not start < block.stop <= self.rows or path.stat().st_size < self._size(block.stop):
                    break
                found = self._checksum(file, start, block.stop)
                if block.checksum not in (found, -1):
                    break
                sound.append(Block(block.stop, found))
        return sound

    def _checksum(self, file: IO[bytes], start: int, stop: int) -> int:
        """Return the checksum of rows of a file."""
        value = 0
        file.seek(self._size(start))
        for row in range(start, stop, ROWS_AT_ONCE):
            value = zlib.crc32(file.read(self._size(min(row + ROWS_AT_ONCE, stop)) - self._size(row)), value)
        return value

    def _require_same(self, found: dict[str, Any]) -> None:
        name = other_identity(self.identity, found)
        if name is not None:
            raise InputError(
                f"{self.folder} holds vectors with {name} {found.get(name)!r}, not {self.identity[name]!r}; "
                "choose another folder, or delete it to encode anew"
            )
