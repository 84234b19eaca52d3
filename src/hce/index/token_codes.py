"""The codes of an index's tokens, which reorder the first hits of a hybrid search: see `hce.encoding.reranker`.

A folder holds a `TokenSpace`, and the codes that it makes of each text. The same pass of the encoder makes a text's
vector and its codes. Stored codes only save time: a search computes missing or damaged ones.
"""

from __future__ import annotations

import logging
import re
import sqlite3
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hce.data.corpus import Corpus
from hce.errors import FormatError, InputError
from hce.files import delete_file, is_file, names_in, new_folder
from hce.index.ranking import Hit, extent_in_text, read_passage, read_text
from hce.index.store import require_own_files
from hce.index.tables import Reader, content_key
from hce.progress import check_deadline, progress_bar
from hce.search.fusion import TOKENS_FIRST, order_by_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from hce.encoding.encoder import Encoder, OnTokens
    from hce.encoding.reranker import QueryTokens, TokenSpace
    from hce.index.state import IndexEncoder

logger = logging.getLogger(__name__)

SPACE_FILE = "space.safetensors"
SCHEMA = "CREATE TABLE IF NOT EXISTS codes (content INTEGER PRIMARY KEY, codes BLOB NOT NULL)"
TEXTS_AT_ONCE = 1024
MOST_QUERIES = 4096  # cached between their encoding and their search
SECONDS_TO_WAIT = 2.0  # for another process; codes that cannot be read or written by then are computed again


