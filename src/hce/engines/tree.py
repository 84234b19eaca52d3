"""tree: the hierarchy of the corpus as the index.

A beam of nodes goes down the levels by inner product with their centroids, and the documents in the leaves under the
last of it are compared with the query. All is done in faiss's inverted lists, one set a level: what a level finds is
which lists of the next one to look into (`hce.engines.descent`).
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np

from hce.engines.balance import balance, settle
from hce.engines.base import Found
from hce.engines.descent import Descent
from hce.engines.exact import SPARE, completed, ranked
from hce.engines.files import Parts, read_parts, reading, require, write_parts
from hce.engines.growing import Tree, grow
from hce.engines.lists import Lists
from hce.tree.hierarchy import Hierarchy

EFFORT = 6.0
ROUTING = 1 / 4  # of the effort of a search goes into finding the leaf of a new document


class TreeEngine:
    """Leaves of documents under nodes under nodes.

    Attributes:
        effort: how many vectors a search compares with the query at each level, in units of √N. More find more and
            take longer; infinity is an exact search.
    """

    name: ClassVar[str] = "tree"

    def __init__(self, tree: Tree, seed: int = 0, effort: float = EFFORT) -> None:
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
        """An engine of these vectors; `hce.engines.choose.new_engine` says more."""
        tree = grow(dim, numbers, vectors, dtype, hierarchy, seed)
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
            self._tree = grow(vectors.shape[1], numbers, vectors, documents.dtype, None, self._seed)
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
            tree = Tree(layers, arrays["branching"].tolist())
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
