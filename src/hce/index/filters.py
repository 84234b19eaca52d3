"""Filters on metadata: a value, one of several, none of several, or a range; given as mappings or `field>=value`.

A filter is compiled to SQL. Values and names of fields reach SQLite as bound parameters only.

A value is compared with values of its own type: the number 7 is not the text "7", and 1 is not true. A range between
numbers also matches texts that spell a number, since every cell of a CSV file is text. A list matches if one of its
elements does. The value None matches a field that is missing or null. A condition `ne` also matches if the field is
missing. A dot leads into a nested field, `meta.year`, unless a document has a field with exactly that name.
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
"""Field → value, list of values, range, or excluded values:
`{"lang": "en", "tag": ["a", "b"], "year": {"gte": 2000, "lt": 2010}, "kind": {"ne": ["memo", "draft"]}}`."""

RANGE = {"gt": ">", "gte": ">=", "lt": "<", "lte": "<="}
NOT_EQUAL = "ne"
BOOLEANS = {"true": True, "false": False}
SCALARS = (str, int, float, bool, type(None))
MOST_VALUES = 30_000  # in all of a filter; SQLite takes 32,766 parameters
LARGEST_INTEGER = 2**63 - 1
MOST_FIELDS = 200  # SQLite limits the depth of an expression to 1,000
SIGNS = ("=", "!=", ">=", "<=", ">", "<", "in", "not in")
COMPARISON = re.compile("[=<>]")
SIGN = re.compile(r"[=<>!~]+|\s(?:not )?in\s")  # no \s* at its start, so that a search takes one pass
JOINED = re.compile(r"\s(or|and|\|\||&&)\s", re.IGNORECASE)
SAMPLE = 1000  # documents to read for a list of fields


class Condition(NamedTuple):
    """An SQL condition, its parameters, the fields it names, and those that a matching document may lack."""

    sql: str
    parameters: dict[str, Any]
    fields: tuple[str, ...]
    loose: tuple[str, ...]


def parse_clauses(clauses: Iterable[str]) -> dict[str, Any]:
    """Parse conditions such as 'lang=en', 'year>=2000', 'tag in a,b', 'kind!=memo'.

    >>> parse_clauses(["year>=2000", "year<2010", "lang in en,fr", "kind not in memo,draft", "meta.open=true"])
    {'year': {'gte': 2000, 'lt': 2010}, 'lang': ['en', 'fr'], 'kind': {'ne': ['memo', 'draft']}, \
'meta.open': ['true', True]}

    Raises:
        InputError: a clause is none of these, or two clauses for one field cannot be combined.
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
    """Split a clause at its first operator into field, operator and value."""
    clause = clause.lstrip()  # after a blank, a field named "in" would be taken for the operator
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
    if joined and (SIGN if sign.endswith("in") else COMPARISON).search(value, joined.end()):  # a value may contain "or"
        raise InputError(
            f"condition {clause!r}: give one condition at a time, without {joined[1]!r}; a document must match all of "
            f"them, and '{field} in a,b' matches either value"
        )
    return field, sign, value


def compile_filter(conditions: Filter) -> Condition:
    """Compile a filter to SQL over the column `metadata`; InputError if invalid."""
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
    """Split a condition into excluded values and the rest, each None if missing."""
    if not isinstance(wanted, Mapping) or NOT_EQUAL not in wanted:
        return None, _listed(wanted) if not isinstance(wanted, Mapping) else wanted
    rest = {name: end for name, end in wanted.items() if name != NOT_EQUAL}
    return _listed(wanted[NOT_EQUAL]), rest or None


def _listed(values: Any) -> list[Any]:
    return list(values) if isinstance(values, (list, tuple, set, frozenset)) else [values]


def field_exists(field: str) -> Condition:
    """Return the condition that a document has a field, even if it holds null."""
    parameters = _Parameters()
    kind = _Place.of(field, parameters).kind
    return Condition(f"{kind} IS NOT NULL", parameters, (field,), ())


