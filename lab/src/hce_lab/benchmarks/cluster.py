"""Time, quality, growth and memory of spherical k-means, beside others' on the same vectors in the same run.

python -m hce_lab cluster compare VECTORS [...]     beside faiss (10 rounds), faiss.SuperKmeans and superkmeans
python -m hce_lab cluster growth [VECTORS]          fast mode as the number of rows doubles
python -m hce_lab cluster trees VECTORS             whole trees beside their first level alone
python -m hce_lab cluster memory --rows 1000000     peak memory on a memory-mapped file made for it
python -m hce_lab cluster make VECTORS OUTPUT.npy --rows 1000000      real vectors, recombined

VECTORS is an .npy file, or a corpus, which is then encoded by the static encoder; "fitted:CORPUS" fits that first.
Without any, vectors are synthetic. "superkmeans" is a package of PyPI (0.2); without it, its lines say so. `compare` is
in CPU seconds on one thread, with which other programs interfere least; still, read the ratios. `--most 3` stops a
rival that has taken three times our seconds: what it would have found is then unknown, and that it is slower is not.
"""

import argparse
import importlib.util
import math
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import numpy as np
import torch
from threadpoolctl import threadpool_limits

from hce.data.corpus import Corpus
from hce.encoding.encoder import Encoder
from hce.tree.hierarchy import Hierarchy, branching_for_depth
from hce.tree.kmeans import spherical_kmeans

DIM = 384
FAISS_ROUNDS = 10  # more change nothing
SHORTER = (2, 3)  # rounds after which ours are stopped too, for clusters about as good as the rivals'
MEASURED = 30_000  # rows, of all alike, by which centroids are measured
CLOSE = 0.999  # a rival whose cosine is this part of ours or more found clusters as good


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
    return result.mean_cosines[-1], len(result.mean_cosines)


class Compared(NamedTuple):
    """One rival's clustering: CPU seconds, and the mean cosine to the nearest of its centroids."""

    seconds: float
    cosine: float


def compared(vectors: np.ndarray, cluster: Callable[[], np.ndarray]) -> Compared:
    """Run a rival, which returns its centroids; the search that measures them is not in its time."""
    start = time.process_time()
    centroids = np.ascontiguousarray(cluster(), dtype=np.float32)
    seconds = time.process_time() - start
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(centroids / np.maximum(np.linalg.norm(centroids, axis=1, keepdims=True), 1e-12))
    some = vectors[:: -(-len(vectors) // MEASURED)]
    return Compared(seconds, float(index.search(np.ascontiguousarray(some), 1)[0].mean(dtype=np.float64)))


def compared_within(vectors: np.ndarray, cluster: Callable[[], np.ndarray], seconds: float | None) -> Compared | None:
    """Run a rival in a process of its own; None where it has not ended after so many seconds of the processor."""
    if seconds is None:
        return compared(vectors, cluster)
    context = multiprocessing.get_context("fork")
    ours_end, its_end = context.Pipe(duplex=False)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds), resource.RLIM_INFINITY))
        its_end.send(tuple(compared(vectors, cluster)))

    process = context.Process(target=work)
    process.start()
    its_end.close()
    try:
        return Compared(*ours_end.recv())
    except EOFError:
        return None
    finally:
        process.join()


def faiss_centroids(kind: type, vectors: np.ndarray, k: int) -> np.ndarray:
    """Cluster all rows by faiss.Kmeans or by faiss.SuperKmeans."""
    options = {"niter": FAISS_ROUNDS, "max_points_per_centroid": len(vectors), "min_points_per_centroid": 1}
    kmeans = kind(vectors.shape[1], k, spherical=True, **options)
    kmeans.train(vectors)
    return kmeans.centroids


def super_centroids(vectors: np.ndarray, k: int, **options: Any) -> np.ndarray:
    """Cluster all rows by the package superkmeans."""
    from superkmeans import SuperKMeans

    kmeans = SuperKMeans(k, vectors.shape[1], n_threads=1, angular=True, sampling_fraction=1.0, **options)
    return kmeans.train(vectors.copy())  # it may rotate its input


def methods(vectors: np.ndarray, k: int, with_exact: bool) -> dict[str, Callable[[], np.ndarray]]:
    """Every clustering to compare: ours first, then the rivals."""
    found: dict[str, Callable[[], np.ndarray]] = {
        "ours, fast": lambda: spherical_kmeans(vectors, k, mode="fast").centroids
    }
    for rounds in SHORTER:
        found[f"ours, fast, {rounds} rounds"] = lambda most=rounds: (
            spherical_kmeans(vectors, k, mode="fast", max_rounds=most).centroids
        )
    if with_exact:
        found["ours, exact"] = lambda: spherical_kmeans(vectors, k, mode="exact").centroids
        found["ours, exact, random"] = lambda: spherical_kmeans(vectors, k, mode="exact", init="random").centroids
    if importlib.util.find_spec("superkmeans"):
        found["superkmeans flat"] = lambda: super_centroids(vectors, k, hierarchical=False)
        for refinements in (0, 5, 15):
            found[f"superkmeans levels + {refinements}"] = lambda rounds=refinements: super_centroids(
                vectors, k, hierarchical=True, iters_refinement=rounds
            )
    found["faiss.SuperKmeans"] = lambda: faiss_centroids(faiss.SuperKmeans, vectors, k)
    found["faiss.Kmeans"] = lambda: faiss_centroids(faiss.Kmeans, vectors, k)
    return found


