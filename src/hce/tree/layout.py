"""A map of a tree: a place in the plane for each node and document. A node's documents share a region.

The nodes of one level are the map's sites. t-SNE places them by the cosines of their centroids, and moves nodes of
different branches apart. Each site owns its Voronoi cell, the part of the plane closest to it; a node above owns the
cells below it. Each document stays in the cell of its site. There UMAP's forces pull it toward its nearest neighbors,
from its own and near leaves, and push it away from others. A document added later is placed among its neighbors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.spatial import Voronoi, cKDTree

from hce.encoding.tables import as_unit_rows
from hce.tree.hierarchy import Hierarchy

MOST_SITES = 4096
PERPLEXITY = 15.0
APART = 0.25  # added to the distance of two sites for each level at which their ancestors differ
ROUNDS = 30  # how often the cells are evened out
RIM = 256  # points around the disc that the cells fill
COAST = 1.5  # distance from the nearest site to the sea (the empty rest), in typical distances between sites
EDGE = 0.94  # how far toward its cell's border a document may be, as a share
NEIGHBORS = 10
LEAVES_AROUND = 6  # near leaves whose documents may be neighbors too
STEPS = 60
PUSHED = 8  # pairs of documents that push a document in a step: one before and one after it in the arrays
SEED = 0  # same tree, same map
BESIDE = 3  # neighbors that decide the place of a later document

Report = Callable[[float], None]
"""Called with the share of the work that is done; it may raise an error to stop the work."""


class Cells(NamedTuple):
    """The parts of the plane that belong to sites."""

    vertices: np.ndarray  # corners, of shape (V, 2)
    polygons: list[np.ndarray]  # for each site its cell's corners, in order, as rows of `vertices`
    neighbors: np.ndarray  # points across each cell's borders, (S, most borders, 2), padded with the site itself


def site_level(tree: Hierarchy) -> int:
    """Return the level of the map's sites: the last with few enough nodes."""
    return max((level for level in range(1, tree.depth) if tree.node_count(level) <= MOST_SITES), default=1)


def place_sites(tree: Hierarchy, level: int) -> np.ndarray:
    """Return a place for each node of a level, (S, 2), within the unit square."""
    centroids = as_unit_rows(tree.levels[level - 1].centroids.astype(np.float64))
    count = len(centroids)
    if count < 5:  # too few for t-SNE
        turn = 2 * np.pi * np.arange(count) / count
        return _within_unit_square(np.stack([np.cos(turn), np.sin(turn)], axis=1))
    from sklearn.manifold import TSNE  # imported here, because that takes a second

    apart = np.maximum(1 - centroids @ centroids.T, 0)
    above = tree.ancestors(level, np.arange(count))[:, 1:-1]
    for ancestor in above.T:
        apart += APART * (ancestor[:, None] != ancestor[None, :])
    np.fill_diagonal(apart, 0)
    left, singular, _ = np.linalg.svd(centroids - centroids.mean(axis=0), full_matrices=False)
    first = np.zeros((count, 2))  # principal components
    first[:, : min(2, len(singular))] = (left * singular)[:, :2]
    model = TSNE(
        metric="precomputed",
        init=first * (1e-4 / max(first.std(), 1e-12)),
        perplexity=min(PERPLEXITY, (count - 1) / 3),
        max_iter=500,
        random_state=SEED,
    )
    places = model.fit_transform(apart.astype(np.float32)).astype(np.float64)
    places += np.random.default_rng(SEED).normal(0, 1e-3 * max(places.std(), 1e-9), places.shape)  # equal ones differ
    return _within_unit_square(_spread(places))


def cells(sites: np.ndarray) -> Cells:
    """Return the cells of sites, (S, 2); points in the sea keep outer cells small."""
    count = len(sites)
    voronoi = Voronoi(np.concatenate([sites, _sea(sites)]))
    polygons = [np.array(voronoi.regions[region]) for region in voronoi.point_region[:count]]
    borders: list[list[int]] = [[] for _ in range(count)]
    for one, other in voronoi.ridge_points:
        for own, across in ((one, other), (other, one)):
            if own < count:
                borders[own].append(across)
    most = max(map(len, borders))
    neighbors = np.array([voronoi.points[own + [site] * (most - len(own))] for site, own in enumerate(borders)])
    used, corners = np.unique(np.concatenate(polygons), return_inverse=True)
    starts = np.cumsum([len(polygon) for polygon in polygons])[:-1]
    return Cells(voronoi.vertices[used], np.split(corners, starts), neighbors)


