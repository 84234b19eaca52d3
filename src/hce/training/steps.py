"""The steps of an epoch: pairs in, one optimiser step out; what Alg. 3 calls OPTIMIZE.

Knows pairs, the tree's negatives, the objective and the optimiser. When to measure, to re-cluster or to stop is
decided in `hce.training.co_training`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, count
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.optimization import Adafactor

from hce.data.corpus import Corpus
from hce.encoding.encoder import Encoder, Kind
from hce.errors import InputError
from hce.processes import average_gradients, average_values, own_share, process_count, seed_step
from hce.search.exact import nearest
from hce.training.gradcache import backward_in_chunks
from hce.training.losses import HCETerms
from hce.training.objective import HCELoss
from hce.training.pairs import Batch, PairSource, batch_count, equal_texts
from hce.training.recipe import Recipe
from hce.tree.hierarchy import Hierarchy


@dataclass
class Progress:
    """How far a run has come, and the sums of the epoch under way."""

    epoch: int = 0  # finished ones
    batch: int = 0  # of the epoch under way
    step: int = 0  # in all
    sums: dict[str, float] = field(default_factory=dict)

    def record(self, terms: dict[str, float]) -> None:
        """Count a finished step."""
        self.batch += 1
        self.step += 1
        for name, value in terms.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def close_epoch(self) -> tuple[dict[str, float], list[float]]:
        """The epoch's mean losses and accuracies; the next epoch begins."""
        means = {name: total / max(self.batch, 1) for name, total in self.sums.items()}
        means.pop("total", None)
        accuracy = [means.pop(name) for name in list(means) if name.startswith("accuracy")]
        self.epoch, self.batch, self.sums = self.epoch + 1, 0, {}
        return means, accuracy


TURNS = 8  # through the pairs in an epoch, at most
MINED_FROM = 20  # "mined" negatives are drawn from this many nearest wrong documents


@dataclass(frozen=True)
class Sources:
    """Where a run's pairs come from: labels, pseudo-queries, or both (joint training).

    `held_out` are documents kept for measuring: they are not drawn as negatives either, or training would only ever
    push them away. `level_losses` says whether to have any where the recipe leaves that open.
    """

    supervised: PairSource | None = None
    unsupervised: PairSource | None = None
    held_out: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    level_losses: bool = True

    def __post_init__(self) -> None:
        if self.supervised is None and self.unsupervised is None:
            raise InputError("there is nothing to train on: no labelled pairs and no pseudo-queries")
        fewest = min(len(source) for source in (self.supervised, self.unsupervised) if source is not None)
        if fewest < process_count():
            raise InputError(f"{fewest} pairs cannot be shared out to {process_count()} processes; use fewer of these")


class _Part(NamedTuple):
    """One source's batch in a step: how much its loss weighs, its pairs, and the numbers of sampled negatives."""

    weight: float
    batch: Batch
    sampled: np.ndarray  # (B, S); the document's own number stands for "none", and the mask then drops it


class _Column(NamedTuple):
    """Texts that are encoded together."""

    kind: Kind
    texts: list[str]


