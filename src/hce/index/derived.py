"""The derived parts of an index: an engine of documents, an engine of passages, and the words of the texts.

Each part is loaded when first needed, and brought to the moment of the reader that uses it. A snapshot is a part saved
to disk, at one moment of the store. Snapshots can be deleted at any time. If a snapshot is missing, damaged or of
another store, the part is rebuilt from the store. An engine can also be outside this process: see `home_of`.
"""

from __future__ import annotations

import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from threading import Condition
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from hce.errors import FormatError, HceError, InputError
from hce.files import (
    check_tree,
    delete_folder,
    delete_leftovers,
    is_folder,
    names_in,
    new_folder,
    read_json,
    sealed,
    unsealed,
    write_json,
)
from hce.index.manifest import Manifest
from hce.index.store import MomentPassedError, Store, heed_forks
from hce.index.tables import Moment, Reader
from hce.index.tree import all_vectors, load_tree
from hce.index.writing import TITLE_SHARE
from hce.progress import counted, progress_bar
from hce.search.engine import (
    ELSEWHERE,
    ENGINES,
    FILES,
    Engine,
    PassageEngine,
    VectorEngine,
    load_engine,
    new_engine,
    wants_tree,
)
from hce.search.words import PassageText, Words

if TYPE_CHECKING:
    from hce.encoding.encoder import Encoder
    from hce.index.index import Index

Lent = TypeVar("Lent", covariant=True)
Held = TypeVar("Held", VectorEngine, PassageEngine, Words)

logger = logging.getLogger(__name__)

# A snapshot is rewritten once it lacks more than this share of the documents, and more than this many.
SHARE_BEHIND, ROWS_BEHIND = 0.05, 1000
SNAPSHOT = "snapshot.json"
IS_SNAPSHOT = re.compile("[0-9]{12,}").fullmatch  # the name of a snapshot's folder: the number of a change

HOMES = {"milvus": "hce.milvus.mirror"}
"""The module of each engine that is elsewhere, imported when an index names the engine."""


class Part(Protocol[Lent]):
    """A part of an index: a `LocalPart`, or a part elsewhere, which has no snapshots."""

    def lend(self, reader: Reader) -> AbstractContextManager[Lent]:
        """Lend the part at the reader's moment; MomentPassedError if its moment is later."""

    def prepare(self, reader: Reader) -> None:
        """Load or build the part now, so that the first search need not wait."""

    def rebuild(self, reader: Reader, manifest: Manifest) -> None:
        """Rebuild the part from all documents, with the engine that a manifest names."""

    def pending(self, reader: Reader) -> int:
        """Count the additions and removals in the store that the saved part lacks."""

    def facts(self, reader: Reader) -> dict[str, Any]:
        """Return the facts that the newest usable snapshot records, or nothing."""


