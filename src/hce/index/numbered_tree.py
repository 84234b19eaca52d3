"""The tree that an index carries: a hierarchy, the number in the store of each of its documents, and their paths.

A tree is derived: it can be grown again from the documents there are. Each has a folder of its own, and the manifest
says which one counts.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hce.contained import check_tree, delete_folder, is_file, is_folder, plain_path
from hce.errors import FormatError, warn_once
from hce.files import released, write_to_be_mapped
from hce.index.manifest import Manifest, is_index
from hce.index.store import Reader
from hce.memory import HELD
from hce.progress import progress_bar
from hce.tree.hierarchy import NUMBERS, Hierarchy

logger = logging.getLogger(__name__)

FOLDER = "hierarchy"  # of the first tree; later ones add the number of a change
MOST_READ = 1 << 20  # documents, from all over, that nodes are named after; of more, the words would take much memory
ROWS_AT_ONCE = 16_384


class NumberedHierarchy(NamedTuple):
    """A hierarchy, and the number in the store of each of its documents, of shape (N,), int64."""

    hierarchy: Hierarchy
    numbers: np.ndarray

    def save(self, folder: Path) -> None:
        """Write the tree and the numbers into a new folder that appears whole or not at all."""
        self.hierarchy.save(folder, self.numbers)

    @classmethod
    def load(cls, folder: Path) -> NumberedHierarchy:
        """Read what `save` wrote.

        Raises:
            FormatError: nothing is there, or it is damaged.
        """
        hierarchy, path = Hierarchy.load(folder), folder / NUMBERS
        try:
            numbers = np.array(np.load(plain_path(path), mmap_mode="r", allow_pickle=False))  # no longer than its file
        except (OSError, ValueError, EOFError) as error:
            raise FormatError(f"{path}: damaged ({error}); rebuild the index") from error
        if numbers.shape != (len(hierarchy),) or numbers.dtype != np.int64:
            raise FormatError(f"{path}: {len(numbers)} numbers for {len(hierarchy)} documents; rebuild the index")
        return cls(hierarchy, numbers)


def load_tree(index_folder: Path, suffix: str | None = None) -> NumberedHierarchy | None:
    """Read the tree that the manifest names; None where it names none, or a damaged one, of which a line is logged.

    Args:
        index_folder: the folder of the index.
        suffix: of the folders of the encoder whose tree it is; by default, of the one in force.
    """
    name = _named(index_folder, suffix)
    while name is not None:
        try:
            is_folder(index_folder / name, index_folder)
            return NumberedHierarchy.load(index_folder / name)
        except FormatError as error:
            known, name = name, _named(index_folder, suffix)
            if name == known:  # else another process has just rebuilt the index
                warn_once(logger, f"{error} (it is left out until 'hce rebuild {index_folder}' grows it anew)")
                return None
    return None


def _named(index_folder: Path, suffix: str | None) -> str | None:
    """Return the folder of the tree of one of an index's encoders."""
    manifest = Manifest.read(index_folder)
    other = manifest.other()
    if other is None or suffix in (None, manifest.suffix):
        return manifest.hierarchy
    grown = f"{FOLDER}{suffix}"  # by a reindexing that is under way
    return other.hierarchy or (grown if is_folder(index_folder / grown) else None)


