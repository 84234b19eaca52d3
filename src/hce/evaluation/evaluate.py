"""Evaluation: search for every judged query, and measure the rankings.

ir_measures computes the measures with trec_eval's own code.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import ir_measures
import numpy as np

from hce.data.corpus import Corpus
from hce.data.judgments import Qrels, Query
from hce.encoding.corpus_vectors import encode_corpus
from hce.encoding.encoder import Encoder
from hce.errors import InputError, wrong_type
from hce.evaluation.runs import Run, Scored
from hce.files import open_atomically
from hce.search.engine import nearest

DEFAULT_MEASURES = ("nDCG@10", "R@100")
CUTOFF = 100
VALUES_SUFFIXES = (".tsv", ".jsonl")
CAPPED = "R_cap"
SPELLINGS = {
    "nDCG": ("ndcg",),
    "R": ("r", "recall"),
    CAPPED: ("r_cap", "recall_cap", "capped_recall"),
    "RR": ("rr", "mrr"),
    "AP": ("ap", "map"),
    "Success": ("success", "hit"),
    "P": ("p", "precision"),
}
FAMILIES = {spelling: family for family, spellings in SPELLINGS.items() for spelling in spellings}
WITH_CUTOFF = ("R", CAPPED, "Success", "P")
KNOWN = (
    "nDCG@10, R@100 (recall@100), R_cap@100 (capped_recall@100), RR@10 (MRR@10), AP (MAP), Success@5 (hit@5), P@5; "
    "with any cut-off, which nDCG, RR and AP do not need"
)

logger = logging.getLogger(__name__)


class Searcher(Protocol):
    """Anything that ranks documents for queries, such as an `Index`."""

    def search(self, queries: Sequence[str], k: int) -> Sequence[Sequence[Any]]:
        """Find the k best documents of each query, as hits with `id` and `score`."""
        ...


@dataclass(frozen=True)
class DenseSearcher:
    """Exact search over a collection's vectors, of shape (N, n)."""

    encoder: Encoder
    ids: Sequence[str]
    vectors: np.ndarray

    @classmethod
    def of(cls, encoder: Encoder, corpus: Corpus, *, progress: bool = False) -> DenseSearcher:
        """Encode a corpus, and return a searcher for it."""
        return cls(encoder, corpus.ids, encode_corpus(encoder, corpus, progress=progress))

    def search(self, queries: Sequence[str], k: int) -> list[list[Scored]]:
        """Find the k nearest documents of each query, best first."""
        positions, scores = nearest(self.encode(queries), self.vectors, k)
        return [
            [Scored(self.ids[position], float(score)) for position, score in zip(*row, strict=True)]
            for row in zip(positions, scores, strict=True)
        ]

    def encode(self, queries: Sequence[str]) -> np.ndarray:
        """Encode queries to vectors of shape (queries, n)."""
        return self.encoder.encode(queries, "query")


@dataclass(frozen=True)
class Report:
    """A searcher's scores, by the names of measures as the caller spelled them.

    Attributes:
        means: each measure's mean over all judged queries; a query without hits or without positives counts as 0.
        per_query: each measure's value for each judged query.
        without_positives: judged queries without a grade above 0; every searcher scores 0 on them.
        without_hits: judged queries for which nothing was found.
    """

    means: dict[str, float]
    per_query: dict[str, dict[str, float]]
    without_positives: list[str] = field(default_factory=list)
    without_hits: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "  ".join(f"{name} {value:.4f}" for name, value in self.means.items())

    def write_values(self, path: Path) -> None:
        """Write each query's values, as .tsv or .jsonl."""
        names = list(self.per_query)
        with open_atomically(path) as file:
            if path.suffix == ".tsv":
                file.write("\t".join(["query", *names]) + "\n")
            for query_id in self.per_query[names[0]]:
                values = {name: self.per_query[name][query_id] for name in names}
                if path.suffix == ".tsv":
                    file.write("\t".join([query_id, *map(repr, values.values())]) + "\n")
                else:
                    file.write(json.dumps({"query": query_id, **values}, ensure_ascii=False) + "\n")


