"""Negatives: the documents that a query is contrasted with, in addition to its batch. One class per way of choosing.

The masks of `hce.training.losses` decide which of the chosen documents are false negatives. A document's neighbors and
their BM25 scores are here too: a table learns to rank neighbors as BM25 does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from hce.data.corpus import Corpus
from hce.data.text import inverse_document_frequency, terms
from hce.encoding.tables import count_matrix
from hce.progress import counted, progress_bar
from hce.search.engine import nearest
from hce.training.losses import TeacherScores
from hce.training.pairs import Batch
from hce.training.recipe import Recipe, Sampling
from hce.tree.hierarchy import Hierarchy

MINED_FROM = 20  # mined negatives are drawn from this many nearest wrong documents
BM25_K1, BM25_B = 1.2, 0.75  # Lucene's
BEAM = 2  # leaves searched for a document's neighbors
TEMPERATURE = 0.1  # of BM25's scores, after scaling the best one to 1


class Chosen(NamedTuple):
    """The negatives of a batch: positions (B, S), and vectors (B, S, n).

    The position of the query's own document stands for "none"; the masks drop it.
    """

    positions: np.ndarray
    vectors: Tensor


@dataclass(frozen=True)
class Negatives:
    """A way of choosing negatives: `draw`, then `texts` to encode, then `choose`. The base class chooses none."""

    corpus: Corpus
    tree: Hierarchy  # the current tree
    vectors: np.ndarray  # the documents' vectors that the tree was grown from, (N, n); may be a memory map
    held_out: np.ndarray  # positions of documents kept for measuring; as negatives, they would only be pushed away
    loss_levels: int  # M, how many levels have a level loss; each of the L − M document losses gets its own negatives
    recipe: Recipe

    def draw(self, batch: Batch, seed: Sequence[int]) -> np.ndarray:
        """Draw positions (B, S), or random numbers for `choose`, before encoding.

        Every process draws the same numbers for the entire batch, then chooses for its own rows.
        """
        return np.empty((len(batch.positions), 0), dtype=np.int64)

    def texts(self, drawn: np.ndarray) -> list[str]:
        """List the texts to encode along with the batch, row by row."""
        return []

    def choose(self, batch: Batch, drawn: np.ndarray, queries: Tensor, encoded: Tensor) -> Chosen:
        """Choose negatives, given the vectors of queries (B, n) and of `texts`."""
        return Chosen(drawn, torch.from_numpy(np.asarray(self.vectors[drawn])).to(queries.device))  # no gradient


class SiblingNegatives(Negatives):
    """Documents that share a node with the query's document, with the vectors that clustering used: almost free."""

    def draw(self, batch: Batch, seed: Sequence[int]) -> np.ndarray:
        """Draw documents that share a node with each document; none without a tree.

        This is Sample(p) of Eq. 6. The negatives of level t, from M + 1 to L, come from under the document's node at
        level t − 1; the columns of level M + 1 come first. The query's own document replaces held-out documents and
        missing ones.
        """
        if not self.recipe.tree:
            return super().draw(batch, seed)
        rng, own = np.random.default_rng(seed), batch.positions
        levels = range(self.loss_levels + 1, self.tree.depth + 1)
        drawn = [self.tree.sample_siblings(own, self.recipe.negative_count, rng, level) for level in levels]
        positions = np.concatenate(drawn, axis=1)
        return np.where((positions < 0) | np.isin(positions, self.held_out), own[:, None], positions)


class FreshSiblingNegatives(SiblingNegatives):
    """The documents of `SiblingNegatives`, encoded again with gradients, as in the paper."""

    def texts(self, drawn: np.ndarray) -> list[str]:
        """List the texts of all that were drawn."""
        return [self.corpus[position].full_text for position in drawn.ravel().tolist()]

    def choose(self, batch: Batch, drawn: np.ndarray, queries: Tensor, encoded: Tensor) -> Chosen:
        """Take all drawn documents with their new vectors."""
        return Chosen(drawn, encoded.reshape(*drawn.shape, queries.shape[1]))


