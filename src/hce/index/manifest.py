"""The manifest of an index: what it is made of. Written last, so that its presence means that the rest is there."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hce._version import __version__
from hce.atomic import write_json
from hce.errors import FormatError

FORMAT = 1
FILE = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What does not change from one document to the next.

    Attributes:
        created: when, in ISO 8601.
        documents: how many there were at creation; they have the numbers 1 … documents.
        corpus: name and fingerprint of the collection that it was made of.
        encoder: the name of the encoder that made the vectors.
        fingerprint: of that encoder.
        dim: the length n of a vector.
        encoder_files: size and time of change of each file in `encoder/`; where both are the same, so is the encoder.
        base_encoder: what that encoder was trained from, where that is known.
        engine: the name of the engine.
        dtype: what the engine keeps vectors in.
        hierarchy: the folder of the tree, where there is one.
        format: of the index.
        hce: the version that wrote it.
    """

    created: str
    documents: int
    corpus: dict[str, str]
    encoder: str
    fingerprint: str
    dim: int
    encoder_files: dict[str, list[int]]
    base_encoder: str | None
    engine: str
    dtype: str
    hierarchy: str | None
    format: int = FORMAT
    hce: str = __version__

    def write(self, folder: Path) -> None:
        """Put it into the index's folder, atomically."""
        write_json(folder / FILE, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read an index's manifest.

        Raises:
            FormatError: there is none, it is damaged, or a newer version wrote it.
        """
        try:
            values: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
            newer = values["format"] > FORMAT
            known = {field.name: values[field.name] for field in fields(cls) if field.name in values}
            manifest = None if newer else cls(**known)
        except OSError as error:
            raise FormatError(f"{folder}: no index there ({FILE}: {error.strerror}); 'hce index' makes one") from error
        except (ValueError, TypeError, KeyError) as error:
            raise FormatError(f"{folder}: not an index, or a damaged one ({FILE}: {error})") from error
        if manifest is None:
            raise FormatError(f"{folder}: the index was written by a newer version of hce; upgrade to open it")
        return manifest


def hierarchy_folder(path: str | Path) -> Path | None:
    """The folder that holds a tree: in an index, in a model, or `path` itself; None where there is none.

    Raises:
        FormatError: it is an index that was made without a tree.
    """
    path, candidates = Path(path), ["hierarchy", "."]
    if (path / "documents.sqlite").is_file():
        named = Manifest.read(path).hierarchy
        if named is None:
            raise FormatError(f"{path}: this index carries no tree; index anew to get one")
        candidates = [named]
    return next((path / name for name in candidates if (path / name / "hierarchy.safetensors").is_file()), None)
