"""Spherical k-means against hand-worked cases, a slow reference of Alg. 2, and the properties it promises."""

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hce.errors import InputError
from hce.tree import kmeans, kmeans_fast
from hce.tree.kmeans import spherical_kmeans, unit_rows

CPU = torch.device("cpu")
MODES = ("exact", "fast")


def unit(vectors):
    vectors = np.asarray(vectors, dtype=np.float64)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def circle(*degrees):
    radians = np.deg2rad(degrees)
    return np.stack([np.cos(radians), np.sin(radians)], axis=1).astype(np.float32)


def planted(clusters, size, dim=32, noise=0.05, seed=0):
    """`clusters` directions with `size` rows close around each, shuffled: rows and true clusters."""
    rng = np.random.default_rng(seed)
    truth = rng.permutation(np.repeat(np.arange(clusters), size))
    rows = unit(rng.standard_normal((clusters, dim)))[truth] + noise * rng.standard_normal((len(truth), dim))
    return rows.astype(np.float32), truth


def same_partition(a, b):
    pairs = set(zip(a.tolist(), b.tolist(), strict=True))
    return len(pairs) == len(set(a.tolist())) == len(set(b.tolist()))


def check_promises(vectors, k, result):
    """What holds for every result of either mode, recomputed in float64."""
    assert result.centroids.shape == (k, vectors.shape[1])
    assert result.centroids.dtype == np.float32
    assert result.assignment.shape == (len(vectors),)
    assert result.assignment.dtype == np.int64
    np.testing.assert_allclose(np.linalg.norm(result.centroids.astype(np.float64), axis=1), 1, atol=1e-6)
    assert np.array_equal(np.unique(result.assignment), np.arange(k)), "a cluster is empty"
    cosines = unit(vectors) @ result.centroids.astype(np.float64).T
    own = cosines[np.arange(len(vectors)), result.assignment]
    assert (cosines.max(axis=1) - own).max() < 1e-6, "a cluster is not the nearest centroid"
    assert result.mean_cosines[-1] == pytest.approx(own.mean(), abs=1e-6)
    assert (np.diff(result.mean_cosines) > -1e-6).all(), "the mean cosine fell"


def reference_rounds(vectors, assignment, k):
    """Alg. 2 in plain loops: the assignment after each round, until they stop changing."""
    history = []
    while True:
        centroids = []
        for cluster in range(k):
            total = sum(vectors[i] for i in range(len(vectors)) if assignment[i] == cluster)
            centroids.append(total / np.sqrt(total @ total))
        new = [int(np.argmax([v @ c for c in centroids])) for v in vectors]
        history.append(new)
        if new == list(assignment):
            return history, np.array(centroids)
        assignment = new


# --- Alg. 2 ---


def test_two_arcs_by_hand():
    # From centroids at 0 and 30 degrees: 0, 10 | 30, 80, 90, then the means 5 and 66.9 take 0, 10, 30 | 80, 90.
    rows = unit_rows(circle(0, 10, 30, 80, 90), CPU)
    result = kmeans._exact_kmeans(rows, circle(0, 30), 10, lambda number, mean_cosine: None)
    assert result.assignment.tolist() == [0, 0, 0, 1, 1]
    assert result.converged
    degrees = np.rad2deg(np.arctan2(result.centroids[:, 1], result.centroids[:, 0]))
    s = np.sin(np.deg2rad([0, 10, 30])).sum(), np.cos(np.deg2rad([0, 10, 30])).sum()
    np.testing.assert_allclose(degrees, [np.rad2deg(np.arctan2(*s)), 85], atol=1e-4)
    # Round 1 scores cos 0, 10 to the first centroid and 0, 50, 60 to the second.
    assert result.mean_cosines[0] == pytest.approx(np.cos(np.deg2rad([0, 10, 0, 50, 60])).mean(), abs=1e-6)
    assert len(result.mean_cosines) == 3


