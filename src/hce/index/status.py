"""What there is to say of an index without searching it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class IndexStatus:
    """What there is to say of an index without searching it.

    Attributes:
        path: its folder.
        documents: how many there are.
        added: how many of them were not there at creation, or had another text.
        removed: how many of those at creation are gone, or have another text.
        created: when, in ISO 8601.
        changed: when it was last written to.
        encoder: the name of the encoder.
        fingerprint: of the encoder.
        base_encoder: what the encoder was trained from, where that is known.
        dim: the length of a vector.
        engine: the name of the engine.
        dtype: what the engine keeps vectors in.
        pending: how many additions and removals the engine's snapshot on disk is behind.
        tree_levels: the number of levels of the tree; 0 without one.
        bytes: of all files.
        format: of the folder.
    """

    path: str
    documents: int
    added: int
    removed: int
    created: str
    changed: str
    encoder: str
    fingerprint: str
    base_encoder: str | None
    dim: int
    engine: str
    dtype: str
    pending: int
    tree_levels: int
    bytes: int
    format: int

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return asdict(self)


def size_on_disk(folder: Path) -> int:
    """The bytes of all files in a folder."""
    return sum(map(_size, folder.rglob("*")))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:  # SQLite deletes its log when the last reader leaves
        return 0
