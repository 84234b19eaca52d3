"""Checks of the arguments of `Index`: each raises an `InputError` of one line that names what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import get_args

import numpy as np

from hce.data.text import is_unicode
from hce.errors import InputError
from hce.index.ranking import SearchMode


def checked_queries(queries: str | Sequence[str]) -> list[str]:
    """Return the texts to look for."""
    if not isinstance(queries, Iterable) or isinstance(queries, bytes):
        raise InputError(f"a query is a text or a list of texts, not a {type(queries).__name__}")
    texts = [queries] if isinstance(queries, str) else list(queries)
    for text in texts:
        if not isinstance(text, str):
            raise InputError(f"a query is a text, not a {type(text).__name__}")
        if not is_unicode(text):
            raise InputError(f"query {text!r} holds half a surrogate pair; remove it")
        if not text.strip():
            raise InputError("the query is empty; write what to look for")
    return texts


def checked_vectors(vectors: np.ndarray, dim: int) -> np.ndarray:
    """Return vectors of queries as an array of shape (Q, n), float32."""
    try:
        rows = np.ascontiguousarray(vectors, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise InputError(f"vectors of queries are an array of numbers, not a {type(vectors).__name__}") from error
    if rows.ndim != 2 or np.ndim(vectors) != 2 or rows.shape[1] != dim:
        raise InputError(f"vectors of queries are of shape (queries, {dim}) in this index, not {np.shape(vectors)}")
    if not np.isfinite(rows).all():
        raise InputError("the vector of a query holds NaN or infinity; encode it again")
    return rows


def check_k(k: int, name: str = "k") -> None:
    """Make sure that k is a whole number from 1 on."""
    if isinstance(k, bool) or not isinstance(k, int | np.integer):
        raise InputError(f"{name} = {k!r}: give a whole number")
    if k < 1:
        raise InputError(f"{name} = {k}: ask for 1 hit or more")


def check_mode(mode: str) -> None:
    """Make sure that there is such a mode of search."""
    if mode not in get_args(SearchMode):
        raise InputError(f"mode {mode!r}: choose one of {', '.join(get_args(SearchMode))}")


def checked_ids(ids: Iterable[str]) -> list[str]:
    """Return ids of documents, each once, in order."""
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise InputError(f"remove takes a list of ids, not a {type(ids).__name__}; put the single id into a list")
    listed = list(ids)
    for doc_id in listed:
        check_id(doc_id)
    return list(dict.fromkeys(listed))


def check_id(doc_id: str) -> None:
    """Make sure that an id is a text."""
    if not isinstance(doc_id, str):
        raise InputError(f"an id is a string, not a {type(doc_id).__name__}")
