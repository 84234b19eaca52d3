"""The command line's contract: stdout for results, stderr for the rest, exit codes 0, 1 and 2, one line an error."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hce.hierarchy import Hierarchy


def hce(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command as a user would."""
    return subprocess.run(
        [sys.executable, "-m", "hce", *arguments], input=stdin, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory, request):
    static = request.getfixturevalue("module_static_encoder")
    folder = tmp_path_factory.mktemp("encoder") / "static"
    static.save(folder)
    return str(folder)


@pytest.fixture(scope="module")
def corpus_file(tmp_path_factory, planted_corpus):
    path = tmp_path_factory.mktemp("corpus") / "planted.jsonl"
    path.write_text("\n".join(document.to_json() for document in planted_corpus))
    return path


def test_version_and_help():
    assert hce("--version").stdout.startswith("hce 0.")
    shown = hce("--help")
    assert shown.returncode == 0
    assert {"tree", "demo"} <= set(shown.stdout.split())


def test_no_work_and_no_torch_at_import():
    code = "import sys, hce; print('torch' in sys.modules, 'faiss' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]


def test_tree_of_a_corpus(corpus_file, encoder_folder, tmp_path):
    run = hce("tree", str(corpus_file), "--encoder", encoder_folder, "--output", str(tmp_path / "tree"))
    assert run.returncode == 0, run.stderr
    assert "240 documents, 3 levels" in run.stdout
    assert "saved to" in run.stderr
    saved = Hierarchy.load(tmp_path / "tree")
    assert len(saved) == 240
    again = hce("tree", str(tmp_path / "tree"))
    assert again.stdout == run.stdout  # names and sizes were saved with it


def test_tree_as_json_from_standard_input(corpus_file, encoder_folder):
    run = hce("tree", "-", "--encoder", encoder_folder, "--json", "-b", "4", stdin=corpus_file.read_text())
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout)
    assert answer["tree"]["size"] == 240
    assert [level["nodes"] for level in answer["levels"]] == [4, 15, 60]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tree", "nowhere.jsonl"), "nowhere.jsonl: no such file"),
        (("tree", "{corpus}", "--encoder", "/no/such/model"), "no encoder '/no/such/model'"),
        (("tree", "{corpus}", "--encoder", "{encoder}", "-b", "1"), "branching factor 1"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_1(arguments, message, corpus_file, encoder_folder):
    filled = [argument.format(corpus=corpus_file, encoder=encoder_folder) for argument in arguments]
    run = hce(*filled)
    assert run.returncode == 1
    assert run.stdout == ""
    errors = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in run.stderr


def test_wrong_usage_is_exit_code_2():
    assert hce("tree").returncode == 2
    assert hce("tree", "x", "--no-such-option").returncode == 2
    assert hce("no-such-command").returncode == 2


def test_a_bug_says_that_it_is_one(monkeypatch, capsys):
    import hce.cli

    def broken() -> None:
        raise RuntimeError("oops")

    monkeypatch.setattr(hce.cli, "app", broken)
    with pytest.raises(SystemExit) as stopped:
        hce.cli.main()
    assert stopped.value.code == 1
    shown = capsys.readouterr().err
    assert "oops" in shown
    assert "please report it" in shown
