"""Tables: the same vectors as sentence-transformers gives for the same folder, without torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from hce.data.corpus import Corpus
from hce.data.text import Document
from hce.encoding.encoder import Encoder
from hce.encoding.tables import Bags, Table, fit_words, token_bags
from hce.errors import FormatError, InputError
from hce.index.index import Index

HEAVY = ("torch", "transformers", "sentence_transformers", "sklearn", "scipy", "accelerate")
TEXTS = ["w1 w2 w2 star", "", "unheard of", "blue ship w7", "w1 " * 700, "red " + "w9 w8 " * 40]


FROZEN = Path(__file__).parent / "data" / "side-by-side-0.2.0"


def word_table_of(corpus: Corpus) -> Encoder:
    return Encoder(fit_words(corpus, dim=8), "words")


def centres(dim: int) -> np.ndarray:
    return (np.random.default_rng(3).normal(size=(2, dim)) / 20).astype(np.float32)


def kinds_of_tables(static: Encoder, corpus: Corpus) -> dict[str, Encoder]:
    static.model.prompts.update({"query": "query : ", "document": "passage : "})
    words = word_table_of(corpus)
    return {
        "static": static,
        "words": words,
        "side by side": static.beside([words], [0.7, 0.3]),
        "centred": static.beside([words], [0.5, 0.5], centres(static.dim)),
    }


@pytest.fixture(params=["static", "words", "side by side", "centred", "cut off"])
def saved(request, tmp_path, static_encoder, concept_corpus) -> tuple[Encoder, Path]:
    """An encoder made of tables, and its folder."""
    if request.param == "cut off":
        static_encoder.model[0].tokenizer.enable_truncation(12)
    encoder = kinds_of_tables(static_encoder, concept_corpus)["static" if request.param == "cut off" else request.param]
    encoder.save(tmp_path / "encoder")
    return Encoder.load(tmp_path / "encoder"), tmp_path / "encoder"


@pytest.mark.parametrize("side", ["query", "document"])
def test_vectors_are_those_of_sentence_transformers(saved, concept_corpus, side):
    folder = saved[1]
    encoder = Encoder.load(folder)
    texts = [text for text in [*TEXTS, *concept_corpus.texts()] if text and text != "unheard of"]
    other = SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)
    expected = (other.encode_query if side == "query" else other.encode_document)(texts)
    np.testing.assert_allclose(encoder.encode(texts, side), expected, atol=3e-7)
    assert encoder.encode(texts, side).dtype == np.float32
    assert encoder.encode([], side).shape == (0, encoder.dim)


@pytest.mark.parametrize("name", ["transformer", "tables"])
def test_vectors_are_those_that_0_2_0_gave(name, tmp_path):
    """A transformer centred, with a token table and words; and these two alone: as folders, as read and as written."""
    facts = json.loads((FROZEN / "expected.json").read_text(encoding="utf-8"))
    expected = facts[name]
    Encoder.load(FROZEN / name, device="cpu").save(tmp_path / "again")
    for folder in (FROZEN / name, tmp_path / "again"):
        encoder = Encoder.load(folder, device="cpu")
        assert (encoder.fingerprint, encoder.dim, encoder.window) == tuple(
            expected[fact] for fact in ("fingerprint", "dim", "window")
        )
        for side in ("query", "document"):
            np.testing.assert_allclose(encoder.encode(facts["texts"], side), expected[side], atol=1e-6)


def test_a_model_made_of_tables_has_their_fingerprint_and_vectors(saved):
    """What a trainer gets is the same encoder, and what it changes there is what is encoded by."""
    encoder = Encoder.load(saved[1])
    fingerprint, vectors = encoder.fingerprint, encoder.encode(TEXTS)
    model = encoder.model
    assert encoder.fingerprint == fingerprint
    np.testing.assert_array_equal(encoder.encode(TEXTS), vectors)
    weights = list(model.parameters())
    if weights:
        with torch.no_grad():
            weights[0].mul_(torch.linspace(1, 3, weights[0].shape[1]))
        assert np.abs(encoder.encode(TEXTS) - vectors).max() > 1e-3
        assert encoder.fingerprint != fingerprint


def test_a_text_has_the_same_vector_among_others(saved, concept_corpus):
    tables = Encoder.load(saved[1])
    texts = list(concept_corpus.texts())[:20]
    np.testing.assert_array_equal(tables.encode(texts), np.concatenate([tables.encode([text]) for text in texts]))


def test_the_fingerprint_is_of_the_weights(saved, tmp_path):
    _, folder = saved
    before = Encoder.load(folder).fingerprint
    weights = next(folder.rglob("model.safetensors"))
    damaged = bytearray(weights.read_bytes())
    damaged[-5] ^= 1  # the smallest change of the last number but one
    weights.write_bytes(damaged)
    with pytest.raises(FormatError, match="changed since it was written"):
        Encoder.load(folder)
    (folder / "checksums.json").unlink()
    assert Encoder.load(folder).fingerprint != before


def test_sums_are_those_of_torch_to_the_bit():
    rng = np.random.default_rng(0)
    table = rng.normal(size=(500, 96)).astype(np.float32)
    bags = token_bags([rng.integers(500, size=length).tolist() for length in (3, 0, 700, 1, 90)])
    by_torch = torch.nn.functional.embedding_bag(
        torch.from_numpy(bags.rows), torch.from_numpy(table), torch.from_numpy(bags.starts), mode="sum"
    )
    np.testing.assert_array_equal(bags.sums(table), by_torch.numpy())
    with pytest.raises(LookupError, match="no row 500"):
        Bags(np.array([500]), np.array([1])).sums(table)


def test_other_encoders_are_left_to_torch(bert_folder, static_encoder, tmp_path):
    assert Table.read(bert_folder) is None
    static_encoder.save(tmp_path / "half")
    (tmp_path / "half" / "checksums.json").unlink()
    entries = json.loads((tmp_path / "half" / "modules.json").read_text())
    (tmp_path / "half" / "modules.json").write_text(json.dumps(entries[:1]))  # nothing that normalises
    assert Table.read(tmp_path / "half") is None
    np.testing.assert_array_equal(Encoder.load(tmp_path / "half").encode(TEXTS), static_encoder.encode(TEXTS))
    with pytest.raises(InputError, match="without a model"):
        Encoder.load(tmp_path)


@pytest.mark.parametrize("spoilt", ["words.json", "side_by_side.json", "tokenizer.json", "centres.safetensors"])
def test_damage_is_one_line(static_encoder, concept_corpus, tmp_path, spoilt):
    kinds_of_tables(static_encoder, concept_corpus)["centred"].save(tmp_path / "encoder")
    (tmp_path / "encoder" / "checksums.json").unlink()
    next((tmp_path / "encoder").rglob(spoilt)).write_text("{}")
    with pytest.raises(FormatError, match=str(tmp_path)):
        Encoder.load(tmp_path / "encoder")


def searched(index: Path) -> dict[str, list[str]]:
    """What a fresh process finds in an index by each mode, and which heavy packages it has loaded."""
    program = """
