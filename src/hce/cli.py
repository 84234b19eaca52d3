"""The command line: parse, call, print. Results go to stdout, everything else to stderr.

Exit codes: 0 done; 1 the input is wrong (one line: what, where, what to do); 2 wrong usage. A traceback is a bug.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hce._version import __version__
from hce.errors import HceError

if TYPE_CHECKING:
    from hce.hierarchy import Hierarchy

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


def main() -> None:
    """Run the command line; turn our own errors into one line and exit code 1."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("hce").setLevel(logging.INFO)
    try:
        app()
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
    if encoder.is_static:
        encoder = encoder.fitted_to(corpus)
    vectors = encoder.encode(list(corpus.texts()), progress=True)
    hierarchy = Hierarchy.build(vectors, branching or "auto", seed=seed, device=encoder.device)
    hierarchy.labels = label_nodes(hierarchy, corpus.texts())
    return hierarchy, corpus.ids


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

    show(out, encoder, seed)


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
