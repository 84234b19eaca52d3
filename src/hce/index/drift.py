"""Is it time to retrain? Documents that came after training, beside those that were trained on.

An encoder and a tree that know the corpus treat a new document like an old one: it lies as close to a leaf, a walk
down the tree leads to that leaf, and a piece of its text finds it as surely. What is compared is a sample of each
kind, an old document always as if it were new: its own share in its leaf's centroid is taken out first, or every old
document would look closer than any new one can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from hce.data.text import cut_span
from hce.encoding.encoder import Kind
from hce.tree.hierarchy import Hierarchy

Verdict = Literal["unknown", "ok", "re-cluster", "retrain"]

SAMPLE = 2000  # documents of each kind
SPANS = 500  # of them asked for by a piece of their text
SPAN_LENGTH = 16
POOL = 100_000  # documents that a piece of text is searched among
LEAST = 50  # fewer new documents than this say nothing

# A gap counts from these sizes on (docs/LOG.md has what they were chosen by), and if it is no accident of the sample.
FARTHER = 0.35  # standard deviations of the old documents' cosines
HARDER = 0.15  # of the old documents' share of pieces that find their text
ASTRAY = 0.10  # of all documents
GROWN = 0.5  # documents that the tree was not grown from, for each that it was
STANDARD_ERRORS = 2.0


class Population(NamedTuple):
    """What a sample of documents shows.

    Attributes:
        documents: how many there are of this kind.
        cosine: mean cosine to the nearest leaf's centroid.
        spread: standard deviation of that.
        astray: the share that a walk down the tree would put under another parent than the nearest leaf's.
        found: the share of pieces of text (16 tokens) that find the document they were cut from among the first ten;
            of old documents only those count that training held out (it has seen pieces of the others), and where
            there are too few it is None.
        asked: how many pieces were tried.
    """

    documents: int
    cosine: float
    spread: float
    astray: float
    found: float | None
    asked: int


@dataclass(frozen=True)
class Drift:
    """A verdict and the numbers behind it.

    Attributes:
        verdict: ok; re-cluster (`hce rebuild`: the encoder serves, the tree does not fit any more); retrain; or
            unknown, where there is no tree or too little is new.
        reasons: why, one sentence each.
        old: documents that were there at training.
        new: documents that came later.
        fullest: the share of the new documents that went to the one leaf that most of them went to.
        outside: how many documents the tree was not grown from.
    """

    verdict: Verdict
    reasons: tuple[str, ...]
    old: Population | None = None
    new: Population | None = None
    fullest: float = 0.0
    outside: int = 0

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        kinds = {name: each._asdict() if each else None for name, each in (("old", self.old), ("new", self.new))}
        return {**asdict(self), **kinds}


class Grown(NamedTuple):
    """A tree and the documents it was grown from.

    Attributes:
        hierarchy: the tree.
        rows: for each of its documents the row in `vectors`, or −1 where the document is gone, of shape (N,).
    """

    hierarchy: Hierarchy
    rows: np.ndarray


def measure_drift(
    tree: Grown,
    vectors: np.ndarray,
    is_new: np.ndarray,
    held_out: np.ndarray,
    texts: Callable[[np.ndarray], Sequence[str]],
    encode: Callable[[Sequence[str], Kind], np.ndarray],
    seed: int = 0,
) -> Drift:
    """Compare the documents that came after training with the others.

    Args:
        tree: the tree, and which rows it was grown from.
        vectors: of all documents, unit rows of shape (N, n).
        is_new: which of them were not trained on, of shape (N,), bool.
        held_out: rows of old documents that were not trained on either.
        texts: the texts of some rows.
        encode: as the vectors were made: texts of a kind to unit rows.
        seed: of the samples.
    """
    rng = np.random.default_rng(seed)
    kinds = [np.flatnonzero(~is_new), np.flatnonzero(is_new)]
    if min(map(len, kinds)) < LEAST:
        return Drift("unknown", (f"{len(kinds[1])} documents are new; {LEAST} or more are needed to tell",))
    leaves = _Leaves(tree, vectors)
    pool = np.sort(rng.choice(len(vectors), min(len(vectors), POOL), replace=False))
    populations, went_to = [], np.empty(0, dtype=np.int64)
    for rows, unread in zip(kinds, (held_out, kinds[1]), strict=True):
        sample = np.sort(rng.choice(rows, min(len(rows), SAMPLE), replace=False))
        cosine, went_to, astray = leaves.place(vectors[sample], sample)
        asked = np.sort(rng.choice(unread, min(len(unread), SPANS), replace=False))
        found = _found(asked, texts(asked), vectors, pool, encode, rng) if len(asked) >= LEAST else None
        populations.append(
            Population(len(rows), float(cosine.mean()), float(cosine.std()), float(astray.mean()), found, len(asked))
        )
    fullest = float(np.bincount(went_to).max() / len(went_to))
    old, new = populations
    return _judge(old, new, fullest, int((leaves.leaf_of < 0).sum()))


class _Leaves:
    """The leaves of a tree as sums of their members, so that a member can be taken out."""

    def __init__(self, tree: Grown, vectors: np.ndarray) -> None:
        self.hierarchy = tree.hierarchy
        present = tree.rows >= 0
        leaf = tree.hierarchy.document_parent[present]
        self.leaf_of = np.full(len(vectors), -1, dtype=np.int64)
        self.leaf_of[tree.rows[present]] = leaf
        self.sums = np.zeros((tree.hierarchy.node_count(tree.hierarchy.depth - 1), vectors.shape[1]), dtype=np.float32)
        np.add.at(self.sums, leaf, vectors[tree.rows[present]])
        lengths = np.linalg.norm(self.sums, axis=1, keepdims=True)
        self.centroids = self.sums / np.maximum(lengths, 1e-12)  # a leaf whose documents are all gone attracts nothing

    def place(self, vectors: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Cosine to the nearest leaf, that leaf, and whether the walk down the tree goes elsewhere; each (B,)."""
        scores = vectors @ self.centroids.T  # (B, leaves)
        own = self.leaf_of[rows]
        members = np.flatnonzero(own >= 0)
        rest = self.sums[own[members]] - vectors[members]
        lengths = np.linalg.norm(rest, axis=1)
        alone = np.einsum("ij,ij->i", rest, vectors[members]) / np.maximum(lengths, 1e-6)
        scores[members, own[members]] = np.where(lengths > 1e-3, alone, -1.0)  # nothing is left of a leaf of one
        nearest = scores.argmax(axis=1)
        return scores.max(axis=1), nearest, self._top_of(nearest) != self._walk(vectors)

    def _top_of(self, leaf: np.ndarray) -> np.ndarray:
        """The node of level 1 above each leaf."""
        for level in self.hierarchy.levels[:0:-1]:
            leaf = level.parent[leaf]
        return leaf

    def _walk(self, vectors: np.ndarray) -> np.ndarray:
        """The node of level 1 that a walk down from the root enters first."""
        return np.asarray((vectors @ self.hierarchy.levels[0].centroids.T).argmax(axis=1))


