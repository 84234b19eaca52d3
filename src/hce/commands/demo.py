"""`hce demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hce.commands.common import EncoderOption, JsonOption, SeedOption, err, interruptible, out, print_json


def demo(
    encoder: EncoderOption = "static",
    output: Annotated[
        Path, typer.Option("--output", "-o", help="a new folder for model and index; a number is added if it is there")
    ] = Path("hce-demo"),
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Do the main job on text that every machine has: the docstrings of the Python that runs this.

    With --json, what is told goes to stderr, and what was measured to stdout.

    Examples:
      hce demo
      hce demo --encoder minilm -o minilm-demo
    """
    from hce.demo import show

    with interruptible("nothing else was touched; the same command starts over in another folder"):
        facts = show(err if as_json else out, err, encoder, seed, output)
    if as_json:
        print_json(facts)
