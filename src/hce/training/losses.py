"""The paper's losses, as functions of tensors.

Everything here takes vectors, node numbers and masks; nothing here tokenizes, samples, clusters or reads a corpus.
"Eq." and "App." are those of the paper, *Hierarchical Corpus Encoder*.

Conventions: B queries (with one document each) on this process, G documents in all processes together (G = B when
alone), S sampled negatives a query, K nodes of a level, n the width of a vector. A *forbidden* mask is True where a
negative must not be used as one. Scores are computed in float32 whatever comes in, also under autocast (with τ = 0.01
logits go up to 100, where bfloat16 has steps of 0.5); float64 stays float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hce.errors import InputError
from hce.training.recipe import LevelTarget

Route = Literal["full", "gather"]

# What a gathered float and a float of the whole table cost, forward and backward, in multiply-adds of a product.
# Measured on one CPU core, n = 384; a guess for everything else, where it costs time but no correctness.
_GATHERED_COST = 200
_TABLE_COST = 300
# Past this many gathered floats (1 GiB) a batch is scored in full, if that is smaller.
_GATHER_LIMIT = 2**28


# --------------------------------------------------------------------------------------------------------------------
# Scores and the contrastive loss


def precise(x: Tensor) -> Tensor:
    """Return a tensor in float32, or as it is where that is float64."""
    return x if x.dtype == torch.float64 else x.float()


def scores_of(queries: Tensor, candidates: Tensor, temperature: float) -> Tensor:
    """Return S(q, d) = q·d / τ.

    Queries (B, n) with shared candidates (G, n) give (B, G); with each row's own (B, S, n), (B, S).
    """
    if not temperature > 0:
        raise InputError(f"temperature has to be above 0, not {temperature}.")
    # Autocast would do this product in bfloat16 although both sides are float32.
    with torch.autocast(queries.device.type, enabled=False):
        dtype = torch.promote_types(precise(queries).dtype, precise(candidates).dtype)
        queries, candidates = queries.to(dtype), candidates.to(dtype)
        if candidates.ndim == 2:
            return queries @ candidates.T / temperature  # (B, G)
        return torch.einsum("bn,bsn->bs", queries, candidates) / temperature  # (B, S)


def contrastive(positive: Tensor, negatives: Tensor, forbidden: Tensor | None = None) -> Tensor:
    """Compute L_C (Eq. 1): −log softmax of the positive, per query.

    Takes scores, already divided by the temperature. A query without an allowed negative has loss 0 and gradient 0.
    """
    # Relative to the positive, so that a small loss is not lost in the rounding of two large numbers.
    gaps = negatives - positive[:, None]  # (B, K)
    if forbidden is not None:
        gaps = gaps.masked_fill(forbidden, -torch.inf)
    return torch.cat([gaps.new_zeros(len(gaps), 1), gaps], dim=1).logsumexp(dim=1)  # (B,)


def bidirectional(
    queries: Tensor,
    documents: Tensor,
    sampled: Tensor | None = None,
    *,
    temperature: float,
    own_row: Tensor | None = None,
    all_queries: Tensor | None = None,
    forbidden_batch: Tensor | None = None,
    forbidden_queries: Tensor | None = None,
    forbidden_sampled: Tensor | None = None,
) -> Tensor:
    """Compute L_C^↔ (App. A), both ways, averaged over the batch.

    Query → documents contrasts with all documents of the batch and with the query's own sampled negatives;
    document → queries contrasts with all queries of the batch and never with samples. The two are added, not averaged,
    as in the paper.

    Across processes, each process passes its own queries, the gathered documents and queries, and where its own pairs
    are among them; the mean over equally sized processes is then the loss of the whole batch.

    Args:
        queries: This process's queries, of shape (B, n).
        documents: The documents of the batch, of shape (G, n).
        sampled: Each query's own sampled negatives, of shape (B, S, n).
        temperature: τ.
        own_row: The row of each query's document in `documents`, of shape (B,); by default 0, 1, …, B−1.
        all_queries: The queries of all processes, row for row the partners of `documents`, of shape (G, n); by default
            `queries`.
        forbidden_batch: True where document g must not be a negative of query b, of shape (B, G). The entry of the
            query's own document does not matter.
        forbidden_queries: True where query g must not be a negative of query b's document, of shape (B, G). By default
            `forbidden_batch` read the other way round: a document that is right for another query as well must not be
            pushed away from it. Has to be given along with `all_queries` if `forbidden_batch` is.
        forbidden_sampled: True where a sampled document must not be used, of shape (B, S); also the place to mark
            padding, where a node has too few children to sample from.

    Returns:
        The loss, a scalar.
    """
    rows = torch.arange(len(queries), device=queries.device)  # (B,)
    if own_row is None:
        if len(documents) != len(queries):
            raise InputError(f"{len(queries)} queries and {len(documents)} documents: pass `own_row` to pair them.")
        own_row = rows
    to_documents = scores_of(queries, documents, temperature)  # (B, G)
    if all_queries is None:
        partner = rows
        to_queries = to_documents[:, own_row].T  # (B, B)
        if forbidden_queries is None and forbidden_batch is not None:
            forbidden_queries = forbidden_batch[:, own_row].T  # (B, B)
    else:
        if forbidden_batch is not None and forbidden_queries is None:
            raise InputError("forbidden_batch without forbidden_queries: with all_queries, both masks are needed.")
        partner = own_row
        to_queries = scores_of(documents[own_row], all_queries, temperature)  # (B, G)

    positive = to_documents[rows, own_row]  # (B,)
    negatives, forbidden = to_documents, _and_own(forbidden_batch, to_documents, own_row)
    if sampled is not None:
        to_sampled = scores_of(queries, sampled, temperature)  # (B, S)
        if forbidden_sampled is None:
            forbidden_sampled = torch.zeros_like(to_sampled, dtype=torch.bool)
        negatives = torch.cat([negatives, to_sampled], dim=1)  # (B, G + S)
        forbidden = torch.cat([forbidden, forbidden_sampled], dim=1)
    query_to_document = contrastive(positive, negatives, forbidden)  # (B,)
    document_to_query = contrastive(positive, to_queries, _and_own(forbidden_queries, to_queries, partner))  # (B,)
    return (query_to_document + document_to_query).mean()


def _and_own(forbidden: Tensor | None, scores: Tensor, own_column: Tensor) -> Tensor:
    """Mark each row's own partner too in `forbidden`, of shape (B, G).

    `contrastive` takes the partner's score by itself, so that among the negatives it would count twice.
    """
    is_own = torch.arange(scores.shape[1], device=scores.device) == own_column[:, None]  # (B, G)
    return is_own if forbidden is None else is_own | forbidden


def known_positives(known: Tensor, candidates: Tensor) -> Tensor:
    """Mark candidates that are among the row's known positives."""
    candidates = candidates.expand(len(known), candidates.shape[-1]).contiguous()  # (B, G)
    if known.shape[1] == 0:
        return torch.zeros_like(candidates, dtype=torch.bool)
    # A binary search in every row: comparing all with all would take B·G·P.
    ordered = known.sort(dim=1).values  # (B, P)
    place = torch.searchsorted(ordered, candidates).clamp(max=known.shape[1] - 1)  # (B, G)
    return (ordered.gather(1, place) == candidates) & (candidates >= 0)


