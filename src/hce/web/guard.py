"""Checks of every request before the application sees it: host, origin, token, and limits.

A local server faces four dangers:

- Another site's page can make the browser send requests. So the Origin must be this site, and a body must be JSON.
- A foreign name can be pointed at this machine (DNS rebinding). So the Host must be one of our names or an address.
- Others on the network could write. So writing needs a token.
- A search could take forever. So it has a deadline, and ends when its client leaves. A write, once begun, is finished.
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

import anyio
from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hce.errors import InputError
from hce.progress import Deadline, DeadlineError

logger = logging.getLogger(__name__)

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
READ_METHODS = frozenset({"GET", "HEAD"})
READING_POSTS = frozenset({"/mcp", "/v1/embeddings"})  # POST requests that change nothing
BODY_BYTES = 8 * 2**20
BODY_SECONDS = 30.0
READ_SECONDS = 30.0
WRITE_SECONDS = 600.0  # a thousand documents and a large encoder take a while
TOKEN_CHARACTERS = 1_000
ANSWERS_BYTES = 256 << 20  # of all computed answers that clients have not read yet

# Headers of every answer, unless it sets its own. Plotly needs inline styles; nothing comes from another server, and no
# script is inline. Browsers cache the page's files, but check each time whether they changed.
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
    """Which requests are allowed."""

    hosts: frozenset[str] = LOOPBACK  # names of this server, in lower case
    token: str | None = None  # needed for writing
    writable: bool = True
    addresses: bool = False  # whether any IP address is accepted as Host; DNS rebinding needs a name


def rules_for(host: str, token: str | None, writable: bool, names: Iterable[str] = ()) -> Rules:
    """Return the rules of a server at `host`; a proxy may call it by `names`.

    If other machines can connect, writing needs a token: the given one, or else a random one.
    """
    if token is not None and (not 1 <= len(token) <= TOKEN_CHARACTERS or any(not "!" <= sign <= "~" for sign in token)):
        raise InputError(
            f"the token (--token, HCE_TOKEN) cannot be sent in a header; choose 1 to {TOKEN_CHARACTERS:,} characters: "
            "ASCII letters, digits and punctuation marks, without spaces"
        )
    named = frozenset(name.lower() for name in names)
    for name in named:
        if not name or _host_name(name) != name or any(sign in name for sign in "/*@ "):
            raise InputError(f"--name {name!r}: give only a host's name, such as search.example.org")
    if host in LOOPBACK and not named:  # with a name, a proxy lets others connect
        return Rules(LOOPBACK, token, writable)
    here = socket.gethostname().lower()
    hosts = LOOPBACK | named | {host.lower(), here, f"{here}.local"}
    token = token or (secrets.token_urlsafe(18) if writable else None)
    return Rules(hosts, token, writable, addresses=host not in LOOPBACK)


class Refusal(Exception):  # noqa: N818  an answer, not a fault
    """A refusal sent instead of the application's answer: a status and a sentence."""

    def __init__(self, status: int, error: str) -> None:
        super().__init__(error)
        self.status, self.error = status, error

    def response(self) -> JSONResponse:
        """Return the response with all headers."""
        headers = {**HEADERS, "connection": "close"}  # else unread bytes of the body would be parsed as a new request
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status == 503:
            headers["retry-after"] = "1"
        return JSONResponse({"error": self.error}, self.status, headers)


def refusal(method: str, headers: dict[str, str], rules: Rules, path: str = "/") -> Refusal | None:
    """Return the refusal of a request, or None if it is allowed."""
    host = headers.get("host", "")
    name = _host_name(host)
    if name not in rules.hosts and not (rules.addresses and _is_address(name)):
        return Refusal(421, f"this server does not answer to the name {host[:100]!r}; hce serve --name adds one")
    gets, reads = method in READ_METHODS, is_reading(method, path)
    # Another site's page cannot read the answers, but could make us compute many. Following a link to us is allowed.
    is_link = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    if not (gets and is_link) and not _is_same_site(host, headers):
        return Refusal(403, f"{'reading' if reads else 'writing'} from another site's page is not allowed")
    if gets:
        return None
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    if has_body and headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return Refusal(415, "send the body as JSON, with the header Content-Type: application/json")
    if reads:
        return None
    if not rules.writable:
        return Refusal(403, "this server is read-only")
    scheme, _, given = headers.get("authorization", "").partition(" ")
    is_known = scheme.lower() == "bearer" and secrets.compare_digest(
        given.strip().encode(), (rules.token or "").encode()
    )
    if rules.token is None or is_known:
        return None
    return Refusal(401, "writing needs the token of this server, in the header Authorization: Bearer TOKEN")


def is_reading(method: str, path: str) -> bool:
    """Return whether a request changes nothing, so that it needs no token."""
    return method in READ_METHODS or (method == "POST" and path in READING_POSTS)


