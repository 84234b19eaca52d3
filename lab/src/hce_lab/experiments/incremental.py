"""New documents without training: train on a part, add the rest in steps, and search for old and new ones.

    python -m hce_lab incremental data/squad data/wordnet_examples --splits test,test_seen --output docs/results
    python -m hce_lab incremental data/squad --held-out 0.5 --systems hce,dpr,incdsi,dsi++,fitted,bm25

incdsi and dsi++ are atomic DSI with added documents: a row each by a small optimization, or continued training. Splits
that a collection lacks are skipped. Training uses neither held-out documents nor queries with a right document among
them. Such queries of train and dev splits are searched for too, since no system has learned from them.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from hce.commands.evaluate import InMode
from hce.data.corpus import Corpus
from hce.data.judgments import Labels, Qrels
from hce.data.text import Document
from hce.errors import InputError
from hce.evaluation.evaluate import DenseSearcher, Searcher, evaluate
from hce.index.index import Index
from hce_lab.comparison.bench import Bench, keep
from hce_lab.comparison.bm25 import BM25Searcher
from hce_lab.comparison.incremental import train_continual, train_incdsi
from hce_lab.comparison.systems import SYSTEMS
from hce_lab.comparison.table import Score
from hce_lab.comparison.task import Task
from hce_lab.experiments.common import bench_of, command_line, names, part_of, splits_of, tell
from hce_lab.experiments.page import Page, Panel, Series, seeds_note, table

ABOUT = """
A model is trained on a part of the documents and an index is made of them; the other documents are then added
bit by bit, which encodes them and changes nothing else. After each addition the queries of the old documents and those
of the new documents that are there by now are asked. Look for whether new documents are found as well as old ones,
whether old ones suffer, and what an addition costs. Old documents had training queries and new ones had none; how much
of a difference is one of the queries themselves can be seen from BM25 and from the encoder before training, which treat
all documents alike.