@pytest.mark.parametrize("seed", range(5))
def test_same_steps_as_the_reference(seed):
    rng = np.random.default_rng(seed)
    vectors = unit(rng.standard_normal((60, 4)) + np.array([2, 0, 0, 0]))
    assignment = np.concatenate([np.arange(5), rng.integers(5, size=55)])
    history, expected = reference_rounds(vectors, assignment, 5)
    if any(len(set(step)) < 5 for step in history):
        pytest.skip("the paper's algorithm lost a cluster here; refilling it is ours")
    rows = unit_rows(vectors, CPU)
    for rounds, step in enumerate(history, start=1):
        start = kmeans.normalized(kmeans.member_sums(rows, assignment, 5), rows, assignment)
        result = kmeans._exact_kmeans(rows, start, rounds, lambda number, mean_cosine: None)
        assert result.assignment.tolist() == step
    np.testing.assert_allclose(result.centroids, expected, atol=1e-6)


@pytest.mark.parametrize("init", ["points", "random"])
def test_exact_mode_converges_to_normalised_sums(init):
    vectors, _ = planted(20, 15, noise=0.3)
    result = spherical_kmeans(vectors, 25, mode="exact", init=init)
    assert result.converged
    check_promises(vectors, 25, result)
    sums = [unit(vectors)[result.assignment == cluster].sum(axis=0) for cluster in range(25)]
    np.testing.assert_allclose(result.centroids, unit(sums), atol=1e-6)


def test_random_start_covers_every_cluster():
    vectors, _ = planted(10, 4)
    result = spherical_kmeans(vectors, 39, mode="exact", init="random")  # Unif{1..39} over 40 rows misses many
    check_promises(vectors, 39, result)


@pytest.mark.parametrize("mode", MODES)
def test_planted_clusters_are_found(mode):
    vectors, truth = planted(4, 40)
    best = max(
        (spherical_kmeans(vectors, 4, mode=mode, seed=seed) for seed in range(12)), key=lambda r: r.mean_cosines[-1]
    )
    assert same_partition(best.assignment, truth)


def test_round_cap_is_reported(caplog):
    vectors = np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32)
    with caplog.at_level(logging.WARNING, logger="hce.tree.kmeans"):
        result = spherical_kmeans(vectors, 20, mode="exact", max_rounds=2)
    assert not result.converged
    assert len(result.mean_cosines) == 2
    assert "after 2 rounds" in caplog.text
    check_promises(vectors, 20, result)


def test_fast_round_cap_is_reported(caplog):
    vectors = np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32)
    with caplog.at_level(logging.WARNING, logger="hce.tree.kmeans"):
        result = spherical_kmeans(vectors, 40, mode="fast", max_rounds=1)
    assert not result.converged
    assert "after 1 rounds" in caplog.text
    check_promises(vectors, 40, result)


# --- properties of both modes ---


