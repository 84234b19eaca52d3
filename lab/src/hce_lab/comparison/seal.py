r"""SEAL (Bevilacqua et al. 2022): n-grams of the corpus as identifiers of documents.

Michele Bevilacqua, Giuseppe Ottaviano, Patrick Lewis, Wen-tau Yih, Sebastian Riedel and Fabio Petroni, "Autoregressive
Search Engines: Generating Substrings as Document Identifiers", NeurIPS 2022. A language model reads the query and
writes n-grams by beam search; a suffix array restricts them to n-grams of the corpus. K are the n-grams written, with
their prefixes, and F(n) is the number of occurrences of n in the corpus:

    P(n)    = F(n) / Σ_d |d|                                                               (corpus, unconditional)
    w(n, q) = max(0, log P(n|q) (1 − P(n)) / (P(n) (1 − P(n|q))))                          (LM+FM scoring)
    W(d, q) = Σ_{n ∈ K(d)} w(n, q)^α · cover(n, K(d))                                      (LM+FM intersective scoring)
    cover(n, K(d)) = 1 − β + β · |set(n) \ C(n, K(d))| / |set(n)|

K(d) ⊆ K has the n-grams of document d that have an occurrence without overlap with a heavier n-gram of K(d). C(n, K(d))
has the tokens of all heavier n-grams of K(d). As in the paper, α = 2, β = 0.8, with 15 beams and at most 10 tokens per
n-gram. As in the authors' program, K also has the query's own n-grams (up to 3 words, if in the corpus), scored by the
language model. P(n) is not smoothed. All documents are scored, not only the best 1,500 by rare n-grams.

The authors' program has further parts, which are left out: the score of a document's single tokens (a default), twice
as many candidates per step as beams, query words in both cases and without punctuation (here they are taken as they
occur between spaces, with beginnings of words), and a separate generation of titles. Here, an occurrence that overlaps
a heavier one is always skipped; in their program, only if the heavier one counts.

The authors train BART on pairs of a query and n-grams of its document. The language model here is not trained. A causal
one gets a prompt of three queries with their passages; a seq2seq one gets the query. So this measures what a language
model knows already, not what SEAL learns from labels. A model trained for SEAL can be named instead.
"""

from __future__ import annotations

import copy
import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hce.data.corpus import Corpus
from hce.errors import InputError, MissingPackageError
from hce.evaluation.runs import Scored
from hce.progress import progress_bar
from hce_lab.comparison.generative import parameter_count
from hce_lab.comparison.task import Built, Task, best_first, best_hits
from hce_lab.generation.generator import EXAMPLES, Generator

ALPHA, BETA = 2.0, 0.8
BEAMS, LENGTH = 15, 10
QUERY_WORDS = 3  # longest of the query's own n-grams
MAX_QUERY_TOKENS = 128
QUERY_FRAME = 16  # tokens of a prompt around the query, at most
MAX_TOKENS = 100_000_000  # of a corpus; building the suffix array takes up to 52 bytes per token, searching 9
DOCUMENTS_AT_ONCE = 1000
CERTAIN = -1e-9  # highest log probability; the odds of probability 1 would be infinite
SHOWN = "".join(f"Query: {query}\nPassage: {passage}\n\n" for passage, query in EXAMPLES)

Ngram = tuple[int, ...]


# ------------------------------------------------------------------------------------------ n-grams of the corpus


class SuffixRange(NamedTuple):
    """The rows of a suffix array that begin with an n-gram of `length` tokens."""

    low: int
    high: int
    length: int

    @property
    def occurrences(self) -> int:
        """The number of the n-gram's occurrences in the corpus."""
        return self.high - self.low


