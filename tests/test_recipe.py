"""The recipe: settings read from text, and the paper's own, to the letter, end to end."""

from __future__ import annotations

import copy
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from transformers.optimization import Adafactor

import hce.training.co_training
from hce.encoding.encoder import Encoder
from hce.errors import InputError
from hce.training.co_training import cluster_corpus, weights_of
from hce.training.recipe import PAPER, TRANSFORMER, Recipe, parsed_settings
from hce.training.steps import Trainer
from hce.training.train import improvement, train
from hce.tree.kmeans import spherical_kmeans


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("levels", "all", -1),
        ("levels", "2", 2),
        ("span_lengths", "8,64", (8, 64)),
        ("tree", "False", False),
        ("mask", "1", True),
        ("alpha", "0.25", 0.25),
        ("epochs", "3", 3),
        ("negatives", "near", "near"),
    ],
)
def test_settings_are_read_by_their_own_type(name, text, value):
    assert Recipe.parsed(name, text) == value
    assert getattr(Recipe(**parsed_settings([f"{name}={text}"])), name) == value


def test_every_default_is_read_back_from_what_is_shown():
    for setting in fields(Recipe):
        default, of_transformer, text = Recipe.described(setting.name)
        assert Recipe.parsed(setting.name, default) == setting.default
        assert Recipe.parsed(setting.name, of_transformer) == TRANSFORMER.get(setting.name, setting.default)
        assert text


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("xyz=1", r"unknown setting xyz; 'hce train --help-settings' lists all"),
        ("batch-sizes=1", "unknown setting batch_sizes; did you mean batch_size?"),
        ("epochs=many", r"epochs 'many': give a value such as 10"),
        ("tree=maybe", r"tree 'maybe': give a value such as true"),
        ("span_lengths=8,x", r"span_lengths '8,x': give a value such as 8,16,32"),
        ("epochs", r"--set epochs: give name=value, such as epochs=4"),
    ],
)
def test_what_cannot_be_read_is_one_line(item, message):
    with pytest.raises(InputError, match=message):
        parsed_settings([item])


def test_the_papers_recipe_is_what_the_paper_tells():
    """§4 and its footnotes, Alg. 1 to 3, App. A."""
    recipe = Recipe.paper()
    assert (recipe.temperature, recipe.level_temperature) == (0.01, 0.01)
    assert (recipe.optimizer, recipe.learning_rate, recipe.warmup) == ("adafactor", 1e-4, 0.0)
    assert recipe.centroid_learning_rate == recipe.learning_rate
    assert (recipe.batch_size, recipe.precision) == (512, "bfloat16")
    assert (recipe.span_lengths, recipe.span_unit, recipe.cut_share, recipe.window) == ((64,), "tokens", 0.0, 0)
    assert (recipe.negatives, recipe.negative_count) == ("fresh-siblings", 4)
    assert (recipe.levels, recipe.level_target, recipe.level_weight) == (-1, "node", 1.0)
    assert (recipe.mask, recipe.margin, recipe.alpha) == (False, 0.0, 0.5)
    assert (recipe.keep, recipe.hold_out, recipe.dev_pool, recipe.clustering) == ("last", False, 0, "uniform")
    assert (recipe.tree, recipe.cotrain, recipe.train) == (True, True, "encoder")


def test_each_part_of_the_papers_recipe_can_be_replaced():
    other = {"batch_size": 64, "levels": 1, "keep": "mix", "span_lengths": (16,), "mask": True}
    recipe = Recipe.paper(**other)
    assert {name: getattr(recipe, name) for name in other} == other
    assert recipe == replace(Recipe.paper(), **other)
    assert Recipe(**{**vars(Recipe.paper()), **parsed_settings(["recipe=paper", "batch_size=64"])}).batch_size == 64
    assert parsed_settings(["recipe=paper"]) == PAPER
    assert Recipe.paper(documents=40).batch_size == 10  # of few documents, a batch is a quarter


