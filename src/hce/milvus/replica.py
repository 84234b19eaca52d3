"""Replica: an index read from a Milvus collection, by any number of processes on any machine.

Each process copies the encoder, the texts and the metadata into a temporary folder; vectors stay in Milvus. So word
search, filters and hits are exactly those of the writing index. The tested versions of Milvus have no word search, or a
different one (docs/LOG.md).

Before a read, the copy is updated from the collection's log, at most once in `REFRESH` seconds. So a replica may be
`REFRESH` seconds behind.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

import numpy as np

from hce.data.text import Document, Passage
from hce.errors import FormatError, InputError
from hce.files import ScratchFolder, checked_fields, file_sha256
from hce.index.derived import Derived
from hce.index.index import Index
from hce.index.manifest import IndexStatus, Manifest
from hce.index.ranking import Hit
from hce.index.state import IndexState
from hce.index.store import Store, heeding_deadlines
from hce.index.tables import Entry, Moment, PassageVectors, Reader, Writer
from hce.milvus.engine import MOST_ROWS, PLACE, Address, Collection, GoneOnError, Milvus
from hce.milvus.mirror import ENTRY_BITS, FORMAT, MANY, Mirror, read_content
from hce.progress import progress_bar

if TYPE_CHECKING:
    from hce.encoding.encoder import Encoder

REFRESH = 1.0  # seconds between two reads of the collection's log
ATTEMPTS = 20  # of a search, if documents are removed meanwhile


# ------------------------------------------------------------------------------------------------- reading a collection


def read_facts(collection: Collection) -> tuple[Manifest, dict[str, list[Any]]]:
    """Read a collection's manifest and list of encoder files (see `file_rows`)."""
    address, content = collection.server.address, read_content(collection)
    if not content:
        raise FormatError(f"{address}: the collection is not hce's, or it is damaged")
    if not isinstance(content.get("format"), int) or content["format"] > FORMAT:
        raise FormatError(f"{address}: the collection was written by a newer version of hce; upgrade to read it")
    try:
        return checked_fields(Manifest, content["manifest"]), dict(content["files"])
    except (FormatError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{address}: the collection is damaged ({error})") from error


def read_log(collection: Collection, after: int) -> tuple[Moment | None, set[int]]:
    """Return the log's last moment, if it is after a change, and the removals since."""
    moment: Moment | None = None
    removed: set[int] = set()
    unsure: list[int] = []  # removals of an entry whose last part was not read yet
    for row in collection.log.rows_after((after + 2 << ENTRY_BITS) - 1):
        content = json.loads(row.content)
        unsure += content["removed"]
        if content["moment"] is not None:
            moment, removed, unsure = Moment(**content["moment"]), removed.union(unsure), []
    return moment, removed


def read_documents(collection: Collection, first: int, last: int) -> dict[int, Document]:
    """Read documents by number; skip those being removed, which lack pieces."""
    rows = list(collection.documents.rows_between(first, last))
    contents = {row.number: [row.content] for row in rows}
    if any(row.part > 1 for row in rows):
        further = collection.pieces.rows_between(first, last, of_documents=True)
        for piece in sorted(further, key=attrgetter("document", "part")):
            contents.get(piece.document, []).append(piece.content)
    documents = {}
    for row in rows:
        if len(contents[row.number]) == row.part:
            values = json.loads("".join(contents[row.number]))
            documents[row.number] = Document(values["_id"], values["text"], values["title"], values["metadata"])
    return documents


def read_extents(
    collection: Collection, first: int, last: int, documents: Mapping[int, Document]
) -> dict[int, tuple[int, Passage]]:
    """Return each passage's document number and extent, by the passage's number."""
    rows = collection.passages.rows_between(first, last, of_documents=True)
    return {row.number: (row.document, Passage(*json.loads(row.content))) for row in rows if row.document in documents}


def fetch_files(collection: Collection, files: dict[str, list[Any]], folder: Path) -> None:
    """Copy files into a new folder; FormatError if one is damaged or leads outside."""
    address = collection.server.address
    folder.mkdir()
    for name, (size, known, first, last) in files.items():
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise FormatError(f"{address}: the collection is damaged (a file named {name!r})")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for row in collection.files.rows_between(first, last):
                file.write(base64.b64decode(row.content))
        if path.stat().st_size != size or file_sha256(path) != known:
            raise FormatError(
                f"{address}: {name} of the encoder has changed since it was written; rebuild the index there"
            )


# ------------------------------------------------------------------------------------------------- the copy


class _ReplicaReader(Reader):
    """One moment of a replica; reads vectors from the collection."""

    def __init__(self, connection: Any, dim: int, collection: Collection) -> None:
        super().__init__(connection, dim)
        self.collection = collection

    def vectors(self, after: int = 0) -> tuple[np.ndarray, np.ndarray]:
        numbers = self._numbers_after(after)
        return numbers, self.vectors_at(numbers)

    def vectors_at(self, numbers: np.ndarray) -> np.ndarray:
        return self.collection.documents.vectors(numbers)

    def entries(self, after: int = 0) -> Iterator[Entry]:
        numbers = self._numbers_after(after)
        for start in range(0, len(numbers), MOST_ROWS):
            some = numbers[start : start + MOST_ROWS]
            documents = self.documents(some.tolist())
            for number, vector in zip(some.tolist(), self.vectors_at(some), strict=True):
                yield Entry(number, documents[number], vector)

    def passages_of(self, documents: Iterable[int]) -> PassageVectors:
        rows = self.collection.passages.rows_of(list(documents), (*PLACE, "vector"))
        vectors = np.array([row.vector for row in rows], np.float32).reshape(len(rows), self.dim)
        numbers, of = (np.array([getattr(row, name) for row in rows], np.int64) for name in ("number", "document"))
        return PassageVectors(numbers, of, vectors)

    def count_after(self, number: int) -> int:
        return len(self._numbers_after(number))

    def _numbers_after(self, number: int) -> np.ndarray:
        numbers = self.numbers()
        return numbers[numbers > number]


class ReplicaStore(Store):
    """A copy of a collection's documents, without their vectors."""

    def __init__(self, folder: Path, dim: int, server: Milvus, has: str | None) -> None:
        super().__init__(folder, dim)
        self.server = server
        self.collection = Collection(server, "", dim)  # replaced when the index is rebuilt
        self.has = has  # fingerprint of the encoder that the caller has, if any: it need not be copied
        self._lock = RLock()
        self._refreshed = 0.0  # time of the last update
        self._fills = 0  # number of full copies

    @classmethod
    def open(cls, server: Milvus, folder: Path, has: str | None) -> ReplicaStore:
        """Copy a collection into an empty folder; fail if its encoder is not `has`."""
        collection = _current(server)
        manifest, files = read_facts(collection)
        if has is not None and manifest.fingerprint != has:
            raise InputError(
                f"{server.address} holds vectors of the encoder {manifest.encoder} ({manifest.fingerprint[:12]}), "
                f"not of the one given ({has[:12]}); leave the encoder out"
            )
        Store.create(folder, manifest.dim).close()
        store = cls(folder, manifest.dim, server, has)
        store._fill(collection, manifest, files)
        return store

    @contextmanager
    def reading(self) -> Iterator[Reader]:
        """Open a consistent view of a moment at most `REFRESH` seconds old."""
        self.refresh()
        with self._lend() as connection, heeding_deadlines(connection):
            with self._lock:  # the moment and the collection must belong together
                connection.execute("BEGIN")
                reader = _ReplicaReader(connection, self.dim, self.collection)
            yield reader

    def refresh(self, *, now: bool = False) -> None:
        """Copy new writes, unless the last update is less than `REFRESH` seconds old."""
        with self._lock:
            if not now and time.monotonic() - self._refreshed < REFRESH:
                return
            current = _current(self.server)
            if current.name != self.collection.name:
                self._fill(current, *read_facts(current))
            else:
                self.collection.since = current.since
                known = self.known()
                moment, removed = read_log(self.collection, known.change)
                if moment is not None:
                    with self.writing() as writer:
                        self._copy(writer, known.last, moment, removed)
            self._refreshed = time.monotonic()

    def known(self) -> Moment:
        """Return the last copied moment."""
        with super().reading() as reader:
            return reader.moment()

    def _fill(self, collection: Collection, facts: Manifest, files: dict[str, list[Any]]) -> None:
        """Copy a collection's encoder and documents; drop the previous documents."""
        self._fills += 1
        collection.dim = facts.dim
        folder = f"encoder-{self._fills}"
        if facts.fingerprint != self.has:
            fetch_files(collection, files, self.path.parent / folder)
        moment, removed = read_log(collection, -1)
        if moment is None:
            raise FormatError(f"{self.server.address}: the collection is damaged (its log is empty)")
        manifest = replace(
            facts,
            encoder_folder=folder,
            encoder_files={},
            engine_at=str(self.server.address),
            since=moment.change,
            hierarchy=None,
            base_encoder=None,
            beside=None,
            switch=None,
        )
        with self.writing() as writer:
            writer.start_over(collection.dim)
            self.collection = collection
            self._copy(writer, 0, moment, removed)
            manifest.write(self.path.parent)  # readers of an earlier moment see by `since` that the manifest is newer
        self._refreshed = time.monotonic()

    def _copy(self, writer: Writer, after: int, moment: Moment, removed: set[int]) -> None:
        """Delete the removed documents, then copy all others numbered above `after`."""
        writer.go_to(moment, removed)
        last = moment.last
        with progress_bar("reading from Milvus", last - after, "documents", show=last - after >= MANY) as advance:
            for start in range(after + 1, last + 1, MOST_ROWS):
                stop = min(start + MOST_ROWS - 1, last)
                found = read_documents(self.collection, start, stop)
                documents = {number: each for number, each in found.items() if number not in removed}
                writer.copy(documents, read_extents(self.collection, start, stop, documents))
                advance(stop - start + 1)


class _ReplicaMirror(Mirror):
    """A mirror that sends nothing: another process writes to the collection."""

    store: ReplicaStore

    def at(self, reader: Reader) -> Collection | None:
        return cast(_ReplicaReader, reader).collection

    def follow(self) -> None:
        pass

    def pending(self, reader: Reader) -> int:
        return 0  # a reader cannot know what the writing index has not sent yet

    def check_later(self, moment: Moment) -> None:
        collection = self.store.collection
        self.store.refresh(now=True)
        with self.store.reading() as reader:
            if reader.moment().change == moment.change and self.store.collection is collection:
                raise FormatError(
                    f"{self.store.server.address}: the collection lacks documents; where the index is, "
                    "'hce rebuild' fills a new one"
                )

    def close(self) -> None:
        self.store.server.close()


class ReplicaState(IndexState):
    """The open state of a replica; its store is a copy of the collection."""

    store: ReplicaStore

    def __init__(self, folder: Path, encoder: Encoder | None, store: ReplicaStore) -> None:
        super().__init__(folder, encoder)
        self.store.close()
        self.store = store
        self.derived = Derived(store, self.manifest, _ReplicaMirror(store))

    def search(self, *args: Any, **options: Any) -> list[list[Hit]]:
        """Search the current collection; try again if it changes meanwhile."""
        attempts = ATTEMPTS
        while True:
            collection, change = self.store.collection, self.store.known().change
            try:
                return super().search(*args, **options)
            except GoneOnError:
                attempts -= 1
                self.store.refresh(now=True)
                is_as_before = self.store.collection is collection and self.store.known().change == change
                if is_as_before or not attempts:
                    raise


class ReplicaIndex(Index):
    """An index read from a Milvus collection."""

    is_replica: ClassVar[bool] = True

    def __init__(self, address: str | Path, encoder: Encoder | None = None) -> None:
        self.address = Address.parse(address)
        if self.address.uri.endswith(".db") and not Path(self.address.uri).exists():
            raise FormatError(f"{address}: no index there, and no Milvus file; 'hce index' makes one")
        self._scratch = ScratchFolder("hce-reader-")  # deleted with this object
        folder = self._scratch.path / self.address.name
        folder.mkdir()
        server = Milvus(self.address)
        try:
            store = ReplicaStore.open(server, folder, encoder.fingerprint if encoder else None)
        except BaseException:
            server.close()
            raise
        self.path = folder
        self.state = ReplicaState(folder, encoder, store)

    def __repr__(self) -> str:
        encoder = self.state.manifest.encoder
        return f"Index({str(self.address)!r}, {len(self):,} documents, {encoder}, read from Milvus)"

    def status(self) -> IndexStatus:
        """Return the status, with the collection's address as its path."""
        return replace(super().status(), path=str(self.address))

    def _refuse(self, *args: Any, **options: Any) -> NoReturn:
        raise InputError(f"{self.address} is read-only here; write to the folder of the index")

    add = update = remove = rebuild = reindex = undo_reindex = _refuse


def _current(server: Milvus) -> Collection:
    name = server.current()
    if name is None:
        raise FormatError(
            f"{server.address}: there is no collection of hce; 'hce rebuild INDEX --engine milvus --at "
            f"{server.address}' fills one"
        )
    return Collection(server, name, 0, server.now())
