"""What the index asks of an engine: a mapping from numbers to unit vectors, searched by inner product.

An engine is derived from the store and can be thrown away at any time. It knows numbers and vectors, and nothing of
documents, files of the user, or encoders. Here are the protocol, and the engine of this process: a file of vectors,
mapped into memory, and their codes. A search scans the codes, and scores the first candidates again by the vectors.

The engine "exact" has no codes, and neither have few vectors: then every vector is scored.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple, Protocol

import faiss
import numpy as np

from hce.errors import InputError
from hce.search.codes import NARROW, WIDE, Codes
from hce.search.engine_files import (
    as_format_error,
    checked,
    checked_numbers,
    mapped,
    read_arrays,
    require_sound,
    write_arrays,
)
from hce.search.exact import SLACK, inner_products, k_best, nothing, search_exactly
from hce.search.exact import Found as Found
from hce.search.rows import Rows
from hce.tree.hierarchy import Hierarchy

ENGINES = ("codes", "exact")

ELSEWHERE = ("milvus",)
"""Engines that are no part of this process, and have an address: see `hce.milvus.engine`."""

CODED_FROM = 10_000  # vectors; scoring each of fewer takes less than a third of a millisecond
WIDE_FROM = 200_000  # vectors; a scan of more is faster with wide codes, though it needs more candidates
ROUTED_FROM = 4_000_000  # vectors; the codes of fewer are all scanned, in 2 ms a million
GROWN = 4  # times as many vectors: then the engine is built again
FEW = 20_000  # vectors that a filter leaves; scoring each of fewer takes no longer than a scan
MARGIN, SPARE = 1.25, 16  # candidates beyond those wanted, which show whether the last place is shared
FILES = 3  # the format of an engine on disk
VECTORS, CODES = "vectors.npy", "codes.npy"

# How many candidates are scored again is found by questions: documents moved as far as they lie from their mean. To
# leaves, real questions are as hard as documents moved twice as far (docs/LOG.md).
ASKED, K = 128, 10
WANTED = 0.995  # of the ten nearest
RESCORED = {NARROW: (100, 200, 400, 800, 1600), WIDE: (400, 800, 1600)}  # candidates, of which few are chosen
PROBES, WANTED_ROUTED = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2), 0.95


class Engine(Protocol):
    """Vectors by number. Numbers rise: one that was removed never comes back."""

    name: str

    def __len__(self) -> int:
        """Return how many vectors there are."""
        ...

    @property
    def numbers(self) -> np.ndarray:
        """The numbers of all vectors, of shape (N,), int64, in any order."""
        ...

    def add(self, numbers: np.ndarray, vectors: np.ndarray) -> None:
        """Take vectors in.

        Args:
            numbers: of shape (B,), int64, rising, all above those that were ever added.
            vectors: unit rows of shape (B, n), float32.
        """
        ...

    def remove(self, numbers: np.ndarray) -> None:
        """Take vectors out; numbers that are not there are passed over."""
        ...

    def search(self, queries: np.ndarray, k: int, allowed: np.ndarray | None = None) -> Found:
        """Find the k vectors of the largest inner product; k of them if there are k.

        Args:
            queries: unit rows of shape (Q, n), float32.
            k: 1 or more.
            allowed: search among these numbers only (rising, int64); among few, exactly.
        """
        ...

    def scores(self, query: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return the inner products of a query, of shape (n,), with vectors that are there, of shape (m,), float32."""
        ...

    def save(self, folder: Path) -> None:
        """Write everything into an existing, empty folder."""
        ...

    def facts(self) -> dict[str, float]:
        """Return what to know of the engine without loading it."""
        ...


# ----------------------------------------------------------------------------------------- by name


def check_engine(name: str, at: str | None) -> None:
    """Refuse an engine that does not exist, or not with this address.

    Raises:
        InputError: there is no such engine, or not with this address.
    """
    if name not in (*ENGINES, *ELSEWHERE):
        raise InputError(f"engine {name!r}: choose one of {', '.join((*ENGINES, *ELSEWHERE))}")
    if name not in ELSEWHERE and at is not None:
        raise InputError(f"--at {at}: only the engine milvus has an address; add --engine milvus")
    if name in ELSEWHERE and at is None:
        raise InputError("engine milvus: where is it? Give --at http://HOST:19530, or the path of a file ending in .db")


