"""The tokens of an index's texts, by which the first hits of a hybrid search are put into a better order.

See `hce.encoding.reranker`. A folder holds the space of the tokens and, by text, their codes. Codes come with the pass
of the encoder that makes a vector. They are kept for speed alone: those that are missing, or damaged, are made when a
search needs them, so nothing depends on what is there.
"""

from __future__ import annotations

import logging
import re
import sqlite3
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hce.contained import delete_file, is_file, names_in
from hce.data.corpus import Corpus
from hce.deadline import check_deadline
from hce.errors import FormatError, InputError
from hce.files import new_folder
from hce.index.connections import require_own_files
from hce.index.ranking import Hit, extent_in_text, read_passage, read_text
from hce.index.store import Reader, content_key
from hce.progress import progress_bar
from hce.search.fusion import TOKENS_FIRST, order_by_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from hce.encoding.encoder import Encoder, OnTokens
    from hce.encoding.reranker import QueryTokens, TokenSpace
    from hce.index.state import CarriedEncoder

logger = logging.getLogger(__name__)

FOLDER = "tokens"
SPACE_FILE = "space.safetensors"
SCHEMA = "CREATE TABLE IF NOT EXISTS codes (content INTEGER PRIMARY KEY, codes BLOB NOT NULL)"
TEXTS_AT_ONCE = 1024
MOST_ASKED = 4096  # queries whose tokens are remembered between their encoding and their search
SECONDS_TO_WAIT = 2.0  # for another process; what cannot be read or written then is made again

EncodeTokens = Callable[[Sequence[str], "OnTokens"], object]


class TokenCodes:
    """The codes of texts' tokens in a folder; used by any number of threads and processes.

    Attributes:
        folder: where they are.
        share: the number of the file that this process alone fills, on one of several hosts; 0 is the file of all.
    """

    def __init__(self, folder: Path, share: int = 0) -> None:
        self.folder = folder
        self.share = share

    @classmethod
    def find(cls, folder: Path) -> TokenCodes | None:
        """Return what is kept in a folder; None where there is no such folder, or its space is damaged."""
        found = cls(folder) if is_token_folder(folder) else None
        try:
            return found if found and found.space else None
        except FormatError as error:
            logger.warning("%s; until then the index ranks without tokens", error)
            return None

    @classmethod
    def create(cls, folder: Path, space: TokenSpace) -> TokenCodes:
        """Make a folder for the codes of a space, without any yet."""
        with new_folder(folder) as new:
            space.save(new / SPACE_FILE)
        return cls(folder)

    @cached_property
    def space(self) -> TokenSpace:
        """What turns states into codes.

        Raises:
            FormatError: it is damaged.
        """
        from hce.encoding.reranker import TokenSpace

        return TokenSpace.load(self.folder / SPACE_FILE)

    @property
    def file(self) -> Path:
        """Where the codes are; named after their space, so that who still has another one never reads or adds to it."""
        return self.folder / f"codes-{self.space.checksum:08x}{f'-{self.share}' if self.share else ''}.sqlite"

    @contextmanager
    def filling(self) -> Iterator[OnTokens]:
        """Yield what is to be told of tokens; their codes are kept some texts at a time."""
        found: dict[str, np.ndarray] = {}

        def keep(text: str, ids: np.ndarray, states: Tensor) -> None:
            found[text] = self.space.codes(states)
            if len(found) >= TEXTS_AT_ONCE:
                self.put(found)
                found.clear()

        yield keep
        self.put(found)

    def put(self, codes: Mapping[str, np.ndarray]) -> None:
        """Keep codes by text; where that cannot be done now, they will be made again."""
        rows = [(_key(text), _sealed(each)) for text, each in codes.items()]
        try:
            self._insert(rows)
        except sqlite3.Error as error:
            logger.debug("%s: tokens are not kept (%s)", self.folder, error)

    def _insert(self, rows: list[tuple[int, bytes]], *, anew: bool = False) -> None:
        """Put rows into the file in one transaction; a file that is no database any more is begun anew, once."""
        try:
            with self._connection() as connection, connection:
                connection.execute(SCHEMA)
                connection.executemany("INSERT OR REPLACE INTO codes VALUES (?, ?)", rows)
        except sqlite3.DatabaseError as error:
            if anew or isinstance(error, sqlite3.OperationalError):  # a full disk, another who writes
                raise
            logger.warning("%s: %s was damaged, and is begun anew", self.folder, self.file.name)
            delete_file(self.file)
            self._insert(rows, anew=True)

    def take_in_shares(self) -> None:
        """Move what other processes have kept in files of their own into the file of all."""
        shares = re.compile(rf"{self.file.stem}-[0-9]+\.sqlite")
        for share in [self.folder / name for name in names_in(self.folder) if shares.fullmatch(name)]:
            try:
                self._insert([])  # that there is a file to copy to
                with _opened(share), self._connection() as connection:
                    connection.execute("ATTACH ? AS share", (str(share),))
                    with connection:
                        connection.execute("INSERT OR REPLACE INTO codes SELECT * FROM share.codes")
            except sqlite3.Error as error:
                logger.debug("%s: tokens are not kept (%s)", share, error)
            delete_file(share)

    def get(self, texts: Collection[str]) -> dict[str, np.ndarray]:
        """Return the codes of those texts that are kept, each of shape (tokens, DIM)."""
        wanted = {_key(text): text for text in texts}
        query = f"SELECT content, codes FROM codes WHERE content IN ({', '.join('?' * len(wanted))})"  # noqa: S608
        try:
            with self._connection() as connection:
                rows = connection.execute(query, list(wanted)).fetchall()
        except sqlite3.Error as error:
            logger.debug("%s: tokens cannot be read (%s)", self.folder, error)
            return {}
        width = self.space.basis.shape[1]
        found = {content: _unsealed(blob, width) for content, blob in rows}
        return {text: codes for text in texts if (codes := found.get(_key(text))) is not None}

    def keep_only(self, reader: Reader) -> None:
        """Forget the texts of documents that are gone; searches go on meanwhile.

        Raises:
            InputError: that cannot be written.
        """
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
        """Copy the codes of some texts from the file before; none where that is damaged."""
        connection.execute("CREATE TEMP TABLE kept (content INTEGER PRIMARY KEY)")
        connection.executemany("INSERT OR IGNORE INTO kept VALUES (?)", ((key,) for key in keys))
        connection.commit()
        try:
            with self._connection():  # which looks at what is in it
                connection.execute("ATTACH ? AS before", (str(self.file),))
            with connection:
                connection.execute("INSERT INTO codes SELECT * FROM before.codes WHERE content IN kept")
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError) and "no such table" not in str(error):
                raise  # a full disk, another who writes
            logger.warning("%s: %s was damaged (%s), and is begun anew", self.folder, self.file.name, error)

    def damage(self) -> str | None:
        """Say what is not as it was written; None where nothing is."""
        try:
            if not is_file(self.file):
                return None
            width = self.space.basis.shape[1]
            with self._connection() as connection:
                rows = connection.execute("SELECT codes FROM codes")
                damaged = sum(_unsealed(blob, width) is None for (blob,) in rows)
        except FormatError as error:
            return str(error)
        except sqlite3.Error as error:
            return f"{self.folder.name}/{self.file.name} is damaged ({error})"
        return f"the tokens of {damaged:,} texts are not as they were written" if damaged else None

    def codes_of(self, texts: Sequence[str], encode: EncodeTokens) -> dict[str, np.ndarray]:
        """Return the codes of all texts; those that are not kept are made."""
        found = self.get(dict.fromkeys(texts))
        left = [text for text in dict.fromkeys(texts) if text not in found]
        if left:
            made: dict[str, np.ndarray] = {}
            encode(left, lambda text, ids, states: made.__setitem__(text, self.space.codes(states)))
            self.put(made)
            found |= made
        return found

    def _connection(self) -> closing[sqlite3.Connection]:
        return _opened(self.file)


