"""Arguments of a wrong type: one named error with what to give, and never a word of damage."""

from __future__ import annotations

import sqlite3

import numpy as np
import pytest

import hce
from hce.errors import FormatError, HceError, InputError
from hce.index.store import Store

NOTHING_OF_USE = type("NothingOfUse", (), {"__repr__": lambda self: "NothingOfUse()"})()
WRONG = [None, 2.5, "abc", b"x", ["a"], {"a": 1}, NOTHING_OF_USE, True, 10**30, np.ones(2)]
DOCUMENTS = [hce.Document(f"d{number}", f"star w{number}", metadata={"year": number}) for number in range(5)]


@pytest.fixture(scope="module")
def index(tmp_path_factory, module_static_encoder):
    with hce.Index.create(tmp_path_factory.mktemp("a") / "index", DOCUMENTS, module_static_encoder) as made:
        yield made


@pytest.mark.parametrize("after", WRONG, ids=repr)
@pytest.mark.parametrize("method", ["vectors"])
def test_reading_after_what_is_no_number_names_the_argument(index, method, after):
    with pytest.raises(InputError, match=r"after = |pass numbers"):
        list(getattr(index, method)(after))
    assert len(index.vectors(np.int64(3))[0]) == 2


@pytest.mark.parametrize("value", [["a"], {"a": 1}, NOTHING_OF_USE, 10**30], ids=repr)
def test_what_sqlite_cannot_bind_is_no_damage(index, value):
    with pytest.raises(InputError, match="nothing was changed"), index.state.reading() as reader:
        reader.find(value)
    assert index.get("d1") == DOCUMENTS[1]


def test_an_overflow_of_the_callers_own_stays_what_it_is(index):
    with pytest.raises(OverflowError, match="mine"), index.state.reading():
        raise OverflowError("mine")


def test_a_damaged_file_is_still_named_as_damaged(tmp_path):
    store = Store.create(tmp_path, 2)
    with pytest.raises(FormatError, match="damaged"), store.reading():
        raise sqlite3.DatabaseError("file is not a database")


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_other_arguments_of_a_search_and_of_facets(index, value):
    if value is not None:
        with pytest.raises(HceError):
            index.search("star", rerank=value)
    if not isinstance(value, list):
        with pytest.raises(InputError, match="list of fields"):
            index.facets(value)
    assert len(index.facets(["year"], most=10**30)["year"]) == 5


def test_training_takes_documents_and_says_how_to_make_them(module_static_encoder):
    with pytest.raises(InputError, match=r"number 1: a str; make it a document: hce.Document\("):
        hce.train(["red shoes", "blue hats"], module_static_encoder)
    with pytest.raises(InputError, match=r"'docs.jsonl' is a string; hce.Corpus.load"):
        hce.train("docs.jsonl", module_static_encoder)
    with pytest.raises(InputError, match="not int"):
        hce.train(7, module_static_encoder)


@pytest.mark.parametrize("name", ["pairs", "generated", "dev", "recipe"])
def test_training_names_the_argument_that_is_of_a_wrong_type(module_static_encoder, name):
    with pytest.raises(InputError, match=f"{name}: give .* not str"):
        hce.train(DOCUMENTS, module_static_encoder, **{name: "clicks.tsv"})


@pytest.mark.parametrize("records", [7, None, "abc", [("a", "b")], [7]])
def test_records_are_mappings(records):
    with pytest.raises(InputError, match="mapping"):
        hce.Corpus.from_records(records)


@pytest.mark.parametrize("judgments", [7, "abc", [7], [["q", "d", 1]]])
def test_judgments_are_judgments(judgments):
    with pytest.raises(InputError, match="give judgments"):
        hce.Qrels(judgments)


def test_an_evaluation_names_what_it_lacks(index):
    with pytest.raises(InputError, match="queries: give a mapping"):
        hce.evaluate(index, ["q"], hce.Qrels([]))
    with pytest.raises(InputError, match=r"qrels: give hce.Qrels, not dict"):
        hce.evaluate(index, {}, {"q": {"d": 1}})


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"epochs": "3"}, "epochs '3': give a whole number"),
        ({"epochs": 2.5}, "give a whole number"),
        ({"learning_rate": None}, "learning_rate None: give a number"),
        ({"tree": "no"}, "tree 'no': give True or False"),
    ],
)
def test_a_recipe_of_values_of_a_wrong_type(settings, complaint):
    with pytest.raises(InputError, match=complaint):
        hce.Recipe(**settings)


def test_a_tree_is_of_an_array_and_a_number():
    with pytest.raises(InputError, match="vectors: give an array"):
        hce.Hierarchy.build([[1.0, 0.0]])
    with pytest.raises(InputError, match="branching '4'"):
        hce.Hierarchy.build(np.eye(8, dtype=np.float32), "4")
