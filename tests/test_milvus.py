"""An engine that lives elsewhere: the same hits as here, whoever is killed, away or behind.

Everything runs on milvus-lite, embedded and as a server of its own. The real server's tests want the package `milvus`
(2.3.5, which carries the server) and a folder in HCE_TEST_MILVUS, to unpack 250 MB into once, and are skipped without:

    pip install --no-deps milvus==2.3.5 && HCE_TEST_MILVUS=/var/tmp/milvus pytest tests/test_milvus.py
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from hce.cli import app as hce_command
from hce.data.text import Document
from hce.errors import AwayError, FormatError, HceError, InputError
from hce.index.index import Index
from hce.milvus import engine as milvus
from hce.milvus import mirror, replica
from hce.milvus.engine import Address, Collection, Milvus, MilvusEngine, MilvusRow, Partition, is_address
from hce.milvus.mirror import POINTER_FILE, Pointer, pieces_of
from hce.search.engine import Found
from hce.web.app import create_app
from hce.web.guard import rules_for

pytest.importorskip("pymilvus", reason="needs pymilvus: pip install 'hierarchical-corpus-encoder[milvus]'")
pytest.importorskip("milvus_lite", reason="needs milvus-lite: pip install 'hierarchical-corpus-encoder[milvus]'")

BOUND = replica.REFRESH + 5  # seconds that a reader may be behind; the five are for this machine, which does other work
MODES = ("dense", "words", "hybrid")
QUERIES = ("star red w3", "law", "w40 ship blue w41 w42")


# ----------------------------------------------------------------------------------------- without Milvus


class Rows(Partition):
    """A partition whose rows are here: each of the documents 1 to 9 has four passages."""

    def __init__(self) -> None:
        super().__init__(Collection(None, "rows", 1), "rows", 0)  # type: ignore[arg-type]
        self.asked: list[int] = []

    def _query(self, condition, *, fields=()):
        documents = json.loads(condition.removeprefix("document in "))
        self.asked.append(len(documents))
        rows = [MilvusRow(4 * each + part, each, part, "", None) for each in documents for part in range(4)]
        return {row.number: row for row in rows[: milvus.MOST_FOUND]}

    def nearest(self, queries, k, condition):
        numbers = np.tile(np.arange(9, 9 - k, -1), (len(queries), 1))
        return Found(numbers, (numbers / 10).astype(np.float32))


def test_no_row_of_many_documents_is_cut_off(monkeypatch):
    monkeypatch.setattr(milvus, "MOST_FOUND", 16)
    rows = Rows()
    assert [row.number for row in rows.rows_of(range(1, 10))] == list(range(4, 40))
    assert max(rows.asked) == 9  # of which four were too many at once
    assert rows.asked[-1] < 4


def test_what_is_removed_and_not_deleted_yet_is_not_found():
    """As between the telling of a removal and the deletion; those behind it move up."""
    removed = [9, 7]
    engine = MilvusEngine(Rows(), 7, 9, lambda numbers: ~np.isin(numbers, removed))
    assert engine.search(np.ones((1, 1), np.float32), 3).numbers.tolist() == [[8, 6, 5]]


# ----------------------------------------------------------------------------------------- where Milvus is


def free_port() -> int:
    """Return a port that no system gives to those who connect: or one of them takes it while the server is dead."""
    for port in np.random.default_rng().permutation(np.arange(23_000, 32_000)).tolist():
        with closing(socket.socket()) as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def wait_until_free(port: int) -> None:
    """Wait for a port that connections of a killed server may linger on: its launcher would take the next one."""
    end = time.monotonic() + 120
    while True:
        with closing(socket.socket()) as listener:
            try:
                listener.bind(("127.0.0.1", port))
                return
            except OSError:
                assert time.monotonic() < end, f"port {port} does not become free"
        time.sleep(0.5)


def wait_for(uri: str, process: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + 120
    while True:
        assert process.poll() is None, f"the server ended with {process.returncode}: {log.read_text()[-2000:]}"
        server = Milvus(Address(uri, "nothing"))
        try:
            server.current()
            return
        except AwayError:
            assert time.monotonic() < end, f"no server came up: {log.read_text()[-2000:]}"
        finally:
            server.close()


@dataclass
class LiteServer:
    """milvus-lite as a server of its own, which can be killed."""

    folder: Path
    port: int
    process: subprocess.Popen | None = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "milvus_lite", "server", "--data-dir", str(self.folder / "data")]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_for(self.uri, self.process, self.folder / "log")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class RealServer:
    """The server of the package `milvus`."""

    def __init__(self, folder: Path) -> None:
        milvus_package = pytest.importorskip("milvus", reason="needs the package milvus, which carries the server")
        self._server = milvus_package.MilvusServer()
        self._server.set_base_dir(str(folder))
        self._log = folder / "logs" / "milvus-stdout.log"
        self._port = free_port()

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        wait_until_free(self._port)
        self._server.listen_port = self._port
        self._server.start()
        assert self._server.listen_port == self._port, "the launcher has taken another port"
        wait_for(self.uri, self._server.server_proc, self._log)

    def kill(self) -> None:
        self._server.server_proc.kill()
        self._server.server_proc.wait()


@pytest.fixture(scope="module")
def lite_server(tmp_path_factory):
    server = LiteServer(tmp_path_factory.mktemp("lite"), free_port())
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def real_server():
    folder = os.environ.get("HCE_TEST_MILVUS")
    if not folder:
        pytest.skip("needs a folder in HCE_TEST_MILVUS and the package milvus, which carries the server")
    shutil.rmtree(Path(folder) / "data", ignore_errors=True)
    server = RealServer(Path(folder))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module", params=["lite", "real"])
def server(request):
    """A server that can be killed and started again."""
    return request.getfixturevalue(f"{request.param}_server")


@pytest.fixture(scope="module")
def embedded(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("embedded") / "milvus.db")


@pytest.fixture(scope="module", params=["embedded", "lite", "real"])
def place(request) -> str:
    """Any Milvus: a path or an address."""
    if request.param == "embedded":
        return request.getfixturevalue("embedded")
    return request.getfixturevalue(f"{request.param}_server").uri


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch):
    monkeypatch.setattr(milvus, "PATIENCE", 20.0)
    monkeypatch.setattr(replica, "REFRESH", 0.0)


# ----------------------------------------------------------------------------------------- documents


@pytest.fixture(scope="module")
def documents(planted_corpus) -> list[Document]:
    """Documents with metadata, some of equal texts, a long one, and one that no row of Milvus holds."""
    rng = np.random.default_rng(3)
    some = [
        Document(each.id, each.text, each.title, {"year": 2000 + i % 10, "tags": ["a", "b"][: i % 3]})
        for i, each in enumerate(planted_corpus[:60])
    ]
    equal = [Document(f"equal-{i}", some[0].text, some[0].title, {"year": 2003}) for i in range(20)]
    long = Document("long", " ".join(rng.choice([f"w{i}" for i in range(200)], 2000)))
    huge = Document("huge", "star é " + "é" * 70_000, metadata={"note": "x" * 70_000, "half": "\ud800"})
    return [*some, *equal, long, huge]


def index_at(folder: Path, documents, encoder, at: str, name: str) -> Index:
    return Index.create(folder, documents, encoder, engine="milvus", at=f"{at}#{name}")


def shown(hits) -> list:
    return [(hit.id, round(hit.score, 5), hit.passage, hit.matched, hit.metadata) for hit in hits]


def assert_same(one: Index, *others: Index, modes=MODES, filters=(None, {"year": {"gte": 2004}}), ks=(3, 500)) -> None:
    for mode, condition, k in product(modes, filters, ks):
        expected = [shown(hits) for hits in one.search(QUERIES, k, condition, mode)]
        for other in others:
            found = [shown(hits) for hits in other.search(QUERIES, k, condition, mode)]
            assert found == expected, (mode, condition, k)


# ----------------------------------------------------------------------------------------- the same hits


def test_hits_are_those_of_the_local_index(tmp_path, documents, module_static_encoder, place):
    with (
        Index.create(tmp_path / "flat", documents, module_static_encoder) as flat,
        index_at(tmp_path / "there", documents, module_static_encoder, place, "same") as there,
        Index.open(f"{place}#same") as reader,
    ):
        assert_same(flat, there, reader)
        assert flat.search_vectors(flat.vectors()[1][:3], 5) == there.search_vectors(flat.vectors()[1][:3], 5)
        assert list(reader) == list(flat) and len(reader) == len(flat)
        assert np.array_equal(reader.vectors()[1], flat.vectors()[1])
        for index in (flat, there):
            index.update([Document("equal-3", "law red w7"), Document("star-red-1", "star", metadata={"year": 1990})])
            index.add([Document("new", "ship blue w41 w42", metadata={"year": 2010})])
            index.remove(["long", "huge", "equal-0"])
        assert_same(flat, there, reader, modes=("dense",))
        assert reader.get("star-red-1").metadata == {"year": 1990} and "huge" not in reader
        flat.rebuild()  # words count removed texts until they are made anew, and a new reader makes them anew
        with Index.open(f"{place}#same", module_static_encoder) as late:
            assert [hit.id for hit in late.search(QUERIES[0], 5)] == [hit.id for hit in flat.search(QUERIES[0], 5)]
            assert late.status().documents == len(flat) and late.status().path.endswith("#same")


def test_limits_of_milvus_cut_nothing_off(tmp_path, documents, module_static_encoder, embedded, monkeypatch):
    """More than Milvus finds at once, filters of more numbers than a request takes, texts longer than a row."""
    monkeypatch.setattr(milvus, "MOST_FOUND", 7)
    monkeypatch.setattr(milvus, "MOST_ROWS", 5)
    monkeypatch.setattr(replica, "MOST_ROWS", 5)
    monkeypatch.setattr(milvus, "REQUEST_BYTES", 4 * 32 * 6)  # six vectors
    few = [*documents[:40], documents[-2]]
    with (
        Index.create(tmp_path / "flat", few, module_static_encoder) as flat,
        index_at(tmp_path / "there", few, module_static_encoder, embedded, "limits") as there,
    ):
        assert_same(flat, there, modes=("dense",), filters=(None, {"year": {"gte": 2002}}), ks=(3, 30))


def test_large_requests_are_cut_up(real_server):
    """70 MB in one call of `put`: a server takes 64 MB, what wraps them included; the embedded engine takes any."""
    server = Milvus(Address.parse(f"{real_server.uri}#large"))
    server.create("large_1", 1024)
    collection = Collection(server, "large_1", 1024)
    vector = np.full(1024, 1 / 32, np.float32)
    rows = [MilvusRow(i, i, 1, "x" * 60_000, vector) for i in range(1, 1101)]
    collection.documents.put(rows)
    assert sum(1 for _ in collection.documents.rows_between(1, 1101, ("number", "document", "part"))) == 1100
    collection.documents.put(rows[:5], again=True)
    assert [row.number for row in collection.documents.rows_between(1, 6)] == [1, 2, 3, 4, 5, 6]
    server.call("drop_collection", "large_1")
    server.close()


def test_an_index_moves_there_and_back(tmp_path, documents, module_static_encoder, lite_server):
    at = f"{lite_server.uri}#moved"
    with Index.create(tmp_path / "index", documents, module_static_encoder) as index:
        before = {mode: shown(index.search(QUERIES[0], 20, mode=mode)) for mode in MODES}
        index.rebuild("milvus", at=at)
        assert (index.status().engine, index.status().pending) == ("milvus", 0)
        with Index.open(at) as reader:
            for each in (index, reader):
                assert {mode: shown(each.search(QUERIES[0], 20, mode=mode)) for mode in MODES} == before
            index.rebuild()  # into another collection, which readers take up
            assert shown(reader.search(QUERIES[0], 20)) == before["hybrid"]
            index.rebuild("codes")
            assert shown(index.search(QUERIES[0], 20)) == before["hybrid"] and not (index.path / POINTER_FILE).exists()
            with pytest.raises(FormatError, match="there is no collection of hce"):
                reader.search(QUERIES[0])


def test_a_reader_takes_up_another_encoder(tmp_path, documents, static_encoder, lite_server):
    at = f"{lite_server.uri}#encoders"
    with (
        index_at(tmp_path / "index", documents[:30], static_encoder, lite_server.uri, "encoders") as index,
        Index.open(at) as reader,
    ):
        first = reader.search(QUERIES[0], 5, mode="dense")
        static_encoder.model[0].embedding.weight.data.mul_(-1).add_(0.3)
        index.reindex(static_encoder)
        assert shown(index.search(QUERIES[0], 5, mode="dense")) != shown(first)  # and tells the collection
        assert shown(reader.search(QUERIES[0], 5, mode="dense")) == shown(index.search(QUERIES[0], 5, mode="dense"))
        assert reader.state.manifest.fingerprint == index.state.manifest.fingerprint


# ----------------------------------------------------------------------------------------- interruptions


class Killed(BaseException):
    """What a kill looks like from inside."""


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 5])
def test_whatever_is_interrupted_is_caught_up(tmp_path, documents, module_static_encoder, embedded, monkeypatch, steps):
    """Killed after so many writes to Milvus, of a first filling and of later changes, by whom it was and by others."""
    few, done = [*documents[:12], documents[-2], documents[-1]], []

    def killed(method):
        def call(*args, **options):
            if len(done) == steps:
                raise Killed
            done.append(method.__name__)
            return method(*args, **options)

        return call

    def interrupted(work) -> None:
        done.clear()
        with monkeypatch.context() as patch:
            for name in ("put", "delete"):
                patch.setattr(Partition, name, killed(getattr(Partition, name)))
            with suppress(Killed):
                work()

    at = f"{embedded}#killed{steps}"
    monkeypatch.setattr(mirror, "DOCUMENTS_AT_ONCE", 5)
    with Index.create(tmp_path / "index", few, module_static_encoder) as index:
        interrupted(lambda: index.rebuild("milvus", at=at))
    with Index.create(tmp_path / "flat", few, module_static_encoder) as flat, Index.open(tmp_path / "index") as index:
        assert_same(flat, index, modes=("dense",), filters=(None,), ks=(500,))
        for each in (flat, index):
            interrupted(lambda each=each: each.add(documents[20:32]))
            interrupted(lambda each=each: each.remove([few[0].id, "huge", documents[25].id]))
        with Index.open(tmp_path / "index") as again, Index.open(at) as reader:
            assert_same(flat, again, reader, modes=("dense",), filters=(None,), ks=(500,))
            assert sorted(each.id for each in reader) == sorted(each.id for each in flat)


def test_a_lost_answer_writes_nothing_twice(tmp_path, documents, module_static_encoder, embedded, monkeypatch):
    """The rows were inserted, and the server went away before it said so."""
    ask, lost = Milvus.ask, []

    def losing(self, what, *, again=True):
        answer = ask(self, what, again=again)
        if not again:
            lost.append(answer)
            raise AwayError("gone before it answered")
        return answer

    monkeypatch.setattr(Milvus, "ask", losing)
    with index_at(tmp_path / "there", documents[:20], module_static_encoder, embedded, "lost") as index:
        monkeypatch.undo()
        assert lost and len({hit.id for hit in index.search("star", 100, mode="dense")}) == 20
        collection = index.state.derived.mirror.at(next(iter_reader(index)))
        assert len(list(collection.documents.rows_between(1, 100))) == 20


def iter_reader(index: Index):
    with index.state.reading() as reader:
        yield reader


# ----------------------------------------------------------------------------------------- a life


def test_a_life(tmp_path, documents, module_static_encoder, server, monkeypatch, caplog):
    """Index here, move to a server; two readers search while the writer adds and removes; the server is killed."""
    monkeypatch.setattr(replica, "REFRESH", 0.5)
    at, errors, rounds = f"{server.uri}#life", [], [0, 0]
    index = Index.create(tmp_path / "index", documents[:60], module_static_encoder)
    index.rebuild("milvus", at=at)
    readers = [Index.open(at), Index.open(at, module_static_encoder)]
    stop = threading.Event()

    def search(which: int) -> None:
        while not stop.is_set():
            try:
                hits = readers[which].search(QUERIES[rounds[which] % 3], 5, mode=MODES[rounds[which] % 3])
                assert len({hit.id for hit in hits}) == len(hits) and (hits or rounds[which] % 3 == 1)
            except BaseException as error:
                errors.append(error)
                return
            rounds[which] += 1

    threads = [threading.Thread(target=search, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for turn in range(4):
        index.add([Document(f"turn-{turn}-{i}", f"cell green w{turn} w{i}") for i in range(10)])
        index.remove([f"turn-{turn}-{i}" for i in range(0, 10, 2)])
    came = time.monotonic()
    while not all("turn-3-9" in reader and "turn-3-8" not in reader for reader in readers):
        assert time.monotonic() - came < BOUND
        time.sleep(0.1)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors and min(rounds) > 0, errors

    server.kill()
    monkeypatch.setattr(milvus, "PATIENCE", 1.0)
    assert index.add([Document("while-away", "cell green w1")]) == 1  # which is kept
    assert "the write is safe in" in caplog.text and index.status().pending == 1
    for each in (index, readers[0]):
        asked = time.monotonic()
        with pytest.raises(AwayError, match=r"life: the request to Milvus failed \(.*\); check the address"):
            each.search("cell")
        assert time.monotonic() - asked < 10  # and not once for each that asks
    monkeypatch.setattr(milvus, "PATIENCE", 60.0)
    server.start()
    assert index.search("cell green w1", 100, mode="dense") and index.status().pending == 0
    expected = {document.id for document in index}
    for reader in (*readers, Index.open(at)):
        time.sleep(0.6)
        assert {document.id for document in reader} == expected and "while-away" in expected
        assert shown(reader.search("cell", 30, mode="dense")) == shown(index.search("cell", 30, mode="dense"))
        reader.close()
    index.close()


# ----------------------------------------------------------------------------------------- bad input


def test_a_second_writer_is_refused(tmp_path, documents, module_static_encoder, embedded):
    with index_at(tmp_path / "first", documents[:5], module_static_encoder, embedded, "one") as first:
        with pytest.raises(InputError, match=r"another index has its collection there; choose another name after #"):
            index_at(tmp_path / "second", documents[:5], module_static_encoder, embedded, "one")
        assert not (tmp_path / "second").exists()
        shutil.copytree(tmp_path / "first", tmp_path / "copy")
        with Index.open(tmp_path / "copy") as copy:
            with pytest.raises(InputError, match=r"copy is a copy of the index that writes to .*#one"):
                copy.add([Document("x", "star")])
            copy.rebuild("milvus", at=f"{embedded}#two")
            assert len(copy.search("star", 9)) == 6 and len(first.search("star", 9)) == 5


def test_who_writes_elsewhere_only_reads_here(tmp_path, documents, module_static_encoder, embedded):
    index_at(tmp_path / "index", documents[:5], module_static_encoder, embedded, "read").close()
    with Index.open(f"{embedded}#read") as reader:
        for call in (lambda: reader.add([Document("x", "y")]), lambda: reader.remove(["x"]), reader.rebuild):
            with pytest.raises(InputError, match=r"#read is read-only here; write to the folder of the index"):
                call()
        assert "read from Milvus" in repr(reader)
        with TestClient(create_app(reader, rules_for("127.0.0.1", None, False)), base_url="http://127.0.0.1") as page:
            assert len(page.get("/api/search", params={"q": "star", "k": 2}).json()["hits"]) == 2


def test_wrong_addresses_change_nothing(tmp_path, documents, module_static_encoder, monkeypatch):
    monkeypatch.setattr(milvus, "PATIENCE", 0.5)
    nobody = f"http://127.0.0.1:{free_port()}"
    with Index.create(tmp_path / "index", documents[:5], module_static_encoder) as index:
        manifest = (index.path / "manifest.json").read_bytes()
        for at, error, message in (
            (nobody, AwayError, f"{nobody}: the request to Milvus failed"),
            ("ftp://elsewhere", InputError, "ftp://elsewhere: not an address of Milvus"),
            (f"{nobody}#a b", InputError, "after # give the name of a collection"),
            (str(tmp_path / "no folder" / "x.db"), InputError, "there is no folder"),
            (None, InputError, "where is it"),
        ):
            with pytest.raises(error, match=message) as raised:
                index.rebuild("milvus", at=at)
            assert "\n" not in str(raised.value)
        with pytest.raises(InputError, match="only the engine milvus has an address"):
            index.rebuild("codes", at=nobody)
        assert (index.path / "manifest.json").read_bytes() == manifest and index.search("star", 1)
    with pytest.raises(AwayError):
        index_at(tmp_path / "new", documents[:5], module_static_encoder, nobody, "x")
    with pytest.raises(AwayError):
        Index.open(nobody)
    with pytest.raises(FormatError, match="no Milvus file"):
        Index.open(tmp_path / "nothing.db")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index"]


def test_a_file_is_open_in_one_process_at_a_time(tmp_path, documents, module_static_encoder, monkeypatch):
    code = f"import milvus_lite; milvus_lite.MilvusLite({str(tmp_path / 'x.db')!r}); print('open', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"open\n"
        monkeypatch.setattr(milvus, "PATIENCE", 0.5)
        with pytest.raises(AwayError, match=r"x.db: .*; only one process at a time can have the file open"):
            Index.create(
                tmp_path / "new", documents[:5], module_static_encoder, engine="milvus", at=str(tmp_path / "x.db")
            )
        assert not (tmp_path / "new").exists()
        other.stdin.close()


def test_collections_of_others_are_refused(tmp_path, documents, module_static_encoder, static_encoder, embedded):
    server = Milvus(Address.parse(f"{embedded}#theirs"))
    server.create("theirs", 8)
    with pytest.raises(InputError, match="the collection 'theirs' is not hce's; choose another name"):
        Index.open(f"{embedded}#theirs")
    with index_at(tmp_path / "index", documents[:5], module_static_encoder, embedded, "ours") as index:
        static_encoder.model[0].embedding.weight.data.add_(0.5)
        with pytest.raises(InputError, match=r"#ours holds vectors of the encoder tiny static .*; leave the encoder"):
            Index.open(f"{embedded}#ours", static_encoder)
        pointer = Pointer.read(index.path)
        collection = Collection(server, pointer.collection, 32)
        (row,) = collection.log.rows_between(1, 1)
        facts = json.loads(row.content)
        for change, message in (
            ({"format": 99}, "written by a newer version of hce; upgrade"),
            ({"manifest": {"dim": "many"}}, "the collection is damaged"),
            ({"files": {"../../x": [0, "", 1, 0]}}, "damaged .a file named"),
            ({"files": {**facts["files"], "x": [3, "00", 1, 1]}}, "x of the encoder has changed since it was written"),
        ):
            collection.log.put([row._replace(content=json.dumps({**facts, **change}))], again=True)
            with pytest.raises(FormatError, match=message):
                Index.open(f"{embedded}#ours")
        collection.log.put([row], again=True)
        collection.documents.delete([2])  # behind our back
        with Index.open(f"{embedded}#ours") as reader, pytest.raises(HceError, match="lacks documents"):
            reader.search("star", 5, mode="dense")
        with pytest.raises(FormatError, match=r"lacks documents; 'hce rebuild .*' fills a new one"):
            index.search("star", 5, mode="dense")
        index.rebuild()
        assert len(index.search("star", 5, mode="dense")) == 5
    server.close()


def test_addresses():
    assert is_address("http://x:1") and is_address(Path("http://x:1")) and not is_address("my-index")
    assert str(Address.parse(Path("http://x:1#a"))) == "http://x:1#a" and str(Address.parse("https://x")) == "https://x"
    assert pieces_of("ab") == ["ab"] and "".join(pieces_of("aé€😀" * 40_000)) == "aé€😀" * 40_000


# ----------------------------------------------------------------------------------------- the command line


def test_commands(tmp_path, documents, static_encoder, embedded):
    static_encoder.save(tmp_path / "model")
    lines = [json.dumps({"_id": each.id, "text": each.text}) for each in documents[:9]]
    (tmp_path / "docs.jsonl").write_text("\n".join(lines))
    run = CliRunner().invoke
    docs, model, made = (str(tmp_path / name) for name in ("docs.jsonl", "model", "index"))
    at = f"{embedded}#commands"
    result = run(hce_command, ["index", docs, "-m", model, "-o", made, "--engine", "milvus", "--at", at])
    assert result.exit_code == 0, result.output
    for index in (made, at):
        result = run(hce_command, ["search", index, "star", "--json"])
        assert len(json.loads(result.stdout)["hits"]) == 9
    result = run(hce_command, ["status", at, "--no-drift", "--json"])
    assert (json.loads(result.stdout)["engine"], json.loads(result.stdout)["documents"]) == ("milvus", 9)
    result = run(hce_command, ["rebuild", made, "--engine", "codes", "--json"])
    assert json.loads(result.stdout)["engine"] == "codes"
    result = run(hce_command, ["rebuild", made, "--at", at])
    assert result.exit_code != 0
