"""A table of the corpus's own words, by latent semantic analysis: no training, and no other corpus's opinion of them.

A token table knows pieces of words from other people's text. Which words go together in *this* corpus is in its own
matrix of documents and terms: the right singular vectors of that matrix, weighted as BM25 weights terms, give each
term a vector, and a text the sum of its terms' vectors. Each of the two tables alone is mediocre; side by side they
are level with BM25 (docs/LOG.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from scipy import sparse
from sentence_transformers.sentence_transformer.modules import InputModule
from sklearn.utils.extmath import randomized_svd
from torch import Tensor

from hce.data.corpus import Corpus
from hce.data.terms import inverse_document_frequency, terms
from hce.encoding.tables import TABLE_FILE, WORDS_FILE, Table, WordRows
from hce.errors import InputError
from hce.files import write_json
from hce.progress import counted, progress_bar

DIMENSIONS = 256
LEAST_DOCUMENTS = 2  # that a word has to be in: one that stands alone goes together with nothing
MOST_WORDS = 50_000  # the most frequent ones; the rest are in too few documents to say much
MOST_DOCUMENTS = 100_000  # a random sample of more gives nearly the same vectors, in bounded memory
ROUNDS = 4  # power iterations of the randomised SVD: the usual number for a slowly decaying spectrum


def fit_words(
    corpus: Corpus,
    *,
    language: str = "english",
    dim: int = DIMENSIONS,
    without: np.ndarray | None = None,
    seed: int = 0,
) -> Table:
    """Learn the words of a corpus: a vector for each, whose length has the word's idf in it.

    Args:
        corpus: the documents.
        language: whose endings are cut off.
        dim: n, at most; fewer documents or words give fewer dimensions.
        without: positions of documents that are not to be learnt from, since something is measured by them.
        seed: same seed, same table.

    Raises:
        InputError: hardly a word is in two documents, so that there is nothing to learn.
    """
    sample = np.setdiff1d(np.arange(len(corpus)), [] if without is None else without)
    if len(sample) > MOST_DOCUMENTS:
        sample = np.sort(np.random.default_rng(seed).choice(sample, MOST_DOCUMENTS, replace=False))
    with progress_bar("words of the corpus", len(sample), "documents") as advance:
        places = counted(sample.tolist(), advance)
        bags = [Counter(terms(corpus[position].full_text, language)) for position in places]
    frequencies = Counter(chain.from_iterable(bags))
    row_terms = [term for term, count in frequencies.most_common(MOST_WORDS) if count >= LEAST_DOCUMENTS]
    dim = min(dim, len(row_terms) - 1, len(bags) - 1)
    if dim < 1:
        raise InputError(f"{corpus.name}: no two documents share enough words to learn from")
    counts = np.array([frequencies[term] for term in row_terms], dtype=np.float64)
    idf = inverse_document_frequency(counts, len(bags))
    matrix = term_matrix(bags, row_terms, idf)
    *_, axes = randomized_svd(matrix, dim, n_iter=ROUNDS, random_state=seed)  # (n, terms)
    return Table(np.ascontiguousarray((axes * idf).T.astype(np.float32)), WordRows(row_terms, language))


class WordTable(InputModule):
    """A table of words as a module of sentence-transformers; NumPy sums the rows."""

    save_in_root = False
    tokenizer = None

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table = table

    def preprocess(self, inputs: list[str], prompt: str | None = None, **kwargs: Any) -> dict[str, Tensor]:
        """Encode the texts; a prompt is not among what a text is about, and is left out."""
        return {"sentence_embedding": torch.from_numpy(self.table.encode(inputs))}

    def forward(self, features: dict[str, Tensor], **kwargs: Any) -> dict[str, Tensor]:
        """Return what `preprocess` has encoded."""
        return features

    def get_embedding_dimension(self) -> int:
        """Return the length n of a vector."""
        return int(self.table.vectors.shape[1])

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Write the words and their vectors into an existing folder."""
        write_json(Path(output_path) / WORDS_FILE, self.table.splitter.as_dict())
        save_file({"table": self.table.vectors}, Path(output_path) / TABLE_FILE)

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any) -> WordTable:
        """Read what `save` wrote, from a folder or a hub id; a table has no use for what transformers are loaded with.

        Raises:
            FormatError: something of it is missing or damaged.
        """
        folder = cls.load_dir_path(model_name_or_path, subfolder=subfolder, **hub_options(kwargs))
        return cls(Table.read_words(Path(folder)))


def hub_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Pick from what a module is loaded with what says where its files come from."""
    names = ("token", "cache_folder", "revision", "local_files_only")
    return {name: options[name] for name in names if options.get(name) is not None}


def count_matrix(bags: Iterable[Counter[str]], column_of: Mapping[str, int], dtype: type) -> sparse.csr_matrix:
    """Return how often each term that has a column is in each text, of shape (texts, terms)."""
    known = [{column_of[term]: count for term, count in bag.items() if term in column_of} for bag in bags]
    ends = np.cumsum([0, *map(len, known)])
    columns = np.fromiter(chain.from_iterable(known), dtype=np.int64, count=int(ends[-1]))
    counts: np.ndarray = np.fromiter(chain.from_iterable(each.values() for each in known), dtype, count=len(columns))
    return sparse.csr_matrix((counts, columns, ends), shape=(len(known), len(column_of)))


def term_matrix(bags: Sequence[Counter[str]], column_terms: Sequence[str], idf: np.ndarray) -> sparse.csr_matrix:
    """Return documents × terms: (1 + log tf)·idf, rows of length 1."""
    matrix = count_matrix(bags, {term: column for column, term in enumerate(column_terms)}, np.float64)
    matrix.data = (1 + np.log(matrix.data)) * idf[matrix.indices]
    lengths = np.sqrt(np.asarray(matrix.multiply(matrix).sum(axis=1)).ravel())
    return (sparse.diags_array(1 / np.where(lengths > 0, lengths, 1)).tocsr() @ matrix).astype(np.float32)
