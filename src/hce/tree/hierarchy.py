"""Hierarchy: a tree of documents, stored as arrays per level, grown bottom-up by the paper's Alg. 1.

Levels are numbered as in the paper: 0 is the root, 1 … L−1 are the inner levels, L is the documents. A node is an
integer, its place in its level; siblings are adjacent. A leaf is a node of the last inner level. A document is its
position in the corpus.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from safetensors.numpy import load_file, save_file

from hce.errors import FormatError, InputError, OutsideError, wrong_type
from hce.files import (
    damage_in,
    is_file,
    new_folder,
    plain_path,
    read_json,
    read_json_value,
    write_checksums,
    write_json,
)
from hce.progress import progress_bar

if TYPE_CHECKING:
    import torch

    from hce.tree.kmeans import Init, KMeansMode, KMeansResult

Cluster = Callable[[np.ndarray, int, int], "KMeansResult"]
"""Spherical k-means with the settings of a tree: vectors of shape (N, n), k, and a seed."""
Names = list[list[list[str]]]
"""The words of each node's name, for each inner level from the top: `names[t - 1][node]`."""

FORMAT = 1
NUMBERS = "numbers.npy"
PRODUCTS_AT_ONCE = 1 << 22  # floats: 16 MB
LARGEST = 2.0  # a node above the leaves may have up to this many times the mean number of documents
EVENING_ROUNDS = 10  # per level
SHORTEST = 1e-6  # a shorter sum of vectors has no direction
# For the progress bar: the expected time, in later rounds of k-means over all vectors, and the first round's time.
# A million vectors, b = 8: 8 rounds, the first as long as 1.5 later ones. Five million, b = 256: 4, the first like 3.
EXPECTED_ROUNDS, FIRST_ROUND = 10, 3


class Level(NamedTuple):
    """The nodes of one level, siblings adjacent: the parent and the centroid of each.

    `parent` holds nodes of the level above, (nodes,). `centroids` holds unit rows, (nodes, n), float32.
    """

    parent: np.ndarray
    centroids: np.ndarray


class Grown(NamedTuple):
    """A tree as arrays: the inner levels from the top, then the leaf of each document."""

    levels: tuple[Level, ...]
    document_parent: np.ndarray


class LevelSummary(NamedTuple):
    """One line of `Hierarchy.describe`."""

    level: int  # 1 … L−1
    nodes: int
    sizes: tuple[int, int, int, int, int]  # documents under a node: least, quartiles, most
    balance: float  # entropy of the documents' distribution over nodes, divided by its maximum; 1 is even
    mean_cosine: float  # of the level's members (nodes one level down, or documents) to their centroid


