"""Several processes as one: work shared out, rows gathered with their gradients, gradients averaged.

Alone, everything here returns what it was given, so one code path serves one process and many. Processes exchange
numbers, JSON and safetensors: nothing is pickled.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays
from torch import Tensor

from hce.errors import InputError
from hce.files import other_identity, writing_to

T = TypeVar("T")
R = TypeVar("R")
ARRAY, JSON = "array", "json"  # keys of a message
_working_together: ContextVar[bool] = ContextVar("working_together", default=False)


def process_count() -> int:
    """Return the number of processes; 1 when alone."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def process_rank() -> int:
    """Return this process's rank; 0 when alone."""
    return dist.get_rank() if process_count() > 1 else 0


def require_alike(facts: Mapping[str, Any]) -> None:
    """Fail on all ranks if they disagree on these facts, whose names users know.

    Raises:
        InputError: the line names a fact and two hosts.
    """
    if process_count() == 1:
        return
    own_facts = socket.gethostname(), json.dumps(dict(facts))
    (first, wanted), *others = [(host, json.loads(each)) for host, each in _messages(own_facts)]
    for host, found in others:
        name = other_identity(wanted, found)
        if name is not None:
            raise InputError(
                f"the {name} is {wanted[name]!r} on {first} and {found.get(name)!r} on {host}; give all hosts the same"
            )


def require_shared(folder: Path) -> None:
    """Fail if a folder is not the same for all processes, or cannot be written to.

    Raises:
        InputError: this process does not see what the first one writes there.
    """
    if process_count() == 1:
        return
    note = folder / _messages(f".hce-{secrets.token_hex(8)}")[0]
    if is_first_process():
        with writing_to(note):
            note.touch()
    wait_for_all()
    sees = note.exists()
    wait_for_all()
    if is_first_process():
        note.unlink(missing_ok=True)
    if not sees:
        raise InputError(f"{folder} of {socket.gethostname()} is not that of the first host; give one that all share")


class _Gather(torch.autograd.Function):
    """All processes' rows, stacked; backward sums the gradients that all processes have for our rows."""

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


def with_averaged_gradient(parameter: Tensor) -> Tensor:
    """Average a parameter's gradient over the processes: DistributedDataParallel only sees the encoder's."""
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
    """Return whether this process writes the files and talks to the user."""
    return process_rank() == 0


def gather_rows(rows: np.ndarray, device: torch.device) -> np.ndarray:
    """Return all processes' rows stacked; all must have the same number."""
    return gather(torch.from_numpy(rows).to(device)).cpu().numpy()


def own_rows(count: int) -> slice:
    """Return this process's part of `count` rows.

    All parts have one size, and up to (processes − 1) rows are left.
    """
    each = count // process_count()
    return slice(process_rank() * each, (process_rank() + 1) * each)


@contextmanager
def working_together(wanted: bool = True) -> Iterator[None]:
    """Let `share_out` share work in this block; all processes must do the same work in the same order.

    It is off by default: a tree that one process alone grows must not wait for the others.
    """
    token = _working_together.set(wanted)
    try:
        yield
    finally:
        _working_together.reset(token)


def share_out(work: Callable[[Sequence[T]], list[R]], items: Sequence[T]) -> list[R]:
    """Return the results of `work(items)`, one an item; processes that work together each do a share.

    Results are arrays, numbers, strings, None, and tuples and lists of these; a tuple from another process is a list.
    """
    count = process_count()
    if count == 1 or not _working_together.get():
        return work(items)
    with working_together(False):  # the work on a share is this process's own affair
        own = work(items[process_rank() :: count])
    results: list[Any] = [None] * len(items)
    for rank, share in enumerate(_messages(own)):
        results[rank::count] = share
    return results


def _messages(own: Any) -> list[Any]:
    """Return the messages of all processes by rank; see `share_out` for what a message can hold."""
    message = torch.frombuffer(bytearray(_packed(own)), dtype=torch.uint8).to(_device_of_exchange())
    sizes = gather(torch.tensor([len(message)], dtype=torch.int64, device=message.device)).tolist()
    everyones = gather(torch.nn.functional.pad(message, (0, max(sizes) - len(message)))).view(len(sizes), -1)
    return [_unpacked(everyone[:size].cpu().numpy().tobytes()) for everyone, size in zip(everyones, sizes, strict=True)]


def _device_of_exchange() -> torch.device:
    """Return the device of tensors that processes exchange: the CPU, or with NCCL and the like their own."""
    if dist.get_backend() in ("gloo", "mpi"):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator() or torch.device("cuda")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _packed(value: Any) -> bytes:
    """Pack nested lists of arrays and plain values: arrays as safetensors, the rest as JSON with arrays by number."""
    arrays: list[np.ndarray] = []

    def plain(part: Any) -> Any:
        if isinstance(part, np.ndarray):
            arrays.append(np.ascontiguousarray(part).reshape(part.shape))
            return {ARRAY: len(arrays) - 1}
        return [plain(each) for each in part] if isinstance(part, list | tuple) else part

    text = json.dumps(plain(value)).encode()
    return save_arrays({JSON: np.frombuffer(text, np.uint8), **{str(at): array for at, array in enumerate(arrays)}})


def _unpacked(packed: bytes) -> Any:
    """Return what `_packed` packed."""
    arrays = load_arrays(packed)
    return json.loads(arrays[JSON].tobytes(), object_hook=lambda part: arrays[str(part[ARRAY])])


def wait_for_all() -> None:
    """Wait until every process has come this far."""
    if process_count() > 1:
        dist.barrier()


def seed_step(seed: int, step: int) -> None:
    """Seed torch's generators for a step: the same at each run, and different in each process."""
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
    return {name: total / process_count() for name, total in _exchanged(values, device, dist.all_reduce).items()}


def take_weights_of_the_first(parameters: Iterable[Tensor]) -> None:
    """Give all processes the first one's weights: processors of two kinds compute slightly different ones."""
    if process_count() > 1:
        for parameter in parameters:
            sent = parameter.data.to(_device_of_exchange())  # a table is in memory, and NCCL sends from a GPU
            dist.broadcast(sent, src=0)
            parameter.data.copy_(sent)


def of_the_first(values: dict[str, float], device: torch.device) -> dict[str, float]:
    """Broadcast the first process's values, so that every process decides the same."""
    return _exchanged(values, device, partial(dist.broadcast, src=0))


def _exchanged(values: dict[str, float], device: torch.device, exchange: Callable[[Tensor], Any]) -> dict[str, float]:
    """Exchange values between the processes as one tensor, which `exchange` changes in place."""
    if process_count() == 1:
        return values
    packed = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    exchange(packed)
    return dict(zip(values, packed.tolist(), strict=True))
