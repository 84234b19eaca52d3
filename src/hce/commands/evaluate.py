"""`hce evaluate` and `hce compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import typer

from hce.commands.common import EncoderOption, JsonOption, SeedOption, err, interruptible, out, print_json
from hce.errors import InputError, MissingPackageError

if TYPE_CHECKING:
    from rich.table import Table as Grid

    from hce.comparison.run import Finished
    from hce.comparison.table import Table
    from hce.data.corpus import Corpus
    from hce.data.judgments import Qrels, Query
    from hce.encoding.encoder import Encoder
    from hce.evaluation.diagnostics import Diagnosis
    from hce.evaluation.evaluate import DenseSearcher, Report, Searcher
    from hce.evaluation.runs import Run
    from hce.evaluation.significance import Paired
    from hce.index.index import Index

MEASURES = "nDCG@10,RR@10,AP,Success@1,Success@5,R@1,R@5,R@10,R@20,R@100,R_cap@100"
PER_QUERY_SUFFIXES = (".tsv", ".jsonl")


class Asked(NamedTuple):
    """What is measured by: documents and queries are read only where a model has to search."""

    folder: Path
    split: str
    qrels: Qrels
    queries: dict[str, Query]
    corpus: Corpus | None
    depth: int
    drop_self: bool


class Measured(NamedTuple):
    """What is measured: a run, and what made it, if that was a model."""

    name: str
    run: Run
    searcher: DenseSearcher | None


def evaluate(
    dataset: Annotated[Path, typer.Argument(help="a BEIR folder: corpus.jsonl, queries.jsonl, qrels/")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", metavar="DIR|NAME|HUB-ID", help="what to measure: a model, an encoder or an index"
        ),
    ] = None,
    run_file: Annotated[Path | None, typer.Option(help="measure this TREC run instead of a model")] = None,
    split: Annotated[str, typer.Option(help="which judgments: qrels/SPLIT.tsv")] = "test",
    measures: Annotated[str, typer.Option(help="names, with commas between them")] = MEASURES,
    against: Annotated[
        str | None, typer.Option(metavar="DIR|NAME|HUB-ID", help="compare with this model, query by query")
    ] = None,
    against_run: Annotated[Path | None, typer.Option(help="compare with this TREC run")] = None,
    by_level: Annotated[bool, typer.Option("--by-level", help="also show where queries lose their way in the tree")] = (
        False
    ),
    run: Annotated[Path | None, typer.Option(help="write the rankings as a TREC run (.gz: compressed)")] = None,
    per_query: Annotated[Path | None, typer.Option(help="write each query's values: a .tsv or .jsonl file")] = None,
    depth: Annotated[int, typer.Option(help="hits to ask for; a deeper cut-off asks for more", min=1)] = 100,
    drop_self: Annotated[
        bool, typer.Option("--drop-self/--keep-self", help="drop a hit whose id is the query's own (BEIR's rule)")
    ] = True,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure how well a model, or a run of any system, ranks the documents judged relevant.

    Examples:
      hce evaluate scifact -m my-model
      hce evaluate scifact -m my-index --against my-model
      hce evaluate scifact -m my-model --against minilm --measures ndcg@10,mrr@10
      hce evaluate scifact -m my-model --run my.trec --per-query my.tsv --by-level
      hce evaluate scifact --run-file my.trec --against-run bm25.trec
    """
    from hce.evaluation.evaluate import score_run
    from hce.evaluation.measures import parse_measure

    names = [str(parse_measure(name)) for name in measures.split(",")]
    _check_options(model, run_file, against, against_run, by_level)
    _check_outputs(run, per_query)
    deepest = max([depth, *(parse_measure(name).cutoff or 0 for name in names)])
    asked = _load(dataset, split, bool(model or against), deepest, drop_self)
    given = [(model, run_file), (against, against_run)]
    sources = [_open(*each) for each in given if any(each)]  # all of them first: a wrong one is found before the work
    systems = [_answered(asked, source) for source in sources]
    reports = [score_run(system.run, asked.qrels, names, drop_self=drop_self) for system in systems]
    _tell_what_is_missing(systems, reports)
    paired = _paired(reports, seed) if len(reports) == 2 else {}
    searcher = systems[0].searcher
    diagnosis = _diagnosis(asked, searcher, seed) if by_level and searcher else None
    _write(systems[0], reports[0], run, per_query)
    if as_json:
        print_json(_as_json(asked, systems, reports, paired, diagnosis))
        return
    documents = f" · {len(asked.corpus):,} documents" if asked.corpus else ""
    out.print(f"{dataset} · {split} · {len(asked.qrels):,} queries{documents}\n", soft_wrap=True)
    out.print(_table(systems, reports, paired))
    if diagnosis:
        out.print(f"\n{diagnosis}", soft_wrap=True)


