"""Progress of long work, on stderr: a bar with rate and time left on a terminal, a line every ten seconds elsewhere.

Elsewhere the first line comes after two seconds. Work that is done many calls down, such as the building of an engine,
shows its progress within `bars_shown`.
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
_drawing = threading.Lock()


@contextmanager
def bars_shown(show: bool = True) -> Iterator[None]:
    """Show the progress bars inside whose `show` is None; `show=False` hides them."""
    before = _shown.set(show)
    try:
        yield
    finally:
        _shown.reset(before)


@contextmanager
def progress_bar(description: str, total: int | None, unit: str, *, show: bool | None = None) -> Iterator[Advance]:
    """Yield a function to call with the number of items just done.

    What is done beyond `total` is not counted: some totals are estimates.

    Args:
        description: what is done.
        total: how many items there are; None where nobody knows.
        unit: what the items are.
        show: False is silent; None is too, except within `bars_shown`.
    """
    if not (_shown.get() if show is None else show):
        yield lambda count: None
    elif sys.stderr.isatty():
        if not _drawing.acquire(blocking=False):  # a terminal shows one at a time, the outer
            yield lambda count: None
            return
        try:
            with _terminal_bar(description, total, unit) as advance:
                yield _up_to(total, advance)
        finally:
            _drawing.release()
    else:
        lines = _PlainLines(description, total, unit)
        with every(SECONDS_TO_FIRST_LINE, lambda: lines.advance(0)):  # tells that something is still done
            yield _up_to(total, lines.advance)


def counted(items: Iterable[Item], advance: Advance) -> Iterator[Item]:
    """Yield the items unchanged, and advance a progress bar by one after each."""
    for item in items:
        yield item
        advance(1)


def _up_to(total: int | None, advance: Advance) -> Advance:
    if total is None:
        return advance
    left = total

    def advance_within(count: int) -> None:
        nonlocal left
        counted = min(count, left)
        left -= counted
        advance(counted)

    return advance_within


@contextmanager
def every(seconds: float, act: Callable[[], object]) -> Iterator[None]:
    """Do something again and again, in a thread beside what is done within."""
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
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _RateColumn(unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=total is None) as progress:
        task = progress.add_task(description, total=total)
        yield lambda count: progress.advance(task, count)


class _RateColumn(ProgressColumn):
    """Items per second."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        rate = task.finished_speed or task.speed
        return Text(f"{rate:,.0f} {self.unit}/s" if rate else "", style="progress.data.speed")


class _PlainLines:
    """Lines about how much is done: one after two seconds, then one every ten, also while nothing is told."""

    def __init__(self, description: str, total: int | None, unit: str) -> None:
        self.description, self.total, self.unit = description, total, unit
        self._start = time.monotonic()
        self._next_line = self._start + min(SECONDS_TO_FIRST_LINE, SECONDS_BETWEEN_LINES)
        self._done = 0
        self._lock = threading.Lock()

    def advance(self, count: int) -> None:
        """Take note of what was done, and tell of it where it is time to."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            is_end = self.total is not None and self._done >= self.total
            if now >= self._next_line or (is_end and now - self._start >= SECONDS_BETWEEN_LINES):
                self._write(now)

    def _write(self, now: float) -> None:
        self._next_line = now + SECONDS_BETWEEN_LINES
        seconds = max(now - self._start, 1e-9)
        rate = self._done / seconds
        line = f"{self.description}: {self._done:,}"
        if self.total is not None:
            line += f"/{self.total:,}"
        line += f" {self.unit}, {rate:,.0f} {self.unit}/s"
        if not self._done:
            line = f"{self.description}: for {seconds:,.0f} s"
        elif self.total is not None:
            line += f", {(self.total - self._done) / rate:,.0f} s left"
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