class MinedNegatives(Negatives):
    """ANCE: wrong documents among those nearest to the query, by the last encoded vectors."""

    @property
    def count(self) -> int:
        """How many negatives each query gets."""
        return self.recipe.negative_count * (self.tree.depth - self.loss_levels)

    def looked_for(self, batch: Batch) -> int:
        """Return how many documents to find, with spares for right and held-out ones."""
        return min(max(MINED_FROM, self.count) + batch.known.shape[1] + len(self.held_out), len(self.vectors))

    def nearest_documents(self, queries: np.ndarray, count: int) -> np.ndarray:
        """Return the nearest documents to each query, (B, count), −1 for none."""
        return nearest(queries, self.vectors, count)[0]

    def draw(self, batch: Batch, seed: Sequence[int]) -> np.ndarray:
        """Draw a random number for each document to find, (B, found); the lowest win."""
        rng = np.random.default_rng([self.recipe.seed, int(batch.positions[0]), int(batch.positions.sum())])
        return rng.random((len(batch.positions), self.looked_for(batch)))

    def choose(self, batch: Batch, drawn: np.ndarray, queries: Tensor, encoded: Tensor) -> Chosen:
        """Choose some of the nearest wrong documents at random, for each document loss."""
        found = self.nearest_documents(queries.float().cpu().numpy(), self.looked_for(batch))
        right = (found[:, :, None] == batch.known[:, None, :]).any(axis=2)
        wrong = ~right & ~np.isin(found, self.held_out) & (found >= 0)
        wrong &= np.cumsum(wrong, axis=1) <= max(MINED_FROM, self.count)
        order = np.argsort(np.where(wrong, drawn, 2.0), axis=1)[:, : self.count]
        chosen = np.where(wrong, found, batch.positions[:, None])
        return super().choose(batch, np.take_along_axis(chosen, order, axis=1), queries, encoded)


class NearNegatives(MinedNegatives):
    """Wrong documents from the leaves where the query's walk down the tree ends: cheaper than mining all."""

    beam = 4  # leaves to search

    def looked_for(self, batch: Batch) -> int:
        """Return how many documents to find; held-out ones are too few to need spares."""
        return max(MINED_FROM, self.count) + batch.known.shape[1]

    def nearest_documents(self, queries: np.ndarray, count: int) -> np.ndarray:
        """Return the nearest documents under the leaves that the walk reaches."""
        leaves = self.tree.walk(queries, self.beam)[-1]
        return self.tree.closest_children(self.tree.depth - 1, leaves, queries, count, self.vectors)


NEGATIVES: dict[Sampling, type[Negatives]] = {
    "siblings": SiblingNegatives,
    "fresh-siblings": FreshSiblingNegatives,
    "near": NearNegatives,
    "mined": MinedNegatives,
    "none": Negatives,
}


def way_of_choosing(recipe: Recipe, *, has_supervised_pairs: bool) -> type[Negatives]:
    """Return the recipe's way of choosing negatives.

    By default, with labels, queries are contrasted with the wrong documents that they would find. Without labels, the
    documents near a pseudo-query are mostly as right as its own, so random siblings do less harm.
    """
    if recipe.negatives == "auto":
        return NearNegatives if has_supervised_pairs and recipe.tree else SiblingNegatives
    return NEGATIVES[recipe.negatives]


# ------------------------------------------------------------------------------------------------- neighbors and words


