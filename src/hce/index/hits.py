"""What a search gives back: documents with their rank and score."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hce.engines.base import Found
from hce.index.tables import Reader


class Hit(NamedTuple):
    """A document that was found: the best has rank 1, and `score` is the cosine to the query."""

    rank: int
    score: float
    id: str
    title: str
    text: str
    metadata: dict[str, Any]


def hits_of(found: Found, reader: Reader) -> list[list[Hit]]:
    """Hits for people: numbers replaced by the documents that they stand for."""
    documents = reader.documents(np.unique(found.numbers[found.numbers >= 0]).tolist())
    ranked = []
    for scores, numbers in zip(found.scores.tolist(), found.numbers.tolist(), strict=True):
        hits = []
        for rank, (score, number) in enumerate(zip(scores, numbers, strict=True), start=1):
            if number >= 0:
                document = documents[number]
                hits.append(Hit(rank, score, document.id, document.title, document.text, document.metadata))
        ranked.append(hits)
    return ranked
