"""Spherical k-means: the paper's Alg. 2 run to convergence, and a fast mode for many clusters.

Knows nothing of trees or documents: rows in, unit centroids and one cluster a row out. Rows are read in chunks and
normalized when read, so a memory-mapped file is never copied completely. Where a step differs between the CPU
and other devices, NumPy or SciPy is much faster than torch on the CPU.
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
from hce.memory import give_back
from hce.processes import share_out

logger = logging.getLogger(__name__)

# Scores closer than this are ties (float32 noise of a 384-term dot product is near 1e-7), and a tie moves nobody.
TIE = 5e-7
# Rows up to this many bytes are held as one unit float32 copy; beyond it they are read from the input each time.
HOLD_BYTES = 512 * 2**20
# Products are made in blocks of this many bytes, one a worker, which stay in the processor's cache.
_BLOCK_BYTES = 16 * 2**20
_TILE = 8192  # centroids in a block
_SCATTERED = 1024  # rows from all over a mapped file, of which the system may map up to 2 MB around each

T = TypeVar("T")
R = TypeVar("R")
KMeansMode = Literal["auto", "exact", "fast"]
Init = Literal["points", "random"]
Report = Callable[[int, float], None]


class KMeansResult(NamedTuple):
    """A clustering of N rows into k clusters, none of them empty.

    Attributes:
        centroids: unit rows of shape (k, n), float32.
        assignment: each row's nearest centroid, of shape (N,), int64; ties (within 1e-6) may fall either way. In fast
            mode another one is nearer by a little for a row in thousands, of millions of rows for one in seventy.
        mean_cosines: of the rows to their centroids, after each round; they never fall.
        converged: False when the rounds ran out first.
    """

    centroids: np.ndarray
    assignment: np.ndarray
    mean_cosines: tuple[float, ...]
    converged: bool


def spherical_kmeans(
    vectors: np.ndarray | torch.Tensor,
    k: int,
    *,
    seed: int = 0,
    mode: KMeansMode = "auto",
    init: Init = "points",
    max_rounds: int = 256,
    device: torch.device | str | None = None,
    on_round: Report = lambda number, mean_cosine: None,
) -> KMeansResult:
    """Cluster the directions of `vectors` into k non-empty clusters.

    Args:
        vectors: floats of shape (N, n), np.memmap included; rows need not be unit, their lengths are ignored.
        k: number of clusters, 1 <= k <= N.
        seed: of the generator that makes every random choice.
        mode: "exact" is Alg. 2: each round compares every row with every centroid. "fast" starts from a two-level
            clustering, compares rows with nearby centroids only and also makes the single-row moves that Alg. 2
            cannot see. "auto" is fast where that pays.
        init: how exact mode starts. "random" is the paper's a_i ~ Unif{1..k}; "points" takes k rows as centroids,
            the default: on four sets of real vectors at 8 rows a cluster it ended higher (mean cosine 0.9868 against
            0.9863 at the least, 0.606 against 0.563 at the most) in fewer rounds (11 to 16 against 14 to 22).
        max_rounds: rounds before giving up on convergence; the paper saw fewer than 256.
        device: where products are computed; by default the tensor's own device, or the CPU for an array.
        on_round: called after each round with the round's number and its mean cosine.

    Fewer distinct directions than k is no error: equal rows are then split over clusters with equal centroids.
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
        from hce.tree.kmeans_fast import fast_kmeans  # which needs the steps that are shared here

        result = KMeansResult(*fast_kmeans(rows, k, rng, max_rounds, on_round))
    else:
        result = _exact_kmeans(rows, _first_centroids(rows, k, init, rng), max_rounds, on_round)
    if not result.converged:
        logger.warning("k-means of %d rows into %d: still moving after %d rounds", len(rows), k, max_rounds)
    return result


