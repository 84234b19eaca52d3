"""HCE beside the same training without the tree, on BEIR folders: unsupervised, supervised and joint, several seeds.

    python experiments/scenarios.py data/scifact data/nfcorpus data/cranfield --seeds 3
    python experiments/scenarios.py data/scifact --mode joint --encoder minilm --seeds 1
    python experiments/scenarios.py data/scifact data/squad --mode unsupervised,supervised,joint --splits test,test_seen

A collection without a train split has only the unsupervised scenario, and splits that it lacks are passed over.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from charts import Panel, Series, svg
from results import (
    Page,
    Record,
    Runs,
    command_line,
    names,
    run_name,
    run_script,
    seeds_note,
    settings_of,
    spread,
    table,
    with_spread,
)
from running import MODES, has_all, means, splits_of

from hce.comparison.systems import SYSTEMS
from hce.comparison.task import Task
from hce.data.judgments import Dataset, Labels, splits
from hce.encoding.encoder import Encoder
from hce.evaluation.evaluate import DEFAULT_MEASURES, evaluate
from hce.training.heldout import mean_over_kinds
from hce.training.recipe import Recipe

ABOUT = """
The same collection with no labels (unsupervised: spans of documents are the queries), with labelled queries alone
(supervised), and with both (joint); each with the tree (hce) and by the same training without it (no tree). Look for
what joint training adds to supervised, most of all where documents have no training queries (squad: test; test_seen has
them), and for the difference that the tree makes in each scenario beside the spread over seeds.
"""
COMPARED = {"no tree": "no-tree", "hce": "hce"}
Found = dict[tuple[str, str, str], list[Record]]
"""(Collection, scenario, system) → a record for each seed."""


def run(
    folder: Path, mode: str, system: str, seed: int, tested: Sequence[str], arguments: argparse.Namespace
) -> Record:
    """Train one system once, and measure it on the test splits."""
    start = time.perf_counter()
    built = SYSTEMS[COMPARED[system]].build(_task(folder, mode, seed, tested, arguments))
    seconds = time.perf_counter() - start
    measured = {}
    for split in tested:
        dataset = Dataset.load(folder, split)
        measured[split] = evaluate(built.searcher, dataset.queries, dataset.qrels).means
    return {
        "measures": measured,
        "dev": round(mean_over_kinds(built.facts["after"]), 4),
        "mix": built.facts["mix"],
        "epochs": built.facts["epochs"],
        "seconds": round(seconds, 1),
    }


def _task(folder: Path, mode: str, seed: int, tested: Sequence[str], arguments: argparse.Namespace) -> Task:
    """As `hce train` would have it: each seed holds out queries of its own where there is no dev split."""
    static = Encoder.load(arguments.encoder).is_static
    recipe = Recipe.for_encoder(static=static, **{**settings_of(arguments), "mode": mode, "seed": seed})
    pairs = dev = None
    if mode != "unsupervised":
        pairs = Labels(*Dataset.load(folder, "train")[1:])
        dev = Labels(*Dataset.load(folder, "dev")[1:]) if "dev" in splits(folder) else None
    return Task(Dataset.load(folder, tested[0]).corpus, arguments.encoder, recipe, pairs, dev)


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is not there yet, then show all."""
    parser = command_line("scenarios", __doc__ or "", seeds=3, several=True)
    parser.add_argument("--mode", type=_modes, default=["unsupervised"], help="scenarios with commas between")
    parser.add_argument("--systems", type=_systems, default=list(COMPARED), help="with commas between")
    parser.add_argument("--splits", type=names, default=["test"], help="those of them that a collection has")
    arguments = parser.parse_args(argv)
    found = run_all(Runs(arguments.results), arguments)
    Page(
        "scenarios",
        "Unsupervised, supervised and joint",
        ABOUT,
        {"": _table(found)},
        [
            seeds_note(arguments),
            "λ is the share of the trained weights in the result, chosen on dev; a mean over seeds.",
        ],
        svg(_panels(found, arguments)),
    ).show(parser, arguments)


def _modes(text: str) -> list[str]:
    return _known(text, MODES)


def _systems(text: str) -> list[str]:
    return _known(text, list(COMPARED))


def _known(text: str, known: Sequence[str]) -> list[str]:
    for name in names(text):
        if name not in known:
            raise argparse.ArgumentTypeError(f"unknown {name!r}; there are {', '.join(known)}")
    return names(text)


def run_all(runs: Runs, arguments: argparse.Namespace) -> Found:
    """The records of every collection, scenario and system, one a seed."""
    found: Found = {}
    for folder in arguments.folders:
        tested = splits_of(folder, arguments.splits)
        for mode in arguments.mode:
            if mode != "unsupervised" and "train" not in splits(folder):
                continue
            for system in arguments.systems:
                found[folder.absolute().name, mode, system] = [
                    _kept(runs, folder, mode, system, seed, tested, arguments) for seed in range(arguments.seeds)
                ]
    return found


def _kept(
    runs: Runs, folder: Path, mode: str, system: str, seed: int, tested: Sequence[str], arguments: argparse.Namespace
) -> Record:
    return runs.get(
        run_name(folder.absolute().name, arguments.encoder, mode, system, seed, settings=arguments.set),
        lambda: run(folder, mode, system, seed, tested, arguments),
        lambda record: has_all(record, tested, DEFAULT_MEASURES),
    )


def _rows(found: Found) -> list[tuple[str, str]]:
    """Collections with each of their splits."""
    return list(
        dict.fromkeys((name, split) for (name, _, _), records in found.items() for split in records[0]["measures"])
    )


def _table(found: Found) -> str:
    rows = []
    for collection, split in _rows(found):
        for (name, mode, system), records in found.items():
            if name == collection:
                scores = [with_spread(means(records, split, measure)) for measure in DEFAULT_MEASURES]
                mix, seconds = (fmean(record[each] for record in records) for each in ("mix", "seconds"))
                rows.append([collection, split, mode, system, *scores, f"{mix:.2f}", f"{seconds:.0f} s"])
    return table(["collection", "split", "scenario", "system", *DEFAULT_MEASURES, "λ", "time"], rows)


def _panels(found: Found, arguments: argparse.Namespace) -> list[Panel]:
    measure = DEFAULT_MEASURES[0]
    panels = []
    for collection, split in _rows(found):
        modes = [mode for mode in arguments.mode if (collection, mode, arguments.systems[0]) in found]
        series = []
        for system in arguments.systems:
            values = [means(found[collection, mode, system], split, measure) for mode in modes]
            series.append(Series(system, [fmean(each) for each in values], [spread(each) for each in values]))
        panels.append(Panel(f"{collection}, {split}", "", measure, modes, series, bars=True))
    return panels


if __name__ == "__main__":
    run_script(main)
