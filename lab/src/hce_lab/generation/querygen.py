"""doc2query: a corpus in, a file of generated queries out, each with the document that it was written for.

A run keeps what it has written in a journal beside its output until it is done; the same call continues it. What is
written for a document depends on the seed and on the document alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hce.data.corpus import Corpus
from hce.data.records import JSONL_SUFFIXES
from hce.data.text import hash64
from hce.encoding.corpus_vectors import encode_corpus
from hce.encoding.encoder import Encoder
from hce.errors import FormatError, InputError
from hce.files import open_atomically, other_identity, require_parent, unfinished
from hce.progress import progress_bar
from hce.search.engine import score_blocks

if TYPE_CHECKING:
    from hce_lab.generation.generator import Generator


class QueryCounts(NamedTuple):
    """How many queries a run wrote.

    Attributes:
        documents: how many documents were read.
        generated: how many different queries were written for them.
        kept: how many of those are in the file.
    """

    documents: int
    generated: int
    kept: int


class _Query(NamedTuple):
    position: int  # of its document in the corpus
    text: str


def generate_queries(
    corpus: Corpus,
    writer: Generator,
    output: str | Path,
    *,
    per_document: int = 1,
    limit: int = 0,
    encoder: Encoder | None = None,
    within: int = 10,
    seed: int = 0,
    progress: bool = False,
) -> QueryCounts:
    """Write queries for documents, drop those that do not lead back to theirs, and save the rest as JSONL.

    Args:
        corpus: the documents.
        writer: the language model.
        output: a new .jsonl file, which `hce.data.judgments.read_generated` reads.
        per_document: how many queries to write for each document; equal ones count once.
        limit: write for this many documents only, drawn at random; 0 means all.
        encoder: what the round-trip filter ranks all documents with; None leaves the filter out.
        within: a query passes the filter where its document is among this many best ones.
        seed: same seed, same queries.
        progress: show a bar.

    Raises:
        InputError: a setting or the output cannot be used, an unfinished run beside it had other settings, or no query
            passes the filter (what was written is then kept for another filter).
    """
    output = Path(output)
    check_output(output)
    if per_document < 1 or limit < 0 or within < 1:
        raise InputError(
            f"per_document {per_document}, limit {limit}, within {within}: give at least 1, 0 (all documents) and 1"
        )
    positions = drawn_documents(len(corpus), limit, seed)
    identity = {"corpus": corpus.fingerprint, "model": writer.name, "per_document": per_document, "limit": limit}
    journal = Journal(unfinished(output), {**identity, "seed": seed})
    _write_all(journal, corpus, positions, writer, per_document, seed, progress)
    queries = list(_distinct(journal, positions))
    kept = queries if encoder is None else _leading_back(queries, corpus, encoder, within)
    if not kept:
        raise InputError(
            f"none of {len(queries)} generated queries is left: their documents are not among the best {within}; "
            "filter with a better encoder, or not at all"
        )
    _save(kept, corpus, output)
    journal.remove()
    return QueryCounts(len(positions), len(queries), len(kept))


def check_output(output: Path) -> None:
    """Refuse an output that cannot be written, before hours are spent on it."""
    if output.suffix.lower() not in JSONL_SUFFIXES:
        raise InputError(f"{output}: generated queries are written as .jsonl; choose such a name")
    if output.exists():
        raise InputError(f"{output} exists: choose another name or remove it first")
    require_parent(output)


def drawn_documents(count: int, limit: int, seed: int) -> np.ndarray:
    """Return the positions of the documents to write for, rising: all, or `limit` of them drawn at random."""
    if not limit or limit >= count:
        return np.arange(count)
    return np.sort(np.random.default_rng([seed, 3]).choice(count, limit, replace=False))


def own_ranks(queries: Sequence[str], positions: Sequence[int], corpus: Corpus, encoder: Encoder) -> np.ndarray:
    """Count the documents that the encoder puts before each query's own, of shape (queries,)."""
    documents = encode_corpus(encoder, corpus)
    asked = encoder.encode(queries, "query")
    own = np.asarray(positions)
    ranks = np.empty(len(asked), dtype=np.int64)
    for rows, scores in score_blocks(asked, documents):
        ranks[rows] = (scores > scores[np.arange(len(scores)), own[rows]][:, None]).sum(axis=1)
    return ranks