class Trainer:
    """An encoder, its optimiser, and the objective of the present tree.

    Attributes:
        objective: L_HCE for the present tree.
        optimizer: of the encoder.
        centroid_optimizer: of the present tree's centroids, where the recipe trains them.
    """

    objective: HCELoss
    centroid_optimizer: torch.optim.Optimizer | None

    def __init__(self, corpus: Corpus, encoder: Encoder, sources: Sources, recipe: Recipe) -> None:
        self.corpus = corpus
        self.groups = equal_texts(corpus)
        self.held_out = sources.held_out
        self.encoder = encoder
        self.recipe = recipe
        alpha = recipe.alpha if sources.supervised is not None else 1.0
        self.parts = [
            (weight, source)
            for weight, source in ((1.0, sources.supervised), (alpha, sources.unsupervised))
            if source is not None
        ]
        self.level_losses = sources.level_losses
        available = max(len(source) for _, source in self.parts)
        turns = min(TURNS, max(1, len(corpus) // available))
        wanted = recipe.epoch_pairs or min(len(corpus), turns * available)
        self.steps_per_epoch = batch_count(wanted, recipe.batch_size)
        self.pairs_per_epoch = self.steps_per_epoch * available // batch_count(available, recipe.batch_size)
        parameters = [parameter for parameter in encoder.model.parameters() if parameter.requires_grad]
        self.optimizer: torch.optim.Optimizer = (
            # Fused: a token table is all parameters and little else; one pass over it takes a third of the time.
            torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=0.0, fused=True)
            if recipe.optimizer == "adamw"
            else Adafactor(parameters, lr=recipe.learning_rate, relative_step=False, scale_parameter=False)
        )

    def use_tree(self, tree: Hierarchy, vectors: np.ndarray) -> None:
        """Contrast within this tree from now on; `vectors` are the documents' as clustering saw them."""
        recipe = self.recipe
        self.tree = tree
        self.vectors = vectors  # may be a memory map: rows are read as they are drawn
        self.objective = self._objective(tree)
        self.centroid_optimizer = None
        if recipe.centroid_learning_rate and self.centroids:
            self.centroid_optimizer = torch.optim.AdamW(
                self.centroids, lr=recipe.centroid_learning_rate, weight_decay=0.0
            )
        for centroids in self.centroids:
            centroids.requires_grad_(self.centroid_optimizer is not None)

    @property
    def centroids(self) -> list[Tensor]:
        """Those of the objective, as training has moved them."""
        return list(self.objective.centroids)

    def _objective(self, tree: Hierarchy) -> HCELoss:
        recipe = self.recipe
        levels = min(recipe.levels, tree.depth - 1)
        if recipe.levels < 0:
            # Both sources have the same M, or the number of document losses, L − M, would outweigh α.
            levels = tree.depth - 1 if self.level_losses else 0
        return HCELoss(
            self.encoder.model,
            tree,
            levels=levels,
            temperature=recipe.temperature,
            level_temperature=recipe.level_temperature,
            margin=recipe.margin or None,
            groups=self.groups,
            gather_across_devices=process_count() > 1,
        ).to(self.encoder.device)

    def steps(self, progress: Progress) -> Iterator[tuple[dict[str, float], int]]:
        """Take the remaining steps of the epoch; after each, yield its losses and how many pairs it had."""
        self.encoder.model.train()
        streams = [self._endless(source, progress.step) for _, source in self.parts]
        for number in range(progress.batch, self.steps_per_epoch):
            self._set_learning_rate(progress.step)
            seed_step(self.recipe.seed, progress.step)  # dropout, so that a continued run draws what it would have
            parts = [
                self._part(index, next(stream), [self.recipe.seed, progress.epoch, number, index])
                for index, stream in enumerate(streams)
            ]
            yield self._step(parts), len(parts[0].batch.queries) * process_count()

    def _step(self, parts: list[_Part]) -> dict[str, float]:
        columns = [column for part in parts for column in self._columns(part)]
        self.optimizer.zero_grad(set_to_none=True)
        if self.centroid_optimizer:
            self.centroid_optimizer.zero_grad(set_to_none=True)
        found: list[HCETerms] = []

        def loss_of(embeddings: Tensor) -> Tensor:
            found[:] = self._terms(parts, columns, embeddings)
            return torch.stack([part.weight * terms.total for part, terms in zip(parts, found, strict=True)]).sum()

        loss = self._backward(columns, loss_of)
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        average_gradients(parameters)
        values = average_values({"total": float(loss.detach()), **_values(found)}, self.encoder.device)
        if not torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).isfinite().all():
            values["total"] = float("nan")
        if np.isfinite(values["total"]):  # a broken step must not reach the weights
            self.optimizer.step()
            if self.centroid_optimizer:
                self.centroid_optimizer.step()
        return values

    def _backward(self, columns: list[_Column], loss_of: Callable[[Tensor], Tensor]) -> Tensor:
        def embed(column: _Column) -> Tensor:
            return self.encoder.embed(self.encoder.tokenize(column.texts, column.kind), column.kind)

        size = self.recipe.chunk_size
        if not size:
            loss = loss_of(torch.cat([embed(column) for column in columns]))
            loss.backward()
            return loss
        chunks = [
            _Column(column.kind, column.texts[start : start + size])
            for column in columns
            for start in range(0, len(column.texts), size)
        ]
        return backward_in_chunks(embed, chunks, loss_of)

    def _columns(self, part: _Part) -> list[_Column]:
        columns = [_Column("query", part.batch.queries), _Column("document", part.batch.documents)]
        if self.recipe.negatives == "fresh-siblings" and part.sampled.size:
            texts = [self.corpus[number].full_text for number in part.sampled.ravel().tolist()]
            columns.append(_Column("document", texts))
        return columns

    def _terms(self, parts: list[_Part], columns: list[_Column], embeddings: Tensor) -> list[HCETerms]:
        """The objective of each part, from the embeddings of all columns one below another."""
        blocks = iter(embeddings.split([len(column.texts) for column in columns]))
        found = []
        for part in parts:
            queries, documents = next(blocks), next(blocks)
            sampled = part.sampled
            if self.recipe.negatives == "mined":
                sampled = self._mine(queries.detach(), part)
            if self.recipe.negatives == "fresh-siblings" and sampled.size:
                negatives = next(blocks).reshape(*sampled.shape, -1)
            else:
                drawn = np.asarray(self.vectors[sampled])
                negatives = torch.from_numpy(drawn).to(self.encoder.device)  # (B, S, n), no gradient
            numbers = np.concatenate([part.batch.numbers[:, None], sampled, part.batch.known], axis=1)
            labels = torch.from_numpy(numbers).to(self.encoder.device)
            found.append(self.objective.terms([queries, documents, *negatives.unbind(1)], labels))
        return found

    def _part(self, index: int, batch: Batch, seed: list[int]) -> _Part:
        """A process's share of a batch, with negatives drawn for the whole batch, so that all shares fit together."""
        sampled = np.empty((len(batch.numbers), 0), dtype=np.int64)
        if self.recipe.negatives.endswith("siblings") and self.recipe.tree:
            rng = np.random.default_rng(seed)
            used = len(self.objective.centroids)
            levels = range(used + 1, self.tree.depth + 1)  # each term's samples come from under its own prefix
            drawn = [
                self.tree.sample_siblings(batch.numbers, self.recipe.negative_count, rng, level) for level in levels
            ]
            sampled = np.concatenate(drawn, axis=1)
            sampled = np.where((sampled < 0) | np.isin(sampled, self.held_out), batch.numbers[:, None], sampled)
        share = own_share(len(batch.numbers))
        own = Batch(batch.queries[share], batch.documents[share], batch.numbers[share], batch.known[share])
        return _Part(self.parts[index][0], own, sampled[share])

    def _mine(self, queries: Tensor, part: _Part) -> np.ndarray:
        """ANCE: of the documents nearest to each query by the last encoded vectors, some that are not right."""
        batch = part.batch
        count = self.recipe.negative_count * self.objective.document_terms  # for each term its own
        depth = max(MINED_FROM, count) + batch.known.shape[1] + len(self.held_out)
        found = nearest(queries.float().cpu().numpy(), self.vectors, min(depth, len(self.vectors)))[1]
        wrong = ~(found[:, :, None] == batch.known[:, None, :]).any(axis=2) & ~np.isin(found, self.held_out)
        wrong &= np.cumsum(wrong, axis=1) <= max(MINED_FROM, count)
        rng = np.random.default_rng([self.recipe.seed, int(batch.numbers[0]), int(batch.numbers.sum())])
        order = np.argsort(np.where(wrong, rng.random(found.shape), 2.0), axis=1)[:, :count]
        chosen = np.take_along_axis(found, order, axis=1)
        return np.where(np.take_along_axis(wrong, order, axis=1), chosen, batch.numbers[:, None])

    def _endless(self, source: PairSource, step: int) -> Iterator[Batch]:
        """The source's batches from a step on, turn after turn; a short source has more turns than there are epochs."""
        turns, first = divmod(step, batch_count(len(source), self.recipe.batch_size))
        return chain.from_iterable(
            source.batches(turn, self.recipe.batch_size, first if turn == turns else 0) for turn in count(turns)
        )

    def _set_learning_rate(self, step: int) -> None:
        """Linear warm-up, then linear decay to 0, as a function of the step alone."""
        total = self.recipe.epochs * self.steps_per_epoch
        rising = (step + 1) / max(1.0, self.recipe.warmup * total)
        falling = (total - step) / max(1.0, total - self.recipe.warmup * total)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate * min(1.0, rising, falling)


def _values(parts: list[HCETerms]) -> dict[str, float]:
    """The terms as plain numbers, for the history: levels of the part that has some, documents of the first part."""
    tree = next((terms for terms in parts if terms.levels), parts[0])
    losses = {f"level_{t}": float(loss.detach()) for t, loss in enumerate(tree.levels, start=1)}
    accuracies = {f"accuracy_{t}": float(value.detach()) for t, value in enumerate(tree.accuracies, start=1)}
    return {**losses, "document": float(parts[0].document.detach()), **accuracies}
