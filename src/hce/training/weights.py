"""How much of the trained weights to keep: F0·(1 − λ) + F′·λ, with the λ that held-out queries call best.

A better mean on labelled queries is enough. Pseudo-queries are not what people ask. What they say of a table is
believed too: training one has almost always helped, and to throw a training away for want of certainty costs more than
it saves. A transformer is often harmed by training without labels, so there pseudo-queries need a clear gain: one that
could be chance leaves the encoder as it was (docs/LOG.md).
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from hce.encoding.encoder import Encoder
from hce.processes import of_the_first
from hce.training.heldout import DevSet, mean_over_kinds, means
from hce.training.recipe import Recipe

MIXES = (0.25, 0.5, 0.75, 1.0)
CLEAR = 2.0  # standard errors


def load_best_mix(
    encoder: Encoder, start_weights: dict[str, Tensor], trained: dict[str, Tensor], dev: DevSet, recipe: Recipe
) -> tuple[float, dict[str, float]]:
    """Set the encoder's weights to the best mix; return its λ, 0 for the start weights, and its dev measures."""
    load_mix(encoder, start_weights, trained, 0.0)
    chosen, unmixed = 0.0, dev.scores(encoder)
    best = unmixed
    for mix in mixes(recipe, dev):
        load_mix(encoder, start_weights, trained, mix)
        scores = dev.scores(encoder)
        if mean_over_kinds(means(scores)) > mean_over_kinds(means(best)):
            chosen, best = mix, scores
    if not (dev.is_labelled or encoder.is_table or is_clear_gain(unmixed, best)):
        chosen, best = 0.0, unmixed
    decided = of_the_first({"mix": chosen, **means(best)}, encoder.device)
    chosen = decided.pop("mix")
    load_mix(encoder, start_weights, trained, chosen)
    return chosen, decided


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
