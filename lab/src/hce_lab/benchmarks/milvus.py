"""An index on Milvus beside the same index in memory: telling the collection, opening a reader, searching, changing.

    python -m hce_lab milvus CORPUS --documents 10000,100000 --at PATH.db [--queries-from BEIR-FOLDER --split dev]
    python -m hce_lab milvus CORPUS --documents 10000,100000 --at http://HOST:PORT [--data FOLDER] [--output FOLDER]

CORPUS is anything that `hce index` reads. For each size, the first so many documents are indexed with the engine flat,
and without tokens, which an index on Milvus has not; a copy of that index moves to Milvus, into a collection of its
own, which is dropped at the end. Beside what it takes there stands what it takes in the folder: to rebuild, to open and
to answer, to search, to add and to remove. Both search one query after the other, in turns, ten hits each; a query
differs where the ids, or their order, are not the same. Last, four threads search while documents are removed, and who
is refused is counted. Queries are the judged ones of a BEIR folder, or spans of
documents of the smallest size, the same for all sizes.

Rebuilding and opening have a process each to themselves, whose memory and processor time are theirs alone; of a PATH.db
that is the memory and the time of Milvus too, which runs in the process that uses it. Bytes on disk are those of
PATH.db, or of a server's FOLDER where that is on this machine, with the encoder and with what waits to be put in order;
other collections there should be at rest. A row is printed as it is measured, and kept in rows.jsonl of --output.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything makes its threads
os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # of a model that is not there, one line tells

import argparse
import json
import logging
import multiprocessing
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from hce.data.corpus import Corpus
from hce.data.judgments import Qrels, find_queries, find_split, read_queries
from hce.data.text import Document
from hce.errors import AwayError, HceError, InputError
from hce.index.index import Index
from hce.index.manifest import size_on_disk
from hce.index.ranking import Hit, SearchMode
from hce.milvus.engine import Address, Milvus
from hce.milvus.mirror import Pointer

K = 10
CHANGED = 1000  # documents that are added, and removed
SEARCHERS, REMOVALS = 4, 20
WORDS = 6  # of a query that is a span of a document
MODES: tuple[SearchMode, ...] = ("dense", "words", "hybrid")
MOST_SECONDS = 120  # until a reader sees what was written
BETWEEN_LOOKS = 0.02  # seconds

Result = TypeVar("Result")


class Task(NamedTuple):
    """An index of some size, in two places.

    Attributes:
        documents: how many it has.
        flat: the folder of the one that is searched here.
        writer: the folder of the one that writes to Milvus.
        address: of its collection.
        queries: texts.
        output: where rows are kept; None where they are not.
    """

    documents: int
    flat: Path
    writer: Path
    address: str
    queries: list[str]
    output: Path | None


@dataclass(frozen=True)
class Row:
    """A measure at one size.

    Attributes:
        documents: of the index.
        measure: what was measured, and in which unit.
        here: by the engine flat; None where it has no such thing.
        there: on Milvus.
        address: of the collection.
    """

    documents: int
    measure: str
    here: float | None
    there: float | None
    address: str

    def __str__(self) -> str:
        ratio = f"{self.there / self.here:.2f} ×" if self.here and self.there is not None else ""
        return f"| {self.documents:,} | {self.measure} | {shown(self.here)} | {shown(self.there)} | {ratio} |"


def shown(value: float | None) -> str:
    """Write a number with three digits or more."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


HEAD = "| documents | measure | flat, here | Milvus | ratio |\n|---:|---|---:|---:|---:|"


def show(task: Task, measure: str, there: float | None, here: float | None = None) -> None:
    """Print a row, and keep it."""
    row = Row(task.documents, measure, here, there, task.address)
    print(row, flush=True)
    if task.output is not None:
        with (task.output / "rows.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")


class Took(NamedTuple):
    """Seconds by the clock, and of the processor in all threads of this process."""

    clock: float
    processor: float


def took(work: Callable[[], object]) -> Took:
    """Return the time of one call."""
    clock, processor = time.perf_counter(), time.process_time()
    work()
    return Took(time.perf_counter() - clock, time.process_time() - processor)


