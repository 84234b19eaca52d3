"""Filters on metadata: equality, one of several, none of them, ranges; from mappings or `field>=value`, to SQL.

Values and names of fields reach SQLite as bound parameters only.

A value is compared with values of its own kind: the number 7 is not the text "7", nor 1 true. A range between numbers
also takes texts that spell a number, since every cell of a CSV file is text. Of a list, one fitting element is enough.
None means that the field is missing or null. A condition `ne` also holds if the field is missing. A field within a
field is named with a dot, `meta.year`, unless a document has a field of just that name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hce.data.text import is_unicode
from hce.errors import InputError

Filter = Mapping[str, Any]
"""Field → value, list of values, range, or what it must not be:
`{"lang": "en", "tag": ["a", "b"], "year": {"gte": 2000, "lt": 2010}, "kind": {"ne": ["memo", "draft"]}}`."""

RANGE = {"gt": ">", "gte": ">=", "lt": "<", "lte": "<="}
NOT_EQUAL = "ne"
BOOLEANS = {"true": True, "false": False}
SCALARS = (str, int, float, bool, type(None))
MOST_VALUES = 30_000  # in all of a filter; SQLite takes 32,766 parameters
LARGEST_INTEGER = 2**63 - 1
MOST_FIELDS = 200  # SQLite takes a depth of 1,000 in a statement
SIGNS = ("=", "!=", ">=", "<=", ">", "<", "in", "not in")
COMPARISON = re.compile("[=<>]")
SIGN = re.compile(r"[=<>!~]+|\s(?:not )?in\s")  # without a choice of where to begin, so that a search takes one pass
JOINED = re.compile(r"\s(or|and|\|\||&&)\s", re.IGNORECASE)
SAMPLE = 1000  # documents whose fields are named to who asks for an unknown one


class Condition(NamedTuple):
    """The part of an SQL statement after WHERE, its parameters, its fields, and those that may be missing."""

    sql: str
    parameters: dict[str, Any]
    fields: tuple[str, ...]
    loose: tuple[str, ...]


def parse_clauses(clauses: Iterable[str]) -> dict[str, Any]:
    """Read conditions such as 'lang=en', 'year>=2000', 'tag in a,b', 'kind!=memo'.

    >>> parse_clauses(["year>=2000", "year<2010", "lang in en,fr", "kind not in memo,draft", "meta.open=true"])
    {'year': {'gte': 2000, 'lt': 2010}, 'lang': ['en', 'fr'], 'kind': {'ne': ['memo', 'draft']}, \
'meta.open': ['true', True]}

    Raises:
        InputError: a clause that is none of these, or two for one field that do not go together.
    """
    conditions: dict[str, Any] = {}
    for clause in clauses:
        field, sign, value = _parts(clause)
        wanted, earlier = _wanted(sign, value), conditions.get(field)
        if earlier is None:
            conditions[field] = wanted
            continue
        if isinstance(earlier, dict) and isinstance(wanted, dict) and NOT_EQUAL in wanted:
            wanted = {NOT_EQUAL: earlier.pop(NOT_EQUAL, []) + wanted[NOT_EQUAL]}
        if not isinstance(earlier, dict) or not isinstance(wanted, dict) or earlier.keys() & wanted.keys():
            raise InputError(f"condition {clause!r}: the field {field!r} has such a condition already; give one")
        earlier.update(wanted)
    return conditions


def _parts(clause: str) -> tuple[str, str, str]:
    """Split a clause at its first sign into field, sign and value, in one pass."""
    found = SIGN.search(clause)
    field, sign = (clause[: found.start()].strip(), found[0].strip()) if found else ("", "")
    if found is None or sign not in SIGNS or not field:
        unknown = f"there is no {sign[:9]!r}; " if field and sign not in SIGNS else ""
        raise InputError(
            f"condition {clause!r}: {unknown}write field=value (or !=, >=, <=, >, <), "
            "'field in a,b' or 'field not in a,b'"
        )
    value = clause[found.end() :].strip()
    joined = JOINED.search(value)
    if joined and (SIGN if sign.endswith("in") else COMPARISON).search(value, joined.end()):  # and no text with an "or"
        raise InputError(
            f"condition {clause!r}: give one condition at a time, without {joined[1]!r}; all that are given must hold, "
            f"and '{field} in a,b' holds for either value"
        )
    return field, sign, value


def compile_filter(conditions: Filter) -> Condition:
    """Turn a filter into SQL over the column `metadata`; InputError if not valid."""
    if not isinstance(conditions, Mapping):
        raise InputError(f"a filter is a mapping of fields to values, not a {type(conditions).__name__}")
    if len(conditions) > MOST_FIELDS:
        raise InputError(f"a filter on {len(conditions):,} fields is too much; {MOST_FIELDS:,} at most")
    parts, parameters, loose = ["1"], _Parameters(), []
    for field, wanted in conditions.items():
        place = _Place.of(field, parameters)
        unwanted, rest = _split(wanted)
        if unwanted is not None:
            parts.append(f"NOT {place.holds(_equality_test(field, unwanted, parameters))}")
        if rest is not None:
            test = (_range_test if isinstance(rest, Mapping) else _equality_test)(field, rest, parameters)
            parts.append(place.holds(test))
        if (unwanted is not None and rest is None) or None in _listed(rest):
            loose.append(field)
    return Condition(" AND ".join(parts), parameters, tuple(conditions), tuple(loose))


def _split(wanted: Any) -> tuple[list[Any] | None, Any]:
    """Return the values that a field must not have, and what else is asked, or None."""
    if not isinstance(wanted, Mapping) or NOT_EQUAL not in wanted:
        return None, _listed(wanted) if not isinstance(wanted, Mapping) else wanted
    rest = {name: end for name, end in wanted.items() if name != NOT_EQUAL}
    return _listed(wanted[NOT_EQUAL]), rest or None


def _listed(values: Any) -> list[Any]:
    return list(values) if isinstance(values, (list, tuple, set, frozenset)) else [values]


def field_exists(field: str) -> Condition:
    """Return the condition that a document has a field, if only with null in it."""
    parameters = _Parameters()
    kind = _Place.of(field, parameters).kind
    return Condition(f"{kind} IS NOT NULL", parameters, (field,), ())


def facet_query(field: str, conditions: Filter | None, most: int) -> Condition:
    """Return the statement that counts documents by a field's values, most first.

    Its rows are a value, the JSON type of it, and how many documents have it. Of a list, each element counts once.
    """
    condition = compile_filter(conditions or {})
    parameters = _Parameters(condition.parameters)
    place = _Place.of(field, parameters)
    limit = parameters.add(min(most, LARGEST_INTEGER))
    statement = (
        f"SELECT atom, CASE type WHEN 'true' THEN 'bool' WHEN 'false' THEN 'bool' ELSE 'other' END AS kind, "  # noqa: S608
        f"count(DISTINCT number) AS documents FROM documents, json_each(metadata, {place.path}) "
        f"WHERE {condition.sql} AND {place.kind} <> 'object' AND type NOT IN ('object', 'array', 'null') "
        f"GROUP BY kind, atom ORDER BY documents DESC, atom LIMIT {limit}"
    )
    return Condition(statement, parameters, (*condition.fields, field), ())


@dataclass(frozen=True)
class FieldSummary:
    """A field of the metadata in some documents.

    Attributes:
        name: as a condition names it.
        documents: how many have a value.
        values: how many different values there are; of a list, each element is one.
        example: a value.
        least: the smallest value, if all are numbers.
        most: the largest one.
    """

    name: str
    documents: int
    values: int
    example: str | int | float | bool
    least: int | float | None
    most: int | float | None


def summarize_fields(metadata: Iterable[Mapping[str, Any]]) -> list[FieldSummary]:
    """Summarize the fields of some documents, in order, without empty ones.

    >>> rows = [{"lang": "en", "meta": {"year": 2001}}, {"lang": "en", "meta": {"year": 1999}, "note": None}]
    >>> [(each.name, each.documents, each.values, each.least) for each in summarize_fields(rows)]
    [('lang', 2, 1, None), ('meta.year', 2, 2, 1999)]
    """
    found: dict[str, list[list[Any]]] = {}
    for each in metadata:
        for name, value in _values_in(each, ""):
            listed = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, SCALARS)]
            if listed := [item for item in listed if item is not None]:
                found.setdefault(name, []).append(listed)
    summaries = []
    for name, values in found.items():
        every = [item for listed in values for item in listed]
        numeric = all(isinstance(item, int | float) and not isinstance(item, bool) for item in every)
        ends = (min(every), max(every)) if numeric else (None, None)
        different = {(type(item), item) for item in every}
        summaries.append(FieldSummary(name, len(values), len(different), every[0], *ends))
    return summaries


def _values_in(fields: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, dict) and value:
            yield from _values_in(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def field_names(metadata: Iterable[Mapping[str, Any]]) -> list[str]:
    """Name the fields of documents in alphabetical order, nested ones with a dot.

    >>> field_names([{"lang": "en", "meta": {"year": 2001}}, {"tags": ["a"]}])
    ['lang', 'meta.year', 'tags']
    """
    return sorted({name for each in metadata for name, _ in _values_in(each, "")})


class _Place(NamedTuple):
    """The JSON path of a field in a document's metadata and the JSON type of what is there, or NULL, as SQL."""

    path: str
    kind: str

    @classmethod
    def of(cls, field: str, parameters: _Parameters) -> _Place:
        """Refer to a field by its name, or, with dots, by its way down."""
        path = parameters.add(_path([field]))
        if "." not in field:
            return cls(path, f"json_type(metadata, {path})")
        nested = parameters.add(_path(field.split(".")))
        either = f"CASE WHEN json_type(metadata, {path}) IS NULL THEN {nested} ELSE {path} END"
        return cls(either, f"json_type(metadata, {either})")

    def holds(self, test: Callable[[str, str], str]) -> str:
        """Return the SQL test for the field, or for one element of a list in it."""
        of_element, of_value = test("atom", "type"), test(f"json_extract(metadata, {self.path})", self.kind)
        elements = f"SELECT 1 FROM json_each(metadata, {self.path}) WHERE {of_element}"  # noqa: S608  no values in it
        return f"(CASE {self.kind} WHEN 'object' THEN 0 WHEN 'array' THEN EXISTS ({elements}) ELSE {of_value} END)"


