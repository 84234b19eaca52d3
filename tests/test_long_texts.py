"""Texts of many megabytes reach a tokenizer in pieces, and nothing of what is found changes by that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

import hce.data.text
import hce.encoding.encoder
import hce.encoding.tables
from hce.data.text import Document, text_pieces
from hce.encoding.encoder import Encoder
from hce.encoding.tables import Bags, TokenMemo, token_ids, token_offsets
from hce.index.writing import Cutter

WORDS = ["the", "lift", "of", "wings", "über-große", "flows,", "(2019)", "don't", "東京都", "x" * 30]
TEXT = " ".join(WORDS[number * number % 97 % len(WORDS)] for number in range(3000))


def wordpiece() -> Tokenizer:
    vocabulary = {"[UNK]": 0, **{sign: at for at, sign in enumerate("abcdefghijklmnopqrstuvwxyz,()'-0123456789", 1)}}
    vocabulary |= {f"##{sign}": len(vocabulary) + at for at, sign in enumerate("abcdefghijklmnopqrstuvwxyz")}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    return tokenizer


@pytest.fixture
def in_pieces(monkeypatch):
    """Let a function make pieces of 300 characters of what is else read at once."""

    def set_size(size=300):
        for module in (hce.data.text, hce.encoding.tables, hce.encoding.encoder):
            monkeypatch.setattr(module, "READ_AT_ONCE", size)

    return set_size


@given(st.text(alphabet="ab \n東", max_size=60))
def test_pieces_are_all_of_a_text(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hce.data.text, "READ_AT_ONCE", 7)
        pieces = list(text_pieces(text))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 7
    assert all(pieces) or not text
    for before, after in pairwise(pieces):
        assert after[0] in " \n" or not set(" \n") & set(before[1:]), "cut within a word"


@pytest.mark.parametrize("make", [wordpiece, byte_level])
def test_tokens_and_their_places_are_the_same(make, in_pieces):
    tokenizer = make()
    memo = TokenMemo.of(tokenizer)
    at_once = token_ids(tokenizer, [TEXT, "wings"]), token_offsets(tokenizer, TEXT)
    in_pieces()
    assert token_ids(tokenizer, [TEXT, "wings"]) == at_once[0]
    assert memo is None or token_ids(tokenizer, [TEXT, "wings"], memo) == at_once[0]
    assert np.array_equal(token_offsets(tokenizer, TEXT), at_once[1])
    assert len(token_offsets(tokenizer, "")) == 0


def test_a_text_is_cut_to_the_tokenizers_length(in_pieces):
    tokenizer = wordpiece()
    tokenizer.enable_truncation(100)
    at_once = token_ids(tokenizer, [TEXT])
    in_pieces()
    assert token_ids(tokenizer, [TEXT]) == at_once
    assert len(at_once[0]) == 100


@pytest.mark.parametrize("are_weighted", [False, True])
def test_sums_of_many_rows_are_the_same_to_the_bit(monkeypatch, are_weighted):
    rng = np.random.default_rng(0)
    table = rng.normal(size=(50, 8)).astype(np.float32)
    weights = rng.random(1000).astype(np.float32) if are_weighted else None
    bags = Bags(rng.integers(0, 50, 1000), np.array([0, 7, 900, 93]), weights)
    at_once = bags.sums(table)
    monkeypatch.setattr(hce.encoding.tables, "ROWS_AT_ONCE", 13)
    assert bags.sums(table).tobytes() == at_once.tobytes()
    assert np.allclose(at_once[1], (table[bags.rows[:7]] * (1 if weights is None else weights[:7, None])).sum(0))


def test_a_transformer_reads_a_beginning_and_gives_the_same_vector(bert_folder, in_pieces):
    """It reads 48 tokens, which are far fewer than the characters that are left."""
    encoder = Encoder.load(bert_folder)
    text = " ".join(f"w{number % 50}" for number in range(5000))
    at_once = encoder.encode([text, "w1"]), list(encoder.token_ids([text]))
    in_pieces(1000)
    assert np.array_equal(encoder.encode([text, "w1"]), at_once[0])
    assert list(encoder.token_ids([text])) == at_once[1]


def test_passages_are_the_same(static_encoder, bert_folder, in_pieces):
    text = " ".join(f"w{number * 7 % 50}" for number in range(5000))
    documents = [Document("a", text), Document("b", "w1 w2")]
    for encoder in (static_encoder, Encoder.load(bert_folder)):
        at_once = Cutter(encoder).cut(documents)
        assert len(at_once[0]) > 10
        with pytest.MonkeyPatch.context() as patch:
            for module in (hce.data.text, hce.encoding.tables):
                patch.setattr(module, "READ_AT_ONCE", 300)
            assert Cutter(encoder).cut(documents) == at_once


LIMITED = """
import resource, sys
from hce.cli import main
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv.pop(1)), -1))
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
sys.argv[0] = "hce"
main()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs RLIMIT_AS")
def test_64_open_files_and_4_gb_give_an_index_or_one_line(tmp_path):
    """The tokenizer's library would abort the process."""
    corpus, out = tmp_path / "corpus.jsonl", tmp_path / "index"
    text = " ".join(f"w{number % 1000}" for number in range(300_000))
    corpus.write_text(
        "".join(json.dumps(each) + "\n" for each in ({"_id": "a", "text": text}, {"_id": "b", "text": "w1"}))
    )
    command = [sys.executable, "-c", LIMITED, str(4 << 30), "index", str(corpus), "-m", "static", "-o", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0 or "error: not enough memory" in ended.stderr.splitlines()[-1], ended.stderr
    assert "Traceback" not in ended.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"corpus.jsonl", "index"}, "something half-written is left"
