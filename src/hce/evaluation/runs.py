"""TREC run files: rankings as lines of six columns, the format of trec_eval.

trec_eval ignores the rank column. It sorts by score in single precision, and equal scores by descending document id. So
rankings are written with scores that fall strictly in single precision, and files are read into trec_eval's order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hce.data.records import Line, read_lines, shown_path
from hce.errors import InputError
from hce.files import open_text

COLUMNS = "query Q0 document rank score tag"
LEAST_STEP = float(np.finfo(np.float32).tiny)  # some machines round smaller numbers to zero


class Scored(NamedTuple):
    """A document's id and its score for a query; more is better."""

    id: str
    score: float


Run = Mapping[str, Sequence[Scored]]  # the ranking for each query id, best first


def read_run(path: str | Path) -> dict[str, list[Scored]]:
    """Read a run, plain or .gz, and sort its hits as trec_eval does."""
    scores: dict[str, dict[str, float]] = {}
    for line in read_lines(path):
        if line.text.strip():
            query_id, document_id, score = _parse_line(line)
            if document_id in scores.setdefault(query_id, {}):
                raise InputError(
                    f"{line.where}: query {query_id!r} finds document {document_id!r} a second time; keep one"
                )
            scores[query_id][document_id] = score
    if not scores:
        raise InputError(f"{shown_path(path)}: the run has no hits in it; check the path")
    return {query_id: _sorted_hits(found) for query_id, found in scores.items()}


def write_run(path: str | Path, run: Run, tag: str = "hce") -> None:
    """Write a run atomically, compressed if the name ends in .gz.

    Rankings keep their order: a score that does not fall is lowered by the smallest step that makes it fall.
    """
    if not any(run.values()):
        raise InputError(f"{path}: not written, as no query has a hit")
    tag = _one_word(tag, "tag")
    with open_text(path) as file:
        for query_id, hits in run.items():
            scores = falling_scores([hit.score for hit in hits])
            for rank, (hit, score) in enumerate(zip(hits, scores, strict=True), start=1):
                ids = _one_word(query_id, "query id"), _one_word(hit.id, "document id")
                file.write(f"{ids[0]} Q0 {ids[1]} {rank} {score!s} {tag}\n")


def falling_scores(scores: Sequence[float]) -> np.ndarray:
    """Return the scores in float32; lower each that is not below the one before it."""
    with np.errstate(over="ignore"):
        falling = np.array(scores, dtype=np.float32)
    if not np.isfinite(falling).all():
        raise InputError(f"score {scores[int(np.argmin(np.isfinite(falling)))]} is not finite in float32; change it")
    if len(falling) and not (np.diff(falling) < 0).all():
        for rank in range(1, len(falling)):
            above = falling[rank - 1]
            # The next float below may be subnormal, so a score falls by at least `LEAST_STEP`.
            highest = min(np.nextafter(above, np.float32(-np.inf)), np.float32(above - LEAST_STEP))
            falling[rank] = min(falling[rank], highest)
    return falling


def _parse_line(line: Line) -> tuple[str, str, float]:
    columns = line.text.split()
    if len(columns) != len(COLUMNS.split()):
        raise InputError(f"{line.where}: {len(columns)} columns; a line of a TREC run has 6: {COLUMNS}")
    try:
        score = float(columns[4])
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise InputError(f"{line.where}: the score {columns[4]!r} is not a number; a line of a run is: {COLUMNS}")
    return columns[0], columns[2], score


def _sorted_hits(found: Mapping[str, float]) -> list[Scored]:
    with np.errstate(over="ignore"):
        single = np.array(list(found.values())).astype(np.float32).tolist()
    ranked = sorted(zip(single, found, strict=True), reverse=True)
    return [Scored(document_id, found[document_id]) for _, document_id in ranked]


def _one_word(name: str, what: str) -> str:
    if name.split() != [name]:
        raise InputError(f"{what} {name!r} is empty or holds white space, which separates a run's columns; rename it")
    return name
