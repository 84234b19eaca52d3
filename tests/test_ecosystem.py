"""Other people's tools take what we make, and we take what they make."""

from __future__ import annotations

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from hce.data.corpus import Corpus
from hce.data.text import Document
from hce.encoding.encoder import Encoder
from hce.index.index import Index


@pytest.fixture(scope="module")
def index(planted_corpus, module_static_encoder, tmp_path_factory) -> Index:
    documents = [Document(each.id, each.text, each.title, {"topic": each.id.split("-")[0]}) for each in planted_corpus]
    return Index.create(
        tmp_path_factory.mktemp("ecosystem") / "index", Corpus.from_documents(documents), module_static_encoder
    )


def test_langchain(index):
    pytest.importorskip("langchain_core")
    from hce.integrations.langchain import HceRetriever

    found = HceRetriever(index=index, k=4).invoke("star red w1 w2")
    hits = index.search("star red w1 w2", 4)
    assert [document.id for document in found] == [hit.id for hit in hits]
    assert [document.metadata["score"] for document in found] == [hit.score for hit in hits]
    assert found[0].page_content == hits[0].text
    ships = HceRetriever(index=index, k=3, filter={"topic": "ship"}).invoke("star red")
    assert [document.metadata["topic"] for document in ships] == ["ship"] * 3


def test_llamaindex(index):
    pytest.importorskip("llama_index.core")
    from hce.integrations.llamaindex import HceRetriever

    found = HceRetriever(index, k=4).retrieve("star red w1 w2")
    hits = index.search("star red w1 w2", 4)
    assert [(node.node.node_id, node.score) for node in found] == [(hit.id, hit.score) for hit in hits]
    assert found[0].text == hits[0].text
    laws = HceRetriever(index, k=2, filter={"topic": "law"}).retrieve("star red")
    assert [node.node.metadata["topic"] for node in laws] == ["law"] * 2


def test_sentence_transformers_loads_the_index_encoder(index):
    """The encoder that an index carries is an ordinary model folder, and MTEB's way of calling it works."""
    model = SentenceTransformer(str(index.path / "encoder"), device="cpu")
    texts = ["star red w1", "law blue w3"]
    np.testing.assert_allclose(model.encode(texts), index.encoder.encode(texts), atol=1e-6)
    queries, documents = model.encode_query(texts), model.encode_document(texts)
    np.testing.assert_allclose(model.similarity(queries, documents).numpy().diagonal(), 1.0, atol=1e-5)


def test_prompts_survive_the_round_trip(gtr_folder, tmp_path):
    """A model with other prompts for queries than for documents gives the same vectors by either library."""
    encoder = Encoder.load(gtr_folder, device="cpu")
    encoder.save(tmp_path / "saved")
    model = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    texts = ["star red w1", "law blue w3"]
    np.testing.assert_allclose(model.encode_query(texts), encoder.encode(texts, "query"), atol=1e-5)
    np.testing.assert_allclose(model.encode_document(texts), encoder.encode(texts, "document"), atol=1e-5)


def test_hugging_face_datasets_as_documents():
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"id": ["a", "b"], "text": ["star red", "law blue"], "year": [1999, 2001]})
    corpus = Corpus.from_records(rows, name="rows")
    assert [(each.id, each.text, each.metadata) for each in corpus] == [
        ("a", "star red", {"year": 1999}),
        ("b", "law blue", {"year": 2001}),
    ]
