"""Significance: could the difference between two systems on the same queries be chance?

The paired randomisation test (Fisher's; Smucker, Allan and Carterette, CIKM 2007, recommend it for retrieval): if the
systems were the same, each query's difference could as well have had the other sign. p is the share of sign
assignments under which the mean difference is at least as far from 0 as the one observed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hce.errors import InputError

EXACT_UP_TO = 16  # queries that differ: 2^16 sign assignments are enumerated, more are drawn from
DRAWS = 10_000
CONFIDENCE = 0.95
NUMBERS_AT_ONCE = 1 << 22
ROUNDING = 1e-12  # sums of the same differences in another order may differ by as much


class Paired(NamedTuple):
    """How one system compares with another, query by query.

    Attributes:
        difference: mean of the first less mean of the second.
        p: two-sided, of the randomisation test.
        low: lower end of the difference's 95 % interval (percentile bootstrap over queries).
        high: its upper end.
        better: how many queries the first system does better at.
        worse: how many it does worse at.
        equal: at how many both score the same.
    """

    difference: float
    p: float
    low: float
    high: float
    better: int
    worse: int
    equal: int


def compare_paired(a: Mapping[str, float], b: Mapping[str, float], seed: int = 0, *, draws: int = DRAWS) -> Paired:
    """Compare what two systems scored on the same queries; the same seed gives the same answer.

    >>> paired = compare_paired({"q1": 1.0, "q2": 0.5, "q3": 0.5}, {"q1": 0.5, "q2": 0.5, "q3": 0.0})
    >>> paired.p, paired.better, paired.worse, paired.equal  # two queries differ: 2 of 4 signs are as far from 0
    (0.5, 2, 0, 1)

    Raises:
        InputError: the queries are not the same, or there are none.
    """
    if a.keys() != b.keys() or not a:
        raise InputError(
            f"a paired comparison needs the same queries on both sides, at least one: {len(a):,} and {len(b):,} given, "
            f"{len(a.keys() & b.keys()):,} in common"
        )
    differences = np.array([a[query_id] - b[query_id] for query_id in sorted(a)])
    low, high = bootstrap_interval(differences, seed, draws)
    return Paired(
        difference=float(differences.mean()),
        p=randomisation_test(differences, seed, draws),
        low=low,
        high=high,
        better=int((differences > 0).sum()),
        worse=int((differences < 0).sum()),
        equal=int((differences == 0).sum()),
    )


def randomisation_test(differences: np.ndarray, seed: int = 0, draws: int = DRAWS) -> float:
    """The two-sided p of paired differences, of shape (queries,): exact where few differ, else from random signs.

    The observed signs count as one of the draws, (x + 1) / (draws + 1), so that p is never 0 and the test never
    rejects more often than it says (Phipson and Smyth, 2010).
    """
    moving = differences[differences != 0]  # a difference of 0 has no sign to flip
    as_far = abs(moving.sum()) - ROUNDING * np.abs(moving).sum()
    if len(moving) <= EXACT_UP_TO:
        return float(np.mean(np.abs(_all_signed_sums(moving)) >= as_far))
    extreme = sum(int((np.abs(sums) >= as_far).sum()) for sums in _drawn_signed_sums(moving, seed, draws))
    return (extreme + 1) / (draws + 1)


def _all_signed_sums(values: np.ndarray) -> np.ndarray:
    """The sums of the values under every assignment of signs, of shape (2^values,)."""
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    return sums


def _drawn_signed_sums(values: np.ndarray, seed: int, draws: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng([seed, 0])
    for count in _blocks(draws, len(values)):
        signs = np.where(rng.random((count, len(values))) < 0.5, 1.0, -1.0)
        yield signs @ values


def bootstrap_interval(differences: np.ndarray, seed: int = 0, draws: int = DRAWS) -> tuple[float, float]:
    """The percentile bootstrap's 95 % interval of the mean: queries are drawn with replacement."""
    rng = np.random.default_rng([seed, 1])
    means = [
        differences[rng.integers(len(differences), size=(count, len(differences)))].mean(axis=1)
        for count in _blocks(draws, len(differences))
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def _blocks(draws: int, width: int) -> Iterator[int]:
    """Numbers of rows that add up to `draws`, each few enough to be held at once."""
    most = max(1, NUMBERS_AT_ONCE // max(width, 1))
    for start in range(0, draws, most):
        yield min(most, draws - start)


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's correction for several comparisons: adjusted p-values, in the order given.

    Below α, an adjusted p rejects; the chance that any true null hypothesis is among those rejected is then at most α,
    however the comparisons hang together.

    >>> holm([0.25, 0.125])
    [0.25, 0.25]
    """
    adjusted, highest = [1.0] * len(ps), 0.0
    for rank, number in enumerate(sorted(range(len(ps)), key=lambda index: ps[index])):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[number]))
        adjusted[number] = highest
    return adjusted