def load(source: str) -> np.ndarray:
    """Read vectors from a file, or encode a corpus."""
    if source.endswith(".npy"):
        return np.load(source).astype(np.float32)
    corpus = Corpus.load(source.removeprefix("fitted:"))
    encoder = Encoder.load("static", device="cpu")
    return (encoder.fitted_to(corpus) if source.startswith("fitted:") else encoder).encode(list(corpus.texts()))


def compare(
    sources: list[str], branching: int, with_exact: bool, rows: int | None, only: list[str], most: float | None
) -> None:
    """Print one line a method for each file, then how the fastest rival that found as good clusters compares."""
    faiss.omp_set_num_threads(1)
    torch.set_num_threads(1)
    if not importlib.util.find_spec("superkmeans"):
        print("superkmeans is left out: not installed (pip install superkmeans)")
    print(f"{'vectors':24} {'method':24} {'CPU s':>8} {'cosine':>8} {'seconds/ours':>12} {'cosine/ours':>12}")
    for source in sources:
        vectors, name = load(source)[:rows], source if len(source) < 24 else "…" + source[-23:]
        k = -(-len(vectors) // branching)
        runs: dict[str, Compared] = {}
        for method, cluster in methods(vectors, k, with_exact).items():
            if method != "ours, fast" and not method.startswith(tuple(only)):
                continue
            mine = runs.get("ours, fast")
            with threadpool_limits(1, user_api="blas"):
                run = compared_within(vectors, cluster, most * mine.seconds if most and mine else None)
            if run is None:
                print(f"{name:24} {method:24} stopped after {most:.3g} times our seconds", flush=True)
                continue
            runs[method] = run
            mine = mine or run
            ratios = f"{run.seconds / mine.seconds:12.2f} {run.cosine / mine.cosine:12.4f}"
            print(f"{name:24} {method:24} {run.seconds:8.2f} {run.cosine:8.4f} {ratios}", flush=True)
        if len(runs) > 1:
            print(_verdict(runs))


def _verdict(runs: dict[str, Compared]) -> str:
    mine = runs["ours, fast"]
    rivals = {method: run for method, run in runs.items() if not method.startswith("ours")}
    if not rivals:
        return "no rival ended"
    close = {method: run for method, run in rivals.items() if run.cosine >= CLOSE * mine.cosine}
    best = max(rivals, key=lambda method: rivals[method].cosine)
    if not close:
        run = rivals[best]
        return (
            f"no rival comes within {1 - CLOSE:.1%} of our cosine; the best, {best}, takes"
            f" {run.seconds / mine.seconds:.2f} times our seconds for {run.cosine / mine.cosine:.4f} of it"
        )
    fastest = min(close, key=lambda method: close[method].seconds)
    return (
        f"the fastest of as good clusters is {fastest}: {close[fastest].seconds / mine.seconds:.2f} times our seconds"
    )


def make(source: str, output: str, rows: int) -> None:
    """Write vectors of recombined documents: of two or three that stand near each other, as large_corpus.py does texts.

    A static encoder's vector of two texts together is nearly the direction of the sum of their vectors.
    """
    vectors, rng = load(source), np.random.default_rng(0)
    target = np.lib.format.open_memmap(output, mode="w+", dtype=np.float32, shape=(rows, vectors.shape[1]))
    for start in range(0, rows, 50_000):
        first = rng.integers(len(vectors), size=min(50_000, rows - start))
        total = vectors[first]
        for share in (1.0, 0.5):  # half of the documents are of three
            near = np.clip(first + rng.integers(-40, 41, size=len(first)), 0, len(vectors) - 1)
            total = total + (rng.random(len(first)) < share)[:, None] * vectors[near]
        target[start : start + len(first)] = total / np.linalg.norm(total, axis=1, keepdims=True)
    target.flush()


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
    comparing.add_argument("--rows", type=int, help="the first rows only")
    comparing.add_argument("--most", type=float, help="stop a rival that has taken so many times our seconds")
    comparing.add_argument("--only", nargs="+", default=[""], help="methods beside ours, by how their names begin")
    growing = commands.add_parser("growth")
    growing.add_argument("vectors", nargs="?")
    commands.add_parser("trees").add_argument("vectors")
    making = commands.add_parser("make")
    making.add_argument("vectors")
    making.add_argument("output")
    making.add_argument("--rows", type=int, default=1_000_000)
    remembering = commands.add_parser("memory")
    remembering.add_argument("--rows", type=int, default=1_000_000)
    arguments = parser.parse_args()
    if arguments.command == "compare":
        compare(arguments.vectors, arguments.branching, arguments.exact, arguments.rows, arguments.only, arguments.most)
    elif arguments.command == "make":
        make(arguments.vectors, arguments.output, arguments.rows)
    elif arguments.command == "growth":
        growth(arguments.vectors, arguments.branching)
    elif arguments.command == "trees":
        trees(arguments.vectors)
    else:
        memory(arguments.rows, arguments.branching)
