"""Experiments: each runs on a tiny collection, writes its page, and runs nothing twice."""

from __future__ import annotations

import argparse
import json
import math
import shutil
from dataclasses import replace
from statistics import fmean
from unittest import mock
from xml.etree import ElementTree

import numpy as np
import plotly.graph_objects as go
import pytest
from conftest import write_concept_dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from hce.data.judgments import Dataset
from hce.errors import InputError
from hce.evaluation.evaluate import evaluate
from hce.training.recipe import parsed_settings
from hce.tree.hierarchy import Hierarchy
from hce_lab.comparison.bench import Bench
from hce_lab.comparison.systems import SYSTEMS
from hce_lab.comparison.table import Comparison, Result
from hce_lab.experiments import (
    branching,
    clustering_cost,
    common,
    generative,
    incremental,
    scenarios,
    supervised_table,
    unsupervised_table,
)
from hce_lab.experiments import labels as labels_experiment
from hce_lab.experiments import page as pages

BUDGET = [f"--set={item}" for item in ("epochs=1", "epoch_pairs=32", "batch_size=16", "dev_queries=20")]


def name_of(module):
    """The name by which `python -m hce_lab` runs it."""
    return module.__name__.rpartition(".")[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, concept_corpus):
    """A BEIR folder of 240 documents: 60 queries to train on, 40 to test with, 20 more as another split."""
    return write_concept_dataset(
        tmp_path_factory.mktemp("data") / "concepts", concept_corpus, {"train": 60, "test": 40, "test_seen": 20}
    )


@pytest.fixture(scope="module")
def encoder(tmp_path_factory, module_static_encoder):
    path = tmp_path_factory.mktemp("encoder") / "tiny"
    module_static_encoder.save(path)
    return str(path)


@pytest.fixture
def launch(folder, encoder, tmp_path, capsys, monkeypatch):
    """Run an experiment's main: what it printed on stdout, on stderr, and its page; its picture is kept as JSON."""
    monkeypatch.setattr(common, "find_spec", lambda name: True)
    monkeypatch.setattr(go.Figure, "write_image", lambda figure, path: path.write_text(figure.to_json()))

    def start(module, *options, others=()):
        files = [f"--results={tmp_path / 'runs'}", f"--output={tmp_path / 'results'}"]
        module.main([str(folder), *others, "--encoder", encoder, *files, *options])
        printed = capsys.readouterr()
        return printed.out, printed.err, (tmp_path / "results" / f"{name_of(module)}.md").read_text()

    return start


def rows(text):
    """The cells of every line of the Markdown tables in a text, headers and rules left out."""
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    rules = [number for number, line in enumerate(lines) if set("".join(line)) <= {"-", ":"}]
    return [line for number, line in enumerate(lines) if number not in rules and number + 1 not in rules]


def test_labels_on_a_transformer_are_measured_row_by_row(folder, bert_folder, capsys):
    """A rival, and fine-tuning with and without the tree, on the same documents and queries."""
    systems = ["given", "mnrl", "tuned", "tree", "eq5", "ct", "hce"]
    given = [str(folder), "--encoder", str(bert_folder), "--pairs", "50", "--splits", "test,test_seen"]
    labels_experiment.main([*given, "--systems", ",".join(systems)])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith('{"')]
    assert [row["system"] for row in found] == systems
    for row in found:
        for split, count in {"test": 40, "test with words": 40, "test_seen": 20, "test_seen with words": 20}.items():
            assert len(row[f"{split} by query"]) == count
            assert len(row[split]) == 3
            assert row[split][0] == pytest.approx(np.mean(row[f"{split} by query"]), abs=1e-3)


