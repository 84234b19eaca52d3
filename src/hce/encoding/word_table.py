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
from safetensors.torch import load_file, save_file
from scipy import sparse
from sentence_transformers.sentence_transformer.modules import InputModule
from sklearn.utils.extmath import randomized_svd
from torch import Tensor

from hce.data.corpus import Corpus
from hce.data.terms import inverse_document_frequency, terms
from hce.encoding.tables import TABLE_FILE, WORDS_FILE, WordRows, check_word_table
from hce.errors import FormatError, InputError, one_line
from hce.files import read_json, write_json
from hce.progress import counted, progress_bar

DIMENSIONS = 256
LEAST_DOCUMENTS = 2  # that a word has to be in: one that stands alone goes together with nothing
MOST_WORDS = 50_000  # the most frequent ones; the rest are in too few documents to say much
MOST_DOCUMENTS = 100_000  # a random sample of more gives nearly the same vectors, in bounded memory
ROUNDS = 4  # power iterations of the randomised SVD: the usual number for a slowly decaying spectrum


class WordTable(InputModule):
    """One vector for each word of a corpus; a text is the sum over its words, each weighted by 1 + log(occurrences).

    Attributes:
        word_rows: the terms that have a vector, in the order of the table's rows, and their language.
        table: of shape (words, n); a row's length has the word's idf in it.
    """

    save_in_root = False
    tokenizer = None
    table: Tensor

    def __init__(self, row_terms: Sequence[str], table: Tensor, language: str) -> None:
        super().__init__()
        check_word_table(row_terms, tuple(table.shape))
        if not table.is_floating_point():
            raise ValueError(f"a table of {table.dtype} is not one of vectors")
        self.word_rows = WordRows(row_terms, language)
        self.register_buffer("table", table)

    @classmethod
    def fit(
        cls,
        corpus: Corpus,
        *,
        language: str = "english",
        dim: int = DIMENSIONS,
        without: np.ndarray | None = None,
        seed: int = 0,
    ) -> WordTable:
        """Learn the words of a corpus.

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
        table = (axes * idf).T.astype(np.float32)
        return cls(row_terms, torch.from_numpy(np.ascontiguousarray(table)), language)

    def preprocess(self, inputs: list[str], prompt: str | None = None, **kwargs: Any) -> dict[str, Tensor]:
        """Count the known words of each text; a prompt is not among what a text is about, and is left out."""
        bags = self.word_rows.bags(inputs)
        features = {"input_ids": bags.rows, "offsets": bags.starts, "weights": bags.weights}
        return {name: torch.from_numpy(values) for name, values in features.items()}

    def forward(self, features: dict[str, Tensor], **kwargs: Any) -> dict[str, Tensor]:
        """Sum the rows of each text; a text without a known word is 0."""
        features["sentence_embedding"] = torch.nn.functional.embedding_bag(
            features["input_ids"],
            self.table,
            features["offsets"],
            mode="sum",
            per_sample_weights=features["weights"].to(self.table.dtype),
        )
        return features

    def get_embedding_dimension(self) -> int:
        """Return the length n of a vector."""
        return int(self.table.shape[1])

    def get_config_dict(self) -> dict[str, Any]:
        """Return language and words, which are part of an encoder's fingerprint."""
        return {"language": self.word_rows.language, "words": self.word_rows.terms}

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Write the words and their vectors into an existing folder."""
        write_json(Path(output_path) / WORDS_FILE, self.get_config_dict())
        save_file({"table": self.table.cpu().contiguous()}, Path(output_path) / TABLE_FILE)

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any) -> WordTable:
        """Read what `save` wrote, from a folder or a hub id; a table has no use for what transformers are loaded with.

        Raises:
            FormatError: something of it is missing or damaged.
        """
        folder = Path(cls.load_dir_path(model_name_or_path, subfolder=subfolder, **hub_options(kwargs)))
        try:
            facts = read_json(folder / WORDS_FILE)
            return cls(facts["words"], load_file(folder / TABLE_FILE)["table"], facts["language"])
        except Exception as error:  # whatever a damaged file makes its reader raise
            raise FormatError(f"{folder}: damaged ({one_line(error)}); train or copy the model again") from error


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
