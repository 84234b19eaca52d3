"""Tables: an encoder that only sums rows of tables, read from its folder with NumPy, tokenizers and safetensors alone.

A static encoder, the words of a corpus, or several of these side by side need neither torch nor transformers, which
take longer to import than a search takes; so an index is searched by `Tables` where its encoder is made of them, and by
`hce.encoding.encoder.Encoder` where not. What texts consist of, prompts and fingerprints are computed here for both.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from hce.checksums import CHECKSUMS, require_undamaged
from hce.contained import is_file, plain_path
from hce.data.terms import checked_language, terms
from hce.data.text import is_unicode
from hce.encoding.inside import require_inside
from hce.encoding.static import as_unit_rows
from hce.errors import FormatError, HceError, InputError, one_line
from hce.files import read_json, read_json_value

Side = Literal["query", "document"]

# The names that model authors give to the two sides of retrieval, as sentence-transformers looks them up.
PROMPT_NAMES: dict[Side, tuple[str, ...]] = {"query": ("query",), "document": ("document", "passage", "corpus")}
SIDES = ("query", "document")  # the order of the centres
UNLIMITED_WINDOW = 512  # for encoders that read any length: a longer text is read, but its sentences are drowned
NO_LIMIT = 10**9  # A tokenizer's limit above this means: no limit.
TEXTS_AT_ONCE = 4096

MODULES, SETTINGS, TABLE_FILE = "modules.json", "config_sentence_transformers.json", "model.safetensors"
WORDS_FILE = "words.json"
SHARES_FILE, CENTRES_FILE = "side_by_side.json", "centres.safetensors"
WORD_TABLE = "hce.encoding.word_table.WordTable"
SIDE_BY_SIDE = "hce.encoding.side_by_side.SideBySide"
NORMALIZE = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}


class TextEncoder(Protocol):
    """What turns texts into unit vectors, `Tables` or an `Encoder`."""

    name: str

    @property
    def tokenizer(self) -> Any:
        """What takes texts apart; None where no such thing is known."""

    @property
    def window(self) -> int:
        """How many tokens of a document's own it reads at once."""

    @property
    def fingerprint(self) -> str:
        """A sha256 over all that its vectors depend on."""

    def encode(self, texts: Sequence[str], side: Side = "document") -> np.ndarray:
        """Encode texts to unit vectors, float32, of shape (texts, n)."""

    def unknown_share(self, texts: Sequence[str]) -> float | None:
        """Return the share of the texts' words that a table of the corpus's words has no vector for; None without."""


# ----------------------------------------------------------------------------------------- what texts consist of


class Bags(NamedTuple):
    """The rows of a table that texts consist of, one text after another.

    Attributes:
        rows: of shape (rows of all texts,), int64.
        lengths: how many rows each text has, of shape (texts,), int64.
        weights: of the rows, float32; None where each counts once.
    """

    rows: np.ndarray
    lengths: np.ndarray
    weights: np.ndarray | None = None

    @property
    def starts(self) -> np.ndarray:
        """Where the rows of each text begin, of shape (texts,), int64."""
        return np.cumsum(self.lengths) - self.lengths

    def sums(self, table: np.ndarray) -> np.ndarray:
        """Add up the rows of each text, in their order, of shape (texts, n); a text without any is 0.

        Each text by itself: the rows of many, fetched at once, would not stay in the processor's cache.

        Raises:
            LookupError: the table has no such row.
        """
        if self.rows.max(initial=-1) >= len(table):
            raise LookupError(f"no row {self.rows.max()} among {len(table)}")
        found = np.zeros((len(self.lengths), table.shape[1]), dtype=np.float32)
        room = np.empty((self.lengths.max(initial=0), table.shape[1]), dtype=np.float32)
        start = 0
        for text, stop in enumerate(np.cumsum(self.lengths).tolist()):
            if start < stop:
                taken = room[: stop - start]
                table.take(self.rows[start:stop], axis=0, out=taken, mode="clip")
                if self.weights is not None:
                    taken *= self.weights[start:stop, None]
                np.add.reduce(taken, axis=0, out=found[text])
            start = stop
        return found


