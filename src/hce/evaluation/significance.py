"""Significance: could the difference between two systems on the same queries be chance?

The paired randomization test (Fisher's; Smucker, Allan and Carterette, CIKM 2007, recommend it for retrieval): if the
systems were the same, each query's difference could as well have had the other sign. p is the share of sign
assignments under which the mean difference is at least as far from 0 as the one observed.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from scipy import stats

from hce.errors import InputError

EXACT_UP_TO = 16  # queries that differ: 2^16 sign assignments are enumerated, more are drawn from
DRAWS = 10_000
CONFIDENCE = 0.95
NUMBERS_AT_ONCE = 1 << 22
ROUNDING = 1e-12  # sums of the same differences in another order may differ by as much

Scores = Mapping[str, float]  # of a system, by the query's id
Key = TypeVar("Key", bound=Hashable)


class Paired(NamedTuple):
    """How one system compares with another: the difference of their means, p, and how many queries are better.

    `low` and `high` are the ends of the difference's 95 % interval (percentile bootstrap over queries), and `p_holm`
    is p after Holm's correction for the number of comparisons.
    """

    difference: float
    p: float
    low: float
    high: float
    better: int
    worse: int
    equal: int
    p_holm: float


def compare_paired(a: Scores, b: Scores, seed: int = 0) -> Paired:
    """Compare what two systems scored on the same queries.

    >>> paired = compare_paired({"q1": 1.0, "q2": 0.5, "q3": 0.5}, {"q1": 0.5, "q2": 0.5, "q3": 0.0})
    >>> paired.p, paired.better, paired.worse, paired.equal  # two queries differ: 2 of 4 signs are as far from 0
    (0.5, 2, 0, 1)
    """
    if a.keys() != b.keys() or not a:
        raise InputError(
            f"a paired comparison needs the same queries on both sides, at least one: {len(a):,} and {len(b):,} given, "
            f"{len(a.keys() & b.keys()):,} in common"
        )
    differences = np.array([a[query_id] - b[query_id] for query_id in sorted(a)])
    differences[np.abs(differences) < ROUNDING] = 0.0  # the mean of three equal numbers need not be that number
    p = randomization_test(differences, seed)
    better, worse, equal = (int(each.sum()) for each in (differences > 0, differences < 0, differences == 0))
    return Paired(float(differences.mean()), p, *bootstrap_interval(differences, seed), better, worse, equal, p_holm=p)


def compare_several(pairs: Mapping[Key, tuple[Scores, Scores]], seed: int = 0) -> dict[Key, Paired]:
    """Compare several pairs of systems, and correct each p for their number.

    >>> one, other = {"q1": 1.0, "q2": 1.0}, {"q1": 0.0, "q2": 0.5}
    >>> {name: each.p_holm for name, each in compare_several({"a": (one, other), "b": (one, one)}).items()}
    {'a': 1.0, 'b': 1.0}
    """
    paired = {key: compare_paired(a, b, seed) for key, (a, b) in pairs.items()}
    corrected = holm([each.p for each in paired.values()])
    return {key: paired[key]._replace(p_holm=p) for key, p in zip(paired, corrected, strict=True)}


def randomization_test(differences: np.ndarray, seed: int = 0, draws: int = DRAWS) -> float:
    """Return the two-sided p: exact where few differ, else from random signs.

    The observed signs count as one of the draws, (x + 1) / (draws + 1), so that p is never 0 and the test never
    rejects more often than it says (Phipson and Smyth, 2010).
    """
    moving = differences[differences != 0]  # a difference of 0 has no sign to flip
    if len(moving) < 2:
        return 1.0  # with either sign, one difference is as far from 0
    observed = abs(moving.sum()) - ROUNDING * np.abs(moving).sum()
    if len(moving) <= EXACT_UP_TO:
        sums = np.zeros(1)
        for difference in moving:
            sums = np.concatenate([sums + difference, sums - difference])
        return float((np.abs(sums) >= observed).mean())
    # scipy's permutation_test flips query by query in Python: ten times as slow for thousands of queries.
    rng, rows, extreme = np.random.default_rng([seed, 0]), _rows_at_once(len(moving)), 0
    for start in range(0, draws, rows):
        signs = np.where(rng.random((min(rows, draws - start), len(moving))) < 0.5, 1.0, -1.0)
        extreme += int((np.abs(signs @ moving) >= observed).sum())
    return (extreme + 1) / (draws + 1)


def bootstrap_interval(differences: np.ndarray, seed: int = 0, draws: int = DRAWS) -> tuple[float, float]:
    """Return the percentile bootstrap's 95 % interval of the mean over queries."""
    if len(differences) < 2:  # one query is always drawn again, and scipy refuses to draw it
        return float(differences[0]), float(differences[0])
    drawn = stats.bootstrap(
        (differences,),
        np.mean,
        method="percentile",
        confidence_level=CONFIDENCE,
        n_resamples=draws,
        batch=_rows_at_once(len(differences)),
        rng=np.random.default_rng([seed, 1]),
    )
    return float(drawn.confidence_interval.low), float(drawn.confidence_interval.high)


def _rows_at_once(width: int) -> int:
    return max(1, NUMBERS_AT_ONCE // width)


def holm(ps: Sequence[float]) -> list[float]:
    """Adjust p-values by Holm's correction, in the order given.

    The chance that any true null hypothesis is rejected at α is then at most α, even for dependent comparisons.

    >>> holm([0.25, 0.125])
    [0.25, 0.25]
    """
    adjusted, highest = [1.0] * len(ps), 0.0
    for rank, number in enumerate(sorted(range(len(ps)), key=lambda index: ps[index])):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[number]))
        adjusted[number] = highest
    return adjusted
