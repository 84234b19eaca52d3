"""Guard: stands before the application, answers for it what is not to reach it, and hides how it failed."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import anyio

from hce.web.limits import BODY_BYTES, BODY_SECONDS
from hce.web.rules import READING, Refusal, Rules, refusal

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Any, Receive, Send], Awaitable[None]]

# Plotly sets styles of its own; nothing else comes from elsewhere than this server, and no script is inline.
HEADERS = {
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


async def _body(headers: dict[str, str], receive: Receive) -> bytes | Refusal:
    """All of a request's body, or why it is refused: announced or not, it may not be larger or slower than allowed."""
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
    """What the application receives: the body that was read, then whatever comes after it."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay


def _with_headers(send: Send) -> Send:
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
