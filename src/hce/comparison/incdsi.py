"""IncDSI (Kishore et al., ICML 2023): documents are added to atomic DSI by giving each a row, and nothing else moves.

The head has no bias, so a document is its row v, and a query its state q. Each document is also known by z, the mean
state of the texts that stand for it. A new document's row has to win for its own texts q, and to lose for those of
every other document i, each by a margin:

    q·v ≥ max_j q·w_j + γ        z_i·v ≤ z_i·w_i − γ

Both are put into one sum of squared hinges, which L-BFGS brings down. Few of the constraints ever bind: they are taken
up as they are violated, so that a document takes milliseconds.

`hce compare` shows what that is worth: a tenth of the documents, drawn at random, take no part in training, and are
added afterwards, with the labelled and generated queries that name them alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize

from hce.comparison.dsi import MOST_ATOMIC, build_dsi_atomic
from hce.comparison.generative import QUERIES_AT_ONCE, GenerativeSearcher, IdNetwork
from hce.comparison.identifiers import atomic_identifiers
from hce.comparison.task import Built, Task
from hce.data.corpus import Corpus
from hce.data.documents import Document
from hce.data.judgments import Judgment, Labels, Qrels
from hce.data.text import cut_span, first_tokens
from hce.errors import InputError
from hce.evaluation.runs import Scored
from hce.search.exact import nearest
from hce.training.recipe import Recipe

MARGIN = 0.1  # γ, in units of a logit; with more, new rows grow long and win for queries of old documents too
ROUNDS = 10  # of taking up violated constraints
FIRST_CONSTRAINTS = 256
SPANS = 4  # of a document, beside its beginning, that stand for its queries
STARTS = 32
ADDED_SHARE = 0.1  # of the documents, in a comparison

QueriesByDocument = Mapping[str, Sequence[str]]
"""Known queries of documents, by their ids."""


# ---------------------------------------------------------------------------------------------------------- a new row


def new_row(own: np.ndarray, rows: np.ndarray, known: np.ndarray, margin: float = MARGIN) -> np.ndarray:
    """Find the row of a new document, of shape (n,).

    Args:
        own: states of the texts that stand for the new document, of shape (q, n).
        rows: w, of the documents that are there, of shape (N, n).
        known: z, the mean state of the texts of each of them, of shape (N, n).
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
    """Return the sum of the squared violations (of the document's own texts, their mean), and its gradient."""
    low = np.maximum(floor - own @ row, 0.0)
    high = np.maximum(known @ row - ceiling, 0.0)
    value = float(low @ low / len(own) + high @ high)
    return value, 2 * (high @ known - low @ own / len(own))


# ----------------------------------------------------------------------------------------------------------- searching


@dataclass
class GrowingSearcher:
    """Atomic DSI whose documents can be added to: a query's state, and the row of each document.

    Attributes:
        network: what reads queries to states.
        recipe: span lengths and seed.
        ids: of the documents.
        rows: of the documents, of shape (N, n).
        known: the mean state of each document's texts, of shape (N, n).
    """

    network: IdNetwork
    recipe: Recipe
    ids: list[str]
    rows: np.ndarray
    known: np.ndarray

    def search(self, queries: Sequence[str], k: int) -> list[list[Scored]]:
        """Find the k documents whose rows have the largest inner products with each query's state, best first."""
        found = zip(*nearest(states_of(self.network, queries), self.rows, k), strict=True)
        return [
            [Scored(self.ids[position], float(score)) for position, score in zip(*row, strict=True)] for row in found
        ]

    def add(self, documents: Sequence[Document], queries: QueriesByDocument | None = None) -> None:
        """Add documents one after another; each is a constraint for those after it.

        Args:
            documents: new ones.
            queries: what is asked for, by a document's id, where that is known.
        """
        refuse_known(documents, self.ids)
        if not documents:
            return
        texts = [[*texts_of(each, self.recipe), *(queries or {}).get(each.id, ())] for each in documents]
        states = states_of(self.network, [text for each in texts for text in each])
        shape = (len(self.ids) + len(documents), self.rows.shape[1])
        rows, known = np.empty(shape), np.empty(shape)  # of float64, so that no addition has to convert them
        rows[: len(self.ids)], known[: len(self.ids)] = self.rows, self.known
        ends = np.cumsum([len(each) for each in texts])
        for count, (end, each) in enumerate(zip(ends.tolist(), texts, strict=True), start=len(self.ids)):
            own = states[end - len(each) : end]
            row = new_row(own, rows[:count], known[:count]).astype(np.float32)  # as it is searched
            rows[count], known[count] = row, own.mean(axis=0)
        self.rows, self.known = rows.astype(np.float32), known.astype(np.float32)
        self.ids += [each.id for each in documents]


def refuse_known(documents: Sequence[Document], ids: Sequence[str]) -> None:
    """Refuse documents that are there already.

    Raises:
        InputError: one of them is.
    """
    there = {each.id for each in documents}.intersection(ids)
    if there:
        raise InputError(f"document {min(there)!r} is there already; nothing was added")


