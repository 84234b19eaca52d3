"""The pairs that a run trains on, and the held-out queries that measure it; what is held out is not trained on."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hce.data.corpus import Corpus
from hce.data.judgments import Labels
from hce.data.text import word_offsets
from hce.encoding.encoder import Encoder
from hce.errors import InputError
from hce.processes import process_count
from hce.training.heldout import DevSet, labelled_devset, pseudo_devset, with_random_others
from hce.training.pairs import DropoutTwins, InverseCloze, LabelledPairs, PairSource
from hce.training.recipe import Recipe

logger = logging.getLogger(__name__)

LEAST_DEV_QUERIES = 20


class LabelSets(NamedTuple):
    """The labels of a run: to train on, generated to train on, to measure by."""

    labelled: Labels | None = None
    generated: Labels | None = None
    dev: Labels | None = None


@dataclass(frozen=True)
class Sources:
    """Where a run's pairs come from: labels, pseudo-queries, or both (joint training).

    Attributes:
        supervised: pairs of labelled and generated queries.
        unsupervised: pairs made of the documents themselves.
        held_out: positions of documents kept for measuring; no pairs are made of them, and they are no negatives.
        measured: positions of the documents that dev queries are made of; none where these are labelled. They are the
            held-out ones, unless the recipe trains on all.
    """

    supervised: PairSource | None = None
    unsupervised: PairSource | None = None
    held_out: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    measured: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def __post_init__(self) -> None:
        if self.supervised is None and self.unsupervised is None:
            raise InputError("there is nothing to train on: no labelled pairs and no pseudo-queries")
        fewest = min(len(source) for source in (self.supervised, self.unsupervised) if source is not None)
        if fewest < process_count():
            raise InputError(f"{fewest} pairs cannot be shared out to {process_count()} processes; use fewer of these")


def learnt_from(corpus: Corpus, recipe: Recipe, label_sets: Iterable[Labels | None] = ()) -> Corpus:
    """Return the documents that are learnt from: all, or a random sample of many, and with it all that labels name."""
    if not recipe.most_documents or len(corpus) <= recipe.most_documents:
        return corpus
    named = {judgment.document_id for each in label_sets if each for judgment in each.qrels.judgments()}
    positions = [position for position, document in enumerate(corpus) if document.id in named] if named else []
    wanted = np.array(positions, dtype=np.int64)
    sample = corpus.only(with_random_others(len(corpus), wanted, recipe.most_documents, [recipe.seed, 13]))
    logger.info("learning from %s", sample.name)
    return sample


def sources_and_devset(
    corpus: Corpus, encoder: Encoder, label_sets: LabelSets, recipe: Recipe
) -> tuple[Sources, DevSet]:
    """Return the pairs to train on and the held-out queries to measure by."""
    labelled, generated, dev = label_sets
    if recipe.mode == "unsupervised":
        labelled = generated = None
    if labelled is not None:
        labelled, dev = split_labels(labelled, recipe) if dev is None else (_without_dev(labelled, dev), dev)
    measured = np.empty(0, dtype=np.int64)
    if dev is None:
        measured = _measured_documents(len(corpus), recipe)
        devset = pseudo_devset(corpus, measured, recipe.dev_pool, recipe.seed, are_held_out=recipe.hold_out)
    else:
        devset = labelled_devset(corpus, dev.queries, dev.qrels, recipe.dev_pool, recipe.seed)
    held_out = measured if recipe.hold_out else measured[:0]
    supervised = unsupervised = None
    learnable = labelled.joined(generated) if labelled and generated else labelled or generated
    if learnable is not None and len(held_out):
        learnable = _of_others(learnable, corpus, held_out)
    if learnable is not None:
        supervised = LabelledPairs(corpus, learnable.queries, learnable.qrels, seed=recipe.seed)
    if recipe.mode != "supervised":
        unsupervised = _pseudo_pairs(corpus, np.setdiff1d(np.arange(len(corpus)), held_out), encoder, recipe)
    return Sources(supervised, unsupervised, held_out, measured), devset


def split_labels(labelled: Labels, recipe: Recipe) -> tuple[Labels, Labels]:
    """Hold a tenth of the labelled queries out, whole queries at a time.

    Raises:
        InputError: there are too few.
    """
    query_ids = list(labelled.qrels)
    if len(query_ids) < 2 * LEAST_DEV_QUERIES:
        raise InputError(
            f"{len(query_ids)} labelled queries are too few to hold some out to measure by; "
            "give dev queries of their own"
        )
    count = max(LEAST_DEV_QUERIES, min(recipe.dev_queries, len(query_ids) // 10))
    rng = np.random.default_rng([recipe.seed, 7])
    held = labelled.only(query_ids[index] for index in np.sort(rng.choice(len(query_ids), count, replace=False)))
    return labelled.without(held.qrels), held


def _of_others(labels: Labels, corpus: Corpus, held_out: np.ndarray) -> Labels:
    """Return the labels of all documents but those that are held out.

    Raises:
        InputError: nothing is left of them.
    """
    named = {judgment.document_id for judgment in labels.qrels.judgments()}
    found = labels.among(named - {corpus.ids[position] for position in held_out.tolist()})
    if not found.qrels:
        raise InputError(
            f"the {len(labels.qrels)} generated queries are all of documents that are held out to measure by; "
            "generate more, or train with --set hold_out=false"
        )
    return found


def _without_dev(labelled: Labels, dev: Labels) -> Labels:
    kept = labelled.without(dev.qrels)
    if len(kept.qrels) < len(labelled.qrels):
        logger.warning("%d dev queries are among the pairs too; not trained on", len(labelled.qrels) - len(kept.qrels))
    return kept


def _measured_documents(document_count: int, recipe: Recipe) -> np.ndarray:
    """Draw the documents that dev queries are made of, at most a tenth of all."""
    count = min(recipe.dev_queries, max(1, document_count // 10))
    return np.sort(np.random.default_rng([recipe.seed, 7]).choice(document_count, count, replace=False))


def _pseudo_pairs(corpus: Corpus, positions: np.ndarray, encoder: Encoder, recipe: Recipe) -> PairSource:
    if recipe.pseudo == "simcse":
        return DropoutTwins(corpus, positions, seed=recipe.seed)
    return InverseCloze(
        corpus,
        positions,
        lengths=recipe.span_lengths,
        offsets=encoder.token_offsets if recipe.span_unit == "tokens" else word_offsets,
        cut_share=recipe.cut_share,
        window=recipe.window,
        seed=recipe.seed,
    )
