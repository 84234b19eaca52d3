"""Encoders: same vectors as sentence-transformers, stable identity, resumable files, bad input in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import real_dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize

import hce.encoding.bundled
import hce.encoding.encoder
from hce.data.corpus import Corpus
from hce.encoding.encoder import Encoder, fast_dtype
from hce.errors import FormatError, InputError
from hce.training.recipe import Recipe
from hce.training.train import train

TEXTS = ["star red w1", "cell", "w5 w6 w7 " * 30, "law law blue w9", "ship green w100 w101", "star"]


def sentence_transformers_vectors(folder: Path, texts: list[str], side: str) -> np.ndarray:
    """The independent route: the library's own encode, normalised."""
    model = SentenceTransformer(str(folder), device="cpu")
    encode = model.encode_query if side == "query" else model.encode_document
    return encode(texts, normalize_embeddings=True)


@pytest.mark.parametrize("side", ["query", "document"])
@pytest.mark.parametrize("folder", ["bert_folder", "gtr_folder"])
def test_vectors_are_those_of_sentence_transformers(folder, side, request):
    path = request.getfixturevalue(folder)
    expected = sentence_transformers_vectors(path, TEXTS, side)
    vectors = Encoder.load(path, device="cpu").encode(TEXTS, side)
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


def test_prompts_make_the_two_sides_differ(gtr_folder):
    encoder = Encoder.load(gtr_folder, device="cpu")
    assert encoder.prompt("query") == "query : "
    assert encoder.prompt("document") == "passage : "
    assert np.abs(encoder.encode(["star"], "query") - encoder.encode(["star"], "document")).max() > 1e-3


def test_prompts_can_be_given_and_are_saved(bert_folder, tmp_path):
    encoder = Encoder.load(bert_folder, device="cpu", prompts={"query": "query : "})
    np.testing.assert_allclose(encoder.encode(["star"], "query"), encoder.encode(["query : star"]), atol=1e-6)
    encoder.save(tmp_path / "saved")
    again = Encoder.load(tmp_path / "saved", device="cpu")
    assert again.prompt("query") == "query : "
    assert again.fingerprint == encoder.fingerprint


def test_passage_is_another_name_for_document(bert_folder):
    encoder = Encoder.load(bert_folder, device="cpu")
    encoder.model.prompts = {"passage": "passage : "}
    assert encoder.prompt("document") == "passage : "
    assert encoder.prompt("query") is None


@pytest.mark.parametrize("folder", ["bert_folder", "gtr_folder"])
def test_saved_directory_loads_in_sentence_transformers(folder, request, tmp_path):
    encoder = Encoder.load(request.getfixturevalue(folder), device="cpu")
    encoder.save(tmp_path / "saved")
    for side in ("query", "document"):
        model = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
        encode = model.encode_query if side == "query" else model.encode_document
        np.testing.assert_allclose(encode(TEXTS), encoder.encode(TEXTS, side), atol=1e-6)  # Normalize was saved too
    again = Encoder.load(tmp_path / "saved", device="cpu")
    assert again.fingerprint == encoder.fingerprint
    assert again.model.max_seq_length == 48


def test_long_texts_are_cut_at_the_models_own_limit(bert_folder):
    encoder = Encoder.load(bert_folder, device="cpu")
    words = [f"w{i % 50}" for i in range(100)]
    whole, cut, shorter = encoder.encode([" ".join(words), " ".join(words[:46]), " ".join(words[:45])])
    np.testing.assert_allclose(whole, cut, atol=1e-6)  # 48 tokens less [CLS] and [SEP]
    assert np.abs(whole - shorter).max() > 1e-4


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations(range(len(TEXTS))), budget=st.integers(1, 200))
def test_rows_follow_the_texts_whatever_the_batches(order, budget, static_encoder, monkeypatch):
    monkeypatch.setattr(hce.encoding.encoder, "STATIC_TOKENS", budget)
    expected = static_encoder.encode(TEXTS)[list(order)]
    np.testing.assert_allclose(static_encoder.encode([TEXTS[i] for i in order]), expected, atol=1e-6)


def test_transformer_rows_do_not_depend_on_batching(bert_folder, monkeypatch):
    encoder = Encoder.load(bert_folder, device="cpu")
    monkeypatch.setattr(hce.encoding.encoder, "SORTED_AT_ONCE", 4)
    expected = np.concatenate([encoder.encode([text]) for text in TEXTS])
    np.testing.assert_allclose(encoder.encode(TEXTS), expected, atol=1e-6)


