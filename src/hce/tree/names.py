"""Names for a tree's nodes, and the tree as an outline and as JSON.

A name is a few words that are in many of a node's documents, but in few of its siblings'. A document counts once for a
word, so one long text cannot name a node. The weight of a word in a node is s·r^1.5, where

    s = the share of the node's documents with the word
    r = the mean of log(s / share in the parent) and log(s / share in all documents), at most log 8

The bound keeps out words of a single document. The exponent keeps out words that most nodes have ("patients",
"contains"). On five collections these names read better than those of class-based TF-IDF (docs/LOG.md, "Names of
nodes"). A node does not repeat its ancestors' words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.text import Text
from rich.tree import Tree
from scipy import sparse

from hce.progress import counted, progress_bar
from hce.tree.hierarchy import Hierarchy, Names

WORDS_IN_A_NAME = 3
LARGEST_VOCABULARY = 50_000

# Two letters or more, digits allowed after them: "covid19" is a word, "1995" is not.
NAMING_WORD = r"(?u)\b[^\W\d_]{2}[\w-]*\b"
ADDRESS = re.compile(r"[a-z+]{2,20}://\S+|\bwww\.\S+|[\w.+-]{1,64}@[\w-]+\.\S+")

NO_WORDS = np.empty(0, dtype=np.int64)
MOST_RATIO = np.log(8)
EXPONENT = 1.5


def name_nodes(
    hierarchy: Hierarchy, texts: Iterable[str], words: int = WORDS_IN_A_NAME, *, progress: bool = False
) -> Names:
    """Name every inner node after its documents' distinguishing words.

    `texts` are those of the tree's documents, in their order. A name has at most `words` words.
    """
    with progress_bar("words for names", len(hierarchy), "documents", show=progress) as advance:
        found = _counted(counted(texts, advance))
    if found is None:
        return [[[] for _ in level.parent] for level in hierarchy.levels]
    having, vocabulary, singular = found
    names: list[list[np.ndarray]] = []
    above = all_documents = _Group(having.sum(axis=0), np.array([len(hierarchy)]))
    total = sum(len(level.parent) for level in hierarchy.levels)
    with progress_bar("naming nodes", total, "nodes", show=progress) as advance:
        for t, level in enumerate(hierarchy.levels, start=1):
            of_level = _Group.of(having, hierarchy.nodes_at(t), len(level.parent))
            weights = _weights(of_level, above, level.parent, all_documents)
            ancestors = hierarchy.ancestors(t, np.arange(len(level.parent)))[:, 1:-1]
            names.append([])
            for weight, nodes_above in zip(weights, ancestors, strict=True):
                used = [names[up][node] for up, node in enumerate(nodes_above)]
                names[-1].append(_best(weight, singular, np.concatenate([NO_WORDS, *used]), words))
                advance(1)
            above = of_level
    return [[vocabulary[columns].tolist() for columns in level] for level in names]


def distinguishing_words(texts: Sequence[str], others: Sequence[str], words: int = WORDS_IN_A_NAME) -> list[str]:
    """Return the words that distinguish `others` from `texts`, as in a node's name.

    >>> distinguishing_words(["ships at sea"] * 3, ["ships at sea", "ships on canals", "canals and locks"], words=1)
    ['canals']
    """
    found = _counted([*texts, *others])
    if found is None:
        return []
    having, vocabulary, singular = found
    side = np.repeat([0, 1], [len(texts), len(others)])
    both = _Group(having.sum(axis=0), np.array([having.shape[0]]))
    weights = _weights(_Group.of(having, side, 2), both, np.zeros(2, np.int64), both)[1]
    weights = weights.multiply(weights > 0).tocsr()
    weights.eliminate_zeros()
    return list(map(str, vocabulary[_best(weights, singular, NO_WORDS, words)]))


def _counted(texts: Iterable[str]) -> tuple[sparse.csr_matrix, np.ndarray, np.ndarray] | None:
    """Return which text has which word, the words, and a number for each word.

    "cell" and "cells" have the same number. Without any words, return None.
    """
    from sklearn.feature_extraction.text import CountVectorizer  # takes a second to import

    counter = CountVectorizer(
        stop_words="english",
        token_pattern=NAMING_WORD,
        max_features=LARGEST_VOCABULARY,
        binary=True,
        preprocessor=_without_addresses,
    )
    try:
        having = counter.fit_transform(texts)
    except ValueError:  # an empty vocabulary
        return None
    vocabulary = counter.get_feature_names_out()
    return having, vocabulary, np.unique([*map(_singular, vocabulary)], return_inverse=True)[1]


def _without_addresses(text: str) -> str:
    """Return a text in lower case without URLs and email addresses.

    >>> _without_addresses("See https://example.org/a, or mail to me@example.org")
    'see   or mail to  '
    """
    return ADDRESS.sub(" ", text.lower())


class _Group(NamedTuple):
    """For each node, its number of documents with each word, (nodes, words), and of all documents, (nodes,)."""

    having: sparse.csr_matrix
    sizes: np.ndarray

    @classmethod
    def of(cls, having: sparse.csr_matrix, members: np.ndarray, nodes: int) -> _Group:
        """Add up the documents of each node."""
        ones = np.ones(len(members), having.dtype)
        member = sparse.csr_matrix((ones, (members, np.arange(len(members)))), (nodes, len(members)))
        return cls((member @ having).tocsr(), np.bincount(members, minlength=nodes))

    def shares(self, nodes: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Return the share of a node's documents with a word, for pairs (node, word)."""
        return np.asarray(self.having[nodes, words]).ravel() / self.sizes[nodes]


