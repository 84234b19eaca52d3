"""Create an index, switch it to another encoder, and rebuild its derived parts.

A new folder appears once documents, vectors and tree are in it. The engine is built there afterwards, so if that
fails, no encoded vector is lost. If several processes work together (`hce.processes`), each encodes a part
of the documents and helps to grow the tree; the first one does the rest.

A reindexing writes the new encoder's vectors into the store next to the active ones, some documents at a time, so that
others can write in between. Then it makes a tree and snapshots. One short write comes last: it encodes the few
documents that came meanwhile, and activates the new vectors. A kill leaves the index as it was before that write or
after it, and the same call resumes. The earlier vectors stay until the index is rebuilt. Activating them
again encodes only the documents that came since.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from hce.data.corpus import Corpus
from hce.data.text import Document, checked_language, warn_of_language
from hce.encoding.corpus_vectors import encode_corpus
from hce.encoding.encoder import Encoder
from hce.encoding.reranker import TokenSpace
from hce.errors import FormatError, HceError, InputError, WriterBusyError
from hce.files import (
    check_tree,
    delete_folder,
    delete_whole,
    held_alone,
    is_folder,
    new_folder,
    released,
    require_new,
    unfinished,
)
from hce.index.derived import Derived, home_of
from hce.index.manifest import ENCODER_FOLDER, Manifest, StandbyEncoder, delete_other_folders, file_stamps
from hce.index.ranking import find_thresholds
from hce.index.state import IndexEncoder, IndexState
from hce.index.store import Store
from hce.index.tables import STORE_FILE, CutPassages, Reader, Writer, now
from hce.index.token_codes import TokenCodes, encode_keeping_tokens, read_all_tokens
from hce.index.tree import FOLDER, NumberedHierarchy, grow_named_tree, grow_tree, regrow_tree
from hce.index.writing import DOCUMENTS_AT_ONCE, Cutter, LongDocuments, read_passages, shared_vectors
from hce.memory import index_needs, require_memory
from hce.processes import (
    is_first_process,
    process_count,
    process_rank,
    require_alike,
    require_shared,
    take_weights_of_the_first,
    wait_for_all,
    working_together,
)
from hce.progress import progress_bar
from hce.search.engine import ELSEWHERE, ENGINES, check_engine, wants_tree
from hce.search.fusion import Calibration
from hce.training.calibration import calibrate_unlabeled, usual_shares
from hce.training.model_folder import IN_AN_INDEX, ModelFacts, keep_facts, trained_tree
from hce.tree.hierarchy import Hierarchy

logger = logging.getLogger(__name__)

HierarchyChoice = Hierarchy | Literal["grow"] | None


@dataclass(frozen=True)
class KnownEncoder:
    """The encoder of a new index, and the facts of its training."""

    encoder: Encoder
    fingerprint: str  # kept here because computing it takes a while
    folder: Path | None = None  # the folder of the model that `hce train` wrote, if any
    facts: ModelFacts | None = None  # what that folder records about the training
    fitted_documents: int | None = None  # how many documents a table was just fitted to; None without a fit

    @classmethod
    def load(
        cls,
        encoder: Encoder | str | Path,
        corpus: Corpus,
        *,
        device: torch.device | None = None,
        progress: bool = False,
    ) -> KnownEncoder:
        """Load an encoder by name, or use the one given; find the facts of its training."""
        loaded = encoder
        if not isinstance(loaded, Encoder):
            loaded = Encoder.for_corpus(loaded, corpus, device=device, progress=progress)
            take_weights_of_the_first(loaded.model.parameters())
        folder, fingerprint = Path(loaded.name), loaded.fingerprint
        facts = ModelFacts.find(folder)
        if facts is None or facts.fingerprint != fingerprint:
            fitted_here = not isinstance(encoder, Encoder) and str(encoder) == "static"
            return cls(loaded, fingerprint, fitted_documents=len(corpus) if fitted_here else None)
        return cls(loaded, fingerprint, folder, facts)

    @property
    def base(self) -> str | None:
        """The encoder that training began with, if this one was trained."""
        return None if self.facts is None else self.facts.base_encoder

    def shares(self, corpus: Corpus) -> Calibration | None:
        """Return the shares that training chose, by labels or on this corpus; else None."""
        if self.facts is None:
            return None
        if self.facts.calibration is None:  # 0.2.0 chose only the share of words, by labels
            share = self.facts.words_share
            return None if share is None else Calibration(usual_shares(self.encoder)._replace(words=share), "labeled")
        chosen = Calibration.read(self.facts.calibration)
        is_same = self.facts.corpus["fingerprint"] == corpus.fingerprint
        return chosen if is_same or chosen.kind == "labeled" else None

    def save(self, index_folder: Path, suffix: str = "") -> dict[str, Any]:
        """Save the encoder and the facts of its training; return fields of a manifest."""
        folder = index_folder / f"{ENCODER_FOLDER}{suffix}"
        self.encoder.save(folder)
        if self.folder is not None:
            keep_facts(self.folder, index_folder / f"{IN_AN_INDEX}{suffix}")
        return {
            "encoder": self.encoder.name,
            "fingerprint": self.fingerprint,
            "dim": self.encoder.dim,
            "window": self.encoder.window,
            "encoder_files": file_stamps(folder),
            "encoder_folder": folder.name,
            "base_encoder": self.base,
            "fitted_documents": self.fitted_documents,
        }


def create_index(
    path: str | Path,
    documents: Corpus | Iterable[Document],
    encoder: Encoder | str | Path,
    hierarchy: HierarchyChoice,
    *,
    engine: str,
    at: str | None = None,
    language: str = "english",
    words_share: float | None = None,
    memory: int | None = None,
    tokens: bool = True,
    device: torch.device | None = None,
    vectors: np.ndarray | None = None,
    calibration: Calibration | None = None,
    progress: bool,
) -> None:
    """Encode, grow a tree if needed, write all but the engine; see `Index.create`.

    Further arguments: `memory` limits the bytes to use, now and in later searches. An encoder given by name
    computes on `device`. `vectors` and `calibration` are as in `Index.temporary`.
    """
    path, progress = Path(path), progress and is_first_process()
    require_new(path)
    check_tree(unfinished(path))
    claim_place(path, engine, at)
    if not (hierarchy is None or hierarchy == "grow" or isinstance(hierarchy, Hierarchy)):
        raise InputError(f"hierarchy {hierarchy!r}: give a Hierarchy, 'grow', or None")
    checked_language(language)
    checked_share(words_share)
    corpus = documents if isinstance(documents, Corpus) else Corpus.from_documents(documents)
    start = KnownEncoder.load(encoder, corpus, device=device, progress=progress)
    if process_count() > 1:
        require_alike({"corpus": corpus.fingerprint, "encoder": start.fingerprint, "path": str(path.absolute())})
        require_shared(path.absolute().parent)
    warn_of_language(corpus, start.base or start.encoder.name, language)
    draft = _Draft(unfinished(path), start, corpus, progress)
    keep_within(memory, len(draft.long.corpus), start.encoder.dim, engine)
    codes = draft.token_codes() if tokens and engine not in ELSEWHERE else None
    vectors = draft.vectors(vectors, codes)
    own = vectors[: len(corpus)]  # without those of passages
    wait_for_all()
    with released(vectors):
        tree = draft.tree("grow" if hierarchy is None and wants_tree(engine, len(corpus)) else hierarchy, own)
        if not is_first_process():
            return
        if codes is not None:
            codes.take_in_shares()
        chosen = calibration or start.shares(corpus) or _calibrated(corpus, start.encoder, own, language, codes)
        store = draft.filled_store(vectors)
    with new_folder(path) as folder:
        if tree is not None:
            NumberedHierarchy(tree, np.arange(1, len(corpus) + 1)).save(folder / FOLDER)
        manifest = Manifest(
            **start.save(folder),
            created=now(),
            documents=len(corpus),
            corpus={"name": corpus.name, "fingerprint": corpus.fingerprint},
            fields=corpus.reading.fields or None,
            engine=engine,
            engine_at=at,
            hierarchy=FOLDER if tree else None,
            language=language,
            words_share=chosen.shares.words if words_share is None else words_share,
            tokens_share=chosen.shares.tokens,
            shares=chosen.as_dict() if words_share is None else None,
        )
        for file in store.iterdir():
            file.replace(folder / file.name)
        if codes is not None:
            codes.folder.replace(folder / manifest.folder_of("tokens"))
        manifest.write(folder)
    del vectors, own  # they may map a file that is deleted next
    delete_whole(unfinished(path))


class _Draft:
    """The parts of a new index in an unfinished folder; each method continues what a killed run left."""

    def __init__(self, folder: Path, start: KnownEncoder, corpus: Corpus, progress: bool) -> None:
        self.start, self.corpus, self.progress = start, corpus, progress
        self.long = LongDocuments(corpus, Cutter(start.encoder), progress=progress)
        # Named after encoder and corpus, so that a run resumes only its own vectors.
        self.place = folder / f"{start.fingerprint[:12]}-{self.long.corpus.fingerprint[:12]}"

    def token_codes(self) -> TokenCodes | None:
        """Return the token codes, new or continued; None if the encoder has no tokens."""
        place = self.place.with_name(f"{self.place.name}-tokens")
        if self.start.encoder.has_states and is_first_process() and TokenCodes.find(place) is None:
            delete_whole(place)
            space = TokenSpace.fit(self.start.encoder, self.corpus, progress=self.progress)
            if space is not None:
                TokenCodes.create(place, space)
        wait_for_all()
        return TokenCodes(place, process_rank()) if is_folder(place) else None

    def vectors(self, known: np.ndarray | None, codes: TokenCodes | None) -> np.ndarray:
        """Encode documents and passages; `known` may hold the documents' vectors."""
        corpus, encoder = self.long.corpus, self.start.encoder
        if known is None or codes is not None:
            with codes.filling() if codes else nullcontext() as on_tokens:
                return encode_corpus(encoder, corpus, self.place, progress=self.progress, on_tokens=on_tokens)
        further = corpus.only(np.arange(len(known), len(corpus)))
        return np.concatenate([known, encode_corpus(encoder, further)]) if len(further) else known

    def tree(self, choice: HierarchyChoice, vectors: np.ndarray) -> Hierarchy | None:
        """Return the given tree, the trained one, or one grown now or by a killed run."""
        if isinstance(choice, Hierarchy):
            if len(choice) != len(self.corpus):
                raise InputError(f"the hierarchy is of {len(choice):,} documents, the corpus has {len(self.corpus):,}")
            if choice.levels and choice.levels[0].centroids.shape[1] != self.start.encoder.dim:
                raise InputError("the vectors of the hierarchy have another length than this encoder's")
            return choice if choice.levels else None
        trained = None if self.start.folder is None else trained_tree(self.start.folder, self.corpus)
        if trained is not None or choice is None:
            return trained
        place, kept = self.place.with_name(f"{self.place.name}-tree"), None
        with suppress(FormatError):
            kept = Hierarchy.load(place)
        wait_for_all()  # so that every process has looked before the first one writes
        if kept is not None:
            return kept
        with working_together():
            tree = grow_named_tree(vectors, self.corpus.texts(), self.start.encoder.device, progress=self.progress)
        if tree is not None and is_first_process():
            delete_whole(place)
            tree.save(place)
        return tree

    def filled_store(self, vectors: np.ndarray) -> Path:
        """Write the documents to a store, and return its folder."""
        place = self.place.with_name(f"{self.place.name}-store")
        store = _begun_store(place, vectors.shape[1])
        alone = held_alone(place, f"{place}: another process is writing the same index; wait for it")
        with alone, progress_bar("writing", len(self.corpus), "documents", show=self.progress) as advance:
            with store.reading() as reader:
                done = reader.moment().documents
            advance(done)
            for first in range(done, len(self.corpus), DOCUMENTS_AT_ONCE):
                chunk = self.corpus[first : first + DOCUMENTS_AT_ONCE]
                positions = range(first, first + len(chunk))
                with store.writing() as writer:
                    # Equal texts share a vector: rounding can differ between batches.
                    texts = [document.full_text for document in chunk]
                    rows = dict(reversed([*zip(texts, vectors[first : first + len(chunk)], strict=True)]))
                    rows |= writer.vectors_of(texts)
                    shared = np.stack([rows[text] for text in texts])
                    writer.insert(chunk, shared, self.long.passages_of(positions, vectors))
                advance(len(chunk))
        store.close()
        return place


