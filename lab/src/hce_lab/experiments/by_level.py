"""The level of the tree at which a query's path leaves the path to a relevant document.

    python -m hce_lab by_level data/scifact my-model [--split test] [--json]

A query walks down greedily: at each node, it takes the child with the largest inner product, until it reaches a
document. The paper assumes that the early levels choose well, and that the last one does not, as training only samples
its siblings. The steps of a `Diagnosis` test this.
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
    """The accuracy of one step down the tree; a node above a relevant document is right.

    Attributes:
        level: 1 … L; step L goes from the last inner node to a document.
        choices: mean number of children to choose from.
        accuracy: the share of queries at a right node after the step, of those at a right node before it.
        forced: the accuracy if all queries start at the parent of their right node, as in training.
        reached: the share of all queries at a right node after the step; after the last, at a relevant document.
        reached_by_beam: this share for a beam search that keeps `beam` nodes per level.
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
        left_at: for each query, the level at which its path leaves those of all relevant documents; None if it
            never does.
        beam: the number of nodes that the beam keeps.
        skipped: queries without a relevant document in the tree; no figure includes them.
    """

    steps: list[Step]
    left_at: dict[str, int | None]
    beam: int
    skipped: list[str]

    def __str__(self) -> str:
        """Return a table as text, with the verdict below."""
        last = len(self.steps)
        lines = [f"{'step':<14}{'choices':>9}{'accuracy':>10}{'forced':>8}{'reached':>9}{f'beam {self.beam}':>9}"]
        for step in self.steps:
            name = f"{step.level}" if step.level < last else f"{step.level}, document"
            shares = f"{step.accuracy:>10.3f}{step.forced:>8.3f}{step.reached:>9.3f}{step.reached_by_beam:>9.3f}"
            lines.append(f"{name:<14}{step.choices:>9.1f}{shares}")
        return "\n".join([*lines, self.verdict])

    @property
    def verdict(self) -> str:
        """The weakest step, and whether it is the one that the paper assumes."""
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

    A query with several relevant documents may follow the path to any of them. For `Step.forced`, its right document is
    the relevant one with the largest inner product.

    Args:
        hierarchy: the tree of the documents.
        documents: their ids, in the order of the tree's documents.
        vectors: the documents' vectors, of shape (N, n).
        queries: a vector of shape (n,) for each query id.
        qrels: the judgments.
        beam: the number of nodes per level that the beam keeps.

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
    """Whether each query is at a right node, by level (Q, L), and the number of choices."""

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
    """Return whether a query chose a right node at each level, (Q, L)."""
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
    """Diagnose a collection's queries in the model's tree, or one grown from its vectors."""
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
