"""Clients: 64 and 256 that search at once, and one beside 600 connections that say nothing."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import time
from pathlib import Path

from hce.index.index import Index
from hce_lab.benchmarks.torture.samples import WORDS, Samples
from hce_lab.benchmarks.torture.serving import server
from hce_lab.benchmarks.torture.tally import HANG, TRACEBACK, WRONG, Tally

AT_ONCE = (64, 256)
IDLE = 600
SECONDS = 60
Asked = list[tuple[str, str]]
"""Queries, and the document that each finds first."""


def run(tally: Tally, samples: Samples, folder: Path, count: int, seed: int) -> None:
    """Let crowds search, each client so many times."""
    rng = random.Random(seed)  # noqa: S311
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard) if hard > 0 else 4096, hard))
    with Index.open(samples.index, samples.encoder) as index:
        queries = [" ".join(f"w{rng.randrange(WORDS)}" for _ in range(3)) for _ in range(200)]
        asked = [(query, index.search(query, 1)[0].id) for query in queries]
    with server(samples.index, samples.encoder) as served:
        for clients in AT_ONCE:
            asyncio.run(_crowd(tally, served.port, asked, clients, count))
        asyncio.run(_beside_idle(tally, served.port, asked, 20 * count))
        if "Traceback" in (said := served.said()):
            tally.fault(f"{IDLE} idle connections", TRACEBACK, said)


async def _crowd(tally: Tally, port: int, asked: Asked, clients: int, count: int) -> None:
    """Let clients search at once, each over one connection, each as fast as it is answered."""
    name, start = f"searches of {clients} clients at once", time.perf_counter()
    parts = [[asked[(client + turn) % len(asked)] for turn in range(count)] for client in range(clients)]
    await asyncio.gather(*(_client(tally, name, port, part) for part in parts))
    tally.note(f"{name}: {clients * count / (time.perf_counter() - start):.0f}/s")


async def _beside_idle(tally: Tally, port: int, asked: Asked, count: int) -> None:
    """Search beside connections that say nothing, each time over a new connection."""
    name = f"searches beside {IDLE} idle connections"
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(IDLE)]
    slowest = 0.0
    for turn in range(count):
        start = time.perf_counter()
        await _client(tally, name, port, [asked[turn % len(asked)]])
        slowest = max(slowest, time.perf_counter() - start)
    tally.note(f"{name}: the slowest took {slowest:.2f} s")
    for _, writer in idle:
        writer.close()


async def _client(tally: Tally, name: str, port: int, asked: Asked) -> None:
    """Search over one connection, and compare what is found first."""
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), SECONDS)
        for query, best in asked:
            tally.count(name)
            path = f"/api/search?k=5&q={query.replace(' ', '+')}"
            writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
            head, body = await asyncio.wait_for(_answer(reader), SECONDS)
            if " 200 " not in head or json.loads(body)["hits"][0]["id"] != best:
                tally.fault(name, WRONG, f"{query!r}: {head.splitlines()[0]} {body[:200]!r}")
        writer.close()
    except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError) as error:
        tally.fault(name, HANG, f"no answer: {error!r}")


async def _answer(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("content-length:"))
    return head, await reader.readexactly(length)
