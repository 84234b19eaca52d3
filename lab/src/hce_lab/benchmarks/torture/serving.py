"""Serving: an index served by a child, as `hce serve` does it, and what that child says."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

from hce.encoding.encoder import Encoder
from hce.index.index import Index
from hce.web.app import Server, create_app, listen
from hce_lab.benchmarks.torture.children import end


class Served(NamedTuple):
    """A server.

    Attributes:
        process: the child.
        port: where it listens, on this machine.
        log: all that it says.
    """

    process: int
    port: int
    log: Path

    def end(self) -> None:
        """Kill it, if it is still there."""
        with suppress(ChildProcessError):
            end(self.process)

    def said(self) -> str:
        """Return all that it said."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""  # an outage may lose it


def start(path: Path, encoder: Encoder) -> Served:
    """Serve an index until the child is killed; requests may be sent at once."""
    listener = listen("127.0.0.1", 0)
    listener.listen(1024)
    log = path.with_name(f"{path.name}.log")
    process = os.fork()
    if process == 0:
        _serve(path, encoder, listener, log)
    port = listener.getsockname()[1]
    listener.close()
    return Served(process, port, log)


@contextmanager
def server(path: Path, encoder: Encoder) -> Iterator[Served]:
    """Serve an index for some time."""
    served = start(path, encoder)
    try:
        yield served
    finally:
        served.end()


def _serve(path: Path, encoder: Encoder, listener: socket.socket, log: Path) -> NoReturn:
    try:
        output = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        with Index.open(path, encoder) as index:
            Server(create_app(index), listener).serve_until_stopped()
    except BaseException:
        traceback.print_exc(file=sys.stderr)
    finally:
        os._exit(0)
