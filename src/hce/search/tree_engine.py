"""tree: the hierarchy of the corpus as the index.

A beam of nodes goes down the levels by inner product with their centroids, and the documents in the leaves under the
last of it are compared with the query. The way down is one call of faiss: an inverted file whose coarse quantiser is
an inverted file of nodes, and so on upwards, to a layer whose nodes are few enough to be compared one and all. Several
calls, one a layer, find the same and take half as long again for a single query.

As documents come and go, the tree is kept in shape with no training: a list that holds more than 4·b is split, one that
holds fewer than b/4 is dissolved into its neighbours, and what lies nearer to a new leaf than to its own moves there.
Each layer is put right from the bottom up, for the number of lists in one is the number of vectors in the layer above.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import faiss
import numpy as np

from hce.files import released
from hce.memory import GROWING, LEAF, MOST_GROWING
from hce.progress import progress_bar
from hce.search.engine import (
    EngineFiles,
    Found,
    as_format_error,
    checked_numbers,
    code_ranges,
    read_files,
    require_sound,
    write_files,
)
from hce.search.exact import EXTRA_CANDIDATES, completed, k_best
from hce.search.lists import CENTROID_DTYPE, InvertedFile, Layers, Lists
from hce.tree.growing import Grown, Level
from hce.tree.hierarchy import Hierarchy

EFFORT = 6.0
ROUTING = 1 / 4  # of the effort of a search goes into finding the leaf of a new document
LISTS = ("stored", "sizes", "ids", "home", "ranges")  # arrays of a layer on disk
KEPT = 64  # settings of searches; making one takes as long as searching a few lists

MOST, LEAST = 4, 1 / 4  # of b
NEIGHBOURS = 8  # lists from which a new one may draw
ROOT = 64  # children of the root, at most four times as many
INNER = 16  # children of a node that stands where the root was
ROUNDS = 16  # of k-means over a list that is cut up
MANY, BEAM = 2**14, 32  # of more lists than this not all are compared: so many nodes lead down to them at each layer


class TreeEngine:
    """Leaves of documents under nodes under nodes.

    Attributes:
        effort: how many vectors a search compares with the query at each level, in units of √N. More find more and
            take longer; infinity is an exact search.
    """

    name: ClassVar[str] = "tree"

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self.effort = EFFORT
        self._way: Descent | None = None

    @classmethod
    def build(
        cls,
        dim: int,
        numbers: np.ndarray,
        vectors: np.ndarray,
        dtype: str = "float32",
        hierarchy: Hierarchy | None = None,
    ) -> TreeEngine:
        """Build an engine of these vectors; `hce.search.engine.new_engine` says what the arguments are."""
        layers = lay_out(dim, numbers, vectors, dtype, hierarchy)
        with progress_bar("balancing lists", None, "lists"):
            balance(layers)
        return cls(layers)

    def __len__(self) -> int:
        return len(self._layers.documents)

    @property
    def numbers(self) -> np.ndarray:
        """The numbers of all vectors."""
        return self._layers.documents.ids

    def add(self, numbers: np.ndarray, vectors: np.ndarray) -> None:
        """Put each vector into the leaf that the beam finds; where most are new, grow the tree anew."""
        documents = self._layers.documents
        if not len(numbers):
            return
        if len(numbers) > len(documents):
            known = documents.everything()
            numbers, vectors = np.concatenate([known.ids, numbers]), np.concatenate([known.vectors, vectors])
            self._layers = lay_out(vectors.shape[1], numbers, vectors, documents.file.dtype)
        else:
            leaves = self._descent().leaves(vectors, ROUTING * self._work(1))
            documents.put(numbers, vectors, leaves)
            settle(self._layers, np.unique(leaves))
        balance(self._layers)
        self._way = None

    def remove(self, numbers: np.ndarray) -> None:
        """Take vectors out of their leaves."""
        documents = self._layers.documents
        documents.drop(np.intersect1d(documents.ids, numbers))
        balance(self._layers)
        self._way = None

    def search(self, queries: np.ndarray, k: int, allowed: np.ndarray | None = None) -> Found:
        """Find the k vectors of about the largest inner product; exactly these among `allowed`."""
        documents = self._layers.documents
        if allowed is not None or k + EXTRA_CANDIDATES >= len(self) or not len(queries):
            return documents.search_exactly(queries, k, allowed)
        found = self._descent().search(queries, k + EXTRA_CANDIDATES, self._work(k))
        return completed(k_best(found, k), queries, lambda few: documents.search_exactly(few, k))

    def scores(self, query: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return the inner products of a query with some vectors."""
        return self._layers.documents.scores(query, numbers)

    def save(self, folder: Path) -> None:
        """Write the layers."""
        codes: dict[str, np.ndarray | list[np.ndarray]] = {}
        arrays = {"branching": np.array(self._layers.branching, np.int64)}
        for number, lists in enumerate(self._layers.lists):
            name, file, numbers = f"layer{number}", lists.file, range(lists.file.index.nlist)
            codes[name] = [file.codes(each) for each in numbers]
            stored, sizes = [file.ids(each) for each in numbers], [len(each) for each in codes[name]]
            saved = np.concatenate(stored), np.array(sizes, np.int64), lists.ids, lists.home, code_ranges(file.index)
            arrays |= {f"{name}.{of}": array for of, array in zip(LISTS, saved, strict=True)}
        write_files(folder, EngineFiles(codes, arrays))

    @classmethod
    def load(cls, folder: Path, dim: int) -> TreeEngine:
        """Read what `save` wrote.

        Raises:
            FormatError: it is damaged, or not there.
        """
        with as_format_error(folder):
            names = [f"layer{number}" for number in range(len(list(folder.glob("layer*.npy"))))]
            files = read_files(folder, names)
            branching = files.arrays["branching"]
            require_sound(branching.shape == (len(names),) and len(names) > 1, f"{len(names)} layers")
            require_sound(branching.dtype == np.int64 and bool((branching > 1).all()), "nodes without children")
            lists = [_read_lists(files, name, dim) for name in names]
            layers = Layers(lists, branching.tolist())
            for number, each in enumerate(lists):
                require_sound(bool(np.isin(each.home, layers.nodes(number)).all()), "a list without a node")
        return cls(layers)

    def _work(self, k: int) -> float:
        """Return how many vectors to compare with a query at each level."""
        return max(self.effort * len(self) ** 0.5, 4 * k)

    def _descent(self) -> Descent:
        """Return the way down the layers as they are now."""
        usual = self.effort * len(self) ** 0.5
        descent = self._way
        if descent is None or descent.usual != usual:  # several threads may do this at once, to the same end
            descent = self._way = Descent(self._layers, usual)
        return descent


