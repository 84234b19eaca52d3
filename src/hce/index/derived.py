"""Derived: what an index makes of its store and keeps up to date: an engine of documents, one of passages, the words.

Each of the three is a live part: it is loaded when it is first needed, and brought to the moment of the reader that
uses it. A snapshot is a part on disk, as the part was after one change of the store. Snapshots can be deleted at any
time: where one is missing, damaged or of another store, the part is built anew from the store.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from hce.checksums import sealed, unsealed
from hce.contained import check_tree, delete_folder, is_folder, names_in
from hce.errors import FormatError, HceError
from hce.files import delete_leftovers, new_folder, read_json, write_json
from hce.index.cutting import passage_texts
from hce.index.manifest import Manifest
from hce.index.mapped import all_vectors
from hce.index.mirror import Mirror, MirroredPart, document_engine, passage_engine
from hce.index.numbered_tree import load_tree
from hce.index.store import Moment, MomentPassedError, Reader, Store
from hce.index.threads import SharedLock, heed_forks
from hce.progress import counted, progress_bar
from hce.search.engine import ELSEWHERE, ENGINES, FILES, Engine, load_engine, new_engine, wants_tree
from hce.search.milvus import MilvusEngine
from hce.search.passages import PassageEngine
from hce.search.words import Words

Held = TypeVar("Held", Engine, PassageEngine, Words)  # what a live part holds
Result = TypeVar("Result")

logger = logging.getLogger(__name__)

# A snapshot is written anew when it is behind by this share of the documents, and by so many.
SHARE_BEHIND, ROWS_BEHIND = 0.05, 1000
SNAPSHOT = "snapshot.json"
IS_SNAPSHOT = re.compile("[0-9]{12,}").fullmatch  # the name of a snapshot's folder: the number of a change


class Builder(Protocol[Held]):
    """Builds, loads and extends what a live part holds: an engine of documents, an engine of passages, or words.

    Attributes:
        folder_name: the name of the folder of snapshots, below the folder of the index.
        in_memory: whether what is held lives only in memory, which a forked process has too.
        identity: fields that a snapshot must match to be usable.
    """

    folder_name: ClassVar[str]
    in_memory: ClassVar[bool]

    @property
    def identity(self) -> dict[str, Any]:
        """Fields that a snapshot must match to be usable."""
        ...

    def build(self, reader: Reader) -> Held:
        """Build what the part holds from all documents."""
        ...

    def load(self, folder: Path) -> Held:
        """Read a snapshot.

        Raises:
            FormatError: the snapshot is damaged.
        """
        ...

    def fits(self, held: Held, numbers: np.ndarray) -> bool:
        """Tell whether what was read from a snapshot, which may come from anyone, fits these documents (rising)."""
        ...

    def add(self, held: Held, reader: Reader, after: int) -> int:
        """Add the documents whose numbers are above `after`; return how many vectors or texts were added."""
        ...

    def facts(self, held: Held) -> dict[str, Any]:
        """Return what a snapshot says of itself; see `Live.renew`."""
        ...


class Live(Generic[Held]):
    """A derived part of an index: loaded when first needed, caught up before each use, shared by threads."""

    def __init__(self, store: Store, builder: Builder[Held], suffix: str = "") -> None:
        self.store = store
        self.builder: Builder[Held] = builder
        self._suffix = suffix  # of the folder: parts built from another encoder's vectors have a folder of their own
        self._since = 0  # the change since which the store has the vectors that this part is built from
        self._lock = SharedLock()
        self._held: Held | None = None
        self._moment: Moment | None = None
        self._behind = 0  # additions and removals that are not in the snapshot on disk
        heed_forks(self)

    def after_fork(self) -> None:
        """Forget the locks of the parent process, and what is held unless it lives in memory, after a fork."""
        self._lock = SharedLock()
        if not self.builder.in_memory:
            self._held = self._moment = None

    @property
    def folder(self) -> Path:
        """The folder of the snapshots."""
        return self.store.path.parent / f"{self.builder.folder_name}{self._suffix}"

    def use(self, reader: Reader, work: Callable[[Held], Result]) -> Result:
        """Call `work` on what is held, brought to the moment that `reader` sees.

        Raises:
            MomentPassedError: another thread has brought what is held to a later moment.
        """
        moment = reader.moment()
        while True:
            with self._lock.shared():
                if self._held is not None and self._moment == moment:
                    return work(self._held)
            with self._lock.alone():
                if moment.change < max(self._since, self._moment.change if self._moment else 0):
                    raise MomentPassedError(f"{self.folder} is at a later change than {moment.change}; look again")
                self._catch_up(reader, moment)

    def prepare(self, reader: Reader) -> None:
        """Load or build now what the first search would have to wait for."""
        moment = reader.moment()
        with self._lock.alone():
            if moment.change >= self._since and (self._moment is None or self._moment.change < moment.change):
                self._catch_up(reader, moment)

    def take_up(self, builder: Builder[Held], suffix: str, since: int) -> None:
        """Drop what is held; from now on build it with `builder`, from the vectors in force since a change."""
        with self._lock.alone():
            if since >= self._since:  # else another thread was faster, with later vectors
                self.builder, self._suffix, self._since = builder, suffix, since
                self._held = self._moment = None

    def save_snapshot(self, reader: Reader) -> None:
        """Bring what is held to the moment of `reader`, and write a snapshot unless the last one is current."""
        with self._lock.alone():
            self._catch_up(reader, reader.moment())
            if self._behind or not self._snapshots():
                self._save()

    def rebuild(self, reader: Reader, builder: Builder[Held]) -> None:
        """Build what is held anew from all documents with `builder`, and write a snapshot."""
        with self._lock.alone():
            self.builder = builder
            self._held = self._moment = None
            self._held, self._moment = builder.build(reader), reader.moment()
            self._save()

    def pending(self, reader: Reader) -> int:
        """Count the additions and removals that are in the store and not in the snapshot on disk."""
        for _, saved_at in self._usable_snapshots(reader):
            return reader.moment().last - saved_at.last + len(reader.removed_since(saved_at.change))
        return reader.moment().documents

    def facts(self, reader: Reader) -> dict[str, Any]:
        """Return what the newest usable snapshot says of itself; nothing where there is none."""
        for folder, saved_at in self._usable_snapshots(reader):
            return {**_told_by_snapshot(folder)[0].get("facts", {}), "documents": saved_at.documents}
        return {}

    def renew(self) -> None:
        """Build what is held again where that pays by now, by the newest snapshot: a write calls this, and no search.

        Searches go on meanwhile. Nothing depends on it, so that a failure is no more than a line in the log.
        """
        try:
            with self.store.reading() as reader:
                moment, facts = reader.moment(), self.facts(reader)
                rows = facts.get("rows", 0) * moment.documents // max(facts.get("documents", 0), 1)
                if rows < facts.get("renewed_from", math.inf):
                    return
                builder, held = self.builder, self.builder.build(reader)
        except (HceError, OSError) as error:
            logger.debug("%s is not built again: %s", self.folder, error)
            return
        with self._lock.alone():
            if builder is self.builder:
                self._held, self._moment = held, moment
                self._try_to_save()

    def _catch_up(self, reader: Reader, moment: Moment) -> None:
        """Bring what is held to `moment`; after an interruption nothing is held, rather than half of it.

        Raises:
            FormatError: documents to add cannot be read from the store, or cannot be added.
        """
        held, held_at = self._held, self._moment
        self._held = self._moment = None
        failed: set[Moment] = set()
        while True:
            # A rebuild forgets what was removed before it, and what the store was like then.
            if held is None or held_at is None or reader.moment_at(held_at.change, held_at.token) is None:
                held, held_at = self._loaded(reader)
            try:
                self._follow(held, reader, held_at, moment)
                break
            except FormatError:
                if held_at in failed:  # also as it is on disk now
                    raise
                failed.add(held_at)
                held = None  # another process may have replaced the snapshot that this one still read from
        self._held, self._moment = held, moment
        if self._behind > max(ROWS_BEHIND, SHARE_BEHIND * len(held)):
            self._try_to_save()

    def _follow(self, held: Held, reader: Reader, held_at: Moment, moment: Moment) -> None:
        """Bring what is held from the moment `held_at` to a later one."""
        if held_at.change == moment.change:
            return
        gone = reader.removed_since(held_at.change)
        self._behind += self.builder.add(held, reader, held_at.last) + len(gone)
        if len(gone):
            held.remove(gone)

    def _loaded(self, reader: Reader) -> tuple[Held, Moment]:
        """Load the newest usable snapshot, or build from all documents; return what is held, and its moment."""
        for folder, moment in self._usable_snapshots(reader):
            try:
                with progress_bar(f"loading the {self.builder.folder_name}", None, "snapshots"):
                    held = self._checked(folder, reader, moment)
            except FormatError as error:
                if is_folder(folder):  # else another process has just put a newer one in its place
                    logger.warning("%s, which is done now from the store", error)
                continue
            self._behind = 0
            return held, moment
        for folder in self._snapshots():
            damage = _damage_of_snapshot_file(folder)
            if damage and is_folder(folder):
                logger.warning("%s, which is done now from the store", damage)
        moment = reader.moment()
        self._behind = moment.documents
        return self.builder.build(reader), moment

    # ------------------------------------------------------------------------------------------------- on disk

    def _snapshots(self) -> list[Path]:
        return [self.folder / name for name in names_in(self.folder, self.store.path.parent) if IS_SNAPSHOT(name)]

    def saved_at(self) -> float | None:
        """Return when the newest snapshot was written, in seconds since 1970; None where there is none."""
        with suppress(FileNotFoundError):  # deleted meanwhile
            return max(((folder / SNAPSHOT).stat().st_mtime for folder in self._snapshots()), default=None)
        return None

    def _usable_snapshots(self, reader: Reader) -> Iterator[tuple[Path, Moment]]:
        """Yield the snapshots that match the builder and the store, newest first, with their moments."""
        for folder in sorted(self._snapshots(), reverse=True):
            saved, is_as_written = _told_by_snapshot(folder)
            if is_as_written is False or not self.builder.identity.items() <= saved.items():
                continue
            moment = reader.moment_at(saved.get("change", -1), saved.get("token", ""))
            if moment is not None:
                yield folder, moment

    def is_there(self) -> bool:
        """Return whether a snapshot of this builder's kind is on disk."""
        identity = self.builder.identity.items()
        return any(identity <= _told_by_snapshot(folder)[0].items() for folder in self._snapshots())

    def ahead(self) -> Path | None:
        """Return a snapshot of a later moment than the store's, which shows that the store lost writes; else None."""
        for folder in self._snapshots():
            saved, is_as_written = _told_by_snapshot(folder)
            with self.store.reading() as reader:  # of a moment after the snapshot was read
                now = reader.moment()
            is_of_this_moment = saved.get("change") == now.change and saved.get("token") == now.token
            if is_as_written and saved["change"] >= now.change and not is_of_this_moment:
                return folder
        return None

    def damaged_snapshots(self, reader: Reader) -> Iterator[tuple[Path, str]]:
        """Read the snapshots that would be used, and yield each damaged one with what is wrong with it."""
        for folder in self._snapshots():
            damage = _damage_of_snapshot_file(folder)
            if damage:
                yield folder, damage
        for folder, moment in self._usable_snapshots(reader):
            try:
                if _told_by_snapshot(folder)[1] is None:
                    raise FormatError(f"{folder / SNAPSHOT}: it has no checksum; it has to be rebuilt")
                self._checked(folder, reader, moment)
            except FormatError as error:
                yield folder, str(error)

    def _checked(self, folder: Path, reader: Reader, moment: Moment) -> Held:
        """Read a snapshot that claims to be of a moment.

        Raises:
            FormatError: the snapshot is damaged, or not of the documents of that moment.
        """
        check_tree(folder, self.store.path.parent)
        held = self.builder.load(folder)
        if not self.builder.fits(held, reader.numbers_at(moment)):
            raise FormatError(f"{folder}: the snapshot is not of the documents there were; it has to be rebuilt")
        return held

    def _try_to_save(self) -> None:
        """Save a snapshot unless someone is writing; it only saves time later, and nothing depends on it."""
        try:
            with self.store.writing(wait=0):  # so that no two processes write and tidy up here at once
                self._save()
        except (HceError, OSError) as error:
            logger.debug("no snapshot was written: %s", error)

    def _is_wanted(self) -> bool:
        """Tell whether the manifest still names such a part: another process may have rebuilt the index."""
        manifest = Manifest.read(self.store.path.parent)
        other = manifest.other()
        if self._suffix != manifest.suffix:
            if other is None or other.suffix != self._suffix:
                return False
            manifest = manifest.with_in_force(other)
        named = asdict(manifest)
        if named["engine"] not in ENGINES:  # an engine that is no more, which this one stands in for
            del named["engine"]
        return all(named.get(name, value) == value for name, value in self.builder.identity.items())

    def _save(self) -> None:
        held, moment = self._held, self._moment
        if held is None or moment is None or not self._is_wanted():
            return
        target = self.folder / f"{moment.change:012d}"
        self._delete([target])
        with new_folder(target) as folder:
            held.save(folder)
            saved = {**self.builder.identity, "change": moment.change, "token": moment.token}
            saved["facts"] = self.builder.facts(held)
            write_json(folder / SNAPSHOT, sealed(saved))
        self._delete([old for old in self._snapshots() if old != target])
        self._behind = 0

    def _delete(self, snapshots: list[Path]) -> None:
        """Delete snapshots, each at once, and what killed processes left."""
        for snapshot in snapshots:
            delete_folder(snapshot, self.store.path.parent)
        delete_leftovers(self.folder, within=self.store.path.parent)


