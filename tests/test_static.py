"""A token table fitted to a corpus: the counts, the weights by hand, the vectors; and words tokenised once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
import torch
from conftest import WORDS, word_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from small_static import small_static
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from hce.data.corpus import Corpus
from hce.data.judgments import Dataset
from hce.data.text import inverse_document_frequency
from hce.demo import python_docstrings
from hce.encoding.encoder import Encoder
from hce.encoding.tables import (
    PRIOR_DOCUMENTS,
    TokenMemo,
    document_frequencies,
    expected_frequencies,
    fit_table,
)

PIECES = st.sampled_from(["Heat", "transfer", " ", "  ", "\n", "\t", "\x1c", "́", "中", "naïve", "[PAD]", ",", "-", " "])


@pytest.fixture(scope="module")
def static() -> Encoder:
    return Encoder.load("static")


def test_document_frequencies_count_texts_and_not_occurrences():
    counts, total = document_frequencies(word_tokenizer(), ["star star cell", "star", ""], len(WORDS))
    assert total == 3
    assert counts[WORDS.index("star")] == 2
    assert counts[WORDS.index("cell")] == 1
    assert counts.sum() == 3


def test_idf_by_hand():
    # N = 3: df 0 → log(1 + 3.5/0.5) = log 8; df 3 → log(1 + 0.5/3.5) = log(8/7)
    idf = inverse_document_frequency(np.array([0.0, 3.0]), 3)
    np.testing.assert_allclose(idf, [np.log(8), np.log(8 / 7)])
    assert idf.min() > 0


def test_expected_frequencies_by_hand():
    # lengths 1 and 3, mean 2: e to the power of −6.5/2 and of −6.5·3/2; a token without a row is expected everywhere
    np.testing.assert_allclose(expected_frequencies(np.array([[1.0, 0], [0, 3]])), np.exp([-3.25, -9.75]))
    np.testing.assert_allclose(expected_frequencies(np.zeros((2, 4))), [1, 1])


def test_rows_get_their_idf_as_length():
    """Counts are those of the corpus and, as of PRIOR_DOCUMENTS more texts, those that the table makes expect."""
    rng = np.random.default_rng(0)
    table = rng.normal(size=(300, 8)) * rng.uniform(0.1, 9, size=(300, 1))
    counts = rng.integers(1, 50, size=300).astype(float)
    fitted = fit_table(table, counts, 100)
    together = counts + PRIOR_DOCUMENTS * expected_frequencies(table)
    idf = inverse_document_frequency(together, 100 + PRIOR_DOCUMENTS)
    np.testing.assert_allclose(np.linalg.norm(fitted, axis=1), idf, rtol=1e-5)
    assert fitted.dtype == np.float32


def test_lengths_of_the_given_rows_hardly_matter_beside_many_documents():
    rng = np.random.default_rng(0)
    table, counts = rng.normal(size=(60, 5)), np.arange(1, 61) * 10_000.0
    scaled = table * rng.uniform(0.1, 9, size=(60, 1))
    np.testing.assert_allclose(fit_table(table, counts, 10**6), fit_table(scaled, counts, 10**6), atol=0.02)
    few = counts / 10_000
    assert np.abs(fit_table(table, few, 100) - fit_table(scaled, few, 100)).max() > 0.2


def test_of_no_document_at_all_lengths_stay_in_order():
    rng = np.random.default_rng(0)
    table = rng.normal(size=(60, 5)) * np.arange(1, 61)[:, None]
    given, fitted = np.linalg.norm(table, axis=1), np.linalg.norm(fit_table(table, np.zeros(60), 0), axis=1)
    assert np.isfinite(fitted).all()
    assert np.array_equal(np.argsort(given), np.argsort(fitted))


@pytest.fixture(scope="module")
def docstrings() -> Dataset:
    return python_docstrings()


@pytest.fixture(scope="module")
def reading_again() -> Iterator[Encoder]:
    encoder = Encoder.load("static")
    with encoder.remembering_tokens():
        yield encoder


@pytest.fixture(scope="module")
def found_unfitted(reading_again: Encoder, docstrings: Dataset) -> float:
    return share_found(reading_again, docstrings)


@pytest.mark.parametrize("documents", [1, 2, 5, 10, 30, 100, 300, 1000, 3000])
def test_an_index_that_starts_small_is_no_worse_for_it(documents, reading_again, docstrings, found_unfitted):
    """Fitted to the first documents, which come from the same few modules, and searched among all of them."""
    first = Corpus.from_documents(islice(docstrings.corpus, documents))
    found = share_found(reading_again.fitted_to(first), docstrings)
    assert found > found_unfitted - 0.01
    if documents >= 1000:
        assert found > found_unfitted + 0.05


def share_found(encoder: Encoder, dataset: Dataset) -> float:
    """The share of some 500 queries whose document is among the first ten."""
    queries = list(dataset.queries.values())[:: max(1, len(dataset.queries) // 500)]
    vectors = encoder.encode(list(dataset.corpus.texts()))
    places = {document.id: place for place, document in enumerate(dataset.corpus)}
    right = [places[dataset.qrels.positives(query.id)[0]] for query in queries]
    scores = encoder.encode([query.text for query in queries], "query") @ vectors.T
    own = scores[np.arange(len(queries)), right]
    return float(((scores > own[:, None]).sum(axis=1) < 10).mean())


def test_a_common_direction_is_taken_out():
    """Rows that nearly agree (cosine about 0.97) point everywhere after fitting."""
    rng = np.random.default_rng(3)
    table = rng.normal(size=(500, 6)) * 0.2 + np.array([3, 0, 0, 0, 0, 0])
    fitted = fit_table(table, np.full(500, 5.0), 1000)
    directions = fitted / np.linalg.norm(fitted, axis=1, keepdims=True)
    cosines = directions @ directions.T
    assert abs(cosines.mean()) < 0.02
    variances = np.linalg.eigvalsh(np.cov(directions.T))
    assert variances.max() / variances.min() < 2  # before: one axis holds nearly all


def test_an_axis_without_variance_stays_silent():
    table = np.random.default_rng(4).normal(size=(50, 4))
    table[:, 2] = 0
    fitted = fit_table(table, np.full(50, 3.0), 10)
    assert np.isfinite(fitted).all()
    assert np.linalg.matrix_rank(fitted) == 3


def test_fitting_moves_planted_kinds_apart(static_encoder, planted_corpus):
    """A direction that all tokens share hides what sets the kinds apart; fitting takes it away."""
    with torch.no_grad():
        static_encoder.model[0].embedding.weight[:, 0] += 4
    kinds = np.array([document.title for document in planted_corpus])
    same = kinds[:, None] == kinds

    def gap(encoder) -> float:
        vectors = encoder.encode([document.text for document in planted_corpus])
        cosines = vectors @ vectors.T
        return float(cosines[same].mean() - cosines[~same].mean())

    assert gap(static_encoder.fitted_to(planted_corpus)) > 2 * gap(static_encoder) > 0


def test_only_the_table_as_it_was_distilled_is_fitted_unasked(planted_corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("HCE_CACHE", str(tmp_path))
    small_static(tmp_path, planted_corpus.texts())
    distilled = Encoder.load("static", device="cpu")
    fitted = Encoder.for_corpus("static", planted_corpus)
    assert fitted.fingerprint == distilled.fitted_to(planted_corpus).fingerprint != distilled.fingerprint
    assert fitted.name == "static, fitted"
    distilled.save(tmp_path / "trained")  # any table in a folder may have been trained
    assert Encoder.for_corpus(tmp_path / "trained", planted_corpus).fingerprint == distilled.fingerprint


# ------------------------------------------------------------------------------------------------- words


@given(st.one_of(st.text(), st.lists(PIECES, max_size=600).map("".join)))
def test_gives_the_tokens_of_the_tokenizer(static: Encoder, text: str) -> None:
    tokenizer = static.model[0].tokenizer
    memo = TokenMemo.of(tokenizer)
    assert memo is not None
    plain = tokenizer.encode(text, add_special_tokens=False).ids
    assert memo.ids(text) == plain
    assert memo.ids(text) == plain  # from memory


def test_cuts_where_the_tokenizer_cuts(static: Encoder) -> None:
    tokenizer = static.model[0].tokenizer
    memo = TokenMemo.of(tokenizer)
    assert memo is not None
    for text in ("wing " * 700, "a,b;" * 700, "wing " * 400 + "a,b;" * 700):
        assert memo.ids(text) == tokenizer.encode(text, add_special_tokens=False).ids
        assert len(memo.ids(text)) == 512


def test_long_words_are_not_remembered(static: Encoder) -> None:
    """What strangers write has no spaces, where they wish so."""
    memo = TokenMemo.of(static.model[0].tokenizer)
    assert memo is not None
    memo.ids("heat " + "x" * 100 + " " + "y" * 101)
    assert sorted(map(len, memo)) == [4, 100]


def test_none_where_a_word_depends_on_its_space() -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    assert TokenMemo.of(tokenizer) is None
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    assert TokenMemo.of(tokenizer) is not None
    tokenizer.add_tokens(["two words"])
    assert TokenMemo.of(tokenizer) is None


def test_the_same_vectors_with_and_without(static: Encoder) -> None:
    texts = ["Heat transfer in slip flow.", "", "boundary-layer\ncontrol", "x" * 300]
    plain = static.tokenize(texts, "query")
    with static.remembering_tokens():
        for _ in range(2):
            remembered = static.tokenize(texts, "query")
            assert all(torch.equal(plain[key], remembered[key]) for key in plain)
    assert static._token_memo is None
