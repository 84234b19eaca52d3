"""Progress of long work, on stderr: a bar with rate and time left on a terminal, a line every ten seconds elsewhere.

Elsewhere the first line comes after two seconds. Work many calls down, such as building an engine, shows its progress
within `bars_shown`.

Deadlines: a thread cannot be ended from outside. Whoever starts work in one sets a deadline around it. The loops of
that work call `check_deadline`, which raises once the time is over or the work was called off.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

SECONDS_BETWEEN_LINES = 10.0
SECONDS_TO_FIRST_LINE = 2.0

Advance = Callable[[int], None]
Item = TypeVar("Item")

_shown: ContextVar[bool] = ContextVar("shown", default=False)
_deadline: ContextVar[Deadline | None] = ContextVar("deadline", default=None)
_drawing = threading.Lock()


@contextmanager
def bars_shown(show: bool = True) -> Iterator[None]:
    """Show, or hide, the progress bars created with `show=None` in this block."""
    before = _shown.set(show)
    try:
        yield
    finally:
        _shown.reset(before)


@contextmanager
def progress_bar(description: str, total: int | None, unit: str, *, show: bool | None = None) -> Iterator[Advance]:
    """Yield a function to call with the number of items just done.

    `total` may be an estimate, above which nothing is counted, or None. `show=False` is silent, and so is None, except
    within `bars_shown`.
    """
    if not (_shown.get() if show is None else show):
        yield lambda count: None
    elif sys.stderr.isatty():
        if not _drawing.acquire(blocking=False):  # a terminal shows one at a time, the outer
            yield lambda count: None
            return
        try:
            with _terminal_bar(description, total, unit) as advance:
                yield advance
        finally:
            _drawing.release()
    else:
        lines = _PlainLines(description, total, unit)
        with every(SECONDS_TO_FIRST_LINE, lambda: lines.advance(0)):  # shows that something is still done
            yield lines.advance


def counted(items: Iterable[Item], advance: Advance) -> Iterator[Item]:
    """Yield the items unchanged, and advance a progress bar by one after each."""
    for item in items:
        yield item
        advance(1)


@contextmanager
def every(seconds: float, act: Callable[[], object]) -> Iterator[None]:
    """Repeat an act in a thread while the block runs."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(seconds):
            act()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def _terminal_bar(description: str, total: int | None, unit: str) -> Iterator[Advance]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _RateColumn(unit))
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=total is None) as progress:
        task = progress.add_task(description, total=total)
        most = float("inf") if total is None else total
        yield lambda count: progress.advance(task, min(count, most - progress.tasks[0].completed))


class _RateColumn(ProgressColumn):
    """Items per second."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        rate = task.finished_speed or task.speed
        return Text(f"{rate:,.0f} {self.unit}/s" if rate else "", style="progress.data.speed")


class _PlainLines:
    """Lines about how much is done: one after two seconds, then one every ten, even if nothing advances."""

    def __init__(self, description: str, total: int | None, unit: str) -> None:
        self.description, self.total, self.unit = description, total, unit
        self._start = time.monotonic()
        self._next_line = self._start + min(SECONDS_TO_FIRST_LINE, SECONDS_BETWEEN_LINES)
        self._done = 0
        self._lock = threading.Lock()

    def advance(self, count: int) -> None:
        """Count items, and write a line if one is due."""
        with self._lock:
            self._done = self._done + count if self.total is None else min(self._done + count, self.total)
            now = time.monotonic()
            is_end = self.total is not None and self._done >= self.total
            if now >= self._next_line or (is_end and now - self._start >= SECONDS_BETWEEN_LINES):
                self._next_line = now + SECONDS_BETWEEN_LINES
                sys.stderr.write(self._line(max(now - self._start, 1e-9)))
                sys.stderr.flush()

    def _line(self, seconds: float) -> str:
        if not self._done:
            return f"{self.description}: for {seconds:,.0f} s\n"
        rate, of, left = self._done / seconds, "", ""
        if self.total is not None:
            of, left = f"/{self.total:,}", f", {(self.total - self._done) / rate:,.0f} s left"
        return f"{self.description}: {self._done:,}{of} {self.unit}, {rate:,.0f} {self.unit}/s{left}\n"


# ------------------------------------------------------------------------------------------------- deadlines


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
        """Set this deadline for the block, and for threads with a copy of its context."""
        token = _deadline.set(self)
        try:
            yield
        finally:
            _deadline.reset(token)


def check_deadline() -> None:
    """Raise DeadlineError if nobody waits any more."""
    deadline = _deadline.get()
    if deadline is not None and deadline.is_over:
        raise DeadlineError("nobody waits any more")
