"""How generative retrievers are trained: the same pairs, pseudo-queries, budget and seed as every other system.

A step has a batch of labeled queries, where there are any, and a batch of pseudo-queries, weighted as in the joint
training of HCE. All documents have to be seen, or nothing could ever write their ids: none is held out, and in every
second example of the pseudo-queries the text is the beginning of its document (DSI's indexing task).

A run is kept in checkpoints as `hce.train` keeps its own; one that was killed ends as it would have without that.
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

FIRST_WORDS = 32  # and marks, of a document, which DSI reads to its id
STARTS_SHARE = 0.5  # of the examples made of documents
RATE = 1e-3  # of weights that start at random; pretrained ones learn at the recipe's rate, but no faster than this
LEAST_WARMUP = 0.05
MAX_GRADIENT = 1.0
DEV_BEAM = 10
METRIC = "nDCG@10"
SECONDS_BETWEEN_CHECKPOINTS = 120.0


# ----------------------------------------------------------------------------------------------------------- examples


class Examples(NamedTuple):
    """What one step learns from.

    Attributes:
        texts: queries, and what stands for them.
        positions: of their documents in the corpus, of shape (B,).
        weights: of their losses, of shape (B,); those of a source add up to the source's weight.
    """

    texts: list[str]
    positions: np.ndarray
    weights: np.ndarray


class Stream(Protocol):
    """Examples for every step of a run, the same ones whenever a step is asked for."""

    def from_step(self, step: int) -> Iterator[Examples]:
        """Yield the examples of all steps from one on."""
        ...


@dataclass(frozen=True)
class MixedStream:
    """Labeled queries and pseudo-queries, and beginnings of documents among the latter.

    Attributes:
        corpus: the documents.
        sources: where pairs come from.
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
        """Put the beginnings of documents in the place of some queries."""
        rng = np.random.default_rng([self.recipe.seed, 3, step])
        starts = rng.random(len(batch.positions)) < STARTS_SHARE
        return [
            start_of(self.corpus, position) if start else query
            for query, position, start in zip(batch.queries, batch.positions.tolist(), starts, strict=True)
        ]


def joined_examples(parts: list[Examples]) -> Examples:
    """Put examples one below another."""
    return Examples(
        [text for part in parts for text in part.texts],
        np.concatenate([part.positions for part in parts]),
        np.concatenate([part.weights for part in parts]),
    )


def start_of(corpus: Corpus, position: int) -> str:
    """Return the first words of a document, which stand for it."""
    return first_words(corpus[position].full_text, FIRST_WORDS)


