"""The wheel and the source archive are complete, declare what they import, and work outside the repository.

Built as for a release: the source archive from a copy of the repository, and the wheel from that archive. The wheel is
then installed in an environment of its own, into which those packages of this one are linked that it asks for.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email import message_from_string
from functools import cache
from importlib.metadata import distribution, packages_distributions
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import hce

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "hce"
NAME = "hierarchical-corpus-encoder"
RIVALS = ("bm25s", "nltk", "pydivsufsort", "gguf")  # what the laboratory needs and the product does not
PACKED = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")
SOURCES = sorted(path for path in SOURCE.rglob("*.py"))

# Imports the modules and runs the commands that it is given, and prints how each ends.
ASK = """
import importlib, json, sys
from typer.testing import CliRunner
from hce.cli import app

def ending(attempt):
    try:
        end = attempt()
    except Exception as error:
        end = error
    return f"{type(end).__name__}: {end}"

modules, commands = json.loads(sys.argv[1])
for module in modules:
    print(json.dumps([module, ending(lambda: importlib.import_module(module))]))
for command in commands:
    print(json.dumps([command, ending(lambda: CliRunner().invoke(app, command.split()).exception)]))
"""


class Built(NamedTuple):
    """What is uploaded for a release."""

    sdist: Path
    wheel: Path


class Declared(NamedTuple):
    """The distributions that a wheel asks for: always, and with each extra."""

    core: set[str]
    extras: dict[str, set[str]]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Built:
    folder = tmp_path_factory.mktemp("package")
    copy = folder / "copy"
    shutil.copytree(SOURCE, copy / "src" / "hce", ignore=shutil.ignore_patterns("__pycache__"))
    for name in PACKED:
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr, done.stderr
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return Built(sdist, wheel)


@pytest.fixture(scope="module")
def declared(built) -> Declared:
    with zipfile.ZipFile(built.wheel) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_string(wheel.read(name).decode())
    wanted = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    core = {canonicalize_name(each.name) for each in wanted if each.marker is None}
    return Declared(core, {extra: of_extra(wanted, extra) for extra in metadata.get_all("Provides-Extra")})


@pytest.fixture(scope="module")
def environment(built, declared, tmp_path_factory) -> Path:
    """The Python of an environment that has the wheel and what it asks for, without extras."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    # pip would take a source tree on PYTHONPATH, with its egg-info, for the installed wheel.
    without_path = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*pip, "--no-index", "--no-deps", str(built.wheel)], check=True, env=without_path)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in set().union(*(closure(name) for name in declared.core)):
        link(name, site)
    return python


def test_every_file_of_the_package_is_inside(built):
    files = {path.relative_to(SOURCE.parent).as_posix() for path in SOURCE.rglob("*") if path.is_file()}
    expected = {name for name in files if "__pycache__" not in name}
    assert {"hce/py.typed", "hce/web/static/page.html"} <= expected
    with zipfile.ZipFile(built.wheel) as wheel:
        assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected
    with tarfile.open(built.sdist) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert names >= {f"src/{name}" for name in expected} | set(PACKED)
    assert not any(name.startswith("tests") for name in names)


def test_no_rival_is_in_the_wheel(built, declared):
    """The laboratory is a distribution of its own: its modules, its tests and its requirements are not in the wheel."""
    with zipfile.ZipFile(built.wheel) as wheel:
        names = wheel.namelist()
        sources = [wheel.read(name).decode() for name in names if name.endswith(".py")]
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"hce"}
    assert not any(re.search(r"bm25\.|dsi|genret|seal|pefa|tsdae|torture|experiments", name) for name in names)
    assert not any(
        re.search(rf"^\s*(import|from) ({'|'.join(RIVALS)}|hce_lab)\b", each, re.MULTILINE) for each in sources
    )
    assert not set(RIVALS) & declared.core.union(*(declared.extras.values()))


def test_names_carry_the_version(built):
    stem = f"{NAME.replace('-', '_')}-{hce.__version__}"
    assert built.sdist.name == f"{stem}.tar.gz"
    assert built.wheel.name == f"{stem}-py3-none-any.whl"


def test_the_changelog_begins_with_this_version_and_its_date():
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    first = headings["Unreleased" in headings[:1]]
    assert re.fullmatch(rf"{re.escape(hce.__version__)} \(20\d\d-\d\d-\d\d\)", first)


def test_the_wheel_works_elsewhere(environment, tmp_path):
    def shown(*arguments: str) -> str:
        return subprocess.run(
            [*arguments], cwd=tmp_path, capture_output=True, text=True, check=True, env={"COLUMNS": "100"}
        ).stdout

    where = shown(str(environment), "-c", "import hce; print(hce.__file__)")
    assert Path(where.strip()).is_relative_to(environment.parents[1])
    command = str(environment.with_name("hce"))
    assert shown(command, "--version") == f"hce {hce.__version__}\n"
    assert "Usage: hce demo" in shown(command, "demo", "--help")
    lacking = subprocess.run([command, "compare", "."], capture_output=True, text=True, cwd=tmp_path, env={})
    assert (lacking.returncode, lacking.stderr.count("\n")) == (1, 1)
    assert "pip install hce-lab" in lacking.stderr


