"""Engines beside bare faiss: vectors scored, queries a second, and what an encoder trained with the tree changes.

python benchmarks/search.py engines DATASET MODEL [--page PAGE]   our engines beside faiss's IVF and HNSW
python benchmarks/search.py aware DATASET WITH WITHOUT             a model trained with the tree, and one without
python benchmarks/search.py flat DATASET MODEL                     flat beside IndexFlatIP; float16 and int8

DATASET is a BEIR folder, MODEL a folder written by `hce train`. Real documents, real queries, one thread. Recall is
the share of the exact ten best that is found; rivals are compared where they reach `--target`. Of IVF and tree the
centroids are counted as vectors too. Times are of the processor, so that other programs count little; rivals take
turns, and the ratio is taken in each turn.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import numpy as np
import torch

from hce.data.judgments import Dataset
from hce.encoding.encoder import Encoder
from hce.evaluation.evaluate import evaluate
from hce.evaluation.runs import Scored
from hce.search.engine import CODECS, ENGINES, new_engine
from hce.tree.hierarchy import Hierarchy

K = 10
NEIGHBOURS = 32  # of a node in HNSW's graph
TURNS = 7
ALONE = 200  # queries asked one at a time


class Task(NamedTuple):
    """Vectors of a collection and of queries, and the least score that belongs to the exact ten best."""

    dataset: Dataset
    encoder: Encoder
    documents: np.ndarray
    queries: np.ndarray
    least: np.ndarray
    hierarchy: Hierarchy | None

    def recall(self, scores: np.ndarray) -> float:
        """By scores and not by numbers: of equal documents any will do."""
        return float((scores >= self.least[:, None] - 1e-5).mean())

    def engine(self, name: str, **options: Any) -> Any:
        """One of our engines, of these documents."""
        numbers = np.arange(len(self.documents))
        return new_engine(name, self.documents.shape[1], numbers=numbers, vectors=self.documents, **options)


class Rival(NamedTuple):
    """A way to search, with one dial.

    Attributes:
        name: what to call it.
        search: (queries, setting) → scores of shape (Q, 10).
        settings: of the dial, rising.
        counted: vectors scored for one query since the counters were reset, given the number of queries.
    """

    name: str
    search: Callable[[np.ndarray, float], np.ndarray]
    settings: Sequence[float]
    counted: Callable[[int], float]


class Point(NamedTuple):
    """A rival at one setting."""

    rival: Rival
    setting: float
    recall: float
    scored: float


def load(dataset: str, model: str, split: str, most: int) -> Task:
    """Encode a collection and up to so many of its queries."""
    data, encoder = Dataset.load(Path(dataset), split), Encoder.load(model, device="cpu")
    names = list(data.qrels)
    chosen = np.random.default_rng(0).permutation(len(names))[:most]
    documents = encoder.encode(list(data.corpus.texts()))
    queries = encoder.encode([data.queries[names[number]].text for number in chosen], "query")
    flat = faiss.IndexFlatIP(documents.shape[1])
    flat.add(documents)
    tree = Path(model) / "hierarchy"
    hierarchy = Hierarchy.load(tree) if tree.is_dir() else None
    print(f"{Path(dataset).name}: {len(documents):,} documents, {len(queries):,} queries, by {model}", flush=True)
    return Task(data, encoder, documents, queries, flat.search(queries, K)[0][:, -1], hierarchy)


# ---------------------------------------------------------------------------------------------------- rivals


def tree_rival(task: Task, hierarchy: Hierarchy | None, name: str) -> Rival:
    """Our tree; the dial is its effort."""
    engine = task.engine("tree", hierarchy=hierarchy)

    def search(queries: np.ndarray, setting: float) -> np.ndarray:
        engine.effort = setting
        return engine.search(queries, K).scores

    def counted(queries: int) -> float:
        # faiss does not count the nodes that the beam starts from.
        return engine._descent().whole + faiss.cvar.indexIVF_stats.ndis / queries

    return Rival(name, search, np.geomspace(0.5, 96, 81), counted)


def ivf_rival(task: Task, lists: int) -> Rival:
    """IVF, trained by faiss on all vectors; the dial is nprobe."""
    quantizer = faiss.IndexFlatIP(task.documents.shape[1])
    index = faiss.IndexIVFFlat(quantizer, task.documents.shape[1], lists, faiss.METRIC_INNER_PRODUCT)
    index.train(task.documents)
    index.add(task.documents)

    def search(queries: np.ndarray, setting: float) -> np.ndarray:
        return index.search(queries, K, params=faiss.SearchParametersIVF(nprobe=int(setting)))[0]

    probes = np.unique(np.geomspace(1, lists, 80).round())
    return Rival(f"ivf {lists}", search, probes, lambda count: lists + faiss.cvar.indexIVF_stats.ndis / count)


def hnsw_rival(task: Task) -> Rival:
    """HNSW; the dial is efSearch."""
    index = faiss.IndexHNSWFlat(task.documents.shape[1], NEIGHBOURS, faiss.METRIC_INNER_PRODUCT)
    index.add(task.documents)

    def search(queries: np.ndarray, setting: float) -> np.ndarray:
        return index.search(queries, K, params=faiss.SearchParametersHNSW(efSearch=int(setting)))[0]

    settings = np.unique(np.geomspace(K, 4000, 48).round())
    return Rival("hnsw", search, settings, lambda count: faiss.cvar.hnsw_stats.ndis / count)


def flat_rival(task: Task) -> Rival:
    """Every vector; no dial."""
    engine = task.engine("flat")
    return Rival("flat", lambda queries, _: engine.search(queries, K).scores, [0.0], lambda _: len(task.documents))


def at(task: Task, rival: Rival, setting: float) -> Point:
    """Recall and vectors scored at a setting."""
    faiss.cvar.indexIVF_stats.reset()
    faiss.cvar.hnsw_stats.reset()
    scores = rival.search(task.queries, setting)
    return Point(rival, setting, task.recall(scores), rival.counted(len(task.queries)))


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


def in_turns(works: Sequence[Callable[[], object]], turns: int = TURNS) -> np.ndarray:
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


def query_times(task: Task, points: Sequence[Point]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds a query, alone and in a batch, each of shape (turns, points)."""
    searches = [lambda queries, p=point: p.rival.search(queries, p.setting) for point in points]
    alone = in_turns([one_by_one(search, task.queries) for search in searches])
    batch = in_turns([lambda s=search: s(task.queries) for search in searches])
    return alone / min(ALONE, len(task.queries)), batch / len(task.queries)


