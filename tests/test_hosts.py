"""Processes that work together are alike and stop together; each reads its own parts; a run goes on with fewer of them.

Those on hosts of their own, with torchrun as users start it, are in benchmarks/hosts.py.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hce import processes
from hce.data import corpus as corpus_module
from hce.data.corpus import Corpus
from hce.data.records import Reading
from hce.encoding.corpus_vectors import encode_corpus
from hce.encoding.encoder import Encoder
from hce.errors import HceError, InputError
from hce.files import unfinished
from hce.index import create
from hce.index.index import Index
from hce.index.token_codes import TokenCodes
from hce.training.recipe import Recipe
from hce.training.train import train
from hce_lab.benchmarks.hosts import Hosts, can_be_made, enter

GO_ON = "go on with --resume"
TIMEOUT = 5  # seconds
RECIPE = Recipe.for_encoder(
    static=True, epochs=3, batch_size=32, learning_rate=0.05, span_lengths=(4,), dev_queries=16, fit_static=False
)


# ------------------------------------------------------------------------------------------------- two processes


def member(rank: int, environment: dict[str, str], folder: Path, job: Callable[..., Any], space: str | None) -> None:
    """Be one of two processes on two hosts; end as the command line does."""
    log = os.open(folder / f"said-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 2)
    if space is not None:
        enter(space)
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK="0")
    socket.gethostname = lambda: f"host-{'ab'[rank]}"
    processes.TIMEOUT, processes.HEARING, processes.GRACE = timedelta(seconds=TIMEOUT), 3.0, 0.5
    getattr(job, "prepare", lambda rank: None)(rank)
    try:
        with processes.together(GO_ON):
            job(rank, folder)
    except HceError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.stderr.flush()
        os._exit(1)


@pytest.fixture
def together(forkserver, tmp_path):
    """Let two processes do something; returns, of each, how it ended and the lines that it said."""

    def run(job: Callable[..., Any], place: tuple[str, int] | None = None, spaces: list[str] | None = None) -> list:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address, port = place or free.getsockname()
        environment = {"WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        environment |= {"LOCAL_WORLD_SIZE": "2", "RES_OPTIONS": "timeout:1 attempts:1"}
        environment |= {"GLOO_SOCKET_IFNAME": "eth0" if spaces else "lo"}
        arguments = [(rank, environment, tmp_path, job, spaces and spaces[rank]) for rank in range(2)]
        processes = [forkserver.Process(target=member, args=each) for each in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=60)
        still = [process for process in processes if process.is_alive()]
        for process in still:
            process.kill()
        said = [(tmp_path / f"said-{rank}").read_text().splitlines() for rank in range(2)]
        assert not still, said
        errors = [[line for line in lines if line.startswith("error: ")] for lines in said]  # no warnings of torch
        return [(process.exitcode, lines) for process, lines in zip(processes, errors, strict=True)]

    return run


def wait(rank: int, folder: Path) -> None:
    """Wait for the other process."""
    import torch.distributed as dist

    dist.barrier()


def have_other_code(rank: int, folder: Path) -> None:
    raise AssertionError("nobody should come here")


def pretend_another_version(rank: int) -> None:
    processes.__version__ = f"0.{rank}"


have_other_code.prepare = pretend_another_version


def test_other_code_is_refused_by_everyone(together):
    line = "error: the version of hce is '0.0' on host-a, '0.1' on host-b; use the same on all hosts"
    assert together(have_other_code) == [(1, [line]), (1, [line])]


def train_otherwise(rank: int, folder: Path) -> None:
    recipe = replace(RECIPE, epochs=1 + rank)
    train(Corpus.load(folder / "docs.jsonl"), Encoder.load(folder / "encoder", device="cpu"), recipe=recipe)


def test_other_settings_are_refused_by_everyone(together, sources):
    line = "error: the setting epochs is 1 on host-a, 2 on host-b; use the same on all hosts"
    assert together(train_otherwise) == [(1, [line]), (1, [line])]
    assert not unfinished(sources / "model").exists()


def train_into_another_folder(rank: int, folder: Path) -> None:
    (folder / str(rank)).mkdir()
    output = folder / str(rank) / "model"
    train(Corpus.load(folder / "docs.jsonl"), Encoder.load(folder / "encoder", device="cpu"), output=output)


def test_a_folder_that_is_not_shared_is_refused(together, sources):
    [(first_code, first), (code, lines)] = together(train_into_another_folder)
    refusal = f"{sources / '1'} on host-b is not the first host's folder; give one that all share"
    assert (code, lines) == (1, [f"error: {refusal}"])
    assert (first_code, first) == (1, [f"error: stopped with the others: host-b: {refusal}"])
    assert [*(sources / "0").iterdir(), *(sources / "1").iterdir()] == []


def fill_the_disk(rank: int, folder: Path) -> None:
    from hce.encoding.corpus_vectors import encode_corpus

    encoder, documents = Encoder.load(folder / "encoder", device="cpu"), Corpus.load(folder / "docs.jsonl")
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, usual[1]))  # bytes; its rows come after those
    try:
        encode_corpus(encoder, documents, folder / "vectors", chunk_size=50)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def test_a_full_disk_on_one_host_is_told_to_all(together, sources):
    [(first_code, first), (code, lines)] = together(fill_the_disk)
    refusal = f"{sources / 'vectors'}: the vectors cannot be written (File too large); free some space"
    assert (code, lines) == (1, [f"error: {refusal}"])
    assert (first_code, first) == (1, [f"error: stopped with the others: host-b: {refusal}"])
    assert json.loads((sources / "vectors" / "manifest.json").read_text())["done"] == 0


def die(rank: int, folder: Path) -> None:
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    wait(rank, folder)


def test_a_process_that_is_killed_ends_the_others(together):
    [(code, lines), (killed, _)] = together(die)
    assert killed == -signal.SIGKILL
    assert (code, lines) == (1, [f"error: lost the connection to 127.0.0.1; {GO_ON}"])


def die_first(rank: int, folder: Path) -> None:
    if not rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)  # at work
    wait(rank, folder)


def test_when_the_first_process_dies_others_end_where_they_wait_for_it(together):
    """The store where reasons are left dies with it."""
    [(killed, _), (code, lines)] = together(die_first)
    assert killed == -signal.SIGKILL
    assert (code, lines) == (1, [f"error: lost the connection to 127.0.0.1; {GO_ON}"])


def hang(rank: int, folder: Path) -> None:
    import torch.distributed as dist

    first = [os.getpid()]
    dist.broadcast_object_list(first, src=0)
    if rank:
        subprocess.Popen(["sh", "-c", f"while kill -0 {first[0]}; do sleep 0.2; done; kill -9 {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    wait(rank, folder)


def test_a_process_that_does_not_answer_is_given_up(together):
    [(code, lines), _] = together(hang)
    assert (code, lines) == (1, [f"error: another process was silent for {TIMEOUT} s; {GO_ON}"])


def have_a_bug(rank: int, folder: Path) -> None:
    if rank:
        raise KeyError("this")
    wait(rank, folder)


def test_a_bug_in_one_process_ends_the_others(together):
    line = "error: stopped with the others: host-b: 'this' is missing (a bug in hce)"
    assert together(have_a_bug) == [(1, [line]), (1, [])]  # the other has a traceback


def take_longer_than_others(rank: int, folder: Path) -> None:
    if not rank:
        time.sleep(TIMEOUT + 1)  # more than the patience with who does not answer


def test_the_first_may_take_its_time(together):
    assert together(take_longer_than_others) == [(0, []), (0, [])]


@pytest.mark.skipif(not can_be_made(), reason="network namespaces cannot be made here (root and iproute2)")
def test_a_host_whose_cable_is_pulled_is_given_up(together, tmp_path):
    with Hosts(2) as machines:
        [(code, lines), (other, cut_off)] = together(pull_the_cable, (machines.address(0), 29500), machines.names)
    silent = f"error: another process was silent for {TIMEOUT} s; {GO_ON}"
    assert (code, lines) == (other, cut_off) == (1, [silent])


def pull_the_cable(rank: int, folder: Path) -> None:
    if rank:
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    wait(rank, folder)


# ------------------------------------------------------------------------------------------------- fewer, more


@pytest.fixture
def sources(tmp_path, concept_corpus, static_encoder) -> Path:
    """A folder with documents and an encoder."""
    (tmp_path / "docs.jsonl").write_text("\n".join(document.to_json() for document in concept_corpus))
    static_encoder.save(tmp_path / "encoder")
    return tmp_path


def train_and_die(rank: int, folder: Path) -> None:
    def on_epoch(epoch: Any) -> None:
        if epoch.epoch == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    trained(folder, folder / "model", on_epoch=on_epoch)


def trained(folder: Path, output: Path, **options: Any) -> Encoder:
    """Train with few documents and no companions."""
    documents, encoder = Corpus.load(folder / "docs.jsonl"), Encoder.load(folder / "encoder", device="cpu")
    recipe = replace(RECIPE, train="encoder", keep="last")
    return train(documents, encoder, recipe=recipe, output=output, **options).encoder


def test_one_process_goes_on_where_two_were_killed(together, sources):
    assert [code for code, _ in together(train_and_die)] == [-signal.SIGKILL] * 2
    with pytest.raises(InputError, match="add --resume to continue it"):
        trained(sources, sources / "model")
    epochs = []
    resumed = trained(sources, sources / "model", resume=True, on_epoch=epochs.append)
    assert [epoch.epoch for epoch in epochs] == [3]
    alone = trained(sources, sources / "undisturbed")
    weights = [each.model[0].embedding.weight.detach().numpy() for each in (resumed, alone)]
    np.testing.assert_allclose(*weights, atol=1e-4)


# ------------------------------------------------------------------------------------------------- an index


def indexed(folder: Path, output: Path) -> None:
    """Make an index in pieces of eight documents, of which each process has some."""
    create.encode_corpus = partial(encode_corpus, chunk_size=8)
    create.create_index(
        output,
        Corpus.load(folder / "docs.jsonl"),
        folder / "encoder",
        "grow",
        engine="codes",
        progress=False,
    )


def index_together(rank: int, folder: Path) -> None:
    indexed(folder, folder / "index")


def index_and_die(rank: int, folder: Path) -> None:
    whole = Encoder.encode
    calls = itertools.count()

    def encode(self: Encoder, *arguments: Any, **options: Any) -> np.ndarray:
        if rank == 1 and next(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(self, *arguments, **options)

    Encoder.encode = encode
    indexed(folder, folder / "index")


def contents(path: Path) -> tuple[list[Any], dict[str, np.ndarray]]:
    """What is in an index: hits with scores and names of nodes; vectors, paths, and the tokens that are kept."""
    with Index.open(path) as index:
        codes = TokenCodes.find(path / "tokens")
        kept = codes.get([document.full_text for document in index]) if codes else {}
        hits = [[hit[:4] for hit in row] for row in index.search(["w5 w7 w53", "w84"], k=5)]
        tree = index.tree.hierarchy
        return [hits, tree.names], {"vectors": index.vectors()[1], "paths": tree.paths, **kept}


@pytest.mark.parametrize("encoder", ["static", "transformer"])
@pytest.mark.parametrize("job", [index_together, index_and_die])
def test_an_index_of_two_processes_is_that_of_one(together, sources, bert_folder, encoder, job, monkeypatch):
    """Killed, one process goes on with what two have encoded; only tokens that were not written yet are missing."""
    monkeypatch.setattr(create, "encode_corpus", create.encode_corpus)
    if encoder == "transformer":
        shutil.rmtree(sources / "encoder")
        shutil.copytree(bert_folder, sources / "encoder")
    ends = together(job)
    if job is index_and_die:
        assert [code for code, _ in ends] == [1, -signal.SIGKILL]
        indexed(sources, sources / "index")
    else:
        assert [code for code, _ in ends] == [0, 0], ends
    indexed(sources, sources / "alone")
    (said, arrays), (known, others) = contents(sources / "index"), contents(sources / "alone")
    assert said == known
    assert set(arrays) <= set(others) if job is index_and_die else set(arrays) == set(others)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, others[name])
    assert not unfinished(sources / "index").exists()
    assert len(list((sources / "index").glob("tokens/codes-*"))) == (encoder == "transformer")


# ------------------------------------------------------------------------------------------------- parts


def write_parts(folder: Path, suffix: str = ".jsonl", count: int = 10) -> Path:
    """Write documents to three parts and an empty one."""
    folder.mkdir()
    rows = [{"_id": f"d{number}", "title": "", "text": f"text {number}"} for number in range(count)]
    for number in range(3):
        own = rows[number * count // 3 : (number + 1) * count // 3]
        path = folder / f"part-{number}{suffix}"
        if suffix == ".parquet":
            pa = pytest.importorskip("pyarrow")
            pytest.importorskip("pyarrow.parquet").write_table(pa.Table.from_pylist(own), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in own))
    if suffix == ".jsonl":
        (folder / "part-9.jsonl").write_text("")
    (folder / "_SUCCESS").write_text("")
    (folder / "README.md").write_text("# Ten texts")
    return folder


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_folder_of_parts_is_one_corpus(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(corpus_module, "OPEN_PARTS", 1)
    corpus = Corpus.load(write_parts(tmp_path / "parts", suffix))
    assert corpus.ids == [f"d{number}" for number in range(10)]
    assert [corpus[index].text for index in (0, 9, -1, 4)] == ["text 0", "text 9", "text 9", "text 4"]
    assert corpus.fingerprint == Corpus.load(write_parts(tmp_path / "other")).fingerprint  # in any format
    with pytest.raises(IndexError):
        corpus[10]


def test_parts_of_two_formats_are_refused_and_texts_are_read_as_ever(tmp_path):
    folder = write_parts(tmp_path / "parts")
    (folder / "more.parquet").write_bytes(b"")
    with pytest.raises(InputError, match=r"holds \.jsonl and \.parquet files; give parts of one format"):
        Corpus.load(folder)
    (folder / "letter.txt").write_text("Dear all")
    assert Corpus.load(folder).ids == ["README.md", "letter.txt"]


def test_rows_of_parts_have_no_numbers_of_their_own(tmp_path):
    with pytest.raises(InputError, match="row numbers start again in each part; name the field"):
        Corpus.load(write_parts(tmp_path / "parts"), Reading(row_ids=True))


@pytest.mark.parametrize(("suffix", "place"), [(".jsonl", "line 1"), (".parquet", "row 1")])
def test_an_id_that_stands_in_two_parts_is_refused(tmp_path, suffix, place):
    folder = write_parts(tmp_path / "parts", suffix)
    (folder / f"part-2{suffix}").write_bytes((folder / f"part-0{suffix}").read_bytes())
    first, second = (folder / f"part-{number}{suffix}, {place}" for number in (0, 2))
    with pytest.raises(InputError) as error:
        Corpus.load(folder)
    assert str(error.value) == f"{second}: id 'd0' is already used at {first}; make ids unique"


def test_a_part_that_changed_since_is_noticed(tmp_path):
    folder = write_parts(tmp_path / "parts")
    corpus = Corpus.load(folder)
    (folder / "part-1.jsonl").write_text('{"_id": "new", "text": "new"}\n')
    assert corpus[0].text == "text 0"
    with pytest.raises(InputError, match=r"part-1\.jsonl: changed since it was read; load it again"):
        corpus[4]


def read_own_parts(rank: int, folder: Path) -> None:
    from hce.processes import share_out, working_together

    read = []
    original = corpus_module.Corpus._read_part

    def noting(path: Path, *arguments: Any) -> Any:
        read.append(path.name)
        return original(path, *arguments)

    corpus_module.Corpus._read_part = noting
    found = {}
    for kind in ("jsonl", "parquet"):
        with working_together():
            corpus = Corpus.load(folder / kind, share_out=share_out, copies=folder / "copies" / kind)
        found[kind] = [corpus.fingerprint, corpus.ids]
    (folder / f"found-{rank}.json").write_text(json.dumps([read, found]))


def test_each_process_reads_its_own_parts_and_has_the_whole(together, tmp_path):
    alone = {kind: Corpus.load(write_parts(tmp_path / kind, f".{kind}")) for kind in ("jsonl", "parquet")}
    assert [code for code, _ in together(read_own_parts)] == [0, 0]
    everyones = [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(2)]
    assert [read for read, _ in everyones] == [
        ["part-0.jsonl", "part-2.jsonl", "part-0.parquet", "part-2.parquet"],
        ["part-1.jsonl", "part-9.jsonl", "part-1.parquet"],
    ]
    for _, found in everyones:
        assert found == {kind: [corpus.fingerprint, corpus.ids] for kind, corpus in alone.items()}


def read_a_broken_part(rank: int, folder: Path) -> None:
    from hce.processes import share_out, working_together

    with working_together():
        Corpus.load(folder / "parts", share_out=share_out)


def test_a_fault_in_one_part_is_told_to_all(together, tmp_path):
    folder = write_parts(tmp_path / "parts")
    (folder / "part-1.jsonl").write_text("{")
    [(first_code, first), (code, lines)] = together(read_a_broken_part)
    assert (first_code, code) == (1, 1)
    assert "part-1.jsonl, line 1, column 2: not valid JSON" in lines[0]
    assert first == [lines[0].replace("error: ", "error: stopped with the others: host-b: ")]
