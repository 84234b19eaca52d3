"""Encoder: text in, unit vectors out, whatever sentence-transformers model does the work.

An encoder always normalises: vectors of length 1 are what the tree, the losses and the index are built on. So a
model that does not end in a Normalize module gets one, and is saved with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer, SimilarityFunction
from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding, Transformer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hce.checksums import write_checksums
from hce.data.corpus import Corpus
from hce.encoding.bundled import load_minilm, load_static, load_table_of, loading, quiet_transformers
from hce.encoding.side_by_side import SideBySide, load_any
from hce.encoding.spec import refuse_mistyped, stays_off_the_hub
from hce.encoding.static import TokenMemo, document_frequencies, fit_table
from hce.encoding.tables import (
    NO_LIMIT,
    PROMPT_NAMES,
    UNLIMITED_WINDOW,
    Side,
    checked_texts,
    fingerprint_of_modules,
    fingerprint_of_parts,
    finished,
    prompt_of,
    require_model,
    require_row_for_each_token,
    token_bags,
    tokenizer_json,
    unfit,
    window_of,
)
from hce.encoding.word_table import WordTable
from hce.errors import InputError
from hce.files import new_folder
from hce.progress import progress_bar

BUNDLED = {"minilm": load_minilm, "static": load_static}

# Texts that are sorted by length together; more at once would save no more padding, and cost memory.
SORTED_AT_ONCE = 8192
# Tokens in a forward pass. A CPU is fastest when a batch's activations stay in its cache, a GPU when it is full.
CPU_TOKENS, GPU_TOKENS, STATIC_TOKENS = 2048, 65_536, 262_144
MOST_COUNTED = 1 << 18  # documents whose words are counted: more tell nothing that these do not
CHARACTERS_PER_TOKEN = 4  # a guess, for models whose tokenizer cannot be asked

OnTokens = Callable[[str, np.ndarray, Tensor], None]
"""Told of a text, its tokens' ids, of shape (T,), and their states, of shape (T, n), on the encoder's device."""


class Encoder:
    """A dense text encoder.

    Attributes:
        model: the sentence-transformers model underneath, in evaluation mode unless someone trains it.
        name: the spec that the encoder was loaded by, for messages.
        device: where the model computes.
        dtype: what the model computes in; weights stay float32, so that it can be trained.
    """

    def __init__(self, model: SentenceTransformer, name: str, *, device: torch.device, dtype: torch.dtype) -> None:
        self.model = model.to(device).float().eval()
        self.name = name
        self.device = device
        self.dtype = dtype
        self._gave_any_length = False  # before the Normalize module that `load` appends
        self._token_memo: TokenMemo | None = None

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
            device: where to compute; by default the first GPU, else the CPU.
            dtype: what to compute in; by default bfloat16 on a GPU that has it, else float32.
            prompts: texts put before each "query" or "document", in place of the model's own.
            local: stay off the hub; a hub id is then found only if it was downloaded before.

        Raises:
            InputError: there is no such model.
            FormatError: it is a directory with checksums, and a file in it is not as it was written.
            MissingPackageError: a bundled encoder is asked for and not installed.
        """
        device, dtype = device_and_dtype(device, dtype)
        model = BUNDLED[str(spec)]() if str(spec) in BUNDLED else _load_model(str(spec), local)
        any_length = not isinstance(model[-1], Normalize)
        if any_length:
            model.append(Normalize())
        for each in (model, *(model[0].parts[:1] if isinstance(model[0], SideBySide) else ())):
            each.prompts.update(prompts or {})
        encoder = cls(model, str(spec), device=device, dtype=dtype)
        encoder._gave_any_length = any_length
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

    @property
    def dim(self) -> int:
        """The length n of a vector."""
        return int(self.model.get_embedding_dimension())

    @property
    def is_static(self) -> bool:
        """Whether the encoder is one token table and nothing else: what can be fitted to a corpus."""
        return self.begins_with_table and all(isinstance(module, Normalize) for module in list(self.model)[1:])

    @property
    def begins_with_table(self) -> bool:
        """Whether the encoder looks tokens up in a table, whatever it does after that: what is trained as a table."""
        return isinstance(self.model[0], StaticEmbedding)

    @property
    def is_table(self) -> bool:
        """Whether each part begins with a table, of tokens or of words; `begins_with_table` knows no companions."""
        models = self.model[0].parts if isinstance(self.model[0], SideBySide) else [self.model]
        return all(isinstance(model[0], StaticEmbedding | WordTable) for model in models)

    @property
    def window(self) -> int:
        """How many tokens of a document's own the encoder reads at once; companions read no fewer."""
        if isinstance(self.model[0], SideBySide):
            return self.parts[0].window
        tokenizer = self.model.tokenizer
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            return window_of(tokenizer)
        limit = min(self.model.max_seq_length or math.inf, tokenizer.model_max_length)
        prompt = len(tokenizer(self.prompt("document") or "", add_special_tokens=False)["input_ids"])
        taken = tokenizer.num_special_tokens_to_add() + prompt
        return max(1, int(limit) - taken) if limit and limit < NO_LIMIT else UNLIMITED_WINDOW

    @property
    def tokenizer(self) -> Any:
        """What takes texts apart, the first part's; None where that is a table of words."""
        return self.model.tokenizer

    @property
    def is_scored_by_inner_product(self) -> bool:
        """Whether the model came with vectors of any length, and says that inner products compare them (Contriever)."""
        return self._gave_any_length and self.model.similarity_fn_name == SimilarityFunction.DOT_PRODUCT.value

    def encode_unnormalised(self, texts: Sequence[str], side: Side = "document") -> np.ndarray:
        """Encode texts to vectors as long as the model itself makes them, of shape (texts, n)."""
        modules = list(self.model)[:-1] if self._gave_any_length else list(self.model)
        model = SentenceTransformer(modules=modules, device=str(self.device))
        return np.asarray(model.encode(list(texts), prompt=self.prompt(side), show_progress_bar=False))

    def token_offsets(self, text: str) -> list[tuple[int, int]]:
        """Return where each token that the encoder makes of a text begins and ends, whatever it can read at once.

        Raises:
            InputError: the tokenizer does not know that.
        """
        tokenizer = self.model.tokenizer
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            return [tuple(span) for span in tokenizer.encode(text, add_special_tokens=False).offsets]
        if not tokenizer.is_fast:
            raise InputError(f"{self.name}: its tokenizer cannot tell where a token begins; count spans in words")
        options = {"return_offsets_mapping": True, "add_special_tokens": False, "truncation": False}
        return [tuple(span) for span in tokenizer(text, **options, verbose=False)["offset_mapping"]]

    @property
    def parts(self) -> list[Encoder]:
        """The encoders whose vectors stand side by side in this one's: itself, where it has no companion."""
        first = self.model[0]
        if not isinstance(first, SideBySide):
            return [self]
        names = [self.name, *(f"{self.name}, part {number}" for number in range(2, len(first.parts) + 1))]
        return [
            Encoder(part, name, device=self.device, dtype=self.dtype)
            for name, part in zip(names, first.parts, strict=True)
        ]

    @property
    def shares(self) -> tuple[float, ...]:
        """How much each of the `parts` counts in an inner product; they add up to 1."""
        first = self.model[0]
        return first.shares if isinstance(first, SideBySide) else (1.0,)

    @property
    def centres(self) -> np.ndarray | None:
        """What is subtracted from the first part's vectors, of shape (2, n₁): queries' and documents' mean."""
        centres = self.model[0].centres if isinstance(self.model[0], SideBySide) else None
        return None if centres is None else np.asarray(centres.cpu().numpy())

    @classmethod
    def of_word_table(cls, table: WordTable, *, device: torch.device) -> Encoder:
        """Make an encoder of a table of words alone."""
        model = SentenceTransformer(modules=[table, Normalize()], device="cpu")
        return cls(model, "words of the corpus", device=device, dtype=torch.float32)

    def token_table(self) -> Encoder:
        """Return a static encoder of this transformer's own tokens: the bundled one for minilm, else one distilled now.

        Raises:
            InputError: no token table can be made of this model.
        """
        if self.name == "minilm":
            return Encoder.load("static", device=self.device, dtype=torch.float32)
        model = load_table_of(self.model, self.fingerprint)
        return Encoder(model, f"table of {self.name}", device=self.device, dtype=torch.float32)

    def beside(
        self, companions: Sequence[Encoder], shares: Sequence[float], centres: np.ndarray | None = None
    ) -> Encoder:
        """Return one encoder of this one and its companions.

        Args:
            companions: what stands beside this encoder.
            shares: how much this encoder and each companion count in an inner product; they add up to 1.
            centres: the mean of queries and the mean of documents by this encoder, of shape (2, n), to subtract.
        """
        parts = [self.model, *(each.model for each in companions)]
        mean_vectors = None if centres is None else torch.from_numpy(centres.astype(np.float32))
        modules = [SideBySide(parts, shares, mean_vectors), Normalize()]
        model = SentenceTransformer(modules=modules, prompts=dict(self.model.prompts), device="cpu")
        model.default_prompt_name = self.model.default_prompt_name
        return Encoder(model, self.name, device=self.device, dtype=self.dtype)

    def unknown_share(self, texts: Sequence[str]) -> float | None:
        """Return the share of the texts' words that a table of the corpus's words has no vector for; None without one.

        Such words still count by their pieces, in the other parts.
        """
        tables = [part.model[0] for part in self.parts if isinstance(part.model[0], WordTable)]
        return tables[0].word_rows.unknown_share(texts) if tables else None

    def __repr__(self) -> str:
        return f"Encoder({self.name!r}, {self.dim} dimensions, {self.device}, {str(self.dtype).removeprefix('torch.')})"

    def prompt(self, side: Side) -> str | None:
        """Return what is put before each text of a side: its own prompt, else the model's default one."""
        return prompt_of(self.model.prompts, self.model.default_prompt_name, side)

    def tokenize(self, texts: Sequence[str], side: Side) -> dict[str, Any]:
        """Turn texts into the model's input tensors, on its device."""
        if self.begins_with_table:
            features = self._token_bags([(self.prompt(side) or "") + text for text in texts])
        else:
            features = self.model.preprocess(list(texts), prompt=self.prompt(side), task=side)
        return {key: value.to(self.device) if isinstance(value, Tensor) else value for key, value in features.items()}

    def embed(self, features: dict[str, Any], side: Side) -> Tensor:
        """Encode tokenised texts to float32 unit vectors of shape (texts, n), with gradients where they are on."""
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
            vectors: Tensor = self.model(features, task=side)["sentence_embedding"]
        return F.normalize(vectors.float(), dim=1)

    @property
    def has_states(self) -> bool:
        """Whether the encoder, or its first part, is a transformer, which has a state for each token of a text."""
        return self._transformer is not None and isinstance(self.tokenizer, PreTrainedTokenizerBase)

    @property
    def vocabulary_size(self) -> int:
        """One more than the highest id of a token that the first part's tokenizer knows."""
        return max(self.tokenizer.get_vocab().values()) + 1

    def token_ids(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Yield the ids of each text's tokens, special ones included, as far as the first part reads it."""
        for start in range(0, len(texts), SORTED_AT_ONCE):
            yield from self._tokenized(texts[start : start + SORTED_AT_ONCE])

    def vocabulary_texts(self, count: int, words: int = 16) -> list[str]:
        """Return so many texts, each of some words of the vocabulary, from all over it."""
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

        Where the encoder `has_states`, `on_tokens` is told of each text's tokens, but for special ones and those of a
        prompt: they come with the same pass.

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
        self.model.eval()
        with torch.inference_mode(), progress_bar("encoding", len(texts), "texts", show=progress) as advance:
            for rows in self._batches(texts, side):
                vectors[rows] = self._embedded([texts[row] for row in rows], side, on_tokens)
                advance(len(rows))
        return finished(vectors, self.name, zeros=zeros)

    def fitted_to(self, corpus: Corpus, *, progress: bool = False) -> Encoder:
        """Fit a static encoder's table to a corpus's token statistics, with no training: see `hce.encoding.static`.

        Of very many documents, words are counted in some, from all over. `progress` shows a bar.

        Raises:
            InputError: this encoder is not static.
        """
        if not self.is_static:
            raise InputError(f"{self.name} is not a static encoder; only a token table can be fitted without training")
        module: StaticEmbedding = self.model[0]
        table = module.embedding.weight.detach().cpu().numpy()
        every = -(-len(corpus) // MOST_COUNTED)
        some = corpus if every < 2 else corpus.only(np.arange(0, len(corpus), every))
        with progress_bar("counting words", len(some), "documents", show=progress or None) as advance:
            counts, total = document_frequencies(module.tokenizer, some.texts(), len(table), advance)
        fitted = StaticEmbedding(module.tokenizer, embedding_weights=fit_table(table, counts, total))
        model = SentenceTransformer(modules=[fitted, Normalize()], prompts=dict(self.model.prompts), device="cpu")
        model.default_prompt_name = self.model.default_prompt_name
        encoder = Encoder(model, f"{self.name}, fitted", device=self.device, dtype=self.dtype)
        encoder._token_memo = self._token_memo
        return encoder

    @contextmanager
    def remembering_tokens(self) -> Iterator[None]:
        """Have a token table tokenise each word once in this block: for a corpus that is read again and again."""
        if self.begins_with_table and self._token_memo is None:
            self._token_memo = TokenMemo.of(self.model[0].tokenizer)
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
        prompts = {side: self.prompt(side) or "" for side in PROMPT_NAMES}
        if isinstance(self.model[0], SideBySide):
            parts = [part.fingerprint for part in self.parts]
            return fingerprint_of_parts(prompts, self.shares, self.centres, parts)
        limit, tokenizer = self.model.max_seq_length, self.model.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        return fingerprint_of_modules(
            prompts,
            None if limit is None or math.isinf(limit) else limit,
            [(type(module).__name__, _config(module)) for module in self.model],
            tokenizer_json(backend, own_limit=backend is tokenizer),  # a transformer's limit is set anew by every call
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

    def _embedded(self, texts: list[str], side: Side, on_tokens: OnTokens | None) -> np.ndarray:
        try:
            with self._telling_tokens(texts, side, on_tokens):
                return np.asarray(self.embed(self.tokenize(texts, side), side).cpu().numpy())
        except (LookupError, TypeError, AttributeError) as error:  # a token without a vector, a setting of no sense
            raise unfit(self.name, error) from error

    @property
    def _transformer(self) -> Transformer | None:
        first = self.model[0].parts[0][0] if isinstance(self.model[0], SideBySide) else self.model[0]
        return first if isinstance(first, Transformer) else None

    @contextmanager
    def _telling_tokens(self, texts: list[str], side: Side, on_tokens: OnTokens | None) -> Iterator[None]:
        """Have `on_tokens` told, in this block, of the states that the transformer has for these texts."""
        if on_tokens is None or self._transformer is None:
            yield
            return
        special = torch.tensor(self.tokenizer.all_special_ids, device=self.device)
        prompt = len(self.tokenizer(self.prompt(side) or "", add_special_tokens=False)["input_ids"])

        def tell(module: torch.nn.Module, inputs: Any, found: dict[str, Tensor]) -> None:
            if not {"input_ids", "attention_mask", "token_embeddings"} <= found.keys():
                return
            told = found["attention_mask"].bool() & ~torch.isin(found["input_ids"], special)
            for text, mask, ids, states in zip(texts, told, found["input_ids"], found["token_embeddings"], strict=True):
                on_tokens(text, ids[mask][prompt:].cpu().numpy(), states[mask][prompt:].float())

        handle = self._transformer.register_forward_hook(tell)
        try:
            yield
        finally:
            handle.remove()

    def _token_bags(self, texts: list[str]) -> dict[str, Tensor]:
        """Tokenise as StaticEmbedding.preprocess does, without the character offsets that it computes and drops."""
        if self._token_memo is not None:
            ids = [self._token_memo.ids(text) for text in texts]
        else:
            encodings = self.model[0].tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            ids = [encoding.ids for encoding in encodings]
        bags = token_bags(ids)
        return {"input_ids": torch.from_numpy(bags.rows), "offsets": torch.from_numpy(bags.starts)}

    def _batches(self, texts: Sequence[str], side: Side) -> Iterator[np.ndarray]:
        """Yield row numbers, texts of like length together, about the same number of tokens each time."""
        budget = STATIC_TOKENS if self.is_table else CPU_TOKENS if self.device.type == "cpu" else GPU_TOKENS
        for start in range(0, len(texts), SORTED_AT_ONCE):
            lengths = self._token_counts(texts[start : start + SORTED_AT_ONCE], side)
            order = np.argsort(-lengths, kind="stable")
            first = 0
            while first < len(order):
                longest = int(lengths[order[first]])
                count = max(1, budget // max(longest, 1))
                yield start + order[first : first + count]
                first += count

    def _token_counts(self, texts: Sequence[str], side: Side) -> np.ndarray:
        tokenizer = self.model.tokenizer
        if not isinstance(tokenizer, PreTrainedTokenizerBase) or self.is_table:
            return np.array([len(text) // CHARACTERS_PER_TOKEN + 1 for text in texts])
        prompt = self.prompt(side) or ""
        return np.array([len(ids) for ids in self._tokenized([prompt + text for text in texts])])

    def _tokenized(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts' tokens, cut where the model stops reading."""
        tokenizer = self.tokenizer
        given = self.model.max_seq_length or tokenizer.model_max_length
        limit = given if given < NO_LIMIT else None
        ids: list[list[int]] = tokenizer(list(texts), truncation=True, max_length=limit)["input_ids"]
        return ids


def device_and_dtype(device: str | torch.device | None, dtype: torch.dtype | None) -> tuple[torch.device, torch.dtype]:
    """Return where and in what a model computes: as asked, or the first GPU, in bfloat16 if it can, or the CPU."""
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtype is None:
        dtype = fast_dtype(device) if device.type == "cuda" else torch.float32
    return device, dtype


def fast_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 for a GPU or a processor that has instructions for it, else float32.

    Elsewhere bfloat16 is emulated, which is slower than float32.
    """
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    # PyTorch asks the processor, but only under private names; without them it is float32, which is always right.
    asked = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
    has_instructions = device.type == "cpu" and any(ask() for ask in asked if ask)
    return torch.bfloat16 if has_instructions else torch.float32


def _load_model(spec: str, local: bool) -> SentenceTransformer:
    if Path(spec).is_dir():
        require_model(Path(spec))
        local = True
    advice = f"give {' or '.join(map(repr, BUNDLED))}, a model directory, or a hub id"
    with loading(spec, "encoder", advice):
        refuse_mistyped(spec)
        local = local or stays_off_the_hub(spec, "encoder", advice)
        model = load_any(spec, local=local)
    if len(model) and isinstance(model[0], StaticEmbedding):
        require_row_for_each_token(model[0].tokenizer, len(model[0].embedding.weight), spec)
    return model


def _config(module: Any) -> dict[str, Any]:
    config = module.get_config_dict() if hasattr(module, "get_config_dict") else {}
    return dict(json.loads(json.dumps(config, default=str)))
