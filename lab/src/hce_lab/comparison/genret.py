"""GenRet (Sun et al. 2023): learned identifiers, which one network writes for documents and for queries.

Weiwei Sun, Lingyong Yan, Zheng Chen, Shuaiqiang Wang, Haichao Zhu, Pengjie Ren, Zhumin Chen, Dawei Yin, Maarten de
Rijke and Zhaochun Ren, "Learning to Tokenize for Generative Retrieval", NeurIPS 2023. One network reads a text, a query
or a document, and each step t has a codebook E_t of K rows:

    d_t = Dec(Enc(d), z_<t)        Q(z_t = j | z_<t, d) = softmax_j(d_t · E_t)        P(z_t | z_<t, q) likewise of q_t

Identifiers are learned step by step. At step T, earlier symbols are fixed. A document's symbol z_T is the likeliest one
under the constraint that a batch uses all symbols equally often (Sinkhorn). The loss is the sum of three:

    L_Rec = −log exp(z_T · sg(d_T)) / Σ_{d* ∈ S} exp(z_T · sg(d*_T))                             (reconstruction)
    L_Com = −Σ_{t ≤ T} log Q(z_t | z_<t, d)                                                      (commitment)
    L_Ret = −log exp(q_T · d_T) / Σ_{d* ∈ B} exp(q_T · d*_T) − Σ_{t ≤ T} log P(z_t | z_<t, q)    (retrieval)

In L_Rec, z_T is the symbol's row of E_T and passes its gradient on to d_T; sg stops the gradient. B is the batch, and S
has its documents with the same symbols before T; batches are grouped by these symbols. First, training uses only the
losses of retrieval and of earlier steps. Then balanced k-means of all d_T initializes codebook T. At the end of a step,
each document gets its final symbol. Documents with the same earlier symbols use all symbols equally often; if they are
no more than the symbols, each gets a different one.

Documents that still share an identifier then get further symbols, which number them in order. Last, the network is
trained to write the fixed identifiers. The authors' program has the same order. Here, inner products of states are
divided by the square root of their width. The budget is that of every other system: half for learning identifiers (a
third of it before the codebooks), half for the last training.

Other differences: The authors' program assigns the likeliest symbol without balancing, and uses Sinkhorn only within a
batch, with a smaller factor. It weights L_Rec by 0.1 and the rest by 0.5; the paper has no weights, as here. Their
k-means is Euclidean, here it is spherical. In the last training, they train only the last codebook.

The authors have K = 512 and M = 3 steps for the 109,739 documents of NQ320K, so that K² ≈ 2.4 N; for other collections
they vary M. Here K is the power of two nearest to √(2.4 N), from 8 to 512 and at most N, and M is always 3.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from hce.data.corpus import Corpus
from hce.errors import FormatError
from hce.files import read_json, write_json
from hce.progress import progress_bar
from hce.training.losses import scores_of
from hce.tree.kmeans import spherical_kmeans
from hce_lab.comparison.generative import Alphabet, IdNetwork, sequence_losses
from hce_lab.comparison.generative_training import (
    Budget,
    Examples,
    Prepared,
    Stream,
    built,
    identifier_losses,
    joined_examples,
    searcher_of,
)
from hce_lab.comparison.identifiers import NONE, padded
from hce_lab.comparison.task import Built, Task

STEPS = 3  # M
MOST_CODES, LEAST_CODES = 512, 8  # K
FULL = 512**2 / 109_739  # K² per document, unless K is at a bound
SHARPNESS = 20.0  # factor of the scores before balancing, after scaling them to −1 … 1
BALANCING_ROUNDS = 100
KMEANS_ROUNDS = 10
POOL = 8  # batches whose examples are regrouped by their documents' symbols
STARTING_SHARE = 1 / 3
FINAL_SHARE = 1 / 2
DOCUMENTS_AT_ONCE = 64
BALANCED_AT_ONCE = 1 << 14  # documents; more of them are balanced in random parts


def codebook_size(documents: int) -> int:
    """Return K for a number of documents.

    >>> [codebook_size(documents) for documents in (3, 200, 5_000, 109_739, 10_000_000)]
    [3, 16, 128, 512, 512]
    """
    wanted = 2 ** round(math.log2(math.sqrt(FULL * max(1, documents))))
    return min(documents, max(LEAST_CODES, min(MOST_CODES, wanted)))


# -------------------------------------------------------------------------------------------------- balanced symbols


def sinkhorn(scores: Tensor, rounds: int = BALANCING_ROUNDS) -> Tensor:
    """Scale exp(scores) so that rows sum to 1 and columns to B / K (Sinkhorn).

    Args:
        scores: of shape (B, K).
        rounds: how often columns and then rows are normalized; so the sums of rows are exact.
    """
    plan = scores.double()
    wanted = math.log(scores.shape[0] / scores.shape[1])
    for _ in range(rounds):
        plan = plan - plan.logsumexp(dim=0, keepdim=True) + wanted
        plan = plan - plan.logsumexp(dim=1, keepdim=True)
    return plan.exp()


def balanced(scores: Tensor) -> Tensor:
    """Assign a symbol to each row of scores (B, K), all symbols equally often; (B,)."""
    middle = (scores.max() + scores.min()) / 2
    reach = (scores.max() - middle).clamp(min=1e-6)
    return sinkhorn(SHARPNESS * (scores - middle) / reach).argmax(dim=1)


def different(scores: Tensor) -> Tensor:
    """Assign different symbols to rows of scores (B, K), B ≤ K, with the best sum; (B,)."""
    rows, symbols = linear_sum_assignment(scores.cpu().numpy(), maximize=True)
    return torch.from_numpy(symbols[np.argsort(rows)]).to(scores.device)


def balanced_kmeans(rows: Tensor, k: int, *, seed: int) -> Tensor:
    """Cluster rows (N, n) into k clusters of similar sizes; return their means (k, n)."""
    centres = torch.from_numpy(spherical_kmeans(rows, k, seed=seed).centroids).to(rows)
    for _ in range(KMEANS_ROUNDS):
        symbols = balanced(F.normalize(rows, dim=1) @ F.normalize(centres, dim=1).T)
        means, sizes = group_means(rows, symbols, k)
        centres = torch.where(sizes[:, None] > 0, means, centres)
    return centres


def group_means(rows: Tensor, group: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return the mean row of each group, (groups, n), and the groups' sizes."""
    sizes = torch.bincount(group, minlength=groups)
    sums = torch.zeros(groups, rows.shape[1], device=rows.device, dtype=rows.dtype).index_add_(0, group, rows)
    return sums / sizes.clamp(min=1)[:, None], sizes