def _begun_store(place: Path, dim: int) -> Store:
    """Open the store that a killed run left, or create a new one."""
    if (place / STORE_FILE).is_file():
        store = Store(place, dim)
        with suppress(HceError), store.reading() as reader:
            reader.moment()
            return store
        store.close()
    delete_whole(place)
    with new_folder(place) as folder:
        Store.create(folder, dim).close()
    return Store(place, dim)


def claim_place(path: Path, engine: str, at: str | None, *, named_by_user: bool = True) -> None:
    """Check the engine and its address; fail if another index owns that address."""
    check_engine(engine, at)
    if at is not None:
        home_of(engine).claim_place(at, path, named_by_user=named_by_user)


def keep_within(memory: int | None, documents: int, dim: int, engine: str) -> None:
    """Fail if an index of this size needs more than the memory limit, if any."""
    if memory is not None:
        needs = index_needs(documents, dim, engine)
        logger.info("%s", require_memory(needs, memory, "allow that much, or index fewer documents"))


def checked_share(words_share: float | None) -> None:
    """Fail unless a value can be the share of words in a hybrid search."""
    is_number = isinstance(words_share, int | float) and not isinstance(words_share, bool)
    if words_share is not None and not (is_number and 0 <= words_share <= 1):
        raise InputError(f"words_share {words_share}: give a number from 0 (meaning alone) to 1 (words alone)")