# -------------------------------------------------------------------------------------------------------------- a run


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        step: how many steps are done.
        seconds: what they took.
        loss: the sum of the losses of the epoch under way.
        history: for each finished epoch, its mean loss and its dev measure, where there is one.
        best: the number of the best epoch; 0 as long as none was measured.
    """

    step: int = 0
    seconds: float = 0.0
    loss: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)
    best: int = 0


class Budget(NamedTuple):
    """How many epochs, and steps in each."""

    epochs: int
    steps: int

    @property
    def total(self) -> int:
        """How many steps there are in all."""
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
    """Train a network in place, on the same steps whether or not the run was killed in between.

    A run that is finished already is only read back from its last checkpoint: so several runs in a row, each with
    checkpoints of its own, are continued where they stopped.

    Args:
        network: what is trained.
        losses: gives the loss of each example, of shape (B,).
        stream: the examples.
        recipe: learning rate, warm-up, optimiser and seed.
        budget: how long.
        checkpoints: where the state is kept; None keeps none.
        measure: how good the network is, asked after each epoch; the weights of the best one are kept. None keeps the
            last ones.
        rate: the learning rate of weights that start at random, and the highest of the others; None is `RATE`.
        progress: show a bar.
        title: what the bar says.

    Raises:
        InputError: the loss is no number any more, or the state cannot be written or is of another run.
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
    """A network, its optimiser, and how far they have come."""

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
        seed_step(self.recipe.seed, self.done.step)  # dropout, so that a continued run draws what it would have
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
        """Note an epoch, and keep its weights where they are the best so far."""
        epoch = {"loss": self.done.loss / self.budget.steps}
        if measure is not None:
            epoch["dev"] = measure()
            if not self.done.best or epoch["dev"] > self.done.history[self.done.best - 1]["dev"]:
                self.done.best = len(self.done.history) + 1
                self.best = {name: tensor.detach().clone() for name, tensor in self.network.state_dict().items()}
        self.done.history.append(epoch)
        self.done.loss = 0.0

    def _set_learning_rates(self) -> None:
        """Let the rates rise linearly, then fall linearly to 0, as a function of the step alone."""
        share = rate_share(self.done.step, self.budget.total, max(self.recipe.warmup, LEAST_WARMUP))
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * share

    def save(self) -> None:
        """Write a checkpoint, if there is a place for it."""
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
        """Take up what an earlier process left, if there is something.

        Raises:
            InputError: the state is of another run.
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
    """What a generative retriever begins with.

    Attributes:
        task: what every system is given.
        encoder: what it starts from: a static table fitted to the corpus, as for everyone.
        recipe: the task's, with what is settled for generative retrievers.
        stream: the examples.
    """

    task: Task
    encoder: Encoder
    recipe: Recipe
    stream: MixedStream

    @classmethod
    def of(cls, task: Task) -> Prepared:
        """Prepare a task; labels and generated queries are used where there are any."""
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
        """What every trained system may spend."""
        pair_count = self.recipe.epoch_pairs or len(self.task.corpus)
        return Budget(self.recipe.epochs, batch_count(pair_count, self.recipe.batch_size))

    def network(self, alphabet: Alphabet, kind: type[IdNetwork] = IdNetwork) -> IdNetwork:
        """Make a network that reads with the task's encoder."""
        return new_network(self.encoder, alphabet, self.recipe, kind)

    def vectors(self) -> np.ndarray:
        """Encode the documents, of shape (N, n), as they are seen before training."""
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
        """Train a network as `fit` does, by the task's recipe, and keep the state of the run in the task's folder.

        Args:
            network: what is trained.
            losses: gives the loss of each example, of shape (B,).
            name: of the run and the folder of its state.
            stream: the examples; by default the task's.
            budget: how long; by default what every trained system may spend.
            searcher: what is measured on dev after each epoch; None keeps the last weights.
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
        """Return the place of a run's state, by a name of its own; None where the task has no folder."""
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
        """Return what measures a searcher on the labeled dev queries by a narrow beam; None where there are none."""
        dev = self.task.dev
        if dev is None or self.recipe.mode == "unsupervised":
            return None
        narrow = replace(searcher, beam=DEV_BEAM)
        return lambda: evaluate(narrow, *dev, [METRIC], depth=DEV_BEAM).means[METRIC]


def searcher_of(network: IdNetwork, ids: Sequence[str], codes: np.ndarray) -> GenerativeSearcher:
    """Let a network search documents by identifiers, of shape (documents, steps)."""
    return GenerativeSearcher(network, ids, Trie(codes, network.device))


def identifier_losses(network: IdNetwork, codes: np.ndarray) -> Callable[[Examples], Tensor]:
    """Return what gives the loss of each example, for identifiers of shape (documents, steps)."""
    table = torch.from_numpy(codes).to(network.device)

    def losses(examples: Examples) -> Tensor:
        positions = torch.from_numpy(examples.positions).to(network.device)
        return network.training_losses(examples.texts, table[positions])

    return losses


def built(searcher: GenerativeSearcher, done: Progress, indexing_seconds: float, **facts: Any) -> Built:
    """Build the system that training gave: its index is its weights."""
    weights = parameter_count(searcher.network)
    found = {"parameters": weights, "epochs": len(done.history), "steps": done.step, "best_epoch": done.best, **facts}
    if done.best:
        found["dev"] = done.history[done.best - 1]["dev"]
    return Built(searcher, done.seconds, indexing_seconds, 4 * weights, found)