def token_bags(ids: Sequence[Sequence[int]]) -> Bags:
    """Make bags of the token ids of each text."""
    lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
    return Bags(np.fromiter(chain.from_iterable(ids), dtype=np.int64, count=int(lengths.sum())), lengths)


class WordRows:
    """The words that a table has rows for.

    Attributes:
        terms: what has a row, in the order of the rows; `words` in files.
        language: whose endings are cut off.
    """

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
        occurrences = chain.from_iterable(each.values() for each in counts)
        weights = (1 + math.log(count) for count in occurrences)
        return bags._replace(weights=np.fromiter(weights, dtype=np.float32, count=len(bags.rows)))

    def unknown_share(self, texts: Iterable[str]) -> float:
        """Return the share of the texts' words that have no vector: how far a corpus has outgrown its table."""
        bags = [terms(text, self.language) for text in texts]
        total = sum(map(len, bags))
        return sum(term not in self._row for term in chain.from_iterable(bags)) / total if total else 0.0


# ----------------------------------------------------------------------------------------- what all encoders share


def prompt_of(prompts: Mapping[str, str | None], default: str | None, side: Side) -> str | None:
    """Return what is put before each text of a side: its own prompt, else the default one.

    Args:
        prompts: by name.
        default: the name of the default prompt.
        side: of the texts.
    """
    for name in PROMPT_NAMES[side]:
        if name in prompts:
            return str(prompts[name])
    return prompts.get(default) if default else None


def window_of(tokenizer: Tokenizer | None) -> int:
    """Return how many tokens of a text are read where the tokenizer itself decides that."""
    limit = ((tokenizer and tokenizer.truncation) or {}).get("max_length")
    return max(1, int(limit)) if limit and limit < NO_LIMIT else UNLIMITED_WINDOW


def joined_rows(parts: Sequence[np.ndarray], shares: Sequence[float], centre: np.ndarray | None = None) -> np.ndarray:
    """Put rows that the parts gave one by one side by side, as `SideBySide` and a Normalize after it do.

    Args:
        parts: unit rows of shape (texts, nᵢ) each; 0 where a part knows nothing of a text.
        shares: of the parts.
        centre: what is subtracted from the rows of the first part, of shape (n₁,).

    Returns:
        Unit rows of shape (texts, Σ nᵢ), float32.
    """
    first = parts[0] if centre is None else as_unit_rows(parts[0] - centre)
    scaled = [np.float32(share**0.5) * part for share, part in zip(shares, [first, *parts[1:]], strict=True)]
    return as_unit_rows(np.concatenate(scaled, axis=1))


def check_parts(shares: Sequence[float], dims: Sequence[int], centres: tuple[int, ...] | None) -> None:
    """Refuse shares and centres that do not go with the parts.

    Args:
        shares: how much each part counts in an inner product.
        dims: of the parts.
        centres: the shape of what is subtracted from the first part's vectors, if anything is.

    Raises:
        ValueError: they do not go with the parts.
    """
    if not shares or len(dims) != len(shares) or min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6:
        raise ValueError(f"shares {tuple(shares)}: give one above 0 for each of the {len(dims)} parts, 1 in all")
    if centres is not None and centres != (len(SIDES), dims[0]):
        raise ValueError(f"centres of shape {centres} are not two vectors of the first part's")


def check_word_table(row_terms: Sequence[str], shape: tuple[int, ...]) -> None:
    """Refuse a table that has not one vector for each word.

    Raises:
        ValueError: there are more or fewer vectors than words.
    """
    if len(shape) != 2 or not shape[1]:
        raise ValueError(f"a table of shape {shape} is not one vector a word")
    if len(row_terms) != shape[0] or not all(isinstance(term, str) for term in row_terms):
        raise ValueError(f"{len(row_terms)} words for {shape[0]} vectors, or some are not words")


