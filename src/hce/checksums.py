"""Checksums, in `checksums.json` next to the files or in the files: are they as they were written?

CRC-32 finds every flipped bit and every burst of up to 32, misses other damage once in four billion, and reads 2.8 GB a
second (docs/LOG.md). It is for accidents: who changes a file on purpose can change its checksum.
"""

from __future__ import annotations

import hashlib
import json
import logging
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from hce.contained import CHECKSUMS as CHECKSUMS
from hce.contained import check_tree, is_file, open_file, plain_path
from hce.errors import FormatError, HceError
from hce.files import open_atomically, read_json, write_json
from hce.progress import Advance

logger = logging.getLogger(__name__)

SEAL = "checksum"
LEFT_OUT = {CHECKSUMS, "README.md"}  # the latter is for people, who may change it as they like
BYTES_AT_ONCE = 1 << 22


def write_checksums(folder: Path, names: Iterable[str] | None = None) -> None:
    """Write the checksums of a folder's files: of these names, or of all in it and below."""
    chosen = check_tree(folder).keys() - LEFT_OUT if names is None else names
    write_json(folder / CHECKSUMS, {name: file_checksum(folder / name) for name in sorted(chosen)})


def damage_in(folder: Path, advance: Advance = lambda count: None) -> list[str] | None:
    """Return a line for each file that is missing or changed since `write_checksums`; None without checksums.

    Nothing is opened that is not a regular file in the folder. `advance` is called with the number of bytes read.

    Raises:
        OutsideError: something in the folder is a link, a pipe or a device.
    """
    if not is_file(folder / CHECKSUMS):
        return None
    files = check_tree(folder)
    try:
        known = read_json(folder / CHECKSUMS)
    except FormatError as error:
        return [str(error)]
    damaged = []
    for name, checksum in known.items():
        if name not in files:
            damaged.append(f"{name} is missing, or is no regular file in this folder")
            continue
        with suppress(OSError):
            if file_checksum(folder / name, advance) == checksum:
                continue
        damaged.append(f"{name} is not as it was written")
    return damaged


def require_undamaged(folder: Path, remedy: str) -> None:
    """Raise FormatError for a folder with a damaged file.

    A folder without checksums passes.
    """
    damaged = damage_in(folder)
    if damaged:
        more = f" (and {len(damaged) - 1:,} more)" if len(damaged) > 1 else ""
        raise FormatError(f"{folder}: damaged ({damaged[0]}){more}; {remedy}")


def sealed(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a small JSON file along with their checksum."""
    return {**values, SEAL: _checksum_of(values)}


def unsealed(values: dict[str, Any]) -> tuple[dict[str, Any], bool | None]:
    """Return the values without their checksum, and whether it fits.

    It is None without a checksum.
    """
    rest = {name: value for name, value in values.items() if name != SEAL}
    return rest, values[SEAL] == _checksum_of(rest) if SEAL in values else None


class KeptArrays(NamedTuple):
    """Arrays from a file in the order asked for, and their facts."""

    arrays: list[np.ndarray]
    facts: dict[str, str]


def keep_arrays(path: Path, arrays: dict[str, np.ndarray], facts: Mapping[str, str]) -> None:
    """Cache arrays in one file with their checksum, if that is possible.

    `facts` name what made them.
    """
    try:
        with open_atomically(path, "wb") as file:
            file.write(save(arrays, {**facts, SEAL: str(checksum_of_arrays(arrays.values()))}))
    except (HceError, OSError) as error:
        logger.debug("%s is not kept: %s", path, error)


def kept_arrays(path: Path, names: Iterable[str]) -> KeptArrays | None:
    """Read arrays by name, in the order in which they were written.

    It is None if the file is missing or damaged.
    """
    try:
        with safe_open(plain_path(path), "numpy") as file:
            facts, arrays = file.metadata() or {}, [file.get_tensor(name) for name in names]
    except (OSError, SafetensorError):
        return None
    return KeptArrays(arrays, facts) if facts.get(SEAL) == str(checksum_of_arrays(arrays)) else None


def checksum_of_arrays(arrays: Iterable[np.ndarray]) -> int:
    """Return the checksum of some arrays, one after another."""
    return reduce(lambda checksum, array: zlib.crc32(array.tobytes(), checksum), arrays, 0)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file that others published, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BYTES_AT_ONCE):
            digest.update(block)
    return digest.hexdigest()


def file_checksum(path: Path, advance: Advance = lambda count: None) -> int:
    """Return the checksum of a file."""
    value = 0
    with open_file(path) as file:
        while block := file.read(BYTES_AT_ONCE):
            value = zlib.crc32(block, value)
            advance(len(block))
    return value


def _checksum_of(values: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())
