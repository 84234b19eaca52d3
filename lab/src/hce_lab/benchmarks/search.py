"""Searches by our engine beside other libraries: recall and processor time of one thread, queries one by one.

    python -m hce_lab search vectors DATASET [--documents VECTORS.npy] [--rivals codes scann hnswlib hnsw usearch]
    python -m hce_lab search hybrid INDEX DATASET        searches of an index and of LanceDB, end to end

DATASET is a BEIR folder with real queries; `--documents` replaces its documents by other vectors, such as those of
`hce_lab cluster make`. Recall@10 is the share of the exact ten best that is found, by scores: of equal documents any
will do. Times are of the processor, for other programs run on the machine; rivals are timed in turns. A rival that is
not installed is left out, and a line says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import faiss
import numpy as np

from hce.data.judgments import Dataset
from hce.encoding.encoder import Encoder
from hce.index.index import Index
from hce.search.engine import load_engine, new_engine
from hce.tree.hierarchy import Hierarchy

K = 10
AT_ONCE = 100_000  # documents
TIMED, TURNS = 200, 3  # queries asked one by one, and how often
NEIGHBORS, CONSTRUCTION = 32, 100  # of graphs
SCANNED = (0.05, 0.1, 0.25, 0.5, 0.7, 1.0)  # of ScaNN's leaves
BREADTHS = (20, 50, 100, 200, 400, 800)  # of a search in a graph


class Task(NamedTuple):
    """Vectors of documents and queries, and the score of each query's exact tenth."""

    documents: np.ndarray
    queries: np.ndarray
    least: np.ndarray

    def recall(self, rows: np.ndarray) -> float:
        """Return the share of the ten best among rows of shape (Q, 10); below 0 where nothing was found."""
        scores = np.stack(
            [self.documents[np.maximum(each, 0)] @ query for each, query in zip(rows, self.queries, strict=True)]
        )
        return float(((scores >= self.least[:, None] - 1e-5) & (rows >= 0)).mean())


class Rival(NamedTuple):
    """A way to search at one setting: from queries of shape (1, n) to rows of shape (10,)."""

    name: str
    search: Callable[[np.ndarray], np.ndarray]


def load(dataset: str, documents: str | None, most: int) -> Task:
    """Encode the queries, and the documents where no vectors are given, by a table that is fitted to the documents."""
    data = Dataset.load(Path(dataset), "test")
    encoder = Encoder.for_corpus("static", data.corpus)
    queries = encoder.encode([data.queries[name].text for name in list(data.qrels)[:most]], "query")
    rows = np.load(documents, mmap_mode="r") if documents else encoder.encode(list(data.corpus.texts()))
    best = np.full((len(queries), K), -np.inf, np.float32)
    for start in range(0, len(rows), AT_ONCE):
        block = np.ascontiguousarray(rows[start : start + AT_ONCE])
        found = faiss.knn(queries, block, K, metric=faiss.METRIC_INNER_PRODUCT)[0]
        best = -np.sort(-np.concatenate([best, found], axis=1), axis=1)[:, :K]
    print(f"{len(rows):,} documents, {len(queries):,} queries", flush=True)
    return Task(rows, queries, best[:, -1])


# ---------------------------------------------------------------------------------------------------- rivals


def codes(task: Task, tree: Path | None) -> list[Rival]:
    """Our engine as it is set when it is built, saved and loaded, so that its vectors are mapped."""
    hierarchy = Hierarchy.load(tree) if tree else None
    folder, dim = Path(tempfile.mkdtemp(prefix="hce-search-")), task.documents.shape[1]
    numbers = np.arange(len(task.documents))
    new_engine("codes", dim, numbers=numbers, vectors=task.documents, hierarchy=hierarchy).save(folder)
    engine = load_engine("codes", folder, dim)
    print(f"codes: {engine.facts()}", flush=True)
    return [Rival("codes", lambda query: engine.search(query, K).numbers[0])]


