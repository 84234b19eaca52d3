"""compare(): every system on one collection, with the same data, budget and seeds.

A `Bench` runs the systems one at a time and caches their results. Each finished system has a result file and is not run
again; a killed training run resumes from its last checkpoint. The file's name has a hash of settings, data and the
version of hce, so no stale result is shown. A code change within a version keeps the name: then delete the file.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hce._version import __version__
from hce.data.corpus import Corpus
from hce.data.judgments import Dataset, Labels, read_generated, splits
from hce.data.records import USUAL, Reading
from hce.encoding.encoder import Encoder
from hce.errors import FormatError, InputError
from hce.evaluation.evaluate import DenseSearcher, Searcher, evaluate, parse_measure
from hce.files import check_tree, delete_whole, file_checksum, new_folder, require_new, unfinished, write_json
from hce.index.index import Index
from hce.training.pairs import split_labels
from hce.training.recipe import Recipe
from hce_lab.comparison.systems import SYSTEMS, WITHOUT_TREE, choose
from hce_lab.comparison.table import Comparison, Result
from hce_lab.comparison.task import MODEL, Built, Task
from hce_lab.generation.generator import BUNDLED

MEASURES = ("nDCG@10", "R@10", "R@100")
FINGERPRINT = "fingerprint of the model"  # a key of a result file, next to the splits

T = TypeVar("T")


class Finished(NamedTuple):
    """A system's results by split, and whether they were cached."""

    results: dict[str, Result]
    cached: bool