@dataclass(frozen=True)
class Substrings:
    """Every n-gram of a corpus: the tokens of its documents and their suffix array.

    Attributes:
        tokens: the tokens of all documents in order, with a separator after each.
        suffixes: the start of each suffix of `tokens`, in sorted order.
        ends: the position of each document's separator in `tokens`.
        separator: a number larger than every token; no n-gram has it, so none spans two documents.
    """

    tokens: np.ndarray
    suffixes: np.ndarray
    ends: np.ndarray
    separator: int

    @classmethod
    def of(cls, documents: Iterable[Sequence[int]], separator: int) -> Substrings:
        """Build the suffix array of documents, given as tokens.

        Raises:
            InputError: there are more than `MAX_TOKENS` tokens.
            MissingPackageError: the package that builds it is not installed.
        """
        parts: list[np.ndarray] = []
        size = 0
        for document in documents:
            parts.append(np.array([*document, separator], dtype=np.int32))
            size += len(document)
            if size > MAX_TOKENS:
                raise InputError(
                    f"seal: the first {len(parts):,} documents have {size:,} tokens, and its suffix array takes "
                    f"{MAX_TOKENS:,}; give a smaller corpus"
                )
        tokens = np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64) - 1
        return cls(tokens, _suffix_array(tokens), ends, separator)

    @property
    def size(self) -> int:
        """The number of tokens, without separators."""
        return len(self.tokens) - len(self.ends)

    @property
    def everything(self) -> SuffixRange:
        """The span of the empty n-gram; suffixes from a separator are last, and excluded."""
        return SuffixRange(0, self.size, 0)

    @property
    def nbytes(self) -> int:
        """The size of the index in bytes."""
        return int(self.tokens.nbytes + self.suffixes.nbytes + self.ends.nbytes)

    def longer(self, span: SuffixRange, token: int) -> SuffixRange:
        """Return the span of an n-gram with one more token; empty if not in the corpus."""

        def at(row: int) -> int:
            return int(self.tokens[self.suffixes[row] + span.length])

        rows = range(span.low, span.high)
        low, high = (bisect_left(rows, wanted, key=at) for wanted in (token, token + 1))
        return SuffixRange(span.low + low, span.low + high, span.length + 1)

    def find(self, ngram: Ngram) -> SuffixRange:
        """Return the span of an n-gram; empty if not in the corpus."""
        span = self.everything
        for token in ngram:
            span = self.longer(span, token)
        return span

    def next_tokens(self, span: SuffixRange) -> np.ndarray:
        """Return the tokens that follow an n-gram somewhere in the corpus, in order."""
        return self._first_tokens if span == self.everything else self._following(span)

    @cached_property
    def _first_tokens(self) -> np.ndarray:
        return self._following(self.everything)

    def _following(self, span: SuffixRange) -> np.ndarray:
        column = self.tokens[self.suffixes[span.low : span.high] + span.length]  # sorted, as the suffixes are
        changes = np.flatnonzero(column[1:] != column[:-1]) + 1
        tokens = column[np.concatenate([[0], changes])] if len(column) else column
        return tokens[tokens != self.separator]

    def places(self, span: SuffixRange) -> np.ndarray:
        """Return the positions in `tokens` of each occurrence, (occurrences, length)."""
        starts = self.suffixes[span.low : span.high].astype(np.int64)
        return starts[:, None] + np.arange(span.length)

    def documents_at(self, places: np.ndarray) -> np.ndarray:
        """Return the position of the document that each place belongs to."""
        return np.searchsorted(self.ends, places)


def _suffix_array(tokens: np.ndarray) -> np.ndarray:
    try:
        from pydivsufsort import divsufsort
    except ImportError as error:
        raise MissingPackageError("seal sorts the corpus with pydivsufsort; pip install pydivsufsort") from error
    return np.asarray(divsufsort(tokens)) if len(tokens) else np.empty(0, dtype=np.int32)


# ------------------------------------------------------------------------------------------ what is written


