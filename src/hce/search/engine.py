"""Engines: search numbered unit vectors by inner product. They know nothing of documents or encoders.

An engine is derived from the store and can be deleted at any time. This module has the protocol, and the engine of
this process: vectors in a file mapped into memory, and product-quantization codes, four bits for every two or four
dimensions. A search scans the codes with faiss (FastScan), whose scores approximate inner products. Then it scores the
best candidates again by their vectors. From four million vectors on, it scans only the nodes of the corpus's tree that
are nearest to the query (IVF). These nodes, of one level of the tree, are called leaves here. The engine "exact" has no
codes, and few vectors need none: then every vector is scored. `PassageEngine` has the passages of long documents.

Files are plain arrays with checksums, verified before faiss gets them: faiss's own readers trust their input.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import faiss
import numpy as np
from numpy.typing import DTypeLike
from safetensors.numpy import load_file, save_file

from hce.errors import FormatError, InputError, one_line
from hce.files import damage_in, plain_path, write_checksums
from hce.progress import progress_bar
from hce.tree.hierarchy import Hierarchy

ENGINES = ("codes", "exact")
ELSEWHERE = ("milvus",)  # engines outside this process, at an address: see `hce.milvus.engine`

CODED_FROM = 10_000  # vectors; fewer are all scored, in less than a third of a millisecond
WIDE_FROM = 200_000  # vectors; scanning wide codes is then faster, although it needs more candidates
ROUTED_FROM = 4_000_000  # vectors; with fewer, every code is scanned, in 2 ms per million
GROWN = 4  # times as many vectors as when the engine was built: then it is rebuilt
FEW = 20_000  # vectors left by a filter; fewer are all scored, which takes no longer than a scan
MARGIN = 1.25  # times as many candidates are fetched as wanted, in case more are excluded than expected
AT_ONCE = 65_536  # rows
WIDER = 4  # times as many passages are fetched if a passage not fetched yet may be among the k nearest
FILES = 3  # the format of an engine on disk
ARRAYS, VECTORS, CODES = "arrays.safetensors", "vectors.npy", "codes.npy"
ENGINE_FOLDER = "engine"  # within the folder of an engine of passages

BITS = 4  # of a code
NARROW, WIDE = 2, 4  # dimensions per code; wide codes find less, and take half the memory
SAMPLE, BLOCK = 16_384, 16  # vectors to train the codebook on, and how many of them are read together
ROUNDS = 10  # of k-means; 25 lowered the error by one part in seventy
LEAF = 64  # vectors per leaf on average, at least
DRIFTED, ENOUGH = 1.5, 1000  # retrain if 1,000 or more added vectors have over 1.5 times the training sample's error
MOST = 4.0  # limit of values in a codebook or a centroid: vectors have length 1

# Test queries decide how many candidates are scored again. They are documents plus noise, as long as the documents' RMS
# distance from their center; twice as long, to choose how many leaves to scan. Real queries are as hard (docs/LOG.md).
ASKED, K = 128, 10
WANTED = 0.995  # share of the ten nearest to be found
RESCORED = {NARROW: (100, 200, 400, 800, 1600), WIDE: (400, 800, 1600)}  # numbers of candidates to choose from
PROBES, WANTED_ROUTED = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2), 0.95  # shares of leaves to try; enough recall

EXTRA_CANDIDATES = 8  # candidates beyond those wanted, to see whether the last place is tied
SLACK = 1e-5  # how much the scores of equal unit vectors may differ in a matrix product
SCORES_AT_ONCE = 1 << 26  # floats in a block of the score matrix: 256 MB


class Found(NamedTuple):
    """The best vectors for each query, best first; equal scores in order of number."""

    numbers: np.ndarray  # (Q, k), int64; −1 where there are fewer than k vectors
    scores: np.ndarray  # (Q, k), float32; −inf where the number is −1


class Engine(Protocol):
    """The methods of an engine that a search needs. Numbers rise: a removed one is never reused."""

    def search(self, queries: np.ndarray, k: int, allowed: np.ndarray | None = None) -> Found:
        """Find the k vectors with the largest inner products; all, if there are fewer.

        Args:
            queries: unit rows of shape (Q, n), float32.
            k: 1 or more.
            allowed: the numbers to search among, rising, int64; a search among few is exact.
        """

    def scores(self, query: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return the inner products (m,) of a query (n,) with existing vectors, float32."""


