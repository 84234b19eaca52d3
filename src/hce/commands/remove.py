"""`hce remove`."""

from __future__ import annotations

from typing import Annotated

import typer

from hce.commands.common import IndexArgument, JsonOption, interruptible, out, print_json


def remove(
    index: IndexArgument,
    ids: Annotated[list[str], typer.Argument(help="ids of documents, or - to read them from stdin, one a line")],
    as_json: JsonOption = False,
) -> None:
    """Take documents out of an index: all that are named, or none if one of them is not there.

    Examples:
      hce remove my-index doc-17 doc-18
      hce remove my-index - < ids.txt
    """
    from hce.data.records import STDIN, read_lines
    from hce.index.index import Index

    if ids == [STDIN]:
        ids = [line.text for line in read_lines(STDIN) if line.text]
    with Index.open(index) as opened, interruptible("nothing was removed; the same command starts over"):
        count = opened.remove(ids)
        if as_json:
            print_json({"index": str(index), "removed": count, "documents": len(opened)})
        else:
            out.print(f"removed {count:,}; {len(opened):,} documents are in {index}", markup=False, soft_wrap=True)
