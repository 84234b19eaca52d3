"""The index: a dictionary that survives reopening and is searched exactly; sharing, filters, threads, processes."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import hce
from hce.data.corpus import Corpus
from hce.data.judgments import Judgment, Qrels, Query
from hce.data.text import Document
from hce.encoding.encoder import Encoder
from hce.errors import FormatError, InputError
from hce.evaluation.evaluate import evaluate
from hce.files import read_json, sealed, write_json
from hce.index import create, derived
from hce.index.create import build_parts
from hce.index.index import Index
from hce.index.manifest import Manifest
from hce.index.tables import Writer
from hce.index.tree import Places
from hce.tree.hierarchy import Hierarchy

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def encoder(module_static_encoder):
    return module_static_encoder


@pytest.fixture(scope="module")
def made(tmp_path_factory, planted_corpus, encoder):
    """An index of the planted corpus, to copy."""
    folder = tmp_path_factory.mktemp("made") / "index"
    Index.create(folder, planted_corpus, encoder, "grow").close()
    return folder


@pytest.fixture
def index(made, tmp_path, encoder):
    shutil.copytree(made, tmp_path / "index")
    with Index.open(tmp_path / "index", encoder) as opened:
        yield opened


def exact(encoder: Encoder, documents: list[Document], query: str, k: int) -> list[tuple[str, float]]:
    """Ids and scores by plain comparison with every text; equal ones in order."""
    if not documents:
        return []
    texts = [document.full_text for document in documents]
    distinct = list(dict.fromkeys(texts))
    vectors = encoder.encode(distinct).astype(np.float64)
    scores = dict(zip(distinct, vectors @ encoder.encode([query], "query")[0].astype(np.float64), strict=True))
    order = sorted(range(len(documents)), key=lambda i: -scores[texts[i]])
    return [(documents[i].id, scores[texts[i]]) for i in order[:k]]


def assert_same(hits: list[hce.Hit], expected: list[tuple[str, float]]) -> None:
    assert [hit.id for hit in hits] == [doc_id for doc_id, _ in expected]
    assert [hit.rank for hit in hits] == list(range(1, len(expected) + 1))
    np.testing.assert_allclose([hit.score for hit in hits], [score for _, score in expected], atol=1e-5)


# ------------------------------------------------------------------------------------------------- as a dictionary

IDS = [f"d{i}" for i in range(8)]
TEXTS = ["star w1", "star w2 w3", "cell w4", "law", "ship w5 w6", "red green", "w7", "w8 w9 w10"]
DOCUMENT = st.builds(
    lambda doc_id, title, text, year: Document(doc_id, text, title, {"year": year}),
    st.sampled_from(IDS),
    st.sampled_from(["", "star"]),
    st.sampled_from(TEXTS),
    st.integers(2000, 2003),
)
BATCH = st.lists(DOCUMENT, min_size=1, max_size=4, unique_by=lambda document: document.id)


class AsADictionary(RuleBasedStateMachine):
    """The index beside a plain dict; the order in the dict is that in which texts came in."""

    encoder: Encoder
    folder: Path
    engine = "codes"

    @initialize(first=BATCH)
    def create(self, first):
        shutil.rmtree(self.folder, ignore_errors=True)
        self.index = Index.create(self.folder, first, self.encoder, engine=self.engine)
        self.expected = {document.id: document for document in first}

    @rule(batch=BATCH)
    def add(self, batch):
        if any(document.id in self.expected for document in batch):
            with pytest.raises(InputError, match="is there already"):
                self.index.add(batch)
        else:
            assert self.index.add(batch) == len(batch)
            self.expected |= {document.id: document for document in batch}

    @rule(batch=BATCH)
    def update(self, batch):
        self.index.update(batch)
        for document in sorted(batch, key=lambda document: document.id not in self.expected):
            before = self.expected.get(document.id)
            if before is not None and before.full_text != document.full_text:
                del self.expected[document.id]
            self.expected[document.id] = document

    @rule(ids=st.lists(st.sampled_from(IDS), min_size=1, max_size=3))
    def remove(self, ids):
        if all(doc_id in self.expected for doc_id in ids):
            assert self.index.remove(ids) == len(set(ids))
            for doc_id in set(ids):
                del self.expected[doc_id]
        else:
            with pytest.raises(InputError, match="nothing was removed"):
                self.index.remove(ids)

    @rule()
    def reopen(self):
        self.index.close()
        self.index = Index.open(self.folder, self.encoder)

    @rule()
    def rebuild(self):
        self.index.rebuild()

    @rule(text=st.sampled_from(TEXTS), k=st.integers(1, 12))
    def search(self, text, k):
        assert_same(
            self.index.search(text, k, mode="dense"), exact(self.encoder, list(self.expected.values()), text, k)
        )

    @precondition(lambda self: self.expected)
    @rule(text=st.sampled_from(TEXTS), k=st.integers(1, 5), year=st.integers(2000, 2003))
    def search_a_year(self, text, k, year):
        fitting = [document for document in self.expected.values() if document.metadata["year"] >= year]
        hits = self.index.search(text, k, filter={"year": {"gte": year}}, mode="dense")
        assert_same(hits, exact(self.encoder, fitting, text, k))

    @invariant()
    def same_contents(self):
        assert len(self.index) == len(self.expected)
        assert {document.id: document for document in self.index} == self.expected
        for doc_id in IDS:
            assert self.index.get(doc_id) == self.expected.get(doc_id)
            assert (doc_id in self.index) == (doc_id in self.expected)

    def teardown(self):
        if hasattr(self, "index"):
            self.index.close()


@pytest.mark.parametrize(("engine", "examples"), [("codes", 12), ("exact", 4)])
def test_it_behaves_as_a_dictionary(tmp_path, encoder, monkeypatch, engine, examples):
    monkeypatch.setattr(derived, "ROWS_BEHIND", 2)  # so that snapshots are written and read all the time
    AsADictionary.encoder, AsADictionary.folder, AsADictionary.engine = encoder, tmp_path / "index", engine
    run_state_machine_as_test(
        AsADictionary, settings=settings(max_examples=examples, stateful_step_count=20, deadline=None, database=None)
    )


def test_the_same_id_again_and_again_with_reopening(made, tmp_path, encoder):
    shutil.copytree(made, tmp_path / "index")
    for text in ("w190 w191", "w192 w193", "w190 w191"):
        with Index.open(tmp_path / "index", encoder) as index:
            index.add([Document("again", text)])
        with Index.open(tmp_path / "index", encoder) as index:
            assert index.search(text, 1)[0].id == "again"
        with Index.open(tmp_path / "index", encoder) as index:
            index.remove(["again"])
        with Index.open(tmp_path / "index", encoder) as index:
            assert "again" not in [hit.id for hit in index.search(text, 240)]


# ------------------------------------------------------------------------------------------------- creation


def test_what_is_in_the_folder(made, encoder, planted_corpus):
    names = {path.name for path in made.iterdir()}
    assert names == {"manifest.json", "documents.sqlite", "encoder", "hierarchy", "engine", "words"}
    assert not made.with_name("index.unfinished").exists()
    manifest = json.loads((made / "manifest.json").read_text())
    assert manifest["fingerprint"] == encoder.fingerprint == Encoder.load(made / "encoder").fingerprint
    assert manifest["corpus"]["fingerprint"] == planted_corpus.fingerprint
    assert len(Hierarchy.load(made / "hierarchy")) == 240
    with Index.open(made) as index:
        assert index.tree.numbers.tolist() == list(range(1, 241))
        np.testing.assert_allclose(index.vectors()[1], encoder.encode(list(planted_corpus.texts())), atol=1e-6)
        assert list(index) == list(planted_corpus)


def test_a_text_and_a_list_of_texts(index, encoder, planted_corpus):
    queries = ["star red w3", "ship blue"]
    many = index.search(queries, k=7, mode="dense")
    for query, hits in zip(queries, many, strict=True):
        assert_same(hits, exact(encoder, list(planted_corpus), query, 7))
        assert index.search(query, k=7, mode="dense") == hits
    hit = many[0][0]
    assert (hit.title, hit.text) == (index.get(hit.id).title, index.get(hit.id).text)
    assert [hit.number for hit in many[0]] == [planted_corpus.ids.index(hit.id) + 1 for hit in many[0]]
    assert list(hit.as_dict())[:6] == ["rank", "score", "id", "title", "text", "metadata"]
    assert index.search([], k=3) == []
    assert len(index.search("star", k=1000)) == 240
    with pytest.raises(InputError, match="ask for 1 hit or more"):
        index.search("star", k=0)


def test_each_hit_has_its_path_in_the_tree(index, planted_corpus):
    """From the top to the leaf; that of a document that came later is where a walk down the tree ends."""
    hierarchy = index.tree.hierarchy
    name = hierarchy.names[-1][int(hierarchy.document_parent[7])]
    for hit in index.search("star red w3", k=240):
        way = hierarchy.path(hit.number - 1)[:-1]
        assert [(each.level, each.node) for each in hit.path] == list(enumerate(way, start=1))
    index.add([Document("later", planted_corpus[7].text, planted_corpus[7].title)])
    (found, later) = (
        next(hit for hit in index.search(planted_corpus[7].full_text, k=9) if hit.id == doc_id)
        for doc_id in (planted_corpus[7].id, "later")
    )
    walked = hierarchy.walk(index.vectors(after=240)[1])
    assert [each.node for each in later.path] == [int(level[0, 0]) for level in walked[1:]]
    assert found.as_dict()["path"][-1] == {"level": 2, "node": int(hierarchy.document_parent[7]), "name": name}


def test_without_a_tree_hits_have_no_path(tmp_path, planted_corpus, encoder):
    with Index.create(tmp_path / "index", planted_corpus, encoder) as index:
        assert [hit.path for hit in index.search("star red w3", k=2)] == [(), ()]


def test_it_can_be_evaluated(index, planted_corpus):
    queries = {"q": Query("q", planted_corpus[5].full_text)}
    report = evaluate(index, queries, Qrels([Judgment("q", planted_corpus[5].id, 1)]))
    assert report.means["nDCG@10"] == 1.0


def test_a_trained_models_tree_and_history_come_along(tmp_path, planted_corpus, encoder):
    vectors = encoder.encode(list(planted_corpus.texts()))
    model = tmp_path / "model"
    encoder.save(model)
    Hierarchy.build(vectors, 4, seed=3).save(model / "hierarchy")
    corpus = {"name": "planted", "documents": 240, "fingerprint": planted_corpus.fingerprint}
    before = {
        "static": True,
        "recipe": {"mode": "unsupervised"},
        "metric": "NDCG@10",
        "before": {"titles": 0.5},
        "mix": 0.0,
        "held_out": [],
        "shares": [1.0],
        "words_share": None,
        "stages": {},
    }
    known = {"encoder": "static, fitted", "fingerprint": encoder.fingerprint, "corpus": corpus}
    facts = {"format": 1, "hce": "0.2.0", **known, **before, "after": {"titles": 0.5}}
    (model / "hce.json").write_text(json.dumps(facts))
    (model / "history.jsonl").write_text('{"epoch": 0}\n')
    with Index.create(tmp_path / "same", planted_corpus, model) as index:
        assert index.tree.hierarchy.facts == {"branching": 4, "method": "agglomerative", "seed": 3}
        assert index.state.manifest.base_encoder == "static"
        assert (tmp_path / "same" / "model" / "history.jsonl").read_text() == '{"epoch": 0}\n'
        assert json.loads((tmp_path / "same" / "model" / "hce.json").read_text()) == facts
    with Index.create(tmp_path / "part", planted_corpus[:100], model) as index:
        assert index.tree is None  # that tree is of other documents
    with Index.create(tmp_path / "grown", planted_corpus[:100], model, "grow") as index:
        assert len(index.tree.hierarchy) == 100
        assert index.tree.hierarchy.names is not None
    (model / "hce.json").write_text("{")
    with pytest.raises(FormatError, match=r"hce\.json: damaged"):
        Index.create(tmp_path / "none", planted_corpus, model)


def test_creation_refuses_what_cannot_be(tmp_path, planted_corpus, encoder):
    tree = Hierarchy.build(encoder.encode(list(planted_corpus.texts())))
    cases = [
        ({"hierarchy": tree, "corpus": planted_corpus[:50]}, "the hierarchy is of 240 documents, the corpus has 50"),
        ({"engine": "quantum"}, "engine 'quantum': choose one of codes, exact, milvus"),
        ({"encoder": "/no/such/model"}, "no encoder '/no/such/model'"),
        ({"corpus": []}, "no documents with text"),
        ({"corpus": [Document("a", "x"), Document("a", "y")]}, "id 'a' is already used"),
    ]
    for changed, message in cases:
        arguments = {"corpus": planted_corpus, "encoder": encoder, **changed}
        with pytest.raises(InputError, match=message):
            Index.create(tmp_path / "index", **arguments)
        assert not (tmp_path / "index").exists()
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "mine.txt").write_text("keep")
    with pytest.raises(InputError, match="exists and is not an empty folder"):
        Index.create(tmp_path / "index", planted_corpus, encoder)


def test_an_interrupted_creation_goes_on_where_it_stopped(tmp_path, planted_corpus, encoder, monkeypatch):
    encode, calls = Encoder.encode, []

    def interrupted(self, texts, side="document", **options):
        calls.append(len(texts))
        if len(calls) == 1:
            raise KeyboardInterrupt
        return encode(self, texts, side, **options)

    monkeypatch.setattr(Encoder, "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Index.create(tmp_path / "index", planted_corpus, encoder)
    assert [path.name for path in tmp_path.iterdir()] == ["index.unfinished"]
    with Index.create(tmp_path / "index", planted_corpus[:100], encoder) as index:  # another corpus is no obstacle
        assert len(index) == 100
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


@pytest.mark.parametrize("engine", ["codes", "exact"])
def test_what_was_done_is_kept_when_the_engine_fails(tmp_path, planted_corpus, encoder, monkeypatch, engine):
    new_engine = derived.new_engine

    def failing(*arguments, **options):
        raise MemoryError("too large")

    monkeypatch.setattr(derived, "new_engine", failing)
    with pytest.raises(MemoryError):
        Index.create(tmp_path / "index", planted_corpus, encoder, "grow", engine=engine)
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
    monkeypatch.setattr(derived, "new_engine", new_engine)
    with Index.open(tmp_path / "index", encoder) as index:
        assert list(index) == list(planted_corpus)
        assert len(index.tree.hierarchy) == 240
        assert index.status().pending == 240
        assert_same(
            index.search("star red w3", 5, mode="dense"), exact(encoder, list(planted_corpus), "star red w3", 5)
        )
        build_parts(index.state)
        assert index.status().pending == 0


def test_neither_tree_nor_documents_are_made_twice(tmp_path, planted_corpus, encoder, monkeypatch):
    """Stopped in the middle of writing: the tree stays, and writing goes on behind the last documents."""
    insert, grow = Writer.insert, create.grow_named_tree
    written, grown = [], []

    def interrupted(self, documents, *rest):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(len(documents))
        return insert(self, documents, *rest)

    monkeypatch.setattr(create, "DOCUMENTS_AT_ONCE", 64)
    monkeypatch.setattr(create, "grow_named_tree", lambda *given, **options: grown.append(1) or grow(*given, **options))
    monkeypatch.setattr(Writer, "insert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Index.create(tmp_path / "index", planted_corpus, encoder, "grow")
    monkeypatch.setattr(Writer, "insert", lambda self, *given: written.append(0) or insert(self, *given))
    with Index.create(tmp_path / "index", planted_corpus, encoder, "grow") as index:
        assert list(index) == list(planted_corpus)
        assert np.array_equal(index.vectors()[0], np.arange(1, 241))
        assert np.allclose(index.vectors()[1], encoder.encode(list(planted_corpus.texts())), atol=1e-6)
        assert index.tree.hierarchy.names
    assert (written, grown) == ([64, 64, 64, 0], [1])
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_nothing_is_encoded_twice(tmp_path, planted_corpus, encoder, monkeypatch, encoded):
    """Stopped while the store was written: all vectors are there already."""

    def failing(self, folder):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "write", failing)
        with pytest.raises(KeyboardInterrupt):
            Index.create(tmp_path / "index", planted_corpus, encoder)
    assert [path.name for path in tmp_path.iterdir()] == ["index.unfinished"]
    assert len(encoded) == 240
    with Index.create(tmp_path / "index", planted_corpus, encoder) as index:
        assert len(index) == 240
    assert len(encoded) == 240
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


# ------------------------------------------------------------------------------------------------- encoding once


@pytest.fixture
def encoded(monkeypatch):
    """The texts that are encoded as documents from here on."""
    texts, encode = [], Encoder.encode

    def counting(self, given, side="document", **options):
        if side == "document":
            texts.extend(given)
        return encode(self, given, side, **options)

    monkeypatch.setattr(Encoder, "encode", counting)
    return texts


def test_only_new_texts_are_encoded_and_no_id_is_dropped(index, planted_corpus, encoded, monkeypatch):
    monkeypatch.setattr("hce.index.writing.DOCUMENTS_AT_ONCE", 2)
    known = planted_corpus[3]
    batch = [
        Document("a", known.text, known.title),
        Document("b", "w100 w101"),
        Document("c", "w102"),
        Document("d", "w100 w101"),  # of the chunk before, which is not in the store yet
        Document("e", "w101", "w100"),  # of a chunk that is; and the same to the encoder
        Document("f", "w102"),
    ]
    index.add(batch)
    assert encoded == ["w100 w101", "w102"]
    assert [document.id for document in index][240:] == ["a", "b", "c", "d", "e", "f"]
    numbers, vectors = index.vectors()
    by_number = dict(zip(numbers.tolist(), vectors.tolist(), strict=True))
    assert by_number[4] == by_number[241]
    assert by_number[242] == by_number[244] == by_number[245]
    hits = index.search("w100 w101", k=3, mode="dense")
    assert [hit.id for hit in hits] == ["b", "d", "e"]  # equal scores in the order in which they came
    assert hits[0].score == hits[1].score == hits[2].score


def test_equal_texts_of_the_first_corpus_share_a_vector(tmp_path, encoder, monkeypatch):
    encode = Encoder.encode
    noise = np.random.default_rng(0)

    def noisy(self, texts, side="document", **options):  # as a transformer is, from batch to batch
        rows = encode(self, texts, side, **options)
        return rows if side == "query" else (rows + noise.normal(size=rows.shape) * 1e-6).astype(np.float32)

    monkeypatch.setattr(Encoder, "encode", noisy)
    monkeypatch.setattr("hce.index.writing.DOCUMENTS_AT_ONCE", 2)
    texts = ["w1", "w2", "w1", "w3", "w3", "w2"]
    with Index.create(tmp_path / "index", [Document(str(i), text) for i, text in enumerate(texts)], encoder) as index:
        rows = index.vectors()[1].tolist()
        assert rows[0] == rows[2] != rows[1] == rows[5]
        assert rows[3] == rows[4]


def test_an_update_encodes_what_changed_and_keeps_the_rest(index, planted_corpus, encoded):
    same, other = planted_corpus[0], planted_corpus[1]
    count = index.update(
        [
            Document(same.id, same.text, same.title, {"new": "metadata"}),
            Document(other.id, "w150 w151"),
            Document("fresh", "w152"),
        ]
    )
    assert count == 3
    assert encoded == ["w150 w151", "w152"]
    entries = {entry.document.id: entry for entry in index.state.entries()}
    assert entries[same.id].number == 1
    assert entries[same.id].document.metadata == {"new": "metadata"}
    assert entries[other.id].number == 241
    assert entries["fresh"].number == 242
    status = index.status()
    assert (status.documents, status.added, status.removed) == (241, 2, 1)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([Document("x", "t"), Document("star-red-0", "t")], "id 'star-red-0' is there already; --update"),
        ([Document("x", "t"), Document("y", "t"), Document("x", "u")], "number 3: id 'x' is already used at"),
        ([Document("x", "t"), Document("y", None)], "number 2"),
        ([Document("x", "t"), Document("", "t")], "number 2: no id"),
        ([Document("x", "t"), Document("y", "half \ud800")], "number 2: the text holds half a surrogate pair"),
        ([Document("x", "t"), {"id": "y"}], "number 2 of the documents is a dict"),
        ([Document("x", "t"), Document("y", "t", metadata={"a": {("b",): 1}})], "metadata of 'y'"),
    ],
)
def test_one_bad_document_rejects_the_batch(index, batch, message):
    before = index.status()
    with pytest.raises(InputError, match=message):
        index.add(batch)
    assert index.status() == before


def test_several_batches_go_in_together_or_not_at_all(index, tmp_path):
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    first.write_text('{"_id": "x", "text": "w1"}\n{"_id": "y", "text": "w2"}')
    second.write_text('{"_id": "z", "text": "w3"}\n{"_id": "y", "text": "w4"}')
    with pytest.raises(InputError, match="id 'y' comes twice"):
        index.add(Corpus.load(first), Corpus.load(second))
    assert len(index) == 240
    second.write_text('{"_id": "z", "text": "w3"}')
    assert index.add(Corpus.load(first), Corpus.load(second)) == 3


def test_nothing_and_emptiness(index):
    state = index.status()
    assert index.add([]) == index.update([]) == index.remove([]) == 0
    assert index.add() == 0
    assert index.status() == state
    with pytest.raises(InputError, match="neither text nor title; to delete it, use remove"):
        index.update([Document("star-red-0", ""), Document("x", "t")])
    assert index.add([Document("x", "t"), Document("empty", " ")]) == 1  # left out with a warning, as everywhere
    index.remove([document.id for document in index])
    assert len(index) == 0
    assert index.search("star") == []
    assert index.search(["star"], filter={"x": 1}) == [[]]
    index.rebuild()
    assert index.search("star") == []
    index.add([Document("again", "star")])
    assert [hit.id for hit in index.search("star")] == ["again"]


def test_removing(index):
    for ids in (["star-red-0", "nowhere", "neither"], ["nowhere", "neither", "star-red-0"]):
        with pytest.raises(InputError, match=r"no document 'nowhere' is there \(2 of 3 ids are not\); nothing was"):
            index.remove(ids)
    with pytest.raises(InputError, match="put the single id into a list"):
        index.remove("star-red-0")
    with pytest.raises(InputError, match="an id is a string, not a int"):
        index.remove([1])
    assert len(index) == 240
    assert index.remove(["star-red-0", "star-red-0"]) == 1
    assert index.get("star-red-0") is None


def test_filters_give_k_hits_if_there_are_k(index, encoder):
    index.add([Document(f"n{i}", f"w{i} w{i + 1}", metadata={"n": i, "odd": bool(i % 2)}) for i in range(60)])
    hits = index.search("star red", k=10, filter={"n": {"gte": 50}})  # all of them far down the ranking
    assert {hit.metadata["n"] for hit in hits} == set(range(50, 60))
    assert [hit.metadata["n"] for hit in index.search("w3", k=50, filter={"n": [3, 4, 1000]})] == [3, 4]
    assert len(index.search("w3", k=50, filter={"odd": True})) == 30
    assert len(index.search("w3", k=5, filter={"odd": True})) == 5
    assert index.search("w3", filter={"n": {"gt": 59}}) == []


# ------------------------------------------------------------------------------------------------- refusals


def test_another_encoder_is_refused(made, encoder, gtr_folder, tmp_path):
    other = Encoder.load(gtr_folder)
    with pytest.raises(InputError, match=r"holds vectors of the encoder tiny static .* index again"):
        Index.open(made, other)
    shutil.copytree(made, tmp_path / "index")
    shutil.rmtree(tmp_path / "index" / "encoder")
    other.save(tmp_path / "index" / "encoder")
    with Index.open(tmp_path / "index") as index:
        assert len(index) == 240
        with pytest.raises(FormatError, match="is not the encoder that made this index's vectors"):
            index.search("star")
        with pytest.raises(FormatError, match="is not the encoder that made this index's vectors"):
            index.add([Document("x", "star")])
        assert len(index) == 240


def test_the_encoder_is_loaded_when_needed_and_hashed_when_touched(made, tmp_path, encoder, monkeypatch):
    hashed = []
    fingerprint = Encoder.fingerprint.fget
    monkeypatch.setattr(Encoder, "fingerprint", property(lambda self: hashed.append(1) or fingerprint(self)))
    shutil.copytree(made, tmp_path / "index")  # with the times of its files
    with Index.open(tmp_path / "index") as index:
        index.status()
        index.get("star-red-0")
        index.remove(["star-red-0"])
        assert index.state.for_queries._encoder is None
        assert index.state.for_documents._encoder is None
        index.search("star")
        index.add([Document("x", "star")])
    assert hashed == []
    (tmp_path / "index" / "encoder" / "modules.json").touch()
    with Index.open(tmp_path / "index") as index:
        index.search("star")
    assert hashed == [1]


def test_a_later_training_of_the_given_encoder_does_not_reach_the_index(tmp_path, planted_corpus, static_encoder):
    with Index.create(tmp_path / "index", planted_corpus, static_encoder) as index:
        before = index.search("star red w3", mode="dense")
    with Index.create(tmp_path / "other", planted_corpus, static_encoder) as index:
        static_encoder.model[0].embedding.weight.data.mul_(-1).add_(0.3)
        assert index.search("star red w3", mode="dense") == before


def test_unreadable_folders_are_one_line(made, tmp_path):
    with pytest.raises(FormatError, match=r"nowhere: no index there \(manifest\.json"):
        Index.open(tmp_path / "nowhere")
    shutil.copytree(made, tmp_path / "index")
    manifest = tmp_path / "index" / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "format": content["format"] + 1}))
    with pytest.raises(FormatError, match="written by a newer version of hce; upgrade"):
        Index.open(tmp_path / "index")
    manifest.write_text(json.dumps({"format": 1}))
    with pytest.raises(FormatError, match="not an index, or a damaged one"):
        Index.open(tmp_path / "index")
    manifest.write_text(json.dumps(content))
    (tmp_path / "index" / "documents.sqlite").unlink()
    with pytest.raises(FormatError, match="incomplete"):
        Index.open(tmp_path / "index")


# ------------------------------------------------------------------------------------------------- the engine


def test_an_old_snapshot_is_caught_up_and_a_broken_one_replaced(index, encoder, monkeypatch, caplog):
    built = []
    new_engine = derived.new_engine
    monkeypatch.setattr(derived, "new_engine", lambda *a, **o: built.append(1) or new_engine(*a, **o))
    index.add([Document("x", "w190")])
    index.remove(["star-red-0"])
    assert index.status().pending == 2
    with Index.open(index.path, encoder) as other:
        assert other.search("w190", 1)[0].id == "x"
        assert len(other.search("star", 500)) == 240
    assert built == []
    (snapshot,) = (index.path / "engine").iterdir()
    for file in snapshot.iterdir():
        if file.name != "snapshot.json":
            file.write_bytes(b"broken")
    with Index.open(index.path, encoder) as other:
        assert other.search("w190", 1)[0].id == "x"
    assert built == [1]
    assert "damaged" in caplog.text
    shutil.rmtree(index.path / "engine")
    with Index.open(index.path, encoder) as other:
        assert other.status().pending == 240
        assert len(other.search("star", 500)) == 240


def test_a_snapshot_of_another_past_is_not_used(made, tmp_path, encoder):
    """As after restoring documents.sqlite from a copy: as many changes, but others."""
    for name, text in (("one", "w180"), ("two", "w181")):
        shutil.copytree(made, tmp_path / name)
        with Index.open(tmp_path / name, encoder) as index:
            index.add([Document(name, text)])
            index.rebuild()
    shutil.rmtree(tmp_path / "one" / "engine")
    shutil.copytree(tmp_path / "two" / "engine", tmp_path / "one" / "engine")
    with Index.open(tmp_path / "one", encoder) as index:
        assert index.search("w180", 1)[0].id == "one"


def test_a_snapshot_far_behind_is_written_anew(index, encoder, monkeypatch):
    monkeypatch.setattr(derived, "ROWS_BEHIND", 10)
    (first,) = (index.path / "engine").iterdir()
    (index.path / "engine" / ".000000000000.0123abcd.partial").mkdir()  # left by a crash
    index.add([Document(f"x{i}", f"w{i}") for i in range(30)])
    index.search("star")
    (second,) = (index.path / "engine").iterdir()
    assert second.name > first.name
    assert index.status().pending == 0
    with index.state.store.writing() as writer:  # somebody writes: the search goes on without a new snapshot
        writer.delete([1])
        index.state.derived.engine_part._behind = 1000
        assert len(index.search("star", 300)) == 270
    assert (index.path / "engine").iterdir().__next__() == second


@pytest.mark.parametrize("engine", ["flat", "tree", "hnsw"])
def test_an_index_of_an_engine_that_is_no_more(index, encoder, caplog, engine):
    chosen = "codes"
    expected = [hit.id for hit in index.search("star red w3", 5)]
    Manifest(**{**vars(Manifest.read(index.path)), "engine": engine}).write(index.path)
    (snapshot,) = (index.path / "engine").iterdir()
    label = {**read_json(snapshot / "snapshot.json"), "engine": engine}
    del label["checksum"]
    write_json(snapshot / "snapshot.json", sealed(label))
    with Index.open(index.path, encoder) as opened:
        assert [hit.id for hit in opened.search("star red w3", 5)] == expected
        assert (opened.status().engine, opened.status().pending) == (chosen, 240)
        (line,) = caplog.messages
        assert f"the engine {engine}, which no longer exists; {chosen} is used instead" in line
        assert f"'hce rebuild {index.path} --engine {chosen}'" in line
        opened.rebuild()
        assert (opened.status().engine, opened.status().pending) == (chosen, 0)
    with Index.open(index.path, encoder) as opened:
        assert opened.state.manifest.engine == chosen
        assert [hit.id for hit in opened.search("star red w3", 5)] == expected
    assert len(caplog.messages) == 1


def test_rebuilding_grows_the_tree_of_what_is_there(index, encoder, planted_corpus):
    index.rebuild()
    assert index.state.manifest.hierarchy == "hierarchy"  # nothing has changed, and the trained tree is kept
    index.remove([document.id for document in planted_corpus[:100]])
    index.add([Document(f"x{i}", f"w{i} w{i + 1}") for i in range(50)])
    assert len(index.tree.numbers) == 240  # as it was, until someone rebuilds
    with Index.open(index.path, encoder) as other:
        expected = index.search("w7 star", 12, mode="dense")
        index.rebuild(engine="exact")
        found = other.search("w7 star", 12, mode="dense")
        assert [hit._replace(path=()) for hit in found] == [hit._replace(path=()) for hit in expected]
        place = other.tree.numbers.tolist().index(found[0].number)
        assert found[0].path[-1].node == other.tree.hierarchy.document_parent[place]
        assert len(other.tree.hierarchy) == 190  # read after the old one was gone
    numbers = index.vectors()[0]
    np.testing.assert_array_equal(index.tree.numbers, numbers)
    assert numbers.tolist() == [*range(101, 241), *range(241, 291)]
    assert [path.name for path in index.path.glob("hierarchy*")] == [index.state.manifest.hierarchy]
    with Index.open(index.path, encoder) as again:
        assert again.state.manifest == index.state.manifest
        assert again.state.manifest.engine == "exact"
        np.testing.assert_allclose(
            [hit.score for hit in again.search("w7 star", 12, mode="dense")], [hit.score for hit in expected], atol=2e-3
        )
        assert again.state.manifest.documents == 240  # who was there at creation is still known
        assert (again.status().added, again.status().removed) == (50, 100)
    with pytest.raises(InputError, match="choose one of codes"):
        index.rebuild(engine="quantum")


def test_status_says_what_there_is(index, encoder):
    status = index.status()
    assert status.documents == 240
    assert (status.added, status.removed, status.pending) == (0, 0, 0)
    assert status.fingerprint == encoder.fingerprint
    assert (status.encoder, status.dim, status.engine, status.recall) == ("tiny static", 32, "codes", None)
    assert status.tree_levels == 3
    assert status.bytes == sum(path.stat().st_size for path in index.path.rglob("*") if path.is_file())
    assert json.loads(json.dumps(status.as_dict()))["format"] == 2


# ------------------------------------------------------------------------------------------------- at the same time


def test_readers_pick_up_what_another_process_wrote(index, encoder):
    code = """
