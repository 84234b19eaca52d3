"""The tree stays a tree whatever is added and removed, and its beam finds what it should."""

from __future__ import annotations

import gc
import math

import faiss
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from hce.checksums import write_checksums
from hce.memory import LEAF
from hce.search import tree_engine
from hce.search.engine import ARRAYS, load_engine, new_engine
from hce.search.lists import Lists
from hce.search.tree_engine import INNER, MOST, ROOT, TreeEngine, bounds, cut_up
from hce.tree.hierarchy import Hierarchy

DIM = 16


def unit(count: int, seed: int, topics: int = 30, spread: float = 0.6) -> np.ndarray:
    """Unit vectors around topics, the same for every seed."""
    rng = np.random.default_rng([2, seed])
    centres = np.random.default_rng(0).standard_normal((topics, DIM))
    vectors = centres[rng.integers(topics, size=count)] + spread * rng.standard_normal((count, DIM))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def built(vectors: np.ndarray, **options) -> TreeEngine:
    return new_engine("tree", DIM, numbers=np.arange(len(vectors)), vectors=vectors, **options)


def stored(layer: Lists) -> dict[int, tuple[int, np.ndarray]]:
    """Id → list and vector, read out of faiss's lists alone."""
    found = {}
    for number in range(layer.file.index.nlist):
        members = layer.members(np.array([number]))
        for id_, vector in zip(members.ids.tolist(), members.vectors, strict=True):
            assert id_ not in found, "in two lists"
            found[id_] = (number, vector)
    return found


def assert_is_a_tree(engine: TreeEngine, known: dict[int, np.ndarray]) -> None:
    layers, branching = engine._layers.lists, engine._layers.branching
    assert len(layers) == len(branching) >= 2
    for number, layer in enumerate(layers):
        content = stored(layer)
        assert layer.file.index.ntotal == len(content)
        assert layer.ids.tolist() == sorted(content)
        assert [content[id_][0] for id_ in layer.ids.tolist()] == layer.home.tolist()
        nodes = set(engine._layers.nodes(number).tolist())
        assert set(layer.home.tolist()) <= nodes, "children of no node"
        if number:
            least, most = bounds(branching[number])
            sizes = layer.sizes()[sorted(nodes)]
            assert sizes.max() <= most
            assert np.sum(sizes < least) == 0 or len(sizes) == 1
            assert set(layer.home.tolist()) == nodes or len(nodes) == 1
    for layer in layers[:-1]:
        lengths = np.linalg.norm(layer.everything().vectors, axis=1)
        assert np.allclose(lengths, 1, atol=2e-3)  # unit centroids, in float16
    assert len(layers[0]) <= MOST * ROOT
    documents = stored(layers[-1])
    assert sorted(documents) == sorted(known)
    assert all(np.array_equal(documents[n][1], vector) for n, vector in known.items())


operations = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "twins"]), st.integers(0, 120), st.integers(0, 99)), max_size=7
)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(first=st.integers(0, 150), steps=operations)
def test_still_a_tree_after_any_changes(first, steps):
    vectors = unit(first, 0)
    engine, known, free = built(vectors), dict(enumerate(vectors)), first
    assert_is_a_tree(engine, known)
    for what, count, seed in steps:
        if what == "remove":
            gone = np.random.default_rng(seed).permutation(sorted(known))[:count].astype(np.int64)
            engine.remove(gone)
            known = {number: vector for number, vector in known.items() if number not in set(gone.tolist())}
        else:
            more = unit(count, seed) if what == "add" else np.repeat(unit(1, seed), count, axis=0)
            engine.add(np.arange(free, free + count), more)
            known |= dict(zip(range(free, free + count), more, strict=True))
            free += count
        assert_is_a_tree(engine, known)
    engine.effort = math.inf
    queries, k = unit(5, 1234), 7
    exact = engine.search(queries, k, allowed=np.arange(free))
    assert np.array_equal(engine.search(queries, k).scores, exact.scores)