def facet_query(field: str, conditions: Filter | None, most: int) -> Condition:
    """Return the statement that counts documents by a field's values, most first.

    A row has a value, its kind ('bool' or 'other'), and the number of documents. Each element of a list counts once.
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
    """A field of the metadata in some documents."""

    name: str  # to use in a condition
    documents: int  # how many have a value
    values: int  # how many different ones there are; each element of a list is one
    example: str | int | float | bool  # the first value
    least: int | float | None  # None unless all values are numbers
    most: int | float | None


def summarize_fields(metadata: Iterable[Mapping[str, Any]]) -> list[FieldSummary]:
    """Summarize the fields of documents, in order of appearance; skip empty ones.

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
    """List the fields of documents alphabetically; nested names have dots.

    >>> field_names([{"lang": "en", "meta": {"year": 2001}}, {"tags": ["a"]}])
    ['lang', 'meta.year', 'tags']
    """
    return sorted({name for each in metadata for name, _ in _values_in(each, "")})


class _Place(NamedTuple):
    """SQL for a field in a document's metadata: its JSON path, and the JSON type of its value, or NULL."""

    path: str
    kind: str

    @classmethod
    def of(cls, field: str, parameters: _Parameters) -> _Place:
        """Refer to a field by its full name, or else by the names between its dots."""
        path = parameters.add(_path([field]))
        if "." not in field:
            return cls(path, f"json_type(metadata, {path})")
        nested = parameters.add(_path(field.split(".")))
        either = f"CASE WHEN json_type(metadata, {path}) IS NULL THEN {nested} ELSE {path} END"
        return cls(either, f"json_type(metadata, {either})")

    def holds(self, test: Callable[[str, str], str]) -> str:
        """Return the SQL that tests the field, or any element if it holds a list."""
        of_element, of_value = test("atom", "type"), test(f"json_extract(metadata, {self.path})", self.kind)
        elements = f"SELECT 1 FROM json_each(metadata, {self.path}) WHERE {of_element}"  # noqa: S608  no values in it
        return f"(CASE {self.kind} WHEN 'object' THEN 0 WHEN 'array' THEN EXISTS ({elements}) ELSE {of_value} END)"


class _Parameters(dict[str, Any]):
    """The parameters of a statement: name → value."""

    def add(self, value: Any) -> str:
        """Add a value; an integer too large for SQLite becomes the nearest float."""
        if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
            try:
                value = float(value)
            except OverflowError:
                value = math.inf if value > 0 else -math.inf
        if isinstance(value, str) and not is_unicode(value):
            raise InputError(f"value {value!r}: it has half a surrogate pair, which cannot be searched for")
        name = f"p{len(self)}"
        self[name] = value
        return f":{name}"


def _path(names: list[str]) -> str:
    for name in names:
        if not isinstance(name, str) or any(sign in name for sign in '"\\') or not name.isprintable():
            raise InputError(f"field {name!r}: a filter takes only fields without quotes and backslashes")
    return "$" + "".join(f'."{name}"' for name in names)


def _equality_test(field: str, values: list[Any], parameters: _Parameters) -> Callable[[str, str], str]:
    """Return a function: SQL for a value and SQL for its type → SQL of the test."""
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
        raise InputError(
            f"field {field!r}: a range is made of {', '.join(RANGE)}, not of {list(ends)}; ne excludes values"
        )
    texts = {isinstance(end, str) for end in ends.values()}
    if len(texts) > 1 or not all(isinstance(end, (str, int, float)) for end in ends.values()):
        raise InputError(f"field {field!r}: the ends of a range are both numbers or both texts, not {dict(ends)}")
    if True in texts:
        compared = [f"{RANGE[name]} {parameters.add(end)}" for name, end in ends.items()]
        return lambda value, _: (
            f"(typeof({value}) = 'text'" + "".join(f" AND {value} {each}" for each in compared) + ")"
        )
    # In a comparison with a numeric CAST, SQLite converts texts that spell a number. Any other text sorts above all
    # numbers, infinity included, so an upper bound of infinity excludes it.
    compared = [f"{RANGE[name]} CAST({parameters.add(end)} AS NUMERIC)" for name, end in ends.items()]
    compared.append("<= CAST(9e999 AS NUMERIC)")
    return lambda value, kind: (
        f"({kind} NOT IN ('true', 'false')" + "".join(f" AND {value} {each}" for each in compared) + ")"
    )


def _wanted(sign: str, value: str) -> dict[str, Any] | list[Any]:
    """Convert a condition of the command line to an end of a range, or to values."""
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
    """Return a text, and the number or truth value that it spells, if any."""
    if text.lower() in BOOLEANS:
        return [text, BOOLEANS[text.lower()]]
    number = _number_or_text(text)
    return [text] if isinstance(number, str) else [text, number]
