"""IndexState: what one process has open of an index, and its upkeep.

A search and writes of other threads and processes:

- A write is one transaction. A reader of the store sees one moment, however long it is held.
- A reindexing switches to another encoder. `IndexState.reading` adopts the manifest that names it, and opens readers
  until one sees the vectors of that encoder.
- Query vectors of the earlier encoder are then useless: `IndexState.search` raises `ReindexedError`, and its callers
  (`Index.search`, the web server) encode the queries again.
- Engines and words are at one moment at a time. If another thread has brought them to a later moment than a reader
  sees, lending them raises `MomentPassedError`, and `IndexState.search` searches again with a new reader.
- A collection of Milvus has only its present moment. If documents are removed during a search, `ReplicaState.search`
  copies what was written, and searches again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from threading import Lock

import numpy as np

from hce.contained import check_tree, delete_folder
from hce.encoding.encoder import Encoder, OnTokens
from hce.encoding.tables import Side
from hce.errors import FormatError, InputError
from hce.files import held_alone
from hce.index.derived import Derived, home_of
from hce.index.filters import Filter
from hce.index.manifest import (
    MANIFEST_FILE,
    SHOWN,
    IndexStatus,
    Manifest,
    StandbyEncoder,
    delete_other_folders,
    file_stamp,
    file_stamps,
    size_on_disk,
)
from hce.index.ranking import (
    Hit,
    SearchMode,
    SearchRequest,
    check_k,
    check_mode,
    find_hits,
    find_thresholds,
    with_matched,
    with_paths,
)
from hce.index.store import Entry, MomentPassedError, Reader, Store, Writer, heed_forks
from hce.index.token_codes import TokenCodes, encode_keeping_tokens, is_token_folder, read_all_tokens, token_folder
from hce.index.tree import NumberedHierarchy, load_tree, regrow_tree
from hce.index.writing import Cutter
from hce.progress import check_deadline
from hce.search.engine import ELSEWHERE, ENGINES, check_engine
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
        for_documents: a copy for documents, so that adding thousands does not keep a search waiting.
    """

    def __init__(self, path: Path, encoder: Encoder | None = None) -> None:
        self.path = path
        self.manifest = Manifest.read(path)
        check_tree(path)  # before anything that opens files by their paths
        if encoder is not None:
            check_same(encoder, self.manifest, path)
        self.for_queries = IndexEncoder(path, self.manifest, encoder)
        self.for_documents = self.for_queries if encoder else IndexEncoder(path, self.manifest)
        self.store = Store(path, self.manifest.dim)
        self.derived = Derived(self.store, self.manifest)
        self._codes: dict[str, TokenCodes | None] = {}  # by the suffix of the encoder's folders
        self._cutter: Cutter | None = None
        self._last_query: tuple[IndexEncoder, str, np.ndarray] | None = None  # what encoded it, text and vector
        self._stamp: tuple[int, int] | None = None  # of the manifest's file; None while it may not be the current one
        self._tree: tuple[Manifest, NumberedHierarchy | None] | None = None  # and the manifest that it was read for

    def close(self) -> None:
        """Close the files."""
        self.derived.close()
        self.store.close()

    @contextmanager
    def reading(self) -> Iterator[Reader]:
        """Open one moment of the store, with vectors of the manifest's encoder.

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
        """Iterate over the documents above `after`, in order of number."""
        with self.reading() as reader:
            yield from reader.entries(after)

    def keep_up(self, reader: Reader) -> bool:
        """Adopt another process's manifest; return whether `reader` sees its vectors."""
        stamp = file_stamp(self.path / MANIFEST_FILE)
        if stamp != self._stamp:
            self.adopt(Manifest.read(self.path, reader), stamp)
        return reader.moment().change >= self.manifest.since

    def adopt(self, manifest: Manifest, stamp: tuple[int, int] | None = None) -> None:
        """Switch to another manifest of this index, and to its encoder."""
        if manifest.since < self.manifest.since:
            return  # of an earlier moment than another thread has seen
        is_same_encoder = manifest.encoder_folder == self.manifest.encoder_folder
        is_same_place = manifest.engine_at == self.manifest.engine_at
        if not (is_same_encoder and is_same_place):
            self.derived = Derived(self.store, manifest, self.derived.mirror if is_same_place else None)
        if not is_same_encoder:
            self.for_queries, self.for_documents = (IndexEncoder(self.path, manifest) for _ in range(2))
            self._cutter = None
        self._codes = {}
        self.manifest = manifest  # last: whoever sees the new manifest sees what belongs to it
        self._stamp = None if manifest.switch else stamp

    def present_encoder(self) -> IndexEncoder:
        """Return the encoder of queries that the index has now."""
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
        """Return the vector of a query, of shape (n,); that of the last is remembered."""
        last = self._last_query
        if last is not None and last[:2] == (self.present_encoder(), text):
            return last[2]
        return np.asarray(self.encode_queries([text])[0])

    def encode_documents(self, texts: list[str]) -> np.ndarray:
        """Encode documents to unit vectors of shape (texts, n), and keep their tokens."""
        encoder = self.for_documents  # which another thread may replace
        return encode_keeping_tokens(encoder, self._codes_of(encoder), texts)

    def cutter(self) -> Cutter:
        """Return the cutter of long documents."""
        if self._cutter is None:
            self._cutter = Cutter(self.for_documents.encoder())
        return self._cutter

    @property
    def tree(self) -> NumberedHierarchy | None:
        """The tree of the documents at creation (or at the last rebuild) with their numbers, if there is one."""
        manifest, known = self.manifest, self._tree
        if known is None or known[0] != manifest:  # every search asks: a missing tree is not looked for each time
            known = self._tree = manifest, load_tree(self.path)
        return known[1]

    def _codes_of(self, encoder: IndexEncoder) -> TokenCodes | None:
        """Return the tokens of the texts that an encoder has read; None if none are kept."""
        if self.manifest.engine in ELSEWHERE:  # whose readers would not have them
            return None
        known = self._codes
        if encoder.suffix not in known:
            known[encoder.suffix] = TokenCodes.find(token_folder(self.path, encoder.suffix))
        return known[encoder.suffix]

    # ------------------------------------------------------------------------------------------------- search

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
    ) -> list[list[Hit]]:
        """Search as `Index.search` does, for queries that are encoded already.

        Args:
            texts: the queries.
            vectors: of the queries, of shape (texts, n); None if words alone are looked for.
            k: see `Index.search`, as `filter`, `mode` and `unique`.
            filter: see `Index.search`.
            mode: see `Index.search`.
            fingerprint: of the encoder that encoded the queries; by default, of the last one.
            unique: see `Index.search`.
            matched: whether to fill in `Hit.matched`.

        Raises:
            ReindexedError: the index has another encoder by now; encode the queries again.
        """
        check_mode(mode)
        check_k(k)
        request = SearchRequest(texts, vectors, int(k), None, mode, 0.0, unique, matched)
        fingerprint = fingerprint or self.for_queries.fingerprint
        while True:  # see the top of this module
            check_deadline()
            with suppress(MomentPassedError):
                return self._search_once(request, filter, fingerprint)

    def _search_once(self, request: SearchRequest, conditions: Filter | None, fingerprint: str) -> list[list[Hit]]:
        """Search at one moment; then let tokens, which take long, reorder the hits."""
        matched = request.with_matched
        with self.reading() as reader:
            if request.vectors is not None and self.manifest.fingerprint != fingerprint:
                raise ReindexedError(f"{self.path}: it has another encoder by now; encode the queries again")
            encoder, shares = self.for_queries, self.manifest
            most = max(1, reader.moment().documents)  # a larger k would only take more memory
            k = min(request.k, most)
            codes = None
            if request.mode == "hybrid" and request.vectors is not None and shares.tokens_share > 0:
                codes = self._codes_of(encoder)
            request = request._replace(
                k=k if codes is None else min(max(k, TOKENS_FIRST), most),
                allowed=None if conditions is None else reader.numbers_where(conditions),
                words_share=shares.words_share,
                with_matched=matched and codes is None,
            )
            hits = with_paths(reader, self.tree, find_hits(reader, self.derived, request))
        if codes is None:
            return hits
        hits = [row[:k] for row in codes.in_order(encoder, request.queries, hits, shares.tokens_share)]
        if not matched:
            return hits
        with self.store.reading() as reader:
            return with_matched(reader, self.derived, request.queries, hits)