def check_engine(name: str, at: str | None) -> None:
    """Fail if there is no such engine, or the address is missing or not wanted."""
    if name not in (*ENGINES, *ELSEWHERE):
        raise InputError(f"engine {name!r}: choose one of {', '.join((*ENGINES, *ELSEWHERE))}")
    if name not in ELSEWHERE and at is not None:
        raise InputError(f"--at {at}: only the engine milvus has an address; add --engine milvus")
    if name in ELSEWHERE and at is None:
        raise InputError("engine milvus: where is it? Give --at http://HOST:19530, or the path of a file ending in .db")


def wants_tree(name: str, count: int) -> bool:
    """Return whether a tree leads the searches of an engine with `count` vectors."""
    return name == "codes" and count >= ROUTED_FROM


def new_engine(
    name: str, dim: int, *, numbers: np.ndarray, vectors: np.ndarray, hierarchy: Hierarchy | None = None
) -> VectorEngine:
    """Build an engine of unit rows (N, n) with rising numbers (N,).

    Rows may be mapped from a file that does not change. `hierarchy` is the tree of these vectors. It is used, or grown
    if missing, only if a tree leads the searches; see `wants_tree`.
    """
    engine = VectorEngine(name, numbers, Rows(vectors.reshape(-1, dim)))
    if name == "exact" or len(numbers) < CODED_FROM:
        return engine
    vectors, tree = vectors.reshape(-1, dim), None
    if wants_tree(name, len(numbers)):
        tree = hierarchy or Hierarchy.build(vectors, progress=None)
    for width in (WIDE, NARROW) if len(numbers) >= WIDE_FROM else (NARROW,):
        if engine.searches_by(Codes.build(vectors, width, tree)):
            break
    return engine


def load_engine(name: str, folder: str | Path, dim: int) -> VectorEngine:
    """Load a saved engine; FormatError if it is damaged or `dim` is wrong."""
    folder = Path(folder)
    with reading(folder) as arrays:
        numbers, vectors = rising(arrays["numbers"]), mapped(folder / VECTORS, np.float32)
        require(vectors.shape == (len(numbers), dim), f"vectors of shape {vectors.shape} are not of length {dim}")
        engine = VectorEngine(name, numbers, Rows(vectors, folder / VECTORS))
        (engine.built,) = checked(arrays["built"], np.int64, (1,)).tolist()
        if "codebook" in arrays and name != "exact":
            engine.codes = Codes.loaded(arrays, mapped(folder / CODES, np.uint8), vectors.shape)
            most = RESCORED[engine.codes.width][-1]
            rescored, engine.recall = checked(arrays["quality"], np.float64, (2,), 0, most).tolist()
            require(rescored >= K, f"{rescored} candidates")
            engine.rescored = int(rescored)
    return engine


