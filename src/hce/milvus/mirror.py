"""Mirror: copies an index to a Milvus collection, where readers on any machine search it.

For Milvus, `hce.index.derived.home_of` returns this module. Of the module, an index uses `Mirror`, `is_address`,
`open_replica`, `trust`, `claim_place` and `withdraw`.

The store in the folder is authoritative. A small file, the pointer, names the collection and the last change sent, so
an interrupted transfer continues from there. Only the folder that began a collection writes to it; a copy of the
folder is refused.

A transfer has three steps. New documents are sent first. Then one entry in the collection's log names the new moment
and the removed documents. Then the rows of the removed documents are deleted. So a reader that follows the log sees one
consistent moment after another.

A document is a row with its vector, and more rows if its text does not fit into one. A passage is a row with its vector
and its extent. A file of the encoder is rows of text. The log begins with the manifest, file list and writer's id.

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

from hce.errors import AwayError, FormatError, InputError
from hce.files import (
    check_tree,
    checked_fields,
    delete_file,
    file_sha256,
    is_file,
    open_file,
    read_json,
    sealed,
    unsealed,
    write_json,
)
from hce.index.derived import Part
from hce.index.manifest import Manifest
from hce.index.store import MomentPassedError, Store, heed_forks
from hce.index.tables import STORE_FILE, Entry, Moment, Reader
from hce.milvus.engine import PIECE, PLACE, Address, Collection, GoneOnError, Milvus, MilvusEngine, MilvusRow
from hce.milvus.engine import is_address as is_address
from hce.progress import progress_bar
from hce.search.engine import Engine, PassageEngine, VectorEngine

if TYPE_CHECKING:
    from hce.encoding.encoder import Encoder
    from hce.milvus.replica import ReplicaIndex

logger = logging.getLogger(__name__)

POINTER_FILE = "milvus.json"
DOCUMENTS_AT_ONCE = 2000
MANY = 10_000  # documents; fewer are sent without a progress bar

FORMAT = 1  # of a collection
FACTS = 1  # number of the log's first row with the manifest
ENTRY_BITS = 20  # an entry of the log has fewer than 2**20 parts
REMOVED_AT_ONCE = 3000  # removed documents' numbers in one part of an entry, so that the part fits into a row
FILE_PIECE = 45_000  # bytes of a file in one row; base64 makes them a third longer

Searched = TypeVar("Searched", Engine, PassageEngine)


@dataclass(frozen=True)
class Pointer:
    """The collection that an index writes to, and the progress of writing."""

    address: str  # as the user gave it
    collection: str  # the collection's own name, not the alias in the address
    fingerprint: str  # of the encoder that made the collection's vectors
    writer: str  # a random id of the index, also stored in the collection
    store: int  # the inode of the index's store; a copy has a different one
    change: int  # the store's last change that was sent; for an unfinished collection, the change when it was begun
    token: str  # of that change
    last: int = 0  # the highest document number written
    is_whole: bool = False  # whether the collection is complete, so that readers can see it
    is_busy: bool = False  # whether a write was begun and may have been interrupted

    @classmethod
    def read(cls, index_folder: Path) -> Pointer | None:
        """Read an index's pointer, if there is one; FormatError if it is damaged."""
        path = index_folder / POINTER_FILE
        if not is_file(path):
            return None
        values, is_as_written = unsealed(read_json(path))
        if not is_as_written:
            raise FormatError(f"{path}: changed since it was written; delete it, and rebuild with another name after #")
        return checked_fields(cls, values)

    @classmethod
    def of(cls, index_folder: Path) -> Pointer | None:
        """Read the pointer that this folder wrote; None if it has none, or only a copy."""
        pointer = cls.read(index_folder)
        return pointer if pointer is not None and pointer.store == _inode(index_folder) else None

    def write(self, index_folder: Path) -> Pointer:
        """Write the pointer to an index's folder, atomically."""
        write_json(index_folder / POINTER_FILE, sealed(asdict(self)))
        return self

    def fits(self, manifest: Manifest) -> bool:
        """Return whether the collection has the manifest's address and encoder."""
        return self.address == manifest.engine_at and self.fingerprint == manifest.fingerprint