@st.composite
def clusterings(draw):
    count = draw(st.integers(1, 80))
    distinct = draw(st.integers(1, count))
    dim = draw(st.integers(2, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    vectors = rng.standard_normal((distinct, dim))
    vectors = vectors[np.concatenate([np.arange(distinct), rng.integers(distinct, size=count - distinct)])]
    return vectors * rng.uniform(0.1, 10, size=(count, 1)), draw(st.integers(1, count)), draw(st.integers(0, 100))


@settings(max_examples=150, deadline=None)
@given(clusterings(), st.sampled_from([("exact", "points"), ("exact", "random"), ("fast", "points")]))
def test_promises_hold_for_any_sizes_and_duplicates(case, how):
    vectors, k, seed = case
    result = spherical_kmeans(vectors, k, seed=seed, mode=how[0], init=how[1])
    check_promises(vectors, k, result)
    assert result.converged


@pytest.mark.parametrize("mode", MODES)
def test_same_seed_same_result_and_no_global_state(mode):
    vectors, _ = planted(40, 10, noise=0.3)
    np.random.seed(1)  # noqa: NPY002 - shows that the global state plays no part
    first = spherical_kmeans(vectors, 60, mode=mode, seed=7)
    np.random.seed(2)  # noqa: NPY002
    torch.manual_seed(3)
    again = spherical_kmeans(vectors, 60, mode=mode, seed=7)
    other = spherical_kmeans(vectors, 60, mode=mode, seed=8)
    assert np.array_equal(first.assignment, again.assignment)
    assert np.array_equal(first.centroids, again.centroids)
    assert first.mean_cosines == again.mean_cosines
    assert not np.array_equal(first.assignment, other.assignment)


@pytest.mark.parametrize("mode", MODES)
def test_number_of_threads_changes_nothing(mode):
    vectors, _ = planted(64, 40, noise=0.4)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = spherical_kmeans(vectors, 300, mode=mode)
        torch.set_num_threads(4)
        together = spherical_kmeans(vectors, 300, mode=mode)
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(threads)
    assert np.array_equal(alone.assignment, together.assignment)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k", [1, 3, 50])
def test_all_rows_the_same(mode, k):
    vectors = np.tile(np.array([[3.0, 4.0]], dtype=np.float32), (50, 1))
    result = spherical_kmeans(vectors, k, mode=mode)
    check_promises(vectors, k, result)
    np.testing.assert_allclose(result.centroids, np.tile([[0.6, 0.8]], (k, 1)), atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_one_row(mode):
    result = spherical_kmeans(np.array([[0.0, -2.0]]), 1, mode=mode)
    assert result.assignment.tolist() == [0]
    np.testing.assert_allclose(result.centroids, [[0, -1]])


@pytest.mark.parametrize("mode", MODES)
def test_as_many_clusters_as_rows(mode):
    vectors = np.random.default_rng(0).standard_normal((30, 5))
    result = spherical_kmeans(vectors, 30, mode=mode)
    assert sorted(result.assignment.tolist()) == list(range(30))
    assert result.mean_cosines[-1] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_members_that_cancel_out_still_give_a_unit_centroid(mode):
    vectors = circle(0, 180)
    result = spherical_kmeans(vectors, 1, mode=mode)
    np.testing.assert_allclose(np.linalg.norm(result.centroids, axis=1), 1, atol=1e-6)
    assert result.mean_cosines[-1] == pytest.approx(0, abs=1e-6)


# --- empty clusters ---


def test_empty_clusters_take_the_worst_fitting_rows():
    rows = unit_rows(circle(0, 5, 60, 90, 95), CPU)
    centroids = circle(0, 90, 200)
    assignment, best = kmeans.assign(rows, centroids)
    assert assignment.tolist() == [0, 0, 1, 1, 1]
    before = best.copy()
    kmeans.fill_empty(rows, centroids, assignment, best)
    assert assignment.tolist() == [0, 0, 2, 1, 1]
    np.testing.assert_allclose(centroids[2], circle(60)[0], atol=1e-6)
    assert (best >= before).all()


def test_rows_nearer_to_a_refilled_cluster_follow():
    rows = unit_rows(circle(0, 1, 80, 88), CPU)
    centroids = circle(0, 180)
    assignment, best = kmeans.assign(rows, centroids)
    kmeans.fill_empty(rows, centroids, assignment, best)
    assert assignment.tolist() == [0, 0, 1, 1]


def test_spare_rows_leave_every_cluster_a_member():
    assignment = np.array([0, 0, 1, 2, 2, 2])
    best = np.array([0.1, 0.2, 0.0, 0.5, 0.3, 0.4])
    assert kmeans.spare_rows(assignment, best, 3, 10).tolist() == [0, 4, 5]
    assert kmeans.spare_rows(assignment, best, 3, 2).tolist() == [0, 4]


# --- fast mode ---


def heads_of(rows):
    return kmeans_fast._Heads(rows, np.random.default_rng(0))


def test_fast_mode_is_as_good_as_exact_where_it_is_the_default():
    vectors, _ = planted(700, 12, noise=0.12)
    k = 2100
    assert kmeans._fast_pays(len(vectors), k)
    fast = spherical_kmeans(vectors, k)
    exact = spherical_kmeans(vectors, k, mode="exact")
    check_promises(vectors, k, fast)
    assert fast.mean_cosines[-1] > 0.99 * exact.mean_cosines[-1]
    assert np.array_equal(fast.assignment, spherical_kmeans(vectors, k, mode="fast").assignment)
    assert not np.array_equal(fast.assignment, exact.assignment)


def test_small_inputs_are_exact_by_default():
    vectors, _ = planted(20, 10, noise=0.3)
    assert np.array_equal(
        spherical_kmeans(vectors, 25).assignment, spherical_kmeans(vectors, 25, mode="exact").assignment
    )


def test_single_moves_by_hand():
    # Rows at 0, 34 | 60, 64 degrees: 34 is nearer to its own mean, 17, than to 62, yet the total grows when it moves,
    # for 0 is then alone with a cosine of 1: 1 + |34, 60, 64| > |0, 34| + |60, 64|.
    vectors = circle(0, 34, 60, 64)
    rows = unit_rows(vectors, CPU)
    state = kmeans_fast._state_of(rows, np.array([0, 0, 1, 1]), 2)
    own, other = vectors[1] @ state.centroids[0], vectors[1] @ state.centroids[1]
    assert own > other, "Alg. 2 would leave it"
    length = lambda *degrees: np.linalg.norm(circle(*degrees).sum(axis=0))  # noqa: E731
    gain = 1 + length(34, 60, 64) - length(0, 34) - length(60, 64)
    assert gain > 0.005
    block = rows.take(np.array([1]))
    found = kmeans_fast._best_moves(block, np.array([0]), state, np.array([0, 1]), block, state.centroids, CPU)
    assert found[0].tolist() == [1]
    assert found[1][0] == pytest.approx(gain, abs=1e-5)
    assert not found[2][0]
    before = float(state.lengths.sum())
    kmeans_fast._settle(rows, state, np.array([1]), np.array([1]))
    assert state.assignment.tolist() == [0, 1, 1, 1]
    assert float(state.lengths.sum()) == pytest.approx(before + gain, abs=1e-5)
    np.testing.assert_allclose(state.centroids[0], [1, 0], atol=1e-6)


def test_a_row_that_stays_behind_may_leave_its_target_deserted(monkeypatch):
    """Rows 0 and 1 would move on to the next cluster. Row 0 has to stay, or cluster 0 is empty; then so has row 1."""
    rows = unit_rows(circle(0, 45, 90), CPU)
    state = kmeans_fast._state_of(rows, np.arange(3), 3)
    proposal = np.array([1, 2, 0]), np.zeros(3, dtype=np.float32), np.array([True, True, False])
    monkeypatch.setattr(kmeans_fast, "_propose", lambda *arguments: proposal)
    refined = kmeans_fast._refine(rows, heads_of(rows), state, np.zeros(3), np.zeros((1, 3)))
    assert refined.assignment.tolist() == [0, 1, 2]


def test_a_new_assignment_is_followed_by_the_clusters_that_it_touches():
    vectors, truth = planted(20, 6, noise=0.3)
    rows = unit_rows(vectors, CPU)
    state = kmeans_fast._state_of(rows, truth, 20)
    moved = truth.copy()
    moved[[0, 7, 30]] = moved[[50, 60, 70]]
    kmeans_fast._follow(rows, state, moved)
    anew = kmeans_fast._state_of(rows, moved, 20)
    assert np.array_equal(state.assignment, moved)
    assert np.array_equal(state.sizes, anew.sizes)
    for field in ("sums", "centroids", "lengths"):
        np.testing.assert_allclose(getattr(state, field), getattr(anew, field), atol=1e-6)


@given(st.data())
def test_no_cluster_is_deserted_and_rows_stay_only_for_that(data):
    count = data.draw(st.integers(1, 30))
    k = data.draw(st.integers(1, count))
    clusters = st.lists(st.integers(0, k - 1), min_size=count, max_size=count)
    old = np.array(data.draw(clusters))
    old[data.draw(st.permutations(range(count)))[:k]] = np.arange(k)
    new = np.array(data.draw(clusters))
    kept = kmeans_fast._keep_one_in_each(old, new, k)
    sizes = np.bincount(kept, minlength=k)
    stayed = kept != new
    assert (sizes > 0).all()
    assert (kept[stayed] == old[stayed]).all()
    assert (sizes[kept[stayed]] == 1).all(), "a row stayed in a cluster that has another"


def test_disjoint_moves_share_no_cluster():
    source, target = np.array([0, 1, 2, 4, 0]), np.array([1, 2, 3, 5, 5])
    # 0>1 first; 1>2 clashes with it, 2>3 is free once 1>2 is out, 4>5 is free, 0>5 clashes.
    assert sorted(kmeans_fast._disjoint(np.arange(5), source, target, 6).tolist()) == [0, 2, 3]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20).filter(any), st.data())
def test_shares_add_up_and_fit(sizes, data):
    sizes = np.array(sizes)
    k = data.draw(st.integers(np.count_nonzero(sizes), sizes.sum()))
    shares = kmeans_fast._shares(sizes, k)
    assert shares.sum() == k
    assert (shares <= sizes).all()
    assert ((shares > 0) == (sizes > 0)).all()
    assert (np.abs(shares - sizes * k / sizes.sum()) < len(sizes) + 1).all()


@pytest.mark.parametrize("enough", [0.94, 2.0])  # by heads, and by whole rows
def test_a_row_looks_among_the_nearest_groups(enough, monkeypatch):
    vectors, _ = planted(1200, 6, dim=128, noise=0.3)
    vectors = vectors / np.sqrt(1 + np.arange(128))
    monkeypatch.setattr(kmeans_fast, "_ENOUGH", enough)
    monkeypatch.setattr(kmeans_fast, "_PROBED_ROWS", 1000)
    near = spherical_kmeans(vectors, 900, mode="fast")
    plain, best = kmeans.assign(unit_rows(vectors, CPU), near.centroids)
    assert np.array_equal(np.unique(near.assignment), np.arange(900))
    assert (near.assignment == plain).mean() > 0.98
    assert near.mean_cosines[-2] - 1e-6 < near.mean_cosines[-1] < best.mean() + 1e-6
    own = (unit(vectors) * near.centroids[near.assignment]).sum(axis=1)
    assert near.mean_cosines[-1] == pytest.approx(own.mean(), abs=1e-6)


@pytest.mark.parametrize("power", [0, 1, 1.5])
def test_a_head_never_understates_a_product(power):
    """Whatever the heads leave out: head times head, tails included, is a bound, held in memory or not."""
    vectors = np.random.default_rng(0).standard_normal((1000, 600))
    rows = unit_rows(vectors / (1 + np.arange(600)) ** power, CPU)
    heads = heads_of(rows)
    assert heads.enough == (power > 0)
    block = rows.span(0, len(rows))
    bound = heads.span(0, len(rows)) @ heads.of(block).T
    assert (bound >= block @ block.T - 4e-6).all()
    some = np.array([3, 1, 200])
    np.testing.assert_allclose(heads.take(some, rows.take(some)), heads.of(rows.take(some)), atol=1e-3)


@pytest.mark.parametrize("power", [0, 1])
def test_clusters_by_heads_are_as_good_as_by_whole_rows(power, monkeypatch):
    vectors, _ = planted(400, 10, dim=128, noise=0.5)
    vectors = vectors / (1 + np.arange(128)) ** power
    by_heads = spherical_kmeans(vectors, 500, mode="fast").mean_cosines[-1]
    monkeypatch.setattr(kmeans_fast, "_ENOUGH", 2.0)  # no head is ever enough
    assert by_heads > spherical_kmeans(vectors, 500, mode="fast").mean_cosines[-1] - 2e-3


# --- input ---


@pytest.mark.parametrize("mode", MODES)
def test_row_lengths_and_types_are_ignored(mode):
    vectors, _ = planted(30, 10, noise=0.3)
    vectors = unit(vectors).astype(np.float32)
    expected = spherical_kmeans(vectors, 40, mode=mode)
    lengths = np.random.default_rng(0).choice([2.0**-90, 0.5, 4, 2.0**90], size=(300, 1))
    for same in (vectors * lengths.astype(np.float32), vectors.astype(np.float64) * lengths, torch.from_numpy(vectors)):
        assert np.array_equal(spherical_kmeans(same, 40, mode=mode).assignment, expected.assignment)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1.0, 3.0])  # unit rows are taken as they are