Where they are among the systems, incdsi gives each new document a row in atomic DSI and changes nothing else, and dsi++
trains on. Nobody has asked for the new documents yet: their own beginnings and spans stand for queries. BM25 counts all
words anew, which its time is of.
"""
MEASURES = ("R@1", "R@10")
KINDS = ("old", "new")
GROWING = {"incdsi": train_incdsi, "dsi++": train_continual}
ADDED_TO = {  # in `hce compare`, these hold out a tenth of the documents themselves
    "incdsi": "dsi-atomic of the old documents; each new one then gets a row by a small optimisation",
    "dsi++": "dsi-atomic of the old documents, trained on with new ones along with old ones; unlike DSI++, by plain "
    "gradients, and old ones by their own texts",
}

Step = dict[str, Any]
"""What was measured with some new documents added: `added`, `old`, `new`, `old_queries`, `new_queries`, and `ms`, the
milliseconds that each of the last ones took to add."""

Found = dict[str, list[list[Step]]]
"""System → seed → step."""


class Parts(NamedTuple):
    """A collection, split into old and new documents.

    Attributes:
        task: the input of training: the old documents, and labels of these alone.
        new: the documents to be added, in the order of addition.
        asked: queries whose right documents are all old, and those whose are all new.
    """

    task: Task
    new: list[Document]
    asked: dict[str, Labels]


def take_apart(bench: Bench, share: float, seed: int) -> Parts:
    """Hold out a random share of the documents, and divide the queries.

    Raises:
        InputError: the share leaves no new documents, or no queries for them.
    """
    task = bench.task
    order = np.random.default_rng([seed, 5]).permutation(len(task.corpus))
    count = round(share * len(order))
    new = [task.corpus[position] for position in order[:count].tolist()]
    old = [task.corpus[position] for position in np.sort(order[count:]).tolist()]
    new_ids, old_ids = {document.id for document in new}, {document.id for document in old}
    measured = list(bench.tested.values())
    dropped = [labels for labels in (task.pairs, task.dev) if labels is not None]
    asked = {"old": _of_documents(measured, old_ids), "new": _of_documents([*measured, *dropped], new_ids)}
    if not all(labels.qrels for labels in asked.values()):
        raise InputError(f"{bench.collection}: no queries of {count:,} new or {len(old):,} old documents to ask")
    corpus = Corpus.from_documents(old, name=f"{bench.collection}, old documents")
    pairs, dev = (labels and labels.among(old_ids) for labels in (task.pairs, task.dev))
    return Parts(replace(task, corpus=corpus, pairs=pairs, dev=dev), new, asked)


def _of_documents(several: Sequence[Labels], ids: set[str]) -> Labels:
    """Return the labels of queries whose right documents are all among `ids`."""
    found = Labels({}, Qrels([]))
    for labels in several:
        found = found.joined(answered_by(labels, ids))
    return found


def answered_by(labels: Labels, ids: set[str]) -> Labels:
    """Return the labels of queries with right documents, all among `ids`."""
    right = {query_id: set(labels.qrels.positives(query_id)) for query_id in labels.qrels}
    return labels.only(query_id for query_id, known in right.items() if known and known <= ids)


def steps(available: int) -> list[int]:
    """Return the number of added documents at each step: 0, 10, 100 … 10,000, or all."""
    powers = [10**power for power in range(1, 5) if 10**power <= available]
    return [0, *powers] if powers and powers[-1] == 10_000 else sorted({0, *powers, available})


# --------------------------------------------------------------------------------------------------------------- a run


def run(parts: Parts, system: str, engine: str, work: Path) -> list[Step]:
    """Build a system on the old documents, add the new ones step by step, and measure after each."""
    found: list[Step] = []
    for added, searcher, seconds in _grown(parts, system, engine, work):
        new = answered_by(parts.asked["new"], {document.id for document in parts.new[:added]})
        step: Step = {"added": added, "new_queries": len(new.qrels), "old_queries": len(parts.asked["old"].qrels)}
        for kind, labels in (("old", parts.asked["old"]), ("new", new)):
            step[kind] = evaluate(searcher, *labels, MEASURES, depth=10).means if labels.qrels else None
        step["ms"] = 1000 * seconds / (added - found[-1]["added"]) if found else None
        found.append(step)
    return found


def _grown(parts: Parts, system: str, engine: str, work: Path) -> Iterator[tuple[int, Searcher, float]]:
    """Yield the number of added documents, the system, and the seconds of the last step."""
    old, new = list(parts.task.corpus), parts.new
    task = replace(parts.task, folder=work)
    if system == "bm25":  # its statistics are of all documents; counting them again is cheap
        for added in steps(len(new)):
            start = time.perf_counter()
            documents = [*old, *new[:added]]
            searcher = BM25Searcher.index([each.id for each in documents], (each.full_text for each in documents))
            yield added, searcher, time.perf_counter() - start
    elif system in GROWING:
        growing = GROWING[system](task)[0]
        for added, seconds in _in_steps(growing.add, new):
            yield added, growing, seconds
    else:
        dense = SYSTEMS[system].build(task).searcher
        if not isinstance(dense, DenseSearcher):
            raise InputError(f"system {system!r} is no encoder: nothing can be added to it")
        shutil.rmtree(work / "index", ignore_errors=True)  # left by a killed run
        with Index.create(work / "index", parts.task.corpus, dense.encoder, engine=engine) as index:
            for added, seconds in _in_steps(index.add, new):
                yield added, InMode(index, "dense"), seconds  # by the encoder alone


def _in_steps(add: Callable[[Sequence[Document]], object], new: list[Document]) -> Iterator[tuple[int, float]]:
    """Add documents step by step; yield how many were added, and the step's seconds."""
    there = 0
    for added in steps(len(new)):
        start = time.perf_counter()
        add(new[there:added])
        yield added, time.perf_counter() - start
        there = added


# -------------------------------------------------------------------------------------------------------------- showing