def _calibrated(
    corpus: Corpus, encoder: Encoder, vectors: np.ndarray, language: str, codes: TokenCodes | None
) -> Calibration:
    """Choose how much words and tokens count, by questions cut out of the documents."""
    space, known = (codes.space, codes.get) if codes else (None, None)
    return calibrate_unlabeled(corpus, encoder, vectors, language, space=space, known=known)


# ------------------------------------------------------------------------------------------------- another encoder


ENCODED_AT_ONCE = 1024
FEW = 64  # others wait while the last write encodes up to this many documents; on the last attempt, any number
ROUNDS = 8  # attempts to catch up with other writers, before they have to wait


def reindex(
    store: Store, encoder: Encoder | str | Path, words_share: float | None = None, *, progress: bool = False
) -> Manifest | None:
    """Switch to another encoder; return the manifest, or None if it was active."""
    checked_share(words_share)
    with _alone(store):
        other = _begin(store, encoder)
        if other is None:
            return None
        if words_share is not None:
            other = replace(other, words_share=words_share, shares=None)
        return _Reindexing(store, other).finish(progress, calibrates=words_share is None and other.shares is None)


def undo(store: Store, *, progress: bool = False) -> Manifest:
    """Activate the encoder that was replaced last; InputError if none is kept."""
    with _alone(store):
        other = Manifest.read(store.path.parent).standby()
        if other is None or not other.was_in_force:
            raise InputError(
                f"{store.path.parent}: no earlier encoder is kept here (a rebuild deletes it); reindex with it by name"
            )
        return _Reindexing(store, other).finish(progress)