def grow_named_tree(
    vectors: np.ndarray, texts: Iterable[str], device: Any = None, *, progress: bool = False
) -> Hierarchy | None:
    """Grow a tree and name its nodes; None where there are too few documents for one.

    Of processes that work together all grow it, and the first one names its nodes.
    """
    from hce.processes import is_first_process  # with torch and scikit-learn, which are not needed to look at a tree
    from hce.tree.names import name_nodes

    if len(vectors) < 2:
        return None
    tree = Hierarchy.build(vectors, device=device, progress=progress)
    if not tree.levels:
        return None
    if not is_first_process():
        return tree
    every = -(-len(vectors) // MOST_READ)
    some = (text if position % every == 0 else "" for position, text in enumerate(texts))
    tree.names = name_nodes(tree, some, progress=progress)
    return tree


def regrow_tree(index_folder: Path, name: str, reader: Reader, *, progress: bool = False) -> str | None:
    """Return the folder of a tree of just the documents that `reader` sees: `name` if it holds one, else a new one."""
    if _is_of(index_folder / name, reader.numbers()):
        return name
    return grow_tree(index_folder, f"{FOLDER}-{reader.moment().change}", reader, progress=progress)


def grow_tree(index_folder: Path, name: str, reader: Reader, *, progress: bool = False) -> str | None:
    """Grow a tree of the documents there are now in a folder of this name; None where they are too few for one."""
    with all_vectors(reader, index_folder) as (numbers, vectors):
        tree = grow_named_tree(vectors, (text for _, text in reader.texts()), progress=progress)
    if tree is None:
        return None
    delete_folder(index_folder / name, index_folder)
    NumberedHierarchy(tree, numbers).save(index_folder / name)
    return name


def _is_of(folder: Path, numbers: np.ndarray) -> bool:
    """Tell whether a tree is whole, and of just the documents with these numbers."""
    try:
        return np.array_equal(NumberedHierarchy.load(folder).numbers, numbers)
    except FormatError:
        return False


def hierarchy_folder(path: str | Path) -> Path | None:
    """Find the folder that holds a tree: in an index, in a model, or `path` itself; None where there is none.

    Raises:
        FormatError: `path` is an index that was made without a tree.
    """
    path, candidates = Path(path), [FOLDER, "."]
    if is_index(path):
        check_tree(path)
        named = Manifest.read(path).hierarchy
        if named is None:
            raise FormatError(f"{path}: this index carries no tree; index anew to get one")
        candidates = [named]
    return next((path / name for name in candidates if is_file(path / name / "hierarchy.safetensors", path)), None)


# ------------------------------------------------------------------------------------------------- paths


@dataclass(frozen=True)
class PathNode:
    """A node on a document's path.

    Attributes:
        level: 1 is the level below the root.
        node: the node's place in its level.
        name: the words of the node's name; empty if the node has no name.
    """

    level: int
    node: int
    name: list[str]


TreePath = tuple[PathNode, ...]


def paths_of(reader: Reader, tree: NumberedHierarchy, numbers: Iterable[int]) -> dict[int, TreePath]:
    """Return the path of each document that `reader` sees, from level 1 down to its leaf."""
    wanted = np.unique(np.fromiter(numbers, np.int64))
    leaves = _leaves_of(reader, tree, wanted).tolist()
    path_to = {leaf: _path_to(tree.hierarchy, leaf) for leaf in set(leaves)}
    return {number: path_to[leaf] for number, leaf in zip(wanted.tolist(), leaves, strict=True) if leaf >= 0}


def _leaves_of(reader: Reader, tree: NumberedHierarchy, wanted: np.ndarray) -> np.ndarray:
    """Return the leaf of each document; -1 if the tree's centroids are of another encoder's dimension."""
    place = np.minimum(np.searchsorted(tree.numbers, wanted), len(tree.numbers) - 1)
    leaves = tree.hierarchy.document_parent[place].astype(np.int64)
    later = tree.numbers[place] != wanted
    if later.any():
        vectors = reader.vectors_at(wanted[later])
        fits = vectors.shape[1] == tree.hierarchy.levels[0].centroids.shape[1]
        leaves[later] = tree.hierarchy.walk(vectors)[-1][:, 0] if fits else -1
    return leaves


def _path_to(hierarchy: Hierarchy, leaf: int) -> TreePath:
    if leaf < 0:
        return ()
    nodes = hierarchy.ancestors(hierarchy.depth - 1, np.array([leaf]))[0].tolist()
    return tuple(PathNode(level, node, hierarchy.name(level, node)) for level, node in enumerate(nodes) if level)


# ------------------------------------------------------------------------------------------------- vectors


@contextmanager
def all_vectors(reader: Reader, folder: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the numbers of all documents, rising, of shape (N,), int64, and their vectors, of shape (N, n).

    Args:
        reader: of the moment.
        folder: where there is room for a temporary file; a kill leaves nothing of it.
    """
    numbers = reader.numbers()
    if are_few(reader, numbers):
        yield reader.vectors()
        return
    with tempfile.TemporaryFile(dir=folder, prefix=".vectors-") as file:
        with progress_bar("fetching vectors", len(numbers), "vectors") as advance:
            for start in range(0, len(numbers), ROWS_AT_ONCE):
                some = numbers[start : start + ROWS_AT_ONCE]
                write_to_be_mapped(file, reader.vectors_at(some))
                advance(len(some))
        file.flush()
        vectors = np.memmap(file, dtype=np.float32, mode="r", shape=(len(numbers), reader.dim))
        with released(vectors):
            yield numbers, vectors


def are_few(reader: Reader, numbers: np.ndarray) -> bool:
    """Tell whether the vectors of these documents fit into memory."""
    return 4 * reader.dim * len(numbers) <= HELD