def _check_options(
    model: str | None, run_file: Path | None, against: str | None, against_run: Path | None, by_level: bool
) -> None:
    if bool(model) == bool(run_file):
        raise InputError("give either --model, or --run-file with a run to measure")
    if against and against_run:
        raise InputError("give either --against or --against-run, not both")
    if by_level and (not model or _is_index(model)):
        raise InputError("--by-level needs a model for --model: a run or an index does not tell how a query went down")


def _check_outputs(run: Path | None, per_query: Path | None) -> None:
    """Refuse before the work, not after it."""
    for path in (run, per_query):
        if path and (path.is_dir() or not path.parent.is_dir()):
            reason = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise InputError(f"{path}: {reason}; give the name of a file in a folder that is there")
    if per_query and per_query.suffix not in PER_QUERY_SUFFIXES:
        raise InputError(f"{per_query}: values of queries are written as {' or '.join(PER_QUERY_SUFFIXES)}")


def _load(folder: Path, split: str, with_corpus: bool, depth: int, drop_self: bool) -> Asked:
    from hce.data.corpus import Corpus
    from hce.data.judgments import Qrels, find_queries, find_split, read_queries
    from hce.evaluation.evaluate import check_documents

    path = find_split(folder, split)
    if not with_corpus:
        return Asked(folder, split, Qrels.read(path), {}, None, depth, drop_self)
    queries = read_queries(find_queries(folder))
    qrels = Qrels.read(path, queries=queries)
    corpus = Corpus.load(folder)
    check_documents(qrels, corpus.left_out.union(corpus.ids), str(folder))
    return Asked(folder, split, qrels, queries, corpus, depth, drop_self)


def _open(model: str | None, run_file: Path | None) -> Measured | Encoder | Index:
    """A run from its file, or a model or an index that has yet to search."""
    from hce.encoding.encoder import Encoder
    from hce.evaluation.runs import read_run
    from hce.index.index import Index

    if model is None:
        return Measured(str(run_file), read_run(str(run_file)), None)
    return Index.open(model) if _is_index(model) else Encoder.load(model)


def _is_index(model: str) -> bool:
    from hce.index.manifest import FILE

    return (Path(model) / FILE).is_file()


def _answered(asked: Asked, source: Measured | Encoder | Index) -> Measured:
    """What a source finds: a run has found it already."""
    from hce.encoding.encoder import Encoder

    if isinstance(source, Measured):
        return source
    if isinstance(source, Encoder):
        searcher = _dense(asked, source)
        return Measured(source.name, _ranking(asked, searcher), searcher)
    judged = dict.fromkeys(judgment.document_id for judgment in asked.qrels.judgments())
    lacking = [document_id for document_id in judged if document_id not in source]
    if lacking:
        err.print(
            f"{source.path}: not all judged documents are there (missing: {len(lacking):,}, {lacking[0]!r} …)",
            soft_wrap=True,
        )
    return Measured(str(source.path), _ranking(asked, source), None)


def _ranking(asked: Asked, searcher: Searcher) -> Run:
    from hce.evaluation.evaluate import rank

    return rank(searcher, asked.queries, asked.qrels, asked.depth, drop_self=asked.drop_self)


def _dense(asked: Asked, encoder: Encoder) -> DenseSearcher:
    from hce.evaluation.evaluate import DenseSearcher

    corpus = cast("Corpus", asked.corpus)  # it was read, as there is a model
    if encoder.name == "static":
        err.print("static is measured as it was distilled: not fitted to this corpus, not trained", soft_wrap=True)
    return DenseSearcher(encoder, corpus.ids, encoder.encode(list(corpus.texts()), progress=True))


def _tell_what_is_missing(systems: list[Measured], reports: list[Report]) -> None:
    if reports[0].without_positives:
        count, first = len(reports[0].without_positives), reports[0].without_positives[0]
        err.print(f"{count:,} judged queries have no relevant document ({first!r} …) and count 0", soft_wrap=True)
    for system, report in zip(systems, reports, strict=True):
        if report.without_hits:
            count, first = len(report.without_hits), report.without_hits[0]
            err.print(f"{system.name}: {count:,} queries have no hits ({first!r} …) and count 0", soft_wrap=True)


