"""The docs say what the code does: the README's example session, links, and the generated page."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import hce
from hce.cli import app
from hce.errors import HceError

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted(path for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")])


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_named_functions_exist():
    text = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    for name in set(re.findall(r"`(hce\.[\w.]+)", text)) - {"hce.json"}:
        parts = name.split(".")
        split = next(i for i in range(len(parts), 0, -1) if _is_module(".".join(parts[:i])))
        target = importlib.import_module(".".join(parts[:split]))
        for part in parts[split:]:
            target = getattr(target, part)


def _is_module(name: str) -> bool:
    try:
        return bool(importlib.util.find_spec(name))
    except ModuleNotFoundError:
        return False


def test_every_command_is_on_the_generated_page():
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    names = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert names == set(re.findall(r"^## `hce ([\w-]+)`$", page, flags=re.MULTILINE))
