"""Comparison: what several systems scored on the same queries, as one table with significance.

Each system is tested against the best rival, which is the best system that trains without the tree. The tests are
paired by query, with Holm's correction over all systems of the table. This module uses only results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any, NamedTuple

from hce.evaluation.significance import Paired, compare_paired, compare_several

ALPHA = 0.05
BETTER, WORSE, REFERENCE = "▲", "▼", "◆"
COSTS = ("training_seconds", "indexing_seconds", "search_ms", "index_bytes")  # fields of `Result` and of `Row`


@dataclass(frozen=True)
class Result:
    """The measures of one system with one seed; `hce_lab.comparison.task.Built` explains the rest.

    Attributes:
        system: the system's name.
        seed: the seed of its training.
        per_query: each measure's value for each query.
        search_ms: milliseconds per query, when all are searched in one call.
    """

    system: str
    seed: int
    per_query: dict[str, dict[str, float]]
    training_seconds: float
    indexing_seconds: float
    search_ms: float
    index_bytes: int
    facts: dict[str, Any] = field(default_factory=dict)


class Score(NamedTuple):
    """A system's mean over seeds and queries, and the standard deviation over seeds."""

    mean: float
    spread: float

    @classmethod
    def of(cls, means: Sequence[float]) -> Score:
        """Compute the score from the means of the seeds."""
        return cls(fmean(means), stdev(means) if len(means) > 1 else 0.0)

    def __str__(self) -> str:
        return f"{self.mean:.4f}" + (f" ± {self.spread:.4f}" if self.spread else "")


@dataclass(frozen=True)
class Row:
    """One system of the table; `COSTS` are means over its seeds.

    Attributes:
        system: the system's name.
        about: the system in one line.
        scores: the score by each measure.
        is_reference: whether this is the best rival, which the others are tested against.
        versus: the test against the best rival by each measure; p has Holm's correction.
        facts: the facts of the first seed.
        fallbacks: the number of seeds whose training was discarded, in words; empty for none.
    """

    system: str
    about: str
    scores: dict[str, Score]
    is_reference: bool
    versus: dict[str, Paired]
    training_seconds: float
    indexing_seconds: float
    search_ms: float
    index_bytes: float
    facts: dict[str, Any]
    fallbacks: str = ""

    @property
    def name(self) -> str:
        """The system's name, and for how many seeds its training was discarded."""
        return f"{self.system} ({self.fallbacks})" if self.fallbacks else self.system

    def mark(self, measure: str) -> str:
        """Return the mark of the best rival, or of a significant difference to it."""
        if self.is_reference:
            return REFERENCE
        if measure not in self.versus or self.versus[measure].p_holm >= ALPHA:
            return ""
        return BETTER if self.versus[measure].difference > 0 else WORSE

    def score(self, measure: str) -> str:
        """Return the score by a measure as text, with its mark."""
        return f"{self.scores[measure]} {self.mark(measure)}".rstrip()


class Effect(NamedTuple):
    """The effect of the tree: the test of a system with it against the same without it."""

    with_tree: str
    without: str
    measure: str
    paired: Paired


@dataclass(frozen=True)
class Comparison:
    """Everything that was measured, in the order of the table.

    Attributes:
        about: collection, encoder and budget, in words.
        measures: the names of the measures; the first one determines the best rival.
        systems: a description of each system, by name.
        ours: the systems that train with the tree.
        results: the results of every system and seed.
        pairs: systems that differ only in the tree: the one with it, the one without it.
    """

    about: dict[str, str]
    measures: tuple[str, ...]
    systems: dict[str, str]
    ours: frozenset[str]
    results: tuple[Result, ...]
    pairs: tuple[tuple[str, str], ...] = ()

    def results_of(self, system: str) -> list[Result]:
        """Return the results of a system, one per seed."""
        return [result for result in self.results if result.system == system]

    def per_query(self, system: str, measure: str) -> dict[str, float]:
        """Return a system's score for each query, as the mean over seeds."""
        found = [result.per_query[measure] for result in self.results_of(system)]
        return {query_id: fmean(values[query_id] for values in found) for query_id in found[0]}

    def score(self, system: str, measure: str) -> Score:
        """Return a system's mean over seeds and queries, and the spread of its seeds."""
        return Score.of([fmean(result.per_query[measure].values()) for result in self.results_of(system)])

    def fallbacks(self, system: str) -> str:
        """Describe for how many seeds training was discarded; empty for none."""
        trained = [result.facts.get("trained", True) for result in self.results_of(system)]
        if all(trained):
            return ""
        return "not trained" + (f" in {trained.count(False)} of {len(trained)} seeds" if len(trained) > 1 else "")

    @property
    def best_rival(self) -> str | None:
        """The best system without the tree, by the first measure; None without a comparison."""
        rivals = [name for name in self.systems if name not in self.ours]
        if not rivals or len(self.systems) < 2:
            return None
        return max(rivals, key=lambda name: self.score(name, self.measures[0]).mean)


