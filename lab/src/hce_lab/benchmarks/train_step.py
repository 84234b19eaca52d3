"""A training step of HCE with free negatives beside one of sentence-transformers' MultipleNegativesRankingLoss.

    python -m hce_lab train_step CORPUS [--encoder minilm] [--batch 32] [--steps 8]

Same texts, same batch, same optimiser, in turns in one run; prints the medians and the medians of the ratios. Both
tokenise alike; of a static encoder, a step is also taken as training takes it, which tokenises each word once, and of
a transformer in bfloat16, which training uses where the processor has instructions for it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

from hce.data.corpus import Corpus
from hce.encoding.corpus_vectors import encode_corpus
from hce.encoding.encoder import Encoder
from hce.encoding.tables import TokenMemo
from hce.training.co_training import cluster_corpus
from hce.training.pairs import Batch, InverseCloze, Sources
from hce.training.recipe import Recipe
from hce.training.steps import Trainer

RIVAL = "MultipleNegativesRankingLoss"


def mnrl_step(encoder: Encoder, loss: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """Take one step as sentence-transformers takes it."""
    features = [encoder.tokenize(batch.queries, "query"), encoder.tokenize(batch.documents, "document")]
    optimizer.zero_grad(set_to_none=True)
    loss(features, None).backward()
    optimizer.step()


def seconds(step: Callable[[Batch], None], batch: Batch) -> float:
    """Time a step."""
    start = time.perf_counter()
    step(batch)
    return time.perf_counter() - start


def main() -> None:
    """Print the times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--encoder", default="static")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--documents", type=int, default=5000, help="use so many of the corpus")
    arguments = parser.parse_args()
    corpus = Corpus.from_documents(Corpus.load(arguments.corpus)[: arguments.documents])
    encoder = Encoder.load(arguments.encoder, device="cpu")
    recipe = Recipe.for_encoder(static=encoder.is_table, batch_size=arguments.batch)
    source = InverseCloze(corpus, lengths=recipe.span_lengths, cut_share=recipe.cut_share, window=recipe.window)
    trainer = Trainer(corpus, encoder, Sources(None, source), recipe)
    # Clustering needs vectors of all documents; a step's time does not depend on what they are.
    vectors = encode_corpus(Encoder.load("static", device="cpu"), corpus)
    trainer.use_tree(cluster_corpus(vectors, recipe, encoder, 0), vectors)
    rival = MultipleNegativesRankingLoss(encoder.model)
    encoder.model.train()
    batches = list(source.batches(0, arguments.batch))[: arguments.steps]

    def hce_step(batch: Batch) -> None:
        trainer._step([trainer._source_batch(1.0, source, batch, [0, 0, 0, 0])])

    def as_trained(batch: Batch) -> None:
        with encoder.remembering_tokens():
            encoder._token_memo = memo
            hce_step(batch)

    def in_bfloat16(batch: Batch) -> None:
        with encoder.computing_in(torch.bfloat16):
            hce_step(batch)

    steps = {"hce": hce_step, RIVAL: lambda batch: mnrl_step(encoder, rival, trainer.optimizer, batch)}
    memo = TokenMemo.of(encoder.model[0].tokenizer) if encoder.table is not None else None
    if memo is not None:  # by the second epoch, every word has been met
        steps["hce, words remembered"] = as_trained
        for text in corpus.texts():
            memo.ids(text)
    else:
        steps["hce, bfloat16"] = in_bfloat16
    times = np.array([[seconds(step, batch) for step in steps.values()] for batch in batches])[1:]
    for name, median, ratio in zip(
        steps, np.median(times, axis=0), np.median(times / times[:, [1]], axis=0), strict=True
    ):
        print(f"{name:32} {median * 1000:8.0f} ms a step of {arguments.batch} pairs, {ratio:.3f} x")
    print(f"ratios to {RIVAL}, {arguments.encoder}, medians over {len(times)} steps")
