"""Before training: the ranking by the encoder that training began with, to be shown beside the index's own.

The documents' vectors by that encoder are made in the background, once, and kept in one file in the index's folder,
which can be deleted at any time. Vectors are kept by the number of the document and the key of its content, so that
nothing is encoded twice, and no vector is taken for another text's where an older copy of the store is restored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from hce.checksums import keep_arrays, kept_arrays
from hce.errors import InputError
from hce.index.filters import Filter
from hce.index.index import Index
from hce.index.store import Moment, Reader, content_key
from hce.index.threads import Worker, reason_of

if TYPE_CHECKING:
    from hce.encoding.encoder import Encoder

UNTRAINED_FILE = "untrained.safetensors"
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


NOT_TRAINED = Readiness("off", reason="the index was not made from a model that `hce train` wrote")


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
        """Return number and score of the k best."""
        rows = self.order[:k]
        return list(zip(self.numbers[rows].tolist(), self.scores[rows].tolist(), strict=True))

    def ranks_of(self, numbers: np.ndarray) -> list[int | None]:
        """Return the rank of each document, counted from 1; None where it is not among them."""
        rank = np.empty(len(self.order) + 1, dtype=np.int64)
        rank[self.order] = np.arange(1, len(self.order) + 1)
        rows = np.searchsorted(self.numbers, numbers)
        present = np.isin(numbers, self.numbers)
        return [int(rank[row]) if is_there else None for row, is_there in zip(rows, present, strict=True)]


class Untrained:
    """The encoder that training began with, and its vectors of the documents; used from several threads."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.spec = index.state.manifest.base_encoder
        self._encoder: Encoder | None = None
        self._encoding = Lock()
        self._known: VectorsByNumber | None = None
        self._moment: Moment | None = None  # of the store, that these vectors are of
        self._readiness = NOT_TRAINED
        self._worker = Worker(self._catch_up_or_say_why, "untrained encoder")

    def start(self) -> None:
        """Begin to prepare in the background, where there is something to compare with."""
        if self.spec and self._worker.ident is None:  # else it was started before
            self._prepare()
            self._worker.start()

    def stop(self) -> None:
        """End the background work; what is encoded so far is kept."""
        self._worker.stop()

    def readiness(self) -> Readiness:
        """Return whether there is a ranking now; asking makes it catch up with what was added since."""
        if self.spec != self.index.state.manifest.base_encoder:  # the index was reindexed
            self._begin_anew()
        if self._readiness.state == "ready":
            with self.index.state.reading() as reader:
                is_behind = self._moment != reader.moment()
            if is_behind:
                self._prepare()
        return self._readiness

    def rank(self, query: str, conditions: Filter | None = None) -> Ranking:
        """Rank all documents (that fulfil the conditions) by the untrained encoder; only when ready."""
        known, encoder = self._known, self._encoder
        if known is None or encoder is None:
            raise RuntimeError("asked for a ranking before it was ready")
        with self._encoding:
            vector = encoder.encode([query], "query")[0]
        if conditions is not None:
            with self.index.state.reading() as reader:
                known = known.only(np.isin(known.numbers, reader.numbers_where(conditions)))
        scores = known.vectors @ vector
        return Ranking(known.numbers, scores, np.argsort(-scores, kind="stable"))

    def _begin_anew(self) -> None:
        """Have nothing of the encoder that was compared with, and prepare another one where there is one."""
        self.spec = self.index.state.manifest.base_encoder
        self._readiness = NOT_TRAINED
        self._known = self._moment = self._encoder = None
        if self._worker.ident is None:
            self.start()
        elif self.spec:
            self._prepare()

    def _prepare(self) -> None:
        self._readiness = Readiness("preparing", self.spec, total=len(self.index))
        self._worker.wake()

    # ------------------------------------------------------------------------------------------- in the background

    def _catch_up_or_say_why(self) -> None:
        try:
            self._catch_up()
        except Exception as error:
            reason = reason_of(error, "the untrained encoder's ranking could not be prepared")
            self._readiness = Readiness("off", self.spec, reason)

    def _catch_up(self) -> None:
        """Bring the vectors to the documents that there are now."""
        if len(self.index) > MOST_DOCUMENTS:
            reason = f"{len(self.index):,} documents are more than the {MOST_DOCUMENTS:,} that are compared"
            self._readiness = Readiness("off", self.spec, reason)
            return
        encoder = self._encoder = self._encoder or _load_local(str(self.spec))
        known = self._known or VectorsByNumber.read(self.index.path / UNTRAINED_FILE, encoder)
        with self.index.state.reading() as reader:
            known, total = _still_there(known, reader), reader.moment().documents
        blocks = [known, *self._fresh(known, total, encoder)]
        known = VectorsByNumber.joined(blocks)
        if len(blocks) > 1:
            known.write(self.index.path / UNTRAINED_FILE, encoder)
        if encoder is not self._encoder:  # begun anew meanwhile, with another one
            return
        if not self._worker.is_stopping():
            self._publish(known)

    def _fresh(self, known: VectorsByNumber, total: int, encoder: Encoder) -> Iterator[VectorsByNumber]:
        """Encode the documents that came after those known, a few at a time, to the last one or until it is stopped."""
        done, last = len(known.numbers), int(known.numbers.max(initial=0))
        while not self._worker.is_stopping():
            self._readiness = Readiness("preparing", self.spec, done=min(done, total), total=total)
            entries = list(islice(self.index.state.entries(after=last), DOCUMENTS_AT_ONCE))
            if not entries:
                return
            with self._encoding:
                vectors = encoder.encode([entry.document.full_text for entry in entries])
            numbers = np.array([entry.number for entry in entries], np.int64)
            contents = np.array([content_key(entry.document.full_text) for entry in entries], np.int64)
            yield VectorsByNumber(numbers, contents, vectors)
            done, last = done + len(entries), entries[-1].number

    def _publish(self, known: VectorsByNumber) -> None:
        """Rank by these vectors from now on, and go on where more documents came meanwhile."""
        with self.index.state.reading() as reader:
            moment = reader.moment()
            self._known, self._moment = _still_there(known, reader), moment
        if len(self._known.numbers) == moment.documents:
            self._readiness = Readiness("ready", self.spec, done=moment.documents, total=moment.documents)
        else:
            self._worker.wake()