class VectorEngine:
    """Vectors by row, the number of each row, and their codes."""

    def __init__(self, name: str, numbers: np.ndarray, vectors: Rows) -> None:
        if name not in ENGINES:
            raise InputError(f"engine {name!r}: choose one of {', '.join(ENGINES)}")
        self.name = name  # "codes", or "exact" to never have codes
        self.codes: Codes | None = None  # of all rows; None if every vector is scored
        self.rescored = K  # candidates that a search for ten scores again; a search for k scores 2·(k − 10) more
        self.recall = 1.0  # share of their ten nearest vectors that test queries found by codes
        self.built = len(numbers)  # vectors when the engine was built
        self._numbers = numbers
        self._vectors = vectors
        self._live: np.ndarray | None = None  # whether each row is left; None if all are
        self._count = len(numbers)  # of rows not removed

    def __len__(self) -> int:
        return self._count

    @property
    def numbers(self) -> np.ndarray:
        """The numbers of all vectors, rising."""
        return self._numbers if self._live is None else self._numbers[self._live]

    def facts(self) -> dict[str, float]:
        """Return the number of vectors, the number from which to rebuild, and the recall."""
        if self.name == "exact":
            return {"rows": len(self)}
        facts: dict[str, float] = {"rows": len(self), "renewed_from": max(CODED_FROM, GROWN * self.built)}
        if self.codes is not None:
            facts |= {"rescored": self.rescored, "recall": self.recall}
            error, added, added_error = self.codes.arrays["fit"]
            if added >= ENOUGH and added_error > DRIFTED * error:
                facts["renewed_from"] = 0
        return facts

    def add(self, numbers: np.ndarray, vectors: np.ndarray) -> None:
        """Add unit rows under rising numbers above all earlier ones; keep the codebook."""
        rows = np.ascontiguousarray(vectors, dtype=np.float32)
        self._vectors.append(rows)
        if self.codes is not None and len(rows):
            self.codes.append(rows)
        self._numbers = np.concatenate([self._numbers, numbers])
        if self._live is not None:
            self._live = np.concatenate([self._live, np.ones(len(rows), bool)])
        self._count += len(rows)

    def remove(self, numbers: np.ndarray) -> None:
        """Mark rows as removed; the next snapshot omits them. Ignore unknown numbers."""
        stays = ~np.isin(self._numbers, numbers)
        if not stays.all():
            self._live = stays if self._live is None else self._live & stays
            self._count = int(self._live.sum())

    def scores(self, query: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return the inner products of a query with some vectors."""
        return inner_products(self._vectors[np.searchsorted(self._numbers, numbers)], query)

    # ------------------------------------------------------------------------------------------------- searches

    def search(self, queries: np.ndarray, k: int, allowed: np.ndarray | None = None) -> Found:
        """Find the k vectors with the largest inner products; codes can miss some."""
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        kept = self._live if allowed is None else self._among(allowed)
        available = self._count if allowed is None or kept is None else int(np.count_nonzero(kept))
        wanted = max(k, self.rescored + 2 * (k - K))
        is_few = wanted >= available or (allowed is not None and available <= FEW)
        if self.codes is None or is_few:
            return self._exactly(queries, k, kept, available)
        scan = partial(self._scan, self.codes, kept, available)
        found = search_exactly(scan, available, queries, k, wanted=wanted, score=self._scores_of_rows)
        short = np.flatnonzero(found.numbers[:, min(k, available) - 1] < 0)  # the leaves scanned hold too few
        found.numbers[:] = np.where(found.numbers < 0, -1, self._numbers[found.numbers])
        if len(short):
            found.numbers[short], found.scores[short] = self._exactly(queries[short], k, kept, available)
        return found

    def _among(self, allowed: np.ndarray) -> np.ndarray:
        """Return for each row whether it has one of these numbers and is not removed."""
        place = np.searchsorted(self._numbers, allowed)
        inside = place < len(self._numbers)
        place, allowed = place[inside], allowed[inside]
        is_allowed = np.zeros(len(self._numbers), bool)
        is_allowed[place[self._numbers[place] == allowed]] = True
        return is_allowed if self._live is None else is_allowed & self._live

    def _exactly(self, queries: np.ndarray, k: int, kept: np.ndarray | None, available: int) -> Found:
        """Score every vector that is neither removed nor filtered out."""
        if not available:
            return nothing(len(queries), k)
        scan = partial(self._score_all, None if kept is None else np.flatnonzero(kept))
        found = search_exactly(scan, available, queries, k, SLACK, score=self._scores_of_rows)
        return Found(np.where(found.numbers < 0, -1, self._numbers[found.numbers]), found.scores)

    def _score_all(self, chosen: np.ndarray | None, queries: np.ndarray, count: int) -> Found:
        """Find the rows with the largest inner products, among all or chosen rows."""
        best = nothing(len(queries), count)
        for start, block in self._vectors.blocks(chosen):
            scores, rows = faiss.knn(queries, block, min(count, len(block)), metric=faiss.METRIC_INNER_PRODUCT)
            best = k_best(Found(np.hstack([best.numbers, start + rows]), np.hstack([best.scores, scores])), count)
        return best if chosen is None else Found(chosen[best.numbers], best.scores)

    def _scan(self, codes: Codes, kept: np.ndarray | None, available: int, queries: np.ndarray, count: int) -> Found:
        """Find rows by their codes; fetch more than `count`: some may be excluded."""
        total = len(self._numbers)
        found = codes.scan(queries, min(math.ceil(MARGIN * count * total / available), total))
        if kept is None and not codes.is_routed:
            return found
        there = found.numbers >= 0
        scores = np.where(there, found.scores, -np.inf)
        return Found(np.where(there if kept is None else there & kept[found.numbers], found.numbers, -1), scores)

    def _scores_of_rows(self, query: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return inner_products(self._vectors[rows], query)

    def searches_by(self, codes: Codes) -> bool:
        """Tune searches by codes, and adopt the codes if such searches find enough.

        With few dimensions, many vectors share a code, so searches may miss some. Codes with a tree are always adopted.
        """
        questions, shown = self._questions(1.0), None
        if codes.is_routed:
            hard = self._questions(2.0)
            for share in PROBES:
                codes.look_into(share)
                shown = self._recalls(codes, hard)
                if shown[-1] >= WANTED_ROUTED:
                    break
        recalls = self._recalls(codes, questions)
        place = int(np.argmax(recalls >= WANTED * recalls[-1]))
        if shown is None and recalls[place] < WANTED:
            return False
        self.codes, self.rescored = codes, RESCORED[codes.width][place]
        self.recall = float((recalls if shown is None else shown)[place])
        return True

    def _questions(self, far: float) -> tuple[np.ndarray, np.ndarray]:
        """Make test queries: move documents by `far` times their spread.

        Returns the queries, and the score of each query's tenth nearest document.
        """
        rng = np.random.default_rng(0)
        rows = self._vectors[np.sort(rng.choice(len(self), min(ASKED, len(self)), replace=False))]
        step = far * np.sqrt(rows.var(axis=0).mean())
        moved = (rows + step * rng.standard_normal(rows.shape)).astype(np.float32)
        queries = moved / np.maximum(np.linalg.norm(moved, axis=1, keepdims=True), 1e-9)
        return queries, self._exactly(queries, min(K, len(self)), None, len(self)).scores[:, -1]

    def _recalls(self, codes: Codes, questions: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """Return the found share of the ten nearest, for each number of candidates."""
        found = codes.scan(questions[0], min(RESCORED[codes.width][-1], len(self))).numbers
        near = [
            (self._scores_of_rows(query, rows) >= least - SLACK) & (rows >= 0)
            for query, least, rows in zip(*questions, found, strict=True)
        ]
        shares = np.cumsum(near, axis=1).clip(0, K).mean(axis=0) / K
        return np.array([shares[:count][-1] for count in RESCORED[codes.width]])

    def save(self, folder: Path) -> None:
        """Write all rows not removed into an empty folder, and use its files from now on."""
        kept, files = None if self._live is None else np.flatnonzero(self._live), [VECTORS]
        self._numbers = self.numbers
        self._vectors.write(folder / VECTORS, kept)
        self._vectors, self._live = Rows(mapped(folder / VECTORS, np.float32), folder / VECTORS), None
        arrays = {"numbers": self._numbers, "built": np.array([self.built], np.int64)}
        if self.codes is not None:
            files.append(CODES)
            self.codes.rows.write(folder / CODES, kept)
            self.codes = self.codes.without(kept, Rows(mapped(folder / CODES, np.uint8)))
            arrays |= {**self.codes.arrays, "quality": np.array([self.rescored, self.recall], np.float64)}
        write_arrays(folder, arrays, *files)


class Codes:
    """The codes of vectors by row, and faiss's index of them. If the codes are routed, a tree's leaves lead the scan.

    Attributes:
        arrays: the arrays saved next to the codes. "codebook" has shape (M, 16, width), float32: each of a vector's
            M codes stands for `width` dimensions, the last one perhaps for fewer. "fit", float64, has the training
            sample's mean squared error, how many vectors were added since, and their mean error. Routed codes also
            have "leaves", the centroids, (L, n), float32; "home", the leaf of each vector, int64; and "probes", how
            many leaves a scan visits. Equal vectors can be in two leaves, if one was added later.
        rows: the codes, of shape (N, bytes per vector), uint8.
    """

    def __init__(self, arrays: dict[str, np.ndarray], rows: Rows) -> None:
        self.arrays, self.rows = arrays, rows
        codebook, self.is_routed = arrays["codebook"], "leaves" in arrays
        self.width = codebook.shape[2]
        self._quantizer = faiss.ProductQuantizer(len(codebook) * self.width, len(codebook), BITS)
        faiss.copy_array_to_vector(np.ascontiguousarray(codebook).ravel(), self._quantizer.centroids)
        self._index = self._routed() if self.is_routed else self._scanned(rows)

    @classmethod
    def build(cls, vectors: np.ndarray, width: int, tree: Hierarchy | None = None) -> Codes:
        """Train a codebook on vectors (N, n), encode all, and let a tree lead scans."""
        parts = -(-vectors.shape[1] // width)
        quantizer = faiss.ProductQuantizer(parts * width, parts, BITS)
        quantizer.cp.niter = ROUNDS
        # Sample in blocks: for each row read from a mapped file, the system reads many pages around it.
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
        error = _error(quantizer, sample, quantizer.compute_codes(sample)) / len(sample)
        arrays = {"codebook": codebook, "fit": np.array([error, 0, 0])}
        counts = [tree.node_count(level) for level in range(tree.depth)] if tree else []
        # Use the finest level whose nodes are large enough, unless it has so few nodes that they save no time.
        fine = max((level for level, n in enumerate(counts) if not level or n * LEAF <= len(vectors)), default=0)
        if tree is not None and counts[fine] ** 2 >= len(vectors):
            arrays |= {"leaves": tree.levels[fine - 1].centroids, "home": tree.nodes_at(fine), "probes": np.array([1])}
        return cls(arrays, Rows(rows))

    def append(self, vectors: np.ndarray) -> None:
        """Encode further vectors, and add them to the scan."""
        padded = _padded(vectors, self.width)
        codes = self._quantizer.compute_codes(padded)
        error, added, added_error = self.arrays["fit"]
        total = added_error * added + _error(self._quantizer, padded, codes)
        self.arrays["fit"] = np.array([error, added + len(codes), total / (added + len(codes))])
        if self.is_routed:
            self._index.add_with_ids(padded, np.arange(len(self.rows), len(self.rows) + len(codes)))
            self.arrays["home"] = np.concatenate([self.arrays["home"], self._finder.search(padded, 1)[1][:, 0]])
        else:
            self._index.add(padded)
        self.rows.append(codes)

    def scan(self, queries: np.ndarray, count: int) -> Found:
        """Find rows with roughly the largest inner products; −1 if leaves have too few."""
        params = faiss.SearchParametersIVF(nprobe=int(self.arrays["probes"][0])) if self.is_routed else None
        scores, rows = self._index.search(_padded(queries, self.width), count, params=params)
        return Found(rows, scores)

    def look_into(self, share: float) -> None:
        """Make scans visit a share of the leaves."""
        self.arrays["probes"] = np.array([max(1, math.ceil(share * len(self.arrays["leaves"])))])

    def without(self, kept: np.ndarray | None, rows: Rows) -> Codes:
        """Return these codes for the rows of a new file: the kept ones, or all."""
        if kept is not None:
            return Codes(self.arrays | ({"home": self.arrays["home"][kept]} if self.is_routed else {}), rows)
        self.rows = rows
        return self

    @classmethod
    def loaded(cls, arrays: dict[str, np.ndarray], codes: np.ndarray, shape: tuple[int, int]) -> Codes:
        """Make codes from loaded arrays; ValueError if faiss could crash on them."""
        count, dim = shape
        codebook = checked(arrays["codebook"], np.float32, (None, 1 << BITS, None), -MOST, MOST)
        parts, _, width = codebook.shape
        require(width in (NARROW, WIDE) and parts == -(-dim // width), f"a codebook of {parts} × {width}")
        require(codes.shape == (count, (parts * BITS + 7) // 8), f"codes of shape {codes.shape}")
        known = {"codebook": codebook, "fit": checked(arrays["fit"], np.float64, (3,))}
        if "leaves" in arrays:
            leaves = checked(arrays["leaves"], np.float32, (None, dim), -MOST, MOST)
            home = checked(arrays["home"], np.int64, (count,), 0, len(leaves) - 1)
            known |= {
                "leaves": leaves,
                "home": home,
                "probes": checked(arrays["probes"], np.int64, (1,), 1, len(leaves)),
            }
        return cls(known, Rows(codes))

    def _scanned(self, rows: Rows) -> faiss.IndexPQFastScan:
        """Make faiss's index that scans the codes of all rows."""
        plain = faiss.IndexPQ(self._quantizer.d, self._quantizer.M, BITS, faiss.METRIC_INNER_PRODUCT)
        plain.pq, plain.is_trained = self._quantizer, True
        for _, block in rows.blocks():
            plain.add_sa_codes(block)
        return faiss.IndexPQFastScan(plain)

    def _routed(self) -> faiss.IndexIVFPQFastScan:
        """Make faiss's index of codes by leaf.

        The codes are added to a plain index first: `add_sa_codes` of the fast one stores garbage. A search finds
        leaves by the codes of their centroids.
        """
        quantizer, leaves, home = self._quantizer, self.arrays["leaves"], self.arrays["home"]
        self._finder = self._scanned(Rows(quantizer.compute_codes(_padded(leaves, self.width))))
        plain = faiss.IndexIVFPQ(self._finder, quantizer.d, len(leaves), quantizer.M, BITS, faiss.METRIC_INNER_PRODUCT)
        plain.by_residual, plain.pq, plain.is_trained = False, quantizer, True
        for start, block in self.rows.blocks():
            places = home[start : start + len(block)].astype("<i8")[:, None].view(np.uint8)
            codes = np.concatenate([places[:, : plain.coarse_code_size()], block], axis=1)
            plain.add_sa_codes(codes, np.arange(start, start + len(block)))
        return faiss.IndexIVFPQFastScan(plain)


def _error(quantizer: faiss.ProductQuantizer, vectors: np.ndarray, codes: np.ndarray) -> float:
    """Return the sum of the squared errors of codes."""
    return float(((quantizer.decode(codes) - vectors) ** 2).sum())


def _padded(vectors: np.ndarray, width: int) -> np.ndarray:
    """Return contiguous vectors, padded so that `width` divides their dimensions."""
    rows = np.ascontiguousarray(vectors, dtype=np.float32)
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % width))) if rows.shape[1] % width else rows


