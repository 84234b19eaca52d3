"""The command line: parse, call, print. Results go to stdout, everything else to stderr.

Exit codes: 0 done; 1 the input is wrong (one line: what, where, what to do); 2 wrong usage. A traceback is a bug.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

import typer
from rich.console import Console

from hce._version import __version__
from hce.errors import HceError, InputError

if TYPE_CHECKING:
    from hce.adapting import Labels
    from hce.corpus import Corpus
    from hce.hierarchy import Hierarchy
    from hce.history import Epoch

REPORT_BUGS = "this is a bug in hce; please report it with the lines above and the command you ran"

app = typer.Typer(
    name="hce",
    help="Adapt a text retriever to your corpus: a tree of the documents and a better encoder, learned together.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

EncoderOption = Annotated[
    str, typer.Option("--encoder", "-e", metavar="NAME|DIR|HUB-ID", help="static, minilm, a directory or a hub id")
]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON document")]
SeedOption = Annotated[int, typer.Option("--seed", help="same seed, same result")]


class LabelFiles(NamedTuple):
    """Files with queries and judgments, as given on the command line."""

    queries: Path | None
    qrels: Path | None
    dev_qrels: Path | None
    generated: Path | None


def main() -> None:
    """Run the command line; turn our own errors into one line and exit code 1."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("hce").setLevel(logging.INFO)
    try:
        app(prog_name="hce")
    except HceError as error:
        err.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        sys.exit(1)
    except Exception:
        err.print_exception()
        err.print(REPORT_BUGS)
        sys.exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        out.print(f"hce {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    pass


@app.command()
def tree(
    path: Annotated[
        Path, typer.Argument(help="a saved tree or model, or a corpus to grow one from", show_default=False)
    ],
    encoder: EncoderOption = "static",
    branching: Annotated[int, typer.Option("--branching", "-b", help="children of a node; 0 chooses for 3 levels")] = 0,
    levels: Annotated[int, typer.Option("--levels", help="how many levels to show")] = 2,
    most: Annotated[int, typer.Option("--most", help="how many children of a node to show")] = 8,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="also save the tree to this new folder")] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Show the tree of a corpus: its outline, with the words that set each part apart.

    Examples:
      hce tree docs.jsonl
      hce tree my-model --levels 3
      hce tree docs.csv --branching 8 --json > tree.json
    """
    from hce.hierarchy import Hierarchy
    from hce.outline import nested, outline

    saved = next(
        (folder for folder in (path / "hierarchy", path) if (folder / "hierarchy.safetensors").is_file()), None
    )
    if saved is not None:
        hierarchy, ids = Hierarchy.load(saved), None
    else:
        hierarchy, ids = _grow_tree(path, encoder, branching, seed)
    if output is not None:
        hierarchy.save(output)
        err.print(f"saved to {output}")
    if as_json:
        summaries = [summary._asdict() for summary in hierarchy.describe()]
        _print_json({"levels": summaries, "tree": nested(hierarchy, ids)})
    else:
        out.print(outline(hierarchy, levels=levels, most=most))


def _grow_tree(path: Path, encoder_spec: str, branching: int, seed: int) -> tuple[Hierarchy, list[str]]:
    from hce.corpus import Corpus
    from hce.encoder import Encoder
    from hce.hierarchy import Hierarchy
    from hce.labels import label_nodes

    corpus = Corpus.load(path)
    encoder = Encoder.load(encoder_spec)
    if encoder.name == "static":  # as it was distilled; a trained table knows its corpus already
        encoder = encoder.fitted_to(corpus)
    vectors = encoder.encode(list(corpus.texts()), progress=True)
    hierarchy = Hierarchy.build(vectors, branching or "auto", seed=seed, device=encoder.device)
    hierarchy.labels = label_nodes(hierarchy, corpus.texts())
    return hierarchy, corpus.ids


def train(
    corpus: Annotated[Path, typer.Argument(help="the documents: a BEIR folder, a file, a folder of texts, or -")],
    output: Annotated[Path, typer.Option("--output", "-o", help="a new folder for the model", show_default=False)],
    encoder: EncoderOption = "static",
    queries: Annotated[Path | None, typer.Option(help="queries of labelled pairs (JSONL or TSV)")] = None,
    qrels: Annotated[Path | None, typer.Option(help="which documents answer them (BEIR or TREC qrels)")] = None,
    dev_qrels: Annotated[Path | None, typer.Option(help="judgments to measure by, of the same queries")] = None,
    generated: Annotated[Path | None, typer.Option(help="generated queries: records of document and query")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue the unfinished run of this output")] = False,
    tracker: Annotated[str | None, typer.Option(help="also log to this accelerate tracker, e.g. tensorboard")] = None,
    as_json: JsonOption = False,
    **settings: Any,
) -> None:
    """Adapt an encoder to a corpus, and write the better one to a new folder.

    A BEIR folder's own train and dev judgments are used where it has them.

    Examples:
      hce train docs.jsonl -o my-model
      hce train scifact -o my-model --encoder minilm --mode joint
      hce train docs.jsonl -o my-model --queries q.jsonl --qrels clicks.tsv
      accelerate launch -m hce train docs.jsonl -o my-model --encoder minilm   (several GPUs)
      torchrun --nproc-per-node 2 -m hce train docs.jsonl -o my-model           (several CPU processes)
    """
    from hce.adapting import improvement
    from hce.adapting import train as run
    from hce.corpus import Corpus
    from hce.encoder import Encoder
    from hce.processes import is_first_process, join_processes
    from hce.recipe import Recipe
    from hce.tracking import tracked

    device = join_processes()
    documents = Corpus.load(corpus)
    start = Encoder.load(encoder, device=device)
    recipe = Recipe.for_encoder(static=start.is_static, **_chosen(settings))
    labels = _labels(corpus, documents, LabelFiles(queries, qrels, dev_qrels, generated), recipe.mode)
    first = is_first_process()
    with tracked(tracker, recipe, output.parent) as log, _interruptible():

        def on_epoch(epoch: Epoch) -> None:
            log(epoch)
            if first:
                err.print(str(epoch), soft_wrap=True)

        result = run(
            documents,
            start,
            **labels,
            recipe=recipe,
            output=output,
            resume=resume,
            progress=first,
            on_epoch=on_epoch,
        )
    if not first:
        return
    if as_json:
        _print_json({"model": str(output), "before": result.before, "after": result.after, "mix": result.mix})
    else:
        out.print(f"{result.recipe.mode} training; {improvement(result)}", soft_wrap=True)
        out.print(f"the model is in {output}; SentenceTransformer({str(output)!r}) loads it", soft_wrap=True)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Turn Ctrl-C into a line that says how to go on; the state on disk is whole at any moment."""
    try:
        yield
    except KeyboardInterrupt:
        err.print("stopped; the same command with --resume goes on from the last checkpoint")
        raise typer.Exit(130) from None


