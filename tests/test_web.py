"""The web server without a browser: what it answers, what it refuses, and that nothing keeps anyone waiting."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from plotly.offline import get_plotlyjs, get_plotlyjs_version
from pydantic import TypeAdapter

import hce
import hce.index.background
import hce.web.connection
import hce.web.guard
from hce.data.text import MOST_WORDS, Document, QueryWords, _best_start, best_snippet
from hce.encoding.encoder import Encoder
from hce.errors import FormatError, InputError
from hce.index.drift import Drift
from hce.index.index import Index
from hce.index.state import IndexState
from hce.index.store import Store
from hce.progress import Deadline, DeadlineError, check_deadline
from hce.training.recipe import Recipe
from hce.web import api, browse
from hce.web.app import PLOTLY, Server, create_app, listen, url_of
from hce.web.background import BusyError, Lane, QueryBatcher
from hce.web.connection import _network
from hce.web.guard import LOOPBACK, Guard, Rules, refusal, rules_for

HOME = "http://127.0.0.1:8080"
ANYWHERE = "0.0.0.0"  # noqa: S104
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, concept_corpus, module_static_encoder):
    """An index made from a trained model, and the folder of the encoder that training began with."""
    folder = tmp_path_factory.mktemp("web")
    module_static_encoder.save(folder / "start")
    recipe = Recipe(epochs=2, batch_size=32)
    hce.train(concept_corpus, encoder=str(folder / "start"), recipe=recipe, output=folder / "model")
    Index.create(folder / "index", concept_corpus, str(folder / "model"), "grow").close()
    return folder


@pytest.fixture
def index(trained, tmp_path):
    """A copy of it that a test may write to."""
    shutil.copytree(trained / "index", tmp_path / "index")
    with Index.open(tmp_path / "index") as opened:
        yield opened


@pytest.fixture
def client(index):
    with TestClient(create_app(index), base_url=HOME) as opened:
        yield opened


def error_of(response, status):
    """The one sentence of a refusal, which is all that it says."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    assert "Traceback" not in response.text
    return response.json()["error"]


def ready(client, query="w0 w5", **parameters):
    """An answer with the untrained encoder's ranking, as soon as there is one."""
    for _ in range(200):
        answer = client.get("/api/search", params={"q": query, "compare": True, **parameters}).json()
        if answer["before"]["readiness"]["state"] == "ready":
            return answer
        time.sleep(0.02)
    raise AssertionError(answer["before"]["readiness"])


# ----------------------------------------------------------------------------------------------------- search


def test_search_is_the_indexs(client, index):
    answer = client.get("/api/search", params={"q": "w0 w5 w9", "k": 7}).json()
    expected = index.search("w0 w5 w9", 7)
    assert [(hit["rank"], hit["id"], hit["title"]) for hit in answer["hits"]] == [
        (hit.rank, hit.id, hit.title) for hit in expected
    ]
    np.testing.assert_allclose([hit["score"] for hit in answer["hits"]], [hit.score for hit in expected], rtol=1e-6)
    assert (answer["query"], answer["k"], answer["before"]) == ("w0 w5 w9", 7, None)
    for shown, hit in zip(answer["hits"], expected, strict=True):
        assert hit.text.startswith(shown["snippet"], shown["snippet_start"])
        words = {shown["snippet"][start:end] for start, end in shown["snippet_marks"]}
        assert words <= {f"w{stem}{more}" for stem in (0, 5, 9) for more in ("", *range(1000))}
        assert words >= {"w0", "w5", "w9"} & set(shown["snippet"].split())
        assert shown["path"] == hit.as_dict()["path"]
        assert len(shown["path"]) == len(index.tree.hierarchy.levels)


def test_of_a_long_document_the_passage_is_shown(client, index):
    """Its words stand in the middle of other words, a long way beyond what is looked through for them."""
    sentence = "Law law law ship ship star blue green red cell cell law ship blue."
    filler = " ".join(f"w{i % 7} w{i % 5}." for i in range(5000))
    text = f"{filler} {sentence} {filler}"
    index.add([Document("long", text, "A book")])
    answer = client.get("/api/search", params={"q": sentence, "k": 300, "mode": "dense"}).json()
    (shown,) = [hit for hit in answer["hits"] if hit["id"] == "long"]
    start, stop = shown["passage"]
    assert sentence in shown["snippet"]
    assert shown["snippet"] == text[start:stop]
    assert (shown["snippet_start"], shown["snippet_is_whole"]) == (start, False)
    assert {shown["snippet"][slice(*mark)] for mark in shown["snippet_marks"]} >= {"Law", "ship"}
    assert all(hit["passage"] is None for hit in answer["hits"] if hit["id"] != "long")


def test_search_with_conditions(client, index):
    index.add([Document(f"m{year}", "w0 w1", metadata={"year": year, "lang": "en"}) for year in (1990, 2001, 2005)])
    where = ["year>=2000", "year<2004"]
    answer = client.get("/api/search", params={"q": "w0", "where": where}).json()
    assert [(hit["id"], hit["metadata"]) for hit in answer["hits"]] == [("m2001", {"year": 2001, "lang": "en"})]
    assert "write field=value" in error_of(client.get("/api/search", params={"q": "w0", "where": "year"}), 400)
    assert [hit["id"] for hit in ready(client, "w0", where=where)["before"]["hits"]] == ["m2001"]


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({}, "q: "),
        ({"q": ""}, "q: "),
        ({"q": " \u3000"}, "q: "),
        ({"q": "x" * 2001}, "q: .*2000"),
        ({"q": "x", "k": 0}, "k: "),
        ({"q": "x", "k": 1001}, "k: .*1000"),
        ({"q": "x", "k": "many"}, "k: "),
        ({"q": "x", "where": ["a=1"] * 17}, "where: .*16"),
        ({"q": "x", "where": "a=" + "1" * 500}, "where.0: .*500"),
    ],
)
def test_search_refuses(client, parameters, said):
    assert re.match(said, error_of(client.get("/api/search", params=parameters), 422))


def test_a_text_that_no_one_knows_a_word_of_and_odd_ones(client):
    for query in ("zzz", "\x00", "🦜" * 100, "' OR 1=1 --", "a" * 2000, "…"):
        assert len(client.get("/api/search", params={"q": query}).json()["hits"]) == 10


def test_the_untrained_ranking_is_that_of_its_encoder(client, index, trained):
    answer = ready(client, "w0 w7", k=10)
    before = Encoder.load(trained / "start")
    ids = [document.id for document in index]
    scores = (
        before.encode([document.full_text for document in index]) @ before.encode(["w0 w7"], "query")[0]
    )  # an independent ranking
    ranked = [ids[row] for row in np.argsort(-scores, kind="stable")]
    assert [hit["id"] for hit in answer["before"]["hits"]] == ranked[:10]
    assert [hit["before"] for hit in answer["hits"]] == [ranked.index(hit["id"]) + 1 for hit in answer["hits"]]
    assert answer["before"]["readiness"] == {
        "state": "ready",
        "encoder": "start",
        "reason": "",
        "done": 240,
        "total": 240,
    }
    assert any(hit["before"] != hit["rank"] for hit in answer["hits"])


