"""Encoder: text in, unit vectors out.

An encoder is a table, any sentence-transformers model, or several of them side by side. Tree, losses and index need
vectors of length 1, so a Normalize module is added to each model that does not end in one.

NumPy sums the rows of tables (`hce.encoding.tables`). A table is turned into a torch module only when
training or saving needs `Encoder.model`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hce.data.corpus import Corpus
from hce.data.text import READ_AT_ONCE, Offsets, is_unicode
from hce.encoding.bundled import BUNDLED, load_minilm, load_static, load_table_of, refuse_mistyped, stays_off_the_hub
from hce.encoding.tables import (
    PROMPT_NAMES,
    SIDE_BY_SIDE,
    SIDES,
    Prompts,
    Side,
    Table,
    TokenMemo,
    check_parts,
    damaged_model,
    fingerprint_of_modules,
    first_module,
    joined_rows,
    loading,
    mapped_rows,
    quiet_transformers,
    read_side_by_side,
    require_model_folder,
    require_row_for_each_token,
    token_bags,
    token_ids,
    token_offsets,
    tokenizer_json,
    untruncated,
)
from hce.errors import FormatError, InputError
from hce.files import CHECKSUMS, new_folder, require_undamaged, write_checksums
from hce.progress import progress_bar

if TYPE_CHECKING:
    import torch
    from sentence_transformers import SentenceTransformer
    from torch import Tensor

SORTED_AT_ONCE = 8192  # texts sorted by length together; more would not save more padding
# Tokens in a forward pass. A CPU is fastest if a batch's activations stay in its cache, a GPU if all its cores work.
CPU_TOKENS, GPU_TOKENS, STATIC_TOKENS = 2048, 65_536, 262_144
MOST_COUNTED = 1 << 18  # documents whose tokens are counted
CHARACTERS_PER_TOKEN = 4  # a guess, for tables and for models without a tokenizer of transformers
UNLIMITED_WINDOW = 512  # tokens, for encoders without a limit: in a longer text, single sentences hardly count
NO_LIMIT = 10**9  # a tokenizer's limit above this means no limit

OnTokens = Callable[[str, np.ndarray, "Tensor"], None]
"""Takes a text, its token ids of shape (T,), and their states of shape (T, n) on the encoder's device."""


