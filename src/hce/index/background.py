"""Background work of a server: the ranking by the untrained encoder, and a map of the documents.

The server prepares the ranking when it starts, and draws the map when first asked. The ranking's vectors and the map
are cached in two files in the index's folder. These files can be deleted at any time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from hce.errors import HceError, InputError
from hce.files import checksum_of_arrays, is_file, keep_arrays, kept_arrays
from hce.index.filters import Filter
from hce.index.index import Index
from hce.index.tables import Moment, Reader
from hce.index.tree import LiveTree, NotThereError, NumberedHierarchy, Places, require_same_length
from hce.progress import check_deadline
from hce.search.fusion import places_of
from hce.tree.layout import Cells, cells, place_beside, place_documents, place_sites, site_level

if TYPE_CHECKING:
    from hce.encoding.encoder import Encoder

logger = logging.getLogger(__name__)

SECONDS_TO_STOP = 30.0


class Worker(Thread):
    """A thread that runs a function each time it is woken, until it is stopped."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._wanted, self._stopping = Event(), Event()

    def wake(self) -> None:
        """Run the work; if it is running, run it once more afterwards."""
        self._wanted.set()
        if self.ident is None:
            self.start()

    def stop(self) -> None:
        """Make the thread end, and wait for it."""
        self._stopping.set()
        self._wanted.set()
        if self.is_alive():
            self.join(SECONDS_TO_STOP)

    def is_stopping(self) -> bool:
        """Return whether the work should end early."""
        return self._stopping.is_set()

    def run(self) -> None:
        """Run the work after each wake-up."""
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self.is_stopping():
                return
            self._work()


def reason_of(error: Exception, what: str) -> str:
    """Return why background work failed, as a sentence; log the error if it is a bug."""
    if isinstance(error, HceError):
        return str(error)
    logger.error(what, exc_info=error)
    return f"{what}; the server's log says why"


# ------------------------------------------------------------------------------------------------- before training


UNTRAINED_FILE = "untrained.safetensors"
MOST_DOCUMENTS = 200_000
DOCUMENTS_AT_ONCE = 64  # encoded without a pause; a query waits until they are done


@dataclass(frozen=True)
class Readiness:
    """Whether the untrained `encoder` can rank: `done` of `total` documents are encoded, or `reason` says why not."""

    state: Literal["off", "preparing", "ready"]
    encoder: str | None = None
    reason: str = ""
    done: int = 0
    total: int = 0


NOT_TRAINED = Readiness("off", reason="the index was not made from a model that `hce train` wrote")


class Ranking(NamedTuple):
    """Documents ranked for a query: rising numbers (N,), their cosines, and the rows from best to worst."""

    numbers: np.ndarray
    scores: np.ndarray
    order: np.ndarray

    def first(self, k: int) -> list[tuple[int, float]]:
        """Return number and score of the k best documents."""
        rows = self.order[:k]
        return list(zip(self.numbers[rows].tolist(), self.scores[rows].tolist(), strict=True))

    def ranks_of(self, numbers: np.ndarray) -> list[int | None]:
        """Return the rank of each document, from 1; None for documents not ranked."""
        rank = np.empty(len(self.order), dtype=np.int64)
        rank[self.order] = np.arange(1, len(self.order) + 1)
        return [int(rank[row]) if row >= 0 else None for row in places_of(numbers, self.numbers).tolist()]


class VectorsByContent(NamedTuple):
    """Vectors of texts by one encoder, and the content keys of these texts."""

    contents: np.ndarray  # int64 hashes, (T,); not document numbers, which repeat once an older store is restored
    vectors: np.ndarray  # (T, n)

    @classmethod
    def read(cls, path: Path, encoder: Encoder) -> VectorsByContent:
        """Read this encoder's cached vectors; return empty arrays without a usable file."""
        arrays = kept_arrays(path, cls._fields, {"encoder": encoder.fingerprint})
        if arrays is not None:
            known = cls(*arrays)
            if (known.contents.shape, known.vectors.shape[1:]) == (known.vectors.shape[:1], (encoder.dim,)):
                return known
        return cls(np.empty(0, np.int64), np.empty((0, encoder.dim), np.float32))

    def write(self, path: Path, encoder: Encoder) -> None:
        """Cache the vectors for the next server, if possible."""
        keep_arrays(path, self._asdict(), {"encoder": encoder.fingerprint})


class _Prepared(NamedTuple):
    """The documents of a moment, and the row of each among an encoder's vectors: all that a ranking needs."""

    moment: Moment
    numbers: np.ndarray
    rows: np.ndarray
    known: VectorsByContent
    encoder: Encoder


