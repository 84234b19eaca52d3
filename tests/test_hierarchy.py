"""The tree's invariants over random collections, its relations by hand, and its life on disk."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import normalized_mutual_info_score

import hce.progress
from hce.errors import FormatError, InputError
from hce.tree.hierarchy import LARGEST, Hierarchy, Level, branching_for_depth, evened, level_sizes, power_of_two
from hce.tree.names import name_nodes


def unit_rows(count: int, dim: int, seed: int, distinct: int | None = None) -> np.ndarray:
    """Random directions; with `distinct`, only that many different ones."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(distinct or count, dim))
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return rows[rng.integers(len(rows), size=count) if distinct else slice(None)].astype(np.float32)


@pytest.fixture
def small_tree() -> Hierarchy:
    """Two nodes under the root with 2 and 1 children, which hold documents 0 3 5, 1, and 2 4."""
    e = np.eye(3, dtype=np.float32)
    levels = (Level(np.array([0, 0]), e[:2]), Level(np.array([0, 0, 1]), e))
    return Hierarchy(levels, np.array([0, 1, 2, 0, 2, 0]), (1.0, 1.0), {"branching": 2, "method": "hand", "seed": 0})


# --------------------------------------------------------------------------------------------------- shape of a tree


@pytest.mark.parametrize(
    ("count", "depth", "expected"),
    [
        (1_000_000, 3, 100),
        (5183, 3, 18),
        (3633, 3, 16),
        (4096, 3, 16),
        (4097, 3, 17),
        (513, 3, 9),
        (512, 3, 8),
        (1, 3, 2),
        (100, 1, 100),
    ],
)
def test_branching_is_the_least_that_reaches_the_depth(count, depth, expected):
    assert branching_for_depth(count, depth) == expected


@given(st.integers(65, 10**7))
def test_the_first_level_has_about_as_many_nodes_as_a_node_has_children(count):
    b = branching_for_depth(count, 3)
    assert b / 2 < level_sizes(count, b)[0] <= b


@pytest.mark.parametrize(("count", "expected"), [(1_000_000, 128), (5183, 32), (3633, 16), (4097, 32), (512, 8)])
def test_the_papers_rule_rounds_up_to_a_power_of_two(count, expected):
    assert power_of_two(branching_for_depth(count, 3)) == expected


def on_circle(*degrees: float) -> np.ndarray:
    radians = np.deg2rad(degrees)
    return np.stack([np.cos(radians), np.sin(radians)], axis=1).astype(np.float32)


def test_a_full_cluster_gives_away_the_node_that_loses_least():
    """Of eight documents a cluster of two may have eight at most, so here a mean of 3 allows 6 of 9."""
    nodes, sizes = on_circle(0, 10, 20, 90, 180), np.array([3.0, 2.0, 2.0, 1.0, 1.0])
    parent, centroids = evened(nodes, sizes, np.array([0, 0, 0, 1, 2]), on_circle(10, 90, 180))
    assert parent.tolist() == [0, 0, 1, 1, 2]
    np.testing.assert_allclose(centroids, on_circle(5, 55, 180), atol=1e-6)


def test_an_even_level_stays_as_it_is():
    nodes, parent, centroids = on_circle(0, 10, 90, 100), np.array([0, 0, 1, 1]), on_circle(5, 95)
    same, unmoved = evened(nodes, np.ones(4), parent, centroids)
    assert same is parent
    assert unmoved is centroids


@given(st.integers(0, 10**6), st.integers(2, 8), st.integers(20, 60))
@settings(max_examples=50, deadline=None)
def test_no_cluster_has_more_than_its_most(seed, clusters, count):
    """Nodes are small enough that a cluster always has room for one."""
    draw = np.random.default_rng(seed)
    nodes = draw.normal(1, 1, (count, 5)).astype(np.float32)
    nodes /= np.linalg.norm(nodes, axis=1, keepdims=True)
    parent = np.concatenate([np.arange(clusters), np.zeros(count - clusters, dtype=np.int64)])
    sizes = draw.integers(1, 3, count).astype(float)
    after, centroids = evened(nodes, sizes, parent, nodes[:clusters])
    assert np.bincount(after, sizes).max() <= LARGEST * sizes.sum() / clusters
    assert sorted(set(after.tolist())) == list(range(clusters))
    np.testing.assert_allclose(np.linalg.norm(centroids, axis=1), 1, atol=1e-5)


