"""LiveTree: an index's tree with the documents that there are now.

The tree is that of the documents at creation. Those that are gone are left out of it, and those that came later are
put where a walk down from the root leads them, so that what is shown is what can be found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

import numpy as np

from hce.data.documents import Document
from hce.errors import InputError
from hce.index.index import Index
from hce.index.live_engine import NumberedHierarchy
from hce.index.store import Reader
from hce.tree.hierarchy import Hierarchy


class NotThereError(InputError):
    """There is no such document, node or tree."""


RIVALS = 3  # siblings that a step shows beside the one taken


@dataclass(frozen=True)
class Node:
    """A node of the tree and some of what is below it.

    Attributes:
        level: 0 is the root.
        node: its number within its level.
        name: the words of its name; none where nobody has named it.
        size: the documents under it.
        child_count: its children that have documents, or its documents in the last inner level.
        children: the largest of them, where asked for; documents are not among them.
    """

    level: int
    node: int
    name: list[str]
    size: int
    child_count: int
    children: list[Node] = field(default_factory=list)


@dataclass(frozen=True)
class Rival:
    """A sibling of the node that a step leads to."""

    node: int
    name: list[str]
    score: float


@dataclass(frozen=True)
class WayStep:
    """One step of the way down.

    Attributes:
        level: where it leads: 1 … L−1.
        node: which node there.
        name: its name.
        size: the documents under it.
        score: its centroid's cosine to the query or document.
        siblings: how many nodes there were to choose from, itself included.
        rivals: the closest others.
    """

    level: int
    node: int
    name: list[str]
    size: int
    score: float
    siblings: int
    rivals: list[Rival]


@dataclass(frozen=True)
class Way:
    """The way of a query, or of a document, from the root to the last inner level.

    Attributes:
        steps: one a level.
        position: of a document, its place in the list of the last node's documents.
        came_later: whether the document was not there when the tree was grown.
    """

    steps: list[WayStep]
    position: int | None = None
    came_later: bool = False


class Places(NamedTuple):
    """Where the documents of one moment are.

    Attributes:
        moment: the change of the store, and its token.
        tree: what was grown at creation.
        numbers: of all documents, in order of leaf, rising within each, of shape (N,).
        start: where each leaf's part begins, of shape (leaves + 1,).
        sizes: documents under each node, for the levels 0 … L−1.
    """

    moment: tuple[int, str]
    tree: NumberedHierarchy
    numbers: np.ndarray
    start: np.ndarray
    sizes: list[np.ndarray]

    def documents_of(self, leaf: int) -> np.ndarray:
        """The numbers of a leaf's documents, rising."""
        return self.numbers[self.start[leaf] : self.start[leaf + 1]]

    def leaf_of(self, number: int) -> int:
        """The leaf of a document."""
        (position,) = np.flatnonzero(self.numbers == number)
        return int(np.searchsorted(self.start, position, side="right")) - 1


class LiveTree:
    """What can be asked of the tree of an index; from several threads."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._lock = Lock()
        self._places: Places | None = None

    def node(self, level: int, node: int, depth: int, most: int) -> Node:
        """A node with its children, and theirs, the largest `most` of each.

        Raises:
            NotThereError: no such node, or no tree.
        """
        with self.index.reading() as reader:
            places = self._now(reader)
        self._check(places, level, node)
        return _node(places, level, node, depth, most)

    @property
    def levels(self) -> int:
        """The number of levels of nodes below the root; documents are one more."""
        return self.index.tree.hierarchy.depth - 1 if self.index.tree else 0

    @property
    def node_counts(self) -> list[int]:
        """The number of nodes of each of these levels."""
        return [len(level.parent) for level in self.index.tree.hierarchy.levels] if self.index.tree else []

    def above(self, level: int, node: int) -> list[Node]:
        """The nodes from the root down to a node, itself left out."""
        with self.index.reading() as reader:
            places = self._now(reader)
        self._check(places, level, node)
        path = path_to(places.tree.hierarchy, level, node)
        return [_node(places, t, each, 0, 0) for t, each in enumerate([0, *path][:-1])] if level else []

    def documents(self, node: int, offset: int, most: int) -> list[Document]:
        """Documents of a node of the last inner level.

        Raises:
            NotThereError: no such node, or no tree.
        """
        with self.index.reading() as reader:
            places = self._now(reader)
            self._check(places, places.tree.hierarchy.depth - 1, node)
            numbers = places.documents_of(node)[offset : offset + most].tolist()
            found = reader.documents(numbers)
        return [found[number] for number in numbers]

    def way_of_query(self, vector: np.ndarray) -> Way:
        """The way that a query takes down from the root, to the closest child at each level; from its vector, (n,)."""
        with self.index.reading() as reader:
            places = self._now(reader)
        return Way(_steps(places, vector, walked(places.tree.hierarchy, vector)))

    def way_of_document(self, doc_id: str) -> Way:
        """Where a document is.

        Raises:
            NotThereError: no such document, or no tree.
        """
        with self.index.reading() as reader:
            places = self._now(reader)
            present = reader.present([doc_id])
            if doc_id not in present:
                raise NotThereError(f"no document {doc_id!r} is there")
            number = present[doc_id][0]
            vector = next(reader.entries(after=number - 1)).vector
        leaf = places.leaf_of(number)
        position = int(np.searchsorted(places.documents_of(leaf), number))
        came_later = not bool(np.isin(number, places.tree.numbers))
        path = path_to(places.tree.hierarchy, self.levels, leaf)
        return Way(_steps(places, vector, path), position, came_later)

    def _now(self, reader: Reader) -> Places:
        state = reader.state()
        with self._lock:
            if self._places is None or self._places.moment != (state.change, state.token):
                tree = self.index.tree
                if tree is None:
                    raise NotThereError("this index carries no tree; index anew with one to explore it")
                self._places = _places_of(tree, reader)
            return self._places

    @staticmethod
    def _check(places: Places, level: int, node: int) -> None:
        deepest = places.tree.hierarchy.depth - 1
        if not 0 <= level <= deepest:
            raise NotThereError(f"level {level}: this tree has nodes at levels 0 to {deepest}")
        if not 0 <= node < len(places.sizes[level]):
            raise NotThereError(f"node {node}: level {level} has nodes 0 to {len(places.sizes[level]) - 1}")


def walked(hierarchy: Hierarchy, vector: np.ndarray) -> list[int]:
    """The node at each inner level that a walk from the root enters: the closest of the last one's children."""
    path = [0]
    for level, below in enumerate(hierarchy.levels):
        children = hierarchy.children(level, path[-1])
        path.append(int(children[(below.centroids[children] @ vector).argmax()]))
    return path[1:]