# ------------------------------------------------------------------------------------------------- its encoder


class IndexEncoder:
    """The encoder in an index's folder: loaded when needed, checked, and used by one thread at a time.

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
        """Replace the lock of the parent process after a fork."""
        self._lock = Lock()

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the encoder, known without loading it."""
        return self._known.fingerprint

    @property
    def suffix(self) -> str:
        """The end of the names of the encoder's folders."""
        return self._known.suffix

    def encoder(self) -> Encoder:
        """Return the encoder, loaded if it was not.

        Raises:
            FormatError: the folder holds another encoder than the one that made the vectors.
        """
        with self._lock:
            return self._loaded()

    def encode(self, texts: Sequence[str], side: Side, on_tokens: OnTokens | None = None) -> np.ndarray:
        """Encode texts to unit vectors of shape (texts, n); `on_tokens` gets tokens."""
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
    """Refuse an encoder that did not make the vectors."""
    fingerprint = encoder.fingerprint
    if fingerprint != manifest.fingerprint:
        raise InputError(
            f"{index_folder} holds vectors of the encoder {manifest.encoder} ({manifest.fingerprint[:12]}), not of "
            f"{encoder.name} ({fingerprint[:12]}); open it without naming an encoder, or index again with that one"
        )


# ------------------------------------------------------------------------------------------------- upkeep