def main(argv: Sequence[str] | None = None) -> None:
    """Run missing systems, then show all results."""
    parser = command_line("incremental", __doc__ or "", seeds=3, several=True, parts=True)
    parser.add_argument("--splits", type=names, default=["test"], help="whose queries are asked")
    parser.add_argument(
        "--systems", type=names, default=["hce", "fitted", "bm25"], help="encoders, incdsi, dsi++ or bm25"
    )
    parser.add_argument("--held-out", type=float, default=0.1, help="share of the documents that are added later")
    parser.add_argument("--engine", default="exact", help="what the index searches with")
    arguments = parser.parse_args(argv)
    _check(arguments)
    tables, panels, notes = {}, [], [f"{seeds_note(arguments)} Each seed holds out other documents."]
    for folder in arguments.folders:
        place = part_of(folder, arguments)
        bench = bench_of(arguments, place, MEASURES, splits_of(place, arguments.splits))
        found = run_all_systems(bench, arguments)
        last = found[arguments.systems[0]][0][-1]
        tables[f"{bench.collection}: {len(bench.task.corpus):,} documents"] = _table(found)
        panels += _panels(found, bench.collection)
        notes.append(
            f"{bench.collection}: {last['added']:,} documents are added in all; {last['old_queries']:,} queries of old "
            f"documents, {last['new_queries']:,} of new ones (seed 0). Queries with right documents on both sides are "
            "left out."
        )
    abouts = {name: system.about for name, system in SYSTEMS.items()} | ADDED_TO
    notes += [f"{system}: {abouts[system]}" for system in arguments.systems]
    Page("incremental", "Adding documents without training", ABOUT, tables, notes, panels).show(parser, arguments)


def _check(arguments: argparse.Namespace) -> None:
    for system in arguments.systems:
        if system not in SYSTEMS:
            raise InputError(f"unknown system {system!r}; there are {', '.join(SYSTEMS)}")
    if not 0 < arguments.held_out < 1:
        raise InputError(f"--held-out {arguments.held_out}: give a share between 0 and 1")


def run_all_systems(bench: Bench, arguments: argparse.Namespace) -> Found:
    """Return the results of each system and seed, cached or new."""
    found: Found = {system: [] for system in arguments.systems}
    for seed in range(arguments.seeds):
        task = bench.task.with_settings(seed=seed)
        parts = take_apart(replace(bench, task=task), arguments.held_out, seed)
        given = replace(bench, task=parts.task, tested=parts.asked).identity
        added = Corpus.from_documents(parts.new).fingerprint
        for system in arguments.systems:
            identity = {**given, "added": added, "system": system, "engine": arguments.engine}
            make = partial(run, parts, system, arguments.engine)
            measured, cached = keep(arguments.results / "incremental", f"{system}-{seed}", identity, make, list)
            tell(f"{bench.collection} {system} {seed}", cached)
            found[system].append(measured)
    return found


def _score(runs: Sequence[Sequence[Step]], step: int, kind: str, measure: str) -> Score | None:
    """Return the mean over seeds; None if there were no queries."""
    values = [steps[step][kind][measure] for steps in runs if steps[step][kind] is not None]
    return Score.of(values) if values else None


def _table(found: Found) -> str:
    rows = []
    for system, runs in found.items():
        times = _times(runs)
        for number, step in enumerate(runs[0]):
            scores = [_score(runs, number, kind, measure) for kind in KINDS for measure in MEASURES]
            cells = ["–" if score is None else str(score) for score in scores]
            cells.append("–" if times[number] is None else f"{times[number]:,.1f} ms")
            rows.append([system, f"{step['added']:,}", *cells, f"{step['new_queries']:,}"])
    columns = [f"{kind} {measure}" for kind in KINDS for measure in MEASURES]
    return table(["system", "added", *columns, "an addition", "new queries"], rows)


def _panels(found: Found, collection: str) -> list[Panel]:
    """Draw each measure on old and on new documents, and the time of an addition."""
    added = [f"{step['added']:,}" for step in next(iter(found.values()))[0]]
    panels = []
    for kind in KINDS:
        for measure in MEASURES:
            scores = {
                system: [_score(runs, number, kind, measure) for number in range(len(added))]
                for system, runs in found.items()
            }
            lines = [Series(system, [score and score.mean for score in several]) for system, several in scores.items()]
            panels.append(Panel(f"{collection}, {kind} documents", "documents added", measure, added, lines))
    times = [Series(system, _times(runs)) for system, runs in found.items()]
    return [*panels, Panel(f"{collection}, time", "documents added", "ms an addition", added, times, log=True)]


def _times(runs: Sequence[Sequence[Step]]) -> list[float | None]:
    """Return the mean milliseconds per added document at each step; None if none."""
    return [
        fmean(each["ms"] for each in several) if several[0]["ms"] is not None else None
        for several in zip(*runs, strict=True)
    ]
