"""The paper's Alg. 3: encode, cluster, measure; then epochs of optimise, measure, re-cluster if better.

What the paper leaves open is settled so that training does no harm: the weights returned are the mix of the first and
the trained ones that is best on held-out queries, and the first ones themselves if no mix beats them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from torch import Tensor

from hce.data.corpus import Corpus
from hce.encoding.corpus_vectors import encode_corpus
from hce.encoding.encoder import Encoder
from hce.processes import of_the_first, working_together
from hce.progress import progress_bar
from hce.search.shares import Calibration
from hce.training.heldout import DevSet
from hce.training.history import Epoch, best_epoch
from hce.training.recipe import Recipe
from hce.training.sources import Sources
from hce.training.state import CheckpointFolder, TrainingRun, unfinished_run
from hce.training.steps import Trainer
from hce.training.weights import load_kept, weights_of
from hce.tree.hierarchy import Hierarchy

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_CHECKPOINTS = 900.0


@dataclass(frozen=True)
class TrainResult:
    """What came of training.

    Attributes:
        encoder: the encoder to use.
        hierarchy: the tree, as this encoder sees it, of the documents that were learnt from: all, or some of many.
        history: an entry for each epoch, the start included.
        mix: λ, how much of the trained weights is in the encoder; 0 means that training did not help.
        before: dev measures of the encoder as it was given.
        after: dev measures of the encoder returned; where it has the corpus's words beside it, with these learnt
            without the held-out documents, which would judge themselves otherwise.
        metric: what the dev measure is, in words; as a number it is `Epoch.metric`.
        recipe: the settings used.
        held_out: positions, among these, of the documents that were kept for measuring and not trained on.
        calibration: how much words, tokens and companions count in a search, and what that was chosen by.
        stages: dev measures after each thing that changed the encoder, in this order: fitting, training, companions.
    """

    encoder: Encoder
    hierarchy: Hierarchy
    history: list[Epoch]
    mix: float
    before: dict[str, float]
    after: dict[str, float]
    metric: str
    recipe: Recipe
    held_out: np.ndarray
    calibration: Calibration | None = None
    stages: dict[str, dict[str, float]] = field(default_factory=dict)


class CoTrained(NamedTuple):
    """What came of Alg. 3, which knows F0 and nothing of the encoder as it was given.

    Attributes:
        encoder: F0 with the weights that were chosen.
        hierarchy: the tree of the documents by this encoder.
        history: an entry for each epoch; the first is of F0.
        mix: λ, how much of the trained weights is in the encoder.
        dev: dev measures of this encoder.
    """

    encoder: Encoder
    hierarchy: Hierarchy
    history: list[Epoch]
    mix: float
    dev: dict[str, float]


class Learnt(NamedTuple):
    """A result with the held-out queries behind it, one by one.

    Attributes:
        result: what `hce.train` returns, if nothing else is done.
        measured: positions of the documents that these queries are made of; none where they are labelled.
        devset: the held-out queries that it was measured by.
        ndcg_before: NDCG@10 of each of them, by kind, by the encoder as it was given.
        ndcg_after: the same, by the encoder of the result.
    """

    result: TrainResult
    measured: np.ndarray
    devset: DevSet
    ndcg_before: dict[str, np.ndarray]
    ndcg_after: dict[str, np.ndarray]


def co_train(
    corpus: Corpus,
    encoder: Encoder,
    sources: Sources,
    devset: DevSet,
    recipe: Recipe,
    *,
    checkpoints: CheckpointFolder | None = None,
    progress: bool = False,
    on_epoch: Callable[[Epoch], None] = lambda epoch: None,
) -> CoTrained:
    """Run Alg. 3 on prepared pairs and dev queries; `hce.train` prepares them.

    Args:
        corpus: the documents.
        encoder: F0; its weights are changed in place.
        sources: where pairs come from.
        devset: what decides.
        recipe: the settings.
        checkpoints: where to keep the state; what an earlier, unfinished run left there is continued.
        progress: show a bar.
        on_epoch: called with each `Epoch` as it is finished.
    """
    start_weights = weights_of(encoder)
    trainer = Trainer(corpus, encoder, sources, recipe)
    run = unfinished_run(trainer, checkpoints)
    if run is None:
        run = _begin(trainer, devset, checkpoints)
        run.save()
        on_epoch(run.history[0])
    while run.counters.epoch < recipe.epochs and _stale_epochs(run) < recipe.patience:
        began = time.perf_counter()
        if not _optimise(run, progress):
            return _finish(run, start_weights, devset, is_broken=True)
        losses, accuracy = run.counters.close_epoch()
        epoch = Epoch(run.counters.epoch, _measure(devset, encoder), losses, accuracy)
        if epoch.metric > run.best_metric:  # a better representation was found
            run.best_weights, run.best_metric = weights_of(encoder), epoch.metric
            needs_vectors = recipe.tree or recipe.negatives == "mined"  # ANCE refreshes what it mines from
            if recipe.cotrain and needs_vectors and run.counters.epoch < recipe.epochs:
                epoch = _recluster(run, epoch)
        run.history.append(replace(epoch, seconds=round(time.perf_counter() - began, 3)))
        run.save()
        on_epoch(run.history[-1])
    return _finish(run, start_weights, devset)


def cluster_corpus(vectors: np.ndarray, recipe: Recipe, encoder: Encoder, clustering_number: int) -> Hierarchy:
    """Grow the tree of these vectors; where the recipe wants none, return one of the documents alone.

    Args:
        vectors: the documents' vectors, of shape (N, n).
        recipe: the settings.
        encoder: whose device computes.
        clustering_number: 0 for the first clustering of a run, e for that after epoch e, epochs + 1 for that of the
            weights to return; added to the recipe's seed.
    """
    if not recipe.tree:
        return Hierarchy((), np.zeros(len(vectors), dtype=np.int64), (), {"method": "none"})
    with working_together():
        return Hierarchy.build(
            vectors,
            recipe.branching or "auto",
            seed=recipe.seed + clustering_number,
            mode="exact" if recipe.clustering == "uniform" else recipe.clustering,
            init="random" if recipe.clustering == "uniform" else "points",
            device=encoder.device,
            progress=None,
        )


def _begin(trainer: Trainer, devset: DevSet, checkpoints: CheckpointFolder | None) -> TrainingRun:
    """Encode, cluster, measure."""
    began = time.perf_counter()
    vectors, tree = _encode_and_cluster(trainer, checkpoints, clustering_number=0)
    trainer.use_tree(tree, vectors)
    epoch = Epoch(0, _measure(devset, trainer.encoder, vectors), seconds=round(time.perf_counter() - began, 3))
    best_weights = weights_of(trainer.encoder)
    return TrainingRun(trainer, tree, vectors, best_weights, epoch.metric, [epoch], checkpoints=checkpoints)


def _optimise(run: TrainingRun, progress: bool) -> bool:
    """Take the rest of an epoch's steps; return False when the loss is no number any more, which ends training."""
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


