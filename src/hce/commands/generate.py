"""`hce generate-queries`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hce.commands.common import (
    CorpusArgument,
    EncoderOption,
    JsonOption,
    SeedOption,
    answer,
    interruptible,
    with_reading,
)
from hce.data.records import USUAL, Reading
from hce.files import require_parent


@with_reading
def generate_queries(
    corpus: CorpusArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="a new .jsonl file", show_default=False)],
    model: Annotated[
        str, typer.Option("--model", "-m", metavar="NAME|DIR|HUB-ID", help="smollm2, or a doc2query or causal model")
    ] = "smollm2",
    per_document: Annotated[int, typer.Option(help="queries for each document; equal ones count once")] = 1,
    limit: Annotated[int, typer.Option(help="write for this many documents only, drawn at random; 0: all")] = 0,
    keep: Annotated[
        bool, typer.Option("--filter/--no-filter", help="drop queries that do not lead back to their document")
    ] = True,
    within: Annotated[int, typer.Option(help="the filter: the document must be among this many best ones")] = 10,
    encoder: EncoderOption = "static",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    reading: Reading = USUAL,
) -> None:
    """Have a language model write queries for documents (doc2query), to train on or to add to an index of words.

    Killed at any point, the same command continues. The small bundled model writes about one query in two seconds on
    a CPU core; a doc2query model from the hub writes better ones.

    Examples:
      hce generate-queries docs.jsonl -o queries.jsonl
      hce generate-queries scifact -o queries.jsonl --model doc2query/msmarco-t5-base-v1 --per-document 5
      hce train docs.jsonl -o my-model --labels generated=queries.jsonl
    """
    from hce.data.corpus import Corpus

    require_parent(output)
    documents = Corpus.load(corpus, reading)

    from hce.encoding.encoder import Encoder  # with torch, which takes seconds to import
    from hce.generation.generator import Generator
    from hce.generation.querygen import check_output
    from hce.generation.querygen import generate_queries as run

    check_output(output)
    judge = Encoder.for_corpus(encoder, documents) if keep else None
    with interruptible("the same command goes on where this one stopped"):
        written = run(
            documents,
            Generator.load(model),
            output,
            per_document=per_document,
            limit=limit,
            encoder=judge,
            within=within,
            seed=seed,
            progress=True,
        )
    line = (
        f"{written.kept:,} of {written.generated:,} queries, written for {written.documents:,} documents, "
        f"are in {output}; `hce train --labels generated={output}` trains on them"
    )
    answer(line, {"queries": str(output), **written._asdict()}, as_json)
