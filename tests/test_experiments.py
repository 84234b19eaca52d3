"""Experiments: each runs on a tiny collection, writes its page, and runs nothing twice."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import write_concept_dataset

from hce.errors import FormatError, InputError

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"
sys.path.insert(0, str(EXPERIMENTS))

import branching  # noqa: E402
import charts  # noqa: E402
import clustering_cost  # noqa: E402
import incremental  # noqa: E402
import results  # noqa: E402
import running  # noqa: E402
import scenarios  # noqa: E402
import supervised_table  # noqa: E402
import unsupervised_table  # noqa: E402

BUDGET = [f"--set={item}" for item in ("epochs=1", "epoch_pairs=32", "batch_size=16", "dev_queries=20")]


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
def launch(folder, encoder, tmp_path, capsys):
    """Run an experiment's main: what it printed on stdout, on stderr, and its page."""

    def start(module, *options, others=()):
        name = module.__name__
        files = [f"--results={tmp_path / name}.json", f"--output={tmp_path / 'results'}"]
        module.main([str(folder), *others, "--encoder", encoder, *files, *options])
        printed = capsys.readouterr()
        return printed.out, printed.err, (tmp_path / "results" / f"{name}.md").read_text()

    return start


def rows(text):
    """The cells of every line of the Markdown tables in a text, headers and rules left out."""
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    rules = [number for number, line in enumerate(lines) if set("".join(line)) <= {"-", ":"}]
    return [line for number, line in enumerate(lines) if number not in rules and number + 1 not in rules]


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
    scenarios: ["--seeds", "1", "--mode", "unsupervised,joint", "--splits", "test,test_seen", *BUDGET],
}
RUNS = {branching: 3, incremental: 3, clustering_cost: 8, unsupervised_table: 4, supervised_table: 5, scenarios: 4}


@pytest.mark.parametrize("module", CASES, ids=lambda module: module.__name__)
def test_an_experiment_writes_its_page_and_runs_nothing_twice(module, launch, folder, tmp_path):
    out, err, page = launch(module, *CASES[module])
    assert err.count(": done") == RUNS[module] == len(json.loads((tmp_path / f"{module.__name__}.json").read_text()))
    assert page.startswith("# ")
    assert f"$ python experiments/{module.__name__}.py data/concepts --encoder tiny" in page
    assert str(tmp_path) not in page
    assert str(folder.parent) not in page
    assert rows(page) == rows(out) != []
    picture = tmp_path / "results" / f"{module.__name__}.svg"
    assert (f"]({picture.name})" in page) == picture.is_file() == (module is not supervised_table)
    if picture.is_file():
        ElementTree.parse(picture)  # noqa: S314  our own
    again_out, again_err, again_page = launch(module, *CASES[module])
    assert ": done" not in again_err
    assert (again_out, again_page) == (out, page)


# ------------------------------------------------------------------------------------------------------ each by itself


def test_branching_shows_the_depth_of_each_tree():
    record = {"measures": {"test": {"R@10": 0.5}}, "training_seconds": 1.0}
    found = {name: [record] for name in ("4", "16", branching.NO_TREE)}
    shown_table = branching._table(found, 240, argparse.Namespace(splits=["test"], measures=["R@10"]))
    shown = {row[0]: row[1:3] for row in rows(shown_table)}
    # 240 documents: 60, 15, 4 nodes and then the root with b = 4; 15 with b = 16.
    assert shown == {"4": ["4", "4 → 15 → 60"], "16": ["2", "15"], "no tree": ["–", "–"]}


def test_seeds_are_averaged_and_more_of_them_run_only_what_is_new(launch, tmp_path):
    launch(scenarios, "--systems", "hce", "--seeds", "1", *BUDGET)
    out, err, _ = launch(scenarios, "--systems", "hce", "--seeds", "2", *BUDGET)
    assert (err.count(": done"), err.count("kept from before")) == (1, 1)
    kept = json.loads((tmp_path / "scenarios.json").read_text())
    first, second = (record["measures"]["test"]["nDCG@10"] for record in kept.values())
    mean, spread = (first + second) / 2, abs(first - second) / math.sqrt(2)
    assert rows(out)[0][4] == f"{mean:.4f} ± {spread:.4f}"


def collection_of(folder, encoder):
    return running.load(folder, ["test"], encoder, {"dev_queries": 20})


def test_what_is_new_is_nowhere_in_training(folder, encoder):
    collection = collection_of(folder, encoder)
    parts = incremental.take_apart(collection, 0.25, seed=0)
    new, old = {document.id for document in parts.new}, set(parts.task.corpus.ids)
    assert (len(new), len(old), new & old) == (60, 180, set())
    for labels in (parts.task.pairs, parts.task.dev):
        assert {judgment.document_id for judgment in labels.qrels.judgments()} <= old
    assert {judgment.document_id for judgment in parts.asked["old"].qrels.judgments()} <= old
    # Of new documents every query is asked, those of the train split too, as nothing was learned from them.
    asked = {judgment.document_id for judgment in parts.asked["new"].qrels.judgments()}
    assert asked == {f"d{number}" for number in range(100)} & new
    assert {document.id for document in incremental.take_apart(collection, 0.25, seed=1).new} != new


def test_steps_are_powers_of_ten_and_all_there_are():
    assert incremental.steps(7) == [0, 7]
    assert incremental.steps(100) == [0, 10, 100]
    assert incremental.steps(2096) == [0, 10, 100, 1000, 2096]
    assert incremental.steps(25_000) == [0, 10, 100, 1000, 10_000]


