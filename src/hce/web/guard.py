"""Checks that every request passes before the application sees it: host, origin, token, and limits.

Four dangers of a server on one's own machine are met here. A page on another site can make a browser send requests to
it (the Origin must be this site, a body must say that it is JSON, and what a browser says of its own accord must not
name another site). A name that its owner lets point to this machine makes another site look like this one (the Host
must be one that we serve, or an address, which nobody can let point elsewhere). Whoever is on the network can write (a
token is needed as soon as others than this machine can connect). And a request can take for ever (it has a deadline,
and ends when its asker goes).
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import secrets
import socket
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import NamedTuple

import anyio
from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hce.errors import InputError
from hce.progress import Deadline, DeadlineError

logger = logging.getLogger(__name__)

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
READ_METHODS = frozenset({"GET", "HEAD"})
READING_POSTS = frozenset({"/mcp", "/v1/embeddings"})  # which change nothing, as their protocols have it
BODY_BYTES = 8 * 2**20
BODY_SECONDS = 30.0  # a body that takes longer to arrive is given up
READ_SECONDS = 30.0  # an answer that takes longer is given up
WRITE_SECONDS = 600.0  # a thousand documents and a large encoder take a while
TOKEN_CHARACTERS = 1_000
ANSWERS_BYTES = 256 << 20  # of all answers together that are made and not taken yet

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
        hosts: the names that this server answers to, in lower case.
        token: what a write must bring; None where none is needed.
        writable: whether documents can be written at all.
        addresses: whether it also answers to any IP address, which nobody can let point elsewhere as they can a name.
    """

    hosts: frozenset[str] = LOOPBACK
    token: str | None = None
    writable: bool = True
    addresses: bool = False


def rules_for(host: str, token: str | None, writable: bool, names: Iterable[str] = ()) -> Rules:
    """Return the rules of a server that listens at `host`.

    If others can connect, writing always needs a token.

    Args:
        host: where it listens.
        token: what a write must bring; where others can connect and there is none, it is made up.
        writable: whether documents can be written at all.
        names: further names by which requests may call it, as those behind a proxy do.

    Raises:
        InputError: a token that no request could bring, or a name that is none.
    """
    if token is not None:
        _check_token(token)
    named = frozenset(map(_checked_name, names))
    if host in LOOPBACK and not named:  # else a proxy lets others in
        return Rules(LOOPBACK, token, writable)
    here = socket.gethostname().lower()
    hosts = LOOPBACK | named | {host.lower(), here, f"{here}.local"}
    made_up = secrets.token_urlsafe(18) if writable else None
    return Rules(hosts, token or made_up, writable, addresses=host not in LOOPBACK)


def _check_token(token: str) -> None:
    if not 1 <= len(token) <= TOKEN_CHARACTERS or any(not "!" <= sign <= "~" for sign in token):
        raise InputError(
            f"the token (--token, HCE_TOKEN) cannot be brought by a request; choose 1 to {TOKEN_CHARACTERS:,} letters, "
            "digits and marks of ASCII, without blanks"
        )


def _checked_name(name: str) -> str:
    if not name or _host_name(name) != name.lower() or any(sign in name for sign in "/*@ "):
        raise InputError(f"--name {name!r}: give a host's name alone, such as search.example.org")
    return name.lower()


class Refusal(NamedTuple):
    """An answer in place of the application's."""

    status: int
    error: str

    def response(self) -> JSONResponse:
        """Return the answer with all of its headers."""
        headers = {**HEADERS, "connection": "close"}  # what was not read of the request is not to be taken for the next
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status == 503:
            headers["retry-after"] = "1"
        return JSONResponse({"error": self.error}, self.status, headers)


def refusal(method: str, headers: dict[str, str], rules: Rules, path: str = "/") -> Refusal | None:
    """Say why a request is not to reach the application; None where it may."""
    host = headers.get("host", "")
    name = _host_name(host)
    if name not in rules.hosts and not (rules.addresses and _is_address(name)):
        return Refusal(421, f"this server does not answer to the name {host[:100]!r}; hce serve --name adds one")
    if method in READ_METHODS:
        return _asked_by_another_site(host, headers)
    if is_reading(method, path):
        return _foreign(host, headers, "reading")
    return _foreign(host, headers, "writing") or _unauthorised(headers, rules)


def is_reading(method: str, path: str) -> bool:
    """Tell whether a request changes nothing, and so needs no token."""
    return method in READ_METHODS or (method == "POST" and path in READING_POSTS)