def wants_tree(name: str, count: int) -> bool:
    """Return whether a tree leads the searches of an engine among so many vectors."""
    return name == "codes" and count >= ROUTED_FROM


def new_engine(
    name: str, dim: int, *, numbers: np.ndarray, vectors: np.ndarray, hierarchy: Hierarchy | None = None
) -> Engine:
    """Build an engine of all these vectors; none is fine too.

    Args:
        name: one of `ENGINES`.
        dim: the length n of a vector.
        numbers: of shape (N,), int64, rising.
        vectors: unit rows of shape (N, n), float32, a memory map included; they must not change.
        hierarchy: the trained tree of these vectors, whose document i is row i. It leads searches among very many
            vectors; where it is missing, one is grown.

    Raises:
        InputError: there is no such engine.
    """
    _check_name(name)
    vectors = vectors.reshape(-1, dim)
    engine = VectorEngine(name, numbers, Rows(vectors))
    if name == "exact" or len(numbers) < CODED_FROM:
        return engine
    is_routed = wants_tree(name, len(numbers))
    tree = (hierarchy or Hierarchy.build(vectors, progress=None)) if is_routed else None
    for width in (WIDE, NARROW) if len(numbers) >= WIDE_FROM else (NARROW,):
        if engine.searches_by(Codes.build(vectors, width, tree)):
            break
    return engine


def load_engine(name: str, folder: str | Path, dim: int) -> Engine:
    """Read what `Engine.save` wrote.

    Raises:
        InputError: there is no such engine.
        FormatError: the files are damaged or of another shape; build the engine again.
    """
    _check_name(name)
    folder = Path(folder)
    with as_format_error(folder):
        arrays = read_arrays(folder)
        vectors, numbers = mapped(folder / VECTORS, np.float32), checked_numbers(arrays["numbers"], "numbers")
        require_sound(vectors.shape == (len(numbers), dim), f"vectors of shape {vectors.shape} are not of length {dim}")
        engine = VectorEngine(name, numbers, _mapped_twice(folder / VECTORS))
        (engine.built,) = checked(arrays["built"], np.int64, (1,)).tolist()
        if "codebook" in arrays and name != "exact":
            engine.codes = Codes.of_arrays(arrays, mapped(folder / CODES, np.uint8), vectors.shape)
            rescored, recall = checked(
                arrays["quality"], np.float64, (2,), 0, RESCORED[engine.codes.width][-1]
            ).tolist()
            require_sound(rescored >= K, f"{rescored} candidates")
            engine.quality = Quality(int(rescored), recall)
    return engine


def _check_name(name: str) -> None:
    if name not in ENGINES:
        raise InputError(f"engine {name!r}: choose one of {', '.join(ENGINES)}")


# ----------------------------------------------------------------------------------------- the engine of this process


class Quality(NamedTuple):
    """How a search by codes was set, and what it finds.

    Attributes:
        rescored: how many candidates a search for ten scores again; one for k, 2·(k − 10) more.
        recall: the share of their ten nearest that questions made of documents found.
    """

    rescored: int
    recall: float