def test_the_untrained_vectors_follow_and_are_kept(client, index, monkeypatch):
    ready(client)
    client.post("/api/documents", json={"documents": [{"id": "new", "text": "w0 w5"}]})
    client.delete("/api/documents/d7")
    answer = ready(client, "w0 w5", k=1000)
    ids = [hit["id"] for hit in answer["before"]["hits"]]
    assert len(ids) == 240
    assert ids[0] == "new"
    assert "d7" not in ids
    monkeypatch.setattr(hce.index.background, "DOCUMENTS_AT_ONCE", 0)  # nothing can be encoded any more
    with TestClient(create_app(index), base_url=HOME) as another:
        assert [hit["id"] for hit in ready(another, "w0 w5", k=1000)["before"]["hits"]] == ids


def test_a_damaged_file_of_untrained_vectors_is_made_anew(index):
    (index.path / hce.index.background.UNTRAINED_FILE).write_bytes(b"nonsense")
    with TestClient(create_app(index), base_url=HOME) as client:
        assert len(ready(client)["before"]["hits"]) == 10


def test_less_is_looked_through_of_each_of_many_texts():
    text = f"{'x ' * 5000}ship"
    assert QueryWords("ship").marks_in(text) == QueryWords("ship", 50).marks_in(text) == [(10_000, 10_004)]
    assert QueryWords("ship", 1000).marks_in(text) == []
    words = QueryWords("ship", 1000)  # which remembers words from one text to the next
    texts = ["a ship", "a ship", "Ships", "no", "a SHIPPING ship"]
    assert [words.marks_in(each) for each in texts] == [[(2, 6)], [(2, 6)], [(0, 5)], [], [(11, 15)]]


def test_why_there_is_nothing_to_compare_with(tmp_path, planted_corpus, static_encoder, index, monkeypatch):
    with Index.create(tmp_path / "plain", planted_corpus, static_encoder) as plain:
        client = TestClient(create_app(plain), base_url=HOME)
        with client:
            before = client.get("/api/search", params={"q": "star", "compare": True}).json()["before"]
            assert (before["readiness"]["state"], before["hits"]) == ("off", [])
            assert "not made from a model" in before["readiness"]["reason"]
    monkeypatch.setattr(hce.index.background, "MOST_DOCUMENTS", 239)
    with TestClient(create_app(index), base_url=HOME) as client:
        assert "240 documents are more than the 239" in until_off(client)
    monkeypatch.undo()
    index.state.manifest = replace(index.state.manifest, base_encoder="/nowhere/at-all")
    with TestClient(create_app(index), base_url=HOME) as client:
        reason = until_off(client)
        assert reason.startswith("at-all is not on this machine")
        assert "/nowhere" not in client.get("/api/status").text
        assert "/nowhere" not in client.get("/api/search", params={"q": "w1", "compare": True}).text


def test_no_answer_tells_where_things_are_on_this_machine(index, monkeypatch):
    here = str(index.path.absolute())
    index.status()  # reads the manifest, which is then taken as it is until it changes on disk
    named = {"encoder": f"table of {here}/a b/model", "base_encoder": f"{here}/a b/start"}
    index.state.manifest = replace(index.state.manifest, **named)

    def damaged(*arguments, **options):
        raise FormatError(f"{here}/words/meta.json: damaged; /var/lib/x y; see https://a.example/b/c")

    monkeypatch.setattr(IndexState, "search", damaged)
    monkeypatch.setattr(Index, "drift", damaged, raising=False)
    client = TestClient(create_app(index), base_url=HOME)
    said = error_of(client.get("/api/search", params={"q": "x"}), 500)
    assert said == "words/meta.json: damaged; x y; see https://a.example/b/c"
    until_measured(client)
    for path in ("/api/status?drift=true", "/health", "/openapi.json"):
        answer = client.get(path).text
        assert here not in answer
        assert str(index.path.parent) not in answer
        assert "/var/lib" not in answer
    status = client.get("/api/status").json()
    assert (status["index"]["encoder"], status["index"]["base_encoder"]) == ("table of model", "start")


def until_measured(client):
    for _ in range(200):
        if client.get("/api/status", params={"drift": True}).json()["drift"]["state"] == "done":
            return
        time.sleep(0.02)
    raise AssertionError("the drift was not measured")


def until_off(client):
    for _ in range(200):
        readiness = client.get("/api/status").json()["untrained"]
        if readiness["state"] == "off":
            return readiness["reason"]
        time.sleep(0.02)
    raise AssertionError(readiness)


# ----------------------------------------------------------------------------------------------------- snippets


def test_the_snippet_with_most_words():
    text = "red " + "x " * 300 + "the red ship sails; " + "y " * 300
    snippet = best_snippet(text, QueryWords("a red ship"), 80)
    assert "red ship sails" in snippet.text
    assert text.startswith(snippet.text, snippet.start)
    assert [snippet.text[slice(*mark)] for mark in snippet.marks] == ["red", "ship"]
    assert not snippet.whole
    assert best_snippet(text, QueryWords("nothing of it"), 80).start == 0
    short = best_snippet("Ships of Red", QueryWords("ship red"), 80)
    assert (short.whole, short.marks) == (True, [(0, 5), (9, 12)])


def test_words_that_stand_everywhere_are_not_marked():
    assert QueryWords("of the law").marks_in("the law of the sea") == [(4, 7)]
    assert QueryWords("to be").marks_in("to be or not") == [(0, 2), (3, 5)]
    assert QueryWords("… !").marks_in("… !") == []
    assert QueryWords("c (").marks_in("a.b (c") == [(5, 6)]
    assert QueryWords("thread").marks_in("Threads, threaded, threadings; rethread STRASSE") == [(0, 7), (9, 17)]
    assert QueryWords("Straße").marks_in("STRASSE straßen") == [(0, 7), (8, 15)]


def test_a_long_query_marks_its_first_words():
    words = [f"{number:03}word" for number in range(2 * MOST_WORDS)]
    text = " ".join(words)
    marked = [text[slice(*mark)] for mark in QueryWords(text).marks_in(text)]
    assert marked == words[:MOST_WORDS]


