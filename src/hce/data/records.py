"""Records from files (JSONL, JSON, CSV, TSV, Parquet, .gz) and standard input, and documents from records.

A record is a mapping of fields, with its file and line for error messages. Records are streamed, and their length is
limited.
"""

from __future__ import annotations

import codecs
import csv
import errno
import gzip
import io
import json
import logging
import os
import re
import stat
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from hce.data.text import Document, is_unicode
from hce.errors import InputError, needs_extra, one_line

logger = logging.getLogger(__name__)

STDIN = "-"
LONGEST_RECORD = 100_000_000  # bytes; no document is longer, but a .gz of a few bytes may hold more
JSONL_SUFFIXES = (".jsonl", ".ndjson")
KNOWN = ".jsonl, .csv, .tsv, .parquet, .json (texts also as .gz), a BEIR folder, a folder of .txt/.md/.html/.pdf, or -"
DELIMITERS = (",", ";", "\t", "|")  # the most frequent one in a CSV file's header is taken, and on a tie the first
ROWS_AT_ONCE = 64  # of a Parquet file; few, because a text that is stored once for many rows is copied for each
CHUNK = 1 << 20  # characters of a JSON text read at once
BLANKS = re.compile(r"[ \t\r\n]*")

ID_FIELDS = ("_id", "id")
# Other common names, in the order of search; case, spaces and punctuation do not count.
ID_NAMES = ("id", "docid", "docno", "documentid", "passageid", "articleid", "recordid", "pid", "uid", "uuid", "key")
TITLE_NAMES = ("title", "doctitle", "documenttitle", "headline", "heading")
TEXT_NAMES = ("text", "content", "contents", "body", "fulltext", "doctext", "passage", "abstract", "document")
NO_ID = "give each record a field '_id' or 'id', name its field (--fields id=NAME), or number the rows (--fields id=)"


@dataclass(frozen=True)
class Reading:
    """Options for reading documents; invalid ones raise InputError."""

    id_field: str | None = None  # by default, the fields for id, title and text are found by common names
    title_field: str | None = None
    text_field: str | None = None
    row_ids: bool = False  # use row numbers, from 1, as ids
    remembered: bool = False  # the fields come from earlier documents, and are ignored if a source lacks them
    delimiter: str | None = None  # between CSV or TSV cells: a character, or "tab"; by default found in a CSV's header
    encoding: str = "utf-8"  # of text files
    skip_bad: bool = False  # skip records and files that cannot be read, and report them

    def __post_init__(self) -> None:
        if self.text_field is not None and self.text_field in (self.id_field, self.title_field):
            raise InputError(f"the field {self.text_field!r} of the text cannot be the id or the title as well")
        if self.row_ids and self.id_field is not None:
            raise InputError(f"ids come either from the field {self.id_field!r} or from row numbers, not from both")
        cell = {"tab": "\t", "\\t": "\t"}.get(self.delimiter or "", self.delimiter)
        if cell is not None and (len(cell) != 1 or cell in '"\r\n'):
            raise InputError(f"delimiter {self.delimiter!r}: give one character, such as ';', or tab")
        try:
            codec = codecs.lookup(self.encoding)
            "x".encode(self.encoding)  # refuses codecs that do not encode text, such as base64
        except (LookupError, ValueError) as error:
            message = f"encoding {self.encoding!r}: unknown; give utf-8, latin-1, cp1252, utf-16 …"
            raise InputError(message) from error
        object.__setattr__(self, "delimiter", cell)
        object.__setattr__(self, "encoding", codec.name)

    @property
    def fields(self) -> dict[str, str]:
        """The field names given, for id, text and title."""
        named = {"id": self.id_field, "text": self.text_field, "title": self.title_field}
        return {what: name for what, name in named.items() if name is not None}

    def remembering(self, fields: Mapping[str, str] | None) -> Reading:
        """Return options with earlier documents' `fields`, unless these name their own.

        >>> Reading().remembering({"id": "nr", "text": "body"}).fields
        {'id': 'nr', 'text': 'body'}
        """
        if not fields or self.fields or self.row_ids:
            return self
        names = {"id_field": fields.get("id"), "title_field": fields.get("title"), "text_field": fields.get("text")}
        return replace(self, remembered=True, **names)  # type: ignore[arg-type]

    @property
    def is_utf8(self) -> bool:
        """Whether files are UTF-8, with a byte order mark or without."""
        return self.encoding in ("utf-8", "utf-8-sig")


