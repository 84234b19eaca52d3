"""Children: work in forked processes, which may fail, hang or be killed, and how they ended."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from hce.cli import REPORT_BUGS, main
from hce_lab.benchmarks.torture.tally import HANG, TRACEBACK

SECONDS = 120  # after which a child hangs


class Ending(NamedTuple):
    """How a child ended.

    Attributes:
        code: what it returned; negative: the signal that it died of; None: it did not end in time.
        said: all of its output.
    """

    code: int | None
    said: str

    @property
    def fault(self) -> tuple[str, str] | None:
        """What is wrong with such an end, whatever the work was: its kind and a line."""
        if self.code is None:
            return HANG, f"no end after {SECONDS} s: {self.said}"
        if self.code not in (0, 1, 2):
            return TRACEBACK, f"ended by {self.code}: {self.said}"
        if "Traceback (most recent call last)" in self.said or REPORT_BUGS in self.said or "panicked" in self.said:
            return TRACEBACK, self.said
        return None


def command(*arguments: str | Path, prepare: Callable[[], None] = lambda: None) -> Ending:
    """Run `hce` with arguments, without the seconds that a process of its own takes to load libraries."""

    def work() -> NoReturn:
        sys.argv = ["hce", *map(str, arguments)]
        prepare()
        main()
        sys.exit(0)

    return child(work)


def child(work: Callable[[], Any]) -> Ending:
    """Do some work in a child; what it returns is the last line of what is said, as JSON."""
    with tempfile.TemporaryFile() as output:
        process = os.fork()
        if process == 0:
            _live(work, output.fileno())
        code = _end_of(process)
        output.seek(0)
        return Ending(code, output.read().decode(errors="replace"))


def _live(work: Callable[[], Any], output: int) -> NoReturn:
    """The whole life of a child."""
    code = 70
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
        print(json.dumps(work()))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _end_of(process: int) -> int | None:
    deadline = time.monotonic() + SECONDS
    pause = 0.001
    while time.monotonic() < deadline:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(0.02, 2 * pause)
    end(process)
    return None


def end(process: int) -> None:
    """Kill a child, and wait for its end.

    Raises:
        ChildProcessError: it has ended already, and its number may be another's by now.
    """
    if not os.waitpid(process, os.WNOHANG)[0]:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
