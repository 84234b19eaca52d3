"""Systems of a comparison: a name, requirements, and a function from a task to a searcher.

A task is the same input for all systems: corpus, labels if any, the encoder to start from, budget and seed. The times
of training and indexing are reported with the searcher.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from hce.data.corpus import Corpus
from hce.data.judgments import Labels
from hce.encoding.encoder import Encoder
from hce.errors import InputError
from hce.evaluation.evaluate import DenseSearcher, Searcher
from hce.evaluation.runs import Scored
from hce.training.co_training import TrainResult
from hce.training.pairs import DevSet
from hce.training.recipe import Recipe
from hce.training.train import start_encoder
from hce_lab.generation.generator import BUNDLED

MODEL = "model"  # the folder of a trained model, within `Task.folder`

Need = Literal["labels", "generated", "static", "transformer"]

LACKS: dict[Need, str] = {
    "labels": "labeled training queries (qrels/train.tsv), and there are none",
    "generated": "generated queries; give a file that `hce generate-queries` wrote",
    "static": "a static encoder, and this one is a transformer",
    "transformer": "a transformer, and this encoder is static",
}


@dataclass(frozen=True)
class Task:
    """The input of every system.

    Attributes:
        corpus: the documents.
        encoder: the spec of the encoder to start from; each system loads its own, because training changes it.
        recipe: the recipe of rivals.
        pairs: labeled queries to train on.
        dev: labeled queries for model selection; none of them is among `pairs`.
        generated: generated queries.
        folder: the folder of training checkpoints, deleted at the end; None writes none.
        progress: show bars.
        language_model: the model that writes n-grams, see `hce_lab.generation.generator.Generator.load`.
        defaults: the recipe of HCE: that of `hce train` with the same settings and seed, companions included. None
            means `recipe`.
        built: the systems that `built_once` has built, by their key.
        rate: the learning rate of generative retrievers; None is the default, see `generative_training`.
    """

    corpus: Corpus
    encoder: str
    recipe: Recipe
    pairs: Labels | None = None
    dev: Labels | None = None
    generated: Labels | None = None
    folder: Path | None = None
    progress: bool = False
    language_model: str = BUNDLED
    defaults: Recipe | None = None
    built: dict[Any, Built] = field(default_factory=dict)
    rate: float | None = None

    def load_encoder(self) -> Encoder:
        """Load the untrained encoder, unchanged by other systems."""
        return Encoder.load(self.encoder)

    def start_encoder(self, devset: DevSet) -> Encoder:
        """Load F0 as `hce.train` does: a static table is fitted if that is better on dev."""
        given = self.load_encoder()
        return start_encoder(self.corpus, given, devset, devset.measure(given), self.recipe)

    def with_settings(self, **settings: Any) -> Task:
        """Return the task with some settings replaced, for rivals and HCE."""
        defaults = self.defaults and replace(self.defaults, **settings)
        return replace(self, recipe=replace(self.recipe, **settings), defaults=defaults)

    @property
    def labeled(self) -> tuple[Labels, Labels]:
        """The labeled train and dev queries, for systems that need them."""
        if self.pairs is None or self.dev is None:
            raise InputError(f"this system needs {LACKS['labels']}")
        return self.pairs, self.dev


class Built(NamedTuple):
    """A system that is ready to search.

    Attributes:
        searcher: answers queries.
        training_seconds: the time of training.
        indexing_seconds: the time to encode or index all documents.
        index_bytes: the size of the index.
        facts: further facts to report, such as the chosen λ.
    """

    searcher: Searcher
    training_seconds: float
    indexing_seconds: float
    index_bytes: int
    facts: Mapping[str, Any] = {}


@dataclass(frozen=True)
class System:
    """One entry of a comparison.

    Attributes:
        about: the system in one line.
        build: builds the system for a task.
        needs: its requirement, if any.
        seeded: whether another seed gives another system.
        ours: whether it trains with the tree; all others are rivals.
        written: whether it uses the task's language model.
    """

    about: str
    build: Callable[[Task], Built]
    needs: Need | None = None
    seeded: bool = True
    ours: bool = False
    written: bool = False

    def lacks(self, task: Task, *, is_static: bool) -> str | None:
        """Describe what the system needs and the task lacks; None if nothing."""
        there: dict[Need, bool] = {
            "labels": task.pairs is not None,
            "generated": task.generated is not None,
            "static": is_static,
            "transformer": not is_static,
        }
        return None if self.needs is None or there[self.needs] else LACKS[self.needs]


def hits_of(ids: Sequence[str], positions: np.ndarray, scores: np.ndarray) -> list[Scored]:
    """List documents by positions (k,) with their scores (k,); skip positions of −1."""
    pairs = zip(positions.tolist(), scores.tolist(), strict=True)
    return [Scored(ids[position], score) for position, score in pairs if position >= 0]


def best_first(scores: np.ndarray, k: int) -> np.ndarray:
    """Return the positions of the k highest scores, ties in order."""
    k = min(k, len(scores))
    if k < 1:
        return np.empty(0, dtype=np.int64)
    lowest = np.partition(scores, len(scores) - k)[len(scores) - k]
    candidates = np.flatnonzero(scores >= lowest)
    best: np.ndarray = candidates[np.argsort(-scores[candidates], kind="stable")[:k]]
    return best


def best_hits(ids: Sequence[str], scores: np.ndarray, k: int, *, above: float = -np.inf) -> list[Scored]:
    """List the k documents with the highest scores (N,) above a bound; ties in order."""
    best = best_first(scores, k)
    best = best[scores[best] > above]
    return hits_of(ids, best, scores[best])


def queries_by_document(*several: Labels | None) -> dict[str, list[str]]:
    """List the queries that each document answers, by its id."""
    found: dict[str, list[str]] = {}
    for labels in filter(None, several):
        for query_id in labels.qrels:
            for document_id in labels.qrels.positives(query_id):
                found.setdefault(document_id, []).append(labels.queries[query_id].text)
    return found


def searched_by_vectors(
    encoder: Encoder,
    corpus: Corpus,
    training_seconds: float = 0.0,
    facts: Mapping[str, Any] | None = None,
) -> Built:
    """Build a system of an encoder alone, by exact search of the documents' vectors."""
    start = time.perf_counter()
    found = DenseSearcher.of(encoder, corpus)
    return Built(found, training_seconds, time.perf_counter() - start, found.vectors.nbytes, facts or {})


def trained_encoder(result: TrainResult, corpus: Corpus) -> Built:
    """Build a system from the result of `hce.train`, with facts of the training."""
    facts = {
        "mode": result.recipe.mode,
        "metric": result.metric,
        "before": result.before,
        "after": result.after,
        "calibration": result.calibration and result.calibration.as_dict(),
    }
    return trained_system(result, corpus, facts)


def trained_system(trained: TrainResult, corpus: Corpus, facts: Mapping[str, Any]) -> Built:
    """Build a system from a trained encoder, with these facts and its training history.

    The training time is the sum over epochs, with clustering and evaluation, also over resumed runs.
    """
    how = {
        "epochs": len(trained.history) - 1,
        "mix": trained.mix,
        "trained": bool(trained.mix) or len(trained.encoder.shares) > 1,
    }
    seconds = sum(epoch.seconds for epoch in trained.history)
    return searched_by_vectors(trained.encoder, corpus, seconds, {**facts, **how})