class Hierarchy:
    """A tree in which every document has a path of the same length L from the root.

    Attributes:
        levels: parents and centroids of levels 1 … L−1; `levels[t - 1]` is level t.
        document_parent: each document's node in the last inner level, of shape (N,), int64; all 0 if L = 1.
        mean_cosines: for each inner level, the mean cosine of children to their parent's centroid when the tree grew.
        facts: how the tree was grown (branching, method, seed), for manifests.
        names: the nodes' names, from `hce.tree.names.name_nodes`; None without names.
    """

    def __init__(
        self,
        levels: tuple[Level, ...],
        document_parent: np.ndarray,
        mean_cosines: tuple[float, ...],
        facts: dict[str, Any],
        names: Names | None = None,
    ) -> None:
        self.levels = levels
        self.document_parent = document_parent
        self.mean_cosines = mean_cosines
        self.facts = facts
        self.names = names
        self._by_node: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = {}

    @classmethod
    def build(
        cls,
        vectors: np.ndarray,
        branching: int | Literal["auto"] = "auto",
        depth: int = 3,
        seed: int = 0,
        *,
        mode: KMeansMode = "auto",
        init: Init = "points",
        device: torch.device | str | None = None,
        progress: bool | None = False,
    ) -> Hierarchy:
        """Grow the tree of `vectors`, bottom-up by the paper's Alg. 1.

        By default the clustering differs from the paper's in three ways. k-means starts from k documents, not random
        assignments. With many documents, k-means is approximate. Above the leaves, nodes with too many documents
        give children to near nodes. `mode="exact", init="random"` is the paper's way.

        >>> around = np.linspace(0, 2 * np.pi, 64, endpoint=False)
        >>> tree = Hierarchy.build(np.stack([np.cos(around), np.sin(around)], axis=1).astype(np.float32), branching=4)
        >>> tree, tree.depth, len(tree.path(0))
        (Hierarchy(4 → 16 → 64 documents), 3, 3)
        >>> int(tree.children(tree.depth - 1, tree.path(0)[-2])[0])  # the first document of the leaf of document 0
        0

        Args:
            vectors: unit rows of shape (N, n), float32; they may be a memory map.
            branching: expected number of children b, or "auto": the smallest b that needs no more than `depth` levels.
            depth: for "auto", the largest L, which counts the documents' level; ignored if `branching` is given.
            seed: same seed, same tree.
            mode: k-means's `mode`, see `hce.tree.kmeans.spherical_kmeans`.
            init: how exact k-means starts, see the same function; "random", the paper's, also leaves node sizes uneven.
            device: where inner products are computed; the CPU by default.
            progress: show a bar that counts vectors per round of k-means; None: only inside `bars_shown`.

        Raises:
            InputError: no tree can be grown from these vectors or options.
        """
        from hce.tree.kmeans import spherical_kmeans  # imports torch, which reading a tree does not need

        if not isinstance(vectors, np.ndarray):
            raise wrong_type(vectors, "vectors: give an array of shape (documents, dimensions)")
        if branching != "auto" and not isinstance(branching, int | np.integer):
            raise wrong_type(branching, f"branching {branching!r}: give a whole number or 'auto'")
        if len(vectors) < 1:
            raise InputError("no vectors: a tree needs at least one document")
        if branching != "auto" and branching < 2:
            raise InputError(f"branching factor {branching}: a node needs 2 children or more on average")
        if depth < 1:
            raise InputError(f"depth {depth}: a tree has 1 level or more")
        b = branching_for_depth(len(vectors), depth) if branching == "auto" else branching
        total = EXPECTED_ROUNDS * len(vectors)
        with progress_bar("growing the tree", total, "vectors", show=progress) as advance:

            def cluster(rows: np.ndarray, k: int, seed: int) -> KMeansResult:
                def show(number: int, mean_cosine: float) -> None:
                    advance(len(rows) * (FIRST_ROUND if number == 1 else 1))

                return spherical_kmeans(rows, k, seed=seed, mode=mode, init=init, device=device, on_round=show)

            levels, document_parent = agglomerative(vectors, b, seed, cluster, even=init == "points")
            advance(total)  # there may be fewer rounds than expected
        facts = {"branching": b, "method": "agglomerative", "seed": seed}
        below = [*((level.centroids, level.parent) for level in levels[1:]), (vectors, document_parent)]
        cosines = (_mean_cosine(*each, level.centroids) for each, level in zip(below, levels, strict=False))
        return cls(levels, document_parent, tuple(cosines), facts)

    @property
    def depth(self) -> int:
        """L, the length of every document's path."""
        return len(self.levels) + 1

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.document_parent)

    def __repr__(self) -> str:
        shape = " → ".join(f"{len(level.parent):,}" for level in self.levels)
        return f"Hierarchy({shape}{' → ' if shape else ''}{len(self):,} documents)"

    # ------------------------------------------------------------------------------------------------- relations

    @cached_property
    def paths(self) -> np.ndarray:
        """The node of each document at levels 1 … L, of shape (N, L), int64; the last column is the document."""
        return np.ascontiguousarray(self.ancestors(self.depth, np.arange(len(self)))[:, 1:])

    def path(self, document: int) -> tuple[int, ...]:
        """Return the L nodes from level 1 down to the document itself."""
        return tuple(self.paths[document].tolist())

    def nodes_at(self, level: int) -> np.ndarray:
        """Return each document's node at a level, of shape (N,), int64."""
        self._check_level(level, 0, self.depth)
        return np.zeros(len(self), dtype=np.int64) if level == 0 else self.paths[:, level - 1]

    def children(self, level: int, node: int) -> np.ndarray:
        """Return the children of a node in order; for a leaf these are documents."""
        self._check_level(level, 0, self.depth - 1)
        order, start = self._child_lists[level]
        return order[start[node] : start[node + 1]]

    def siblings(self, level: int, node: int) -> np.ndarray:
        """Return the other children of a node's parent, in order."""
        self._check_level(level, 1, self.depth)
        family = self.children(level - 1, int(self._parent(level)[node]))
        return family[family != node]

    def ancestors(self, level: int, nodes: np.ndarray) -> np.ndarray:
        """Return the path from the root down to each node, of shape (B, level + 1)."""
        self._check_level(level, 0, self.depth)
        columns = [nodes]
        for below in range(level, 0, -1):
            columns.append(self._parent(below)[columns[-1]])
        return np.stack(columns[::-1], axis=1)

    def documents_under(self, level: int, node: int) -> np.ndarray:
        """Return the positions of the documents under a node, in order."""
        return np.flatnonzero(self.nodes_at(level) == node)

    def sample_siblings(
        self, positions: np.ndarray, count: int, generator: np.random.Generator, level: int | None = None
    ) -> np.ndarray:
        """Draw, for each given document, others under the same node, without repeats.

        This is the paper's Sample(p) without the document itself (Eq. 6), with p = path[:t−1].

        Args:
            positions: the given documents, of shape (B,).
            count: how many to draw for each.
            generator: the source of randomness.
            level: t, from 1 to L; draws come from under the document's node at level t − 1. By default L: from the same
                leaf. With 1: from all documents.

        Returns:
            Positions of shape (B, count), int64; −1 where fewer than `count` others share the node.
        """
        order, start, rank, node = self._documents_by_node(self.depth - 1 if level is None else level - 1)
        first, others = start[node[positions]], np.diff(start)[node[positions]] - 1  # (B,)
        drawn = np.full((len(positions), count), -1, dtype=np.int64)
        for column in range(min(count, int(others.max(initial=0)))):
            # Each draw is a rank among the documents not drawn yet. Stepping over the earlier ranks, in rising order,
            # turns it into a rank among all.
            ranks = generator.integers(np.maximum(others - column, 1))
            for earlier in np.sort(drawn[:, :column], axis=1).T:
                ranks += ranks >= earlier
            drawn[:, column] = np.where(others > column, ranks, np.iinfo(np.int64).max)
        drawn[(np.arange(count) >= others[:, None])] = -1
        places = first[:, None] + drawn + (drawn >= rank[positions][:, None])
        return np.where(drawn < 0, -1, order[np.minimum(places, len(order) - 1)])

    # ------------------------------------------------------------------------------------------------- walking down

    def walk(self, vectors: np.ndarray, beam: int = 1, document_vectors: np.ndarray | None = None) -> list[np.ndarray]:
        """Walk each vector down from the root by beam search.

        Args:
            vectors: one walker per row, of shape (B, n).
            beam: how many nodes of a level each walker keeps; with 1 the walk is greedy.
            document_vectors: the vectors of all documents, of shape (N, n), to end at documents instead of leaves.

        Returns:
            For each level from the root down, the nodes that each walker keeps, of shape (B, beam); see
            `closest_children`. At level 0 this is the root, of shape (B, 1).
        """
        kept = [np.zeros((len(vectors), 1), dtype=np.int64)]
        for level in range(self.depth if document_vectors is not None else self.depth - 1):
            kept.append(self.closest_children(level, kept[-1], vectors, beam, document_vectors))
        return kept

    def closest_children(
        self,
        level: int,
        nodes: np.ndarray,
        vectors: np.ndarray,
        count: int = 1,
        document_vectors: np.ndarray | None = None,
    ) -> np.ndarray:
        """Choose children with the largest inner products: one step of `walk`.

        Args:
            level: the level of the nodes.
            nodes: the parents of the children that each vector chooses from, of shape (B, any number); −1 is none.
            vectors: of shape (B, n).
            count: how many children each vector chooses.
            document_vectors: the vectors of all documents, of shape (N, n); needed if the children are documents.

        Returns:
            Children of shape (B, count), int64, the closest first; ties go to the first; −1 where there are no more.
        """
        members = [*(below.centroids for below in self.levels), document_vectors][level]
        if members is None:
            raise InputError(f"the children at level {level} are documents, whose vectors are needed")
        row, place = np.nonzero(nodes >= 0)
        order, start = _grouped(nodes[row, place], self.node_count(level))
        best = np.full((*nodes.shape, count), -1, dtype=np.int64)
        scores = np.full(best.shape, -np.inf)
        for parent in np.flatnonzero(np.diff(start)).tolist():
            children = self.children(level, parent)
            vectors_below = members[children]
            pairs = order[start[parent] : start[parent + 1]]
            at_once = max(64, PRODUCTS_AT_ONCE // max(1, len(children)))
            for first in range(0, len(pairs), at_once):
                some = pairs[first : first + at_once]
                rows, places = row[some], place[some]
                products = vectors[rows] @ vectors_below.T  # (rows, children)
                columns = _largest(products, count)
                best[rows, places, : columns.shape[1]] = children[columns]
                scores[rows, places, : columns.shape[1]] = np.take_along_axis(products, columns, axis=1)
        flat = (len(nodes), nodes.shape[1] * count)
        return np.take_along_axis(best.reshape(flat), _largest(scores.reshape(flat), count), axis=1)

    # ------------------------------------------------------------------------------------------------- description

    def describe(self) -> list[LevelSummary]:
        """Summarize sizes, balance and tightness of every inner level, from the top."""
        summaries = []
        for level, counts in enumerate(self.document_counts()[1:], start=1):
            share = counts[counts > 0] / len(self)
            balance = float(-(share * np.log(share)).sum() / np.log(len(counts)))
            sizes = tuple(map(int, np.quantile(counts, [0, 0.25, 0.5, 0.75, 1], method="nearest")))
            summaries.append(LevelSummary(level, len(counts), sizes, balance, self.mean_cosines[level - 1]))  # type: ignore[arg-type]
        return summaries

    def name(self, level: int, node: int) -> list[str]:
        """Return the words of a node's name; [] for the root, or if no node has one."""
        return self.names[level - 1][node] if level and self.names else []

    def node_count(self, level: int) -> int:
        """Return how many nodes a level has."""
        self._check_level(level, 0, self.depth)
        return 1 if level == 0 else len(self._parent(level))

    def document_counts(self, leaves: np.ndarray | None = None) -> list[np.ndarray]:
        """Count the documents under each node, for the levels 0 … L−1."""
        leaves = self.document_parent if leaves is None else leaves
        counts = [np.bincount(leaves, minlength=self.node_count(self.depth - 1))]
        for level in reversed(self.levels):
            counts.append(np.bincount(level.parent, weights=counts[-1]).astype(np.int64))
        return counts[::-1]

    def churn(self, other: Hierarchy) -> float:
        """Return the share of documents whose parent changed from this tree to `other`.

        The same number means different nodes in the two trees. So a document counts as unmoved if it is in the same new
        leaf as the largest part of its old leaf. Churn is counted in both directions, and the larger one is returned.
        """
        if len(self) != len(other):
            raise InputError(f"churn compares trees of the same documents, not of {len(self)} and {len(other)}")
        from scipy import sparse  # not needed to search a tree

        ones = np.ones(len(self), dtype=np.int64)
        together = sparse.csr_matrix((ones, (self.document_parent, other.document_parent)))  # added up
        return 1 - min(int(together.max(axis=axis).sum()) for axis in (0, 1)) / len(self)

    # ------------------------------------------------------------------------------------------------- on disk

    def save(self, folder: str | Path, numbers: np.ndarray | None = None) -> None:
        """Write arrays, names, manifest and checksums into a new folder, atomically.

        Args:
            folder: a new or empty folder.
            numbers: in an index, the numbers of the documents, of shape (N,), int64; written too.

        Raises:
            InputError: the folder is not empty.
        """
        tensors = {"document_parent": self.document_parent}
        for t, level in enumerate(self.levels, start=1):
            tensors |= {f"level{t}.parent": level.parent, f"level{t}.centroids": level.centroids}
        manifest = {"format": FORMAT, "depth": self.depth, "mean_cosines": self.mean_cosines, **self.facts}
        with new_folder(folder) as temporary:
            save_file(tensors, temporary / "hierarchy.safetensors")
            if self.names is not None:
                write_json(temporary / "labels.json", self.names)
            if numbers is not None:
                np.save(temporary / NUMBERS, numbers, allow_pickle=False)
            write_json(temporary / "manifest.json", manifest)
            write_checksums(temporary)

    @classmethod
    def load(cls, folder: str | Path) -> Hierarchy:
        """Read a tree that `save` wrote; leave out its `numbers`.

        Raises:
            FormatError: the tree is missing, damaged, or from a newer version.
        """
        folder = Path(folder)
        for name in ("manifest.json", "hierarchy.safetensors"):
            if not is_file(folder / name):
                raise FormatError(f"{folder}: no tree there ({name} is missing)")
        try:
            manifest = read_json(folder / "manifest.json")
            is_newer = manifest.pop("format") > FORMAT
            tree = None if is_newer else cls._read(folder, manifest)
        except OutsideError:
            raise
        except Exception as error:  # readers of damaged files raise many kinds of errors
            raise FormatError(f"{folder}: the tree is damaged ({error}); build or copy it again") from error
        if tree is None:
            raise FormatError(f"{folder} was written by a newer version of hce; upgrade to read it")
        return tree

    @classmethod
    def _read(cls, folder: Path, manifest: dict[str, Any]) -> Hierarchy:
        if damaged := damage_in(folder):
            raise FormatError("; ".join(damaged))
        tensors = load_file(plain_path(folder / "hierarchy.safetensors"))
        inner = range(1, manifest.pop("depth"))
        levels = tuple(Level(tensors[f"level{t}.parent"], tensors[f"level{t}.centroids"]) for t in inner)
        named = folder / "labels.json"  # the first release's name for this file
        names = read_json_value(named) if is_file(named) else None
        tree = cls(levels, tensors["document_parent"], tuple(manifest.pop("mean_cosines")), manifest, names)
        for level in range(1, tree.depth + 1):
            parent, above = tree._parent(level), np.arange(tree.node_count(level - 1))
            if parent.ndim != 1 or not len(parent) or not np.array_equal(np.unique(parent), above):
                raise FormatError(f"level {level} names parents that are not there")
        return tree

    # ------------------------------------------------------------------------------------------------- internals

    def _parent(self, level: int) -> np.ndarray:
        return self.document_parent if level == self.depth else self.levels[level - 1].parent

    @cached_property
    def _child_lists(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each level but the last: the level below sorted by parent, and where each parent's children start."""
        return [_grouped(self._parent(level + 1), self.node_count(level)) for level in range(self.depth)]

    def _documents_by_node(self, level: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return documents by node, each node's start, each document's rank and its node."""
        if level not in self._by_node:
            node = self.nodes_at(level)
            order, start = _grouped(node, self.node_count(level))
            rank = np.empty(len(self), dtype=np.int64)
            rank[order] = np.arange(len(self)) - start[node[order]]
            self._by_node[level] = (order, start, rank, node)
        return self._by_node[level]

    def _check_level(self, level: int, lowest: int, highest: int) -> None:
        if not lowest <= level <= highest:
            raise InputError(f"level {level}: this tree has levels {lowest} to {highest} here")


def _grouped(groups: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return indices sorted by group, and where each of the `count` groups starts."""
    start = np.concatenate([[0], np.cumsum(np.bincount(groups, minlength=count))])
    return np.argsort(groups, kind="stable"), start


def _largest(scores: np.ndarray, count: int) -> np.ndarray:
    """Return the columns of each row's largest entries; ties go to the first."""
    if count == 1:  # for greedy walks; far faster than sorting
        return scores.argmax(axis=1)[:, None]
    return np.argsort(-scores, axis=1, kind="stable")[:, :count]


def _mean_cosine(vectors: np.ndarray, parent: np.ndarray, centroids: np.ndarray) -> float:
    """Return the mean cosine of vectors to the centroids of their parents."""
    total = 0.0
    for start in range(0, len(parent), 65_536):
        part = np.asarray(vectors[start : start + 65_536], dtype=np.float32)
        own = centroids[parent[start : start + 65_536]]
        total += float((np.einsum("ij,ij->i", part, own) / np.linalg.norm(part, axis=1)).sum())
    return total / len(parent)


# ------------------------------------------------------------------------------------------------- growing (Alg. 1)


def branching_for_depth(count: int, depth: int) -> int:
    """Return the smallest b with b^depth ≥ count.

    >>> branching_for_depth(1_000_000, 3)
    100
    """
    branching = 2
    while branching**depth < count:
        branching += 1
    return branching


def power_of_two(branching: int) -> int:
    """Return the smallest power of two ≥ b, the paper's rule for BEIR.

    >>> power_of_two(branching_for_depth(1_000_000, 3))
    128
    """
    return 1 << (branching - 1).bit_length()


def level_sizes(count: int, branching: int) -> list[int]:
    """Return the node count of each inner level, from the top: …, ⌈⌈N/b⌉/b⌉, ⌈N/b⌉.

    L = ⌈log_b N⌉ is one more than the number of inner levels. Counting divisions is exact; a floating-point logarithm
    is off by one for some powers of b.

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
    """Cluster the documents, then the centroids, up to one root: Alg. 1.

    k-means counts each centroid once, no matter how many documents it has. So above the leaves one cluster may get most
    of the corpus. With `even`, the levels above the leaves are evened out, which the paper does not do.
    """
    parents: list[np.ndarray] = []
    centroids: list[np.ndarray] = []
    nodes = vectors
    sizes: np.ndarray = np.ones(len(vectors))
    for step, size in enumerate(reversed(level_sizes(len(vectors), branching))):
        result = cluster(nodes, size, seed + step)
        level = result.assignment, result.centroids
        parent, nodes = evened(nodes, sizes, *level) if even and step else level
        parents.append(parent)
        centroids.append(nodes)
        sizes = np.bincount(parent, sizes, minlength=size)
    return _from_the_top(parents, centroids, len(vectors))


def evened(
    nodes: np.ndarray, sizes: np.ndarray, parent: np.ndarray, centroids: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Move nodes out of clusters with over `LARGEST` times the mean document count.

    `nodes` are unit rows; `sizes` counts their documents. Return each node's new `parent`, and the new `centroids`.
    """
    most = LARGEST * sizes.sum() / len(centroids)
    for _ in range(EVENING_ROUNDS):
        if np.bincount(parent, sizes).max() <= most:
            break
        parent = _with_room(nodes @ centroids.T, sizes, parent, most)
        centroids = _means(nodes, parent, centroids)
        nearest = (nodes @ centroids.T).argmax(axis=1)
        if len(np.unique(nearest)) == len(centroids) and np.bincount(nearest, sizes).max() <= most:
            return nearest, _means(nodes, nearest, centroids)
    return parent, centroids


def _with_room(cosines: np.ndarray, sizes: np.ndarray, parent: np.ndarray, most: float) -> np.ndarray:
    """Move nodes from clusters of over `most` documents to near ones with room."""
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
    """Return each cluster's mean as a unit row, or its old centroid if the mean is 0."""
    sums = np.zeros(centroids.shape)
    np.add.at(sums, parent, nodes)
    lengths = np.linalg.norm(sums, axis=1, keepdims=True)
    return np.where(lengths > SHORTEST, sums / np.maximum(lengths, SHORTEST), centroids).astype(np.float32)


def _from_the_top(parents: list[np.ndarray], centroids: list[np.ndarray], count: int) -> Grown:
    """Reverse bottom-up results, and number nodes so that siblings are adjacent."""
    if not parents:
        return Grown((), np.zeros(count, dtype=np.int64))
    levels = []
    new_number = np.zeros(1, dtype=np.int64)  # old → new number in the level above; at first only the root
    above = [*parents[1:], np.zeros(len(centroids[-1]), dtype=np.int64)]
    for rows, old_parent in zip(reversed(centroids), reversed(above), strict=True):
        parent = new_number[old_parent]
        order = np.argsort(parent, kind="stable")
        levels.append(Level(parent[order], rows[order]))
        new_number = np.empty_like(order)
        new_number[order] = np.arange(len(order))
    return Grown(tuple(levels), new_number[parents[0]])
