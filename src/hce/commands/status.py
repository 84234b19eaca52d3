"""`hce status`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hce.commands.common import IndexArgument, JsonOption, SeedOption, out, print_json

if TYPE_CHECKING:
    from hce.index.drift import Drift
    from hce.index.status import IndexStatus

ADVICE = {
    "ok": "nothing to do",
    "re-cluster": "hce rebuild grows the tree anew, without training",
    "retrain": "hce train on the documents there are now, then index with the new model",
    "unknown": "too little to go by",
}


def status(
    index: IndexArgument,
    drift: Annotated[
        bool, typer.Option("--drift/--no-drift", help="also measure whether it is time to retrain")
    ] = True,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Say what is in an index, what has changed since it was made, and whether it is time to retrain.

    Examples:
      hce status my-index
      hce status my-index --no-drift --json
    """
    from hce.index.index import Index

    with Index.open(index) as opened:
        found = opened.status()
        verdict = opened.drift(seed) if drift else None
    if as_json:
        print_json({**found.as_dict(), "drift": verdict.as_dict() if verdict else None})
        return
    for name, value in {**_lines(found), **(_drift_lines(verdict) if verdict else {})}.items():
        out.print(f"{name:<10} {value}", markup=False, soft_wrap=True)


def _lines(found: IndexStatus) -> dict[str, str]:
    base = f", trained from {found.base_encoder}" if found.base_encoder else ""
    changes = "change" if found.pending == 1 else "changes"
    pending = f", its snapshot {found.pending:,} {changes} behind" if found.pending else ""
    return {
        "documents": f"{found.documents:,} ({found.added:,} added and {found.removed:,} removed since it was made)",
        "encoder": f"{found.encoder} ({found.fingerprint[:12]}, {found.dim} dimensions{base})",
        "engine": f"{found.engine}, {found.dtype}{pending}",
        "tree": f"{found.tree_levels} levels" if found.tree_levels else "none",
        "on disk": f"{found.bytes / 1e6:,.1f} MB, format {found.format}",
        "created": found.created,
        "changed": found.changed,
    }


def _drift_lines(drift: Drift) -> dict[str, str]:
    """The verdict, and the numbers behind it."""
    lines = {"verdict": f"{drift.verdict}: {'; '.join(drift.reasons)} ({ADVICE[drift.verdict]})"}
    for name, kind in (("old", drift.old), ("new", drift.new)):
        if kind is not None:
            found = "unknown" if kind.found is None else f"{kind.found:.0%}"
            lines[f"  {name}"] = (
                f"{kind.documents:,} documents: cosine to a leaf {kind.cosine:.3f} ± {kind.spread:.3f}, "
                f"astray {kind.astray:.0%}, found by a piece of their text {found}"
            )
    return lines