def _is_same_site(host: str, headers: dict[str, str]) -> bool:
    """Return whether a request comes from our own page, or from no page."""
    origin = headers.get("origin")
    is_ours = origin is None or origin.partition("://")[2] == host
    return is_ours and headers.get("sec-fetch-site", "none") in ("same-origin", "none")


def _host_name(host: str) -> str:
    """Return the name in a Host header, without port and brackets."""
    name, _, port = host.rpartition(":")
    if not name or not port.isdigit():
        name = host
    return name.strip("[]").lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


class Guard:
    """ASGI middleware: applies the rules, limits bodies and answers, and adds headers."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self.app, self.rules = app, rules
        self.bytes_under_way = 0  # of computed answers that clients have not read yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or let the application answer."""
        if scope["type"] != "http":  # start or end of the server; there are no websockets
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            refused = refusal(scope["method"], headers, self.rules, scope["path"])
            if refused is not None:
                raise refused
            body = b"" if scope["method"] in READ_METHODS else await _body(headers, receive)
        except Refusal as refused:
            await refused.response()(scope, receive, send)
            return
        if body is not None:  # None: the client has left
            await self._answer(scope, body, receive, send)

    async def _answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Let the application answer in time; a write, once begun, is finished."""
        reads = is_reading(scope["method"], scope["path"])
        seconds = READ_SECONDS if reads else WRITE_SECONDS
        deadline, answer = Deadline(seconds), _Answer(self, scope, receive, send)
        gone = asyncio.ensure_future(_gone(receive))
        work = asyncio.ensure_future(self._work(scope, _replayed(body, gone), answer, deadline if reads else None))
        try:
            await asyncio.wait({gone, work}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if answer.is_complete:
                await work
            elif not work.done() and not gone.done():
                await answer.refuse(504, _too_late(seconds, reads))
        except asyncio.CancelledError:  # the server was stopped, and its time to finish is over
            await answer.refuse(503, "the server is being stopped")
        finally:
            deadline.call_off()
            gone.cancel()
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work
            self.bytes_under_way -= answer.bytes

    async def _work(self, scope: Scope, receive: Receive, answer: _Answer, deadline: Deadline | None) -> None:
        """Let the application answer; a bug goes to the log, not to the client."""
        try:
            with deadline.around() if deadline else nullcontext():
                await self.app(scope, receive, answer.send)
        except DeadlineError:
            await answer.refuse(504, _too_late(READ_SECONDS, True))
        except MemoryError:
            await answer.refuse(503, "not enough memory for this answer now; ask for less, or try again")
        except Exception:
            logger.exception("a bug in hce; please report it")
            if answer.has_begun:
                raise
            await answer.refuse(500, "something went wrong in the server; its log says what")


class _Answer:
    """The state of one answer: what was sent, and its part of `bytes_under_way`."""

    def __init__(self, guard: Guard, scope: Scope, receive: Receive, send: Send) -> None:
        self._guard, self._scope, self._receive, self._send = guard, scope, receive, send
        self.has_begun = self.is_complete = False
        self.bytes = 0

    async def send(self, message: Message) -> None:
        """Send a part of the answer, and add the headers of `HEADERS` that it lacks."""
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            size, others = int(headers.get("content-length", 0)), self._guard.bytes_under_way
            if others and others + size > ANSWERS_BYTES:  # a single answer may be larger
                raise MemoryError
            self.bytes = size
            self._guard.bytes_under_way += size
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        self.has_begun = True
        await self._send(message)
        self.is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)

    async def refuse(self, status: int, error: str) -> None:
        """Refuse the request, unless part of an answer was sent already."""
        if not self.has_begun:
            await Refusal(status, error).response()(self._scope, self._receive, self.send)


def _too_late(seconds: float, is_reading: bool) -> str:
    if is_reading:
        return f"the answer took longer than {seconds:.0f} s and was canceled; ask for fewer documents"
    return f"the write took longer than {seconds:.0f} s and may still be carried out; check before you repeat it"


async def _gone(receive: Receive) -> None:
    """Wait until the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(headers: dict[str, str], receive: Receive) -> bytes | None:
    """Read a request's body; None if the client left before its end."""
    announced = headers.get("content-length", "0")
    is_too_large = announced.isdigit() and int(announced[:20]) > BODY_BYTES
    body = bytearray()
    try:
        with anyio.fail_after(BODY_SECONDS):
            while not is_too_large:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                is_too_large = len(body) > BODY_BYTES
                if not is_too_large and not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise Refusal(408, f"the request took longer than {BODY_SECONDS:.0f} s to arrive") from None
    raise Refusal(413, f"a request can hold {BODY_BYTES // 2**20} MB at most; send the documents in parts")


def _replayed(body: bytes, gone: asyncio.Future[None]) -> Receive:
    """Return a `receive` that yields the body, then waits until the client leaves."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        if waiting:
            return waiting.pop()
        await asyncio.shield(gone)
        return {"type": "http.disconnect"}

    return replay