class Untrained:
    """The encoder before training, and its vectors of the documents; thread-safe."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.spec = index.state.manifest.base_encoder
        self._encoder: Encoder | None = None
        self._encoding = Lock()
        self._prepared: _Prepared | None = None
        self._readiness = NOT_TRAINED
        self._worker = Worker(self._catch_up_or_say_why, "untrained encoder")

    def start(self) -> None:
        """Start preparing in the background, if the index names an untrained encoder."""
        if self.spec and self._worker.ident is None:  # not started yet
            self._prepare()

    def stop(self) -> None:
        """End the background work, and keep what is encoded so far."""
        self._worker.stop()

    def readiness(self) -> Readiness:
        """Return whether there is a ranking now; if documents changed, catch up."""
        if self.spec != self.index.state.manifest.base_encoder:  # the index was reindexed
            self.spec = self.index.state.manifest.base_encoder
            self._readiness, self._prepared, self._encoder = NOT_TRAINED, None, None
            if self.spec:
                self._prepare()
        if self._readiness.state == "ready" and self._prepared is not None:
            with self.index.state.reading() as reader:
                is_behind = self._prepared.moment != reader.moment()
            if is_behind:
                self._prepare()
        return self._readiness

    def rank(self, query: str, conditions: Filter | None = None) -> Ranking:
        """Rank, by the untrained encoder, all documents that match a filter."""
        prepared = self._prepared
        if prepared is None:
            raise RuntimeError("asked for a ranking before it was ready")
        with self._encoding:
            vector = prepared.encoder.encode([query], "query")[0]
        numbers, scores = prepared.numbers, (prepared.known.vectors @ vector)[prepared.rows]
        if conditions is not None:
            with self.index.state.reading() as reader:
                kept = np.isin(numbers, reader.numbers_where(conditions))
            numbers, scores = numbers[kept], scores[kept]
        return Ranking(numbers, scores, np.argsort(-scores, kind="stable"))

    def _prepare(self) -> None:
        self._readiness = Readiness("preparing", self.spec, total=len(self.index))
        self._worker.wake()

    def _catch_up_or_say_why(self) -> None:
        try:
            if len(self.index) > MOST_DOCUMENTS:
                raise InputError(
                    f"{len(self.index):,} documents are more than the {MOST_DOCUMENTS:,} that can be compared"
                )
            self._catch_up()
        except Exception as error:
            reason = reason_of(error, "the untrained encoder's ranking could not be prepared")
            self._readiness = Readiness("off", self.spec, reason)

    def _catch_up(self) -> None:
        """Encode texts without a vector until none is left, or the work is stopped."""
        path = self.index.path / UNTRAINED_FILE
        encoder = self._encoder = self._encoder or _load_local(str(self.spec))
        before = self._prepared
        known = before.known if before and before.encoder is encoder else VectorsByContent.read(path, encoder)
        while True:
            with self.index.state.reading() as reader:
                moment, (numbers, contents) = reader.moment(), reader.contents()
            is_used, is_missing = np.isin(known.contents, contents), ~np.isin(contents, known.contents)
            if not is_used.all():
                known = VectorsByContent(known.contents[is_used], known.vectors[is_used])
            if not is_missing.any():
                break
            missing = dict(zip(numbers[is_missing].tolist(), contents[is_missing].tolist(), strict=True))
            known = self._with_vectors_of(missing, known, encoder, len(numbers))
            known.write(path, encoder)
            if self._worker.is_stopping():
                return
        if encoder is self._encoder:  # no reindexing has replaced the encoder meanwhile
            self._prepared = _Prepared(moment, numbers, places_of(contents, known.contents), known, encoder)
            self._readiness = Readiness("ready", self.spec, done=len(numbers), total=len(numbers))

    def _with_vectors_of(
        self, contents: dict[int, int], known: VectorsByContent, encoder: Encoder, total: int
    ) -> VectorsByContent:
        """Add vectors of documents (number → content key) to `known`, a few at a time."""
        blocks, left = [known], list(contents)
        while left and not self._worker.is_stopping():
            self._readiness = Readiness("preparing", self.spec, done=max(0, total - len(left)), total=total)
            some, left = left[:DOCUMENTS_AT_ONCE], left[DOCUMENTS_AT_ONCE:]
            with self.index.state.reading() as reader:
                texts = {contents[number]: each.full_text for number, each in reader.documents(some).items()}
            with self._encoding:
                vectors = encoder.encode(list(texts.values()))
            blocks.append(VectorsByContent(np.array(list(texts), np.int64), vectors))
        keys, vectors = (np.concatenate(arrays) for arrays in zip(*blocks, strict=True))
        keys, first = np.unique(keys, return_index=True)  # several blocks may hold equal texts
        return VectorsByContent(keys, vectors[first])


def _load_local(spec: str) -> Encoder:
    """Load an encoder that an index, perhaps a stranger's, names; never download it."""
    from hce.encoding.encoder import Encoder  # here, so that the server starts before torch is imported

    try:
        return Encoder.load(spec, local=True)
    except InputError as error:
        raise InputError(
            f"{spec} is not on this machine, and hce does not download what an index names; to compare with it, "
            f"download it once yourself: hce.Encoder.load({spec!r})"
        ) from error