def _inode(index_folder: Path) -> int:
    return (index_folder / STORE_FILE).stat().st_ino


# ------------------------------------------------------------------------------------------------- the mirror


class Mirror:
    """The collection of an index; it is updated from the store before each search."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.index_folder = store.path.parent
        self._lock = Lock()
        self._server: Milvus | None = None
        self._known: tuple[Collection, int] | None = None  # a collection, and the last change that it has
        self.documents: _MirroredPart[Engine] = _MirroredPart(self, _document_engine)
        self.passages: _MirroredPart[PassageEngine] = _MirroredPart(self, _passage_engine)
        heed_forks(self)

    def after_fork(self) -> None:
        """Drop the parent process's lock and connection after a fork."""
        self._lock, self._server, self._known = Lock(), None, None

    def close(self) -> None:
        """Close the connection."""
        if self._server is not None:
            self._server.close()

    def at(self, reader: Reader) -> Collection | None:
        """Return the collection at `reader`'s moment; None if it is already later."""
        moment = reader.moment()
        with self._lock:
            if self._known is None or self._known[1] < moment.change:
                self._known = self._at_pointer(reader)
            if self._known is None or self._known[1] < moment.change:
                self._known = self._catch_up()
            collection, change = self._known
            return None if change > moment.change else collection

    def follow(self) -> None:
        """Send all changes; if that fails, the next write or search sends them."""
        try:
            with self._lock:
                self._known = self._catch_up()
        except (AwayError, UntrustedError) as error:
            logger.warning(
                "%s; the write is safe in %s, and the next write or search sends it", error, self.index_folder
            )

    def rebuild(self, reader: Reader) -> None:
        """Fill a new or unfinished collection; readers see it when it is complete."""
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
        """Fail if the store is still at `moment`: then the collection lacks documents."""
        with self.store.reading() as reader:
            if reader.moment().change == moment.change:
                advice = f"'hce rebuild {self.index_folder}' fills a new one"
                raise FormatError(f"{self.index_folder}: its collection lacks documents; {advice}")

    def _at_pointer(self, reader: Reader) -> tuple[Collection, int] | None:
        """Return the pointer's collection and change, if it is complete and `fits`."""
        pointer, manifest = Pointer.read(self.index_folder), Manifest.read(self.index_folder, reader)
        if pointer is None or not pointer.is_whole or not pointer.fits(manifest):
            return None
        server = self._server_at(manifest)
        return Collection(server, pointer.collection, manifest.dim, server.now()), pointer.change

    def _catch_up(self) -> tuple[Collection, int]:
        with self.store.writing() as writer:  # only as a lock: no other process may write meanwhile
            return self._push(writer)

    def _server_at(self, manifest: Manifest) -> Milvus:
        address = require_trusted(manifest.engine_at or "", self.index_folder)
        if self._server is None or self._server.address != address:
            self._server = Milvus(address)
        return self._server

    def _push(self, reader: Reader, *, as_new: bool = False) -> tuple[Collection, int]:
        """Update the collection to the moment that `reader` sees."""
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
        if not pointer.is_whole and not pointer.last:  # a new collection needs the encoder and the manifest first
            files, rows = file_rows(self.index_folder / manifest.encoder_folder)
            collection.files.put(rows, again=again)
            collection.log.put(facts_rows(manifest, files, pointer.writer), again=again)
        pointer = self._put_documents(collection, reader, pointer, again)
        removed = reader.removed_since(known.change).tolist()
        if not pointer.is_whole or known.change != moment.change:
            collection.log.put(log_rows(moment, removed), again=again)
        if removed:
            for partition in (collection.pieces, collection.passages):
                partition.delete(row.number for row in partition.rows_of(removed, PLACE))
            collection.documents.delete(removed)
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
        """Return the last moment sent; None if the collection cannot be continued."""
        if pointer is None or not pointer.fits(manifest):
            return None
        name = pointer.collection
        is_there = server.current() == name if pointer.is_whole else server.call("has_collection", name)
        return reader.moment_at(pointer.change, pointer.token) if is_there else None

    def _begin(self, server: Milvus, manifest: Manifest, before: Pointer | None, moment: Moment) -> Pointer:
        """Make an empty collection; until it is complete, readers see the old one."""
        _check_owner(server, before)
        was_begun = before is not None and before.address == manifest.engine_at and not before.is_whole
        if before is not None and was_begun and server.call("has_collection", before.collection):
            server.call("drop_collection", before.collection)  # it is unfinished and cannot be continued
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
        """Send documents above `pointer.last`; write the pointer after each batch."""
        entries = reader.entries(pointer.last)
        left = reader.count_after(pointer.last)
        with progress_bar("sending to Milvus", left, "documents", show=left >= MANY) as advance:
            while some := list(islice(entries, DOCUMENTS_AT_ONCE)):
                rows, further = document_rows(some)
                collection.pieces.put(further, again=again)
                collection.passages.put(passage_rows(reader, some), again=again)
                collection.documents.put(rows, again=again)
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
        while stop < len(encoded) and encoded[stop] & 0xC0 == 0x80:  # `stop` is in the middle of a character
            stop -= 1
        pieces.append(encoded[start:stop].decode())
        start = stop
    return pieces


