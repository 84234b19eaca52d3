"""Index: documents that come and go, found by words and by meaning.

It holds an encoder, a store of the documents, and what is derived from the store: an engine of vectors, an index of
words. Adding and removing documents needs no training.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args, overload

import numpy as np

from hce.data.corpus import Corpus
from hce.data.documents import Document
from hce.data.passages import Passage
from hce.deadline import check
from hce.encoding.encoder import Encoder
from hce.errors import InputError
from hce.index.create import HierarchyChoice, create_index
from hce.index.drift import Drift, measure_drift
from hce.index.encoder import ENCODER_FOLDER, CarriedEncoder, check_same, delete_other_encoders, file_stamps
from hce.index.filters import Filter
from hce.index.hierarchy import FOLDER, NumberedHierarchy, delete_other_trees, grow_tree, load_tree, regrow_tree
from hce.index.live import EngineBuilder, Live, PassagesBuilder, WordsBuilder
from hce.index.manifest import FORMAT, MANIFEST_FILE, IndexStatus, Manifest, Refit, file_stamp, size_on_disk
from hce.index.passages import Cutter
from hce.index.store import Entry, Reader, Store, Writer
from hce.index.writing import (
    checked,
    chunks_of,
    cut_documents,
    encode_all_anew,
    insert_documents,
    without_unchanged,
)
from hce.progress import progress_bar
from hce.search.engine import ENGINES, Engine, codec_of, engine_for
from hce.search.fusion import Fused, candidates_for, search_both
from hce.search.passages import Nearest
from hce.search.words import Matches, Words
from hce.training.model_folder import IN_AN_INDEX, ModelFacts

logger = logging.getLogger(__name__)

SearchMode = Literal["hybrid", "dense", "words"]


class Hit(NamedTuple):
    """A document that was found.

    Attributes:
        rank: 1 for the best.
        score: the cosine to the query; in a hybrid search the sum of the two parts below; of words alone, BM25.
        number: of the document in the store.
        from_meaning: the part of the score that the vectors gave.
        from_words: the part of the score that shared words gave.
        matched: the query's words that the document has, in any form; of a long query, of the first 64 words.
        passage: where the passage stands in `text` that a long document was found by, `text[start:stop]`; None where
            it was found as a whole. In a hybrid search, the one of words where these gave more of the score.
    """

    rank: int
    score: float
    id: str
    title: str
    text: str
    metadata: dict[str, Any]
    number: int = 0
    from_meaning: float = 0.0
    from_words: float = 0.0
    matched: tuple[str, ...] = ()
    passage: Passage | None = None

    @classmethod
    def of(cls, rank: int, number: int, document: Document, from_meaning: float, from_words: float = 0.0) -> Hit:
        """Make a hit of a document."""
        score = from_meaning + from_words
        shown = document.id, document.title, document.text, document.metadata
        return cls(rank, score, *shown, number, from_meaning, from_words)

    def as_dict(self) -> dict[str, Any]:
        """Return what people are shown, for JSON: numbers mean nothing outside the store."""
        return {name: value for name, value in self._asdict().items() if name != "number"}


class RefittedError(InputError):
    """Queries were encoded by an encoder that was fitted anew before they were searched for."""


class Index:
    """A folder of documents with their vectors; opened by any number of processes, written by one at a time.

    It can be used from several threads. Nothing is loaded before it is needed: only a search by text or an addition
    loads the encoder, only a search loads the engine.

    Attributes:
        path: the folder.
        manifest: what it is made of.
    """

    def __init__(self, path: str | Path, encoder: Encoder | None = None) -> None:
        self.path = Path(path)
        self.manifest = Manifest.read(self.path)
        if encoder is not None:
            check_same(encoder, self.manifest, self.path)
        self._for_queries = CarriedEncoder(self.path, self.manifest, encoder)
        # With its own copy, adding thousands of documents does not keep a search waiting.
        self._for_documents = self._for_queries if encoder else CarriedEncoder(self.path, self.manifest)
        self._store = Store(self.path, self.manifest.dim)
        self._engine = Live(self._store, self._new_engine_builder(self._engine_in_use(), self.manifest.dtype))
        self._passages = Live(self._store, self._new_passages_builder())
        self._words = Live(self._store, WordsBuilder(self.manifest.language))
        self._cutter: Cutter | None = None
        self._stamp: tuple[int, int] | None = None  # of the manifest's file; None while it is not known to be in force
        self._tree: NumberedHierarchy | None = None
        for part in (self._engine, self._words):
            if (snapshot := part.ahead()) is not None:
                logger.warning(
                    "%s knows of a later write than %s: writes were lost, by a missing or damaged %s-wal or an older "
                    "copy; restore both from a copy, or add again what is missing",
                    *(snapshot, self._store.path, self._store.path.name),
                )

    @classmethod
    def create(
        cls,
        path: str | Path,
        corpus: Corpus | Iterable[Document],
        encoder: Encoder | str | Path,
        hierarchy: HierarchyChoice = None,
        *,
        engine: str = "auto",
        dtype: str = "float32",
        language: str = "english",
        words_share: float | None = None,
        progress: bool = False,
    ) -> Index:
        """Make an index in a new folder, and open it.

        Stopped half-way, it leaves only the vectors encoded so far, in `PATH.unfinished`; the same call goes on there.
        Stopped when only the engine was missing, it leaves the whole index, and the first search builds the engine.

        >>> shoes, hats = Document("a", "red shoes"), Document("b", "blue hats", metadata={"year": 2024})
        >>> with Index.create("my-index", [shoes], Encoder.load("static")) as index:
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
            engine: "auto" (flat while that is fast), or one of `hce.search.engine.ENGINES`.
            dtype: what the engine keeps vectors in: float32, float16 or int8. The store keeps float32.
            language: of the texts, whose endings are cut off words; "none" matches words as they are written.
            words_share: how much words count in a hybrid search, from 0 to 1; by default half beside a static
                encoder and three tenths beside a transformer.
            progress: show bars.

        Raises:
            InputError: the folder is there already, or an argument is not what it has to be.
        """
        create_index(
            *(path, corpus, encoder, hierarchy),
            engine=engine,
            dtype=dtype,
            language=language,
            words_share=words_share,
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
            path: its folder.
            encoder: the encoder that made its vectors, to spare loading the index's own copy.

        Raises:
            FormatError: there is none, it is damaged, or a newer version wrote it.
            InputError: `encoder` is another one.
        """
        return cls(path, encoder)

    def close(self) -> None:
        """Let go of the files."""
        self._store.close()

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        engine = self._engine_builder.engine
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
            chunks = without_unchanged(writer, chunks_of(sound), advance)
            insert_documents(writer, chunks, self._encode_documents, self._document_cutter(), advance)
        return sum(map(len, sound))

    def remove(self, ids: Iterable[str]) -> int:
        """Take documents out, all or none; when it returns, they stay out after a crash.

        Returns:
            How many were removed.

        Raises:
            InputError: an id is not there, or (`WriterBusyError`) someone else is writing.
        """
        if isinstance(ids, str) or not isinstance(ids, Iterable):
            raise InputError(f"remove takes a list of ids, not a {type(ids).__name__}; put the single id into a list")
        listed = list(ids)
        for doc_id in listed:
            if not isinstance(doc_id, str):
                raise InputError(f"an id is a string, not a {type(doc_id).__name__}")
        distinct = list(dict.fromkeys(listed))
        with self._store.writing() as writer:
            known = writer.present(distinct)
            missing = [doc_id for doc_id in distinct if doc_id not in known]
            if missing:
                more = f" ({len(missing):,} of {len(distinct):,} ids are not)" if len(distinct) > 1 else ""
                raise InputError(f"{self.path}: no document {missing[0]!r} is there{more}; nothing was removed")
            writer.delete([number for number, _ in known.values()])
        return len(distinct)

    def get(self, doc_id: str) -> Document | None:
        """Return the document of an id, or None."""
        if not isinstance(doc_id, str):
            raise InputError(f"an id is a string, not a {type(doc_id).__name__}")
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
        with self._store.reading() as reader:
            yield from reader.entries(after)

    def vectors(self, after: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of all documents, rising, of shape (N,), and their vectors of shape (N, n), float32."""
        with self._store.reading() as reader:
            return reader.vectors(after)

    def reading(self) -> AbstractContextManager[Reader]:
        """Open one moment of the store, whatever is written meanwhile: all that is read through it fits together."""
        return self._store.reading()

    # ------------------------------------------------------------------------------------------------- search

    @overload
    def search(  # type: ignore[overload-overlap]
        self, queries: str, k: int = 10, filter: Filter | None = None, mode: SearchMode = "hybrid"
    ) -> list[Hit]: ...
    @overload
    def search(
        self, queries: Sequence[str], k: int = 10, filter: Filter | None = None, mode: SearchMode = "hybrid"
    ) -> list[list[Hit]]: ...
    def search(
        self,
        queries: str | Sequence[str],
        k: int = 10,
        filter: Filter | None = None,  # noqa: A002
        mode: SearchMode = "hybrid",
    ) -> list[Hit] | list[list[Hit]]:
        """Find the k best documents for a text, best first, or for each of several texts.

        >>> index = Index.create("shop", [Document(str(year), f"shoes {year}", metadata={"year": year}) for year in
        ...     (2022, 2023, 2024)], Encoder.load("static"))
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
            mode: "hybrid", by words and meaning; "dense", by meaning alone; "words", by BM25 alone.

        Raises:
            InputError: k is not a whole number from 1 on, a query is not a text, the filter is not a valid one, or
                there is no such mode.
        """
        texts = _checked_queries(queries)
        _check_k(k)
        while True:
            vectors = None if mode == "words" else self.encode_queries(texts)
            try:
                hits = self.search_encoded(texts, vectors, k, filter, mode)
            except RefittedError:
                continue
            return hits[0] if isinstance(queries, str) else hits

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Encode queries to unit vectors of shape (texts, n)."""
        return self._present_encoder().encode(texts, "query")

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
        rows = _checked_vectors(vectors, self.manifest.dim)
        return self.search_encoded([""] * len(rows), rows, k, filter, "dense")

    def search_encoded(
        self,
        texts: Sequence[str],
        vectors: np.ndarray | None,
        k: int,
        filter: Filter | None,  # noqa: A002
        mode: SearchMode,
    ) -> list[list[Hit]]:
        """Search as `search` does, for texts whose vectors are there already, of shape (texts, n); words need none.

        Raises:
            RefittedError: the vectors are of an encoder that has been fitted anew since; encode again.
        """
        if mode not in get_args(SearchMode):
            raise InputError(f"mode {mode!r}: choose one of {', '.join(get_args(SearchMode))}")
        _check_k(k)
        encoder = self._for_queries
        while True:
            check()
            with self._store.reading() as reader:
                if not self._keeps_up(reader):
                    continue
                if vectors is not None and self._for_queries is not encoder:
                    raise RefittedError(f"{self.path}: its encoder was fitted anew meanwhile; encode the queries again")
                allowed = None if filter is None else reader.numbers_where(filter)
                most = max(1, reader.moment().documents)  # who asks for more is not given room for more
                ranked = self._ranked(reader, texts, vectors, min(int(k), most), allowed, mode)
                if ranked is not None:
                    return self._hits(reader, texts, ranked, mode)
            # Else another thread has brought a part to a later moment than this reader sees: look again.

    def _ranked(
        self,
        reader: Reader,
        texts: Sequence[str],
        vectors: np.ndarray | None,
        k: int,
        allowed: np.ndarray | None,
        mode: SearchMode,
    ) -> list[_Ranked] | None:
        """Rank documents for each query; None where a part has gone on to a later moment."""
        if vectors is None or mode == "words":
            return self._words.use(reader, lambda words: [_by_words(words.search(text, k, allowed)) for text in texts])
        candidates = k if mode == "dense" else candidates_for(k)
        found = self._nearest(reader, vectors, candidates, allowed)
        if found is None:
            return None
        nearest = [
            _NearestToOne.of(reader, self._engine, vector, *row) for vector, *row in zip(vectors, *found, strict=True)
        ]
        if mode == "dense":
            return [_Ranked(_by_meaning(each), each.passages) for each in nearest]

        def fused(words: Words) -> list[_Ranked]:
            return [
                _Ranked(
                    search_both(
                        *(words, text),
                        numbers=each.numbers,
                        cosines=each.cosines,
                        cosines_at=each.cosines_at,
                        candidates=candidates,
                        words_share=self.manifest.words_share,
                        allowed=allowed,
                        k=k,
                    ),
                    each.passages,
                )
                for text, each in zip(texts, nearest, strict=True)
            ]

        return self._words.use(reader, fused)

    def _nearest(self, reader: Reader, vectors: np.ndarray, k: int, allowed: np.ndarray | None) -> Nearest | None:
        """Find the k nearest documents by meaning; None where a part has gone on to a later moment."""
        whole = self._engine.use(reader, lambda engine: engine.search(vectors, k, allowed))
        if whole is None or not reader.has_passages():
            return whole and Nearest(*whole, np.zeros(whole.numbers.shape, np.int64))
        return self._passages.use(reader, lambda passages: passages.nearest(whole, vectors, k, allowed))

    def _hits(self, reader: Reader, texts: Sequence[str], ranked: list[_Ranked], mode: SearchMode) -> list[list[Hit]]:
        """Turn numbers into the documents that they stand for."""
        wanted = {number for each in ranked for number in each.fused.numbers.tolist()}
        documents = reader.documents(wanted)
        hits = [
            [
                Hit.of(rank, number, documents[number], float(meaning), float(words))
                for rank, (number, meaning, words) in enumerate(
                    zip(*map(np.ndarray.tolist, each.fused[:3]), strict=True), 1
                )
            ]
            for each in ranked
        ]
        if reader.has_passages():
            hits = [_with_passages(reader, row, each.found_by()) for row, each in zip(hits, ranked, strict=True)]
        if mode == "dense":
            return hits

        def explained(words: Words) -> list[list[Hit]]:
            shared = [
                words.matched(text, [hit.number for hit in row], {hit.number: f"{hit.title} {hit.text}" for hit in row})
                for text, row in zip(texts, hits, strict=True)
            ]
            return [
                [hit._replace(matched=matched) for hit, matched in zip(row, each, strict=True)]
                for row, each in zip(hits, shared, strict=True)
            ]

        # Where words have gone on to a later moment meanwhile, the hits stand, without the words that they share.
        return self._words.use(reader, explained) or hits

    def prepare(self) -> None:
        """Load now what the first search would load: encoder, engine and words."""
        self._for_queries.get()
        with self._store.reading() as reader:
            self._engine.load(reader)
            if reader.has_passages():
                self._passages.load(reader)
            self._words.load(reader)

    def build_engine(self) -> None:
        """Build engines and words of the documents there are, and keep snapshots, so that who opens the index need not.

        Raises:
            WriterBusyError: someone else is writing.
        """
        with self._store.writing() as writer:  # nothing is written to it; it keeps others from writing
            self._engine.rebuild(writer, self._engine.builder)
            if writer.has_passages():
                self._passages.rebuild(writer, self._passages.builder)
            self._words.rebuild(writer, self._words.builder)

    @property
    def encoder(self) -> Encoder:
        """The encoder, loaded if it was not; do not train it."""
        return self._present_encoder().get()

    # ------------------------------------------------------------------------------------------------- the whole

    @property
    def tree(self) -> NumberedHierarchy | None:
        """The tree of the documents at creation (or at the last rebuild) with their numbers, where there is one."""
        if self._tree is None:
            self._tree = load_tree(self.path)
        return self._tree

    def status(self) -> IndexStatus:
        """Return counts, sizes and names; loads neither encoder nor engine."""
        with self._store.reading() as reader:
            self._keeps_up(reader)
            manifest, tree = self.manifest, self.tree
            moment, removed = reader.moment(), reader.removed_up_to(manifest.documents)
            pending = self._engine.pending(reader)
        return IndexStatus(
            path=str(self.path),
            documents=moment.documents,
            added=moment.documents - (manifest.documents - removed),
            removed=removed,
            created=manifest.created,
            changed=moment.at,
            encoder=manifest.encoder,
            fingerprint=manifest.fingerprint,
            base_encoder=manifest.base_encoder,
            fitted_documents=manifest.fitted_documents,
            dim=manifest.dim,
            engine=self._engine_builder.engine,
            dtype=manifest.dtype,
            pending=pending,
            tree_levels=tree.hierarchy.depth if tree else 0,
            bytes=size_on_disk(self.path),
            format=manifest.format,
        )

    def drift(self, seed: int = 0) -> Drift:
        """Tell whether it is time to retrain: documents that came later beside the first ones; see `hce.index.drift`.

        Takes seconds, and all vectors in memory; loads the encoder.
        """
        tree = self.tree
        if tree is None or tree.hierarchy.depth < 2:
            return Drift("unknown", ("the index has no tree to compare by; index with a trained model to have one",))
        with self._store.reading() as reader:
            numbers, vectors = reader.vectors()
            trained = ModelFacts.find(self.path / IN_AN_INDEX)
            held_out = reader.present(trained.held_out if trained else []).values()

            def texts(rows: np.ndarray) -> list[str]:
                documents = reader.documents(numbers[rows].tolist())
                return [documents[number].full_text for number in numbers[rows].tolist()]

            return measure_drift(
                tree.hierarchy,
                _places(tree.numbers, numbers),
                vectors,
                numbers > self.manifest.documents,
                _places(
                    np.sort([number for number, _ in held_out if number <= self.manifest.documents]).astype(np.int64),
                    numbers,
                ),
                texts,
                self._for_documents.encode,
                self._for_documents.get().unknown_share,
                seed,
            )

    def rebuild(self, engine: str | None = None, dtype: str | None = None, *, refit: bool = True) -> None:
        """Make all that is derived anew from the documents there are now: the tree, if there is one, and the engine.

        Also gives the space of removed documents back, and forgets what only earlier snapshots need. The documents stay
        as they are. So does the encoder, unless it is a table that was fitted to less than a quarter of the documents
        there are now: it is fitted to all of them, and all are encoded anew, at one stroke. Of an index of format 1,
        whose long documents were read from the beginning only, these are read in passages now.

        Args:
            engine: another engine from now on.
            dtype: what the engine keeps vectors in from now on.
            refit: whether a table may be fitted anew. An encoder that was trained, or given, never is.

        Raises:
            InputError: no such engine or dtype, or (`WriterBusyError`) someone else is writing.
        """
        if engine is not None and engine not in ENGINES:
            raise InputError(f"engine {engine!r}: choose one of {', '.join(ENGINES)}")
        codec_of(dtype or self.manifest.dtype)
        self._store.compact()
        window = self._read_in_passages()
        if refit and self.status().has_outgrown_its_table:
            self._refit()
        with self._store.writing() as writer:  # no document is written; it keeps others from writing
            writer.add_checksums()
            known = replace(Manifest.read(self.path), refit=None)  # which another process may have changed
            self._adopt(known)
            delete_other_trees(self.path, known.hierarchy)
            grown = known.hierarchy and regrow_tree(self.path, known.hierarchy, writer)
            engine = engine or (known.engine if known.engine in ENGINES else self._engine_builder.engine)
            manifest = replace(known, engine=engine, dtype=dtype or known.dtype, hierarchy=grown)
            manifest = replace(manifest, window=window, format=FORMAT)
            manifest.write(self.path)
            self._adopt(manifest)
            delete_other_encoders(self.path, manifest.encoder_folder)
            self._engine.rebuild(writer, self._new_engine_builder(manifest.engine, manifest.dtype))
            if writer.has_passages():
                self._passages.rebuild(writer, self._new_passages_builder())
            self._words.rebuild(writer, WordsBuilder(manifest.language))
            writer.forget(manifest.documents)
            delete_other_trees(self.path, grown)

    def _refit(self) -> None:
        """Fit the table to all documents and encode them anew; the commit to the store decides between old and new."""
        with self._store.writing() as writer:
            known = replace(Manifest.read(self.path, writer), refit=None)
            documents = [entry.document for entry in writer.entries()]
            encoder = Encoder.for_corpus("static", Corpus.from_documents(documents))
            if (encoder.dim, encoder.window) != (known.dim, known.window):
                logger.warning("%s: its table is not that of this version, and was not fitted anew", self.path)
                return
            with progress_bar("encoding anew", len(documents), "documents", show=False) as advance:
                encode_all_anew(writer, encoder.encode, Cutter(encoder), advance)
            change, folder = writer.next.change, f"{ENCODER_FOLDER}-{writer.next.change}"
            shutil.rmtree(self.path / folder, ignore_errors=True)
            encoder.save(self.path / folder)
            refit = Refit(
                *writer.next,
                encoder=encoder.name,
                fingerprint=encoder.fingerprint,
                encoder_files=file_stamps(self.path / folder),
                encoder_folder=folder,
                fitted_documents=len(documents),
                hierarchy=known.hierarchy and grow_tree(self.path, f"{FOLDER}-{change}", writer),
            )
            known.before_refit(refit).write(self.path)
            writer.forget_all(known.documents)
        manifest = Manifest.read(self.path)
        manifest.write(self.path)
        self._adopt(manifest)

    def _adopt(self, manifest: Manifest, stamp: tuple[int, int] | None = None) -> None:
        """Go by another manifest of this index from now on, and by another encoder where it names one."""
        if manifest.fingerprint != self.manifest.fingerprint:
            self._for_queries, self._for_documents = (CarriedEncoder(self.path, manifest) for _ in range(2))
            self._cutter = None
        self.manifest, self._tree = manifest, None
        self._stamp = None if manifest.refit else stamp

    def _keeps_up(self, reader: Reader) -> bool:
        """Take over what another process has refitted; False where a reader still sees the vectors from before."""
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

    # ------------------------------------------------------------------------------------------------- repair

    def derived(self, reader: Reader) -> list[Live[Any]]:
        """Return the parts that are derived from the store; see `hce.index.check`."""
        return [self._engine, *([self._passages] if reader.has_passages() else []), self._words]

    def reindex(self) -> None:
        """Have SQLite make its own indexes anew from its tables, where they were damaged."""
        with self._store.writing() as writer:
            writer.reindex()

    def recount(self) -> None:
        """Write down anew how many documents there are, and which were removed, where that was damaged."""
        with self._store.writing() as writer:
            writer.recount(self.manifest.documents)

    def encode_anew(self, numbers: Sequence[int], progress: bool = False) -> None:
        """Put documents in again, under new numbers, with vectors made anew of their texts; all or none."""
        with self._store.writing() as writer:
            self._keeps_up(writer)
            documents = list(writer.documents(numbers).values())
            writer.delete(numbers)
            with progress_bar("encoding anew", len(documents), "documents", show=progress) as advance:
                insert_documents(
                    writer, chunks_of([documents]), self._encode_documents, self._document_cutter(), advance
                )

    # ------------------------------------------------------------------------------------------------- internals

    @contextmanager
    def _writing(self, batches: list[Sequence[Document]], progress: bool) -> Iterator[tuple[Writer, Any]]:
        with (
            self._store.writing() as writer,
            progress_bar("adding", sum(map(len, batches)), "documents", show=progress) as advance,
        ):
            self._keeps_up(writer)
            yield writer, advance

    def _encode_documents(self, texts: list[str]) -> np.ndarray:
        return self._for_documents.encode(texts, "document")

    def _document_cutter(self) -> Cutter | None:
        """Return what cuts long documents; None in an index of format 1, which an earlier version may open too."""
        if self._cutter is None and Manifest.read(self.path).window is not None:  # another process may have rebuilt it
            self._cutter = Cutter(self._for_documents.get())
        return self._cutter

    def _read_in_passages(self) -> int:
        """Have long documents read in passages where they are not yet; return the window."""
        known = Manifest.read(self.path)
        if known.window is not None:
            return known.window
        cutter = Cutter(self._for_documents.get())
        with self._store.writing() as writer:
            # From here on an earlier version, which knows nothing of passages, does not open the index.
            replace(Manifest.read(self.path), format=FORMAT).write(self.path)
            cut_documents(writer, self._encode_documents, cutter)
        return cutter.window

    def _engine_in_use(self) -> str:
        """Return the engine that the manifest names, or another where this version does not have that one any more."""
        named = self.manifest.engine
        with self._store.reading() as reader:
            chosen = named if named in ENGINES else engine_for(reader.moment().documents)
        if chosen != named:
            logger.warning(
                "%s was made with the engine %s, which is no more; %s searches in its place, and "
                "'hce rebuild %s --engine %s' makes that permanent",
                *(self.path, named, chosen, self.path, chosen),
            )
        return chosen

    @property
    def _engine_builder(self) -> EngineBuilder:
        """How the present engine is built."""
        return cast(EngineBuilder, self._engine.builder)

    def _new_engine_builder(self, engine: str, dtype: str) -> EngineBuilder:
        # Not by a method: an index that refers to itself would keep its files open until the garbage is collected.
        return EngineBuilder(engine, dtype, self.manifest.dim, partial(load_tree, self.path))

    def _new_passages_builder(self) -> PassagesBuilder:
        present = self._engine_builder
        return PassagesBuilder(present.engine, present.dtype, present.dim)


@dataclass(frozen=True)
class InMode:
    """An index that is searched in one mode, as `evaluate` needs it."""

    index: Index
    mode: SearchMode

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Find the k best documents of each query, best first."""
        return self.index.search(queries, k, mode=self.mode)


class _Ranked(NamedTuple):
    """Documents in order, and by document the number of the passage that was nearest; 0 is its own vector."""

    fused: Fused
    passages: dict[int, int]

    def found_by(self) -> dict[int, int]:
        """Return the number of the passage that each document was found by; 0 is the document as a whole."""
        found = {}
        for number, meaning, words, passage in zip(*map(np.ndarray.tolist, self.fused), strict=True):
            by_meaning = self.passages.get(number, 0)
            found[number] = (passage or by_meaning) if words > meaning else (by_meaning or passage)
        return found


class _NearestToOne(NamedTuple):
    """The documents nearest to one query by meaning.

    Attributes:
        reader: of the moment.
        engine: of the vectors of all documents.
        query: its vector, of shape (n,).
        numbers: of the documents, best first, of shape (m,).
        cosines: of these, of shape (m,).
        passages: the number of the passage that was nearest, by document; 0 is the document's own vector.
    """

    reader: Reader
    engine: Live[Engine]
    query: np.ndarray
    numbers: np.ndarray
    cosines: np.ndarray
    passages: dict[int, int]

    @classmethod
    def of(
        cls,
        reader: Reader,
        engine: Live[Engine],
        query: np.ndarray,
        numbers: np.ndarray,
        scores: np.ndarray,
        passages: np.ndarray,
    ) -> _NearestToOne:
        """Take one row of what was found, without the places that nothing was found for."""
        there = numbers >= 0
        by_document = dict(zip(numbers[there].tolist(), passages[there].tolist(), strict=True))
        return cls(reader, engine, query, numbers[there], scores[there], by_document)

    def cosines_at(self, numbers: np.ndarray) -> np.ndarray:
        """Return the cosine of each of some other documents, of a long one that of its nearest passage; (m,)."""
        cosines = self.engine.use(self.reader, lambda engine: engine.scores(self.query, numbers))
        if cosines is None:  # the engine has gone on to a later moment, and the store still knows this one
            cosines = self.reader.vectors_at(numbers) @ self.query
        if not len(numbers) or not self.reader.has_passages():
            return cosines
        further = self.reader.passages_of(numbers.tolist())
        nearer = further.vectors @ self.query
        rows = {number: row for row, number in enumerate(numbers.tolist())}
        for passage in np.argsort(nearer, kind="stable").tolist():  # the nearest one last, which stays
            document = int(further.documents[passage])
            if nearer[passage] > cosines[rows[document]]:
                cosines[rows[document]] = nearer[passage]
                self.passages[document] = int(further.numbers[passage])
        return cosines


def _with_passages(reader: Reader, hits: list[Hit], passages: dict[int, int]) -> list[Hit]:
    """Tell of each hit that was found by a passage where that stands."""
    places = reader.places(filter(None, (passages.get(hit.number) for hit in hits)))
    found = [places.get(passages.get(hit.number, 0)) for hit in hits]
    return [hit._replace(passage=place and _in_text(hit, place)) for hit, place in zip(hits, found, strict=True)]


def _in_text(hit: Hit, place: Passage) -> Passage:
    """Turn a place in the full text of a document, which begins with the title, into one in its text."""
    joined = f"{hit.title} {hit.text}"
    before = len(hit.title) + 1 - (len(joined) - len(joined.lstrip()))  # `full_text` has no white space at its ends
    start, stop = (min(max(place - before, 0), len(hit.text)) for place in place)
    return Passage(start, stop)


def _check_k(k: int) -> None:
    if isinstance(k, bool) or not isinstance(k, int | np.integer):
        raise InputError(f"k = {k!r}: give a whole number")
    if k < 1:
        raise InputError(f"k = {k}: ask for 1 hit or more")


def _checked_queries(queries: str | Sequence[str]) -> list[str]:
    """Return the texts to look for; of other things, say what they are."""
    if not isinstance(queries, Iterable) or isinstance(queries, bytes):
        raise InputError(f"a query is a text or a list of texts, not a {type(queries).__name__}")
    texts = [queries] if isinstance(queries, str) else list(queries)
    for text in texts:
        if not isinstance(text, str):
            raise InputError(f"a query is a text, not a {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError(f"query {text!r} holds half a surrogate pair; remove it") from None
        if not text.strip():
            raise InputError("the query is empty; write what to look for")
    return texts


def _checked_vectors(vectors: np.ndarray, dim: int) -> np.ndarray:
    """Return vectors of queries as an array of shape (Q, n), float32; of other things, say what they are."""
    try:
        rows = np.ascontiguousarray(vectors, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise InputError(f"vectors of queries are an array of numbers, not a {type(vectors).__name__}") from error
    if rows.ndim != 2 or np.ndim(vectors) != 2 or rows.shape[1] != dim:
        raise InputError(f"vectors of queries are of shape (queries, {dim}) in this index, not {np.shape(vectors)}")
    if not np.isfinite(rows).all():
        raise InputError("the vector of a query holds NaN or infinity; encode it again")
    return rows


def _by_meaning(found: _NearestToOne) -> Fused:
    nothing = np.zeros(len(found.numbers))
    return Fused(found.numbers, found.cosines, nothing, nothing.astype(np.int64))


def _by_words(found: Matches) -> _Ranked:
    return _Ranked(Fused(found.numbers, np.zeros(len(found.numbers)), found.scores, found.passages), {})


def _places(wanted: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Find where each number stands among rising `numbers`; −1 where it does not."""
    places = np.minimum(np.searchsorted(numbers, wanted), max(len(numbers) - 1, 0))
    return np.where(numbers[places] == wanted, places, -1) if len(numbers) else np.full(len(wanted), -1)
