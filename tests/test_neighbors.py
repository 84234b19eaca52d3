"""Neighbours found through the tree, what BM25 says of them, and the loss that has a table rank them alike."""

from __future__ import annotations

import copy
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_losses import unit

from hce.data.corpus import Corpus
from hce.data.text import Document
from hce.training.co_training import cluster_corpus
from hce.training.losses import TeacherScores, hce_loss
from hce.training.negatives import BEAM, BM25_B, BM25_K1, TEMPERATURE, WordTeacher, neighbors_of, teacher_scores_of
from hce.training.pairs import Batch, InverseCloze, LabeledPairs, Sources
from hce.training.recipe import Recipe
from hce.training.steps import Counters, Trainer

NOBODY = np.empty(0, dtype=np.int64)
WORDS = ["xq", "zk", "mj", "vp", "hw"]  # their own stems


def test_neighbours_are_the_nearest_under_the_leaves_that_a_walk_comes_to(planted_tree, planted_vectors):
    held_out = np.arange(0, 240, 9)
    found = neighbors_of(planted_tree, planted_vectors, 5, held_out)
    assert found.shape == (240, 5)
    leaves = planted_tree.walk(planted_vectors, BEAM)[-1]
    for position in range(0, 240, 7):
        under = np.flatnonzero(np.isin(planted_tree.document_parent, leaves[position]))
        nearest = under[np.argsort(-(planted_vectors[under] @ planted_vectors[position]), kind="stable")][:6]
        wanted = [each for each in nearest.tolist() if each != position and each not in held_out][:5]
        assert found[position].tolist() == wanted + [-1] * (5 - len(wanted))


def corpus_of(texts: list[str]) -> Corpus:
    return Corpus.from_documents([Document(f"d{i}", text) for i, text in enumerate(texts)])


