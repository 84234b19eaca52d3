"""Data flows one way: a package imports only from packages before it, and nothing is reached at import."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import hce

PACKAGE = Path(hce.__file__).parent

# From the top down; modules of `hce` itself that every package needs come first, those that need every package last.
ORDER = [
    *("_version", "errors", "progress", "files", "processes"),
    *("data", "encoding", "tree", "search", "evaluation", "training", "index"),
    *("generation", "comparison", "pages", "web", "integrations"),
    *("demo", "commands", "cli", "__main__"),
]
MODULES = {
    path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): path
    for path in PACKAGE.rglob("*.py")
    if path.name != "__init__.py"
}


def imported(path: Path) -> set[str]:
    """The modules of ours that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("hce."):
            found.add(node.module.removeprefix("hce."))
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("hce.") for alias in node.names if alias.name.startswith("hce.")}
    return found


def package_of(module: str) -> str:
    return module.partition(".")[0]


def test_every_package_has_a_place():
    assert {package_of(name) for name in MODULES} == set(ORDER)


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
        node.module.removeprefix("hce.")
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("hce.")
    }


def test_public_names_are_there():
    for name in hce.__all__:
        assert getattr(hce, name) is not None
    assert set(hce.__all__) == set(hce._HOME) | {"__version__"}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hce.nothing


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"__main__"}))
def test_docstrings_and_no_pickle(name):
    module = importlib.import_module(f"hce.{name}")
    assert module.__doc__
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert "pickle" not in names
    assert not any(isinstance(node, ast.Name) and node.id in {"eval", "exec"} for node in ast.walk(tree))
