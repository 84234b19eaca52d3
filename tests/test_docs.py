"""The docs say what the code does.

Run: README's Python, every example in a docstring (with a small random table for the encoder `static`). Parsed only:
every `hce …` line of every page and of every command's help; those of README and tutorial are run by test_tutorial.py.
Looked up: links, the modules and functions that pages name, and that each command and each public name is on its
generated page (CI makes those pages anew and fails where they were stale).
"""

from __future__ import annotations

import doctest
import importlib
import re
import runpy
import shlex
from pathlib import Path

import click
import pytest
import typer
from small_static import small_static

import hce
from hce.cli import app
from hce.errors import HceError, MissingPackageError

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CHANGELOG = ROOT / "CHANGELOG.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
(REPOSITORY,) = re.findall(r'^Source = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
PUBLISHED = (f"{REPOSITORY}/blob/main/", f"{REPOSITORY.replace('github.com', 'raw.githubusercontent.com')}/main/")
PACKAGE = Path(hce.__file__).parent
NAME = r"`(hce\.[a-z_]\w*(?:\.\w+)*)"  # with dots, as pages name modules and what is in them
GROUP = typer.main.get_command(app)
PARENT = click.Context(GROUP)
COMMANDS = {name: GROUP.get_command(PARENT, name) for name in GROUP.list_commands(PARENT)}
WITH_EXAMPLES = [path for path in sorted(PACKAGE.rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]


def test_the_readmes_error_is_what_is_printed(tmp_path, monkeypatch):
    (shown,) = re.findall(r"^error: (.*)$", README, flags=re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    lines = ['{"_id": "a", "text": "x"}', '{"_id": "b", "text": "y"}', '{"_id": "c", "body": "z"}']
    Path("docs.jsonl").write_text("\n".join(lines))
    with pytest.raises(HceError) as caught:
        hce.Corpus.load("docs.jsonl")
    assert str(caught.value) == shown


def test_the_readmes_python_runs(tmp_path, monkeypatch, concept_corpus, static_encoder):
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("docs.jsonl").write_text("\n".join(document.to_json() for document in concept_corpus))
    static_encoder.save(tmp_path / "static-encoder")
    recipe = "recipe=hce.Recipe(epochs=1, batch_size=32), encoder='static-encoder'"
    names: dict[str, object] = {}
    exec(code.replace('encoder="static"', recipe), names)  # noqa: S102
    assert Path("my-model/hce.json").is_file()
    assert names["hit"].id == "new-1"  # the only one with a year
    assert len(names["index"]) == len(concept_corpus)


def links(text: str) -> list[str]:
    """The targets of all links and images, the definitions of reference links among them."""
    return re.findall(r"\]\(([^)#]+)", text) + re.findall(r"^\[[^\]]+\]: (\S+)$", text, flags=re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """Links to files of the repository by its address are checked against the files that are here."""
    for target in links(page.read_text(encoding="utf-8")):
        published = next((start for start in PUBLISHED if target.startswith(start)), None)
        if published:
            assert (ROOT / target.removeprefix(published)).is_file(), target
        elif not target.startswith(("https://", "http://")):
            assert (page.parent / target).exists(), target
        elif target.startswith(REPOSITORY):
            assert target.removeprefix(REPOSITORY) in {"", "/issues", "/security"}, target


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_anchors_are_headings(page):
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
        there = (page.parent / target).resolve() if target else page
        assert anchor in anchors(there.read_text(encoding="utf-8")), f"{target}#{anchor}"


def test_the_readmes_links_work_on_pypi():
    """There a page has no folder around it; and a reference that is not defined is shown as brackets."""
    targets = links(README)
    assert len(targets) >= 10
    assert [target for target in targets if not target.startswith("https://")] == []
    used, defined = re.findall(r"\]\[([\w-]+)\]", README), re.findall(r"^\[([\w-]+)\]: ", README, flags=re.MULTILINE)
    assert set(used) == set(defined)


@pytest.mark.parametrize("page", [page for page in PAGES if page != CHANGELOG], ids=lambda page: page.name)
def test_named_functions_exist(page):
    names = set(re.findall(NAME, page.read_text(encoding="utf-8"))) - {"hce.json"}
    for name in sorted(names):
        _find(name)


def test_the_changelog_says_where_things_went():
    rows = re.findall(
        r"^ *\| (`(?:hce\.|[A-Z]).*) \| (.*) \|$", CHANGELOG.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert len(rows) >= 4
    for old, new in rows:
        for name in re.findall(NAME, new):
            _find(name)
        for name in re.findall(NAME, old):
            with pytest.raises((AttributeError, ImportError)):
                _find(name)


def _find(name: str) -> object:
    """The module, function, class or attribute of a name with dots."""
    parts = name.split(".")
    split = next(i for i in range(len(parts), 0, -1) if _is_module(".".join(parts[:i])))
    target = importlib.import_module(".".join(parts[:split]))
    for part in parts[split:]:
        target = getattr(target, part)
    return target


def _is_module(name: str) -> bool:
    try:
        return bool(importlib.util.find_spec(name))
    except ModuleNotFoundError:
        return False


def test_the_api_page_has_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert [*re.findall(r"^## (\w+)$", page, flags=re.MULTILINE), "__version__"] == sorted(
        hce.__all__, key=lambda name: (name.startswith("_"), hce.__all__.index(name))
    )


class Shelf:
    """What docs/generate.py is shown."""

    def put(self, books: list[str], *, at: int = 0, log: object = print) -> int:
        """Put books on the shelf.

        Those that are there stay.

        >>> Shelf().put(["a"])
        1

        Args:
            books: their titles, which
                may be long.
            at: the place.

        Returns:
            How many there are now.

        Raises:
            ValueError: no room.
        """

    @property
    def full(self) -> bool:
        """Whether there is no room."""


def test_signatures_and_docstrings_become_markdown():
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    (put, shown), (full, fullness) = generate["members"]("Shelf", Shelf)
    assert (put, full) == ("put", "full")
    assert shown.splitlines() == [
        *("```python", "shelf.put(books: list[str], *, at: int = 0, log: object = …) -> int", "```", ""),
        *("Put books on the shelf.", "", "Those that are there stay.", ""),
        *("```pycon", '>>> Shelf().put(["a"])', "1", "```", ""),
        *("**Arguments**", "", "- `books`: their titles, which may be long.", "- `at`: the place.", ""),
        *("**Returns:** How many there are now.", "", "**Raises**", "", "- `ValueError`: no room."),
    ]
    assert fullness.splitlines() == ["```python", "shelf.full: bool", "```", "", "Whether there is no room."]


def test_every_command_is_on_the_generated_page():
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    assert set(COMMANDS) == set(re.findall(r"^## `hce ([\w-]+)`$", page, flags=re.MULTILINE))


def test_every_command_has_json_and_examples():
    for name, command in COMMANDS.items():
        has_json = "--json" in {option for parameter in command.params for option in parameter.opts}
        assert has_json != (name == "mcp"), name  # whose stdout is the protocol's
        assert re.search(r"Examples?:\n\s+.*\bhce ", command.help), name


def documented_commands() -> list[str]:
    """Every line that begins with `hce`, or a launcher and then `hce`, in consoles of the pages and in the helps."""
    pages = [page.read_text(encoding="utf-8").replace("\\\n", " ") for page in PAGES]
    consoles = [block for page in pages for block in re.findall(r"```console\n(.*?)```", page, flags=re.DOTALL)]
    lines = [line[2:] for block in consoles for line in block.splitlines() if line.startswith("$ ")]
    lines += [line.strip() for command in COMMANDS.values() for line in command.help.splitlines()]
    return sorted(
        {line for line in lines if re.match(r"(\S+=\S+ |[^`]*\| |(accelerate|torchrun) .*-m )?hce [a-z]", line)}
    )


@pytest.mark.parametrize("line", documented_commands())
def test_documented_commands_parse(line):
    line = re.sub(r"\s+\(several .*|\s[<>]\s.*", "", line)  # a remark, redirections
    words = shlex.split(line, comments=True)
    name, *arguments = words[words.index("hce") + 1 :]
    if "…" not in arguments:
        COMMANDS[name].make_context(name, arguments, parent=PARENT)


def test_there_are_examples():
    assert len(WITH_EXAMPLES) >= 10
    assert len(documented_commands()) >= 60


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_examples_in_docstrings(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HCE_CACHE", str(tmp_path / "cache"))
    small_static(tmp_path / "cache", ["red shoes", "blue hats", "shoes of 2022 2023 2024"])
    name = ".".join(["hce", *path.relative_to(PACKAGE).with_suffix("").parts])
    try:
        module = importlib.import_module(name)
    except MissingPackageError as error:
        pytest.skip(str(error))
    found = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE, verbose=False)
    assert found.attempted
    assert not found.failed