import sys
from hce.data.text import Document
from hce.index.index import Index
with Index.open(sys.argv[1]) as index:
    index.add([Document("theirs", "w170 w171")])
    index.remove(["star-red-0"])
"""
    assert index.search("w170 w171", 1)[0].id != "theirs"
    held = iter(index)
    first = next(held)
    subprocess.run([sys.executable, "-c", code, str(index.path)], check=True)
    assert index.search("w170 w171", 1)[0].id == "theirs"
    assert "star-red-0" not in index
    assert [first.id, *(document.id for document in held)].count("star-red-0") == 1  # an iteration sees one moment


def test_a_second_writer_gets_a_clear_line(index, encoder, monkeypatch):
    monkeypatch.setattr("hce.index.store.SECONDS_TO_WAIT", 0.1)
    with Index.open(index.path, encoder) as other, index.state.store.writing():
        for work in (lambda: other.add([Document("x", "t")]), lambda: other.remove(["star-red-0"]), other.rebuild):
            with pytest.raises(InputError, match="another process is writing to this index"):
                work()
        assert len(other.search("star", 3)) == 3  # readers are not kept waiting


def test_searching_from_many_threads_while_one_writes(index, encoder):
    failures, stop = [], threading.Event()
    own = [Document(f"own{i}", f"w{100 + i} w{140 + i}") for i in range(20)]

    def look() -> None:
        try:
            while not stop.is_set():
                hits = index.search("w100 w140 star", 250)
                ids = [hit.id for hit in hits]
                assert len(set(ids)) == len(ids) >= 240
                assert all(hit.text for hit in hits)
                assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        for document in own:
            index.add([document])
        index.remove([document.id for document in own[:10]])
        index.rebuild()
        index.remove([document.id for document in own[10:]])
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(index.search("star", 1000)) == 240


# ------------------------------------------------------------------------------------------------- hard to hurt


def ids_of(hits: list[hce.Hit]) -> list[str]:
    return [hit.id for hit in hits]


def forked(work) -> tuple[int, int]:
    """Do some work in a forked process; return its number, and the end of a pipe that says what it returned."""
    listen, say = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a child that waits for ever is killed
        try:
            answer = work()
        except BaseException as error:
            answer = repr(error)
        os.write(say, json.dumps(answer).encode())
        sys.stdout.flush()
        os._exit(0)
    os.close(say)
    return child, listen


def answer_of(child: int, listen: int):
    os.waitpid(child, 0)
    with os.fdopen(listen) as pipe:
        return json.loads(pipe.read())


def test_a_forked_process_adds_and_searches_on_its_own(index, encoder):
    index.add([Document("before", "w170 w171")])
    assert index.search("w170 w171", 1)[0].id == "before"  # the words are a private copy from now on
    go, gone = os.pipe()

    def work():
        os.read(go, 1)
        count = index.add([Document("child's", "w180 w181")])
        found = [ids_of(index.search(text, 1, mode="words")) for text in ("w180 w181", "w170 w171")]
        del index.state.derived.words_part._held
        return [count, *found]

    child, listen = forked(work)
    index.add([Document("parent's", "w190 w191")])
    assert ids_of(index.search("w190 w191", 1, mode="words")) == ["parent's"]
    os.write(gone, b"!")
    assert answer_of(child, listen) == [1, ["child's"], ["before"]]
    assert ids_of(index.search("w180 w181", 1)) == ["child's"]
    index.add([Document("last", "w185 w186")])  # in the private copy, which the child has not deleted
    assert ids_of(index.search("w185 w186", 1, mode="words")) == ["last"]
    assert len(index.search("w170 w180 w185 w190", 10, mode="words")) >= 4
    index.close()
    with Index.open(index.path, encoder) as again:
        assert len(again) == 244


def test_a_process_forked_while_others_search_does_not_wait_for_them(index):
    index.search("star", 1)
    with (
        index.state.derived.words_part._lock.alone(),
        index.state.derived.engine_part._lock.alone(),
        index.state.for_queries._lock,
    ):
        child, listen = forked(lambda: ids_of(index.search("star red", 3)))
        found = answer_of(child, listen)
    assert found == ids_of(index.search("star red", 3))


def test_a_replaced_folder_is_neither_written_to_nor_read(index, made):
    index.search("star", 1)
    shutil.rmtree(index.path)
    shutil.copytree(made, index.path)
    works = (lambda: index.add([Document("x", "t")]), lambda: index.remove(["star-red-0"]), index.rebuild)
    for work in (*works, lambda: index.search("star"), index.status):
        with pytest.raises(InputError, match="was replaced by another one since it was opened; open it again"):
            work()


@pytest.mark.parametrize("file", ["numbers.npy", "hierarchy.safetensors", "labels.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["empty", "cut", "missing"])
@pytest.mark.parametrize("engine", ["codes", "exact"])
def test_a_damaged_tree_is_grown_again(index, encoder, caplog, file, damage, engine):
    if (file, damage) == ("labels.json", "missing"):
        return  # the names are a part that a tree may be without
    path = index.path / "hierarchy" / file
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: 0 if damage == "empty" else path.stat().st_size // 2])
    with Index.open(index.path, encoder) as opened:
        status = opened.status()
        assert status.tree_levels == 0
        assert "'hce rebuild " in caplog.messages[0]
        assert opened.drift().verdict == "unknown"
        opened.rebuild(engine=engine)
        assert (opened.status().tree_levels, opened.status().pending) == (3, 0)
        assert opened.tree.hierarchy.names is not None
        np.testing.assert_array_equal(opened.tree.numbers, opened.vectors()[0])
    with Index.open(index.path, encoder) as opened:
        assert len(opened.tree.hierarchy) == 240
        assert len(opened.search("star red", 5)) == 5


def test_all_of_a_tree_is_on_disk_before_the_manifest_names_it(index, monkeypatch):
    synced, fsync, written = set(), os.fsync, []

    def remember(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def write(self, folder, write=Manifest.write):
        tree = folder / self.hierarchy
        written.append({path.name: path.stat().st_ino in synced for path in [tree, *tree.iterdir()]})
        write(self, folder)

    monkeypatch.setattr(os, "fsync", remember)
    monkeypatch.setattr(Manifest, "write", write)
    index.remove(["star-red-0"])
    index.rebuild()
    assert all(written[0].values())
    assert {"hierarchy-2", "numbers.npy", "hierarchy.safetensors", "labels.json", "manifest.json"} <= written[0].keys()


def test_a_handle_from_before_a_rebuild_does_not_bring_the_old_engine_back(index, encoder, monkeypatch):
    monkeypatch.setattr(derived, "ROWS_BEHIND", 2)
    monkeypatch.setattr(derived, "SHARE_BEHIND", 0)
    with Index.open(index.path, encoder) as old:
        old.search("star", 1)
        index.rebuild(engine="exact")
        old.add([Document(f"x{i}", f"w{i} w{i + 1}") for i in range(5)])
        assert len(old.search("star", 300, mode="dense")) == 245
    (snapshot,) = (index.path / "engine").iterdir()
    saved = read_json(snapshot / "snapshot.json")
    assert saved["engine"] == "exact"
    with Index.open(index.path, encoder) as again:
        assert again.status().pending == 5
        again.search("star", 1)  # who has the engine that the index names goes on writing it
        assert again.status().pending == 0


def test_status_beside_rebuilds(index, encoder):
    failures, stop = [], threading.Event()

    def look() -> None:
        try:
            while not stop.is_set():
                with Index.open(index.path, encoder) as opened:
                    for _ in range(3):
                        assert opened.status().tree_levels == 3
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(5):
        index.update([Document("changing", f"w{number}")])
        index.rebuild()
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []


def test_words_that_another_process_has_replaced_meanwhile_are_read_anew(index, encoder):
    with Index.open(index.path, encoder) as other:
        other.search("star", 1)  # by the snapshot that is there
        index.add([Document("x", "w170 w171")])
        index.rebuild()  # which is gone now
        index.add([Document("y", "w180 w181")])
        assert ids_of(other.search("w170 w171", 1, mode="words")) == ["x"]
        assert ids_of(other.search("w180 w181", 1, mode="words")) == ["y"]
        assert len(other.search("star", 300)) == 242


def test_words_that_can_never_be_added_are_told_of_and_not_tried_for_ever(index, monkeypatch):
    tries = []

    def fail(*_: object) -> int:
        tries.append(1)
        if len(tries) > 20:
            pytest.fail("it is tried again and again")
        raise FormatError("the index of words is damaged")

    index.search("star", 1)
    index.add([Document("x", "w170 w171")])
    with monkeypatch.context() as patched:
        patched.setattr(derived.WordsPart, "_add", fail)
        with pytest.raises(FormatError, match="the index of words is damaged"):
            index.search("w170", 1, mode="words")
    assert len(tries) == 2  # with what was held, and with what is on disk
    assert ids_of(index.search("w170", 1, mode="words")) == ["x"]  # nobody waits for a lock


def test_a_rebuild_forgets_what_nobody_needs(index, encoder):
    for number in range(20):
        index.update([Document("changing", f"w{number}")])
    index.remove(["star-red-0", "star-red-1"])
    before = index.status()
    with Index.open(index.path, encoder) as other:
        assert len(other.search("star", 300)) == 239
        tree = other.tree
        index.remove(["star-red-2", "changing"])
        index.rebuild()
        assert len(other.search("star", 300)) == 237  # though nobody says any more what was removed since
        index.remove(["star-red-3"])
        assert len(other.search("star", 300)) == 236
        with other.state.reading() as reader:
            places = Places.now(tree, reader)
            assert sorted(places.numbers.tolist()) == reader.numbers().tolist() == other.vectors()[0].tolist()
    queries = ("SELECT count(*) FROM changes", "SELECT count(*) FROM removed")
    with closing(sqlite3.connect(index.path / "documents.sqlite")) as connection:
        counts = [connection.execute(query).fetchone()[0] for query in queries]
    assert counts == [2, 5]  # of the 24 changes the last two; of the 24 removed those of the first 240, and the last
    status = index.status()
    assert (before.removed, status.removed) == (2, 4)
    assert (before.added, status.added) == (1, 0)


DESCRIPTORS = Path("/proc/self/fd")


@pytest.mark.skipif(not DESCRIPTORS.is_dir(), reason="needs Linux's list of open files")
def test_indexes_that_nobody_closed_leave_no_descriptors(index, encoder):
    gc.collect()
    gc.disable()
    try:
        counts = []
        for _ in range(6):
            opened = Index.open(index.path, encoder)
            opened.search("star", 1)
            opened.status()
            del opened
            counts.append(len(list(DESCRIPTORS.iterdir())))
        assert min(counts[3:]) <= min(counts[:3])  # a thread of tantivy's may hold one a moment longer
    finally:
        gc.enable()


READING = """
import logging, os, sys
from hce.index.index import Index
from hce.errors import HceError
import hce.search.engine
import numpy.ma  # NumPy imports it late, when the user below may not be allowed to read it
logging.basicConfig(stream=sys.stdout, level=logging.WARNING)
with Index.open(sys.argv[1]) as index:
    index.encoder