# ------------------------------------------------------------------------------------------------- the map


MAP_FILE = "map.safetensors"
MAP_ARRAYS = ("numbers", "places", "sites")
MAP_FORMAT = "1"
MOST_DRAWN = 200_000
MOST_OF_A_LEAF = 512  # a document that came after the tree is compared with at most this many in its leaf


def is_damaged_map(path: Path) -> bool:
    """Return whether the cached map exists and is damaged."""
    return is_file(path) and kept_arrays(path, MAP_ARRAYS) is None


@dataclass(frozen=True)
class MapReadiness:
    """Whether there is a map: `share` of the work is done, or `reason` says why there is no map."""

    state: Literal["off", "preparing", "ready"]
    share: float = 0.0
    reason: str = ""


class Drawn(NamedTuple):
    """Documents on the map: rising numbers (M,), places in the unit square (M, 2), nodes of the map's level (M,)."""

    numbers: np.ndarray
    places: np.ndarray
    nodes: np.ndarray


class _Sheet(NamedTuple):
    """The map of one tree: its documents' rising numbers (M,) and places (M, 2), and the nodes' places (S, 2)."""

    tree: NumberedHierarchy
    level: int  # the level whose nodes have cells on the map
    cells: Cells
    numbers: np.ndarray
    places: np.ndarray
    sites: np.ndarray

    def near(self, reader: Reader, vectors: np.ndarray, drawn: Drawn) -> np.ndarray:
        """Place each vector next to the nearest drawn documents in its walk's leaf."""
        hierarchy = self.tree.hierarchy
        leaves = hierarchy.walk(vectors)[-1][:, 0]
        result = self.sites[hierarchy.ancestors(hierarchy.depth - 1, leaves)[:, self.level]].astype(np.float32)
        for leaf in np.unique(leaves).tolist():
            check_deadline()
            members = self.tree.numbers[hierarchy.children(hierarchy.depth - 1, leaf)]
            there = np.flatnonzero(np.isin(drawn.numbers, members))[:MOST_OF_A_LEAF]
            if len(there):
                rows = np.flatnonzero(leaves == leaf)
                result[rows] = place_beside(vectors[rows], reader.vectors_at(drawn.numbers[there]), drawn.places[there])
        return result

    def draw(self, places: Places, reader: Reader, known: Drawn) -> Drawn:
        """Place the documents of a moment; those in `known` keep their places."""
        hierarchy = self.tree.hierarchy
        leaf = np.repeat(np.arange(len(places.leaf_start) - 1), np.diff(places.leaf_start))
        order = np.argsort(places.numbers)
        numbers, leaf = places.numbers[order], leaf[order]
        is_kept = np.isin(self.numbers, numbers)
        first = Drawn(self.numbers[is_kept], self.places[is_kept], np.empty(0, np.int64))
        later = np.setdiff1d(numbers, self.tree.numbers)[: max(0, MOST_DRAWN - len(first.numbers))]
        rows = places_of(later, known.numbers)
        is_known = rows >= 0  # placed already, before the last change
        known_places, fresh = known.places[rows[is_known]], later[~is_known]
        new_places = self.near(reader, reader.vectors_at(fresh), first) if len(fresh) else known_places[:0]
        all_numbers = np.concatenate([first.numbers, later[is_known], fresh])
        all_places = np.concatenate([first.places, known_places, new_places]).astype(np.float32)
        rising = np.argsort(all_numbers)
        all_numbers = all_numbers[rising]
        nodes = hierarchy.ancestors(hierarchy.depth - 1, leaf[np.searchsorted(numbers, all_numbers)])
        return Drawn(all_numbers, all_places[rising], nodes[:, self.level])


NOTHING_DRAWN = Drawn(np.empty(0, np.int64), np.empty((0, 2), np.float32), np.empty(0, np.int64))


class MapNow(NamedTuple):
    """The map, the tree and the documents, all of one moment."""

    sheet: _Sheet
    places: Places
    drawn: Drawn

    def places_of(self, reader: Reader, numbers: np.ndarray) -> np.ndarray:
        """Return the places of documents, drawn or not, of shape (B, 2)."""
        rows = places_of(numbers, self.drawn.numbers)
        is_drawn, result = rows >= 0, np.zeros((len(numbers), 2), np.float32)
        result[is_drawn] = self.drawn.places[rows[is_drawn]]
        if not is_drawn.all():
            result[~is_drawn] = self.sheet.near(reader, reader.vectors_at(numbers[~is_drawn]), self.drawn)
        return result

    def place_of_query(self, reader: Reader, vector: np.ndarray) -> np.ndarray:
        """Return a vector's place (2,); WriterBusyError if its length is not the tree's."""
        require_same_length(self.sheet.tree, len(vector))
        return np.asarray(self.sheet.near(reader, vector[None], self.drawn)[0])


