"""`hce reindex`: another encoder for an index, while it is searched and written to."""

from __future__ import annotations

from typing import Annotated

import typer

from hce.commands.common import IndexArgument, JsonOption, interruptible, out, print_json
from hce.errors import InputError


def reindex(
    index: IndexArgument,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="DIR|NAME|HUB-ID",
            help="what `hce train` wrote, or any encoder",
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

    Every document is encoded anew beside the vectors in force; then both change places at one stroke, which a running
    `hce serve` takes up by itself. Interrupted, the same command goes on. Until `hce rebuild`, which gives the space
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

    going_on = f"{index} has the encoder that it had; the same command goes on"
    with Index.open(index) as opened, interruptible(going_on):
        if model is None:
            opened.undo_reindex(progress=True)
            is_new = True
        else:
            is_new = opened.reindex(model, words_share=words_share, progress=True)
        found = opened.status()
    if as_json:
        print_json({**found.as_dict(), "reindexed": is_new})
        return
    shown = f"{found.encoder} ({found.fingerprint[:12]}, {found.dim} dimensions)"
    done = "has the encoder" if is_new else "had this encoder already:"
    out.print(f"{index} {done} {shown}; {found.documents:,} documents", soft_wrap=True)
    if found.earlier and is_new:
        out.print(f"before: {found.earlier}; hce reindex {index} --undo returns to it", soft_wrap=True)
