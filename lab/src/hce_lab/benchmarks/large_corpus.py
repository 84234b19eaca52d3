"""A large corpus on one machine: what each command takes in time, memory and disk.

    python -m hce_lab large_corpus make BEIR-FOLDER... --documents 1000000 --output 1m.jsonl
    python -m hce_lab large_corpus run 1m.jsonl --output 1m [--memory 4GB]
    python -m hce_lab large_corpus table 10k 100k 1m

`make` recombines the sentences of real collections into short documents, some 180 bytes each: sentences that stood near
each other, under a title that stood near them, so that documents have topics. The number of different words does not
grow as it would in a collection of that size.

`run` trains on the corpus, indexes it, searches, adds, asks for the status, rebuilds and serves, each by the command
that people type. `stages.jsonl` gets a line for each with the seconds by the clock and of the processor, the largest
resident memory (and how much of it was the process's own, no pages of files, looked at five times a second), the bytes
on disk, how long it took until the first line on stderr and what was the longest silence. What a stage says is in
`STAGE.log`, each line with its second. Stages that are in `stages.jsonl` are not run again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, NamedTuple

from hce.data.corpus import Corpus
from hce.files import open_atomically

SENTENCE_END = re.compile(r"(?<=[.!?;])\s+")
SHORTEST, LONGEST, ENOUGH = 20, 100, 70  # bytes of a sentence, and of a text that needs no other sentence
NEAR = 40  # sentences to either side, from which one is put beside another
LONGEST_TITLE = 60  # characters
ADDED = 1000  # documents that the stage `add` adds
SECONDS_BETWEEN_LOOKS = 0.2
QUERY = "how do plants turn light into sugar"


# ------------------------------------------------------------------------------------------------- make


class Source(NamedTuple):
    """The sentences of a collection, in order, and the title that each stood under."""

    sentences: list[str]
    titles: list[str]


def read_source(folder: Path) -> Source:
    """Cut the documents of a collection into sentences."""
    sentences, titles = [], []
    for document in Corpus.load(folder):
        title = " ".join(document.title.split())[:LONGEST_TITLE]
        for sentence in SENTENCE_END.split(" ".join(document.text.split())):
            if SHORTEST <= len(sentence) <= LONGEST:
                sentences.append(sentence)
                titles.append(title)
    return Source(sentences, titles)


def recombined(sources: Sequence[Source], seed: int, prefix: str) -> Iterator[dict[str, str]]:
    """Yield documents without end; the same seed gives the same ones."""
    rng = random.Random(seed)  # noqa: S311  not a secret
    weights = [len(source.sentences) for source in sources]
    number = 0
    while True:
        for source in rng.choices(sources, weights, k=1024):
            number += 1
            first = rng.randrange(len(source.sentences))
            parts = [source.sentences[first]]
            while sum(map(len, parts)) < ENOUGH or len(parts) == 1:
                parts.append(source.sentences[_near(rng, first, len(source.sentences))])
            title = source.titles[_near(rng, first, len(source.sentences))]
            yield {"_id": f"{prefix}{number}", "title": title, "text": " ".join(parts)}


def _near(rng: random.Random, place: int, count: int) -> int:
    return min(count - 1, max(0, place + rng.randint(-NEAR, NEAR)))


def make(folders: Sequence[Path], documents: int, output: Path, seed: int, prefix: str) -> None:
    """Write a corpus of so many documents."""
    sources = [source for source in map(read_source, folders) if source.sentences]
    made = recombined(sources, seed, prefix)
    with open_atomically(output) as file:
        for _ in range(documents):
            file.write(json.dumps(next(made), ensure_ascii=False) + "\n")
    size = output.stat().st_size
    print(f"{output}: {documents:,} documents, {size / 1e6:,.0f} MB, {size / documents:.0f} bytes each")


# ------------------------------------------------------------------------------------------------- run


@dataclass(frozen=True)
class Measured:
    """What a stage took.

    Attributes:
        stage: its name.
        documents: of the corpus.
        command: as it was run.
        seconds: by the clock.
        processor: seconds in all threads and child processes.
        resident: the largest resident memory in bytes, pages of mapped files included.
        own: the largest resident memory that belongs to no file, in bytes.
        disk: bytes of what the stage wrote or changed, when it was done.
        first_line: seconds until something was told on stderr, or until the end.
        silence: the longest time without a line on stderr, in seconds.
        answer: what a request to a server took, in seconds.
        reckoned: the memory that a command given a bound reckoned with, in bytes.
    """

    stage: str
    documents: int
    command: str
    seconds: float
    processor: float
    resident: int
    own: int
    disk: int
    first_line: float
    silence: float
    answer: float | None = None
    reckoned: int | None = None


class Watched:
    """A command under way: notes its memory, and when it says something."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.start = time.monotonic()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.told: list[float] = [0.0]
        self.own = 0
        self.first_answer = threading.Event()
        self.answer = ""
        self._log = log.open("w", encoding="utf-8")
        self._watchers = [
            threading.Thread(target=work, args=arguments, daemon=True)
            for work, arguments in (
                (self._listen, (self.process.stdout, "out")),
                (self._listen, (self.process.stderr, "err")),
                (self._look, ()),
            )
        ]
        for watcher in self._watchers:
            watcher.start()

    def _listen(self, stream: IO[str], name: str) -> None:
        for line in stream:
            second = time.monotonic() - self.start
            self._log.write(f"{second:9.1f} {name} {line}")
            self._log.flush()
            if name == "err":
                self.told.append(second)
            elif not self.answer:
                self.answer = line
                self.first_answer.set()
        self.first_answer.set()

    def _look(self) -> None:
        status = Path(f"/proc/{self.process.pid}/status")
        while self.process.returncode is None:
            try:
                found = re.search(r"^RssAnon:\s+(\d+) kB", status.read_text(), re.MULTILINE)
            except OSError:  # it has ended, or the system has no such files
                return
            self.own = max(self.own, int(found[1]) * 1024 if found else 0)
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def wait(self) -> tuple[float, float, int]:
        """Wait for the end; return seconds by the clock, of the processor, and the largest resident memory in bytes.

        Raises:
            RuntimeError: it failed.
        """
        _, status, usage = os.wait4(self.process.pid, 0)
        seconds = time.monotonic() - self.start
        self.process.returncode = os.waitstatus_to_exitcode(status)
        for watcher in self._watchers:
            watcher.join(timeout=10)
        self._log.close()
        self.told.append(seconds)
        if self.process.returncode not in (0, -signal.SIGINT, -signal.SIGTERM):
            raise RuntimeError(f"{' '.join(self.process.args)} failed with {self.process.returncode}; see its log")
        return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def measure(
    stage: str,
    command: Sequence[str],
    folder: Path,
    documents: int,
    changed: Sequence[Path],
    ask: Callable[[Watched], float] | None = None,
) -> Measured:
    """Run a command, and note what it took; `ask` may have a running server answer, and then ends it."""
    watched = Watched(command, folder / f"{stage}.log")
    answer = None if ask is None else ask(watched)
    seconds, processor, resident = watched.wait()
    told = watched.told
    silences = [later - earlier for earlier, later in pairwise(told)]
    return Measured(
        *(stage, documents, " ".join(command), round(seconds, 2), round(processor, 2), resident, watched.own),
        disk=sum(map(size_of, changed)),
        first_line=round(told[1], 2),
        silence=round(max(silences), 2),
        answer=answer,
        reckoned=reckoned_in(folder / f"{stage}.log"),
    )


