"""Codes: what a scan finds, which candidates are scored again, and when an engine is built again."""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hce.data.text import Document
from hce.errors import FormatError
from hce.files import write_checksums
from hce.index.index import Index
from hce.search import engine as engine_module
from hce.search.engine import ARRAYS, RESCORED, Codes, VectorEngine, load_engine, new_engine
from hce.tree.hierarchy import Hierarchy

DIM = 32


@pytest.fixture(autouse=True)
def _codes_for_few(monkeypatch):
    monkeypatch.setattr(engine_module, "CODED_FROM", 500)
    monkeypatch.setattr(engine_module, "FEW", 100)


def unit(count: int, seed: int, dim: int = DIM) -> np.ndarray:
    rows = np.random.default_rng(seed).standard_normal((count, dim))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def built(vectors: np.ndarray, hierarchy: Hierarchy | None = None) -> VectorEngine:
    numbers = np.arange(len(vectors)) + 1
    engine = new_engine("codes", vectors.shape[1], numbers=numbers, vectors=vectors, hierarchy=hierarchy)
    assert isinstance(engine, VectorEngine)
    assert engine.codes is not None
    return engine


def exact(vectors: np.ndarray, queries: np.ndarray, k: int) -> np.ndarray:
    return np.argsort(-(queries @ vectors.T), axis=1, kind="stable")[:, :k] + 1


def recall(found: np.ndarray, expected: np.ndarray) -> float:
    return float(
        np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(found.tolist(), expected.tolist(), strict=True)])
    )


def same(engine: VectorEngine, other: VectorEngine, queries: np.ndarray, k: int = 10) -> bool:
    return all(
        np.array_equal(one, two) for one, two in zip(engine.search(queries, k), other.search(queries, k), strict=True)
    )


@pytest.mark.parametrize("dim", [31, 32])
def test_a_scan_and_a_second_score_find_nearly_all(dim):
    vectors, queries = unit(2000, 0, dim), unit(50, 1, dim)
    assert recall(built(vectors).search(queries, 10).numbers, exact(vectors, queries, 10)) > 0.97


def test_quality_is_that_of_documents_that_were_moved():
    """The share is what searches find that ask by documents with noise as large as their distance from the mean."""
    vectors = unit(1500, 0)
    engine = built(vectors)
    assert engine.rescored in RESCORED[2]
    asked = vectors + unit(1500, 1)
    asked /= np.linalg.norm(asked, axis=1, keepdims=True)
    found = engine.search(asked, 10).numbers
    assert engine.recall >= 0.995
    assert recall(found, exact(vectors, asked, 10)) == pytest.approx(engine.recall, abs=0.01)


def test_codes_of_two_dimensions_replace_those_that_find_too_little(monkeypatch):
    monkeypatch.setattr(engine_module, "WIDE_FROM", 3000)
    monkeypatch.setattr(engine_module, "RESCORED", {2: (40,), 4: (40,)})
    vectors = unit(3000, 0, 64)
    for wanted, width in ((0.9, 2), (0.5, 4)):
        monkeypatch.setattr(engine_module, "WANTED", wanted)
        assert built(vectors).codes.width == width


def test_vectors_that_codes_cannot_tell_apart_are_all_scored(monkeypatch):
    monkeypatch.setattr(engine_module, "RESCORED", {2: (100,)})
    vectors = unit(4000, 0, 2)
    engine = new_engine("codes", 2, numbers=np.arange(4000), vectors=vectors)
    assert engine.codes is None
    assert np.array_equal(engine.search(vectors[:5], 3).numbers, exact(vectors, vectors[:5], 3) - 1)


def test_training_does_not_depend_on_threads():
    vectors, before = unit(1500, 0), faiss.omp_get_max_threads()
    made = []
    try:
        for threads in (1, 2):
            faiss.omp_set_num_threads(threads)
            made.append(Codes.build(vectors, 4))
    finally:
        faiss.omp_set_num_threads(before)
    assert np.array_equal(made[0].arrays["codebook"], made[1].arrays["codebook"])
    assert np.array_equal(made[0].arrays["fit"], made[1].arrays["fit"])


