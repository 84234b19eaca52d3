"""Keeping layers of lists in shape as documents come and go, with no training.

A list that holds more than 4·b is split, one that holds fewer than b/4 is dissolved into its neighbours, and what
lies nearer to a new leaf than to its own moves there. Each layer is put right from the bottom up, for the number of
lists in one is the number of vectors in the layer above.
"""

from __future__ import annotations

import math

import numpy as np

from hce.search.lists import CENTROID_DTYPE, Layers, Lists

MOST, LEAST = 4, 1 / 4  # of b
NEIGHBOURS = 8  # lists from which a new one may draw
ROOT = 64  # children of the root, at most four times as many
INNER = 16  # children of a node that stands where the root was
ROUNDS = 16
MANY, BEAM = 2**14, 32  # of more lists than this not all are compared: so many nodes lead down to them at each layer


def balance(layers: Layers) -> None:
    """Bring all lists within their bounds; only the root's, and the last one of a layer, may be short."""
    layer = len(layers.lists) - 1
    while layer > 0:
        _dissolve_short(layers, layer)
        _split_long(layers, layer)
        layer -= 1
        if layer == 0 and len(layers.lists[0]) > MOST * ROOT:
            _raise_root(layers)
            layer = 1


def settle(layers: Layers, leaves: np.ndarray) -> None:
    """Recompute the centroids of leaves from their documents, and those of all nodes above from their children.

    Args:
        layers: changed in place.
        leaves: rising, of shape (m,).
    """
    for layer in range(len(layers.lists) - 1, 0, -1):
        lists, above = layers.lists[layer], layers.lists[layer - 1]
        members, parents = lists.members(leaves), above.home_of(leaves)
        centroids = _centroids(members.vectors, np.searchsorted(leaves, lists.home_of(members.ids)))
        above.drop(leaves)
        above.put(leaves, centroids, parents)
        leaves = np.unique(parents)


def bounds(branching: int) -> tuple[int, int]:
    """Return how few and how many a list may hold."""
    return math.ceil(LEAST * branching), MOST * branching


def _dissolve_short(layers: Layers, layer: int) -> None:
    """Hand the members of short lists to the other lists, to the nearest centroid each; one list always stays."""
    lists, above = layers.lists[layer], layers.lists[layer - 1]
    least, _ = bounds(layers.branching[layer])
    sizes = lists.sizes()[above.ids]
    short = above.ids[(sizes < least) & (np.arange(len(sizes)) != sizes.argmax())]
    if not len(short):
        return
    members = lists.members(short)
    above.drop(short)
    lists.spread(short, members, _nearest(layers, layer, members.vectors, 1)[:, 0])


def _split_long(layers: Layers, layer: int) -> None:
    """Cut long lists up, and let the new ones draw from their neighbours."""
    lists, above = layers.lists[layer], layers.lists[layer - 1]
    _, most = bounds(layers.branching[layer])
    for number in np.flatnonzero(lists.sizes() > most)[:, None]:
        members = lists.members(number)
        assignment, centroids = cut_up(members.vectors, layers.branching[layer])
        targets = np.concatenate([number, _unused(above.ids, len(centroids) - 1)])
        parent = above.home_of(number)
        above.drop(number)
        above.put(targets, centroids, np.repeat(parent, len(targets)))
        lists.spread(number, members, targets[assignment])
        _draw_from_neighbours(layers, layer, targets, centroids)


def _draw_from_neighbours(layers: Layers, layer: int, targets: np.ndarray, centroids: np.ndarray) -> None:
    """Move into new lists what is nearer to their centroids than to its own, within the bounds of both sides."""
    lists, above = layers.lists[layer], layers.lists[layer - 1]
    least, most = bounds(layers.branching[layer])
    depth = min(NEIGHBOURS + len(targets), len(above))
    near = _nearest(layers, layer, centroids.mean(axis=0, keepdims=True), depth)[0]
    near = near[~np.isin(near, targets)][:NEIGHBOURS]
    for donor, centroid in zip(near[:, None], above.vectors_of(near), strict=True):
        members = lists.members(donor)
        scores = members.vectors @ centroids.T
        gain = scores.max(axis=1, initial=-1) - members.vectors @ centroid
        movers = np.argsort(-gain)[: max(0, min(int((gain > 0).sum()), len(gain) - least))]
        home = np.repeat(donor, len(gain))
        home[movers] = targets[scores[movers].argmax(axis=1)]
        if len(movers) and _fits(lists, home[movers], most):
            lists.spread(donor, members, home)


