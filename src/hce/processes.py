"""Run several processes as one: share work, gather rows with gradients, average gradients, stop together.

With a single process, nothing is exchanged and values stay unchanged, so the same code serves one process and many.
Processes exchange numbers, JSON and safetensors; nothing is pickled.

Processes wait for each other in torch's collectives. A collective fails if a process died or was silent for `TIMEOUT`.
When one process fails, torchrun and accelerate end the others on its host. A process that stops leaves its reason in
the launcher's key-value store, so each host can report it in one line.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays
from torch import Tensor

from hce._version import __version__
from hce.errors import AwayError, HceError, InputError, one_line
from hce.files import other_identity, writing_to

T = TypeVar("T")
R = TypeVar("R")
ARRAY, JSON = "array", "json"  # keys of a message
TIMEOUT = timedelta(minutes=30)  # long, because some work is done by one process while the others wait
HEARING = 4.0  # seconds to wait until all processes have read why one stopped
GRACE = 1.0  # seconds for the others to fail with the same error on their own
SECONDS_BETWEEN_LOOKS = 0.2
_working_together: ContextVar[bool] = ContextVar("working_together", default=False)


def process_count() -> int:
    """Return the number of processes; 1 when alone."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def process_rank() -> int:
    """Return this process's rank; 0 when alone."""
    return dist.get_rank() if process_count() > 1 else 0


def is_first_process() -> bool:
    """Return whether this process writes the files and the messages."""
    return process_rank() == 0


def wait_for_all() -> None:
    """Wait until every process has reached this call."""
    if process_count() > 1:
        dist.barrier()


def require_alike(facts: Mapping[str, Any]) -> None:
    """Fail on all ranks if they disagree on these facts."""
    if process_count() == 1:
        return
    own_facts = socket.gethostname(), json.dumps(dict(facts))
    (first, wanted), *others = [(host, json.loads(each)) for host, each in _messages(own_facts)]
    for host, found in others:
        name = other_identity(wanted, found)
        if name is not None:
            raise InputError(
                f"the {name} is {wanted[name]!r} on {first}, {found.get(name)!r} on {host}; use the same on all hosts"
            )


def require_shared(folder: Path) -> None:
    """Fail if this process cannot see a file that the first one wrote to a folder."""
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
        raise InputError(f"{folder} on {socket.gethostname()} is not the first host's folder; give one that all share")


def gather(rows: Tensor) -> Tensor:
    """Gather the rows of all processes: (B, …) of each → (G, …), G = B · processes.

    The backward pass gives our own rows the sum of their gradients in all processes.
    """
    if process_count() == 1:
        return rows
    from torch.distributed.nn.functional import all_gather

    return torch.cat(all_gather(rows))


def with_averaged_gradient(parameter: Tensor) -> Tensor:
    """Return an alias of a parameter; its gradient is averaged over the processes."""
    if process_count() == 1 or not parameter.requires_grad:
        return parameter

    def average(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient / dist.get_world_size()

    alias = parameter.view_as(parameter)
    alias.register_hook(average)
    return alias


def own_rows(count: int) -> slice:
    """Return this process's share of `count` rows; the remainder is skipped."""
    each = count // process_count()
    return slice(process_rank() * each, (process_rank() + 1) * each)


@contextmanager
def working_together(wanted: bool = True) -> Iterator[None]:
    """Let `share_out` share work in this block; all processes must enter it.

    Sharing is off by default: when one process grows a tree on its own, it must not wait for the others.
    """
    token = _working_together.set(wanted)
    try:
        yield
    finally:
        _working_together.reset(token)


def share_out(work: Callable[[Sequence[T]], list[R]], items: Sequence[T]) -> list[R]:
    """Return the results of `work(items)`; each process computes a share.

    Results may be arrays, numbers, strings, None, and tuples and lists of these. A tuple arrives as a list.
    """
    count = process_count()
    if count == 1 or not _working_together.get():
        return work(items)
    with working_together(False):  # no process may wait for the others inside its own share
        own = work(items[process_rank() :: count])
    results: list[Any] = [None] * len(items)
    for rank, share in enumerate(_messages(own)):
        results[rank::count] = share
    return results


def _messages(own: Any) -> list[Any]:
    """Exchange messages; return all of them by rank (see `share_out` for types)."""
    message = torch.frombuffer(bytearray(_packed(own)), dtype=torch.uint8).to(_device_of_exchange())
    sizes = gather(torch.tensor([len(message)], dtype=torch.int64, device=message.device)).tolist()
    everyones = gather(torch.nn.functional.pad(message, (0, max(sizes) - len(message)))).view(len(sizes), -1)
    return [_unpacked(everyone[:size].cpu().numpy().tobytes()) for everyone, size in zip(everyones, sizes, strict=True)]


def _device_of_exchange() -> torch.device:
    """Return the device for exchanges: the CPU, or with NCCL the process's own."""
    if dist.get_backend() in ("gloo", "mpi"):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator() or torch.device("cuda")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _packed(value: Any) -> bytes:
    """Pack nested lists: arrays as safetensors, the rest as JSON."""
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


def seed_step(seed: int, step: int) -> None:
    """Seed torch for a step: equal in each run, different in each process."""
    torch.manual_seed(int(np.random.SeedSequence([seed, step, process_rank()]).generate_state(1)[0]))


def average_gradients(parameters: Iterable[Tensor]) -> None:
    """Replace each parameter's gradient by its mean over the processes."""
    if process_count() == 1:
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)  # every process must join every reduction
        dist.all_reduce(parameter.grad)
        parameter.grad /= process_count()


