"""DSI (Tay et al., NeurIPS 2022): a network reads a query and writes the id of the document that answers it.

- **Atomic**: each document is one symbol, and a search is one softmax. The head's rows are then vectors of documents,
  the decoder's state a vector of the query, and the loss is the contrastive one over all documents.
- **Hierarchical**: ids are ways down a tree of divisive k-means (k = 10, up to 100 documents in a leaf, numbered in
  their order), written symbol by symbol; a search is a beam search in the trie of all ids.

Both learn two tasks at once: to write a document's id on reading its first 32 tokens, and on reading a query.
"""

from __future__ import annotations

import time

import numpy as np

from hce.comparison.generative import Alphabet, IdNetwork
from hce.comparison.generative_training import LossesOf, Prepared, built, fit, identifier_losses, searcher_of
from hce.comparison.identifiers import atomic_identifiers, clustered_identifiers
from hce.comparison.task import Built, Task

MOST_ATOMIC = 250_000  # rows of the head; with what the optimiser keeps of each, 1.5 GB at a width of 384
BRANCHING, LEAF = 10, 100


def build_dsi_atomic(task: Task) -> Built:
    """Train DSI with one symbol a document."""
    codes = atomic_identifiers(len(task.corpus), MOST_ATOMIC)
    return trained_writer(Prepared.of(task), codes, Alphabet(len(codes), 1), "dsi-atomic")


def build_dsi(task: Task) -> Built:
    """Train DSI with ids of clusters."""
    prepared = Prepared.of(task)
    start = time.perf_counter()
    codes = clustered_identifiers(prepared.vectors(), BRANCHING, LEAF, seed=prepared.recipe.seed)
    alphabet = Alphabet(int(codes.max()) + 1, codes.shape[1])
    return trained_writer(prepared, codes, alphabet, "dsi", indexing_seconds=time.perf_counter() - start)


def trained_writer(
    prepared: Prepared,
    codes: np.ndarray,
    alphabet: Alphabet,
    name: str,
    kind: type[IdNetwork] = IdNetwork,
    losses_of: LossesOf = identifier_losses,
    *,
    indexing_seconds: float = 0.0,
) -> Built:
    """Train a network to write identifiers that stay as they are.

    Args:
        prepared: what to train on.
        codes: the identifiers, of shape (documents, steps), padded with −1.
        alphabet: what they are written in.
        name: of the system.
        kind: the class of the network.
        losses_of: returns what gives the loss of each example.
        indexing_seconds: what it took to make the identifiers.
    """
    network = prepared.network(alphabet, kind)
    searcher = searcher_of(network, prepared.task.corpus, codes)
    done = fit(
        network,
        losses_of(network, codes),
        prepared.stream,
        prepared.recipe,
        prepared.budget,
        checkpoints=prepared.checkpoints(name),
        measure=prepared.dev_measure(searcher),
        progress=prepared.task.progress,
        title=name,
    )
    return built(prepared, searcher, done, indexing_seconds, steps_of_an_id=codes.shape[1], symbols=alphabet.size)
