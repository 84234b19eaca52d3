"""Index: documents that come and go, found by words and by meaning.

It holds an encoder, a store of the documents, and what is derived from the store: an engine of vectors, an index of
words. Adding and removing documents needs no training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, overload

import numpy as np

from hce.data.corpus import Corpus
from hce.data.documents import Document
from hce.deadline import check_deadline
from hce.errors import InputError
from hce.files import checked_fields, delete_whole, held_alone
from hce.index.arguments import check_id, check_k, check_mode, checked_ids, checked_queries, checked_vectors
from hce.index.confidence import Calibration, calibrate, closeness
from hce.index.derived import Derived
from hce.index.encoder import CarriedEncoder, check_same
from hce.index.filters import Filter
from hce.index.hierarchy import NumberedHierarchy, load_tree, regrow_tree
from hce.index.manifest import (
    FORMAT,
    MANIFEST_FILE,
    SHOWN,
    IndexStatus,
    Manifest,
    delete_other_folders,
    file_stamp,
    size_on_disk,
)
from hce.index.mirror import check_place, withdraw
from hce.index.passages import Cutter
from hce.index.ranking import (
    RERANKED,
    Hit,
    SearchMode,
    SearchRequest,
    find_hits,
    reranked,
    reranked_first,
    with_matched,
)
from hce.index.store import Entry, FacetCount, Reader, Store, Writer
from hce.index.tokens import (
    AskedTokens,
    TokenCodes,
    encode_keeping_tokens,
    is_token_folder,
    read_all_tokens,
    token_folder,
)
from hce.index.writing import (
    checked,
    chunks_of,
    cut_documents,
    insert_documents,
    without_unchanged,
)
from hce.progress import Advance, progress_bar
from hce.search.engine import ELSEWHERE, ENGINES, check_engine
from hce.search.fusion import TOKENS_FIRST
from hce.search.milvus import is_address

# With torch, or with what comes along with it: an index that is only searched needs none of them.
if TYPE_CHECKING:
    from hce.encoding.encoder import Encoder
    from hce.encoding.reranker import Reranker
    from hce.index.create import HierarchyChoice
    from hce.index.drift import Drift


MOST_ASKED = 4096  # queries whose tokens are remembered between their encoding and their search


class ReindexedError(InputError):
    """Queries were encoded by another encoder than the one that the index has by now."""


class Index:
    """A folder of documents with their vectors; opened by any number of processes, written by one at a time.

    It can be used from several threads. Nothing is loaded before it is needed: only a search by text or an addition
    loads the encoder, only a search loads the engine.

    Attributes:
        path: the folder.
        manifest: the manifest in force.
        derived: engine, engine of passages and words, all built from the store.
        is_replica: whether the index is read from a collection of Milvus, and refuses writes.
    """

    is_replica: ClassVar[bool] = False

    def __init__(self, path: str | Path, encoder: Encoder | None = None) -> None:
        self.path = Path(path)
        self.manifest = Manifest.read(self.path)
        if encoder is not None:
            check_same(encoder, self.manifest, self.path)
        self._for_queries = CarriedEncoder(self.path, self.manifest, encoder)
        # With its own copy, adding thousands of documents does not keep a search waiting.
        self._for_documents = self._for_queries if encoder else CarriedEncoder(self.path, self.manifest)
        self._store = Store(self.path, self.manifest.dim)
        self.derived = Derived(self._store, self.manifest)
        self._cutter: Cutter | None = None
        self._stamp: tuple[int, int] | None = None  # of the manifest's file; None while it is not known to be in force
        self._tree: NumberedHierarchy | None = None
        self._last_reranker: Reranker | None = None
        self._codes: dict[Path, TokenCodes | None] = {}  # by folder, None where there are none
        self._asked: AskedTokens | None = None  # tokens of the last queries
        self._last_query: tuple[CarriedEncoder, str, np.ndarray] | None = None  # what encoded it, text and vector

    @classmethod
    def create(
        cls,
        path: str | Path,
        corpus: Corpus | Iterable[Document],
        encoder: Encoder | str | Path,
        hierarchy: HierarchyChoice = None,
        *,
        engine: str = "auto",
        at: str | None = None,
        dtype: str = "float32",
        language: str = "english",
        words_share: float | None = None,
        tokens: bool = True,
        progress: bool = False,
    ) -> Index:
        """Make an index in a new folder, and open it.

        Stopped half-way, it leaves only the vectors encoded so far, in `PATH.unfinished`; the same call goes on there.
        Stopped when only the engine was missing, it leaves the whole index, and the first search builds the engine.

        >>> shoes, hats = Document("a", "red shoes"), Document("b", "blue hats", metadata={"year": 2024})
        >>> with Index.create("my-index", [shoes], "static") as index:
        ...     _ = index.add([hats])
        ...     [hit.id for hit in index.search("blue hats")], [hit.id for hit in index.search("red shoes", k=1)]
        (['b', 'a'], ['a'])

        Args:
            path: the new folder.
            corpus: its first documents.
            encoder: what encodes documents and queries; a copy of it is kept in the folder. By name, "static" is
                fitted to the corpus first, and a model that `hce train` wrote brings its tree along if that is of
                this corpus.
            hierarchy: the tree of these documents, in their order; "grow" grows one where the model has none.
            engine: "auto" (flat while that is fast), or one of `hce.search.engine.ENGINES`; "milvus" for one that
                lives elsewhere.
            at: the address of Milvus: `http://HOST:PORT`, or the path of a file that ends in `.db`; behind `#` may
                stand the name of the collection.
            dtype: what the engine keeps vectors in: float32, float16 or int8. The store keeps float32.
            language: of the texts, whose endings are cut off words; "none" matches words as they are written.
            words_share: how much words count in a hybrid search, from 0 to 1; by default what labelled
                queries told in training, else half beside a static encoder and a quarter beside a transformer.
            tokens: keep the tokens of texts, where the encoder is a transformer, and let them put the first hits of a
                hybrid search into a better order: about 50 bytes a token. Not with an engine that lives elsewhere.
            progress: show bars.

        Raises:
            InputError: the folder is there already, or an argument is not what it has to be.
        """
        from hce.index.create import create_index

        check_engine(engine, at, dtype, "auto")
        create_index(
            *(path, corpus, encoder, hierarchy),
            engine=engine,
            at=at,
            dtype=dtype,
            language=language,
            words_share=words_share,
            tokens=tokens,
            progress=progress,
        )
        index = cls(path)
        try:
            index.build_engine()
        except BaseException:
            index.close()
            raise
        return index

    @classmethod
    def open(cls, path: str | Path, encoder: Encoder | None = None) -> Index:
        """Open an index.

        Args:
            path: the folder of an index; or the address of the collection of Milvus that an index writes to, which is
                then only read (docs/operating.md).
            encoder: the encoder that made its vectors, to spare loading the index's own copy.

        Raises:
            FormatError: there is none, it is damaged, or a newer version wrote it.
            InputError: `encoder` is another one.
        """
        if is_address(path):
            from hce.index.replica import ReplicaIndex

            return ReplicaIndex(path, encoder)
        return cls(path, encoder)

    def close(self) -> None:
        """Let go of the files."""
        self.derived.close()
        self._store.close()

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        engine = self.derived.engine_name
        return f"Index({str(self.path)!r}, {len(self):,} documents, {self.manifest.encoder}, {engine})"

    # ------------------------------------------------------------------------------------------------- documents

    def add(self, *batches: Iterable[Document], progress: bool = False) -> int:
        """Add documents, all or none; when it returns, they survive a crash. Only texts that are new are encoded.

        Args:
            batches: a corpus or any documents; several are added together.
            progress: show a bar.

        Returns:
            How many were added.

        Raises:
            InputError: an id is there already, a document is not sound, or (`WriterBusyError`) someone else is writing.
        """
        sound = [checked(batch) for batch in batches]
        with self._writing(sound, progress) as (writer, advance):
            for chunk in chunks_of(sound):
                known = writer.present(document.id for document in chunk)
                if known:
                    raise InputError(
                        f"{self.path}: id {next(iter(known))!r} is there already; update replaces documents, "
                        "or leave it out"
                    )
            insert_documents(writer, chunks_of(sound), self._encode_documents, self._document_cutter(), advance)
        self.derived.follow()
        return sum(map(len, sound))

    def update(self, *batches: Iterable[Document], progress: bool = False) -> int:
        """Add documents, all or none, in place of those that have their ids; a text that is the same keeps its vector.

        Returns:
            How many were written.

        Raises:
            InputError: a document is not sound or empty, or (`WriterBusyError`) someone else is writing.
        """
        sound = [checked(batch) for batch in batches]
        for batch in sound:
            if isinstance(batch, Corpus) and batch.left_out:
                raise InputError(
                    f"document {min(batch.left_out)!r} has neither text nor title; to take it out, remove it"
                )
        with self._writing(sound, progress) as (writer, advance):
            chunks = without_unchanged(writer, chunks_of(sound), advance, keep=self.derived.mirror is None)
            insert_documents(writer, chunks, self._encode_documents, self._document_cutter(), advance)
        self.derived.follow()
        return sum(map(len, sound))

    def remove(self, ids: Iterable[str]) -> int:
        """Take documents out, all or none; when it returns, they stay out after a crash.

        Returns:
            How many were removed.

        Raises:
            InputError: an id is not there, or (`WriterBusyError`) someone else is writing.
        """
        distinct = checked_ids(ids)
        with self._store.writing() as writer:
            self._keeps_up(writer)
            known = writer.present(distinct)
            missing = [doc_id for doc_id in distinct if doc_id not in known]
            if missing:
                more = f" ({len(missing):,} of {len(distinct):,} ids are not)" if len(distinct) > 1 else ""
                raise InputError(f"{self.path}: no document {missing[0]!r} is there{more}; nothing was removed")
            writer.delete([number for number, _ in known.values()])
        self.derived.follow()
        return len(distinct)

    def get(self, doc_id: str) -> Document | None:
        """Return the document of an id, or None."""
        check_id(doc_id)
        with self._store.reading() as reader:
            return reader.find(doc_id)

    def __contains__(self, doc_id: object) -> bool:
        return isinstance(doc_id, str) and self.get(doc_id) is not None

    def __len__(self) -> int:
        with self._store.reading() as reader:
            return reader.moment().documents

    def __iter__(self) -> Iterator[Document]:
        """Iterate over all documents, in the order in which they came, as they were when the iteration began."""
        return (entry.document for entry in self.entries())

    def entries(self, after: int = 0) -> Iterator[Entry]:
        """Iterate over all documents with number and vector, in order of number; those above `after` only.

        A number up to `manifest.documents` says that the document was there at creation, with this text.
        """
        with self.reading() as reader:
            yield from reader.entries(after)

    def vectors(self, after: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of all documents, rising, of shape (N,), and their vectors of shape (N, n), float32."""
        with self.reading() as reader:
            return reader.vectors(after)

    @contextmanager
    def reading(self) -> Iterator[Reader]:
        """Open one moment of the store, whatever is written meanwhile: all that is read through it fits together.

        The index then goes by the manifest of that moment or of a later one with the same encoder.
        """
        while True:
            with self._store.reading() as reader:
                if self._keeps_up(reader):
                    yield reader
                    return

    def writing(self) -> AbstractContextManager[Writer]:
        """Keep others from writing; all that is written meanwhile is committed at the end, or none of it.

        Raises:
            WriterBusyError: someone else is writing.
        """
        return self._store.writing()

    # ------------------------------------------------------------------------------------------------- search

    @overload
    def search(  # type: ignore[overload-overlap]
        self,
        queries: str,
        k: int = 10,
        filter: Filter | None = None,
        mode: SearchMode = "hybrid",
        *,
        unique: bool = False,
        rerank: Reranker | str | Path | None = None,
        depth: int = RERANKED,
    ) -> list[Hit]: ...
    @overload
    def search(
        self,
        queries: Sequence[str],
        k: int = 10,
        filter: Filter | None = None,
        mode: SearchMode = "hybrid",
        *,
        unique: bool = False,
        rerank: Reranker | str | Path | None = None,
        depth: int = RERANKED,
    ) -> list[list[Hit]]: ...
    def search(
        self,
        queries: str | Sequence[str],
        k: int = 10,
        filter: Filter | None = None,  # noqa: A002
        mode: SearchMode = "hybrid",
        *,
        unique: bool = False,
        rerank: Reranker | str | Path | None = None,
        depth: int = RERANKED,
    ) -> list[Hit] | list[list[Hit]]:
        """Find the k best documents for a text, best first, or for each of several texts.

        >>> index = Index.create("shop", [Document(str(year), f"shoes {year}", metadata={"year": year}) for year in
        ...     (2022, 2023, 2024)], "static")
        >>> sorted(hit.id for hit in index.search("shoes", filter={"year": {"gte": 2023}}))
        ['2023', '2024']
        >>> len(index.search(["shoes", "shoes of 2022"], k=1))
        2
        >>> index.search("shoe of 2022", k=1)[0].matched
        ('shoe', '2022')

        Args:
            queries: a text or a list of texts.
            k: how many; all where there are fewer (by words alone, those that share a word).
            filter: conditions on metadata, see `hce.index.filters`; k documents are found if so many fulfil them.
            mode: "hybrid", by words and meaning, the first hits in the order of a transformer's tokens where the index
                has these; "dense", by meaning alone; "words", by BM25 alone.
            unique: leave out what is near-equal to a better hit, which then names it (`Hit.folded`); see
                `hce.index.ranking.fold_near_equal`. k documents are found if there are so many different ones.
            rerank: a cross-encoder, or the directory or hub id of one, that puts the first hits into another order.
            depth: how many of the first hits the cross-encoder reads; k, where that is more.

        Raises:
            InputError: k is not a whole number from 1 on, a query is not a text, the filter is not a valid one, or
                there is no such mode or cross-encoder.
        """
        texts = checked_queries(queries)
        check_k(k)
        check_k(depth, "depth")
        reranker = None if rerank is None else self._reranker(rerank)
        wanted = k if reranker is None else max(k, depth)
        while True:
            fingerprint = self.fingerprint
            vectors = None if mode == "words" else self.encode_queries(texts)
            try:
                hits = self.search_encoded(texts, vectors, wanted, filter, mode, fingerprint, unique=unique)
            except ReindexedError:
                continue
            if reranker is not None:
                hits = [reranked(reranker, text, row)[:k] for text, row in zip(texts, hits, strict=True)]
            return hits[0] if isinstance(queries, str) else hits

    def _reranker(self, rerank: Reranker | str | Path) -> Reranker:
        """Return a cross-encoder; one that was named is kept for the next search."""
        from hce.encoding.reranker import Reranker

        if isinstance(rerank, Reranker):
            return rerank
        if self._last_reranker is None or self._last_reranker.name != str(rerank):
            self._last_reranker = Reranker.load(rerank)
        return self._last_reranker

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the encoder that the index has now; a reindexing changes it."""
        return self._present_encoder().manifest.fingerprint

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Encode queries to unit vectors of shape (texts, n)."""
        encoder = self._present_encoder()
        codes = self._token_codes(encoder)
        vectors = encoder.encode(texts, "query", None if codes is None else self._asked_tokens(codes).keep)
        if len(texts) == 1:
            self._last_query = encoder, texts[0], vectors[0].copy()
        return vectors

    def _encode_query(self, text: str) -> np.ndarray:
        """Return the vector of a query, of shape (n,); the last one, by the same encoder, is not encoded again."""
        last = self._last_query
        if last is not None and last[:2] == (self._present_encoder(), text):
            return last[2]
        return np.asarray(self.encode_queries([text])[0])

    def search_vectors(
        self,
        vectors: np.ndarray,
        k: int = 10,
        filter: Filter | None = None,  # noqa: A002
    ) -> list[list[Hit]]:
        """Search by meaning alone, for queries that are encoded already: unit rows of shape (Q, n), float32.

        Raises:
            InputError: the vectors are not of that shape or hold NaN, or k or the filter is not a valid one.
        """
        rows = checked_vectors(vectors, self.manifest.dim)
        return self.search_encoded([""] * len(rows), rows, k, filter, "dense")

    def search_encoded(
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
        """Search as `search` does, for texts whose vectors are there already, of shape (texts, n); words need none.

        Args:
            texts: the queries.
            vectors: of the queries.
            k: see `search`, as `filter` and `mode`.
            filter: see `search`.
            mode: see `search`.
            fingerprint: what `fingerprint` was before the queries were encoded; by default, what it last was.
            unique: see `search`.

        Raises:
            ReindexedError: the index has another encoder by now; encode the queries again.
        """
        check_mode(mode)
        check_k(k)
        fingerprint = fingerprint or self._for_queries.manifest.fingerprint
        while True:
            check_deadline()
            with self.reading() as reader:
                if vectors is not None and self.manifest.fingerprint != fingerprint:
                    raise ReindexedError(f"{self.path}: it has another encoder by now; encode the queries again")
                allowed = None if filter is None else reader.numbers_where(filter)
                most = max(1, reader.moment().documents)  # who asks for more is not given room for more
                k_or_all = min(int(k), most)
                encoder = self._for_queries
                codes = self._token_codes(encoder) if mode == "hybrid" and vectors is not None else None
                wanted = k_or_all if codes is None else min(max(k_or_all, TOKENS_FIRST), most)
                share, tell_matched = self.manifest.words_share, codes is None
                request = SearchRequest(texts, vectors, wanted, allowed, mode, share, unique, tell_matched)
                hits = find_hits(reader, self.derived, request)
            if hits is not None:
                return hits if codes is None else self._by_tokens(encoder, codes, texts, hits, k_or_all)
            # Else another thread has brought a part to a later moment than this reader sees: look again.

    def good_match(
        self,
        query: str,
        hits: Sequence[Hit],
        filter: Filter | None = None,  # noqa: A002
        mode: SearchMode = "hybrid",
        *,
        vector: np.ndarray | None = None,
    ) -> bool | None:
        """Tell whether the first of the hits that a search gave is a good match; False: nothing in the index is one.

        That is judged by its cosine and by the words of the query that it has, see `hce.index.confidence`; where tokens
        have put another hit first, by the one that would be first without them.

        Args:
            query: the text that was searched for.
            hits: what `search` returned.
            filter: the filter that `search` was given.
            mode: the mode that `search` was given.
            vector: the query's vector, of shape (n,), where there is one; that of the last search need not be given.

        Returns:
            None where that is not known: nothing was found; words alone, or a part of the documents, were searched; the
            index has few documents or an engine that lives elsewhere; or it was made by an earlier version, or has got
            another encoder since, which `rebuild` makes up for.
        """
        known = self.manifest.calibration
        if known is None or not hits or filter is not None or mode == "words":
            return None
        calibration = checked_fields(Calibration, known)
        if calibration.fingerprint != self.manifest.fingerprint:
            return None
        vector = self._encode_query(query) if vector is None else vector
        first = hits[0]
        if any(hit.from_tokens for hit in hits):  # of which the calibration knows nothing
            first = max(hits, key=lambda hit: hit.from_meaning + hit.from_words)
        with self.reading() as reader:
            if calibration.fingerprint != self.manifest.fingerprint or not reader.documents([first.number]):
                return None  # it has another encoder by now, or the document is gone
            measured = closeness(reader, self.derived, query, vector, first)
        return None if measured is None else calibration.is_good(measured)

    def facets(
        self,
        fields: Sequence[str],
        filter: Filter | None = None,  # noqa: A002
        most: int = 10,
    ) -> dict[str, list[FacetCount]]:
        """Count documents by their values of some metadata fields, the most frequent values of each first.

        What is counted are all documents that fulfil the filter, whatever is searched for: by meaning every document
        is found, sooner or later. Of a list each element counts; documents without the field do not.

        >>> documents = [Document(str(n), "shoes", metadata={"year": n // 10 * 10}) for n in (2009, 2012, 2015)]
        >>> Index.create("years", documents, "static").facets(["year"])
        {'year': [FacetCount(value=2010, documents=2), FacetCount(value=2000, documents=1)]}

        Args:
            fields: of the metadata; `meta.year` is a field within a field.
            filter: as `search` takes it.
            most: how many values of each field.

        Raises:
            InputError: no document has such a field, or the filter or `most` is not a valid one.
        """
        check_k(most, "most")
        if isinstance(fields, str):
            raise InputError("facets takes a list of fields; put the single one into a list")
        with self.reading() as reader:
            return {field: reader.facet(field, filter, most) for field in fields}

    def prepare(self) -> None:
        """Load now what the first search would load: encoder, engine and words."""
        self._present_encoder().text_encoder()
        with self.reading() as reader:
            self.derived.load(reader)

    def build_engine(self) -> None:
        """Build engines and words of the documents there are, and keep snapshots, so that who opens the index need not.

        Raises:
            WriterBusyError: someone else is writing.
        """
        with self._store.writing() as writer:  # nothing is written to it; it keeps others from writing
            self._keeps_up(writer)
            self.derived.rebuild(writer, replace(self.manifest, engine=self.derived.engine_name))
            self._calibrate(writer)

    @property
    def encoder(self) -> Encoder:
        """The encoder, loaded if it was not; do not train it."""
        return self._present_encoder().full_encoder()

    # ------------------------------------------------------------------------------------------------- the whole

    @property
    def tree(self) -> NumberedHierarchy | None:
        """The tree of the documents at creation (or at the last rebuild) with their numbers, where there is one."""
        if self._tree is None:
            self._tree = load_tree(self.path)
        return self._tree

    def status(self) -> IndexStatus:
        """Return counts, sizes and names; loads neither encoder nor engine."""
        with self.reading() as reader:
            manifest, tree, other = self.manifest, self.tree, self.manifest.other()
            moment, removed = reader.moment(), reader.removed_up_to(manifest.documents)
            pending = self.derived.engine.pending(reader)
        return IndexStatus(
            path=str(self.path),
            documents=moment.documents,
            added=moment.documents - (manifest.documents - removed),
            removed=removed,
            changed=moment.at,
            engine=self.derived.engine_name,
            pending=pending,
            tree_levels=tree.hierarchy.depth if tree else 0,
            bytes=size_on_disk(self.path),
            reindexing=other.encoder if other and not other.was_in_force else None,
            earlier=other.encoder if other and other.was_in_force else None,
            tokens=manifest.engine not in ELSEWHERE and is_token_folder(token_folder(self.path, manifest.suffix)),
            **{name: getattr(manifest, name) for name in SHOWN},
        )

    def drift(self, seed: int = 0) -> Drift:
        """Tell whether it is time to retrain: documents that came later beside the first ones; see `hce.index.drift`.

        Takes seconds, and all vectors in memory; loads the encoder.
        """
        from hce.index.drift import drift_of

        with self.reading() as reader, progress_bar("comparing later documents with earlier ones", None, "documents"):
            return drift_of(reader, self.manifest, self.tree, self._for_documents, seed)

    def rebuild(
        self,
        engine: str | None = None,
        dtype: str | None = None,
        *,
        at: str | None = None,
        refit: bool = True,
        tokens: bool | None = None,
        progress: bool = False,
    ) -> None:
        """Make all that is derived anew from the documents there are now: the tree, if there is one, and the engine.

        Also gives the space of removed documents back, and forgets what only earlier snapshots need. The documents stay
        as they are. So does the encoder, unless it is a table that was fitted to less than a quarter of the documents
        there are now: it is fitted to all of them, and all are encoded anew, as by `reindex`. Of an index of format 1,
        whose long documents were read from the beginning only, these are read in passages now. The encoder that was in
        force before the last `reindex` is given up, with its vectors.

        Args:
            engine: another engine from now on.
            dtype: what the engine keeps vectors in from now on.
            at: the address of Milvus, for the engine "milvus"; see `create`.
            refit: whether a table may be fitted anew. An encoder that was trained, or given, never is.
            tokens: whether tokens are kept from now on, see `create`; for this all documents are read anew. By default,
                as it was.
            progress: show bars.

        Raises:
            InputError: no such engine or dtype, or (`WriterBusyError`) someone else is writing.
        """
        before = self.manifest
        at = at or (before.engine_at if engine in (None, before.engine) else None)
        check_engine(engine or self.derived.engine_name, at, dtype or before.dtype)
        if at is not None:
            check_place(at, self.path)
        window = self._read_in_passages()
        other = Manifest.read(self.path).other()
        is_to_have_another = other is not None and other.spec not in ("", "static")
        if refit and not is_to_have_another and self.status().has_outgrown_its_table:
            self.reindex("static", progress=progress)
        self._give_up_earlier()
        self._store.compact()
        with self._store.writing() as writer:  # no document is written; it keeps others from writing
            writer.add_checksums()
            known = Manifest.settled(self.path, writer)  # which another process may have changed
            self._adopt(known)
            delete_other_folders(self.path, known)
            grown = known.hierarchy and regrow_tree(self.path, known.hierarchy, writer, progress=progress)
            engine = engine or (known.engine if known.engine in (*ENGINES, *ELSEWHERE) else self.derived.engine_name)
            manifest = replace(known, engine=engine, engine_at=at, dtype=dtype or known.dtype, hierarchy=grown)
            manifest = replace(manifest, window=window, format=FORMAT)
            self._rebuild_tokens(writer, tokens and engine not in ELSEWHERE, progress)
            manifest.write(self.path)  # by which others notice what has changed
            self._adopt(manifest)
            self.derived.rebuild(writer, manifest)
            self._calibrate(writer)
            writer.forget(manifest.documents)
            delete_other_folders(self.path, manifest)
        if before.engine_at not in (None, at):
            withdraw(before.engine_at, self.path)

    def reindex(
        self, encoder: Encoder | str | Path, *, words_share: float | None = None, progress: bool = False
    ) -> bool:
        """Give the index another encoder, while it is searched and written to, by other processes too.

        All documents are encoded beside the vectors in force, and then both change places at one stroke, which every
        process that has the index open takes up with its next search. Documents that are written meanwhile are there
        before and after. Interrupted, even by a kill, the same call goes on. What was in force is kept for
        `undo_reindex` until `rebuild`.

        >>> from hce.encoding.encoder import Encoder
        >>> with Index.create("shoes", [Document("a", "red shoes"), Document("b", "blue hats")], "static") as index:
        ...     index.reindex(Encoder.load("static")), index.search("hats", 1)[0].id
        (True, 'b')

        Args:
            encoder: what encodes documents and queries from then on: by name, as `create` takes it.
            words_share: how much words count in a hybrid search from then on; by default as in `create`.
            progress: show a bar.

        Returns:
            Whether there was anything to do; False where the index has this encoder already.

        Raises:
            InputError: there is no such encoder, the index has no documents, or another process is reindexing it.
        """
        from hce.index.reindex import reindex

        manifest = reindex(self._store, encoder, words_share, progress=progress)
        if manifest is not None:
            self._adopt(manifest)
        return manifest is not None

    def undo_reindex(self, *, progress: bool = False) -> None:
        """Take up again the encoder that was in force before the last `reindex`; only later documents are encoded.

        Raises:
            InputError: there was none, or `rebuild` has given it up since.
        """
        from hce.index.reindex import undo

        self._adopt(undo(self._store, progress=progress))

    def _give_up_earlier(self) -> None:
        """Drop the vectors of the encoder that was in force before the last reindexing.

        Raises:
            InputError: another process is taking it up again.
        """
        refusal = f"{self.path}: another process is reindexing it; wait until it is done"
        other = Manifest.read(self.path).other()
        if other is None or not other.was_in_force:
            return
        with held_alone(self.path, refusal), self._store.writing() as writer:
            known = Manifest.settled(self.path, writer)
            other = known.other()
            if other is not None and other.was_in_force:
                replace(known, beside=None).write(self.path)
                writer.drop_beside()

    def _adopt(self, manifest: Manifest, stamp: tuple[int, int] | None = None) -> None:
        """Go by another manifest of this index from now on, and by another encoder where it names one."""
        if manifest.since < self.manifest.since:
            return  # of an earlier moment than another thread has seen
        if manifest.encoder_folder != self.manifest.encoder_folder:
            self.derived.take_up(manifest)
            self._for_queries, self._for_documents = (CarriedEncoder(self.path, manifest) for _ in range(2))
            self._cutter = None
        if manifest.engine_at != self.manifest.engine_at:
            self.derived = Derived(self._store, manifest)
        self._codes = {}
        self.manifest, self._tree = manifest, None  # last: who sees the new manifest sees all that belongs to it
        self._stamp = None if manifest.switch else stamp

    def _keeps_up(self, reader: Reader) -> bool:
        """Adopt what another process has written; False where `reader` sees a moment before the last reindexing."""
        stamp = file_stamp(self.path / MANIFEST_FILE)
        if stamp != self._stamp:
            self._adopt(Manifest.read(self.path, reader), stamp)
        return reader.moment().change >= self.manifest.since

    def _present_encoder(self) -> CarriedEncoder:
        """Return what encodes queries, as of now."""
        if self._stamp is None or file_stamp(self.path / MANIFEST_FILE) != self._stamp:
            with self._store.reading() as reader:
                self._keeps_up(reader)
        return self._for_queries

    # ------------------------------------------------------------------------------------------------- internals

    def _calibrate(self, writer: Writer) -> None:
        """Find out from where on a hit is a good match, and note it in the manifest."""
        known = Manifest.settled(self.path, writer)
        found = None
        if self.derived.mirror is None:
            encode = partial(self._for_queries.encode, kind="query")
            found = calibrate(writer, self.derived, encode, known.fingerprint, known.words_share)
        calibration = None if found is None else asdict(found)
        if calibration != known.calibration:
            manifest = replace(known, calibration=calibration)
            manifest.write(self.path)
            self._adopt(manifest)

    @contextmanager
    def _writing(self, batches: list[Sequence[Document]], progress: bool) -> Iterator[tuple[Writer, Advance]]:
        with (
            self._store.writing() as writer,
            progress_bar("adding", sum(map(len, batches)), "documents", show=progress) as advance,
        ):
            self._keeps_up(writer)
            yield writer, advance

    def _encode_documents(self, texts: list[str]) -> np.ndarray:
        encoder = self._for_documents
        return encode_keeping_tokens(encoder, self._token_codes(encoder), texts)

    def _token_codes(self, encoder: CarriedEncoder) -> TokenCodes | None:
        """Return the tokens of an encoder's texts; None where none are kept, or not by readers elsewhere."""
        if self.manifest.engine in ELSEWHERE:
            return None
        folder = token_folder(self.path, encoder.manifest.suffix)
        if folder not in self._codes:
            self._codes[folder] = TokenCodes.find(folder)
        return self._codes[folder]

    def _asked_tokens(self, codes: TokenCodes) -> AskedTokens:
        """Return what remembers the tokens of queries, to be compared with some codes."""
        asked = self._asked
        if asked is None or asked.codes is not codes or len(asked.tokens) > MOST_ASKED:
            asked = self._asked = AskedTokens(codes)
        return asked

    def _rebuild_tokens(self, writer: Writer, wanted: bool | None, progress: bool) -> None:
        """Keep tokens, or no more, where that is said; else forget those of texts that are gone."""
        folder = token_folder(self.path, self.manifest.suffix)
        if wanted is None:
            if (codes := TokenCodes.find(folder)) is not None:
                codes.keep_only(writer)
            return
        delete_whole(folder)
        if wanted:
            read_all_tokens(folder, self._for_documents.full_encoder(), writer, progress=progress)
        self._codes = {}

    def _by_tokens(
        self, encoder: CarriedEncoder, codes: TokenCodes, texts: Sequence[str], hits: list[list[Hit]], k: int
    ) -> list[list[Hit]]:
        """Let tokens put the first hits of each query into another order, and tell which words the k best have."""
        asked = self._asked
        if asked is None or not asked.is_of(codes, texts):
            asked = AskedTokens(codes)
            encoder.encode(texts, "query", asked.keep)
        ordered = [asked.in_order(encoder, text, row)[:k] for text, row in zip(texts, hits, strict=True)]
        with self._store.reading() as reader:
            return with_matched(reader, self.derived, texts, ordered)

    def _document_cutter(self) -> Cutter | None:
        """Return what cuts long documents; None in an index of format 1, which an earlier version may open too."""
        if self._cutter is None and Manifest.read(self.path).window is not None:  # another process may have rebuilt it
            self._cutter = Cutter(self._for_documents.text_encoder())
        return self._cutter

    def _read_in_passages(self) -> int:
        """Have long documents read in passages where they are not yet; return the window."""
        known = Manifest.read(self.path)
        if known.window is not None:
            return known.window
        cutter = Cutter(self._for_documents.text_encoder())
        with self._store.writing() as writer:
            # From here on an earlier version, which knows nothing of passages, does not open the index.
            replace(Manifest.read(self.path), format=FORMAT).write(self.path)
            cut_documents(writer, self._encode_documents, cutter)
        return cutter.window


@dataclass(frozen=True)
class InMode:
    """An index that is searched in one mode, as `evaluate` needs it, and re-ranked where it has a cross-encoder."""

    index: Index
    mode: SearchMode
    rerank: Reranker | None = None
    depth: int = RERANKED

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Find the k best documents of each query, best first; behind those re-ranked, the others as they were."""
        if self.rerank is None:
            return self.index.search(queries, k, mode=self.mode)
        hits = self.index.search(queries, max(k, self.depth), mode=self.mode)
        return [
            reranked_first(self.rerank, query, row, self.depth)[:k] for query, row in zip(queries, hits, strict=True)
        ]
