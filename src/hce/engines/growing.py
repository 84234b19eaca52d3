"""A tree of lists: from a hierarchy of vectors to what `tree` searches.

Each layer keeps the children of one level's nodes, a list a node: the centroids of the next level's nodes, and at the
bottom the documents. A node's number is its list's number in the layer below.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hce.engines.lists import Lists
from hce.engines.quantise import ROWS_AT_ONCE
from hce.tree.clustering import Grown, Level, agglomerative, k_means
from hce.tree.hierarchy import Hierarchy

LEAF = 8  # documents in a leaf, on average
CENTROID_DTYPE = "float16"  # centroids only choose, so they may be coarse: half the memory to read


class Tree(NamedTuple):
    """Layers from the root's only list down to the leaves' lists of documents.

    Attributes:
        layers: two or more.
        branching: for each layer, how many a list is expected to hold.
    """

    layers: list[Lists]
    branching: list[int]

    @property
    def documents(self) -> Lists:
        """The bottom layer."""
        return self.layers[-1]

    def nodes(self, layer: int) -> np.ndarray:
        """The lists of a layer that are in use."""
        return self.layers[layer - 1].ids if layer else np.zeros(1, np.int64)

    def start(self, work: float) -> int:
        """Where to begin a search of about `work` vectors a layer: the lowest layer that costs no more in full.

        Beginning one layer higher would cost that layer, and then `work` vectors of this one.
        """
        begin, above = 0, 0
        for number, layer in enumerate(self.layers[:-1]):
            if len(layer) <= work + above:
                begin = number
            above = len(layer)
        return begin


def grow(
    dim: int, numbers: np.ndarray, vectors: np.ndarray, dtype: str, hierarchy: Hierarchy | None, seed: int
) -> Tree:
    """Lay a hierarchy of `vectors` out as lists; without one, grow it first."""
    if not len(vectors):
        return _tree(dim, [], numbers, vectors, np.empty(0, np.int64), dtype)
    if hierarchy is None:
        hierarchy = Hierarchy.build(vectors, LEAF, seed=seed)
    levels, leaf = hierarchy.levels, hierarchy.document_parent
    if levels and len(vectors) > 2 * LEAF * len(levels[-1].centroids):
        levels, leaf = _finer(vectors, levels[-1].centroids, seed)
    return _tree(dim, list(levels), numbers, vectors, leaf, dtype)


def _finer(vectors: np.ndarray, nodes: np.ndarray, seed: int) -> Grown:
    """Smaller leaves under the nearest of the given ones, and Alg. 1 above them, all with a branching of `LEAF`.

    A trained tree is broad: its leaves hold dozens of documents, which is good for training and too coarse for
    searching. Its leaves become nodes, each at the mean of the new leaves under it: that stands for the region and
    not for where it is dense, and a beam finds the right nodes more often by it than by the mean of the documents.
    """
    cluster = k_means("auto", None)
    cells = cluster(vectors, -(-len(vectors) // LEAF), seed)
    used, parent = np.unique(_nearest(cells.centroids, nodes), return_inverse=True)
    nodes = _means_of_children(nodes[used], parent, cells.centroids)
    above = agglomerative(nodes, LEAF, seed, cluster)
    return in_order([*above.levels, Level(above.document_parent, nodes), Level(parent, cells.centroids)], cells.labels)


def in_order(levels: list[Level], leaf: np.ndarray) -> Grown:
    """Number the nodes of each level so that siblings are neighbours: what is searched together then lies together."""
    ordered, new_number = [], np.zeros(1, np.int64)
    for level in levels:
        parent = new_number[level.parent]
        order = np.argsort(parent, kind="stable")
        ordered.append(Level(parent[order], level.centroids[order]))
        new_number = np.empty_like(order)
        new_number[order] = np.arange(len(order))
    return Grown(tuple(ordered), new_number[leaf])


def _means_of_children(nodes: np.ndarray, parent: np.ndarray, children: np.ndarray) -> np.ndarray:
    """The unit mean of each node's children; where they cancel out, the node stays where it is."""
    means = np.zeros_like(nodes)
    np.add.at(means, parent, children)
    lengths = np.linalg.norm(means, axis=1, keepdims=True)
    return np.where(lengths > 0, means / np.maximum(lengths, np.finfo(np.float32).tiny), nodes)


def _tree(
    dim: int, levels: list[Level], numbers: np.ndarray, vectors: np.ndarray, leaf: np.ndarray, dtype: str
) -> Tree:
    if not levels:  # the root's only child is the only leaf
        levels = [Level(np.zeros(1, np.int64), np.eye(1, dim, dtype=np.float32))]
    layers, count = [], 1
    for level in levels:
        layer = Lists.new(dim, count, CENTROID_DTYPE, level.centroids)
        layer.put(np.arange(len(level.parent)), level.centroids, level.parent)
        layers.append(layer)
        count = len(level.parent)
    documents = Lists.new(dim, count, dtype, vectors)
    documents.put(numbers, vectors, leaf)
    above = [1, *(len(layer) for layer in layers[:-1])]
    branching = [max(LEAF, round(len(layer) / lists)) for layer, lists in zip(layers, above, strict=True)]
    return Tree([*layers, documents], [*branching, LEAF])


def _nearest(rows: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """The nearest centroid of each row, of shape (rows,), int64."""
    blocks = range(0, len(rows), ROWS_AT_ONCE // 16)
    return np.concatenate([(rows[start : start + ROWS_AT_ONCE // 16] @ centroids.T).argmax(axis=1) for start in blocks])
