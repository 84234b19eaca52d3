"""PEFA (Chang et al., WSDM 2024): labeled queries used without training, through their nearest neighbours.

With unit vectors q of a query, p of a document, and x_j of the query of a labeled pair, Y_jp = 1 where it answers x_j:

    score(q, p) = λ·(q·p) + (1 − λ)·Σ_{j ∈ N} (q·x_j)·Y_jp

- **XL** takes the k labeled queries nearest to q for N, and divides the sum by k: a second index, of the queries.
- **XS** takes the labeled queries of p for N. The sum is then an inner product with one vector, so they are added up
  once, to unit length, and the index is as small as before: p' = λ·p + (1 − λ)·unit(Σ_j Y_jp·x_j).

As in the authors' code, a document's own text counts among the queries that it answers; without that, a document
nobody asked for yet would only lose. The authors set λ for each collection, and k too (16 and 64), and add queries that
a docT5query wrote; here dev queries choose λ, k is 16, and the labeled queries are all there are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hce.encoding.corpus_vectors import encode_corpus
from hce.encoding.encoder import Encoder
from hce.evaluation.evaluate import DenseSearcher, Searcher, evaluate
from hce.evaluation.runs import Scored
from hce.search.engine import nearest, score_blocks
from hce.training.pairs import LabeledPairs, labeled_devset
from hce_lab.comparison.task import Built, Task, best_hits

LAMBDAS = (0.1, 0.3, 0.5, 0.7, 0.9)
NEIGHBOURS = 16  # the authors' k for NQ320k
METRIC = "nDCG@10"


@dataclass(frozen=True)
class NeighbourSearcher:
    """PEFA-XL: documents scored by their vectors and by what the nearest known queries were answered with.

    Attributes:
        encoder: encodes the queries that are asked.
        ids: of the documents.
        documents: vectors of the documents, of shape (N, n).
        queries: vectors x_j of the known queries, of shape (J, n).
        answers: for each x_j, the positions of the documents that answer it.
        mix: λ.
    """

    encoder: Encoder
    ids: Sequence[str]
    documents: np.ndarray
    queries: np.ndarray
    answers: Sequence[np.ndarray]
    mix: float

    def search(self, queries: Sequence[str], k: int) -> list[list[Scored]]:
        """Find the k best documents of each query, best first, equal ones in order."""
        asked = self.encoder.encode(queries, "query")
        found: list[list[Scored]] = []
        for rows, products in score_blocks(asked, self.documents):
            found += [best_hits(self.ids, scores, k) for scores in self.mixed(asked[rows], products)]
        return found

    def mixed(self, asked: np.ndarray, products: np.ndarray) -> np.ndarray:
        """Turn inner products of query vectors (Q, n) with all documents, of shape (Q, N), into scores, in place."""
        products *= self.mix
        neighbours, similarities = nearest(asked, self.queries, NEIGHBOURS)
        weight = (1 - self.mix) / neighbours.shape[1]
        for row, (values, positions) in enumerate(zip(similarities, neighbours.tolist(), strict=True)):
            for value, position in zip(values, positions, strict=True):
                products[row, self.answers[position]] += weight * value
        return products


def averaged(documents: np.ndarray, queries: np.ndarray, answers: Sequence[np.ndarray], mix: float) -> np.ndarray:
    """Mix each document's vector with the mean direction of its own and its queries', of shape (N, n): PEFA-XS."""
    sums = documents.astype(np.float64)
    for vector, positions in zip(queries, answers, strict=True):
        sums[positions] += vector
    directions = sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-12)
    return (mix * documents + (1 - mix) * directions).astype(np.float32)


class _Known(NamedTuple):
    """The start encoder, its vectors of documents and labeled queries, and what those queries were answered with."""

    encoder: Encoder
    documents: np.ndarray
    queries: np.ndarray
    answers: list[np.ndarray]
    indexing_seconds: float


def build_pefa_xs(task: Task) -> Built:
    """Make one index, of documents moved towards their queries."""
    known = _known(task)

    def with_mix(mix: float) -> Searcher:
        vectors = averaged(known.documents, known.queries, known.answers, mix)
        return DenseSearcher(known.encoder, task.corpus.ids, vectors)

    return _chosen(task, known, with_mix, known.documents.nbytes)


def build_pefa_xl(task: Task) -> Built:
    """Make two indexes, of documents and of queries; the documents' own texts are among the queries."""
    known = _known(task)
    queries = np.concatenate([known.queries, known.documents])
    answers = [*known.answers, *np.arange(len(known.documents))[:, None]]

    def with_mix(mix: float) -> Searcher:
        return NeighbourSearcher(known.encoder, task.corpus.ids, known.documents, queries, answers, mix)

    return _chosen(task, known, with_mix, known.documents.nbytes + queries.nbytes)


def _known(task: Task) -> _Known:
    pairs, dev = task.labeled
    labeled = LabeledPairs(task.corpus, *pairs)
    encoder = task.start_encoder(labeled_devset(task.corpus, *dev, task.recipe.dev_pool, task.recipe.seed))
    start = time.perf_counter()
    documents, queries = encode_corpus(encoder, task.corpus), encoder.encode(labeled.texts, "query")
    return _Known(encoder, documents, queries, labeled.positives, time.perf_counter() - start)


def _chosen(task: Task, known: _Known, with_mix: Callable[[float], Searcher], index_bytes: int) -> Built:
    """Choose the λ that is best on dev; that search is all the training there is."""
    dev = task.labeled[1]
    start = time.perf_counter()
    on_dev = {mix: evaluate(with_mix(mix), *dev, [METRIC]).means[METRIC] for mix in LAMBDAS}
    best = max(LAMBDAS, key=on_dev.__getitem__)
    seconds = time.perf_counter() - start
    return Built(with_mix(best), seconds, known.indexing_seconds, index_bytes, {"mix": best, "dev": on_dev[best]})
