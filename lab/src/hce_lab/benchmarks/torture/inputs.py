"""Inputs: corpora, queries, judgments, runs, manifests, conditions and JSON bodies, mutated, in process.

Each is either taken or refused in one line. What is taken must be of its kind: texts that are texts, ids that are told
apart.
"""

from __future__ import annotations

import gzip
import io
import random
import shutil
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from hce.data.corpus import Corpus
from hce.data.judgments import Qrels, read_generated, read_queries
from hce.data.text import Document
from hce.errors import HceError
from hce.evaluation.runs import read_run
from hce.files import damage_in
from hce.index.filters import compile_filter, parse_clauses
from hce.index.index import Index
from hce.index.manifest import Manifest
from hce.training.model_folder import ModelFacts
from hce.web.api import NewDocuments
from hce_lab.benchmarks.torture.samples import Samples
from hce_lab.benchmarks.torture.tally import HANG, TRACEBACK, WRONG, Tally

SECONDS = 20  # after which one input hangs
NASTY = [
    *(b"\x00", b"\xff\xfe", b"\xed\xa0\x80", "\u2028".encode(), b'"', b"'", b"{", b"}", b"[" * 3000, b'{"a":' * 2000),
    *(b"NaN", b"-Infinity", b"1e999", b"9" * 400, b"-1", b"0x10", b"\t", b",", b"\r\n", b"\n\n", b"null", b"true"),
    *(b"\\ud800", b"\\u0000", b"\x1b[2J", b"../../../etc/passwd", "İ🄰\u202e".encode(), b"\xef\xbb\xbf", b" " * 5000),
    *(b"(" * 500, b"in ", b">=", b"!=", b"=", b";", b"\\", b"%", b"_", b"a" * 100_000),
]


class Hung(BaseException):
    """An input took too long."""


class Seed(NamedTuple):
    """A good input and what takes it.

    Attributes:
        kind: what it is called in the table.
        content: of the file.
        take: reads it, given the content.
    """

    kind: str
    content: bytes
    take: Callable[[bytes], Any]


