"""Names of nodes, the outline and the nested export."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console

from hce.tree.hierarchy import Hierarchy, Level
from hce.tree.names import name_nodes, nested, outline


@pytest.fixture
def tree() -> Hierarchy:
    """Root → animals (cats, dogs) and plants (trees), two documents each."""
    e = np.eye(3, dtype=np.float32)
    levels = (Level(np.array([0, 0]), e[:2]), Level(np.array([0, 0, 1]), e))
    return Hierarchy(levels, np.array([0, 0, 1, 1, 2, 2]), (1.0, 1.0), {})


TEXTS = [
    "the animal is a creature: a cat with whiskers",
    "another animal, a creature: a cat, cats",
    "the animal is a creature: a dog that barks",
    "an animal, a creature: a dog, dogs",
    "a plant is a plant is a plant",
    "an oak of the plant plant",
]


def test_names_say_what_sets_a_node_apart(tree):
    names = name_nodes(tree, TEXTS, words=1)
    assert names == [[["animal"], ["plant"]], [["cat"], ["dog"], ["oak"]]]


def test_plural_and_ancestors_words_are_not_repeated(tree):
    names = name_nodes(tree, TEXTS, words=2)
    assert names[0][0] == ["animal", "creature"]
    cat = names[1][0]
    assert "cat" in cat
    assert "cats" not in cat
    assert not {"animal", "creature"} & set(cat)


def test_a_word_of_one_document_names_no_node_however_often_it_occurs(tree):
    texts = [f"{TEXTS[0]} {'acmeware ' * 50}", *TEXTS[1:]]
    assert name_nodes(tree, texts, words=1) == name_nodes(tree, TEXTS, words=1)


def test_a_name_sets_a_node_apart_from_its_siblings(tree):
    """Pets are in every other animal's text too; of the plants, none has the word."""
    texts = [f"{text} pet" if place in (0, 1, 2) else text for place, text in enumerate(TEXTS)]
    cat = name_nodes(tree, texts, words=2)[1][0]
    assert cat[0] == "cat"


def test_addresses_are_no_names(tree):
    texts = [f"{text} https://zoo.example.org/a www.zoo.com me@zoo.org" for text in TEXTS[:4]] + TEXTS[4:]
    assert name_nodes(tree, texts) == name_nodes(tree, TEXTS)


def test_texts_without_words_give_empty_names(tree):
    assert name_nodes(tree, ["12 34", "", "...", "1", "2", "3"]) == [[[], []], [[], [], []]]


def test_outline_shows_sizes_and_counts_the_rest(tree):
    console = Console(width=80, record=True, file=io.StringIO())
    tree.names = name_nodes(tree, TEXTS, words=1)
    console.print(outline(tree, levels=2, most=1))
    text = console.export_text()
    assert "6 documents, 3 levels" in text
    assert "animal  4" in text
    assert "cat  2" in text
    assert "… 1 more, 2 documents" in text
    assert "plant" not in text


def test_nested_export_holds_every_document_once(tree):
    tree.names = name_nodes(tree, TEXTS)
    whole = json.loads(json.dumps(nested(tree, [f"d{i}" for i in range(6)])))

    def documents(entry):
        return entry.get("documents", []) + [d for child in entry.get("children", []) for d in documents(child)]

    assert sorted(documents(whole)) == [f"d{i}" for i in range(6)]
    assert [child["size"] for child in whole["children"]] == [4, 2]
    assert whole["children"][0]["name"][0] == "animal"
