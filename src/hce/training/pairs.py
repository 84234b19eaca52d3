"""Where (query, document) pairs come from: labels, spans of the documents themselves, or the documents twice.

A source gives its pairs in batches: another order and other spans in each turn, the same ones for the same seed. The
draws of a batch depend on (seed, turn, batch) alone, so a turn can be taken up in its middle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from typing import NamedTuple, Protocol

import numpy as np

from hce.data.corpus import Corpus
from hce.data.judgments import Qrels, Query
from hce.data.text import Offsets, cut_span, first_words, word_offsets
from hce.errors import InputError


class Batch(NamedTuple):
    """Pairs to train on.

    Attributes:
        queries: texts.
        documents: the text of each query's document; it may lack the query where that was cut out of it.
        positions: where each document stands in the corpus, of shape (B,).
        known: positions of all documents known to be right for each query, padded with −1, of shape (B, P).
        cut: whether each query was cut out of its document, of shape (B,), bool; None: none was.
    """

    queries: list[str]
    documents: list[str]
    positions: np.ndarray
    known: np.ndarray
    cut: np.ndarray | None = None

    def rows(self, chosen: slice) -> Batch:
        """Return some of the pairs as a smaller batch."""
        return Batch(
            self.queries[chosen],
            self.documents[chosen],
            self.positions[chosen],
            self.known[chosen],
            None if self.cut is None else self.cut[chosen],
        )


class PairSource(Protocol):
    """Something that has pairs for every epoch."""

    def __len__(self) -> int:
        """Return how many pairs one turn through all of them has."""
        ...

    def batches(self, turn: int, size: int, first: int = 0) -> Iterator[Batch]:
        """Yield the batches of a turn through all pairs, from index `first` on; a turn has `batch_count` of them."""
        ...


class InverseCloze:
    """ICT: a random span of a document is the query, the document (with or without the span) its answer.

    Args:
        corpus: the documents.
        positions: which of them to draw from; others are kept out of training.
        lengths: span lengths, one drawn for each pair; the paper has 64 tokens.
        offsets: from a text to the begin and end of each unit that `lengths` count; by default words and marks.
        cut_share: how often the span is cut out of its document (0 in the paper, 0.9 in the first ICT). Left in, the
            encoder learns to match words; cut out, to match meaning.
        window: take so many words and marks from the document's start for the document; 0 takes all of it. A
            transformer's step costs by the token. The start, with the title, is what a search will see too: windows
            from anywhere measured worse.
        seed: same seed, same pairs.
    """

    def __init__(
        self,
        corpus: Corpus,
        positions: np.ndarray | None = None,
        *,
        lengths: Sequence[int] = (64,),
        offsets: Callable[[str], Offsets] = word_offsets,
        cut_share: float = 0.0,
        window: int = 0,
        seed: int = 0,
    ) -> None:
        self.corpus = corpus
        self.positions = np.arange(len(corpus)) if positions is None else np.asarray(positions)
        self.lengths = tuple(lengths)
        self.offsets = offsets
        self.cut_share = cut_share
        self.window = window
        self.seed = seed

    def __len__(self) -> int:
        return len(self.positions)

    def batches(self, turn: int, size: int, first: int = 0) -> Iterator[Batch]:
        """See `PairSource`."""
        for index, chosen in _shuffled(self.positions, self.seed, turn, size, first):
            rng = np.random.default_rng([self.seed, turn, index])
            lengths, places = rng.choice(self.lengths, size=len(chosen)), rng.random(len(chosen))
            to_cut = rng.random(len(chosen)) < self.cut_share
            texts = [self.corpus[position].full_text for position in chosen.tolist()]
            if self.window:
                texts = [first_words(text, self.window) for text in texts]
            drawn = zip(texts, lengths.tolist(), places.tolist(), map(self.offsets, texts), strict=True)
            spans = [cut_span(*draw) for draw in drawn]
            documents = [span.outside if out else text for span, text, out in zip(spans, texts, to_cut, strict=True)]
            # Of a text of a single word nothing can be cut out.
            cut = np.array([document != text for document, text in zip(documents, texts, strict=True)])
            yield Batch([span.inside for span in spans], documents, chosen, chosen[:, None], cut)


class DropoutTwins(InverseCloze):
    """SimCSE: a document is its own query; two dropout masks make the difference, so the encoder needs dropout."""

    def batches(self, turn: int, size: int, first: int = 0) -> Iterator[Batch]:
        """See `PairSource`."""
        for _, chosen in _shuffled(self.positions, self.seed, turn, size, first):
            texts = [self.corpus[position].full_text for position in chosen.tolist()]
            yield Batch(texts, texts, chosen, chosen[:, None])


class LabelledPairs:
    """Queries and the documents judged relevant to them (grade above 0); each such pair is one example.

    Args:
        corpus: the documents.
        queries: by id.
        qrels: the judgments; ids that the corpus lacks are an error, except documents that it left out as empty.
        seed: same seed, same order.

    Raises:
        InputError: an unknown id, or no pair at all.
    """

    def __init__(self, corpus: Corpus, queries: Mapping[str, Query], qrels: Qrels, *, seed: int = 0) -> None:
        position_of = {document_id: position for position, document_id in enumerate(corpus.ids)}
        self.corpus = corpus
        self.seed = seed
        self.texts: list[str] = []
        self.positives: list[np.ndarray] = []
        pairs: list[tuple[int, int]] = []
        for query_id in qrels:
            if query_id not in queries:
                raise InputError(f"the pairs name query {query_id!r}, which is not among the queries")
            positives = qrels.positives(query_id)
            _require_known(positives, position_of, corpus)
            found = np.array([position_of[each] for each in positives if each in position_of], dtype=np.int64)
            pairs += [(len(self.texts), position) for position in found.tolist()]
            self.texts.append(queries[query_id].text)
            self.positives.append(found)
        if not pairs:
            raise InputError("there is no pair to train on: no judgment has a grade above 0")
        self.pairs = np.array(pairs)  # (pairs, 2): query, document

    def __len__(self) -> int:
        return len(self.pairs)

    def batches(self, turn: int, size: int, first: int = 0) -> Iterator[Batch]:
        """See `PairSource`."""
        for _, chosen in _shuffled(np.arange(len(self.pairs)), self.seed, turn, size, first):
            yield self.batch_of(chosen)

    def batch_of(self, chosen: np.ndarray) -> Batch:
        """Return some of the pairs as a batch, by their indices of shape (B,)."""
        queries, positions = self.pairs[chosen].T
        known = [self.positives[query] for query in queries.tolist()]
        padded = np.full((len(known), max(map(len, known))), -1, dtype=np.int64)
        for row, positives in enumerate(known):
            padded[row, : len(positives)] = positives
        documents = [self.corpus[position].full_text for position in positions.tolist()]
        return Batch([self.texts[query] for query in queries.tolist()], documents, positions, padded)


def batch_count(pair_count: int, size: int) -> int:
    """Count the batches of a turn, each of exactly `size` pairs, or of all where there are fewer.

    The pairs that are left over wait for another turn, which has another order: a small last batch would have few
    negatives, and batches made a little smaller would not be what was asked for.
    """
    return max(1, pair_count // size)


def endless(source: PairSource, size: int, step: int = 0) -> Iterator[Batch]:
    """Yield a source's batches from a step on, turn after turn; a short source has more turns than epochs."""
    turns, first = divmod(step, batch_count(len(source), size))
    return chain.from_iterable(source.batches(turn, size, first if turn == turns else 0) for turn in count(turns))


def in_batches(order: np.ndarray, size: int) -> list[np.ndarray]:
    """Cut an order of pairs into its `batch_count` batches."""
    return [order[start : start + size] for start in range(0, batch_count(len(order), size) * size, size)]


def _shuffled(items: np.ndarray, seed: int, turn: int, size: int, first: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the batches of a turn's own order, with their indices."""
    order = np.random.default_rng([seed, turn]).permutation(items)
    yield from list(enumerate(in_batches(order, size)))[first:]


def _require_known(document_ids: Iterable[str], position_of: Mapping[str, int], corpus: Corpus) -> None:
    for each in document_ids:
        if each not in position_of and each not in corpus.left_out:
            raise InputError(f"the pairs name document {each!r}, which is not in {corpus.name}; do the files match?")