# ------------------------------------------------------------------------------------------------- passages


class Nearest(NamedTuple):
    """The documents nearest to each query, as in `Found`."""

    numbers: np.ndarray
    scores: np.ndarray
    passage_numbers: np.ndarray  # of the passages with these scores, (Q, k); 0 is the document's own vector


class PassageEngine:
    """Vectors of passages by number, and the document of each."""

    def __init__(self, engine: VectorEngine, passage_numbers: np.ndarray, documents: np.ndarray) -> None:
        self.engine = engine
        self.passage_numbers = passage_numbers  # rising, (P,), int64
        self.documents = documents  # the number of each passage's document, (P,), int64

    @classmethod
    def build(
        cls, name: str, dim: int, passage_numbers: np.ndarray, documents: np.ndarray, vectors: np.ndarray
    ) -> PassageEngine:
        """Build an engine of P passages; `vectors` has shape (P, n)."""
        engine = new_engine(name, dim, numbers=passage_numbers, vectors=vectors)
        return cls(engine, passage_numbers, documents)

    def __len__(self) -> int:
        return len(self.passage_numbers)

    def add(self, passage_numbers: np.ndarray, documents: np.ndarray, vectors: np.ndarray) -> None:
        """Add passages under rising numbers above all earlier ones."""
        self.engine.add(passage_numbers, vectors)
        self.passage_numbers = np.concatenate([self.passage_numbers, passage_numbers])
        self.documents = np.concatenate([self.documents, documents])

    def remove(self, documents: np.ndarray) -> None:
        """Remove the passages of documents; a document that has none is ignored."""
        gone = np.isin(self.documents, documents)
        if gone.any():
            self.engine.remove(self.passage_numbers[gone])
            self.passage_numbers, self.documents = self.passage_numbers[~gone], self.documents[~gone]

    def merged_with(self, whole: Found, queries: np.ndarray, k: int, allowed: np.ndarray | None = None) -> Nearest:
        """Merge passages into the documents found; return the k nearest, each once.

        A document is as near as its own vector or its nearest passage, whichever is nearer. `whole` has the k documents
        whose own vectors are nearest to the queries (Q, n). `allowed` has the documents to search among, rising.
        """
        allowed_passages = None if allowed is None else self.passage_numbers[np.isin(self.documents, allowed)]
        available = len(self) if allowed_passages is None else len(allowed_passages)
        nearest = Nearest(*nothing(len(queries), k), np.zeros((len(queries), k), np.int64))
        unsure, count = np.arange(len(queries)), min(k, available)
        while len(unsure):
            found = self.engine.search(queries[unsure], count, allowed_passages) if count else nothing(len(unsure), 0)
            self._fill(nearest, unsure, whole, found, k)
            if count == available:
                break
            # If the last passage is as good as the last document, a passage not fetched yet may beat that document.
            unsure = unsure[found.scores[:, -1] >= nearest.scores[unsure, -1]]
            count = min(WIDER * count, available)
        return nearest

    def _fill(self, nearest: Nearest, rows: np.ndarray, whole: Found, found: Found, k: int) -> None:
        """Rank documents by their own vectors and by the passages found."""
        for row, numbers, scores in zip(rows.tolist(), found.numbers, found.scores, strict=True):
            there = numbers >= 0
            passage_numbers = np.concatenate([np.zeros(whole.numbers.shape[1], np.int64), numbers[there]])
            of_passages = self.documents[np.searchsorted(self.passage_numbers, numbers[there])]
            documents = np.concatenate([whole.numbers[row], of_passages])
            both = np.concatenate([whole.scores[row], scores[there]])
            order = np.lexsort((passage_numbers, documents, -both))
            order = order[documents[order] >= 0]
            order = order[np.sort(np.unique(documents[order], return_index=True)[1])][:k]  # the best of each document
            for column, values in zip(nearest, (documents, both, passage_numbers), strict=True):
                column[row, : len(order)] = values[order]

    def save(self, folder: Path) -> None:
        """Write everything into an existing, empty folder."""
        (folder / ENGINE_FOLDER).mkdir()
        self.engine.save(folder / ENGINE_FOLDER)
        write_arrays(folder, {"numbers": self.passage_numbers, "documents": self.documents})

    @classmethod
    def load(cls, name: str, folder: Path, dim: int) -> PassageEngine:
        """Load a saved engine; FormatError if it is damaged or missing."""
        engine = load_engine(name, folder / ENGINE_FOLDER, dim)
        with reading(folder) as arrays:
            numbers, documents = rising(arrays["numbers"]), checked(arrays["documents"], np.int64, (len(engine),))
            require(np.array_equal(engine.numbers, numbers), f"{len(engine)} vectors, {len(numbers)} numbers")
        return cls(engine, numbers, documents)


