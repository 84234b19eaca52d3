"""The equations on vectors worked out by hand, by finite differences, and against cross-entropy on explicit logits."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_losses import E1, E2, bools, loop_bidirectional, loop_level, unit
from torch.autograd import gradcheck

from hce.errors import InputError
from hce.training.losses import (
    BatchLevel,
    InBatch,
    Sampled,
    Siblings,
    _cheaper_route,
    bidirectional,
    contrastive,
    hce_loss,
    level_loss,
)

# --- contrastive (Eq. 1)


def test_contrastive_by_hand():
    # scores 2 against 1 and 0: −log(e² / (e² + e + 1)) = log(1 + e⁻¹ + e⁻²) = log 1.503215 = 0.407606
    # scores 0 against 0 and 0: log 3 = 1.098612
    loss = contrastive(torch.tensor([2.0, 0.0]), torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    torch.testing.assert_close(loss, torch.tensor([0.407606, 1.098612]), rtol=0, atol=1e-6)


def test_contrastive_masked_by_hand():
    # without the 1: log(1 + e⁻²) = 0.126928; with nothing left: 0, whatever the masked scores are
    positive = torch.tensor([2.0, 2.0], requires_grad=True)
    negatives = torch.tensor([[1.0, 0.0], [torch.inf, 5.0]], requires_grad=True)
    loss = contrastive(positive, negatives, bools([[1, 0], [1, 1]]))
    torch.testing.assert_close(loss.detach(), torch.tensor([0.126928, 0.0]), rtol=0, atol=1e-6)
    loss.sum().backward()
    assert negatives.grad[0, 0] == 0
    assert negatives.grad[1].tolist() == [0, 0]
    assert positive.grad[1] == 0
    # d/d positive = −(1 − softmax) = −e⁻²/(1 + e⁻²) = −0.119203
    assert positive.grad[0].item() == pytest.approx(-0.119203, abs=1e-6)


def test_contrastive_keeps_small_losses():
    # log(1 + e^−10) = 4.53989e−5. As logsumexp − positive in float32 at 100, it would be a multiple of 7.6e−6.
    loss = contrastive(torch.tensor([100.0]), torch.tensor([[90.0]]))
    assert loss.item() == pytest.approx(4.53989e-5, abs=1.2e-7)


@settings(max_examples=50, deadline=None)
@given(batch=st.integers(1, 5), count=st.integers(0, 6), seed=st.integers(0, 10_000))
def test_contrastive_is_cross_entropy(batch, count, seed):
    generator = torch.Generator().manual_seed(seed)
    positive = 20 * torch.randn(batch, generator=generator, dtype=torch.float64)
    negatives = 20 * torch.randn(batch, count, generator=generator, dtype=torch.float64)
    forbidden = torch.rand(batch, count, generator=generator) < 0.4
    loss = contrastive(positive, negatives, forbidden)
    for b in range(batch):
        kept = [positive[b]] + [negatives[b, k] for k in range(count) if not forbidden[b, k]]
        expected = F.cross_entropy(torch.stack(kept)[None], torch.tensor([0]))
        torch.testing.assert_close(loss[b], expected, rtol=1e-9, atol=1e-9)


# --- bidirectional (App. A)


def test_bidirectional_by_hand():
    # q = e1, e2; d = e1, (0.6, 0.8); τ = 1. Scores q·d: [[1, 0.6], [0, 0.8]].
    # q→d: −log e¹/(e¹+e^.6) = log(1 + e^−.4) = 0.513015;   q2: log(1 + e^−.8) = 0.371101
    # d→q: d1 has 1, 0:   log(1 + e^−1) = 0.313262;   d2 has 0.6 (q1), 0.8 (q2): log(1 + e^−.2) = 0.598139
    # mean of (0.513015 + 0.313262) and (0.371101 + 0.598139) = 0.897758
    queries, documents = torch.tensor([E1, E2]), torch.tensor([E1, [0.6, 0.8]])
    loss = bidirectional(queries, documents, temperature=1.0)
    assert loss.item() == pytest.approx(0.897758, abs=2e-6)
    # a sampled e2 for q1 (score 0) and e1 for q2 (score 0), in q→d only:
    # q1: −log e¹/(e¹ + e^.6 + e⁰) = log(1 + e^−.4 + e^−1) = log 2.038199; q2: log(1 + e^−.8 + e^−.8) = log 1.898658
    sampled = torch.tensor([[E2], [E1]])
    expected = (math.log(2.038199) + 0.313262 + math.log(1.898658) + 0.598139) / 2
    loss = bidirectional(queries, documents, sampled, temperature=1.0)
    assert loss.item() == pytest.approx(expected, abs=2e-6)


def test_temperature_divides_the_scores():
    # One pair of orthogonal pairs: score 1 against 0, four times log(1 + e^(−1/τ)) over 2.
    loss = bidirectional(torch.eye(2), torch.eye(2), temperature=0.5)
    assert loss.item() == pytest.approx(2 * math.log(1 + math.exp(-2)), abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(batch=st.integers(1, 5), samples=st.integers(0, 3), seed=st.integers(0, 10_000))
def test_bidirectional_is_the_loop(batch, samples, seed):
    queries, documents = unit(batch, 4, seed=seed), unit(batch, 4, seed=seed + 1)
    sampled = unit(batch, samples, 4, seed=seed + 2)
    generator = torch.Generator().manual_seed(seed)
    forbidden_batch = torch.rand(batch, batch, generator=generator) < 0.3
    forbidden_sampled = torch.rand(batch, samples, generator=generator) < 0.3
    tensors = [each.requires_grad_() for each in (queries, documents, sampled)]
    loss = bidirectional(
        *tensors, temperature=0.1, forbidden_batch=forbidden_batch, forbidden_sampled=forbidden_sampled
    )
    expected = loop_bidirectional(*tensors, 0.1, forbidden_batch, forbidden_sampled)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    wanted = torch.autograd.grad(expected, tensors, materialize_grads=True)
    for ours, theirs in zip(torch.autograd.grad(loss, tensors), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_bidirectional_gradcheck():
    inputs = [unit(3, 4, seed=s).requires_grad_() for s in range(2)] + [unit(3, 2, 4, seed=2).requires_grad_()]
    forbidden = bools([[0, 1, 0], [0, 0, 0], [1, 0, 0]])
    assert gradcheck(lambda q, d, s: bidirectional(q, d, s, temperature=0.3, forbidden_batch=forbidden), inputs)


def test_processes_together_have_the_loss_of_the_whole_batch():
    queries, documents = unit(6, 4, seed=1), unit(6, 4, seed=2)
    sampled = unit(6, 2, 4, seed=3)
    forbidden = torch.rand(6, 6, generator=torch.Generator().manual_seed(0)) < 0.3
    forbidden_sampled = torch.rand(6, 2, generator=torch.Generator().manual_seed(1)) < 0.3
    whole = bidirectional(
        queries, documents, sampled, temperature=0.1, forbidden_batch=forbidden, forbidden_sampled=forbidden_sampled
    )
    shards = [torch.arange(0, 3), torch.arange(3, 6)]
    parts = [
        bidirectional(
            queries[mine],
            documents,
            sampled[mine],
            temperature=0.1,
            own_row=mine,
            all_queries=queries,
            forbidden_batch=forbidden[mine],
            forbidden_queries=forbidden.T[mine],
            forbidden_sampled=forbidden_sampled[mine],
        )
        for mine in shards
    ]
    assert parts[0] != parts[1]
    torch.testing.assert_close(torch.stack(parts).mean(), whole)


def test_more_documents_than_queries():
    # Rows 0 and 2 of the documents are positives, row 1 is nobody's: in q→d it is a negative, in d→q it is absent.
    queries, documents = unit(2, 4, seed=1), unit(3, 4, seed=2)
    own_row = torch.tensor([0, 2])
    loss = bidirectional(queries, documents, temperature=0.1, own_row=own_row)
    own = documents[own_row]
    expected = bidirectional(queries, own, documents[1].expand(2, 1, 4), temperature=0.1)
    torch.testing.assert_close(loss, expected)


def test_bidirectional_refuses_what_it_cannot_pair():
    with pytest.raises(InputError, match="2 queries and 3 documents"):
        bidirectional(torch.eye(3)[:2], torch.eye(3), temperature=1.0)
    with pytest.raises(InputError, match="both masks"):
        bidirectional(
            torch.eye(2),
            torch.eye(2),
            temperature=1.0,
            all_queries=torch.eye(2),
            forbidden_batch=bools([[0, 0], [0, 0]]),
        )
    with pytest.raises(InputError, match="above 0, not 0"):
        bidirectional(torch.eye(2), torch.eye(2), temperature=0.0)


# --- precision


def test_float32_inside_whatever_comes_in():
    # 0.7 and 0.7 + 2⁻⁸ are neighbours in bfloat16 at that size; at τ = 0.01 their gap is 0.39 in the logits, and
    # scores rounded to bfloat16 (steps of 0.5 near 70) could not hold it.
    queries = F.normalize(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)), dim=-1).bfloat16()
    documents = F.normalize(torch.randn(8, 64, generator=torch.Generator().manual_seed(1)), dim=-1).bfloat16()
    exact = bidirectional(queries.double(), documents.double(), temperature=0.01)
    loss = bidirectional(queries, documents, temperature=0.01)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = bidirectional(queries.float(), documents.float(), documents.float()[:, None], temperature=0.01)
    exact = bidirectional(queries.double(), documents.double(), documents.double()[:, None], temperature=0.01)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-5)


def test_float64_stays():
    assert bidirectional(unit(2, 3), unit(2, 3), temperature=1.0).dtype == torch.float64


# --- levels (Eq. 5)

PARENT = torch.tensor([1, 0, 1, 0, 2, 0])  # children: 0 → 1, 3, 5; 1 → 0, 2; 2 → 4 alone


def test_siblings_are_packed_by_parent():
    siblings = Siblings.of(PARENT)
    assert siblings.order.tolist() == [1, 3, 5, 0, 2, 4]
    assert siblings.start.tolist() == [0, 3, 5, 6]


@pytest.mark.parametrize("route", ["full", "gather"])
def test_level_by_hand(route):
    # Level of three nodes: 0 and 1 under one parent, 2 alone. Centroids 2·e1, 3·e2, −e1: normalised e1, e2, −e1.
    # q0 = (0.6, 0.8), node 0: scores 0.6 against 0.8 → log(1 + e^(0.2/0.5)) = log(1 + e^.4) = 0.913015, wrong
    # q1 = e2, node 1: 1 against 0 → log(1 + e^−2) = 0.126928, right
    # q2 = e1, node 2, an only child: 0, right by default.   Mean 1.039943 / 3 = 0.346648; two of three are right.
    queries = torch.tensor([[0.6, 0.8], E2, E1], requires_grad=True)
    centroids = torch.tensor([[2.0, 0.0], [0.0, 3.0], [-1.0, 0.0]], requires_grad=True)
    siblings = Siblings.of(torch.tensor([0, 0, 1]))
    term = level_loss(queries, centroids, torch.tensor([0, 1, 2]), siblings, temperature=0.5, route=route)
    assert term.loss.item() == pytest.approx(0.346648, abs=1e-6)
    assert term.accuracy.item() == pytest.approx(2 / 3)
    term.loss.backward()
    assert queries.grad[2].tolist() == [0, 0]
    assert centroids.grad[2].tolist() == [0, 0]
    # A normalised centroid has no gradient along itself.
    assert (centroids.grad * centroids.detach()).sum(dim=1).abs().max() < 1e-6
    assert centroids.grad[:2].abs().max() > 0.01


@pytest.mark.parametrize("route", ["full", "gather"])
def test_only_children_alone(route):
    queries = unit(2, 3).requires_grad_()
    centroids = unit(2, 3, seed=1).requires_grad_()
    term = level_loss(
        queries, centroids, torch.tensor([0, 1]), Siblings.of(torch.tensor([0, 1])), temperature=0.01, route=route
    )
    term.loss.backward()
    assert term.loss.item() == 0
    assert term.accuracy.item() == 1
    assert not queries.grad.any()
    assert not centroids.grad.any()


@pytest.mark.parametrize("route", ["full", "gather"])
def test_a_tie_is_not_accurate(route):
    term = level_loss(
        torch.tensor([E1]),
        torch.tensor([E2, E2]),
        torch.tensor([1]),
        Siblings.of(torch.tensor([0, 0])),
        temperature=1.0,
        route=route,
    )
    assert term.accuracy.item() == 0
    assert term.loss.item() == pytest.approx(math.log(2), abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(parents=st.integers(1, 4), nodes=st.integers(1, 9), batch=st.integers(1, 6), seed=st.integers(0, 10_000))
def test_both_routes_are_the_loop(parents, nodes, batch, seed):
    generator = torch.Generator().manual_seed(seed)
    parent = torch.randint(parents, (nodes,), generator=generator)
    node = torch.randint(nodes, (batch,), generator=generator)
    queries = unit(batch, 4, seed=seed).requires_grad_()
    centroids = (3 * unit(nodes, 4, seed=seed + 1)).requires_grad_()
    expected, right = loop_level(queries, centroids, node, parent, 0.2)
    wanted = torch.autograd.grad(expected, [queries, centroids], allow_unused=True)
    for route in ("full", "gather"):
        term = level_loss(queries, centroids, node, Siblings.of(parent), temperature=0.2, route=route)
        torch.testing.assert_close(term.loss, expected, rtol=0, atol=1e-9)
        assert term.accuracy.item() == pytest.approx(right)
        for ours, theirs in zip(torch.autograd.grad(term.loss, [queries, centroids]), wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def test_routes_agree_in_float32():
    parent = torch.arange(300) % 7
    node = torch.randint(300, (32,), generator=torch.Generator().manual_seed(0))
    found = []
    for route in ("full", "gather"):
        queries = unit(32, 48, dtype=torch.float32).requires_grad_()
        centroids = unit(300, 48, seed=1, dtype=torch.float32).requires_grad_()
        term = level_loss(queries, centroids, node, Siblings.of(parent), temperature=0.15, route=route)
        term.loss.backward()
        found.append((term.loss, term.accuracy, queries.grad, centroids.grad))
    for full, gathered in zip(*found, strict=True):
        torch.testing.assert_close(full, gathered, rtol=0, atol=1e-6)


@pytest.mark.parametrize("route", ["full", "gather"])
def test_level_gradcheck(route):
    inputs = [unit(4, 3, seed=1).requires_grad_(), (2 * unit(6, 3, seed=2)).requires_grad_()]
    node = torch.tensor([0, 5, 4, 1])
    assert gradcheck(
        lambda q, c: level_loss(q, c, node, Siblings.of(PARENT), temperature=0.3, route=route).loss, inputs
    )


def test_a_zero_centroid_gives_no_nan():
    for route in ("full", "gather"):
        centroids = torch.zeros(2, 3, requires_grad=True)
        term = level_loss(
            unit(1, 3, dtype=torch.float32),
            centroids,
            torch.tensor([0]),
            Siblings.of(torch.tensor([0, 0])),
            temperature=1.0,
            route=route,
        )
        term.loss.backward()
        assert term.loss.isfinite()
        assert centroids.grad.isfinite().all()


def test_the_cheaper_route():
    assert _cheaper_route(256, 64, 384, 64) == "full"  # one parent: everyone is a sibling
    assert _cheaper_route(64, 16384, 384, 32) == "gather"
    assert _cheaper_route(512, 65536, 768, 300) == "gather"  # b = 256, M = 2: 0.5 GB gathered
    assert _cheaper_route(512, 2**20, 768, 4000) == "full"  # lopsided: gathering would take 6 GB


def test_the_cheaper_route_is_taken_and_right():
    parent = torch.arange(4096) // 2
    queries, centroids = unit(3, 8), unit(4096, 8, seed=1)
    node = torch.tensor([0, 17, 4095])
    assert _cheaper_route(3, 4096, 8, 2) == "gather"
    term = level_loss(queries, centroids, node, Siblings.of(parent), temperature=0.2)
    expected, _ = loop_level(queries, centroids, node, parent.tolist(), 0.2)
    torch.testing.assert_close(term.loss, expected)


# --- several right nodes, and the way of the document


@pytest.mark.parametrize("route", ["full", "gather"])
def test_several_right_siblings_by_hand(route):
    # One parent with four nodes e1, e2, −e1, −e2; q = (0.6, 0.8), τ = 1; its document is under node 0, another right
    # one under node 1: −log((e^.6 + e^.8) / (e^.6 + e^.8 + e^−.6 + e^−.8)) = 0.220417. Node 1 scores higher than node
    # 0 and is right too, so the query counts as accurate. Node 7 is a stranger, −1 nobody.
    queries = torch.tensor([[0.6, 0.8]])
    centroids = torch.tensor([E1, E2, [-1.0, 0.0], [0.0, -1.0], *[E1] * 4])
    siblings = Siblings.of(torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]))
    node, right = torch.tensor([0]), torch.tensor([[1, 7, -1, 0]])
    above = math.exp(0.6) + math.exp(0.8)
    expected = -math.log(above / (above + math.exp(-0.6) + math.exp(-0.8)))
    assert expected == pytest.approx(0.220417, abs=1e-6)
    term = level_loss(queries, centroids, node, siblings, temperature=1.0, right=right, route=route)
    assert term.loss.item() == pytest.approx(expected, abs=1e-6)
    assert term.accuracy.item() == 1
    assert level_loss(queries, centroids, node, siblings, temperature=1.0, route=route).accuracy.item() == 0


@settings(max_examples=30, deadline=None)
@given(parents=st.integers(1, 3), nodes=st.integers(1, 9), batch=st.integers(1, 5), seed=st.integers(0, 10_000))
def test_several_right_siblings_are_the_loop(parents, nodes, batch, seed):
    generator = torch.Generator().manual_seed(seed)
    parent = torch.randint(parents, (nodes,), generator=generator)
    node = torch.randint(nodes, (batch,), generator=generator)
    right = torch.randint(-1, nodes, (batch, 3), generator=generator)
    queries, centroids = unit(batch, 4, seed=seed), 3 * unit(nodes, 4, seed=seed + 1)
    losses = []
    for row in range(batch):
        family = [k for k in range(nodes) if parent[k] == parent[node[row]]]
        logits = torch.stack([queries[row] @ F.normalize(centroids[k], dim=0) / 0.2 for k in family])
        known = torch.tensor([k in [int(node[row]), *right[row].tolist()] for k in family])
        losses.append(-(logits.exp()[known].sum() / logits.exp().sum()).log())
    for route in ("full", "gather"):
        term = level_loss(queries, centroids, node, Siblings.of(parent), temperature=0.2, right=right, route=route)
        torch.testing.assert_close(term.loss, torch.stack(losses).mean(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("route", ["full", "gather"])
def test_routing_by_hand(route):
    # Nodes e1 and e2 under one parent, e1 alone under another; τ = 1. d = e1 has the scores (1, 0) and goes p = σ(1) =
    # .731059 to the first; q = e2 has (0, 1), so 1 − p. KL = p·log(p/(1−p)) + (1−p)·log((1−p)/p) = 2p − 1 = .462117.
    queries, documents = torch.tensor([E2, E1]), torch.tensor([E1, E2])
    centroids = torch.tensor([E1, E2, E1])
    siblings = Siblings.of(torch.tensor([0, 0, 1]))
    term = level_loss(
        queries, centroids, torch.tensor([0, 2]), siblings, temperature=1.0, documents=documents, route=route
    )
    assert term.loss.item() == pytest.approx((0.462117 + 0) / 2, abs=1e-6)  # an only child's way is clear


@settings(max_examples=30, deadline=None)
@given(parents=st.integers(1, 3), nodes=st.integers(1, 9), batch=st.integers(1, 5), seed=st.integers(0, 10_000))
def test_routing_is_torchs_divergence_and_at_rest_at_the_document(parents, nodes, batch, seed):
    generator = torch.Generator().manual_seed(seed)
    parent = torch.randint(parents, (nodes,), generator=generator)
    node = torch.randint(nodes, (batch,), generator=generator)
    queries, centroids = unit(batch, 4, seed=seed), 3 * unit(nodes, 4, seed=seed + 1)
    documents = unit(batch, 4, seed=seed + 2)
    losses = []
    for row in range(batch):
        members = F.normalize(centroids[parent == parent[node[row]]], dim=1) / 0.2
        given, target = (members @ queries[row]).log_softmax(0), (members @ documents[row]).log_softmax(0)
        losses.append(F.kl_div(given, target, reduction="sum", log_target=True))
    for route in ("full", "gather"):
        settings = {"temperature": 0.2, "documents": documents.requires_grad_(), "route": route}
        term = level_loss(queries, centroids, node, Siblings.of(parent), **settings)
        torch.testing.assert_close(term.loss, torch.stack(losses).mean(), rtol=0, atol=1e-9)
        at_rest = documents.detach().clone().requires_grad_()
        level_loss(at_rest, centroids, node, Siblings.of(parent), **settings).loss.backward()
        assert at_rest.grad.abs().max() < 1e-9
        assert documents.grad is None  # a target, which the query follows, and not the other way round


def test_eq_5_pulls_towards_the_centroid_where_routing_rests():
    """At q = d, Eq. 5 still moves the query, along the tangent of the sphere, nearer to its centroid."""
    document, centroids = torch.tensor([[0.8, 0.6]]), torch.tensor([E1, E2])
    at, siblings, pulls = torch.tensor([0]), Siblings.of(torch.tensor([0, 0])), {}
    for name, target in (("node", None), ("document", document)):
        query = document.clone().requires_grad_()
        level_loss(query, centroids, at, siblings, temperature=0.15, documents=target).loss.backward()
        pulls[name] = (-query.grad[0] @ centroids[0]).item()
    assert pulls["node"] > 0.1
    assert pulls["document"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("route", ["full", "gather"])
def test_routing_and_several_right_siblings_gradcheck(route):
    inputs = [unit(4, 3, seed=1).requires_grad_(), (2 * unit(6, 3, seed=2)).requires_grad_()]
    node, right = torch.tensor([0, 5, 4, 1]), torch.tensor([[2, -1], [1, 3], [-1, -1], [5, 0]])
    for more in ({"right": right}, {"documents": unit(4, 3, seed=3)}):

        def loss_of(queries, centroids, more=more):
            return level_loss(queries, centroids, node, Siblings.of(PARENT), temperature=0.3, route=route, **more).loss

        if "right" in more:
            assert gradcheck(loss_of, inputs)
        else:  # the target depends on the centroids and passes no gradient to them
            assert gradcheck(lambda queries: loss_of(queries, inputs[1].detach()), inputs[:1])


# --- the whole (Eq. 6)


def two_levels():
    first = BatchLevel(unit(2, 4, seed=5), Siblings.of(torch.tensor([0, 0])), torch.tensor([0, 1, 1]))
    second = BatchLevel(unit(6, 4, seed=6), Siblings.of(PARENT % 2), torch.tensor([1, 0, 2]))
    return first, second


def test_hce_is_the_sum_of_its_terms():
    queries, documents = unit(3, 4, seed=1), unit(3, 4, seed=2)
    samples = [
        Sampled(unit(3, 2, 4, seed=3), bools([[0, 1], [0, 0], [1, 1]])),
        None,
        Sampled(unit(3, 1, 4, seed=4)),
    ]
    forbidden = bools([[0, 1, 0], [0, 0, 0], [0, 0, 0]])
    summands = hce_loss(
        queries,
        documents,
        two_levels(),
        samples,
        temperature=0.1,
        level_temperature=0.3,
        pairing=InBatch(forbidden_batch=forbidden),
    )
    levels = [loop_level(queries, level.centroids, level.node, level.siblings.parent, 0.3) for level in two_levels()]
    nothing = torch.empty(3, 0, 4, dtype=torch.float64), torch.empty(3, 0, dtype=torch.bool)
    last = samples[2].vectors, torch.zeros(3, 1, dtype=torch.bool)
    document = sum(
        loop_bidirectional(queries, documents, vectors, 0.1, forbidden, mask)
        for vectors, mask in [(samples[0].vectors, samples[0].forbidden), nothing, last]
    )
    torch.testing.assert_close(torch.stack(summands.level_losses), torch.stack([loss for loss, _ in levels]))
    assert [accuracy.item() for accuracy in summands.accuracies] == pytest.approx([right for _, right in levels])
    torch.testing.assert_close(summands.document_loss, document)
    torch.testing.assert_close(summands.total, levels[0][0] + levels[1][0] + document)


def test_level_losses_count_by_their_weight_and_may_follow_documents():
    queries, documents = unit(3, 4, seed=1), unit(3, 4, seed=2)

    def terms_of(queries, documents, **settings):
        return hce_loss(queries, documents, two_levels(), temperature=0.1, level_temperature=0.3, **settings)

    full, fifth, none = (terms_of(queries, documents, level_weight=weight) for weight in (1.0, 0.2, 0.0))
    torch.testing.assert_close(fifth.level_losses, full.level_losses)
    torch.testing.assert_close(fifth.total, 0.2 * sum(full.level_losses) + full.document_loss)
    torch.testing.assert_close(none.total, none.document_loss)
    followed = terms_of(queries, documents, level_target="document")
    for level, loss in zip(two_levels(), followed.level_losses, strict=True):
        expected = level_loss(
            queries, level.centroids, level.node, level.siblings, temperature=0.3, documents=documents
        )
        torch.testing.assert_close(loss, expected.loss)
    swapped = torch.tensor([2, 0, 1])  # where each query's document stands
    moved = documents[swapped.argsort()]
    paired = InBatch(own_row=swapped)
    torch.testing.assert_close(
        terms_of(queries, moved, level_target="document", pairing=paired).level_losses, followed.level_losses
    )


def test_queries_in_float64_meet_centroids_in_float32():
    """What a user's double-precision vectors met was a crash."""
    level = BatchLevel(unit(2, 4, dtype=torch.float32), Siblings.of(torch.tensor([0, 0])), torch.tensor([0, 1]))
    for target in ("node", "document"):
        summands = hce_loss(unit(2, 4), unit(2, 4, seed=1), [level], temperature=0.1, level_target=target)
        assert summands.total.dtype == torch.float64


