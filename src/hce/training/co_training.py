"""The paper's Alg. 3: encode, cluster, measure; then epochs of optimize, measure, re-cluster if better.

The paper returns the last weights. Here held-out queries choose a mix of the first weights F0 and the trained ones F′,
F0·(1 − λ) + F′·λ. If no mix beats F0, F0 is returned, so that training does little harm.

Held-out labeled queries are often few, and chance decides which epoch and which λ look best on them. So the last
epoch's weights are kept with λ = 1, unless these queries clearly prefer another mix (docs/LOG.md). Pseudo-queries
are many, so the epoch and λ that score best on them are chosen. But people ask other questions, so a gain may deceive.
For a table any gain counts, because training a table has almost always helped. Training without labels often harms a
transformer, so a transformer's gain must be clear.

The paper leaves two things open. The dev metric here is NDCG@10 (`hce.training.pairs`). Training stops after `epochs`
epochs, or after `patience` epochs without improvement.

A resumed run ends exactly like an uninterrupted one. Each checkpoint is a new folder, with tensors as safetensors and
the rest as JSON. Then the file `LAST` is replaced atomically, to name this folder. So whenever the process dies, `LAST`
names a complete checkpoint.
"""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hce.data.corpus import Corpus
from hce.encoding.corpus_vectors import encode_corpus
from hce.encoding.encoder import Encoder
from hce.errors import FormatError, InputError, one_line, system_reason
from hce.files import (
    check_tree,
    checked_fields,
    make_folder,
    new_folder,
    open_atomically,
    other_identity,
    read_json,
    write_json,
)
from hce.processes import is_first_process, of_the_first, working_together
from hce.progress import progress_bar
from hce.search.fusion import Calibration
from hce.training.model_folder import MAY_BE_NAN, DevQuery, Epoch, best_epoch
from hce.training.pairs import DevSet, Sources, mean_ndcg, means
from hce.training.recipe import Recipe
from hce.training.steps import Counters, Trainer
from hce.tree.hierarchy import Hierarchy, Level, branching_for_depth, power_of_two

logger = logging.getLogger(__name__)

Restored = TypeVar("Restored")

SECONDS_BETWEEN_CHECKPOINTS = 900.0
COUNTER_NAMES = {"steps_in_epoch": "batch", "steps_in_all": "step"}  # in checkpoints
MIXES = (0.25, 0.5, 0.75, 1.0)
CLEAR = 2.0  # standard errors


@dataclass(frozen=True)
class TrainResult:
    """The result of training.

    Attributes:
        encoder: the encoder to use.
        hierarchy: the tree of the corpus, or of the sample learned from, grown from this encoder's vectors.
        history: an entry for each epoch; the first measures the encoder before training.
        mix: λ, the share of the trained weights in the encoder; 0 means that training did not help.
        recipe: the settings used.
        sources: where the pairs came from, and which documents were held out.
        devset: the held-out queries.
        ndcg_before: NDCG@10 of each held-out query, by kind, with the encoder as given.
        ndcg_after: the same with the encoder returned. To avoid leakage, this was measured with a word table fitted
            without the held-out documents.
        calibration: how much words, tokens and companions count in a search, and which questions decided this.
        stages: dev measures after each stage that changed the encoder: fine-tuning, fitting, training, labels (the map
            of queries), companions.
        vectors: the documents' vectors by the encoder, of shape (N, n); `hce.train` drops them.
    """

    encoder: Encoder
    hierarchy: Hierarchy
    history: list[Epoch]
    mix: float
    recipe: Recipe
    sources: Sources = field(repr=False)
    devset: DevSet = field(repr=False)
    ndcg_before: dict[str, np.ndarray] = field(repr=False)
    ndcg_after: dict[str, np.ndarray] = field(repr=False)
    calibration: Calibration | None = None
    stages: dict[str, dict[str, float]] = field(default_factory=dict)
    vectors: np.ndarray | None = field(default=None, repr=False)

    @property
    def before(self) -> dict[str, float]:
        """The dev measures of the encoder as given."""
        return means(self.ndcg_before)

    @property
    def after(self) -> dict[str, float]:
        """The dev measures of the encoder returned."""
        return means(self.ndcg_after)

    @property
    def metric(self) -> str:
        """The name of the dev measure; `Epoch.metric` is its value."""
        return self.devset.metric_name

    @property
    def held_out(self) -> np.ndarray:
        """The positions of the documents kept for measuring and not trained on."""
        return self.sources.held_out

    def dev_queries(self) -> list[DevQuery]:
        """List the held-out queries with their NDCG@10, for a report of what changed."""
        return [
            DevQuery(queries.kind, text, round(float(old), 4), round(float(new), 4))
            for queries in self.devset.panel
            for text, old, new in zip(
                *(queries.texts, self.ndcg_before[queries.kind], self.ndcg_after[queries.kind]), strict=True
            )
        ]