def _told_by_snapshot(folder: Path) -> tuple[dict[str, Any], bool | None]:
    """Return the fields of a snapshot's file, and whether they are as written; None where there is no checksum.

    A file that cannot be read gives no fields, and False.
    """
    try:
        return unsealed(read_json(folder / SNAPSHOT))
    except FormatError:
        return {}, False


def _damage_of_snapshot_file(folder: Path) -> str | None:
    """Say what is wrong with the file that names what a snapshot is of; None where nothing is wrong."""
    try:
        _, is_as_written = unsealed(read_json(folder / SNAPSHOT))
    except FormatError as error:
        return f"{error}; it has to be rebuilt"
    return f"{folder / SNAPSHOT}: not as it was written; it has to be rebuilt" if is_as_written is False else None


# ------------------------------------------------------------------------------------------------- how parts are made


@dataclass(frozen=True)
class VectorsBuilder:
    """The settings of an engine of vectors.

    Attributes:
        engine_name: the name of the engine.
        dim: the length of a vector.
    """

    engine_name: str
    dim: int
    in_memory: ClassVar[bool] = True

    @property
    def identity(self) -> dict[str, Any]:
        """See `Builder`."""
        return {"engine": self.engine_name, "dim": self.dim, "files": FILES}


@dataclass(frozen=True)
class EngineBuilder(VectorsBuilder):
    """Builds the engine of an index's documents.

    Attributes:
        index_folder: the folder of the index.
        suffix: of the folders of the encoder that made the vectors.
    """

    index_folder: Path
    suffix: str
    folder_name: ClassVar[str] = "engine"

    def build(self, reader: Reader) -> Engine:
        """Build the engine of all vectors."""
        with all_vectors(reader, self.index_folder) as (numbers, vectors):
            tree = None
            if wants_tree(self.engine_name, len(numbers)):
                tree = load_tree(self.index_folder, self.suffix)
            hierarchy = tree.hierarchy if tree is not None and np.array_equal(tree.numbers, numbers) else None
            return new_engine(self.engine_name, self.dim, numbers=numbers, vectors=vectors, hierarchy=hierarchy)

    def facts(self, held: Engine) -> dict[str, Any]:
        """Return from how many vectors on to build the engine again, and how searches by codes were set."""
        return held.facts()

    def load(self, folder: Path) -> Engine:
        """Read a snapshot of an engine."""
        return load_engine(self.engine_name, folder, self.dim)

    def fits(self, held: Engine, numbers: np.ndarray) -> bool:
        """Tell whether the engine has a vector for each of these documents, and no other."""
        return np.array_equal(held.numbers, numbers)

    def add(self, held: Engine, reader: Reader, after: int) -> int:
        """Add the vectors above a number."""
        numbers, vectors = reader.vectors(after)
        if len(numbers):
            held.add(numbers, vectors)
        return len(numbers)