def evaluate(
    searcher: Searcher,
    queries: Mapping[str, Query],
    qrels: Qrels,
    measures: Iterable[str] = DEFAULT_MEASURES,
    *,
    depth: int = CUTOFF,
    drop_self: bool = True,
) -> Report:
    """Search for every judged query and measure the rankings.

    >>> from hce.data.text import Document
    >>> from hce.data.judgments import Judgment
    >>> corpus = Corpus.from_documents([Document("a", "red shoes"), Document("b", "blue hats")])
    >>> searcher = DenseSearcher.of(Encoder.load("static"), corpus)
    >>> queries = {"q": Query("q", "blue hats"), "r": Query("r", "red shoes")}
    >>> report = evaluate(searcher, queries, Qrels([Judgment("q", "b", 1), Judgment("r", "b", 1)]), ["RR@10"])
    >>> report.per_query
    {'RR@10': {'q': 1.0, 'r': 0.5}}
    >>> print(report)
    RR@10 0.7500

    Args:
        searcher: the searcher to measure.
        queries: queries by id; those without a judgment are skipped.
        qrels: the judgments.
        measures: names, see `parse_measure`.
        depth: how many hits to ask for; more if a measure has a deeper cut-off.
        drop_self: drop a hit with the query's own id: BEIR's rule for collections that contain their queries.

    Raises:
        InputError: an unknown measure, no judgments, or a judged query that is not among the queries.
    """
    if not isinstance(queries, Mapping):
        raise wrong_type(queries, "queries: give a mapping of ids to hce.Query")
    if not isinstance(qrels, Qrels):
        raise wrong_type(qrels, "qrels: give hce.Qrels")
    names = [measures] if isinstance(measures, str) else list(measures)
    depth = max([depth, *(parse_measure(name).cutoff or 0 for name in names)])
    run = rank(searcher, queries, qrels, depth, drop_self=drop_self)
    return score_run(run, qrels, names, drop_self=drop_self)


def rank(
    searcher: Searcher, queries: Mapping[str, Query], qrels: Qrels, depth: int = CUTOFF, *, drop_self: bool = True
) -> dict[str, list[Scored]]:
    """Search for every judged query, and keep the first `depth` hits."""
    unknown = [query_id for query_id in qrels if query_id not in queries]
    if unknown:
        raise InputError(
            f"{len(unknown):,} of {len(qrels):,} judged queries are not among the queries "
            f"(the first is {unknown[0]!r}); do queries and judgments match?"
        )
    answers = searcher.search([queries[query_id].text for query_id in qrels], depth + drop_self)
    run = {}
    for query_id, hits in zip(qrels, answers, strict=True):
        if len({hit.id for hit in hits}) < len(hits):
            raise InputError(f"the searcher finds a document twice for query {query_id!r}, so ranks mean nothing")
        run[query_id] = [Scored(hit.id, hit.score) for hit in hits]
    return kept_hits(run, depth, drop_self=drop_self)


def kept_hits(run: Run, depth: int | None = None, *, drop_self: bool = True) -> dict[str, list[Scored]]:
    """Return the first `depth` hits of each query; drop one with the query's own id."""
    return {
        query_id: [hit for hit in hits if not drop_self or hit.id != query_id][:depth] for query_id, hits in run.items()
    }


def score_run(run: Run, qrels: Qrels, measures: Iterable[str] = DEFAULT_MEASURES, *, drop_self: bool = True) -> Report:
    """Measure rankings, such as those that `hce.evaluation.runs.read_run` reads."""
    parsed = {name: parse_measure(name) for name in measures}
    if not qrels:
        raise InputError("there are no judgments to measure by")
    if run and not any(query_id in qrels for query_id in run):
        raise InputError(
            f"none of the {len(run):,} queries of the run (the first is {next(iter(run))!r}) "
            f"is among the {len(qrels):,} judged ones (the first is {next(iter(qrels))!r}); do run and judgments match?"
        )
    kept = kept_hits(run, drop_self=drop_self)
    values = measure_queries(kept, qrels, parsed.values())
    per_query = {name: values[measure] for name, measure in parsed.items()}
    return Report(
        means={name: sum(by_query.values()) / len(by_query) for name, by_query in per_query.items()},
        per_query=per_query,
        without_positives=[query_id for query_id in qrels if not qrels.positives(query_id)],
        without_hits=[query_id for query_id in qrels if not kept.get(query_id)],
    )