def alone(work: Callable[..., Result], *arguments: object) -> Result:
    """Call a function in a new process, which lets go of a PATH.db when it ends."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), silence) as pool:
        return pool.submit(work, *arguments).result()


def silence() -> None:
    """Say nothing of what is also raised as an error."""
    logging.getLogger("hce").setLevel(logging.ERROR)


# ------------------------------------------------------------------------------------------------- telling


def rebuild(folder: Path, engine: str, address: str | None) -> Took:
    """Rebuild an index, and so tell a collection of everything where the engine is Milvus."""
    with Index.open(folder) as index:
        return took(lambda: index.rebuild(engine, at=address, refit=False))


def telling(task: Task, data: Path | None) -> None:
    """Show what it takes to fill a collection, beside rebuilding in the folder."""
    before = 0 if data is None else size_on_disk(data)
    here, there = alone(rebuild, task.flat, "exact", None), alone(rebuild, task.writer, "milvus", task.address)
    show(task, "rebuild, s", there.clock, here.clock)
    show(task, "rebuild, s of this process's processor", there.processor, here.processor)
    with Index.open(task.flat) as index:
        folder = index.path / index.state.manifest.encoder_folder
    written = None if data is None else (size_on_disk(data) - before) / task.documents
    show(task, "bytes on disk a document, with the encoder", written, size_on_disk(task.flat) / task.documents)
    show(task, "of them the encoder, as it is in a folder", None, size_on_disk(folder) / task.documents)


# ------------------------------------------------------------------------------------------------- opening


class IndexState(NamedTuple):
    """What opening took.

    Attributes:
        opened: seconds until the index was open.
        answered: seconds until it had answered the first query.
        before: resident memory before that, in bytes.
        resident: resident memory after the answer.
        peak: the largest resident memory until then.
    """

    opened: float
    answered: float
    before: int
    resident: int
    peak: int


def memory(name: str) -> int:
    """Return what Linux tells of this process's memory, in bytes; 0 elsewhere."""
    path = Path("/proc/self/status")
    found = re.search(rf"^{name}:\s+(\d+) kB", path.read_text(), re.MULTILINE) if path.is_file() else None
    return int(found[1]) * 1024 if found else 0


def open_alone(place: str, query: str) -> IndexState:
    """Open an index, and ask it one query."""
    before, start = memory("VmRSS"), time.perf_counter()
    with Index.open(place) as index:
        opened = time.perf_counter() - start
        index.search(query, K)
        answered = time.perf_counter() - start
        return IndexState(opened, answered, before, memory("VmRSS"), memory("VmHWM"))


def opening(task: Task) -> None:
    """Show what it takes to open a reader, beside opening the folder."""
    here, there = (alone(open_alone, place, task.queries[0]) for place in (str(task.flat), task.address))
    show(task, "open, s", there.opened, here.opened)
    show(task, "open and answer, s", there.answered, here.answered)
    for what in ("before", "resident", "peak"):
        show(task, f"memory, MB: {MEMORIES[what]}", getattr(there, what) / 1e6, getattr(here, what) / 1e6)


MEMORIES = {"before": "before it is open", "resident": "after the answer", "peak": "the largest until then"}


# ------------------------------------------------------------------------------------------------- searching


def ids(hits: list[Hit]) -> list[str]:
    """Return the ids of hits, in order."""
    return [hit.id for hit in hits]


def searching(task: Task, flat: Index, reader: Index) -> None:
    """Show how long searches take in turns, and how many have other hits."""
    for mode in MODES:
        times: dict[Index, list[float]] = {flat: [], reader: []}
        differ = 0
        for number, query in enumerate(task.queries):
            found = {}
            for index in (flat, reader) if number % 2 else (reader, flat):
                start = time.perf_counter()
                found[index] = index.search(query, K, mode=mode)
                times[index].append(1000 * (time.perf_counter() - start))
            differ += ids(found[flat]) != ids(found[reader])
        for name, share in (("median", 0.5), ("90th percentile", 0.9)):
            here, there = (float(np.quantile(times[index], share)) for index in (flat, reader))
            show(task, f"{mode} search, ms, {name}", there, here)
        show(task, f"{mode} search, queries of {len(task.queries)} that differ", differ)


def differing(task: Task, flat: Index, reader: Index, when: str) -> None:
    """Show how many searches have other hits."""
    for mode in MODES:
        differ = sum(
            ids(flat.search(query, K, mode=mode)) != ids(reader.search(query, K, mode=mode)) for query in task.queries
        )
        show(task, f"{mode} search {when}, queries of {len(task.queries)} that differ", differ)


# ------------------------------------------------------------------------------------------------- changing


