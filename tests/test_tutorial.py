"""The sessions in README.md and docs/tutorial.md are run, command by command, as they are printed.

Read from the pages and run: every `$ …` line of README's and the tutorial's `console` blocks and every `python` block
of the tutorial (README's is in test_docs.py). `hce` and the scripts run in this process, as importing torch anew for
each would take minutes; `hce serve` is a process of its own, on a free port, and the `curl` after it goes there; all
else is run by a shell.

What is smaller than on the page: the encoder `static` is a random table of 32 dimensions, put where the distilled one
is kept; the docstrings are those of one package of the standard library and one of numpy; trainings have
one epoch of small batches. So
figures and hits are not compared with the page; the first word of each line shown is, with its digits left out.

What is not run: README's `pip install`, `make demo` and `make test` (that the targets exist is checked); the demo
itself is run on the smaller docstrings, and only its layout compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from small_static import small_static
from typer.testing import CliRunner

from hce import demo
from hce.cli import app
from hce.data.judgments import Dataset
from hce.errors import HceError

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
QUICK = [
    "--epochs",
    "1",
    "--set",
    "batch_size=16",
]  # added to trainings; a batch of 256 is more than the documents here


class Command(NamedTuple):
    """A line after `$`, and what the page shows below it."""

    line: str
    shown: list[str]


class Session:
    """Runs the commands of a page in the current folder."""

    def __init__(self) -> None:
        self.server: subprocess.Popen[str] | None = None
        self.url = ""

    def run(self, command: Command) -> str:
        """What the command prints, on stdout and stderr."""
        before, bar, last = command.line.rpartition(" | ")
        words = shlex.split(last, comments=True)
        if words[:2] == ["hce", "serve"]:
            return self._serve(words[1:])
        if words[0] == "hce":
            return self._hce(words[1:], _shell(before) if bar else "")
        if words[0] == "curl":
            return self._curl(words[1:])
        if words[0] == "python":
            return _run_script(words[1:])
        return _shell(command.line)

    def _hce(self, arguments: list[str], stdin: str) -> str:
        quick = QUICK if arguments[0] in ("train", "compare") else []
        with _standard_input(stdin):
            result = CliRunner().invoke(app, [*arguments, *quick], env={"COLUMNS": "120"})
        if isinstance(result.exception, HceError):
            return f"error: {result.exception}"
        assert result.exit_code == 0, (arguments, result.output, result.exception)
        return result.output

    def _serve(self, arguments: list[str]) -> str:
        command = [sys.executable, "-m", "hce", *arguments, "--port", "0"]
        self.server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.server.stdout is not None
        line = self.server.stdout.readline()
        self.url = re.findall(r"http://[\d.:]+", line)[0]
        return line

    def _curl(self, arguments: list[str]) -> str:
        with urllib.request.urlopen(re.sub(r"http://[\d.:]+", self.url, arguments[-1])) as answer:  # noqa: S310
            return answer.read().decode()

    def stop(self) -> None:
        if self.server is not None:
            self.server.terminate()
            self.server.wait(timeout=60)
            self.server.stdout.close()


@pytest.fixture(scope="module")
def small_libraries(tmp_path_factory) -> dict[str, Dataset]:
    """The docstrings of two packages, read once."""
    packages = {
        "stdlib": Path(sysconfig.get_paths()["stdlib"], "asyncio"),
        "numpy": Path(np.__file__).parent / "polynomial",
    }
    read = {}
    for name, package in packages.items():
        library = tmp_path_factory.mktemp(name)
        shutil.copytree(package, library / package.name)
        read[name] = demo.python_docstrings(library)
    return read


@pytest.fixture
def smaller(tmp_path, monkeypatch, small_libraries, concept_corpus) -> Iterator[Path]:
    """A folder to work in, a small static encoder where the distilled one would be, and fewer docstrings."""
    corpora = [*(dataset.corpus for dataset in small_libraries.values()), concept_corpus]
    texts = [text for corpus in corpora for text in corpus.texts()]
    monkeypatch.setenv("HCE_CACHE", str(tmp_path / "cache"))
    small_static(tmp_path / "cache", texts)

    def fewer(library: Path | None = None) -> Dataset:
        return small_libraries["numpy" if library else "stdlib"]

    monkeypatch.setattr(demo, "python_docstrings", fewer)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def test_the_tutorial(smaller):
    run_page(TUTORIAL, {"pydocs.py", "numpy_docs.py"})
    assert (smaller / "model-2.html").is_file()
    assert not (smaller / "index-2").exists()
    assert (smaller / "index-1" / "manifest.json").is_file()


def test_the_readmes_session(smaller, concept_corpus):
    lines = [document.to_json() for document in concept_corpus]
    Path("docs.jsonl").write_text("\n".join(lines[1:]), encoding="utf-8")
    Path("new.jsonl").write_text(lines[0], encoding="utf-8")
    blocks = re.findall(r"```console\n(.*?)```", README, flags=re.DOTALL)
    installed, made, used, wrong = (commands_of(block) for block in blocks)
    assert [command.line.split()[:2] for command in installed] == [["pip", "install"]]  # test_package.py tries that
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert {command.line.split()[1] for command in made} <= set(targets)
    run_all(used)
    assert Path("my-index/manifest.json").is_file()
    Path("docs.jsonl").write_text('{"_id": "a", "text": "x"}\n{"_id": "b", "text": "y"}\n{"_id": "c", "body": "z"}')
    run_all(wrong)


def test_the_demo_prints_what_the_tutorial_shows(smaller, monkeypatch):
    monkeypatch.setattr(demo, "train", _one_epoch(demo.train))
    result = CliRunner().invoke(app, ["demo", "--json"], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    (shown,) = re.findall(r"```text\n(.*?)```", TUTORIAL, flags=re.DOTALL)
    first = [line for line in shown.splitlines() if re.match(r" ?[A-Za-z]|  hce |  (before|added|removed) ", line)]
    told = {skeleton(word) for word in result.stderr.split()}  # by words: a wide terminal breaks lines elsewhere
    assert [line for line in first if skeleton(line) not in told] == []
    answer = json.loads(result.stdout)
    assert set(answer["p"]) == set(answer["measures"]) - {"hce-hybrid"}
    assert Path(answer["model"], "hce.json").is_file()
    assert Path(answer["index"], "manifest.json").is_file()


def run_page(page: str, scripts: set[str]) -> None:
    """Run a page's blocks in order: shell sessions, and Python that the page says to save under a name."""
    session, saved = Session(), set()
    try:
        for text, kind, block in re.findall(r"(.*?)```(\w+)\n(.*?)```", page, flags=re.DOTALL):
            if kind == "python":
                (name,) = re.findall(r"save this as `([\w.]+)`", text)
                Path(name).write_text(block, encoding="utf-8")
                saved.add(name)
            elif kind == "console":
                run_all(commands_of(block), session)
    finally:
        session.stop()
    assert saved == scripts


