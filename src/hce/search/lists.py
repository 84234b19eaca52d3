"""Lists: vectors in numbered lists, kept by faiss's inverted file; a search is told which lists to look into."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import faiss
import numpy as np

from hce.search.engine import ROWS_AT_ONCE, Found, codec_of, range_sample
from hce.search.exact import search_exactly

CENTROID_DTYPE = "float16"  # centroids only choose, so they may be coarse: half the memory to read


class Layers(NamedTuple):
    """Layers from the root's only list down to the leaves' lists of documents.

    Attributes:
        layers: two or more.
        branching: for each layer, how many a list is expected to hold.
    """

    layers: list[Lists]
    branching: list[int]

    @property
    def documents(self) -> Lists:
        """The bottom layer."""
        return self.layers[-1]

    def nodes(self, layer: int) -> np.ndarray:
        """The lists of a layer that are in use."""
        return self.layers[layer - 1].ids if layer else np.zeros(1, np.int64)

    def start(self, work: float) -> int:
        """Where to begin a search of about `work` vectors a layer: the lowest layer that costs no more in full.

        Beginning one layer higher would cost that layer, and then `work` vectors of this one.
        """
        begin, above = 0, 0
        for number, layer in enumerate(self.layers[:-1]):
            if len(layer) <= work + above:
                begin = number
            above = len(layer)
        return begin


KINDS = {"float16": faiss.ScalarQuantizer.QT_fp16, "int8": faiss.ScalarQuantizer.QT_8bit}

LISTS_AT_ONCE = 1 << 22  # pairs of a query and a list in one call


class Members(NamedTuple):
    """What is in a list: ids of shape (m,), int64, and vectors of shape (m, n), float32, as far as codes tell."""

    ids: np.ndarray
    vectors: np.ndarray


class Lists:
    """Vectors with ids, each in one list.

    Attributes:
        index: faiss's lists.
        ids: rising, of shape (m,), int64.
        home: the list of each, of shape (m,), int64.
    """

    def __init__(self, index: faiss.IndexIVF, ids: np.ndarray, home: np.ndarray) -> None:
        self.index = index
        self.ids = ids
        self.home = home

    @classmethod
    def new(cls, dim: int, count: int, dtype: str, vectors: np.ndarray) -> Lists:
        """So many empty lists, for vectors like these."""
        return cls(inverted_file(dim, count, dtype, vectors), np.empty(0, np.int64), np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def dtype(self) -> str:
        """What the vectors are kept in."""
        if isinstance(self.index, faiss.IndexIVFFlat):
            return "float32"
        return next(name for name, kind in KINDS.items() if kind == self.index.sq.qtype)

    def sizes(self) -> np.ndarray:
        """How many vectors are in each list, of shape (lists,)."""
        return np.bincount(self.home, minlength=self.index.nlist)

    def home_of(self, ids: np.ndarray) -> np.ndarray:
        """The lists of ids that are there."""
        return self.home[np.searchsorted(self.ids, ids)]

    def members(self, numbers: np.ndarray) -> Members:
        """What is in some lists."""
        parts = [self._members(number) for number in numbers.tolist()]
        if not parts:
            return Members(np.empty(0, np.int64), np.empty((0, self.index.d), np.float32))
        return Members(np.concatenate([part.ids for part in parts]), np.concatenate([part.vectors for part in parts]))

    def everything(self) -> Members:
        """All there is, in order of id."""
        members = self.members(np.unique(self.home))
        order = np.argsort(members.ids)
        return Members(members.ids[order], members.vectors[order])

    def put(self, ids: np.ndarray, vectors: np.ndarray, home: np.ndarray) -> None:
        """Add vectors under new ids, each to a list; a list that is not there yet is made."""
        if not len(ids):
            return
        self._reserve(int(home.max()) + 1)
        # List by list: each then lies in one piece of memory, beside its neighbours.
        order = np.argsort(home, kind="stable")
        for start in range(0, len(order), ROWS_AT_ONCE):
            rows = order[start : start + ROWS_AT_ONCE]
            self._append(ids[rows], np.ascontiguousarray(vectors[rows], dtype=np.float32), home[rows])
        ids, home = np.concatenate([self.ids, ids]), np.concatenate([self.home, home])
        order = np.argsort(ids, kind="stable")
        self.ids, self.home = ids[order], home[order]
        self.index.ntotal = len(ids)

    def drop(self, ids: np.ndarray) -> None:
        """Take ids out that are there."""
        if not len(ids):
            return
        self.index.remove_ids(faiss.IDSelectorBatch(np.ascontiguousarray(ids, dtype=np.int64)))
        kept = ~np.isin(self.ids, ids)
        self.ids, self.home = self.ids[kept], self.home[kept]

    def spread(self, numbers: np.ndarray, members: Members, home: np.ndarray) -> None:
        """Empty lists, and put what was in them, `members`, into the lists `home`, which they may be among."""
        for number in numbers.tolist():
            self.index.invlists.resize(number, 0)
        self._reserve(int(home.max(initial=0)) + 1)
        order = np.argsort(home, kind="stable")
        self._append(members.ids[order], members.vectors[order], home[order])
        self.home[np.searchsorted(self.ids, members.ids)] = home

    def vectors_of(self, ids: np.ndarray) -> np.ndarray:
        """The vectors of ids that are there, of shape (m, n)."""
        members = self.members(np.unique(self.home_of(ids)))
        order = np.argsort(members.ids)
        return members.vectors[order[np.searchsorted(members.ids, ids, sorter=order)]]

    def search(self, queries: np.ndarray, k: int, lists: np.ndarray, only: faiss.IDSelector | None = None) -> Found:
        """The k best of some lists, in any order.

        Args:
            queries: of shape (Q, n).
            k: how many; −1 fills what is missing.
            lists: for each query, of shape (Q, lists), or the same for all, of shape (lists,); −1 is none.
            only: which ids may be found; by default all.
        """
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        if lists.ndim == 1:
            lists = np.broadcast_to(lists, (len(queries), len(lists)))
        step = max(1, LISTS_AT_ONCE // lists.shape[1])
        if len(queries) <= step:
            return _search_lists(self.index, queries, k, lists, only)
        blocks = [slice(start, start + step) for start in range(0, len(queries), step)]
        parts = [_search_lists(self.index, queries[block], k, lists[block], only) for block in blocks]
        return Found(*map(np.concatenate, zip(*parts, strict=True)))

    def under(self, quantizer: faiss.Index) -> faiss.IndexIVF:
        """The same lists as an index of their own, for which `quantizer` chooses among them.

        It sees what is put into lists, but not a list that is made: make it anew after changes. Keep this object while
        that one is in use.
        """
        index = inverted_file(self.index.d, self.index.nlist, self.dtype, None, quantizer)
        if self.dtype != "float32":
            index.sq = self.index.sq
        index.replace_invlists(self.index.invlists, False)
        index.ntotal = len(self)
        return index

    def search_exactly(self, queries: np.ndarray, k: int, allowed: np.ndarray | None = None) -> Found:
        """The k best of all lists, or of the allowed ids (rising), ties settled by id."""
        among = self.ids if allowed is None else np.intersect1d(self.ids, allowed, assume_unique=True)
        only = None if allowed is None else number_selector(among)
        lists = np.unique(self.home)

        def nearest(block: np.ndarray, depth: int) -> Found:
            return self.search(block, depth, lists, only)

        return search_exactly(nearest, len(among), queries, k)

    def check(self) -> None:
        """Refuse arrays that do not tell what is in the lists.

        Raises:
            ValueError: they do not.
        """
        if not isinstance(self.index, faiss.IndexIVF):
            raise ValueError(f"a {type(self.index).__name__} has no lists")
        stored = [self.index.invlists.list_size(number) for number in range(self.index.nlist)]
        if len(self.ids) != len(self.home) or not np.array_equal(self.sizes(), stored):
            raise ValueError(f"{self.index.ntotal} vectors and {len(self.ids)} numbers")

    def _members(self, number: int) -> Members:
        stored = self.index.invlists
        size = stored.list_size(number)
        if not size:
            return Members(np.empty(0, np.int64), np.empty((0, self.index.d), np.float32))
        ids = faiss.rev_swig_ptr(stored.get_ids(number), size).copy()
        codes = faiss.rev_swig_ptr(stored.get_codes(number), size * self.index.code_size).reshape(size, -1)
        plain = isinstance(self.index, faiss.IndexIVFFlat)
        return Members(ids, codes.view(np.float32).copy() if plain else self.index.sq.decode(codes))

    def _append(self, ids: np.ndarray, vectors: np.ndarray, home: np.ndarray) -> None:
        """Append rows that are sorted by list."""
        ids = np.ascontiguousarray(ids, dtype=np.int64)
        plain = isinstance(self.index, faiss.IndexIVFFlat)
        codes = vectors.view(np.uint8) if plain else self.index.sq.compute_codes(vectors)
        limits = [*np.flatnonzero(np.diff(home, prepend=-1)).tolist(), len(home)]
        for start, stop in pairwise(limits):
            pointers = faiss.swig_ptr(ids[start:stop]), faiss.swig_ptr(codes[start:stop])
            self.index.invlists.add_entries(int(home[start]), stop - start, *pointers)

    def _reserve(self, count: int) -> None:
        """Have at least so many lists; faiss knows no way to append one, so they are doubled."""
        old = self.index.invlists
        if count <= old.nlist:
            return
        more = faiss.ArrayInvertedLists(max(count, 2 * old.nlist), old.code_size)
        for number in np.unique(self.home).tolist():
            more.add_entries(number, old.list_size(number), old.get_ids(number), old.get_codes(number))
        self.index.nlist = more.nlist
        self.index.replace_invlists(more, True)
        more.this.disown()


def inverted_file(
    dim: int, lists: int, dtype: str, vectors: np.ndarray | None, quantizer: faiss.Index | None = None
) -> faiss.IndexIVF:
    """Empty lists.

    Args:
        dim: the length n of a vector.
        lists: how many.
        dtype: what the vectors are kept in.
        vectors: of shape (N, n); the codes are made for their range. None: the caller brings the codes' ranges.
        quantizer: chooses lists; by default one that knows no centroids.
    """
    quantizer = quantizer or faiss.IndexFlatIP(dim)
    if codec_of(dtype) == "Flat":
        index = faiss.IndexIVFFlat(quantizer, dim, lists, faiss.METRIC_INNER_PRODUCT)
    else:
        # Not of residuals: a vector keeps its code when it moves to another list.
        index = faiss.IndexIVFScalarQuantizer(quantizer, dim, lists, KINDS[dtype], faiss.METRIC_INNER_PRODUCT, False)
        if vectors is not None:
            index.sq.train(range_sample(vectors, dim))
    index.is_trained = True
    return index


def number_selector(numbers: np.ndarray) -> faiss.IDSelector:
    """Make faiss look at these numbers only: rising, of shape (m,), int64."""
    chosen = np.zeros(int(numbers[-1]) + 1 if len(numbers) else 1, dtype=bool)
    chosen[numbers] = True
    return faiss.IDSelectorBitmap(np.packbits(chosen, bitorder="little"))


def _search_lists(
    index: faiss.IndexIVF, queries: np.ndarray, k: int, lists: np.ndarray, only: faiss.IDSelector | None
) -> Found:
    """Call faiss's own function: its Python wrapper can neither filter nor be used by several threads at once."""
    lists, probes = np.ascontiguousarray(lists), lists.shape[1]
    options = _probing(probes) if only is None else faiss.SearchParametersIVF(nprobe=probes, sel=only)
    found = Found(np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64))
    unused = np.empty(lists.shape, np.float32)  # scores of the lists, which only codes of residuals need
    arrays = map(faiss.swig_ptr, (lists, unused, found.scores, found.numbers))
    index.search_preassigned_c(len(queries), faiss.swig_ptr(queries), k, *arrays, False, options)
    return found


@lru_cache(maxsize=256)
def _probing(lists: int) -> faiss.SearchParametersIVF:
    """Kept, as making one takes as long as searching a few lists."""
    return faiss.SearchParametersIVF(nprobe=lists)
