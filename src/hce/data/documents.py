"""Document, and how a record of a file is parsed into one."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from hce.data.records import Record
from hce.errors import InputError

ID_FIELDS = ("_id", "id")


@dataclass(frozen=True, slots=True)
class Document:
    """A text with an id. `title` may be empty; `metadata` holds all other fields of the source."""

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
        """One JSONL line, without the line break; metadata that JSON has no type for becomes a string."""
        fields = {"_id": self.id, "title": self.title, "text": self.text, "metadata": self.metadata}
        line = json.dumps(fields, ensure_ascii=False, default=str)
        return line.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair goes back to its JSON escape


def parse_document(record: Record) -> Document:
    """Make a document of a record: `_id` or `id`, `title`, `text`; other fields become metadata.

    Raises:
        InputError: no id, no field `text`, a field of the wrong type, or text that is no Unicode.
    """
    where, fields = record.where, dict(record.fields)
    doc_id = take_id(fields, where)
    text = take_string(fields, "text", where)
    if text is None:
        found = ", ".join(map(repr, fields)) or "no other field"
        raise InputError(f"{where}: document {doc_id!r} has no text (found: {found}); name the field 'text'")
    title = take_string(fields, "title", where) or ""
    nested = fields.pop("metadata", None)
    if isinstance(nested, dict):  # BEIR keeps extra fields one level down
        fields = {**nested, **fields}
    elif nested is not None:
        fields["metadata"] = nested
    return Document(doc_id, text, title, fields)


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


def take_string(fields: dict[str, Any], name: str, where: str) -> str | None:
    """Remove and return a field that must be a string; None where there is none."""
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
