"""At which level of the tree a query's way down leaves the way to a relevant document.

    python -m hce_lab by_level data/scifact my-model [--split test] [--json]

A query goes down greedily: from the root to the child whose centroid it has the largest inner product with, and so on
to a document. The paper supposes that the early levels choose well and the last one, whose siblings training only
samples, does not; the steps of a `Diagnosis` say whether that is so.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hce.data.judgments import Dataset, Qrels
from hce.encoding.corpus_vectors import encode_corpus
from hce.encoding.encoder import Encoder
from hce.errors import InputError
from hce.training.model_folder import trained_tree
from hce.tree.hierarchy import Hierarchy

BEAM = 10


class Step(NamedTuple):
    """How well one level of the tree is chosen; on the way is a node with a relevant document under it.

    Attributes:
        level: 1 … L; step L goes from the last inner node to a document.
        choices: mean number of children that there are to choose among.
        accuracy: of the queries on the way before the step, the share on the way after it.
        forced: the same for all queries, each led to the parent of its right document first; what training sees.
        reached: the share of all queries still on the way after the step; after the last, the document is found.
        reached_by_beam: the same where the best `beam` nodes of a level are kept and not one.
    """

    level: int
    choices: float
    accuracy: float
    forced: float
    reached: float
    reached_by_beam: float


@dataclass(frozen=True)
class Diagnosis:
    """Steps from the top down, and where each query went wrong.

    Attributes:
        steps: one for each level.
        left_at: for each query the level at which its path leaves those of all relevant documents; None where it
            never does.
        beam: how many nodes the beam keeps.
        skipped: queries with no relevant document in the tree; they are in no figure.
    """

    steps: list[Step]
    left_at: dict[str, int | None]
    beam: int
    skipped: list[str]

    def __str__(self) -> str:
        """Return a table for people, with the verdict below."""
        last = len(self.steps)
        lines = [f"{'step':<14}{'choices':>9}{'accuracy':>10}{'forced':>8}{'reached':>9}{f'beam {self.beam}':>9}"]
        for step in self.steps:
            name = f"{step.level}" if step.level < last else f"{step.level}, document"
            shares = f"{step.accuracy:>10.3f}{step.forced:>8.3f}{step.reached:>9.3f}{step.reached_by_beam:>9.3f}"
            lines.append(f"{name:<14}{step.choices:>9.1f}{shares}")
        return "\n".join([*lines, self.verdict])

    @property
    def verdict(self) -> str:
        """Which step is the weakest, and whether that is the one that the paper supposes."""
        weakest = min(self.steps, key=lambda step: step.accuracy)
        if len(self.steps) == 1:
            return "the tree has a single level: there is no way down to lose"
        if weakest.level == len(self.steps):
            return "the last step, to the document, is the weakest, as the paper supposes"
        return f"step {weakest.level} is the weakest; the paper supposes that the last one is"


def diagnose(
    hierarchy: Hierarchy,
    documents: Sequence[str],
    vectors: np.ndarray,
    queries: Mapping[str, np.ndarray],
    qrels: Qrels,
    *,
    beam: int = BEAM,
) -> Diagnosis:
    """Follow every judged query down the tree.

    A query with several relevant documents is on the way as long as it is on the way to one of them; the right
    document to lead it to is the one it has the largest inner product with.

    Args:
        hierarchy: the tree of the documents.
        documents: their ids, in the order of the tree's documents.
        vectors: the documents' vectors, of shape (N, n).
        queries: a vector of shape (n,) for each query id.
        qrels: the judgments.
        beam: how many nodes of a level the beam keeps.

    Raises:
        InputError: tree, documents and vectors do not belong together, or no judged query has a relevant document.
    """
    if not len(hierarchy) == len(documents) == len(vectors):
        raise InputError(
            f"a tree of {len(hierarchy):,} documents, {len(documents):,} ids and {len(vectors):,} vectors "
            "do not belong together"
        )
    position = {document_id: place for place, document_id in enumerate(documents)}
    positives = {
        query_id: np.array([position[name] for name in qrels.positives(query_id) if name in position], dtype=np.int64)
        for query_id in queries
    }
    asked = [query_id for query_id, found in positives.items() if len(found)]
    if not asked:
        raise InputError("no query has a relevant document in the tree; do judgments and corpus match?")
    query_vectors = np.stack([queries[query_id] for query_id in asked])
    ways = _follow(hierarchy, vectors, query_vectors, [positives[query_id] for query_id in asked], beam)
    left_at = {
        query_id: None if stayed.all() else int(np.argmin(stayed)) + 1
        for query_id, stayed in zip(asked, ways.greedy, strict=True)
    }
    return Diagnosis(_steps(ways), left_at, beam, [query_id for query_id in queries if query_id not in left_at])


class _Ways(NamedTuple):
    """For each query and level, of shape (Q, L): whether the query is on the way, and how many children it met."""

    greedy: np.ndarray
    by_beam: np.ndarray
    forced: np.ndarray
    choices: np.ndarray


def _follow(
    hierarchy: Hierarchy, vectors: np.ndarray, queries: np.ndarray, positives: Sequence[np.ndarray], beam: int
) -> _Ways:
    levels = range(hierarchy.depth)  # from which the steps go down
    nearest = [found[np.argmax(vectors[found] @ query)] for query, found in zip(queries, positives, strict=True)]
    right = hierarchy.ancestors(hierarchy.depth, np.array(nearest))  # (Q, L + 1)
    forced = [hierarchy.closest_children(level, right[:, [level]], queries, 1, vectors) for level in levels]
    on_the_way = [hierarchy.paths[found] for found in positives]  # (positives, L) each
    return _Ways(
        greedy=_hits(hierarchy.walk(queries, 1, vectors)[1:], on_the_way),
        by_beam=_hits(hierarchy.walk(queries, beam, vectors)[1:], on_the_way),
        forced=_hits(forced, on_the_way),
        choices=np.array([[len(hierarchy.children(level, way[level])) for level in levels] for way in right]),
    )


def _hits(chosen: Sequence[np.ndarray], on_the_way: Sequence[np.ndarray]) -> np.ndarray:
    """Tell whether one of the nodes that a query chose at a level is on the way, of shape (Q, L)."""
    return np.array(
        [
            [np.isin(nodes[query], right[:, level]).any() for level, nodes in enumerate(chosen)]
            for query, right in enumerate(on_the_way)
        ]
    )


def _steps(ways: _Ways) -> list[Step]:
    reached = ways.greedy.mean(axis=0)
    before = np.concatenate([[1.0], reached[:-1]])
    accuracy = np.divide(reached, before, out=np.zeros_like(reached), where=before > 0)
    columns = (ways.choices.mean(axis=0), accuracy, ways.forced.mean(axis=0), reached, ways.by_beam.mean(axis=0))
    return [Step(level, *map(float, row)) for level, row in enumerate(zip(*columns, strict=True), start=1)]


def main(argv: Sequence[str] | None = None) -> None:
    """Follow the queries of a collection down the model's own tree, or one grown from its vectors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path, help="a folder in BEIR's format")
    parser.add_argument("model", help="a folder that `hce train` wrote, or any encoder")
    parser.add_argument("--split", default="test")
    parser.add_argument("--seed", type=int, default=0, help="of a tree that is grown here")
    parser.add_argument("--json", action="store_true", help="also the level at which each query left the way")
    arguments = parser.parse_args(argv)
    (corpus, queries, qrels), encoder = Dataset.load(arguments.dataset, arguments.split), Encoder.load(arguments.model)
    vectors = encode_corpus(encoder, corpus)
    hierarchy = trained_tree(arguments.model, corpus) or Hierarchy.build(vectors, seed=arguments.seed)
    encoded = encoder.encode([queries[query_id].text for query_id in qrels], "query")
    found = diagnose(hierarchy, corpus.ids, vectors, dict(zip(qrels, encoded, strict=True)), qrels)
    steps = {"steps": [step._asdict() for step in found.steps], "left_at": found.left_at, "verdict": found.verdict}
    print(json.dumps(steps, indent=2) if arguments.json else found)


if __name__ == "__main__":
    main()