def test_hits_do_not_depend_on_the_batch_nor_on_what_was_removed(tmp_path):
    """An engine that hides rows finds what the same engine finds once it is saved without them."""
    vectors, queries = np.concatenate([unit(900, 0), unit(900, 0)]), unit(40, 1)
    engine = built(vectors)
    engine.remove(np.arange(1, 1500, 7))
    hidden = engine.search(queries, 10)
    alone = [engine.search(query[None], 10) for query in queries]
    assert np.array_equal(hidden.numbers, np.concatenate([each.numbers for each in alone]))
    assert np.array_equal(hidden.scores, np.concatenate([each.scores for each in alone]))
    engine.save(tmp_path)
    for each in (engine, load_engine("codes", tmp_path, DIM)):
        assert len(each) == len(each.numbers) == 1800 - len(range(1, 1500, 7))
        assert np.array_equal(each.search(queries, 10).numbers, hidden.numbers)


def test_a_wide_filter_is_searched_by_codes_and_a_narrow_one_exactly(monkeypatch):
    vectors, queries = unit(2000, 0), unit(20, 1)
    engine = built(vectors)
    scanned = []
    scan = Codes.scan
    monkeypatch.setattr(Codes, "scan", lambda *a: scanned.append(a[-1]) or scan(*a))
    for share, is_scanned in ((2, True), (40, False)):
        allowed = np.arange(1, 2001, share)
        found = engine.search(queries, 5, allowed).numbers
        assert bool(scanned) is is_scanned
        assert recall(found, exact(vectors[::share], queries, 5) * share - share + 1) > (0.97 if is_scanned else 0.999)
        scanned.clear()


@pytest.mark.parametrize("with_tree", [True, False])
def test_a_tree_leads_the_scan(monkeypatch, tmp_path, with_tree):
    """It finds most, also after additions and from disk; in all leaves, what a scan of everything finds."""
    monkeypatch.setattr(engine_module, "ROUTED_FROM", 500)
    monkeypatch.setattr(engine_module, "LEAF", 8)
    centers = unit(40, 5)
    vectors = centers[np.arange(2000) % 40] + 0.1 * unit(2000, 6)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    engine = built(vectors, Hierarchy.build(vectors, 40) if with_tree else None)
    assert engine.codes.is_routed
    engine.add(np.arange(2001, 2101), vectors[:100])
    engine.remove(np.arange(1, 50))
    assert recall(engine.search(vectors[200:300], 10).numbers, exact(vectors, vectors[200:300], 10)) > 0.8
    engine.codes.look_into(1.0)
    assert engine.search(vectors[:100], 1).numbers[49:, 0].tolist() == list(range(50, 101))
    engine.save(tmp_path)
    loaded = load_engine("codes", tmp_path, DIM)
    assert isinstance(loaded, VectorEngine)
    assert same(engine, loaded, vectors[:20])


def test_what_a_tree_finds_is_measured_by_documents_moved_twice_as_far(monkeypatch):
    """Documents themselves are found too easily: they lie in the leaves that are looked into."""
    monkeypatch.setattr(engine_module, "ROUTED_FROM", 500)
    monkeypatch.setattr(engine_module, "PROBES", (1 / 8,))
    monkeypatch.setattr(engine_module, "LEAF", 8)
    vectors = unit(3000, 6, 16)
    engine = built(vectors)
    moved = vectors + 2 * unit(3000, 7, 16)
    moved /= np.linalg.norm(moved, axis=1, keepdims=True)
    by_moved = recall(engine.search(moved, 10).numbers, exact(vectors, moved, 10))
    by_documents = recall(engine.search(vectors, 10).numbers, exact(vectors, vectors, 10))
    assert engine.recall == pytest.approx(by_moved, abs=0.02)
    assert by_documents > by_moved + 0.03


