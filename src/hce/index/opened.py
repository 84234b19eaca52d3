"""An index as one process has it open: the manifest in force, and all that belongs to it.

How a search copes with what other threads and other processes write meanwhile:

- A write is one transaction, and a reader of the store sees one moment, however long it is held.
- A reindexing puts another encoder in force. `Opened.reading` adopts the manifest that names it, and opens readers
  until one sees the vectors of that encoder.
- Query vectors of the earlier encoder are then useless: `Index.search_encoded` raises `ReindexedError`, and its
  callers (`Index.search`, the web server) encode the queries again.
- Engines and words are at one moment at a time. Where another thread has brought them to a later moment than a reader
  sees, using them raises `MomentPassedError`, and `Index.search_encoded` searches again with a new reader.
- A collection of Milvus has only its present moment: where documents are removed during a search,
  `ReplicaIndex.search_encoded` takes over what was written, and searches again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hce.contained import check_tree
from hce.errors import FormatError
from hce.index.carried_encoder import CarriedEncoder, check_same
from hce.index.cutting import Cutter
from hce.index.derived import Derived
from hce.index.manifest import MANIFEST_FILE, Manifest, file_stamp
from hce.index.numbered_tree import NumberedHierarchy, load_tree
from hce.index.store import Reader, Store
from hce.index.token_codes import IndexTokens, encode_keeping_tokens
from hce.search.engine import ELSEWHERE

if TYPE_CHECKING:
    from hce.encoding.encoder import Encoder


class Opened:
    """The manifest in force, and the encoders, derived parts, tree and tokens that belong to it.

    Attributes:
        path: the folder of the index.
        manifest: the manifest in force.
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
        self._stamp: tuple[int, int] | None = None  # of the manifest's file; None while it is not known to be in force
        self._tree: tuple[Manifest, NumberedHierarchy | None] | None = None  # and the manifest that it was read for

    def close(self) -> None:
        """Close the files."""
        self.derived.close()
        self.store.close()

    @contextmanager
    def reading(self) -> Iterator[Reader]:
        """Open a moment of the store that has the vectors of the encoder that the manifest names.

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

    def keep_up(self, reader: Reader) -> bool:
        """Adopt a manifest that another process wrote; return whether `reader` sees vectors of its encoder."""
        stamp = file_stamp(self.path / MANIFEST_FILE)
        if stamp != self._stamp:
            self.adopt(Manifest.read(self.path, reader), stamp)
        return reader.moment().change >= self.manifest.since

    def adopt(self, manifest: Manifest, stamp: tuple[int, int] | None = None) -> None:
        """Put another manifest of this index in force, and its encoder where that is another one."""
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
        """Return the encoder of queries that is in force now."""
        if self._stamp is None or file_stamp(self.path / MANIFEST_FILE) != self._stamp:
            with self.store.reading() as reader:
                self.keep_up(reader)
        return self.for_queries

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
