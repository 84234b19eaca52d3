"""Codes: four bits for every two or four dimensions of a vector, scanned with the processor's table lookups.

The codes are those of product quantization, and faiss scans them. A scan orders vectors nearly as their inner products
do, so the engine scores its first candidates again by the vectors themselves.

Of very many vectors only some are scanned: the leaves of the corpus's own tree whose centroids are nearest to the
query. Everything is kept as plain arrays, for the readers of faiss trust what they read.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import faiss
import numpy as np

from hce.progress import progress_bar
from hce.search.engine_files import checked, require_sound
from hce.search.exact import Found
from hce.search.rows import Rows
from hce.tree.hierarchy import Hierarchy

BITS = 4  # of a code
NARROW, WIDE = 2, 4  # dimensions that share a code; wide codes find less, and take half the memory
SAMPLE, BLOCK = 16_384, 16  # vectors that the codebook is trained on, and how many of them lie together
ROUNDS = 10  # of k-means; 25 lowered the error by one part in seventy
AT_ONCE = 65_536  # vectors that are encoded at once
LEAF = 64  # vectors in a leaf that a scan is led to, at the least
DRIFTED, ENOUGH = 1.5, 1000  # times the error at first, and vectors that show it
MOST = 4.0  # of a number in a codebook or a centroid: vectors are of length 1


class Fit(NamedTuple):
    """How well a codebook fits: the mean squared error of its sample, and of the vectors added since."""

    error: float
    added: int = 0
    added_error: float = 0.0

    def with_more(self, count: int, error: float) -> Fit:
        """Return the fit with so many more vectors, of so much squared error in all."""
        added = self.added + count
        return Fit(self.error, added, (self.added_error * self.added + error) / max(added, 1))

    @property
    def has_drifted(self) -> bool:
        """Whether vectors that were added fit much worse."""
        return self.added >= ENOUGH and self.added_error > DRIFTED * self.error


class Routes(NamedTuple):
    """The leaves of a tree, which lead a scan: centroids of shape (L, n), float32, and the leaf of each vector, int64.

    Equal vectors may be in two leaves, where one was added later or the tree balanced them.
    """

    leaves: np.ndarray
    home: np.ndarray

    @classmethod
    def of(cls, tree: Hierarchy) -> Routes | None:
        """Take the finest level of large enough nodes; None where all nodes are so large that they lead nowhere."""
        counts = [tree.node_count(level) for level in range(tree.depth)]
        fine = max(level for level, count in enumerate(counts) if not level or count * LEAF <= len(tree))
        return cls(tree.levels[fine - 1].centroids, tree.nodes_at(fine)) if counts[fine] ** 2 >= len(tree) else None


class Codes:
    """The codes of vectors, by row.

    Attributes:
        codebook: of shape (M, 16, width), float32; a code stands for `width` dimensions, the last one for what is left.
        rows: the codes, of shape (N, bytes of one), uint8.
        fit: how well the codebook fits.
        routes: the leaves that lead a scan; None where all codes are scanned.
        probes: how many leaves a scan looks into.
    """

    def __init__(
        self, codebook: np.ndarray, rows: Rows, fit: Fit, routes: Routes | None = None, probes: int = 1
    ) -> None:
        self.codebook, self.rows, self.fit, self.routes, self.probes = codebook, rows, fit, routes, probes
        self._quantizer = faiss.ProductQuantizer(codebook.shape[0] * self.width, len(codebook), BITS)
        faiss.copy_array_to_vector(np.ascontiguousarray(codebook).ravel(), self._quantizer.centroids)
        self._index = self._scanned(rows) if routes is None else self._routed(routes)

    @classmethod
    def build(cls, vectors: np.ndarray, width: int, tree: Hierarchy | None = None) -> Codes:
        """Train a codebook on vectors of shape (N, n), and encode all of them; with a tree, let it lead scans."""
        parts = -(-vectors.shape[1] // width)
        quantizer = faiss.ProductQuantizer(parts * width, parts, BITS)
        quantizer.cp.niter = ROUNDS
        # In blocks: around each row that is read of a mapped file, the system maps many pages.
        starts = range(0, len(vectors), max(BLOCK, len(vectors) * BLOCK // SAMPLE))
        sample = _padded(np.concatenate([vectors[start : start + BLOCK] for start in starts]), width)
        quantizer.train(sample)
        rows = np.empty((len(vectors), quantizer.code_size), np.uint8)
        with progress_bar("encoding vectors", len(vectors), "vectors") as advance:
            for start in range(0, len(vectors), AT_ONCE):
                some = _padded(vectors[start : start + AT_ONCE], width)
                rows[start : start + len(some)] = quantizer.compute_codes(some)
                advance(len(some))
        codebook = faiss.vector_to_array(quantizer.centroids).reshape(parts, 1 << BITS, width)
        fit = Fit(_error(quantizer, sample, quantizer.compute_codes(sample)) / len(sample))
        return cls(codebook, Rows(rows), fit, None if tree is None else Routes.of(tree))

    @property
    def width(self) -> int:
        """How many dimensions share a code."""
        return self.codebook.shape[2]

    def append(self, vectors: np.ndarray) -> None:
        """Encode more vectors, and let scans find them."""
        padded = _padded(vectors, self.width)
        codes = self._quantizer.compute_codes(padded)
        self.fit = self.fit.with_more(len(codes), _error(self._quantizer, padded, codes))
        if self.routes is None:
            self._index.add(padded)
        else:
            home = self._finder.search(padded, 1)[1][:, 0]
            self._index.add_with_ids(padded, np.arange(len(self.rows), len(self.rows) + len(codes)))
            self.routes = self.routes._replace(home=np.concatenate([self.routes.home, home]))
        self.rows.append(codes)

    def scan(self, queries: np.ndarray, count: int) -> Found:
        """Find the rows of about the largest inner products; −1 where the leaves that were looked into hold fewer."""
        params = None if self.routes is None else faiss.SearchParametersIVF(nprobe=self.probes)
        scores, rows = self._index.search(_padded(queries, self.width), count, params=params)
        return Found(rows, scores)

    def look_into(self, share: float) -> None:
        """Have scans look into a share of the leaves."""
        self.probes = 1 if self.routes is None else max(1, math.ceil(share * len(self.routes.leaves)))

    # ------------------------------------------------------------------------------------------------- on disk

    def from_file(self, codes: np.ndarray, kept: np.ndarray | None) -> Codes:
        """Return these codes as a file has them, of shape (m, bytes of one): of the rows that are kept, or of all."""
        if kept is None:
            self.rows = Rows(codes)
            return self
        routes = self.routes and self.routes._replace(home=self.routes.home[kept])
        return Codes(self.codebook, Rows(codes), self.fit, routes, self.probes)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all but the codes themselves, by name."""
        arrays = {"codebook": self.codebook, "fit": np.array(self.fit, np.float64)}
        if self.routes is None:
            return arrays
        return {**arrays, **self.routes._asdict(), "probes": np.array([self.probes], np.int64)}

    @classmethod
    def of_arrays(cls, arrays: dict[str, np.ndarray], codes: np.ndarray, shape: tuple[int, int]) -> Codes:
        """Make codes of what was read, for vectors of a shape; call it within `as_format_error`.

        Raises:
            ValueError: the arrays do not fit together, or faiss could not bear them.
        """
        count, dim = shape
        codebook = checked(arrays["codebook"], np.float32, (None, 1 << BITS, None), -MOST, MOST)
        parts, _, width = codebook.shape
        require_sound(width in (NARROW, WIDE) and parts == -(-dim // width), f"a codebook of {parts} × {width}")
        require_sound(codes.shape == (count, (parts * BITS + 7) // 8), f"codes of shape {codes.shape}")
        error, added, added_error = checked(arrays["fit"], np.float64, (3,)).tolist()
        fit = Fit(error, int(added), added_error)
        if "leaves" not in arrays:
            return cls(codebook, Rows(codes), fit)
        leaves = checked(arrays["leaves"], np.float32, (None, dim), -MOST, MOST)
        home = checked(arrays["home"], np.int64, (count,), 0, len(leaves) - 1)
        (probes,) = checked(arrays["probes"], np.int64, (1,), 1, len(leaves)).tolist()
        return cls(codebook, Rows(codes), fit, Routes(leaves, home), probes)

    # ------------------------------------------------------------------------------------------------- in faiss

    def _scanned(self, rows: Rows) -> faiss.IndexPQFastScan:
        """Make faiss's index of codes in rows, all of which are scanned."""
        plain = faiss.IndexPQ(self._quantizer.d, self._quantizer.M, BITS, faiss.METRIC_INNER_PRODUCT)
        plain.pq, plain.is_trained = self._quantizer, True
        for _, block in rows.blocks():
            plain.add_sa_codes(block)
        return faiss.IndexPQFastScan(plain)

    def _routed(self, routes: Routes) -> faiss.IndexIVFPQFastScan:
        """Make faiss's index of codes by leaf. What faiss itself adds to such an index by leaf is garbage.

        The leaves' centroids are found by their codes, too.
        """
        quantizer, leaves = self._quantizer, _padded(routes.leaves, self.width)
        self._finder = self._scanned(Rows(quantizer.compute_codes(leaves)))
        plain = faiss.IndexIVFPQ(self._finder, quantizer.d, len(leaves), quantizer.M, BITS, faiss.METRIC_INNER_PRODUCT)
        plain.by_residual, plain.pq, plain.is_trained = False, quantizer, True
        for start, block in self.rows.blocks():
            home = routes.home[start : start + len(block)].astype("<i8")
            places = home[:, None].view(np.uint8)[:, : plain.coarse_code_size()]
            plain.add_sa_codes(np.concatenate([places, block], axis=1), np.arange(start, start + len(block)))
        return faiss.IndexIVFPQFastScan(plain)


def _error(quantizer: faiss.ProductQuantizer, vectors: np.ndarray, codes: np.ndarray) -> float:
    """Return the sum of the squared errors of codes."""
    return float(((quantizer.decode(codes) - vectors) ** 2).sum())


def _padded(vectors: np.ndarray, width: int) -> np.ndarray:
    """Return vectors in one piece, of a number of dimensions that `width` divides."""
    rows = np.ascontiguousarray(vectors, dtype=np.float32)
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % width))) if rows.shape[1] % width else rows
