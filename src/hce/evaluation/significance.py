"""Significance: could a difference between systems on the same queries be chance?

The test is Fisher's paired randomization test, which Smucker, Allan and Carterette (CIKM 2007) recommend for retrieval.
If the systems are equally good, each query's difference could have had the other sign. p is the share of sign
assignments under which the mean difference is at least as far from 0 as the observed one.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from scipy import stats

from hce.errors import InputError

EXACT_UP_TO = 16  # differing queries; with more, sign assignments are sampled and not enumerated
DRAWS = 10_000
CONFIDENCE = 0.95
NUMBERS_AT_ONCE = 1 << 22
ROUNDING = 1e-12  # error of a floating-point sum, which depends on the order of adding

Scores = Mapping[str, float]  # one system's value for each query id
Key = TypeVar("Key", bound=Hashable)


class Paired(NamedTuple):
    """Two systems compared: difference of means, p, and queries won and lost.

    `low` and `high` are the ends of the difference's 95 % interval (percentile bootstrap over queries). `p_holm` is p
    after Holm's correction for the number of comparisons.
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
    """Compare two systems' scores on the same queries.

    >>> paired = compare_paired({"q1": 1.0, "q2": 0.5, "q3": 0.5}, {"q1": 0.5, "q2": 0.5, "q3": 0.0})
    >>> paired.p, paired.better, paired.worse, paired.equal  # 2 of the 4 choices of signs are as far from 0
    (0.5, 2, 0, 1)
    """
    if a.keys() != b.keys() or not a:
        raise InputError(
            f"a paired comparison needs the same queries on both sides, at least one: {len(a):,} and {len(b):,} given, "
            f"{len(a.keys() & b.keys()):,} in common"
        )
    differences = np.array([a[query_id] - b[query_id] for query_id in sorted(a)])
    differences[np.abs(differences) < ROUNDING] = 0.0  # equal scores can differ by rounding; they are ties
    p = randomization_test(differences, seed)
    better, worse, equal = (int(each.sum()) for each in (differences > 0, differences < 0, differences == 0))
    return Paired(float(differences.mean()), p, *bootstrap_interval(differences, seed), better, worse, equal, p_holm=p)


def compare_several(pairs: Mapping[Key, tuple[Scores, Scores]], seed: int = 0) -> dict[Key, Paired]:
    """Compare several pairs of systems, and correct each p for the number of pairs.

    >>> one, other = {"q1": 1.0, "q2": 1.0}, {"q1": 0.0, "q2": 0.5}
    >>> {name: each.p_holm for name, each in compare_several({"a": (one, other), "b": (one, one)}).items()}
    {'a': 1.0, 'b': 1.0}
    """
    paired = {key: compare_paired(a, b, seed) for key, (a, b) in pairs.items()}
    corrected = holm([each.p for each in paired.values()])
    return {key: paired[key]._replace(p_holm=p) for key, p in zip(paired, corrected, strict=True)}


def randomization_test(differences: np.ndarray, seed: int = 0, draws: int = DRAWS) -> float:
    """Return the two-sided p: exact if few queries differ, else from random signs.

    If x draws are as far from 0 as the observed signs, p = (x + 1) / (draws + 1). So p is never 0, and the test rejects
    no more often than its level (Phipson and Smyth, 2010).
    """
    moving = differences[differences != 0]  # a difference of 0 has no sign to flip
    if len(moving) < 2:
        return 1.0  # a single difference is as far from 0 with either sign
    observed = abs(moving.sum()) - ROUNDING * np.abs(moving).sum()
    if len(moving) <= EXACT_UP_TO:
        sums = np.zeros(1)
        for difference in moving:
            sums = np.concatenate([sums + difference, sums - difference])
        return float((np.abs(sums) >= observed).mean())
    # scipy's permutation_test flips query by query in Python, and takes ten times as long for thousands of queries.
    rng, rows, extreme = np.random.default_rng([seed, 0]), _rows_at_once(len(moving)), 0
    for start in range(0, draws, rows):
        signs = np.where(rng.random((min(rows, draws - start), len(moving))) < 0.5, 1.0, -1.0)
        extreme += int((np.abs(signs @ moving) >= observed).sum())
    return (extreme + 1) / (draws + 1)


def bootstrap_interval(differences: np.ndarray, seed: int = 0, draws: int = DRAWS) -> tuple[float, float]:
    """Return the mean's 95 % interval, by percentile bootstrap over queries."""
    if len(differences) < 2:  # scipy refuses to resample a single query
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
