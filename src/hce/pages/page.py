"""Make an HTML file that needs no network, no script and no other file: tables, and charts as HTML and SVG.

Texts are escaped here. `page.css` has the colors, for light and dark mode. Gains are green and losses red; a bar's
position shows the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

SERIES = 8  # colors of lines
NAMED_BARS = 600  # bars with tooltips, at most; more bars are drawn as outlines
WIDTH, HEIGHT = 340, 210  # of a panel, in SVG units of about a pixel
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 30  # a panel's margins

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""
STYLE = Path(__file__).with_name("page.css")


def html_page(title: str, parts: Iterable[str]) -> str:
    """Return the page; `parts` are HTML."""
    return PAGE.format(title=escape(title), style=f"\n{STYLE.read_text(encoding='utf-8')}", body="\n".join(parts))


def html_table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    ours: Sequence[bool] = (),
    signed: Collection[int] = (),
    *,
    is_long: bool = False,
) -> str:
    """Return a table of texts; a wide table scrolls sideways.

    Rows marked in `ours` are highlighted. In the columns `signed`, positive numbers are green and negative ones red.
    With `is_long`, a phone shows the first column on lines of its own.
    """

    def cell(column: int, text: str) -> str:
        is_signed = column in signed and text.strip("+-−0.")
        kind = {"+": ' class="gain"', "-": ' class="loss"'}.get(text[:1], "") if is_signed else ""
        return f"<td{kind}>{escape(text)}</td>"

    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = []
    for number, row in enumerate(rows):
        kind = ' class="ours"' if number < len(ours) and ours[number] else ""
        body.append(f"<tr{kind}>{''.join(cell(*each) for each in enumerate(row))}</tr>")
    table = '<table class="long">' if is_long else "<table>"
    return f'<div class="scroll">{table}<thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def definitions(items: Mapping[str, str]) -> str:
    """Return a list of names and their descriptions."""
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in items.items()) + "</dl>"


# ------------------------------------------------------------------------------------------------- lines


class Panel(NamedTuple):
    """A chart of lines over epochs; each line has a value per epoch, None if not measured."""

    title: str
    lines: Mapping[str, Sequence[float | None]]
    is_share: bool = False  # whether values are shown as percentages


def line_panels(epochs: Sequence[int], panels: Iterable[Panel]) -> str:
    """Draw side by side the panels that have values, under one legend."""
    drawn = [panel for panel in panels if _known(panel)]
    names = list(dict.fromkeys(name for panel in drawn if len(panel.lines) > 1 for name in panel.lines))
    colors = {name: f"var(--series-{number % SERIES})" for number, name in enumerate(names)}
    keys = "".join(f'<li><i style="background:{colors[name]}"></i>{escape(name)}</li>' for name in names)
    legend = f'<ul class="legend">{keys}</ul>' if names else ""
    return f'{legend}<div class="panels">{"".join(_lines(epochs, panel, colors) for panel in drawn)}</div>'


def _known(panel: Panel) -> list[float]:
    return [value for values in panel.lines.values() for value in values if value is not None]


def _lines(epochs: Sequence[int], panel: Panel, colors: Mapping[str, str]) -> str:
    axis = Axis.linear(_known(panel))
    span = max(max(epochs) - min(epochs), 1)
    across = {epoch: LEFT + 8 + (WIDTH - RIGHT - LEFT - 16) * (epoch - min(epochs)) / span for epoch in epochs}
    parts = [frame(axis, lambda value: f"{value:.0%}" if panel.is_share else f"{value:.3g}")]
    parts += [tick_below(across[epoch], str(epoch)) for epoch in epochs[:: max(1, -(-len(epochs) // 10))]]
    parts.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 2}" text-anchor="end">epoch</text>')
    for name, values in panel.lines.items():
        color = colors.get(name, "var(--series-0)")
        measured = [(epoch, value) for epoch, value in zip(epochs, values, strict=True) if value is not None]
        corners = " ".join(f"{across[epoch]:.1f},{axis.at(value):.1f}" for epoch, value in measured)
        parts.append(
            f'<polyline points="{corners}" style="stroke:{color};stroke-width:{3 if name == "mean" else 1.6}"/>'
        )
        for epoch, value in measured:
            about = f"<title>{escape(name)}, epoch {epoch}: {value:.4f}</title>"
            place = f'cx="{across[epoch]:.1f}" cy="{axis.at(value):.1f}"'
            parts.append(f'<circle {place} r="2.8" style="fill:{color}">{about}</circle>')
    return f"<figure><figcaption>{escape(panel.title)}</figcaption>{svg(parts, panel.title)}</figure>"


class Axis(NamedTuple):
    """Maps values from `low` to `high` to positions from `start` to `end`; `ticks` get labels."""

    low: float
    high: float
    start: float
    end: float
    ticks: list[float]

    @classmethod
    def linear(cls, values: Sequence[float]) -> Axis:
        """Return a vertical axis for some values."""
        low, high = min(values), max(values)
        room = (high - low or abs(high) or 1) * 0.08
        low, high = (low - room if low < 0 or low > room else 0.0), high + room
        least = (high - low) / 4
        power = 10.0 ** math.floor(math.log10(least))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * 0.999)
        first = math.ceil(low / step - 1e-9)
        marks = [step * number for number in range(first, math.floor(high / step + 1e-9) + 1)]
        return cls(low, high, HEIGHT - BOTTOM, TOP, marks)

    def at(self, value: float) -> float:
        """Return the position of a value."""
        return self.start + (self.end - self.start) * (value - self.low) / (self.high - self.low)


def tick_below(x: float, text: str) -> str:
    """Write a label below the horizontal axis."""
    return f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 14}" text-anchor="middle">{text}</text>'


def frame(axis: Axis, written: Callable[[float], str]) -> str:
    """Draw a grid line and a label at each tick of the vertical axis."""
    parts = []
    for value in axis.ticks:
        y = axis.at(value)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{written(value)}</text>')
    return "".join(parts)


def svg(parts: Iterable[str], about: str) -> str:
    """Return the SVG of a panel."""
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(about)}">{"".join(parts)}</svg>'


# ------------------------------------------------------------------------------------------------- bars


def difference_bars(differences: Iterable[tuple[float, str]], axis: str) -> str:
    """Draw a bar for each query's difference, the largest gain first."""
    ordered = sorted(differences, reverse=True)
    gains, losses = (sum(sign * value > 0 for value, _ in ordered) for sign in (1, -1))
    if not gains and not losses:
        return f"<p>{escape(axis)}: none of {len(ordered):,} queries differs.</p>"
    most = max(abs(value) for value, _ in ordered)
    drawn = (_named_bars if len(ordered) <= NAMED_BARS else _outlines)(ordered, most)
    counts = f"{gains:,} queries gain, {losses:,} lose, {len(ordered) - gains - losses:,} do not change"
    return (
        f'<figure class="wide"><figcaption>{escape(axis)}: {counts}</figcaption><div class="signed">'
        f"<span>+{most:.2g}</span><span>0</span><span>−{most:.2g}</span>"
        f'<svg viewBox="0 0 {len(ordered)} 200" preserveAspectRatio="none" role="img" aria-label="{counts}">'
        f'{drawn}<line class="zero" x1="0" y1="100" x2="{len(ordered)}" y2="100"/></svg></div></figure>'
    )


