"""A comparison as one HTML page with pictures, which needs no network: plotly's JavaScript is inside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import cycle, islice

import numpy as np

from hce.comparison.table import Comparison, Row, Table, cells, header, notes
from hce.evaluation.significance import bootstrap_interval
from hce.pages.page import (
    GREY,
    OURS,
    RIVAL,
    definitions,
    difference_bars,
    go,
    html_page,
    html_table,
    make_subplots,
    picture,
)

AROUND = ("top center", "bottom center", "middle right", "middle left")  # so that few names cover each other


def page(table: Table) -> str:
    """Write the page; whatever comes from the user's files is escaped."""
    comparison, rows, _ = table
    parts = [
        definitions(comparison.about),
        html_table(
            header(comparison.measures),
            [cells(row, comparison.measures) for row in rows],
            [row.system in comparison.ours for row in rows],
        ),
        *(f"<p>{escape(note)}</p>" for note in notes(table)),
        "<h2>Quality</h2><p>Means over queries, with 95 % bootstrap intervals.</p>",
        picture(quality_figure(comparison, rows)),
        "<h2>Quality against cost</h2>",
        picture(cost_figure(comparison, rows)),
        *_differences(comparison),
        "<h2>The systems</h2>",
        definitions(comparison.systems),
    ]
    return html_page(f"Comparison on {comparison.about['collection']}", parts)


def quality_figure(comparison: Comparison, rows: Sequence[Row]) -> go.Figure:
    """Draw a bar for each system, in a panel for each measure."""
    figure = make_subplots(cols=len(comparison.measures), shared_yaxes=True, subplot_titles=comparison.measures)
    for column, measure in enumerate(comparison.measures, start=1):
        means = [row.scores[measure].mean for row in rows]
        ends = [_interval(comparison, row.system, measure) for row in rows]
        figure.add_bar(
            x=means,
            y=[row.system for row in rows],
            orientation="h",
            marker_color=[_colour(comparison, row.system) for row in rows],
            error_x={
                "array": [high - mean for (_, high), mean in zip(ends, means, strict=True)],
                "arrayminus": [mean - low for (low, _), mean in zip(ends, means, strict=True)],
                "color": GREY,
            },
            row=1,
            col=column,
        )
    figure.update_yaxes(autorange="reversed")
    return figure.update_layout(showlegend=False, height=120 + 32 * len(rows), margin={"l": 110, "t": 40})


def cost_figure(comparison: Comparison, rows: Sequence[Row]) -> go.Figure:
    """Draw the first measure against what training and searching took."""
    measure = comparison.measures[0]
    costs = {
        "training, seconds": [row.training_seconds for row in rows],
        "search, milliseconds a query": [row.search_ms for row in rows],
    }
    figure = make_subplots(cols=len(costs), shared_yaxes=True)
    for column, (name, values) in enumerate(costs.items(), start=1):
        figure.add_scatter(
            x=values,
            y=[row.scores[measure].mean for row in rows],
            mode="markers+text",
            text=[row.system for row in rows],
            textposition=list(islice(cycle(AROUND), len(rows))),
            cliponaxis=False,
            marker={"size": 10, "color": [_colour(comparison, row.system) for row in rows]},
            row=1,
            col=column,
        )
        figure.update_xaxes(title_text=name, rangemode="tozero", row=1, col=column)
    figure.update_yaxes(title_text=measure, row=1, col=1)
    return figure.update_layout(showlegend=False, height=420, margin={"t": 20})


def difference_figure(comparison: Comparison, one: str, other: str) -> go.Figure:
    """Draw query by query how much better one system does than another, sorted."""
    measure = comparison.measures[0]
    first, second = comparison.per_query(one, measure), comparison.per_query(other, measure)
    return difference_bars(((first[query] - second[query], query) for query in first), RIVAL, f"Δ {measure}")


def _differences(comparison: Comparison) -> Iterator[str]:
    """Yield a picture for each pair that differs in the tree alone, and for each of ours beside the best rival."""
    pairs = dict.fromkeys(comparison.pairs)
    if comparison.best_rival is not None:
        pairs |= dict.fromkeys((name, comparison.best_rival) for name in comparison.systems if name in comparison.ours)
    for one, other in pairs:
        yield f"<h2>{escape(one)} less {escape(other)}, query by query</h2>"
        yield picture(difference_figure(comparison, one, other))


def _interval(comparison: Comparison, system: str, measure: str) -> tuple[float, float]:
    return bootstrap_interval(np.array(list(comparison.per_query(system, measure).values())))


def _colour(comparison: Comparison, system: str) -> str:
    return OURS if system in comparison.ours else RIVAL
