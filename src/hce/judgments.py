"""Queries and relevance judgments (qrels), and BEIR folders that hold both beside a corpus.

Files: queries as JSONL or as two-column TSV; qrels as BEIR's three-column TSV or TREC's four columns.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from hce.atomic import open_atomically
from hce.corpus import Corpus, take_id
from hce.errors import InputError
from hce.records import Line, Record, format_suffix, read_jsonl, read_lines

BEIR_HEADER = ("query-id", "corpus-id", "score")


@dataclass(frozen=True, slots=True)
class Query:
    """A question with a name."""

    id: str
    text: str


class Judgment(NamedTuple):
    """How relevant a document is to a query: 0 is not at all, more is better."""

    query_id: str
    document_id: str
    grade: int


class Qrels(Mapping[str, Mapping[str, int]]):
    """Judgments by query: `qrels["q1"]["d7"]` is the grade of document d7 for query q1."""

    def __init__(self, judgments: Iterable[Judgment]) -> None:
        self._grades: dict[str, dict[str, int]] = {}
        for query_id, document_id, grade in judgments:
            self._grades.setdefault(query_id, {})[document_id] = grade

    def __getitem__(self, query_id: str) -> Mapping[str, int]:
        return self._grades[query_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._grades)

    def __len__(self) -> int:
        return len(self._grades)

    def __repr__(self) -> str:
        return f"Qrels({len(self):,} queries, {sum(1 for _ in self.judgments()):,} judgments)"

    def judgments(self) -> Iterator[Judgment]:
        """Stream all judgments, query by query."""
        for query_id, grades in self._grades.items():
            for document_id, grade in grades.items():
                yield Judgment(query_id, document_id, grade)

    def positives(self, query_id: str) -> list[str]:
        """The documents judged relevant (grade above 0) to a query."""
        return [document_id for document_id, grade in self._grades.get(query_id, {}).items() if grade > 0]

    @classmethod
    def read(
        cls, path: str | Path, *, queries: Container[str] | None = None, documents: Container[str] | None = None
    ) -> Qrels:
        """Read BEIR's TSV or TREC's format, whichever the file is in.

        Args:
            path: the file, which may be a .gz.
            queries: the known query ids; a judgment of another one is an error.
            documents: the known document ids; a judgment of another one is an error.

        Raises:
            InputError: a malformed line, an unknown id, or two different grades for one pair.
        """
        seen: dict[tuple[str, str], tuple[int, str]] = {}
        for where, judgment in _parse_qrels(path):
            if queries is not None and judgment.query_id not in queries:
                raise InputError(f"{where}: query {judgment.query_id!r} is not among the queries; do the files match?")
            if documents is not None and judgment.document_id not in documents:
                raise InputError(
                    f"{where}: document {judgment.document_id!r} is not in the corpus; do the files match?"
                )
            pair = (judgment.query_id, judgment.document_id)
            grade, place = seen.setdefault(pair, (judgment.grade, where))
            if grade != judgment.grade:
                raise InputError(f"{where}: grade {judgment.grade} for {pair}, but {grade} at {place}; keep one")
        if not seen:
            raise InputError(f"{path}: no judgments in it; check the path")
        return cls(Judgment(*pair, grade) for pair, (grade, _) in seen.items())

    def write(self, path: str | Path, form: Literal["beir", "trec"] = "beir") -> None:
        """Write BEIR's TSV (with its header line) or TREC's four columns, atomically."""
        separator = "\t" if form == "beir" else " "
        with open_atomically(path) as file:
            if form == "beir":
                file.write("\t".join(BEIR_HEADER) + "\n")
            for query_id, document_id, grade in self.judgments():
                for name in (query_id, document_id):
                    check_writable(name, separator)
                columns = (
                    [query_id, document_id, str(grade)] if form == "beir" else [query_id, "0", document_id, str(grade)]
                )
                file.write(separator.join(columns) + "\n")


def check_writable(name: str, separator: str) -> None:
    """Refuse an id that would break the columns of the file it is written to."""
    forbidden = "\t\n\r" if separator == "\t" else None
    if (forbidden is None and len(name.split()) != 1) or (forbidden and any(mark in name for mark in forbidden)):
        raise InputError(f"id {name!r} holds white space, which this format uses between columns; rename it")


def _parse_qrels(path: str | Path) -> Iterator[tuple[str, Judgment]]:
    for number, line in enumerate(line for line in read_lines(path) if line.text.strip()):
        columns = line.text.split("\t") if "\t" in line.text else line.text.split()
        if number == 0 and columns[-1].lower() == BEIR_HEADER[-1]:
            continue
        yield line.where, _parse_judgment(columns, line)


def _parse_judgment(columns: list[str], line: Line) -> Judgment:
    if len(columns) not in (3, 4):
        raise InputError(
            f"{line.where}: {len(columns)} columns; qrels have 3 (query, document, grade) "
            "or TREC's 4 (query, 0, document, grade)"
        )
    query_id, document_id, grade = columns[0], columns[-2], columns[-1]
    try:
        return Judgment(query_id.strip(), document_id.strip(), int(grade))
    except ValueError as error:
        raise InputError(f"{line.where}: the grade {grade!r} is not a whole number") from error


def read_queries(path: str | Path) -> dict[str, Query]:
    """Read queries by id from JSONL (`_id` or `id`, `text`) or from TSV lines of id and text.

    Raises:
        InputError: a malformed line, an empty query, an id that stands twice, or no query at all.
    """
    queries: dict[str, Query] = {}
    places: dict[str, str] = {}
    records = _tsv_queries(path) if format_suffix(path) == ".tsv" else read_jsonl(path)
    for record in records:
        query = _parse_query(record)
        if query.id in queries:
            raise InputError(f"{record.where}: query id {query.id!r} stands already at {places[query.id]}")
        queries[query.id] = query
        places[query.id] = record.where
    if not queries:
        raise InputError(f"{path}: no queries in it; check the path")
    return queries


def _tsv_queries(path: str | Path) -> Iterator[Record]:
    for line in read_lines(path):
        query_id, tab, text = line.text.partition("\t")
        if line.text.strip() and not tab:
            raise InputError(f"{line.where}: no tab; a line is an id, a tab and the query")
        if line.text.strip():
            yield Record(line.where, {"id": query_id, "text": text})


def _parse_query(record: Record) -> Query:
    fields = dict(record.fields)
    query_id = take_id(fields, record.where)
    text = fields.get("text")
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{record.where}: query {query_id!r} has no text; give it a string field 'text'")
    return Query(query_id, text)


def write_queries(path: str | Path, queries: Iterable[Query]) -> None:
    """Write queries as JSONL, or as TSV where the name says so, atomically."""
    tabular = format_suffix(path) == ".tsv"
    with open_atomically(path) as file:
        for query in queries:
            if tabular:
                check_writable(query.id, "\t")
                file.write(f"{query.id}\t{' '.join(query.text.split())}\n")
            else:
                file.write(json.dumps({"_id": query.id, "text": query.text}, ensure_ascii=False) + "\n")


class Dataset(NamedTuple):
    """A corpus with queries and the judgments of one split."""

    corpus: Corpus
    queries: dict[str, Query]
    qrels: Qrels

    @classmethod
    def load(cls, folder: str | Path, split: str = "test") -> Dataset:
        """Read a BEIR folder: corpus.jsonl, queries.jsonl, qrels/<split>.tsv.

        Raises:
            InputError: a file is missing or malformed, or judgments name what is not there.
        """
        folder = Path(folder)
        qrels_path = find_split(folder, split)
        corpus = Corpus.load(folder)
        queries = read_queries(_first_existing(folder, "queries.jsonl", "queries.jsonl.gz"))
        qrels = Qrels.read(qrels_path, queries=queries, documents=corpus.left_out.union(corpus.ids))
        return cls(corpus, {query_id: queries[query_id] for query_id in qrels}, qrels)


def find_split(folder: Path, split: str) -> Path:
    """The qrels file of a split; the error lists the splits that are there."""
    for name in (f"{split}.tsv", f"{split}.tsv.gz"):
        if (folder / "qrels" / name).is_file():
            return folder / "qrels" / name
    found = ", ".join(splits(folder)) or "none"
    raise InputError(f"{folder}: no split {split!r} (qrels/{split}.tsv); splits there: {found}")


def splits(folder: str | Path) -> list[str]:
    """The names of the splits that a BEIR folder has judgments for."""
    return sorted({path.name.split(".")[0] for path in (Path(folder) / "qrels").glob("*.tsv*")})


def _first_existing(folder: Path, *names: str) -> Path:
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise InputError(f"{folder}: no {names[0]}; a BEIR folder holds corpus.jsonl, queries.jsonl and qrels/")