def without_means(rows: Tensor, group: Tensor) -> Tensor:
    """Shift the rows (N, n) of each group, so that its mean becomes that of all rows."""
    means, _ = group_means(rows, group, int(group.max()) + 1)
    return rows - means[group] + rows.mean(0)


# ------------------------------------------------------------------------------------------------------------- losses


def among(queries: Tensor, documents: Tensor, right: Tensor, allowed: Tensor) -> Tensor:
    """Return −log softmax of the right document's q · d / √n among allowed ones, (B,).

    Args:
        queries: of shape (B, n).
        documents: of shape (U, n).
        right: the index of the right document, of shape (B,).
        allowed: True where a document counts, the right one always, of shape (B, U).
    """
    scores = scores_of(queries, documents, math.sqrt(queries.shape[1])).masked_fill(~allowed, -torch.inf)
    return F.cross_entropy(scores, right, reduction="none")


def reconstruction(rows: Tensor, states: Tensor, allowed: Tensor) -> Tensor:
    """Return L_Rec of each document, of shape (U,).

    Args:
        rows: the codebook's rows for the documents' symbols, of shape (U, n).
        states: d_T, of shape (U, n).
        allowed: True where another document has the same symbols before T, of shape (U, U).
    """
    fixed = states.detach()
    width = math.sqrt(states.shape[1])
    through = rows * width + states - fixed  # rows belong to unscaled states, and `among` divides by the width
    return among(through, fixed, torch.arange(len(states), device=states.device), allowed)


