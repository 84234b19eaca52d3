"""An index or a model from a stranger: whatever stands in the place of its files, nothing outside of it is touched."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from hce.errors import OutsideError
from hce.files import require_inside
from hce.index.index import Index
from hce.index.store import require_own_files
from hce_lab.benchmarks.torture import children, strangers
from hce_lab.benchmarks.torture.tally import Tally

FORMATS = Path(__file__).resolve().parents[2] / "tests" / "data" / "formats-0.2.0"


@pytest.fixture(scope="module")
def stranger(tmp_path_factory, planted_corpus, bert_folder):
    """An index with words, engine, passages, tokens and tree, and a model."""
    folder = tmp_path_factory.mktemp("stranger")
    with Index.create(folder / "index", planted_corpus[:60], bert_folder, "grow") as index:
        index.search("star")
    shutil.copytree(FORMATS / "model", folder / "model")
    return folder


needs_inotify = pytest.mark.skipif(not Path("/proc/sys/fs/inotify").is_dir(), reason="needs inotify")


@pytest.mark.parametrize("kind", ["index", "model"])
@needs_inotify
@pytest.mark.timeout(600)
def test_nothing_outside_is_touched_through_links(stranger, kind, monkeypatch, capfd):
    """Files and folders become links to a copy, another kind, a pipe, a device, themselves; torture tries them all."""
    monkeypatch.setattr(children, "SECONDS", 60)
    tally = Tally()
    strangers.walk(tally, stranger / kind, is_index=kind == "index", each=1, every=5)
    assert tally.is_clean, capfd.readouterr().out
    assert tally.trials.total() > 30


@needs_inotify
@pytest.mark.parametrize("touch", [Path.read_bytes, lambda path: list(path.parent.iterdir()), Path.unlink, Path.touch])
def test_the_watch_sees_whatever_is_done(tmp_path, touch):
    """What the walk relies on: reading, listing, deleting and writing are all seen, asking for a size is not."""
    (tmp_path / "file").write_text("x")
    watch = strangers.Watch(tmp_path)
    assert (tmp_path / "file").stat().st_size
    assert watch.seen() == []
    touch(tmp_path / "file")
    assert watch.seen()
    watch.close()


def test_a_journal_that_names_another_file_is_refused(stranger, tmp_path):
    """SQLite would undo the write and then delete the file that the journal names."""
    index = Path(shutil.copytree(stranger / "index", tmp_path / "index"))
    victim = tmp_path / "thesis.txt"
    victim.write_text("years of work")
    (index / "documents.sqlite-journal").write_bytes(journal_naming(victim, index / "documents.sqlite"))
    with pytest.raises(OutsideError, match="names another file"), Index.open(index) as opened:
        opened.search("star")
    assert victim.exists()
    codes = next((index / "tokens").glob("codes-*.sqlite"))
    journal = codes.with_name(f"{codes.name}-journal")
    journal.write_bytes(journal_naming(victim, codes))
    with pytest.raises(OutsideError, match="names another file"):
        require_own_files(codes)


def test_sqlite_deletes_what_a_journal_names(tmp_path):
    """The reason why such a journal is refused; should a later SQLite not do it, the refusal can go."""
    database, victim = tmp_path / "codes.sqlite", tmp_path / "thesis.txt"
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE codes (a)")
    victim.write_text("years of work")
    (tmp_path / "codes.sqlite-journal").write_bytes(journal_naming(victim, database))
    sqlite3.connect(database).execute("SELECT * FROM codes").fetchall()
    assert not victim.exists()


def journal_naming(victim: Path, database: Path) -> bytes:
    """A journal of a write that changed nothing, along with another file's."""
    pages = database.stat().st_size // 4096 or 1
    header = bytes.fromhex("d9d505f920a163d7") + b"".join(
        value.to_bytes(4, "big") for value in (0, 1, pages, 512, 4096)
    )
    name = os.fsencode(victim)
    lock_page = (1 << 30) // 4096 + 1
    tail = lock_page.to_bytes(4, "big") + name + len(name).to_bytes(4, "big") + (sum(name)).to_bytes(4, "big")
    return header.ljust(512, b"\0") + tail + bytes.fromhex("d9d505f920a163d7")


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("tokenizer_config.json", {"tokenizer_file": "OUTSIDE"}),
        ("tokenizer_config.json", {"vocab_file": "../outside.txt"}),
        ("modules.json", [{"path": "../", "type": "x"}]),
        ("sentence_bert_config.json", {"processor_kwargs": {"vocab_file": "OUTSIDE"}}),
        ("model.safetensors.index.json", {"weight_map": {"a.weight": "../outside.txt"}}),
        ("adapter_config.json", {"base_model_name_or_path": "OUTSIDE"}),
    ],
)
def test_settings_that_name_other_files_are_refused(tmp_path, file, settings):
    """The libraries would open them; of names that lead nowhere, and of a model's origin, nothing is opened."""
    model = tmp_path / "model"
    model.mkdir()
    (tmp_path / "outside.txt").write_text("a secret")
    (model / "config.json").write_text(json.dumps({"_name_or_path": str(tmp_path), "tokenizer_file": "/nowhere/x"}))
    require_inside(model)
    (model / file).write_text(json.dumps(settings).replace("OUTSIDE", str(tmp_path / "outside.txt")))
    with pytest.raises(OutsideError, match=file):
        require_inside(model)