def seconds_until(is_so: Callable[[], bool], what: str) -> float:
    """Return how long it takes until something is so.

    Raises:
        AwayError: it took too long.
    """
    start = time.perf_counter()
    while not is_so():
        if time.perf_counter() - start > MOST_SECONDS:
            raise AwayError(f"{what} was not seen by the reader within {MOST_SECONDS} s")
        time.sleep(BETWEEN_LOOKS)
    return time.perf_counter() - start


class Change(NamedTuple):
    """Something that is done to an index.

    Attributes:
        name: what it is.
        do: does it.
        last: the id of a document, and
        is_there: whether it is there afterwards.
    """

    name: str
    do: Callable[[Index], object]
    last: str
    is_there: bool

    def is_seen(self, index: Index) -> bool:
        """Tell whether it was done, as far as an index knows."""
        return (self.last in index) == self.is_there


def changing(task: Task, flat: Index, reader: Index, new: Sequence[Document], old: Sequence[str]) -> None:
    """Show how long the writer takes to add and to remove, and then the reader to see it."""
    changes = (
        Change(f"add {len(new):,}", lambda index: index.add(new), new[-1].id, True),
        Change(f"remove {len(old):,}", lambda index: index.remove(old), old[-1], False),
    )
    with Index.open(task.writer) as writer:
        for index in (flat, writer):  # loads the encoder, and lets the writer look at its collection
            index.add(new[:1])
            index.remove([new[0].id])
        for change in changes:
            here, there = (took(partial(change.do, index)) for index in (flat, writer))
            show(task, f"{change.name}, s until the writer is done", there.clock, here.clock)
            show(task, f"{change.name}, s of this process's processor", there.processor, here.processor)
            waited = seconds_until(partial(change.is_seen, reader), change.name)
            show(task, f"{change.name}, s from there until the reader sees it", waited)
            here, there = (took(partial(index.search, task.queries[0], K)) for index in (flat, reader))
            show(task, f"{change.name}, s of the first search after that", there.clock, here.clock)


