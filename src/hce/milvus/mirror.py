"""Mirror: the documents of an index in a collection of Milvus, where readers on any machine search them.

`hce.index.derived.home_of` returns this module: `Mirror`, `is_address`, `open_replica`, `trust`, `claim_place` and
`withdraw` are what an index asks for.

The store stays the truth, and is the log of what the collection still lacks: an interrupted transfer goes on from
there. A small file, the pointer, names the collection and how far it got. Only the folder that began a collection
writes to it; a copy of the folder is refused. New documents are sent first, then one entry of the collection's log
says what is there from now on and what is not, and then the removed ones are deleted. So a reader that follows the log
sees one moment after the other.

An index from a stranger may name any address. Only addresses that this user has named are contacted.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import platformdirs

from hce.contained import delete_file, is_file
from hce.errors import AwayError, FormatError, InputError
from hce.files import checked_fields, read_json, sealed, unsealed, write_json
from hce.index.derived import Part
from hce.index.manifest import Manifest
from hce.index.store import STORE_FILE, Moment, MomentPassedError, Reader, Store, heed_forks
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
from hce.milvus.engine import is_address as is_address
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
from hce.progress import progress_bar
from hce.search.engine import Engine, VectorEngine
from hce.search.passages import PassageEngine

if TYPE_CHECKING:
    from hce.encoding.encoder import Encoder
    from hce.milvus.replica import ReplicaIndex

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
        collection: its own name, not the alias in the address.
        fingerprint: of the encoder whose vectors the collection has.
        writer: drawn at random; the collection names it too.
        store: the inode of the index's store: a copy has another.
        change: of the store, up to which the collection has it; while it is filled, at which that began.
        token: of that change.
        last: the highest number of a document that was written.
        is_whole: whether readers can see the collection.
        is_busy: whether something was being written, and may be there in part.
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
        """Read an index's pointer, if there is one; FormatError if it is damaged."""
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
    """The collection of an index, brought up to date with the store before it is searched.

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
        self._known: tuple[Collection, int] | None = None  # and the change up to which it has all
        self.documents: _MirroredPart[Engine] = _MirroredPart(self, document_engine)
        self.passages: _MirroredPart[PassageEngine] = _MirroredPart(self, passage_engine)
        heed_forks(self)

    def after_fork(self) -> None:
        """Replace lock and connection of the parent process after a fork."""
        self._lock, self._server, self._known = Lock(), None, None

    def close(self) -> None:
        """Close the connection."""
        if self._server is not None:
            self._server.close()

    def at(self, reader: Reader) -> Collection | None:
        """Return the collection, up to date with the moment that `reader` sees; None if it has gone on.

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
        """Send all that was written; what fails now is sent before the next search."""
        try:
            with self._lock:
                self._known = self._catch_up()
        except (AwayError, UntrustedError) as error:
            logger.warning("%s; all is kept in %s, and the next write or search sends it", error, self.index_folder)

    def rebuild(self, reader: Reader) -> None:
        """Fill a new collection, or go on with one; readers see it when complete."""
        with self._lock:
            self._known = None
            self._known = self._push(reader, anew=True)

    def pending(self, reader: Reader) -> int:
        """Count the additions and removals that the collection lacks."""
        moment, pointer = reader.moment(), Pointer.read(self.index_folder)
        known = pointer and pointer.is_whole and reader.moment_at(pointer.change, pointer.token)
        if not known:
            return moment.documents
        return moment.last - known.last + len(reader.removed_since(known.change))

    def check_later(self, moment: Moment) -> None:
        """Fail if a collection lacks documents and there is no later moment."""
        with self.store.reading() as reader:
            if reader.moment().change == moment.change:
                raise FormatError(
                    f"{self.index_folder}: its collection lacks documents; 'hce rebuild {self.index_folder}' fills "
                    "another one"
                )

    # --------------------------------------------------------------------------------------------- sending

    def _look(self, reader: Reader) -> tuple[Collection, int] | None:
        """Return the pointer's collection, if it is complete and of this encoder."""
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
        """Bring the collection to the moment that `reader` sees, from its present one."""
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
        """Return the moment up to which the collection has all; None to begin another."""
        if pointer is None or not _fits(pointer, manifest):
            return None
        is_there = server.current() == pointer.collection if pointer.is_whole else server.exists(pointer.collection)
        return reader.moment_at(pointer.change, pointer.token) if is_there else None

    def _begin(self, server: Milvus, manifest: Manifest, before: Pointer | None, moment: Moment) -> Pointer:
        """Make an empty collection; readers see the one before until it is complete."""
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
        """Write the manifest and the encoder's files, which a reader needs too."""
        if pointer.last:
            return  # it was done before the first document
        files, rows = file_rows(self.index_folder / manifest.encoder_folder)
        collection.put(FILES, rows, again=again)
        collection.put(LOG, facts_rows(Facts(manifest, files), pointer.writer), again=again)

    def _put_documents(self, collection: Collection, reader: Reader, pointer: Pointer, again: bool) -> Pointer:
        """Write the documents above the pointer's last, and move the pointer along."""
        entries = reader.entries(pointer.last)
        left = reader.count_after(pointer.last)
        with progress_bar("sending to Milvus", left, "documents", show=left >= MANY) as advance:
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


