"""The network of generative retrievers: it reads a text to states, and a decoder writes a document id.

A *reader* turns texts into states of tokens. A *decoder* attends to them, and turns the symbols so far into a state for
the next symbol. The *head* has a row for each symbol, and a symbol's score is the inner product of its row with that
state (no bias, as in the paper's Sec. 3). There are two kinds:

- any encoder-decoder of transformers (such as T5, by hub id or directory), with its own decoder;
- any encoder of ours (a sentence-transformers model, a token table whose rows are its tokens' states), with a small
  decoder that starts at random, so without a pretrained decoder's knowledge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sentence_transformers.sentence_transformer.modules import StaticEmbedding, Transformer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel

from hce.encoding.bundled import BUNDLED
from hce.encoding.encoder import Encoder, fast_dtype
from hce.encoding.tables import quiet_transformers
from hce.errors import InputError, one_line
from hce.evaluation.runs import Scored
from hce.training.losses import scores_of
from hce.training.recipe import Recipe
from hce_lab.comparison.identifiers import Trie, beam_search
from hce_lab.comparison.task import hits_of

LAYERS = 2
FEED_FORWARD = 2  # the width of feed-forward parts, in widths of the states
DROPOUT = 0.1
HEAD_WIDTH = 64
READ_TOKENS = 64  # tokens of a text that any reader reads
TEXTS_AT_ONCE = 32  # on a CPU, where padding takes as long as tokens
BEAM = 100
QUERIES_AT_ONCE = 16


class EncodedTexts(NamedTuple):
    """States of texts (B, T, n), and a mask of their tokens (B, T)."""

    states: Tensor
    there: Tensor

    def repeated(self, times: int) -> EncodedTexts:
        """Repeat each text several times in a row."""
        return EncodedTexts(self.states.repeat_interleave(times, dim=0), self.there.repeat_interleave(times, dim=0))


# ------------------------------------------------------------------------------------------------------------ readers


class TextReader(nn.Module):
    """Turns texts into states.

    Attributes:
        width: the length n of a state.
    """

    width: int

    def forward(self, texts: Sequence[str]) -> EncodedTexts:
        """Read texts on the device of the weights."""
        raise NotImplementedError


class TableReader(TextReader):
    """A token table: the states of a text are the rows of its tokens, with one scale for all.

    The length of a row expresses how much its token matters, so rows are not normalized.
    """

    def __init__(self, table: StaticEmbedding) -> None:
        super().__init__()
        self.tokenizer = table.tokenizer
        rows = table.embedding.weight.detach().clone()
        self.width = rows.shape[1]
        self.table = nn.Embedding.from_pretrained(rows, freeze=False)
        self.scale = float(1 / rows.square().mean().sqrt().clamp(min=1e-12))

    def forward(self, texts: Sequence[str]) -> EncodedTexts:
        """Look up the rows of the tokens."""
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        rows = [torch.tensor(encoding.ids[:READ_TOKENS], dtype=torch.int64) for encoding in encodings]
        lengths = torch.tensor([len(row) for row in rows])
        tokens = nn.utils.rnn.pad_sequence([*rows, torch.zeros(1, dtype=torch.int64)], batch_first=True)[:-1]
        device = self.table.weight.device
        there = (torch.arange(tokens.shape[1]) < lengths[:, None]).to(device)
        states = self.table(tokens.to(device)) * self.scale * there[..., None]
        is_first = torch.arange(tokens.shape[1], device=device) == 0
        return EncodedTexts(states, there | is_first)  # a text without tokens is read as one zero


class TransformerReader(TextReader):
    """A sentence-transformers encoder without its pooling: the states of its tokens."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.prompt = encoder.prompt("query")
        self.transformer: Transformer = deepcopy(encoder.model[0])  # a copy to train; the encoder does not change
        self.transformer.max_seq_length = min(READ_TOKENS, encoder.model.max_seq_length or READ_TOKENS)
        self.width = int(self.transformer.get_embedding_dimension())

    def forward(self, texts: Sequence[str]) -> EncodedTexts:
        """Run the transformer, with the prompt of queries."""
        return read_by_length(self._read, texts, next(self.parameters()).device)

    def _read(self, texts: list[str], device: torch.device) -> EncodedTexts:
        tokens = self.transformer.preprocess(texts, prompt=self.prompt, task="query")
        features = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in tokens.items()}
        found = self.transformer(features)
        return EncodedTexts(found["token_embeddings"], found["attention_mask"].bool())


