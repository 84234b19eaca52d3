"""Late interaction: how well each token of a query is met by some token of a text, in the states of the encoder itself.

A transformer has a state for every token before it pools them into the one vector of a text. These states say what the
vector has lost: which words of the query stand in the text, in which sense, and whether all of them do. A query is
compared to a text by Σ wᵢ · max_j ⟨qᵢ, dⱼ⟩ (ColBERT's MaxSim), wᵢ being the rarer the token the more; the encoder is
not trained for it. States are kept as `DIM` bytes each: the directions in which they vary most, as unit vectors.

Measured on five collections, a first list re-ordered so gains on each (docs/LOG.md, "Late interaction").
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.numpy import save
from torch import Tensor

from hce.checksums import SEAL, checksum_of_arrays, kept_arrays
from hce.data.corpus import Corpus
from hce.encoding.encoder import Encoder
from hce.errors import FormatError
from hce.progress import progress_bar

DIM = 48  # 32 to 128 were level within noise, 16 was worse
SAMPLE = 64  # documents whose states tell the directions; 256 told nothing more
COUNTED = 1 << 15  # documents whose tokens are counted
STEPS = 127  # an entry of a unit vector is kept as a whole number of 127ths


class QueryTokens(NamedTuple):
    """A query's tokens.

    Attributes:
        vectors: of shape (tokens, DIM), unit rows, float32.
        weights: how much each counts, of shape (tokens,); they add up to 1.
    """

    vectors: np.ndarray
    weights: np.ndarray

    def max_similarities(self, codes: Sequence[np.ndarray]) -> np.ndarray:
        """Return how well these tokens are met by those of each text, from −1 to 1, of shape (texts,).

        Args:
            codes: of each text's tokens, as `TokenSpace.codes` gives them; to a text without any it is 0.
        """
        close = np.zeros(len(codes), np.float32)
        for row, text in enumerate(codes):  # one by one: the tokens of all texts together may be very many
            if len(text) and len(self.vectors):
                close[row] = (self.vectors @ text.T.astype(np.float32)).max(axis=1) @ self.weights / STEPS
        return close


class TokenSpace:
    """What turns an encoder's states into bytes, and says how much each token of a query counts.

    Attributes:
        basis: directions of the states, of shape (n, DIM), float32.
        weights: of each token of the vocabulary, of shape (V,), float32: log((N + 1) / (documents with it + ½)).
    """

    def __init__(self, basis: np.ndarray, weights: np.ndarray) -> None:
        self.basis, self.weights = basis, weights
        self._basis = torch.from_numpy(basis)

    @classmethod
    def fit(cls, encoder: Encoder, corpus: Corpus, *, progress: bool = False) -> TokenSpace | None:
        """Find the directions in the states of some documents, and count the tokens of many; None where none are told.

        Words of the vocabulary stand in for documents that are not there yet: an index may start with one.
        """
        if not encoder.has_states:
            return None
        states: list[Tensor] = []
        some = _spread_out(corpus, SAMPLE)
        some += encoder.vocabulary_texts(SAMPLE - len(some))
        encoder.encode(some, on_tokens=lambda text, ids, found: states.append(F.normalize(found, dim=1)))
        if not states:
            return None
        rows = torch.cat(states)
        varying = rows - rows.mean(dim=0)
        directions = torch.linalg.eigh((varying.T @ varying).double().cpu()).eigenvectors.flip(1)[:, :DIM]
        texts = _spread_out(corpus, COUNTED)
        counts = np.zeros(encoder.vocabulary_size, np.int64)
        with progress_bar("counting tokens", len(texts), "documents", show=progress or None) as advance:
            for ids in encoder.token_ids(texts):
                counts[np.unique(ids)] += 1
                advance(1)
        weights = np.log((len(texts) + 1) / (counts + 0.5)).clip(min=0)
        return cls(np.ascontiguousarray(directions.numpy(), np.float32), weights.astype(np.float32))

    def codes(self, states: Tensor) -> np.ndarray:
        """Return states of shape (tokens, n) as bytes of shape (tokens, DIM), int8."""
        return np.asarray((STEPS * self._reduced(states)).round().to(torch.int8).cpu().numpy())

    def query(self, ids: np.ndarray, states: Tensor) -> QueryTokens:
        """Return a query's tokens, given as ids, of shape (tokens,), and states of shape (tokens, n)."""
        weights = self.weights[ids]
        return QueryTokens(self._reduced(states).cpu().numpy(), weights / max(float(weights.sum()), 1e-9))

    def _reduced(self, states: Tensor) -> Tensor:
        if self._basis.device != states.device:
            self._basis = self._basis.to(states.device)
        with torch.autocast(states.device.type, enabled=False):  # within which the encoder may compute
            return F.normalize(states.float() @ self._basis, dim=1)

    @property
    def checksum(self) -> int:
        """What tells this space from others."""
        return checksum_of_arrays([self.basis, self.weights])

    def save(self, path: Path) -> None:
        """Write a file, with its checksum."""
        path.write_bytes(save({"basis": self.basis, "weights": self.weights}, {SEAL: str(self.checksum)}))

    @classmethod
    def load(cls, path: Path) -> TokenSpace:
        """Read what `save` wrote.

        Raises:
            FormatError: it is damaged.
        """
        kept = kept_arrays(path, ("basis", "weights"))
        if kept is None:
            raise FormatError(f"{path} is not as it was written; 'hce rebuild --tokens' makes it anew")
        return cls(*kept.arrays)


def _spread_out(corpus: Corpus, most: int) -> list[str]:
    """Return the texts of at most that many documents, from all over a corpus."""
    every = max(1, -(-len(corpus) // most))
    return list(corpus.only(np.arange(0, len(corpus), every)).texts())