def imports() -> Iterator[tuple[Path, str]]:
    """Every import of a package that is neither ours nor Python's: the file, and the package's name."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in {name.partition(".")[0] for name in names} - {"hce", *sys.stdlib_module_names}:
                yield path, name


def test_every_import_is_declared(declared):
    """In the dependencies, or in an extra that a message in the same package tells users to install."""
    for path, name in set(imports()):
        said = " ".join(each.read_text(encoding="utf-8") for each in path.parent.glob("*.py"))
        told = re.findall(rf"{NAME}\[(\w+)\]", said) + re.findall(r'needs_extra\("(\w+)"', said)
        extras = set(told) & set(declared.extras)
        offered = declared.core.union(*(declared.extras[extra] for extra in extras))
        assert distributions_of(name) & offered, f"{path.relative_to(SOURCE)} imports {name}"


def test_nothing_is_declared_that_is_not_imported(declared):
    names = {distribution for _, name in imports() for distribution in distributions_of(name)}
    assert declared.core <= names


def test_the_extra_all_has_everything(declared):
    users = {extra: wanted for extra, wanted in declared.extras.items() if extra not in {"all", "dev"}}
    assert declared.extras["all"] == set().union(*users.values())


def test_named_extras_exist(declared):
    """Those that pages and messages tell users to install."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *SOURCES]
    named = re.findall(rf"{NAME}\[([\w,]+)\]", " ".join(page.read_text(encoding="utf-8") for page in pages))
    assert {"all", "web"} <= set(named)
    assert {extra for names in named for extra in names.split(",")} <= set(declared.extras)


def test_missing_extras_are_named(environment, declared, tmp_path):
    """Without the extras everything of the core imports, and what needs one says which."""
    lines = ['{"_id": "a", "text": "red shoes"}', '{"_id": "b", "text": "blue hats"}']
    (tmp_path / "docs.jsonl").write_text("\n".join(lines))
    (tmp_path / "docs.parquet").write_bytes(b"")
    expected = {
        "hce.web.app": "web",  # which `hce serve` imports once it has found the index
        "hce.web.mcp": "mcp",  # which `hce mcp` imports, and `hce serve` where it is installed
        "demo": "bundled",
        "tree docs.parquet": "parquet",
        "tree docs.jsonl -e static": "bundled",
        "tree docs.jsonl -e minilm": "bundled",
        "hce.integrations.langchain": "langchain",
        "hce.integrations.llamaindex": "llamaindex",
    }
    modules = [*modules_of_the_core(), *(name for name in expected if name.startswith("hce."))]
    asked = json.dumps([modules, [name for name in expected if not name.startswith("hce.")]])
    command = [str(environment), "-I", "-c", ASK, asked]
    nothing_kept = {**os.environ, "HCE_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=tmp_path, env=nothing_kept, capture_output=True, text=True, check=True)
    endings = dict(json.loads(line) for line in done.stdout.splitlines())
    assert set(endings) >= set(expected)
    for name, ending in endings.items():
        message = rf"MissingPackageError: .*pip install '{NAME}\[{expected.get(name)}\]'.*"
        assert re.fullmatch(message if name in expected else "module: .*", ending), (name, ending)


def modules_of_the_core() -> list[str]:
    """Every module but those of packages that are for an extra as a whole."""
    names = [".".join(["hce", *path.relative_to(SOURCE).with_suffix("").parts]) for path in SOURCES]
    for_extras = r"hce\.((web|integrations)\.|.*__(init|main)__$)"
    return [name for name in names if not re.match(for_extras, name)]


@cache
def distributions_of(package: str) -> frozenset[str]:
    """The distributions that bring an importable package."""
    return frozenset(canonicalize_name(each) for each in packages().get(package, [package]))


packages = cache(packages_distributions)


def link(name: str, site: Path) -> None:
    """Put an installed distribution into another environment as well."""
    installed = distribution(name)
    for top in {file.parts[0] for file in installed.files or []} - {"..", "__pycache__"}:
        if not (site / top).exists():
            (site / top).symlink_to(installed.locate_file(top))


def closure(name: str, seen: set[str] | None = None) -> set[str]:
    """A distribution and all that it needs here."""
    seen = set() if seen is None else seen
    if name not in seen:
        seen.add(name)
        for needed in (Requirement(line) for line in distribution(name).requires or []):
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                closure(canonicalize_name(needed.name), seen)
    return seen


def of_extra(wanted: list[Requirement], extra: str) -> set[str]:
    """The distributions of an extra; an extra may name others of ours."""
    own = [each for each in wanted if each.marker is not None and each.marker.evaluate({"extra": extra})]
    others = {name for each in own if each.name == NAME for name in each.extras}
    names = {canonicalize_name(each.name) for each in own if each.name != NAME}
    return names.union(*(of_extra(wanted, other) for other in others))
