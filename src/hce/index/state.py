"""IndexState: the parts of an index that one process has open: manifest, encoder, store, derived parts and tree.

How a search stays correct while other threads and processes write:

- A write is one transaction. A reader of the store sees one moment, however long it is open.
- A reindexing activates another encoder. `IndexState.reading` adopts the manifest that names it, and opens new readers
  until one sees that encoder's vectors.
- Query vectors of the earlier encoder are then useless. `IndexState.search` raises `ReindexedError`, and its callers
  (`Index.search`, the web server) encode the queries again.
- Engines and words are at one moment at a time. Another thread may have brought them to a later moment than a reader
  sees. `Part.lend` then raises `MomentPassedError`, and `IndexState.search` searches again with a new reader.
- A collection of Milvus has only its current moment. If documents are removed during a search, `ReplicaState.search`
  copies the new writes, and searches again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import RLock

import numpy as np

from hce.data.text import Document
from hce.encoding.encoder import Encoder, OnTokens
from hce.encoding.tables import Side
from hce.errors import FormatError, InputError
from hce.files import check_tree
from hce.index.derived import Derived
from hce.index.filters import Filter
from hce.index.manifest import MANIFEST_FILE, Manifest, StandbyEncoder, file_stamp, file_stamps
from hce.index.ranking import Hit, SearchMode, check_k, check_mode, find_hits, with_matched, with_paths
from hce.index.store import MomentPassedError, Store, heed_forks
from hce.index.tables import Entry, Reader, Writer
from hce.index.token_codes import TokenCodes, encode_keeping_tokens
from hce.index.tree import NumberedHierarchy, load_tree
from hce.index.writing import Cutter, insert_documents
from hce.progress import Advance, check_deadline
from hce.search.engine import ELSEWHERE
from hce.search.fusion import TOKENS_FIRST


class ReindexedError(InputError):
    """The queries were encoded by an encoder that the index has since replaced."""


class IndexEncoder:
    """The encoder in an index's folder: loaded when needed, verified, and used by one thread at a time.

    Tokenizers are not thread-safe. `described` is the manifest, or its entry for the standby encoder. `given` is the
    encoder itself, if the caller has it.
    """

    def __init__(self, index_folder: Path, described: Manifest | StandbyEncoder, given: Encoder | None = None) -> None:
        self.index_folder = index_folder
        self.fingerprint = described.fingerprint  # known without loading the encoder
        self.facts = described
        self._encoder = given
        self._lock = RLock()
        heed_forks(self)

    def after_fork(self) -> None:
        """Replace the lock of the parent process after a fork."""
        self._lock = RLock()

    def encoder(self) -> Encoder:
        """Return the encoder; FormatError if it did not make the index's vectors."""
        with self._lock:
            if self._encoder is None:
                folder = self.index_folder / self.facts.encoder_folder
                check_tree(folder, self.index_folder)
                encoder = Encoder.load(folder)
                # Hashing the weights takes longer than loading them, so skip it for files that nobody touched.
                if file_stamps(folder) != self.facts.encoder_files and encoder.fingerprint != self.facts.fingerprint:
                    raise FormatError(
                        f"{folder} is not the encoder that made this index's vectors ({self.facts.encoder}); "
                        "put that one back or index again"
                    )
                self._encoder = encoder
            return self._encoder

    def encode(self, texts: Sequence[str], side: Side, on_tokens: OnTokens | None = None) -> np.ndarray:
        """Encode texts to unit vectors (texts, n); `on_tokens` receives their tokens."""
        with self._lock:
            return self.encoder().encode(texts, side, on_tokens=on_tokens)