# ---------------------------------------------------------------------------------------------------- commands


def engines(task: Task, target: float, page: str | None) -> None:
    """Print every rival at its least effort for the target, then the ratios of tree to the best IVF."""
    root = len(task.documents) ** 0.5
    rivals = [tree_rival(task, task.hierarchy, "tree")]
    rivals += [ivf_rival(task, int(times * root)) for times in (1, 4, 16)]
    rivals += [hnsw_rival(task), flat_rival(task)]
    points = [least_effort(task, rival, target) for rival in rivals]
    alone, batch = query_times(task, points)
    print(f"{'at recall >= ' + str(target):16} {'setting':>8} {'recall':>7} {'scored':>8} {'alone':>9} {'batch':>9}")
    for point, *times in zip(points, np.median(alone, axis=0), np.median(batch, axis=0), strict=True):
        speeds = " ".join(f"{1 / each:7.0f}/s" for each in times)
        print(f"{point.rival.name:16} {point.setting:8.4g} {point.recall:7.4f} {point.scored:8.0f} {speeds}")
    fewest = min(point.scored for point in points[1:4])
    faster = [np.median(times[:, 1:4].min(axis=1) / times[:, 0]) for times in (alone, batch)]
    print(
        f"tree / best ivf: {points[0].scored / fewest:.2f}x the vectors scored, "
        f"{faster[0]:.2f}x the queries/s alone, {faster[1]:.2f}x in a batch"
    )
    if page is not None:
        draw(task, rivals, Path(page))


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


COLOURS = ("#1b6ca8", "#c0392b", "#e07b6f", "#f0b8b0", "#2e8b57", "#777777")


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


def flat(task: Task) -> None:
    """Print the cost of our flat over faiss's own, and what each engine loses by smaller numbers."""
    index, engine = faiss.IndexFlatIP(task.documents.shape[1]), task.engine("flat")
    index.add(task.documents)
    few = task.queries[:ALONE]
    for k in (10, 100):
        searches = (lambda queries, k=k: engine.search(queries, k), lambda queries, k=k: index.search(queries, k))
        alone = in_turns([one_by_one(search, few[:50]) for search in searches])
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
            recall = share_found(task, engine)
            print(f"{name:6} {dtype:8} {recall:9.4f} {ndcg(task, engine):8.4f} {bytes_of(task, dtype):14d}", flush=True)


def share_found(task: Task, engine: Any) -> float:
    """Recall by the true scores of what was found, as the codes' own are a little off."""
    numbers = engine.search(task.queries, K).numbers
    return task.recall(np.einsum("qkn,qn->qk", task.documents[numbers], task.queries))


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


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", default="test", help="whose queries")
    parser.add_argument("--queries", type=int, default=1000, help="how many of them at most")
    parser.add_argument("--target", type=float, default=0.95, help="the recall at which rivals are compared")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, models in (("engines", ["model"]), ("aware", ["with_tree", "without"]), ("flat", ["model"])):
        command = commands.add_parser(name)
        command.add_argument("dataset")
        for model in models:
            command.add_argument(model)
        if name == "engines":
            command.add_argument("--page", help="write the curves to this HTML file")
    options = parser.parse_args()
    faiss.omp_set_num_threads(1)
    torch.set_num_threads(1)

    def task(model: str) -> Task:
        return load(options.dataset, model, options.split, options.queries)

    if options.command == "engines":
        engines(task(options.model), options.target, options.page)
    elif options.command == "aware":
        aware(task(options.with_tree), task(options.without), options.target)
    else:
        flat(task(options.model))


if __name__ == "__main__":
    main()