CASES = {
    branching: ["--branching", "4,16", "--seeds", "1", "--mode", "joint", *BUDGET],
    incremental: ["--seeds", "1", *BUDGET],
    clustering_cost: ["--doublings", "1", "--branching", "8"],
    unsupervised_table: ["--seeds", "1", "--systems", "bm25,fitted,ict,hce-u", *BUDGET],
    supervised_table: [
        "--seeds",
        "1",
        "--splits",
        "test,test_seen",
        "--systems",
        "bm25,pefa-xs,no-cotrain,hce",
        *BUDGET,
    ],
    generative: ["--seeds", "2", "--one-seed", "dsi", "--systems", "bm25,dsi-atomic,dsi,hce-paper", *BUDGET],
    scenarios: ["--seeds", "1", "--mode", "unsupervised,joint", "--splits", "test,test_seen", *BUDGET],
}
RUNS = {
    branching: 3,
    incremental: 3,
    clustering_cost: 8,
    unsupervised_table: 4,
    supervised_table: 5,
    generative: 6,
    scenarios: 6,
}


@pytest.mark.parametrize("module", CASES, ids=lambda module: name_of(module))
def test_an_experiment_writes_its_page_and_runs_nothing_twice(module, launch, folder, tmp_path):
    out, err, page = launch(module, *CASES[module])
    assert err.count(": done") == RUNS[module] == len(list((tmp_path / "runs").rglob("*.json")))
    assert list((tmp_path / "runs").rglob("*.unfinished")) == []
    assert page.startswith("# ")
    assert f"$ python -m hce_lab {name_of(module)} data/concepts --encoder tiny" in page
    assert str(tmp_path) not in page
    assert str(folder.parent) not in page
    assert rows(page) == rows(out) != []
    picture = tmp_path / "results" / f"{name_of(module)}.svg"
    assert (f"]({picture.name})" in page) == picture.is_file() == (module not in (supervised_table, generative))
    if picture.is_file():
        assert all(trace["y"] for trace in json.loads(picture.read_text())["data"])
    again_out, again_err, again_page = launch(module, *CASES[module])
    assert ": done" not in again_err
    assert (again_out, again_page) == (out, page)


# ------------------------------------------------------------------------------------------------------ each by itself


def test_branching_shows_the_depth_of_each_tree():
    result = Result("hce", 0, {"R@10": {"q": 0.5}}, 1.0, 1.0, 1.0, 1)
    comparison = Comparison({}, ("R@10",), {"hce": ""}, frozenset({"hce"}), (result,))
    found = dict.fromkeys(("4", "16", branching.NO_TREE), comparison)
    shown = {row[0]: row[1:3] for row in rows(branching._table(found, 240))}
    # 240 documents: 60, 15, 4 nodes and then the root with b = 4; 15 with b = 16.
    assert shown == {"4": ["4", "4 → 15 → 60"], "16": ["2", "15"], "no tree": ["–", "–"]}


def test_seeds_are_averaged_and_more_of_them_run_only_what_is_new(launch, tmp_path):
    launch(scenarios, "--systems", "hce", "--seeds", "1", *BUDGET)
    out, err, _ = launch(scenarios, "--systems", "hce", "--seeds", "2", *BUDGET)
    assert (err.count(": done"), err.count("kept from before")) == (1, 1)
    kept = [json.loads(path.read_text())["result"]["test"] for path in (tmp_path / "runs").rglob("hce-*.json")]
    first, second = (fmean(record["per_query"]["nDCG@10"].values()) for record in kept)
    mean, spread = (first + second) / 2, abs(first - second) / math.sqrt(2)
    assert rows(out)[0][4] == f"{mean:.4f} ± {spread:.4f}"


@pytest.fixture
def bench(folder, encoder, tmp_path):
    return Bench.open(folder, tmp_path, ["test"], encoder=encoder, settings={"dev_queries": 20})


def test_what_is_new_is_nowhere_in_training(bench):
    parts = incremental.take_apart(bench, 0.25, seed=0)
    new, old = {document.id for document in parts.new}, set(parts.task.corpus.ids)
    assert (len(new), len(old), new & old) == (60, 180, set())
    for labels in (parts.task.pairs, parts.task.dev):
        assert {judgment.document_id for judgment in labels.qrels.judgments()} <= old
    assert {judgment.document_id for judgment in parts.asked["old"].qrels.judgments()} <= old
    # Of new documents every query is asked, those of the train split too, as nothing was learned from them.
    asked = {judgment.document_id for judgment in parts.asked["new"].qrels.judgments()}
    assert asked == {f"d{number}" for number in range(100)} & new
    assert {document.id for document in incremental.take_apart(bench, 0.25, seed=1).new} != new