class TokenCodes:
    """The codes of texts in a folder, and the tokens of the last queries; safe for many threads and processes."""

    def __init__(self, folder: Path, share: int = 0) -> None:
        self.folder = folder
        self.share = share  # the number of the file that only this process fills; 0 for the common file
        self._queries: dict[str, QueryTokens] = {}

    @classmethod
    def find(cls, folder: Path) -> TokenCodes | None:
        """Return the codes in a folder; None if there are none or their space is damaged."""
        found = cls(folder) if is_file(folder / SPACE_FILE) else None
        try:
            return found if found and found.space else None
        except FormatError as error:
            logger.warning("%s; until then the index ranks without tokens", error)
            return None

    @classmethod
    def create(cls, folder: Path, space: TokenSpace) -> TokenCodes:
        """Create a folder for the codes of a space, still empty."""
        with new_folder(folder) as new:
            space.save(new / SPACE_FILE)
        return cls(folder)

    @cached_property
    def space(self) -> TokenSpace:
        """The space that turns states into codes; FormatError if it is damaged."""
        from hce.encoding.reranker import TokenSpace

        return TokenSpace.load(self.folder / SPACE_FILE)

    @property
    def file(self) -> Path:
        """The file of the codes, named after their space, so that a process with another space does not use it."""
        return self.folder / f"codes-{self.space.checksum:08x}{f'-{self.share}' if self.share else ''}.sqlite"

    # ------------------------------------------------------------------------------------------------- queries

    def keep_query(self, text: str, ids: np.ndarray, states: Tensor) -> None:
        """Cache the tokens of a query until its search."""
        if len(self._queries) >= MOST_QUERIES:
            self._queries = {}
        self._queries[text] = self.space.query(ids, states)

    def in_order(
        self, encoder: IndexEncoder, queries: Sequence[str], hits: Sequence[Sequence[Hit]], tokens_share: float
    ) -> list[list[Hit]]:
        """Reorder the first hits of each query; compute missing codes."""
        known = self._queries
        if not all(query in known for query in queries):
            known = {}
            encoder.encode(
                queries, "query", lambda text, ids, states: known.update({text: self.space.query(ids, states)})
            )
        ordered = []
        for query, row in zip(queries, hits, strict=True):
            check_deadline()
            texts = dict.fromkeys(read_text(hit) for hit in row[:TOKENS_FIRST])
            codes = self.get(texts)
            if left := [text for text in texts if text not in codes]:
                with self.filling(codes) as on_tokens:
                    encoder.encode(left, "document", on_tokens)
            ordered.append(in_order_of_tokens(known[query], row, codes, tokens_share))
        return ordered

    # ------------------------------------------------------------------------------------------------- texts

    @contextmanager
    def filling(self, made: dict[str, np.ndarray] | None = None) -> Iterator[OnTokens]:
        """Yield a callback for tokens, which stores their codes some texts at a time.

        If `made` is given, the codes are also put there.
        """
        found: dict[str, np.ndarray] = {}

        def keep(text: str, ids: np.ndarray, states: Tensor) -> None:
            found[text] = self.space.codes(states)
            if made is not None:
                made[text] = found[text]
            if len(found) >= TEXTS_AT_ONCE:
                self.put(found)
                found.clear()

        yield keep
        self.put(found)

    def put(self, codes: Mapping[str, np.ndarray]) -> None:
        """Store codes by text; if that fails, a search computes them again."""
        rows = [(_key(text), _sealed(each)) for text, each in codes.items()]
        try:
            self._insert(rows)
        except sqlite3.Error as error:
            logger.debug("%s: tokens are not kept (%s)", self.folder, error)

    def _insert(self, rows: list[tuple[int, bytes]], *, again: bool = False) -> None:
        """Insert rows in one transaction; replace a damaged file, once."""
        try:
            with _opened(self.file) as connection, connection:
                connection.execute(SCHEMA)
                connection.executemany("INSERT OR REPLACE INTO codes VALUES (?, ?)", rows)
        except sqlite3.DatabaseError as error:
            if again or isinstance(error, sqlite3.OperationalError):  # a full disk, or another writer
                raise
            logger.warning("%s: %s was damaged, and starts over empty", self.folder, self.file.name)
            delete_file(self.file)
            self._insert(rows, again=True)

    def get(self, texts: Collection[str]) -> dict[str, np.ndarray]:
        """Return the stored codes of some texts, each of shape (tokens, DIM)."""
        wanted = {_key(text): text for text in texts}
        query = f"SELECT content, codes FROM codes WHERE content IN ({', '.join('?' * len(wanted))})"  # noqa: S608
        try:
            with _opened(self.file) as connection:
                rows = connection.execute(query, list(wanted)).fetchall()
        except sqlite3.Error as error:
            logger.debug("%s: tokens cannot be read (%s)", self.folder, error)
            return {}
        width = self.space.basis.shape[1]
        found = {content: _unsealed(blob, width) for content, blob in rows}
        return {text: codes for text in texts if (codes := found.get(_key(text))) is not None}

    # ------------------------------------------------------------------------------------------------- the file

    def take_in_shares(self) -> None:
        """Move the codes from the files of other processes into the common file."""
        shares = re.compile(rf"{self.file.stem}-[0-9]+\.sqlite")
        for share in [self.folder / name for name in names_in(self.folder) if shares.fullmatch(name)]:
            try:
                self._insert([])  # makes sure that the common file exists
                with _opened(share), _opened(self.file) as connection:
                    connection.execute("ATTACH ? AS share", (str(share),))
                    with connection:
                        connection.execute("INSERT OR REPLACE INTO codes SELECT * FROM share.codes")
            except sqlite3.Error as error:
                logger.debug("%s: tokens are not kept (%s)", share, error)
            delete_file(share)

    def keep_only(self, reader: Reader) -> None:
        """Drop the codes of deleted texts; searches go on meanwhile."""
        if not is_file(self.file):
            return
        copy = self.folder / f".{self.file.name}.partial"
        try:
            delete_file(copy)
            with closing(sqlite3.connect(copy)) as connection:
                connection.execute(SCHEMA)
                self._copy(connection, _keys_of(reader))
            copy.replace(self.file)
            for name in names_in(self.folder):
                if name.startswith("codes-") and not name.startswith(self.file.name):
                    delete_file(self.folder / name)
        except (OSError, sqlite3.Error) as error:
            raise InputError(f"{self.folder}: {error}; check the disk's space, or delete the folder") from error

    def _copy(self, connection: sqlite3.Connection, keys: Iterable[int]) -> None:
        """Copy the codes of some texts from the current file; none if it is damaged."""
        connection.execute("CREATE TEMP TABLE kept (content INTEGER PRIMARY KEY)")
        connection.executemany("INSERT OR IGNORE INTO kept VALUES (?)", ((key,) for key in keys))
        connection.commit()
        try:
            with _opened(self.file):  # checks its schema
                connection.execute("ATTACH ? AS before", (str(self.file),))
            with connection:
                connection.execute("INSERT INTO codes SELECT * FROM before.codes WHERE content IN kept")
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError) and "no such table" not in str(error):
                raise  # a full disk, or another writer
            logger.warning("%s: %s was damaged (%s), and starts over empty", self.folder, self.file.name, error)

    def damage(self) -> str | None:
        """Describe the damage in one line; None without damage."""
        try:
            if not is_file(self.file):
                return None
            width = self.space.basis.shape[1]
            with _opened(self.file) as connection:
                rows = connection.execute("SELECT codes FROM codes")
                damaged = sum(_unsealed(blob, width) is None for (blob,) in rows)
        except FormatError as error:
            return str(error)
        except sqlite3.Error as error:
            return f"{self.folder.name}/{self.file.name} is damaged ({error})"
        return f"the tokens of {damaged:,} texts are not as they were written" if damaged else None


