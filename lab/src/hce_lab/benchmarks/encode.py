"""Encoding: MiniLM against sentence-transformers' own `encode`, static against MiniLM, memory, and a known figure.

    python -m hce_lab encode SCIFACT_FOLDER [LARGE_CORPUS]

prints ratios measured in one run. The first argument is a BEIR folder (scifact, for the known NDCG@10 of 0.6451),
the second any corpus to encode with the static encoder while its peak memory is watched.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hce.data.corpus import Corpus
from hce.data.judgments import Dataset
from hce.encoding.corpus_vectors import encode_corpus
from hce.encoding.encoder import Encoder
from hce.evaluation.evaluate import DenseSearcher, evaluate

TEXTS = 512
ROUNDS = 2
BATCH_SIZES = (4, 8, 16, 32)


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def throughput(texts: list[str], minilm: Encoder, static: Encoder) -> None:
    """Print texts/s of each contender; rounds are interleaved so that a slow moment hits all alike."""
    rivals = {
        f"sentence-transformers, batch {size}": lambda size=size: minilm.model.encode(texts, batch_size=size)
        for size in BATCH_SIZES
    }
    contenders = {**rivals, "hce minilm": lambda: minilm.encode(texts), "hce static": lambda: static.encode(texts)}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, work in contenders.items():
            times[name].append(seconds(work))
    rates = {name: len(texts) / statistics.median(values) for name, values in times.items()}
    for name, rate in rates.items():
        print(f"{name:36} {rate:10.1f} texts/s")
    best = max(rates[name] for name in rivals)
    print(f"hce minilm / sentence-transformers at its best batch size: {rates['hce minilm'] / best:.3f}")
    print(f"hce static / hce minilm: {rates['hce static'] / rates['hce minilm']:.0f}")


def known_figures(folder: Path, minilm: Encoder, static: Encoder) -> None:
    """Print NDCG@10 and R@100 on test, with nothing trained."""
    dataset = Dataset.load(folder)
    for encoder in (static, static.fitted_to(dataset.corpus), minilm):
        vectors = encoder.encode(list(dataset.corpus.texts()))
        report = evaluate(DenseSearcher(encoder, dataset.corpus.ids, vectors), dataset.queries, dataset.qrels)
        print(f"{folder.name}, {encoder.name:16} {report}")


def peak_memory(path: Path, static: Encoder) -> None:
    """Print how far peak memory grows over the loaded encoder when a large corpus is encoded to disk."""
    static.encode(["warm up"])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    corpus = Corpus.load(path)
    with tempfile.TemporaryDirectory() as folder:
        took = seconds(lambda: encode_corpus(static, corpus, Path(folder) / "vectors"))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{path.name}: {len(corpus):,} documents in {took:.1f} s, peak memory + {grown:.0f} MB")


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scifact", type=Path)
    parser.add_argument("large", type=Path, nargs="?")
    arguments = parser.parse_args()
    static = Encoder.load("static", device="cpu")
    if arguments.large:
        peak_memory(arguments.large, static)
    minilm = Encoder.load("minilm", device="cpu")
    texts = [document.full_text for document in Corpus.load(arguments.scifact)[:TEXTS]]
    throughput(texts, minilm, static)
    known_figures(arguments.scifact, minilm, static)
