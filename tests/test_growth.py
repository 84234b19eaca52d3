"""Growth: which regions of the tree later documents went to, and what is new there."""

from __future__ import annotations

import numpy as np
import pytest

from hce.data.text import Document
from hce.index.drift import LEAST_GROWTH, growth_of
from hce.index.index import Index
from hce.tree.names import distinguishing_words


@pytest.fixture
def index(tmp_path, planted_corpus, module_static_encoder):
    with Index.create(tmp_path / "index", planted_corpus, module_static_encoder, "grow") as made:
        yield made


def grown(index):
    with index.state.reading() as reader:
        return growth_of(reader, index.tree)


def near(index, document, count, extra):
    """Documents like another one, each with the same words of its own at the end."""
    text = index.get(document).text
    return [Document(f"new-{document}-{number}", f"{text} {extra}") for number in range(count)]


def test_the_region_that_grew_is_named_with_what_is_new_in_it(index):
    assert grown(index) == ()
    first, *_ = index
    index.add(near(index, first.id, 40, "canal canal tariff"))
    region, *others = grown(index)
    vectors = index.vectors()[1]
    nodes = index.tree.hierarchy.walk(vectors[-40:])[1][:, 0]
    assert region.node == np.bincount(nodes).argmax()
    assert region.added == np.bincount(nodes).max()
    assert region.before == (index.tree.hierarchy.nodes_at(1) == region.node).sum()
    assert region.name == tuple(index.tree.hierarchy.name(1, region.node))
    assert set(region.words) >= {"canal", "tariff"}
    assert set(region.examples) <= {f"new-{first.id}-{number}" for number in range(40)}
    assert not others
    drift = index.drift()
    assert drift.grown == (region, *others)
    assert drift.as_dict()["grown"][0]["added"] == region.added
    index.rebuild()
    assert grown(index) == ()  # they are in the tree now


def test_as_many_of_each_as_before_is_no_growth(index):
    index.add([Document(f"again-{document.id}", document.text, document.title) for document in index])
    assert grown(index) == ()


def test_as_many_of_each_is_no_growth_where_clusters_overlap_either(tmp_path, module_static_encoder):
    """There, a walk brings many documents to other nodes than clustering did."""
    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{word}" for word in rng.integers(0, 200, 6)) for _ in range(1200)]
    documents = [Document(str(number), text) for number, text in enumerate(texts)]
    with Index.create(tmp_path / "index", documents[:600], module_static_encoder, "grow") as index:
        index.add(documents[600:])
        assert grown(index) == ()


def test_a_handful_is_nothing_to_tell_of(index):
    first, *_ = index
    index.add(near(index, first.id, LEAST_GROWTH - 1, "w190"))
    assert grown(index) == ()


def test_without_a_tree_there_are_no_regions(tmp_path, planted_corpus, module_static_encoder):
    with (
        Index.create(tmp_path / "index", planted_corpus, module_static_encoder) as index,
        index.state.reading() as reader,
    ):
        assert growth_of(reader, index.tree) == ()


def test_distinguishing_words():
    assert distinguishing_words(["ships at sea"] * 3, ["ships in canals", "canal locks"], 2) == ["canal", "locks"]
    assert distinguishing_words(["!"], ["?"]) == []
    assert distinguishing_words(["same words"], ["same words"]) == []
