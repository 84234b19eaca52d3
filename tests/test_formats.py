"""Folders that an earlier version wrote: every later one opens them, and finds the same in them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from hce.data.documents import Document
from hce.encoding.encoder import Encoder
from hce.index.index import Index
from hce.training.model_folder import ModelFolder
from hce.tree.hierarchy import Hierarchy

FORMATS = Path(__file__).parent / "data" / "formats-0.1.0"
EXPECTED = json.loads((FORMATS / "expected.json").read_text(encoding="utf-8"))
ENGINES = sorted(path.name for path in (FORMATS / "engines").iterdir())
IN_EIGHT_BITS = 0.02  # how far int8 may be from the cosine


@pytest.fixture
def folder(tmp_path):
    """A copy of the index that a test may write to; its encoder's files have another time than its manifest says."""
    return Path(shutil.copytree(FORMATS / "index", tmp_path / "index"))


def ids_and_scores(hits):
    return [hit.id for hit in hits], [hit.score for hit in hits]


def check_hits(index, tolerance=1e-5):
    for query, expected in zip(EXPECTED["queries"], EXPECTED["index"]["hits"], strict=True):
        ids, scores = ids_and_scores(index.search(query, 5, mode="dense"))
        assert ids == [doc_id for doc_id, _ in expected]
        np.testing.assert_allclose(scores, [score for _, score in expected], atol=tolerance)


def check_tree(tree):
    expected = EXPECTED["model"]["tree"]
    assert tree.names == expected["names"]
    assert [list(tree.path(position)) for position in range(len(tree))] == expected["paths"]
    np.testing.assert_allclose(tree.levels[0].centroids, expected["centroids"], atol=1e-6)


def test_nothing_was_made_anew():
    assert EXPECTED["version"] == "0.1.0"
    assert json.loads((FORMATS / "index" / "manifest.json").read_text())["hce"] == "0.1.0"
    assert ENGINES == ["flat", "hnsw", "ivf"]


def test_a_model(tmp_path):
    expected = EXPECTED["model"]
    encoder = Encoder.load(FORMATS / "model")
    assert encoder.fingerprint == expected["fingerprint"]
    np.testing.assert_allclose(encoder.encode(EXPECTED["queries"], "query"), expected["vectors"], atol=2e-6)
    model = ModelFolder.read(FORMATS / "model")
    assert (model.facts.before, model.facts.after) == (expected["before"], expected["after"])
    assert model.facts.corpus["fingerprint"] == expected["corpus"]
    assert [epoch.epoch for epoch in model.history] == [0, 1, 2]
    assert model.history[0].dev == expected["before"]
    assert {query.kind for query in model.queries} == set(expected["before"])
    check_tree(model.tree)
    check_tree(Hierarchy.load(FORMATS / "model" / "hierarchy"))
    documents = [Document(f"d{number}", f"star and sail {number}") for number in range(9)]
    with Index.create(tmp_path / "new", documents, FORMATS / "model") as index:
        assert index.manifest.base_encoder == "start"


def test_an_index_as_it_is(folder):
    expected = EXPECTED["index"]
    with Index.open(folder) as index:
        status = index.status().as_dict()
        # An engine as faiss wrote it is not read any more: it is behind by all documents, and made anew when needed.
        assert {name: status[name] for name in expected["status"]} == {**expected["status"], "pending": 38}
        assert [document.id for document in index] == expected["ids"]
        assert json.loads(index.get("bread-5").to_json()) == expected["changed"]
        check_hits(index)
        recent = index.search(EXPECTED["queries"][0], 50, {"year": {"gte": 2008}}, "dense")
        assert [hit.id for hit in recent] == expected["recent"]
        assert index.get("stars-1").metadata == {"topic": "stars", "year": 2001}
        check_tree(index.tree.hierarchy)
        assert index.tree.numbers.tolist() == list(range(1, 37))
        assert index.encoder.fingerprint == EXPECTED["model"]["fingerprint"]


def test_an_index_goes_on(folder):
    title = "Sea bread, baked twice"
    with Index.open(folder) as index:
        index.add([Document("new", "It keeps for a year on a boat.", title, {"year": 2030})])
        index.remove(["stars-0"])
        assert [hit.id for hit in index.search(title, 1, {"year": 2030}, "dense")] == ["new"]
    with Index.open(folder) as index:
        assert "new" in index
        assert "stars-0" not in index
        index.rebuild()
        assert [document.id for document in index] == [
            *(each for each in EXPECTED["index"]["ids"] if each != "stars-0"),
            "new",
        ]
        assert len(index.tree.numbers) == len(index) == 38
        assert index.status().pending == 0
        index.remove(["new"])
        check_hits(index)  # stars-0 was among none of them


@pytest.mark.parametrize("engine", ENGINES)
def test_an_index_with_another_engine(folder, engine):
    """Its snapshot is of the index before anything was added or removed."""
    shutil.rmtree(folder / "engine")
    shutil.copytree(FORMATS / "engines" / engine, folder, dirs_exist_ok=True)
    with Index.open(folder) as index:
        check_hits(index, IN_EIGHT_BITS)
        assert len(index.search("anything", 50)) == 38