def test_the_papers_start_leaves_upper_levels_as_clustered():
    """A level's parts differ only where the start of k-means is not the paper's."""
    draw = np.random.default_rng(3)
    vectors = np.concatenate([draw.normal(0, 0.1, (190, 8)) + 1, draw.normal(0, 1, (20, 8))]).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    largest = {
        init: Hierarchy.build(vectors, 6, init=init).document_counts()[1].max() / (210 / 6)
        for init in ("points", "random")
    }
    assert largest["points"] <= LARGEST < largest["random"]


def test_depth_is_counted_and_not_computed_in_floating_point():
    assert math.ceil(math.log(8**7, 8)) == 8  # the trap: it is 7
    assert len(level_sizes(8**7, 8)) + 1 == 7
    assert level_sizes(1000, 10) == [10, 100]
    assert level_sizes(1001, 10) == [2, 11, 101]
    assert level_sizes(10, 10) == []


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 300),
    branching=st.integers(2, 20),
    seed=st.integers(0, 5),
    duplicates=st.booleans(),
)
def test_invariants(count, branching, seed, duplicates):
    vectors = unit_rows(count, 6, seed, distinct=max(1, count // 5) if duplicates else None)
    tree = Hierarchy.build(vectors, branching, seed=seed, mode="exact")
    again = Hierarchy.build(vectors, branching, seed=seed, mode="exact")

    assert tree.depth == len(level_sizes(count, branching)) + 1
    assert tree.paths.shape == (count, tree.depth)  # each document once, all paths of length L
    np.testing.assert_array_equal(tree.paths[:, -1], np.arange(count))
    for level in range(1, tree.depth + 1):
        nodes = tree.node_count(level - 1)
        families = [tree.children(level - 1, node) for node in range(nodes)]
        assert all(len(family) for family in families)  # no node without a child
        np.testing.assert_array_equal(np.sort(np.concatenate(families)), np.arange(tree.node_count(level)))  # partition
    for level in tree.levels:
        np.testing.assert_allclose(np.linalg.norm(level.centroids, axis=1), 1, atol=1e-5)
        assert (np.diff(level.parent) >= 0).all()  # siblings are neighbours
    np.testing.assert_array_equal(again.paths, tree.paths)


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(5, 300),
    branching=st.integers(2, 12),
    seed=st.integers(0, 5),
    duplicates=st.booleans(),
    init=st.sampled_from(["points", "random"]),
)
def test_members_are_under_the_nearest_centroid_which_is_their_mean(count, branching, seed, duplicates, init):
    """Above the leaves, nodes are under the nearest one only where levels are not evened out."""
    vectors = unit_rows(count, 6, seed, distinct=max(1, count // 5) if duplicates else None)
    tree = Hierarchy.build(vectors, branching, seed=seed, mode="exact", init=init)
    members = [*(level.centroids for level in tree.levels[1:]), vectors]
    for level, below in enumerate(members, start=1):
        if tree.depth == 1:
            return
        centroids, parent = tree.levels[level - 1].centroids, tree._parent(level + 1)
        scores = below @ centroids.T
        if init == "random" or level == len(members):
            np.testing.assert_allclose(scores[np.arange(len(below)), parent], scores.max(axis=1), atol=1e-5)
        sums = np.zeros_like(centroids)
        np.add.at(sums, parent, below)
        lengths = np.linalg.norm(sums, axis=1, keepdims=True)
        settled = lengths[:, 0] > 1e-3  # opposite members have no mean direction
        np.testing.assert_allclose((sums / np.maximum(lengths, 1e-9))[settled], centroids[settled], atol=1e-4)


def test_planted_tree_is_found():
    rng = np.random.default_rng(0)
    top = np.linalg.qr(rng.normal(size=(24, 24)))[0][:4]
    kinds = np.repeat(top, 4, axis=0) + 0.35 * np.linalg.qr(rng.normal(size=(24, 24)))[0][:16]
    vectors = np.repeat(kinds, 8, axis=0) + 0.02 * rng.normal(size=(128, 24))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    tree = min((Hierarchy.build(vectors, 8, seed=s) for s in range(5)), key=lambda t: -sum(t.mean_cosines))
    assert [len(level.parent) for level in tree.levels] == [2, 16]
    planted = np.repeat(np.arange(16), 8)
    assert normalized_mutual_info_score(planted, tree.nodes_at(2)) > 0.85  # random starts split some, merge others


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"branching": 1}, "branching factor 1"),
        ({"depth": 0}, "depth 0"),
    ],
)
def test_wrong_options_are_one_line(options, message):
    with pytest.raises(InputError, match=message):
        Hierarchy.build(unit_rows(10, 4, 0), **options)