def log_rows(moment: Moment, removed: list[int]) -> Iterator[MilvusRow]:
    """Yield an entry of the log as rows; the entry is valid only with its last row."""
    blocks = [removed[i : i + REMOVED_AT_ONCE] for i in range(0, len(removed), REMOVED_AT_ONCE)] or [[]]
    for part, some in enumerate(blocks, start=1):
        content = {"moment": moment._asdict() if part == len(blocks) else None, "removed": some}
        yield MilvusRow((moment.change + 1 << ENTRY_BITS) + part, moment.change, part, json.dumps(content))


def facts_rows(manifest: Manifest, files: dict[str, list[Any]], writer: str) -> Iterator[MilvusRow]:
    """Yield the manifest, the encoder's files and the writer's id as rows of the log."""
    content = {"format": FORMAT, "writer": writer, "files": files, "manifest": asdict(manifest)}
    pieces = pieces_of(json.dumps(content))
    return (MilvusRow(FACTS + i, 0, len(pieces), piece) for i, piece in enumerate(pieces))


def read_content(collection: Collection) -> dict[str, Any]:
    """Read the rows of `facts_rows`; {} if they are missing or damaged."""
    rows = list(collection.log.rows_between(FACTS, FACTS))
    if rows:
        rows += collection.log.rows_between(FACTS + 1, FACTS + rows[0].part - 1)
    try:
        content = json.loads("".join(row.content for row in rows))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def document_rows(entries: list[Entry]) -> tuple[list[MilvusRow], list[MilvusRow]]:
    """Return documents as rows with vectors, and rows for the rest of long texts."""
    rows, further = [], []
    for number, document, vector in entries:
        pieces = pieces_of(document.to_json())
        rows.append(MilvusRow(number, number, len(pieces), pieces[0], vector))
        further += [MilvusRow(number << 16 | i, number, i, piece) for i, piece in enumerate(pieces[1:], start=1)]
    return rows, further


def passage_rows(reader: Reader, entries: list[Entry]) -> Iterator[MilvusRow]:
    """Yield the passages of documents as rows with vectors and extents."""
    if not reader.has_passages():
        return
    passages = reader.passages_of(entry.number for entry in entries)
    extents = reader.extents(passages.numbers.tolist())
    columns = passages.numbers.tolist(), passages.documents.tolist(), passages.vectors
    for number, document, vector in zip(*columns, strict=True):
        yield MilvusRow(number, document, 0, json.dumps(extents[number]), vector)


