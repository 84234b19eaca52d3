"""Faults of the system: a write, sync, rename or read that fails, and disks that are full, under every command.

Three ways, each of which reaches what the others do not: Python's own calls are replaced in a child; where strace is
installed, system calls of all libraries (SQLite, tantivy, safetensors) are made to fail; files may grow no further
than a limit, and, for who may mount one, a small file system fills up.
"""

from __future__ import annotations

import builtins
import errno
import io
import itertools
import mmap
import os
import random
import resource
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from hce.encoding.encoder import Encoder
from hce.errors import HceError
from hce.index.check import check
from hce_lab.benchmarks.torture.children import Ending, command
from hce_lab.benchmarks.torture.samples import Contents, Samples, random_contents, write_corpus
from hce_lab.benchmarks.torture.tally import LOST, WRONG, Tally
from hce_lab.benchmarks.torture.verify import faults_of

ERRORS = (errno.ENOSPC, errno.EIO)
CALLS = ("write", "fsync", "rename", "read")
BELOW = ("write,pwrite64", "fsync,fdatasync", "rename,renameat,renameat2", "pread64", "openat")
OPERATIONS = ("create", "add", "remove", "rebuild", "search", "check", "train")


def run(tally: Tally, samples: Samples, folder: Path, count: int, seed: int) -> None:
    """Let calls fail, at random places of each command."""
    rng = random.Random(seed)  # noqa: S311
    bench = Bench(tally, samples, folder / "faults")
    _in_python(bench, count * 2 // 5, rng)
    _below(bench, count * 2 // 5, rng)
    _file_limits(bench, count // 10, rng)
    _full_disks(bench, count // 10, rng)
    shutil.rmtree(bench.folder, ignore_errors=True)


class Bench:
    """Where commands are run: each on a fresh copy, of which is known what has to be in it before and after.

    Attributes:
        tally: of the trials.
        folder: of the trials.
    """

    def __init__(self, tally: Tally, samples: Samples, folder: Path) -> None:
        self.tally, self._samples, self.folder = tally, samples, folder
        rng = random.Random(1)  # noqa: S311
        self._new = random_contents(rng, [f"n{number}" for number in range(20)])
        self._weights: str | None = None

    def renew(self) -> None:
        """Lay out everything anew."""
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                path.unlink() if path.is_file() else shutil.rmtree(path)
        self.folder.mkdir(exist_ok=True)
        shutil.copytree(self._samples.index, self.folder / "index")
        write_corpus(self.folder / "new.jsonl", self._new)

    def arguments(self, operation: str) -> list[str | Path]:
        """Return what to type."""
        index, new = self.folder / "index", self.folder / "new.jsonl"
        encoder = self._samples.encoder_folder
        train = ["-e", encoder, "--epochs", "2", "--set", "batch_size=16"]
        return {
            "create": ["index", new, "-m", encoder, "-o", self.folder / "made"],
            "add": ["add", index, new],
            "remove": ["remove", index, "d1", "d2", "d3"],
            "rebuild": ["rebuild", index],
            "search": ["search", index, "w1 w2"],
            "check": ["check", index],
            "train": ["train", self._samples.corpus, "-o", self.folder / "model", *train],
        }[operation]

    def judge(self, name: str, operation: str, ending: Ending, what: str) -> None:
        """Count a trial, and what is wrong with how a command ended and with what it left."""
        self.tally.count(name)
        faults = [ending.fault] if ending.fault else []
        faults += self._model(ending) if operation == "train" else self._index(operation, ending)
        for kind, line in faults:
            self.tally.fault(name, kind, f"{operation}, {what}, exit code {ending.code}: {line}")

    def _index(self, operation: str, ending: Ending) -> list[tuple[str, str]]:
        path = self.folder / ("made" if operation == "create" else "index")
        if operation == "create" and not path.exists():
            return [(LOST, "done, they say, and nothing is there")] if ending.code == 0 else []
        before, after = self._states(operation)
        return faults_of(path, self._samples.encoder, [after] if ending.code == 0 else [before, after])[0]

    def _states(self, operation: str) -> tuple[Contents, Contents]:
        before = self._samples.contents
        if operation == "create":
            return self._new, self._new
        if operation == "add":
            return before, {**before, **self._new}
        if operation == "remove":
            return before, {key: value for key, value in before.items() if key not in ("d1", "d2", "d3")}
        return before, before

    def _model(self, ending: Ending) -> list[tuple[str, str]]:
        """Look at a model; where there is none, training must go on to its end once all is well again."""
        if ending.code != 0:
            resumed = command(*self.arguments("train"), "--resume")
            if resumed.fault or resumed.code != 0:
                return [resumed.fault or (LOST, f"cannot be continued: {resumed.said}")]
        try:
            found, weights = check(self.folder / "model"), Encoder.load(self.folder / "model").fingerprint
        except HceError as error:
            return [(LOST, str(error))]
        self._weights = self._weights or weights
        if not found.is_sound or weights != self._weights:
            return [(WRONG, f"{found.findings}, or other weights than without faults")]
        return []

    def undisturbed(self, operation: str, prepare: Callable[[], None]) -> None:
        """Run a command while nothing fails, to see what it does.

        Raises:
            RuntimeError: it fails all the same.
        """
        self.renew()
        ending = command(*self.arguments(operation), prepare=prepare)
        if ending.code != 0 or (operation == "train" and self._model(ending)):
            raise RuntimeError(f"{operation} fails by itself: {ending.said}")


# ------------------------------------------------------------------------------------------------- Python's calls


class Fault(NamedTuple):
    """The n-th call of a kind, and how it fails; with n = 0 none does.

    Attributes:
        call: one of CALLS.
        error: its number.
        number: which call of that kind.
        folder: files elsewhere do not fail.
        counted: 8 bytes that parent and child share: how many such calls there were.
    """

    call: str
    error: int
    number: int
    folder: Path
    counted: mmap.mmap

    def met(self) -> int:
        """Return how many such calls there were."""
        return int(struct.unpack("q", self.counted[:8])[0])

    def pass_by(self, call: str) -> None:
        """Count a call, and fail if it is the one."""
        if call == self.call:
            self.counted[:8] = struct.pack("q", self.met() + 1)
            if self.met() == self.number:
                raise OSError(self.error, os.strerror(self.error))

    def install(self) -> None:
        """Replace Python's calls by those that may fail."""
        for module, name, call in (
            *((os, "fsync", "fsync"), (os, "replace", "rename"), (os, "rename", "rename")),
            *((os, "write", "write"), (os, "read", "read")),
        ):
            setattr(module, name, self._failing(getattr(module, name), call))
        builtins.open = io.open = self._opening()  # type: ignore[assignment]

    def _failing(self, function: Callable[..., Any], call: str) -> Callable[..., Any]:
        def failing(*arguments: Any, **options: Any) -> Any:
            self.pass_by(call)
            return function(*arguments, **options)

        return failing

    def _opening(self) -> Callable[..., Any]:
        """Make an `open` whose files may fail, by the layers that Python's own is made of."""
        as_ever, fault = io.open, self

        class File(io.FileIO):
            def write(self, data: Any) -> int:
                fault.pass_by("write")
                return super().write(data)

            def readinto(self, buffer: Any) -> int:
                fault.pass_by("read")
                return super().readinto(buffer)

            def readall(self) -> bytes:
                fault.pass_by("read")
                return super().readall()

        def opened(
            file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None,
            newline: Any = None, closefd: bool = True, opener: Any = None,
        ) -> Any:  # fmt: skip
            if not isinstance(file, str | os.PathLike) or not str(file).startswith(str(fault.folder)):
                return as_ever(file, mode, buffering, encoding, errors, newline, closefd, opener)
            raw = File(file, mode.replace("b", "").replace("t", ""), closefd, opener)
            if buffering == 0:
                return raw
            layer = io.BufferedRandom if "+" in mode else io.BufferedReader if "r" in mode else io.BufferedWriter
            return layer(raw) if "b" in mode else io.TextIOWrapper(layer(raw), encoding or "utf-8", errors, newline)

        return opened


def _in_python(bench: Bench, count: int, rng: random.Random) -> None:
    """Let the n-th of Python's calls fail."""
    totals = {}
    for operation, call in list(_spread(count, OPERATIONS, CALLS)):
        if (operation, call) not in totals:
            fault = Fault(call, 0, 0, bench.folder, mmap.mmap(-1, 8))
            bench.undisturbed(operation, fault.install)
            totals[operation, call] = fault.met()
        total = totals[operation, call]
        if not total:
            continue
        fault = Fault(call, rng.choice(ERRORS), rng.randint(1, total), bench.folder, mmap.mmap(-1, 8))
        bench.renew()
        ending = command(*bench.arguments(operation), prepare=fault.install)
        what = f"{call} {fault.number} of {total}: {errno.errorcode[fault.error]}"
        bench.judge("a call of Python's fails", operation, ending, what)


def _spread(count: int, *choices: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield combinations, each as often as the others."""
    every = list(itertools.product(*reversed(choices)))
    for number in range(count):
        yield tuple(reversed(every[number * max(1, len(every) // count) % len(every)]))


# ------------------------------------------------------------------------------------------------- system calls


def _below(bench: Bench, count: int, rng: random.Random) -> None:
    """Let the n-th system call fail, whichever library makes it."""
    if shutil.which("strace") is None:
        bench.tally.note("not tried: system calls that fail (strace is not installed)")
        return
    log, totals = bench.folder.with_name("strace.log"), {}
    for operation, call in list(_spread(count, OPERATIONS, BELOW)):
        if (operation, call) not in totals:
            bench.undisturbed(operation, lambda call=call: _trace(log, call))
            totals[operation, call] = sum(" = " in line for line in log.read_text(errors="replace").splitlines())
        total = totals[operation, call]
        if not total:
            continue
        number, error = rng.randint(1, total), errno.errorcode[rng.choice(ERRORS)]
        bench.renew()
        inject = ["-e", f"inject={call}:error={error}:when={number}"]
        ending = command(
            *bench.arguments(operation), prepare=lambda call=call, inject=inject: _trace(log, call, inject)
        )
        if "INJECTED" in log.read_text(errors="replace"):
            bench.judge("a system call fails", operation, ending, f"{call} {number} of {total}: {error}")


def _trace(log: Path, calls: str, inject: list[str] | None = None) -> None:
    """Let strace follow this process."""
    log.unlink(missing_ok=True)
    follow = ["strace", "-f", "-qq", "-o", str(log), "-e", f"trace={calls}", *(inject or []), "-p", str(os.getpid())]
    subprocess.Popen(follow, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with suppress(OSError):  # which is what strace was told to bring about
        while "TracerPid:\t0\n" in Path("/proc/self/status").read_text():
            time.sleep(0.005)


# ------------------------------------------------------------------------------------------------- full disks


def _file_limits(bench: Bench, count: int, rng: random.Random) -> None:
    """Let no file grow beyond a limit, whichever library writes it."""
    for (operation,) in _spread(count, ("create", "add", "remove", "rebuild", "train")):
        limit = int(2 ** rng.uniform(8, 18))
        bench.renew()
        limited = (limit, limit)
        ending = command(
            *bench.arguments(operation),
            prepare=lambda limited=limited: resource.setrlimit(resource.RLIMIT_FSIZE, limited),
        )
        bench.judge("files that may not grow", operation, ending, f"up to {limit:,} bytes")


def _full_disks(bench: Bench, count: int, rng: random.Random) -> None:
    """Let a small file system fill up."""
    for (operation,) in _spread(count, ("create", "add", "remove", "rebuild", "search", "train")):
        with _small_disk(bench.folder) as is_there:
            if not is_there:
                bench.tally.note("not tried: full disks (mounting a small one needs the rights of root)")
                return
            bench.renew()
            room = int(2 ** rng.uniform(9, 19))
            filler = bench.folder / "filler"
            _fill(filler, room)
            ending = command(*bench.arguments(operation))
            filler.unlink()
            bench.judge("a full disk", operation, ending, f"with room for {room:,} bytes")


@contextmanager
def _small_disk(folder: Path) -> Iterator[bool]:
    folder.mkdir(exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    try:
        yield mounted.returncode == 0
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def _fill(path: Path, room: int) -> None:
    """Fill a file system but for some room."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            size = file.tell()
        file.truncate(max(0, size - room))