def checked_texts(texts: Sequence[str], side: str) -> Sequence[str]:
    """Refuse what cannot be encoded.

    Raises:
        InputError: a text is not a string, or `side` is unknown.
    """
    if side not in PROMPT_NAMES:
        raise InputError(f"side {side!r}: a text is encoded as a 'query' or as a 'document'")
    if isinstance(texts, str) or not (hasattr(texts, "__len__") and hasattr(texts, "__getitem__")):
        raise InputError(f"encode takes a list of texts, not a {type(texts).__name__}; put the single text into a list")
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(f"text number {number} is a {type(text).__name__}, not a string")
        if not is_unicode(text):
            raise InputError(f"text number {number} holds half a surrogate pair (\\ud800…\\udfff); remove it")
    return texts


def finished(vectors: np.ndarray, name: str, *, zeros: bool = False) -> np.ndarray:
    """Refuse vectors with NaN or infinity, and unless `zeros`, replace zero vectors by (1, …, 1)/√n, in place.

    Raises:
        FormatError: a vector holds infinities or NaN.
    """
    broken = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(broken):
        raise FormatError(
            f"encoder {name!r} gives NaN or infinity for text number {broken[0]}; its weights are damaged"
        )
    if not zeros:
        vectors[~vectors.any(axis=1)] = 1 / math.sqrt(vectors.shape[1])
    return vectors


def unfit(name: str, error: Exception) -> FormatError:
    """Return the error of an encoder whose files are whole and do not fit together."""
    return FormatError(
        f"encoder {name!r} is damaged: its files do not fit together ({one_line(error)}); train or copy it again"
    )


def require_row_for_each_token(tokenizer: Tokenizer, rows: int, spec: str) -> None:
    """Refuse a token table whose tokenizer knows of tokens that have no row.

    Raises:
        FormatError: there are such.
    """
    tokens = tokenizer.get_vocab_size()
    if tokens > rows:
        raise FormatError(f"{spec}: a damaged model ({tokens:,} tokens, {rows:,} vectors); train or copy it again")


def require_model(folder: Path) -> None:
    """Refuse a folder that holds no model, or one with a file that is not as it was written.

    Raises:
        InputError: there is no model.
        FormatError: it is damaged.
    """
    require_model_folder(folder)
    require_undamaged(folder, f"train or copy the model again, or delete {CHECKSUMS} if the change was meant")


def require_model_folder(folder: Path) -> None:
    """Refuse a folder that holds no model, an encoder or another, or one that leads out of itself.

    Raises:
        InputError: there is none.
        OutsideError: see `hce.encoding.inside`.
    """
    require_inside(folder)
    if not any(is_file(folder / name) for name in (MODULES, "config.json")):
        raise InputError(f"{folder} is a folder without a model (no modules.json, no config.json)")


def tokenizer_json(tokenizer: Any, *, own_limit: bool) -> str:
    """Return a tokenizer as JSON, without what the last call happened to leave in it.

    Args:
        tokenizer: of the package tokenizers, or anything else, of which there is but its type.
        own_limit: whether the length that it cuts at is its own, and not set by every call.
    """
    if not hasattr(tokenizer, "to_str"):
        return type(tokenizer).__name__
    content = json.loads(tokenizer.to_str())
    content.pop("padding", None)
    if not own_limit:
        content.pop("truncation", None)
    return json.dumps(content, sort_keys=True)


def fingerprint_of_modules(
    prompts: Mapping[Side, str],
    max_length: int | None,
    modules: Sequence[tuple[str, Mapping[str, Any]]],
    tokenizer: str,
    arrays: Iterable[tuple[str, np.ndarray]],
) -> str:
    """Return a sha256 over an encoder without companions.

    Args:
        prompts: of both kinds.
        max_length: in tokens.
        modules: names and settings.
        tokenizer: see `tokenizer_json`.
        arrays: all weights by name, in the order of the names, float32.
    """
    settings = {"prompts": prompts, "max_length": max_length}
    digest = hashlib.sha256(json.dumps([settings, modules, tokenizer], sort_keys=True).encode())
    for name, array in arrays:
        digest.update(f"{name}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def fingerprint_of_parts(
    prompts: Mapping[Side, str], shares: Sequence[float], centres: np.ndarray | None, parts: Sequence[str]
) -> str:
    """Return a sha256 over encoders side by side, whose own fingerprints are `parts`."""
    of_centres = "" if centres is None else hashlib.sha256(np.ascontiguousarray(centres).data).hexdigest()
    return hashlib.sha256(json.dumps([list(shares), of_centres, prompts, parts]).encode()).hexdigest()


