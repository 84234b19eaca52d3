"""Mirror: the documents of an index in a collection of Milvus, where readers on any machine search them.

The store stays the truth, and is the log of what the collection still has to be told: whatever interrupts the telling,
it goes on from there. A small file, the pointer, says which collection it is and how far it got. Only the folder that
began a collection writes to it; a copy of the folder is refused.

New documents are told first, then one entry of the collection's log says what is there from now on and what is not, and
then the removed ones are deleted. So a reader that goes by the log sees one moment after the other.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar, cast

import numpy as np

from hce.checksums import sealed, unsealed
from hce.contained import delete_file, is_file
from hce.errors import AwayError, FormatError, InputError
from hce.files import checked_fields, read_json, write_json
from hce.index.connections import heed_forks
from hce.index.derived import Part
from hce.index.manifest import Manifest
from hce.index.store import STORE_FILE, Moment, MomentPassedError, Reader, Store
from hce.milvus.engine import (
    DOCUMENTS,
    FILES,
    LOG,
    PASSAGES,
    PIECES,
    Address,
    Collection,
    GoneOnError,
    Milvus,
    MilvusEngine,
)
from hce.milvus.rows import (
    Facts,
    LogEntry,
    document_rows,
    facts_rows,
    file_rows,
    log_rows,
    passage_rows,
    read_writer,
)
from hce.milvus.trusted import UntrustedError, require_trusted
from hce.progress import progress_bar
from hce.search.engine import Engine
from hce.search.passages import PassageEngine

logger = logging.getLogger(__name__)

POINTER_FILE = "milvus.json"
DOCUMENTS_AT_ONCE = 2000
MANY = 10_000  # documents that take long enough to show how far they are

Searched = TypeVar("Searched", Engine, PassageEngine)


@dataclass(frozen=True)
class Pointer:
    """Which collection an index writes to, and how far it got.

    Attributes:
        address: as the user gave it.
        collection: the name that it has by itself, and not the alias in the address.
        fingerprint: of the encoder whose vectors the collection has.
        writer: drawn at random; the collection names it too.
        store: the inode of the index's store: a copy has another.
        change: of the store, up to which the collection is told; while it is filled, at which that began.
        token: of that change.
        last: the highest number of a document that was written.
        is_whole: whether readers can see the collection.
        is_busy: whether something was being written, of which some may be there.
    """

    address: str
    collection: str
    fingerprint: str
    writer: str
    store: int
    change: int
    token: str
    last: int = 0
    is_whole: bool = False
    is_busy: bool = False

    @classmethod
    def read(cls, index_folder: Path) -> Pointer | None:
        """Read an index's pointer; None where there is none.

        Raises:
            FormatError: it is damaged.
        """
        path = index_folder / POINTER_FILE
        if not is_file(path):
            return None
        values, is_as_written = unsealed(read_json(path))
        if not is_as_written:
            raise FormatError(f"{path}: not as it was written; delete it, and rebuild with another name behind #")
        return checked_fields(cls, values)

    @classmethod
    def of(cls, index_folder: Path) -> Pointer | None:
        """Read an index's own pointer: that of a copy is another's, and None here."""
        pointer = cls.read(index_folder)
        return pointer if pointer is not None and pointer.store == _inode(index_folder) else None

    def write(self, index_folder: Path) -> Pointer:
        """Put the pointer into an index's folder, atomically."""
        write_json(index_folder / POINTER_FILE, sealed(asdict(self)))
        return self


# ------------------------------------------------------------------------------------------------- the mirror