class LocalPart(ABC, Generic[Held]):
    """An engine or words held in this process: loaded when needed, caught up before each use, shared by threads."""

    folder_name: ClassVar[str]  # of the snapshots, below the folder of the index
    in_memory: ClassVar[bool] = True  # whether a forked process can use what its parent holds

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.store = store
        self.manifest = manifest
        self._lock = SharedLock()
        self._held: Held | None = None
        self._moment: Moment | None = None
        self._behind = 0  # additions and removals that the snapshot on disk lacks
        heed_forks(self)

    def _identity(self) -> dict[str, Any]:
        """Return the fields that a snapshot must match to be usable."""
        return {"engine": self.manifest.engine, "dim": self.manifest.dim, "files": FILES}

    @abstractmethod
    def _build(self, reader: Reader) -> Held:
        """Build the engine or the words from all documents."""

    @abstractmethod
    def _load(self, folder: Path, numbers: np.ndarray) -> Held | None:
        """Load a snapshot; None if of other documents, FormatError if damaged."""

    @abstractmethod
    def _add(self, held: Held, reader: Reader, after: int) -> int:
        """Add the documents above a number; return how many vectors or texts were added."""

    def _facts(self, held: Held) -> dict[str, Any]:
        """Return the facts to record in a snapshot; see `renew`."""
        return {}

    def after_fork(self) -> None:
        """Replace the lock after a fork, and drop what a fork does not copy."""
        self._lock = SharedLock()
        if not self.in_memory:
            self._held = self._moment = None

    @property
    def folder(self) -> Path:
        """The folder of the snapshots; each encoder has its own."""
        return self.store.path.parent / self.manifest.folder_of(self.folder_name)

    @contextmanager
    def lend(self, reader: Reader) -> Iterator[Held]:
        """Lend what is held, at the reader's moment; nobody changes it meanwhile."""
        moment = reader.moment()
        while True:
            with self._lock.shared():
                if self._held is not None and self._moment == moment:
                    yield self._held
                    return
            with self._lock.alone():
                if moment.change < max(self.manifest.since, self._moment.change if self._moment else 0):
                    raise MomentPassedError(f"{self.folder} is at a later change than {moment.change}; search again")
                self._catch_up(reader, moment)

    def prepare(self, reader: Reader) -> None:
        """Bring what is held to the reader's moment, unless it is there or later."""
        moment = reader.moment()
        with self._lock.alone():
            if moment.change >= self.manifest.since and (self._moment is None or self._moment.change < moment.change):
                self._catch_up(reader, moment)

    def save_snapshot(self, reader: Reader) -> None:
        """Catch up with `reader`, and write a snapshot unless the last one is current."""
        with self._lock.alone():
            self._catch_up(reader, reader.moment())
            if self._behind or not self._snapshots():
                self._save()

    def rebuild(self, reader: Reader, manifest: Manifest) -> None:
        """Build again, from all documents, what is held; write a snapshot."""
        with self._lock.alone():
            self.manifest = manifest
            self._held = self._moment = None
            self._held, self._moment = self._build(reader), reader.moment()
            self._save()

    def renew(self) -> None:
        """Rebuild what is held if the newest snapshot says that this pays now.

        Writes call this, not searches; searches go on meanwhile. Nothing depends on it, so a failure is only logged.
        """
        try:
            with self.store.reading() as reader:
                moment, facts = reader.moment(), self.facts(reader)
                rows = facts.get("rows", 0) * moment.documents // max(facts.get("documents", 0), 1)
                if rows < facts.get("renewed_from", math.inf):
                    return
                manifest, held = self.manifest, self._build(reader)
        except (HceError, OSError) as error:
            logger.debug("%s is not rebuilt: %s", self.folder, error)
            return
        with self._lock.alone():
            if manifest is self.manifest:
                self._held, self._moment = held, moment
                self._try_to_save()

    def _catch_up(self, reader: Reader, moment: Moment) -> None:
        """Bring what is held to `moment`; if interrupted, hold nothing."""
        held, held_at = self._held, self._moment
        self._held = self._moment = None
        failed: set[Moment] = set()
        while True:
            # A rebuild deletes records of earlier moments and of removals: what is held may be too old to catch up.
            if held is None or held_at is None or reader.moment_at(held_at.change, held_at.token) is None:
                held, held_at = self._loaded(reader)
            try:
                if held_at.change != moment.change:
                    gone = reader.removed_since(held_at.change)
                    self._behind += self._add(held, reader, held_at.last) + len(gone)
                    if len(gone):
                        held.remove(gone)
                break
            except FormatError:
                if held_at in failed:  # the snapshot on disk is damaged too
                    raise
                failed.add(held_at)
                held = None  # load again: another process may have replaced the snapshot whose files are mapped here
        self._held, self._moment = held, moment
        if self._behind > max(ROWS_BEHIND, SHARE_BEHIND * len(held)):
            self._try_to_save()

    def _loaded(self, reader: Reader) -> tuple[Held, Moment]:
        """Load the newest usable snapshot, or build; return the result and its moment."""
        for folder in self._snapshots():
            try:
                if (moment := self._moment_of(_read_snapshot(folder), reader)) is None:
                    continue
                with progress_bar(f"loading the {self.folder_name}", None, "snapshots"):
                    held = self._checked(folder, reader, moment)
            except FormatError as error:
                if is_folder(folder):  # otherwise another process has just replaced it with a newer one
                    logger.warning("%s, which is done now from the store", error)
                continue
            self._behind = 0
            return held, moment
        moment = reader.moment()
        self._behind = moment.documents
        return self._build(reader), moment

    # ------------------------------------------------------------------------------------------------- on disk

    def _snapshots(self) -> list[Path]:
        """Return the folders of all snapshots, newest first."""
        names = names_in(self.folder, self.store.path.parent)
        return [self.folder / name for name in sorted(filter(IS_SNAPSHOT, names), reverse=True)]

    def pending(self, reader: Reader) -> int:
        """Count the additions and removals in the store that the newest snapshot lacks."""
        for _, _, saved_at in self._usable(reader):
            return reader.moment().last - saved_at.last + len(reader.removed_since(saved_at.change))
        return reader.moment().documents

    def facts(self, reader: Reader) -> dict[str, Any]:
        """Return the facts of the newest usable snapshot, and when it was `written`."""
        for folder, saved, saved_at in self._usable(reader):
            with suppress(FileNotFoundError):  # deleted meanwhile
                written = (folder / SNAPSHOT).stat().st_mtime
                return {**saved.get("facts", {}), "documents": saved_at.documents, "written": written}
        return {}

    def _usable(self, reader: Reader) -> Iterator[tuple[Path, dict[str, Any], Moment]]:
        """Yield the folder, the contents and the moment of each usable snapshot."""
        for folder in self._snapshots():
            saved = _saved_in(folder)
            if (moment := self._moment_of(saved, reader)) is not None:
                yield folder, saved, moment

    def ahead(self) -> Path | None:
        """Return a snapshot of a write that the store has lost, or None."""
        for folder in self._snapshots():
            saved = _saved_in(folder)
            with self.store.reading() as reader:  # opened after the snapshot was read, so the reader is no older
                now = reader.moment()
            if saved.get("change", -1) >= now.change and (saved["change"], saved.get("token")) != now[:2]:
                return folder
        return None

    def damaged_snapshots(self, reader: Reader) -> Iterator[tuple[Path, str]]:
        """Yield the folder of each damaged snapshot, and what is wrong with it."""
        for folder in self._snapshots():
            try:
                if (moment := self._moment_of(_read_snapshot(folder), reader)) is not None:
                    self._checked(folder, reader, moment)
            except FormatError as error:
                yield folder, str(error)

    def _moment_of(self, saved: dict[str, Any], reader: Reader) -> Moment | None:
        """Return the moment of a snapshot; None if it is from another engine or store."""
        is_usable = self._identity().items() <= saved.items()
        return reader.moment_at(saved.get("change", -1), saved.get("token", "")) if is_usable else None

    def _checked(self, folder: Path, reader: Reader, moment: Moment) -> Held:
        """Load a snapshot, perhaps a stranger's; FormatError if of other documents."""
        check_tree(folder, self.store.path.parent)
        held = self._load(folder, reader.numbers_at(moment))
        if held is None:
            raise FormatError(f"{folder}: the snapshot is not of the documents there were; it has to be rebuilt")
        return held

    def _try_to_save(self) -> None:
        """Save a snapshot unless another process is writing; nothing depends on it."""
        try:
            with self.store.writing(wait=0):  # so that no two processes write and delete snapshots at once
                self._save()
        except (HceError, OSError) as error:
            logger.debug("no snapshot was written: %s", error)

    def _is_wanted(self) -> bool:
        """Return whether the manifest on disk still names this engine and encoder."""
        manifest = Manifest.read(self.store.path.parent)
        if self.manifest.suffix != manifest.suffix:
            other = manifest.standby()
            if other is None or other.suffix != self.manifest.suffix:
                return False
            manifest = manifest.with_active(other)
        named = asdict(manifest)
        if named["engine"] not in ENGINES:  # this engine replaces one that no longer exists
            del named["engine"]
        return all(named.get(name, value) == value for name, value in self._identity().items())

    def _save(self) -> None:
        """Write a snapshot; delete all others, and leftovers of killed processes."""
        held, moment, within = self._held, self._moment, self.store.path.parent
        if held is None or moment is None or not self._is_wanted():
            return
        target = self.folder / f"{moment.change:012d}"
        delete_folder(target, within)
        with new_folder(target) as folder:
            held.save(folder)
            saved = {**self._identity(), "change": moment.change, "token": moment.token}
            write_json(folder / SNAPSHOT, sealed({**saved, "facts": self._facts(held)}))
        for old in self._snapshots():
            if old != target:
                delete_folder(old, within)
        delete_leftovers(self.folder, within=within)
        self._behind = 0


