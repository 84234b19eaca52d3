"""Document identifiers for generative retrievers: sequences of symbols, their trie, and beam search.

An identifier is a sequence of symbols, which are numbers from 0; none is a prefix of another. Identifiers are an array
of shape (documents, steps), padded with −1. A document's score is the sum of the log-probabilities of its symbols, each
given those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hce.errors import InputError
from hce.tree.kmeans import spherical_kmeans

NONE = -1
MOST_ATOMIC = 250_000  # rows of the head; with the optimizer's state, 1.5 GB at a width of 384


# ------------------------------------------------------------------------------------------------------- identifiers


def atomic_identifiers(documents: int) -> np.ndarray:
    """Return identifiers of one symbol per document, of shape (documents, 1).

    Raises:
        InputError: there are more documents than `MOST_ATOMIC`.
    """
    if documents > MOST_ATOMIC:
        raise InputError(
            f"{documents:,} documents are too many for atomic ids, which need a weight vector each "
            f"(limit {MOST_ATOMIC:,}); use hierarchical ids (dsi, nci)"
        )
    return np.arange(documents)[:, None]


def clustered_identifiers(vectors: np.ndarray, branching: int, leaf: int, *, seed: int = 0) -> np.ndarray:
    """Cluster documents by divisive k-means; return their paths, (documents, steps).

    A node of up to `leaf` documents numbers them in their order. A larger one is clustered into `branching` parts, each
    treated in the same way. Paths are padded with −1.

    Args:
        vectors: the documents' vectors, of shape (documents, n).
        branching: k, the number of clusters of a node.
        leaf: c, the largest number of documents in a leaf; at least `branching`.
        seed: same seed, same identifiers.
    """
    if not 2 <= branching <= leaf:
        raise InputError(f"branching {branching} and leaves of {leaf}: give 2 ≤ branching ≤ leaf")
    paths: list[list[int]] = [[] for _ in range(len(vectors))]
    waiting = [np.arange(len(vectors))]
    while waiting:
        members = waiting.pop()
        split = len(members) > leaf
        numbers = (
            spherical_kmeans(vectors[members], branching, seed=seed).assignment if split else np.arange(len(members))
        )
        for position, number in zip(members.tolist(), numbers.tolist(), strict=True):
            paths[position].append(number)
        if split:
            waiting += [members[numbers == number] for number in range(branching)]
    return padded(paths)


def padded(paths: Sequence[Sequence[int]]) -> np.ndarray:
    """Pad paths with −1 to one array (documents, steps)."""
    return np.ascontiguousarray(np.array(list(zip_longest(*paths, fillvalue=NONE)), dtype=np.int64).T)


# -------------------------------------------------------------------------------------------------------------- trie


class TrieLevel(NamedTuple):
    """The nodes of a trie at one depth, ordered by their paths.

    Attributes:
        symbol: the last symbol of each node's path, of shape (nodes,).
        document: the position of the document whose identifier the path is, or −1, of shape (nodes,).
        first_child: where each node's children begin in the next level, of shape (nodes,).
        children: how many children each node has, of shape (nodes,); 0 for a document.
    """

    symbol: Tensor
    document: Tensor
    first_child: Tensor
    children: Tensor


class Trie:
    """All identifiers, as a tree of symbols.

    Args:
        codes: the identifiers, of shape (documents, steps), padded with −1.
        device: where the search runs.

    Attributes:
        levels: from the first symbol down.

    Raises:
        InputError: an empty identifier, two documents with the same one, or one that is the beginning of another.
    """

    def __init__(self, codes: np.ndarray, device: torch.device | str = "cpu") -> None:
        self.codes = codes
        lengths = (codes >= 0).sum(axis=1)
        _check(codes, lengths)
        self.levels: list[TrieLevel] = []
        node_of = np.zeros(len(codes), dtype=np.int64)  # of each document's path, at the level before
        counts = [np.array([0])]  # children of the root, then of each level's nodes
        arrays = []
        for depth in range(codes.shape[1]):
            rows = np.flatnonzero(lengths > depth)
            nodes, node = np.unique(np.stack([node_of[rows], codes[rows, depth]], axis=1), axis=0, return_inverse=True)
            node = node.reshape(-1)
            document = np.full(len(nodes), NONE)
            ends = lengths[rows] == depth + 1
            document[node[ends]] = rows[ends]
            _check_ends(codes, rows, node, ends, len(nodes))
            counts[-1] = np.bincount(nodes[:, 0], minlength=len(counts[-1]))
            counts.append(np.zeros(len(nodes), dtype=np.int64))
            arrays.append((nodes[:, 1], document))
            node_of[rows] = node
        self.root_children = int(counts[0][0])
        for (symbol, document), children in zip(arrays, counts[1:], strict=True):
            tensors = (symbol, document, np.cumsum(children) - children, children)
            self.levels.append(TrieLevel(*(torch.from_numpy(each).to(device) for each in tensors)))

    def __len__(self) -> int:
        return len(self.codes)


def _check(codes: np.ndarray, lengths: np.ndarray) -> None:
    if codes.ndim != 2 or not len(codes):
        raise InputError(f"identifiers of shape {codes.shape}: give (documents, steps), with a document at least")
    wrong = np.flatnonzero(
        (lengths == 0) | ((codes >= 0) != (np.arange(codes.shape[1]) < lengths[:, None])).any(axis=1)
    )
    if len(wrong):
        raise InputError(f"id of document {wrong[0]} is no valid path: {codes[wrong[0]].tolist()}")


def _check_ends(codes: np.ndarray, rows: np.ndarray, node: np.ndarray, ends: np.ndarray, nodes: int) -> None:
    """Fail on equal identifiers, and on one that is a prefix of another."""
    shared = (np.bincount(node[ends], minlength=nodes) > 0) & (np.bincount(node, minlength=nodes) > 1)
    if shared.any():
        several = rows[node == np.flatnonzero(shared)[0]][:2]
        shown = [_shown(codes[row][codes[row] >= 0].tolist()) for row in several]
        raise InputError(
            f"documents {several[0]} and {several[1]} cannot be told apart by the ids {shown[0]} and {shown[1]}"
        )


def _shown(path: Sequence[int]) -> str:
    return "-".join(map(str, path))


# -------------------------------------------------------------------------------------------------------- beam search


class Best(NamedTuple):
    """The result of a search, best first.

    Attributes:
        positions: the documents' positions, of shape (queries, k), padded with −1.
        scores: their log-probabilities, of shape (queries, k); −∞ for padding.
    """

    positions: np.ndarray
    scores: np.ndarray


@torch.inference_mode()
def beam_search(next_scores: Callable[[Tensor], Tensor], queries: int, trie: Trie, width: int, k: int) -> Best:
    """Find the k documents with the most probable identifiers, by beam search in a trie.

    At each depth, the `width` best unfinished prefixes continue. Finished identifiers are set aside and compared at the
    end. So if no level has more nodes than the width, the search is exact.

    Args:
        next_scores: gives the log-probabilities of all symbols after prefixes of shape (queries, beams, t), of shape
            (queries, beams, symbols); t is 0 at first.
        queries: how many there are.
        trie: the identifiers.
        width: the width of the beam.
        k: the number of documents per query; all if there are fewer.
    """
    k = min(k, len(trie))
    device = trie.levels[0].symbol.device
    first = torch.zeros(queries, 1, dtype=torch.int64, device=device)
    count = torch.full_like(first, trie.root_children)
    so_far = torch.zeros(queries, 1, device=device)
    prefixes = torch.empty(queries, 1, 0, dtype=torch.int64, device=device)
    positions, scores = [], []
    for level in trie.levels:
        following = next_scores(prefixes)  # (Q, W, K)
        offset = torch.arange(int(count.max()), device=device)
        there = offset < count[..., None]  # (Q, W, C)
        child = torch.where(there, first[..., None] + offset, 0)
        value = so_far[..., None] + following.gather(2, level.symbol[child])
        document = level.document[child]
        value = value.masked_fill(~there, -torch.inf)
        ended = value.masked_fill(document < 0, -torch.inf).flatten(1)
        best, place = ended.topk(min(k, ended.shape[1]), dim=1)
        positions.append(document.flatten(1).gather(1, place))
        scores.append(best)
        inner = value.masked_fill(document >= 0, -torch.inf).flatten(1)
        wanted = min(width, int((inner > -torch.inf).sum(1).max()))
        if not wanted:
            break
        so_far, place = inner.topk(wanted, dim=1)
        node = child.flatten(1).gather(1, place)
        way = torch.div(place, child.shape[2], rounding_mode="floor")[..., None].expand(-1, -1, prefixes.shape[2])
        prefixes = torch.cat([prefixes.gather(1, way), level.symbol[node][..., None]], dim=2)
        first, count = level.first_child[node], level.children[node].masked_fill(so_far == -torch.inf, 0)
    return _ranked(torch.cat(positions, dim=1).cpu().numpy(), torch.cat(scores, dim=1).cpu().numpy(), k)


def _ranked(positions: np.ndarray, scores: np.ndarray, k: int) -> Best:
    """Return the k best of each row; ties in the order of the corpus."""
    positions = np.where(np.isneginf(scores), NONE, positions)
    order = np.lexsort((positions, -scores), axis=1)[:, :k]
    return Best(np.take_along_axis(positions, order, axis=1), np.take_along_axis(scores, order, axis=1))
