"""`hce rebuild`."""

from __future__ import annotations

from typing import Annotated

import typer

from hce.commands.common import IndexArgument, JsonOption, interruptible, out, print_json


def rebuild(
    index: IndexArgument,
    engine: Annotated[str | None, typer.Option(help="from now on: flat, hnsw, ivf or tree", show_default=False)] = None,
    dtype: Annotated[str | None, typer.Option(help="from now on: float32, float16 or int8", show_default=False)] = None,
    as_json: JsonOption = False,
) -> None:
    """Make all that is derived from an index's documents anew: the tree is grown again, the engine is built again.

    Documents, vectors and encoder stay as they are. The space of removed documents is given back.

    Examples:
      hce rebuild my-index
      hce rebuild my-index --engine tree
    """
    from hce.index.index import Index

    with Index.open(index) as opened, interruptible("the documents are as they were; the same command starts over"):
        opened.rebuild(engine, dtype)
        found = opened.status()
        if as_json:
            print_json(found.as_dict())
        else:
            shown = f"{found.tree_levels} levels" if found.tree_levels else "no tree"
            out.print(
                f"rebuilt {index}: {found.documents:,} documents, {shown}, {found.engine} engine",
                markup=False,
                soft_wrap=True,
            )
