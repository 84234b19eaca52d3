"""`hce compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hce.commands.common import EncoderOption, JsonOption, err, interruptible, out, print_json
from hce.errors import MissingPackageError

if TYPE_CHECKING:
    import rich.table

    from hce.comparing.bench import Finished
    from hce.comparing.comparison import Table


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
    from hce.comparing.compare import compare as run
    from hce.comparing.comparison import notes, table

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

    result = finished.result
    means = "  ".join(f"{measure} {fmean(values.values()):.4f}" for measure, values in result.per_query.items())
    err.print(f"{result.system}, seed {result.seed}: {means}{' (kept from before)' * finished.cached}", soft_wrap=True)


def _save(results: Table, output: Path) -> dict[str, Any]:
    from hce.atomic import open_atomically, write_json
    from hce.comparing.comparison import as_json, as_markdown

    answer = as_json(results)
    write_json(output / "comparison.json", answer)
    with open_atomically(output / "comparison.md") as file:
        file.write(as_markdown(results))
    try:
        from hce.comparing.compare_page import page
    except MissingPackageError as error:  # the table is worth having without pictures
        err.print(str(error), soft_wrap=True)
        return answer
    with open_atomically(output / "comparison.html") as file:
        file.write(page(results))
    return answer


def _shown(results: Table) -> rich.table.Table:
    from rich.table import Table as Grid

    from hce.comparing.comparison import cells, header

    comparison = results.comparison
    rows = [cells(row, comparison.measures) for row in results.rows]
    grid = Grid(box=None)
    for number, name in enumerate(header(comparison.measures)):
        widest = max(len(name), *(len(row[number]) for row in rows))  # a narrow terminal must not eat figures
        grid.add_column(name, justify="right" if number else "left", no_wrap=True, min_width=widest)
    for row, shown in zip(results.rows, rows, strict=True):
        grid.add_row(*shown, style="bold" if row.system in comparison.ours else None)
    return grid
