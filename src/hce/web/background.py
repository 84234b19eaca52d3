"""Work next to the event loop: threads for each kind of request, queries encoded together, drift measured.

A lane has a few threads for one kind of work, so that no kind waits for another, and a limit to its queue. An encoder
takes one call at a time, and a call with many short texts costs little more than one with a single text: who comes
while a call is under way waits for the next one, together with all others who came meanwhile.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock, Thread
from typing import Any, Literal, TypeVar

import anyio.to_thread
import numpy as np

from hce.index.background import reason_of
from hce.index.drift import GrownNode
from hce.index.index import Index

Result = TypeVar("Result")
TEXTS_AT_ONCE = 32


class BusyError(Exception):
    """Too many are waiting already."""


class Lane:
    """Runs work in at most `threads` threads; whoever finds `waiting` others in the queue is turned away.

    Who stops waiting leaves the queue. Work under way keeps its thread, and its place, until it looks at the deadline
    that was set around it (`hce.progress`) or is done.

    Args:
        threads: how many calls run at once.
        waiting: how many more may wait.
    """

    def __init__(self, threads: int, waiting: int) -> None:
        self.threads, self.most = threads, threads + waiting
        self._inside = 0
        self._lock = Lock()
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[..., Result], *arguments: Any, **named: Any) -> Result:
        """Call `work` in a thread.

        Raises:
            BusyError: the queue is full.
        """
        with self._lock:
            if self._inside >= self.most:
                raise BusyError
            self._inside += 1
            self._pool = self._pool or ThreadPoolExecutor(self.threads, "lane")
            call = self._pool.submit(copy_context().run, partial(work, *arguments, **named))
        call.add_done_callback(self._leave)
        return await asyncio.wrap_future(call)

    def stop(self) -> None:
        """Let everyone in the queue go."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def _leave(self, call: Future[Any]) -> None:
        with self._lock:
            self._inside -= 1


class QueryBatcher:
    """Encodes texts for requests that run side by side.

    Args:
        encode: from texts to vectors of shape (texts, n); called in a thread, one call at a time.
        waiting: how many may wait.
    """

    def __init__(self, encode: Callable[[Sequence[str]], np.ndarray], waiting: int) -> None:
        self._encode = encode
        self._most = waiting
        self._waiting: list[tuple[str, asyncio.Future[np.ndarray]]] = []
        self._task: asyncio.Task[None] | None = None

    async def encode(self, text: str) -> np.ndarray:
        """Encode a text together with those of others; its vector is of shape (n,).

        Raises:
            BusyError: too many are waiting.
        """
        if len(self._waiting) >= self._most:
            raise BusyError
        found: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        self._waiting.append((text, found))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())
        return await found

    async def _work(self) -> None:
        while waiting := [each for each in self._waiting if not each[1].done()]:  # the others have gone
            batch, self._waiting = waiting[:TEXTS_AT_ONCE], waiting[TEXTS_AT_ONCE:]
            try:
                vectors = await anyio.to_thread.run_sync(self._encode, [text for text, _ in batch])
            except Exception as error:
                for _, found in batch:
                    if not found.done():
                        found.set_exception(error)
            else:
                for (_, found), vector in zip(batch, vectors, strict=True):
                    if not found.done():
                        found.set_result(vector)


@dataclass(frozen=True)
class DriftState:
    """The last measurement of the drift.

    Attributes:
        state: measuring, or done.
        verdict: ok, re-cluster, retrain or unknown.
        reasons: why, one sentence each.
        outdated: whether documents were written since then.
        grown: the regions of the tree that later documents went to, and what is new there.
    """

    state: Literal["measuring", "done"]
    verdict: str = "unknown"
    reasons: tuple[str, ...] = ()
    outdated: bool = False
    grown: tuple[GrownNode, ...] = ()


class DriftWatch:
    """Measures the drift at most once for each state of the documents, and only when somebody asks."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._lock = Lock()
        self._measured_at = -1
        self._began = -math.inf
        self._state = DriftState("measuring")
        self._thread: Thread | None = None

    def now(self, pause: float = 0.0) -> DriftState:
        """Return the last verdict; where documents were written since, measure a newer one in the background.

        Args:
            pause: seconds that have to have passed since the last measurement began.
        """
        with self.index.state.reading() as reader:
            change = reader.moment().change
        with self._lock:
            outdated = self._measured_at != change
            if outdated and self._thread is None and time.monotonic() - self._began >= pause:
                self._began = time.monotonic()
                self._thread = Thread(target=self._measure, args=(change,), name="drift", daemon=True)
                self._thread.start()
            return replace(self._state, state="measuring" if outdated else "done", outdated=outdated)

    def stop(self) -> None:
        """Wait for a measurement under way, though not for ever."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout=10)

    def _measure(self, change: int) -> None:
        try:
            drift = self.index.drift()
            found = DriftState("done", drift.verdict, drift.reasons, grown=drift.grown)
        except Exception as error:
            found = DriftState("done", reasons=(reason_of(error, "the drift could not be measured"),))
        with self._lock:
            self._state, self._measured_at, self._thread = found, change, None
