"""GenRet: balanced symbols, its losses by hand, batches by symbols, and identifiers that are learnt and written."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import random_static_encoder
from hypothesis import given, settings
from hypothesis import strategies as st

from hce.data.corpus import Corpus
from hce.data.judgments import Judgment, Labels, Qrels, Query
from hce.data.text import Document
from hce.errors import FormatError
from hce.evaluation.evaluate import evaluate
from hce.training.recipe import Recipe
from hce_lab.comparison import genret
from hce_lab.comparison.generative import Alphabet
from hce_lab.comparison.generative_training import Examples, Prepared
from hce_lab.comparison.genret import (
    POOL,
    STEPS,
    GroupedStream,
    Tokeniser,
    among,
    balanced,
    balanced_kmeans,
    build_genret,
    codebook_size,
    different,
    digits_for,
    document_states,
    groups_of,
    learning_alone,
    next_symbols,
    numbered,
    reconstruction,
    sinkhorn,
    tokenisation_losses,
    without_means,
)
from hce_lab.comparison.identifiers import Trie
from hce_lab.comparison.systems import SYSTEMS
from hce_lab.comparison.task import Task

TINY = Recipe(train="encoder", epochs=2, epoch_pairs=32, batch_size=8, span_lengths=(4,), fit_static=False)


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("genret") / "encoder"
    random_static_encoder().save(folder)
    return folder


def random_task(encoder_folder, documents: int, recipe: Recipe) -> Task:
    """Documents of 12 words each; for each a query of five of them to learn, and for a few one more, to choose by."""
    rng = np.random.default_rng(0)
    texts = [[f"w{word}" for word in rng.choice(200, size=12, replace=False)] for _ in range(documents)]
    corpus = Corpus.from_documents([Document(f"d{number}", " ".join(text)) for number, text in enumerate(texts)])

    def labels(kind: str, count: int) -> Labels:
        asked = {f"{kind}{n}": " ".join(rng.choice(texts[n], size=5, replace=False)) for n in range(count)}
        judgments = [Judgment(f"{kind}{number}", f"d{number}", 1) for number in range(count)]
        return Labels({name: Query(name, text) for name, text in asked.items()}, Qrels(judgments))

    return Task(corpus, str(encoder_folder), recipe, labels("train", documents), labels("dev", 20))


@pytest.fixture(scope="module")
def small(encoder_folder):
    """A task of 24 documents, with a network that knows nothing."""
    task = random_task(encoder_folder, 24, TINY)
    prepared = Prepared.of(task)
    return prepared, prepared.network(Alphabet(8, STEPS + 2, by_step=True)).eval()


# ---------------------------------------------------------------------------------------------------- balanced symbols


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 12), st.integers(1, 8), st.integers(0, 10**6), st.floats(0.1, 2))
def test_the_marginals_of_a_plan(rows, columns, seed, spread):
    scores = spread * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    plan = sinkhorn(scores, 200)
    np.testing.assert_allclose(plan.sum(1), np.ones(rows), rtol=1e-9)
    np.testing.assert_allclose(plan.sum(0), np.full(columns, rows / columns), rtol=0.01)
    # a plan is exp(scores) times something of its row and something of its column: mixed differences stay
    logs, given = plan.log(), scores.double()
    mixed = [each[1:, 1:] - each[:1, 1:] - each[1:, :1] + each[:1, :1] for each in (logs, given)]
    np.testing.assert_allclose(mixed[0], mixed[1], atol=1e-6)


def test_symbols_are_used_alike_even_where_all_prefer_one():
    torch.manual_seed(0)
    scores = torch.rand(40, 8)
    scores[:, 0] += 3
    assert scores.argmax(1).eq(0).all()
    sizes = torch.bincount(balanced(scores), minlength=8)
    assert sizes.min() >= 3
    assert sizes.max() <= 10


def test_where_scores_are_clear_and_balanced_they_decide():
    assert balanced(torch.eye(6)[[3, 1, 4, 0, 5, 2]]).tolist() == [3, 1, 4, 0, 5, 2]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(0, 10**6))
def test_few_documents_get_different_symbols_the_likeliest_in_all(rows, seed):
    scores = torch.randn(rows, 5, generator=torch.Generator().manual_seed(seed))
    found = different(scores).tolist()
    ways = itertools.permutations(range(5), rows)
    best = max(ways, key=lambda way: sum(float(scores[row, symbol]) for row, symbol in enumerate(way)))
    assert found == list(best)


def test_balanced_kmeans_finds_groups_and_their_means():
    rng = np.random.default_rng(1)
    means = 5 * np.eye(4, 6)
    rows = torch.from_numpy((means.repeat(10, axis=0) + 0.1 * rng.normal(size=(40, 6))).astype(np.float32))
    centres = balanced_kmeans(rows, 4, seed=0)
    order = centres.argmax(1).argsort()
    np.testing.assert_allclose(centres[order], rows.view(4, 10, 6).mean(1), atol=1e-5)


def test_means_of_groups_are_taken_away():
    rows = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 8.0]])
    moved = without_means(rows, torch.tensor([0, 0, 1]))
    mean = torch.tensor([4 / 3, 8 / 3])
    np.testing.assert_allclose(moved, torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]) + mean, rtol=1e-6)


def test_the_size_of_codebooks_follows_the_corpus():
    assert [codebook_size(documents) for documents in (1, 5, 50, 200, 1400, 5183, 20958)] == [1, 5, 8, 16, 64, 128, 256]
    assert codebook_size(109_739) == codebook_size(8_841_823) == 512


# -------------------------------------------------------------------------------------------------------------- losses


def test_among_by_hand():
    queries = torch.tensor([[2.0, 0.0, 0.0, 0.0]])  # n = 4, so that scores are halved
    documents = torch.tensor([[1.0, 0, 0, 0], [3.0, 0, 0, 0], [9.0, 0, 0, 0]])
    allowed = torch.tensor([[True, True, False]])
    loss = among(queries, documents, torch.tensor([0]), allowed)
    assert loss.tolist() == pytest.approx([-math.log(math.e / (math.e + math.e**3))])
    alone = among(queries, documents, torch.tensor([2]), torch.tensor([[False, False, True]]))
    assert alone.tolist() == [0]


def test_reconstruction_by_hand_and_where_its_gradient_goes():
    """z_T · sg(d_T) among the documents; the codebook's row and d_T get the same gradient, the other documents none."""
    rows = torch.tensor([[0.5, 0.0, 0.0, 0.0], [0.0, 0.5, 0.0, 0.0]], requires_grad=True)
    states = torch.tensor([[2.0, 0.0, 0.0, 0.0], [2.0, 2.0, 0.0, 0.0]], requires_grad=True)
    losses = reconstruction(rows, states, torch.ones(2, 2, dtype=torch.bool))
    assert losses.tolist() == pytest.approx([math.log(2), math.log(1 + math.exp(-1))])  # z·d is 1 and 1; 0 and 1
    losses[0].backward()
    # −∂ log softmax: half of d_1 less half of d_0, by the row itself and through it by d_0
    np.testing.assert_allclose(rows.grad, [[0, 1, 0, 0], [0, 0, 0, 0]], atol=1e-6)
    np.testing.assert_allclose(states.grad, [[0, 0.5, 0, 0], [0, 0, 0, 0]], atol=1e-6)  # divided by √n


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("step", [0, 1])
def test_the_loss_is_that_of_the_paper(small, step, quantised):
    """Word for word: one example after the other, one document after the other."""
    prepared, network = small
    corpus = prepared.task.corpus
    codes = np.random.default_rng(3).integers(0, 2, size=(len(corpus), step))
    positions = np.array([3, 5, 3, 8, 9])
    examples = Examples([f"w{place} w7" for place in range(5)], positions, np.ones(5))
    with torch.no_grad():
        found = tokenisation_losses(network, corpus, codes, quantised=quantised)(examples)

        def state(text: str, position: int) -> torch.Tensor:
            return network.states(network.read([text]), torch.from_numpy(codes[None, [position]]))[0, 0]

        distinct = sorted(set(positions.tolist()))
        d = {position: state(corpus[position].full_text, position) for position in distinct}
        books = [network.head[8 * t : 8 * t + 8] for t in range(step + 1)]
        symbol = dict(
            zip(distinct, balanced(torch.stack([books[step] @ d[p][-1] for p in distinct])).tolist(), strict=True)
        )
        for number, (text, position) in enumerate(zip(examples.texts, positions.tolist(), strict=True)):
            q, own = state(text, position), [*codes[position].tolist(), *([symbol[position]] if quantised else [])]
            rivals = [other for other in distinct if codes[other].tolist() == codes[position].tolist()]
            width, right = math.sqrt(network.width), torch.tensor(rivals.index(position))
            batch = torch.stack([q[-1] @ d[other][-1] / width for other in distinct])
            loss = F.cross_entropy(batch, torch.tensor(distinct.index(position)))
            if quantised:
                row = books[step][symbol[position]]
                loss += F.cross_entropy(torch.stack([row @ d[other][-1] for other in rivals]), right)
            for t, code in enumerate(own):
                for states in (q, d[position]):
                    loss -= (books[t] @ states[t]).log_softmax(0)[code]
            assert float(found[number]) == pytest.approx(float(loss), rel=1e-4)


