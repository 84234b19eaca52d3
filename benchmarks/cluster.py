"""Time, quality, growth and memory of spherical k-means, beside faiss on the same vectors in the same run.

python benchmarks/cluster.py compare VECTORS [...]     fast and exact mode beside faiss.Kmeans (25 rounds)
python benchmarks/cluster.py growth [VECTORS]          fast mode as the number of rows doubles
python benchmarks/cluster.py trees VECTORS             whole trees beside their first level alone
python benchmarks/cluster.py memory --rows 1000000     peak memory on a memory-mapped file made for it

VECTORS is an .npy file, or a corpus, which is then encoded by the static encoder; "fitted:CORPUS" fits that first.
Without any, vectors are synthetic. Times depend on the machine and on what else runs there: read the ratios.
"""

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import numpy as np

from hce.data.corpus import Corpus
from hce.encoding.encoder import Encoder
from hce.tree.growing import branching_for_depth
from hce.tree.hierarchy import Hierarchy
from hce.tree.kmeans import spherical_kmeans

DIM = 384
FAISS_ROUNDS = 25


class Run(NamedTuple):
    """One clustering: wall-clock seconds, mean cosine to the nearest centroid, and rounds."""

    seconds: float
    cosine: float
    rounds: int


def timed(work: Callable[[], tuple[float, int]]) -> Run:
    """Run the work, which returns its mean cosine and number of rounds."""
    start = time.perf_counter()
    cosine, rounds = work()
    return Run(time.perf_counter() - start, cosine, rounds)


def ours(vectors: np.ndarray, k: int, **options: Any) -> tuple[float, int]:
    """Run our k-means."""
    result = spherical_kmeans(vectors, k, **options)
    return result.objective[-1], len(result.objective)


def faiss_run(vectors: np.ndarray, k: int) -> Run:
    """Run faiss' own k-means on all points; its time leaves out the last search, which only measures the result."""
    kmeans = faiss.Kmeans(
        vectors.shape[1],
        k,
        spherical=True,
        niter=FAISS_ROUNDS,
        max_points_per_centroid=len(vectors),
        min_points_per_centroid=1,
    )
    start = time.perf_counter()
    kmeans.train(vectors)
    seconds = time.perf_counter() - start
    return Run(seconds, float(kmeans.index.search(vectors, 1)[0].mean(dtype=np.float64)), FAISS_ROUNDS)


def load(source: str) -> np.ndarray:
    """Read vectors from a file, or encode a corpus."""
    if source.endswith(".npy"):
        return np.load(source).astype(np.float32)
    corpus = Corpus.load(source.removeprefix("fitted:"))
    encoder = Encoder.load("static", device="cpu")
    return (encoder.fitted_to(corpus) if source.startswith("fitted:") else encoder).encode(list(corpus.texts()))


