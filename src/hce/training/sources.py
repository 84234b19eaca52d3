"""The pairs that a run trains on, and the held-out queries that measure it; what is held out is not trained on."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np

from hce.data.corpus import Corpus
from hce.data.judgments import Labels
from hce.errors import InputError
from hce.processes import process_count
from hce.training.heldout import DevSet, labelled_dev, pseudo_dev
from hce.training.pairs import DropoutTwins, InverseCloze, LabelledPairs, PairSource
from hce.training.recipe import Recipe

logger = logging.getLogger(__name__)

LEAST_DEV_QUERIES = 20
SHORT_TRAINING = 100_000  # pairs in all epochs
MANY_ANSWERS = 4  # right documents a query, on average; from so many on, a query stands for a topic


@dataclass(frozen=True)
class Sources:
    """Where a run's pairs come from: labels, pseudo-queries, or both (joint training).

    Attributes:
        supervised: pairs of labelled and generated queries.
        unsupervised: pairs made of the documents themselves.
        held_out: positions of documents kept for measuring; no pairs are made of them, and they are no negatives.
        level_losses: whether to have any where the recipe leaves that open.
    """

    supervised: PairSource | None = None
    unsupervised: PairSource | None = None
    held_out: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    level_losses: bool = True

    def __post_init__(self) -> None:
        if self.supervised is None and self.unsupervised is None:
            raise InputError("there is nothing to train on: no labelled pairs and no pseudo-queries")
        fewest = min(len(source) for source in (self.supervised, self.unsupervised) if source is not None)
        if fewest < process_count():
            raise InputError(f"{fewest} pairs cannot be shared out to {process_count()} processes; use fewer of these")


def sources_and_devset(
    corpus: Corpus, pairs: Labels | None, generated: Labels | None, dev: Labels | None, recipe: Recipe
) -> tuple[Sources, DevSet]:
    """Return the pairs to train on and the held-out queries to measure by; the arguments are those of `hce.train`."""
    if recipe.mode == "unsupervised":
        pairs = generated = None
    if pairs is not None:
        pairs, dev = split_labels(pairs, recipe) if dev is None else (_without_dev(pairs, dev), dev)
    held_out = np.empty(0, dtype=np.int64)
    if dev is None:
        held_out = _held_out_documents(len(corpus), recipe)
        devset = pseudo_dev(corpus, held_out, recipe.dev_pool, recipe.seed)
    else:
        devset = labelled_dev(corpus, dev.queries, dev.qrels, recipe.dev_pool, recipe.seed)
    supervised = unsupervised = None
    labelled = pairs.joined(generated) if pairs and generated else pairs or generated
    if labelled is not None:
        supervised = LabelledPairs(corpus, labelled.queries, labelled.qrels, seed=recipe.seed)
    if recipe.mode != "supervised":
        unsupervised = _pseudo_pairs(corpus, np.setdiff1d(np.arange(len(corpus)), held_out), recipe)
    return Sources(supervised, unsupervised, held_out, _wants_level_losses(supervised, len(corpus), recipe)), devset


def split_labels(pairs: Labels, recipe: Recipe) -> tuple[Labels, Labels]:
    """Hold a tenth of the labelled queries out, whole queries at a time.

    Raises:
        InputError: there are too few.
    """
    query_ids = list(pairs.qrels)
    if len(query_ids) < 2 * LEAST_DEV_QUERIES:
        raise InputError(
            f"{len(query_ids)} labelled queries are too few to hold some out to measure by; "
            "give dev queries of their own"
        )
    count = max(LEAST_DEV_QUERIES, min(recipe.dev_queries, len(query_ids) // 10))
    rng = np.random.default_rng([recipe.seed, 7])
    held = pairs.only(query_ids[index] for index in np.sort(rng.choice(len(query_ids), count, replace=False)))
    return pairs.without(held.qrels), held


def _without_dev(pairs: Labels, dev: Labels) -> Labels:
    kept = pairs.without(dev.qrels)
    if len(kept.qrels) < len(pairs.qrels):
        logger.warning("%d dev queries are among the pairs too; not trained on", len(pairs.qrels) - len(kept.qrels))
    return kept


def _held_out_documents(documents: int, recipe: Recipe) -> np.ndarray:
    """Draw the documents that held-out pseudo-queries are made of, at most a tenth of all."""
    count = min(recipe.dev_queries, max(1, documents // 10))
    return np.sort(np.random.default_rng([recipe.seed, 7]).choice(documents, count, replace=False))


def _pseudo_pairs(corpus: Corpus, positions: np.ndarray, recipe: Recipe) -> PairSource:
    if recipe.pseudo == "simcse":
        return DropoutTwins(corpus, positions, seed=recipe.seed)
    return InverseCloze(
        corpus,
        positions,
        lengths=recipe.span_lengths,
        cut_share=recipe.cut_share,
        window=recipe.window,
        seed=recipe.seed,
    )


def _wants_level_losses(labelled: LabelledPairs | None, documents: int, recipe: Recipe) -> bool:
    """Tell whether pulling queries towards regions of the tree is likely to pay (docs/LOG.md).

    A query that one document answers is about that document and not about a region of the tree. Where people ask such
    queries, level losses cost more than they gain, those of pseudo-queries too. Without labels nobody knows what will
    be asked: then level losses gain recall in a short training, and in a long one wear away what tells the documents of
    a region apart.
    """
    if labelled is not None:
        return len(labelled) >= MANY_ANSWERS * len(labelled.texts)
    return recipe.epochs * (recipe.epoch_pairs or documents) <= SHORT_TRAINING
