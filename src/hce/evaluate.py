"""Measures: how well a searcher ranks the documents judged relevant, through ir_measures (trec_eval's code)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import ir_measures

from hce.dense import Scored
from hce.errors import InputError
from hce.judgments import Qrels, Query

DEFAULT_MEASURES = ("nDCG@10", "R@100")
CUTOFF = 100


class Searcher(Protocol):
    """Anything that ranks documents for queries."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Scored]]:
        """The k best documents of each query, best first."""
        ...


@dataclass(frozen=True)
class Report:
    """What a searcher scored.

    Attributes:
        means: each measure's mean over all judged queries; a query without hits counts 0.
        per_query: each measure's value for each query.
    """

    means: dict[str, float]
    per_query: dict[str, dict[str, float]]

    def __str__(self) -> str:
        return "  ".join(f"{name} {value:.4f}" for name, value in self.means.items())


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

    Args:
        searcher: what is measured.
        queries: by id.
        qrels: the judgments; queries without any are not asked.
        measures: names as ir_measures spells them.
        depth: how many hits to ask for; more where a measure's cut-off is deeper.
        drop_self: drop a hit whose id is the query's own, BEIR's rule for collections that contain their queries.
    """
    parsed = [_parse_measure(name) for name in measures]
    depth = max(depth, *(int(measure.params.get("cutoff") or 0) for measure in parsed))
    asked = [query_id for query_id in qrels if query_id in queries]
    hits = searcher.search([queries[query_id].text for query_id in asked], depth + drop_self)
    run: dict[str, dict[str, float]] = {}
    for query_id, ranked in zip(asked, hits, strict=True):
        kept = [hit for hit in ranked if not (drop_self and hit.id == query_id)][:depth]
        # trec_eval breaks ties by document id; falling ranks in place of scores keep the searcher's own order.
        run[query_id] = {hit.id: float(len(kept) - rank) for rank, hit in enumerate(kept)}
    per_query: dict[str, dict[str, float]] = {str(measure): dict.fromkeys(qrels, 0.0) for measure in parsed}
    judged = {query_id: dict(qrels[query_id]) for query_id in qrels}
    for metric in ir_measures.iter_calc(parsed, judged, run):
        per_query[str(metric.measure)][metric.query_id] = float(metric.value)
    means = {name: sum(values.values()) / len(values) for name, values in per_query.items()}
    return Report(means, per_query)


def _parse_measure(name: str) -> ir_measures.measures.Measure:
    try:
        return ir_measures.parse_measure(name)
    except (NameError, ValueError, SyntaxError) as error:
        raise InputError(f"unknown measure {name!r}: give for example nDCG@10, R@100, RR@10, AP, Success@5") from error