def exact(task: Task, tree: Path | None) -> list[Rival]:
    """Our engine without codes."""
    numbers, dim = np.arange(len(task.documents)), task.documents.shape[1]
    engine = new_engine("exact", dim, numbers=numbers, vectors=task.documents)
    return [Rival("exact", lambda query: engine.search(query, K).numbers[0])]


def scann(task: Task, tree: Path | None) -> list[Rival]:
    """ScaNN as its authors advise: leaves of codes, and 100 candidates scored again."""
    import scann as library

    leaves = int(2 * len(task.documents) ** 0.5)
    builder = library.scann_ops_pybind.builder(task.documents, K, "dot_product").set_n_training_threads(1)
    builder = builder.tree(leaves, 100, training_sample_size=min(len(task.documents), 250_000))
    index = builder.score_ah(2, anisotropic_quantization_threshold=0.2).reorder(100).build()
    index.set_num_threads(1)

    def at(share: float) -> Rival:
        options = {"leaves_to_search": max(1, int(share * leaves)), "pre_reorder_num_neighbors": 100}
        return Rival(f"scann, {share:.0%}", lambda query: index.search(query[0], K, **options)[0].astype(np.int64))

    return [at(share) for share in SCANNED]


def hnswlib(task: Task, tree: Path | None) -> list[Rival]:
    """HNSW by hnswlib."""
    import hnswlib as library

    index = library.Index("ip", task.documents.shape[1])
    index.init_index(len(task.documents), ef_construction=CONSTRUCTION, M=NEIGHBORS)
    index.add_items(task.documents, num_threads=1)
    index.set_num_threads(1)

    def at(breadth: int) -> Rival:
        def search(query: np.ndarray) -> np.ndarray:
            index.set_ef(breadth)
            return np.asarray(index.knn_query(query, K)[0][0], np.int64)

        return Rival(f"hnswlib, {breadth}", search)

    return [at(breadth) for breadth in BREADTHS]