def _with_recipe(function: Callable[..., None]) -> Callable[..., None]:
    """Replace `**settings` by an option for each field of the recipe, with the field's own help."""
    from hce.recipe import Recipe

    signature = inspect.signature(function, eval_str=True)
    parameters = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    hints = get_type_hints(Recipe)
    for setting in fields(Recipe):
        kind = str if setting.name == "span_lengths" else hints[setting.name]
        option = typer.Option(help=Recipe.explain(setting.name), show_default=False, rich_help_panel="Recipe")
        parameters.append(
            inspect.Parameter(
                setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
            )
        )
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {each.name: each.annotation for each in parameters}
    return function


app.command()(_with_recipe(train))


def _chosen(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that were given; span lengths are written as 8,16,32."""
    chosen = {name: value for name, value in settings.items() if value is not None}
    if "span_lengths" in chosen:
        try:
            chosen["span_lengths"] = tuple(int(length) for length in chosen["span_lengths"].split(","))
        except ValueError:
            raise InputError(f"--span-lengths {chosen['span_lengths']}: give whole numbers, such as 8,16,32") from None
    return chosen


def _labels(source: Path, corpus: Corpus, options: LabelFiles, mode: str) -> dict[str, Labels | None]:
    """What `train` takes as pairs, generated and dev: from the options, or from a BEIR folder's own splits."""
    from hce.adapting import Labels
    from hce.judgments import Qrels, find_queries, find_split, read_queries, splits
    from hce.pairs import read_generated

    queries, qrels, dev_qrels, generated = options
    if mode == "unsupervised" and (qrels or generated):
        raise InputError("--mode unsupervised trains on no queries; leave out --qrels and --generated")
    if bool(qrels or dev_qrels) != bool(queries):
        raise InputError("--queries goes with --qrels or --dev-qrels, and they with it")
    if not queries and mode != "unsupervised" and "train" in splits(source):
        queries, qrels = find_queries(source), find_split(source, "train")
        dev_qrels = find_split(source, "dev") if "dev" in splits(source) else None
    labels: dict[str, Labels | None] = {"generated": Labels(*read_generated(generated)) if generated else None}
    if queries:
        asked, known = read_queries(queries), corpus.left_out.union(corpus.ids)
        for name, path in (("pairs", qrels), ("dev", dev_qrels)):
            labels[name] = Labels(asked, Qrels.read(path, queries=asked, documents=known)) if path else None
    return labels


@app.command()
def demo(
    encoder: EncoderOption = "static",
    seed: SeedOption = 0,
) -> None:
    """Do the main job on text that every machine has: the docstrings of the Python that runs this.

    Example:
      hce demo
    """
    from hce.demo import show

    show(out, err, encoder, seed)


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
