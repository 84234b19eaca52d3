"""What keeps an index in order: `hce rebuild`, `reindex`, `check`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hce.commands.common import (
    AtOption,
    IndexArgument,
    JsonOption,
    MemoryOption,
    answer,
    err,
    interruptible,
    known_encoder,
    out,
    print_json,
)
from hce.errors import InputError
from hce.memory import parse_size
from hce.progress import progress_bar

if TYPE_CHECKING:
    from hce.index.check import Checkup, Finding

SHOWN = 10  # findings of one part


def rebuild(
    path: IndexArgument,
    engine: Annotated[str | None, typer.Option(help="from now on: codes, exact or milvus", show_default=False)] = None,
    at: AtOption = None,
    refit: Annotated[bool, typer.Option(help="refit a table that was fitted to less than a quarter")] = True,
    tokens: Annotated[
        bool | None,
        typer.Option("--tokens/--no-tokens", help="keep a transformer's tokens from now on; default: as it was"),
    ] = None,
    memory: MemoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make all that is derived from an index's documents again: the tree and the engine.

    The documents do not change. A static table that was fitted to less than a quarter of them is fitted to all, and
    they are encoded again. A trained encoder does not change. The space of removed documents is given back.

    Examples:
      hce rebuild my-index
      hce rebuild my-index --engine exact
      hce rebuild my-index --engine milvus --at http://search.example.org:19530#papers
    """
    from hce.index.index import Index

    bound = None if memory is None else parse_size(memory)
    with Index.open(path) as index, interruptible("the documents are as they were; the same command starts over"):
        with progress_bar("loading", None, "modules"):
            from hce.index.create import keep_within  # with torch, which takes seconds to import

        if bound is not None:
            state = index.state
            keep_within(bound, len(index), state.manifest.dim, engine or state.derived.engine_name)
        index.rebuild(engine, at=at, refit=refit, tokens=tokens, progress=True)
        found = index.status()
    shown = f"{found.tree_levels} levels" if found.tree_levels else "no tree"
    line = f"rebuilt {path}: {found.documents:,} documents, {shown}, {found.engine} engine"
    answer(line, found.as_dict(), as_json)


def reindex(
    path: IndexArgument,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="DIR|NAME|HUB-ID",
            help="what `hce train` wrote, or any encoder",
            callback=known_encoder,
            show_default=False,
        ),
    ] = None,
    words_share: Annotated[
        float | None,
        typer.Option(help="weight of words in a hybrid search, 0 to 1; default: as `hce index` has it"),
    ] = None,
    undo: Annotated[
        bool, typer.Option("--undo", help="take up again what the index had before the last reindexing")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Give an index another encoder without a pause: it is searched, and documents come and go, all the while.

    Every document is encoded again while searches use the old vectors; then the new ones take over at once, also in a
    running `hce serve`. Interrupted, the same command goes on. Until `hce rebuild`, which gives the space
    back, --undo returns to the encoder that was there before, at once.

    Examples:
      hce reindex my-index -m my-new-model
      hce reindex my-index -m sentence-transformers/all-MiniLM-L6-v2
      hce reindex my-index --undo
    """
    if (model is None) != undo:
        raise InputError("give either --model with the new encoder, or --undo")
    if undo and words_share is not None:
        raise InputError("--undo takes up the share of words too that was there; leave --words-share out")
    from hce.index.index import Index

    going_on = f"{path} has the encoder that it had; the same command goes on"
    with Index.open(path) as index, interruptible(going_on):
        if model is None:
            index.undo_reindex(progress=True)
        is_new = model is None or index.reindex(model, words_share=words_share, progress=True)
        found = index.status()
    has = "has the encoder" if is_new else "had this encoder already:"
    shown = f"{found.encoder} ({found.fingerprint[:12]}, {found.dim} dimensions)"
    line = f"{path} {has} {shown}; {found.documents:,} documents"
    if found.earlier and is_new:
        line += f"\nbefore: {found.earlier}; hce reindex {path} --undo returns to it"
    answer(line, {**found.as_dict(), "reindexed": is_new}, as_json)


def check(
    folder: Annotated[Path, typer.Argument(help="the folder of an index or of a model", show_default=False)],
    repair: Annotated[
        bool, typer.Option("--repair", help="heal what can be made again, and add checksums where there are none")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Read all of an index or a model through, and say what is not as it was written; exit code 1 if anything is.

    Engine, words and tree can be made again from the documents, and vectors from their texts: --repair does that. Texts
    and the encoder are nowhere else, and have to come from a copy. A model
    without checksums is unknown; --repair adds them.

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
    healed, findings = _first_of_each(found.healed), _first_of_each(found.findings)
    for finding in healed:
        out.print(f"healed     {finding.part}: {finding.what}", soft_wrap=True)
    for finding in findings:
        line = f"{finding.state:<10} {finding.part}: {finding.what}"
        advice = "--repair heals it" if finding.can_heal and not repair else finding.remedy
        if finding.state == "unknown":
            advice = "" if repair else "--repair adds checksums"
        out.print(f"{line}; {advice}" if advice else line, soft_wrap=True)
    of = f"{found.documents:,} documents, " if found.kind == "index" else ""
    sound = "no damage is known" if found.findings else "all is as it was written"
    out.print(f"{found.path}: {of}{sound if found.is_sound else 'damaged'}", soft_wrap=True)
    if more := len(found.findings) + len(found.healed) - len(findings) - len(healed):
        err.print(f"--json lists {more:,} more")


def _first_of_each(findings: tuple[Finding, ...]) -> list[Finding]:
    """Return some findings of each part."""
    seen: Counter[tuple[str, str]] = Counter()
    shown = []
    for finding in findings:
        seen[finding.part, finding.state] += 1
        if seen[finding.part, finding.state] <= SHOWN:
            shown.append(finding)
    return shown