# ----------------------------------------------------------------------------------------- the tables


class Table(NamedTuple):
    """One table of vectors.

    Attributes:
        vectors: of shape (rows, n), float32.
        splitter: what says which rows a text consists of: a tokenizer, or the words of a corpus.
        prompts: what is put before queries and documents.
    """

    vectors: np.ndarray
    splitter: Tokenizer | WordRows
    prompts: dict[Side, str]

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, where the rows are tokens."""
        return None if isinstance(self.splitter, WordRows) else self.splitter

    @property
    def fingerprint(self) -> str:
        """A sha256 over all that the vectors depend on."""
        if isinstance(self.splitter, WordRows):
            module_type, name = "WordTable", "0.table"
            settings: dict[str, Any] = {"language": self.splitter.language, "words": self.splitter.terms}
        else:
            module_type, name, settings = "StaticEmbedding", "0.embedding.weight", {}
        modules = [(module_type, settings), ("Normalize", NORMALIZE)]
        tokenizer = tokenizer_json(self.tokenizer, own_limit=True)
        return fingerprint_of_modules(self.prompts, None, modules, tokenizer, [(name, self.vectors)])

    def encode(self, texts: Sequence[str], prompt: str) -> np.ndarray:
        """Encode texts to unit rows of shape (texts, n), 0 where no row is known; words have no use for a prompt."""
        if isinstance(self.splitter, WordRows):
            bags = self.splitter.bags(texts)
        else:
            encodings = self.splitter.encode_batch_fast([prompt + text for text in texts], add_special_tokens=False)
            bags = token_bags([encoding.ids for encoding in encodings])
        return as_unit_rows(bags.sums(self.vectors))


class Tables:
    """An encoder of one table, or of several side by side.

    Attributes:
        name: of the folder, for messages.
        parts: the tables.
        shares: how much each part counts in an inner product; None for a table that stands alone.
        centres: what is subtracted from the first part's unit vectors, of shape (2, n₁): queries' and documents' mean.
        prompts: what is put before queries and documents; companions do without.
    """

    def __init__(
        self,
        name: str,
        parts: Sequence[Table],
        shares: tuple[float, ...] | None,
        centres: np.ndarray | None,
        prompts: dict[Side, str],
    ) -> None:
        self.name = name
        self.parts = tuple(parts)
        self.shares = shares
        self.centres = centres
        self.prompts = prompts

    @classmethod
    def read(cls, folder: Path) -> Tables | None:
        """Read a folder that `Encoder.save` wrote; None where the encoder is not made of tables alone.

        Raises:
            InputError: the folder holds no model.
            FormatError: something of it is missing or damaged.
        """
        require_model(folder)
        try:
            return cls._of(folder)
        except HceError:
            raise
        except Exception as error:  # whatever a damaged file makes its reader raise
            raise FormatError(f"{folder}: a damaged model ({one_line(error)}); train or copy it again") from error

    @classmethod
    def _of(cls, folder: Path) -> Tables | None:
        if _first_module(folder) != (SIDE_BY_SIDE, "0_SideBySide"):
            table = _read_table(folder)
            return table and cls(str(folder), [table], None, None, table.prompts)
        module = folder / "0_SideBySide"
        shares = tuple(map(float, read_json(module / SHARES_FILE)["shares"]))
        parts = [_read_table(module / f"part-{number}") for number in range(len(shares))]
        tables = [part for part in parts if part is not None]
        if len(tables) < len(parts):
            return None
        centres = load_file(module / CENTRES_FILE)["centres"] if is_file(module / CENTRES_FILE) else None
        check_parts(shares, [each.vectors.shape[1] for each in tables], None if centres is None else centres.shape)
        return cls(str(folder), tables, shares, centres, _prompts(folder))

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The first part's tokenizer; None where that is a table of words."""
        return self.parts[0].tokenizer

    @property
    def window(self) -> int:
        """How many tokens of a document's own the first part reads at once; companions read no fewer."""
        return window_of(self.tokenizer)

    @property
    def fingerprint(self) -> str:
        """A sha256 over all that the vectors depend on, the same as that of the `Encoder` of this folder."""
        if self.shares is None:
            return self.parts[0].fingerprint
        return fingerprint_of_parts(self.prompts, self.shares, self.centres, [each.fingerprint for each in self.parts])

    def encode(self, texts: Sequence[str], side: Side = "document") -> np.ndarray:
        """Encode texts to unit vectors, float32, of shape (texts, n); see `hce.encoding.encoder.Encoder.encode`.

        Raises:
            InputError: a text is not a string, or `side` is unknown.
            FormatError: the tables hold infinities or NaN.
        """
        texts = checked_texts(texts, side)
        centre = None if self.centres is None else self.centres[SIDES.index(side)]
        vectors = np.empty((len(texts), sum(part.vectors.shape[1] for part in self.parts)), dtype=np.float32)
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            some = texts[start : start + TEXTS_AT_ONCE]
            try:
                vectors_of_parts = [
                    part.encode(some, "" if i else self.prompts[side]) for i, part in enumerate(self.parts)
                ]
            except LookupError as error:
                raise unfit(self.name, error) from error
            vectors[start : start + len(some)] = joined_rows(vectors_of_parts, self.shares or (1.0,), centre)
        return finished(vectors, self.name)

    def unknown_share(self, texts: Sequence[str]) -> float | None:
        """Return the share of the texts' words that a table of the corpus's words has no vector for; None without."""
        words = [part.splitter for part in self.parts if isinstance(part.splitter, WordRows)]
        return words[0].unknown_share(texts) if words else None


