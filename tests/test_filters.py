"""Filters as a stranger writes them: read in one pass, and never more than SQLite takes."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hce.errors import InputError
from hce.index.filters import MOST_FIELDS, compile_filter, parse_clauses, summarize_fields

# The grammar as one pattern, of which each part may be tried at each place: three nested loops over blanks.
GRAMMAR = re.compile(r"\s*(?P<field>[^<>=!]*?)\s*(?P<sign>[<>=!]+|\sin\s)\s*(?P<value>.*?)\s*", re.DOTALL)


@pytest.mark.parametrize(
    "clause", ["lang=en OR lang=fr", "a=b and year>=2000", "lang=en || lang=fr", "x in a or x in b", "a!=b && c=d"]
)
def test_conditions_that_are_joined_are_refused_with_what_to_write(clause):
    with pytest.raises(InputError, match=r"one condition at a time.* in a,b' matches either value"):
        parse_clauses([clause])


@pytest.mark.parametrize("value", ["war and peace", "this or that", "love and war in vietnam", "OR", "a or " * 9])
def test_a_value_may_have_an_or_in_it(value):
    assert parse_clauses([f"title={value}"]) == {"title": [value.strip()]}


def selected(conditions, *rows) -> list[int]:
    """Which of these metadata fit, by SQLite itself."""
    condition = compile_filter(conditions)
    table = sqlite3.connect(":memory:")
    table.execute("CREATE TABLE documents (number INTEGER PRIMARY KEY, metadata TEXT)")
    table.executemany("INSERT INTO documents (metadata) VALUES (?)", [(json.dumps(row),) for row in rows])
    query = f"SELECT number FROM documents WHERE {condition.sql} ORDER BY number"  # noqa: S608
    return [number for (number,) in table.execute(query, condition.parameters)]


@example(" in <")  # a field named "in", after a blank
@given(st.text("ain \t<>=!,1é", max_size=12))
def test_clauses_are_split_as_the_grammar_says(clause):
    match = GRAMMAR.fullmatch(clause)
    known = ("=", "!=", ">=", "<=", ">", "<", "in")
    if match is None or not match["field"].strip() or match["sign"].strip() not in known:
        with pytest.raises(InputError, match="write field=value"):
            parse_clauses([clause])
        return
    ((field, wanted),) = parse_clauses([clause]).items()
    sign, value = match["sign"].strip(), match["value"]
    assert field == match["field"].strip()
    if sign == "=":
        assert wanted[0] == value
    elif sign == "in":
        assert [each for each in wanted if isinstance(each, str)] == [part.strip() for part in value.split(",")]
    elif sign == "!=":
        assert wanted["ne"][0] == value
    else:
        assert list(wanted) == [{">": "gt", ">=": "gte", "<": "lt", "<=": "lte"}[sign]]


@pytest.mark.parametrize(
    "clause", [" " * 500, " " * 50_000, "a" + " " * 50_000, " " * 50_000 + "=", "a in" * 12_500, "<" * 50_000]
)
def test_a_clause_takes_one_pass(clause):
    start = time.perf_counter()
    with suppress(InputError):
        parse_clauses([clause])
    assert time.perf_counter() - start < 0.2  # three nested loops over blanks would take hours


@pytest.mark.parametrize("digits", [19, 20, 308, 309, 400, 5000])
def test_numbers_of_any_length(digits):
    nines = "9" * digits
    rows = [{"year": 2000}, {"year": "2000"}, {"year": None}]
    assert selected(parse_clauses([f"year={nines}"]), *rows) == []
    assert selected(parse_clauses([f"year<{nines}"]), *rows) == [1, 2]
    assert selected(parse_clauses([f"year>-{nines}", f"year<={nines}"]), *rows) == [1, 2]
    assert selected(parse_clauses([f"year>{nines}"]), *rows) == []
    assert selected({"year": [int("9" * min(digits, 4000)), 2000]}, *rows) == [1]


@pytest.mark.parametrize("odd", ["nan", "inf", "-inf", "1e999", "0x10", "1_000", "", "\x00", "٣"])
def test_odd_numbers_are_no_error(odd):
    for sign in ("=", "<", ">=", " in "):
        selected(parse_clauses([f"year{sign}{odd}"]), {"year": 1}, {"year": odd})
    assert selected({"year": odd}, {"year": 1}, {"year": odd}) == ([2] if odd != "\x00" else [])  # SQLite stops there


@pytest.mark.parametrize(
    ("conditions", "said"),
    [
        ({f"f{i}": i for i in range(MOST_FIELDS + 1)}, "201 fields is too much; 200 at most"),
        ({"a": list(range(20_000)), "b": list(range(20_000))}, "field 'b': 20,000 values are too many; 30,000"),
        ({"a": "\ud800"}, "half a surrogate pair"),
        ({"a": ["b", "\udcff"]}, "half a surrogate pair"),
        ({"a": {"gt": "\udcff"}}, "half a surrogate pair"),
    ],
)
def test_more_than_sqlite_takes(conditions, said):
    with pytest.raises(InputError, match=said):
        selected(conditions)


def test_true_is_no_number():
    rows = [{"on": True}, {"on": 1}, {"on": [False, 7]}, {"on": [True]}]
    assert selected({"on": {"gte": 0}}, *rows) == [2, 3]
    assert selected({"on": 1}, *rows) == [2]
    assert selected({"on": True}, *rows) == [1, 4]


def test_as_much_as_is_allowed():
    assert selected({f"f{i}": {"gte": 0, "lt": 9} for i in range(MOST_FIELDS)}, {f"f{i}": 1 for i in range(200)}) == [1]
    assert selected({"a": list(range(15_000)), "b": list(range(14_990))}, {"a": 14_999, "b": 14_000}) == [1]


KINDS = [{"on": True}, {"on": False}, {"on": 1}, {"on": "true"}, {"on": [0, True]}, {"on": None}, {}]


@pytest.mark.parametrize(
    ("clause", "fits"),
    [
        ("on=true", [1, 4, 5]),
        ("on=False", [2]),
        ("on=1", [3]),
        ("on!=true", [2, 3, 6, 7]),
        ("on in true,1", [1, 3, 4, 5]),
        ("on not in true,1", [2, 6, 7]),
    ],
)
def test_booleans_by_name_and_what_is_not_equal(clause, fits):
    assert selected(parse_clauses([clause]), *KINDS) == fits


def test_a_boolean_is_no_number_and_no_number_a_boolean():
    assert selected({"on": True}, *KINDS) == [1, 5]
    assert selected({"on": 1}, *KINDS) == [3]
    assert selected({"on": {"ne": None}}, *KINDS) == [1, 2, 3, 4, 5]
    assert selected({"on": {"ne": [True, False]}}, *KINDS) == [3, 4, 6, 7]


def test_fields_within_fields():
    rows = [{"meta": {"year": 2001, "tags": ["a"]}}, {"meta.year": 1999}, {"meta": 2001}, {"meta": {"year": {"of": 1}}}]
    assert selected(parse_clauses(["meta.year>2000"]), *rows) == [1]
    assert selected(parse_clauses(["meta.year=1999"]), *rows) == [2]
    assert selected(parse_clauses(["meta.tags=a"]), *rows) == [1]
    assert selected(parse_clauses(["meta.year.of=1"]), *rows) == [4]
    assert selected(parse_clauses(["meta.year!=2001"]), *rows) == [2, 3, 4]


def test_ranges_and_exclusions_of_one_field_go_together():
    conditions = parse_clauses(["year>=2000", "year!=2001", "year<2004", "year not in 2003,x"])
    assert conditions == {"year": {"gte": 2000, "ne": ["2001", 2001, "2003", 2003, "x"], "lt": 2004}}
    assert selected(conditions, *({"year": year} for year in range(1999, 2006))) == [2, 4]
    with pytest.raises(InputError, match="'year' has such a condition already"):
        parse_clauses(["year=2000", "year!=2001"])


@pytest.mark.parametrize("sign", ["==", "=>", "<>", "~", "=~", "!"])
def test_an_unknown_sign_is_told_with_the_known_ones(sign):
    with pytest.raises(
        InputError, match=r"there is no '.*'; write field=value \(or !=, >=, <=, >, <\), 'field in a,b'"
    ):
        parse_clauses([f"year{sign}2000"])


def test_fields_are_summarized_by_kind():
    rows = [{"n": 1, "t": ["a", "b"], "b": True}, {"n": 2.5, "t": ["a"], "b": 1, "o": {}}, {"n": None, "t": []}]
    found = {each.name: each for each in summarize_fields(rows)}
    assert list(found) == ["n", "t", "b"]
    assert (found["n"].documents, found["n"].least, found["n"].most) == (2, 1, 2.5)
    assert (found["t"].documents, found["t"].values, found["t"].least) == (2, 2, None)
    assert (found["b"].values, found["b"].least) == (2, None)  # the truth is no number


FIELDS = st.dictionaries(
    st.sampled_from("abc"), st.none() | st.integers() | st.booleans() | st.lists(st.text(), max_size=3)
)


@given(st.lists(FIELDS))
def test_summaries_count_no_more_than_there_is(rows):
    for each in summarize_fields(rows):
        having = [row[each.name] for row in rows if row.get(each.name) not in (None, [])]
        assert each.documents == len(having)
        assert each.example == (having[0][0] if isinstance(having[0], list) else having[0])
        assert each.least is None or each.least <= each.most
