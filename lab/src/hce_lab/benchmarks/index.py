"""The index beside the bare work: adding against encoding, opening against reading, searching against faiss.

    python -m hce_lab index CORPUS [--encoder static] [--added 10000] [--rounds 5]

Everything is measured in one run, with one thread for tokenising, encoding and comparing, the rivals in turn, and
printed as ratios of medians. Beside the clock's stands processor time, which other work on the machine disturbs less;
it includes what SQLite does in a thread of its own while texts are encoded.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["RAYON_NUM_THREADS"] = "1"  # before anything makes its threads

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import faiss
import numpy as np
import torch

from hce.data.corpus import Corpus
from hce.encoding.encoder import Encoder
from hce.index.index import Index


class Took(NamedTuple):
    """Seconds by the clock, and of the processor in all threads."""

    clock: float
    processor: float


def took(work: Callable[[], object]) -> Took:
    """The time of one call."""
    clock, processor = time.perf_counter(), time.process_time()
    work()
    return Took(time.perf_counter() - clock, time.process_time() - processor)


def medians(times: list[Took]) -> Took:
    """Of each kind of time."""
    return Took(*(statistics.median(column) for column in zip(*times, strict=True)))


def show(what: str, ours: list[Took], rivals: list[Took], limit: str) -> None:
    """One line."""
    a, b = medians(ours), medians(rivals)
    ratios = f"{a.clock / b.clock:.2f} × (processor time {a.processor / b.processor:.2f} ×; {limit})"
    print(f"{what}: {a.clock * 1000:.1f} ms against {b.clock * 1000:.1f} ms: {ratios}", flush=True)


def adding(index: Index, encoder: Encoder, corpus: Corpus, count: int, rounds: int) -> None:
    """The last documents of the corpus are added, and taken out again between the rounds."""
    documents = corpus[len(corpus) - count :]
    texts = [document.full_text for document in documents]
    index.add(documents[:1])  # loads the encoder
    index.remove([documents[0].id])
    encoding, added = [], []
    for round_ in range(rounds):
        encoding.append(took(lambda: encoder.encode(texts)))
        added.append(took(lambda: index.add(documents)))
        if round_ < rounds - 1:
            index.remove([document.id for document in documents])
    show(f"add {count:,} documents against encoding them", added, encoding, "at most 1.3")


def forget(path: Path) -> None:
    """Make the system read these files from the disk again (where it can be asked to)."""
    for file in [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def opening(path: Path, folder: Path, rounds: int) -> None:
    """Until the first vector can be searched for, against reading the same vectors from one file."""
    with Index.open(path) as index:
        vectors = index.vectors()[1]
        np.save(folder / "vectors.npy", vectors)
        query = vectors[:1]
    os.sync()
    opened, read, from_store = [], [], []

    def ready() -> None:
        with Index.open(path) as index:
            index.search_vectors(query, 1)

    for _ in range(rounds):
        forget(folder / "vectors.npy")
        read.append(took(lambda: np.load(folder / "vectors.npy")))
        forget(path)
        opened.append(took(ready))
    count = f"open an index of {len(vectors):,} documents and find one"
    show(f"{count}, against reading its vectors", opened, read, "aim: under 2 s")
    for snapshot in (path / "engine").iterdir():
        snapshot.rename(folder / "snapshot")
    forget(path)
    from_store.append(took(ready))
    show("the same without a snapshot of the engine", from_store, read, "no aim")


def searching(index: Index, encoder: Encoder, queries: list[str]) -> None:
    """One text at a time, 10 hits."""
    bare = faiss.IndexFlatIP(encoder.dim)
    bare.add(index.vectors()[1])
    index.prepare()
    index.search(queries[0])
    ours, both, rivals = [], [], []
    for query in queries:
        rivals.append(took(lambda query=query: bare.search(encoder.encode([query], "query"), 10)))
        ours.append(took(lambda query=query: index.search(query, 10, mode="dense")))
        both.append(took(lambda query=query: index.search(query, 10)))
    show("search for one text by meaning against encoding it and a bare IndexFlatIP", ours, rivals, "at most 1.3")
    show("the same by words and meaning, against meaning alone", both, ours, "at most 2")
    batch_rival = [took(lambda: bare.search(encoder.encode(queries, "query"), 10)) for _ in range(3)]
    batch_ours = [took(lambda: index.search(queries, 10, mode="dense")) for _ in range(3)]
    show(f"search for {len(queries)} texts at once", batch_ours, batch_rival, "no limit")


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--encoder", default="static")
    parser.add_argument("--added", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--queries", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    corpus = Corpus.load(arguments.corpus)
    encoder = Encoder.load(arguments.encoder, device="cpu")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = corpus[: len(corpus) - arguments.added]
        with Index.create(folder / "index", first, encoder) as index:
            adding(index, encoder, corpus, arguments.added, arguments.rounds)
            index.rebuild()
        opening(folder / "index", folder, arguments.rounds)
        step = max(1, len(corpus) // arguments.queries)
        queries = [" ".join(corpus[i].text.split()[:8]) for i in range(0, len(corpus), step)][: arguments.queries]
        with Index.open(folder / "index") as index:
            searching(index, encoder, queries)
