"""HCE compared with the same training without the tree, on BEIR folders: unsupervised, supervised and joint.

    python -m hce_lab scenarios data/scifact data/nfcorpus data/cranfield --seeds 3
    python -m hce_lab scenarios data/scifact --mode joint --encoder minilm --seeds 1
    python -m hce_lab scenarios data/scifact data/squad --mode unsupervised,supervised,joint --splits test,test_seen

A collection without a train split has only the unsupervised scenario, and splits that it lacks are skipped.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

from hce.data.judgments import Dataset, splits
from hce.evaluation.evaluate import DEFAULT_MEASURES
from hce.training.recipe import Recipe, parsed_settings
from hce_lab.comparison.bench import Bench
from hce_lab.comparison.table import Comparison
from hce_lab.comparison.task import Task
from hce_lab.experiments.common import MODES, bench_of, command_line, names, run_systems, splits_of
from hce_lab.experiments.page import Page, Panel, Series, seeds_note, table

ABOUT = """
The same collection with no labels (unsupervised: spans of documents are the queries), with labeled queries alone
(supervised), and with both (joint); each with the tree (hce) and by the same training without it (no-tree), beside the
encoder as given (untrained). Look for
what joint training adds to supervised, most of all where documents have no training queries (squad: test; test_seen has
them), and for the difference that the tree makes in each scenario beside the spread over seeds.
"""
COMPARED = ("untrained", "no-tree", "hce", "hce-eq5", "ct")
DEFAULT = ["untrained", "no-tree", "hce"]
Found = dict[str, dict[str, dict[str, Comparison]]]
"""Collection → split → scenario → what was measured."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run missing systems, then show all results."""
    parser = command_line("scenarios", __doc__ or "", seeds=3, several=True)
    parser.add_argument(
        "--mode", type=partial(_known, MODES), default=["unsupervised"], help="scenarios with commas between"
    )
    parser.add_argument("--systems", type=partial(_known, COMPARED), default=DEFAULT, help="with commas between")
    parser.add_argument("--splits", type=names, default=["test"], help="those of them that a collection has")
    arguments = parser.parse_args(argv)
    found = {folder.absolute().name: run_collection(folder, arguments) for folder in arguments.folders}
    notes = [
        seeds_note(arguments),
        "λ is the share of the trained weights in the result, chosen on dev; a mean over seeds.",
    ]
    title = "Unsupervised, supervised and joint"
    Page("scenarios", title, ABOUT, {"": _table(found)}, notes, _panels(found)).show(parser, arguments)


def _known(known: Sequence[str], text: str) -> list[str]:
    for name in names(text):
        if name not in known:
            raise argparse.ArgumentTypeError(f"unknown {name!r}; there are {', '.join(known)}")
    return names(text)


def run_collection(folder: Path, arguments: argparse.Namespace) -> dict[str, dict[str, Comparison]]:
    """Train every system in every scenario that the collection's labels allow."""
    bench = bench_of(arguments, folder, DEFAULT_MEASURES, splits_of(folder, arguments.splits))
    found: dict[str, dict[str, Comparison]] = {split: {} for split in bench.tested}
    for mode in arguments.mode:
        if mode == "unsupervised" or "train" in splits(folder):
            with_mode = replace(bench, task=_task(bench, folder, mode, arguments))
            for split, comparison in run_systems(with_mode, arguments.systems, arguments).items():
                found[split][mode] = comparison
    return found


def _task(bench: Bench, folder: Path, mode: str, arguments: argparse.Namespace) -> Task:
    """Make the task as `hce train` does: without a dev split, each seed holds out queries."""
    recipe = Recipe.for_encoder(static=bench.encoder.is_table, **{**parsed_settings(arguments.set), "mode": mode})
    pairs = dev = None
    if mode != "unsupervised":
        pairs = Dataset.load(folder, "train").labels
        dev = Dataset.load(folder, "dev").labels if "dev" in splits(folder) else None
    return Task(bench.task.corpus, arguments.encoder, recipe, pairs, dev)


def _table(found: Found) -> str:
    rows = []
    for collection, of_collection in found.items():
        for split, of_split in of_collection.items():
            for mode, comparison in of_split.items():
                for system in comparison.systems:
                    scores = [str(comparison.score(system, measure)) for measure in DEFAULT_MEASURES]
                    results = comparison.results_of(system)
                    mixes = [result.facts["mix"] for result in results if "mix" in result.facts]
                    mix = f"{fmean(mixes):.2f}" if mixes else "–"
                    seconds = fmean(result.training_seconds + result.indexing_seconds for result in results)
                    rows.append([collection, split, mode, system, *scores, mix, f"{seconds:.0f} s"])
    return table(["collection", "split", "scenario", "system", *DEFAULT_MEASURES, "λ", "time"], rows)


def _panels(found: Found) -> list[Panel]:
    measure = DEFAULT_MEASURES[0]
    panels = []
    for collection, of_collection in found.items():
        for split, of_split in of_collection.items():
            series = []
            for system in next(iter(of_split.values())).systems:
                scores = [comparison.score(system, measure) for comparison in of_split.values()]
                series.append(Series(system, [score.mean for score in scores], [score.spread for score in scores]))
            panels.append(Panel(f"{collection}, {split}", "", measure, list(of_split), series, bars=True))
    return panels
