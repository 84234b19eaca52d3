"""Running the server: a socket, what is said about it, and a clean end."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from contextlib import suppress

import uvicorn
from fastapi import FastAPI

from hce.errors import InputError
from hce.web.limits import CONNECTIONS
from hce.web.rules import LOOPBACK, Rules

SECONDS_TO_END = 3  # for requests under way when the server is stopped


def rules_for(host: str, token: str | None, writable: bool) -> Rules:
    """Only this machine may write without a token; when others can connect and none is given, one is made up."""
    if host in LOOPBACK:
        return Rules(LOOPBACK, token, writable)
    return Rules(None, token or (secrets.token_urlsafe(18) if writable else None), writable)


def listen(host: str, port: int) -> socket.socket:
    """A socket at an address; port 0 takes a free one.

    Raises:
        InputError: someone else has the port, or there is no such address here.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot serve at {host}:{port} ({reason}); choose another --port or --host") from error
    return listener


def url_of(host: str, listener: socket.socket) -> str:
    """The address to open in a browser on this machine."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  only told from, never bound to
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}"


class Server(uvicorn.Server):
    """Serves an application at a socket until Ctrl-C or SIGTERM; requests under way are answered first.

    Args:
        app: what is served.
        listener: where.
        started: called when it listens.
    """

    def __init__(self, app: FastAPI, listener: socket.socket, started: Callable[[], None] = lambda: None) -> None:
        config = uvicorn.Config(
            app,
            log_level="warning",
            ws="none",
            access_log=False,
            server_header=False,
            date_header=False,
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=SECONDS_TO_END,
        )
        super().__init__(config)
        self._listener = listener
        self._tell = started

    def serve_until_stopped(self) -> None:
        """Serve."""
        with suppress(KeyboardInterrupt), self._listener:
            self.run(sockets=[self._listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and tell."""
        await super().startup(sockets)
        if self.started:
            self._tell()
