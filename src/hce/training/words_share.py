"""How much BM25 counts beside the vectors in a hybrid search, as labelled queries say.

Questions to code want less of it than claims do. Pseudo-queries are made of the documents' own words and would say
nothing of this.
"""

from __future__ import annotations

import numpy as np

from hce.encoding.encoder import Encoder
from hce.evaluation.evaluate import fused_search
from hce.search.fusion import CANDIDATE_COUNT
from hce.search.words import Words
from hce.training.heldout import DevSet, ndcg_of_rankings

WORDS_SHARES = tuple(tenths / 10 for tenths in range(9))
"""What BM25 may count in a hybrid search, to choose from; beyond .8 meaning would settle ties only."""


def best_words_share(devset: DevSet, encoder: Encoder, vectors: np.ndarray, language: str) -> float:
    """Return the share of BM25 in a hybrid score that is best on labelled queries, the smallest of equal ones.

    Args:
        devset: its queries are labelled.
        encoder: encodes the queries.
        vectors: of the whole corpus by this encoder, of shape (N, n).
        language: whose endings are cut off.
    """
    queries = devset.panel[0]
    pool_vectors = np.asarray(vectors[devset.pool])
    words = Words.new(language)
    words.add((place, devset.corpus[position].full_text) for place, position in enumerate(devset.pool.tolist()))
    query_vectors = encoder.encode(queries.texts, "query")
    fused = fused_search(queries.texts, query_vectors, pool_vectors, words, CANDIDATE_COUNT, words_share=0.5)

    def measure(share: float) -> float:
        # Halves of both kinds are what `fused` has; their order by another share is that of the weighted sum.
        sums = [((1 - share) * each.from_meaning + share * each.from_words).round(6) for each in fused]
        ranked = [each.numbers[np.lexsort((each.numbers, -total))] for each, total in zip(fused, sums, strict=True)]
        return float(ndcg_of_rankings(ranked, queries.answers).mean())

    return max(WORDS_SHARES, key=measure)
