"""The randomization test: by hand, by enumeration, against scipy, and under the null hypothesis."""

from __future__ import annotations

import itertools
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hce.errors import InputError
from hce.evaluation import significance
from hce.evaluation.significance import (
    EXACT_UP_TO,
    bootstrap_interval,
    compare_paired,
    compare_several,
    holm,
    randomization_test,
)


def by_query(values) -> dict[str, float]:
    return {f"q{number}": float(value) for number, value in enumerate(values)}


def enumerated(differences: np.ndarray) -> float:
    """The definition, in exact whole numbers."""
    sums = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    return sum(each >= abs(sum(differences)) for each in sums) / len(sums)


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        ([1], 1.0),  # +1 and −1 are as far
        ([1, 1], 0.5),  # of ++, +−, −+, −−, the first and the last
        ([1, 1, 1, 1, 1], 2 / 32),
        ([1, 2, 3], 2 / 8),
        ([3, -1], 1.0),  # |3 − 1| = 2 is reached by all four
        ([3, 2, -1], 4 / 8),  # 4 is reached by ±(3+2−1), ±(3+2+1)
        ([0, 0, 1, 1], 0.5),  # queries without a difference change nothing
        ([0, 0], 1.0),
    ],
)
def test_exact_by_hand(differences, p):
    assert randomization_test(np.array(differences, dtype=float)) == pytest.approx(p)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-5, 5), min_size=1, max_size=9))
def test_exact_is_the_definition(differences):
    scaled = np.array(differences) / 10  # tenths do not add up exactly in binary; equal sums must still count as equal
    assert randomization_test(scaled) == pytest.approx(enumerated(np.array(differences)))


@pytest.mark.parametrize("n", [2, 7, EXACT_UP_TO])
def test_every_sign_assignment_is_counted(n):
    tenths = np.random.default_rng(n).integers(-9, 10, size=n)
    tenths[tenths == 0] = 3
    sums = np.zeros(1, dtype=int)
    for value in tenths:
        sums = np.concatenate([sums + value, sums - value])
    assert randomization_test(tenths / 10) == np.mean(np.abs(sums) >= abs(tenths.sum()))


@pytest.mark.parametrize("n", [8, 12])
def test_scipys_exact_test_agrees(n):
    rng = np.random.default_rng(n)
    a, b = rng.random(n), rng.random(n) + 0.15
    theirs = stats.permutation_test(
        (a, b), lambda x, y, axis: np.mean(x - y, axis=axis), permutation_type="samples", vectorized=True
    )
    assert randomization_test(a - b) == pytest.approx(theirs.pvalue)


