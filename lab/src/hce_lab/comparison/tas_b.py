"""TAS-B (Hofstätter et al. 2021): batches of queries about one topic, so that in-batch negatives are hard.

Queries are clustered once, by their vectors before training. Each turn puts the topics in another order, and cuts the
sequence into batches: a batch has one topic, or the end of one and the beginning of the next. So each pair comes once
per turn; the authors draw a topic for each batch instead. This is the paper's topic-aware sampling. Its other half,
balanced margins and distillation from two teachers, needs a cross-encoder and is left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from hce.encoding.encoder import Encoder
from hce.training.co_training import co_train
from hce.training.pairs import Batch, LabeledPairs, Sources, batch_count, in_batches, labeled_devset
from hce.tree.kmeans import spherical_kmeans
from hce_lab.comparison.task import Built, Task, trained_system


class TopicBatches:
    """Labeled pairs in batches of one or a few topics; each pair comes once per turn.

    Args:
        pairs: the pairs.
        topics: the topic of each query of the pairs, of shape (queries,), int64.
        seed: same seed, same batches.
    """

    def __init__(self, pairs: LabeledPairs, topics: np.ndarray, *, seed: int = 0) -> None:
        self.pairs = pairs
        self.topics = topics[pairs.pairs[:, 0]]  # (pairs,)
        self.seed = seed

    def __len__(self) -> int:
        return len(self.pairs)

    def batches(self, turn: int, size: int, first: int = 0) -> Iterator[Batch]:
        """See `PairSource`; yield the topics in the turn's own order, cut into batches."""
        rng = np.random.default_rng([self.seed, turn])
        place_of_topic = rng.permutation(self.topics.max() + 1)
        order = np.lexsort((rng.random(len(self)), place_of_topic[self.topics]))
        batches = in_batches(order, size)
        for index in rng.permutation(len(batches))[first:].tolist():
            yield self.pairs.batch_of(batches[index])


def by_topic(pairs: LabeledPairs, encoder: Encoder, batch_size: int, seed: int) -> TopicBatches:
    """Cluster the queries into as many topics as batches."""
    vectors = encoder.encode(pairs.texts, "query")
    count = min(len(vectors), batch_count(len(pairs), batch_size))
    return TopicBatches(pairs, spherical_kmeans(vectors, count, seed=seed).assignment, seed=seed)


def build_tas_b(task: Task) -> Built:
    """Train as DPR does, on topic-aware batches."""
    pairs, dev = task.labeled
    recipe = replace(task.recipe, mode="supervised", tree=False, negatives="none")
    devset = labeled_devset(task.corpus, *dev, recipe.dev_pool, recipe.seed)
    encoder = task.start_encoder(devset)
    start = time.perf_counter()
    topical = by_topic(LabeledPairs(task.corpus, *pairs), encoder, recipe.batch_size, recipe.seed)
    seconds = time.perf_counter() - start
    with encoder.remembering_tokens():
        ndcg = devset.ndcg(encoder)
        trained = co_train(
            *(task.corpus, encoder, Sources(topical), devset, recipe), ndcg_before=ndcg, progress=task.progress
        )
    facts = {"metric": devset.metric_name, "before": trained.before, "after": trained.after}
    built = trained_system(trained, task.corpus, {"mode": recipe.mode, **facts})
    return built._replace(training_seconds=built.training_seconds + seconds)