def average_values(values: dict[str, float], device: torch.device) -> dict[str, float]:
    """Return the means of values over the processes."""
    return {name: total / process_count() for name, total in _exchanged(values, device, dist.all_reduce).items()}


def take_weights_of_the_first(parameters: Iterable[Tensor]) -> None:
    """Copy the first process's weights to all; processors round differently."""
    if process_count() > 1:
        for parameter in parameters:
            sent = parameter.data.to(_device_of_exchange())  # a table is in main memory, but NCCL sends from a GPU
            dist.broadcast(sent, src=0)
            parameter.data.copy_(sent)


def of_the_first(values: dict[str, float], device: torch.device) -> dict[str, float]:
    """Broadcast the first process's values, so that all decide the same."""
    return _exchanged(values, device, partial(dist.broadcast, src=0))


def _exchanged(values: dict[str, float], device: torch.device, exchange: Callable[[Tensor], Any]) -> dict[str, float]:
    """Pack values into one tensor, and let `exchange` change it in place."""
    if process_count() == 1:
        return values
    packed = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    exchange(packed)
    return dict(zip(values, packed.tolist(), strict=True))


# ------------------------------------------------------------------------------------------------- stopping together


@contextmanager
def together(how_to_go_on: str) -> Iterator[torch.device]:
    """Work with the processes that a launcher started; yield this process's device.

    Raises:
        InputError: the hosts run different code.
        AwayError: the processes cannot meet, one stopped, or one was lost; if lost, `how_to_go_on` ends the message.
    """
    device = _meet()
    others = _Others()
    try:
        require_alike(_code())
        yield device
        others.leave()
    except (HceError, KeyboardInterrupt) as error:
        others.notify(str(error) or "it was interrupted")
        raise
    except Exception as error:
        # gloo raises plain RuntimeErrors for lost connections
        if not (isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))):
            others.notify(f"{one_line(error)} (a bug in hce)")
            raise
        said = others.reason() or f"{_lost(error)}; {how_to_go_on}"
        others.notify(said)
        raise AwayError(said) from error


def _meet() -> torch.device:
    """Wait until all processes have connected; return this process's device."""
    from accelerate import PartialState  # imported here: it takes seconds, and a single process does not need it

    try:
        return torch.device(PartialState(cpu=not torch.cuda.is_available(), timeout=TIMEOUT).device)
    except dist.DistError as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise AwayError(f"the processes cannot meet at {place} ({one_line(error)}); can all hosts reach it?") from error


def _code() -> dict[str, str]:
    """Return the versions, and a hash of hce's code, to compare between hosts."""
    digest, package = hashlib.sha256(), Path(__file__).parent
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode() + path.read_bytes())
    versions = {"hce": __version__, "torch": torch.__version__.partition("+")[0], "numpy": np.__version__}
    return {**{f"version of {name}": value for name, value in versions.items()}, "code of hce": digest.hexdigest()[:12]}


def _lost(error: Exception) -> str:
    """Return why a collective failed."""
    if "imed out" in str(error):
        return f"another process was silent for {TIMEOUT.total_seconds():.0f} s"
    found = re.search(r"\[([0-9a-f.:]+)\]:[0-9]+", str(error))
    return f"lost the connection to {found[1] if found else 'another process'}"


class _Others:
    """The other processes; all exchange short notes in the launcher's key-value store."""

    def __init__(self) -> None:
        self._rank, self._count = process_rank(), process_count()
        self._speaks = os.environ.get("LOCAL_RANK", "0") == "0"  # one process of each host reports
        # Use torch's own connection: a new one would lose its server when the first process ends.
        met = dist.distributed_c10d._get_default_store()
        self._store: Any = dist.PrefixStore("hce", met)  # type: ignore[attr-defined]

    def leave(self) -> None:
        """Wait until all are done; the first process works longer than the others."""
        if self._rank == 0:
            self._store.set("done", "")
        while not self._store.check(["done"]):
            if self._store.check(["reason"]):
                raise dist.DistError("the first process stopped")
            time.sleep(SECONDS_BETWEEN_LOOKS)
        dist.barrier()  # a process that ends early can make the others fail
        dist.destroy_process_group()

    def notify(self, reason: str) -> None:
        """Send the others the reason to stop; only each host's first process reports it."""

        def note() -> None:
            self._store.compare_set("reason", "", f"{socket.gethostname()}: {reason}")
            self._store.add("heard", 1)
            time.sleep(GRACE)
            dist.destroy_process_group()  # the others' collectives then fail, and they read the reason
            while self._store.add("heard", 0) < self._count:  # wait, because the store may end with this process
                time.sleep(SECONDS_BETWEEN_LOOKS)

        _within(HEARING, note)
        if not self._speaks:
            raise SystemExit(1)

    def reason(self) -> str | None:
        """Return why another process stopped; None if it left no reason."""
        said = _within(HEARING, lambda: self._store.check(["reason"]) and self._store.get("reason").decode())
        return f"stopped with the others: {said}" if said else None


def _within(seconds: float, act: Callable[[], Any]) -> Any:
    """Return the result of `act`, or None if it fails or takes too long."""
    found: list[Any] = []

    def tried() -> None:
        with suppress(Exception):
            found.append(act())

    thread = threading.Thread(target=tried, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
