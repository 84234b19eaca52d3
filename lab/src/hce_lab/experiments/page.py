"""The page of an experiment: Markdown tables, and a picture by plotly.

Pictures are SVG files, which Markdown can show. plotly writes them with kaleido, which needs Chromium or Chrome on this
machine, but no network. They have no background and gray lines, to be readable on light and dark pages.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from hce._version import __version__
from hce.files import open_atomically

COLOURS = ("#d1495b", "#3b82c4", "#e09f3e", "#4c956c", "#8e6bbf", "#7f8c8d", "#00a6a6", "#b5651d")
INK, GRID, CLEAR = "#808890", "rgba(128,136,144,0.25)", "rgba(0,0,0,0)"
WIDTH, HEIGHT = 500, 344  # of a panel with its margins


class Series(NamedTuple):
    """A line or bars of one color; `values` may have None; `spread` gives error bars."""

    name: str
    values: Sequence[float | None]
    spread: Sequence[float] = ()
    dashed: bool = False


class Panel(NamedTuple):
    """One plot of a picture; points have equal distances, as if x were logarithmic."""

    title: str
    x_label: str
    y_label: str
    x: Sequence[str]
    series: Sequence[Series]
    bars: bool = False
    log: bool = False


def figure(panels: Sequence[Panel]) -> go.Figure:
    """Draw panels with one legend: a name has one color everywhere; HCE has the first."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    drawn = make_subplots(rows=rows, cols=columns, subplot_titles=[panel.title for panel in panels])
    names = dict.fromkeys(series.name for panel in panels for series in panel.series)
    ordered = sorted(names, key=lambda name: not name.lower().startswith("hce"))
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(ordered)}
    for number, panel in enumerate(panels):
        place = {"row": number // columns + 1, "col": number % columns + 1}
        for series in panel.series:
            trace = _trace(panel, series, colours[series.name])
            shown = names.pop(series.name, "") is None  # in the legend once
            drawn.add_trace(trace.update(showlegend=shown, legendrank=ordered.index(series.name)), **place)
        drawn.update_xaxes(type="category", title_text=panel.x_label, showgrid=False, **place)
        drawn.update_yaxes(title_text=panel.y_label, gridcolor=GRID, **place)
        if panel.log:
            drawn.update_yaxes(type="log", dtick=1, **place)
    drawn.update_layout(template="plotly_white", paper_bgcolor=CLEAR, plot_bgcolor=CLEAR, font={"color": INK})
    drawn.update_layout(legend={"orientation": "h", "yref": "container", "y": 0}, margin={"t": 40, "r": 20})
    return drawn.update_layout(width=columns * WIDTH, height=rows * HEIGHT + 40)


def _trace(panel: Panel, series: Series, colour: str) -> go.Bar | go.Scatter:
    spread = {"type": "data", "array": series.spread, "visible": bool(any(series.spread)), "thickness": 1}
    shared: dict[str, Any] = {
        "x": panel.x,
        "y": series.values,
        "error_y": spread,
        "name": series.name,
        "legendgroup": series.name,
    }
    if panel.bars:
        return go.Bar(marker_color=colour, **shared)
    return go.Scatter(line={"color": colour, "dash": "dash" if series.dashed else "solid"}, **shared)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns, all but the first to the right."""
    widths = [max(3, *(len(row[column]) for row in [header, *rows])) for column in range(len(header))]
    rule = ["-" * width if not number else "-" * (width - 1) + ":" for number, width in enumerate(widths)]
    return "\n".join(_line(row, widths) for row in [header, rule, *rows])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell.rjust(width) if number else cell.ljust(width)
        for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "| " + " | ".join(padded) + " |"


def seeds_note(arguments: argparse.Namespace) -> str:
    """Explain figures with a ±."""
    return "One seed." if arguments.seeds == 1 else f"Mean ± standard deviation over {arguments.seeds} seeds."


@dataclass(frozen=True)
class Page:
    """A result to publish.

    Attributes:
        name: the name of the experiment and of its files.
        title: the title of the page.
        about: one paragraph on the experiment and its main result.
        tables: Markdown tables, each with a heading; a single one may have an empty heading.
        notes: the notes below the tables.
        panels: the panels of the picture; empty for no picture.
    """

    name: str
    title: str
    about: str
    tables: dict[str, str]
    notes: Sequence[str] = ()
    panels: Sequence[Panel] = ()

    def show(self, parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
        """Print the tables; with --output, also write the page and its picture."""
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
        parts += [f"![{self.title}]({self.name}.svg)"] if self.panels else []
        with open_atomically(arguments.output / f"{self.name}.md") as file:
            file.write("\n\n".join([*parts, *body]) + "\n")
        if self.panels:
            figure(self.panels).write_image(arguments.output / f"{self.name}.svg")


def shown_command(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> str:
    """Return the command of this result, with collections in `data`, without --results."""
    words = ["python", "-m", "hce_lab", parser.prog]
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