def hnsw(task: Task, tree: Path | None) -> list[Rival]:
    """HNSW by faiss."""
    index = faiss.IndexHNSWFlat(task.documents.shape[1], NEIGHBORS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = CONSTRUCTION
    for start in range(0, len(task.documents), AT_ONCE):
        index.add(np.ascontiguousarray(task.documents[start : start + AT_ONCE]))

    def at(breadth: int) -> Rival:
        options = faiss.SearchParametersHNSW(efSearch=breadth)
        return Rival(f"faiss HNSW, {breadth}", lambda query: index.search(query, K, params=options)[1][0])

    return [at(breadth) for breadth in BREADTHS]


def usearch(task: Task, tree: Path | None) -> list[Rival]:
    """HNSW by usearch."""
    from usearch.index import Index as Library

    index = Library(ndim=task.documents.shape[1], metric="ip", connectivity=NEIGHBORS, expansion_add=CONSTRUCTION)
    index.add(np.arange(len(task.documents)), np.ascontiguousarray(task.documents), threads=1)

    def at(breadth: int) -> Rival:
        def search(query: np.ndarray) -> np.ndarray:
            index.expansion_search = breadth
            return np.asarray(index.search(query[0], K, threads=1).keys, np.int64)

        return Rival(f"usearch, {breadth}", search)

    return [at(breadth) for breadth in BREADTHS]


RIVALS = {"codes": codes, "exact": exact, "scann": scann, "hnswlib": hnswlib, "hnsw": hnsw, "usearch": usearch}
OPTIONAL = ("scann", "hnswlib", "usearch")


# ---------------------------------------------------------------------------------------------------- tables


def processor(work: Callable[[], object]) -> float:
    """Return the seconds of the processor that work takes."""
    start = time.process_time()
    work()
    return time.process_time() - start


def vectors(task: Task, kinds: Sequence[str], tree: Path | None) -> None:
    """Print build time, recall and time of each rival at each of its settings."""
    rivals: list[Rival] = []
    for kind in kinds:
        if kind in OPTIONAL and importlib.util.find_spec(kind) is None:
            print(f"{kind} is left out: not installed (pip install {kind})")
            continue
        taken = processor(lambda kind=kind: rivals.extend(RIVALS[kind](task, tree)))  # type: ignore[misc]
        print(f"{kind}: built in {taken:.1f} s", flush=True)
    timed = [task.queries[row : row + 1] for row in range(min(TIMED, len(task.queries)))]
    times = [[processor(lambda r=each: [r.search(query) for query in timed]) for each in rivals] for _ in range(TURNS)]  # type: ignore[misc]
    print(f"{'':20} {'recall@10':>9} {'ms a query':>11}")
    for rival, seconds in zip(rivals, np.median(times, axis=0), strict=True):
        found = np.stack([rival.search(query[None]) for query in task.queries])
        print(f"{rival.name:20} {task.recall(found):9.4f} {1000 * seconds / len(timed):11.3f}", flush=True)


def hybrid(folder: str, dataset: str) -> None:
    """Print the time of `Index.search` and of LanceDB with the same vectors and texts, one query at a time."""
    data = Dataset.load(Path(dataset), "test")
    texts = [data.queries[name].text for name in list(data.qrels)[:TIMED]]
    with Index.open(folder) as index:
        searches = {
            f"hce, {mode}": lambda text, m=mode: index.search(text, K, mode=m)  # type: ignore[misc]
            for mode in ("dense", "words", "hybrid")
        }
        if importlib.util.find_spec("lancedb") is None:
            print("LanceDB is left out: not installed (pip install lancedb)")
        else:
            searches |= lancedb(index, list(data.corpus.texts()))
        for search in searches.values():
            search(texts[0])
        times = [[processor(lambda s=each: [s(t) for t in texts]) for each in searches.values()] for _ in range(TURNS)]  # type: ignore[misc]
    for name, seconds in zip(searches, np.median(times, axis=0), strict=True):
        print(f"{name:20} {1000 * seconds / len(texts):8.2f} ms")


def lancedb(index: Index, texts: list[str]) -> dict[str, Callable[[str], object]]:
    """Put texts into LanceDB with an inverted file of codes and an index of words, as it makes them by default."""
    import lancedb as library

    encode, start = index.encoder.encode, time.process_time()
    rows = [{"text": text, "vector": vector} for text, vector in zip(texts, encode(texts), strict=True)]
    table = library.connect(tempfile.mkdtemp(prefix="hce-search-")).create_table("documents", rows)
    table.create_index(metric="cosine")
    table.create_fts_index("text")
    print(f"LanceDB: built in {time.process_time() - start:.1f} s", flush=True)

    def dense(text: str) -> object:
        return table.search(encode([text], "query")[0]).limit(K).to_list()

    def both(text: str) -> object:
        return table.search(query_type="hybrid").vector(encode([text], "query")[0]).text(text).limit(K).to_list()

    return {"LanceDB, dense": dense, "LanceDB, hybrid": both}


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("vectors")
    command.add_argument("dataset")
    command.add_argument("--documents", help="an .npy file of vectors, in place of the collection's")
    command.add_argument("--queries", type=int, default=1000, help="how many at most")
    command.add_argument("--rivals", nargs="+", choices=RIVALS, default=list(RIVALS))
    command.add_argument("--tree", type=Path, help="the folder of the documents' tree, for very many")
    command = commands.add_parser("hybrid")
    command.add_argument("index")
    command.add_argument("dataset")
    options = parser.parse_args()
    faiss.omp_set_num_threads(1)
    if options.command == "vectors":
        vectors(load(options.dataset, options.documents, options.queries), options.rivals, options.tree)
    else:
        hybrid(options.index, options.dataset)
