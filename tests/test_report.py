"""The report: numbers as they were measured, changes in order, the command that repeats it, and nothing unescaped."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hce.errors import FormatError
from hce.pages.report import command, report, training_figure, tree_figure
from hce.training.model_folder import DevQuery, ModelFolder
from hce.training.recipe import Recipe
from hce.training.train import train

SMALL = Recipe.for_encoder(
    static=True, epochs=2, batch_size=32, learning_rate=0.05, span_lengths=(4, 6), dev_queries=40, fit_static=False
)


@pytest.fixture(scope="module")
def model(concept_corpus, tmp_path_factory) -> ModelFolder:
    from conftest import random_static_encoder

    folder = tmp_path_factory.mktemp("models") / "my-model"
    train(concept_corpus, random_static_encoder(), recipe=SMALL, output=folder)
    return ModelFolder.read(folder)


def test_dev_queries_are_kept_with_what_they_scored(model):
    """Their means are the measures that `train` reports, by another route."""
    for kind, mean in model.facts.before.items():
        scores = [query for query in model.queries if query.kind == kind]
        assert sum(query.before for query in scores) / len(scores) == pytest.approx(mean, abs=1e-4)
        assert sum(query.after for query in scores) / len(scores) == pytest.approx(model.facts.after[kind], abs=1e-4)


def test_the_page_tells_the_measures(model):
    page = report(model)
    for kind, mean in model.facts.after.items():
        assert f"<td>{kind}</td><td>{model.facts.before[kind]:.4f}</td><td>{mean:.4f}</td>" in page
    assert "What improved most" in page
    assert "src=" not in re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)  # nothing from elsewhere


def test_changes_come_in_order(model):
    queries = [DevQuery("k", f"q{i}", 0.5, after) for i, after in enumerate((0.5, 0.9, 0.1, 1.0, 0.4))]
    page = report(replace(model, queries=queries, facts=replace(model.facts, before={"k": 0.5}, after={"k": 0.58})))
    improved = page[page.index("What improved most") : page.index("What got worse")]
    worse = page[page.index("What got worse") : page.index("Every query")]
    assert re.findall(r"<td>(q\d)</td>", improved) == ["q3", "q1"]
    assert re.findall(r"<td>(q\d)</td>", worse) == ["q2", "q4"]


def test_text_is_never_html(model):
    hostile = [DevQuery("k", "<script>alert(1)</script>", 0.1, 0.9)]
    facts = replace(model.facts, before={"k": 0.1}, after={"k": 0.9}, encoder="<b>")
    page = report(replace(model, queries=hostile, facts=facts))
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page


def test_the_command_repeats_the_settings(model):
    words = shlex.split(command(model))
    assert words[:3] == ["hce", "train", "concepts"]
    assert words[words.index("--span-lengths") + 1] == "4,6"
    assert "--no-fit-static" in words
    assert "--tree" not in words  # a default
    listed = subprocess.run(
        [sys.executable, "-m", "hce", *words[1:2], "--help"], capture_output=True, text=True, check=True
    )
    for word in words:
        assert not word.startswith("--") or word in listed.stdout


def test_figures_hold_the_history_and_the_tree(model):
    figure = training_figure(model.history)
    mean = next(trace for trace in figure.data if trace.name == "mean")
    assert list(mean.y) == [epoch.metric for epoch in model.history]
    icicle = tree_figure(model.tree).data[0]
    for parent in set(icicle.parents) - {""}:
        total = icicle.values[list(icicle.ids).index(parent)]
        assert total == sum(v for v, p in zip(icicle.values, icicle.parents, strict=True) if p == parent)


def test_a_nodes_small_children_are_put_together(model, monkeypatch):
    monkeypatch.setattr("hce.pages.report.MOST_CHILDREN", 2)
    icicle = tree_figure(model.tree).data[0]
    below_root = [place for place, parent in enumerate(icicle.parents) if parent == "root"]
    sizes = [model.tree.leaves_under(1, node).size for node in model.tree.children(0, 0)]
    assert [icicle.values[place] for place in below_root[:2]] == sorted(sizes, reverse=True)[:2]
    assert icicle.labels[below_root[2]] == f"… {len(sizes) - 2} more"
    assert icicle.values[below_root[2]] == sum(sizes) - sum(sorted(sizes)[-2:])


def test_the_card_has_the_facts(model):
    card = (model.path / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: sentence-transformers\n")
    assert f"{model.facts.after['titles']:.4f}" in card
    assert "240 documents" in card


def test_no_model_no_report(tmp_path):
    with pytest.raises(FormatError, match=r"hce\.json is missing"):
        ModelFolder.read(tmp_path)
    (tmp_path / "hce.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(FormatError, match="newer version"):
        ModelFolder.read(tmp_path)
    (tmp_path / "hce.json").write_text("{")
    with pytest.raises(FormatError, match="damaged"):
        ModelFolder.read(tmp_path)


def test_without_plotly_it_is_one_line_with_the_command_that_installs_it(model, tmp_path):
    code = "import sys; sys.modules['plotly'] = None; from hce.cli import main; main()"
    command = [sys.executable, "-c", code, "report", str(model.path), "-o", str(tmp_path / "out.html")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert re.fullmatch(r"error: .*plotly is not installed; pip install '.*\[web\]'", run.stderr.strip())
    assert not (tmp_path / "out.html").exists()


def test_p_is_that_of_the_test_with_holms_correction(model):
    scores = {"a": [(0.1, 0.9)] * 5, "b": [(0.5, 0.6), (0.5, 0.5), (0.6, 0.5)]}
    queries = [DevQuery(kind, f"q{i}", *pair) for kind, pairs in scores.items() for i, pair in enumerate(pairs)]
    means = {"before": {"a": 0.1, "b": 0.53}, "after": {"a": 0.9, "b": 0.53}}
    page = report(replace(model, queries=queries, facts=replace(model.facts, **means)))
    # Five queries that all gain: 2 of 32 signs are as far from 0, twice that by Holm; two that cancel out: p = 1.
    assert "<td>+0.8000</td><td>0.1250</td><td>5</td><td>0</td><td>0</td>" in page
    assert "<td>+0.0000</td><td>1.0000</td><td>1</td><td>1</td><td>1</td>" in page


def test_the_command_line(model, tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "hce", "report", str(model.path), "-o", "out.html", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(run.stdout)["after"] == model.facts.after
    assert Path(tmp_path / "out.html").read_text().startswith("<!doctype html>")