USUAL = Reading()
Bad = Callable[[InputError], None]
"""Handles the error of an unreadable record: `refuse` raises it, others may note it and continue."""


def refuse(error: InputError) -> None:
    """Raise the error, so that reading stops at the first fault."""
    raise error


class Record(NamedTuple):
    """One row of a file: `where` reads like "docs.jsonl, line 3"."""

    where: str
    fields: dict[str, Any]


class Line(NamedTuple):
    """One line of a file: `text` without its line break, `size` in bytes with it."""

    where: str
    text: str
    size: int


def read_records(path: str | Path, reading: Reading = USUAL, bad: Bad = refuse) -> Iterator[Record]:
    """Stream the records of a file, or JSONL from standard input for "-".

    Raises:
        InputError: at the first fault, with file and line, unless `bad` handles it.
    """
    suffix = ".jsonl" if str(path) == STDIN else format_suffix(path)
    if suffix not in _READERS:
        raise InputError(f"{path}: unknown format '{suffix or 'no suffix'}'; give {KNOWN}")
    return _READERS[suffix](path, reading, bad)


def shown_path(path: str | Path) -> str:
    """Return a path as messages show it."""
    return "standard input" if str(path) == STDIN else str(path)


def format_suffix(path: str | Path) -> str:
    """Return the suffix before any .gz: "a.jsonl.gz" → ".jsonl"."""
    path = Path(path)
    return (Path(path.stem) if path.suffix.lower() == ".gz" else path).suffix.lower()


def read_lines(path: str | Path, reading: Reading = USUAL, bad: Bad = refuse) -> Iterator[Line]:
    """Stream the lines of a text file (or .gz, or "-")."""
    for where, raw in raw_lines(path, reading):
        try:
            yield Line(where, decode_line(raw, where), len(raw))
        except InputError as error:
            bad(error)


def raw_lines(path: str | Path, reading: Reading = USUAL) -> Iterator[tuple[str, bytes]]:
    """Stream the lines of a text file as UTF-8, each with its place."""
    with _opened(path, "line", reading) as (file, place):
        lines: Iterator[bytes] = iter(partial(file.readline, LONGEST_RECORD + 1), b"")
        if not reading.is_utf8:
            text = io.TextIOWrapper(file, reading.encoding, newline="\n")
            lines = (line.encode() for line in iter(partial(text.readline, LONGEST_RECORD + 1), ""))
        for raw in lines:
            place.number += 1
            refuse_endless(len(raw), str(place))
            yield str(place), raw


@dataclass
class _Place:
    """How far a file has been read."""

    name: str
    unit: str
    number: int = 0

    def __str__(self) -> str:
        return f"{self.name}, {self.unit} {self.number}"


@contextmanager
def _opened(path: str | Path, unit: str, reading: Reading) -> Iterator[tuple[IO[bytes], _Place]]:
    """Open a file; turn a read error into one line with its place."""
    place = _Place(shown_path(path), unit)
    try:
        with open_bytes(path) as file:
            yield file, place
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(
            f"{place.name}: the gzip data is cut off or damaged after {place.unit} {place.number} ({error}); "
            "copy the file again"
        ) from error
    except UnicodeError as error:
        raise InputError(
            f"{place.name}, after {place.unit} {place.number}: not {reading.encoding} "
            f"({getattr(error, 'reason', error)}); name the file's encoding with --encoding"
        ) from error
    except OSError as error:
        raise unreadable(f"{place.name}, after {place.unit} {place.number}", error) from error


def refuse_endless(size: int, where: str) -> None:
    """Fail with InputError if a record has more bytes than any document."""
    if size > LONGEST_RECORD:
        raise InputError(f"{where}: longer than {LONGEST_RECORD // 1_000_000} MB; split it, or check if it is text")


