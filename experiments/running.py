"""Systems run on collections: built once for each seed, measured on all splits asked for, and kept.

Every system is one of `hce.comparison.systems` and is given what `hce compare` would give it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from results import Record, Runs, run_name, settings_of

from hce.comparison.run import task_of
from hce.comparison.systems import SYSTEMS, WITHOUT_TREE
from hce.comparison.table import Comparison, Result, Table
from hce.comparison.table import table as compared
from hce.comparison.task import Task
from hce.data.judgments import Dataset, Labels, splits
from hce.encoding.encoder import Encoder
from hce.errors import InputError
from hce.evaluation.evaluate import evaluate

MODES = ("unsupervised", "supervised", "joint")


@dataclass(frozen=True)
class Collection:
    """A BEIR folder with what is measured on it.

    Attributes:
        name: of the folder.
        task: what every system is given; its labels have none of the queries that are measured.
        tested: the measured splits by name, the first of which decides.
        static: whether the encoder is.
    """

    name: str
    task: Task
    tested: dict[str, Dataset]
    static: bool


def load(
    folder: Path, tested: Sequence[str], encoder: str, settings: Mapping[str, Any], generated: Path | None = None
) -> Collection:
    """Read a collection.

    Raises:
        InputError: a file is missing or malformed.
    """
    datasets = {split: Dataset.load(folder, split) for split in tested}
    if not datasets:
        raise InputError("no split to measure on; give --splits test")
    fresh = Encoder.load(encoder)
    task = task_of(folder, datasets[tested[0]], fresh, tested[0], generated, settings)
    measured = {query_id for dataset in datasets.values() for query_id in dataset.qrels}
    pairs, dev = (_without(labels, measured) for labels in (task.pairs, task.dev))
    return Collection(
        folder.absolute().name, replace(task, encoder=encoder, pairs=pairs, dev=dev), datasets, fresh.is_static
    )


def _without(labels: Labels | None, measured: set[str]) -> Labels | None:
    return None if labels is None else labels.only(name for name in labels.qrels if name not in measured)


def for_mode(task: Task, mode: str) -> Task:
    """The task of training in a mode; an unsupervised one has no labels, not even to choose by.

    Raises:
        InputError: it needs labels, and there are none.
    """
    if mode == "unsupervised":
        return replace(task, pairs=None, dev=None, recipe=replace(task.recipe, mode="unsupervised"))
    if task.pairs is None:
        raise InputError(f"mode {mode!r} needs labelled queries (qrels/train.tsv), and there are none")
    return replace(task, recipe=replace(task.recipe, mode=mode))  # type: ignore[arg-type]


def run_system(task: Task, system: str, tested: Mapping[str, Dataset], measures: Sequence[str]) -> Record:
    """Build a system and measure it on every split; of the first measure, each query's value is kept too."""
    built = SYSTEMS[system].build(task)
    reports = {split: evaluate(built.searcher, data.queries, data.qrels, measures) for split, data in tested.items()}
    return {
        "measures": {split: report.means for split, report in reports.items()},
        "per_query": {
            split: {measures[0]: [round(value, 6) for value in report.per_query[measures[0]].values()]}
            for split, report in reports.items()
        },
        "training_seconds": round(built.training_seconds, 1),
        "facts": {name: built.facts[name] for name in ("mode", "epochs", "mix") if name in built.facts},
    }


def run_all(
    runs: Runs, collection: Collection, systems: Iterable[str], arguments: argparse.Namespace, kind: str = ""
) -> dict[str, list[Record]]:
    """The records of each system, one a seed; those that no seed changes are run once.

    Args:
        runs: where they are kept.
        collection: what is given and what is measured.
        systems: their names.
        arguments: with `encoder`, `seeds`, `set` and `measures`.
        kind: whatever else the records depend on.
    """
    found = {}
    for system in systems:
        found[system] = [
            _kept(runs, collection, system, seed, arguments, kind)
            for seed in range(arguments.seeds if SYSTEMS[system].seeded else 1)
        ]
    return found


def _kept(
    runs: Runs, collection: Collection, system: str, seed: int, arguments: argparse.Namespace, kind: str
) -> Record:
    name = run_name(collection.name, arguments.encoder, kind or "-", system, seed, settings=arguments.set)
    task = replace(collection.task, recipe=replace(collection.task.recipe, seed=seed))
    return runs.get(
        name,
        lambda: run_system(task, system, collection.tested, arguments.measures),
        lambda record: (
            has_all(record, collection.tested, arguments.measures)
            and all(arguments.measures[0] in record["per_query"][split] for split in collection.tested)
        ),
    )


def has_all(record: Record, splits: Iterable[str], measures: Sequence[str]) -> bool:
    """Whether a record has every measure of every split."""
    found = record.get("measures", {})
    return all(measure in found.get(split, {}) for split in splits for measure in measures)


def means(records: Sequence[Record], split: str, measure: str) -> list[float]:
    """A measure's value for each seed."""
    return [record["measures"][split][measure] for record in records]


def significance(found: Mapping[str, Sequence[Record]], split: str, measure: str) -> Table:
    """Every system against the best rival, and the tree against its absence, by the one measure kept by query."""
    results = [
        Result(
            system=system,
            seed=seed,
            per_query={
                measure: {str(number): value for number, value in enumerate(record["per_query"][split][measure])}
            },
            training_seconds=record["training_seconds"],
            indexing_seconds=0.0,
            search_ms=0.0,
            index_bytes=0,
        )
        for system, records in found.items()
        for seed, record in enumerate(records)
    ]
    comparison = Comparison(
        about={},
        measures=(measure,),
        systems={system: SYSTEMS[system].about for system in found},
        ours=frozenset(system for system in found if SYSTEMS[system].ours),
        results=tuple(results),
        pairs=tuple((system, WITHOUT_TREE[system]) for system in found if WITHOUT_TREE.get(system) in found),
    )
    return compared(comparison)


def splits_of(folder: Path, wanted: Sequence[str]) -> list[str]:
    """Those of the splits that a collection has, where several collections have different ones.

    Raises:
        InputError: it has none of them.
    """
    there = [split for split in wanted if split in splits(folder)]
    if not there:
        raise InputError(f"{folder}: none of the splits {', '.join(wanted)} is there")
    return there


def loaded(
    arguments: argparse.Namespace, folder: Path, tested: Sequence[str] | None = None, generated: Path | None = None
) -> Collection:
    """The collection of a folder, as the command line asks for it; measured on all splits asked for, or on these."""
    return load(folder, tested or arguments.splits, arguments.encoder, settings_of(arguments), generated)
