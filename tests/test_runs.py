"""TREC runs: what is written comes back, in the order that trec_eval sees in the file."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
import pytrec_eval
from hypothesis import given, settings
from hypothesis import strategies as st

from hce.errors import InputError
from hce.evaluation.runs import Scored, falling_scores, read_run, write_run

RUN = {"q1": [Scored("d7", 12.5), Scored("d2", 3.0)], "q2": [Scored("é", 0.1)], "empty": []}


@pytest.mark.parametrize("name", ["run.trec", "run.trec.gz"])
def test_six_columns_there_and_back(tmp_path, name):
    path = tmp_path / name
    write_run(path, RUN, tag="mine")
    raw = gzip.decompress(path.read_bytes()) if name.endswith("gz") else path.read_bytes()
    assert raw.decode() == "q1 Q0 d7 1 12.5 mine\nq1 Q0 d2 2 3.0 mine\nq2 Q0 é 1 0.1 mine\n"
    assert read_run(path) == {query: hits for query, hits in RUN.items() if hits}
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_any_spacing_and_any_order_of_lines(tmp_path):
    path = tmp_path / "run"
    path.write_text("q2\tQ0\ta  1 1e-3\tx\r\n\nq1 0 b 7 2 x\n q1 0 c 9 30 x \n")
    assert read_run(path) == {"q2": [Scored("a", 0.001)], "q1": [Scored("c", 30.0), Scored("b", 2.0)]}


def trec_eval_order(scores: dict[str, float]) -> list[str]:
    """The order that trec_eval's code sees, asked of it one document at a time."""
    order = []
    for name in scores:
        evaluator = pytrec_eval.RelevanceEvaluator({"q": {name: 1}}, {"recip_rank"})
        order.append((round(1 / evaluator.evaluate({"q": scores})["q"]["recip_rank"]), name))
    return [name for _, name in sorted(order)]


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Z", "C"]), min_size=1, max_size=3)
# Near enough to each other for equal ones in single precision that differ in double.
SCORES = st.sampled_from([0.0, 1.0, 1.0 + 1e-12, 1.0 + 1e-6, -1.0, -1.0 - 1e-12, 3.5, 1e-30])


@settings(max_examples=60, deadline=None)
@given(scores=st.dictionaries(NAMES, SCORES, min_size=1, max_size=6))
def test_a_file_is_read_in_the_order_that_trec_eval_sees(tmp_path_factory, scores):
    path = tmp_path_factory.mktemp("run") / "run.trec"
    path.write_text("".join(f"q Q0 {name} 1 {score!r} x\n" for name, score in scores.items()), encoding="utf-8")
    read = read_run(path)["q"]
    assert [hit.id for hit in read] == trec_eval_order(scores)
    assert dict(read) == scores  # in double precision, as they stand in the file


@settings(max_examples=60, deadline=None)
@given(hits=st.lists(st.tuples(NAMES, SCORES), min_size=1, max_size=6, unique_by=lambda hit: hit[0]))
def test_what_is_written_keeps_its_order_with_trec_eval(tmp_path_factory, hits):
    path = tmp_path_factory.mktemp("run") / "run.trec"
    ranking = [Scored(*hit) for hit in sorted(hits, key=lambda hit: -hit[1])]  # equal ones in any order
    write_run(path, {"q": ranking})
    read = read_run(path)["q"]
    assert [hit.id for hit in read] == [hit.id for hit in ranking]
    assert trec_eval_order(dict(read)) == [hit.id for hit in ranking]
    assert [hit.score for hit in read] == pytest.approx([hit.score for hit in ranking], rel=1e-6, abs=1e-6)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6, width=32), max_size=20))
def test_scores_fall_and_are_lowered_as_little_as_can_be(scores):
    falling = falling_scores(scores)
    assert falling.dtype == np.float32
    assert (np.diff(falling) < 0).all()
    assert (falling <= np.array(scores, dtype=np.float32)).all()
    distinct = sorted(set(scores), reverse=True)
    assert falling_scores(distinct).tolist() == np.array(distinct, dtype=np.float32).tolist()  # nothing to change


def test_scores_of_zero_are_told_apart_by_machines_without_denormal_numbers():
    falling = falling_scores([0.0] * 4)
    assert (np.abs(falling[1:]) >= np.finfo(np.float32).tiny).all()
    assert (np.diff(falling) < 0).all()


def test_single_precision_comes_back_bit_for_bit(tmp_path):
    scores = np.sort(np.random.default_rng(0).normal(size=1000).astype(np.float32))[::-1]
    write_run(tmp_path / "run", {"q": [Scored(f"d{i}", float(score)) for i, score in enumerate(scores)]})
    read = [hit.score for hit in read_run(tmp_path / "run")["q"]]
    assert np.array_equal(np.array(read, dtype=np.float32), scores)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("q Q0 d 1 0.5", r"line 2: 5 columns; a line of a TREC run has 6: query Q0 document rank score tag"),
        ("q Q0 d 1 0.5 my tag", r"line 2: 7 columns"),
        ("q Q0 d 1 high x", r"line 2: the score 'high' is not a number"),
        ("q Q0 d 1 nan x", r"line 2: the score 'nan' is not a number"),
        ("q Q0 d 1 inf x", r"line 2: the score 'inf' is not a number"),
        ("q Q0 first 2 0.25 x", r"line 2: query 'q' finds document 'first' a second time; keep one"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "run.trec"
    path.write_text(f"q Q0 first 1 0.75 x\n{line}\n")
    with pytest.raises(InputError, match=message) as caught:
        read_run(path)
    assert str(caught.value).startswith(f"{path}, line 2: ")


def test_an_empty_run_and_none_at_all(tmp_path):
    (tmp_path / "empty.trec").write_text("\n \n")
    with pytest.raises(InputError, match=r"empty\.trec: the run has no hits in it; check the path"):
        read_run(tmp_path / "empty.trec")
    with pytest.raises(InputError, match=r"nowhere\.trec: cannot be read \(No such file"):
        read_run(tmp_path / "nowhere.trec")


@pytest.mark.parametrize(
    ("run", "tag", "message"),
    [
        ({"a query": [Scored("d", 1.0)]}, "x", "query id 'a query' is empty or holds white space"),
        ({"q": [Scored("a\tdocument", 1.0)]}, "x", r"document id 'a\\tdocument' is empty or holds white space"),
        ({"q": [Scored("", 1.0)]}, "x", "document id '' is empty"),
        ({"q": [Scored("d", 1.0)]}, "my system", "tag 'my system' is empty or holds white space"),
        ({"q": [Scored("d", float("nan"))]}, "x", "score nan is not finite"),
        ({"q": [Scored("d", 1e300)]}, "x", r"score 1e\+300 is not finite"),
        ({"q": [], "r": []}, "x", "not written, as no query has a hit"),
    ],
)
def test_what_a_run_cannot_hold_leaves_no_file(tmp_path, run, tag, message):
    with pytest.raises(InputError, match=message):
        write_run(tmp_path / "run", run, tag)
    assert list(tmp_path.iterdir()) == []
