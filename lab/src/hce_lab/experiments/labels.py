"""Labels on a transformer: sentence-transformers' trainer compared with hce's fine-tuning, map and companions.

    python -m hce_lab labels data/squad --documents 5000 --pairs 1000 --splits test,test_seen --encoder minilm
    python -m hce_lab labels data/scifact --encoder minilm --systems tuned,tree,eq5,ct

All read the first 128 tokens of a text and get the same pairs; hce holds out a tenth of the queries as dev. The pool of
documents has the right ones, those of pairs, and the eight nearest to each query by the untrained encoder. Each row is
a line of JSON, with processor seconds of training. Each split is measured by vectors alone, and with words: with the
shares that `hce train` chose, or for other systems with those of `FIXED`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from hce.data.corpus import Corpus
from hce.data.judgments import Dataset, Labels, Qrels
from hce.encoding.encoder import Encoder, fast_dtype
from hce.index.index import Index
from hce.search.engine import nearest
from hce.search.fusion import FIXED, Calibration
from hce.training.pairs import LabeledPairs, labeled_devset, ndcg_of_rankings, split_labels
from hce.training.query_map import with_query_map
from hce.training.recipe import Recipe, parsed_settings, recipe_of_tuning
from hce.training.train import train
from hce_lab.comparison.mnrl import fit, pairs_to_train, with_mined_negatives
from hce_lab.comparison.task import Task
from hce_lab.experiments.common import command_line, names, part_of

TOKENS, NEAR = 128, 8
RIVAL = {"epochs": 1, "batch_size": 32, "learning_rate": 5e-5, "warmup": 0.1, "window": 0}
TREE: dict[str, Any] = {"tree": True, "negatives": "near"}
VARIANTS: dict[str, dict[str, Any]] = {  # settings of hce's fine-tuning
    "ct": {"negatives": "mined"},
    "tree": TREE,
    "eq5": {**TREE, "level_target": "node"},
}
SYSTEMS = ("given", "mnrl", "mined", "tuned", *VARIANTS, "hce")


def load(name: str) -> Encoder:
    """Load an encoder in the fastest dtype, limited to the first tokens of a text."""
    encoder = Encoder.load(name)
    encoder.model.max_seq_length = TOKENS
    encoder.dtype = fast_dtype(encoder.device)
    return encoder


def drawn(labels: Labels, count: int, seed: int) -> Labels:
    """Draw labeled pairs at random."""
    right = [each for each in labels.qrels.judgments() if each.grade > 0]
    chosen = np.sort(np.random.default_rng([seed, 31]).permutation(len(right))[:count])
    qrels = Qrels([right[index] for index in chosen.tolist()])
    return Labels({query: labels.queries[query] for query in qrels}, qrels)


class Trained(NamedTuple):
    """An encoder, and the shares of words and tokens in its search."""

    encoder: Encoder
    calibration: Calibration | None = Calibration(FIXED["transformer"])


@dataclass(frozen=True)
class Study:
    """An encoder, the pool of documents, the pairs, and the tested queries."""

    name: str
    corpus: Corpus
    pairs: Labels
    tested: dict[str, Labels]
    settings: dict[str, Any]
    seed: int

    def run(self, system: str) -> list[Trained]:
        """Train a system; return it without and with a map of queries, if it has one."""
        if system == "given":
            return self.with_map(load(self.name))
        if system in ("mnrl", "mined"):
            return [Trained(self.by_sentence_transformers(mined=system == "mined"))]
        if system == "hce":
            return [self.hce()]
        return self.with_map(self.tuned(VARIANTS.get(system, {})))

    def by_sentence_transformers(self, *, mined: bool) -> Encoder:
        """Train with sentence-transformers' trainer on all pairs."""
        encoder, recipe = load(self.name), Recipe(**{"train": "encoder", "seed": self.seed, **RIVAL, **self.settings})
        task = Task(self.corpus, self.name, recipe, pairs=self.pairs, dev=self.pairs)
        pairs = pairs_to_train(task)
        fit(encoder, with_mined_negatives(pairs, encoder, task) if mined else pairs, task)
        encoder.model.eval()
        return encoder

    def tuned(self, variant: dict[str, Any]) -> Encoder:
        """Fine-tune as `hce train` does, but keep the result even if it is worse on dev."""
        rest, held = split_labels(self.pairs, Recipe(seed=self.seed))
        count = sum(1 for _ in rest.qrels.judgments())
        recipe = replace(recipe_of_tuning(Recipe(seed=self.seed), count), **{**variant, **self.settings})
        return train(self.corpus, load(self.name), pairs=rest, dev=held, recipe=recipe).encoder

    def hce(self) -> Trained:
        """Train as `hce train` does, with companions."""
        recipe = Recipe.for_encoder(static=False, documents=len(self.corpus), seed=self.seed, **self.settings)
        result = train(self.corpus, load(self.name), pairs=self.pairs, recipe=recipe)
        return Trained(result.encoder, result.calibration)

    def with_map(self, encoder: Encoder) -> list[Trained]:
        """Return the encoder, and the encoder with a map if that helps held-out queries."""
        rest, held = split_labels(self.pairs, Recipe(seed=self.seed))
        vectors, pairs = encoder.encode(list(self.corpus.texts())), LabeledPairs(self.corpus, *rest)
        mapped = with_query_map(encoder, vectors, pairs, labeled_devset(self.corpus, *held, 0, 0), self.seed)
        return [Trained(each) for each in ([encoder] if mapped is encoder else [encoder, mapped])]

    def measure(self, trained: Trained) -> dict[str, Any]:
        """Measure by vectors, then with words: nDCG@10, R@1, R@100; nDCG@10 per query."""
        encoder = trained.encoder
        vectors, place = encoder.encode(list(self.corpus.texts())), {id_: n for n, id_ in enumerate(self.corpus.ids)}
        index = Index.temporary(self.corpus, encoder, vectors=vectors, calibration=trained.calibration)
        found: dict[str, Any] = {}
        for split, labels in self.tested.items():
            ranked, _ = nearest(encoder.encode(texts_of(labels), "query"), vectors, 100)
            hits = [[place[hit.id] for hit in each] for each in index.search(texts_of(labels), 100)]
            answers = [np.array([place[each] for each in labels.qrels.positives(query)]) for query in labels.qrels]
            for name, rows in ((split, list(ranked)), (f"{split} with words", [np.array(each) for each in hits])):
                ndcg = ndcg_of_rankings(rows, answers)
                found[name] = [round(float(ndcg.mean()), 4), *(recall(rows, k, answers) for k in (1, 100))]
                found[f"{name} by query"] = [round(value, 4) for value in ndcg.tolist()]
        return found