def test_marking_takes_one_pass_whatever_is_asked():
    """A pattern with an alternative for each of 660 words took ninety times as long as one for a single word."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    pairs = [one + two for one in letters for two in letters][:660]
    text = " ".join(f"{pair}{letter}zzzz" for letter in letters for pair in pairs)

    def seconds(query):
        words, times = QueryWords(query), []
        for _ in range(5):
            start = time.process_time()
            best_snippet(text, words)
            times.append(time.process_time() - start)
        return min(times)

    assert seconds(" ".join(pairs)) < 6 * seconds("zz")


@given(st.text("ab c", max_size=80), st.text("ab c", min_size=1, max_size=8), st.integers(8, 30))
def test_the_window_is_the_first_with_most_different_words(text, query, length):
    words = QueryWords(query)
    marks, reach = words.marks_in(text), length * 3 // 4
    counts = {
        first: len({text[slice(*mark)] for mark in marks if mark[0] >= first and mark[1] <= first + reach})
        for first, _ in marks
    }
    best = max(counts, key=counts.__getitem__, default=0) if any(counts.values()) else 0
    assert _best_start(text, marks, length) == max(0, min(best - length // 4, len(text) - length))


@settings(max_examples=60, deadline=None)
@given(st.text("ab 🦜\nÄ", max_size=200), st.text("ab 🦜Ä", max_size=12), st.integers(10, 60))
def test_snippets_are_parts_and_marks_are_in_them(text, query, length):
    snippet = best_snippet(text, QueryWords(query), length)
    assert text[snippet.start :].startswith(snippet.text)
    assert len(snippet.text) <= length or snippet.whole
    assert all(0 <= start < end <= len(snippet.text) for start, end in snippet.marks)


# ----------------------------------------------------------------------------------------------------- documents


def test_add_get_update_remove(client, index):
    new = {"id": "a/b c?d#é", "title": "w190", "text": "w190 w191", "metadata": {"n": [1, None], "s": "<b>"}}
    added = client.post("/api/documents", json={"documents": [new]})
    assert (added.status_code, added.json()) == (201, {"documents": 241, "added": 1, "removed": 0})
    address = "/api/documents/" + quote(new["id"], safe="")
    assert client.get(address).json() == new
    assert client.get("/api/search", params={"q": "w190 w191"}).json()["hits"][0]["id"] == new["id"]
    assert "is there already" in error_of(client.post("/api/documents", json={"documents": [new]}), 409)
    changed = {**new, "text": "w192"}
    assert client.post("/api/documents", json={"documents": [changed], "update": True}).json()["documents"] == 241
    assert client.get(address).json() == changed
    assert client.delete(address).json() == {"documents": 240, "added": 0, "removed": 1}
    assert "no document 'a/b c?d#é'" in error_of(client.get(address), 404)
    assert str(index.path) not in error_of(client.delete(address), 404)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"documents": []}, 422, "documents: .*at least 1"),
        ({"documents": [{"id": str(i), "text": "x"} for i in range(1001)]}, 422, "documents: .*1000"),
        ({"documents": [{"id": "x"}]}, 422, "documents.0.text"),
        ({"documents": [{"text": "x"}]}, 422, "documents.0.id"),
        ({"documents": [{"id": "", "text": "x"}]}, 422, "documents.0.id"),
        ({"documents": [{"id": "x" * 513, "text": "x"}]}, 422, "documents.0.id: .*512"),
        ({"documents": [{"id": "x", "text": "x" * 1_000_001}]}, 422, "documents.0.text"),
        ({"documents": [{"id": "x", "text": "x", "body": "y"}]}, 422, "documents.0.body"),
        ({"documents": [{"id": "x", "text": "x"}], "replace": True}, 422, "replace"),
        ({"documents": [{"id": "x", "text": 1}]}, 422, "documents.0.text"),
        ({"documents": [{"id": "x", "text": "x", "metadata": []}]}, 422, "documents.0.metadata"),
        ([], 422, ""),
        ({"documents": [{"id": "x", "text": " "}]}, 400, "document 'x' has neither text nor title"),
        ({"documents": [{"id": "x", "text": "y"}, {"id": "x", "text": "z"}]}, 400, "id 'x' comes twice"),
        ({"documents": [{"id": "x", "text": "y"}, {"id": "d0", "text": "z"}]}, 409, "id 'd0' is there already"),
    ],
)
def test_bad_documents_change_nothing(client, index, body, status, said):
    assert re.match(said, error_of(client.post("/api/documents", json=body), status))
    assert len(index) == 240
    assert "x" not in index


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b'{"documents": NaN}', b'"\\ud800"'])
def test_bodies_that_are_no_json(client, body):
    response = client.post("/api/documents", content=body, headers=JSON)
    assert response.status_code in (400, 415, 422)
    assert "Traceback" not in response.text


def test_half_a_surrogate_pair_comes_back_as_it_went_in(client):
    body = b'{"documents": [{"id": "s", "text": "w1", "metadata": {"half": "\\ud800", "nan": NaN}}]}'
    assert client.post("/api/documents", content=body, headers=JSON).status_code == 201
    got = client.get("/api/documents/s")
    assert b"\\ud800" in got.content
    assert json.loads(got.content)["metadata"] == {"half": "\ud800", "nan": None}
    assert client.get("/api/search", params={"q": "w1", "k": 1000}).status_code == 200
    assert "documents.0.id" in error_of(
        client.post("/api/documents", content=b'{"documents": [{"id": "\\ud800", "text": "x"}]}', headers=JSON), 422
    )


def test_large_bodies_are_refused_announced_or_not(client, monkeypatch, index):
    monkeypatch.setattr(hce.web.guard, "BODY_BYTES", 10_000)
    body = json.dumps({"documents": [{"id": "x", "text": "x" * 10_000}]}).encode()
    assert "at most" in error_of(client.post("/api/documents", content=body, headers=JSON), 413)
    parts = (body[start : start + 1000] for start in range(0, len(body), 1000))  # sent in chunks of no stated length
    assert "at most" in error_of(client.post("/api/documents", content=parts, headers=JSON), 413)
    assert len(index) == 240
    small = (part for part in [b'{"documents": [{"id":', b' "x", "text": "y"}]}'])
    assert client.post("/api/documents", content=small, headers=JSON).status_code == 201


def test_a_body_that_does_not_arrive_is_given_up(monkeypatch):
    monkeypatch.setattr(hce.web.guard, "BODY_SECONDS", 0.05)
    sent = []

    async def never(scope, receive, send):
        raise AssertionError("the application was reached")

    async def nothing_comes():
        await asyncio.sleep(60)

    async def send(message):
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"9")]
    scope = {"type": "http", "method": "POST", "path": "/api/documents", "headers": headers}
    asyncio.run(Guard(never, Rules())(scope, nothing_comes, send))
    assert sent[0]["status"] == 408


# ----------------------------------------------------------------------------------------------------- who may write

LINK = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
WRITE = {"host": "localhost:8080", "content-type": "application/json", "content-length": "2"}


@pytest.mark.parametrize(
    ("method", "headers", "rules", "status"),
    [
        ("GET", {"host": "127.0.0.1:8080"}, Rules(), None),
        ("GET", {"host": "localhost"}, Rules(), None),
        ("GET", {"host": "[::1]:8080"}, Rules(), None),
        ("GET", {"host": "LOCALHOST:1"}, Rules(), None),
        ("GET", {"host": "evil.example:8080"}, Rules(), 421),  # whose owner lets it point to 127.0.0.1
        ("GET", {"host": "127.0.0.1.evil.example"}, Rules(), 421),
        ("GET", {}, Rules(), 421),
        ("GET", {"host": "localhost."}, Rules(), None),
        ("GET", {"host": "192.168.0.7:8080"}, Rules(), 421),
        ("GET", {"host": "192.168.0.7:8080"}, Rules(addresses=True), None),
        ("GET", {"host": "[fe80::7]:8080"}, Rules(addresses=True), None),
        ("GET", {"host": "evil.example:8080"}, Rules(addresses=True), 421),
        ("GET", {"host": "192.168.0.7.evil.example"}, Rules(addresses=True), 421),
        ("GET", {"host": "1.2.3"}, Rules(addresses=True), 421),
        ("GET", {"host": ""}, Rules(addresses=True), 421),
        ("GET", {"host": "here.example"}, Rules(LOOPBACK | {"here.example"}), None),
        ("GET", {"host": "localhost", "sec-fetch-site": "same-origin"}, Rules(), None),
        ("GET", {"host": "localhost", "sec-fetch-site": "none", "sec-fetch-mode": "navigate"}, Rules(), None),
        ("GET", {"host": "localhost", "sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, Rules(), 403),
        ("GET", {"host": "localhost", "sec-fetch-site": "same-site", "sec-fetch-mode": "cors"}, Rules(), 403),
        ("GET", {"host": "localhost", **LINK}, Rules(), None),
        ("GET", {"host": "localhost", **LINK, "sec-fetch-dest": "iframe"}, Rules(), 403),
        ("GET", {"host": "localhost", "origin": "https://evil.example"}, Rules(), 403),
        ("POST", WRITE, Rules(), None),
        ("POST", {**WRITE, "origin": "http://localhost:8080"}, Rules(), None),
        ("POST", {**WRITE, "origin": "http://localhost:9999"}, Rules(), 403),
        ("POST", {**WRITE, "origin": "https://evil.example"}, Rules(), 403),
        ("POST", {**WRITE, "origin": "null"}, Rules(), 403),
        ("POST", {**WRITE, "sec-fetch-site": "cross-site"}, Rules(), 403),
        ("POST", {**WRITE, "sec-fetch-site": "same-origin"}, Rules(), None),
        ("DELETE", {"host": "localhost", "origin": "https://evil.example"}, Rules(), 403),
        ("DELETE", {"host": "localhost"}, Rules(), None),
        ("POST", {**WRITE, "content-type": "text/plain"}, Rules(), 415),  # what a form can send without asking
        ("POST", {**WRITE, "content-type": "application/json; charset=utf-8"}, Rules(), None),
        ("POST", {"host": "localhost", "transfer-encoding": "chunked"}, Rules(), 415),
        ("POST", WRITE, Rules(writable=False), 403),
        ("DELETE", {"host": "localhost"}, Rules(writable=False), 403),
        ("POST", WRITE, Rules(token="t"), 401),
        ("POST", {**WRITE, "authorization": "Bearer x"}, Rules(token="t"), 401),
        ("POST", {**WRITE, "authorization": "Basic t"}, Rules(token="t"), 401),
        ("POST", {**WRITE, "authorization": "Bearer é"}, Rules(token="t"), 401),
        ("POST", {**WRITE, "authorization": "bearer t"}, Rules(token="t"), None),
        ("GET", {"host": "localhost"}, Rules(token="t"), None),
    ],
)
def test_who_may_do_what(method, headers, rules, status):
    refused = refusal(method, headers, rules)
    assert (refused and refused.status) == status


def test_the_rules_hold_in_the_server(index):
    with TestClient(create_app(index, Rules(token="secret")), base_url=HOME) as client:
        new = {"documents": [{"id": "x", "text": "y"}]}
        refused = client.post("/api/documents", json=new)
        assert "Bearer TOKEN" in error_of(refused, 401)
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.headers["content-security-policy"].startswith("default-src 'self'")
        assert error_of(client.delete("/api/documents/d0"), 401)
        assert client.get("/api/status").json()["needs_token"] is True
        allowed = {"authorization": "Bearer secret"}
        assert client.post("/api/documents", json=new, headers=allowed).status_code == 201
        assert client.delete("/api/documents/d0", headers=allowed).status_code == 200
        assert error_of(client.get("/health", headers={"host": "evil.example"}), 421)
        assert error_of(client.put("/api/documents/d1", headers=allowed), 405)
        assert error_of(client.get("/api/nothing"), 404)


def test_a_token_is_made_up_when_others_can_connect():
    assert rules_for("127.0.0.1", None, True) == Rules(LOOPBACK, None, True)
    assert rules_for("localhost", "t", True) == Rules(LOOPBACK, "t", True)
    first, second = (rules_for(ANYWHERE, None, True).token for _ in range(2))
    assert len(first) >= 20
    assert first != second
    given = rules_for("10.0.0.1", "mine", True)
    assert (given.token, given.writable, given.addresses) == ("mine", True, True)
    assert rules_for(ANYWHERE, None, False).token is None


def test_by_which_names_a_server_is_called():
    here = socket.gethostname().lower()
    assert rules_for(ANYWHERE, "t", True).hosts == LOOPBACK | {ANYWHERE, here, f"{here}.local"}
    assert "box.example" in rules_for("Box.Example", "t", True).hosts
    proxied = rules_for("127.0.0.1", None, True, ["Search.Example"])
    assert "search.example" in proxied.hosts
    assert not proxied.addresses
    assert len(proxied.token) >= 20  # a proxy lets others in
    for wrong in ("", "a.example:80", "http://a.example", "*.example", "a b", "[::1]"):
        with pytest.raises(InputError, match="give only a host's name"):
            rules_for(ANYWHERE, "t", True, [wrong])


@pytest.mark.parametrize("token", ["", " ", "a b", "tab\t", "end\n", "é", "\x00", "\x7f", "x" * 1001, "\udcff"])
def test_tokens_that_no_request_could_bring_are_refused_and_not_shown(token):
    for host in ("127.0.0.1", ANYWHERE):
        with pytest.raises(InputError, match="ASCII letters, digits and punctuation marks, without spaces") as caught:
            rules_for(host, token, True)
        assert len(token) < 2 or token not in str(caught.value)
    rules_for(ANYWHERE, "!~aZ09+/=", True)


def test_an_address_that_is_taken_or_not_ours():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        taken.listen()
        assert url_of("127.0.0.1", taken) == f"http://127.0.0.1:{port}"
        assert url_of(ANYWHERE, taken) == f"http://127.0.0.1:{port}"
        assert url_of("::1", taken) == f"http://[::1]:{port}"
        with pytest.raises(InputError, match=f"cannot serve at 127.0.0.1:{port} .*choose another --port"):
            listen("127.0.0.1", port)
    with pytest.raises(InputError, match="cannot serve at no such host"):
        listen("no such host", 0)


# ----------------------------------------------------------------------------------------------------- the tree


def test_the_tree_is_that_of_the_documents(client, index):
    hierarchy = index.tree.hierarchy
    answer = client.get("/api/tree", params={"depth": 2, "most": 500}).json()
    root = answer["tree"]
    assert (answer["levels"], answer["path"], root["size"]) == (hierarchy.depth - 1, [], 240)
    assert sorted(child["node"] for child in root["children"]) == hierarchy.children(0, 0).tolist()
    sizes = [child["size"] for child in root["children"]]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == 240
    for child in root["children"]:
        assert child["name"] == hierarchy.names[0][child["node"]]
        assert child["size"] == len(hierarchy.documents_under(1, child["node"]))
        assert sorted(each["node"] for each in child["children"]) == hierarchy.children(1, child["node"]).tolist()
    few = client.get("/api/tree", params={"most": 1}).json()["tree"]
    assert few["children"][0]["node"] == root["children"][0]["node"]
    assert (len(few["children"]), few["child_count"]) == (1, len(root["children"]))


def test_a_nodes_documents_page_by_page(client, index):
    hierarchy, ids = index.tree.hierarchy, [document.id for document in index]
    last = hierarchy.depth - 1
    node = int(np.argmax(np.bincount(hierarchy.document_parent)))
    expected = [ids[row] for row in hierarchy.documents_under(last, node)]
    parameters = {"level": last, "node": node, "most": 3}
    pages = [client.get("/api/tree", params={**parameters, "offset": offset}).json() for offset in range(0, 240, 3)]
    assert [each["id"] for page in pages for each in page["documents"]] == expected
    assert pages[0]["tree"]["size"] == len(expected)
    assert [(each["level"], each["node"]) for each in pages[0]["path"]] == [
        (0, 0),
        *enumerate(hierarchy.path(int(hierarchy.documents_under(last, node)[0]))[: last - 1], start=1),
    ]


def test_the_tree_follows_what_is_written(client, index):
    hierarchy = index.tree.hierarchy
    place = client.get("/api/tree/path", params={"id": "d5"}).json()["way"]
    assert [step["node"] for step in place["steps"]] == list(hierarchy.path(5))[:-1]
    assert place["came_later"] is False
    leaf = place["steps"][-1]
    client.delete("/api/documents/d5")
    left = client.get("/api/tree", params={"level": leaf["level"], "node": leaf["node"], "most": 500}).json()
    assert left["tree"]["size"] == leaf["size"] - 1
    assert "d5" not in {each["id"] for each in left["documents"]}
    assert "no document 'd5'" in error_of(client.get("/api/tree/path", params={"id": "d5"}), 404)
    text = "w0 w5 w9 w14"
    client.post("/api/documents", json={"documents": [{"id": "late", "text": text}]})
    assert client.get("/api/tree").json()["tree"]["size"] == 240
    late = client.get("/api/tree/path", params={"id": "late"}).json()["way"]
    assert late["came_later"] is True
    way = client.get("/api/tree/path", params={"q": text}).json()["way"]  # the static encoder has no prompts
    assert [step["node"] for step in late["steps"]] == [step["node"] for step in way["steps"]]
    leaf = late["steps"][-1]
    parameters = {"level": leaf["level"], "node": leaf["node"], "offset": late["position"], "most": 1}
    assert [each["id"] for each in client.get("/api/tree", params=parameters).json()["documents"]] == ["late"]


def test_an_index_that_was_emptied(client, index):
    index.remove([document.id for document in index])
    answer = ready(client)
    assert (answer["hits"], answer["before"]["hits"]) == ([], [])
    root = client.get("/api/tree", params={"depth": 2}).json()["tree"]
    assert (root["size"], root["child_count"], root["children"]) == (0, 0, [])
    assert client.get("/api/tree/path", params={"q": "w0"}).status_code == 200
    assert client.get("/api/status").json()["index"]["documents"] == 0
    client.post("/api/documents", json={"documents": [{"id": "first", "text": "w0"}]})
    assert [hit["id"] for hit in ready(client)["hits"]] == ["first"]


def test_the_way_of_a_query_is_the_closest_child_at_each_level(client, index):
    hierarchy, vector = index.tree.hierarchy, index.encoder.encode(["w0 w9"], "query")[0]
    way = client.get("/api/tree/path", params={"q": "w0 w9"}).json()["way"]
    parent = 0
    for level, step in enumerate(way["steps"], start=1):
        scores = {child: float(hierarchy.levels[level - 1].centroids[child] @ vector)
                  for child in hierarchy.children(level - 1, parent).tolist()}  # fmt: skip
        ranked = sorted(scores, key=scores.__getitem__, reverse=True)
        assert (step["level"], step["node"], step["siblings"]) == (level, ranked[0], len(scores))
        assert [rival["node"] for rival in step["rivals"]] == ranked[1:4]
        assert step["score"] == pytest.approx(scores[ranked[0]], abs=1e-5)
        parent = step["node"]
    assert way["position"] is None


def test_nodes_that_are_not_there(client, tmp_path, planted_corpus, static_encoder):
    assert error_of(client.get("/api/tree", params={"level": 9}), 404).startswith("level 9: ")
    assert error_of(client.get("/api/tree", params={"level": 1, "node": 999}), 404).startswith("node 999: ")
    assert error_of(client.get("/api/tree", params={"level": -1}), 422)
    assert error_of(client.get("/api/tree", params={"depth": 3}), 422)
    assert error_of(client.get("/api/tree", params={"most": 501}), 422)
    assert "either q" in error_of(client.get("/api/tree/path"), 400)
    assert "either q" in error_of(client.get("/api/tree/path", params={"q": "a", "id": "b"}), 400)
    with Index.create(tmp_path / "plain", planted_corpus, static_encoder) as plain:
        bare = TestClient(create_app(plain), base_url=HOME)
        assert "carries no tree" in error_of(bare.get("/api/tree"), 404)
        assert "carries no tree" in error_of(bare.get("/api/tree/path", params={"q": "star"}), 404)
        assert bare.get("/api/status").json()["tree_nodes"] == []


# ----------------------------------------------------------------------------------------------------- status


def test_status_says_what_is_in_the_index(client, index, trained):
    status = client.get("/api/status").json()
    assert status["name"] == "index"
    assert (status["index"]["documents"], status["index"]["encoder"], status["index"]["base_encoder"]) == (
        240,
        "model",
        "start",
    )
    assert status["tree_nodes"] == [len(level.parent) for level in index.tree.hierarchy.levels]
    assert str(trained) not in json.dumps(status)  # names of folders stay here
    history = [json.loads(line) for line in (trained / "model" / "history.jsonl").read_text().splitlines()]
    facts = json.loads((trained / "model" / "hce.json").read_text())
    assert [{**epoch, "metric": np.mean(list(epoch["dev"].values()))} for epoch in history] == status["training"][
        "epochs"
    ]
    assert (status["training"]["before"], status["training"]["after"]) == (facts["before"], facts["after"])
    assert client.get("/health").json() == {"status": "ok", "documents": 240}


def test_a_damaged_history_is_no_history(index):
    with (index.path / "model" / "history.jsonl").open("a") as history:
        history.write('{"epoch": 9, "dev": {"a": 0.5}, "loss": {"document": NaN}}\n')
    client = TestClient(create_app(index), base_url=HOME)
    assert client.get("/api/status").json()["training"]["epochs"][-1]["loss"] == {"document": None}
    (index.path / "model" / "history.jsonl").write_text("{")
    assert TestClient(create_app(index), base_url=HOME).get("/api/status").json()["training"] is None


def test_the_drift_is_measured_once_for_each_state(index, monkeypatch):
    calls = []

    def drift(self):
        calls.append(len(self))
        return Drift("retrain", (f"{len(self)} documents",))

    monkeypatch.setattr(Index, "drift", drift, raising=False)
    client = TestClient(create_app(index), base_url=HOME)

    def measured():
        for _ in range(100):
            found = client.get("/api/status", params={"drift": True}).json()["drift"]
            if found["state"] == "done":
                return found
            time.sleep(0.01)
        raise AssertionError(found)

    assert client.get("/api/status").json()["drift"] is None
    assert calls == []  # it takes a while, so only who asks for it has it measured
    expected = {"state": "done", "verdict": "retrain", "reasons": ["240 documents"], "outdated": False, "grown": []}
    assert measured() == measured() == expected
    assert calls == [240]
    client.delete("/api/documents/d0")
    assert measured()["reasons"] == ["239 documents"]
    assert calls == [240, 239]


# ----------------------------------------------------------------------------------------------------- the page


STATIC = Path(hce.web.guard.__file__).parent / "static"


def test_the_page_takes_nothing_from_elsewhere(client):
    names = sorted(path.name for path in STATIC.iterdir())
    assert {"page.html", "page.js", "page.css", "docs.html"} <= set(names)
    for name in names:
        response = client.get(f"/static/{name}")
        assert response.text == (STATIC / name).read_text(encoding="utf-8")
        assert re.findall(r"https?://[^\s\"'`$)]+", response.text) in ([], ["http://www.w3.org/2000/svg"])
        assert "innerHTML" not in response.text
    for path, name in {"/": "page.html", "/docs": "docs.html"}.items():
        response = client.get(path)
        assert response.text == (STATIC / name).read_text(encoding="utf-8")
        policy = response.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "script-src" not in policy  # so that no inline script and no eval is allowed
        assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=", response.text)


TYPES = {"html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}


@pytest.mark.parametrize("path", ["/", "/docs", "/static/page.html", "/static/page.css", "/static/page.js"])
def test_a_browser_keeps_the_pages_files_and_asks_whether_they_changed(client, path):
    response = client.get(path)
    assert response.headers["content-type"] == TYPES[Path(path).suffix[1:] or "html"]
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-content-type-options"] == "nosniff"
    again = client.get(path, headers={"if-none-match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["cache-control"] == "no-cache"
    assert client.get(path, headers={"if-none-match": '"another"'}).status_code == 200


OUTSIDE = ("app.py", "../app.py", "%2e%2e/app.py", "..%2fapp.py", "..%5capp.py", "/etc/passwd", "%2fetc%2fpasswd")


@pytest.mark.parametrize("path", [*OUTSIDE, "", "%00", "x" * 999])
def test_no_other_file_can_be_reached(served, path):
    """Over a real socket, since a test client tidies addresses up before it sends them."""
    with connected(served) as connection:
        connection.sendall(f"GET /static/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        answer = all_of(connection)
    assert answer.startswith(b"HTTP/1.1 404 "), answer[:200]
    assert b"FastAPI" not in answer
    assert b"nosniff" in answer


def test_plotly_comes_from_its_package_and_stays_in_the_browser(client):
    assert '"/static/plotly.js"' in client.get("/static/plots.js").text
    asked = client.get("/static/plotly.js", follow_redirects=False)
    address = asked.headers["location"]
    assert asked.headers["cache-control"] == "no-cache"
    assert address == f"/static/plotly-{get_plotlyjs_version()}.min.js"
    small = client.get(address)
    assert small.headers["content-encoding"] == "gzip"
    assert small.headers["content-type"] == TYPES["js"]
    assert small.text == get_plotlyjs()
    assert small.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert client.get(address, headers={"accept-encoding": "identity"}).text == get_plotlyjs()
    assert len(gzip.compress(b"")) < int(small.headers["content-length"]) < 2_500_000


def test_every_answer_is_of_the_type_that_the_openapi_page_tells(client):
    described = client.get("/openapi.json").json()
    assert set(described["paths"]) == {
        "/api/search",
        "/api/fields",
        "/api/documents",
        "/api/documents/{doc_id}",
        "/api/tree",
        "/api/tree/path",
        "/api/map",
        "/api/map/places",
        "/api/map/points",
        "/api/map/documents",
        "/api/status",
        "/health",
        "/ready",
        "/v1/embeddings",
    }
    found = {
        api.SearchAnswer: ready(client),
        api.FieldsAnswer: client.get("/api/fields").json(),
        Document: client.get("/api/documents/d0").json(),
        browse.TreeAnswer: client.get("/api/tree", params={"depth": 2}).json(),
        browse.WayAnswer: client.get("/api/tree/path", params={"q": "w0"}).json(),
        api.StatusAnswer: client.get("/api/status", params={"drift": True}).json(),
        api.HealthAnswer: client.get("/health").json(),
        api.Written: client.delete("/api/documents/d0").json(),
        api.ErrorAnswer: client.get("/api/documents/d0").json(),
    }
    for kind, answer in found.items():
        TypeAdapter(kind).validate_python(answer)
        assert kind.__name__ in described["components"]["schemas"]
        assert set(answer) == set(described["components"]["schemas"][kind.__name__]["properties"])


# ----------------------------------------------------------------------------------------------------- trouble


def test_a_bug_shows_nothing_of_itself(index, monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("secret detail")

    monkeypatch.setattr(IndexState, "search", broken)
    client = TestClient(create_app(index), base_url=HOME, raise_server_exceptions=False)
    response = client.get("/api/search", params={"q": "x"})
    assert "secret" not in error_of(response, 500)
    assert response.headers["x-content-type-options"] == "nosniff"


def test_another_writer_is_a_reason_to_try_again(client, index, monkeypatch):
    monkeypatch.setattr(Store.writing.__wrapped__, "__defaults__", (0.05,))  # seconds to wait
    with Index.open(index.path) as other, other.state.store.writing():
        answers = [client.post("/api/documents", json={"documents": [{"id": "x", "text": "y"}]})]
        answers.append(client.delete("/api/documents/d0"))
    for answer in answers:
        assert "another process is writing" in error_of(answer, 503)
        assert answer.headers["retry-after"] == "1"


@contextmanager
def serving(index):
    """The index behind a real socket."""
    ready = threading.Event()
    listener = listen("127.0.0.1", 0)
    url = url_of("127.0.0.1", listener)
    server = Server(create_app(index), listener, ready.set)
    thread = threading.Thread(target=server.serve_until_stopped)
    thread.start()
    assert ready.wait(10)
    try:
        yield url, server
    finally:
        server.should_exit = True
        thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def served(index):
    with serving(index) as (url, _):
        yield url


def becomes(fact):
    """Wait until something is the case."""
    for _ in range(500):
        if fact():
            return
        time.sleep(0.01)
    raise AssertionError("it never was the case")


def connected(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def all_of(connection):
    """What a connection brings until the other side ends it."""
    parts = []
    with suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def refused(answer, status):
    """The sentence of an answer as it came over a socket."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), answer[:200]
    assert b"nosniff" in head
    assert b"content-type: application/json" in head
    assert set(json.loads(body)) == {"error"}
    return json.loads(body)["error"]


