"""create_app(): the application that `hce serve` runs."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from hce._version import __version__
from hce.errors import HceError, InputError, WriterBusyError
from hce.index.index import Index
from hce.web.answers import Json
from hce.web.api import one_line
from hce.web.api import router as api
from hce.web.errors import NotThereError
from hce.web.files import Files
from hce.web.files import router as pages
from hce.web.guard import Guard
from hce.web.lanes import BusyError
from hce.web.rules import Rules
from hce.web.site import Site

logger = logging.getLogger(__name__)

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
