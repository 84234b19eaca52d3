"""A linear map that moves a transformer's queries toward the documents that answer them. The paper has none.

The map is learned from labels. The encoder and the document vectors stay unchanged, so learning takes seconds and
nothing is encoded again. Each query is contrasted with all documents of a pool (Eq. 1). The map may overfit to the
documents that labels name. So held-out labels choose the strength of the map: the smallest that is not clearly worse
than the best (docs/LOG.md).
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hce.encoding.encoder import Encoder
from hce.encoding.tables import mapped_rows
from hce.processes import take_weights_of_the_first
from hce.search.engine import nearest
from hce.training.losses import known_positives
from hce.training.pairs import CUTOFF, DevSet, LabeledPairs, ndcg_of_rankings, padded_rows, with_random_others

logger = logging.getLogger(__name__)

LEAST_LABELS = 400  # labeled queries; with 180, only 20 are held out, and chance decides (docs/LOG.md)
MOST_QUERIES, PAIRS_OF_A_QUERY = 20_000, 4
POOL = 8192  # documents that queries are contrasted with; more if labels name more
EPOCHS, MOST_STEPS, BATCH = 10, 4000, 64
RATE, TEMPERATURE, SHRINKAGE = 1e-3, 0.05, 0.02
STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
CLEAR = 1.0  # standard errors; the gain that a larger strength needs


class Examples(NamedTuple):
    """The data that a map of queries is learned from."""

    queries: Tensor  # unit vectors, of shape (B, n), one per pair
    answers: Tensor  # the row of each query's document in the pool, of shape (B,)
    known: Tensor  # rows of each query's known positives, padded with −1, of shape (B, P)
    pool: Tensor  # unit vectors of documents, of shape (G, n)


def with_query_map(encoder: Encoder, vectors: np.ndarray, pairs: LabeledPairs, devset: DevSet, seed: int) -> Encoder:
    """Give a transformer a map of its queries, if held-out queries clearly gain."""
    if len(pairs.texts) < LEAST_LABELS:
        return encoder
    learned = fit_query_map(examples_of(encoder, vectors, pairs, seed), seed)
    (asked,) = devset.panel
    queries, documents = encoder.encode(asked.texts, "query"), np.asarray(vectors[devset.pool])

    def ndcg(strength: float) -> np.ndarray:
        moved = mapped_rows(queries, np.float32(strength) * learned)
        return ndcg_of_rankings(nearest(moved, documents, CUTOFF)[0], asked.answers)

    strength = least_of_the_best({each: ndcg(each) for each in STRENGTHS})
    chosen = torch.from_numpy(np.float32(strength) * learned)
    take_weights_of_the_first([chosen])
    logger.info("queries are moved by %g of the map learned from %d labeled ones", strength, len(pairs.texts))
    return encoder.with_query_map(chosen.numpy()) if chosen.any() else encoder


def examples_of(encoder: Encoder, vectors: np.ndarray, pairs: LabeledPairs, seed: int) -> Examples:
    """Encode some labeled queries, and choose the pool that they are contrasted with."""
    rng = np.random.default_rng([seed, 19])
    order = rng.permutation(len(pairs.pairs))
    queries = pairs.pairs[order, 0]
    ranks = np.empty(len(order), dtype=np.int64)  # of each pair among its query's pairs
    by_query = np.argsort(queries, kind="stable")
    starts = np.searchsorted(queries[by_query], queries[by_query])
    ranks[by_query] = np.arange(len(order)) - starts
    some = rng.permutation(len(pairs.texts))[:MOST_QUERIES]
    chosen = pairs.pairs[order[(ranks < PAIRS_OF_A_QUERY) & np.isin(queries, some)]]
    asked, row_of_query = np.unique(chosen[:, 0], return_inverse=True)
    right = [pairs.positives[query] for query in asked.tolist()]
    pool = with_random_others(len(vectors), np.unique(np.concatenate(right)), POOL, [seed, 23])
    known = padded_rows([np.searchsorted(pool, positions) for positions in right])
    encoded = encoder.encode([pairs.texts[query] for query in asked.tolist()], "query")
    arrays = (encoded[row_of_query], np.searchsorted(pool, chosen[:, 1]), known[row_of_query], vectors[pool])
    return Examples(*(torch.from_numpy(np.asarray(array)).to(encoder.device) for array in arrays))


def fit_query_map(examples: Examples, seed: int) -> np.ndarray:
    """Learn the map that moves queries, of shape (n, n + 1); see `mapped_rows`."""
    width, count = examples.queries.shape[1], len(examples.queries)
    learned = torch.nn.Parameter(torch.zeros(width, width + 1, device=examples.queries.device))
    optimizer = torch.optim.AdamW([learned], lr=RATE, weight_decay=0.0)
    steps = min(MOST_STEPS, max(1, EPOCHS * count // BATCH))
    rng = np.random.default_rng([seed, 29])
    turns = -(-steps * BATCH // count)
    order = torch.from_numpy(np.concatenate([rng.permutation(count) for _ in range(turns)])).to(learned.device)
    for step, batch in enumerate(order.split(BATCH)[:steps]):
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, 10 * (step + 1) / steps, (steps - step) / (0.9 * steps))
        optimizer.zero_grad()
        (_map_loss(learned, examples, batch) + SHRINKAGE * learned[:, :-1].square().sum()).backward()
        optimizer.step()
    return np.asarray(learned.detach().cpu().numpy())


def _map_loss(learned: Tensor, examples: Examples, batch: Tensor) -> Tensor:
    queries, answers = examples.queries[batch], examples.answers[batch]
    moved = F.normalize(queries + queries @ learned[:, :-1].T + learned[:, -1], dim=1)
    everyone = torch.arange(len(examples.pool), device=batch.device)
    forbidden = known_positives(examples.known[batch], everyone) & (everyone != answers[:, None])
    scores = moved @ examples.pool.T / TEMPERATURE  # (B, G)
    return F.cross_entropy(scores.masked_fill(forbidden, -torch.inf), answers)


def least_of_the_best(ndcg: dict[float, np.ndarray]) -> float:
    """Return the smallest strength that is not clearly worse than the best."""
    best = max(ndcg, key=lambda strength: ndcg[strength].mean())
    behind = {strength: ndcg[best] - values for strength, values in ndcg.items()}
    return min(strength for strength, each in behind.items() if each.mean() <= CLEAR * each.std() / np.sqrt(len(each)))
