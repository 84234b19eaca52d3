"""A transformer's query side trained alone: documents keep their vectors, and each is a negative."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer

import hce.training.co_training
from hce.encoding.encoder import Encoder
from hce.errors import InputError
from hce.training.objective import HCELoss, Positions
from hce.training.recipe import LABELED, LABELS_TO_TRAIN, Recipe
from hce.training.steps import only_what_is_trained
from hce.training.train import train
from hce.tree.hierarchy import Hierarchy

SMALL = Recipe.for_encoder(
    static=False,
    labels=LABELS_TO_TRAIN,
    epochs=2,
    batch_size=16,
    learning_rate=1e-3,
    dev_queries=24,
    precision="float32",
)
ALONE = replace(SMALL, train="encoder", keep="last")


@pytest.fixture
def given(bert_folder) -> Encoder:
    return Encoder.load(bert_folder, device="cpu")


def test_documents_keep_their_vectors_and_queries_move(concept_corpus, concept_labels, given, tmp_path):
    texts = list(concept_corpus.texts())[:5]
    before = {side: given.encode(texts, side) for side in ("query", "document")}
    result = train(concept_corpus, given, pairs=concept_labels, recipe=ALONE, output=tmp_path / "model")
    assert result.recipe.mode == "supervised" and result.mix == 1
    np.testing.assert_array_equal(result.encoder.encode(texts), before["document"])
    assert np.abs(result.encoder.encode(texts, "query") - before["query"]).max() > 1e-3
    assert all(parameter.requires_grad for parameter in result.encoder.model.parameters())
    plain = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    np.testing.assert_allclose(plain.encode_query(texts), result.encoder.encode(texts, "query"), atol=1e-6)
    np.testing.assert_allclose(plain.encode_document(texts), before["document"], atol=1e-6)


def test_documents_are_encoded_once(concept_corpus, concept_labels, given, monkeypatch):
    encoded = []
    original = hce.training.co_training.encode_corpus
    monkeypatch.setattr(
        hce.training.co_training,
        "encode_corpus",
        lambda *arguments, **options: encoded.append(1) or original(*arguments, **options),
    )
    train(concept_corpus, given, pairs=concept_labels, recipe=replace(ALONE, keep="mix"))
    assert encoded == [1]


def test_what_held_out_labels_do_not_prefer_is_not_kept(concept_corpus, concept_labels, given):
    recipe = replace(ALONE, keep="mix", learning_rate=1e-12)
    result = train(concept_corpus, given, pairs=concept_labels, recipe=recipe)
    assert result.mix == 0 and result.encoder is given


def test_only_the_upper_layers_of_queries_are_trained(given):
    encoder = given.with_own_queries()
    with only_what_is_trained(encoder, ALONE):
        trained = {name for name, each in encoder.model.named_parameters() if each.requires_grad}
    assert trained and all(".query." in name and ".layer.0." not in name for name in trained)
    assert any(".layer.1." in name for name in trained) and not any("embeddings" in name for name in trained)


def test_tokens_of_both_sides_are_told(given):
    encoder, found = given.with_own_queries(), []
    assert encoder.has_states and encoder.averages_states == given.averages_states
    for side in ("query", "document"):
        encoder.encode(["w1 w2 w3"], side, on_tokens=lambda text, ids, states: found.append(len(ids)))
    assert found == [3, 3]


def test_each_document_is_a_negative_but_those_that_are_right():
    """Against the softmax written out; 1 is right for query 0 too, and so no negative of it."""
    rng = np.random.default_rng(0)
    vectors = F.normalize(torch.from_numpy(rng.normal(size=(9, 4))), dim=1)
    queries = F.normalize(torch.from_numpy(rng.normal(size=(2, 4))), dim=1)
    tree = Hierarchy((), np.zeros(9, np.int64), (), {"method": "none"})
    loss = HCELoss(torch.nn.Identity(), tree, temperature=0.5)
    positions = Positions(torch.tensor([3, 5]), torch.empty(2, 0, dtype=torch.long), torch.tensor([[3, 1], [5, -1]]))
    found = loss.summands([queries, vectors[positions.own]], positions, corpus=vectors).document_loss
    scores = queries @ vectors.T / 0.5
    scores[0, 1] = -torch.inf
    to_documents = F.cross_entropy(scores, positions.own)
    to_queries = F.cross_entropy((scores[:, positions.own]).T, torch.tensor([0, 1]))
    torch.testing.assert_close(found, to_documents + to_queries)


@pytest.mark.parametrize(
    ("labels", "settings", "expected"),
    [
        (LABELS_TO_TRAIN, {}, ("both", "query", LABELED["learning_rate"])),
        (LABELS_TO_TRAIN, {"learning_rate": 0.5}, ("both", "query", 0.5)),
        (LABELS_TO_TRAIN - 1, {}, ("auto", "both", Recipe.learning_rate)),
        (LABELS_TO_TRAIN, {"mode": "unsupervised"}, ("auto", "both", Recipe.learning_rate)),
        (LABELS_TO_TRAIN, {"train": "companion"}, ("companion", "both", Recipe.learning_rate)),
    ],
)
def test_enough_labels_train_a_transformers_queries(labels, settings, expected):
    recipe = Recipe.for_encoder(static=False, labels=labels, **settings)
    assert (recipe.train, recipe.side, recipe.learning_rate) == expected
    assert Recipe.for_encoder(static=True, labels=labels, **settings).side == "both"


def test_a_table_has_no_query_side(concept_corpus, concept_labels, static_encoder):
    recipe = Recipe.for_encoder(static=True, side="query", batch_size=16, dev_queries=24)
    with pytest.raises(InputError, match="a table encodes queries and documents alike"):
        train(concept_corpus, static_encoder, pairs=concept_labels, recipe=recipe)
