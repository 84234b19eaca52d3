"""Hybrid search: words and meaning in one ranking, against an independent fusion of full scores."""

from __future__ import annotations

import shutil
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hce import Document, Encoder, Index
from hce.errors import InputError
from hce.search.engine import nearest
from hce.search.fusion import fuse, search_both
from hce.search.words import Words


@pytest.fixture(scope="module")
def encoder(module_static_encoder) -> Encoder:
    return module_static_encoder


@pytest.fixture
def index(tmp_path, planted_corpus, encoder):
    with Index.create(tmp_path / "index", planted_corpus, encoder) as made:
        yield made


def test_fusion_by_hand():
    fused = fuse(
        np.array([7, 8, 9, 4]), np.array([0.9, 0.5, 0.1, 0.1]), np.array([0.0, 4.0, 2.0, 2.0]), words_share=0.4
    )
    assert fused.numbers.tolist() == [8, 7, 4, 9]  # 0.3 + 0.4, 0.6 + 0, and 0 + 0.2 twice: the lower number first
    np.testing.assert_allclose(fused.from_meaning + fused.from_words, [0.7, 0.6, 0.2, 0.2])


@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(0, 30)), max_size=20), st.floats(0, 1))
def test_fusion_keeps_its_promises(scores, share):
    cosines, bm25 = (np.array(column, float) for column in zip(*scores, strict=True)) if scores else (np.empty(0),) * 2
    fused = fuse(np.arange(len(scores)), cosines, bm25, share)
    total = fused.from_meaning + fused.from_words
    assert sorted(fused.numbers.tolist()) == list(range(len(scores)))
    assert (np.diff(total) <= 2e-6).all()
    assert ((total >= -1e-9) & (total <= 1 + 1e-9)).all()


def expected(index: Index, encoder: Encoder, query: str, k: int, allowed=None) -> list[str]:
    """The fusion of both scores of every document, worked out from the outside."""
    documents = [document for document in index if allowed is None or allowed(document)]
    cosine = encoder.encode([document.full_text for document in documents]) @ encoder.encode([query], "query")[0]
    words = Words.new()
    words.add(enumerate((document.full_text for document in index), start=1))
    place = {document.id: number for number, document in enumerate(index, start=1)}
    found = words.among(query, np.array([place[document.id] for document in documents]))
    score_of = dict(zip(found.numbers.tolist(), found.scores.tolist(), strict=True))
    bm25 = np.array([score_of.get(place[document.id], 0.0) for document in documents])
    share = index.state.manifest.words_share
    score = (1 - share) * (cosine - cosine.min()) / (cosine.max() - cosine.min()) + share * bm25 / bm25.max()
    return [documents[row].id for row in np.lexsort((np.arange(len(score)), -score.round(6)))[:k]]


def test_a_hybrid_search_is_the_fusion_of_both(index, encoder, monkeypatch):
    monkeypatch.setattr("hce.search.fusion.CANDIDATE_COUNT", 300)
    for query in ("star red w3", "w100 moon", "blue w7 w8 w9"):
        hits = index.search(query, 150)  # every document is a candidate
        assert [hit.id for hit in hits[:10]] == expected(index, encoder, query, 10)


def test_whoever_asks_for_more_gets_the_same_first(index, monkeypatch):
    monkeypatch.setattr("hce.search.fusion.CANDIDATE_COUNT", 20)
    for query in ("star red w3", "w100 moon", "blue w7 w8 w9"):
        first = index.search(query, 10)
        for k in (11, 60, 240):
            hits = index.search(query, k)
            assert [(hit.id, hit.score) for hit in hits[:10]] == [(hit.id, hit.score) for hit in first]
            assert all(one.score >= other.score - 2e-6 for one, other in pairwise(hits))
            assert min(min(hit.from_meaning, hit.from_words) for hit in hits) >= 0


def test_hybrid_is_the_default_and_explains_itself(index):
    assert index.search("star red w3", 5) == index.search("star red w3", 5, mode="hybrid")
    for hit in index.search("star red w3", 5):
        assert hit.score == pytest.approx(hit.from_meaning + hit.from_words)
        assert set(hit.matched) <= {"star", "red", "w3"}
        assert bool(hit.matched) == bool(hit.from_words)
    assert index.state.manifest.words_share == 0.5  # the encoder is static


