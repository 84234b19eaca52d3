"""Mirror: the documents of an index in a collection of Milvus, where readers on any machine search them.

`hce.index.derived.home_of` returns this module: `Mirror`, `is_address`, `open_replica`, `trust`, `claim_place` and
`withdraw` are what an index asks for.

The store stays the truth, and is the log of what the collection still lacks: an interrupted transfer goes on from
there. A small file, the pointer, names the collection and how far it got. Only the folder that began a collection
writes to it; a copy of the folder is refused. New documents are sent first. Then one entry of the collection's log says
what is there from now on and what is not, and then the removed ones are deleted. So a reader that follows the log sees
one moment after the other.

A document is a row with its vector, and further rows if its text is longer than a row. A passage is a row with its
vector and its place; a file of the encoder is rows of text. The first rows of the log say what the collection is made
of.

An index from a stranger may name any address. Only addresses that this user has named are contacted.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import platformdirs

from hce.contained import check_tree, delete_file, is_file, open_file
from hce.errors import AwayError, FormatError, InputError
from hce.files import checked_fields, file_sha256, read_json, sealed, unsealed, write_json
from hce.index.derived import Part
from hce.index.manifest import Manifest
from hce.index.store import STORE_FILE, Entry, Moment, MomentPassedError, Reader, Store, heed_forks
from hce.milvus.engine import (
    DOCUMENTS,
    FILES,
    LOG,
    PASSAGES,
    PIECE,
    PIECES,
    PLACE,
    Address,
    Collection,
    GoneOnError,
    Milvus,
    MilvusEngine,
    MilvusRow,
)
from hce.milvus.engine import is_address as is_address
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

FORMAT = 1  # of a collection
FACTS = 1  # the number of the row of the log that says what the collection is made of
ENTRY_BITS = 20  # a change of the store may have 2**20 parts in the log
REMOVED_AT_ONCE = 3000  # numbers in one part, which is no longer than a row may be
FILE_PIECE = 45_000  # bytes of a file in one row, a third longer as text

Searched = TypeVar("Searched", Engine, PassageEngine)


@dataclass(frozen=True)
class Pointer:
    """Which collection an index writes to, and how far it got."""

    address: str  # as the user gave it
    collection: str  # its own name, not the alias in the address
    fingerprint: str  # of the encoder whose vectors the collection has
    writer: str  # drawn at random; the collection names it too
    store: int  # the inode of the index's store: a copy has another
    change: int  # of the store, up to which the collection has it; while it is filled, at which that began
    token: str  # of that change
    last: int = 0  # the highest number of a document that was written
    is_whole: bool = False  # whether readers can see the collection
    is_busy: bool = False  # whether something was being written, and may be there in part

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
        """Read an index's own pointer; None for a copy, whose pointer is the original's."""
        pointer = cls.read(index_folder)
        return pointer if pointer is not None and pointer.store == _inode(index_folder) else None

    def write(self, index_folder: Path) -> Pointer:
        """Put the pointer into an index's folder, atomically."""
        write_json(index_folder / POINTER_FILE, sealed(asdict(self)))
        return self

    def fits(self, manifest: Manifest) -> bool:
        """Return whether the collection has the manifest's address and encoder."""
        return self.address == manifest.engine_at and self.fingerprint == manifest.fingerprint


def _inode(index_folder: Path) -> int:
    return (index_folder / STORE_FILE).stat().st_ino


# ------------------------------------------------------------------------------------------------- the mirror


