"""Facets: how many of the documents that fulfil a filter have each value of a field."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hce.data.text import Document
from hce.errors import InputError
from hce.index.index import Index

METADATA = [
    {"year": 2001, "tags": ["a", "b", "a"], "meta": {"open": True}},
    {"year": 2001, "tags": ["a"], "meta": {"open": False}},
    {"year": "2001", "tags": [], "meta": {"open": 1}},
    {"year": 2002.0, "tags": "a", "meta": {"open": None}},
    {"year": 2002, "tags": [["nested"], {"b": 1}, None]},
    {"meta.open": "dotted", "tags": {"a": 1}},
    {},
]


@pytest.fixture(scope="module")
def index(tmp_path_factory, module_static_encoder):
    documents = [Document(str(n), f"w{n}", metadata=each) for n, each in enumerate(METADATA)]
    with Index.create(tmp_path_factory.mktemp("facets") / "index", documents, module_static_encoder) as made:
        yield made


def counts(index, field, *arguments):
    return [(each.value, type(each.value), each.documents) for each in index.facets([field], *arguments)[field]]


def test_half_a_surrogate_pair_is_no_damage(tmp_path, module_static_encoder):
    odd = [Document("a", "w1", metadata={"s": "\ud800"}), Document("b", "w2", metadata={"s": "plain"})]
    with Index.create(tmp_path / "index", odd, module_static_encoder) as index:
        found = {each.value: each.documents for each in index.facets(["s"])["s"]}
        assert found.pop("plain") == 1
        assert len(found) == 1
        assert all(set(value) == {"\ufffd"} for value in found)
        assert index.get("a").metadata == {"s": "\ud800"}


def test_values_are_counted_by_kind_and_lists_by_element(index):
    assert [(value, documents) for value, _, documents in counts(index, "year")] == [(2001, 2), (2002, 2), ("2001", 1)]
    assert counts(index, "tags") == [("a", str, 3), ("b", str, 1)]
    assert sorted(counts(index, "meta.open"), key=repr) == sorted(
        [(True, bool, 1), (False, bool, 1), (1, int, 1), ("dotted", str, 1)], key=repr
    )


def test_only_what_fulfils_the_filter_counts(index):
    assert counts(index, "tags", {"year": 2001}) == [("a", str, 2), ("b", str, 1)]
    assert counts(index, "tags", None, 1) == [("a", str, 3)]
    assert counts(index, "tags", {"year": 1999}) == []
    assert list(index.facets(["tags", "year"])) == ["tags", "year"]


def test_what_cannot_be_counted_is_refused(index):
    with pytest.raises(InputError, match=r"no document has a field 'nothing' to filter by; known fields: .*tags"):
        index.facets(["nothing"])
    with pytest.raises(InputError, match="only fields without quotes"):
        index.facets(['a"b'])
    with pytest.raises(InputError, match="most = 0"):
        index.facets(["year"], most=0)
    with pytest.raises(InputError, match="put the single one into a list"):
        index.facets("year")


@settings(max_examples=15, deadline=None)
@given(st.lists(st.lists(st.sampled_from(["x", "y", 1, 2, True, False, None]), max_size=4), min_size=1, max_size=8))
def test_counts_are_what_counting_by_hand_gives(tmp_path_factory, module_static_encoder, lists):
    documents = [Document(str(n), f"w{n}", metadata={"f": each}) for n, each in enumerate(lists)]
    each_once = [{(type(value), value) for value in each if value is not None} for each in lists]
    expected = Counter(value for each in each_once for value in each)
    path = tmp_path_factory.mktemp("counted") / "index"
    with Index.create(path, documents, module_static_encoder) as index:
        found = index.facets(["f"])["f"]
    assert {(type(each.value), each.value): each.documents for each in found} == dict(expected)
    assert [each.documents for each in found] == sorted((each.documents for each in found), reverse=True)