# ------------------------------------------------------------------------------------------------- exact search

# Equal texts have equal vectors, so ties are common, also at the last place. To order such a tie by number, all tied
# vectors are needed: more candidates are fetched until one of them is clearly worse than the last one wanted.


def nothing(queries: int, k: int) -> Found:
    """Return an empty result: numbers −1 and scores −∞, each of shape (queries, k)."""
    return Found(np.full((queries, k), -1, np.int64), np.full((queries, k), -np.inf, np.float32))


def k_best(candidates: Found, k: int) -> Found:
    """Return each query's k best candidates, ties by number; −1 is no candidate."""
    is_in_order = (candidates.scores[:, 1:] < candidates.scores[:, :-1]).all() and (candidates.numbers >= 0).all()
    if candidates.scores.shape[1] >= k and is_in_order:
        return Found(candidates.numbers[:, :k], candidates.scores[:, :k])  # in order already: no ties
    scores = np.where(candidates.numbers < 0, -np.inf, candidates.scores).astype(np.float32)
    order = np.lexsort((candidates.numbers, -scores), axis=1)[:, :k]
    found = nothing(len(scores), k)
    found.scores[:, : order.shape[1]] = np.take_along_axis(scores, order, axis=1)
    found.numbers[:, : order.shape[1]] = np.take_along_axis(candidates.numbers, order, axis=1)
    return found