def test_no_vectors():
    with pytest.raises(InputError, match="no vectors"):
        Hierarchy.build(np.empty((0, 4), dtype=np.float32))


def test_one_document_is_a_tree():
    tree = Hierarchy.build(unit_rows(1, 4, 0))
    assert tree.depth == 1
    assert tree.path(0) == (0,)
    assert tree.describe() == []
    assert tree.children(0, 0).tolist() == [0]
    assert tree.sample_siblings(np.array([0]), 3, np.random.default_rng(0)).tolist() == [[-1, -1, -1]]


# --------------------------------------------------------------------------------------------------------- relations


def test_relations_by_hand(small_tree):
    assert small_tree.depth == 3
    assert small_tree.path(3) == (0, 0, 3)
    assert small_tree.path(4) == (1, 2, 4)
    assert small_tree.children(0, 0).tolist() == [0, 1]
    assert small_tree.children(1, 0).tolist() == [0, 1]
    assert small_tree.children(2, 0).tolist() == [0, 3, 5]
    assert small_tree.siblings(1, 0).tolist() == [1]
    assert small_tree.siblings(2, 2).tolist() == []
    assert small_tree.siblings(3, 3).tolist() == [0, 5]
    assert small_tree.documents_under(1, 0).tolist() == [0, 1, 3, 5]
    assert small_tree.documents_under(0, 0).tolist() == [0, 1, 2, 3, 4, 5]
    assert small_tree.nodes_at(1).tolist() == [0, 0, 1, 0, 1, 0]
    assert small_tree.ancestors(3, np.array([3, 4])).tolist() == [[0, 0, 0, 3], [0, 1, 2, 4]]
    assert small_tree.ancestors(2, np.array([1, 2])).tolist() == [[0, 0, 1], [0, 1, 2]]
    assert small_tree.ancestors(0, np.array([0])).tolist() == [[0]]
    assert [counts.tolist() for counts in small_tree.document_counts()] == [[6], [4, 2], [3, 1, 2]]
    assert [counts.tolist() for counts in small_tree.document_counts(np.array([1, 1]))] == [[2], [2, 0], [0, 2, 0]]
    with pytest.raises(InputError, match="level 4"):
        small_tree.nodes_at(4)


def test_describe_by_hand(small_tree):
    first, second = small_tree.describe()
    assert first.nodes == 2
    assert first.sizes == (2, 2, 2, 4, 4) or (first.sizes[0] == 2 and first.sizes[-1] == 4)
    share = np.array([4, 2]) / 6
    assert first.balance == pytest.approx(-(share * np.log2(share)).sum())
    assert second.nodes == 3
    assert (second.sizes[0], second.sizes[2], second.sizes[-1]) == (1, 2, 3)


def test_sampled_siblings_by_hand(small_tree):
    drawn = small_tree.sample_siblings(np.array([3, 1, 4]), 3, np.random.default_rng(0))
    assert sorted(drawn[0, :2].tolist()) == [0, 5]
    assert drawn[0, 2] == -1
    assert drawn[1].tolist() == [-1, -1, -1]  # an only child
    assert drawn[2].tolist() == [2, -1, -1]


@settings(max_examples=40, deadline=None)
@given(count=st.integers(2, 200), branching=st.integers(2, 30), wanted=st.integers(1, 6), seed=st.integers(0, 9))
def test_sampled_siblings_are_other_documents_of_the_same_parent(count, branching, wanted, seed):
    tree = Hierarchy.build(unit_rows(count, 5, seed), branching, seed=seed)
    documents = np.random.default_rng(seed).integers(count, size=40)
    drawn = tree.sample_siblings(documents, wanted, np.random.default_rng(seed))
    assert drawn.shape == (40, wanted)
    for document, row in zip(documents, drawn, strict=True):
        siblings = set(tree.siblings(tree.depth, int(document)).tolist())
        chosen = [other for other in row.tolist() if other >= 0]
        assert len(chosen) == min(wanted, len(siblings))  # as many as there are
        assert len(set(chosen)) == len(chosen)  # none twice
        assert set(chosen) <= siblings  # never itself


