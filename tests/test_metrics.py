"""/metrics, read by Prometheus' own parser; /health and /ready."""

from __future__ import annotations

import asyncio
import sys
import time

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from hce.data.text import Document
from hce.errors import AwayError, FormatError, MissingPackageError
from hce.index.drift import Drift
from hce.index.index import Index
from hce.index.state import IndexState
from hce.web.app import create_app
from hce.web.background import BusyError, DriftState, DriftWatch
from hce.web.guard import rules_for
from hce.web.metrics import Metered, Metrics

HOME = "http://127.0.0.1"
LABELS = ("route", "code", "le", "verdict")


@pytest.fixture
def index(tmp_path, planted_corpus, module_static_encoder):
    Index.create(tmp_path / "index", planted_corpus, module_static_encoder).close()
    with Index.open(tmp_path / "index") as opened:
        yield opened


@pytest.fixture
def client(index):
    with TestClient(create_app(index), base_url=HOME, raise_server_exceptions=False) as opened:
        yield opened


def numbers(client):
    """All samples by name and labels, and how they were sent."""
    answer = client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    families = text_string_to_metric_families(answer.text)
    samples = [each for family in families for each in family.samples]
    return {
        (each.name, *(each.labels[label] for label in LABELS if label in each.labels)): each.value for each in samples
    }


def test_requests_are_counted_by_the_route_and_not_by_the_path(client):
    """Whatever paths a stranger makes up, a monitor gets no more labels."""
    for doc_id in ("star-red-1", "star-red-2", "nowhere"):
        client.get(f"/api/documents/{doc_id}")
    client.get("/api/search", params={"q": "star", "k": 1})
    client.get("/no/such/page")
    client.get("/health", headers={"host": "evil.example"})
    client.get("/static/page.css")
    client.request("PURGE", "/health")
    found = numbers(client)
    counted = {key[1:]: value for key, value in found.items() if key[0] == "hce_requests_total"}
    assert counted == {
        ("/api/documents/{doc_id:path}", "200"): 2,
        ("/api/documents/{doc_id:path}", "404"): 1,
        ("/api/search", "200"): 1,
        ("none", "404"): 1,
        ("none", "421"): 1,
        ("/static", "200"): 1,
        ("/health", "405"): 1,
    }
    assert found["hce_request_seconds_count", "/api/documents/{doc_id:path}"] == 3
    assert found["hce_request_seconds_bucket", "/api/search", "+Inf"] == 1


def test_a_client_that_leaves_is_counted(index):
    """As 499, the code that nginx has for it."""
    app = create_app(index)
    metrics = Metrics(app.state.site)

    async def silent(scope, receive, send):
        return

    asyncio.run(Metered(silent, metrics)({"type": "http"}, None, None))
    assert b'hce_requests_total{code="499",route="none"} 1.0' in metrics.text()


def test_what_is_told_of_the_index(client, index):
    found = numbers(client)
    assert (found["hce_up",], found["hce_documents",], found["hce_pending_changes",]) == (1, 240, 0)
    assert 0 <= found["hce_snapshot_age_seconds",] < 600
    client.post("/api/documents", json={"documents": [{"id": "new", "text": "star red"}]})
    client.delete("/api/documents/star-red-1")
    found = numbers(client)
    assert (found["hce_documents",], found["hce_pending_changes",]) == (240, 2)


def test_one_verdict_on_the_drift_is_1(client, index, monkeypatch):
    client.get("/api/status", params={"drift": True})
    wait_until(lambda: client.get("/api/status", params={"drift": True}).json()["drift"]["state"] == "done")
    verdict = client.get("/api/status", params={"drift": True}).json()["drift"]["verdict"]
    found = {key[1]: value for key, value in numbers(client).items() if key[0] == "hce_drift"}
    assert found == {each: float(each == verdict) for each in ("ok", "re-cluster", "retrain", "unknown")}


def wait_until(happened):
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_monitor_does_not_have_the_drift_measured_after_every_write(index, monkeypatch):
    watch, measured = DriftWatch(index), []
    monkeypatch.setattr(index, "drift", lambda: (measured.append(1), Drift("ok", ()))[1])
    for number in range(3):
        watch.now(600)
        index.add([Document(f"new-{number}", "star")])
    wait_until(lambda: measured)
    index.add([Document("one more", "star")])
    assert watch.now(600).state == "measuring"  # of an earlier state
    assert len(measured) == 1
    assert isinstance(watch.now(), DriftState)
    wait_until(lambda: watch.now(600).state == "done")
    watch.stop()
    assert len(measured) == 2  # asked for by people, it is measured at once


def test_a_damaged_store_is_told_and_requests_still_show(client, monkeypatch):
    client.get("/health")

    def damaged(index):
        raise FormatError("damaged")

    monkeypatch.setattr(IndexState, "reading", damaged)
    found = numbers(client)
    assert found["hce_up",] == 0 and ("hce_documents",) not in found
    assert found["hce_requests_total", "/health", "200"] == 1


def test_the_guard_is_the_apis(index):
    rules = rules_for("127.0.0.1", None, writable=False)
    with TestClient(create_app(index, rules), base_url=HOME) as client:
        assert client.get("/metrics").status_code == 200
        assert client.get("/metrics", headers={"host": "evil.example"}).status_code == 421
        assert client.get("/metrics", headers={"origin": "https://evil.example"}).status_code == 403
        assert client.post("/metrics", json={}).status_code == 403


def test_without_metrics_nothing_is_there_or_needed(index, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "hce.web.metrics", raising=False)
    with pytest.raises(MissingPackageError, match="--no-metrics"):
        create_app(index)
    with TestClient(create_app(index, metrics=False), base_url=HOME) as client:
        assert client.get("/metrics").status_code == 404
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize("error", [AwayError("Milvus is away"), BusyError()])
def test_ready_is_whether_a_search_is_answered_and_health_is_not(client, monkeypatch, error):
    assert client.get("/ready").json() == {"status": "ready", "documents": 240}

    def refused(*arguments):
        raise error

    monkeypatch.setattr(Index, "search_vectors", refused)
    assert client.get("/ready").status_code == 503
    assert client.get("/health").json() == {"status": "ok", "documents": 240}
