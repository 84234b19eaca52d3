"""The losses once more, in the plainest way: loops over explicit logits, to check the vectorised ones against."""

import math

import torch
import torch.nn.functional as F

E1, E2 = [1.0, 0.0], [0.0, 1.0]


def unit(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=generator, dtype=dtype), dim=-1)


def softmax_loss(right, *others):
    """−log(e^right / Σ e^…), in the plainest way."""
    return -math.log(math.exp(right) / (math.exp(right) + sum(math.exp(other) for other in others)))


def bools(rows):
    return torch.tensor(rows, dtype=torch.bool)


def loop_bidirectional(queries, documents, sampled, tau, forbidden_batch, forbidden_sampled):
    """App. A, term by term: a list of logits each time, the positive first."""
    total = 0.0
    for i in range(len(queries)):
        logits = [queries[i] @ documents[i] / tau]
        logits += [
            queries[i] @ documents[j] / tau for j in range(len(documents)) if j != i and not forbidden_batch[i, j]
        ]
        logits += [queries[i] @ sampled[i, s] / tau for s in range(sampled.shape[1]) if not forbidden_sampled[i, s]]
        total = total + F.cross_entropy(torch.stack(logits)[None], torch.tensor([0]))
        logits = [queries[i] @ documents[i] / tau]
        logits += [queries[j] @ documents[i] / tau for j in range(len(queries)) if j != i and not forbidden_batch[j, i]]
        total = total + F.cross_entropy(torch.stack(logits)[None], torch.tensor([0]))
    return total / len(queries)


def loop_level(queries, centroids, node, parent, tau):
    """Eq. 5 for one query after another, with the accuracy counted by hand."""
    total, right = 0.0, 0
    for query, mine in zip(queries, node.tolist(), strict=True):
        family = [k for k in range(len(parent)) if parent[k] == parent[mine]]
        logits = torch.stack([query @ F.normalize(centroids[k], dim=0) / tau for k in family])
        total = total + F.cross_entropy(logits[None], torch.tensor([family.index(mine)]))
        right += family[int(logits.argmax())] == mine
    return total / len(queries), right / len(queries)