def _exact_kmeans(rows: Rows, centroids: torch.Tensor, max_rounds: int, report: Report) -> KMeansResult:
    """Run Alg. 2 from given centroids, until no assignment changes.

    Neither step lowers the mean cosine: the normalized sum is the direction that scores its members best, a row only
    moves to a better centroid, and filling an empty cluster raises its rows' scores.
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
            return KMeansResult(centroids.cpu().numpy(), assignment, tuple(mean_cosines), converged)
        centroids = normalized(member_sums(rows, assignment, len(centroids)), rows, assignment)


def _first_centroids(rows: Rows, k: int, init: Init, rng: np.random.Generator) -> torch.Tensor:
    if init == "points":
        return rows.take(np.sort(rng.choice(len(rows), size=k, replace=False)))
    assignment = rng.integers(k, size=len(rows))
    missing = np.setdiff1d(np.arange(k), assignment)
    assignment[spare_rows(assignment, np.zeros(len(rows)), k, len(missing))] = missing
    return normalized(member_sums(rows, assignment, k), rows, assignment)


def _fast_pays(count: int, k: int) -> bool:
    # Measured at 8 rows a cluster: 5,183 x 648 took exact mode 0.6 s and fast 1.0 s; 20,958 x 2,620 3.8 s and 3.2 s.
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
    """Unit float32 rows on one device, of shape (N, n): a tensor that is held, or an array too large to copy.

    Args:
        source: the rows.
        device: of what is returned.
        is_unit: whether an array's rows are unit vectors already.
        index: which rows of an array; by default all.
    """

    def __init__(
        self,
        source: torch.Tensor | np.ndarray,
        device: torch.device,
        *,
        is_unit: bool = True,
        index: np.ndarray | None = None,
    ) -> None:
        self._source, self.device, self._is_unit, self._index = source, device, is_unit, index
        self.shape: tuple[int, int] = (len(source) if index is None else len(index), source.shape[1])

    def __len__(self) -> int:
        return self.shape[0]

    def span(self, start: int, stop: int) -> torch.Tensor:
        """Return rows start..stop, of shape (stop - start, n)."""
        if isinstance(self._source, torch.Tensor):
            return self._source[start:stop]
        return self._read(slice(start, stop)) if self._index is None else self._scattered(self._index[start:stop])

    def take(self, index: np.ndarray) -> torch.Tensor:
        """Return the rows at the given positions, of shape (len(index), n)."""
        if isinstance(self._source, torch.Tensor):
            return take_rows(self._source, torch.from_numpy(index).to(self.device))
        return self._scattered(index if self._index is None else self._index[index])

    def subset(self, index: np.ndarray) -> Rows:
        """Return the rows at the given positions as `Rows` of their own."""
        # Several subsets may be in use at once, so each holds little.
        if isinstance(self._source, torch.Tensor) or len(index) * self.shape[1] * 4 <= HOLD_BYTES // 8:
            return Rows(self.take(index), self.device)
        index = index if self._index is None else self._index[index]
        return Rows(self._source, self.device, is_unit=self._is_unit, index=index)

    def chunks(self, width: int) -> list[tuple[int, int]]:
        """Return ranges of rows whose blocks of `width` float32 columns are small."""
        return chunk_ranges(len(self), max(width, self.shape[1]))

    def _scattered(self, index: np.ndarray) -> torch.Tensor:
        """Return rows from all over the source, few at a time to map little."""
        found = torch.empty((len(index), self.shape[1]), dtype=torch.float32, device=self.device)
        for start in range(0, len(index), _SCATTERED):
            found[start : start + _SCATTERED] = self._read(index[start : start + _SCATTERED])
        return found

    def _read(self, picked: slice | np.ndarray) -> torch.Tensor:
        """Return some rows of an array, and give the pages of a mapped file back."""
        block = np.asarray(self._source)[picked]
        # torch warns about arrays that cannot be written to, so those are copied.
        rows = torch.from_numpy(np.require(block, requirements="W")) if self._is_unit else _unit(block)
        rows = rows.to(self.device)
        give_back()
        return rows


def unit_rows(vectors: np.ndarray, device: torch.device) -> Rows:
    """Return the rows as unit vectors, (N, n); fail if one is zero or not finite."""
    source = np.asarray(vectors)  # a plain view: indexing an np.memmap itself costs far more
    hold = source.size * 4 <= HOLD_BYTES
    held = torch.empty(source.shape, dtype=torch.float32, device=device) if hold else None
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
            held[start:stop] = _unit(block).to(device)
        elif is_unit:
            is_unit = bool((np.abs(np.einsum("ij,ij->i", block, block) - 1) < 4 * TIE).all())
    return Rows(source, device, is_unit=is_unit) if held is None else Rows(held, device)


def _unit(block: np.ndarray) -> torch.Tensor:
    # Divide by the largest entry first: squares of tiny or huge entries would under- or overflow.
    scaled = (block / np.abs(block).max(axis=1, keepdims=True)).astype(np.float32, copy=False)
    return torch.from_numpy(scaled / np.sqrt(np.einsum("ij,ij->i", scaled, scaled))[:, None])


def chunk_ranges(count: int, width: int) -> list[tuple[int, int]]:
    """Split range(count) so that blocks of `width` float32 columns are small."""
    size = max(64, _BLOCK_BYTES // (4 * max(1, width)))
    return [(start, min(start + size, count)) for start in range(0, count, size)]


# ------------------------------------------------------------------------------------------------- work in threads


def run_all(task: Callable[[T], R], items: Sequence[T], device: torch.device) -> list[R]:
    """Run the task on every item, in order; processes together each run a share.

    On the CPU tasks run in threads that each compute single-threaded: many small products gain more from this than from
    threads inside each, which wait for one another at every product.
    """

    def run_own(own: Sequence[T]) -> list[R]:
        threads = torch.get_num_threads()
        if device.type != "cpu" or threads == 1:
            return [task(item) for item in own]
        torch.set_num_threads(1)
        try:
            with _blas().limit(limits=1), ThreadPoolExecutor(threads) as pool:
                return list(pool.map(task, own))
        finally:
            torch.set_num_threads(threads)

    return share_out(run_own, items)


@cache  # looking through the process for its BLAS libraries takes milliseconds
def _blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")


def end_to_end(parts: Iterable[Sequence[np.ndarray]]) -> tuple[np.ndarray, ...]:
    """Join the first arrays of all parts, the second arrays of all parts, and so on."""
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))


def as_arrays(*tensors: torch.Tensor) -> tuple[np.ndarray, ...]:
    """Return tensors of any device as arrays."""
    return tuple(tensor.cpu().numpy() for tensor in tensors)


def take_rows(matrix: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the rows of a matrix at the given positions, of shape (len(index), n)."""
    if matrix.device.type == "cpu":
        return torch.from_numpy(np.take(matrix.numpy(), index.numpy(), axis=0))
    return matrix[index]