def _opened(file: Path) -> closing[sqlite3.Connection]:
    """Open a file of codes, which may not be there yet.

    Raises:
        OutsideError: it is a link, or SQLite would open or delete another file.
        sqlite3.DatabaseError: there is more in it than the one table, such as a view.
    """
    require_own_files(file)
    connection = sqlite3.connect(file, timeout=SECONDS_TO_WAIT)
    try:
        made = connection.execute("SELECT sql FROM sqlite_master").fetchall()
        if made not in ([], [(SCHEMA.replace("IF NOT EXISTS ", ""),)]):
            raise sqlite3.DatabaseError("it is not as hce makes it")
    except BaseException:
        connection.close()
        raise
    return closing(connection)


def encode_keeping_tokens(encoder: CarriedEncoder, codes: TokenCodes | None, texts: list[str]) -> np.ndarray:
    """Encode documents to unit vectors of shape (texts, n), and keep their tokens where there is a place for them."""
    if codes is None:
        return encoder.encode(texts, "document")
    with codes.filling() as on_tokens:
        return encoder.encode(texts, "document", on_tokens)


def read_all_tokens(folder: Path, encoder: Encoder, reader: Reader, *, progress: bool) -> None:
    """Read all documents anew for their tokens, into a new folder, where the encoder tells of some."""
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


def _key(text: str) -> int:
    """Return the key of a text; white space at its ends makes no difference to an encoder."""
    return content_key(text.strip())


def _keys_of(reader: Reader) -> Iterator[int]:
    """Yield the keys of all documents, and of the passages of long ones as they are read."""
    yield from reader.contents()[1].tolist()
    for number, extents in reader.all_extents():
        for document in reader.documents([number]).values():
            for extent in extents.values():
                yield _key(read_passage(document, extent_in_text(document, extent)))


def token_folder(index_folder: Path, suffix: str) -> Path:
    """Return where an index keeps the tokens of one of its encoders, whose folders end in a suffix."""
    return index_folder / f"{FOLDER}{suffix}"