def crowded(task: Task, reader: Index, new: Sequence[Document]) -> None:
    """Show how many searches of several threads fail while documents go, some at a time, that were added for it."""
    ids = [document.id for document in new]
    done = False
    with Index.open(task.writer) as writer, ThreadPoolExecutor(SEARCHERS) as searchers:

        def search() -> tuple[int, int]:
            asked = refused = 0
            while not done:
                try:
                    reader.search(task.queries[asked % len(task.queries)], K)
                except HceError:
                    refused += 1
                asked += 1
            return asked, refused

        searching = [searchers.submit(search) for _ in range(SEARCHERS)]
        try:
            for start in range(0, len(ids), len(ids) // REMOVALS):
                writer.remove(ids[start : start + len(ids) // REMOVALS])
        finally:
            done = True
        asked, failed = map(sum, zip(*(each.result() for each in searching), strict=True))
    show(task, f"searches by {SEARCHERS} threads during {REMOVALS} removals", asked)
    show(task, "of them failed", failed)


def using(task: Task, new: Sequence[Document], old: Sequence[str]) -> None:
    """Search both indexes, and change them."""
    with Index.open(task.flat) as flat, Index.open(task.address) as reader:
        for index, mode in ((index, mode) for index in (flat, reader) for mode in MODES):
            index.search(task.queries[-1], K, mode=mode)  # loads what it needs
        searching(task, flat, reader)
        changing(task, flat, reader, new, old)
        differing(task, flat, reader, "after that")
        crowded(task, reader, new)


# ------------------------------------------------------------------------------------------------- one size


def check_server(address: str) -> None:
    """Make sure that Milvus answers, and that there is no collection of this name.

    Raises:
        AwayError: it does not.
        InputError: there is one.
    """
    server = Milvus(Address.parse(address))
    try:
        if server.current() is not None:
            raise InputError(f"{address}: a collection is there; drop it, or give --at with another name behind #")
    finally:
        server.close()


def drop(folder: Path, address: str) -> None:
    """Drop the collection that an index wrote to, filled or half filled."""
    pointer, server = Pointer.read(folder) if folder.is_dir() else None, Milvus(Address.parse(address))
    try:
        if pointer is not None and server.current() == pointer.collection:
            server.withdraw()
        elif pointer is not None and server.call("has_collection", pointer.collection):
            server.call("drop_collection", pointer.collection)
    finally:
        server.close()


@contextmanager
def collection(task: Task) -> Iterator[None]:
    """Leave no collection behind."""
    try:
        yield
    finally:
        alone(drop, task.writer, task.address)


def measure(task: Task, corpus: Corpus, model: str, data: Path | None) -> None:
    """Make both indexes, and take all measures of them."""
    first = corpus.only(np.arange(task.documents))
    made = took(lambda: Index.create(task.flat, first, model, engine="exact", tokens=False).close())
    show(task, "index, s", None, made.clock)
    shutil.copytree(task.flat, task.writer)
    with collection(task):
        telling(task, data)
        opening(task)
        new = corpus[task.documents : task.documents + CHANGED]
        alone(using, task, new, [document.id for document in corpus[:CHANGED]])


def run(options: argparse.Namespace, folder: Path) -> None:
    """Take all measures, in a folder for the indexes."""
    corpus, address = Corpus.load(options.corpus), Address.parse(options.at)
    most = max(options.documents) + CHANGED
    if len(corpus) < most:
        raise InputError(
            f"{options.corpus}: {len(corpus):,} documents, where {most:,} are needed: {CHANGED:,} more than are "
            "indexed, to be added; give smaller --documents or a larger corpus"
        )
    queries = choose_queries(options, corpus)
    data = Path(address.uri) if address.uri.endswith(".db") else options.data
    print(f"{corpus.name} by {options.model}, {len(queries)} queries, at {address.uri}\n\n{HEAD}", flush=True)
    for documents in options.documents:
        place = str(Address(address.uri, f"{address.name}_{documents}"))
        alone(check_server, place)
        flat, writer = folder / f"{documents}-flat", folder / f"{documents}-milvus"
        measure(Task(documents, flat, writer, place, queries, options.output), corpus, options.model, data)


def choose_queries(options: argparse.Namespace, corpus: Corpus) -> list[str]:
    """Choose so many queries: judged ones of a BEIR folder, or spans of documents of the smallest size."""
    rng = np.random.default_rng(0)
    if options.queries_from is not None:
        judged = list(Qrels.read(find_split(options.queries_from, options.split)))
        texts = read_queries(find_queries(options.queries_from))
        chosen = [judged[row] for row in rng.permutation(len(judged)).tolist() if judged[row] in texts]
        return [texts[query].text for query in chosen[: options.queries]]
    rows = rng.integers(min(options.documents), size=options.queries).tolist()
    spans = [corpus[row].full_text.split() for row in rows]
    starts = [int(rng.integers(max(1, len(words) - WORDS))) for words in spans]
    return [" ".join(words[start : start + WORDS]) for words, start in zip(spans, starts, strict=True)]


def checked(options: argparse.Namespace) -> argparse.Namespace:
    """Read the sizes, and make sure of the rest.

    Raises:
        InputError: an option is not what it has to be.
    """
    sizes = options.documents.split(",")
    if not all(re.fullmatch("[1-9][0-9]*", size) for size in sizes):
        raise InputError(f"--documents {options.documents}: give whole numbers from 1 on, as in 10000,100000")
    if options.queries < 1:
        raise InputError(f"--queries {options.queries}: give a whole number from 1 on")
    if options.data is not None and not options.data.is_dir():
        raise InputError(f"--data {options.data}: no such folder; give the one where the server keeps its data")
    options.documents = sorted({int(size) for size in sizes})
    return options


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--model", default="static")
    parser.add_argument("--documents", default="10000,100000", help="sizes, with commas between them")
    parser.add_argument("--at", required=True, help="PATH.db or http://HOST:PORT; behind # a name for collections")
    parser.add_argument("--queries", type=int, default=100, help="how many")
    parser.add_argument("--queries-from", type=Path, metavar="BEIR-FOLDER", help="by default, spans of documents")
    parser.add_argument("--split", default="test", help="of that folder")
    parser.add_argument("--data", type=Path, help="the folder where a server on this machine keeps its data")
    parser.add_argument("--output", type=Path, help="a folder for rows.jsonl, and for the indexes while they are used")
    options = parser.parse_args()
    silence()
    try:
        checked(options)
        if options.output is not None:
            options.output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=options.output) as folder:
            run(options, Path(folder))
    except (HceError, OSError) as error:
        sys.exit(f"error: {error}")
    except BrokenProcessPool:
        sys.exit("error: a process was killed, perhaps for want of memory; give smaller --documents")
