"""Queries, relevance judgments (qrels), both together as labels; BEIR folders.

Queries come as two-column TSV or as records, such as JSONL. Qrels come as BEIR's three-column TSV or TREC's four
columns. Generated queries come as records.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

from hce.data.corpus import Corpus
from hce.data.records import (
    JSONL_SUFFIXES,
    USUAL,
    Line,
    Reading,
    Record,
    choose_fields,
    format_suffix,
    list_names,
    read_lines,
    read_records,
    take_id,
    take_string,
)
from hce.errors import InputError, wrong_type
from hce.files import open_text

BEIR_HEADER = ("query-id", "corpus-id", "score")
USUAL_NAMES = (("id", "queryid", "qid"), (), ("text", "query", "question", "querytext"))  # see `choose_fields`


@dataclass(frozen=True, slots=True)
class Query:
    """The text of a query, with an id."""

    id: str
    text: str


class Judgment(NamedTuple):
    """A document's grade for a query: 0 is not relevant, and higher is better."""

    query_id: str
    document_id: str
    grade: int


class Qrels(Mapping[str, Mapping[str, int]]):
    """Judgments by query: `qrels["q1"]["d7"]` is document d7's grade for query q1.

    >>> qrels = Qrels([Judgment("q1", "d7", 2), Judgment("q1", "d8", 0)])
    >>> qrels["q1"]["d7"], qrels.positives("q1"), qrels
    (2, ['d7'], Qrels(1 queries, 2 judgments))
    """

    def __init__(self, judgments: Iterable[Judgment]) -> None:
        self._grades: dict[str, dict[str, int]] = {}
        if not isinstance(judgments, Iterable):
            raise wrong_type(judgments, "qrels: give judgments; Qrels.read(…) reads a file of them")
        for each in judgments:
            if not isinstance(each, tuple):
                raise wrong_type(each, "qrels: give judgments, such as ('q1', 'd7', 1)")
            query_id, document_id, grade = each
            self._grades.setdefault(query_id, {})[document_id] = grade

    def __getitem__(self, query_id: str) -> Mapping[str, int]:
        return self._grades[query_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._grades)

    def __len__(self) -> int:
        return len(self._grades)

    def __repr__(self) -> str:
        return f"Qrels({len(self):,} queries, {sum(map(len, self._grades.values())):,} judgments)"

    def judgments(self) -> Iterator[Judgment]:
        """Stream all judgments, query by query."""
        for query_id, grades in self._grades.items():
            for document_id, grade in grades.items():
                yield Judgment(query_id, document_id, grade)

    def positives(self, query_id: str) -> list[str]:
        """Return the documents judged relevant (grade above 0) to a query."""
        return [document_id for document_id, grade in self._grades.get(query_id, {}).items() if grade > 0]

    @classmethod
    def read(
        cls, path: str | Path, *, queries: Container[str] | None = None, documents: Container[str] | None = None
    ) -> Qrels:
        """Read judgments from a file in BEIR's or TREC's format.

        Args:
            path: the file, plain or .gz.
            queries: the known query ids; a judgment of another one is an error.
            documents: the known document ids; a judgment of another one is an error.

        Raises:
            InputError: a malformed line, an unknown id, or two different grades for one pair.
        """
        seen: dict[tuple[str, str], tuple[int, str]] = {}
        for row, line in enumerate(line for line in read_lines(path) if line.text.strip()):
            columns = line.text.split("\t") if "\t" in line.text else line.text.split()
            if row == 0 and columns[-1].lower() == BEIR_HEADER[-1]:
                continue
            query_id, document_id, own_grade = _parse_judgment(columns, line)
            if queries is not None and query_id not in queries:
                raise InputError(f"{line.where}: query {query_id!r} is not among the queries; do the files match?")
            if documents is not None and document_id not in documents:
                raise InputError(f"{line.where}: document {document_id!r} is not in the corpus; do the files match?")
            pair = (query_id, document_id)
            grade, place = seen.setdefault(pair, (own_grade, line.where))
            if grade != own_grade:
                raise InputError(f"{line.where}: grade {own_grade} for {pair}, but {grade} at {place}; keep one")
        if not seen:
            raise InputError(f"{path}: no judgments in it; check the path")
        return cls(Judgment(*pair, grade) for pair, (grade, _) in seen.items())

    def among(self, documents: Container[str]) -> Qrels:
        """Return these documents' judgments; drop queries that lose all positives.

        >>> Qrels([Judgment("q1", "d7", 2), Judgment("q1", "d8", 0), Judgment("q2", "d9", 1)]).among(["d7"])
        Qrels(1 queries, 1 judgments)
        """
        kept = Qrels(judgment for judgment in self.judgments() if judgment.document_id in documents)
        lost = {query_id for query_id in self if self.positives(query_id) and not kept.positives(query_id)}
        return Qrels(judgment for judgment in kept.judgments() if judgment.query_id not in lost)

    def write(self, path: str | Path, form: Literal["beir", "trec"] = "beir") -> None:
        """Write BEIR's TSV (with its header line) or TREC's four columns, atomically."""
        separator, between = ("\t", []) if form == "beir" else (" ", ["0"])
        with open_text(path) as file:
            if form == "beir":
                file.write("\t".join(BEIR_HEADER) + "\n")
            for judgment in self.judgments():
                query_id, document_id = (_column(name, separator) for name in judgment[:2])
                file.write(separator.join([query_id, *between, document_id, str(judgment.grade)]) + "\n")


