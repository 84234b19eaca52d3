"""The unsupervised table: systems that see the documents of a collection and no labels, over several collections.

python experiments/unsupervised_table.py data/cranfield data/scifact data/nfcorpus data/squad --output docs/results
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from common import bench_of, command_line, for_mode, names, run_script, run_systems
from page import Page, Panel, Series, seeds_note, table

from hce.comparison.systems import choose
from hce.comparison.table import BETTER, REFERENCE, WORSE, Comparison
from hce.comparison.table import table as tested

ABOUT = """
Every system is given the documents of a collection and nothing else: no labelled query is trained on or chosen by.
Each is trained on each collection by itself, then asked that collection's test queries. Look at HCE (hce-u) beside
ict, which is the same training without the tree, and beside ct, where it is in the table, which has mined negatives in
its place; and at BM25, which an encoder that knows nothing of the subject does not easily beat.
"""
DEFAULT = ["bm25", "untrained", "fitted", "ict", "ct", "hce-u"]
MARKS = (
    f"{REFERENCE} the best system without the tree; {BETTER} better and {WORSE} worse than it, p < 0.05 (paired "
    "randomisation test over queries, Holm's correction)."
)
Found = dict[str, Comparison]
"""What was measured, by collection."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is not there yet, then show all."""
    parser = command_line("unsupervised_table", __doc__ or "", seeds=3, several=True)
    parser.add_argument("--systems", type=names, default=DEFAULT, help="with commas between")
    parser.add_argument("--splits", type=names, default=["test"], help="the split that is measured")
    parser.add_argument("--measures", type=names, default=["nDCG@10", "R@10", "R@100"], help="tested by the first")
    arguments = parser.parse_args(argv)
    found = run_collections(arguments)
    first, *others = arguments.measures
    tables = {first: _table(found, first, _marks(found))} | {measure: _table(found, measure, {}) for measure in others}
    systems = next(iter(found.values())).systems
    notes = [f"{MARKS} Marks are on {first}.", seeds_note(arguments), *map(": ".join, systems.items())]
    page = Page("unsupervised_table", "Without labels", ABOUT, tables, notes, [_panel(found, first)])
    page.show(parser, arguments)


def run_collections(arguments: argparse.Namespace) -> Found:
    """Train and measure every system on every collection."""
    found = {}
    for folder in arguments.folders:
        bench = bench_of(arguments, folder, arguments.measures)
        bench = replace(bench, task=for_mode(bench.task, "unsupervised"))
        systems = choose(arguments.systems, bench.task, static=bench.encoder.is_static)
        found[bench.collection] = run_systems(bench, systems, arguments)[arguments.splits[0]]
    return found


def _marks(found: Found) -> dict[str, dict[str, str]]:
    """Mark the systems of each collection by the first measure."""
    first = {name: replace(comparison, measures=comparison.measures[:1]) for name, comparison in found.items()}
    return {name: {row.system: row.mark(each.measures[0]) for row in tested(each).rows} for name, each in first.items()}


def _table(found: Found, measure: str, marks: dict[str, dict[str, str]]) -> str:
    rows = []
    for system in next(iter(found.values())).systems:
        scores = {name: comparison.score(system, measure) for name, comparison in found.items()}
        cells = [f"{score} {marks.get(name, {}).get(system, '')}".rstrip() for name, score in scores.items()]
        rows.append([system, *cells, f"{fmean(score.mean for score in scores.values()):.4f}"])
    return table(["system", *found, "average"], rows)


def _panel(found: Found, measure: str) -> Panel:
    series = []
    for system in next(iter(found.values())).systems:
        values = [comparison.score(system, measure).mean for comparison in found.values()]
        series.append(Series(system, [*values, fmean(values)]))
    return Panel(f"{measure}, no labels", "collection", measure, [*found, "average"], series, bars=True)


if __name__ == "__main__":
    run_script(main)
