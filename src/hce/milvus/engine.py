"""Rows of vectors and texts in a Milvus collection, and an engine that searches them.

Milvus is a server (`http://HOST:19530`) or the embedded engine (a path that ends in `.db`); only the address differs.
The collection's name follows after `#`, by default `hce`. That name is an alias. A new collection is filled under a
name of its own, and readers see the collection as soon as the alias points to it.

Milvus compares a query with every vector (FLAT), so a search is exact, also with filters. But Milvus returns ties in
any order, and a server's scores differ from the embedded engine's in the last digit. So hce scores candidates again.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hce.errors import AwayError, HceError, InputError, needs_extra, one_line
from hce.progress import check_deadline
from hce.search.engine import SLACK, Found, k_best, search_exactly

NAME = "hce"
PATIENCE = 15.0  # seconds to wait for a server that is away; `hce serve` must answer within 30
MOST_FOUND = 16_384  # Milvus's limit of rows in an answer
REQUEST_BYTES = 16 << 20  # Milvus accepts 64 MB; encoding makes a request larger
MOST_ROWS = 2000  # in one request
PIECE = 60_000  # bytes of a text in one row; Milvus accepts 65,535
FEWEST, MOST_DIMENSIONS = 2, 32_768
PLACE = ("number", "document", "part")  # the integer fields of a row
FIELDS = (*PLACE, "content")
TOO_LARGE = re.compile("larger than|exceed|RESOURCE_EXHAUSTED")  # in errors about a request or an answer
NOT_LOADED = re.compile("released|not ?loaded", re.IGNORECASE)
GONE = re.compile("collection not found|can't find collection", re.IGNORECASE)

Result = TypeVar("Result")


class GoneOnError(HceError):
    """The collection has changed since the moment that the search is for."""


class Address(NamedTuple):
    """The address of a collection: `http://HOST:PORT` or the path of a `.db` file, and a name."""

    uri: str
    name: str

    @classmethod
    def parse(cls, text: str | Path) -> Address:
        """Parse an address as users write it; InputError if it is invalid.

        >>> Address.parse("http://search.example.org:19530#papers")
        Address(uri='http://search.example.org:19530', name='papers')
        """
        place, _, name = str(text).partition("#")
        name = name or NAME
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,99}", name):
            raise InputError(f"{text}: after # give the name of a collection: letters, digits and _, as in #papers")
        if found := re.fullmatch(r"(https?):/+([^/\s]+(?:/\S*)?)", place):  # `Path` reduces // to /
            return cls(f"{found[1]}://{found[2]}", name)
        if place.endswith(".db") and "://" not in place:
            return cls(str(Path(place).absolute()), name)
        raise InputError(f"{text}: not an address of Milvus; give http://HOST:PORT, or a file ending in .db")

    def __str__(self) -> str:
        return self.uri if self.name == NAME else f"{self.uri}#{self.name}"


def is_address(text: str | Path) -> bool:
    """Return whether the name of an index is the address of a collection."""
    place = str(text).partition("#")[0]
    return bool(re.match(r"https?:/", place)) or (place.endswith(".db") and not Path(place, "manifest.json").exists())


class MilvusRow(NamedTuple):
    """A row of a partition."""

    number: int
    document: int  # the number of its document; in an entry of the log, that of the change; else 0
    part: int  # how many pieces the content has (documents, manifest), or the position of this piece (pieces, log)
    content: str  # a text of at most `PIECE` bytes
    vector: np.ndarray | None = None  # of shape (n,); None if no search should find the row, or if no vector was read


# ------------------------------------------------------------------------------------------------- the server


class Milvus:
    """A connection to Milvus; requests wait up to `PATIENCE` seconds for the server."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._client: Any = None
        self._process = 0

    def close(self) -> None:
        """Close the connection."""
        if self._client is not None and self._process == os.getpid():
            self._client.close()
        self._client = None

    def ask(self, what: Callable[[Any], Result], *, again: bool = True) -> Result:
        """Call `what` with the client; retry while the server is away, up to `PATIENCE`.

        With `again=False`, `what` is called only once: a server may do the work and then fail before it answers.
        """
        end, pause = time.monotonic() + PATIENCE, 0.1
        while True:
            check_deadline()
            try:
                return what(self._connected())
            except HceError:
                raise
            except Exception as error:  # pymilvus, grpc and the embedded engine share no base class
                reason = _reason(error)
                if GONE.search(str(error)):
                    raise GoneOnError(f"{self.address}: the collection is gone ({reason})") from error
                if not again or TOO_LARGE.search(str(error)) or time.monotonic() + pause > end:
                    advice = "check the address, and that it is running"
                    if self.address.uri.endswith(".db"):
                        advice = "only one process at a time can have the file open: end the other, or use a server"
                    raise AwayError(f"{self.address}: the request to Milvus failed ({reason}); {advice}") from error
            time.sleep(pause)
            pause = min(2 * pause, 2.0)

    def call(self, method: str, name: str, *args: Any, again: bool = True, **options: Any) -> Any:
        """Call a method on a collection; load the collection if the server restarted."""
        options = {"timeout": PATIENCE, **options}

        def act(client: Any) -> Any:
            try:
                return getattr(client, method)(name, *args, **options)
            except Exception as error:
                if not NOT_LOADED.search(str(error)):
                    raise
                client.load_collection(name, timeout=PATIENCE)
                return getattr(client, method)(name, *args, **options)

        return self.ask(act, again=again)

    def _connected(self) -> Any:
        if self._client is None or self._process != os.getpid():
            self._client, self._process = _client(self.address), os.getpid()
        return self._client

    def current(self) -> str | None:
        """Return the collection that the alias points to, if any."""
        name = self.address.name
        if not self.call("has_collection", name):
            return None
        found = str(self.call("describe_collection", name)["collection_name"])
        if found == name:
            raise InputError(f"{self.address}: the collection {name!r} is not hce's; choose another name after #")
        return found

    def now(self) -> int:
        """Return Milvus's current timestamp; 0 if Milvus has none.

        Only a private function of pymilvus asks for the timestamp. Without that function, the result is 0 too.
        """
        try:
            return int(self.ask(lambda client: client._get_connection().alloc_timestamp(timeout=PATIENCE)))
        except (AttributeError, TypeError):
            return 0

    def create(self, collection: str, dim: int) -> None:
        """Make an empty collection for vectors of `dim`; drop one of this name first."""
        if not FEWEST <= dim <= MOST_DIMENSIONS:
            raise InputError(f"{self.address}: Milvus keeps vectors of {FEWEST} to {MOST_DIMENSIONS:,} dimensions")
        self.ask(lambda client: _create(client, collection, dim))

    def publish(self, collection: str) -> None:
        """Point the alias to a collection, and drop the one it pointed to before."""
        name, before = self.address.name, self.current()
        if before is None:
            self.call("create_alias", collection, name)
        elif before != collection:
            self.call("alter_alias", collection, name)
            self.call("drop_collection", before)

    def withdraw(self) -> None:
        """Drop the alias and its collection."""
        before = self.current()
        if before is not None:
            self.call("drop_alias", self.address.name)
            self.call("drop_collection", before)


