"""`hce compare` and `hce generate-queries`, which the command line of `hce` finds as entry points."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hce.commands.common import (
    CorpusArgument,
    DatasetArgument,
    EncoderOption,
    FieldsOption,
    JsonOption,
    SeedOption,
    answer,
    grid,
    interruptible,
    note,
    out,
    parse_fields,
    print_json,
    with_reading,
)
from hce.data.records import USUAL, Reading
from hce.files import require_parent

if TYPE_CHECKING:
    from hce_lab.comparison.bench import Finished
    from hce_lab.comparison.table import ComparisonTable


@with_reading
def generate_queries(
    corpus: CorpusArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="a new .jsonl file", show_default=False)],
    model: Annotated[
        str, typer.Option("--model", "-m", metavar="NAME|DIR|HUB-ID", help="smollm2, or a doc2query or causal model")
    ] = "smollm2",
    per_document: Annotated[int, typer.Option(help="queries for each document; equal ones count once")] = 1,
    limit: Annotated[int, typer.Option(help="write for this many documents only, drawn at random; 0: all")] = 0,
    keep: Annotated[
        bool, typer.Option("--filter/--no-filter", help="drop queries that do not lead back to their document")
    ] = True,
    within: Annotated[int, typer.Option(help="the filter: the document must be among this many best ones")] = 10,
    encoder: EncoderOption = "static",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    reading: Reading = USUAL,
) -> None:
    """Have a language model write queries for documents (doc2query), to train on or to add to an index of words.

    Killed at any point, the same command continues. The small bundled model writes about one query in two seconds on
    a CPU core; a doc2query model from the hub writes better ones.

    Examples:
      hce generate-queries docs.jsonl -o queries.jsonl
      hce generate-queries scifact -o queries.jsonl --model doc2query/msmarco-t5-base-v1 --per-document 5
      hce train docs.jsonl -o my-model --labels generated=queries.jsonl
    """
    from hce.data.corpus import Corpus

    require_parent(output)
    documents = Corpus.load(corpus, reading)

    from hce.encoding.encoder import Encoder  # with torch, which takes seconds to import
    from hce_lab.generation.generator import Generator
    from hce_lab.generation.querygen import check_output
    from hce_lab.generation.querygen import generate_queries as run

    check_output(output)
    judge = Encoder.for_corpus(encoder, documents) if keep else None
    with interruptible("the same command goes on where this one stopped"):
        written = run(
            documents,
            Generator.load(model),
            output,
            per_document=per_document,
            limit=limit,
            encoder=judge,
            within=within,
            seed=seed,
            progress=True,
        )
    line = (
        f"{written.kept:,} of {written.generated:,} queries, written for {written.documents:,} documents, "
        f"are in {output}; `hce train --labels generated={output}` trains on them"
    )
    answer(line, {"queries": str(output), **written._asdict()}, as_json)


def compare(
    dataset: DatasetArgument,
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
    language_model: Annotated[
        str, typer.Option(metavar="NAME|DIR|HUB-ID", help="what writes n-grams for seal: any causal or seq2seq model")
    ] = "smollm2",
    epochs: Annotated[int | None, typer.Option(help="epochs of every trained system", show_default=False)] = None,
    epoch_pairs: Annotated[
        int | None,
        typer.Option(help="pairs in an epoch; default: as `hce train`", show_default=False),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="pairs in a step", show_default=False)] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="any other setting of all trained systems, as name=value")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(help="keep the models of trained systems in this folder, SYSTEM-SEED each")
    ] = None,
    fields: FieldsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train and score several systems on one collection, alike in data, budget and seed, and print one table.

    Labels of a train split are used by those that can. Finished systems are kept in the output folder, and the same
    command continues after a kill. The folder gets the table as Markdown, JSON and a page with pictures. `hce` is what
    `hce train` does with the same settings; rivals train the encoder alone.

    Systems: bm25, bm25+qg, untrained, fitted, hybrid, served, rrf, ict, simcse, tsdae, mnrl, mnrl-hybrid, mnrl-mined,
    dpr, dpr+qg, ct, ct+qg,
    tas-b, pefa-xs, pefa-xl, dsi-atomic, dsi, nci, nci+qg, genret, genret+qg, incdsi, dsi++, seal, no-tree,
    no-tree+qg, no-cotrain, hce-u, hce-s, hce, hce-eq5, hce-hybrid, no-tree-hybrid, hce+qg.

    Examples:
      hce compare scifact
      hce compare scifact --systems bm25,untrained,dpr,hce --encoder minilm --seeds 3
      hce compare scifact --systems bm25,hce --keep models      # then: hce index scifact -m models/hce-0 -o my-index
    """
    from hce.data.judgments import find_split
    from hce.training.recipe import parsed_settings

    find_split(dataset, split)  # before what takes seconds to import
    for folder in filter(None, (output, keep)):
        require_parent(folder)

    from hce_lab.comparison.bench import compare as run
    from hce_lab.comparison.table import header, notes, table, table_cells

    output = output or Path(f"compare-{dataset.absolute().name}")
    given = {"epochs": epochs, "epoch_pairs": epoch_pairs, "batch_size": batch_size}
    settings = parsed_settings(setting or []) | {name: value for name, value in given.items() if value is not None}
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
            language_model=language_model,
            settings=settings,
            models=keep,
            reading=Reading(**parse_fields(fields or ())),
            progress=True,
            on_result=_tell_result,
        )
    results = table(comparison)
    answer = _save(results, output)
    if as_json:
        print_json(answer)
        return
    show = partial(out.print, soft_wrap=True, markup=False)
    for name, text in comparison.about.items():
        show(f"{name}: {text}")
    rows = [table_cells(row, comparison.measures) for row in results.rows]
    show(grid(header(comparison.measures), rows, comparison.ours))
    for line in notes(results):
        show(line)
    note(f"in {output}: {', '.join(sorted(path.name for path in output.glob('comparison.*')))}")


def _listed(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _tell_result(finished: Finished) -> None:
    from statistics import fmean

    for result in finished.results.values():
        means = "  ".join(f"{measure} {fmean(values.values()):.4f}" for measure, values in result.per_query.items())
        note(f"{result.system}, seed {result.seed}: {means}{' (kept from before)' * finished.cached}")


def _save(results: ComparisonTable, output: Path) -> dict[str, Any]:
    from hce.files import open_atomically, write_json
    from hce_lab.comparison.page import page
    from hce_lab.comparison.table import as_json, as_markdown

    answer = as_json(results)
    write_json(output / "comparison.json", answer)
    with open_atomically(output / "comparison.md") as file:
        file.write(as_markdown(results))
    with open_atomically(output / "comparison.html") as file:
        file.write(page(results))
    return answer