def _nearest(layers: Layers, layer: int, vectors: np.ndarray, count: int) -> np.ndarray:
    """Return the `count` lists nearest to each vector: exactly up to `MANY` lists, by a beam from the root beyond."""
    above, near = layers.lists[layer - 1], np.zeros((len(vectors), 1), np.int64)
    if len(above) <= MANY:
        return above.search(vectors, count, layers.nodes(layer - 1)).numbers
    for lists in layers.lists[: layer - 1]:
        near = lists.search(vectors, BEAM, near).numbers
    near = above.search(vectors, count, near).numbers
    lost = np.flatnonzero((near < 0).any(axis=1))  # under nodes that have few lists left
    if len(lost):
        near[lost] = above.search(vectors[lost], count, layers.nodes(layer - 1)).numbers
    return near


def _fits(lists: Lists, home: np.ndarray, most: int) -> bool:
    """Tell whether every list stays within `most` vectors when each entry of `home` adds one."""
    numbers, more = np.unique(home, return_counts=True)
    sizes = [lists.file.size(number) for number in numbers.tolist()]
    return bool(np.all(sizes + more <= most))


def cut_up(vectors: np.ndarray, branching: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut vectors into lists of about b, all within their bounds.

    Returns:
        The part of each vector, of shape (m,), and a unit centroid for each part.
    """
    from hce.tree.kmeans import spherical_kmeans  # with torch, which a search needs not

    least, most = bounds(branching)
    count = max(2, round(len(vectors) / branching))
    result = spherical_kmeans(vectors, count, mode="exact", max_rounds=ROUNDS)
    large = np.bincount(result.assignment, minlength=count) >= least
    assignment = np.zeros(len(vectors), np.int64)
    if large.any():
        assignment = (vectors @ result.centroids[large].T).argmax(axis=1)
    sizes = np.bincount(assignment)
    if len(sizes) < 2 or sizes.max() > most or sizes.min() < least:
        # Many equal vectors, or one heap with a few outliers: even slices across the direction of largest spread.
        direction = np.linalg.svd(vectors - vectors.mean(axis=0), full_matrices=False)[2][0]
        assignment = np.empty(len(vectors), np.int64)
        assignment[np.argsort(vectors @ direction, kind="stable")] = np.arange(len(vectors)) * count // len(vectors)
    return assignment, _centroids(vectors, assignment)


def _centroids(vectors: np.ndarray, assignment: np.ndarray) -> np.ndarray:
    sums = np.zeros((assignment.max() + 1, vectors.shape[1]), np.float32)
    np.add.at(sums, assignment, vectors)
    lengths = np.linalg.norm(sums, axis=1, keepdims=True)
    return sums / np.maximum(lengths, np.finfo(np.float32).tiny)


def _unused(used: np.ndarray, count: int) -> np.ndarray:
    """Return the least numbers that are not in use; `used` is rising."""
    free = np.ones(len(used) + count, dtype=bool)
    free[used[used < len(free)]] = False
    return np.flatnonzero(free)[:count]


def _raise_root(layers: Layers) -> None:
    """Put a new root above the old one, which then can be split like any other node."""
    old = layers.lists[0]
    top = Lists.new(old.dim, 1, CENTROID_DTYPE, np.empty((0, old.dim), np.float32))
    centroid = _centroids(old.everything().vectors, np.zeros(len(old), np.int64))
    top.put(np.zeros(1, np.int64), centroid, np.zeros(1, np.int64))
    layers.lists.insert(0, top)
    layers.branching[0] = INNER
    layers.branching.insert(0, ROOT)