class Journal:
    """A file that grows by whole lines; the first one says which run it belongs to.

    Args:
        path: the file.
        identity: what tells this run from another.
    """

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path = path
        self.identity = identity

    def open(self) -> int:
        """Begin, or take up what is there; return how many items are done.

        Raises:
            InputError: what is there is another run's, or nothing can be written there.
            FormatError: what is there is no journal.
        """
        content = self.path.read_bytes() if self.path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):  # a kill tore the last line off in its middle
            os.truncate(self.path, len(whole))
        if not whole:
            self.append([self.identity])
            return 0
        self._require_same(whole.partition(b"\n")[0])
        return whole.count(b"\n") - 1

    def append(self, items: Iterable[Any]) -> None:
        """Add items; they are on the disk when this returns."""
        lines = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
        try:
            with self.path.open("ab") as file:
                file.write(lines.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written ({error.strerror}); check the folder") from error

    def items(self) -> Iterator[Any]:
        """Yield the items that are done, in order."""
        with self.path.open(encoding="utf-8") as file:
            next(file)
            for line in file:
                yield json.loads(line)

    def remove(self) -> None:
        """Delete the journal of a run that is done."""
        self.path.unlink()

    def _require_same(self, first_line: bytes) -> None:
        try:
            found = dict(json.loads(first_line))
        except (ValueError, TypeError) as error:
            raise FormatError(f"{self.path} is not the journal of a run; move it away") from error
        name = other_identity(self.identity, found)
        if name is not None:
            raise InputError(
                f"{self.path} holds an unfinished run with {name} {found.get(name)!r}, not {self.identity[name]!r}; "
                "give the same settings to continue it, or delete it"
            )


def _write_all(
    journal: Journal,
    corpus: Corpus,
    positions: np.ndarray,
    writer: Generator,
    per_document: int,
    seed: int,
    progress: bool,
) -> None:
    """Have the writer read every document that the journal does not know yet."""
    done = journal.open()
    together = max(1, writer.batch_size // per_document)
    with progress_bar("writing queries", len(positions), "documents", show=progress) as advance:
        advance(done)
        for start in range(done, len(positions), together):
            documents = [corpus[position] for position in positions[start : start + together].tolist()]
            passages = [document.full_text for document in documents for _ in range(per_document)]
            seeds = [[seed, hash64(document.id), turn] for document in documents for turn in range(per_document)]
            queries = writer.generate(passages, seeds)
            journal.append(queries[row : row + per_document] for row in range(0, len(queries), per_document))
            advance(len(documents))


def _distinct(journal: Journal, positions: np.ndarray) -> Iterator[_Query]:
    """Yield the queries that are not empty, each once a document."""
    for position, texts in zip(positions.tolist(), journal.items(), strict=True):
        yield from (_Query(position, text) for text in dict.fromkeys(texts) if text)


def _leading_back(queries: list[_Query], corpus: Corpus, encoder: Encoder, within: int) -> list[_Query]:
    """Keep the queries that pass the round-trip filter (Alberti et al. 2019)."""
    ranks = own_ranks([query.text for query in queries], [query.position for query in queries], corpus, encoder)
    return [query for query, rank in zip(queries, ranks.tolist(), strict=True) if rank < within]


def _save(queries: list[_Query], corpus: Corpus, output: Path) -> None:
    with open_atomically(output) as file:
        for query in queries:
            record = {"document": corpus[query.position].id, "query": query.text}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
