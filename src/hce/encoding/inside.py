"""Inside: a model folder from a stranger names no file outside of it, which a library would then open.

transformers and sentence-transformers open whatever path a setting names, such as `tokenizer_file` in
`tokenizer_config.json`, the `path` of a module, or a file of weights.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hce.contained import check_tree
from hce.errors import OutsideError
from hce.files import read_json_value

NOT_SETTINGS = ("tokenizer.json", "vocab.json", "words.json", "checksums.json", "hce.json", "labels.json")
NAMES_A_FILE = re.compile(r".*(file|path|folder|dir)s?")
ONLY_SHOWN = ("_name_or_path", "name_or_path")  # where a model came from; nobody opens that


def require_inside(folder: Path) -> None:
    """Refuse a model that holds links, or has a setting that names something else on this machine.

    Raises:
        OutsideError: there is such a thing.
        FormatError: a file of settings is damaged.
    """
    for name in check_tree(folder):
        path = folder / name
        if path.suffix != ".json" or path.name in NOT_SETTINGS:
            continue
        for key, value in _named_files(read_json_value(path)):
            if _leads_out(folder, path.parent, key, value):
                raise OutsideError(
                    f"{path}: {key!r} is {value!r}, which is not in {folder}; hce opens nothing else because a model "
                    "names it: take the setting out, or put a copy of the file there"
                )


def _named_files(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the settings that name files, at any depth."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _named_files(each, "weight_file" if key == "weight_map" else name)
    elif isinstance(value, list):
        for each in value:
            yield from _named_files(each, key)
    elif isinstance(value, str) and NAMES_A_FILE.fullmatch(key) and key not in ONLY_SHOWN:
        yield key, value


def _leads_out(folder: Path, place: Path, key: str, value: str) -> bool:
    """Return whether a name leads to something outside of a folder: from the settings' own place, or from here."""
    bases = (place, Path.cwd()) if key.endswith("_file") else (place,)
    found = [base / value for base in bases if os.path.lexists(base / value)]
    return any(not path.resolve().is_relative_to(folder.resolve()) for path in found)
