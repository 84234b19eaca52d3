"""Where (query, document) pairs come from: labels, spans of the documents themselves, or the documents twice.

A source gives its pairs in batches: another order and other spans in each turn, the same ones for the same seed. The
draws of a batch depend on (seed, turn, batch) alone, so a turn can be taken up in its middle.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import NamedTuple, Protocol

import numpy as np

from hce.data.corpus import Corpus
from hce.data.judgments import Labels, Qrels, Query
from hce.data.text import Offsets, cut_span, first_words, word_offsets
from hce.encoding.encoder import Encoder
from hce.errors import InputError
from hce.processes import process_count
from hce.training.heldout import DevSet, labeled_devset, pseudo_devset, with_random_others
from hce.training.query_mean import QueryMean
from hce.training.recipe import Recipe

logger = logging.getLogger(__name__)

LEAST_DEV_QUERIES = 20


class LabelSets(NamedTuple):
    """The labels of a run: to train on, generated to train on, to measure by; and a log of queries without answers."""

    labeled: Labels | None = None
    generated: Labels | None = None
    dev: Labels | None = None
    log: tuple[str, ...] | QueryMean = ()


@dataclass(frozen=True)
class Sources:
    """Where a run's pairs come from: labels, pseudo-queries, or both (joint training).

    Attributes:
        supervised: pairs of labeled and generated queries.
        unsupervised: pairs made of the documents themselves.
        held_out: positions of documents kept for measuring; no pairs are made of them, and they are no negatives.
        measured: positions of the documents that dev queries are made of; none where these are labeled. They are the
            held-out ones, unless the recipe trains on all.
    """

    supervised: PairSource | None = None
    unsupervised: PairSource | None = None
    held_out: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    measured: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def __post_init__(self) -> None:
        if self.supervised is None and self.unsupervised is None:
            raise InputError("there is nothing to train on: no labeled pairs and no pseudo-queries")
        fewest = min(len(source) for source in (self.supervised, self.unsupervised) if source is not None)
        if fewest < process_count():
            raise InputError(f"{fewest} pairs cannot be shared out to {process_count()} processes; use fewer of these")


def documents_to_learn(corpus: Corpus, recipe: Recipe, label_sets: Iterable[Labels | None] = ()) -> Corpus:
    """Return the documents to train on: all, or of many a random sample with all that labels name."""
    if not recipe.most_documents or len(corpus) <= recipe.most_documents:
        return corpus
    named = {judgment.document_id for each in label_sets if each for judgment in each.qrels.judgments()}
    positions = [position for position, document in enumerate(corpus) if document.id in named] if named else []
    wanted = np.array(positions, dtype=np.int64)
    sample = corpus.only(with_random_others(len(corpus), wanted, recipe.most_documents, [recipe.seed, 13]))
    logger.info("training on %s", sample.name)
    return sample


def sources_and_devset(
    corpus: Corpus, encoder: Encoder, label_sets: LabelSets, recipe: Recipe
) -> tuple[Sources, DevSet]:
    """Return the pairs to train on and the held-out queries to measure by."""
    labeled, generated, dev, _ = label_sets
    if recipe.mode == "unsupervised":
        labeled = generated = None
    if labeled is not None:
        labeled, dev = split_labels(labeled, recipe) if dev is None else (_without_dev(labeled, dev), dev)
    measured = np.empty(0, dtype=np.int64)
    if dev is None:  # dev queries are made of at most a tenth of the documents
        count = min(recipe.dev_queries, max(1, len(corpus) // 10))
        measured = np.sort(np.random.default_rng([recipe.seed, 7]).choice(len(corpus), count, replace=False))
        devset = pseudo_devset(corpus, measured, recipe.dev_pool, recipe.seed, are_held_out=recipe.hold_out)
    else:
        devset = labeled_devset(corpus, dev.queries, dev.qrels, recipe.dev_pool, recipe.seed)
    held_out = measured if recipe.hold_out else measured[:0]
    supervised: PairSource | None = None
    unsupervised: PairSource | None = None
    learnable = labeled.joined(generated) if labeled and generated else labeled or generated
    if learnable is not None and len(held_out):
        named = {judgment.document_id for judgment in learnable.qrels.judgments()}
        count = len(learnable.qrels)
        learnable = learnable.among(named - {corpus.ids[position] for position in held_out.tolist()})
        if not learnable.qrels:
            raise InputError(
                f"the {count} generated queries are all of documents that are held out to measure by; "
                "generate more, or train with --set hold_out=false"
            )
    if learnable is not None:
        options = {"window": recipe.window, "seed": recipe.seed}
        supervised = LabeledPairs(corpus, learnable.queries, learnable.qrels, **options)
    if recipe.mode != "supervised":
        others = np.setdiff1d(np.arange(len(corpus)), held_out)
        unsupervised = DropoutTwins(corpus, others, seed=recipe.seed)
        if recipe.pseudo == "ict":
            unsupervised = InverseCloze(
                *(corpus, others),
                lengths=recipe.span_lengths,
                offsets=encoder.token_offsets if recipe.span_unit == "tokens" else word_offsets,
                cut_share=recipe.cut_share,
                window=recipe.window,
                seed=recipe.seed,
            )
    return Sources(supervised, unsupervised, held_out, measured), devset


def split_labels(labeled: Labels, recipe: Recipe) -> tuple[Labels, Labels]:
    """Hold a tenth of the labeled queries out, with all of their judgments; fail if there are too few."""
    query_ids = list(labeled.qrels)
    if len(query_ids) < 2 * LEAST_DEV_QUERIES:
        raise InputError(
            f"{len(query_ids)} labeled queries are too few to hold some out to measure by; "
            "give dev queries of their own"
        )
    count = max(LEAST_DEV_QUERIES, min(recipe.dev_queries, len(query_ids) // 10))
    rng = np.random.default_rng([recipe.seed, 7])
    held = labeled.only(query_ids[index] for index in np.sort(rng.choice(len(query_ids), count, replace=False)))
    return labeled.without(held.qrels), held


def _without_dev(labeled: Labels, dev: Labels) -> Labels:
    kept = labeled.without(dev.qrels)
    if len(kept.qrels) < len(labeled.qrels):
        logger.warning("%d dev queries are among the pairs too; not trained on", len(labeled.qrels) - len(kept.qrels))
    return kept


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
        return Batch(*(None if each is None else each[chosen] for each in self))  # type: ignore[arg-type]


class PairSource(Protocol):
    """Something that has pairs for every epoch; its length is that of one turn through all of them."""

    def __len__(self) -> int: ...

    def batches(self, turn: int, size: int, first: int = 0) -> Iterator[Batch]:
        """Yield the batches of a turn through all pairs, `batch_count` of them, from index `first` on."""
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
        window: take this many words and marks from the document's start for the document; 0 takes all of it. A
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
    """SimCSE: a document is its own query. Two dropout masks make the difference, so the encoder needs dropout."""

    def batches(self, turn: int, size: int, first: int = 0) -> Iterator[Batch]:
        """See `PairSource`."""
        for _, chosen in _shuffled(self.positions, self.seed, turn, size, first):
            texts = [self.corpus[position].full_text for position in chosen.tolist()]
            yield Batch(texts, texts, chosen, chosen[:, None])


class LabeledPairs:
    """Queries and the documents judged relevant to them (grade above 0); each such pair is one example.

    Fails without any pair, or if the corpus lacks a judged document, unless it left that out as empty. `window` is the
    number of words and marks that are taken from a document's start; 0 takes all of it.
    """

    def __init__(
        self, corpus: Corpus, queries: Mapping[str, Query], qrels: Qrels, *, window: int = 0, seed: int = 0
    ) -> None:
        position_of = {document_id: position for position, document_id in enumerate(corpus.ids)}
        self.corpus = corpus
        self.window = window
        self.seed = seed
        self.texts: list[str] = []
        self.positives: list[np.ndarray] = []
        pairs: list[tuple[int, int]] = []
        for query_id in qrels:
            if query_id not in queries:
                raise InputError(f"the pairs name query {query_id!r}, which is not among the queries")
            positives = qrels.positives(query_id)
            for each in positives:
                if each not in position_of and each not in corpus.left_out:
                    raise InputError(
                        f"the pairs name document {each!r}, which is not in {corpus.name}; do the files match?"
                    )
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
        padded = padded_rows([self.positives[query] for query in queries.tolist()])
        documents = [self.corpus[position].full_text for position in positions.tolist()]
        if self.window:
            documents = [first_words(text, self.window) for text in documents]
        return Batch([self.texts[query] for query in queries.tolist()], documents, positions, padded)


def padded_rows(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Return rows of numbers as an array, short ones padded with −1."""
    padded = np.full((len(rows), max(map(len, rows))), -1, dtype=np.int64)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = row
    return padded


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
