"""Adding documents to atomic DSI: by one new row each (IncDSI), or by continual training (after DSI++).

**IncDSI** (Kishore et al., ICML 2023) adds a row for each new document, and changes nothing else. The head has no bias,
so a document is its row v, and a query its state q. Queries of a document are imitated by texts, and z is their mean
state. A new document's row has to win for its own texts q, and to lose for those of every other document i, each by a
margin:

    q·v ≥ max_j q·w_j + γ        z_i·v ≤ z_i·w_i − γ

L-BFGS minimizes the sum of squared hinges of both. Few constraints ever bind, so they are added only once they are
violated, and a document takes milliseconds. The authors start from a random row, have a margin for each kind of
constraint, weight the two kinds, and penalize the row's squared length; they tune all four numbers for each collection.
Here the row starts as the shortest one that wins for the mean of its texts, both kinds have the same weight, and the
only margin is small, which also keeps rows short.

**Continual training**, after DSI++ (Mehta et al., EMNLP 2023): new documents get rows that start at the mean row plus
noise, and training continues. Half of each batch are texts of new documents, the other half texts of old ones, replayed
against forgetting. DSI++ replays queries that a model writes (generative memory). Here they are replaced by beginnings,
titles and spans of documents, and by their labeled queries. DSI++'s other half, sharpness-aware minimization, is left
out.

`hce compare` measures both: a random tenth of the documents takes no part in training, and is added afterwards, with
its labeled queries. A query with old and new answers is a training query of the old ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize
from torch import nn

from hce.data.corpus import Corpus
from hce.data.text import Document, cut_span, first_words
from hce.errors import InputError
from hce.evaluation.runs import Scored
from hce.search.engine import nearest
from hce.training.pairs import batch_count
from hce.training.recipe import Recipe
from hce_lab.comparison.dsi import build_dsi_atomic
from hce_lab.comparison.generative import QUERIES_AT_ONCE, GenerativeSearcher, IdNetwork
from hce_lab.comparison.generative_training import Budget, Examples, fit, identifier_losses, searcher_of
from hce_lab.comparison.identifiers import atomic_identifiers
from hce_lab.comparison.task import Built, Task, hits_of, queries_by_document

MARGIN = 0.1  # γ, in units of a logit; with more, new rows grow long and win for queries of old documents too
ROUNDS = 10  # rounds of adding violated constraints
FIRST_CONSTRAINTS = 256
SPANS = 4  # spans of a document that imitate its queries, in addition to its beginning
STARTS = 32  # words and marks in a beginning
REPLAYED = 0.5  # share of a batch with texts of old documents
LEAST_STEPS = 100  # training steps for an addition of any size
ADDED_SHARE = 0.1  # share of the documents that a comparison adds later

QueriesByDocument = Mapping[str, Sequence[str]]
"""Known queries of documents, by their ids."""


# ---------------------------------------------------------------------------------------- what stands for queries


def standing_for(
    documents: Iterable[Document], recipe: Recipe, queries: QueriesByDocument | None = None
) -> list[list[str]]:
    """Return texts that imitate queries of each document, and its known queries."""
    return [[*_texts_of(each, recipe), *(queries or {}).get(each.id, ())] for each in documents]


def _texts_of(document: Document, recipe: Recipe) -> list[str]:
    """Return a document's beginning, its title, and some spans."""
    rng = np.random.default_rng([recipe.seed, 9])
    lengths, places = rng.choice(recipe.span_lengths, SPANS).tolist(), rng.random(SPANS).tolist()
    spans = [cut_span(document.full_text, length, place).inside for length, place in zip(lengths, places, strict=True)]
    title = [document.title] if document.title.strip() else []
    return [first_words(document.full_text, STARTS), *title, *spans]


@torch.inference_mode()
def states_of(network: IdNetwork, texts: Sequence[str]) -> np.ndarray:
    """Read texts to the states (texts, n) that choose documents; read equal texts once."""
    network.eval()
    at_once = 16 * QUERIES_AT_ONCE
    row_of = {text: row for row, text in enumerate(dict.fromkeys(texts))}
    different, found = list(row_of), []
    for start in range(0, len(different), at_once):
        memory = network.read(different[start : start + at_once])
        nothing = torch.empty(len(memory.states), 1, 0, dtype=torch.int64, device=network.device)
        found.append(network.states(memory, nothing)[:, 0, 0].float().cpu().numpy())
    return np.concatenate(found)[[row_of[text] for text in texts]]


def refuse_known(documents: Sequence[Document], ids: Sequence[str]) -> None:
    """Fail on documents that were added before.

    Raises:
        InputError: one of them was.
    """
    there = {each.id for each in documents}.intersection(ids)
    if there:
        raise InputError(f"document {min(there)!r} is there already; nothing was added")


# ---------------------------------------------------------------------------------------------------- a row for each


