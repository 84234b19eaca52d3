"""`hce add`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hce.commands.common import IndexArgument, JsonOption, interruptible, out, print_json


def add(
    index: IndexArgument,
    files: Annotated[list[Path], typer.Argument(help="the documents, in any format that `hce index` takes, or -")],
    update: Annotated[bool, typer.Option("--update", help="replace documents whose ids are there already")] = False,
    as_json: JsonOption = False,
) -> None:
    """Add documents to an index: all of them, or none if one of them is not sound.

    Only texts that are new are encoded. When the command has ended, the documents survive a crash.

    Examples:
      hce add my-index new.jsonl
      hce add my-index corrected.jsonl --update
      cat new.jsonl | hce add my-index -
    """
    from hce.data.corpus import Corpus
    from hce.index.index import Index

    with Index.open(index) as opened, interruptible("nothing was added; the same command starts over"):
        batches = [Corpus.load(file) for file in files]
        count = (opened.update if update else opened.add)(*batches, progress=True)
        if as_json:
            print_json({"index": str(index), "added": count, "documents": len(opened)})
        else:
            out.print(f"added {count:,}; {len(opened):,} documents are in {index}", markup=False, soft_wrap=True)
