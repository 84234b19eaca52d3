"""Recall, nDCG and the tree's depth by branching factor b, compared with the same training without a tree.

python -m hce_lab branching data/scifact data/cranfield --branching 2,4,8,16,32,64,128,256
python -m hce_lab branching data/scifact --mode joint --seeds 3 --output docs/results
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from hce.tree.hierarchy import level_sizes
from hce_lab.comparison.bench import Bench
from hce_lab.comparison.table import Comparison, Score
from hce_lab.experiments.common import MODES, bench_of, command_line, for_mode, names, numbers, run_systems
from hce_lab.experiments.page import Page, Panel, Series, seeds_note, table

ABOUT = """
One tree for each branching factor b, everything else alike. A small b makes a deep tree with few siblings to tell
apart at each level, a large one a shallow tree. The depth L counts the steps from the root to a document. Look for how
flat the line is (does b have to be chosen with care?), and whether it lies above the dashed line, the same training
without a tree.
"""
NO_TREE = "no tree"

Found = dict[str, Comparison]
"""The one system of each branching factor, and the one without a tree."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run missing experiments, then show all results."""
    parser = command_line("branching", __doc__ or "", seeds=3, several=True)
    parser.add_argument(
        "--branching", type=numbers, default=[2, 4, 8, 16, 32, 64, 128, 256], help="with commas between"
    )
    parser.add_argument("--mode", choices=MODES, default="unsupervised")
    parser.add_argument("--splits", type=names, default=["test"], help="the first one is shown")
    parser.add_argument(
        "--measures", type=names, default=["nDCG@10", "R@10", "R@100"], help="the last is the picture's"
    )
    arguments = parser.parse_args(argv)
    tables, panels = {}, []
    for folder in arguments.folders:
        bench = bench_of(arguments, folder, arguments.measures)
        documents = len(bench.task.corpus)
        found = run_collection(bench, arguments)
        tables[f"{bench.collection}: {documents:,} documents"] = _table(found, documents)
        panels.append(_panel(bench.collection, found, arguments.measures[-1]))
    notes = [f"Training is {arguments.mode}, {arguments.splits[0]} queries are measured.", seeds_note(arguments)]
    Page("branching", "Branching factor", ABOUT, tables, notes, panels).show(parser, arguments)


def run_collection(bench: Bench, arguments: argparse.Namespace) -> Found:
    """Train with each branching factor, and without a tree."""
    split, task = arguments.splits[0], for_mode(bench.task, arguments.mode)
    found = {}
    for branching in arguments.branching:
        with_b = task.with_settings(branching=branching)
        found[str(branching)] = run_systems(replace(bench, task=with_b), ["hce"], arguments)[split]
    found[NO_TREE] = run_systems(replace(bench, task=task), ["no-tree"], arguments)[split]
    return found


def _score(comparison: Comparison, measure: str) -> Score:
    (system,) = comparison.systems
    return comparison.score(system, measure)


def _table(found: Found, documents: int) -> str:
    measures = found[NO_TREE].measures
    rows = []
    for name, comparison in found.items():
        sizes = [] if name == NO_TREE else level_sizes(documents, int(name))
        depth = "–" if name == NO_TREE else str(len(sizes) + 1)
        scores = [str(_score(comparison, measure)) for measure in measures]
        seconds = fmean(result.training_seconds for result in comparison.results)
        rows.append([name, depth, " → ".join(map(str, sizes)) or "–", *scores, f"{seconds:.0f} s"])
    return table(["b", "depth L", "nodes by level", *measures, "training"], rows)


def _panel(collection: str, found: Found, measure: str) -> Panel:
    scores = {name: _score(comparison, measure) for name, comparison in found.items()}
    without = scores.pop(NO_TREE)
    series = [
        Series("HCE", [score.mean for score in scores.values()], [score.spread for score in scores.values()]),
        Series("the same without a tree", [without.mean] * len(scores), dashed=True),
    ]
    return Panel(collection, "branching factor b", measure, list(scores), series)