def _recluster(run: TrainingRun, epoch: Epoch) -> Epoch:
    """Encode and cluster with the weights of an epoch; return the epoch with what that changed."""
    before = run.tree
    run.vectors, run.tree = _encode_and_cluster(run.trainer, run.checkpoints, epoch.epoch)
    run.trainer.use_tree(run.tree, run.vectors)
    churn = before.churn(run.tree)
    return replace(epoch, reclustered=True, churn=round(churn, 4))


def _finish(
    run: TrainingRun, start_weights: dict[str, Tensor], devset: DevSet, *, is_broken: bool = False
) -> CoTrained:
    """Choose the weights to return, never broken ones (NaN), and grow their tree."""
    encoder, recipe, history = run.trainer.encoder, run.trainer.recipe, run.history
    if is_broken:  # the best epoch then counts as the last one
        encoder.model.load_state_dict(run.best_weights)
        history = history[: best_epoch(history) + 1]
    kept = load_kept(encoder, start_weights, run.best_weights, history, devset, recipe)
    tree = run.tree
    if recipe.tree and run.tree_epoch != kept.epoch:  # the present tree is of other weights
        _, tree = _encode_and_cluster(run.trainer, run.checkpoints, recipe.epochs + 1)
    return CoTrained(encoder, tree, run.history, kept.mix, kept.dev)


def _encode_and_cluster(
    trainer: Trainer, checkpoints: CheckpointFolder | None, clustering_number: int
) -> tuple[np.ndarray, Hierarchy]:
    """Return the vectors and the tree of the corpus by the encoder's present weights.

    `clustering_number` is that of `cluster_corpus`, and names the folder of the vectors too. Vectors that a killed run
    left there may be of weights that differ in the last digits, where other processes add up in another order.
    """
    place = None if checkpoints is None else checkpoints.vectors_folder(clustering_number)
    vectors = encode_corpus(trainer.encoder, trainer.corpus, place, replace=True, progress=None)
    return vectors, cluster_corpus(vectors, trainer.recipe, trainer.encoder, clustering_number)


def _measure(devset: DevSet, encoder: Encoder, vectors: np.ndarray | None = None) -> dict[str, float]:
    return of_the_first(devset.measure(encoder, vectors), encoder.device)


def _stale_epochs(run: TrainingRun) -> int:
    """Count the epochs since the best one."""
    return run.history[-1].epoch - best_epoch(run.history)
