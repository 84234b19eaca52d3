"""Index: search documents by words and by meaning, and add or remove them at any time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, overload

import numpy as np

from hce.data.corpus import Corpus
from hce.data.text import Document
from hce.encoding.encoder import Encoder
from hce.errors import InputError, wrong_type
from hce.files import ScratchFolder, checked_fields, is_folder
from hce.index.derived import replica_at
from hce.index.filters import FieldSummary, Filter
from hce.index.manifest import (
    MANIFEST_FILE,
    IndexStatus,
    size_on_disk,
)
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
from hce.index.state import IndexState, ReindexedError
from hce.index.store import MomentPassedError
from hce.index.tables import FacetCount, Writer
from hce.index.tree import NumberedHierarchy
from hce.index.writing import checked, chunks_of, without_unchanged
from hce.progress import Advance, bars_shown, progress_bar
from hce.search.engine import ELSEWHERE

# These import torch or its dependencies, which an index that is only searched does not need.
if TYPE_CHECKING:
    from hce.encoding.reranker import Reranker
    from hce.index.create import HierarchyChoice
    from hce.index.drift import Drift
    from hce.search.fusion import Calibration


OF_MANIFEST = ("encoder", "fingerprint", "base_encoder", "fitted_documents", "dim", "format", "search", "curves")
"""Fields of the manifest that the status of an index shows unchanged."""


class Index:
    """A folder of documents with their vectors; any number of processes open it, and one at a time writes to it.

    An index is thread-safe. Opening it loads neither encoder nor engine: the first call that needs one loads it.

    Attributes:
        path: the folder.
        state: the open parts of the index in this process, for hce's own modules.
        with_matched: whether searches fill in `Hit.matched`; if not, a search for 100 hits takes a third of the time.
        with_paths: whether searches fill in `Hit.path`; if not, a search need not load the tree.
        is_replica: whether the index is read from a collection of Milvus, and refuses writes.
    """

    is_replica: ClassVar[bool] = False
    with_matched: bool = True
    with_paths: bool = True
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
        """Create an index in a new folder, and open it.

        An interrupted call leaves the vectors encoded so far in `PATH.unfinished`; the same call resumes from there.
        Once `PATH` exists, only the engine may be missing, and the first search builds it.

        >>> shoes, hats = Document("a", "red shoes"), Document("b", "blue hats", metadata={"year": 2024})
        >>> with Index.create("my-index", [shoes], "static") as index:
        ...     _ = index.add([hats])
        ...     [hit.id for hit in index.search("blue hats")], [hit.id for hit in index.search("red shoes", k=1)]
        (['b', 'a'], ['a'])

        Args:
            path: the new folder.
            corpus: the first documents.
            encoder: encodes documents and queries; the folder gets a copy of it. The name "static" means a table,
                which is first fitted to the corpus. The folder of a model that `hce train` wrote brings the tree
                along, if the model was trained on this corpus.
            hierarchy: a tree of these documents, in their order; "grow" grows one if the model has none.
            engine: "codes" scans codes of the vectors, and scores the best candidates again by their vectors. From
                4,000,000 documents on, it grows a tree. "exact" scores all vectors; "milvus" leaves them to Milvus.
            at: the address of Milvus: `http://HOST:PORT`, or the path of a file that ends in `.db`. `#NAME` after
                the address names the collection.
            language: the language of the texts, for stemming; "none" matches words unchanged.
            words_share: how much words count in a hybrid search, from 0 to 1; by default it is calibrated, see
                `hce.training.calibration`.
            tokens: with a transformer, keep the tokens of texts (48 bytes per token), to improve the order of the first
                hits of a hybrid search. Milvus keeps none.
            progress: show progress bars.

        Raises:
            InputError: the folder exists already, or an argument is not valid.
        """
        from hce.index.create import build_parts, create_index

        create_index(
            *(path, corpus, encoder, hierarchy),
            engine=engine,
            at=at,
            language=language,
            words_share=words_share,
            tokens=tokens,
            progress=progress,
        )
        with ExitStack() as stack:
            index = stack.enter_context(cls(path))
            build_parts(index.state)
            stack.pop_all()
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
        """Create an index for measurements, which is deleted along with this object.

        >>> from hce import Encoder
        >>> corpus = Corpus.from_documents([Document("a", "red shoes"), Document("b", "blue hats")])
        >>> Index.temporary(corpus, Encoder.load("static")).search("hats", 1)[0].id
        'b'

        Args:
            corpus: the documents.
            encoder: encodes documents and queries.
            vectors: the documents' vectors, unit rows of shape (N, n), if already computed.
            calibration: how much words and tokens count; by default it is chosen as in `create`.
            language: the language of the texts, for stemming.
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
            path: the folder of an index. Or the address of a Milvus collection that an index writes to: it is opened
                for reading only (docs/guide.md).
            encoder: the encoder that made the vectors, so that the index's own copy need not be loaded.

        Raises:
            FormatError: there is no index, it is damaged, or a newer version wrote it.
            InputError: `encoder` did not make the vectors.
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
        """Add documents, all or none; once the call returns, they survive a crash.

        Only new texts are encoded.

        Args:
            batches: a corpus or other documents; several batches are added in one write.
            progress: show a progress bar.

        Returns:
            The number of documents added.

        Raises:
            InputError: an id exists already, or a document is not valid.
            WriterBusyError: another process or thread is writing.
        """
        sound = [checked(batch) for batch in batches]
        with self._writing(sound, progress) as (writer, advance):
            for chunk in chunks_of(sound):
                if known := writer.present(document.id for document in chunk):
                    first = next(iter(known))
                    raise InputError(f"{self.path}: id {first!r} is there already; --update (Index.update) replaces it")
            self.state.insert(writer, chunks_of(sound), advance)
        return sum(map(len, sound))

    def update(self, *batches: Iterable[Document], progress: bool = False) -> int:
        """Add documents, all or none, and replace those with the same ids.

        An unchanged text keeps its vector.

        Returns:
            The number of documents written.

        Raises:
            InputError: a document is empty or not valid.
            WriterBusyError: another process or thread is writing.
        """
        sound = [checked(batch) for batch in batches]
        for batch in sound:
            if isinstance(batch, Corpus) and batch.left_out:
                emptied = min(batch.left_out)
                raise InputError(f"document {emptied!r} has neither text nor title; to delete it, use remove")
        with self._writing(sound, progress) as (writer, advance):
            chunks = without_unchanged(writer, chunks_of(sound), advance, keep=self.state.derived.mirror is None)
            self.state.insert(writer, chunks, advance)
        return sum(map(len, sound))

    def remove(self, ids: Iterable[str]) -> int:
        """Remove documents, all or none; they stay removed after a crash.

        Returns:
            The number of documents removed.

        Raises:
            InputError: an id does not exist.
            WriterBusyError: another process or thread is writing.
        """
        if isinstance(ids, str) or not isinstance(ids, Iterable):
            raise InputError(f"remove takes a list of ids, not a {type(ids).__name__}; put the single id into a list")
        distinct = list(dict.fromkeys(map(_checked_id, ids)))
        with self._writing([], progress=False) as (writer, _):
            known = writer.present(distinct)
            if missing := [doc_id for doc_id in distinct if doc_id not in known]:
                more = f" ({len(missing):,} of {len(distinct):,} ids are not)" if len(distinct) > 1 else ""
                raise InputError(f"{self.path}: no document {missing[0]!r} is there{more}; nothing was removed")
            writer.delete([number for number, _ in known.values()])
        return len(distinct)

    @contextmanager
    def _writing(self, batches: list[Sequence[Document]], progress: bool) -> Iterator[tuple[Writer, Advance]]:
        """Open a write; afterwards, update Milvus, or rebuild the engine if that pays."""
        with (
            self.state.store.writing() as writer,
            progress_bar("adding", sum(map(len, batches)), "documents", show=progress) as advance,
        ):
            self.state.keep_up(writer)
            yield writer, advance
        self.state.derived.follow_write()

    def get(self, doc_id: str) -> Document | None:
        """Return the document with this id, or None."""
        with self.state.store.reading() as reader:
            return reader.find(_checked_id(doc_id))

    def __contains__(self, doc_id: object) -> bool:
        return isinstance(doc_id, str) and self.get(doc_id) is not None

    def __len__(self) -> int:
        with self.state.store.reading() as reader:
            return reader.moment().documents

    def __iter__(self) -> Iterator[Document]:
        """Iterate over all documents at one moment, in the order of their numbers."""
        for entry in self.state.entries():
            yield entry.document

    def vectors(self, after: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return document numbers above `after`, rising, (N,), and vectors (N, n).

        Raises:
            InputError: `after` is not an integer.
        """
        if isinstance(after, bool) or not isinstance(after, int | np.integer):
            raise InputError(f"after = {after!r}: give the number of a document, or 0 to read all; ids go to get()")
        with self.state.reading() as reader:
            return reader.vectors(int(after))

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
            k: how many documents to return, fewer only if there are not enough. By words alone, only documents that
                share a word with the query are returned.
            filter: conditions on metadata, see `hce.index.filters`; still returns k documents if enough match.
            mode: "hybrid" ranks by words and meaning, and reorders the first hits by tokens if the index has these;
                "dense" ranks by meaning alone; "words" by BM25 alone.
            unique: leave out documents that are near-equal to a better hit, which then names them in `Hit.folded`; see
                `hce.index.ranking.fold_near_equal`. Still returns k documents if there are enough different ones.
            rerank: a cross-encoder that reorders the first hits, or its directory or hub id.
            depth: how many of the first hits the cross-encoder reads; fewer than k count as k.

        Raises:
            InputError: k is not a positive integer, a query is not a text, the filter is not valid, or there is no such
                mode or cross-encoder.
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
                    *(texts, vectors, wanted, filter, mode, fingerprint),
                    unique=unique,
                    matched=self.with_matched,
                    paths=self.with_paths,
                )
            except ReindexedError:
                continue
            if reranker is not None:
                hits = [reranked(reranker, text, row, wanted)[:k] for text, row in zip(texts, hits, strict=True)]
            return hits[0] if isinstance(queries, str) else hits

    def _reranker(self, rerank: Reranker | str | Path) -> Reranker:
        """Return a cross-encoder; one that is named stays loaded for the next search."""
        from hce.encoding.reranker import Reranker

        if isinstance(rerank, Reranker):
            return rerank
        if not isinstance(rerank, str | Path):
            raise wrong_type(rerank, "rerank: give a cross-encoder, or the directory or hub id of one")
        if self._last_reranker is None or self._last_reranker.name != str(rerank):
            self._last_reranker = Reranker.load(rerank)
        return self._last_reranker

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        """Encode texts as documents to unit vectors of shape (texts, n)."""
        return self.state.for_documents.encode(texts, "document")

    def search_vectors(
        self,
        vectors: np.ndarray,
        k: int = 10,
        filter: Filter | None = None,  # noqa: A002
    ) -> list[list[Hit]]:
        """Search by meaning alone for encoded queries: unit rows of shape (Q, n).

        Raises:
            InputError: the vectors have another shape or hold NaN, or k or the filter is not valid.
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
        """Return whether a search's first hit is a good match; if not, none exists.

        Two things are judged: the hit's cosine, and the share of the query's words in it; see `hce.index.ranking`. If
        tokens or a cross-encoder reordered the hits, the hit that was first without them is judged.

        Args:
            query: the text that was searched for.
            hits: the hits that `search` returned.
            filter: the filter that was passed to `search`.
            mode: the mode that was passed to `search`.
            vector: the query's vector, of shape (n,), if at hand; the vector of the last query is cached.

        Returns:
            None if unknown: nothing was found, or the search had a filter or used words alone. It is also unknown if
            the index has few documents or uses Milvus. After a reindexing it is unknown until `rebuild`.
        """
        noted = self.state.manifest.calibration
        if noted is None or not hits or filter is not None or mode == "words":
            return None
        calibration = checked_fields(MatchThresholds, noted)
        if calibration.fingerprint != self.state.manifest.fingerprint:
            return None
        vector = self.state.encode_query(query) if vector is None else vector
        first = max(hits, key=lambda hit: hit.from_meaning + hit.from_words)  # the thresholds were found without tokens
        with self.state.reading() as reader:
            if calibration.fingerprint != self.state.manifest.fingerprint or not reader.documents([first.number]):
                return None  # the index has another encoder now, or the document is gone
            with suppress(MomentPassedError):
                return calibration.is_good(closeness(reader, self.state.derived, query, vector, first))
        return None

    def facets(
        self,
        fields: Sequence[str],
        filter: Filter | None = None,  # noqa: A002
        most: int = 10,
    ) -> dict[str, list[FacetCount]]:
        """Count documents by their values of metadata fields, most frequent first.

        All documents that match the filter are counted, not those that match a query: a search by meaning would find
        every document sooner or later. Each element of a list counts; documents without the field do not.

        >>> documents = [Document(str(n), "shoes", metadata={"year": n // 10 * 10}) for n in (2009, 2012, 2015)]
        >>> Index.create("years", documents, "static").facets(["year"])
        {'year': [FacetCount(value=2010, documents=2), FacetCount(value=2000, documents=1)]}

        Args:
            fields: names of metadata fields; `meta.year` is the field `year` within `meta`.
            filter: conditions, as for `search`.
            most: how many values of each field to return.

        Raises:
            InputError: no document has such a field, or the filter or `most` is not valid.
        """
        check_k(most, "most")
        if not isinstance(fields, list | tuple | set | frozenset):
            raise wrong_type(fields, "facets takes a list of fields; put the single one into a list")
        with self.state.reading() as reader:
            return {field: reader.facet(field, filter, most) for field in fields}

    def fields(self) -> list[FieldSummary]:
        """Summarize the metadata fields of the first 500 and the last 500 documents.

        >>> documents = [Document(str(n), "shoes", metadata={"year": n}) for n in (2009, 2012, 2015)]
        >>> [found] = Index.create("fields", documents, "static").fields()
        >>> found.name, found.values, found.least, found.most
        ('year', 3, 2009, 2015)
        """
        with self.state.reading() as reader:
            return reader.fields()

    def prepare(self) -> None:
        """Load encoder, engine and words now, so that the first search need not."""
        self.state.present_encoder().encoder()
        with self.state.reading() as reader:
            for part in self.state.derived.parts(reader):
                part.prepare(reader)

    @property
    def encoder(self) -> Encoder:
        """The encoder, loaded when first needed; do not train it."""
        return self.state.present_encoder().encoder()

    # ------------------------------------------------------------------------------------------------- upkeep

    @property
    def tree(self) -> NumberedHierarchy | None:
        """The current tree, with the numbers of the documents it was grown from; None without a tree."""
        return self.state.tree

    def status(self) -> IndexStatus:
        """Return counts, sizes and names, without loading encoder or engine."""
        state = self.state
        with state.reading() as reader:
            manifest, tree, standby = state.manifest, state.tree, state.manifest.standby()
            moment, removed = reader.moment(), reader.removed_up_to(manifest.documents)
            pending, facts = state.derived.engine_part.pending(reader), state.derived.engine_part.facts(reader)
        return IndexStatus(
            path=str(self.path),
            documents=moment.documents,
            added=moment.documents - (manifest.documents - removed),
            removed=removed,
            created=manifest.created,
            changed=moment.at,
            engine=state.derived.engine_name,
            pending=pending,
            tree_levels=tree.hierarchy.depth if tree else 0,
            bytes=size_on_disk(self.path),
            reindexing=standby.encoder if standby and not standby.was_in_force else None,
            earlier=standby.encoder if standby and standby.was_in_force else None,
            tokens=manifest.engine not in ELSEWHERE and is_folder(self.path / manifest.folder_of("tokens")),
            recall=facts.get("recall"),
            rescored=facts.get("rescored"),
            **{name: getattr(manifest, name) for name in OF_MANIFEST},
        )

    def drift(self, seed: int = 0) -> Drift:
        """Return whether it is time to retrain; see `hce.index.drift`.

        This takes seconds, and loads the encoder.
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
        """Rebuild everything derived from the documents: tree, engines and words.

        This also frees the space of removed documents, and deletes the records that only earlier snapshots need. The
        documents do not change. If a table was fitted to less than a quarter of the documents, it is fitted to all, and
        all are encoded again, as by `reindex`. Any other encoder stays as it was. The encoder that the last `reindex`
        replaced is deleted, with its vectors.

        Args:
            engine: the engine to use from now on; by default the current one.
            at: the address of Milvus, for the engine "milvus"; see `create`.
            refit: whether a table may be fitted again. An encoder that was trained or given is never fitted.
            tokens: whether to keep tokens from now on, see `create`; all documents are read again for this. None
                changes nothing.
            progress: show progress bars.

        Raises:
            InputError: there is no such engine.
            WriterBusyError: another process or thread is writing.
        """
        from hce.index.create import rebuild

        refit = refit and self.status().has_outgrown_its_table
        rebuild(self.state, engine, at, refit=refit, tokens=tokens, progress=progress)

    def reindex(
        self, encoder: Encoder | str | Path, *, words_share: float | None = None, progress: bool = False
    ) -> bool:
        """Switch to another encoder while the index is searched and written to.

        All documents are encoded while searches use the old vectors. Then one commit activates the new ones, and every
        process that has the index open uses them from its next search on. Documents written meanwhile are found before
        and after that commit. After an interruption, even a kill, the same call resumes. The old encoder and vectors
        are kept for `undo_reindex` until `rebuild`.

        >>> from hce.encoding.encoder import Encoder
        >>> with Index.create("shoes", [Document("a", "red shoes"), Document("b", "blue hats")], "static") as index:
        ...     index.reindex(Encoder.load("static")), index.search("hats", 1)[0].id
        (True, 'b')

        Args:
            encoder: the new encoder for documents and queries, or its name, as for `create`.
            words_share: how much words count with the new encoder in a hybrid search; by default chosen as in `create`.
            progress: show a progress bar.

        Returns:
            Whether there was anything to do; False if the index already has this encoder.

        Raises:
            InputError: there is no such encoder, the index has no documents, or another process is reindexing it.
        """
        from hce.index.create import reindex

        manifest = reindex(self.state.store, encoder, words_share, progress=progress)
        if manifest is not None:
            self.state.adopt(manifest)
        return manifest is not None

    def undo_reindex(self, *, progress: bool = False) -> None:
        """Switch back to the encoder that the last `reindex` replaced.

        Before the switch, that encoder encodes the documents added since.

        Raises:
            InputError: no `reindex` replaced one, or `rebuild` has deleted it since.
        """
        from hce.index.create import undo

        self.state.adopt(undo(self.state.store, progress=progress))


def _checked_id(doc_id: str) -> str:
    """Return an id; InputError if it is not a text."""
    if not isinstance(doc_id, str):
        raise InputError(f"an id is a string, not a {type(doc_id).__name__}")
    return doc_id
