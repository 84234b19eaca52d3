"""How processes on one host or several meet, and how they stop together.

Work is shared out in `hce.processes`. Processes wait for each other in torch's collectives, which fail if a process
died or was silent for `TIMEOUT`; torchrun and accelerate end the others that they started on a host. A process that
stops leaves its reason in the launcher's key-value store, so that each host can say why in one line. Alone, torch is
not imported.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hce._version import __version__
from hce.errors import AwayError, HceError, one_line

if TYPE_CHECKING:
    import torch

WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")  # as accelerate reads them

TIMEOUT = timedelta(minutes=30)  # torch's default; between two exchanges one process may have more to do than another
HEARING = 4.0  # seconds in which all should have read why one stopped
GRACE = 1.0  # seconds in which others may find the same reason on their own
SECONDS_BETWEEN_LOOKS = 0.2


def is_alone() -> bool:
    """Return whether no launcher started other processes."""
    return max(int(os.environ.get(name, "1")) for name in WORLD_SIZES) == 1


@contextmanager
def together(how_to_go_on: str) -> Iterator[torch.device | None]:
    """Work with the processes that accelerate, torchrun or MPI started; yield this one's device, None when alone.

    Raises:
        InputError: the others have other code.
        AwayError: a host cannot be reached, or was lost; the message ends with `how_to_go_on`.
    """
    if is_alone():
        yield None
        return
    device = _meet()
    from hce.processes import require_alike

    others = _Others()
    try:
        require_alike(_code())
        yield device
        others.leave()
    except (HceError, KeyboardInterrupt) as error:
        others.tell(str(error) or "it was interrupted")
        raise
    except Exception as error:
        if not _is_loss(error):
            others.tell(f"{one_line(error)} (a bug in hce)")
            raise
        said = others.reason() or f"{_lost(error)}; {how_to_go_on}"
        others.tell(said)
        raise AwayError(said) from error


def _meet() -> torch.device:
    """Wait until all processes are there; return this one's device."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its warnings of a lost connection are pages long
    import torch
    from accelerate import PartialState  # it takes seconds to import, and one process does without it

    try:
        return torch.device(PartialState(cpu=not torch.cuda.is_available(), timeout=TIMEOUT).device)
    except torch.distributed.DistError as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise AwayError(f"the processes cannot meet at {place} ({one_line(error)}); can all hosts reach it?") from error


def _code() -> dict[str, str]:
    """Return what must be the same on all hosts."""
    import numpy
    import torch

    digest, package = hashlib.sha256(), Path(__file__).parent
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode() + path.read_bytes())
    versions = {"hce": __version__, "torch": torch.__version__.partition("+")[0], "numpy": numpy.__version__}
    return {**{f"version of {name}": value for name, value in versions.items()}, "code of hce": digest.hexdigest()[:12]}


def _is_loss(error: Exception) -> bool:
    """Return whether an error is a lost connection to other processes; gloo's have no class of their own."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _lost(error: Exception) -> str:
    """Say why a collective failed."""
    if "imed out" in str(error):
        return f"another process was silent for {TIMEOUT.total_seconds():.0f} s"
    found = re.search(r"\[([0-9a-f.:]+)\]:[0-9]+", str(error))
    return f"lost the connection to {found[1] if found else 'another process'}"


class _Others:
    """The other processes, by the notes that all leave in the store where they met."""

    def __init__(self) -> None:
        import torch.distributed as dist

        from hce.processes import process_count, process_rank

        self._rank, self._count = process_rank(), process_count()
        self._speaks = os.environ.get("LOCAL_RANK", "0") == "0"  # of each host, the first process
        # The one that torch met by: another connection would lose its server when the first process lets go.
        met = dist.distributed_c10d._get_default_store()
        self._store: Any = dist.PrefixStore("hce", met)  # type: ignore[attr-defined]

    def leave(self) -> None:
        """Leave when all are done.

        The first process has more to do than the others, and may take its time.
        """
        import torch.distributed as dist

        if self._rank == 0:
            self._store.set("done", "")
        while not self._store.check(["done"]):
            if self._store.check(["reason"]):
                raise dist.DistError("the first process stopped")
            time.sleep(SECONDS_BETWEEN_LOOKS)
        dist.barrier()  # one that ends early can tear the others down
        dist.destroy_process_group()

    def tell(self, reason: str) -> None:
        """Send the others the reason why this process stops.

        The first one on a host shows it to the user.
        """
        import torch.distributed as dist

        def note() -> None:
            self._store.compare_set("reason", "", f"{socket.gethostname()}: {reason}")
            self._store.add("heard", 1)
            time.sleep(GRACE)
            dist.destroy_process_group()  # what the others wait for then fails, and they look for the reason
            while self._store.add("heard", 0) < self._count:  # the store may end with this process
                time.sleep(SECONDS_BETWEEN_LOOKS)

        _within(HEARING, note)
        if not self._speaks:
            raise SystemExit(1)

    def reason(self) -> str | None:
        """Return why another process stopped, if it said so."""
        found: list[str] = []

        def look() -> None:
            if self._store.check(["reason"]):
                found.append(f"stopped with the others: {self._store.get('reason').decode()}")

        _within(HEARING, look)
        return next(iter(found), None)


def _within(seconds: float, act: Callable[[], object]) -> None:
    """Act, but not for longer: the store may be gone with its host, and a call then fails or never returns."""

    def tried() -> None:
        with suppress(Exception):
            act()

    thread = threading.Thread(target=tried, daemon=True)
    thread.start()
    thread.join(seconds)
