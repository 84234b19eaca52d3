"""A tree for people and other tools: a readable outline, and nested JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.text import Text
from rich.tree import Tree

from hce.tree.hierarchy import Hierarchy


def nested(hierarchy: Hierarchy, ids: Sequence[str | None] | None = None) -> dict[str, Any]:
    """Return the whole tree as nested mappings: `level`, `node`, `size`, `name`, `children`; documents by id if given.

    A document whose id is None is not there any more, and left out; sizes are those of the tree.
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
    """Draw the top of the tree for a terminal: the largest nodes first, with their names and sizes.

    >>> import rich
    >>> tree = Hierarchy.build(np.repeat(np.eye(2, dtype=np.float32), [3, 1], axis=0), branching=3)
    >>> tree.names = [[["shoes", "boots"], ["hats"]]] if tree.path(0)[0] == 0 else [[["hats"], ["shoes", "boots"]]]
    >>> rich.print(outline(tree))
    4 documents, 2 levels
    ├── shoes · boots  3
    └── hats  1

    Args:
        hierarchy: the tree, with or without names.
        levels: how many levels to show.
        most: how many children of a node to show; the rest is counted in a last line.
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
