"""Growth: where in an index's tree the documents went that came after the tree was made, and what is new there.

A document that came later goes where a walk down the tree leads. A region, a node of the first level, has grown where
more of them went than its share of the earlier documents lets expect, by more than chance. What is new in it are the
words that set its later documents apart from its earlier ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hce.index.hierarchy import NumberedHierarchy
from hce.index.store import Reader

MOST = 5  # regions that are told of
LEAST = 5  # later documents in a region that are worth a line
STANDARD_ERRORS = 2.0
SAMPLE = 300  # documents of a region, of either kind, whose words are compared
WORDS = 4
EXAMPLES = 3


@dataclass(frozen=True)
class GrownNode:
    """A region of the tree that has grown since the tree was made.

    Attributes:
        level: of the node.
        node: which one of its level.
        name: the words of its name.
        before: how many of the documents there were when the tree was made.
        added: how many came later.
        words: what sets the later ones apart.
        examples: ids of a few of the later ones, nearest to the node's middle.
    """

    level: int
    node: int
    name: tuple[str, ...]
    before: int
    added: int
    words: tuple[str, ...]
    examples: tuple[str, ...]


def growth_of(reader: Reader, tree: NumberedHierarchy | None) -> tuple[GrownNode, ...]:
    """Return the nodes of level 1 that got more later documents than their share, beyond chance, the most first."""
    if tree is None or not tree.hierarchy.levels:
        return ()
    later, vectors = reader.vectors(after=int(tree.numbers.max(initial=0)))
    if len(later) < LEAST:
        return ()
    hierarchy, kept = tree.hierarchy, np.isin(tree.numbers, reader.numbers())
    node_of = hierarchy.walk(vectors)[1][:, 0]
    old_node_of = hierarchy.nodes_at(1)[kept]
    count = hierarchy.node_count(1)
    added, before = np.bincount(node_of, minlength=count), np.bincount(old_node_of, minlength=count)
    middles, old = hierarchy.levels[0].centroids, tree.numbers[kept]
    regions = []
    for node in _grown(before, added):
        inside = node_of == node
        nearest = later[inside][np.argsort(-(vectors[inside] @ middles[node]), kind="stable")]
        texts = _Texts(reader, old[old_node_of == node][:SAMPLE], nearest[:SAMPLE])
        name = tuple(hierarchy.name(1, node))
        counts = int(before[node]), int(added[node])
        regions.append(GrownNode(1, node, name, *counts, texts.new_words(), texts.examples(nearest[:EXAMPLES])))
    return tuple(regions)


def _grown(before: np.ndarray, added: np.ndarray) -> list[int]:
    """Return the nodes that got more than their share, by more than chance, those with the largest surplus first."""
    expected = before * (added.sum() / max(1, before.sum()))
    surplus = added - expected
    is_grown = (added >= LEAST) & (surplus > STANDARD_ERRORS * np.sqrt(np.maximum(expected, 1)))
    nodes = np.flatnonzero(is_grown)
    return nodes[np.argsort(-surplus[nodes], kind="stable")][:MOST].tolist()


class _Texts:
    """Texts of a region: of some earlier and some later documents."""

    def __init__(self, reader: Reader, old: np.ndarray, new: np.ndarray) -> None:
        self._old = list(reader.documents(old.tolist()).values())
        self._new = reader.documents(new.tolist())

    def new_words(self) -> tuple[str, ...]:
        from hce.tree.names import distinguishing_words  # with scikit-learn

        old, new = ([each.full_text for each in documents] for documents in (self._old, self._new.values()))
        return tuple(distinguishing_words(old, new, WORDS))

    def examples(self, numbers: np.ndarray) -> tuple[str, ...]:
        return tuple(self._new[number].id for number in numbers.tolist())
