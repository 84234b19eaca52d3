"""How much words count in a hybrid search, by labelled queries: questions to code want fewer of them than claims do."""

from __future__ import annotations

from functools import partial

import numpy as np

from hce.encoding.encoder import Encoder
from hce.search.exact import nearest
from hce.search.fusion import CANDIDATES, search_both
from hce.search.words import Words
from hce.training.heldout import DevSet, ndcg_of_rankings

SHARES = tuple(tenths / 10 for tenths in range(9))
"""Of words, to choose from; beyond .8 meaning would settle ties only."""


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
    fused = [
        search_both(
            *(words, text),
            numbers=numbers,
            cosines=cosines,
            cosines_at=partial(_cosines, pool, vector),
            candidates=CANDIDATES,
            words_share=0.5,
        )
        for text, vector, numbers, cosines in zip(queries.texts, asked, *nearest(asked, pool, CANDIDATES), strict=True)
    ]

    def measure(share: float) -> float:
        # Halves of both kinds are what `fused` has; their order by another share is that of the weighted sum.
        sums = [((1 - share) * each.meaning + share * each.words).round(6) for each in fused]
        ranked = [each.numbers[np.lexsort((each.numbers, -total))] for each, total in zip(fused, sums, strict=True)]
        return float(ndcg_of_rankings(ranked, queries.answers).mean())

    return max(SHARES, key=measure)


def _cosines(pool: np.ndarray, query: np.ndarray, places: np.ndarray) -> np.ndarray:
    return np.asarray(pool[places]) @ query