def is_token_folder(folder: Path) -> bool:
    """Tell whether a folder holds a space of tokens, without loading it, for which torch is imported."""
    return is_file(folder / SPACE_FILE)


class AskedTokens:
    """The tokens of the last queries, by text, in the space of some codes."""

    def __init__(self, codes: TokenCodes) -> None:
        self.codes = codes
        self.tokens: dict[str, QueryTokens] = {}

    def keep(self, text: str, ids: np.ndarray, states: Tensor) -> None:
        """Take the tokens of a query."""
        self.tokens[text] = self.codes.space.query(ids, states)

    def is_of(self, codes: TokenCodes, queries: Sequence[str]) -> bool:
        """Tell whether all of these queries are here, to be compared with these codes."""
        return codes is self.codes and all(query in self.tokens for query in queries)

    def in_order(self, encoder: CarriedEncoder, query: str, hits: Sequence[Hit], tokens_share: float) -> list[Hit]:
        """Put the first hits of a query into the order of tokens; codes that are not kept are made by the encoder."""
        check_deadline()
        read = [read_text(hit) for hit in hits[:TOKENS_FIRST]]
        found = self.codes.codes_of(read, lambda left, keep: encoder.encode(left, "document", keep))
        return in_order_of_tokens(self.tokens[query], hits, found, tokens_share)


class IndexTokens:
    """The tokens of an index's texts, by the encoder that told of them, and of the last queries.

    Attributes:
        index_folder: the folder of the index.
        are_kept: whether there may be any; readers elsewhere would not have them.
    """

    def __init__(self, index_folder: Path, *, are_kept: bool) -> None:
        self.index_folder = index_folder
        self.are_kept = are_kept
        self._codes: dict[Path, TokenCodes | None] = {}  # by folder, None where there are none
        self._asked: AskedTokens | None = None

    def codes(self, encoder: CarriedEncoder) -> TokenCodes | None:
        """Return the codes of the texts that an encoder has read; None where none are kept."""
        if not self.are_kept:
            return None
        folder = token_folder(self.index_folder, encoder.suffix)
        if folder not in self._codes:
            self._codes[folder] = TokenCodes.find(folder)
        return self._codes[folder]

    def asked(self, codes: TokenCodes) -> AskedTokens:
        """Return what remembers the tokens of queries from their encoding until they are searched for."""
        asked = self._asked
        if asked is None or asked.codes is not codes or len(asked.tokens) > MOST_ASKED:
            asked = self._asked = AskedTokens(codes)
        return asked

    def in_order(
        self,
        encoder: CarriedEncoder,
        codes: TokenCodes,
        queries: Sequence[str],
        hits: Sequence[Sequence[Hit]],
        tokens_share: float,
    ) -> list[list[Hit]]:
        """Put the first hits of each query into the order of tokens; the others stay behind them."""
        asked = self._asked
        if asked is None or not asked.is_of(codes, queries):
            asked = AskedTokens(codes)
            encoder.encode(queries, "query", asked.keep)
        return [asked.in_order(encoder, query, row, tokens_share) for query, row in zip(queries, hits, strict=True)]


def in_order_of_tokens(
    query: QueryTokens, hits: Sequence[Hit], codes: Mapping[str, np.ndarray], tokens_share: float
) -> list[Hit]:
    """Put the first hits into another order, by what tokens add to their scores; the others stay behind them."""
    first, others = hits[:TOKENS_FIRST], hits[TOKENS_FIRST:]
    none = np.zeros((0, query.vectors.shape[1]), np.int8)
    similarities = query.max_similarities([codes.get(read_text(hit), none) for hit in first])
    scores = np.array([hit.score for hit in first])
    order, added = order_by_tokens(np.array([hit.number for hit in first]), scores, similarities, tokens_share)
    ordered = zip(order.tolist(), added[order].tolist(), strict=True)
    changed = [
        _with_tokens(first[row], gain, tokens_share)._replace(rank=r) for r, (row, gain) in enumerate(ordered, 1)
    ]
    return [*changed, *(_with_tokens(hit, 0.0, tokens_share) for hit in others)]


def _with_tokens(hit: Hit, added: float, tokens_share: float) -> Hit:
    """Return a hit whose score has the tokens' part, scaled so that no score is above 1."""
    kept = 1 - tokens_share
    meaning, words, tokens = kept * hit.from_meaning, kept * hit.from_words, kept * added
    return hit._replace(score=kept * hit.score + tokens, from_meaning=meaning, from_words=words, from_tokens=tokens)


def _sealed(codes: np.ndarray) -> bytes:
    data = codes.tobytes()
    return data + zlib.crc32(data).to_bytes(4, "little")


def _unsealed(blob: bytes, width: int) -> np.ndarray | None:
    """Return codes as they were written, of shape (tokens, width); None where they are not."""
    data, checksum = blob[:-4], blob[-4:]
    if zlib.crc32(data).to_bytes(4, "little") != checksum or len(data) % width:
        return None
    return np.frombuffer(data, np.int8).reshape(-1, width)
