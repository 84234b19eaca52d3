"""Reindexing: an index gets another encoder while it is searched and written to, and takes it up at one stroke.

The new encoder's vectors are put into the store beside those in force, some documents at a time, so that others write
in between; then its tree and its snapshots are made. Last comes one short write: it encodes the few documents that
came meanwhile, and lets the vectors in force and those beside them change places. What was in force stays beside, and
can be taken up again as fast, until the index is rebuilt.

Killed at any moment, the index is as it was before that write or after it, and the same call goes on where it was.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hce.contained import is_folder
from hce.data.corpus import Corpus
from hce.data.terms import warn_of_language
from hce.encoding.encoder import Encoder
from hce.encoding.tokens import TokenSpace
from hce.errors import InputError, WriterBusyError
from hce.files import held_alone
from hce.index.create import Start, checked_share, start_from
from hce.index.derived import Derived
from hce.index.manifest import ENCODER_FOLDER, Manifest, StandbyEncoder, delete_other_folders, file_stamps
from hce.index.numbered_tree import FOLDER, NumberedHierarchy, grow_tree
from hce.index.state import CarriedEncoder
from hce.index.store import CutPassages, Reader, Store, Writer
from hce.index.token_codes import TokenCodes, encode_keeping_tokens, token_folder
from hce.index.writing import Cutter, Encode, read_passages, shared_vectors
from hce.progress import progress_bar
from hce.search.engine import ELSEWHERE
from hce.search.shares import Calibration
from hce.training.calibration import calibrate_unlabeled, usual_shares
from hce.training.model_folder import IN_AN_INDEX, keep_facts, trained_tree

logger = logging.getLogger(__name__)

DOCUMENTS_AT_ONCE = 1024
FEW = 64  # documents that the last write may have to encode, while others wait
ROUNDS = 8  # of catching up with others who write; then they wait


def reindex(
    store: Store, encoder: Encoder | str | Path, words_share: float | None = None, *, progress: bool = False
) -> Manifest | None:
    """Give an index another encoder; `Index.reindex` says what the arguments are.

    Returns:
        The manifest that is in force from now on; None where the encoder was in force already.
    """
    checked_share(words_share)
    with _alone(store):
        other = _begin(store, encoder)
        if other is not None and words_share is not None:
            other = replace(other, words_share=words_share, shares=None)
        return None if other is None else _finish(store, other, progress, calibrates=words_share is None)


def undo(store: Store, *, progress: bool = False) -> Manifest:
    """Take up again what was in force before the last reindexing.

    Raises:
        InputError: there was none, or a rebuild has given it up since.
    """
    with _alone(store):
        other = Manifest.read(store.path.parent).other()
        if other is None or not other.was_in_force:
            raise InputError(
                f"{store.path.parent}: no earlier encoder is kept here (a rebuild gives it up); reindex with it by name"
            )
        return _finish(store, other, progress, calibrates=False)


def _alone(store: Store) -> AbstractContextManager[None]:
    index_folder = store.path.parent
    return held_alone(index_folder, f"{index_folder}: another process is reindexing it; wait until it is done")


# ------------------------------------------------------------------------------------------------- the beginning


def _begin(store: Store, encoder: Encoder | str | Path) -> StandbyEncoder | None:
    """Return what is to be put in force: what was begun earlier, or what is begun now; None where it is in force."""
    index_folder = store.path.parent
    manifest = Manifest.read(index_folder)
    other = manifest.other()
    if other is not None and other.spec == str(encoder) == "static":
        return other  # fitted to the documents that there were; fitted again, it would be another one
    with store.reading() as reader:
        entries = [(entry.number, entry.document) for entry in reader.entries()]
    if not entries:
        raise InputError(f"{index_folder}: it has no documents to encode anew; index anew with the other encoder")
    corpus = Corpus.from_documents([document for _, document in entries], name=index_folder.absolute().name)
    start = start_from(encoder, corpus)
    if start.fingerprint == manifest.fingerprint:
        return None
    if other is not None and other.fingerprint == start.fingerprint:
        return other
    warn_of_language(corpus, start.facts.base_encoder if start.facts else start.encoder.name, manifest.language)
    suffix = _make_room(store)
    chosen = start.shares(corpus) or Calibration(usual_shares(start.encoder))
    numbers = [number for number, _ in entries]
    space = TokenSpace.fit(start.encoder, corpus)
    return _write_encoder(store, suffix, start, str(encoder), chosen, numbers, corpus, space)


def _make_room(store: Store) -> str:
    """Make empty tables for the vectors of another encoder; return what the names of its folders are to end in."""
    index_folder = store.path.parent
    with _writing(store) as writer:
        manifest = replace(Manifest.settled(index_folder, writer), beside=None)
        manifest.write(index_folder)  # before the tables that it told of are gone
        delete_other_folders(index_folder, manifest)
        writer.make_beside()
        number = writer.next.change
        while (index_folder / f"{ENCODER_FOLDER}-{number}").exists():
            number += 1
        return f"-{number}"


def _write_encoder(
    store: Store,
    suffix: str,
    start: Start,
    spec: str,
    chosen: Calibration,
    numbers: list[int],
    corpus: Corpus,
    space: TokenSpace | None,
) -> StandbyEncoder:
    """Put an encoder, its facts and its tree into folders of their own, and have the manifest tell of them."""
    index_folder = store.path.parent
    with _writing(store) as writer:  # nothing is written to it; it keeps a rebuild from tidying up
        folder = index_folder / f"{ENCODER_FOLDER}{suffix}"
        start.encoder.save(folder)
        tree = None
        if start.folder is not None:
            keep_facts(start.folder, index_folder / f"{IN_AN_INDEX}{suffix}")
            tree = trained_tree(start.folder, corpus)
        if tree is not None:
            NumberedHierarchy(tree, np.array(numbers, np.int64)).save(index_folder / f"{FOLDER}{suffix}")
        if space is not None and Manifest.read(index_folder, writer).engine not in ELSEWHERE:
            TokenCodes.create(token_folder(index_folder, suffix), space)
        other = StandbyEncoder(
            was_in_force=False,
            spec=spec,
            encoder=start.encoder.name,
            fingerprint=start.fingerprint,
            dim=start.encoder.dim,
            encoder_files=file_stamps(folder),
            encoder_folder=folder.name,
            base_encoder=None if start.facts is None else start.facts.base_encoder,
            fitted_documents=start.fitted_documents,
            window=start.encoder.window,
            words_share=chosen.shares.words,
            tokens_share=chosen.shares.tokens,
            shares=chosen.as_dict() if chosen.kind else None,
            hierarchy=f"{FOLDER}{suffix}" if tree is not None else None,
            familiar=max(numbers),
        )
        replace(Manifest.settled(index_folder, writer), beside=asdict(other)).write(index_folder)
    return other


# ------------------------------------------------------------------------------------------------- the rest


def _finish(store: Store, other: StandbyEncoder, progress: bool, *, calibrates: bool) -> Manifest:
    """Encode what is left to encode, make tree and snapshots, and let the two encoders change places."""
    index_folder = store.path.parent
    carried = CarriedEncoder(index_folder, other)
    cutter = Cutter(carried.encoder())
    codes = TokenCodes.find(token_folder(index_folder, other.suffix))
    catch_up = _CatchUp(store, partial(encode_keeping_tokens, carried, codes), cutter)
    catch_up.all(progress)
    if calibrates and other.shares is None:
        other = _with_shares(store, other, carried.encoder(), codes)
    other = _with_tree(store, other)
    _save_snapshots(store, other, catch_up)
    for left in reversed(range(ROUNDS)):
        catch_up.all(progress=False)
        if _switch(store, other, catch_up, whatever_is_left=not left):
            break
    return _decided(store)


class _Encoded(NamedTuple):
    """Vectors of documents, by number, and the passages of the long ones by position."""

    numbers: list[int]
    vectors: np.ndarray
    passages: dict[int, CutPassages]


class _CatchUp:
    """Encodes the documents that have no vector beside those in force yet."""

    def __init__(self, store: Store, encode: Encode, cutter: Cutter) -> None:
        self.store = store
        self._encode, self._cutter = encode, cutter

    def all(self, progress: bool) -> None:
        """Encode them some at a time; others may write in between."""
        with self.store.reading() as reader:
            total, left = reader.moment().documents, reader.count_after(reader.last_beside() or 0)
        with progress_bar("encoding", total, "documents", show=progress) as advance:
            advance(total - left)
            while True:
                with self.store.reading() as reader:
                    some = self._next(reader)
                if some is None:
                    return
                with _writing(self.store) as writer:
                    writer.fill_beside(*some)
                advance(len(some.numbers))

    def within(self, writer: Writer) -> None:
        """Encode all that are left, in a write that is under way."""
        while some := self._next(writer):
            writer.fill_beside(*some)

    def _next(self, reader: Reader) -> _Encoded | None:
        entries = list(islice(reader.entries(after=reader.last_beside() or 0), DOCUMENTS_AT_ONCE))
        if not entries:
            return None
        documents = [entry.document for entry in entries]
        vectors = shared_vectors([each.full_text for each in documents], {}, self._encode)
        passages = read_passages(documents, self._encode, self._cutter)
        return _Encoded([entry.number for entry in entries], vectors, passages)


def _with_shares(store: Store, other: StandbyEncoder, encoder: Encoder, codes: TokenCodes | None) -> StandbyEncoder:
    """Calibrate how much words and tokens count with the new vectors, as `hce index` does."""
    with store.reading_beside(other.dim) as reader:
        entries = list(reader.entries())
    chosen = calibrate_unlabeled(
        Corpus.from_documents(entry.document for entry in entries),
        encoder,
        np.stack([entry.vector for entry in entries]),
        Manifest.read(store.path.parent).language,
        space=codes.space if codes else None,
        known=codes.get if codes else None,
    )
    shares = chosen.shares
    return replace(other, words_share=shares.words, tokens_share=shares.tokens, shares=chosen.as_dict())


def _with_tree(store: Store, other: StandbyEncoder) -> StandbyEncoder:
    """Grow a tree of the vectors that are to be in force, where the index has one and the encoder brought none."""
    index_folder = store.path.parent
    manifest = Manifest.read(index_folder)
    if other.hierarchy is not None or manifest.hierarchy is None:
        return other
    name = f"{FOLDER}{other.suffix}"
    if is_folder(index_folder / name):
        return replace(other, hierarchy=name)
    with store.reading_beside(other.dim) as reader:
        return replace(other, hierarchy=grow_tree(index_folder, name, reader))


def _save_snapshots(store: Store, other: StandbyEncoder, catch_up: _CatchUp) -> None:
    """Make engines and words of the vectors that are to be in force, so that who takes them up only has to load.

    A snapshot is of a moment at which every document has such a vector; where others write all the time there may be
    none such, and then the parts are made when they are first needed.
    """
    derived = Derived(store, Manifest.read(store.path.parent).with_in_force(other))
    for _ in range(ROUNDS):
        with store.reading_beside(other.dim) as reader:
            if reader.count_after(0) == reader.moment().documents:  # of vectors beside those in force, and of documents
                derived.save_snapshots(reader)
                return
        catch_up.all(progress=False)


def _switch(store: Store, other: StandbyEncoder, catch_up: _CatchUp, *, whatever_is_left: bool) -> bool:
    """Let the two encoders change places, unless so many documents came meanwhile that others would wait for long."""
    index_folder = store.path.parent
    with _writing(store) as writer:
        if writer.count_after(writer.last_beside() or 0) > FEW and not whatever_is_left:
            return False
        catch_up.within(writer)
        manifest = replace(Manifest.settled(index_folder, writer), beside=asdict(other))
        manifest.before_switch(writer.next).write(index_folder)
        writer.swap_beside(other.dim)
    return True


def _decided(store: Store) -> Manifest:
    """Write down what the switch has decided."""
    index_folder = store.path.parent
    with _writing(store) as writer:  # nothing is written to it; it keeps others from writing a manifest
        manifest = Manifest.read(index_folder, writer)
        manifest.write(index_folder)
    return manifest


@contextmanager
def _writing(store: Store) -> Iterator[Writer]:
    """Open one transaction, as `Store.writing` does, once nobody else writes any more, however long that takes."""
    with ExitStack() as stack:
        while True:
            try:
                writer = stack.enter_context(store.writing())
                break
            except WriterBusyError:
                logger.debug("waiting for another process to end its write")
        yield writer
