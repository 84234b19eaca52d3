"""BM25 by bm25s, a rival without an encoder: alone, with generated queries (doc2query), and fused by rank.

Of Lucene's and bm25s's settings, these were best on scifact's train and nfcorpus's dev queries: k1 = 1.5, b = 0.75,
Porter's stemmer, no stop words removed (nDCG@10 on test .687 and .325; docs/LOG.md). The stemmer is for English; in
other languages it changes few words, and the words still match.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from hce.data.corpus import Corpus
from hce.data.judgments import Labels
from hce.errors import InputError, MissingPackageError
from hce.evaluation.evaluate import Searcher
from hce.evaluation.runs import Scored
from hce.search.fusion import candidate_count_for
from hce_lab.comparison.task import LACKS, Built, Task, best_hits, queries_by_document, searched_by_vectors

try:
    import bm25s
except ImportError as error:
    raise MissingPackageError("BM25 needs bm25s and nltk; pip install bm25s nltk") from error

K1, B = 1.5, 0.75
RANK_OFFSET = 60  # a document scores 1 / (60 + rank) in each fused list
BM25_WORD = r"(?u)\b\w+\b"


class BM25Searcher:
    """A BM25 index, with Lucene's scores."""

    def __init__(self, ids: Sequence[str], retriever: bm25s.BM25) -> None:
        self.ids = ids
        self.retriever = retriever

    @classmethod
    def index(cls, ids: Sequence[str], texts: Iterable[str]) -> BM25Searcher:
        """Count the words of all texts."""
        logging.getLogger("bm25s").setLevel(logging.WARNING)  # bm25s logs each step
        retriever = bm25s.BM25(method="lucene", k1=K1, b=B)
        retriever.index(_words(texts), show_progress=False)
        return cls(ids, retriever)

    def search(self, queries: Sequence[str], k: int) -> list[list[Scored]]:
        """Find the k best documents that share a word with each query; ties in order."""
        vocabulary = self.retriever.vocab_dict
        return [self._search([word for word in words if word in vocabulary], k) for words in _words(queries)]

    def _search(self, words: list[str], k: int) -> list[Scored]:
        if not words:
            return []
        return best_hits(self.ids, self.retriever.get_scores(words), k, above=0)

    @property
    def nbytes(self) -> int:
        """The size of the index in bytes: scores, document numbers and word offsets."""
        return sum(array.nbytes for array in self.retriever.scores.values() if isinstance(array, np.ndarray))


def build_bm25(task: Task) -> Built:
    """Index the documents' own texts."""
    return _built(task.corpus, task.corpus.texts())


def build_bm25_with_queries(task: Task) -> Built:
    """Index documents with their generated queries (docTTTTTquery, Nogueira, Lin 2019)."""
    if task.generated is None:
        raise InputError(f"bm25+qg needs {LACKS['generated']}")
    return _built(task.corpus, expanded_texts(task.corpus, task.generated))


def expanded_texts(corpus: Corpus, generated: Labels) -> Iterable[str]:
    """Return each document's text followed by its generated queries."""
    queries = queries_by_document(generated)
    return (" ".join([document.full_text, *queries.get(document.id, [])]) for document in corpus)


class ReciprocalRanks(NamedTuple):
    """Searchers fused by reciprocal ranks, as in vector databases (Cormack et al., 2009)."""

    searchers: tuple[Searcher, ...]

    def search(self, queries: Sequence[str], k: int) -> list[list[Scored]]:
        """Find the k documents with the highest sums for each query; ties in order of id."""
        found = [searcher.search(queries, candidate_count_for(k)) for searcher in self.searchers]
        return [fused_by_rank(lists)[:k] for lists in zip(*found, strict=True)]


def fused_by_rank(lists: Iterable[Sequence[Any]]) -> list[Scored]:
    """Sum 1 / (60 + rank) over ranked lists.

    >>> [(hit.id, round(hit.score, 4)) for hit in fused_by_rank([[Scored("a", 9), Scored("b", 5)], [Scored("b", 0.7)]])]
    [('b', 0.0325), ('a', 0.0164)]
    """
    sums: dict[str, float] = {}
    for hits in lists:
        for rank, hit in enumerate(hits, start=1):
            sums[hit.id] = sums.get(hit.id, 0.0) + 1 / (RANK_OFFSET + rank)
    return [Scored(each, score) for each, score in sorted(sums.items(), key=lambda pair: (-pair[1], pair[0]))]


def build_rrf(task: Task) -> Built:
    """Fuse BM25 and the untrained encoder by reciprocal ranks."""
    built = searched_by_vectors(task.load_encoder(), task.corpus)
    start = time.perf_counter()
    words = BM25Searcher.index(task.corpus.ids, task.corpus.texts())
    seconds = built.indexing_seconds + time.perf_counter() - start
    return built._replace(searcher=ReciprocalRanks((built.searcher, words)), indexing_seconds=seconds)


def _built(corpus: Corpus, texts: Iterable[str]) -> Built:
    start = time.perf_counter()
    searcher = BM25Searcher.index(corpus.ids, texts)
    return Built(searcher, 0.0, time.perf_counter() - start, searcher.nbytes, {"k1": K1, "b": B})


def _words(texts: Iterable[str]) -> list[list[str]]:
    """Split each text into words, and return their stems."""
    stem = _stemmer()
    found: list[list[str]] = bm25s.tokenize(
        list(texts),
        stopwords=None,
        token_pattern=BM25_WORD,
        stemmer=lambda words: [stem(word) for word in words],
        return_ids=False,
        show_progress=False,
    )
    return found


@lru_cache(maxsize=1)
def _stemmer() -> Callable[[str], str]:
    from nltk.stem.porter import PorterStemmer  # takes a second to import, and is needed only here

    stemmer = PorterStemmer(mode=PorterStemmer.ORIGINAL_ALGORITHM)
    return lru_cache(maxsize=1 << 20)(stemmer.stem)
