"""Encoder: text in, unit vectors out, by a table, by any sentence-transformers model, or by several side by side.

An encoder always normalizes: vectors of length 1 are what the tree, the losses and the index are built on. So a
model that does not end in a Normalize module gets one, and is saved with it.

Tables are summed by NumPy (`hce.encoding.tables`), and only what else there is by torch, which this module imports
when it is needed: to import it takes longer than a search by tables.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hce.checksums import write_checksums
from hce.data.corpus import Corpus
from hce.encoding.bundled import (
    BUNDLED,
    load_minilm,
    load_static,
    load_table_of,
    loading,
    quiet_transformers,
    refuse_mistyped,
    stays_off_the_hub,
)
from hce.encoding.tables import (
    NO_LIMIT,
    SIDE_BY_SIDE,
    SIDES,
    UNLIMITED_WINDOW,
    Layout,
    Prompts,
    Side,
    Table,
    TokenMemo,
    WordRows,
    check_parts,
    checked_texts,
    fingerprint_of_modules,
    fingerprint_of_parts,
    finished,
    first_module,
    joined_rows,
    mapped_rows,
    require_model,
    require_row_for_each_token,
    token_bags,
    token_ids,
    tokenizer_json,
    unfit,
    window_of,
)
from hce.errors import FormatError, HceError, InputError, one_line
from hce.files import new_folder
from hce.progress import progress_bar

if TYPE_CHECKING:
    import torch
    from sentence_transformers import SentenceTransformer
    from torch import Tensor

# Texts that are sorted by length together; more at once would save no more padding, and cost memory.
SORTED_AT_ONCE = 8192
# Tokens in a forward pass. A CPU is fastest when a batch's activations stay in its cache, a GPU when it is full.
CPU_TOKENS, GPU_TOKENS, STATIC_TOKENS = 2048, 65_536, 262_144
MOST_COUNTED = 1 << 18  # documents whose words are counted: more tell nothing that these do not
CHARACTERS_PER_TOKEN = 4  # a guess, for models whose tokenizer cannot be asked

OnTokens = Callable[[str, np.ndarray, "Tensor"], None]
"""Told of a text, its tokens' ids, of shape (T,), and their states, of shape (T, n), on the encoder's device."""


class Encoder:
    """A dense text encoder: a table, another model, or parts whose vectors stand side by side.

    Attributes:
        name: the spec that the encoder was loaded by, for messages.
        shares: how much each of the `parts` counts in an inner product; they add up to 1.
        centres: what is subtracted from the first part's vectors, of shape (2, n₁): queries' and documents' mean.
        query_map: what moves the first part's queries before that, of shape (n₁, n₁ + 1); see `mapped_rows`.
    """

    def __init__(
        self,
        model: SentenceTransformer | Table | Sequence[Encoder],
        name: str,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        shares: Sequence[float] = (1.0,),
        centres: np.ndarray | None = None,
        query_map: np.ndarray | None = None,
    ) -> None:
        """Make an encoder of a table, of a model, or of parts; by default it computes as `load` says."""
        self.name = name
        self._asked = (device, dtype)
        self._table = model if isinstance(model, Table) else None
        self._parts = tuple(model) if isinstance(model, list | tuple) and self._table is None else ()
        self.shares = tuple(map(float, shares))
        self.centres = centres
        self.query_map = query_map
        self._model: SentenceTransformer | None = None
        self._gave_any_length = False  # before the Normalize module that `load` appends
        self._token_memo: TokenMemo | None = None
        if self._parts:
            check_parts(self.shares, [part.dim for part in self._parts], centres, query_map)
        elif self._table is None:
            self._model = model.to(self.device).float().eval()  # type: ignore[union-attr]

    @classmethod
    def load(
        cls,
        spec: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        prompts: dict[str, str] | None = None,
        local: bool = False,
    ) -> Encoder:
        """Load "minilm" or "static" (bundled), a directory, or a hub id of any sentence-transformers model.

        Args:
            spec: which encoder.
            device: where to compute; by default the first GPU, else the CPU. Tables are summed by the CPU.
            dtype: what to compute in; by default bfloat16 on a GPU that has it, else float32.
            prompts: texts put before each "query" or "document", in place of the model's own.
            local: stay off the hub; a hub id is then found only if it was downloaded before.

        Raises:
            InputError: there is no such model.
            FormatError: it is a directory with checksums, and a file in it is not as it was written.
            MissingPackageError: a bundled encoder is asked for and not installed.
        """
        name = str(spec)
        if Path(name).is_dir() and name not in BUNDLED:
            encoder = _of_folder(Path(name), name, device, dtype)
        else:
            encoder = _of_name(name, device, dtype, local=local)
        if prompts:
            known = encoder.prompts
            encoder._take_prompts(known._replace(by_name={**known.by_name, **prompts}))
        return encoder

    @classmethod
    def for_corpus(
        cls, spec: str | Path, corpus: Corpus, *, device: str | torch.device | None = None, progress: bool = False
    ) -> Encoder:
        """Load an encoder that is to encode a corpus untrained: "static", as it was distilled, is fitted to the corpus.

        Any other is loaded as it is; a trained table, for one, knows its corpus already. `progress` shows a bar.

        Raises:
            InputError: there is no such model.
            MissingPackageError: a bundled encoder is asked for and not installed.
        """
        encoder = cls.load(spec, device=device)
        return encoder.fitted_to(corpus, progress=progress) if str(spec) == "static" else encoder

    @cached_property
    def device(self) -> torch.device:
        """Where the model computes."""
        return device_and_dtype(*self._asked)[0]

    @cached_property
    def dtype(self) -> torch.dtype:
        """What the model computes in; weights stay float32, so that it can be trained."""
        return device_and_dtype(*self._asked)[1]

    @property
    def model(self) -> SentenceTransformer:
        """The sentence-transformers model, in evaluation mode unless someone trains it; made of tables when asked for.

        From then on the model has the weights: an encoder whose model is trained encodes by what was learned.
        """
        if self._model is None:
            from hce.encoding.side_by_side import SideBySide, model_of, model_of_table

            if self._table is not None:
                model = model_of_table(self._table)
            else:
                module = SideBySide([part.model for part in self._parts], self.shares, self.centres, self.query_map)
                model = model_of(module, self.prompts)
            self._model = model.to(self.device).float().eval()
        return self._model

    @property
    def table(self) -> Table | None:
        """The table that the encoder consists of, as it is now; None where it is made otherwise."""
        if self._model is None or self._parts:
            return self._table
        from hce.encoding.side_by_side import table_of

        return table_of(self._model)

    @property
    def parts(self) -> list[Encoder]:
        """The encoders whose vectors stand side by side in this one's: itself, where it has no companion."""
        return list(self._parts) or [self]

    @property
    def _first(self) -> Encoder:
        """The encoder without its companions."""
        return self._parts[0]._first if self._parts else self

    @property
    def dim(self) -> int:
        """The length n of a vector."""
        if self._parts:
            return sum(part.dim for part in self._parts)
        return int(self._table.vectors.shape[1] if self._table else self.model.get_embedding_dimension())

    @property
    def is_table(self) -> bool:
        """Whether each part looks tokens or words up in a table, whatever it does after that."""
        return all(part.is_table for part in self._parts) if self._parts else self._table is not None or self._is_bag

    @property
    def _is_bag(self) -> bool:
        """Whether the model begins with a table of tokens."""
        from sentence_transformers.sentence_transformer.modules import StaticEmbedding

        return self.table is not None or isinstance(self.model[0], StaticEmbedding)

    @property
    def window(self) -> int:
        """How many tokens of a document's own the encoder reads at once; companions read no fewer."""
        tokenizer = self.tokenizer
        if not _is_of_transformer(tokenizer):
            return window_of(tokenizer)
        limit = min(self._first.model.max_seq_length or math.inf, tokenizer.model_max_length)
        prompt = len(tokenizer(self.prompt("document") or "", add_special_tokens=False)["input_ids"])
        taken = tokenizer.num_special_tokens_to_add() + prompt
        return max(1, int(limit) - taken) if limit and limit < NO_LIMIT else UNLIMITED_WINDOW

    @property
    def tokenizer(self) -> Any:
        """What takes texts apart, the first part's; None where that is a table of words."""
        first = self._first
        return first._table.tokenizer if first._table else first.model.tokenizer

    @property
    def is_scored_by_inner_product(self) -> bool:
        """Whether the model came with vectors of any length, and says that inner products compare them (Contriever)."""
        return self._gave_any_length and self.model.similarity_fn_name == "dot"

    def encode_unnormalised(self, texts: Sequence[str], side: Side = "document") -> np.ndarray:
        """Encode texts to vectors as long as the model itself makes them, of shape (texts, n)."""
        from sentence_transformers import SentenceTransformer

        modules = list(self.model)[:-1] if self._gave_any_length else list(self.model)
        model = SentenceTransformer(modules=modules, device=str(self.device))
        return np.asarray(model.encode(list(texts), prompt=self.prompt(side), show_progress_bar=False))

    def token_offsets(self, text: str) -> list[tuple[int, int]]:
        """Return where each token that the encoder makes of a text begins and ends, whatever it can read at once.

        Raises:
            InputError: the tokenizer does not know that.
        """
        tokenizer = self.tokenizer
        if not _is_of_transformer(tokenizer):
            return [tuple(span) for span in tokenizer.encode(text, add_special_tokens=False).offsets]
        if not tokenizer.is_fast:
            raise InputError(f"{self.name}: its tokenizer cannot tell where a token begins; count spans in words")
        options = {"return_offsets_mapping": True, "add_special_tokens": False, "truncation": False}
        return [tuple(span) for span in tokenizer(text, **options, verbose=False)["offset_mapping"]]

    def token_table(self) -> Encoder:
        """Return a static encoder of this transformer's own tokens: the bundled one for minilm, else one distilled now.

        Raises:
            InputError: no token table can be made of this model.
        """
        if self.name == "minilm":
            return Encoder.load("static", device=self.device)
        return Encoder(load_table_of(self.model, self.fingerprint), f"table of {self.name}", device=self.device)

    def beside(
        self, companions: Sequence[Encoder], shares: Sequence[float], centres: np.ndarray | None = None
    ) -> Encoder:
        """Return one encoder of this one and its companions.

        Args:
            companions: what stands beside this encoder.
            shares: how much this encoder and each companion count in an inner product; they add up to 1.
            centres: the mean of queries and the mean of documents by this encoder, of shape (2, n), to subtract.
        """
        mean_vectors = None if centres is None else centres.astype(np.float32)
        device, dtype = self._asked
        first = self if self.query_map is None else self.parts[0]
        options: dict[str, Any] = {"shares": shares, "centres": mean_vectors, "query_map": self.query_map}
        return Encoder((first, *companions), self.name, device=device, dtype=dtype, **options)

    def with_query_map(self, query_map: np.ndarray) -> Encoder:
        """Return this encoder, which has no companions, with its queries moved by a map of shape (n, n + 1)."""
        device, dtype = self._asked
        return Encoder((self,), self.name, device=device, dtype=dtype, query_map=query_map.astype(np.float32))

    def unknown_share(self, texts: Sequence[str]) -> float | None:
        """Return the share of the texts' words that a table of the corpus's words has no vector for; None without one.

        Such words still count by their pieces, in the other parts.
        """
        tables = [part.table.splitter for part in self.parts if part.table is not None]
        words = [each for each in tables if isinstance(each, WordRows)]
        return words[0].unknown_share(texts) if words else None

    def __repr__(self) -> str:
        return f"Encoder({self.name!r}, {self.dim} dimensions, {self.device}, {str(self.dtype).removeprefix('torch.')})"

    @property
    def prompts(self) -> Prompts:
        """What is put before texts, the first part's."""
        first = self._first
        if first._model is not None:
            return Prompts(first._model.prompts, first._model.default_prompt_name)
        return first._table.prompts if first._table else Prompts()

    def _take_prompts(self, prompts: Prompts) -> None:
        """Put other prompts before texts from now on."""
        first = self._first
        if first._model is not None:
            first._model.prompts, first._model.default_prompt_name = dict(prompts.by_name), prompts.default
        elif first._table is not None:
            first._table = first._table._replace(prompts=prompts)

    def prompt(self, side: Side) -> str | None:
        """Return what is put before each text of a side: its own prompt, else the model's default one."""
        return self.prompts.of(side)

    def tokenize(self, texts: Sequence[str], side: Side) -> dict[str, Any]:
        """Turn texts into the model's input tensors, on its device."""
        return self._features(texts, side, self.prompt(side))

    def _features(self, texts: Sequence[str], side: Side, prompt: str | None) -> dict[str, Any]:
        from torch import Tensor

        if self._is_bag:
            features = self._token_bags([(prompt or "") + text for text in texts])
        else:
            features = self.model.preprocess(list(texts), prompt=prompt, task=side)
        return {key: value.to(self.device) if isinstance(value, Tensor) else value for key, value in features.items()}

    def embed(self, features: dict[str, Any], side: Side) -> Tensor:
        """Encode tokenized texts to float32 unit vectors of shape (texts, n), with gradients where they are on."""
        import torch

        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
            vectors: Tensor = self.model(features, task=side)["sentence_embedding"]
        return torch.nn.functional.normalize(vectors.float(), dim=1)

    @property
    def has_states(self) -> bool:
        """Whether the encoder, or its first part, is a transformer, which has a state for each token of a text."""
        return self._first._has_transformer and _is_of_transformer(self.tokenizer)

    @property
    def averages_states(self) -> bool:
        """Whether the vector of a text is a mean of its tokens' states, as training then gave each state a meaning."""
        modes = [getattr(module, "pooling_mode", None) for module in self._first.model]
        return any("mean" in str(mode) for mode in modes)

    @property
    def vocabulary_size(self) -> int:
        """One more than the highest id of a token that the first part's tokenizer knows."""
        return max(self.tokenizer.get_vocab().values()) + 1

    def token_ids(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Yield the ids of each text's tokens, special ones included, as far as the first part reads it."""
        for start in range(0, len(texts), SORTED_AT_ONCE):
            yield from self._tokenized(texts[start : start + SORTED_AT_ONCE])

    def vocabulary_texts(self, count: int, words: int = 16) -> list[str]:
        """Return `count` texts, each of some words of the vocabulary, from all over it."""
        ids = np.linspace(0, self.vocabulary_size, max(0, count) * words, endpoint=False).astype(int).tolist()
        return [self.tokenizer.decode(ids[start::count], skip_special_tokens=True) for start in range(count)]

    def encode(
        self,
        texts: Sequence[str],
        side: Side = "document",
        *,
        progress: bool = False,
        zeros: bool = False,
        on_tokens: OnTokens | None = None,
    ) -> np.ndarray:
        """Encode texts to unit vectors, float32, of shape (texts, n), rows in the order of the texts.

        A text of which the encoder knows no token (to a static one, the empty text is such) has no direction of its
        own. Such a text gets the same fixed one, (1, …, 1)/√n, each time: never NaN, never zero; with `zeros`, it stays
        0, as a part has to that stands beside others.

        Where the encoder `has_states`, `on_tokens` is called with each text's tokens from the same pass, except special
        ones and those of a prompt.

        >>> encoder = Encoder.load("static")
        >>> vectors = encoder.encode(["red shoes", "blue hats", "red shoes"])
        >>> vectors.shape == (3, encoder.dim), round(float(vectors[0] @ vectors[2]), 4)
        (True, 1.0)

        Raises:
            InputError: a text is not a string, or `side` is unknown.
            FormatError: the model gives infinities or NaN.
        """
        texts = checked_texts(texts, side)
        vectors = np.empty((len(texts), self.dim), dtype=np.float32)
        prompt = self.prompt(side) or ""
        with progress_bar("encoding", len(texts), "texts", show=progress) as advance:
            for rows in self.batches(texts, side):
                vectors[rows] = self._unit_rows([texts[row] for row in rows], side, prompt, on_tokens)
                advance(len(rows))
        return finished(vectors, self.name, zeros=zeros)

    def _unit_rows(self, texts: list[str], side: Side, prompt: str, on_tokens: OnTokens | None = None) -> np.ndarray:
        """Encode texts together, to rows of length 1, or 0 where nothing of a text is known; companions see no prompt.

        Raises:
            FormatError: the files of the encoder do not fit together.
        """
        if self._parts:
            first, *companions = self._parts
            rows = [first._unit_rows(texts, side, prompt, on_tokens)]
            if self.query_map is not None and side == "query":
                rows = [mapped_rows(rows[0], self.query_map)]
            rows += [each._unit_rows(texts, side, "") for each in companions]
            return joined_rows(rows, self.shares, None if self.centres is None else self.centres[SIDES.index(side)])
        try:
            table = self.table
            if table is not None:
                return table.encode(texts, prompt, self._token_memo)
            return self._by_model(texts, side, prompt, on_tokens)
        except (LookupError, TypeError, AttributeError) as error:  # a token without a vector, a setting of no sense
            raise unfit(self.name, error) from error

    def _by_model(self, texts: list[str], side: Side, prompt: str, on_tokens: OnTokens | None) -> np.ndarray:
        import torch

        self.model.eval()
        with torch.inference_mode(), self._telling_tokens(texts, prompt, on_tokens):
            return np.asarray(self.embed(self._features(texts, side, prompt or None), side).cpu().numpy())

    def fitted_to(self, corpus: Corpus, *, progress: bool = False) -> Encoder:
        """Fit a static encoder's table to a corpus's token statistics, with no training: see `hce.encoding.word_table`.

        Of very many documents, words are counted in some, from all over. `progress` shows a bar.

        Raises:
            InputError: this encoder is not static.
        """
        from hce.encoding.word_table import document_frequencies, fit_table

        table = self.table
        if table is None or table.tokenizer is None:
            raise InputError(f"{self.name} is not a static encoder; only a token table can be fitted without training")
        every = -(-len(corpus) // MOST_COUNTED)
        some = corpus if every < 2 else corpus.only(np.arange(0, len(corpus), every))
        with progress_bar("counting words", len(some), "documents", show=progress or None) as advance:
            counts, total = document_frequencies(table.tokenizer, some.texts(), len(table.vectors), advance)
        fitted = table._replace(vectors=fit_table(table.vectors, counts, total))
        device, dtype = self._asked
        encoder = Encoder(fitted, f"{self.name}, fitted", device=device, dtype=dtype)
        encoder._token_memo = self._token_memo
        return encoder

    @contextmanager
    def remembering_tokens(self) -> Iterator[None]:
        """Have a token table tokenize each word once in this block: for a corpus that is read again and again."""
        if self.is_table and self.tokenizer is not None and self._token_memo is None:
            self._token_memo = TokenMemo.of(self.tokenizer)
        try:
            yield
        finally:
            self._token_memo = None

    @contextmanager
    def computing_in(self, dtype: torch.dtype) -> Iterator[None]:
        """Compute in another type for a while."""
        usual, self.dtype = self.dtype, dtype
        try:
            yield
        finally:
            self.dtype = usual

    @property
    def fingerprint(self) -> str:
        """A sha256 over weights, modules and their settings, prompts, length limit and tokenizer, and nothing else."""
        if self._parts:
            prints = [part.fingerprint for part in self._parts]
            return fingerprint_of_parts(self.prompts, self.shares, self.centres, self.query_map, prints)
        table = self.table
        if table is not None:
            return table.fingerprint
        limit, tokenizer = self.model.max_seq_length, self.model.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        return fingerprint_of_modules(
            self.prompts,
            None if limit is None or math.isinf(limit) else limit,
            [(type(module).__name__, _config(module)) for module in self.model],
            tokenizer_json(backend, own_limit=backend is tokenizer),  # a transformer's limit is set again by every call
            ((name, tensor.detach().float().cpu().numpy()) for name, tensor in sorted(self.model.state_dict().items())),
        )

    def save(self, path: str | Path) -> None:
        """Write a directory that `SentenceTransformer(path)` loads to the same vectors; it appears whole or not at all.

        An encoder with companions needs `trust_remote_code=True` there, and hce installed.

        Raises:
            InputError: `path` is there already and not an empty folder.
        """
        with new_folder(path) as folder, quiet_transformers():
            self.model.save(str(folder), create_model_card=False)
            write_checksums(folder)

    @property
    def _has_transformer(self) -> bool:
        from sentence_transformers.sentence_transformer.modules import Transformer

        return self._table is None and isinstance(self.model[0], Transformer)

    @contextmanager
    def _telling_tokens(self, texts: list[str], prompt: str, on_tokens: OnTokens | None) -> Iterator[None]:
        """Have `on_tokens` told, in this block, of the states that the transformer has for these texts."""
        if on_tokens is None or not self._has_transformer:
            yield
            return
        import torch

        special = torch.tensor(self.tokenizer.all_special_ids, device=self.device)
        start = len(self.tokenizer(prompt, add_special_tokens=False)["input_ids"])

        def tell(module: torch.nn.Module, inputs: Any, found: dict[str, Tensor]) -> None:
            if not {"input_ids", "attention_mask", "token_embeddings"} <= found.keys():
                return
            told = found["attention_mask"].bool() & ~torch.isin(found["input_ids"], special)
            for text, mask, ids, states in zip(texts, told, found["input_ids"], found["token_embeddings"], strict=True):
                on_tokens(text, ids[mask][start:].cpu().numpy(), states[mask][start:].float())

        handle = self.model[0].register_forward_hook(tell)
        try:
            yield
        finally:
            handle.remove()

    def _token_bags(self, texts: list[str]) -> dict[str, Tensor]:
        """Tokenize as StaticEmbedding.preprocess does, without the character offsets that it computes and drops."""
        import torch

        bags = token_bags(token_ids(self.tokenizer, texts, self._token_memo))
        return {"input_ids": torch.from_numpy(bags.rows), "offsets": torch.from_numpy(bags.starts)}

    def batches(self, texts: Sequence[str], side: Side) -> Iterator[np.ndarray]:
        """Yield row numbers, about the same number of tokens each time; a transformer's, texts of like length together.

        A table pads nothing, so its texts stay in their order.
        """
        prompt = self.prompt(side) or ""
        for start in range(0, len(texts), SORTED_AT_ONCE):
            some = texts[start : start + SORTED_AT_ONCE]
            if self.is_table:
                full = np.cumsum([len(text) // CHARACTERS_PER_TOKEN + 1 for text in some]) // STATIC_TOKENS
                yield from np.split(np.arange(start, start + len(some)), np.flatnonzero(np.diff(full)) + 1)
            else:
                yield from (start + rows for rows in self._of_like_length(some, prompt))

    def _of_like_length(self, texts: Sequence[str], prompt: str) -> Iterator[np.ndarray]:
        budget = CPU_TOKENS if self.device.type == "cpu" else GPU_TOKENS
        lengths = np.array([len(text) // CHARACTERS_PER_TOKEN + 1 for text in texts])
        if _is_of_transformer(self.tokenizer):
            lengths = np.array([len(ids) for ids in self._tokenized([prompt + text for text in texts])])
        order = np.argsort(-lengths, kind="stable")
        first = 0
        while first < len(order):
            count = max(1, budget // max(int(lengths[order[first]]), 1))
            yield order[first : first + count]
            first += count

    def _tokenized(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts' tokens, cut where the model stops reading."""
        tokenizer = self.tokenizer
        given = self._first.model.max_seq_length or tokenizer.model_max_length
        limit = given if given < NO_LIMIT else None
        ids: list[list[int]] = tokenizer(list(texts), truncation=True, max_length=limit)["input_ids"]
        return ids


def _is_of_transformer(tokenizer: Any) -> bool:
    """Return whether a tokenizer is one of transformers, and not of the package tokenizers."""
    return hasattr(tokenizer, "num_special_tokens_to_add") and hasattr(tokenizer, "model_max_length")


def device_and_dtype(
    device: str | torch.device | None, dtype: torch.dtype | None = None
) -> tuple[torch.device, torch.dtype]:
    """Return where and in what a model computes: as asked, or the first GPU, in bfloat16 if it can, or the CPU."""
    import torch

    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtype is None:
        dtype = fast_dtype(device) if device.type == "cuda" else torch.float32
    return device, dtype


def fast_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 for a GPU or a processor that has instructions for it, else float32.

    Elsewhere bfloat16 is emulated, which is slower than float32.
    """
    import torch

    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    # PyTorch asks the processor, but only under private names; without them it is float32, which is always right.
    asked = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
    has_instructions = device.type == "cpu" and any(ask() for ask in asked if ask)
    return torch.bfloat16 if has_instructions else torch.float32


def _of_folder(folder: Path, name: str, device: str | torch.device | None, dtype: torch.dtype | None) -> Encoder:
    """Load an encoder from a folder.

    Raises:
        InputError: no model is there.
        FormatError: it is damaged.
    """
    require_model(folder)
    try:
        return _read(folder, name, device, dtype)
    except HceError:
        raise
    except Exception as error:  # whatever a damaged file makes its reader raise
        raise FormatError(f"{name}: a damaged encoder ({one_line(error)}); train or copy it again") from error


def _read(folder: Path, name: str, device: str | torch.device | None, dtype: torch.dtype | None) -> Encoder:
    """Read tables, and what stands beside them, without torch; any other model with it."""
    first = first_module(folder)
    if first is None or first.type != SIDE_BY_SIDE:
        table = Table.read(folder)
        if table is not None:
            return Encoder(table, name, device=device, dtype=dtype)
        from hce.encoding.side_by_side import load_part

        with quiet_transformers():
            return _of_model(load_part(folder), name, device, dtype)
    layout = Layout.read(folder / first.path)
    names = [name, *(f"{name}, part {number}" for number in range(2, len(layout.folders) + 1))]
    parts = [_read(place, each, device, dtype) for place, each in zip(layout.folders, names, strict=True)]
    options: dict[str, Any] = {"shares": layout.shares, "centres": layout.centres, "query_map": layout.query_map}
    encoder = Encoder(parts, name, device=device, dtype=dtype, **options)
    encoder._take_prompts(Prompts.read(folder))
    return encoder


def _of_name(name: str, device: str | torch.device | None, dtype: torch.dtype | None, *, local: bool) -> Encoder:
    """Load a bundled encoder, or one of the hub.

    Raises:
        InputError: there is no such model.
    """
    if name == "static":
        return Encoder(load_static(), name, device=device, dtype=dtype)
    if name == "minilm":
        return Encoder(load_minilm(), name, device=device, dtype=dtype)
    advice = f"give {' or '.join(map(repr, BUNDLED))}, a model directory, or a hub id"
    with loading(name, "encoder", advice):
        refuse_mistyped(name)
        from sentence_transformers import SentenceTransformer

        from hce.encoding.side_by_side import hub_folder

        local = local or stays_off_the_hub(name, "encoder", advice)
        folder = hub_folder(name, local=local)
        if folder is not None:
            return _read(folder, name, device, dtype)
        return _of_model(SentenceTransformer(name, device="cpu", local_files_only=local), name, device, dtype)


def _of_model(
    model: SentenceTransformer, name: str, device: str | torch.device | None, dtype: torch.dtype | None
) -> Encoder:
    """Make an encoder of a model, which gets a Normalize module where it has none."""
    from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding

    if len(model) and isinstance(model[0], StaticEmbedding):
        require_row_for_each_token(model[0].tokenizer, len(model[0].embedding.weight), name)
    gave_any_length = not isinstance(model[-1], Normalize)
    if gave_any_length:
        model.append(Normalize())
    encoder = Encoder(model, name, device=device, dtype=dtype)
    encoder._gave_any_length = gave_any_length
    return encoder


def _config(module: Any) -> dict[str, Any]:
    config = module.get_config_dict() if hasattr(module, "get_config_dict") else {}
    return dict(json.loads(json.dumps(config, default=str)))
