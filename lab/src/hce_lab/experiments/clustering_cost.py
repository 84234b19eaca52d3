"""Time of clustering by number of documents N, doubled repeatedly: k-means, entire trees, and faiss.

python -m hce_lab clustering_cost data/wordnet_examples --output docs/results
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import faiss
import numpy as np
import torch
from threadpoolctl import threadpool_limits

from hce._version import __version__
from hce.data.corpus import Corpus
from hce.encoding.corpus_vectors import encode_corpus
from hce.encoding.encoder import Encoder
from hce.errors import InputError
from hce.tree.hierarchy import Grown, Hierarchy, Level, level_sizes
from hce.tree.kmeans import KMeansMode, spherical_kmeans
from hce_lab.comparison.bench import keep
from hce_lab.comparison.table import Score
from hce_lab.experiments.common import command_line, tell
from hce_lab.experiments.page import Page, Panel, Series, seeds_note, table

ABOUT = """
Time to cluster N documents into N/b clusters, as the lowest level of a tree with branching factor b needs it, and to
grow whole trees, as N doubles. Comparing every document with every centroid makes that quadratic in N, four times the
seconds for each doubling, as faiss shows; near two times is what a large corpus can afford. Look at the slope (the
power of N that the seconds grow with), and at the cosine of documents to their centroid: fast has to be as good.
"""
FAISS_ROUNDS = 25
SAMPLED = 256  # documents per new node to split a large node by, as in faiss
ROWS_AT_ONCE = 4096


class Clustered(NamedTuple):
    """A clustering's time, and the mean cosine of documents to their centroid or leaf."""

    seconds: float
    cosine: float