class PassagesBuilder(VectorsBuilder):
    """Builds the engine of the passages of an index's long documents."""

    folder_name: ClassVar[str] = "passages"

    def build(self, reader: Reader) -> PassageEngine:
        """Build the engine of all passages."""
        return PassageEngine.build(self.engine_name, self.dim, *reader.passages())

    def facts(self, held: PassageEngine) -> dict[str, Any]:
        """Return the facts of the engine."""
        return held.engine.facts()

    def load(self, folder: Path) -> PassageEngine:
        """Read a snapshot of an engine of passages."""
        return PassageEngine.load(self.engine_name, folder, self.dim)

    def fits(self, held: PassageEngine, numbers: np.ndarray) -> bool:
        """Tell whether all passages are of these documents."""
        return bool(np.isin(held.documents, numbers).all())

    def add(self, held: PassageEngine, reader: Reader, after: int) -> int:
        """Add the passages of the documents above a number."""
        passages = reader.passages(after)
        if len(passages.numbers):
            held.add(*passages)
        return len(passages.numbers)


@dataclass(frozen=True)
class WordsBuilder:
    """Builds the words of an index, in a language."""

    language: str
    folder_name: ClassVar[str] = "words"
    in_memory: ClassVar[bool] = False

    @property
    def identity(self) -> dict[str, Any]:
        """See `Builder`."""
        return {"language": self.language, "words": Words.FORMAT}

    def build(self, reader: Reader) -> Words:
        """Index the words of all texts."""
        words = Words.new(self.language)
        self.add(words, reader, 0)
        return words

    def facts(self, held: Words) -> dict[str, Any]:
        """Return nothing: words are never built again as long as they are whole."""
        return {}

    def load(self, folder: Path) -> Words:
        """Read a snapshot of words."""
        return Words.load(folder, self.language)

    def fits(self, held: Words, numbers: np.ndarray) -> bool:
        """Tell whether the words are of as many texts."""
        return len(held) == len(numbers)

    def add(self, held: Words, reader: Reader, after: int) -> int:
        """Add the words of the texts above a number, and of the passages of the long ones."""
        with progress_bar("indexing words", reader.count_after(after), "documents") as advance:
            return held.add(counted(reader.texts(after), advance), passage_texts(reader, after))


