"""The ranking before training: ranks by hand, vectors kept by number, a thread that can be stopped at any time."""

from __future__ import annotations

import json
import sqlite3
import time
from threading import Event

import numpy as np
import pytest

from hce.data.text import Document
from hce.encoding.encoder import Encoder
from hce.index import background
from hce.index.background import Ranking, Untrained, VectorsByContent, Worker
from hce.index.index import Index
from hce.index.tables import STORE_FILE


def test_ranks_by_hand():
    scores = np.array([0.1, 0.9, 0.5, 0.9])
    ranking = Ranking(np.array([3, 4, 8, 9]), scores, np.argsort(-scores, kind="stable"))
    assert ranking.first(2) == [(4, 0.9), (9, 0.9)]  # equal scores in order of number
    assert ranking.ranks_of(np.array([9, 3, 5, 100, 8, -1])) == [2, 4, None, None, 3, None]
    assert ranking.ranks_of(np.empty(0, np.int64)) == []


def test_vectors_are_those_of_one_encoder(tmp_path, static_encoder, bert_folder):
    path = tmp_path / "vectors.safetensors"
    assert len(VectorsByContent.read(path, static_encoder).contents) == 0
    known = VectorsByContent(np.array([3, -1, 9]), static_encoder.encode(["star", "cell", "law"]))
    known.write(path, static_encoder)
    read = VectorsByContent.read(path, static_encoder)
    assert read.contents.tolist() == [3, -1, 9]
    np.testing.assert_array_equal(read.vectors, known.vectors)
    assert VectorsByContent.read(path, Encoder.load(bert_folder, device="cpu")).vectors.shape == (0, 32)
    known.write(tmp_path / "no" / "folder", static_encoder)  # which is no error


@pytest.fixture
def index(tmp_path, planted_corpus, static_encoder):
    """An index of a model that was trained from the encoder in `start`."""
    static_encoder.save(tmp_path / "start")
    static_encoder.model[0].embedding.weight.data[:, 0] *= 3  # what training did
    static_encoder.save(tmp_path / "model")
    corpus = {"name": "planted", "documents": 240, "fingerprint": planted_corpus.fingerprint}
    known = {"encoder": str(tmp_path / "start"), "fingerprint": static_encoder.fingerprint, "corpus": corpus}
    measured = {"metric": "NDCG@10", "before": {"titles": 0.5}, "after": {"titles": 0.6}, "mix": 1.0}
    measured |= {"held_out": [], "shares": [1.0], "words_share": None, "stages": {}}
    facts = {"format": 1, "hce": "0.2.0", "static": True, "recipe": {"mode": "unsupervised"}, **known, **measured}
    (tmp_path / "model" / "hce.json").write_text(json.dumps(facts))
    with Index.create(tmp_path / "index", planted_corpus, tmp_path / "model") as made:
        yield made


def until_ready(untrained: Untrained) -> None:
    for _ in range(2000):
        if untrained.readiness().state == "ready":
            return
        time.sleep(0.01)
    raise AssertionError(untrained.readiness())


def test_it_ranks_as_the_first_encoder_and_encodes_nothing_twice(index, tmp_path, planted_corpus, monkeypatch):
    untrained = Untrained(index)
    assert untrained.readiness().state == "off"  # until someone starts it
    untrained.start()
    untrained.start()
    until_ready(untrained)
    start = Encoder.load(tmp_path / "start")
    scores = start.encode(list(planted_corpus.texts())) @ start.encode(["star red w3"], "query")[0]
    expected = (np.argsort(-scores, kind="stable") + 1).tolist()
    assert [number for number, _ in untrained.rank("star red w3").first(240)] == expected
    encoded, encode = [], Encoder.encode
    monkeypatch.setattr(Encoder, "encode", lambda *a, **o: encoded.extend(a[1]) or encode(*a, **o))
    index.add([Document("new", "w7", metadata={"year": 2000})])
    index.remove(["star-red-0"])
    encoded.clear()
    until_ready(untrained)
    assert encoded == ["w7"]
    ranking = untrained.rank("star red w3")
    assert ranking.ranks_of(np.array([1, 241]))[0] is None
    assert untrained.rank("star", {"year": 2000}).first(5)[0][0] == 241
    untrained.stop()
    encoded.clear()
    another = Untrained(index)
    another.start()
    until_ready(another)
    assert encoded == []
    another.stop()