def file_rows(folder: Path) -> tuple[dict[str, list[Any]], Iterator[MilvusRow]]:
    """Return each file's [size, SHA-256, first row, last row] by name, and all rows."""
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
    """Fail if a copied folder would write to the original's collection."""
    pointer = Pointer.read(index_folder)
    if pointer is not None and pointer.address == manifest.engine_at:
        raise InputError(
            f"{index_folder} is a copy of the index that writes to {pointer.address}; 'hce rebuild {index_folder} "
            "--engine milvus --at' with another name after # gives it its own collection"
        )


def _check_owner(server: Milvus, pointer: Pointer | None) -> None:
    current = server.current()
    if current is None:
        return
    if pointer is None or read_content(Collection(server, current, 0)).get("writer") != pointer.writer:
        raise InputError(
            f"{server.address}: another index has its collection there; choose another name after #, "
            f"as in {server.address.uri}#papers"
        )


def claim_place(at: str, index_folder: Path, *, named_by_user: bool) -> None:
    """Fail if Milvus does not answer at an address, or another index uses it."""
    if named_by_user:
        trust(at)
    with closing(Milvus(require_trusted(at, index_folder))) as server:
        _check_owner(server, Pointer.of(index_folder))


def withdraw(at: str, index_folder: Path) -> None:
    """Drop an index's collection at an address that the index no longer uses."""
    pointer = Pointer.of(index_folder)
    if pointer is not None:  # None for a copy: the collection is the original's
        try:
            with closing(Milvus(require_trusted(at, index_folder))) as server:
                _check_owner(server, pointer)
                server.withdraw()
        except (AwayError, InputError) as error:
            logger.warning("%s; the old collection was not dropped", error)
    if pointer is None or pointer.address == at:
        delete_file(index_folder / POINTER_FILE)


def open_replica(address: str | Path, encoder: Encoder | None) -> ReplicaIndex:
    """Open a collection as an index that only reads."""
    from hce.milvus.replica import ReplicaIndex

    return ReplicaIndex(address, encoder)


# ------------------------------------------------------------------------------------------------- trusted addresses


_named_now: set[str] = set()  # addresses named in this process, in case the file is not writable


class UntrustedError(InputError):
    """The index names an address that the user has never named."""


def trusted_file() -> Path:
    """Return the file of trusted addresses: in $HCE_CONFIG, or the settings folder."""
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
            logger.warning("%s is trusted in this run only (%s); set HCE_CONFIG to a writable folder", at, error)


def require_trusted(at: str, index_folder: Path) -> Address:
    """Parse the address in an index; fail if this user has never named it."""
    address = Address.parse(at)
    if str(address) not in _trusted() | _named_now:
        raise UntrustedError(
            f"{index_folder} keeps its vectors at {address}, which you have never named; nothing was sent there. "
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
    """An engine over a collection; it needs no snapshot, because Milvus keeps the vectors."""

    def __init__(self, mirror: Mirror, make: Callable[[Collection, Reader], Searched]) -> None:
        self.mirror = mirror
        self._make: Callable[[Collection, Reader], Searched] = make
        self._made: tuple[Collection, int, Searched] | None = None

    @contextmanager
    def lend(self, reader: Reader) -> Iterator[Searched]:
        moment, made = reader.moment(), self._made
        later = MomentPassedError(f"the collection is at a later change than {moment.change}; read again")
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

    def facts(self, reader: Reader) -> dict[str, Any]:
        return {}


def _document_engine(collection: Collection, reader: Reader) -> Engine:
    moment = reader.moment()
    return MilvusEngine(collection.documents, moment.documents, moment.last, reader.are_there)


def _passage_engine(collection: Collection, reader: Reader) -> PassageEngine:
    numbers, documents = reader.passage_numbers()
    last, are_there = int(numbers.max(initial=0)), partial(np.isin, test_elements=numbers)
    engine = MilvusEngine(collection.passages, len(numbers), last, are_there)
    return PassageEngine(cast(VectorEngine, engine), numbers, documents)  # safe: the engine is only searched
