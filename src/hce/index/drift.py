"""Drift: how documents added after training differ from those trained on, to decide when to retrain.

If encoder and tree still fit, a new document behaves like an old one. It lies as close to a leaf. A walk down the tree
reaches that leaf's region as often, and a piece of its text finds it as reliably. Samples of old and new ones are
compared. An old document is first taken out of its leaf's centroid; otherwise it would look closer than new ones can.

A region is a node of the first level. It has grown if its share of the later documents exceeds its share of the earlier
ones by more than chance. To compare these, walks down the tree place documents of both kinds in regions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from hce.data.text import cut_span
from hce.encoding.tables import Side
from hce.index.manifest import Manifest
from hce.index.state import IndexEncoder
from hce.index.tables import Reader
from hce.index.tree import ROWS_AT_ONCE, NumberedHierarchy
from hce.search.fusion import places_of
from hce.training.model_folder import IN_AN_INDEX, ModelFacts
from hce.tree.hierarchy import Hierarchy

Verdict = Literal["unknown", "ok", "re-cluster", "retrain"]

SAMPLE = 2000  # documents of each kind, old and new
SPANS = 500  # documents of each kind that are searched for by a piece of their text
SPAN_LENGTH = 16  # words and marks in such a piece
POOL = 100_000  # documents that such a piece is searched among
LEAST = 50  # fewer documents or pieces than this decide nothing

# Differences count if they exceed these; HARDER and ASTRAY must also exceed chance. docs/LOG.md has the measurements.
FARTHER = 0.35  # in standard deviations of the old documents' cosines
HARDER = 0.15  # as a share of the old rate, at which pieces of old documents find their document
ASTRAY = 0.10  # as a share of all documents
GROWN = 0.5  # documents outside the tree, for each document inside
STANDARD_ERRORS = 2.0

REGIONS = 5  # reported at most
LEAST_GROWTH = 5  # a region with fewer later documents is not reported
WALKED = 10_000  # old documents that walk down the tree, for comparison with the later ones
TEXTS = 300  # documents of each kind in a region whose words are compared
WORDS = 4
EXAMPLES = 3


class Population(NamedTuple):
    """Statistics of the old documents, or of the new ones, from a sample.

    Pieces of text (16 words) are searched for. The pieces of old documents come from documents held out from training.
    """

    documents: int  # how many there are, in the sample or not
    cosine: float  # mean cosine to the nearest leaf's centroid
    spread: float  # standard deviation of these cosines
    astray: float  # share of documents for which a walk down the tree misses the region of the nearest leaf
    found: float | None  # share of pieces whose document is among the first ten hits; None for too few pieces
    asked: int  # how many pieces there were to search for


@dataclass(frozen=True)
class GrownNode:
    """A region that has grown; the top of this module defines both words."""

    level: int
    node: int
    name: tuple[str, ...]
    before: int  # how many documents that the tree was grown from are still in the region
    added: int  # how many documents of the region came later
    words: tuple[str, ...]  # that distinguish the later documents
    examples: tuple[str, ...]  # ids of the later documents nearest to the node's center


@dataclass(frozen=True)
class Drift:
    """A verdict and the numbers behind it.

    The verdict is "ok"; "re-cluster" if the tree no longer fits (`hce rebuild` grows a new one); "retrain"; or
    "unknown" without a tree, or with too few documents to compare.
    """

    verdict: Verdict
    reasons: tuple[str, ...]  # one sentence for each
    old: Population | None = None  # the documents from before the index got its encoder
    new: Population | None = None  # the documents that came later
    outside: int = 0  # how many documents the tree was not grown from
    grown: tuple[GrownNode, ...] = ()  # the regions that grew most beyond their share

    def as_dict(self) -> dict[str, Any]:
        """Return verdict and numbers, for JSON."""
        kinds = {name: each._asdict() if each else None for name, each in (("old", self.old), ("new", self.new))}
        return {**asdict(self), **kinds}


def drift_of(
    reader: Reader, manifest: Manifest, tree: NumberedHierarchy | None, encoder: IndexEncoder, seed: int = 0
) -> Drift:
    """Compare the documents added since an index got its encoder with the others."""
    if tree is None or tree.hierarchy.depth < 2:
        return Drift("unknown", ("the index has no tree to compare with; index with a trained model to get one",))
    numbers = reader.numbers()
    last = manifest.documents if manifest.familiar is None else manifest.familiar
    trained = ModelFacts.find(encoder.index_folder / manifest.folder_of(IN_AN_INDEX))
    held_out = [number for number, _ in reader.present(trained.held_out if trained else []).values() if number <= last]

    def texts(rows: np.ndarray) -> list[str]:
        documents = reader.documents(numbers[rows].tolist())
        return [documents[number].full_text for number in numbers[rows].tolist()]

    drift = measure_drift(
        tree.hierarchy,
        places_of(tree.numbers, numbers),
        lambda rows: reader.vectors_at(numbers[rows]),
        numbers > last,
        places_of(np.array(sorted(held_out), np.int64), numbers),
        texts,
        encoder.encode,
        seed,
    )
    return replace(drift, grown=growth_of(reader, tree))


def measure_drift(
    hierarchy: Hierarchy,
    tree_rows: np.ndarray,
    vectors_at: Callable[[np.ndarray], np.ndarray],
    is_new: np.ndarray,
    held_out: np.ndarray,
    texts: Callable[[np.ndarray], Sequence[str]],
    encode: Callable[[Sequence[str], Side], np.ndarray],
    seed: int = 0,
) -> Drift:
    """Compare the documents added after training with the others.

    Documents are rows; `vectors_at` and `texts` return vectors and texts of some rows. `tree_rows` has the row of each
    document of the tree, or −1 if it is gone; `held_out` has the rows of old documents held out from training.
    """
    rng = np.random.default_rng(seed)
    old_rows, new_rows = np.flatnonzero(~is_new), np.flatnonzero(is_new)
    if not len(new_rows):
        return Drift("ok", ("nothing new yet",))
    if min(len(old_rows), len(new_rows)) < LEAST:
        return Drift("unknown", (f"{len(new_rows)} documents are new; a verdict needs {LEAST} or more",))
    leaves = _Leaves(hierarchy, tree_rows, vectors_at, len(is_new))

    def some_of(rows: np.ndarray, count: int) -> np.ndarray:
        return np.sort(rng.choice(rows, min(len(rows), count), replace=False))

    pool = some_of(np.arange(len(is_new)), POOL)

    def look_at(rows: np.ndarray, unread: np.ndarray) -> Population:
        """Measure a sample of `rows`, and search for pieces of `unread` documents."""
        sample, asked = some_of(rows, SAMPLE), some_of(unread, SPANS)
        cosine, astray = leaves.place(vectors_at(sample), sample)
        found = None
        if len(asked) >= LEAST:
            places = zip(texts(asked), rng.random(len(asked)), strict=True)
            spans = [cut_span(text, SPAN_LENGTH, place) for text, place in places]
            queries = encode([span.inside for span in spans], "query")
            own = np.einsum("ij,ij->i", queries, encode([span.outside for span in spans], "document"))
            scores = queries @ vectors_at(pool).T
            scores[asked[:, None] == pool[None, :]] = -np.inf  # leave out the piece's own document, uncut
            found = float(((scores >= own[:, None]).sum(axis=1) < 10).mean())
        return Population(len(rows), float(cosine.mean()), float(cosine.std()), float(astray.mean()), found, len(asked))

    old, new = look_at(old_rows, held_out), look_at(new_rows, new_rows)
    return _judge(old, new, int((leaves.leaf_of < 0).sum()))


class _Leaves:
    """The leaves of a tree as sums of their members, so that one member can be subtracted."""

    def __init__(
        self, hierarchy: Hierarchy, tree_rows: np.ndarray, vectors_at: Callable[[np.ndarray], np.ndarray], count: int
    ) -> None:
        self.hierarchy = hierarchy
        present = tree_rows >= 0
        rows, leaf = tree_rows[present], hierarchy.document_parent[present]
        self.leaf_of = np.full(count, -1, dtype=np.int64)
        self.leaf_of[rows] = leaf
        self.sums = np.zeros(hierarchy.levels[-1].centroids.shape, np.float32)
        for start in range(0, len(rows), ROWS_AT_ONCE):
            some = slice(start, start + ROWS_AT_ONCE)
            np.add.at(self.sums, leaf[some], vectors_at(rows[some]))
        lengths = np.linalg.norm(self.sums, axis=1, keepdims=True)
        self.centroids = self.sums / np.maximum(lengths, 1e-12)  # an empty leaf stays 0 and attracts nothing

    def place(self, vectors: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the nearest leaf's cosine, and whether a walk goes astray, each (B,)."""
        scores = vectors @ self.centroids.T  # (B, leaves)
        own = self.leaf_of[rows]
        members = np.flatnonzero(own >= 0)
        rest = self.sums[own[members]] - vectors[members]
        lengths = np.linalg.norm(rest, axis=1)
        alone = np.einsum("ij,ij->i", rest, vectors[members]) / np.maximum(lengths, 1e-6)
        scores[members, own[members]] = np.where(lengths > 1e-3, alone, -1.0)  # -1 for a leaf of one member
        above = self.hierarchy.ancestors(self.hierarchy.depth - 1, scores.argmax(axis=1))[:, 1]
        return scores.max(axis=1), above != self.hierarchy.walk(vectors)[1][:, 0]


