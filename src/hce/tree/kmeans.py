"""Spherical k-means: the paper's Alg. 2 run to convergence, and a fast mode for many clusters.

Rows go in; unit centroids and a cluster per row come out. Rows are read in chunks and normalized when read, so a
memory-mapped file is never copied completely. On the CPU NumPy does the work: its products and maxima are faster than
torch's. On a GPU torch computes both.

The paper does not say what happens to empty clusters, which random assignments may leave. Here they are filled with the
worst-fitting rows (`fill_empty`), so that every node of a tree has a child.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Literal, NamedTuple, TypeVar, get_args

import numpy as np
import torch
from scipy import sparse
from threadpoolctl import ThreadpoolController  # scikit-learn brings it

from hce.errors import InputError
from hce.files import give_back
from hce.processes import share_out

logger = logging.getLogger(__name__)

# Scores closer than this are ties, which move no row. Float32 noise of a 384-term dot product is near 1e-7.
TIE = 5e-7
# Rows of up to this many bytes in all are held as one unit float32 copy; more are read from the input each time.
HOLD_BYTES = 512 * 2**20
# Products are computed in blocks of this many bytes, one per worker, to stay in the processor's cache.
_BLOCK_BYTES = 16 * 2**20
_TILE = 8192  # centroids in a block
_SCATTERED = 1024  # scattered rows of a mapped file to read at once; the system may map up to 2 MB around each

T = TypeVar("T")
R = TypeVar("R")
KMeansMode = Literal["auto", "exact", "fast"]
Init = Literal["points", "random"]
Report = Callable[[int, float], None]


class KMeansResult(NamedTuple):
    """A clustering of N rows into k clusters, none of them empty.

    Each row is assigned to its nearest centroid, or to one whose inner product is less than 1e-6 lower. In fast mode,
    one row in thousands has another centroid slightly nearer; with millions of rows, one in seventy.
    """

    centroids: np.ndarray  # unit rows of shape (k, n), float32
    assignment: np.ndarray  # (N,), int64
    mean_cosines: tuple[float, ...]  # of the rows to their centroids, after each round; they never fall
    converged: bool  # False if the rounds ran out first


def spherical_kmeans(
    vectors: np.ndarray | torch.Tensor,  # (N, n), np.memmap included; the lengths of rows are ignored
    k: int,
    *,
    seed: int = 0,
    mode: KMeansMode = "auto",
    init: Init = "points",
    max_rounds: int = 256,  # the paper's runs took fewer
    device: torch.device | str | None = None,  # where products are computed; by default the tensor's device, or the CPU
    on_round: Report = lambda number, mean_cosine: None,  # called after each round
) -> KMeansResult:
    """Cluster the directions of `vectors` into k non-empty clusters.

    The mode "exact" is Alg. 2: each round compares every row with every centroid. "fast" starts from a two-level
    clustering, compares rows with nearby centroids only, and also makes single-row moves that Alg. 2 never makes.
    "auto" is fast if N·k > 2^24 and k ≥ 64.

    Exact mode starts from `init`: "random" is the paper's a_i ~ Unif{1..k}; "points" takes k rows as centroids. On four
    sets of real vectors, at 8 rows per cluster, "points" ended at a higher mean cosine (by .0005 to .043) after fewer
    rounds (11 to 16 instead of 14 to 22). If there are fewer distinct directions than k, equal rows are split over
    clusters with equal centroids.
    """
    if isinstance(vectors, torch.Tensor):
        device = device or vectors.device
        known = vectors.float() if vectors.dtype == torch.bfloat16 else vectors  # NumPy has no bfloat16
        vectors = known.detach().cpu().numpy()
    array = np.asarray(vectors)
    _check(array, k, mode, init, max_rounds)
    rows = unit_rows(array, torch.device(device or "cpu"))
    rng = np.random.default_rng(seed)
    if mode == "fast" or (mode == "auto" and _fast_pays(len(rows), k)):
        from hce.tree.kmeans_fast import fast_kmeans  # here, because it imports this module

        result = KMeansResult(*fast_kmeans(rows, k, rng, max_rounds, on_round))
    else:
        result = _exact_kmeans(rows, _first_centroids(rows, k, init, rng), max_rounds, on_round)
    if not result.converged:
        logger.warning("k-means of %d rows into %d: still moving after %d rounds", len(rows), k, max_rounds)
    return result


def _exact_kmeans(rows: Rows, centroids: np.ndarray, max_rounds: int, report: Report) -> KMeansResult:
    """Run Alg. 2 from given centroids, until no assignment changes.

    No step lowers the mean cosine. The normalized sum is the direction with the best total score for its members. A
    row only moves to a better centroid. Filling an empty cluster lowers no row's score.
    """
    assignment: np.ndarray | None = None
    mean_cosines: list[float] = []
    while True:
        new, best = assign(rows, centroids, assignment)
        fill_empty(rows, centroids, new, best)
        mean_cosines.append(float(best.mean(dtype=np.float64)))
        report(len(mean_cosines), mean_cosines[-1])
        converged = assignment is not None and np.array_equal(new, assignment)
        assignment = new
        if converged or len(mean_cosines) == max_rounds:
            return KMeansResult(centroids, assignment, tuple(mean_cosines), converged)
        centroids = normalized(member_sums(rows, assignment, len(centroids)), rows, assignment)


def _first_centroids(rows: Rows, k: int, init: Init, rng: np.random.Generator) -> np.ndarray:
    if init == "points":
        return rows.take(np.sort(rng.choice(len(rows), size=k, replace=False)))
    assignment = rng.integers(k, size=len(rows))
    missing = np.setdiff1d(np.arange(k), assignment)
    assignment[spare_rows(assignment, np.zeros(len(rows)), k, len(missing))] = missing
    return normalized(member_sums(rows, assignment, k), rows, assignment)


def _fast_pays(count: int, k: int) -> bool:
    # With 5,183 rows and k = 648, exact took 0.6 s and fast 1.0; with 20,958 rows and k = 2,620, 3.8 and 3.2 s.
    return count * k > 2**24 and k >= 64


def _check(vectors: np.ndarray, k: int, mode: str, init: str, max_rounds: int) -> None:
    if vectors.ndim != 2 or 0 in vectors.shape:
        raise InputError(f"The vectors have shape {vectors.shape}; pass a non-empty array of shape (rows, dimensions).")
    if not np.issubdtype(vectors.dtype, np.floating):
        raise InputError(f"The vectors are of type {vectors.dtype}; convert them to a floating-point type.")
    if not isinstance(k, (int, np.integer)) or not 1 <= k <= len(vectors):
        raise InputError(
            f"k = {k!r} clusters of {len(vectors)} rows; choose a whole number from 1 to the number of rows."
        )
    for name, value, allowed in (("mode", mode, get_args(KMeansMode)), ("init", init, get_args(Init))):
        if value not in allowed:
            raise InputError(f"{name} = {value!r} is unknown; choose one of {', '.join(allowed)}.")
    if max_rounds < 1:
        raise InputError(f"max_rounds = {max_rounds} leaves no round to run; pass 1 or more.")


# ------------------------------------------------------------------------------------------------- rows


class Rows:
    """Unit float32 rows, of shape (N, n): held in memory, or read from an array too large to copy."""

    def __init__(
        self,
        source: np.ndarray,
        device: torch.device,  # where products with the rows are computed
        *,
        is_held: bool = True,  # whether the source is in memory, as unit float32 rows
        is_unit: bool = True,  # for a source that is not held: whether its rows are unit vectors
        index: np.ndarray | None = None,  # the rows of the source to use; by default all
    ) -> None:
        self._source, self.device, self._index = source, device, index
        self._is_held, self._is_unit = is_held, is_unit
        self.shape: tuple[int, int] = (len(source) if index is None else len(index), source.shape[1])

    def __len__(self) -> int:
        return self.shape[0]

    def span(self, start: int, stop: int) -> np.ndarray:
        """Return rows start..stop, of shape (stop - start, n)."""
        if self._is_held:
            return self._source[start:stop]
        return self._read(slice(start, stop)) if self._index is None else self._scattered(self._index[start:stop])

    def take(self, index: np.ndarray) -> np.ndarray:
        """Return the rows at the given positions, of shape (len(index), n)."""
        if self._is_held:
            return self._source.take(index, axis=0)
        return self._scattered(index if self._index is None else self._index[index])

    def subset(self, index: np.ndarray) -> Rows:
        """Return the rows at the given positions as `Rows` of their own."""
        # Several subsets may be in use at once, so a large one is not copied.
        if self._is_held or len(index) * self.shape[1] * 4 <= HOLD_BYTES // 8:
            return Rows(self.take(index), self.device)
        index = index if self._index is None else self._index[index]
        return Rows(self._source, self.device, is_held=False, is_unit=self._is_unit, index=index)

    def chunks(self, width: int) -> list[tuple[int, int]]:
        """Return ranges of rows whose blocks of `width` float32 columns are small."""
        return chunk_ranges(len(self), max(width, self.shape[1]))

    def _scattered(self, index: np.ndarray) -> np.ndarray:
        """Return scattered rows of the source, a few at a time to map little memory."""
        found = np.empty((len(index), self.shape[1]), dtype=np.float32)
        for start in range(0, len(index), _SCATTERED):
            found[start : start + _SCATTERED] = self._read(index[start : start + _SCATTERED])
        return found

    def _read(self, picked: slice | np.ndarray) -> np.ndarray:
        """Return some rows of an array, and release the pages of a mapped file."""
        block = np.array(self._source[picked])  # a copy, which needs no page of the file
        give_back()
        return block if self._is_unit else _unit(block)


def unit_rows(vectors: np.ndarray, device: torch.device) -> Rows:
    """Return the rows as unit vectors, (N, n); fail if one is zero or not finite."""
    source = np.asarray(vectors)  # a plain view: indexing an np.memmap itself costs far more
    hold = source.size * 4 <= HOLD_BYTES
    held = np.empty(source.shape, dtype=np.float32) if hold else None
    is_unit = source.dtype == np.float32
    for start, stop in chunk_ranges(*source.shape):
        block = source[start:stop]
        largest = np.abs(block).max(axis=1)  # NaN and infinity both survive the maximum
        for bad, what in (
            (~np.isfinite(largest), "holds a NaN or an infinity"),
            (largest == 0, "is all zeros and has no direction"),
        ):
            if bad.any():
                row = start + int(bad.argmax())
                raise InputError(f"Row {row} of the vectors {what}; remove or re-encode that row.")
        if held is not None:
            held[start:stop] = _unit(block)
        elif is_unit:
            is_unit = bool((np.abs(np.einsum("ij,ij->i", block, block) - 1) < 4 * TIE).all())
    return Rows(source, device, is_held=False, is_unit=is_unit) if held is None else Rows(held, device)


def _unit(block: np.ndarray) -> np.ndarray:
    # Divide by the largest entry first: squares of tiny or huge entries would under- or overflow.
    scaled = (block / np.abs(block).max(axis=1, keepdims=True)).astype(np.float32, copy=False)
    return scaled / np.sqrt(np.einsum("ij,ij->i", scaled, scaled))[:, None]


def chunk_ranges(count: int, width: int) -> list[tuple[int, int]]:
    """Cut range(count) into parts whose blocks of `width` float32 columns are small."""
    size = max(64, _BLOCK_BYTES // (4 * max(1, width)))
    return [(start, min(start + size, count)) for start in range(0, count, size)]


# ------------------------------------------------------------------------------------------------- work in threads


def run_all(task: Callable[[T], R], items: Sequence[T], device: torch.device) -> list[R]:
    """Run the task on every item, in order; several processes each run a share.

    On the CPU, tasks run side by side in threads, and each product uses one thread. For many small products this is
    faster than several threads in each product, which wait for one another every time.
    """

    def run_own(own: Sequence[T]) -> list[R]:
        threads = torch.get_num_threads()
        if device.type != "cpu" or threads == 1:
            return [task(item) for item in own]
        with _blas().limit(limits=1), ThreadPoolExecutor(threads) as pool:
            return list(pool.map(task, own))

    return share_out(run_own, items)


@cache  # finding the BLAS libraries of the process takes milliseconds
def _blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")


def end_to_end(parts: Iterable[Sequence[np.ndarray]]) -> tuple[np.ndarray, ...]:
    """Join the first arrays of all parts, the second arrays of all parts, and so on."""
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))


def on_device(array: np.ndarray, device: torch.device) -> np.ndarray | torch.Tensor:
    """Copy an array to a GPU; return it unchanged for the CPU."""
    # NumPy's BLAS is twice as fast as torch's on AMD (200 and 110 GFLOP/s measured), and as fast elsewhere.
    return array if device.type == "cpu" else torch.from_numpy(array).to(device)


def scores(rows: np.ndarray, centroids: np.ndarray, device: torch.device) -> np.ndarray:
    """Return inner products of shape (rows, centroids), computed on the device."""
    there = on_device(centroids, device)
    if isinstance(there, np.ndarray):
        return np.asarray(rows @ there.T)
    return np.asarray((torch.from_numpy(rows).to(device) @ there.T).cpu().numpy())


def best_of(rows: np.ndarray, centroids: np.ndarray | torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's best centroid and its inner product, both of shape (rows,)."""
    if isinstance(centroids, np.ndarray):
        block = rows @ centroids.T
        column = block.argmax(axis=1)
        return column, np.take_along_axis(block, column[:, None], axis=1)[:, 0]
    value, best = (torch.from_numpy(rows).to(centroids.device) @ centroids.T).max(dim=1)
    return best.cpu().numpy(), value.cpu().numpy()


