"""Consoles, common options and Ctrl-C, for all commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

EncoderOption = Annotated[
    str, typer.Option("--encoder", "-e", metavar="NAME|DIR|HUB-ID", help="static, minilm, a directory or a hub id")
]
IndexArgument = Annotated[Path, typer.Argument(help="the folder of the index", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON document")]
SeedOption = Annotated[int, typer.Option("--seed", help="same seed, same result")]


def print_json(value: Any) -> None:
    """Put one JSON document on stdout."""
    line = json.dumps(value, ensure_ascii=False)
    sys.stdout.write(line.encode("utf-8", "backslashreplace").decode() + "\n")  # half a surrogate pair stays an escape


@contextmanager
def interruptible(how_to_go_on: str) -> Iterator[None]:
    """Turn Ctrl-C into a line that says how to go on; what is on disk is whole at any moment."""
    try:
        yield
    except KeyboardInterrupt:
        err.print(f"stopped; {how_to_go_on}", soft_wrap=True)
        raise typer.Exit(130) from None
