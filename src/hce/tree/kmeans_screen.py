"""Assigning every row to its nearest of all centroids for less than all products, and exactly."""

import numpy as np
import torch

from hce.tree.kmeans_steps import TIE, Rows, assign, own_scores, run_all, scores, take_rows

_WIDTHS = (32, 48, 64, 96, 128, 192, 256)  # dimensions that the bound of a product may use
_FEW = 32  # a row with more centroids than this within its bound is scored against all
_SLACK = 4e-6  # float noise of a bound
_TILE = 4096  # centroids bounded at a time


def assign_screened(rows: Rows, centroids: torch.Tensor, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What `assign` returns given present labels, for less: a bound on few dimensions rules most centroids out.

    In the eigenbasis of the centroids, split after `width` dimensions into a head and a tail, a product is at most
    head . head + |tail| |tail| (Cauchy-Schwarz). A centroid whose bound is below a row's present score cannot win
    that row. The bounds of all pairs are one product over width + 1 columns instead of n.
    """
    basis = torch.linalg.eigh(centroids.double().T @ centroids.double()).eigenvectors.flip(1).T.float().contiguous()
    rotated = scores(centroids, basis)
    width = _screen_width(rows, centroids, labels, basis, rotated)
    if width is None:
        return assign(rows, centroids, labels)
    heads = _heads(rotated, width)
    new, best = np.zeros_like(labels), np.zeros(len(rows), dtype=np.float32)
    crowded = np.zeros(len(rows), dtype=bool)

    def one_chunk(limits: tuple[int, int]) -> None:
        part = slice(*limits)
        block = rows.span(*limits)
        present = torch.from_numpy(labels[part]).to(block.device)
        own = own_scores(block, centroids, present)
        row, column, many = _possible(_heads(scores(block, basis), width), heads, own)
        crowded[part] = many.cpu().numpy()
        value = own_scores(take_rows(block, row), centroids, column)
        top = own.scatter_reduce(0, row, value, "amax")
        winner = torch.full_like(present, len(centroids)).scatter_reduce(
            0, row, torch.where(value == top[row], column, len(centroids)), "amin"
        )
        moves = top > own + TIE
        new[part] = torch.where(moves, winner, present).cpu().numpy()
        best[part] = torch.where(moves, top, own).cpu().numpy()

    run_all(one_chunk, rows.chunks(_TILE), rows.device, new, best, crowded)
    rest = np.flatnonzero(crowded)
    if len(rest):
        new[rest], best[rest] = assign(rows.subset(rest), centroids, labels[rest])
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
    for start in range(0, len(others), _TILE):
        row, column = _above(scores(heads, others[start : start + _TILE]), floor)
        count += torch.bincount(row, minlength=len(heads))
        floor = floor.masked_fill(count > _FEW, torch.inf)  # such a row is looked at no further
        found.append(torch.stack([row, column + start])[:, count[row] <= _FEW])
    rows, columns = torch.cat(found, dim=1)
    crowded = count > _FEW
    listed = ~crowded[rows]
    return rows[listed], columns[listed], crowded


def _above(block: torch.Tensor, floor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of each entry above its row's floor."""
    if block.device.type == "cpu":  # several times faster than torch's
        flat = torch.from_numpy(np.flatnonzero(block.numpy() > floor.numpy()[:, None]))
        return flat // block.shape[1], flat % block.shape[1]
    pairs = (block > floor[:, None]).nonzero()
    return pairs[:, 0], pairs[:, 1]


def _screen_width(
    rows: Rows, centroids: torch.Tensor, labels: np.ndarray, basis: torch.Tensor, rotated: torch.Tensor
) -> int | None:
    """The number of dimensions that makes the bound cheapest on a sample of rows; None where none beats no bound."""
    sample = np.unique(np.linspace(0, len(rows) - 1, 256).astype(np.int64))
    block = rows.take(sample)
    own = own_scores(block, centroids, torch.from_numpy(labels[sample]).to(block.device))
    rotated_block = scores(block, basis)
    costs: dict[int | None, float] = {None: 0.9}  # of plain products, 1; but selecting pairs has a cost too
    for width in _WIDTHS:
        if width < rows.shape[1]:
            crowded = _possible(_heads(rotated_block, width), _heads(rotated, width), own)[2]
            costs[width] = (width + 1) / rows.shape[1] + float(crowded.float().mean())
    return min(costs, key=costs.__getitem__)