class Encoder:
    """A dense text encoder: a table, another model, or several parts side by side.

    `centres`, of shape (2, n₁), holds the first part's mean query and mean document. They are subtracted from the first
    part's vectors, of length n₁.

    Attributes:
        name: the name that the encoder was loaded by, for messages.
        shares: the weight of each of the `parts` in an inner product; they add up to 1.
        query_map: a map of shape (n₁, n₁ + 1) that moves the first part's queries before centering; see `mapped_rows`.
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
        """Make an encoder of a table, of a model, or of parts."""
        self.name = name
        self._how: dict[str, Any] = {"device": device, "dtype": dtype}
        self._table = model if isinstance(model, Table) else None
        self._parts = tuple(model) if isinstance(model, list | tuple) and self._table is None else ()
        self.shares = tuple(map(float, shares))
        self.centres = centres
        self.query_map = query_map
        self._model: SentenceTransformer | None = None
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
        """Load "minilm" or "static" (bundled), a model's directory, or its hub id.

        Args:
            spec: which encoder.
            device: where to compute; by default the first GPU if there is one, else the CPU. Tables encode on the CPU.
            dtype: what to compute in; by default bfloat16 on a GPU that has it, else float32.
            prompts: texts put before each "query" or "document", instead of the model's own.
            local: stay off the hub; a hub id then works only if it was downloaded before.

        Raises:
            InputError: there is no such model.
            FormatError: the directory holds a damaged file.
            MissingPackageError: the bundled encoder is not installed.
        """
        name = str(spec)
        how: dict[str, Any] = {"device": device, "dtype": dtype}
        if Path(name).is_dir() and name not in BUNDLED:
            require_model_folder(Path(name))
            remedy = f"train or copy the model again, or delete {CHECKSUMS} if the change was intended"
            require_undamaged(Path(name), remedy)
            with loading(name, "encoder", ""):
                encoder = _read(Path(name), name, **how)
        elif name in BUNDLED:
            encoder = cls(load_static() if name == "static" else load_minilm(), name, **how)
        else:
            encoder = _of_hub(name, local=local, **how)
        if prompts:
            known = encoder.prompts
            encoder.prompts = known._replace(by_name={**known.by_name, **prompts})
        return encoder

    @classmethod
    def for_corpus(
        cls, spec: str | Path, corpus: Corpus, *, device: str | torch.device | None = None, progress: bool = False
    ) -> Encoder:
        """Load an encoder: "static" fitted to the corpus, any other unchanged."""
        encoder = cls.load(spec, device=device)
        return encoder.fitted_to(corpus, progress=progress) if str(spec) == "static" else encoder

    def __repr__(self) -> str:
        return f"Encoder({self.name!r}, {self.dim} dimensions, {self.device}, {str(self.dtype).removeprefix('torch.')})"

    @cached_property
    def device(self) -> torch.device:
        """The device that the model computes on."""
        return device_and_dtype(**self._how)[0]

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type that the model computes in; weights stay float32."""
        return device_and_dtype(**self._how)[1]

    @property
    def model(self) -> SentenceTransformer:
        """The sentence-transformers model; tables are turned into one at first use.

        Training this model changes the encoder's vectors.
        """
        if self._model is None:
            from hce.encoding.side_by_side import SideBySide, model_of, model_of_table

            if self._table is not None:
                model = model_of_table(self._table)
            else:
                parts = [part.model for part in self._parts]
                model = model_of(SideBySide(parts, self.shares, self.centres, self.query_map), self.prompts)
            self._model = model.to(self.device).float().eval()
        return self._model

    @property
    def table(self) -> Table | None:
        """The table with its current weights; None if the encoder is no single table."""
        if self._model is None or self._parts:
            return self._table
        from hce.encoding.side_by_side import table_of

        return table_of(self._model)

    @property
    def is_table(self) -> bool:
        """Whether each part begins with a look-up of tokens or words in a table."""
        if self._parts or self._table is not None:
            return all(part.is_table for part in self._parts)
        from sentence_transformers.sentence_transformer.modules import StaticEmbedding

        return self.table is not None or isinstance(self.model[0], StaticEmbedding)

    @property
    def parts(self) -> list[Encoder]:
        """The encoders side by side; this one alone if it was not made of parts."""
        return list(self._parts) or [self]

    @property
    def _first(self) -> Encoder:
        """The first part, without companions, query map and centers."""
        return self._parts[0]._first if self._parts else self

    @property
    def dim(self) -> int:
        """The length n of a vector."""
        if self._parts:
            return sum(part.dim for part in self._parts)
        return int(self._table.vectors.shape[1] if self._table else self.model.get_embedding_dimension())

    @property
    def fingerprint(self) -> str:
        """A sha256 over weights, modules, prompts, length limit and tokenizer."""
        if self._parts:
            arrays = (
                b"" if each is None else np.ascontiguousarray(each).data for each in (self.centres, self.query_map)
            )
            center, moved = (hashlib.sha256(each).hexdigest() if len(each) else "" for each in arrays)
            parts = [part.fingerprint for part in self._parts]
            facts = [list(self.shares), center, self.prompts.of_sides(), parts, *filter(None, [moved])]
            return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        table = self.table
        if table is not None:
            return table.fingerprint
        limit, tokenizer = self.model.max_seq_length, self.model.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        return fingerprint_of_modules(
            self.prompts,
            None if limit is None or math.isinf(limit) else limit,
            [(type(each).__name__, getattr(each, "get_config_dict", dict)()) for each in self.model],
            tokenizer_json(backend, own_limit=backend is tokenizer),
            ((name, tensor.detach().float().cpu().numpy()) for name, tensor in sorted(self.model.state_dict().items())),
        )

    @property
    def prompts(self) -> Prompts:
        """The prompts of the first part."""
        first = self._first
        if first._model is not None:
            return Prompts(first._model.prompts, first._model.default_prompt_name)
        return first._table.prompts if first._table else Prompts()

    @prompts.setter
    def prompts(self, prompts: Prompts) -> None:
        first = self._first
        if first._model is not None:
            first._model.prompts, first._model.default_prompt_name = dict(prompts.by_name), prompts.default
        elif first._table is not None:
            first._table = first._table._replace(prompts=prompts)

    def prompt(self, side: Side) -> str | None:
        """Return a side's own prompt, else the model's default prompt."""
        return self.prompts.of(side)

    def save(self, path: str | Path) -> None:
        """Write, atomically, a directory that `SentenceTransformer(path)` loads.

        The loaded model gives the same vectors. Loading companions, a query map or a table of words needs hce and
        `trust_remote_code=True`.

        Raises:
            InputError: `path` exists and is not an empty folder.
        """
        with new_folder(path) as folder, quiet_transformers():
            self.model.save(str(folder), create_model_card=False)
            write_checksums(folder)

    def beside(
        self, companions: Sequence[Encoder], shares: Sequence[float], centres: np.ndarray | None = None
    ) -> Encoder:
        """Join this encoder and companions into one encoder.

        The vectors of `companions` follow this encoder's. `shares` are the weights of this encoder and of each
        companion in an inner product, and add up to 1. `centres`, of shape (2, n), are the mean query and the mean
        document of this encoder, which are subtracted from its vectors.
        """
        means = None if centres is None else centres.astype(np.float32)
        first = self if self.query_map is None else self.parts[0]
        options = {"shares": shares, "centres": means, "query_map": self.query_map, **self._how}
        return Encoder([first, *companions], self.name, **options)

    def with_query_map(self, query_map: np.ndarray) -> Encoder:
        """Return an encoder that moves its query vectors by a map of shape (n, n + 1)."""
        return Encoder([self], self.name, query_map=query_map.astype(np.float32), **self._how)

    def token_table(self) -> Encoder:
        """Return a static encoder of this transformer's tokens, distilled if needed."""
        if self.name == "minilm":
            return Encoder.load("static", device=self.device)
        return Encoder(load_table_of(self.model, self.fingerprint), f"table of {self.name}", device=self.device)

    def fitted_to(self, corpus: Corpus, *, progress: bool = False) -> Encoder:
        """Fit a static encoder to the token counts of a corpus; see `fit_table`."""
        from hce.encoding.tables import document_frequencies, fit_table

        table = self.table
        if table is None or table.tokenizer is None:
            raise InputError(f"{self.name} is not a static encoder; only a token table can be fitted without training")
        every = -(-len(corpus) // MOST_COUNTED)
        some = corpus if every < 2 else corpus.only(np.arange(0, len(corpus), every))
        with progress_bar("counting words", len(some), "documents", show=progress or None) as advance:
            counts, total = document_frequencies(table.tokenizer, some.texts(), len(table.vectors), advance)
        fitted = table._replace(vectors=fit_table(table.vectors, counts, total))
        encoder = Encoder(fitted, f"{self.name}, fitted", **self._how)
        encoder._token_memo = self._token_memo
        return encoder

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the first part; None for a table of words."""
        first = self._first
        return first._table.tokenizer if first._table else first.model.tokenizer

    @property
    def _is_transformers(self) -> bool:
        """Whether the tokenizer is from transformers, not from the package tokenizers."""
        return hasattr(self.tokenizer, "num_special_tokens_to_add") and hasattr(self.tokenizer, "model_max_length")

    @property
    def has_states(self) -> bool:
        """Whether the first part is a transformer, which has a state for each token."""
        from sentence_transformers.sentence_transformer.modules import Transformer

        first = self._first
        return first._table is None and isinstance(first.model[0], Transformer) and self._is_transformers

    @property
    def window(self) -> int:
        """How many tokens of a document the encoder reads at once, without the prompt."""
        tokenizer, taken = self.tokenizer, 0
        if self._is_transformers:
            limit = min(self._first.model.max_seq_length or math.inf, tokenizer.model_max_length)
            prompt = tokenizer(self.prompt("document") or "", add_special_tokens=False)["input_ids"]
            taken = tokenizer.num_special_tokens_to_add() + len(prompt)
        else:
            limit = ((tokenizer and tokenizer.truncation) or {}).get("max_length")
        return max(1, int(limit) - taken) if limit and limit < NO_LIMIT else UNLIMITED_WINDOW

    def token_offsets(self, text: str) -> Offsets:
        """Return the start and end of each token of a text, even beyond the window."""
        tokenizer = untruncated(self.tokenizer)
        if tokenizer is None:
            raise InputError(f"{self.name}: its tokenizer gives no positions of tokens; count spans in words")
        return [(first, last) for first, last in token_offsets(tokenizer, text).tolist()]

    def token_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return each text's token ids, with special tokens, cut to the model's limit."""
        tokenizer = self.tokenizer
        limit = self._first.model.max_seq_length or tokenizer.model_max_length
        options = {"truncation": True, "max_length": limit if limit < NO_LIMIT else None}
        return list(tokenizer(self._first._beginnings(texts), **options)["input_ids"])

    @contextmanager
    def remembering_tokens(self) -> Iterator[None]:
        """Tokenize each word only once in this block, if this is a token table."""
        if self.is_table and self.tokenizer is not None and self._token_memo is None:
            self._token_memo = TokenMemo.of(self.tokenizer)
        try:
            yield
        finally:
            self._token_memo = None

    def tokenize(self, texts: Sequence[str], side: Side, prompt: str | None = None) -> dict[str, Any]:
        """Turn texts into the model's input tensors, on its device."""
        import torch

        prompt = self.prompt(side) or "" if prompt is None else prompt
        if self.is_table and not self._parts:  # without the character offsets that StaticEmbedding computes and drops
            bags = token_bags(token_ids(self.tokenizer, [prompt + text for text in texts], self._token_memo))
            features = {"input_ids": torch.from_numpy(bags.rows), "offsets": torch.from_numpy(bags.starts)}
        else:
            features = self.model.preprocess(self._beginnings(texts), prompt=prompt or None, task=side)
        return {key: each.to(self.device) if isinstance(each, torch.Tensor) else each for key, each in features.items()}

    def _beginnings(self, texts: Sequence[str]) -> list[str]:
        """Return texts; for a transformer that cuts them, only their beginnings."""
        # The tokenizer would process all of a text before cutting it, and a huge text could exhaust the memory.
        if self._parts or not self.has_states or self.tokenizer.truncation_side != "right":
            return list(texts)
        limit = self.model.max_seq_length or self.tokenizer.model_max_length
        return [text[:READ_AT_ONCE] for text in texts] if limit < NO_LIMIT else list(texts)

    def encode(
        self,
        texts: Sequence[str],
        side: Side = "document",
        *,
        progress: bool = False,
        zeros: bool = False,
        on_tokens: OnTokens | None = None,
    ) -> np.ndarray:
        """Encode texts to unit vectors, float32, of shape (texts, n).

        A text without any known token gets the fixed vector (1, …, 1)/√n; with `zeros`, its vector is 0. If the encoder
        `has_states`, `on_tokens` is called with each text's tokens, except special tokens and the prompt's.

        >>> encoder = Encoder.load("static")
        >>> vectors = encoder.encode(["red shoes", "blue hats", "red shoes"])
        >>> vectors.shape == (3, encoder.dim), round(float(vectors[0] @ vectors[2]), 4)
        (True, 1.0)

        Raises:
            InputError: a text is not a string, or `side` is unknown.
            FormatError: the model gives infinities or NaN.
        """
        _check_texts(texts, side)
        vectors = np.empty((len(texts), self.dim), dtype=np.float32)
        prompt = self.prompt(side) or ""
        with progress_bar("encoding", len(texts), "texts", show=progress) as advance:
            for rows in self.batches(texts, side):
                vectors[rows] = self._unit_rows([texts[row] for row in rows], side, prompt, on_tokens)
                advance(len(rows))
        broken = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(broken):
            where = f"text number {broken[0]}"
            raise FormatError(f"encoder {self.name!r} gives NaN or infinity for {where}; its weights are damaged")
        if not zeros:
            vectors[~vectors.any(axis=1)] = 1 / math.sqrt(self.dim)
        return vectors

    def _unit_rows(self, texts: list[str], side: Side, prompt: str, on_tokens: OnTokens | None = None) -> np.ndarray:
        """Encode texts to unit rows; a text without any known token gets a row of 0."""
        if self._parts:
            first, *companions = self._parts
            rows = [first._unit_rows(texts, side, prompt, on_tokens)]
            if self.query_map is not None and side == "query":
                rows = [mapped_rows(rows[0], self.query_map)]
            rows += [each._unit_rows(texts, side, "") for each in companions]
            center = None if self.centres is None else self.centres[SIDES.index(side)]
            return np.asarray(joined_rows(rows, self.shares, center))
        try:
            table = self.table
            if table is not None:
                return table.encode(texts, prompt, self._token_memo)
            import torch

            self.model.eval()
            with torch.inference_mode(), self._reporting_tokens(texts, prompt, on_tokens):
                return np.asarray(self.embed(self.tokenize(texts, side, prompt), side).cpu().numpy())
        except (LookupError, TypeError, AttributeError) as error:  # a token without a vector, or an invalid setting
            raise damaged_model(self.name, error, "encoder") from error

    def embed(self, features: dict[str, Any], side: Side) -> Tensor:
        """Encode tokenized texts to float32 unit vectors, with gradients if enabled."""
        import torch

        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
            vectors: Tensor = self.model(features, task=side)["sentence_embedding"]
        return torch.nn.functional.normalize(vectors.float(), dim=1)

    @contextmanager
    def computing_in(self, dtype: torch.dtype) -> Iterator[None]:
        """Compute in another dtype in this block."""
        usual, self.dtype = self.dtype, dtype
        try:
            yield
        finally:
            self.dtype = usual

    @contextmanager
    def _reporting_tokens(self, texts: list[str], prompt: str, on_tokens: OnTokens | None) -> Iterator[None]:
        """Call `on_tokens` with the states that the transformer computes in this block."""
        if on_tokens is None or not self.has_states:
            yield
            return
        import torch

        special = torch.tensor(self.tokenizer.all_special_ids, device=self.device)
        start = len(self.tokenizer(prompt, add_special_tokens=False)["input_ids"])

        def report(module: torch.nn.Module, inputs: Any, found: dict[str, Tensor]) -> None:
            if not {"input_ids", "attention_mask", "token_embeddings"} <= found.keys():
                return
            own = found["attention_mask"].bool() & ~torch.isin(found["input_ids"], special)
            for text, mask, ids, states in zip(texts, own, found["input_ids"], found["token_embeddings"], strict=True):
                on_tokens(text, ids[mask][start:].cpu().numpy(), states[mask][start:].float())

        handle = self.model[0].register_forward_hook(report)
        try:
            yield
        finally:
            handle.remove()

    def batches(self, texts: Sequence[str], side: Side) -> Iterator[np.ndarray]:
        """Yield batches of row numbers; a transformer's texts are sorted by length."""
        prompt, is_table = self.prompt(side) or "", self.is_table
        for start in range(0, len(texts), SORTED_AT_ONCE):
            some = texts[start : start + SORTED_AT_ONCE]
            lengths = np.array([len(text) // CHARACTERS_PER_TOKEN + 1 for text in some])
            if is_table:
                full = np.cumsum(lengths) // STATIC_TOKENS
                yield from np.split(np.arange(start, start + len(some)), np.flatnonzero(np.diff(full)) + 1)
                continue
            if self._is_transformers:
                lengths = np.array([len(ids) for ids in self.token_ids([prompt + text for text in some])])
            order = np.argsort(-lengths, kind="stable")
            budget = CPU_TOKENS if self.device.type == "cpu" else GPU_TOKENS
            while len(order):
                count = max(1, budget // max(int(lengths[order[0]]), 1))
                yield start + order[:count]
                order = order[count:]


def _check_texts(texts: Sequence[str], side: str) -> None:
    """Fail with InputError if a text is not a string, or `side` is unknown."""
    if side not in PROMPT_NAMES:
        raise InputError(f"side {side!r}: a text is encoded as a 'query' or as a 'document'")
    if isinstance(texts, str) or not (hasattr(texts, "__len__") and hasattr(texts, "__getitem__")):
        raise InputError(f"encode takes a list of texts, not a {type(texts).__name__}; put the single text into a list")
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(f"text number {number} is a {type(text).__name__}, not a string")
        if not is_unicode(text):
            raise InputError(f"text number {number} holds half a surrogate pair (\\ud800…\\udfff); remove it")


def device_and_dtype(
    device: str | torch.device | None, dtype: torch.dtype | None = None
) -> tuple[torch.device, torch.dtype]:
    """Choose a device (a GPU if there is one) and a dtype where none is given."""
    import torch

    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtype is None:
        dtype = fast_dtype(device) if device.type == "cuda" else torch.float32
    return device, dtype


def fast_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 if the device has instructions for it, else float32."""
    import torch

    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    # Only private functions of PyTorch check the processor; if they are gone, float32 is always right.
    tests = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
    has_instructions = device.type == "cpu" and any(test() for test in tests if test)
    return torch.bfloat16 if has_instructions else torch.float32


def _read(folder: Path, name: str, **how: Any) -> Encoder:
    """Read an encoder from a folder; tables need no torch."""
    first, path = first_module(folder)
    if first == SIDE_BY_SIDE:
        folders, options = read_side_by_side(folder / path)
        names = [name, *(f"{name}, part {number}" for number in range(2, len(folders) + 1))]
        parts = [_read(place, each, **how) for place, each in zip(folders, names, strict=True)]
        encoder = Encoder(parts, name, **options, **how)
        encoder.prompts = Prompts.read(folder)
        return encoder
    table = Table.read(folder)
    if table is not None:
        return Encoder(table, name, **how)
    from sentence_transformers import SentenceTransformer

    with quiet_transformers():
        return _of_model(SentenceTransformer(str(folder), device="cpu", local_files_only=True), name, **how)


def _of_hub(name: str, *, local: bool, **how: Any) -> Encoder:
    """Load an encoder from the hub; fail with InputError if there is none."""
    advice = f"give {' or '.join(map(repr, BUNDLED))}, a model directory, or a hub id"
    with loading(name, "encoder", advice), quiet_transformers():
        refuse_mistyped(name)
        from sentence_transformers import SentenceTransformer

        from hce.encoding.side_by_side import hub_folder

        local = local or stays_off_the_hub(name, "encoder", advice)
        folder = hub_folder(name, local=local)
        if folder is not None:
            return _read(folder, name, **how)
        return _of_model(SentenceTransformer(name, device="cpu", local_files_only=local), name, **how)


def _of_model(model: SentenceTransformer, name: str, **how: Any) -> Encoder:
    """Make an encoder of a model, and add Normalize unless the model ends in it."""
    from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding

    if len(model) and isinstance(model[0], StaticEmbedding):
        require_row_for_each_token(model[0].tokenizer, len(model[0].embedding.weight), name)
    if not isinstance(model[-1], Normalize):
        model.append(Normalize())
    return Encoder(model, name, **how)
