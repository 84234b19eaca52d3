"""Corpus: a collection of documents, checked once when read, with random access.

A document costs 16 bytes of memory, or 24 if the corpus is a folder of parts (JSONL or Parquet files). Texts stay in
JSONL files and are fetched by position; other formats are copied to temporary JSONL files. Several processes share out
the parts, and exchange the documents' positions.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple, overload

import numpy as np

from hce.data.records import (
    JSONL_SUFFIXES,
    KNOWN,
    STDIN,
    USUAL,
    Bad,
    Fields,
    Reading,
    Record,
    choose_fields,
    decode_line,
    format_suffix,
    open_bytes,
    parse_document,
    parse_json_line,
    raw_lines,
    read_lines,
    read_records,
    refuse,
    shown_path,
    unreadable,
)
from hce.data.text import Document, hash64
from hce.data.text_files import read_text_folder, text_suffix
from hce.errors import InputError, wrong_type
from hce.files import ScratchFolder, open_atomically
from hce.progress import counted, progress_bar

logger = logging.getLogger(__name__)

DEEPEST = 100  # levels of nesting in metadata
BEIR_CORPUS = ("corpus.jsonl", "corpus.jsonl.gz")
PART_FORMATS = (*JSONL_SUFFIXES, ".parquet")
OPEN_PARTS = 64  # files of a corpus open at once

ShareOut = Callable[[Callable[[Sequence[Path]], list[tuple[Any, ...]]], Sequence[Path]], list[tuple[Any, ...]]]


class Corpus(Sequence[Document]):
    """An ordered collection of documents, with unique ids and a fingerprint.

    Attributes:
        name: its source, for messages.
        fingerprint: sha256 over ids, titles, texts and metadata in order; the same in every file format. A folder
            of parts hashes the digests of its parts, so splitting a file changes the fingerprint.
        left_out: ids of documents that were left out, since they have neither text nor title.
        source: the path given to `load`; None if the documents came from memory.
        reading: the options that `load` used.
    """

    source: str | None = None
    reading: Reading = USUAL

    def __init__(
        self, documents: Sequence[Document], fingerprint: str, name: str, left_out: Iterable[str] = ()
    ) -> None:
        self._documents = documents
        self.fingerprint = fingerprint
        self.name = name
        self.left_out = frozenset(left_out)

    @classmethod
    def load(
        cls,
        path: str | Path,
        reading: Reading = USUAL,
        *,
        share_out: ShareOut = lambda work, parts: work(parts),
        copies: Path | None = None,
    ) -> Corpus:
        """Read and check a collection of documents.

        The source is a BEIR folder, a JSONL, JSON, CSV, TSV or Parquet file, a folder of texts, or "-". A folder of
        JSONL files, or of Parquet files, is one collection, in the order of file names.

        Args:
            path: where the documents are.
            reading: which fields to read (by default, those with common names), and other options.
            share_out: divides the files of a folder among processes, and returns what all of them found.
            copies: a folder that all these processes can open, for copies of parts without random access (such as
                Parquet and .gz files); by default a temporary folder.

        Raises:
            InputError: at the first fault, with file and line, unless `reading` skips bad records.
        """
        source, skipped = _documents_source(path), list[str]()

        def skip(error: InputError) -> None:
            skipped.append("" if skipped else str(error))  # only the first message is shown, and there may be millions

        bad = skip if reading.skip_bad else refuse
        if source.is_file() and _lies_open(source, reading) and not reading.row_ids:
            file, scan = _scan(source, reading, bad)
            corpus = cls._checked(file, scan)
        elif paths := _find_parts(source):
            corpus = cls._join_parts(source, paths, reading, bad, share_out, copies)
        else:
            records = (read_text_folder if source.is_dir() else read_records)(source, reading, bad)
            corpus = cls._spooled(records, shown_path(path), reading, bad)
        if skipped:
            logger.warning("%s: left out %d unreadable items; the first: %s", corpus.name, len(skipped), skipped[0])
        corpus.source, corpus.reading = str(path), reading
        return corpus

    @classmethod
    def from_documents(cls, documents: Iterable[Document], name: str = "documents") -> Corpus:
        """Make a corpus of documents in memory, with the same checks as for a file.

        >>> corpus = Corpus.from_documents([Document("a", "red shoes"), Document("b", "blue hats", title="Hats")])
        >>> len(corpus), corpus.ids, list(corpus.texts())
        (2, ['a', 'b'], ['red shoes', 'Hats blue hats'])

        Raises:
            InputError: at the first fault, with the document's number.
        """
        if not isinstance(documents, Iterable):
            raise wrong_type(documents, f"{name}: give a corpus or a list of documents")
        if isinstance(documents, str | Path):
            raise InputError(f"{name}: {str(documents)[:60]!r} is a string; hce.Corpus.load(…) reads a file")
        scan, kept, places = _Scan(name), [], []
        for number, document in enumerate(documents, start=1):
            where = f"{name}, number {number}"
            if not isinstance(document, Document):
                raise InputError(
                    f"{where}: a {type(document).__name__}; make it a document: hce.Document('my-id', 'its text')"
                )
            fields = {"_id": document.id, "title": document.title, "text": document.text}
            checked = replace(parse_document(Record(where, fields)), metadata=document.metadata)
            if scan.add(checked, where):
                kept.append(checked)
                places.append(where)
        return cls(kept, scan.finish(kept, places.__getitem__), name, scan.empty)

    @classmethod
    def from_records(
        cls, records: Iterable[Mapping[str, Any]], name: str = "records", reading: Reading = USUAL
    ) -> Corpus:
        """Make a corpus from mappings, such as the rows of a Hugging Face dataset.

        >>> Corpus.from_records([{"id": 7, "text": "red shoes", "year": 2024}])[0]
        Document(id='7', text='red shoes', title='', metadata={'year': 2024})

        Raises:
            InputError: at the first fault, with the record's number.
        """
        if not isinstance(records, Iterable):
            raise wrong_type(records, f"{name}: give a list of mappings")
        rows = (_record(f"{name}, number {number}", fields) for number, fields in enumerate(records, start=1))
        return cls._spooled(rows, name, reading, refuse)

    @classmethod
    def _checked(cls, documents: _JsonlFile | _Parts, scan: _Scan) -> Corpus:
        return cls(documents, scan.finish(documents, documents.place), scan.name, scan.empty)

    @classmethod
    def _spooled(cls, records: Iterable[Record], name: str, reading: Reading, bad: Bad) -> Corpus:
        """Copy documents to a temporary file, for formats without random access."""
        with _copying(None):
            file = tempfile.TemporaryFile(prefix="hce-corpus-")  # noqa: SIM115
        return cls._checked(*_spool(records, name, reading, bad, file))

    @classmethod
    def _join_parts(
        cls, folder: Path, paths: list[Path], reading: Reading, bad: Bad, share_out: ShareOut, copies: Path | None
    ) -> Corpus:
        """Divide the parts of a folder among processes, and join what they found."""
        if reading.row_ids:
            raise InputError(f"{folder}: row numbers start again in each part; name the field of the ids")
        scratch = None
        if copies is None and not all(_lies_open(path, reading) for path in paths):
            scratch = ScratchFolder("hce-parts-")
            copies = scratch.path

        def read(own: Sequence[Path]) -> list[tuple[Any, ...]]:
            return [cls._read_part(path, copies, reading, bad) for path in own]

        documents = _Parts([_Part(*each) for each in share_out(read, paths)], scratch)
        scan = _Scan(str(folder))
        for part in documents.parts:
            for doc_id, where in part.empty:
                scan.leave_out(doc_id, where)
            if len(part.id_hashes):
                scan.digest.update(bytes.fromhex(part.digest))
                scan.id_hashes.frombytes(part.id_hashes.tobytes())
        return cls._checked(documents, scan)

    @classmethod
    def _read_part(cls, path: Path, copies: Path | None, reading: Reading, bad: Bad) -> _Part:
        """Check a part, and copy it if it has no random access."""
        if copies is None or _lies_open(path, reading):
            documents, scan = _scan(path, reading, bad)
        else:
            copies.mkdir(parents=True, exist_ok=True)
            copy = copies / f"{path.name}.jsonl"
            with open_atomically(copy, "wb") as file:
                documents, scan = _spool(read_records(path, reading, bad), str(path), reading, bad, file)
            documents = _JsonlFile(copy, scan, open_bytes(copy), documents.fields)
        starts, sizes, hashes = map(np.asarray, (scan.starts, scan.sizes, scan.id_hashes))
        found = documents.fields, documents.state, scan.digest.hexdigest(), list(scan.empty.items())
        return _Part(str(path), str(documents.path), starts, sizes, hashes, *found)

    def __len__(self) -> int:
        return len(self._documents)

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | Sequence[Document]:
        if isinstance(index, slice):
            return [self._documents[i] for i in range(*index.indices(len(self)))]
        return self._documents[index]

    def __iter__(self) -> Iterator[Document]:
        return iter(self._documents)

    def __repr__(self) -> str:
        return f"Corpus({self.name!r}, {len(self):,} documents, {self.fingerprint[:12]})"

    @property
    def ids(self) -> list[str]:
        """All ids in order."""
        return [document.id for document in self]

    def texts(self) -> Iterator[str]:
        """Stream the title and text of each document, as an encoder reads them."""
        return (document.full_text for document in self)

    @cached_property
    def text_groups(self) -> np.ndarray:
        """An int64 array of shape (N,), a number for each document; equal texts share one."""
        hashes = np.fromiter(map(hash64, self.texts()), np.uint64, len(self))
        return np.unique(hashes, return_inverse=True)[1].astype(np.int64)

    def only(self, positions: np.ndarray) -> Corpus:
        """Return the documents at these ascending positions as a corpus.

        >>> Corpus.from_documents([Document("a", "red shoes"), Document("b", "blue hats")]).only(np.array([1])).ids
        ['b']
        """
        digest = hashlib.sha256(self.fingerprint.encode() + np.ascontiguousarray(positions, dtype="<i8").tobytes())
        name = f"{self.name}, {len(positions):,} of {len(self):,} documents"
        some = Corpus(_Some(self._documents, positions), digest.hexdigest(), name, self.left_out)
        some.source, some.reading = self.source, self.reading
        return some


class _Some(Sequence[Document]):
    """A subset of a sequence of documents, by position."""

    def __init__(self, documents: Sequence[Document], positions: np.ndarray) -> None:
        self._documents, self._positions = documents, positions

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, index: int) -> Document:  # type: ignore[override]
        return self._documents[int(self._positions[index])]


def _documents_source(path: str | Path) -> Path:
    """Return a BEIR folder's corpus file; any other path unchanged."""
    path = Path(path)
    if str(path) == STDIN:
        return path
    try:
        if not path.exists():
            raise InputError(f"{path}: no such file or folder; give {KNOWN}")
        return next((path / name for name in BEIR_CORPUS if (path / name).is_file()), path)
    except OSError as error:
        raise unreadable(path, error) from error