# --------------------------------------------------------------------------------------------------------------------
# The hierarchy's levels


class Siblings(NamedTuple):
    """Who is whose sibling in one level: each node's parent, and the children of each parent, packed one after another.

    Attributes:
        parent: The parent of each node, of shape (K,).
        order: Node numbers grouped by parent, of shape (K,).
        start: Where each parent's children start in `order`, of shape (number of parents + 1,).
    """

    parent: Tensor
    order: Tensor
    start: Tensor

    @classmethod
    def of(cls, parent: Tensor) -> Siblings:
        """Group the nodes of a level by the parent of each, of shape (K,)."""
        counts = torch.bincount(parent)
        return cls(parent, parent.argsort(stable=True), F.pad(counts.cumsum(0), (1, 0)))


class LevelLoss(NamedTuple):
    """The loss of one level, averaged over the batch, and the share of queries that would descend correctly."""

    loss: Tensor
    accuracy: Tensor


def level_loss(
    queries: Tensor,
    centroids: Tensor,
    node: Tensor,
    siblings: Siblings,
    *,
    temperature: float,
    right: Tensor | None = None,
    documents: Tensor | None = None,
    route: Route | None = None,
) -> LevelLoss:
    """Compute L_H^(t) (Eq. 5): the right node against its siblings.

    The right node is the one above the query's document.

    Centroids are parameters that the optimizer moves off the sphere (the paper does not say what it does about that):
    they are normalized here, where they are used. An only child has loss 0. A query counts as accurate if its node
    scores higher than every sibling that is not right too; an only child always does, a tie never.

    The optimum of Eq. 5 is near the centroid and not at the document: it draws what lies under a node together. With
    `documents` given, a query is to go the way that its document would go, and no further: see `divergence`.

    Args:
        queries: Unit vectors, of shape (B, n).
        centroids: The level's centroids, of any length but 0, of shape (K, n).
        node: The node of each query's document in this level, of shape (B,).
        siblings: The level's nodes by parent.
        temperature: τ_h, which may be softer than the τ of the documents.
        right: Nodes that right documents of each query lie under, its own document among them, padded with −1, of shape
            (B, P): those among the siblings are right as well, −log Σ_right / Σ_siblings. Where `documents` are given,
            only the accuracy looks at them.
        documents: The queries' documents, unit vectors of shape (B, n), to go the way of, in place of Eq. 5.
        route: "full" scores all K nodes and masks the strangers, "gather" collects each query's siblings first; by
            default the cheaper one. They agree.
    """
    counts = siblings.start.diff()
    width = int(counts[siblings.parent[node]].max()) if len(node) else 0
    route = route or _cheaper_route(len(queries), len(centroids), centroids.shape[1], width)
    family = (_all_nodes if route == "full" else _gathered_nodes)(centroids, node, siblings, width)
    scores = family.scores(queries, temperature)  # (B, W)
    positive = family.of_own(scores)  # (B,)
    is_right = family.is_own  # (B, W)
    if right is not None:
        is_right = is_right | (known_positives(right, family.nodes) & ~family.strangers)
    if documents is None:
        loss = contrastive(positive, scores, family.strangers | family.is_own)
        if right is not None:
            loss = loss - contrastive(positive, scores, ~is_right | family.is_own)
    else:
        loss = divergence(scores, family.scores(documents.detach(), temperature), family.strangers)
    accurate = ((scores < positive[:, None]) | family.strangers | is_right).all(dim=1)  # (B,)
    return LevelLoss(loss.mean(), accurate.to(loss.dtype).mean())


