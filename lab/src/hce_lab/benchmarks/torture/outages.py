"""Outages: ext4 in a file, mounted by a loop device, loses its power within every operation; what was synced is there.

The kernel's own call for this (EXT4_IOC_SHUTDOWN) stops the file system at once: what it has not written yet is gone,
below SQLite and every other library. Just before, some of it reaches the disk at random: pages of files without their
inodes, or all inodes and names without their pages. Needs root and a loop device; `power` needs neither.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import random
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hce.encoding.encoder import Encoder
from hce.encoding.side_by_side import save_plain
from hce.index.index import Index
from hce.pages.skills import write_skills
from hce_lab.benchmarks.torture.kills import KINDS, Blow, Changing, Durations, Serving, Training, hit_all, speaking
from hce_lab.benchmarks.torture.samples import Samples, snapshots_often
from hce_lab.benchmarks.torture.tally import LOST, TRACEBACK, WRONG, Tally

MEGABYTES = 64
SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
WITH_JOURNAL, WITHOUT_JOURNAL = 1, 2  # whether names and inodes that wait in memory are still written
WAYS = ("data=ordered", "data=writeback")  # in the second, a file's pages may come later than its inode
WRITE_AND_WAIT = 7  # of sync_file_range
SECONDS = 20  # to unmount


class Disk(Blow):
    """An ext4 file system whose power fails.

    Attributes:
        place: where it is mounted.
    """

    name = "loss of power"

    def __init__(self, folder: Path) -> None:
        self._image, self.place = folder / "disk.img", folder / "disk"
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._turn, self._has_failed = 0, False

    def make(self) -> None:
        """Make and mount it.

        Raises:
            OSError: the system refuses.
        """
        self.place.mkdir()
        with self._image.open("wb") as file:
            file.truncate(MEGABYTES << 20)
        _system("mkfs.ext4", "-q", "-F", str(self._image))
        self._mount()

    def remove(self) -> None:
        """Unmount it, even if something holds a file of it."""
        _system("umount", "--lazy", str(self.place))
        self._image.unlink()

    def settle(self) -> None:
        """Write all that waits; after a trial that was stopped half-way, recover."""
        if self._has_failed:
            self.recover()
        descriptor = os.open(self.place, os.O_RDONLY)
        try:
            if self._libc.syncfs(descriptor):
                raise OSError(ctypes.get_errno(), "syncfs")
        finally:
            os.close(descriptor)

    def strike(self, process: int, rng: random.Random) -> None:
        """Let some of what waits reach the disk, then fail.

        The process is stopped first: a sync that is under way when the file system fails may seem to succeed, and with
        real power nobody would hear of that.
        """
        os.kill(process, signal.SIGSTOP)
        self._write_some(rng)
        self.fail(rng.choice((WITH_JOURNAL, WITHOUT_JOURNAL, WITHOUT_JOURNAL)))

    def fail(self, how: int) -> None:
        """Fail now."""
        self._has_failed = True
        descriptor = os.open(self.place, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, SHUTDOWN, struct.pack("I", how))
        finally:
            os.close(descriptor)

    def recover(self) -> None:
        """Mount what reached the disk; ext4 replays its journal."""
        self._unmount()
        self._mount()

    def _write_some(self, rng: random.Random) -> None:
        """Write pages of files without inodes and names, and sometimes all inodes and names."""
        for folder, _, names in os.walk(self.place):  # which passes over folders that are deleted meanwhile
            for name in names:
                if rng.random() < 0.5:
                    with suppress(OSError):
                        self._write_pages(Path(folder) / name, rng)
        if rng.random() < 0.3:  # which commits the journal
            descriptor = os.open(self.place / "lost+found", os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    def _write_pages(self, path: Path, rng: random.Random) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            size = os.fstat(descriptor).st_size
            start = rng.randrange(size + 1)
            offset, length = ctypes.c_int64(start), ctypes.c_int64(1 + rng.randrange(size + 1 - start + 4096))
            self._libc.sync_file_range(descriptor, offset, length, WRITE_AND_WAIT)
        finally:
            os.close(descriptor)

    def _mount(self) -> None:
        self._turn, self._has_failed = self._turn + 1, False
        options = f"loop,noauto_da_alloc,{WAYS[self._turn % len(WAYS)]}"
        _system("mount", "-t", "ext4", "-o", options, str(self._image), str(self.place))

    def _unmount(self) -> None:
        deadline = time.monotonic() + SECONDS
        while True:
            gc.collect()  # maps of its files
            try:
                return _system("umount", str(self.place))
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


class Exporting:
    """Exports of an index and of a model: what was said to be done is there, and nothing is there in part."""

    def __init__(self, tally: Tally, samples: Samples, folder: Path, kind: str, blow: Blow) -> None:
        self._tally, self._blow, self._name = tally, blow, f"{blow.name} in {kind}"
        self._folder, self._durations = folder / f"hit-{kind}", Durations()
        self._export: Callable[[Path], Any]
        if kind == "export --skills":
            self._export = lambda path: _export_skills(samples.index, path)
        else:
            self._export = lambda path: save_plain(Encoder.load(samples.model, device="cpu"), path, first_alone=True)
        self._expected = folder.parent / f"expected-{kind}"
        self._export(self._expected)

    def hit(self, rng: random.Random) -> None:
        """Hit one child, and look what it left."""
        self._tally.count(self._name)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        self._blow.settle()
        voice = speaking(self._work)
        first = next(voice.lines())
        time.sleep(self._durations.within("export", rng))
        for message in [first, *voice.killed(self._blow, rng)]:
            if "failed" in message:
                self._tally.fault(self._name, TRACEBACK, message["failed"])
            elif not (self._folder / message["done"]).exists():
                self._tally.fault(self._name, LOST, f"{message['done']} is gone")
            else:
                self._durations.add("export", message["seconds"])
        for found in self._folder.glob("[0-9]*"):
            if _contents(found) != _contents(self._expected):
                self._tally.fault(self._name, WRONG, f"{found} is there in part")

    def finish(self) -> None:
        """Do nothing more."""

    def _work(self, say: Callable[[Any], None]) -> None:
        for number in range(1000):
            start = time.perf_counter()
            self._export(self._folder / str(number))
            say({"done": str(number), "seconds": time.perf_counter() - start})


def run(tally: Tally, samples: Samples, folder: Path, count: int, seed: int) -> None:
    """Let the power fail so many times, as many in each kind of operation."""
    snapshots_often()
    disk = Disk(folder)
    try:
        disk.make()
    except OSError as error:
        tally.note(f"outages: left out, since no file system can be mounted here ({error})")
        return
    try:
        place = disk.place
        hit_all(
            [
                *(Changing(tally, samples, place, kind, disk) for kind in (*KINDS, "reindex")),
                Training(tally, samples, place, disk),
                Serving(tally, samples, place, disk),
                *(Exporting(tally, samples, place, kind, disk) for kind in ("export --skills", "export --plain")),
            ],
            count,
            seed,
        )
    finally:
        disk.remove()


def _export_skills(index: Path, path: Path) -> None:
    with Index.open(index) as opened:
        write_skills(opened, path)


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _system(*command: str) -> None:
    """Run a command of the system.

    Raises:
        OSError: there is none, or it fails.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.stderr.strip() or f"{command[0]}: {done.returncode}")