def test_words_that_stand_in_every_text_are_no_evidence(tmp_path, module_static_encoder):
    documents = [Document("a", "the star from the sky"), Document("b", "the hat from the shop")]
    with Index.create(tmp_path / "english", documents, module_static_encoder) as index:
        assert {hit.id: hit.matched for hit in index.search("the star from", 2)} == {"a": ("star",), "b": ()}
        assert index.search("from the", 1)[0].matched == ("from", "the")
    with Index.create(tmp_path / "none", documents, module_static_encoder, language="none") as index:
        assert index.search("the star", 1)[0].matched == ("the", "star")


def test_words_alone_and_meaning_alone(index):
    by_words = index.search("w3", 300, mode="words")
    assert by_words
    assert all("w3" in hit.text.split() for hit in by_words)
    assert index.search("nothing like that", mode="words") == []
    dense = index.search("w3", 5, mode="dense")
    assert all(hit.score == hit.from_meaning and not hit.matched for hit in dense)
    with pytest.raises(InputError, match="mode 'magic': choose one of hybrid, dense, words"):
        index.search("w3", mode="magic")


def test_documents_come_and_go_in_both_rankings(index, encoder):
    index.add([Document("new", "zebra crossing w3")])
    assert index.search("zebra", 1)[0].id == index.search("zebra", 1, mode="words")[0].id == "new"
    with Index.open(index.path, encoder) as other:
        assert other.search("zebra", 1)[0].id == "new"
        index.update([Document("new", "giraffe w3")])
        assert [hit.id for hit in other.search("giraffe", 5, mode="words")] == ["new"]
        assert other.search("zebra", 5, mode="words") == []
        index.remove(["new"])
        assert other.search("giraffe", 5, mode="words") == []


def test_filters_hold_for_both(index, encoder):
    index.add([Document(f"x{i}", f"star red w{i}", metadata={"n": i}) for i in range(20)])
    hits = index.search("star red w3", 50, {"n": {"gte": 10}})
    assert sorted(hit.metadata["n"] for hit in hits) == list(range(10, 20))
    assert [hit.metadata["n"] for hit in index.search("star", 50, {"n": 4}, "words")] == [4]


def test_missing_words_are_made_anew(index, encoder):
    before = index.search("star red w3", 5)
    shutil.rmtree(index.path / "words")
    with Index.open(index.path, encoder) as opened:
        assert [hit.id for hit in opened.search("star red w3", 5)] == [hit.id for hit in before]
        opened.rebuild()
    assert (index.path / "words").is_dir()


def test_a_share_out_of_range_and_an_unknown_language_are_refused(tmp_path, encoder):
    for options, message in (({"words_share": 1.5}, "words_share 1.5: give"), ({"language": "klingon"}, "klingon")):
        with pytest.raises(InputError, match=message):
            Index.create(tmp_path / "index", [Document("a", "b")], encoder, **options)
        assert not (tmp_path / "index").exists()


@pytest.mark.parametrize("words_share", [0.0, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("k", [1, 3, 10])
def test_the_best_are_the_same_where_only_those_in_question_are_scored(k, words_share):
    """Candidates of meaning that cannot be among the k best are not looked for in words, and nothing else changes."""
    rng = np.random.default_rng(k)
    texts = [" ".join(f"w{w}" for w in rng.zipf(1.3, 12) % 60) for _ in range(400)]
    vectors = rng.normal(size=(400, 6)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    words, looked_for = Words.new("none"), []
    words.add(enumerate(texts))
    among = words.among
    words.among = lambda text, numbers: looked_for.append(len(numbers)) or among(text, numbers)
    for query in range(25):
        found = nearest(vectors[query : query + 1], vectors, 40)
        options = {"numbers": found[0][0], "cosines": found[1][0], "candidate_count": 40, "words_share": words_share}
        options["cosines_at"] = lambda others, query=query: vectors[others] @ vectors[query]
        everything = search_both(words, f"w1 w2 w3 {texts[-query]}", **options)
        some = search_both(words, f"w1 w2 w3 {texts[-query]}", **options, k=k)
        for column, expected in zip(some, everything.best(k), strict=True):
            np.testing.assert_array_equal(column, expected)
    assert 0 < sum(looked_for) < 2 * 25 * 40  # and of fewer than all
