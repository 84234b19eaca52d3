"""`hce demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hce.commands.common import EncoderOption, SeedOption, err, out


def demo(
    encoder: EncoderOption = "static",
    output: Annotated[
        Path, typer.Option("--output", "-o", help="a new folder for model and index; a number is added if it is there")
    ] = Path("hce-demo"),
    seed: SeedOption = 0,
) -> None:
    """Do the main job on text that every machine has: the docstrings of the Python that runs this.

    Example:
      hce demo
    """
    from hce.demo import show

    show(out, err, encoder, seed, output)