def reckoned_in(log: Path) -> int | None:
    """Return the memory that a command said it reckoned with."""
    found = re.search(r"memory: .* estimate is [a-z ]+, ([\d.]+) ([MG])B", log.read_text(encoding="utf-8"))
    return int(float(found[1]) * {"M": 1e6, "G": 1e9}[found[2]]) if found else None


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files of a folder."""
    files = [path] if path.is_file() else path.rglob("*")
    return sum(each.stat().st_size for each in files if each.is_file())


def request(watched: Watched) -> float:
    """Ask a server that has just been started one question, and stop it; return the seconds until the answer."""
    watched.first_answer.wait()
    try:
        url = json.loads(watched.answer)["url"]
        asked = urllib.parse.urlencode({"q": QUERY, "k": 10})
        start = time.monotonic()
        with urllib.request.urlopen(f"{url}/api/search?{asked}") as answered:  # noqa: S310  its own server
            if len(json.load(answered)["hits"]) != 10:
                raise RuntimeError("the server did not find ten documents")
        return round(time.monotonic() - start, 3)
    finally:
        watched.process.send_signal(signal.SIGINT)


def count_lines(path: Path) -> int:
    """Count the documents of a corpus."""
    with path.open("rb") as file:
        return sum(1 for _ in file)


def run(corpus: Path, folder: Path, options: argparse.Namespace) -> None:
    """Run all stages that have not been run yet, and note each when it is done."""
    folder.mkdir(parents=True, exist_ok=True)
    noted = folder / "stages.jsonl"
    done = {each.stage for each in read_stages(noted)} | ({"train"} if options.model else set())
    documents = count_lines(corpus)
    model, index = Path(options.model or folder / "model"), folder / "index"
    new = _some_more(corpus, folder / "added.jsonl")
    hce = [sys.executable, "-m", "hce"]
    bound = ["--memory", options.memory] if options.memory else []
    kind = ["--engine", options.engine]
    stages: dict[str, tuple[list[str], list[Path], Callable[[Watched], float] | None]] = {
        "train": (["train", str(corpus), "-o", str(model), *bound, *options.train.split()], [model], None),
        "index": (["index", str(corpus), "-o", str(index), "-m", str(model), *kind, *bound], [index], None),
        "search": (["search", str(index), QUERY, "--json"], [], None),
        "add": (["add", str(index), str(new)], [index], None),
        "search after add": (["search", str(index), QUERY, "--json"], [], None),
        "status": (["status", str(index)], [], None),
        "rebuild": (["rebuild", str(index), *bound], [index], None),
        "serve": (["serve", str(index), "--port", "0", "--json"], [], request),
    }
    for stage, (arguments, changed, ask) in stages.items():
        if stage in done:
            continue
        if stage == "train" and model.with_name("model.unfinished").exists():
            arguments.append("--resume")
        measured = measure(stage, [*hce, *arguments], folder, documents, changed, ask)
        with noted.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(measured)) + "\n")
        print(row_of(measured), flush=True)
    (folder / "table.md").write_text(table([folder]), encoding="utf-8")


def _some_more(corpus: Path, path: Path) -> Path:
    """Write documents to add: the first of a corpus under other ids, with another beginning."""
    with corpus.open(encoding="utf-8") as lines, open_atomically(path) as file:
        for number, line in zip(range(ADDED), lines, strict=False):
            document = json.loads(line)
            mark = hashlib.blake2b(document["_id"].encode(), digest_size=4).hexdigest()
            document |= {"_id": f"added-{number}", "text": f"Note {mark}: {document['text']}"}
            file.write(json.dumps(document, ensure_ascii=False) + "\n")
    return path


def read_stages(path: Path) -> list[Measured]:
    """Read what was measured so far."""
    if not path.is_file():
        return []
    return [Measured(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


HEAD = (
    "| documents | stage | seconds | processor | resident | of its own | reckoned | on disk | first line | silence |\n"
    "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|"
)


def row_of(each: Measured) -> str:
    """Return a line of the table."""
    own, reckoned, disk = (f"{size / 1e9:,.2f} GB" if size else "" for size in (each.own, each.reckoned, each.disk))
    stage = each.stage if each.answer is None else f"{each.stage} (a request {each.answer:.2f} s)"
    return (
        f"| {each.documents:,} | {stage} | {each.seconds:,.0f} | {each.processor:,.0f} | {each.resident / 1e9:,.2f} GB "
        f"| {own} | {reckoned} | {disk} | {each.first_line:.1f} s | {each.silence:.0f} s |"
    )


def table(folders: Sequence[Path]) -> str:
    """Return all that was measured, by stage and number of documents, as Markdown."""
    found = [each for folder in folders for each in read_stages(folder / "stages.jsonl")]
    order = list(dict.fromkeys(each.stage for each in found))
    found.sort(key=lambda each: (order.index(each.stage), each.documents))
    slopes = [line for stage in order for line in _slope([each for each in found if each.stage == stage])]
    return "\n".join([HEAD, *map(row_of, found), *slopes]) + "\n"


def _slope(sizes: Sequence[Measured]) -> Iterator[str]:
    """Yield a line with the exponents by which time and memory grow from the smallest to the largest corpus, if any."""
    first, last = sizes[0], sizes[-1]
    if first.documents < last.documents:
        grown = math.log(last.documents / first.documents)
        ratios = {"processor": last.processor / first.processor, "own memory": last.own / max(first.own, 1)}
        exponents = ", ".join(f"{name} ~ N^{math.log(ratio) / grown:.2f}" for name, ratio in ratios.items())
        yield f"\n{first.stage}, {first.documents:,} to {last.documents:,} documents: {exponents}"


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("data", type=Path, nargs="+", help="folders in BEIR's format")
    making.add_argument("--documents", type=int, required=True)
    making.add_argument("--output", type=Path, required=True)
    making.add_argument("--seed", type=int, default=0)
    making.add_argument("--prefix", default="d", help="of the ids")
    running = commands.add_parser("run")
    running.add_argument("corpus", type=Path)
    running.add_argument("--output", type=Path, required=True, help="a folder for model, index and what is measured")
    running.add_argument("--memory", help="the bound that train, index and rebuild are given, such as 4GB")
    running.add_argument("--engine", default="codes")
    running.add_argument("--model", help="an encoder to index with; then nothing is trained")
    running.add_argument("--train", default="", metavar="OPTIONS", help="more options of `hce train`, in one argument")
    showing = commands.add_parser("table")
    showing.add_argument("folders", type=Path, nargs="+")
    options = parser.parse_args()
    if options.command == "make":
        make(options.data, options.documents, options.output, options.seed, options.prefix)
    elif options.command == "run":
        run(options.corpus, options.output, options)
    else:
        print(table(options.folders), end="")
