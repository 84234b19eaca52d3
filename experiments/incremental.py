"""New documents without training: train on nine tenths, add the rest bit by bit, and ask for old and new ones.

    python experiments/incremental.py data/squad data/wordnet_examples --splits test,test_seen --output docs/results

Splits that a collection lacks are passed over. Held-out documents take no part in training, nor does any query
whose right document is one of them. Queries of train and dev splits that were dropped for that reason are asked for
too: nobody has learned from them.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
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
    table,
    with_spread,
)
from running import Collection, loaded, splits_of

from hce.comparison.bm25 import BM25Searcher
from hce.comparison.systems import SYSTEMS
from hce.comparison.task import Task
from hce.data.corpus import Corpus
from hce.data.documents import Document
from hce.data.judgments import Judgment, Labels, Qrels
from hce.errors import InputError
from hce.evaluation.evaluate import DenseSearcher, Searcher, evaluate
from hce.index.index import Index

ABOUT = """
A model is trained on nine tenths of the documents and an index is made of them; the other documents are then added
bit by bit, which encodes them and changes nothing else. After each addition the queries of the old documents and those
of the new documents that are there by now are asked. Look for whether new documents are found as well as old ones, and
whether old ones suffer. Old documents had training queries and new ones had none; how much of a difference is one of
the queries themselves can be seen from BM25 and from the encoder before training, which treat all documents alike.
"""
MEASURES = ("R@1", "R@10")
KINDS = ("old", "new")


class Parts(NamedTuple):
    """A collection taken apart.

    Attributes:
        task: what training sees: the old documents, and labels that name no other.
        new: the documents to be added, in the order of addition.
        asked: queries all of whose right documents are old, and all of whose right documents are new.
    """

    task: Task
    new: list[Document]
    asked: dict[str, Labels]


def take_apart(collection: Collection, share: float, seed: int) -> Parts:
    """Hold a random share of the documents out, and sort the queries.

    Raises:
        InputError: the share leaves no new documents, or no queries of them.
    """
    task = collection.task
    order = np.random.default_rng([seed, 5]).permutation(len(task.corpus))
    count = round(share * len(order))
    new = [task.corpus[number] for number in order[:count].tolist()]
    old = [task.corpus[number] for number in np.sort(order[count:]).tolist()]
    new_ids, old_ids = {document.id for document in new}, {document.id for document in old}
    measured = [Labels(data.queries, data.qrels) for data in collection.tested.values()]
    dropped = [labels for labels in (task.pairs, task.dev) if labels is not None]
    asked = {"old": _of_documents(measured, old_ids), "new": _of_documents([*measured, *dropped], new_ids)}
    if not all(labels.qrels for labels in asked.values()):
        raise InputError(f"{collection.name}: no queries of {count:,} new or {len(old):,} old documents to ask")
    corpus = Corpus.from_documents(old, name=f"{collection.name}, old documents")
    pairs, dev = (labels and _about_old(labels, old_ids) for labels in (task.pairs, task.dev))
    return Parts(replace(task, corpus=corpus, pairs=pairs, dev=dev), new, asked)


def _of_documents(several: Sequence[Labels], ids: set[str]) -> Labels:
    """The queries all of whose right documents are among `ids`."""
    found = Labels({}, Qrels([]))
    for labels in several:
        right = {query_id: set(labels.qrels.positives(query_id)) for query_id in labels.qrels}
        found = found.joined(labels.only(query_id for query_id, known in right.items() if known and known <= ids))
    return found


def _about_old(labels: Labels, old: set[str]) -> Labels:
    """The queries that have only old right documents, with the judgments of old documents."""
    kept = _of_documents([labels], old)
    judgments = (judgment for judgment in kept.qrels.judgments() if judgment.document_id in old)
    return Labels(kept.queries, Qrels(Judgment(*judgment) for judgment in judgments))


def steps(available: int) -> list[int]:
    """How many new documents are there by then: 0, 10, 100 … 10,000, and all of them where there are fewer."""
    powers = [10**power for power in range(1, 5) if 10**power <= available]
    return [0, *powers] if powers and powers[-1] == 10_000 else sorted({0, *powers, available})


# --------------------------------------------------------------------------------------------------------------- a run


def run(parts: Parts, system: str, engine: str) -> Record:
    """Build a system on the old documents, add the new ones step by step, and measure after each."""
    found = []
    for added, searcher in _grown(parts, system, engine):
        new = _of_documents([parts.asked["new"]], {document.id for document in parts.new[:added]})
        entry: Record = {"added": added, "new_queries": len(new.qrels), "old_queries": len(parts.asked["old"].qrels)}
        for kind, labels in (("old", parts.asked["old"]), ("new", new)):
            entry[kind] = evaluate(searcher, *labels, MEASURES, depth=10).means if labels.qrels else None
        found.append(entry)
    return {"steps": found}


def _grown(parts: Parts, system: str, engine: str) -> Iterator[tuple[int, Searcher]]:
    """The system with 0, 10, 100 … new documents."""
    old, new = list(parts.task.corpus), parts.new
    if system == "bm25":  # its word statistics are those of all documents: cheap to count anew
        for added in steps(len(new)):
            documents = [*old, *new[:added]]
            yield added, BM25Searcher.index([each.id for each in documents], (each.full_text for each in documents))
        return
    searcher = SYSTEMS[system].build(parts.task).searcher
    if not isinstance(searcher, DenseSearcher):
        raise InputError(f"system {system!r} is no encoder: nothing can be added to it")
    with (
        tempfile.TemporaryDirectory(prefix="hce-incremental-") as folder,
        Index.create(Path(folder) / "index", parts.task.corpus, searcher.encoder, engine=engine) as index,
    ):
        there = 0
        for added in steps(len(new)):
            index.add(new[there:added])
            there = added
            yield added, index  # its hits have an id and a score, and more is not asked of them


# -------------------------------------------------------------------------------------------------------------- showing


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is not there yet, then show all."""
    parser = command_line("incremental", __doc__ or "", seeds=3, several=True)
    parser.add_argument("--splits", type=names, default=["test"], help="whose queries are asked")
    parser.add_argument("--systems", type=names, default=["hce", "fitted", "bm25"], help="encoders, or bm25")
    parser.add_argument("--held-out", type=float, default=0.1, help="share of the documents that are added later")
    parser.add_argument("--engine", default="flat", help="what the index searches with")
    arguments = parser.parse_args(argv)
    _check(arguments)
    runs = Runs(arguments.results)
    tables, panels, notes = {}, [], [f"{seeds_note(arguments)} Each seed holds out other documents."]
    for folder in arguments.folders:
        tested = splits_of(folder, arguments.splits)
        collection = loaded(arguments, folder, tested)
        found = run_all_systems(runs, collection, arguments)
        last = found[arguments.systems[0]][0]["steps"][-1]
        tables[f"{collection.name}: {len(collection.task.corpus):,} documents"] = _table(found)
        panels += [_panel(found, collection.name, measure) for measure in MEASURES]
        notes.append(
            f"{collection.name}: {last['added']:,} documents are added in all; {last['old_queries']:,} queries of old "
            f"documents, {last['new_queries']:,} of new ones (seed 0). Queries with right documents on both sides are "
            "left out."
        )
    notes += [f"{system}: {SYSTEMS[system].about}" for system in arguments.systems]
    Page("incremental", "Adding documents without training", ABOUT, tables, notes, svg(panels)).show(parser, arguments)