@dataclass(frozen=True)
class Bench:
    """Runs systems on one collection, one at a time, and caches their results.

    Attributes:
        output: the folder of the results.
        collection: the name of the collection.
        tested: the judged test queries, by split.
        task: the input of every system; none of its labels is a test label.
        encoder: the encoder that `task.encoder` names.
        measures: see `open`.
        models: see `open`; None saves no models.
    """

    output: Path
    collection: str
    tested: Mapping[str, Labels]
    task: Task
    encoder: Encoder
    measures: tuple[str, ...]
    models: Path | None = None

    @classmethod
    def open(
        cls,
        folder: str | Path,
        output: str | Path,
        tested: Sequence[str],
        *,
        encoder: str = "static",
        measures: Sequence[str] = MEASURES,
        generated: str | Path | None = None,
        language_model: str = BUNDLED,
        settings: Mapping[str, Any] | None = None,
        models: str | Path | None = None,
        reading: Reading = USUAL,
        progress: bool = False,
    ) -> Bench:
        """Read a BEIR folder.

        Systems that learn from labels use the train split, if there is one. They select weights and settings on the dev
        split, or on the same tenth of the train queries. The tested splits are used for nothing else.

        Args:
            folder: corpus.jsonl, queries.jsonl and qrels/.
            output: the folder of results; it may hold some already.
            tested: the splits to measure on.
            encoder: the encoder that every dense system starts from.
            measures: names, see `hce.evaluation.evaluate.parse_measure`; the first one determines the best rival.
            generated: a file of generated queries.
            language_model: the model of systems that generate text (seal): "smollm2" (bundled), a directory, or a hub
                id.
            settings: fields of the recipe for all systems; by default those of `hce train`. Rivals train only the
                encoder; HCE also trains companions, unless `train` says otherwise.
            models: a folder for trained models, named SYSTEM-SEED; a finished system whose model is not there is run
                again.
            reading: how to read the documents.
            progress: show bars.

        Raises:
            InputError: an unknown measure or split, or files that cannot be used.
        """
        for measure in measures:
            parse_measure(measure)
        if not tested:
            raise InputError("no split to measure on; give one, such as test")
        datasets = {split: Dataset.load(folder, split, reading) for split in tested}
        corpus = next(iter(datasets.values())).corpus
        fresh = Encoder.load(encoder)
        is_table = fresh.parts[0].is_table  # companions are not trained
        recipe_for = partial(Recipe.for_encoder, static=is_table, documents=len(corpus))
        defaults = recipe_for(**(settings or {}))
        recipe = recipe_for(**{"train": "encoder", **(settings or {})})
        for each in (recipe, defaults):
            each.require_documents(len(corpus))
        labels = {split: dataset.labels for split, dataset in datasets.items()}
        pairs, dev = _training_labels(folder, labels, recipe, reading)
        queries = None if generated is None else _generated(generated, corpus)
        task = Task(
            *(corpus, fresh.name, recipe, pairs, dev, queries),
            progress=progress,
            language_model=language_model,
            defaults=defaults,
        )
        name, kept = Path(folder).absolute().name, None if models is None else Path(models)
        return cls(Path(output), name, labels, task, fresh, tuple(measures), kept)

    def compare(
        self, names: Sequence[str], seeds: int, on_result: Callable[[Finished], None] = lambda finished: None
    ) -> dict[str, Comparison]:
        """Run systems with several seeds, unseeded ones once; compare them per split."""
        found: list[Finished] = []
        for name in names:
            for seed in range(seeds if SYSTEMS[name].seeded else 1):
                found.append(self.results(name, seed))
                on_result(found[-1])
        return {
            split: Comparison(
                about=self._about(split, seeds),
                measures=self.measures,
                systems={name: SYSTEMS[name].about for name in names},
                ours=frozenset(name for name in names if SYSTEMS[name].ours),
                results=tuple(finished.results[split] for finished in found),
                pairs=tuple((name, WITHOUT_TREE[name]) for name in names if WITHOUT_TREE.get(name) in names),
            )
            for split in self.tested
        }

    def results(self, name: str, seed: int) -> Finished:
        """Return the results of a system, cached or new."""
        system, task = SYSTEMS[name], self.task.with_settings(seed=seed)
        generated = task.generated if system.needs == "generated" else None
        task = replace(task, generated=generated)
        place = self.models and self.models / f"{name}-{seed}"
        identity = {**self.identity, "generated": generated and generated.digest, "system": name, "seed": seed}
        if task.rate is not None:
            identity["rate"] = task.rate
        if system.written:
            identity["language_model"] = _contents(task.language_model)

        def run(work: Path) -> dict[str, Any]:
            if place is not None:
                require_new(place)
            # To save a model with its tree, train it here instead of sharing a training.
            built = system.build(replace(task, folder=work, built=task.built if place is None else {}))
            measured = {split: asdict(self._measure(built, split, name, seed)) for split in self.tested}
            model = _model_of(built)
            if place is not None and model is not None:
                _keep_model(model, work / MODEL, place)
            return {**measured, FINGERPRINT: model and model.fingerprint}

        def read(kept: Mapping[str, Any]) -> dict[str, Result]:
            return {split: Result(**kept[split]) for split in self.tested}

        def is_enough(kept: Mapping[str, Any]) -> bool:
            return place is None or _is_kept(place, kept.get(FINGERPRINT, ""))

        return Finished(*keep(self.output / "results", f"{name}-{seed}", identity, run, read, is_enough))

    def _measure(self, built: Built, split: str, name: str, seed: int) -> Result:
        timed = _Timed(built.searcher)
        report = evaluate(timed, *self.tested[split], self.measures)
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

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The part of a result's identity that all systems share."""
        task = self.task
        return {
            "hce": __version__,
            "corpus": task.corpus.fingerprint,
            "judgments": {split: labels.digest for split, labels in self.tested.items()},
            "pairs": task.pairs and task.pairs.digest,
            "dev": task.dev and task.dev.digest,
            "encoder": self.encoder.fingerprint,
            "recipe": task.recipe.as_dict(),
            "defaults": task.defaults and task.defaults.as_dict(),
            "measures": list(self.measures),
        }

    def _about(self, split: str, seeds: int) -> dict[str, str]:
        task = self.task
        trained_on = "no labels" if task.pairs is None else f"{len(task.pairs.qrels):,} labeled queries"
        if task.generated is not None:
            trained_on += f", {len(task.generated.qrels):,} generated queries for systems named +qg"
        counts = f"{len(task.corpus):,} documents, {len(self.tested[split].qrels):,} {split} queries"
        return {
            "collection": f"{self.collection}: {counts}",
            "training": trained_on,
            "encoder": task.encoder,
            "budget": f"{_budget(task)}, {seeds} {'seed' if seeds == 1 else 'seeds'}",
            "version": f"hce {__version__}",
        }


def compare(
    folder: str | Path,
    output: str | Path,
    systems: Sequence[str] = (),
    *,
    split: str = "test",
    seeds: int = 1,
    on_result: Callable[[Finished], None] = lambda finished: None,
    **options: Any,
) -> Comparison:
    """Compare systems on a BEIR folder.

    Args:
        folder: corpus.jsonl, queries.jsonl and qrels/.
        output: the folder of results; it may hold some already.
        systems: names, see `hce_lab.comparison.systems`; if empty, the default ones that this collection and encoder
            allow. With HCE, the same training without the tree is always included.
        split: the split to measure on.
        seeds: how many seeds to train with.
        on_result: called after each system.
        options: further arguments of `Bench.open`: encoder, measures, settings.

    Raises:
        InputError: an unknown system, measure or split, a system that lacks what it needs, or an unusable output.
    """
    if seeds < 1:
        raise InputError(f"seeds {seeds}: at least 1")
    bench = Bench.open(folder, output, [split], **options)
    names = choose(list(systems), bench.task, is_static=bench.encoder.table is not None)
    return bench.compare(names, seeds, on_result)[split]


