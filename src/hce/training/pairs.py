"""Training pairs of queries and documents, and the held-out queries that measure an encoder.

Pairs come from labels (S_train in the paper) or from spans of the documents (ICT), or consist of a document twice
(SimCSE). A source yields pairs in batches. A turn passes through all pairs, in a new order and with new spans. The
draws of a batch depend on (seed, turn, batch) alone, so a killed run can resume in the middle of a turn.

The paper's Alg. 3 has "some metric" on a dev set. Here it is NDCG@10 on held-out labeled queries, never those of a test
split; all grades above 0 count the same. Without labels, it is the mean NDCG@10 over four kinds of pseudo-queries:
titles, first sentences, spans of 4 words or marks, spans of 48. By default a static encoder trains on spans of 8 to 32,
a transformer on spans of 8 to 64. So the kinds of queries also show whether the encoder improved beyond such spans.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain, count
from typing import NamedTuple, Protocol

import numpy as np

from hce.data.corpus import Corpus
from hce.data.judgments import Labels, Qrels, Query
from hce.data.text import Document, Offsets, Span, cut_span, first_words, word_offsets
from hce.encoding.encoder import Encoder
from hce.errors import InputError
from hce.processes import process_count
from hce.search.engine import nearest
from hce.training.model_folder import mean_over_kinds
from hce.training.query_mean import QueryMean
from hce.training.recipe import Recipe

logger = logging.getLogger(__name__)

LEAST_DEV_QUERIES = 20  # labeled
CUTOFF = 10
LABELED = "labeled"
LEAST_QUERIES = 20  # of a kind
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


class LabelSets(NamedTuple):
    """A run's labels: `labeled` and `generated` to train on, `dev` to measure by; `log` has queries without answers."""

    labeled: Labels | None = None
    generated: Labels | None = None
    dev: Labels | None = None
    log: tuple[str, ...] | QueryMean = ()


@dataclass(frozen=True)
class Sources:
    """Where a run's pairs come from: labels, pseudo-queries, or both (joint training)."""

    supervised: PairSource | None = None  # pairs of labeled and generated queries
    unsupervised: PairSource | None = None  # pairs made from the documents alone
    # Positions of documents kept for measuring, which give no pairs and no negatives.
    held_out: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    # Positions of the documents that give dev pseudo-queries. With `hold_out`, these are the held-out ones.
    measured: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def __post_init__(self) -> None:
        if self.supervised is None and self.unsupervised is None:
            raise InputError("there is nothing to train on: no labeled pairs and no pseudo-queries")
        fewest = min(len(source) for source in (self.supervised, self.unsupervised) if source is not None)
        if fewest < process_count():
            raise InputError(f"{fewest} pairs cannot be divided among {process_count()} processes; use fewer processes")