def _named_bars(ordered: Sequence[tuple[float, str]], most: float) -> str:
    bars = []
    for place, (value, query) in enumerate(ordered):
        tall = 96 * abs(value) / most
        top = 100 - tall if value > 0 else 100
        kind = "gain" if value > 0 else "loss" if value < 0 else "same"
        shape = f'class="{kind}" x="{place}" y="{top:.1f}" width="1" height="{tall:.1f}"'
        bars.append(f"<rect {shape}><title>{escape(query)}: {value:+.4f}</title></rect>")
    return "".join(bars)


def _outlines(ordered: Sequence[tuple[float, str]], most: float) -> str:
    """Draw a polygon of gains and one of losses: about NAMED_BARS corners in all."""
    every = -(-len(ordered) // NAMED_BARS)
    shapes = []
    for kind, sign in (("gain", 1), ("loss", -1)):
        some = [(place, value) for place, (value, _) in enumerate(ordered) if sign * value > 0]
        if some:
            steps = [*some[::every], some[-1]]
            corners = " ".join(f"{place},{100 - 96 * value / most:.1f}" for place, value in steps)
            shapes.append(f'<polygon class="{kind}" points="{steps[0][0]},100 {corners} {steps[-1][0] + 1},100"/>')
    return "".join(shapes)


class Branch(NamedTuple):
    """A node of a tree with its size and its largest children."""

    name: str
    size: int
    below: Sequence[Branch] = ()


def tree_list(branches: Sequence[Branch]) -> str:
    """Draw each branch of a tree as a bar, divided into its children."""
    most = max((branch.size for branch in branches), default=1) or 1
    rows = []
    for branch in branches:
        parts = "".join(
            f'<span style="flex-grow:{part.size}" title="{escape(part.name)}: {part.size:,}">{escape(part.name)}</span>'
            for part in branch.below
        )
        rows.append(
            f"<li><p><b>{escape(branch.name)}</b> <small>{branch.size:,}</small></p>"
            f'<div class="parts" style="width:{100 * branch.size / most:.1f}%">{parts}</div></li>'
        )
    return f'<ol class="tree">{"".join(rows)}</ol>'
