"""Reranking of the first hits, by a cross-encoder or by late interaction.

A cross-encoder reads a query and a text together. It ranks better than an encoder and is far slower, since nothing can
be computed in advance.

Late interaction compares tokens. A transformer has a state for each token before it pools them into one vector. A query
is compared to a text by Σ wᵢ · max_j ⟨qᵢ, dⱼ⟩ (ColBERT's MaxSim); the rarer a token, the larger is wᵢ. The encoder
needs no training for this comparison. A state is projected onto the `DIM` directions in which states vary most, and
kept as a unit vector of `DIM` bytes. Late interaction improved the first hits on all five collections (docs/LOG.md).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.numpy import save
from torch import Tensor

from hce.data.corpus import Corpus
from hce.encoding.bundled import RERANKERS, refuse_mistyped_reranker, stays_off_the_hub
from hce.encoding.encoder import Encoder, device_and_dtype
from hce.encoding.tables import MODULES, loading, quiet_transformers, require_model_folder
from hce.errors import FormatError, InputError
from hce.files import SEAL, checksum_of_arrays, kept_arrays, read_bytes
from hce.progress import progress_bar

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder

PAIRS_AT_ONCE = 32
FOR_PAIRS = ("SequenceClassification", "CausalLM", "ConditionalGeneration")  # architectures that can give a score

DIM = 48  # 32 to 128 were level within noise, 16 was worse
SAMPLE = 64  # documents whose states give the directions; 256 were no better
COUNTED = 1 << 15  # documents whose tokens are counted
COUNTED_AT_ONCE = 8192
STEPS = 127  # entries of a unit vector are rounded to multiples of 1/127


class Reranker:
    """A cross-encoder, which gives each pair of a query and a text one score."""

    def __init__(self, model: CrossEncoder, name: str) -> None:
        if model.num_labels != 1:
            raise InputError(
                f"{name} gives {model.num_labels} scores for a pair of texts, not one; name a cross-encoder that "
                "was trained to rank"
            )
        self.model = model.eval()
        self.name = name

    @classmethod
    def load(
        cls,
        spec: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        local: bool = False,
    ) -> Reranker:
        """Load a cross-encoder's directory or hub id; options as in `Encoder.load`.

        Raises:
            InputError: there is no such model, or it is not a cross-encoder with one score.
            FormatError: the directory is damaged.
        """
        name = str(spec)
        refuse_mistyped_reranker(name)
        device, dtype = device_and_dtype(device, dtype)
        if Path(spec).is_dir():
            _refuse_other_folders(Path(spec))
            local = True
        advice = f"give a model directory or a hub id, such as {RERANKERS[0]}"
        with loading(name, "cross-encoder", advice), quiet_transformers():
            from sentence_transformers import CrossEncoder

            local = local or stays_off_the_hub(name, "cross-encoder", advice, RERANKERS)
            model = CrossEncoder(name, device=str(device), local_files_only=local, model_kwargs={"dtype": dtype})
        known = getattr(getattr(model.model, "config", None), "architectures", None) or []
        if known and not any(kind in each for each in known for kind in FOR_PAIRS):  # the last layer would be random
            what = f"a {known[0]}, not a cross-encoder"
            raise InputError(f"{name} is {what}: it was not trained to score pairs of texts")
        return cls(model, name)

    def scores(self, query: str, texts: Sequence[str]) -> np.ndarray:
        """Return how well each text answers a query, on the model's own scale."""
        if not texts:
            return np.empty(0, np.float32)
        pairs = [(query, text) for text in texts]
        given = self.model.predict(pairs, batch_size=PAIRS_AT_ONCE, show_progress_bar=False, convert_to_tensor=True)
        scores = np.asarray(given.float().cpu().numpy(), np.float32).reshape(len(texts))
        if not np.isfinite(scores).all():
            raise InputError(f"{self.name} gives NaN or infinity as a score; name another cross-encoder")
        return scores


def _refuse_other_folders(folder: Path) -> None:
    """Fail with InputError if a folder holds an encoder, or no model."""
    require_model_folder(folder)
    try:
        modules = json.loads(read_bytes(folder / MODULES))
        is_encoder = any("Pooling" in str(each["type"]) or "StaticEmbedding" in str(each["type"]) for each in modules)
    except (OSError, ValueError, TypeError, KeyError):
        return  # CrossEncoder reports what is wrong
    if is_encoder:
        raise InputError(f"{folder} is an encoder, not a cross-encoder: it cannot read a query and a text together")


