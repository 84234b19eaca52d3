"""What words say of a document's neighbours: a soft target, for a table to learn from, over real documents.

A pseudo-query's own document is one hard answer; the documents near that one may answer it too, some more than others.
BM25 knows which, and knows it better than a table does. So the table learns to rank the document and its neighbours as
BM25 does. That is the idea of GPL without a language model, and needs a tree: the neighbours of all documents are
found by walking down, each time the tree is grown anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from hce.data.corpus import Corpus
from hce.data.terms import inverse_document_frequency, terms
from hce.encoding.word_table import count_matrix
from hce.progress import counted, progress_bar
from hce.training.losses import Taught
from hce.training.pairs import Batch
from hce.tree.hierarchy import Hierarchy

BM25_K1, BM25_B = 1.2, 0.75  # Lucene's
BEAM = 2  # leaves that are looked into for a document's neighbours
TEMPERATURE = 0.1  # of BM25's scores, the best of which is 1


def neighbours_of(tree: Hierarchy, vectors: np.ndarray, count: int, held_out: np.ndarray) -> np.ndarray:
    """Find the documents nearest to each document through the tree.

    Args:
        tree: the tree of all documents.
        vectors: the documents' vectors, of shape (N, n).
        count: how many neighbours at most.
        held_out: positions of documents that are nobody's neighbours.

    Returns:
        Positions of shape (N, count), −1 where there are no more; a document is no neighbour of itself.
    """
    leaves = tree.walk(vectors, BEAM)[-1]
    found = tree.closest_children(tree.depth - 1, leaves, vectors, count + 1, vectors)  # (N, count + 1)
    found[(found == np.arange(len(found))[:, None]) | np.isin(found, held_out)] = -1
    order = np.argsort(found < 0, axis=1, kind="stable")  # those that are left come first
    return np.take_along_axis(found, order, axis=1)[:, :count]


class WordCounts(NamedTuple):
    """Words of texts: how often each is in each, of shape (texts, words), and how many words each text has."""

    counts: sparse.csr_matrix
    lengths: np.ndarray


class WordTeacher:
    """BM25 over the words of a corpus, for any pairs of a query and a document of it.

    Args:
        corpus: the documents.
        language: whose endings are cut off.
    """

    def __init__(self, corpus: Corpus, language: str) -> None:
        self.language = language
        self.column_of_term: dict[str, int] = {}
        with progress_bar("words of neighbours", len(corpus), "documents") as advance:
            bags = [Counter(terms(text, language)) for text in counted(corpus.texts(), advance)]
        for term in chain.from_iterable(bags):
            self.column_of_term.setdefault(term, len(self.column_of_term))
        self.documents = self._counted(bags)
        frequency = np.bincount(self.documents.counts.indices, minlength=len(self.column_of_term))
        self.idf = inverse_document_frequency(frequency, len(bags)).astype(np.float32)
        self.mean_length = max(1.0, float(self.documents.lengths.mean()))

    def scores(self, batch: Batch, candidates: np.ndarray) -> np.ndarray:
        """Score the documents of a batch and candidates beside them by the batch's queries.

        The words of a query that was cut out of its document do not count there.

        Args:
            batch: pseudo-queries and their documents.
            candidates: positions of shape (B, S).

        Returns:
            Scores of shape (B, 1 + S): of each query's own document, then of its candidates.
        """
        queries = self._counted(Counter(terms(text, self.language)) for text in batch.queries)
        count = len(batch.queries)
        cut = np.zeros(count, dtype=bool) if batch.cut is None else batch.cut  # (B,)
        own_scores = self._bm25(queries, np.arange(count), batch.positions, cut.astype(np.float32))
        rows = np.repeat(np.arange(count), candidates.shape[1])
        other_scores = self._bm25(queries, rows, candidates.ravel(), np.zeros(len(rows), dtype=np.float32))
        return np.concatenate([own_scores[:, None], other_scores.reshape(candidates.shape)], axis=1)

    def _bm25(self, queries: WordCounts, rows: np.ndarray, positions: np.ndarray, cut: np.ndarray) -> np.ndarray:
        """Score documents by queries, pair by pair; where `cut` is 1, as if the document had not the query's words.

        Args:
            queries: the words of the queries.
            rows: which query each pair has, of shape (pairs,).
            positions: which document each pair has, of shape (pairs,).
            cut: 1 where the query's words are taken off the document's, once each time that the query has them; 0
                where the document counts as it is; of shape (pairs,).

        Returns:
            Scores of shape (pairs,).
        """
        query_counts = queries.counts[rows]  # (pairs, words)
        shared = self.documents.counts[positions].multiply(query_counts > 0).tocsr()
        taken = shared.multiply(
            query_counts
        ).tocsr()  # both have the same pattern, and this the query's counts times theirs
        frequency = shared.data - (taken.data / shared.data) * np.repeat(cut, np.diff(shared.indptr))
        lengths = self.documents.lengths[positions] - cut * queries.lengths[rows]
        norm = BM25_K1 * (1 - BM25_B + BM25_B * np.maximum(lengths, 0) / self.mean_length)
        frequency = np.maximum(frequency, 0)
        weights = self.idf[shared.indices] * frequency / (frequency + np.repeat(norm, np.diff(shared.indptr)))
        return np.asarray(sparse.csr_matrix((weights, shared.indices, shared.indptr), shape=shared.shape).sum(axis=1))[
            :, 0
        ]

    def _counted(self, bags: Iterable[Counter[str]]) -> WordCounts:
        """Count the known words of some texts."""
        matrix = count_matrix(bags, self.column_of_term, np.float32)
        matrix.sort_indices()
        return WordCounts(matrix, np.asarray(matrix.sum(axis=1), dtype=np.float32)[:, 0])


def taught_by(
    teacher: WordTeacher, batch: Batch, neighbours: np.ndarray, vectors: np.ndarray, device: torch.device
) -> Taught:
    """Return the neighbours of a batch's documents with what the teacher thinks of them.

    Args:
        teacher: knows the words.
        batch: pseudo-queries.
        neighbours: of every document of the corpus, see `neighbours_of`.
        vectors: of every document, as clustering saw them.
        device: where to put what is returned.
    """
    candidates = neighbours[batch.positions]  # (B, S)
    none = candidates < 0
    candidates = np.where(none, batch.positions[:, None], candidates)
    scores = teacher.scores(batch, candidates)
    scores = scores / np.maximum(scores.max(axis=1, keepdims=True), 1e-6) / TEMPERATURE

    def on_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Taught(on_device(np.asarray(vectors[candidates])), on_device(scores), on_device(none))
