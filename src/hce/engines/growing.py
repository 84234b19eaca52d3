"""A tree of lists: from a hierarchy of vectors to what `tree` searches.

Each layer keeps the children of one level's nodes, a list a node: the centroids of the next level's nodes, and at the
bottom the documents. A node's number is its list's number in the layer below.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hce.engines.lists import Lists
from hce.tree.clustering import Grown, Level
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
    # A trained tree is broad: its leaves hold dozens of documents, which is good for training and too coarse for
    # searching. Finer leaves under its nodes were tried, and a tree grown anew finds more at less work (docs/LOG.md).
    if hierarchy is None or len(vectors) > 2 * LEAF * len(np.unique(hierarchy.document_parent)):
        hierarchy = Hierarchy.build(vectors, LEAF, seed=seed)
    grown = in_order(list(hierarchy.levels), hierarchy.document_parent)
    return _tree(dim, list(grown.levels), numbers, vectors, grown.document_parent, dtype)


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