def co_train(
    corpus: Corpus,
    encoder: Encoder,  # F0; its weights are changed in place
    sources: Sources,
    devset: DevSet,  # decides when to re-cluster and which weights to keep
    recipe: Recipe,
    *,
    ndcg_before: dict[str, np.ndarray],  # of each held-out query, by kind, with the encoder as given
    checkpoints: CheckpointFolder | None = None,  # an unfinished run found there is continued
    progress: bool = False,
    on_epoch: Callable[[Epoch], None] = lambda epoch: None,
) -> TrainResult:
    """Run Alg. 3 on prepared pairs and dev queries; `hce.train` prepares them."""
    start_weights = weights_of(encoder)
    trainer = Trainer(corpus, encoder, sources, recipe)
    run = unfinished_run(trainer, checkpoints)
    if run is None:
        began = time.perf_counter()
        vectors, tree = _encode_and_cluster(trainer, checkpoints, 0)
        trainer.use_tree(tree, vectors)
        is_known = encoder.table is None and not recipe.needs_vectors  # a transformer starts as given
        ndcg = ndcg_before if is_known else _measure(devset, encoder, vectors if recipe.needs_vectors else None)
        epoch = Epoch(0, _means(ndcg, encoder), seconds=round(time.perf_counter() - began, 3))
        best_weights = weights_of(encoder)
        run = TrainingRun(trainer, tree, vectors, best_weights, epoch.metric, [epoch], checkpoints=checkpoints)
        run.save()
        on_epoch(epoch)
    is_broken = False
    while run.counters.epoch < recipe.epochs and run.history[-1].epoch - best_epoch(run.history) < recipe.patience:
        began = time.perf_counter()
        is_broken = not _optimize(run, progress)
        if is_broken:
            break
        losses, accuracy = run.counters.close_epoch()
        run.measured = _measure(devset, encoder)
        epoch = Epoch(run.counters.epoch, _means(run.measured, encoder), losses, accuracy)
        if epoch.metric > run.best_metric:  # a better representation was found
            run.best_weights, run.best_metric = weights_of(encoder), epoch.metric
            if recipe.cotrain and recipe.needs_vectors and run.counters.epoch < recipe.epochs:
                before = run.tree
                run.vectors, run.tree = _encode_and_cluster(trainer, checkpoints, epoch.epoch)
                trainer.use_tree(run.tree, run.vectors)
                epoch = replace(epoch, reclustered=True, churn=round(before.churn(run.tree), 4))
        run.history.append(replace(epoch, seconds=round(time.perf_counter() - began, 3)))
        run.save()
        on_epoch(run.history[-1])
    return _finish(run, start_weights, sources, devset, ndcg_before, is_broken=is_broken)


def cluster_corpus(vectors: np.ndarray, recipe: Recipe, encoder: Encoder, clustering_number: int) -> Hierarchy:
    """Grow the tree of these vectors; with `tree=false`, a root and documents only.

    `clustering_number` is added to the seed: 0 at the start, e after epoch e, epochs + 1 for the weights to return.
    """
    if not recipe.tree:
        return Hierarchy((), np.zeros(len(vectors), dtype=np.int64), (), {"method": "none"})
    with working_together():
        return Hierarchy.build(
            vectors,
            power_of_two(branching_for_depth(len(vectors), 3)) if recipe.branching < 0 else recipe.branching or "auto",
            seed=recipe.seed + clustering_number,
            mode="exact" if recipe.clustering == "uniform" else recipe.clustering,
            init="random" if recipe.clustering == "uniform" else "points",
            device=encoder.device,
            progress=None,
        )


