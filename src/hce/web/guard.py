"""Checks that every request passes before the application sees it: host, origin, token, and limits.

Three dangers of a server on one's own machine are met here. A page on another site can make a browser send requests
to it (the Origin must be this site, and a body must say that it is JSON). A name that its owner lets point to
127.0.0.1 makes another site look like this one (the Host must be one that we serve). And whoever is on the network
can write (a token is needed as soon as others than this machine can connect).
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import anyio

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Any, Receive, Send], Awaitable[None]]

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
READING = frozenset({"GET", "HEAD"})
BODY_BYTES = 8 * 2**20
BODY_SECONDS = 30.0  # a body that takes longer to arrive is given up

# Of every answer that does not say otherwise. Plotly sets styles of its own; nothing else comes from elsewhere than
# this server, and no script is inline. A browser keeps the page's files, but asks each time whether they have changed.
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; object-src 'none'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True)
class Rules:
    """Who may ask for what.

    Attributes:
        hosts: the names that this server answers to; None for any.
        token: what a write must bring; None where none is needed.
        writable: whether documents can be written at all.
    """

    hosts: frozenset[str] | None = LOOPBACK
    token: str | None = None
    writable: bool = True


def rules_for(host: str, token: str | None, writable: bool) -> Rules:
    """Return the rules of a server that listens at `host`; where others can connect, writing always needs a token."""
    if host in LOOPBACK:
        return Rules(LOOPBACK, token, writable)
    return Rules(None, token or (secrets.token_urlsafe(18) if writable else None), writable)


class Refusal(NamedTuple):
    """An answer in place of the application's."""

    status: int
    error: str


def refusal(method: str, headers: dict[str, str], rules: Rules) -> Refusal | None:
    """Say why a request is not to reach the application; None where it may."""
    host = headers.get("host", "")
    if rules.hosts is not None and _host_name(host) not in rules.hosts:
        return Refusal(421, f"this server does not answer to the name {host[:100]!r}")
    if method in READING:
        return None
    return _foreign(host, headers) or _unauthorised(headers, rules)


class Guard:
    """ASGI middleware: refuses by the rules, reads bodies up to their limit, and adds the headers of every answer."""

    def __init__(self, app: Application, rules: Rules) -> None:
        self.app = app
        self.rules = rules

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Answer, or let the application answer."""
        if scope["type"] == "websocket":  # there are none here
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        guarded = _with_headers(send)
        refused = refusal(scope["method"], headers, self.rules)
        if refused is None and scope["method"] not in READING:
            body = await _body(headers, receive)
            if isinstance(body, Refusal):
                refused = body
            else:
                receive = _replayed(body, receive)
        if refused is None:
            await self._answer(scope, receive, guarded)
        else:
            await _refuse(refused, guarded)

    async def _answer(self, scope: Any, receive: Receive, send: Send) -> None:
        """Let the application answer; a bug in it goes to the log, and the asker learns only that there is one."""
        has_begun = False

        async def watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except asyncio.CancelledError:  # the server has been stopped, and this took too long
            if not has_begun:
                await _refuse(Refusal(503, "the server is being stopped"), send)
        except Exception:
            logger.exception("a bug in hce; please report it")
            if has_begun:
                raise
            await _refuse(Refusal(500, "something went wrong in the server; its log says what"), send)


def _host_name(host: str) -> str:
    """Return the name in a Host header, without the port and the brackets of an IPv6 address."""
    name, _, port = host.rpartition(":")
    if not name or not port.isdigit():
        name = host
    return name.strip("[]").lower()


def _foreign(host: str, headers: dict[str, str]) -> Refusal | None:
    """Say why a write is refused that a browser sends for another site."""
    origin = headers.get("origin")
    same = origin is None or origin.partition("://")[2] == host
    if not same or headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return Refusal(403, "writing from another site's page is not allowed")
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    if has_body and headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return Refusal(415, "send the body as JSON, with the header Content-Type: application/json")
    return None


def _unauthorised(headers: dict[str, str], rules: Rules) -> Refusal | None:
    """Say why a write is refused that brings no right to write."""
    if not rules.writable:
        return Refusal(403, "this server is read-only")
    if rules.token is None:
        return None
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and secrets.compare_digest(given.strip().encode(), rules.token.encode()):
        return None
    return Refusal(401, "writing needs the token that hce serve printed, as the header Authorization: Bearer TOKEN")


async def _body(headers: dict[str, str], receive: Receive) -> bytes | Refusal:
    """Read a request's body, or say why it is refused: announced or not, it may be neither too large nor too slow."""
    too_large = Refusal(413, f"a request can hold {BODY_BYTES // 2**20} MB at most; send the documents in parts")
    announced = headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > BODY_BYTES:
        return too_large
    parts: list[bytes] = []
    size = 0
    try:
        with anyio.fail_after(BODY_SECONDS):
            while True:
                message = await receive()
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > BODY_BYTES:
                    return too_large
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        return Refusal(408, f"the request took longer than {BODY_SECONDS:.0f} s to arrive")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Give the application the body that was read, then whatever comes after it."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay


def _with_headers(send: Send) -> Send:
    """Add to each answer those of `HEADERS` that it does not have."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            present = {name.lower() for name, _ in message.get("headers", ())}
            extra = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in present]
            message = {**message, "headers": [*message.get("headers", ()), *extra]}
        await send(message)

    return sending


async def _refuse(refused: Refusal, send: Send) -> None:
    body = json.dumps({"error": refused.error}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),  # what was not read of the request is not to be taken for the next one
    ]
    if refused.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
