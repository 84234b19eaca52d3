"""Pairs: spans by hand, every document once a turn, the same for the same seed, several positives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hce.data.corpus import Corpus
from hce.data.judgments import Judgment, Qrels, Query
from hce.data.text import WORD_OR_MARK, Document, cut_span, first_words
from hce.errors import InputError
from hce.training.pairs import DropoutTwins, InverseCloze, LabeledPairs, batch_count


def corpus_of(count: int) -> Corpus:
    return Corpus.from_documents(Document(f"d{i}", " ".join(f"t{i}w{j}" for j in range(40))) for i in range(count))


# ------------------------------------------------------------------------------------------------------------- spans


@pytest.mark.parametrize(
    ("place", "inside", "outside"),
    [
        (0.0, "one two", "three, four five six."),
        (0.6, "four five", "one two three, six."),
        (0.999, "six.", "one two three, four five"),
    ],
)
def test_span_by_hand(place, inside, outside):
    # tokens: one two three , four five six . — eight of them, so 7 places for two
    assert cut_span("one two three, four five six.", 2, place) == (inside, outside)


def test_short_texts_keep_half():
    assert cut_span("one two three", 64, 0.0) == ("one", "two three")
    assert cut_span("one", 64, 0.3) == ("one", "one")
    assert cut_span("", 8, 0.3) == ("", "")


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=80), length=st.integers(1, 20), place=st.floats(0, 1, exclude_max=True))
def test_a_span_is_a_piece_of_its_text(text, length, place):
    span = cut_span(text, length, place)
    total = len(WORD_OR_MARK.findall(text))
    assert span.inside in text
    if total >= 2:
        assert len(WORD_OR_MARK.findall(span.inside)) == min(length, total // 2)
        assert len(WORD_OR_MARK.findall(span.inside)) + len(WORD_OR_MARK.findall(span.outside)) >= total
    else:
        assert span == (text, text)


def test_first_words_by_hand():
    assert first_words("one two three, four", 3) == "one two three"
    assert first_words("one two three, four", 5) == first_words("one two three, four", 9) == "one two three, four"


# --------------------------------------------------------------------------------------------------------------- ICT


def test_pairs_come_from_the_start_of_a_document():
    """Of 40 words the first 12 are read: the span, from another place in each turn, and what is left of them."""
    source = InverseCloze(corpus_of(20), lengths=(4,), cut_share=1.0, window=12)
    turns = []
    for turn in range(2):
        (batch,) = source.batches(turn, 20)
        for query, document, position in zip(batch.queries, batch.documents, batch.positions.tolist(), strict=True):
            words = [int(word.removeprefix(f"t{position}w")) for word in f"{query} {document}".split()]
            assert sorted(words) == list(range(12))
        turns.append(dict(zip(batch.positions.tolist(), batch.queries, strict=True)))
    assert turns[0] != turns[1]


@settings(max_examples=25, deadline=None)
@given(count=st.integers(2, 60), size=st.integers(2, 20), turn=st.integers(0, 3))
def test_no_document_twice_a_turn_and_every_batch_full(count, size, turn):
    source = InverseCloze(corpus_of(count), lengths=(4, 8), cut_share=0.5, seed=3)
    batches = list(source.batches(turn, size))
    assert len(batches) == batch_count(len(source), size)
    seen = np.concatenate([batch.positions for batch in batches]).tolist()
    assert len(set(seen)) == len(seen)
    assert {len(batch.queries) for batch in batches} == {min(size, count)}
    assert count - len(seen) < size  # too few for another batch


def test_what_one_turn_leaves_over_others_take():
    source = InverseCloze(corpus_of(7), lengths=(4,))
    turns = [{position for batch in source.batches(turn, 3) for position in batch.positions} for turn in range(9)]
    assert {len(turn) for turn in turns} == {6}
    assert set.union(*turns) == set(range(7))


def test_spans_belong_to_their_documents_and_are_cut_as_often_as_asked():
    corpus = corpus_of(400)
    (batch,) = InverseCloze(corpus, lengths=(4, 8), cut_share=0.9).batches(0, 400)
    cut = 0
    for query, document, position in zip(batch.queries, batch.documents, batch.positions, strict=True):
        assert query in corpus[int(position)].full_text
        assert len(WORD_OR_MARK.findall(query)) in (4, 8)
        assert document == corpus[int(position)].full_text or query not in document
        cut += query not in document
    assert 0.85 < cut / 400 < 0.95
    assert (batch.known[:, 0] == batch.positions).all()


def test_held_out_documents_are_never_drawn():
    source = InverseCloze(corpus_of(30), np.arange(10, 30), lengths=(4,))
    assert min(np.concatenate([batch.positions for batch in source.batches(0, 8)])) == 10
    assert len(source) == 20


def test_same_seed_same_pairs_another_turn_other_pairs():
    corpus = corpus_of(50)
    first = list(InverseCloze(corpus, lengths=(4, 8), seed=1).batches(0, 16))
    again = list(InverseCloze(corpus, lengths=(4, 8), seed=1).batches(0, 16))
    assert [batch.queries for batch in first] == [batch.queries for batch in again]
    other = list(InverseCloze(corpus, lengths=(4, 8), seed=1).batches(1, 16))
    assert {query for batch in first for query in batch.queries} != {
        query for batch in other for query in batch.queries
    }


def test_a_turn_can_be_taken_up_in_its_middle():
    source = InverseCloze(corpus_of(50), lengths=(4, 8))
    whole, rest = list(source.batches(2, 16)), list(source.batches(2, 16, first=1))
    assert [batch.queries for batch in rest] == [batch.queries for batch in whole[1:]]


def test_simcse_pairs_a_document_with_itself():
    corpus = corpus_of(10)
    for batch in DropoutTwins(corpus).batches(0, 5):
        assert batch.queries == batch.documents == [corpus[int(position)].full_text for position in batch.positions]


# ------------------------------------------------------------------------------------------------------------ labels


def test_labeled_pairs_with_several_positives_and_grades():
    queries = {"a": Query("a", "first"), "b": Query("b", "second")}
    judged = Qrels([Judgment("a", "d1", 2), Judgment("a", "d3", 1), Judgment("a", "d4", 0), Judgment("b", "d2", 1)])
    source = LabeledPairs(corpus_of(5), queries, judged)
    assert len(source) == 3
    (batch,) = source.batches(0, 8)
    pairs = {(query, int(position)) for query, position in zip(batch.queries, batch.positions, strict=True)}
    assert pairs == {("first", 1), ("first", 3), ("second", 2)}  # grade 0 is no pair
    known = {query: set(row.tolist()) - {-1} for query, row in zip(batch.queries, batch.known, strict=True)}
    assert known == {"first": {1, 3}, "second": {2}}


def test_unknown_ids_and_no_pairs_are_one_line():
    queries = {"a": Query("a", "first")}
    with pytest.raises(InputError, match="document 'nowhere'"):
        LabeledPairs(corpus_of(3), queries, Qrels([Judgment("a", "nowhere", 1)]))
    with pytest.raises(InputError, match="query 'z'"):
        LabeledPairs(corpus_of(3), queries, Qrels([Judgment("z", "d1", 1)]))
    with pytest.raises(InputError, match="no pair to train on"):
        LabeledPairs(corpus_of(3), queries, Qrels([Judgment("a", "d1", 0)]))
