"""Power: what is left where the power fails within an operation: all that was synced, and of the rest nothing.

A child does the operation. At syncs and renames a copy of the folder is made, as the disk may have it at worst: a file
that was written to since it was synced is empty, a name that was made since its folder was synced is gone, and a rename
is done already. SQLite's files are copied unchanged: it syncs them itself, and its own tests hold that.
"""

from __future__ import annotations

import os
import random
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

from hce.index.index import Index
from hce_lab.benchmarks.torture import children
from hce_lab.benchmarks.torture.samples import Samples, documents_of
from hce_lab.benchmarks.torture.tally import TRACEBACK, Tally
from hce_lab.benchmarks.torture.verify import encoder_of, faults_of

OPERATIONS = ("create", "rebuild", "reindex")  # what adds and removes syncs by SQLite alone
BY_SQLITE = (".sqlite", ".sqlite-wal", ".sqlite-shm", ".sqlite-journal")


class Disk:
    """What has reached the disk of a folder, as far as this process has it synced.

    Args:
        folder: of the index; all that is there now has reached the disk.
        states: the folder for copies of it.
        most: how many copies to make, at most.
    """

    def __init__(self, folder: Path, states: Path, most: int, rng: random.Random) -> None:
        self.folder, self.states = folder, states
        self._most, self._rng = most, rng
        self._files: dict[int, int] = {}  # inode → time of change when it was synced
        self._names: dict[int, set[tuple[str, int]]] = {}
        self._made = 0
        for path in (folder.parent, *folder.rglob("*"), folder) if folder.exists() else (folder.parent,):
            self._note(path)
        self._sync, self._replace = os.fsync, os.replace

    def watch(self) -> None:
        """Note each sync from now on; copy the folder, at its worst, before and after each sync and rename."""
        os.fsync, os.replace = self.fsync, self.replace  # type: ignore[assignment]

    def fsync(self, descriptor: int) -> None:
        """Sync, and note it."""
        self._sync(descriptor)
        self._note(descriptor)
        self._copy()

    def replace(self, source: Any, target: Any, **options: Any) -> None:
        """Rename; its effect may be on the disk at once."""
        self._replace(source, target, **options)
        self._keep_name(Path(target))
        self._copy()

    def _note(self, what: int | Path) -> None:
        found = os.fstat(what) if isinstance(what, int) else what.stat()
        self._files[found.st_ino] = found.st_mtime_ns
        if stat.S_ISDIR(found.st_mode):
            self._names[found.st_ino] = _names_in(what)

    def _keep_name(self, target: Path) -> None:
        above = target.parent.stat().st_ino
        self._names[above] = self._names.get(above, set()) | {(target.name, target.stat().st_ino)}

    def _copy(self) -> None:
        """Copy the folder, by another process: closing SQLite's file in this one would end its locks."""
        if self._made >= self._most or not self.folder.exists() or self._rng.random() < 0.5:
            return
        self._made += 1
        state = self.states / f"{self._made:04d}"
        lost, emptied = self._lost()
        subprocess.run(["/bin/cp", "-a", self.folder, state], check=True)
        for name in emptied:
            os.truncate(state / name, 0)
        for name in lost:
            path = state / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def _lost(self) -> tuple[list[Path], list[Path]]:
        """Return the names that are gone, and the files that are empty, below the folder."""
        lost, emptied = [], []
        for path in (self.folder, *sorted(self.folder.rglob("*"))):
            found = path.stat()
            if path.is_dir():
                kept = self._names.get(found.st_ino, set())
                lost += [path / name for name, inode in _names_in(path) - kept if not name.endswith(BY_SQLITE)]
            elif not path.name.endswith(BY_SQLITE) and self._files.get(found.st_ino) != found.st_mtime_ns:
                emptied.append(path)
        return ([each.relative_to(self.folder) for each in some] for some in (lost, emptied))  # type: ignore[return-value]


def _names_in(folder: int | Path) -> set[tuple[str, int]]:
    with os.scandir(folder) as entries:
        return {(entry.name, entry.inode()) for entry in entries}


def run(tally: Tally, samples: Samples, folder: Path, count: int, seed: int) -> None:
    """Look at so many states of the disk, of all operations together."""
    rng = random.Random(seed)  # noqa: S311
    for operation in OPERATIONS:
        for trial in range(-(-count // (len(OPERATIONS) * 10))):
            _try(tally, samples, folder / f"power-{operation}-{trial}", operation, rng, min(count, 10))


def _try(tally: Tally, samples: Samples, folder: Path, operation: str, rng: random.Random, most: int) -> None:
    """Do an operation once, and look at what the power's failing within would have left."""
    states = folder / "states"
    states.mkdir(parents=True)
    path = folder / "index"
    if operation != "create":
        shutil.copytree(samples.index, path)
    ending = children.child(lambda: _work(samples, path, states, operation, most, rng))
    name = f"worst states of a disk in {operation}"
    if ending.fault or ending.code:
        tally.fault(name, TRACEBACK, ending.said)
    for state in sorted(states.iterdir()):
        tally.count(name)
        for kind, line in faults_of(state, encoder_of(state, samples), [samples.contents])[0]:
            tally.fault(name, kind, f"{line} ({state.name})")
    shutil.rmtree(folder)


def _work(samples: Samples, path: Path, states: Path, operation: str, most: int, rng: random.Random) -> None:
    disk = Disk(path, states, most, rng)
    if operation == "create":
        disk.watch()
        Index.create(path, documents_of(samples.contents), samples.encoder, "grow", engine="codes").close()
        return
    with Index.open(path) as index:
        disk.watch()
        if operation == "reindex":
            index.reindex(samples.model)
        else:
            index.rebuild()
