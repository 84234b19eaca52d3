"""What `hce.index.derived.home_of` asks of an engine that lives elsewhere: all names of this module."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hce.milvus.engine import is_address as is_address
from hce.milvus.mirror import Mirror as Mirror
from hce.milvus.mirror import check_place
from hce.milvus.mirror import withdraw as withdraw
from hce.milvus.trusted import require_trusted
from hce.milvus.trusted import trust as trust

if TYPE_CHECKING:
    from hce.encoding.encoder import Encoder
    from hce.milvus.replica import ReplicaIndex


def open_replica(address: str | Path, encoder: Encoder | None) -> ReplicaIndex:
    """Open an index that is read from a collection."""
    from hce.milvus.replica import ReplicaIndex

    return ReplicaIndex(address, encoder)


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