def divergence(scores: Tensor, target: Tensor, forbidden: Tensor) -> Tensor:
    """Compute KL(softmax of the target ‖ softmax of the scores), per query.

    Serves two: at a level, the target is the scores of a query's document with the nodes, so that the query goes the
    way of its document, and the gradient is 0 where both score alike: nothing is drawn to a centroid. And among a
    document's neighbors, the target is what a teacher thinks of them. No gradient passes through the target.
    """
    wanted = target.detach().masked_fill(forbidden, -torch.inf).log_softmax(dim=1)
    found = scores.masked_fill(forbidden, -torch.inf).log_softmax(dim=1)
    differences = (wanted - found).masked_fill(forbidden, 0.0)  # −inf less −inf is no number
    return (wanted.exp() * differences).sum(dim=1)  # (B,)


def _cheaper_route(batch_size: int, nodes: int, dim: int, width: int) -> Route:
    """Choose the cheaper route: score all nodes, or gather the siblings.

    It goes by time, unless the gathered siblings (B, width, n) would be both huge and larger than the scores (B, K).
    """
    gathered = batch_size * width * dim
    if gathered > _GATHER_LIMIT and gathered > batch_size * nodes:
        return "full"
    return "gather" if _GATHERED_COST * batch_size * width < (batch_size + _TABLE_COST) * nodes else "full"