@pytest.mark.parametrize("beam", [1, 32])  # one node alone often leads to no list that is left
def test_still_a_tree_where_not_all_lists_are_compared(beam, monkeypatch):
    monkeypatch.setattr(tree_engine, "MANY", 0)
    monkeypatch.setattr(tree_engine, "BEAM", beam)
    vectors = np.concatenate([unit(1500, 0, spread=1.0), np.repeat(unit(1, 5), 60, axis=0)])
    engine, numbers = built(vectors[:900]), np.arange(len(vectors))
    engine.add(numbers[900:], vectors[900:])
    assert_is_a_tree(engine, dict(enumerate(vectors)))
    engine.remove(numbers[100:1300])
    assert_is_a_tree(engine, {n: vectors[n] for n in (*range(100), *range(1300, len(vectors)))})


def test_full_effort_is_exact_search():
    vectors, queries = unit(3000, 0, spread=1.0), unit(100, 1, spread=1.0)
    engine = built(vectors)
    engine.effort = math.inf
    flat = new_engine("flat", DIM, numbers=np.arange(3000), vectors=vectors)
    found, exact = engine.search(queries, 10), flat.search(queries, 10)
    assert np.array_equal(found.numbers, exact.numbers)
    assert np.allclose(found.scores, exact.scores, atol=1e-6)


def test_more_effort_finds_more_and_looks_at_more():
    vectors, queries = unit(6000, 0, spread=1.0), unit(200, 1, spread=1.0)
    engine = built(vectors)
    exact = engine.search(queries, 10, allowed=np.arange(6000)).numbers
    recalls, looked_at = [], []
    for effort in (0.3, 1, 3, 10):
        engine.effort = effort
        faiss.cvar.indexIVF_stats.reset()
        found = engine.search(queries, 10).numbers
        looked_at.append(faiss.cvar.indexIVF_stats.ndis / len(queries))
        recalls.append(
            np.mean([len(set(a) & set(b)) / 10 for a, b in zip(exact.tolist(), found.tolist(), strict=True)])
        )
    assert recalls == sorted(recalls) and looked_at == sorted(looked_at)
    assert recalls[0] < 0.9 < 0.99 < recalls[-1]
    assert looked_at[1] < 600 < looked_at[-1] < 6000


def test_a_broad_tree_is_grown_anew_with_smaller_leaves():
    vectors = unit(4000, 0)
    trained = Hierarchy.build(vectors, 64)
    engine = built(vectors, hierarchy=trained)
    assert_is_a_tree(engine, dict(enumerate(vectors)))
    layers = engine._layers.lists
    assert 0.7 * 4000 / LEAF < len(layers[-2]) < 1.3 * 4000 / LEAF


def test_a_fine_tree_is_taken_as_it_is():
    vectors = unit(2000, 0)
    tree = Hierarchy.build(vectors, 8)
    layers = built(vectors, hierarchy=tree)._layers.lists
    assert abs(len(layers[-2]) - len(tree.levels[-1].centroids)) < 0.1 * len(layers[-2])
    assert len(layers) == tree.depth


def test_grown_from_nothing_by_small_steps():
    vectors, queries = unit(6000, 0, topics=300), unit(200, 1, topics=300)
    engine = built(vectors[:0])
    engine.add(np.arange(10), vectors[:10])
    assert len(engine._layers.lists) == 2
    for start in range(10, 6000, 40):
        numbers = np.arange(start, min(start + 40, 6000))
        engine.add(numbers, vectors[numbers])
    assert_is_a_tree(engine, dict(enumerate(vectors)))
    assert engine._layers.branching == [ROOT, INNER, LEAF]  # the root has been raised
    exact = engine.search(queries, 10, allowed=np.arange(6000)).numbers
    found = engine.search(queries, 10).numbers
    assert np.mean([len(set(a) & set(b)) / 10 for a, b in zip(exact.tolist(), found.tolist(), strict=True)]) > 0.95


