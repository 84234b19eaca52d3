"""Torture in short, and that it would tell: each of its judges sees what it is there to see."""

from __future__ import annotations

import errno
import mmap
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from hce.files import write_json
from hce.index.index import Index
from hce_lab.benchmarks.torture import children, damage, inputs, kills, outages, requests, soak
from hce_lab.benchmarks.torture.faults import Fault
from hce_lab.benchmarks.torture.samples import documents_of, random_contents, tiny_encoder
from hce_lab.benchmarks.torture.tally import HANG, LOST, TRACEBACK, WRONG, Tally
from hce_lab.benchmarks.torture.verify import faults_of

ROOT = Path(__file__).resolve().parents[1]
CONTENTS = random_contents(random.Random(0), [f"d{number}" for number in range(30)], (6,))  # noqa: S311


@pytest.fixture(scope="module")
def encoder():
    return tiny_encoder()


@pytest.fixture(scope="module")
def made(tmp_path_factory, encoder):
    path = tmp_path_factory.mktemp("torture") / "index"
    Index.create(path, documents_of(CONTENTS), encoder, "grow").close()
    return path


@pytest.fixture
def index(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "index"))


@pytest.mark.timeout(900)
def test_nothing_hurts():
    """`make torture`, with a few trials of each kind."""
    run = subprocess.run(
        [sys.executable, "-m", "hce_lab", "torture", "--short"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    *_, together = [line for line in run.stdout.splitlines() if line.startswith("together")]
    trials, *wrong = together.replace(",", "").split()[1:]
    assert int(trials) > 500
    assert wrong == ["0", "0", "0", "0"]


def test_a_tally_is_clean_only_if_something_was_tried_and_nothing_went_wrong(capsys):
    tally = Tally()
    assert not tally.is_clean
    tally.count("kills", 3)
    assert tally.is_clean
    tally.fault("kills", LOST, "a document")
    assert not tally.is_clean
    assert tally.table().splitlines()[-1].split() == ["together", "3", "1", "0", "0", "0"]
    assert "kills: lost: a document" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------- an index


def test_what_is_whole_has_no_faults(index, encoder):
    assert faults_of(index, encoder, [CONTENTS]) == ([], CONTENTS)


def test_a_lost_document_is_told(index, encoder):
    more = {**CONTENTS, "lost": ("w1", 1)}
    (fault,) = faults_of(index, encoder, [more])[0]
    assert fault[0] == LOST
    assert faults_of(index, encoder, [more, CONTENTS])[0] == []  # under way, not acknowledged


def test_vectors_that_are_not_their_texts_are_told(index, encoder):
    with closing(sqlite3.connect(index / "documents.sqlite", isolation_level=None)) as store:
        store.execute("UPDATE vectors SET vector = (SELECT vector FROM vectors WHERE number = 2) WHERE number = 1")
    assert (WRONG, "a vector is not its text's") in faults_of(index, encoder, [CONTENTS])[0]


def test_an_index_that_cannot_be_opened_is_lost(index, encoder):
    (index / "documents.sqlite").write_bytes(b"")
    assert [kind for kind, _ in faults_of(index, encoder, [CONTENTS])[0]] == [LOST]


def test_changes_are_replayed():
    contents = kills.after({"a": ("w1", 1)}, {"kind": "add", "documents": {"b": ["w2", 2]}})
    assert contents == {"a": ("w1", 1), "b": ("w2", 2)}
    assert kills.after(contents, {"kind": "remove", "ids": ["a"]}) == {"b": ("w2", 2)}


@pytest.mark.parametrize("is_told", [True, False])
def test_other_answers_have_to_be_told(tmp_path, is_told):
    tally, told = Tally(), ["told"] if is_told else []

    def ask(path):
        return {"answer": {"hits": [2]}, "on opening": [], "by check": told}

    assert damage._try(tally, "damage", tmp_path, ask, {"answer": {"hits": [1]}}, "a bit") is is_told
    assert tally.faults["damage", WRONG] == (not is_told)


# ------------------------------------------------------------------------------------------------- children


def test_a_command_that_ends_in_one_line_is_no_fault(tmp_path):
    ending = children.command("search", tmp_path / "none", "w1")
    assert ending.code == 1
    assert ending.fault is None


def test_a_traceback_a_death_and_a_hang_are_told(monkeypatch):
    assert children.child(lambda: 1 / 0).fault[0] == TRACEBACK
    assert children.child(lambda: os.kill(os.getpid(), signal.SIGKILL)).fault[0] == TRACEBACK
    monkeypatch.setattr(children, "SECONDS", 0.2)
    assert children.child(lambda: time.sleep(60)).fault[0] == HANG


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_calls_fail_when_they_are_to(tmp_path, call):
    fault = Fault(call, errno.ENOSPC, 1, tmp_path, mmap.mmap(-1, 8))

    def work():
        fault.install()
        write_json(tmp_path / "a.json", {})

    ending = children.child(work)
    assert fault.met() >= 1
    assert "cannot be written (No space left on device)" in ending.said
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------- loss of power


@pytest.fixture
def disk(tmp_path):
    disk = outages.Disk(tmp_path)
    try:
        disk.make()
    except OSError as error:
        pytest.skip(f"needs root and a loop device: {error}")
    yield disk
    disk.remove()


@pytest.mark.parametrize("how", [outages.WITH_JOURNAL, outages.WITHOUT_JOURNAL])
def test_an_outage_loses_what_is_not_synced_and_nothing_else(disk, how):
    (disk.place / "settled").write_text("x")
    disk.settle()
    with (disk.place / "synced").open("w") as synced, (disk.place / "not synced").open("w") as other:
        for file in (synced, other):
            file.write("x" * 10_000)
            file.flush()
        os.fsync(synced.fileno())
        disk.fail(how)
        with pytest.raises(OSError, match="Input/output error"):
            (disk.place / "later").touch()
    disk.recover()
    assert (disk.place / "settled").read_text() == "x"
    assert (disk.place / "synced").read_text() == "x" * 10_000
    lost = disk.place / "not synced"
    assert not lost.exists() or lost.read_bytes().strip(b"\0") == b""


# ------------------------------------------------------------------------------------------------- strangers


def test_inputs_that_fail_hang_or_are_taken_for_others_are_told(monkeypatch):
    def hang(content):
        raise inputs.Hung

    for take, kind in ((lambda content: 1 / 0, TRACEBACK), (lambda content: "an id twice", WRONG), (hang, HANG)):
        tally = Tally()
        inputs._try(tally, inputs.Seed("corpora", b"{}", take), random.Random(0))  # noqa: S311
        assert tally.faults == {("mutated corpora", kind): 1}


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (b"", None),
        (b"HTTP/1.1 200 OK\r\n\r\n{}", None),
        (b'HTTP/1.1 422 No\r\n\r\n{"error": "k: too large"}', None),
        (b"HTTP/1.1 422 No\r\n\r\nInvalid HTTP request received.", WRONG),
        (b'HTTP/1.1 500 No\r\n\r\n{"error": "oh"}', TRACEBACK),
        (b"no HTTP", TRACEBACK),
    ],
)
def test_answers_that_nobody_promised_are_told(answer, fault):
    assert requests._fault_of(answer) == fault


@pytest.mark.parametrize(
    ("memory", "files", "told"),
    [
        (lambda n: 400 + min(n, 30), lambda n: 20 + n % 3, 0),  # caches that fill
        (lambda n: 400 + 2 * n, lambda n: 20, 1),
        (lambda n: 400, lambda n: 20 + n // 2, 1),
    ],
)
def test_what_grows_without_end_is_told(memory, files, told):
    held = [soak.Held(memory(n) << 20, files(n)) for n in range(100)]
    assert len(soak.growth(held)) == told
