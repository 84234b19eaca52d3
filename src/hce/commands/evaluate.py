"""`hce evaluate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

from typer import Option

from hce.commands import common
from hce.data.records import Reading
from hce.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from hce.data.corpus import Corpus
    from hce.data.judgments import Qrels, Query
    from hce.encoding.encoder import Encoder
    from hce.encoding.reranker import Reranker
    from hce.evaluation.evaluate import Report, Searcher
    from hce.evaluation.runs import Run
    from hce.evaluation.significance import Paired
    from hce.index.index import Index
    from hce.index.ranking import Hit, SearchMode

MEASURES = "nDCG@10,RR@10,AP,Success@1,Success@5,R@1,R@5,R@10,R@20,R@100,R_cap@100"
SAMPLE = 100  # documents whose texts are compared between index and collection
WHAT = "what to measure: a model, an encoder or an index"
COMPARE = "compare with this model, index or TREC run (a file), query by query"
OWN = "drop a hit whose id is the query's own (BEIR's rule)"
RERANK = "a cross-encoder that re-ranks what --model finds"
AGAINST = {**common.MODEL, "metavar": "DIR|NAME|HUB-ID|RUN"}
DEPTH = "hits to retrieve per query, and to keep of compared runs; raised to the deepest cut-off of the measures"
MODE = "search mode: hybrid, dense or words; default: hybrid for an index, dense for a model"


@dataclass(frozen=True)
class InMode:
    """Searches an index in one mode, for `evaluate`.

    `rerank` is a cross-encoder, and how many of the first hits it reads; the other hits follow in their old order.
    In `Index.search`, by contrast, a cross-encoder reads at least every hit that is returned.
    """

    index: Index
    mode: SearchMode
    rerank: tuple[Reranker, int] | None = None

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Find the k best documents of each query, best first."""
        from hce.index.ranking import reranked

        if self.rerank is None:
            return self.index.search(queries, k, mode=self.mode)
        reranker, depth = self.rerank
        hits = self.index.search(queries, max(k, depth), mode=self.mode)
        return [reranked(reranker, query, row, depth)[:k] for query, row in zip(queries, hits, strict=True)]


class Task(NamedTuple):
    """Judgments, measures and options; queries and corpus are loaded only for a model or an index."""

    qrels: Qrels
    queries: dict[str, Query]
    corpus: Corpus | None
    measures: list[str]
    depth: int
    drop_self: bool
    mode: SearchMode | None


class Source(NamedTuple):
    """A system to measure: a run, a model or an index; an index may have a cross-encoder and its depth."""

    name: str
    is_run: bool
    rerank: tuple[Reranker, int] | None = None


class Measured(NamedTuple):
    """A run and its scores."""

    name: str
    run: Run
    report: Report


def evaluate(
    dataset: common.DatasetArgument,
    model: Annotated[str | None, Option("--model", "-m", help=WHAT, **common.MODEL)] = None,
    run_file: Annotated[Path | None, Option(help="measure this TREC run instead of a model")] = None,
    split: Annotated[str, Option(help="which judgments: qrels/SPLIT.tsv")] = "test",
    measures: Annotated[str, Option(help="names, separated by commas")] = MEASURES,
    against: Annotated[str | None, Option(help=COMPARE, **AGAINST)] = None,
    run: Annotated[Path | None, Option(help="write the rankings as a TREC run (.gz: compressed)")] = None,
    per_query: Annotated[Path | None, Option(help="write each query's values: a .tsv or .jsonl file")] = None,
    depth: Annotated[int, Option(help=DEPTH, min=1)] = 100,
    drop_self: Annotated[bool, Option("--drop-self/--keep-self", help=OWN)] = True,
    mode: Annotated[str | None, Option(help=MODE, show_default=False)] = None,
    rerank: Annotated[str | None, Option(metavar="DIR|HUB-ID", help=RERANK, show_default=False)] = None,
    rerank_depth: Annotated[int, Option(help="how many of the first hits --rerank reads", min=1)] = 50,
    fields: common.FieldsOption = None,
    seed: common.SeedOption = 0,
    as_json: common.JsonOption = False,
) -> None:
    """Measure how well a model, an index or a run ranks the relevant documents.

    Examples:
      hce evaluate scifact -m my-model
      hce evaluate scifact -m my-index --against my-model
      hce evaluate scifact -m my-index --rerank cross-encoder/ms-marco-MiniLM-L6-v2 --against my-index
      hce evaluate scifact -m my-model --against minilm --measures ndcg@10,mrr@10
      hce evaluate scifact -m my-model --run my.trec --per-query my.tsv
      hce evaluate scifact --run-file my.trec --against bm25.trec
    """
    from hce.data.judgments import find_split

    if bool(model) == bool(run_file):
        raise InputError("give either --model, or --run-file with a run to measure")
    reading = _reading(fields, model, against)
    find_split(dataset, split)  # fails before the slow imports below

    from hce.evaluation.evaluate import parse_measure

    parsed = [parse_measure(name) for name in measures.split(",")]
    depth = max([depth, *(measure.cutoff or 0 for measure in parsed)])
    _check_outputs(run, per_query)
    reranking = _reranking(model, rerank, rerank_depth)
    sources = [Source(str(model or run_file), model is None, reranking)]
    sources += [Source(against, Path(against).is_file())] if against else []
    judged = _read(dataset, split, reading, searches=not all(source.is_run for source in sources))
    task = Task(*judged, list(map(str, parsed)), depth, drop_self, cast("SearchMode | None", mode))
    systems = _measured(task, sources)
    paired = _paired(systems, seed)
    _write(systems[0], run, per_query)
    if as_json:
        common.print_json({"dataset": str(dataset), "split": split, **_as_json(task, systems, paired)})
        return
    documents = f" · {len(task.corpus):,} documents" if task.corpus else ""
    common.show(f"{dataset} · {split} · {len(task.qrels):,} queries{documents}\n")
    common.out.print(_table(systems, paired))


