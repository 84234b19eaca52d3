"""Several processes as one: work shared out, rows gathered with their gradients, gradients averaged.

Alone, everything here returns what it was given, so one code path serves one process and many.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
R = TypeVar("R")
_working_together: ContextVar[bool] = ContextVar("working_together", default=False)

WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")  # as accelerate reads them


def join_processes() -> torch.device | None:
    """Meet the processes that accelerate, torchrun or MPI started, and return this one's device; None when alone."""
    if max(int(os.environ.get(name, "1")) for name in WORLD_SIZES) == 1:
        return None
    from accelerate import PartialState  # it takes seconds to import, and one process does without it

    return torch.device(PartialState(cpu=not torch.cuda.is_available()).device)


def leave_processes() -> None:
    """Part from the other processes when all have come this far: one that ends early can tear the others down."""
    if process_count() > 1:
        dist.barrier()
        dist.destroy_process_group()


def process_count() -> int:
    """Return how many processes work together; 1 when alone."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def process_rank() -> int:
    """Return this process's rank, from 0 on; 0 when alone."""
    return dist.get_rank() if process_count() > 1 else 0


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
        gradient = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        return gradient.narrow(0, dist.get_rank() * ctx.count, ctx.count)


def gather(rows: Tensor) -> Tensor:
    """Return all processes' rows, (B, …) → (G, …), with gradients. All processes must have the same B."""
    return rows if process_count() == 1 else _Gather.apply(rows)


def shared(parameter: Tensor) -> Tensor:
    """Average the gradient of a parameter over the processes: DistributedDataParallel only sees the encoder's."""
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


def is_first_process() -> bool:
    """Tell whether this process is the one that writes files and speaks to the user."""
    return process_rank() == 0


def gather_rows(rows: np.ndarray, device: torch.device) -> np.ndarray:
    """Return all processes' rows one below another; all must have the same number."""
    return gather(torch.from_numpy(rows).to(device)).cpu().numpy()


def own_share(count: int) -> slice:
    """Return this process's part of `count` rows; all parts are of one size, and up to (processes − 1) rows in none."""
    each = count // process_count()
    return slice(process_rank() * each, (process_rank() + 1) * each)


@contextmanager
def working_together(wanted: bool = True) -> Iterator[None]:
    """Let `share_out` share work out; all processes must then do the same work in the same order.

    This has to be asked for: a tree that one process alone grows must not wait for the others.
    """
    token = _working_together.set(wanted)
    try:
        yield
    finally:
        _working_together.reset(token)


def share_out(work: Callable[[Sequence[T]], list[R]], items: Sequence[T]) -> list[R]:
    """Return the results of `work(items)`, one an item; of processes that work together each does a share."""
    count = process_count()
    if count == 1 or not _working_together.get():
        return work(items)
    with working_together(False):  # the work on a share is this process's own affair
        own = work(items[process_rank() :: count])
    shares: list[list[R]] = [[] for _ in range(count)]
    dist.all_gather_object(shares, own)
    results: list[Any] = [None] * len(items)
    for rank, share in enumerate(shares):
        results[rank::count] = share
    return results


def wait_for_all() -> None:
    """Go on when every process has come this far."""
    if process_count() > 1:
        dist.barrier()


def seed_step(seed: int, step: int) -> None:
    """Seed torch's generators for a step: the same whenever it is taken, and different in each process."""
    torch.manual_seed(int(np.random.SeedSequence([seed, step, process_rank()]).generate_state(1)[0]))


def average_gradients(parameters: Iterable[Tensor]) -> None:
    """Replace each parameter's gradient by its mean over the processes."""
    if process_count() == 1:
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)  # everyone must take part in every reduction
        dist.all_reduce(parameter.grad)
        parameter.grad /= process_count()


def average_values(values: dict[str, float], device: torch.device) -> dict[str, float]:
    """Return the means over the processes of values that all of them have."""
    if process_count() == 1:
        return values
    packed = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    dist.all_reduce(packed)
    return dict(zip(values, (packed / process_count()).tolist(), strict=True))


def of_the_first(values: dict[str, float], device: torch.device) -> dict[str, float]:
    """Return the first process's values to all: what is decided by them must be decided alike everywhere."""
    if process_count() == 1:
        return values
    packed = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    dist.broadcast(packed, src=0)
    return dict(zip(values, packed.tolist(), strict=True))
