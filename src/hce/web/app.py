"""`create_app` makes the application that `hce serve` runs; `Server` runs it."""

from __future__ import annotations

import gzip
import logging
import mimetypes
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from functools import cache

from hce._version import __version__
from hce.errors import AwayError, HceError, InputError, MissingPackageError, WriterBusyError, needs_extra
from hce.index.index import Index
from hce.index.tree import NotThereError

with needs_extra("web", "the web page"):
    import uvicorn
    from fastapi import FastAPI, Request, Response
    from fastapi.exceptions import RequestValidationError
    from plotly.offline import get_plotlyjs, get_plotlyjs_version
    from starlette.exceptions import HTTPException
    from starlette.responses import RedirectResponse
    from starlette.routing import Route
    from starlette.staticfiles import StaticFiles

from hce.web import api, browse
from hce.web.api import Json, ServedIndex
from hce.web.background import BusyError
from hce.web.connection import BACKLOG, HEAD_BYTES, HttpConnection
from hce.web.guard import Guard, Rules

logger = logging.getLogger(__name__)

SECONDS_TO_END = 3  # for active requests when the server is stopped
PLOTLY = f"/static/plotly-{get_plotlyjs_version()}.min.js"
NOT_TOKENS = "input: send a text or a list of texts, not tokens"
DESCRIPTION = """Search an index by words and meaning, explore its tree, add and remove documents.

Every error is `{"error": "one sentence"}`. If writing needs a token, send it in the header
`Authorization: Bearer TOKEN`."""


def create_app(index: Index, rules: Rules | None = None, *, metrics: bool = True, learns: bool = False) -> FastAPI:
    """Make the page and the API of an index.

    Args:
        index: the index to serve; it stays open when the server ends.
        rules: who may read and write; by default this machine may do both.
        metrics: whether to count requests and serve /metrics.
        learns: whether to keep the mean of all queries in the index's folder.
    """
    site = ServedIndex(index, rules or Rules(), learns=learns)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        site.untrained.start()
        async with agents:
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
    app.state.site = site
    app.include_router(api.router)
    app.include_router(browse.router)
    app.add_middleware(Guard, rules=site.rules)
    agents = _add_mcp(app, site)
    if metrics:
        from hce.web.metrics import add_metrics

        add_metrics(app, site)
    _add_page(app)

    async def failed(request: Request, error: Exception) -> Json:
        status, sentence, headers = _fault(site, error)
        if request.url.path != api.EMBEDDINGS:
            return Json({"error": sentence}, status, headers)
        if status == 422:
            status = 400  # the status that OpenAI's clients expect
            sentence = NOT_TOKENS if sentence.startswith("input.") else sentence
        kind = "invalid_request_error" if status < 500 else "server_error"
        return Json({"error": {"message": sentence, "type": kind, "param": None, "code": None}}, status, headers)

    for kind in (HceError, BusyError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, failed)
    return app


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket to an address; port 0 picks a free port."""
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
    """Return the address to open in a browser on this machine."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  only compared, never bound to
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}"


class Server(uvicorn.Server):
    """Serves an application at a socket until Ctrl-C or SIGTERM, then finishes active requests.

    It calls `started` as soon as it listens.
    """

    def __init__(self, app: FastAPI, listener: socket.socket, started: Callable[[], None] = lambda: None) -> None:
        config = uvicorn.Config(
            app,
            log_level="warning",
            ws="none",
            access_log=False,
            server_header=False,
            date_header=False,
            http=HttpConnection,
            backlog=BACKLOG,
            h11_max_incomplete_event_size=HEAD_BYTES,
            timeout_graceful_shutdown=SECONDS_TO_END,
        )
        super().__init__(config)
        self._listener, self._notify = listener, started

    def serve_until_stopped(self) -> None:
        """Serve until the server is stopped."""
        with suppress(KeyboardInterrupt), self._listener:
            self.run(sockets=[self._listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, then call `started`."""
        await super().startup(sockets)
        if self.started:
            self._notify()

    async def on_tick(self, counter: int) -> bool:
        """Check the connections once a second; uvicorn ticks ten times a second."""
        if counter % 10 == 0:
            for connection in list(self.server_state.connections):
                if isinstance(connection, HttpConnection):
                    connection.check()
        return await super().on_tick(counter)


def _add_mcp(app: FastAPI, site: ServedIndex) -> AbstractAsyncContextManager[None]:
    """Serve MCP at /mcp; return the context to run in, empty if mcp is missing."""
    try:
        from hce.web.mcp import PATH, Tools, over_http
    except MissingPackageError as error:
        sentence = str(error)
        app.post("/mcp", include_in_schema=False)(lambda: Json({"error": sentence}, 501))
        return nullcontext()
    endpoint, running = over_http(Tools(site.index, site.tree, site.searches.run, site.sentence))
    app.router.routes.append(Route(PATH, endpoint, methods=["POST"], include_in_schema=False))
    return running


def _add_page(app: FastAPI) -> None:
    """Serve the page's files, and plotly from its package."""
    mimetypes.add_type("text/javascript", ".js")  # Windows may report text/plain, which browsers refuse to run
    files = StaticFiles(packages=[("hce.web", "static")])

    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return await files.get_response("page.html", request.scope)

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        return await files.get_response("docs.html", request.scope)

    @app.get("/static/plotly.js", include_in_schema=False)
    async def plotly() -> Response:
        return RedirectResponse(PLOTLY)

    @app.get(PLOTLY, include_in_schema=False)
    def plotly_of_this_version(request: Request) -> Response:
        # The address contains the version, so browsers may cache the file forever.
        headers = {"cache-control": "public, max-age=31536000, immutable", "vary": "accept-encoding"}
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(get_plotlyjs(), headers=headers, media_type="text/javascript")
        return Response(_small_plotly(), headers=headers | {"content-encoding": "gzip"}, media_type="text/javascript")

    app.mount("/static", files)


@cache
def _small_plotly() -> bytes:
    """Compress plotly's JavaScript once: it has 5 MB."""
    return gzip.compress(get_plotlyjs().encode(), compresslevel=6)


def _fault(site: ServedIndex, error: Exception) -> tuple[int, str, dict[str, str]]:
    """Return an error's status, a sentence for the client, and headers."""
    again = {"retry-after": "1"}
    if isinstance(error, HTTPException):
        return error.status_code, str(error.detail), dict(error.headers or {})
    if isinstance(error, RequestValidationError):
        fault = error.errors()[0]
        where = ".".join(str(part) for part in fault["loc"][1:])  # without "query" or "body"
        where = "the body" if fault["type"] == "json_invalid" else where
        return 422, f"{where}: {fault['msg']}" if where else str(fault["msg"]), {}
    if isinstance(error, BusyError):
        return 503, "too many requests are waiting; try again in a moment", again
    if isinstance(error, WriterBusyError):
        return 503, site.sentence(error), again
    if isinstance(error, InputError):
        return 404 if isinstance(error, NotThereError) else 400, site.sentence(error), {}
    logger.error("%s", error)
    return 503 if isinstance(error, AwayError) else 500, site.shown(site.sentence(error)), {}