def test_static_vectors_are_the_normalised_mean_of_rows(static_encoder):
    table = static_encoder.model[0].embedding.weight.detach().numpy()
    ids = static_encoder.model[0].tokenizer.encode("star red w1", add_special_tokens=False).ids
    mean = table[ids].mean(axis=0)
    np.testing.assert_allclose(static_encoder.encode(["star red w1"])[0], mean / np.linalg.norm(mean), atol=1e-6)


def test_static_tokens_are_those_of_sentence_transformers(static_encoder):
    ours = static_encoder.tokenize([*TEXTS, ""], "document")
    theirs = static_encoder.model.preprocess([*TEXTS, ""])
    assert ours["input_ids"].tolist() == theirs["input_ids"].tolist()
    assert ours["offsets"].tolist() == theirs["offsets"].tolist()


def test_empty_text_has_a_fixed_direction(static_encoder, bert_folder):
    vectors = static_encoder.encode(["", "star", " "])
    np.testing.assert_allclose(vectors[0], np.full(32, 32**-0.5), atol=1e-7)
    np.testing.assert_array_equal(vectors[0], vectors[2])
    bert = Encoder.load(bert_folder, device="cpu").encode(["", "star"])
    assert np.isfinite(bert).all()
    np.testing.assert_allclose(np.linalg.norm(bert, axis=1), 1, atol=1e-6)


def test_no_texts_no_rows(static_encoder):
    assert static_encoder.encode([]).shape == (0, 32)


def test_gradients_flow_through_embed_and_not_through_encode(static_encoder):
    vectors = static_encoder.embed(static_encoder.tokenize(["star red"], "query"), "query")
    vectors[0, 0].backward()
    gradient = static_encoder.model[0].embedding.weight.grad
    assert gradient is not None
    assert int((gradient.abs().sum(dim=1) > 0).sum()) == 2


def test_bfloat16_is_computed_in_and_float32_returned(bert_folder):
    exact = Encoder.load(bert_folder, device="cpu").encode(TEXTS)
    encoder = Encoder.load(bert_folder, device="cpu", dtype=torch.bfloat16)
    rough = encoder.encode(TEXTS)
    assert rough.dtype == np.float32
    assert next(encoder.model.parameters()).dtype == torch.float32
    assert 1e-5 < np.abs(rough - exact).max() < 0.1
    np.testing.assert_allclose(np.linalg.norm(rough, axis=1), 1, atol=1e-6)


# ---------------------------------------------------------------------------------------------------- fingerprint


def test_fingerprint_ignores_use_device_and_name(bert_folder):
    encoder = Encoder.load(bert_folder, device="cpu")
    before = encoder.fingerprint
    encoder.encode(TEXTS)
    assert encoder.fingerprint == before
    assert Encoder(encoder.model, "other", device=torch.device("cpu"), dtype=torch.bfloat16).fingerprint == before


def change_weights(encoder: Encoder) -> None:
    with torch.no_grad():
        next(encoder.model.parameters())[0, 0] += 1e-3


def change_pooling(encoder: Encoder) -> None:
    encoder.model[1].pooling_mode = ("cls",)


def change_prompt(encoder: Encoder) -> None:
    encoder.model.prompts["query"] = "query: "


def drop_normalize(encoder: Encoder) -> None:
    del encoder.model[-1]


def change_length(encoder: Encoder) -> None:
    encoder.model.max_seq_length = 32


@pytest.mark.parametrize("change", [change_weights, change_pooling, change_prompt, drop_normalize, change_length])
def test_fingerprint_changes_with_what_matters(bert_folder, change):
    encoder = Encoder.load(bert_folder, device="cpu")
    before = encoder.fingerprint
    change(encoder)
    assert encoder.fingerprint != before


# --------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.encode("star"), "put the single text into a list"),
        (lambda e: e.encode(["star", None]), "text number 1 is a NoneType"),
        (lambda e: e.encode(["star"], "title"), "side 'title'"),
    ],
)
def test_wrong_calls_are_one_line(static_encoder, call, message):
    with pytest.raises(InputError, match=re.escape(message)):
        call(static_encoder)