class _Family(NamedTuple):
    """The nodes that each query of a batch is scored with: its node, that one's siblings, and strangers to be masked.

    Attributes:
        nodes: Node numbers, of shape (K,), or of shape (B, W) where each query has its own.
        centroids: Theirs, of shape (K, n) or (B, W, n).
        is_own: True at the node of each query's document, once a row, of shape (B, W).
        strangers: True where a node is no child of the same parent, or only fills the row up, of shape (B, W).
    """

    nodes: Tensor
    centroids: Tensor
    is_own: Tensor
    strangers: Tensor

    def scores(self, vectors: Tensor, temperature: float) -> Tensor:
        """Score with normalized centroids, dividing scores to save a copy."""
        lengths = precise(self.centroids).norm(dim=-1).clamp_min(1e-12)
        return scores_of(vectors, self.centroids, temperature) / lengths  # (B, W)

    def of_own(self, scores: Tensor) -> Tensor:
        """Select each row's score of its own node.

        A sum of products would let padding into the gradient.
        """
        return scores.gather(1, self.is_own.int().argmax(dim=1, keepdim=True)).squeeze(1)  # (B,)


def _all_nodes(centroids: Tensor, node: Tensor, siblings: Siblings, width: int) -> _Family:
    nodes = torch.arange(len(centroids), device=node.device)  # (K,)
    return _Family(nodes, centroids, nodes == node[:, None], siblings.parent != siblings.parent[node][:, None])


def _gathered_nodes(centroids: Tensor, node: Tensor, siblings: Siblings, width: int) -> _Family:
    first = siblings.start[siblings.parent[node]][:, None]  # (B, 1)
    end = siblings.start[siblings.parent[node] + 1][:, None]
    place = first + torch.arange(width, device=node.device)  # (B, W)
    nodes = siblings.order[place.minimum(end - 1)]  # (B, W), short rows padded with their last child
    padding = place >= end
    return _Family(nodes, F.embedding(nodes, centroids), (nodes == node[:, None]) & ~padding, padding)


# --------------------------------------------------------------------------------------------------------------------
# The whole


@dataclass(frozen=True)
class BatchLevel:
    """One of the first M levels, as a batch sees it.

    Attributes:
        centroids: Of shape (K, n).
        siblings: The level's nodes by parent.
        node: The node of each query's document, of shape (B,).
        right: The nodes of all its right documents, that one among them, padded with −1, of shape (B, P); None: that
            one alone.
    """

    centroids: Tensor
    siblings: Siblings
    node: Tensor
    right: Tensor | None = None


@dataclass(frozen=True)
class Sampled:
    """Documents sampled under one prefix of each query's path.

    Attributes:
        vectors: Of shape (B, S, n).
        forbidden: True where one must not be used, of shape (B, S).
    """

    vectors: Tensor
    forbidden: Tensor | None = None


@dataclass(frozen=True)
class TeacherScores:
    """Neighbors of each query's document, and what a teacher thinks of the document and of them.

    Attributes:
        vectors: The neighbors', of shape (B, S, n).
        scores: The teacher's, divided by its temperature, the document first, of shape (B, 1 + S).
        forbidden: True where a neighbor only fills the row up, of shape (B, S).
    """

    vectors: Tensor
    scores: Tensor
    forbidden: Tensor


