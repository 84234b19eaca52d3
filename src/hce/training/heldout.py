"""The dev measure: how well an encoder finds the answers to held-out queries, which are never those of a test split.

With labeled queries it is NDCG@10 on them (any grade above 0 counts alike). Without, it is the mean NDCG@10 over four
kinds of pseudo-queries: titles, first sentences, spans of 4 and of 48 words and marks. A static encoder trains on spans
of other lengths, a transformer on spans of up to 64; the other kinds show whether it got better at more than these.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hce.data.corpus import Corpus
from hce.data.documents import Document
from hce.data.judgments import Qrels, Query
from hce.data.text import Span, cut_span
from hce.encoding.encoder import Encoder
from hce.errors import InputError
from hce.search.exact import nearest, score_blocks
from hce.training.model_folder import mean_over_kinds

CUTOFF = 10
LABELED = "labeled"
LEAST_QUERIES = 20
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class DevQueries:
    """Queries of one kind, each with the documents that answer it.

    Attributes:
        kind: a name for the report.
        texts: the queries.
        answers: for each query, where in the pool its right documents stand.
        variants: for each query the text that is scored instead of its one right document: that document with the
            query cut out (of a first sentence, without the title too); None for labeled queries.
    """

    kind: str
    texts: list[str]
    answers: list[np.ndarray]
    variants: list[str] | None = None


@dataclass(frozen=True)
class DevSet:
    """A pool of documents and the queries to find them by.

    Attributes:
        metric_name: what is measured, in words.
        corpus: the documents.
        pool: positions of the documents that are searched.
        panel: the kinds of queries; the metric is the mean over them.
    """

    metric_name: str
    corpus: Corpus
    pool: np.ndarray
    panel: tuple[DevQueries, ...]

    @property
    def is_labeled(self) -> bool:
        """Whether the queries are people's, and not made of the documents."""
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

        `vectors` are those of the corpus by this encoder, and `pool_vectors` those of the pool, if they are known.
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
    """Return the mean over kinds of each kind's mean: what decides."""
    return mean_over_kinds(means(ndcg))


def labeled_devset(corpus: Corpus, queries: Mapping[str, Query], qrels: Qrels, pool_size: int, seed: int) -> DevSet:
    """Ask labeled queries of a pool: their answers and random others; fail if no query has an answer there."""
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
    """Make queries of the documents at positions `measured` in several ways; skip duplicates."""
    groups = corpus.text_groups
    measured = measured[np.bincount(groups)[groups[measured]] == 1]
    if not len(measured):
        raise InputError(
            f"{corpus.name}: each document held out to measure by has the text of another one; "
            "remove doubles, or give labeled dev queries"
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
        raise InputError("the documents are too short to make held-out queries of; give labeled dev queries")
    names = ", ".join(each.kind for each in panel)
    which = "held-out documents" if are_held_out else "documents that are not held out"
    metric_name = f"mean NDCG@10 on pseudo-queries of {len(measured)} {which} ({names})"
    return DevSet(metric_name, corpus, pool, tuple(panel))


def _ndcg(
    pool_vectors: np.ndarray, queries: DevQueries, query_vectors: np.ndarray, variant_vectors: np.ndarray | None
) -> np.ndarray:
    if variant_vectors is None:
        return ndcg_of_rankings(nearest(query_vectors, pool_vectors, CUTOFF)[0], queries.answers)
    answers = np.concatenate(queries.answers)
    own_scores = np.einsum("ij,ij->i", query_vectors, variant_vectors)
    better = np.zeros(len(query_vectors), dtype=np.int64)
    for rows, scores in score_blocks(query_vectors, pool_vectors):
        scores[np.arange(len(scores)), answers[rows]] = -np.inf  # its full text; the variant replaces it
        better[rows] = (scores >= own_scores[rows, None]).sum(axis=1)
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
    """Return the wanted documents and random others, `size` in all (0: all), in order; never fewer than the wanted."""
    others = np.setdiff1d(np.arange(document_count), wanted)
    extra = min(len(others), max(0, (size or document_count) - len(wanted)))
    return np.sort(np.concatenate([wanted, np.random.default_rng(seed).choice(others, extra, replace=False)]))


def first_sentence_of(document: Document) -> Span | None:
    """Cut the first sentence out of a text; None if too little is left."""
    sentence, *rest = SENTENCE_END.split(document.text.strip(), maxsplit=1)
    return Span(sentence, rest[0]) if rest and len(sentence.split()) >= 3 else None
