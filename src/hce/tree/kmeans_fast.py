"""Spherical k-means for many clusters: below the N x k x n products a round of the exact algorithm.

1. Start: cluster a sample into about sqrt(k) cells, then each cell's rows into its share of the k clusters.
2. Refine: near clusters form groups; a group's rows are scored against the centroids nearest to the group, in one
   product. Rows with a nearer centroid move together (Alg. 2's step). Then rows move one by one where the total
   rises although the nearest centroid is their own: a row pulls its own centroid towards itself, which in clusters
   of 8 keeps it there for no good reason (Hartigan's rule: every optimum under it is one under Alg. 2, not the other
   way round).
3. Finish: every row against every centroid, with the products that cannot win ruled out by a bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from hce.tree.rows import (
    TIE,
    Rows,
    as_arrays,
    assign,
    chunk_ranges,
    end_to_end,
    entries_above,
    fill_empty,
    member_sums,
    normalised,
    own_scores,
    row_argmax,
    run_all,
    scores,
    take_rows,
)

_GROUP = 32  # clusters in a group
_NEAR = 512  # centroids that a group's rows are scored against
_LITTLE = 1e-2  # a round that closes less than this part of the gap to a mean cosine of 1 is the last
_MIN_GAIN = 1e-5  # a single move has to raise the summed cosine by this much, far above float noise
_MAX_WISHES = 2**17  # single moves considered in a round: their rows are held in memory

_WIDTHS = (32, 48, 64, 96, 128, 192, 256)  # dimensions that the bound of a product may use
_FEW = 32  # a row with more centroids than this within its bound is scored against all
_SLACK = 4e-6  # float noise of a bound
_SCREENED = 4096  # centroids bounded at a time


@dataclass
class _State:
    """A clustering in the making; the sums are float64, so that thousands of single moves do not drift."""

    assignment: np.ndarray  # (N,)
    sums: torch.Tensor  # (k, n) float64
    centroids: torch.Tensor  # (k, n) float32, the sums' directions
    lengths: torch.Tensor  # (k,) float32, the sums' lengths; they add up to the summed cosine
    sizes: np.ndarray  # (k,) rows in each


class _Moves(NamedTuple):
    """The best move of each row: where to, what the summed cosine gains by it, and if the target is nearer than now."""

    target: np.ndarray  # (N,) int64
    gain: np.ndarray  # (N,) float32
    nearer: np.ndarray  # (N,) bool


def fast_kmeans(
    rows: Rows, k: int, rng: np.random.Generator, max_rounds: int, report: Callable[[int, float], None]
) -> tuple[np.ndarray, np.ndarray, tuple[float, ...], bool]:
    """Return centroids, assignment, the objective after each round and at the end, and if the rounds converged.

    No step lowers the objective: see `_refine` for a round; the last assignment moves rows to nearer centroids only.
    """
    state = _state_of(rows, _two_level_start(rows, k, rng), k)
    objective: list[float] = []
    converged = False
    while not converged and len(objective) < max_rounds:
        state = _refine(rows, state, *_group_clusters(state.centroids, rng))
        objective.append(float(state.lengths.sum(dtype=torch.float64)) / len(rows))
        report(len(objective), objective[-1])
        little = max(_LITTLE * (1 - objective[-1]), TIE)
        converged = len(objective) > 1 and objective[-1] - objective[-2] <= little
    state = _state_of(rows, state.assignment, k)
    assignment, best = _assign_screened(rows, state.centroids, state.assignment)
    fill_empty(rows, state.centroids, assignment, best)
    objective.append(float(best.mean(dtype=np.float64)))
    return state.centroids.cpu().numpy(), assignment, tuple(objective), converged


def _state_of(rows: Rows, assignment: np.ndarray, k: int) -> _State:
    sums = member_sums(rows, assignment, k)
    return _State(
        assignment,
        sums,
        normalised(sums, rows, assignment),
        sums.norm(dim=1).float(),
        np.bincount(assignment, minlength=k),
    )


# --- start ---
def _two_level_start(rows: Rows, k: int, rng: np.random.Generator) -> np.ndarray:
    """Assign each row by a two-level clustering, all k clusters non-empty."""
    cells = round(k**0.5)
    sample = np.sort(rng.choice(len(rows), size=min(len(rows), 64 * cells), replace=False))
    centres = _lloyd(rows.subset(sample), cells, 8, rng)[0]
    cell_of, _ = assign(rows, centres)
    sizes = np.bincount(cell_of, minlength=cells)
    order = np.argsort(cell_of, kind="stable")
    shares = _shares(sizes, k)
    begin, first = np.cumsum(sizes) - sizes, np.cumsum(shares) - shares
    generators = rng.spawn(cells)  # one a cell: cells are clustered side by side, in any order

    def one_cell(cell: int) -> np.ndarray:
        members = order[begin[cell] : begin[cell] + sizes[cell]]
        return first[cell] + _lloyd(rows.subset(members), int(shares[cell]), 4, generators[cell])[1]

    return _scattered(np.concatenate(run_all(one_cell, np.flatnonzero(sizes).tolist(), rows.device)), order)


def _scattered(values: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Put each value at its place, where every place is named once."""
    result = np.empty_like(values)
    result[places] = values
    return result


