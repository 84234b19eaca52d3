"""Which of the trained weights to keep, and how much of them: F0·(1 − λ) + F′·λ, as held-out queries say.

Labelled queries that are held out are often few, and chance decides which epoch and which λ look best on them. So the
last epoch's weights are kept, all of them, as long as these queries do not clearly prefer others (docs/LOG.md).

Pseudo-queries are many, and are not what people ask. The epoch and the λ that they call best are taken. What they say
of a table is believed: training one has almost always helped, and to throw a training away for want of certainty costs
more than it saves. A transformer is often harmed by training without labels, so there they need a clear gain: one that
could be chance leaves the encoder as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from hce.encoding.encoder import Encoder
from hce.processes import of_the_first
from hce.training.heldout import DevSet, mean_ndcg, means
from hce.training.history import Epoch, best_epoch
from hce.training.recipe import Recipe

MIXES = (0.25, 0.5, 0.75, 1.0)
CLEAR = 2.0  # standard errors


class Kept(NamedTuple):
    """What was kept of a training.

    Attributes:
        mix: λ, how much of the trained weights; 0 for the start weights.
        trained_epoch: the epoch whose trained weights are in the mix.
        dev: the dev measures of the mix.
    """

    mix: float
    trained_epoch: int
    dev: dict[str, float]

    @property
    def epoch(self) -> int | None:
        """The epoch whose weights these are, 0 for F0; None for a true mix."""
        if self.mix == 0:
            return 0
        if self.mix == 1:
            return self.trained_epoch
        return None


def load_kept(
    encoder: Encoder,
    start_weights: dict[str, Tensor],
    best_weights: dict[str, Tensor],
    history: Sequence[Epoch],
    devset: DevSet,
    recipe: Recipe,
) -> Kept:
    """Set the encoder's weights to those that the recipe keeps.

    Args:
        encoder: has the weights of the last epoch.
        start_weights: F0.
        best_weights: of the epoch that was best on dev; F0 where none was better.
        history: an entry for each epoch, the start included.
        devset: the held-out queries.
        recipe: the settings.
    """
    best_number, last_number = best_epoch(history), history[-1].epoch
    weights = {best_number: best_weights, last_number: weights_of(encoder)}
    if recipe.keep == "mix":
        trained_by_epoch = {epoch: weights[epoch] for epoch in epochs_by_trust(best_number, last_number, devset)}
        found = load_best_mix(encoder, start_weights, trained_by_epoch, devset, recipe)
        return found if found.mix else found._replace(dev=history[0].dev)
    number = last_number if recipe.keep == "last" else best_number
    mix = float(number > 0)
    load_mix(encoder, start_weights, weights[number], mix)
    return Kept(mix, number, history[number].dev)


def epochs_by_trust(best_number: int, last_number: int, devset: DevSet) -> list[int]:
    """List the epochs whose weights may be mixed with F0, the most trusted first.

    Where no epoch beat F0, the last one's are mixed with it: part of the way may be better where all of it was too far.
    """
    if best_number in (0, last_number):
        return [last_number]
    return [last_number, best_number] if devset.is_labelled else [best_number]


def load_best_mix(
    encoder: Encoder,
    start_weights: dict[str, Tensor],
    trained_by_epoch: Mapping[int, dict[str, Tensor]],
    devset: DevSet,
    recipe: Recipe,
) -> Kept:
    """Set the encoder's weights to the best mix with one of some trained ones.

    Args:
        encoder: whose weights they are.
        start_weights: F0.
        trained_by_epoch: F′ of one or more epochs, the most trusted first: that one is chosen where labelled queries do
            not clearly say otherwise.
        devset: the held-out queries.
        recipe: the settings.
    """
    trust = list(trained_by_epoch)
    load_mix(encoder, start_weights, trained_by_epoch[trust[0]], 0.0)
    unmixed = devset.ndcg(encoder)
    ndcg_by_mix = {}
    for epoch, weights in trained_by_epoch.items():
        for mix in mixes(recipe, devset):
            load_mix(encoder, start_weights, weights, mix)
            ndcg = devset.ndcg(encoder)
            if mean_ndcg(ndcg) > mean_ndcg(unmixed):
                ndcg_by_mix[mix, epoch] = ndcg
    mix, epoch, ndcg = 0.0, trust[0], unmixed
    if ndcg_by_mix:
        mix, epoch = max(ndcg_by_mix, key=lambda each: mean_ndcg(ndcg_by_mix[each]))
        if devset.is_labelled:
            mix, epoch = _most_trusted(ndcg_by_mix, ndcg_by_mix[mix, epoch], trust)
            ndcg = ndcg_by_mix[mix, epoch]
        elif encoder.is_table or is_clear_gain(unmixed, ndcg_by_mix[mix, epoch]):
            ndcg = ndcg_by_mix[mix, epoch]
        else:
            mix = 0.0
    decided = of_the_first({"mix": mix, "epoch": float(epoch), **means(ndcg)}, encoder.device)
    mix, epoch = decided.pop("mix"), int(decided.pop("epoch"))
    load_mix(encoder, start_weights, trained_by_epoch[epoch], mix)
    return Kept(mix, epoch, decided)


def _most_trusted(
    ndcg_by_mix: dict[tuple[float, int], dict[str, np.ndarray]], best_ndcg: dict[str, np.ndarray], trust: list[int]
) -> tuple[float, int]:
    """Return λ and the epoch: of mixes not clearly worse than the best, the most trusted epoch's with the largest λ."""
    by_trust = sorted(ndcg_by_mix, key=lambda each: (trust.index(each[1]), -each[0]))
    return next(each for each in by_trust if not is_clear_gain(ndcg_by_mix[each], best_ndcg))


def mixes(recipe: Recipe, devset: DevSet) -> list[float]:
    """List the λ to choose from; pseudo-queries call more of the way good than people's queries do."""
    limit = 1.0 if devset.is_labelled else recipe.mix_limit
    return [mix for mix in MIXES if mix <= limit]


def load_mix(
    encoder: Encoder, start_weights: dict[str, Tensor], trained_weights: dict[str, Tensor], mix: float
) -> None:
    """Set the encoder's weights to F0·(1 − λ) + F′·λ."""
    mixed = {}
    for name, weight in start_weights.items():
        mixed[name] = weight.lerp(trained_weights[name], mix) if weight.is_floating_point() else weight
    encoder.model.load_state_dict(mixed)
    encoder.model.eval()


def is_clear_gain(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> bool:
    """Tell whether the mean over kinds rose by more than two standard errors of the paired differences.

    Nothing is clear where a kind has a single query, whose difference may be anything.

    Args:
        before: NDCG@10 of each query of each kind.
        after: the same queries' NDCG@10.
    """
    differences = [after[kind] - ndcg for kind, ndcg in before.items()]
    if min(map(len, differences)) < 2:
        return False
    gain = np.mean([each.mean() for each in differences])
    variance = sum(each.var(ddof=1) / len(each) for each in differences)
    return bool(gain > CLEAR * np.sqrt(variance) / len(differences))


def weights_of(encoder: Encoder) -> dict[str, Tensor]:
    """Copy the encoder's weights."""
    return {name: tensor.detach().clone() for name, tensor in encoder.model.state_dict().items()}
