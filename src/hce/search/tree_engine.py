"""tree: the hierarchy of the corpus as the index.

A beam of nodes goes down the levels by inner product with their centroids, and the documents in the leaves under the
last of it are compared with the query. Each layer keeps the children of one level's nodes, a list a node: the
centroids of the next level's nodes, and at the bottom the documents. The way down is one call of faiss: an inverted
file whose coarse quantiser is an inverted file of nodes, and so on upwards, to a layer whose nodes are few enough to
be compared one and all. Several calls, one a layer, find the same and take half as long again for a single query.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import faiss
import numpy as np

from hce.search.balance import balance, settle
from hce.search.engine import Found, Parts, read_parts, reading, require, write_parts
from hce.search.exact import SPARE, completed, ranked
from hce.search.lists import CENTROID_DTYPE, Layers, Lists
from hce.tree.growing import Grown, Level
from hce.tree.hierarchy import Hierarchy

LEAF = 8  # documents in a leaf, on average


def lay_out(
    dim: int, numbers: np.ndarray, vectors: np.ndarray, dtype: str, hierarchy: Hierarchy | None, seed: int
) -> Layers:
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
) -> Layers:
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
    return Layers([*layers, documents], [*branching, LEAF])


KEPT = 64  # settings of searches; making one takes as long as searching a few lists


class Descent:
    """A beam of nodes down to the leaves, and the documents in them.

    It sees the tree as it was when this was made: after a change, make another. Any number of threads may use it.

    Attributes:
        usual: the work that it was laid out for; see `Layers.start`.
        whole: how many nodes are compared at its beginning.
    """

    def __init__(self, tree: Layers, usual: float) -> None:
        self.usual = usual
        start = tree.start(usual)
        first, *below = tree.layers[start:]
        nodes = first.everything()
        index = faiss.IndexIDMap(faiss.IndexFlatIP(first.index.d))
        index.add_with_ids(nodes.vectors, nodes.ids)
        self.whole = len(first)
        self._indexes = [index]
        for layer in below:
            self._indexes.append(layer.under(self._indexes[-1]))
        self._layers = tree.layers  # whose lists the indexes look into
        self._sizes = [len(layer) for layer in tree.layers[start:]]
        self._options: dict[float, list[faiss.SearchParametersIVF | None]] = {}

    def leaves(self, queries: np.ndarray, work: float) -> np.ndarray:
        """The best leaf for each query, of shape (Q,), where about `work` vectors are compared at each layer."""
        options = self._options_of(work)[-2]
        return np.asarray(self._indexes[-2].search(_ready(queries), 1, params=options)[1][:, 0])

    def search(self, queries: np.ndarray, k: int, work: float) -> Found:
        """The k best documents under the last beam, in any order; −1 fills what is missing."""
        return Found(*self._indexes[-1].search(_ready(queries), k, params=self._options_of(work)[-1]))

    def _options_of(self, work: float) -> list[faiss.SearchParametersIVF | None]:
        """For each layer, how wide the beams above it are."""
        known = self._options.get(work)
        if known is not None:
            return known
        options: list[faiss.SearchParametersIVF | None] = [None]
        for nodes, children in pairwise(self._sizes):
            beam = math.ceil(min(nodes, work * nodes / max(1, children)))
            options.append(faiss.SearchParametersIVF(nprobe=max(1, beam), quantizer_params=options[-1]))
        if len(self._options) < KEPT:
            self._options[work] = options
        return options


def _ready(queries: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(queries, dtype=np.float32)


EFFORT = 6.0
ROUTING = 1 / 4  # of the effort of a search goes into finding the leaf of a new document


class TreeEngine:
    """Leaves of documents under nodes under nodes.

    Attributes:
        effort: how many vectors a search compares with the query at each level, in units of √N. More find more and
            take longer; infinity is an exact search.
    """

    name: ClassVar[str] = "tree"

    def __init__(self, tree: Layers, seed: int = 0, effort: float = EFFORT) -> None:
        self._tree = tree
        self._seed = seed
        self.effort = effort
        self._way: Descent | None = None

    @classmethod
    def build(
        cls,
        dim: int,
        numbers: np.ndarray,
        vectors: np.ndarray,
        dtype: str = "float32",
        hierarchy: Hierarchy | None = None,
        seed: int = 0,
    ) -> TreeEngine:
        """An engine of these vectors; `hce.search.engine.new_engine` says more."""
        tree = lay_out(dim, numbers, vectors, dtype, hierarchy, seed)
        balance(tree)
        return cls(tree, seed)

    def __len__(self) -> int:
        return len(self._tree.documents)

    def add(self, numbers: np.ndarray, vectors: np.ndarray) -> None:
        """Put each vector into the leaf that the beam finds; where most are new, grow the tree anew."""
        documents = self._tree.documents
        if not len(numbers):
            return
        if len(numbers) > len(documents):
            known = documents.everything()
            numbers, vectors = np.concatenate([known.ids, numbers]), np.concatenate([known.vectors, vectors])
            self._tree = lay_out(vectors.shape[1], numbers, vectors, documents.dtype, None, self._seed)
        else:
            leaves = self._descent().leaves(vectors, ROUTING * self._work(1))
            documents.put(numbers, vectors, leaves)
            settle(self._tree, np.unique(leaves))
        balance(self._tree)
        self._way = None

    def remove(self, numbers: np.ndarray) -> None:
        """Take vectors out of their leaves."""
        documents = self._tree.documents
        documents.drop(np.intersect1d(documents.ids, numbers))
        balance(self._tree)
        self._way = None

    def search(self, queries: np.ndarray, k: int, allowed: np.ndarray | None = None) -> Found:
        """The k vectors of about the largest inner product; exactly these among `allowed`."""
        documents = self._tree.documents
        if allowed is not None or k + SPARE >= len(self) or not len(queries):
            return documents.search_exactly(queries, k, allowed)
        found = self._descent().search(queries, k + SPARE, self._work(k))
        return completed(ranked(found, k), queries, lambda few: documents.search_exactly(few, k))

    def save(self, folder: Path) -> None:
        """Write the layers."""
        layers = {f"layer{number}": layer for number, layer in enumerate(self._tree.layers)}
        arrays = {"branching": np.array(self._tree.branching), "seed": np.array([self._seed])}
        for name, layer in layers.items():
            arrays |= {f"{name}.ids": layer.ids, f"{name}.home": layer.home}
        write_parts(folder, Parts({name: layer.index for name, layer in layers.items()}, arrays))

    @classmethod
    def load(cls, folder: Path, dim: int) -> TreeEngine:
        """Read what `save` wrote.

        Raises:
            FormatError: it is damaged, or not there.
        """
        with reading(folder):
            indexes, arrays = read_parts(folder, dim)
            names = [f"layer{number}" for number in range(len(indexes))]
            layers = [Lists(indexes[name], arrays[f"{name}.ids"], arrays[f"{name}.home"]) for name in names]
            tree = Layers(layers, arrays["branching"].tolist())
            require(len(layers) == len(tree.branching) > 1, f"{len(layers)} layers")
            for number, layer in enumerate(layers):
                layer.check()
                require(set(layer.home.tolist()) <= set(tree.nodes(number).tolist()), "a list without a node")
            seed = int(arrays["seed"][0])
        return cls(tree, seed)

    def _work(self, k: int) -> float:
        """How many vectors to compare with a query at each level."""
        return max(self.effort * len(self) ** 0.5, 4 * k)

    def _descent(self) -> Descent:
        """The way down the tree as it is now."""
        usual = self.effort * len(self) ** 0.5
        descent = self._way
        if descent is None or descent.usual != usual:  # several threads may do this at once, to the same end
            descent = self._way = Descent(self._tree, usual)
        return descent
