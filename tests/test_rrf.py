"""Reciprocal rank fusion, on numbers worked out by hand."""

from __future__ import annotations

import pytest

from hce.comparison.rrf import ReciprocalRanks, fused_by_rank
from hce.evaluation.runs import Scored


class Fixed:
    """A searcher that always finds the same."""

    def __init__(self, *ids: str) -> None:
        self.ids = ids

    def search(self, queries, k):
        return [[Scored(each, 1.0) for each in self.ids[:k]] for _ in queries]


def test_sums_of_reciprocal_ranks_by_hand():
    fused = fused_by_rank([[Scored("a", 3), Scored("b", 2), Scored("c", 1)], [Scored("c", 9), Scored("d", 8)]])
    assert [hit.id for hit in fused] == ["c", "a", "b", "d"]  # b and d tie at 1/62
    assert [hit.score for hit in fused] == pytest.approx([1 / 63 + 1 / 61, 1 / 61, 1 / 62, 1 / 62])


def test_a_document_that_both_find_is_ahead_of_what_one_finds_first():
    found = ReciprocalRanks((Fixed("a", "b"), Fixed("c", "b"))).search(["x", "y"], 2)
    assert [[hit.id for hit in hits] for hits in found] == [["b", "a"], ["b", "a"]]