def _optimize(run: TrainingRun, progress: bool) -> bool:
    """Take the rest of an epoch's steps; return False at a NaN or infinite loss."""
    saved = time.monotonic()
    trainer, counters = run.trainer, run.counters
    title, pair_count = f"epoch {counters.epoch + 1}/{trainer.recipe.epochs}", trainer.pairs_per_epoch
    with progress_bar(title, pair_count, "pairs", show=progress) as advance:
        advance(min(pair_count, counters.steps_in_epoch * trainer.recipe.batch_size))
        for losses, count in trainer.steps(counters):
            if not np.isfinite(losses["total"]):
                logger.warning(
                    "the loss is %s at step %d (epoch %d): training stops and keeps the best encoder so far; "
                    "try a lower learning_rate",
                    *(losses["total"], counters.steps_in_all + 1, counters.epoch + 1),
                )
                return False
            advance(count)
            if time.monotonic() - saved > SECONDS_BETWEEN_CHECKPOINTS:
                run.save()
                saved = time.monotonic()
    return True


def _finish(
    run: TrainingRun,
    start_weights: dict[str, Tensor],
    sources: Sources,
    devset: DevSet,
    ndcg_before: dict[str, np.ndarray],
    *,
    is_broken: bool,
) -> TrainResult:
    """Choose the weights to return (never NaN), grow their tree and measure them."""
    encoder, recipe, history = run.trainer.encoder, run.trainer.recipe, run.history
    if is_broken:  # the best epoch then counts as the last one
        encoder.model.load_state_dict(run.best_weights)
        history = history[: best_epoch(history) + 1]
    mix = load_kept(encoder, start_weights, run.best_weights, history, devset, recipe)
    pure_epoch = {0.0: 0, 1.0: mix.epoch}.get(mix.share)  # the epoch whose weights were kept; None for a true mix
    vectors = run.vectors if recipe.needs_vectors and run.tree_epoch == pure_epoch else None
    tree = run.tree
    if recipe.tree and vectors is None:  # the current tree was grown from other weights
        vectors, tree = _encode_and_cluster(run.trainer, run.checkpoints, recipe.epochs + 1)
    is_measured = not is_broken and pure_epoch == history[-1].epoch
    ndcg_after = run.measured if is_measured and run.measured else devset.ndcg(encoder, vectors)
    return TrainResult(
        *(encoder, tree, run.history, mix.share, recipe, sources, devset, ndcg_before, ndcg_after), vectors=vectors
    )


def _encode_and_cluster(
    trainer: Trainer, checkpoints: CheckpointFolder | None, clustering_number: int
) -> tuple[np.ndarray, Hierarchy]:
    """Return the vectors and the tree of the corpus by the encoder's current weights.

    Vectors that a killed run left are replaced if they come from other weights. Resuming with another number of
    processes gives other weights: gradients are summed in another order, so the last digits differ.
    """
    place = None if checkpoints is None else checkpoints.vectors_folder(clustering_number)
    if trainer.recipe.needs_vectors:
        vectors = encode_corpus(trainer.encoder, trainer.corpus, place, replace=True, progress=None)
    else:
        vectors = np.empty((len(trainer.corpus), 0), dtype=np.float32)
    return vectors, cluster_corpus(vectors, trainer.recipe, trainer.encoder, clustering_number)


def _measure(devset: DevSet, encoder: Encoder, vectors: np.ndarray | None = None) -> dict[str, np.ndarray]:
    return devset.ndcg(encoder, vectors)


def _means(ndcg: dict[str, np.ndarray], encoder: Encoder) -> dict[str, float]:
    return of_the_first(means(ndcg), encoder.device)


# ----------------------------------------------------------------------------------------- which weights to keep


class Mix(NamedTuple):
    """A mix of weights, F0·(1 − λ) + F′·λ: λ, and the epoch that F′ comes from."""

    share: float
    epoch: int


def load_kept(
    encoder: Encoder,
    start_weights: dict[str, Tensor],
    best_weights: dict[str, Tensor],
    history: Sequence[Epoch],
    devset: DevSet,
    recipe: Recipe,
) -> Mix:
    """Replace the last epoch's weights in an encoder by those that the recipe keeps."""
    best, last = best_epoch(history), history[-1].epoch
    weights = {best: best_weights, last: weights_of(encoder)}
    if recipe.keep != "mix":
        number = last if recipe.keep == "last" else best
        mix = Mix(float(number > 0), number)
        load_mix(encoder, start_weights, weights[number], mix.share)
        return mix
    trusted = [last, best] if devset.is_labeled else [best]
    if best in (0, last):  # if no epoch beat F0, a mix of F0 and the last weights may
        trusted = [last]
    return load_best_mix(encoder, start_weights, {epoch: weights[epoch] for epoch in trusted}, devset, recipe)