def _alone(store: Store) -> AbstractContextManager[None]:
    index_folder = store.path.parent
    return held_alone(index_folder, f"{index_folder}: another process is reindexing it; wait until it is done")


@contextmanager
def _writing(store: Store) -> Iterator[Writer]:
    """Open a transaction, and wait for other writers as long as it takes."""
    with ExitStack() as stack:
        while True:
            try:
                writer = stack.enter_context(store.writing())
                break
            except WriterBusyError:
                logger.debug("waiting for another process to finish its write")
        yield writer


def _begin(store: Store, encoder: Encoder | str | Path) -> StandbyEncoder | None:
    """Return `encoder` as the standby encoder, new or found; None if it is active."""
    index_folder = store.path.parent
    manifest = Manifest.read(index_folder)
    other = manifest.standby()
    if other is not None and other.spec == str(encoder) == "static":
        return other  # fitting the table again, to other documents, would give another encoder
    with store.reading() as reader:
        entries = [(entry.number, entry.document) for entry in reader.entries()]
    if not entries:
        raise InputError(f"{index_folder}: it has no documents to encode; index again with the other encoder")
    corpus = Corpus.from_documents([document for _, document in entries], name=index_folder.absolute().name)
    start = KnownEncoder.load(encoder, corpus)
    if start.fingerprint == manifest.fingerprint:
        return None
    if other is not None and other.fingerprint == start.fingerprint:
        return other
    warn_of_language(corpus, start.base or start.encoder.name, manifest.language)
    return _make_standby(store, start, str(encoder), np.array([number for number, _ in entries], np.int64), corpus)


