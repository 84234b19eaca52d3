"""Comparisons: the same for all, kept, continued, tested for significance, and shown four ways."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from statistics import fmean

import numpy as np
import pytest
from conftest import write_concept_dataset
from typer.testing import CliRunner

from hce.cli import app
from hce.data.judgments import Judgment, Qrels
from hce.errors import FormatError, InputError
from hce.evaluation.runs import Scored
from hce.evaluation.significance import compare_paired, holm
from hce.index.index import Index
from hce.training.model_folder import ModelFacts
from hce_lab.commands import compare as command
from hce_lab.comparison.bench import Bench, compare
from hce_lab.comparison.page import differences, page
from hce_lab.comparison.pictures import Bar, Point, bar_panels, point_panel
from hce_lab.comparison.systems import SYSTEMS
from hce_lab.comparison.table import (
    BETTER,
    REFERENCE,
    WORSE,
    Comparison,
    Result,
    as_json,
    as_markdown,
    notes,
    table,
    table_cells,
)
from hce_lab.comparison.task import Built, System

BUDGET = {"epochs": 1, "epoch_pairs": 64, "batch_size": 32, "dev_queries": 24}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, concept_corpus):
    """A BEIR folder: 60 queries to train on, 40 to test with."""
    return write_concept_dataset(
        tmp_path_factory.mktemp("data") / "concepts", concept_corpus, {"train": 60, "test": 40}
    )


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory, module_static_encoder):
    path = tmp_path_factory.mktemp("encoder") / "static"
    module_static_encoder.save(path)
    return str(path)


@pytest.fixture(scope="module")
def compared(folder, encoder_folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("output") / "comparison"
    names = ["hce", "bm25", "untrained"]
    return output, compare(folder, output, names, encoder=encoder_folder, seeds=2, settings=BUDGET)


# ------------------------------------------------------------------------------------------------------- the running


def test_documents_with_fields_of_their_own(folder, encoder_folder, tmp_path):
    shutil.copytree(folder, tmp_path / "own")
    own = [json.loads(line) for line in (folder / "corpus.jsonl").read_text().splitlines()]
    own = [{"nr": each["_id"], "words": each["text"], "head": each["title"]} for each in own]
    (tmp_path / "own" / "corpus.jsonl").write_text("\n".join(map(json.dumps, own)))
    values = []
    for place, options in (("usual", []), ("own", ["--fields", "id=nr,text=words,title=head"])):
        source = folder if place == "usual" else tmp_path / "own"
        command = ["compare", str(source), "-o", str(tmp_path / f"{place}-out"), "--systems", "bm25,untrained"]
        done = CliRunner().invoke(app, [*command, "--encoder", encoder_folder, *options])
        assert not done.exit_code, done.output
        found = json.loads((tmp_path / f"{place}-out" / "comparison.json").read_text())
        values.append([(row["system"], row["scores"]) for row in found["rows"]])
    assert values[0] == values[1]


def test_every_system_is_run_and_the_one_without_the_tree_too(compared):
    _, comparison = compared
    assert list(comparison.systems) == ["bm25", "untrained", "no-tree", "hce"]
    assert [(each.system, each.seed) for each in comparison.results] == [
        ("bm25", 0),
        ("untrained", 0),
        ("no-tree", 0),
        ("no-tree", 1),
        ("hce", 0),
        ("hce", 1),
    ]
    assert comparison.pairs == (("hce", "no-tree"),)
    for result in comparison.results:
        assert set(result.per_query) == {"nDCG@10", "R@10", "R@100"}
        assert all(len(values) == 40 for values in result.per_query.values())
        assert result.search_ms > 0
        assert (result.training_seconds > 0) == (result.system in {"no-tree", "hce"})
    assert comparison.results_of("hce")[0].facts["mode"] == "joint"
    assert comparison.about["training"] == "40 labeled queries"  # 20 of 60 are held out to choose by


def test_finished_systems_are_not_run_again(compared, folder, encoder_folder, monkeypatch):
    output, comparison = compared
    for name in comparison.systems:
        monkeypatch.setitem(SYSTEMS, name, replace(SYSTEMS[name], build=lambda task: pytest.fail("was run again")))
    seen = []
    again = compare(
        folder,
        output,
        ["hce", "bm25", "untrained"],
        encoder=encoder_folder,
        seeds=2,
        settings=BUDGET,
        on_result=seen.append,
    )
    assert again == comparison
    assert all(finished.cached for finished in seen)
    with pytest.raises(pytest.fail.Exception):  # another budget is another result
        compare(folder, output, ["hce"], encoder=encoder_folder, settings={**BUDGET, "epochs": 2})
    with pytest.raises(pytest.fail.Exception):
        compare(folder, output, ["bm25"], encoder=encoder_folder, settings=BUDGET, measures=["AP"])


@pytest.fixture(scope="module")
def kept(folder, encoder_folder, tmp_path_factory):
    """A comparison whose models are kept; with the settings of a quick `hce train`, and no other."""
    place = tmp_path_factory.mktemp("kept")
    settings = {"epochs": 2, "batch_size": 32, "dev_queries": 24}
    how = {"encoder": encoder_folder, "settings": settings, "models": place / "models"}
    compare(folder, place / "output", ["hce", "untrained"], **how)
    return place, how


def test_hce_is_what_hce_train_gives(kept, folder, encoder_folder, tmp_path):
    command = ["train", str(folder), "-o", str(tmp_path / "model"), "--encoder", encoder_folder]
    done = CliRunner().invoke(app, [*command, "--epochs", "2", "--set", "batch_size=32", "--set", "dev_queries=24"])
    assert not done.exit_code, done.output
    by_train, by_compare = ModelFacts.read(tmp_path / "model"), ModelFacts.read(kept[0] / "models" / "hce-0")
    assert by_compare.fingerprint == by_train.fingerprint
    assert by_compare.recipe == by_train.recipe
    assert by_compare.words_share == by_train.words_share
    assert len(by_train.shares) > 1  # companions are among the defaults
    assert ModelFacts.read(kept[0] / "models" / "no-tree-0").recipe == {**by_train.recipe, "tree": False}


def test_models_are_kept_for_an_index(kept, concept_corpus, tmp_path):
    models = kept[0] / "models"
    assert sorted(path.name for path in models.iterdir()) == ["hce-0", "no-tree-0"]
    with Index.create(tmp_path / "index", concept_corpus, models / "hce-0") as index:
        assert index.state.manifest.fingerprint == ModelFacts.read(models / "hce-0").fingerprint


def test_a_system_without_its_model_is_run_again(kept, folder, tmp_path, monkeypatch):
    place, how = kept
    compare(folder, place / "output", ["hce", "untrained"], **how)  # nothing to run
    for name in ("hce", "no-tree", "untrained"):
        monkeypatch.setitem(SYSTEMS, name, replace(SYSTEMS[name], build=lambda task: pytest.fail("was run again")))
    compare(folder, place / "output", ["hce", "untrained"], **how)
    with pytest.raises(pytest.fail.Exception):
        compare(folder, place / "output", ["hce"], **{**how, "models": tmp_path / "elsewhere"})
    compare(folder, place / "output", ["untrained"], **{**how, "models": tmp_path / "elsewhere"})  # has no model
    shutil.copytree(how["encoder"], tmp_path / "models" / "no-tree-0")
    with pytest.raises(InputError, match="holds another model"):
        compare(folder, place / "output", ["hce"], **{**how, "models": tmp_path / "models"})


def test_a_killed_comparison_goes_on(folder, encoder_folder, tmp_path, monkeypatch):
    runs = []

    def dying(name, build, task):
        runs.append(name)
        if runs == ["bm25", "untrained"]:
            raise KeyboardInterrupt
        return build(task)

    for name in ("bm25", "untrained"):
        monkeypatch.setitem(SYSTEMS, name, replace(SYSTEMS[name], build=partial(dying, name, SYSTEMS[name].build)))
    with pytest.raises(KeyboardInterrupt):
        compare(folder, tmp_path, ["bm25", "untrained"], encoder=encoder_folder, settings=BUDGET)
    compare(folder, tmp_path, ["bm25", "untrained"], encoder=encoder_folder, settings=BUDGET)
    assert runs == ["bm25", "untrained", "untrained"]
    kept = sorted(path.name.rsplit("-", 1)[0] for path in (tmp_path / "results").iterdir())
    assert kept == ["bm25-0", "untrained-0"]  # and nothing unfinished


def test_all_are_given_the_same(folder, encoder_folder, tmp_path, monkeypatch):
    """Same pairs, dev queries and recipe but for the seed; test queries are nowhere among them."""
    tasks = []

    class Nothing:
        def search(self, queries, k):
            return [[Scored("d0", 1.0)] for _ in queries]

    def build(task):
        tasks.append(task)
        return Built(Nothing(), 0.0, 0.0, 1)

    for name in ("no-tree", "hce"):
        monkeypatch.setitem(SYSTEMS, name, System("nothing", build))
    compare(folder, tmp_path, ["hce"], encoder=encoder_folder, seeds=2)
    assert [task.recipe.seed for task in tasks] == [0, 1, 0, 1]
    assert {(task.recipe.train, task.defaults.train, task.defaults.seed) for task in tasks} == {
        ("encoder", "auto", 0),
        ("encoder", "auto", 1),
    }
    first = tasks[0]
    for task in tasks:
        assert replace(task.recipe, seed=0) == first.recipe
        assert set(task.pairs.queries) == set(first.pairs.queries)
        assert set(task.dev.queries) == set(first.dev.queries)
    assert set(first.pairs.queries) | set(first.dev.queries) == {f"q{n}" for n in range(60)}
    assert not set(first.pairs.queries) & set(first.dev.queries)


def test_a_query_in_two_splits_is_only_measured(folder, encoder_folder, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setitem(SYSTEMS, "bm25", replace(SYSTEMS["bm25"], build=lambda task: seen.append(task) or 1 / 0))
    qrels = folder / "qrels" / "overlap.tsv"
    Qrels([Judgment("q3", "d3", 1), Judgment("q70", "d70", 1)]).write(qrels)
    try:
        with pytest.raises(ZeroDivisionError):
            compare(folder, tmp_path, ["bm25"], encoder=encoder_folder, split="overlap", settings=BUDGET)
    finally:
        qrels.unlink()
    assert "q3" not in seen[0].pairs.queries
    assert "q3" not in seen[0].dev.queries


def test_a_system_is_built_once_for_all_splits(folder, encoder_folder, tmp_path, monkeypatch):
    """Each split has its own queries; the queries of none of them are trained on or chosen by."""
    built = []
    original = SYSTEMS["untrained"].build
    monkeypatch.setitem(
        SYSTEMS, "untrained", replace(SYSTEMS["untrained"], build=lambda task: built.append(task) or original(task))
    )
    qrels = folder / "qrels" / "other.tsv"
    Qrels([Judgment(f"q{number}", f"d{number}", 1) for number in range(50, 60)]).write(qrels)
    try:
        bench = Bench.open(folder, tmp_path, ["test", "other"], encoder=encoder_folder, settings=BUDGET)
    finally:
        qrels.unlink()
    found = bench.compare(["bm25", "untrained"], 1)
    assert len(built) == 1
    assert not {f"q{number}" for number in range(50, 100)} & (set(built[0].pairs.queries) | set(built[0].dev.queries))
    sizes = {split: len(each.per_query("untrained", "R@10")) for split, each in found.items()}
    assert sizes == {"test": 40, "other": 10}
    alone = compare(folder, tmp_path / "alone", ["untrained"], encoder=encoder_folder, settings=BUDGET)
    assert alone.per_query("untrained", "R@10") == found["test"].per_query("untrained", "R@10")
    assert "10 other queries" in found["other"].about["collection"]
    assert bench.compare(["bm25", "untrained"], 1) == found
    assert len(built) == 2  # by `alone`


def test_generated_queries_rerun_only_the_systems_that_see_them(folder, encoder_folder, tmp_path):
    (tmp_path / "generated.jsonl").write_text('{"document": "d1", "query": "w3"}\n')
    seen = []
    compare(folder, tmp_path, ["bm25"], encoder=encoder_folder, settings=BUDGET)
    compare(
        folder,
        tmp_path,
        ["bm25", "bm25+qg"],
        encoder=encoder_folder,
        settings=BUDGET,
        generated=tmp_path / "generated.jsonl",
        on_result=seen.append,
    )
    assert [(each.results["test"].system, each.cached) for each in seen] == [("bm25", True), ("bm25+qg", False)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"systems": ["bm25", "colbert"]}, "unknown system 'colbert'; there are bm25, "),
        ({"systems": ["tsdae"]}, "'tsdae' needs a transformer"),
        ({"systems": ["hce+qg"]}, "needs generated queries"),
        ({"measures": ["goodness"]}, "unknown measure 'goodness'"),
        ({"split": "validation"}, "no split 'validation' .*: test, train"),
        ({"seeds": 0}, "seeds 0"),
        ({"settings": {"batch_size": 1000}}, "batch_size 1000 is larger than the corpus"),
        ({"settings": {"pace": 1}}, "unknown setting pace"),
        ({"generated": "strange.jsonl"}, "document 'nobody' is not in"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(options, message, folder, encoder_folder, tmp_path):
    if "generated" in options:
        (tmp_path / "strange.jsonl").write_text('{"document": "nobody", "query": "x"}\n')
        options = {"generated": tmp_path / "strange.jsonl"}
    with pytest.raises(InputError, match=message):
        compare(folder, tmp_path / "out", encoder=encoder_folder, **{"systems": ["bm25"], **options})
    assert not (tmp_path / "out").exists()


def test_an_output_that_cannot_be_used(folder, encoder_folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file/results: cannot be made a folder"):
        compare(folder, tmp_path / "file", ["bm25"], encoder=encoder_folder)
    compare(folder, tmp_path / "out", ["bm25"], encoder=encoder_folder)
    (result,) = (tmp_path / "out" / "results").iterdir()
    result.write_text("{")
    with pytest.raises(FormatError, match="no result of a comparison"):
        compare(folder, tmp_path / "out", ["bm25"], encoder=encoder_folder)


# --------------------------------------------------------------------------------------------------------- the table


def made_up(**means: list[list[float]]) -> Comparison:
    """Systems by name, each a list of seeds, each a list of values by query."""
    results = [
        Result(
            name.replace("_", "-"), seed, {"M": {f"q{i}": v for i, v in enumerate(values)}}, 12.0, 3.0, 0.5, 2_000_000
        )
        for name, seeds in means.items()
        for seed, values in enumerate(seeds)
    ]
    names = [name.replace("_", "-") for name in means]
    pairs = (("hce", "no-tree"),) if {"hce", "no-tree"} <= set(names) else ()
    return Comparison(
        {"collection": "<b>made up</b>"},
        ("M",),
        {name: f"about {name}" for name in names},
        frozenset({"hce"}),
        tuple(results),
        pairs,
    )


RNG = np.random.default_rng(0)
LOW, MIDDLE = (RNG.random(60) * 0.2).tolist(), (0.4 + RNG.random(60) * 0.2).tolist()
HIGH = [[value + 0.1 + 0.01 * seed for value in MIDDLE] for seed in range(2)]
COMPARISON = made_up(bm25=[LOW], no_tree=[MIDDLE], hce=HIGH)


def test_the_best_rival_is_the_best_without_the_tree():
    assert COMPARISON.best_rival == "no-tree"
    assert made_up(hce=HIGH).best_rival is None
    assert made_up(bm25=[LOW]).best_rival is None


def test_rows_hold_means_spread_and_corrected_significance():
    low, middle, high = table(COMPARISON).rows
    assert [low.mark("M"), middle.mark("M"), high.mark("M")] == [WORSE, REFERENCE, BETTER]
    assert high.scores["M"].mean == pytest.approx(fmean(map(fmean, HIGH)))
    assert high.scores["M"].spread == pytest.approx(0.01 / 2**0.5)
    assert low.scores["M"].spread == 0
    merged = {f"q{i}": (a + b) / 2 for i, (a, b) in enumerate(zip(*HIGH, strict=True))}
    reference = {f"q{i}": value for i, value in enumerate(MIDDLE)}
    expected = compare_paired(merged, reference)
    assert high.versus["M"]._replace(p_holm=expected.p) == expected
    other = compare_paired({f"q{i}": value for i, value in enumerate(LOW)}, reference)
    assert [low.versus["M"].p_holm, high.versus["M"].p_holm] == holm([other.p, expected.p])
    assert middle.versus == {}


def test_a_difference_by_chance_is_not_marked():
    noisy = [[value + (0.01 if i % 2 else -0.0099) for i, value in enumerate(MIDDLE)]]
    _, row = table(made_up(no_tree=[MIDDLE], hce=noisy)).rows
    assert row.versus["M"].difference > 0
    assert row.mark("M") == ""


def test_text_and_markdown_and_json_say_the_same():
    results = table(COMPARISON)
    rows = results.rows
    assert table_cells(rows[1], ["M"]) == ["no-tree", f"{fmean(MIDDLE):.4f} ◆", "12.0 s", "3.0 s", "0.50 ms", "2.0 MB"]
    markdown = as_markdown(results)
    assert "| " + " | ".join(table_cells(rows[2], ["M"])) + " |" in markdown
    assert all(note in markdown for note in notes(results))
    answer = json.loads(json.dumps(as_json(results)))
    assert answer["best_rival"] == "no-tree"
    assert answer["rows"][2]["scores"]["M"]["mean"] == rows[2].scores["M"].mean
    assert answer["rows"][2]["versus_best_rival"]["M"]["p_holm"] == rows[2].versus["M"].p_holm
    (effect,) = answer["tree"]
    assert effect["difference"] == pytest.approx(0.105)
    assert effect["better"] == 60
    assert any("the tree (hce less no-tree): M +0.1050" in note for note in notes(results))


def test_a_system_that_fell_back_is_told_from_one_that_was_trained():
    """What training threw away would otherwise be shown, and tested, as what training made."""
    fallen = replace(
        COMPARISON,
        results=tuple(
            replace(result, facts={"trained": (result.system, result.seed) not in (("hce", 1), ("no-tree", 0))})
            for result in COMPARISON.results
        ),
    )
    results = table(fallen)
    assert [table_cells(row, ["M"])[0] for row in results.rows] == [
        "bm25",
        "no-tree (not trained)",
        "hce (not trained in 1 of 2 seeds)",
    ]
    explained, effect = notes(results)[1:]
    assert explained.startswith("not trained: held-out queries did not call the training better")
    assert effect.endswith("not the tree's doing alone: hce was not trained in 1 of 2 seeds, no-tree was not trained")
    assert as_json(results)["rows"][2]["fallbacks"] == "not trained in 1 of 2 seeds"
    assert "hce (not trained in 1 of 2 seeds)" in page(results)
    assert not any("not trained" in note for note in notes(table(COMPARISON)))


def test_a_single_system_has_a_table_too():
    alone = table(made_up(bm25=[LOW]))
    (row,) = alone.rows
    assert row.mark("M") == ""
    assert notes(alone) == []
    assert "bm25" in as_markdown(alone)
    assert "bm25" in page(alone)


# ---------------------------------------------------------------------------------------------------------- the page


def test_the_page_stands_alone_and_is_escaped():
    results = table(COMPARISON)
    html = page(results)
    assert "&lt;b&gt;made up&lt;/b&gt;" in html
    assert "<b>made up" not in html
    assert not re.search(r"<(?:script|link|img)[^>]+(?:src|href)=", html)  # nothing is fetched
    assert "<script" not in html
    assert html.count("<svg") >= 3
    assert len(html.encode()) < 1_000_000
    for row in results.rows:
        assert "".join(f"<td>{cell}</td>" for cell in table_cells(row, ["M"])) in html


def test_query_ids_cannot_break_out_of_the_page():
    evil = "</script><script>alert(1)</script>"
    results = tuple(
        replace(result, per_query={"M": {evil: 0.5 + 0.1 * len(result.system), "b": 0.1}})
        for result in COMPARISON.results
    )
    comparison = replace(COMPARISON, results=results)
    assert "<script>alert(1)" not in page(table(comparison))
    drawn = differences(comparison, "hce", "no-tree")
    assert "&lt;/script&gt;&lt;script&gt;alert(1)&lt;/script&gt;" in drawn
    assert evil not in drawn


def test_the_command_line(folder, encoder_folder, tmp_path, capsys):
    options = {
        "systems": "bm25, untrained",
        "encoder": encoder_folder,
        "output": tmp_path / "out",
        "split": "test",
        "measures": "nDCG@10,R@100",
        "seeds": 1,
        "generated": None,
        "epochs": 1,
        "epoch_pairs": None,
        "batch_size": None,
    }
    command(folder, **options, as_json=False)
    shown = capsys.readouterr().out
    assert "◆" in shown
    assert "240 documents, 40 test queries" in shown
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "comparison.html",
        "comparison.json",
        "comparison.md",
        "results",
    ]
    command(folder, **options, as_json=True)
    again = capsys.readouterr()
    assert json.loads(again.out) == json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert again.err.count("kept from before") == 2


def test_the_help_names_every_system():
    named = re.search(r"Systems: (.*?)\.\n", command.__doc__, flags=re.DOTALL)
    assert [name.strip() for name in named[1].split(",")] == list(SYSTEMS)


def test_points_of_equal_cost_do_not_share_a_place_for_their_names():
    points = [Point(f"system {i}", 0.0, 0.5, False) for i in range(4)] + [Point("ours", 100.0, 0.9, True)]
    drawn = point_panel(points, "seconds", "nDCG")
    names = re.findall(r'<text class="name \w+" x="([\d.]+)" y="([\d.]+)"', drawn)
    assert len(set(names)) == 5
    circles = [float(x) for x in re.findall(r'<circle class="\w+" cx="([\d.]+)"', drawn)]
    assert max(circles[:4]) < circles[4]


def test_bars_have_the_lengths_of_their_values():
    drawn = bar_panels({"M": [Bar("a", 0.5, 0.4, 0.6, False), Bar("<b>", 1.0, 0.8, 1.0, True)]})
    assert re.findall(r'<i class="(\w+)" style="width:([\d.]+)%', drawn) == [("rival", "50.00"), ("ours", "100.00")]
    assert "&lt;b&gt;" in drawn and "<b>&lt;" not in drawn