def test_the_paper_to_the_letter_with_an_encoder_of_gtrs_shape(concept_corpus, gtr_folder, monkeypatch):
    """Alg. 3 with a random T5: everything that the recipe says is what training does."""
    clusterings, trainers = [], []

    def clustering(*args, **options):
        clusterings.append({name: options[name] for name in ("mode", "init")})
        return spherical_kmeans(*args, **options)

    class Watched(Trainer):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            self.steps_seen: list[tuple[int, int]] = []
            trainers.append(self)

        def _step(self, batches):
            (each,) = batches
            assert each.batch.documents == [
                concept_corpus[position].full_text for position in each.batch.positions.tolist()
            ]  # spans stay in
            self.steps_seen.append((len(each.batch.queries), each.drawn.shape[1]))
            return super()._step(batches)

    monkeypatch.setattr("hce.tree.kmeans.spherical_kmeans", clustering)
    monkeypatch.setattr(hce.training.co_training, "Trainer", Watched)
    encoder = Encoder.load(gtr_folder, device="cpu")
    before = weights_of(encoder)
    recipe = Recipe.paper(epochs=2, batch_size=100, learning_rate=1e-2, centroid_learning_rate=1e-2, dev_queries=24)
    result = train(concept_corpus, encoder, recipe=recipe)

    (trainer,) = trainers
    assert set(trainer.steps_seen) == {(100, 4)}
    assert type(trainer.optimizer) is type(trainer.centroid_optimizer) is Adafactor
    assert not trainer.objective.mask
    settings = trainer.objective.get_config_dict()
    assert settings["temperature"] == settings["level_temperature"] == 0.01
    assert len(trainer.objective.centroids) == result.hierarchy.depth - 1
    assert trainer.weighted[0][1].lengths == (64,)
    assert len(trainer.weighted[0][1]) == len(concept_corpus)  # trained on all
    assert {(each["mode"], each["init"]) for each in clusterings} == {("exact", "random")}
    assert result.mix == 1.0  # the last weights, whatever dev says
    assert result.after == result.history[-1].dev
    assert any((weights_of(result.encoder)[name] != tensor).any() for name, tensor in before.items())
    assert "returned unchanged" not in improvement(result)
    assert result.hierarchy.levels


def test_spans_are_counted_in_the_encoders_tokens(concept_corpus, gtr_folder, static_encoder):
    for encoder in (Encoder.load(gtr_folder, device="cpu"), static_encoder):
        text = concept_corpus[0].full_text
        offsets = encoder.token_offsets(text)
        pieces = [text[first:last] for first, last in offsets]
        assert [piece.strip() for piece in pieces] == text.split()  # in the tests' vocabulary, a word is a token
        long = " ".join([text] * 40)
        assert len(encoder.token_offsets(long)) == 40 * len(offsets)  # far beyond what the encoder reads


@pytest.mark.parametrize("better", [True, False])
def test_which_weights_are_kept(concept_corpus, static_encoder, monkeypatch, better):
    """Of three epochs the second is the best on dev, or none is better than F0."""
    settings = {"train": "encoder", "epochs": 3, "batch_size": 32, "dev_queries": 24, "span_lengths": (4,)}
    kept, epochs = {}, {}  # the results, and the weights after each epoch
    for keep in ("best", "last"):
        measures = iter([0.5, 0.6, 0.8, 0.7] if better else [0.5, 0.4, 0.3, 0.2])
        measured = lambda *_, given=measures: {"labeled": np.array([next(given)])}  # noqa: E731
        monkeypatch.setattr(hce.training.co_training, "_measure", measured)
        encoder = copy.deepcopy(static_encoder)
        recipe = Recipe(**settings, fit_static=False, keep=keep, cotrain=False)
        weights = epochs[keep] = []
        kept[keep] = train(
            concept_corpus,
            encoder,
            recipe=recipe,
            on_epoch=lambda _, weights=weights, encoder=encoder: weights.append(weights_of(encoder)),
        )
    assert kept["last"].mix == 1
    assert kept["best"].mix == float(better)
    for keep, epoch in (("last", 3), ("best", 2 if better else 0)):
        for name, tensor in weights_of(kept[keep].encoder).items():
            torch.testing.assert_close(tensor, epochs[keep][epoch][name])
    assert "clearly" not in improvement(kept["best"])


def test_a_tree_from_a_uniform_start_is_another_tree(concept_corpus, static_encoder):
    vectors = static_encoder.encode(list(concept_corpus.texts()))
    trees = [
        cluster_corpus(vectors, Recipe(clustering=way), static_encoder, 0) for way in ("exact", "uniform", "uniform")
    ]
    assert (trees[0].document_parent != trees[1].document_parent).any()
    np.testing.assert_array_equal(trees[1].document_parent, trees[2].document_parent)


def test_a_batch_is_at_most_a_quarter_of_what_is_learnt_from(planted_corpus, static_encoder):
    assert Recipe.for_encoder(static=True, documents=100_000, most_documents=200).batch_size == 50
    assert Recipe.for_encoder(static=True, documents=100, most_documents=200).batch_size == 25
    assert Recipe.for_encoder(static=True, documents=100, most_documents=0).batch_size == 25
    recipe = Recipe.for_encoder(
        static=True, documents=len(planted_corpus), most_documents=40, epochs=1, train="encoder", hold_out=False
    )
    assert train(planted_corpus, static_encoder, recipe=recipe).recipe.batch_size == 10