def test_new_documents_go_where_their_topic_is_and_make_leaves_for_new_ones():
    axes = np.eye(DIM, dtype=np.float32)
    rng = np.random.default_rng(0)

    def around(axis: int, count: int) -> np.ndarray:
        rows = axes[axis] + 0.1 * rng.standard_normal((count, DIM)).astype(np.float32)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    engine = built(np.concatenate([around(axis, 40) for axis in range(4)]))
    engine.add(np.arange(1000, 1010), around(2, 10))
    engine.add(np.arange(2000, 2150), around(9, 150))
    documents = engine._layers.documents
    topic = {n: n // 40 for n in range(160)} | dict.fromkeys(range(1000, 1010), 2) | dict.fromkeys(range(2000, 2150), 9)
    with_their_own = []
    for leaf in np.unique(documents.home):
        topics = [topic[n] for n in documents.ids[documents.home == leaf].tolist()]
        assert 2 not in topics or set(topics) <= {2, 9}
        with_their_own += [topics.count(9)] * (topics.count(9) > len(topics) / 2)
    assert len(with_their_own) > 1 and sum(with_their_own) >= 120


def test_thousands_of_equal_documents_and_none_left():
    twins = np.repeat(unit(1, 0), 1000, axis=0)
    engine = built(twins)
    assert_is_a_tree(engine, dict(enumerate(twins)))
    engine.add(np.arange(1000, 1300), twins[:300])
    assert_is_a_tree(engine, dict(enumerate(np.concatenate([twins, twins[:300]]))))
    assert len(set(engine.search(twins[:1], 50).numbers[0].tolist())) == 50
    engine.remove(np.arange(1300))
    assert len(engine) == 0
    engine.add(np.arange(1300, 1400), unit(100, 1))
    assert_is_a_tree(engine, dict(zip(range(1300, 1400), unit(100, 1), strict=True)))


def test_most_documents_gone_at_once():
    vectors = unit(3000, 0)
    engine = built(vectors)
    gone = np.setdiff1d(np.arange(3000), np.arange(0, 3000, 15))
    engine.remove(gone)
    assert_is_a_tree(engine, {n: vectors[n] for n in range(0, 3000, 15)})
    assert np.array_equal(engine.search(vectors[::15], 1).numbers[:, 0], np.arange(0, 3000, 15))


def test_saved_and_loaded_it_is_the_same(tmp_path):
    vectors, queries = unit(1000, 0), unit(50, 1)
    engine = built(vectors[:900])
    engine.add(np.arange(900, 1000), vectors[900:])
    engine.save(tmp_path)
    earlier = {**load_file(tmp_path / ARRAYS), "seed": np.zeros(1, np.int64)}  # of which nothing is made any more
    save_file(earlier, tmp_path / ARRAYS)
    write_checksums(tmp_path)
    loaded = load_engine("tree", tmp_path, DIM)
    assert_is_a_tree(loaded, dict(enumerate(vectors)))
    assert np.array_equal(loaded.search(queries, 10).numbers, engine.search(queries, 10).numbers)
    for each in (engine, loaded):
        each.add(np.arange(1000, 1500), unit(500, 3))
    assert np.array_equal(loaded.search(queries, 10).numbers, engine.search(queries, 10).numbers)


@pytest.mark.parametrize("count", [9, 33, 200])
def test_parts_are_within_bounds(count):
    for vectors in (unit(count, 1), np.repeat(unit(1, 0), count, axis=0), _heap_and_outliers(count)):
        assignment, centroids = cut_up(vectors, 8)
        sizes = np.bincount(assignment)
        assert len(sizes) == len(centroids) >= 2 or count < 12
        assert sizes.min() >= 2 and sizes.max() <= 32
        means = np.stack([vectors[assignment == part].mean(axis=0) for part in range(len(sizes))])
        assert np.allclose(centroids, means / np.linalg.norm(means, axis=1, keepdims=True), atol=1e-5)


def _heap_and_outliers(count: int) -> np.ndarray:
    """One heap, and three single vectors far from it and from each other."""
    heap = np.repeat(np.eye(DIM, dtype=np.float32)[:1], count - 3, axis=0)
    return np.concatenate([heap, np.eye(DIM, dtype=np.float32)[3:6]])


def test_bounds_by_hand():
    assert bounds(8) == (2, 32)
    assert bounds(16) == (4, 64)
    assert bounds(9) == (3, 36)


def test_a_descent_keeps_alive_what_it_looks_into():
    vectors, queries = unit(1000, 0), unit(20, 1)
    engine = built(vectors, dtype="float16")
    descent, expected = engine._descent(), engine.search(queries, 5).numbers
    del engine
    gc.collect()
    np.empty((1000, DIM), np.float16).fill(1)  # over memory that was let go of
    found = descent.search(queries, 13, 190.0).numbers
    assert all(set(wanted) <= set(row) for wanted, row in zip(expected.tolist(), found.tolist(), strict=True))