def recall(ranked: Sequence[np.ndarray], k: int, answers: Sequence[np.ndarray]) -> float:
    """Return the mean share of right documents among the first k."""
    shares = [np.isin(row[:k], right).sum() / len(right) for row, right in zip(ranked, answers, strict=True)]
    return round(float(np.mean(shares)), 4)


def texts_of(labels: Labels) -> list[str]:
    """List the texts of judged queries."""
    return [labels.queries[query].text for query in labels.qrels]


def pool_of(corpus: Corpus, encoder: Encoder, pairs: Labels, tested: dict[str, Labels]) -> Corpus:
    """Return the right documents, the near ones, and those of pairs."""
    vectors, place = encoder.encode(list(corpus.texts())), {id_: n for n, id_ in enumerate(corpus.ids)}
    kept = {place[each.document_id] for labels in (pairs, *tested.values()) for each in labels.qrels.judgments()}
    for labels in tested.values():
        kept.update(nearest(encoder.encode(texts_of(labels), "query"), vectors, NEAR)[0].ravel().tolist())
    return corpus.only(np.array(sorted(kept)))


def main(argv: Sequence[str] | None = None) -> None:
    """Train and measure the systems in turn."""
    parser = command_line("labels", __doc__ or "", seeds=1, parts=True)
    parser.add_argument("--splits", type=names, default=["test"])
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--queries", type=int, default=300, help="of each split, drawn at random")
    parser.add_argument("--systems", type=names, default=["given", "mnrl", "tuned"], help=", ".join(SYSTEMS))
    arguments = parser.parse_args(argv)
    folder, settings = part_of(arguments.folder, arguments), parsed_settings(arguments.set)
    labels, corpus = Dataset.load(folder, "train").labels, Dataset.load(folder, arguments.splits[0]).corpus
    tested = {split: Dataset.load(folder, split).labels for split in arguments.splits}
    order = np.random.default_rng(1)
    tested = {
        split: each.only(order.permutation(list(each.qrels))[: arguments.queries].tolist())
        for split, each in tested.items()
    }
    for seed in range(arguments.seeds):
        pairs = drawn(labels, arguments.pairs, seed)
        pool = pool_of(corpus, load(arguments.encoder), pairs, tested)
        study = Study(arguments.encoder, pool, pairs, tested, settings, seed)
        for system in arguments.systems:
            start = time.process_time()
            several = study.run(system)
            row = {"system": system, "seed": seed, "seconds": round(time.process_time() - start, 1)}
            for trained in several:
                row["map"] = trained.encoder.query_map is not None
                print(json.dumps(row | study.measure(trained)), flush=True)
