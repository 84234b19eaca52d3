"""IndexState: what one process has open of an index: the current manifest, and all that belongs to it.

A search and writes of other threads and processes:

- A write is one transaction. A reader of the store sees one moment, however long it is held.
- A reindexing switches to another encoder. `IndexState.reading` adopts the manifest that names it, and opens readers
  until one sees the vectors of that encoder.
- Query vectors of the earlier encoder are then useless: `IndexState.search` raises `ReindexedError`, and its callers
  (`Index.search`, the web server) encode the queries again.
- Engines and words are at one moment at a time. If another thread has brought them to a later moment than a reader
  sees, lending them raises `MomentPassedError`, and `IndexState.search` searches again with a new reader.
- A collection of Milvus has only its present moment. If documents are removed during a search, `ReplicaState.search`
  takes over what was written, and searches again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

import numpy as np

from hce.contained import check_tree
from hce.deadline import check_deadline
from hce.encoding.encoder import Encoder, OnTokens
from hce.encoding.tables import Side
from hce.errors import FormatError, InputError
from hce.index.connections import heed_forks
from hce.index.derived import Derived
from hce.index.filters import Filter
from hce.index.manifest import MANIFEST_FILE, Manifest, StandbyEncoder, file_stamp, file_stamps
from hce.index.numbered_tree import NumberedHierarchy, load_tree
from hce.index.ranking import Hit, SearchMode, SearchRequest, check_k, check_mode, find_hits, with_matched, with_paths
from hce.index.store import Entry, MomentPassedError, Reader, Store
from hce.index.token_codes import IndexTokens, encode_keeping_tokens
from hce.index.writing import Cutter
from hce.search.engine import ELSEWHERE
from hce.search.fusion import TOKENS_FIRST


class ReindexedError(InputError):
    """Queries were encoded by another encoder than the one that the index has now."""


class IndexState:
    """The current manifest, and the encoders, derived parts, tree and tokens that belong to it.

    Attributes:
        path: the folder of the index.
        manifest: the current one.
        store: the documents.
        derived: engine, engine of passages and words, all built from the store.
        for_queries: the encoder of queries.
        for_documents: the encoder of documents: with its own copy, adding thousands does not keep a search waiting.
        tokens: of documents and queries, which reorder the first hits.
    """

    def __init__(self, path: Path, encoder: Encoder | None = None) -> None:
        self.path = path
        self.manifest = Manifest.read(path)
        check_tree(path)  # before anything that opens files by their paths
        if encoder is not None:
            check_same(encoder, self.manifest, path)
        self.for_queries = CarriedEncoder(path, self.manifest, encoder)
        self.for_documents = self.for_queries if encoder else CarriedEncoder(path, self.manifest)
        self.store = Store(path, self.manifest.dim)
        self.derived = Derived(self.store, self.manifest)
        self.tokens = self._tokens_of(self.manifest)
        self._cutter: Cutter | None = None
        self._last_query: tuple[CarriedEncoder, str, np.ndarray] | None = None  # what encoded it, text and vector
        self._stamp: tuple[int, int] | None = None  # of the manifest's file; None while it may not be the current one
        self._tree: tuple[Manifest, NumberedHierarchy | None] | None = None  # and the manifest that it was read for

    def close(self) -> None:
        """Close the files."""
        self.derived.close()
        self.store.close()

    @contextmanager
    def reading(self) -> Iterator[Reader]:
        """Open one moment of the store, with vectors of the encoder that the manifest names.

        All that is read through it fits together, whatever is written meanwhile.

        Raises:
            FormatError: the store has no such vectors, since it is older than the manifest.
        """
        behind = None  # `since` of the manifest that the last reader was too early for
        while True:
            with self.store.reading() as reader:
                if self.keep_up(reader):
                    yield reader
                    return
                if behind == self.manifest.since:  # this reader was opened after that manifest had been read
                    raise FormatError(
                        f"{self.store.path} is older than {MANIFEST_FILE}: it has no vectors of the encoder that the "
                        "index got since; restore the whole folder from one copy"
                    )
                behind = self.manifest.since

    def entries(self, after: int = 0) -> Iterator[Entry]:
        """Iterate over the documents with numbers above `after`, with number and vector, in order of number.

        A number up to `manifest.documents` says that the document was there at creation, with this text.
        """
        with self.reading() as reader:
            yield from reader.entries(after)

    def keep_up(self, reader: Reader) -> bool:
        """Adopt a manifest that another process wrote; return whether `reader` sees vectors of its encoder."""
        stamp = file_stamp(self.path / MANIFEST_FILE)
        if stamp != self._stamp:
            self.adopt(Manifest.read(self.path, reader), stamp)
        return reader.moment().change >= self.manifest.since

    def adopt(self, manifest: Manifest, stamp: tuple[int, int] | None = None) -> None:
        """Switch to another manifest of this index, and to its encoder if that is another one."""
        if manifest.since < self.manifest.since:
            return  # of an earlier moment than another thread has seen
        if manifest.encoder_folder != self.manifest.encoder_folder:
            self.derived.take_up(manifest)
            self.for_queries, self.for_documents = (CarriedEncoder(self.path, manifest) for _ in range(2))
            self._cutter = None
        if manifest.engine_at != self.manifest.engine_at:
            self.derived = Derived(self.store, manifest)
        self.tokens = self._tokens_of(manifest)
        self.manifest = manifest  # last: whoever sees the new manifest sees what belongs to it
        self._stamp = None if manifest.switch else stamp

    def present_encoder(self) -> CarriedEncoder:
        """Return the encoder of queries, after a look at whether the index has another one by now."""
        if self._stamp is None or file_stamp(self.path / MANIFEST_FILE) != self._stamp:
            with self.store.reading() as reader:
                self.keep_up(reader)
        return self.for_queries

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Encode queries to unit vectors of shape (texts, n)."""
        encoder, tokens = self.present_encoder(), self.tokens
        codes = tokens.codes(encoder)  # none beside a static encoder
        vectors = encoder.encode(texts, "query", None if codes is None else tokens.asked(codes).keep)
        if len(texts) == 1:
            self._last_query = encoder, texts[0], vectors[0].copy()
        return vectors

    def encode_query(self, text: str) -> np.ndarray:
        """Return the vector of a query, of shape (n,); the last query is not encoded again by the same encoder."""
        last = self._last_query
        if last is not None and last[:2] == (self.present_encoder(), text):
            return last[2]
        return np.asarray(self.encode_queries([text])[0])

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
    ) -> list[list[Hit]]:
        """Search as `Index.search` does, for texts that are encoded already, to vectors of shape (texts, n).

        Args:
            texts: the queries.
            vectors: of the queries; None if words alone are looked for.
            k: see `Index.search`, as `filter` and `mode`.
            filter: see `Index.search`.
            mode: see `Index.search`.
            fingerprint: of the encoder that encoded the queries; by default, of the last one.
            unique: see `Index.search`.

        Raises:
            ReindexedError: the index has another encoder by now; encode the queries again.
        """
        check_mode(mode)
        check_k(k)
        fingerprint = fingerprint or self.for_queries.fingerprint
        while True:  # see the top of this module
            check_deadline()
            with suppress(MomentPassedError):
                return self._search_once(texts, vectors, k, filter, mode, fingerprint, unique)

    def _search_once(
        self,
        texts: Sequence[str],
        vectors: np.ndarray | None,
        k: int,
        conditions: Filter | None,
        mode: SearchMode,
        fingerprint: str,
        unique: bool,
    ) -> list[list[Hit]]:
        """Search at the present moment, and let tokens reorder the hits once that moment is let go: they take long."""
        with self.reading() as reader:
            if vectors is not None and self.manifest.fingerprint != fingerprint:
                raise ReindexedError(f"{self.path}: it has another encoder by now; encode the queries again")
            allowed = None if conditions is None else reader.numbers_where(conditions)
            most = max(1, reader.moment().documents)  # a larger k would only take more memory
            best, manifest = min(int(k), most), self.manifest
            request = SearchRequest(texts, vectors, best, allowed, mode, manifest.words_share, unique)
            encoder, tokens, tokens_share = self.for_queries, self.tokens, manifest.tokens_share
            reorder = mode == "hybrid" and vectors is not None and tokens_share > 0
            codes = tokens.codes(encoder) if reorder else None
            if codes is not None:
                request = request._replace(k=min(max(best, TOKENS_FIRST), most), tell_matched=False)
            hits = with_paths(reader, self.tree, find_hits(reader, self.derived, request))
        if codes is None:
            return hits
        hits = [row[:best] for row in tokens.in_order(encoder, codes, texts, hits, tokens_share)]
        with self.store.reading() as reader:
            return with_matched(reader, self.derived, texts, hits)

    def encode_documents(self, texts: list[str]) -> np.ndarray:
        """Encode documents to unit vectors of shape (texts, n), and keep their tokens where the index keeps tokens."""
        encoder = self.for_documents  # which another thread may replace
        return encode_keeping_tokens(encoder, self.tokens.codes(encoder), texts)

    @property
    def tree(self) -> NumberedHierarchy | None:
        """The tree of the documents at creation (or at the last rebuild) with their numbers, where there is one."""
        manifest, known = self.manifest, self._tree
        if known is None or known[0] != manifest:  # every search asks: a missing tree is not looked for each time
            known = self._tree = manifest, load_tree(self.path)
        return known[1]

    def cutter(self) -> Cutter:
        """Return the cutter of long documents."""
        if self._cutter is None:
            self._cutter = Cutter(self.for_documents.encoder())
        return self._cutter

    def _tokens_of(self, manifest: Manifest) -> IndexTokens:
        return IndexTokens(self.path, are_kept=manifest.engine not in ELSEWHERE)