def texts_of(document: Document, recipe: Recipe) -> list[str]:
    """Return what stands for a document's queries: its beginning, its title, and some spans, the same each time."""
    rng = np.random.default_rng([recipe.seed, 9])
    lengths, places = rng.choice(recipe.span_lengths, SPANS).tolist(), rng.random(SPANS).tolist()
    spans = [cut_span(document.full_text, length, place).inside for length, place in zip(lengths, places, strict=True)]
    title = [document.title] if document.title.strip() else []
    return [first_tokens(document.full_text, STARTS), *title, *spans]


def standing_for(task: Task) -> list[list[str]]:
    """Return what stands for the queries of each document of a task, labelled and generated ones among it."""
    queries = queries_of([labels for labels in (task.pairs, task.generated) if labels is not None])
    return [[*texts_of(each, task.recipe), *queries.get(each.id, ())] for each in task.corpus]


@torch.inference_mode()
def states_of(network: IdNetwork, texts: Sequence[str]) -> np.ndarray:
    """Read texts to the state that chooses their document, of shape (texts, n)."""
    network.eval()
    at_once = 16 * QUERIES_AT_ONCE
    found = []
    for start in range(0, len(texts), at_once):
        memory = network.read(texts[start : start + at_once])
        nothing = torch.empty(len(memory.states), 1, 0, dtype=torch.int64, device=network.device)
        found.append(network.states(memory, nothing)[:, 0, 0].float().cpu().numpy())
    return np.concatenate(found)


# ------------------------------------------------------------------------------------------------------------ building


def train_incdsi(task: Task) -> tuple[GrowingSearcher, Built]:
    """Train atomic DSI on all documents of a task, ready to be added to."""
    built = build_dsi_atomic(task)
    if not isinstance(built.searcher, GenerativeSearcher):
        raise TypeError("atomic DSI is searched by beams")
    network, corpus = built.searcher.network, task.corpus
    texts = standing_for(task)
    states = states_of(network, [text for each in texts for text in each])
    starts = np.cumsum([0, *(len(each) for each in texts)])[:-1]
    known = np.add.reduceat(states, starts) / np.array([[len(each)] for each in texts])
    rows = network.head.detach().float().cpu().numpy()
    return GrowingSearcher(network, task.recipe, list(corpus.ids), rows, known.astype(np.float32)), built


class Split(NamedTuple):
    """A task of some documents, those that are to be added, and the queries that name them alone."""

    task: Task
    new: list[Document]
    queries: dict[str, list[str]]


def split_off(task: Task, share: float = ADDED_SHARE) -> Split:
    """Take a share of the documents out of a task, at random, and every query that names one of them."""
    rng = np.random.default_rng([task.recipe.seed, 5])
    count = max(1, round(share * len(task.corpus)))
    chosen = set(rng.choice(len(task.corpus), count, replace=False).tolist())
    new = [task.corpus[position] for position in sorted(chosen)]
    old = (document for position, document in enumerate(task.corpus) if position not in chosen)
    corpus = Corpus.from_documents(old, name=f"{task.corpus.name}, without those added later")
    ids = set(corpus.ids)
    labelled = [labels for labels in (task.pairs, task.generated) if labels is not None]
    named = [_naming_only(labels, {each.id for each in new}) for labels in labelled]
    pairs, dev, generated = (
        labels and _with_some(_naming_only(labels, ids)) for labels in (task.pairs, task.dev, task.generated)
    )
    kept = replace(task, corpus=corpus, pairs=pairs, dev=dev, generated=generated)
    return Split(kept, new, queries_of(named))


def _naming_only(labels: Labels, ids: set[str]) -> Labels:
    """Return the labels of the queries all of whose right documents are among some, and judgments of these alone."""
    right = {query_id: set(labels.qrels.positives(query_id)) for query_id in labels.qrels}
    kept = labels.only(query_id for query_id, known in right.items() if known and known <= ids)
    judgments = (Judgment(*each) for each in kept.qrels.judgments() if each.document_id in ids)
    return Labels(kept.queries, Qrels(judgments))


def _with_some(labels: Labels) -> Labels | None:
    return labels if labels.qrels else None


def queries_of(several: Sequence[Labels]) -> dict[str, list[str]]:
    """List the queries of each document, by its id."""
    found: dict[str, list[str]] = {}
    for labels in several:
        for query_id in labels.qrels:
            for document_id in labels.qrels.positives(query_id):
                found.setdefault(document_id, []).append(labels.queries[query_id].text)
    return found


def build_incdsi(task: Task) -> Built:
    """Train without a tenth of the documents, then add those."""
    atomic_identifiers(len(task.corpus), MOST_ATOMIC)  # refuses too many before the training, not after it
    split = split_off(task)
    searcher, built = train_incdsi(split.task)
    start = time.perf_counter()
    searcher.add(split.new, split.queries)
    seconds = time.perf_counter() - start
    facts = {**built.facts, "added": len(split.new), "milliseconds_an_addition": 1000 * seconds / len(split.new)}
    added_bytes = 4 * len(split.new) * searcher.rows.shape[1]
    return Built(searcher, built.training_seconds, seconds, built.index_bytes + added_bytes, facts)
