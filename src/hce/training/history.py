"""The history of a run, an entry an epoch, and the dev measure as one number: what is read back without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

MAY_BE_NAN = ("loss", "accuracy")  # of an epoch; a JSON file has None in their place


def mean_over_kinds(dev: Mapping[str, float]) -> float:
    """Return the dev measure as one number."""
    return float(np.mean(list(dev.values())))


@dataclass(frozen=True)
class Epoch:
    """One line of the history; epoch 0 is the encoder before training.

    Attributes:
        epoch: its number.
        dev: the dev measure by kind of query.
        loss: mean loss by name: level_1 … level_M, document (of the labelled pairs in joint training), neighbours.
        accuracy: the share of queries that would go down the right way, at each level from the top.
        reclustered: whether the tree was grown anew afterwards.
        churn: the share of documents that this moved to another leaf.
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


def best_epoch(history: Sequence[Epoch]) -> int:
    """Return the number of the epoch that was best on dev, the earliest of equal ones."""
    return max(history, key=lambda epoch: epoch.metric).epoch