class IndexState:
    """The open parts of an index in this process, and the manifest that names them.

    Unless the caller gave an encoder, a second copy is loaded to encode documents, so that searches need not wait.
    """

    def __init__(self, path: Path, encoder: Encoder | None = None) -> None:
        self.path = path
        self.manifest = Manifest.read(path)
        check_tree(path)  # refuses links, before anything below opens files by path
        if encoder is not None and encoder.fingerprint != self.manifest.fingerprint:
            raise InputError(
                f"{path} holds vectors of the encoder {self.manifest.encoder} ({self.manifest.fingerprint[:12]}), not "
                f"of {encoder.name} ({encoder.fingerprint[:12]}); open it without naming an encoder, or index again "
                "with that one"
            )
        self.for_queries = IndexEncoder(path, self.manifest, encoder)
        self.for_documents = self.for_queries if encoder else IndexEncoder(path, self.manifest)
        self.store = Store(path, self.manifest.dim)
        self.derived = Derived(self.store, self.manifest)
        self._codes: dict[str, TokenCodes | None] = {}  # by the name of the encoder's folder
        self._cutter: Cutter | None = None
        self._last_query: tuple[IndexEncoder, str, np.ndarray] | None = None  # its encoder, text and vector
        self._stamp: tuple[int, int] | None = None  # of the manifest's file; None if the manifest may be outdated
        self._tree: tuple[Manifest, NumberedHierarchy | None] | None = None  # with the manifest that names it

    def close(self) -> None:
        """Close the files."""
        self.derived.close()
        self.store.close()

    @contextmanager
    def reading(self) -> Iterator[Reader]:
        """Open a reader that sees the vectors of the manifest's encoder."""
        behind = None  # `since` of the manifest that was newer than the last reader
        while True:
            with self.store.reading() as reader:
                if self.keep_up(reader):
                    yield reader
                    return
                if behind == self.manifest.since:  # even a reader opened after that manifest was read is too old
                    raise FormatError(
                        f"{self.store.path} is older than {MANIFEST_FILE}: it has no vectors of the index's current "
                        "encoder; restore the entire folder from one copy"
                    )
                behind = self.manifest.since

    def entries(self, after: int = 0) -> Iterator[Entry]:
        """Yield the documents above `after`, in order of number."""
        with self.reading() as reader:
            yield from reader.entries(after)

    def keep_up(self, reader: Reader) -> bool:
        """Adopt a newer manifest; return whether `reader` sees its encoder's vectors."""
        stamp = file_stamp(self.path / MANIFEST_FILE)
        if stamp != self._stamp:
            self.adopt(Manifest.read(self.path, reader), stamp)
        return reader.moment().change >= self.manifest.since

    def adopt(self, manifest: Manifest, stamp: tuple[int, int] | None = None) -> None:
        """Switch to another manifest of this index, and to its encoder."""
        if manifest.since < self.manifest.since:
            return  # another thread has adopted a later one
        is_same_encoder = manifest.encoder_folder == self.manifest.encoder_folder
        is_same_place = manifest.engine_at == self.manifest.engine_at
        if not (is_same_encoder and is_same_place):
            self.derived = Derived(self.store, manifest, self.derived.mirror if is_same_place else None)
        if not is_same_encoder:
            self.for_queries, self.for_documents = (IndexEncoder(self.path, manifest) for _ in range(2))
            self._cutter = None
        self._codes = {}
        self.manifest = manifest  # last, so that a thread that sees the new manifest also sees its parts
        self._stamp = None if manifest.switch else stamp

    def present_encoder(self) -> IndexEncoder:
        """Return the index's current encoder for queries."""
        if self._stamp is None or file_stamp(self.path / MANIFEST_FILE) != self._stamp:
            with self.store.reading() as reader:
                self.keep_up(reader)
        return self.for_queries

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Encode queries to unit vectors of shape (texts, n)."""
        encoder = self.present_encoder()
        codes = self._codes_of(encoder) if self.manifest.tokens_share > 0 else None
        vectors = encoder.encode(texts, "query", None if codes is None else codes.keep_query)
        if len(texts) == 1:
            self._last_query = encoder, texts[0], vectors[0].copy()
        return vectors

    def encode_query(self, text: str) -> np.ndarray:
        """Return the vector of a query, of shape (n,); the last one is cached."""
        last = self._last_query
        if last is not None and last[:2] == (self.present_encoder(), text):
            return last[2]
        return np.asarray(self.encode_queries([text])[0])

    def encode_documents(self, texts: list[str]) -> np.ndarray:
        """Encode documents to unit vectors of shape (texts, n), and keep their tokens."""
        encoder = self.for_documents  # read once: another thread may replace it
        return encode_keeping_tokens(encoder, self._codes_of(encoder), texts)

    def insert(self, writer: Writer, chunks: Iterator[list[Document]], advance: Advance) -> None:
        """Encode documents, and insert them."""
        if self._cutter is None:
            self._cutter = Cutter(self.for_documents.encoder())
        insert_documents(writer, chunks, self.encode_documents, self._cutter, advance)

    @property
    def tree(self) -> NumberedHierarchy | None:
        """The current tree, with the numbers of the documents it was grown from; None without a tree."""
        manifest, known = self.manifest, self._tree
        if known is None or known[0] != manifest:  # also remembers that there is no tree: every search asks
            known = self._tree = manifest, load_tree(self.path)
        return known[1]

    def _codes_of(self, encoder: IndexEncoder) -> TokenCodes | None:
        """Return the token codes kept for an encoder; None if none are kept."""
        if self.manifest.engine in ELSEWHERE:  # readers of such an engine, on other machines, would not have the codes
            return None
        known, name = self._codes, encoder.facts.encoder_folder
        if name not in known:
            known[name] = TokenCodes.find(encoder.index_folder / encoder.facts.folder_of("tokens"))
        return known[name]

    def search(
        self,
        texts: Sequence[str],
        vectors: np.ndarray | None,
        k: int,
        filter: Filter | None,  # noqa: A002
        mode: SearchMode,
        fingerprint: str | None = None,
        *,
        unique: bool = False,
        matched: bool = True,
        paths: bool = True,
    ) -> list[list[Hit]]:
        """Search as `Index.search` does, for queries that are already encoded.

        The vectors are of shape (texts, n), or None for a search by words alone. `fingerprint` names the encoder that
        made them, by default the current one. `matched` and `paths` say whether to fill in these fields of the hits.

        Raises:
            ReindexedError: the index has another encoder now; encode the queries again.
        """
        check_mode(mode)
        check_k(k)
        fingerprint, found = fingerprint or self.for_queries.fingerprint, None
        while found is None:  # see the top of this module
            check_deadline()
            with suppress(MomentPassedError), self.reading() as reader:
                if vectors is not None and self.manifest.fingerprint != fingerprint:
                    raise ReindexedError(f"{self.path}: the index has another encoder now; encode the queries again")
                encoder, shares = self.for_queries, self.manifest
                codes = self._codes_of(encoder) if mode == "hybrid" and shares.tokens_share > 0 else None
                found = find_hits(
                    *(reader, self.derived, texts, vectors),
                    # A k above the number of documents would only use more memory.
                    min(int(k) if codes is None else max(int(k), TOKENS_FIRST), max(1, reader.moment().documents)),
                    *(mode, shares.words_share),
                    allowed=None if filter is None else reader.numbers_where(filter),
                    unique=unique,
                    matched=matched and codes is None,
                )
                if paths:
                    found = with_paths(reader, self.tree, found)
        if codes is None:
            return found
        hits = [row[:k] for row in codes.in_order(encoder, texts, found, shares.tokens_share)]
        if not matched:
            return hits
        with self.store.reading() as reader:
            return with_matched(reader, self.derived, texts, hits)
