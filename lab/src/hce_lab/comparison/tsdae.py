"""TSDAE (Wang, Reimers and Gurevych 2021), through sentence-transformers' own `DenoisingAutoEncoderLoss`.

Three of every five words of a document are deleted, and the rest is encoded to one vector. A decoder, which shares its
weights with the encoder, must write the document from that vector. The decoder is dropped afterwards. Steps, batch size
and learning rate are the same as for all trained systems. As for those, dev queries of held-out documents choose how to
mix first and trained weights. The authors pool by the first token; here the encoder keeps its own pooling and unit
length, and the decoder sees that vector.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice

import numpy as np
import torch
from sentence_transformers.sentence_transformer.losses import DenoisingAutoEncoderLoss
from torch import Tensor

from hce.data.corpus import Corpus
from hce.data.text import WORD_OR_MARK
from hce.encoding.encoder import Encoder
from hce.encoding.tables import quiet_transformers
from hce.errors import InputError
from hce.progress import progress_bar
from hce.training.co_training import load_best_mix, weights_of
from hce.training.pairs import LabelSets, batch_count, in_batches, sources_and_devset
from hce.training.recipe import Recipe
from hce_lab.comparison.task import Built, Task, searched_by_vectors

DELETED = 0.6
MAX_GRADIENT = 1.0


def build_tsdae(task: Task) -> Built:
    """Train by denoising, then keep the best mix of first and trained weights."""
    encoder = task.load_encoder()
    recipe = replace(task.recipe, mode="unsupervised")
    sources, devset = sources_and_devset(task.corpus, encoder, LabelSets(), recipe)
    learnt = task.corpus.only(np.setdiff1d(np.arange(len(task.corpus)), sources.held_out))
    start = time.perf_counter()
    first = weights_of(encoder)
    denoise(encoder, learnt, task.recipe, progress=task.progress)
    mix = load_best_mix(encoder, first, {task.recipe.epochs: weights_of(encoder)}, devset, task.recipe).share
    return searched_by_vectors(encoder, task.corpus, time.perf_counter() - start, {"mix": mix, "trained": bool(mix)})


def denoise(encoder: Encoder, corpus: Corpus, recipe: Recipe, *, progress: bool = False) -> None:
    """Train the encoder's weights in place by denoising.

    Raises:
        InputError: the encoder's network cannot serve as a decoder.
    """
    torch.manual_seed(recipe.seed)  # for dropout, and for the decoder's cross-attention, which starts at random
    loss = _loss(encoder)
    optimizer = torch.optim.AdamW(loss.parameters(), lr=recipe.learning_rate, weight_decay=0.0)
    total = recipe.epochs * batch_count(recipe.epoch_pairs or len(corpus), recipe.batch_size)
    rising = max(1.0, recipe.warmup * total)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / rising, (total - step) / max(1.0, total - rising))
    )
    loss.train()
    with progress_bar("denoising", total, "steps", show=progress) as advance:
        for step, texts in enumerate(islice(_endless_batches(corpus, recipe), total)):
            rng = np.random.default_rng([recipe.seed, 1, step])
            optimizer.zero_grad(set_to_none=True)
            _loss_of(loss, encoder, [damaged(text, rng) for text in texts], texts).backward()
            torch.nn.utils.clip_grad_norm_(loss.parameters(), MAX_GRADIENT)
            optimizer.step()
            schedule.step()
            advance(1)
    encoder.model.eval()


def damaged(text: str, rng: np.random.Generator) -> str:
    """Delete three of every five words and marks of a text; keep at least one."""
    pieces = WORD_OR_MARK.findall(text)
    kept = rng.random(len(pieces)) >= DELETED
    if not kept.any():
        return pieces[rng.integers(len(pieces))] if pieces else text
    return " ".join(piece for piece, keep in zip(pieces, kept, strict=True) if keep)


def _loss(encoder: Encoder) -> DenoisingAutoEncoderLoss:
    try:
        with quiet_transformers():
            return DenoisingAutoEncoderLoss(encoder.model).to(encoder.device)
    except (ValueError, AssertionError, OSError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"tsdae: {encoder.name} cannot serve as its own decoder ({reason}); give an encoder of the BERT family"
        ) from error


def _loss_of(loss: DenoisingAutoEncoderLoss, encoder: Encoder, sources: list[str], targets: list[str]) -> Tensor:
    features = [encoder.tokenize(texts, "document") for texts in (sources, targets)]
    with torch.autocast(encoder.device.type, dtype=encoder.dtype, enabled=encoder.dtype != torch.float32):
        value: Tensor = loss(features, None)
    return value


def _endless_batches(corpus: Corpus, recipe: Recipe) -> Iterator[list[str]]:
    """Yield batches of all documents without end, each turn in another order."""
    for turn in count():
        order = np.random.default_rng([recipe.seed, 0, turn]).permutation(len(corpus))
        for positions in in_batches(order, recipe.batch_size):
            yield [corpus[position].full_text for position in positions.tolist()]
