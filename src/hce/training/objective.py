"""L_HCE as a module that knows the tree, holds the centroids, and masks false negatives.

The same module serves `hce.training.steps` and sentence-transformers' own trainer; the equations are in
`hce.training.losses`. The paper is silent about false negatives. A *forbidden* mask is True where a candidate is no
true negative of a row's query. Shapes as in `hce.training.losses`: B queries, G documents in the batch, S sampled for
each query.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hce.errors import InputError
from hce.processes import gather, process_count, with_averaged_gradient
from hce.training.losses import (
    BatchLevel,
    HCESummands,
    InBatch,
    Sampled,
    Siblings,
    TeacherScores,
    hce_loss,
    known_positives,
    precise,
    scores_of,
)
from hce.training.recipe import LevelTarget
from hce.tree.hierarchy import Hierarchy


@dataclass(frozen=True)
class ComparedDocuments:
    """Documents as masks compare them: those of a batch have one axis (G,), sampled negatives two (B, S).

    Attributes:
        positions: In the corpus, −1 for unknown, of shape (G,) or (B, S).
        groups: Equal for equal texts, −1 for unknown, of the shape of `positions`.
        vectors: Embeddings, of shape (G, n) or (B, S, n); only looked at for near-duplicates.
    """

    positions: Tensor
    groups: Tensor | None = None
    vectors: Tensor | None = None


class Positions(NamedTuple):
    """Where the documents of a batch stand in the corpus; −1 stands for "unknown" and for padding.

    Attributes:
        own: Each query's document, of shape (B,); all are known.
        sampled: The sampled negatives, of shape (B, S).
        known: Documents known to be right for each query, of shape (B, P).
    """

    own: Tensor
    sampled: Tensor
    known: Tensor


def same(own_values: Tensor, values: Tensor) -> Tensor:
    """Mark candidates of the row's own position or group: (B,) with (G,) or (B, S) → (B, G) or (B, S).

    What is below 0 is "unknown" and equals nothing, not even itself.
    """
    return (own_values[:, None] == values) & (own_values[:, None] >= 0)


@torch.no_grad()
def near_duplicates(own_vectors: Tensor, vectors: Tensor, margin: float) -> Tensor:
    """Mark where d⁺·d⁻ > margin: unit vectors (B, n) with (G, n) or (B, S, n) → (B, G) or (B, S)."""
    return scores_of(own_vectors, vectors, temperature=1.0) > margin


def false_negatives(
    positives: ComparedDocuments,
    candidates: ComparedDocuments,
    *,
    known: Tensor | None = None,
    known_groups: Tensor | None = None,
    margin: float | None = None,
) -> Tensor:
    """Mark candidates that are no true negatives of the row's query, for any of the reasons we know of.

    Such a candidate is the positive itself, another known positive, has the text of one of them, or (with a margin)
    nearly the vector of the positive. Serves both places: candidates of the batch (G,) and sampled ones (B, S).
    """
    forbidden = same(positives.positions, candidates.positions)
    if known is not None:
        forbidden = forbidden | known_positives(known, candidates.positions)
    if positives.groups is not None and candidates.groups is not None:
        forbidden = forbidden | same(positives.groups, candidates.groups)
        if known_groups is not None:
            forbidden = forbidden | known_positives(known_groups, candidates.groups)
    if margin is not None:
        if positives.vectors is None or candidates.vectors is None:
            raise InputError(f"margin={margin} needs the vectors of the positives and of the candidates.")
        forbidden = forbidden | near_duplicates(positives.vectors, candidates.vectors, margin)
    return forbidden


class HCELoss(nn.Module):
    r"""L_HCE for sentence-transformers' own `SentenceTransformerTrainer`.

    The dataset has the columns query, positive document and, if wanted, sampled negatives, in this order, and a column
    `label`: the document's position (0, 1, …) in the corpus from which the hierarchy was made, or a list that starts
    with it and goes on with the positions of the sampled negatives (one for each of their columns) and then with those
    of further known positives of the query; −1 stands for "unknown" and for padding. Positions serve to mask false
    negatives: with the document's alone, only those within the batch are recognized.

    With M < L − 1 there are L − M document losses; the columns of negatives are then dealt out to them evenly,
    those of level M + 1 first.

    Vectors are normalized here, so the encoder need not do it.

    The centroids are parameters of this module, and the trainer trains them together with the encoder's. Their own
    learning rate is set in the training arguments, by name:
    `SentenceTransformerTrainingArguments(learning_rate_mapping={r"^centroids\.": 1e-3})`. They are not saved with the
    encoder, and not needed after training. A new hierarchy needs a new loss and a new trainer.

    Args:
        model: The encoder, a `SentenceTransformer`.
        hierarchy: The tree of the corpus.
        loss_levels: M, how many levels have a loss, from 0 (no tree) to L − 1, the default.
        temperature: τ, of the documents.
        level_temperature: τ_h, of the levels.
        level_target: "node", Eq. 5, or "document": a query goes the way of its document.
        level_weight: What the level losses count.
        mask: Whether known false negatives are left out; without, the paper's letter, only the document itself is.
        margin: Documents with d⁺·d⁻ above it are not used as negatives; None switches that off.
        groups: One for each document, equal for equal texts, of shape (N,).
        gather_across_devices: Use the documents and queries of all processes as negatives. Every process needs the same
            batch size.
    """

    paths: Tensor
    groups: Tensor

    def __init__(
        self,
        model: nn.Module,
        hierarchy: Hierarchy,
        *,
        loss_levels: int | None = None,
        temperature: float = 0.05,
        level_temperature: float = 0.15,
        level_target: LevelTarget = "node",
        level_weight: float = 1.0,
        mask: bool = True,
        margin: float | None = None,
        groups: np.ndarray | None = None,
        gather_across_devices: bool = False,
    ) -> None:
        super().__init__()
        count, depth = hierarchy.paths.shape
        loss_levels = depth - 1 if loss_levels is None else loss_levels
        if not 0 <= loss_levels < depth:
            raise InputError(f"loss_levels={loss_levels}: a tree of depth {depth} has {depth - 1} levels of centroids.")
        if groups is not None and len(groups) != count:
            raise InputError(f"groups has {len(groups)} entries for {count} documents.")
        self.model = model
        self.depth = depth
        self.temperature = temperature
        self.level_temperature = level_temperature
        self.level_target = level_target
        self.level_weight = level_weight
        self.mask = mask
        self.margin = margin
        self.gather_across_devices = gather_across_devices
        used = hierarchy.levels[:loss_levels]
        self.centroids = nn.ParameterList(nn.Parameter(_float_copy(level.centroids)) for level in used)
        for t, level in enumerate(used, start=1):
            for name, values in Siblings.of(_integers(level.parent))._asdict().items():
                self.register_buffer(f"level_{t}_{name}", values, persistent=False)
        self.register_buffer("paths", _integers(hierarchy.paths[:, :loss_levels]), persistent=False)
        groups = np.full(count, -1) if groups is None or not mask else groups
        self.register_buffer("groups", _integers(groups), persistent=False)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor) -> dict[str, Tensor]:
        """Return the summands of the loss by name.

        The trainer backpropagates their sum and logs each.
        """
        embeddings = [self.model(features)["sentence_embedding"] for features in sentence_features]
        summands = self.summands(embeddings, self.positions(labels, max(0, len(embeddings) - 2)))
        named = {f"level_{t}": self.level_weight * loss for t, loss in enumerate(summands.level_losses, start=1)}
        return {**named, "document": summands.document_loss}

    def summands(
        self, embeddings: Sequence[Tensor], positions: Positions, teacher: TeacherScores | None = None
    ) -> HCESummands:
        """Compute the loss of encoded columns, each of shape (B, n): queries, documents, sampled negatives."""
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
            temperature=self.temperature,
            level_temperature=self.level_temperature,
            level_target=self.level_target,
            level_weight=self.level_weight,
            pairing=self._in_batch(queries, documents, positives, known),
            teacher=teacher,
        )

    @property
    def document_loss_count(self) -> int:
        """How many document losses there are, L − M."""
        return self.depth - len(self.centroids)

    def positions(self, labels: Tensor | None, sampled_count: int) -> Positions:
        """Take the column `label` apart, of shape (B,), or (B, 1 + sampled columns + further known positives)."""
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
        return ComparedDocuments(positions, self._groups_of(positions), vectors.detach())

    def _groups_of(self, positions: Tensor) -> Tensor:
        return torch.where(positions >= 0, self.groups[positions.clamp_min(0)], -1)

    def _forbidden(self, positives: ComparedDocuments, candidates: ComparedDocuments, known: Tensor) -> Tensor:
        groups = self._groups_of(known)
        return false_negatives(positives, candidates, known=known, known_groups=groups, margin=self.margin)

    def _levels(self, positions: Tensor, known: Tensor) -> list[BatchLevel]:
        is_other = (known >= 0) & (known != positions[:, None])
        several = known if bool(is_other.any()) else None
        return [
            BatchLevel(
                with_averaged_gradient(centroids),
                Siblings(*(getattr(self, f"level_{t}_{name}") for name in Siblings._fields)),
                self.paths[positions, t - 1],
                None if several is None else torch.where(several >= 0, self.paths[several.clamp_min(0), t - 1], -1),
            )
            for t, centroids in enumerate(self.centroids, start=1)
        ]

    def _sampled(
        self, columns: Sequence[Tensor], positions: Tensor, positives: ComparedDocuments, known: Tensor
    ) -> Sequence[Sampled | None]:
        count = self.document_loss_count
        if not columns:
            return [None] * count
        if len(columns) % count:
            raise InputError(
                f"{len(columns)} columns of sampled negatives cannot be dealt out evenly to {count} document losses."
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
        names = ("temperature", "level_temperature", "level_target", "level_weight", "mask", "margin")
        settings = {name: getattr(self, name) for name in (*names, "gather_across_devices")}
        return {"loss_levels": len(self.centroids), **settings}


def _float_copy(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float32))  # a copy: training must not reach into the hierarchy


def _integers(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int64))
