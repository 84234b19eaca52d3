"""One HTML file that needs no network, no script and no other file: tables and pictures, on light and dark alike."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape

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
STYLE = """
:root { color-scheme: light dark; --bg: #fff; --ink: #1b2024; --soft: #5f6b73; --line: #dfe4e6; --panel: #f5f7f7;
  --ours: #0f766e; --rival: #64748b; --gain: #15803d; --loss: #b42318;
  --series-0: #0f766e; --series-1: #4f46e5; --series-2: #b45309; --series-3: #be185d; --series-4: #475569;
  --series-5: #4d7c0f; --series-6: #0369a1; --series-7: #7e22ce; }
@media (prefers-color-scheme: dark) { :root { --bg: #111417; --ink: #e7eaec; --soft: #97a3ab; --line: #2f373d;
  --panel: #191d21; --ours: #45c1b2; --rival: #8b9bab; --gain: #4ade80; --loss: #ff8a7a;
  --series-0: #45c1b2; --series-1: #a5b4fc; --series-2: #f0a04b; --series-3: #f9a8d4; --series-4: #a8b5c2;
  --series-5: #bef264; --series-6: #7dd3fc; --series-7: #d8b4fe; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; max-width: 1080px; margin: 2em auto;
  padding: 0 1em; background: var(--bg); color: var(--ink); overflow-wrap: anywhere; }
h1 { font-size: 1.5em; line-height: 1.25; }
h2 { margin: 2em 0 .5em; font-size: 1.15em; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
td, th { padding: .3em .6em; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; vertical-align: bottom; }
td:first-child, th:first-child { text-align: left; white-space: normal; padding-left: 0; min-width: 8em; }
tr.ours td:first-child { color: var(--ours); font-weight: 600; }
.gain { color: var(--gain); } .loss { color: var(--loss); }
.scroll { overflow-x: auto; }
pre { background: var(--panel); padding: .8em; overflow-x: auto; white-space: pre-wrap; border-radius: 6px; }
dl { display: grid; grid-template-columns: minmax(6em, max-content) 1fr; gap: .2em 1em; }
dt { font-weight: 600; } dd { margin: 0; }
figure { margin: 0; background: var(--panel); border-radius: 8px; padding: .6em .8em .8em; min-width: 0; }
figure.wide { margin: .6em 0; }
figcaption { color: var(--soft); font-size: .9em; margin-bottom: .4em; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(290px, 100%), 1fr)); gap: .8em; }
.panels svg { display: block; width: 100%; height: auto; max-width: 520px; }
.legend { display: flex; flex-wrap: wrap; gap: .2em 1.2em; list-style: none; padding: 0; margin: .4em 0 .8em; }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 50%; margin-right: .4em; }
svg text { font-size: 11px; fill: var(--ink); } svg .tick { fill: var(--soft); font-size: 10px; }
svg .grid { stroke: var(--line); } svg .zero { stroke: var(--soft); vector-effect: non-scaling-stroke; }
svg polyline { fill: none; stroke-linejoin: round; }
circle.ours, text.ours { fill: var(--ours); } circle.rival { fill: var(--rival); } text.ours { font-weight: 600; }
rect.gain, polygon.gain { fill: var(--gain); } rect.loss, polygon.loss { fill: var(--loss); }
.signed { position: relative; height: 220px; padding-left: 3.2em; }
.signed svg { width: 100%; height: 100%; display: block; }
.signed span { position: absolute; left: 0; color: var(--soft); font-size: .8em; transform: translateY(-50%); }
.signed span:nth-child(1) { top: 4%; } .signed span:nth-child(2) { top: 50%; } .signed span:nth-child(3) { top: 96%; }
.bars { display: grid; grid-template-columns: minmax(4em, max-content) minmax(3em, 1fr) auto; gap: .3em .7em;
  align-items: center; font-size: .9em; font-variant-numeric: tabular-nums; }
.bars > .ours { color: var(--ours); font-weight: 600; }
.track { position: relative; height: .9em; }
.track i { position: absolute; inset: 0 auto 0 0; border-radius: 2px; background: var(--rival); }
.track i.ours { background: var(--ours); }
.track b { position: absolute; top: 50%; height: 2px; margin-top: -1px; background: var(--ink); opacity: .75; }
.tree { list-style: none; padding: 0; margin: 0; } .tree li { margin-bottom: .7em; } .tree p { margin: 0 0 .15em; }
.tree small { color: var(--soft); }
.parts { display: flex; gap: 2px; min-width: 4em; }
.parts span { flex: 1 1 0; min-width: 0; background: color-mix(in srgb, var(--ours) 18%, var(--panel));
  border-radius: 3px;
  padding: .1em .35em; font-size: .78em; white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
@media (max-width: 600px) { body { margin: 1em auto; } dl { grid-template-columns: 1fr; } dd { margin-bottom: .4em; }
  td, th { padding: .3em .45em; font-size: .9em; } .parts { width: 100% !important; flex-wrap: wrap; }
  .parts span { flex-basis: 40%; }
  .long, .long thead, .long tbody { display: block; }
  .long tr { display: grid; grid-template-columns: 1.4fr 1fr 1fr 1fr; border-bottom: 1px solid var(--line); }
  .long :is(td, th) { border: 0; } .long :is(td, th):first-child { grid-column: 1 / -1; padding-bottom: 0; }
  .long :is(td, th):nth-child(2) { text-align: left; padding-left: 0; color: var(--soft); } }
"""


def html_page(title: str, parts: Iterable[str]) -> str:
    """Return the whole file; `parts` are HTML already."""
    return PAGE.format(title=escape(title), style=STYLE, body="\n".join(parts))


def html_table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    ours: Sequence[bool] = (),
    signed: Collection[int] = (),
    *,
    is_long: bool = False,
) -> str:
    """Return a table of texts, scrolled sideways where it is too wide.

    Args:
        header: the names of the columns.
        rows: the texts.
        ours: whether each row stands out.
        signed: the columns whose values begin with their sign: gains are green, losses red.
        is_long: whether the first column is long texts, which have lines of their own on a phone.
    """
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = []
    for number, row in enumerate(rows):
        kind = ' class="ours"' if number < len(ours) and ours[number] else ""
        cells = "".join(_cell(cell, column in signed) for column, cell in enumerate(row))
        body.append(f"<tr{kind}>{cells}</tr>")
    table = '<table class="long">' if is_long else "<table>"
    return f'<div class="scroll">{table}<thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _cell(text: str, is_signed: bool) -> str:
    is_zero = not text.strip("+-−0.")
    kind = {"+": ' class="gain"', "-": ' class="loss"'}.get(text[:1], "") if is_signed and not is_zero else ""
    return f"<td{kind}>{escape(text)}</td>"


def definitions(items: Mapping[str, str]) -> str:
    """Return names and what they stand for as a list."""
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in items.items()) + "</dl>"
