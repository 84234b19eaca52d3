"""Making an index: from a corpus and an encoder to a new folder that appears whole or not at all.

The folder appears as soon as documents, vectors and tree are in it. The engine, which is derived from them, is built
in its place afterwards: whatever happens to it, nothing that took long to encode is lost.

Of several processes that work together (`hce.hosts`) each encodes a share and takes part in growing the tree; the first
one does the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from hce.contained import check_tree
from hce.data.corpus import Corpus
from hce.data.documents import Document
from hce.data.terms import checked_language, warn_of_language
from hce.encoding.corpus_vectors import encode_corpus
from hce.encoding.encoder import Encoder
from hce.encoding.reranker import TokenSpace
from hce.errors import FormatError, HceError, InputError
from hce.files import delete_whole, held_alone, new_folder, released, require_new, unfinished
from hce.index.elsewhere import home_of
from hce.index.manifest import ENCODER_FOLDER, Manifest, file_stamps
from hce.index.numbered_tree import FOLDER, NumberedHierarchy, grow_named_tree
from hce.index.store import STORE_FILE, Store, Writer, now
from hce.index.token_codes import FOLDER as TOKENS_FOLDER
from hce.index.token_codes import TokenCodes, is_token_folder
from hce.index.writing import DOCUMENTS_AT_ONCE, Cutter, LongDocuments, shared_vectors
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
from hce.search.engine import ELSEWHERE, check_engine, wants_tree
from hce.search.shares import Calibration
from hce.training.calibration import calibrate_unlabeled, usual_shares
from hce.training.model_folder import IN_AN_INDEX, ModelFacts, keep_facts, trained_tree
from hce.tree.hierarchy import Hierarchy

logger = logging.getLogger(__name__)

HierarchyChoice = Hierarchy | Literal["grow"] | None


@dataclass(frozen=True)
class Start:
    """The encoder that an index is made with, and what is known of its training.

    Attributes:
        encoder: what encodes documents and queries.
        fingerprint: of the encoder; computing it takes a while.
        folder: what `hce train` wrote the encoder to, where it comes from such a folder.
        facts: what that folder tells of the training.
        fitted_documents: how many documents a table was fitted to here; None where none was.
    """

    encoder: Encoder
    fingerprint: str
    folder: Path | None = None
    facts: ModelFacts | None = None
    fitted_documents: int | None = None

    def shares(self, corpus: Corpus) -> Calibration | None:
        """Return the shares that training chose by labels or on this very corpus; None where there are none.

        Args:
            corpus: what is indexed.
        """
        if self.facts is None:
            return None
        if self.facts.calibration is None:  # 0.2.0 chose the share of words by labels, and nothing else
            share = self.facts.words_share
            return None if share is None else Calibration(usual_shares(self.encoder)._replace(words=share), "labeled")
        chosen = Calibration.read(self.facts.calibration)
        is_same = self.facts.corpus["fingerprint"] == corpus.fingerprint
        return chosen if is_same or chosen.kind == "labeled" else None


def start_from(
    encoder: Encoder | str | Path, corpus: Corpus, *, device: torch.device | None = None, progress: bool = False
) -> Start:
    """Load an encoder by its spec, or take one as it is given, and find out what is known of its training.

    Raises:
        InputError: there is no such encoder.
        FormatError: its hce.json is damaged.
    """
    loaded = encoder
    if not isinstance(loaded, Encoder):
        loaded = Encoder.for_corpus(loaded, corpus, device=device, progress=progress)
        take_weights_of_the_first(loaded.model.parameters())
    folder, fingerprint = Path(loaded.name), loaded.fingerprint
    facts = ModelFacts.find(folder)
    if facts is None or facts.fingerprint != fingerprint:
        fitted_here = not isinstance(encoder, Encoder) and str(encoder) == "static"
        return Start(loaded, fingerprint, fitted_documents=len(corpus) if fitted_here else None)
    return Start(loaded, fingerprint, folder, facts)


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
    """Encode, grow a tree if asked, and write all but the engine; `Index.create` says what the arguments are.

    Beyond these, `memory` is the most bytes to take, also by a later search. `device` is where an
    encoder that is named computes. `vectors` and `calibration` are as in `Index.temporary`.

    Raises:
        InputError: the folder is there already, an argument is not what it has to be, or other processes that work
            together with this one have other documents or another encoder.
        OutsideError: what an earlier run seems to have left holds a link, a pipe or a device.
    """
    path, progress = Path(path), progress and is_first_process()
    require_new(path)
    check_tree(unfinished(path))
    _check_choices(path, hierarchy, engine, at)
    checked_language(language)
    checked_share(words_share)
    corpus = documents if isinstance(documents, Corpus) else Corpus.from_documents(documents)
    start = start_from(encoder, corpus, device=device, progress=progress)
    if process_count() > 1:
        require_alike({"corpus": corpus.fingerprint, "encoder": start.fingerprint, "path": str(path.absolute())})
        require_shared(path.absolute().parent)
    warn_of_language(corpus, start.facts.base_encoder if start.facts else start.encoder.name, language)
    long = LongDocuments(corpus, Cutter(start.encoder), progress=progress)
    keep_within(memory, len(long.corpus), start.encoder.dim, engine)
    # Named after what is encoded, so that vectors of another corpus or encoder do not stand in the way.
    part = unfinished(path) / f"{start.fingerprint[:12]}-{long.corpus.fingerprint[:12]}"
    codes = None
    if tokens and engine not in ELSEWHERE:
        codes = _token_codes(part.with_name(f"{part.name}-tokens"), start.encoder, corpus, progress=progress)
    with codes.filling() if codes else nullcontext() as on_tokens:
        known = None if codes else vectors
        vectors = _vectors(known, long.corpus, start.encoder, part, progress=progress, on_tokens=on_tokens)
    wait_for_all()
    with released(vectors):
        wanted = "grow" if hierarchy is None and wants_tree(engine, len(corpus)) else hierarchy
        grown = part.with_name(f"{part.name}-tree")
        tree = _tree(wanted, start, corpus, vectors[: len(corpus)], grown, progress)
        if not is_first_process():
            return
        if codes is not None:
            codes.take_in_shares()
        chosen = calibration or _chosen(start, corpus, vectors[: len(corpus)], language, codes)
        filled = _filled_store(part.with_name(f"{part.name}-store"), corpus, vectors, long, progress)
    with new_folder(path) as folder:
        start.encoder.save(folder / ENCODER_FOLDER)
        if start.folder is not None:
            keep_facts(start.folder, folder / IN_AN_INDEX)
        if tree is not None:
            NumberedHierarchy(tree, np.arange(1, len(corpus) + 1)).save(folder / FOLDER)
        manifest = _manifest(corpus, start, folder, engine, FOLDER if tree else None)
        share = chosen.shares.words if words_share is None else words_share
        manifest = replace(manifest, language=language, words_share=share, engine_at=at)
        manifest = replace(manifest, tokens_share=chosen.shares.tokens)
        if words_share is None:
            manifest = replace(manifest, shares=chosen.as_dict())
        for file in filled.iterdir():
            file.replace(folder / file.name)
        if codes is not None:
            codes.folder.replace(folder / TOKENS_FOLDER)
        manifest.write(folder)
    del vectors  # a memory map of what is deleted next
    delete_whole(unfinished(path))


def _check_choices(path: Path, hierarchy: HierarchyChoice, engine: str, at: str | None) -> None:
    """Refuse an engine or a hierarchy that an index cannot have.

    Raises:
        InputError: it cannot have one of these.
    """
    check_engine(engine, at)
    if at is not None:
        home_of(engine).claim_place(at, path, named_by_user=True)
    if not (hierarchy is None or hierarchy == "grow" or isinstance(hierarchy, Hierarchy)):
        raise InputError(f"hierarchy {hierarchy!r}: give a Hierarchy, 'grow', or None")


def keep_within(memory: int | None, documents: int, dim: int, engine: str) -> None:
    """Fail if an index of so many documents does not fit into a bound, if there is one.

    Raises:
        InputError: the bound is too small.
    """
    if memory is not None:
        needs = index_needs(documents, dim, engine)
        logger.info("%s", require_memory(needs, memory, "give so much, or fewer documents"))


def _token_codes(place: Path, encoder: Encoder, corpus: Corpus, *, progress: bool) -> TokenCodes | None:
    """Return what a killed run has left of tokens, or a new place for them; None where the encoder tells of none."""
    if is_first_process() and TokenCodes.find(place) is None:
        delete_whole(place)
        space = TokenSpace.fit(encoder, corpus, progress=progress)
        if space is not None:
            TokenCodes.create(place, space)
    wait_for_all()
    return TokenCodes(place, process_rank()) if is_token_folder(place) else None


def checked_share(words_share: float | None) -> None:
    """Refuse what cannot be the share of words in a hybrid search.

    Raises:
        InputError: it is no number from 0 to 1.
    """
    is_number = isinstance(words_share, int | float) and not isinstance(words_share, bool)
    if words_share is not None and not (is_number and 0 <= words_share <= 1):
        raise InputError(f"words_share {words_share}: give a number from 0 (meaning alone) to 1 (words alone)")


def _vectors(known: np.ndarray | None, corpus: Corpus, encoder: Encoder, place: Path, **options: Any) -> np.ndarray:
    """Encode a corpus, but the first documents whose vectors are known."""
    if known is None:
        return encode_corpus(encoder, corpus, place, **options)
    further = corpus.only(np.arange(len(known), len(corpus)))
    return np.concatenate([known, encode_corpus(encoder, further)]) if len(further) else known


def _chosen(start: Start, corpus: Corpus, vectors: np.ndarray, language: str, codes: TokenCodes | None) -> Calibration:
    """Return what training chose for this corpus, or choose now how much words and tokens count."""
    return start.shares(corpus) or calibrate_unlabeled(
        *(corpus, start.encoder, vectors, language),
        space=codes.space if codes else None,
        known=codes.get if codes else None,
    )


def _tree(
    choice: HierarchyChoice, start: Start, corpus: Corpus, vectors: np.ndarray, place: Path, progress: bool
) -> Hierarchy | None:
    """Return the tree that is given, or was trained along with the encoder, or is asked for; None without any.

    One that is grown is kept in `place`, where a run that is continued finds it.
    """
    if isinstance(choice, Hierarchy):
        if len(choice) != len(corpus):
            raise InputError(f"the hierarchy is of {len(choice):,} documents, the corpus has {len(corpus):,}")
        if choice.levels and choice.levels[0].centroids.shape[1] != start.encoder.dim:
            raise InputError("the hierarchy is of vectors of another length than this encoder's")
        return choice if choice.levels else None
    trained = None if start.folder is None else trained_tree(start.folder, corpus)
    if trained is not None or choice is None:
        return trained
    kept = None
    with suppress(FormatError):
        kept = Hierarchy.load(place)
    wait_for_all()  # each has looked before the first one writes
    if kept is not None:
        return kept
    with working_together():
        tree = grow_named_tree(vectors, corpus.texts(), start.encoder.device, progress=progress)
    if tree is not None and is_first_process():
        delete_whole(place)
        tree.save(place)
    return tree


def _manifest(corpus: Corpus, start: Start, folder: Path, engine: str, hierarchy: str | None) -> Manifest:
    return Manifest(
        created=now(),
        documents=len(corpus),
        corpus={"name": corpus.name, "fingerprint": corpus.fingerprint},
        fields=corpus.reading.fields or None,
        encoder=start.encoder.name,
        fingerprint=start.fingerprint,
        dim=start.encoder.dim,
        window=start.encoder.window,
        encoder_files=file_stamps(folder / ENCODER_FOLDER),
        base_encoder=None if start.facts is None else start.facts.base_encoder,
        fitted_documents=start.fitted_documents,
        engine=engine,
        hierarchy=hierarchy,
    )


def _filled_store(place: Path, corpus: Corpus, vectors: np.ndarray, long: LongDocuments, progress: bool) -> Path:
    """Write all documents with their vectors, the first N rows, and long ones with their passages', into a folder.

    What a killed run has written there stays, and the next one goes on behind it.
    """
    store = _begun_store(place, vectors.shape[1])
    alone = held_alone(place, f"{place}: another process writes the same index; wait for it")
    with alone, progress_bar("writing", len(corpus), "documents", show=progress) as advance:
        with store.reading() as reader:
            done = reader.moment().documents
        advance(done)
        for first in range(done, len(corpus), DOCUMENTS_AT_ONCE):
            chunk = corpus[first : first + DOCUMENTS_AT_ONCE]
            positions = range(first, first + len(chunk))
            with store.writing() as writer:
                rows = _shared_rows(writer, chunk, vectors[first : first + len(chunk)])
                writer.insert(chunk, rows, long.passages_of(positions, vectors))
            advance(len(chunk))
    store.close()
    return place


def _begun_store(place: Path, dim: int) -> Store:
    """Open the store that a killed run has left, or make a new one."""
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


def _shared_rows(writer: Writer, chunk: Sequence[Document], rows: np.ndarray) -> np.ndarray:
    """Make the rows of equal texts the same; encoding in batches may have left them a rounding apart."""
    texts = [document.full_text for document in chunk]
    first = {text: row for row, text in reversed(list(enumerate(texts)))}
    return shared_vectors(texts, writer.vectors_of(texts), lambda fresh: rows[[first[text] for text in fresh]])
