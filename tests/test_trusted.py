"""An index from a stranger may name an address; it is contacted only once this user has named it."""

from __future__ import annotations

import json
import socket

import pytest

from hce.errors import InputError
from hce.index.derived import trust_address_of
from hce.index.index import Index
from hce.milvus import mirror
from hce.milvus.mirror import require_trusted, trust, trusted_file


@pytest.fixture(autouse=True)
def nothing_trusted(tmp_path, monkeypatch):
    monkeypatch.setenv("HCE_CONFIG", str(tmp_path / "config"))
    monkeypatch.setattr(mirror, "_named_now", set())


@pytest.fixture
def listening():
    """A server at which nobody may call."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        yield server


@pytest.fixture
def index(tmp_path, planted_corpus, module_static_encoder, listening):
    """An index whose manifest a stranger has changed."""
    folder = tmp_path / "index"
    Index.create(folder, planted_corpus[:20], module_static_encoder).close()
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["checksum"]
    at = f"http://127.0.0.1:{listening.getsockname()[1]}#docs"
    (folder / "manifest.json").write_text(json.dumps({**manifest, "engine": "milvus", "engine_at": at}))
    return folder


@pytest.mark.parametrize("work", [lambda index: index.search("star"), lambda index: index.rebuild()])
def test_an_address_that_nobody_has_named_is_not_contacted(index, listening, work):
    with Index.open(index) as opened, pytest.raises(InputError, match="which you have never named; nothing was"):
        work(opened)
    with pytest.raises(BlockingIOError):
        listening.accept()
    assert not trusted_file().exists()


def test_what_is_added_stays_here(index, listening, planted_corpus, caplog):
    """A write is kept in the folder, and a line says that nobody else was told."""
    with Index.open(index) as opened:
        assert opened.add(planted_corpus[20:21]) == 1
        assert len(opened) == 21
    assert "never named; nothing was sent there" in caplog.text
    with pytest.raises(BlockingIOError):
        listening.accept()


def test_an_address_is_named_once(index, monkeypatch):
    """It is kept for later processes, and no other address is trusted by it."""
    at = json.loads((index / "manifest.json").read_text())["engine_at"]
    trust_address_of(index)
    monkeypatch.setattr(mirror, "_named_now", set())  # another process
    assert str(require_trusted(at, index)) == at
    with pytest.raises(InputError, match="never named"):
        require_trusted("http://127.0.0.1:1#docs", index)
    trust("http://127.0.0.1:1#docs")
    assert len(json.loads(trusted_file().read_text())["addresses"]) == 2
