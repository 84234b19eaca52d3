"""Kill -9 within every operation: what was acknowledged must be there afterwards, and nothing half-done.

A child says on a pipe what it is about to do, and says so again when it is done. It is killed within the operation
that the trial is about: after a random part of the time that this took so far.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import shutil
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

from hce.data.corpus import Corpus
from hce.encoding.encoder import Encoder
from hce.errors import HceError
from hce.index.check import check
from hce.index.index import Index
from hce.training.train import train
from hce_lab.benchmarks.torture.children import end
from hce_lab.benchmarks.torture.samples import RECIPE, Contents, Samples, documents_of, random_contents, snapshots_often
from hce_lab.benchmarks.torture.serving import Served, start
from hce_lab.benchmarks.torture.tally import HANG, LOST, TRACEBACK, WRONG, Tally
from hce_lab.benchmarks.torture.verify import encoder_of, faults_of

KINDS = ("create", "add", "update", "remove", "rebuild", "search")
TRIALS_AN_INDEX = 10
KILLS_A_TRAINING = 6
SECONDS = 60  # after which an answer will never come
Change = dict[str, Any]


class Blow:
    """How a child's life ends: by kill -9, and whatever a subclass adds to that.

    Attributes:
        name: what the tally calls it.
    """

    name = "kill -9"

    def settle(self) -> None:
        """Keep for good what is on the disk now."""

    def strike(self, process: int, rng: random.Random) -> None:
        """Hit a process, just before the kill."""

    def recover(self) -> None:
        """Make what is left readable, after the kill."""


class Victim(Protocol):
    """An operation that is hit again and again."""

    def hit(self, rng: random.Random) -> None:
        """Hit one child, and look what it left."""

    def finish(self) -> None:
        """Look at what the last hits left, and note how many hit."""


def run(tally: Tally, samples: Samples, folder: Path, count: int, seed: int) -> None:
    """Kill children, as many in each kind of operation."""
    snapshots_often()
    blow = Blow()
    victims: list[Victim] = [Changing(tally, samples, folder, kind, blow) for kind in KINDS]
    hit_all([*victims, Training(tally, samples, folder, blow), Serving(tally, samples, folder, blow)], count, seed)


def hit_all(victims: list[Victim], count: int, seed: int) -> None:
    """Hit victims in turn, so that a run that is stopped early has tried all of them."""
    try:
        for trial in range(count):
            victims[trial % len(victims)].hit(random.Random(f"{seed} {trial}"))  # noqa: S311
    finally:
        for victim in victims:
            victim.finish()


class Durations:
    """How long operations took, to hit them while they last."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = defaultdict(list)

    def add(self, kind: str, seconds: float) -> None:
        """Remember how long one took."""
        self._seconds[kind].append(seconds)

    def within(self, kind: str, rng: random.Random) -> float:
        """Choose a moment within the next one."""
        known = sorted(self._seconds[kind])
        return rng.uniform(0, 1.1 * known[len(known) // 2] if known else 0.1)


class Voice(NamedTuple):
    """A child, and the pipe that it speaks on."""

    process: int
    pipe: Any

    def lines(self) -> Iterator[Any]:
        """Yield what it says, whole lines only, until it ends or is killed."""
        for line in self.pipe:
            if line.endswith(b"\n"):
                yield json.loads(line)

    def killed(self, blow: Blow, rng: random.Random) -> list[Any]:
        """Kill it by a blow; return what it had said until then and was not heard yet."""
        blow.strike(self.process, rng)
        rest = self.ended()
        blow.recover()
        return rest

    def ended(self) -> list[Any]:
        """Kill it, if it is still there; return what was not heard yet."""
        end(self.process)
        rest = list(self.lines())
        self.pipe.close()
        return rest


def speaking(work: Callable[[Callable[[Any], None]], None]) -> Voice:
    """Fork a child that does some work, given what it speaks with."""
    listen_at, speak_at = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(listen_at)
        _live(work, speak_at)
    os.close(speak_at)
    return Voice(process, os.fdopen(listen_at, "rb"))


def _live(work: Callable[[Callable[[Any], None]], None], pipe: int) -> NoReturn:
    def say(message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(pipe, data) :]

    try:
        work(say)
    except BaseException:
        say({"failed": traceback.format_exc()})
    finally:
        os._exit(0)


# ------------------------------------------------------------------------------------------------- an index


class Changing:
    """An index, and children that make it or change it and are killed within one kind of operation."""

    def __init__(self, tally: Tally, samples: Samples, folder: Path, kind: str, blow: Blow) -> None:
        self._tally, self._samples, self._kind, self._blow = tally, samples, kind, blow
        self._path, self._name = folder / f"hit-{kind}", f"{blow.name} in {kind}"
        self._durations, self._trials, self._hits = Durations(), 0, 0
        self._contents: Contents = {}

    def hit(self, rng: random.Random) -> None:
        """Hit one child, and look what it left."""
        if self._kind == "create" or self._trials % TRIALS_AN_INDEX == 0:
            self._renew()
        self._trials += 1
        self._tally.count(self._name)
        said = self._run(rng)
        waiting = self._replay(said)
        self._hits += waiting is not None and waiting["kind"] == self._kind
        if not self._path.exists():
            if self._kind != "create" or not waiting:
                self._tally.fault(self._name, LOST, "the index is gone")
            return
        allowed = [self._contents, *([after(self._contents, waiting)] if waiting else [])]
        wrong, self._contents = faults_of(self._path, encoder_of(self._path, self._samples), allowed)
        for kind, line in wrong:
            self._tally.fault(self._name, kind, f"{line} (under way: {waiting})")

    def finish(self) -> None:
        """Note how many hit."""
        self._tally.note(f"{self._name}: {self._hits} of {self._trials} before it was done")

    def _renew(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)
        self._contents = {}
        if self._kind != "create":
            shutil.copytree(self._samples.index, self._path)
            self._contents = dict(self._samples.contents)
        self._blow.settle()

    def _run(self, rng: random.Random) -> list[Any]:
        """Let one child live until it is within the operation; return all that it said."""
        chance = random.Random(rng.random())  # noqa: S311
        voice = speaking(lambda say: self._work(say, chance))
        said, left = [], rng.randrange(1, 4) if self._kind != "create" else 1
        for message in voice.lines():
            said.append(message)
            left -= message.get("kind") == self._kind
            if "failed" in message or left == 0:
                break
        time.sleep(self._durations.within(self._kind, rng))
        return said + voice.killed(self._blow, rng)

    def _work(self, say: Callable[[Any], None], rng: random.Random) -> None:
        contents, encoder = self._contents, self._samples.encoder
        if self._kind == "create":
            contents = random_contents(rng, [f"d{number}" for number in range(60)])
            say({"kind": "create", "documents": contents})
            start = time.perf_counter()
            Index.create(self._path, documents_of(contents), encoder, "grow").close()
            say({"done": time.perf_counter() - start})
            time.sleep(SECONDS)
        with Index.open(self._path, encoder_of(self._path, self._samples)) as index:
            index.search("w1 w2", k=3)
            while True:
                change = random_change(rng, contents, self._kind)
                if change["kind"] == "reindex":
                    has_first = index.state.manifest.fingerprint == encoder.fingerprint
                    change["to"] = str(self._samples.model if has_first else self._samples.encoder_folder)
                say(change)
                start = time.perf_counter()
                make(index, change)
                say({"done": time.perf_counter() - start})
                contents = after(contents, change)

    def _replay(self, said: list[Any]) -> Change | None:
        """Bring the contents to all that was acknowledged; return the change that was not."""
        waiting = None
        for message in said:
            if "failed" in message:
                self._tally.fault(self._name, TRACEBACK, message["failed"])
            elif "done" in message and waiting:
                self._durations.add(waiting["kind"], message["done"])
                self._contents, waiting = after(self._contents, waiting), None
            else:
                waiting = message
        return waiting


def random_change(rng: random.Random, contents: Contents, wanted: str) -> Change:
    """Choose what to do next: often what is wanted, else what makes that possible."""
    kind = wanted if rng.random() < 0.6 else rng.choice(("add", "update", "remove"))
    if kind == "reindex" and not contents:  # which is refused
        kind = "add"
    present = sorted(contents)
    count = rng.choice((1, 3, 40))
    some = rng.sample(present, min(count, len(present)))
    if kind == "add":
        free = [doc_id for doc_id in (f"d{i}" for i in range(400)) if doc_id not in contents]
        return {"kind": kind, "documents": random_contents(rng, rng.sample(free, min(count, len(free))))}
    if kind == "update":
        return {"kind": kind, "documents": random_contents(rng, [*some, f"d{rng.randrange(400)}"])}
    return {"kind": kind, "ids": some if kind == "remove" else []}


def make(index: Index, change: Change) -> None:
    """Make a change."""
    if change["kind"] == "rebuild":
        index.rebuild()
    elif change["kind"] == "reindex":
        index.reindex(change["to"])
    elif change["kind"] == "search":
        index.search("w1 w2", k=3)
    elif change["kind"] == "remove":
        index.remove(change["ids"])
    else:
        getattr(index, change["kind"])(documents_of(change["documents"]))


def after(contents: Contents, change: Change) -> Contents:
    """Return what should be there once a change is made."""
    written = {doc_id: tuple(value) for doc_id, value in change.get("documents", {}).items()}
    return {doc_id: value for doc_id, value in {**contents, **written}.items() if doc_id not in change.get("ids", ())}


# ------------------------------------------------------------------------------------------------- training


class Training:
    """A training that is killed again and again, and continued each time; it must end with the very same weights."""

    def __init__(self, tally: Tally, samples: Samples, folder: Path, blow: Blow) -> None:
        self._tally, self._samples, self._blow = tally, samples, blow
        self.name = f"{blow.name} in train --resume"
        self._output, self._kills, self._told = folder / "hit-model", 0, -1
        self._corpus = Corpus.load(samples.corpus)
        start = time.perf_counter()
        train(self._corpus, str(samples.encoder_folder), recipe=RECIPE, output=folder / "undisturbed")
        self._seconds = time.perf_counter() - start

    def hit(self, rng: random.Random) -> None:
        """Hit one run."""
        self._tally.count(self.name)
        self._kills += 1
        voice = speaking(self._work)
        time.sleep(rng.uniform(0, self._seconds))
        self._hear(voice.killed(self._blow, rng))
        if self._output.exists():
            self._look()
        elif self._kills % KILLS_A_TRAINING == 0:
            self.finish()

    def finish(self) -> None:
        """Let a run go on to its end, and look at the model."""
        if self._kills:
            voice = speaking(self._work)
            self._hear(list(voice.lines()))
            voice.ended()
            self._look()

    def _work(self, say: Callable[[Any], None]) -> None:
        train(
            self._corpus,
            str(self._samples.encoder_folder),
            recipe=RECIPE,
            output=self._output,
            resume=True,
            on_epoch=lambda epoch: say({"epoch": epoch.epoch}),
        )

    def _hear(self, said: list[Any]) -> None:
        """Compare the epochs that were told with those that were told before: none is made twice."""
        for message in said:
            if "failed" in message:
                self._tally.fault(self.name, TRACEBACK, message["failed"])
            elif message["epoch"] <= self._told:
                self._tally.fault(self.name, LOST, f"epoch {message['epoch']} was made again")
            self._told = max(self._told, message.get("epoch", -1))

    def _look(self) -> None:
        """Look at a model that is there: it must be whole, and the same as that of an undisturbed run."""
        try:
            found = check(self._output)
            if not found.is_sound:
                self._tally.fault(self.name, WRONG, f"a damaged model: {found.findings}")
            elif Encoder.load(self._output).fingerprint != self._samples.fingerprint:
                self._tally.fault(self.name, WRONG, "other weights than without kills")
        except HceError as error:
            self._tally.fault(self.name, LOST, str(error))
        shutil.rmtree(self._output, ignore_errors=True)
        self._blow.settle()
        self._told = -1


# ------------------------------------------------------------------------------------------------- serving


class Serving:
    """An index that is written to over HTTP, and its server killed while a request is under way."""

    def __init__(self, tally: Tally, samples: Samples, folder: Path, blow: Blow) -> None:
        self._tally, self._samples, self._blow, self._path = tally, samples, blow, folder / "hit-serve"
        self.name = f"{blow.name} in serve, with writes over HTTP"
        self._durations, self._trials, self._hits = Durations(), 0, 0
        self._contents: Contents = {}

    def hit(self, rng: random.Random) -> None:
        """Serve, write a few times, and kill the server within the last write."""
        if self._trials % TRIALS_AN_INDEX == 0:
            shutil.rmtree(self._path, ignore_errors=True)
            shutil.copytree(self._samples.index, self._path)
            self._contents = dict(self._samples.contents)
            self._blow.settle()
        self._trials += 1
        self._tally.count(self.name)
        served = start(self._path, self._samples.encoder)
        try:
            waiting = self._write(rng, served)
        except (OSError, http.client.HTTPException) as error:
            self._tally.fault(self.name, HANG if isinstance(error, TimeoutError) else TRACEBACK, repr(error))
            return
        finally:
            served.end()
            self._blow.recover()
        self._hits += waiting is not None
        if "Traceback" in (said := served.said()):
            self._tally.fault(self.name, TRACEBACK, said)
        allowed = [self._contents, *([after(self._contents, waiting)] if waiting else [])]
        wrong, self._contents = faults_of(self._path, self._samples.encoder, allowed)
        for kind, line in wrong:
            self._tally.fault(self.name, kind, f"{line} (under way: {waiting})")

    def finish(self) -> None:
        """Tell how many kills hit."""
        self._tally.note(f"{self.name}: {self._hits} of {self._trials} before the answer")

    def _write(self, rng: random.Random, served: Served) -> Change | None:
        """Write a few times; return the change that was not acknowledged when the end came."""
        server = http.client.HTTPConnection("127.0.0.1", served.port, timeout=SECONDS)
        for left in range(rng.randrange(1, 5), -1, -1):
            change = random_change(rng, self._contents, rng.choice(("add", "update", "remove")))
            change["ids"] = change.get("ids", [])[:1]
            if not change["ids"] and not change.get("documents"):
                continue
            began = time.perf_counter()
            send(server, change)
            if left == 0:
                time.sleep(self._durations.within("write", rng))
                self._blow.strike(served.process, rng)
                served.end()
                return None if self._is_acknowledged(server, change) else change
            if not self._is_acknowledged(server, change):
                self._tally.fault(self.name, WRONG, f"refused {change}")
            self._durations.add("write", time.perf_counter() - began)
        return None

    def _is_acknowledged(self, server: http.client.HTTPConnection, change: Change) -> bool:
        try:
            answer = server.getresponse()
            answer.read()
        except (ConnectionError, http.client.HTTPException):
            return False
        if answer.status // 100 == 2:
            self._contents = after(self._contents, change)
        return answer.status // 100 == 2


def send(server: http.client.HTTPConnection, change: Change) -> None:
    """Ask a server for a change."""
    if change["ids"]:
        server.request("DELETE", f"/api/documents/{change['ids'][0]}")
        return
    documents = [
        {"id": doc_id, "text": text, "metadata": {"n": n}} for doc_id, (text, n) in change["documents"].items()
    ]
    body = {"documents": documents, "update": change["kind"] == "update"}
    server.request("POST", "/api/documents", json.dumps(body), {"content-type": "application/json"})