class SequenceReader(TextReader):
    """The encoder of an encoder-decoder."""

    def __init__(self, tokenizer: Any, network: nn.Module, width: int) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.network = network
        self.width = width

    def forward(self, texts: Sequence[str]) -> EncodedTexts:
        """Run the encoder."""
        return read_by_length(self._read, texts, next(self.parameters()).device)

    def _read(self, texts: list[str], device: torch.device) -> EncodedTexts:
        options = {"padding": True, "truncation": True, "max_length": READ_TOKENS, "return_tensors": "pt"}
        tokens = self.tokenizer(texts, **options).to(device)
        states = self.network(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
        return EncodedTexts(states.last_hidden_state, tokens["attention_mask"].bool())


def read_by_length(
    read: Callable[[list[str], torch.device], EncodedTexts], texts: Sequence[str], device: torch.device
) -> EncodedTexts:
    """Read texts of similar length together on a CPU, and all at once on a GPU.

    Args:
        read: reads some texts on a device.
        texts: all texts; the states have the same order.
        device: the device.
    """
    size = TEXTS_AT_ONCE if device.type == "cpu" else max(1, len(texts))
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    parts = [read([texts[row] for row in order[first : first + size]], device) for first in range(0, len(order), size)]
    length = max(part.there.shape[1] for part in parts)
    states = torch.cat([F.pad(part.states, (0, 0, 0, length - part.there.shape[1])) for part in parts])
    there = torch.cat([F.pad(part.there, (0, length - part.there.shape[1])) for part in parts])
    place = torch.tensor(order, device=device).argsort()
    return EncodedTexts(states[place], there[place])


# ----------------------------------------------------------------------------------------------------------- decoders


class TextAttention(nn.Module):
    """Cross-attention of decoder states to a text that several beams of a query share.

    If it takes fewer multiplications, as in training, the key and value weights are applied to the decoder's states,
    and the text is never projected. Otherwise keys and values of the text are computed first.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = head_count(width)
        self.query, self.output = nn.Linear(width, width), nn.Linear(width, width)
        self.key, self.value = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, asked: Tensor, memory: EncodedTexts, *, text_last: bool | None = None) -> Tensor:
        """Attend with states (B, P, n) and return as many; `text_last` forces an order."""
        count, width = asked.shape[1:]
        tokens = memory.states.shape[1]
        if text_last is None:
            text_last = count * (width + self.heads * tokens) < tokens * width
        each = (self.heads, width // self.heads)
        query = self.query(asked).unflatten(2, each) / math.sqrt(each[1])  # (B, P, h, d)
        if text_last:
            query = torch.einsum("bphd,hdn->bphn", query, self.key.weight.unflatten(0, each))
            scores = torch.einsum("bphn,btn->bhpt", query, memory.states)
        else:
            scores = torch.einsum("bphd,bthd->bhpt", query, self.key(memory.states).unflatten(2, each))
        scores = scores.masked_fill(~memory.there[:, None, None], -torch.inf)
        shares = self.dropout(scores.softmax(-1))
        if text_last:
            mixed = torch.einsum("bhpt,btn->bphn", shares, memory.states)
            mixed = torch.einsum("bphn,hdn->bphd", mixed, self.value.weight.unflatten(0, each))
        else:
            mixed = torch.einsum("bhpt,bthd->bphd", shares, self.value(memory.states).unflatten(2, each))
        found: Tensor = self.output(mixed.flatten(2))
        return found


def head_count(width: int) -> int:
    """Return the largest number of heads that have 64 dimensions or more each."""
    return max(heads for heads in range(1, max(1, width // HEAD_WIDTH) + 1) if width % heads == 0)


class DecoderLayer(nn.Module):
    """Self-attention, cross-attention if it reads a text, and feed-forward, with pre-norm."""

    def __init__(self, width: int, *, reads: bool = True) -> None:
        super().__init__()
        self.own_norm, self.last_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.own = nn.MultiheadAttention(width, head_count(width), DROPOUT, batch_first=True)
        self.text_norm = nn.LayerNorm(width) if reads else None
        self.text = TextAttention(width) if reads else None
        self.forwards = nn.Sequential(
            nn.Linear(width, FEED_FORWARD * width),
            nn.GELU(),
            nn.Dropout(DROPOUT),
            nn.Linear(FEED_FORWARD * width, width),
            nn.Dropout(DROPOUT),
        )

    def forward(self, x: Tensor, memory: EncodedTexts | None = None) -> Tensor:
        """Apply the layer to states (B, W, t, n) of W beams for each of B texts."""
        length = x.shape[2]
        own = self.own_norm(x).flatten(0, 1)  # (B·W, t, n)
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        x = x + self.own(own, own, own, attn_mask=later, need_weights=False)[0].view_as(x)
        if self.text is not None and self.text_norm is not None and memory is not None:
            x = x + self.text(self.text_norm(x).flatten(1, 2), memory).view_as(x)
        return x + self.forwards(self.last_norm(x))


class FreshDecoder(nn.Module):
    """A small decoder that starts at random, for a reader without its own."""

    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(0.02 * torch.randn(steps, width))
        self.layers = nn.ModuleList(DecoderLayer(width) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(width)

    def forward(self, inputs: Tensor, memory: EncodedTexts) -> Tensor:
        """Take the inputs of each step, of shape (B, W, t, n), to its state."""
        x = inputs + self.positions[: inputs.shape[2]]
        for layer in self.layers:
            x = layer(x, memory)
        return self.norm(x)


class SequenceDecoder(nn.Module):
    """The decoder of an encoder-decoder, with its own encoding of positions."""

    def __init__(self, network: PreTrainedModel) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor, memory: EncodedTexts) -> Tensor:
        """Take the inputs of each step, of shape (B, W, t, n), to its state."""
        repeated = memory.repeated(inputs.shape[1])
        found = self.network(
            inputs_embeds=inputs.flatten(0, 1),
            encoder_hidden_states=repeated.states,
            encoder_attention_mask=repeated.there.long(),
            use_cache=False,
        )
        return found.last_hidden_state.view_as(inputs)

    @torch.no_grad()
    def prime(self, start: Tensor, symbols: Tensor) -> None:
        """Start identifiers with the model's first token; scale symbols as its tokens."""
        rows, first = self.network.get_input_embeddings().weight, self.network.config.decoder_start_token_id
        start.copy_(rows.mean(0) if first is None else rows[first])
        nn.init.normal_(symbols, std=float(rows.std()))


# ------------------------------------------------------------------------------------------------------------ network


@dataclass(frozen=True)
class Alphabet:
    """The alphabet of identifiers.

    Attributes:
        size: the number of symbols at each step.
        steps: the length of the longest identifier.
        by_step: whether each step has its own symbols (NCI's position-aware tokens, GenRet's codebooks), or all steps
            share them (DSI).
    """

    size: int
    steps: int
    by_step: bool = False

    @property
    def rows(self) -> int:
        """The number of the head's rows."""
        return self.size * self.steps if self.by_step else self.size

    def row_of(self, codes: Tensor) -> Tensor:
        """Return the rows of symbols (…, t) at steps 0 … t − 1; padding gets an arbitrary row."""
        offset = self.size * torch.arange(codes.shape[-1], device=codes.device) if self.by_step else 0
        return codes.clamp(min=0) + offset

    def at(self, step: int) -> slice:
        """Return the rows of a step's symbols."""
        first = self.size * step if self.by_step else 0
        return slice(first, first + self.size)


class IdNetwork(nn.Module):
    """Reader, decoder and head.

    Attributes:
        alphabet: the alphabet of identifiers.
        head: a row for each symbol, of shape (rows, n); with atomic ids, the vector of each document.
        fresh: the parameters that start at random, which have a higher learning rate than pretrained ones.
    """

    def __init__(
        self, reader: TextReader, decoder: nn.Module, alphabet: Alphabet, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.reader, self.decoder, self.alphabet = reader, decoder, alphabet
        self.width = reader.width
        self.start = nn.Parameter(0.02 * torch.randn(self.width))
        read_back = alphabet.rows if alphabet.steps > 1 else 1  # with one step, no symbol is ever read back
        self.symbols = nn.Embedding(read_back, self.width)
        self.head = nn.Parameter(torch.randn(alphabet.rows, self.width) / math.sqrt(self.width))
        nn.init.normal_(self.symbols.weight, std=0.02)
        if isinstance(decoder, SequenceDecoder):
            decoder.prime(self.start, self.symbols.weight)
        self.dtype = dtype
        self.to(device)

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return self.head.device

    @property
    def fresh(self) -> list[nn.Parameter]:
        """The parameters that start at random."""
        known = {id(each) for each in self.reader.parameters()}
        if isinstance(self.decoder, SequenceDecoder):
            known |= {id(each) for each in self.decoder.parameters()}
        return [each for each in self.parameters() if id(each) not in known and each.requires_grad]

    @property
    def known(self) -> list[nn.Parameter]:
        """The pretrained parameters."""
        fresh = {id(each) for each in self.fresh}
        return [each for each in self.parameters() if id(each) not in fresh and each.requires_grad]

    def read(self, texts: Sequence[str]) -> EncodedTexts:
        """Read texts, with gradients if enabled."""
        with self._computing():
            memory: EncodedTexts = self.reader(texts)
        return memory

    def states(self, memory: EncodedTexts, prefixes: Tensor) -> Tensor:
        """Decode W prefixes (B, W, t) per text to states of all steps (B, W, t + 1, n)."""
        before = self.symbols(self.alphabet.row_of(prefixes))  # (B, W, t, n)
        start = self.start.expand(*prefixes.shape[:2], 1, -1)
        with self._computing():
            found: Tensor = self.decoder(torch.cat([start, before], dim=2), memory)
        return found

    def logits(self, states: Tensor, step: int, prefixes: Tensor) -> Tensor:
        """Score the symbols of a step (…, size) by its states (…, n).

        Args:
            states: the states of the step.
            step: from 0 on.
            prefixes: the symbols before it, of shape (…, step), for heads that depend on them.
        """
        rows = self.head[self.alphabet.at(step)]
        return scores_of(states.reshape(-1, self.width), rows, 1.0).view(*states.shape[:-1], -1)

    def next_scores(self, memory: EncodedTexts, prefixes: Tensor) -> Tensor:
        """Return log p of all next symbols (B, W, size) after prefixes (B, W, t)."""
        states = self.states(memory, prefixes)[:, :, -1]
        return self.logits(states, prefixes.shape[2], prefixes).log_softmax(-1)

    def step_states(self, memory: EncodedTexts, codes: Tensor) -> Tensor:
        """Decode identifiers (B, steps) by teacher forcing to states (B, steps, n)."""
        return self.states(memory, codes[:, None, :-1])[:, 0]

    def step_logits(self, states: Tensor, codes: Tensor) -> list[Tensor]:
        """Score the symbols of each step (B, size), given the true ones before it.

        Args:
            states: the states of the steps, of shape (B, steps, n).
            codes: the identifiers, of shape (B, steps).
        """
        return [self.logits(states[:, step], step, codes[:, :step]) for step in range(codes.shape[1])]

    def losses(self, memory: EncodedTexts, codes: Tensor) -> Tensor:
        """Return −log p of each text's identifier (B,), the sum of the steps' losses."""
        return sequence_losses(self.step_logits(self.step_states(memory, codes), codes), codes)

    def training_losses(self, texts: Sequence[str], codes: Tensor) -> Tensor:
        """Return the training loss (B,) of each text with its document's identifier."""
        return self.losses(self.read(texts), codes)

    def _computing(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)


def sequence_losses(logits: Sequence[Tensor], codes: Tensor) -> Tensor:
    """Sum the cross-entropy over steps, of scores (B, size) and symbols (B, steps); (B,)."""
    each = [
        F.cross_entropy(scores, codes[:, step], reduction="none", ignore_index=-1) for step, scores in enumerate(logits)
    ]
    return torch.stack(each).sum(0)


# ------------------------------------------------------------------------------------------------------------- making


def new_network(encoder: Encoder, alphabet: Alphabet, recipe: Recipe, kind: type[IdNetwork] = IdNetwork) -> IdNetwork:
    """Make the network for an encoder, with its own decoder or a fresh one.

    Args:
        encoder: reads the texts; if it names an encoder-decoder, its decoder is used.
        alphabet: the alphabet of identifiers.
        recipe: seed and precision.
        kind: the class of the network.

    Raises:
        InputError: the encoder has no states of tokens, or the model lacks its decoder.
    """
    torch.manual_seed(recipe.seed)
    dtype = torch.float32 if encoder.is_table else fast_dtype(encoder.device)
    if recipe.precision != "auto":
        dtype = getattr(torch, recipe.precision)
    if is_encoder_decoder(encoder.name):
        whole = _encoder_decoder(encoder.name)
        return kind(*whole, alphabet, device=encoder.device, dtype=dtype)
    reader = _reader(encoder)
    return kind(reader, FreshDecoder(reader.width, alphabet.steps), alphabet, device=encoder.device, dtype=dtype)


def is_encoder_decoder(spec: str) -> bool:
    """Return whether a spec names an encoder-decoder of transformers."""
    folder = Path(spec)
    if spec in BUNDLED or (folder / "modules.json").is_file():
        return False
    if not (folder / "config.json").is_file() and (folder.exists() or " " in spec):
        return False
    try:
        config = AutoConfig.from_pretrained(spec, local_files_only=folder.is_dir())
    except (OSError, ValueError):  # no such model of transformers: the encoder was loaded in another way
        return False
    is_half = any(name.endswith("EncoderModel") for name in config.architectures or ())
    return bool(config.is_encoder_decoder) and not is_half


def _encoder_decoder(spec: str) -> tuple[SequenceReader, SequenceDecoder]:
    local = Path(spec).is_dir()
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(spec, local_files_only=local)
            model, report = AutoModelForSeq2SeqLM.from_pretrained(
                spec, local_files_only=local, output_loading_info=True, dtype=torch.float32
            )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InputError(f"{spec}: no encoder-decoder can be loaded from it ({one_line(error)})") from error
    lacking = [name for name in report["missing_keys"] if "decoder." in name and "embed_tokens" not in name]
    if lacking:
        raise InputError(
            f"{spec}: a model without a decoder ({len(lacking)} weights of it are not there, such as {lacking[0]}); "
            "give a whole encoder-decoder, or a sentence encoder, which gets a decoder of its own"
        )
    width = model.get_input_embeddings().embedding_dim
    return SequenceReader(tokenizer, model.get_encoder(), width), SequenceDecoder(model.get_decoder())


def _reader(encoder: Encoder) -> TextReader:
    first = encoder.model[0]
    if isinstance(first, StaticEmbedding):
        return TableReader(first)
    if isinstance(first, Transformer):
        return TransformerReader(encoder)
    raise InputError(
        f"{encoder.name} has no states of tokens that a decoder could read ({type(first).__name__}); "
        "give a token table, a transformer, or an encoder-decoder such as T5"
    )


# ---------------------------------------------------------------------------------------------------------- searching


@dataclass(frozen=True)
class GenerativeSearcher:
    """A network and the trie of all identifiers, with beam search.

    Attributes:
        network: writes identifiers.
        ids: the ids of the documents.
        trie: the trie of their identifiers.
        beam: the width of the beam; wider if more documents are requested.
    """

    network: IdNetwork
    ids: Sequence[str]
    trie: Trie
    beam: int = BEAM

    def search(self, queries: Sequence[str], k: int) -> list[list[Scored]]:
        """Find the k documents with the most probable identifiers for each query, best first."""
        self.network.eval()
        found: list[list[Scored]] = []
        for start in range(0, len(queries), QUERIES_AT_ONCE):
            asked = list(queries[start : start + QUERIES_AT_ONCE])
            with torch.inference_mode():
                memory = self.network.read(asked)
            scores = partial(self.network.next_scores, memory)
            best = beam_search(scores, len(asked), self.trie, max(self.beam, k), k)
            found += [hits_of(self.ids, *row) for row in zip(*best, strict=True)]
        return found


def parameter_count(network: nn.Module) -> int:
    """Count a network's parameters."""
    return sum(each.numel() for each in network.parameters())