def _inode(index_folder: Path) -> int:
    return (index_folder / STORE_FILE).stat().st_ino


def _refuse_copy(index_folder: Path, manifest: Manifest) -> None:
    """Refuse to write from a copied folder to the collection of the original."""
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


def open_replica(address: str | Path, encoder: Encoder | None) -> ReplicaIndex:
    """Open an index that is read from a collection."""
    from hce.milvus.replica import ReplicaIndex

    return ReplicaIndex(address, encoder)


def claim_place(at: str, index_folder: Path, *, named_by_user: bool) -> None:
    """Make sure that an index can have a collection at an address.

    Raises:
        InputError: it is no address, the user has never named it, or the collection there is of another index.
        AwayError: Milvus does not answer.
    """
    if named_by_user:
        trust(at)
    server = Milvus(require_trusted(at, index_folder))
    try:
        _check_owner(server, Pointer.of(index_folder))
    finally:
        server.close()


# ------------------------------------------------------------------------------------------------- trusted addresses


TRUSTED_FILE = "trusted.json"
_named_now: set[str] = set()  # by this process; the file may not be writable


class UntrustedError(InputError):
    """The user has never named the address that an index names."""


def trusted_file() -> Path:
    """Return where the addresses are kept: in $HCE_CONFIG, or the user's settings."""
    return Path(os.environ.get("HCE_CONFIG") or platformdirs.user_config_dir("hce")) / TRUSTED_FILE


def trust(at: str) -> None:
    """Remember that this user has named an address of Milvus.

    Raises `InputError` if the text is no address.
    """
    address = str(Address.parse(at))
    _named_now.add(address)
    known = _known()
    if address in known:
        return
    path = trusted_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"addresses": sorted({*known, address})})
    except (OSError, InputError) as error:
        logger.warning("%s is trusted by this process only (%s); set HCE_CONFIG to a folder to keep it", at, error)


def require_trusted(at: str, index_folder: Path) -> Address:
    """Return the address that an index names, if this user has named it.

    Raises:
        UntrustedError: the user has not.
        InputError: the text is no address.
    """
    address = Address.parse(at)
    if str(address) not in _known() | _named_now:
        raise UntrustedError(
            f"{index_folder} keeps its vectors at {address}, which you have never named here; nothing was sent there. "
            f"If you trust that address: hce status {index_folder} --trust-address"
        )
    return address


def _known() -> set[str]:
    path = trusted_file()
    try:
        return {str(each) for each in read_json(path)["addresses"]} if path.exists() else set()
    except (FormatError, KeyError, TypeError) as error:
        raise FormatError(f"{path}: damaged ({error}); delete it") from error


# ------------------------------------------------------------------------------------------------- as a part


class _MirroredPart(Part[Searched]):
    """An engine of an index in a collection of Milvus, which is its own snapshot."""

    def __init__(self, mirror: Mirror, make: Callable[[Collection, Reader], Searched]) -> None:
        self.mirror = mirror
        self._make: Callable[[Collection, Reader], Searched] = make
        self._made: tuple[Collection, int, Searched] | None = None

    @contextmanager
    def lend(self, reader: Reader) -> Iterator[Searched]:
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
        self.mirror.at(reader)

    def rebuild(self, reader: Reader, manifest: Manifest) -> None:
        self.mirror.rebuild(reader)

    def pending(self, reader: Reader) -> int:
        return self.mirror.pending(reader)


def document_engine(collection: Collection, reader: Reader) -> Engine:
    """Return the engine of all documents."""
    moment = reader.moment()
    return MilvusEngine(collection, DOCUMENTS, moment.documents, moment.last, reader.are_there)


def passage_engine(collection: Collection, reader: Reader) -> PassageEngine:
    """Return the engine of the passages of long documents."""
    numbers, documents = reader.passage_numbers()
    last, are_there = int(numbers.max(initial=0)), partial(np.isin, test_elements=numbers)
    engine = MilvusEngine(collection, PASSAGES, len(numbers), last, are_there)
    return PassageEngine(cast(VectorEngine, engine), numbers, documents)  # which is only searched here
