"""The paper's losses: functions of tensors, and L_HCE as a module that knows the tree and masks false negatives.

The functions take vectors, node numbers and masks; nothing here tokenizes, samples, clusters or reads a corpus.
`HCELoss` serves `hce.training.steps` and sentence-transformers' own trainer. "Eq." and "App." are those of the paper,
*Hierarchical Corpus Encoder*. The paper does not mention false negatives.

Letters in shapes:

    B: queries on this process, each with one document
    G: documents on all processes together; B with one process
    S: sampled negatives per query
    P: known positives per query, padded with −1
    K: nodes of a level
    n: dimensions of a vector

A *forbidden* mask is True where a document must not be used as a negative. Scores are computed in float32, also under
autocast: with τ = 0.01 logits reach 100, where bfloat16 has steps of 0.5. Float64 stays float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hce.errors import InputError
from hce.processes import gather, process_count, with_averaged_gradient
from hce.training.recipe import LevelTarget
from hce.tree.hierarchy import Hierarchy

Route = Literal["full", "gather"]

# The cost of a float, forward and backward, in multiply-adds: of a gathered float, and of one of the full table.
# Measured on one CPU core with n = 384. Elsewhere this is a guess; a wrong guess costs time, not correctness.
_GATHERED_COST, _TABLE_COST = 200, 300
# Past this many gathered floats (1 GiB) a batch is scored in full, if that takes fewer floats.
_GATHER_LIMIT = 2**28


# ------------------------------------------------------------------------------------------------- the contrastive loss


def precise(x: Tensor) -> Tensor:
    """Return a tensor in float32; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()


def scores_of(queries: Tensor, candidates: Tensor, temperature: float) -> Tensor:
    """Return S(q, d) = q·d / τ.

    Queries (B, n) with shared candidates (G, n) give (B, G). With candidates per query, (B, S, n), they give (B, S).
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
    """Compute L_C (Eq. 1), −log softmax of the positive: (B,) and (B, K) → (B,).

    A query without an allowed negative has loss 0 and gradient 0.
    """
    # Subtract the positive first: else rounding of two large numbers would swamp a small loss.
    gaps = negatives - positive[:, None]  # (B, K)
    if forbidden is not None:
        gaps = gaps.masked_fill(forbidden, -torch.inf)
    return torch.cat([gaps.new_zeros(len(gaps), 1), gaps], dim=1).logsumexp(dim=1)  # (B,)


def bidirectional(
    queries: Tensor,  # of this process, (B, n)
    documents: Tensor,  # of the batch, (G, n)
    sampled: Tensor | None = None,  # each query's own sampled negatives, (B, S, n)
    *,
    temperature: float,
    own_row: Tensor | None = None,  # of each query's document in `documents`, (B,); by default 0, 1, …, B−1
    all_queries: Tensor | None = None,  # the partners of `documents`, (G, n); by default `queries`
    forbidden_batch: Tensor | None = None,  # document g as a negative of query b, (B, G)
    forbidden_queries: Tensor | None = None,  # query g as a negative of query b's document, (B, G)
    forbidden_sampled: Tensor | None = None,  # sample s as a negative of query b; True for padding, (B, S)
) -> Tensor:
    """Compute L_C^↔ (App. A), both ways, averaged over the batch.

    Query → documents contrasts with all documents of the batch and with the query's own sampled negatives;
    document → queries contrasts with all queries of the batch and never with samples. The two are added, not averaged,
    as in the paper. With several processes, each passes its own queries, and the documents and queries of all. If all
    have equally many queries, the mean of their losses is the loss of the entire batch. Without `all_queries`,
    `forbidden_queries` is the transpose of `forbidden_batch` by default.
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
    """Forbid each row's own partner too, or the positive would count twice: (B, G)."""
    is_own = torch.arange(scores.shape[1], device=scores.device) == own_column[:, None]  # (B, G)
    return is_own if forbidden is None else is_own | forbidden


