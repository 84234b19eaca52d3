"""The processes of a run on one host or several: they meet, watch over each other, and stop together.

Work is shared out in `hce.processes`. Here is what must hold around it: who works together has the same code, and
whatever ends one process (wrong input, a full disk, Ctrl-C, a killed process, a host that is gone) ends all within a
minute, with one line on each host that says why. For this, processes leave notes in the key-value store where the
launcher had them meet: signs of life, and the reason of whoever stops first. Nothing here imports torch when alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hce._version import __version__
from hce.errors import AwayError, HceError, one_line

if TYPE_CHECKING:
    import torch

WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")  # as accelerate reads them

SECONDS_BETWEEN_SIGNS = 1.0
PATIENCE = 40.0  # seconds without a sign of life, after which a process is taken for gone
GRACE = 1.0  # seconds in which a process that hears of a reason to stop may come upon its own
HEARING = 4.0  # seconds in which everyone should have heard why someone stopped


def is_alone() -> bool:
    """Tell whether no launcher started other processes beside this one."""
    return max(int(os.environ.get(name, "1")) for name in WORLD_SIZES) == 1


@contextmanager
def together(how_to_go_on: str) -> Iterator[torch.device | None]:
    """Work with the processes that accelerate, torchrun or MPI started; yield this one's device, and None when alone.

    Args:
        how_to_go_on: what to do when a host is lost, for the message.

    Raises:
        InputError: the others have other code.
        AwayError: a host cannot be reached, or was lost.
    """
    if is_alone():
        yield None
        return
    device = _meet()
    from hce.processes import require_alike

    watch = Watch(how_to_go_on)
    try:
        require_alike(_code())
        yield device
        watch.leave()
    except HceError as error:
        watch.tell(str(error))
        raise
    except KeyboardInterrupt:
        watch.tell("it was interrupted")
        raise
    except Exception as error:
        if not _is_loss(error):
            watch.tell(f"{one_line(error)} (a bug in hce)")
            raise
        raise AwayError(watch.explain(error)) from error


def _meet() -> torch.device:
    """Wait until all processes are there; return this one's device."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its warnings of a lost connection are pages long
    import torch
    from accelerate import PartialState  # it takes seconds to import, and one process does without it

    try:
        return torch.device(PartialState(cpu=not torch.cuda.is_available()).device)
    except torch.distributed.DistError as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise AwayError(f"the processes cannot meet at {place} ({one_line(error)}); can all hosts reach it?") from error


def _code() -> dict[str, str]:
    """Return what has to be the same on all hosts for the same work to be done."""
    import numpy
    import torch

    digest, package = hashlib.sha256(), Path(__file__).parent
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode() + path.read_bytes())
    versions = {"hce": __version__, "torch": torch.__version__.partition("+")[0], "numpy": numpy.__version__}
    return {**{f"version of {name}": value for name, value in versions.items()}, "code of hce": digest.hexdigest()[:12]}


