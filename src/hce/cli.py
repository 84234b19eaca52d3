"""The command line: what `hce` is made of, and how it ends. Results go to stdout, everything else to stderr.

Exit codes: 0 done; 1 the input is wrong (one line: what, where, what to do); 2 wrong usage. A traceback is a bug.
"""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from hce._version import __version__
from hce.commands.common import err, out
from hce.commands.evaluate import compare, evaluate
from hce.commands.generate import generate_queries
from hce.commands.index import add, index, rebuild, remove, search, status
from hce.commands.serve import serve
from hce.commands.train import demo, report, train, with_recipe
from hce.commands.tree import tree
from hce.errors import HceError

REPORT_BUGS = "this is a bug in hce; please report it with the lines above and the command you ran"

app = typer.Typer(
    name="hce",
    help="Adapt a text retriever to your corpus: a tree of the documents and a better encoder, learned together.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.command()(with_recipe(train))
app.command()(report)
app.command()(tree)
app.command()(index)
app.command()(add)
app.command()(remove)
app.command()(search)
app.command()(status)
app.command()(serve)
app.command()(rebuild)
app.command()(evaluate)
app.command()(compare)
app.command("generate-queries")(generate_queries)


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
