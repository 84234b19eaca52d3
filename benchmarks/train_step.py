"""A training step of HCE with free negatives beside one of sentence-transformers' MultipleNegativesRankingLoss.

    python benchmarks/train_step.py CORPUS [--encoder minilm] [--batch 32] [--steps 8]

Same texts, same batch, same optimiser, interleaved in one run; prints the ratio of the median times.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

from hce.data.corpus import Corpus
from hce.encoding.encoder import Encoder
from hce.training.co_training import encode_corpus, grow
from hce.training.history import Progress
from hce.training.optimise import Sources, Trainer
from hce.training.pairs import Batch, InverseCloze
from hce.training.recipe import Recipe


def mnrl_step(encoder: Encoder, loss: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """One step as sentence-transformers takes it."""
    features = [encoder.tokenize(batch.queries, "query"), encoder.tokenize(batch.documents, "document")]
    optimizer.zero_grad(set_to_none=True)
    loss(features, None).backward()
    optimizer.step()


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
    recipe = Recipe.for_encoder(static=encoder.is_static, batch_size=arguments.batch)
    source = InverseCloze(corpus, lengths=recipe.span_lengths, cut_share=recipe.cut_share)
    trainer = Trainer(corpus, encoder, Sources(None, source), recipe)
    # Clustering needs vectors of all documents; a step's time does not depend on what they are.
    vectors = encode_corpus(Encoder.load("static", device="cpu"), corpus)
    trainer.use_tree(grow(vectors, recipe, encoder, 0), vectors)
    rival = MultipleNegativesRankingLoss(encoder.model)
    times: dict[str, list[float]] = {"hce": [], "MultipleNegativesRankingLoss": []}
    encoder.model.train()
    progress, batches = Progress(), list(source.batches(0, arguments.batch))
    for number, batch in enumerate(batches[: arguments.steps]):
        start = time.perf_counter()
        trainer._step([trainer._part(0, batch, [0, 0, number, 0])])
        middle = time.perf_counter()
        mnrl_step(encoder, rival, trainer.optimizer, batch)
        times["hce"].append(middle - start)
        times["MultipleNegativesRankingLoss"].append(time.perf_counter() - middle)
        progress.record({})
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    ratios = np.array(times["hce"][1:]) / np.array(times["MultipleNegativesRankingLoss"][1:])
    for name, median in medians.items():
        print(f"{name:32} {median * 1000:8.0f} ms a step of {arguments.batch} pairs")
    ratio = f"{np.median(ratios):.3f} (median over {len(ratios)} steps)"
    print(f"{arguments.encoder}: hce / MultipleNegativesRankingLoss = {ratio}")


if __name__ == "__main__":
    main()