def status_of(state: IndexState) -> IndexStatus:
    """Return counts, sizes and names; loads neither encoder nor engine."""
    with state.reading() as reader:
        manifest, tree, other = state.manifest, state.tree, state.manifest.other()
        moment, removed = reader.moment(), reader.removed_up_to(manifest.documents)
        pending, facts = state.derived.engine_part.pending(reader), state.derived.engine_part.facts(reader)
    return IndexStatus(
        path=str(state.path),
        documents=moment.documents,
        added=moment.documents - (manifest.documents - removed),
        removed=removed,
        changed=moment.at,
        engine=state.derived.engine_name,
        pending=pending,
        tree_levels=tree.hierarchy.depth if tree else 0,
        bytes=size_on_disk(state.path),
        reindexing=other.encoder if other and not other.was_in_force else None,
        earlier=other.encoder if other and other.was_in_force else None,
        tokens=manifest.engine not in ELSEWHERE and is_token_folder(token_folder(state.path, manifest.suffix)),
        recall=facts.get("recall"),
        rescored=facts.get("rescored"),
        search=manifest.search,
        curves=manifest.curves,
        **{name: getattr(manifest, name) for name in SHOWN},
    )


def build_parts(state: IndexState) -> None:
    """Build engines and words of the documents, and write snapshots of them.

    Raises:
        WriterBusyError: someone else is writing.
    """
    with state.store.writing() as writer:  # nothing is written to it; it keeps others from writing
        state.keep_up(writer)
        derived = state.derived
        derived.rebuild(writer, replace(state.manifest, engine=derived.engine_name))
        _find_thresholds(state, writer)


def rebuild(
    state: IndexState,
    engine: str | None,
    at: str | None,
    *,
    refit: bool,
    tokens: bool | None,
    progress: bool,
) -> None:
    """Rebuild all that is derived from the documents; see `Index.rebuild`."""
    path, before = state.path, state.manifest
    named, at = at is not None, at or (before.engine_at if engine in (None, before.engine) else None)
    check_engine(engine or state.derived.engine_name, at)
    if at is not None:
        home_of(engine or before.engine).claim_place(at, path, named_by_user=named)
    if refit:
        _refit_table(state, progress)
    _give_up_earlier(state)
    state.store.compact()
    with state.store.writing() as writer:  # no document is written; it keeps others from writing
        known = Manifest.settled(path, writer)  # which another process may have changed
        state.adopt(known)
        delete_other_folders(path, known)
        grown = known.hierarchy and regrow_tree(path, known.hierarchy, writer, progress=progress)
        engine = engine or (known.engine if known.engine in (*ENGINES, *ELSEWHERE) else state.derived.engine_name)
        manifest = replace(known, engine=engine, engine_at=at, hierarchy=grown)
        _rebuild_tokens(state, writer, tokens and engine not in ELSEWHERE, progress)
        manifest.write(path)  # by which others notice what has changed
        state.adopt(manifest)
        state.derived.rebuild(writer, manifest)
        _find_thresholds(state, writer)
        writer.forget(manifest.documents)
        delete_other_folders(path, manifest)
    if before.engine_at is not None and before.engine_at != at:
        home_of(before.engine).withdraw(before.engine_at, path)


def _refit_table(state: IndexState, progress: bool) -> None:
    """Fit the table again, unless a reindexing to another encoder was begun."""
    from hce.index.create import reindex  # which needs torch

    known = Manifest.read(state.path)
    other = known.other()
    if other is not None and other.spec not in ("", "static"):
        return
    given = known.words_share if known.shares is None else None
    manifest = reindex(state.store, "static", given, progress=progress)
    if manifest is not None:
        state.adopt(manifest)


def _give_up_earlier(state: IndexState) -> None:
    """Drop the vectors of the encoder that the last reindexing replaced."""
    path = state.path
    other = Manifest.read(path).other()
    if other is None or not other.was_in_force:
        return
    refusal = f"{path}: another process is reindexing it; wait until it is done"
    with held_alone(path, refusal), state.store.writing() as writer:
        known = Manifest.settled(path, writer)
        other = known.other()
        if other is not None and other.was_in_force:
            replace(known, beside=None).write(path)
            writer.drop_beside()


def _rebuild_tokens(state: IndexState, writer: Writer, wanted: bool | None, progress: bool) -> None:
    """Keep or drop tokens, if asked for; else drop those of texts that are gone."""
    folder = token_folder(state.path, state.manifest.suffix)
    if wanted is None:
        if (codes := TokenCodes.find(folder)) is not None:
            codes.keep_only(writer)
        return
    delete_folder(folder, state.path)
    if wanted:
        read_all_tokens(folder, state.for_documents.encoder(), writer, progress=progress)


def _find_thresholds(state: IndexState, writer: Writer) -> None:
    """Find the thresholds of a good match, and write them into the manifest."""
    known = Manifest.settled(state.path, writer)
    found = None
    if state.derived.mirror is None:
        encode = partial(state.for_queries.encode, side="query")
        found = find_thresholds(writer, state.derived, encode, known.fingerprint, known.words_share)
    calibration = None if found is None else asdict(found)
    if calibration != known.calibration:
        manifest = replace(known, calibration=calibration)
        manifest.write(state.path)
        state.adopt(manifest)