class Mirror:
    """The collection of an index, brought up to date with the store before it is searched."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.index_folder = store.path.parent
        self._lock = Lock()
        self._server: Milvus | None = None
        self._known: tuple[Collection, int] | None = None  # and the change up to which it has all
        self.documents: _MirroredPart[Engine] = _MirroredPart(self, _document_engine)
        self.passages: _MirroredPart[PassageEngine] = _MirroredPart(self, _passage_engine)
        heed_forks(self)

    def after_fork(self) -> None:
        """Replace lock and connection of the parent process after a fork."""
        self._lock, self._server, self._known = Lock(), None, None

    def close(self) -> None:
        """Close the connection."""
        if self._server is not None:
            self._server.close()

    def at(self, reader: Reader) -> Collection | None:
        """Return the collection at the moment of `reader`; None if it has gone on."""
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
            self._known = self._push(reader, as_new=True)

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
                advice = f"'hce rebuild {self.index_folder}' fills another one"
                raise FormatError(f"{self.index_folder}: its collection lacks documents; {advice}")

    def _look(self, reader: Reader) -> tuple[Collection, int] | None:
        """Return the pointer's collection, if it is complete and of this encoder."""
        pointer, manifest = Pointer.read(self.index_folder), Manifest.read(self.index_folder, reader)
        if pointer is None or not pointer.is_whole or not pointer.fits(manifest):
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

    def _push(self, reader: Reader, *, as_new: bool = False) -> tuple[Collection, int]:
        """Bring the collection to the moment that `reader` sees, from its present one."""
        moment, manifest = reader.moment(), Manifest.read(self.index_folder, reader)
        server, pointer = self._server_at(manifest), Pointer.of(self.index_folder)
        if pointer is None:
            _refuse_copy(self.index_folder, manifest)
        known = self._known_moment(server, manifest, pointer, reader)
        if pointer is None or known is None or (as_new and pointer.is_whole):
            pointer, known = self._begin(server, manifest, pointer, moment), moment
        collection = Collection(server, pointer.collection, manifest.dim, server.now())
        if pointer.is_whole and not pointer.is_busy and known.change == moment.change:
            return collection, moment.change
        again = pointer.is_busy
        pointer = replace(pointer, is_busy=True).write(self.index_folder)
        if not pointer.is_whole and not pointer.last:  # before the first document; readers need these too
            files, rows = file_rows(self.index_folder / manifest.encoder_folder)
            collection.put(FILES, rows, again=again)
            collection.put(LOG, facts_rows(manifest, files, pointer.writer), again=again)
        pointer = self._put_documents(collection, reader, pointer, again)
        removed = reader.removed_since(known.change).tolist()
        if not pointer.is_whole or known.change != moment.change:
            collection.put(LOG, log_rows(moment, removed), again=again)
        if removed:
            for partition in (PIECES, PASSAGES):
                gone = collection.rows_of(partition, removed, PLACE)
                collection.delete(partition, [row.number for row in gone])
            collection.delete(DOCUMENTS, removed)
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
        if pointer is None or not pointer.fits(manifest):
            return None
        name = pointer.collection
        is_there = server.current() == name if pointer.is_whole else server.call("has_collection", name)
        return reader.moment_at(pointer.change, pointer.token) if is_there else None

    def _begin(self, server: Milvus, manifest: Manifest, before: Pointer | None, moment: Moment) -> Pointer:
        """Make an empty collection; readers see the one before until it is complete."""
        _check_owner(server, before)
        was_begun = before is not None and before.address == manifest.engine_at and not before.is_whole
        if before is not None and was_begun and server.call("has_collection", before.collection):
            server.call("drop_collection", before.collection)  # which was begun for another encoder
        pointer = Pointer(
            address=str(manifest.engine_at),
            collection=f"{server.address.name}_{secrets.token_hex(6)}",
            fingerprint=manifest.fingerprint,
            writer=before.writer if before else secrets.token_hex(8),
            store=_inode(self.index_folder),
            change=moment.change,
            token=moment.token,
        ).write(self.index_folder)
        server.create(pointer.collection, manifest.dim)
        return pointer

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


# ------------------------------------------------------------------------------------------------- rows