class VectorEngine:
    """Vectors by row, the number of each row, and their codes.

    Attributes:
        name: "exact" where there are to be no codes, however many vectors there are.
        codes: of all rows; None where every vector is scored.
        quality: of a search by codes.
        built: how many vectors there were when the engine was built.
    """

    def __init__(self, name: str, numbers: np.ndarray, vectors: Rows) -> None:
        self.name = name
        self.codes: Codes | None = None
        self.quality = Quality(K, 1.0)
        self.built = len(numbers)
        self._numbers = numbers
        self._vectors = vectors
        self._live: np.ndarray | None = None  # which rows were not removed since the last snapshot; None for all
        self._count = len(numbers)  # of these

    def __len__(self) -> int:
        return self._count

    @property
    def numbers(self) -> np.ndarray:
        """The numbers of all vectors, rising."""
        return self._numbers if self._live is None else self._numbers[self._live]

    def facts(self) -> dict[str, float]:
        """Return how many vectors there are, from how many on to build the engine again, and the quality."""
        if self.name == "exact":
            return {"rows": len(self)}
        facts: dict[str, float] = {"rows": len(self), "renewed_from": max(CODED_FROM, GROWN * self.built)}
        if self.codes is not None:
            facts |= {**self.quality._asdict(), **({"renewed_from": 0} if self.codes.fit.has_drifted else {})}
        return facts

    def add(self, numbers: np.ndarray, vectors: np.ndarray) -> None:
        """Append rows, with codes by the codebook that there is."""
        rows = np.ascontiguousarray(vectors, dtype=np.float32)
        self._vectors.append(rows)
        if self.codes is not None and len(rows):
            self.codes.append(rows)
        self._numbers = np.concatenate([self._numbers, numbers])
        if self._live is not None:
            self._live = np.concatenate([self._live, np.ones(len(rows), bool)])
        self._count += len(rows)

    def remove(self, numbers: np.ndarray) -> None:
        """Mark rows as removed; the next snapshot is without them."""
        stays = ~np.isin(self._numbers, numbers)
        if not stays.all():
            self._live = stays if self._live is None else self._live & stays
            self._count = int(self._live.sum())

    def search(self, queries: np.ndarray, k: int, allowed: np.ndarray | None = None) -> Found:
        """Find the k vectors of the largest inner product: all of them, where every vector is scored."""
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        kept = self._live if allowed is None else self._among(allowed)
        available = self._count if allowed is None or kept is None else int(np.count_nonzero(kept))
        wanted = min(max(k, self.quality.rescored + 2 * (k - K)), available)
        is_few = wanted == available or (allowed is not None and available <= FEW)
        if self.codes is None or is_few or not len(queries):
            return self._exactly(queries, k, kept, available)
        found = self._by_codes(self.codes, queries, k, wanted, kept, available)
        short = np.flatnonzero(found.numbers[:, min(k, available) - 1] < 0)  # leaves looked into hold fewer
        if len(short):
            found.numbers[short], found.scores[short] = self._exactly(queries[short], k, kept, available)
        return found

    def scores(self, query: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return the inner products of a query with some vectors."""
        return inner_products(self._vectors[np.searchsorted(self._numbers, numbers)], query)

    # ------------------------------------------------------------------------------------------------- searches

    def _among(self, allowed: np.ndarray) -> np.ndarray:
        """Return which rows have one of these numbers."""
        place = np.searchsorted(self._numbers, allowed)
        inside = place < len(self._numbers)
        place, allowed = place[inside], allowed[inside]
        is_allowed = np.zeros(len(self._numbers), bool)
        is_allowed[place[self._numbers[place] == allowed]] = True
        return is_allowed if self._live is None else is_allowed & self._live

    def _exactly(self, queries: np.ndarray, k: int, kept: np.ndarray | None, available: int) -> Found:
        """Score every vector that may be found."""
        chosen = None if kept is None else np.flatnonzero(kept)

        def fetch(some: np.ndarray, count: int) -> Found:
            best = nothing(len(some), count)
            for start, block in self._vectors.blocks(chosen):
                scores, rows = faiss.knn(some, block, min(count, len(block)), metric=faiss.METRIC_INNER_PRODUCT)
                together = Found(np.hstack([best.numbers, start + rows]), np.hstack([best.scores, scores]))
                best = k_best(together, count)
            rows = best.numbers if chosen is None else chosen[best.numbers]
            scores = np.stack(
                [inner_products(self._vectors[each], query) for each, query in zip(rows, some, strict=True)]
            )
            return Found(self._numbers[rows], scores)

        return search_exactly(fetch, available, queries, k, SLACK)

    def _by_codes(
        self, codes: Codes, queries: np.ndarray, k: int, wanted: int, kept: np.ndarray | None, available: int
    ) -> Found:
        """Score the `wanted` best rows by their codes, and all others that are as good."""
        found, total = nothing(len(queries), k), len(self._numbers)
        left, count = np.arange(len(queries)), math.ceil(MARGIN * wanted * total / available) + SPARE
        while len(left):
            count = min(count, total)
            again = []
            for query, rows, scores in zip(left.tolist(), *codes.scan(queries[left], count), strict=True):
                best = _down_to(wanted, rows, scores, kept, is_all=count == total)
                if best is None:
                    again.append(query)
                else:
                    self._rank(found, query, best, queries[query])
            left, count = np.array(again, np.int64), 4 * count
        return found

    def _rank(self, found: Found, place: int, rows: np.ndarray, query: np.ndarray) -> None:
        """Put the best of some rows into a place of what was found, equal scores in order of number."""
        scores = inner_products(self._vectors[rows], query)
        order = np.lexsort((rows, -scores))[: found.numbers.shape[1]]
        found.numbers[place, : len(order)] = self._numbers[rows[order]]
        found.scores[place, : len(order)] = scores[order]

    def searches_by(self, codes: Codes) -> bool:
        """Set how searches use codes, and use them if they find enough; codes that a tree leads are used anyway.

        Among few dimensions, many vectors share a code.
        """
        questions, shown = self._questions(1.0), None
        if codes.routes is not None:
            hard = self._questions(2.0)
            for share in PROBES:
                codes.look_into(share)
                shown = self._recalls(codes, hard)
                if shown[-1] >= WANTED_ROUTED:
                    break
        recalls = self._recalls(codes, questions)
        place = int(np.argmax(recalls >= WANTED * recalls[-1]))
        if shown is None and recalls[place] < WANTED:
            return False
        rescored, recall = RESCORED[codes.width][place], (recalls if shown is None else shown)[place]
        self.codes, self.quality = codes, Quality(rescored, float(recall))
        return True

    def _questions(self, far: float) -> tuple[np.ndarray, np.ndarray]:
        """Move documents `far` times as far as they lie from their mean, and find the score of each one's tenth."""
        rng = np.random.default_rng(0)
        rows = self._vectors[np.sort(rng.choice(len(self), min(ASKED, len(self)), replace=False))]
        step = far * np.sqrt(rows.var(axis=0).mean())
        moved = (rows + step * rng.standard_normal(rows.shape)).astype(np.float32)
        queries = moved / np.maximum(np.linalg.norm(moved, axis=1, keepdims=True), 1e-9)
        return queries, self._exactly(queries, min(K, len(self)), None, len(self)).scores[:, -1]

    def _recalls(self, codes: Codes, questions: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """Return the share of the ten nearest that is among the candidates, by how many are scored again."""
        found = codes.scan(questions[0], min(RESCORED[codes.width][-1], len(self))).numbers
        near = [
            (inner_products(self._vectors[rows], query) >= least - SLACK) & (rows >= 0)
            for query, least, rows in zip(*questions, found, strict=True)
        ]
        shares = np.cumsum(near, axis=1).clip(0, K).mean(axis=0) / K
        return np.array([shares[:count][-1] for count in RESCORED[codes.width]])

    # ------------------------------------------------------------------------------------------------- on disk

    def save(self, folder: Path) -> None:
        """Write everything that was not removed into an existing, empty folder, and go on with the files there."""
        kept = None if self._live is None else np.flatnonzero(self._live)
        self._vectors.write(folder / VECTORS, kept)
        self._numbers, arrays = self.numbers, {}
        if self.codes is not None:
            self.codes.rows.write(folder / CODES, kept)
            self.codes = self.codes.from_file(mapped(folder / CODES, np.uint8), kept)
            arrays = {**self.codes.arrays(), "quality": np.array(self.quality, np.float64)}
        self._vectors, self._live = _mapped_twice(folder / VECTORS), None
        arrays |= {"numbers": self._numbers, "built": np.array([self.built], np.int64)}
        write_arrays(folder, arrays, *([] if self.codes is None else [CODES]), VECTORS)


def _mapped_twice(path: Path) -> Rows:
    return Rows(mapped(path, np.float32), mapped(path, np.float32, scattered=True))


def _down_to(
    wanted: int, rows: np.ndarray, scores: np.ndarray, kept: np.ndarray | None, *, is_all: bool
) -> np.ndarray | None:
    """Return the rows that may be found and score no less than the `wanted`-th of them; None if some may be missing.

    Equal vectors have equal codes, so that either all of them are among these or none. And which rows they are depends
    on the codes alone: not on rows that were removed, nor on other queries.

    Args:
        wanted: 1 or more.
        rows: of one query, best first, of shape (count,); −1 for none.
        scores: by their codes, of shape (count,).
        kept: which rows may be found; None for all.
        is_all: whether there are no other rows.
    """
    there = rows >= 0 if kept is None else (rows >= 0) & kept[rows]
    complete = is_all or rows[-1] < 0
    if not there.all():
        rows, their = rows[there], scores[there]
    else:
        their = scores
    if len(rows) < wanted:
        return rows if complete else None
    if not complete and their[wanted - 1] <= scores[-1]:
        return None
    return rows[: np.searchsorted(-their, -their[wanted - 1], side="right")]
