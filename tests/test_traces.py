"""How many files of the package a command enters: a reader who follows it has to open these.

The counts are what is there now and may only fall; the aims are 30 for train and index, 18 for add and search.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

MOST = {"train": 45, "index": 49, "add": 25, "search": 33}

# Imports all modules first, so that only calls count; then runs each command and prints the files that it enters.
TRACE = """
import importlib, json, pkgutil, sys, threading
from contextlib import suppress
from pathlib import Path
import hce
from hce import cli

HOME = str(Path(hce.__file__).parent)
for module in pkgutil.walk_packages(hce.__path__, "hce."):
    if not module.name.endswith("__main__"):
        with suppress(Exception):
            importlib.import_module(module.name)

def traced(arguments):
    entered = set()
    note = lambda frame, event, argument: entered.add(frame.f_code.co_filename)
    sys.argv = ["hce", *arguments]
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        cli.main()
    except SystemExit as ended:
        assert not ended.code, arguments
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return sorted(Path(name).relative_to(HOME).as_posix() for name in entered if name.startswith(HOME))

for name, *arguments in json.loads(sys.argv[1]):
    print("entered", json.dumps([name, traced([name, *arguments])]), flush=True)
"""


@pytest.fixture(scope="module")
def entered(tmp_path_factory, concept_corpus, module_static_encoder) -> dict[str, list[str]]:
    """The files that each command enters, with a small corpus and a small encoder."""
    folder = tmp_path_factory.mktemp("traces")
    documents = [document.to_json() for document in concept_corpus]
    (folder / "docs.jsonl").write_text("\n".join(documents))
    (folder / "more.jsonl").write_text(documents[0].replace('"d0"', '"new"'))
    module_static_encoder.save(folder / "encoder")
    commands = [
        ["train", "docs.jsonl", "-o", "model", "--encoder", "encoder", "--epochs", "1", "--set", "batch_size=32"],
        ["index", "docs.jsonl", "-m", "model", "-o", "index"],
        ["add", "index", "more.jsonl"],
        ["search", "index", "w1 w2"],
    ]
    run = subprocess.run(
        [sys.executable, "-c", TRACE, json.dumps(commands)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    lines = (line for line in run.stdout.splitlines() if line.startswith("entered "))
    return dict(json.loads(line.removeprefix("entered ")) for line in lines)


@pytest.mark.parametrize("command", MOST)
def test_a_command_enters_no_more_files(entered, command):
    assert len(entered[command]) <= MOST[command], " ".join(entered[command])