def test_damaged_weights_are_named(static_encoder):
    with torch.no_grad():
        static_encoder.model[0].embedding.weight[:] = float("nan")
    with pytest.raises(FormatError, match="text number 0"):
        static_encoder.encode(["star"])


def test_unknown_encoders_are_one_line(tmp_path):
    for spec in (str(tmp_path), "no/such-model-anywhere", str(tmp_path / "missing")):
        with pytest.raises(InputError) as caught:
            Encoder.load(spec)
        assert spec in str(caught.value)
        assert "\n" not in str(caught.value)


def test_save_refuses_a_full_folder(static_encoder, tmp_path):
    (tmp_path / "x").write_text("x")
    with pytest.raises(InputError, match="not an empty folder"):
        static_encoder.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_fitted_table_keeps_its_prompts(static_encoder, planted_corpus):
    static_encoder.model.prompts.update({"query": "query : ", "search": "passage : "})
    static_encoder.model.default_prompt_name = "search"
    model = static_encoder.fitted_to(planted_corpus).model
    assert model.prompts == static_encoder.model.prompts and model.default_prompt_name == "search"
    np.testing.assert_array_equal(model.encode("star red"), model.encode("passage : star red", prompt=""))


def test_a_table_with_more_behind_it_is_trained_as_a_table_and_not_fitted(static_encoder, concept_corpus):
    torch.manual_seed(0)
    dense = Dense(32, 8, bias=False, activation_function=torch.nn.Identity())
    model = SentenceTransformer(modules=[static_encoder.model[0], dense, Normalize()], device="cpu")
    encoder = Encoder(model, "with a projection", device=torch.device("cpu"), dtype=torch.float32)
    assert static_encoder.table is not None and encoder.table is None
    assert encoder.is_table
    with encoder.remembering_tokens():
        assert encoder.encode(["w1 w2"]).shape == (1, 8)
    with pytest.raises(InputError, match="is not a static encoder"):
        encoder.fitted_to(concept_corpus)
    recipe = Recipe.for_encoder(static=True, epochs=1, batch_size=32, span_lengths=(4,))
    result = train(concept_corpus, encoder, recipe=recipe)
    assert result.recipe.train == "both" and result.encoder.parts[0].dim == 8


def test_only_a_static_encoder_can_be_fitted(bert_folder, planted_corpus):
    with pytest.raises(InputError, match="is not a static encoder"):
        Encoder.load(bert_folder, device="cpu").fitted_to(planted_corpus)


def test_minilm_on_real_abstracts_is_sentence_transformers_own():
    """The whole of scifact, with its NDCG@10, is in benchmarks/encode.py."""
    corpus = Corpus.load(real_dataset("scifact"))
    encoder = Encoder.load("minilm", device="cpu")
    texts = [corpus[i].full_text for i in range(8)]
    expected = SentenceTransformer(modules=list(encoder.model), device="cpu").encode(texts)
    np.testing.assert_allclose(encoder.encode(texts), expected, atol=1e-6)


def test_bfloat16_is_for_processors_that_have_it(monkeypatch):
    cpu = torch.device("cpu")
    for name in ("avx512_bf16", "amx_tile"):
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda: False, raising=False)
    assert fast_dtype(cpu) == torch.float32
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert fast_dtype(cpu) == torch.bfloat16
    assert fast_dtype(torch.device("mps")) == torch.float32
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported")
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    assert fast_dtype(cpu) == torch.float32


def test_another_type_for_a_while(static_encoder):
    with pytest.raises(KeyError), static_encoder.computing_in(torch.bfloat16):
        assert static_encoder.dtype == torch.bfloat16
        raise KeyError
    assert static_encoder.dtype == torch.float32


@pytest.mark.parametrize("value", [{}, []])
def test_settings_that_only_encoding_shows_to_be_damaged_are_one_line(static_encoder, tmp_path, value):
    static_encoder.save(tmp_path / "model")
    (tmp_path / "model" / "checksums.json").unlink(missing_ok=True)
    path = tmp_path / "model" / "1_Normalize" / "config.json"
    path.write_text(json.dumps(dict.fromkeys(json.loads(path.read_text()), value)))
    with pytest.raises(FormatError, match=r"^[^\n]*damaged[^\n]*$"):
        Encoder.load(tmp_path / "model").encode(["star"])
