"""The unsupervised table: systems that see the documents of a collection and no labels, over several collections.

python experiments/unsupervised_table.py data/cranfield data/scifact data/nfcorpus data/squad --output docs/results
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from charts import Panel, Series, svg
from results import Page, Record, Runs, command_line, names, run_script, seeds_note, table, with_spread
from running import for_mode, loaded, means, run_all, significance

from hce.comparison.systems import SYSTEMS, choose
from hce.comparison.table import BETTER, REFERENCE, WORSE

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
Found = dict[str, dict[str, list[Record]]]
"""Collection → system → a record for each seed."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is not there yet, then show all."""
    parser = command_line("unsupervised_table", __doc__ or "", seeds=3, several=True)
    parser.add_argument("--systems", type=names, default=DEFAULT, help="with commas between")
    parser.add_argument("--splits", type=names, default=["test"], help="the split that is measured")
    parser.add_argument("--measures", type=names, default=["nDCG@10", "R@10", "R@100"], help="tested by the first")
    arguments = parser.parse_args(argv)
    found = run_collections(Runs(arguments.results), arguments)
    marks = {name: _marks(records, arguments) for name, records in found.items()}
    tables = {
        measure: _table(found, marks if not number else {}, measure, arguments)
        for number, measure in enumerate(arguments.measures)
    }
    notes = [
        f"{MARKS} Marks are on {arguments.measures[0]}.",
        seeds_note(arguments),
        *(f"{system}: {SYSTEMS[system].about}" for system in next(iter(found.values()))),
    ]
    Page("unsupervised_table", "Without labels", ABOUT, tables, notes, svg([_panel(found, arguments)])).show(
        parser, arguments
    )


def run_collections(runs: Runs, arguments: argparse.Namespace) -> Found:
    """The records of every collection and system, one a seed."""
    found = {}
    for folder in arguments.folders:
        collection = loaded(arguments, folder)
        unlabelled = replace(collection, task=for_mode(collection.task, "unsupervised"))
        chosen = choose(arguments.systems, unlabelled.task, static=collection.static)
        found[collection.name] = run_all(runs, unlabelled, chosen, arguments, "unsupervised")
    return found


def _marks(records: dict[str, list[Record]], arguments: argparse.Namespace) -> dict[str, str]:
    measure = arguments.measures[0]
    return {row.system: row.mark(measure) for row in significance(records, arguments.splits[0], measure).rows}


def _table(found: Found, marks: dict[str, dict[str, str]], measure: str, arguments: argparse.Namespace) -> str:
    rows = []
    for system in next(iter(found.values())):
        cells, averages = [], []
        for collection, records in found.items():
            values = means(records[system], arguments.splits[0], measure)
            averages.append(fmean(values))
            cells.append(f"{with_spread(values)} {marks.get(collection, {}).get(system, '')}".rstrip())
        rows.append([system, *cells, f"{fmean(averages):.4f}"])
    return table(["system", *found, "average"], rows)


def _panel(found: Found, arguments: argparse.Namespace) -> Panel:
    measure = arguments.measures[0]
    series = []
    for system in next(iter(found.values())):
        values = [fmean(means(records[system], arguments.splits[0], measure)) for records in found.values()]
        series.append(Series(system, [*values, fmean(values)]))
    return Panel(f"{measure}, no labels", "collection", measure, [*found, "average"], series, bars=True)


if __name__ == "__main__":
    run_script(main)
