"""Companions: tables, learned from the corpus, whose vectors are joined to an encoder's. The paper has none.

A transformer is strong but slow to train, and training it without labels gains little. A token table with the same
tokenizer is weak, but trains in a minute; a table of the corpus's own words is fitted in seconds. Joined to the
unchanged transformer, each distinguishes documents that the transformer cannot (docs/LOG.md). Calibration chooses their
share of a score; 0, the encoder alone, is among the choices. With companions the transformer's vectors are centered.
Centering alone changes little, but with it companions do no harm to a transformer that is much better than they are.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from hce.data.corpus import Corpus
from hce.encoding.corpus_vectors import encode_among_processes, encode_corpus
from hce.encoding.encoder import Encoder
from hce.encoding.tables import fit_words, joined_rows
from hce.errors import InputError
from hce.processes import take_weights_of_the_first
from hce.training.calibration import (
    Part,
    PoolTokens,
    Questions,
    calibrate,
    cut_questions,
    divided,
    encoded_parts,
    usual_shares,
)
from hce.training.co_training import TrainResult, cluster_corpus
from hce.training.pairs import (
    DevSet,
    LabeledPairs,
    means,
    pseudo_devset,
)
from hce.training.query_map import with_query_map
from hce.training.query_mean import QueryMean
from hce.training.recipe import TRANSFORMER, Recipe

logger = logging.getLogger(__name__)

# Share of a log's mean that is subtracted from queries, and the number of logged queries that halves this share.
LOG_SHARE, LOG_PRIOR = 0.75, 10
LEAST_TO_CENTER = 100  # questions; the mean of fewer is noise


def with_companions(
    corpus: Corpus,
    encoder: Encoder,  # the trained one; if only a companion was trained, the transformer
    learned: TrainResult,
    tables: list[Encoder],  # trained token tables, at most one
    run_folder: Path | None,  # where an unfinished run keeps its state; None: nowhere
    *,
    log: Sequence[str] | QueryMean = (),  # queries that people asked, or the mean of their vectors by this encoder
    progress: bool,
) -> TrainResult:
    """Put companions next to an encoder, and calibrate the shares of a search."""
    was_trained = encoder is learned.encoder
    if not was_trained:
        few = _few_queries(learned.devset, learned.sources.measured, learned.recipe)
        learned = replace(learned, devset=few, vectors=None)
    recipe, sources = learned.recipe, learned.sources
    questions = _questions(corpus, learned)
    tokens = PoolTokens.of(encoder, corpus, questions)
    vectors = learned.vectors
    if vectors is None:
        vectors = encode_corpus(
            *(encoder, corpus, run_folder and run_folder / "encoded"),
            replace=True,
            progress=progress and not encoder.is_table,
            on_tokens=tokens.keep_text if tokens else None,
        )
    mapped = encoder  # labels may add a map of queries below
    if isinstance(sources.supervised, LabeledPairs) and learned.devset.is_labeled and not (log or encoder.is_table):
        mapped = with_query_map(encoder, vectors, sources.supervised, learned.devset, recipe.seed)
    companions, chosen_by = _companions(corpus, mapped, tables, sources.measured, recipe)
    pool_vectors = vectors[questions.pool] if questions else vectors[:0]
    parts = encoded_parts(questions, corpus, [mapped, *chosen_by], pool_vectors, tokens)
    centers = _centers(parts, vectors, mapped)
    calibration = calibrate(
        *(questions, corpus, parts, usual_shares(mapped, companions=len(parts) > 1)),
        language=recipe.language,
        centers=centers,
        tokens=tokens,
    )
    learned, share = replace(learned, calibration=calibration), calibration.shares.companions
    if log and not mapped.is_table:
        centers = log_centers(log if isinstance(log, QueryMean) else QueryMean.of(log, mapped), vectors)
    elif not share:
        centers = None
    accompanied = accompany(mapped, companions, share, centers)
    if accompanied is encoder and was_trained:
        return learned
    # The word table to measure with was fitted without the documents behind the held-out queries.
    learned = _measured(learned, encoder, mapped, accompany(mapped, chosen_by, share, centers), vectors)
    tree = cluster_corpus(_corpus_beside(corpus, accompanied, vectors), recipe, mapped, recipe.epochs + 1)
    return replace(learned, encoder=accompanied, hierarchy=tree, vectors=None)


def _measured(
    learned: TrainResult, given: Encoder, mapped: Encoder, judged: Encoder, vectors: np.ndarray
) -> TrainResult:
    """Measure the stages after training: the map of queries, and the companions.

    `vectors` are those of the corpus. The encoders `given` and `mapped` share them, and differ in queries only.
    """
    devset, stages, mix, before = learned.devset, learned.stages, learned.mix, learned.ndcg_before
    alone = after = devset.ndcg(mapped, vectors)
    if judged is not mapped:
        after = devset.ndcg(judged, pool_vectors=_beside(judged, vectors[devset.pool], devset.pool_texts()))
    if given is not learned.encoder:  # only a companion was trained
        before, stages = alone if mapped is given else devset.ndcg(given, vectors), {}
        mix = mix if len(judged.shares) > 1 else float(mapped is not given)
    if mapped is not given:
        stages = {**stages, "labels": means(alone)}
    if len(judged.shares) > 1:
        stages = {**stages, "companions": means(after)}
    return replace(learned, mix=mix, stages=stages, ndcg_before=before, ndcg_after=after)


def without_companions(corpus: Corpus, learned: TrainResult) -> TrainResult:
    """Calibrate the shares of words and tokens for the encoder that was trained."""
    encoder, vectors, questions = learned.encoder, learned.vectors, _questions(corpus, learned)
    if questions is None:
        return learned
    tokens = PoolTokens.of(encoder, corpus, questions)
    if vectors is not None:
        vectors = vectors[questions.pool]
    else:
        vectors = encode_corpus(encoder, corpus.only(questions.pool), on_tokens=tokens.keep_text if tokens else None)
    parts = encoded_parts(questions, corpus, [encoder], vectors, tokens)
    language, usual = learned.recipe.language, usual_shares(encoder)
    calibration = calibrate(questions, corpus, parts, usual, language=language, tokens=tokens)
    return replace(learned, calibration=calibration)


def _questions(corpus: Corpus, learned: TrainResult) -> Questions | None:
    """Return held-out labeled queries, else questions cut out of held-out documents."""
    devset = learned.devset
    if devset.is_labeled:
        return Questions("labeled", devset.panel[0].texts, devset.panel[0].answers, devset.pool, {})
    return cut_questions(corpus, learned.recipe.seed, learned.sources.measured)


def _companions(
    corpus: Corpus, encoder: Encoder, tables: list[Encoder], measured: np.ndarray, recipe: Recipe
) -> tuple[list[Encoder], list[Encoder]]:
    """Return the companions to use, and those to choose shares with.

    With a word table fitted to a document, queries made from this document find it too easily. So the word table to
    choose shares with skips the measured documents, even with `hold_out=false`.
    """

    def word_table(without: np.ndarray) -> list[Encoder]:
        return word_table_of(corpus, encoder, language=recipe.language, without=without, seed=recipe.seed)

    of_all = word_table(np.empty(0, dtype=np.int64))
    of_others = word_table(measured) if len(measured) else of_all
    if len(of_all) != len(of_others):  # too few documents to fit a table without the measured ones
        return tables, tables
    return [*tables, *of_all], [*tables, *of_others]


def accompany(encoder: Encoder, companions: Sequence[Encoder], share: float, centers: np.ndarray | None) -> Encoder:
    """Return an encoder with companions of this share, or, at 0, without any."""
    if share:
        return encoder.beside(companions, divided(share, len(companions)), centers)
    return encoder if centers is None else encoder.beside([], [1.0], centers)


def _centers(parts: Sequence[Part], vectors: np.ndarray, encoder: Encoder) -> np.ndarray | None:
    """Return the means of questions and documents, (2, n), or None.

    None for a table, and for few questions, whose mean would be noise.
    """
    if encoder.is_table or not parts or len(parts[0].queries) < LEAST_TO_CENTER:
        return None
    return np.stack([parts[0].queries.mean(axis=0, dtype=np.float64), vectors.mean(axis=0, dtype=np.float64)])


def log_centers(log: QueryMean, vectors: np.ndarray) -> np.ndarray:
    """Return what to subtract from queries and documents, (2, n), given a log.

    Documents lose their mean. Queries lose three quarters of the log's mean, and less if the log is short, because the
    mean of a few queries is noise.
    """
    share = LOG_SHARE * log.count / (log.count + LOG_PRIOR)
    return np.stack([share * np.array(log.mean), vectors.mean(axis=0, dtype=np.float64)])


def word_table_of(corpus: Corpus, encoder: Encoder, *, language: str, without: np.ndarray, seed: int) -> list[Encoder]:
    """Fit a table of the corpus's words; none if documents share too few words."""
    try:
        table = fit_words(corpus, language=language, without=without, seed=seed)
    except InputError as error:
        logger.warning("%s; the encoder gets no words of the corpus", error)
        return []
    take_weights_of_the_first([torch.from_numpy(table.vectors)])
    return [Encoder(table, "words of the corpus", device=encoder.device)]


