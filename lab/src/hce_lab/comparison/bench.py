"""compare(): every system on one collection, with the same data, budget and seeds.

A `Bench` runs the systems one at a time and keeps their results. Each finished system is a file of its own and not run
again; a training run that was killed goes on from its last checkpoint. A file is named after everything that its
figures depend on, so that nothing stale is shown: other settings, other data or another version of this program give it
another name. What is changed in the program within a version gives it none.
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
FINGERPRINT = "fingerprint of the model"  # beside the splits in a file that is kept

T = TypeVar("T")


class Finished(NamedTuple):
    """A system's results, by the split that was measured, and whether they were there already."""

    results: dict[str, Result]
    cached: bool


@dataclass(frozen=True)
class Bench:
    """Where systems are run one at a time, and their results kept.

    Attributes:
        output: the folder of the results.
        collection: the name of what is measured on.
        tested: the queries that are measured, by split.
        task: what every system is given; none of its labels is measured.
        encoder: what `task.encoder` names.
        measures: see `open`.
        models: see `open`; None keeps none.
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

        Where the folder has a train split, systems that learn from labels do; they choose by its dev split, or by a
        tenth of the train queries held out, the same for all. The splits that are measured are used for nothing else.

        Args:
            folder: corpus.jsonl, queries.jsonl and qrels/.
            output: where finished results are kept; it may hold some already.
            tested: the splits that are measured.
            encoder: what every dense system starts from.
            measures: names, see `hce.evaluation.evaluate.parse_measure`; the first one says which rival is the best.
            generated: a file of generated queries.
            language_model: what writes for systems that have a language model write (seal): "smollm2" (bundled), a
                directory, or a hub id.
            settings: fields of the recipe, the same for all; by default those of `hce train`. Rivals train the encoder
                alone, and HCE what `hce train` trains: companions too, unless `train` says otherwise.
            models: a folder to keep the models of trained systems in, SYSTEM-SEED each; a system that was finished
                without is run again.
            reading: how the documents are read.
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
        """Run systems with several seeds, those that no seed changes once, and put them side by side for each split."""
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
        """Return the results of a system: those that are kept, or new ones."""
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
            # A model that is kept is written, with its tree, by a training of its own.
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
        """What the results of all systems depend on."""
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
        output: where finished results are kept; it may hold some already.
        systems: names, see `hce_lab.comparison.systems`; none means those that this collection and encoder allow.
            Beside HCE, the same training without the tree is always among them.
        split: what is measured.
        seeds: how many seeds to train with.
        on_result: called as each system is finished.
        options: what else `Bench.open` takes: the encoder, measures, settings and the like.

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
    """Return what is kept under a name, or run it and keep what it gives.

    Args:
        folder: of the files that are kept.
        name: what the file's name begins with.
        identity: everything that the result depends on, as JSON; the file's name ends in its digest.
        run: gives the result as JSON; it may keep its state in the folder that it is given until it is done.
        read: makes the result of the JSON.
        is_enough: tells of the JSON that was kept whether it will do; if not, it is run again.

    Returns:
        The result, and whether it was there already.

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
    """Make the result of what is kept in a file.

    Raises:
        FormatError: the file is damaged.
    """
    try:
        return read(json.loads(path.read_text(encoding="utf-8"))["result"])
    except (ValueError, TypeError, KeyError) as error:
        raise FormatError(f"{path} is no result of a comparison ({error}); delete it to run it again") from error


def _model_of(built: Built) -> Encoder | None:
    """Return the encoder that a system has trained; None where it has none, or was not trained."""
    searcher = built.searcher
    return searcher.encoder if isinstance(searcher, DenseSearcher | Index) and built.training_seconds else None


def _keep_model(model: Encoder, written: Path, place: Path) -> None:
    """Put a model into a new folder: as it was written, with its tree and all that is known of it, or the encoder."""
    if not written.is_dir():
        model.save(place)
        return
    with new_folder(place) as folder:
        shutil.copytree(written, folder, dirs_exist_ok=True)


def _is_kept(place: Path, fingerprint: str | None) -> bool:
    """Tell whether a folder holds the model of this fingerprint; None is a system without a model.

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
    """A searcher with a watch."""

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
    """Return the labels to train on and those to choose by, less the queries that are measured, if there are any."""
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
    """Say what trained systems may spend: rivals, and ours where that is not the same."""
    spent = []
    for recipe in (task.recipe, task.defaults or task.recipe):
        pairs = f"of {recipe.epoch_pairs:,} pairs" if recipe.epoch_pairs else "of as many pairs as documents"
        spent.append(f"{recipe.epochs} epochs {pairs} in batches of {recipe.batch_size}")
    return spent[0] if spent[0] == spent[1] else f"{spent[0]}; hce, whose table is trained: {spent[1]}"


def _contents(language_model: str) -> str | dict[str, int]:
    """Return what tells a language model from others: its name, or of a directory what is in it."""
    if language_model == BUNDLED or not Path(language_model).is_dir():
        return language_model
    return {name: file_checksum(Path(language_model) / name) for name in check_tree(language_model)}


def _generated(path: str | Path, corpus: Corpus) -> Labels:
    labels = read_generated(path)
    unknown = {judgment.document_id for judgment in labels.qrels.judgments()}.difference(corpus.ids, corpus.left_out)
    if unknown:
        raise InputError(f"{path}: document {min(unknown)!r} is not in {corpus.name}; do the files match?")
    return labels
