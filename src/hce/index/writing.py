"""Write documents to a store: check them, encode them, and cut long ones into passages.

Every document has one vector, which also gives its place in the tree. A document longer than the encoder's window also
has a vector for each of its passages. A passage has 128 tokens at most, even if the window is longer. Then
91 to 95 % of sentences, as queries, ranked their document first; with 512 tokens, 69 to 79 % (docs/LOG.md).
BM25 scores the same passages.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import NamedTuple

import numpy as np

from hce.data.corpus import Corpus
from hce.data.text import Document, Passage, cut_passages
from hce.encoding.encoder import Encoder
from hce.encoding.tables import token_ids, token_offsets, untruncated
from hce.errors import InputError
from hce.index.tables import CutPassages, Writer, content_key
from hce.progress import Advance, progress_bar

DOCUMENTS_AT_ONCE = 2048

Encode = Callable[[list[str]], np.ndarray]


def checked(documents: Iterable[Document]) -> Sequence[Document]:
    """Return documents that can be written unchanged; InputError for others."""
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
    return Corpus.from_documents(listed)  # raises an error that names the fault and its place


def _all_sound(documents: list[Document]) -> bool:
    """Return whether all documents are valid; ten times as fast as a careful check."""
    try:
        for document in documents:
            (document.id + document.title + document.text).encode()  # fails unless all three are valid Unicode text
        distinct = {document.id for document in documents}
        return len(distinct) == len(documents) and "" not in distinct and not any(each.is_empty for each in documents)
    except (AttributeError, TypeError, UnicodeEncodeError):
        return False


# ------------------------------------------------------------------------------------------------- inserting


def chunks_of(batches: Iterable[Sequence[Document]]) -> Iterator[list[Document]]:
    """Yield lists of at most `DOCUMENTS_AT_ONCE` documents."""
    for batch in batches:
        for start in range(0, len(batch), DOCUMENTS_AT_ONCE):
            yield list(batch[start : start + DOCUMENTS_AT_ONCE])


def without_unchanged(
    writer: Writer, chunks: Iterable[list[Document]], advance: Advance, *, keep: bool = True
) -> Iterator[list[Document]]:
    """Delete documents whose text changed, update the rest; yield what to insert.

    With `keep=False`, documents with unchanged texts are also deleted and inserted under new numbers. A mirror needs
    this, as it recognizes changes only by new and removed numbers.
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
    writer: Writer, chunks: Iterator[list[Document]], encode: Encode, cutter: Cutter, advance: Advance
) -> None:
    """Encode chunks of documents here; another thread reads and writes SQLite."""
    before: dict[str, np.ndarray] = {}  # vectors of the previous chunk, which may not be in the store yet
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


def read_passages(documents: Sequence[Document], encode: Encode, cutter: Cutter) -> dict[int, CutPassages]:
    """Cut long documents into passages, and encode these; return them by position."""
    cut = cutter.cut(documents)
    if not cut:
        return {}
    texts = [cutter.texts(documents[position], extents) for position, extents in cut.items()]
    vectors = shared_vectors(list(chain.from_iterable(texts)), {}, encode)
    stops = np.cumsum([len(extents) for extents in cut.values()]).tolist()
    return {
        position: CutPassages(extents, vectors[stop - len(extents) : stop])
        for (position, extents), stop in zip(cut.items(), stops, strict=True)
    }


class _Chunk(NamedTuple):
    """Documents, their full texts, and the vectors of texts that the store already has."""

    documents: list[Document]
    texts: list[str]
    known: dict[str, np.ndarray]


def _next_chunk(writer: Writer, chunks: Iterator[list[Document]]) -> _Chunk | None:
    """Return the next chunk, or None at the end; runs in the thread of SQLite."""
    for documents in chunks:
        if documents:
            texts = [document.full_text for document in documents]
            return _Chunk(documents, texts, writer.vectors_of(texts))
    return None


def shared_vectors(texts: Sequence[str], known: dict[str, np.ndarray], encode: Encode) -> np.ndarray:
    """Return a vector for each text; encode each distinct unknown text once."""
    fresh = [text for text in dict.fromkeys(texts) if text not in known]
    if len(fresh) == len(texts):
        return encode(fresh)
    vectors = {**known, **dict(zip(fresh, encode(fresh) if fresh else (), strict=True))}
    return np.stack([vectors[text] for text in texts])