class Draft:
    """The n-grams that a language model has written for a query so far, one per row."""

    def __init__(self, model: Any, cache: Any, encoded: tuple[Tensor, Tensor] | None = None) -> None:
        self.model = model
        self.cache = cache
        self.encoded = encoded  # in a seq2seq model, the encoder's states of the query, and their mask
        self.tokens_name = "input_ids" if encoded is None else "decoder_input_ids"

    def go_on(self, parents: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        """Append a token to each chosen row, and keep these; return log P of next tokens."""
        device = self.model.device
        self.cache.reorder_cache(torch.tensor(parents, device=device))
        given = self._given(len(parents)) | {self.tokens_name: torch.tensor(tokens, device=device)[:, None]}
        with torch.inference_mode():
            written = self.model(**given, past_key_values=self.cache, use_cache=True)
        return _log_probabilities(written.logits)

    def _given(self, rows: int) -> dict[str, Any]:
        if self.encoded is None:
            return {}
        states, mask = self.encoded
        return {"encoder_outputs": (states.expand(rows, -1, -1),), "attention_mask": mask.expand(rows, -1)}


class Author:
    """A language model that writes n-grams.

    Attributes:
        generator: the model and its tokenizer.
    """

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self._shown = None if generator.is_seq2seq else self._read(SHOWN)

    @property
    def separator(self) -> int:
        """A number larger than every token's."""
        return int(self.generator.model.get_input_embeddings().num_embeddings)

    def tokens_of(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize texts as within a sentence, with normalized white space."""
        spaced = [" " + " ".join(text.split()) for text in texts]
        found: list[list[int]] = self.generator.tokenizer(spaced, add_special_tokens=False, verbose=False)["input_ids"]
        return found

    def begin(self, query: str) -> tuple[Draft, np.ndarray]:
        """Read a query; return an empty draft, and log P of first tokens."""
        tokenizer, model = self.generator.tokenizer, self.generator.model
        ids = tokenizer(query, add_special_tokens=False, truncation=True, max_length=MAX_QUERY_TOKENS)["input_ids"]
        query = tokenizer.decode(ids, skip_special_tokens=True)
        if self.generator.is_seq2seq:
            return self._begin_seq2seq(query)
        features = tokenizer(f"Query: {query}\nPassage:", add_special_tokens=False, return_tensors="pt")
        cache = copy.deepcopy(self._shown)
        with torch.inference_mode():
            read = model(input_ids=features["input_ids"].to(model.device), past_key_values=cache, use_cache=True)
        return Draft(model, read.past_key_values), _log_probabilities(read.logits)

    def _begin_seq2seq(self, query: str) -> tuple[Draft, np.ndarray]:
        model = self.generator.model
        features = self.generator.tokenizer(query, return_tensors="pt").to(model.device)
        mask, start = features["attention_mask"], model.generation_config.decoder_start_token_id
        with torch.inference_mode():
            states = model.get_encoder()(input_ids=features["input_ids"], attention_mask=mask).last_hidden_state
            first = torch.full((1, 1), start, device=model.device)
            read = model(encoder_outputs=(states,), attention_mask=mask, decoder_input_ids=first, use_cache=True)
        return Draft(model, read.past_key_values, (states, mask)), _log_probabilities(read.logits)

    def _read(self, text: str) -> Any:
        """Return a causal model's cache after the text that every prompt begins with.

        Raises:
            InputError: the model cannot go on from what it has read, or cannot read that much.
        """
        name, model = self.generator.name, self.generator.model
        ids = self.generator.tokenizer(text, return_tensors="pt")["input_ids"].to(self.generator.device)
        limit = getattr(model.config, "max_position_embeddings", None)
        most = ids.shape[1] + MAX_QUERY_TOKENS + QUERY_FRAME + LENGTH
        with torch.inference_mode():
            if model(input_ids=ids[:, :1], use_cache=True).get("past_key_values") is None:
                raise InputError(f"seal: {name} has no decoder; give a causal or seq2seq language model")
            if limit is not None and limit < most:
                raise InputError(f"seal: {name} reads {limit:,} tokens, and a prompt takes {most:,}; give another one")
            return model(input_ids=ids, use_cache=True).past_key_values


def _log_probabilities(logits: Tensor) -> np.ndarray:
    found: np.ndarray = logits[:, -1].float().log_softmax(dim=-1).cpu().numpy()
    return found


class _Row(NamedTuple):
    """An unfinished n-gram: log P(n|q), its span, and the tokens that must follow, if any."""

    ngram: Ngram
    score: float
    span: SuffixRange
    rest: Ngram | None


def write_ngrams(
    author: Author, substrings: Substrings, query: str, *, beams: int = BEAMS, length: int = LENGTH
) -> dict[Ngram, float]:
    """Generate n-grams of the corpus for a query; return them with log P(n|q).

    Args:
        author: the language model.
        substrings: the n-grams that it may write.
        query: the query.
        beams: the width of the beam.
        length: the length of the longest n-gram.

    Returns:
        The best `beams` n-grams of each length from 1 to `length`, and the query's own; none for a query without
        words.
    """
    if not query.split():
        return {}
    draft, likely = author.begin(query)
    rows = [_Row((), 0.0, substrings.everything, None)]
    rows += [_Row((), 0.0, substrings.everything, ngram[:length]) for ngram in query_ngrams(author, query)]
    likely = np.repeat(likely, len(rows), axis=0)
    drafted: Sequence[int] = [0] * len(rows)  # the draft's row that each row continues; at first there is one
    found: dict[Ngram, float] = {}
    for step in range(length):
        grown = [*_best(rows, likely, substrings, beams), *_settled(rows, likely, substrings)]
        found.update({row.ngram: row.score for _, row in grown})
        if not grown or step + 1 == length:
            break
        likely = draft.go_on([drafted[parent] for parent, _ in grown], [row.ngram[-1] for _, row in grown])
        rows, drafted = [row for _, row in grown], range(len(grown))
    return found


def query_ngrams(author: Author, query: str) -> Iterator[Ngram]:
    """Yield the tokens of each three consecutive words of a query, fewer at its end."""
    words = query.split()
    for start in range(len(words)):
        yield tuple(author.tokens_of([" ".join(words[start : start + QUERY_WORDS])])[0])


def _best(rows: Sequence[_Row], likely: np.ndarray, substrings: Substrings, beams: int) -> Iterator[tuple[int, _Row]]:
    """Yield the likeliest extensions of unconstrained n-grams, with their parents."""
    free = [number for number, row in enumerate(rows) if row.rest is None]
    choices = [substrings.next_tokens(rows[number].span) for number in free]
    tokens = np.concatenate([*choices, np.empty(0, dtype=np.int32)]).astype(np.int64)
    parents = np.repeat(free, [len(each) for each in choices]).astype(np.int64)
    scores = np.array([row.score for row in rows])[parents] + likely[parents, tokens]
    for place in best_first(scores, beams).tolist():
        parent, token = int(parents[place]), int(tokens[place])
        row = rows[parent]
        yield parent, _Row((*row.ngram, token), float(scores[place]), substrings.longer(row.span, token), None)


def _settled(rows: Sequence[_Row], likely: np.ndarray, substrings: Substrings) -> Iterator[tuple[int, _Row]]:
    """Yield the extensions of the query's n-grams that are in the corpus."""
    for number, row in enumerate(rows):
        if not row.rest:
            continue
        token, *rest = row.rest
        span = substrings.longer(row.span, token)
        if span.occurrences:
            score = row.score + float(likely[number, token])
            yield number, _Row((*row.ngram, token), score, span, tuple(rest))


# ------------------------------------------------------------------------------------------ how documents are scored


def weight(log_probability: float, count: int, size: int) -> float:
    """Return w(n, q): the gain in log odds of an n-gram by the model over its count, or 0.

    >>> round(weight(math.log(0.5), 1, 5), 6) == round(math.log(4), 6)  # odds of 1 and of 1/4
    True

    Args:
        log_probability: log P(n|q).
        count: F(n).
        size: the number of tokens in the corpus.
    """
    return max(0.0, _log_odds(log_probability) - _log_odds(math.log(count / size)))


def _log_odds(log_probability: float) -> float:
    log_probability = min(log_probability, CERTAIN)
    return log_probability - math.log(-math.expm1(log_probability))


def document_scores(
    substrings: Substrings, weights: Mapping[Ngram, float], *, alpha: float = ALPHA, beta: float = BETA
) -> np.ndarray:
    """Compute W(d, q) of every document; order n-grams of equal weight by their tokens.

    Args:
        substrings: the corpus.
        weights: w(n, q) of each n-gram written.
        alpha: the exponent of weights.
        beta: the share of a weight that an n-gram loses if heavier n-grams have all its tokens.
    """
    scores = np.zeros(len(substrings.ends))
    covered = np.zeros(len(substrings.tokens), dtype=bool)
    holders_of: dict[int, np.ndarray] = {}  # by token: the documents with an n-gram that has it
    nobody = np.empty(0, dtype=np.int64)
    for ngram, value in sorted(weights.items(), key=lambda item: (-item[1], item[0])):
        if value <= 0:
            break
        places = substrings.places(substrings.find(ngram))
        documents = substrings.documents_at(places[:, 0])
        holders = np.unique(documents[~covered[places].any(axis=1)])
        tokens = sorted(set(ngram))
        new = np.mean([~np.isin(holders, holders_of.get(token, nobody)) for token in tokens], axis=0)
        scores[holders] += value**alpha * (1 - beta + beta * new)
        covered[places[np.isin(documents, holders)]] = True
        for token in tokens:
            holders_of[token] = np.union1d(holders_of.get(token, nobody), holders)
    return scores


# ------------------------------------------------------------------------------------------ the system


@dataclass(frozen=True)
class SEALSearcher:
    """A searcher by the n-grams that a language model writes.

    Attributes:
        author: the language model.
        ids: the ids of the documents.
        substrings: their n-grams.
        progress: show a bar, as a query takes a second or more on a CPU.
    """

    author: Author
    ids: Sequence[str]
    substrings: Substrings
    progress: bool = False

    @classmethod
    def index(cls, author: Author, corpus: Corpus, *, progress: bool = False) -> SEALSearcher:
        """Tokenize a corpus as the language model does, and build its suffix array.

        Raises:
            InputError: the corpus is too large.
        """
        documents = _tokenised(author, corpus, progress=progress)
        return cls(author, corpus.ids, Substrings.of(documents, author.separator), progress)

    def search(self, queries: Sequence[str], k: int) -> list[list[Scored]]:
        """Find the k best documents with written n-grams for each query; ties in order."""
        found = []
        with progress_bar("writing n-grams", len(queries), "queries", show=self.progress) as advance:
            for query in queries:
                found.append(self._search(query, k))
                advance(1)
        return found

    def _search(self, query: str, k: int) -> list[Scored]:
        written = write_ngrams(self.author, self.substrings, query)
        size = self.substrings.size
        weights = {
            ngram: weight(score, self.substrings.find(ngram).occurrences, size) for ngram, score in written.items()
        }
        return best_hits(self.ids, document_scores(self.substrings, weights), k, above=0)


def _tokenised(author: Author, corpus: Corpus, *, progress: bool) -> Iterator[list[int]]:
    texts = corpus.texts()
    with progress_bar("tokenising", len(corpus), "documents", show=progress) as advance:
        while batch := list(islice(texts, DOCUMENTS_AT_ONCE)):
            yield from author.tokens_of(batch)
            advance(len(batch))


def build_seal(task: Task) -> Built:
    """Index every n-gram of the corpus, for the untrained language model."""
    author = Author(Generator.load(task.language_model))
    start = time.perf_counter()
    searcher = SEALSearcher.index(author, task.corpus, progress=task.progress)
    facts = {
        "language_model": task.language_model,
        "parameters": parameter_count(author.generator.model),
        "tokens": searcher.substrings.size,
        "trained": False,
    }
    return Built(searcher, 0.0, time.perf_counter() - start, searcher.substrings.nbytes, facts)