def load_best_mix(
    encoder: Encoder,
    start_weights: dict[str, Tensor],
    trained_by_epoch: Mapping[int, dict[str, Tensor]],
    devset: DevSet,
    recipe: Recipe,
) -> Mix:
    """Set the encoder's weights to the best mix of F0 and the weights of an epoch.

    `trained_by_epoch` begins with the most trusted epoch. Another is chosen only if labeled queries clearly prefer it.
    """
    trust = list(trained_by_epoch)
    load_mix(encoder, start_weights, trained_by_epoch[trust[0]], 0.0)
    unmixed = devset.ndcg(encoder)
    ndcg_by_mix = {}
    for epoch, weights in trained_by_epoch.items():
        for share in mixes(recipe, devset):
            load_mix(encoder, start_weights, weights, share)
            ndcg = devset.ndcg(encoder)
            if mean_ndcg(ndcg) > mean_ndcg(unmixed):
                ndcg_by_mix[Mix(share, epoch)] = ndcg
    chosen = Mix(0.0, trust[0])
    if ndcg_by_mix:
        best = max(ndcg_by_mix, key=lambda each: mean_ndcg(ndcg_by_mix[each]))
        if devset.is_labeled:  # of mixes not clearly worse than the best: most trusted epoch, then largest λ
            by_trust = sorted(ndcg_by_mix, key=lambda each: (trust.index(each.epoch), -each.share))
            chosen = next(each for each in by_trust if not is_clear_gain(ndcg_by_mix[each], ndcg_by_mix[best]))
        elif encoder.is_table or is_clear_gain(unmixed, ndcg_by_mix[best]):
            chosen = best
    agreed = of_the_first({"share": chosen.share, "epoch": float(chosen.epoch)}, encoder.device)
    chosen = Mix(agreed["share"], int(agreed["epoch"]))
    load_mix(encoder, start_weights, trained_by_epoch[chosen.epoch], chosen.share)
    return chosen


def mixes(recipe: Recipe, devset: DevSet) -> list[float]:
    """List the λ to choose from; pseudo-queries overrate large ones, hence a limit."""
    return [mix for mix in MIXES if mix <= (1.0 if devset.is_labeled else recipe.mix_limit)]


def load_mix(
    encoder: Encoder, start_weights: dict[str, Tensor], trained_weights: dict[str, Tensor], mix: float
) -> None:
    """Set the encoder's weights to F0·(1 − λ) + F′·λ."""
    mixed = {}
    for name, weight in start_weights.items():
        mixed[name] = weight.lerp(trained_weights[name], mix) if weight.is_floating_point() else weight
    encoder.model.load_state_dict(mixed)
    encoder.model.eval()


