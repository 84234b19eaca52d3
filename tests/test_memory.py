"""A stated bound on memory is read, held against what is needed, and changes nothing that is found."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hce import files, memory
from hce.errors import InputError
from hce.index import tree as numbered_tree
from hce.index.create import create_index, keep_within
from hce.index.index import Index
from hce.memory import index_needs, parse_size, require_memory
from hce.tree import kmeans

GB = 10**9


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GB", 4 * GB),
        ("4gib", 4 << 30),
        ("512 MB", 512 * 10**6),
        ("1.5G", 3 * GB // 2),
        ("2048", 2048),
        ("1 TiB", 1 << 40),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "4 XB", "-4GB", "0", "0.1", "4GB4", "four", "nan", "1e9", "4ib", "٤GB"])
def test_what_is_no_size_is_refused_in_one_line(text):
    with pytest.raises(InputError, match="give a size such as 4GB"):
        parse_size(text)


@given(st.integers(1, 10**8), st.sampled_from([64, 384, 640, 1024]), st.sampled_from(["codes", "exact"]))
def test_more_documents_need_no_less(documents, dim, engine):
    def most(documents):
        return max(index_needs(documents, dim, engine).values())

    assert most(documents) <= most(4 * documents) + files.HELD  # from there on vectors are mapped


def test_five_million_documents_fit_where_they_are_to():
    """By the estimate: 384 dimensions in 4 GB."""
    assert max(index_needs(5_000_000, 384, "codes").values()) + GB < 4 * GB


def test_a_bound_that_is_too_small_is_refused_with_the_figure_that_would_do(monkeypatch):
    monkeypatch.setattr(memory, "taken_so_far", lambda: GB)
    with pytest.raises(InputError, match=r"memory 2\.0 GB is too little: encoding takes about 3\.5 GB; buy some"):
        require_memory({"reading": GB, "encoding": 5 * GB // 2}, 2 * GB, "buy some")
    line = require_memory({"reading": GB, "encoding": 5 * GB // 2}, 4 * GB, "buy some")
    assert line == "memory: at most 4.0 GB; the largest estimate is encoding, 3.5 GB"


def test_a_bound_is_kept(monkeypatch):
    monkeypatch.setattr(memory, "taken_so_far", lambda: GB)
    needed = GB + max(index_needs(10**6, 640, "codes").values())
    keep_within(needed, 10**6, 640, "codes")
    keep_within(None, 10**9, 640, "codes")
    with pytest.raises(InputError, match="is too little"):
        keep_within(needed - 1, 10**6, 640, "codes")


def test_a_bound_is_printed_and_one_too_small_leaves_nothing(run_hce, caplog, tmp_path, planted_corpus):
    docs = tmp_path / "docs.jsonl"
    docs.write_text("".join(document.to_json() + "\n" for document in planted_corpus), encoding="utf-8")
    for command in ("index", "train"):
        refused = run_hce(command, docs, "-o", tmp_path / "out", "--memory", "100MB")
        assert refused.returncode == 1
        assert "memory 100 MB is too little" in refused.stderr
        assert sorted(tmp_path.iterdir()) == [docs]
    made = run_hce("index", docs, "-o", tmp_path / "out", "--memory", "64GB", "--json")
    assert made.returncode == 0
    assert "memory: at most 64.0 GB" in caplog.text
    assert json.loads(made.stdout)["engine"] == "codes"
    shutil.rmtree(tmp_path / "out" / "engine")  # as a kill would leave it
    refused = run_hce("index", docs, "-o", tmp_path / "out")
    assert refused.returncode == 1
    assert f"lacks only its engine; 'hce rebuild {tmp_path / 'out'}' or the next search builds it" in refused.stderr
    refused = run_hce("rebuild", tmp_path / "out", "--memory", "1MB")
    assert refused.returncode == 1
    assert "memory 1 MB is too little" in refused.stderr


@pytest.mark.parametrize("engine", ["codes", "exact"])
def test_vectors_from_a_file_give_the_hits_that_vectors_in_memory_give(
    monkeypatch, tmp_path, planted_corpus, module_static_encoder, engine
):
    """A bound, and mapping what is too much to hold, change what is in memory and not what is found."""
    queries = module_static_encoder.encode(list(planted_corpus.texts())[::7], "query")

    def found(name, **options):
        create_index(
            tmp_path / name, planted_corpus, module_static_encoder, "grow", engine=engine, progress=False, **options
        )
        with Index.open(tmp_path / name) as index:
            before = index.search_vectors(queries, 5)
            index.rebuild()
            after = index.search_vectors(queries, 5)
            return [[(hit.id, round(hit.score, 4)) for hit in hits] for hits in (*before, *after)]

    held = found("held")
    assert found("bounded", memory=64 * GB) == held
    monkeypatch.setattr(numbered_tree, "HELD", 0)
    assert found("mapped") == held
    assert not list(tmp_path.rglob(".vectors-*"))


# ------------------------------------------------------------------------------------------------- mapped files


def test_what_is_to_be_mapped_is_written_in_small_pieces(tmp_path):
    """Or the system maps up to 2 MB around each row that is read, and counts all of it as memory."""
    rows, pieces = np.random.default_rng(0).random((700, 64), np.float32), []

    class File:
        def write(self, data):
            pieces.append(bytes(data))

    files.write_to_be_mapped(File(), rows.T)  # which does not lie in memory as it is written
    assert max(map(len, pieces)) <= files.PIECE < rows.nbytes
    assert b"".join(pieces) == rows.T.tobytes()


def of_files() -> int:
    """Bytes of mapped files that count as memory of this process."""
    return int(re.search(r"RssFile:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="Linux tells what is resident in /proc")
@pytest.mark.parametrize("of_some", [False, True])
def test_rows_of_a_mapped_file_do_not_stay_in_memory(monkeypatch, tmp_path, of_some):
    monkeypatch.setattr(kmeans, "HOLD_BYTES", 0)
    monkeypatch.setattr(files, "SECONDS_BETWEEN_RELEASES", 60.0)
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(2**16, 128)).astype(np.float32)  # 32 MB
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    with (tmp_path / "vectors").open("wb") as file:
        files.write_to_be_mapped(file, vectors)
    mapped_file = np.memmap(tmp_path / "vectors", np.float32, "r", shape=vectors.shape)
    order = rng.permutation(len(vectors))
    with files.released(mapped_file):
        rows = kmeans.unit_rows(mapped_file, torch.device("cpu"))
        if of_some:
            rows, vectors, order = rows.subset(order[::2]), vectors[order[::2]], np.arange(len(order) // 2)[::-1].copy()
        files.give_back()
        before = of_files()
        taken, spans = rows.take(order), [rows.span(start, stop) for start, stop in rows.chunks(1)]
        assert of_files() - before < vectors.nbytes / 4
    np.testing.assert_allclose(taken, vectors[order], atol=1e-6)
    np.testing.assert_allclose(np.concatenate(spans), vectors, atol=1e-6)


# ------------------------------------------------------------------------------------------------- arenas

HEAPS_OF_NINE_THREADS = """
import ctypes, sys, threading
from hce.memory import use_few_arenas
use_few_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
gate = threading.Barrier(8)
def work():
    gate.wait()
    libc.malloc(1000)
    gate.wait()
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's malloc")
def test_threads_share_what_others_have_freed(tmp_path):
    """By default each of these threads has an arena of its own."""
    subprocess.run([sys.executable, "-c", HEAPS_OF_NINE_THREADS, str(tmp_path / "info.xml")], check=True)
    assert (tmp_path / "info.xml").read_text().count("<heap nr=") == memory.ARENAS
