"""Training of generative retrievers, with the same pairs, pseudo-queries, budget and seed as every system.

A step has a batch of labeled queries, if any, and a batch of pseudo-queries, weighted as in the joint training of HCE.
The network can only write ids of documents that it was trained on, so none is held out. On average, half of the
pseudo-queries are replaced by the beginning of their document (DSI's indexing task).

A run writes checkpoints as `hce.train` does; a killed run that resumes ends with the same weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from hce.data.corpus import Corpus
from hce.data.text import first_words
from hce.encoding.corpus_vectors import encode_corpus
from hce.encoding.encoder import Encoder
from hce.errors import InputError
from hce.evaluation.evaluate import evaluate
from hce.files import checked_fields
from hce.processes import seed_step
from hce.progress import progress_bar
from hce.training.co_training import Checkpoint, CheckpointFolder, optimizer_state, prefixed, restore_optimizer, under
from hce.training.pairs import Batch, LabelSets, Sources, batch_count, endless, sources_and_devset
from hce.training.recipe import Recipe, Supervision
from hce.training.steps import new_optimizer, rate_share
from hce_lab.comparison.generative import Alphabet, GenerativeSearcher, IdNetwork, new_network, parameter_count
from hce_lab.comparison.identifiers import Trie
from hce_lab.comparison.task import Built, Task

FIRST_WORDS = 32  # words and marks of a document that DSI learns to map to its id
STARTS_SHARE = 0.5  # share of pseudo-queries that become beginnings of documents
RATE = 1e-3  # for weights that start at random; pretrained ones have the recipe's rate, at most this
LEAST_WARMUP = 0.05
MAX_GRADIENT = 1.0
DEV_BEAM = 10
METRIC = "nDCG@10"
SECONDS_BETWEEN_CHECKPOINTS = 120.0


# ----------------------------------------------------------------------------------------------------------- examples


class Examples(NamedTuple):
    """The examples of one step.

    Attributes:
        texts: queries, pseudo-queries and beginnings of documents.
        positions: the positions of their documents in the corpus, of shape (B,).
        weights: the weights of their losses, of shape (B,); for each source, they sum to its weight.
    """

    texts: list[str]
    positions: np.ndarray
    weights: np.ndarray


class Stream(Protocol):
    """Examples for every step of a run, the same each time a step is requested."""

    def from_step(self, step: int) -> Iterator[Examples]:
        """Yield the examples of all steps from one on."""
        ...


@dataclass(frozen=True)
class MixedStream:
    """Labeled queries and pseudo-queries, some replaced by beginnings of documents.

    Attributes:
        corpus: the documents.
        sources: the sources of pairs.
        recipe: batch, seed and the weight α of pseudo-queries.
    """

    corpus: Corpus
    sources: Sources
    recipe: Recipe

    def from_step(self, step: int) -> Iterator[Examples]:
        """See `Stream`."""
        labeled, pseudo = self.sources.supervised, self.sources.unsupervised
        streams = []
        if labeled is not None:
            streams.append((1.0, False, endless(labeled, self.recipe.batch_size, step)))
        if pseudo is not None:
            weight = self.recipe.alpha if labeled is not None else 1.0
            streams.append((weight, True, endless(pseudo, self.recipe.batch_size, step)))
        for number in count(step):
            parts = []
            for weight, of_documents, batches in streams:
                batch = next(batches)
                texts = self._with_starts(batch, number) if of_documents else batch.queries
                parts.append(Examples(texts, batch.positions, np.full(len(texts), weight / len(texts))))
            yield joined_examples(parts)

    def _with_starts(self, batch: Batch, step: int) -> list[str]:
        """Replace some queries by the beginnings of their documents."""
        rng = np.random.default_rng([self.recipe.seed, 3, step])
        starts = rng.random(len(batch.positions)) < STARTS_SHARE
        return [
            start_of(self.corpus, position) if start else query
            for query, position, start in zip(batch.queries, batch.positions.tolist(), starts, strict=True)
        ]


def joined_examples(parts: list[Examples]) -> Examples:
    """Concatenate examples."""
    return Examples(
        [text for part in parts for text in part.texts],
        np.concatenate([part.positions for part in parts]),
        np.concatenate([part.weights for part in parts]),
    )


def start_of(corpus: Corpus, position: int) -> str:
    """Return the first words of a document."""
    return first_words(corpus[position].full_text, FIRST_WORDS)


# -------------------------------------------------------------------------------------------------------------- a run


@dataclass
class Progress:
    """The progress of a run.

    Attributes:
        step: the number of steps done.
        seconds: the time of these steps.
        loss: the sum of the losses of the current epoch.
        history: for each finished epoch, its mean loss, and its dev measure if there is one.
        best: the number of the best epoch; 0 if none was measured.
    """

    step: int = 0
    seconds: float = 0.0
    loss: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)
    best: int = 0


class Budget(NamedTuple):
    """The number of epochs, and of steps in each."""

    epochs: int
    steps: int

    @property
    def total(self) -> int:
        """The number of all steps."""
        return self.epochs * self.steps


def fit(
    network: IdNetwork,
    losses: Callable[[Examples], Tensor],
    stream: Stream,
    recipe: Recipe,
    budget: Budget,
    *,
    checkpoints: CheckpointFolder | None = None,
    measure: Callable[[], float] | None = None,
    rate: float | None = None,
    progress: bool = False,
    title: str = "training",
) -> Progress:
    """Train a network in place; a resumed run takes the same steps as one never killed.

    A finished run is loaded from its last checkpoint. So a sequence of runs with separate checkpoints resumes at the
    run that was killed.

    Args:
        network: the network to train.
        losses: computes the loss of each example, of shape (B,).
        stream: the examples.
        recipe: learning rate, warm-up, optimizer and seed.
        budget: the number of epochs and steps.
        checkpoints: the folder of checkpoints; None writes none.
        measure: measures the network after each epoch, to keep the weights of the best one; None keeps the last.
        rate: the learning rate of weights that start at random, and the upper limit for the others; None is `RATE`.
        progress: show a bar.
        title: the label of the bar.

    Raises:
        InputError: the loss is not finite, or the state cannot be written or belongs to another run.
        FormatError: the state is damaged.
    """
    run = _Run(network, recipe, budget, checkpoints, rate or RATE)
    run.resume()
    with progress_bar(title, budget.total, "steps", show=progress) as advance:
        advance(run.done.step)
        examples = stream.from_step(run.done.step)
        saved = time.monotonic()
        while run.done.step < budget.total:
            began = time.perf_counter()
            run.take(next(examples), losses)
            if run.done.step % budget.steps == 0:
                run.close_epoch(measure)
            run.done.seconds += time.perf_counter() - began
            advance(1)
            if run.done.step == budget.total or time.monotonic() - saved > SECONDS_BETWEEN_CHECKPOINTS:
                run.save()
                saved = time.monotonic()
    if run.best is not None:
        network.load_state_dict(run.best)
    network.eval()
    return run.done


class _Run:
    """A network, its optimizer, and their progress."""

    def __init__(
        self, network: IdNetwork, recipe: Recipe, budget: Budget, checkpoints: CheckpointFolder | None, rate: float
    ) -> None:
        self.network, self.recipe, self.budget, self.checkpoints = network, recipe, budget, checkpoints
        self.rates = [rate, min(recipe.learning_rate, rate)]
        groups = zip([network.fresh, network.known], self.rates, strict=True)
        self.optimizer = new_optimizer(recipe.optimizer, groups)
        self.done = Progress()
        self.best: dict[str, Tensor] | None = None

    def take(self, examples: Examples, losses: Callable[[Examples], Tensor]) -> None:
        """Take one step."""
        self.network.train()
        self._set_learning_rates()
        seed_step(self.recipe.seed, self.done.step)  # so that a resumed run draws the same dropout
        self.optimizer.zero_grad(set_to_none=True)
        weights = torch.from_numpy(examples.weights).to(self.network.device, torch.float32)
        loss = (losses(examples) * weights).sum()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.network.parameters(), MAX_GRADIENT)
        if not bool(torch.isfinite(loss) & torch.isfinite(norm)):
            raise InputError(
                f"the loss is {float(loss.detach()):.4g} at step {self.done.step + 1}: training cannot go on; "
                "try a lower learning_rate"
            )
        self.optimizer.step()
        self.done.loss += float(loss.detach())
        self.done.step += 1

    def close_epoch(self, measure: Callable[[], float] | None) -> None:
        """Record an epoch, and keep its weights if they are the best so far."""
        epoch = {"loss": self.done.loss / self.budget.steps}
        if measure is not None:
            epoch["dev"] = measure()
            if not self.done.best or epoch["dev"] > self.done.history[self.done.best - 1]["dev"]:
                self.done.best = len(self.done.history) + 1
                self.best = {name: tensor.detach().clone() for name, tensor in self.network.state_dict().items()}
        self.done.history.append(epoch)
        self.done.loss = 0.0

    def _set_learning_rates(self) -> None:
        """Set the rates: linear warm-up, then linear decay to 0, by the step alone."""
        share = rate_share(self.done.step, self.budget.total, max(self.recipe.warmup, LEAST_WARMUP))
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * share

    def save(self) -> None:
        """Write a checkpoint, if the run has a folder for them."""
        if self.checkpoints is None:
            return
        state = optimizer_state(self.optimizer, "optimizer")
        tensors = {
            **prefixed("weights", self.network.state_dict()),
            **prefixed("best", self.best or {}),
            **state.tensors,
        }
        self.checkpoints.save(Checkpoint(tensors, {"progress": asdict(self.done), "optimizer": state.facts}))

    def resume(self) -> None:
        """Restore the last checkpoint, if there is one.

        Raises:
            InputError: the state belongs to another run.
            FormatError: the state is damaged.
        """
        if self.checkpoints is not None:
            self.checkpoints.resume(self._restore)

    def _restore(self, checkpoint: Checkpoint) -> None:
        tensors, facts = checkpoint
        self.network.load_state_dict(under("weights", tensors))
        best = under("best", tensors)
        self.best = {name: tensor.to(self.network.device) for name, tensor in best.items()} or None
        restore_optimizer(self.optimizer, under("optimizer", tensors), facts["optimizer"])
        self.done = checked_fields(Progress, facts["progress"])


# ----------------------------------------------------------------------------------------------------------- a system


@dataclass(frozen=True)
class Prepared:
    """The prepared task of a generative retriever.

    Attributes:
        task: the input of every system.
        encoder: the encoder to start from; a static table is fitted to the corpus if that is better on dev.
        recipe: the task's recipe, with the fields fixed for generative retrievers.
        stream: the examples.
    """

    task: Task
    encoder: Encoder
    recipe: Recipe
    stream: MixedStream

    @classmethod
    def of(cls, task: Task) -> Prepared:
        """Prepare a task, with its labels and generated queries if any."""
        is_labeled = task.pairs is not None or task.generated is not None
        mode: Supervision = "unsupervised" if task.recipe.mode == "unsupervised" or not is_labeled else "joint"
        recipe = replace(task.recipe, mode=mode, hold_out=False)
        encoder = task.load_encoder()
        label_sets = LabelSets(task.pairs, task.generated, task.dev)
        sources, devset = sources_and_devset(task.corpus, encoder, label_sets, recipe)
        if encoder.table is not None and recipe.fit_static:
            encoder = task.start_encoder(devset)
        return cls(task, encoder, recipe, MixedStream(task.corpus, sources, recipe))

    @property
    def budget(self) -> Budget:
        """The budget of every trained system."""
        pair_count = self.recipe.epoch_pairs or len(self.task.corpus)
        return Budget(self.recipe.epochs, batch_count(pair_count, self.recipe.batch_size))

    def network(self, alphabet: Alphabet, kind: type[IdNetwork] = IdNetwork) -> IdNetwork:
        """Make a network that reads with the task's encoder."""
        return new_network(self.encoder, alphabet, self.recipe, kind)

    def vectors(self) -> np.ndarray:
        """Encode the documents (N, n) with the encoder before training."""
        place = self.task.folder and self.task.folder / "vectors"
        return encode_corpus(self.encoder, self.task.corpus, place, progress=self.task.progress)

    def fit(
        self,
        network: IdNetwork,
        losses: Callable[[Examples], Tensor],
        name: str,
        *,
        stream: Stream | None = None,
        budget: Budget | None = None,
        searcher: GenerativeSearcher | None = None,
    ) -> Progress:
        """Call `fit` with the task's recipe, and checkpoints in the task's folder.

        Args:
            network: the network to train.
            losses: computes the loss of each example, of shape (B,).
            name: the name of the run and of its folder.
            stream: the examples; by default the task's.
            budget: by default, that of every trained system.
            searcher: measured on dev after each epoch, to keep the best weights; None keeps the last ones.
        """
        return fit(
            network,
            losses,
            stream or self.stream,
            self.recipe,
            budget or self.budget,
            checkpoints=self.checkpoints(name),
            measure=None if searcher is None else self.dev_measure(searcher),
            rate=self.task.rate,
            progress=self.task.progress,
            title=name,
        )

    def checkpoints(self, name: str) -> CheckpointFolder | None:
        """Return the folder of a run's checkpoints; None if the task has no folder."""
        task = self.task
        if task.folder is None:
            return None
        identity = {
            "corpus": task.corpus.fingerprint,
            "encoder": self.encoder.fingerprint,
            "set of labeled pairs": task.pairs and task.pairs.digest,
            "set of generated queries": task.generated and task.generated.digest,
            "set of dev queries": task.dev and task.dev.digest,
            "system": name,
            "rate": task.rate,
            **{f"setting {key}": value for key, value in self.recipe.as_dict().items()},
        }
        return CheckpointFolder(task.folder / name, identity)

    def dev_measure(self, searcher: GenerativeSearcher) -> Callable[[], float] | None:
        """Return a function that measures a searcher on dev with a narrow beam, if there is dev."""
        dev = self.task.dev
        if dev is None or self.recipe.mode == "unsupervised":
            return None
        narrow = replace(searcher, beam=DEV_BEAM)
        return lambda: evaluate(narrow, *dev, [METRIC], depth=DEV_BEAM).means[METRIC]


def searcher_of(network: IdNetwork, ids: Sequence[str], codes: np.ndarray) -> GenerativeSearcher:
    """Make a searcher from a network and identifiers (documents, steps)."""
    return GenerativeSearcher(network, ids, Trie(codes, network.device))


def identifier_losses(network: IdNetwork, codes: np.ndarray) -> Callable[[Examples], Tensor]:
    """Return a function that computes examples' losses for identifiers (documents, steps)."""
    table = torch.from_numpy(codes).to(network.device)

    def losses(examples: Examples) -> Tensor:
        positions = torch.from_numpy(examples.positions).to(network.device)
        return network.training_losses(examples.texts, table[positions])

    return losses


def built(searcher: GenerativeSearcher, done: Progress, indexing_seconds: float, **facts: Any) -> Built:
    """Build the system after training; its index is its weights."""
    weights = parameter_count(searcher.network)
    found = {"parameters": weights, "epochs": len(done.history), "steps": done.step, "best_epoch": done.best, **facts}
    if done.best:
        found["dev"] = done.history[done.best - 1]["dev"]
    return Built(searcher, done.seconds, indexing_seconds, 4 * weights, found)
