"""Documents: what one is, and collections of them that are read once with care and then visited in any order.

A corpus costs 16 bytes of memory a document, however long the documents are: the texts stay in a JSONL file (the
user's own, or a temporary one that other formats are written to) and are fetched by their position in it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import threading
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, overload

import numpy as np

from hce.errors import InputError
from hce.records import (
    KNOWN,
    STDIN,
    Record,
    decode_line,
    format_suffix,
    parse_json_line,
    read_lines,
    read_records,
    read_text_folder,
)

ID_FIELDS = ("_id", "id")
logger = logging.getLogger(__name__)

BEIR_CORPUS = ("corpus.jsonl", "corpus.jsonl.gz")


@dataclass(frozen=True, slots=True)
class Document:
    """A text with a name. `title` may be empty; `metadata` is whatever else the source said."""

    id: str
    text: str
    title: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def full_text(self) -> str:
        """What an encoder reads: title and text joined by a space, BEIR's convention."""
        return f"{self.title} {self.text}".strip()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it to be found by."""
        return not self.full_text

    def to_json(self) -> str:
        """One JSONL line, without the line break."""
        fields = {"_id": self.id, "title": self.title, "text": self.text, "metadata": self.metadata}
        return json.dumps(fields, ensure_ascii=False, default=str)


def parse_document(record: Record) -> Document:
    """Make a document of a record: `_id` or `id`, `title`, `text`; other fields become metadata.

    Raises:
        InputError: no id, no field `text`, a field of the wrong type, or text that is no Unicode.
    """
    where, fields = record.where, dict(record.fields)
    doc_id = take_id(fields, where)
    text = _take_string(fields, "text", where)
    if text is None:
        found = ", ".join(fields) or "no other field"
        raise InputError(f"{where}: document {doc_id!r} has no field 'text' (found: {found}); rename the field")
    title = _take_string(fields, "title", where) or ""
    nested = fields.pop("metadata", None)  # BEIR keeps extra fields one level down
    metadata = {**nested, **fields} if isinstance(nested, dict) else fields
    return Document(doc_id, text, title, metadata)


def take_id(fields: dict[str, Any], where: str) -> str:
    """Remove and return the id; whole numbers are taken as their digits."""
    for name in ID_FIELDS:
        value = fields.pop(name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if value is None or value == "":
            continue
        if not isinstance(value, str):
            raise InputError(f"{where}: the {name} is a {type(value).__name__}, not a string; quote it")
        return _unicode(value, name, where)
    raise InputError(f"{where}: no id; give each record a field '_id' or 'id'")


def _take_string(fields: dict[str, Any], name: str, where: str) -> str | None:
    value = fields.pop(name, None)
    if value is not None and not isinstance(value, str):
        raise InputError(f"{where}: the {name} is a {type(value).__name__}, not a string; quote it")
    return value if value is None else _unicode(value, name, where)


def _unicode(value: str, name: str, where: str) -> str:
    """Refuse what JSON can spell and UTF-8 cannot: half of a surrogate pair."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: the {name} holds half a surrogate pair (\\ud800…\\udfff); remove it") from error
    return value


class Corpus(Sequence[Document]):
    """An ordered collection of documents with unique ids and a fingerprint of its content.

    Attributes:
        name: where it came from, for messages.
        fingerprint: sha256 over ids, titles, texts and metadata in order; the same in every file format.
        left_out: ids of documents with neither text nor title; they are in the source and not in the corpus.
    """

    def __init__(
        self, documents: Sequence[Document], fingerprint: str, name: str, left_out: Iterable[str] = ()
    ) -> None:
        self._documents = documents
        self.fingerprint = fingerprint
        self.name = name
        self.left_out = frozenset(left_out)

    @classmethod
    def load(cls, path: str | Path) -> Corpus:
        """Read and check a whole collection: a BEIR folder, JSONL, CSV, TSV, Parquet, text files, or "-".

        Raises:
            InputError: at the first fault, with file and line; nothing is kept then.
        """
        source = _documents_source(path)
        if format_suffix(source) == ".jsonl" and source.is_file() and source.suffix != ".gz":
            return cls._scan_jsonl(source)
        records = read_text_folder(source) if source.is_dir() else read_records(source)
        return cls._spool(records, "standard input" if str(path) == STDIN else str(path))

    @classmethod
    def from_documents(cls, documents: Iterable[Document], name: str = "documents") -> Corpus:
        """Make a corpus of documents that are in memory already; they are checked as a file's would be."""
        check, kept = _Checker(name), []
        for number, document in enumerate(documents, start=1):
            where = f"{name}, number {number}"
            fields = {"_id": document.id, "title": document.title, "text": document.text}
            if check.add(replace(parse_document(Record(where, fields)), metadata=document.metadata), where):
                kept.append(document)
        return cls(kept, check.finish(kept), name, check.empty)

    @classmethod
    def _scan_jsonl(cls, path: Path) -> Corpus:
        """Check the user's own file and remember where each document's line is."""
        check, lines, position = _Checker(str(path)), _Extents(), 0
        for line in read_lines(path):
            if line.text.strip() and check.add(parse_document(parse_json_line(line.text, line.where)), line.where):
                lines.add(position, line.size)
            position += line.size
        documents = _JsonlFile(path, lines)
        return cls(documents, check.finish(documents), str(path), check.empty)

    @classmethod
    def _spool(cls, records: Iterable[Record], name: str) -> Corpus:
        """Copy documents of any other format to a temporary JSONL file, checking them on the way."""
        check, lines, position = _Checker(name), _Extents(), 0
        spool = tempfile.TemporaryFile(prefix="hce-corpus-")  # noqa: SIM115  lives as long as the corpus
        for record in records:
            document = parse_document(record)
            if check.add(document, record.where):
                size = spool.write(document.to_json().encode())
                lines.add(position, size)
                position += size
        spool.flush()
        documents = _JsonlFile(Path(name), lines, spool)
        return cls(documents, check.finish(documents), name, check.empty)

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
        """Stream what an encoder reads of each document."""
        return (document.full_text for document in self)


