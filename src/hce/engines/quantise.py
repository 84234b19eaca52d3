"""How a vector is kept: as it is, in half the space, or in a quarter of it (faiss's scalar quantiser)."""

from __future__ import annotations

import numpy as np

from hce.errors import InputError

CODECS = {"float32": "Flat", "float16": "SQfp16", "int8": "SQ8"}
"""The name of each kind of number, and faiss's name of it."""

ROWS_AT_ONCE = 65_536
SAMPLE = 65_536
FEW = 1024  # rows that tell too little of the range of each dimension


def codec_of(dtype: str) -> str:
    """The name that faiss has for a kind of number.

    Raises:
        InputError: there is no such kind.
    """
    if dtype not in CODECS:
        raise InputError(f"dtype {dtype!r}: choose one of {', '.join(CODECS)}")
    return CODECS[dtype]


def training_sample(vectors: np.ndarray, most: int = SAMPLE) -> np.ndarray:
    """Rows from all over `vectors`, in memory."""
    step = max(1, -(-len(vectors) // most))
    return np.ascontiguousarray(vectors[::step], dtype=np.float32)


def range_sample(vectors: np.ndarray, dim: int) -> np.ndarray:
    """Rows that span what later rows may hold: a quarter more than those seen, or all of −1 … 1 where few are seen."""
    ends = np.ones((1, dim), np.float32)
    if len(vectors) < FEW:
        return np.concatenate([ends, -ends])
    sample = training_sample(vectors)
    low, high = sample.min(axis=0, keepdims=True), sample.max(axis=0, keepdims=True)
    return np.concatenate([low - (high - low) / 8, high + (high - low) / 8])
