"""HTTP connections with limits on their number, on slow requests, and on clients that do not read.

uvicorn's own limits are not enough: `limit_concurrency` also counts idle connections, and `timeout_keep_alive` starts
after the first answer. With only those limits, 600 silent connections locked everyone else out. Sixty clients that did
not read a 5 MB answer were never dropped (docs/LOG.md, "A server that a stranger keeps busy").

Here, a new connection over the limit replaces the connection that has been idle longest. If the client's address has
too many connections, the new one replaces one of these. A connection with an active request is never replaced; if all
are active, the answer is 503.
"""

from __future__ import annotations

import asyncio
import ipaddress
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from hce.web.guard import Refusal

try:
    import resource

    _limit: int = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
except ImportError:  # Windows
    _limit = 1024
OPEN_FILES = _limit if _limit >= 0 else 1024
CONNECTIONS = min(512, OPEN_FILES // 2)
CONNECTIONS_OF_AN_ADDRESS = min(256, CONNECTIONS)
# asyncio accepts up to this many connections before we can close any. The index needs open files too.
BACKLOG = min(2048, OPEN_FILES // 8)
HEAD_SECONDS = 10.0  # from the connection, or from the last answer, to the end of a request's head
TAKE_SECONDS = 10.0  # a client must read TAKE_BYTES of an answer, or the rest of it, in this time
TAKE_BYTES = 8_192
HEAD_BYTES = 65_536


class HttpConnection(H11Protocol):
    """A connection of the server, with its time limits."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection if there is room, or if an idle one can be closed."""
        self._waits_since = self._measured = self.loop.time()
        self._unsent = 0
        super().connection_made(transport)
        self.address = _network(self.client[0]) if self.client else ""
        others: list[HttpConnection] = [each for each in self.connections if each is not self]  # type: ignore[misc]
        near = [each for each in others if each.address == self.address]
        for crowd, most in ((near, CONNECTIONS_OF_AN_ADDRESS), (others, CONNECTIONS)):
            if len(crowd) >= most and not _end_one_of(crowd):
                self.app = Refusal(503, "there are too many connections; try again in a moment").response()
                return

    @property
    def waiting_since(self) -> float | None:
        """When the connection became idle, by the event loop's clock; None during a request."""
        is_busy = self.cycle is not None and not self.cycle.response_complete
        return None if is_busy else self._waits_since

    def check(self) -> None:
        """Close the connection if the client is too slow; called every second."""
        now, unsent, since = self.loop.time(), self.transport.get_write_buffer_size(), self.waiting_since
        if not unsent:
            self._unsent = 0
            if since is not None and now - since > HEAD_SECONDS:
                self._give_up_waiting()
        elif not self._unsent:
            self._unsent, self._measured = unsent, now
        elif now - self._measured > TAKE_SECONDS:
            if self._unsent - unsent < TAKE_BYTES:
                self.end()
            self._unsent, self._measured = unsent, now

    def on_response_complete(self) -> None:
        """Note when the connection became idle, then handle the next request."""
        self._waits_since = self.loop.time()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is not valid HTTP; uvicorn's error handler calls this."""
        if getattr(sys.exc_info()[1], "error_status_hint", 400) == 431:
            self._refuse(Refusal(431, f"the head of a request can hold {HEAD_BYTES // 1024} KB at most"))
        else:
            self._refuse(Refusal(400, "this is not a valid HTTP/1.1 request"))

    def end(self) -> None:
        """Close the connection now, and drop unsent bytes."""
        self.connections.discard(self)
        self.transport.abort()

    def _give_up_waiting(self) -> None:
        has_begun = bool(self.conn.trailing_data[0]) and self.conn.our_state is h11.IDLE
        if has_begun and not self.transport.is_closing():
            self._refuse(Refusal(408, f"the head of the request took longer than {HEAD_SECONDS:.0f} s to arrive"))
        else:
            self.end()

    def _refuse(self, refused: Refusal) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # part of an answer was sent already
            self.end()
            return
        response = refused.response()
        events: list[Any] = [h11.Response(status_code=refused.status, headers=response.raw_headers)]
        for event in (*events, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def _end_one_of(crowd: list[HttpConnection]) -> bool:
    """Close the connection that has been idle longest; return whether one was idle."""
    waiting = [(each.waiting_since, place) for place, each in enumerate(crowd) if each.waiting_since is not None]
    if waiting:
        crowd[min(waiting)[1]].end()
    return bool(waiting)


def _network(address: str) -> str:
    """Return the key to count connections by: the address, or IPv6's /64 network."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    return str(parsed.ipv4_mapped or ipaddress.ip_network((int(parsed) >> 64 << 64, 64)))