def search_exactly(
    fetch: Callable[[np.ndarray, int], Found],
    available: int,
    queries: np.ndarray,
    k: int,
    slack: float = 0.0,
    *,
    wanted: int | None = None,
    score: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
) -> Found:
    """Find the k best vectors among the candidates of `fetch`, ties by number.

    Whether a candidate is ranked depends only on its score, not on excluded vectors or on other queries. Of vectors
    with equal scores, either all are candidates or none.

    `fetch` takes queries (Q, n) and how many candidates to return for each, best first. The number −1 marks an excluded
    candidate, and the score −∞ the end. `available` is the number of vectors not excluded. `fetch` may score equal
    vectors differently, by `slack` at most. The best `wanted` (k by default) are scored again by `score`, if given.
    """
    wanted = min(wanted or k, available)
    found, left, count = nothing(len(queries), k), np.arange(len(queries)), wanted + EXTRA_CANDIDATES
    while available and len(left):
        count = min(count, available)
        again = []
        for query, numbers, scores in zip(left.tolist(), *fetch(queries[left], count), strict=True):
            last, there = scores[-1], numbers >= 0
            if not there.all():
                numbers, scores = numbers[there], scores[there]
            least = scores[wanted - 1] - slack if len(numbers) >= wanted else -np.inf
            if least <= last > -np.inf and count < available:
                again.append(query)
                continue
            numbers, scores = numbers[scores >= least], scores[scores >= least]
            if score is not None:
                scores = score(queries[query], numbers)
            order = np.lexsort((numbers, -scores))[:k]
            found.numbers[query, : len(order)] = numbers[order]
            found.scores[query, : len(order)] = scores[order]
        left, count = np.array(again, np.int64), 4 * count
    return found


