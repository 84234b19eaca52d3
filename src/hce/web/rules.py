"""Who may ask for what, as a function of a request's method and headers.

Three dangers of a server on one's own machine are met here. A page on another site can make a browser send requests
to it (the Origin must be this site, and a body must say that it is JSON). A name that its owner lets point to
127.0.0.1 makes another site look like this one (the Host must be one that we serve). And whoever is on the network
can write (a token is needed as soon as others than this machine can connect).
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import NamedTuple

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
READING = frozenset({"GET", "HEAD"})


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


class Refusal(NamedTuple):
    """An answer in place of the application's."""

    status: int
    error: str


def refusal(method: str, headers: dict[str, str], rules: Rules) -> Refusal | None:
    """Why a request is not to reach the application; None where it may."""
    host = headers.get("host", "")
    if rules.hosts is not None and host_name(host) not in rules.hosts:
        return Refusal(421, f"this server does not answer to the name {host[:100]!r}")
    if method in READING:
        return None
    return _foreign(host, headers) or _unauthorised(headers, rules)


def host_name(host: str) -> str:
    """The name in a Host header, without the port and the brackets of an IPv6 address."""
    name, _, port = host.rpartition(":")
    if not name or not port.isdigit():
        name = host
    return name.strip("[]").lower()


def _foreign(host: str, headers: dict[str, str]) -> Refusal | None:
    """Why a write that a browser sends for another site is refused."""
    origin = headers.get("origin")
    same = origin is None or origin.partition("://")[2] == host
    if not same or headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return Refusal(403, "writing from another site's page is not allowed")
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    if has_body and headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return Refusal(415, "send the body as JSON, with the header Content-Type: application/json")
    return None


def _unauthorised(headers: dict[str, str], rules: Rules) -> Refusal | None:
    if not rules.writable:
        return Refusal(403, "this server is read-only")
    if rules.token is None:
        return None
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and secrets.compare_digest(given.strip().encode(), rules.token.encode()):
        return None
    return Refusal(401, "writing needs the token that hce serve printed, as the header Authorization: Bearer TOKEN")
