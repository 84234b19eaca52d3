"""Reindexing: another encoder while the index is searched and written to, at one stroke, whatever comes in between."""

from __future__ import annotations

import os
import re
import shutil
import threading

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from hce.data.text import Document
from hce.encoding.encoder import Encoder
from hce.errors import FormatError, InputError
from hce.files import held_alone
from hce.index import create as module
from hce.index.check import check
from hce.index.index import Index
from hce.index.manifest import Manifest
from hce.index.state import ReindexedError
from hce.index.store import Store
from hce.index.tables import Writer
from hce.web.app import create_app

TOPICS = ("ships and harbours at sea", "stars and planets by night", "bread and cheese for supper", "laws of the court")
QUERIES = ["planets at night", "a court of law", "number 17 supper", "sea"]
MODES = ("dense", "hybrid", "words")
BOOK = Document("book", " ".join(f"{TOPICS[i % 3]} and so on {i}." for i in range(200)))


def documents(count, first=0):
    return [
        Document(f"d{i}", f"{TOPICS[i % 4]} number {i} beside {TOPICS[(i + i // 4) % 4]}", metadata={"n": i})
        for i in range(first, first + count)
    ]


def table(dim, seed):
    """A random token table that knows the words of these documents."""
    words = ["[UNK]", *sorted(set(re.findall(r"\w+", " ".join(TOPICS))) | set(map(str, range(300))) | {"number"})]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    weights = np.random.default_rng(seed).normal(size=(len(words), dim)).astype(np.float32)
    static = StaticEmbedding(tokenizer, embedding_weights=weights)
    model = SentenceTransformer(modules=[static, Normalize()], device="cpu")
    return Encoder(model, f"table {seed}", device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="module")
def old():
    return table(16, 1)


@pytest.fixture(scope="module")
def new(tmp_path_factory):
    """Another encoder, of other dimensions, as a folder."""
    folder = tmp_path_factory.mktemp("new") / "model"
    table(24, 2).save(folder)
    return folder


@pytest.fixture
def made(tmp_path, old):
    with Index.create(tmp_path / "index", [*documents(40), BOOK], old, "grow"):
        return tmp_path / "index"


def hits_of(index, modes=MODES):
    return {
        mode: [[(hit.id, round(hit.score, 4)) for hit in row] for row in index.search(QUERIES, 5, mode=mode)]
        for mode in modes
    }


def by_meaning(index):
    """Hits whose scores do not depend on what words documents had that are gone, as BM25's do until a rebuild."""
    return hits_of(index, ["dense"])["dense"]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory, new):
    """What an index finds that was made with the new encoder at once, of 40 documents and the book."""
    with Index.create(tmp_path_factory.mktemp("fresh") / "index", [*documents(40), BOOK], new, "grow") as index:
        return hits_of(index)


def test_all_that_have_the_index_open_take_the_new_encoder_up(made, new, fresh):
    with Index.open(made) as index, Index.open(made) as other, Index.open(made) as idle:
        before, vectors = hits_of(other), other.state.encode_queries(QUERIES)
        fingerprint = other.state.present_encoder().fingerprint
        assert before != fresh
        assert index.reindex(new)
        assert not index.reindex(new)  # it has it already
        with pytest.raises(ReindexedError, match="another encoder now"):
            other.state.search(QUERIES, vectors, 5, None, "dense", fingerprint)
        with Index.open(made) as reopened:
            for each in (index, other, idle, reopened):
                assert hits_of(each) == fresh
                assert each.vectors()[1].shape == (41, 24)
                assert each.status().dim == 24
        assert index.tree is not None
        assert index.tree.hierarchy.levels[0].centroids.shape[1] == 24
        idle.add(documents(1, 100))
        expected = index.encoder.encode([documents(1, 100)[0].full_text])[0]
        np.testing.assert_allclose(other.vectors()[1][-1], expected, atol=1e-6)
        assert other.status().earlier == "table 1"
    assert check(made).is_sound


def test_it_can_be_undone_until_a_rebuild(made, new, fresh):
    with Index.open(made) as index, Index.open(made) as other:
        before, kept = hits_of(index), index.state.manifest
        index.reindex(new)
        other.add(documents(5, 100))
        other.remove(["d3"])
        index.undo_reindex()
        assert index.state.manifest.fingerprint == kept.fingerprint
        assert other.vectors()[1].shape == (45, 16)  # the later ones were encoded, the removed one stays away
        other.remove([f"d{i}" for i in range(100, 105)])
        other.add(documents(1, 3))
        assert by_meaning(other) == before["dense"]
        index.undo_reindex()  # which takes the new one up again
        assert by_meaning(other) == fresh["dense"]
        assert other.state.manifest.dim == 24
        index.rebuild()
        with pytest.raises(InputError, match="no earlier encoder is kept here"):
            index.undo_reindex()
        assert by_meaning(other) == fresh["dense"]
    assert {path.name for path in made.iterdir()} == {
        *("manifest.json", "documents.sqlite"),
        *(f"{kind}{Manifest.read(made).suffix}" for kind in ("encoder", "engine", "passages", "words")),
        *(path.name for path in made.glob("documents.sqlite-*")),
        str(Manifest.read(made).hierarchy),
    }
    assert check(made).is_sound


