"""Engines beside others' indexes: queries a second, what building takes, and what training with the tree changes.

python -m hce_lab search engines DATASET MODEL [--page PAGE]   ours beside faiss's IVF and HNSW, hnswlib and ScaNN
python -m hce_lab search aware DATASET WITH WITHOUT             a model trained with the tree, and one without
python -m hce_lab search flat DATASET MODEL                     flat beside IndexFlatIP; float16 and int8
python -m hce_lab search trees DATASET MODEL                    a tree grown bottom-up, and one grown top-down

DATASET is a BEIR folder, MODEL a folder written by `hce train` or the name of an encoder. Real documents, real
queries, one thread; `--documents` puts others in the place of the collection's documents, such as a million by
`large_corpus` here. In the place of MODEL may stand an index: then its encoder, its vectors and its engine, as they
are on disk, are taken, and `--dtype int8` has faiss's rivals keep what that engine keeps. Recall is the share of the
exact ten best that is found, by the true scores of what is found; rivals are compared where they reach `--target`. Of
IVF and tree the centroids are counted as vectors too. Times are of the processor, so that other programs count little;
rivals take turns, and the ratio is taken in each turn. Bytes are those of the index written to disk. hnswlib and scann
are packages of PyPI; without one of them, a line says so.
"""

import argparse
import importlib.util
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import faiss
import numpy as np
import torch

from hce.data.corpus import Corpus
from hce.data.judgments import Dataset
from hce.encoding.encoder import Encoder
from hce.evaluation.evaluate import evaluate
from hce.evaluation.runs import Scored
from hce.index.index import Index
from hce.index.manifest import is_index
from hce.memory import LEAF
from hce.search.engine import CODECS, ENGINES, Engine, new_engine
from hce.tree.hierarchy import Hierarchy

K = 10
ALONE = 200  # queries asked one at a time
AT_ONCE = 100_000  # documents
MOST_TRAINED = 1 << 20  # vectors that the centroids of IVF are learnt from
REORDERED = (100, 400)  # candidates that ScaNN scores anew by their whole vectors


class Task(NamedTuple):
    """Vectors of a collection and of queries, and the least score that belongs to the exact ten best."""

    dataset: Dataset
    encoder: Encoder
    documents: np.ndarray
    queries: np.ndarray
    least: np.ndarray
    hierarchy: Hierarchy | None = None
    built: Engine | None = None  # the engine of an index, whose numbers are one above the rows

    def recall(self, rows: np.ndarray) -> float:
        """Return the share of the ten best that is found, by scores and not by rows: of equal documents any will do.

        Args:
            rows: of the documents found, of shape (Q, 10); below 0 where nothing was.
        """
        found = np.asarray(self.documents[np.maximum(rows, 0)], dtype=np.float32)
        scores = np.einsum("qkn,qn->qk", found, self.queries)
        return float(((scores >= self.least[:, None] - 1e-5) & (rows >= 0)).mean())

    def engine(self, name: str, **options: Any) -> Any:
        """One of our engines, of these documents."""
        numbers = np.arange(len(self.documents))
        return new_engine(name, self.documents.shape[1], numbers=numbers, vectors=self.documents, **options)


class Graph(NamedTuple):
    """How the graph of HNSW is built: neighbours of a node (at its bottom twice as many), and breadth in building."""

    neighbours: int
    construction: int


class Rival(NamedTuple):
    """A way to search, with one dial.

    Attributes:
        name: what to call it.
        search: (queries, setting) → rows of the documents found, of shape (Q, 10).
        settings: of the dial, rising.
        counted: vectors scored for one query since the counters were reset, given the number of queries.
        size: bytes of the index.
    """

    name: str
    search: Callable[[np.ndarray, float], np.ndarray]
    settings: Sequence[float]
    counted: Callable[[int], float]
    size: Callable[[], int]


class Point(NamedTuple):
    """A rival at one setting."""

    rival: Rival
    setting: float
    recall: float
    scored: float