def documents_to_learn(corpus: Corpus, recipe: Recipe, label_sets: Iterable[Labels | None] = ()) -> Corpus:
    """Return the documents to train on: all, or a sample with all that labels name."""
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
    if dev is None:  # at most a tenth of the documents give dev queries
        count = min(recipe.dev_queries, max(1, len(corpus) // 10))
        measured = np.sort(np.random.default_rng([recipe.seed, 7]).choice(len(corpus), count, replace=False))
        devset = pseudo_devset(corpus, measured, recipe.dev_pool, recipe.seed, are_held_out=recipe.hold_out)
    else:
        devset = labeled_devset(corpus, dev.queries, dev.qrels, recipe.dev_pool, recipe.seed)
    held_out = measured if recipe.hold_out else measured[:0]
    labels = labeled.joined(generated) if labeled and generated else labeled or generated
    supervised = None if labels is None else _labeled_pairs(corpus, labels, held_out, recipe)
    unsupervised = None if recipe.mode == "supervised" else _pseudo_pairs(corpus, encoder, held_out, recipe)
    return Sources(supervised, unsupervised, held_out, measured), devset


def _labeled_pairs(corpus: Corpus, labels: Labels, held_out: np.ndarray, recipe: Recipe) -> PairSource:
    """Return the pairs of labels and generated queries, without held-out documents."""
    kept = labels
    if len(held_out):
        named = {judgment.document_id for judgment in labels.qrels.judgments()}
        kept = labels.among(named - {corpus.ids[position] for position in held_out.tolist()})
    if not kept.qrels and labels.qrels:
        raise InputError(
            f"the {len(labels.qrels)} generated queries all belong to documents held out for measuring; "
            "generate more, or train with --set hold_out=false"
        )
    return LabeledPairs(corpus, kept.queries, kept.qrels, window=recipe.window, seed=recipe.seed)


def _pseudo_pairs(corpus: Corpus, encoder: Encoder, held_out: np.ndarray, recipe: Recipe) -> PairSource:
    """Return the pairs made from the documents that are not held out."""
    others = np.setdiff1d(np.arange(len(corpus)), held_out)
    if recipe.pseudo == "simcse":
        return DropoutTwins(corpus, others, seed=recipe.seed)
    return InverseCloze(
        *(corpus, others),
        lengths=recipe.span_lengths,
        offsets=encoder.token_offsets if recipe.span_unit == "tokens" else word_offsets,
        cut_share=recipe.cut_share,
        window=recipe.window,
        seed=recipe.seed,
    )


def split_labels(labeled: Labels, recipe: Recipe) -> tuple[Labels, Labels]:
    """Hold out a tenth of the labeled queries (20 to `dev_queries`); fail below 40."""
    query_ids = list(labeled.qrels)
    if len(query_ids) < 2 * LEAST_DEV_QUERIES:
        raise InputError(
            f"{len(query_ids)} labeled queries are too few to hold some out for measuring; give separate dev queries"
        )
    count = max(LEAST_DEV_QUERIES, min(recipe.dev_queries, len(query_ids) // 10))
    rng = np.random.default_rng([recipe.seed, 7])
    held = labeled.only(query_ids[index] for index in np.sort(rng.choice(len(query_ids), count, replace=False)))
    return labeled.without(held.qrels), held


def _without_dev(labeled: Labels, dev: Labels) -> Labels:
    kept = labeled.without(dev.qrels)
    if len(kept.qrels) < len(labeled.qrels):
        logger.warning(
            "%d dev queries are among the pairs too; training skips them", len(labeled.qrels) - len(kept.qrels)
        )
    return kept


class Batch(NamedTuple):
    """Pairs to train on."""

    queries: list[str]
    documents: list[str]  # the text of each query's document, without the query if this was cut out
    positions: np.ndarray  # each document's position in the corpus, of shape (B,)
    known: np.ndarray  # positions of each query's known positives, padded with −1, of shape (B, P)
    cut: np.ndarray | None = (
        None  # whether each query was cut out of its document, of shape (B,), bool; None if none was
    )

    def rows(self, chosen: slice) -> Batch:
        """Return some of the pairs as a smaller batch."""
        return Batch(*(None if each is None else each[chosen] for each in self))  # type: ignore[arg-type]


class PairSource(Protocol):
    """A source of training pairs; its length is the number of pairs in a turn through all of them."""

    def __len__(self) -> int: ...

    def batches(self, turn: int, size: int, first: int = 0) -> Iterator[Batch]:
        """Yield the `batch_count` batches of a turn from index `first` on."""
        ...


@dataclass
class InverseCloze:
    """Inverse cloze task: the query is a random span of a document, the answer is the document.

    A span left in its document teaches the encoder to match words; a span cut out, to match meaning. A transformer's
    step costs by the token, so pairs may be made from a window at the start of each document. Windows from
    elsewhere measured worse, because a search also takes a document's vector from its title and start.
    """

    corpus: Corpus
    positions: np.ndarray = None  # type: ignore[assignment]  # of documents to draw from; by default all
    _: KW_ONLY
    lengths: Sequence[int] = (64,)  # of spans, one drawn per pair; the paper has 64 tokens
    offsets: Callable[[str], Offsets] = word_offsets  # finds the units that `lengths` count
    cut_share: float = 0.0  # how often the span is cut out of its document (0 in the paper, 0.9 in Lee et al. 2019)
    window: int = 0  # words and marks from a document's start that a pair uses; 0: all
    seed: int = 0

    def __post_init__(self) -> None:
        self.positions = np.arange(len(self.corpus)) if self.positions is None else np.asarray(self.positions)

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
            # Nothing can be cut out of a text of one word.
            cut = np.array([document != text for document, text in zip(documents, texts, strict=True)])
            yield Batch([span.inside for span in spans], documents, chosen, chosen[:, None], cut)


class DropoutTwins(InverseCloze):
    """SimCSE: a document is its own query. Only the dropout masks differ, so the encoder needs dropout."""

    def batches(self, turn: int, size: int, first: int = 0) -> Iterator[Batch]:
        """See `PairSource`."""
        for _, chosen in _shuffled(self.positions, self.seed, turn, size, first):
            texts = [self.corpus[position].full_text for position in chosen.tolist()]
            yield Batch(texts, texts, chosen, chosen[:, None])


class LabeledPairs:
    """Queries and the documents judged relevant to them (grade above 0); each such pair is one example.

    Fails if there is no pair, or if the corpus lacks a relevant document, unless reading skipped it as empty. `window`
    is the number of words and marks taken from a document's start; 0 takes all.
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
    """Count the batches of a turn, each of `size` pairs, or of all if fewer.

    Leftover pairs wait for another turn, which has another order. A small last batch would have few negatives.
    """
    return max(1, pair_count // size)


def endless(source: PairSource, size: int, step: int = 0) -> Iterator[Batch]:
    """Yield a source's batches from a step on, turn after turn."""
    turns, first = divmod(step, batch_count(len(source), size))
    return chain.from_iterable(source.batches(turn, size, first if turn == turns else 0) for turn in count(turns))


def in_batches(order: np.ndarray, size: int) -> list[np.ndarray]:
    """Cut a sequence of pairs into its `batch_count` batches."""
    return [order[start : start + size] for start in range(0, batch_count(len(order), size) * size, size)]


def _shuffled(items: np.ndarray, seed: int, turn: int, size: int, first: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the batches of a turn, with their indices; each turn has its own order."""
    order = np.random.default_rng([seed, turn]).permutation(items)
    yield from list(enumerate(in_batches(order, size)))[first:]


# ------------------------------------------------------------------------------------------------- the dev measure


@dataclass(frozen=True)
class DevQueries:
    """Queries of one kind, each with the documents that answer it."""

    kind: str  # a name for the report
    texts: list[str]
    answers: list[np.ndarray]  # for each query, the rows of the pool with its right documents
    # For each query, the right document without the query; this text replaces the full one in scoring. For a first
    # sentence, the title is cut out too. None for labeled queries.
    variants: list[str] | None = None


@dataclass(frozen=True)
class DevSet:
    """Held-out queries and the pool of documents that they search."""

    metric_name: str  # in words, for people
    corpus: Corpus
    pool: np.ndarray  # positions of the documents that are searched
    panel: tuple[DevQueries, ...]  # the kinds of queries; the metric is the mean over them

    @property
    def is_labeled(self) -> bool:
        """Whether people wrote the queries; else they are cut out of documents."""
        return self.panel[0].kind == LABELED

    def pool_texts(self) -> list[str]:
        """Return the texts that are searched."""
        return [self.corpus[position].full_text for position in self.pool.tolist()]

    def measure(self, encoder: Encoder, vectors: np.ndarray | None = None) -> dict[str, float]:
        """Measure NDCG@10 for each kind; the arguments are those of `ndcg`."""
        return means(self.ndcg(encoder, vectors))

    def ndcg(
        self, encoder: Encoder, vectors: np.ndarray | None = None, *, pool_vectors: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Measure NDCG@10 for each query of each kind, of shape (queries,).

        `vectors` are this encoder's vectors of the corpus, and `pool_vectors` those of the pool, if known.
        """
        if pool_vectors is None:
            pool_vectors = encoder.encode(self.pool_texts()) if vectors is None else np.asarray(vectors[self.pool])
        ndcg = {}
        for each in self.panel:
            variants = None if each.variants is None else encoder.encode(each.variants)
            ndcg[each.kind] = _ndcg(pool_vectors, each, encoder.encode(each.texts, "query"), variants)
        return ndcg


def means(ndcg: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the mean over the queries of each kind."""
    return {kind: float(values.mean()) for kind, values in ndcg.items()}


def mean_ndcg(ndcg: Mapping[str, np.ndarray]) -> float:
    """Return the mean over kinds of each kind's mean, by which mixes are compared."""
    return mean_over_kinds(means(ndcg))


def labeled_devset(corpus: Corpus, queries: Mapping[str, Query], qrels: Qrels, pool_size: int, seed: int) -> DevSet:
    """Build a dev set of labeled queries, their answers and random others."""
    position_of = {document_id: position for position, document_id in enumerate(corpus.ids)}
    texts, answers = [], []
    for query_id in qrels:
        right = [position_of[each] for each in qrels.positives(query_id) if each in position_of]
        if right and query_id in queries:
            texts.append(queries[query_id].text)
            answers.append(np.array(right))
    if not texts:
        raise InputError("no dev query has a relevant document in the corpus; check the dev judgments")
    pool = with_random_others(len(corpus), np.unique(np.concatenate(answers)), pool_size, seed)
    labeled = DevQueries(LABELED, texts, [np.searchsorted(pool, right) for right in answers])
    return DevSet(f"NDCG@10 on {len(texts)} held-out labeled queries", corpus, pool, (labeled,))


def pseudo_devset(
    corpus: Corpus, measured: np.ndarray, pool_size: int, seed: int, *, are_held_out: bool = True
) -> DevSet:
    """Make several kinds of queries from the `measured` documents that are unique."""
    groups = corpus.text_groups
    measured = measured[np.bincount(groups)[groups[measured]] == 1]
    if not len(measured):
        raise InputError(
            f"{corpus.name}: each document held out for measuring duplicates another one; "
            "remove duplicates, or give labeled dev queries"
        )
    pool = with_random_others(len(corpus), measured, pool_size, seed)
    rng = np.random.default_rng([seed, 1])
    kinds: dict[str, Callable[[Document], Span | None]] = {
        "titles": lambda each: Span(each.title, each.text) if each.title.strip() and each.text.strip() else None,
        "first sentences": first_sentence_of,
        "short spans": lambda document: cut_span(document.full_text, 4, rng.random()),
        "long spans": lambda document: cut_span(document.full_text, 48, rng.random()),
    }
    documents = [corpus[position] for position in measured.tolist()]
    answers = np.searchsorted(pool, measured)[:, None]  # (documents, 1)
    panel = []
    for kind, make in kinds.items():
        spans = zip(answers, map(make, documents), strict=True)
        made = [(answer, span) for answer, span in spans if span and span.inside != span.outside]
        if len(made) >= min(LEAST_QUERIES, len(measured)):
            texts, variants = [span.inside for _, span in made], [span.outside for _, span in made]
            panel.append(DevQueries(kind, texts, [answer for answer, _ in made], variants))
    if not panel:
        raise InputError("the documents are too short to make held-out queries from; give labeled dev queries")
    names = ", ".join(each.kind for each in panel)
    which = "held-out documents" if are_held_out else "documents that are not held out"
    metric_name = f"mean NDCG@10 on pseudo-queries of {len(measured)} {which} ({names})"
    return DevSet(metric_name, corpus, pool, tuple(panel))


def _ndcg(
    pool_vectors: np.ndarray, queries: DevQueries, query_vectors: np.ndarray, variant_vectors: np.ndarray | None
) -> np.ndarray:
    if variant_vectors is None:
        return ndcg_of_rankings(nearest(query_vectors, pool_vectors, CUTOFF)[0], queries.answers)
    own_scores = np.einsum("ij,ij->i", query_vectors, variant_vectors)[:, None]
    found, scores = nearest(query_vectors, pool_vectors, CUTOFF + 1)  # one more, because the full text does not count
    better = ((scores >= own_scores) & (found != np.stack(queries.answers))).sum(axis=1)
    return np.where(better < CUTOFF, 1 / np.log2(better + 2), 0.0)


def ndcg_of_rankings(ranked: Iterable[np.ndarray], answers: Sequence[np.ndarray]) -> np.ndarray:
    """Return NDCG@10 of each query from its ranking and its answers."""
    discount = 1 / np.log2(np.arange(2, CUTOFF + 2))
    gains = [
        np.isin(row[:CUTOFF], right) @ discount[: len(row)] / discount[: len(right)].sum()
        for row, right in zip(ranked, answers, strict=True)
    ]
    return np.array(gains)


def with_random_others(document_count: int, wanted: np.ndarray, size: int, seed: int | list[int]) -> np.ndarray:
    """Return `wanted` and random other positions, `size` in all (0: all), rising."""
    others = np.setdiff1d(np.arange(document_count), wanted)
    extra = min(len(others), max(0, (size or document_count) - len(wanted)))
    return np.sort(np.concatenate([wanted, np.random.default_rng(seed).choice(others, extra, replace=False)]))


def first_sentence_of(document: Document) -> Span | None:
    """Cut out the first sentence; None if it is short, or nothing else is left."""
    sentence, *rest = SENTENCE_END.split(document.text.strip(), maxsplit=1)
    return Span(sentence, rest[0]) if rest and len(sentence.split()) >= 3 else None
