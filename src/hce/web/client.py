"""A client of a running `hce serve`; finds the same hits as a search of the index."""

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

SECONDS = 40.0  # to wait for an answer; the server cancels a search after 30
MOST_BYTES = 1 << 28  # in an answer


class Answer(NamedTuple):
    """The hits, best first, and whether the first is a good match; None if unknown."""

    hits: list[Hit]
    good_match: bool | None


class Client:
    """Searches a running `hce serve`; each search opens a connection and closes it.

    Args:
        address: the server's address, such as http://127.0.0.1:8080.
        token: the token of the server, or of a proxy in front of it.
    """

    def __init__(self, address: str, token: str | None = None) -> None:
        self.address = address
        try:
            parts = urlsplit(address)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise InputError(f"{address}: not an address ({error}); give one such as http://127.0.0.1:8080") from error
        if not host or not is_url(address):
            raise InputError(f"{address}: not an address; give one such as http://127.0.0.1:8080")
        connection = HTTPSConnection if parts.scheme.lower() == "https" else HTTPConnection
        self._connection = connection(host, port, timeout=SECONDS)
        self._path = parts.path.rstrip("/")
        self._headers = {"Accept": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}

    def search(
        self, text: str, k: int = 10, where: Sequence[str] = (), mode: str = "hybrid", *, unique: bool = False
    ) -> Answer:
        """Find the k best documents for a text, as `hce search` does."""
        asked = {"q": text, "k": k, "mode": mode, "where": where, "unique": str(unique).lower()}
        with closing(self._connection):
            answer = self._get(f"/api/search?{urlencode(asked, doseq=True)}")
            try:
                hits = [(hit, self._get(f"/api/documents/{quote(hit['id'], safe='')}")) for hit in answer["hits"]]
                found = [_hit({**hit, **document}) for hit, document in hits if document]
                good_match = answer.get("good_match")
                return Answer(found, good_match if isinstance(good_match, bool) else None)
            except (FormatError, LookupError, TypeError, ValueError) as error:
                raise self._no_server(one_line(error)) from error

    def _get(self, path: str) -> Any:
        """Return the JSON object of an answer; None for a document removed meanwhile."""
        try:
            self._connection.request("GET", self._path + path, headers=self._headers)
            response = self._connection.getresponse()
            status, body = response.status, response.read(MOST_BYTES)
        except TimeoutError as error:
            raise InputError(
                f"{self.address}: no answer within {SECONDS:.0f} s; try again, or see the server's log"
            ) from error
        except OSError as error:
            reason = error.strerror or one_line(error)
            raise InputError(f"{self.address}: nobody answers ({reason}); is `hce serve` running there?") from error
        except (HTTPException, ValueError) as error:
            raise self._no_server(one_line(error)) from error
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = None
        if status == 200 and isinstance(answer, dict):
            return answer
        sentence = answer.get("error") if isinstance(answer, dict) else None
        if status == 404 and sentence and path.startswith("/api/documents/"):
            return None
        if status == 200:
            raise self._no_server("its answer is not a JSON object")
        if isinstance(sentence, str):
            again = "; try again" if status >= 500 else ""
            raise InputError(f"{self.address}: {one_line(ValueError(sentence))} ({status}){again}")
        if status in (401, 403):
            raise InputError(f"{self.address}: refused ({status}); give its token with --token or HCE_TOKEN")
        raise self._no_server(f"it answered {status}")

    def _no_server(self, reason: str) -> InputError:
        return InputError(f"{self.address}: not an hce server ({reason}); give the address that `hce serve` printed")


def _hit(values: dict[str, Any]) -> Hit:
    """Check a hit of the API together with its document."""
    path, passage = tuple(checked_fields(PathNode, each) for each in values["path"]), values["passage"]
    lists = {name: tuple(values[name]) for name in ("matched", "folded")}
    return checked_fields(Hit, {**values, **lists, "path": path, "passage": passage and Passage(*map(int, passage))})
