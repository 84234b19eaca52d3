"""The tree of an index: a hierarchy with document numbers, the paths of documents, and views for browsing.

A tree is derived: it can be grown again from the current documents. Each tree has a folder of its own, and the manifest
names the current one. Removed documents are not shown. A document that came later belongs to the leaf that a walk down
from the root reaches.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hce.errors import FormatError, InputError, WriterBusyError, warn_once
from hce.files import HELD, check_tree, delete_folder, is_file, is_folder, plain_path, released, write_to_be_mapped
from hce.index.manifest import Manifest, is_index
from hce.index.tables import Moment, Reader
from hce.progress import progress_bar
from hce.tree.hierarchy import NUMBERS, Hierarchy

if TYPE_CHECKING:
    from hce.index.index import Index

logger = logging.getLogger(__name__)

FOLDER = "hierarchy"  # the first tree's; each later tree adds the number of a change
MOST_READ = 1 << 20  # documents, evenly spread, whose words name the nodes; the words of more would need much memory
ROWS_AT_ONCE = 16_384


class NumberedHierarchy(NamedTuple):
    """A hierarchy, and the store's number for each of its documents, of shape (N,), int64."""

    hierarchy: Hierarchy
    numbers: np.ndarray

    def save(self, folder: Path) -> None:
        """Write tree and numbers to a new folder, all or nothing."""
        self.hierarchy.save(folder, self.numbers)

    @classmethod
    def load(cls, folder: Path) -> NumberedHierarchy:
        """Load a saved tree; FormatError if it is missing or damaged."""
        hierarchy, path = Hierarchy.load(folder), folder / NUMBERS
        try:
            # Mapped, so that a header that claims too much fails instead of filling the memory.
            numbers = np.array(np.load(plain_path(path), mmap_mode="r", allow_pickle=False))
        except (OSError, ValueError, EOFError) as error:
            raise FormatError(f"{path}: damaged ({error}); rebuild the index") from error
        if numbers.shape != (len(hierarchy),) or numbers.dtype != np.int64:
            raise FormatError(f"{path}: {len(numbers)} numbers for {len(hierarchy)} documents; rebuild the index")
        return cls(hierarchy, numbers)


def load_tree(index_folder: Path, suffix: str | None = None) -> NumberedHierarchy | None:
    """Load the tree of the encoder with this suffix, by default the active one."""
    failed = None
    while True:
        manifest = Manifest.read(index_folder)
        name, standby = manifest.hierarchy, manifest.standby()
        if standby is not None and suffix not in (None, manifest.suffix):
            grown = f"{FOLDER}{suffix}"  # a running reindexing may have grown it already
            name = standby.hierarchy or (grown if is_folder(index_folder / grown) else None)
        if name is None:
            return None
        try:
            is_folder(index_folder / name, index_folder)
            return NumberedHierarchy.load(index_folder / name)
        except FormatError as error:
            if name == failed:  # at the first failure, look again: another process may have just rebuilt the index
                warn_once(logger, f"{error} (it is left out until 'hce rebuild {index_folder}' grows it again)")
                return None
            failed = name