def _read_snapshot(folder: Path) -> dict[str, Any]:
    """Read the file that names the engine and the moment of a snapshot."""
    try:
        saved, is_as_written = unsealed(read_json(folder / SNAPSHOT))
    except FormatError as error:
        raise FormatError(f"{error}; it has to be rebuilt") from error
    if not is_as_written:
        raise FormatError(f"{folder / SNAPSHOT}: changed since it was written; it has to be rebuilt")
    return saved


def _saved_in(folder: Path) -> dict[str, Any]:
    """Return the contents of a snapshot's file; nothing if it is damaged."""
    with suppress(FormatError):
        return _read_snapshot(folder)
    return {}


class EnginePart(LocalPart[VectorEngine]):
    """The engine of the vectors of all documents."""

    folder_name: ClassVar[str] = "engine"

    def _build(self, reader: Reader) -> VectorEngine:
        index_folder, engine = self.store.path.parent, self.manifest.engine
        with all_vectors(reader, index_folder) as (numbers, vectors):
            tree = load_tree(index_folder, self.manifest.suffix) if wants_tree(engine, len(numbers)) else None
            hierarchy = tree.hierarchy if tree is not None and np.array_equal(tree.numbers, numbers) else None
            return new_engine(engine, self.manifest.dim, numbers=numbers, vectors=vectors, hierarchy=hierarchy)

    def _load(self, folder: Path, numbers: np.ndarray) -> VectorEngine | None:
        held = load_engine(self.manifest.engine, folder, self.manifest.dim)
        return held if np.array_equal(held.numbers, numbers) else None

    def _add(self, held: VectorEngine, reader: Reader, after: int) -> int:
        numbers, vectors = reader.vectors(after)
        if len(numbers):
            held.add(numbers, vectors)
        return len(numbers)

    def _facts(self, held: VectorEngine) -> dict[str, Any]:
        return held.facts()


