"""compare(): every system on one collection, with the same data, budget and seeds.

A `Bench` runs the systems one at a time and keeps their results. Each finished system is a file of its own and not run
again; a training run that was killed goes on from its last checkpoint. A file is named after everything that its
figures depend on, so that nothing stale is ever shown: other settings, other data or another version of this program
give it another name.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from hce._version import __version__
from hce.comparison.systems import SYSTEMS, WITHOUT_TREE, choose
from hce.comparison.table import Comparison, Result
from hce.comparison.task import Task
from hce.data.corpus import Corpus
from hce.data.judgments import Dataset, Labels, read_generated, splits
from hce.encoding.encoder import Encoder
from hce.errors import FormatError, InputError
from hce.evaluation.evaluate import Ranked, Searcher, evaluate
from hce.evaluation.measures import parse_measure
from hce.files import write_json
from hce.training.recipe import Recipe
from hce.training.train import split_labels


class Finished(NamedTuple):
    """A system's result, and whether it was there already."""

    result: Result
    cached: bool


class Bench:
    """Where systems are run one at a time, and their results kept.

    Args:
        folder: of the results.
        dataset: what is measured on.
        task: what every system is given.
        identity: what all results depend on.
        measures: names.
    """

    def __init__(
        self, folder: Path, dataset: Dataset, task: Task, identity: dict[str, Any], measures: tuple[str, ...]
    ) -> None:
        self.folder = folder / "results"
        self.dataset = dataset
        self.task = task
        self.identity = identity
        self.measures = measures
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{folder}: cannot be made a folder ({error.strerror}); choose another place") from error

    def result(self, name: str, seed: int, *, progress: bool) -> Finished:
        """The kept result of a system, or a new one."""
        identity = {**self.identity, "system": name, "seed": seed}
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
        path = self.folder / f"{name}-{seed}-{key}.json"
        if path.is_file():
            return Finished(_read(path), cached=True)
        work = path.with_suffix(".unfinished")
        result = self._run(name, seed, work, progress=progress)
        write_json(path, {"identity": identity, "result": asdict(result)})
        shutil.rmtree(work, ignore_errors=True)
        return Finished(result, cached=False)

    def _run(self, name: str, seed: int, work: Path, *, progress: bool) -> Result:
        work.mkdir(exist_ok=True)
        recipe = replace(self.task.recipe, seed=seed)
        built = SYSTEMS[name].build(replace(self.task, recipe=recipe, folder=work, progress=progress))
        timed = _Timed(built.searcher)
        report = evaluate(timed, self.dataset.queries, self.dataset.qrels, self.measures)
        return Result(
            system=name,
            seed=seed,
            per_query=report.per_query,
            training_seconds=round(built.training_seconds, 3),
            indexing_seconds=round(built.indexing_seconds, 3),
            search_ms=round(1000 * timed.seconds / max(1, timed.queries), 4),
            index_bytes=built.index_bytes,
            facts=dict(built.facts),
        )


class _Timed:
    """A searcher with a watch."""

    def __init__(self, searcher: Searcher) -> None:
        self.searcher = searcher
        self.seconds, self.queries = 0.0, 0

    def search(self, queries: Sequence[str], k: int) -> Sequence[Sequence[Ranked]]:
        start = time.perf_counter()
        found = self.searcher.search(queries, k)
        self.seconds += time.perf_counter() - start
        self.queries += len(queries)
        return found


def _read(path: Path) -> Result:
    try:
        return Result(**json.loads(path.read_text(encoding="utf-8"))["result"])
    except (ValueError, TypeError, KeyError) as error:
        raise FormatError(
            f"{path} is no result of a comparison ({error}); delete it to run that system again"
        ) from error


MEASURES = ("nDCG@10", "R@10", "R@100")


