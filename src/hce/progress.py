"""Progress of long work, on stderr: a bar with rate and time left on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

SECONDS_BETWEEN_LINES = 10.0

Advance = Callable[[int], None]


@contextmanager
def progress_bar(description: str, total: int, unit: str, *, show: bool) -> Iterator[Advance]:
    """Yield a function to call with the number of items just done; silent when `show` is false.

    What is done beyond `total` is not counted: some totals are estimates.
    """
    if not show:
        yield lambda count: None
    elif sys.stderr.isatty():
        with _terminal_bar(description, total, unit) as advance:
            yield _up_to(total, advance)
    else:
        yield _up_to(total, _plain_lines(description, total, unit))


def _up_to(total: int, advance: Advance) -> Advance:
    left = total

    def advance_within(count: int) -> None:
        nonlocal left
        counted = min(count, left)
        left -= counted
        advance(counted)

    return advance_within


@contextmanager
def _terminal_bar(description: str, total: int, unit: str) -> Iterator[Advance]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _RateColumn(unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
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


def _plain_lines(description: str, total: int, unit: str) -> Advance:
    start = last = time.monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES or (done >= total and now - start >= SECONDS_BETWEEN_LINES):
            last = now
            rate = done / max(now - start, 1e-9)
            left = (total - done) / max(rate, 1e-9)
            line = f"{description}: {done:,}/{total:,} {unit}, {rate:,.0f} {unit}/s, {left:,.0f} s left"
            sys.stderr.write(line + "\n")
            sys.stderr.flush()

    return advance
