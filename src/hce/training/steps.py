"""The steps of an epoch, OPTIMIZE in the paper's Alg. 3: pairs in, one optimizer step out.

This module knows pairs, negatives, the objective and the optimizer. `hce.training.co_training` decides when to measure,
re-cluster or stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint as recomputed
from transformers.optimization import Adafactor

from hce.data.corpus import Corpus
from hce.encoding.encoder import Encoder
from hce.encoding.tables import Side
from hce.errors import InputError
from hce.processes import average_gradients, average_values, own_rows, process_count, seed_step
from hce.training.losses import HCELoss, HCESummands, Positions, TeacherScores
from hce.training.negatives import Negatives, WordTeacher, neighbors_of, teacher_scores_of, way_of_choosing
from hce.training.pairs import Batch, PairSource, Sources, batch_count, endless
from hce.training.recipe import Optimizer, Recipe
from hce.tree.hierarchy import Hierarchy

TURNS = 8  # if pairs are few, an epoch goes through them at most this often


@dataclass
class Counters:
    """How far a run has come."""

    epoch: int = 0  # how many epochs are finished
    steps_in_epoch: int = 0  # steps done in the current epoch; `batch` in checkpoints
    steps_in_all: int = 0  # steps done in the run; `step` in checkpoints
    sums: dict[str, float] = field(default_factory=dict)  # of the current epoch's losses and accuracies, by name

    def record(self, summands: dict[str, float]) -> None:
        """Count a finished step."""
        self.steps_in_epoch += 1
        self.steps_in_all += 1
        for name, value in summands.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def close_epoch(self) -> tuple[dict[str, float], list[float]]:
        """Return the epoch's mean losses and accuracies, and begin the next epoch."""
        means = {name: total / max(self.steps_in_epoch, 1) for name, total in self.sums.items()}
        means.pop("total", None)
        accuracy = [means.pop(name) for name in list(means) if name.startswith("accuracy")]
        self.epoch, self.steps_in_epoch, self.sums = self.epoch + 1, 0, {}
        return means, accuracy


class _SourceBatch(NamedTuple):
    """One source's batch in a step: the weight of its loss, its pairs, their negatives, and their neighbors."""

    weight: float
    batch: Batch
    drawn: np.ndarray  # (B, S)
    teacher: TeacherScores | None


class _Column(NamedTuple):
    """Texts that are encoded together."""

    side: Side
    texts: list[str]


