"""`hce demo`: train, measure, index and search the docstrings of the standard library, on one screen.

The files of the running Python's library are parsed, never imported. A docstring's first paragraph is a held-out query,
and the rest is the document that answers it. So the demo has real queries and texts, and downloads nothing.
"""

from __future__ import annotations

import ast
import inspect
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hce.data.corpus import Corpus
from hce.data.judgments import Dataset, Judgment, Qrels, Query
from hce.data.text import Document
from hce.encoding.encoder import Encoder
from hce.evaluation.evaluate import DenseSearcher, Searcher, evaluate
from hce.evaluation.runs import Scored
from hce.evaluation.significance import compare_several
from hce.index.index import Index
from hce.search.fusion import FIXED, Calibration
from hce.search.words import Words
from hce.training.model_folder import trained_tree
from hce.training.recipe import Recipe
from hce.training.train import train
from hce.tree.names import outline

MEASURES = ("nDCG@10", "R@10", "R@100")
EXAMPLES = (
    "wait until a thread has finished",
    "pick a random element from a list",
    "run another program and capture what it prints",
)
NEWCOMER = Document(
    "demo.teleport",
    "Move an object to another place without crossing the space between; raises ParadoxError when it meets itself.",
    title="teleport(thing, place)",
)
QUESTION = "move an object to another place at once"
PRODUCT = "hce-hybrid"  # the result of `hce train` and `hce index`; `hce compare` uses the same names
LEGEND = """untrained and hce search by vectors, bm25 by words, the others by both.
hybrid: BM25 and the untrained encoder. served: `hce index` without training.
no-tree-hybrid: trained without the tree. hce-hybrid: `hce train`, then `hce index`."""
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3", "idlelib", "turtledemo"}
SHORTEST_QUERY, SHORTEST_DOCUMENT = 3, 15  # words; a docstring with a shorter summary or rest is skipped

Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class WordSearcher:
    """BM25 over a corpus, as in an index, with documents numbered by position."""

    def __init__(self, corpus: Corpus) -> None:
        self.ids, self.words = corpus.ids, Words.new()
        self.words.add(enumerate(corpus.texts()))

    def search(self, queries: Sequence[str], k: int) -> list[list[Scored]]:
        """Find each query's k best documents among those that share a word with it."""
        found = (self.words.search(query, k) for query in queries)
        return [[Scored(self.ids[n], float(score)) for n, score in zip(*each[:2], strict=True)] for each in found]


def show(out: Console, err: Console, encoder_spec: str, seed: int, folder: Path) -> dict[str, Any]:
    """Run the demo, write model and index to `folder`, and return the facts for JSON."""
    start = time.perf_counter()
    names = chain([folder.name], (f"{folder.name}-{number}" for number in count(2)))  # keep earlier demos
    folder = next(free for name in names if not (free := folder.with_name(name)).exists())
    dataset = python_docstrings()
    found = Text(f"{len(dataset.corpus):,} docstrings", style="bold")
    out.print(found.append(" of this Python's standard library are the documents.", style="not bold"))
    out.print("The summary of each is held out as a query that should find the rest; training never sees it.\n")
    searchers = _searchers(dataset, encoder_spec, seed, folder, err)
    reports = {name: evaluate(each, dataset.queries, dataset.qrels, MEASURES) for name, each in searchers.items()}
    scores = {name: report.per_query[MEASURES[0]] for name, report in reports.items()}
    compared = compare_several({name: (scores[PRODUCT], each) for name, each in scores.items() if name != PRODUCT})
    chances = {name: each.p_holm for name, each in compared.items()}
    table = Table("", *MEASURES, "p", box=None)
    for name, report in reports.items():
        means = [f"{report.means[measure]:.3f}" for measure in MEASURES]
        chance = "" if name == PRODUCT else f"{chances[name]:.4f}"
        table.add_row(name, *means, chance, style="bold" if name == PRODUCT else None)
    out.print(table)
    out.print(f"p: could the difference to {PRODUCT} be chance? (paired randomization test, Holm's correction)")
    out.print(LEGEND)

    # For searching, index the full docstrings with their names as titles; training saw no summary and no name.
    summaries = {doc_id: dataset.queries[query].text for query, found in dataset.qrels.items() for doc_id in found}
    full = (Document(each.id, f"{summaries[each.id]}\n\n{each.text}", title=each.id) for each in dataset.corpus)
    corpus = Corpus.from_documents(full, name=dataset.corpus.name)
    tree = trained_tree(folder / "model", dataset.corpus)
    with Index.create(folder / "index", corpus, folder / "model", hierarchy=tree) as index:
        _look_around(out, index, _untrained_and_words(corpus, Encoder.load(encoder_spec)))
        _come_and_go(out, index)
    seconds = time.perf_counter() - start
    out.print(f"\nAll of this took {seconds:.0f} s. Explore the result, and do the same with yours:\n")
    out.print(f"  hce serve {folder / 'index'}", soft_wrap=True)
    out.print("  hce train docs.jsonl -o my-model", soft_wrap=True)
    out.print("  hce index docs.jsonl -m my-model -o my-index", soft_wrap=True)
    return {
        "model": str(folder / "model"),
        "index": str(folder / "index"),
        "documents": len(dataset.corpus),
        "measures": {name: report.means for name, report in reports.items()},
        "p": chances,
        "seconds": seconds,
    }