def _lies_open(path: Path, reading: Reading) -> bool:
    """Return whether a file has random access: plain JSONL in UTF-8."""
    return path.suffix.lower() in JSONL_SUFFIXES and reading.is_utf8


def _find_parts(folder: Path) -> list[Path]:
    """List a folder's JSONL or Parquet files; none if it has text files too."""
    if not folder.is_dir() or (folder / "qrels").is_dir():
        return []
    files = [path for path in sorted(folder.iterdir()) if not path.name.startswith((".", "_")) and path.is_file()]
    parts = [path for path in files if format_suffix(path) in PART_FORMATS]
    if any(text_suffix(path) and not path.name.upper().startswith(("README", "LICENSE")) for path in files):
        return []
    formats = sorted({format_suffix(path) for path in parts})
    if len(formats) > 1:
        raise InputError(f"{folder}: holds {' and '.join(formats)} files; give parts of one format")
    return parts


def _record(where: str, fields: Mapping[str, Any]) -> Record:
    if not isinstance(fields, Mapping):
        raise wrong_type(fields, f"{where}: give a mapping such as {{'id': 'a', 'text': 'red shoes'}}")
    return Record(where, dict(fields))


class _Scan:
    """Facts gathered while reading: positions, id hashes, digest, empty documents.

    The vector of a document with neither text nor title is noise. Real collections have such documents (Cranfield has
    two), so they are left out, with a warning that names their places.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.starts, self.sizes = array("Q"), array("Q")  # where each document's line begins, and its length, in bytes
        self.id_hashes = array("Q")  # 8 bytes a document; the ids themselves would take ten times as many
        self.digest = hashlib.sha256()
        self.empty: dict[str, str] = {}

    def add(self, document: Document, where: str) -> bool:
        """Note a document; return whether to keep it."""
        if document.is_empty:
            self.leave_out(document.id, where)
            return False
        metadata = _canonical_json(document.metadata, where) if document.metadata else "{}"
        parts = [part.encode() for part in (document.id, document.title, document.text, metadata)]
        # Lengths keep the title "a b" with the text "c" apart from the title "a" with the text "b c".
        self.digest.update(b"".join([data for part in parts for data in (len(part).to_bytes(8, "little"), part)]))
        self.id_hashes.append(hash64(document.id))
        return True

    def leave_out(self, doc_id: str, where: str) -> None:
        """Note a document without text."""
        if doc_id in self.empty:
            raise _duplicate(doc_id, self.empty[doc_id], where)
        self.empty[doc_id] = where

    def finish(self, documents: Sequence[Document], place: Callable[[int], str]) -> str:
        """Return the fingerprint; fail on duplicate ids and report their `place`."""
        if self.empty:
            few = "; ".join([*islice(self.empty.values(), 3), *(["…"] if len(self.empty) > 3 else [])])
            logger.warning("left out %d documents with neither text nor title: %s", len(self.empty), few)
        if not self.id_hashes:
            raise InputError(f"{self.name}: no documents with text in it; give {KNOWN}")
        hashes = np.asarray(self.id_hashes)
        left_out = np.array([hash64(doc_id) for doc_id in self.empty], dtype=hashes.dtype)
        values, counts = np.unique(np.concatenate([hashes, left_out]), return_counts=True)
        first_at: dict[str, int] = {}
        # Read documents with equal hashes again: different ids may share a hash.
        for index in np.flatnonzero(np.isin(hashes, values[counts > 1])).tolist() if (counts > 1).any() else ():
            doc_id = documents[index].id
            if doc_id in self.empty:
                raise _duplicate(doc_id, self.empty[doc_id], place(index))
            if doc_id in first_at:
                raise _duplicate(doc_id, place(first_at[doc_id]), place(index))
            first_at[doc_id] = index
        self.id_hashes = array("Q")  # no longer needed
        return self.digest.hexdigest()


def _duplicate(doc_id: str, first: str, second: str) -> InputError:
    return InputError(f"{second}: id {doc_id!r} is already used at {first}; make ids unique")


def _canonical_json(metadata: dict[str, Any], where: str) -> str:
    if _is_deeper(metadata, DEEPEST):
        raise InputError(f"{where}: the metadata is nested more than {DEEPEST} deep; simplify it")
    try:
        return json.dumps(metadata, sort_keys=True, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{where}: the metadata cannot be written as JSON ({error}); simplify it") from error


def _is_deeper(value: Any, most: int) -> bool:
    """Return whether lists and mappings are nested deeper than `most` levels."""
    if not isinstance(value, dict | list | tuple):
        return False
    below = value.values() if isinstance(value, dict) else value
    return most == 0 or any(_is_deeper(each, most - 1) for each in below)


def _scan(path: Path, reading: Reading, bad: Bad) -> tuple[_JsonlFile, _Scan]:
    """Check the user's own file, and note the position of each document's line."""
    scan, position, size = _Scan(str(path)), 0, path.stat().st_size >> 20
    documents = _JsonlFile(path, scan, open_bytes(path))  # opened before the first line is read, to notice any change
    with progress_bar("reading", size, "MiB", show=None if size else False) as advance:
        for where, raw in raw_lines(path):
            try:
                line = decode_line(raw, where)
                if line.strip():
                    record = parse_json_line(line, where)
                    documents.fields = documents.fields or choose_fields(record.fields, str(path), reading)
                    if scan.add(parse_document(record, documents.fields), where):
                        scan.starts.append(position)
                        scan.sizes.append(len(raw))
            except InputError as error:
                bad(error)
            before, position = position, position + len(raw)
            if before >> 20 < position >> 20:
                advance((position >> 20) - (before >> 20))
    return documents, scan


def _spool(
    records: Iterable[Record], name: str, reading: Reading, bad: Bad, file: IO[bytes]
) -> tuple[_JsonlFile, _Scan]:
    """Check documents and write each to a file, followed by a line with its place."""
    scan, position, fields = _Scan(name), 0, None
    with progress_bar("reading", None, "documents") as advance:
        for row, record in enumerate(counted(records, advance), start=1):
            try:
                fields = fields or choose_fields(record.fields, name, reading)
                document = parse_document(record, fields, row)
                is_kept = scan.add(document, record.where)
            except InputError as error:
                bad(error)
                continue
            if is_kept:
                with _copying(file):
                    size = file.write(document.to_json().encode() + b"\n")
                    scan.starts.append(position)
                    scan.sizes.append(size)
                    position += size + file.write(os.fsencode(record.where) + b"\n")
    with _copying(file):
        file.flush()
    return _JsonlFile(Path(name), scan, file, is_copy=True), scan


@contextmanager
def _copying(file: IO[bytes] | None) -> Iterator[None]:
    """Turn a write error in this block into one line with a remedy."""
    try:
        yield
    except OSError as error:
        name = getattr(file, "name", None)
        place = Path(name).parent if isinstance(name, str) else tempfile.tempdir or "the folder for temporary files"
        raise InputError(
            f"{place}: the documents cannot be copied there ({error.strerror}); free some space, name another folder "
            "in TMPDIR, or give them as JSONL, which needs no copy"
        ) from error


class _JsonlFile(Sequence[Document]):
    """Documents in a JSONL file, fetched by byte position.

    Several threads and forked processes may read at the same time.
    """

    def __init__(
        self, path: Path, lines: _Scan | _Part, file: IO[bytes], fields: Fields | None = None, *, is_copy: bool = False
    ) -> None:
        self.path, self.lines, self.file, self.fields, self.is_copy = path, lines, file, fields, is_copy
        self.state = self._present_state()
        self.lock = threading.Lock()

    def __del__(self) -> None:
        self.file.close()

    def __len__(self) -> int:
        return len(self.lines.starts)

    def __getitem__(self, index: int) -> Document:  # type: ignore[override]
        start, size = int(self.lines.starts[index]), int(self.lines.sizes[index])
        if self._present_state() != self.state:
            raise InputError(f"{self.path}: changed since it was read; load it again")
        where = f"{self.path}, byte {start}"
        return parse_document(parse_json_line(decode_line(self._read(start, size), where), where), self.fields)

    def place(self, index: int) -> str:
        """Return the file, and the line or row, of a document."""
        if self.is_copy:  # the place is written on the line after the document
            self.file.seek(int(self.lines.starts[index] + self.lines.sizes[index]))
            return os.fsdecode(self.file.readline().rstrip(b"\n"))
        position = 0
        for line in read_lines(self.path):
            if position == self.lines.starts[index]:
                return line.where
            position += line.size
        return f"{self.path}, byte {self.lines.starts[index]}"

    def _present_state(self) -> tuple[int, int]:
        status = os.fstat(self.file.fileno())
        return status.st_mtime_ns, status.st_size

    def _read(self, start: int, size: int) -> bytes:
        try:
            if hasattr(os, "pread"):  # pread does not move the file position, which forked processes share
                return os.pread(self.file.fileno(), size, start)
            with self.lock:
                self.file.seek(start)
                return self.file.read(size)
        except OSError as error:
            raise unreadable(self.path, error) from error


class _Part(NamedTuple):
    """A part of a corpus as one process read it, in values that `share_out` can send.

    A tuple may arrive as a list.
    """

    source: str
    path: str  # the source, or its copy
    starts: np.ndarray  # where each document's line begins, (N,) uint64
    sizes: np.ndarray  # how long each of these lines is, in bytes
    id_hashes: np.ndarray
    fields: Any  # see `Fields`
    state: Sequence[int]  # the file's time and size, to notice a change
    digest: str  # SHA-256 of the part's documents, in hexadecimal
    empty: Sequence[tuple[str, str]]  # ids of documents without text, and where they are


class _Parts(Sequence[Document]):
    """The documents of several files in sequence; a file is opened on first use."""

    def __init__(self, parts: list[_Part], scratch: ScratchFolder | None) -> None:
        self.parts = parts
        self._scratch = scratch  # deleted together with this object
        self._starts = np.cumsum([0, *(len(part.starts) for part in parts)]).tolist()
        self._file = lru_cache(OPEN_PARTS)(self._opened)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Document:  # type: ignore[override]
        number, place = self._locate(index)
        return self._file(number)[place]

    def place(self, index: int) -> str:
        """Return the file, and the line or row, of a document."""
        number, place = self._locate(index)
        return self._file(number).place(place)

    def _locate(self, index: int) -> tuple[int, int]:
        index = index + len(self) if index < 0 else index
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self._starts, index) - 1
        return number, index - self._starts[number]

    def _opened(self, number: int) -> _JsonlFile:
        part = self.parts[number]
        fields = part.fields and Fields(tuple(part.fields[0]), *part.fields[1:])
        file = _JsonlFile(Path(part.path), part, open_bytes(part.path), fields, is_copy=part.path != part.source)
        if file.state != tuple(part.state):
            raise InputError(f"{part.path}: changed since it was read; load it again")
        return file
