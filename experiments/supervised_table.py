"""The supervised table: HCE trained on labelled queries and documents together, beside its parts and its rivals.

    python experiments/supervised_table.py data/squad --splits test,test_seen --output docs/results
    python experiments/supervised_table.py data/squad --generated squad-queries.jsonl

Systems named +qg train on generated queries too, and are in the table where a file of them is given
(`hce generate-queries`). Each system is trained once for each seed, and measured on all splits.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from results import Page, Record, Runs, command_line, names, run_script, seeds_note, table, with_spread
from running import Collection, loaded, means, run_all, significance

from hce.comparison.systems import SYSTEMS, choose
from hce.comparison.table import Table
from hce.comparison.table import notes as notes_of
from hce.errors import InputError

ABOUT = """
All systems learn from the same labelled queries, start from the same encoder and choose by the same dev queries; hce is
the joint training of the paper (HCE-J). Splits differ in what training has seen of their documents: in squad, which
stands in for NQ320k, the documents of test_seen have training queries and those of test have none. Look at hce beside
no-tree, the same training without the tree, and beside no-cotrain, which keeps the first tree; and at what each system
loses from seen to unseen documents.
"""
SUPERVISED = [
    "bm25",
    "untrained",
    "fitted",
    "dpr",
    "ct",
    "tas-b",
    "pefa-xs",
    "pefa-xl",
    "no-tree",
    "no-cotrain",
    "hce-s",
    "hce",
]
WITH_GENERATED = ["bm25+qg", "dpr+qg", "no-tree+qg", "hce+qg"]
MEASURES = ["nDCG@10", "R@1", "R@10", "R@100", "MRR@10"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is not there yet, then show all."""
    parser = command_line("supervised_table", __doc__ or "", seeds=3)
    parser.add_argument("--splits", type=names, default=["test"], help="each gets a table of its own")
    parser.add_argument("--systems", type=names, help="with commas between; default: all that can be run")
    parser.add_argument("--generated", type=Path, help="a file of generated queries")
    parser.add_argument("--measures", type=names, default=MEASURES, help="tested by the first")
    arguments = parser.parse_args(argv)
    collection = loaded(arguments, arguments.folder, generated=arguments.generated)
    if collection.task.pairs is None:
        raise InputError(f"{arguments.folder}: no train split; this table is of systems that learn from labels")
    found = run_systems(Runs(arguments.results), collection, arguments)
    tables, notes = {}, [seeds_note(arguments)]
    for split, dataset in collection.tested.items():
        tested = significance(found, split, arguments.measures[0])
        heading = f"{collection.name}, {split}: {len(dataset.qrels):,} queries"
        tables[heading] = _table(found, tested, split, arguments)
        notes += [f"{split}: {note}" for note in notes_of(tested)]
    notes += [f"{system}: {SYSTEMS[system].about}" for system in found]
    Page("supervised_table", "With labels", ABOUT, tables, notes).show(parser, arguments)


def run_systems(runs: Runs, collection: Collection, arguments: argparse.Namespace) -> dict[str, list[Record]]:
    """The records of every system, one a seed; another file of generated queries reruns only those that use it."""
    systems = _systems(collection, arguments)
    with_generated = [name for name in systems if SYSTEMS[name].needs == "generated"]
    found = run_all(runs, collection, [name for name in systems if name not in with_generated], arguments)
    kind = f"generated={arguments.generated.name}" if arguments.generated else ""
    return found | run_all(runs, collection, with_generated, arguments, kind)


def _systems(collection: Collection, arguments: argparse.Namespace) -> list[str]:
    """Those asked for, else all that this collection and encoder allow."""
    wanted = arguments.systems or [
        name
        for name in SUPERVISED + WITH_GENERATED
        if not SYSTEMS[name].lacks(collection.task, static=collection.static)
    ]
    return choose(wanted, collection.task, static=collection.static)


def _table(found: dict[str, list[Record]], tested: Table, split: str, arguments: argparse.Namespace) -> str:
    first = arguments.measures[0]
    rows = []
    for row in tested.rows:
        records = found[row.system]
        scores = [with_spread(means(records, split, measure)) for measure in arguments.measures]
        scores[0] = f"{scores[0]} {row.mark(first)}".rstrip()
        seconds = fmean(record["training_seconds"] for record in records)
        rows.append([row.system, *scores, f"{seconds / 60:.1f} min" if seconds else "–"])
    return table(["system", *arguments.measures, "training"], rows)


if __name__ == "__main__":
    run_script(main)