def place_documents(
    tree: Hierarchy,
    sites: np.ndarray,  # what `place_sites` returned for `site_level(tree)`, (S, 2)
    documents: np.ndarray,  # positions in the tree, (N,)
    vectors: np.ndarray,  # of these documents, (N, n)
    report: Report = lambda share: None,
) -> np.ndarray:
    """Return a place for each document in the cell of its site, (N, 2)."""
    placed = np.empty((len(documents), 2), np.float32)
    if not len(documents):
        return placed
    site = tree.nodes_at(site_level(tree))[documents]
    order = np.argsort(site, kind="stable")  # makes documents of a cell adjacent in the arrays
    site, documents, vectors = site[order], documents[order], vectors[order]
    generator = np.random.default_rng(SEED)
    pairs = _neighbor_pairs(tree, documents, vectors, lambda share: report(0.3 * share))
    sums = sparse.csr_matrix((np.ones(pairs.nnz), np.arange(pairs.nnz), pairs.indptr), (len(documents), pairs.nnz))
    borders = _Borders.of(sites, cells(sites).neighbors)
    scale = float(np.median(borders.nearest) / np.sqrt(max(len(documents) / len(sites), 1)))  # documents' spacing
    places = borders.keep(sites[site] + generator.normal(0, 2 * scale, (len(documents), 2)), site)
    around = max(2, round(1.5 * len(documents) / len(sites)))
    for step in range(STEPS):
        near = (places / scale).astype(np.float32)
        off = near[pairs.indices] - np.repeat(near, np.diff(pairs.indptr), axis=0)
        move = sums @ (off / (1 + np.einsum("ij,ij->i", off, off)[:, None]))  # the pull of the neighbors
        for shift in generator.integers(1, around, PUSHED).tolist():  # others, mostly from the same cell, push away
            off = near - np.roll(near, -shift, axis=0)
            squared = np.einsum("ij,ij->i", off, off)
            off *= (2 / ((0.1 + squared) * (1 + squared)))[:, None]
            move += off - np.roll(off, shift, axis=0)
        places = borders.keep(places + (1 - step / STEPS) * scale * np.clip(move, -4, 4), site)
        report(0.3 + 0.7 * (step + 1) / STEPS)
    placed[order] = borders.fill(places, site)
    return placed


