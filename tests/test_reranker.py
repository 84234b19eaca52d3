"""Re-ranking: a cross-encoder puts the first hits into another order, and each hit tells what it got from whom."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

from hce.encoding.reranker import Reranker
from hce.errors import FormatError, InputError

WORDS = ["ships", "stars", "bread", "laws", "sea", "night", "supper", "court", "and", "of", "the", "number"]


def save_tiny(folder, labels=1, kind=BertForSequenceClassification):
    """Write a cross-encoder of one small layer with random weights, which differ from text to text."""
    torch.manual_seed(7)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS, *map(str, range(40))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=32, **names).save_pretrained(folder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=len(vocabulary), max_position_embeddings=64, initializer_range=1.0, **sizes)
    config.num_labels = labels
    kind(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("reranker") / "tiny")


@pytest.fixture(scope="module")
def reranker(folder):
    return Reranker.load(folder)


def test_scores_are_the_models_own_and_alike_in_any_company(reranker):
    texts = [f"{word} number {number}" for number, word in enumerate(WORDS)]
    scores = reranker.scores("ships", texts)
    assert scores.shape == (len(texts),)
    assert scores.dtype == np.float32
    assert len(set(scores.round(5).tolist())) > len(texts) // 2
    expected = reranker.model.predict([("ships", text) for text in texts], show_progress_bar=False)
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    np.testing.assert_allclose(reranker.scores("ships", texts[3:4]), scores[3:4], atol=1e-5)
    assert reranker.scores("ships", []).shape == (0,)


def test_device_and_dtype_are_as_asked(folder):
    made = Reranker.load(folder, device="cpu", dtype=torch.bfloat16)
    assert next(made.model.parameters()).dtype == torch.bfloat16
    assert next(made.model.parameters()).device.type == "cpu"
    assert made.scores("ships", ["stars"]).dtype == np.float32


def test_what_is_no_cross_encoder_is_refused_in_one_line(tmp_path, folder):
    with pytest.raises(InputError, match="gives 3 scores for a pair of texts"):
        Reranker.load(save_tiny(tmp_path / "three", labels=3))
    with pytest.raises(InputError, match="is a BertModel, not a cross-encoder"):
        Reranker.load(save_tiny(tmp_path / "encoder", kind=BertModel))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="a folder without a model"):
        Reranker.load(tmp_path / "empty")
    with pytest.raises(InputError, match=r"no cross-encoder 'nobody/nothing'.*give a model directory or a hub id"):
        Reranker.load("nobody/nothing", local=True)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")
    with pytest.raises(FormatError, match=r"damaged"):
        Reranker.load(tmp_path / "damaged")
    (tmp_path / "static").mkdir()
    modules = [{"idx": 0, "type": "sentence_transformers.models.StaticEmbedding"}]
    (tmp_path / "static" / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(InputError, match="is an encoder, not a cross-encoder"):
        Reranker.load(tmp_path / "static")