class ComparisonTable(NamedTuple):
    """A comparison with its tests, which take time to compute.

    Attributes:
        comparison: what was measured.
        rows: one for each system.
        effects: the effect of the tree, for each of the pairs and measures.
    """

    comparison: Comparison
    rows: list[Row]
    effects: list[Effect]


def table(comparison: Comparison) -> ComparisonTable:
    """Test every system against the best rival, and each pair with and without tree."""
    scored = comparison.per_query
    effects = [
        Effect(one, other, measure, compare_paired(scored(one, measure), scored(other, measure)))
        for one, other in comparison.pairs
        for measure in comparison.measures
    ]
    return ComparisonTable(comparison, _rows(comparison), effects)


def _rows(comparison: Comparison) -> list[Row]:
    versus = {measure: _versus_rival(comparison, measure) for measure in comparison.measures}
    return [
        _row(comparison, name, {measure: found[name] for measure, found in versus.items() if name in found})
        for name in comparison.systems
    ]


def _versus_rival(comparison: Comparison, measure: str) -> dict[str, Paired]:
    """Test every other system against the best rival; nothing without a rival."""
    rival = comparison.best_rival
    if rival is None:
        return {}
    reference = comparison.per_query(rival, measure)
    others = [name for name in comparison.systems if name != rival]
    return compare_several({name: (comparison.per_query(name, measure), reference) for name in others})


def _row(comparison: Comparison, name: str, versus: dict[str, Paired]) -> Row:
    results = comparison.results_of(name)
    return Row(
        system=name,
        about=comparison.systems[name],
        scores={measure: comparison.score(name, measure) for measure in comparison.measures},
        is_reference=name == comparison.best_rival,
        versus=versus,
        facts=results[0].facts,
        fallbacks=comparison.fallbacks(name),
        **{cost: fmean(getattr(result, cost) for result in results) for cost in COSTS},
    )


def header(measures: Sequence[str]) -> list[str]:
    """Return the column names for `table_cells`."""
    return ["system", *measures, "training", "indexing", "search", "index"]


def table_cells(row: Row, measures: Sequence[str]) -> list[str]:
    """Return the cells of a row as text."""
    return [
        row.name,
        *(row.score(measure) for measure in measures),
        _shown_seconds(row.training_seconds),
        _shown_seconds(row.indexing_seconds),
        f"{row.search_ms:.2f} ms",
        f"{row.index_bytes / 1e6:,.1f} MB",
    ]


def notes(table: ComparisonTable) -> list[str]:
    """Return the notes below the table: the marks, and the effect of the tree."""
    lines = []
    rival = table.comparison.best_rival
    if rival is not None:
        lines.append(
            f"{REFERENCE} the best rival ({rival}); {BETTER} better and {WORSE} worse than it, p < {ALPHA} "
            "(paired randomization test, Holm's correction)"
        )
    if any(row.fallbacks for row in table.rows):
        lines.append(
            "not trained: held-out queries did not call the training better, so that the encoder it started from was "
            "kept and stands in the table"
        )
    for one, other, measure, paired in table.effects:
        fallen = [f"{name} was {why}" for name in (one, other) if (why := table.comparison.fallbacks(name))]
        lines.append(
            f"the tree ({one} less {other}): {measure} {paired.difference:+.4f}, "
            f"95 % between {paired.low:+.4f} and {paired.high:+.4f}, p = {paired.p:.4f}; "
            f"{paired.better} queries better, {paired.worse} worse, {paired.equal} equal"
            + (f"; this is not the tree's doing alone: {', '.join(fallen)}" if fallen else "")
        )
    return lines


def as_markdown(table: ComparisonTable) -> str:
    """Return the table and its notes as Markdown."""
    comparison = table.comparison
    columns = header(comparison.measures)
    rows = [columns, ["---", *["---:"] * (len(columns) - 1)]]
    rows += [table_cells(row, comparison.measures) for row in table.rows]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    facts = [f"- {name}: {value}" for name, value in comparison.about.items()]
    systems = [f"- **{name}**: {text}" for name, text in comparison.systems.items()]
    return "\n".join([*facts, "", *lines, "", *(f"- {note}" for note in notes(table)), "", *systems, ""])


def as_json(table: ComparisonTable) -> dict[str, Any]:
    """Return the table and its background for JSON."""
    comparison = table.comparison
    return {
        "about": comparison.about,
        "measures": list(comparison.measures),
        "seeds": sorted({result.seed for result in comparison.results}),
        "best_rival": comparison.best_rival,
        "rows": [_row_as_json(row) for row in table.rows],
        "tree": [
            {"with": one, "without": other, "measure": measure, **paired._asdict()}
            for one, other, measure, paired in table.effects
        ],
    }


def _row_as_json(row: Row) -> dict[str, Any]:
    return {
        "system": row.system,
        "about": row.about,
        "scores": {measure: score._asdict() for measure, score in row.scores.items()},
        "versus_best_rival": {measure: compared._asdict() for measure, compared in row.versus.items()},
        **{cost: getattr(row, cost) for cost in COSTS},
        "facts": row.facts,
        "fallbacks": row.fallbacks,
    }


def _shown_seconds(seconds: float) -> str:
    return "–" if not seconds else f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.1f} min"