def test_memory_mapped_file_is_read_in_chunks_and_left_alone(length, mode, tmp_path, monkeypatch):
    vectors, _ = planted(60, 10, noise=0.3)
    vectors = (length * unit(vectors)).astype(np.float32)
    path = tmp_path / "vectors.npy"
    np.save(path, vectors)
    before = path.read_bytes()
    expected = spherical_kmeans(vectors, 80, mode=mode)
    for module in (kmeans, kmeans_fast):
        monkeypatch.setattr(module, "HOLD_BYTES", 0)  # as for a file larger than memory
    monkeypatch.setattr(kmeans, "_BLOCK_BYTES", 1000)
    result = spherical_kmeans(np.load(path, mmap_mode="r"), 80, mode=mode)
    check_promises(vectors, 80, result)
    assert result.mean_cosines[-1] == pytest.approx(expected.mean_cosines[-1], abs=2e-3)
    assert path.read_bytes() == before


def test_progress_sees_every_round():
    vectors, _ = planted(20, 10, noise=0.3)
    seen = []
    result = spherical_kmeans(vectors, 25, mode="exact", on_round=lambda *step: seen.append(step))
    assert seen == list(enumerate(result.mean_cosines, start=1))


def bad_row(value):
    vectors = np.ones((6, 3), dtype=np.float32)
    vectors[4] = vectors[5] = value
    return vectors


