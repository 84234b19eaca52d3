"""A hybrid search beside a dense one and beside bm25s: median milliseconds of processor time a query, and ratios.

    python -m hce_lab hybrid DATASET [--model static] [--split test] [--queries 300] [--index FOLDER]

Queries go one by one through `Index.search(text, k=10)`, hits and shared words included; the three take turns.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hce.data.judgments import Dataset
from hce.index.index import Index
from hce_lab.comparison.bm25 import BM25Searcher

TURNS = 3


def milliseconds(search: Callable[[str], object], queries: list[str]) -> float:
    """Median processor time of a query."""
    times = []
    for query in queries:
        start = time.process_time()
        search(query)
        times.append(time.process_time() - start)
    return float(np.median(times)) * 1000


def main() -> None:
    """Index once, then measure in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--model", default="static")
    parser.add_argument("--split", default="test")
    parser.add_argument("--queries", type=int, default=300)
    parser.add_argument("--index", help="an index of these documents, made where it is not there")
    options = parser.parse_args()
    data = Dataset.load(Path(options.dataset), options.split)
    queries = [data.queries[query].text for query in list(data.qrels)[: options.queries]]
    place = Path(options.index or tempfile.mkdtemp()) / "index"
    index = Index.open(place) if place.exists() else Index.create(place, data.corpus, options.model, progress=True)
    rival = BM25Searcher.index(data.corpus.ids, data.corpus.texts())
    with index:
        index.prepare()
        index.search(queries[0])
        searches: dict[str, Callable[[str], object]] = {
            "dense": lambda query: index.search(query, 10, mode="dense"),
            "words": lambda query: index.search(query, 10, mode="words"),
            "hybrid": lambda query: index.search(query, 10, mode="hybrid"),
            "bm25s": lambda query: rival.search([query], 10),
        }
        turns = [{name: milliseconds(search, queries) for name, search in searches.items()} for _ in range(TURNS)]
        medians = {name: float(np.median([turn[name] for turn in turns])) for name in searches}
        print(f"{len(data.corpus):,} documents, {len(queries):,} queries, engine {index.status().engine}")
        for name, value in medians.items():
            ratios = f"{value / medians['dense']:6.2f} × dense {value / medians['bm25s']:6.2f} × bm25s"
            print(f"{name:8} {value:7.2f} ms {ratios}")