def new_row(own: np.ndarray, rows: np.ndarray, known: np.ndarray, margin: float = MARGIN) -> np.ndarray:
    """Find the row of a new document, of shape (n,).

    Args:
        own: states of the new document's texts, of shape (q, n).
        rows: w, the rows of the earlier documents, of shape (N, n).
        known: z, the mean state of the texts of each earlier document, of shape (N, n).
        margin: γ.
    """
    own, rows, known = (np.asarray(each, dtype=np.float64) for each in (own, rows, known))
    floor = (own @ rows.T).max(axis=1) + margin  # (q,)
    ceiling = np.einsum("ij,ij->i", known, rows) - margin  # (N,)
    mean = own.mean(axis=0)
    row = mean * floor.mean() / max(float(mean @ mean), 1e-12)  # the shortest one that wins for the mean text
    taken = np.argsort(ceiling - known @ row)[:FIRST_CONSTRAINTS]
    for _ in range(ROUNDS):
        row = minimize(_hinges, row, (own, floor, known[taken], ceiling[taken]), jac=True, method="L-BFGS-B").x
        violated = np.setdiff1d(np.flatnonzero(known @ row > ceiling), taken)
        if not len(violated):
            break
        taken = np.concatenate([taken, violated])
    return row


def _hinges(
    row: np.ndarray, own: np.ndarray, floor: np.ndarray, known: np.ndarray, ceiling: np.ndarray
) -> tuple[float, np.ndarray]:
    """Return the squared violations, own ones averaged, others summed; and the gradient."""
    low = np.maximum(floor - own @ row, 0.0)
    high = np.maximum(known @ row - ceiling, 0.0)
    value = float(low @ low / len(own) + high @ high)
    return value, 2 * (high @ known - low @ own / len(own))


@dataclass
class GrowingSearcher:
    """Atomic DSI that accepts new documents: a query's state scored by documents' rows.

    Attributes:
        network: reads queries to states.
        recipe: span lengths and seed.
        ids: the ids of the documents.
        rows: the rows of the documents, of shape (N, n).
        known: the mean state of each document's texts, of shape (N, n).
    """

    network: IdNetwork
    recipe: Recipe
    ids: list[str]
    rows: np.ndarray
    known: np.ndarray

    def search(self, queries: Sequence[str], k: int) -> list[list[Scored]]:
        """Find the k documents with the largest inner products for each query, best first."""
        found = nearest(states_of(self.network, queries), self.rows, k)
        return [hits_of(self.ids, *row) for row in zip(*found, strict=True)]

    def add(self, documents: Sequence[Document], queries: QueriesByDocument | None = None) -> None:
        """Add documents one by one; each is a constraint for later ones.

        Args:
            documents: the new documents.
            queries: the known queries of documents, by id.
        """
        refuse_known(documents, self.ids)
        if not documents:
            return
        texts = standing_for(documents, self.recipe, queries)
        states = states_of(self.network, [*chain(*texts)])
        shape = (len(self.ids) + len(documents), self.rows.shape[1])
        rows, known = np.empty(shape), np.empty(shape)  # float64, so that no addition has to convert them
        rows[: len(self.ids)], known[: len(self.ids)] = self.rows, self.known
        parts = np.split(states, np.cumsum([len(each) for each in texts])[:-1])
        for there, own in enumerate(parts, start=len(self.ids)):
            rows[there] = new_row(own, rows[:there], known[:there]).astype(np.float32)  # rounded as for a search
            known[there] = own.mean(axis=0)
        self.rows, self.known = rows.astype(np.float32), known.astype(np.float32)
        self.ids += [each.id for each in documents]


def train_incdsi(task: Task) -> tuple[GrowingSearcher, Built]:
    """Train atomic DSI on a task; return a searcher that accepts new documents."""
    network, texts, built = atomic_network(task)
    start = time.perf_counter()
    states = states_of(network, [*chain(*texts)])
    starts = np.cumsum([0, *(len(each) for each in texts)])[:-1]
    known = np.add.reduceat(states, starts) / np.array([[len(each)] for each in texts])
    rows = network.head.detach().float().cpu().numpy()
    searcher = GrowingSearcher(network, task.recipe, list(task.corpus.ids), rows, known.astype(np.float32))
    return searcher, built._replace(indexing_seconds=built.indexing_seconds + time.perf_counter() - start)


# ------------------------------------------------------------------------------------------------------ training on


