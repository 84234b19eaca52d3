"""Making an index: from a corpus and an encoder to a new folder that appears whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hce.data.corpus import Corpus
from hce.data.documents import Document
from hce.encoding.corpus_vectors import encode_corpus
from hce.encoding.encoder import Encoder
from hce.errors import FormatError, InputError
from hce.files import new_folder, require_new, unfinished
from hce.index.encoder import ENCODER_FOLDER, file_stamps
from hce.index.live_engine import LiveEngine, NumberedHierarchy
from hce.index.manifest import Manifest
from hce.index.store import Store, now
from hce.index.writing import chunks_of, shared_vectors
from hce.progress import progress_bar
from hce.search.engine import ENGINES, codec_of
from hce.tree.hierarchy import Hierarchy
from hce.tree.names import name_nodes

FLAT_IS_FAST = 500_000  # documents; above, comparing each with the query takes a tenth of a second and more
MODEL_FILES = ("hce.json", "history.jsonl")
NUMBERS = "numbers.npy"

HierarchyChoice = Hierarchy | Literal["grow"] | None


@dataclass(frozen=True)
class Start:
    """The encoder that an index is made with, and what is known of its training.

    Attributes:
        encoder: it.
        fingerprint: of it; computing it takes a while.
        folder: the folder that `hce train` wrote it to, where it comes from one.
        facts: what that folder's hce.json says; else nothing.
    """

    encoder: Encoder
    fingerprint: str
    folder: Path | None
    facts: dict[str, Any]

    @property
    def base_encoder(self) -> str | None:
        """What it was trained from, as `Encoder.load` takes it."""
        name = self.facts.get("encoder")
        return str(name).removesuffix(", fitted") if name else None

    def tree_of(self, corpus: Corpus) -> Hierarchy | None:
        """The tree that was trained along with it, if that is of this corpus."""
        folder = None if self.folder is None else self.folder / "hierarchy"
        trained_on = self.facts.get("corpus", {}).get("fingerprint")
        return Hierarchy.load(folder) if folder and folder.is_dir() and trained_on == corpus.fingerprint else None


def start_from(encoder: Encoder | str | Path, corpus: Corpus) -> Start:
    """Load an encoder by its spec; a static table as it was distilled is first fitted to the corpus.

    Raises:
        InputError: there is no such encoder.
        FormatError: its hce.json is damaged.
    """
    loaded = encoder if isinstance(encoder, Encoder) else Encoder.load(encoder)
    if loaded.name == "static" and not isinstance(encoder, Encoder):
        loaded = loaded.fitted_to(corpus)
    folder, fingerprint = Path(loaded.name), loaded.fingerprint
    if not (folder / "hce.json").is_file():
        return Start(loaded, fingerprint, None, {})
    try:
        facts = json.loads((folder / "hce.json").read_text(encoding="utf-8"))
        is_of_it = facts["fingerprint"] == fingerprint
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{folder / 'hce.json'}: damaged ({error}); train or copy the model again") from error
    return Start(loaded, fingerprint, folder, facts) if is_of_it else Start(loaded, fingerprint, None, {})


def create_index(
    path: str | Path,
    documents: Corpus | Iterable[Document],
    encoder: Encoder | str | Path,
    hierarchy: HierarchyChoice,
    *,
    engine: str,
    dtype: str,
    progress: bool,
) -> None:
    """Encode, grow a tree if asked, and write; `hce.index.index.Index.create` says what the arguments are."""
    path = Path(path)
    require_new(path)
    if engine not in ("auto", *ENGINES):
        raise InputError(f"engine {engine!r}: choose auto or one of {', '.join(ENGINES)}")
    codec_of(dtype)
    corpus = documents if isinstance(documents, Corpus) else Corpus.from_documents(documents)
    if engine == "auto":
        engine = "flat" if len(corpus) <= FLAT_IS_FAST else "tree"
    if hierarchy is None and engine == "tree":
        hierarchy = "grow"
    start = start_from(encoder, corpus)
    # Named after what is encoded, so that vectors of another corpus or encoder do not stand in the way.
    part = unfinished(path) / f"{start.fingerprint[:12]}-{corpus.fingerprint[:12]}"
    vectors = encode_corpus(start.encoder, corpus, part, progress=progress)
    tree = _tree(hierarchy, start, corpus, vectors)
    with new_folder(path) as folder:
        start.encoder.save(folder / ENCODER_FOLDER)
        _copy_facts(start, folder)
        if tree is not None:
            save_tree(NumberedHierarchy(tree, np.arange(1, len(corpus) + 1)), folder / "hierarchy")
        manifest = _manifest(corpus, start, folder, engine, dtype, "hierarchy" if tree else None)
        _fill_store(folder, manifest, corpus, vectors, tree, progress)
        manifest.write(folder)
    del vectors  # a memory map of what is deleted next
    shutil.rmtree(unfinished(path), ignore_errors=True)


def grow_named_tree(vectors: np.ndarray, texts: Iterable[str], device: Any = None) -> Hierarchy | None:
    """A tree with names; None where there are too few documents for one."""
    if len(vectors) < 2:
        return None
    tree = Hierarchy.build(vectors, device=device)
    if not tree.levels:
        return None
    tree.names = name_nodes(tree, texts)
    return tree


def save_tree(tree: NumberedHierarchy, folder: Path) -> None:
    """Write a tree, and the numbers of its documents beside it."""
    tree.hierarchy.save(folder)
    np.save(folder / NUMBERS, tree.numbers, allow_pickle=False)


def load_tree(folder: Path) -> NumberedHierarchy:
    """Read what `save_tree` wrote.

    Raises:
        FormatError: nothing is there, or it is damaged.
    """
    hierarchy = Hierarchy.load(folder)
    try:
        numbers = np.load(folder / NUMBERS, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise FormatError(f"{folder / NUMBERS}: damaged ({error}); rebuild the index") from error
    if numbers.shape != (len(hierarchy),):
        raise FormatError(
            f"{folder / NUMBERS}: {len(numbers)} numbers for {len(hierarchy)} documents; rebuild the index"
        )
    return NumberedHierarchy(hierarchy, numbers)


def _tree(choice: HierarchyChoice, start: Start, corpus: Corpus, vectors: np.ndarray) -> Hierarchy | None:
    if isinstance(choice, Hierarchy):
        if len(choice) != len(corpus):
            raise InputError(f"the hierarchy is of {len(choice):,} documents, the corpus has {len(corpus):,}")
        if choice.levels and choice.levels[0].centroids.shape[1] != start.encoder.dim:
            raise InputError("the hierarchy is of vectors of another length than this encoder's")
        return choice if choice.levels else None
    trained = start.tree_of(corpus)
    if trained is not None or choice is None:
        return trained
    return grow_named_tree(vectors, corpus.texts(), start.encoder.device)


def _manifest(corpus: Corpus, start: Start, folder: Path, engine: str, dtype: str, hierarchy: str | None) -> Manifest:
    return Manifest(
        created=now(),
        documents=len(corpus),
        corpus={"name": corpus.name, "fingerprint": corpus.fingerprint},
        encoder=start.encoder.name,
        fingerprint=start.fingerprint,
        dim=start.encoder.dim,
        encoder_files=file_stamps(folder / ENCODER_FOLDER),
        base_encoder=start.base_encoder,
        engine=engine,
        dtype=dtype,
        hierarchy=hierarchy,
    )


def _copy_facts(start: Start, folder: Path) -> None:
    """Take along what is known of the training, for whoever shows it."""
    for name in MODEL_FILES:
        if start.folder is not None and (start.folder / name).is_file():
            (folder / "model").mkdir(exist_ok=True)
            shutil.copyfile(start.folder / name, folder / "model" / name)


def _fill_store(
    folder: Path, manifest: Manifest, corpus: Corpus, vectors: np.ndarray, tree: Hierarchy | None, progress: bool
) -> None:
    store = Store.create(folder, manifest.dim)
    with progress_bar("writing", len(corpus), "documents", show=progress) as advance:
        done = 0
        for chunk in chunks_of([corpus]):
            with store.writing() as writer:
                writer.insert(chunk, _shared_rows(writer.vectors_of, chunk, vectors[done : done + len(chunk)]))
            done += len(chunk)
            advance(len(chunk))
    numbers = np.arange(1, len(corpus) + 1)
    engine = LiveEngine(
        store, manifest.engine, manifest.dtype, lambda: NumberedHierarchy(tree, numbers) if tree else None
    )
    with store.reading() as reader:
        engine.rebuild(reader, manifest.engine, manifest.dtype)
    store.close()


def _shared_rows(known: Any, chunk: Sequence[Document], rows: np.ndarray) -> np.ndarray:
    """Rows with those of equal texts made the same; encoding in batches may have left them a rounding apart."""
    texts = [document.full_text for document in chunk]
    first = {text: row for row, text in reversed(list(enumerate(texts)))}
    return shared_vectors(texts, known(texts), lambda fresh: rows[[first[text] for text in fresh]])
