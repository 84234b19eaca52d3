"""Manifest: what an index is made of; and IndexStatus: its counts and sizes.

The manifest is written last, so that its presence means that the rest is there. It holds its own checksum. What it says
may come from a stranger: it can name nothing outside of the index's folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from hce._version import __version__
from hce.checksums import sealed, unsealed
from hce.errors import FormatError
from hce.files import checked_fields, read_json, write_json
from hce.index.store import Moment, Reader, Store
from hce.search.fusion import TRANSFORMER_SHARE

FORMAT = 2  # 2: long documents are read in passages
MANIFEST_FILE = "manifest.json"
ENCODER_FOLDER = re.compile(r"encoder(-[0-9]{1,20})?")  # of the first encoder; later ones add the number of a change
TREE_FOLDER = re.compile(r"hierarchy(-[0-9]{1,20})?")  # see `hce.index.hierarchy`
MOST_DIMENSIONS = 1 << 20
OUTGROWN = 4  # documents for each that a table was fitted to


@dataclass(frozen=True)
class Refit:
    """What a refit changes of a manifest, at the moment when a write of the store is done.

    That write has the new vectors. So the store alone decides whether the old or the new is true, and a manifest that
    names both is right before and after.

    Attributes:
        change: the number of the write.
        token: of the write.
    """

    change: int
    token: str
    encoder: str
    fingerprint: str
    encoder_files: dict[str, list[int]]
    encoder_folder: str
    fitted_documents: int
    hierarchy: str | None


REFITTED = ("encoder", "fingerprint", "encoder_files", "encoder_folder", "fitted_documents", "hierarchy", "since")


@dataclass(frozen=True)
class Manifest:
    """What an index is made of, whatever documents come and go.

    Attributes:
        created: when, in ISO 8601.
        documents: how many there were at creation; they have the numbers 1 … documents.
        corpus: name and fingerprint of the collection that the index was made of.
        encoder: the name of the encoder that made the vectors.
        fingerprint: of that encoder.
        dim: the length n of a vector.
        encoder_files: size and time of change of each file in `encoder/`; where both are the same, so is the encoder.
        base_encoder: what that encoder was trained from, where that is known.
        engine: the name of the engine.
        dtype: what the engine keeps vectors in.
        hierarchy: the folder of the tree, where there is one.
        language: of the texts, for the endings of their words.
        words_share: how much words count in a hybrid search, from 0 to 1.
        fitted_documents: how many documents the encoder's table was fitted to; None where it was not, or was trained.
        window: how many tokens the encoder reads at once: a longer document is read in passages. None in an index
            of format 1, which reads the beginning only, until it is rebuilt.
        encoder_folder: where the encoder is.
        since: the number of the store's change from which on its vectors are of this encoder.
        refit: what else is true as soon as the store knows of a write, which has other vectors: see `Refit`.
        format: of the index.
        hce: the version that wrote the manifest.
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
    language: str = "english"
    words_share: float = TRANSFORMER_SHARE  # of an index older than words; the lower share is the safer one
    fitted_documents: int | None = None
    window: int | None = None
    encoder_folder: str = "encoder"
    since: int = 0
    refit: dict[str, Any] | None = None
    format: int = FORMAT
    hce: str = __version__

    def write(self, folder: Path) -> None:
        """Put the manifest into the index's folder, atomically."""
        write_json(folder / MANIFEST_FILE, sealed(asdict(self)))

    def before_refit(self, refit: Refit) -> Manifest:
        """Return what to write before vectors of another encoder are committed to the store."""
        return replace(self, refit=asdict(refit))

    def at(self, moment_at: Callable[[int, str], Moment | None]) -> Manifest:
        """Return what is true in a store that knows of these moments; `refit` stays while it is not decided."""
        if self.refit is None:
            return self
        refit = checked_fields(Refit, self.refit)
        if moment_at(refit.change, refit.token) is None:
            return self
        changed = {**asdict(refit), "since": refit.change}
        manifest = replace(self, refit=None, **{name: changed[name] for name in REFITTED})
        manifest._check()
        return manifest

    @classmethod
    def read(cls, folder: Path, reader: Reader | None = None) -> Manifest:
        """Read an index's manifest.

        Args:
            folder: of the index.
            reader: of the moment whose encoder is asked for; by default, the present one.

        Raises:
            FormatError: there is none, it is damaged, or a newer version wrote it.
        """
        if not (folder / MANIFEST_FILE).is_file():
            raise FormatError(f"{folder}: no index there ({MANIFEST_FILE} is missing); 'hce index' makes one")
        values, is_as_written = unsealed(read_json(folder / MANIFEST_FILE))
        if isinstance(values.get("format"), int) and values["format"] > FORMAT:
            raise FormatError(f"{folder}: the index was written by a newer version of hce; upgrade to open it")
        try:
            manifest = checked_fields(cls, values)
            manifest._check()
            if manifest.refit is not None:  # of a refit that is under way, or was broken off
                manifest = manifest._decided(folder, reader)
        except FormatError as error:
            raise FormatError(f"{folder}: not an index, or a damaged one ({MANIFEST_FILE}: {error})") from error
        strange = values.keys() - {field.name for field in fields(cls)}
        if is_as_written is False or (is_as_written is None and strange):  # of which one may have been the checksum
            raise FormatError(
                f"{folder}: {MANIFEST_FILE} is not as it was written; restore it from a copy, or, if the change was "
                "meant, take the checksum out of it"
            )
        return manifest

    def _decided(self, folder: Path, reader: Reader | None) -> Manifest:
        if reader is not None:
            return self.at(reader.moment_at)
        store = Store(folder, self.dim)
        try:
            with store.reading() as present:
                return self.at(present.moment_at)
        finally:
            store.close()

    def _check(self) -> None:
        """Refuse values that no index has.

        Raises:
            FormatError: there is one.
        """
        sound = {
            "format": self.format >= 1,
            "dim": 0 < self.dim <= MOST_DIMENSIONS,
            "documents": self.documents >= 0,
            "words_share": 0 <= self.words_share <= 1,
            "window": self.window is None or self.window > 0,
            "encoder_folder": ENCODER_FOLDER.fullmatch(self.encoder_folder) is not None,
            "hierarchy": self.hierarchy is None or TREE_FOLDER.fullmatch(self.hierarchy) is not None,
        }
        for name in (name for name, is_sound in sound.items() if not is_sound):
            raise FormatError(f"{name!r} is not what it has to be: {getattr(self, name)!r}")


@dataclass(frozen=True)
class IndexStatus:
    """Counts, sizes and names of an index.

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
        fitted_documents: how many documents the encoder's table was fitted to; None where it was not, or was trained.
        dim: the length of a vector.
        engine: the name of the engine that searches.
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
    fitted_documents: int | None
    dim: int
    engine: str
    dtype: str
    pending: int
    tree_levels: int
    bytes: int
    format: int

    @property
    def has_outgrown_its_table(self) -> bool:
        """Whether a table was fitted to so few of the documents there are now that fitting it to all would pay."""
        return self.fitted_documents is not None and self.documents > OUTGROWN * self.fitted_documents

    def as_dict(self) -> dict[str, Any]:
        """Return all of it, for JSON."""
        return asdict(self)


def size_on_disk(folder: Path) -> int:
    """Count the bytes of all files in a folder, in which others may be writing and deleting meanwhile."""
    # Other than Path.rglob, os.walk passes over folders that are gone by the time it comes to them.
    return sum(_size(Path(place) / name) for place, _, names in os.walk(folder) for name in names)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:  # SQLite deletes its log when the last reader leaves
        return 0


def file_stamp(path: Path) -> tuple[int, int]:
    """Return what changes when a file is written anew: its place on the disk and its time of change."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns
