"""A static encoder: a table with one vector a token, fitted to a corpus with no training, and quick to tokenise for.

A row's direction says what its token means, its length how much the token counts in a text. Distillation knows
neither your corpus's vocabulary nor which of its words are common; both are counted here in one pass over it. Few
documents tell little of that, so what the table itself takes for common is counted in as if it had been seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain, islice

import numpy as np
from tokenizers import Tokenizer

from hce.data.terms import inverse_document_frequency
from hce.progress import Advance

TEXTS_AT_ONCE = 4096
PRIOR_DOCUMENTS = 100  # what the table expects counts like so many documents (docs/LOG.md)
PRIOR_IDF = 6.5  # of a row of mean length
MOST_WORDS = 1 << 19  # some 150 MB; words met later are tokenised each time
LONGEST_WORD = 100  # characters of one that is remembered


def document_frequencies(
    tokenizer: Tokenizer, texts: Iterable[str], vocabulary: int, advance: Advance = lambda count: None
) -> tuple[np.ndarray, int]:
    """Count in how many texts each token occurs; `advance` is told of texts as they are counted.

    Returns:
        Counts of shape (vocabulary,), float64, and the number of texts.
    """
    counts = np.zeros(vocabulary)
    total = 0
    texts = iter(texts)
    while batch := list(islice(texts, TEXTS_AT_ONCE)):
        total += len(batch)
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            counts[list(set(encoding.ids))] += 1
        advance(len(batch))
    return counts, total


def expected_frequencies(table: np.ndarray) -> np.ndarray:
    """Tell from a table alone in which share of texts each token is to be expected, of shape (vocabulary,).

    A row's length says how much its token counts: read as an idf, it says how rare the token is. Lengths have no unit,
    so the mean one is taken for `PRIOR_IDF`.
    """
    lengths = np.linalg.norm(table, axis=1)
    return np.exp(-PRIOR_IDF * lengths / (lengths.mean() or 1.0))


def fit_table(table: np.ndarray, counts: np.ndarray, total: int) -> np.ndarray:
    """Fit a token table to a corpus: centre and whiten the directions, then give each row its idf as length.

    Centring and whitening are weighted by df·idf², the share a token has in the energy of the corpus's vectors, so
    that no direction which merely "is common in this corpus" dominates every inner product. On scifact's and
    nfcorpus's train and dev queries whitening is worth more than the idf weights themselves (docs/LOG.md).

    The counts are taken together with the counts that the table leads one to expect: of no document at all the outcome
    is a table whitened by its own row lengths, and a thousand documents outweigh it.

    Args:
        table: of shape (vocabulary, n).
        counts: the document frequency of each token, of shape (vocabulary,).
        total: the number of documents.

    Returns:
        The new table, float32, of shape (vocabulary, n).
    """
    counts = counts + PRIOR_DOCUMENTS * expected_frequencies(table)
    idf = inverse_document_frequency(counts, total + PRIOR_DOCUMENTS)
    share = counts * idf**2
    share /= share.sum()
    directions = as_unit_rows(table.astype(np.float64))
    centred = directions - share @ directions
    variances, axes = np.linalg.eigh((centred * share[:, None]).T @ centred)  # (n,), (n, n)
    # An axis along which the corpus's tokens do not vary carries nothing; dividing by ~0 would make it everything.
    alive = variances > variances.max() * 1e-6
    whitened = (centred @ axes[:, alive]) / np.sqrt(variances[alive])
    if not alive.all():
        whitened = np.pad(whitened, ((0, 0), (0, int((~alive).sum()))))
    return (as_unit_rows(whitened) * idf[:, None]).astype(np.float32)


class TokenMemo(dict[str, tuple[int, ...]]):
    """The token ids of each word met so far: half of a training's time was WordPiece on the same words.

    BERT's normaliser and pre-tokenizer never look across a space, so the tokens of a text are those of its words side
    by side. That is not so of byte-level or sentencepiece tokenizers, where a word's tokens depend on the space before
    it: for those there is no memo.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.limit: int | None = (tokenizer.truncation or {}).get("max_length")

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenMemo | None:
        """Make a memo that gives just what the tokenizer would; None where words cannot be taken one by one."""
        parts = json.loads(tokenizer.to_str())
        types = [(parts[part] or {}).get("type") for part in ("normalizer", "pre_tokenizer", "model")]
        side = (parts["truncation"] or {}).get("direction", "Right")
        across_spaces = any(
            each["lstrip"] or each["rstrip"] or " " in each["content"] for each in parts["added_tokens"]
        )
        if types != ["BertNormalizer", "BertPreTokenizer", "WordPiece"] or side != "Right" or across_spaces:
            return None
        return cls(tokenizer)

    def __missing__(self, word: str) -> tuple[int, ...]:
        tokens = tuple(self.tokenizer.encode(word, add_special_tokens=False).ids)
        may_be_cut = len(tokens) == self.limit
        if len(self) < MOST_WORDS and len(word) <= LONGEST_WORD and not may_be_cut:
            self[word] = tokens
        return tokens

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text, cut to the tokenizer's length."""
        return list(chain.from_iterable(map(self.__getitem__, text.split(" "))))[: self.limit]


def as_unit_rows(rows: np.ndarray) -> np.ndarray:
    """Scale rows to length 1; a zero row stays zero."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths > 0, lengths, 1)