class _Checker:
    """What must hold for a whole corpus: it is not empty and no id comes twice. Also computes the fingerprint.

    A document with neither text nor title can be found by nothing and encodes to noise. Real collections have some
    (Cranfield two), so it is left out with a warning that names its place, and does not stop the rest.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.empty: dict[str, str] = {}
        self.digest = hashlib.sha256()
        self.id_hashes = array("Q")  # 8 bytes a document; ids themselves would cost ten times that

    def add(self, document: Document, where: str) -> bool:
        """Take note of a document; False means: leave it out."""
        if document.is_empty:
            self.empty[document.id] = where
            return False
        metadata = json.dumps(document.metadata, sort_keys=True, default=str)
        for part in (document.id, document.title, document.text, metadata):
            data = part.encode()
            self.digest.update(len(data).to_bytes(8, "little") + data)
        self.id_hashes.append(_hash_id(document.id))
        return True

    def finish(self, documents: Sequence[Document]) -> str:
        if not self.id_hashes:
            raise InputError(f"{self.name}: no documents in it; give {KNOWN}")
        if self.empty:
            logger.warning(
                "left out %d documents with neither text nor title: %s", len(self.empty), _few(self.empty.values())
            )
        hashes = np.asarray(self.id_hashes)
        values, counts = np.unique(hashes, return_counts=True)
        if len(values) < len(hashes):
            self._refuse_duplicate(documents, np.flatnonzero(np.isin(hashes, values[counts > 1])))
        return self.digest.hexdigest()

    def _refuse_duplicate(self, documents: Sequence[Document], suspects: np.ndarray) -> None:
        """Read the suspects again: equal hashes of different ids are no fault."""
        first_at: dict[str, int] = {}
        for index in suspects.tolist():
            doc_id = documents[index].id
            if doc_id in first_at:
                first, second = _place(documents, first_at[doc_id]), _place(documents, index)
                raise InputError(f"{self.name}: id {doc_id!r} stands twice, at {first} and {second}; make ids unique")
            first_at[doc_id] = index


def _few(places: Collection[str]) -> str:
    return "; ".join(list(places)[:3]) + ("; …" if len(places) > 3 else "")


def _place(documents: Sequence[Document], index: int) -> str:
    return documents.place(index) if isinstance(documents, _JsonlFile) else f"number {index + 1}"


class _Extents:
    """Where each line of a file begins and how long it is: 16 bytes a line."""

    def __init__(self) -> None:
        self.starts, self.sizes = array("Q"), array("Q")

    def add(self, start: int, size: int) -> None:
        self.starts.append(start)
        self.sizes.append(size)


class _JsonlFile(Sequence[Document]):
    """Documents in a JSONL file, fetched by byte position; safe to read from several threads."""

    def __init__(self, path: Path, lines: _Extents, spool: IO[bytes] | None = None) -> None:
        self.path = path
        self.lines = lines
        self.is_spool = spool is not None
        self.file = spool if spool is not None else path.open("rb")
        self.modified = self._modification_time()
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.lines.starts)

    def __getitem__(self, index: int) -> Document:  # type: ignore[override]
        start, size = self.lines.starts[index], self.lines.sizes[index]
        if self._modification_time() != self.modified:
            raise InputError(f"{self.path}: changed since it was read; load it again")
        with self.lock:
            self.file.seek(start)
            raw = self.file.read(size)
        where = f"{self.path}, byte {start}"
        return parse_document(parse_json_line(decode_line(raw, where), where))

    def place(self, index: int) -> str:
        """Where a person finds a document: its line, or its number where the file is a copy of another format."""
        if self.is_spool:
            return f"record {index + 1}"
        position = 0
        for number, line in enumerate(read_lines(self.path), start=1):
            if position == self.lines.starts[index]:
                return f"line {number}"
            position += line.size
        return f"byte {self.lines.starts[index]}"

    def _modification_time(self) -> int:
        return os.fstat(self.file.fileno()).st_mtime_ns


def _hash_id(doc_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(doc_id.encode(), digest_size=8).digest(), "little")


def _documents_source(path: str | Path) -> Path:
    """The file or folder that holds the documents: a BEIR folder's corpus file, else `path` itself."""
    if str(path) == STDIN:
        return Path(STDIN)
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path}: no such file or folder; give {KNOWN}")
    if not path.is_dir():
        return path
    for name in BEIR_CORPUS:
        if (path / name).is_file():
            return path / name
    return path
