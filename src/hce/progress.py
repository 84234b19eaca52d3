"""Progress of long work, on stderr: a bar with rate and time left on a terminal, a line every ten seconds elsewhere.

Elsewhere the first line comes after two seconds. Work that is done many calls down, such as the building of an engine,
shows its progress within `bars_shown`.
"""

from __future__ import annotations

import sys
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


@contextmanager
def bars_shown(show: bool = True) -> Iterator[None]:
    """Have the bars shown, of what is done inside, that are told neither to be shown nor to be silent."""
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
        with _terminal_bar(description, total, unit) as advance:
            yield _up_to(total, advance)
    else:
        yield _up_to(total, _plain_lines(description, total, unit))


def told(items: Iterable[Item], advance: Advance) -> Iterator[Item]:
    """Pass items on, and tell of each."""
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


def _plain_lines(description: str, total: int | None, unit: str) -> Advance:
    start = time.monotonic()
    next_line = start + min(SECONDS_TO_FIRST_LINE, SECONDS_BETWEEN_LINES)
    done = 0

    def advance(count: int) -> None:
        nonlocal done, next_line
        done += count
        now = time.monotonic()
        is_end = total is not None and done >= total
        if now >= next_line or (is_end and now - start >= SECONDS_BETWEEN_LINES):
            next_line = now + SECONDS_BETWEEN_LINES
            rate = done / max(now - start, 1e-9)
            of, left = "", ""
            if total is not None:
                of, left = f"/{total:,}", f", {(total - done) / max(rate, 1e-9):,.0f} s left"
            sys.stderr.write(f"{description}: {done:,}{of} {unit}, {rate:,.0f} {unit}/s{left}\n")
            sys.stderr.flush()

    return advance
