"""Companions: tables learned from the corpus that join an encoder in one vector.

A transformer is strong and slow to train, and without labels training gains it little. A token table of the same
tokenizer is weak and trained in a minute; a table of the corpus's own words is fitted in seconds. Joined to the
unchanged transformer, both separate documents that the transformer cannot (docs/LOG.md). Calibration chooses how much
they count; 0, the encoder alone, is among the choices. With companions the transformer's vectors are centered: that
alone changes little, and keeps companions from doing harm where the transformer is far ahead of them.
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
from hce.encoding.tables import joined_rows
from hce.encoding.word_table import fit_words
from hce.errors import InputError
from hce.processes import take_weights_of_the_first
from hce.search.shares import Calibration
from hce.training.calibration import calibrate, usual_shares
from hce.training.co_training import Fit, cluster_corpus
from hce.training.heldout import DevSet, means, pseudo_devset
from hce.training.pairs import LabeledPairs
from hce.training.query_map import with_query_map
from hce.training.query_mean import QueryMean
from hce.training.questions import (
    EncodedQuestions,
    PoolTokens,
    Questions,
    cut_questions,
    encoded_parts,
    joined_parts,
    labeled_questions,
)
from hce.training.recipe import TRANSFORMER, Recipe

logger = logging.getLogger(__name__)

# Of the mean of a log, how much queries lose, and how many queries count as much as knowing nothing.
LOG_SHARE, LOG_PRIOR = 0.75, 10
LEAST_TO_CENTER = 100  # questions that a mean is taken of


def with_companions(
    corpus: Corpus,
    encoder: Encoder,
    learned: Fit,
    tables: list[Encoder],
    run_folder: Path | None,
    *,
    log: Sequence[str] | QueryMean = (),
    progress: bool,
) -> Fit:
    """Put companions next to an encoder, and calibrate how much they, words and tokens count in a search.

    Args:
        corpus: the documents.
        encoder: the one that was trained, or, if only a companion was, the transformer as given.
        learned: what came of training.
        tables: token tables that were trained, at most one.
        run_folder: where an unfinished run keeps its state, if it does.
        log: queries that people asked, or their mean by this encoder.
        progress: show a bar.
    """
    recipe, sources, was_trained = learned.result.recipe, learned.sources, encoder is learned.result.encoder
    if not was_trained:
        learned = replace(learned, devset=_few_queries(learned.devset, sources.measured, recipe), vectors=None)
    devset = learned.devset
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
    given = encoder
    if isinstance(sources.supervised, LabeledPairs) and devset.is_labeled and not (log or given.is_table):
        encoder = with_query_map(given, vectors, sources.supervised, devset, recipe.seed)
    companions, chosen_by = _companions(corpus, encoder, tables, sources.measured, recipe)
    parts = encoded_parts(
        *(questions, corpus, [encoder, *chosen_by], vectors[questions.pool] if questions else vectors[:0], tokens)
    )
    centers = _centers(parts, vectors, encoder)
    calibration = _calibration(corpus, encoder, recipe, questions, parts, centers, tokens)
    share = calibration.shares.companions
    if log and not encoder.is_table:
        centers = log_centers(log if isinstance(log, QueryMean) else QueryMean.of(log, encoder), vectors)
    elif not share:
        centers = None
    accompanied = accompany(encoder, companions, share, centers)
    result = replace(learned.result, calibration=calibration)
    if accompanied is given and was_trained:
        return replace(learned, result=result)
    # Measured with words that were fitted without the documents that the held-out queries are made of.
    alone = devset.ndcg(encoder, vectors)
    before = devset.ndcg(given, vectors) if encoder is not given else alone
    judged = accompany(encoder, chosen_by, share, centers)
    after = alone
    if judged is not encoder:
        after = devset.ndcg(judged, pool_vectors=_beside(judged, vectors[devset.pool], devset.pool_texts()))
    stages = {} if encoder is given else {"labels": means(alone)}
    if was_trained:
        before, stages = learned.ndcg_before, {**result.stages, **stages}
    if share:
        stages["companions"] = means(after)
    vectors = _corpus_beside(corpus, accompanied, vectors)
    result = replace(
        result,
        encoder=accompanied,
        hierarchy=cluster_corpus(vectors, recipe, encoder, recipe.epochs + 1),
        mix=result.mix if was_trained or share else float(encoder is not given),
        before=means(before),
        after=means(after),
        metric=devset.metric_name,
        stages=stages,
    )
    return Fit(result, sources, devset, before, after)


def without_companions(corpus: Corpus, learned: Fit) -> Fit:
    """Calibrate how much words and tokens count in a search by the encoder that was trained."""
    result, encoder = learned.result, learned.result.encoder
    questions = _questions(corpus, learned)
    if questions is None:
        return learned
    tokens = PoolTokens.of(encoder, corpus, questions)
    if learned.vectors is not None:
        vectors = learned.vectors[questions.pool]
    else:
        vectors = encode_corpus(encoder, corpus.only(questions.pool), on_tokens=tokens.keep_text if tokens else None)
    parts = encoded_parts(questions, corpus, [encoder], vectors, tokens)
    calibration = _calibration(corpus, encoder, result.recipe, questions, parts, None, tokens)
    return replace(learned, result=replace(result, calibration=calibration))


def _questions(corpus: Corpus, learned: Fit) -> Questions | None:
    """Return people's held-out queries, or questions cut out of documents that were held out of training."""
    if learned.devset.is_labeled:
        return labeled_questions(learned.devset)
    return cut_questions(corpus, learned.result.recipe.seed, learned.sources.measured)