def _judge(old: Population, new: Population, outside: int) -> Drift:
    retrain, recluster = [], []
    if old.cosine - new.cosine > FARTHER * old.spread:
        retrain.append(f"new documents lie farther from the leaves: cosine {new.cosine:.3f}, old ones {old.cosine:.3f}")
    if (
        old.found is not None
        and new.found is not None
        and _differ(old.found, old.asked, new.found, new.asked, HARDER * old.found)
    ):
        retrain.append(f"pieces of new documents find them {new.found:.0%} of the time, of old ones {old.found:.0%}")
    if _differ(new.astray, min(new.documents, SAMPLE), old.astray, min(old.documents, SAMPLE), ASTRAY):
        recluster.append(
            f"{new.astray:.0%} of new documents go astray on the way down the tree, {old.astray:.0%} of old"
        )
    inside = old.documents + new.documents - outside
    if outside > GROWN * inside:
        recluster.append(f"the tree was grown from {inside:,} documents, and {outside:,} others have come since")
    verdict: Verdict = "retrain" if retrain else "re-cluster" if recluster else "ok"
    reasons = [*retrain, *recluster] or ["new documents fit in as well as old ones"]
    return Drift(verdict, tuple(reasons), old, new, outside)


def _differ(higher: float, count: int, lower: float, other_count: int, least: float) -> bool:
    """Return whether a share exceeds another by `least`, and by more than chance."""
    error = np.sqrt(higher * (1 - higher) / count + lower * (1 - lower) / other_count)
    return bool(higher - lower > max(least, STANDARD_ERRORS * error))


