"""The seam to engines that live elsewhere: what an index asks of one. `HOMES` says where the code of each is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from hce.errors import InputError
from hce.index.manifest import Manifest
from hce.index.store import Reader, Store
from hce.search.engine import Engine
from hce.search.passages import PassageEngine

if TYPE_CHECKING:
    from hce.encoding.encoder import Encoder
    from hce.index.index import Index

HOMES = {"milvus": "hce.milvus.home"}
"""The module of each engine that lives elsewhere, imported when an index names the engine: see `Home`."""

Held = TypeVar("Held", covariant=True)


class Part(Protocol[Held]):
    """A part of an index that is brought to the moment of a reader before it is used: see `hce.index.derived.Live`."""

    def lend(self, reader: Reader) -> AbstractContextManager[Held]:
        """Lend what is held, as of the moment that `reader` sees.

        Raises:
            MomentPassedError: what is held is at a later moment.
        """
        ...

    def prepare(self, reader: Reader) -> None:
        """Do now what the first search would have to wait for."""
        ...

    def take_up(self, builder: Any, suffix: str, since: int) -> None:
        """Drop what is held; the index has another encoder since a change."""
        ...

    def save_snapshot(self, reader: Reader) -> None:
        """Write a snapshot, unless the last one is current."""
        ...

    def rebuild(self, reader: Reader, builder: Any) -> None:
        """Build what is held again from all documents."""
        ...

    def pending(self, reader: Reader) -> int:
        """Count the additions and removals that are in the store and not in the part as it is kept."""
        ...

    def facts(self, reader: Reader) -> dict[str, Any]:
        """Return what the newest usable snapshot says of itself; nothing if there is none."""
        ...

    def renew(self) -> None:
        """Build what is held again, if that pays by now."""
        ...

    def is_there(self) -> bool:
        """Return whether a usable snapshot is there, or none is needed."""
        ...

    def ahead(self) -> Path | None:
        """Return a snapshot of a later moment than the store's; None if there is none."""
        ...

    def damaged_snapshots(self, reader: Reader) -> Iterator[tuple[Path, str]]:
        """Yield each damaged snapshot with what is wrong with it."""
        ...


class Mirror(Protocol):
    """What keeps an engine elsewhere up to date with the store."""

    @property
    def documents(self) -> Part[Engine]:
        """The engine of the documents."""
        ...

    @property
    def passages(self) -> Part[PassageEngine]:
        """The engine of the passages of long documents."""
        ...

    def follow(self) -> None:
        """Tell the engine what was written; what cannot be told now is told before the next search."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class Home(Protocol):
    """The functions of a module that is the home of an engine."""

    def is_address(self, text: str | Path) -> bool:
        """Tell whether a text that stands for an index is an address of this engine."""
        ...

    def open_replica(self, address: str | Path, encoder: Encoder | None) -> Index:
        """Open an index that is only read, at an address."""
        ...

    def new_mirror(self, store: Store) -> Mirror:
        """Return the mirror of a store."""
        ...

    def trust(self, at: str) -> None:
        """Remember that this user has named an address."""
        ...

    def claim_place(self, at: str, index_folder: Path, *, named_by_user: bool) -> None:
        """Make sure that an index can keep its vectors at an address, before anything is written.

        Raises:
            InputError: it is no address, the user has never named it, or another index is there.
        """
        ...

    def withdraw(self, at: str, index_folder: Path) -> None:
        """Delete what an index has at an address."""
        ...


def home_of(engine: str) -> Home:
    """Import the home of an engine that lives elsewhere.

    Raises:
        InputError: there is no such engine.
    """
    if engine not in HOMES:
        raise InputError(f"engine {engine!r}: has no address; choose one of {', '.join(HOMES)}")
    return cast(Home, import_module(HOMES[engine]))


def replica_at(address: str | Path, encoder: Encoder | None) -> Index | None:
    """Open the index that an address of some engine stands for; None if it is no such address."""
    for engine in HOMES:
        if home_of(engine).is_address(address):
            return home_of(engine).open_replica(address, encoder)
    return None


def trust_address_of(index_folder: str | Path) -> None:
    """Remember the address that an index names as one that this user has named.

    Raises:
        FormatError: there is no index, or it is damaged.
    """
    manifest = Manifest.read(Path(index_folder))
    if manifest.engine_at is not None:
        home_of(manifest.engine).trust(manifest.engine_at)