def _calibration(
    corpus: Corpus,
    encoder: Encoder,
    recipe: Recipe,
    questions: Questions | None,
    parts: Sequence[EncodedQuestions],
    centers: np.ndarray | None,
    tokens: PoolTokens | None,
) -> Calibration:
    """Choose the shares by questions that the encoder and its companions have encoded to `parts`."""
    return calibrate(
        questions,
        corpus,
        lambda share: joined_parts(parts, _shares(share, len(parts) - 1), centers),
        usual_shares(encoder, companions=len(parts) > 1),
        language=recipe.language,
        similarities=tokens.similarities if tokens else None,
    )


def _companions(
    corpus: Corpus, encoder: Encoder, tables: list[Encoder], measured: np.ndarray, recipe: Recipe
) -> tuple[list[Encoder], list[Encoder]]:
    """Return the companions to use, and the same with words fitted without the measured documents, to choose by.

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


def accompany(encoder: Encoder, companions: Sequence[Encoder], share: float, centers: np.ndarray | None) -> Encoder:
    """Return an encoder with its companions, which count `share` in all; at 0 it is alone, centered or unchanged."""
    if share:
        return encoder.beside(companions, _shares(share, len(companions)), centers)
    return encoder if centers is None else encoder.beside([], [1.0], centers)


def _centers(parts: Sequence[EncodedQuestions], vectors: np.ndarray, encoder: Encoder) -> np.ndarray | None:
    """Return the mean of the questions and of the documents, of shape (2, n); None for tables and few questions.

    The mean of a few questions would be about those.
    """
    if encoder.is_table or not parts or len(parts[0].queries) < LEAST_TO_CENTER:
        return None
    return np.stack([parts[0].queries.mean(axis=0, dtype=np.float64), vectors.mean(axis=0, dtype=np.float64)])


def log_centers(log: QueryMean, vectors: np.ndarray) -> np.ndarray:
    """Return what to subtract from queries and from documents, of shape (2, n), given queries that people asked.

    Documents lose their mean. Queries lose three quarters of the log's mean, and less the shorter the log is: the mean
    of a few queries is about those.
    """
    share = LOG_SHARE * log.count / (log.count + LOG_PRIOR)
    return np.stack([share * np.array(log.mean), vectors.mean(axis=0, dtype=np.float64)])


def word_table_of(corpus: Corpus, encoder: Encoder, *, language: str, without: np.ndarray, seed: int) -> list[Encoder]:
    """Learn the corpus's own words; none, where its documents do not share enough of them."""
    try:
        table = fit_words(corpus, language=language, without=without, seed=seed)
    except InputError as error:
        logger.warning("%s; the encoder gets no words of the corpus", error)
        return []
    take_weights_of_the_first([torch.from_numpy(table.vectors)])
    return [Encoder(table, "words of the corpus", device=encoder.device)]


def _beside(encoder: Encoder, rows: np.ndarray, texts: list[str]) -> np.ndarray:
    """Return the vectors of texts by an encoder with companions, given their rows by its first part."""
    others = [each.encode(texts, zeros=True) for each in encoder.parts[1:]]
    return joined_rows([rows, *others], encoder.shares, None if encoder.centres is None else encoder.centres[1])


def _corpus_beside(corpus: Corpus, encoder: Encoder, vectors: np.ndarray) -> np.ndarray:
    """Return the corpus's vectors by an encoder with companions, given those of its first part, of shape (N, n₁)."""
    if len(encoder.shares) == 1 and encoder.centres is None:
        return vectors

    def encode(rows: np.ndarray, texts: list[str]) -> np.ndarray:
        return _beside(encoder, vectors[rows], texts)

    return encode_among_processes(corpus, encode, encoder.dim, encoder.device)


def _few_queries(devset: DevSet, measured: np.ndarray, recipe: Recipe) -> DevSet:
    """Return a dev set that a transformer can encode in a fraction of the time that the corpus takes."""
    # A recipe does not tell a number that was asked for from the default, so whoever asks for the default gets few too.
    few = TRANSFORMER["dev_queries"] if recipe.dev_queries == Recipe.dev_queries else recipe.dev_queries
    if devset.is_labeled or len(measured) <= few:
        return devset
    some = np.sort(np.random.default_rng([recipe.seed, 11]).choice(measured, few, replace=False))
    return pseudo_devset(devset.corpus, some, recipe.dev_pool, recipe.seed, are_held_out=recipe.hold_out)


def _shares(share: float, companions: int) -> list[float]:
    """Share out what companions count in all: of two, the token table counts twice what the words do."""
    if not share:
        return [1.0] + [0.0] * companions
    weights = [2, 1] if companions == 2 else [1] * companions
    return [1 - share, *(share * weight / sum(weights) for weight in weights)]