class Mirror:
    """The collection of an index, told of the store's changes before it is searched.

    Attributes:
        store: the documents.
        index_folder: the folder of the index.
        documents: the engine of all documents there.
        passages: the engine of the passages of long documents there.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.index_folder = store.path.parent
        self._lock = Lock()
        self._server: Milvus | None = None
        self._known: tuple[Collection, int] | None = None  # and the change up to which it is told
        self.documents: MirroredPart[Engine] = MirroredPart(self, document_engine)
        self.passages: MirroredPart[PassageEngine] = MirroredPart(self, passage_engine)
        heed_forks(self)

    def after_fork(self) -> None:
        """Wait for no thread of the parent, and share no connection with it, in a process that was just forked."""
        self._lock, self._server, self._known = Lock(), None, None

    def close(self) -> None:
        """Let go of the connection."""
        if self._server is not None:
            self._server.close()

    def forget(self) -> None:
        """Look anew at what there is: the index has another encoder, or another collection."""
        with self._lock:
            self._known = None

    def at(self, reader: Reader) -> Collection | None:
        """Return the collection, told of all up to the moment that `reader` sees; None when it has gone on.

        Raises:
            AwayError: Milvus does not answer.
            InputError: the collection is not this index's.
        """
        moment = reader.moment()
        with self._lock:
            if self._known is None or self._known[1] < moment.change:
                self._known = self._look(reader)
            if self._known is None or self._known[1] < moment.change:
                self._known = self._catch_up()
            collection, change = self._known
            return None if change > moment.change else collection

    def follow(self) -> None:
        """Tell the collection of all that was written; what cannot be told now is told before the next search."""
        try:
            with self._lock:
                self._known = self._catch_up()
        except (AwayError, UntrustedError) as error:
            logger.warning("%s; all is kept in %s, and the next write or search tells Milvus", error, self.index_folder)

    def rebuild(self, reader: Reader) -> None:
        """Fill a new collection, or go on with one that was begun, while nobody writes; readers see it when whole."""
        with self._lock:
            self._known = None
            self._known = self._push(reader, anew=True)

    def pending(self, reader: Reader) -> int:
        """Count the additions and removals that the collection has not been told of."""
        moment, pointer = reader.moment(), Pointer.read(self.index_folder)
        known = pointer and pointer.is_whole and reader.moment_at(pointer.change, pointer.token)
        if not known:
            return moment.documents
        return moment.last - known.last + len(reader.removed_since(known.change))

    def check_later(self, moment: Moment) -> None:
        """Make sure that there is a later moment than one whose documents are not all in the collection.

        Raises:
            FormatError: there is none: the collection has lost documents.
        """
        with self.store.reading() as reader:
            if reader.moment().change == moment.change:
                raise FormatError(
                    f"{self.index_folder}: its collection lacks documents; 'hce rebuild {self.index_folder}' fills "
                    "another one"
                )

    # --------------------------------------------------------------------------------------------- telling

    def _look(self, reader: Reader) -> tuple[Collection, int] | None:
        """Return the collection as the pointer tells, where it is whole and of this encoder."""
        pointer, manifest = Pointer.read(self.index_folder), Manifest.read(self.index_folder, reader)
        if pointer is None or not pointer.is_whole or not _fits(pointer, manifest):
            return None
        server = self._server_at(manifest)
        return Collection(server, pointer.collection, manifest.dim, server.now()), pointer.change

    def _catch_up(self) -> tuple[Collection, int]:
        with self.store.writing() as writer:  # nothing is written to it; it keeps others from writing
            return self._push(writer)

    def _server_at(self, manifest: Manifest) -> Milvus:
        address = require_trusted(manifest.engine_at or "", self.index_folder)
        if self._server is None or self._server.address != address:
            self._server = Milvus(address)
        return self._server

    def _push(self, reader: Reader, *, anew: bool = False) -> tuple[Collection, int]:
        """Bring the collection to the moment that `reader` sees, from wherever it is."""
        moment, manifest = reader.moment(), Manifest.read(self.index_folder, reader)
        server, pointer = self._server_at(manifest), Pointer.of(self.index_folder)
        if pointer is None:
            _refuse_copy(self.index_folder, manifest)
        known = self._known_moment(server, manifest, pointer, reader)
        if pointer is None or known is None or (anew and pointer.is_whole):
            pointer, known = self._begin(server, manifest, pointer, moment), moment
        collection = Collection(server, pointer.collection, manifest.dim, server.now())
        if pointer.is_whole and not pointer.is_busy and known.change == moment.change:
            return collection, moment.change
        again = pointer.is_busy
        pointer = replace(pointer, is_busy=True).write(self.index_folder)
        if not pointer.is_whole:
            self._put_facts(collection, manifest, pointer, again)
        pointer = self._put_documents(collection, reader, pointer, again)
        removed = reader.removed_since(known.change).tolist()
        if not pointer.is_whole or known.change != moment.change:
            collection.put(LOG, log_rows(LogEntry(moment, removed)), again=again)
        self._delete(collection, removed)
        if not pointer.is_whole:
            server.publish(collection.name)
        collection.since = server.now()
        replace(
            pointer, change=moment.change, token=moment.token, last=moment.last, is_whole=True, is_busy=False
        ).write(self.index_folder)
        return collection, moment.change

    def _known_moment(
        self, server: Milvus, manifest: Manifest, pointer: Pointer | None, reader: Reader
    ) -> Moment | None:
        """Return the moment from which on the collection has to be told; None where it has to be begun anew."""
        if pointer is None or not _fits(pointer, manifest):
            return None
        is_there = server.current() == pointer.collection if pointer.is_whole else server.exists(pointer.collection)
        return reader.moment_at(pointer.change, pointer.token) if is_there else None

    def _begin(self, server: Milvus, manifest: Manifest, before: Pointer | None, moment: Moment) -> Pointer:
        """Make an empty collection, of this index alone; readers see the one before until it is whole.

        Raises:
            InputError: the name stands for a collection of another index.
        """
        _check_owner(server, before)
        is_here = before is not None and before.address == manifest.engine_at
        if before is not None and is_here and not before.is_whole and server.exists(before.collection):
            server.drop(before.collection)  # which was begun for another encoder
        name = server.new_name()
        pointer = Pointer(
            address=str(manifest.engine_at),
            collection=name,
            fingerprint=manifest.fingerprint,
            writer=before.writer if before else secrets.token_hex(8),
            store=_inode(self.index_folder),
            change=moment.change,
            token=moment.token,
        ).write(self.index_folder)
        server.create(name, manifest.dim)
        return pointer

    def _put_facts(self, collection: Collection, manifest: Manifest, pointer: Pointer, again: bool) -> None:
        """Write what a reader needs besides documents: the manifest, and the encoder's files."""
        if pointer.last:
            return  # it was done before the first document
        files, rows = file_rows(self.index_folder / manifest.encoder_folder)
        collection.put(FILES, rows, again=again)
        collection.put(LOG, facts_rows(Facts(manifest, files), pointer.writer), again=again)

    def _put_documents(self, collection: Collection, reader: Reader, pointer: Pointer, again: bool) -> Pointer:
        """Write the documents above the pointer's last, and move the pointer along."""
        entries = reader.entries(pointer.last)
        left = reader.count_after(pointer.last)
        with progress_bar("telling Milvus", left, "documents", show=left >= MANY) as advance:
            while some := list(islice(entries, DOCUMENTS_AT_ONCE)):
                rows, further = document_rows(some)
                collection.put(PIECES, further, again=again)
                collection.put(PASSAGES, passage_rows(reader, some), again=again)
                collection.put(DOCUMENTS, rows, again=again)
                pointer = replace(pointer, last=some[-1].number).write(self.index_folder)
                advance(len(some))
        return pointer

    def _delete(self, collection: Collection, removed: list[int]) -> None:
        if not removed:
            return
        for partition in (PIECES, PASSAGES):
            rows = collection.rows_of(partition, removed, ("number", "document", "part"))
            collection.delete(partition, [row.number for row in rows])
        collection.delete(DOCUMENTS, removed)


