"""Shared parts of experiments: the command line, and running systems as `hce compare` does.

Results that take long are cached in the folder `--results`. A file's name has a hash of all that the result depends on,
including the version of hce (`hce_lab.comparison.bench.keep`). So the same command resumes a killed experiment, more
seeds run only the new ones, and experiments share runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from hce.data.corpus import Corpus
from hce.data.judgments import Qrels, find_queries, find_split, read_queries, splits, write_queries
from hce.errors import InputError
from hce.files import new_folder, open_atomically
from hce.training.recipe import parsed_settings
from hce_lab.comparison.bench import Bench, Finished
from hce_lab.comparison.table import Comparison, ComparisonTable, table
from hce_lab.comparison.task import Task

MODES = ("unsupervised", "supervised", "joint")
MEASURES = ["nDCG@10", "R@1", "R@10", "R@100", "MRR@10"]


def command_line(
    name: str, about: str, *, seeds: int, several: bool = False, trains: bool = True, parts: bool = False
) -> argparse.ArgumentParser:
    """Make a parser with the arguments of every experiment.

    Args:
        name: the name of the experiment.
        about: the help; the module's docstring.
        seeds: the default number of seeds.
        several: whether it takes several collections.
        trains: whether it trains, so that the recipe can be set.
        parts: whether it can use a part of a large collection, see `part_of`.
    """
    parser = argparse.ArgumentParser(name, description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if several:
        parser.add_argument("folders", nargs="+", type=Path, help="BEIR folders")
    else:
        parser.add_argument("folder", type=Path, help="a BEIR folder")
    parser.add_argument("--encoder", default="static", help="what to start from")
    parser.add_argument("--seeds", type=_positive, default=seeds, help="how many, from 0 on")
    if trains:
        parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the recipe")
    if parts:
        parser.add_argument("--documents", type=_positive, help="of larger collections, take so many, drawn at random")
    kept = Path("bench-output/experiments")
    parser.add_argument("--results", type=Path, default=kept, help="the folder where finished runs are kept")
    parser.add_argument("--output", type=_output, help="a folder for the page and its picture")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def _output(text: str) -> Path:
    if find_spec("kaleido") is None:  # plotly writes pictures with it; fail now, not after hours
        raise argparse.ArgumentTypeError("drawing pictures needs kaleido; pip install kaleido")
    return Path(text)


def names(text: str) -> list[str]:
    """Parse a list separated by commas."""
    return [item.strip() for item in text.split(",") if item.strip()]


def numbers(text: str) -> list[int]:
    """Parse integers separated by commas."""
    return [int(item) for item in names(text)]


def part_of(folder: Path, arguments: argparse.Namespace) -> Path:
    """Return a collection, or a random part of it with `--documents` documents.

    A part has the queries whose right documents are all in it. It is cached next to the results.
    """
    corpus, documents = Corpus.load(folder), arguments.documents
    if documents is None or documents >= len(corpus):
        return folder
    place: Path = arguments.results / "parts" / corpus.fingerprint[:12] / f"{folder.absolute().name}-{documents}"
    if place.is_dir():
        return place
    chosen = np.sort(np.random.default_rng(0).choice(len(corpus), documents, replace=False)).tolist()
    kept = [corpus[position] for position in chosen]
    ids, queries = {document.id for document in kept}, read_queries(find_queries(folder))
    with new_folder(place) as new:
        (new / "qrels").mkdir()
        with open_atomically(new / "corpus.jsonl") as file:
            file.writelines(document.to_json() + "\n" for document in kept)
        write_queries(new / "queries.jsonl", queries.values())
        for split in splits(folder):
            qrels = Qrels.read(find_split(folder, split))
            whole = {query_id for query_id in qrels if (right := qrels.positives(query_id)) and ids.issuperset(right)}
            judgments = [each for each in qrels.judgments() if each.query_id in whole and each.document_id in ids]
            if judgments:
                Qrels(judgments).write(new / "qrels" / f"{split}.tsv")
    return place


def bench_of(
    arguments: argparse.Namespace,
    folder: Path,
    measures: Sequence[str],
    tested: Sequence[str] | None = None,
    generated: Path | None = None,
) -> Bench:
    """Open a collection by the command line, to measure on its splits or on these."""
    return Bench.open(
        folder,
        arguments.results,
        tested or arguments.splits,
        encoder=arguments.encoder,
        measures=measures,
        generated=generated,
        settings=parsed_settings(arguments.set),
    )


def splits_of(folder: Path, wanted: Sequence[str]) -> list[str]:
    """Return the wanted splits that a collection has.

    Raises:
        InputError: it has none of them.
    """
    there = [split for split in wanted if split in splits(folder)]
    if not there:
        raise InputError(f"{folder}: none of the splits {', '.join(wanted)} is there")
    return there


def for_mode(task: Task, mode: str) -> Task:
    """Return the task of training in a mode; an unsupervised one has no dev labels either.

    Raises:
        InputError: the mode needs labels, and there are none.
    """
    if mode == "unsupervised":
        return replace(task.with_settings(mode="unsupervised"), pairs=None, dev=None)
    if task.pairs is None:
        raise InputError(f"mode {mode!r} needs labeled queries (qrels/train.tsv), and there are none")
    return task.with_settings(mode=mode)


def run_systems(bench: Bench, systems: Sequence[str], arguments: argparse.Namespace) -> dict[str, Comparison]:
    """Run systems with all seeds, report each, and return a comparison per split."""

    def on_result(finished: Finished) -> None:
        result = next(iter(finished.results.values()))
        tell(f"{bench.collection} {result.system} {result.seed}", finished.cached)

    return bench.compare(systems, arguments.seeds, on_result)


def tested(comparison: Comparison) -> ComparisonTable:
    """Test the systems of a comparison by its first measure alone."""
    return table(replace(comparison, measures=comparison.measures[:1]))


def tell(name: str, cached: bool) -> None:
    """Report that a run is finished."""
    print(f"{name}: {'kept from before' if cached else 'done'}", file=sys.stderr, flush=True)
