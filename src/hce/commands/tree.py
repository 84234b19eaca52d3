"""`hce tree`: the outline of a corpus."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hce.commands.common import EncoderOption, JsonOption, SeedOption, err, out, print_json

if TYPE_CHECKING:
    from hce.tree.hierarchy import Hierarchy


def tree(
    path: Annotated[
        Path, typer.Argument(help="a model, an index or a saved tree, or a corpus to grow one from", show_default=False)
    ],
    encoder: EncoderOption = "static",
    branching: Annotated[int, typer.Option("--branching", "-b", help="children of a node; 0 chooses for 3 levels")] = 0,
    levels: Annotated[int, typer.Option("--levels", help="how many levels to show")] = 2,
    most: Annotated[int, typer.Option("--most", help="how many children of a node to show")] = 8,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="also save the tree to this new folder")] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Show the tree of a corpus: its outline, with the words that set each part apart.

    Examples:
      hce tree docs.jsonl
      hce tree my-model --levels 3
      hce tree docs.csv --branching 8 --json > tree.json
    """
    from hce.index.hierarchy import hierarchy_folder
    from hce.tree.hierarchy import Hierarchy
    from hce.tree.outline import nested, outline

    saved = hierarchy_folder(path)
    if saved is not None:
        hierarchy, ids = Hierarchy.load(saved), None
    else:
        hierarchy, ids = _grow_tree(path, encoder, branching, seed)
    if output is not None:
        hierarchy.save(output)
        err.print(f"saved to {output}")
    if as_json:
        summaries = [summary._asdict() for summary in hierarchy.describe()]
        print_json({"levels": summaries, "tree": nested(hierarchy, ids)})
    else:
        out.print(outline(hierarchy, levels=levels, most=most))


def _grow_tree(path: Path, encoder_spec: str, branching: int, seed: int) -> tuple[Hierarchy, list[str]]:
    """Grow a tree of a corpus, with names; return the documents' ids too."""
    from hce.data.corpus import Corpus
    from hce.encoding.encoder import Encoder
    from hce.tree.hierarchy import Hierarchy
    from hce.tree.names import name_nodes

    corpus = Corpus.load(path)
    encoder = Encoder.for_corpus(encoder_spec, corpus)
    vectors = encoder.encode(list(corpus.texts()), progress=True)
    hierarchy = Hierarchy.build(vectors, branching or "auto", seed=seed, device=encoder.device)
    hierarchy.names = name_nodes(hierarchy, corpus.texts())
    return hierarchy, corpus.ids
