"""Continual training of atomic DSI, after DSI++ (Mehta et al., EMNLP 2023): what adding documents by training costs.

New documents get rows that start at random, and training goes on. Half of each batch are texts of new documents, the
other half texts of those that were there: DSI++'s generative memory, replayed so that they are not forgotten. Generated
queries stand for them where there are any, else their own beginnings and spans. Of DSI++'s other half, sharpness-aware
minimisation, nothing is here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import torch
from torch import nn

from hce.comparison.dsi import MOST_ATOMIC, build_dsi_atomic
from hce.comparison.generative import GenerativeSearcher, IdNetwork
from hce.comparison.generative_training import Budget, Examples, fit, identifier_losses
from hce.comparison.identifiers import Trie, atomic_identifiers
from hce.comparison.incdsi import QueriesByDocument, refuse_known, split_off, standing_for, texts_of
from hce.comparison.task import Built, Task
from hce.data.documents import Document
from hce.evaluation.runs import Scored
from hce.training.pairs import batch_count
from hce.training.recipe import Recipe

REPLAYED = 0.5  # of a batch
LEAST_STEPS = 100  # for an addition, however small


@dataclass(frozen=True)
class ReplayStream:
    """Texts of new documents, and of those that were there.

    Attributes:
        texts: of all documents, by position.
        new: the position of the first new one.
        recipe: batch and seed.
    """

    texts: list[list[str]]
    new: int
    recipe: Recipe

    def from_step(self, step: int) -> Iterator[Examples]:
        """Yield the examples of all steps from one on."""
        replayed = round(REPLAYED * self.recipe.batch_size)
        for number in count(step):
            rng = np.random.default_rng([self.recipe.seed, 11, self.new, number])
            fresh = rng.integers(self.new, len(self.texts), self.recipe.batch_size - replayed)
            positions = np.concatenate([fresh, rng.integers(0, self.new, replayed)])
            texts = [str(rng.choice(self.texts[position])) for position in positions.tolist()]
            yield Examples(texts, positions, np.full(len(texts), 1 / len(texts)))


@dataclass
class ContinualSearcher:
    """Atomic DSI that is trained on whenever documents are added.

    Attributes:
        network: of the documents that are there.
        recipe: epochs, batch and seed of the training that goes on.
        ids: of the documents.
        texts: what stands for the queries of each document.
    """

    network: IdNetwork
    recipe: Recipe
    ids: list[str]
    texts: list[list[str]]
    progress: bool = False

    def search(self, queries: Sequence[str], k: int) -> list[list[Scored]]:
        """Find the k most probable documents of each query, best first."""
        codes = np.arange(len(self.ids))[:, None]
        return GenerativeSearcher(self.network, self.ids, Trie(codes, self.network.device)).search(queries, k)

    def add(self, documents: Sequence[Document], queries: QueriesByDocument | None = None) -> None:
        """Add documents, by as many epochs over them as the recipe has.

        Args:
            documents: new ones.
            queries: what is asked for, by a document's id, where that is known.
        """
        refuse_known(documents, self.ids)
        if not documents:
            return
        codes = atomic_identifiers(len(self.ids) + len(documents), MOST_ATOMIC)
        stream = ReplayStream(
            [*self.texts, *([*texts_of(each, self.recipe), *(queries or {}).get(each.id, ())] for each in documents)],
            len(self.ids),
            self.recipe,
        )
        extend_head(self.network, len(documents), self.recipe.seed)
        steps = self.recipe.epochs * batch_count(2 * len(documents), self.recipe.batch_size)
        fit(
            self.network,
            identifier_losses(self.network, codes),
            stream,
            self.recipe,
            Budget(1, max(LEAST_STEPS, steps)),
            progress=self.progress,
            title=f"adding {len(documents):,}",
        )
        self.texts, self.ids = stream.texts, [*self.ids, *(each.id for each in documents)]


def extend_head(network: IdNetwork, count: int, seed: int) -> None:
    """Give an atomic network rows for more documents: the mean row, and something at random."""
    rows = network.head.detach()
    generator = torch.Generator().manual_seed(seed + len(rows))
    noise = torch.randn(count, rows.shape[1], generator=generator).to(rows) * rows.std()
    network.head = nn.Parameter(torch.cat([rows, rows.mean(0) + noise]))
    network.alphabet = replace(network.alphabet, size=len(network.head))


def train_continual(task: Task) -> tuple[ContinualSearcher, Built]:
    """Train atomic DSI on all documents of a task, ready to be trained on."""
    built = build_dsi_atomic(task)
    if not isinstance(built.searcher, GenerativeSearcher):
        raise TypeError("atomic DSI is searched by beams")
    network, texts = built.searcher.network, standing_for(task)
    return ContinualSearcher(network, task.recipe, list(task.corpus.ids), texts, task.progress), built


def build_continual(task: Task) -> Built:
    """Train without a tenth of the documents, then add those by training on."""
    atomic_identifiers(len(task.corpus), MOST_ATOMIC)  # refuses too many before the training, not after it
    split = split_off(task)
    searcher, built = train_continual(split.task)
    start = time.perf_counter()
    searcher.add(split.new, split.queries)
    seconds = time.perf_counter() - start
    facts = {**built.facts, "added": len(split.new), "milliseconds_an_addition": 1000 * seconds / len(split.new)}
    added_bytes = 4 * len(split.new) * searcher.network.width
    return Built(searcher, built.training_seconds + seconds, 0.0, built.index_bytes + added_bytes, facts)
