"""The memo gives what the tokenizer gives, on any text, or there is none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from hce.encoding.encoder import Encoder
from hce.encoding.static import WordMemo

PIECES = st.sampled_from(["Heat", "transfer", " ", "  ", "\n", "\t", "\x1c", "́", "中", "naïve", "[PAD]", ",", "-", " "])


@pytest.fixture(scope="module")
def static() -> Encoder:
    return Encoder.load("static")


@given(st.one_of(st.text(), st.lists(PIECES, max_size=600).map("".join)))
def test_gives_the_tokens_of_the_tokenizer(static: Encoder, text: str) -> None:
    tokenizer = static.model[0].tokenizer
    memo = WordMemo.of(tokenizer)
    assert memo is not None
    plain = tokenizer.encode(text, add_special_tokens=False).ids
    assert memo.ids(text) == plain
    assert memo.ids(text) == plain  # from memory


def test_cuts_where_the_tokenizer_cuts(static: Encoder) -> None:
    tokenizer = static.model[0].tokenizer
    memo = WordMemo.of(tokenizer)
    assert memo is not None
    for text in ("wing " * 700, "a,b;" * 700, "wing " * 400 + "a,b;" * 700):
        assert memo.ids(text) == tokenizer.encode(text, add_special_tokens=False).ids
        assert len(memo.ids(text)) == 512


def test_none_where_a_word_depends_on_its_space() -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    assert WordMemo.of(tokenizer) is None
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    assert WordMemo.of(tokenizer) is not None
    tokenizer.add_tokens(["two words"])
    assert WordMemo.of(tokenizer) is None


def test_the_same_vectors_with_and_without(static: Encoder) -> None:
    texts = ["Heat transfer in slip flow.", "", "boundary-layer\ncontrol", "x" * 300]
    plain = static.tokenize(texts, "query")
    with static.remembering_words():
        for _ in range(2):
            remembered = static.tokenize(texts, "query")
            assert all(torch.equal(plain[key], remembered[key]) for key in plain)
    assert static._words is None
