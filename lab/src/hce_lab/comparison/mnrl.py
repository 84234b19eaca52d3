"""sentence-transformers' own trainer, as a user of that library trains on labeled pairs.

It uses MultipleNegativesRankingLoss, batches without duplicates, a linear schedule with warm-up, and the last weights.
Pairs, learning rate, batch size, number of epochs and precision come from the task's recipe.
"""

from __future__ import annotations

import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.sampler import BatchSamplers
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.util import mine_hard_negatives

from hce.data.text import first_words
from hce.encoding.encoder import Encoder, fast_dtype
from hce.training.pairs import LabeledPairs
from hce_lab.comparison.task import Built, Task, searched_by_vectors

if TYPE_CHECKING:
    from datasets import Dataset

MARGIN = 0.05  # a mined negative scores at least this much below the answer, as in the library's guide


def build_mnrl(task: Task) -> Built:
    """Train with in-batch negatives."""
    return _build(task, is_mined=False)


def build_mnrl_mined(task: Task) -> Built:
    """Train with in-batch negatives and a mined hard negative for each pair."""
    return _build(task, is_mined=True)


def _build(task: Task, *, is_mined: bool) -> Built:
    encoder, start = task.load_encoder(), time.perf_counter()
    pairs = pairs_to_train(task)
    fit(encoder, with_mined_negatives(pairs, encoder, task) if is_mined else pairs, task)
    return searched_by_vectors(encoder, task.corpus, time.perf_counter() - start)


def pairs_to_train(task: Task) -> Dataset:
    """Put the labeled pairs into the columns that the library expects."""
    from datasets import Dataset

    labels, _ = task.labeled
    source = LabeledPairs(task.corpus, labels.queries, labels.qrels)
    queries = [source.texts[query] for query in source.pairs[:, 0].tolist()]
    texts = [task.corpus[position].full_text for position in source.pairs[:, 1].tolist()]
    return Dataset.from_dict({"anchor": queries, "positive": [_cut(text, task.recipe.window) for text in texts]})


def with_mined_negatives(pairs: Dataset, encoder: Encoder, task: Task) -> Dataset:
    """Mine a hard negative for each pair with the library and the untrained encoder."""
    corpus = [_cut(text, task.recipe.window) for text in task.corpus.texts()]
    options: dict[str, Any] = {"num_negatives": 1, "relative_margin": MARGIN, "output_format": "triplet"}
    return mine_hard_negatives(pairs, encoder.model, corpus=corpus, verbose=False, **options)


def fit(encoder: Encoder, pairs: Dataset, task: Task) -> None:
    """Train an encoder in place."""
    recipe = task.recipe
    with tempfile.TemporaryDirectory() as folder:
        arguments = SentenceTransformerTrainingArguments(
            output_dir=folder,
            num_train_epochs=recipe.epochs,
            per_device_train_batch_size=recipe.batch_size,
            learning_rate=recipe.learning_rate,
            warmup_ratio=recipe.warmup,
            bf16=fast_dtype(encoder.device) == torch.bfloat16,
            use_cpu=encoder.device.type == "cpu",
            batch_sampler=BatchSamplers.NO_DUPLICATES,
            seed=recipe.seed,
            save_strategy="no",
            report_to="none",
            disable_tqdm=not task.progress,
        )
        loss = MultipleNegativesRankingLoss(encoder.model)
        SentenceTransformerTrainer(model=encoder.model, args=arguments, train_dataset=pairs, loss=loss).train()


def _cut(text: str, window: int) -> str:
    return first_words(text, window) if window else text