class Trainer:
    """An encoder, its optimizer, and the objective of the current tree. Call `use_tree` before the first step."""

    # `use_tree` sets all of these.
    objective: HCELoss  # L_HCE for the current tree
    negatives: Negatives  # chooses negatives by the current tree
    vectors: np.ndarray  # the documents' vectors that the tree was grown from, of shape (N, n)
    neighbors: np.ndarray | None  # positions of each document's neighbors, of shape (N, S); None without a teacher
    centroid_optimizer: torch.optim.Optimizer | None  # of the tree's centroids; None if they stay fixed

    def __init__(self, corpus: Corpus, encoder: Encoder, sources: Sources, recipe: Recipe) -> None:
        self.corpus = corpus
        self.held_out = sources.held_out
        self.encoder = encoder
        self.recipe = recipe
        # L_J (Eq. 7): L_S + α·L_U, each a mean over its own batch. The paper's setup has α = 0.5, a footnote α = 1.
        alpha = recipe.alpha if sources.supervised is not None else 1.0
        weighted = ((1.0, sources.supervised), (alpha, sources.unsupervised))
        self.weighted = [(weight, source) for weight, source in weighted if source is not None]
        self.pseudo = sources.unsupervised
        self.has_supervised_pairs = sources.supervised is not None
        wants_teacher = recipe.tree and recipe.neighbours and self.pseudo is not None and recipe.pseudo == "ict"
        self.teacher = WordTeacher(corpus, recipe.language) if wants_teacher else None
        if recipe.batch_size < process_count():
            raise InputError(
                f"a batch of {recipe.batch_size} pairs cannot be divided among {process_count()} processes; "
                "use fewer processes, or a larger batch_size"
            )
        available = max(len(source) for _, source in self.weighted)
        turns = min(TURNS, max(1, len(corpus) // available))
        wanted = recipe.epoch_pairs or min(len(corpus), turns * available)
        self.steps_per_epoch = batch_count(wanted, min(recipe.batch_size, available))
        self.pairs_per_epoch = self.steps_per_epoch * min(len(self.weighted[0][1]), recipe.batch_size)
        parameters = [parameter for parameter in encoder.model.parameters() if parameter.requires_grad]
        self.optimizer = new_optimizer(recipe.optimizer, [(parameters, recipe.learning_rate)])
        self.centroid_optimizer = None

    def use_tree(self, tree: Hierarchy, vectors: np.ndarray) -> None:
        """Set the current tree and the vectors that it was grown from."""
        recipe = self.recipe
        self.vectors = vectors
        self.objective = HCELoss(
            self.encoder.model,
            tree,
            loss_levels=tree.depth - 1 if recipe.levels < 0 else min(recipe.levels, tree.depth - 1),
            temperature=recipe.temperature,
            level_temperature=recipe.level_temperature,
            level_target=recipe.level_target,
            level_weight=recipe.level_weight,
            mask=recipe.mask,
            margin=recipe.margin or None,
            groups=self.corpus.text_groups,
            gather_across_devices=process_count() > 1,
        ).to(self.encoder.device)
        self.negatives = way_of_choosing(recipe, has_supervised_pairs=self.has_supervised_pairs)(
            self.corpus, tree, vectors, self.held_out, len(self.centroids), recipe
        )
        self.neighbors = None
        if self.teacher is not None and tree.levels:
            self.neighbors = neighbors_of(tree, vectors, recipe.neighbours, self.held_out)
        self.centroid_optimizer = None
        if recipe.centroid_learning_rate and self.centroids:
            self.centroid_optimizer = new_optimizer(recipe.optimizer, [(self.centroids, recipe.centroid_learning_rate)])
        for centroids in self.centroids:
            centroids.requires_grad_(self.centroid_optimizer is not None)

    @property
    def centroids(self) -> list[Tensor]:
        """The centroids of the objective, as training has moved them."""
        return list(self.objective.centroids)

    @property
    def _rates(self) -> dict[torch.optim.Optimizer, float]:
        """The optimizers in use, each with its full learning rate."""
        rates = {self.optimizer: self.recipe.learning_rate}
        if self.centroid_optimizer is not None:
            rates[self.centroid_optimizer] = self.recipe.centroid_learning_rate
        return rates

    def steps(self, counters: Counters) -> Iterator[tuple[dict[str, float], int]]:
        """Take the remaining steps of the epoch; yield losses and the number of pairs.

        If a loss or a gradient is NaN or infinite, its step changes no weights, is not counted, and ends the epoch.
        """
        recipe = self.recipe
        self.encoder.model.train(recipe.dropout or recipe.pseudo == "simcse")
        streams = [endless(source, recipe.batch_size, counters.steps_in_all) for _, source in self.weighted]
        while counters.steps_in_epoch < self.steps_per_epoch:
            self._set_learning_rate(counters.steps_in_all)
            seed_step(recipe.seed, counters.steps_in_all)  # for dropout: a resumed run draws the same masks
            seed = [recipe.seed, counters.epoch, counters.steps_in_epoch]
            batches = [
                self._source_batch(weight, source, next(stream), [*seed, index])
                for index, ((weight, source), stream) in enumerate(zip(self.weighted, streams, strict=True))
            ]
            # On a CPU the backward pass of plain attention is faster than that of fused attention.
            with sdpa_kernel(SDPBackend.MATH) if self.encoder.device.type == "cpu" else nullcontext():
                values = self._step(batches)
            pair_count = len(batches[0].batch.queries) * process_count()
            if not np.isfinite(values["total"]):
                yield values, pair_count
                return
            counters.record(values)
            yield values, pair_count

    def _source_batch(self, weight: float, source: PairSource, batch: Batch, seed: list[int]) -> _SourceBatch:
        """Take this process's part of a batch, after drawing negatives for all of it."""
        drawn = self.negatives.draw(batch, seed)
        own_part = own_rows(len(batch.positions))
        part, teacher = batch.rows(own_part), None
        if source is self.pseudo and self.teacher is not None and self.neighbors is not None:
            teacher = teacher_scores_of(self.teacher, part, self.neighbors, self.vectors, self.encoder.device)
        return _SourceBatch(weight, part, drawn[own_part], teacher)

    def _step(self, batches: list[_SourceBatch]) -> dict[str, float]:
        columns = [
            column
            for each in batches
            for column in (
                _Column("query", each.batch.queries),
                _Column("document", each.batch.documents),
                _Column("document", self.negatives.texts(each.drawn)),
            )
        ]
        for optimizer in self._rates:
            optimizer.zero_grad(set_to_none=True)
        found: list[HCESummands] = []

        def loss_of(embeddings: Tensor) -> Tensor:
            blocks = iter(embeddings.split([len(column.texts) for column in columns]))
            found[:] = [self._summands(each, next(blocks), next(blocks), next(blocks)) for each in batches]
            return torch.stack([each.weight * loss.total for each, loss in zip(batches, found, strict=True)]).sum()

        loss = self._backward(columns, loss_of)
        average_gradients(_parameters(self.optimizer))  # those of centroids are averaged in `with_averaged_gradient`
        values = average_values({"total": float(loss.detach()), **_values(found)}, self.encoder.device)
        moved = [parameter for optimizer in self._rates for parameter in _parameters(optimizer)]
        norms = [parameter.grad.norm() for parameter in moved if parameter.grad is not None]
        if not torch.stack(norms).isfinite().all():
            values["total"] = float("nan")
        if np.isfinite(values["total"]):  # a broken step must not reach the weights
            for optimizer in self._rates:
                optimizer.step()
        return values

    def _summands(self, each: _SourceBatch, queries: Tensor, documents: Tensor, encoded: Tensor) -> HCESummands:
        """Compute the loss of one source from its embeddings."""
        chosen = self.negatives.choose(each.batch, each.drawn, queries.detach(), encoded)
        arrays = (each.batch.positions, chosen.positions, each.batch.known)
        positions = Positions(*(torch.from_numpy(array).to(self.encoder.device) for array in arrays))
        return self.objective.summands([queries, documents, *chosen.vectors.unbind(1)], positions, each.teacher)

    def _backward(self, columns: list[_Column], loss_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Add the gradients of the loss to the parameters, and return the loss."""
        size = self.recipe.chunk_size or max(len(column.texts) for column in columns)
        chunks = [
            _Column(column.side, column.texts[start : start + size])
            for column in columns
            for start in range(0, len(column.texts), size)
        ]
        loss = loss_of(torch.cat([self._embed(chunk) for chunk in chunks]))
        loss.backward()
        return loss

    def _embed(self, column: _Column) -> Tensor:
        """Encode texts; with `chunk_size`, recompute activations to save memory."""
        (side, texts), encoder = column, self.encoder
        if self.recipe.chunk_size:
            # `dict` copies, because models add results to the features. Recomputing repeats the dropout masks.
            features = encoder.tokenize(texts, side)
            vectors: Tensor = recomputed(lambda given: encoder.embed(dict(given), side), features, use_reentrant=False)
            return vectors
        if encoder.is_table:
            return encoder.embed(encoder.tokenize(texts, side), side)
        batches = list(encoder.batches(texts, side))  # groups texts of similar length, to save padding
        parts = [encoder.embed(encoder.tokenize([texts[row] for row in rows], side), side) for rows in batches]
        order = torch.from_numpy(np.argsort(np.concatenate(batches)))
        return torch.cat(parts)[order.to(parts[0].device)]

    def _set_learning_rate(self, step: int) -> None:
        share = rate_share(step, self.recipe.epochs * self.steps_per_epoch, self.recipe.warmup)
        for optimizer, rate in self._rates.items():
            for group in optimizer.param_groups:
                group["lr"] = rate * share


@contextmanager
def only_upper_layers(encoder: Encoder, frozen: float) -> Iterator[None]:
    """Freeze the embeddings and this share of the layers, from the lowest on."""
    stacks = [module for module in encoder.model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    kept: list[nn.Parameter] = []
    if frozen and stacks:
        layers = max(stacks, key=lambda stack: sum(parameter.numel() for parameter in stack.parameters()))
        first = next(layers[min(int(frozen * len(layers)), len(layers) - 1)].parameters())
        lower = takewhile(lambda parameter: parameter is not first, encoder.model.parameters())
        kept = [parameter for parameter in lower if parameter.requires_grad]
    for parameter in kept:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in kept:
            parameter.requires_grad_(True)


def rate_share(step: int, total: int, warmup: float) -> float:
    """Return the share of the learning rate at a step: linear warm-up, linear decay."""
    rising = (step + 1) / max(1.0, warmup * total)
    falling = (total - step) / max(1.0, total - warmup * total)
    return min(1.0, rising, falling)


def new_optimizer(kind: Optimizer, groups: Iterable[tuple[Iterable[Tensor], float]]) -> torch.optim.Optimizer:
    """Build an optimizer of parameter groups, each with its learning rate."""
    given = [{"params": list(parameters), "lr": rate} for parameters, rate in groups]
    if kind == "adamw":
        # Fused: a token table has many weights and little computation; one fused pass takes a third of the time.
        return torch.optim.AdamW(given, weight_decay=0.0, fused=True)
    return Adafactor(given, relative_step=False, scale_parameter=False)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _values(found: list[HCESummands]) -> dict[str, float]:
    """Return a step's losses and accuracies by name, as floats for the history.

    In joint training the values are those of the labeled pairs; the neighbor loss, which these lack, comes from the
    pseudo-queries.
    """
    first = found[0]
    values = {f"level_{t}": loss for t, loss in enumerate(first.level_losses, start=1)}
    values["document"] = first.document_loss
    for each in found:
        if each.neighbor_loss is not None:
            values.setdefault("neighbours", each.neighbor_loss)
    values |= {f"accuracy_{t}": value for t, value in enumerate(first.accuracies, start=1)}
    return {name: float(value.detach()) for name, value in values.items()}