class Guard:
    """ASGI middleware: refuses by the rules, reads bodies up to their limit, and adds the headers of every answer."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self.app = app
        self.rules = rules
        self._under_way = _UnderWay()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or let the application answer."""
        if scope["type"] == "websocket":  # there are none here
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        refused = refusal(scope["method"], headers, self.rules, scope["path"])
        body: bytes | Refusal | None = b""
        if refused is None and scope["method"] not in READ_METHODS:
            body = await _body(headers, receive)
        if refused is None and isinstance(body, Refusal):
            refused = body
        if refused is not None:
            await refused.response()(scope, receive, send)
        elif isinstance(body, bytes):  # else the asker has gone
            await self._answer(scope, body, receive, send)

    async def _answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Let the application answer until the deadline or the client leaves.

        A write under way is not called off: it is carried out whole, and only its answer comes too late.
        """
        reads = is_reading(scope["method"], scope["path"])
        seconds = READ_SECONDS if reads else WRITE_SECONDS
        deadline = Deadline(seconds)
        answer = _Answer(scope, receive, send, self._under_way)
        gone = asyncio.ensure_future(_gone(receive))
        work = asyncio.ensure_future(self._work(scope, _replayed(body, gone), answer, deadline if reads else None))
        try:
            await asyncio.wait({gone, work}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if answer.is_complete:
                await work
            elif not work.done() and not gone.done():
                await answer.refuse(_too_late(seconds, reads))
        except asyncio.CancelledError:  # the server has been stopped, and this took too long
            await answer.refuse(Refusal(503, "the server is being stopped"))
        finally:
            deadline.call_off()
            gone.cancel()
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work
            self._under_way.bytes -= answer.bytes

    async def _work(self, scope: Scope, receive: Receive, answer: _Answer, deadline: Deadline | None) -> None:
        """Let the application answer; a bug goes to the log, not the client."""
        try:
            with deadline.around() if deadline else nullcontext():
                await self.app(scope, receive, answer.send)
        except DeadlineError:
            await answer.refuse(_too_late(READ_SECONDS, True))
        except (_TooLargeError, MemoryError):
            await answer.refuse(Refusal(503, "there is no memory for this answer now; ask for less, or try again"))
        except Exception:
            logger.exception("a bug in hce; please report it")
            if answer.has_begun:
                raise
            await answer.refuse(Refusal(500, "something went wrong in the server; its log says what"))


class _TooLargeError(Exception):
    """There are too many bytes of answers under way."""


@dataclass
class _UnderWay:
    """How many bytes of answers, together, are made and not taken yet."""

    bytes: int = 0


class _Answer:
    """An answer to a request, as far as it has been sent.

    Attributes:
        has_begun: whether any of the answer has been sent.
        is_complete: whether all of the answer has been sent.
        bytes: how many it counts for among those under way.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, under_way: _UnderWay) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._under_way = under_way
        self.has_begun = self.is_complete = False
        self.bytes = 0

    async def send(self, message: Message) -> None:
        """Send a part of the answer, with the missing ones of `HEADERS`.

        Raises:
            _TooLargeError: too many bytes of other answers are under way; nothing of this one was sent.
        """
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            self._count(int(headers.get("content-length", 0)))
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        self.has_begun = True
        await self._send(message)
        self.is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)

    def _count(self, size: int) -> None:
        """Count the answer among those under way; a large one may go alone."""
        others = self._under_way.bytes
        if others and others + size > ANSWERS_BYTES:
            raise _TooLargeError
        self.bytes = size
        self._under_way.bytes += size

    async def refuse(self, refused: Refusal) -> None:
        """Refuse the request, if nothing of an answer has been sent yet."""
        if not self.has_begun:
            await refused.response()(self._scope, self._receive, self.send)


def _too_late(seconds: float, is_reading: bool) -> Refusal:
    if is_reading:
        return Refusal(504, f"the answer took longer than {seconds:.0f} s and was given up; ask for fewer documents")
    return Refusal(
        504, f"the write took longer than {seconds:.0f} s and may still be carried out; look before a second"
    )


async def _gone(receive: Receive) -> None:
    """Wait until the asker goes."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _host_name(host: str) -> str:
    """Return the name in a Host header, without port and brackets."""
    name, _, port = host.rpartition(":")
    if not name or not port.isdigit():
        name = host
    return name.strip("[]").lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _asked_by_another_site(host: str, headers: dict[str, str]) -> Refusal | None:
    """Reject cross-site reads; allow top-level navigation.

    Returns the reason, or None.

    Such a page could not see the answer, but have any number of them made.
    """
    is_link = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    if is_link or _is_same_site(host, headers):
        return None
    return Refusal(403, "reading from another site's page is not allowed")


def _is_same_site(host: str, headers: dict[str, str]) -> bool:
    """Tell whether a request comes from our own page, or from none."""
    origin = headers.get("origin")
    is_ours = origin is None or origin.partition("://")[2] == host
    return is_ours and headers.get("sec-fetch-site", "none") in ("same-origin", "none")


def _foreign(host: str, headers: dict[str, str], what: str) -> Refusal | None:
    """Say why a request with a body is refused that a browser sends for another site."""
    if not _is_same_site(host, headers):
        return Refusal(403, f"{what} from another site's page is not allowed")
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


async def _body(headers: dict[str, str], receive: Receive) -> bytes | Refusal | None:
    """Read a request's body, or return why it is refused.

    It may be neither too large nor too slow, announced or not.

    None where the asker has gone before all of it was there.
    """
    too_large = Refusal(413, f"a request can hold {BODY_BYTES // 2**20} MB at most; send the documents in parts")
    announced = headers.get("content-length", "0")
    if announced.isdigit() and int(announced[:20]) > BODY_BYTES:
        return too_large
    body = bytearray()
    try:
        with anyio.fail_after(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                if len(body) > BODY_BYTES:
                    return too_large
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        return Refusal(408, f"the request took longer than {BODY_SECONDS:.0f} s to arrive")


def _replayed(body: bytes, gone: asyncio.Future[None]) -> Receive:
    """Give the application the body, then nothing until the client leaves."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        if waiting:
            return waiting.pop()
        await asyncio.shield(gone)
        return {"type": "http.disconnect"}

    return replay