def check_documents(qrels: Qrels, documents: Collection[str], corpus_name: str) -> None:
    """Warn about relevant documents that the corpus lacks; fail if it lacks all."""
    relevant = {document_id for query_id in qrels for document_id in qrels.positives(query_id)}
    missing = sorted(relevant.difference(documents))
    if relevant and len(missing) == len(relevant):
        raise InputError(
            f"{corpus_name}: none of the {len(relevant):,} documents judged relevant (the first is {missing[0]!r}) "
            "is in the corpus; do judgments and corpus match?"
        )
    if missing:
        logger.warning(
            "%d of %d documents judged relevant are not in the corpus (the first is %r); they count as missed",
            len(missing),
            len(relevant),
            missing[0],
        )


class Measure(NamedTuple):
    """A family of measures, and its cut-off rank; None means the full ranking."""

    family: str
    cutoff: int | None

    def __str__(self) -> str:
        return self.family if self.cutoff is None else f"{self.family}@{self.cutoff}"


def parse_measure(name: str) -> Measure:
    """Parse a measure's name in any usual spelling, ignoring case.

    >>> [str(parse_measure(name)) for name in ("ndcg@10", "MRR@10", "hit@5", "recall@100", "map")]
    ['nDCG@10', 'RR@10', 'Success@5', 'R@100', 'AP']
    """
    parts = re.fullmatch(r"([a-z_]+)(?:@([1-9][0-9]{0,8}))?", name.strip().lower())
    family = FAMILIES.get(parts[1]) if parts else None
    if parts is None or family is None:
        raise InputError(f"unknown measure {name!r}; known are {KNOWN}")
    if parts[2] is None and family in WITH_CUTOFF:
        raise InputError(f"measure {name!r} needs a cut-off, such as {family}@10; known are {KNOWN}")
    return Measure(family, int(parts[2]) if parts[2] else None)


def measure_queries(run: Run, qrels: Qrels, measures: Iterable[Measure]) -> dict[Measure, dict[str, float]]:
    """Compute each measure for each judged query, in the judgments' order.

    A query without hits or without relevant documents counts as 0. A document without a judgment is not relevant.
    R@k divides by the number of relevant documents. BEIR's R_cap@k divides by at most k, so that 1 can be reached.
    """
    # Grades below 0 count as 0: trec_eval's memory breaks if a query has no other grades.
    judged = {query_id: {name: max(grade, 0) for name, grade in grades.items()} for query_id, grades in qrels.items()}
    # trec_eval breaks ties by document id. Distinct numbers that fall with the rank keep the searcher's order.
    ranks = {
        query_id: {hit.id: float(len(hits) - rank) for rank, hit in enumerate(hits)}
        for query_id, hits in run.items()
        if query_id in qrels
    }
    asked = {each: ir_measures.parse_measure(str(each).replace(CAPPED, "R")) for each in measures}
    values = {measure: dict.fromkeys(qrels, 0.0) for measure in asked.values()}
    for metric in ir_measures.iter_calc(list(values), judged, ranks) if values else ():
        values[metric.measure][metric.query_id] = float(metric.value)

    def value(measure: Measure, query_id: str) -> float:
        found, right = values[asked[measure]][query_id], len(qrels.positives(query_id))
        return round(found * right) / min(measure.cutoff or 1, right or 1) if measure.family == CAPPED else found

    return {measure: {query_id: value(measure, query_id) for query_id in qrels} for measure in asked}