def _check(arguments: argparse.Namespace) -> None:
    for system in arguments.systems:
        if system not in SYSTEMS:
            raise InputError(f"unknown system {system!r}; there are {', '.join(SYSTEMS)}")
    if not 0 < arguments.held_out < 1:
        raise InputError(f"--held-out {arguments.held_out}: give a share between 0 and 1")


def run_all_systems(runs: Runs, collection: Collection, arguments: argparse.Namespace) -> dict[str, list[Record]]:
    """The records of each system, one a seed."""
    kind = f"{'+'.join(collection.tested)} {arguments.held_out} {arguments.engine}"
    found: dict[str, list[Record]] = {system: [] for system in arguments.systems}
    for seed in range(arguments.seeds):
        task = replace(collection.task, recipe=replace(collection.task.recipe, seed=seed))
        parts = take_apart(replace(collection, task=task), arguments.held_out, seed)
        for system in arguments.systems:
            name = run_name(collection.name, arguments.encoder, kind, system, seed, settings=arguments.set)
            found[system].append(runs.get(name, _delayed(parts, system, arguments.engine)))
    return found


def _delayed(parts: Parts, system: str, engine: str) -> Callable[[], Record]:
    return lambda: run(parts, system, engine)


def _values(records: Sequence[Record], step: int, kind: str, measure: str) -> list[float]:
    entries: list[dict[str, Any]] = [record["steps"][step] for record in records]
    return [entry[kind][measure] for entry in entries if entry[kind] is not None]


def _table(found: dict[str, list[Record]]) -> str:
    rows = []
    for system, records in found.items():
        for step, entry in enumerate(records[0]["steps"]):
            values = [_values(records, step, kind, measure) for kind in KINDS for measure in MEASURES]
            scores = [with_spread(each) if each else "–" for each in values]
            rows.append([system, f"{entry['added']:,}", *scores, f"{entry['new_queries']:,}"])
    columns = [f"{kind} {measure}" for kind in KINDS for measure in MEASURES]
    return table(["system", "added", *columns, "new queries"], rows)


def _panel(found: dict[str, list[Record]], collection: str, measure: str) -> Panel:
    entries = next(iter(found.values()))[0]["steps"]
    series = []
    for system, records in found.items():
        for kind in KINDS:
            values = [_values(records, step, kind, measure) for step in range(len(entries))]
            line = [float(np.mean(each)) if each else None for each in values]
            series.append(Series(f"{system}, {kind}", line, dashed=kind == "new"))
    return Panel(
        f"{collection}, {measure}", "documents added", measure, [f"{entry['added']:,}" for entry in entries], series
    )


if __name__ == "__main__":
    run_script(main)