class PassagesPart(LocalPart[PassageEngine]):
    """The engine of the passages of long documents."""

    folder_name: ClassVar[str] = "passages"

    def _build(self, reader: Reader) -> PassageEngine:
        return PassageEngine.build(self.manifest.engine, self.manifest.dim, *reader.passages())

    def _load(self, folder: Path, numbers: np.ndarray) -> PassageEngine | None:
        held = PassageEngine.load(self.manifest.engine, folder, self.manifest.dim)
        return held if np.isin(held.documents, numbers).all() else None

    def _add(self, held: PassageEngine, reader: Reader, after: int) -> int:
        passages = reader.passages(after)
        if len(passages.numbers):
            held.add(*passages)
        return len(passages.numbers)

    def _facts(self, held: PassageEngine) -> dict[str, Any]:
        return held.engine.facts()


class WordsPart(LocalPart[Words]):
    """The words of all texts."""

    folder_name: ClassVar[str] = "words"
    in_memory: ClassVar[bool] = False

    def _identity(self) -> dict[str, Any]:
        return {"language": self.manifest.language, "words": Words.FORMAT}

    def _build(self, reader: Reader) -> Words:
        words = Words.new(self.manifest.language)
        self._add(words, reader, 0)
        return words

    def _load(self, folder: Path, numbers: np.ndarray) -> Words | None:
        held = Words.load(folder, self.manifest.language)
        return held if len(held) == len(numbers) else None

    def _add(self, held: Words, reader: Reader, after: int) -> int:
        with progress_bar("indexing words", reader.count_after(after), "documents") as advance:
            return held.add(counted(reader.texts(after), advance), _passage_texts(reader, after))


def _passage_texts(reader: Reader, after: int) -> Iterator[PassageText]:
    """Yield passages of documents above `after`; all but the first get short titles."""
    for number, extents in reader.all_extents(after):
        for document in reader.documents([number]).values():
            text, title = document.full_text, document.title.strip()
            for passage_number, (start, stop) in extents.items():
                before = f"{title} " if start and title and TITLE_SHARE * len(title) <= stop - start else ""
                yield PassageText(number, passage_number, before + text[start:stop])


# --------------------------------------------------------------------------------------- the parts of an index


