"""What is done to hits: near-equal ones are folded, a cross-encoder re-ranks them, and what is shown is marked."""

from __future__ import annotations

import numpy as np
import pytest

from hce.commands.evaluate import InMode
from hce.data.text import Document
from hce.errors import InputError
from hce.index.index import Index
from hce.index.ranking import SAME_MEANING, SAME_WORDS

MODES = ("hybrid", "dense", "words")


def words(first, count=40):
    return " ".join(f"w{number}" for number in range(first, first + count))


DOCUMENTS = [
    Document("a", words(0)),
    Document("a-again", words(0)),
    Document("a-in-capitals", words(0).upper()),
    Document("a-with-a-word-more", f"{words(0)} w150"),
    Document("b", words(10)),  # most of a's words
    Document("c", words(60), metadata={"kind": "other"}),
    *(Document(f"e{number}", words(100), metadata={"n": number}) for number in range(30)),
]


@pytest.fixture(scope="module")
def index(tmp_path_factory, module_static_encoder):
    with Index.create(tmp_path_factory.mktemp("refined") / "index", DOCUMENTS, module_static_encoder) as made:
        yield made


@pytest.mark.parametrize("mode", MODES)
def test_near_equal_documents_are_shown_once_and_named(index, mode):
    hits = index.search(words(0), 3, mode=mode, unique=True)
    assert hits[0].id == "a"
    assert set(hits[0].folded) == {"a-again", "a-in-capitals", "a-with-a-word-more"}
    assert [hit.rank for hit in hits] == list(range(1, len(hits) + 1))
    plain = index.search(words(0), 36, mode=mode)
    assert not any(hit.folded for hit in plain)
    assert {hit.id for hit in hits} | {each for hit in hits for each in hit.folded} <= {hit.id for hit in plain}


def test_k_different_ones_are_found_if_there_are_so_many(index):
    """Thirty equal ones stand before the others: the search has to look further down."""
    hits = index.search(words(100), 4, mode="dense", unique=True)
    assert hits[0].id == "e0"
    assert set(hits[0].folded) == {f"e{number}" for number in range(1, 30)}
    assert sorted(hit.id[0] for hit in hits[1:]) == ["a", "b", "c"]
    every = index.search([words(100), words(0)], 30, mode="dense", unique=True)
    assert [len(row) for row in every] == [4, 4]
    only = index.search(words(100), 4, {"n": {"lt": 3}}, unique=True)
    assert [(hit.id, hit.folded) for hit in only] == [("e0", ("e1", "e2"))]


def test_the_measure_wants_meaning_and_words(tmp_path, module_static_encoder):
    """A text that says the same in other words is another one; so is one with the same words in other numbers."""
    documents = [
        Document("many", f"{'w1 ' * 30}w2 w3 w4 w5"),
        Document("same-meaning", f"{'w1 ' * 30}w6 w7 w8 w9"),
        Document("other-meaning", f"{'w2 ' * 30}w1 w3 w4 w5"),
    ]
    with Index.create(tmp_path / "index", documents, module_static_encoder) as index:
        vectors = index.vectors()[1]
        assert vectors[0] @ vectors[1] > SAME_MEANING > vectors[0] @ vectors[2]
        assert len(index.search("w1 w2", 3, unique=True)) == 3
    shared, all_words = 40, 41
    assert shared / all_words > SAME_WORDS


class Scorer:
    """A cross-encoder that likes long texts, or what it is told."""

    name = "by length"

    def __init__(self):
        self.asked = []

    def scores(self, query, texts):
        self.asked.append((query, list(texts)))
        return np.array([float(len(text)) for text in texts], np.float32)


@pytest.fixture
def scorer(monkeypatch):
    from hce.encoding import reranker

    monkeypatch.setattr(reranker, "Reranker", Scorer)
    return Scorer()


def test_the_first_hits_are_re_ranked_and_tell_where_they_stood(index, scorer):
    plain = index.search(words(0), 6)
    hits = index.search(words(0), 2, rerank=scorer, depth=6)
    expected = sorted(plain, key=lambda hit: -len(hit.text))[:2]
    assert [(hit.id, hit.score, hit.first_rank) for hit in hits] == [
        (hit.id, float(len(hit.text)), hit.rank) for hit in expected
    ]
    assert [hit.rank for hit in hits] == [1, 2]
    assert hits[0].id != plain[0].id
    before = {hit.id: (hit.from_meaning, hit.from_words) for hit in plain}
    assert all((hit.from_meaning, hit.from_words) == before[hit.id] for hit in hits)
    ((query, texts),) = scorer.asked
    assert (query, len(texts)) == (words(0), 6)
    assert len(index.search(words(0), 9, rerank=scorer, depth=3)) == 9
    assert len(scorer.asked[-1][1]) == 9  # all that are shown
    unique = index.search(words(0), 3, rerank=scorer, unique=True)
    assert len({hit.id[0] for hit in unique}) == 3
    with pytest.raises(InputError, match="depth = 0"):
        index.search("w1", rerank=scorer, depth=0)


def test_of_a_long_document_the_passage_is_read(tmp_path, module_static_encoder, scorer):
    book = Document("book", " ".join(f"w{number % 150}." for number in range(900)), title="w7 w8")
    with Index.create(tmp_path / "index", [book], module_static_encoder) as index:
        (hit,) = index.search("w140 w141", 1, rerank=scorer)
        ((_, (text,)),) = scorer.asked
        assert hit.passage is not None
        assert text == f"w7 w8 {hit.text[hit.passage.start : hit.passage.stop]}".strip()


def test_a_measured_index_keeps_the_order_behind_what_was_re_ranked(index, scorer):
    (plain,) = InMode(index, "hybrid").search([words(0)], 10)
    (hits,) = InMode(index, "hybrid", (scorer, 3)).search([words(0)], 10)
    assert {hit.id for hit in hits[:3]} == {hit.id for hit in plain[:3]}
    assert [hit.id for hit in hits[3:]] == [hit.id for hit in plain[3:]]
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    assert len(InMode(index, "hybrid", (scorer, 5)).search([words(0)], 2)[0]) == 2


def test_a_hit_tells_what_to_show_of_it(tmp_path, module_static_encoder):
    text = f"{words(0, 100)} harbour lights {words(100, 50)}"
    with Index.create(tmp_path / "index", [Document("a", text, "The lights")], module_static_encoder) as index:
        (hit,) = index.search("the light of a harbour", 1)
    shown = hit.as_dict("the light of a harbour")
    marked = [shown["snippet"][start:stop] for start, stop in shown["snippet_marks"]]
    assert marked == ["harbour", "lights"]
    assert text[shown["snippet_start"] :].startswith(shown["snippet"])
    assert [shown["title"][start:stop] for start, stop in shown["title_marks"]] == ["lights"]
    assert hit.snippet("harbour").marks == [shown["snippet_marks"][0]]
    assert "snippet" not in hit.as_dict()
    assert "number" not in shown