def pieces_of(text: str) -> list[str]:
    """Cut a text into pieces that fit into rows.

    >>> [len(piece) for piece in pieces_of("é" * 70_000)]
    [30000, 30000, 10000]
    """
    encoded, start = text.encode(), 0
    pieces: list[str] = []
    while start < len(encoded) or not pieces:
        stop = min(start + PIECE, len(encoded))
        while stop < len(encoded) and encoded[stop] & 0xC0 == 0x80:  # in the middle of a character
            stop -= 1
        pieces.append(encoded[start:stop].decode())
        start = stop
    return pieces


def log_rows(moment: Moment, removed: list[int]) -> Iterator[MilvusRow]:
    """Write an entry of the log as rows; the last one makes it count."""
    blocks = [removed[i : i + REMOVED_AT_ONCE] for i in range(0, len(removed), REMOVED_AT_ONCE)] or [[]]
    for part, some in enumerate(blocks, start=1):
        content = {"moment": moment._asdict() if part == len(blocks) else None, "removed": some}
        yield MilvusRow((moment.change + 1 << ENTRY_BITS) + part, moment.change, part, json.dumps(content))


def facts_rows(manifest: Manifest, files: dict[str, list[Any]], writer: str) -> Iterator[MilvusRow]:
    """Write what a collection is made of as rows; only `writer` may change it."""
    content = {"format": FORMAT, "writer": writer, "files": files, "manifest": asdict(manifest)}
    pieces = pieces_of(json.dumps(content))
    return (MilvusRow(FACTS + i, 0, len(pieces), piece) for i, piece in enumerate(pieces))


def read_content(collection: Collection) -> dict[str, Any]:
    """Read what `facts_rows` wrote; nothing if that is not there."""
    rows = list(collection.rows_between(LOG, FACTS, FACTS))
    if rows:
        rows += collection.rows_between(LOG, FACTS + 1, FACTS + rows[0].part - 1)
    try:
        content = json.loads("".join(row.content for row in rows))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def document_rows(entries: list[Entry]) -> tuple[list[MilvusRow], list[MilvusRow]]:
    """Write documents as rows with vectors, and long contents as further rows."""
    rows, further = [], []
    for number, document, vector in entries:
        pieces = pieces_of(document.to_json())
        rows.append(MilvusRow(number, number, len(pieces), pieces[0], vector))
        further += [MilvusRow(number << 16 | i, number, i, piece) for i, piece in enumerate(pieces[1:], start=1)]
    return rows, further


def passage_rows(reader: Reader, entries: list[Entry]) -> Iterator[MilvusRow]:
    """Write the passages of documents as rows with vectors and places."""
    if not reader.has_passages():
        return
    passages = reader.passages_of(entry.number for entry in entries)
    extents = reader.extents(passages.numbers.tolist())
    columns = passages.numbers.tolist(), passages.documents.tolist(), passages.vectors
    for number, document, vector in zip(*columns, strict=True):
        yield MilvusRow(number, document, 0, json.dumps(extents[number]), vector)


