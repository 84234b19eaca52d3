"""NCI (Wang et al., NeurIPS 2022): DSI with ids of finer clusters and a decoder that knows where in the tree it is.

What it changes in hierarchical DSI, whose two tasks it shares:

- divisive k-means with k = 30 and leaves of up to 30 documents;
- position-aware tokens: the same number is another symbol at each step;
- the prefix-aware weight-adaptive decoder: a small decoder over the symbols so far gives A_i, and the next symbol is
  scored by the rows of W_i = A_i + W, which so differ from node to node;
- a consistency loss: each example is read and written twice under other dropout, and the two distributions of every
  step are drawn together, with weight 0.15.

A search follows 100 beams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hce.comparison.dsi import trained_on_clusters
from hce.comparison.generative import Alphabet, DecoderLayer, IdNetwork, sequence_losses
from hce.comparison.task import Built, Task
from hce.training.losses import precise

BRANCHING, LEAF = 30, 30
CONSISTENCY = 0.15
PREFIX_LAYERS = 1
NARROWER = 4  # the small decoder than the other


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
        nn.init.normal_(self.adaptation.weight, std=0.1 / self.width)  # A_i is small at first beside W
        self.to(self.device)

    def adapted(self, prefixes: Tensor) -> Tensor:
        """Return A_i for prefixes of shape (P, i), of shape (P, size, n)."""
        start = self.prefix_start.expand(len(prefixes), 1, -1)
        x = torch.cat([start, self.prefix_symbols(self.alphabet.row_of(prefixes))], dim=1)[:, None]  # (P, 1, i + 1, m)
        for layer in self.prefix_layers:
            x = layer(x)
        return self.adaptation(self.prefix_norm(x[:, 0, -1])).view(-1, self.alphabet.size, self.width)

    def logits(self, states: Tensor, step: int, prefixes: Tensor) -> Tensor:
        """See `IdNetwork.logits`: by the rows of W + A_i."""
        flat = prefixes.reshape(states.shape[:-1].numel(), step)
        known, which = flat[:1], flat.new_zeros(len(flat))  # before the first symbol, all are alike
        if step:
            known, which = torch.unique(flat, dim=0, return_inverse=True)
        adapted = self.adapted(known)[which]  # (P, size, n)
        extra = torch.einsum("pkn,pn->pk", adapted, precise(states.reshape(-1, self.width)))
        return super().logits(states, step, prefixes) + extra.view(*states.shape[:-1], -1)

    def training_losses(self, texts: Sequence[str], codes: Tensor) -> Tensor:
        """See `IdNetwork.training_losses`: −log p, the mean of two readings, and how far these lie apart."""
        twice = codes.repeat(2, 1)
        logits = self.step_logits(self.read([*texts, *texts]), twice)
        return sequence_losses(logits, twice).view(2, -1).mean(0) + CONSISTENCY * divergences(logits, codes)


def divergences(logits: list[Tensor], codes: Tensor) -> Tensor:
    """Add up over steps the mean of KL(p‖p′) and KL(p′‖p) of two readings, of shape (B,).

    Args:
        logits: for each step the first readings' scores, then the second ones', of shape (2·B, size).
        codes: the symbols, of shape (B, steps); steps of padding do not count.
    """
    total = torch.zeros(len(codes), device=codes.device)
    for step, scores in enumerate(logits):
        first, second = scores.log_softmax(-1).chunk(2)
        both = F.kl_div(first, second, reduction="none", log_target=True) + F.kl_div(
            second, first, reduction="none", log_target=True
        )
        total = total + torch.where(codes[:, step] >= 0, both.sum(-1) / 2, 0.0)
    return total


def build_nci(task: Task) -> Built:
    """Train NCI; the task's generated queries, where there are any, are learned from along with the rest."""
    return trained_on_clusters(task, "nci", BRANCHING, LEAF, PrefixAwareNetwork, by_step=True)
