"""Filters on metadata: equality, one of several, ranges; from Python mappings or `field>=value`, to SQL.

Values reach SQLite as bound parameters only, and so do the names of fields.

A value is compared with values of its own kind: the number 7 is not the text "7". A range between numbers also takes
texts that spell a number, since every cell of a CSV file is text. Where a document has a list in a field, one fitting
element is enough. None means that the field is missing or null.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from hce.errors import InputError

Filter = Mapping[str, Any]
"""Field → value, list of values, or range: `{"lang": "en", "tag": ["a", "b"], "year": {"gte": 2000, "lt": 2010}}`."""

RANGE = {"gt": ">", "gte": ">=", "lt": "<", "lte": "<="}
SCALARS = (str, int, float, bool, type(None))
MOST_VALUES = 30_000  # in all of a filter; SQLite takes 32,766 parameters
LARGEST_INTEGER = 2**63 - 1
MOST_FIELDS = 200  # SQLite takes a depth of 1,000 in a statement
SIGN = re.compile(r">=|<=|[=<>!]|\sin\s")  # of fixed lengths, so that a search for it takes one pass


class Condition(NamedTuple):
    """The part of an SQL statement after WHERE, and its named parameters."""

    sql: str
    parameters: dict[str, Any]


def parse_clauses(clauses: Iterable[str]) -> dict[str, Any]:
    """Read conditions as they are written on the command line: 'lang=en', 'year>=2000', 'tag in a,b'.

    >>> parse_clauses(["year>=2000", "year<2010", "lang in en,fr"])
    {'year': {'gte': 2000, 'lt': 2010}, 'lang': ['en', 'fr']}

    Raises:
        InputError: a clause that is none of these, or two for one field that are not the ends of a range.
    """
    conditions: dict[str, Any] = {}
    for clause in clauses:
        field, sign, value = _parts(clause)
        wanted, earlier = _wanted(sign, value), conditions.get(field)
        if earlier is None:
            conditions[field] = wanted
        elif isinstance(earlier, dict) and isinstance(wanted, dict) and not earlier.keys() & wanted.keys():
            earlier.update(wanted)
        else:
            raise InputError(f"condition {clause!r}: the field {field!r} has such a condition already; give one")
    return conditions


def _parts(clause: str) -> tuple[str, str, str]:
    """Split a clause at its first sign into field, sign and value, in one pass over it."""
    sign = SIGN.search(clause)
    field = clause[: sign.start()].strip() if sign else ""
    if sign is None or sign[0] == "!" or not field:
        raise InputError(f"condition {clause!r}: write field=value, field>=value (or >, <, <=), or 'field in a,b'")
    return field, sign[0].strip(), clause[sign.end() :].strip()


def compile_filter(conditions: Filter) -> Condition:
    """Turn a filter into SQL over the column `metadata`.

    Raises:
        InputError: a field or value that cannot be asked for.
    """
    if not isinstance(conditions, Mapping):
        raise InputError(f"a filter is a mapping of fields to values, not a {type(conditions).__name__}")
    if len(conditions) > MOST_FIELDS:
        raise InputError(f"a filter on {len(conditions):,} fields is too much; {MOST_FIELDS:,} at most")
    parts, parameters = ["1"], _Parameters()
    for field, wanted in conditions.items():
        path = parameters.add(_path(field))
        test = _test(field, wanted, parameters)
        parts.append(
            f"CASE json_type(metadata, {path}) WHEN 'object' THEN 0 "  # noqa: S608  placeholders, no values
            f"WHEN 'array' THEN EXISTS (SELECT 1 FROM json_each(metadata, {path}) WHERE {test('atom')}) "
            f"ELSE {test(f'json_extract(metadata, {path})')} END"
        )
    return Condition(" AND ".join(parts), parameters)


class _Parameters(dict[str, Any]):
    """Values by the names under which a statement refers to them."""

    def add(self, value: Any) -> str:
        name = f"p{len(self)}"
        self[name] = _bindable(value)
        return f":{name}"


def _bindable(value: Any) -> Any:
    """Return a value as SQLite takes it: integers beyond its own as the nearest float, infinity included."""
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    if isinstance(value, str) and not _is_unicode(value):
        raise InputError(f"value {value!r}: it has half a surrogate pair, which cannot be looked for")
    return value


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _path(field: str) -> str:
    if not isinstance(field, str) or any(sign in field for sign in '"\\') or not field.isprintable():
        raise InputError(f"field {field!r}: only fields without quotes and backslashes can be filtered by")
    return f'$."{field}"'


def _test(field: str, wanted: Any, parameters: _Parameters) -> Callable[[str], str]:
    """Return what must hold of a value, as a function from its SQL expression to the condition."""
    if isinstance(wanted, Mapping):
        return _range_test(field, wanted, parameters)
    values = list(wanted) if isinstance(wanted, (list, tuple, set, frozenset)) else [wanted]
    for value in values:
        if not isinstance(value, SCALARS):
            raise InputError(f"field {field!r}: cannot be compared with a {type(value).__name__}; give text or numbers")
    if len(parameters) + len(values) > MOST_VALUES:
        raise InputError(f"field {field!r}: {len(values):,} values are too many; {MOST_VALUES:,} at most in a filter")
    names = ", ".join(parameters.add(value) for value in values if value is not None)
    missing = " OR {0} IS NULL" if None in values else ""
    return lambda value: f"({value} IN ({names}){missing.format(value)})"


def _range_test(field: str, ends: Mapping[str, Any], parameters: _Parameters) -> Callable[[str], str]:
    if not ends or any(name not in RANGE for name in ends):
        raise InputError(f"field {field!r}: a range is made of {', '.join(RANGE)}, not of {list(ends)}")
    texts = {isinstance(end, str) for end in ends.values()}
    if len(texts) > 1 or not all(isinstance(end, (str, int, float)) for end in ends.values()):
        raise InputError(f"field {field!r}: the ends of a range are both numbers or both texts, not {dict(ends)}")
    if True in texts:
        compared = [f"{RANGE[name]} {parameters.add(end)}" for name, end in ends.items()]
        return lambda value: f"(typeof({value}) = 'text'" + "".join(f" AND {value} {each}" for each in compared) + ")"
    # Beside a numeric CAST, SQLite reads a text that spells a number as that number. Any other text is above all
    # numbers, infinity included, by which it is told and left out.
    compared = [f"{RANGE[name]} CAST({parameters.add(end)} AS NUMERIC)" for name, end in ends.items()]
    compared.append("<= CAST(9e999 AS NUMERIC)")
    return lambda value: "(" + " AND ".join(f"{value} {each}" for each in compared) + ")"


def _wanted(sign: str, value: str) -> dict[str, Any] | list[Any]:
    """Read a condition of the command line: one end of a range, or the values that will do."""
    end = next((name for name, operator in RANGE.items() if operator == sign), None)
    if end is not None:
        return {end: _number_or_text(value)}
    spelled = value.split(",") if sign == "in" else [value]
    return [each for text in spelled for each in _spellings(text.strip())]


def _number_or_text(text: str) -> float | int | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _spellings(text: str) -> list[Any]:
    """Return what a word on the command line may stand for: that text, and the number that it spells."""
    number = _number_or_text(text)
    return [text] if isinstance(number, str) else [text, number]