class Derived:
    """The parts derived from a store with one encoder's vectors.

    `mirror` sends writes to an engine elsewhere; it is None if the engine is in this process. Without long documents,
    the engine of passages is not used.
    """

    def __init__(self, store: Store, manifest: Manifest, mirror: Any = None) -> None:
        # The default engine replaces one that this version no longer has.
        self.engine_name = manifest.engine if manifest.engine in (*ENGINES, *ELSEWHERE) else ENGINES[0]
        known = replace(manifest, engine=self.engine_name)
        self.mirror = mirror or (home_of(manifest.engine).Mirror(store) if manifest.engine in ELSEWHERE else None)
        self.engine_part: Part[Engine] = self.mirror.documents if self.mirror else EnginePart(store, known)
        self.passages_part: Part[PassageEngine] = self.mirror.passages if self.mirror else PassagesPart(store, known)
        self.words_part = WordsPart(store, known)
        self._warn(store, manifest)

    def _warn(self, store: Store, manifest: Manifest) -> None:
        """Warn of an engine that no longer exists, and of writes that the store has lost."""
        if self.engine_name != manifest.engine:
            with store.reading() as reader:
                is_built = bool(self.engine_part.facts(reader))
            if not is_built:
                logger.warning(
                    "%s was made with the engine %s, which no longer exists; %s is used instead, and "
                    "'hce rebuild %s --engine %s' makes that permanent",
                    *(store.path.parent, manifest.engine, self.engine_name, store.path.parent, self.engine_name),
                )
        for part in (self.engine_part, self.words_part):
            if isinstance(part, LocalPart) and (snapshot := part.ahead()) is not None:
                logger.warning(
                    "%s knows of a later write than %s: writes were lost, by a missing or damaged %s-wal or an older "
                    "copy; restore both from a copy, or add again what is missing",
                    *(snapshot, store.path, store.path.name),
                )

    def parts(self, reader: Reader) -> list[Part[Any]]:
        """Return the engine, the engine of passages if there are any, and the words."""
        return [self.engine_part, *([self.passages_part] if reader.has_passages() else []), self.words_part]

    def local_parts(self, reader: Reader) -> list[LocalPart[Any]]:
        """Return those of the parts that are in this process, and have snapshots."""
        return [part for part in self.parts(reader) if isinstance(part, LocalPart)]

    def follow_write(self) -> None:
        """Send a write to an engine elsewhere, or rebuild one here if that pays."""
        if self.mirror is not None:
            self.mirror.follow()
        for part in (self.engine_part, self.passages_part):
            if isinstance(part, LocalPart):
                part.renew()

    def close(self) -> None:
        """Close the connection to an engine elsewhere."""
        if self.mirror is not None:
            self.mirror.close()

    def rebuild(self, reader: Reader, manifest: Manifest) -> None:
        """Rebuild all parts, with the engine that `manifest` names."""
        self.engine_name = manifest.engine
        for part in self.parts(reader):
            if self.mirror is None or part is not self.passages_part:  # elsewhere, the engine includes the passages
                part.rebuild(reader, manifest)


def home_of(engine: str) -> Any:
    """Import the module of an engine elsewhere; InputError if it has none."""
    if engine not in HOMES:
        raise InputError(f"engine {engine!r}: has no address; choose one of {', '.join(HOMES)}")
    return import_module(HOMES[engine])


def replica_at(address: str | Path, encoder: Encoder | None) -> Index | None:
    """Open the index at an address, for reading only; None for a folder."""
    for engine in HOMES:
        if home_of(engine).is_address(address):
            replica: Index = home_of(engine).open_replica(address, encoder)
            return replica
    return None


def trust_address_of(index_folder: str | Path) -> None:
    """Trust the address that an index names, as if this user had named it."""
    manifest = Manifest.read(Path(index_folder))
    if manifest.engine_at is not None:
        home_of(manifest.engine).trust(manifest.engine_at)


class SharedLock:
    """A readers-writer lock that prefers writers: any number of threads share it, or one holds it alone."""

    def __init__(self) -> None:
        self._condition = Condition()
        self._sharing = 0  # how many threads share the lock; −1 if one holds it alone
        self._waiting = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock together with others."""
        with self._condition:
            self._condition.wait_for(lambda: self._sharing >= 0 and not self._waiting)
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
                self._condition.wait_for(lambda: not self._sharing)
                self._sharing = -1
            finally:
                self._waiting -= 1
        try:
            yield
        finally:
            with self._condition:
                self._sharing = 0
                self._condition.notify_all()
