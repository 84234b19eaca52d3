"""Generative and dense retrievers compared: the other half of the paper's table, on any BEIR folders.

    python -m hce_lab generative data/scifact data/nfcorpus data/squad --documents 5000 --output docs/results
    python -m hce_lab generative data/squad --splits test,test_seen --rates .0003,.001,.003 --queries 500
    python -m hce_lab generative data/squad --one-seed nci,genret,seal --set epochs=20
    python -m hce_lab generative data/scifact --encoder google-t5/t5-base --generated scifact-queries.jsonl

All get the same labeled queries, pseudo-queries, budget and seeds. hce-paper is HCE-J with the paper's recipe; hce is
trained as by `hce train`. Systems that a collection does not allow are skipped. With `--rates`, each generative system
is trained at each learning rate, and the one with the best nDCG@10 on dev is shown.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from hce.data.judgments import Labels
from hce.errors import InputError
from hce.training.recipe import PAPER, parsed_settings
from hce_lab.comparison.bench import Bench
from hce_lab.comparison.generative import parameter_count
from hce_lab.comparison.systems import SYSTEMS
from hce_lab.comparison.table import Comparison, Result, Row, notes
from hce_lab.experiments.common import MEASURES, bench_of, command_line, names, part_of, splits_of, tell, tested
from hce_lab.experiments.page import Page, seeds_note, table

ABOUT = """
Generative retrievers write the id of a document instead of comparing vectors. Here they are trained on the same
labeled queries and pseudo-queries, for as many steps and from the same encoder as all others. Compare the best of them
with ct, contrastive training without a tree, and with hce.

What these figures cannot show: the published systems start from a T5 whose decoder has been pretrained, and train for
hundreds of thousands of steps on eight accelerators and more. Without such weights the decoder here is small, starts at
random, and gets the budget that is enough for a dense encoder. A low figure says that such a decoder does not learn a
collection by heart in that budget; it says nothing of the published systems, whose own figures are in the paper.
"""
GENERATIVE = names("dsi-atomic,dsi,nci,nci+qg,genret,genret+qg,incdsi,dsi++,seal")
NOT_TRAINED = "seal"
DENSE = names("bm25,untrained,ct,hce")
PAPER_NAME = "hce-paper"


class Compared(NamedTuple):
    """The results on a split of a collection.

    Attributes:
        heading: the collection, the split, and their sizes.
        comparison: the comparison of all systems.
        parameters: the number of the encoder's parameters.
        rates: by system, the mean dev measure of each learning rate; empty if none was chosen.
    """

    heading: str
    comparison: Comparison
    parameters: int
    rates: dict[str, dict[float, float]]


def main(argv: Sequence[str] | None = None) -> None:
    """Run missing systems, then show all results."""
    parser = command_line("generative", __doc__ or "", seeds=3, several=True, parts=True)
    parser.add_argument("--splits", type=names, default=["test"], help="each gets a table of its own")
    parser.add_argument("--systems", type=names, help=f"with commas between, {PAPER_NAME} too; default: all there are")
    parser.add_argument("--rates", type=_rates, default=[], help="learning rates to choose from on dev")
    parser.add_argument("--queries", type=int, help="of larger splits, measure so many queries, drawn at random")
    parser.add_argument("--one-seed", type=names, default=[], help="systems and collections with one seed only")
    parser.add_argument("--generated", type=Path, help="a file of generated queries")
    parser.add_argument("--measures", type=names, default=MEASURES, help="tested by the first")
    arguments = parser.parse_args(argv)
    tables, below = {}, [seeds_note(arguments)]
    shown: dict[str, str] = {}
    for folder in arguments.folders:
        found = _compared(part_of(folder, arguments), arguments)
        for heading, comparison, parameters, _ in found:
            by_first = tested(comparison)
            tables[heading] = _table(comparison, by_first.rows, parameters)
            below += [f"{heading.partition(':')[0]}: {note}" for note in notes(by_first)]
            shown |= comparison.systems
        below += _rate_notes(found[0])
    below += _exceptions(shown, arguments)
    below += [f"{system}: {about}" for system, about in shown.items()]
    Page("generative", "Generative retrievers", ABOUT, tables, below).show(parser, arguments)


def _rates(text: str) -> list[float]:
    return [float(item) for item in names(text)]


def _rate_notes(compared: Compared) -> list[str]:
    """Describe the dev measure of each learning rate."""
    collection = compared.heading.partition(",")[0]
    return [
        f"{collection}, {system}: nDCG@10 on dev by learning rate: "
        + ", ".join(f"{rate:g} {value:.3f}" for rate, value in by_rate.items())
        for system, by_rate in compared.rates.items()
    ]


def _exceptions(shown: Mapping[str, str], arguments: argparse.Namespace) -> list[str]:
    """List exceptions: one seed, systems not run, and systems that could not be run."""
    elsewhere = {*SYSTEMS, PAPER_NAME}.difference(shown)
    once = [name for name in arguments.one_seed if name not in elsewhere] if arguments.seeds > 1 else []
    absent = [name for name in [PAPER_NAME, *GENERATIVE] if name not in shown]
    found = ["Parameters of a dense system are those of the encoder that it starts from."]
    found += [f"One seed of {', '.join(once)}."] if once else []
    found += [f"Not run: {', '.join(absent)}."] if absent else []
    if arguments.generated is None:
        found.append("There are no generated queries here, which systems named +qg need.")
    return found


def _compared(folder: Path, arguments: argparse.Namespace) -> list[Compared]:
    """Run all systems on a collection, and compare them for each split."""
    bench = bench_of(
        arguments, folder, arguments.measures, splits_of(folder, arguments.splits), generated=arguments.generated
    )
    if arguments.queries:
        bench = replace(bench, tested={name: _drawn(each, arguments.queries) for name, each in bench.tested.items()})
    systems = _systems(bench, arguments.systems)
    found: list[dict[str, Result]] = []
    rates: dict[str, dict[float, float]] = {}
    for name in systems:
        if arguments.rates and name in GENERATIVE and name != NOT_TRAINED:
            results, rates[name] = _by_best_rate(bench, name, arguments)
        else:
            results = _all_seeds(bench, name, arguments)
        found += results
    abouts = {name: SYSTEMS[name].about if name in SYSTEMS else "hce by the paper's recipe (HCE-J)" for name in systems}
    parameters = parameter_count(bench.encoder.model)
    ours = frozenset(name for name in systems if name == PAPER_NAME or SYSTEMS[name].ours)
    return [
        Compared(
            f"{bench.collection}, {split}: {len(bench.task.corpus):,} documents, {len(labels.qrels):,} queries",
            Comparison({}, bench.measures, abouts, ours, tuple(each[split] for each in found)),
            parameters,
            rates,
        )
        for split, labels in bench.tested.items()
    ]


def _drawn(labels: Labels, count: int) -> Labels:
    """Return `count` of the queries, drawn at random, in their order."""
    ids = list(labels.qrels)
    chosen = np.random.default_rng(0).choice(len(ids), min(count, len(ids)), replace=False)
    return labels.only(ids[row] for row in sorted(chosen.tolist()))


def _by_best_rate(
    bench: Bench, name: str, arguments: argparse.Namespace
) -> tuple[list[dict[str, Result]], dict[float, float]]:
    """Run a system at each learning rate; return the best one's results, and all on dev.

    Raises:
        InputError: there are no labeled queries to choose by.
    """
    if bench.task.dev is None:
        raise InputError(f"{bench.collection}: no labeled queries to choose a learning rate by; leave out --rates")
    found = {}
    for rate in arguments.rates:
        found[rate] = _all_seeds(replace(bench, task=replace(bench.task, rate=rate)), name, arguments)
    on_dev = {rate: fmean(_any(each).facts["dev"] for each in results) for rate, results in found.items()}
    best = max(on_dev, key=lambda rate: on_dev[rate])
    for result in (result for each in found[best] for result in each.values()):
        result.facts["rate"] = best
    return found[best], on_dev


def _any(results: Mapping[str, Result]) -> Result:
    """Return one of a run's results, which differ only in the split."""
    return next(iter(results.values()))