def bm25(texts: list[str], query: str, document: str) -> float:
    """Lucene's formula, word by word; each word of the query counts once."""
    bags = [text.split() for text in texts]
    mean = sum(map(len, bags)) / len(bags)
    words, score = document.split(), 0.0
    for word in set(query.split()):
        frequency = sum(word in other for other in bags)
        idf = math.log(1 + (len(bags) - frequency + 0.5) / (frequency + 0.5))
        count = Counter(words)[word]
        score += idf * count / (count + BM25_K1 * (1 - BM25_B + BM25_B * len(words) / mean))
    return score


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(WORDS), min_size=2, max_size=9), min_size=2, max_size=7),
    st.data(),
)
def test_the_teachers_scores_are_bm25s_without_what_was_cut_out(documents, data):
    texts = [" ".join(words) for words in documents]
    corpus = corpus_of(texts)
    queries, left, positions, cut = [], [], [], []
    for position, words in enumerate(documents):
        start = data.draw(st.integers(0, len(words) - 1))
        end = data.draw(st.integers(start + 1, len(words)))
        is_cut = data.draw(st.booleans())
        queries.append(" ".join(words[start:end]))
        left.append(" ".join(words[:start] + words[end:]) if is_cut else texts[position])
        positions.append(position)
        cut.append(is_cut)
    batch = Batch(queries, left, np.array(positions), np.array(positions)[:, None], np.array(cut))
    candidates = np.array([[(position + 1) % len(texts), 0] for position in positions])
    found = WordTeacher(corpus, "english").scores(batch, candidates)
    for row, query in enumerate(queries):
        others = [bm25(texts, query, texts[candidate]) for candidate in candidates[row]]
        np.testing.assert_allclose(found[row], [bm25(texts, query, left[row]), *others], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("cut_share", [0.0, 1.0])
def test_of_a_document_that_is_read_in_part_only_a_query_that_was_cut_out_is_taken_off(cut_share):
    texts = ["xq zk mj vp hw qd", "zk zk vp vp mj mj", "xq hw"]
    source = InverseCloze(corpus_of(texts), lengths=(2,), cut_share=cut_share, window=4)
    batch = next(source.batches(0, 3))
    found = WordTeacher(source.corpus, "english").scores(batch, np.empty((3, 0), dtype=np.int64))
    for position, query, score in zip(batch.positions.tolist(), batch.queries, found[:, 0], strict=True):
        assert query in texts[position]
        left = texts[position].replace(query, "", 1) if cut_share else texts[position]
        assert score == pytest.approx(bm25(texts, query, left), rel=1e-4)
    assert batch.cut.tolist() == [bool(cut_share)] * 3 and batch.rows(slice(1, 3)).cut.tolist() == [bool(cut_share)] * 2


def test_words_that_no_document_has_teach_nothing():
    corpus = corpus_of(["xq zk", "mj vp"])
    batch = Batch(["unknown words", "?"], ["xq zk", "mj vp"], np.array([0, 1]), np.array([[0], [1]]))
    teacher = WordTeacher(corpus, "english")
    assert teacher.scores(batch, np.array([[1], [0]])).tolist() == [[0, 0], [0, 0]]
    lesson = teacher_scores_of(teacher, batch, np.array([[1], [-1]]), np.eye(2, dtype=np.float32), torch.device("cpu"))
    assert torch.isfinite(lesson.scores).all()
    assert lesson.forbidden.tolist() == [[False], [True]]


def test_a_lesson_by_hand():
    """Of "xq zk" cut out of "xq zk mj", nothing is left there; its neighbour has one of the two words."""
    texts = ["xq zk mj", "xq vp hw", "mj vp hw"]
    batch = Batch(["xq zk"], ["mj"], np.array([0]), np.array([[0]]), np.array([True]))
    vectors = np.eye(3, dtype=np.float32)
    lesson = teacher_scores_of(
        WordTeacher(corpus_of(texts), "english"), batch, np.array([[1, 2]] * 3), vectors, torch.device("cpu")
    )
    assert lesson.scores.tolist() == [[0.0, pytest.approx(1 / TEMPERATURE), 0.0]]
    np.testing.assert_array_equal(lesson.vectors.numpy(), vectors[[[1, 2]]])


def test_the_loss_is_torchs_divergence_from_the_teacher():
    queries, documents, neighbours = unit(3, 4), unit(3, 4, seed=1), unit(3, 2, 4, seed=2)
    scores = 5 * torch.rand(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    forbidden = torch.tensor([[False, False], [False, True], [True, True]])
    lesson = TeacherScores(neighbours, scores, forbidden)
    terms = hce_loss(queries, documents, [], temperature=0.1, teacher=lesson)
    plain = hce_loss(queries, documents, [], temperature=0.1)
    losses = []
    for row in range(3):
        kept = [0, *(1 + column for column in range(2) if not forbidden[row, column])]
        candidates = torch.cat([documents[row][None], neighbours[row]])[kept]
        given = (candidates @ queries[row] / 0.1).log_softmax(0)
        losses.append(F.kl_div(given, scores[row, kept].log_softmax(0), reduction="sum", log_target=True))
    torch.testing.assert_close(terms.neighbor_loss, torch.stack(losses).mean())
    torch.testing.assert_close(terms.total, plain.total + terms.neighbor_loss)
    assert plain.neighbor_loss is None


def test_pseudo_queries_are_taught_and_labeled_ones_are_not(concept_corpus, static_encoder, concept_labels):
    vectors = static_encoder.encode(list(concept_corpus.texts()))
    spans, labeled = InverseCloze(concept_corpus, lengths=(4,)), LabeledPairs(concept_corpus, *concept_labels)
    recipe = Recipe(batch_size=32, span_lengths=(4,), learning_rate=0.05)
    for sources, changes, expected in (
        (Sources(labeled, spans), {}, [False, True]),
        (Sources(None, spans), {}, [True]),
        (Sources(labeled), {}, [False]),
        (Sources(None, spans), {"neighbours": 0}, [False]),
        (Sources(None, spans), {"tree": False}, [False]),
    ):
        trainer = Trainer(concept_corpus, copy.deepcopy(static_encoder), sources, replace(recipe, **changes))
        trainer.use_tree(cluster_corpus(vectors, trainer.recipe, static_encoder, 0), vectors)
        batches = [
            trainer._source_batch(weight, source, next(source.batches(0, 32)), [0])
            for weight, source in trainer.weighted
        ]
        assert [each.teacher is not None for each in batches] == expected
        losses, _ = next(trainer.steps(Counters()))
        assert ("neighbours" in losses) == any(expected)
        assert np.isfinite(losses["total"])
