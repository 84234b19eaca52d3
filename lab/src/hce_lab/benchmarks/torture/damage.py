"""Damage: every file of an index and of a model cut, flipped or taken away; nothing may be silently wrong then.

What was damaged is opened, searched and checked in a child. If the answers are not those of before, either opening or
`hce check` has to say so. No damage may end in a traceback, and neither may an attempt to repair it.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hce.data.text import Document
from hce.encoding.encoder import Encoder
from hce.errors import HceError
from hce.index.check import check
from hce.index.index import Index
from hce.training.model_folder import ModelFolder
from hce_lab.benchmarks.torture.children import child
from hce_lab.benchmarks.torture.samples import Samples, documents_of, random_contents, snapshots_often
from hce_lab.benchmarks.torture.tally import WRONG, Tally

LONG = Document("long", " ".join(f"w{number * 7 % 60}" for number in range(900)), "a long one", {"n": 1})
FEW = 8  # files
Way = Callable[[Path], None]


def run(tally: Tally, samples: Samples, folder: Path, count: int, seed: int) -> None:
    """Damage each file in each way, so many times by single bits; with 0, a few files in any way."""
    rng = random.Random(seed)  # noqa: S311
    index = folder / "whole-index"
    shutil.copytree(samples.index, index)
    child(lambda: _live_on(index))
    for kind, whole, ask in (("an index", index, _ask_index), ("a model", samples.model, _ask_model)):
        copy = folder / "damaged"
        expected = json.loads(child(lambda whole=whole, ask=ask: ask(whole)).said.splitlines()[-1])
        files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
        later = 0
        for name in files if count else rng.sample(files, FEW):
            for what, way in _ways(rng, count) if count else [rng.choice(list(_ways(rng, 1)))]:
                shutil.copytree(whole, copy)
                way(copy / name)
                later += _try(tally, f"damage to {kind}", copy, ask, expected, f"{name}: {what}")
                shutil.rmtree(copy)
        if later:
            tally.note(f"damage to {kind}: {later} times other answers, of which only hce check tells")


def _live_on(path: Path) -> None:
    """Give an index passages, removed documents, snapshots, and a log that nobody copied back; it is never closed."""
    snapshots_often()
    rng = random.Random(3)  # noqa: S311
    index = Index.open(path)
    index.add([LONG, *documents_of(random_contents(rng, [f"e{number}" for number in range(30)]))])
    index.remove(["d3", "d4"])
    index.search("w1 w2")
    index.rebuild()
    index.remove(["d5"])
    index.add(documents_of(random_contents(rng, [f"f{number}" for number in range(30)])))
    index.search("w1 w2")
    os._exit(0)


def _ways(rng: random.Random, count: int) -> Iterator[tuple[str, Way]]:
    yield "cut in half", lambda path: os.truncate(path, path.stat().st_size // 2)
    yield "emptied", lambda path: os.truncate(path, 0)
    yield "cut by a byte", lambda path: os.truncate(path, max(0, path.stat().st_size - 1))
    yield "taken away", lambda path: path.unlink()
    yield "2,000 bits flipped", lambda path: _flip(path, rng, 2000)
    for _ in range(count):
        yield "a bit flipped", lambda path: _flip(path, rng, 1)


def _flip(path: Path, rng: random.Random, count: int) -> None:
    """Flip bits, and leave size and time as they were."""
    stat, content = path.stat(), bytearray(path.read_bytes())
    for _ in range(count if content else 0):
        bit = rng.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def _try(tally: Tally, name: str, copy: Path, ask: Callable[[Path], Any], expected: Any, what: str) -> bool:
    """Look at one damaged folder; return whether its answers were other ones and only a check told so."""
    tally.count(name)
    ending = child(lambda: ask(copy))
    if ending.fault or ending.code != 0:
        kind, line = ending.fault or (WRONG, ending.said)
        tally.fault(name, kind, f"{what}: {line}")
        return False
    found = json.loads(ending.said.splitlines()[-1])
    if found["answer"] == expected["answer"] or found["answer"] is None or found["on opening"]:
        return False
    if found["by check"]:
        return True
    differ = [key for key, value in expected["answer"].items() if found["answer"][key] != value]
    tally.fault(name, WRONG, f"{what}: other {', '.join(differ)}, and not a word")
    return False


class _Lines(logging.Handler):
    """What is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("hce").addHandler(self)
        logging.getLogger("hce").setLevel(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _asked(path: Path, answers: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Use a folder, then check it, then repair it; tell what came of each."""
    opening, answer = _Lines(), None
    try:
        answer = answers(path)
    except HceError as error:
        opening.lines.append(str(error))
    checked = []
    for repair in (False, True):
        try:
            found = check(path, repair=repair)
            checked += [] if repair else [finding.what for finding in found.findings]
        except HceError as error:
            checked.append(str(error))
    return {"answer": answer, "on opening": opening.lines, "by check": checked}


def _ask_index(path: Path) -> dict[str, Any]:
    def answers(path: Path) -> dict[str, Any]:
        with Index.open(path) as index:
            entries = list(index.state.entries())
            return {
                "documents": [[e.document.id, e.document.text, e.document.title, e.document.metadata] for e in entries],
                "vectors": [float(np.round(entry.vector @ np.arange(1, 17), 4)) for entry in entries],
                "hits": [
                    [(hit.id, round(hit.score, 4)) for hit in index.search("w1 w2 w3", 20, mode=mode)]
                    for mode in ("dense", "words", "hybrid")
                ],
            }

    return _asked(path, answers)


def _ask_model(path: Path) -> dict[str, Any]:
    def answers(path: Path) -> dict[str, Any]:
        vectors = Encoder.load(path).encode(["w1 w2 w3", "w4 w5"])
        facts = ModelFolder.read(path).facts
        return {"vectors": np.round(vectors, 4).tolist(), "measures": [facts.before, facts.after]}

    return _asked(path, answers)
