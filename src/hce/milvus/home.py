"""Milvus as the index knows it: this module is the `hce.index.elsewhere.Home` of the engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hce.milvus.engine import is_address as is_address
from hce.milvus.mirror import Mirror, check_place
from hce.milvus.mirror import withdraw as withdraw
from hce.milvus.trusted import require_trusted
from hce.milvus.trusted import trust as trust

if TYPE_CHECKING:
    from hce.encoding.encoder import Encoder
    from hce.index.store import Store
    from hce.milvus.replica import ReplicaIndex


def open_replica(address: str | Path, encoder: Encoder | None) -> ReplicaIndex:
    """Open an index that is read from a collection."""
    from hce.milvus.replica import ReplicaIndex

    return ReplicaIndex(address, encoder)


def new_mirror(store: Store) -> Mirror:
    """Return what writes the documents of a store to a collection."""
    return Mirror(store)


def claim_place(at: str, index_folder: Path, *, named_by_user: bool) -> None:
    """Make sure that an index can have a collection at an address, before anything is written.

    Raises:
        InputError: it is no address, the user has never named it, or the collection there is of another index.
        AwayError: Milvus does not answer.
    """
    if named_by_user:
        trust(at)
    require_trusted(at, index_folder)
    check_place(at, index_folder)