def _found(
    rows: np.ndarray,
    texts: Sequence[str],
    vectors: np.ndarray,
    pool: np.ndarray,
    encode: Callable[[Sequence[str], Kind], np.ndarray],
    rng: np.random.Generator,
) -> float:
    """The share of documents that a piece cut out of them finds among the first ten, itself without the piece."""
    spans = [cut_span(text, SPAN_LENGTH, place) for text, place in zip(texts, rng.random(len(texts)), strict=True)]
    asked = encode([span.inside for span in spans], "query")
    own = np.einsum("ij,ij->i", asked, encode([span.outside for span in spans], "document"))
    scores = asked @ np.asarray(vectors[pool]).T
    scores[rows[:, None] == pool[None, :]] = -np.inf  # its whole text
    return float(((scores >= own[:, None]).sum(axis=1) < 10).mean())


def _judge(old: Population, new: Population, fullest: float, outside: int) -> Drift:
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
    return Drift(verdict, tuple(reasons), old, new, fullest, outside)


def _differ(higher: float, count: int, lower: float, other_count: int, least: float) -> bool:
    """Whether a share exceeds another by `least`, and by more than chance would have it."""
    error = np.sqrt(higher * (1 - higher) / count + lower * (1 - lower) / other_count)
    return bool(higher - lower > max(least, STANDARD_ERRORS * error))