def keep(
    folder: Path,
    name: str,
    identity: Mapping[str, Any],
    run: Callable[[Path], Any],
    read: Callable[[Any], T],
    is_enough: Callable[[Any], bool] = lambda kept: True,
) -> tuple[T, bool]:
    """Return a cached result, or compute and cache it.

    Args:
        folder: the folder of the cached files.
        name: the first part of the file's name.
        identity: everything that the result depends on, as JSON; the file's name ends in its digest.
        run: computes the result as JSON; it may keep state in the folder passed to it, which is deleted afterwards.
        read: converts the JSON to the result.
        is_enough: whether the cached JSON can be used; if not, `run` is called again.

    Returns:
        The result, and whether it was cached.

    Raises:
        InputError: the folder cannot be made.
        FormatError: the file is damaged.
    """
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    path = folder / f"{name}-{key}.json"
    cached = path.is_file() and is_enough(_kept(path, lambda kept: kept))
    if not cached:
        work = unfinished(path)
        try:
            work.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{folder}: cannot be made a folder ({error.strerror}); choose another place") from error
        write_json(path, {"identity": identity, "result": run(work)})
        delete_whole(work)
    return _kept(path, read), cached


def _kept(path: Path, read: Callable[[Any], T]) -> T:
    """Read the result in a cached file.

    Raises:
        FormatError: the file is damaged.
    """
    try:
        return read(json.loads(path.read_text(encoding="utf-8"))["result"])
    except (ValueError, TypeError, KeyError) as error:
        raise FormatError(f"{path} is no result of a comparison ({error}); delete it to run it again") from error


def _model_of(built: Built) -> Encoder | None:
    """Return the encoder that a system trained; None if it trained none."""
    searcher = built.searcher
    return searcher.encoder if isinstance(searcher, DenseSearcher | Index) and built.training_seconds else None


def _keep_model(model: Encoder, written: Path, place: Path) -> None:
    """Copy a model that training wrote, with its tree, or save the encoder alone."""
    if not written.is_dir():
        model.save(place)
        return
    with new_folder(place) as folder:
        shutil.copytree(written, folder, dirs_exist_ok=True)


def _is_kept(place: Path, fingerprint: str | None) -> bool:
    """Return whether a folder holds the model with this fingerprint; None is no model.

    Raises:
        InputError: it holds another one.
    """
    if fingerprint is None:
        return True
    if not place.is_dir():
        return False
    if Encoder.load(place).fingerprint != fingerprint:
        raise InputError(f"{place} holds another model; choose another folder for models, or remove it")
    return True


class _Timed:
    """A searcher that measures its time."""

    def __init__(self, searcher: Searcher) -> None:
        self.searcher = searcher
        self.seconds, self.queries = 0.0, 0

    def search(self, queries: Sequence[str], k: int) -> Sequence[Sequence[Any]]:
        start = time.perf_counter()
        found = self.searcher.search(queries, k)
        self.seconds += time.perf_counter() - start
        self.queries += len(queries)
        return found


def _training_labels(
    folder: str | Path, tested: Mapping[str, Labels], recipe: Recipe, reading: Reading
) -> tuple[Labels | None, Labels | None]:
    """Return train and dev labels without tested queries; None if there are none."""
    measured = {query_id for labels in tested.values() for query_id in labels.qrels}
    there = {"train", "dev"}.intersection(splits(folder)).difference(tested)
    if "train" not in there:
        return None, None
    pairs = Dataset.load(folder, "train", reading).labels.without(measured)
    if "dev" not in there:
        return split_labels(pairs, recipe)
    dev = Dataset.load(folder, "dev", reading).labels.without(measured)
    return pairs.without(dev.qrels), dev


def _budget(task: Task) -> str:
    """Describe the training budget of rivals, and of HCE if it differs."""
    spent = []
    for recipe in (task.recipe, task.defaults or task.recipe):
        pairs = f"of {recipe.epoch_pairs:,} pairs" if recipe.epoch_pairs else "of as many pairs as documents"
        spent.append(f"{recipe.epochs} epochs {pairs} in batches of {recipe.batch_size}")
    return spent[0] if spent[0] == spent[1] else f"{spent[0]}; hce, whose table is trained: {spent[1]}"


def _contents(language_model: str) -> str | dict[str, int]:
    """Return a language model's identity: its name, or a directory's checksums."""
    if language_model == BUNDLED or not Path(language_model).is_dir():
        return language_model
    return {name: file_checksum(Path(language_model) / name) for name in check_tree(language_model)}


def _generated(path: str | Path, corpus: Corpus) -> Labels:
    labels = read_generated(path)
    unknown = {judgment.document_id for judgment in labels.qrels.judgments()}.difference(corpus.ids, corpus.left_out)
    if unknown:
        raise InputError(f"{path}: document {min(unknown)!r} is not in {corpus.name}; do the files match?")
    return labels
