"""How a tree of vectors is grown: bottom-up, by the paper's Alg. 1.

The result is plain arrays, from the root's children down to the documents: for each level the parent of each node and
the node's centroid. What can be asked of a tree is in `hce.tree.hierarchy`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from hce.errors import InputError

if TYPE_CHECKING:
    from hce.tree.kmeans import KMeansResult

LARGEST = 2.0  # times the mean number of documents: what a node above the leaves may have
ROUNDS = 10  # of evening out a level
SHORTEST = 1e-6  # sum of vectors that has a direction


class Cluster(Protocol):
    """Spherical k-means with the settings of a tree."""

    def __call__(self, vectors: np.ndarray, k: int, *, seed: int) -> KMeansResult:
        """Cluster vectors of shape (N, n) into k."""


class Level(NamedTuple):
    """The nodes of one level of a tree.

    Attributes:
        parent: each node's parent in the level above, of shape (nodes,), int64; nodes of one parent stand
            side by side.
        centroids: unit rows of shape (nodes, n), float32.
    """

    parent: np.ndarray
    centroids: np.ndarray


class Grown(NamedTuple):
    """A tree as arrays: inner levels from the top, then the parent of each document in the last of them."""

    levels: tuple[Level, ...]
    document_parent: np.ndarray


def branching_for_depth(count: int, depth: int) -> int:
    """Return the smallest b with b^depth ≥ count, so that every level divides by about as much.

    >>> branching_for_depth(1_000_000, 3)
    100
    """
    branching = 2
    while branching**depth < count:
        branching += 1
    return branching


def power_of_two(branching: int) -> int:
    """Return the next power of two: the paper's rule for BEIR.

    It leaves few nodes on top of some trees.

    >>> power_of_two(branching_for_depth(1_000_000, 3))
    128
    """
    return 1 << (branching - 1).bit_length()


def level_sizes(count: int, branching: int) -> list[int]:
    """Return the numbers of nodes of Alg. 1, from the top: ⌈N/b⌉, ⌈⌈N/b⌉/b⌉, … above 1, in reverse.

    The depth L is one more than their number, found by counting divisions: ⌈log_b N⌉ in floating point is off by one
    for some powers of b.

    >>> level_sizes(1_000_000, 128)
    [62, 7813]
    """
    sizes = []
    nodes = -(-count // branching)
    while nodes > 1:
        sizes.append(nodes)
        nodes = -(-nodes // branching)
    return sizes[::-1]


def agglomerative(vectors: np.ndarray, branching: int, seed: int, cluster: Cluster, *, even: bool = True) -> Grown:
    """Alg. 1: cluster the documents, then the centroids, and so on until one root is left.

    k-means counts a centroid once, however many documents it stands for. So above the leaves one cluster may take most
    of the corpus, unless the level is made `even`.
    """
    parents: list[np.ndarray] = []
    centroids: list[np.ndarray] = []
    nodes = vectors
    sizes: np.ndarray = np.ones(len(vectors))
    for step, size in enumerate(reversed(level_sizes(len(vectors), branching))):
        result = cluster(nodes, size, seed=seed + step)
        level = result.assignment, result.centroids
        parent, nodes = evened(nodes, sizes, *level) if even and step else level
        parents.append(parent)
        centroids.append(nodes)
        sizes = np.bincount(parent, sizes, minlength=size)
    return _from_the_top(parents, centroids, len(vectors))


def evened(
    nodes: np.ndarray, sizes: np.ndarray, parent: np.ndarray, centroids: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Move nodes out of clusters that have too many documents.

    A cluster may have `LARGEST` times the mean number, where nodes are small enough.
    """
    most = LARGEST * sizes.sum() / len(centroids)
    for _ in range(ROUNDS):
        if np.bincount(parent, sizes).max() <= most:
            break
        parent = _with_room(nodes @ centroids.T, sizes, parent, most)
        centroids = _means(nodes, parent, centroids)
        nearest = (nodes @ centroids.T).argmax(axis=1)
        if len(np.unique(nearest)) == len(centroids) and np.bincount(nearest, sizes).max() <= most:
            return nearest, _means(nodes, nearest, centroids)
    return parent, centroids


def _with_room(cosines: np.ndarray, sizes: np.ndarray, parent: np.ndarray, most: float) -> np.ndarray:
    """Let full clusters give away the nodes that lose least, to the nearest with room.

    A cluster is full with more than `most` documents.
    """
    parent = parent.copy()
    load = np.bincount(parent, sizes, minlength=cosines.shape[1])
    for full in np.flatnonzero(load > most):
        own = np.flatnonzero(parent == full)
        others = np.where(np.arange(len(load)) == full, -np.inf, cosines[own])
        for node in own[np.argsort(cosines[own, full] - others.max(axis=1), kind="stable")][: len(own) - 1]:
            room = np.where(load + sizes[node] <= most, cosines[node], -np.inf)
            to = room.argmax()
            if load[full] > most and room[to] > -np.inf:
                parent[node] = to
                load[[full, to]] += -sizes[node], sizes[node]
    return parent


def _means(nodes: np.ndarray, parent: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Return the unit mean of each cluster's nodes.

    Opposite nodes have none, and their cluster keeps its centroid.
    """
    sums = np.zeros(centroids.shape)
    np.add.at(sums, parent, nodes)
    lengths = np.linalg.norm(sums, axis=1, keepdims=True)
    return np.where(lengths > SHORTEST, sums / np.maximum(lengths, SHORTEST), centroids).astype(np.float32)


def _from_the_top(parents: list[np.ndarray], centroids: list[np.ndarray], count: int) -> Grown:
    """Turn bottom-up results over, and number each level's nodes so that siblings stand side by side."""
    if not parents:
        return Grown((), np.zeros(count, dtype=np.int64))
    levels = []
    new_number = np.zeros(1, dtype=np.int64)  # old → new number in the level above; the root is alone
    above = [*parents[1:], np.zeros(len(centroids[-1]), dtype=np.int64)]
    for rows, old_parent in zip(reversed(centroids), reversed(above), strict=True):
        parent = new_number[old_parent]
        order = np.argsort(parent, kind="stable")
        levels.append(Level(parent[order], rows[order]))
        new_number = np.empty_like(order)
        new_number[order] = np.arange(len(order))
    return Grown(tuple(levels), new_number[parents[0]])


def check_shape(count: int, branching: int, depth: int) -> None:
    """Refuse a tree that cannot be grown."""
    if count < 1:
        raise InputError("no vectors: a tree needs at least one document")
    if branching < 2:
        raise InputError(f"branching factor {branching}: a node needs 2 children or more on average")
    if depth < 1:
        raise InputError(f"depth {depth}: a tree has 1 level or more")
