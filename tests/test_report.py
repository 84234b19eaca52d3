"""The report: numbers as they were measured, changes in order, the command that repeats it, and nothing unescaped."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from hce.errors import FormatError
from hce.pages.page import Panel, difference_bars, line_panels
from hce.pages.report import branches, command, report, training_panels
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
    assert not re.search(r"<script|src=|href=|url\(", page)  # nothing from elsewhere


def test_the_page_says_how_to_measure_the_tree(model):
    assert "no-tree-hybrid" in report(model)
    facts = replace(model.facts, recipe={**model.facts.recipe, "tree": False})
    assert "no-tree-hybrid" not in report(replace(model, facts=facts))


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
    assert words[:5] == ["hce", "train", "concepts", "-o", "my-model-again"]
    assert {"span_lengths=4,6", "fit_static=false"} <= set(words)
    assert "tree=true" not in words  # a default


def test_the_command_makes_the_same_model_again(concept_corpus, static_encoder, tmp_path, run_hce, monkeypatch):
    """With labels and fields of one's own, a delimiter and an encoding, and whatever setting is no default."""
    monkeypatch.chdir(tmp_path)
    static_encoder.save("encoder")
    rows = [f"{document.id};{document.text.replace(';', ' ')}" for document in concept_corpus]
    Path("own.csv").write_text("\n".join(["Nr;Größe, Text", *rows]), encoding="cp1252")
    Path("my queries.tsv").write_text("".join(f"q{i}\tw{i} w{i + 5}\n" for i in range(60)))
    Path("clicks.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(f"q{i}\td{i}\t1\n" for i in range(60)))
    given = ["own.csv", "-o", "model", "--encoder", "encoder", "--epochs", "1", "--set", "batch_size=32"]
    given += ["--set", "mask=false", "--labels", "queries=my queries.tsv,qrels=clicks.tsv", "--seed", "3"]
    given += ["--fields", "id=Nr,text=Größe, Text", "--delimiter", ";", "--encoding", "cp1252"]
    first = run_hce("train", *given)
    assert first.returncode == 0, first.stderr
    again = shlex.split(command(ModelFolder.read("model")))
    repeated = run_hce(*again[1:])
    assert repeated.returncode == 0, repeated.stderr
    facts = [ModelFolder.read(path).facts for path in ("model", "model-again")]
    assert facts[0] == facts[1]
    assert facts[0].recipe["mode"] == "joint"


def test_panels_hold_the_history(model):
    dev, loss, accuracy, churn = training_panels(model.history)
    assert dev.lines["mean"] == [epoch.metric for epoch in model.history]
    assert set(loss.lines) >= set(accuracy.lines) == {f"level {t + 1}" for t in range(len(accuracy.lines))}
    assert churn.lines["churn"] == [epoch.churn if epoch.reclustered else None for epoch in model.history]


def test_a_level_is_in_the_legend_once(model):
    page = report(model)
    legend = re.findall(r"<li><i style=[^>]*></i>([^<]*)</li>", page)
    assert len(legend) == len(set(legend))
    assert {"mean", "level 1"} <= set(legend)


def test_what_was_not_measured_is_not_drawn():
    drawn = line_panels([0, 1], [Panel("a", {"x": [1.0, 2.0]}), Panel("b", {"y": [None, None]}), Panel("c", {})])
    assert re.findall("<figcaption>(.)</figcaption>", drawn) == ["a"]
    assert "none of 2 queries differs" in difference_bars([(0.0, "a"), (0.0, "b")], "Δ")
    assert "<svg" not in difference_bars([], "Δ")


def test_lines_stand_where_their_values_are():
    drawn = line_panels([0, 1, 2], [Panel("a", {"x": [0.0, 1.0, None], "y": [0.5, 0.5, 0.5]})])
    first, second = (re.findall(r"[\d.]+", points) for points in re.findall('points="([^"]*)"', drawn))
    assert len(first) == 4 and len(second) == 6  # nothing is drawn of what was not measured
    assert float(first[1]) > float(second[1]) > float(first[3])  # upwards is more
    assert float(second[0]) < float(second[2]) < float(second[4])


def test_gains_and_losses_differ_in_sign_and_colour(model):
    bars = difference_bars([(0.5, "up"), (-0.25, "down"), (0.0, "same")], "Δ")
    assert re.findall(r'class="(\w+)" x="(\d)" y="([\d.]+)" width="1" height="([\d.]+)"><title>([^<]*)<', bars) == [
        ("gain", "0", "4.0", "96.0", "up: +0.5000"),
        ("same", "1", "100.0", "0.0", "same: +0.0000"),
        ("loss", "2", "100.0", "48.0", "down: -0.2500"),
    ]
    assert "1 queries gain, 1 lose, 1 do not change" in bars
    queries = [DevQuery("k", "up", 0.5, 0.9), DevQuery("k", "down", 0.5, 0.25)]
    page = report(replace(model, queries=queries, facts=replace(model.facts, before={"k": 0.6}, after={"k": 0.5})))
    assert '<td class="gain">+0.40</td>' in page
    assert '<td class="loss">-0.25</td>' in page
    assert '<td class="loss">-0.1000</td>' in page


def test_many_queries_make_no_large_page(model):
    queries = [DevQuery("k", f"<query> {i} " + 90 * "x", 0.5, (i % 97) / 96) for i in range(20_000)]
    page = report(replace(model, queries=queries, facts=replace(model.facts, before={"k": 0.5}, after={"k": 0.5})))
    assert len(page.encode()) < 1_000_000
    assert '<polygon class="gain"' in page and '<polygon class="loss"' in page
    assert len(report(model).encode()) < 200_000


def test_branches_hold_the_tree(model, monkeypatch):
    found = branches(model.tree)
    assert sum(branch.size for branch in found) == len(model.tree)
    assert all(sum(part.size for part in branch.below) == branch.size for branch in found if branch.below)
    monkeypatch.setattr("hce.pages.report.MOST_CHILDREN", 2)
    first, second, rest = branches(model.tree)
    sizes = [model.tree.documents_under(1, node).size for node in model.tree.children(0, 0)]
    assert [first.size, second.size] == sorted(sizes, reverse=True)[:2]
    assert rest.name == f"… {len(sizes) - 2} more"
    assert rest.size == sum(sizes) - first.size - second.size


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


def test_p_is_that_of_the_test_with_holms_correction(model):
    scores = {"a": [(0.1, 0.9)] * 5, "b": [(0.5, 0.6), (0.5, 0.5), (0.6, 0.5)]}
    queries = [DevQuery(kind, f"q{i}", *pair) for kind, pairs in scores.items() for i, pair in enumerate(pairs)]
    means = {"before": {"a": 0.1, "b": 0.53}, "after": {"a": 0.9, "b": 0.53}}
    page = report(replace(model, queries=queries, facts=replace(model.facts, **means)))
    # Five queries that all gain: 2 of 32 signs are as far from 0, twice that by Holm; two that cancel out: p = 1.
    assert '<td class="gain">+0.8000</td><td>0.1250</td><td>5</td><td>0</td><td>0</td>' in page
    assert "<td>+0.0000</td><td>1.0000</td><td>1</td><td>1</td><td>1</td>" in page


def test_the_command_line(model, tmp_path, run_hce):
    run = run_hce("report", model.path, "-o", tmp_path / "out.html", "--json")
    assert json.loads(run.stdout)["after"] == model.facts.after
    assert Path(tmp_path / "out.html").read_text().startswith("<!doctype html>")
