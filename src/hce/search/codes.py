"""Codes: four bits for every two dimensions of a vector, which a scan compares with a query 19 times as fast.

The codes are those of product quantization. faiss scans them with the processor's table lookups. A scan orders vectors
nearly as their inner products do, so the engine scores its first candidates again by the vectors themselves.

Of very many vectors not all are scanned: the corpus's own tree leads to some of its leaves. One codebook serves with
and without a tree. Everything is kept as plain arrays, for the readers of faiss trust what they read.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import faiss
import numpy as np

from hce.progress import progress_bar
from hce.search.engine_files import checked, checked_places, require_sound
from hce.search.exact import Found
from hce.search.rows import Rows
from hce.tree.growing import Level
from hce.tree.hierarchy import Hierarchy

BITS, WIDTH = 4, 2  # of a code, and dimensions that share one
SAMPLE, BLOCK = 16_384, 16  # vectors that the codebook is trained on, and how many of them lie together
ROUNDS = 10  # of k-means; 25 lowered the error by one part in seventy
AT_ONCE = 65_536  # vectors that are encoded at once
LEAF = 64  # vectors in a leaf that a scan is led to, at the least
BEAM = 0.3  # of the nodes above the leaves, whose leaves are compared with a query
GROWN, DRIFTED, ENOUGH = 4, 1.5, 1000  # see `Fit.lasts_to`
MOST = 4.0  # of a number in a codebook or a centroid: vectors are of length 1


class Fit(NamedTuple):
    """How well a codebook fits.

    Attributes:
        trained: how many vectors there were when it was trained.
        error: their mean squared error.
        added: how many were added since.
        added_error: their mean squared error.
    """

    trained: int
    error: float
    added: int = 0
    added_error: float = 0.0

    def with_more(self, count: int, error: float) -> Fit:
        """Return the fit with so many more vectors, of so much squared error in all."""
        added = self.added + count
        return self._replace(added=added, added_error=(self.added_error * self.added + error) / max(added, 1))

    def lasts_to(self) -> int:
        """Return how many vectors call for training: four times as many, or any where those added fit much worse."""
        has_drifted = self.added >= ENOUGH and self.added_error > DRIFTED * self.error
        return 0 if has_drifted else GROWN * self.trained


class Routes(NamedTuple):
    """The nodes of a tree that lead a scan: leaves, and the nodes above them.

    Attributes:
        above: centroids of shape (A, n), float32.
        leaves: centroids of shape (L, n), float32, and the node above each, of shape (L,), int64.
        home: the leaf of each vector, of shape (N,), int64.
    """

    above: np.ndarray
    leaves: Level
    home: np.ndarray

    @classmethod
    def of(cls, tree: Hierarchy) -> Routes | None:
        """Take the finest level of large enough leaves, and of those above it one that halves the way there."""
        counts = [tree.node_count(level) for level in range(tree.depth)]
        fine = max(level for level, count in enumerate(counts) if not level or count * LEAF <= len(tree))
        if counts[fine] ** 2 < len(tree):  # the leaves are so large that a scan of one takes longer than finding it
            return None
        coarse = min(range(fine), key=lambda level: abs(np.log(counts[level] / counts[fine] ** 0.5)))
        parent = tree.ancestors(fine, np.arange(counts[fine]))[:, coarse]
        above = tree.levels[coarse - 1].centroids if coarse else tree.levels[0].centroids[:1]
        return cls(above, Level(parent, tree.levels[fine - 1].centroids), tree.nodes_at(fine))


class Codes:
    """The codes of vectors, by row.

    Attributes:
        codebook: of shape (M, 16, 2), float32; a code stands for two dimensions, the last one alone where they are odd.
        rows: the codes, of shape (N, bytes of one), uint8.
        fit: how well the codebook fits.
        routes: the nodes that lead a scan; None where all codes are scanned.
        probes: how many leaves a scan looks into.
    """

    def __init__(
        self, codebook: np.ndarray, rows: Rows, fit: Fit, routes: Routes | None = None, probes: int = 1
    ) -> None:
        self.codebook, self.rows, self.fit, self.routes, self.probes = codebook, rows, fit, routes, probes
        self._quantizer = _quantizer(codebook)
        self._index = self._scanned() if routes is None else self._routed(routes)

    @classmethod
    def build(cls, vectors: np.ndarray, tree: Hierarchy | None) -> Codes:
        """Train a codebook on vectors of shape (N, n), and encode all of them; with a tree, let it lead scans."""
        dim = _even(vectors.shape[1])
        quantizer = faiss.ProductQuantizer(dim, dim // WIDTH, BITS)
        quantizer.cp.niter = ROUNDS
        # In blocks: around each row that is read of a mapped file, the system maps many pages.
        starts = range(0, len(vectors), max(BLOCK, len(vectors) * BLOCK // SAMPLE))
        quantizer.train(_padded(np.concatenate([vectors[start : start + BLOCK] for start in starts])))
        blocks, error = [], 0.0
        with progress_bar("encoding vectors", len(vectors), "vectors") as advance:
            for start in range(0, len(vectors), AT_ONCE):
                some = _padded(vectors[start : start + AT_ONCE])
                blocks.append(quantizer.compute_codes(some))
                error += _error(quantizer, some, blocks[-1])
                advance(len(some))
        codebook = faiss.vector_to_array(quantizer.centroids).reshape(-1, 1 << BITS, WIDTH)
        routes = None if tree is None else Routes.of(tree)
        return cls(codebook, Rows(np.concatenate(blocks)), Fit(len(vectors), error / len(vectors)), routes)

    def append(self, vectors: np.ndarray) -> None:
        """Encode more vectors, and let scans find them."""
        padded = _padded(vectors)
        codes = self._quantizer.compute_codes(padded)
        self.fit = self.fit.with_more(len(codes), _error(self._quantizer, padded, codes))
        if self.routes is None:
            self._index.add(padded)
        else:
            home = self._index.quantizer.search(padded, 1)[1][:, 0]
            self._index.add_with_ids(padded, np.arange(len(self.rows), len(self.rows) + len(codes)))
            self.routes = self.routes._replace(home=np.concatenate([self.routes.home, home]))
        self.rows.append(codes)

    def scan(self, queries: np.ndarray, count: int) -> Found:
        """Find the rows of about the largest inner products; −1 where the leaves that were looked into hold fewer."""
        if self.routes is None:
            scores, rows = self._index.search(_padded(queries), count)
        else:
            scores, rows = self._index.search(_padded(queries), count, params=self._options())
        return Found(rows, scores)

    def look_into(self, share: float) -> None:
        """Have scans look into a share of the leaves."""
        if self.routes is not None:
            self.probes = max(1, math.ceil(share * len(self.routes.leaves.parent)))

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
        (above, (parent, leaves), home), probes = self.routes, np.array([self.probes], np.int64)
        return {**arrays, "above": above, "parent": parent, "leaves": leaves, "home": home, "probes": probes}

    @classmethod
    def of_arrays(cls, arrays: dict[str, np.ndarray], codes: np.ndarray, shape: tuple[int, int]) -> Codes:
        """Make codes of what was read, for vectors of a shape; call it within `as_format_error`.

        Raises:
            ValueError: the arrays do not fit together, or faiss could not bear them.
        """
        (count, dim), parts = shape, _even(shape[1]) // WIDTH
        codebook = _bounded(checked(arrays["codebook"], np.float32, (parts, 1 << BITS, WIDTH)))
        require_sound(codes.shape == (count, (parts * BITS + 7) // 8), f"codes of shape {codes.shape}")
        trained, error, added, added_error = checked(arrays["fit"], np.float64, (4,)).tolist()
        require_sound(max(trained, added) < 2**62, "a codebook of too many vectors")
        fit = Fit(int(trained), error, int(added), added_error)
        if "above" not in arrays:
            return cls(codebook, Rows(codes), fit)
        above, leaves = (_bounded(checked(arrays[name], np.float32, (None, dim))) for name in ("above", "leaves"))
        parent = checked_places(arrays["parent"], len(leaves), len(above))
        home = checked_places(arrays["home"], count, len(leaves))
        (probes,) = checked(arrays["probes"], np.int64, (1,)).tolist()
        require_sound(1 <= probes <= len(leaves), f"{probes} of {len(leaves)} leaves")
        return cls(codebook, Rows(codes), fit, Routes(above, Level(parent, leaves), home), probes)

    # ------------------------------------------------------------------------------------------------- in faiss

    def _scanned(self) -> faiss.IndexPQFastScan:
        """Make faiss's index of all codes."""
        plain = faiss.IndexPQ(self._quantizer.d, self._quantizer.M, BITS, faiss.METRIC_INNER_PRODUCT)
        plain.pq, plain.is_trained, plain.ntotal = self._quantizer, True, len(self.rows)
        plain.codes.resize(len(self.rows) * plain.code_size)
        if len(self.rows):
            target = faiss.rev_swig_ptr(plain.codes.data(), plain.codes.size()).reshape(self.rows.shape)
            for start, block in self.rows.blocks():
                target[start : start + len(block)] = block
        return faiss.IndexPQFastScan(plain)

    def _routed(self, routes: Routes) -> faiss.IndexIVFPQFastScan:
        """Make faiss's index of codes by leaf; what faiss adds by leaf to an index of this kind is garbage."""
        self._finder = _finder(routes)
        leaves, quantizer = len(routes.leaves.parent), self._quantizer
        plain = faiss.IndexIVFPQ(self._finder, quantizer.d, leaves, quantizer.M, BITS, faiss.METRIC_INNER_PRODUCT)
        plain.by_residual, plain.pq, plain.is_trained = False, quantizer, True
        for start, block in self.rows.blocks():
            _put(plain, routes.home[start : start + len(block)], block, start)
        return faiss.IndexIVFPQFastScan(plain)

    def _options(self) -> faiss.SearchParametersIVF:
        """Return how many leaves to look into, and how many nodes above them."""
        beam = faiss.SearchParametersIVF(nprobe=self._finder.nprobe)
        return faiss.SearchParametersIVF(nprobe=self.probes, quantizer_params=beam)