def _reading(fields: list[str] | None, *specs: str | None) -> Reading:
    """Return how to read documents: by --fields, or as the index remembers."""
    from hce.index.manifest import Manifest, is_index

    named = Reading(**common.parse_fields(fields or ()))
    kept = [Manifest.read(Path(spec)).fields for spec in specs if spec and is_index(spec)]
    return named.remembering(next(filter(None, kept), None))


def _reranking(model: str | None, rerank: str | None, depth: int) -> tuple[Reranker, int] | None:
    """Load the cross-encoder for --rerank; return it with its depth."""
    from hce.index.manifest import is_index

    if rerank is None:
        return None
    if model is None or not is_index(model):
        raise InputError("--rerank needs an index for --model, to read the texts of the hits")
    from hce.encoding.reranker import Reranker

    return Reranker.load(rerank), depth


def _check_outputs(run: Path | None, per_query: Path | None) -> None:
    """Fail on outputs that cannot be written, before the work."""
    from hce.evaluation.evaluate import VALUES_SUFFIXES

    for path in (run, per_query):
        if path and (path.is_dir() or not path.parent.is_dir()):
            reason = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise InputError(f"{path}: {reason}; give the name of a file in an existing folder")
    if per_query and per_query.suffix not in VALUES_SUFFIXES:
        raise InputError(f"{per_query}: unknown ending; give a file ending in {' or '.join(VALUES_SUFFIXES)}")


def _read(
    folder: Path, split: str, reading: Reading, *, searches: bool
) -> tuple[Qrels, dict[str, Query], Corpus | None]:
    from hce.data.corpus import Corpus
    from hce.data.judgments import Qrels, find_queries, find_split, read_queries
    from hce.evaluation.evaluate import check_documents

    path = find_split(folder, split)
    if not searches:
        return Qrels.read(path), {}, None
    queries = read_queries(find_queries(folder))
    qrels = Qrels.read(path, queries=queries)
    corpus = Corpus.load(folder, reading)
    check_documents(qrels, corpus.left_out.union(corpus.ids), str(folder))
    return qrels, queries, corpus


def _measured(task: Task, sources: list[Source]) -> list[Measured]:
    """Open all systems, so that a wrong name fails at once; then measure each."""
    from hce.evaluation.evaluate import kept_hits, rank, score_run

    systems = []
    for source, opened in [(source, _open(source)) for source in sources]:
        name, drop_self = source.name, task.drop_self
        if isinstance(opened, Mapping):
            run = kept_hits(opened, task.depth, drop_self=drop_self) if len(sources) > 1 else opened
        else:
            name = f"{name}, {source.rerank[0].name}" if source.rerank else name
            run = rank(
                _searcher(task, opened, source.rerank), task.queries, task.qrels, task.depth, drop_self=drop_self
            )
        systems.append(Measured(name, run, score_run(run, task.qrels, task.measures, drop_self=drop_self)))
    if judged_zero := systems[0].report.without_positives:
        common.note(f"{len(judged_zero):,} queries have no relevant document ({judged_zero[0]!r} …) and score 0")
    for system in systems:
        if lost := system.report.without_hits:
            common.note(f"{system.name}: {len(lost):,} queries have no hits ({lost[0]!r} …) and score 0")
    return systems


