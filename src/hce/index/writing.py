"""Putting documents into a store: what is refused; and what is encoded once, while SQLite writes what is encoded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hce.data.corpus import Corpus
from hce.data.documents import Document
from hce.errors import InputError
from hce.index.cutting import Cutter
from hce.index.store import CutPassages, Writer, content_key
from hce.progress import Advance

DOCUMENTS_AT_ONCE = 2048

Encode = Callable[[list[str]], np.ndarray]


def checked(documents: Iterable[Document]) -> Sequence[Document]:
    """Make sure that documents can be written as they are.

    Raises:
        InputError: at the first that cannot, with its place.
    """
    if isinstance(documents, Corpus):
        return documents
    if isinstance(documents, str | Document) or not isinstance(documents, Iterable):
        raise InputError(f"documents are a list or a corpus, not a {type(documents).__name__}; put one into a list")
    listed = list(documents)
    if not listed or _all_sound(listed):
        return listed
    for number, document in enumerate(listed, start=1):
        if not isinstance(document, Document):
            raise InputError(f"number {number} of the documents is a {type(document).__name__}; make it a Document")
    return Corpus.from_documents(listed)  # which knows what is wrong and says where


def _all_sound(documents: list[Document]) -> bool:
    """Tell whether there is nothing to find fault with; this takes a tenth of the time of a careful look."""
    try:
        for document in documents:
            (document.id + document.title + document.text).encode()  # fails where there is no text, or no Unicode
        distinct = {document.id for document in documents}
        return len(distinct) == len(documents) and "" not in distinct and not any(each.is_empty for each in documents)
    except (AttributeError, TypeError, UnicodeEncodeError):
        return False


def checked_ids(ids: Iterable[str]) -> list[str]:
    """Return ids of documents, each once, in order.

    Raises:
        InputError: one of them is none.
    """
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise InputError(f"remove takes a list of ids, not a {type(ids).__name__}; put the single id into a list")
    listed = list(ids)
    for doc_id in listed:
        check_id(doc_id)
    return list(dict.fromkeys(listed))


def check_id(doc_id: str) -> None:
    """Make sure that an id is a text.

    Raises:
        InputError: it is not.
    """
    if not isinstance(doc_id, str):
        raise InputError(f"an id is a string, not a {type(doc_id).__name__}")


def checked_after(number: int) -> int:
    """Return the number after which documents are read, as SQLite takes it: not as NumPy's.

    Raises:
        InputError: it is not.
    """
    if isinstance(number, bool) or not isinstance(number, int | np.integer):
        raise InputError(f"after = {number!r}: give the number of a document, or 0 to read all; ids go to get()")
    return int(number)


def refuse_known(writer: Writer, chunks: Iterable[list[Document]], index_folder: Path) -> None:
    """Make sure that none of these documents is there.

    Raises:
        InputError: the id of one is.
    """
    for chunk in chunks:
        if known := writer.present(document.id for document in chunk):
            raise InputError(
                f"{index_folder}: id {next(iter(known))!r} is there already; --update (Index.update) replaces it"
            )


def refuse_emptied(batches: Iterable[Sequence[Document]]) -> None:
    """Make sure that no document that is to be replaced was left out of a corpus.

    Raises:
        InputError: one has neither text nor title.
    """
    for batch in batches:
        if isinstance(batch, Corpus) and batch.left_out:
            raise InputError(f"document {min(batch.left_out)!r} has neither text nor title; to take it out, remove it")


def numbers_of(writer: Writer, ids: list[str], index_folder: Path) -> list[int]:
    """Return the numbers of the documents that have these ids.

    Raises:
        InputError: one is not there.
    """
    known = writer.present(ids)
    missing = [doc_id for doc_id in ids if doc_id not in known]
    if missing:
        more = f" ({len(missing):,} of {len(ids):,} ids are not)" if len(ids) > 1 else ""
        raise InputError(f"{index_folder}: no document {missing[0]!r} is there{more}; nothing was removed")
    return [number for number, _ in known.values()]


# ------------------------------------------------------------------------------------------------- inserting


def chunks_of(batches: Iterable[Sequence[Document]]) -> Iterator[list[Document]]:
    """Yield a moderate number of documents at a time."""
    for batch in batches:
        for start in range(0, len(batch), DOCUMENTS_AT_ONCE):
            yield list(batch[start : start + DOCUMENTS_AT_ONCE])


def without_unchanged(
    writer: Writer, chunks: Iterable[list[Document]], advance: Advance, *, keep: bool = True
) -> Iterator[list[Document]]:
    """Delete old versions of changed documents, update unchanged ones in place, and yield what has to be inserted.

    With `keep=False` unchanged ones too are deleted and inserted under new numbers: a mirror learns of changes only by
    new and removed numbers.
    """
    for chunk in chunks:
        present = writer.present(document.id for document in chunk)
        fresh = [document for document in chunk if document.id not in present]
        old = [document for document in chunk if document.id in present]
        same = [each for each in old if keep and present[each.id][1] == content_key(each.full_text)]
        changed = [each for each in old if not keep or present[each.id][1] != content_key(each.full_text)]
        writer.delete([present[document.id][0] for document in changed])
        writer.replace(same)
        advance(len(same))
        yield changed + fresh


def insert_documents(
    writer: Writer, chunks: Iterator[list[Document]], encode: Encode, cutter: Cutter | None, advance: Advance
) -> None:
    """Encode here, and let another thread do all that SQLite has to do meanwhile.

    Args:
        writer: the transaction.
        chunks: the documents; drawn by the other thread.
        encode: from texts to vectors.
        cutter: cuts long documents into passages; without one they are read as a whole.
        advance: told how many are done.
    """
    before: dict[str, np.ndarray] = {}  # vectors of the chunk before, which is not in the store yet
    with ThreadPoolExecutor(1) as sqlite:
        inserting = None
        looking = sqlite.submit(_next_chunk, writer, chunks)
        while found := looking.result():
            looking = sqlite.submit(_next_chunk, writer, chunks)
            vectors = shared_vectors(found.texts, {**before, **found.known}, encode)
            passages = read_passages(found.documents, encode, cutter)
            before = dict(zip(found.texts, vectors, strict=True))
            if inserting:
                inserting.result()
            inserting = sqlite.submit(writer.insert, found.documents, vectors, passages)
            advance(len(found.documents))
        if inserting:
            inserting.result()


def read_passages(documents: Sequence[Document], encode: Encode, cutter: Cutter | None) -> dict[int, CutPassages]:
    """Cut the long ones among some documents into passages, and encode these; by position."""
    cut = cutter.cut(documents) if cutter else {}
    if cutter is None or not cut:
        return {}
    texts = [cutter.texts(documents[position], extents) for position, extents in cut.items()]
    vectors = shared_vectors(list(chain.from_iterable(texts)), {}, encode)
    stops = np.cumsum([len(extents) for extents in cut.values()]).tolist()
    return {
        position: CutPassages(extents, vectors[stop - len(extents) : stop])
        for (position, extents), stop in zip(cut.items(), stops, strict=True)
    }


def cut_documents(writer: Writer, encode: Encode, cutter: Cutter) -> None:
    """Cut every long document of the store that has no passages yet into passages, encode these and insert them."""
    last = 0
    while entries := list(islice(writer.entries(after=last), DOCUMENTS_AT_ONCE)):
        last = entries[-1].number
        known = writer.long_documents(entry.number for entry in entries) if writer.has_passages() else set()
        left = [entry for entry in entries if entry.number not in known]
        for position, passages in read_passages([entry.document for entry in left], encode, cutter).items():
            writer.insert_passages(left[position].number, passages)


class _Chunk(NamedTuple):
    """Documents, what an encoder reads of them, and the vectors of those texts that are known."""

    documents: list[Document]
    texts: list[str]
    known: dict[str, np.ndarray]


def _next_chunk(writer: Writer, chunks: Iterator[list[Document]]) -> _Chunk | None:
    """Return the next documents there are, or None; called in the thread that does SQLite's work."""
    for documents in chunks:
        if documents:
            texts = [document.full_text for document in documents]
            return _Chunk(documents, texts, writer.vectors_of(texts))
    return None


def shared_vectors(texts: Sequence[str], known: dict[str, np.ndarray], encode: Encode) -> np.ndarray:
    """Return a vector for each text, of shape (texts, n); equal texts share one, and known ones are not encoded."""
    fresh = [text for text in dict.fromkeys(texts) if text not in known]
    if len(fresh) == len(texts):
        return encode(fresh)
    vectors = {**known, **dict(zip(fresh, encode(fresh) if fresh else (), strict=True))}
    return np.stack([vectors[text] for text in texts])
