"""The way down a tree as one call of faiss: an inverted file whose coarse quantiser is an inverted file of nodes.

So it goes on upwards, to a layer whose nodes are few enough to be compared one and all. Several calls, one a layer,
find the same and take half as long again for a single query.
"""

from __future__ import annotations

import math
from itertools import pairwise

import faiss
import numpy as np

from hce.engines.base import Found
from hce.engines.growing import Tree

KEPT = 64  # settings of searches; making one takes as long as searching a few lists


class Descent:
    """A beam of nodes down to the leaves, and the documents in them.

    It sees the tree as it was when this was made: after a change, make another. Any number of threads may use it.

    Attributes:
        usual: the work that it was laid out for; see `Tree.start`.
        whole: how many nodes are compared at its beginning.
    """

    def __init__(self, tree: Tree, usual: float) -> None:
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