def _make_standby(store: Store, start: KnownEncoder, spec: str, numbers: np.ndarray, corpus: Corpus) -> StandbyEncoder:
    """Create the standby tables; write the encoder, its facts and its tree."""
    index_folder, space = store.path.parent, TokenSpace.fit(start.encoder, corpus)
    with _writing(store) as writer:
        manifest = replace(Manifest.settled(index_folder, writer), beside=None)
        manifest.write(index_folder)  # the manifest must not name tables that the next lines drop
        delete_other_folders(index_folder, manifest)
        writer.make_standby()
        suffixes = (f"-{number}" for number in count(writer.next.change))
        suffix = next(each for each in suffixes if not (index_folder / f"{ENCODER_FOLDER}{each}").exists())
    with _writing(store) as writer:  # writes nothing, but keeps a rebuild from deleting the new folders
        saved = start.save(index_folder, suffix)
        tree = None if start.folder is None else trained_tree(start.folder, corpus)
        if tree is not None:
            NumberedHierarchy(tree, numbers).save(index_folder / f"{FOLDER}{suffix}")
        if space is not None and Manifest.read(index_folder, writer).engine not in ELSEWHERE:
            TokenCodes.create(index_folder / f"tokens{suffix}", space)
        chosen = start.shares(corpus) or Calibration(usual_shares(start.encoder))
        other = StandbyEncoder(
            was_in_force=False,
            spec=spec,
            words_share=chosen.shares.words,
            tokens_share=chosen.shares.tokens,
            shares=chosen.as_dict() if chosen.kind else None,
            hierarchy=f"{FOLDER}{suffix}" if tree is not None else None,
            familiar=int(numbers.max()),
            **saved,
        )
        replace(Manifest.settled(index_folder, writer), beside=asdict(other)).write(index_folder)
    return other


class _Reindexing:
    """One reindexing: encodes documents, makes tree and snapshots, and activates the standby encoder."""

    def __init__(self, store: Store, other: StandbyEncoder) -> None:
        self.store = store
        self.other = other
        self.folder = store.path.parent
        carried = IndexEncoder(self.folder, other)
        self._encoder, self._codes = carried.encoder(), TokenCodes.find(self.folder / other.folder_of("tokens"))
        self._encode, self._cutter = partial(encode_keeping_tokens, carried, self._codes), Cutter(self._encoder)

    def finish(self, progress: bool, *, calibrates: bool = False) -> Manifest:
        """Do the remaining steps, and return the new manifest."""
        self._catch_up(progress)
        if calibrates:
            self._calibrate()
        self._grow_tree()
        self._save_snapshots()
        for left in reversed(range(ROUNDS)):
            self._catch_up(progress=False)
            if self._switch(whatever_is_left=not left):
                break
        with _writing(self.store) as writer:  # writes nothing, but keeps others from writing a manifest
            manifest = Manifest.read(self.folder, writer)  # names the new encoder, because `_switch` has committed
            manifest.write(self.folder)
        return manifest

    def _catch_up(self, progress: bool) -> None:
        """Encode documents some at a time, so that others can write in between."""
        with self.store.reading() as reader:
            total, left = reader.moment().documents, reader.count_after(reader.last_standby() or 0)
        with progress_bar("encoding", total, "documents", show=progress) as advance:
            advance(total - left)
            while True:
                with self.store.reading() as reader:
                    some = self._next(reader)
                if some is None:
                    return
                with _writing(self.store) as writer:
                    writer.fill_standby(*some)
                advance(len(some[0]))

    def _next(self, reader: Reader) -> tuple[list[int], np.ndarray, dict[int, CutPassages]] | None:
        """Encode the next documents; return numbers, vectors, and passages by position."""
        entries = list(islice(reader.entries(after=reader.last_standby() or 0), ENCODED_AT_ONCE))
        if not entries:
            return None
        documents = [entry.document for entry in entries]
        vectors = shared_vectors([each.full_text for each in documents], {}, self._encode)
        return [entry.number for entry in entries], vectors, read_passages(documents, self._encode, self._cutter)

    def _calibrate(self) -> None:
        """Choose how much words and tokens count with the new vectors."""
        with self.store.reading_standby(self.other.dim) as reader:
            entries = list(reader.entries())
        corpus = Corpus.from_documents(entry.document for entry in entries)
        vectors, language = np.stack([entry.vector for entry in entries]), Manifest.read(self.folder).language
        chosen = _calibrated(corpus, self._encoder, vectors, language, self._codes)
        shares, kept = chosen.shares, chosen.as_dict()
        self.other = replace(self.other, words_share=shares.words, tokens_share=shares.tokens, shares=kept)

    def _grow_tree(self) -> None:
        """Grow a tree of the new vectors, if the index has one and the model does not."""
        if self.other.hierarchy is not None or Manifest.read(self.folder).hierarchy is None:
            return
        name: str | None = self.other.folder_of(FOLDER)
        if not is_folder(self.folder / str(name)):
            with self.store.reading_standby(self.other.dim) as reader:
                name = grow_tree(self.folder, str(name), reader)
        self.other = replace(self.other, hierarchy=name)

    def _save_snapshots(self) -> None:
        """Save snapshots for the new vectors, so that the next search only loads them.

        A snapshot needs a moment at which every document has a new vector. If others write all the time, there may be
        no such moment; then the first search builds the parts.
        """
        derived = Derived(self.store, Manifest.read(self.folder).with_active(self.other))
        for _ in range(ROUNDS):
            with self.store.reading_standby(self.other.dim) as reader:
                if reader.count_after(0) == reader.moment().documents:  # every document has a new vector
                    for part in derived.local_parts(reader):
                        part.save_snapshot(reader)
                    return
            self._catch_up(progress=False)

    def _switch(self, *, whatever_is_left: bool) -> bool:
        """Activate the new vectors, unless too many documents came meanwhile."""
        with _writing(self.store) as writer:
            if writer.count_after(writer.last_standby() or 0) > FEW and not whatever_is_left:
                return False
            while some := self._next(writer):
                writer.fill_standby(*some)
            # The manifest names both encoders and this write. The commit decides: without it, the manifest means the
            # old encoder; with it, the new one. So a kill in between does no harm.
            manifest = replace(Manifest.settled(self.folder, writer), beside=asdict(self.other))
            replace(manifest, switch=writer.next._asdict()).write(self.folder)
            writer.swap_standby(self.other.dim)
        return True