def place_beside(vectors: np.ndarray, there: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return a place for each vector, (B, n), near its nearest in `there`, (m, n)."""
    cosines = vectors @ there.T
    nearest = np.argsort(-cosines, axis=1, kind="stable")[:, :BESIDE]
    weights = np.exp(10 * np.take_along_axis(cosines, nearest, axis=1))
    return np.asarray((weights[:, :, None] * places[nearest]).sum(axis=1) / weights.sum(axis=1, keepdims=True))


# ------------------------------------------------------------------------------------------------- sites


def _within_unit_square(sites: np.ndarray) -> np.ndarray:
    """Move and scale sites such that all of their cells are within the unit square."""
    sites = sites / max(np.ptp(sites, axis=0).max(), 1e-12)
    corners = cells(sites).vertices
    low, high = corners.min(axis=0), corners.max(axis=0)
    return np.asarray(0.5 + 0.98 * (sites - (low + high) / 2) / (high - low).max())


def _spread(places: np.ndarray) -> np.ndarray:
    """Fill a disc evenly: move each place to the center of its cell, repeatedly."""
    places = places - places.mean(axis=0)
    reach = 1.08 * np.linalg.norm(places, axis=1).max()
    turn = 2 * np.pi * np.arange(RIM) / RIM
    rim = np.stack([np.cos(turn), np.sin(turn)], axis=1) * (reach * (1 + np.pi / RIM))
    for _ in range(ROUNDS):
        voronoi = Voronoi(np.concatenate([places, rim, 3 * rim]))
        for site, region in enumerate(voronoi.point_region[: len(places)].tolist()):
            corners = voronoi.vertices[voronoi.regions[region]]
            following = np.roll(corners, -1, axis=0)
            cross = corners[:, 0] * following[:, 1] - following[:, 0] * corners[:, 1]
            places[site] = ((corners + following) * cross[:, None]).sum(axis=0) / (3 * cross.sum())
        places *= np.minimum(1, reach / np.maximum(np.linalg.norm(places, axis=1), 1e-12))[:, None]
    return places


def _sea(sites: np.ndarray) -> np.ndarray:
    """Return the points of a triangular grid far from all sites, (points, 2)."""
    nearest = cKDTree(sites).query(sites, k=2)[0][:, 1] if len(sites) > 1 else np.array([0.5])
    step = max(float(np.median(nearest)), 0.004 * max(np.ptp(sites, axis=0).max(), 1e-9))
    low, high = sites.min(axis=0) - 5 * step, sites.max(axis=0) + 5 * step
    across, up = np.arange(low[0], high[0], step), np.arange(low[1], high[1], step * np.sqrt(3) / 2)
    grid = np.stack(np.meshgrid(across, up), axis=2)
    grid[1::2, :, 0] += step / 2
    points = grid.reshape(-1, 2)
    return points[cKDTree(sites).query(points)[0] > COAST * step]


# ------------------------------------------------------------------------------------------------- documents


class _Borders(NamedTuple):
    """The borders of each site's cell, relative to the site."""

    sites: np.ndarray  # of shape (S, 2)
    toward: np.ndarray  # from a site to the points across its borders, of shape (S, borders, 2)
    half: np.ndarray  # half of the squared lengths of `toward`, of shape (S, borders)
    nearest: np.ndarray  # the distance from each site to the nearest point across a border, of shape (S,)

    @classmethod
    def of(cls, sites: np.ndarray, neighbors: np.ndarray) -> _Borders:
        toward = neighbors - sites[:, None]
        squared = (toward**2).sum(axis=2)
        return cls(sites, toward, squared / 2, np.sqrt(np.where(squared > 0, squared, np.inf).min(axis=1)))

    def keep(self, places: np.ndarray, site: np.ndarray) -> np.ndarray:
        """Move places that left their cell straight back toward its site."""
        off = places - self.sites[site]
        over = np.einsum("nd,nbd->nb", off, self.toward[site]) / np.maximum(self.half[site], 1e-12)
        return self.sites[site] + off / np.maximum(over.max(axis=1) / EDGE, 1)[:, None]

    def fill(self, places: np.ndarray, site: np.ndarray) -> np.ndarray:
        """Spread the places of each cell evenly between its site and its borders."""
        count = np.bincount(site, minlength=len(self.sites))
        middle = np.stack([np.bincount(site, places[:, axis], len(count)) for axis in (0, 1)], axis=1)
        off = places - (middle / np.maximum(count, 1)[:, None])[site]
        far = np.linalg.norm(off, axis=1)
        order = np.lexsort((far, site))
        rank = np.empty(len(site))
        rank[order] = np.arange(len(site)) - (np.cumsum(count) - count)[site[order]]
        direction = off / np.maximum(far, 1e-12)[:, None]
        over = np.einsum("nd,nbd->nb", direction, self.toward[site]) / np.maximum(self.half[site], 1e-12)
        reach = EDGE * np.sqrt((rank + 0.5) / count[site]) / np.maximum(over.max(axis=1), 1e-12)
        return self.sites[site] + direction * reach[:, None]


def _neighbor_pairs(tree: Hierarchy, documents: np.ndarray, vectors: np.ndarray, report: Report) -> sparse.csr_matrix:
    """Join each document with its nearest ones in near leaves: (N, N), symmetric."""
    count = len(documents)
    parent = tree.document_parent[documents]
    order = np.argsort(parent, kind="stable")
    start = np.searchsorted(parent[order], np.arange(tree.node_count(tree.depth - 1) + 1))
    rows, columns = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    centroids = tree.levels[-1].centroids
    for leaf in np.flatnonzero(np.diff(start)).tolist():
        closest = np.argsort(-(centroids @ centroids[leaf]), kind="stable")[: LEAVES_AROUND + 1]
        own = order[start[leaf] : start[leaf + 1]]
        others = np.concatenate([order[start[each] : start[each + 1]] for each in np.union1d(closest, [leaf])])
        cosines = vectors[own] @ vectors[others].T
        cosines[own[:, None] == others[None, :]] = -np.inf
        most = min(NEIGHBORS, len(others) - 1)
        if most > 0:
            nearest = np.argpartition(-cosines, most - 1, axis=1)[:, :most]
            rows.append(np.repeat(own, most))
            columns.append(others[nearest].ravel())
        report(sum(map(len, rows)) / max(count * NEIGHBORS, 1))
    row, column = np.concatenate(rows), np.concatenate(columns)
    pairs = sparse.csr_matrix((np.ones(len(row), np.float32), (row, column)), (count, count))
    return pairs.maximum(pairs.T).tocsr()
