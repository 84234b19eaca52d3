"""Several processes as one: rows gathered with their gradients, and gradients averaged.

Alone, everything here returns what it was given, so one code path serves one process and many.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def process_count() -> int:
    """How many processes work together; 1 when alone."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class _Gather(torch.autograd.Function):
    """All processes' rows one below another; backward adds up what every process found for our rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.count = len(rows)
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient)
        return gradient.narrow(0, dist.get_rank() * ctx.count, ctx.count)


def gather(rows: Tensor) -> Tensor:
    """(B, …) → (G, …), with gradients. All processes must have the same B."""
    return rows if process_count() == 1 else _Gather.apply(rows)


def shared(parameter: Tensor) -> Tensor:
    """The parameter, with its gradient averaged over the processes: DistributedDataParallel only sees the encoder's."""
    if process_count() == 1:
        return parameter

    def average(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient / dist.get_world_size()

    alias = parameter.view_as(parameter)
    if alias.requires_grad:
        alias.register_hook(average)
    return alias
