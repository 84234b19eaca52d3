"""Requests: made from the OpenAPI document by schemathesis, and mutated byte by byte, to a server that takes writes.

No request may be answered by 500, by a traceback in the server's log, by anything else than the document promises, or
not at all; and the index must be as whole afterwards as it was before.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from hce.data.text import Document
from hce.index.check import check
from hce.index.index import Index
from hce_lab.benchmarks.torture.inputs import mutated
from hce_lab.benchmarks.torture.samples import Samples
from hce_lab.benchmarks.torture.serving import Served, server
from hce_lab.benchmarks.torture.tally import HANG, LOST, TRACEBACK, WRONG, Tally

try:
    import schemathesis
except ImportError:  # it is not for Python 3.10
    schemathesis = None

SECONDS = 40  # a little more than a server takes at most
PATIENCE = 5  # before a request that is not whole is ended
AT_ONCE = 32
WITNESS = Document("a witness that no request names", "w1 w2 w3", "a witness", {"n": 7})
STATUS = re.compile(rb"^HTTP/1\.1 (\d{3}) ")
GENERATED, MUTATED = "requests made from the OpenAPI document", "mutated requests"
BODY = b'{"documents": [{"id": "a", "text": "w1 w2", "metadata": {"year": 2024}}], "update": true}'
HEAD = b" HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nConnection: close\r\n"
GETS = (
    *(b"/api/search?q=w1+w2&k=5&mode=words&where=n%3E%3D3", b"/api/search?q=w%201&compare=true", b"/api/documents/d7"),
    *(b"/api/tree?level=1&node=0&depth=2&most=5&offset=1", b"/api/tree/path?q=w3+w4", b"/api/status?drift=true"),
    *(b"/health", b"/openapi.json", b"/static/page.js", b"/docs", b"/"),
)


def run(tally: Tally, samples: Samples, folder: Path, count: int, seed: int) -> None:
    """Send requests, half of them of each kind."""
    path = folder / "fuzzed"
    shutil.copytree(samples.index, path)
    with Index.open(path, samples.encoder) as index:
        index.add([WITNESS])
    with server(path, samples.encoder) as served:
        left = count
        if schemathesis is None:
            tally.note("not tried: requests made by schemathesis, which is not installed")
        else:
            left -= _generated(tally, served, count // 2, seed)
        _mutated(tally, served, left, random.Random(seed))  # noqa: S311
        said = served.said()
    if "Traceback" in said:
        tally.fault(MUTATED, TRACEBACK, said)
    with Index.open(path, samples.encoder) as index:
        if index.get(WITNESS.id) != WITNESS:
            tally.fault(MUTATED, LOST, f"{WITNESS} has become {index.get(WITNESS.id)}")
        tally.note(f"requests: {len(index)} documents are there after them")
    for finding in check(path).findings:
        tally.fault(MUTATED, WRONG, finding.what)


def _is_well(tally: Tally, served: Served, name: str) -> None:
    """Ask the server how it is."""
    (answer,) = asyncio.run(_asked(served, [b"GET /health" + HEAD % served.port + b"\r\n"]))
    if answer is None or not answer.startswith(b"HTTP/1.1 200 "):
        tally.fault(name, HANG, f"not well any more: {answer!r}")


# ------------------------------------------------------------------------------------------------- by schemathesis


def _generated(tally: Tally, served: Served, count: int, seed: int) -> int:
    """Let schemathesis make requests, right and wrong ones, of each operation; return how many were made."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{served.port}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    modes = list(schemathesis.GenerationMode)
    before = tally.trials[GENERATED]
    for operation in operations:
        for mode in modes:
            every = settings(
                max_examples=max(1, count // (len(operations) * len(modes))),
                database=None,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )

            @seeded(seed)
            @every
            @given(operation.as_strategy(generation_mode=mode))
            def each(case: Any) -> None:
                _call(tally, case)

            try:
                each()
            except Exception as error:  # nothing wrong can be made of an operation that takes nothing
                if "Unsatisfiable" not in type(error).__name__:
                    raise
        _is_well(tally, served, GENERATED)
    return tally.trials[GENERATED] - before


def _call(tally: Tally, case: Any) -> None:
    import requests
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    promised = [not_a_server_error, checks.content_type_conformance, checks.response_schema_conformance]
    tally.count(GENERATED)
    try:
        answer = case.call(timeout=SECONDS)
    except requests.Timeout as error:
        tally.fault(GENERATED, HANG, f"{case.as_curl_command()}: {error}")
        return
    except (requests.RequestException, ValueError) as error:  # what requests does not send
        if isinstance(error, requests.ConnectionError):
            tally.fault(GENERATED, TRACEBACK, f"{case.as_curl_command()}: {error!r}")
        return
    try:
        case.validate_response(answer, checks=promised)
    except Exception as error:
        kind = TRACEBACK if answer.status_code == 500 else WRONG
        tally.fault(GENERATED, kind, f"{answer.status_code}: {error}; {getattr(error, 'exceptions', '')}")


# ------------------------------------------------------------------------------------------------- byte by byte


def _mutated(tally: Tally, served: Served, count: int, rng: random.Random) -> None:
    """Mutate the bytes of good requests."""
    head = HEAD % served.port
    json_head = head + b"Content-Type: application/json\r\n"
    good = [b"GET " + path + head + b"\r\n" for path in GETS]
    good += [b"DELETE /api/documents/a" + head + b"\r\n"]

    def request() -> bytes:
        if rng.random() < 0.6:
            return mutated(rng.choice(good), rng)
        body = mutated(BODY, rng)
        whole = b"POST /api/documents" + json_head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        return mutated(whole, rng) if rng.random() < 0.2 else whole

    for start in range(0, count, AT_ONCE):
        batch = [request() for _ in range(min(AT_ONCE, count - start))]
        for sent, answer in zip(batch, asyncio.run(_asked(served, batch)), strict=True):
            tally.count(MUTATED)
            if answer is None:
                tally.fault(MUTATED, HANG, f"no end after {SECONDS} s: {sent[:300]!r}")
            elif fault := _fault_of(answer):
                tally.fault(MUTATED, fault, f"{sent[:300]!r} → {answer[:300]!r}")
        _is_well(tally, served, MUTATED)


async def _asked(served: Served, requests: list[bytes]) -> list[bytes | None]:
    return await asyncio.gather(*(_ask(served, request) for request in requests))


async def _ask(served: Served, request: bytes) -> bytes | None:
    """Send bytes, and return all that is answered; None if that does not end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    reading = asyncio.ensure_future(_all_of(reader))
    try:
        with suppress(OSError):  # it has heard enough
            writer.write(request)
            await writer.drain()
            await asyncio.wait([reading], timeout=PATIENCE)
            if not reading.done() and writer.can_write_eof():
                writer.write_eof()  # it waits for the rest of a request that has none
        return await asyncio.wait_for(reading, SECONDS)
    except asyncio.TimeoutError:
        return None
    finally:
        writer.close()


async def _all_of(reader: asyncio.StreamReader) -> bytes:
    answer = b""
    with suppress(ConnectionError):
        while piece := await reader.read(65536):
            answer += piece
    return answer


def _fault_of(answer: bytes) -> str | None:
    """Return what is wrong with an answer: 5xx, or an error that is not one sentence in JSON."""
    if not answer:
        return None  # what is no request needs no answer, once who sent it has gone
    status = STATUS.match(answer)
    if not status or b"HTTP/1.1 500" in answer:
        return TRACEBACK
    if int(status[1]) < 400 or answer.count(b"HTTP/1.1 ") > 1:
        return None
    try:
        told = json.loads(answer.partition(b"\r\n\r\n")[2] or b'{"error": ""}')  # HEAD has no body
        return None if set(told) == {"error"} else WRONG
    except ValueError:
        return WRONG
