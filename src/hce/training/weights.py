"""Which of the trained weights to keep, and how much of them: F0·(1 − λ) + F′·λ, as held-out queries say.

Labelled queries that are held out are often few, and chance decides which epoch and which λ look best on them. So the
last epoch's weights are kept, all of them, as long as these queries do not clearly prefer others (docs/LOG.md).

Pseudo-queries are many, and are not what people ask. The epoch and the λ that they call best are taken. What they say
of a table is believed: training one has almost always helped, and to throw a training away for want of certainty costs
more than it saves. A transformer is often harmed by training without labels, so there they need a clear gain: one that
could be chance leaves the encoder as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from hce.encoding.encoder import Encoder
from hce.processes import of_the_first
from hce.training.heldout import DevSet, means
from hce.training.history import mean_over_kinds
from hce.training.recipe import Recipe

MIXES = (0.25, 0.5, 0.75, 1.0)
CLEAR = 2.0  # standard errors


class Choice(NamedTuple):
    """What was chosen.

    Attributes:
        mix: λ, 0 for the start weights.
        which: the place of the trained weights among those to choose from.
        dev: the dev measures of the mix.
    """

    mix: float
    which: int
    dev: dict[str, float]


def load_best_mix(
    encoder: Encoder,
    start_weights: dict[str, Tensor],
    trained: Sequence[dict[str, Tensor]],
    dev: DevSet,
    recipe: Recipe,
) -> Choice:
    """Set the encoder's weights to the best mix with one of some trained ones.

    Args:
        encoder: whose weights they are.
        start_weights: F0.
        trained: one or more F′; where labelled queries do not clearly say otherwise, the first is chosen.
        dev: the held-out queries.
        recipe: the settings.
    """
    load_mix(encoder, start_weights, trained[0], 0.0)
    unmixed = dev.scores(encoder)
    scored = {}
    for which, weights in enumerate(trained):
        for mix in mixes(recipe, dev):
            load_mix(encoder, start_weights, weights, mix)
            scores = dev.scores(encoder)
            if _mean(scores) > _mean(unmixed):
                scored[mix, which] = scores
    mix, which, scores = 0.0, 0, unmixed
    if scored:
        mix, which = max(scored, key=lambda each: _mean(scored[each]))
        if dev.is_labelled:
            mix, which = _most_trusted(scored, scored[mix, which])
            scores = scored[mix, which]
        elif encoder.is_table or is_clear_gain(unmixed, scored[mix, which]):
            scores = scored[mix, which]
        else:
            mix = 0.0
    decided = of_the_first({"mix": mix, "which": float(which), **means(scores)}, encoder.device)
    mix, which = decided.pop("mix"), int(decided.pop("which"))
    load_mix(encoder, start_weights, trained[which], mix)
    return Choice(mix, which, decided)


def _most_trusted(
    scored: dict[tuple[float, int], dict[str, np.ndarray]], best: dict[str, np.ndarray]
) -> tuple[float, int]:
    """Return λ and which trained weights: of mixes not clearly worse than the best, the earliest with the largest λ."""
    by_trust = sorted(scored, key=lambda each: (each[1], -each[0]))
    return next(each for each in by_trust if not is_clear_gain(scored[each], best))


def _mean(scores: dict[str, np.ndarray]) -> float:
    return mean_over_kinds(means(scores))


def mixes(recipe: Recipe, dev: DevSet) -> list[float]:
    """List the λ to choose from; pseudo-queries call more of the way good than people's queries do."""
    limit = 1.0 if dev.is_labelled else recipe.mix_limit
    return [mix for mix in MIXES if mix <= limit]


def load_mix(encoder: Encoder, start_weights: dict[str, Tensor], trained: dict[str, Tensor], mix: float) -> None:
    """Set the encoder's weights to F0·(1 − λ) + F′·λ."""
    mixed = {}
    for name, weight in start_weights.items():
        mixed[name] = weight.lerp(trained[name], mix) if weight.is_floating_point() else weight
    encoder.model.load_state_dict(mixed)
    encoder.model.eval()


def is_clear_gain(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> bool:
    """Tell whether the mean over kinds rose by more than two standard errors of the paired differences.

    Args:
        before: a score for each query of each kind.
        after: the same queries' scores.
    """
    differences = [after[kind] - scores for kind, scores in before.items()]
    gain = np.mean([each.mean() for each in differences])
    variance = sum(each.var(ddof=1) / len(each) for each in differences if len(each) > 1)
    return bool(gain > CLEAR * np.sqrt(variance) / len(differences))


def weights_of(encoder: Encoder) -> dict[str, Tensor]:
    """Copy the encoder's weights."""
    return {name: tensor.detach().clone() for name, tensor in encoder.model.state_dict().items()}
