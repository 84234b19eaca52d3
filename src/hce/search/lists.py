"""Lists: vectors in numbered lists, kept by faiss's inverted file; a search is told which lists to look into.

`InvertedFile` is the only place that reaches into faiss's memory. `Lists` knows which vector is in which list, and
`Layers` are lists below lists: a tree as it is searched.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import faiss
import numpy as np

from hce.progress import progress_bar
from hce.search.engine import VECTORS_AT_ONCE, Found, codec_of, dtype_of, range_sample, require_sound, set_code_ranges
from hce.search.exact import search_exactly, selector

CENTROID_DTYPE = "float16"  # centroids only choose, so they may be coarse: half the memory to read
QUANTIZERS = {"float16": faiss.ScalarQuantizer.QT_fp16, "int8": faiss.ScalarQuantizer.QT_8bit}
MANY = 1 << 18  # vectors, of which it is shown how they are put into lists
LISTS_AT_ONCE = 1 << 22  # pairs of a query and a list in one call


class Members(NamedTuple):
    """What is in a list: ids of shape (m,), int64, and vectors of shape (m, n), float32, as far as codes tell."""

    ids: np.ndarray
    vectors: np.ndarray


class InvertedFile:
    """faiss's inverted lists.

    faiss's Python can neither read a list, nor append to a list by its number, nor search chosen lists under a filter
    and from several threads. Here it is done by pointers into faiss's memory, none of which is seen elsewhere.

    Attributes:
        index: what faiss searches, reads and writes.
    """

    def __init__(self, index: faiss.IndexIVF) -> None:
        self.index = index

    @classmethod
    def new(cls, dim: int, count: int, dtype: str, vectors: np.ndarray) -> InvertedFile:
        """Make so many empty lists, their codes made for the range of vectors (N, n)."""
        index = _empty_index(faiss.IndexFlatIP(dim), count, dtype)  # a quantizer that knows no centroids
        if dtype != "float32":
            index.sq.train(range_sample(vectors, dim))
        return cls(index)

    @classmethod
    def of_codes(
        cls, dim: int, sizes: np.ndarray, ids: np.ndarray, codes: np.ndarray, ranges: np.ndarray
    ) -> InvertedFile:
        """Make lists of what `codes` and `ids` returned, list after list.

        Args:
            dim: the length n of a vector.
            sizes: how many vectors each list has, of shape (lists,), int64.
            ids: of the vectors, of shape (m,), int64.
            codes: of shape (m, bytes of one), uint8.
            ranges: that the codes are made for.

        Raises:
            ValueError: they do not fit together.
        """
        require_sound(sizes.dtype == np.int64 and sizes.ndim == 1 and len(sizes) > 0, "no lists")
        require_sound(
            bool((sizes >= 0).all()) and len(codes) == len(ids) == sizes.sum(), f"{len(codes)} codes in the lists"
        )
        index = _empty_index(faiss.IndexFlatIP(dim), len(sizes), dtype_of(codes, dim))
        set_code_ranges(index, ranges)
        stops = np.cumsum(sizes).tolist()
        for number in np.flatnonzero(sizes).tolist():
            some = slice(stops[number] - int(sizes[number]), stops[number])
            own_ids, own_codes = np.array(ids[some]), np.array(codes[some])  # alive until faiss has copied them
            pointers = faiss.swig_ptr(own_ids), faiss.swig_ptr(own_codes)
            index.invlists.add_entries(number, int(sizes[number]), *pointers)
        index.ntotal = len(ids)
        return cls(index)

    @property
    def dtype(self) -> str:
        """What the vectors are kept in."""
        if self._is_plain:
            return "float32"
        return next(name for name, quantizer in QUANTIZERS.items() if quantizer == self.index.sq.qtype)

    @property
    def _is_plain(self) -> bool:
        return isinstance(self.index, faiss.IndexIVFFlat)

    def size(self, number: int) -> int:
        """Return how many vectors are in a list."""
        return int(self.index.invlists.list_size(number))

    def read(self, number: int) -> Members:
        """Copy a list out."""
        ids, codes = self.ids(number), self.codes(number)
        if not len(ids):
            return Members(ids, np.empty((0, self.index.d), np.float32))
        return Members(ids.copy(), codes.view(np.float32).copy() if self._is_plain else self.index.sq.decode(codes))

    def ids(self, number: int) -> np.ndarray:
        """Return the ids of a list, of shape (m,), int64, in faiss's own memory."""
        stored, size = self.index.invlists, self.size(number)
        return faiss.rev_swig_ptr(stored.get_ids(number), size) if size else np.empty(0, np.int64)

    def codes(self, number: int) -> np.ndarray:
        """Return the codes of a list, of shape (m, bytes of one), uint8, in faiss's own memory."""
        stored, size, width = self.index.invlists, self.size(number), self.index.code_size
        codes = faiss.rev_swig_ptr(stored.get_codes(number), size * width) if size else np.empty(0, np.uint8)
        return np.asarray(codes).reshape(size, width)

    def append(self, members: Members, home: np.ndarray) -> None:
        """Append vectors to lists that are there: `home`, rising, of shape (m,)."""
        ids = np.ascontiguousarray(members.ids, dtype=np.int64)
        vectors = np.ascontiguousarray(members.vectors, dtype=np.float32)
        codes = vectors.view(np.uint8) if self._is_plain else self.index.sq.compute_codes(vectors)
        limits = [*np.flatnonzero(np.diff(home, prepend=-1)).tolist(), len(home)]
        for start, stop in pairwise(limits):
            pointers = faiss.swig_ptr(ids[start:stop]), faiss.swig_ptr(codes[start:stop])
            self.index.invlists.add_entries(int(home[start]), stop - start, *pointers)

    def clear(self, number: int) -> None:
        """Empty a list."""
        self.index.invlists.resize(number, 0)

    def reserve(self, count: int) -> None:
        """Have at least so many lists; faiss knows no way to append one, so they are doubled."""
        old = self.index.invlists
        if count <= old.nlist:
            return
        more = faiss.ArrayInvertedLists(max(count, 2 * old.nlist), old.code_size)
        for number in filter(old.list_size, range(old.nlist)):
            more.add_entries(number, old.list_size(number), old.get_ids(number), old.get_codes(number))
        self.index.nlist = more.nlist
        self.index.replace_invlists(more, True)  # the old lists are deleted, and faiss now owns the new ones:
        more.this.disown()

    def under(self, quantizer: faiss.Index) -> faiss.IndexIVF:
        """Return the same lists as an index of their own, for which `quantizer` chooses among them.

        That index sees what is put into lists, but not a list that is made: make it anew after changes.
        """
        index = _empty_index(quantizer, self.index.nlist, self.dtype)
        if not self._is_plain:
            index.sq = self.index.sq
        index.replace_invlists(self.index.invlists, False)
        index.ntotal = self.index.ntotal
        index.referenced_objects = [quantizer, self.index]  # which it keeps alive
        return index

    def search(self, queries: np.ndarray, k: int, lists: np.ndarray, only: faiss.IDSelector | None) -> Found:
        """Find the k best of the lists (Q, lists) of each query (Q, n), in any order; −1 fills what is missing."""
        lists, probes = np.ascontiguousarray(lists), lists.shape[1]
        options = _probing(probes) if only is None else faiss.SearchParametersIVF(nprobe=probes, sel=only)
        found = Found(np.empty((len(queries), k), np.int64), np.empty((len(queries), k), np.float32))
        unused = np.empty(lists.shape, np.float32)  # scores of the lists, which only codes of residuals need
        arrays = map(faiss.swig_ptr, (lists, unused, found.scores, found.numbers))
        self.index.search_preassigned_c(len(queries), faiss.swig_ptr(queries), k, *arrays, False, options)
        return found