def _open(source: Source) -> Run | Encoder | Index:
    from hce.encoding.encoder import Encoder
    from hce.evaluation.runs import read_run
    from hce.index.index import Index
    from hce.index.manifest import is_index

    if source.is_run:
        return read_run(source.name)
    return Index.open(source.name) if is_index(source.name) else Encoder.load(source.name)


def _searcher(task: Task, source: Encoder | Index, rerank: tuple[Reranker, int] | None) -> Searcher:
    """Return a searcher in the task's mode, for an index or a model with the corpus."""
    from hce.evaluation.evaluate import DenseSearcher
    from hce.index.index import Index

    corpus = cast("Corpus", task.corpus)  # loaded, because a model or an index is measured
    if isinstance(source, Index):
        source.with_matched = source.with_paths = False
        _check_index(source, corpus)
        return InMode(source, task.mode or "hybrid", rerank)
    if source.name == "static":
        common.note("static is measured as it was distilled: not fitted to this corpus, not trained")
    if task.mode in (None, "dense"):
        return DenseSearcher.of(source, corpus, progress=True)
    return InMode(Index.temporary(corpus, source), task.mode)


def _check_index(index: Index, corpus: Corpus) -> None:
    """Fail on an index of other documents; report if some are missing."""
    lacking = dict.fromkeys(document_id for document_id in corpus.ids if document_id not in index)
    shared = list(islice((document for document in corpus if document.id not in lacking), SAMPLE))
    if not shared:
        raise InputError(f"{index.path}: holds none of the {len(corpus):,} documents of {corpus.name}; index them")
    if all(getattr(index.get(document.id), "text", None) != document.text for document in shared):
        raise InputError(f"{index.path}: its documents have ids of {corpus.name} but other texts; index {corpus.name}")
    if lacking:
        first = next(iter(lacking))
        common.note(f"{index.path}: {len(lacking):,} of the collection's {len(corpus):,} are missing ({first!r} …)")


def _paired(systems: list[Measured], seed: int) -> dict[str, Paired]:
    """Compare two systems by each measure; return {} for a single system."""
    from hce.evaluation.significance import compare_several

    if len(systems) < 2:
        return {}
    first, second = (system.report.per_query for system in systems)
    return compare_several({name: (first[name], second[name]) for name in first}, seed)


def _write(system: Measured, run: Path | None, per_query: Path | None) -> None:
    from hce.evaluation.runs import write_run

    if run:
        write_run(run, system.run)
        common.note(f"rankings written to {run}")
    if per_query:
        system.report.write_values(per_query)
        common.note(f"values of each query written to {per_query}")


def _table(systems: list[Measured], paired: dict[str, Paired]) -> Table:
    names = [Path(system.name).name for system in systems]
    if len(set(names)) < len(names):
        names = [system.name for system in systems]
    rows = []
    for measure in systems[0].report.means:
        cells = [measure, *(f"{system.report.means[measure]:.4f}" for system in systems)]
        if paired:
            each = paired[measure]
            cells += [f"{each.difference:+.4f}", f"{each.low:+.3f}…{each.high:+.3f}"]
            cells += [f"{each.p_holm:.4f}", f"{each.better}/{each.worse}"]
        rows.append(cells)
    return common.grid(["", *names, *(("diff.", "95 %", "p (Holm)", "+/−") if paired else ())], rows)


def _as_json(task: Task, systems: list[Measured], paired: dict[str, Paired]) -> dict[str, Any]:
    first = systems[0]
    answer: dict[str, Any] = {
        "queries": len(task.qrels),
        "documents": len(task.corpus) if task.corpus else None,
        "system": first.name,
        "measures": first.report.means,
        "without_positives": first.report.without_positives,
        "without_hits": first.report.without_hits,
    }
    if paired:
        compared = {name: each._asdict() for name, each in paired.items()}
        answer["against"] = {"system": systems[1].name, "measures": systems[1].report.means, "paired": compared}
    return answer