def load(dataset: str, model: str, split: str, most: int, others: str | None) -> Task:
    """Encode a collection, or other documents, and up to so many of the collection's queries; or open an index."""
    data, is_built = Dataset.load(Path(dataset), split), is_index(Path(model))
    encoder = Encoder.load(Path(model) / "encoder" if is_built else model, device="cpu")
    names = list(data.qrels)
    chosen = np.random.default_rng(0).permutation(len(names))[:most]
    queries = encoder.encode([data.queries[names[number]].text for number in chosen], "query")
    built, hierarchy = None, None
    if is_built:
        documents, built = of_index(Path(model))
    else:
        documents = vectors_of(others, encoder) if others else encoder.encode(list(data.corpus.texts()))
        tree = Path(model) / "hierarchy"
        hierarchy = Hierarchy.load(tree) if tree.is_dir() else None
    name = Path(model if is_built else others or dataset).name
    print(f"{name}: {len(documents):,} documents, {len(queries):,} queries, by {model}", flush=True)
    return Task(data, encoder, documents, queries, least_scores(documents, queries), hierarchy, built)


def of_index(folder: Path) -> tuple[np.ndarray, Engine]:
    """Return the vectors of an index that nothing was removed from, in a mapped file beside it, and its engine."""
    with Index.open(folder) as index, index.state.reading() as reader:
        numbers, target = reader.numbers(), folder.with_name(f"{folder.name}-vectors.npy")
        if not np.array_equal(numbers, np.arange(1, len(numbers) + 1)):
            raise SystemExit(f"{folder}: documents were removed from it; take an index that has all of its documents")
        if not target.is_file():
            rows = np.lib.format.open_memmap(target, mode="w+", dtype=np.float32, shape=(len(numbers), reader.dim))
            for start in range(0, len(numbers), AT_ONCE):
                rows[start : start + AT_ONCE] = reader.vectors_at(numbers[start : start + AT_ONCE])
            rows.flush()
        with index.state.derived.engine_part.lend(reader) as engine:
            return np.load(target, mmap_mode="r"), engine