def test_an_index_that_grew_finds_what_one_made_at_once_finds(folder, encoder):
    parts = incremental.take_apart(collection_of(folder, encoder), 0.1, seed=0)
    last = incremental.run(parts, "untrained", "flat")["steps"][-1]
    collection = collection_of(folder, encoder)
    whole = running.SYSTEMS["untrained"].build(collection.task).searcher
    for kind in ("old", "new"):
        expected = running.evaluate(whole, *parts.asked[kind], ("R@1", "R@10")).means
        assert last[kind] == pytest.approx(expected)


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


def test_no_label_reaches_the_unsupervised_table(folder, encoder):
    task = running.for_mode(collection_of(folder, encoder).task, "unsupervised")
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


def test_scenarios_take_up_the_runs_of_earlier_versions(launch, encoder, tmp_path):
    record = {
        "measures": {"test": {"nDCG@10": 0.25, "R@100": 0.5}},
        "dev": 0.6,
        "mix": 1.0,
        "epochs": 10,
        "seconds": 9.5,
    }
    kept = {f"concepts {encoder} joint {system} 0": record for system in ("no tree", "hce")}
    (tmp_path / "scenarios.json").write_text(json.dumps(kept, indent=1))
    out, err, _ = launch(scenarios, "--mode", "joint", "--seeds", "1")
    assert ": done" not in err
    assert rows(out)[1] == ["concepts", "test", "joint", "hce", "0.2500", "0.5000", "1.00", "10 s"]


# ------------------------------------------------------------------------------------------------------ what they share


def test_a_record_that_lacks_something_is_run_again(tmp_path):
    runs = results.Runs(tmp_path / "runs.json")
    assert runs.get("a", lambda: {"x": 1}) == {"x": 1}
    assert runs.get("a", lambda: {"x": 2}) == {"x": 1}
    assert runs.get("a", lambda: {"x": 1, "y": 3}, lambda record: "y" in record) == {"x": 1, "y": 3}
    assert results.Runs(tmp_path / "runs.json").kept == {"a": {"x": 1, "y": 3}}
    (tmp_path / "runs.json").write_text("{")
    with pytest.raises(FormatError, match=r"runs\.json: no finished runs"):
        results.Runs(tmp_path / "runs.json")


def test_settings_have_the_types_of_the_recipe():
    def given(*items):
        parser = results.command_line("x", "", seeds=1)
        return results.settings_of(parser.parse_args(["f", *(f"--set={item}" for item in items)]))

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


def test_the_command_names_no_place_of_this_machine():
    parser = results.command_line("x", "", seeds=3, several=True)
    parser.add_argument("--splits", type=results.names, default=["test"])
    files = ["/a/b/squad", "--results=/tmp/x.json", "--output=docs/results"]
    settings = ["--set=epochs=1", "--set=tree=false"]
    options = ["--seeds=3", "--encoder=/models/my encoder", "--splits=test,dev"]
    arguments = parser.parse_args([*files, *settings, *options])
    assert results.shown_command(parser, arguments) == (
        "python experiments/x.py data/squad --encoder 'my encoder' --set epochs=1 --set tree=false "
        "--output docs/results --splits test,dev"
    )


def test_bad_input_is_one_line(launch, folder, encoder):
    with pytest.raises(InputError, match="unknown system 'hec'"):
        launch(incremental, "--systems", "hec")
    with pytest.raises(InputError, match="held-out 2"):
        launch(incremental, "--held-out", "2")
    with pytest.raises(InputError, match="too few to begin with"):
        launch(clustering_cost, "--doublings", "9")
    with pytest.raises(InputError, match="none of the splits nosuch"):
        launch(scenarios, "--splits", "nosuch")
    with pytest.raises(InputError, match=r"pefa-xs.*labelled"):
        launch(unsupervised_table, "--systems", "pefa-xs")


# --------------------------------------------------------------------------------------------------------------- charts


def test_points_stand_where_their_values_say():
    panel = charts.Panel("t", "x", "y", ["a", "b"], [charts.Series("s", [0.0, 1.0])])
    scale = charts.scale_of(panel)
    assert (scale.low, scale.high, scale.y(0.5)) == (0.0, 1.0, charts.HEIGHT / 2)
    circles = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', charts.svg([panel]))
    assert [tuple(map(float, point)) for point in circles] == [
        (charts.WIDTH / 4, charts.HEIGHT),
        (charts.WIDTH * 3 / 4, 0.0),
    ]


def test_a_logarithmic_axis_has_decades():
    panel = charts.Panel("t", "x", "y", ["a", "b"], [charts.Series("s", [0.2, 30.0])], log=True)
    scale = charts.scale_of(panel)
    assert list(scale.ticks) == pytest.approx([0.1, 1, 10, 100])
    assert scale.y(1.0) == pytest.approx(charts.HEIGHT * 2 / 3)


def test_long_labels_are_cut_where_they_would_overlap():
    names = ["wordnet_examples", *"abcde"]
    drawn = charts.svg([charts.Panel("t", "x", "y", names, [charts.Series("s", [1.0] * 6)], bars=True)])
    assert "wordnet_examples" not in drawn
    assert "wordnet_e…" in drawn
    assert "wordnet_examples" in charts.svg([charts.Panel("t", "x", "y", names[:2], [charts.Series("s", [1.0] * 2)])])


@pytest.mark.parametrize("values", [[0.5], [0.0], [None, None], [0.3, None, 0.30001]])
@pytest.mark.parametrize("bars", [True, False])
def test_any_values_make_a_picture(values, bars):
    labels = [str(number) for number in range(len(values))]
    panel = charts.Panel("<&>", "x", "y", labels, [charts.Series("s", values, [0.1] * len(values))], bars=bars)
    ElementTree.fromstring(charts.svg([panel, panel, panel]))  # noqa: S314  our own
