"""Tables: a vector for each token or word, which NumPy sums to encode texts; and tables fitted to a corpus.

`Encoder` needs only this module to encode with tables: importing torch takes longer than a search. For training and
saving, a table is turned into a torch module (`hce.encoding.side_by_side`), which does the same arithmetic.

Words are fitted by latent semantic analysis. The matrix of documents and terms is weighted by (1 + log tf)·idf, with
BM25's idf, and its rows are scaled to length 1. Its right singular vectors give each term a vector. A text's vector is
the sum of its terms' vectors. A word table or a token table alone is mediocre; side by side they are
level with BM25 (docs/LOG.md).

In a token table, the direction of a row is its token's meaning, and its length is the token's weight. Distillation does
not know which tokens are common in your corpus, so they are counted. Few documents say little, so the frequencies that
the table itself implies serve as a prior.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from hce.data.text import READ_AT_ONCE, checked_language, inverse_document_frequency, terms, text_pieces
from hce.errors import FormatError, HceError, InputError, one_line
from hce.files import is_file, plain_path, read_json, read_json_value, require_inside
from hce.progress import Advance, counted, progress_bar

if TYPE_CHECKING:
    from scipy import sparse

    from hce.data.corpus import Corpus

Side = Literal["query", "document"]

# The names that model authors give to the two sides of retrieval, as sentence-transformers looks them up.
PROMPT_NAMES: dict[Side, tuple[str, ...]] = {"query": ("query",), "document": ("document", "passage", "corpus")}
SIDES = ("query", "document")  # the order of the two rows of `centres`
MOST_REMEMBERED = 1 << 19  # words, about 150 MB; later ones are tokenized each time
LONGEST_REMEMBERED = 100  # characters of a word
ROWS_AT_ONCE = 1 << 16  # rows of one text, fetched from a table

DIMENSIONS = 256
LEAST_DOCUMENTS = 2  # that a word must be in
MOST_WORDS = 50_000  # the most frequent ones
MOST_DOCUMENTS = 100_000  # of more, a sample gives nearly the same vectors, in bounded memory
TEXTS_AT_ONCE = 4096
PRIOR_DOCUMENTS = 100  # weight of the prior (docs/LOG.md)
PRIOR_IDF = 6.5  # of a row of mean length
ROUNDS = 4  # power iterations of the randomized SVD: the usual number for a slowly decaying spectrum

MODULES, SETTINGS, TABLE_FILE = "modules.json", "config_sentence_transformers.json", "model.safetensors"
WORDS_FILE, SHARES_FILE, CENTRES_FILE = "words.json", "side_by_side.json", "centres.safetensors"
# Where the module of a table of words is, and where 0.2.0 had it.
WORD_TABLES = ("hce.encoding.side_by_side.WordTable", "hce.encoding.word_table.WordTable")
SIDE_BY_SIDE = "hce.encoding.side_by_side.SideBySide"
NORMALIZE = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}


class TokenMemo(dict[str, tuple[int, ...]]):
    """A cache of each word's token ids, which saves half of a training's time.

    BERT's normalizer and pre-tokenizer never look across a space, so a text's tokens are those of its words. There is
    no cache for byte-level and sentencepiece tokenizers, where a word's tokens depend on the space before it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.limit: int | None = (tokenizer.truncation or {}).get("max_length")

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenMemo | None:
        """Make a cache; None if the tokenizer cannot take words one by one."""
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
        tokens = tuple(token_ids(self.tokenizer, [word])[0])
        may_be_cut = len(tokens) == self.limit
        if len(self) < MOST_REMEMBERED and len(word) <= LONGEST_REMEMBERED and not may_be_cut:
            self[word] = tokens
        return tokens

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text, cut to the tokenizer's length."""
        return list(chain.from_iterable(map(self.__getitem__, text.split(" "))))[: self.limit]


@lru_cache(maxsize=2)
def untruncated(tokenizer: Any) -> Tokenizer | None:
    """Copy a tokenizer so that it reads all of a text; None if it gives no offsets."""
    tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)  # inside a fast tokenizer of transformers
    if not isinstance(tokenizer, Tokenizer):
        return None
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy


def token_ids(tokenizer: Tokenizer, texts: Sequence[str], memo: TokenMemo | None = None) -> list[list[int]]:
    """Return the token ids of each text, without special tokens."""
    if memo is not None:
        return [memo.ids(text) for text in texts]
    if max(map(len, texts), default=0) <= READ_AT_ONCE:
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    limit = (tokenizer.truncation or {}).get("max_length")
    each = (chain.from_iterable(piece.ids for _, piece in _by_piece(tokenizer, text)) for text in texts)
    return [list(ids)[:limit] for ids in each]


