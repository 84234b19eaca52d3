"""The web server: many clients at once beside one bare search, measured in one run.

    python -m hce_lab serve INDEX [--clients 64] [--searches 20] [--idle 600]

starts `hce serve` on the index and lets that many clients search at once, each as fast as it is answered. Beside it
stand one client alone, and what a search cannot do without: encoding the query and a faiss flat search, one query
after the other. With --idle, one client searches once more beside that many connections that say nothing, each query
over a connection of its own. Prints median and 99th percentile of each, and fails if a single answer is not what it
should be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlsplit

import faiss
import numpy as np

from hce.index.index import Index

K = 10
WORDS = 6  # of a query


class Timing(NamedTuple):
    """How long requests took, each in seconds, and all together."""

    each: list[float]
    whole: float

    def line(self, name: str) -> str:
        """Return median, 99th percentile and rate, for the screen."""
        median, last = 1000 * np.quantile(self.each, [0.5, 0.99])
        rate = len(self.each) / self.whole
        return f"{name:34} median {median:8.2f} ms   p99 {last:8.2f} ms   {rate:8.0f} searches/s"


def queries_of(index: Index, count: int) -> list[str]:
    """Make queries of a few neighbouring words of random documents."""
    rng = np.random.default_rng(0)
    texts = [document.full_text.split() for document in index]
    chosen = [texts[row] for row in rng.integers(len(texts), size=count)]
    starts = [int(rng.integers(max(1, len(words) - WORDS))) for words in chosen]
    return [" ".join(words[start : start + WORDS]) for words, start in zip(chosen, starts, strict=True)]


def bare(index: Index, queries: list[str]) -> Timing:
    """Time encoding and a faiss search, nothing else."""
    _, vectors = index.vectors()
    flat = faiss.IndexFlatIP(vectors.shape[1])
    flat.add(vectors)
    encoder, each = index.encoder, []
    encoder.encode(["warm up"], "query")
    start = time.perf_counter()
    for query in queries:
        began = time.perf_counter()
        flat.search(encoder.encode([query], "query"), K)
        each.append(time.perf_counter() - began)
    return Timing(each, time.perf_counter() - start)


@contextmanager
def server(index: Path) -> Iterator[str]:
    """Run a server in a process of its own; yield its address."""
    command = [sys.executable, "-m", "hce", "serve", str(index), "--port", "0", "--json", "--read-only"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        told = process.stdout.readline() if process.stdout else ""
        yield json.loads(told)["url"]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


async def client(url: str, queries: list[str], expected: list[str]) -> list[float]:
    """Search over one connection, one query after the other, and check the answers."""
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    times = []
    for query, best in zip(queries, expected, strict=True):
        start = time.perf_counter()
        request = f"GET /api/search?k={K}&q={quote(query)} HTTP/1.1\r\nHost: {where.netloc}\r\n\r\n"
        writer.write(request.encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("content-length:"))
        body = await reader.readexactly(length)
        times.append(time.perf_counter() - start)
        if " 200 " not in head.split("\r\n")[0] or json.loads(body)["hits"][0]["id"] != best:
            raise SystemExit(f"wrong answer to {query!r}: {head.splitlines()[0]} {body[:200]!r}")
    writer.close()
    return times


async def clients(url: str, queries: list[str], expected: list[str], count: int) -> Timing:
    """Split the queries among clients that ask at the same time."""
    start = time.perf_counter()
    parts = await asyncio.gather(*(client(url, queries[i::count], expected[i::count]) for i in range(count)))
    return Timing([each for part in parts for each in part], time.perf_counter() - start)


async def beside_idle(url: str, queries: list[str], expected: list[str], count: int) -> Timing:
    """Search beside connections that say nothing, each query over a new connection."""
    where = urlsplit(url)
    idle = [await asyncio.open_connection(where.hostname, where.port) for _ in range(count)]
    start = time.perf_counter()
    each = [await client(url, [query], [best]) for query, best in zip(queries, expected, strict=True)]
    whole = time.perf_counter() - start
    for _, writer in idle:
        writer.close()
    return Timing([seconds for part in each for seconds in part], whole)


def main() -> None:
    """Measure, and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("index", type=Path)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--searches", type=int, default=20)
    parser.add_argument("--idle", type=int, default=0)
    arguments = parser.parse_args()
    with Index.open(arguments.index) as index:
        queries = queries_of(index, arguments.clients * arguments.searches)
        expected = [index.search(query, 1)[0].id for query in queries]
        print(f"{len(index):,} documents, {index.state.manifest.encoder}, {len(queries):,} queries")
        alone = bare(index, queries)
        with server(arguments.index) as url:
            asyncio.run(clients(url, queries[:50], expected[:50], 1))  # warm up
            one = asyncio.run(clients(url, queries, expected, 1))
            many = asyncio.run(clients(url, queries, expected, arguments.clients))
            if arguments.idle:
                beside = asyncio.run(beside_idle(url, queries[:200], expected[:200], arguments.idle))
        again = bare(index, queries)
    best = min(alone, again, key=lambda timing: timing.whole)
    print(best.line("encode + faiss flat, bare"))
    print(one.line("served, 1 client"))
    print(many.line(f"served, {arguments.clients} clients at once"))
    if arguments.idle:
        print(beside.line(f"served, beside {arguments.idle} idle"))
    print(f"errors: 0 of {len(many.each):,}")
    ratio = (len(many.each) / many.whole) / (len(best.each) / best.whole)
    print(f"searches/s served to {arguments.clients} clients / bare, one after the other: {ratio:.2f}")