def _paired(reports: list[Report], seed: int) -> dict[str, tuple[Paired, float]]:
    """For each measure the comparison, and its p corrected for the number of measures."""
    from hce.evaluation.significance import compare_paired, holm

    first, second = (report.per_query for report in reports)
    compared = {name: compare_paired(first[name], second[name], seed) for name in first}
    corrected = holm([paired.p for paired in compared.values()])
    return {name: (compared[name], p) for name, p in zip(compared, corrected, strict=True)}


def _diagnosis(asked: Asked, searcher: DenseSearcher, seed: int) -> Diagnosis:
    from hce.evaluation.diagnostics import diagnose
    from hce.training.model_folder import trained_tree
    from hce.tree.hierarchy import Hierarchy

    encoder = searcher.encoder
    hierarchy = trained_tree(encoder.name, cast("Corpus", asked.corpus))
    if hierarchy is None:
        err.print(f"{encoder.name} holds no tree of this corpus; growing one from its vectors", soft_wrap=True)
        hierarchy = Hierarchy.build(searcher.vectors, seed=seed, device=encoder.device)
    vectors = encoder.encode([asked.queries[query_id].text for query_id in asked.qrels], "query")
    queries = dict(zip(asked.qrels, vectors, strict=True))
    return diagnose(hierarchy, searcher.ids, searcher.vectors, queries, asked.qrels)


def _write(system: Measured, report: Report, run: Path | None, per_query: Path | None) -> None:
    from hce.evaluation.runs import write_run
    from hce.files import open_atomically

    if run:
        write_run(run, system.run)
        err.print(f"rankings written to {run}", soft_wrap=True)
    if per_query:
        with open_atomically(per_query) as file:
            file.writelines(line + "\n" for line in _per_query_lines(report, per_query.suffix))
        err.print(f"values of each query written to {per_query}", soft_wrap=True)


def _per_query_lines(report: Report, suffix: str) -> list[str]:
    names = list(report.per_query)
    rows = {query_id: [report.per_query[name][query_id] for name in names] for query_id in report.per_query[names[0]]}
    if suffix == ".jsonl":
        return [
            json.dumps({"query": query_id, **dict(zip(names, values, strict=True))}, ensure_ascii=False)
            for query_id, values in rows.items()
        ]
    lines = ["\t".join(["query", *names])]
    return lines + ["\t".join([query_id, *map(repr, values)]) for query_id, values in rows.items()]


def _table(systems: list[Measured], reports: list[Report], paired: dict[str, tuple[Paired, float]]) -> Grid:
    from rich.table import Table as Grid

    table = Grid(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    short = [Path(system.name).name for system in systems]
    for name in short if len(set(short)) == len(systems) else [system.name for system in systems]:
        table.add_column(name, justify="right", overflow="fold", min_width=6)
    for heading in ("diff.", "95 %", "p (Holm)", "+/−") if paired else ():
        table.add_column(heading, justify="right", no_wrap=True)
    for name in reports[0].means:
        cells = [name, *(f"{report.means[name]:.4f}" for report in reports)]
        if paired:
            each, corrected = paired[name]
            cells += [f"{each.difference:+.4f}", f"{each.low:+.3f}…{each.high:+.3f}"]
            cells += [f"{corrected:.4f}", f"{each.better}/{each.worse}"]
        table.add_row(*cells)
    return table


def _as_json(
    asked: Asked,
    systems: list[Measured],
    reports: list[Report],
    paired: dict[str, tuple[Paired, float]],
    diagnosis: Diagnosis | None,
) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "dataset": str(asked.folder),
        "split": asked.split,
        "queries": len(asked.qrels),
        "documents": len(asked.corpus) if asked.corpus else None,
        "system": systems[0].name,
        "measures": reports[0].means,
        "without_positives": reports[0].without_positives,
        "without_hits": reports[0].without_hits,
    }
    if paired:
        compared = {name: {**each._asdict(), "p_holm": corrected} for name, (each, corrected) in paired.items()}
        answer["against"] = {"system": systems[1].name, "measures": reports[1].means, "paired": compared}
    if diagnosis:
        steps = [step._asdict() for step in diagnosis.steps]
        answer["by_level"] = {"steps": steps, "left_at": diagnosis.left_at, "verdict": diagnosis.verdict}
    return answer


