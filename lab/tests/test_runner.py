"""`python -m hce_lab` finds every experiment and benchmark, and runs one with its arguments."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.metadata import distribution

import pytest

import hce
from hce_lab import __main__ as runner


@pytest.mark.parametrize("name", sorted(runner.modules()))
def test_each_can_be_run_and_says_what_it_is(name):
    module = runner.modules()[name]
    assert callable(import_module(module).main)
    assert runner.about(module)


def test_an_unknown_name_is_wrong_usage(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hce_lab", "nothing"])
    with pytest.raises(SystemExit) as ended:
        runner.main()
    assert ended.value.code == 2
    assert "branching" in capsys.readouterr().err


def test_what_the_user_can_mend_is_one_line(tmp_path):
    command = [sys.executable, "-m", "hce_lab", "branching", str(tmp_path / "nowhere")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr.startswith("error: ")
    assert "nowhere" in run.stderr
    assert run.stderr.count("\n") == 1


def test_both_distributions_have_one_version():
    assert distribution("hce-lab").version == hce.__version__
