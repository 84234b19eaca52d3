"""Index: documents that come and go, found by words and by meaning.

An index has an encoder, a store of the documents, and an engine of vectors and an index of words, derived from the
store. Adding and removing documents needs no training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, overload

import numpy as np

from hce.data.corpus import Corpus
from hce.data.documents import Document
from hce.errors import wrong_type
from hce.files import ScratchFolder, checked_fields
from hce.index.derived import replica_at
from hce.index.filters import FieldSummary, Filter
from hce.index.manifest import MANIFEST_FILE, IndexStatus
from hce.index.ranking import (
    RERANKED,
    Hit,
    MatchThresholds,
    SearchMode,
    check_k,
    checked_queries,
    checked_vectors,
    closeness,
    reranked,
)
from hce.index.state import IndexState, ReindexedError, build_parts, rebuild, status_of
from hce.index.store import FacetCount, MomentPassedError, Writer
from hce.index.tree import NumberedHierarchy
from hce.index.writing import (
    check_id,
    checked,
    checked_after,
    checked_ids,
    chunks_of,
    insert_documents,
    numbers_of,
    refuse_emptied,
    refuse_known,
    without_unchanged,
)
from hce.progress import Advance, bars_shown, progress_bar
from hce.search.engine import check_engine

# With torch, or with what comes along with it: an index that is only searched needs none of them.
if TYPE_CHECKING:
    from hce.encoding.encoder import Encoder
    from hce.encoding.reranker import Reranker
    from hce.index.create import HierarchyChoice
    from hce.index.drift import Drift
    from hce.search.shares import Calibration


class Index:
    """A folder of documents with their vectors; opened by any number of processes, written by one at a time.

    An index can be used from several threads. Only a search by text or an addition loads the encoder, only a search
    loads the engine.

    Attributes:
        path: the folder.
        state: what this process has open of the index, for hce's own modules.
        with_matched: whether searches fill in `Hit.matched`; without, a search for 100 hits takes a third of the time.
        is_replica: whether the index is read from a collection of Milvus, and refuses writes.
    """

    is_replica: ClassVar[bool] = False
    with_matched: bool = True
    _last_reranker: Reranker | None = None
    _scratch: ScratchFolder | None = None  # deleted along with this object

    def __init__(self, path: str | Path, encoder: Encoder | None = None) -> None:
        self.path = Path(path)
        self.state = IndexState(self.path, encoder)

    @classmethod
    def create(
        cls,
        path: str | Path,
        corpus: Corpus | Iterable[Document],
        encoder: Encoder | str | Path,
        hierarchy: HierarchyChoice = None,
        *,
        engine: str = "codes",
        at: str | None = None,
        language: str = "english",
        words_share: float | None = None,
        tokens: bool = True,
        progress: bool = False,
    ) -> Index:
        """Make an index in a new folder, and open it.

        Stopped half-way, it leaves only the vectors encoded so far, in `PATH.unfinished`; the same call goes on there.
        Stopped when only the engine was missing, it leaves the index, and the first search builds the engine.

        >>> shoes, hats = Document("a", "red shoes"), Document("b", "blue hats", metadata={"year": 2024})
        >>> with Index.create("my-index", [shoes], "static") as index:
        ...     _ = index.add([hats])
        ...     [hit.id for hit in index.search("blue hats")], [hit.id for hit in index.search("red shoes", k=1)]
        (['b', 'a'], ['a'])

        Args:
            path: the new folder.
            corpus: the first documents.
            encoder: what encodes documents and queries; a copy of it is kept in the folder. By name, "static" is
                fitted to the corpus first, and a model that `hce train` wrote brings its tree along if that is of
                this corpus.
            hierarchy: the tree of these documents, in their order; "grow" grows one where the model has none.
            engine: "codes" scans codes of the vectors, and scores the best again by the vectors; "exact" scores all
                vectors; "milvus" lives elsewhere.
            at: the address of Milvus: `http://HOST:PORT`, or the path of a file that ends in `.db`; behind `#` may
                stand the name of the collection.
            language: of the texts, whose endings are cut off words; "none" matches words unchanged.
            words_share: how much words count in a hybrid search, from 0 to 1; by default it is calibrated, see
                `hce.training.calibration`.
            tokens: keep the tokens of texts, where the encoder is a transformer, and let them put the first hits of a
                hybrid search into a better order: about 50 bytes a token. Not with an engine that lives elsewhere.
            progress: show bars.

        Raises:
            InputError: the folder is there already, or an argument is not what it has to be.
        """
        from hce.index.create import create_index

        check_engine(engine, at)
        create_index(
            *(path, corpus, encoder, hierarchy),
            engine=engine,
            at=at,
            language=language,
            words_share=words_share,
            tokens=tokens,
            progress=progress,
        )
        index = cls(path)
        try:
            build_parts(index.state)
        except BaseException:
            index.close()
            raise
        return index

    @classmethod
    def temporary(
        cls,
        corpus: Corpus,
        encoder: Encoder,
        *,
        vectors: np.ndarray | None = None,
        calibration: Calibration | None = None,
        language: str = "english",
    ) -> Index:
        """Make an index that is deleted with this object, to measure what an index of a corpus would find.

        >>> from hce import Encoder
        >>> corpus = Corpus.from_documents([Document("a", "red shoes"), Document("b", "blue hats")])
        >>> Index.temporary(corpus, Encoder.load("static")).search("hats", 1)[0].id
        'b'

        Args:
            corpus: the documents.
            encoder: encodes documents and queries.
            vectors: of the documents, unit rows of shape (N, n), where they are computed already.
            calibration: how much words and tokens count; by default it is chosen as in `create`.
            language: whose endings are cut off words.
        """
        from hce.index.create import create_index

        scratch = ScratchFolder("hce-index-")
        create_index(
            *(scratch.path / "index", corpus, encoder, None),
            engine="codes",
            language=language,
            tokens=calibration is None or calibration.shares.tokens > 0,
            vectors=vectors,
            calibration=calibration,
            progress=False,
        )
        index = cls(scratch.path / "index", encoder)
        index._scratch, index.with_matched = scratch, False
        with bars_shown(False):
            index.prepare()
        return index

    @classmethod
    def open(cls, path: str | Path, encoder: Encoder | None = None) -> Index:
        """Open an index.

        Args:
            path: the folder of an index; or the address of the collection of Milvus that an index writes to, which is
                then only read (docs/guide.md).
            encoder: the encoder that made its vectors, to spare loading the index's own copy.

        Raises:
            FormatError: there is no index, it is damaged, or a newer version wrote it.
            InputError: `encoder` is another one.
        """
        replica = None if (Path(path) / MANIFEST_FILE).exists() else replica_at(path, encoder)
        return cls(path, encoder) if replica is None else replica

    def close(self) -> None:
        """Close the files."""
        self.state.close()

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        engine = self.state.derived.engine_name
        return f"Index({str(self.path)!r}, {len(self):,} documents, {self.state.manifest.encoder}, {engine})"

    # ------------------------------------------------------------------------------------------------- documents

    def add(self, *batches: Iterable[Document], progress: bool = False) -> int:
        """Add documents, all or none; when the call returns, they survive a crash. Only new texts are encoded.

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
            refuse_known(writer, chunks_of(sound), self.path)
            insert_documents(writer, chunks_of(sound), self.state.encode_documents, self.state.cutter(), advance)
        return sum(map(len, sound))

    def update(self, *batches: Iterable[Document], progress: bool = False) -> int:
        """Add documents, all or none, in place of those that have their ids; a text that is the same keeps its vector.

        Returns:
            How many were written.

        Raises:
            InputError: a document is not sound or empty, or (`WriterBusyError`) someone else is writing.
        """
        sound = [checked(batch) for batch in batches]
        refuse_emptied(sound)
        with self._writing(sound, progress) as (writer, advance):
            chunks = without_unchanged(writer, chunks_of(sound), advance, keep=self.state.derived.mirror is None)
            insert_documents(writer, chunks, self.state.encode_documents, self.state.cutter(), advance)
        return sum(map(len, sound))

    def remove(self, ids: Iterable[str]) -> int:
        """Remove documents, all or none; when the call returns, they stay removed after a crash.

        Returns:
            How many were removed.

        Raises:
            InputError: an id is not there, or (`WriterBusyError`) someone else is writing.
        """
        distinct = checked_ids(ids)
        with self._writing([], progress=False) as (writer, _):
            writer.delete(numbers_of(writer, distinct, self.path))
        return len(distinct)

    @contextmanager
    def _writing(self, batches: list[Sequence[Document]], progress: bool) -> Iterator[tuple[Writer, Advance]]:
        """Open a write with the current encoder, and then bring the engine up to date with it."""
        with (
            self.state.store.writing() as writer,
            progress_bar("adding", sum(map(len, batches)), "documents", show=progress) as advance,
        ):
            self.state.keep_up(writer)
            yield writer, advance
        self.state.derived.follow_write()

    def get(self, doc_id: str) -> Document | None:
        """Return the document of an id, or None."""
        check_id(doc_id)
        with self.state.store.reading() as reader:
            return reader.find(doc_id)

    def __contains__(self, doc_id: object) -> bool:
        return isinstance(doc_id, str) and self.get(doc_id) is not None

    def __len__(self) -> int:
        with self.state.store.reading() as reader:
            return reader.moment().documents

    def __iter__(self) -> Iterator[Document]:
        """Iterate over all documents, in the order in which they came, as they were when the iteration began."""
        with self.state.reading() as reader:
            for entry in reader.entries():
                yield entry.document

    def vectors(self, after: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of documents above `after`, rising, of shape (N,), and their vectors (N, n), float32.

        Raises:
            InputError: `after` is not an integer.
        """
        number = checked_after(after)
        with self.state.reading() as reader:
            return reader.vectors(number)

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
            filter: conditions on metadata, see `hce.index.filters`; k documents are found if enough fulfil them.
            mode: "hybrid", by words and meaning, the first hits in the order of a transformer's tokens where the index
                has these; "dense", by meaning alone; "words", by BM25 alone.
            unique: leave out what is near-equal to a better hit, which then names it (`Hit.folded`); see
                `hce.index.ranking.fold_near_equal`. k documents are found if there are enough different ones.
            rerank: a cross-encoder, or the directory or hub id of one, that puts the first hits into another order.
            depth: how many of the first hits the cross-encoder reads; k, where that is more: all that are returned.

        Raises:
            InputError: k is not an integer from 1 on, a query is not a text, the filter is not a valid one, or
                there is no such mode or cross-encoder.
        """
        texts = checked_queries(queries)
        check_k(k)
        check_k(depth, "depth")
        reranker = None if rerank is None else self._reranker(rerank)
        wanted = k if reranker is None else max(k, depth)
        while True:
            fingerprint = self.state.present_encoder().fingerprint
            vectors = None if mode == "words" else self.state.encode_queries(texts)
            try:
                hits = self.state.search(
                    texts, vectors, wanted, filter, mode, fingerprint, unique=unique, matched=self.with_matched
                )
            except ReindexedError:
                continue
            if reranker is not None:
                hits = [reranked(reranker, text, row, wanted)[:k] for text, row in zip(texts, hits, strict=True)]
            return hits[0] if isinstance(queries, str) else hits

    def _reranker(self, rerank: Reranker | str | Path) -> Reranker:
        """Return a cross-encoder; one that was given by name is kept for the next search."""
        from hce.encoding.reranker import Reranker

        if isinstance(rerank, Reranker):
            return rerank
        if not isinstance(rerank, str | Path):
            raise wrong_type(rerank, "rerank: give a cross-encoder, or the directory or hub id of one")
        if self._last_reranker is None or self._last_reranker.name != str(rerank):
            self._last_reranker = Reranker.load(rerank)
        return self._last_reranker

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        """Encode texts as documents to unit vectors of shape (texts, n).

        The index stays unchanged.
        """
        return self.state.for_documents.encode(texts, "document")

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
        rows = checked_vectors(vectors, self.state.manifest.dim)
        return self.state.search([""] * len(rows), rows, k, filter, "dense")

    def good_match(
        self,
        query: str,
        hits: Sequence[Hit],
        filter: Filter | None = None,  # noqa: A002
        mode: SearchMode = "hybrid",
        *,
        vector: np.ndarray | None = None,
    ) -> bool | None:
        """Return whether the first of the hits that a search gave is a good match; False: nothing in the index is one.

        The hit is judged by its cosine and by the words of the query that it has, see `hce.index.ranking`. Where
        tokens or a cross-encoder have put another hit first, the one of `hits` is judged that would be first without.

        Args:
            query: the text that was searched for.
            hits: what `search` returned.
            filter: the filter that `search` was given.
            mode: the mode that `search` was given.
            vector: the query's vector, of shape (n,), if at hand; the vector of the last search is remembered.

        Returns:
            None if that is not known: nothing was found; words alone, or a part of the documents, were searched; the
            index has few documents or an engine that lives elsewhere; or it has got another encoder since, which
            `rebuild` makes up for.
        """
        noted = self.state.manifest.calibration
        if noted is None or not hits or filter is not None or mode == "words":
            return None
        calibration = checked_fields(MatchThresholds, noted)
        if calibration.fingerprint != self.state.manifest.fingerprint:
            return None
        vector = self.state.encode_query(query) if vector is None else vector
        first = max(hits, key=lambda hit: hit.from_meaning + hit.from_words)  # the calibration knows of nothing else
        with self.state.reading() as reader:
            if calibration.fingerprint != self.state.manifest.fingerprint or not reader.documents([first.number]):
                return None  # it has another encoder by now, or the document is gone
            with suppress(MomentPassedError):
                return calibration.is_good(closeness(reader, self.state.derived, query, vector, first))
        return None

    def facets(
        self,
        fields: Sequence[str],
        filter: Filter | None = None,  # noqa: A002
        most: int = 10,
    ) -> dict[str, list[FacetCount]]:
        """Count documents by their values of some metadata fields, the most frequent values of each first.

        All documents that fulfil the filter are counted, whatever is searched for: by meaning every document is found,
        sooner or later. Each element of a list counts; documents without the field do not.

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
        if not isinstance(fields, list | tuple | set | frozenset):
            raise wrong_type(fields, "facets takes a list of fields; put the single one into a list")
        with self.state.reading() as reader:
            return {field: reader.facet(field, filter, most) for field in fields}

    def fields(self) -> list[FieldSummary]:
        """Summarize the metadata fields of the first and the last documents, 1,000 in all.

        >>> documents = [Document(str(n), "shoes", metadata={"year": n}) for n in (2009, 2012, 2015)]
        >>> [found] = Index.create("fields", documents, "static").fields()
        >>> found.name, found.values, found.least, found.most
        ('year', 3, 2009, 2015)
        """
        with self.state.reading() as reader:
            return reader.fields()

    def prepare(self) -> None:
        """Load now what the first search would load: encoder, engine and words."""
        self.state.present_encoder().encoder()
        with self.state.reading() as reader:
            self.state.derived.prepare(reader)

    @property
    def encoder(self) -> Encoder:
        """The encoder, loaded if it was not; do not train it."""
        return self.state.present_encoder().encoder()

    # ------------------------------------------------------------------------------------------------- upkeep

    @property
    def tree(self) -> NumberedHierarchy | None:
        """The tree of the documents at creation (or at the last rebuild) with their numbers, where there is one."""
        return self.state.tree

    def status(self) -> IndexStatus:
        """Return counts, sizes and names; loads neither encoder nor engine."""
        return status_of(self.state)

    def drift(self, seed: int = 0) -> Drift:
        """Return whether it is time to retrain: compare later documents with the first ones; see `hce.index.drift`.

        Takes seconds, and all vectors in memory; loads the encoder.
        """
        from hce.index.drift import drift_of

        with (
            self.state.reading() as reader,
            progress_bar("comparing later documents with earlier ones", None, "documents"),
        ):
            return drift_of(reader, self.state.manifest, self.tree, self.state.for_documents, seed)

    def rebuild(
        self,
        engine: str | None = None,
        *,
        at: str | None = None,
        refit: bool = True,
        tokens: bool | None = None,
        progress: bool = False,
    ) -> None:
        """Build again what is derived from the documents: the tree, if there is one, engines and words.

        Also gives the space of removed documents back, and forgets what only earlier snapshots need. Documents do not
        change. Nor does the encoder, unless it is a table that was fitted to less than a quarter of the documents there
        are now: it is fitted to all of them, and all are encoded again, as by `reindex`. The encoder before the last
        `reindex` is given up, with its vectors.

        Args:
            engine: another engine from now on.
            at: the address of Milvus, for the engine "milvus"; see `create`.
            refit: whether a table may be fitted again. An encoder that was trained, or given, never is.
            tokens: whether tokens are kept from now on, see `create`; all documents are read again for this. By
                default, nothing changes.
            progress: show bars.

        Raises:
            InputError: no such engine, or (`WriterBusyError`) someone else is writing.
        """
        refit = refit and self.status().has_outgrown_its_table
        rebuild(self.state, engine, at, refit=refit, tokens=tokens, progress=progress)

    def reindex(
        self, encoder: Encoder | str | Path, *, words_share: float | None = None, progress: bool = False
    ) -> bool:
        """Give the index another encoder, while it is searched and written to, by other processes too.

        All documents are encoded while the old vectors serve. Then one commit activates the new ones, and every process
        that has the index open uses them from its next search on. Documents that are written meanwhile are there before
        and after. Interrupted, even by a kill, the same call goes on. The old encoder and vectors are kept for
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
        from hce.index.create import reindex

        manifest = reindex(self.state.store, encoder, words_share, progress=progress)
        if manifest is not None:
            self.state.adopt(manifest)
        return manifest is not None

    def undo_reindex(self, *, progress: bool = False) -> None:
        """Return to the encoder before the last `reindex`; only later documents are encoded.

        Raises:
            InputError: there was none, or `rebuild` has given it up since.
        """
        from hce.index.create import undo

        self.state.adopt(undo(self.state.store, progress=progress))
