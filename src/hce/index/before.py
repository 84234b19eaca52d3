"""Untrained: the ranking by the encoder that training began with, to be shown beside the index's own.

The documents' vectors by that encoder are made in the background, once, and kept in one file in the index's folder,
which can be deleted at any time. A document's number always means the same text, so vectors are kept by number and
nothing is ever encoded twice.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Literal, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from hce.encoding.encoder import Encoder
from hce.errors import HceError
from hce.files import open_atomically
from hce.index.filters import Filter
from hce.index.index import Index
from hce.index.store import Entry, Reader

logger = logging.getLogger(__name__)


FILE = "untrained.safetensors"
MOST_DOCUMENTS = 200_000
DOCUMENTS_AT_ONCE = 64  # a query waits for no more than these


@dataclass(frozen=True)
class Readiness:
    """Whether there is a ranking to compare with.

    Attributes:
        state: ready; preparing (`done` of `total` documents are encoded); or off, and `reason` says why.
        encoder: the untrained encoder's name.
    """

    state: Literal["off", "preparing", "ready"]
    encoder: str | None = None
    reason: str = ""
    done: int = 0
    total: int = 0


class KnownVectors(NamedTuple):
    """Vectors by the untrained encoder.

    Attributes:
        change: the moment of the store that they are of; −1 for none.
        numbers: of the documents, rising, of shape (N,).
        vectors: unit rows of shape (N, n).
    """

    change: int
    numbers: np.ndarray
    vectors: np.ndarray


class Ranking(NamedTuple):
    """All documents in the order of a query.

    Attributes:
        numbers: of the documents, rising, of shape (N,).
        scores: their cosines, of shape (N,).
        order: rows of these, best first, of shape (N,).
    """

    numbers: np.ndarray
    scores: np.ndarray
    order: np.ndarray

    def first(self, k: int) -> list[tuple[int, float]]:
        """Number and score of the k best."""
        rows = self.order[:k]
        return list(zip(self.numbers[rows].tolist(), self.scores[rows].tolist(), strict=True))

    def ranks_of(self, numbers: np.ndarray) -> list[int | None]:
        """The rank of each document, counted from 1; None where it is not among them."""
        rank = np.empty(len(self.order) + 1, dtype=np.int64)
        rank[self.order] = np.arange(1, len(self.order) + 1)
        rows = np.searchsorted(self.numbers, numbers)
        present = np.isin(numbers, self.numbers)
        return [int(rank[row]) if is_there else None for row, is_there in zip(rows, present, strict=True)]


class Untrained:
    """The encoder that training began with, and its vectors of the documents."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.spec = index.manifest.base_encoder
        self.name = display_name(self.spec) if self.spec else None
        self._encoder: Encoder | None = None
        self._encoding = Lock()
        self._rows: KnownVectors | None = None
        self._readiness = Readiness("off", reason="the index was not made from a model that `hce train` wrote")
        self._work, self._stop = Event(), Event()
        self._thread: Thread | None = None

    def start(self) -> None:
        """Begin to prepare in the background, where there is something to compare with."""
        if self.spec and self._thread is None:
            self._readiness = Readiness("preparing", self.name, total=len(self.index))
            self._work.set()
            self._thread = Thread(target=self._serve, name="untrained encoder", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the background work; what is encoded so far is kept."""
        self._stop.set()
        self._work.set()
        if self._thread is not None:
            self._thread.join(timeout=30)

    def readiness(self) -> Readiness:
        """Whether there is a ranking now; asking makes it catch up with what was added since."""
        if self._readiness.state == "ready":
            with self.index.reading() as reader:
                change = reader.state().change
            if self._rows is None or self._rows.change != change:
                self._readiness = Readiness("preparing", self.name, total=len(self.index))
                self._work.set()
        return self._readiness

    def rank(self, query: str, conditions: Filter | None = None) -> Ranking:
        """All documents (that fulfil the conditions) in the untrained encoder's order; only when ready."""
        rows, encoder = self._rows, self._encoder
        if rows is None or encoder is None:
            raise RuntimeError("asked for a ranking before it was ready")
        with self._encoding:
            vector = encoder.encode([query], "query")[0]
        numbers, vectors = rows.numbers, rows.vectors
        if conditions is not None:
            with self.index.reading() as reader:
                kept = np.isin(numbers, reader.numbers_where(conditions))
            numbers, vectors = numbers[kept], vectors[kept]
        scores = vectors @ vector
        return Ranking(numbers, scores, np.argsort(-scores, kind="stable"))

    # ------------------------------------------------------------------------------------------- in the background

    def _serve(self) -> None:
        while True:
            self._work.wait()
            self._work.clear()
            if self._stop.is_set():
                return
            try:
                self._catch_up()
            except HceError as error:
                self._readiness = Readiness("off", self.name, str(error))
            except Exception:
                logger.exception("the untrained encoder's ranking is off")
                self._readiness = Readiness("off", self.name, "it could not be prepared; the server's log says why")

    def _catch_up(self) -> None:
        """Bring the vectors to the documents that there are now."""
        if len(self.index) > MOST_DOCUMENTS:
            reason = f"{len(self.index):,} documents are more than the {MOST_DOCUMENTS:,} that are compared"
            self._readiness = Readiness("off", self.name, reason)
            return
        if self._encoder is None:
            self._encoder = Encoder.load(str(self.spec))
        encoder = self._encoder
        known = self._rows or _read(self.index.path / FILE, encoder)
        with self.index.reading() as reader:
            known, total = _without_removed(known, reader), reader.state().documents
        parts, fresh = [known], 0
        while not self._stop.is_set():
            done = len(known.numbers) + fresh
            self._readiness = Readiness("preparing", self.name, done=min(done, total), total=total)
            entries = list(islice(self.index.entries(after=_last(parts)), DOCUMENTS_AT_ONCE))
            if not entries:
                break
            parts.append(self._encoded(entries, encoder))
            fresh += len(entries)
        self._publish(_joined(parts), keep=fresh > 0, encoder=encoder)

    def _encoded(self, entries: list[Entry], encoder: Encoder) -> KnownVectors:
        numbers = np.array([entry.number for entry in entries], dtype=np.int64)
        with self._encoding:
            return KnownVectors(-1, numbers, encoder.encode([entry.document.full_text for entry in entries]))

    def _publish(self, rows: KnownVectors, *, keep: bool, encoder: Encoder) -> None:
        if keep:
            _write(self.index.path / FILE, rows, encoder)
        if self._stop.is_set():
            return
        with self.index.reading() as reader:
            state = reader.state()
            rows = _without_removed(rows, reader)
        self._rows = rows._replace(change=state.change)
        if len(rows.numbers) == state.documents:
            self._readiness = Readiness("ready", self.name, done=state.documents, total=state.documents)
        else:  # more came meanwhile
            self._work.set()


def _without_removed(rows: KnownVectors, reader: Reader) -> KnownVectors:
    kept = ~np.isin(rows.numbers, reader.removed_since(0))
    return rows if kept.all() else rows._replace(numbers=rows.numbers[kept], vectors=rows.vectors[kept])


def _last(parts: list[KnownVectors]) -> int:
    return max((int(part.numbers[-1]) for part in parts if len(part.numbers)), default=0)


def _joined(parts: list[KnownVectors]) -> KnownVectors:
    if len(parts) == 1:
        return parts[0]
    return KnownVectors(-1, np.concatenate([p.numbers for p in parts]), np.concatenate([p.vectors for p in parts]))


def _read(path: Path, encoder: Encoder) -> KnownVectors:
    """The vectors that an earlier server kept, if this encoder made them; else none."""
    try:
        with safe_open(path, "numpy") as file:
            if (file.metadata() or {}).get("encoder") == encoder.fingerprint:
                return KnownVectors(-1, file.get_tensor("numbers"), file.get_tensor("vectors"))
    except (OSError, SafetensorError):
        pass
    return KnownVectors(-1, np.empty(0, dtype=np.int64), np.empty((0, encoder.dim), dtype=np.float32))


def _write(path: Path, rows: KnownVectors, encoder: Encoder) -> None:
    """Keep the vectors for the next server; where that is impossible, they are made anew then."""
    try:
        with open_atomically(path, "wb") as file:
            tensors = {"numbers": rows.numbers, "vectors": rows.vectors}
            file.write(save(tensors, {"encoder": encoder.fingerprint}))
    except (HceError, OSError) as error:
        logger.debug("the untrained encoder's vectors are not kept: %s", error)


def display_name(encoder: str) -> str:
    """An encoder's name without the folders above it, which are nobody else's business."""
    return Path(encoder).name if Path(encoder).is_absolute() else encoder