class _Parameters(dict[str, Any]):
    """Values by the names under which a statement refers to them."""

    def add(self, value: Any) -> str:
        """Add a value as SQLite takes it: a larger integer as the nearest float."""
        if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
            try:
                value = float(value)
            except OverflowError:
                value = math.inf if value > 0 else -math.inf
        if isinstance(value, str) and not is_unicode(value):
            raise InputError(f"value {value!r}: it has half a surrogate pair, which cannot be looked for")
        name = f"p{len(self)}"
        self[name] = value
        return f":{name}"


def _path(names: list[str]) -> str:
    for name in names:
        if not isinstance(name, str) or any(sign in name for sign in '"\\') or not name.isprintable():
            raise InputError(f"field {name!r}: only fields without quotes and backslashes can be filtered by")
    return "$" + "".join(f'."{name}"' for name in names)


def _equality_test(field: str, values: list[Any], parameters: _Parameters) -> Callable[[str, str], str]:
    """Return the SQL test that a value of a type is one of these, as a function."""
    for value in values:
        if not isinstance(value, SCALARS):
            raise InputError(f"field {field!r}: cannot be compared with a {type(value).__name__}; give text or numbers")
    if len(parameters) + len(values) > MOST_VALUES:
        raise InputError(f"field {field!r}: {len(values):,} values are too many; {MOST_VALUES:,} at most in a filter")
    plain = [value for value in values if value is not None and not isinstance(value, bool)]
    names = ", ".join(parameters.add(value) for value in plain)
    booleans = ", ".join(f"'{name}'" for name, value in BOOLEANS.items() if any(each is value for each in values))
    missing = " OR {0} IS NULL" if None in values else ""
    return lambda value, kind: (
        f"(coalesce({value} IN ({names}) AND {kind} NOT IN ('true', 'false') OR {kind} IN ({booleans}), 0)"
        f"{missing.format(value)})"
    )


