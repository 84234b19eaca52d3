"""Masks of false negatives: each kind, in the batch and among the samples."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_losses import E1, E2, softmax_loss, unit

from hce.errors import InputError
from hce.training.losses import (
    ComparedDocuments,
    bidirectional,
    false_negatives,
    known_positives,
    near_duplicates,
)

# --- false negatives


def test_known_positives_by_hand():
    known = torch.tensor([[9, 2, -1], [-1, -1, -1], [5, 5, 0]])
    assert known_positives(known, torch.tensor([2, 9, 5, -1, 0])).tolist() == [
        [1, 1, 0, 0, 0],
        [0, 0, 0, 0, 0],
        [0, 0, 1, 0, 1],
    ]
    assert known_positives(known, torch.tensor([[9, 10], [9, -1], [1, 0]])).tolist() == [[1, 0], [0, 0], [0, 1]]
    assert known_positives(known[:, :0], torch.tensor([2, 9])).tolist() == [[0, 0]] * 3


@settings(max_examples=50, deadline=None)
@given(data=st.data(), batch=st.integers(1, 4), width=st.integers(0, 4), count=st.integers(0, 5))
def test_known_positives_is_membership(data, batch, width, count):
    positions = st.integers(-1, 6)
    known = [[data.draw(positions) for _ in range(width)] for _ in range(batch)]
    candidates = [[data.draw(positions) for _ in range(count)] for _ in range(batch)]
    found = known_positives(
        torch.tensor(known, dtype=torch.long).reshape(batch, width),
        torch.tensor(candidates, dtype=torch.long).reshape(batch, count),
    )
    assert found.tolist() == [[c >= 0 and c in row for c in cs] for row, cs in zip(known, candidates, strict=True)]


def test_near_duplicates_by_hand():
    # (0.6, 0.8)·e2 = 0.8, (0.6, 0.8)·e1 = 0.6; a product equal to the margin (0.5) is still allowed
    own = torch.tensor([[0.6, 0.8], E1])
    assert near_duplicates(own, torch.tensor([E1, E2, [0.5, 0.0]]), 0.7).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert near_duplicates(own, torch.tensor([[E1, E2], [E1, [0.5, 0.0]]]), 0.5).tolist() == [[1, 1], [1, 0]]
    assert not near_duplicates(own.requires_grad_(), own, 0.5).requires_grad


OWN = ComparedDocuments(torch.tensor([10, 11, 12]), torch.tensor([0, 1, 2]), torch.eye(3))
NONE = torch.full((3, 1), -1)


def batch_mask(**change):
    return false_negatives(OWN, replace(OWN, **change.pop("documents", {})), known=change.pop("known", NONE), **change)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, [[1, 0, 0], [0, 1, 0], [0, 0, 1]]),
        # the document of query 0 a second time
        ({"documents": {"positions": torch.tensor([10, 11, 10])}}, [[1, 0, 1], [0, 1, 0], [0, 0, 1]]),
        # query 1 is also answered by document 12
        ({"known": torch.tensor([[-1, -1], [5, 12], [-1, -1]])}, [[1, 0, 0], [0, 1, 1], [0, 0, 1]]),
        # document 12 has the text of document 11
        ({"documents": {"groups": torch.tensor([0, 1, 1])}}, [[1, 0, 0], [0, 1, 1], [0, 0, 1]]),
        # query 1 is also answered by another document, which has the text of document 12
        ({"known_groups": torch.tensor([[-1, -1], [5, 2], [-1, -1]])}, [[1, 0, 0], [0, 1, 1], [0, 0, 1]]),
        # document 12 lies near the positive of query 0
        (
            {"documents": {"vectors": torch.tensor([[1.0, 0, 0], [0, 1, 0], [0.8, 0, 0.6]])}, "margin": 0.7},
            [[1, 0, 1], [0, 1, 0], [0, 0, 1]],
        ),
    ],
    ids=["itself", "same position", "known", "same text", "text of a known one", "near"],
)
def test_each_mask_in_the_batch(arguments, expected):
    assert batch_mask(**arguments).tolist() == expected


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("same position", {}),
        ("known", {"known": torch.tensor([[77], [-1], [-1]])}),
        ("same text", {}),
        ("near", {"margin": 0.7}),
    ],
)
def test_each_mask_among_the_samples(kind, arguments):
    positions = torch.tensor([[50, 51], [52, 53], [54, 55]])
    groups = torch.tensor([[20, 21], [22, 23], [24, 25]])
    vectors = torch.zeros(3, 2, 3)
    if kind == "same position":
        positions[0, 1] = 10
    if kind == "known":
        positions[0, 1], positions[1, 0] = 77, 77  # known to be right for query 0, not for query 1
    if kind == "same text":
        groups[0, 1], groups[1, 0] = 0, 0  # the text of document 10, a positive of query 0 only
    if kind == "near":
        vectors[0, 1], vectors[1, 0] = torch.tensor([0.8, 0.6, 0]), torch.tensor([0.8, 0.6, 0])
    mask = false_negatives(OWN, ComparedDocuments(positions, groups, vectors), **arguments)
    assert mask.tolist() == [[0, 1], [0, 0], [0, 0]]


def test_unknown_groups_mask_nothing():
    unknown = replace(OWN, groups=torch.full((3,), -1))
    assert false_negatives(unknown, unknown).tolist() == torch.eye(3).bool().tolist()


def test_margin_needs_vectors():
    with pytest.raises(InputError, match=r"margin=0\.9 needs the vectors"):
        false_negatives(OWN, ComparedDocuments(OWN.positions), margin=0.9)


def test_two_queries_of_one_document_do_not_oppose_each_other():
    # Queries 0 and 1 share a document. Unmasked, each direction would push a right pair apart. Masked, of the three
    # pairs only (0 | 1) against 2 is left: q0: log(1 + e^(s02 − s00)), and so on.
    queries, shared, other = unit(3, 4, seed=1), unit(1, 4, seed=2)[0], unit(1, 4, seed=3)[0]
    documents = torch.stack([shared, shared, other])
    own = ComparedDocuments(torch.tensor([8, 8, 9]))
    scores = (queries @ documents.T / 0.1).tolist()
    expected = (
        softmax_loss(scores[0][0], scores[0][2])
        + softmax_loss(scores[0][0], scores[2][0])
        + softmax_loss(scores[1][1], scores[1][2])
        + softmax_loss(scores[1][1], scores[2][1])
        + softmax_loss(scores[2][2], scores[2][0], scores[2][1])
        + softmax_loss(scores[2][2], scores[0][2], scores[1][2])
    ) / 3
    loss = bidirectional(queries, documents, temperature=0.1, forbidden_batch=false_negatives(own, own))
    assert loss.item() == pytest.approx(expected, abs=1e-9)


def test_a_known_positive_is_masked_in_both_directions():
    # d1 is also right for q0: q0→d1 is masked, and so is d1→q0, but q1→d0 and d0→q1 are not.
    queries, documents = unit(2, 4, seed=1), unit(2, 4, seed=2)
    own = ComparedDocuments(torch.tensor([0, 1]))
    forbidden = false_negatives(own, own, known=torch.tensor([[0, 1], [1, -1]]))
    scores = (queries @ documents.T / 0.1).tolist()
    expected = (softmax_loss(scores[0][0], scores[1][0]) + softmax_loss(scores[1][1], scores[1][0])) / 2
    loss = bidirectional(queries, documents, temperature=0.1, forbidden_batch=forbidden)
    assert loss.item() == pytest.approx(expected, abs=1e-9)
