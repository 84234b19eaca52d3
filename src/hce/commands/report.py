"""`hce report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hce.commands.common import JsonOption, out, print_json


def report(
    model: Annotated[Path, typer.Argument(help="a folder that `hce train` wrote", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="the HTML file to write")] = Path("report.html"),
    as_json: JsonOption = False,
) -> None:
    """Write what training brought as one HTML file: before and after, query by query, curves, tree, the command.

    Example:
      hce report my-model -o my-model.html
    """
    from hce.atomic import open_atomically
    from hce.report import report as page
    from hce.training.model_folder import ModelFolder

    known = ModelFolder.read(model)
    text = page(known)
    with open_atomically(output) as file:
        file.write(text)
    if as_json:
        print_json({"report": str(output), "before": known.facts["before"], "after": known.facts["after"]})
    else:
        out.print(f"the report is in {output}; any browser shows it", soft_wrap=True)
