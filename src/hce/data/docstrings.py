"""The demo's collection: the docstrings of the Python standard library that runs it.

Files are parsed and never imported. A docstring's first paragraph is a held-out query, the rest is the document that
answers it: real questions about real text, on every machine, with nothing to download.
"""

from __future__ import annotations

import ast
import inspect
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from hce.data.corpus import Corpus
from hce.data.documents import Document
from hce.data.judgments import Dataset, Judgment, Qrels, Query

SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3", "idlelib", "turtledemo"}
SHORTEST_QUERY, SHORTEST_DOCUMENT = 3, 15  # words; below that there is nothing to find, or nothing to find it by

Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def python_docstrings(library: Path | None = None) -> Dataset:
    """Make documents, queries and judgments of the docstrings below `library`, by default the standard library.

    The document's id is the dotted name of what it documents; its title is empty, as the name would give the answer
    away to a query that repeats it.
    """
    library = library or Path(sysconfig.get_paths()["stdlib"])
    documents: dict[str, Document] = {}
    queries: dict[str, Query] = {}
    for name, docstring in _docstrings(library):
        summary, _, rest = inspect.cleandoc(docstring).partition("\n\n")
        summary, rest = " ".join(summary.split()), rest.strip()
        long_enough = len(summary.split()) >= SHORTEST_QUERY and len(rest.split()) >= SHORTEST_DOCUMENT
        if long_enough and name not in documents:
            documents[name] = Document(name, rest)
            queries[name] = Query(f"? {name}", summary)
    corpus = Corpus.from_documents(documents.values(), name="Python docstrings")
    asked = {query.id: query for query in queries.values()}
    return Dataset(corpus, asked, Qrels(Judgment(query.id, name, 1) for name, query in queries.items()))


def _docstrings(library: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if SKIPPED_FOLDERS.isdisjoint(parts):
            module = ".".join(part for part in parts if part != "__init__") or library.name
            yield from _file_docstrings(path, module)


def _file_docstrings(path: Path, module: str) -> Iterator[tuple[str, str]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old escapes in somebody else's strings
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # the library keeps some broken files on purpose, for its own tests
        return
    stack: list[tuple[str, Definition]] = [(module, tree)]
    while stack:
        name, node = stack.pop()
        docstring = ast.get_docstring(node, clean=False)
        if docstring:
            yield name, docstring
        stack.extend((f"{name}.{child.name}", child) for child in node.body if isinstance(child, Definition))
