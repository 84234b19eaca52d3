"""Recall and NDCG against the branching factor b, with the tree's depth, beside the same training without a tree.

python experiments/branching.py data/scifact data/cranfield --branching 2,4,8,16,32,64,128,256
python experiments/branching.py data/scifact --mode joint --seeds 3 --output docs/results
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from charts import Panel, Series, svg
from results import Page, Record, Runs, command_line, names, numbers, run_script, seeds_note, spread, table, with_spread
from running import MODES, Collection, for_mode, loaded, means, run_all

from hce.tree.growing import level_sizes

ABOUT = """
One tree for each branching factor b, everything else alike. A small b makes a deep tree with few siblings to tell
apart at each level, a large one a shallow tree. The depth L counts the steps from the root to a document. Look for how
flat the line is (does b have to be chosen with care?), and whether it lies above the dashed line, the same training
without a tree.
"""
NO_TREE = "no tree"


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is not there yet, then show all."""
    parser = command_line("branching", __doc__ or "", seeds=3, several=True)
    parser.add_argument(
        "--branching", type=numbers, default=[2, 4, 8, 16, 32, 64, 128, 256], help="with commas between"
    )
    parser.add_argument("--mode", choices=MODES, default="unsupervised")
    parser.add_argument("--splits", type=names, default=["test"], help="the first one is shown")
    parser.add_argument(
        "--measures", type=names, default=["nDCG@10", "R@10", "R@100"], help="the first is the picture's"
    )
    arguments = parser.parse_args(argv)
    runs = Runs(arguments.results)
    tables, panels = {}, []
    for folder in arguments.folders:
        collection = loaded(arguments, folder)
        documents = len(collection.task.corpus)
        found = run_collection(runs, collection, arguments)
        tables[f"{collection.name}: {documents:,} documents"] = _table(found, documents, arguments)
        panels.append(_panel(collection.name, found, arguments))
    notes = [f"Training is {arguments.mode}, {arguments.splits[0]} queries are measured.", seeds_note(arguments)]
    Page("branching", "Branching factor", ABOUT, tables, notes, svg(panels)).show(parser, arguments)


def run_collection(runs: Runs, collection: Collection, arguments: argparse.Namespace) -> dict[str, list[Record]]:
    """The records of each branching factor, and those without a tree, one a seed."""
    task = for_mode(collection.task, arguments.mode)
    found = {}
    for branching in arguments.branching:
        with_b = replace(collection, task=replace(task, recipe=replace(task.recipe, branching=branching)))
        found[str(branching)] = _run(runs, with_b, "hce", arguments, f"b={branching}")
    found[NO_TREE] = _run(runs, replace(collection, task=task), "no-tree", arguments, "b=-")
    return found


def _run(runs: Runs, collection: Collection, system: str, arguments: argparse.Namespace, kind: str) -> list[Record]:
    return run_all(runs, collection, [system], arguments, f"{arguments.mode} {kind}")[system]


def _table(found: dict[str, list[Record]], documents: int, arguments: argparse.Namespace) -> str:
    rows = []
    for name, records in found.items():
        sizes = [] if name == NO_TREE else level_sizes(documents, int(name))
        depth = "–" if name == NO_TREE else str(len(sizes) + 1)
        scores = [with_spread(means(records, arguments.splits[0], measure)) for measure in arguments.measures]
        seconds = fmean(record["training_seconds"] for record in records)
        rows.append([name, depth, " → ".join(map(str, sizes)) or "–", *scores, f"{seconds:.0f} s"])
    return table(["b", "depth L", "nodes by level", *arguments.measures, "training"], rows)


def _panel(name: str, found: dict[str, list[Record]], arguments: argparse.Namespace) -> Panel:
    measure = arguments.measures[-1]  # by default recall, as in the paper
    values = [means(found[str(branching)], arguments.splits[0], measure) for branching in arguments.branching]
    flat = fmean(means(found[NO_TREE], arguments.splits[0], measure))
    series = [
        Series("HCE", [fmean(each) for each in values], [spread(each) for each in values]),
        Series("the same without a tree", [flat] * len(values), dashed=True),
    ]
    return Panel(name, "branching factor b", measure, [str(b) for b in arguments.branching], series)


if __name__ == "__main__":
    run_script(main)
