"""The command line `hce`: its commands and its errors. Results go to stdout, everything else to stderr.

Exit code 0 is success, 1 an error (one line: what, where, what to do) or damage found by `hce check`, 2 wrong usage,
130 Ctrl-C. A traceback is a bug.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from hce._version import __version__
from hce.commands.common import err, harmless, out
from hce.commands.evaluate import evaluate
from hce.commands.export import export, push, tree
from hce.commands.index import add, check, index, rebuild, reindex, remove
from hce.commands.search import mcp, search, serve, status
from hce.commands.train import demo, report, train
from hce.data.text import is_unicode
from hce.errors import HceError, InputError, MissingPackageError, system_reason
from hce.progress import bars_shown

HELP = {"help_option_names": ["-h", "--help"]}
LABORATORY = ("compare", "generate-queries")
REPORT_BUGS = "this is a bug in hce; please report it with the lines above and the command you ran"


class Commands(TyperGroup):
    """Our commands, and commands that installed packages register in the group `hce.commands`."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of our commands, in the order of `hce --help`, then of others."""
        return [*super().list_commands(ctx), *offered_commands()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Find a command by name; fail with advice if it needs a missing `hce-lab`."""
        if (own := super().get_command(ctx, cmd_name)) is not None:
            return own
        if (offer := offered_commands().get(cmd_name)) is not None:
            single = typer.Typer(add_completion=False, context_settings=HELP)
            single.command(cmd_name)(offer.load())
            return typer.main.get_command(single)
        if cmd_name in LABORATORY:
            raise MissingPackageError(f"hce {cmd_name} is in another package; pip install hce-lab")
        return None


def offered_commands() -> dict[str, EntryPoint]:
    """Return the entry points of the group `hce.commands` by name."""
    return {entry.name: entry for entry in sorted(entry_points(group="hce.commands"), key=lambda entry: entry.name)}


app = typer.Typer(
    name="hce",
    cls=Commands,
    help="Adapt a text retriever to your corpus: a tree of the documents and a better encoder, learned together.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=HELP,
)
COMMANDS = (
    *(demo, train, report, tree, index, add, remove, search, status, serve, mcp, export, push, rebuild, reindex, check),
    evaluate,
)
for command in COMMANDS:  # in the order of `hce --help`
    app.command()(command)


def main() -> None:
    """Run the command line; report in one line an error that the user can fix."""
    _prepare_streams()
    try:
        for number, argument in enumerate(sys.argv[1:], start=1):
            if not is_unicode(argument):
                shown = os.fsencode(argument).decode("utf-8", "backslashreplace")
                raise InputError(f"argument {number}, {shown!r}, is not UTF-8; convert the text or rename the file")
        try:
            with bars_shown(os.environ.get("RANK", "0") == "0"):  # only the first of several processes shows bars
                app(prog_name="hce")
        finally:
            sys.stdout.flush()  # flush here, so that a full disk is reported below
    except HceError as error:
        _end(str(error))
    except BrokenPipeError:  # `hce … | head` closes the pipe early
        _leave_stdout()
        sys.exit(1)
    except Exception as error:
        _end(_what_the_system_refused(error))


def _prepare_streams() -> None:
    """Make output writable in every environment, and show log lines."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller closed this stream
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Harmless("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("hce").setLevel(logging.INFO)


class _Harmless(logging.Formatter):
    """Formats log lines, which may quote documents and file names, without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))


def _what_the_system_refused(error: Exception) -> str | None:
    """Return one line for a system error, such as a full disk; None for a bug."""
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
        return "not enough memory; use fewer or shorter documents, a smaller model, or smaller batches"
    reason = system_reason(error)
    where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
    return None if reason is None else f"{where}{reason}; check the disk's space, the path and its permissions"


def _end(message: str | None) -> NoReturn:
    """Exit with an error message; with None, print the traceback of a bug."""
    _leave_stdout()
    with suppress(OSError):  # if stderr cannot be written either, only the exit code is left
        if message is None:
            err.print_exception()
            err.print(REPORT_BUGS, soft_wrap=True)
        else:
            err.print(f"error: {message}", style="red", soft_wrap=True)
    sys.exit(1)


def _leave_stdout() -> None:
    """Flush stdout, or drop its buffer, so that Python exits without another error."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