def _first_module(folder: Path) -> tuple[str, str] | None:
    """Return type and folder of the module before a Normalize; None where a model is made otherwise."""
    entries = read_json_value(folder / MODULES) if is_file(folder / MODULES) else None
    if not isinstance(entries, list) or len(entries) != 2 or not all(isinstance(entry, dict) for entry in entries):
        return None
    module_types, paths = ([str(entry.get(key, "")) for entry in entries] for key in ("type", "path"))
    settings = folder / paths[1] / "config.json"
    is_normalize = module_types[1].startswith("sentence_transformers.") and module_types[1].endswith(".Normalize")
    is_usual = not is_file(settings) or read_json(settings) == NORMALIZE
    return (module_types[0], paths[0]) if is_normalize and is_usual else None


def _read_table(folder: Path) -> Table | None:
    """Read a table that stands alone; None where the folder holds something else."""
    module = _first_module(folder)
    if module is None:
        return None
    module_type, path = module
    weights = folder / path / TABLE_FILE
    if module_type == WORD_TABLE:
        facts, table = read_json(folder / path / WORDS_FILE), load_file(weights)["table"]
        check_word_table(facts["words"], table.shape)
        return Table(table.astype(np.float32), WordRows(facts["words"], facts["language"]), _prompts(folder))
    is_static = module_type.startswith("sentence_transformers.") and module_type.endswith(".StaticEmbedding")
    vectors = load_file(weights).get("embedding.weight") if is_static and is_file(weights) else None
    if vectors is None or vectors.dtype != np.float32:
        return None
    tokenizer = Tokenizer.from_file(str(plain_path(folder / path / "tokenizer.json")))
    tokenizer.no_padding()
    require_row_for_each_token(tokenizer, len(vectors), str(folder))
    return Table(vectors, tokenizer, _prompts(folder))


def _prompts(folder: Path) -> dict[Side, str]:
    """Read what is put before queries and documents."""
    settings = read_json(folder / SETTINGS) if is_file(folder / SETTINGS) else {}
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    return {side: prompt_of(prompts, default, side) or "" for side in PROMPT_NAMES}
