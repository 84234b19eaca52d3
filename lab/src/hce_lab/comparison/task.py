"""What a system of a comparison is: a name, what it needs, and a function from a task to something that searches.

A task holds what all systems are given alike: the corpus, whatever labels there are, the encoder to start from, the
budget and the seed. The time it took to get ready is reported with the searcher.
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

MODEL = "model"  # where below its folder a system leaves the model that it trained

Need = Literal["labels", "generated", "static", "transformer"]

LACKS: dict[Need, str] = {
    "labels": "labeled training queries (qrels/train.tsv), and there are none",
    "generated": "generated queries; give a file that `hce generate-queries` wrote",
    "static": "a static encoder, and this one is a transformer",
    "transformer": "a transformer, and this encoder is static",
}


@dataclass(frozen=True)
class Task:
    """What every system is given.

    Attributes:
        corpus: the documents.
        encoder: the spec of the encoder to start from; each system loads its own, because training changes it.
        recipe: budget and seed of the encoder that a rival trains.
        pairs: labeled queries to train on.
        dev: labeled queries to choose by; none of them is among `pairs`.
        generated: generated queries.
        folder: where a training run keeps its state until it is done; None keeps none.
        progress: show bars.
        language_model: the spec of what writes n-grams, see `hce_lab.generation.generator.Generator.load`.
        defaults: what `hce train` does with the same settings and seed, companions included; ours train by it. None
            is the same as `recipe`.
        built: what was built before by `built_once`, by what it depends on.
        rate: the learning rate of generative retrievers; None is the usual one, see `generative_training`.
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
        """Load the encoder as it was given, untouched by other systems."""
        return Encoder.load(self.encoder)

    def start_encoder(self, devset: DevSet) -> Encoder:
        """Load F0 as `hce.train` would have it: a static table fitted to the corpus where that is better on dev."""
        given = self.load_encoder()
        return start_encoder(self.corpus, given, devset, devset.measure(given), self.recipe)

    def with_settings(self, **settings: Any) -> Task:
        """Return the same task with some settings replaced, of rivals and ours."""
        defaults = self.defaults and replace(self.defaults, **settings)
        return replace(self, recipe=replace(self.recipe, **settings), defaults=defaults)

    @property
    def labeled(self) -> tuple[Labels, Labels]:
        """The labeled queries to train on and those to choose by, for systems that cannot do without."""
        if self.pairs is None or self.dev is None:
            raise InputError(f"this system needs {LACKS['labels']}")
        return self.pairs, self.dev


class Built(NamedTuple):
    """A system that is ready to search.

    Attributes:
        searcher: what answers queries.
        training_seconds: what it took to train.
        indexing_seconds: what it took to encode or index all documents.
        index_bytes: the size of what is searched.
        facts: what else is worth telling, such as the λ that was chosen.
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
        about: what the system is, in a line.
        build: gets the system ready for a task.
        needs: what it cannot do without.
        seeded: whether another seed gives another system.
        ours: whether it trains with the tree; all others are rivals.
        written: whether it has the task's language model write.
    """

    about: str
    build: Callable[[Task], Built]
    needs: Need | None = None
    seeded: bool = True
    ours: bool = False
    written: bool = False

    def lacks(self, task: Task, *, is_static: bool) -> str | None:
        """Say in words what the system needs and the task does not have."""
        there: dict[Need, bool] = {
            "labels": task.pairs is not None,
            "generated": task.generated is not None,
            "static": is_static,
            "transformer": not is_static,
        }
        return None if self.needs is None or there[self.needs] else LACKS[self.needs]


def hits_of(ids: Sequence[str], positions: np.ndarray, scores: np.ndarray) -> list[Scored]:
    """List the documents at some positions with their scores, both of shape (k,); a position of −1 is no document."""
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
    """List the k documents with the highest scores of shape (N,) above a bound, best first, equal ones in order."""
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
    """Build a system that is nothing but an encoder: its documents' vectors, searched exactly."""
    start = time.perf_counter()
    found = DenseSearcher.of(encoder, corpus)
    return Built(found, training_seconds, time.perf_counter() - start, found.vectors.nbytes, facts or {})


def trained_encoder(result: TrainResult, corpus: Corpus) -> Built:
    """Build the system that `hce.train` gave, with what training did."""
    facts = {
        "mode": result.recipe.mode,
        "metric": result.metric,
        "before": result.before,
        "after": result.after,
        "calibration": result.calibration and result.calibration.as_dict(),
    }
    return trained_system(result, corpus, facts)


def trained_system(trained: TrainResult, corpus: Corpus, facts: Mapping[str, Any]) -> Built:
    """Build a system that is a trained encoder, with these facts and how it was trained.

    The seconds are those of the epochs, clustering and measuring included: those of a run that was continued add up.
    """
    how = {
        "epochs": len(trained.history) - 1,
        "mix": trained.mix,
        "trained": bool(trained.mix) or len(trained.encoder.shares) > 1,
    }
    seconds = sum(epoch.seconds for epoch in trained.history)
    return searched_by_vectors(trained.encoder, corpus, seconds, {**facts, **how})
