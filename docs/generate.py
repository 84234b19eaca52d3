"""Write the pages that are made of the code, so that they cannot go stale unnoticed.

docs/command-line.md from the commands' own help, docs/api.md from the signatures and docstrings of what `import hce`
offers. The output is the same on every run and on every Python that is supported.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hce

DOCS = Path(__file__).parent
COMMANDS = (  # the last two need hce-lab
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
    "mcp",
    "export",
    "push",
    "rebuild",
    "reindex",
    "check",
    "evaluate",
    "compare",
    "generate-queries",
)
COMMAND_LINE = """# Command line

This page is generated from `--help` by `make docs`; CI fails when it is stale.

Every command puts its result on stdout (`--json`: as one JSON document) and everything else on stderr. Exit codes:
0 done, 1 the input is wrong (one line says what, where, and what to do), 2 wrong usage.
"""
API = """# What `import hce` offers

This page is generated from signatures and docstrings by `make docs`; CI fails when it is stale. Other modules are
described in their own docstrings, and may change between versions.

"""
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields|Examples?):$")
ENTRY = re.compile(r"    (\*{0,2}\w+): (.*)")
WIDTH = 100  # of a signature on one line


def main() -> None:
    """Write both pages."""
    (DOCS / "command-line.md").write_text(command_line_page(), encoding="utf-8")
    (DOCS / "api.md").write_text(api_page(), encoding="utf-8")


def command_line_page() -> str:
    """Return the help of every command as one page."""
    titles = [f"hce {command}".strip() for command in COMMANDS]
    sections = [
        f"## `{title}`\n\n```text\n{help_text(command)}\n```\n" for title, command in zip(titles, COMMANDS, strict=True)
    ]
    return "\n".join([COMMAND_LINE, *sections])


def help_text(command: str) -> str:
    """Return what `hce COMMAND --help` prints, 100 columns wide and without colours."""
    environment = {**os.environ, "COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1", "TERMINAL_WIDTH": "100"}
    arguments = [sys.executable, "-m", "hce", *command.split(), "--help"]
    shown = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True).stdout
    return "\n".join(line.rstrip() for line in shown.strip("\n").splitlines())


def api_page() -> str:
    """Return the public names with their public members as one page."""
    names = [name for name in hce.__all__ if not name.startswith("_")]
    contents = " · ".join(f"[{name}](#{name.lower()})" for name in names)
    sections = [f"## {name}\n\n{described(name, getattr(hce, name))}" for name in names]
    return "\n".join([API + contents + "\n", *sections])


def described(name: str, thing: Any) -> str:
    """Return the description of a function or of a class with its members."""
    is_error = inspect.isclass(thing) and issubclass(thing, Exception)  # those have no signature of their own
    parts = ["" if is_error else code(name, thing), markdown(inspect.getdoc(thing) or "")]
    if inspect.isclass(thing):
        parts += [option_list(thing)] if dataclasses.is_dataclass(thing) else []
        parts += [f"### {name}.{member}\n\n{text}" for member, text in members(name, thing)]
    return "\n".join(part for part in parts if part)


def members(class_name: str, cls: type) -> Iterator[tuple[str, str]]:
    """Yield the public methods and properties that a class itself defines, in the order of its source."""
    instance = class_name[0].lower() + class_name[1:]
    for name, member in vars(cls).items():
        text = inspect.getdoc(member)
        if name.startswith("_") or not text:
            continue
        if isinstance(member, property):
            returned = inspect.signature(member.fget).return_annotation if member.fget else "Any"
            yield name, f"```python\n{instance}.{name}: {returned}\n```\n\n{markdown(text)}"
        elif isinstance(member, (classmethod, staticmethod)):
            yield name, f"{code(f'{class_name}.{name}', getattr(cls, name))}\n{markdown(text)}"
        elif inspect.isfunction(member):
            yield name, f"{code(f'{instance}.{name}', member, skip=1)}\n{markdown(text)}"


class Verbatim(str):
    """A part of a signature that is shown as it is, and not in quotation marks."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def code(name: str, thing: Any, skip: int = 0) -> str:
    """Return a signature as a block of Python, on several lines where it is long; `skip=1` leaves out `self`."""
    signature = inspect.signature(thing)
    parameters = [as_written(each) for each in list(signature.parameters.values())[skip:]]
    returned = signature.return_annotation
    shown = signature.replace(parameters=parameters, return_annotation=signature.empty)
    arrow = "" if inspect.isclass(thing) or returned is signature.empty else f" -> {returned}"
    line = f"{name}{shown}{arrow}"
    if len(line) > WIDTH:
        line = f"{name}(\n" + "".join(f"    {each},\n" for each in separate(shown)) + f"){arrow}"
    return f"```python\n{line}\n```\n"


def as_written(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a parameter with the annotation as in the source, and … for a default that has no spelling of its own."""
    annotation = getattr(parameter.annotation, "__forward_arg__", parameter.annotation)
    if isinstance(annotation, str):
        parameter = parameter.replace(annotation=Verbatim(annotation))
    if parameter.default is not parameter.empty and repr(parameter.default).startswith("<"):
        parameter = parameter.replace(default=Verbatim("…"))
    return parameter


def separate(signature: inspect.Signature) -> Iterator[str]:
    """Yield the parameters of a signature, with the star before those that are given by name only."""
    starred = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            yield "*"
        starred = starred or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        yield str(parameter)


def option_list(cls: type) -> str:
    """Return the fields of a dataclass whose help is in their metadata (`hce.Recipe`)."""
    helped = [each for each in dataclasses.fields(cls) if "help" in each.metadata]
    return "".join(f"- `{each.name}` = `{each.default!r}`: {each.metadata['help']}\n" for each in helped)


def markdown(docstring: str) -> str:
    """Return a Google-style docstring as Markdown: its sections as lists, its examples as code."""
    blocks = [block for block in re.split(r"\n{2,}", docstring.strip()) if block]
    return "\n".join(_block(block) + "\n" for block in blocks)


def _block(block: str) -> str:
    head, _, rest = block.partition("\n")
    if not SECTION.match(head):
        return f"```pycon\n{block}\n```" if block.startswith(">>>") else block
    title = head.removesuffix(":").replace("Args", "Arguments")
    return f"**{title}**\n\n{_entries(rest)}" if ENTRY.match(rest) else f"**{title}:** {_joined(rest)}"


def _entries(text: str) -> str:
    """Return `name: text` entries as a list, each on one line."""
    entries = re.split(r"\n(?=    \S)", text)
    return "\n".join(re.sub(r"^(\*{0,2}\w+): ", r"- `\1`: ", _joined(entry)) for entry in entries)


def _joined(text: str) -> str:
    return " ".join(line.strip() for line in text.splitlines())


if __name__ == "__main__":
    main()
