"""Deadlines: long work checks at intervals whether anyone still waits for it.

A thread cannot be ended from outside. Whoever starts work in one sets a deadline around it. The loops of that work call
`check_deadline`, which raises once the time is over or the work was called off, and does nothing without a deadline.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_current: ContextVar[Deadline | None] = ContextVar("deadline", default=None)


class DeadlineError(Exception):
    """Nobody waits any more for what is being done."""


class Deadline:
    """The moment until which someone waits, in seconds from now."""

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds

    def call_off(self) -> None:
        """End the work at its next check; may be called from any thread."""
        self._ends = float("-inf")

    @property
    def is_over(self) -> bool:
        """Whether nobody waits any more."""
        return time.monotonic() > self._ends

    @contextmanager
    def around(self) -> Iterator[None]:
        """Set this deadline for the block, and for threads that get a copy of its context."""
        before = _current.set(self)
        try:
            yield
        finally:
            _current.reset(before)


def check_deadline() -> None:
    """Raise DeadlineError if nobody waits any more."""
    deadline = _current.get()
    if deadline is not None and deadline.is_over:
        raise DeadlineError("nobody waits any more")