@dataclass(frozen=True)
class ReplayStream:
    """Texts of new documents, and replayed texts of old ones.

    Attributes:
        texts: the texts of all documents, by position.
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
    """Atomic DSI whose training continues with each addition of documents.

    Attributes:
        network: the network, with a row for each document.
        recipe: epochs, batch and seed of continued training.
        ids: the ids of the documents.
        texts: the texts that imitate queries of each document.
        rate: the learning rate of all training, see `fit`.
    """

    network: IdNetwork
    recipe: Recipe
    ids: list[str]
    texts: list[list[str]]
    rate: float | None = None
    progress: bool = False

    def search(self, queries: Sequence[str], k: int) -> list[list[Scored]]:
        """Find the k most probable documents for each query, best first."""
        return searcher_of(self.network, self.ids, atomic_identifiers(len(self.ids))).search(queries, k)

    def add(self, documents: Sequence[Document], queries: QueriesByDocument | None = None) -> None:
        """Add documents by the recipe's epochs over them, `LEAST_STEPS` steps at least.

        Args:
            documents: the new documents.
            queries: the known queries of documents, by id.
        """
        refuse_known(documents, self.ids)
        if not documents:
            return
        codes = atomic_identifiers(len(self.ids) + len(documents))
        texts = [*self.texts, *standing_for(documents, self.recipe, queries)]
        extend_head(self.network, len(documents), self.recipe.seed)
        steps = self.recipe.epochs * batch_count(2 * len(documents), self.recipe.batch_size)
        fit(
            self.network,
            identifier_losses(self.network, codes),
            ReplayStream(texts, len(self.ids), self.recipe),
            self.recipe,
            Budget(1, max(LEAST_STEPS, steps)),
            rate=self.rate,
            progress=self.progress,
            title=f"adding {len(documents):,}",
        )
        self.texts, self.ids = texts, [*self.ids, *(each.id for each in documents)]


def extend_head(network: IdNetwork, count: int, seed: int) -> None:
    """Add rows for new documents to an atomic network: the mean row plus noise."""
    rows = network.head.detach()
    generator = torch.Generator().manual_seed(seed + len(rows))
    noise = torch.randn(count, rows.shape[1], generator=generator).to(rows) * rows.std()
    network.head = nn.Parameter(torch.cat([rows, rows.mean(0) + noise]))
    network.alphabet = replace(network.alphabet, size=len(network.head))


def train_continual(task: Task) -> tuple[ContinualSearcher, Built]:
    """Train atomic DSI on a task; return a searcher whose training can continue."""
    network, texts, built = atomic_network(task)
    return ContinualSearcher(network, task.recipe, list(task.corpus.ids), texts, task.rate, task.progress), built


# ------------------------------------------------------------------------------------------------------ the systems


def atomic_network(task: Task) -> tuple[IdNetwork, list[list[str]], Built]:
    """Train atomic DSI; return its network, each document's texts, and the system."""
    built = build_dsi_atomic(task)
    if not isinstance(built.searcher, GenerativeSearcher):
        raise TypeError("atomic DSI is searched by beams")
    queries = queries_by_document(task.pairs, task.generated)
    return built.searcher.network, standing_for(task.corpus, task.recipe, queries), built


class Split(NamedTuple):
    """A task without some documents, these documents, and their labeled queries."""

    task: Task
    new: list[Document]
    queries: dict[str, list[str]]


def split_off(task: Task) -> Split:
    """Remove a random tenth of a task's documents, with their judgments."""
    rng = np.random.default_rng([task.recipe.seed, 5])
    chosen = set(rng.choice(len(task.corpus), max(1, round(ADDED_SHARE * len(task.corpus))), replace=False).tolist())
    new = [task.corpus[position] for position in sorted(chosen)]
    old = (document for position, document in enumerate(task.corpus) if position not in chosen)
    corpus = Corpus.from_documents(old, name=f"{task.corpus.name}, without those added later")
    new_ids, old_ids = {each.id for each in new}, set(corpus.ids)
    named = (labels and labels.among(new_ids) for labels in (task.pairs, task.generated))
    kept = (labels and labels.among(old_ids) for labels in (task.pairs, task.dev, task.generated))
    pairs, dev, generated = (labels if labels and labels.qrels else None for labels in kept)
    without = replace(task, corpus=corpus, pairs=pairs, dev=dev, generated=generated)
    return Split(without, new, queries_by_document(*named))


def build_incdsi(task: Task) -> Built:
    """Train without a tenth of the documents, then add those."""
    return _added_later(task, train_incdsi)


def build_continual(task: Task) -> Built:
    """Train without a tenth of the documents, then add it by continued training."""
    built = _added_later(task, train_continual)
    return built._replace(training_seconds=built.training_seconds + built.indexing_seconds, indexing_seconds=0.0)


def _added_later(task: Task, train: Callable[[Task], tuple[GrowingSearcher | ContinualSearcher, Built]]) -> Built:
    """Train without a tenth of the documents, then add it; that counts as indexing."""
    atomic_identifiers(len(task.corpus))  # fails on too many documents before training
    split = split_off(task)
    searcher, built = train(split.task)
    start = time.perf_counter()
    searcher.add(split.new, split.queries)
    seconds = time.perf_counter() - start
    added = len(split.new) * searcher.network.width
    facts = {
        **built.facts,
        "parameters": built.facts["parameters"] + added,
        "added": len(split.new),
        "milliseconds_an_addition": 1000 * seconds / len(split.new),
    }
    indexing = built.indexing_seconds + seconds
    return Built(searcher, built.training_seconds, indexing, built.index_bytes + 4 * added, facts)
