"""How an index reads long documents: as they are, as far as its encoder reads, and in passages.

A document that the encoder reads to its end has one vector. A longer one has that vector too, which is its place in
the tree, and one for each of its passages. These are much shorter than what the encoder could read: in a long passage
a sentence is drowned. Of passages of 128 tokens 91 to 95 % of sentences led to their text first, of passages of 512
tokens 69 to 79 %, and queries found more too (docs/LOG.md). Words are counted in the same passages.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from hce.data.corpus import Corpus
from hce.data.documents import Document
from hce.data.passages import Passage, cut_passages
from hce.encoding.encoder import Encoder
from hce.index.store import CutPassages, Reader
from hce.progress import progress_bar
from hce.search.words import PassageText

PASSAGE_TOKENS = 128
TITLE_SHARE = 4  # a title of up to a quarter of a passage stands before each passage
PIECES = re.compile(r"\w{1,3}|[^\w\s]")  # for tokenizers that cannot say where a token stands: rather too many than few
DOCUMENTS_AT_ONCE = 2048


class Cutter:
    """Cuts documents into passages, where an encoder does not read them to the end; used by one thread at a time.

    Attributes:
        window: how many tokens the encoder reads.
        length: how many tokens a passage has at most.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.window = encoder.window
        self.length = min(self.window, PASSAGE_TOKENS)
        self._tokenizer = _untruncated(encoder.tokenizer)

    def cut(self, documents: Sequence[Document]) -> dict[int, list[Passage]]:
        """Return the passages of those documents that are longer than the window, by position; parts of `full_text`."""
        texts = [document.full_text for document in documents]
        some = [i for i, text in enumerate(texts) if len(text.encode()) > self.window]  # no token is less than a byte
        counts = self._counts([texts[i] for i in some])
        long = [i for i, count in zip(some, counts, strict=True) if count > self.window]
        return {i: cut_passages(texts[i], self._offsets(texts[i]), self._room(documents[i])) for i in long}

    def texts(self, document: Document, passages: Sequence[Passage]) -> list[str]:
        """Return what is encoded of each passage: before all but the first stands the title, where that is short."""
        text, title = document.full_text, document.title.strip()
        before = f"{title} " if title and self._room(document) < self.length else ""
        return [(before if passage.start else "") + text[passage.start : passage.stop] for passage in passages]

    def _room(self, document: Document) -> int:
        """Return how many tokens of a passage are left beside the title, if that stands before it."""
        (title,) = self._counts([document.title])
        return self.length - title if title <= self.length // TITLE_SHARE else self.length

    def _counts(self, texts: Sequence[str]) -> list[int]:
        if self._tokenizer is None:
            return [len(PIECES.findall(text)) for text in texts]
        return [len(each.ids) for each in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def _offsets(self, text: str) -> Sequence[tuple[int, int]]:
        if self._tokenizer is None:
            return [match.span() for match in PIECES.finditer(text)]
        offsets: Sequence[tuple[int, int]] = self._tokenizer.encode(text, add_special_tokens=False).offsets
        return offsets


def passage_texts(reader: Reader, after: int = 0) -> Iterator[PassageText]:
    """Read the passages of the documents above `after` as words are indexed: the title stands before each, if short."""
    for number, extents in reader.all_extents(after):
        for document in reader.documents([number]).values():
            text, title = document.full_text, document.title.strip()
            for passage_number, (start, stop) in extents.items():
                before = f"{title} " if start and title and TITLE_SHARE * len(title) <= stop - start else ""
                yield PassageText(number, passage_number, before + text[start:stop])


class LongDocuments:
    """The passages of a corpus's long documents, and what is encoded of the corpus.

    Attributes:
        corpus: what is encoded: all documents, and after the last one the passages of the long ones. Without long
            documents, the corpus as it was given.
    """

    def __init__(self, corpus: Corpus, cutter: Cutter, *, progress: bool = False) -> None:
        self._passages: dict[int, list[Passage]] = {}
        with progress_bar("cutting", len(corpus), "documents", show=progress) as advance:
            for start in range(0, len(corpus), DOCUMENTS_AT_ONCE):
                some = corpus[start : start + DOCUMENTS_AT_ONCE]
                self._passages |= {start + i: passages for i, passages in cutter.cut(some).items()}
                advance(len(some))
        self.corpus = corpus
        if self._passages:
            digest = hashlib.sha256(f"{corpus.fingerprint} with passages of {cutter.length}".encode())
            self.corpus = Corpus(_Rows(corpus, cutter, self._passages), digest.hexdigest(), corpus.name)
        rows = len(corpus) + np.cumsum([0, *map(len, self._passages.values())])
        self._first_row = dict(zip(self._passages, rows.tolist(), strict=False))

    def passages_of(self, positions: range, vectors: np.ndarray) -> dict[int, CutPassages]:
        """Return the passages of the long ones among some documents, by place in `positions`, with their vectors.

        Args:
            positions: of the documents.
            vectors: of all rows of `corpus`.
        """
        found = {}
        for position in filter(self._passages.__contains__, positions):
            passages, row = self._passages[position], self._first_row[position]
            found[position - positions.start] = CutPassages(passages, vectors[row : row + len(passages)])
        return found


class _Rows(Sequence[Document]):
    """The documents of a corpus, and after them passages as if they were documents."""

    def __init__(self, corpus: Corpus, cutter: Cutter, passages: Mapping[int, list[Passage]]) -> None:
        self._corpus = corpus
        self._passages = [(position, place) for position, each in passages.items() for place in range(len(each))]

        @lru_cache(maxsize=1)  # rows are read in order, and a long document is not read anew for each of its passages
        def texts(position: int) -> list[str]:
            return cutter.texts(corpus[position], passages[position])

        self._texts = texts

    def __len__(self) -> int:
        return len(self._corpus) + len(self._passages)

    def __getitem__(self, row: int) -> Document:  # type: ignore[override]
        if row < len(self._corpus):
            return self._corpus[row]
        position, place = self._passages[row - len(self._corpus)]
        return Document(str(row), self._texts(position)[place])


def _untruncated(tokenizer: Any) -> Tokenizer | None:
    """Return a copy of a tokenizer that reads texts of any length; None where it cannot say where a token stands."""
    tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)  # of the fast ones of transformers
    if not isinstance(tokenizer, Tokenizer):
        return None
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy
