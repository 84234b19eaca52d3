"""Records from files: JSONL, CSV, TSV, Parquet, folders of text, standard input, and .gz of each text format.

A record is a mapping of fields with the file and line that it came from, for error messages. This module knows
encodings and syntax, and nothing of documents or queries.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from hce.errors import InputError, MissingPackageError

STDIN = "-"
TEXT_SUFFIXES = (".txt", ".md")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
KNOWN = ".jsonl, .csv, .tsv, .parquet (text formats also as .gz), a BEIR folder, a folder of .txt/.md files, or -"


class Record(NamedTuple):
    """One row of a file: `where` reads like "docs.jsonl, line 3"."""

    where: str
    fields: dict[str, Any]


class Line(NamedTuple):
    """One line of a text file, without its line break; `size` counts its bytes on disk, line break included."""

    where: str
    text: str
    size: int


def read_records(path: str | Path) -> Iterator[Record]:
    """Stream the records of a file of any known format, or JSONL from standard input when `path` is "-".

    Raises:
        InputError: at the first thing that is wrong, with file and line.
    """
    if str(path) == STDIN:
        return read_jsonl(STDIN)
    suffix = format_suffix(path)
    if suffix not in _READERS:
        raise InputError(f"{path}: unknown format '{suffix or 'no suffix'}'; give {KNOWN}")
    return _READERS[suffix](path)


def shown(path: str | Path) -> str:
    """How messages call a path."""
    return "standard input" if str(path) == STDIN else str(path)


def format_suffix(path: str | Path) -> str:
    """The suffix that tells the format, with .gz looked through: "a.jsonl.gz" → ".jsonl"."""
    path = Path(path)
    return (Path(path.stem) if path.suffix.lower() == ".gz" else path).suffix.lower()


def read_lines(path: str | Path) -> Iterator[Line]:
    """Stream the lines of a UTF-8 text file (or .gz, or "-")."""
    for where, raw in _raw_lines(path):
        yield Line(where, decode_line(raw, where), len(raw))


def _raw_lines(path: str | Path) -> Iterator[tuple[str, bytes]]:
    name, number = shown(path), 0
    with open_bytes(path) as file:
        try:
            for number, raw in enumerate(file, start=1):
                yield f"{name}, line {number}", raw
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InputError(
                f"{name}: the gzip data is cut off or damaged after line {number} ({error}); copy the file again"
            ) from error


def decode_line(raw: bytes, where: str) -> str:
    """Decode one line and drop its line break and, as joined files have them anywhere, a byte order mark."""
    return _decode(raw.removeprefix(codecs.BOM_UTF8), where).rstrip("\r\n")


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        raise InputError(
            f"{where}: not UTF-8 (byte 0x{bad:02x} at position {error.start + 1}); save the file as UTF-8"
        ) from error


def read_jsonl(path: str | Path) -> Iterator[Record]:
    """Stream one JSON object a line; blank lines are passed over."""
    for line in read_lines(path):
        if line.text.strip():
            yield parse_json_line(line.text, line.where)


def parse_json_line(text: str, where: str) -> Record:
    """Turn one line into a record, or say what is wrong with it."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "too deep or too long"
        column = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise InputError(f"{where}{column}: not valid JSON ({reason}); each line must be one JSON object") from error
    if not isinstance(fields, dict):
        raise InputError(f"{where}: a JSON {type(fields).__name__}, not an object; write {{...}} with named fields")
    return Record(where, fields)


def read_csv(path: str | Path) -> Iterator[Record]:
    """Stream the rows of a CSV file; the first row names the columns, quotes protect commas and line breaks."""
    return _name_cells(_csv_rows(path), "quote a cell that holds a comma")


def read_tsv(path: str | Path) -> Iterator[Record]:
    """Stream the rows of a TSV file; a quote in it is just a quote, as in MS MARCO's and the IANA's TSV."""
    rows = ((line.where, line.text.split("\t")) for line in read_lines(path) if line.text.strip())
    return _name_cells(rows, "a cell cannot hold a tab or a line break")


def _csv_rows(path: str | Path) -> Iterator[tuple[str, list[str]]]:
    """Stream the rows that hold something, each with the line that it begins on."""
    csv.field_size_limit(2**31 - 1)  # the default refuses fields over 128 KiB, and a document may well be longer
    rows, first_line = csv.reader(_csv_lines(path), strict=True), 1
    try:
        for row in rows:
            if row:
                yield f"{path}, line {first_line}", row
            first_line = rows.line_num + 1
    except csv.Error as error:
        raise InputError(f"{path}, line {first_line}: not valid CSV ({error}); check the quotes of this row") from error


def _csv_lines(path: str | Path) -> Iterator[str]:
    mark = codecs.BOM_UTF8
    for where, raw in _raw_lines(path):
        yield _decode(raw.removeprefix(mark), where)  # with its line break, which a quoted cell keeps as it is
        mark = b""  # further down, it may be part of a cell


def _name_cells(rows: Iterator[tuple[str, list[str]]], remedy: str) -> Iterator[Record]:
    where, header = next(rows, ("", []))
    if len(set(header)) < len(header):
        raise InputError(f"{where}: a column name stands twice among {header}; rename one")
    for where, row in rows:
        if len(row) != len(header):
            raise InputError(f"{where}: the row has {len(row)} cells, the header {len(header)}; {remedy}")
        yield Record(where, dict(zip(header, row, strict=True)))


def read_parquet(path: str | Path) -> Iterator[Record]:
    """Stream the rows of a Parquet file, batch by batch."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingPackageError(
            f"{path}: reading Parquet needs pyarrow; pip install 'hierarchical-corpus-encoder[parquet]'"
        ) from error
    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for fields in batch.to_pylist():
                    number += 1
                    yield Record(f"{path}, row {number}", fields)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: not a readable Parquet file ({reason}); check it or write it again") from error


def read_text_folder(folder: str | Path) -> Iterator[Record]:
    """Stream a folder's .txt and .md files, deep, in sorted order; hidden ones are passed over.

    The id is the path below the folder, with forward slashes on every system.
    """
    folder = Path(folder)
    for directory, subfolders, names in os.walk(folder, onerror=_refuse_folder):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in sorted(names):
            path = Path(directory) / name
            if format_suffix(path) in TEXT_SUFFIXES and not name.startswith("."):
                text = "\n".join(line.text for line in read_lines(path))
                yield Record(str(path), {"id": path.relative_to(folder).as_posix(), "text": text})


def _refuse_folder(error: OSError) -> None:
    raise unreadable(error.filename, error) from error


def unreadable(path: str | Path, error: OSError) -> InputError:
    """What to raise when the system refuses to open a file or a folder."""
    return InputError(f"{shown(path)}: cannot be read ({error.strerror}); check the path and its permissions")


def open_bytes(path: str | Path) -> IO[bytes]:
    """Open a file, a .gz or standard input for reading."""
    try:
        if str(path) == STDIN:
            return os.fdopen(0, "rb", closefd=False)
        path = Path(path)
        return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")  # type: ignore[return-value]
    except OSError as error:
        raise unreadable(path, error) from error


_READERS: dict[str, Callable[[str | Path], Iterator[Record]]] = {
    **dict.fromkeys(JSONL_SUFFIXES, read_jsonl),
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".parquet": read_parquet,
}