@pytest.mark.parametrize(
    ("vectors", "options", "message"),
    [
        (bad_row([1, np.nan, 1]), {}, "Row 4 .* NaN or an infinity"),
        (bad_row([1, -np.inf, 1]), {}, "Row 4 .* NaN or an infinity"),
        (bad_row([0, 0, 0]), {}, "Row 4 .* all zeros"),
        (np.ones((3, 2)), {"k": 4}, "k = 4 clusters of 3 rows"),
        (np.ones((3, 2)), {"k": 0}, "k = 0 clusters"),
        (np.ones((3, 2)), {"k": 1.5}, "k = 1.5 clusters"),
        (np.ones(3), {}, r"shape \(3,\)"),
        (np.ones((0, 3)), {}, r"shape \(0, 3\)"),
        (np.ones((3, 2), dtype=np.int64), {}, "type int64"),
        (np.ones((3, 2)), {"mode": "quick"}, "mode = 'quick'"),
        (np.ones((3, 2)), {"init": "zeros"}, "init = 'zeros'"),
        (np.ones((3, 2)), {"max_rounds": 0}, "max_rounds = 0"),
    ],
)
def test_bad_input_is_named(vectors, options, message):
    with pytest.raises(InputError, match=message):
        spherical_kmeans(vectors, **{"k": 2, **options})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", MODES)
def test_promises_hold_on_a_gpu(mode):
    vectors, _ = planted(100, 20, noise=0.3)
    check_promises(vectors, 250, spherical_kmeans(vectors, 250, mode=mode, device="cuda"))


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_products_by_torch_and_by_numpy_give_the_same_clusters(mode, monkeypatch):
    """A GPU computes with torch; the same arithmetic on the CPU must agree with NumPy's."""
    rows = np.random.default_rng(5).normal(size=(600, 24)).astype(np.float32)
    by_numpy = spherical_kmeans(rows, 60, seed=1, mode=mode)
    for module in (kmeans, kmeans_fast):
        monkeypatch.setattr(module, "on_device", lambda array, device: torch.from_numpy(array.copy()))
    monkeypatch.setattr(kmeans, "_TILE", 16)
    by_torch = spherical_kmeans(rows, 60, seed=1, mode=mode)
    np.testing.assert_array_equal(by_torch.assignment, by_numpy.assignment)