class Descent:
    """A beam of nodes down to the leaves, and the documents in them.

    It sees the layers as they were when this was made: after a change, make another. Any number of threads may use it.

    Attributes:
        usual: the work that it was laid out for; see `Layers.first_layer`.
        whole: how many nodes are compared at its beginning.
    """

    def __init__(self, layers: Layers, usual: float) -> None:
        self.usual = usual
        top, *below = layers.lists[layers.first_layer(usual) :]
        nodes = top.everything()
        index = faiss.IndexIDMap(faiss.IndexFlatIP(top.dim))
        index.add_with_ids(nodes.vectors, nodes.ids)
        self.whole = len(top)
        self._indexes = [index]
        for lists in below:
            self._indexes.append(lists.file.under(self._indexes[-1]))
        self._sizes = [len(lists) for lists in (top, *below)]
        self._options: dict[float, list[faiss.SearchParametersIVF | None]] = {}

    def leaves(self, queries: np.ndarray, work: float) -> np.ndarray:
        """Find the best leaf for each query, of shape (Q,), where about `work` vectors are compared at each layer."""
        options = self._options_of(work)[-2]
        return np.asarray(self._indexes[-2].search(_ready(queries), 1, params=options)[1][:, 0])

    def search(self, queries: np.ndarray, k: int, work: float) -> Found:
        """Find the k best documents under the last beam, in any order; −1 fills what is missing."""
        scores, numbers = self._indexes[-1].search(_ready(queries), k, params=self._options_of(work)[-1])
        return Found(numbers, scores)

    def _options_of(self, work: float) -> list[faiss.SearchParametersIVF | None]:
        """Return, for each layer, how wide the beams above it are."""
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


# ----------------------------------------------------------------------------------------- made and read


def lay_out(
    dim: int, numbers: np.ndarray, vectors: np.ndarray, dtype: str, hierarchy: Hierarchy | None = None
) -> Layers:
    """Lay a hierarchy of `vectors` out as lists; without one, grow it first."""
    levels, leaf = _fine_levels(vectors, hierarchy)
    if not levels:  # the root's only child is the only leaf
        levels = (Level(np.zeros(1, np.int64), np.eye(1, dim, dtype=np.float32)),)
    lists, sizes = [], [1]
    for level in levels:
        lists.append(Lists.new(dim, sizes[-1], CENTROID_DTYPE, level.centroids))
        lists[-1].put(np.arange(len(level.parent)), level.centroids, level.parent)
        sizes.append(len(level.parent))
    lists.append(Lists.new(dim, sizes[-1], dtype, vectors))
    lists[-1].put(numbers, vectors, leaf)
    branching = [max(LEAF, round(children / nodes)) for nodes, children in pairwise(sizes)]
    return Layers(lists, [*branching, LEAF])


