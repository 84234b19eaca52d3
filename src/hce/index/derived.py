"""Derived: what an index makes of its store: an engine of documents, one of passages, and the words."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from hce.index.hierarchy import load_tree
from hce.index.live import Live
from hce.index.manifest import Manifest
from hce.index.mapped import all_vectors
from hce.index.mirror import Mirror, MirroredPart, document_engine, passage_engine
from hce.index.passages import passage_texts
from hce.index.store import Reader, Store
from hce.progress import counted, progress_bar
from hce.search.engine import ELSEWHERE, ENGINES, FILES, Engine, engine_for, load_engine, new_engine
from hce.search.milvus import MilvusEngine
from hce.search.passages import PassageEngine
from hce.search.words import Words

logger = logging.getLogger(__name__)

EnginePart = Live[Engine] | MirroredPart[MilvusEngine]
PassagesPart = Live[PassageEngine] | MirroredPart[PassageEngine]


class Derived:
    """The parts that are derived from a store.

    Attributes:
        engine: of the vectors of all documents.
        passages: the engine of the passages of long documents; of no use while there are none.
        words: of all texts.
        mirror: tells an engine that lives elsewhere of what is written; None where the engine is in this process.
        engine_name: the name of the engine that searches.
    """

    def __init__(self, store: Store, manifest: Manifest, mirror: Mirror | None = None) -> None:
        self._index = store.path.parent
        self.engine_name = _engine_in_use(store, manifest.engine)
        engine, passages, words = _builders(self._index, manifest, self.engine_name)
        self.mirror = mirror or (Mirror(store) if manifest.engine in ELSEWHERE else None)
        self.engine: EnginePart
        self.passages: PassagesPart
        if self.mirror is not None:
            self.engine = MirroredPart(self.mirror, document_engine)
            self.passages = MirroredPart(self.mirror, passage_engine)
        else:
            self.engine = Live(store, engine, manifest.suffix)
            self.passages = Live(store, passages, manifest.suffix)
        self.words: Live[Words] = Live(store, words, manifest.suffix)
        for part in (self.engine, self.words):
            if (snapshot := part.ahead()) is not None:
                logger.warning(
                    "%s knows of a later write than %s: writes were lost, by a missing or damaged %s-wal or an older "
                    "copy; restore both from a copy, or add again what is missing",
                    *(snapshot, store.path, store.path.name),
                )

    def parts(self, reader: Reader) -> list[Live[Any] | MirroredPart[Any]]:
        """Return the engine, the engine of passages where there are some at the reader's moment, and the words."""
        return [self.engine, *([self.passages] if reader.has_passages() else []), self.words]

    def load(self, reader: Reader) -> None:
        """Load now what the first search would load."""
        for part in self.parts(reader):
            part.load(reader)

    def follow(self) -> None:
        """Tell an engine that lives elsewhere of what was just written; one in this process needs no telling."""
        if self.mirror is not None:
            self.mirror.follow()

    def close(self) -> None:
        """Let go of the connection to an engine that lives elsewhere."""
        if self.mirror is not None:
            self.mirror.close()

    def take_up(self, manifest: Manifest) -> None:
        """Drop all parts, and build them from now on from the vectors of the encoder that `manifest` names."""
        engine, passages, words = _builders(self._index, manifest, self.engine_name)
        self.engine.take_up(engine, manifest.suffix, manifest.since)
        self.passages.take_up(passages, manifest.suffix, manifest.since)
        self.words.take_up(words, manifest.suffix, manifest.since)

    def keep(self, reader: Reader) -> None:
        """Have a snapshot of each part."""
        for part in self.parts(reader):
            part.keep(reader)

    def rebuild(self, reader: Reader, manifest: Manifest) -> None:
        """Make all parts anew of the documents there are, as a manifest names them."""
        self.engine_name = manifest.engine
        engine, passages, words = _builders(self._index, manifest, self.engine_name)
        self.engine.rebuild(reader, engine)  # elsewhere, along with the passages
        if self.mirror is None and reader.has_passages():
            self.passages.rebuild(reader, passages)
        self.words.rebuild(reader, words)


def _engine_in_use(store: Store, named: str) -> str:
    """Return the engine that the manifest names, or another where this version does not have that one any more."""
    with store.reading() as reader:
        chosen = named if named in (*ENGINES, *ELSEWHERE) else engine_for(reader.moment().documents)
    if chosen != named:
        path = store.path.parent
        logger.warning(
            "%s was made with the engine %s, which is no more; %s searches in its place, and "
            "'hce rebuild %s --engine %s' makes that permanent",
            *(path, named, chosen, path, chosen),
        )
    return chosen