def test_sampling_is_uniform():
    tree = Hierarchy((), np.zeros(6, dtype=np.int64), (), {})
    drawn = tree.sample_siblings(np.full(20_000, 2), 2, np.random.default_rng(0))
    counts = np.bincount(drawn.ravel(), minlength=6)
    assert counts[2] == 0
    np.testing.assert_allclose(counts[[0, 1, 3, 4, 5]] / 40_000, 0.2, atol=0.01)
    pairs = np.bincount(drawn[:, 0] * 6 + drawn[:, 1], minlength=36)
    np.testing.assert_allclose(pairs[pairs > 0] / 20_000, 1 / 20, atol=0.008)
    assert (pairs > 0).sum() == 20


# ------------------------------------------------------------------------------------------------------- the way down


def kept_by_brute_force(
    tree: Hierarchy, vector: np.ndarray, beam: int, documents: np.ndarray | None
) -> list[list[int]]:
    """Compare the vector with every node of each level, and rank those whose parent was kept."""
    kept = [[0]]
    members = [*(level.centroids for level in tree.levels), *([] if documents is None else [documents])]
    for level, below in enumerate(members, start=1):
        scores = below @ vector
        ranked = [node for node in np.argsort(-scores).tolist() if tree._parent(level)[node] in kept[-1]]
        kept.append(ranked[:beam])
    return kept


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 150),
    branching=st.integers(2, 20),
    beam=st.integers(1, 12),
    walkers=st.integers(0, 20),
    to_documents=st.booleans(),
    seed=st.integers(0, 9),
)
def test_walks_keep_the_closest_children(count, branching, beam, walkers, to_documents, seed):
    vectors = unit_rows(count, 6, seed)
    tree = Hierarchy.build(vectors, branching, seed=seed)
    asked, documents = unit_rows(walkers, 6, seed + 100), vectors if to_documents else None
    kept = tree.walk(asked, beam, documents)
    assert len(kept) == tree.depth + to_documents
    assert all(nodes.shape == (walkers, beam if level else 1) for level, nodes in enumerate(kept))
    for row in range(walkers):
        own = [[node for node in nodes[row].tolist() if node >= 0] for nodes in kept]
        assert own == kept_by_brute_force(tree, asked[row], beam, documents)
        alone = tree.walk(asked[row : row + 1], beam, documents)
        assert [nodes[0].tolist() for nodes in alone] == [nodes[row].tolist() for nodes in kept]


def test_a_greedy_walk_is_a_path(small_tree):
    """Who walks in the direction of document 1's leaf comes to it through that leaf's ancestors."""
    kept = small_tree.walk(np.array([[0.4, 1, 0], [0.4, 0.3, 1]], dtype=np.float32))
    assert np.concatenate(kept, axis=1).tolist() == [[0, 1, 2], [0, 0, 0]]


def test_children_of_nodes_that_are_given(small_tree):
    vectors = np.array([[0, 1, 0], [0, 1, 0]], dtype=np.float32)
    nodes = np.array([[0, 1], [1, -1]])
    assert small_tree.closest_children(1, nodes, vectors, 2).tolist() == [[1, 0], [2, -1]]
    assert small_tree.closest_children(1, nodes, vectors).tolist() == [[1], [2]]
    with pytest.raises(InputError, match="the children at level 2 are documents"):
        small_tree.closest_children(2, nodes, vectors)


def test_of_equal_children_the_first_is_kept():
    same = np.ones((3, 2), dtype=np.float32)
    tree = Hierarchy((Level(np.zeros(3, dtype=np.int64), same),), np.array([2, 1, 0]), (1.0,), {})
    assert tree.walk(same[:1], 1, same)[1:] == [np.array([[0]]), np.array([[2]])]
    assert [nodes.tolist() for nodes in tree.walk(same[:1], 2, same)] == [[[0]], [[0, 1]], [[2, 1]]]


