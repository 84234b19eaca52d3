"""`hce search ADDRESS`: the hits of a running server are those of its index, and whoever else answers is told apart."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from typer.testing import CliRunner

import hce.web.client
from hce.cli import app
from hce.data.text import Document, is_url
from hce.errors import InputError
from hce.index.index import Index
from hce.web.app import Server, create_app, listen, url_of
from hce.web.client import Client


@pytest.fixture(scope="module")
def served(tmp_path_factory, concept_corpus, module_static_encoder):
    """An index, and the address where it is served."""
    path = tmp_path_factory.mktemp("client") / "index"
    odd = Document("a/b ?#%", "w1 w2 " * 700, title="odd", metadata={"year": 2024})
    Index.create(path, [*concept_corpus, odd], module_static_encoder).close()
    listener, started = listen("127.0.0.1", 0), threading.Event()
    with Index.open(path) as index:
        server = Server(create_app(index), listener, started.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        assert started.wait(60)
        yield path, url_of("127.0.0.1", listener)
        server.should_exit = True
        thread.join(30)


@contextmanager
def answering(status: int, body: bytes):
    """A server that gives everyone the same answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self)
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    asked: list[BaseHTTPRequestHandler] = []
    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("query", "options"),
    [
        ("w1 w2 w7", {}),
        ("w1 w2", {"k": 3, "mode": "words"}),
        ("w3", {"k": 2, "mode": "dense"}),
        ("w1", {"where": ["year=2024"]}),
    ],
)
def test_hits_are_those_of_the_index(served, query, options):
    path, address = served
    arguments = [query, *(["-k", str(options["k"])] if "k" in options else [])]
    arguments += ["--mode", options["mode"]] if "mode" in options else []
    arguments += [each for condition in options.get("where", []) for each in ("--where", condition)]
    for how in ([], ["--json"]):
        commands = (["search", str(place), *arguments, *how] for place in (path, address))
        by_index, by_server = (CliRunner().invoke(app, command) for command in commands)
        assert not by_server.exit_code, by_server.output
        assert by_server.stdout == by_index.stdout
        assert by_server.stdout


def test_an_odd_id_comes_back(served):
    (hit,) = Client(served[1] + "/").search("w1", where=["year=2024"]).hits
    assert (hit.id, hit.metadata, len(hit.text)) == ("a/b ?#%", {"year": 2024}, len("w1 w2 " * 700))
    assert hit.passage is not None


def test_what_the_server_refuses_is_said(served):
    with pytest.raises(InputError, match=r"^http://127.0.0.1:\d+: .*nowhere.* \(4\d\d\)$"):
        Client(served[1]).search("w1", where=["nowhere=1"])
    with pytest.raises(InputError, match="422"):
        Client(served[1]).search("w1", mode="none")


@pytest.mark.parametrize(
    ("status", "body", "line"),
    [
        (200, b"<html>", "not an hce server (its answer is not a JSON object)"),
        (200, b'{"hits": [{"rank": 1}]}', "not an hce server"),
        (200, b'{"hits": 3}', "not an hce server"),
        (200, b"[" * 100_000, "not an hce server"),
        (404, b"nothing", "not an hce server (it answered 404)"),
        (301, b"", "not an hce server (it answered 301)"),
        (401, b"", "refused (401); give its token with --token or HCE_TOKEN"),
        (401, b'{"error": "writing needs the token"}', "writing needs the token (401)"),
        (503, b'{"error": "too many\\nare waiting"}', "too many are waiting (503); try again"),
        (504, b"", "not an hce server (it answered 504)"),
    ],
)
def test_any_other_answer_is_one_line(status, body, line):
    with answering(status, body) as (address, _), pytest.raises(InputError) as error:
        Client(address).search("anything")
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_a_token_is_brought_where_there_is_one():
    with answering(200, json.dumps({"hits": []}).encode()) as (address, asked):
        assert Client(address, "secret").search("anything").hits == []
        assert Client(address).search("anything").hits == []
    assert [each.headers.get("Authorization") for each in asked] == ["Bearer secret", None]


def test_nobody_there(monkeypatch):
    with answering(200, b"") as (address, _):
        pass
    with pytest.raises(InputError, match=r"nobody answers \(Connection refused\); is `hce serve` running there"):
        Client(address).search("anything")
    monkeypatch.setattr(hce.web.client, "SECONDS", 0.2)
    with listen("127.0.0.1", 0) as silent, pytest.raises(InputError, match="no answer within"):
        silent.listen()
        Client(url_of("127.0.0.1", silent)).search("anything")


@pytest.mark.parametrize("address", ["http://", "http://[::1", "http://localhost:port", "ftp://localhost"])
def test_an_address_has_a_host(address):
    with pytest.raises(InputError, match="not an address"):
        Client(address)


def test_addresses_and_paths():
    assert is_url("http://127.0.0.1:8080")
    assert is_url("HTTPS://search.example.org/hce")
    assert not is_url("http")
    assert not is_url("./http:/index")
    for option in ("--rerank", "--facet"):
        done = CliRunner().invoke(app, ["search", "http://127.0.0.1:9", "x", option, "some"])
        assert "need the folder of an index" in str(done.exception)
