"""The vectors of a corpus, encoded once, in memory or in a crash-safe file.

One process encodes, or several do together. A folder holds `vectors.npy` and `manifest.json`, which lists the finished
blocks of rows and their checksums. From the first damaged block on, rows are encoded again. A run continues another
run's work only if their identities (encoder, corpus and chunk size) are equal.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch

from hce.data.corpus import Corpus
from hce.encoding.encoder import Encoder, OnTokens
from hce.errors import InputError
from hce.files import delete_whole, make_folder, other_identity, read_json, sync_folder, write_json, write_to_be_mapped
from hce.processes import gather, is_first_process, own_rows, process_count, process_rank, wait_for_all
from hce.progress import progress_bar

logger = logging.getLogger(__name__)

FORMAT = 1
ROWS_AT_ONCE = 4096
TEXTS_AT_ONCE = 16_384
# Rows in a transformer's chunk. A kill loses a chunk: half a minute's work on a CPU. Texts are sorted by length within
# a chunk, so smaller chunks need more padding: 512 cost 1.5 to 4 % more tokens than 4,096, and 256 cost 3 to 8 %.
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
    """Encode all documents to unit rows of shape (N, n), float32.

    If several processes call this, each encodes a part. `on_tokens` gets the tokens of texts that this call encodes.

    With a folder, which all processes share, the vectors are memory-mapped from there; changes to rows stay in memory.
    After a kill, the next call continues with any number of processes, and writes the same bytes. A process writes
    `chunk_size` rows at a time: by default 4,096 with a table, 512 with a transformer.

    Fail with InputError if the folder cannot be written, or holds other files. If it holds vectors of another encoder,
    corpus or chunk size, `replace` deletes them; without `replace`, fail with InputError.
    """
    encode = encoder.encode if on_tokens is None else partial(encoder.encode, on_tokens=on_tokens)
    show = progress if is_first_process() else False
    if folder is None:
        own = partial(encode_among_processes, at_once=TEXTS_AT_ONCE if encoder.is_table else FEW_AT_ONCE)
        return own(corpus, lambda _, texts: encode(texts), encoder.dim, encoder.device, progress=show)
    chunk_size = chunk_size or (ROWS_AT_ONCE if encoder.is_table else FEW_AT_ONCE)
    identity = {"encoder": encoder.fingerprint, "corpus": corpus.fingerprint, "chunk_size": chunk_size}
    file = VectorFile(folder, len(corpus), encoder.dim, identity)
    try:
        file.start(replace=replace)
        if file.done < len(corpus):
            _encode_to_file(encode, corpus, file, chunk_size, show)
    except OSError as error:
        raise InputError(f"{folder}: the vectors cannot be written ({error.strerror}); free some space") from error
    return np.load(file.path, mmap_mode="c", allow_pickle=False)


def _encode_to_file(
    encode: Callable[[list[str]], np.ndarray], corpus: Corpus, file: VectorFile, chunk_size: int, show: bool | None
) -> None:
    """Encode in rounds: each process writes a chunk; the first process records all."""
    with progress_bar("encoding", len(corpus), "documents", show=show) as advance:
        advance(file.done)
        for start in range(file.done, len(corpus), chunk_size * process_count()):
            mine = start + chunk_size * process_rank()
            file.write(mine, encode([document.full_text for document in corpus[mine : mine + chunk_size]]))
            wait_for_all()
            safe = min(start + chunk_size * process_count(), len(corpus))
            advance(safe - file.done)
            file.acknowledge(safe)
    wait_for_all()


def encode_among_processes(
    corpus: Corpus,
    encode: Callable[[np.ndarray, list[str]], np.ndarray],
    dim: int,
    device: torch.device,
    *,
    at_once: int = TEXTS_AT_ONCE,
    progress: bool | None = False,
) -> np.ndarray:
    """Encode this process's part of the documents, and gather all parts.

    `encode` turns positions and their texts into rows of shape (texts, dim); processes exchange rows on the device.
    """
    padded = -(-len(corpus) // process_count()) * process_count()
    rows = np.minimum(np.arange(padded)[own_rows(padded)], len(corpus) - 1)  # repeat the last document, for equal parts
    vectors = np.empty((len(rows), dim), dtype=np.float32)
    with progress_bar("encoding", len(rows), "documents", show=progress) as advance:
        for start in range(0, len(rows), at_once):
            block = rows[start : start + at_once]
            vectors[start : start + len(block)] = encode(block, [corpus[row].full_text for row in block.tolist()])
            advance(len(block))
    if process_count() == 1:
        return vectors
    return gather(torch.from_numpy(vectors).to(device)).cpu().numpy()[: len(corpus)]


class Block(NamedTuple):
    """Rows that were written together: the position after them, and their checksum."""

    stop: int
    checksum: int


class VectorFile:
    """A float32 array of shape (rows, n) that is written once and then only read."""

    def __init__(self, folder: str | Path, rows: int, dim: int, identity: dict[str, Any]) -> None:
        self.folder = Path(folder)
        self.path = self.folder / "vectors.npy"
        self.rows, self.dim = rows, dim
        self.identity = {"format": FORMAT, "rows": rows, "dim": dim, "dtype": "float32", **identity}
        self._blocks: list[Block] = []
        header = BytesIO()
        shape = {"descr": "<f4", "fortran_order": False, "shape": (rows, dim)}
        np.lib.format.write_array_header_1_0(header, shape)
        self._header = header.getvalue()

    @property
    def done(self) -> int:
        """How many rows, from the first on, are safe on disk."""
        return self._blocks[-1].stop if self._blocks else 0

    def start(self, *, replace: bool = False) -> None:
        """Begin a run, or continue one of the same identity, in all processes.

        InputError if the folder has other files, or vectors of another identity; `replace` deletes those vectors.
        """
        manifest = self.folder / "manifest.json"
        state = read_json(manifest) if manifest.is_file() else {}
        other = other_identity(self.identity, state) if state else None
        if other is None and not state and self.folder.is_dir():
            if any(not path.name.startswith(".") for path in self.folder.iterdir()):
                raise InputError(f"{self.folder} holds other files: choose an empty or new folder for the vectors")
        elif other is not None and not replace:
            raise InputError(
                f"{self.folder} holds vectors with {other} {state.get(other)!r}, not {self.identity[other]!r}; "
                "choose another folder, or delete it to encode again"
            )
        if not other:
            known = state.get("blocks", [])
            try:
                self._blocks += self._sound(known)
            except (OSError, TypeError, ValueError):
                self._blocks = []
            if len(self._blocks) != len(known) and is_first_process():
                message = "%s: vectors after row %s were damaged, and are encoded again"
                logger.warning(message, self.folder, f"{self.done:,}")
        wait_for_all()  # every process reads the folder before the first one writes
        if is_first_process():
            if other:
                delete_whole(self.folder)
            if self.done < self.rows or not self.path.is_file():
                self._begin()
        wait_for_all()

    def _sound(self, known: list[Any]) -> Iterator[Block]:
        """Yield the blocks of a manifest up to the first damaged one."""
        if not known or not self.path.is_file():
            return
        with self.path.open("rb") as file:
            size, start, is_sound = self.path.stat().st_size, 0, file.read(len(self._header)) == self._header
            for block in (Block(*map(int, each)) for each in known):
                is_sound = is_sound and start < block.stop <= self.rows and size >= self._size(block.stop)
                if not is_sound or block.checksum != self._checksum(file, start, block.stop):
                    return
                yield block
                start = block.stop

    def _begin(self) -> None:
        """Write the manifest and the header, and drop rows that are not safe."""
        make_folder(self.folder)
        self._save_manifest()
        with self.path.open("ab") as file:
            file.truncate(self._size(self.done) if self.done else 0)
            if not self.done:
                file.write(self._header)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self.folder)

    def write(self, start: int, chunk: np.ndarray) -> None:
        """Write rows from `start` on; when this returns, they survive a crash."""
        if not len(chunk):
            return
        # Plain writes, not a writable memory map: a full disk is then an error, not a bus error.
        with self.path.open("r+b") as file:
            file.seek(self._size(start))
            write_to_be_mapped(file, np.asarray(chunk, dtype="<f4"))
            file.flush()
            os.fsync(file.fileno())

    def acknowledge(self, done: int) -> None:
        """Record that all rows before `done` are written."""
        if not is_first_process():
            self._blocks.append(Block(done, 0))
            return
        with self.path.open("rb") as file:  # read back, since other processes wrote rows too
            self._blocks.append(Block(done, self._checksum(file, self.done, done)))
        self._save_manifest()

    def _save_manifest(self) -> None:
        write_json(self.folder / "manifest.json", {**self.identity, "done": self.done, "blocks": self._blocks})

    def _size(self, rows: int) -> int:
        return len(self._header) + rows * self.dim * 4

    def _checksum(self, file: IO[bytes], start: int, stop: int) -> int:
        value = 0
        file.seek(self._size(start))
        for row in range(start, stop, ROWS_AT_ONCE):
            value = zlib.crc32(file.read(self._size(min(row + ROWS_AT_ONCE, stop)) - self._size(row)), value)
        return value