import json, sys
from hce.index.index import Index
with Index.open(sys.argv[1]) as index:
    modes = ("hybrid", "dense", "words")
    found = {mode: [[hit.id for hit in hits] for hits in index.search(["w1 w2 w2", "blue w7"], mode=mode)]
             for mode in modes}
print(json.dumps({**found, "heavy": [name for name in sys.argv[2:] if name in sys.modules]}))
"""
    done = subprocess.run([sys.executable, "-c", program, str(index), *HEAVY], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("engine", ["codes", "exact"])
def test_a_search_needs_nothing_heavy(static_encoder, concept_corpus, tmp_path, engine):
    encoder = kinds_of_tables(static_encoder, concept_corpus)["centred"]
    documents = [*concept_corpus, Document("long", "w1 w2 " * 400)]  # one that is read in passages
    with Index.create(tmp_path / "made", documents, encoder, "grow", engine=engine):
        pass
    shutil.copytree(tmp_path / "made", tmp_path / "index", copy_function=shutil.copyfile)  # with other times
    found = searched(tmp_path / "index")
    assert found.pop("heavy") == []
    with Index.open(tmp_path / "made", encoder) as index:
        for mode, ids in found.items():
            assert ids == [[hit.id for hit in hits] for hits in index.search(["w1 w2 w2", "blue w7"], mode=mode)]
        assert index.encoder is encoder


def test_an_index_gives_its_whole_encoder_too(static_encoder, tmp_path):
    with Index.create(tmp_path / "index", [Document("a", "star"), Document("b", "cell")], static_encoder) as made:
        assert made.search("star")[0].id == "a"
        assert isinstance(made.encoder, Encoder)
        assert made.encoder is made.encoder
        made.add([Document("c", "law")])
        assert made.search("law")[0].id == "c"