# ------------------------------------------------------------------------------------------------------------- churn


def tree_of(parents: list[int]) -> Hierarchy:
    parent = np.array(parents)
    nodes = parent.max() + 1
    return Hierarchy((Level(np.zeros(nodes, dtype=np.int64), np.eye(nodes, dtype=np.float32)),), parent, (1.0,), {})


def test_churn_by_hand():
    before = tree_of([0, 0, 0, 1, 1, 1])
    assert before.churn(before) == 0
    assert before.churn(tree_of([1, 1, 1, 0, 0, 0])) == 0  # only the numbers changed
    assert before.churn(tree_of([0, 0, 1, 1, 1, 1])) == pytest.approx(1 / 6)
    assert before.churn(tree_of([0, 0, 0, 0, 0, 0])) == pytest.approx(1 / 2)  # a merge is a change
    assert tree_of([0, 0, 0, 0, 0, 0]).churn(before) == pytest.approx(1 / 2)  # and so is a split
    with pytest.raises(InputError, match="6 and 2"):
        before.churn(tree_of([0, 1]))


# ----------------------------------------------------------------------------------------------------------- on disk


def test_save_and_load(tmp_path):
    tree = Hierarchy.build(unit_rows(200, 8, 0), 4, seed=3)
    tree.names = [[["été"]] * tree.node_count(level) for level in range(1, tree.depth)]
    tree.save(tmp_path / "tree")
    again = Hierarchy.load(tmp_path / "tree")
    assert again.names == tree.names
    assert again.name(1, 0) == ["été"]
    assert again.name(0, 0) == []
    np.testing.assert_array_equal(again.paths, tree.paths)
    for one, other in zip(again.levels, tree.levels, strict=True):
        np.testing.assert_array_equal(one.centroids, other.centroids)
    assert again.facts == {"branching": 4, "method": "agglomerative", "seed": 3}
    assert again.describe() == tree.describe()
    with pytest.raises(InputError, match="not an empty folder"):
        tree.save(tmp_path / "tree")


def test_damaged_trees_are_refused_in_one_line(tmp_path):
    tree = Hierarchy.build(unit_rows(60, 8, 0), 4)
    with pytest.raises(FormatError, match=r"no tree there \(manifest.json is missing\)"):
        Hierarchy.load(tmp_path / "nowhere")
    tree.save(tmp_path / "cut")
    data = (tmp_path / "cut" / "hierarchy.safetensors").read_bytes()
    (tmp_path / "cut" / "hierarchy.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(FormatError, match="the tree is damaged"):
        Hierarchy.load(tmp_path / "cut")
    tree.save(tmp_path / "newer")
    manifest = json.loads((tmp_path / "newer" / "manifest.json").read_text())
    (tmp_path / "newer" / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(FormatError, match="newer version"):
        Hierarchy.load(tmp_path / "newer")
    (tmp_path / "newer" / "manifest.json").write_text(json.dumps(manifest)[:-1])
    with pytest.raises(FormatError, match=r"newer: the tree is damaged .*; build or copy it again"):
        Hierarchy.load(tmp_path / "newer")
    (tmp_path / "newer" / "hierarchy.safetensors").unlink()
    with pytest.raises(FormatError, match=r"no tree there \(hierarchy.safetensors is missing\)"):
        Hierarchy.load(tmp_path / "newer")
    tree.document_parent[0] = 99
    tree.save(tmp_path / "orphan")
    with pytest.raises(FormatError, match="level 3 names parents that are not there"):
        Hierarchy.load(tmp_path / "orphan")


def test_growing_and_naming_tell_how_far_they_are(capsys, monkeypatch):
    monkeypatch.setattr(hce.progress, "SECONDS_BETWEEN_LINES", 0.0)
    vectors = np.random.default_rng(0).standard_normal((200, 8)).astype(np.float32)
    tree = Hierarchy.build(vectors, 8, progress=True)
    name_nodes(tree, (f"word{row % 7} common" for row in range(200)), progress=True)
    lines = capsys.readouterr().err
    for told in ("growing the tree: 2,000/2,000 vectors", "words for names: 200/200 documents", "naming nodes: "):
        assert told in lines
    assert "/s, 0 s left" in lines
    Hierarchy.build(vectors, 8)
    assert capsys.readouterr().err == ""