def _client(address: Address) -> Any:
    """Connect; a password comes from the environment, never from a file."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC would also print the errors that it raises
    with needs_extra("milvus", str(address)):
        import pymilvus
    for name in ("pymilvus", "milvus_lite", "grpc._server"):  # these log every error that they also raise
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if address.uri.endswith(".db") and not Path(address.uri).parent.is_dir():
        raise InputError(f"{address}: there is no folder {Path(address.uri).parent}; make it first")
    return pymilvus.MilvusClient(uri=address.uri, token=os.environ.get("MILVUS_TOKEN", ""), timeout=PATIENCE)


def _create(client: Any, collection: str, dim: int) -> None:
    from pymilvus import DataType

    if client.has_collection(collection, timeout=PATIENCE):  # from an interrupted attempt
        client.drop_collection(collection, timeout=PATIENCE)
    schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
    for name in PLACE:
        schema.add_field(name, DataType.INT64, is_primary=name == "number")
    schema.add_field("content", DataType.VARCHAR, max_length=65_535)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dim)
    client.create_collection(collection, schema=schema, consistency_level="Strong", timeout=PATIENCE)
    for partition in ("documents", "pieces", "passages", "files", "log"):
        client.create_partition(collection, partition, timeout=PATIENCE)
    index = client.prepare_index_params()
    index.add_index("vector", index_type="FLAT", metric_type="IP")
    client.create_index(collection, index, timeout=PATIENCE)
    client.load_collection(collection, timeout=PATIENCE)


def _reason(error: Exception) -> str:
    """Return an error's message, without technical details of pymilvus and grpc."""
    details = getattr(error, "details", None)
    text = str(details()) if callable(details) else str(getattr(error, "message", "") or error)
    return one_line(ValueError(re.sub(r"\[\w+\] Retry [^,]*, ?|message=|<|>", "", text)))