def run(tally: Tally, samples: Samples, folder: Path, count: int, seed: int) -> None:
    """Mutate inputs, as many of each kind."""
    rng = random.Random(seed)  # noqa: S311
    place = folder / "inputs"
    place.mkdir()
    signal.signal(signal.SIGALRM, _give_up)
    with Index.open(samples.index, samples.encoder) as index:
        seeds = _seeds(samples, place, index)
        for number in range(count):
            _try(tally, seeds[number % len(seeds)], rng)
    shutil.rmtree(place)


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Change some of it."""
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.randrange(len(content) + 1)
        to = min(len(content), at + int(rng.expovariate(0.1)))
        piece = content[at:to]
        middle = rng.choice(
            (
                b"",
                piece + piece,
                piece[::-1],
                rng.choice(NASTY),
                piece + rng.choice(NASTY),
                rng.randbytes(len(piece)),
                bytes([piece[0] ^ 1 << rng.randrange(8)]) + piece[1:] if piece else b"",
            )
        )
        content = content[:at] + middle + content[to:]
    return content[: rng.randrange(len(content) + 1)] if rng.random() < 0.1 else content


def _try(tally: Tally, seed: Seed, rng: random.Random) -> None:
    name, content = f"mutated {seed.kind}", mutated(seed.content, rng)
    tally.count(name)
    signal.alarm(SECONDS)
    try:
        wrong = seed.take(content)
        if wrong:
            tally.fault(name, WRONG, f"{wrong}: {content[:200]!r}")
    except (HceError, ValidationError) as error:
        if "\n" in str(error) and not isinstance(error, ValidationError):
            tally.fault(name, TRACEBACK, f"more than a line: {error}")
    except Hung:
        tally.fault(name, HANG, repr(content[:300]))
    except Exception:
        tally.fault(name, TRACEBACK, f"{content[:300]!r}\n{traceback.format_exc()}")
    finally:
        signal.alarm(0)


def _give_up(*_: Any) -> None:
    raise Hung


def _seeds(samples: Samples, place: Path, index: Index) -> list[Seed]:
    """Return a good input of each kind."""
    jsonl = b"".join(samples.corpus.read_bytes().splitlines(keepends=True)[:8])
    ids = [f"t{number}" for number in range(8)]
    rows = "".join(f'{doc_id}\t"a title, of {doc_id}"\tw1 w2 w3 {doc_id}\t{n}\n' for n, doc_id in enumerate(ids))
    table = ("id\ttitle\ttext\tyear\n" + rows).encode()
    queries = "".join(f'{{"_id": "q{n}", "text": "w{n} w2"}}\n' for n in range(6)).encode()
    qrels = "query-id\tcorpus-id\tscore\n" + "".join(f"q{n}\tt{n}\t1\n" for n in range(6))
    trec = "".join(f"q{n} 0 t{n} 1\n" for n in range(6)).encode()
    ranking = "".join(f"q{n} Q0 t{n} {n + 1} {1 / (n + 1)} tag\n" for n in range(6)).encode()
    generated = "".join(f'{{"document": "t{n}", "query": "w{n} w2"}}\n' for n in range(6)).encode()
    body = b'{"documents": [{"id": "a", "text": "w1", "title": "t", "metadata": {"year": 2024, "tags": ["x"]}}]}'
    clauses = b"year>=2000;lang=en;tag in a,b;n!=3;w2 w3"

    def in_file(name: str, read: Callable[[Path], Any]) -> Callable[[bytes], Any]:
        def take(content: bytes) -> Any:
            (place / name).write_bytes(content)
            return read(place / name)

        return take

    def in_folder(name: str, whole: Path, read: Callable[[Path], Any]) -> Seed:
        shutil.copytree(whole, place / name.replace("/", "-"))
        target = place / name.replace("/", "-") / Path(name).name
        return Seed(
            "manifests", target.read_bytes(), lambda content: target.write_bytes(content) and read(target.parent)
        )

    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as file:
        file.write(jsonl)
    return [
        Seed("corpora", jsonl, in_file("corpus.jsonl", _take_corpus)),
        Seed("corpora", table, in_file("corpus.tsv", _take_corpus)),
        Seed("corpora", table.replace(b"\t", b","), in_file("corpus.csv", _take_corpus)),
        Seed("corpora", packed.getvalue(), in_file("corpus.jsonl.gz", _take_corpus)),
        Seed("queries", queries, in_file("queries.jsonl", lambda path: _take_texts(read_queries(path)))),
        Seed("queries", b"q1\tw1 w2\nq2\tw3\n", in_file("queries.tsv", lambda path: _take_texts(read_queries(path)))),
        Seed("queries", generated, in_file("generated.jsonl", lambda path: read_generated(path) and None)),
        Seed("judgments", qrels.encode(), in_file("qrels.tsv", lambda path: Qrels.read(path) and None)),
        Seed("judgments", trec, in_file("qrels.trec", lambda path: Qrels.read(path) and None)),
        Seed("runs", ranking, in_file("run.trec", lambda path: read_run(path) and None)),
        in_folder("index/manifest.json", samples.index, lambda folder: Manifest.read(folder) and None),
        in_folder("encoder/checksums.json", samples.index / "encoder", lambda folder: damage_in(folder) and None),
        in_folder("model/hce.json", samples.model, lambda folder: ModelFacts.read(folder) and None),
        Seed("JSON bodies", body, _take_body),
        Seed("conditions and queries", clauses, lambda content: _take_query(index, content)),
    ]


def _take_corpus(path: Path) -> str | None:
    documents = list(Corpus.load(path))
    if len({document.id for document in documents}) != len(documents):
        return "an id twice"
    for document in documents:
        document.to_json().encode()
    return None


def _take_texts(queries: dict[str, Any]) -> str | None:
    return None if all(isinstance(query.text, str) and query.text.strip() for query in queries.values()) else "no text"


def _take_body(content: bytes) -> None:
    for new in NewDocuments.model_validate_json(content).documents:
        Document(new.id, new.text, new.title, new.metadata).to_json()


def _take_query(index: Index, content: bytes) -> str | None:
    """Read the last part as a query, and the others as conditions."""
    *clauses, query = content.decode("utf-8", "surrogateescape")[:4000].split(";")
    compile_filter(parse_clauses(clauses))
    hits = index.search(query, 5, parse_clauses(clauses) if len(clauses) % 2 else None)
    scores = [hit.score for hit in hits]
    return None if scores == sorted(scores, reverse=True) else f"scores that do not fall: {scores}"
