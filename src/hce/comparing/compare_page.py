"""A comparison as one HTML page with pictures, which needs no network: plotly's JavaScript is inside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import cycle, islice

import numpy as np

from hce.comparing.comparison import Comparison, Row, Table, cells, header, notes
from hce.errors import MissingPackageError
from hce.evaluation.significance import bootstrap_interval

try:
    import plotly.graph_objects as go
    from plotly.offline import get_plotlyjs
    from plotly.subplots import make_subplots
except ImportError as error:
    raise MissingPackageError(
        "no page with pictures: plotly is not installed; pip install 'hierarchical-corpus-encoder[web]'"
    ) from error

AROUND = ("top center", "bottom center", "middle right", "middle left")  # so that few names cover each other
OURS, RIVAL, GREY = "#c0392b", "#2c3e50", "#95a5a6"
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2em auto; padding: 0 1em; color: #222; }}
table {{ border-collapse: collapse; width: 100%; }}
td, th {{ padding: .3em .6em; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }}
td:first-child, th:first-child {{ text-align: left; }}
tr.ours td:first-child {{ color: {ours}; font-weight: 600; }}
.scroll {{ overflow-x: auto; }}
dt {{ font-weight: 600; float: left; clear: left; margin-right: .6em; }}
dd {{ margin-left: 8em; }}
h2 {{ margin-top: 2em; font-size: 1.15em; }}
</style>
<script>{plotly}</script>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def page(table: Table) -> str:
    """The whole page; whatever comes from the user's files is escaped."""
    comparison, rows, _ = table
    parts = [
        _definitions(comparison.about),
        _html_table(comparison, rows),
        *(f"<p>{escape(note)}</p>" for note in notes(table)),
        "<h2>Quality</h2><p>Means over queries, with 95 % bootstrap intervals.</p>",
        _picture(quality_figure(comparison, rows)),
        "<h2>Quality against cost</h2>",
        _picture(cost_figure(comparison, rows)),
        *_differences(comparison),
        "<h2>The systems</h2>",
        _definitions(comparison.systems),
    ]
    title = escape(f"Comparison on {comparison.about['collection']}")
    return PAGE.format(title=title, ours=OURS, plotly=get_plotlyjs(), body="\n".join(parts))


def quality_figure(comparison: Comparison, rows: Sequence[Row]) -> go.Figure:
    """A bar for each system, a panel for each measure."""
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
    """The first measure against what training and searching took."""
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
    """Query by query, how much better one system does than another, sorted."""
    measure = comparison.measures[0]
    first, second = comparison.per_query(one, measure), comparison.per_query(other, measure)
    ordered = sorted(((first[query] - second[query], query) for query in first), reverse=True)
    values = [difference for difference, _ in ordered]
    figure = go.Figure(
        go.Bar(
            x=list(range(1, len(values) + 1)),
            y=values,
            hovertext=[escape(query) for _, query in ordered],
            marker_color=[OURS if value > 0 else RIVAL for value in values],
            marker_line_width=0,
        )
    )
    figure.update_layout(height=300, margin={"t": 10}, bargap=0, xaxis_title="queries", yaxis_title=f"Δ {measure}")
    return figure


def _differences(comparison: Comparison) -> Iterator[str]:
    pairs = dict.fromkeys(comparison.pairs)
    if comparison.best_rival is not None:
        pairs.update(
            dict.fromkeys((name, comparison.best_rival) for name in comparison.systems if name in comparison.ours)
        )
    for one, other in pairs:
        yield f"<h2>{escape(one)} less {escape(other)}, query by query</h2>"
        yield _picture(difference_figure(comparison, one, other))


def _picture(figure: go.Figure) -> str:
    figure.update_layout(template="plotly_white")
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config={"displayModeBar": False}))


def _html_table(comparison: Comparison, rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header(comparison.measures))
    body = "".join(
        f'<tr class="{"ours" if row.system in comparison.ours else "rival"}">'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells(row, comparison.measures))
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _definitions(items: dict[str, str]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in items.items()) + "</dl>"


def _interval(comparison: Comparison, system: str, measure: str) -> tuple[float, float]:
    return bootstrap_interval(np.array(list(comparison.per_query(system, measure).values())))


def _colour(comparison: Comparison, system: str) -> str:
    return OURS if system in comparison.ours else RIVAL