def grow_named_tree(
    vectors: np.ndarray, texts: Iterable[str], device: Any = None, *, progress: bool = False
) -> Hierarchy | None:
    """Grow a tree; the first process names its nodes. None for too few documents."""
    from hce.processes import is_first_process  # these import torch and scikit-learn, which browsing does not need
    from hce.tree.names import name_nodes

    if len(vectors) < 2:
        return None
    tree = Hierarchy.build(vectors, device=device, progress=progress)
    if not tree.levels:
        return None
    if not is_first_process():
        return tree
    every = -(-len(vectors) // MOST_READ)
    some = (text if position % every == 0 else "" for position, text in enumerate(texts))
    tree.names = name_nodes(tree, some, progress=progress)
    return tree


def regrow_tree(index_folder: Path, name: str, reader: Reader, *, progress: bool = False) -> str | None:
    """Return `name` if that tree is of the present documents, else grow a new one."""
    with suppress(FormatError):
        if np.array_equal(NumberedHierarchy.load(index_folder / name).numbers, reader.numbers()):
            return name
    return grow_tree(index_folder, f"{FOLDER}-{reader.moment().change}", reader, progress=progress)


def grow_tree(index_folder: Path, name: str, reader: Reader, *, progress: bool = False) -> str | None:
    """Grow a tree of all documents in folder `name`; None if they are too few."""
    with all_vectors(reader, index_folder) as (numbers, vectors):
        tree = grow_named_tree(vectors, (text for _, text in reader.texts()), progress=progress)
    if tree is None:
        return None
    delete_folder(index_folder / name, index_folder)
    NumberedHierarchy(tree, numbers).save(index_folder / name)
    return name


def hierarchy_folder(path: str | Path) -> Path | None:
    """Find the folder of a tree in an index, in a model, or at `path` itself.

    Raises:
        FormatError: `path` is an index without a tree.
    """
    path, candidates = Path(path), [FOLDER, "."]
    if is_index(path):
        check_tree(path)
        named = Manifest.read(path).hierarchy
        if named is None:
            raise FormatError(f"{path}: this index carries no tree; index again to get one")
        candidates = [named]
    return next((path / name for name in candidates if is_file(path / name / "hierarchy.safetensors", path)), None)


# ------------------------------------------------------------------------------------------------- paths


@dataclass(frozen=True)
class PathNode:
    """A node on a document's path: its level (1 is below the root), its position there, and the words of its name."""

    level: int
    node: int
    name: list[str]


TreePath = tuple[PathNode, ...]


def paths_of(reader: Reader, tree: NumberedHierarchy, numbers: Iterable[int]) -> dict[int, TreePath]:
    """Return the path of each document, from level 1 down to its leaf."""
    wanted = np.unique(np.fromiter(numbers, np.int64))
    leaves = _leaves_of(reader, tree, wanted).tolist()
    hierarchy, path_to = tree.hierarchy, {}
    for leaf in set(leaves) - {-1}:
        nodes = hierarchy.ancestors(hierarchy.depth - 1, np.array([leaf]))[0].tolist()
        path_to[leaf] = tuple(
            PathNode(level, node, hierarchy.name(level, node)) for level, node in enumerate(nodes) if level
        )
    return {number: path_to[leaf] for number, leaf in zip(wanted.tolist(), leaves, strict=True) if leaf >= 0}


def _leaves_of(reader: Reader, tree: NumberedHierarchy, wanted: np.ndarray) -> np.ndarray:
    """Return each document's leaf; -1 for a later one if the vectors' lengths differ."""
    place = np.minimum(np.searchsorted(tree.numbers, wanted), len(tree.numbers) - 1)
    leaves = tree.hierarchy.document_parent[place].astype(np.int64)
    later = tree.numbers[place] != wanted
    if later.any():
        vectors = reader.vectors_at(wanted[later])
        fits = vectors.shape[1] == tree.hierarchy.levels[0].centroids.shape[1]
        leaves[later] = tree.hierarchy.walk(vectors)[-1][:, 0] if fits else -1
    return leaves


# ------------------------------------------------------------------------------------------------- vectors


@contextmanager
def all_vectors(reader: Reader, folder: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the numbers of all documents, rising, (N,), and their vectors, (N, n).

    If they need too much memory, the vectors are mapped from a temporary file in `folder`. A kill leaves no file.
    """
    numbers = reader.numbers()
    if 4 * reader.dim * len(numbers) <= HELD:  # they fit into memory
        yield reader.vectors()
        return
    with tempfile.TemporaryFile(dir=folder, prefix=".vectors-") as file:
        with progress_bar("fetching vectors", len(numbers), "vectors") as advance:
            for start in range(0, len(numbers), ROWS_AT_ONCE):
                some = numbers[start : start + ROWS_AT_ONCE]
                write_to_be_mapped(file, reader.vectors_at(some))
                advance(len(some))
        file.flush()
        vectors = np.memmap(file, dtype=np.float32, mode="r", shape=(len(numbers), reader.dim))
        with released(vectors):
            yield numbers, vectors


RIVALS = 3  # siblings that a step shows next to the node it takes
READ_OF_A_LEAF = 1000  # documents whose vectors are read to find the central ones


class NotThereError(InputError):
    """The document, node or tree does not exist."""


@dataclass(frozen=True)
class Node:
    """A node of the tree, with some of its children."""

    level: int  # 0 is the root
    node: int
    name: list[str]
    size: int  # how many documents are under it
    child_count: int  # children that have documents; for a leaf, its documents
    children: list[Node] = field(default_factory=list)  # the largest of these, if requested; a leaf has none


@dataclass(frozen=True)
class OtherChild:
    """A sibling of the node that a step takes."""

    node: int
    name: list[str]
    score: float


@dataclass(frozen=True)
class WayStep:
    """One step of the way down, to a node of level 1 … L−1."""

    level: int
    node: int
    name: list[str]
    size: int  # how many documents are under the node
    score: float  # the cosine of the node's centroid to the query or document
    siblings: int  # how many nodes the step chose from, including this one
    rivals: list[OtherChild]  # the closest of the other nodes


@dataclass(frozen=True)
class Way:
    """The way of a query or document from the root to a leaf."""

    steps: list[WayStep]
    position: int | None = None  # of a document among the leaf's documents
    came_later: bool = False  # whether the tree was grown before the document came


class Places(NamedTuple):
    """The places of the documents in a tree (their leaves), at one moment."""

    moment: Moment
    tree: NumberedHierarchy
    numbers: np.ndarray  # of all documents, sorted by leaf and then by number, (N,)
    leaf_start: np.ndarray  # where each leaf begins in `numbers`, (leaves + 1,)
    sizes: list[np.ndarray]  # for the levels 0 … L−1, how many documents are under each node

    @classmethod
    def now(cls, tree: NumberedHierarchy, reader: Reader) -> Places:
        """Find the places of the documents that a reader sees."""
        hierarchy = tree.hierarchy
        kept = np.isin(tree.numbers, reader.numbers())
        later, vectors = reader.vectors(after=int(tree.numbers.max()))
        numbers = np.concatenate([tree.numbers[kept], later])
        leaf = np.concatenate([hierarchy.document_parent[kept], hierarchy.walk(vectors)[-1][:, 0]])
        sizes = hierarchy.document_counts(leaf)
        leaf_start = np.concatenate([[0], np.cumsum(sizes[-1])])
        return cls(reader.moment(), tree, numbers[np.lexsort((numbers, leaf))], leaf_start, sizes)

    @property
    def levels(self) -> int:
        """The number of levels of nodes below the root; documents are one level more."""
        return len(self.sizes) - 1

    def documents_of(self, leaf: int) -> np.ndarray:
        """Return the numbers of a leaf's documents, rising."""
        return self.numbers[self.leaf_start[leaf] : self.leaf_start[leaf + 1]]

    def leaf_of(self, number: int) -> int:
        """Return the leaf of a document."""
        (place,) = np.flatnonzero(self.numbers == number)
        return int(np.searchsorted(self.leaf_start, place, side="right")) - 1

    def check(self, level: int, node: int) -> None:
        """Fail if there is no such node."""
        if not 0 <= level < len(self.sizes):
            raise NotThereError(f"level {level}: this tree has nodes at levels 0 to {self.levels}")
        if not 0 <= node < len(self.sizes[level]):
            raise NotThereError(f"node {node}: level {level} has nodes 0 to {len(self.sizes[level]) - 1}")

    def node(self, level: int, node: int, depth: int = 0, most: int = 0) -> Node:
        """Describe a node; `depth` levels down, add each node's `most` largest children."""
        hierarchy, size = self.tree.hierarchy, int(self.sizes[level][node])
        name = hierarchy.name(level, node)
        if level == self.levels:
            return Node(level, node, name, size, size)
        children = self.children(level, node)
        shown = children[:most].tolist() if depth else []
        below = [self.node(level + 1, child, depth - 1, most) for child in shown]
        return Node(level, node, name, size, len(children), below)

    def children(self, level: int, node: int) -> np.ndarray:
        """Return the children that have documents, largest first."""
        children = self.tree.hierarchy.children(level, node)
        sizes = self.sizes[level + 1][children]
        return children[np.argsort(-sizes, kind="stable")][: int((sizes > 0).sum())]

    def central(self, reader: Reader, level: int, node: int, count: int) -> list[int]:
        """Return typical documents of a node: the central ones of its largest children."""
        hierarchy = self.tree.hierarchy
        if level == hierarchy.depth - 1:
            numbers = self.documents_of(node)[:READ_OF_A_LEAF]
            closeness = reader.vectors_at(numbers) @ hierarchy.levels[level - 1].centroids[node]
            return numbers[np.argsort(-closeness, kind="stable")[:count]].tolist()
        largest = self.children(level, node)[:count].tolist()
        shares = [count // len(largest) + (place < count % len(largest)) for place in range(len(largest))]
        return [
            number
            for child, share in zip(largest, shares, strict=True)
            for number in self.central(reader, level + 1, child, share)
        ]

    def above(self, level: int, node: int) -> list[Node]:
        """Describe the ancestors of a node, from the root down."""
        way = self.tree.hierarchy.ancestors(level, np.array([node]))[0, :-1]
        return [self.node(*each) for each in enumerate(way.tolist())]

    def way_of_query(self, vector: np.ndarray) -> Way:
        """Return the way of a query's vector (n,), to the closest child at each level."""
        require_same_length(self.tree, len(vector))
        path = np.concatenate(self.tree.hierarchy.walk(vector[None]), axis=1)[0]
        return Way(self._steps(vector, path.tolist()))

    def way_of_document(self, reader: Reader, doc_id: str) -> Way:
        """Return the way of a document from the root to its leaf."""
        present = reader.present([doc_id])
        if doc_id not in present:
            raise NotThereError(f"no document {doc_id!r} is there")
        number = present[doc_id][0]
        hierarchy, leaf = self.tree.hierarchy, self.leaf_of(number)
        path = hierarchy.ancestors(hierarchy.depth - 1, np.array([leaf]))[0].tolist()
        position = int(np.searchsorted(self.documents_of(leaf), number))
        (vector,) = reader.vectors_at(np.array([number]))
        return Way(self._steps(vector, path), position, number not in self.tree.numbers)

    def _steps(self, vector: np.ndarray, path: Sequence[int]) -> list[WayStep]:
        """Describe the steps of a vector (n,) along a path of nodes from the root."""
        return [self._step(vector, level, parent, node) for level, (parent, node) in enumerate(pairwise(path), start=1)]

    def _step(self, vector: np.ndarray, level: int, parent: int, node: int) -> WayStep:
        hierarchy = self.tree.hierarchy
        children = hierarchy.children(level - 1, parent)
        scores = hierarchy.levels[level - 1].centroids[children] @ vector
        ranked = np.argsort(-scores, kind="stable")[: RIVALS + 1]
        rivals = [
            OtherChild(child, hierarchy.name(level, child), score)
            for child, score in zip(children[ranked].tolist(), scores[ranked].tolist(), strict=True)
            if child != node
        ]
        (score,) = scores[children == node].tolist()
        size = int(self.sizes[level][node])
        return WayStep(level, node, hierarchy.name(level, node), size, score, len(children), rivals[:RIVALS])


class LiveTree:
    """The tree of an index, and the current places of its documents; thread-safe."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._lock = Lock()
        self._places: Places | None = None

    @property
    def node_counts(self) -> list[int]:
        """The number of nodes at each level below the root; an empty list without a tree."""
        return [len(level.parent) for level in self.index.tree.hierarchy.levels] if self.index.tree else []

    @contextmanager
    def now(self, level: int = 0, node: int = 0) -> Iterator[tuple[Reader, Places]]:
        """Open a reader with its places; NotThereError if the node does not exist."""
        with self.index.state.reading() as reader:
            places = self.places_at(reader)
            places.check(level, node)
            yield reader, places

    def places_at(self, reader: Reader) -> Places:
        """Return the places at a reader's moment; NotThereError without a tree."""
        tree = self.index.tree
        if tree is None:
            raise NotThereError("this index carries no tree; index again with one to explore it")
        require_same_length(tree, reader.dim)
        with self._lock:
            known = self._places
            if known is None or known.tree is not tree or known.moment != reader.moment():
                known = self._places = Places.now(tree, reader)
            return known


def require_same_length(tree: NumberedHierarchy, dim: int) -> None:
    """Fail if the tree's vectors have another length, as just after a reindexing."""
    levels = tree.hierarchy.levels
    if levels and levels[0].centroids.shape[1] != dim:
        raise WriterBusyError("the index has just got another encoder; try again")