def least_scores(documents: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Return the score of each query's exact tenth, block by block: mapped documents are never all in memory."""
    best = np.full((len(queries), K), -np.inf, np.float32)
    for start in range(0, len(documents), AT_ONCE):
        block = np.ascontiguousarray(documents[start : start + AT_ONCE], dtype=np.float32)
        found = faiss.knn(queries, block, K, metric=faiss.METRIC_INNER_PRODUCT)[0]
        best = -np.sort(-np.concatenate([best, found], axis=1), axis=1)[:, :K]
    return best[:, -1]


def vectors_of(source: str, encoder: Encoder) -> np.ndarray:
    """Read the vectors of an .npy file, or encode a corpus."""
    if source.endswith(".npy"):
        return np.load(source).astype(np.float32, copy=False)
    return encoder.encode(list(Corpus.load(source).texts()))


# ---------------------------------------------------------------------------------------------------- rivals


def tree_rival(task: Task, hierarchy: Hierarchy | None, name: str) -> Rival:
    """Our tree, that of an index where one is asked about; the dial is its effort."""
    engine: Any = task.built or task.engine("tree", hierarchy=hierarchy)
    first = 1 if task.built else 0

    def search(queries: np.ndarray, setting: float) -> np.ndarray:
        engine.effort = setting
        return engine.search(queries, K).numbers - first

    def counted(queries: int) -> float:
        # faiss does not count the nodes that the beam starts from.
        return engine._descent().whole + faiss.cvar.indexIVF_stats.ndis / queries

    return Rival(name, search, np.geomspace(0.5, 96, 81), counted, lambda: bytes_written(engine.save))


def ivf_rival(task: Task, lists: int, dtype: str) -> Rival:
    """IVF, trained by faiss on up to 256 vectors a list, and `MOST_TRAINED` in all; the dial is nprobe."""
    dim = task.documents.shape[1]
    index = faiss.index_factory(dim, f"IVF{lists},{CODECS[dtype]}", faiss.METRIC_INNER_PRODUCT)
    fill(index, task.documents, min(256 * lists, MOST_TRAINED))

    def search(queries: np.ndarray, setting: float) -> np.ndarray:
        return index.search(queries, K, params=faiss.SearchParametersIVF(nprobe=int(setting)))[1]

    def counted(queries: int) -> float:
        return lists + faiss.cvar.indexIVF_stats.ndis / queries

    probes = np.unique(np.geomspace(1, lists, 80).round())
    return Rival(f"ivf {lists}", search, probes, counted, lambda: faiss_bytes(index))


def fill(index: faiss.Index, documents: np.ndarray, sample: int) -> None:
    """Train an index on a sample of the documents, and add all, block by block: mapped ones are never all in memory."""
    if not index.is_trained:
        rows = np.random.default_rng(0).choice(len(documents), min(sample, len(documents)), replace=False)
        index.train(np.ascontiguousarray(documents[np.sort(rows)], dtype=np.float32))
    for start in range(0, len(documents), AT_ONCE):
        index.add(np.ascontiguousarray(documents[start : start + AT_ONCE], dtype=np.float32))


def hnsw_rival(task: Task, graph: Graph, dtype: str) -> Rival:
    """HNSW by faiss; the dial is efSearch."""
    dim = task.documents.shape[1]
    index = faiss.index_factory(dim, f"HNSW{graph.neighbours},{CODECS[dtype]}", faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = graph.construction
    fill(index, task.documents, 65_536)

    def search(queries: np.ndarray, setting: float) -> np.ndarray:
        return index.search(queries, K, params=faiss.SearchParametersHNSW(efSearch=int(setting)))[1]

    def counted(queries: int) -> float:
        return faiss.cvar.hnsw_stats.ndis / queries

    return Rival("hnsw, faiss", search, BREADTHS, counted, lambda: faiss_bytes(index))


def hnswlib_rival(task: Task, graph: Graph) -> Rival:
    """HNSW by hnswlib; the dial is ef."""
    import hnswlib

    index = hnswlib.Index("ip", task.documents.shape[1])
    index.init_index(len(task.documents), ef_construction=graph.construction, M=graph.neighbours)
    index.set_num_threads(1)
    index.add_items(task.documents)

    def search(queries: np.ndarray, setting: float) -> np.ndarray:
        index.set_ef(int(setting))
        return index.knn_query(queries, K)[0].astype(np.int64)

    return Rival("hnsw, hnswlib", search, BREADTHS, uncounted, index.index_file_size)


def scann_rivals(task: Task) -> list[Rival]:
    """ScaNN as its authors advise, by leaves of codes and then whole vectors; the dial is the leaves searched."""
    import scann

    leaves = int(2 * len(task.documents) ** 0.5)
    builder = scann.scann_ops_pybind.builder(task.documents, K, "dot_product").set_n_training_threads(1)
    builder = builder.tree(num_leaves=leaves, num_leaves_to_search=100, training_sample_size=len(task.documents))
    builder = builder.score_ah(2, anisotropic_quantization_threshold=0.2).reorder(REORDERED[0])
    index = builder.build()
    index.set_num_threads(1)

    def rival(candidates: int) -> Rival:
        def search(queries: np.ndarray, setting: float) -> np.ndarray:
            options = {"leaves_to_search": int(setting), "pre_reorder_num_neighbors": candidates}
            if len(queries) == 1:
                return index.search(queries[0], K, **options)[0][None].astype(np.int64)
            return index.search_batched(queries, K, **options)[0].astype(np.int64)

        def written(folder: Path) -> None:
            index.serialize(str(folder))

        probes = np.unique(np.geomspace(1, leaves, 60).round())
        return Rival(f"scann, best {candidates}", search, probes, uncounted, lambda: bytes_written(written))

    return [rival(candidates) for candidates in REORDERED]


def flat_rival(task: Task) -> Rival:
    """Every vector; no dial."""
    engine = task.engine("flat")

    def search(queries: np.ndarray, _: float) -> np.ndarray:
        return engine.search(queries, K).numbers

    return Rival("flat", search, [0.0], lambda _: len(task.documents), lambda: bytes_written(engine.save))


BREADTHS = np.unique(np.geomspace(K, 4000, 48).round())  # of the search in a graph


def uncounted(_: int) -> float:
    """Say that a rival does not count the vectors that it scores."""
    return float("nan")


def faiss_bytes(index: faiss.Index) -> int:
    """Return the bytes of an index of faiss."""
    return len(faiss.serialize_index(index))


def bytes_written(write: Callable[[Path], None]) -> int:
    """Return the bytes of what is written to a folder."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def build(task: Task, kinds: Sequence[str], graph: Graph, lists_by_root: Sequence[float], dtype: str) -> list[Rival]:
    """Build the rivals of these kinds, those of faiss with vectors kept in `dtype`, and print what each took."""
    root = len(task.documents) ** 0.5
    makers: dict[str, list[Callable[[], Rival | list[Rival]]]] = {
        "tree": [lambda: tree_rival(task, task.hierarchy, "tree")],
        "ivf": [lambda lists=int(times * root): ivf_rival(task, lists, dtype) for times in lists_by_root],
        "hnsw": [lambda: hnsw_rival(task, graph, dtype)],
        "hnswlib": [lambda: hnswlib_rival(task, graph)],
        "scann": [lambda: scann_rivals(task)],
        "flat": [lambda: flat_rival(task)],
    }
    found = []
    print(f"{'':16} {'build':>9} {'bytes a vector':>14}")
    for kind in kinds:
        if kind in OPTIONAL and not importlib.util.find_spec(kind):
            print(f"{kind} is left out: not installed (pip install {kind})")
            continue
        for make in makers[kind]:
            start = time.process_time()
            made = make()
            taken = time.process_time() - start
            for rival in made if isinstance(made, list) else [made]:
                found.append(rival)
                print(f"{rival.name:16} {taken:7.1f} s {rival.size() / len(task.documents):14.0f}", flush=True)
    return found


KINDS = ("tree", "ivf", "hnsw", "hnswlib", "scann", "flat")
OPTIONAL = ("hnswlib", "scann")


def at(task: Task, rival: Rival, setting: float) -> Point:
    """Recall and vectors scored at a setting."""
    faiss.cvar.indexIVF_stats.reset()
    faiss.cvar.hnsw_stats.reset()
    rows = rival.search(task.queries, setting)
    return Point(rival, setting, task.recall(rows), rival.counted(len(task.queries)))


def least_effort(task: Task, rival: Rival, target: float) -> Point:
    """Find the lowest setting that reaches the target; recall rises with the dial, so it is found by halving."""
    low, high = 0, len(rival.settings) - 1
    while low < high:
        middle = (low + high) // 2
        if at(task, rival, rival.settings[middle]).recall >= target:
            high = middle
        else:
            low = middle + 1
    return at(task, rival, rival.settings[low])


# ---------------------------------------------------------------------------------------------------- time


def seconds(work: Callable[[], object]) -> float:
    """Processor time."""
    start = time.process_time()
    work()
    return time.process_time() - start


def in_turns(works: Sequence[Callable[[], object]], turns: int) -> np.ndarray:
    """Times of shape (turns, works): each turn runs all, so that a busy moment hits all alike."""
    for work in works:
        work()
    return np.array([[seconds(work) for work in works] for _ in range(turns)])


def one_by_one(search: Callable[[np.ndarray], object], queries: np.ndarray) -> Callable[[], None]:
    """Work that asks the first queries one at a time."""

    def work() -> None:
        for row in range(min(ALONE, len(queries))):
            search(queries[row : row + 1])

    return work


def query_times(task: Task, points: Sequence[Point], turns: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds a query, alone and in a batch, each of shape (turns, points)."""
    searches = [lambda queries, p=point: p.rival.search(queries, p.setting) for point in points]
    alone = in_turns([one_by_one(search, task.queries) for search in searches], turns)
    batch = in_turns([lambda s=search: s(task.queries) for search in searches], turns)
    return alone / min(ALONE, len(task.queries)), batch / len(task.queries)


# ---------------------------------------------------------------------------------------------------- commands


def engines(task: Task, rivals: Sequence[Rival], targets: Sequence[float], turns: int, page: str | None) -> None:
    """Print every rival at its least effort for the targets."""
    for target in targets:
        at_target(task, rivals, target, turns)
    if page is not None:
        draw(task, rivals, Path(page))


def at_target(task: Task, rivals: Sequence[Rival], target: float, turns: int) -> None:
    """Print the rivals that reach the target, then the queries/s of the first, ours, by those of the fastest other."""
    points = [least_effort(task, rival, target) for rival in rivals]
    for point in points:
        if point.recall < target:
            print(f"{point.rival.name} does not reach {target}: {point.recall:.4f} at {point.setting:.4g}")
    points = [point for point in points if point.recall >= target]
    alone, batch = query_times(task, points, turns)
    print(f"{'at recall >= ' + str(target):16} {'setting':>8} {'recall':>7} {'scored':>8} {'alone':>9} {'batch':>9}")
    for point, *times in zip(points, np.median(alone, axis=0), np.median(batch, axis=0), strict=True):
        speeds = " ".join(f"{1 / each:7.0f}/s" for each in times)
        print(f"{point.rival.name:16} {point.setting:8.4g} {point.recall:7.4f} {point.scored:8.0f} {speeds}")
    for asked, times in (("alone", alone), ("in a batch", batch)):
        ratios = np.median(times[:, 1:] / times[:, :1], axis=0)
        if len(ratios):
            first, fastest = points[0].rival.name, points[1 + int(ratios.argmin())].rival.name
            print(f"{first} / {fastest}: {ratios.min():.2f}x the queries/s {asked}", flush=True)


def draw(task: Task, rivals: Sequence[Rival], page: Path) -> None:
    """Recall against vectors scored and against queries a second, as a page that needs no network."""
    from plotly.subplots import make_subplots

    figure = make_subplots(1, 2, subplot_titles=["vectors scored", "queries a second, in a batch, one thread"])
    for number, rival in enumerate(rivals):
        curve, speeds = [], []
        for setting in rival.settings[:: max(1, len(rival.settings) // 15)]:
            curve.append(at(task, rival, setting))
            speeds.append(len(task.queries) / seconds(lambda r=rival, s=setting: r.search(task.queries, s)))
            if curve[-1].recall > 0.995:
                break
        recalls = [point.recall for point in curve]
        style = {"name": rival.name, "legendgroup": rival.name, "mode": "lines+markers", "line_color": COLOURS[number]}
        figure.add_scatter(x=[point.scored for point in curve], y=recalls, row=1, col=1, **style)
        figure.add_scatter(x=speeds, y=recalls, row=1, col=2, showlegend=False, **style)
    figure.update_xaxes(type="log")
    figure.update_yaxes(title_text="recall@10", range=[0.7, 1.005])
    figure.update_layout(
        title=f"{Path(task.dataset.corpus.name).parent.name}: {len(task.documents):,} documents",
        template="simple_white",
    )
    figure.write_html(page, include_plotlyjs=True)


COLOURS = ("#1b6ca8", "#c0392b", "#e07b6f", "#f0b8b0", "#2e8b57", "#8fbc8f", "#8e44ad", "#c39bd3", "#777777")


def aware(with_tree: Task, without: Task, target: float) -> None:
    """Print the recall of two encoders, each searched by a tree grown of its own vectors, at equal work."""
    rivals = [tree_rival(task, None, name) for task, name in ((with_tree, "with"), (without, "without"))]
    print(f"{'effort':>6} {'scored with':>12} {'without':>8} {'recall with':>12} {'without':>8}")
    for effort in (0.5, 1, 2, 3, 4, 6, 8):
        one, other = at(with_tree, rivals[0], effort), at(without, rivals[1], effort)
        print(
            f"{effort:6.1f} {one.scored:12.0f} {other.scored:8.0f} {one.recall:12.4f} {other.recall:8.4f}", flush=True
        )
    points = [least_effort(task, rival, target) for task, rival in zip((with_tree, without), rivals, strict=True)]
    print(f"vectors scored at recall {target}: {points[0].scored:.0f} with, {points[1].scored:.0f} without the tree")
    for task, name in ((with_tree, "with"), (without, "without")):
        print(f"exact search, {name}: {ndcg(task, task.engine('flat')):.4f} nDCG@10")


def trees(task: Task) -> None:
    """Print what growing a tree bottom-up and top-down takes, how tight both are, and what searching them finds."""
    print(f"{'':14} {'CPU s':>7} {'peak GB':>8} {'to leaf':>8} {'siblings':>9} {'recall at effort':>16} 1, 2, 4, 8")
    for method in ("agglomerative", "divisive"):
        context = multiprocessing.get_context("fork")  # a process each, so that each has a peak of its own
        process = context.Process(target=_tree_line, args=(task, method))
        process.start()
        process.join()


def _tree_line(task: Task, method: Literal["agglomerative", "divisive"]) -> None:
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak begins anew
    before, start = _resident("VmRSS"), time.process_time()
    tree = Hierarchy.build(task.documents, LEAF, method=method)
    taken, peak = time.process_time() - start, (_resident("VmHWM") - before) / 2**20
    leaves = tree.levels[-1]
    tight = float(own_cosines(task.documents, leaves.centroids, tree.document_parent).mean())
    above = tree.levels[-2]
    siblings = float(own_cosines(leaves.centroids, above.centroids, leaves.parent).mean())
    rival = tree_rival(task, tree, method)
    points = [at(task, rival, effort) for effort in (1, 2, 4, 8)]
    found = "  ".join(f"{point.recall:.4f} ({point.scored:.0f})" for point in points)
    print(f"{method:14} {taken:7.1f} {peak:8.2f} {tight:8.4f} {siblings:9.4f} {found}", flush=True)


def _resident(field: str) -> int:
    """Memory of this process in kB (Linux)."""
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0])


def own_cosines(rows: np.ndarray, centroids: np.ndarray, home: np.ndarray) -> np.ndarray:
    """Cosine of each unit row to its own centroid, a part of the rows at a time."""
    parts = [slice(start, start + 50_000) for start in range(0, len(rows), 50_000)]
    return np.concatenate([np.einsum("ij,ij->i", rows[part], centroids[home[part]]) for part in parts])


def flat(task: Task, turns: int) -> None:
    """Print the cost of our flat over faiss's own, and what each engine loses by smaller numbers."""
    index, engine = faiss.IndexFlatIP(task.documents.shape[1]), task.engine("flat")
    index.add(task.documents)
    few = task.queries[:ALONE]
    for k in (10, 100):
        searches = (lambda queries, k=k: engine.search(queries, k), lambda queries, k=k: index.search(queries, k))
        alone = in_turns([one_by_one(search, few[:50]) for search in searches], turns)
        batch = in_turns([lambda s=search: s(few) for search in searches], 3)
        ratios = [np.median(times[:, 0] / times[:, 1]) for times in (alone, batch)]
        milliseconds = 1000 * np.median(alone[:, 1]) / 50
        print(
            f"flat / IndexFlatIP, k = {k}: {ratios[0]:.2f}x alone ({milliseconds:.1f} ms), {ratios[1]:.2f}x in a batch"
        )
    print(f"{'engine':6} {'dtype':8} {'recall@10':>9} {'nDCG@10':>8} {'bytes a vector':>14}")
    for name in ENGINES:
        for dtype in CODECS:
            engine = task.engine(name, dtype=dtype)
            recall = task.recall(engine.search(task.queries, K).numbers)
            print(f"{name:6} {dtype:8} {recall:9.4f} {ndcg(task, engine):8.4f} {bytes_of(task, dtype):14d}", flush=True)


def bytes_of(task: Task, dtype: str) -> int:
    """What a vector takes."""
    return task.documents.shape[1] * {"float32": 4, "float16": 2, "int8": 1}[dtype]


def ndcg(task: Task, engine: Any) -> float:
    """nDCG@10 on the labelled queries."""

    class Searcher:
        def search(self, queries: Sequence[str], k: int) -> list[list[Scored]]:
            found = engine.search(task.encoder.encode(queries, "query"), k)
            ids = task.dataset.corpus.ids
            return [
                [Scored(ids[number], float(score)) for score, number in zip(*row, strict=True)]
                for row in zip(found.scores, found.numbers, strict=True)
            ]

    report = evaluate(Searcher(), task.dataset.queries, task.dataset.qrels, ["nDCG@10"], depth=K + 1)
    return report.means["nDCG@10"]


def numbers(text: str) -> list[float]:
    """Read numbers with commas between them."""
    return [float(part) for part in text.split(",")]


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", default="test", help="whose queries")
    parser.add_argument("--queries", type=int, default=1000, help="how many of them at most")
    parser.add_argument(
        "--target", type=numbers, default=[0.95], help="recalls at which rivals are compared: 0.95,0.99"
    )
    parser.add_argument("--turns", type=int, default=5, help="in which rivals are timed")
    parser.add_argument("--documents", help="a corpus, or an .npy file of vectors, in place of the collection's")
    commands = parser.add_subparsers(dest="command", required=True)
    commands_of = {"engines": ["model"], "aware": ["with_tree", "without"], "flat": ["model"], "trees": ["model"]}
    for name, models in commands_of.items():
        command = commands.add_parser(name)
        command.add_argument("dataset")
        for model in models:
            command.add_argument(model)
        if name == "engines":
            command.add_argument("--page", help="write the curves to this HTML file")
            command.add_argument("--rivals", nargs="+", choices=KINDS, default=KINDS, help="ours first")
            command.add_argument("--lists", type=numbers, default=[1, 4, 16], help="of IVF, by √N: 1,4,16")
            command.add_argument("--neighbours", type=int, default=32, help="of a node in a graph")
            command.add_argument("--construction", type=int, default=100, help="breadth in building a graph")
            command.add_argument(
                "--dtype", choices=CODECS, default="float32", help="what faiss's rivals keep vectors in"
            )
    options = parser.parse_args()
    faiss.omp_set_num_threads(1)
    torch.set_num_threads(1)

    def task(model: str) -> Task:
        return load(options.dataset, model, options.split, options.queries, options.documents)

    if options.command == "engines":
        asked = task(options.model)
        rivals = build(
            asked, options.rivals, Graph(options.neighbours, options.construction), options.lists, options.dtype
        )
        engines(asked, rivals, options.target, options.turns, options.page)
    elif options.command == "aware":
        aware(task(options.with_tree), task(options.without), options.target[0])
    elif options.command == "trees":
        trees(task(options.model))
    else:
        flat(task(options.model), options.turns)
