"""The mean of the queries that people asked: all that training uses of a log without answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hce.encoding.encoder import Encoder
from hce.encoding.tables import as_unit_rows
from hce.errors import FormatError
from hce.files import checked_fields, is_file, read_json, sealed, unsealed, write_json

FILE = "asked.json"
MOST_LOGGED = 10_000  # queries; a longer log is thinned evenly, to this many at least and twice as many at most


@dataclass(frozen=True)
class QueryMean:
    """The mean vector of queries; their texts are not kept."""

    encoder: str  # the fingerprint of the encoder that encoded them, without companions
    count: int  # how many queries there were
    mean: list[float]  # of their unit vectors

    @classmethod
    def of(cls, texts: Sequence[str], encoder: Encoder) -> QueryMean:
        """Return the mean of a log's queries; of a long log, of evenly spaced ones."""
        some = [texts[row] for row in range(0, len(texts), max(1, len(texts) // MOST_LOGGED))]
        return cls.of_rows(encoder.encode(some, "query"), encoder.fingerprint)

    @classmethod
    def of_rows(cls, rows: np.ndarray, fingerprint: str) -> QueryMean:
        """Return the mean of queries with these rows, of shape (queries, n)."""
        return cls(fingerprint, len(rows), rows.mean(axis=0, dtype=np.float64).tolist())

    def and_of(self, other: QueryMean) -> QueryMean:
        """Return the mean of both sets of queries."""
        count = self.count + other.count
        mean = (self.count * np.array(self.mean) + other.count * np.array(other.mean)) / count
        return QueryMean(self.encoder, count, mean.tolist())

    @classmethod
    def find(cls, index_folder: Path) -> QueryMean | None:
        """Read what `hce serve --learn-queries` kept in an index; None if nothing."""
        path = index_folder / FILE
        if not is_file(path):
            return None
        values, is_as_written = unsealed(read_json(path))
        try:
            kept = checked_fields(cls, values)
        except FormatError as error:
            raise FormatError(f"{path}: damaged ({error}); delete it to start over") from error
        if not is_as_written or kept.count < 1:
            raise FormatError(f"{path}: changed since it was written; delete it to start over")
        return kept

    def write(self, index_folder: Path) -> None:
        """Write the mean into the folder of an index, atomically."""
        write_json(index_folder / FILE, sealed(vars(self)))


def rows_of_first_part(rows: np.ndarray, encoder: Encoder) -> np.ndarray:
    """Return the first part's unit rows, given rows with companions.

    Centering turned a row x into the direction u of x − c. So x = c + t·u, and t follows from |x| = 1.
    """
    first = as_unit_rows(rows[:, : encoder.parts[0].dim].astype(np.float64))
    if encoder.centres is None:
        return first
    center = encoder.centres[0].astype(np.float64)
    along = first @ center
    return center + (np.sqrt(along**2 + 1 - center @ center) - along)[:, None] * first