def test_steps_are_powers_of_ten_and_all_there_are():
    assert incremental.steps(7) == [0, 7]
    assert incremental.steps(100) == [0, 10, 100]
    assert incremental.steps(2096) == [0, 10, 100, 1000, 2096]
    assert incremental.steps(25_000) == [0, 10, 100, 1000, 10_000]


def test_an_index_that_grew_finds_what_one_made_at_once_finds(bench, tmp_path):
    parts = incremental.take_apart(bench, 0.1, seed=0)
    (tmp_path / "index").mkdir()  # of a run that was killed
    last = incremental.run(parts, "untrained", "exact", tmp_path)[-1]
    whole = SYSTEMS["untrained"].build(bench.task).searcher
    for kind in ("old", "new"):
        expected = evaluate(whole, *parts.asked[kind], ("R@1", "R@10")).means
        assert last[kind] == pytest.approx(expected)


def test_generative_systems_are_added_to_and_the_time_is_told(bench, tmp_path, monkeypatch):
    monkeypatch.setattr("hce_lab.comparison.incremental.LEAST_STEPS", 5)
    parts = incremental.take_apart(bench, 0.1, seed=0)
    small = replace(bench.task.recipe, epochs=1, epoch_pairs=32, batch_size=16)
    for system in ("incdsi", "dsi++"):
        (tmp_path / system).mkdir()
        task = replace(parts.task, recipe=small)
        found = incremental.run(parts._replace(task=task), system, "exact", tmp_path / system)
        assert [step["added"] for step in found] == [0, 10, 24]
        assert found[0]["ms"] is None
        assert all(step["ms"] > 0 for step in found[1:])
        assert found[0]["new"] is None
        assert 0 <= found[-1]["new"]["R@10"] <= 1


def test_a_part_of_a_collection_is_whole_in_itself(folder, tmp_path):
    def part(documents):
        return common.part_of(folder, argparse.Namespace(documents=documents, results=tmp_path))

    place = part(100)
    some, whole = Dataset.load(place, "train"), Dataset.load(folder, "train")
    assert len(some.corpus) == 100
    assert set(some.corpus.ids) < set(whole.corpus.ids)
    kept = {query_id for query_id in whole.qrels if set(whole.qrels.positives(query_id)) <= set(some.corpus.ids)}
    assert set(some.qrels) == kept
    assert part(100) == place
    assert part(None) == part(240) == part(1000) == folder  # which is no larger


def test_the_page_of_generative_retrievers_says_what_was_not_run():
    arguments = argparse.Namespace(one_seed=["dsi", "seal", "squad-5000"], seeds=3, generated=None)
    notes = generative._exceptions(
        dict.fromkeys(["bm25", "dsi", "nci", "genret", "incdsi", "dsi++", "hce-paper"], ""), arguments
    )
    assert "One seed of dsi, squad-5000." in notes
    assert "Not run: dsi-atomic, nci+qg, genret+qg, seal." in notes
    assert any("no generated queries" in note for note in notes)


def test_the_rate_of_a_generative_system_is_the_best_on_dev(launch, tmp_path):
    options = ["--seeds=1", "--systems=bm25,dsi-atomic,dsi++", "--splits=test,test_seen", "--queries=30", *BUDGET]
    out, err, page = launch(generative, "--rates", "0.0001,0.01", *options)
    assert err.count(": done") == 5
    assert "test: 240 documents, 30 queries" in page
    assert "test_seen: 240 documents, 20 queries" in page
    for system in ("dsi-atomic", "dsi++"):
        assert f"concepts {system} 0 at 0.01: done" in err
        kept = [json.loads(path.read_text()) for path in (tmp_path / "runs").rglob(f"{system}-0-*.json")]
        on_dev = {each["identity"]["rate"]: each["result"]["test"]["facts"]["dev"] for each in kept}
        best = max(on_dev, key=on_dev.get)
        assert [row[6] for row in rows(out) if row[0] == system] == 2 * [f"{best:g}"]
        tried = f"0.0001 {on_dev[0.0001]:.3f}, 0.01 {on_dev[0.01]:.3f}"
        assert f"concepts, {system}: nDCG@10 on dev by learning rate: {tried}" in page
    assert len(set(on_dev.values())) == 2


