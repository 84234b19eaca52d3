"""LiveEngine: an engine kept in step with the store, and its snapshots on disk.

A snapshot is an engine as it was at one change of the store. It can be deleted at any time: whatever is missing,
damaged, outdated or of another store is read from the store instead.
"""

from __future__ import annotations

import logging
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Condition
from typing import Any

import numpy as np

from hce.errors import FormatError, HceError
from hce.files import new_folder, read_json, write_json
from hce.index.hierarchy import NumberedHierarchy
from hce.index.store import Moment, Reader, Store
from hce.search.engine import Engine, Found, load_engine, new_engine

logger = logging.getLogger(__name__)

FOLDER = "engine"

# A snapshot is written anew when it is behind by this share of the documents, and by so many.
SHARE_BEHIND, ROWS_BEHIND = 0.05, 1000


class LiveEngine:
    """The engine of an index: loaded when first needed, caught up before each search, shared by threads."""

    def __init__(self, store: Store, name: str, dtype: str, tree: Callable[[], NumberedHierarchy | None]) -> None:
        self.store = store
        self.name = name
        self.dtype = dtype
        self._tree = tree
        self._lock = SharedLock()
        self._engine: Engine | None = None
        self._state: Moment | None = None
        self._behind = 0  # additions and removals that are not in the snapshot on disk

    @property
    def folder(self) -> Path:
        """The folder of the snapshots."""
        return self.store.path.parent / FOLDER

    def search(self, reader: Reader, queries: np.ndarray, k: int, allowed: np.ndarray | None) -> Found | None:
        """Search the documents that `reader` sees; None when the engine has gone on to a later moment already."""
        state = reader.state()
        while True:
            with self._lock.shared():
                if self._engine is not None and self._state == state:
                    return self._engine.search(queries, k, allowed)
            with self._lock.alone():
                if self._state is not None and self._state.change > state.change:
                    return None
                self._catch_up(reader, state)

    def load(self, reader: Reader) -> None:
        """Do now what the first search would have to wait for."""
        state = reader.state()
        with self._lock.alone():
            if self._state is None or self._state.change < state.change:
                self._catch_up(reader, state)

    def rebuild(self, reader: Reader, name: str, dtype: str) -> None:
        """Make the engine anew of all vectors, of another kind if asked, and write a snapshot."""
        with self._lock.alone():
            self.name, self.dtype = name, dtype
            self._engine = self._state = None
            self._engine, self._state = self._built(reader), reader.state()
            self._save()

    def pending(self, reader: Reader) -> int:
        """Count the additions and removals that are in the store and not in the snapshot on disk."""
        for _, known in self._usable_snapshots(reader):
            return reader.state().last - known.last + len(reader.removed_since(known.change))
        return reader.state().documents

    def _catch_up(self, reader: Reader, state: Moment) -> None:
        """Bring the engine to the moment `state`; an interruption leaves none rather than half of one."""
        engine, known = self._engine, self._state
        self._engine = self._state = None
        if engine is None or known is None:
            engine, known = self._loaded(reader)
        if known.change != state.change:
            numbers, vectors = reader.vectors(after=known.last)
            gone = reader.removed_since(known.change)
            if len(numbers):
                engine.add(numbers, vectors)
            if len(gone):
                engine.remove(gone)
            self._behind += len(numbers) + len(gone)
        self._engine, self._state = engine, state
        if self._behind > max(ROWS_BEHIND, SHARE_BEHIND * len(engine)):
            self._try_to_save()

    def _loaded(self, reader: Reader) -> tuple[Engine, Moment]:
        """Load the newest usable snapshot, or build an engine of all vectors; return it with its moment."""
        for folder, state in self._usable_snapshots(reader):
            try:
                engine = load_engine(self.name, folder, reader.dim)
            except FormatError as error:
                if folder.is_dir():  # else another process has just put a newer one in its place
                    logger.warning("%s, which is done now from the store", error)
                continue
            self._behind = 0
            return engine, state
        state = reader.state()
        self._behind = state.documents
        return self._built(reader), state

    def _built(self, reader: Reader) -> Engine:
        numbers, vectors = reader.vectors()
        tree = self._tree() if self.name == "tree" else None  # flat has no use for it
        hierarchy = tree.hierarchy if tree is not None and np.array_equal(tree.numbers, numbers) else None
        return new_engine(
            self.name, reader.dim, numbers=numbers, vectors=vectors, dtype=self.dtype, hierarchy=hierarchy
        )

    # ------------------------------------------------------------------------------------------------- on disk

    @property
    def _facts(self) -> dict[str, Any]:
        """What an engine must be to stand in for this one."""
        return {"engine": self.name, "dtype": self.dtype, "dim": self.store.dim}

    def _snapshots(self) -> list[Path]:
        return [path for path in self.folder.glob("*") if path.name.isdigit()]

    def _usable_snapshots(self, reader: Reader) -> Iterator[tuple[Path, Moment]]:
        """Yield the snapshots of this kind of engine and of this store's past, the newest first, with their moments."""
        for folder in sorted(self._snapshots(), reverse=True):
            try:
                facts = read_json(folder / "snapshot.json")
                is_of_this_kind = self._facts.items() <= facts.items()
                state = reader.state_at(facts["change"], facts["token"]) if is_of_this_kind else None
            except (FormatError, KeyError):
                continue
            if state is not None:
                yield folder, state

    def _try_to_save(self) -> None:
        """Save unless someone is writing; a snapshot saves time, and nothing depends on it."""
        try:
            with self.store.writing(wait=0):  # so that no two processes write and tidy up here at once
                self._save()
        except (HceError, OSError) as error:
            logger.debug("no snapshot of the engine was written: %s", error)

    def _save(self) -> None:
        engine, state = self._engine, self._state
        if engine is None or state is None:
            return
        target = self.folder / f"{state.change:012d}"
        self._delete([target])
        with new_folder(target) as folder:
            engine.save(folder)
            write_json(folder / "snapshot.json", {**self._facts, "change": state.change, "token": state.token})
        self._delete([old for old in self._snapshots() if old != target])
        self._behind = 0

    def _delete(self, snapshots: list[Path]) -> None:
        """Take snapshots away at one stroke each, and then what is left of them and of others that never were whole."""
        for snapshot in snapshots:
            if snapshot.is_dir():
                snapshot.replace(snapshot.with_name(f".{snapshot.name}.{secrets.token_hex(4)}.partial"))
        for leftover in self.folder.glob(".*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)


class SharedLock:
    """A lock shared by any number of threads or held by one; who waits to hold it alone goes before new sharers."""

    def __init__(self) -> None:
        self._condition = Condition()
        self._sharing = 0
        self._alone = False
        self._waiting = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock together with others."""
        with self._condition:
            self._condition.wait_for(lambda: not self._alone and not self._waiting)
            self._sharing += 1
        try:
            yield
        finally:
            with self._condition:
                self._sharing -= 1
                self._condition.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock with no one else."""
        with self._condition:
            self._waiting += 1
            try:
                self._condition.wait_for(lambda: not self._alone and not self._sharing)
                self._alone = True
            finally:
                self._waiting -= 1
        try:
            yield
        finally:
            with self._condition:
                self._alone = False
                self._condition.notify_all()
