"""`hce tree`: the outline of a corpus."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hce.commands.common import (
    EncoderOption,
    JsonOption,
    SeedOption,
    err,
    out,
    print_json,
    with_reading,
)
from hce.data.records import USUAL, Reading

if TYPE_CHECKING:
    from hce.tree.hierarchy import Hierarchy


@with_reading
def tree(
    path: Annotated[
        Path, typer.Argument(help="a model, an index or a saved tree, or a corpus to grow one from", show_default=False)
    ],
    encoder: EncoderOption = "static",
    branching: Annotated[int, typer.Option("--branching", "-b", help="children of a node; 0 chooses for depth 3")] = 0,
    levels: Annotated[int, typer.Option("--levels", help="how many levels to show")] = 2,
    most: Annotated[int, typer.Option("--most", help="how many children of a node to show")] = 8,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="also save the tree to this new folder")] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    reading: Reading = USUAL,
) -> None:
    """Show the tree of a corpus: its outline, with the words that set each part apart.

    With --json, an index and a corpus name their documents by id, and a model by their position in its corpus, from 0.

    Examples:
      hce tree docs.jsonl
      hce tree my-model --levels 3
      hce tree docs.csv --branching 8 --json > tree.json
    """
    from hce.files import require_new, require_parent
    from hce.index.tree import hierarchy_folder
    from hce.tree.hierarchy import Hierarchy

    if output is not None:
        require_parent(output)
        require_new(output)
    saved = hierarchy_folder(path)
    if saved is not None:
        hierarchy, ids = Hierarchy.load(saved), _ids(path, saved) if as_json else None
    else:
        hierarchy, ids = _grow_tree(path, encoder, branching, seed, reading)
    from hce.tree.names import nested, outline  # with scipy

    if output is not None:
        hierarchy.save(output)
        err.print(f"saved to {output}")
    if as_json:
        summaries = [summary._asdict() for summary in hierarchy.describe()]
        print_json({"levels": summaries, "tree": nested(hierarchy, ids)})
    else:
        out.print(outline(hierarchy, levels=levels, most=most))


def _ids(path: Path, saved: Path) -> list[str | None] | None:
    """Return the ids of the documents of a saved tree, None for one that was removed since; only an index has them."""
    from hce.index.index import Index
    from hce.index.manifest import is_index
    from hce.index.tree import NumberedHierarchy

    if not is_index(path):
        return None
    numbers = NumberedHierarchy.load(saved).numbers.tolist()
    with Index.open(path) as opened, opened.state.reading() as reader:
        documents = reader.documents(numbers)
    return [documents[number].id if number in documents else None for number in numbers]


def _grow_tree(
    path: Path, encoder_spec: str, branching: int, seed: int, reading: Reading
) -> tuple[Hierarchy, list[str | None]]:
    """Grow a tree of a corpus, with names; return the documents' ids too."""
    from hce.data.corpus import Corpus

    corpus = Corpus.load(path, reading)

    from hce.encoding.encoder import Encoder  # with torch, which takes seconds to import
    from hce.tree.hierarchy import Hierarchy
    from hce.tree.names import name_nodes

    encoder = Encoder.for_corpus(encoder_spec, corpus)
    vectors = encoder.encode(list(corpus.texts()), progress=True)
    hierarchy = Hierarchy.build(vectors, branching or "auto", seed=seed, device=encoder.device, progress=True)
    hierarchy.names = name_nodes(hierarchy, corpus.texts(), progress=True)
    return hierarchy, list(corpus.ids)
