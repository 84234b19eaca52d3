"""Exact search against plain sorting, where many scores are equal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hce.search import engine
from hce.search.engine import EXTRA_CANDIDATES, Found, k_best, nearest, score_blocks
from hce_lab.comparison.task import best_first


def test_ranked_by_hand():
    candidates = Found(np.array([[8, 3, 2, -1]]), np.array([[0.5, 0.9, 0.5, 0.7]], np.float32))
    found = k_best(candidates, 3)
    assert found.numbers.tolist() == [[3, 2, 8]]
    assert found.scores.tolist() == [[np.float32(0.9), 0.5, 0.5]]
    assert k_best(candidates, 5).numbers.tolist() == [[3, 2, 8, -1, -1]]
    assert EXTRA_CANDIDATES > 0


@given(st.lists(st.integers(0, 4), max_size=30), st.integers(0, 40))
def test_best_first_is_a_stable_sort(values, k):
    scores = np.array(values, dtype=np.float32)
    assert best_first(scores, k).tolist() == sorted(range(len(values)), key=lambda i: -values[i])[:k]


@pytest.fixture(params=[1, 70, 1 << 26])
def at_once(request, monkeypatch):
    """Blocks of one query, of a few, of all."""
    monkeypatch.setattr(engine, "SCORES_AT_ONCE", request.param)


@pytest.mark.usefixtures("at_once")
def test_blocks_are_the_whole_product():
    rng = np.random.default_rng(0)
    queries, documents = rng.normal(size=(23, 4)).astype(np.float32), rng.normal(size=(9, 4)).astype(np.float32)
    scores = np.full((23, 9), np.nan, np.float32)
    for rows, block in score_blocks(queries, documents):
        assert np.isnan(scores[rows]).all()  # no query comes twice
        scores[rows] = block
    np.testing.assert_allclose(scores, queries @ documents.T, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 60), queries=st.integers(0, 5), k=st.integers(1, 80), seed=st.integers(0, 99))
def test_nearest_is_a_sort(count, queries, k, seed):
    rng = np.random.default_rng(seed)
    documents = rng.integers(-1, 2, size=(count, 3)).astype(np.float32)  # many equal scores
    asked = rng.integers(-1, 2, size=(queries, 3)).astype(np.float32)
    positions, scores = nearest(asked, documents, k)
    full = asked @ documents.T
    assert positions.shape == (queries, min(k, count))
    for row in range(queries):
        expected = sorted(full[row], reverse=True)[:k]
        np.testing.assert_allclose(scores[row], expected)
        np.testing.assert_allclose(full[row, positions[row]], scores[row])
        pairs = list(zip((-scores[row]).tolist(), positions[row].tolist(), strict=True))
        assert pairs == sorted(set(pairs))  # equal ones in order, none twice


def test_what_is_no_candidate_is_not_ranked_whatever_its_score():
    """Where scores are in order already, too."""
    candidates = Found(np.array([[-1, 4, 3]]), np.array([[0.9, 0.8, 0.7]], np.float32))
    assert k_best(candidates, 2).numbers.tolist() == [[4, 3]]