def divergence(scores: Tensor, target: Tensor, forbidden: Tensor) -> Tensor:
    """Compute KL(softmax of the target ‖ softmax of the scores): (B, K) → (B,).

    The paper has no such loss. At a level, the target is the scores of the query's document: the query follows its
    document down the tree, and nothing is pulled toward a centroid. Among neighbors, the target is a teacher's scores.
    No gradient passes through the target. Each row needs an allowed column.
    """
    wanted = target.detach().masked_fill(forbidden, -torch.inf).log_softmax(dim=1)
    found = scores.masked_fill(forbidden, -torch.inf).log_softmax(dim=1)
    differences = (wanted - found).masked_fill(forbidden, 0.0)  # −inf − (−inf) is NaN
    return (wanted.exp() * differences).sum(dim=1)  # (B,)


# ------------------------------------------------------------------------------------------------- false negatives


def known_positives(known: Tensor, candidates: Tensor) -> Tensor:
    """Mark candidates, (G,) or (B, S), among a row's known positives, (B, P)."""
    candidates = candidates.expand(len(known), candidates.shape[-1]).contiguous()  # (B, G)
    if known.shape[1] == 0:
        return torch.zeros_like(candidates, dtype=torch.bool)
    # A binary search in every row: comparing all with all would take B·G·P.
    ordered = known.sort(dim=1).values  # (B, P)
    place = torch.searchsorted(ordered, candidates).clamp(max=known.shape[1] - 1)  # (B, G)
    return (ordered.gather(1, place) == candidates) & (candidates >= 0)


@dataclass(frozen=True)
class ComparedDocuments:
    """The data that masks compare documents by: (G,) of a batch, (B, S) of sampled negatives.

    Positions in the corpus and groups of equal texts are −1 if unknown. Vectors, (G, n) or (B, S, n),
    reveal near-duplicates.
    """

    positions: Tensor
    groups: Tensor | None = None
    vectors: Tensor | None = None


@torch.no_grad()
def near_duplicates(own_vectors: Tensor, vectors: Tensor, margin: float) -> Tensor:
    """Mark where d⁺·d⁻ > margin: (B, n) with (G, n) or (B, S, n) → (B, G) or (B, S)."""
    return scores_of(own_vectors, vectors, temperature=1.0) > margin


def false_negatives(
    positives: ComparedDocuments,
    candidates: ComparedDocuments,
    *,
    known: Tensor | None = None,
    known_groups: Tensor | None = None,
    margin: float | None = None,
) -> Tensor:
    """Mark candidates, (G,) or (B, S), that are no true negatives of the row's query.

    These are the positive itself, other known positives, documents with the text of either, and (with a margin)
    near-duplicates of the positive. The paper excludes only the positive itself. `known` and `known_groups` are of
    shape (B, P), padded with −1.
    """
    forbidden = known_positives(_joined(positives.positions, known), candidates.positions)
    if positives.groups is not None and candidates.groups is not None:
        forbidden = forbidden | known_positives(_joined(positives.groups, known_groups), candidates.groups)
    if margin is not None:
        if positives.vectors is None or candidates.vectors is None:
            raise InputError(f"margin={margin} needs the vectors of the positives and of the candidates.")
        forbidden = forbidden | near_duplicates(positives.vectors, candidates.vectors, margin)
    return forbidden


def _joined(own: Tensor, known: Tensor | None) -> Tensor:
    """Put a row's own document before its known ones: (B, 1 + P)."""
    return own[:, None] if known is None else torch.cat([own[:, None], known], dim=1)


# ------------------------------------------------------------------------------------------------- a level of the tree


class Siblings(NamedTuple):
    """Which nodes of a level are siblings."""

    parent: Tensor  # The parent of each node, of shape (K,)
    order: Tensor  # Node numbers grouped by parent, of shape (K,)
    start: Tensor  # Where each parent's children start in `order`, of shape (number of parents + 1,)

    @classmethod
    def of(cls, parent: Tensor) -> Siblings:
        """Group the nodes of a level by the parent of each, of shape (K,)."""
        return cls(parent, parent.argsort(stable=True), F.pad(torch.bincount(parent).cumsum(0), (1, 0)))


class LevelLoss(NamedTuple):
    """The loss of one level, averaged over the batch, and the share of queries that would descend correctly."""

    loss: Tensor
    accuracy: Tensor


