"""Encoders side by side: one vector, one folder, each part with its share of every inner product."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from safetensors.numpy import save_file
from sentence_transformers import SentenceTransformer

from hce.encoding.encoder import Encoder
from hce.encoding.side_by_side import SideBySide, WordTable, hub_folder
from hce.encoding.tables import Table, WordRows, fit_words, joined_rows
from hce.errors import FormatError, HceError

TEXTS = ["w1 w2 w3", "w4 w5", "w6 w7 w8 w9", "w10", "w11 w12 w13"]


@pytest.fixture
def both(bert_folder, static_encoder, concept_corpus) -> Encoder:
    words = Encoder(fit_words(concept_corpus, dim=8), "words")
    return Encoder.load(bert_folder).beside([static_encoder, words], [0.5, 0.3, 0.2])


def test_an_inner_product_is_the_weighted_sum_of_the_parts_own(both):
    vectors = both.encode(TEXTS)
    expected = sum(
        share * part.encode(TEXTS) @ part.encode(TEXTS).T for share, part in zip(both.shares, both.parts, strict=True)
    )
    np.testing.assert_allclose(vectors @ vectors.T, expected, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert both.dim == sum(part.dim for part in both.parts)


def test_joined_by_hand_or_encoded_at_once_is_the_same(both):
    apart = joined_rows([part.encode(TEXTS) for part in both.parts], both.shares)
    np.testing.assert_allclose(apart, both.encode(TEXTS), atol=1e-6)


@pytest.mark.parametrize("kind", ["query", "document"])
def test_each_side_is_centred_by_its_own_mean(both, tmp_path, kind):
    first, *companions = both.parts
    centres = np.stack([first.encode(TEXTS, "query").mean(axis=0), first.encode(TEXTS[:2]).mean(axis=0)])
    centred = first.beside(companions, both.shares, centres)
    expected = first.encode(TEXTS, kind) - centres[0 if kind == "query" else 1]
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    found = centred.encode(TEXTS, kind)
    np.testing.assert_allclose(found[:, : first.dim], 0.5**0.5 * expected, atol=1e-5)
    apart = joined_rows(
        [part.encode(TEXTS, kind) for part in both.parts], both.shares, centres[0 if kind == "query" else 1]
    )
    np.testing.assert_allclose(found, apart, atol=1e-5)
    centred.save(tmp_path / "model")
    again = Encoder.load(tmp_path / "model")
    assert again.fingerprint == centred.fingerprint != both.fingerprint
    np.testing.assert_allclose(again.encode(TEXTS, kind), found, atol=1e-6)
    plain = SentenceTransformer(str(tmp_path / "model"), device="cpu", trust_remote_code=True)
    encode = plain.encode_query if kind == "query" else plain.encode_document
    np.testing.assert_allclose(encode(TEXTS), found, atol=1e-6)


def test_one_folder_that_sentence_transformers_loads_to_the_same_vectors(both, tmp_path):
    both.save(tmp_path / "model")
    again = Encoder.load(tmp_path / "model")
    np.testing.assert_allclose(again.encode(TEXTS), both.encode(TEXTS), atol=1e-6)
    assert again.fingerprint == both.fingerprint and again.shares == both.shares
    plain = SentenceTransformer(str(tmp_path / "model"), device="cpu", trust_remote_code=True)
    np.testing.assert_allclose(plain.encode(TEXTS), both.encode(TEXTS), atol=1e-6)
    with pytest.raises(ValueError, match="trust_remote_code"):
        SentenceTransformer(str(tmp_path / "model"), device="cpu")


def test_another_share_is_another_encoder(both):
    other = both.parts[0].beside(both.parts[1:], [0.4, 0.4, 0.2])
    assert other.fingerprint != both.fingerprint


def test_only_the_first_part_sees_a_prompt(bert_folder, static_encoder):
    encoder = Encoder.load(bert_folder, prompts={"query": "w20 w21 "}).beside([static_encoder], [0.5, 0.5])
    as_query, as_document = encoder.encode(["w1 w2"], "query")[0], encoder.encode(["w1 w2"])[0]
    first = encoder.parts[0].dim
    assert np.abs(as_query[:first] - as_document[:first]).max() > 1e-3
    np.testing.assert_allclose(as_query[first:], as_document[first:], atol=1e-6)


def test_a_table_with_companions_is_still_a_table(both, static_encoder):
    assert static_encoder.beside(both.parts[2:], [0.5, 0.5]).is_table
    assert not both.is_table and both.table is None


@pytest.mark.parametrize("shares", [[1.0], [0.5, 0.6], [1.0, 0.0], [1.2, -0.2]])
def test_shares_have_to_fit(static_encoder, shares):
    with pytest.raises(ValueError, match="shares"):
        SideBySide([static_encoder.model, static_encoder.model], shares)


def test_a_part_that_is_missing_is_one_clear_line(both, tmp_path):
    both.save(tmp_path / "model")
    (tmp_path / "model" / "0_SideBySide" / "part-1" / "tokenizer.json").unlink()
    with pytest.raises(FormatError, match="damaged"):
        Encoder.load(tmp_path / "model")


@pytest.mark.parametrize(
    "types",
    [
        ["sentence_transformers.base.modules.transformer.Transformer"],
        ["hce.encoding.word_table.WordTable", "sentence_transformers.base.modules.transformer.Transformer"],
        ["hce.encoding.word_table.WordTable", "evil.Module"],
        ["evil.Module"],
        [],
    ],
)
def test_what_is_not_all_ours_is_left_to_sentence_transformers(tmp_path, types):
    (tmp_path / "modules.json").write_text(json.dumps([{"type": each} for each in types]))
    assert hub_folder(str(tmp_path), local=True) is None


def test_no_code_in_a_folder_is_run(both, tmp_path):
    """Another model type would have sentence-transformers look for a network, with code that the folder brings."""
    both.save(tmp_path / "model")
    (tmp_path / "model" / "checksums.json").unlink(missing_ok=True)  # who brings a folder brings what fits it
    for folder in (tmp_path / "model", tmp_path / "model" / "0_SideBySide" / "part-2"):
        settings = json.loads((folder / "config_sentence_transformers.json").read_text())
        (folder / "config_sentence_transformers.json").write_text(
            json.dumps({**settings, "model_type": "CrossEncoder"})
        )
        (folder / "config.json").write_text(json.dumps({"model_type": "x", "auto_map": {"AutoConfig": "evil.Config"}}))
        (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    again = Encoder.load(tmp_path / "model")
    np.testing.assert_allclose(again.encode(TEXTS), both.encode(TEXTS), atol=1e-6)
    assert not (tmp_path / "ran").exists()


def test_a_text_that_a_companion_does_not_know_is_the_same_by_both_routes(both):
    texts = ["w1 w2", "nothing known", ""]
    apart = [part.encode(texts, zeros=number > 0) for number, part in enumerate(both.parts)]
    np.testing.assert_allclose(joined_rows(apart, both.shares), both.encode(texts), atol=1e-6)
    assert not apart[2][1].any()


def test_prompts_given_at_loading_reach_the_first_part_and_the_fingerprint(both, tmp_path):
    both.save(tmp_path / "model")
    prompted = Encoder.load(tmp_path / "model", prompts={"query": "w20 "})
    assert prompted.fingerprint != both.fingerprint
    assert prompted.parts[0].prompt("query") == "w20 " == prompted.prompt("query")


def test_what_a_model_is_loaded_with_reaches_its_parts(both, tmp_path):
    both.save(tmp_path / "model")
    options = {"device": "cpu", "trust_remote_code": True, "local_files_only": True}
    plain = SentenceTransformer(str(tmp_path / "model"), model_kwargs={"attn_implementation": "eager"}, **options)
    assert plain[0].parts[0][0].auto_model.config._attn_implementation == "eager"
    other = SentenceTransformer(str(tmp_path / "model"), model_kwargs={"attn_implementation": "sdpa"}, **options)
    assert other[0].parts[0][0].auto_model.config._attn_implementation == "sdpa"
    short = SentenceTransformer(str(tmp_path / "model"), processor_kwargs={"model_max_length": 7}, **options)
    assert short[0].parts[0][0].tokenizer.model_max_length == 7
    with pytest.raises(FormatError, match=r"^[^\n]*damaged model \([^\n]*\); train or copy it again$"):
        SentenceTransformer(str(tmp_path / "model"), model_kwargs={"no_such_option": 1}, **options)


def damaged_files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "README.md")


DAMAGES = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "noise": lambda data: b"\xff\xfe" * 50,
    "deep": lambda data: b"[" * 200_000,
    "list": lambda data: b"[]",
    "null": lambda data: b"null",
    "strings": lambda data: re.sub(rb":\s*(\[[^\]]*\]|\{\}|[-.0-9]+|true|false|null)", b': "x"', data),
    "numbers": lambda data: re.sub(rb":\s*(\"[^\"]*\"|\[[^\]]*\]|null)", b": 7", data),
    "header": lambda data: b"\xff" * 8 + data[8:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_one_line_or_does_no_harm(both, tmp_path, damage):
    """No other error than ours comes out of a folder, whichever of its files is damaged."""
    first, *companions = both.parts
    centres = np.zeros((2, first.dim), dtype=np.float32)
    first.beside(companions, both.shares, centres).save(tmp_path / "model")
    (tmp_path / "model" / "checksums.json").unlink(missing_ok=True)  # which would tell before anything is read
    files = damaged_files(tmp_path / "model")
    assert {"words.json", "model.safetensors", "tokenizer.json", "side_by_side.json", "centres.safetensors"} <= {
        path.name for path in files
    }
    refused = set()
    for path in files:
        whole = path.read_bytes()
        path.write_bytes(DAMAGES[damage](whole))
        try:
            Encoder.load(tmp_path / "model").encode(TEXTS)
        except HceError as error:
            assert len(str(error).splitlines()) == 1
            assert len(str(error)) < 1500
            refused.add(path.name)
        path.write_bytes(whole)
    if damage in ("empty", "cut", "noise", "header"):
        assert {"model.safetensors", "centres.safetensors", "words.json"} <= refused


@pytest.mark.parametrize(
    ("words", "table"),
    [
        (["a", "b"], np.zeros((3, 4))),
        (["a", 7], np.zeros((2, 4))),
        (["a", "b"], np.zeros((2, 4), dtype=np.int64)),
        (["a", "b"], np.zeros(2)),
        (["a", "b"], np.zeros((2, 0))),
    ],
)
def test_a_table_that_does_not_fit_its_words(tmp_path, words, table):
    WordTable(Table(np.ones((1, 4), np.float32), WordRows(["a"], "english"))).save(str(tmp_path))
    (tmp_path / "words.json").write_text(json.dumps({"words": words, "language": "english"}))
    save_file({"table": table}, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=r"^[^\n]*damaged model \([^\n]*\); train or copy it again$"):
        WordTable.load(str(tmp_path))


def test_a_language_that_is_none(tmp_path):
    WordTable(Table(np.ones((1, 4), np.float32), WordRows(["a"], "english"))).save(str(tmp_path))
    (tmp_path / "words.json").write_text(json.dumps({"words": ["a"], "language": "klingon"}))
    with pytest.raises(FormatError, match="klingon"):
        WordTable.load(str(tmp_path))
