"""Work outside the event loop: lanes of threads, batches of queries, drift measurements.

A lane has a few threads for one kind of work and a limited queue, so one kind of request never blocks another. An
encoder handles one call at a time, and a call with many short texts costs little more than one with a single text. So
the queries that arrive during a call are encoded together in the next one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from threading import BoundedSemaphore, Lock, RLock
from typing import Any, Literal, TypeVar

import anyio.to_thread
import numpy as np

from hce.errors import HceError, InputError
from hce.index.background import Worker, reason_of
from hce.index.drift import GrownNode
from hce.index.index import Index
from hce.index.state import IndexState
from hce.training.query_mean import QueryMean, rows_of_first_part

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
TEXTS_AT_ONCE = 32
MOST_LOST = 100  # learned queries that a kill can lose
LEAST_AT_ONCE = 10  # learned queries in one write; a mean of fewer would reveal single queries
SECONDS_BETWEEN_WRITES = 10.0


class BusyError(Exception):
    """The queue is full."""


class Lane:
    """Runs work in at most `threads` threads, with at most `waiting` calls in the queue.

    A canceled call leaves the queue. Running work keeps its thread until it ends, or finds that its deadline is over.
    """

    def __init__(self, threads: int, waiting: int) -> None:
        self.threads, self._room = threads, BoundedSemaphore(threads + waiting)
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[..., Result], *arguments: Any, **named: Any) -> Result:
        """Call `work` in a thread; BusyError if the queue is full."""
        if not self._room.acquire(blocking=False):
            raise BusyError
        self._pool = self._pool or ThreadPoolExecutor(self.threads, "lane")
        call = self._pool.submit(copy_context().run, partial(work, *arguments, **named))
        call.add_done_callback(lambda _: self._room.release())
        return await asyncio.wrap_future(call)

    def stop(self) -> None:
        """Cancel all calls in the queue."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


class QueryBatcher:
    """Encodes the queries that arrive during a call together in the next; at most `waiting` wait."""

    def __init__(self, encode: Callable[[Sequence[str]], np.ndarray], waiting: int) -> None:
        self._encode, self._most = encode, waiting
        self._waiting: list[tuple[str, asyncio.Future[np.ndarray]]] = []
        self._task: asyncio.Task[None] | None = None

    async def encode(self, text: str) -> np.ndarray:
        """Encode a query; return its vector, of shape (n,)."""
        if len(self._waiting) >= self._most:
            raise BusyError
        found: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        self._waiting.append((text, found))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())
        return await found

    async def _work(self) -> None:
        while waiting := [each for each in self._waiting if not each[1].done()]:  # without canceled ones
            batch, self._waiting = waiting[:TEXTS_AT_ONCE], waiting[TEXTS_AT_ONCE:]
            try:
                vectors = await anyio.to_thread.run_sync(self._encode, [text for text, _ in batch])
                results = [partial(found.set_result, vector) for (_, found), vector in zip(batch, vectors, strict=True)]
            except Exception as error:
                results = [partial(found.set_exception, error) for _, found in batch]
            for (_, found), finish in zip(batch, results, strict=True):
                if not found.done():
                    finish()


class QueryLearner:
    """Encodes queries and adds them to the mean query in the index's folder, for `hce serve --learn-queries`.

    No text of a query is kept.
    """

    def __init__(self, state: IndexState) -> None:
        self._state = state
        encoder = state.present_encoder().encoder()
        if encoder.is_table:
            raise InputError(
                "--learn-queries: the mean of queries does not help this index's static encoder; leave the option out"
            )
        self._encoder = encoder
        self._rows: list[np.ndarray] = []
        self._written = time.monotonic()
        self._lock = RLock()

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Encode queries as the index does, and add them to the mean."""
        carried = self._state.present_encoder()
        vectors, encoder = self._state.encode_queries(texts), carried.encoder()
        if carried is not self._state.for_queries:  # the encoder was replaced meanwhile: learn nothing from these
            return vectors
        with self._lock:
            if encoder is not self._encoder:  # after a reindexing
                self.flush()
                self._encoder, self._rows = encoder, []
            if not encoder.is_table:
                self._rows += list(rows_of_first_part(vectors, encoder))
                if len(self._rows) >= MOST_LOST or time.monotonic() > self._written + SECONDS_BETWEEN_WRITES:
                    self.flush()
        return vectors

    def flush(self) -> None:
        """Add the latest queries to the mean on disk, unless there are too few.

        A failing disk loses these queries but fails no search.
        """
        with self._lock:
            if len(self._rows) < LEAST_AT_ONCE:
                return
            rows, self._rows, self._written = self._rows, [], time.monotonic()
            ours, folder = QueryMean.of_rows(np.stack(rows), self._encoder.parts[0].fingerprint), self._state.path
            try:
                kept = QueryMean.find(folder)
                (kept.and_of(ours) if kept is not None and kept.encoder == ours.encoder else ours).write(folder)
            except (HceError, OSError) as error:
                logger.warning("the mean of the queries was not saved (%s)", error)


@dataclass(frozen=True)
class DriftState:
    """The last drift measurement, and the regions of the tree that grew."""

    state: Literal["measuring", "done"]
    verdict: str = "unknown"  # or ok, re-cluster, retrain
    reasons: tuple[str, ...] = ()
    outdated: bool = False  # whether documents were written since that measurement
    grown: tuple[GrownNode, ...] = ()


class DriftWatch:
    """Measures drift on request, at most once for each state of the documents."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._lock = Lock()
        self._measured_at = -1
        self._began = -math.inf
        self._state = DriftState("measuring")
        self._worker = Worker(self._measure, "drift")

    def now(self, pause: float = 0.0) -> DriftState:
        """Return the last verdict; measure again if documents were written since.

        At least `pause` seconds lie between the starts of two measurements.
        """
        outdated = self._change() != self._measured_at
        with self._lock:
            if outdated and time.monotonic() - self._began >= pause:
                self._began = time.monotonic()
                self._worker.wake()
            return replace(self._state, state="measuring" if outdated else "done", outdated=outdated)

    def stop(self) -> None:
        """Wait for a running measurement."""
        self._worker.stop()

    def _change(self) -> int:
        with self.index.state.reading() as reader:
            return reader.moment().change

    def _measure(self) -> None:
        change = self._change()
        if change == self._measured_at:  # woken again during the last measurement
            return
        try:
            drift = self.index.drift()
            found = DriftState("done", drift.verdict, drift.reasons, grown=drift.grown)
        except Exception as error:
            found = DriftState("done", reasons=(reason_of(error, "the drift could not be measured"),))
        with self._lock:
            self._state, self._measured_at = found, change