def tokenisation_losses(
    network: IdNetwork, corpus: Corpus, codes: np.ndarray, *, quantised: bool
) -> Callable[[Examples], Tensor]:
    """Return a function that computes examples' losses in the step after `codes`.

    Args:
        network: the network to train.
        corpus: the documents.
        codes: the symbols before the step, of shape (documents, T − 1).
        quantised: whether the step has a codebook; without one, its symbols have no loss.
    """
    table = torch.from_numpy(codes).to(network.device)
    step = codes.shape[1]

    def losses(examples: Examples) -> Tensor:
        positions, which = np.unique(examples.positions, return_inverse=True)
        of = torch.from_numpy(which.reshape(-1)).to(network.device)  # row of each example's document within the batch
        before = table[torch.from_numpy(positions).to(network.device)]  # (U, T − 1)
        texts = [corpus[position].full_text for position in positions.tolist()]
        documents = network.states(network.read(texts), before[:, None])[:, 0]  # (U, T, n)
        queries = network.states(network.read(examples.texts), before[of][:, None])[:, 0]  # (B, T, n)
        alike = (before[:, None] == before).all(dim=2)  # (U, U)
        loss = among(queries[:, -1], documents[:, -1], of, torch.ones_like(alike[of]))
        symbols = before
        if quantised:
            chosen = balanced(network.logits(documents[:, -1], step, before).detach())
            symbols = torch.cat([before, chosen[:, None]], dim=1)
            rows = network.head[network.alphabet.at(step)][chosen]
            loss = loss + reconstruction(rows, documents[:, -1], alike)[of]
        if symbols.shape[1]:
            loss = loss + _symbol_losses(network, documents, symbols)[of]
            loss = loss + _symbol_losses(network, queries, symbols[of])
        return loss

    return losses


def _symbol_losses(network: IdNetwork, states: Tensor, symbols: Tensor) -> Tensor:
    """Sum −log p over symbols (B, t), given states (B, T, n) with T ≥ t."""
    logits = [network.logits(states[:, step], step, symbols[:, :step]) for step in range(symbols.shape[1])]
    return sequence_losses(logits, symbols)


# ------------------------------------------------------------------------------------------------------------ batches


@dataclass(frozen=True)
class GroupedStream:
    """Another stream's examples, regrouped so that a batch has few groups of documents.

    Attributes:
        stream: the source of examples.
        group: the group of each document, of shape (documents,).
        seed: the seed for the order of groups, and of examples in a group.
    """

    stream: Stream
    group: np.ndarray
    seed: int

    def from_step(self, step: int) -> Iterator[Examples]:
        """See `Stream`."""
        first, done = divmod(step, POOL)
        batches = self.stream.from_step(first * POOL)
        for number in count(first):
            yield from islice(self._regrouped(joined_examples(list(islice(batches, POOL))), number), done, None)
            done = 0

    def _regrouped(self, pool: Examples, number: int) -> Iterator[Examples]:
        rng = np.random.default_rng([self.seed, 4, number])
        rank = rng.permutation(int(self.group.max()) + 1)[self.group[pool.positions]]
        order = np.lexsort((rng.random(len(rank)), rank))
        for rows in np.array_split(order, POOL):
            yield Examples([pool.texts[row] for row in rows.tolist()], pool.positions[rows], pool.weights[rows])


def groups_of(codes: np.ndarray) -> np.ndarray:
    """Number the groups of documents with equal symbols so far (documents, t)."""
    if not codes.shape[1]:
        return np.zeros(len(codes), dtype=np.int64)
    return np.unique(codes, axis=0, return_inverse=True)[1].reshape(-1)


# -------------------------------------------------------------------------------------------------------- identifiers