def neighbors_of(tree: Hierarchy, vectors: np.ndarray, count: int, held_out: np.ndarray) -> np.ndarray:
    """Find, through the tree, each document's nearest ones that are not held out.

    Return positions of shape (N, count), −1 where there are no more, without the document itself.
    """
    leaves = tree.walk(vectors, BEAM)[-1]
    found = tree.closest_children(tree.depth - 1, leaves, vectors, count + 1, vectors)  # (N, count + 1)
    found[(found == np.arange(len(found))[:, None]) | np.isin(found, held_out)] = -1
    order = np.argsort(found < 0, axis=1, kind="stable")  # found ones first
    return np.take_along_axis(found, order, axis=1)[:, :count]


class WordTeacher:
    """BM25 scores for any pairs of a query and a document of the corpus."""

    def __init__(self, corpus: Corpus, language: str) -> None:
        self.language = language
        self.column_of_term: dict[str, int] = {}
        with progress_bar("words of neighbours", len(corpus), "documents") as advance:
            bags = [Counter(terms(text, language)) for text in counted(corpus.texts(), advance)]
        for term in chain.from_iterable(bags):
            self.column_of_term.setdefault(term, len(self.column_of_term))
        self.documents, self.lengths = self._counted(bags)
        frequency = np.bincount(self.documents.indices, minlength=len(self.column_of_term))
        self.idf = inverse_document_frequency(frequency, len(bags)).astype(np.float32)
        self.mean_length = max(1.0, float(self.lengths.mean()))

    def scores(self, batch: Batch, candidates: np.ndarray) -> np.ndarray:
        """Score each query's document, then its `candidates` (B, S): (B, 1 + S).

        If a query was cut out of its document, the document is scored without the query's words.
        """
        queries, query_lengths = self._counted(Counter(terms(text, self.language)) for text in batch.queries)
        positions = np.concatenate([batch.positions[:, None], candidates], axis=1)  # (B, 1 + S)
        is_cut = np.zeros(positions.shape, dtype=np.float32)
        is_cut[:, 0] = 0 if batch.cut is None else batch.cut
        rows, cut = np.repeat(np.arange(len(positions)), positions.shape[1]), is_cut.ravel()
        query_counts = queries[rows]  # (pairs, words)
        shared = self.documents[positions.ravel()].multiply(query_counts > 0).tocsr()
        taken = shared.multiply(query_counts).tocsr()  # a word's count in the query times its count in the document
        frequency = shared.data - (taken.data / shared.data) * np.repeat(cut, np.diff(shared.indptr))
        lengths = self.lengths[positions.ravel()] - cut * query_lengths[rows]
        norm = BM25_K1 * (1 - BM25_B + BM25_B * np.maximum(lengths, 0) / self.mean_length)
        frequency = np.maximum(frequency, 0)
        weights = self.idf[shared.indices] * frequency / (frequency + np.repeat(norm, np.diff(shared.indptr)))
        totals = sparse.csr_matrix((weights, shared.indices, shared.indptr), shape=shared.shape).sum(axis=1)
        return np.asarray(totals).reshape(positions.shape)

    def _counted(self, bags: Iterable[Counter[str]]) -> tuple[sparse.csr_matrix, np.ndarray]:
        """Return counts of known words by text, (texts, words), and each text's sum."""
        matrix = count_matrix(bags, self.column_of_term, np.float32)
        matrix.sort_indices()
        return matrix, np.asarray(matrix.sum(axis=1), dtype=np.float32)[:, 0]


def teacher_scores_of(
    teacher: WordTeacher, batch: Batch, neighbors: np.ndarray, vectors: np.ndarray, device: torch.device
) -> TeacherScores:
    """Return the neighbors of a batch's documents with the teacher's scores."""
    candidates = neighbors[batch.positions]  # (B, S)
    none = candidates < 0
    candidates = np.where(none, batch.positions[:, None], candidates)
    scores = teacher.scores(batch, candidates)
    scores = scores / np.maximum(scores.max(axis=1, keepdims=True), 1e-6) / TEMPERATURE
    arrays = (np.asarray(vectors[candidates]), scores, none)
    return TeacherScores(*(torch.from_numpy(array).to(device) for array in arrays))
