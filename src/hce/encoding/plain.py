"""A model as one with standard modules alone: it loads without hce, and without trust in code of others."""

from __future__ import annotations

from pathlib import Path

from hce.checksums import write_checksums
from hce.contained import read_json_value
from hce.encoding.encoder import Encoder
from hce.encoding.tables import MODULES
from hce.errors import InputError
from hce.files import new_folder, write_json


def export_plain(source: str | Path, folder: str | Path, *, first_alone: bool = False) -> str:
    """Write a model that `SentenceTransformer(folder)` loads to the same vectors, in a new folder.

    Args:
        source: a model.
        folder: where to.
        first_alone: export the first encoder of several whose vectors stand side by side.

    Returns:
        What it is: "a token table" or "a transformer".

    Raises:
        InputError: it has no such form, or the folder is not empty.
    """
    encoder = Encoder.load(source, device="cpu")
    if len(encoder.parts) > 1 and not first_alone:
        raise InputError(
            f"{source}: {len(encoder.parts)} encoders side by side, which no standard module joins; load it with "
            "trust_remote_code=True and hce installed, or export the first encoder by --first-alone"
        )
    first = encoder.parts[0]
    if first.table is not None and first.table.tokenizer is None:
        raise InputError(f"{source}: a table of words, which no standard module reads; load it with hce")
    from hce.encoding.bundled import quiet_transformers

    with new_folder(folder) as new, quiet_transformers():
        first.model.save(str(new), create_model_card=False)
        _name_modules_as_ever(new)
        write_checksums(new)
    return "a token table" if first.is_table else "a transformer"


def _name_modules_as_ever(folder: Path) -> None:
    """Call the modules by names that versions of sentence-transformers before 6 know too, which the newer ones keep."""
    entries = read_json_value(folder / MODULES)
    for entry in entries:
        entry["type"] = f"sentence_transformers.models.{entry['type'].rpartition('.')[2]}"
    write_json(folder / MODULES, entries)
