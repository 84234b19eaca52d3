"""What a command runs: how many files of the package it enters, and the functions of the walks in how-it-works.md.

A reader who follows a command has to open these files. The counts may only fall. The aims are reached: 30 for train
and index, 18 for add and search.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hce

MOST = {"train": 29, "index": 28, "add": 18, "search": 18}

# Imports all modules first, so that only calls count; then runs each command and prints the functions that it
# calls, each as its file and its name, in the order of first calls.
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
    called = {}
    note = lambda frame, event, argument: called.setdefault((frame.f_code.co_filename, frame.f_code.co_name))
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
    ours = [(Path(name).relative_to(HOME).as_posix(), function) for name, function in called if name.startswith(HOME)]
    return ours

for name, *arguments in json.loads(sys.argv[1]):
    print("called", json.dumps([name, traced([name, *arguments])]), flush=True)
"""


@pytest.fixture(scope="module")
def called(tmp_path_factory, concept_corpus, module_static_encoder) -> dict[str, list[tuple[str, str]]]:
    """The functions that each command calls, in the order of first calls, with a small corpus and a small encoder."""
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
    lines = (line for line in run.stdout.splitlines() if line.startswith("called "))
    return dict(json.loads(line.removeprefix("called ")) for line in lines)


@pytest.mark.parametrize("command", MOST)
def test_a_command_enters_no_more_files(called, command):
    entered = sorted({file for file, _ in called[command]})
    assert len(entered) <= MOST[command], " ".join(entered)


@pytest.mark.parametrize(("heading", "command"), [("A query", "search"), ("A document", "train")])
def test_the_walks_are_what_runs(called, heading, command):
    """Each step of a walk names functions, which the command calls in that order."""
    page = (Path(__file__).parents[1] / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    walk = page.partition(f"\n### {heading}: ")[2].partition("\n#")[0]
    steps = re.findall(r"^\d+\. (.*)$", walk, flags=re.MULTILINE)
    assert len(steps) >= 8
    order = [f"hce.{file.removesuffix('.py').replace('/', '.')}:{function}" for file, function in called[command]]
    named = [re.findall(r"`(hce\.[\w.]+)`", step) for step in steps]
    assert [step for step, names in zip(steps, named, strict=True) if not names] == []
    places = [_place(order, name) for names in named for name in names]
    assert [name for names in named for name in names] == [name for _, name in sorted(places, key=lambda each: each[0])]


def _place(order: list[str], name: str) -> tuple[int, str]:
    """When a function, or a method by its module, is first called."""
    parts = name.split(".")
    module = next(".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1) if _is_file(parts[:n]))
    called_as = f"{module}:{parts[-1]}"
    assert called_as in order, f"{name} is not called"
    return order.index(called_as), name


def _is_file(parts: list[str]) -> bool:
    return Path(hce.__file__).parent.joinpath(*parts[1:]).with_suffix(".py").is_file()