def _is_loss(error: Exception) -> bool:
    """Tell whether an error is about the connection to other processes; those of gloo are of no class of their own."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


class Watch:
    """What a process knows of the others outside of the work: that they are alive, and why they stop.

    Each process counts up a sign of life in the store. The first looks at everyone's, the others at whether the store,
    which is where the first process is, answers. Who stops leaves a reason there; where there is one already, that one
    holds. One thread talks to the store and may wait for a host that is gone; another looks at the clock.
    """

    def __init__(self, how_to_go_on: str) -> None:
        from hce.processes import process_count, process_rank

        self._how_to_go_on = how_to_go_on
        self._rank, self._count = process_rank(), process_count()
        self._speaks = os.environ.get("LOCAL_RANK", "0") == "0"  # of each host, the first process
        self._speaking = threading.Lock()  # taken by who tells the user, and never let go of
        self._over = threading.Event()
        self._reason: str | None = None
        self._answered = time.monotonic()
        self._store = _store()
        self._store.set(f"host/{self._rank}", json.dumps([socket.gethostname(), _own_address()]))
        for work in (self._talk, self._listen):
            threading.Thread(target=work, name="hce-watch", daemon=True).start()

    def leave(self) -> None:
        """Part when all have done their work; only the first has more to do than the others, and may take its time."""
        import torch.distributed as dist

        if self._rank == 0:
            self._store.set("done", "")
        while not self._store.check(["done"]):
            time.sleep(SECONDS_BETWEEN_SIGNS / 4)
        self._over.set()
        dist.barrier()  # one that ends early can tear the others down
        dist.destroy_process_group()

    def tell(self, reason: str) -> None:
        """Let everyone know why this process stops; of several of a host, the first one says so to the user."""
        self._speaking.acquire()  # where another thread has it, this process is about to end
        try:
            self._store.compare_set("reason", "", f"{socket.gethostname()}: {reason}")
            self._wait_until_heard(self._store)
        except Exception:  # the store is gone with its host, and its watch tells the others
            return
        if not self._speaks:
            raise SystemExit(1)

    def explain(self, error: Exception) -> str:
        """Say whose connection was lost; where someone else has a better reason, that one is told and this ends."""
        deadline = time.monotonic() + HEARING
        while time.monotonic() < deadline and not self._reason:
            time.sleep(SECONDS_BETWEEN_SIGNS / 4)
        if self._reason:
            self._speaking.acquire()  # for ever: the listening thread speaks, and ends the process
        found = re.search(r"\[([0-9a-f.:]+)\]:[0-9]+", str(error))
        who = self._host_at(found[1]) if found else "another host"
        said = f"lost the connection to {who}; {self._how_to_go_on}"
        self.tell(said)
        return said

    def _host_at(self, address: str) -> str:
        with suppress(Exception):  # the store may be what was lost
            for rank in range(self._count):
                name, own = self._host(self._store, rank)
                if own == address:
                    return f"{name} ({address})"
        return address

    @staticmethod
    def _host(store: Any, rank: int) -> tuple[str, str]:
        name, address = json.loads(store.get(f"host/{rank}"))
        return name, address

    def _wait_until_heard(self, store: Any) -> None:
        """Stay until everyone has heard of the reason: the store may end with this process's host."""
        store.add("heard", 1)
        deadline = time.monotonic() + HEARING
        while time.monotonic() < deadline and store.add("heard", 0) < self._count:
            time.sleep(SECONDS_BETWEEN_SIGNS / 4)

    def _talk(self) -> None:
        """Give signs of life, and look for those of others and for a reason to stop, until the work is over."""
        signs = [(0, time.monotonic())] * self._count  # how often each gave one, and when that was new
        try:
            store = _store()
            while not self._over.wait(SECONDS_BETWEEN_SIGNS):
                store.add(f"sign/{self._rank}", 1)
                if self._rank == 0:
                    signs = [self._looked_at(store, rank, known) for rank, known in enumerate(signs)]
                if store.check(["reason"]):
                    self._reason = store.get("reason").decode()
                self._answered = time.monotonic()
        except Exception:
            self._answered = float("-inf")  # there is nothing more to wait for

    def _looked_at(self, store: Any, rank: int, known: tuple[int, float]) -> tuple[int, float]:
        """Return how often a process has given a sign of life, and when; one that gave none for long is given up."""
        count = store.add(f"sign/{rank}", 0)
        if count != known[0]:
            return count, time.monotonic()
        if time.monotonic() - known[1] > PATIENCE:
            lost = f"{self._host(store, rank)[0]} gives no sign of life any more; {self._how_to_go_on}"
            store.compare_set("reason", "", lost)
        return known

    def _listen(self) -> None:
        """End the process when there is a reason to, whatever it waits for meanwhile."""
        while not self._over.wait(SECONDS_BETWEEN_SIGNS / 4):
            if self._reason:
                self._stop(f"stopped with the others: {self._reason}")
            elif time.monotonic() - self._answered > PATIENCE:
                self._stop(f"{os.environ['MASTER_ADDR']}, the first host, does not answer; {self._how_to_go_on}")

    def _stop(self, line: str) -> None:
        if self._over.wait(GRACE) or not self._speaking.acquire(blocking=False):
            return  # the main thread says it in its own words
        if self._speaks:
            sys.stderr.write(f"error: {line}\n")
            sys.stderr.flush()
        if self._reason:
            with suppress(Exception):
                self._wait_until_heard(_store())
        os._exit(1)  # as kill -9 does: files appear whole or not at all


def _store() -> Any:
    """Connect to where the processes met; a launcher that starts them again has them begin with no notes."""
    import torch.distributed as dist

    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    notes = dist.TCPStore(*place, timeout=timedelta(seconds=PATIENCE))  # type: ignore[attr-defined]
    return dist.PrefixStore(f"hce/{attempt}", notes)  # type: ignore[attr-defined]


def _own_address() -> str:
    """Return the address by which this host reaches the first one."""
    family, _, _, _, place = socket.getaddrinfo(os.environ["MASTER_ADDR"], 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # of a datagram: nothing is sent
        return str(probe.getsockname()[0])
