"""Tables fitted to a corpus without training: of its words, or of tokens.

Words are fitted by latent semantic analysis. The matrix of documents and terms is weighted by (1 + log tf)·idf, with
BM25's idf. Its right singular vectors give each term a vector, and a text's vector is the sum of its terms' vectors.
Each of the two tables alone is mediocre; side by side they are level with BM25 (docs/LOG.md).

In a token table, the direction of a row is its token's meaning, and its length is the token's weight. Distillation does
not know which tokens are common in your corpus, so they are counted. Few documents say little, so the frequencies that
the table itself implies serve as a prior.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from scipy import sparse
from sentence_transformers.sentence_transformer.modules import InputModule
from sklearn.preprocessing import normalize
from sklearn.utils.extmath import randomized_svd
from tokenizers import Tokenizer
from torch import Tensor

from hce.data.corpus import Corpus
from hce.data.text import inverse_document_frequency, terms
from hce.encoding.tables import TABLE_FILE, WORDS_FILE, Table, WordRows, as_unit_rows, token_ids
from hce.errors import InputError
from hce.files import write_json
from hce.progress import Advance, counted, progress_bar

DIMENSIONS = 256
LEAST_DOCUMENTS = 2  # that a word must be in
MOST_WORDS = 50_000  # the most frequent ones
MOST_DOCUMENTS = 100_000  # a sample of more gives nearly the same vectors, in bounded memory
TEXTS_AT_ONCE = 4096
PRIOR_DOCUMENTS = 100  # weight of the prior (docs/LOG.md)
PRIOR_IDF = 6.5  # of a row of mean length
ROUNDS = 4  # power iterations of the randomized SVD: the usual number for a slowly decaying spectrum


def fit_words(
    corpus: Corpus,
    *,
    language: str = "english",
    dim: int = DIMENSIONS,
    without: np.ndarray | None = None,
    seed: int = 0,
) -> Table:
    """Learn a vector for each word of a corpus, scaled by the word's idf.

    Documents at the positions `without` are left out. Fail with InputError if documents share too few words.
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
    matrix = count_matrix(bags, {term: column for column, term in enumerate(row_terms)}, np.float64)
    matrix.data = (1 + np.log(matrix.data)) * idf[matrix.indices]
    matrix = normalize(matrix).astype(np.float32)  # documents × terms: (1 + log tf)·idf, rows of length 1
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
        """Encode the texts, without the prompt."""
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
        """Read what `save` wrote, from a folder or a hub id, or fail with FormatError."""
        folder = cls.load_dir_path(model_name_or_path, subfolder=subfolder, **hub_options(kwargs))
        return cls(Table.read_words(Path(folder)))


def hub_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Pick the options that say where a module's files come from."""
    names = ("token", "cache_folder", "revision", "local_files_only")
    return {name: options[name] for name in names if options.get(name) is not None}


def count_matrix(bags: Iterable[Counter[str]], column_of: Mapping[str, int], dtype: type) -> sparse.csr_matrix:
    """Return the counts of terms: a row for each text, a column for each term."""
    known = [{column_of[term]: count for term, count in bag.items() if term in column_of} for bag in bags]
    ends = np.cumsum([0, *map(len, known)])
    columns = np.fromiter(chain.from_iterable(known), dtype=np.int64, count=int(ends[-1]))
    counts: np.ndarray = np.fromiter(chain.from_iterable(each.values() for each in known), dtype, count=len(columns))
    return sparse.csr_matrix((counts, columns, ends), shape=(len(known), len(column_of)))


def document_frequencies(
    tokenizer: Tokenizer, texts: Iterable[str], vocabulary: int, advance: Advance = lambda count: None
) -> tuple[np.ndarray, int]:
    """Return in how many texts each token occurs, and the number of texts."""
    counts, total, texts = np.zeros(vocabulary), 0, iter(texts)
    while batch := list(islice(texts, TEXTS_AT_ONCE)):
        total += len(batch)
        for ids in token_ids(tokenizer, batch):
            counts[list(set(ids))] += 1
        advance(len(batch))
    return counts, total


def expected_frequencies(table: np.ndarray) -> np.ndarray:
    """Estimate the share of texts with each token, taking a row's length as its idf."""
    lengths = np.linalg.norm(table, axis=1)
    return np.exp(-PRIOR_IDF * lengths / (lengths.mean() or 1.0))


def fit_table(table: np.ndarray, counts: np.ndarray, total: int) -> np.ndarray:
    """Fit a token table: center and whiten directions, scale rows to their idf.

    Centering and whitening are weighted by df·idf², a token's share in the energy of the corpus's vectors. So no
    direction that is common in the corpus dominates every inner product. On train and dev queries of scifact and
    nfcorpus, whitening gains more than the idf weights (docs/LOG.md).

    `counts` holds the number of documents with each token, out of `total`.
    """
    counts = counts + PRIOR_DOCUMENTS * expected_frequencies(table)
    idf = inverse_document_frequency(counts, total + PRIOR_DOCUMENTS)
    share = counts * idf**2
    share /= share.sum()
    directions = as_unit_rows(table.astype(np.float64))
    centered = directions - share @ directions
    variances, axes = np.linalg.eigh((centered * share[:, None]).T @ centered)  # (n,), (n, n)
    # An axis along which tokens hardly vary carries no information, and dividing by ~0 would make it dominate.
    alive = variances > variances.max() * 1e-6
    whitened = (centered @ axes[:, alive]) / np.sqrt(variances[alive])
    if not alive.all():
        whitened = np.pad(whitened, ((0, 0), (0, int((~alive).sum()))))
    return (as_unit_rows(whitened) * idf[:, None]).astype(np.float32)
