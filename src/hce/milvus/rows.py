"""Rows: what an index is in a collection of Milvus, written by `hce.milvus.mirror` and read by `hce.milvus.replica`.

A document is a row with its vector, and further rows if its text is longer than a row. A passage is a row with its
vector and its place; a file of the encoder is rows of text. The log says what the collection is made of; then each
entry says which moment of the store the collection has reached, and what was removed since the entry before.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from hce.contained import check_tree, open_file
from hce.data.documents import Document
from hce.data.text import Passage
from hce.errors import FormatError
from hce.files import checked_fields, file_sha256
from hce.index.manifest import Manifest
from hce.index.store import Entry, Moment, Reader
from hce.milvus.engine import DOCUMENTS, FILES, LOG, PASSAGES, PIECE, PIECES, Collection, MilvusRow

FORMAT = 1  # of a collection
FACTS = 1  # the number of the row of the log that says what the collection is made of
ENTRY_BITS = 20  # a change of the store may have so many parts in the log
REMOVED_AT_ONCE = 3000  # numbers in one part, which is no longer than a row may be
FILE_PIECE = 45_000  # bytes of a file in one row, a third longer as text

FileFacts = dict[str, list[Any]]
"""Files by name: size, SHA-256, and the numbers of the first and the last row of each."""


def pieces_of(text: str) -> list[str]:
    """Cut a text into pieces that fit into rows.

    >>> [len(piece) for piece in pieces_of("é" * 70_000)]
    [30000, 30000, 10000]
    """
    encoded = text.encode()
    if len(encoded) <= PIECE:
        return [text]
    pieces, start = [], 0
    while start < len(encoded):
        stop = min(start + PIECE, len(encoded))
        while stop < len(encoded) and encoded[stop] & 0xC0 == 0x80:  # in the middle of a character
            stop -= 1
        pieces.append(encoded[start:stop].decode())
        start = stop
    return pieces


# ------------------------------------------------------------------------------------------------- the log


class LogEntry(NamedTuple):
    """A moment in the log of a collection, and what was removed since the entry before."""

    moment: Moment
    removed: list[int]


def log_rows(entry: LogEntry) -> Iterator[MilvusRow]:
    """Write an entry as rows; only the last makes it count."""
    blocks = [entry.removed[i : i + REMOVED_AT_ONCE] for i in range(0, len(entry.removed), REMOVED_AT_ONCE)] or [[]]
    for part, removed in enumerate(blocks, start=1):
        content = {"moment": entry.moment._asdict() if part == len(blocks) else None, "removed": removed}
        yield MilvusRow((entry.moment.change + 1 << ENTRY_BITS) + part, entry.moment.change, part, json.dumps(content))


def read_log(collection: Collection, after: int) -> list[LogEntry]:
    """Read the entries of changes after `after`; −1 for all of them."""
    entries, removed = [], []
    for row in collection.rows_after(LOG, (after + 2 << ENTRY_BITS) - 1):
        content = json.loads(row.content)
        removed += content["removed"]
        if content["moment"] is not None:
            entries.append(LogEntry(Moment(**content["moment"]), removed))
            removed = []
    return entries


class Facts(NamedTuple):
    """The manifest of the index in a collection, and the files of its encoder."""

    manifest: Manifest
    files: FileFacts


def facts_rows(facts: Facts, writer: str) -> Iterator[MilvusRow]:
    """Write facts as rows; only the index named `writer` may write the collection."""
    content = {"format": FORMAT, "writer": writer, "files": facts.files, "manifest": asdict(facts.manifest)}
    pieces = pieces_of(json.dumps(content))
    return (MilvusRow(FACTS + i, 0, len(pieces), piece) for i, piece in enumerate(pieces))


def read_writer(collection: Collection) -> str | None:
    """Return who alone may write to a collection; None if it is not of hce."""
    return _read_content(collection).get("writer")


def read_facts(collection: Collection) -> Facts:
    """Read what a collection is made of.

    Raises `FormatError` if it is not of hce, damaged, or of a newer version.
    """
    address, content = collection.server.address, _read_content(collection)
    if not content:
        raise FormatError(f"{address}: the collection is not of hce, or damaged")
    if not isinstance(content.get("format"), int) or content["format"] > FORMAT:
        raise FormatError(f"{address}: the collection was written by a newer version of hce; upgrade to read it")
    try:
        return Facts(checked_fields(Manifest, content["manifest"]), dict(content["files"]))
    except (FormatError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{address}: the collection is damaged ({error})") from error


def _read_content(collection: Collection) -> dict[str, Any]:
    """Read what `facts_rows` wrote; nothing if that is not there."""
    rows = list(collection.rows_between(LOG, FACTS, FACTS))
    if not rows:
        return {}
    rows += collection.rows_between(LOG, FACTS + 1, FACTS + rows[0].part - 1)
    try:
        content = json.loads("".join(row.content for row in rows))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


# ------------------------------------------------------------------------------------------------- documents


def document_rows(entries: list[Entry]) -> tuple[list[MilvusRow], list[MilvusRow]]:
    """Write documents as rows with vectors, and long contents as further rows."""
    rows, further = [], []
    for number, document, vector in entries:
        pieces = pieces_of(document.to_json())
        rows.append(MilvusRow(number, number, len(pieces), pieces[0], vector))
        further += [MilvusRow(number << 16 | i, number, i, piece) for i, piece in enumerate(pieces[1:], start=1)]
    return rows, further


def read_documents(collection: Collection, first: int, last: int) -> dict[int, Document]:
    """Read documents by number, without those that lost a piece by a removal."""
    rows = list(collection.rows_between(DOCUMENTS, first, last))
    contents = {row.number: [row.content] for row in rows}
    if any(row.part > 1 for row in rows):
        further = collection.rows_between(PIECES, first, last, of_documents=True)
        for piece in sorted(further, key=attrgetter("document", "part")):
            contents.get(piece.document, []).append(piece.content)
    documents = {}
    for row in rows:
        if len(contents[row.number]) == row.part:
            values = json.loads("".join(contents[row.number]))
            documents[row.number] = Document(values["_id"], values["text"], values["title"], values["metadata"])
    return documents


def passage_rows(reader: Reader, entries: list[Entry]) -> Iterator[MilvusRow]:
    """Write the passages of documents as rows with vectors and places."""
    if not reader.has_passages():
        return
    passages = reader.passages_of(entry.number for entry in entries)
    extents = reader.extents(passages.numbers.tolist())
    columns = passages.numbers.tolist(), passages.documents.tolist(), passages.vectors
    for number, document, vector in zip(*columns, strict=True):
        yield MilvusRow(number, document, 0, json.dumps(extents[number]), vector)


def read_extents(
    collection: Collection, first: int, last: int, documents: Mapping[int, Document]
) -> dict[int, tuple[int, Passage]]:
    """Read the places of passages: number → document's number and extent."""
    rows = collection.rows_between(PASSAGES, first, last, of_documents=True)
    return {row.number: (row.document, Passage(*json.loads(row.content))) for row in rows if row.document in documents}