def _range_test(field: str, ends: Mapping[str, Any], parameters: _Parameters) -> Callable[[str, str], str]:
    if not ends or any(name not in RANGE for name in ends):
        raise InputError(f"field {field!r}: a range is made of {', '.join(RANGE)}, not of {list(ends)}; ne excludes")
    texts = {isinstance(end, str) for end in ends.values()}
    if len(texts) > 1 or not all(isinstance(end, (str, int, float)) for end in ends.values()):
        raise InputError(f"field {field!r}: the ends of a range are both numbers or both texts, not {dict(ends)}")
    if True in texts:
        compared = [f"{RANGE[name]} {parameters.add(end)}" for name, end in ends.items()]
        return lambda value, _: (
            f"(typeof({value}) = 'text'" + "".join(f" AND {value} {each}" for each in compared) + ")"
        )
    # Next to a numeric CAST, SQLite reads a text that spells a number as that number. Any other text is above all
    # numbers, infinity included, and so is left out.
    compared = [f"{RANGE[name]} CAST({parameters.add(end)} AS NUMERIC)" for name, end in ends.items()]
    compared.append("<= CAST(9e999 AS NUMERIC)")
    return lambda value, kind: (
        f"({kind} NOT IN ('true', 'false')" + "".join(f" AND {value} {each}" for each in compared) + ")"
    )


def _wanted(sign: str, value: str) -> dict[str, Any] | list[Any]:
    """Read a condition of the command line: an end of a range, or values."""
    end = next((name for name, operator in RANGE.items() if operator == sign), None)
    if end is not None:
        return {end: _number_or_text(value)}
    spelled = value.split(",") if sign.endswith("in") else [value]
    values = [each for text in spelled for each in _spellings(text.strip())]
    return {NOT_EQUAL: values} if sign in ("!=", "not in") else values


def _number_or_text(text: str) -> float | int | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _spellings(text: str) -> list[Any]:
    """Return what a word may stand for: the text, a number or a truth value."""
    if text.lower() in BOOLEANS:
        return [text, BOOLEANS[text.lower()]]
    number = _number_or_text(text)
    return [text] if isinstance(number, str) else [text, number]