def test_what_is_encoded_by_the_end_is_kept(index, monkeypatch):
    monkeypatch.setattr(background, "DOCUMENTS_AT_ONCE", 10)
    untrained, encode, calls, third = Untrained(index), Encoder.encode, [], Event()

    def slow(self, texts, *arguments, **options):
        calls.append(len(texts))
        if len(calls) == 3:
            third.set()
            untrained._worker._stopping.wait(10)
        return encode(self, texts, *arguments, **options)

    monkeypatch.setattr(Encoder, "encode", slow)
    untrained.start()
    assert third.wait(10)
    untrained.stop()
    assert calls == [10, 10, 10]
    monkeypatch.undo()
    kept = VectorsByContent.read(
        index.path / background.UNTRAINED_FILE, Encoder.load(index.state.manifest.base_encoder)
    )
    with index.state.reading() as reader:
        assert set(kept.contents.tolist()) == set(reader.contents()[1][:30].tolist())
    untrained.start()  # it was stopped, and stays so
    assert untrained.readiness().state == "preparing"


def test_a_worker_works_when_woken_and_ends_when_stopped():
    done, calls = Event(), []

    def work():
        calls.append(1)
        done.set()

    worker = Worker(work, "test")
    worker.stop()  # never started: nothing to wait for
    worker = Worker(work, "test")
    worker.start()
    for count in (1, 2):
        worker.wake()
        assert done.wait(10)
        done.clear()
        assert len(calls) == count
    worker.stop()
    assert not worker.is_alive()
    assert len(calls) == 2


def test_vectors_of_texts_that_are_gone_are_dropped_and_equal_texts_share_one(index):
    index.add([Document("x", "w1 w2"), Document("y", "w3"), Document("z", "w3")])
    index.remove(["x"])
    untrained = Untrained(index)
    untrained.start()
    until_ready(untrained)
    index.remove(["y", "star-red-0"])
    until_ready(untrained)
    untrained.stop()
    with index.state.reading() as reader:
        numbers, contents = reader.contents()
    prepared = untrained._prepared
    assert prepared.numbers.tolist() == numbers.tolist() == [*range(2, 241), 243]
    assert len(prepared.known.vectors) == len(set(contents.tolist()))
    expected = prepared.encoder.encode(["w3"])
    np.testing.assert_allclose(prepared.known.vectors[prepared.rows[-1:]], expected, atol=1e-6)


def test_vectors_that_are_not_of_the_stores_texts_are_made_anew(index):
    """Numbers that were given once more, after an older copy of the store was restored."""
    with sqlite3.connect(index.path / STORE_FILE) as store, sqlite3.connect(index.path / "older") as older:
        store.backup(older)
    index.add([Document("x", "star"), Document("y", "cell"), Document("z", "w7")])
    untrained = Untrained(index)
    untrained.start()
    until_ready(untrained)
    untrained.stop()
    index.close()
    for file in index.path.glob(f"{STORE_FILE}*"):
        file.unlink()
    (index.path / "older").rename(index.path / STORE_FILE)
    with Index.open(index.path) as restored:
        restored.add([Document("u", "w3"), Document("v", "cell"), Document("w", "law")])  # 242 is what it was
        again = Untrained(restored)
        again.start()
        until_ready(again)
        again.stop()
        start = Encoder.load(index.state.manifest.base_encoder)
        prepared = again._prepared
        assert prepared.numbers.tolist() == list(range(1, 244))
        expected = start.encode(["w3", "cell", "law"])
        np.testing.assert_allclose(prepared.known.vectors[prepared.rows[240:]], expected, atol=1e-6)