def fast(vectors: np.ndarray, branching: int, seed: int) -> Clustered:
    """Cluster by our k-means in its fast mode, into N/b clusters."""
    start = time.process_time()
    result = spherical_kmeans(vectors, -(-len(vectors) // branching), seed=seed, mode="fast")
    return Clustered(time.process_time() - start, result.mean_cosines[-1])


def faiss_kmeans(vectors: np.ndarray, branching: int, seed: int) -> Clustered:
    """Cluster all points into N/b clusters by faiss's k-means; time without final search."""
    kmeans = faiss.Kmeans(
        vectors.shape[1],
        -(-len(vectors) // branching),
        spherical=True,
        niter=FAISS_ROUNDS,
        seed=seed,
        max_points_per_centroid=len(vectors),
        min_points_per_centroid=1,
    )
    start = time.process_time()
    kmeans.train(vectors)
    seconds = time.process_time() - start
    return Clustered(seconds, float(kmeans.index.search(vectors, 1)[0].mean(dtype=np.float64)))


def agglomerative(vectors: np.ndarray, branching: int, seed: int) -> Clustered:
    """Grow the whole tree bottom-up, by Alg. 1."""
    start = time.process_time()
    grown = Hierarchy.build(vectors, branching, seed=seed)
    return Clustered(time.process_time() - start, grown.mean_cosines[-1] if grown.levels else 0.0)


def divisive(vectors: np.ndarray, branching: int, seed: int) -> Clustered:
    """Grow the whole tree top-down."""
    start = time.process_time()
    levels, parent = grown_top_down(vectors, branching, seed)
    seconds = time.process_time() - start
    own = levels[-1].centroids[parent] if levels else vectors[:0]
    return Clustered(seconds, float(np.einsum("ij,ij->i", vectors, own).mean()) if levels else 0.0)


def grown_top_down(vectors: np.ndarray, branching: int, seed: int, mode: KMeansMode = "auto") -> Grown:
    """Grow the paper's tree for over 100M documents, top-down, in O(N·n·b·log N).

    A node at height h should hold b^h documents, so one with m of them is split into ⌈m / b^(h−1)⌉ parts. A single part
    is an only child, so every path has the same length. A very large node is split by a sample, and the other documents
    go to the nearest centroid, since each round of Alg. 2 over all of them is expensive. A search finds less in such a
    tree, so no command grows one (docs/LOG.md).
    """
    assigned = np.zeros(len(vectors), dtype=np.int64)  # each document's node at the last level made
    levels: list[Level] = []
    for height in range(len(level_sizes(len(vectors), branching)) + 1, 1, -1):
        count, size = len(levels[-1].parent) if levels else 1, branching ** (height - 1)
        groups = np.split(np.argsort(assigned, kind="stable"), np.cumsum(np.bincount(assigned, minlength=count))[:-1])
        sizes = [-(-len(group) // size) for group in groups]
        centroids = []
        for number, first in enumerate(np.cumsum([0, *sizes[:-1]]).tolist()):
            own_seed = int(np.random.SeedSequence([seed, height, number]).generate_state(1)[0])
            found, part = _split(vectors, groups[number], sizes[number], own_seed, mode)
            centroids.append(found)
            assigned[groups[number]] = first + part
        levels.append(Level(np.repeat(np.arange(count), sizes), np.concatenate(centroids)))
    return Grown(tuple(levels), assigned)


def _split(
    vectors: np.ndarray, members: np.ndarray, k: int, seed: int, mode: KMeansMode
) -> tuple[np.ndarray, np.ndarray]:
    """Split the documents at positions `members` into k; return centroids and parts."""
    drawn = np.arange(len(members))
    if len(members) > SAMPLED * k:
        drawn = np.sort(np.random.default_rng(seed).choice(len(members), SAMPLED * k, replace=False))
    result = spherical_kmeans(vectors[members[drawn]], k, seed=seed, mode=mode)
    part = np.empty(len(members), dtype=np.int64)
    for start in range(0, len(members), ROWS_AT_ONCE):
        rows = vectors[members[start : start + ROWS_AT_ONCE]]
        part[start : start + ROWS_AT_ONCE] = (rows @ result.centroids.T).argmax(axis=1)
    part[drawn] = result.assignment  # so that no part is empty
    return result.centroids, part


METHODS: dict[str, Callable[[np.ndarray, int, int], Clustered]] = {
    "k-means, fast": fast,
    "tree, agglomerative": agglomerative,
    "tree, divisive": divisive,
    "k-means, faiss": faiss_kmeans,
}

Found = dict[str, list[list[Clustered]]]
"""Method → size → seed."""


def sizes_of(documents: int, doublings: int) -> list[int]:
    """Return numbers of documents, doubled each time; the last one is all documents."""
    return [documents >> shift for shift in range(doublings, -1, -1)]


def slope(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the exponent of N in the time: the slope of a line in log-log axes."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


class Vectors(NamedTuple):
    """Vectors of documents in random order (N, n), and their description."""

    rows: np.ndarray
    identity: dict[str, str]


def load_vectors(folder: Path, spec: str) -> Vectors:
    """Encode the documents; a static encoder is fitted to the corpus first, as training does."""
    corpus, encoder = Corpus.load(folder), Encoder.load(spec)
    rows = encode_corpus(encoder.fitted_to(corpus) if encoder.table is not None else encoder, corpus)
    identity = {"hce": __version__, "corpus": corpus.fingerprint, "encoder": encoder.fingerprint}
    return Vectors(rows[np.random.default_rng(0).permutation(len(rows))], identity)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit all libraries to one thread, so that processor time measures the work."""
    before = torch.get_num_threads(), faiss.omp_get_max_threads()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before[0])
        faiss.omp_set_num_threads(before[1])


# -------------------------------------------------------------------------------------------------------------- showing


def main(argv: Sequence[str] | None = None) -> None:
    """Run missing clusterings, then show all results."""
    parser = command_line("clustering_cost", __doc__ or "", seeds=1, trains=False)
    parser.add_argument("--branching", type=int, default=8, help="documents a cluster, b")
    parser.add_argument("--doublings", type=int, default=4, help="how often N is doubled, up to the whole collection")
    parser.add_argument("--methods", type=_methods, default=list(METHODS), help="with semicolons between")
    arguments = parser.parse_args(argv)
    vectors = load_vectors(arguments.folder, arguments.encoder)
    sizes = sizes_of(len(vectors.rows), arguments.doublings)
    if sizes[0] < 2 * arguments.branching:
        raise InputError(f"--doublings {arguments.doublings}: {sizes[0]} documents are too few to begin with")
    with one_thread():
        found = run_all_sizes(vectors, sizes, arguments)
    notes = [
        f"{arguments.folder.absolute().name}, {vectors.rows.shape[1]} dimensions, b = {arguments.branching}, "
        f"one thread, processor time. {seeds_note(arguments)}",
        "Growth is the factor at the last doubling; slope is the power of N over all sizes: 1 is linear, 2 quadratic.",
        f"faiss runs {FAISS_ROUNDS} rounds, its default; ours stop when nothing moves. A tree's cosine is that of "
        "documents to their leaf.",
    ]
    tables, panels = {"": _table(found, sizes)}, [_panel(found, sizes)]
    Page("clustering_cost", "What clustering costs", ABOUT, tables, notes, panels).show(parser, arguments)


def _methods(text: str) -> list[str]:
    chosen = [item.strip() for item in text.split(";")]
    unknown = [name for name in chosen if name not in METHODS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown {unknown[0]!r}; there are {'; '.join(METHODS)}")
    return chosen


def run_all_sizes(vectors: Vectors, sizes: Sequence[int], arguments: argparse.Namespace) -> Found:
    """Cluster with each method, size and seed; the cheap sizes come first."""
    found: Found = {method: [] for method in arguments.methods}
    for size in sizes:
        for method in arguments.methods:
            found[method].append([_kept(vectors, size, method, seed, arguments) for seed in range(arguments.seeds)])
    return found


def _kept(vectors: Vectors, size: int, method: str, seed: int, arguments: argparse.Namespace) -> Clustered:
    branching = arguments.branching
    settings = {"method": method, "documents": size, "branching": branching, "seed": seed}
    clustered, cached = keep(
        arguments.results / "clustering",
        f"{size}-{seed}",
        {**vectors.identity, **settings},
        lambda work: METHODS[method](vectors.rows[:size], branching, seed)._asdict(),
        lambda kept: Clustered(**kept),
    )
    tell(f"{method}, {size:,} documents, seed {seed}", cached)
    return clustered


def _seconds(clustered: Sequence[Sequence[Clustered]]) -> list[Score]:
    """Average the times over the seeds of each size."""
    return [Score.of([each.seconds for each in runs]) for runs in clustered]


def _table(found: Found, sizes: Sequence[int]) -> str:
    rows = []
    for method, clustered in found.items():
        means = [seconds.mean for seconds in _seconds(clustered)]
        growth = f"× {means[-1] / means[-2]:.2f}" if len(means) > 1 else "–"
        shown_slope = f"{slope(sizes, means):.2f}" if len(means) > 1 else "–"
        cosine = fmean(each.cosine for each in clustered[-1])
        rows.append([method, *(f"{mean:.2f} s" for mean in means), growth, shown_slope, f"{cosine:.4f}"])
    return table(["", *(f"N = {size:,}" for size in sizes), "growth", "slope", "cosine"], rows)


def _panel(found: Found, sizes: Sequence[int]) -> Panel:
    series = []
    for method, clustered in found.items():
        seconds = _seconds(clustered)
        series.append(Series(method, [each.mean for each in seconds], [each.spread for each in seconds]))
    return Panel("Seconds of clustering", "documents", "seconds", [f"{size:,}" for size in sizes], series, log=True)
