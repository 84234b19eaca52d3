"""Reranker: a cross-encoder, which reads a query and a text together and says in one number how well they fit.

A reranker is slower than an encoder by far, since nothing can be computed beforehand, and knows more: it puts the
first few dozen hits of a search into a better order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import CrossEncoder

from hce.contained import read_bytes
from hce.encoding.bundled import RERANKERS, loading, refuse_mistyped_reranker, stays_off_the_hub
from hce.encoding.encoder import device_and_dtype
from hce.encoding.tables import MODULES, require_model_folder
from hce.errors import InputError

PAIRS_AT_ONCE = 32
FOR_PAIRS = ("SequenceClassification", "CausalLM", "ConditionalGeneration")  # architectures that can give a score


class Reranker:
    """A cross-encoder that gives each pair of a query and a text one score.

    Attributes:
        model: the sentence-transformers model underneath.
        name: the spec that the cross-encoder was loaded by.
    """

    def __init__(self, model: CrossEncoder, name: str) -> None:
        if model.num_labels != 1:
            raise InputError(
                f"{name} gives {model.num_labels} scores for a pair of texts, and not one; name a cross-encoder that "
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
        """Load a directory or a hub id of any cross-encoder of sentence-transformers.

        Args:
            spec: which cross-encoder.
            device: where to compute; by default the first GPU, else the CPU.
            dtype: what to compute in; by default bfloat16 on a GPU that has it, else float32.
            local: stay off the hub; a hub id is then found only if it was downloaded before.

        Raises:
            InputError: there is no such model, or the model is no cross-encoder with one score.
            FormatError: it is a directory, and damaged.
        """
        name = str(spec)
        refuse_mistyped_reranker(name)
        device, dtype = device_and_dtype(device, dtype)
        if Path(spec).is_dir():
            _refuse_other_folders(Path(spec))
            local = True
        advice = f"give a model directory or a hub id, such as {RERANKERS[0]}"
        with loading(name, "cross-encoder", advice):
            local = local or stays_off_the_hub(name, "cross-encoder", advice, RERANKERS)
            model = CrossEncoder(name, device=str(device), local_files_only=local, model_kwargs={"dtype": dtype})
        _refuse_other_models(model, name)
        return cls(model, name)

    def scores(self, query: str, texts: Sequence[str]) -> np.ndarray:
        """Return how well each text answers a query, of shape (texts,), float32; the scale is the model's own.

        Raises:
            InputError: the model gives something that is no number.
        """
        if not texts:
            return np.empty(0, np.float32)
        pairs = [(query, text) for text in texts]
        given = self.model.predict(pairs, batch_size=PAIRS_AT_ONCE, show_progress_bar=False, convert_to_tensor=True)
        scores = np.asarray(given.float().cpu().numpy(), np.float32).reshape(len(texts))
        if not np.isfinite(scores).all():
            raise InputError(f"{self.name} gives NaN or infinity as a score; name another cross-encoder")
        return scores


def _refuse_other_folders(folder: Path) -> None:
    """Refuse a folder that holds no cross-encoder.

    Raises:
        InputError: the folder holds something else, or nothing.
    """
    require_model_folder(folder)
    try:
        modules = json.loads(read_bytes(folder / MODULES))
        is_encoder = any("Pooling" in str(each["type"]) or "StaticEmbedding" in str(each["type"]) for each in modules)
    except (OSError, ValueError, TypeError, KeyError):
        return  # the library says what is wrong
    if is_encoder:
        raise InputError(f"{folder} is an encoder, and no cross-encoder: it cannot read a query and a text together")


def _refuse_other_models(model: CrossEncoder, name: str) -> None:
    """Refuse a model whose last layer, which gives the score, nobody has trained.

    Raises:
        InputError: the model was not trained to score pairs.
    """
    known = getattr(getattr(model.model, "config", None), "architectures", None) or []
    if known and not any(kind in architecture for architecture in known for kind in FOR_PAIRS):
        raise InputError(f"{name} is a {known[0]}, and no cross-encoder: it was not trained to score pairs of texts")
