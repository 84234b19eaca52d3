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
from typing import NamedTuple

import numpy as np

from hce.data.corpus import Corpus
from hce.encoding.encoder import Encoder
from hce.encoding.word_table import WordTable
from hce.errors import InputError
from hce.processes import of_the_first
from hce.training.heldout import DevSet, DevVectors, mean_over_kinds, means, side_by_side
from hce.training.weights import is_clear_gain

logger = logging.getLogger(__name__)

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)
"""What companions may count in all, to choose from."""
MOST_WITHOUT_LABELS = 0.3
"""Pseudo-queries are made of the documents' own words, and so call more of the words good than people do."""
LEAST_TO_CENTRE = 100  # queries that a mean is taken of


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
        measured: the companions as they may be measured, where those to be used have seen the held-out documents.
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
            scores = dev.scores_of(side_by_side(parts, _shares(share, len(companions)), centres))
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


def _shares(share: float, companions: int) -> list[float]:
    """Share out what companions count in all: of two, the token table counts twice what the words do."""
    weights = [2, 1] if companions == 2 else [1] * companions
    return [1 - share, *(share * weight / sum(weights) for weight in weights)]
