"""Companions: what stands beside an encoder in one vector, learnt from the corpus in the encoder's place.

A transformer is strong and slow to train, and without labels training gains it little. A token table of the same
tokenizer is weak and trained in a minute; a table of the corpus's own words is fitted in seconds. Beside the
transformer, which stays as it is, both tell documents apart that the transformer has never learnt to (docs/LOG.md).
How much they count is chosen on held-out queries, and 0, the encoder alone, is among the choices. With companions
the transformer's vectors are centred: that alone changes little, and keeps companions from doing harm where the
transformer is far ahead of them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from hce.data.corpus import Corpus
from hce.encoding.corpus_vectors import encode_among_processes, encode_corpus
from hce.encoding.encoder import Encoder
from hce.encoding.tables import joined_rows
from hce.encoding.word_table import fit_words
from hce.errors import InputError
from hce.processes import of_the_first, take_weights_of_the_first
from hce.training.co_training import Fit, cluster_corpus, is_clear_gain
from hce.training.heldout import DevSet, DevVectors, joined_dev_vectors, mean_ndcg, means, pseudo_devset
from hce.training.recipe import TRANSFORMER, Recipe
from hce.training.words_share import best_words_share

logger = logging.getLogger(__name__)

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)
"""What companions may count in all, to choose from."""
MOST_WITHOUT_LABELS = 0.3
"""Pseudo-queries are made of the documents' own words, and so call more of the words good than people do."""
LEAST_TO_CENTRE = 100  # queries that a mean is taken of


def with_companions(
    corpus: Corpus, encoder: Encoder, learnt: Fit, tables: list[Encoder], run_folder: Path | None, *, progress: bool
) -> Fit:
    """Put the token tables that were trained, and the corpus's words, beside an encoder, where dev prefers that.

    Args:
        corpus: the documents.
        encoder: the one that was trained, or, where only a companion was, the transformer as it was given.
        learnt: what came of training.
        tables: token tables that were trained, at most one.
        run_folder: where an unfinished run keeps its state, if it does.
        progress: show a bar.
    """
    result, recipe = learnt.result, learnt.result.recipe
    encoder_was_trained = recipe.train != "companion"
    devset = learnt.devset if encoder_was_trained else _few_queries(learnt.devset, learnt.measured, recipe)
    vectors_folder = run_folder and run_folder / "encoded"
    shown = progress and not encoder.is_table
    vectors = learnt.vectors if encoder is result.encoder else None
    if vectors is None:
        vectors = encode_corpus(encoder, corpus, vectors_folder, replace=True, progress=shown)
    companions, chosen_by = _companions(corpus, encoder, tables, learnt.measured, recipe)
    accompanied = accompany(encoder, companions, devset, chosen_by=chosen_by, vectors=vectors)
    vectors = _vectors_beside(corpus, accompanied.encoder, vectors)
    words_share = None
    if devset.is_labelled:
        words_share = best_words_share(devset, accompanied.encoder, vectors, recipe.language)
    if encoder_was_trained and not accompanied.share:
        return learnt._replace(result=replace(result, words_share=words_share))
    ndcg_before = learnt.ndcg_before if encoder_was_trained else accompanied.ndcg_alone
    stages = result.stages if encoder_was_trained else {}
    result = replace(
        result,
        encoder=accompanied.encoder,
        hierarchy=cluster_corpus(vectors, recipe, encoder, recipe.epochs + 1),
        mix=result.mix if accompanied.share else 0.0,
        before=means(ndcg_before),
        after=means(accompanied.ndcg_chosen),
        metric=devset.metric_name,
        words_share=words_share,
        stages={**stages, "companions": means(accompanied.ndcg_chosen)} if accompanied.share else dict(stages),
    )
    return Fit(result, learnt.measured, devset, ndcg_before, accompanied.ndcg_chosen)


def _companions(
    corpus: Corpus, encoder: Encoder, tables: list[Encoder], measured: np.ndarray, recipe: Recipe
) -> tuple[list[Encoder], list[Encoder]]:
    """Return the companions to use, and the same with words learnt without the measured documents, to choose by.

    Words that know a document find the queries that are made of it, so the measured documents are left out with
    `hold_out=false` too.
    """

    def word_table(without: np.ndarray) -> list[Encoder]:
        return word_table_of(corpus, encoder, language=recipe.language, without=without, seed=recipe.seed)

    of_all = word_table(np.empty(0, dtype=np.int64))
    of_others = word_table(measured) if len(measured) else of_all
    if len(of_all) != len(of_others):  # so few documents that some may not be left out
        return tables, tables
    return [*tables, *of_all], [*tables, *of_others]


class Accompanied(NamedTuple):
    """An encoder with the companions that held-out queries call good for it.

    Attributes:
        encoder: the encoder with its companions, or the encoder alone.
        share: what the companions count in all; 0 where the encoder stays alone.
        ndcg_alone: NDCG@10 of each held-out query of each kind by the encoder alone.
        ndcg_chosen: the same, with the share that was chosen.
    """

    encoder: Encoder
    share: float
    ndcg_alone: dict[str, np.ndarray]
    ndcg_chosen: dict[str, np.ndarray]


