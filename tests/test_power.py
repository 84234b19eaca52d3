"""Loss of power: whatever a rename makes visible is on disk before it, and the rename soon after."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import numpy as np
import pytest
import torch

import hce
from hce.data.corpus import Corpus
from hce.encoding.corpus_vectors import VectorFile
from hce.files import make_folder, new_folder, write_json
from hce.index.index import Index
from hce.training.co_training import Checkpoint, CheckpointFolder

BY_OTHERS = re.compile(r"\.sqlite|\.lock|/\..*\.partial")  # SQLite syncs its own; locks and what is on its way may go


class Power:
    """A trace of syncs and renames. Lost could be what was written to a file, and a name made in a folder, since."""

    def __init__(self, monkeypatch, root: Path) -> None:
        self.root = root
        self.renamed: list[str] = []
        self.faults: list[str] = []
        self._files: set[tuple[int, int]] = set()
        self._names: dict[int, set[tuple[str, int]]] = {}
        self._sync, self._replace = os.fsync, os.replace
        monkeypatch.setattr(os, "fsync", self.sync)
        monkeypatch.setattr(os, "replace", self.replace)

    def sync(self, descriptor: int) -> None:
        self._sync(descriptor)
        found = os.fstat(descriptor)
        self._files.add((found.st_ino, found.st_mtime_ns))
        if stat.S_ISDIR(found.st_mode):
            self._names[found.st_ino] = names_in(descriptor)

    def replace(self, source, target, **options) -> None:
        source, target = Path(source), Path(target)
        if self.root in target.parents and ".partial" not in str(target) and ".sqlite" not in target.name:
            self.renamed.append(target.name)
            named = target.parent if target.name in ("manifest.json", "LAST") else source  # they name what is around
            self.faults += [f"{target.name} before {name}" for name in self.unsynced(named)]
        self._replace(source, target, **options)

    def unsynced(self, path: Path) -> list[str]:
        """Return what could be lost of a file, or of a folder and all below it."""
        below = sorted(path.rglob("*")) if path.is_dir() else []
        lost = [name for each in (path, *below) for name in self._lost(each)]
        return [name for name in lost if not BY_OTHERS.search(name.removeprefix(str(path)))]

    def _lost(self, path: Path) -> list[str]:
        """Return the names made in a folder that are not synced, or the file itself."""
        found = path.stat()
        if path.is_dir():
            made = names_in(path) - self._names.get(found.st_ino, set())
            return [f"{path}/{name} (its name)" for name, _ in sorted(made)]
        return [] if (found.st_ino, found.st_mtime_ns) in self._files else [str(path)]


def names_in(folder: int | Path) -> set[tuple[str, int]]:
    with os.scandir(folder) as entries:
        return {(entry.name, entry.inode()) for entry in entries}


@pytest.fixture
def power(monkeypatch, tmp_path):
    return Power(monkeypatch, tmp_path)


def test_the_trace_sees_what_is_not_synced(power, tmp_path):
    """A folder with a file that nobody synced is told of when a manifest names it."""
    (tmp_path / "index" / "model").mkdir(parents=True)
    (tmp_path / "index" / "model" / "hce.json").write_text("{}")
    write_json(tmp_path / "index" / "manifest.json", {})
    assert power.faults == [
        f"manifest.json before {tmp_path}/index/{each}"
        for each in ("model (its name)", "model/hce.json (its name)", "model/hce.json")
    ]


def test_a_folder_is_synced_before_its_name(power, tmp_path):
    """Also the names of the folders that had to be made above it."""
    with new_folder(tmp_path / "a" / "b") as folder:
        (folder / "below").mkdir()
        (folder / "below" / "file").write_text("x")
    make_folder(tmp_path / "c" / "d" / "e")
    assert power.faults == []
    assert "b" in power.renamed
    assert power.unsynced(tmp_path) == []


def test_a_model_and_an_index_of_it(power, tmp_path, concept_corpus, bert_folder):
    """Training with its checkpoints, an index, a rebuild, a reindexing to the model and back."""
    small = Corpus.from_documents(concept_corpus[:60])
    recipe = hce.Recipe(epochs=2, batch_size=16, train="encoder", keep="last")  # so that another encoder comes out
    hce.train(small, bert_folder, recipe=recipe, output=tmp_path / "model")
    assert {"LAST", "manifest.json", "model"} <= set(power.renamed)
    with Index.create(tmp_path / "index", small, bert_folder, "grow", engine="codes") as index:
        index.search("w1")
        index.rebuild()
        index.reindex(tmp_path / "model")
        assert list((tmp_path / "index").glob("model-*/hce.json"))
        index.undo_reindex()
    assert power.renamed.count("manifest.json") > 4
    assert power.faults == []


def test_a_checkpoint(power, tmp_path):
    """The state, and the vectors that it names."""
    checkpoints = CheckpointFolder(tmp_path / "out.unfinished", {"corpus": "a"})
    vectors = VectorFile(checkpoints.vectors_folder(0), 4, 2, {})
    vectors.start()
    vectors.write(0, np.zeros((4, 2), np.float32))
    vectors.acknowledge(4)
    checkpoints.save(Checkpoint({"w": torch.zeros(2)}, {"vectors": "vectors-0"}))
    assert power.renamed[-1] == "LAST"
    assert power.faults == []
    assert power.unsynced(tmp_path) == []