# --------------------------------------------------------------------------------------- the parts of an index

EnginePart = Live[Engine] | MirroredPart[MilvusEngine]
PassagesPart = Live[PassageEngine] | MirroredPart[PassageEngine]


class Derived:
    """The parts that are derived from a store; each lends what it holds by `use`, as of a reader's moment.

    Attributes:
        engine_part: lends the engine of the vectors of all documents.
        passages_part: lends the engine of the passages of long documents; of no use while there are none.
        words_part: lends the words of all texts.
        mirror: tells an engine that lives elsewhere what was written; None where the engine is in this process.
        engine_name: the name of the engine that searches.
    """

    def __init__(self, store: Store, manifest: Manifest, mirror: Mirror | None = None) -> None:
        self._index_folder = store.path.parent
        self.engine_name = _engine_in_use(manifest)
        engine_builder, passages_builder, words_builder = _builders(self._index_folder, manifest, self.engine_name)
        self.mirror = mirror or (Mirror(store) if manifest.engine in ELSEWHERE else None)
        self.engine_part: EnginePart
        self.passages_part: PassagesPart
        if self.mirror is not None:
            self.engine_part = MirroredPart(self.mirror, document_engine)
            self.passages_part = MirroredPart(self.mirror, passage_engine)
        else:
            self.engine_part = Live(store, engine_builder, manifest.suffix)
            self.passages_part = Live(store, passages_builder, manifest.suffix)
        self.words_part: Live[Words] = Live(store, words_builder, manifest.suffix)
        if self.engine_name != manifest.engine and not self.engine_part.is_there():
            logger.warning(
                "%s was made with the engine %s, which is no more; %s searches in its place, and "
                "'hce rebuild %s --engine %s' makes that permanent",
                *(self._index_folder, manifest.engine, self.engine_name, self._index_folder, self.engine_name),
            )
        for part in (self.engine_part, self.words_part):
            if (snapshot := part.ahead()) is not None:
                logger.warning(
                    "%s knows of a later write than %s: writes were lost, by a missing or damaged %s-wal or an older "
                    "copy; restore both from a copy, or add again what is missing",
                    *(snapshot, store.path, store.path.name),
                )

    def parts(self, reader: Reader) -> list[Live[Any] | MirroredPart[Any]]:
        """Return the engine, the engine of passages where there are some at the reader's moment, and the words."""
        return [self.engine_part, *([self.passages_part] if reader.has_passages() else []), self.words_part]

    def prepare(self, reader: Reader) -> None:
        """Load or build now what the first search would have to wait for."""
        for part in self.parts(reader):
            part.prepare(reader)

    def follow_write(self) -> None:
        """Tell an engine that lives elsewhere what was just written; build one in this process again where it pays."""
        if self.mirror is not None:
            self.mirror.follow()
            return
        for part in (self.engine_part, self.passages_part):
            part.renew()

    def close(self) -> None:
        """Close the connection to an engine that lives elsewhere."""
        if self.mirror is not None:
            self.mirror.close()

    def take_up(self, manifest: Manifest) -> None:
        """Drop all parts; from now on build them from the vectors of the encoder that `manifest` names."""
        engine_builder, passages_builder, words_builder = _builders(self._index_folder, manifest, self.engine_name)
        self.engine_part.take_up(engine_builder, manifest.suffix, manifest.since)
        self.passages_part.take_up(passages_builder, manifest.suffix, manifest.since)
        self.words_part.take_up(words_builder, manifest.suffix, manifest.since)

    def save_snapshots(self, reader: Reader) -> None:
        """Write a snapshot of each part that lacks a current one."""
        for part in self.parts(reader):
            part.save_snapshot(reader)

    def rebuild(self, reader: Reader, manifest: Manifest) -> None:
        """Build all parts anew from the documents there are, with the engine that `manifest` names."""
        self.engine_name = manifest.engine
        engine_builder, passages_builder, words_builder = _builders(self._index_folder, manifest, self.engine_name)
        self.engine_part.rebuild(reader, engine_builder)  # elsewhere, along with the passages
        if self.mirror is None and reader.has_passages():
            self.passages_part.rebuild(reader, passages_builder)
        self.words_part.rebuild(reader, words_builder)


def _engine_in_use(manifest: Manifest) -> str:
    """Return the engine that the manifest names, or the usual one where this version no longer has that one."""
    return manifest.engine if manifest.engine in (*ENGINES, *ELSEWHERE) else ENGINES[0]


def _builders(
    index_folder: Path, manifest: Manifest, engine_name: str
) -> tuple[EngineBuilder, PassagesBuilder, WordsBuilder]:
    return (
        EngineBuilder(engine_name, manifest.dim, index_folder, manifest.suffix),
        PassagesBuilder(engine_name, manifest.dim),
        WordsBuilder(manifest.language),
    )