def _searchers(dataset: Dataset, encoder_spec: str, seed: int, folder: Path, err: Console) -> dict[str, Searcher]:
    """Make the systems, in the table's order, and write the model to `folder`."""
    corpus = dataset.corpus
    untrained = Encoder.load(encoder_spec)
    recipe = Recipe.for_encoder(static=untrained.is_table, documents=len(corpus), seed=seed)
    by_untrained = DenseSearcher.of(untrained, corpus)
    searchers: dict[str, Searcher] = {
        "bm25": WordSearcher(corpus),
        "untrained": by_untrained,
        "hybrid": _untrained_and_words(corpus, untrained, by_untrained.vectors),
    }
    served = untrained if untrained.table is None else untrained.fitted_to(corpus)
    searchers["served"] = Index.temporary(corpus, served)
    err.print("training without the tree, for comparison", style="dim")
    plain = train(corpus, Encoder.load(encoder_spec), recipe=replace(recipe, tree=False), progress=True)
    searchers["no-tree-hybrid"] = Index.temporary(corpus, plain.encoder, calibration=plain.calibration)
    err.print("training with the tree", style="dim")
    result = train(corpus, Encoder.load(encoder_spec), recipe=recipe, output=folder / "model", progress=True)
    product = Index.temporary(corpus, result.encoder, calibration=result.calibration)
    by_trained = DenseSearcher(result.encoder, corpus.ids, product.vectors()[1])
    return {**searchers, "hce": by_trained, PRODUCT: product}


def _untrained_and_words(corpus: Corpus, encoder: Encoder, vectors: np.ndarray | None = None) -> Index:
    """Index a corpus by words and by an encoder's vectors, with fixed shares."""
    usual = FIXED["table" if encoder.is_table else "transformer"]
    return Index.temporary(corpus, encoder, vectors=vectors, calibration=Calibration(usual))


def _look_around(out: Console, index: Index, untrained: Searcher) -> None:
    """Show the tree, and the hits of some queries before and after training."""
    out.print("\nThe index has the full docstrings. Their tree, as the trained encoder sees it:\n")
    if index.tree is not None:
        out.print(outline(index.tree.hierarchy, levels=2, most=3))
    for question in EXAMPLES:
        table = Table("hybrid", PRODUCT, box=None, padding=(0, 3, 0, 2))
        for before, after in zip(untrained.search([question], 3)[0], index.search(question, 3), strict=True):
            table.add_row(before.id, after.id)
        out.print(f"\n{question}", style="bold")
        out.print(table)


def _come_and_go(out: Console, index: Index) -> None:
    """Add a document and find it, then remove it again, without training."""
    index.prepare()
    out.print(Text("\nAdd a document, then remove it, without training: ").append(QUESTION, style="bold"))
    steps: dict[str, Callable[[], object]] = {
        "before": lambda: None,
        "added": lambda: index.add([NEWCOMER]),
        "removed": lambda: index.remove([NEWCOMER.id]),
    }
    for name, change in steps.items():
        start = time.perf_counter()
        change()
        hit = index.search(QUESTION, 1)[0]
        took = (time.perf_counter() - start) * 1000
        out.print(f"  {name:8} {took:5.0f} ms   first hit: {hit.id}")


# ------------------------------------------------------------------------------------------------- docstrings


def python_docstrings(library: Path | None = None) -> Dataset:
    """Make a dataset of the docstrings of the standard library, or of `library`.

    A document's id is the dotted name of what it documents; a title with that name would make many queries too easy.
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
            queries[f"? {name}"] = Query(f"? {name}", summary)
    corpus = Corpus.from_documents(documents.values(), name="Python docstrings")
    return Dataset(corpus, queries, Qrels(Judgment(f"? {name}", name, 1) for name in documents))


def _docstrings(library: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if SKIPPED_FOLDERS.isdisjoint(parts):
            module = ".".join(part for part in parts if part != "__init__") or library.name
            yield from _file_docstrings(path, module)


def _file_docstrings(path: Path, module: str) -> Iterator[tuple[str, str]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some of the library's strings have deprecated escapes
            stack: list[tuple[str, Definition]] = [(module, ast.parse(path.read_bytes()))]
    except (SyntaxError, ValueError):  # the library has broken files on purpose, for its own tests
        return
    while stack:
        name, node = stack.pop()
        docstring = ast.get_docstring(node, clean=False)
        if docstring:
            yield name, docstring
        stack.extend((f"{name}.{child.name}", child) for child in node.body if isinstance(child, Definition))