def _finder(routes: Routes) -> faiss.IndexIVFFlat:
    """Make the index that finds leaves by way of the nodes above them."""
    dim = _even(routes.above.shape[1])
    top = faiss.IndexFlatIP(dim)
    top.add(_padded(routes.above))
    finder = faiss.IndexIVFFlat(top, dim, len(routes.above), faiss.METRIC_INNER_PRODUCT)
    finder.is_trained = True
    finder.nprobe = math.ceil(BEAM * finder.nlist)
    finder.referenced_objects = [top]  # faiss only points to it
    _put(finder, routes.leaves.parent, _padded(routes.leaves.centroids).view(np.uint8), 0)
    return finder


def _put(index: faiss.IndexIVF, lists: np.ndarray, codes: np.ndarray, start: int) -> None:
    """Put codes, of shape (m, bytes of one), into lists, of shape (m,), under the ids from `start` on."""
    width = index.coarse_code_size()
    places = lists.astype("<i8")[:, None].view(np.uint8)[:, :width]
    index.add_sa_codes(np.concatenate([places, codes], axis=1), np.arange(start, start + len(codes)))


def _quantizer(codebook: np.ndarray) -> faiss.ProductQuantizer:
    quantizer = faiss.ProductQuantizer(len(codebook) * WIDTH, len(codebook), BITS)
    faiss.copy_array_to_vector(np.ascontiguousarray(codebook).ravel(), quantizer.centroids)
    return quantizer


def _bounded(array: np.ndarray) -> np.ndarray:
    require_sound(bool((np.abs(array) <= MOST).all()), "a centroid that is too far away")
    return array


def _error(quantizer: faiss.ProductQuantizer, vectors: np.ndarray, codes: np.ndarray) -> float:
    """Return the sum of the squared errors of codes."""
    return float(((quantizer.decode(codes) - vectors) ** 2).sum())


def _even(dim: int) -> int:
    return dim + dim % WIDTH


def _padded(vectors: np.ndarray) -> np.ndarray:
    """Return vectors in one piece, of an even number of dimensions."""
    rows = np.ascontiguousarray(vectors, dtype=np.float32)
    return np.pad(rows, ((0, 0), (0, 1))) if rows.shape[1] % WIDTH else rows
