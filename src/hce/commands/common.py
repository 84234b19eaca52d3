"""Consoles that show texts and never obey them, common options and Ctrl-C, for all commands."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# What a terminal obeys instead of showing it: control characters, and marks that turn the direction of a line. Halves
# of surrogate pairs, which stand for what is no Unicode in a file's name, no stream can write.
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def harmless(text: str) -> str:
    r"""Put a sign in the place of each character that a terminal would obey; line breaks and tabs stay.

    >>> harmless("red \x1b[31mshoes")
    'red �[31mshoes'
    """
    return OBEYED.sub("\N{REPLACEMENT CHARACTER}", text)


class PlainConsole(Console):
    """A console for texts of anybody's making: shown as they are, and with no power over the terminal."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render anything to segments without characters that a terminal obeys; styles are not part of a text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=harmless(segment.text))


out = PlainConsole()
err = PlainConsole(stderr=True)

EncoderOption = Annotated[
    str, typer.Option("--encoder", "-e", metavar="NAME|DIR|HUB-ID", help="static, minilm, a directory or a hub id")
]
IndexArgument = Annotated[Path, typer.Argument(help="the folder of the index", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON document")]
LARGEST_SEED = 2**32 - 1  # that scikit-learn takes
SeedOption = Annotated[int, typer.Option("--seed", help="same seed, same result", min=0, max=LARGEST_SEED)]


def print_json(value: Any) -> None:
    """Put one JSON document on stdout; what a terminal would obey stays an escape."""
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    line = json.dumps(value, ensure_ascii=not unicode)
    sys.stdout.write(OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", line) + "\n")


@contextmanager
def interruptible(how_to_go_on: str) -> Iterator[None]:
    """Turn Ctrl-C into a line that says how to go on; what is on disk is whole at any moment."""
    try:
        yield
    except KeyboardInterrupt:
        err.print(f"stopped; {how_to_go_on}", soft_wrap=True)
        raise typer.Exit(130) from None
