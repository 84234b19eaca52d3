"""Exact search and measures, by hand and against an independent formulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hce.dense import Scored, nearest
from hce.errors import InputError
from hce.evaluate import evaluate
from hce.judgments import Judgment, Qrels, Query


class Fixed:
    """A searcher that knows its answers."""

    def __init__(self, answers: dict[str, list[str]]) -> None:
        self.answers = answers

    def search(self, queries, k):
        return [[Scored(doc, 1.0) for doc in self.answers[query]][:k] for query in queries]


QUERIES = {name: Query(name, name) for name in ("a", "b", "c")}
QRELS = Qrels([Judgment("a", "d1", 2), Judgment("a", "d2", 1), Judgment("b", "d3", 1), Judgment("c", "d9", 1)])


def test_ndcg_and_recall_by_hand():
    report = evaluate(Fixed({"a": ["d2", "d5", "d1"], "b": ["d3"], "c": []}), QUERIES, QRELS, ["nDCG@10", "R@1"])
    ideal = 2 / math.log2(2) + 1 / math.log2(3)
    assert report.per_query["nDCG@10"]["a"] == pytest.approx((1 / math.log2(2) + 2 / math.log2(4)) / ideal)
    assert report.per_query["R@1"] == {"a": 0.5, "b": 1.0, "c": 0.0}
    assert report.means["R@1"] == pytest.approx(0.5)  # the query without hits counts 0


def test_equal_scores_keep_the_searchers_order():
    report = evaluate(Fixed({"a": ["d5", "d1"], "b": ["d3"], "c": []}), QUERIES, QRELS, ["RR@10"])
    assert report.per_query["RR@10"]["a"] == 0.5  # and not 1.0, as breaking ties by name might have it


def test_a_hit_that_is_the_query_itself_is_dropped():
    answers = Fixed({"a": ["a", "d1"], "b": ["d3"], "c": []})
    assert evaluate(answers, QUERIES, QRELS, ["RR@10"]).per_query["RR@10"]["a"] == 1.0
    assert evaluate(answers, QUERIES, QRELS, ["RR@10"], drop_self=False).per_query["RR@10"]["a"] == 0.5


def test_a_deep_cut_off_asks_for_enough_hits():
    answers = {"a": [f"x{i}" for i in range(150)] + ["d1", "d2"], "b": ["d3"], "c": []}
    report = evaluate(Fixed(answers), QUERIES, QRELS, ["R@100", "R@1000"])
    assert report.per_query["R@100"]["a"] == 0.0
    assert report.per_query["R@1000"]["a"] == 1.0


def test_unknown_measure():
    with pytest.raises(InputError, match="unknown measure 'goodness'"):
        evaluate(Fixed({}), QUERIES, QRELS, ["goodness"])


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 60), queries=st.integers(0, 5), k=st.integers(1, 80), seed=st.integers(0, 99))
def test_nearest_is_a_sort(count, queries, k, seed):
    rng = np.random.default_rng(seed)
    documents = rng.integers(-1, 2, size=(count, 3)).astype(np.float32)  # many equal scores
    asked = rng.integers(-1, 2, size=(queries, 3)).astype(np.float32)
    scores, numbers = nearest(asked, documents, k)
    full = asked @ documents.T
    assert numbers.shape == (queries, min(k, count))
    for row in range(queries):
        expected = sorted(full[row], reverse=True)[:k]
        np.testing.assert_allclose(scores[row], expected)
        np.testing.assert_allclose(full[row, numbers[row]], scores[row])
        assert len(set(numbers[row].tolist())) == len(numbers[row])
