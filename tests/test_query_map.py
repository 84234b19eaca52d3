"""A map of queries learned from labels: what it does to vectors, what it learns, and when it is not kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import labels_of_concepts
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer

import hce.training.query_map
from hce.encoding.encoder import Encoder
from hce.encoding.tables import mapped_rows
from hce.training.pairs import LabeledPairs, labeled_devset
from hce.training.query_map import Examples, examples_of, fit_query_map, least_of_the_best, with_query_map
from hce.training.recipe import Recipe
from hce.training.train import train

TEXTS = ["w1 w2 w3", "w50 w9", "w4"]


@pytest.fixture
def moved(bert_folder) -> Encoder:
    encoder = Encoder.load(bert_folder, device="cpu")
    rng = np.random.default_rng(3)
    return encoder.with_query_map(rng.normal(size=(encoder.dim, encoder.dim + 1)).astype(np.float32) * 0.1)


def test_queries_are_moved_and_documents_are_not(moved):
    (first,) = moved.parts
    np.testing.assert_allclose(moved.encode(TEXTS), first.encode(TEXTS), atol=1e-6)
    expected = mapped_rows(first.encode(TEXTS, "query"), moved.query_map)
    np.testing.assert_allclose(moved.encode(TEXTS, "query"), expected, atol=1e-6)
    assert np.abs(expected - first.encode(TEXTS, "query")).max() > 0.01
    assert moved.fingerprint != first.fingerprint


@pytest.mark.parametrize("beside", [False, True])
def test_a_saved_encoder_moves_queries_alike(moved, static_encoder, tmp_path, beside):
    """Also in sentence-transformers, and next to a companion, where the map stays the first part's."""
    centers = np.zeros((2, moved.dim))
    encoder = moved.beside([static_encoder], [0.7, 0.3], centers) if beside else moved
    assert len(encoder.parts) == 1 + beside and encoder.parts[0].query_map is None
    encoder.save(tmp_path / "model")
    loaded = Encoder.load(tmp_path / "model", device="cpu")
    plain = SentenceTransformer(str(tmp_path / "model"), device="cpu", trust_remote_code=True)
    for side, encode in (("query", plain.encode_query), ("document", plain.encode_document)):
        wanted = encoder.encode(TEXTS, side)
        np.testing.assert_allclose(loaded.encode(TEXTS, side), wanted, atol=1e-6)
        np.testing.assert_allclose(encode(TEXTS), wanted, atol=1e-5)
    assert loaded.fingerprint == encoder.fingerprint


def test_tokens_of_moved_queries_are_those_of_the_transformer(moved):
    states = {}
    for encoder in (moved, moved.parts[0]):
        encoder.encode(TEXTS, "query", on_tokens=lambda text, ids, found: states.setdefault(text, []).append(found))
    assert all(torch.equal(*pair) for pair in states.values())


def test_a_map_turns_queries_to_what_answers_them(monkeypatch):
    """Queries are documents turned by a rotation, which 200 pairs teach for 50 others."""
    monkeypatch.setattr(hce.training.query_map, "RATE", 0.1)
    monkeypatch.setattr(hce.training.query_map, "SHRINKAGE", 0.0)
    monkeypatch.setattr(hce.training.query_map, "EPOCHS", 100)
    rng = np.random.default_rng(0)
    documents = rng.normal(size=(250, 8)).astype(np.float32)
    documents /= np.linalg.norm(documents, axis=1, keepdims=True)
    queries = documents @ np.linalg.qr(rng.normal(size=(8, 8)))[0].astype(np.float32)
    answers = torch.arange(200)
    examples = Examples(torch.from_numpy(queries[:200]), answers, answers[:, None], torch.from_numpy(documents))
    found = (mapped_rows(queries[200:], fit_query_map(examples, 0)) @ documents.T).argmax(axis=1)
    before = (queries[200:] @ documents.T).argmax(axis=1)
    wanted = np.arange(200, 250)
    assert (found == wanted).mean() > (before == wanted).mean() + 0.2


def test_other_right_documents_are_no_negatives():
    """The same query has two right documents: pushed from neither, it ends between them."""
    pool = torch.eye(4)
    queries = torch.nn.functional.normalize(torch.tensor([[0.5, 0.5, 0.1, 0.7]] * 2), dim=1)
    examples = Examples(queries, torch.tensor([0, 1]), torch.tensor([[0, 1], [1, 0]]), pool)
    scores = mapped_rows(queries[:1].numpy(), fit_query_map(examples, 0))[0]
    assert scores[0] == pytest.approx(scores[1], abs=0.01)


def test_examples_name_each_querys_documents(concept_corpus, static_encoder, monkeypatch):
    monkeypatch.setattr(hce.training.query_map, "POOL", 80)
    pairs = LabeledPairs(concept_corpus, *labels_of_concepts(60))
    vectors = static_encoder.encode(list(concept_corpus.texts()))
    found = examples_of(static_encoder, vectors, pairs, seed=1)
    assert len(found.queries) == 60 and len(found.pool) == 80
    for text, positions in zip(pairs.texts, pairs.positives, strict=True):
        row = int(np.abs(found.queries.numpy() - static_encoder.encode([text], "query")).sum(axis=1).argmin())
        np.testing.assert_array_equal(found.pool[found.answers[row]].numpy(), vectors[positions[0]])


@given(st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=5, max_size=5))
def test_the_least_strength_is_level_with_the_best(rows):
    ndcg = dict(zip((0.0, 0.25, 0.5, 0.75, 1.0), map(np.array, rows), strict=True))
    chosen, best = least_of_the_best(ndcg), max(ndcg, key=lambda strength: ndcg[strength].mean())
    assert chosen <= best
    behind = ndcg[best] - ndcg[chosen]
    assert behind.mean() <= behind.std() / 2 + 1e-9  # of four queries


def test_few_labels_move_nothing(concept_corpus, static_encoder):
    labels = labels_of_concepts(60)
    vectors = static_encoder.encode(list(concept_corpus.texts()))
    devset = labeled_devset(concept_corpus, *labels, 0, 0)
    pairs = LabeledPairs(concept_corpus, *labels)
    assert with_query_map(static_encoder, vectors, pairs, devset, 0) is static_encoder


def test_labels_move_the_queries_of_a_transformer(
    concept_corpus, concept_labels, bert_folder, static_encoder, tmp_path, monkeypatch
):
    monkeypatch.setattr("hce.encoding.encoder.load_table_of", lambda model, fingerprint: static_encoder.table)
    monkeypatch.setattr(hce.training.query_map, "LEAST_LABELS", 20)
    monkeypatch.setattr(hce.training.query_map, "least_of_the_best", max)
    recipe = Recipe.for_encoder(static=False, epochs=1, batch_size=32, dev_queries=20, span_lengths=(4,))
    result = train(concept_corpus, bert_folder, pairs=concept_labels, recipe=recipe, output=tmp_path / "model")
    assert result.encoder.query_map is not None and "labels" in result.stages
    loaded = Encoder.load(tmp_path / "model")
    np.testing.assert_allclose(loaded.encode(TEXTS, "query"), result.encoder.encode(TEXTS, "query"), atol=1e-6)
    monkeypatch.setattr(hce.training.query_map, "LEAST_LABELS", 1000)
    unmoved = train(concept_corpus, bert_folder, pairs=concept_labels, recipe=recipe)
    assert unmoved.encoder.query_map is None and unmoved.before == result.before
