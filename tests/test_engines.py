"""Every engine behaves as a dictionary of vectors; exact, and any engine under a narrow filter, as an exact search."""

from __future__ import annotations

import tempfile
from pathlib import Path

import faiss
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hce.errors import FormatError, InputError
from hce.search import engine as engine_module
from hce.search.engine import ENGINES, Found, load_engine, new_engine

DIM = 12
NAMES = sorted(ENGINES)


def dyadic(count: int, seed: int, dim: int = DIM) -> np.ndarray:
    """Unit vectors of four components ±1/2: products are multiples of 1/4, exact in any order, and ties abound."""
    rng = np.random.default_rng(seed)
    vectors = np.zeros((count, dim), np.float32)
    places = np.argsort(rng.random((count, dim)), axis=1)[:, :4]
    np.put_along_axis(vectors, places, rng.choice([-0.5, 0.5], (count, 4)).astype(np.float32), axis=1)
    return vectors


def unit(count: int, seed: int, dim: int = 32, topics: int = 20) -> np.ndarray:
    """Unit vectors around topics, the same for every seed."""
    rng = np.random.default_rng([1, seed])
    centres = np.random.default_rng(0).standard_normal((topics, dim))
    vectors = centres[rng.integers(topics, size=count)] + 0.7 * rng.standard_normal((count, dim))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def reference(known: dict[int, np.ndarray], query: np.ndarray, k: int) -> list[tuple[float, int]]:
    """The best k by (score, number), worked out in plain Python."""
    scored = sorted((-float(vector.astype(np.float64) @ query.astype(np.float64)), n) for n, vector in known.items())
    return [(-score, number) for score, number in scored[:k]]


def as_pairs(found: Found, row: int = 0) -> list[tuple[float, int]]:
    return [(float(s), int(n)) for s, n in zip(found.scores[row], found.numbers[row], strict=True) if n >= 0]


def built(name: str, vectors: np.ndarray, numbers: np.ndarray | None = None, **options):
    numbers = np.arange(len(vectors)) if numbers is None else numbers
    return new_engine(name, vectors.shape[1], numbers=numbers, vectors=vectors, **options)


@pytest.fixture(autouse=True)
def _codes_for_few(monkeypatch):
    """Codes, and scans of them, for as few vectors as tests have."""
    monkeypatch.setattr(engine_module, "CODED_FROM", 40)
    monkeypatch.setattr(engine_module, "FEW", 100)


class EngineLikeADict(RuleBasedStateMachine):
    """Adds, removes, saves and loads in any order, beside a plain dictionary."""

    engine_name = "exact"

    @initialize(count=st.integers(0, 90), seed=st.integers(0, 99))
    def build(self, count, seed):
        vectors, numbers = dyadic(count, seed), np.arange(count) * 2
        self.next = 2 * count
        self.known = dict(zip(numbers.tolist(), vectors, strict=True))
        self.engine = built(self.engine_name, vectors, numbers)

    @rule(count=st.integers(0, 40), seed=st.integers(0, 99))
    def add(self, count, seed):
        vectors, numbers = dyadic(count, seed), self.next + np.arange(count) * 3
        self.next += 3 * count
        self.known |= dict(zip(numbers.tolist(), vectors, strict=True))
        self.engine.add(numbers, vectors)

    @rule(share=st.floats(0, 1), seed=st.integers(0, 99))
    def remove(self, share, seed):
        live = np.array(sorted(self.known), dtype=np.int64)
        gone = live[np.random.default_rng(seed).random(len(live)) < share]
        for number in gone.tolist():
            del self.known[number]
        self.engine.remove(np.concatenate([gone, [1, self.next + 5]]))  # and two that were never there

    @rule()
    def reopen(self):
        with tempfile.TemporaryDirectory() as folder:
            self.engine.save(Path(folder))
            self.engine = load_engine(self.engine_name, folder, DIM)

    @rule(k=st.integers(1, 30), seed=st.integers(0, 99))
    def search(self, k, seed):
        queries = dyadic(3, seed)
        found = self.engine.search(queries, k)
        assert found.scores.shape == found.numbers.shape == (3, k)
        for row, query in enumerate(queries):
            pairs = as_pairs(found, row)
            assert len(pairs) == min(k, len(self.known))
            assert len({number for _, number in pairs}) == len(pairs)
            assert pairs == sorted(pairs, key=lambda pair: (-pair[0], pair[1]))
            assert all(score == self.known[number] @ query for score, number in pairs)
            assert np.all(found.scores[row, len(pairs) :] == -np.inf)
            if self.engine_name == "exact":
                assert pairs == reference(self.known, query, k)

    @rule(k=st.integers(1, 12), share=st.floats(0, 1), seed=st.integers(0, 99))
    def search_filtered(self, k, share, seed):
        live = np.array([*sorted(self.known), self.next + 1], dtype=np.int64)
        allowed = live[np.random.default_rng(seed).random(len(live)) < share]
        known = {number: self.known[number] for number in allowed.tolist() if number in self.known}
        query = dyadic(1, seed + 1)
        assert as_pairs(self.engine.search(query, k, allowed)) == reference(known, query[0], k)

    @rule(share=st.floats(0, 1), seed=st.integers(0, 99))
    def score(self, share, seed):
        rng, live = np.random.default_rng(seed), np.array(sorted(self.known), dtype=np.int64)
        numbers, query = rng.permutation(live[rng.random(len(live)) < share]), dyadic(1, seed)[0]
        expected = [self.known[number] @ query for number in numbers.tolist()]
        assert self.engine.scores(query, numbers).tolist() == expected

    @rule(seed=st.integers(0, 99))
    def find_itself(self, seed):
        if self.known:
            number = sorted(self.known)[seed % len(self.known)]
            found = self.engine.search(self.known[number][None], 1)
            assert found.scores[0, 0] == 1  # itself, or an equal one

    @invariant()
    def same_length(self):
        if hasattr(self, "engine"):
            assert len(self.engine) == len(self.known)