def own_scores(block: np.ndarray, centroids: np.ndarray, assignment: np.ndarray) -> np.ndarray:
    """Return each row's inner product with its cluster's centroid, (rows,)."""
    return np.asarray(np.einsum("ij,ij->i", block, centroids.take(assignment, axis=0)))


def assign(rows: Rows, centroids: np.ndarray, assignment: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's nearest centroid and its score: the M step of Alg. 2.

    With the current `assignment`, a row moves only to a centroid that is better by more than a tie. Otherwise equal
    centroids (of duplicates split over several clusters) could trade rows forever.
    """
    tiles = [on_device(centroids[start : start + _TILE], rows.device) for start in range(0, len(centroids), _TILE)]

    def one_chunk(limits: tuple[int, int]) -> tuple[np.ndarray, ...]:
        block = rows.span(*limits)
        column, value = best_of(block, tiles[0])
        for number, tile in enumerate(tiles[1:], 1):
            other, other_value = best_of(block, tile)
            better = other_value > value
            column[better], value[better] = other[better] + number * _TILE, other_value[better]
        if assignment is not None:
            present = assignment[slice(*limits)]
            own = own_scores(block, centroids, present)
            stay = value <= own + TIE
            column[stay], value[stay] = present[stay], own[stay]
        return column, value

    new, best = end_to_end(run_all(one_chunk, rows.chunks(min(len(centroids), _TILE)), rows.device))
    return new, best


def member_sums(rows: Rows, assignment: np.ndarray, k: int) -> np.ndarray:
    """Sum each cluster's rows in row order: float64, of shape (k, n)."""
    sums = np.zeros((k, rows.shape[1]))
    order = np.argsort(assignment, kind="stable")
    for start, stop in rows.chunks(0):
        index = order[start:stop]
        owner, first = np.unique(assignment[index], return_index=True)
        members = (np.ones(len(index)), np.arange(len(index)), np.append(first, len(index)))
        sums[owner] += sparse.csr_matrix(members, (len(owner), len(index))) @ rows.take(index)
    return sums


def normalized(sums: np.ndarray, rows: Rows, assignment: np.ndarray) -> np.ndarray:
    """Return the centroids of summed members, unit rows (k, n): E step of Alg. 2.

    A sum of zero has no direction. Then the cluster's first member is its centroid, as good as any other direction.
    """
    norms = np.linalg.norm(sums, axis=1, keepdims=True)
    centroids = (sums / np.maximum(norms, 1e-12)).astype(np.float32)
    for cluster in np.flatnonzero(norms < 1e-6).tolist():
        centroids[cluster] = rows.take(np.flatnonzero(assignment == cluster)[:1])[0]
    return centroids


def fill_empty(rows: Rows, centroids: np.ndarray, assignment: np.ndarray, best: np.ndarray) -> None:
    """Give every empty cluster a member, in place; no row's score falls.

    The empty cluster's centroid becomes the worst-fitting row of a cluster of two or more. Every row nearer to this row
    than to its own centroid joins. That may empty another cluster, so the step repeats. The repeats end, because each
    one raises the total score, or splits duplicates and empties nothing.
    """
    k = len(centroids)
    while (empty := np.flatnonzero(np.bincount(assignment, minlength=k) == 0)).size:
        donors = spare_rows(assignment, best, k, len(empty))
        empty = empty[: len(donors)]
        centroids[empty] = rows.take(donors)
        filled = on_device(centroids[empty], rows.device)
        for start, stop in rows.chunks(len(empty)):
            column, score = best_of(rows.span(start, stop), filled)
            moves = score > best[start:stop] + TIE
            assignment[start:stop][moves] = empty[column[moves]]
            best[start:stop][moves] = score[moves]
        # Equal rows as donors give equal centroids. Each donor joins the cluster it fills: a tie, so no score falls.
        assignment[donors] = empty
        best[donors] = np.maximum(best[donors], 1 - TIE)


def spare_rows(assignment: np.ndarray, best: np.ndarray, k: int, count: int) -> np.ndarray:
    """Return the `count` lowest-scoring rows that can leave with no cluster emptied."""
    sizes = np.bincount(assignment, minlength=k)
    order = np.lexsort((best, assignment))  # cluster by cluster, worst first
    first = np.cumsum(sizes) - sizes
    rank = np.arange(len(order)) - first[assignment[order]]
    spare = order[rank < sizes[assignment[order]] - 1]  # all but each cluster's best-fitting row
    return spare[np.argsort(best[spare], kind="stable")][:count]