# ------------------------------------------------------------------------------------------------ batches, identifiers


class Counting:
    """A stream of examples that are numbered through."""

    def __init__(self, documents: int) -> None:
        self.documents = documents

    def from_step(self, step):
        while True:
            numbers = np.arange(6 * step, 6 * step + 6)
            yield Examples([str(number) for number in numbers], numbers % self.documents, np.full(6, 1 / 6))
            step += 1


def test_batches_are_of_one_group_and_the_same_from_any_step_on():
    group = np.arange(48) % 4
    stream = GroupedStream(Counting(48), group, seed=1)
    batches = list(islice(stream.from_step(0), 2 * POOL))
    for pool in (0, 1):
        texts = [int(text) for batch in batches[pool * POOL : (pool + 1) * POOL] for text in batch.texts]
        assert sorted(texts) == list(range(pool * 6 * POOL, (pool + 1) * 6 * POOL))
        assert texts != sorted(texts)
    for batch in batches:
        assert [int(text) % 48 for text in batch.texts] == batch.positions.tolist()
        assert len(np.unique(group[batch.positions])) == 1
    for step in (3, POOL, POOL + 2):
        assert [batch.texts for batch in islice(stream.from_step(step), 5)] == [
            batch.texts for batch in batches[step : step + 5]
        ]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=2), min_size=1, max_size=40))
