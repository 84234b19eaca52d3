"""Answers of a server have limits: what is too long is cut and said to be, and few large ones are under way at once."""

from __future__ import annotations

import asyncio
import threading

import pytest
from fastapi.testclient import TestClient
from starlette.responses import Response

from hce.data.text import Document
from hce.index.index import Index
from hce.web import api, guard
from hce.web.api import Json
from hce.web.app import create_app
from hce.web.guard import Guard, Rules

HOME = "http://127.0.0.1"
LONG = Document("long", "star w1", title="a title " * 1000, metadata={"notes": "x" * 300_000, "kind": "long"})
SHORT = Document("short", "star w2", title="a title", metadata={"kind": "short"})


@pytest.fixture(scope="module")
def client(tmp_path_factory, module_static_encoder):
    path = tmp_path_factory.mktemp("answers") / "index"
    with (
        Index.create(path, [LONG, SHORT], module_static_encoder) as index,
        TestClient(create_app(index), base_url=HOME) as client,
    ):
        yield client


def test_what_is_too_long_is_cut_and_said_to_be(client):
    """A list has the beginning of a long title and no long metadata; the document itself has all."""
    hits = {hit["id"]: hit for hit in client.get("/api/search?q=star&k=10").json()["hits"]}
    assert hits["short"]["cut"] == []
    assert hits["short"]["metadata"] == SHORT.metadata
    assert hits["long"]["cut"] == ["title", "metadata"]
    assert hits["long"]["metadata"] == {}
    assert LONG.title.startswith(hits["long"]["title"])
    whole = client.get("/api/documents/long").json()
    assert (whole["title"], whole["metadata"]) == (LONG.title, LONG.metadata)


def test_many_hits_share_what_one_may_have(client, monkeypatch):
    """With few hits each has more room."""
    monkeypatch.setattr(api, "METADATA_SHOWN", 1_000_000)
    (alone,) = client.get("/api/search?q=star+w1&k=1&mode=words").json()["hits"]
    assert (alone["id"], alone["cut"]) == ("long", ["title"])
    assert len(client.get("/api/search?q=star&k=1000").content) < 50_000


def test_a_facet_has_no_value_that_no_condition_can_name(client):
    facets = client.get("/api/search?q=star&facet=notes&facet=kind").json()["facets"]
    assert facets["notes"] == []
    assert {each["value"] for each in facets["kind"]} == {"long", "short"}


@pytest.mark.parametrize("path", ["search?q=star", "documents/long", "fields", "status", "map"])
def test_an_answer_is_rendered_where_it_is_computed(client, monkeypatch, path):
    """Else what was computed would wait for the event loop in memory: 40 documents of 50 MB took 2 GB."""
    threads, render = [], Json.render

    def noted(self, content):
        threads.append(threading.current_thread().name)
        return render(self, content)

    monkeypatch.setattr(Json, "render", noted)
    client.get(f"/api/{path}")
    assert [name.partition("_")[0] for name in threads] == ["lane"]


SCOPE = {"type": "http", "method": "GET", "path": "/", "headers": [(b"host", b"localhost")], "query_string": b""}


class Asker:
    """Asks, and takes the answer only when it is let go on."""

    def __init__(self, app) -> None:
        self.status, self.takes = None, asyncio.Event()
        self._asks = asyncio.ensure_future(app(SCOPE, self._receive, self._send))

    async def _receive(self):
        await asyncio.Event().wait()

    async def _send(self, message):
        self.status = self.status or message["status"]
        if self.status == 200:
            await self.takes.wait()

    async def end(self):
        self.takes.set()
        await self._asks
        return self.status


def test_answers_under_way_have_a_budget_together(monkeypatch):
    """Beyond it an answer is refused until others are taken; one alone may be as large as it is."""
    monkeypatch.setattr(guard, "ANSWERS_BYTES", 1000)

    async def ask():
        app = Guard(Response(b"x" * 600), Rules())
        first = Asker(app)
        await asyncio.sleep(0.05)
        second = await Asker(app).end()
        return (
            await first.end(),
            second,
            await Asker(app).end(),
            await Asker(Guard(Response(b"x" * 5000), Rules())).end(),
        )

    assert asyncio.run(ask()) == (200, 503, 200, 200)


def test_no_memory_is_a_sentence():
    """A search for which there is no memory is refused, and is no bug."""

    async def app(scope, receive, send):
        raise MemoryError

    answer = TestClient(Guard(app, Rules()), base_url=HOME).get("/")
    assert (answer.status_code, answer.json()["error"][:25]) == (503, "not enough memory for thi")