def test_no_rate_is_chosen_without_dev_queries(bench):
    bench = replace(bench, task=replace(bench.task, pairs=None, dev=None))
    with pytest.raises(InputError, match="no labeled queries to choose a learning rate by; leave out --rates"):
        generative._by_best_rate(bench, "dsi-atomic", argparse.Namespace(rates=[0.1], one_seed=[], seeds=1))


def test_the_slope_is_the_power_of_n():
    sizes = clustering_cost.sizes_of(1000, 3)
    assert sizes == [125, 250, 500, 1000]
    assert clustering_cost.slope(sizes, [size**1.5 / 7 for size in sizes]) == pytest.approx(1.5)


def test_averages_are_over_collections(launch, folder, tmp_path):
    other = tmp_path / "other"
    other.symlink_to(folder)
    out, _, _ = launch(unsupervised_table, "--systems", "bm25,untrained", "--measures", "R@10", others=[str(other)])
    assert [row[0] for row in rows(out)] == ["bm25", "untrained"]
    for row in rows(out):
        assert len(row) == 4
        assert row[1] == row[2]  # the same collection twice
        assert row[1].split()[0] == row[3]


def test_no_label_reaches_the_unsupervised_table(bench):
    task = common.for_mode(bench.task, "unsupervised")
    assert (task.pairs, task.dev, task.recipe.mode) == (None, None, "unsupervised")


def test_generated_queries_bring_their_systems_and_rerun_no_other(launch, tmp_path):
    options = ["--seeds", "1", "--measures", "R@10", *BUDGET]
    launch(supervised_table, "--systems", "bm25", *options)
    generated = tmp_path / "generated.jsonl"
    generated.write_text("".join(json.dumps({"document": f"d{n}", "query": f"w{n % 200}"}) + "\n" for n in range(40)))
    out, err, page = launch(supervised_table, "--systems", "bm25,bm25+qg", "--generated", str(generated), *options)
    assert [row[0] for row in rows(out)] == ["bm25", "bm25+qg"]
    assert err.count(": done") == 1
    assert "--generated generated.jsonl" in page


def test_experiments_share_what_they_both_need(launch):
    options = ["--seeds", "1", *BUDGET]
    launch(branching, "--branching", "4", "--mode", "joint", *options)
    systems = ["--systems", "hce,untrained", "--set=mode=joint", "--set=branching=4"]
    _, err, _ = launch(supervised_table, *systems, "--measures=nDCG@10,R@10,R@100", *options)
    assert "concepts hce 0: kept from before" in err
    assert "concepts untrained 0: done" in err


# ------------------------------------------------------------------------------------------------------ what they share


def test_settings_have_the_types_of_the_recipe():
    def given(*items):
        parser = common.command_line("x", "", seeds=1)
        return parsed_settings(parser.parse_args(["f", *(f"--set={item}" for item in items)]).set)

    assert given("epochs=3", "learning_rate=1e-3", "tree=false", "span_lengths=8,16", "negatives=none") == {
        "epochs": 3,
        "learning_rate": 1e-3,
        "tree": False,
        "span_lengths": (8, 16),
        "negatives": "none",
    }
    for item in ("epoch=3", "epochs=three", "tree=maybe"):
        with pytest.raises(InputError, match=f"--set {item}: "):
            given(item)


def test_the_command_names_no_place_of_this_machine(monkeypatch):
    monkeypatch.setattr(common, "find_spec", lambda name: True)
    parser = common.command_line("x", "", seeds=3, several=True)
    parser.add_argument("--splits", type=common.names, default=["test"])
    files = ["/a/b/squad", "--results=/tmp/x", "--output=docs/results"]
    settings = ["--set=epochs=1", "--set=tree=false"]
    options = ["--seeds=3", "--encoder=/models/my encoder", "--splits=test,dev"]
    arguments = parser.parse_args([*files, *settings, *options])
    assert pages.shown_command(parser, arguments) == (
        "python -m hce_lab x data/squad --encoder 'my encoder' --set epochs=1 --set tree=false "
        "--output docs/results --splits test,dev"
    )


