"""The unsupervised table: systems that train on documents without labels, on several collections.

python -m hce_lab unsupervised_table data/cranfield data/scifact data/nfcorpus data/squad --output docs/results
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from hce_lab.comparison.systems import choose
from hce_lab.comparison.table import BETTER, REFERENCE, WORSE, Comparison
from hce_lab.experiments.common import bench_of, command_line, for_mode, names, run_systems, tested
from hce_lab.experiments.page import Page, Panel, Series, seeds_note, table

ABOUT = """
Every system is given the documents of a collection and nothing else: no labeled query is trained on or chosen by.
Each is trained on each collection by itself, then asked that collection's test queries. Look at hce-hybrid, which is
what `hce train` and `hce search` do, beside hybrid, the best that can be had without training; at hce, the same by
vectors alone, beside no-tree, which is trained without the tree; and at BM25, which an encoder that knows nothing of
the subject does not easily beat.
"""
DEFAULT = ["bm25", "untrained", "hybrid", "rrf", "fitted", "no-tree", "hce", "hce-hybrid"]
MARKS = (
    f"{REFERENCE} the best system without the tree; {BETTER} better and {WORSE} worse than it, p < 0.05 (paired "
    "randomization test over queries, Holm's correction)."
)
CQADUPSTACK = "cqadupstack"  # a folder of twelve forums, which BEIR averages as one collection
LARGE = 200_000  # documents; the paper averages over smaller collections
Found = dict[str, Comparison]
"""What was measured, by collection."""
Columns = dict[str, list[Comparison]]
"""What a column is the mean of: one collection, or the forums of CQADupStack."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run missing systems, then show all results."""
    parser = command_line("unsupervised_table", __doc__ or "", seeds=3, several=True)
    parser.add_argument("--systems", type=names, default=DEFAULT, help="with commas between")
    parser.add_argument("--splits", type=names, default=["test"], help="the split that is measured")
    parser.add_argument("--measures", type=names, default=["nDCG@10", "R@10", "R@100"], help="tested by the first")
    arguments = parser.parse_args(argv)
    found, sizes = run_collections(arguments)
    columns = columns_of(found)
    large = {name for name in columns if any(sizes[each] >= LARGE for each in found if column_of(each) == name)}
    first, *others = arguments.measures
    tables = {first: _table(columns, large, first, _marks(found))}
    tables |= {measure: _table(columns, large, measure, {}) for measure in others}
    systems = next(iter(found.values())).systems
    notes = [f"{MARKS} Marks are on {first}.", seeds_note(arguments), *map(": ".join, systems.items())]
    page = Page("unsupervised_table", "Without labels", ABOUT, tables, notes, [_panel(columns, first)])
    page.show(parser, arguments)


def run_collections(arguments: argparse.Namespace) -> tuple[Found, dict[str, int]]:
    """Train and measure all systems; return results and sizes of all collections."""
    found, sizes = {}, {}
    for folder in arguments.folders:
        bench = bench_of(arguments, folder, arguments.measures)
        bench = replace(bench, task=for_mode(bench.task, "unsupervised"))
        systems = choose(arguments.systems, bench.task, is_static=bench.encoder.table is not None)
        name = bench.collection
        if folder.absolute().parent.name.lower() == CQADUPSTACK:
            name = f"{CQADUPSTACK}/{name}"
        found[name] = run_systems(bench, systems, arguments)[arguments.splits[0]]
        sizes[name] = len(bench.task.corpus)
    return found, sizes


def column_of(collection: str) -> str:
    """Return a collection's column: its own, or the one of all CQADupStack forums."""
    return collection.partition("/")[0]


def columns_of(found: Found) -> Columns:
    """Group the collections by column, in the order given."""
    columns: Columns = {}
    for name, comparison in found.items():
        columns.setdefault(column_of(name), []).append(comparison)
    return columns


def _marks(found: Found) -> dict[str, dict[str, str]]:
    """Return the marks of systems on each collection, by the first measure."""
    return {name: {row.system: row.mark(each.measures[0]) for row in tested(each).rows} for name, each in found.items()}


def _table(columns: Columns, large: set[str], measure: str, marks: dict[str, dict[str, str]]) -> str:
    averages = {"average": list(columns)}
    if large:
        averages = {"average (< 200k)": [name for name in columns if name not in large], **averages}
    rows = []
    for system in next(iter(columns.values()))[0].systems:
        means = {name: fmean(each.score(system, measure).mean for each in of) for name, of in columns.items()}
        cells = [
            f"{of[0].score(system, measure) if len(of) == 1 else f'{means[name]:.4f}'} "
            f"{marks.get(name, {}).get(system, '')}".rstrip()
            for name, of in columns.items()
        ]
        cells += [f"{fmean(means[name] for name in names):.4f}" if names else "–" for names in averages.values()]
        fallen = {each.fallbacks(system) for of in columns.values() for each in of} - {""}
        rows.append([f"{system} (in places not trained)" if fallen else system, *cells])
    return table(["system", *columns, *averages], rows)


def _panel(columns: Columns, measure: str) -> Panel:
    series = []
    for system in next(iter(columns.values()))[0].systems:
        values = [fmean(each.score(system, measure).mean for each in of) for of in columns.values()]
        series.append(Series(system, [*values, fmean(values)]))
    return Panel(f"{measure}, no labels", "collection", measure, [*columns, "average"], series, bars=True)
