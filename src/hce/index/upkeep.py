"""Upkeep: the status of an index, and rebuilding what is derived from its documents. No document is changed."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial

from hce.contained import delete_folder
from hce.files import held_alone
from hce.index.confidence import calibrate
from hce.index.elsewhere import home_of
from hce.index.manifest import SHOWN, IndexStatus, Manifest, delete_other_folders, size_on_disk
from hce.index.numbered_tree import regrow_tree
from hce.index.state import IndexState
from hce.index.store import Writer
from hce.index.token_codes import TokenCodes, is_token_folder, read_all_tokens, token_folder
from hce.search.engine import ELSEWHERE, ENGINES, check_engine


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
    """Build engines and words of the documents there are, and keep snapshots of them.

    Raises:
        WriterBusyError: someone else is writing.
    """
    with state.store.writing() as writer:  # nothing is written to it; it keeps others from writing
        state.keep_up(writer)
        derived = state.derived
        derived.rebuild(writer, replace(state.manifest, engine=derived.engine_name))
        _calibrate(state, writer)


def rebuild(
    state: IndexState,
    engine: str | None,
    at: str | None,
    *,
    refit: bool,
    tokens: bool | None,
    progress: bool,
) -> None:
    """Rebuild all that is derived from the documents there are now; see `Index.rebuild`.

    Args:
        state: of the index.
        engine: another engine from now on.
        at: the address of Milvus.
        refit: fit the table to all documents again, unless another encoder is about to take its place.
        tokens: whether tokens are kept from now on; None leaves that unchanged.
        progress: show bars.
    """
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
        _calibrate(state, writer)
        writer.forget(manifest.documents)
        delete_other_folders(path, manifest)
    if before.engine_at is not None and before.engine_at != at:
        home_of(before.engine).withdraw(before.engine_at, path)


def _refit_table(state: IndexState, progress: bool) -> None:
    """Fit the table that encodes to all documents again, unless a reindexing to another encoder was begun."""
    from hce.index.reindex import reindex  # which needs torch

    known = Manifest.read(state.path)
    other = known.other()
    if other is not None and other.spec not in ("", "static"):
        return
    given = known.words_share if known.shares is None else None
    manifest = reindex(state.store, "static", given, progress=progress)
    if manifest is not None:
        state.adopt(manifest)


def _give_up_earlier(state: IndexState) -> None:
    """Drop the vectors of the encoder that the last reindexing replaced.

    Raises:
        InputError: another process is taking it up again.
    """
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
    """Keep tokens or drop them, if that is asked for; else drop those of texts that are gone."""
    folder = token_folder(state.path, state.manifest.suffix)
    if wanted is None:
        if (codes := TokenCodes.find(folder)) is not None:
            codes.keep_only(writer)
        return
    delete_folder(folder, state.path)
    if wanted:
        read_all_tokens(folder, state.for_documents.encoder(), writer, progress=progress)


def _calibrate(state: IndexState, writer: Writer) -> None:
    """Find the thresholds of a good match, and write them into the manifest."""
    known = Manifest.settled(state.path, writer)
    found = None
    if state.derived.mirror is None:
        encode = partial(state.for_queries.encode, side="query")
        found = calibrate(writer, state.derived, encode, known.fingerprint, known.words_share)
    calibration = None if found is None else asdict(found)
    if calibration != known.calibration:
        manifest = replace(known, calibration=calibration)
        manifest.write(state.path)
        state.adopt(manifest)
