"""PEFA (Chang et al., WSDM 2024): labeled queries used without training, as nearest neighbors.

Let q, p and x_j be the unit vectors of a query, a document and a labeled query, and Y_jp = 1 if p answers x_j:

    score(q, p) = λ·(q·p) + (1 − λ)·Σ_{j ∈ N} (q·x_j)·Y_jp

- **XL**: N has the k labeled queries nearest to q, and the sum is divided by k. It needs a second index, of queries.
- **XS**: N has the labeled queries of p. The sum is then an inner product with one vector, which is computed once and
  scaled to unit length, so the index does not grow: p' = λ·p + (1 − λ)·unit(Σ_j Y_jp·x_j).

As in the authors' code, a document's own text counts as one of its queries; otherwise a document without labels would
only lose. The authors set λ and k (16 and 64) for each collection, and add queries written by docT5query. Here dev
queries choose λ, k is 16, and only labeled queries are used.
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
    """PEFA-XL: documents scored by their vectors and by the answers of known queries.

    Attributes:
        encoder: encodes the queries.
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
        """Find the k best documents for each query, best first; ties in order."""
        asked = self.encoder.encode(queries, "query")
        found: list[list[Scored]] = []
        for rows, products in score_blocks(asked, self.documents):
            found += [best_hits(self.ids, scores, k) for scores in self.mixed(asked[rows], products)]
        return found

    def mixed(self, asked: np.ndarray, products: np.ndarray) -> np.ndarray:
        """Turn the inner products of queries and documents (Q, N) into scores, in place."""
        products *= self.mix
        neighbours, similarities = nearest(asked, self.queries, NEIGHBOURS)
        weight = (1 - self.mix) / neighbours.shape[1]
        for row, (values, positions) in enumerate(zip(similarities, neighbours.tolist(), strict=True)):
            for value, position in zip(values, positions, strict=True):
                products[row, self.answers[position]] += weight * value
        return products


def averaged(documents: np.ndarray, queries: np.ndarray, answers: Sequence[np.ndarray], mix: float) -> np.ndarray:
    """Mix document vectors (N, n) with the mean of their queries and themselves (XS)."""
    sums = documents.astype(np.float64)
    for vector, positions in zip(queries, answers, strict=True):
        sums[positions] += vector
    directions = sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-12)
    return (mix * documents + (1 - mix) * directions).astype(np.float32)


class _Known(NamedTuple):
    """The untrained encoder, its vectors of documents and queries, and their answers."""

    encoder: Encoder
    documents: np.ndarray
    queries: np.ndarray
    answers: list[np.ndarray]
    indexing_seconds: float


def build_pefa_xs(task: Task) -> Built:
    """Build one index, of documents moved toward their queries."""
    known = _known(task)

    def with_mix(mix: float) -> Searcher:
        vectors = averaged(known.documents, known.queries, known.answers, mix)
        return DenseSearcher(known.encoder, task.corpus.ids, vectors)

    return _chosen(task, known, with_mix, known.documents.nbytes)


def build_pefa_xl(task: Task) -> Built:
    """Build indexes of documents and of queries, which include the documents' texts."""
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
    """Choose the λ that is best on dev; this is the only training."""
    dev = task.labeled[1]
    start = time.perf_counter()
    on_dev = {mix: evaluate(with_mix(mix), *dev, [METRIC]).means[METRIC] for mix in LAMBDAS}
    best = max(LAMBDAS, key=on_dev.__getitem__)
    seconds = time.perf_counter() - start
    return Built(with_mix(best), seconds, known.indexing_seconds, index_bytes, {"mix": best, "dev": on_dev[best]})