# ------------------------------------------------------------------------------------------------- rebuilding


def build_parts(state: IndexState) -> None:
    """Build engines and words with snapshots; find the thresholds of a good match."""
    with state.store.writing() as writer:  # writes nothing, but keeps others from writing
        state.keep_up(writer)
        state.derived.rebuild(writer, replace(state.manifest, engine=state.derived.engine_name))
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
    """Rebuild everything derived from the documents; see `Index.rebuild`."""
    path, before = state.path, state.manifest
    named, at = at is not None, at or (before.engine_at if engine in (None, before.engine) else None)
    claim_place(path, engine or state.derived.engine_name, at, named_by_user=named)
    if refit:
        _refit_table(state, progress)
    _give_up_earlier(state)
    state.store.compact()
    with state.store.writing() as writer:  # keeps others from writing, though no document changes
        known = Manifest.settled(path, writer)  # another process may have changed it
        state.adopt(known)
        delete_other_folders(path, known)
        grown = known.hierarchy and regrow_tree(path, known.hierarchy, writer, progress=progress)
        engine = engine or (known.engine if known.engine in (*ENGINES, *ELSEWHERE) else state.derived.engine_name)
        manifest = replace(known, engine=engine, engine_at=at, hierarchy=grown)
        _rebuild_tokens(state, writer, tokens and engine not in ELSEWHERE, progress)
        manifest.write(path)  # other processes notice the new file
        state.adopt(manifest)
        state.derived.rebuild(writer, manifest)
        _find_thresholds(state, writer)
        writer.forget(manifest.documents)
        delete_other_folders(path, manifest)
    if before.engine_at is not None and before.engine_at != at:
        home_of(before.engine).withdraw(before.engine_at, path)


def _refit_table(state: IndexState, progress: bool) -> None:
    """Fit the table again, unless a reindexing to another encoder is unfinished."""
    known = Manifest.read(state.path)
    other = known.standby()
    if other is not None and other.spec not in ("", "static"):
        return
    given = known.words_share if known.shares is None else None
    manifest = reindex(state.store, "static", given, progress=progress)
    if manifest is not None:
        state.adopt(manifest)


def _give_up_earlier(state: IndexState) -> None:
    """Delete the vectors of the encoder that the last reindexing replaced."""
    other = Manifest.read(state.path).standby()
    if other is None or not other.was_in_force:
        return
    with _alone(state.store), state.store.writing() as writer:
        known = Manifest.settled(state.path, writer)
        other = known.standby()
        if other is not None and other.was_in_force:
            replace(known, beside=None).write(state.path)
            writer.drop_standby()


def _rebuild_tokens(state: IndexState, writer: Writer, wanted: bool | None, progress: bool) -> None:
    """Make or delete tokens as `wanted`; if None, drop only those of deleted texts."""
    folder = state.path / state.manifest.folder_of("tokens")
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
