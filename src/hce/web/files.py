"""The files of the page, read once and served from memory; nothing comes from the network."""

from __future__ import annotations

import gzip
import hashlib
from functools import cached_property
from importlib.resources import files
from typing import NamedTuple

from fastapi import APIRouter, Request, Response
from plotly.offline import get_plotlyjs, get_plotlyjs_version

TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
}
PLOTLY = f"plotly-{get_plotlyjs_version()}.min.js"
A_YEAR = "public, max-age=31536000, immutable"


class File(NamedTuple):
    """A file as it is sent.

    Attributes:
        type: its media type.
        content: its bytes.
        tag: by which a browser asks whether its copy is still good.
    """

    type: str
    content: bytes
    tag: str


class Files:
    """The page's own files by name, and plotly's JavaScript from its Python package."""

    def __init__(self) -> None:
        folder = files("hce.web") / "static"
        names = [each.name for each in folder.iterdir() if each.name.rpartition(".")[2] in TYPES]
        self.own = {name: _file(name, (folder / name).read_text(encoding="utf-8")) for name in names}

    @cached_property
    def plotly(self) -> bytes:
        """It is 5 MB and goes over a phone's network, so it is compressed, once."""
        return gzip.compress(get_plotlyjs().encode(), compresslevel=6)


def _file(name: str, text: str) -> File:
    content = text.replace("{plotly}", f"/static/{PLOTLY}").encode() if name.endswith(".html") else text.encode()
    return File(TYPES[name.rpartition(".")[2]], content, f'"{hashlib.sha256(content).hexdigest()[:16]}"')


router = APIRouter(include_in_schema=False)


@router.get("/")
async def page(request: Request) -> Response:
    """The page."""
    return await own_file(request, "page.html")


@router.get("/docs")
async def docs(request: Request) -> Response:
    """The API's documentation, written from /openapi.json by a small script of ours."""
    return await own_file(request, "docs.html")


@router.get(f"/static/{PLOTLY}")
def plotly(request: Request) -> Response:
    """Plotly; its address changes with its version, so that a browser can keep it for good."""
    found: Files = request.app.state.files
    headers = {"cache-control": A_YEAR, "vary": "accept-encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(found.plotly, headers={**headers, "content-encoding": "gzip"}, media_type=TYPES["js"])
    return Response(get_plotlyjs(), headers=headers, media_type=TYPES["js"])


@router.get("/static/{name}")
async def own_file(request: Request, name: str) -> Response:
    """A file of the page."""
    found: Files = request.app.state.files
    file = found.own.get(name)
    if file is None:
        return Response(status_code=404)
    headers = {"etag": file.tag, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.type)
