"""What a training run has been through: one entry an epoch, and how far the present one has come."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Epoch:
    """One line of the history; epoch 0 is the encoder before training.

    Attributes:
        epoch: its number.
        dev: the dev measure by kind of query.
        loss: mean loss by name: level_1 … level_M, document (of the labelled pairs in joint training).
        accuracy: the share of queries that would go down the right way, at each level from the top.
        reclustered: whether the tree was grown anew afterwards.
        churn: the share of documents whose parent that changed.
        seconds: how long it took, measuring included.
    """

    epoch: int
    dev: dict[str, float]
    loss: dict[str, float] = field(default_factory=dict)
    accuracy: list[float] = field(default_factory=list)
    reclustered: bool = False
    churn: float = 0.0
    seconds: float = 0.0

    @property
    def metric(self) -> float:
        """The one number that decides: the mean over kinds."""
        return mean_over_kinds(self.dev)

    def __str__(self) -> str:
        parts = [f"epoch {self.epoch}", f"dev {self.metric:.4f}"]
        if self.loss:
            parts.append("loss " + " ".join(f"{value:.3f}" for value in self.loss.values()))
        if self.accuracy:
            parts.append("accuracy " + " ".join(f"{value:.2f}" for value in self.accuracy))
        if self.reclustered:
            parts.append(f"re-clustered, {self.churn:.0%} of documents moved")
        return " · ".join([*parts, f"{self.seconds:.0f} s"])


def mean_over_kinds(dev: dict[str, float]) -> float:
    """The dev measure as one number."""
    return float(np.mean(list(dev.values())))


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