def compare(
    folder: str | Path,
    output: str | Path,
    systems: Sequence[str] = (),
    *,
    encoder: str = "static",
    split: str = "test",
    measures: Sequence[str] = MEASURES,
    seeds: int = 1,
    generated: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: bool = False,
    on_result: Callable[[Finished], None] = lambda finished: None,
) -> Comparison:
    """Compare systems on a BEIR folder.

    Where the folder has a train split, systems that learn from labels do; they choose by its dev split, or by a tenth
    of the train queries held out, the same for all. The split that is measured is used for nothing else.

    Args:
        folder: corpus.jsonl, queries.jsonl and qrels/.
        output: where finished results are kept; it may hold some already.
        systems: names, see `hce.comparison.systems`; none means those that this collection and encoder allow. Beside
            HCE, the same training without the tree is always among them.
        encoder: what every dense system starts from.
        split: what is measured.
        measures: names, see `hce.evaluation.measures.parse_measure`; the first one says which rival is the best.
        seeds: how many seeds to train with.
        generated: a file of generated queries.
        settings: fields of the recipe, the same for all; by default an epoch has as many pairs as there are documents.
        progress: show bars.
        on_result: called as each system is finished.

    Raises:
        InputError: an unknown system, measure or split, a system that lacks what it needs, or an unusable output.
    """
    if seeds < 1:
        raise InputError(f"seeds {seeds}: at least 1")
    for measure in measures:
        parse_measure(measure)
    dataset = Dataset.load(folder, split)
    fresh = Encoder.load(encoder)
    task = task_of(Path(folder), dataset, fresh, split, generated, settings or {})
    names = choose(list(systems), replace(task, progress=progress), static=fresh.is_static)
    bench = Bench(Path(output), dataset, task, _identity(dataset, task, fresh, measures), tuple(measures))
    results = []
    for name in names:
        for seed in range(seeds if SYSTEMS[name].seeded else 1):
            finished = bench.result(name, seed, progress=progress)
            results.append(finished.result)
            on_result(finished)
    return Comparison(
        about=_about(Path(folder), dataset, task, split, seeds),
        measures=tuple(measures),
        systems={name: SYSTEMS[name].about for name in names},
        ours=frozenset(name for name in names if SYSTEMS[name].ours),
        results=tuple(results),
        pairs=tuple((name, WITHOUT_TREE[name]) for name in names if name in WITHOUT_TREE),
    )


def task_of(
    folder: Path,
    dataset: Dataset,
    encoder: Encoder,
    split: str,
    generated: str | Path | None,
    settings: Mapping[str, Any],
) -> Task:
    """What every system is given that is to be measured on `dataset`, the split of that name of the folder."""
    recipe = _budget(len(dataset.corpus), settings, static=encoder.is_static)
    pairs = dev = None
    if split != "train" and "train" in splits(folder):
        pairs = _without(Labels(*Dataset.load(folder, "train")[1:]), dataset)
        if split != "dev" and "dev" in splits(folder):
            dev = _without(Labels(*Dataset.load(folder, "dev")[1:]), dataset)
            pairs = pairs.only(name for name in pairs.qrels if name not in dev.qrels)
        else:
            pairs, dev = split_labels(pairs, recipe)
    queries = None if generated is None else _generated(generated, dataset.corpus)
    return Task(dataset.corpus, encoder.name, recipe, pairs, dev, queries)


def _budget(documents: int, settings: Mapping[str, Any], *, static: bool) -> Recipe:
    """What every trained system may spend: as given, else an epoch as long as the corpus and no batch too big."""
    recipe = Recipe.for_encoder(static=static, documents=documents, **{"epoch_pairs": documents, **settings})
    if recipe.batch_size > documents:
        raise InputError(
            f"batch_size {recipe.batch_size} is larger than the corpus ({documents} documents); "
            f"give {max(2, documents // 4)} or so"
        )
    return recipe


def _generated(path: str | Path, corpus: Corpus) -> Labels:
    labels = Labels(*read_generated(path))
    unknown = {judgment.document_id for judgment in labels.qrels.judgments()}.difference(corpus.ids, corpus.left_out)
    if unknown:
        raise InputError(f"{path}: document {min(unknown)!r} is not in {corpus.name}; do the files match?")
    return labels


def _without(labels: Labels, dataset: Dataset) -> Labels:
    """The labels less the queries that are measured, wherever splits overlap."""
    return labels.only(name for name in labels.qrels if name not in dataset.qrels)


def _identity(dataset: Dataset, task: Task, encoder: Encoder, measures: Sequence[str]) -> dict[str, Any]:
    return {
        "hce": __version__,
        "corpus": dataset.corpus.fingerprint,
        "judgments": _digest(Labels(dataset.queries, dataset.qrels)),
        "pairs": _digest(task.pairs),
        "dev": _digest(task.dev),
        "generated": _digest(task.generated),
        "encoder": encoder.fingerprint,
        "recipe": task.recipe.as_dict(),
        "measures": list(measures),
    }


def _digest(labels: Labels | None) -> str | None:
    if labels is None:
        return None
    rows = [[labels.queries[judgment.query_id].text, *judgment] for judgment in labels.qrels.judgments()]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _about(folder: Path, dataset: Dataset, task: Task, split: str, seeds: int) -> dict[str, str]:
    recipe = task.recipe
    trained_on = "no labels" if task.pairs is None else f"{len(task.pairs.qrels):,} labelled queries"
    if task.generated is not None:
        trained_on += f", {len(task.generated.qrels):,} generated queries for systems named +qg"
    counts = f"{len(dataset.corpus):,} documents, {len(dataset.qrels):,} {split} queries"
    return {
        "collection": f"{folder.absolute().name}: {counts}",
        "training": trained_on,
        "encoder": task.encoder,
        "budget": f"{recipe.epochs} epochs of {recipe.epoch_pairs:,} pairs in batches of {recipe.batch_size}, "
        f"{seeds} {'seed' if seeds == 1 else 'seeds'}",
        "version": f"hce {__version__}",
    }
