"""Check the user's memory limit against an estimate before the work.

The estimate is the peak memory of the process so far plus what grows with the documents, as measured (docs/LOG.md,
"All commands at a million"; lab: `large_corpus`). Pages of mapped files do not count: the system can reclaim them.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Mapping

from hce.errors import InputError
from hce.files import HELD

MiB = 1 << 20
CODED = 4  # dimensions per byte of a vector's code

ARENAS = 2  # separate heaps of glibc's malloc; the default is 8 for each core
M_ARENA_MAX = -8


def parse_size(text: str) -> int:
    """Parse a number of bytes above 0: 4GB is 4·10⁹, 4GiB is 4·2³⁰.

    >>> parse_size("4GB"), parse_size("512 MiB"), parse_size("1.5g")
    (4000000000, 536870912, 1500000000)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]?)(i?)b?", text.strip(), re.IGNORECASE | re.ASCII)
    size = 0
    if found and (found[2] or not found[3]):
        size = int(float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2].lower() or " "))
    if size < 1:
        raise InputError(f"memory {text!r}: give a size such as 4GB, 512MB or 4GiB")
    return size


def taken_so_far() -> int:
    """Return the peak memory of this process in bytes; 0 if unknown."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def use_few_arenas() -> None:
    """Let threads share freed memory; call this before any thread starts.

    By default glibc gives threads separate arenas, and memory freed in one is not used by threads of another.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_ARENA_MAX, ARENAS)


def index_needs(documents: int, dim: int, engine: str) -> dict[str, int]:
    """Estimate peak bytes per indexing stage; `documents` should count passages too."""
    vectors = 4 * dim * documents
    held = vectors if vectors <= HELD else 0
    needs = {
        "growing the tree": min(vectors, HELD) + 48 * documents,
        "naming nodes": 900 * min(documents, 1 << 20) + 24 * documents,
        "indexing words": 192 * MiB,
    }
    if engine == "codes":  # codes count twice: those to be saved, and those that faiss scans
        needs["building the engine"] = held + (2 * dim // CODED + 64) * documents + 256 * MiB
    elif engine == "exact":
        needs["building the engine"] = held + 8 * documents + 256 * MiB
    return needs


def require_memory(needs: Mapping[str, int], bound: int, remedy: str) -> str:
    """Fail if a limit is too small; else return a line with the largest estimate."""
    stage, most = max(needs.items(), key=lambda each: each[1])
    total = taken_so_far() + most
    if total > bound:
        raise InputError(f"memory {shown_size(bound)} is too little: {stage} takes about {shown_size(total)}; {remedy}")
    return f"memory: at most {shown_size(bound)}; the largest estimate is {stage}, {shown_size(total)}"


def shown_size(size: int) -> str:
    """Format a number of bytes for people.

    >>> shown_size(1_500_000_000), shown_size(96_000_000)
    ('1.5 GB', '96 MB')
    """
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