def compare(
    dataset: Annotated[Path, typer.Argument(help="a BEIR folder: corpus.jsonl, queries.jsonl, qrels/")],
    systems: Annotated[
        str, typer.Option("--systems", "-s", help="names with commas between; by default all that can be run here")
    ] = "",
    encoder: EncoderOption = "static",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="folder for results and the page; default: compare-DATASET"),
    ] = None,
    split: Annotated[str, typer.Option(help="the judgments to measure by")] = "test",
    measures: Annotated[str, typer.Option(help="with commas between; the first decides which rival is best")] = (
        "nDCG@10,R@10,R@100"
    ),
    seeds: Annotated[int, typer.Option(help="how many seeds to train with")] = 1,
    generated: Annotated[Path | None, typer.Option(help="generated queries, for the systems named +qg")] = None,
    epochs: Annotated[int | None, typer.Option(help="epochs of every trained system", show_default=False)] = None,
    epoch_pairs: Annotated[
        int | None, typer.Option(help="pairs in an epoch; default: as many as documents", show_default=False)
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="pairs in a step", show_default=False)] = None,
    as_json: JsonOption = False,
) -> None:
    """Train and score several systems on one collection, alike in data, budget and seed, and print one table.

    Labels of a train split are used by those that can. Finished systems are kept in the output folder, and the same
    command continues after a kill. The folder gets the table as Markdown, JSON and a page with pictures.

    Systems: bm25, bm25+qg, untrained, fitted, ict, simcse, tsdae, dpr, dpr+qg, ct, ct+qg, tas-b, pefa-xs, pefa-xl,
    no-tree, no-tree+qg, no-cotrain, hce-u, hce-s, hce, hce+qg.

    Examples:
      hce compare scifact
      hce compare scifact --systems bm25,untrained,dpr,hce --encoder minilm --seeds 3
    """
    from hce.comparison.run import compare as run
    from hce.comparison.table import notes, table

    output = output or Path(f"compare-{dataset.absolute().name}")
    settings = {"epochs": epochs, "epoch_pairs": epoch_pairs, "batch_size": batch_size}
    with interruptible("the same command goes on where this one stopped"):
        comparison = run(
            dataset,
            output,
            _listed(systems),
            encoder=encoder,
            split=split,
            measures=_listed(measures),
            seeds=seeds,
            generated=generated,
            settings={name: value for name, value in settings.items() if value is not None},
            progress=True,
            on_result=_tell,
        )
    results = table(comparison)
    answer = _save(results, output)
    if as_json:
        print_json(answer)
        return
    for name, text in comparison.about.items():
        out.print(f"{name}: {text}", soft_wrap=True, markup=False)
    out.print(_shown(results), soft_wrap=True)
    for note in notes(results):
        out.print(note, soft_wrap=True, markup=False)
    written = ", ".join(sorted(path.name for path in output.glob("comparison.*")))
    err.print(f"in {output}: {written}", soft_wrap=True)


def _listed(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _tell(finished: Finished) -> None:
    from statistics import fmean

    for result in finished.results.values():
        means = "  ".join(f"{measure} {fmean(values.values()):.4f}" for measure, values in result.per_query.items())
        kept = " (kept from before)" * finished.cached
        err.print(f"{result.system}, seed {result.seed}: {means}{kept}", soft_wrap=True)


def _save(results: Table, output: Path) -> dict[str, Any]:
    from hce.comparison.table import as_json, as_markdown
    from hce.files import open_atomically, write_json

    answer = as_json(results)
    write_json(output / "comparison.json", answer)
    with open_atomically(output / "comparison.md") as file:
        file.write(as_markdown(results))
    try:
        from hce.pages.comparison import page
    except MissingPackageError as error:  # the table is worth having without pictures
        err.print(str(error), soft_wrap=True)
        return answer
    with open_atomically(output / "comparison.html") as file:
        file.write(page(results))
    return answer


def _shown(results: Table) -> Grid:
    from rich.table import Table as Grid

    from hce.comparison.table import cells, header

    comparison = results.comparison
    rows = [cells(row, comparison.measures) for row in results.rows]
    grid = Grid(box=None)
    for number, name in enumerate(header(comparison.measures)):
        widest = max(len(name), *(len(row[number]) for row in rows))  # a narrow terminal must not eat figures
        grid.add_column(name, justify="right" if number else "left", no_wrap=True, min_width=widest)
    for row, shown in zip(results.rows, rows, strict=True):
        grid.add_row(*shown, style="bold" if row.system in comparison.ours else None)
    return grid