def numbered(codes: np.ndarray, size: int) -> np.ndarray:
    """Append digits from 0 to K − 1 that number documents with equal symbols, in order.

    >>> numbered(np.array([[1, 2], [0, 0], [1, 2]]), 8).tolist()
    [[1, 2, 0], [0, 0, -1], [1, 2, 1]]

    Args:
        codes: of shape (documents, steps).
        size: K.

    Returns:
        The identifiers, of shape (documents, more steps), padded with −1.
    """
    group = groups_of(codes)
    sizes = np.bincount(group)
    digits = digits_for(int(sizes.max()), size)
    seen = np.zeros(len(sizes), dtype=np.int64)
    paths = []
    for row, own in zip(codes.tolist(), group.tolist(), strict=True):
        if sizes[own] > 1:
            row += [int(seen[own]) // size**place % size for place in reversed(range(digits))]
        seen[own] += 1
        paths.append(row)
    return padded(paths)


def digits_for(documents: int, size: int) -> int:
    """Return how many digits in base K number these documents; 0 for one document."""
    digits = 0
    while size**digits < documents:
        digits += 1
    return digits


@torch.inference_mode()
def document_states(network: IdNetwork, corpus: Corpus, codes: np.ndarray, *, progress: bool = False) -> Tensor:
    """Compute d_T (documents, n) after the symbols so far (documents, T − 1)."""
    network.eval()
    table = torch.from_numpy(codes).to(network.device)
    found = []
    with progress_bar("reading documents", len(corpus), "documents", show=progress) as advance:
        for start in range(0, len(corpus), DOCUMENTS_AT_ONCE):
            texts = [document.full_text for document in corpus[start : start + DOCUMENTS_AT_ONCE]]
            before = table[start : start + len(texts), None]
            found.append(network.states(network.read(texts), before)[:, 0, -1].float())
            advance(len(texts))
    return torch.cat(found)


def next_symbols(network: IdNetwork, states: Tensor, codes: np.ndarray, *, seed: int) -> np.ndarray:
    """Assign next symbols, balanced among documents with the same symbols so far.

    If such documents are no more than the symbols, each gets a different one: Sinkhorn needs more documents.
    """
    step, group = codes.shape[1], groups_of(codes)
    rng = np.random.default_rng([seed, 5, step])
    symbols = np.empty(len(codes), dtype=np.int64)
    for members in np.split(np.argsort(group, kind="stable"), np.cumsum(np.bincount(group))[:-1]):
        for rows in np.array_split(rng.permutation(members), math.ceil(len(members) / BALANCED_AT_ONCE)):
            chosen = torch.from_numpy(rows).to(states.device)
            with torch.inference_mode():
                scores = network.logits(states[chosen], step, torch.from_numpy(codes[rows]).to(states.device))
            assigned = different(scores) if len(rows) <= scores.shape[1] else balanced(scores)
            symbols[rows] = assigned.cpu().numpy()
    return symbols


# ---------------------------------------------------------------------------------------------------------- the system


@dataclass
class Tokeniser:
    """Learns identifiers, step by step.

    Attributes:
        prepared: the prepared task.
        network: the network to train.
        size: K.
        budget: the number of training steps for each step of an identifier.
        seconds: the training time so far.
        steps: the number of training steps so far.
    """

    prepared: Prepared
    network: IdNetwork
    size: int
    budget: int
    seconds: float = 0.0
    steps: int = 0

    def learn(self) -> np.ndarray:
        """Return the symbols of all documents, of shape (documents, M)."""
        codes = np.empty((len(self.prepared.task.corpus), 0), dtype=np.int64)
        for step in range(STEPS):
            codes = np.concatenate([codes, self._learn_step(step, codes)[:, None]], axis=1)
        return codes

    def _learn_step(self, step: int, codes: np.ndarray) -> np.ndarray:
        starting = max(1, round(STARTING_SHARE * self.budget))
        place = self.prepared.task.folder and self.prepared.task.folder / f"genret-{step + 1}-symbols.json"
        with learning_alone(self.network, self.network.alphabet.at(step)):
            self._train(f"genret-{step + 1}-start", codes, starting, quantised=False)
            if not (place and place.is_file()):  # otherwise the next training is finished, and has its codebook
                self._start_codebook(step, codes)
            self._train(f"genret-{step + 1}", codes, max(1, self.budget - starting), quantised=True)
        return self._symbols(codes) if place is None else self._kept_symbols(place, codes)

    def _train(self, name: str, codes: np.ndarray, steps: int, *, quantised: bool) -> None:
        prepared = self.prepared
        losses = tokenisation_losses(self.network, prepared.task.corpus, codes, quantised=quantised)
        stream = GroupedStream(prepared.stream, groups_of(codes), prepared.recipe.seed)
        done = prepared.fit(self.network, losses, name, stream=stream, budget=Budget(1, steps))
        self.seconds += done.seconds
        self.steps += done.step

    def _start_codebook(self, step: int, codes: np.ndarray) -> None:
        """Initialize a codebook by clustering states, less the mean of earlier symbols."""
        seed = self.prepared.recipe.seed
        rows = without_means(self._states(codes), torch.from_numpy(groups_of(codes)).to(self.network.device))
        drawn = np.random.default_rng([seed, 6, step]).permutation(len(rows))[:BALANCED_AT_ONCE]
        centres = balanced_kmeans(rows[torch.from_numpy(drawn).to(rows.device)], self.size, seed=seed)
        with torch.no_grad():
            self.network.head[self.network.alphabet.at(step)] = centres / math.sqrt(self.network.width)

    def _states(self, codes: np.ndarray) -> Tensor:
        return document_states(self.network, self.prepared.task.corpus, codes, progress=self.prepared.task.progress)

    def _symbols(self, codes: np.ndarray) -> np.ndarray:
        return next_symbols(self.network, self._states(codes), codes, seed=self.prepared.recipe.seed)

    def _kept_symbols(self, path: Path, codes: np.ndarray) -> np.ndarray:
        """Return the symbols saved by an earlier process of this run, or compute and save them.

        Raises:
            FormatError: the saved file is damaged.
        """
        if not path.is_file():
            write_json(path, {"symbols": self._symbols(codes).tolist()})
        symbols = np.asarray(read_json(path).get("symbols"))
        if symbols.shape != (len(codes),) or symbols.dtype != np.int64:
            raise FormatError(f"{path}: damaged (not a symbol for each document); delete its folder and train anew")
        return symbols


@contextmanager
def learning_alone(network: IdNetwork, rows: slice) -> Iterator[None]:
    """Train only some rows of a network's head in this block."""
    learning = torch.zeros(len(network.head), 1, device=network.device)
    learning[rows] = 1
    handle = network.head.register_hook(lambda gradient: gradient * learning)
    try:
        yield
    finally:
        handle.remove()


def build_genret(task: Task) -> Built:
    """Train GenRet: learn identifiers, then learn to write them for queries."""
    start = time.perf_counter()
    prepared = Prepared.of(task)
    documents = len(task.corpus)
    size = max(2, codebook_size(documents))
    network = prepared.network(Alphabet(size, STEPS + digits_for(documents, size), by_step=True))
    total, epochs = prepared.budget.total, math.ceil(prepared.budget.epochs / 2)
    final = Budget(epochs, max(1, round(FINAL_SHARE * total / epochs)))
    tokeniser = Tokeniser(prepared, network, size, max(2, (total - final.total) // STEPS))
    codes = tokeniser.learn()
    identifiers = numbered(codes, size)
    searcher = searcher_of(network, task.corpus.ids, identifiers)
    indexing = time.perf_counter() - start - tokeniser.seconds
    losses = identifier_losses(network, identifiers)
    done = prepared.fit(network, losses, "genret", budget=final, searcher=searcher)
    done.seconds += tokeniser.seconds
    done.step += tokeniser.steps
    shared = int((identifiers[:, STEPS:] != NONE).any(axis=1).sum())
    return built(searcher, done, max(0.0, indexing), symbols=size, steps_of_an_id=STEPS, shared_ids=shared)
