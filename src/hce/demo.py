"""`hce demo`: the main job on real text, told in one screen; every number in it is measured while you watch."""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table

from hce.dense import DenseSearcher
from hce.docstrings import python_docstrings
from hce.encoder import Encoder
from hce.evaluate import Report, evaluate
from hce.hierarchy import Hierarchy
from hce.judgments import Dataset
from hce.labels import label_nodes
from hce.outline import outline

MEASURES = ("nDCG@10", "R@10", "R@100")
EXAMPLES = (
    "wait until a thread has finished",
    "turn a dictionary into text that other languages can read",
    "run another program and capture what it prints",
)


def show(out: Console, encoder_spec: str, seed: int) -> None:
    """Run the demo and print it."""
    start = time.perf_counter()
    dataset = python_docstrings()
    out.print(f"[bold]{len(dataset.corpus):,} docstrings[/] of this Python's standard library are the documents;")
    out.print("the summary line of each is held out as the query that should find it.\n")
    before = Encoder.load(encoder_spec)
    after = before.fitted_to(dataset.corpus) if before.is_static else before
    searchers = {encoder.name: _searcher(encoder, dataset) for encoder in dict.fromkeys((before, after))}
    out.print(_table({name: evaluate(s, dataset.queries, dataset.qrels, MEASURES) for name, s in searchers.items()}))
    _show_tree(out, dataset, searchers[after.name], seed)
    for question in EXAMPLES:
        out.print(f"\n[bold]{question}[/]")
        for hit in searchers[after.name].search([question], 3)[0]:
            out.print(f"  {hit.score:.3f}  {hit.id}")
    out.print(f"\nAll of this took {time.perf_counter() - start:.0f} s. On your own documents:  hce tree docs.jsonl")


def _searcher(encoder: Encoder, dataset: Dataset) -> DenseSearcher:
    return DenseSearcher(encoder, dataset.corpus.ids, encoder.encode(list(dataset.corpus.texts()), progress=True))


def _table(reports: dict[str, Report]) -> Table:
    table = Table("", *MEASURES, box=None)
    for name, report in reports.items():
        table.add_row(name, *(f"{report.means[measure]:.3f}" for measure in MEASURES))
    return table


def _show_tree(out: Console, dataset: Dataset, searcher: DenseSearcher, seed: int) -> None:
    hierarchy = Hierarchy.build(searcher.vectors, seed=seed)
    hierarchy.labels = label_nodes(hierarchy, dataset.corpus.texts())
    out.print()
    out.print(outline(hierarchy, levels=2, most=3))
