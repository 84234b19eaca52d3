"""Epochs to TensorBoard, Weights & Biases or whatever else accelerate can log to, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hce.errors import InputError
from hce.training.history import Epoch
from hce.training.recipe import Recipe

Log = Callable[[Epoch], None]


@contextmanager
def tracked(name: str | None, recipe: Recipe, folder: Path) -> Iterator[Log]:
    """Yield a function that logs an epoch; without a tracker's name it does nothing.

    Raises:
        InputError: accelerate does not know the tracker, or its package is not installed.
    """
    if name is None:
        yield lambda epoch: None
        return
    from accelerate import Accelerator

    try:
        accelerator = Accelerator(log_with=name, project_dir=str(folder))
        settings = {key: str(value) for key, value in recipe.as_dict().items()}
        accelerator.init_trackers("hce", config=settings)
    except (ValueError, ImportError) as error:
        raise InputError(f"no tracker {name!r}: {error}; is its package installed?") from error
    try:
        yield lambda epoch: accelerator.log(_flat(epoch), step=epoch.epoch)
    finally:
        accelerator.end_training()


def _flat(epoch: Epoch) -> dict[str, float]:
    values = {"dev": epoch.metric, "churn": epoch.churn}
    values |= {f"dev/{kind}": value for kind, value in epoch.dev.items()}
    values |= {f"loss/{term}": value for term, value in epoch.loss.items()}
    values |= {f"accuracy/level_{t}": value for t, value in enumerate(epoch.accuracy, start=1)}
    return values