class VectorsByNumber(NamedTuple):
    """Vectors of documents by one encoder, kept in one file.

    Attributes:
        numbers: of the documents, rising, of shape (N,), int64.
        contents: the keys of their contents (`content_key`), of shape (N,), int64.
        vectors: unit rows of shape (N, n), float32.
    """

    numbers: np.ndarray
    contents: np.ndarray
    vectors: np.ndarray

    @classmethod
    def read(cls, path: Path, encoder: Encoder) -> VectorsByNumber:
        """Read what `write` wrote, if this encoder made it; else there are no vectors yet."""
        kept = kept_arrays(path, cls._fields)
        if kept is not None and kept.facts.get("encoder") == encoder.fingerprint:
            known = cls(*kept.arrays)
            count = len(known.numbers)
            if tuple(each.shape for each in known) == ((count,), (count,), (count, encoder.dim)):
                return known
        return cls(np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, encoder.dim), np.float32))

    @classmethod
    def joined(cls, blocks: Sequence[VectorsByNumber]) -> VectorsByNumber:
        """Put blocks together whose numbers follow one another."""
        if len(blocks) == 1:
            return blocks[0]
        return cls(*map(np.concatenate, zip(*blocks, strict=True)))

    def write(self, path: Path, encoder: Encoder) -> None:
        """Keep the vectors for the next server; where that is impossible, they are made anew then."""
        keep_arrays(path, self._asdict(), {"encoder": encoder.fingerprint})

    def only(self, kept: np.ndarray) -> VectorsByNumber:
        """Return the rows for which `kept` holds, of shape (N,), bool."""
        return self if kept.all() else VectorsByNumber(*(each[kept] for each in self))


def _load_local(spec: str) -> Encoder:
    """Load the encoder that an index names, from this machine alone: the index may come from a stranger.

    Raises:
        InputError: it is not on this machine.
    """
    from hce.encoding.encoder import Encoder  # with torch, which the server need not wait for

    try:
        return Encoder.load(spec, local=True)
    except InputError as error:
        raise InputError(
            f"{spec} is not on this machine, and is not fetched because an index names it; to compare with it, load it "
            f"once yourself: hce.Encoder.load({spec!r})"
        ) from error


def _still_there(known: VectorsByNumber, reader: Reader) -> VectorsByNumber:
    """Leave out vectors of what is not in the store, and of all that comes after a document that has none yet."""
    numbers, contents = reader.contents()
    there = set(zip(numbers.tolist(), contents.tolist(), strict=True))
    known = known.only(np.array([key in there for key in zip(*map(np.ndarray.tolist, known[:2]), strict=True)], bool))
    missing = np.setdiff1d(numbers, known.numbers)
    return known.only(known.numbers < missing[0]) if len(missing) else known