def _machine(engine_name: str) -> type:
    machine = type(f"{engine_name.title()}LikeADict", (EngineLikeADict,), {"engine_name": engine_name})
    case = machine.TestCase
    case.settings = settings(
        max_examples=20, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
    )
    return case


TestExact, TestCodes = _machine("exact"), _machine("codes")


@pytest.mark.parametrize("name", NAMES)
def test_ties_at_the_last_place_go_to_the_lowest_numbers_under_a_filter(name):
    vectors = np.repeat(dyadic(3, 5), [1, 400, 30], axis=0)
    engine = built(name, vectors, np.arange(len(vectors)) + 7)
    everything = np.arange(7, 7 + len(vectors))
    found = engine.search(vectors[1:2], 20, allowed=everything[::-1][::-1])
    assert found.numbers[0].tolist() == list(range(8, 28))
    assert engine.search(vectors[1:2], 500, everything).numbers[0, :400].tolist() == list(range(8, 408))


@pytest.mark.parametrize("queries", [1, 3, 64, 600])
def test_exact_agrees_with_itself_whatever_the_batch(queries):
    # faiss scores a few queries one by one and many by a matrix product, whose roundings differ.
    vectors = np.concatenate([unit(3000, 0), unit(3000, 0)])
    engine = built("exact", vectors)
    asked = unit(queries, 1)
    found = engine.search(asked, 10)
    alone = [engine.search(query[None], 10) for query in asked[:20]]
    assert np.array_equal(found.numbers[:20], np.concatenate([each.numbers for each in alone]))
    assert np.array_equal(found.scores[:20], np.concatenate([each.scores for each in alone]))
    assert np.all(found.numbers[:, ::2] + 3000 == found.numbers[:, 1::2])  # twins side by side, the older one first
    best = np.sort(asked @ vectors.T, axis=1)[:, ::-1][:, :10]
    assert np.allclose(found.scores, best, atol=1e-6)


def test_exact_removal_keeps_the_others():
    engine = built("exact", unit(50, 3))
    engine.remove(np.array([0, 7, 48, 49]))
    left = np.setdiff1d(np.arange(50), [0, 7, 48, 49])
    assert np.array_equal(engine.search(unit(50, 3)[left], 1).numbers[:, 0], left)


def test_the_approximate_engine_finds_nearly_all():
    vectors, queries = unit(4000, 0), unit(200, 1)
    exact = built("exact", vectors).search(queries, 10).numbers
    found = built("codes", vectors).search(queries, 10).numbers
    recall = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(exact.tolist(), found.tolist(), strict=True)])
    assert recall > 0.95


@pytest.mark.parametrize("name", NAMES)
def test_a_memory_map_will_do(name, tmp_path):
    np.save(tmp_path / "vectors.npy", unit(300, 0))
    vectors = np.load(tmp_path / "vectors.npy", mmap_mode="r")
    found = built(name, vectors).search(np.asarray(vectors[:5]), 1)
    assert found.numbers[:, 0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", NAMES)
def test_empty_engine_and_no_queries(name):
    engine = built(name, np.empty((0, DIM), np.float32))
    found = engine.search(dyadic(2, 0), 3)
    assert found.numbers.tolist() == [[-1] * 3] * 2
    assert np.all(found.scores == -np.inf)
    engine.add(np.array([4]), dyadic(1, 0))
    assert engine.search(np.empty((0, DIM), np.float32), 3).numbers.shape == (0, 3)
    assert engine.search(dyadic(1, 0), 1).numbers.tolist() == [[4]]
    assert engine.search(dyadic(1, 0), 1, np.empty(0, np.int64)).numbers.tolist() == [[-1]]


@pytest.mark.parametrize("name", NAMES)
def test_damage_is_told(name, tmp_path):
    built(name, dyadic(100, 0)).save(tmp_path)
    load_engine(name, tmp_path, DIM)
    with pytest.raises(FormatError, match="not of length 16"):
        load_engine(name, tmp_path, 16)
    for path in sorted(tmp_path.iterdir()):
        content = path.read_bytes()
        middle = len(content) // 2
        for broken in (content[:middle], content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :]):
            path.write_bytes(broken)
            with pytest.raises(FormatError, match="has to be rebuilt"):
                load_engine(name, tmp_path, DIM)
        path.unlink()
        with pytest.raises(FormatError, match="has to be rebuilt"):
            load_engine(name, tmp_path, DIM)
        path.write_bytes(content)
    load_engine(name, tmp_path, DIM)


def test_unknown_names():
    with pytest.raises(InputError, match="engine 'annoy': choose one of codes, exact"):
        built("annoy", dyadic(1, 0))


def test_searches_run_side_by_side():
    # One engine serves the threads of a server, so a search may change nothing.
    from concurrent.futures import ThreadPoolExecutor

    vectors, queries = unit(2000, 0), unit(64, 1)
    for name in NAMES:
        engine = built(name, vectors)
        alone = [engine.search(query[None], 5 + row % 3) for row, query in enumerate(queries)]
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(lambda row: engine.search(queries[row : row + 1], 5 + row % 3), range(64)))  # noqa: B023
        assert all(np.array_equal(a.numbers, b.numbers) for a, b in zip(alone, together, strict=True))


@pytest.fixture(autouse=True)
def _one_thread():
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(before)