# ------------------------------------------------------------------------------------------------- files


def file_rows(folder: Path) -> tuple[FileFacts, Iterator[MilvusRow]]:
    """Write all files below a folder as rows; return what they are, and the rows."""
    files: FileFacts = {}
    number = 1
    for name, found in check_tree(folder, folder.parent).items():
        pieces = -(-found.st_size // FILE_PIECE)
        files[name] = [found.st_size, file_sha256(folder / name), number, number + pieces - 1]
        number += pieces

    def rows() -> Iterator[MilvusRow]:
        for name, (_, _, first, _) in files.items():
            with open_file(folder / name, folder) as file:
                for number in count(first):
                    piece = file.read(FILE_PIECE)
                    if not piece:
                        break
                    yield MilvusRow(number, 0, 0, base64.b64encode(piece).decode())

    return files, rows()


def fetch_files(collection: Collection, files: FileFacts, folder: Path) -> None:
    """Fetch files into a new folder.

    Raises `FormatError` if one is not what it was, or would be outside of the folder.
    """
    address = collection.server.address
    folder.mkdir()
    for name, (size, known, first, last) in files.items():
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise FormatError(f"{address}: the collection is damaged (a file named {name!r})")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for row in collection.rows_between(FILES, first, last):
                file.write(base64.b64decode(row.content))
        if path.stat().st_size != size or file_sha256(path) != known:
            raise FormatError(f"{address}: {name} of the encoder is not as it was written; rebuild the index there")