def level_loss(
    queries: Tensor,  # unit vectors, (B, n)
    centroids: Tensor,  # of the level, of any length but 0, (K, n)
    node: Tensor,  # above each query's document, (B,)
    siblings: Siblings,
    *,
    temperature: float,  # τ_h, which may be softer than the τ of the documents
    right: Tensor | None = None,  # the nodes above each query's known positives, (B, P)
    documents: Tensor | None = None,  # of the queries, unit vectors, (B, n)
    route: Route | None = None,
) -> LevelLoss:
    """Compute L_H^(t) (Eq. 5): the node above the document against its siblings.

    The optimizer moves centroids off the sphere. The paper does not say what happens then; here they are normalized
    before each use. An only child has loss 0. A query is accurate if its node scores higher than every wrong sibling.

    By Eq. 5, a query is best near the centroid, not at its document. So Eq. 5 pulls all documents of a node together.
    With `documents`, the query instead learns to score these siblings as its document does, see `divergence`.

    With Eq. 5, siblings among the `right` nodes count as right too: −log (Σ_right exp S / Σ_siblings exp S). The paper
    has one right node. The route "full" scores all K nodes and masks those of other parents; "gather" collects each
    query's siblings. Both give the same loss; the default is the cheaper one.
    """
    counts, parent = siblings.start.diff(), siblings.parent[node]  # (B,)
    width = int(counts[parent].max()) if len(node) else 0
    route = route or _cheaper_route(len(queries), len(centroids), centroids.shape[1], width)
    if route == "full":  # strangers: nodes of other parents, and padding
        nodes = torch.arange(len(centroids), device=node.device)  # (K,)
        candidates, strangers = centroids, siblings.parent != parent[:, None]
        is_own = nodes == node[:, None]  # (B, K)
    else:
        place = siblings.start[parent][:, None] + torch.arange(width, device=node.device)  # (B, W)
        strangers = place >= siblings.start[parent + 1][:, None]
        nodes = siblings.order[place.minimum(siblings.start[parent + 1][:, None] - 1)]  # padded with the last child
        candidates, is_own = F.embedding(nodes, centroids), (nodes == node[:, None]) & ~strangers

    def scores_with_nodes(vectors: Tensor) -> Tensor:
        """Score against normalized centroids; dividing scores saves copying centroids."""
        lengths = precise(candidates).norm(dim=-1).clamp_min(1e-12)
        return scores_of(vectors, candidates, temperature) / lengths  # (B, W)

    scores = scores_with_nodes(queries)
    # A sum of products with `is_own` would let padding into the gradient.
    positive = scores.gather(1, is_own.int().argmax(dim=1, keepdim=True)).squeeze(1)  # (B,)
    is_right = is_own if right is None else is_own | (known_positives(right, nodes) & ~strangers)
    if documents is not None:
        loss = divergence(scores, scores_with_nodes(documents.detach()), strangers)
    else:
        loss = contrastive(positive, scores, strangers | is_own)
        if right is not None:
            loss = loss - contrastive(positive, scores, ~is_right | is_own)
    accurate = ((scores < positive[:, None]) | strangers | is_right).all(dim=1)  # (B,)
    return LevelLoss(loss.mean(), accurate.to(loss.dtype).mean())


def _cheaper_route(batch_size: int, nodes: int, dim: int, width: int) -> Route:
    """Choose by time; "full" if gathered siblings are huge and its scores fewer."""
    gathered = batch_size * width * dim
    if gathered > _GATHER_LIMIT and gathered > batch_size * nodes:
        return "full"
    return "gather" if _GATHERED_COST * batch_size * width < (batch_size + _TABLE_COST) * nodes else "full"


# ------------------------------------------------------------------------------------------------- L_HCE


@dataclass(frozen=True)
class BatchLevel:
    """One of the first M levels, as a batch sees it; see `level_loss`."""

    centroids: Tensor
    siblings: Siblings
    node: Tensor
    right: Tensor | None = None


