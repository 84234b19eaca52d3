"""Paths: the nodes of an index's tree that documents lie under.

A document that came after the tree was grown has the path that a walk down from the root takes, as in
`hce.index.browse`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hce.index.numbered_tree import NumberedHierarchy
from hce.index.store import Reader
from hce.tree.hierarchy import Hierarchy


@dataclass(frozen=True)
class PathNode:
    """A node on a document's path.

    Attributes:
        level: 1 is the level below the root.
        node: the node's place in its level.
        name: the words of the node's name; empty if the node has no name.
    """

    level: int
    node: int
    name: list[str]


TreePath = tuple[PathNode, ...]


def paths_of(reader: Reader, tree: NumberedHierarchy, numbers: Iterable[int]) -> dict[int, TreePath]:
    """Return the path of each document that `reader` sees, from level 1 down to its leaf."""
    wanted = np.unique(np.fromiter(numbers, np.int64))
    leaves = _leaves_of(reader, tree, wanted).tolist()
    path_to = {leaf: _path_to(tree.hierarchy, leaf) for leaf in set(leaves)}
    return {number: path_to[leaf] for number, leaf in zip(wanted.tolist(), leaves, strict=True) if leaf >= 0}


def _leaves_of(reader: Reader, tree: NumberedHierarchy, wanted: np.ndarray) -> np.ndarray:
    """Return the leaf of each document; -1 if the tree's centroids are of another encoder's dimension."""
    place = np.minimum(np.searchsorted(tree.numbers, wanted), len(tree.numbers) - 1)
    leaves = tree.hierarchy.document_parent[place].astype(np.int64)
    later = tree.numbers[place] != wanted
    if later.any():
        vectors = reader.vectors_at(wanted[later])
        fits = vectors.shape[1] == tree.hierarchy.levels[0].centroids.shape[1]
        leaves[later] = tree.hierarchy.walk(vectors)[-1][:, 0] if fits else -1
    return leaves


def _path_to(hierarchy: Hierarchy, leaf: int) -> TreePath:
    if leaf < 0:
        return ()
    nodes = hierarchy.ancestors(hierarchy.depth - 1, np.array([leaf]))[0].tolist()
    return tuple(PathNode(level, node, hierarchy.name(level, node)) for level, node in enumerate(nodes) if level)
