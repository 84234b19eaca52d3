"""What all experiments share: a file of finished runs, the command line, a table, and the page of results.

A run is whatever takes long and has a name; it is kept under that name and not run again, so a killed experiment goes
on with the same command. Names hold the settings but not the version of the program: delete the file to start anew.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from hce._version import __version__
from hce.errors import FormatError, HceError, InputError
from hce.files import open_atomically, write_json
from hce.training.recipe import Recipe

Record = dict[str, Any]


class Runs:
    """Finished runs by name, in a JSON file that is written after each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.kept: dict[str, Record] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except ValueError as error:
            raise FormatError(f"{path}: no finished runs in it ({error}); delete it to run all again") from error

    def get(self, name: str, run: Callable[[], Record], complete: Callable[[Record], bool] = bool) -> Record:
        """The record kept under a name, or that of a new run.

        Args:
            name: says everything that the record depends on.
            run: makes it.
            complete: whether a kept record has all that is asked for; if not, it is run again.
        """
        is_kept = name in self.kept and complete(self.kept[name])
        if not is_kept:
            record = run()
            self.kept = Runs(self.path).kept | {name: record}  # another process may have written in the meantime
            write_json(self.path, self.kept)
        print(f"{name}{': kept from before' if is_kept else ': done'}", file=sys.stderr, flush=True)
        return self.kept[name]


# ------------------------------------------------------------------------------------------------------ command line


def command_line(
    name: str, about: str, *, seeds: int, several: bool = False, trains: bool = True
) -> argparse.ArgumentParser:
    """A parser with what every experiment has.

    Args:
        name: the experiment's.
        about: the help; the module's docstring.
        seeds: how many by default.
        several: whether it takes several collections.
        trains: whether there is a recipe to set.
    """
    parser = argparse.ArgumentParser(name, description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if several:
        parser.add_argument("folders", nargs="+", type=Path, help="BEIR folders")
    else:
        parser.add_argument("folder", type=Path, help="a BEIR folder")
    parser.add_argument("--encoder", default="static", help="what to start from")
    parser.add_argument("--seeds", type=_positive, default=seeds, help="how many, from 0 on")
    if trains:
        parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the recipe")
    parser.add_argument("--results", type=Path, default=Path(f"{name}.json"), help="where finished runs are kept")
    parser.add_argument("--output", type=Path, help="a folder for the page and its picture")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def names(text: str) -> list[str]:
    """A list with commas between."""
    return [item.strip() for item in text.split(",") if item.strip()]


def numbers(text: str) -> list[int]:
    """Whole numbers with commas between."""
    return [int(item) for item in names(text)]


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of the recipe that `--set` names, each of its own type.

    Raises:
        InputError: no such field, or a value that it cannot have.
    """
    defaults = {field.name: field.default for field in fields(Recipe)}
    settings: dict[str, Any] = {}
    for item in arguments.set:
        name, _, text = item.partition("=")
        if name not in defaults:
            raise InputError(f"--set {item}: no such setting; there are {', '.join(defaults)}")
        try:
            settings[name] = _value(text, defaults[name])
        except ValueError:
            raise InputError(f"--set {item}: give a value such as {defaults[name]}") from None
    return settings


def _value(text: str, default: Any) -> Any:
    if isinstance(default, bool):
        return {"true": True, "false": False}[text.lower()] if text.lower() in ("true", "false") else bool(int(text))
    if isinstance(default, tuple):
        return tuple(numbers(text))
    return type(default)(text)


def run_name(*parts: object, settings: Sequence[str] = ()) -> str:
    """The name that a run is kept under: a collection, an encoder, a system, a seed …, and settings if there are."""
    return " ".join(map(str, [*parts, *sorted(settings)]))


def shown_command(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> str:
    """The command that gives this result, with collections in a folder `data` and without where runs are kept."""
    words = ["python", f"experiments/{parser.prog}.py"]
    folders: list[Path] = arguments.folders if "folders" in arguments else [arguments.folder]
    words += [f"data/{folder.absolute().name}" for folder in folders]
    for action in parser._actions:
        value: Any = getattr(arguments, action.dest, None)
        if action.option_strings and action.dest not in ("help", "results") and value != action.default:
            for each in value if action.dest == "set" else [value]:
                words += [action.option_strings[0], _shown_value(each)]
    return shlex.join(words)


def _shown_value(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    path = Path(str(value))
    return path.name if path.is_absolute() else str(value)


# ------------------------------------------------------------------------------------------------------- what is shown


def with_spread(values: Sequence[float], digits: int = 4) -> str:
    """The mean over seeds, and how far these lie apart (standard deviation) where there are several."""
    shown = f"{fmean(values):.{digits}f}"
    return f"{shown} ± {spread(values):.{digits}f}" if len(values) > 1 else shown


def spread(values: Sequence[float]) -> float:
    """How far values lie apart: their standard deviation, 0 of a single one."""
    return stdev(values) if len(values) > 1 else 0.0


def seeds_note(arguments: argparse.Namespace) -> str:
    """What a figure with a ± is."""
    return "One seed." if arguments.seeds == 1 else f"Mean ± standard deviation over {arguments.seeds} seeds."


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that can be read as it is: columns are aligned, all but the first to the right."""
    widths = [max(3, *(len(row[column]) for row in [header, *rows])) for column in range(len(header))]
    lines = [_line(header, widths), _line([_rule(number, width) for number, width in enumerate(widths)], widths)]
    return "\n".join([*lines, *(_line(row, widths) for row in rows)])


def _rule(column: int, width: int) -> str:
    return "-" * (width - 1) + ":" if column else "-" * width


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell.rjust(width) if number else cell.ljust(width)
        for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "| " + " | ".join(padded) + " |"


@dataclass(frozen=True)
class Page:
    """A result as it is published.

    Attributes:
        name: of the experiment and its files.
        title: in words.
        about: what it is and what to look for, one paragraph.
        tables: Markdown tables with what stands above each; an empty heading for a single one.
        notes: what stands below.
        picture: as SVG; empty where there is none.
    """

    name: str
    title: str
    about: str
    tables: dict[str, str]
    notes: Sequence[str] = ()
    picture: str = ""

    def show(self, parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
        """Print the tables; with --output, write the page and its picture too."""
        body = [
            part for heading, rows in self.tables.items() for part in ([f"## {heading}"] if heading else []) + [rows]
        ]
        body += ["\n".join(f"- {note}" for note in self.notes)] if self.notes else []
        print("\n\n".join(body))
        if arguments.output is None:
            return
        arguments.output.mkdir(parents=True, exist_ok=True)
        made = f"Made by hce {__version__}, encoder {_shown_value(arguments.encoder)}, with this command:"
        parts = [f"# {self.title}", self.about.strip(), made, f"```console\n$ {shown_command(parser, arguments)}\n```"]
        if self.picture:
            _write(arguments.output / f"{self.name}.svg", self.picture)
            parts.append(f"![{self.title}]({self.name}.svg)")
        _write(arguments.output / f"{self.name}.md", "\n\n".join([*parts, *body]) + "\n")


def _write(path: Path, text: str) -> None:
    with open_atomically(path) as file:
        file.write(text)


def run_script(main: Callable[[], None]) -> None:
    """Run an experiment's main; what the user can mend is told in one line."""
    try:
        main()
    except HceError as error:
        sys.exit(f"error: {error}")