def path_to(hierarchy: Hierarchy, level: int, node: int) -> list[int]:
    """The nodes from level 1 down to a node, itself included."""
    path = [node]
    for below in hierarchy.levels[level - 1 : 0 : -1]:
        path.append(int(below.parent[path[-1]]))
    return path[::-1]


def _places_of(tree: NumberedHierarchy, reader: Reader) -> Places:
    hierarchy, state = tree.hierarchy, reader.state()
    kept = ~np.isin(tree.numbers, reader.removed_since(0))
    later, vectors = reader.vectors(after=int(tree.numbers.max()))
    numbers = np.concatenate([tree.numbers[kept], later])
    leaf = np.concatenate([hierarchy.document_parent[kept], _leaves_of(hierarchy, vectors)])
    order = np.lexsort((numbers, leaf))
    sizes = [np.bincount(leaf, minlength=hierarchy.node_count(hierarchy.depth - 1))]
    start = np.concatenate([[0], np.cumsum(sizes[0])])
    for level in hierarchy.levels[::-1]:
        above = np.zeros(int(level.parent.max()) + 1, dtype=np.int64)
        np.add.at(above, level.parent, sizes[0])
        sizes.insert(0, above)
    return Places((state.change, state.token), tree, numbers[order], start, sizes)


def _leaves_of(hierarchy: Hierarchy, vectors: np.ndarray) -> np.ndarray:
    """The leaf that a walk leads each vector to, of shape (B,)."""
    node = np.zeros(len(vectors), dtype=np.int64)
    for level, below in enumerate(hierarchy.levels):
        entered = np.empty_like(node)
        for parent in np.unique(node):
            rows, children = np.flatnonzero(node == parent), hierarchy.children(level, int(parent))
            entered[rows] = children[(vectors[rows] @ below.centroids[children].T).argmax(axis=1)]
        node = entered
    return node


def _node(places: Places, level: int, node: int, depth: int, most: int) -> Node:
    hierarchy, size = places.tree.hierarchy, int(places.sizes[level][node])
    name = _name(hierarchy, level, node)
    if level == hierarchy.depth - 1:
        return Node(level, node, name, size, size)
    children = hierarchy.children(level, node)
    sizes = places.sizes[level + 1][children]
    children = children[np.argsort(-sizes, kind="stable")][: int((sizes > 0).sum())]
    shown = children[:most].tolist() if depth else []
    below = [_node(places, level + 1, child, depth - 1, most) for child in shown]
    return Node(level, node, name, size, len(children), below)


def _name(hierarchy: Hierarchy, level: int, node: int) -> list[str]:
    return hierarchy.names[level - 1][node] if level and hierarchy.names else []


def _steps(places: Places, vector: np.ndarray, path: Sequence[int]) -> list[WayStep]:
    hierarchy, steps, parent = places.tree.hierarchy, [], 0
    for level, node in enumerate(path, start=1):
        children = hierarchy.children(level - 1, parent)
        scores = hierarchy.levels[level - 1].centroids[children] @ vector
        ranked = [int(row) for row in np.argsort(-scores, kind="stable") if children[row] != node]
        rivals = [
            Rival(int(children[row]), _name(hierarchy, level, int(children[row])), float(scores[row]))
            for row in ranked[:RIVALS]
        ]
        score = float(scores[np.flatnonzero(children == node)[0]])
        size = int(places.sizes[level][node])
        steps.append(WayStep(level, node, _name(hierarchy, level, node), size, score, len(children), rivals))
        parent = node
    return steps
