"""Deadlines: long work looks in between whether anyone still waits for it.

A thread cannot be ended from outside. Whoever has work done in one sets a deadline around it, and the loops of that
work call `check_deadline`, which raises once the time is over or the work was called off. Where none is set, nothing
happens.
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
    """The moment up to which someone waits.

    Args:
        seconds: from now.
    """

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds

    def call_off(self) -> None:
        """Let the work end at its next look; may be called from any thread."""
        self._ends = float("-inf")

    @property
    def is_over(self) -> bool:
        """Whether nobody waits any more."""
        return time.monotonic() > self._ends

    @contextmanager
    def around(self) -> Iterator[None]:
        """Hold for what is done inside, and for threads that are given a copy of its context."""
        before = _current.set(self)
        try:
            yield
        finally:
            _current.reset(before)


def check_deadline() -> None:
    """Go on, if someone still waits.

    Raises:
        DeadlineError: nobody does.
    """
    deadline = _current.get()
    if deadline is not None and deadline.is_over:
        raise DeadlineError("nobody waits any more")
