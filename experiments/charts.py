"""Line and bar charts as plain SVG, readable on light and dark pages alike.

Points stand at equal distances along the x-axis, whatever their labels say: factors of two or ten look right so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

COLOURS = ("#d1495b", "#3b82c4", "#e09f3e", "#4c956c", "#8e6bbf", "#7f8c8d", "#00a6a6", "#b5651d")
INK, GRID = "#808890", "#80889040"
WIDTH, HEIGHT = 420, 260  # of a panel's plot
LEFT, TOP, RIGHT, BOTTOM = 64, 34, 16, 50  # around it
LEGEND_LINE, LETTER = 20, 6.6
STYLE = f"text {{ font: 12px system-ui, sans-serif; fill: {INK}; }} .title {{ font-weight: 600; font-size: 13px; }}"


class Series(NamedTuple):
    """A line, or bars of one colour; `values` has None where nothing was measured, `spread` is drawn around them."""

    name: str
    values: Sequence[float | None]
    spread: Sequence[float] = ()
    dashed: bool = False


class Panel(NamedTuple):
    """One plot of a picture."""

    title: str
    x_label: str
    y_label: str
    x: Sequence[str]
    series: Sequence[Series]
    bars: bool = False
    log: bool = False


class Scale(NamedTuple):
    """From values to heights in the plot."""

    low: float
    high: float
    ticks: Sequence[float]
    log: bool

    def y(self, value: float) -> float:
        """How far below the plot's top a value stands."""
        low, high, value = map(math.log10, (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return HEIGHT * (high - value) / (high - low)


def svg(panels: Sequence[Panel], columns: int = 2) -> str:
    """A picture of one or more panels, with one legend for all: a name has the same colour everywhere."""
    names = dict.fromkeys(series.name for panel in panels for series in panel.series)
    ours_first = sorted(names, key=lambda name: not name.lower().startswith("hce"))  # has the first colour everywhere
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(ours_first)}
    columns = min(columns, len(panels))
    width, height = LEFT + WIDTH + RIGHT, TOP + HEIGHT + BOTTOM
    legend = list(_legend(colours, columns * width))
    drawn = [
        f'<g transform="translate({number % columns * width + LEFT},{number // columns * height + TOP})">'
        + "\n".join(_panel(panel, colours))
        + "</g>"
        for number, panel in enumerate(panels)
    ]
    plots = -(-len(panels) // columns) * height
    whole = plots + LEGEND_LINE * (1 + max(line for line, _ in legend)) + 8
    entries = [f'<g transform="translate(0,{plots + LEGEND_LINE * line})">{text}</g>' for line, text in legend]
    size = f'width="{columns * width}" height="{whole}" viewBox="0 0 {columns * width} {whole}"'
    return "\n".join(
        [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f"<style>{STYLE}</style>", *drawn, *entries, "</svg>\n"]
    )


def _panel(panel: Panel, colours: dict[str, str]) -> Iterator[str]:
    scale = scale_of(panel)
    yield _text(WIDTH / 2, -14, panel.title, "middle", 'class="title"')
    yield _text(WIDTH / 2, HEIGHT + 40, panel.x_label, "middle")
    yield _text(-HEIGHT / 2, -48, panel.y_label, "middle", 'transform="rotate(-90)"')
    for tick in scale.ticks:
        y = scale.y(tick)
        yield f'<line x1="0" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>'
        yield _text(-6, y + 4, f"{tick:g}", "end")
    for number, label in enumerate(panel.x):
        yield _text(_x(panel, number), HEIGHT + 18, _fitting(label, WIDTH / len(panel.x)), "middle")
    for number, series in enumerate(panel.series):
        draw = _bars(panel, number, scale) if panel.bars else _line(panel, series, scale)
        yield f'<g stroke="{colours[series.name]}" fill="{colours[series.name]}">' + "".join(draw) + "</g>"


def _fitting(label: str, width: float) -> str:
    """As much of a label as does not run into its neighbours."""
    letters = int(width / LETTER)
    return label if len(label) <= letters else f"{label[: max(1, letters - 1)]}…"


def _x(panel: Panel, number: int) -> float:
    return WIDTH * (number + 0.5) / len(panel.x)


def _line(panel: Panel, series: Series, scale: Scale) -> Iterator[str]:
    points = [(_x(panel, place), value) for place, value in enumerate(series.values) if value is not None]
    path = " ".join(f"{x:.1f},{scale.y(value):.1f}" for x, value in points)
    dashes = ' stroke-dasharray="6 4"' if series.dashed else ""
    yield f'<polyline points="{path}" fill="none" stroke-width="2"{dashes}/>'
    for x, value in points:
        yield f'<circle cx="{x:.1f}" cy="{scale.y(value):.1f}" r="3"/>'
    yield from _spreads(series, scale, [_x(panel, place) for place in range(len(panel.x))])


def _bars(panel: Panel, number: int, scale: Scale) -> Iterator[str]:
    series, width = panel.series[number], 0.8 * WIDTH / len(panel.x) / len(panel.series)
    lefts = [_x(panel, place) + width * (number - len(panel.series) / 2) for place in range(len(panel.x))]
    for left, value in zip(lefts, series.values, strict=True):
        if value is not None:
            size = f'width="{width - 1:.1f}" height="{HEIGHT - scale.y(value):.1f}"'
            yield f'<rect x="{left:.1f}" y="{scale.y(value):.1f}" {size} stroke="none"/>'
    yield f'<g stroke="{INK}">' + "".join(_spreads(series, scale, [left + width / 2 for left in lefts])) + "</g>"


def _spreads(series: Series, scale: Scale, places: Sequence[float]) -> Iterator[str]:
    for x, value, spread in zip(places, series.values, series.spread, strict=False):
        if value is not None and spread:
            low = max(value - spread, scale.low)
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{scale.y(low):.1f}" y2="{scale.y(value + spread):.1f}"/>'


def scale_of(panel: Panel) -> Scale:
    """An axis with round ticks that holds all values and their spread; bars stand on 0."""
    ends = [
        end
        for series in panel.series
        for place, value in enumerate(series.values)
        if value is not None
        for end in _ends(value, series.spread[place] if place < len(series.spread) else 0.0)
    ]
    low, high = min(ends, default=0.0), max(ends, default=1.0)
    if panel.log:
        low = min((value for series in panel.series for value in series.values if value), default=1.0)
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(max(high, low * 1.01))) + 1)
        return Scale(10.0 ** decades[0], 10.0 ** decades[-1], [10.0**decade for decade in decades], log=True)
    low = 0.0 if panel.bars else low
    step = _round_step((high - low or abs(high) or 1.0) / 5)
    first, last = math.floor(low / step), max(math.ceil(high / step), math.floor(low / step) + 1)
    return Scale(first * step, last * step, [number * step for number in range(first, last + 1)], log=False)


def _ends(value: float, spread: float) -> tuple[float, float]:
    return value - spread, value + spread


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * 0.999)


def _legend(colours: dict[str, str], width: float) -> Iterator[tuple[int, str]]:
    """The line that each name stands on, and how it is drawn."""
    line, x = 0, float(LEFT)
    for name, colour in colours.items():
        needed = 36 + LETTER * len(name)
        if x + needed > width and x > LEFT:
            line, x = line + 1, float(LEFT)
        yield (
            line,
            f'<rect x="{x:.1f}" y="3" width="14" height="10" fill="{colour}"/>' + _text(x + 20, 12, name, "start"),
        )
        x += needed


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'