def check_place(at: str, index_folder: Path) -> None:
    """Make sure that an index can have a collection at an address, before anything is written.

    Raises:
        InputError: it is no address, or the collection there is of another index.
        AwayError: Milvus does not answer.
    """
    server = Milvus(Address.parse(at))
    try:
        _check_owner(server, Pointer.of(index_folder))
    finally:
        server.close()


def _inode(index_folder: Path) -> int:
    return (index_folder / STORE_FILE).stat().st_ino


def _refuse_copy(index_folder: Path, manifest: Manifest) -> None:
    """Refuse to write to the collection that the original of a copied folder writes to.

    Raises:
        InputError: that is where the copy would write.
    """
    pointer = Pointer.read(index_folder)
    if pointer is not None and pointer.address == manifest.engine_at:
        raise InputError(
            f"{index_folder} is a copy of the index that writes to {pointer.address}; 'hce rebuild {index_folder} "
            "--engine milvus --at' with another name behind # gives it its own"
        )


def _check_owner(server: Milvus, pointer: Pointer | None) -> None:
    current = server.current()
    if current is None:
        return
    if pointer is None or read_writer(Collection(server, current, 0)) != pointer.writer:
        raise InputError(
            f"{server.address}: a collection of another index is there; choose another name behind #, "
            f"as in {server.address.uri}#papers"
        )