def test_64_at_once_get_what_one_gets(served, index):
    queries = [f"w{number} w{number + 40}" for number in range(64)]
    expected = [[hit.id for hit in index.search(query, 5)] for query in queries]
    with httpx.Client(base_url=served, timeout=30, limits=httpx.Limits(max_connections=64)) as http:

        def ask(query):
            response = http.get("/api/search", params={"q": query, "k": 5})
            return response.status_code, [hit["id"] for hit in response.json()["hits"]]

        with ThreadPoolExecutor(64) as pool:
            found = list(pool.map(ask, queries))
    assert found == [(200, ids) for ids in expected]


def test_slow_clients_keep_no_one_waiting(served):
    slow = [connected(served) for _ in range(60)]
    for number, connection in enumerate(slow):
        if number % 2:  # half a request
            connection.sendall(b"GET /api/search?q=w1 HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        else:  # a body that does not come
            head = b"POST /api/documents HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            connection.sendall(head + b"Content-Length: 100\r\n\r\n{")
    start = time.perf_counter()
    assert httpx.get(f"{served}/api/search", params={"q": "w1"}).status_code == 200
    assert time.perf_counter() - start < 5
    for connection in slow:
        connection.close()


def test_a_long_write_and_a_full_queue(served, index, monkeypatch):
    release, add = threading.Event(), Index.add

    def slowly(self, *batches, **options):
        release.wait(20)
        return add(self, *batches, **options)

    monkeypatch.setattr(Index, "add", slowly)
    with httpx.Client(base_url=served, timeout=30) as http, ThreadPoolExecutor(24) as pool:
        posts = [
            pool.submit(http.post, "/api/documents", json={"documents": [{"id": f"n{number}", "text": "w1"}]})
            for number in range(24)
        ]
        busy = [post.result() for post in _first_done(posts, 24 - 17)]  # one is under way, 16 wait, the rest go home
        assert {response.status_code for response in busy} == {503}
        assert busy[0].headers["retry-after"] == "1"
        assert http.get("/api/search", params={"q": "w1"}).status_code == 200  # meanwhile
        release.set()
        assert sorted(post.result().status_code for post in posts) == [201] * 17 + [503] * 7
    assert len(index) == 257


# ----------------------------------------------------------------------------------------------------- deadlines


class Search:
    """A search that goes on until nobody waits for it any more, and looks in between."""

    def __init__(self, monkeypatch):
        self.begun, self.ended = threading.Event(), threading.Event()
        monkeypatch.setattr(IndexState, "search", self)

    def __call__(self, *arguments, **options):
        self.begun.set()
        try:
            while True:
                check_deadline()
                time.sleep(0.005)
        finally:
            self.ended.set()


def test_an_answer_that_takes_too_long_is_given_up(served, monkeypatch):
    monkeypatch.setattr(hce.web.guard, "READ_SECONDS", 1.0)  # in which the search has begun, on a busy machine too
    search = Search(monkeypatch)
    response = httpx.get(f"{served}/api/search", params={"q": "x"}, timeout=30)
    assert error_of(response, 504) == "the answer took longer than 1 s and was canceled; ask for fewer documents"
    assert search.ended.wait(5)
    assert httpx.get(f"{served}/health").status_code == 200


def inside(lane):
    """How many calls run or wait."""
    return lane._room._initial_value - lane._room._value


def test_a_search_that_does_not_look_is_not_waited_for_and_keeps_its_thread(index, monkeypatch):
    monkeypatch.setattr(hce.web.guard, "READ_SECONDS", 1.0)
    release, begun = threading.Event(), []
    monkeypatch.setattr(IndexState, "search", lambda *arguments, **options: begun.append(1) or release.wait(20))
    with serving(index) as (url, server), httpx.Client(base_url=url, timeout=30) as http:
        lane = server.config.app.state.site.searches
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: http.get("/api/search", params={"q": "x"}), range(8)))
        assert {response.status_code for response in answers} == {504}
        becomes(lambda: inside(lane) == len(begun) == lane.threads)  # those in the queue have left it
        release.set()
        becomes(lambda: inside(lane) == 0)


