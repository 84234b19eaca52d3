"""HCE beside the same training without the tree, on BEIR folders: unsupervised, supervised or joint, several seeds.

    python experiments/scenarios.py scifact nfcorpus cranfield --seeds 3
    python experiments/scenarios.py scifact --mode joint --encoder minilm --seeds 1

Each run prints a line as it ends, and the means come last. Finished runs are kept in --results and not run again.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hce.data.judgments import Dataset, splits
from hce.encoding.encoder import Encoder
from hce.evaluation.dense import DenseSearcher
from hce.evaluation.evaluate import DEFAULT_MEASURES, evaluate
from hce.training.adapting import Labels, train
from hce.training.co_training import encode_corpus
from hce.training.history import mean_over_kinds
from hce.training.recipe import Recipe

SYSTEMS: dict[str, dict[str, Any]] = {"no tree": {"tree": False}, "hce": {}}


def run(folder: Path, encoder: str, mode: str, system: str, seed: int, tested: list[str]) -> dict[str, Any]:
    """Train one system once, and measure it on the test splits."""
    start = time.perf_counter()
    corpus = Dataset.load(folder, tested[0]).corpus
    fresh = Encoder.load(encoder)
    recipe = replace(Recipe.for_encoder(static=fresh.is_static, mode=mode), seed=seed, **SYSTEMS[system])
    pairs = dev = None
    if mode != "unsupervised":
        pairs = Labels(*Dataset.load(folder, "train")[1:])
        dev = Labels(*Dataset.load(folder, "dev")[1:]) if "dev" in splits(folder) else None
    result = train(corpus, fresh, pairs=pairs, dev=dev, recipe=recipe)
    seconds = time.perf_counter() - start
    searcher = DenseSearcher(result.encoder, corpus.ids, encode_corpus(result.encoder, corpus))
    measured = {}
    for split in tested:
        dataset = Dataset.load(folder, split)
        measured[split] = evaluate(searcher, dataset.queries, dataset.qrels).means
    dev_measure = round(mean_over_kinds(result.after), 4)
    return {
        "measures": measured,
        "dev": dev_measure,
        "mix": result.mix,
        "epochs": len(result.history) - 1,
        "seconds": round(seconds, 1),
    }


def main() -> None:
    """Run what is not there yet, then print the means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--encoder", default="static")
    parser.add_argument("--mode", default="unsupervised", choices=["unsupervised", "supervised", "joint"])
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--splits", default="test")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=Path("scenarios.json"))
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text()) if arguments.results.is_file() else {}
    tested = arguments.splits.split(",")
    for folder in arguments.folders:
        for system in arguments.systems.split(","):
            for seed in range(arguments.seeds):
                name = f"{folder.name} {arguments.encoder} {arguments.mode} {system} {seed}"
                if name not in results:
                    results[name] = run(folder, arguments.encoder, arguments.mode, system, seed, tested)
                    arguments.results.write_text(json.dumps(results, indent=1))
                print(name, json.dumps(results[name]), flush=True)
    for folder in arguments.folders:
        for system in arguments.systems.split(","):
            prefix = f"{folder.name} {arguments.encoder} {arguments.mode} {system} "
            found = [value for name, value in results.items() if name.startswith(prefix)]
            for split in tested:
                means = [np.mean([each["measures"][split][m] for each in found]) for m in DEFAULT_MEASURES]
                shown = " / ".join(f"{mean:.4f}" for mean in means)
                print(f"{folder.name:20} {split:10} {arguments.mode:12} {system:8} {shown}  ({len(found)} seeds)")


if __name__ == "__main__":
    main()