class Meanwhile:
    """Threads that add, update and remove documents, and search, from before a reindexing until after its end."""

    def __init__(self, path):
        self.path = path
        self.done, self.errors, self.added, self.removed = threading.Event(), [], [], []

    def __enter__(self):
        self.threads = [threading.Thread(target=self.noting, args=(work,)) for work in (self.write, self.search)]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *exception):
        self.done.set()
        for thread in self.threads:
            thread.join()

    def noting(self, work):
        try:
            work()
        except BaseException as error:
            self.errors.append(error)

    def write(self):
        with Index.open(self.path) as index:
            for i in range(60):
                if self.done.is_set() and i > 20:
                    return
                index.add(documents(1, 1000 + i))
                self.added.append(f"d{1000 + i}")
                if i < 30:
                    index.remove([f"d{i}"])
                    self.removed.append(f"d{i}")
                if i == 5:
                    index.update([Document("d39", "bread and cheese number 39 anew")])

    def search(self):
        with Index.open(self.path) as index:
            while not self.done.is_set():
                assert all(len(row) == 5 for row in index.search(QUERIES, 5))


def test_what_is_written_meanwhile_is_there_afterwards(made, new, monkeypatch):
    monkeypatch.setattr(module, "ENCODED_AT_ONCE", 8)
    with Meanwhile(made) as others, Index.open(made) as index:
        index.reindex(new)
    assert not others.errors
    with Index.open(made) as index:
        there = {document.id for document in index}
        assert there == ({f"d{i}" for i in range(40)} | {"book"} | set(others.added)) - set(others.removed)
        texts = [entry.document.full_text for entry in index.state.entries()]
        np.testing.assert_allclose(index.vectors()[1], index.encoder.encode(texts), atol=1e-5)
        assert index.search("bread and cheese number 39 anew", 1, mode="dense")[0].id == "d39"
    assert check(made).findings == ()


def test_a_running_server_takes_the_new_encoder_up(made, new, fresh):
    with Index.open(made) as served, TestClient(create_app(served), base_url="http://127.0.0.1") as client:

        def found():
            answers = [client.get("/api/search", params={"q": query, "k": 5, "mode": "dense"}) for query in QUERIES]
            return [[(hit["id"], round(hit["score"], 4)) for hit in answer.json()["hits"]] for answer in answers]

        before = found()
        with Index.open(made) as other:
            other.reindex(new)
        assert found() == fresh["dense"] != before
        assert client.get("/api/status").json()["index"]["dim"] == 24
        assert client.get("/api/tree/path", params={"q": "planets"}).status_code == 200
        assert client.post("/api/documents", json={"documents": [{"id": "x", "text": "stars"}]}).status_code == 201


# ------------------------------------------------------------------------------------------------- kill -9

BEFORE = ("room", "encoder", "encoding", "growing", "snapshots", "manifest", "swapped")
AFTER = ("decided",)


def die(*arguments, **options):
    os.kill(os.getpid(), 9)


def after(count, function):
    """Do as a function does so many times, and then die."""
    calls = []

    def counting(*arguments, **options):
        calls.append(1)
        if len(calls) > count:
            die()
        return function(*arguments, **options)

    return counting


def killed_reindexing(path, encoder, where):
    """Begin to reindex in a process of its own, and be killed at some point."""
    module.ENCODED_AT_ONCE = 8
    swap, switch = Writer.swap_standby, module._Reindexing._switch
    places = {
        "room": (Encoder, "save", die),
        "encoder": (module._Reindexing, "finish", die),
        "encoding": (Writer, "fill_standby", after(2, Writer.fill_standby)),
        "growing": (module, "grow_tree", die),
        "snapshots": (module._Reindexing, "_switch", die),
        "manifest": (Writer, "swap_standby", die),
        "swapped": (Writer, "swap_standby", lambda *arguments: (swap(*arguments), die())),
        "decided": (module._Reindexing, "_switch", lambda *given, **options: (switch(*given, **options), die())),
    }
    setattr(*places[where])
    with Index.open(path) as index:
        index.reindex(encoder)