def _builders(index: Path, manifest: Manifest, engine: str) -> tuple[EngineBuilder, PassagesBuilder, WordsBuilder]:
    return (
        EngineBuilder(engine, manifest.dtype, manifest.dim, index, manifest.suffix),
        PassagesBuilder(engine, manifest.dtype, manifest.dim),
        WordsBuilder(manifest.language),
    )


@dataclass(frozen=True)
class VectorsBuilder:
    """What makes an engine of vectors.

    Attributes:
        engine: the name of the engine.
        dtype: what it keeps vectors in.
        dim: the length of a vector.
    """

    engine: str
    dtype: str
    dim: int
    in_memory: ClassVar[bool] = True

    @property
    def identity(self) -> dict[str, Any]:
        """See `Builder`."""
        return {"engine": self.engine, "dtype": self.dtype, "dim": self.dim, "files": FILES}


@dataclass(frozen=True)
class EngineBuilder(VectorsBuilder):
    """Makes the engine of an index.

    Attributes:
        index: the folder of the index.
        suffix: of the folders of the encoder whose vectors they are.
    """

    index: Path
    suffix: str
    folder: ClassVar[str] = "engine"

    def build(self, reader: Reader) -> Engine:
        """Build the engine of all vectors."""
        tree = load_tree(self.index, self.suffix) if self.engine == "tree" else None  # flat has no use for it
        kept_in = "float32" if self.dtype == "float32" else "float16"
        with all_vectors(reader, self.index, kept_in) as (numbers, vectors):
            hierarchy = tree.hierarchy if tree is not None and np.array_equal(tree.numbers, numbers) else None
            return new_engine(
                self.engine, self.dim, numbers=numbers, vectors=vectors, dtype=self.dtype, hierarchy=hierarchy
            )

    def load(self, folder: Path) -> Engine:
        """Read a snapshot of an engine."""
        return load_engine(self.engine, folder, self.dim)

    def fits(self, part: Engine, numbers: np.ndarray) -> bool:
        """Tell whether the engine has a vector for each of these documents, and no other."""
        return np.array_equal(np.sort(part.numbers), numbers)

    def add(self, part: Engine, reader: Reader, after: int) -> int:
        """Add the vectors above a number."""
        numbers, vectors = reader.vectors(after)
        if len(numbers):
            part.add(numbers, vectors)
        return len(numbers)


class PassagesBuilder(VectorsBuilder):
    """Makes the engine of the passages of an index's long documents."""

    folder: ClassVar[str] = "passages"

    def build(self, reader: Reader) -> PassageEngine:
        """Build the engine of all passages."""
        return PassageEngine.build(self.engine, self.dim, *reader.passages(), self.dtype)

    def load(self, folder: Path) -> PassageEngine:
        """Read a snapshot of an engine of passages."""
        return PassageEngine.load(self.engine, folder, self.dim)

    def fits(self, part: PassageEngine, numbers: np.ndarray) -> bool:
        """Tell whether all passages are of these documents."""
        return bool(np.isin(part.documents, numbers).all())

    def add(self, part: PassageEngine, reader: Reader, after: int) -> int:
        """Add the passages of the documents above a number."""
        passages = reader.passages(after)
        if len(passages.numbers):
            part.add(*passages)
        return len(passages.numbers)


@dataclass(frozen=True)
class WordsBuilder:
    """Makes the words of an index, in a language."""

    language: str
    folder: ClassVar[str] = "words"
    in_memory: ClassVar[bool] = False

    @property
    def identity(self) -> dict[str, Any]:
        """See `Builder`."""
        return {"language": self.language, "words": Words.FORMAT}

    def build(self, reader: Reader) -> Words:
        """Index the words of all texts."""
        words = Words.new(self.language)
        self.add(words, reader, 0)
        return words

    def load(self, folder: Path) -> Words:
        """Read a snapshot of words."""
        return Words.load(folder, self.language)

    def fits(self, part: Words, numbers: np.ndarray) -> bool:
        """Tell whether there are as many texts."""
        return len(part) == len(numbers)

    def add(self, part: Words, reader: Reader, after: int) -> int:
        """Add the words of the texts above a number, and of the passages of the long ones."""
        with progress_bar("indexing words", reader.count_after(after), "documents") as advance:
            return part.add(counted(reader.texts(after), advance), passage_texts(reader, after))
