"""Records from files: JSONL, CSV, TSV, Parquet, folders of text, standard input, and .gz of each text format.

A record is a mapping of fields with the place it came from, so that whoever finds fault with it can name file and
line. This module knows encodings and syntax; what a document or a query is, it does not know.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from hce.errors import InputError, MissingPackageError

STDIN = "-"
TEXT_SUFFIXES = (".txt", ".md")
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


def format_suffix(path: str | Path) -> str:
    """The suffix that tells the format, with .gz looked through: "a.jsonl.gz" → ".jsonl"."""
    path = Path(path)
    return (Path(path.stem) if path.suffix.lower() == ".gz" else path).suffix.lower()


def read_lines(path: str | Path) -> Iterator[Line]:
    """Stream the lines of a UTF-8 text file (or .gz, or "-")."""
    name = "standard input" if str(path) == STDIN else str(path)
    number = 0
    with _open_bytes(path) as file:
        try:
            for number, raw in enumerate(file, start=1):
                where = f"{name}, line {number}"
                yield Line(where, decode_line(raw, where), len(raw))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InputError(
                f"{name}: the gzip data is cut off or damaged after line {number} ({error}); copy the file again"
            ) from error


def decode_line(raw: bytes, where: str) -> str:
    """Decode one line and drop its line break and, as joined files have them anywhere, a byte order mark."""
    try:
        return raw.removeprefix(codecs.BOM_UTF8).decode("utf-8").rstrip("\r\n")
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
    return _read_table(path, delimiter=",", quoting=csv.QUOTE_MINIMAL)


def read_tsv(path: str | Path) -> Iterator[Record]:
    """Stream the rows of a TSV file; a quote in it is just a quote, as in MS MARCO's and the IANA's TSV."""
    return _read_table(path, delimiter="\t", quoting=csv.QUOTE_NONE)


def _read_table(path: str | Path, *, delimiter: str, quoting: Any) -> Iterator[Record]:
    csv.field_size_limit(2**31 - 1)  # the default refuses fields over 128 KiB, and a document may well be longer
    lines = (line.text + "\n" for line in read_lines(path))
    rows = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True)
    try:
        header = next(rows, None)
        if header is None:
            return
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            if not row:
                continue
            if len(row) != len(header):
                raise InputError(
                    f"{where}: {len(row)} cells under {len(header)} column names; is there a stray {delimiter!r}?"
                )
            yield Record(where, dict(zip(header, row, strict=True)))
    except csv.Error as error:
        raise InputError(f"{path}, line {rows.line_num}: not a valid table ({error})") from error


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
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a readable Parquet file ({str(error).splitlines()[0]})") from error


def read_text_folder(folder: str | Path) -> Iterator[Record]:
    """Stream a folder's .txt and .md files, deep, in sorted order; hidden ones are passed over.

    The id is the path below the folder, with forward slashes on every system.
    """
    folder = Path(folder)
    for directory, subfolders, names in os.walk(folder):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in sorted(names):
            path = Path(directory) / name
            if format_suffix(path) in TEXT_SUFFIXES and not name.startswith("."):
                text = "\n".join(line.text for line in read_lines(path))
                yield Record(str(path), {"id": path.relative_to(folder).as_posix(), "text": text})


def _open_bytes(path: str | Path) -> IO[bytes]:
    if str(path) == STDIN:
        return os.fdopen(os.dup(sys.stdin.fileno()), "rb")  # closing ours must not close the caller's
    path = Path(path)
    try:
        return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")  # type: ignore[return-value]
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the path") from error


_READERS: dict[str, Callable[[str | Path], Iterator[Record]]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".parquet": read_parquet,
}