def test_scipys_random_test_agrees():
    rng = np.random.default_rng(3)
    a, b = rng.random(60), rng.random(60) + 0.07
    theirs = stats.permutation_test(
        (a, b),
        lambda x, y, axis: np.mean(x - y, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=20_000,
        rng=np.random.default_rng(0),
    )
    assert 0.05 < theirs.pvalue < 0.5  # a p that leaves room for disagreement
    assert randomization_test(a - b) == pytest.approx(theirs.pvalue, abs=0.015)


def test_random_signs_agree_with_enumeration(monkeypatch):
    differences = np.random.default_rng(5).normal(0.3, 1, size=EXACT_UP_TO)
    exact = randomization_test(differences)
    monkeypatch.setattr(significance, "EXACT_UP_TO", 0)
    drawn = randomization_test(differences, draws=40_000)
    assert drawn != exact
    assert drawn == pytest.approx(exact, abs=0.01)


def test_random_signs_by_the_formula():
    """Sums of tenths often tie with the one observed, and rounding must not tell them apart."""
    tenths = np.random.default_rng(9).integers(1, 4, size=30) * np.where(np.arange(30) % 3 == 0, -1, 1)
    signs = np.where(np.random.default_rng([4, 0]).random((2000, 30)) < 0.5, 1, -1)
    extreme = int((np.abs(signs @ tenths) >= abs(tenths.sum())).sum())
    assert 0 < extreme < 2000
    assert randomization_test(tenths / 10, seed=4, draws=2000) == (extreme + 1) / 2001


def test_blocks_change_nothing(monkeypatch):
    differences = np.random.default_rng(6).normal(0.1, 1, size=50)
    whole = randomization_test(differences, draws=500), bootstrap_interval(differences, draws=500)
    monkeypatch.setattr(significance, "NUMBERS_AT_ONCE", 7 * 50 + 3)
    assert (randomization_test(differences, draws=500), bootstrap_interval(differences, draws=500)) == whole


def test_p_is_never_zero():
    assert randomization_test(np.ones(40)) == 1 / 10_001
    assert randomization_test(np.ones(40), draws=99) == 1 / 100


def test_p_is_uniform_under_the_null():
    rng = np.random.default_rng(0)
    ps = [randomization_test(rng.normal(size=30), seed=trial, draws=400) for trial in range(600)]
    assert stats.kstest(ps, "uniform").pvalue > 0.01
    for level in (0.05, 0.2):
        assert np.mean(np.array(ps) <= level) == pytest.approx(level, abs=3 * np.sqrt(level * (1 - level) / 600))


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(1)
    covered = 0
    for trial in range(300):
        low, high = bootstrap_interval(rng.normal(0.5, 1, size=60), seed=trial, draws=400)
        covered += low <= 0.5 <= high
    assert covered / 300 == pytest.approx(0.95, abs=0.04)


def test_the_interval_agrees_with_scipy():
    differences = np.random.default_rng(2).normal(0.2, 1, size=200)
    theirs = stats.bootstrap(
        (differences,), np.mean, method="percentile", n_resamples=10_000, rng=np.random.default_rng(0)
    ).confidence_interval
    assert bootstrap_interval(differences) == pytest.approx((theirs.low, theirs.high), abs=0.01)


def test_a_comparison_in_full():
    a, b = {"x": 1.0, "y": 0.5, "z": 0.25, "w": 0.0}, {"w": 0.5, "z": 0.25, "y": 0.25, "x": 0.0}
    paired = compare_paired(a, b)
    assert paired.difference == pytest.approx(0.75 / 4)
    assert (paired.better, paired.worse, paired.equal) == (2, 1, 1)
    assert paired.p == enumerated(np.array([4, 1, -2])) == 0.75  # 3 of 4 pairs of signs reach |±4 ±1 ±2| ≥ 3
    assert paired.low <= paired.difference <= paired.high
    other = compare_paired(b, a)
    assert other.difference == -paired.difference
    assert other.p == paired.p
    assert (other.low, other.high) == pytest.approx((-paired.high, -paired.low))


def test_the_same_seed_gives_the_same_answer_whatever_the_order_of_queries():
    rng = np.random.default_rng(4)
    a, b = by_query(rng.random(50)), by_query(rng.random(50))
    assert compare_paired(a, b) == compare_paired(dict(reversed(a.items())), b)
    assert compare_paired(a, b, seed=1).p != compare_paired(a, b, seed=2).p


def test_the_same_system_twice():
    scores = by_query(np.random.default_rng(0).random(40))
    assert compare_paired(scores, scores) == (0.0, 1.0, 0.0, 0.0, 0, 0, 40, 1.0)


def test_rounding_is_no_difference():
    """A system without seeds beside the mean of three runs that are all the same as it."""
    scores = {f"q{number}": value for number, value in enumerate(np.random.default_rng(0).random(200).tolist())}
    means = {query_id: statistics.fmean([value] * 3) for query_id, value in scores.items()}
    assert means != scores
    paired = compare_paired(means, scores)
    assert (paired.better, paired.worse, paired.equal, paired.p) == (0, 0, 200, 1.0)


def test_one_query_has_no_interval_and_no_significance():
    assert compare_paired({"x": 0.75}, {"x": 0.5}) == (0.25, 1.0, 0.25, 0.25, 1, 0, 0, 1.0)


def test_several_comparisons_are_corrected_together():
    rng = np.random.default_rng(7)
    ours, rivals = by_query(rng.random(30) + 0.2), {name: by_query(rng.random(30)) for name in "abc"}
    found = compare_several({name: (ours, rival) for name, rival in rivals.items()}, seed=3)
    alone = {name: compare_paired(ours, rival, seed=3) for name, rival in rivals.items()}
    corrected = holm([each.p for each in alone.values()])
    assert found == {name: alone[name]._replace(p_holm=p) for name, p in zip("abc", corrected, strict=True)}
    assert compare_several({}) == {}


@pytest.mark.parametrize(("a", "b"), [({}, {}), ({"x": 1.0}, {"y": 1.0}), ({"x": 1.0, "y": 1.0}, {"x": 1.0})])
def test_other_queries_cannot_be_paired(a, b):
    with pytest.raises(InputError, match="needs the same queries on both sides"):
        compare_paired(a, b)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0.001, 0.2))
def test_holm_rejects_as_the_step_down_procedure_does(ps, level):
    adjusted = holm(ps)
    assert all(p <= corrected <= 1 for p, corrected in zip(ps, adjusted, strict=True))
    rejected = set()
    for rank, number in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        if min(1.0, ps[number] * (len(ps) - rank)) > level:
            break
        rejected.add(number)
    assert {number for number, corrected in enumerate(adjusted) if corrected <= level} == rejected


def test_holm_keeps_false_alarms_rare():
    rng = np.random.default_rng(8)
    alarms = [min(holm(rng.random(5).tolist())) <= 0.05 for _ in range(2000)]
    assert np.mean(alarms) == pytest.approx(0.05, abs=0.015)
