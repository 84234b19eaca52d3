"""Data flows one way: a package imports only from packages before it, and nothing is reached at import.

There are two houses: the product, `hce`, and the laboratory, `hce_lab`, which imports from the product and is never
imported by it.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import re
import time
from pathlib import Path

import pytest

import hce
import hce_lab

HOUSES = {"hce": Path(hce.__file__).parent, "hce_lab": Path(hce_lab.__file__).parent}

# From the top down; modules of `hce` itself that every package needs come first, those that need every package last.
PRODUCT = [
    *("_version", "errors", "progress", "files", "memory", "processes"),
    *("data", "encoding", "tree", "search", "evaluation", "training", "index", "milvus"),
    *("pages", "web", "integrations"),
    *("demo", "commands", "cli", "__main__"),
]
LABORATORY = ["generation", "comparison", "commands", "experiments", "benchmarks", "__main__"]
ORDER = [*(f"hce.{name}" for name in PRODUCT), *(f"hce_lab.{name}" for name in LABORATORY)]
MODULES = {
    f"{house}.{path.relative_to(folder).with_suffix('').as_posix().replace('/', '.')}": path
    for house, folder in HOUSES.items()
    for path in folder.rglob("*.py")
    if path.name != "__init__.py"
}


def imported(path: Path) -> set[str]:
    """The modules of ours that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names} & set(MODULES)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith(("hce.", "hce_lab."))}


def package_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def test_every_package_has_a_place():
    assert {package_of(name) for name in MODULES} == set(ORDER)


def test_the_product_does_not_know_the_laboratory():
    """Not even by name: its commands are found by their entry points."""
    assert [path for name, path in MODULES.items() if name.startswith("hce.") and "hce_lab" in path.read_text()] == []


@pytest.mark.parametrize("package", ORDER)
def test_packages_import_only_from_those_before_them(package):
    allowed = set(ORDER[: ORDER.index(package) + 1])
    for name, path in MODULES.items():
        if package_of(name) == package:
            assert {package_of(each) for each in imported(path)} <= allowed, name


def test_no_module_imports_itself_round_a_corner():
    """Within a package too, imports go one way: no module is reached again from what it imports when it is loaded."""
    needs = {name: at_load(path) & set(MODULES) for name, path in MODULES.items()}
    settled: set[str] = set()
    while ready := {name for name, needed in needs.items() if name not in settled and needed <= settled}:
        settled |= ready
    assert settled == set(MODULES), f"a circle among {sorted(set(MODULES) - settled)}"


def at_load(path: Path) -> set[str]:
    """The modules of ours that a file imports when it is itself imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    }


def test_public_names_are_there():
    for name in hce.__all__:
        assert getattr(hce, name) is not None
    assert set(hce.__all__) == set(hce._HOME) | {"__version__"}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hce.nothing


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"hce.__main__", "hce_lab.__main__"}))
def test_docstrings_and_no_pickle(name):
    module = importlib.import_module(name)
    assert module.__doc__
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert "pickle" not in names
    assert not any(isinstance(node, ast.Name) and node.id in {"eval", "exec"} for node in ast.walk(tree))
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not attributes & {"all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"}


def patterns() -> set[str]:
    """The regular expressions of every module: what is handed to `re`, and whatever else begins as only they do."""
    found = set()
    for path in MODULES.values():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        parts = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re.") and node.args:
                found.add(spelled(node.args[0]))
            elif node not in parts and spelled(node).startswith("(?"):
                found.add(spelled(node))
    return found - {""}


def spelled(node: ast.AST) -> str:
    """What a string says, with two words where something is filled in; nothing if it is none."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "aa|ab" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


ENDLESS = [f"{one}{two}" for one, two in itertools.product(' a_A1.-"/=\n(é', repeat=2)]


@pytest.mark.parametrize("pattern", sorted(patterns()))
def test_no_regular_expression_takes_more_than_a_pass_or_so(pattern):
    """Over what repeats for long and does not match in the end; a nested loop takes a hundred times as long."""
    compiled = re.compile(pattern)
    for part, before, after in itertools.product(ENDLESS, ("", "a", "."), ("", "!", "a\x00")):
        text = f"{before}{part * 1000}{after}"
        start = time.thread_time()  # of the processor: a busy machine changes nothing
        compiled.fullmatch(text)
        compiled.findall(text)
        assert time.thread_time() - start < 0.05, repr(part)