def run_all(commands: list[Command], session: Session | None = None) -> None:
    own = session or Session()
    try:
        for command in commands:
            printed = own.run(command)
            firsts = [skeleton(line) for line in printed.splitlines()]
            assert [line for line in command.shown if skeleton(line) not in firsts] == [], f"{command.line}\n{printed}"
    finally:
        if session is None:
            own.stop()


def commands_of(block: str) -> list[Command]:
    """The commands of a console block; of what is shown, continuation lines and elisions are left out."""
    commands: list[Command] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            commands.append(Command(line[2:], []))
        elif line.strip() and not line.startswith("     ") and line.strip() != "…":
            commands[-1].shown.append(line)
    return commands


def skeleton(line: str) -> str:
    """The first word, without digits: what does not depend on documents and figures."""
    words = re.sub(r"\d[\d,.]*", "#", line).split()
    word = words[0] if words else ""
    return word[:8] if word.startswith("{") else word


def _shell(line: str) -> str:
    """What a shell prints; a failure is one of the test."""
    return subprocess.run(["bash", "-ec", line], capture_output=True, text=True, check=True).stdout


def _run_script(words: list[str]) -> str:
    """`python SCRIPT [> FILE]`, in this process."""
    script, *rest = words
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(Path(script).read_text(encoding="utf-8"), script, "exec"), {"__name__": "__main__"})  # noqa: S102
    if rest[:1] == [">"]:
        Path(rest[1]).write_text(printed.getvalue(), encoding="utf-8")
        return ""
    return printed.getvalue()


@contextlib.contextmanager
def _standard_input(text: str) -> Iterator[None]:
    """File descriptor 0, which is what `-` reads, with a text in it."""
    kept = os.dup(0)
    with tempfile.TemporaryFile() as file:
        file.write(text.encode())
        file.seek(0)
        os.dup2(file.fileno(), 0)
        try:
            yield
        finally:
            os.dup2(kept, 0)
            os.close(kept)


def _one_epoch(train):
    def quick(*arguments, recipe, **options):
        return train(*arguments, recipe=dataclasses.replace(recipe, epochs=1, batch_size=16), **options)

    return quick
