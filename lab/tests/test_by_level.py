"""Where queries lose their way: a tree small enough to follow by hand, and what must hold in any tree."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hce.data.judgments import Judgment, Qrels
from hce.errors import InputError
from hce.search.engine import nearest
from hce.tree.hierarchy import Hierarchy, Level
from hce_lab.experiments.by_level import diagnose


def at(degrees: float) -> np.ndarray:
    """A direction in the plane."""
    return np.array([math.cos(math.radians(degrees)), math.sin(math.radians(degrees))], dtype=np.float32)


# Two halves, each of two nodes, each of two documents, around the circle. The fourth document lies where the second
# half begins, and its ancestors do not: a query near it takes the wrong half.
#
#   level 1        0 (45°)              1 (225°)
#   level 2     0 (20°)  1 (70°)     2 (180°)  3 (270°)
#   documents   0°  40°  60°  150°   170° 200°  250° 290°
ANGLES = (0, 40, 60, 150, 170, 200, 250, 290)
IDS = [f"d{angle}" for angle in ANGLES]
VECTORS = np.stack([at(angle) for angle in ANGLES])


@pytest.fixture
def tree() -> Hierarchy:
    top = Level(np.zeros(2, dtype=np.int64), np.stack([at(45), at(225)]))
    middle = Level(np.array([0, 0, 1, 1]), np.stack([at(20), at(70), at(180), at(270)]))
    return Hierarchy((top, middle), np.array([0, 0, 1, 1, 2, 2, 3, 3]), (1.0, 1.0), {})


def test_the_way_down_by_hand(tree):
    def way(degrees: float, beam: int) -> list[list[int]]:
        return [nodes[0].tolist() for nodes in tree.walk(at(degrees)[None], beam, VECTORS)]

    assert way(5, 1) == [[0], [0], [0], [0]]
    assert way(140, 1) == [[0], [1], [2], [4]]
    # A beam of 2 keeps both halves, then the two best of four nodes, then the two best of their documents.
    assert way(140, 2) == [[0], [1, 0], [2, 1], [3, 4]]


QUERIES = {
    "found": at(5),  # 0° under 20° under 45°
    "last": at(52),  # node 70° holds 60°, which is the nearest; 150° was wanted
    "second": at(52),  # goes to node 70°, and 40° under node 20° was wanted
    "first": at(140),  # 150° is the nearest of all, and lies in the other half
    "two": at(190),  # of 200° and 290°, both in the right half, the first is found
}
QRELS = Qrels(
    [
        Judgment("found", "d0", 1),
        Judgment("found", "d290", 0),
        Judgment("last", "d150", 1),
        Judgment("second", "d40", 1),
        Judgment("first", "d150", 1),
        Judgment("two", "d290", 2),
        Judgment("two", "d200", 1),
    ]
)


def test_a_diagnosis_by_hand(tree):
    diagnosis = diagnose(tree, IDS, VECTORS, QUERIES, QRELS, beam=2)
    assert diagnosis.left_at == {"found": None, "last": 3, "second": 2, "first": 1, "two": None}
    assert diagnosis.skipped == []
    first, second, last = diagnosis.steps
    assert [step.level for step in diagnosis.steps] == [1, 2, 3]
    assert [step.choices for step in diagnosis.steps] == [2, 2, 2]
    assert (first.reached, second.reached, last.reached) == pytest.approx((4 / 5, 3 / 5, 2 / 5))
    assert (first.accuracy, second.accuracy, last.accuracy) == pytest.approx((4 / 5, 3 / 4, 2 / 3))
    # Led to the right half, "first" finds node 70° and 150° in it; led to node 20°, "second" finds 40°.
    assert (first.forced, second.forced, last.forced) == pytest.approx((4 / 5, 4 / 5, 4 / 5))
    # The beam finds 150° for "first", and 40° for "second" beside 60°.
    assert (first.reached_by_beam, second.reached_by_beam, last.reached_by_beam) == pytest.approx((1, 1, 4 / 5))


def test_the_table_and_the_verdict(tree):
    diagnosis = diagnose(tree, IDS, VECTORS, QUERIES, QRELS, beam=2)
    assert str(diagnosis).splitlines() == [
        "step            choices  accuracy  forced  reached   beam 2",
        "1                   2.0     0.800   0.800    0.800    1.000",
        "2                   2.0     0.750   0.800    0.600    1.000",
        "3, document         2.0     0.667   0.800    0.400    0.800",
        "the last step, to the document, is the weakest, as the paper supposes",
    ]
    some = {name: QUERIES[name] for name in ("found", "first")}
    assert diagnose(tree, IDS, VECTORS, some, QRELS).verdict.startswith("step 1 is the weakest; the paper supposes")


def test_queries_without_a_relevant_document_in_the_tree_are_set_apart(tree):
    qrels = Qrels([Judgment("found", "d0", 1), Judgment("first", "elsewhere", 1), Judgment("two", "d200", 0)])
    diagnosis = diagnose(tree, IDS, VECTORS, QUERIES, qrels)
    assert diagnosis.left_at == {"found": None}
    assert diagnosis.skipped == ["last", "second", "first", "two"]
    with pytest.raises(InputError, match="no query has a relevant document in the tree"):
        diagnose(tree, IDS, VECTORS, {"first": at(0)}, qrels)


def test_parts_that_do_not_belong_together(tree):
    with pytest.raises(InputError, match="a tree of 8 documents, 7 ids and 8 vectors"):
        diagnose(tree, IDS[:7], VECTORS, QUERIES, QRELS)


def test_a_step_that_no_query_reaches_is_zero(tree):
    diagnosis = diagnose(tree, IDS, VECTORS, {"first": at(140)}, QRELS)
    assert [step.accuracy for step in diagnosis.steps] == [0, 0, 0]
    assert diagnosis.verdict.startswith("step 1 ")


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), branching=st.integers(2, 6), beam=st.sampled_from([1, 3, 60]))
def test_in_any_tree(seed, branching, beam):
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(60, 6)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    tree = Hierarchy.build(vectors, branching, seed=seed)
    ids = [f"d{number}" for number in range(60)]
    queries = {f"q{number}": rng.normal(size=6).astype(np.float32) for number in range(12)}
    qrels = Qrels(Judgment(query, f"d{rng.integers(60)}", 1) for query in queries for _ in range(3))
    diagnosis = diagnose(tree, ids, vectors, queries, qrels, beam=beam)
    reached = [step.reached for step in diagnosis.steps]
    assert reached == sorted(reached, reverse=True)  # who is off the way does not come back
    np.testing.assert_allclose(np.cumprod([step.accuracy for step in diagnosis.steps]), reached)
    # Two routes: the shares by level, and the levels by query.
    for step in diagnosis.steps:
        still = [level is None or level > step.level for level in diagnosis.left_at.values()]
        assert step.reached == pytest.approx(np.mean(still))
    if beam == 1:
        assert [step.reached_by_beam for step in diagnosis.steps] == reached
    if beam == 60:
        assert [step.reached_by_beam for step in diagnosis.steps] == [1.0] * tree.depth


def test_a_beam_as_wide_as_the_tree_is_exact_search(tree):
    for query in QUERIES.values():
        order, _ = nearest(query[None], VECTORS, 8)
        assert tree.walk(query[None], 8, VECTORS)[-1].tolist() == order.tolist()


def test_without_levels_the_only_step_is_exact_search():
    flat = Hierarchy((), np.zeros(8, dtype=np.int64), (), {})
    diagnosis = diagnose(flat, IDS, VECTORS, QUERIES, QRELS, beam=3)
    (step,) = diagnosis.steps
    assert step.choices == 8
    assert step.reached == step.forced == pytest.approx(3 / 5)  # 0°, 150° for "first", 200°
    assert "single level" in diagnosis.verdict