def scores(rows: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Return inner products of shape (rows, centroids)."""
    if rows.device.type == "cpu":
        # NumPy's BLAS: twice as fast as torch's on AMD (200 against 110 GFLOP/s measured), and level elsewhere.
        return torch.from_numpy(rows.numpy() @ centroids.numpy().T)
    return rows @ centroids.T


def row_argmax(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's first largest column and its value, both of shape (rows,)."""
    on_cpu = block.device.type == "cpu"
    column = torch.from_numpy(block.numpy().argmax(axis=1)) if on_cpu else block.argmax(dim=1)
    return column, block.gather(1, column[:, None])[:, 0]


def own_scores(block: torch.Tensor, centroids: torch.Tensor, assignment: torch.Tensor) -> torch.Tensor:
    """Return each row's inner product with its cluster's centroid, (rows,)."""
    if block.device.type == "cpu":
        own = np.take(centroids.numpy(), assignment.numpy(), axis=0)
        return torch.from_numpy(np.einsum("ij,ij->i", block.numpy(), own))
    return (block * centroids[assignment]).sum(dim=1)


def assign(rows: Rows, centroids: torch.Tensor, assignment: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Assign each row to its nearest centroid (M step of Alg. 2); return scores too.

    Given the current assignment, a row moves only to a centroid that is better by more than a tie, so that equal
    centroids (duplicates split over several clusters) cannot trade rows for ever.
    """

    def one_chunk(limits: tuple[int, int]) -> tuple[np.ndarray, ...]:
        block = rows.span(*limits)
        column, value = row_argmax(scores(block, centroids[:_TILE]))
        for start in range(_TILE, len(centroids), _TILE):
            other, other_value = row_argmax(scores(block, centroids[start : start + _TILE]))
            better = other_value > value
            column, value = torch.where(better, other + start, column), torch.where(better, other_value, value)
        if assignment is not None:
            present = torch.from_numpy(assignment[slice(*limits)]).to(block.device)
            own = own_scores(block, centroids, present)
            stay = value <= own + TIE
            column, value = torch.where(stay, present, column), torch.where(stay, own, value)
        return as_arrays(column, value)

    new, best = end_to_end(run_all(one_chunk, rows.chunks(min(len(centroids), _TILE)), rows.device))
    return new, best


def member_sums(rows: Rows, assignment: np.ndarray, k: int) -> torch.Tensor:
    """Sum each cluster's rows in row order, of shape (k, n), in float64."""
    sums = torch.zeros((k, rows.shape[1]), dtype=torch.float64, device=rows.device)
    order = np.argsort(assignment, kind="stable")
    for start, stop in rows.chunks(0):
        index = order[start:stop]
        owner, first = np.unique(assignment[index], return_index=True)
        block, bounds = rows.take(index), np.append(first, len(index))
        if block.device.type == "cpu":
            members = (np.ones(len(block)), np.arange(len(block)), bounds)
            found = torch.from_numpy(sparse.csr_matrix(members, (len(owner), len(block))) @ block.numpy())
        else:
            lengths = torch.from_numpy(np.diff(bounds)).to(block.device)
            found = torch.segment_reduce(block.double(), "sum", lengths=lengths, axis=0)
        sums[torch.from_numpy(owner).to(rows.device)] += found
    return sums


def normalized(sums: torch.Tensor, rows: Rows, assignment: np.ndarray) -> torch.Tensor:
    """Return the centroids of summed members, unit rows (k, n); E step of Alg. 2.

    Members that cancel out leave no direction; their cluster takes the first member's, which is as good as any.
    """
    norms = sums.norm(dim=1, keepdim=True)
    centroids = (sums / norms.clamp_min(1e-12)).float()
    for cluster in torch.nonzero(norms[:, 0] < 1e-6)[:, 0].tolist():
        centroids[cluster] = rows.take(np.flatnonzero(assignment == cluster)[:1])[0]
    return centroids


def fill_empty(rows: Rows, centroids: torch.Tensor, assignment: np.ndarray, best: np.ndarray) -> None:
    """Give every empty cluster a member, in place; no row's score falls.

    An empty cluster's centroid becomes the worst-fitting row of a cluster of two or more, and every row that is
    nearer to it joins. That may empty another cluster, so it repeats. Each repeat raises the total score, or splits
    duplicates and empties nothing, so it ends.
    """
    k = len(centroids)
    sizes = np.bincount(assignment, minlength=k)
    while (empty := np.flatnonzero(sizes == 0)).size:
        donors = spare_rows(assignment, best, k, len(empty))
        empty = empty[: len(donors)]
        chosen = torch.from_numpy(empty).to(rows.device)
        centroids[chosen] = rows.take(donors)
        for start, stop in rows.chunks(len(empty)):
            column, value = row_argmax(scores(rows.span(start, stop), centroids[chosen]))
            target, score = empty[column.cpu().numpy()], value.cpu().numpy()
            moves = score > best[start:stop] + TIE
            assignment[start:stop][moves] = target[moves]
            best[start:stop][moves] = score[moves]
        # Equal donors share one centroid's direction: each keeps its own cluster, which is a tie and not a loss.
        assignment[donors] = empty
        best[donors] = np.maximum(best[donors], 1 - TIE)
        sizes = np.bincount(assignment, minlength=k)


def spare_rows(assignment: np.ndarray, best: np.ndarray, k: int, count: int) -> np.ndarray:
    """Return the `count` lowest-scoring rows that leave no cluster empty."""
    sizes = np.bincount(assignment, minlength=k)
    order = np.lexsort((best, assignment))  # cluster by cluster, worst first
    first = np.cumsum(sizes) - sizes
    rank = np.arange(len(order)) - first[assignment[order]]
    spare = order[rank < sizes[assignment[order]] - 1]  # all but each cluster's best-fitting row
    return spare[np.argsort(best[spare], kind="stable")][:count]