def _weights(nodes: _Group, above: _Group, parent: np.ndarray, everywhere: _Group) -> sparse.csr_matrix:
    """Weigh the words of each node against its parent and all documents."""
    weights = nodes.having.tocoo().astype(np.float64)
    node, word = weights.row, weights.col
    share = weights.data / nodes.sizes[node]
    over_parent, over_all = above.shares(parent[node], word), everywhere.shares(np.zeros_like(node), word)
    ratio = np.minimum((np.log(share / over_parent) + np.log(share / over_all)) / 2, MOST_RATIO)
    weights.data = share * np.sign(ratio) * np.abs(ratio) ** EXPONENT
    return weights.tocsr()


def _best(weights: sparse.csr_matrix, singular: np.ndarray, inherited: np.ndarray, words: int) -> np.ndarray:
    """Return the columns of a node's heaviest words, singular or plural, not both."""
    ranked = weights.indices[np.lexsort((weights.indices, -weights.data))]
    fresh = ranked[~np.isin(singular[ranked], singular[inherited])]
    first_form = np.sort(np.unique(singular[fresh], return_index=True)[1])
    return np.asarray(fresh[first_form][:words], dtype=np.int64)


def _singular(word: str) -> str:
    """Return a word without a plural s, to recognize both forms as one word."""
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def nested(hierarchy: Hierarchy, ids: Sequence[str | None] | None = None) -> dict[str, Any]:
    """Return the tree as nested mappings; documents are their `ids`, or positions.

    An id of None marks a deleted document, which is left out. But sizes still count it.
    """

    def node_at(level: int, node: int) -> dict[str, Any]:
        below = hierarchy.children(level, node).tolist()
        entry: dict[str, Any] = {"level": level, "node": node, "size": int(sizes[level][node])}
        if level and hierarchy.names:
            entry["name"] = hierarchy.name(level, node)
        if level < hierarchy.depth - 1:
            entry["children"] = [node_at(level + 1, child) for child in below]
        else:
            entry["documents"] = [ids[child] for child in below if ids[child] is not None] if ids else below
        return entry

    sizes = hierarchy.document_counts()
    return node_at(0, 0)


def outline(hierarchy: Hierarchy, *, levels: int = 2, most: int = 8) -> Tree:
    """Draw the top of the tree for a terminal: the largest nodes first.

    >>> import rich
    >>> tree = Hierarchy.build(np.repeat(np.eye(2, dtype=np.float32), [3, 1], axis=0), branching=3)
    >>> tree.names = [[["shoes", "boots"], ["hats"]]] if tree.path(0)[0] == 0 else [[["hats"], ["shoes", "boots"]]]
    >>> rich.print(outline(tree))
    4 documents, 2 levels
    ├── shoes · boots  3
    └── hats  1
    """
    sizes = hierarchy.document_counts()
    root = Tree(Text(f"{len(hierarchy):,} documents, {hierarchy.depth} levels", style="bold"))

    def add_children(branch: Tree, level: int, node: int) -> None:
        if level >= min(levels, hierarchy.depth - 1):
            return
        children = hierarchy.children(level, node)
        largest = children[np.argsort(-sizes[level + 1][children], kind="stable")]
        for child in largest[:most].tolist():
            name = " · ".join(hierarchy.name(level + 1, child)) or f"node {child}"
            line = Text(name).append(f"  {sizes[level + 1][child]:,}", style="dim")
            add_children(branch.add(line), level + 1, child)
        if len(largest) > most:
            rest = int(sizes[level + 1][largest[most:]].sum())
            branch.add(Text(f"… {len(largest) - most:,} more, {rest:,} documents", style="dim"))

    add_children(root, 0, 0)
    return root
