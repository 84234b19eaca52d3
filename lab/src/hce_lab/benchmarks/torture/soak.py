"""Soak: a server that is written to, searched, looked at, and rebuilt beside that, for long; what it holds is bounded.

Documents come and go, so that there are always about as many. What the server then holds more of each minute, memory or
file descriptors, it would hold without end.
"""

from __future__ import annotations

import http.client
import random
import shutil
import time
from pathlib import Path
from typing import NamedTuple

from hce.index.index import Index
from hce_lab.benchmarks.torture import children
from hce_lab.benchmarks.torture.kills import after, random_change, send
from hce_lab.benchmarks.torture.samples import Contents, Samples
from hce_lab.benchmarks.torture.serving import Served, server
from hce_lab.benchmarks.torture.tally import TRACEBACK, WRONG, Tally
from hce_lab.benchmarks.torture.verify import faults_of

NAME = "a server in a soak: requests"
SECONDS = 60  # for an answer
ROUNDS_A_REBUILD = 50
WARM = 0.3  # of the time, in which caches fill
MORE_MEMORY, MORE_FILES = 64 << 20, 16  # that a warm server may come to hold
LOOKS = (
    *("/api/search?q=w1+w2&k=10", "/api/search?q=w3&mode=words", "/api/map", "/api/map/points", "/api/tree?depth=2"),
    *("/api/status?drift=true", "/api/tree/path?q=w5", "/health"),
)


class Held(NamedTuple):
    """What a process holds: bytes of memory, and open files."""

    memory: int
    files: int

    @classmethod
    def by(cls, process: int) -> Held:
        """Look at a process."""
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
        return cls(pages * 4096, len(list(Path(f"/proc/{process}/fd").iterdir())))


def run(tally: Tally, samples: Samples, folder: Path, count: int, seed: int) -> None:
    """Keep a server busy for so many seconds."""
    if not Path("/proc/self/statm").exists():
        tally.note(f"{NAME}: left out, since there is no /proc here")
        return
    rng = random.Random(seed)  # noqa: S311
    path = Path(shutil.copytree(samples.index, folder / "soak"))
    with server(path, samples.encoder) as served:
        contents, held = _soak(tally, served, path, dict(samples.contents), rng, count)
        if "Traceback" in (said := served.said()):
            tally.fault(NAME, TRACEBACK, said)
    for line in growth(held):
        tally.fault(NAME, WRONG, line)
    for kind, line in faults_of(path, samples.encoder, [contents])[0]:
        tally.fault(NAME, kind, line)
    first, last = held[0], held[-1]
    tally.note(f"{NAME}: {first.memory >> 20} to {last.memory >> 20} MB, {first.files} to {last.files} files open")


def _soak(
    tally: Tally, served: Served, path: Path, contents: Contents, rng: random.Random, seconds: float
) -> tuple[Contents, list[Held]]:
    """Write, look and rebuild until the time is over; return what is in the index, and what the server held."""
    held, rounds, stop = [Held.by(served.process)], 0, time.monotonic() + seconds
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=SECONDS)
    while time.monotonic() < stop:
        change = random_change(rng, contents, rng.choice(("add", "update", "remove")))
        change["ids"] = change.get("ids", [])[:1]
        if change["ids"] or change.get("documents"):
            send(connection, change)
            if _answered(tally, connection, str(change)):
                contents = after(contents, change)
        for look in LOOKS:
            connection.request("GET", look)
            _answered(tally, connection, look)
        rounds += 1
        if rounds % ROUNDS_A_REBUILD == 0:
            _rebuild(tally, path)
        held.append(Held.by(served.process))
    connection.close()
    return contents, held


def _answered(tally: Tally, connection: http.client.HTTPConnection, asked: str) -> bool:
    """Take an answer; one of the map may be that there is none yet."""
    tally.count(NAME)
    answer = connection.getresponse()
    said = answer.read()
    if answer.status // 100 != 2 and (answer.status, asked) != (404, "/api/map/points"):
        tally.fault(NAME, WRONG, f"{asked}: {answer.status} {said[:200]!r}")
    return answer.status // 100 == 2


def _rebuild(tally: Tally, path: Path) -> None:
    """Rebuild the index in another process."""

    def work() -> None:
        with Index.open(path) as index:
            index.rebuild()

    ending = children.child(work)
    if ending.code:
        tally.fault(NAME, TRACEBACK, f"rebuild: {ending.said}")


def growth(held: list[Held]) -> list[str]:
    """Say what a warm server came to hold more of than it may, comparing the medians of two spans."""
    warm = held[int(WARM * len(held)) :]
    if len(warm) < 4:
        return []
    quarter = len(warm) // 4

    def median(some: list[int]) -> int:
        return sorted(some)[len(some) // 2]

    more = [
        median([getattr(each, name) for each in warm[-quarter:]])
        - median([getattr(each, name) for each in warm[:quarter]])
        for name in Held._fields
    ]
    lines = {f"{more[0] >> 20} MB more than when it was warm": more[0] > MORE_MEMORY}
    lines[f"{more[1]} more files open than when it was warm"] = more[1] > MORE_FILES
    return [line for line, is_too_much in lines.items() if is_too_much]