def test_vectors_that_the_codebook_does_not_fit_have_the_engine_built_again(monkeypatch):
    """Enough of them: fewer show nothing."""
    monkeypatch.setattr(engine_module, "ENOUGH", 100)
    engine = built(0.1 * unit(600, 0) + unit(1, 1))
    engine.add(np.arange(601, 700), unit(99, 2))
    assert engine.facts()["renewed_from"] > len(engine)
    error = engine.codes.arrays["fit"][0]
    decoded = engine.codes._quantizer.decode(engine.codes.rows[np.arange(600, 699)])
    assert engine.codes.arrays["fit"][2] == pytest.approx(((decoded - unit(99, 2)) ** 2).sum(axis=1).mean(), rel=1e-4)
    engine.add(np.arange(700, 701), unit(1, 3))
    assert engine.codes.arrays["fit"][:2].tolist() == [error, 100]
    assert engine.facts()["renewed_from"] == 0


def test_arrays_that_do_not_fit_are_refused(tmp_path):
    """Each would make faiss read or write where it must not, or compute with what is no number."""
    engine = built(unit(600, 0))
    engine.save(tmp_path)
    arrays = load_file(tmp_path / ARRAYS)
    codebook = arrays["codebook"]
    for name, array in {
        "codebook": codebook[:-1],
        "numbers": arrays["numbers"][::-1],
        "fit": arrays["fit"][:2],
        "quality": np.array([1e9, 1.0]),
        "built": np.array([1.5]),
    }.items():
        save_file({**arrays, name: np.ascontiguousarray(array)}, tmp_path / ARRAYS)
        write_checksums(tmp_path)
        with pytest.raises(FormatError, match="has to be rebuilt"):
            load_engine("codes", tmp_path, DIM)
    for value in (np.nan, np.inf, 1e30):
        save_file({**arrays, "codebook": np.full_like(codebook, value)}, tmp_path / ARRAYS)
        write_checksums(tmp_path)
        with pytest.raises(FormatError, match="has to be rebuilt"):
            load_engine("codes", tmp_path, DIM)


def test_a_write_builds_an_outgrown_engine_again_and_a_search_does_not(tmp_path, module_static_encoder, monkeypatch):
    monkeypatch.setattr(engine_module, "CODED_FROM", 30)
    documents = [Document(f"d{n}", f"w{n % 190} w{(n * 7) % 190}") for n in range(200)]
    with Index.create(tmp_path / "index", documents[:40], module_static_encoder) as index:
        part = index.state.derived.engine_part
        index.add(documents[40:120])  # three times as many
        assert index.search("w3", 5)
        before = part._held
        index.search("w3", 5)
        assert part._held is before
        index.add(documents[120:])  # five times as many
        assert part._held is not before
        assert part._held.built == 200
        assert index.status().pending == 0
        assert len(index.search("w3", 300)) == 200


def test_status_shows_what_the_engine_finds(tmp_path, module_static_encoder, monkeypatch):
    monkeypatch.setattr(engine_module, "CODED_FROM", 30)
    documents = [Document(f"d{n}", f"w{n} w{n + 1}") for n in range(60)]
    with Index.create(tmp_path / "index", documents, module_static_encoder) as index:
        assert (index.status().rescored, index.status().recall) == (100, 1.0)
        index.rebuild("exact")
        assert index.status().recall is None


def test_rows_are_written_in_place_of_a_copy(tmp_path: Path):
    """A saved engine goes on with the files, and leaves nothing of them in memory."""
    vectors = unit(600, 0)
    engine = built(vectors)
    engine.add(np.arange(601, 650), unit(49, 2))
    before = engine.search(vectors[:9], 5)
    engine.save(tmp_path)
    assert isinstance(engine._vectors._base, np.memmap)
    assert len(engine._vectors._more) == 0
    assert np.array_equal(engine.search(vectors[:9], 5).numbers, before.numbers)
