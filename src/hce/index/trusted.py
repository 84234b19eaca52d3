"""Trusted: addresses that this user has named; an index from a stranger may name others, which are not contacted."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import platformdirs

from hce.errors import FormatError, InputError
from hce.files import read_json, write_json
from hce.index.manifest import Manifest
from hce.search.milvus import Address

logger = logging.getLogger(__name__)

FILE = "trusted.json"
_named_now: set[str] = set()  # by this process; the file may not be writable


class UntrustedError(InputError):
    """The user has never named the address that an index names."""


def trusted_file() -> Path:
    """Return where the addresses are kept: in $HCE_CONFIG, or the system's place for a user's settings."""
    return Path(os.environ.get("HCE_CONFIG") or platformdirs.user_config_dir("hce")) / FILE


def trust(at: str) -> None:
    """Remember that this user has named an address of Milvus.

    Raises:
        InputError: the text is no address.
    """
    address = str(Address.parse(at))
    _named_now.add(address)
    known = _known()
    if address in known:
        return
    path = trusted_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"addresses": sorted({*known, address})})
    except (OSError, InputError) as error:
        logger.warning("%s is trusted by this process only (%s); set HCE_CONFIG to a folder to keep it", at, error)


def trust_address_of(index_folder: str | Path) -> None:
    """Remember the address that an index names, where it names one.

    Raises:
        FormatError: there is no index, or it is damaged.
    """
    at = Manifest.read(Path(index_folder)).engine_at
    if at is not None:
        trust(at)


def require_trusted(at: str, index_folder: Path) -> Address:
    """Return the address that an index names, if this user has named it.

    Raises:
        UntrustedError: the user has not.
        InputError: the text is no address.
    """
    address = Address.parse(at)
    if str(address) not in _known() | _named_now:
        raise UntrustedError(
            f"{index_folder} keeps its vectors at {address}, which you have never named here; nothing was sent there. "
            f"If you trust that address: hce status {index_folder} --trust-address"
        )
    return address


def _known() -> set[str]:
    path = trusted_file()
    try:
        return {str(each) for each in read_json(path)["addresses"]} if path.exists() else set()
    except (FormatError, KeyError, TypeError) as error:
        raise FormatError(f"{path}: damaged ({error}); delete it") from error
