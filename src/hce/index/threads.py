"""Worker: a thread that works when it is woken, and what it says of a failure."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event, Thread

from hce.errors import HceError

logger = logging.getLogger(__name__)

SECONDS_TO_STOP = 30.0


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