def _parse_judgment(columns: list[str], line: Line) -> Judgment:
    if len(columns) not in (3, 4):
        raise InputError(
            f"{line.where}: {len(columns)} columns; write 3 (query, document, grade) "
            "or TREC's 4 (query, 0, document, grade)"
        )
    query_id, document_id, grade = columns[0].strip(), columns[-2].strip(), columns[-1].strip()
    if not query_id or not document_id:
        raise InputError(f"{line.where}: the id of the {'document' if query_id else 'query'} is missing; fill it in")
    if not re.fullmatch("[+-]?[0-9]{1,9}", grade):
        raise InputError(f"{line.where}: the grade {grade!r} is not an integer; write 0, 1, 2 …")
    return Judgment(query_id, document_id, int(grade))


class Labels(NamedTuple):
    """Judged queries, for training, model selection or evaluation."""

    queries: dict[str, Query]  # by id; some may have no judgments
    qrels: Qrels

    @property
    def digest(self) -> str:
        """A fingerprint of all judgments and of the texts of their queries."""
        rows = [(self.queries[judgment.query_id].text, *judgment) for judgment in self.qrels.judgments()]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def only(self, query_ids: Iterable[str]) -> Labels:
        """Return the labels of these queries, in the order given."""
        chosen = list(query_ids)
        judgments = (Judgment(query_id, *item) for query_id in chosen for item in self.qrels[query_id].items())
        return Labels({query_id: self.queries[query_id] for query_id in chosen}, Qrels(judgments))

    def among(self, documents: Container[str]) -> Labels:
        """Return the labels of these documents, without queries that lack positives."""
        there = self.qrels.among(documents)
        return Labels(self.queries, there).only(query_id for query_id in there if there.positives(query_id))

    def without(self, query_ids: Container[str]) -> Labels:
        """Return the labels of all judged queries except these."""
        return self.only(query_id for query_id in self.qrels if query_id not in query_ids)

    def joined(self, other: Labels) -> Labels:
        """Return the union of two sets of labels; fail if a query is in both."""
        twice = next((query_id for query_id in other.qrels if query_id in self.qrels), None)
        if twice is not None:
            raise InputError(f"query {twice!r} is in both sets of queries; give one of them another id")
        return Labels(self.queries | other.queries, Qrels([*self.qrels.judgments(), *other.qrels.judgments()]))


class Dataset(NamedTuple):
    """A corpus with queries and the judgments of one split."""

    corpus: Corpus
    queries: dict[str, Query]
    qrels: Qrels

    @property
    def labels(self) -> Labels:
        """The queries and judgments without the corpus."""
        return Labels(self.queries, self.qrels)

    @classmethod
    def load(cls, folder: str | Path, split: str = "test", reading: Reading = USUAL) -> Dataset:
        """Read a BEIR folder: corpus.jsonl, queries.jsonl, qrels/<split>.tsv.

        Raises:
            InputError: a file is missing or malformed, or a judgment names an unknown query or document.
        """
        folder = Path(folder)
        qrels_path = find_split(folder, split)
        corpus = Corpus.load(folder, reading)
        queries = read_queries(find_queries(folder))
        qrels = Qrels.read(qrels_path, queries=queries, documents=corpus.left_out.union(corpus.ids))
        return cls(corpus, {query_id: queries[query_id] for query_id in qrels}, qrels)


