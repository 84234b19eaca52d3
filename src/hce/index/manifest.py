"""Manifest: the file that names an index's encoder, engine and folders. IndexStatus: the index's counts and sizes.

The manifest is written last, so an index with a manifest is complete. It contains its own checksum. It may come from a
stranger, so it cannot name anything outside the index's folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hce._version import __version__
from hce.errors import FormatError
from hce.files import (
    check_tree,
    checked_fields,
    delete_folder,
    delete_leftovers,
    is_file,
    names_in,
    read_json,
    sealed,
    unsealed,
    write_json,
)
from hce.index.store import Store
from hce.index.tables import MOST_DIMENSIONS, STORE_FILE, Moment, Reader, WriteMark
from hce.search.fusion import Calibration

FORMAT = 2  # 0.1.0 wrote 1
MANIFEST_FILE = "manifest.json"
ENCODER_FOLDER = "encoder"
IS_ENCODER_FOLDER = re.compile(r"encoder(-[0-9]{1,20})?")  # each later encoder adds the number of a change
IS_TREE_FOLDER = re.compile(r"hierarchy(-[0-9]{1,20})?")  # see `hce.index.tree`
FOLDERS = ("encoder", "hierarchy", "model", "engine", "passages", "words", "tokens")
IS_FOLDER = re.compile(rf"({'|'.join(FOLDERS)})(-[0-9]+)?")
EARLIER = {"dtype"}  # fields that 0.2.0 wrote, and that are ignored
OUTGROWN = 4  # a table is fitted again once there are over this many times the documents it was fitted to


@dataclass(frozen=True, kw_only=True)
class EncoderFacts:
    """An encoder of an index, and the settings that belong to it."""

    encoder: str  # its name
    fingerprint: str
    dim: int  # the length n of a vector
    encoder_files: dict[str, list[int]]  # size and modification time of each; if they match, no file is hashed
    base_encoder: str | None  # that training began with, if known
    window: int  # how many tokens the encoder reads at once; a longer document also gets passages
    hierarchy: str | None  # the folder of the tree, if there is one
    encoder_folder: str = "encoder"
    words_share: float = 0.25  # how much words count in a hybrid search, from 0 to 1
    tokens_share: float = 0.4  # how much tokens count among the first hits, below 1; 0.2.0 did not write it
    shares: dict[str, Any] | None = None  # how both were chosen, see `Calibration`; None if they were given
    fitted_documents: int | None = None  # how many a table was fitted to for this index; None for any other encoder
    familiar: int | None = None  # the last document's number when the index got this encoder; None if at creation

    @property
    def suffix(self) -> str:
        """The suffix of all folders that belong to the encoder."""
        return self.encoder_folder.removeprefix("encoder")

    def folder_of(self, kind: str) -> str:
        """Return the name of the encoder's folder of this `kind`, see `FOLDERS`."""
        return f"{kind}{self.suffix}"

    def soundness(self) -> dict[str, bool]:
        """Return for each field whether its value is valid."""
        return {
            "dim": 0 < self.dim <= MOST_DIMENSIONS,
            "encoder_folder": IS_ENCODER_FOLDER.fullmatch(self.encoder_folder) is not None,
            "hierarchy": self.hierarchy is None or IS_TREE_FOLDER.fullmatch(self.hierarchy) is not None,
            "words_share": 0 <= self.words_share <= 1,
            "tokens_share": 0 <= self.tokens_share < 1,
            "window": self.window > 0,
        }


EXCHANGED = [field.name for field in fields(EncoderFacts)]


@dataclass(frozen=True, kw_only=True)
class StandbyEncoder(EncoderFacts):
    """An encoder whose vectors are in the store but not active: see `reindex` in `hce.index.create`.

    Either it was active until the last reindexing (`was_in_force`), or a reindexing to it has begun. In the second
    case, `spec` is the name that this reindexing was given.
    """

    was_in_force: bool
    spec: str


