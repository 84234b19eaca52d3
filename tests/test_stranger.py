"""An index or a model from a stranger: whatever stands in the place of its files, nothing outside of it is touched."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from benchmarks.torture import children, strangers
from benchmarks.torture.tally import Tally

from hce.index.index import Index

FORMATS = Path(__file__).parent / "data" / "formats-0.2.0"


@pytest.fixture(scope="module")
def stranger(tmp_path_factory, planted_corpus, bert_folder):
    """An index with words, engine, passages, tokens and tree, and a model."""
    folder = tmp_path_factory.mktemp("stranger")
    with Index.create(folder / "index", planted_corpus[:60], bert_folder, "grow", engine="flat") as index:
        index.search("star")
    shutil.copytree(FORMATS / "model", folder / "model")
    return folder


@pytest.mark.parametrize("kind", ["index", "model"])
@pytest.mark.skipif(not hasattr(os, "mkfifo") or not Path("/proc/sys/fs/inotify").is_dir(), reason="needs inotify")
@pytest.mark.timeout(600)
def test_nothing_outside_is_touched_through_links(stranger, kind, monkeypatch, capfd):
    """Each file and folder becomes a link to a copy, another kind, a pipe, a device, itself; `make torture` runs all."""
    monkeypatch.setattr(children, "SECONDS", 30)
    tally = Tally()
    strangers.walk(tally, stranger / kind, is_index=kind == "index", each=1)
    assert tally.is_clean, capfd.readouterr().out
    assert tally.trials.total() > 60
