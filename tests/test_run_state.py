"""The state of an unfinished run: whatever is damaged in it is one line, and nothing of it is believed."""

from __future__ import annotations

import pytest
import torch

from hce.errors import FormatError, InputError
from hce.files import read_json, write_json
from hce.training.co_training import Checkpoint, CheckpointFolder, unfinished_run

ONE_LINE = r"^[^\n]*run: the state of the run is damaged \([^\n]+\); delete this folder and train from the start$"


@pytest.fixture
def run(tmp_path):
    checkpoints = CheckpointFolder(tmp_path / "run", {"corpus": "a"})
    checkpoints.save(Checkpoint({"weights.w": torch.zeros(2)}, {"vectors": "vectors-0", "history": []}))
    return checkpoints


@pytest.mark.parametrize("name", ["LAST", "state-0/facts.json", "state-0/tensors.safetensors"])
@pytest.mark.parametrize("content", [b"", b"\xff" * 9, b"[]", b"[" * 100_000, b"../../elsewhere", b"{}"])
def test_a_damaged_file_is_one_line(run, name, content):
    (run.folder / name).write_bytes(content)
    with pytest.raises(FormatError, match=ONE_LINE):
        unfinished_run(None, run)


@pytest.mark.parametrize("name", ["state-0/facts.json", "state-0/tensors.safetensors"])
def test_a_missing_file_is_one_line(run, name):
    (run.folder / name).unlink()
    with pytest.raises(FormatError, match=ONE_LINE):
        unfinished_run(None, run)


@pytest.mark.parametrize("name", ["../elsewhere", "/etc", "state-0", 7, None])
def test_vectors_are_looked_for_in_the_folder_of_the_run_alone(run, name):
    with pytest.raises((FormatError, TypeError)):
        run.vectors_named(name)


def test_another_run_is_not_a_damaged_one(run):
    facts = run.folder / "state-0" / "facts.json"
    write_json(facts, {**read_json(facts), "identity": {"corpus": "b"}})
    with pytest.raises(InputError, match="another corpus; give the same, or delete it"):
        unfinished_run(None, run)


def test_nothing_to_resume(tmp_path):
    assert unfinished_run(None, None) is None
    assert unfinished_run(None, CheckpointFolder(tmp_path / "none", {})) is None
