"""Companions: what stands beside an encoder in one vector, learnt from the corpus in the encoder's place.

A transformer is strong and slow to train, and without labels training gains it little. A token table of the same
tokenizer is weak and trained in a minute; a table of the corpus's own words is fitted in seconds. Beside the
transformer, which stays as it is, both tell documents apart that the transformer has never learnt to (docs/LOG.md).
How much they count is chosen on held-out queries, and 0, the encoder alone, is among the choices. With companions
the transformer's vectors are centred: that alone changes little, and keeps companions from doing harm where the
transformer is far ahead of them. Where held-out queries are labelled, they choose too how much BM25 counts beside the
vectors in a hybrid search: questions to code want less of it than claims do.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hce.data.corpus import Corpus
from hce.encoding.corpus_vectors import encode_corpus, encode_in_shares
from hce.encoding.encoder import Encoder
from hce.encoding.tables import joined_rows
from hce.encoding.word_table import WordTable
from hce.errors import InputError
from hce.evaluation.evaluate import fused_search
from hce.processes import of_the_first
from hce.search.fusion import CANDIDATES
from hce.search.words import Words
from hce.training.co_training import Learnt, cluster_corpus
from hce.training.heldout import (
    DevSet,
    DevVectors,
    joined_dev_vectors,
    means,
    ndcg_of_rankings,
    pseudo_dev,
)
from hce.training.history import mean_over_kinds
from hce.training.recipe import TRANSFORMER, Recipe
from hce.training.weights import is_clear_gain

logger = logging.getLogger(__name__)

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)
"""What companions may count in all, to choose from."""
MOST_WITHOUT_LABELS = 0.3
"""Pseudo-queries are made of the documents' own words, and so call more of the words good than people do."""
WORDS_SHARES = tuple(tenths / 10 for tenths in range(9))
"""What BM25 may count in a hybrid search, to choose from; beyond .8 meaning would settle ties only."""
LEAST_TO_CENTRE = 100  # queries that a mean is taken of


def with_companions(
    corpus: Corpus, encoder: Encoder, learnt: Learnt, tables: list[Encoder], place: Path | None, *, progress: bool
) -> Learnt:
    """Put the token tables that were trained, and the corpus's words, beside the encoder, where dev prefers that.

    The words to be measured are learnt without the documents that held-out queries were made of.
    """
    result, recipe = learnt.result, learnt.result.recipe
    first = encoder if recipe.train == "companion" else result.encoder
    dev = learnt.dev if first is result.encoder else _few_queries(learnt.dev, result.held_out, recipe)
    vectors = encode_corpus(first, corpus, place and place / "encoded", progress=progress and not first.is_static)

    def words(without: np.ndarray) -> list[Encoder]:
        return words_of(corpus, first, language=recipe.language, without=without, seed=recipe.seed)

    all_words, nobody = words(np.empty(0, dtype=np.int64)), not len(result.held_out)
    companions, measured = [*tables, *all_words], [*tables, *(all_words if nobody else words(result.held_out))]
    if len(companions) != len(measured):  # so few documents that some may not be left out
        companions = measured = tables
    chosen = accompany(first, companions, dev, measured=measured, vectors=vectors)
    is_learner = first is result.encoder
    vectors = _vectors_beside(corpus, chosen.encoder, vectors)
    share = best_words_share(dev, chosen.encoder, vectors, recipe.language) if dev.is_labelled else None
    if is_learner and chosen.encoder is first:
        return learnt._replace(result=replace(result, words_share=share))
    before, after = learnt.before if is_learner else chosen.before, chosen.after
    stages = dict(result.stages) if is_learner else {}
    if chosen.encoder is not first:
        stages["companions"] = means(after)
    result = replace(
        result,
        encoder=chosen.encoder,
        hierarchy=cluster_corpus(vectors, recipe, first, recipe.epochs + 1),
        mix=0.0 if chosen.encoder is first else result.mix,
        before=means(before),
        after=means(after),
        metric=dev.name,
        words_share=share,
        stages=stages,
    )
    return Learnt(result, dev, before, after)


class Accompanied(NamedTuple):
    """An encoder with the companions that held-out queries call good for it.

    Attributes:
        encoder: the encoder with its companions, or the encoder alone.
        before: the score of each held-out query of each kind by the encoder alone.
        after: the same, by what is returned.
    """

    encoder: Encoder
    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]


