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
from hce.training.co_training import CLEAR, Mix, is_clear_gain, load_best_mix, load_mix, mixes, weights_of
from hce.training.pairs import labeled_devset, pseudo_devset
from hce.training.recipe import Recipe


class Judge:
    """A dev set whose 50 queries score what it is told to find at each λ, known by the first weight's value."""

    def __init__(self, scores: dict[float, np.ndarray], is_labeled: bool) -> None:
        self.given = scores
        self.is_labeled = is_labeled

    def ndcg(self, encoder):
        weight = next(iter(weights_of(encoder).values())).ravel()[0]
        return {"kind": next(scores for mix, scores in self.given.items() if abs(mix - float(weight)) < 1e-6)}


def choice(encoder, scores: dict[float, np.ndarray], is_labeled: bool, trained: tuple[float, ...] = (1.0,)) -> Mix:
    """Choose between the weights 0 and some trained ones, all of them of one value, by the scores of each value."""
    first = {name: torch.zeros_like(tensor) for name, tensor in weights_of(encoder).items()}
    # Of epochs 9, 8, …: the most trusted comes first, whatever its number.
    filled = {
        9 - which: {name: tensor + value for name, tensor in first.items()} for which, value in enumerate(trained)
    }
    found = load_best_mix(encoder, first, filled, Judge(scores, is_labeled), Recipe())
    value = found.share * trained[9 - found.epoch]
    for tensor in weights_of(encoder).values():  # what is said to be chosen is what is loaded
        torch.testing.assert_close(tensor, torch.full_like(tensor, value))
    assert value in scores
    return found


def chosen(encoder, scores: dict[float, np.ndarray], is_labeled: bool) -> float:
    return choice(encoder, scores, is_labeled).share


def around(mean: float, spread: float) -> np.ndarray:
    return mean + spread * np.tile([-1.0, 1.0], 25)


def test_pseudo_queries_may_choose_up_to_the_limit_and_labeled_ones_all(concept_corpus):
    recipe = Recipe.for_encoder(static=False, train="encoder")
    pseudo = pseudo_devset(concept_corpus, np.arange(40), 200, seed=0)
    labeled = labeled_devset(concept_corpus, {"q": Query("q", "w1")}, Qrels([Judgment("q", "d1", 1)]), 200, seed=0)
    assert mixes(recipe, pseudo) == [0.25, 0.5]
    assert mixes(recipe, labeled) == mixes(Recipe(), pseudo) == [0.25, 0.5, 0.75, 1.0]


def test_mixing_weights_by_hand(static_encoder):
    first = weights_of(static_encoder)
    trained = {name: tensor + 2.0 for name, tensor in first.items()}
    load_mix(static_encoder, first, trained, 0.25)
    for name, tensor in weights_of(static_encoder).items():
        torch.testing.assert_close(tensor, first[name] + 0.5)


@pytest.mark.parametrize("is_labeled", [True, False])
def test_the_best_mix_is_loaded_where_it_is_clearly_better(static_encoder, is_labeled):
    scores = {
        0.0: around(0.3, 0),
        0.25: around(0.4, 0.1),
        0.5: around(0.5, 0.1),
        0.75: around(0.45, 0),
        1: around(0, 0),
    }
    assert chosen(static_encoder, scores, is_labeled) == 0.5


def test_of_a_transformer_pseudo_queries_have_to_be_clear(static_encoder, bert_folder):
    """A gain of 0.01 with differences of ±0.1 over 50 queries has a standard error of 0.0143."""
    transformer = Encoder.load(bert_folder, device="cpu")
    scores = {0.0: around(0.3, 0), **{mix: around(0.31, 0.1) for mix in (0.25, 0.5, 0.75, 1.0)}}
    assert chosen(transformer, scores, is_labeled=False) == 0
    assert chosen(static_encoder, scores, is_labeled=False) == 0.25  # of a table they are believed


def test_labeled_queries_have_to_be_clear_to_keep_less_than_all(static_encoder):
    """Beside 0.5, λ = 1 loses 0.02 or 0.03, with a standard error over 50 queries of 0.0143: chance, or not."""
    scores = {0.0: around(0.2, 0), 0.25: around(0.3, 0), 0.5: around(0.5, 0), 0.75: around(0.4, 0)}
    assert chosen(static_encoder, {**scores, 1.0: around(0.48, 0.1)}, is_labeled=True) == 1.0
    assert chosen(static_encoder, {**scores, 1.0: around(0.47, 0.1)}, is_labeled=True) == 0.5
    assert chosen(static_encoder, {**scores, 1.0: around(0.48, 0.1)}, is_labeled=False) == 0.5


def test_the_last_weights_are_kept_unless_labeled_queries_clearly_prefer_the_best_epochs(static_encoder):
    """The last weights are 1 and the best epoch's 10; both are measured at each λ."""
    last = {
        0.0: around(0.2, 0),
        0.25: around(0.3, 0),
        0.5: around(0.3, 0),
        0.75: around(0.3, 0),
        1.0: around(0.48, 0.1),
    }
    best = {2.5: around(0.3, 0), 5.0: around(0.3, 0), 7.5: around(0.3, 0), 10.0: around(0.5, 0)}
    assert choice(static_encoder, last | best, True, (1.0, 10.0)) == (1.0, 9)
    assert choice(static_encoder, last | best | {1.0: around(0.47, 0.1)}, True, (1.0, 10.0)) == (1.0, 8)


def test_what_is_not_above_the_start_is_not_kept_for_want_of_certainty(static_encoder):
    """λ = 1 is within what may be chance of λ = 0.5, and below what there was before."""
    scores = {
        0.0: around(0.3, 0),
        0.25: around(0, 0),
        0.5: around(0.31, 0.1),
        0.75: around(0, 0),
        1.0: around(0.29, 0.1),
    }
    assert chosen(static_encoder, scores, is_labeled=True) == 0.5


@pytest.mark.parametrize("is_labeled", [True, False])
def test_nothing_better_is_nothing_changed(static_encoder, is_labeled):
    scores = {mix: around(0.3, 0.1) for mix in (0.0, 0.25, 0.5, 0.75, 1.0)}
    assert chosen(static_encoder, scores, is_labeled) == 0


def test_clear_gain_by_hand():
    """Differences x and y have the standard error |x − y| / 2: 0.2 is 1.8 times 0.11, and 2.2 times 0.09."""
    before = {"a": np.array([0.0, 0.0])}
    assert not is_clear_gain(before, {"a": np.array([0.09, 0.31])})
    assert is_clear_gain(before, {"a": np.array([0.11, 0.29])})
    two = {"a": np.array([0.0, 0.0]), "b": np.array([0.0, 0.0])}  # two kinds: the error of their mean is smaller
    assert is_clear_gain(two, {"a": np.array([0.09, 0.31]), "b": np.array([0.09, 0.31])})
    assert not is_clear_gain(two, {"a": np.array([0.09, 0.31]), "b": np.array([-0.09, -0.31])})
    assert not is_clear_gain(before, before)
    assert not is_clear_gain({"a": np.array([0.0])}, {"a": np.array([0.9])})  # of a single query nothing is known


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-5, 10), min_size=3, max_size=40).filter(lambda each: len(set(each)) > 1))
def test_clear_gain_of_one_kind_is_a_paired_t_statistic(differences):
    statistic = ttest_1samp(np.array(differences) / 10, 0).statistic
    if abs(statistic - CLEAR) > 1e-6:
        before = {"a": np.full(len(differences), 0.5)}
        assert is_clear_gain(before, {"a": 0.5 + np.array(differences) / 10}) == (statistic > CLEAR)
