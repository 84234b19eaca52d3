"""Records from files: JSONL, CSV, TSV, Parquet, folders of text, standard input, and .gz of each text format.

A record is a mapping of fields with the file and line that it came from, for error messages. This module knows
encodings and syntax, and nothing of documents or queries. A file is what lies on a disk and ends: a pipe is read from
standard input only, and no more of anything is held in memory than one record, which has a greatest length.
"""

from __future__ import annotations

import codecs
import csv
import errno
import gzip
import json
import logging
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from hce.errors import InputError, MissingPackageError

logger = logging.getLogger(__name__)

STDIN = "-"
LONGEST_RECORD = 100_000_000  # bytes; what is longer is no document, and a .gz of a few bytes may hold it
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
            for number, raw in enumerate(iter(partial(file.readline, LONGEST_RECORD + 1), b""), start=1):
                where = f"{name}, line {number}"
                _refuse_endless(len(raw), where)
                yield where, raw
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InputError(
                f"{name}: the gzip data is cut off or damaged after line {number} ({error}); copy the file again"
            ) from error
        except OSError as error:
            raise unreadable(f"{name}, after line {number}", error) from error


def _refuse_endless(size: int, where: str) -> None:
    if size > LONGEST_RECORD:
        raise InputError(f"{where}: longer than {LONGEST_RECORD // 1_000_000} MB; split it, or is this no text file?")


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
    lines = _CsvLines(path)
    rows, first_line = csv.reader(lines, strict=True), 1
    try:
        for row in rows:
            if row:
                yield f"{path}, line {first_line}", row
            first_line = rows.line_num + 1
            lines.size = 0
    except csv.Error as error:
        raise InputError(f"{path}, line {first_line}: not valid CSV ({error}); check the quotes of this row") from error


class _CsvLines(Iterator[str]):
    """The lines of a CSV file, with their line breaks, which a quoted cell keeps as they are.

    Attributes:
        size: bytes of the row under way, which goes on over many lines where a quote is not closed.
    """

    def __init__(self, path: str | Path) -> None:
        self._lines = _raw_lines(path)
        self._mark = codecs.BOM_UTF8
        self.size = 0

    def __next__(self) -> str:
        where, raw = next(self._lines)
        self.size += len(raw)
        _refuse_endless(self.size, where)
        mark, self._mark = self._mark, b""  # further down, it may be part of a cell
        return _decode(raw.removeprefix(mark), where)


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
    _refuse_special(path)
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

    Links that lead out of the folder are left out with a warning: who gives a folder has that folder in mind. The id
    is the path below the folder, with forward slashes on every system.
    """
    folder, outside = Path(folder), []
    within = os.path.realpath(folder)
    for directory, subfolders, names in os.walk(folder, onerror=_refuse_folder):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in sorted(names):
            path = Path(directory) / name
            if format_suffix(path) not in TEXT_SUFFIXES or name.startswith("."):
                continue
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(within):
                outside.append(path)
            else:
                yield Record(str(path), {"id": path.relative_to(folder).as_posix(), "text": _whole_text(path)})
    if outside:
        logger.warning("left out %d links that lead out of %s: %s …", len(outside), folder, outside[0])


def _whole_text(path: Path) -> str:
    lines, size = [], 0
    for line in read_lines(path):
        size += line.size
        _refuse_endless(size, str(path))
        lines.append(line.text)
    return "\n".join(lines)


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
        _refuse_special(path)
        return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")  # type: ignore[return-value]
    except OSError as error:
        raise unreadable(path, error) from error


def _refuse_special(path: str | Path) -> None:
    """Refuse what is no file on a disk: a pipe may never answer, a device may never end.

    Raises:
        InputError: it is a pipe, a device or a folder, or is not there.
    """
    try:
        mode = Path(path).stat().st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as error:
        raise unreadable(path, error) from error
    if not stat.S_ISREG(mode):
        raise InputError(f"{path}: is a pipe or a device, not a file; to read from one, give - and redirect it there")


_READERS: dict[str, Callable[[str | Path], Iterator[Record]]] = {
    **dict.fromkeys(JSONL_SUFFIXES, read_jsonl),
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".parquet": read_parquet,
}
