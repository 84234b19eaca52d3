"""A small random encoder in the place of `static`, so that commands and examples run as they are printed, and fast."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from hce.encoding import bundled


def small_static(cache: Path, texts: Iterable[str]) -> None:
    """Save a random vector of 32 dimensions for each word of the texts where $HCE_CACHE keeps the distilled table."""
    words = ["[UNK]", *sorted({word for text in texts for word in re.findall(r"\w+", text.lower())})]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    table = np.random.default_rng(1).normal(size=(len(words), 32)).astype(np.float32)
    model = SentenceTransformer(
        modules=[StaticEmbedding(tokenizer, embedding_weights=table), Normalize()], device="cpu"
    )
    model.save(str(cache / f"static-{bundled._static_fingerprint()}"), create_model_card=False)
