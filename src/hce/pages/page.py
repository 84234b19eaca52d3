"""One HTML file with pictures that needs no network: plotly's JavaScript is inside it, and all text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from hce.errors import MissingPackageError

try:
    import plotly.graph_objects as go
    from plotly.offline import get_plotlyjs
    from plotly.subplots import make_subplots
except ImportError as error:
    raise MissingPackageError(
        "no page with pictures: plotly is not installed; pip install 'hierarchical-corpus-encoder[web]'"
    ) from error

__all__ = [
    "GREY",
    "OURS",
    "RIVAL",
    "definitions",
    "difference_bars",
    "go",
    "html_page",
    "html_table",
    "make_subplots",
    "picture",
]

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
td:first-child, th:first-child {{ text-align: left; white-space: normal; }}
tr.ours td:first-child {{ color: {ours}; font-weight: 600; }}
.scroll {{ overflow-x: auto; }}
pre {{ background: #f4f4f4; padding: .8em; overflow-x: auto; }}
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


def html_page(title: str, parts: Iterable[str]) -> str:
    """Return the whole file; `parts` are HTML already."""
    return PAGE.format(title=escape(title), ours=OURS, plotly=get_plotlyjs(), body="\n".join(parts))


def picture(figure: go.Figure) -> str:
    """Return a figure as a part of a page."""
    figure.update_layout(template="plotly_white")
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config={"displayModeBar": False}))


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]], ours: Sequence[bool] = ()) -> str:
    """Return a table of texts, scrolled sideways where it is too wide; rows of `ours` stand out."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = []
    for number, row in enumerate(rows):
        kind = ' class="ours"' if number < len(ours) and ours[number] else ""
        body.append(f"<tr{kind}>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def definitions(items: Mapping[str, str]) -> str:
    """Return names and what they stand for as a list."""
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in items.items()) + "</dl>"


def difference_bars(differences: Iterable[tuple[float, str]], worse: str, axis: str) -> go.Figure:
    """Draw a bar for each query, its difference and its text, best first; those that lost have the colour `worse`."""
    ordered = sorted(differences, reverse=True)
    bars = go.Bar(
        x=list(range(1, len(ordered) + 1)),
        y=[difference for difference, _ in ordered],
        hovertext=[escape(query) for _, query in ordered],
        marker_color=[OURS if difference > 0 else worse for difference, _ in ordered],
        marker_line_width=0,
    )
    layout = {"height": 300, "bargap": 0, "xaxis_title": "queries", "yaxis_title": axis}
    return go.Figure(bars).update_layout(margin={"t": 10}, **layout)
