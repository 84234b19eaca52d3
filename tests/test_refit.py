"""Refitting: a table that its documents have outgrown is fitted to all of them by a rebuild, wholly or not at all."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hce.data.text import Document
from hce.encoding.encoder import Encoder
from hce.errors import FormatError
from hce.index import create as reindex
from hce.index.check import check
from hce.index.index import Index
from hce.index.manifest import Manifest
from hce.index.state import ReindexedError

TOPICS = ("ships and harbours at sea", "stars and planets by night", "bread and cheese for supper", "laws of the court")


def documents(count, first=0):
    return [
        Document(f"d{i}", f"{TOPICS[i % 4]} number {i} beside {TOPICS[(i + i // 4) % 4]}", metadata={"n": i})
        for i in range(first, first + count)
    ]


BOOK = Document("book", " ".join(f"{TOPICS[i % 3]} and so on {i}." for i in range(400)))
QUERIES = ["planets at night", "a court of law", "number 17 supper"]


@pytest.fixture
def grown(tmp_path):
    """An index of ten documents, fitted to these, that has grown to sixty and a book."""
    with Index.create(tmp_path / "index", documents(10), "static", "grow") as index:
        index.add([*documents(50, 10), BOOK])
    return tmp_path / "index"


def hits_of(index, mode="dense"):
    return [[(hit.id, round(hit.score, 4)) for hit in row] for row in index.search(QUERIES, 5, mode=mode)]


@pytest.fixture(scope="module")
def fresh_hits(tmp_path_factory):
    """What an index of all documents finds that was made at once."""
    path = tmp_path_factory.mktemp("fresh") / "index"
    with Index.create(path, [*documents(60), BOOK], "static", "grow") as index:
        return {mode: hits_of(index, mode) for mode in ("dense", "hybrid", "words")}


def test_a_rebuild_fits_the_table_to_all_documents(grown, fresh_hits):
    with Index.open(grown) as index, Index.open(grown) as other, Index.open(grown) as idle:
        before, old = hits_of(other), other.state.encode_queries(QUERIES)
        assert before != fresh_hits["dense"]
        assert index.status().has_outgrown_its_table
        index.rebuild()
        assert index.status().fitted_documents == 61
        assert not index.status().has_outgrown_its_table
        with pytest.raises(ReindexedError, match="another encoder now"):
            other.state.search(QUERIES, old, 5, None, "dense")
        with Index.open(grown) as reopened:
            for each in (index, other, idle, reopened):
                for mode, expected in fresh_hits.items():
                    assert hits_of(each, mode) == expected
        assert index.tree is not None
        assert len(index.tree.numbers) == 61
        idle.add([Document("later", "zebras")])
        np.testing.assert_allclose(idle.vectors()[1][-1], index.encoder.encode(["zebras"])[0], atol=1e-6)
    assert [path.name for path in grown.glob("encoder*")] == [Manifest.read(grown).encoder_folder]
    assert check(grown).is_sound


def test_what_is_not_refitted(grown, tmp_path):
    before = Manifest.read(grown)
    with Index.open(grown) as index:
        index.rebuild(refit=False)
    assert Manifest.read(grown).fingerprint == before.fingerprint
    with Index.create(
        tmp_path / "given", documents(10), Encoder.load("static")
    ) as index:  # as it is, like a trained one
        index.add(documents(50, 10))
        index.rebuild()
        assert index.status().fitted_documents is None
    assert Manifest.read(tmp_path / "given").encoder_folder == "encoder"
    with Index.create(tmp_path / "few", documents(20), "static") as index:
        fingerprint = index.state.manifest.fingerprint
        index.add(documents(50, 20))
        index.rebuild()
        assert index.state.manifest.fingerprint == fingerprint


def test_a_manifest_names_no_encoder_outside_of_its_folder(grown):
    values = json.loads((grown / "manifest.json").read_text())
    values.pop("checksum")
    (grown / "manifest.json").write_text(json.dumps({**values, "encoder_folder": "../encoder"}))
    with pytest.raises(FormatError, match="encoder_folder"):
        Index.open(grown)


def test_a_rebuild_that_was_killed_goes_on(grown, fresh_hits, monkeypatch):
    """tests/test_reindex.py kills; here, what it leaves is what an error leaves."""
    with Index.open(grown) as index:
        before = hits_of(index)
        with monkeypatch.context() as broken:
            broken.setattr(reindex._Reindexing, "_save_snapshots", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                index.rebuild()
        assert hits_of(index) == before
        assert index.status().reindexing == "static, fitted"
        index.rebuild()
        assert {mode: hits_of(index, mode) for mode in fresh_hits} == fresh_hits
        assert index.status().reindexing is None
        assert index.status().earlier is None
    assert [path.name for path in grown.glob("*encoder*")] == [Manifest.read(grown).encoder_folder]
    assert check(grown).is_sound