def _all_seeds(bench: Bench, name: str, arguments: argparse.Namespace) -> list[dict[str, Result]]:
    """Run a system with each of its seeds."""
    once = {name, bench.collection}.intersection(arguments.one_seed) or not SYSTEMS.get(name, SYSTEMS["hce"]).seeded
    return [_results(bench, name, seed, arguments) for seed in range(1 if once else arguments.seeds)]


def _systems(bench: Bench, wanted: list[str] | None) -> list[str]:
    """Return the systems asked for, else all that this collection and encoder allow.

    Raises:
        InputError: an unknown system, or one that lacks what it needs.
    """
    is_static = bench.encoder.table is not None
    if wanted is None:
        there = [name for name in DENSE + GENERATIVE if name in SYSTEMS]
        able = [name for name in there if not SYSTEMS[name].lacks(bench.task, is_static=is_static)]
        return [*able, PAPER_NAME]
    for name in wanted:
        if name != PAPER_NAME and name not in SYSTEMS:
            raise InputError(f"unknown system {name!r}; there are {', '.join([*SYSTEMS, PAPER_NAME])}")
        if name != PAPER_NAME and (lack := SYSTEMS[name].lacks(bench.task, is_static=is_static)):
            raise InputError(f"system {name!r} needs {lack}")
    return wanted


def _results(bench: Bench, name: str, seed: int, arguments: argparse.Namespace) -> dict[str, Result]:
    """Return a system's results, cached or new; `--set` overrides the paper's recipe."""
    if name == PAPER_NAME:
        size = min(PAPER["batch_size"], max(2, len(bench.task.corpus) // 4))
        settings = {**PAPER, "batch_size": size, **parsed_settings(arguments.set)}
        bench = replace(bench, task=bench.task.with_settings(**settings))
    finished = bench.results("hce" if name == PAPER_NAME else name, seed)
    rate = "" if bench.task.rate is None else f" at {bench.task.rate:g}"
    tell(f"{bench.collection} {name} {seed}{rate}", finished.cached)
    return {split: replace(result, system=name) for split, result in finished.results.items()}


def _table(comparison: Comparison, rows: Sequence[Row], encoder: int) -> str:
    first, *others = comparison.measures
    with_rates = any("rate" in row.facts for row in rows)
    lines = []
    for row in rows:
        scores = [row.score(first), *(str(comparison.score(row.system, measure)) for measure in others)]
        weights = row.facts.get("parameters", None if row.system in ("bm25", "seal") else encoder)
        costs = [
            "–" if weights is None else f"{weights / 1e6:.1f} M",
            f"{row.training_seconds / 60:.1f} min" if row.training_seconds else "–",
            f"{row.search_ms:.1f} ms",
        ]
        rate = [f"{row.facts['rate']:g}" if "rate" in row.facts else "–"] if with_rates else []
        lines.append([row.name, *scores, *rate, *costs])
    columns = [*comparison.measures, *(["rate"] if with_rates else []), "parameters", "training", "search"]
    return table(["system", *columns], lines)
