"""`hce demo`: the main job on real text, told in one screen; every number in it is measured while you watch."""

from __future__ import annotations

import time
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from hce.adapting import train
from hce.dense import DenseSearcher
from hce.docstrings import python_docstrings
from hce.encoder import Encoder
from hce.evaluate import Report, evaluate
from hce.judgments import Dataset
from hce.labels import label_nodes
from hce.outline import outline
from hce.recipe import Recipe

MEASURES = ("nDCG@10", "R@10", "R@100")
EXAMPLES = (
    "wait until a thread has finished",
    "turn a dictionary into text that other languages can read",
    "run another program and capture what it prints",
)


def show(out: Console, err: Console, encoder_spec: str, seed: int) -> None:
    """Run the demo and print it; progress goes to `err`."""
    start = time.perf_counter()
    dataset = python_docstrings()
    out.print(f"[bold]{len(dataset.corpus):,} docstrings[/] of this Python's standard library are the documents.")
    out.print("The summary line of each is held out as the query that should find it; training never sees one.\n")

    untrained = Encoder.load(encoder_spec)
    recipe = replace(Recipe.for_encoder(static=untrained.is_static), seed=seed)
    searchers = {"untrained": _searcher(untrained, dataset)}
    if untrained.is_static:
        searchers["fitted, not trained"] = _searcher(untrained.fitted_to(dataset.corpus), dataset)
    err.print("training without the tree, for comparison", style="dim")
    plain = train(dataset.corpus, Encoder.load(encoder_spec), recipe=replace(recipe, tree=False), progress=True)
    searchers["trained without the tree"] = _searcher(plain.encoder, dataset)
    err.print("training with the tree", style="dim")
    result = train(dataset.corpus, Encoder.load(encoder_spec), recipe=recipe, progress=True)
    searchers["hce"] = _searcher(result.encoder, dataset)

    out.print(_table({name: evaluate(s, dataset.queries, dataset.qrels, MEASURES) for name, s in searchers.items()}))
    out.print("\nThe tree of the corpus, as the trained encoder sees it:\n")
    result.hierarchy.labels = label_nodes(result.hierarchy, dataset.corpus.texts())
    out.print(outline(result.hierarchy, levels=2, most=3))
    for question in EXAMPLES:
        out.print(f"\n[bold]{question}[/]")
        out.print(_side_by_side(question, searchers))
    out.print(f"\nAll of this took {time.perf_counter() - start:.0f} s. The same on your own documents:\n")
    out.print("  hce train docs.jsonl -o my-model       hce tree my-model")


def _searcher(encoder: Encoder, dataset: Dataset) -> DenseSearcher:
    return DenseSearcher(encoder, dataset.corpus.ids, encoder.encode(list(dataset.corpus.texts())))


def _table(reports: dict[str, Report]) -> Table:
    table = Table("", *MEASURES, box=None)
    for name, report in reports.items():
        style = "bold" if name == "hce" else None
        table.add_row(name, *(f"{report.means[measure]:.3f}" for measure in MEASURES), style=style)
    return table


def _side_by_side(question: str, searchers: dict[str, DenseSearcher]) -> Table:
    """The first three hits, before and after."""
    table = Table("untrained", "hce", box=None, padding=(0, 3, 0, 2))
    before, after = (searchers[name].search([question], 3)[0] for name in ("untrained", "hce"))
    for old, new in zip(before, after, strict=True):
        table.add_row(old.id, new.id)
    return table
