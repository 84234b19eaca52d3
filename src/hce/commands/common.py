"""What all commands share: where they print, the options that mean the same everywhere, Ctrl-C."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

EncoderOption = Annotated[
    str, typer.Option("--encoder", "-e", metavar="NAME|DIR|HUB-ID", help="static, minilm, a directory or a hub id")
]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON document")]
SeedOption = Annotated[int, typer.Option("--seed", help="same seed, same result")]


def print_json(value: Any) -> None:
    """Put one JSON document on stdout."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")


@contextmanager
def interruptible(how_to_go_on: str) -> Iterator[None]:
    """Turn Ctrl-C into a line that says how to go on; what is on disk is whole at any moment."""
    try:
        yield
    except KeyboardInterrupt:
        err.print(f"stopped; {how_to_go_on}", soft_wrap=True)
        raise typer.Exit(130) from None