@dataclass(frozen=True, kw_only=True)
class Manifest(EncoderFacts):
    """The settings of an index, which stay the same while documents are added and removed.

    `switch` has number and token of the write that activates the standby encoder. If the store has this write, the
    standby encoder is active, else the current one. So the manifest is right before and after that write's commit.
    """

    created: str  # in ISO 8601
    documents: int  # how many there were at creation; their numbers are 1 to this
    corpus: dict[str, str]  # name and fingerprint of the corpus that the index was created from
    engine: str
    language: str = "english"  # of the texts, for stemming
    engine_at: str | None = None  # the address of an engine elsewhere, such as Milvus
    since: int = 0  # the number of the write that activated this encoder's vectors; 0 for the first encoder
    beside: dict[str, Any] | None = None  # the fields of the standby encoder, see `StandbyEncoder`
    switch: dict[str, Any] | None = None
    calibration: dict[str, Any] | None = None  # thresholds of a good match, see `MatchThresholds`; None if unknown
    fields: dict[str, str] | None = None  # which fields of a record are id, text and title, if the user named them
    format: int = FORMAT
    hce: str = __version__  # the version that wrote the manifest

    def write(self, folder: Path) -> None:
        """Put the manifest into the index's folder, atomically."""
        write_json(folder / MANIFEST_FILE, sealed(asdict(self)))

    @property
    def search(self) -> str:
        """A sentence about how much words and tokens count in a search, and how that was chosen."""
        if self.shares is not None:
            return Calibration.read(self.shares).summary()
        return f"words count {self.words_share:.2f}, tokens count {self.tokens_share:.2f}"

    @property
    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """For each calibrated share, pairs of a value and its nDCG@10."""
        return {} if self.shares is None else Calibration.read(self.shares).curves

    def standby(self) -> StandbyEncoder | None:
        """Return the standby encoder, if there is one."""
        return None if self.beside is None else checked_fields(StandbyEncoder, self.beside)

    def folders(self) -> set[str]:
        """Return the names of all folders that the index uses."""
        other = self.standby()
        named = {self.folder_of(kind) for kind in FOLDERS if kind != "hierarchy"} | {str(self.hierarchy)}
        if other is None:
            return named
        return named | {other.folder_of(kind) for kind in FOLDERS} | {str(other.hierarchy)}

    def with_active(self, other: StandbyEncoder) -> Manifest:
        """Return this manifest with another active encoder."""
        return replace(self, **{name: getattr(other, name) for name in EXCHANGED})

    def at(self, moment_at: Callable[[int, str], Moment | None]) -> Manifest:
        """Return the manifest with the switch made, if the store has the switch's write."""
        other = self.standby()
        if self.switch is None or other is None:
            return self
        mark = checked_fields(WriteMark, self.switch)
        if moment_at(*mark) is None:
            return self
        kept = StandbyEncoder(was_in_force=True, spec="", **{name: getattr(self, name) for name in EXCHANGED})
        manifest = replace(self.with_active(other), since=mark.change, beside=asdict(kept), switch=None)
        manifest._check()
        return manifest

    @classmethod
    def read(cls, folder: Path, reader: Reader | None = None) -> Manifest:
        """Read an index's manifest as of a reader's moment, by default now.

        Raises:
            FormatError: there is none, it is damaged, or a newer version wrote it.
            OutsideError: it is not a regular file.
        """
        if not is_file(folder / MANIFEST_FILE):
            raise FormatError(f"{folder}: no index there ({MANIFEST_FILE} is missing); 'hce index' makes one")
        values, is_as_written = unsealed(read_json(folder / MANIFEST_FILE))
        if isinstance(values.get("format"), int) and values["format"] > FORMAT:
            raise FormatError(f"{folder}: the index was written by a newer version of hce; upgrade to open it")
        try:
            manifest = checked_fields(cls, values)
            manifest._check()
            if manifest.switch is not None:  # a reindexing is at its last step, or was killed there
                if reader is not None:
                    manifest = manifest.at(reader.moment_at)
                else:
                    with closing(Store(folder, manifest.dim)) as store, store.reading() as present:
                        manifest = manifest.at(present.moment_at)
        except FormatError as error:
            raise FormatError(f"{folder}: not an index, or a damaged one ({MANIFEST_FILE}: {error})") from error
        strange = values.keys() - {field.name for field in fields(cls)} - EARLIER
        if is_as_written is False or (is_as_written is None and strange):  # the checksum's own name may be damaged
            raise FormatError(
                f"{folder}: {MANIFEST_FILE} has changed since it was written; restore it from a copy, or, if the "
                "change was meant, take the checksum out of it"
            )
        return manifest

    @classmethod
    def settled(cls, folder: Path, writer: Reader) -> Manifest:
        """Read the manifest within a write; drop a switch whose write never committed."""
        return replace(cls.read(folder, writer), switch=None)

    def _check(self) -> None:
        """Fail on values that no index can have."""
        other = self.standby()
        sound = {
            "format": self.format == FORMAT,
            "documents": self.documents >= 0,
            "fields": set(self.fields or ()) <= {"id", "text", "title"},
            "beside": other is None or all(other.soundness().values()),
            **self.soundness(),
        }
        if self.shares is not None:
            Calibration.read(self.shares)
        for name in (name for name, is_sound in sound.items() if not is_sound):
            raise FormatError(f"{name!r} has a wrong value: {getattr(self, name)!r}")