def withdraw(at: str, index_folder: Path) -> None:
    """Drop the collection that an index had at an address before it moved elsewhere."""
    server, pointer = Milvus(Address.parse(at)), Pointer.of(index_folder)
    if pointer is None:  # a copy leaves the original's alone
        delete_file(index_folder / POINTER_FILE)
        return
    try:
        require_trusted(at, index_folder)
        _check_owner(server, pointer)
        server.withdraw()
    except (AwayError, InputError) as error:
        logger.warning("%s; it is left there", error)
    finally:
        server.close()
    if pointer.address == at:
        delete_file(index_folder / POINTER_FILE)


def _fits(pointer: Pointer, manifest: Manifest) -> bool:
    return pointer.address == manifest.engine_at and pointer.fingerprint == manifest.fingerprint


# ------------------------------------------------------------------------------------------------- as a part


class MirroredPart(Part[Searched]):
    """An engine of an index in a collection of Milvus: what `hce.index.derived.Live` is to an engine in memory.

    Attributes:
        mirror: tells the collection of changes.
    """

    def __init__(self, mirror: Mirror, make: Callable[[Collection, Reader], Searched]) -> None:
        self.mirror = mirror
        self._make: Callable[[Collection, Reader], Searched] = make
        self._made: tuple[Collection, int, Searched] | None = None

    @contextmanager
    def lend(self, reader: Reader) -> Iterator[Searched]:
        """Lend the engine, as of the moment that `reader` sees.

        Raises:
            MomentPassedError: the collection is at a later moment.
        """
        collection = self.mirror.at(reader)
        if collection is None:
            raise MomentPassedError(f"the collection is at a later change than {reader.moment().change}; look again")
        moment, made = reader.moment(), self._made
        if made is None or made[:2] != (collection, moment.change):
            made = self._made = (collection, moment.change, self._make(collection, reader))
        try:
            yield made[2]
        except GoneOnError as error:
            self.mirror.check_later(moment)
            raise MomentPassedError(f"the collection is at a later change than {moment.change}; look again") from error

    def prepare(self, reader: Reader) -> None:
        """Tell the collection now what the first search would have to wait for."""
        self.mirror.at(reader)

    def take_up(self, builder: Any, suffix: str, since: int) -> None:
        """Look for the collection anew: the index has another encoder from a change on."""
        self.mirror.forget()

    def rebuild(self, reader: Reader, builder: Any) -> None:
        """Fill a new collection, which has documents and passages."""
        self.mirror.rebuild(reader)

    def pending(self, reader: Reader) -> int:
        """Count the additions and removals that are in the store and not in the collection."""
        return self.mirror.pending(reader)


def document_engine(collection: Collection, reader: Reader) -> Engine:
    """Return the engine of all documents."""
    moment = reader.moment()
    engine = MilvusEngine(collection, DOCUMENTS, moment.documents, moment.last, reader.are_there)
    return cast(Engine, engine)  # which is only searched here


def passage_engine(collection: Collection, reader: Reader) -> PassageEngine:
    """Return the engine of the passages of long documents."""
    numbers, documents = reader.passage_numbers()
    last, are_there = int(numbers.max(initial=0)), partial(np.isin, test_elements=numbers)
    engine = MilvusEngine(collection, PASSAGES, len(numbers), last, are_there)
    return PassageEngine(cast(Engine, engine), numbers, documents)  # which is only searched here