def growth_of(reader: Reader, tree: NumberedHierarchy | None) -> tuple[GrownNode, ...]:
    """Return the regions that have grown; the top of this module says when."""
    if tree is None or not tree.hierarchy.levels:
        return ()
    later, vectors = reader.vectors(after=int(tree.numbers.max(initial=0)))
    if len(later) < LEAST_GROWTH:
        return ()
    hierarchy, kept = tree.hierarchy, np.isin(tree.numbers, reader.numbers())
    old, old_node_of = tree.numbers[kept], hierarchy.nodes_at(1)[kept]
    if not len(old):
        return ()
    count, node_of = hierarchy.node_count(1), hierarchy.walk(vectors)[1][:, 0]
    added, before = np.bincount(node_of, minlength=count), np.bincount(old_node_of, minlength=count)
    # A walk does not always reach the node that clustering chose, so compare with walks of old documents.
    some = np.sort(np.random.default_rng(0).choice(old, min(len(old), WALKED), replace=False))
    walked = np.bincount(hierarchy.walk(reader.vectors_at(some))[1][:, 0], minlength=count)
    ratio = added.sum() / len(some)
    surplus = added - walked * ratio
    error = np.sqrt(np.maximum(walked * ratio, 1) * (1 + ratio))  # both counts, added and expected, are uncertain
    nodes = np.flatnonzero((added >= LEAST_GROWTH) & (surplus > STANDARD_ERRORS * error))
    from hce.tree.names import distinguishing_words  # imports scikit-learn

    regions = []
    for node in nodes[np.argsort(-surplus[nodes], kind="stable")][:REGIONS].tolist():
        inside = node_of == node
        closeness = vectors[inside] @ hierarchy.levels[0].centroids[node]
        nearest = later[inside][np.argsort(-closeness, kind="stable")].tolist()
        earlier, new = reader.documents(old[old_node_of == node][:TEXTS].tolist()), reader.documents(nearest[:TEXTS])
        name, counts = tuple(hierarchy.name(1, node)), (int(before[node]), int(added[node]))
        old_texts, new_texts = ([each.full_text for each in found.values()] for found in (earlier, new))
        words = distinguishing_words(old_texts, new_texts, WORDS)
        examples = tuple(new[each].id for each in nearest[:EXAMPLES])
        regions.append(GrownNode(1, node, name, *counts, tuple(words), examples))
    return tuple(regions)
