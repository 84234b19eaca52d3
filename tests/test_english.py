"""Pages and docstrings are in plain American English, by counts that may only fall.

Checked: the pages of the repository and of docs/ (not LOG.md and results/, which are a record, nor pages generated from
src), and the docstrings of src/hce. Code in pages and backticks is left out. A function's docstring begins with a verb,
in a line of less than 80 characters; a class, a property or a module may begin with a noun, which is what it is.

When a count falls, lower the number here. When one rises, write the sentence another way.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GENERATED = {"api.md", "command-line.md"}
PAGES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "docs" / "llms.txt")
    if path.name not in {*GENERATED, "LOG.md"}
)
PACKAGE = ROOT / "src" / "hce"

MOST_WORDS = 35  # in a sentence
MARKED = re.compile(
    r"\b(anew|besides?|learnt|told|tells?|whole|in force|alike|as (it is|they are)|in the place of|of which|wherever|"
    r"so many|reckon(ed|s|ing)?|one and all|by itself)\b",
    re.IGNORECASE,
)
BRITISH = re.compile(
    r"\b(\w*(behavio|neighbo|colo|favo|hono|labo)ur\w*|(un)?(label|model|cancel|signal|travel)l(ed|ing)|"
    r"(re)?cent(re|red|ring|res)|grey|catalogue|spelt|licence|artefacts?|"
    r"\w*(normal|token|optim|initial|general|random|minim|maxim|recogn|serial|summar|synchron|standard|organ|emphas|real|"
    r"util|special|visual|vector|parallel|categor|author|character|priorit|capital)"
    r"is(e|ed|es|er|ers|ing|ation|ations))\b",
    re.IGNORECASE,
)
NO_VERB = re.compile(
    r"(the|an?|what|which|where|when|whether|how|why|who|whose|each|every|one|all|both|some|any|no|nothing|its?|this|"
    r"that|these|those|in|on|of|by|for|from|with|without|as|if|at|to|there)\b",
    re.IGNORECASE,
)

# What there is now; tests fail where there is more.
LONG_SENTENCES: dict[str, int] = {}
MARKED_WORDS: dict[str, int] = {}
IN_DOCSTRINGS = dict.fromkeys(("long first lines", "no verb first", "long sentences", "marked words", "British"), 0)


def prose(text: str) -> str:
    """A page without code, addresses and marks; cells, items and headings end with a full stop."""
    text = re.sub(r"```.*?```", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"^\[[^\]]+\]: .*$|^\|?[-|: ]+$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\](\([^)]*\)|\[[^\]]*\])", r"\1", text)
    text = re.sub(r"`[^`]*`", "x", text)
    text = re.sub(r"^(#+ .*)$", r"\1.\n", text, flags=re.MULTILINE)
    return re.sub(r" ?\| |^\s*(?:[-*]|\d+\.) ", ".\n\n", text, flags=re.MULTILINE)


def sentences(text: str) -> Iterator[str]:
    """The sentences of prose, in which paragraphs stand apart."""
    for paragraph in re.split(r"\n\s*\n", text):
        yield from re.split(r"(?<=[.!?])[)\"”*]*\s+", " ".join(paragraph.split()))


def long_sentences(text: str) -> list[str]:
    return [each for each in sentences(text) if len(re.findall(r"[^\W_][\w.,'’-]*", each)) > MOST_WORDS]


def counted(pattern: re.Pattern[str], text: str) -> list[str]:
    return [found[0] for found in pattern.finditer(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_have_no_more_long_sentences(page):
    found = long_sentences(prose(page.read_text(encoding="utf-8")))
    assert len(found) <= LONG_SENTENCES.get(page.name, 0), "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_have_no_more_marked_words(page):
    found = counted(MARKED, prose(page.read_text(encoding="utf-8")))
    assert len(found) <= MARKED_WORDS.get(page.name, 0), found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_spell_as_americans_do(page):
    assert counted(BRITISH, prose(page.read_text(encoding="utf-8"))) == []


def docstrings() -> Iterator[tuple[str, ast.AST, str]]:
    """Where each docstring of the package is, what it is of, and its text."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 1)}", node, text


def is_function(node: ast.AST) -> bool:
    """Whether it is a function, and not a property, which is a thing."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return not any("property" in ast.unparse(each) for each in node.decorator_list)


def described(text: str) -> str:
    """A docstring without examples; entries of its sections are sentences of their own."""
    text = re.sub(r"(^|\n) *(>>> |Examples?:\n).*?(\n\s*\n|$)", "\n\n", text, flags=re.DOTALL)
    return prose(re.sub(r"\n(    )?(\*{0,2}\w+: )", r"\n\n\2", text))


def faults_of_docstrings() -> dict[str, list[str]]:
    """What is wrong in the docstrings, by kind."""
    faults: dict[str, list[str]] = {kind: [] for kind in IN_DOCSTRINGS}
    for where, node, text in docstrings():
        first = text.splitlines()[0]
        if is_function(node) and len(first) >= 80:
            faults["long first lines"].append(f"{where} {first}")
        if is_function(node) and NO_VERB.match(first):
            faults["no verb first"].append(f"{where} {first}")
        faults["long sentences"] += [f"{where} {each}" for each in long_sentences(described(text))]
        faults["marked words"] += [f"{where} {each}" for each in counted(MARKED, described(text))]
        faults["British"] += [f"{where} {each}" for each in counted(BRITISH, described(text))]
    return faults


@pytest.mark.parametrize("kind", IN_DOCSTRINGS)
def test_docstrings_have_no_more_of(kind):
    found = faults_of_docstrings()[kind]
    assert len(found) <= IN_DOCSTRINGS[kind], "\n".join([f"{len(found)}, not {IN_DOCSTRINGS[kind]}:", *found])


def test_pages_are_few_and_short():
    """A newcomer reads the README in a minute; a fact has one page to stand on."""
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1]
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 600
    assert len(changes.splitlines()) <= 80
    assert len(list((ROOT / "docs").glob("*.md"))) <= 9
    assert len((ROOT / "docs" / "guide.md").read_text(encoding="utf-8").split()) <= 4500


def test_the_counts_see_what_they_count():
    text = "# A page\n\n" + "word " * 36 + ".\n\n| the whole | colour |\n|---|---|\n| `learnt` | it is told anew |\n"
    assert len(long_sentences(prose(text))) == 1
    assert counted(MARKED, prose(text)) == ["whole", "told", "anew"]
    assert counted(BRITISH, prose(text)) == ["colour"]
