"""DSI (Tay et al., NeurIPS 2022): a network reads a query and writes the id of the document that answers it.

- **Atomic**: each document is one symbol, and a search is one softmax. So the head's rows are document vectors, the
  decoder's state is the query vector, and the loss is contrastive over all documents.
- **Hierarchical**: ids are paths in a tree of divisive k-means (k = 10, up to 100 documents in a leaf, numbered in
  their order), written symbol by symbol; a search is a beam search in the trie of all ids.

Both learn two tasks together: to write a document's id from its first 32 words, and from a query. Words include
punctuation marks; the authors count tokens instead. k-means is spherical.
"""

from __future__ import annotations

import time

import numpy as np

from hce_lab.comparison.generative import Alphabet, IdNetwork
from hce_lab.comparison.generative_training import Prepared, built, identifier_losses, searcher_of
from hce_lab.comparison.identifiers import atomic_identifiers, clustered_identifiers
from hce_lab.comparison.task import Built, Task

BRANCHING, LEAF = 10, 100


def build_dsi_atomic(task: Task) -> Built:
    """Train DSI with one symbol per document."""
    codes = atomic_identifiers(len(task.corpus))
    return trained_writer(Prepared.of(task), codes, "dsi-atomic")


def build_dsi(task: Task) -> Built:
    """Train DSI with ids from a tree of clusters."""
    return trained_on_clusters(task, "dsi", BRANCHING, LEAF)


def trained_on_clusters(
    task: Task, name: str, branching: int, leaf: int, kind: type[IdNetwork] = IdNetwork, *, by_step: bool = False
) -> Built:
    """Train a network on ids from `clustered_identifiers`; see `trained_writer`."""
    prepared = Prepared.of(task)
    start = time.perf_counter()
    codes = clustered_identifiers(prepared.vectors(), branching, leaf, seed=prepared.recipe.seed)
    seconds = time.perf_counter() - start
    return trained_writer(prepared, codes, name, kind, by_step=by_step, indexing_seconds=seconds)


def trained_writer(
    prepared: Prepared,
    codes: np.ndarray,
    name: str,
    kind: type[IdNetwork] = IdNetwork,
    *,
    by_step: bool = False,
    indexing_seconds: float = 0.0,
) -> Built:
    """Train a network to write fixed identifiers.

    Args:
        prepared: the prepared task.
        codes: the identifiers, of shape (documents, steps), padded with −1.
        name: the name of the system.
        kind: the class of the network.
        by_step: see `Alphabet`.
        indexing_seconds: the time spent on making the identifiers.
    """
    alphabet = Alphabet(int(codes.max()) + 1, codes.shape[1], by_step)
    network = prepared.network(alphabet, kind)
    searcher = searcher_of(network, prepared.task.corpus.ids, codes)
    done = prepared.fit(network, identifier_losses(network, codes), name, searcher=searcher)
    return built(searcher, done, indexing_seconds, steps_of_an_id=alphabet.steps, symbols=alphabet.size)