class StoppedError(Exception):
    """The server is stopping, so the background work stops too."""


class DocumentMap:
    """A map of an index's tree, on which every document has a place; thread-safe.

    A map belongs to one tree. A document that came after the tree is put next to its nearest neighbors, in the leaf
    that a walk down the tree reaches. So nothing else moves.
    """

    def __init__(self, live: LiveTree) -> None:
        self.live = live
        self._lock = Lock()
        self._wanted: NumberedHierarchy | None = None  # the tree to draw: the last one that was asked for
        self._sheet: _Sheet | None = None
        self._now: MapNow | None = None
        self._readiness = MapReadiness("preparing")
        self._worker = Worker(self._make_or_say_why, "map")

    def stop(self) -> None:
        """End the background work."""
        self._worker.stop()

    def readiness(self) -> MapReadiness:
        """Return whether the current tree has a map; if not, start drawing it."""
        tree = self.live.index.tree
        if tree is None or not tree.hierarchy.levels:
            return MapReadiness("off", reason="this index carries no tree; index again with one")
        with self._lock:
            if self._wanted is not tree:
                self._wanted, self._readiness, self._sheet, self._now = tree, MapReadiness("preparing"), None, None
                self._worker.wake()
            return self._readiness

    def at(self, reader: Reader) -> MapNow:
        """Return the map at the reader's moment; NotThereError if none is ready."""
        sheet, places = self._sheet, self.live.places_at(reader)
        if sheet is None or sheet.tree is not places.tree:
            raise NotThereError("the map is not ready yet; /api/map says how far it is")
        with self._lock:
            now = self._now
        if now is None or now.sheet is not sheet or now.places.moment != places.moment:
            known = now.drawn if now is not None and now.sheet is sheet else NOTHING_DRAWN
            now = MapNow(sheet, places, sheet.draw(places, reader, known))
            with self._lock:
                self._now = now if self._sheet is sheet else None
        return now

    def _make_or_say_why(self) -> None:
        tree = self._wanted
        sheet: _Sheet | None = None
        try:
            if tree is not None:
                sheet = self._make(tree)
            readiness = MapReadiness("ready", 1.0)
        except StoppedError:
            return
        except Exception as error:
            readiness = MapReadiness("off", reason=reason_of(error, "the map could not be made"))
        with self._lock:
            if self._wanted is tree:  # otherwise a new tree was asked for, which the worker draws next
                self._sheet, self._readiness = sheet, readiness

    def _make(self, tree: NumberedHierarchy) -> _Sheet:
        """Read the cached map of this tree, or draw and cache it."""
        parts = [tree.numbers, tree.hierarchy.document_parent]
        for level in tree.hierarchy.levels:
            parts += [level.parent, level.centroids]
        path = self.live.index.path / MAP_FILE
        facts = {"format": MAP_FORMAT, "tree": f"{checksum_of_arrays(parts):08x}"}
        kept, level_of_sites = kept_arrays(path, MAP_ARRAYS, facts), site_level(tree.hierarchy)
        if kept is not None:
            numbers, places, sites = kept
        else:
            numbers, places, sites = self._lay_out(tree, level_of_sites)
            keep_arrays(path, dict(zip(MAP_ARRAYS, (numbers, places, sites), strict=True)), facts)
        return _Sheet(tree, level_of_sites, cells(sites), numbers, places, sites)

    def _lay_out(self, tree: NumberedHierarchy, level: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        with self.live.index.state.reading() as reader:
            there = np.flatnonzero(np.isin(tree.numbers, reader.numbers()))
            chosen = there[np.unique(np.linspace(0, len(there) - 1, min(len(there), MOST_DRAWN)).astype(np.int64))]
            numbers, (every, vectors) = tree.numbers[chosen], reader.vectors()
        if not np.array_equal(every, numbers):
            vectors = vectors[np.searchsorted(every, numbers)]
        self._report(0.1)
        sites = place_sites(tree.hierarchy, level)
        report = lambda share: self._report(0.3 + 0.7 * share)  # noqa: E731
        places = place_documents(tree.hierarchy, sites, chosen, vectors, report=report)
        order = np.argsort(numbers)
        return numbers[order], places[order], sites

    def _report(self, share: float) -> None:
        if self._worker.is_stopping():
            raise StoppedError
        self._readiness = MapReadiness("preparing", round(share, 3))