class Lists:
    """Vectors with ids, each in one list.

    Attributes:
        file: the lists themselves.
        ids: rising, of shape (m,), int64.
        home: the list of each, of shape (m,), int64.
    """

    def __init__(self, file: InvertedFile, ids: np.ndarray, home: np.ndarray) -> None:
        self.file = file
        self.ids = ids
        self.home = home

    @classmethod
    def new(cls, dim: int, count: int, dtype: str, vectors: np.ndarray) -> Lists:
        """Make so many empty lists, for vectors like these."""
        return cls(InvertedFile.new(dim, count, dtype, vectors), np.empty(0, np.int64), np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def dim(self) -> int:
        """The length n of a vector."""
        return int(self.file.index.d)

    def sizes(self) -> np.ndarray:
        """Return how many vectors are in each list, of shape (lists,)."""
        return np.bincount(self.home, minlength=self.file.index.nlist)

    def home_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the lists of ids that are there."""
        return self.home[np.searchsorted(self.ids, ids)]

    def members(self, numbers: np.ndarray) -> Members:
        """Return what is in some lists."""
        read = [self.file.read(number) for number in numbers.tolist()]
        if not read:
            return Members(np.empty(0, np.int64), np.empty((0, self.dim), np.float32))
        return Members(np.concatenate([each.ids for each in read]), np.concatenate([each.vectors for each in read]))

    def everything(self) -> Members:
        """Return all there is, in order of id."""
        members = self.members(np.unique(self.home))
        order = np.argsort(members.ids)
        return Members(members.ids[order], members.vectors[order])

    def vectors_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the vectors of ids that are there, of shape (m, n)."""
        members = self.members(np.unique(self.home_of(ids)))
        order = np.argsort(members.ids)
        return members.vectors[order[np.searchsorted(members.ids, ids, sorter=order)]]

    def put(self, ids: np.ndarray, vectors: np.ndarray, home: np.ndarray) -> None:
        """Add vectors under new ids, each to a list; a list that is not there yet is made."""
        if not len(ids):
            return
        self.file.reserve(int(home.max()) + 1)
        # List by list: each then lies in one piece of memory, beside its neighbours.
        order = np.argsort(home, kind="stable")
        with progress_bar("filling lists", len(order), "vectors", show=None if len(order) > MANY else False) as advance:
            for start in range(0, len(order), VECTORS_AT_ONCE):
                rows = order[start : start + VECTORS_AT_ONCE]
                self.file.append(Members(ids[rows], vectors[rows]), home[rows])
                advance(len(rows))
        ids, home = np.concatenate([self.ids, ids]), np.concatenate([self.home, home])
        order = np.argsort(ids, kind="stable")
        self.ids, self.home = ids[order], home[order]
        self.file.index.ntotal = len(ids)

    def drop(self, ids: np.ndarray) -> None:
        """Take ids out that are there."""
        if not len(ids):
            return
        self.file.index.remove_ids(faiss.IDSelectorBatch(np.ascontiguousarray(ids, dtype=np.int64)))
        kept = ~np.isin(self.ids, ids)
        self.ids, self.home = self.ids[kept], self.home[kept]

    def spread(self, numbers: np.ndarray, members: Members, home: np.ndarray) -> None:
        """Empty lists, and put what was in them, `members`, into the lists `home`, which they may be among."""
        for number in numbers.tolist():
            self.file.clear(number)
        self.file.reserve(int(home.max(initial=0)) + 1)
        order = np.argsort(home, kind="stable")
        self.file.append(Members(members.ids[order], members.vectors[order]), home[order])
        self.home[np.searchsorted(self.ids, members.ids)] = home

    def search(self, queries: np.ndarray, k: int, lists: np.ndarray, only: faiss.IDSelector | None = None) -> Found:
        """Find the k best of some lists, in any order.

        Args:
            queries: of shape (Q, n).
            k: how many; −1 fills what is missing.
            lists: for each query, of shape (Q, lists), or the same for all, of shape (lists,); −1 is none.
            only: which ids may be found; by default all.
        """
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        if lists.ndim == 1:
            lists = np.broadcast_to(lists, (len(queries), len(lists)))
        at_once = max(1, LISTS_AT_ONCE // lists.shape[1])
        if len(queries) <= at_once:
            return self.file.search(queries, k, lists, only)
        blocks = [slice(start, start + at_once) for start in range(0, len(queries), at_once)]
        found = [self.file.search(queries[block], k, lists[block], only) for block in blocks]
        return Found(*map(np.concatenate, zip(*found, strict=True)))

    def scores(self, query: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Return the inner products of a query, of shape (n,), with the vectors of ids that are there, in any order."""
        if not len(ids):
            return np.empty(0, np.float32)
        only = faiss.IDSelectorBatch(np.ascontiguousarray(ids, dtype=np.int64))
        found = self.search(query[None], len(ids), np.unique(self.home_of(ids)), only)
        scores = np.empty(len(ids), np.float32)
        scores[np.argsort(ids)] = found.scores[0, np.argsort(found.numbers[0])]
        return scores

    def search_exactly(self, queries: np.ndarray, k: int, allowed: np.ndarray | None = None) -> Found:
        """Find the k best of all lists, or of the allowed ids (rising), ties settled by id."""
        allowed_ids = self.ids if allowed is None else np.intersect1d(self.ids, allowed, assume_unique=True)
        only = None if allowed is None else _id_selector(allowed_ids)
        lists = np.unique(self.home)

        def fetch(block: np.ndarray, count: int) -> Found:
            return self.search(block, count, lists, only)

        return search_exactly(fetch, len(allowed_ids), queries, k)


@dataclass
class Layers:
    """Lists from the root's only one down to the leaves' lists of documents.

    Each layer keeps the children of one level's nodes, a list a node: the centroids of the next level's nodes under
    these nodes' numbers, and at the bottom the documents.

    Attributes:
        lists: of each layer; two or more.
        branching: for each layer, how many a list is expected to hold.
    """

    lists: list[Lists]
    branching: list[int]

    @property
    def documents(self) -> Lists:
        """The bottom layer."""
        return self.lists[-1]

    def nodes(self, layer: int) -> np.ndarray:
        """Return the numbers of a layer's lists that are in use."""
        return self.lists[layer - 1].ids if layer else np.zeros(1, np.int64)

    def first_layer(self, work: float) -> int:
        """Choose where to begin a search of about `work` vectors a layer: the lowest layer that costs no more in full.

        Beginning one layer higher would cost that layer, and then `work` vectors of this one.
        """
        begin, above = 0, 0
        for layer, lists in enumerate(self.lists[:-1]):
            if len(lists) <= work + above:
                begin = layer
            above = len(lists)
        return begin


def _empty_index(quantizer: faiss.Index, count: int, dtype: str) -> faiss.IndexIVF:
    """Make so many empty lists for faiss to search; the codes' ranges are up to the caller."""
    if codec_of(dtype) == "Flat":
        index = faiss.IndexIVFFlat(quantizer, quantizer.d, count, faiss.METRIC_INNER_PRODUCT)
    else:
        # Not of residuals: a vector keeps its code when it moves to another list.
        codes, metric = QUANTIZERS[dtype], faiss.METRIC_INNER_PRODUCT
        index = faiss.IndexIVFScalarQuantizer(quantizer, quantizer.d, count, codes, metric, False)
    index.is_trained = True
    return index


def _id_selector(ids: np.ndarray) -> faiss.IDSelector:
    """Make faiss look at these ids only: rising, of shape (m,), int64."""
    chosen = np.zeros(int(ids[-1]) + 1 if len(ids) else 1, dtype=bool)
    chosen[ids] = True
    return selector(chosen)


@lru_cache(maxsize=256)
def _probing(lists: int) -> faiss.SearchParametersIVF:
    """Make the setting of a search once, as making one takes as long as searching a few lists."""
    return faiss.SearchParametersIVF(nprobe=lists)