def token_offsets(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Return the start and end of each token of a text, of shape (tokens, 2)."""
    found = (np.array(piece.offsets, np.int64).reshape(-1, 2) + start for start, piece in _by_piece(tokenizer, text))
    return np.concatenate([np.empty((0, 2), np.int64), *found])


def _by_piece(tokenizer: Tokenizer, text: str) -> Iterator[tuple[int, Any]]:
    """Tokenize a long text in pieces; yield where each begins, and its tokens."""
    start = 0
    for piece in text_pieces(text):
        yield start, tokenizer.encode(piece, add_special_tokens=False)
        start += len(piece)


class Bags(NamedTuple):
    """The rows of a table to sum for each text, one text after another."""

    rows: np.ndarray  # (rows of all texts,), int64
    lengths: np.ndarray  # how many rows each text has, (texts,), int64
    weights: np.ndarray | None = None  # of the rows, float32; None if each counts once

    @property
    def starts(self) -> np.ndarray:
        """Where the rows of each text begin, of shape (texts,), int64."""
        return np.cumsum(self.lengths) - self.lengths

    def sums(self, table: np.ndarray) -> np.ndarray:
        """Add up the rows of each text, of shape (texts, n).

        Texts are summed one by one, since the rows of many texts would not fit the processor's cache.
        """
        if self.rows.max(initial=-1) >= len(table):
            raise LookupError(f"no row {self.rows.max()} among {len(table)}")
        found = np.zeros((len(self.lengths), table.shape[1]), dtype=np.float32)
        room = np.empty((1 + min(self.lengths.max(initial=0), ROWS_AT_ONCE), table.shape[1]), dtype=np.float32)
        start = 0
        for text, stop in enumerate(np.cumsum(self.lengths).tolist()):
            for first in range(start, stop, ROWS_AT_ONCE):
                last = min(first + ROWS_AT_ONCE, stop)
                taken = room[1 : 1 + last - first]
                table.take(self.rows[first:last], axis=0, out=taken, mode="clip")
                if self.weights is not None:
                    taken *= self.weights[first:last, None]
                if first > start:  # continue the sum of earlier rows, to keep the order of adding
                    room[0] = found[text]
                    taken = room[: 1 + last - first]
                np.add.reduce(taken, axis=0, out=found[text])
            start = stop
        return found


def token_bags(ids: Sequence[Sequence[int]]) -> Bags:
    """Make bags of the token ids of each text."""
    lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
    return Bags(np.fromiter(chain.from_iterable(ids), dtype=np.int64, count=int(lengths.sum())), lengths)


class WordRows:
    """The words of a table in the order of its rows, and the stemmer's language."""

    def __init__(self, row_terms: Sequence[str], language: str) -> None:
        self.terms = list(row_terms)
        self.language = checked_language(language)
        self._row = {term: row for row, term in enumerate(self.terms)}

    def bags(self, texts: Sequence[str]) -> Bags:
        """Count the known words of each text; one that occurs c times weighs 1 + log(c)."""
        counts = [
            Counter(self._row[term] for term in terms(text, self.language) if term in self._row) for text in texts
        ]
        bags = token_bags([list(each) for each in counts])
        weights = (1 + math.log(count) for each in counts for count in each.values())
        return bags._replace(weights=np.fromiter(weights, dtype=np.float32, count=len(bags.rows)))

    def as_dict(self) -> dict[str, Any]:
        """Return language and words, for JSON."""
        return {"language": self.language, "words": self.terms}


def as_unit_rows(rows: np.ndarray) -> np.ndarray:
    """Scale rows to length 1; a zero row stays zero."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths > 0, lengths, 1)


def mapped_rows(rows: Any, query_map: Any, unit: Callable[[Any], Any] = as_unit_rows) -> Any:
    """Move unit rows of queries by an affine map, and scale them to length 1 again.

    The rows are an array or a tensor of shape (queries, n). The map has shape (n, n + 1). A row moves by the
    product of the first n columns with the row, plus the last column.
    """
    return unit(rows + rows @ query_map[:, :-1].T + query_map[:, -1])


def joined_rows(
    parts: Sequence[Any],
    shares: Sequence[float],
    centre: Any = None,
    unit: Callable[[Any], Any] = as_unit_rows,
    concatenate: Callable[..., Any] = np.concatenate,
) -> Any:
    """Join parts' rows of shape (texts, nᵢ) to unit rows of shape (texts, Σ nᵢ).

    Rows are arrays or tensors. A part's row is 0 if the part knows no token of the text. `centre` is subtracted from
    the first part's rows.
    """
    first = parts[0] if centre is None else unit(parts[0] - centre)
    scaled = [float(share) ** 0.5 * part for share, part in zip(shares, [first, *parts[1:]], strict=True)]
    return unit(concatenate(scaled, axis=1))


def check_parts(
    shares: Sequence[float], dims: Sequence[int], centres: np.ndarray | None, query_map: np.ndarray | None
) -> None:
    """Fail with ValueError if shares, `centres` or map do not fit the parts' `dims`."""
    if not shares or len(dims) != len(shares) or min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6:
        raise ValueError(f"shares {tuple(shares)}: give one above 0 for each of the {len(dims)} parts, adding up to 1")
    if centres is not None and centres.shape != (len(SIDES), dims[0]):
        raise ValueError(f"centres of shape {centres.shape}: give two vectors of the first part's {dims[0]} dimensions")
    if query_map is not None and query_map.shape != (dims[0], dims[0] + 1):
        raise ValueError(f"a query map of shape {query_map.shape}: give one of shape {(dims[0], dims[0] + 1)}")


class Prompts(NamedTuple):
    """Prompts by name, and the name of the default prompt for sides without one."""

    by_name: Mapping[str, str | None] = {}
    default: str | None = None

    @classmethod
    def read(cls, folder: Path) -> Prompts:
        """Read the prompts of a model's folder."""
        settings = read_json(folder / SETTINGS) if is_file(folder / SETTINGS) else {}
        return cls(settings.get("prompts") or {}, settings.get("default_prompt_name"))

    def of(self, side: Side) -> str | None:
        """Return a side's own prompt, else the default prompt."""
        for name in PROMPT_NAMES[side]:
            if name in self.by_name:
                return str(self.by_name[name])
        return self.by_name.get(self.default) if self.default else None

    def of_sides(self) -> dict[Side, str]:
        """Return the prompt of each side."""
        return {side: self.of(side) or "" for side in PROMPT_NAMES}


class Table(NamedTuple):
    """A table of vectors, with the tokenizer or words that give a text's rows."""

    vectors: np.ndarray  # (rows, n), float32
    splitter: Tokenizer | WordRows
    prompts: Prompts = Prompts()  # for a tokenizer; tables of words ignore them

    @classmethod
    def read(cls, folder: Path) -> Table | None:
        """Read a table from a model's folder; None if the folder holds another model.

        A damaged file may make a library's reader raise any error.
        """
        first, path = first_module(folder)
        if first in WORD_TABLES:
            return cls.read_words(folder / path)._replace(prompts=Prompts.read(folder))
        weights, name = folder / path / TABLE_FILE, "embedding.weight"
        if not (first.startswith("sentence_transformers.") and first.endswith(".StaticEmbedding") and is_file(weights)):
            return None
        with safe_open(weights, framework="np") as arrays:
            if name not in arrays.keys() or arrays.get_slice(name).get_dtype() != "F32":  # noqa: SIM118  no mapping
                return None
            vectors = np.asarray(arrays.get_tensor(name))
        tokenizer = Tokenizer.from_file(str(plain_path(folder / path / "tokenizer.json")))
        tokenizer.no_padding()
        require_row_for_each_token(tokenizer, len(vectors), str(folder))
        return cls(vectors, tokenizer, Prompts.read(folder))

    @classmethod
    def read_words(cls, folder: Path) -> Table:
        """Read a table of words from the folder of its module, or fail with FormatError."""
        try:
            facts = read_json(folder / WORDS_FILE)
            words, vectors = facts["words"], load_file(plain_path(folder / TABLE_FILE))["table"]
            if vectors.ndim != 2 or not vectors.shape[1] or not np.issubdtype(vectors.dtype, np.floating):
                raise FormatError(f"a table of shape {vectors.shape} and {vectors.dtype} is not one vector per word")
            if len(words) != len(vectors) or not all(isinstance(word, str) for word in words):
                raise FormatError(f"{len(words)} words for {len(vectors)} vectors, or some are not words")
            return cls(vectors.astype(np.float32), WordRows(words, facts["language"]))
        except Exception as error:  # a damaged file can make its reader raise anything
            raise damaged_model(folder, error) from error

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None if the rows are words."""
        return None if isinstance(self.splitter, WordRows) else self.splitter

    @property
    def fingerprint(self) -> str:
        """A sha256 over everything that a text's vector depends on."""
        if isinstance(self.splitter, WordRows):
            module, name = ("WordTable", self.splitter.as_dict()), "0.table"
        else:
            module, name = ("StaticEmbedding", {}), "0.embedding.weight"
        modules, tokenizer = [module, ("Normalize", NORMALIZE)], tokenizer_json(self.tokenizer)
        return fingerprint_of_modules(self.prompts, None, modules, tokenizer, [(name, self.vectors)])

    def encode(self, texts: Sequence[str], prompt: str = "", memo: TokenMemo | None = None) -> np.ndarray:
        """Encode texts to unit rows of shape (texts, n), 0 if a text has no known token."""
        if isinstance(self.splitter, WordRows):
            bags = self.splitter.bags(texts)
        else:
            bags = token_bags(token_ids(self.splitter, [prompt + text for text in texts], memo))
        return as_unit_rows(bags.sums(self.vectors))


def tokenizer_json(tokenizer: Any, *, own_limit: bool = True) -> str:
    """Return a tokenizer as JSON, without the settings that encoding a text changes."""
    if not hasattr(tokenizer, "to_str"):
        return type(tokenizer).__name__
    content = json.loads(tokenizer.to_str())
    content.pop("padding", None)
    if not own_limit:
        content.pop("truncation", None)
    return json.dumps(content, sort_keys=True)


def fingerprint_of_modules(
    prompts: Prompts,
    max_length: int | None,
    modules: Sequence[tuple[str, Mapping[str, Any]]],
    tokenizer: str,
    arrays: Iterable[tuple[str, np.ndarray]],
) -> str:
    """Return a sha256 over settings and weights of an encoder without companions."""
    settings = {"prompts": prompts.of_sides(), "max_length": max_length}
    digest = hashlib.sha256(json.dumps([settings, modules, tokenizer], sort_keys=True, default=str).encode())
    for name, array in arrays:
        digest.update(f"{name}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def damaged_model(name: Path | str, error: Exception, what: str = "model") -> FormatError:
    """Return the error for a model that cannot be read."""
    return FormatError(f"{name}: a damaged {what} ({one_line(error)}); train or copy it again")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the load report and progress bar of transformers in this block."""
    from transformers.utils import logging as transformers_logging

    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def loading(spec: str, what: str, advice: str) -> Iterator[None]:
    """Report in one line why a model cannot be loaded in this block."""
    try:
        yield
    except HceError:
        raise
    except Exception as error:  # a damaged file can make its reader raise anything
        if Path(spec).is_dir():
            raise damaged_model(spec, error, what) from error
        if not isinstance(error, OSError | ValueError | ImportError):
            raise
        raise InputError(f"no {what} {spec!r}: {one_line(error)} ({advice})") from error


def require_row_for_each_token(tokenizer: Tokenizer, rows: int, spec: str) -> None:
    """Fail with FormatError if a tokenizer knows more tokens than its table has rows."""
    tokens = tokenizer.get_vocab_size()
    if tokens > rows:
        raise FormatError(f"{spec}: a damaged model ({tokens:,} tokens, {rows:,} vectors); train or copy it again")


def require_model_folder(folder: Path) -> None:
    """Fail if a folder holds no model, or a link that leads out of it."""
    require_inside(folder)
    if not any(is_file(folder / name) for name in (MODULES, "config.json")):
        raise InputError(f"{folder} is a folder without a model (no modules.json, no config.json)")


def first_module(folder: Path) -> tuple[str, str]:
    """Return the first module's type and path; both "" unless only Normalize follows."""
    entries = read_json_value(folder / MODULES) if is_file(folder / MODULES) else None
    if not isinstance(entries, list) or len(entries) != 2 or not all(isinstance(entry, dict) for entry in entries):
        return "", ""
    (first, path), (second, place) = ((str(entry.get("type", "")), str(entry.get("path", ""))) for entry in entries)
    settings = folder / place / "config.json"
    is_normalize = second.startswith("sentence_transformers.") and second.endswith(".Normalize")
    is_usual = not is_file(settings) or read_json(settings) == NORMALIZE
    return (first, path) if is_normalize and is_usual else ("", "")


def read_side_by_side(module: Path) -> tuple[list[Path], dict[str, Any]]:
    """Return the folders of a `SideBySide` module's parts, and how to join them."""
    try:
        shares = tuple(map(float, read_json(module / SHARES_FILE)["shares"]))
        arrays = load_file(module / CENTRES_FILE) if is_file(module / CENTRES_FILE) else {}
        arrays = {name: arrays[name].astype(np.float32) for name in ("centres", "query_map") if name in arrays}
    except Exception as error:  # a damaged file can make its reader raise anything
        raise damaged_model(module, error) from error
    return [module / f"part-{number}" for number in range(len(shares))], dict(arrays, shares=shares)


# ------------------------------------------------------------------------------------------------- fitting to a corpus


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
    from sklearn.preprocessing import normalize  # takes a second to import
    from sklearn.utils.extmath import randomized_svd

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


def count_matrix(bags: Iterable[Counter[str]], column_of: Mapping[str, int], dtype: type) -> sparse.csr_matrix:
    """Return the counts of terms: a row for each text, a column for each term."""
    from scipy import sparse

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
    """Estimate each token's share of texts, reading the length of its row as idf."""
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