# ------------------------------------------------------------------------------------------------- cutting


PASSAGE_TOKENS = 128
TITLE_SHARE = 4  # a title of up to a quarter of a passage precedes each passage but the first
PIECES = re.compile(r"\w{1,3}|[^\w\s]")  # stand for tokens if a tokenizer has no offsets; mostly more of them


class Cutter:
    """Cuts documents longer than an encoder's window into passages; not thread-safe."""

    def __init__(self, encoder: Encoder) -> None:
        self.window = encoder.window  # in tokens
        self.length = min(self.window, PASSAGE_TOKENS)
        self._tokenizer = untruncated(encoder.tokenizer)

    def cut(self, documents: Sequence[Document]) -> dict[int, list[Passage]]:
        """Return the passages of documents longer than the window, by position."""
        texts = [document.full_text for document in documents]
        some = [i for i, text in enumerate(texts) if len(text.encode()) > self.window]  # a token is at least one byte
        counts = self._counts([texts[i] for i in some])
        long = [i for i, count in zip(some, counts, strict=True) if count > self.window]
        return {i: cut_passages(texts[i], self._offsets(texts[i]), self._room(documents[i])) for i in long}

    def texts(self, document: Document, passages: Sequence[Passage]) -> list[str]:
        """Return each passage's text to encode; a short title precedes all but the first."""
        text, title = document.full_text, document.title.strip()
        before = f"{title} " if title and self._room(document) < self.length else ""
        return [(before if passage.start else "") + text[passage.start : passage.stop] for passage in passages]

    def _room(self, document: Document) -> int:
        """Return how many tokens of a passage a short title leaves for the text."""
        (title,) = self._counts([document.title])
        return self.length - title if title <= self.length // TITLE_SHARE else self.length

    def _counts(self, texts: Sequence[str]) -> list[int]:
        if self._tokenizer is None:
            return [len(PIECES.findall(text)) for text in texts]
        return [len(ids) for ids in token_ids(self._tokenizer, texts)]

    def _offsets(self, text: str) -> Sequence[tuple[int, int]] | np.ndarray:
        if self._tokenizer is None:
            return [match.span() for match in PIECES.finditer(text)]
        return token_offsets(self._tokenizer, text)


class LongDocuments(Sequence[Document]):
    """The documents of a corpus, followed by the passages of long ones; `corpus` has them all as documents."""

    def __init__(self, corpus: Corpus, cutter: Cutter, *, progress: bool = False) -> None:
        self._documents, self._cutter = corpus, cutter
        self._passages: dict[int, list[Passage]] = {}
        with progress_bar("cutting", len(corpus), "documents", show=progress) as advance:
            for start in range(0, len(corpus), DOCUMENTS_AT_ONCE):
                some = corpus[start : start + DOCUMENTS_AT_ONCE]
                self._passages |= {start + i: passages for i, passages in cutter.cut(some).items()}
                advance(len(some))
        self._places = [(position, place) for position, each in self._passages.items() for place in range(len(each))]
        self._cut: tuple[int, list[str]] = -1, []  # the last long document, and the texts of its passages
        self.corpus = corpus
        if self._passages:
            digest = hashlib.sha256(f"{corpus.fingerprint} with passages of {cutter.length}".encode())
            self.corpus = Corpus(self, digest.hexdigest(), corpus.name)
        rows = len(corpus) + np.cumsum([0, *map(len, self._passages.values())])
        self._first_row = dict(zip(self._passages, rows.tolist(), strict=False))

    def __len__(self) -> int:
        return len(self._documents) + len(self._places)

    def __getitem__(self, row: int) -> Document:  # type: ignore[override]
        if row < len(self._documents):
            return self._documents[row]
        position, place = self._places[row - len(self._documents)]
        cut = self._cut
        if cut[0] != position:  # rows are read in order, so a long document is cut into texts only once
            cut = self._cut = position, self._cutter.texts(self._documents[position], self._passages[position])
        return Document(str(row), cut[1][place])

    def passages_of(self, positions: range, vectors: np.ndarray) -> dict[int, CutPassages]:
        """Return the passages of long documents, by their place in `positions`."""
        found = {}
        for position in filter(self._passages.__contains__, positions):
            passages, row = self._passages[position], self._first_row[position]
            found[position - positions.start] = CutPassages(passages, vectors[row : row + len(passages)])
        return found
