"""Threads and forks: a lock that many share, a thread that works when it is woken, and what a fork must not inherit."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Condition, Event, Thread
from typing import Protocol
from weakref import WeakSet

from hce.errors import HceError

logger = logging.getLogger(__name__)

SECONDS_TO_STOP = 30.0


class SharedLock:
    """A lock shared by any number of threads or held by one; who waits to hold it alone goes before new sharers."""

    def __init__(self) -> None:
        self._condition = Condition()
        self._sharing = 0
        self._alone = False
        self._waiting = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock together with others."""
        with self._condition:
            self._condition.wait_for(lambda: not self._alone and not self._waiting)
            self._sharing += 1
        try:
            yield
        finally:
            with self._condition:
                self._sharing -= 1
                self._condition.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock with no one else."""
        with self._condition:
            self._waiting += 1
            try:
                self._condition.wait_for(lambda: not self._alone and not self._sharing)
                self._alone = True
            finally:
                self._waiting -= 1
        try:
            yield
        finally:
            with self._condition:
                self._alone = False
                self._condition.notify_all()


class Worker(Thread):
    """A thread that does its work whenever it is woken, until it is stopped."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._wanted, self._stopping = Event(), Event()

    def wake(self) -> None:
        """Have the work done, once more if it is under way."""
        self._wanted.set()

    def stop(self) -> None:
        """Have the thread end, and wait for it."""
        self._stopping.set()
        self._wanted.set()
        if self.is_alive():
            self.join(SECONDS_TO_STOP)

    def is_stopping(self) -> bool:
        """Tell whether the work is to be cut short."""
        return self._stopping.is_set()

    def run(self) -> None:
        """Wait and work."""
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self.is_stopping():
                return
            self._work()


def reason_of(error: Exception, what: str) -> str:
    """Say why work in the background failed, for those who wait for it: a bug goes to the log.

    Args:
        error: what was raised.
        what: what could not be done, as the beginning of a sentence.
    """
    if isinstance(error, HceError):
        return str(error)
    logger.error(what, exc_info=error)
    return f"{what}; the server's log says why"


class Forked(Protocol):
    """Something that a forked process must not go on with as it is."""

    def after_fork(self) -> None:
        """Be called in a process that was just forked, before anything else is done there."""
        ...


_heeding: WeakSet[Forked] = WeakSet()


def heed_forks(thing: Forked) -> None:
    """Have `thing.after_fork()` called in every process that is forked from this one while the thing is in use."""
    _heeding.add(thing)


def _after_fork() -> None:
    for thing in list(_heeding):
        thing.after_fork()


with suppress(AttributeError):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_fork)
