"""Document, and how a record of a file is parsed into one."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hce.data.records import USUAL, Reading, Record
from hce.data.text import is_unicode
from hce.errors import InputError

logger = logging.getLogger(__name__)

ID_FIELDS = ("_id", "id")
# How else people call them, in the order in which they are looked for; case, spaces and signs do not count.
ID_NAMES = ("id", "docid", "docno", "documentid", "passageid", "articleid", "recordid", "pid", "uid", "uuid", "key")
TITLE_NAMES = ("title", "doctitle", "documenttitle", "headline", "heading")
TEXT_NAMES = ("text", "content", "contents", "body", "fulltext", "doctext", "passage", "abstract", "document")
NO_ID = "give each record a field '_id' or 'id', name its field (--fields id=NAME), or number the rows (--fields id=)"


@dataclass(frozen=True, slots=True)
class Document:
    """A text with an id. `title` may be empty.

    `metadata` holds all other fields of the source.
    """

    id: str
    text: str
    title: str = ""
    metadata: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def full_text(self) -> str:
        """What an encoder reads: title and text joined by a space, BEIR's convention."""
        return f"{self.title} {self.text}".strip()

    @property
    def is_empty(self) -> bool:
        """Whether title and text are both empty."""
        return not self.full_text

    def to_json(self) -> str:
        """Return one JSONL line, without the line break.

        Metadata that JSON has no type for becomes a string.
        """
        fields = {"_id": self.id, "title": self.title, "text": self.text, "metadata": self.metadata}
        line = json.dumps(fields, ensure_ascii=False, default=str)
        return line.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair goes back to its JSON escape


class Fields(NamedTuple):
    """Which fields of a record are read.

    Attributes:
        ids: the first of these that holds something is the id; none where documents are numbered.
        title: may be missing.
        text: must be there.
    """

    ids: tuple[str, ...] = ID_FIELDS
    title: str = "title"
    text: str = "text"


class DocumentParser:
    """Makes documents of the records of one source; the first record decides which fields are read.

    >>> parse = DocumentParser("docs.csv")
    >>> parse(Record("docs.csv, line 2", {"Doc ID": "7", "content": "red shoes", "year": "2024"}))
    Document(id='7', text='red shoes', title='', metadata={'year': '2024'})
    """

    def __init__(self, name: str, reading: Reading = USUAL) -> None:
        self._name = name
        self._reading = reading
        self._row = 0
        self.fields: Fields | None = None

    def __call__(self, record: Record) -> Document:
        """Parse the next record.

        Raises:
            InputError: as `parse_document`.
        """
        self._row += 1
        if self.fields is None:
            self.fields = choose_fields(record.fields, self._reading)
            tell_guesses(self._name, self.fields)
        return parse_document(record, self.fields, self._row)


def choose_fields(
    names: Collection[str],
    reading: Reading = USUAL,
    id_names: Iterable[str] = ID_NAMES,
    text_names: Iterable[str] = TEXT_NAMES,
) -> Fields:
    """Choose the fields to read: those that were named, or fields with the proper names, or with usual ones.

    >>> choose_fields(["DOCNO", "Headline", "body"])
    Fields(ids=('DOCNO',), title='Headline', text='body')
    """
    if reading.remembered and not {reading.id_field, reading.text_field} - {None} <= set(names):
        reading = USUAL
    taken = (reading.id_field, reading.title_field, reading.text_field)
    free = [name for name in names if isinstance(name, str) and name not in taken]
    ids: tuple[str, ...] = ID_FIELDS
    if reading.row_ids:
        ids = ()
    elif reading.id_field is not None:
        ids = (reading.id_field,)
    elif not any(name in free for name in ID_FIELDS):
        guessed = _guess(free, id_names)
        ids = (guessed,) if guessed else ID_FIELDS
    title = reading.title_field or _proper(free, "title", TITLE_NAMES)
    return Fields(ids, title, reading.text_field or _proper(free, "text", text_names))


def _proper(free: list[str], name: str, usual: Iterable[str]) -> str:
    return name if name in free else _guess(free, usual) or name


def _guess(free: list[str], usual: Iterable[str]) -> str | None:
    spelled: dict[str, str] = {}
    for name in free:
        spelled.setdefault("".join(filter(str.isalnum, name)).lower(), name)
    return next((spelled[name] for name in usual if name in spelled), None)


def tell_guesses(name: str, fields: Fields) -> None:
    """Report which fields are read, unless they have the documented names."""
    chosen = {"id": " or ".join(fields.ids), "title": fields.title, "text": fields.text}
    others = [f"the {what} from {field!r}" for what, field in chosen.items() if field not in (what, "_id or id", "")]
    if others:
        logger.info("%s: taking %s", name, ", ".join(others))


def parse_document(record: Record, fields: Fields | None = None, row: int = 0) -> Document:
    """Make a document of a record; fields other than id, title and text become metadata, and `row` may be the id.

    Raises:
        InputError: no id, no text, a field of the wrong type, or text that is no Unicode.
    """
    ids, title_field, text_field = fields or Fields()
    where, rest = record.where, dict(record.fields)
    doc_id = take_id(rest, where, ids) if ids else str(row)
    if title_field in ids:  # one field may be both
        rest[title_field] = doc_id
    text = take_string(rest, text_field, where)
    if text is None:
        raise InputError(
            f"{where}: document {doc_id!r} has no text (found: {list_names(record.fields)}); "
            + (_if_one_column(record.fields) or f"name the field {text_field!r}, or say --fields text=NAME")
        )
    title = take_string(rest, title_field, where) or ""
    nested = rest.pop("metadata", None)
    if isinstance(nested, dict):  # BEIR keeps extra fields one level down
        rest = {**nested, **rest}
    elif nested is not None:
        rest["metadata"] = nested
    return Document(doc_id, text, title, rest)


def _if_one_column(names: Collection[Any]) -> str:
    """Return advice for a table whose header was read as one name with a sign in it."""
    name = str(next(iter(names), ""))
    signs = re.findall(r"[^\w\s.()-]", name)
    return f"name what separates the cells, as in --delimiter '{signs[0]}'" if len(names) == 1 and signs else ""


def list_names(fields: Iterable[Any]) -> str:
    """Name the fields of a record, for messages."""
    names = list(map(repr, fields))
    return ", ".join(names[:20]) + " …" * (len(names) > 20) if names else "no field"


def take_id(fields: dict[str, Any], where: str, names: Iterable[str] = ID_FIELDS, remedy: str = NO_ID) -> str:
    """Remove and return the id; an integer becomes its digits."""
    found = dict.fromkeys(fields)
    for name in names:
        value = fields.pop(name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if value is None or value == "":
            continue
        if not isinstance(value, str):
            raise InputError(f"{where}: the {name} is a {type(value).__name__}, not a string; quote it")
        return _unicode(value, name, where)
    raise InputError(f"{where}: no id (found: {list_names(found)}); {_if_one_column(found) or remedy}")


def take_string(fields: dict[str, Any], name: str, where: str) -> str | None:
    """Remove and return a field that must be a string; None where there is none."""
    value = fields.pop(name, None)
    if value is not None and not isinstance(value, str):
        raise InputError(f"{where}: the {name} is a {type(value).__name__}, not a string; quote it")
    return value if value is None else _unicode(value, name, where)


def _unicode(value: str, name: str, where: str) -> str:
    """Refuse what JSON can spell and UTF-8 cannot: half of a surrogate pair."""
    if not is_unicode(value):
        raise InputError(f"{where}: the {name} holds half a surrogate pair (\\ud800…\\udfff); remove it")
    return value
