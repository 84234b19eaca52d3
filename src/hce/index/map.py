"""DocumentMap: an index's tree as a map on which every document has a place.

The map is made in the background when somebody first asks for it, and kept in one file in the index's folder, which can
be deleted at any time. It belongs to one tree: where that was grown anew, so is the map. Documents that came after the
tree are put beside their nearest neighbours in the leaf that a walk leads them to, so that nothing else moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Literal, NamedTuple

import numpy as np

from hce.checksums import checksum_of_arrays, keep_arrays, kept_arrays
from hce.contained import is_file
from hce.deadline import check_deadline
from hce.index.browse import LiveTree, NotThereError, Places, require_same_length
from hce.index.numbered_tree import NumberedHierarchy
from hce.index.store import Reader
from hce.index.threads import Worker, reason_of
from hce.tree.layout import Cells, cells, place_beside, place_documents, place_sites, site_level

MAP_FILE = "map.safetensors"
MOST_DRAWN = 200_000
MOST_OF_A_LEAF = 512  # documents that what came later is compared with
FORMAT = "1"


NOT_READY = "the map is not ready yet; /api/map says how far it is"


@dataclass(frozen=True)
class MapReadiness:
    """Whether there is a map.

    Attributes:
        state: ready; preparing (`share` of the work is done); or off, and `reason` says why.
    """

    state: Literal["off", "preparing", "ready"]
    share: float = 0.0
    reason: str = ""


class Drawn(NamedTuple):
    """The documents on the map at one moment.

    Attributes:
        numbers: of the documents, rising, of shape (M,), int64.
        places: in the unit square, of shape (M, 2), float32.
        nodes: the node of each at the map's level, of shape (M,), int64.
    """

    numbers: np.ndarray
    places: np.ndarray
    nodes: np.ndarray


class StoredMap(NamedTuple):
    """What the file holds: where the documents of a tree are.

    Attributes:
        numbers: of the documents, rising, of shape (M,), int64.
        places: of shape (M, 2), float32.
        sites: the places of the nodes at the map's level, of shape (S, 2), float64.
    """

    numbers: np.ndarray
    places: np.ndarray
    sites: np.ndarray

    @classmethod
    def read(cls, path: Path, tree: str) -> StoredMap | None:
        """Read what `write` wrote of the tree of this fingerprint; None where there is no such thing, whole."""
        kept = kept_arrays(path, cls._fields)
        if kept is None or (kept.facts.get("format"), kept.facts.get("tree")) != (FORMAT, tree):
            return None
        return cls(*kept.arrays)

    def write(self, path: Path, tree: str) -> None:
        """Keep the map for the next server; where that is impossible, it is made anew then."""
        keep_arrays(path, self._asdict(), {"format": FORMAT, "tree": tree})


def is_damaged_map(path: Path) -> bool:
    """Tell whether there is a file of a map that is not as it was written."""
    return is_file(path) and kept_arrays(path, StoredMap._fields) is None


class _Sheet(NamedTuple):
    """The map of one tree."""

    tree: NumberedHierarchy
    kept: StoredMap
    cells: Cells

    @property
    def level(self) -> int:
        return site_level(self.tree.hierarchy)


class MapNow(NamedTuple):
    """The map, the tree and the documents of one moment, which fit each other.

    Attributes:
        sheet: the map of the tree.
        places: of all documents in that tree.
        drawn: the documents on the map.
    """

    sheet: _Sheet
    places: Places
    drawn: Drawn

    @property
    def level(self) -> int:
        """The level whose nodes have cells."""
        return self.sheet.level

    @property
    def cells(self) -> Cells:
        """The cells of the nodes of that level."""
        return self.sheet.cells

    def places_of(self, reader: Reader, numbers: np.ndarray) -> np.ndarray:
        """Return the places of documents that `reader` sees, drawn or not, of shape (B, 2)."""
        found = np.searchsorted(self.drawn.numbers, numbers)
        is_drawn = np.isin(numbers, self.drawn.numbers)
        result = np.zeros((len(numbers), 2), np.float32)
        result[is_drawn] = self.drawn.places[found[is_drawn]]
        if not is_drawn.all():
            result[~is_drawn] = _beside(self.sheet, reader, reader.vectors_at(numbers[~is_drawn]), self.drawn)
        return result

    def place_of_query(self, reader: Reader, vector: np.ndarray) -> np.ndarray:
        """Return the place that a document of this vector would have, of shape (2,).

        Raises:
            WriterBusyError: the vector is of an encoder that the index had a moment ago.
        """
        require_same_length(self.sheet.tree, len(vector))
        return np.asarray(_beside(self.sheet, reader, vector[None], self.drawn)[0])


class StoppedError(Exception):
    """The server ends, and with it the work in the background."""


class DocumentMap:
    """What can be asked of the map of an index; from several threads."""

    def __init__(self, live: LiveTree) -> None:
        self.live = live
        self._lock = Lock()
        self._asked: NumberedHierarchy | None = None  # the tree whose map was asked for last
        self._sheet: _Sheet | None = None
        self._now: MapNow | None = None
        self._readiness = MapReadiness("preparing")
        self._worker = Worker(self._make_or_say_why, "map")

    def stop(self) -> None:
        """End the background work."""
        self._worker.stop()

    def readiness(self) -> MapReadiness:
        """Return whether there is a map of the tree there is now; asking has it made."""
        tree = self.live.index.tree
        if tree is None or not tree.hierarchy.levels:
            return MapReadiness("off", reason="this index carries no tree; index anew with one")
        with self._lock:
            if self._asked is not tree:
                self._asked, self._readiness, self._sheet, self._now = tree, MapReadiness("preparing"), None, None
                if self._worker.ident is None:
                    self._worker.start()
                self._worker.wake()
            return self._readiness

    def at(self, reader: Reader) -> MapNow:
        """Return the map with the documents that `reader` sees.

        Raises:
            NotThereError: there is no map yet of the tree that there is now.
        """
        sheet, places = self._sheet, self.live.places_at(reader)
        if sheet is None or sheet.tree is not places.tree:
            raise NotThereError(NOT_READY)
        with self._lock:
            known = self._now
        before = known.drawn if known is not None and known.sheet is sheet else None
        if known is None or before is None or known.places.moment != places.moment:
            known = MapNow(sheet, places, _draw(sheet, places, reader, before))
            with self._lock:
                self._now = known if self._sheet is sheet else None
        return known

    # ------------------------------------------------------------------------------------------- in the background

    def _make_or_say_why(self) -> None:
        tree = self._asked
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
            if self._asked is tree:  # else another one was grown meanwhile, whose map is made next
                self._sheet, self._readiness = sheet, readiness

    def _make(self, tree: NumberedHierarchy) -> _Sheet:
        path, fingerprint = self.live.index.path / MAP_FILE, _fingerprint(tree)
        kept = StoredMap.read(path, fingerprint)
        if kept is None:
            kept = self._lay_out(tree)
            kept.write(path, fingerprint)
        return _Sheet(tree, kept, cells(kept.sites))

    def _lay_out(self, tree: NumberedHierarchy) -> StoredMap:
        with self.live.index.reading() as reader:
            there = np.flatnonzero(np.isin(tree.numbers, reader.numbers()))
            chosen = there[np.unique(np.linspace(0, len(there) - 1, min(len(there), MOST_DRAWN)).astype(np.int64))]
            numbers, (every, vectors) = tree.numbers[chosen], reader.vectors()
        if not np.array_equal(every, numbers):
            vectors = vectors[np.searchsorted(every, numbers)]
        self._tell(0.1)
        sites = place_sites(tree.hierarchy, site_level(tree.hierarchy))
        places = place_documents(
            tree.hierarchy, sites, chosen, vectors, tell=lambda share: self._tell(0.3 + 0.7 * share)
        )
        order = np.argsort(numbers)
        return StoredMap(numbers[order], places[order], sites)

    def _tell(self, share: float) -> None:
        if self._worker.is_stopping():
            raise StoppedError
        self._readiness = MapReadiness("preparing", round(share, 3))


def _draw(sheet: _Sheet, places: Places, reader: Reader, known: Drawn | None) -> Drawn:
    """Find the places of the documents of a moment: those kept, and beside them those that came later."""
    hierarchy, kept = sheet.tree.hierarchy, sheet.kept
    leaf = np.repeat(np.arange(len(places.leaf_start) - 1), np.diff(places.leaf_start))
    order = np.argsort(places.numbers)
    numbers, leaf = places.numbers[order], leaf[order]
    is_kept = np.isin(kept.numbers, numbers)
    later = np.setdiff1d(numbers, sheet.tree.numbers)[: max(0, MOST_DRAWN - int(is_kept.sum()))]
    first = Drawn(kept.numbers[is_kept], kept.places[is_kept], np.empty(0, np.int64))
    if known is not None:  # what came before the last change has its place already
        had = np.isin(later, known.numbers)
        known_places = known.places[np.searchsorted(known.numbers, later[had])]
    else:
        had, known_places = np.zeros(len(later), bool), np.empty((0, 2), np.float32)
    fresh = later[~had]
    new_places = _beside(sheet, reader, reader.vectors_at(fresh), first) if len(fresh) else np.empty((0, 2), np.float32)
    all_numbers = np.concatenate([first.numbers, later[had], fresh])
    all_places = np.concatenate([first.places, known_places, new_places]).astype(np.float32)
    rising = np.argsort(all_numbers)
    all_numbers = all_numbers[rising]
    nodes = hierarchy.ancestors(hierarchy.depth - 1, leaf[np.searchsorted(numbers, all_numbers)])
    return Drawn(all_numbers, all_places[rising], nodes[:, sheet.level])


def _beside(sheet: _Sheet, reader: Reader, vectors: np.ndarray, drawn: Drawn) -> np.ndarray:
    """Place vectors beside their nearest among the drawn documents of the leaf that a walk leads to, or at its site."""
    hierarchy = sheet.tree.hierarchy
    leaves = hierarchy.walk(vectors)[-1][:, 0]
    site = hierarchy.ancestors(hierarchy.depth - 1, leaves)[:, sheet.level]
    result = sheet.kept.sites[site].astype(np.float32)
    for leaf in np.unique(leaves).tolist():
        check_deadline()
        members = sheet.tree.numbers[hierarchy.children(hierarchy.depth - 1, leaf)]
        there = np.flatnonzero(np.isin(drawn.numbers, members))[:MOST_OF_A_LEAF]
        if len(there):
            rows = np.flatnonzero(leaves == leaf)
            near = reader.vectors_at(drawn.numbers[there])
            result[rows] = place_beside(vectors[rows], near, drawn.places[there])
    return result


def _fingerprint(tree: NumberedHierarchy) -> str:
    """Tell trees apart by all that a map is made from."""
    parts = [tree.numbers, tree.hierarchy.document_parent]
    for level in tree.hierarchy.levels:
        parts += [level.parent, level.centroids]
    return f"{checksum_of_arrays(parts):08x}"