def accompany(
    encoder: Encoder,
    companions: Sequence[Encoder],
    dev: DevSet,
    *,
    measured: Sequence[Encoder] | None = None,
    vectors: np.ndarray | None = None,
) -> Accompanied:
    """Put companions beside an encoder, with the share that is best on held-out queries.

    As for the mix of weights, a better mean on labelled queries is enough, and pseudo-queries need a clear gain.

    Args:
        encoder: stays as it is.
        companions: a token table, the words of the corpus, or both in that order; none gives the encoder alone.
        dev: what decides.
        measured: the companions fitted without the held-out documents, by which the share is chosen; by default
            `companions`, which are what is used.
        vectors: the vectors of the whole corpus by the encoder, if someone has them already.
    """
    own = dev.encode(encoder, vectors)
    before = best = dev.scores_of(own)
    chosen = 0.0
    centres = None if encoder.is_table else _centres(own, vectors)
    if companions:
        parts = [own, *(dev.encode(each, zeros=True) for each in (companions if measured is None else measured))]
        for share in SHARES:
            if share > MOST_WITHOUT_LABELS and not dev.is_labelled:
                break
            scores = dev.scores_of(joined_dev_vectors(parts, _shares(share, len(companions)), centres))
            if mean_over_kinds(means(scores)) > mean_over_kinds(means(best)):
                chosen, best = share, scores
        if not dev.is_labelled and not is_clear_gain(before, best):
            chosen, best = 0.0, before
        chosen = of_the_first({"share": chosen}, encoder.device)["share"]
    if not chosen:
        return Accompanied(encoder, before, before)
    return Accompanied(encoder.beside(companions, _shares(chosen, len(companions)), centres), before, best)


def _centres(own: DevVectors, vectors: np.ndarray | None) -> np.ndarray | None:
    """Return the mean of held-out queries, each kind counting alike, and that of documents, of shape (2, n).

    The mean of a few queries would be about those; then there is none.
    """
    if sum(map(len, own.queries)) < LEAST_TO_CENTRE:
        return None
    query = np.mean([kind.mean(axis=0) for kind in own.queries], axis=0)
    return np.stack([query, (own.pool if vectors is None else vectors).mean(axis=0, dtype=np.float64)])


def words_of(corpus: Corpus, encoder: Encoder, *, language: str, without: np.ndarray, seed: int) -> list[Encoder]:
    """Learn the corpus's own words; none, where its documents do not share enough of them.

    Args:
        corpus: the documents.
        encoder: whose companion the words become: they compute on the same device.
        language: whose endings are cut off.
        without: positions of documents that are not to be learnt from.
        seed: same seed, same result.
    """
    try:
        table = WordTable.fit(corpus, language=language, without=without, seed=seed)
    except InputError as error:
        logger.warning("%s; the encoder gets no words of the corpus", error)
        return []
    return [Encoder.of_words(table, device=encoder.device)]


def recipe_of_table(corpus: Corpus, recipe: Recipe) -> Recipe:
    """Return how a companion is trained beside a transformer that is trained too: measured by the same documents."""
    settings = {name: getattr(recipe, name) for name in ("mode", "seed", "dev_queries", "language")}
    return Recipe.for_encoder(static=True, documents=len(corpus), train="encoder", precision="float32", **settings)


def _vectors_beside(corpus: Corpus, encoder: Encoder, vectors: np.ndarray) -> np.ndarray:
    """Return the corpus's vectors by an encoder with companions, given those of its first part, of shape (N, n₁)."""
    if len(encoder.shares) == 1:
        return vectors
    centre, companions = None if encoder.centres is None else encoder.centres[1], encoder.parts[1:]

    def encode(rows: np.ndarray, texts: list[str]) -> np.ndarray:
        others = [each.encode(texts, zeros=True) for each in companions]
        return joined_rows([vectors[rows], *others], encoder.shares, centre)

    return encode_in_shares(corpus, encode, encoder.dim, encoder.device)


def _few_queries(dev: DevSet, held_out: np.ndarray, recipe: Recipe) -> DevSet:
    """Return a dev set that a transformer can encode in a fraction of the time that the corpus takes."""
    few = TRANSFORMER["dev_queries"] if recipe.dev_queries == Recipe.dev_queries else recipe.dev_queries
    if dev.is_labelled or len(held_out) <= few:
        return dev
    some = np.sort(np.random.default_rng([recipe.seed, 11]).choice(held_out, few, replace=False))
    return pseudo_dev(dev.corpus, some, recipe.dev_pool, recipe.seed)


def _shares(share: float, companions: int) -> list[float]:
    """Share out what companions count in all: of two, the token table counts twice what the words do."""
    weights = [2, 1] if companions == 2 else [1] * companions
    return [1 - share, *(share * weight / sum(weights) for weight in weights)]


def best_words_share(dev: DevSet, encoder: Encoder, vectors: np.ndarray, language: str) -> float:
    """Return the share of words that is best on labelled queries, the smallest of equal ones.

    Args:
        dev: its queries are labelled.
        encoder: encodes the queries.
        vectors: of the whole corpus by this encoder, of shape (N, n).
        language: whose endings are cut off.
    """
    queries = dev.panel[0]
    pool = np.asarray(vectors[dev.pool])
    words = Words.new(language)
    words.add((place, dev.corpus[position].full_text) for place, position in enumerate(dev.pool.tolist()))
    asked = encoder.encode(queries.texts, "query")
    fused = fused_search(queries.texts, asked, pool, words, CANDIDATES, words_share=0.5)

    def measure(share: float) -> float:
        # Halves of both kinds are what `fused` has; their order by another share is that of the weighted sum.
        sums = [((1 - share) * each.from_meaning + share * each.from_words).round(6) for each in fused]
        ranked = [each.numbers[np.lexsort((each.numbers, -total))] for each, total in zip(fused, sums, strict=True)]
        return float(ndcg_of_rankings(ranked, queries.answers).mean())

    return max(WORDS_SHARES, key=measure)