def read_queries(path: str | Path) -> dict[str, Query]:
    """Read queries by id, from TSV lines, or records with `_id` and `text`."""
    queries: dict[str, Query] = {}
    places: dict[str, str] = {}
    fields = None
    for where, found in _tsv_queries(path) if format_suffix(path) == ".tsv" else read_records(path):
        fields = fields or choose_fields(found, str(path), usual=USUAL_NAMES)
        rest = dict(found)
        query_id = take_id(rest, where, fields.ids, "give each query a field '_id' or 'id'")
        text = take_string(rest, fields.text, where) or ""
        if not text.strip():
            names = list_names(found)
            raise InputError(f"{where}: query {query_id!r} has no text (found: {names}); give it a string field 'text'")
        if query_id in queries:
            place = places[query_id]
            raise InputError(f"{where}: query id {query_id!r} is already used at {place}; make ids unique")
        queries[query_id], places[query_id] = Query(query_id, text), where
    return queries or _refuse_none(path)


def _tsv_queries(path: str | Path) -> Iterator[Record]:
    for line in read_lines(path):
        query_id, tab, text = line.text.partition("\t")
        if line.text.strip() and not tab:
            raise InputError(f"{line.where}: no tab; a line is an id, a tab and the query")
        if line.text.strip():
            yield Record(line.where, {"id": query_id, "text": text})


def _refuse_none(path: str | Path) -> NoReturn:
    raise InputError(f"{path}: no queries in it; check the path")


def read_log(path: str | Path) -> list[str]:
    """Read a query log: a .txt with a query per line, or a file for `read_queries`."""
    if format_suffix(path) != ".txt":
        return [query.text for query in read_queries(path).values()]
    return [line.text.strip() for line in read_lines(path) if line.text.strip()] or _refuse_none(path)


def write_queries(path: str | Path, queries: Iterable[Query]) -> None:
    """Write queries atomically as JSONL, or as TSV with white space collapsed."""
    suffix = format_suffix(path)
    if suffix not in (".tsv", *JSONL_SUFFIXES):
        raise InputError(f"{path}: queries are written as .jsonl or .tsv; choose such a name")
    with open_text(path) as file:
        for query in queries:
            if suffix == ".tsv":
                file.write("\t".join([_column(query.id, "\t"), " ".join(query.text.split())]) + "\n")
            else:
                file.write(json.dumps({"_id": query.id, "text": query.text}, ensure_ascii=False) + "\n")


def read_generated(path: str | Path) -> Labels:
    """Read generated queries: `document` (or `_id`, `id`) and `query` (or `text`)."""
    queries: dict[str, Query] = {}
    judgments = []
    for count, (where, fields) in enumerate(read_records(path)):
        document = next((fields[name] for name in ("document", "_id", "id") if fields.get(name)), None)
        text = fields.get("query") or fields.get("text")
        if document is None or not isinstance(text, str) or not text.strip():
            raise InputError(f"{where}: a generated query needs the fields 'document' (an id) and 'query' (a text)")
        query = Query(f"generated-{count}", text)
        queries[query.id] = query
        judgments.append(Judgment(query.id, str(document), 1))
    return Labels(queries, Qrels(judgments))


def _column(name: str, separator: str) -> str:
    """Return an id, or fail if a column of a file cannot hold it."""
    pieces = name.split() if separator == " " else re.split(r"[\t\r\n]", name.strip())
    if not name or pieces != [name] or name.startswith("\ufeff"):
        raise InputError(f"id {name!r} is empty or holds white space that separates columns here; rename it")
    return name


def find_split(folder: Path, split: str) -> Path:
    """Return the qrels file of a split; the error lists the splits of the folder."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; give one that holds corpus.jsonl, queries.jsonl and qrels/")
    for name in (f"{split}.tsv", f"{split}.tsv.gz"):
        if (folder / "qrels" / name).is_file():
            return folder / "qrels" / name
    found = ", ".join(splits(folder)) or "none"
    raise InputError(f"{folder}: no split {split!r} (qrels/{split}.tsv); choose one of these: {found}")


def splits(folder: str | Path) -> list[str]:
    """List the splits that a BEIR folder has judgments for."""
    names = [path.name.removesuffix(".gz") for path in (Path(folder) / "qrels").glob("[!.]*")]
    return sorted({name.removesuffix(".tsv") for name in names if name.endswith(".tsv")})


def find_queries(folder: Path) -> Path:
    """Return the queries file of a BEIR folder."""
    for name in ("queries.jsonl", "queries.jsonl.gz"):
        if (folder / name).is_file():
            return folder / name
    raise InputError(f"{folder}: no queries.jsonl; a BEIR folder holds corpus.jsonl, queries.jsonl and qrels/")
