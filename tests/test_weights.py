"""How much of the trained weights is kept, and when none of them are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ttest_1samp

from hce.data.judgments import Judgment, Qrels, Query
from hce.encoding.encoder import Encoder
from hce.training.heldout import labelled_dev, pseudo_dev
from hce.training.recipe import Recipe
from hce.training.weights import CLEAR, is_clear_gain, load_best_mix, load_mix, mixes, weights_of


class Judge:
    """A dev set whose 50 queries score what it is told to find at each λ, known by the first weight's value."""

    def __init__(self, scores: dict[float, np.ndarray], is_labelled: bool) -> None:
        self.given = scores
        self.is_labelled = is_labelled

    def scores(self, encoder):
        weight = next(iter(weights_of(encoder).values())).ravel()[0]
        return {"kind": next(scores for mix, scores in self.given.items() if abs(mix - float(weight)) < 1e-6)}


def chosen(encoder, scores: dict[float, np.ndarray], is_labelled: bool, recipe: Recipe | None = None):
    first = {name: torch.zeros_like(tensor) for name, tensor in weights_of(encoder).items()}
    trained = {name: tensor + 1.0 for name, tensor in first.items()}
    mix, measured = load_best_mix(encoder, first, trained, Judge(scores, is_labelled), recipe or Recipe())
    for tensor in weights_of(encoder).values():  # what is said to be chosen is what is loaded
        torch.testing.assert_close(tensor, torch.full_like(tensor, mix))
    assert measured == {"kind": pytest.approx(scores[mix].mean())}
    return mix


def around(mean: float, spread: float) -> np.ndarray:
    return mean + spread * np.tile([-1.0, 1.0], 25)


def test_pseudo_queries_may_choose_up_to_the_limit_and_labelled_ones_all(concept_corpus):
    recipe = Recipe.for_encoder(static=False, train="encoder")
    pseudo = pseudo_dev(concept_corpus, np.arange(40), 200, seed=0)
    labelled = labelled_dev(concept_corpus, {"q": Query("q", "w1")}, Qrels([Judgment("q", "d1", 1)]), 200, seed=0)
    assert mixes(recipe, pseudo) == [0.25, 0.5]
    assert mixes(recipe, labelled) == mixes(Recipe(), pseudo) == [0.25, 0.5, 0.75, 1.0]


def test_mixing_weights_by_hand(static_encoder):
    first = weights_of(static_encoder)
    trained = {name: tensor + 2.0 for name, tensor in first.items()}
    load_mix(static_encoder, first, trained, 0.25)
    for name, tensor in weights_of(static_encoder).items():
        torch.testing.assert_close(tensor, first[name] + 0.5)


@pytest.mark.parametrize("is_labelled", [True, False])
def test_the_best_mix_is_loaded_where_it_is_clearly_better(static_encoder, is_labelled):
    scores = {
        0.0: around(0.3, 0),
        0.25: around(0.4, 0.1),
        0.5: around(0.5, 0.1),
        0.75: around(0.45, 0),
        1: around(0, 0),
    }
    assert chosen(static_encoder, scores, is_labelled) == 0.5


def test_of_a_transformer_pseudo_queries_have_to_be_clear(static_encoder, bert_folder):
    """A gain of 0.01 with differences of ±0.1 over 50 queries has a standard error of 0.0143."""
    transformer = Encoder.load(bert_folder, device="cpu")
    scores = {0.0: around(0.3, 0), **{mix: around(0.31, 0.1) for mix in (0.25, 0.5, 0.75, 1.0)}}
    assert chosen(transformer, scores, is_labelled=False) == 0
    assert chosen(transformer, scores, is_labelled=True) == 0.25
    assert chosen(static_encoder, scores, is_labelled=False) == 0.25  # of a table they are believed
    assert chosen(static_encoder, scores, is_labelled=True) == 0.25


@pytest.mark.parametrize("is_labelled", [True, False])
def test_nothing_better_is_nothing_changed(static_encoder, is_labelled):
    scores = {mix: around(0.3, 0.1) for mix in (0.0, 0.25, 0.5, 0.75, 1.0)}
    assert chosen(static_encoder, scores, is_labelled) == 0


def test_clear_gain_by_hand():
    """Differences x and y have the standard error |x − y| / 2: 0.2 is 1.8 times 0.11, and 2.2 times 0.09."""
    before = {"a": np.array([0.0, 0.0])}
    assert not is_clear_gain(before, {"a": np.array([0.09, 0.31])})
    assert is_clear_gain(before, {"a": np.array([0.11, 0.29])})
    two = {"a": np.array([0.0, 0.0]), "b": np.array([0.0, 0.0])}  # two kinds: the error of their mean is smaller
    assert is_clear_gain(two, {"a": np.array([0.09, 0.31]), "b": np.array([0.09, 0.31])})
    assert not is_clear_gain(two, {"a": np.array([0.09, 0.31]), "b": np.array([-0.09, -0.31])})
    assert not is_clear_gain(before, before)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-5, 10), min_size=3, max_size=40).filter(lambda each: len(set(each)) > 1))
def test_clear_gain_of_one_kind_is_a_paired_t_statistic(differences):
    statistic = ttest_1samp(np.array(differences) / 10, 0).statistic
    if abs(statistic - CLEAR) > 1e-6:
        before = {"a": np.full(len(differences), 0.5)}
        assert is_clear_gain(before, {"a": 0.5 + np.array(differences) / 10}) == (statistic > CLEAR)
