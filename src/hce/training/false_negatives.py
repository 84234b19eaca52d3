"""Which documents must not be used as negatives, as masks over the batch and over the sampled ones.

The paper is silent about them. A *forbidden* mask is True where a candidate is no true negative of a row's query.
Shapes as in `hce.training.losses`: B queries, G documents in the batch, S sampled for each query.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hce.errors import InputError
from hce.training.losses import scores_of


@dataclass(frozen=True)
class Documents:
    """What the masks compare documents by. A batch has one axis (G,), sampled negatives two (B, S).

    Attributes:
        ids: Document numbers, −1 for unknown, of shape (G,) or (B, S).
        groups: Equal for equal texts, −1 for unknown, of the shape of `ids`.
        vectors: Embeddings, of shape (G, n) or (B, S, n); only looked at for near-duplicates.
    """

    ids: Tensor
    groups: Tensor | None = None
    vectors: Tensor | None = None


def same(own: Tensor, candidates: Tensor) -> Tensor:
    """Where a candidate carries the same number as the row's own: (B,) with (G,) or (B, S) → (B, G) or (B, S).

    Negative numbers are "unknown" and equal nothing, not even each other.
    """
    return (own[:, None] == candidates) & (own[:, None] >= 0)


def known_positives(known: Tensor, candidates: Tensor) -> Tensor:
    """Where a candidate is among the row's known positives.

    Args:
        known: Document numbers that are right for each query, padded with −1, of shape (B, P).
        candidates: Document numbers, of shape (G,) or (B, S).

    Returns:
        A mask of shape (B, G) or (B, S).
    """
    candidates = candidates.expand(len(known), candidates.shape[-1]).contiguous()  # (B, G)
    if known.shape[1] == 0:
        return torch.zeros_like(candidates, dtype=torch.bool)
    # A binary search in every row: comparing all with all would take B·G·P.
    ordered = known.sort(dim=1).values  # (B, P)
    place = torch.searchsorted(ordered, candidates).clamp(max=known.shape[1] - 1)  # (B, G)
    return (ordered.gather(1, place) == candidates) & (candidates >= 0)


@torch.no_grad()
def near_duplicates(own: Tensor, candidates: Tensor, margin: float) -> Tensor:
    """Where d⁺·d⁻ > margin: unit vectors (B, n) with (G, n) or (B, S, n) → (B, G) or (B, S)."""
    return scores_of(own, candidates, temperature=1.0) > margin


def false_negatives(
    positives: Documents, candidates: Documents, *, known: Tensor | None = None, margin: float | None = None
) -> Tensor:
    """Where a candidate is no true negative of the row's query, for any of the reasons we know of.

    It is the positive itself, another known positive, has the text of the positive, or (with a margin) nearly the
    vector of the positive. Serves both places: candidates of the batch (G,) and sampled ones (B, S).

    Args:
        positives: Each query's document, (B,).
        candidates: The documents to judge, (G,) or (B, S).
        known: Known positives of each query, padded with −1, of shape (B, P).
        margin: Inner product above which a candidate is a near-duplicate; None switches that mask off.

    Returns:
        A mask of shape (B, G) or (B, S), for `forbidden_batch` or `forbidden_sampled`.
    """
    forbidden = same(positives.ids, candidates.ids)
    if known is not None:
        forbidden = forbidden | known_positives(known, candidates.ids)
    if positives.groups is not None and candidates.groups is not None:
        forbidden = forbidden | same(positives.groups, candidates.groups)
    if margin is not None:
        if positives.vectors is None or candidates.vectors is None:
            raise InputError(f"margin={margin} needs the vectors of the positives and of the candidates.")
        forbidden = forbidden | near_duplicates(positives.vectors, candidates.vectors, margin)
    return forbidden