def _beside(encoder: Encoder, rows: np.ndarray, texts: list[str]) -> np.ndarray:
    """Return documents' vectors with companions, given the first part's rows."""
    others = [each.encode(texts, zeros=True) for each in encoder.parts[1:]]
    return joined_rows([rows, *others], encoder.shares, None if encoder.centres is None else encoder.centres[1])


def _corpus_beside(corpus: Corpus, encoder: Encoder, vectors: np.ndarray) -> np.ndarray:
    """Return the corpus's vectors with companions; `vectors` are without, (N, n₁)."""
    if len(encoder.shares) == 1 and encoder.centres is None:
        return vectors

    def encode(rows: np.ndarray, texts: list[str]) -> np.ndarray:
        return _beside(encoder, vectors[rows], texts)

    return encode_among_processes(corpus, encode, encoder.dim, encoder.device)


def _few_queries(devset: DevSet, measured: np.ndarray, recipe: Recipe) -> DevSet:
    """Return a dev set small enough for a transformer."""
    # A recipe does not show whether the user set `dev_queries`. If it is a table's default, a transformer's is used.
    few = TRANSFORMER["dev_queries"] if recipe.dev_queries == Recipe.dev_queries else recipe.dev_queries
    if devset.is_labeled or len(measured) <= few:
        return devset
    some = np.sort(np.random.default_rng([recipe.seed, 11]).choice(measured, few, replace=False))
    return pseudo_devset(devset.corpus, some, recipe.dev_pool, recipe.seed, are_held_out=recipe.hold_out)