def _fine_levels(vectors: np.ndarray, hierarchy: Hierarchy | None) -> Grown:
    """Return the levels of a tree with small leaves: those of `hierarchy` if it has them, else of one grown anew.

    A trained tree is broad: its leaves hold dozens of documents, which is good for training and too coarse for
    searching. Finer leaves under its nodes were tried, and a tree grown anew finds more at less work (docs/LOG.md); but
    growing one anew takes some 20 bytes for each dimension of each leaf, and of very many vectors the broad one's
    leaves are split after all.
    """
    if not len(vectors):
        return Grown((), np.empty(0, np.int64))
    if hierarchy is not None and len(vectors) <= 2 * LEAF * len(np.unique(hierarchy.document_parent)):
        return Grown(hierarchy.levels, hierarchy.document_parent)
    if vectors.size // LEAF * GROWING <= MOST_GROWING:
        grown = Hierarchy.build(vectors, LEAF, progress=None)
        return Grown(grown.levels, grown.document_parent)
    broad = hierarchy or Hierarchy.build(vectors, progress=None)
    return broad.with_leaves_of(vectors, LEAF)


def _read_lists(files: EngineFiles, name: str, dim: int) -> Lists:
    """Make the lists of a layer of what was saved under a name."""
    stored, sizes, ids, home, ranges = (files.arrays[f"{name}.{of}"] for of in LISTS)
    codes = files.codes[name]
    with released(codes):
        file = InvertedFile.of_codes(dim, sizes, stored, np.asarray(codes), ranges)
    order = np.argsort(stored)
    homes = np.repeat(np.arange(len(sizes)), sizes)[order]
    fit = np.array_equal(checked_numbers(stored[order], name), ids) and np.array_equal(homes, home)
    require_sound(fit and home.dtype == np.int64, f"the lists do not hold the {len(ids)} numbers that they should")
    return Lists(file, ids, home)


# ----------------------------------------------------------------------------------------- kept in shape


def balance(layers: Layers) -> None:
    """Bring all lists within their bounds; only the root's, and the last one of a layer, may be short."""
    layer = len(layers.lists) - 1
    while layer > 0:
        _dissolve_short(layers, layer)
        _split_long(layers, layer)
        layer -= 1
        if layer == 0 and len(layers.lists[0]) > MOST * ROOT:
            _raise_root(layers)
            layer = 1


def settle(layers: Layers, leaves: np.ndarray) -> None:
    """Recompute the centroids of leaves from their documents, and those of all nodes above from their children.

    Args:
        layers: changed in place.
        leaves: rising, of shape (m,).
    """
    for layer in range(len(layers.lists) - 1, 0, -1):
        lists, above = layers.lists[layer], layers.lists[layer - 1]
        members, parents = lists.members(leaves), above.home_of(leaves)
        centroids = _centroids(members.vectors, np.searchsorted(leaves, lists.home_of(members.ids)))
        above.drop(leaves)
        above.put(leaves, centroids, parents)
        leaves = np.unique(parents)


def bounds(branching: int) -> tuple[int, int]:
    """Return how few and how many a list may hold."""
    return math.ceil(LEAST * branching), MOST * branching


def _dissolve_short(layers: Layers, layer: int) -> None:
    """Hand the members of short lists to the other lists, to the nearest centroid each; one list always stays."""
    lists, above = layers.lists[layer], layers.lists[layer - 1]
    least, _ = bounds(layers.branching[layer])
    sizes = lists.sizes()[above.ids]
    short = above.ids[(sizes < least) & (np.arange(len(sizes)) != sizes.argmax())]
    if not len(short):
        return
    members = lists.members(short)
    above.drop(short)
    lists.spread(short, members, _nearest(layers, layer, members.vectors, 1)[:, 0])


def _split_long(layers: Layers, layer: int) -> None:
    """Cut long lists up, and let the new ones draw from their neighbours."""
    lists, above = layers.lists[layer], layers.lists[layer - 1]
    _, most = bounds(layers.branching[layer])
    for number in np.flatnonzero(lists.sizes() > most)[:, None]:
        members = lists.members(number)
        assignment, centroids = cut_up(members.vectors, layers.branching[layer])
        targets = np.concatenate([number, _unused(above.ids, len(centroids) - 1)])
        parent = above.home_of(number)
        above.drop(number)
        above.put(targets, centroids, np.repeat(parent, len(targets)))
        lists.spread(number, members, targets[assignment])
        _draw_from_neighbours(layers, layer, targets, centroids)


