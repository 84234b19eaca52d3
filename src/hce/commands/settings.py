"""Settings of `hce train` by name: `--set name=value`, and `--help-settings`, which lists them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from hce.commands.common import out
from hce.errors import InputError
from hce.training.recipe import Recipe, parsed_settings, parsed_value, shown_value

RECIPES = ("measured", "paper")


@dataclass(frozen=True)
class RunSettings:
    """Settings of a training run that are not part of its recipe."""

    recipe: str = "measured"
    tracker: str = ""
    strict: bool = False


RUN_HELP = {
    "recipe": "where settings that are not given come from: measured (what measured best) or paper",
    "tracker": "also log to this accelerate tracker, such as tensorboard",
    "strict": "refuse judgments of documents that are not in the corpus, instead of skipping them",
}


def recipe_option(name: str, **limits: Any) -> Any:
    """Return an option for a field of the recipe, with its help."""
    default, other, text = Recipe.described(name)
    shown = default if other == default else f"{default}; transformer: {other}"
    return typer.Option(help=text, show_default=shown, **limits)


def read_settings(items: Iterable[str], **given: Any) -> tuple[RunSettings, dict[str, Any]]:
    """Read --set, and add the settings given by their own options.

    Raises:
        InputError: an unknown setting, a value of the wrong type, or a setting that is given twice.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    run: dict[str, Any] = {}
    for item in items:
        name, equals, text = item.partition("=")
        name = name.replace("-", "_")
        if name in chosen or name in run:
            raise InputError(f"--set {item}: {name} is given twice; leave one out")
        if equals and name in RUN_HELP:
            run[name] = _run_setting(name, text)
        else:
            chosen |= parsed_settings([item])
    return RunSettings(**run), chosen


def _run_setting(name: str, text: str) -> Any:
    value = parsed_value(name, text, getattr(RunSettings, name))
    if name == "recipe" and value not in RECIPES:
        raise InputError(f"--set {name}={text}: choose one of {', '.join(RECIPES)}")
    return value


def _list_settings(wanted: bool) -> None:
    """Print every setting with its defaults and its help."""
    if not wanted:
        return
    from rich.table import Table

    grid = Table("setting", "default", "transformer", "what it is", box=None, pad_edge=False)
    grid.columns[0].no_wrap = True
    for each in fields(RunSettings):
        grid.add_row(each.name, shown_value(each.default), "", RUN_HELP[each.name])
    for setting in fields(Recipe):
        default, other, text = Recipe.described(setting.name)
        grid.add_row(setting.name, default, "" if other == default else other, text)
    out.print(grid)
    raise typer.Exit


SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="any other setting, such as batch_size=64 or recipe=paper; may be given more than once",
        show_default=False,
    ),
]
HelpSettingsOption = Annotated[
    bool, typer.Option("--help-settings", callback=_list_settings, is_eager=True, help="list the settings of --set")
]
