"""Client: asks a running `hce serve`, and gives the hits that a search of its index would have given."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from hce.data.text import Passage, is_url
from hce.errors import FormatError, InputError, one_line
from hce.files import checked_fields
from hce.index.ranking import Hit
from hce.index.tree import PathNode

SECONDS = 40.0  # to wait for an answer, which the server gives or calls off after 30
MOST_BYTES = 1 << 28  # of an answer


class Client:
    """What asks a running `hce serve`.

    Attributes:
        address: of the server, as it was given.
    """

    def __init__(self, address: str, token: str | None = None) -> None:
        """Note where the server is; nothing is asked yet.

        Args:
            address: such as http://127.0.0.1:8080.
            token: what the server, or a proxy before it, may want.

        Raises:
            InputError: that is no address.
        """
        self.address = address
        try:
            parts = urlsplit(address)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise InputError(f"{address}: no address ({error}); give one such as http://127.0.0.1:8080") from error
        if not host or not is_url(address):
            raise InputError(f"{address}: no address; give one such as http://127.0.0.1:8080")
        connection = HTTPSConnection if parts.scheme.lower() == "https" else HTTPConnection
        self._connection = connection(host, port, timeout=SECONDS)
        self._path = parts.path.rstrip("/")
        self._headers = {"Accept": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}

    def search(
        self, text: str, k: int = 10, where: Sequence[str] = (), mode: str = "hybrid", *, unique: bool = False
    ) -> Answer:
        """Find the k best documents for a text, best first; the arguments are those of `hce search`.

        Raises:
            InputError: nobody answers, it is no `hce serve`, or it refuses the request.
        """
        asked = [("q", text), ("k", str(k)), ("mode", mode), *(("where", each) for each in where)]
        with closing(self._connection):
            answer = self._get(f"/api/search?{urlencode([*asked, *([('unique', 'true')] if unique else [])])}")
            try:
                found = [checked_fields(_Found, each) for each in answer["hits"]]
                hits = [(each, self._get(f"/api/documents/{quote(each.id, safe='')}", gone=True)) for each in found]
                there = [_hit(each, checked_fields(_Text, text)) for each, text in hits if text is not None]
                return Answer(there, checked_fields(_Judgment, answer).good_match)
            except (FormatError, LookupError, TypeError, ValueError) as error:
                raise self._no_server(one_line(error)) from error

    def _get(self, path: str, *, gone: bool = False) -> Any:
        """Return what is answered, as JSON.

        It is None for what is not there any more, where that may be so.
        """
        try:
            self._connection.request("GET", self._path + path, headers=self._headers)
            response = self._connection.getresponse()
            status, body = response.status, response.read(MOST_BYTES)
        except TimeoutError as error:
            raise InputError(f"{self.address}: no answer within {SECONDS:.0f} s; try again, or see its log") from error
        except OSError as error:
            reason = error.strerror or one_line(error)
            raise InputError(f"{self.address}: nobody answers ({reason}); is `hce serve` running there?") from error
        except (HTTPException, ValueError) as error:
            raise self._no_server(one_line(error)) from error
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = None
        if status == 404 and gone and isinstance(answer, dict) and "error" in answer:
            return None
        if status != 200:
            raise self._refused(status, answer)
        if not isinstance(answer, dict):
            raise self._no_server("its answer is no JSON object")
        return answer

    def _refused(self, status: int, answer: Any) -> InputError:
        if not isinstance(answer, dict) or not isinstance(answer.get("error"), str):
            if status in (401, 403):
                return InputError(f"{self.address}: refused ({status}); give its token with --token or HCE_TOKEN")
            return self._no_server(f"it answered {status}")
        again = "; try again" if status >= 500 else ""
        return InputError(f"{self.address}: {one_line(ValueError(answer['error']))} ({status}){again}")

    def _no_server(self, reason: str) -> InputError:
        return InputError(f"{self.address}: no hce server ({reason}); give the address that `hce serve` printed")


class Answer(NamedTuple):
    """What a server found: hits, best first, and whether the first one is a good match, where that is known."""

    hits: list[Hit]
    good_match: bool | None


class _Judgment(NamedTuple):
    """What the API says of all hits together."""

    good_match: bool | None = None


class _Found(NamedTuple):
    """What a hit of the API says, without its text."""

    rank: int
    score: float
    id: str
    from_meaning: float
    from_words: float
    matched: list[str]
    passage: list[int] | None
    folded: list[str]
    path: list[dict[str, Any]]
    from_tokens: float


class _Text(NamedTuple):
    """What the API says of a document."""

    id: str
    title: str
    text: str
    metadata: dict[str, Any]


def _hit(found: _Found, document: _Text) -> Hit:
    passage = Passage(*found.passage) if found.passage else None
    path = tuple(checked_fields(PathNode, each) for each in found.path)
    lists = {"matched": tuple(found.matched), "passage": passage, "folded": tuple(found.folded), "path": path}
    return Hit(**{**document._asdict(), **found._asdict(), **lists})