def test_numbered_identifiers_tell_all_documents_apart(codes):
    codes = np.array(codes)
    identifiers = numbered(codes, 3)
    assert len(Trie(identifiers)) == len(codes)  # which refuses identifiers that do not
    assert np.array_equal(identifiers[:, :2], codes)
    assert identifiers.shape[1] <= 2 + digits_for(len(codes), 3)
    assert identifiers.max() < 3
    assert [digits_for(count, 3) for count in (1, 2, 3, 4, 9, 10)] == [0, 1, 1, 2, 2, 3]


def test_next_symbols_are_balanced_among_those_with_the_same_so_far(small, monkeypatch):
    prepared, network = small
    corpus = prepared.task.corpus
    codes = np.repeat([[0], [1]], [16, 8], axis=0)
    states = document_states(network, corpus, codes)
    assert states.shape == (24, network.width)
    for at_once in (99, 8):
        monkeypatch.setattr(genret, "BALANCED_AT_ONCE", at_once)
        symbols = next_symbols(network, states, codes, seed=0)
        for rows in (slice(0, 16), slice(16, 24)):
            assert len(set(symbols[rows].tolist())) >= 5  # of 8
    alone = np.arange(24)[:, None]  # each the only one with its symbols so far
    with torch.inference_mode():
        likeliest = network.logits(states, 1, torch.from_numpy(codes)).argmax(1).tolist()
    assert next_symbols(network, states, alone, seed=0).tolist() == likeliest
    assert any(likeliest)  # 0 is what a plan without any preference would choose
    assert groups_of(codes).tolist() == [0] * 16 + [1] * 8
    assert groups_of(codes[:, :0]).tolist() == [0] * 24


def test_only_the_codebook_of_the_step_learns(small):
    prepared, network = small
    corpus = prepared.task.corpus
    codes = np.zeros((len(corpus), 1), dtype=np.int64)
    examples = Examples(["w1 w2", "w3"], np.array([0, 1]), np.ones(2))
    with learning_alone(network, network.alphabet.at(1)):
        tokenisation_losses(network, corpus, codes, quantised=True)(examples).sum().backward()
    moved = network.head.grad.abs().sum(1).view(-1, 8).sum(1) > 0
    assert moved.tolist() == [False, True, False, False, False]
    network.zero_grad()
    tokenisation_losses(network, corpus, codes, quantised=True)(examples).sum().backward()
    assert (network.head.grad.abs().sum(1).view(-1, 8).sum(1) > 0).tolist() == [True, True, False, False, False]
    network.zero_grad()


# ---------------------------------------------------------------------------------------------------------- the system