def encode_keeping_tokens(encoder: IndexEncoder, codes: TokenCodes | None, texts: list[str]) -> np.ndarray:
    """Encode documents to unit vectors (texts, n); store codes if any are kept."""
    if codes is None:
        return encoder.encode(texts, "document")
    with codes.filling() as on_tokens:
        return encoder.encode(texts, "document", on_tokens)


def read_all_tokens(folder: Path, encoder: Encoder, reader: Reader, *, progress: bool) -> None:
    """Encode all documents, to store their codes in a new folder."""
    from hce.encoding.reranker import COUNTED, TokenSpace

    numbers = reader.numbers()
    some = reader.documents(numbers[:: max(1, -(-len(numbers) // COUNTED))].tolist())
    space = TokenSpace.fit(encoder, Corpus.from_documents(some.values())) if some else None
    if space is None:
        return
    with (
        TokenCodes.create(folder, space).filling() as on_tokens,
        progress_bar("reading tokens", len(numbers), "documents", show=progress) as advance,
    ):
        entries = reader.entries()
        while chunk := list(islice(entries, TEXTS_AT_ONCE)):
            encoder.encode([entry.document.full_text for entry in chunk], on_tokens=on_tokens)
            advance(len(chunk))


def in_order_of_tokens(
    query: QueryTokens, hits: Sequence[Hit], codes: Mapping[str, np.ndarray], tokens_share: float
) -> list[Hit]:
    """Reorder the first hits by scores that include tokens; the others follow."""
    first, others = hits[:TOKENS_FIRST], hits[TOKENS_FIRST:]
    none = np.zeros((0, query.vectors.shape[1]), np.int8)
    similarities = query.max_similarities([codes.get(read_text(hit), none) for hit in first])
    scores = np.array([hit.score for hit in first])
    order, added = order_by_tokens(np.array([hit.number for hit in first]), scores, similarities, tokens_share)
    kept = 1 - tokens_share  # so that scores stay at most 1
    parts = [
        (first[row]._replace(rank=rank), gain)
        for rank, (row, gain) in enumerate(zip(order.tolist(), added[order].tolist(), strict=True), 1)
    ]
    return [
        hit._replace(
            score=kept * hit.score + kept * gain,
            from_meaning=kept * hit.from_meaning,
            from_words=kept * hit.from_words,
            from_tokens=kept * gain,
        )
        for hit, gain in [*parts, *((hit, 0.0) for hit in others)]
    ]


def _opened(file: Path) -> closing[sqlite3.Connection]:
    """Open a file of codes, new or existing; DatabaseError if its schema is another."""
    require_own_files(file)
    connection = sqlite3.connect(file, timeout=SECONDS_TO_WAIT)
    try:
        made = connection.execute("SELECT sql FROM sqlite_master").fetchall()
        if made not in ([], [(SCHEMA.replace("IF NOT EXISTS ", ""),)]):
            raise sqlite3.DatabaseError("hce did not make it")
    except BaseException:
        connection.close()
        raise
    return closing(connection)


def _key(text: str) -> int:
    """Return the key of a text, stripped: encoders ignore outer white space."""
    return content_key(text.strip())


def _keys_of(reader: Reader) -> Iterator[int]:
    """Yield the keys of all documents, and of the passages of long ones."""
    yield from reader.contents()[1].tolist()
    for number, extents in reader.all_extents():
        for document in reader.documents([number]).values():
            for extent in extents.values():
                yield _key(read_passage(document, extent_in_text(document, extent)))


def _sealed(codes: np.ndarray) -> bytes:
    data = codes.tobytes()
    return data + zlib.crc32(data).to_bytes(4, "little")


def _unsealed(blob: bytes, width: int) -> np.ndarray | None:
    """Return codes of shape (tokens, width); None if they are damaged."""
    data, checksum = blob[:-4], blob[-4:]
    if zlib.crc32(data).to_bytes(4, "little") != checksum or len(data) % width:
        return None
    return np.frombuffer(data, np.int8).reshape(-1, width)