def _draw_from_neighbours(layers: Layers, layer: int, targets: np.ndarray, centroids: np.ndarray) -> None:
    """Move into new lists what is nearer to their centroids than to its own, within the bounds of both sides."""
    lists, above = layers.lists[layer], layers.lists[layer - 1]
    least, most = bounds(layers.branching[layer])
    count = min(NEIGHBOURS + len(targets), len(above))
    near = _nearest(layers, layer, centroids.mean(axis=0, keepdims=True), count)[0]
    near = near[~np.isin(near, targets)][:NEIGHBOURS]
    for donor, centroid in zip(near[:, None], above.vectors_of(near), strict=True):
        members = lists.members(donor)
        scores = members.vectors @ centroids.T
        gain = scores.max(axis=1, initial=-1) - members.vectors @ centroid
        movers = np.argsort(-gain)[: max(0, min(int((gain > 0).sum()), len(gain) - least))]
        home = np.repeat(donor, len(gain))
        home[movers] = targets[scores[movers].argmax(axis=1)]
        if len(movers) and _fits(lists, home[movers], most):
            lists.spread(donor, members, home)


def _nearest(layers: Layers, layer: int, vectors: np.ndarray, count: int) -> np.ndarray:
    """Return the `count` lists nearest to each vector: exactly up to `MANY` lists, by a beam from the root beyond."""
    above, near = layers.lists[layer - 1], np.zeros((len(vectors), 1), np.int64)
    if len(above) <= MANY:
        return above.search(vectors, count, layers.nodes(layer - 1)).numbers
    for lists in layers.lists[: layer - 1]:
        near = lists.search(vectors, BEAM, near).numbers
    near = above.search(vectors, count, near).numbers
    lost = np.flatnonzero((near < 0).any(axis=1))  # under nodes that have few lists left
    if len(lost):
        near[lost] = above.search(vectors[lost], count, layers.nodes(layer - 1)).numbers
    return near


def _fits(lists: Lists, home: np.ndarray, most: int) -> bool:
    """Tell whether every list stays within `most` vectors when each entry of `home` adds one."""
    numbers, more = np.unique(home, return_counts=True)
    sizes = [lists.file.size(number) for number in numbers.tolist()]
    return bool(np.all(sizes + more <= most))


def cut_up(vectors: np.ndarray, branching: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut vectors into lists of about b, all within their bounds.

    Returns:
        The part of each vector, of shape (m,), and a unit centroid for each part.
    """
    from hce.tree.kmeans import spherical_kmeans  # with torch, which a search needs not

    least, most = bounds(branching)
    count = max(2, round(len(vectors) / branching))
    result = spherical_kmeans(vectors, count, mode="exact", max_rounds=ROUNDS)
    large = np.bincount(result.assignment, minlength=count) >= least
    assignment = np.zeros(len(vectors), np.int64)
    if large.any():
        assignment = (vectors @ result.centroids[large].T).argmax(axis=1)
    sizes = np.bincount(assignment)
    if len(sizes) < 2 or sizes.max() > most or sizes.min() < least:
        # Many equal vectors, or one heap with a few outliers: even slices across the direction of largest spread.
        direction = np.linalg.svd(vectors - vectors.mean(axis=0), full_matrices=False)[2][0]
        assignment = np.empty(len(vectors), np.int64)
        assignment[np.argsort(vectors @ direction, kind="stable")] = np.arange(len(vectors)) * count // len(vectors)
    return assignment, _centroids(vectors, assignment)


def _centroids(vectors: np.ndarray, assignment: np.ndarray) -> np.ndarray:
    sums = np.zeros((assignment.max() + 1, vectors.shape[1]), np.float32)
    np.add.at(sums, assignment, vectors)
    lengths = np.linalg.norm(sums, axis=1, keepdims=True)
    return sums / np.maximum(lengths, np.finfo(np.float32).tiny)


def _unused(used: np.ndarray, count: int) -> np.ndarray:
    """Return the least numbers that are not in use; `used` is rising."""
    free = np.ones(len(used) + count, dtype=bool)
    free[used[used < len(free)]] = False
    return np.flatnonzero(free)[:count]


def _raise_root(layers: Layers) -> None:
    """Put a new root above the old one, which then can be split like any other node."""
    old = layers.lists[0]
    top = Lists.new(old.dim, 1, CENTROID_DTYPE, np.empty((0, old.dim), np.float32))
    centroid = _centroids(old.everything().vectors, np.zeros(len(old), np.int64))
    top.put(np.zeros(1, np.int64), centroid, np.zeros(1, np.int64))
    layers.lists.insert(0, top)
    layers.branching[0] = INNER
    layers.branching.insert(0, ROOT)
