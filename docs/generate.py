"""Write docs/command-line.md from the commands' own help, so that it cannot go stale unnoticed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COMMANDS = (
    "",
    "demo",
    "train",
    "report",
    "tree",
    "index",
    "add",
    "remove",
    "search",
    "status",
    "serve",
    "rebuild",
    "evaluate",
    "compare",
    "generate-queries",
)
INTRODUCTION = """# Command line

This page is generated from `--help` by `make docs`; CI fails when it is stale.

Every command puts its result on stdout (`--json`: as one JSON document) and everything else on stderr. Exit codes:
0 done, 1 the input is wrong (one line says what, where, and what to do), 2 wrong usage.
"""


def help_text(command: str) -> str:
    """What `hce COMMAND --help` prints, 100 columns wide and without colours."""
    environment = {**os.environ, "COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1", "TERMINAL_WIDTH": "100"}
    arguments = [sys.executable, "-m", "hce", *command.split(), "--help"]
    shown = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True).stdout
    return "\n".join(line.rstrip() for line in shown.strip("\n").splitlines())


def main() -> None:
    """Write the page."""
    titles = [f"hce {command}".strip() for command in COMMANDS]
    sections = [
        f"## `{title}`\n\n```text\n{help_text(command)}\n```\n" for title, command in zip(titles, COMMANDS, strict=True)
    ]
    page = "\n".join([INTRODUCTION, *sections])
    (Path(__file__).parent / "command-line.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
