"""`/v1/embeddings`, asked by OpenAI's own client."""

from __future__ import annotations

import base64
import threading

import httpx
import numpy as np
import openai
import pytest

from hce.index.index import Index
from hce.web import api
from hce.web.app import Server, create_app, listen, url_of
from hce.web.background import BusyError
from hce.web.guard import rules_for


@pytest.fixture(scope="module")
def app(tmp_path_factory, planted_corpus, module_static_encoder):
    """The application of an index that nobody may write to: encoding is reading."""
    path = tmp_path_factory.mktemp("embeddings") / "index"
    Index.create(path, planted_corpus, module_static_encoder).close()
    with Index.open(path) as index:
        yield create_app(index, rules_for("127.0.0.1", None, writable=False))


@pytest.fixture(scope="module")
def address(app):
    listener, started = listen("127.0.0.1", 0), threading.Event()
    server = Server(app, listener, started.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    assert started.wait(60)
    yield url_of("127.0.0.1", listener)
    server.should_exit = True
    thread.join(30)


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as opened:
        yield opened


@pytest.mark.parametrize("encoding", ["float", "base64", None])  # by default the client asks for base64
def test_documents_have_the_vectors_of_the_index(client, app, planted_corpus, encoding):
    texts = [document.full_text for document in planted_corpus[:40]]
    options = {"encoding_format": encoding} if encoding else {}
    answer = client.embeddings.create(model="any", input=texts, **options)
    found = [each.embedding for each in answer.data]
    if encoding == "base64":
        found = [np.frombuffer(base64.b64decode(each), "<f4") for each in found]
    np.testing.assert_allclose(found, app.state.site.index.vectors()[1][:40], atol=1e-6)
    assert [each.index for each in answer.data] == list(range(40))
    assert answer.usage.total_tokens == sum(len(text.split()) for text in texts)


def test_a_query_has_the_vector_that_a_search_uses(client, app):
    index = app.state.site.index
    answer = client.embeddings.create(
        model="any", input="star red w3", dimensions=index.state.manifest.dim, extra_body={"input_type": "query"}
    )
    np.testing.assert_allclose(answer.data[0].embedding, index.state.encode_queries(["star red w3"])[0], atol=1e-6)
    best = index.search_vectors(np.array([answer.data[0].embedding], np.float32), 1)[0][0]
    assert best.id == index.search("star red w3", 1, mode="dense")[0].id


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"input": ""}, "input[0] is empty"),
        ({"input": ["star", " \n"]}, "input[1] is empty"),
        ({"input": []}, "input has 0 texts"),
        ({"input": ["x"] * 2049}, "input has 2,049 texts; send 1 to 2,048"),
        ({"input": "x" * 1_000_001}, "the limit is 1,000,000"),
        ({"input": [1, 2, 3]}, "not tokens"),
        ({"input": "star", "dimensions": 7}, "dimensions = 7: this encoder has"),
        (
            {"input": "star", "extra_body": {"input_type": "passage"}},
            "input_type: Input should be 'document' or 'query'",
        ),
    ],
)
def test_errors_are_in_openais_form(client, arguments, reason):
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="any", **arguments)
    assert reason in caught.value.body["message"]
    assert caught.value.body["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"[" * 100_000, b'{"input": "\\ud800"}', b"\xff"])
def test_what_is_no_request_is_refused(address, body):
    answer = httpx.post(f"{address}/v1/embeddings", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_the_guard_and_the_limits_are_the_apis(address, app, monkeypatch):
    url, asked = f"{address}/v1/embeddings", {"input": "star"}
    assert httpx.post(url, json=asked, headers={"origin": "https://evil.example"}).status_code == 403
    assert httpx.post(url, json=asked, headers={"host": "evil.example"}).status_code == 421
    assert httpx.post(url, content=b'{"input": "star"}').status_code == 415

    async def busy(*arguments):
        raise BusyError

    monkeypatch.setattr(app.state.site.embeddings, "run", busy)
    answer = httpx.post(url, json=asked)
    assert answer.status_code == 503 and answer.json()["error"]["type"] == "server_error"


def test_encoding_stops_when_nobody_waits_any_more(app):
    from hce.progress import Deadline, DeadlineError

    with Deadline(-1).around(), pytest.raises(DeadlineError):
        api._encode(app.state.site, ["star"], "document")