def is_clear_gain(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> bool:
    """Return whether mean NDCG@10 rose by over two standard errors, paired by query.

    Return False if a kind has a single query: its variance is unknown.
    """
    differences = [after[kind] - ndcg for kind, ndcg in before.items()]
    if min(map(len, differences)) < 2:
        return False
    gain = np.mean([each.mean() for each in differences])
    variance = sum(each.var(ddof=1) / len(each) for each in differences)
    return bool(gain > CLEAR * np.sqrt(variance) / len(differences))


def weights_of(encoder: Encoder) -> dict[str, Tensor]:
    """Copy the encoder's weights."""
    return {name: tensor.detach().clone() for name, tensor in encoder.model.state_dict().items()}


# ------------------------------------------------------------------------------------------------- checkpoints


@dataclass
class TrainingRun:
    """Everything that changes during a run; checkpoints hold it."""

    trainer: Trainer
    tree: Hierarchy
    vectors: np.ndarray  # the documents' vectors that the tree was grown from, of shape (N, n)
    best_weights: dict[str, Tensor]  # the best on dev so far; `best` in checkpoints
    best_metric: float  # their dev metric, m in Alg. 3
    history: list[Epoch]  # epoch 0, before training, and each finished epoch
    counters: Counters = field(default_factory=Counters)  # how far the run has come
    checkpoints: CheckpointFolder | None = None  # where the state and the vectors are kept; None: in memory only
    measured: dict[str, np.ndarray] | None = None  # NDCG@10 by the last epoch's weights; None at first and on resuming

    @property
    def tree_epoch(self) -> int:
        """The epoch whose weights gave the current tree and vectors; 0 is F0."""
        return max(epoch.epoch for epoch in self.history if epoch.reclustered or epoch.epoch == 0)

    def save(self) -> None:
        """Write a checkpoint, if there is a folder for it and this process is the first."""
        if self.checkpoints is None or not is_first_process():
            return
        trainer, levels = self.trainer, self.tree.levels
        optimizer = optimizer_state(trainer.optimizer, "optimizer")
        centroid_optimizer = optimizer_state(trainer.centroid_optimizer, "centroid_optimizer")
        tensors = {
            **prefixed("weights", trainer.encoder.model.state_dict()),
            **prefixed("best", self.best_weights),
            **{f"tree.{t}.parent": torch.from_numpy(level.parent) for t, level in enumerate(levels)},
            **{f"tree.{t}.centroids": torch.from_numpy(level.centroids) for t, level in enumerate(levels)},
            **{f"moved.{t}": centroid for t, centroid in enumerate(trainer.centroids)},
            "document_parent": torch.from_numpy(self.tree.document_parent),
            **optimizer.tensors,
            **centroid_optimizer.tensors,
        }
        facts = {
            "history": [asdict(epoch) for epoch in self.history],
            "progress": {COUNTER_NAMES.get(name, name): value for name, value in asdict(self.counters).items()},
            "best_metric": self.best_metric,
            "vectors": self.checkpoints.vectors_folder(self.tree_epoch).name,
            "tree": {"mean_cosines": self.tree.mean_cosines, "facts": self.tree.facts},
            "optimizer": optimizer.facts,
            "centroid_optimizer": centroid_optimizer.facts,
        }
        self.checkpoints.save(Checkpoint(tensors, facts))


def unfinished_run(trainer: Trainer, checkpoints: CheckpointFolder | None) -> TrainingRun | None:
    """Return the run that an earlier process left, loaded into the trainer.

    Fails if the unfinished run has another identity, or its state is damaged.
    """
    return None if checkpoints is None else checkpoints.resume(partial(_resumed, trainer, checkpoints))


def _resumed(trainer: Trainer, checkpoints: CheckpointFolder, checkpoint: Checkpoint) -> TrainingRun:
    """Load a checkpoint into a trainer."""
    tensors, facts = checkpoint
    trainer.encoder.model.load_state_dict(under("weights", tensors))
    arrays = {name: tensor.numpy() for name, tensor in under("tree", tensors).items()}
    levels = tuple(Level(arrays[f"{t}.parent"], arrays[f"{t}.centroids"]) for t in range(len(arrays) // 2))
    about, parent = facts["tree"], tensors["document_parent"].numpy()
    tree = Hierarchy(levels, parent, tuple(about["mean_cosines"]), about["facts"])
    vectors, width = np.empty((len(tree), 0), dtype=np.float32), 0
    if trainer.recipe.needs_vectors:
        vectors = np.load(checkpoints.vectors_named(facts["vectors"]), mmap_mode="c", allow_pickle=False)
        width = trainer.encoder.dim
    if vectors.dtype != np.float32 or vectors.shape != (len(tree), width):
        raise FormatError(f"{facts['vectors']} holds {vectors.dtype} of shape {vectors.shape}")
    trainer.use_tree(tree, vectors)
    for t, centroid in enumerate(trainer.centroids):
        centroid.data.copy_(tensors[f"moved.{t}"])
    restore_optimizer(trainer.optimizer, under("optimizer", tensors), facts["optimizer"])
    restore_optimizer(trainer.centroid_optimizer, under("centroid_optimizer", tensors), facts["centroid_optimizer"])
    best_weights = {name: tensor.to(trainer.encoder.device) for name, tensor in under("best", tensors).items()}
    history = [checked_fields(Epoch, epoch, may_be_nan=MAY_BE_NAN) for epoch in facts["history"]]
    names = {kept: name for name, kept in COUNTER_NAMES.items()}
    progress = {names.get(name, name): value for name, value in facts["progress"].items()}
    counters = checked_fields(Counters, progress, may_be_nan=["sums"])
    best_metric = float(facts["best_metric"])
    return TrainingRun(trainer, tree, vectors, best_weights, best_metric, history, counters, checkpoints)


class Checkpoint(NamedTuple):
    """The content of a checkpoint: tensors by name, and facts as JSON."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


class CheckpointFolder:
    """The newest checkpoint of a run and the vectors that it names; older ones are deleted."""

    def __init__(self, folder: str | Path, identity: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self.identity = identity  # corpus, encoder, labels and settings; a checkpoint with others is refused

    def vectors_folder(self, clustering_number: int) -> Path:
        """Return the folder of vectors for a clustering, see `cluster_corpus`."""
        return self.folder / f"vectors-{clustering_number}"

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint that survives a crash; if this fails, the last one stays."""
        try:
            make_folder(self.folder)
            previous = self._last()
            name = f"state-{int(previous.name.split('-')[1]) + 1 if previous else 0}"
            shutil.rmtree(self.folder / name, ignore_errors=True)  # left by a run that died before `LAST` named it
            with new_folder(self.folder / name) as folder:
                # Copies, because safetensors refuses two names that share a tensor.
                tensors = {key: each.detach().cpu().clone().contiguous() for key, each in checkpoint.tensors.items()}
                save_file(tensors, folder / "tensors.safetensors")
                write_json(folder / "facts.json", {"identity": self.identity, **checkpoint.facts})
            with open_atomically(self.folder / "LAST") as file:
                file.write(name)
        except (OSError, InputError) as error:
            raise InputError(
                f"{self.folder}: the state of the run cannot be written ({system_reason(error) or error}); "
                "make room and go on with --resume"
            ) from error
        for folder in [*self.folder.glob("state-*"), *self.folder.glob("vectors-*")]:
            if folder.name not in (name, checkpoint.facts.get("vectors")):
                shutil.rmtree(folder, ignore_errors=True)

    def load(self) -> Checkpoint | None:
        """Read the newest complete checkpoint; fail if it belongs to a different run."""
        check_tree(self.folder)
        last = self._last()
        if last is None:
            return None
        facts = read_json(last / "facts.json")
        changed = other_identity(self.identity, facts.pop("identity"))
        if changed:
            raise InputError(
                f"{self.folder} holds an unfinished run with another {changed}; give the same, or delete it"
            )
        return Checkpoint(load_file(last / "tensors.safetensors"), facts)

    def resume(self, restore: Callable[[Checkpoint], Restored]) -> Restored | None:
        """Apply `restore` to the newest checkpoint; return None without one.

        Fails if the run has another identity, or its state is damaged.
        """
        try:
            checkpoint = self.load()
            return None if checkpoint is None else restore(checkpoint)
        except InputError:
            raise
        except Exception as error:  # reading a damaged file may raise any error
            raise FormatError(
                f"{self.folder}: the state of the run is damaged ({one_line(error)}); "
                "delete this folder and train from the start"
            ) from error

    def vectors_named(self, name: str) -> Path:
        """Return the file of vectors in a folder that a checkpoint names."""
        if not re.fullmatch(r"vectors-[0-9]+", name):
            raise FormatError(f"{name!r} is no folder of vectors")
        return self.folder / name / "vectors.npy"

    def _last(self) -> Path | None:
        pointer = self.folder / "LAST"
        if not pointer.is_file():
            return None
        name = pointer.read_text(encoding="utf-8").strip()
        if not re.fullmatch(r"state-[0-9]+", name):
            raise FormatError(f"{pointer}: {name[:40]!r} names no state")
        return self.folder / name


def optimizer_state(optimizer: torch.optim.Optimizer | None, prefix: str) -> Checkpoint:
    """Flatten an optimizer's state to tensors PREFIX.NUMBER.KEY and facts NUMBER.KEY."""
    checkpoint = Checkpoint({}, {})
    for number, values in optimizer.state_dict()["state"].items() if optimizer is not None else ():
        for key, value in values.items():
            if isinstance(value, Tensor):
                checkpoint.tensors[f"{prefix}.{number}.{key}"] = value
            elif value is not None:
                checkpoint.facts[f"{number}.{key}"] = value
    return checkpoint


def restore_optimizer(
    optimizer: torch.optim.Optimizer | None, tensors: dict[str, Tensor], facts: dict[str, Any]
) -> None:
    """Restore what `optimizer_state` returned; here `tensors` has no prefixes."""
    if optimizer is None:
        return
    restored: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **facts}.items():
        number, key = name.split(".", 1)
        restored.setdefault(int(number), {})[key] = value
    optimizer.load_state_dict({"state": restored, "param_groups": optimizer.state_dict()["param_groups"]})


def prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put a prefix and a dot before the name of each tensor."""
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Select the tensors with a prefix, and remove it from their names."""
    dotted = f"{prefix}."
    return {name.removeprefix(dotted): tensor for name, tensor in tensors.items() if name.startswith(dotted)}
