"""Pictures of a comparison: bars with intervals, and points with names, next to those of `hce.pages.page`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from hce.pages.page import BOTTOM, HEIGHT, LEFT, RIGHT, WIDTH, Axis, frame, svg, tick_below

LETTER = 6.2  # approximate width of a letter


class Bar(NamedTuple):
    """A bar with an interval around its end."""

    name: str
    value: float
    low: float
    high: float
    is_ours: bool


class Point(NamedTuple):
    """A point with a name."""

    name: str
    x: float
    y: float
    is_ours: bool


def bar_panels(panels: Mapping[str, Sequence[Bar]]) -> str:
    """Draw a panel of bars for each title, all on one scale from 0."""
    most = max((bar.high for bars in panels.values() for bar in bars), default=0) or 1
    parts = []
    for title, bars in panels.items():
        rows = "".join(_bar(bar, most) for bar in bars)
        parts.append(f'<figure><figcaption>{escape(title)}</figcaption><div class="bars">{rows}</div></figure>')
    return f'<div class="panels">{"".join(parts)}</div>'


def point_panel(points: Sequence[Point], x_label: str, y_label: str) -> str:
    """Draw named points on a logarithmic x axis; zeros are at its left end."""
    placed = _LogAxis.of([point.x for point in points])
    heights = Axis.linear([point.y for point in points])
    taken: list[tuple[float, float, float, float]] = []
    parts = [frame(heights, lambda value: f"{value:.3g}")]
    parts += [tick_below(placed.at(value), f"{value:,.6g}") for value in placed.axis.ticks]
    for point in points:
        x, y = placed.at(point.x), heights.at(point.y)
        kind = "ours" if point.is_ours else "rival"
        text_x, text_y, anchor = _room(x, y, len(point.name) * LETTER, taken)
        told = f"{point.name}: {y_label} {point.y:.4f}, {x_label} {point.x:,.4g}"
        parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"><title>{escape(told)}</title></circle>')
        parts.append(
            f'<text class="name {kind}" x="{text_x:.1f}" y="{text_y:.1f}" text-anchor="{anchor}">'
            f"{escape(point.name)}</text>"
        )
    caption = f"<figcaption>{escape(y_label)} against {escape(x_label)}</figcaption>"
    return f"<figure>{caption}{svg(parts, f'{y_label} against {x_label}')}</figure>"


class _LogAxis(NamedTuple):
    """A logarithmic axis; values of 0 or less are at its left end."""

    axis: Axis

    @classmethod
    def of(cls, values: Sequence[float]) -> _LogAxis:
        some = [value for value in values if value > 0] or [1.0]
        low, high = math.log10(min(some)) - 0.3, math.log10(max(some)) + 0.3
        start = LEFT + (34 if min(values) <= 0 else 8)
        powers = range(math.floor(low), math.floor(high) + 1)
        factors = (1, 2, 5) if high - low < 2 else (1,)
        marks = [m for power in powers for factor in factors if low <= math.log10(m := factor * 10.0**power) <= high]
        return cls(Axis(low, high, start, WIDTH - RIGHT, [0.0, *marks] if min(values) <= 0 else marks))

    def at(self, value: float) -> float:
        return self.axis.at(math.log10(value)) if value > 0 else LEFT + 8.0


def _bar(bar: Bar, most: float) -> str:
    kind = "ours" if bar.is_ours else "rival"
    low, value, high = (100 * max(end, 0) / most for end in (bar.low, bar.value, bar.high))
    return (
        f'<span class="{kind}">{escape(bar.name)}</span>'
        f'<span class="track" title="95 % between {bar.low:.4f} and {bar.high:.4f}">'
        f'<i class="{kind}" style="width:{value:.2f}%"></i>'
        f'<b style="left:{low:.2f}%;width:{max(high - low, 0):.2f}%"></b></span><span>{bar.value:.3f}</span>'
    )


def _room(x: float, y: float, width: float, taken: list[tuple[float, float, float, float]]) -> tuple[float, float, str]:
    """Reserve a free place for a name next to a point."""
    places = [(x + 8, y + 4, "start"), (x - 8, y + 4, "end"), (x, y - 9, "middle"), (x, y + 16, "middle")]
    for shift in (14, -14, 28, -28, 42, -42, 56, -56, 70, -70):
        places += [(x + 8, y + 4 + shift, "start"), (x - 8, y + 4 + shift, "end")]
    best = places[0]
    for text_x, text_y, anchor in places:
        left = text_x - {"start": 0, "middle": width / 2, "end": width}[anchor]
        box = (left, text_y - 10, left + width, text_y + 3)
        is_inside = box[0] >= LEFT and box[2] <= WIDTH and box[1] >= 0 and box[3] <= HEIGHT - BOTTOM + 6
        is_free = all(box[2] < o[0] or o[2] < box[0] or box[3] < o[1] or o[3] < box[1] for o in taken)
        if is_inside and is_free:
            best = (text_x, text_y, anchor)
            taken.append(box)
            break
    return best
