"""`hce index`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hce.commands.common import JsonOption, interruptible, out, print_json


def index(
    corpus: Annotated[Path, typer.Argument(help="the documents: a BEIR folder, a file, a folder of texts, or -")],
    output: Annotated[Path, typer.Option("--output", "-o", help="a new folder for the index", show_default=False)],
    model: Annotated[
        str, typer.Option("--model", "-m", metavar="DIR|NAME|HUB-ID", help="what `hce train` wrote, or any encoder")
    ] = "static",
    engine: Annotated[str, typer.Option(help="auto, flat, hnsw, ivf or tree")] = "auto",
    dtype: Annotated[str, typer.Option(help="what the engine keeps vectors in: float32, float16 or int8")] = "float32",
    tree: Annotated[bool, typer.Option("--tree/--no-tree", help="grow a tree where the model brings none")] = True,
    as_json: JsonOption = False,
) -> None:
    """Encode a corpus and make a searchable index of it.

    The index holds all it needs: documents, vectors, a copy of the encoder, and the tree. Documents can be added and
    removed later, without training.

    Examples:
      hce index docs.jsonl -m my-model -o my-index
      hce index docs.csv -o my-index --engine tree
      cat docs.jsonl | hce index - -m minilm -o my-index
    """
    from hce.data.corpus import Corpus
    from hce.index.index import Index

    documents = Corpus.load(corpus)
    with interruptible("no index was made; the same command goes on with the vectors encoded so far"):
        made = Index.create(
            output, documents, model, "grow" if tree else None, engine=engine, dtype=dtype, progress=True
        )
    with made:
        if as_json:
            print_json(made.status().as_dict())
        else:
            line = f"{len(made):,} documents are in {output}; hce search {output} 'some text' looks there"
            out.print(line, markup=False, soft_wrap=True)
