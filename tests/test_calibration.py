"""Calibration: shares are chosen by questions, pulled towards the usual ones, and never do harm beyond doubt."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hce.cli import app
from hce.data.corpus import Corpus
from hce.data.text import Document
from hce.encoding.encoder import Encoder
from hce.errors import FormatError
from hce.index.index import Index
from hce.search.fusion import Calibration, Shares, by_shares, fuse
from hce.training.calibration import (
    LADDERS,
    Part,
    Questions,
    _Evidence,
    calibrate,
    calibrate_unlabeled,
    cut_questions,
    encoded_parts,
    remark_of,
    usual_shares,
)
from hce.training.recipe import Recipe
from hce.training.train import train

COUNT = 60
CORPUS = Corpus.from_documents([Document(f"d{number}", f"w{number} common") for number in range(COUNT)])


def questions_about(kind, right=lambda number: number) -> Questions:
    """Question n has the word of document n alone, and is answered by document right(n)."""
    asked = range(40)
    texts = [f"w{number}" for number in asked]
    return Questions(kind, texts, [np.array([right(number)]) for number in asked], np.arange(COUNT), {})


def vectors_for(right):
    """Documents along axes of their own, and each question along the axis of one of them."""
    documents = np.eye(COUNT, dtype=np.float32)
    return [Part(documents[[right(number) for number in range(40)]], documents)]


def other(number: int) -> int:
    return (number + 7) % COUNT


@pytest.mark.parametrize("kind", ["labeled", "written", "cut"])
def test_words_count_more_where_they_answer_and_vectors_mislead(kind):
    chosen = calibrate(questions_about(kind), CORPUS, vectors_for(other), Shares(0.35), language="english").shares
    assert chosen.words >= 0.5


@pytest.mark.parametrize("kind", ["labeled", "written", "cut"])
def test_words_count_nothing_where_they_mislead(kind):
    usual = Shares(0.5)
    questions = questions_about(kind, other)
    found = calibrate(questions, CORPUS, vectors_for(other), usual, language="english")
    assert found.ndcg["vectors"] == 1 > found.ndcg["words"]
    assert found.ndcg["+ words"] == 1
    assert found.shares.words < usual.words


def test_no_evidence_leaves_the_usual_shares():
    """Vectors and words both answer, so that every share is as good as the other."""
    questions = questions_about("labeled")
    found = calibrate(questions, CORPUS, vectors_for(lambda number: number), Shares(0.35), language="english")
    assert found.shares == Shares(0.35)
    assert found.interval == pytest.approx((0, 0))


def test_titles_alone_choose_nothing_and_rule_companions_out():
    usual = Shares(0.35, 0.0, 0.3)
    found = calibrate(questions_about("titles"), CORPUS, vectors_for(lambda number: number), usual, language="english")
    assert found.shares == Shares(0.35)


def test_no_questions_leave_the_usual_shares_without_companions():
    found = calibrate(None, CORPUS, vectors_for(other), Shares(0.35, 0.4, 0.3), language="english")
    assert found == Calibration(Shares(0.35))


def test_companions_count_where_they_help():
    """The encoder is lost; its companion, which joins with a share above 0, knows each answer."""
    documents = np.eye(COUNT, COUNT + 1, dtype=np.float32)
    lost = 0.35 * np.roll(documents, 7, axis=0)[:40]
    lost[:, COUNT] = np.sqrt(1 - 0.35**2)
    parts = [Part(lost, documents), Part(documents[:40], documents)]
    questions = Questions(
        "cut", [f"nothing{n}" for n in range(40)], [np.array([n]) for n in range(40)], np.arange(COUNT), {}
    )
    found = calibrate(questions, CORPUS, parts, Shares(0.35, 0.0, 0.2), language="english")
    assert found.shares.companions >= 0.3
    assert dict(found.curves["companions"])[0.0] < found.ndcg["+ companions"]


def test_tokens_reorder_where_they_help():
    """Vectors and words rank the answer second; the tokens know it."""
    documents = np.eye(COUNT, dtype=np.float32)
    queries = documents[[other(n) for n in range(40)]] + 0.9 * documents[:40]
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    questions = Questions("cut", ["nothing"] * 40, [np.array([n]) for n in range(40)], np.arange(COUNT), {})
    tokens = SimpleNamespace(similarities=lambda place, rows: np.where(rows == place, 1.0, 0.0))
    options = {"language": "english", "tokens": tokens}
    found = calibrate(questions, CORPUS, [Part(queries, documents)], Shares(0.35, 0.1), **options)
    assert found.ndcg["+ words"] < 0.7
    assert found.ndcg["+ tokens"] == 1


def test_a_search_that_is_beaten_beyond_doubt_is_replaced(monkeypatch):
    """However strong the pull, the plain vectors win if they are right and the chosen search is wrong."""
    monkeypatch.setattr("hce.training.calibration.PULL", {"cut": 1e9})
    questions = questions_about("cut", other)
    found = calibrate(questions, CORPUS, vectors_for(other), Shares(0.8), language="english")
    assert found.shares == Shares(0.0)


@given(
    cosines=st.lists(st.floats(0, 1, width=32), min_size=1, max_size=12),
    share=st.sampled_from(LADDERS["words"]),
    seed=st.integers(0, 99),
)
def test_halves_by_another_share_are_what_fusing_by_it_gives(cosines, share, seed):
    bm25 = np.random.default_rng(seed).integers(0, 5, len(cosines)).astype(float)
    numbers = np.arange(len(cosines))
    direct = fuse(numbers, np.array(cosines, float), bm25, share)
    again = by_shares(fuse(numbers, np.array(cosines, float), bm25, 0.5), share)
    totals = [each.from_meaning + each.from_words for each in (direct, again)]
    np.testing.assert_allclose(totals[0], totals[1], atol=1e-9)


# ------------------------------------------------------------------------------------------------- questions


def documents_of(count: int, **fields) -> Corpus:
    return Corpus.from_documents(
        Document(f"d{n}", f"First sentence number{n} of it. Then more words word{n} follow.", f"Title {n}")
        for n in range(count)
    )


def test_titles_and_first_sentences_are_cut_out_of_what_is_searched():
    corpus = documents_of(80)
    questions = cut_questions(corpus, 0)
    assert questions.kind == "cut"
    assert len(questions.texts) == 2 * len(questions.changed) == 40
    for text, answer in zip(questions.texts, questions.answers, strict=True):
        (row,) = answer.tolist()
        assert text in corpus[int(questions.pool[row])].full_text
        assert text not in questions.pool_texts(corpus)[row]


def test_a_title_of_several_documents_is_no_question():
    corpus = Corpus.from_documents(
        Document(f"d{n}", f"First sentence number{n} of it. And the rest{n}.", "Same") for n in range(80)
    )
    assert "Same" not in cut_questions(corpus, 0).texts


def test_what_programmers_wrote_comes_before_other_kinds():
    corpus = Corpus.from_documents(
        Document(f"d{n}", f'def f{n}(x):\n    """Do the thing number{n} to x. Slowly."""\n    return x + {n}')
        for n in range(80)
    )
    questions = cut_questions(corpus, 0)
    assert questions.kind == "written"
    assert all(text.startswith("Do the thing") for text in questions.texts)
    assert all("Do the thing" not in text for text in questions.changed.values())


@pytest.mark.parametrize(
    "text", ["# Adds one and returns it.\nx = x + 1 ; y = x", "// Adds one to it.\nx += 1 ; y = x ;\n"]
)
def test_comments_are_remarks(text):
    assert remark_of(Document("a", text)).questions[0].startswith("Adds one")


def test_documents_too_short_to_cut_give_titles_or_nothing():
    short = [Document(f"d{n}", f"short text{n}", f"title {n}") for n in range(80)]
    assert cut_questions(Corpus.from_documents(short), 0).kind == "titles"
    untitled = [Document(each.id, each.text) for each in short]
    assert cut_questions(Corpus.from_documents(untitled), 0) is None


def test_of_a_long_text_without_sentences_the_first_words_are_cut():
    texts = (" ".join(f"w{n}_{place}" for place in range(30)) for n in range(80))
    questions = cut_questions(Corpus.from_documents(Document(f"d{n}", text) for n, text in enumerate(texts)), 0)
    assert questions.kind == "cut"
    assert {len(text.split()) for text in questions.texts} == {10}


def test_only_documents_that_were_held_out_are_asked_about():
    corpus = documents_of(200)
    among = np.arange(50, 90)
    questions = cut_questions(corpus, 0, among)
    assert {int(questions.pool[int(answer[0])]) for answer in questions.answers} <= set(among.tolist())


def test_parts_join_as_an_encoder_with_companions_does(static_encoder):
    corpus = documents_of(80)
    questions = cut_questions(corpus, 0)
    vectors = static_encoder.encode(list(corpus.texts()))
    parts = encoded_parts(questions, corpus, [static_encoder, static_encoder], vectors[questions.pool])
    queries, pool = _Evidence(questions, [], parts, "english", None, None)._joined(0.3)
    together = static_encoder.beside([static_encoder], [0.7, 0.3])
    np.testing.assert_allclose(queries, together.encode(questions.texts, "query"), atol=1e-6)
    np.testing.assert_allclose(pool, together.encode(questions.pool_texts(corpus)), atol=1e-6)


# ------------------------------------------------------------------------------------------------- models, indexes


def test_usual_shares_by_kind_of_encoder(static_encoder, bert_folder):
    assert usual_shares(static_encoder) == Shares(0.5)
    assert usual_shares(static_encoder, companions=True).companions == 0.2
    assert usual_shares(Encoder.load(bert_folder)).tokens == 0.4


def test_an_index_calibrates_an_untrained_encoder_and_shows_it(concept_corpus, static_encoder, tmp_path):
    index = Index.create(tmp_path / "index", concept_corpus, static_encoder)
    kept = Calibration.read(index.state.manifest.shares)
    assert kept.shares.words == index.state.manifest.words_share
    expected = calibrate_unlabeled(
        concept_corpus, static_encoder, static_encoder.encode(list(concept_corpus.texts())), "english"
    )
    assert kept.as_dict() == json.loads(json.dumps(expected.as_dict())) or kept.shares == expected.shares
    shown = CliRunner().invoke(app, ["status", str(index.path), "--no-drift"]).output
    ndcg = dict(index.status().curves["words"])
    assert f"nDCG@10 {ndcg[0.0]:.3f} at 0, {ndcg[0.1]:.3f} at 0.1" in shown


def test_an_index_of_the_trained_corpus_takes_the_models_shares(concept_corpus, static_encoder, tmp_path):
    recipe = Recipe.for_encoder(static=True, epochs=1, batch_size=32, span_lengths=(4,), fit_static=False)
    result = train(concept_corpus, static_encoder, recipe=recipe, output=tmp_path / "model")
    index = Index.create(tmp_path / "index", concept_corpus, tmp_path / "model")
    assert index.state.manifest.words_share == result.calibration.shares.words


@pytest.mark.parametrize("shares", [{"words": 2.0}, {"word": 0.5}, {"words": 0.5, "tokens": -1.0}])
def test_a_damaged_calibration_is_refused(shares):
    with pytest.raises(FormatError, match="calibration"):
        Calibration.read({"shares": shares})
