"""Folders that 0.2.0 wrote, the first release with these formats: every later one finds the same in them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from hce.data.text import Document
from hce.encoding.encoder import Encoder
from hce.index.index import Index
from hce.training.model_folder import ModelFolder
from hce.tree.hierarchy import Hierarchy

DATA = Path(__file__).parent / "data"
VERSIONS = ("0.2.0",)
OTHER_ENGINES = [("0.2.0", "flat")]
IN_EIGHT_BITS = 0.02  # how far int8 may be from the cosine


class Formats(NamedTuple):
    """The folders that a version wrote, and what it found in them."""

    version: str
    path: Path
    expected: dict[str, Any]

    @classmethod
    def read(cls, version: str) -> Formats:
        path = DATA / f"formats-{version}"
        return cls(version, path, json.loads((path / "expected.json").read_text(encoding="utf-8")))

    @property
    def index(self) -> dict[str, Any]:
        return self.expected["index"]

    def hits(self, mode: str = "dense") -> list[list[list[Any]]]:
        return self.index[mode]

    def copy_of_index(self, folder: Path) -> Path:
        """A copy that a test may write to; its encoder's files have another time than its manifest says."""
        return Path(shutil.copytree(self.path / "index", folder / "index"))


@pytest.fixture(params=VERSIONS)
def formats(request) -> Formats:
    return Formats.read(request.param)


def check_hits(formats: Formats, index: Index, tolerance: float = 1e-5, mode: str = "dense") -> None:
    for query, expected in zip(formats.expected["queries"], formats.hits(mode), strict=True):
        hits = index.search(query, 5, mode=mode)
        assert [hit.id for hit in hits] == [doc_id for doc_id, _ in expected]
        np.testing.assert_allclose([hit.score for hit in hits], [score for _, score in expected], atol=tolerance)


def check_tree(formats: Formats, tree: Hierarchy) -> None:
    expected = formats.expected["model"]["tree"]
    assert tree.names == expected["names"]
    assert [list(tree.path(position)) for position in range(len(tree))] == expected["paths"]
    np.testing.assert_allclose(tree.levels[0].centroids, expected["centroids"], atol=1e-6)


def test_nothing_was_made_anew(formats):
    assert formats.expected["version"] == formats.version
    assert json.loads((formats.path / "index" / "manifest.json").read_text())["hce"] == formats.version
    there = {(version, path.name) for version in VERSIONS for path in (DATA / f"formats-{version}/engines").iterdir()}
    assert there == set(OTHER_ENGINES)


def test_a_model(formats, tmp_path):
    expected, folder = formats.expected["model"], formats.path / "model"
    encoder = Encoder.load(folder)
    assert encoder.fingerprint == expected["fingerprint"]
    np.testing.assert_allclose(encoder.encode(formats.expected["queries"], "query"), expected["vectors"], atol=2e-6)
    model = ModelFolder.read(folder)
    assert (model.facts.before, model.facts.after) == (expected["before"], expected["after"])
    assert model.facts.corpus["fingerprint"] == expected["corpus"]
    assert [epoch.epoch for epoch in model.history] == [0, 1, 2]
    assert model.history[0].dev == expected["before"]
    assert {query.kind for query in model.queries} == set(expected["before"])
    check_tree(formats, model.tree)
    check_tree(formats, Hierarchy.load(folder / "hierarchy"))
    documents = [Document(f"d{number}", f"star and sail {number}") for number in range(9)]
    with Index.create(tmp_path / "new", documents, folder) as index:
        assert index.state.manifest.base_encoder == "start"


def test_an_index_as_it_is(formats, tmp_path):
    expected = formats.index
    with Index.open(formats.copy_of_index(tmp_path)) as index:
        status = index.status().as_dict()
        # These engines are not read any more: they are behind by all documents, and built again when needed.
        pending = {"pending": len(expected["ids"])}
        known = {**expected["status"], **pending, "engine": "codes"}
        assert {name: status[name] for name in known if name != "dtype"} == {
            name: value for name, value in known.items() if name != "dtype"
        }
        assert [document.id for document in index] == expected["ids"]
        assert json.loads(index.get("bread-5").to_json()) == expected["changed"]
        check_hits(formats, index)
        recent = index.search(formats.expected["queries"][0], 50, {"year": {"gte": 2008}}, "dense")
        assert [hit.id for hit in recent] == expected["recent"]
        assert index.get("stars-1").metadata == {"topic": "stars", "year": 2001}
        check_tree(formats, index.tree.hierarchy)
        assert index.tree.numbers.tolist() == list(range(1, 37))
        assert index.encoder.fingerprint == formats.expected["model"]["fingerprint"]


def test_words_and_passages(formats, tmp_path):
    with Index.open(formats.copy_of_index(tmp_path)) as index:
        # Words are made anew, since texts are now cut into them in another way, and no longer count what was removed.
        check_hits(formats, index, 0.2, mode="words")
        check_hits(formats, index, 0.02, mode="hybrid")
        found = [hit.passage for hit in index.search("roll the dough thin", 3) if hit.id == "book"]
        assert [list(each) for each in found if each] == [each for each in formats.index["passages"] if each] != []


def test_tokens(formats, tmp_path):
    copy = Path(shutil.copytree(formats.path / "with-tokens", tmp_path / "index"))
    with Index.open(copy) as index:
        assert index.status().tokens
        for mode, expected in formats.expected["with_tokens"].items():
            found = index.search(formats.expected["queries"], 5, mode=mode)
            assert [[hit.id for hit in hits] for hits in found] == [[doc_id for doc_id, _ in each] for each in expected]
            scores = [[hit.score for hit in hits] for hits in found]
            scale = 0.6 if mode == "hybrid" else 1  # 0.2.0 added the tokens' part to a sum that was 1 already
            np.testing.assert_allclose(scores, [[scale * score for _, score in each] for each in expected], atol=1e-4)
        assert any(hit.from_tokens for hit in index.search(formats.expected["queries"][0], 5))


def test_an_index_goes_on(formats, tmp_path):
    title = "Sea bread, baked twice"
    folder = formats.copy_of_index(tmp_path)
    with Index.open(folder) as index:
        before = len(index)
        index.add([Document("new", "It keeps for a year on a boat.", title, {"year": 2030})])
        index.remove(["stars-0"])
        assert [hit.id for hit in index.search(title, 1, {"year": 2030}, "dense")] == ["new"]
    with Index.open(folder) as index:
        assert "new" in index
        assert "stars-0" not in index
        index.rebuild()
        assert [document.id for document in index] == [
            *(each for each in formats.index["ids"] if each != "stars-0"),
            "new",
        ]
        assert len(index.tree.numbers) == len(index) == before
        assert index.status().pending == 0
        index.remove(["new"])
        if "stars-0" not in json.dumps(formats.hits()):
            check_hits(formats, index)


@pytest.mark.parametrize(("version", "engine"), OTHER_ENGINES)
def test_an_index_with_another_engine(tmp_path, version, engine):
    """Its snapshot is of the index before anything was added or removed."""
    formats = Formats.read(version)
    folder = formats.copy_of_index(tmp_path)
    shutil.rmtree(folder / "engine")
    shutil.copytree(formats.path / "engines" / engine, folder, dirs_exist_ok=True)
    with Index.open(folder) as index:
        check_hits(formats, index, IN_EIGHT_BITS)
        assert len(index.search("anything", 50)) == len(index)