def compare(sources: list[str], branching: int, with_exact: bool) -> None:
    """Print one line a method for each file."""
    print(f"{'vectors':32} {'method':12} {'seconds':>8} {'cosine':>8} {'rounds':>6} {'speed':>7} {'cosine/faiss':>12}")
    for source in sources:
        vectors, name = load(source), source if len(source) < 32 else "…" + source[-31:]
        k = -(-len(vectors) // branching)
        runs = {"fast": timed(lambda v=vectors, k=k: ours(v, k, mode="fast"))}
        runs["faiss"] = faiss_run(vectors, k)
        if with_exact:
            runs["exact"] = timed(lambda v=vectors, k=k: ours(v, k, mode="exact"))
            runs["exact/random"] = timed(lambda v=vectors, k=k: ours(v, k, mode="exact", init="random"))
        for method, run in runs.items():
            speed, quality = runs["faiss"].seconds / run.seconds, run.cosine / runs["faiss"].cosine
            print(
                f"{name:32} {method:12} {run.seconds:8.2f} {run.cosine:8.4f} {run.rounds:6d}"
                f" {speed:6.1f}x {quality:12.4f}",
                flush=True,
            )


def growth(source: str | None, branching: int) -> None:
    """Print fast mode's time for 1/8, 1/4, 1/2 and all of the rows."""
    vectors = synthetic(120_000, branching) if source is None else load(source)
    vectors = vectors[np.random.default_rng(0).permutation(len(vectors))]
    print(f"{'rows':>8} {'k':>7} {'seconds':>8} {'cosine':>8} {'rounds':>6} {'growth':>7}")
    before = None
    for parts in (8, 4, 2, 1):
        part = vectors[: len(vectors) // parts]
        k = -(-len(part) // branching)
        run = timed(lambda v=part, k=k: ours(v, k, mode="fast"))
        ratio = f"{run.seconds / before:6.2f}x" if before else ""
        print(f"{len(part):8d} {k:7d} {run.seconds:8.2f} {run.cosine:8.4f} {run.rounds:6d} {ratio:>7}", flush=True)
        before = run.seconds


def trees(source: str) -> None:
    """Print the time of whole trees, as a multiple of their first level's."""
    vectors = load(source)
    for branching in (8, branching_for_depth(len(vectors), 3)):
        first = timed(lambda b=branching: ours(vectors, -(-len(vectors) // b)))
        start = time.perf_counter()
        tree = Hierarchy.build(vectors, branching)
        whole = time.perf_counter() - start
        print(f"b = {branching}: level 1 {first.seconds:.1f} s, whole tree {whole:.1f} s: {whole / first.seconds:.2f}x")
        print(f"  {tree}")


def memory(rows: int, branching: int) -> None:
    """Print the peak memory of clustering a file, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vectors.npy"
        target = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(rows, DIM))
        for start in range(0, rows, 50_000):
            stop = min(start + 50_000, rows)
            target[start:stop] = synthetic(stop - start, branching, seed=start)
        target.flush()
        del target
        process = multiprocessing.get_context("spawn").Process(target=_clustered_file, args=(path, branching))
        process.start()
        process.join()


def _clustered_file(path: Path, branching: int) -> None:
    vectors = np.load(path, mmap_mode="r")
    k = -(-len(vectors) // branching)
    run = timed(lambda: ours(vectors, k))
    # Not getrusage: its maximum is handed down by the parent process. VmHWM (Linux) is this process' own, in kB.
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) / 2**20
    print(
        f"{len(vectors)} x {vectors.shape[1]} into {k}: {run.seconds:.1f} s, cosine {run.cosine:.4f},"
        f" peak {peak:.2f} GB, of which up to {vectors.nbytes / 2**30:.2f} GB are the file's own pages"
    )


def synthetic(rows: int, branching: int, seed: int = 0) -> np.ndarray:
    """Draw unit vectors around clusters of `branching` rows, which lie around broader topics."""
    rng = np.random.default_rng(seed)
    topics = rng.standard_normal((max(1, rows // (branching * 32)), DIM), dtype=np.float32)
    clusters = topics[rng.integers(len(topics), size=max(1, rows // branching))]
    clusters += 0.7 * rng.standard_normal(clusters.shape, dtype=np.float32)
    vectors = clusters[rng.integers(len(clusters), size=rows)]
    vectors += 0.7 * rng.standard_normal(vectors.shape, dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--branching", type=int, default=8, help="rows a cluster, on average")
    commands = parser.add_subparsers(dest="command", required=True)
    comparing = commands.add_parser("compare")
    comparing.add_argument("vectors", nargs="+")
    comparing.add_argument("--exact", action="store_true", help="exact mode too, from both starts")
    growing = commands.add_parser("growth")
    growing.add_argument("vectors", nargs="?")
    commands.add_parser("trees").add_argument("vectors")
    remembering = commands.add_parser("memory")
    remembering.add_argument("--rows", type=int, default=1_000_000)
    arguments = parser.parse_args()
    if arguments.command == "compare":
        compare(arguments.vectors, arguments.branching, arguments.exact)
    elif arguments.command == "growth":
        growth(arguments.vectors, arguments.branching)
    elif arguments.command == "trees":
        trees(arguments.vectors)
    else:
        memory(arguments.rows, arguments.branching)


if __name__ == "__main__":
    main()
