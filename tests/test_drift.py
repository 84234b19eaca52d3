"""Drift: the verdict turns when strangers come, stays quiet when relatives do, and its numbers are as worked out."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hce.data.corpus import Corpus
from hce.encoding.encoder import Encoder
from hce.index.drift import LEAST, Drift, Population, _judge, _Leaves, measure_drift
from hce.index.index import Index
from hce.tree.hierarchy import Hierarchy, Level


def directions(*degrees: float) -> np.ndarray:
    radians = np.radians(degrees)
    return np.stack([np.cos(radians), np.sin(radians)], axis=1).astype(np.float32)


@pytest.fixture
def hand_made() -> tuple[Hierarchy, np.ndarray, np.ndarray]:
    """Leaves {0°, 20°}, {90°}, {180°, 200°}; the first two under one parent; one document has been removed since."""
    vectors = directions(0, 20, 90, 180, 45)  # the last is new; 200° is gone
    levels = (
        Level(np.array([0, 0]), directions(40, 190)),
        Level(np.array([0, 0, 1]), directions(10, 90, 190)),
    )
    tree = Hierarchy(levels, np.array([0, 0, 1, 2, 2]), (1.0, 1.0), {})
    return tree, np.array([0, 1, 2, 3, -1]), vectors


def test_an_old_document_is_placed_as_if_it_were_new(hand_made):
    tree, rows, vectors = hand_made
    cosine, astray = _Leaves(tree, rows, vectors.__getitem__, 5).place(vectors, np.arange(5))
    # 0° and 20° see each other; 90° alone in its leaf goes to the 10° one; so does 180°, whose fellow is gone: the
    # nearest other is 90°; 45° is 35° from the centroid at 10° and 45° from the one at 90°.
    expected = np.cos(np.radians([20, 20, 80, 90, 35]))
    np.testing.assert_allclose(cosine, expected, atol=1e-6)
    assert astray.tolist() == [False, False, False, True, False]  # 180° walks to the parent at 190°


@pytest.fixture(scope="module")
def grown(planted_corpus, module_static_encoder) -> dict[str, list[str]]:
    texts = {"base": [], "relatives": [], "strangers": []}
    for number, document in enumerate(planted_corpus):
        kind = "strangers" if document.id.startswith("ship") else "relatives" if number % 3 == 0 else "base"
        texts[kind].append(document.full_text)
    return texts


def drift_of(texts: dict[str, list[str]], new: str, encoder: Encoder, count: int | None = None) -> Drift:
    base = encoder.encode(texts["base"])
    everything = [*texts["base"], *texts[new][:count]]
    vectors = np.concatenate([base, encoder.encode(texts[new][:count])])
    is_new = np.arange(len(vectors)) >= len(base)
    tree, held_out = Hierarchy.build(base, 16, seed=1), np.arange(60)
    texts = lambda rows: [everything[row] for row in rows.tolist()]  # noqa: E731
    return measure_drift(tree, np.arange(len(base)), vectors.__getitem__, is_new, held_out, texts, encoder.encode)


def test_relatives_are_no_reason(grown, module_static_encoder):
    drift = drift_of(grown, "relatives", module_static_encoder, 55)
    assert drift.verdict == "ok"
    assert drift.old is not None and drift.new is not None
    assert abs(drift.old.cosine - drift.new.cosine) < 0.35 * drift.old.spread
    assert drift.new.documents == 55


def test_strangers_are(grown, module_static_encoder):
    drift = drift_of(grown, "strangers", module_static_encoder)
    assert drift.verdict == "retrain"
    assert "farther from the leaves" in drift.reasons[0]
    told = json.loads(json.dumps(drift.as_dict()))
    assert told["verdict"] == "retrain"
    assert told["new"]["documents"] == 60
    assert told["old"]["cosine"] > told["new"]["cosine"]


def test_few_documents_say_nothing(grown, module_static_encoder):
    drift = drift_of(grown, "strangers", module_static_encoder, LEAST - 1)
    assert drift.verdict == "unknown"
    assert str(LEAST - 1) in drift.reasons[0]


OLD = Population(10_000, 0.6, 0.1, 0.2, 0.5, 500)


@pytest.mark.parametrize(
    ("new", "verdict"),
    [
        (Population(1000, 0.6, 0.1, 0.2, 0.5, 500), "ok"),
        (Population(1000, 0.566, 0.1, 0.2, 0.5, 500), "ok"),
        (Population(1000, 0.564, 0.1, 0.2, 0.5, 500), "retrain"),
        (Population(1000, 0.6, 0.1, 0.2, 0.42, 500), "retrain"),
        (Population(1000, 0.6, 0.1, 0.2, 0.43, 500), "ok"),
        (Population(60, 0.6, 0.1, 0.2, 0.42, 60), "ok"),  # 8 points on 60 documents are within chance
        (Population(1000, 0.6, 0.1, 0.31, 0.5, 500), "re-cluster"),
        (Population(60, 0.6, 0.1, 0.31, 0.5, 60), "ok"),
        (Population(5000, 0.6, 0.1, 0.2, 0.5, 500), "ok"),
        (Population(5001, 0.6, 0.1, 0.2, 0.5, 500), "re-cluster"),
        (Population(5001, 0.5, 0.1, 0.2, 0.5, 500), "retrain"),
        (Population(1000, 0.6, 0.1, 0.2, None, 500), "ok"),
    ],
)
def test_the_verdict(new, verdict):
    drift = _judge(OLD, new, outside=new.documents)
    assert drift.verdict == verdict
    assert drift.reasons


def test_a_tree_that_was_grown_anew_is_not_to_be_grown_again():
    many = Population(9000, 0.6, 0.1, 0.2, 0.5, 500)
    assert _judge(OLD, many, outside=9000).verdict == "re-cluster"
    assert _judge(OLD, many, outside=100).verdict == "ok"


def test_an_index_is_told_when_strangers_come(planted_corpus, module_static_encoder, tmp_path):
    """From the index's own documents, tree and numbers; growing the tree anew brings the strangers into it."""
    documents = [document for document in planted_corpus if not document.id.startswith("ship")]
    strangers = [document for document in planted_corpus if document.id.startswith("ship")]
    vectors = module_static_encoder.encode([document.full_text for document in documents])
    tree = Hierarchy.build(vectors, 16, seed=1)
    with Index.create(tmp_path / "index", Corpus.from_documents(documents), module_static_encoder, tree) as index:
        assert index.drift().verdict == "ok"  # nothing is new
        index.remove([documents[0].id])
        index.add(strangers)
        drift = index.drift()
        assert drift.verdict == "retrain"
        assert drift.old is not None and drift.new is not None
        assert (drift.old.documents, drift.new.documents, drift.outside) == (179, 60, 60)
        index.rebuild()
        assert index.drift().outside == 0


def test_no_tree_no_verdict(planted_corpus, module_static_encoder, tmp_path):
    with Index.create(tmp_path / "index", planted_corpus, module_static_encoder) as index:
        assert "no tree" in index.drift().reasons[0]


def test_of_a_fresh_index_there_is_nothing_new_yet(grown, module_static_encoder):
    found = drift_of(grown, "strangers", module_static_encoder, 0)
    assert (found.verdict, found.reasons) == ("ok", ("nothing new yet",))