def test_bad_input_is_one_line(launch, folder, encoder):
    with pytest.raises(InputError, match="unknown system 'hec'"):
        launch(incremental, "--systems", "hec")
    with pytest.raises(InputError, match="held-out 2"):
        launch(incremental, "--held-out", "2")
    with pytest.raises(InputError, match="too few to begin with"):
        launch(clustering_cost, "--doublings", "9")
    with pytest.raises(InputError, match="no split to measure on"):
        launch(supervised_table, "--splits", ",")
    with pytest.raises(InputError, match="none of the splits nosuch"):
        launch(scenarios, "--splits", "nosuch")
    with pytest.raises(InputError, match=r"pefa-xs.*labeled"):
        launch(unsupervised_table, "--systems", "pefa-xs")


def test_a_picture_that_cannot_be_drawn_is_missed_at_once(monkeypatch, capsys):
    monkeypatch.setattr(common, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        common.command_line("x", "", seeds=1).parse_args(["f", "--output=docs"])
    assert "pip install kaleido" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- pictures


def panel(*series, **options):
    return pages.Panel("t", "x", "y", ["a", "b"], [pages.Series(*each) for each in series], **options)


def test_a_name_has_one_colour_and_one_line_in_the_legend():
    drawn = pages.figure([panel(("other", [1, 2]), ("HCE", [0, 1])), panel(("HCE", [3, None]))])
    by_name = {}
    for trace in drawn.data:
        by_name.setdefault(trace.name, []).append((trace.line.color, trace.showlegend))
    assert by_name == {
        "other": [(pages.COLOURS[1], True)],
        "HCE": [(pages.COLOURS[0], True), (pages.COLOURS[0], False)],  # ours is the first colour
    }


def test_lines_bars_and_axes_are_what_was_asked_for():
    drawn = pages.figure([panel(("s", [0.5, 1], [0.1, 0.2], True), log=True), panel(("s", [0.5, None]), bars=True)])
    line, bar = drawn.data
    assert (line.type, line.line.dash, list(line.error_y.array)) == ("scatter", "dash", [0.1, 0.2])
    assert (bar.type, list(bar.y), bar.error_y.visible) == ("bar", [0.5, None], False)
    assert (drawn.layout.yaxis.type, drawn.layout.yaxis2.type, drawn.layout.xaxis.type) == ("log", None, "category")


@pytest.mark.skipif(not any(map(shutil.which, ("chromium", "google-chrome"))), reason="needs chromium")
def test_a_picture_is_an_svg_file(tmp_path):
    pytest.importorskip("kaleido", reason="needs the package kaleido")
    pages.figure([panel(("<&>", [0.5, 1]))]).write_image(tmp_path / "x.svg")
    assert "<&>" in "".join(ElementTree.parse(tmp_path / "x.svg").getroot().itertext())  # noqa: S314  our own


@settings(max_examples=20, deadline=None)
@given(
    count=st.integers(20, 300),
    branching_factor=st.integers(2, 8),
    seed=st.integers(0, 3),
    sampled=st.sampled_from([2, 256]),
)
def test_top_down_documents_are_under_the_nearest_child_at_every_step(count, branching_factor, seed, sampled):
    """Also those that were not among the sample by which their node was split."""
    vectors = np.random.default_rng(seed).normal(size=(count, 6)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    with mock.patch.object(clustering_cost, "SAMPLED", sampled):
        levels, parent = clustering_cost.grown_top_down(vectors, branching_factor, seed, mode="exact")
    tree = Hierarchy(levels, parent, (), {})
    for level in range(1, tree.depth):
        scores = vectors @ tree.levels[level - 1].centroids.T
        own, parents = tree.nodes_at(level), tree.nodes_at(level - 1)
        for document in range(count):
            family = tree.children(level - 1, int(parents[document]))
            assert scores[document, own[document]] >= scores[document, family].max() - 1e-5
