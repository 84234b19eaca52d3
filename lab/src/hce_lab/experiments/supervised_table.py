"""The supervised table: HCE trained jointly on labeled queries and documents, its ablations, and its rivals.

    python -m hce_lab supervised_table data/squad --splits test,test_seen --output docs/results
    python -m hce_lab supervised_table data/squad --generated squad-queries.jsonl

Systems named +qg also train on generated queries; they need a file of them (`hce generate-queries`). Each system is
trained once per seed, and measured on all splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hce.errors import InputError
from hce_lab.comparison.bench import Bench
from hce_lab.comparison.systems import SYSTEMS, choose
from hce_lab.comparison.table import Comparison, ComparisonTable, notes
from hce_lab.experiments.common import MEASURES, bench_of, command_line, names, run_systems, tested
from hce_lab.experiments.page import Page, seeds_note, table

ABOUT = """
All systems learn from the same labeled queries, start from the same encoder and choose by the same dev queries. hce is
what `hce train` does, joint training on labeled queries and pseudo-queries; hce-eq5 is the same with the paper's level
losses (HCE-J). Splits differ in what training has seen of their documents: in squad, which stands in for NQ320k, the
documents of test_seen have training queries and those of test have none. Look at hce beside no-tree, the same training
without the tree, beside ct, which mines its negatives from all documents, and at what each loses from seen to unseen.
"""
SUPERVISED = names("bm25,untrained,fitted,dpr,ct,tas-b,pefa-xs,pefa-xl,no-tree,no-cotrain,hce-s,hce-eq5,hce")
WITH_GENERATED = ["bm25+qg", "dpr+qg", "no-tree+qg", "hce+qg"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run missing systems, then show all results."""
    parser = command_line("supervised_table", __doc__ or "", seeds=3)
    parser.add_argument("--splits", type=names, default=["test"], help="each gets a table of its own")
    parser.add_argument("--systems", type=names, help="with commas between; default: all that can be run")
    parser.add_argument("--generated", type=Path, help="a file of generated queries")
    parser.add_argument("--measures", type=names, default=MEASURES, help="tested by the first")
    arguments = parser.parse_args(argv)
    bench = bench_of(arguments, arguments.folder, arguments.measures, generated=arguments.generated)
    if bench.task.pairs is None:
        raise InputError(f"{arguments.folder}: no train split; this table is of systems that learn from labels")
    systems = _systems(bench, arguments.systems)
    tables, below = {}, [seeds_note(arguments)]
    for split, comparison in run_systems(bench, systems, arguments).items():
        by_first = tested(comparison)
        heading = f"{bench.collection}, {split}: {len(bench.tested[split].qrels):,} queries"
        tables[heading] = _table(comparison, by_first)
        below += [f"{split}: {note}" for note in notes(by_first)]
    below += [f"{system}: {SYSTEMS[system].about}" for system in systems]
    Page("supervised_table", "With labels", ABOUT, tables, below).show(parser, arguments)


def _systems(bench: Bench, wanted: list[str] | None) -> list[str]:
    """Return the systems asked for, else all that this collection and encoder allow."""
    is_static = bench.encoder.table is not None
    able = [name for name in SUPERVISED + WITH_GENERATED if not SYSTEMS[name].lacks(bench.task, is_static=is_static)]
    return choose(wanted or able, bench.task, is_static=is_static)


def _table(comparison: Comparison, by_first: ComparisonTable) -> str:
    first, *others = comparison.measures
    rows = []
    for row in by_first.rows:
        scores = [row.score(first), *(str(comparison.score(row.system, measure)) for measure in others)]
        rows.append([row.name, *scores, f"{row.training_seconds / 60:.1f} min" if row.training_seconds else "–"])
    return table(["system", *comparison.measures, "training"], rows)