def file_rows(folder: Path) -> tuple[dict[str, list[Any]], Iterator[MilvusRow]]:
    """Return size, SHA-256, first and last row of each file, and the rows."""
    files: dict[str, list[Any]] = {}
    number = 1
    for name, found in check_tree(folder, folder.parent).items():
        pieces = -(-found.st_size // FILE_PIECE)
        files[name] = [found.st_size, file_sha256(folder / name), number, number + pieces - 1]
        number += pieces

    def rows() -> Iterator[MilvusRow]:
        for name, (_, _, first, _) in files.items():
            with open_file(folder / name, folder) as file:
                for number in count(first):
                    if not (piece := file.read(FILE_PIECE)):
                        break
                    yield MilvusRow(number, 0, 0, base64.b64encode(piece).decode())

    return files, rows()


# ------------------------------------------------------------------------------------------------- owners


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
    if pointer is None or read_content(Collection(server, current, 0)).get("writer") != pointer.writer:
        raise InputError(
            f"{server.address}: a collection of another index is there; choose another name behind #, "
            f"as in {server.address.uri}#papers"
        )


def claim_place(at: str, index_folder: Path, *, named_by_user: bool) -> None:
    """Fail if nobody answers at an address, or another index is there."""
    if named_by_user:
        trust(at)
    with closing(Milvus(require_trusted(at, index_folder))) as server:
        _check_owner(server, Pointer.of(index_folder))


def withdraw(at: str, index_folder: Path) -> None:
    """Drop the collection that an index had at an address before it moved elsewhere."""
    pointer = Pointer.of(index_folder)
    if pointer is not None:  # a copy leaves the original's alone
        try:
            with closing(Milvus(require_trusted(at, index_folder))) as server:
                _check_owner(server, pointer)
                server.withdraw()
        except (AwayError, InputError) as error:
            logger.warning("%s; it is left there", error)
    if pointer is None or pointer.address == at:
        delete_file(index_folder / POINTER_FILE)


def open_replica(address: str | Path, encoder: Encoder | None) -> ReplicaIndex:
    """Open an index that is read from a collection."""
    from hce.milvus.replica import ReplicaIndex

    return ReplicaIndex(address, encoder)


# ------------------------------------------------------------------------------------------------- trusted addresses


_named_now: set[str] = set()  # by this process; the file may not be writable


class UntrustedError(InputError):
    """The user has never named the address that an index names."""


def trusted_file() -> Path:
    """Return the file of trusted addresses: in $HCE_CONFIG, or the user's settings."""
    return Path(os.environ.get("HCE_CONFIG") or platformdirs.user_config_dir("hce")) / "trusted.json"


def trust(at: str) -> None:
    """Remember that this user has named an address of Milvus."""
    address = str(Address.parse(at))
    _named_now.add(address)
    known, path = _trusted(), trusted_file()
    if address not in known:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"addresses": sorted({*known, address})})
        except (OSError, InputError) as error:
            logger.warning("%s is trusted by this process only (%s); set HCE_CONFIG to a folder to keep it", at, error)


def require_trusted(at: str, index_folder: Path) -> Address:
    """Return the address that an index names, if this user has ever named it."""
    address = Address.parse(at)
    if str(address) not in _trusted() | _named_now:
        raise UntrustedError(
            f"{index_folder} keeps its vectors at {address}, which you have never named here; nothing was sent there. "
            f"If you trust that address: hce status {index_folder} --trust-address"
        )
    return address


def _trusted() -> set[str]:
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
        moment, made = reader.moment(), self._made
        later = MomentPassedError(f"the collection is at a later change than {moment.change}; look again")
        collection = self.mirror.at(reader)
        if collection is None:
            raise later
        if made is None or made[:2] != (collection, moment.change):
            made = self._made = (collection, moment.change, self._make(collection, reader))
        try:
            yield made[2]
        except GoneOnError as error:
            self.mirror.check_later(moment)
            raise later from error

    def prepare(self, reader: Reader) -> None:
        self.mirror.at(reader)

    def rebuild(self, reader: Reader, manifest: Manifest) -> None:
        self.mirror.rebuild(reader)

    def pending(self, reader: Reader) -> int:
        return self.mirror.pending(reader)


def _document_engine(collection: Collection, reader: Reader) -> Engine:
    moment = reader.moment()
    return MilvusEngine(collection, DOCUMENTS, moment.documents, moment.last, reader.are_there)


def _passage_engine(collection: Collection, reader: Reader) -> PassageEngine:
    numbers, documents = reader.passage_numbers()
    last, are_there = int(numbers.max(initial=0)), partial(np.isin, test_elements=numbers)
    engine = MilvusEngine(collection, PASSAGES, len(numbers), last, are_there)
    return PassageEngine(cast(VectorEngine, engine), numbers, documents)  # which is only searched here