@dataclass(frozen=True)
class Sampled:
    """Documents sampled under one prefix of each document's path, (B, S, n), and their forbidden mask, (B, S)."""

    vectors: Tensor
    forbidden: Tensor | None = None


@dataclass(frozen=True)
class TeacherScores:
    """Neighbors of each query's document, (B, S, n); a teacher's scores of document, then neighbors, (B, 1 + S).

    `forbidden` is True for padding, of shape (B, S).
    """

    vectors: Tensor
    scores: Tensor
    forbidden: Tensor


@dataclass(frozen=True)
class InBatch:
    """The arguments of `bidirectional` that pair and mask the batch's documents and queries."""

    own_row: Tensor | None = None
    all_queries: Tensor | None = None
    forbidden_batch: Tensor | None = None
    forbidden_queries: Tensor | None = None


@dataclass(frozen=True)
class HCESummands:
    """L_HCE and its summands, all scalars: unweighted level losses 1 … M, summed document losses, the neighbor loss."""

    total: Tensor
    level_losses: tuple[Tensor, ...]
    accuracies: tuple[Tensor, ...]
    document_loss: Tensor
    neighbor_loss: Tensor | None = None


def hce_loss(
    queries: Tensor,  # unit vectors, (B, n)
    documents: Tensor,  # unit vectors, (G, n); query b belongs to document b, or as `pairing` says
    levels: Sequence[BatchLevel],  # the first M, from the one below the root downward
    sampled: Sequence[Sampled | None] = (None,),  # for each of the levels M + 1 … L; None: in-batch negatives only
    *,
    temperature: float,  # τ, of the documents
    level_temperature: float | None = None,  # τ_h; τ by default, as in the paper
    level_target: LevelTarget = "node",  # Eq. 5; with "document", the query follows its document, see `divergence`
    level_weight: float = 1.0,  # of the level losses in the total; 1 in the paper
    pairing: InBatch | None = None,
    teacher: TeacherScores | None = None,  # teaches to rank neighbors, a loss with weight 1; the paper has none
) -> HCESummands:
    """Compute L_HCE (Eq. 6): level losses 1 … M, bidirectional M + 1 … L.

    The paper samples the negatives of level t under path[:t], which at t = L is the document itself. Here they come
    from one level higher, under path[:t−1].
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
    document_losses = []
    for each in sampled:
        vectors, forbidden = (None, None) if each is None else (each.vectors, each.forbidden)
        options = {"temperature": temperature, "forbidden_sampled": forbidden, **vars(pairing)}
        document_losses.append(bidirectional(queries, documents, vectors, **options))
    document_loss = torch.stack(document_losses).sum()
    level_losses = tuple(level.loss for level in by_level)
    total = torch.stack([*(level_weight * loss for loss in level_losses), document_loss]).sum()
    neighbor_loss = None
    if teacher is not None:
        neighbors = teacher.vectors.to(own_documents.dtype)
        scores = scores_of(queries, torch.cat([own_documents[:, None], neighbors], dim=1), temperature)  # (B, 1 + S)
        neighbor_loss = divergence(scores, teacher.scores, F.pad(teacher.forbidden, (1, 0))).mean()
        total = total + neighbor_loss
    return HCESummands(total, level_losses, tuple(level.accuracy for level in by_level), document_loss, neighbor_loss)


class Positions(NamedTuple):
    """Corpus positions of a batch's documents: each query's own (B,), sampled (B, S), known positives (B, P).

    −1 stands for "unknown" and for padding; a query's own document is never −1.
    """

    own: Tensor
    sampled: Tensor
    known: Tensor


class HCELoss(nn.Module):
    r"""L_HCE for sentence-transformers' own `SentenceTransformerTrainer`.

    The dataset has the columns query, positive document and, if wanted, sampled negatives, in this order. Its column
    `label` has the document's position (0, 1, …) in the corpus that the hierarchy was made from. A label may also be a
    list: the document's position, those of the sampled negatives, then those of the query's other known positives. −1
    stands for "unknown" and for padding. The document's position selects its nodes and masks false negatives within the
    batch. The samples' positions mask false negatives among the samples. Known positives are masked in both.

    There are L − M document losses, 1 by default. They share the columns of negatives evenly, level M + 1 first.
    Vectors are normalized here, so the encoder need not do it.

    The centroids are parameters of this module, and the trainer trains them together with the encoder. Set their
    learning rate by name in the training arguments:
    `SentenceTransformerTrainingArguments(learning_rate_mapping={r"^centroids\.": 1e-3})`. Centroids are not saved with
    the encoder, and not needed after training. A new hierarchy needs a new loss and a new trainer.

    With `gather_across_devices`, the documents and queries of all processes are negatives; every process then needs the
    same batch size.
    """

    paths: Tensor
    groups: Tensor

    def __init__(
        self,
        model: nn.Module,  # the encoder, a `SentenceTransformer`
        hierarchy: Hierarchy,
        *,
        loss_levels: int | None = None,  # M, how many levels have a loss, from 0 (no tree) to L − 1, the default
        temperature: float = 0.05,
        level_temperature: float = 0.15,
        level_target: LevelTarget = "node",
        level_weight: float = 1.0,
        mask: bool = True,  # mask known false negatives; False masks only the document itself, as in the paper
        margin: float | None = None,  # documents with d⁺·d⁻ above this are no negatives; None: off
        groups: np.ndarray | None = None,  # a number for each document, equal for equal texts, (N,)
        gather_across_devices: bool = False,
    ) -> None:
        super().__init__()
        count, depth = hierarchy.paths.shape
        loss_levels = depth - 1 if loss_levels is None else loss_levels
        if not 0 <= loss_levels < depth:
            raise InputError(f"loss_levels={loss_levels}: a tree of depth {depth} has {depth - 1} levels of centroids.")
        if groups is not None and len(groups) != count:
            raise InputError(f"groups has {len(groups)} entries for {count} documents.")
        self.model, self.depth, self.mask, self.margin = model, depth, mask, margin
        self.gather_across_devices = gather_across_devices
        self.settings: dict[str, Any] = {  # of `hce_loss`
            "temperature": temperature,
            "level_temperature": level_temperature,
            "level_target": level_target,
            "level_weight": level_weight,
        }
        used = hierarchy.levels[:loss_levels]
        # Copies, because training must not change the hierarchy.
        copies = (torch.from_numpy(np.array(level.centroids, dtype=np.float32)) for level in used)
        self.centroids = nn.ParameterList(map(nn.Parameter, copies))
        for t, level in enumerate(used, start=1):
            for name, values in Siblings.of(_integers(level.parent))._asdict().items():
                self.register_buffer(f"level_{t}_{name}", values, persistent=False)
        self.register_buffer("paths", _integers(hierarchy.paths[:, :loss_levels]), persistent=False)
        groups = np.full(count, -1) if groups is None or not mask else groups
        self.register_buffer("groups", _integers(groups), persistent=False)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor) -> dict[str, Tensor]:
        """Return the summands by name; the trainer backpropagates their sum."""
        embeddings = [self.model(features)["sentence_embedding"] for features in sentence_features]
        summands = self.summands(embeddings, self.positions(labels, max(0, len(embeddings) - 2)))
        weight = self.settings["level_weight"]
        named = {f"level_{t}": weight * loss for t, loss in enumerate(summands.level_losses, start=1)}
        return {**named, "document": summands.document_loss}

    def summands(
        self, embeddings: Sequence[Tensor], positions: Positions, teacher: TeacherScores | None = None
    ) -> HCESummands:
        """Compute the loss of queries, documents, sampled negatives, each (B, n)."""
        if len(embeddings) < 2:
            raise InputError(f"HCELoss needs the columns query and document, and got {len(embeddings)} column(s).")
        queries, documents, *rest = (F.normalize(precise(each), dim=-1) for each in embeddings)
        positives = self._documents(positions.own, documents)
        known = positions.known if self.mask else positions.known[:, :0]  # (B, P)
        return hce_loss(
            queries,
            documents if not self.gather_across_devices else gather(documents),
            self._levels(positives.positions, known),
            self._sampled(rest, positions.sampled, positives, known),
            pairing=self._in_batch(queries, documents, positives, known),
            teacher=teacher,
            **self.settings,
        )

    def positions(self, labels: Tensor | None, sampled_count: int) -> Positions:
        """Split the column `label`: (B,), or (B, 1 + sampled columns + known positives)."""
        if labels is None:
            raise InputError("HCELoss needs a column `label`: the position of the document in the corpus, from 0 on.")
        labels = labels.long().reshape(len(labels), -1)
        if labels.shape[1] == 1:
            labels = F.pad(labels, (0, sampled_count), value=-1)
        if labels.shape[1] < 1 + sampled_count:
            raise InputError(
                f"label has {labels.shape[1]} positions a row for one document and {sampled_count} sampled negatives: "
                f"give the document's alone, or at least {1 + sampled_count}."
            )
        low, high = int(labels[:, 0].min()), int(labels.max())
        if low < 0 or high >= len(self.paths):
            raise InputError(f"label holds position {low if low < 0 else high}, not in 0 … {len(self.paths) - 1}.")
        first_known = 1 + sampled_count
        return Positions(labels[:, 0], labels[:, 1:first_known], labels[:, first_known:])

    def _documents(self, positions: Tensor, vectors: Tensor) -> ComparedDocuments:
        return ComparedDocuments(positions, _entries(self.groups, positions), vectors.detach())

    def _forbidden(self, positives: ComparedDocuments, candidates: ComparedDocuments, known: Tensor) -> Tensor:
        groups = _entries(self.groups, known)
        return false_negatives(positives, candidates, known=known, known_groups=groups, margin=self.margin)

    def _levels(self, positions: Tensor, known: Tensor) -> list[BatchLevel]:
        is_other = (known >= 0) & (known != positions[:, None])
        several = known if bool(is_other.any()) else None
        return [
            BatchLevel(
                with_averaged_gradient(centroids),
                Siblings(*(getattr(self, f"level_{t}_{name}") for name in Siblings._fields)),
                self.paths[positions, t - 1],
                None if several is None else _entries(self.paths[:, t - 1], several),
            )
            for t, centroids in enumerate(self.centroids, start=1)
        ]

    def _sampled(
        self, columns: Sequence[Tensor], positions: Tensor, positives: ComparedDocuments, known: Tensor
    ) -> Sequence[Sampled | None]:
        count = self.depth - len(self.centroids)  # of document losses, L − M
        if not columns:
            return [None] * count
        if len(columns) % count:
            raise InputError(
                f"{len(columns)} columns of sampled negatives cannot be divided evenly among {count} document losses."
            )
        vectors = torch.stack(list(columns), dim=1)  # (B, S, n)
        candidates = self._documents(positions, vectors)
        forbidden = self._forbidden(positives, candidates, known)  # (B, S)
        parts = zip(vectors.chunk(count, dim=1), forbidden.chunk(count, dim=1), strict=True)
        return [Sampled(*part) for part in parts]

    def _in_batch(self, queries: Tensor, documents: Tensor, positives: ComparedDocuments, known: Tensor) -> InBatch:
        if not self.gather_across_devices or process_count() == 1:
            return InBatch(forbidden_batch=self._forbidden(positives, positives, known))
        everyones = self._documents(gather(positives.positions), gather(documents.detach()))  # (G,)
        offset = dist.get_rank() * len(queries)
        return InBatch(
            own_row=torch.arange(offset, offset + len(queries), device=queries.device),
            all_queries=gather(queries),
            forbidden_batch=self._forbidden(positives, everyones, known),  # (B, G)
            forbidden_queries=self._forbidden(everyones, positives, gather(known)).T,  # (B, G)
        )

    def get_config_dict(self) -> dict[str, Any]:
        """Return the settings, for the model card."""
        others = {name: getattr(self, name) for name in ("mask", "margin", "gather_across_devices")}
        return {"loss_levels": len(self.centroids), **self.settings, **others}


def _entries(values: Tensor, positions: Tensor) -> Tensor:
    """Return the values of documents, −1 for unknown ones."""
    return torch.where(positions >= 0, values[positions.clamp_min(0)], -1)


def _integers(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int64))