@dataclass(frozen=True)
class IndexStatus:
    """Counts, sizes and names of an index; see `Manifest` for fields without comment."""

    path: str
    documents: int  # how many there are now
    added: int  # of these, how many were not there at creation, or had another text
    removed: int  # of the documents at creation, how many are gone, or have another text
    created: str
    changed: str  # when the index was last written to
    encoder: str
    fingerprint: str
    base_encoder: str | None
    fitted_documents: int | None
    dim: int
    engine: str  # that searches
    pending: int  # additions and removals that the engine's snapshot on disk lacks
    tree_levels: int  # the depth L of the tree, its levels below the root, including the documents; 0 without a tree
    bytes: int  # of all files
    format: int
    reindexing: str | None = None  # the name of the new encoder, if a reindexing has begun
    earlier: str | None = None  # the name of the encoder before the last reindexing, if it is kept
    tokens: bool = False  # whether the index keeps tokens, which reorder the first hits
    # The share of the ten nearest documents that the engine found when it was built, for test queries made from
    # documents; None if every vector is scored, or there is no snapshot.
    recall: float | None = None
    rescored: int | None = None  # candidates that a search for ten documents scores again by their vectors
    search: str = ""  # how much words and tokens count, and how that was chosen
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # share → its values and their nDCG@10

    @property
    def has_outgrown_its_table(self) -> bool:
        """Whether a table was fitted to too few of the current documents, so that a `rebuild` fits it again."""
        return self.fitted_documents is not None and self.documents > OUTGROWN * self.fitted_documents

    def as_dict(self) -> dict[str, Any]:
        """Return the status, for JSON."""
        return asdict(self)


def is_index(path: str | Path) -> bool:
    """Return whether a folder holds an index: a store, and a manifest, written last."""
    return all(is_file(Path(path) / name) for name in (STORE_FILE, MANIFEST_FILE))


def delete_other_folders(index_folder: Path, manifest: Manifest) -> None:
    """Delete the index's folders that a manifest does not name; call it in a write."""
    delete_leftovers(index_folder)
    for name in names_in(index_folder):
        if IS_FOLDER.fullmatch(name) and name not in manifest.folders():
            delete_folder(index_folder / name, index_folder)


def size_on_disk(folder: Path) -> int:
    """Return the size of all files in a folder, while others may be writing there."""
    return sum(found.st_size for found in check_tree(folder).values())


def file_stamp(path: Path) -> tuple[int, int]:
    """Return inode and modification time of a file: both change when it is replaced."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def file_stamps(folder: Path) -> dict[str, list[int]]:
    """Return size and modification time of each file, by its path below the folder."""
    return {name: [found.st_size, found.st_mtime_ns] for name, found in check_tree(folder).items()}