def test_it_learns_200_documents_by_heart(encoder_folder, monkeypatch):
    """And of other queries, it finds far more than chance would."""
    monkeypatch.setattr("hce_lab.comparison.generative_training.RATE", 0.01)
    monkeypatch.setattr("hce_lab.comparison.generative.DROPOUT", 0.0)
    recipe = replace(TINY, epochs=2, epoch_pairs=100 * 50, batch_size=50, learning_rate=0.01)
    task = random_task(encoder_folder, 200, recipe)
    built = build_genret(task)
    assert built.facts["symbols"] == 16
    assert built.facts["shared_ids"] <= 20
    assert evaluate(built.searcher, *task.pairs, ["R@1"]).means["R@1"] >= 0.95
    assert evaluate(built.searcher, *task.dev, ["R@10"]).means["R@10"] > 0.3  # chance: 0.05


def test_identifiers_of_documents_that_are_alike_begin_alike(encoder_folder, monkeypatch):
    monkeypatch.setattr("hce_lab.comparison.generative.DROPOUT", 0.0)
    rng = np.random.default_rng(0)
    topics = np.arange(80) % 8
    texts = [[f"w{25 * topic + word}" for word in rng.choice(25, size=12, replace=False)] for topic in topics.tolist()]
    corpus = Corpus.from_documents([Document(f"d{number}", " ".join(text)) for number, text in enumerate(texts)])
    recipe = replace(TINY, epochs=2, epoch_pairs=30 * 16, batch_size=16)
    prepared = Prepared.of(Task(corpus, str(encoder_folder), recipe))
    network = prepared.network(Alphabet(8, STEPS + 2, by_step=True))
    codes = Tokeniser(prepared, network, size=8, budget=20).learn()

    def share_alike(topics: np.ndarray) -> float:
        """Of pairs of documents of one topic, return how many have the same first symbol."""
        same = topics[:, None] == topics
        np.fill_diagonal(same, val=False)
        return float((codes[:, None, 0] == codes[:, 0])[same].mean())

    assert share_alike(topics) > 3 * share_alike(rng.permutation(topics))
    assert np.bincount(codes[:, 0], minlength=8).max() <= 20  # all are used, and none by a quarter


def test_a_killed_run_ends_as_it_would_have(encoder_folder, tmp_path, monkeypatch):
    task = random_task(encoder_folder, 24, TINY)
    whole = build_genret(replace(task, folder=tmp_path / "whole"))
    original, calls = Prepared.fit, []

    def dying(self, network, losses, name, **options):
        calls.append(name)
        if name == "genret-2":
            raise KeyboardInterrupt
        return original(self, network, losses, name, **options)

    monkeypatch.setattr(Prepared, "fit", dying)
    with pytest.raises(KeyboardInterrupt):
        build_genret(replace(task, folder=tmp_path / "killed"))
    assert calls == ["genret-1-start", "genret-1", "genret-2-start", "genret-2"]
    monkeypatch.setattr(Prepared, "fit", original)
    for name in ("next_symbols", "balanced_kmeans"):  # those of the first step are there already
        monkeypatch.setattr(genret, name, at_most(2, getattr(genret, name)))
    again = build_genret(replace(task, folder=tmp_path / "killed"))
    assert np.array_equal(again.searcher.trie.codes, whole.searcher.trie.codes)
    for one, other in zip(again.searcher.network.parameters(), whole.searcher.network.parameters(), strict=True):
        assert torch.equal(one, other)
    (tmp_path / "killed" / "genret-1-symbols.json").write_text('{"symbols": [1]}')
    with pytest.raises(FormatError, match=r"genret-1-symbols.json: damaged .*; delete its folder and train anew"):
        build_genret(replace(task, folder=tmp_path / "killed"))


def at_most(most: int, function):
    """Let a function be called so often and no more."""
    calls = []

    def counted(*arguments, **options):
        calls.append(1)
        assert len(calls) <= most
        return function(*arguments, **options)

    return counted


def test_hce_compare_knows_genret_with_and_without_generated_queries(encoder_folder):
    assert SYSTEMS["genret"].needs is None
    assert SYSTEMS["genret+qg"].needs == "generated"
    task = random_task(encoder_folder, 24, TINY)
    generated = replace(task, pairs=None, dev=None, generated=task.pairs)
    built = SYSTEMS["genret+qg"].build(generated)
    for hits in built.searcher.search(["w1 w2", ""], 5):
        assert len({hit.id for hit in hits}) == 5
    assert built.facts["parameters"] * 4 == built.index_bytes