def test_a_search_ends_when_its_asker_goes(served, monkeypatch):
    search = Search(monkeypatch)
    with connected(served) as connection:
        connection.sendall(b"GET /api/search?q=x HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert search.begun.wait(10)
        assert not search.ended.wait(0.2)
    assert search.ended.wait(5)


def test_a_write_is_carried_out_whole_even_if_nobody_waits(index, monkeypatch):
    monkeypatch.setattr(hce.web.guard, "WRITE_SECONDS", 0.3)
    add, begun, release = Index.add, threading.Event(), threading.Event()

    def slowly(self, *batches):
        begun.set()
        release.wait(20)
        check_deadline()
        return add(self, *batches)

    monkeypatch.setattr(Index, "add", slowly)
    body = json.dumps({"documents": [{"id": "second", "text": "w1"}]}).encode()
    head = "POST /api/documents HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: "
    with serving(index) as (url, _):
        response = httpx.post(f"{url}/api/documents", json={"documents": [{"id": "first", "text": "w1"}]}, timeout=30)
        assert "may still be carried out" in error_of(response, 504)
        assert begun.is_set()
        release.set()
        begun.clear()
        release.clear()
        with connected(url) as connection:
            connection.sendall(f"{head}{len(body)}\r\n\r\n".encode() + body)
            assert begun.wait(10)
        time.sleep(0.1)
        release.set()
        becomes(lambda: len(index) == 242)
    assert {"first", "second"} <= {document.id for document in index}


def test_half_a_body_is_not_written(served, index):
    """Even where what came of it is a whole document, and only blanks are missing."""
    body = b'{"documents": [{"id": "half", "text": "w1"}]}'
    head = b"POST /api/documents HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with connected(served) as connection:
        connection.sendall(head + b"Content-Length: 100\r\n\r\n" + body)
    time.sleep(0.3)
    assert "half" not in index


def test_who_stops_waiting_leaves_the_queue():
    async def ask():
        lane, release = Lane(1, 1), threading.Event()
        first = asyncio.create_task(lane.run(release.wait, 10))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(lane.run(time.sleep, 0))
        await asyncio.sleep(0.05)
        with pytest.raises(BusyError):
            await lane.run(time.sleep, 0)
        second.cancel()
        await asyncio.sleep(0.05)
        third = asyncio.create_task(lane.run(lambda: "done"))  # its place is free again
        first.cancel()
        await asyncio.sleep(0.05)
        assert inside(lane) == 2  # but what runs keeps its own
        release.set()
        assert await third == "done"
        lane.stop()
        assert await lane.run(lambda: "again") == "again"
        lane.stop()

    asyncio.run(ask())


def test_a_deadline_reaches_the_threads_of_a_lane():
    async def ask():
        with Deadline(-1).around():
            await Lane(1, 0).run(check_deadline)

    with pytest.raises(DeadlineError):
        asyncio.run(ask())


def test_a_query_of_660_words_for_a_thousand_long_documents(client, index):
    """It took minutes when each word was one more alternative of a pattern."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    pairs = [one + two for one in letters for two in letters][:660]
    text = " ".join(pairs * 10)
    index.add([Document(f"long{number}", f"{number} {text}") for number in range(100)])
    start = time.perf_counter()
    response = client.get("/api/search", params={"q": " ".join(pairs), "k": 1000})
    assert response.status_code == 200
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize("where", [" " * 500, "year=" + "9" * 400, "year<" + "9" * 400, "year in " + "9," * 200])
def test_conditions_meant_to_hurt(client, where):
    start = time.process_time()
    response = client.get("/api/search", params={"q": "w1", "where": where})
    assert response.status_code in (200, 400)
    assert time.process_time() - start < 5  # quadratic work would take minutes


# ----------------------------------------------------------------------------------------------------- connections


def test_connections_that_say_nothing_lock_nobody_out(index, monkeypatch):
    monkeypatch.setattr(hce.web.connection, "CONNECTIONS_OF_AN_ADDRESS", 20)
    with serving(index) as (url, server):
        idle = [connected(url) for _ in range(60)]
        for connection in idle[::2]:
            with suppress(OSError):
                connection.sendall(b"GET / HTTP/1.1\r\n")
        for _ in range(5):
            assert httpx.get(f"{url}/health").status_code == 200
        assert len(server.server_state.connections) <= 20
        for connection in idle:
            connection.close()


@pytest.mark.parametrize("limit", ["CONNECTIONS_OF_AN_ADDRESS", "CONNECTIONS"])
def test_requests_under_way_are_not_given_up_for_new_ones(index, monkeypatch, limit):
    monkeypatch.setattr(hce.web.connection, limit, 2)
    release, search = threading.Event(), IndexState.search

    def waits(*arguments, **options):
        return release.wait(20) and search(*arguments, **options)

    monkeypatch.setattr(IndexState, "search", waits)
    with serving(index) as (url, server), ThreadPoolExecutor(2) as pool:
        busy = [pool.submit(httpx.get, f"{url}/api/search", params={"q": "w1"}, timeout=30) for _ in range(2)]
        becomes(lambda: sum(each.waiting_since is None for each in list(server.server_state.connections)) == 2)
        for _ in range(3):
            response = httpx.get(f"{url}/health")
            assert error_of(response, 503) == "there are too many connections; try again in a moment"
            assert response.headers["retry-after"] == "1"
            assert response.headers["x-content-type-options"] == "nosniff"
        release.set()
        assert [each.result().status_code for each in busy] == [200, 200]
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"])
def test_the_head_of_a_request_has_a_deadline(served, monkeypatch, before):
    """Of the first one and of those after an answer, however steadily its letters come."""
    monkeypatch.setattr(hce.web.connection, "HEAD_SECONDS", 1.0)
    with connected(served) as silent, connected(served) as slow:
        start = time.perf_counter()
        for connection in (silent, slow):
            connection.sendall(before)
            answer = b""
            while before and not answer.endswith(b"}"):
                answer += connection.recv(65536)
        slow.settimeout(0.2)
        answer = b""
        for letter in itertools.chain(b"GET /health HTTP/1.1\r\n", itertools.repeat(ord("x"))):
            with suppress(TimeoutError):
                slow.sendall(bytes([letter]))
                answer = slow.recv(65536)
                break
            assert time.perf_counter() - start < 10
        slow.settimeout(5)
        answer += all_of(slow)  # which may come in two parts
        assert refused(answer, 408) == "the head of the request took longer than 1 s to arrive"
        assert all_of(silent) == b""
        assert time.perf_counter() - start < 5


def test_who_does_not_take_an_answer_is_let_go(index, monkeypatch):
    monkeypatch.setattr(hce.web.connection, "TAKE_SECONDS", 1.0)
    monkeypatch.setattr(hce.web.connection, "HEAD_SECONDS", 1.0)
    ask = f"GET {PLOTLY} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept-Encoding: identity\r\n"
    with serving(index) as (url, server):
        stuck = connected(url)
        stuck.sendall(f"{ask}\r\n".encode())
        closing = connected(url)
        closing.sendall(f"{ask}Connection: close\r\n\r\n".encode())
        steady = connected(url)
        steady.sendall(f"{ask}Connection: close\r\n\r\n".encode())
        size = 0
        while part := steady.recv(65536):
            size += len(part)
            time.sleep(0.03)
        assert size > len(get_plotlyjs())
        becomes(lambda: not server.server_state.connections)
        for connection in (stuck, closing, steady):
            connection.close()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),  # a browser that tries TLS
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: x\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
         b"Content-Type: application/json\r\n\r\nZZ\r\n", 400),
        (b"GET /" + b"x" * 900_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"a: b\r\n" * 200_000 + b"\r\n", 431),
    ],
)  # fmt: skip
def test_what_is_no_request_is_refused_in_json(served, request_bytes, status, caplog):
    with connected(served) as connection:
        with suppress(OSError):
            connection.sendall(request_bytes)
        answer = all_of(connection)
    said = refused(answer, status)
    assert said in ("this is not a valid HTTP/1.1 request", "the head of a request can hold 64 KB at most")
    assert "Traceback" not in caplog.text
    assert httpx.get(f"{served}/health").status_code == 200


def test_connections_are_counted_by_address_or_network():
    assert _network("127.0.0.1") == _network("::ffff:127.0.0.1") == "127.0.0.1"
    assert _network("2001:db8:1:2:3:4:5:6") == _network("2001:db8:1:2::9") == "2001:db8:1:2::/64"
    assert _network("2001:db8:1:3::9") != _network("2001:db8:1:2::9")
    assert _network("fe80::1%eth0") == "fe80::/64"
    assert _network("testclient") == "testclient"


@pytest.mark.skipif(sys.platform == "win32", reason="has no such limit")
@pytest.mark.parametrize(("files", "connections"), [(64, 32), (1024, 512), (4096, 512)])
def test_connections_fit_the_files_that_may_be_open(files, connections):
    """With those that are accepted at once before one can make room, they leave 20 files to the index."""
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files}))\n"
        "from hce.web.connection import BACKLOG, CONNECTIONS, CONNECTIONS_OF_AN_ADDRESS as near\n"
        "print(CONNECTIONS, near, BACKLOG)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    most, near, at_once = map(int, said.split())
    assert most == connections
    assert near <= 256
    assert most + at_once + 20 <= files


def test_stopping_with_work_under_way_is_quiet(index, monkeypatch, caplog, capfd):
    monkeypatch.setattr("hce.web.app.SECONDS_TO_END", 0.2)
    release = threading.Event()
    monkeypatch.setattr(IndexState, "search", lambda *arguments, **options: release.wait(20))
    listener, listens = listen("127.0.0.1", 0), threading.Event()
    url, server = url_of("127.0.0.1", listener), Server(create_app(index), listener, listens.set)
    thread = threading.Thread(target=server.serve_until_stopped)
    thread.start()
    assert listens.wait(10)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(httpx.get, f"{url}/api/search", params={"q": "x"}, timeout=30)
        time.sleep(0.3)
        server.should_exit = True
        assert error_of(waiting.result(), 503) == "the server is being stopped"
        release.set()
    thread.join(10)
    assert not thread.is_alive()
    assert "Traceback" not in capfd.readouterr().err + caplog.text


def _first_done(futures, count):
    for _ in range(1000):
        done = [future for future in futures if future.done()]
        if len(done) >= count:
            return done[:count]
        time.sleep(0.01)
    raise AssertionError(f"{len(done)} are done, not {count}")


def test_the_command_serves_and_stops(index, tmp_path):
    command = [sys.executable, "-m", "hce", "serve", str(index.path), "--port", "0", "--json", "--host", "localhost"]
    environment = {**os.environ, "HCE_TOKEN": "only-mine"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        told = json.loads(process.stdout.readline())
        assert told["documents"] == 240
        assert told["token"] is None
        assert "only-mine" not in json.dumps(told)  # who gave a token knows it
        assert httpx.delete(told["url"] + "/api/documents/d0").status_code == 401
        assert httpx.get(told["url"] + "/health").json() == {"status": "ok", "documents": 240}
        assert httpx.get(told["url"]).text.startswith("<!doctype html>")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "Traceback" not in said
    assert said.strip().endswith("stopped")


def test_a_token_that_cannot_work_is_refused_at_the_start(index, run_hce):
    run = run_hce("serve", index.path, "--port", "0", "--token", "two words")
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("error: ")
    assert "Traceback" not in run.stderr
    assert "two words" not in run.stderr


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn", "plotly.offline"])
def test_a_missing_package_is_one_line_with_the_command_that_installs_it(missing, index, monkeypatch, run_hce):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "hce.web.app")
    run = run_hce("serve", index.path)
    assert (run.returncode, run.stdout) == (1, "")
    said = rf"error: the web page needs {missing}, not installed here; pip install '.*\[web\]'"
    assert re.fullmatch(said, run.stderr.strip())


def test_queries_that_come_together_are_encoded_together():
    calls, release = [], threading.Event()

    def encode(texts):
        calls.append(list(texts))
        release.wait(10)
        if "bad" in texts:
            raise InputError("no")
        return np.array([[float(text)] for text in texts])

    async def ask():
        together = QueryBatcher(encode, waiting=41)
        first = asyncio.create_task(together.encode("0"))
        while not calls:
            await asyncio.sleep(0.001)
        others = [asyncio.create_task(together.encode(str(number))) for number in range(1, 42)]
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await together.encode("one too many")
        others[3].cancel()  # nobody waits for it any more
        release.set()
        found = await asyncio.gather(first, *others, return_exceptions=True)
        assert [vector[0] for number, vector in enumerate(found) if number != 4] == [*range(4), *range(5, 42)]
        with pytest.raises(InputError, match="no"):
            await together.encode("bad")
        assert (await together.encode("7")).tolist() == [7]

    asyncio.run(ask())
    assert [len(call) for call in calls] == [1, 32, 8, 1, 1]