def accompany(
    encoder: Encoder,
    companions: Sequence[Encoder],
    devset: DevSet,
    *,
    chosen_by: Sequence[Encoder] | None = None,
    vectors: np.ndarray | None = None,
) -> Accompanied:
    """Put companions beside an encoder, with the share that is best on held-out queries.

    As for the mix of weights, a better mean on labelled queries is enough, and pseudo-queries need a clear gain.

    Args:
        encoder: stays as it is.
        companions: a token table, the words of the corpus, or both in that order; none gives the encoder alone.
        devset: what decides.
        chosen_by: the companions by which the share is chosen, fitted without the documents that held-out queries are
            made of; by default `companions`, which are what is used.
        vectors: the vectors of the whole corpus by the encoder, if someone has them already.
    """
    alone = devset.encode(encoder, vectors)
    ndcg_alone = best_ndcg = devset.ndcg_of(alone)
    best_share = 0.0
    centres = None if encoder.is_table else _centres(alone, vectors)
    if companions:
        parts = [alone, *(devset.encode(each, zeros=True) for each in (companions if chosen_by is None else chosen_by))]
        for share in SHARES:
            if share > MOST_WITHOUT_LABELS and not devset.is_labelled:
                break
            ndcg = devset.ndcg_of(joined_dev_vectors(parts, _shares(share, len(companions)), centres))
            if mean_ndcg(ndcg) > mean_ndcg(best_ndcg):
                best_share, best_ndcg = share, ndcg
        if not devset.is_labelled and not is_clear_gain(ndcg_alone, best_ndcg):
            best_share, best_ndcg = 0.0, ndcg_alone
        best_share = of_the_first({"share": best_share}, encoder.device)["share"]
    if not best_share:
        return Accompanied(encoder, 0.0, ndcg_alone, ndcg_alone)
    together = encoder.beside(companions, _shares(best_share, len(companions)), centres)
    return Accompanied(together, best_share, ndcg_alone, best_ndcg)


def _centres(dev_vectors: DevVectors, vectors: np.ndarray | None) -> np.ndarray | None:
    """Return the mean of held-out queries, each kind counting alike, and that of documents, of shape (2, n).

    The mean of a few queries would be about those; then there is none.
    """
    if sum(map(len, dev_vectors.query_vectors)) < LEAST_TO_CENTRE:
        return None
    query = np.mean([vectors_of_kind.mean(axis=0) for vectors_of_kind in dev_vectors.query_vectors], axis=0)
    return np.stack([query, (dev_vectors.pool_vectors if vectors is None else vectors).mean(axis=0, dtype=np.float64)])


def word_table_of(corpus: Corpus, encoder: Encoder, *, language: str, without: np.ndarray, seed: int) -> list[Encoder]:
    """Learn the corpus's own words; none, where its documents do not share enough of them.

    Args:
        corpus: the documents.
        encoder: whose companion the words become: they compute on the same device.
        language: whose endings are cut off.
        without: positions of documents that are not to be learnt from.
        seed: same seed, same result.
    """
    try:
        table = fit_words(corpus, language=language, without=without, seed=seed)
    except InputError as error:
        logger.warning("%s; the encoder gets no words of the corpus", error)
        return []
    take_weights_of_the_first([torch.from_numpy(table.vectors)])
    return [Encoder(table, "words of the corpus", device=encoder.device)]


def _vectors_beside(corpus: Corpus, encoder: Encoder, vectors: np.ndarray) -> np.ndarray:
    """Return the corpus's vectors by an encoder with companions, given those of its first part, of shape (N, n₁)."""
    if len(encoder.shares) == 1:
        return vectors
    centre, companions = None if encoder.centres is None else encoder.centres[1], encoder.parts[1:]

    def encode(rows: np.ndarray, texts: list[str]) -> np.ndarray:
        others = [each.encode(texts, zeros=True) for each in companions]
        return joined_rows([vectors[rows], *others], encoder.shares, centre)

    return encode_among_processes(corpus, encode, encoder.dim, encoder.device)


def _few_queries(devset: DevSet, measured: np.ndarray, recipe: Recipe) -> DevSet:
    """Return a dev set that a transformer can encode in a fraction of the time that the corpus takes."""
    # A recipe does not tell a number that was asked for from the default, so whoever asks for the default gets few too.
    few = TRANSFORMER["dev_queries"] if recipe.dev_queries == Recipe.dev_queries else recipe.dev_queries
    if devset.is_labelled or len(measured) <= few:
        return devset
    some = np.sort(np.random.default_rng([recipe.seed, 11]).choice(measured, few, replace=False))
    return pseudo_devset(devset.corpus, some, recipe.dev_pool, recipe.seed, are_held_out=recipe.hold_out)


def _shares(share: float, companions: int) -> list[float]:
    """Share out what companions count in all: of two, the token table counts twice what the words do."""
    weights = [2, 1] if companions == 2 else [1] * companions
    return [1 - share, *(share * weight / sum(weights) for weight in weights)]
