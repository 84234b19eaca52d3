"""Negatives: under the right nodes, wrong, never held out, the same for the same seed, and encoded or looked up."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch

from hce.training.negatives import (
    NEGATIVES,
    FreshSiblingNegatives,
    MinedNegatives,
    NearNegatives,
    Negatives,
    SiblingNegatives,
    way_of_choosing,
)
from hce.training.pairs import Batch
from hce.training.recipe import Recipe, Sampling

NOBODY = np.empty(0, dtype=np.int64)
RECIPE = Recipe(negative_count=2, seed=3)


def batch_of(corpus, positions, known=None) -> Batch:
    positions = np.array(positions)
    texts = [corpus[position].full_text for position in positions.tolist()]
    return Batch(texts, texts, positions, positions[:, None] if known is None else np.array(known))


def test_every_setting_has_a_way():
    assert {*NEGATIVES, "auto"} == set(get_args(Sampling))


@pytest.mark.parametrize(
    ("labeled", "settings", "way"),
    [
        (True, {}, NearNegatives),
        (False, {}, SiblingNegatives),
        (True, {"tree": False}, SiblingNegatives),  # of which there are none without a tree
        (True, {"negatives": "siblings"}, SiblingNegatives),
        (False, {"negatives": "mined"}, MinedNegatives),
    ],
)
def test_labeled_queries_have_near_negatives_by_themselves(labeled, settings, way):
    assert way_of_choosing(replace(RECIPE, **settings), has_supervised_pairs=labeled) is way


def test_none_are_none(planted_corpus, planted_tree, planted_vectors):
    ways = (
        Negatives(planted_corpus, planted_tree, planted_vectors, NOBODY, 1, RECIPE),
        SiblingNegatives(planted_corpus, planted_tree, planted_vectors, NOBODY, 1, replace(RECIPE, tree=False)),
        FreshSiblingNegatives(planted_corpus, planted_tree, planted_vectors, NOBODY, 1, replace(RECIPE, tree=False)),
        FreshSiblingNegatives(
            planted_corpus, planted_tree, planted_vectors, NOBODY, 1, replace(RECIPE, negative_count=0)
        ),
    )
    batch = batch_of(planted_corpus, [5, 77])
    for negatives in ways:
        drawn = negatives.draw(batch, [0])
        assert negatives.texts(drawn) == []
        chosen = negatives.choose(batch, drawn, torch.zeros(2, 32), torch.zeros(0, 32))
        assert chosen.positions.shape == (2, 0)
        assert chosen.vectors.shape == (2, 0, 32)


def test_siblings_are_from_under_each_prefix(planted_corpus, planted_tree, planted_vectors):
    assert planted_tree.depth == 3
    batch = batch_of(planted_corpus, range(0, 240, 5))
    negatives = SiblingNegatives(planted_corpus, planted_tree, planted_vectors, NOBODY, 1, RECIPE)
    drawn = negatives.draw(batch, [1, 2])
    assert drawn.shape == (48, 4)
    np.testing.assert_array_equal(drawn, negatives.draw(batch, [1, 2]))
    assert (drawn != negatives.draw(batch, [1, 3])).any()
    own, found = planted_tree.paths[batch.positions], planted_tree.paths[drawn]
    assert (found[:, :2, 0] == own[:, None, 0]).all()  # level 2: under the same node of level 1
    assert (found[:, 2:, 1] == own[:, None, 1]).all()  # level 3: under the same node of level 2
    assert (drawn != batch.positions[:, None]).any(axis=0).all()
    chosen = negatives.choose(batch, drawn, torch.zeros(48, 32), torch.zeros(0, 32))
    np.testing.assert_array_equal(chosen.vectors.numpy(), planted_vectors[drawn])
    assert negatives.texts(drawn) == []


def test_fresh_siblings_are_the_same_draws_encoded(planted_corpus, planted_tree, planted_vectors):
    batch = batch_of(planted_corpus, [3, 60, 200])
    looked_up, fresh = (
        way(planted_corpus, planted_tree, planted_vectors, NOBODY, 2, RECIPE)
        for way in (SiblingNegatives, FreshSiblingNegatives)
    )
    drawn = fresh.draw(batch, [0])
    np.testing.assert_array_equal(drawn, looked_up.draw(batch, [0]))
    assert fresh.texts(drawn) == [planted_corpus[position].full_text for position in drawn.ravel().tolist()]
    encoded = torch.arange(drawn.size * 32.0).reshape(-1, 32).requires_grad_()
    chosen = fresh.choose(batch, drawn, torch.zeros(3, 32), encoded)
    assert chosen.vectors.requires_grad
    torch.testing.assert_close(chosen.vectors[1, 0], encoded[2])


def test_mined_ones_are_the_nearest_wrong_ones(planted_corpus, planted_tree, planted_vectors):
    """Two for each of two document losses, of the 20 nearest that are not known to be right."""
    negatives = MinedNegatives(planted_corpus, planted_tree, planted_vectors, NOBODY, 1, RECIPE)
    positions = [7, 100]
    ranked = np.argsort(-(planted_vectors[positions] @ planted_vectors.T), axis=1, kind="stable")
    known = [[7, ranked[0, 1]], [100, -1]]
    batch = batch_of(planted_corpus, positions, known)
    drawn = negatives.draw(batch, [0])
    assert drawn.shape == (2, 22)  # and two that may be right
    chosen = negatives.choose(batch, drawn, torch.from_numpy(planted_vectors[positions]), torch.zeros(0, 32))
    assert chosen.positions.shape == (2, 4)
    for row in range(2):
        wrong = [each for each in ranked[row].tolist() if each not in known[row]][:20]
        assert set(chosen.positions[row].tolist()) <= set(wrong)
        assert len(set(chosen.positions[row].tolist())) == 4
    np.testing.assert_array_equal(chosen.vectors.numpy(), planted_vectors[chosen.positions])


def test_near_ones_are_found_through_the_tree(planted_corpus, planted_tree, planted_vectors):
    """The nearest wrong ones under the leaves that a walk ends at; with a beam as wide as the tree, ANCE's own."""
    positions = list(range(0, 240, 7))
    batch, queries = batch_of(planted_corpus, positions), torch.from_numpy(planted_vectors[positions])
    near, mined = (
        way(planted_corpus, planted_tree, planted_vectors, NOBODY, 2, RECIPE) for way in (NearNegatives, MinedNegatives)
    )
    found = near.nearest_documents(planted_vectors[positions], 10)
    leaves = planted_tree.walk(planted_vectors[positions], NearNegatives.beam)[-1]
    for row, position in enumerate(positions):
        under = np.flatnonzero(np.isin(planted_tree.document_parent, leaves[row]))
        best = under[np.argsort(-(planted_vectors[under] @ planted_vectors[position]), kind="stable")][:10]
        np.testing.assert_array_equal(found[row, : len(best)], best)
        assert (found[row, len(best) :] == -1).all()
    chosen = near.choose(batch, near.draw(batch, [0]), queries, torch.zeros(0, 32))
    assert chosen.positions.shape == (len(positions), 2)
    assert (chosen.positions != np.array(positions)[:, None]).all()
    assert np.isin(planted_tree.document_parent[chosen.positions], leaves).all()
    wide = Wide(*vars(near).values())
    np.testing.assert_array_equal(
        wide.nearest_documents(planted_vectors[positions], 20), mined.nearest_documents(planted_vectors[positions], 20)
    )