@dataclass(frozen=True)
class InBatch:
    """How the batch's documents and queries are paired and masked, under the names of :func:`bidirectional`."""

    own_row: Tensor | None = None
    all_queries: Tensor | None = None
    forbidden_batch: Tensor | None = None
    forbidden_queries: Tensor | None = None


@dataclass(frozen=True)
class HCESummands:
    """L_HCE and what it is made of, all scalars.

    Attributes:
        total: What to call backward on.
        level_losses: Those of the levels 1 … M, each unweighted.
        accuracies: The share of queries that would descend correctly at each of them.
        document_loss: The sum of the document losses, of the levels M + 1 … L.
        neighbor_loss: How far the ranking of neighbors is from the teacher's; None without a teacher.
    """

    total: Tensor
    level_losses: tuple[Tensor, ...]
    accuracies: tuple[Tensor, ...]
    document_loss: Tensor
    neighbor_loss: Tensor | None = None


def hce_loss(
    queries: Tensor,
    documents: Tensor,
    levels: Sequence[BatchLevel],
    sampled: Sequence[Sampled | None] = (None,),
    *,
    temperature: float,
    level_temperature: float | None = None,
    level_target: LevelTarget = "node",
    level_weight: float = 1.0,
    pairing: InBatch | None = None,
    teacher: TeacherScores | None = None,
) -> HCESummands:
    """Compute L_HCE (Eq. 6): level losses 1 … M, bidirectional M + 1 … L.

    M is the number of `levels`, L − M the number of entries in `sampled`. The paper's samples for t are drawn under
    path[:t], which at t = L is the document itself; we take them to be drawn under its parent, path[:t−1].

    Args:
        queries: Unit vectors, of shape (B, n).
        documents: Unit vectors, of shape (G, n); query b belongs to document b unless `pairing` says otherwise.
        levels: The first M levels, from the one below the root downwards; may be empty.
        sampled: One entry for each of the levels M + 1 … L; None for in-batch negatives only.
        temperature: τ, of the documents.
        level_temperature: τ_h, of the levels; τ if not given, as in the paper. Softer (0.15 next to τ = 0.05) was
            better in our measurements.
        level_target: "node" is Eq. 5; "document" has a query go the way of its document, see `divergence`.
        level_weight: What the level losses count, 1 in the paper; their values are reported unweighted.
        pairing: Which query belongs to which document, across processes, and the masks.
        teacher: Neighbors to be ranked as a teacher ranks them, which the paper does not have; counts once.
    """
    if not sampled:
        raise InputError("sampled is empty: below the levels there is always the document (use None for no samples).")
    tau = temperature if level_temperature is None else level_temperature
    pairing = pairing or InBatch()
    own_documents = documents if pairing.own_row is None else documents[pairing.own_row]  # (B, n)
    followed = own_documents if level_target == "document" else None
    by_level = [
        level_loss(
            *(queries, each.centroids, each.node, each.siblings), temperature=tau, right=each.right, documents=followed
        )
        for each in levels
    ]
    document_loss = torch.stack(
        [
            bidirectional(
                queries,
                documents,
                None if each is None else each.vectors,
                temperature=temperature,
                forbidden_sampled=None if each is None else each.forbidden,
                **vars(pairing),
            )
            for each in sampled
        ]
    ).sum()
    level_losses = tuple(level.loss for level in by_level)
    total = torch.stack([*(level_weight * loss for loss in level_losses), document_loss]).sum()
    neighbor_loss = None
    if teacher is not None:
        candidates = torch.cat(
            [own_documents[:, None], teacher.vectors.to(own_documents.dtype)], dim=1
        )  # (B, 1 + S, n)
        scores = scores_of(queries, candidates, temperature)
        neighbor_loss = divergence(scores, teacher.scores, F.pad(teacher.forbidden, (1, 0))).mean()
        total = total + neighbor_loss
    return HCESummands(total, level_losses, tuple(level.accuracy for level in by_level), document_loss, neighbor_loss)