def inner_products(vectors: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Compute the inner products of rows (m, n) with a query, one by one."""
    # In a matrix product, rounding can differ between equal rows, depending on their places in a block.
    return np.asarray(np.einsum("mn,n->m", vectors, query))


def score_blocks(queries: np.ndarray, documents: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield slices of queries (Q, n), and their inner products with documents (N, n)."""
    table, at_once = np.asarray(documents).T, max(1, SCORES_AT_ONCE // max(len(documents), 1))
    for start in range(0, len(queries), at_once):
        rows = slice(start, min(start + at_once, len(queries)))
        yield rows, queries[rows] @ table


def nearest(queries: np.ndarray, documents: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the k nearest documents (N, n) for each query (Q, n).

    Returns positions and scores, both (Q, min(k, N)), best first, ties in the order of documents.
    """
    import torch  # torch's topk is by far the fastest; searching an index needs no torch

    shape = (len(queries), min(k, len(documents)))
    positions, scores = np.empty(shape, np.int64), np.empty(shape, np.float32)
    for rows, block in score_blocks(queries, documents):
        best, where = (each.numpy() for each in torch.from_numpy(block).topk(shape[1], dim=1))
        order = np.lexsort((where, -best), axis=1)
        scores[rows] = np.take_along_axis(best, order, axis=1)
        positions[rows] = np.take_along_axis(where, order, axis=1)
    return positions, scores


# ------------------------------------------------------------------------------------------------- files


class Rows:
    """Rows of an array that never changes, and rows appended to them.

    A file is mapped twice: once with read-ahead, to read all rows in order, and once without, to pick single rows. With
    read-ahead, a search of five million vectors would read 256 MB from a cold disk; without, it reads 2 MB.
    """

    def __init__(self, base: np.ndarray, path: Path | None = None) -> None:
        self._base = self._picked = base
        if path is not None:
            self._picked = mapped(path, base.dtype)
            if isinstance(self._picked.base, mmap.mmap) and hasattr(mmap, "MADV_RANDOM"):
                self._picked.base.madvise(mmap.MADV_RANDOM)
        self._more = np.empty((0, base.shape[1]), base.dtype)  # appended rows, then free space
        self._count = len(base)

    def __len__(self) -> int:
        return self._count

    def append(self, rows: np.ndarray) -> None:
        """Append rows; double the space for them whenever it is full."""
        start = self._count - len(self._base)
        if start + len(rows) > len(self._more):
            room = np.empty((max(2 * len(self._more), start + len(rows)), self._base.shape[1]), self._base.dtype)
            room[:start] = self._more[:start]
            self._more = room
        self._more[start : start + len(rows)] = rows
        self._count += len(rows)

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        """Copy the rows at the positions `rows`, of shape (m,), int64."""
        if self._count == len(self._base):
            return np.asarray(self._picked[rows])
        is_more = rows >= len(self._base)
        found = np.empty((len(rows), self._base.shape[1]), self._base.dtype)
        found[~is_more] = self._picked[rows[~is_more]]
        found[is_more] = self._more[rows[is_more] - len(self._base)]
        return found

    def blocks(self, chosen: np.ndarray | None = None) -> Iterator[tuple[int, np.ndarray]]:
        """Yield all rows, or copies of chosen ones, in blocks; each with its start."""
        if chosen is not None:
            yield from ((start, self[chosen[start : start + AT_ONCE]]) for start in range(0, len(chosen), AT_ONCE))
            return
        for start, part in ((0, self._base), (len(self._base), self._more[: self._count - len(self._base)])):
            for first in range(0, len(part), AT_ONCE):
                yield start + first, np.asarray(part[first : first + AT_ONCE])

    def write(self, path: Path, chosen: np.ndarray | None = None) -> None:
        """Write rows to a file as an array, block by block, without copying all at once."""
        shape = (self._count if chosen is None else len(chosen), self._base.shape[1])
        with path.open("wb") as file:
            header = {"descr": self._base.dtype.str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for _, block in self.blocks(chosen):
                file.write(np.ascontiguousarray(block).data)


def write_arrays(folder: Path, arrays: dict[str, np.ndarray], *others: str) -> None:
    """Write small arrays, and checksums of their file and of other files."""
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, folder / ARRAYS)
    write_checksums(folder, [ARRAYS, *others])


@contextmanager
def reading(folder: Path) -> Iterator[dict[str, np.ndarray]]:
    """Yield saved arrays if all checksums match; convert errors to a FormatError."""
    try:
        damaged = damage_in(folder)
        require(damaged is not None, "it has no checksums")
        require(not damaged, "; ".join(damaged or []))
        yield load_file(plain_path(folder / ARRAYS))
    except Exception as error:
        raise FormatError(
            f"{folder}: the search engine is damaged ({one_line(error)}); it has to be rebuilt"
        ) from error


def mapped(path: Path, dtype: DTypeLike) -> np.ndarray:
    """Map rows into memory; ValueError for another type, or a truncated file."""
    rows: np.ndarray = np.load(plain_path(path), mmap_mode="r", allow_pickle=False)
    require(rows.dtype == dtype and rows.ndim == 2 and rows.flags.c_contiguous, f"{path.name} has no such rows")
    return rows


def checked(
    array: np.ndarray, dtype: DTypeLike, shape: tuple[int | None, ...], least: float = -np.inf, most: float = np.inf
) -> np.ndarray:
    """Check type, shape (None is any length) and bounds of an array; refuse NaN."""
    fits = len(shape) == array.ndim and all(w in (None, h) for w, h in zip(shape, array.shape, strict=True))
    require(array.dtype == dtype and fits, f"an array of shape {array.shape} and {array.dtype}")
    within = np.isfinite(array) & (array >= least) & (array <= most)
    require(bool(within.all()), "an array with a number out of bounds")
    return array


def rising(array: np.ndarray) -> np.ndarray:
    """Return an array if its numbers rise and none is negative; else ValueError."""
    require(bool((np.diff(checked(array, np.int64, (None,), 0)) > 0).all()), "numbers do not rise")
    return array


def require(condition: bool, complaint: str) -> None:
    """Raise ValueError unless a condition holds; `reading` makes it a FormatError."""
    if not condition:
        raise ValueError(complaint)
