"""Measures by name: the value of each for each query, through ir_measures (trec_eval's own code) where it has it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import ir_measures

from hce.data.judgments import Qrels
from hce.errors import InputError
from hce.evaluation.runs import Run

FAMILIES = {
    "ndcg": "nDCG",
    "r": "R",
    "recall": "R",
    "r_cap": "R_cap",
    "recall_cap": "R_cap",
    "capped_recall": "R_cap",
    "rr": "RR",
    "mrr": "RR",
    "ap": "AP",
    "map": "AP",
    "success": "Success",
    "hit": "Success",
    "p": "P",
    "precision": "P",
}
WITH_CUTOFF = ("R", "R_cap", "Success", "P")
CAPPED = "R_cap"
KNOWN = (
    "nDCG@10, R@100 (recall@100), R_cap@100 (capped_recall@100), RR@10 (MRR@10), AP (MAP), Success@5 (hit@5), P@5; "
    "with any cut-off, which nDCG, RR and AP can do without"
)


class Measure(NamedTuple):
    """A family of measures, and how far down the ranking to look; None is all the way."""

    family: str
    cutoff: int | None

    def __str__(self) -> str:
        return self.family if self.cutoff is None else f"{self.family}@{self.cutoff}"


def parse_measure(name: str) -> Measure:
    """Read a measure's name, of any of the usual spellings, in capitals or not.

    >>> [str(parse_measure(name)) for name in ("ndcg@10", "MRR@10", "hit@5", "recall@100", "map")]
    ['nDCG@10', 'RR@10', 'Success@5', 'R@100', 'AP']

    Raises:
        InputError: there is no such measure; the message lists those that there are.
    """
    parts = re.fullmatch(r"([a-z_]+)(?:@([1-9][0-9]{0,8}))?", name.strip().lower())
    family = FAMILIES.get(parts[1]) if parts else None
    if parts is None or family is None:
        raise InputError(f"unknown measure {name!r}; known are {KNOWN}")
    if parts[2] is None and family in WITH_CUTOFF:
        raise InputError(f"measure {name!r} needs a cut-off, such as {family}@10; known are {KNOWN}")
    return Measure(family, int(parts[2]) if parts[2] else None)


def measure_queries(run: Run, qrels: Qrels, measures: Iterable[Measure]) -> dict[Measure, dict[str, float]]:
    """Compute the value of each measure for each judged query, in the order of the judgments.

    A query that has no hits, or no relevant document to hit, counts 0. Documents without a judgment are taken for not
    relevant, hits for queries without judgments for nothing.
    """
    values = {measure: dict.fromkeys(qrels, 0.0) for measure in measures}
    through = {ir_measures.parse_measure(str(measure)): measure for measure in values if measure.family != CAPPED}
    # Below 0 is not relevant either, and trec_eval's memory breaks where a query has no other grades.
    judged = {
        query_id: {document_id: max(grade, 0) for document_id, grade in grades.items()}
        for query_id, grades in qrels.items()
    }
    # trec_eval breaks ties by document id; falling ranks in place of scores keep the ranking's own order.
    ranks = {
        query_id: {hit.id: float(len(hits) - rank) for rank, hit in enumerate(hits)}
        for query_id, hits in run.items()
        if query_id in qrels
    }
    for metric in ir_measures.iter_calc(list(through), judged, ranks) if through else ():
        values[through[metric.measure]][metric.query_id] = float(metric.value)
    for measure in values:
        if measure.family == CAPPED and measure.cutoff:
            for query_id in qrels:
                ranked = [hit.id for hit in run.get(query_id, ())]
                values[measure][query_id] = capped_recall(ranked, qrels[query_id], measure.cutoff)
    return values


def capped_recall(ranked: Sequence[str], grades: Mapping[str, int], cutoff: int) -> float:
    """Divide the number of relevant documents among the first k by k or by all there are, whichever is less.

    BEIR's recall_cap: 1 can be reached also where a query has more than k relevant documents, with which R@k cannot.
    """
    positives = {document_id for document_id, grade in grades.items() if grade > 0}
    if not positives:
        return 0.0
    return len(positives.intersection(ranked[:cutoff])) / min(cutoff, len(positives))
