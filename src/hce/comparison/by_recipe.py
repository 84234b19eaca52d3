"""Systems that are our own trainer with other settings: HCE, what is left of it without a part, and the plain rivals.

They differ in a few fields of the recipe and in which queries they may see, and in nothing else: pairs, batches,
learning rate, steps, the choice of weights on dev are the same for all. So a difference in the result is one of method.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hce.comparison.task import Built, Task, searched_by_vectors
from hce.training.co_training import TrainResult
from hce.training.train import train


def trained(*, labels: bool = True, generated: bool = False, **settings: Any) -> Callable[[Task], Built]:
    """A system trained by `hce.train`.

    Args:
        labels: whether it may see labelled queries, to train on or to choose by.
        generated: whether it trains on generated queries too.
        settings: fields of the recipe that make it what it is.
    """

    def build(task: Task) -> Built:
        output = task.folder / "model" if task.folder else None
        if output is not None and output.exists():  # finished, and killed before it was measured
            shutil.rmtree(output)
        result = train(
            task.corpus,
            task.load_encoder(),
            pairs=task.pairs if labels else None,
            dev=task.dev if labels else None,
            generated=task.generated if generated else None,
            recipe=replace(task.recipe, **settings),
            output=output,
            resume=output is not None,
            progress=task.progress,
        )
        return searched_by_vectors(result.encoder, task.corpus, training_seconds(result), facts_of(result))

    return build


def training_seconds(result: TrainResult) -> float:
    """The epochs' own seconds, clustering and measuring included: those of a run that was continued add up."""
    return sum(epoch.seconds for epoch in result.history)


def facts_of(result: TrainResult) -> dict[str, Any]:
    """What training did, for the report."""
    return {
        "mode": result.recipe.mode,
        "epochs": len(result.history) - 1,
        "mix": result.mix,
        "metric": result.metric,
        "before": result.before,
        "after": result.after,
    }