class Wide(NearNegatives):
    beam = 240


@pytest.mark.parametrize("way", [NearNegatives, MinedNegatives])
def test_what_is_chosen_for_a_part_of_a_batch_is_what_is_chosen_for_the_whole(
    planted_corpus, planted_tree, planted_vectors, way
):
    """As of several processes, each of which has a part."""
    positions = list(range(0, 240, 6))
    batch, queries = batch_of(planted_corpus, positions), torch.from_numpy(planted_vectors[positions])
    negatives = way(planted_corpus, planted_tree, planted_vectors, np.array([3, 4]), 1, RECIPE)
    drawn = negatives.draw(batch, [0])
    whole = negatives.choose(batch, drawn, queries, torch.zeros(0, 32)).positions
    for part in (slice(0, 20), slice(20, 40)):
        chosen = negatives.choose(batch.rows(part), drawn[part], queries[part], torch.zeros(0, 32)).positions
        np.testing.assert_array_equal(chosen, whole[part])
    assert len(np.unique(np.argsort(drawn, axis=1), axis=0)) == 40  # another choice for each query


@pytest.mark.parametrize("way", [SiblingNegatives, FreshSiblingNegatives, NearNegatives, MinedNegatives])
def test_held_out_documents_are_no_negatives(planted_corpus, planted_tree, planted_vectors, way):
    held_out = np.arange(0, 240, 2)
    batch = batch_of(planted_corpus, range(1, 240, 2))
    negatives = way(planted_corpus, planted_tree, planted_vectors, held_out, 2, RECIPE)
    drawn = negatives.draw(batch, [0, 0])
    encoded = torch.zeros(drawn.size, 32)
    chosen = negatives.choose(batch, drawn, torch.from_numpy(planted_vectors[batch.positions]), encoded)
    assert chosen.positions.shape == (120, 2)
    assert not np.isin(chosen.positions, held_out).any()
    assert (chosen.positions != batch.positions[:, None]).any()


def test_where_nothing_is_left_the_document_itself_stands_for_none(planted_corpus, planted_tree, planted_vectors):
    everyone_else = np.setdiff1d(np.arange(240), [9])
    batch = batch_of(planted_corpus, [9])
    for way in (SiblingNegatives, NearNegatives, MinedNegatives):
        negatives = way(planted_corpus, planted_tree, planted_vectors, everyone_else, 2, RECIPE)
        chosen = negatives.choose(
            batch, negatives.draw(batch, [0]), torch.from_numpy(planted_vectors[[9]]), torch.zeros(0, 32)
        )
        assert chosen.positions.tolist() == [[9, 9]]
