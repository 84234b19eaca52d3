"""What `hce serve --learn-queries` keeps: the mean of the queries that were asked, never their texts."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from threading import Lock

import numpy as np

from hce.encoding.encoder import Encoder
from hce.errors import HceError, InputError
from hce.index.state import IndexState
from hce.training.query_mean import QueryMean, rows_of_first_part

logger = logging.getLogger(__name__)

MOST_LOST = 100  # queries that a kill may lose
LEAST_AT_ONCE = 10  # queries to write; the mean of fewer would show what single ones asked
SECONDS = 10.0  # between two writes, if so many came


class AskedQueries:
    """Encodes queries, and adds them to the mean in the index's folder.

    Args:
        state: of the index.

    Raises:
        InputError: the index has a table, which a mean of queries does not help.
    """

    def __init__(self, state: IndexState) -> None:
        self._state = state
        encoder = state.present_encoder().encoder()
        if encoder.is_table:
            raise InputError(
                "--learn-queries: this index has a static encoder, which a mean of queries does not help; leave it out"
            )
        self._encoder, self._fingerprint = encoder, encoder.parts[0].fingerprint
        self._rows: list[np.ndarray] = []
        self._written = time.monotonic()
        self._lock = Lock()

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Encode queries as the index does, and count them."""
        carried = self._state.present_encoder()
        vectors = self._state.encode_queries(texts)
        if carried is self._state.for_queries:  # else it was replaced meanwhile
            with self._lock:
                self._add(vectors, carried.encoder())
        return vectors

    def flush(self) -> None:
        """Add the queries since the last time to the mean on disk, unless they are few."""
        with self._lock:
            self._flush()

    def _add(self, vectors: np.ndarray, encoder: Encoder) -> None:
        if encoder is not self._encoder:  # after a reindexing
            self._flush()
            self._encoder, self._fingerprint, self._rows = encoder, encoder.parts[0].fingerprint, []
        if encoder.is_table:
            return
        self._rows += list(rows_of_first_part(vectors, encoder))
        if len(self._rows) >= MOST_LOST or time.monotonic() > self._written + SECONDS:
            self._flush()

    def _flush(self) -> None:
        """Write what there is; a disk that fails loses these queries, and no search."""
        if len(self._rows) < LEAST_AT_ONCE:
            return
        rows, self._rows, self._written = self._rows, [], time.monotonic()
        ours, folder = QueryMean.of_rows(np.stack(rows), self._fingerprint), self._state.path
        try:
            kept = QueryMean.find(folder)
            (kept.and_of(ours) if kept is not None and kept.encoder == ours.encoder else ours).write(folder)
        except (HceError, OSError) as error:
            logger.warning("the mean of the queries was not kept (%s)", error)
