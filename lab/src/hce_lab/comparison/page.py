"""A comparison as one HTML page with pictures, which needs neither network nor script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from hce.evaluation.significance import bootstrap_interval
from hce.pages.page import definitions, difference_bars, html_page, html_table
from hce_lab.comparison.pictures import Bar, Point, bar_panels, point_panel
from hce_lab.comparison.table import Comparison, ComparisonTable, Row, header, notes, table_cells


def page(table: ComparisonTable) -> str:
    """Return the page as HTML; text from the user's files is escaped."""
    comparison, rows, _ = table
    parts = [
        definitions(comparison.about),
        html_table(
            header(comparison.measures),
            [table_cells(row, comparison.measures) for row in rows],
            [row.system in comparison.ours for row in rows],
        ),
        *(f"<p>{escape(note)}</p>" for note in notes(table)),
        "<h2>Quality</h2><p>Means over queries, with 95 % bootstrap intervals.</p>",
        bar_panels(_quality(comparison, rows)),
        "<h2>Quality against cost</h2>",
        f'<div class="panels">{"".join(_costs(comparison, rows))}</div>',
        *_differences(comparison),
        "<h2>The systems</h2>",
        definitions(comparison.systems),
    ]
    return html_page(f"Comparison on {comparison.about['collection']}", parts)


def _quality(comparison: Comparison, rows: Sequence[Row]) -> dict[str, list[Bar]]:
    """Return a panel for each measure, with a bar for each system."""
    return {
        measure: [
            Bar(
                row.system,
                row.scores[measure].mean,
                *_interval(comparison, row.system, measure),
                row.system in comparison.ours,
            )
            for row in rows
        ]
        for measure in comparison.measures
    }


def _costs(comparison: Comparison, rows: Sequence[Row]) -> Iterator[str]:
    """Yield plots of the first measure against training time, if any, and search time."""
    measure = comparison.measures[0]
    costs = {
        "training, seconds": [row.training_seconds for row in rows],
        "search, milliseconds a query": [row.search_ms for row in rows],
    }
    for name, values in costs.items():
        if any(values):
            points = [
                Point(row.system, value, row.scores[measure].mean, row.system in comparison.ours)
                for row, value in zip(rows, values, strict=True)
            ]
            yield point_panel(points, name, measure)


def differences(comparison: Comparison, one: str, other: str) -> str:
    """Draw the sorted differences between two systems, query by query."""
    measure = comparison.measures[0]
    first, second = comparison.per_query(one, measure), comparison.per_query(other, measure)
    return difference_bars(((first[query] - second[query], query) for query in first), f"Δ {measure}")


def _differences(comparison: Comparison) -> Iterator[str]:
    """Yield a picture for each pair with and without tree, and for HCE against a rival."""
    pairs = dict.fromkeys(comparison.pairs)
    if comparison.best_rival is not None:
        pairs |= dict.fromkeys((name, comparison.best_rival) for name in comparison.systems if name in comparison.ours)
    for one, other in pairs:
        yield f"<h2>{escape(one)} less {escape(other)}, query by query</h2>"
        yield differences(comparison, one, other)


def _interval(comparison: Comparison, system: str, measure: str) -> tuple[float, float]:
    return bootstrap_interval(np.array(list(comparison.per_query(system, measure).values())))
