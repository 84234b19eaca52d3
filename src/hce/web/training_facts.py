"""What an index carries of its encoder's training: measures before and after, and a line for each epoch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hce.training.history import Epoch

FOLDER = "model"


@dataclass(frozen=True)
class Training:
    """The training of an encoder.

    Attributes:
        metric: what the dev measure is, in words.
        before: it by kind of query, of the encoder that was given.
        after: of the encoder that came out.
        mix: how much of the trained weights is in it; 0 means that training did not help.
        epochs: the history; epoch 0 is the start. Each has `metric`, the mean over kinds.
    """

    metric: str
    before: dict[str, float]
    after: dict[str, float]
    mix: float
    epochs: list[dict[str, Any]]


def read_training(index: Path) -> Training | None:
    """Read it; None where the index was not made from a trained model, or the files are damaged."""
    folder = index / FOLDER
    try:
        facts = _load((folder / "hce.json").read_text(encoding="utf-8"))
        lines = (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()
        history = [Epoch(**_load(line)) for line in lines if line.strip()]
        epochs = [{**asdict(epoch), "metric": epoch.metric} for epoch in history]
        return Training(str(facts["metric"]), facts["before"], facts["after"], float(facts["mix"]), epochs)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _load(text: str) -> dict[str, Any]:
    """JSON without the NaN and infinity that only Python has; a loss may have become one."""
    return dict(json.loads(text, parse_constant=lambda name: None))
