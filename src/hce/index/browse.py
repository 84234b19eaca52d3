"""LiveTree: an index's tree with the documents that there are now.

The tree was grown from the documents at creation. Those that are gone are left out, and those that came later are put
where a walk down from the root leads them, so that what is shown is what can be found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Lock
from typing import NamedTuple

import numpy as np

from hce.data.documents import Document
from hce.errors import InputError, WriterBusyError
from hce.index.index import Index
from hce.index.numbered_tree import NumberedHierarchy
from hce.index.store import Moment, Reader

RIVALS = 3  # siblings that a step shows beside the one taken
READ_OF_A_LEAF = 1000  # documents, among which the central ones are looked for


class NotThereError(InputError):
    """There is no such document, node or tree."""


@dataclass(frozen=True)
class Node:
    """A node of the tree and some of what is below it.

    Attributes:
        level: 0 is the root.
        node: which one of its level.
        name: the words of its name; none where nobody has named it.
        size: how many documents are under it.
        child_count: how many of its children have documents; in the last inner level, how many documents it has.
        children: the largest of these children, where asked for; documents are not among them.
    """

    level: int
    node: int
    name: list[str]
    size: int
    child_count: int
    children: list[Node] = field(default_factory=list)


@dataclass(frozen=True)
class OtherChild:
    """A sibling of the node that a step leads to."""

    node: int
    name: list[str]
    score: float


@dataclass(frozen=True)
class WayStep:
    """One step of the way down.

    Attributes:
        level: the level that the step leads to: 1 … L−1.
        node: the node that the step leads to.
        name: the node's name.
        size: how many documents are under the node.
        score: the cosine of the node's centroid to the query or document.
        siblings: how many nodes there were to choose from, the node included.
        rivals: the closest of the others.
    """

    level: int
    node: int
    name: list[str]
    size: int
    score: float
    siblings: int
    rivals: list[OtherChild]


@dataclass(frozen=True)
class Way:
    """The way of a query, or of a document, from the root to the last inner level.

    Attributes:
        steps: one a level.
        position: of a document, its place among the last node's documents.
        came_later: whether the document was not there when the tree was grown.
    """

    steps: list[WayStep]
    position: int | None = None
    came_later: bool = False


class Places(NamedTuple):
    """Where the documents of one moment are.

    Attributes:
        moment: of the store.
        tree: what was grown at creation, with the numbers of the documents that it was grown from.
        numbers: of all documents, in order of leaf, rising within each, of shape (N,).
        leaf_start: where each leaf's documents begin among `numbers`, of shape (leaves + 1,).
        sizes: how many documents are under each node, for the levels 0 … L−1.
    """

    moment: Moment
    tree: NumberedHierarchy
    numbers: np.ndarray
    leaf_start: np.ndarray
    sizes: list[np.ndarray]

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

    def documents_of(self, leaf: int) -> np.ndarray:
        """Return the numbers of a leaf's documents, rising."""
        return self.numbers[self.leaf_start[leaf] : self.leaf_start[leaf + 1]]

    def leaf_of(self, number: int) -> int:
        """Return the leaf of a document, by its number."""
        (place,) = np.flatnonzero(self.numbers == number)
        return int(np.searchsorted(self.leaf_start, place, side="right")) - 1

    def check(self, level: int, node: int) -> None:
        """Refuse a node that is not there."""
        if not 0 <= level < len(self.sizes):
            raise NotThereError(f"level {level}: this tree has nodes at levels 0 to {len(self.sizes) - 1}")
        if not 0 <= node < len(self.sizes[level]):
            raise NotThereError(f"node {node}: level {level} has nodes 0 to {len(self.sizes[level]) - 1}")

    def node(self, level: int, node: int, depth: int = 0, most: int = 0) -> Node:
        """Describe a node and `depth` levels below it, of each node the `most` largest children."""
        hierarchy, size = self.tree.hierarchy, int(self.sizes[level][node])
        name = hierarchy.name(level, node)
        if level == hierarchy.depth - 1:
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
        """Return the numbers of `count` documents typical of a node, from different children as far as there are any.

        Of a leaf these are the documents closest to its centroid; of a node above, those of its largest children.
        """
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

    def steps(self, vector: np.ndarray, path: Sequence[int]) -> list[WayStep]:
        """Describe a path of nodes from the root down as the steps of a vector, of shape (n,)."""
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
    """What can be asked of the tree of an index; from several threads."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._lock = Lock()
        self._places: Places | None = None

    @property
    def levels(self) -> int:
        """The number of levels of nodes below the root; documents are one more."""
        return len(self.node_counts)

    @property
    def node_counts(self) -> list[int]:
        """The number of nodes of each of these levels."""
        return [len(level.parent) for level in self.index.tree.hierarchy.levels] if self.index.tree else []

    def node(self, level: int, node: int, depth: int, most: int) -> Node:
        """Describe a node of now and `depth` levels below it, of each node the `most` largest children.

        Raises:
            NotThereError: no such node, or no tree.
        """
        places = self._now()
        places.check(level, node)
        return places.node(level, node, depth, most)

    def above(self, level: int, node: int) -> list[Node]:
        """Return the nodes from the root down to a node, without the node.

        Raises:
            NotThereError: no such node, or no tree.
        """
        places = self._now()
        places.check(level, node)
        way = places.tree.hierarchy.ancestors(level, np.array([node]))[0, :-1]
        return [places.node(*each) for each in enumerate(way.tolist())]

    def documents(self, node: int, offset: int, most: int) -> list[Document]:
        """Return `most` documents of a node of the last inner level, from the place `offset` on.

        Raises:
            NotThereError: no such node, or no tree.
        """
        with self.index.reading() as reader:
            places = self.places_at(reader)
            places.check(places.tree.hierarchy.depth - 1, node)
            numbers = places.documents_of(node)[offset : offset + most].tolist()
            found = reader.documents(numbers)
        return [found[number] for number in numbers]

    def central_documents(self, level: int, node: int, count: int) -> list[Document]:
        """Return documents typical of a node, see `Places.central`.

        Raises:
            NotThereError: no such node, or no tree.
        """
        with self.index.reading() as reader:
            places = self.places_at(reader)
            places.check(level, node)
            numbers = places.central(reader, level, node, count)
            found = reader.documents(numbers)
        return [found[number] for number in numbers]

    def way_of_query(self, vector: np.ndarray) -> Way:
        """Return the way of a query, given by its vector (n,), from the root to the closest child at each level."""
        places = self._now()
        require_same_length(places.tree, len(vector))
        path = np.concatenate(places.tree.hierarchy.walk(vector[None]), axis=1)[0]
        return Way(places.steps(vector, path.tolist()))

    def way_of_document(self, doc_id: str) -> Way:
        """Return the path of a document from the root to its leaf, and whether it came after the tree was grown.

        Raises:
            NotThereError: no such document, or no tree.
        """
        with self.index.reading() as reader:
            places = self.places_at(reader)
            present = reader.present([doc_id])
            if doc_id not in present:
                raise NotThereError(f"no document {doc_id!r} is there")
            number = present[doc_id][0]
            vector = next(reader.entries(after=number - 1)).vector
        leaf = places.leaf_of(number)
        hierarchy = places.tree.hierarchy
        path = hierarchy.ancestors(hierarchy.depth - 1, np.array([leaf]))[0]
        position = int(np.searchsorted(places.documents_of(leaf), number))
        return Way(places.steps(vector, path.tolist()), position, number not in places.tree.numbers)

    def _now(self) -> Places:
        with self.index.reading() as reader:
            return self.places_at(reader)

    def places_at(self, reader: Reader) -> Places:
        """Return the places of the documents that a reader sees; they are found anew only after a change.

        Raises:
            NotThereError: the index has no tree.
            WriterBusyError: the index has just got another encoder.
        """
        tree = self.index.tree
        if tree is None:
            raise NotThereError("this index carries no tree; index anew with one to explore it")
        require_same_length(tree, reader.dim)
        with self._lock:
            known = self._places
            if known is None or known.tree is not tree or known.moment != reader.moment():
                known = self._places = Places.now(tree, reader)
            return known


def require_same_length(tree: NumberedHierarchy, dim: int) -> None:
    """Refuse vectors of the encoder before a reindexing: another thread has taken up the tree of the one after it.

    Raises:
        WriterBusyError: that has just happened.
    """
    levels = tree.hierarchy.levels
    if levels and levels[0].centroids.shape[1] != dim:
        raise WriterBusyError("the index has just got another encoder; try again")
