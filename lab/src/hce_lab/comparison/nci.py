"""NCI (Wang et al., NeurIPS 2022): DSI with finer clusters and a decoder that knows its place in the tree.

It shares the two tasks of hierarchical DSI, and changes:

- divisive k-means with k = 30 and leaves of up to 30 documents;
- position-aware tokens: a number means another symbol at each step;
- the prefix-aware weight-adaptive decoder: a small decoder computes A_i from the symbols so far, and the rows of
  W_i = A_i + W score the next symbol, so they differ from node to node;
- a consistency loss: each example passes twice through the network with different dropout, giving states z and z′ at
  every step. Each has to identify the other among all states of that step in the batch, with weight α = 0.15:

      L_reg = −log exp(z · z′ / n) / Σ_{z* ≠ z} exp(z · z* / n)

A search follows 100 beams.

As in the authors' program, A_i does not depend on the query, and inner products are divided by the width n; their
paper multiplies the small decoder's output by W. Differences here: The small decoder has one layer of a quarter of the
width (theirs: four of full width). Its dropout is drawn once per distinct prefix in a batch. Input symbols and head do
not share weights, k-means is spherical, and longer ids get no bonus in the beam. The pseudo-queries are those of every
other system, instead of ten spans of 64 words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hce.training.losses import precise, scores_of
from hce_lab.comparison.dsi import trained_on_clusters
from hce_lab.comparison.generative import Alphabet, DecoderLayer, IdNetwork, sequence_losses
from hce_lab.comparison.task import Built, Task

BRANCHING, LEAF = 30, 30
CONSISTENCY = 0.15
PREFIX_LAYERS = 1
NARROWER = 4  # times: the small decoder, compared with the other


class PrefixAwareNetwork(IdNetwork):
    """A network whose head depends on the symbols so far."""

    def __init__(self, reader: Any, decoder: nn.Module, alphabet: Alphabet, **options: Any) -> None:
        super().__init__(reader, decoder, alphabet, **options)
        narrow = max(1, self.width // NARROWER)
        self.prefix_start = nn.Parameter(0.02 * torch.randn(narrow))
        self.prefix_symbols = nn.Embedding(alphabet.rows, narrow)
        self.prefix_layers = nn.ModuleList(DecoderLayer(narrow, reads=False) for _ in range(PREFIX_LAYERS))
        self.prefix_norm = nn.LayerNorm(narrow)
        self.adaptation = nn.Linear(narrow, alphabet.size * self.width, bias=False)
        nn.init.normal_(self.adaptation.weight, std=0.1 / self.width)  # A_i is small at first, compared with W
        self.to(self.device)

    def adapted(self, prefixes: Tensor) -> Tensor:
        """Compute A_i, (P, size, n), for prefixes (P, i)."""
        start = self.prefix_start.expand(len(prefixes), 1, -1)
        x = torch.cat([start, self.prefix_symbols(self.alphabet.row_of(prefixes))], dim=1)[:, None]  # (P, 1, i + 1, m)
        for layer in self.prefix_layers:
            x = layer(x)
        return self.adaptation(self.prefix_norm(x[:, 0, -1])).view(-1, self.alphabet.size, self.width)

    def logits(self, states: Tensor, step: int, prefixes: Tensor) -> Tensor:
        """See `IdNetwork.logits`; score by the rows of W + A_i."""
        flat = prefixes.reshape(states.shape[:-1].numel(), step)
        known, which = flat[:1], flat.new_zeros(len(flat))  # before the first symbol, all are equal
        if step:
            known, which = torch.unique(flat, dim=0, return_inverse=True)
        adapted = self.adapted(known)[which]  # (P, size, n)
        extra = torch.einsum("pkn,pn->pk", adapted, precise(states.reshape(-1, self.width)))
        return super().logits(states, step, prefixes) + extra.view(*states.shape[:-1], -1)

    def training_losses(self, texts: Sequence[str], codes: Tensor) -> Tensor:
        """See `IdNetwork.training_losses`; average −log p and L_reg over two passes."""
        twice = codes.repeat(2, 1)
        states = self.step_states(self.read([*texts, *texts]), twice)
        losses = sequence_losses(self.step_logits(states, twice), twice) + CONSISTENCY * consistency(states, twice)
        return losses.view(2, -1).mean(0)


def consistency(states: Tensor, codes: Tensor) -> Tensor:
    """Sum L_reg over the steps of each pass, of shape (2·B,).

    Args:
        states: those of the first passes, then of the second ones, of shape (2·B, steps, n).
        codes: their symbols, of shape (2·B, steps); padding is ignored.
    """
    total = precise(states).new_zeros(len(codes))
    for step in range(codes.shape[1]):
        there = (codes[:, step] >= 0).nonzero()[:, 0]
        rows = states[there, step]
        scores = scores_of(rows, rows, rows.shape[1])
        scores = scores.masked_fill(torch.eye(len(rows), dtype=torch.bool, device=rows.device), -torch.inf)
        other = torch.arange(len(rows), device=rows.device).roll(len(rows) // 2)
        total = total.index_add(0, there, F.cross_entropy(scores, other, reduction="none"))
    return total


def build_nci(task: Task) -> Built:
    """Train NCI, also on generated queries if the task has some."""
    return trained_on_clusters(task, "nci", BRANCHING, LEAF, PrefixAwareNetwork, by_step=True)
