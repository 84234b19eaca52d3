"""Document, and the parsing of a file's records into documents."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hce.data.records import USUAL, Reading, Record
from hce.data.text import is_unicode
from hce.errors import InputError

logger = logging.getLogger(__name__)

ID_FIELDS = ("_id", "id")
# Other common names, in the order of search; case, spaces and punctuation do not count.
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

        A metadata value without a JSON type becomes a string.
        """
        fields = {"_id": self.id, "title": self.title, "text": self.text, "metadata": self.metadata}
        line = json.dumps(fields, ensure_ascii=False, default=str)
        return line.encode("utf-8", "backslashreplace").decode()  # writes half a surrogate pair as its JSON escape


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
    if isinstance(nested, dict):  # BEIR nests extra fields in this one
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
    if value is not None and not is_unicode(value):  # JSON can express it, UTF-8 cannot
        raise InputError(f"{where}: the {name} holds half a surrogate pair (\\ud800…\\udfff); remove it")
    return value
