"""Progress of long work on stderr, and deadlines for work in threads.

A terminal shows a bar with rate and time left. Other outputs get a line after two seconds, then one every ten. Work
deep in the call stack, such as building an engine, shows its progress inside `bars_shown`.

Python cannot stop a thread from outside. So the caller sets a deadline around the work, and the loops of that work call
`check_deadline`, which raises an error when the time is over or the work was canceled.
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

    `total` may be None or an estimate; the count stops at `total`. `show=None` shows a bar only inside `bars_shown`.
    """
    if not (_shown.get() if show is None else show):
        yield lambda count: None
    elif sys.stderr.isatty():
        if not _drawing.acquire(blocking=False):  # a terminal shows only the outermost bar
            yield lambda count: None
            return
        try:
            with _terminal_bar(description, total, unit) as advance:
                yield advance
        finally:
            _drawing.release()
    else:
        lines = _PlainLines(description, total, unit)
        with every(SECONDS_TO_FIRST_LINE, lambda: lines.advance(0)):  # shows that the process is alive
            yield lines.advance


def counted(items: Iterable[Item], advance: Advance) -> Iterator[Item]:
    """Yield the items unchanged, and advance a progress bar by one after each."""
    for item in items:
        yield item
        advance(1)


@contextmanager
def every(seconds: float, act: Callable[[], object]) -> Iterator[None]:
    """Call a function every `seconds` seconds in a thread while the block runs."""
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
    """Progress as lines: one after two seconds, then one every ten, even if nothing advances."""

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
    """The deadline is over, or the work was canceled."""


class Deadline:
    """The time limit of some work, in seconds from now."""

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds

    def call_off(self) -> None:
        """Cancel the work at its next check; any thread may call this."""
        self._ends = float("-inf")

    @property
    def is_over(self) -> bool:
        """Whether the time is over or the work was canceled."""
        return time.monotonic() > self._ends

    @contextmanager
    def around(self) -> Iterator[None]:
        """Set this deadline for the block, and for threads that copy its context."""
        token = _deadline.set(self)
        try:
            yield
        finally:
            _deadline.reset(token)


def check_deadline() -> None:
    """Raise DeadlineError if the current deadline is over."""
    deadline = _deadline.get()
    if deadline is not None and deadline.is_over:
        raise DeadlineError("the deadline is over")
