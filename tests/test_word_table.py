"""The table of a corpus's own words: latent semantic analysis, on numbers worked out apart from it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hce.data.corpus import Corpus
from hce.data.text import Document
from hce.encoding.encoder import Encoder
from hce.encoding.tables import Table, fit_words
from hce.errors import InputError

TEXTS = [
    "the cat sat on the mat",
    "a cat and a dog",
    "dogs bark at cats",
    "stocks fell on monday",
    "stocks and bonds fell",
    "bonds rose on monday monday monday",
]


def corpus_of(texts: list[str]) -> Corpus:
    return Corpus.from_documents(Document(f"d{number}", text) for number, text in enumerate(texts))


def encoder_of(table: Table) -> Encoder:
    return Encoder(table, "words")


def test_a_document_is_its_row_of_u_times_s():
    """Independently: tf-idf by loops, NumPy's full SVD, and the documents' scores along the first axes."""
    words = {"cat": 3, "dog": 2, "on": 3, "and": 2, "stock": 2, "fell": 2, "monday": 2, "bond": 2, "a": 1}
    words = {word: count for word, count in words.items() if count >= 2}
    counts = [
        {"cat": 1, "on": 1},
        {"cat": 1, "and": 1, "dog": 1},
        {"dog": 1, "cat": 1},
        {"stock": 1, "fell": 1, "on": 1, "monday": 1},
        {"stock": 1, "and": 1, "bond": 1, "fell": 1},
        {"bond": 1, "on": 1, "monday": 3},
    ]
    matrix = np.zeros((6, len(words)))
    for row, bag in enumerate(counts):
        for column, (word, frequency) in enumerate(words.items()):
            if word in bag:
                matrix[row, column] = (1 + np.log(bag[word])) * np.log(1 + (6 - frequency + 0.5) / (frequency + 0.5))
    matrix /= np.linalg.norm(matrix, axis=1, keepdims=True)
    left, values, _ = np.linalg.svd(matrix)
    expected = left[:, :3] * values[:3]
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    table = fit_words(corpus_of(TEXTS), dim=3)
    assert set(table.splitter.terms) == set(words)
    found = encoder_of(table).encode(TEXTS)
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, atol=1e-5)


def test_words_that_go_together_are_near_without_being_shared():
    found = encoder_of(fit_words(corpus_of(TEXTS), dim=2)).encode(["cat", "dog", "bonds"])
    assert found[0] @ found[1] > 0.9 > 0.5 > found[0] @ found[2]


def test_an_unknown_word_changes_nothing_and_a_text_of_them_has_the_fixed_direction():
    encoder = encoder_of(fit_words(corpus_of(TEXTS), dim=3))
    known, with_unknown, unknown = encoder.encode(["cat dog", "cat zebra dog", "zebra"])
    np.testing.assert_allclose(known, with_unknown, atol=1e-6)
    np.testing.assert_allclose(unknown, 1 / np.sqrt(3), atol=1e-6)


def test_documents_that_are_left_out_are_not_learnt_from():
    table = fit_words(corpus_of(TEXTS), without=np.array([0, 1, 2]))
    assert "cat" not in table.splitter.terms and "bond" in table.splitter.terms


def test_nothing_in_common_is_one_clear_line():
    with pytest.raises(InputError, match="no two documents share enough words"):
        fit_words(corpus_of(["one two", "three four"]))


def test_saved_and_loaded_it_gives_the_same_vectors_and_fingerprint(tmp_path):
    encoder = encoder_of(fit_words(corpus_of(TEXTS), language="none", dim=3))
    encoder.save(tmp_path / "words")
    again = Encoder.load(tmp_path / "words")
    np.testing.assert_array_equal(again.encode(TEXTS), encoder.encode(TEXTS))
    assert again.fingerprint == encoder.fingerprint


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text("ab c", max_size=12), min_size=1, max_size=6))
def test_rows_do_not_depend_on_what_else_is_encoded(texts):
    encoder = encoder_of(fit_words(corpus_of(["a b", "b c", "c a", "ab ba", "ab b"]), language="none", dim=3))
    together = encoder.encode(texts)
    for text, row in zip(texts, together, strict=True):
        np.testing.assert_allclose(encoder.encode([text])[0], row, atol=1e-6)
