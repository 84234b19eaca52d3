"""create_app(): the application that `hce serve` runs, and the server that runs it."""

from __future__ import annotations

import importlib.util
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from hce._version import __version__
from hce.errors import HceError, InputError, MissingPackageError, WriterBusyError
from hce.index.browse import NotThereError
from hce.index.index import Index
from hce.web.api import Site, one_line
from hce.web.api import router as api
from hce.web.background import BusyError
from hce.web.files import Files
from hce.web.files import router as pages
from hce.web.guard import LOOPBACK, Guard, Rules
from hce.web.schemas import Json

logger = logging.getLogger(__name__)


NEEDED = ("fastapi", "uvicorn", "plotly")
INSTALL = "pip install 'hierarchical-corpus-encoder[web]'"


def require_packages() -> None:
    """Say which packages are missing before anything imports them.

    Raises:
        MissingPackageError: with the command that installs them.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackageError(f"the web page needs {' and '.join(missing)}, not installed here; {INSTALL}")


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


DESCRIPTION = """Search an index by meaning, explore its tree, add and remove documents.

Every error is `{"error": "one sentence"}`. Where a token is needed to write, it goes into the header
`Authorization: Bearer TOKEN`."""


def create_app(index: Index, rules: Rules | None = None) -> FastAPI:
    """The page and the API of an index.

    Args:
        index: what is served; it stays open when the server ends.
        rules: who may ask for what; by default this machine may, and may write.
    """
    site = Site(index, rules or Rules())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        site.start()
        yield
        site.stop()

    app = FastAPI(
        title=f"hce: {index.path.absolute().name}",
        version=__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own pages load scripts from the network
        redoc_url=None,
    )
    app.state.site, app.state.files = site, Files()
    app.include_router(api)
    app.include_router(pages)
    app.add_middleware(Guard, rules=site.rules)
    _add_errors(app, site)
    return app


def _add_errors(app: FastAPI, site: Site) -> None:
    """Every error is one sentence, and none shows how the program is made."""

    @app.exception_handler(InputError)
    async def wrong_input(request: Request, error: InputError) -> Json:
        return _error(404 if isinstance(error, NotThereError) else 400, one_line(error, site))

    @app.exception_handler(HceError)
    async def damaged(request: Request, error: HceError) -> Json:
        logger.error("%s", error)
        return _error(500, one_line(error, site))

    @app.exception_handler(BusyError)
    async def busy(request: Request, error: BusyError) -> Json:
        return _error(503, "too many requests are waiting; try again in a moment", {"retry-after": "1"})

    @app.exception_handler(WriterBusyError)
    async def writing(request: Request, error: WriterBusyError) -> Json:
        return _error(503, one_line(error, site), {"retry-after": "1"})

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Json:
        return _error(422, _first_fault(error.errors()))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Json:
        return _error(error.status_code, str(error.detail), dict(error.headers or {}))


def _error(status: int, sentence: str, headers: dict[str, str] | None = None) -> Json:
    return Json({"error": sentence}, status, headers)


def _first_fault(faults: Any) -> str:
    """What the first fault is and where: the name of the parameter or field, as it was written in the request."""
    fault = faults[0]
    where = ".".join(str(part) for part in fault["loc"][1:])  # without "query" or "body"
    return f"{where}: {fault['msg']}" if where else str(fault["msg"])


CONNECTIONS = 512