class QueryTokens(NamedTuple):
    """A query's tokens and their weights, which add up to 1."""

    vectors: np.ndarray  # (tokens, DIM), unit rows, float32
    weights: np.ndarray  # (tokens,)

    def max_similarities(self, codes: Sequence[np.ndarray]) -> np.ndarray:
        """Return MaxSim, from −1 to 1, for each text's `TokenSpace.codes`."""
        close = np.zeros(len(codes), np.float32)
        for row, text in enumerate(codes):  # one text at a time, to bound the memory
            if len(text) and len(self.vectors):
                close[row] = (self.vectors @ text.T.astype(np.float32)).max(axis=1) @ self.weights / STEPS
        return close


class TokenSpace:
    """Compresses an encoder's states to bytes, and weights the tokens of queries.

    States are projected onto the directions `basis`. `weights` has log((N + 1) / (df + ½)) for each token of the
    vocabulary, but at least 0: df of the N documents counted have the token.
    """

    def __init__(self, basis: np.ndarray, weights: np.ndarray) -> None:
        self.basis, self.weights = basis, weights
        self._basis = torch.from_numpy(basis)

    @classmethod
    def fit(cls, encoder: Encoder, corpus: Corpus, *, progress: bool = False) -> TokenSpace | None:
        """Fit directions and weights; None if the encoder gives no states of tokens.

        If documents are few, the directions are also fitted to texts of vocabulary words.
        """
        if not encoder.has_states:
            return None
        states: list[Tensor] = []
        vocabulary_size = max(encoder.tokenizer.get_vocab().values()) + 1
        some = _spread_out(corpus, SAMPLE)
        some += _vocabulary_texts(encoder, vocabulary_size, SAMPLE - len(some))
        encoder.encode(some, on_tokens=lambda text, ids, found: states.append(F.normalize(found, dim=1)))
        if not states:
            return None
        rows = torch.cat(states)
        varying = rows - rows.mean(dim=0)
        directions = torch.linalg.eigh((varying.T @ varying).double().cpu()).eigenvectors.flip(1)[:, :DIM]
        texts = _spread_out(corpus, COUNTED)
        counts = np.zeros(vocabulary_size, np.int64)
        with progress_bar("counting tokens", len(texts), "documents", show=progress or None) as advance:
            for start in range(0, len(texts), COUNTED_AT_ONCE):
                for ids in encoder.token_ids(texts[start : start + COUNTED_AT_ONCE]):
                    counts[np.unique(ids)] += 1
                    advance(1)
        weights = np.log((len(texts) + 1) / (counts + 0.5)).clip(min=0)
        return cls(np.ascontiguousarray(directions.numpy(), np.float32), weights.astype(np.float32))

    def codes(self, states: Tensor) -> np.ndarray:
        """Return states of shape (tokens, n) as bytes of shape (tokens, DIM), int8."""
        return np.asarray((STEPS * self._reduced(states)).round().to(torch.int8).cpu().numpy())

    def query(self, ids: np.ndarray, states: Tensor) -> QueryTokens:
        """Return a query's tokens from their ids and states."""
        weights = self.weights[ids]
        return QueryTokens(self._reduced(states).cpu().numpy(), weights / max(float(weights.sum()), 1e-9))

    def _reduced(self, states: Tensor) -> Tensor:
        if self._basis.device != states.device:
            self._basis = self._basis.to(states.device)
        with torch.autocast(states.device.type, enabled=False):
            return F.normalize(states.float() @ self._basis, dim=1)

    @property
    def checksum(self) -> int:
        """A checksum of the arrays, which identifies this space."""
        return checksum_of_arrays([self.basis, self.weights])

    def save(self, path: Path) -> None:
        """Write a file, with its checksum."""
        path.write_bytes(save({"basis": self.basis, "weights": self.weights}, {SEAL: str(self.checksum)}))

    @classmethod
    def load(cls, path: Path) -> TokenSpace:
        """Read what `save` wrote, or fail with FormatError."""
        arrays = kept_arrays(path, ("basis", "weights"))
        if arrays is None:
            raise FormatError(f"{path} has changed since it was written; 'hce rebuild --tokens' makes it again")
        return cls(*arrays)


def _vocabulary_texts(encoder: Encoder, vocabulary_size: int, count: int, words: int = 16) -> list[str]:
    """Return `count` texts of words spread over the vocabulary."""
    ids = np.linspace(0, vocabulary_size, max(0, count) * words, endpoint=False).astype(int).tolist()
    return [encoder.tokenizer.decode(ids[start::count], skip_special_tokens=True) for start in range(count)]


def _spread_out(corpus: Corpus, most: int) -> list[str]:
    """Return the texts of at most `most` documents, spread over a corpus."""
    every = max(1, -(-len(corpus) // most))
    return list(corpus.only(np.arange(0, len(corpus), every)).texts())