def _shares(sizes: np.ndarray, k: int) -> np.ndarray:
    """Clusters for each cell: one each, the rest in proportion to its rows, never more than it has rows."""
    filled = (sizes > 0).astype(np.int64)
    spare = sizes - filled
    quota, remainder = np.divmod(spare * (k - filled.sum()), max(1, spare.sum()))
    shares = filled + quota
    shares[np.argsort(-remainder, kind="stable")[: k - shares.sum()]] += 1
    return shares


def _lloyd(rows: Rows, k: int, rounds: int, rng: np.random.Generator) -> tuple[torch.Tensor, np.ndarray]:
    """Run a few rounds of Alg. 2 from k of the rows: centroids, and an assignment that leaves no cluster empty."""
    centroids = rows.take(np.sort(rng.choice(len(rows), size=k, replace=False)))
    for _ in range(rounds):
        assignment, best = assign(rows, centroids)
        fill_empty(rows, centroids, assignment, best)
        centroids = normalised(member_sums(rows, assignment, k), rows, assignment)
    return centroids, assignment


# --- refinement ---
def _group_clusters(centroids: torch.Tensor, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Each cluster's group, of shape (k,), and each group's nearest centroids, of shape (groups, near)."""
    k = len(centroids)
    count = max(1, k // _GROUP)
    centres, group_of = _lloyd(Rows(centroids), count, 2, rng)

    def one_chunk(limits: tuple[int, int]) -> np.ndarray:
        block = scores(centres[slice(*limits)], centroids)
        return block.topk(min(_NEAR, k), dim=1, sorted=False).indices.cpu().numpy()

    return group_of, np.concatenate(run_all(one_chunk, chunk_ranges(count, k), centroids.device))


def _refine(rows: Rows, state: _State, group_of: np.ndarray, near: np.ndarray) -> _State:
    """One round: find each row's best other cluster, move the rows that are nearer to it, then settle the rest."""
    target, gain, nearer = _propose(rows, state, group_of, near)
    assignment = _keep_one_in_each(state.assignment, np.where(nearer, target, state.assignment), len(state.sums))
    state = _state_of(rows, assignment, len(state.sums))
    wishes = np.flatnonzero(~nearer & (gain > _MIN_GAIN) & (target != assignment))
    wishes = wishes[np.argsort(-gain[wishes], kind="stable")][:_MAX_WISHES]
    _settle(rows, state, wishes, target[wishes])
    return state


def _keep_one_in_each(old: np.ndarray, new: np.ndarray, k: int) -> np.ndarray:
    """Return `new`, but with the first member of each cluster that all would leave still in it, as in `old`.

    The total still rises: who stays loses nothing. A row that stays may be the only one that another cluster was to
    get, so this repeats; a cluster that has kept a row keeps it, so it ends.
    """
    kept = new.copy()
    while (deserted := np.bincount(kept, minlength=k) == 0).any():
        members = np.flatnonzero(deserted[old])
        stays = members[np.unique(old[members], return_index=True)[1]]
        kept[stays] = old[stays]
    return kept


def _propose(rows: Rows, state: _State, group_of: np.ndarray, near: np.ndarray) -> _Moves:
    """Find each row's best move among its group's centroids."""
    row_group = group_of[state.assignment]
    order = np.argsort(row_group, kind="stable")
    bounds = np.searchsorted(row_group[order], np.arange(len(near) + 1)).tolist()
    pieces = [
        (group, order[begin + start : begin + stop])
        for group, (begin, end) in enumerate(pairwise(bounds))
        for start, stop in chunk_ranges(end - begin, near.shape[1])
    ]

    def one_piece(piece: tuple[int, np.ndarray]) -> _Moves:
        group, members = piece
        return _best_moves(rows.take(members), state.assignment[members], state, near[group])

    return _Moves(*(_scattered(column, order) for column in end_to_end(run_all(one_piece, pieces, rows.device))))


def _best_moves(block: torch.Tensor, assignment: np.ndarray, state: _State, columns: np.ndarray) -> _Moves:
    """For rows of one group: the candidate that gains most, its gain net of leaving, and if it is nearer than now."""
    candidates = torch.from_numpy(columns).to(block.device)
    own_cluster = torch.from_numpy(assignment).to(block.device)
    cosines = scores(block, take_rows(state.centroids, candidates))  # (rows, near)
    own = own_scores(block, state.centroids, own_cluster)
    lengths = state.lengths[candidates]
    # |s + x| - |s| in place, rough but good enough to choose by; a row's own cluster is no move.
    ranking = (cosines * (2 * lengths)).add_(lengths**2 + 1).sqrt_().sub_(lengths)
    ranking.masked_fill_(own_cluster[:, None] == candidates, -2)
    column, _ = row_argmax(ranking)
    cosine = cosines.gather(1, column[:, None])[:, 0]
    gain = _joining(cosine, lengths[column]) - _leaving(own, state.lengths[own_cluster])
    nearer = (cosine > own + TIE) & (candidates[column] != own_cluster)
    return _Moves(*as_arrays(candidates[column], gain, nearer))


def _joining(cosine: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """|s + x| - |s|: what a row x adds to the summed cosine of a cluster of sum s (as a fraction: no cancellation)."""
    added = 2 * length * cosine + 1  # |s + x|^2 - |s|^2
    return added / ((length**2 + added).clamp_min(0).sqrt() + length)


def _leaving(cosine: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """|s| - |s - x|: what a member x takes away from the summed cosine of a cluster of sum s."""
    taken = 2 * length * cosine - 1  # |s|^2 - |s - x|^2
    return taken / (length + (length**2 - taken).clamp_min(0).sqrt())


def _settle(rows: Rows, state: _State, wishes: np.ndarray, target: np.ndarray) -> None:
    """Move rows one by one where that raises the total, in place.

    Moves that share no cluster leave each other's gains as they are, so each pass makes a set of such moves, best
    first, and then measures the remaining ones anew: every move made is a true gain. The last row of a cluster stays:
    it would lose a cosine of 1, which nothing can outweigh.
    """
    block, made = rows.take(wishes), 0
    source, waiting = state.assignment[wishes], np.arange(len(wishes))
    while len(waiting := waiting[state.sizes[source[waiting]] > 1]):
        gain = _gains(block, waiting, state, source, target)
        waiting, gain = waiting[gain > _MIN_GAIN], gain[gain > _MIN_GAIN]
        moves = _disjoint(waiting[np.argsort(-gain, kind="stable")], source, target, len(state.sums))
        _move(state, take_rows(block, torch.from_numpy(moves).to(block.device)), source[moves], target[moves])
        state.assignment[wishes[moves]] = target[moves]
        made += len(moves)
        waiting = np.setdiff1d(waiting, moves)
        if len(moves) <= 0.02 * made:  # the few left over are found again next round
            return


def _gains(
    block: torch.Tensor, waiting: np.ndarray, state: _State, source: np.ndarray, target: np.ndarray
) -> np.ndarray:
    """What each waiting move would now add to the summed cosine."""

    def one_chunk(limits: tuple[int, int]) -> np.ndarray:
        index = waiting[slice(*limits)]
        moving = take_rows(block, torch.from_numpy(index).to(block.device))
        old, new = (torch.from_numpy(side[index]).to(block.device) for side in (source, target))
        joining = _joining(own_scores(moving, state.centroids, new), state.lengths[new])
        leaving = _leaving(own_scores(moving, state.centroids, old), state.lengths[old])
        return (joining - leaving).cpu().numpy()

    return np.concatenate(run_all(one_chunk, chunk_ranges(len(waiting), 8 * block.shape[1]), block.device))


def _move(state: _State, moving: torch.Tensor, source: np.ndarray, target: np.ndarray) -> None:
    """Carry rows from cluster to cluster, no cluster taking part in two moves."""
    old, new = (torch.from_numpy(side).to(moving.device) for side in (source, target))
    state.sums[old] -= moving
    state.sums[new] += moving
    state.sizes[source] -= 1
    state.sizes[target] += 1
    touched = torch.cat([old, new])
    sums = state.sums[touched]
    lengths = sums.norm(dim=1)
    state.lengths[touched] = lengths.float()
    state.centroids[touched] = (sums / lengths.clamp_min(1e-12)[:, None]).float()


def _disjoint(moves: np.ndarray, source: np.ndarray, target: np.ndarray, k: int) -> np.ndarray:
    """Of moves in order of preference, those that share no cluster with one taken before."""
    used = np.zeros(k, dtype=bool)
    taken = []
    for _ in range(4):  # four sweeps find nearly all; the others wait for the next pass
        moves = moves[~(used[source[moves]] | used[target[moves]])]
        turn = np.arange(len(moves))
        first = np.full(k, len(moves))
        np.minimum.at(first, source[moves], turn)
        np.minimum.at(first, target[moves], turn)
        free = moves[(first[source[moves]] == turn) & (first[target[moves]] == turn)]
        used[source[free]] = used[target[free]] = True
        taken.append(free)
    return np.concatenate(taken)


# --- last assignment ---
def _assign_screened(rows: Rows, centroids: torch.Tensor, assignment: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what `assign` does given the present assignment, for less: a bound rules most centroids out.

    In the eigenbasis of the centroids, split after `width` dimensions into a head and a tail, a product is at most
    head . head + |tail| |tail| (Cauchy-Schwarz). A centroid whose bound is below a row's present score cannot win
    that row. The bounds of all pairs are one product over width + 1 columns instead of n.
    """
    basis = torch.linalg.eigh(centroids.double().T @ centroids.double()).eigenvectors.flip(1).T.float().contiguous()
    rotated = scores(centroids, basis)
    width = _screen_width(rows, centroids, assignment, basis, rotated)
    if width is None:
        return assign(rows, centroids, assignment)
    heads = _heads(rotated, width)

    def one_chunk(limits: tuple[int, int]) -> tuple[np.ndarray, ...]:
        block = rows.span(*limits)
        present = torch.from_numpy(assignment[slice(*limits)]).to(block.device)
        own = own_scores(block, centroids, present)
        row, column, many = _possible(_heads(scores(block, basis), width), heads, own)
        value = own_scores(take_rows(block, row), centroids, column)
        top = own.scatter_reduce(0, row, value, "amax")
        winner = torch.full_like(present, len(centroids)).scatter_reduce(
            0, row, torch.where(value == top[row], column, len(centroids)), "amin"
        )
        moves = top > own + TIE
        return as_arrays(torch.where(moves, winner, present), torch.where(moves, top, own), many)

    new, best, crowded = end_to_end(run_all(one_chunk, rows.chunks(_SCREENED), rows.device))
    rest = np.flatnonzero(crowded)
    if len(rest):
        new[rest], best[rest] = assign(rows.subset(rest), centroids, assignment[rest])
    return new, best


def _heads(rotated: torch.Tensor, width: int) -> torch.Tensor:
    """The first `width` coordinates and the length of what they leave out: (rows, width + 1)."""
    return torch.cat([rotated[:, :width], rotated[:, width:].norm(dim=1, keepdim=True)], dim=1)


def _possible(
    heads: torch.Tensor, others: torch.Tensor, own: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs (row, centroid) whose bound reaches the row's present score, and which rows have too many to list."""
    floor = own - _SLACK
    count = torch.zeros(len(heads), dtype=torch.int64, device=heads.device)
    found = []
    for start in range(0, len(others), _SCREENED):
        row, column = entries_above(scores(heads, others[start : start + _SCREENED]), floor)
        count += torch.bincount(row, minlength=len(heads))
        floor = floor.masked_fill(count > _FEW, torch.inf)  # such a row is looked at no further
        found.append(torch.stack([row, column + start])[:, count[row] <= _FEW])
    rows, columns = torch.cat(found, dim=1)
    crowded = count > _FEW
    listed = ~crowded[rows]
    return rows[listed], columns[listed], crowded


def _screen_width(
    rows: Rows, centroids: torch.Tensor, assignment: np.ndarray, basis: torch.Tensor, rotated: torch.Tensor
) -> int | None:
    """The number of dimensions that makes the bound cheapest on a sample of rows; None where none beats no bound."""
    sample = np.unique(np.linspace(0, len(rows) - 1, 256).astype(np.int64))
    block = rows.take(sample)
    own = own_scores(block, centroids, torch.from_numpy(assignment[sample]).to(block.device))
    rotated_block = scores(block, basis)
    costs: dict[int | None, float] = {None: 0.9}  # of plain products, 1; but selecting pairs has a cost too
    for width in _WIDTHS:
        if width < rows.shape[1]:
            crowded = _possible(_heads(rotated_block, width), _heads(rotated, width), own)[2]
            costs[width] = (width + 1) / rows.shape[1] + float(crowded.float().mean())
    return min(costs, key=costs.__getitem__)
