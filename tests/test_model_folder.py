"""What is known of a trained model: written once, read by everyone through one door, and never half believed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hce.data.corpus import Corpus
from hce.encoding.encoder import Encoder
from hce.errors import FormatError
from hce.files import read_json, write_json
from hce.training.co_training import TrainResult
from hce.training.model_folder import (
    DevQuery,
    Epoch,
    ModelFacts,
    ModelFolder,
    gains,
    keep_facts,
    read_training,
    save_model,
    trained_tree,
)
from hce.training.pairs import DevQueries, DevSet, InverseCloze, Sources
from hce.training.recipe import Recipe
from hce.tree.hierarchy import Hierarchy

HISTORY = [Epoch(0, {"titles": 0.25}), Epoch(1, {"titles": 0.5}, {"document": 1.5}, [0.75], True, 0.1, 2.0)]
QUERIES = [DevQuery("titles", "wörter", 0.25, 0.5)]


def result_of(corpus: Corpus, encoder: Encoder, tree: Hierarchy, query: str) -> TrainResult:
    """A result measured by one held-out query."""
    sources = Sources(None, InverseCloze(corpus), np.array([0, 7]))
    devset = DevSet("NDCG@10", corpus, np.arange(240), (DevQueries("titles", [query], [np.array([0])]),))
    before, after = {"titles": np.array([0.25])}, {"titles": np.array([0.5])}
    stages = {"fitting": {"titles": 0.375}, "training": HISTORY[1].dev}
    return TrainResult(encoder, tree, HISTORY, 1.0, Recipe(), sources, devset, before, after, stages=stages)


@pytest.fixture
def folder(planted_corpus, static_encoder, tmp_path) -> Path:
    static_encoder.name = "static, fitted"
    tree = Hierarchy.build(static_encoder.encode(list(planted_corpus.texts())))
    result = result_of(planted_corpus, static_encoder, tree, QUERIES[0].query)
    save_model(result, planted_corpus, tmp_path / "model")
    return tmp_path / "model"


def test_what_is_written_is_read(folder, planted_corpus, static_encoder):
    model = ModelFolder.read(folder)
    assert (model.path, model.history, model.queries) == (folder, HISTORY, QUERIES)
    assert len(model.tree) == 240
    facts = model.facts
    assert facts == ModelFacts.find(folder)
    assert facts.fingerprint == static_encoder.fingerprint
    described = {"name": "planted", "documents": 240, "fingerprint": planted_corpus.fingerprint}
    assert facts.corpus == {**described, "source": None, "reading": None}
    assert facts.held_out == [planted_corpus[0].id, planted_corpus[7].id]
    assert (facts.encoder, facts.base_encoder) == ("static, fitted", "static")
    assert (facts.before, facts.after, facts.mix) == ({"titles": 0.25}, {"titles": 0.5}, 1.0)
    assert facts.stages == {"fitting": {"titles": 0.375}, "training": {"titles": 0.5}}
    assert "Fitting 0.2500 → 0.3750, training → 0.5000." in (folder / "README.md").read_text()
    assert Recipe(**{**facts.recipe, "span_lengths": (8, 16, 32)}) == Recipe()


def test_a_folder_without_a_model(tmp_path, planted_corpus):
    assert ModelFacts.find(tmp_path) is None
    assert trained_tree(tmp_path, planted_corpus) is None
    assert read_training(tmp_path) is None
    with pytest.raises(FormatError, match=r"no model of hce there \(hce\.json is missing\)"):
        ModelFolder.read(tmp_path)


def test_facts_of_other_versions(folder):
    facts = read_json(folder / "hce.json")
    write_json(folder / "hce.json", {**facts, "colour": "red"})
    found = ModelFacts.read(folder)
    assert gains(found.before, found.stages, found.after) == "Fitting 0.2500 → 0.3750, training → 0.5000".lower()
    for stages in ({"fitting": {"text": 0.5}}, {"fitting": 0.5}, [0.5]):
        write_json(folder / "hce.json", {**facts, "stages": stages})
        with pytest.raises(FormatError, match="stages"):
            ModelFacts.read(folder)
    write_json(folder / "hce.json", {**facts, "format": 2})
    with pytest.raises(FormatError, match="written by a newer version of hce; upgrade"):
        ModelFacts.find(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1}', '{"format": "one"}'])
def test_damaged_facts_are_one_line(folder, planted_corpus, text):
    (folder / "hce.json").write_text(text)
    for read in (ModelFacts.read, ModelFacts.find, ModelFolder.read, lambda path: trained_tree(path, planted_corpus)):
        with pytest.raises(FormatError, match=r"hce\.json: damaged .*train or copy the model again") as caught:
            read(folder)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["history.jsonl", "dev.jsonl"])
@pytest.mark.parametrize("line", ["{", "3", '{"colour": "red"}'])
def test_damaged_lines_are_one_line(folder, name, line):
    (folder / name).write_text(line)
    with pytest.raises(FormatError, match=f"{name}: damaged .*train or copy the model again"):
        ModelFolder.read(folder)


def test_the_tree_is_of_its_corpus_and_no_other(folder, planted_corpus):
    assert len(trained_tree(folder, planted_corpus)) == 240
    assert trained_tree(folder, Corpus.from_documents(planted_corpus[:100])) is None
    for file in (folder / "hierarchy").iterdir():
        file.unlink()
    (folder / "hierarchy").rmdir()
    assert trained_tree(folder, planted_corpus) is None  # it was trained without one


def test_an_index_keeps_the_facts_and_the_history(folder, tmp_path):
    kept = tmp_path / "kept"
    keep_facts(folder, kept)
    names = ["checksums.json", "hce.json", "history.jsonl"]
    assert sorted(path.name for path in kept.iterdir()) == names
    training = read_training(kept)
    assert (training.metric, training.before, training.after, training.mix) == (
        *("NDCG@10", {"titles": 0.25}, {"titles": 0.5}, 1.0),
    )
    assert [epoch["metric"] for epoch in training.epochs] == [0.25, 0.5]
    lines = (folder / "history.jsonl").read_text().splitlines()
    assert [{**json.loads(line), "metric": epoch.metric} for line, epoch in zip(lines, HISTORY, strict=True)] == (
        training.epochs
    )
    (kept / "history.jsonl").write_text("{")
    assert read_training(kept) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("format", "1"),
        ("format", True),
        ("encoder", 7),
        ("static", "yes"),
        ("corpus", []),
        ("corpus", {"name": "a"}),
        ("corpus", {"name": "a", "documents": "many", "fingerprint": "f"}),
        ("recipe", {}),
        ("recipe", None),
        ("before", {}),
        ("before", {"titles": "good"}),
        ("after", {"spans": 0.5}),
        ("after", {"titles": None}),
        ("mix", "half"),
        ("held_out", [1]),
        ("shares", []),
        ("shares", 1.0),
        ("words_share", "none"),
    ],
)
def test_facts_of_another_type_are_one_line(folder, name, value):
    write_json(folder / "hce.json", {**read_json(folder / "hce.json"), name: value})
    with pytest.raises(FormatError, match=r"^.*hce\.json: damaged \([^\n]*\); train or copy the model again$"):
        ModelFolder.read(folder)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("history.jsonl", "[" * 100_000),
        ("history.jsonl", '{"epoch": "one", "dev": {"titles": 0.5}}'),
        ("history.jsonl", '{"epoch": 1, "dev": [0.5]}'),
        ("history.jsonl", "[1]"),
        ("dev.jsonl", '{"kind": "titles", "query": 7, "before": 0.5, "after": 0.5}'),
        ("dev.jsonl", '{"kind": "titles", "query": "a", "before": null, "after": 0.5}'),
    ],
)
def test_lines_of_another_type_are_one_line(folder, name, line):
    (folder / name).write_text(line)
    with pytest.raises(FormatError, match=rf"^.*{name}: damaged \([^\n]*\); train or copy the model again$"):
        ModelFolder.read(folder)


def test_a_line_separator_in_a_query_is_no_line_break(folder, planted_corpus, static_encoder, tmp_path):
    tree = Hierarchy.build(static_encoder.encode(list(planted_corpus.texts())))
    queries = [DevQuery("titles", "one\u2028two\x85three", 0.25, 0.5)]
    save_model(result_of(planted_corpus, static_encoder, tree, queries[0].query), planted_corpus, tmp_path / "other")
    assert ModelFolder.read(tmp_path / "other").queries == queries
