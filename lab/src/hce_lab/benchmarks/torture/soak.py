"""Soak: write to a real `hce serve` for an hour, read from it and rebuild its index, and bound what it holds.

Documents come and go, so that there are always about as many. Memory is what the process has of its own (RssAnon):
pages of mapped files come and go as the system likes. The first third of the time warms the caches up; between the
middle third and the last one, neither memory nor open files may grow by more than a bound. Pauses between the rounds
keep the soak to a small share of a core.
"""

from __future__ import annotations

import http.client
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

from hce.index.index import Index
from hce_lab.benchmarks.torture.damage import LONG
from hce_lab.benchmarks.torture.kills import after, random_change, send
from hce_lab.benchmarks.torture.samples import Contents, Samples
from hce_lab.benchmarks.torture.tally import TRACEBACK, WRONG, Tally
from hce_lab.benchmarks.torture.verify import faults_of

NAME = "a server in a soak: requests"
SECONDS = 60  # for an answer
PAUSE = 0.3  # after each round
ROUNDS_A_REBUILD = 200
LOG_SECONDS = 10
JUDGED_SECONDS = 600  # a shorter soak only warms up
MORE_MEMORY, MORE_FILES = 16 << 20, 4  # that the last third may hold above the middle one
WAIT = b"another process is writing to this index; try again"  # the answer to a write, after 5 s
LOOKS = (
    *("/api/search?q=w1+NEW&k=10", "/api/search?q=w3+NEW&mode=words", "/api/search?q=w5&compare=true&facet=n"),
    *("/api/map", "/api/map/points", "/api/tree?depth=2", "/api/tree/path?q=w5", "/api/documents/long"),
    *("/api/status?drift=true", "/api/fields", "/metrics", "/health"),
)


class Held(NamedTuple):
    """What a process holds: bytes of memory of its own, and open files."""

    memory: int
    files: int

    @classmethod
    def by(cls, process: int) -> Held:
        """Look at a process."""
        status = Path(f"/proc/{process}/status").read_text()
        anonymous = int(re.search(r"RssAnon:\s+(\d+) kB", status)[1])  # type: ignore[index]
        return cls(anonymous << 10, len(list(Path(f"/proc/{process}/fd").iterdir())))


class Serving(NamedTuple):
    """A running `hce serve`: its process, its port, and the file with all that it says."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path


def run(tally: Tally, samples: Samples, folder: Path, count: int, seed: int) -> None:
    """Keep a server busy for so many seconds."""
    if not Path("/proc/self/status").exists():
        tally.note(f"{NAME}: left out, since there is no /proc here")
        return
    rng = random.Random(seed)  # noqa: S311
    path = Path(shutil.copytree(samples.index, folder / "soak"))
    contents = {**samples.contents, LONG.id: (LONG.text, 1)}
    with Index.open(path, samples.encoder) as index:
        index.add([LONG])
    with served(path) as serving:
        contents, held = _soak(tally, serving, path, contents, rng, count)
    if "Traceback" in (said := serving.log.read_text(errors="replace")):
        tally.fault(NAME, TRACEBACK, said)
    for line in growth(held) if count >= JUDGED_SECONDS else ():
        tally.fault(NAME, WRONG, line)
    for kind, line in faults_of(path, samples.encoder, [contents])[0]:
        tally.fault(NAME, kind, line)
    first, last = held[0], held[-1]
    tally.note(f"{NAME}: {first.memory >> 20} to {last.memory >> 20} MB, {first.files} to {last.files} files open")


@contextmanager
def served(path: Path) -> Iterator[Serving]:
    """Serve an index by the command, in a process that holds nothing of this one."""
    log = path.with_name(f"{path.name}.log")
    with log.open("wb") as output:
        process = subprocess.Popen(_hce("serve", path, "--port", "0"), stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + SECONDS
        while not (found := re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text())):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: {log.read_text()}")
            time.sleep(0.1)
        yield Serving(process, int(found[1]), log)
    finally:
        process.terminate()
        process.wait(SECONDS)


def _soak(
    tally: Tally, serving: Serving, path: Path, contents: Contents, rng: random.Random, seconds: float
) -> tuple[Contents, list[Held]]:
    """Write, look and rebuild until the time is over; return what is in the index, and what the server held."""
    start, rounds, held, rebuild = time.monotonic(), 0, [Held.by(serving.process.pid)], None
    while (passed := time.monotonic() - start) < seconds:
        contents = _round(tally, serving.port, contents, rng)
        rounds += 1
        if rounds % ROUNDS_A_REBUILD == 0:
            _check_rebuilt(tally, rebuild)
            rebuild = subprocess.Popen(_hce("rebuild", path), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if passed >= LOG_SECONDS * len(held):
            held.append(Held.by(serving.process.pid))
            print(f"soak: {passed:.0f} s, {held[-1].memory >> 10} kB, {held[-1].files} files", flush=True)
        time.sleep(PAUSE)
    _check_rebuilt(tally, rebuild)
    return contents, held


def _round(tally: Tally, port: int, contents: Contents, rng: random.Random) -> Contents:
    """Write once and look at everything, over one connection; return what is in the index then."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)) as connection:
        others = {doc_id: value for doc_id, value in contents.items() if doc_id != LONG.id}
        change = random_change(rng, others, rng.choice(("add", "update", "remove")))
        change["ids"] = change.get("ids", [])[:1]
        if change["ids"] or change.get("documents"):
            send(connection, change)
            if _answered(tally, connection, str(change)):
                contents = after(contents, change)
        for look in LOOKS:
            connection.request("GET", look.replace("NEW", f"new{rng.randrange(10**9)}"))
            _answered(tally, connection, look)
    return contents


def _answered(tally: Tally, connection: http.client.HTTPConnection, asked: str) -> bool:
    """Take an answer; it may be that there is no map yet, or that a write has to wait for a rebuilding."""
    tally.count(NAME)
    answer = connection.getresponse()
    said = answer.read()
    is_expected = (answer.status, asked) == (404, "/api/map/points") or WAIT in said
    if answer.status // 100 != 2 and not is_expected:
        tally.fault(NAME, WRONG, f"{asked}: {answer.status} {said[:200]!r}")
    return answer.status // 100 == 2


def _hce(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "hce", *map(str, arguments)]


def _check_rebuilt(tally: Tally, rebuild: subprocess.Popen[bytes] | None) -> None:
    """Wait for a rebuilding, and count it if it failed."""
    if rebuild is not None and (said := rebuild.communicate(timeout=SECONDS)[1]) and rebuild.returncode:
        tally.fault(NAME, TRACEBACK, f"rebuild: {said.decode(errors='replace')}")


def growth(held: list[Held]) -> list[str]:
    """Say what the last third holds more of than the middle one, by more than it may; compare medians."""
    third = len(held) // 3
    if not third:
        return []
    middle, last = held[third : 2 * third], held[2 * third :]

    def more(name: str) -> int:
        return int(median(getattr(each, name) for each in last) - median(getattr(each, name) for each in middle))

    lines = {f"{more('memory') / 2**20:.0f} MB more in the last third": more("memory") > MORE_MEMORY}
    lines[f"{more('files')} more files open in the last third"] = more("files") > MORE_FILES
    return [line for line, is_too_much in lines.items() if is_too_much]