if os.geteuid() == 0:
    os.setuid(65534)  # root may write anywhere
with Index.open(sys.argv[1]) as index:
    for mode in ("words", "dense", "hybrid"):
        print(*(hit.id for hit in index.search("star red w3", 3, mode=mode)))
    print(index.status().documents, index.status().tree_levels, index.status().pending)
    try:
        index.remove(["star-red-0"])
    except HceError as error:
        print(error)
"""


def test_who_may_not_write_searches(index):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "index"
        Path(name).chmod(0o755)
        expected = [
            " ".join(ids_of(index.search("star red w3", 3, mode=mode))) for mode in ("words", "dense", "hybrid")
        ]
        index.close()
        shutil.copytree(index.path, folder)
        everything = [folder, *folder.rglob("*")]
        assert all(path.stat().st_mode & 0o044 == 0o044 for path in everything)  # as the umask has it
        for path in everything:
            path.chmod(path.stat().st_mode & ~0o222)
        run = subprocess.run([sys.executable, "-c", READING, str(folder)], capture_output=True, text=True, check=False)
        for path in everything:
            path.chmod(path.stat().st_mode | 0o200)
    *lines, last = run.stdout.splitlines()
    assert lines == [*expected, "240 3 0"], run.stdout + run.stderr
    assert last.startswith(f"{folder}: attempt to write a readonly database; nothing was changed")