def decode_line(raw: bytes, where: str) -> str:
    """Decode a line, and drop its line break and a byte order mark."""
    return _decode(raw.removeprefix(codecs.BOM_UTF8), where).rstrip("\r\n")


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        raise InputError(
            f"{where}: not UTF-8 (byte 0x{bad:02x} at position {error.start + 1}); save the file as UTF-8, "
            "or give its encoding, as in --encoding latin-1"
        ) from error


def _read_jsonl(path: str | Path, reading: Reading, bad: Bad) -> Iterator[Record]:
    for line in read_lines(path, reading, bad):
        try:
            if line.text.strip():
                yield parse_json_line(line.text, line.where)
        except InputError as error:
            bad(error)


def parse_json_line(text: str, where: str) -> Record:
    """Parse one line into a record, or report what is wrong with it."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "too deep or too long"
        column = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise InputError(f"{where}{column}: not valid JSON ({reason}); each line must be one JSON object") from error
    if not isinstance(fields, dict):
        raise InputError(f"{where}: a JSON {type(fields).__name__}, not an object; write {{...}} with named fields")
    return Record(where, fields)


def _read_json(path: str | Path, reading: Reading, bad: Bad) -> Iterator[Record]:
    """Stream the objects of a JSON array, or objects one after another, as in JSONL."""
    with _opened(path, "item", reading) as (file, place):
        decoded = io.TextIOWrapper(file, "utf-8-sig" if reading.is_utf8 else reading.encoding)
        text = _JsonText(iter(partial(decoded.read, CHUNK), ""))
        in_array = text.takes("[")
        more = text.next_sign() not in (("]", "") if in_array else ("",))
        while more:
            place.number += 1
            fields = text.take_value(str(place))
            if isinstance(fields, dict):
                yield Record(str(place), fields)
            else:
                bad(InputError(f"{place}: a JSON {type(fields).__name__}, not an object; write {{...}} for each"))
            more = text.takes(",") if in_array else bool(text.next_sign())
        if in_array and not text.takes("]"):
            raise InputError(f"{place}: neither a comma nor the array's end follows; is the file cut off?")
        if text.next_sign():
            raise InputError(f"{place}: something follows the array's end; a .json file holds one array of objects")


class _JsonText:
    """A long JSON text, read in chunks that are dropped once parsed."""

    def __init__(self, chunks: Iterator[str]) -> None:
        self._chunks = chunks
        self._text, self._place = "", 0

    def next_sign(self) -> str:
        """Return the next non-blank character; an empty string at the end."""
        while True:
            self._place = BLANKS.match(self._text, self._place).end()  # type: ignore[union-attr]
            if self._place < len(self._text) or not self._take_in_more():
                return self._text[self._place : self._place + 1]

    def takes(self, sign: str) -> bool:
        """Skip the next character if it is this one."""
        found = self.next_sign() == sign
        self._place += found
        return found

    def take_value(self, where: str) -> Any:
        """Parse the next value, move past it, and return it."""
        self.next_sign()
        while True:
            try:
                value, self._place = json.JSONDecoder().raw_decode(self._text, self._place)
                return value
            except (ValueError, RecursionError) as error:  # the value may continue in the next chunk
                refuse_endless(len(self._text) - self._place, where)
                if not isinstance(error, json.JSONDecodeError) or not self._take_in_more():
                    reason = error.msg if isinstance(error, json.JSONDecodeError) else "too deep or too long"
                    raise InputError(f"{where}: not valid JSON ({reason}); correct it, or is it cut off?") from error

    def _take_in_more(self) -> bool:
        """Double the text in memory, so that retries stay rare; False at the end."""
        rest = self._text[self._place :]
        pieces, size = [rest], 0
        while size <= len(rest) and (piece := next(self._chunks, "")):
            pieces.append(piece)
            size += len(piece)
        self._text, self._place = "".join(pieces), 0
        return size > 0


def _read_csv(path: str | Path, reading: Reading, bad: Bad) -> Iterator[Record]:
    """Stream the rows of a CSV file; quotes protect delimiters and line breaks."""
    delimiter = reading.delimiter
    if delimiter is None:
        header = next((_decode(raw, where) for where, raw in raw_lines(path, reading) if raw.strip()), "")
        delimiter = max(DELIMITERS, key="".join(header.split('"')[::2]).count)  # outside of quotes
        if delimiter != ",":
            logger.info("%s: cells are separated by %r (--delimiter names another)", path, delimiter)
    name = {",": "a comma", ";": "a semicolon", "\t": "a tab"}.get(delimiter, repr(delimiter))
    return _name_cells(_csv_rows(path, reading, delimiter), f"quote a cell that holds {name}", bad)


def _read_tsv(path: str | Path, reading: Reading, bad: Bad) -> Iterator[Record]:
    """Stream the rows of a TSV file, in which a quote is just a quote."""
    delimiter, lines = reading.delimiter or "\t", read_lines(path, reading, bad)
    rows = ((line.where, line.text.split(delimiter)) for line in lines if line.text.strip())
    return _name_cells(rows, "a cell cannot hold a tab or a line break", bad)


def _csv_rows(path: str | Path, reading: Reading, delimiter: str) -> Iterator[tuple[str, list[str]]]:
    """Stream the rows that are not empty, each with the place of its first line."""
    csv.field_size_limit(2**31 - 1)  # the default limit is 128 KiB, and documents may be longer
    size, mark = 0, codecs.BOM_UTF8  # bytes of the row; the byte order mark, dropped from the first line only

    def lines() -> Iterator[str]:
        nonlocal size, mark
        for where, raw in raw_lines(path, reading):
            size += len(raw)
            refuse_endless(size, where)
            yield _decode(raw.removeprefix(mark), where)
            mark = b""

    rows, first_line = csv.reader(lines(), delimiter=delimiter, strict=True), 1
    try:
        for row in rows:
            if row:
                yield f"{path}, line {first_line}", row
            first_line, size = rows.line_num + 1, 0
    except csv.Error as error:
        raise InputError(f"{path}, line {first_line}: not valid CSV ({error}); check the quotes of this row") from error


def _name_cells(rows: Iterator[tuple[str, list[str]]], remedy: str, bad: Bad) -> Iterator[Record]:
    """Make records from rows; the first row names the columns."""
    where, header = next(rows, ("", []))
    if len(set(header)) < len(header):
        raise InputError(f"{where}: a column name occurs twice in {header}; rename one")
    for where, row in rows:
        if len(row) == len(header):
            yield Record(where, dict(zip(header, row, strict=True)))
        else:
            bad(InputError(f"{where}: the row has {len(row)} cells, the header {len(header)}; {remedy}"))


def _read_parquet(path: str | Path, reading: Reading, bad: Bad) -> Iterator[Record]:
    with needs_extra("parquet", f"{path}: reading Parquet"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    _refuse_special(path)
    try:
        with pq.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches(batch_size=ROWS_AT_ONCE) for row in batch.to_pylist())
            for number, fields in enumerate(rows, start=1):
                where = f"{path}, row {number}"
                refuse_endless(sum(len(value) for value in fields.values() if isinstance(value, str)), where)
                yield Record(where, fields)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = one_line(error)
        raise InputError(f"{path}: not a readable Parquet file ({reason}); check it or write it again") from error


def unreadable(path: str | Path, error: OSError) -> InputError:
    """Return the error for a file or folder that the system refuses to open."""
    return InputError(f"{shown_path(path)}: cannot be read ({error.strerror}); check the path and its permissions")


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
    """Fail unless a path is a regular file: a pipe or device may never end."""
    try:
        mode = Path(path).stat().st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as error:
        raise unreadable(path, error) from error
    if not stat.S_ISREG(mode):
        raise InputError(f"{path}: is a pipe or a device, not a file; to read it, give - and redirect it to stdin")


_READERS: dict[str, Callable[[str | Path, Reading, Bad], Iterator[Record]]] = {
    **dict.fromkeys(JSONL_SUFFIXES, _read_jsonl),
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
}


# ------------------------------------------------------------------------------------------------- documents


class Fields(NamedTuple):
    """The names of the fields to read from a record."""

    ids: tuple[str, ...] = ID_FIELDS  # the first one with a value is the id; empty if rows are numbered
    title: str = "title"  # may be missing
    text: str = "text"


def choose_fields(
    names: Collection[str],
    source: str,
    reading: Reading = USUAL,
    usual: Sequence[Sequence[str]] = (ID_NAMES, TITLE_NAMES, TEXT_NAMES),
) -> Fields:
    """Choose the fields to read, and log names that are not the standard ones.

    Names given in `reading` come first, then the standard names, then the `usual` ones.

    >>> choose_fields(["DOCNO", "Headline", "body"], "docs.csv")
    Fields(ids=('DOCNO',), title='Headline', text='body')
    """
    if reading.remembered and not {reading.id_field, reading.text_field} - {None} <= set(names):
        reading = USUAL
    taken = (reading.id_field, reading.title_field, reading.text_field)
    free = [name for name in names if isinstance(name, str) and name not in taken]
    spelled = {"".join(filter(str.isalnum, name)).lower(): name for name in reversed(free)}
    id_name, title, text = (next((spelled[name] for name in each if name in spelled), None) for each in usual)
    ids: tuple[str, ...] = ID_FIELDS
    if reading.row_ids:
        ids = ()
    elif reading.id_field is not None:
        ids = (reading.id_field,)
    elif id_name is not None and not any(name in free for name in ID_FIELDS):
        ids = (id_name,)
    title = reading.title_field or ("title" if "title" in free else title or "title")
    text = reading.text_field or ("text" if "text" in free else text or "text")
    chosen = {"id": " or ".join(ids), "title": title, "text": text}
    others = [f"the {what} from {field!r}" for what, field in chosen.items() if field not in (what, "_id or id", "")]
    if others:
        logger.info("%s: taking %s", source, ", ".join(others))
    return Fields(ids, title, text)


def parse_document(record: Record, fields: Fields | None = None, row: int = 0) -> Document:
    """Make a document of a record; other fields become metadata."""
    ids, title_field, text_field = fields or Fields()
    where, rest = record.where, dict(record.fields)
    doc_id = take_id(rest, where, ids) if ids else str(row)
    if title_field in ids:  # one field may be both id and title
        rest[title_field] = doc_id
    text = take_string(rest, text_field, where)
    if text is None:
        raise InputError(
            f"{where}: document {doc_id!r} has no text (found: {list_names(record.fields)}); "
            + (_if_one_column(record.fields) or f"name the field {text_field!r}, or say --fields text=NAME")
        )
    title = take_string(rest, title_field, where) or ""
    nested = rest.pop("metadata", None)
    if isinstance(nested, dict):  # BEIR nests extra fields in the field `metadata`
        rest = {**nested, **rest}
    elif nested is not None:
        rest["metadata"] = nested
    return Document(doc_id, text, title, rest)


def _if_one_column(names: Collection[Any]) -> str:
    """Return advice for a table whose header was read as a single name."""
    name = str(next(iter(names), ""))
    signs = re.findall(r"[^\w\s.()-]", name)
    return f"name the separator of cells, as in --delimiter '{signs[0]}'" if len(names) == 1 and signs else ""


def list_names(fields: Iterable[Any]) -> str:
    """List the fields of a record, for messages."""
    names = list(map(repr, fields))
    return ", ".join(names[:20]) + " …" * (len(names) > 20) if names else "no field"


def take_id(fields: dict[str, Any], where: str, names: Iterable[str] = ID_FIELDS, remedy: str = NO_ID) -> str:
    """Remove and return the id; an integer becomes a string of its digits."""
    found = dict.fromkeys(fields)
    for name in names:
        number = fields.get(name)
        if isinstance(number, int) and not isinstance(number, bool):
            fields[name] = str(number)
        value = take_string(fields, name, where)
        if value:
            return value
    raise InputError(f"{where}: no id (found: {list_names(found)}); {_if_one_column(found) or remedy}")


def take_string(fields: dict[str, Any], name: str, where: str) -> str | None:
    """Remove and return a field that must be a string, or None if it is missing."""
    value = fields.pop(name, None)
    if value is not None and not isinstance(value, str):
        raise InputError(f"{where}: the {name} is a {type(value).__name__}, not a string; quote it")
    if value is not None and not is_unicode(value):  # JSON can express half a surrogate pair, UTF-8 cannot
        raise InputError(f"{where}: the {name} holds half a surrogate pair (\\ud800…\\udfff); remove it")
    return value
