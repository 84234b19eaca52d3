"""`hce search`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from hce.commands.common import IndexArgument, JsonOption, out, print_json

if TYPE_CHECKING:
    from hce.index.hits import Hit

SNIPPET = 160  # characters


def search(
    index: IndexArgument,
    text: Annotated[str, typer.Argument(help="what to look for, or - to read it from stdin", show_default=False)],
    k: Annotated[int, typer.Option("-k", help="how many documents to show")] = 10,
    where: Annotated[
        list[str] | None,
        typer.Option("--where", "-w", metavar="CONDITION", help="on metadata: 'lang=en', 'year>=2000', 'tag in a,b'"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the documents of an index that are closest in meaning to a text.

    Several --where conditions must all hold.

    Examples:
      hce search my-index "how do plants make sugar" -k 5
      hce search my-index "court rulings" --where 'year>=2000' --where 'year<2010' --where 'lang in en,fr'
      hce search my-index - --json < question.txt
    """
    from hce.data.records import STDIN, read_lines
    from hce.index.filters import parse_clauses
    from hce.index.index import Index

    if text == STDIN:
        text = "\n".join(line.text for line in read_lines(STDIN))
    conditions = parse_clauses(where) if where else None
    with Index.open(index) as opened:
        hits = opened.search(text, k, conditions)
    if as_json:
        print_json({"query": text, "hits": [hit._asdict() for hit in hits]})
        return
    for hit in hits:
        out.print(_line(hit), soft_wrap=True)
    if not hits:
        out.print("no document fulfils the conditions" if conditions else "the index is empty")


def _line(hit: Hit) -> Text:
    """Rank, score, id and title, and the beginning of the text below them."""
    words = " ".join(hit.text.split())
    snippet = words if len(words) <= SNIPPET else words[:SNIPPET].rsplit(" ", 1)[0] + " …"
    line = Text(f"{hit.rank:>3}  {hit.score:.4f}  ").append(hit.id, style="bold")
    if hit.title:
        line.append(f"  {' '.join(hit.title.split())}")
    return line.append(f"\n     {snippet}", style="dim") if snippet else line
