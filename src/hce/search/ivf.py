"""ivf: lists of vectors around the centroids of faiss's k-means. Less memory than hnsw, and quicker to build."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import faiss
import numpy as np

from hce.search.engine import ROWS_AT_ONCE, Found, Parts, read_parts, reading, require, training_sample, write_parts
from hce.search.exact import SPARE, completed, ranked
from hce.search.lists import Lists
from hce.tree.hierarchy import Hierarchy

EFFORT = 1 / 8  # share of the lists that a search looks into
ROUNDS = 10  # of k-means
SAMPLE_PER_LIST = 64
OUTGROWN = 4  # times the vectors that the centroids were made for
FEW = 64


class IvfEngine:
    """A list of vectors for each centroid, in which are those that are nearest to it.

    Attributes:
        effort: the share of the lists that a search looks into.
    """

    name: ClassVar[str] = "ivf"

    def __init__(self, centroids: faiss.IndexFlat, lists: Lists, made_for: int, seed: int) -> None:
        self._centroids = centroids
        self._lists = lists
        self._made_for = made_for
        self._seed = seed
        self.effort = EFFORT

    @classmethod
    def build(
        cls,
        dim: int,
        numbers: np.ndarray,
        vectors: np.ndarray,
        dtype: str = "float32",
        hierarchy: Hierarchy | None = None,
        seed: int = 0,
    ) -> IvfEngine:
        """An engine of these vectors; `hce.search.engine.new_engine` says more."""
        centroids = faiss.IndexFlatIP(dim)
        centroids.add(_centroids(dim, vectors, seed))
        lists = Lists.new(dim, centroids.ntotal, dtype, vectors)
        home = np.empty(len(numbers), np.int64)
        for start in range(0, len(numbers), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            home[part] = centroids.search(np.ascontiguousarray(vectors[part], dtype=np.float32), 1)[1][:, 0]
        lists.put(numbers, vectors, home)
        return cls(centroids, lists, len(numbers), seed)

    def __len__(self) -> int:
        return len(self._lists)

    def add(self, numbers: np.ndarray, vectors: np.ndarray) -> None:
        """Put each vector into the list of its nearest centroid; where lists have grown long, make new ones."""
        if not len(numbers):
            return
        vectors = np.ascontiguousarray(vectors, dtype=np.float32)
        self._lists.put(numbers, vectors, self._centroids.search(vectors, 1)[1][:, 0])
        if len(self) > OUTGROWN * max(self._made_for, FEW):
            anew = IvfEngine.build(vectors.shape[1], *self._lists.everything(), self._lists.dtype, None, self._seed)
            self._centroids, self._lists, self._made_for = anew._centroids, anew._lists, anew._made_for

    def remove(self, numbers: np.ndarray) -> None:
        """Take vectors out of their lists."""
        self._lists.drop(np.intersect1d(self._lists.ids, numbers))

    def search(self, queries: np.ndarray, k: int, allowed: np.ndarray | None = None) -> Found:
        """The k vectors of about the largest inner product; exactly these among `allowed`."""
        if allowed is not None or k + SPARE >= len(self) or not len(queries):
            return self._lists.search_exactly(queries, k, allowed)
        probes = max(1, round(self.effort * self._centroids.ntotal))
        _, near = self._centroids.search(np.ascontiguousarray(queries, dtype=np.float32), probes)
        found = ranked(self._lists.search(queries, k + SPARE, near), k)
        return completed(found, queries, lambda few: self._lists.search_exactly(few, k))

    def save(self, folder: Path) -> None:
        """Write lists, centroids and what they were made for."""
        indexes = {"centroids": self._centroids, "lists": self._lists.index}
        facts = np.array([self._made_for, self._seed], np.int64)
        arrays = {"numbers": self._lists.ids, "home": self._lists.home, "facts": facts}
        write_parts(folder, Parts(indexes, arrays))

    @classmethod
    def load(cls, folder: Path, dim: int) -> IvfEngine:
        """Read what `save` wrote.

        Raises:
            FormatError: it is damaged, or not there.
        """
        with reading(folder):
            indexes, arrays = read_parts(folder, dim)
            lists = Lists(indexes["lists"], arrays["numbers"], arrays["home"])
            lists.check()
            made_for, seed = map(int, arrays["facts"])
            require(isinstance(indexes["centroids"], faiss.IndexFlat), "the centroids are of another kind")
        return cls(indexes["centroids"], lists, made_for, seed)


def _centroids(dim: int, vectors: np.ndarray, seed: int) -> np.ndarray:
    """About 4·√N unit vectors, of shape (lists, n); any one where there are too few vectors to cluster."""
    count = min(round(4 * len(vectors) ** 0.5), len(vectors) // 4)
    if count < 2:
        return np.eye(1, dim, dtype=np.float32)
    kmeans = faiss.Kmeans(dim, count, niter=ROUNDS, spherical=True, seed=seed + 1, min_points_per_centroid=1)
    kmeans.train(training_sample(vectors, SAMPLE_PER_LIST * count))
    return kmeans.centroids
