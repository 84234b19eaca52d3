"""`hce check`: is all of an index or a model as it was written, and what of it can be healed?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hce.commands.common import JsonOption, err, interruptible, out, print_json
from hce.errors import InputError

if TYPE_CHECKING:
    from hce.index.check import Checkup, Finding

SHOWN = 10  # findings of one part


def check(
    folder: Annotated[Path, typer.Argument(help="the folder of an index or of a model", show_default=False)],
    repair: Annotated[
        bool, typer.Option("--repair", help="heal what can be made anew, and add checksums where there are none")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Read all of an index or a model through, and say what is not as it was written; exit code 1 if anything is.

    Engine, words and tree can be made anew from the documents, and vectors from their texts: --repair does that. Texts
    and the encoder are nowhere else, and have to come from a copy. What an earlier version wrote has no checksums: that
    is said, and --repair adds them, for things as they are then.

    Examples:
      hce check my-index
      hce check my-index --repair
      hce check my-model --json
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: neither an index nor a model is there (no such folder); name the folder of one")

    from hce.index.check import check as checked

    with interruptible("nothing is half repaired; the same command starts over"):
        found = checked(folder, repair=repair, progress=True)
    if as_json:
        print_json(found.as_dict())
    else:
        _print(found, repair)
    if not found.is_sound:
        raise typer.Exit(1)


def _print(found: Checkup, repair: bool) -> None:
    for finding in _first_of_each(found.healed):
        out.print(f"healed     {finding.part}: {finding.what}", soft_wrap=True)
    for finding in _first_of_each(found.findings):
        line = f"{finding.state:<10} {finding.part}: {finding.what}"
        advice = "--repair heals it" if finding.heals and not repair else finding.remedy
        if finding.state == "unknown":
            advice = "" if repair else "--repair adds checksums"
        out.print(f"{line}; {advice}" if advice else line, soft_wrap=True)
    of = f"{found.documents:,} documents, " if found.kind == "index" else ""
    verdict = "all is as it was written" if found.is_sound else "damaged"
    if found.is_sound and found.findings:
        verdict = "no damage is known"
    out.print(f"{found.path}: {of}{verdict}", soft_wrap=True)
    more = len(found.findings) + len(found.healed) - sum(1 for _ in _first_of_each((*found.findings, *found.healed)))
    if more > 0:
        err.print(f"--json lists {more:,} more")


def _first_of_each(findings: tuple[Finding, ...]) -> list[Finding]:
    """Return some findings of each part."""
    seen: dict[tuple[str, str], int] = {}
    shown = []
    for finding in findings:
        key = (finding.part, finding.state)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= SHOWN:
            shown.append(finding)
    return shown