def test_one_temperature_unless_told_otherwise():
    queries, documents = unit(3, 4, seed=1), unit(3, 4, seed=2)
    plain = hce_loss(queries, documents, two_levels(), temperature=0.1)
    same_tau = hce_loss(queries, documents, two_levels(), temperature=0.1, level_temperature=0.1)
    softer = hce_loss(queries, documents, two_levels(), temperature=0.1, level_temperature=0.3)
    assert plain.total == same_tau.total
    assert plain.total != softer.total
    assert plain.document_loss == softer.document_loss


def test_without_levels_it_is_the_document_loss():
    queries, documents = unit(3, 4, seed=1), unit(3, 4, seed=2)
    summands = hce_loss(queries, documents, [], temperature=0.1)
    assert summands.level_losses == ()
    torch.testing.assert_close(summands.total, bidirectional(queries, documents, temperature=0.1))


def test_hce_needs_a_document_term():
    with pytest.raises(InputError, match="sampled is empty"):
        hce_loss(unit(2, 3), unit(2, 3), [], [], temperature=1.0)


def test_hce_gradcheck():
    first, second = two_levels()
    inputs = [
        unit(3, 4, seed=1).requires_grad_(),
        unit(3, 4, seed=2).requires_grad_(),
        first.centroids.requires_grad_(),
        second.centroids.requires_grad_(),
        unit(3, 2, 4, seed=3).requires_grad_(),
    ]

    def total(queries, documents, upper, lower, sampled):
        levels = replace(first, centroids=upper), replace(second, centroids=lower)
        return hce_loss(queries, documents, levels, [Sampled(sampled)], temperature=0.2, level_temperature=0.4).total

    assert gradcheck(total, inputs)
