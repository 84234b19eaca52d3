"""What docs/reliability.md promises is held by tests that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
TEST = re.compile(r"`((?:lab/)?tests/test_\w+\.py)::(test_\w+)`")
PROMISES = [
    line for line in PAGE.split("## What is promised")[1].split("\n### ")[0].split("\n") if line.startswith("| ")
]


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("row", PROMISES[1:])
def test_each_promise_names_a_test(row):
    """A promise that nothing holds has no place on the page."""
    assert TEST.search(row), row


@pytest.mark.parametrize(("file", "name"), sorted(set(TEST.findall(PAGE))))
def test_each_test_that_is_named_is_there(file, name):
    assert (ROOT / file).is_file()
    assert name in functions_of(ROOT / file)