@pytest.mark.parametrize("where", [*BEFORE, *AFTER])
def test_kill_9_leaves_the_old_or_the_new_and_the_same_call_goes_on(made, new, fresh, forkserver, monkeypatch, where):
    with Index.open(made) as index:
        before = hits_of(index)
    process = forkserver.Process(target=killed_reindexing, args=(made, new, where))
    process.start()
    process.join()
    assert process.exitcode == -9
    monkeypatch.setattr(module, "ENCODED_AT_ONCE", 8)
    encoded = []
    fill = Writer.fill_standby
    monkeypatch.setattr(Writer, "fill_standby", lambda *each: (encoded.extend(each[1]), fill(*each)))
    with Index.open(made) as index:
        assert hits_of(index) == (fresh if where in AFTER else before)
        assert check(made).is_sound
        index.add(documents(1, 200))
        index.reindex(new)
        index.remove(["d200"])
        assert by_meaning(index) == fresh["dense"]
    expected = {"encoding": 41 + 1 - 16, "room": 42, "encoder": 42, "decided": 0}.get(where, 1)
    assert len(encoded) == expected  # what was encoded before the kill is not encoded again
    assert Manifest.read(made).switch is None
    assert check(made).is_sound


def test_only_one_process_reindexes_at_a_time(made, new):
    with (
        Index.open(made) as index,
        held_alone(made, "held"),
        pytest.raises(InputError, match="another process is reindexing it; wait until it is done"),
    ):
        index.reindex(new)


def test_shares_are_calibrated_as_a_new_index_calibrates_them(tmp_path, old, new):
    """A share that the user gives is taken instead, also by an encoder that was there before."""
    texts = [Document(f"d{i}", f"{TOPICS[i % 4]} number {i}. {TOPICS[(i + i // 4) % 4]} again {i}.") for i in range(60)]
    with Index.create(tmp_path / "fresh", texts, new) as index:
        expected = index.state.manifest
    with Index.create(tmp_path / "index", texts, old) as index:
        index.reindex(new)
        found = index.state.manifest
        assert found.shares["kind"] == "cut" and found.shares == expected.shares
        assert (found.words_share, found.tokens_share) == (expected.words_share, expected.tokens_share)
        index.reindex(old, words_share=0.7)
        assert (index.state.manifest.words_share, index.state.manifest.shares) == (0.7, None)


def test_what_cannot_be_is_refused_and_changes_nothing(made, tmp_path, old):
    before = (made / "manifest.json").read_bytes()
    with Index.open(made) as index:
        with pytest.raises(InputError, match="no encoder 'nowhere'"):
            index.reindex("nowhere")
        with pytest.raises(InputError, match="words_share 2"):
            index.reindex("static", words_share=2)
        with pytest.raises(InputError, match="no earlier encoder is kept here"):
            index.undo_reindex()
    assert (made / "manifest.json").read_bytes() == before
    with Index.create(tmp_path / "empty", documents(1), old) as index:
        index.remove(["d0"])
        with pytest.raises(InputError, match="has no documents"):
            index.reindex("static")


def test_another_encoder_than_the_one_begun_with(made, new, tmp_path, forkserver, fresh):
    table(8, 3).save(tmp_path / "third")
    process = forkserver.Process(target=killed_reindexing, args=(made, tmp_path / "third", "growing"))
    process.start()
    process.join()
    with Index.open(made) as index:
        assert index.status().reindexing == str(tmp_path / "third")
        index.rebuild()  # which leaves what was begun
        assert index.status().reindexing == str(tmp_path / "third")
        index.reindex(new)
        assert hits_of(index) == fresh
        assert len(list(made.glob("encoder*"))) == 2  # the earlier one and this one
    assert check(made).is_sound


def test_a_rebuild_does_not_take_away_what_another_process_is_taking_up(made, new):
    with Index.open(made) as index:
        index.reindex(new)
        with held_alone(made, "held"), pytest.raises(InputError, match="another process is reindexing it"):
            index.rebuild()
        index.undo_reindex()
        assert index.state.manifest.dim == 16


@pytest.mark.parametrize("dim", [16, 24])
def test_documents_from_before_a_reindexing_beside_a_later_manifest_are_refused(made, tmp_path, monkeypatch, dim):
    copied = tmp_path / "documents.sqlite"
    shutil.copy(made / "documents.sqlite", copied)
    with Index.open(made) as index:
        index.reindex(table(dim, 2))
    for name in ("documents.sqlite-wal", "documents.sqlite-shm"):
        (made / name).unlink(missing_ok=True)
    shutil.copy(copied, made / "documents.sqlite")
    readers, reading = [], Store.reading

    def counted(store):
        readers.append(store)
        assert len(readers) < 20, "it looks again and again"
        return reading(store)

    monkeypatch.setattr(Store, "reading", counted)
    with pytest.raises(FormatError, match=r"documents\.sqlite.* restore"), Index.open(made) as index:
        index.search("sea")