# ------------------------------------------------------------------------------------------------- one collection


class Collection:
    """A collection of vectors of `dim`; its partitions share one space of keys.

    Reads see all writes before `since`, a timestamp of Milvus. With `since` = 0 they see all writes so far, and
    take 0.2 to 0.4 s longer.
    """

    def __init__(self, server: Milvus, name: str, dim: int, since: int = 0) -> None:
        self.server, self.name, self.dim, self.since = server, name, dim, since
        self.documents = Partition(self, "documents", 0)
        self.pieces = Partition(self, "pieces", 1 << 60)  # the rest of documents that do not fit into one row
        self.passages = Partition(self, "passages", 1 << 61)
        self.files = Partition(self, "files", 1 << 62)
        self.log = Partition(self, "log", 0, -1)


@dataclass(eq=False)
class Partition:
    """The rows of one partition, with its own range of keys."""

    collection: Collection
    name: str
    base: int
    step: int = 1

    def key(self, number: int) -> int:
        """Return the primary key of the row with a number."""
        return self.base + self.step * number

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        return self.collection.server.call(method, self.collection.name, *args, **options)

    def _read(self, method: str, **options: Any) -> Any:
        options["consistency_level"] = "Customized" if self.collection.since else "Strong"
        if self.collection.since:
            options["guarantee_timestamp"] = self.collection.since
        return self._call(method, partition_names=[self.name], **options)

    def put(self, rows: Iterable[MilvusRow], *, again: bool = False) -> None:
        """Insert rows; with `again`, or after an error, upsert: rows may exist already."""
        place: dict[str, Any] = {"partition_name": self.name, "timeout": 3 * PATIENCE}
        nothing = np.zeros(self.collection.dim, np.float32)
        for batch in _batches(rows, 4 * self.collection.dim):
            data = [
                row._replace(
                    number=self.key(row.number),
                    content=_Text(row.content),
                    vector=nothing if row.vector is None else row.vector,
                )._asdict()
                for row in batch
            ]
            if not again:
                try:
                    self._call("insert", data, again=False, **place)
                    continue
                except AwayError:
                    again = True  # the server may have written some rows before it failed
            self._call("upsert", data, **place)

    def delete(self, numbers: Iterable[int]) -> None:
        """Delete rows; unknown numbers are skipped."""
        keys = [self.key(int(number)) for number in numbers]
        for start in range(0, len(keys), MOST_FOUND):
            condition = f"number in {keys[start : start + MOST_FOUND]}"
            self._call("delete", partition_name=self.name, filter=condition)

    def rows_between(
        self, first: int, last: int, fields: Sequence[str] = FIELDS, *, of_documents: bool = False
    ) -> Iterator[MilvusRow]:
        """Read rows `first` to `last`, or with `of_documents`, these documents' rows."""

        def condition(start: int, stop: int) -> str:
            if of_documents:
                return f"document >= {start} and document <= {stop}"
            low, high = sorted((self.key(start), self.key(stop)))
            return f"number >= {low} and number <= {high}"

        return self._in_blocks(first, last, fields, condition)

    def rows_of(self, documents: Sequence[int], fields: Sequence[str] = FIELDS) -> list[MilvusRow]:
        """Read the rows of some documents, in order of the rows' numbers."""

        def condition(start: int, stop: int) -> str:
            return f"document in {[int(number) for number in documents[start : stop + 1]]}"

        blocks = self._in_blocks(0, len(documents) - 1, fields, condition)
        return sorted(blocks, key=attrgetter("number"))

    def rows_after(self, after: int) -> list[MilvusRow]:
        """Read the rows with numbers above `after`, in order."""
        found = self._query(f"number {'<' if self.step < 0 else '>'} {self.key(after)}")
        return [found[number] for number in sorted(found)]

    def vectors(self, numbers: np.ndarray) -> np.ndarray:
        """Return vectors, of shape (m, n), float32; GoneOnError if one was deleted."""
        wanted = np.unique(numbers).tolist()
        at_once = max(1, min(MOST_FOUND, REQUEST_BYTES // (4 * self.collection.dim)))
        found: dict[int, MilvusRow] = {}
        for start in range(0, len(wanted), at_once):
            keys = [self.key(number) for number in wanted[start : start + at_once]]
            found |= self._query(f"number in {keys}", fields=(*PLACE, "vector"))
        if len(found) < len(wanted):
            raise GoneOnError(f"{self.collection.server.address}: a document was deleted")
        rows = [found[number].vector for number in numbers.tolist()]
        return np.array(rows, np.float32).reshape(len(rows), self.collection.dim)

    def nearest(self, queries: np.ndarray, count: int, condition: str) -> Found:
        """Find the `count` nearest rows that match a condition; GoneOnError if fewer do."""
        with_vectors = 4 * self.collection.dim * count <= REQUEST_BYTES
        at_once = max(1, REQUEST_BYTES // (4 * self.collection.dim * count)) if with_vectors else 1
        numbers = np.empty((len(queries), count), np.int64)
        scores = np.empty((len(queries), count), np.float32)
        for start in range(0, len(queries), at_once):
            hits = self._read(
                "search",
                data=list(np.ascontiguousarray(queries[start : start + at_once], np.float32)),
                limit=count,
                filter=condition,
                output_fields=["number", "vector"] if with_vectors else ["number"],
                search_params={"metric_type": "IP"},
            )
            for row, of_one in enumerate(hits, start):
                if len(of_one) < count:
                    raise GoneOnError(
                        f"{self.collection.server.address}: only {len(of_one)} of {count} documents were found"
                    )
                keys = [int(hit["number"] if "number" in hit else hit["id"]) for hit in of_one]  # older servers say id
                numbers[row] = [self.step * (key - self.base) for key in keys]
                if with_vectors:
                    vectors = np.array([hit["entity"]["vector"] for hit in of_one], np.float32)
                else:
                    vectors = self.vectors(numbers[row])
                scores[row] = scores_with(vectors, queries[row])
        return Found(numbers, scores)

    def _in_blocks(
        self, first: int, last: int, fields: Sequence[str], condition: Callable[[int, int], str]
    ) -> Iterator[MilvusRow]:
        """Read from `first` to `last` in blocks: smaller ones if an answer is too large."""
        start, at_once = first, MOST_ROWS
        while start <= last:
            stop = min(start + at_once - 1, last)
            try:
                found = self._query(condition(start, stop), fields=fields)
                is_cut_off = len(found) == MOST_FOUND
            except AwayError as error:
                if at_once == 1 or not TOO_LARGE.search(str(error)):
                    raise
                is_cut_off = True
            if is_cut_off and at_once > 1:
                at_once = max(1, at_once // 8)
                continue
            yield from (found[number] for number in sorted(found))
            start = stop + 1

    def _query(self, condition: str, *, fields: Sequence[str] = FIELDS) -> dict[int, MilvusRow]:
        rows = self._read("query", filter=condition, output_fields=list(fields), limit=MOST_FOUND)
        found = {}
        for each in rows:
            number = self.step * (int(each["number"]) - self.base)
            vector = np.array(each["vector"], np.float32) if "vector" in fields else None
            found[number] = MilvusRow(number, int(each["document"]), int(each["part"]), each.get("content", ""), vector)
        return found


class _Text(str):
    """A string that pymilvus checks in one step; other strings take 1 µs per letter."""

    __slots__ = ()

    def __iter__(self) -> Iterator[str]:
        return iter((str(self),))


def scores_with(vectors: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Return the inner products of vectors, of shape (m, n), with a query."""
    return np.einsum("pn,pn->p", vectors, np.broadcast_to(query, vectors.shape))


def _batches(rows: Iterable[MilvusRow], width: int) -> Iterator[list[MilvusRow]]:
    batch: list[MilvusRow] = []
    size = 0
    for row in rows:
        length = width + len(row.content.encode())
        if batch and (size + length > REQUEST_BYTES or len(batch) == MOST_ROWS):
            yield batch
            batch, size = [], 0
        batch.append(row)
        size += length
    if batch:
        yield batch


# ------------------------------------------------------------------------------------------------- as an engine


@dataclass(eq=False)
class MilvusEngine:
    """An engine over the vectors of one partition at one moment."""

    partition: Partition
    count: int
    last: int  # the last number at that moment; higher ones are ignored
    are_there: Callable[[np.ndarray], np.ndarray]  # which numbers exist at that moment; Milvus may find removed ones

    def __len__(self) -> int:
        return self.count

    def search(self, queries: np.ndarray, k: int, allowed: np.ndarray | None = None) -> Found:
        """Find the k vectors with the largest inner products; GoneOnError if one is gone."""
        queries = np.ascontiguousarray(queries, np.float32)
        if allowed is None:
            return search_exactly(self._best, self.count, queries, k, SLACK)
        return search_exactly(
            lambda block, count: self._best_among(block, count, allowed), len(allowed), queries, k, SLACK
        )

    def scores(self, query: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return inner products with some vectors; GoneOnError if one was deleted."""
        return scores_with(self.partition.vectors(numbers), query)

    def _best(self, queries: np.ndarray, count: int) -> Found:
        """Find the best vectors; search in blocks if Milvus finds too many removed ones."""
        condition, extra = f"number <= {self.partition.key(self.last)}", 0
        while count + extra <= MOST_FOUND:
            try:
                found = self.partition.nearest(queries, count + extra, condition)
            except GoneOnError:
                if not extra:
                    raise
                extra = 0  # Milvus has deleted the removed vectors meanwhile
                continue
            there = self.are_there(found.numbers)
            if (there.sum(axis=1) >= count).all():
                return k_best(Found(np.where(there, found.numbers, -1), found.scores), count)
            extra = int((~there).sum(axis=1).max())
        numbers = [row.number for row in self.partition.rows_between(1, self.last, PLACE)]
        everything = np.array(numbers, np.int64)
        return self._best_among(queries, count, everything[self.are_there(everything)])

    def _best_among(self, queries: np.ndarray, count: int, allowed: np.ndarray) -> Found:
        """Find the best of `allowed`: filter a longer ranking, or search in blocks."""
        if len(allowed) > MOST_FOUND:
            wider = int(2 * count * self.count / len(allowed)) + MOST_ROWS
            if wider <= min(MOST_FOUND, self.count):
                found = self._best(queries, wider)
                there = np.isin(found.numbers, allowed)
                if (there.sum(axis=1) >= count).all():
                    return k_best(Found(np.where(there, found.numbers, -1), found.scores), count)
        blocks = []
        for start in range(0, len(allowed), MOST_FOUND):
            keys = [self.partition.key(number) for number in allowed[start : start + MOST_FOUND].tolist()]
            blocks.append(self.partition.nearest(queries, min(count, len(keys)), f"number in {keys}"))
        together = Found(*(np.concatenate(columns, axis=1) for columns in zip(*blocks, strict=True)))
        return k_best(together, count)
