"""Data flows one way: a module imports only from those above it, and nothing is reached at import."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import hce

PACKAGE = Path(hce.__file__).parent

# From the top down. A new module is given its place here, and the place is argued for in review.
ORDER = [
    "_version",
    "errors",
    "atomic",
    "progress",
    "processes",
    "page",
    "data.records",
    "data.documents",
    "data.corpus",
    "data.judgments",
    "data.docstrings",
    "encoding.static",
    "encoding.word_memo",
    "encoding.vectors",
    "encoding.bundled",
    "encoding.encoder",
    "tree.kmeans_steps",
    "tree.kmeans_screen",
    "tree.kmeans_fast",
    "tree.kmeans",
    "tree.clustering",
    "tree.hierarchy",
    "tree.labels",
    "tree.outline",
    "evaluation.dense",
    "evaluation.runs",
    "evaluation.measures",
    "evaluation.evaluate",
    "evaluation.significance",
    "evaluation.diagnostics",
    "training.losses",
    "training.false_negatives",
    "training.objective",
    "training.gradcache",
    "training.pairs",
    "training.devset",
    "training.recipe",
    "training.history",
    "training.mixing",
    "training.checkpoint",
    "training.optimise",
    "training.run_state",
    "training.co_training",
    "training.model_folder",
    "training.adapting",
    "training.tracking",
    "engines.base",
    "engines.quantise",
    "engines.files",
    "engines.exact",
    "engines.lists",
    "engines.growing",
    "engines.descent",
    "engines.balance",
    "engines.flat",
    "engines.hnsw",
    "engines.ivf",
    "engines.tree",
    "engines.choose",
    "index.drift",
    "index.locking",
    "index.filters",
    "index.manifest",
    "index.tables",
    "index.store",
    "index.live_engine",
    "index.carried",
    "index.writing",
    "index.indexing",
    "index.hits",
    "index.status",
    "index.index",
    "generation.smollm2",
    "generation.generator",
    "generation.journal",
    "generation.querygen",
    "baselines.base",
    "baselines.bm25",
    "baselines.untrained",
    "baselines.by_recipe",
    "baselines.tas_b",
    "baselines.pefa",
    "baselines.tsdae",
    "baselines.systems",
    "comparing.comparison",
    "comparing.bench",
    "comparing.compare",
    "comparing.compare_page",
    "web.packages",
    "web.limits",
    "web.errors",
    "web.passages",
    "web.lanes",
    "web.together",
    "web.rules",
    "web.guard",
    "web.live_tree",
    "web.untrained",
    "web.drift_watch",
    "web.training_facts",
    "web.answers",
    "web.searching",
    "web.site",
    "web.api",
    "web.files",
    "web.app",
    "web.serving",
    "integrations.langchain",
    "integrations.llamaindex",
    "demo",
    "report",
    "commands.common",
    "commands.report",
    "commands.add",
    "commands.index",
    "commands.rebuild",
    "commands.remove",
    "commands.search",
    "commands.serve",
    "commands.status",
    "commands.demo",
    "commands.compare",
    "commands.evaluate",
    "commands.generate_queries",
    "commands.train",
    "commands.tree",
    "cli",
    "__main__",
]


def module_files() -> dict[str, Path]:
    names = {
        path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): path for path in PACKAGE.rglob("*.py")
    }
    return {name: path for name, path in names.items() if not name.endswith("__init__")}


def imported(path: Path) -> set[str]:
    """The modules of ours that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("hce."):
            found.add(node.module.removeprefix("hce."))
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("hce.") for alias in node.names if alias.name.startswith("hce.")}
    return found


def test_every_module_has_a_place():
    assert sorted(module_files()) == sorted(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_imports_point_upwards(name):
    allowed = set(ORDER[: ORDER.index(name)])
    assert imported(module_files()[name]) <= allowed


def test_public_names_are_there():
    for name in hce.__all__:
        assert getattr(hce, name) is not None
    assert set(hce.__all__) == set(hce._HOME) | {"__version__"}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hce.nothing


@pytest.mark.parametrize("name", sorted(set(ORDER) - {"__main__"}))
def test_docstrings_and_no_pickle(name):
    module = importlib.import_module(f"hce.{name}")
    assert module.__doc__
    tree = ast.parse(module_files()[name].read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert "pickle" not in names
    assert not any(isinstance(node, ast.Name) and node.id in {"eval", "exec"} for node in ast.walk(tree))
