"""Lanes: a few threads for each kind of work, so that no kind waits for another, and a limit to the queue."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread

Result = TypeVar("Result")


class BusyError(Exception):
    """Too many are waiting already."""


class Lane:
    """Runs work in at most `threads` threads; whoever finds `waiting` others in the queue is turned away.

    Args:
        threads: how many calls run at once.
        waiting: how many more may wait.
    """

    def __init__(self, threads: int, waiting: int) -> None:
        self.threads, self.most = threads, threads + waiting
        self._inside = 0
        self._limiter: anyio.CapacityLimiter | None = None

    async def run(self, work: Callable[..., Result], *arguments: Any, **named: Any) -> Result:
        """Call `work` in a thread.

        Raises:
            BusyError: the queue is full.
        """
        if self._inside >= self.most:
            raise BusyError
        if self._limiter is None:  # made here, since it belongs to the event loop
            self._limiter = anyio.CapacityLimiter(self.threads)
        self._inside += 1
        try:
            return await anyio.to_thread.run_sync(partial(work, *arguments, **named), limiter=self._limiter)
        finally:
            self._inside -= 1