# ------------------------------------------------------------------------------------------------- its encoder


class CarriedEncoder:
    """The encoder that an index carries: loaded when needed, checked, and used by one thread at a time.

    Tokenizers are not made for several threads.

    Args:
        index_folder: the folder of the index.
        described: the manifest that describes the encoder, or its standby entry.
        given: the encoder itself, if the caller has it.
    """

    def __init__(self, index_folder: Path, described: Manifest | StandbyEncoder, given: Encoder | None = None) -> None:
        self.index_folder = index_folder
        self._known = described
        self._encoder = given
        self._lock = Lock()
        heed_forks(self)

    def after_fork(self) -> None:
        """Forget the lock of the parent process, after a fork."""
        self._lock = Lock()

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the encoder, known without loading it."""
        return self._known.fingerprint

    @property
    def suffix(self) -> str:
        """What the names of the encoder's folders end in."""
        return self._known.suffix

    def encoder(self) -> Encoder:
        """Return the encoder, loaded if it was not.

        Raises:
            FormatError: the folder holds another encoder than the one that made the vectors.
        """
        with self._lock:
            return self._loaded()

    def encode(self, texts: Sequence[str], side: Side, on_tokens: OnTokens | None = None) -> np.ndarray:
        """Encode texts to unit vectors of shape (texts, n); `on_tokens` gets the tokens of a transformer."""
        with self._lock:
            return self._loaded().encode(texts, side, on_tokens=on_tokens)

    def _loaded(self) -> Encoder:
        if self._encoder is None:
            folder = self.index_folder / self._known.encoder_folder
            check_tree(folder, self.index_folder)
            encoder = Encoder.load(folder)
            # Hashing all weights takes longer than loading them; files that nobody touched need not be hashed.
            if file_stamps(folder) != self._known.encoder_files and encoder.fingerprint != self._known.fingerprint:
                raise FormatError(
                    f"{folder} is not the encoder that made this index's vectors ({self._known.encoder}); "
                    "put that one back or index again"
                )
            self._encoder = encoder
        return self._encoder


def check_same(encoder: Encoder, manifest: Manifest, index_folder: Path) -> None:
    """Refuse an encoder that did not make the vectors.

    Raises:
        InputError: `encoder` is another one.
    """
    fingerprint = encoder.fingerprint
    if fingerprint != manifest.fingerprint:
        raise InputError(
            f"{index_folder} holds vectors of the encoder {manifest.encoder} ({manifest.fingerprint[:12]}), not of "
            f"{encoder.name} ({fingerprint[:12]}); open it without naming an encoder, or index again with that one"
        )
