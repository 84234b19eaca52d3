"""Verify: whether an index holds what it acknowledged, and whether its words, vectors and documents agree."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hce.encoding.encoder import Encoder
from hce.errors import HceError
from hce.index.check import check
from hce.index.index import Index
from hce.index.manifest import Manifest
from hce_lab.benchmarks.torture.samples import WORDS, Contents, Samples
from hce_lab.benchmarks.torture.tally import LOST, WRONG

LOOKED_FOR = ("w1", "w7", f"w{WORDS - 1}")


def encoder_of(path: Path, samples: Samples) -> Encoder:
    """Return the encoder that an index has, of the two that a reindexing changes it between."""
    try:
        has_other = path.exists() and Manifest.read(path).fingerprint == samples.fingerprint
    except HceError:
        has_other = False  # `faults_of` says what is wrong
    return Encoder.load(samples.model) if has_other else samples.encoder


def faults_of(path: Path, encoder: Encoder, allowed: list[Contents]) -> tuple[list[tuple[str, str]], Contents]:
    """Return what is wrong with an index, each with its kind, and what is in it.

    Args:
        path: of the index.
        encoder: what its vectors were made with.
        allowed: what may be in it: all that was acknowledged, with or without what was under way.
    """
    try:
        with Index.open(path, encoder) as index:
            wrong, found = _documents(index, allowed)
            wrong += _vectors(index, encoder) + _words(index, found)
        told = check(path)
    except HceError as error:
        return [(LOST, f"cannot be opened: {error}")], {}
    wrong += [(WRONG, f"hce check says {finding.part}: {finding.what}") for finding in told.findings]
    return wrong, found


def _documents(index: Index, allowed: list[Contents]) -> tuple[list[tuple[str, str]], Contents]:
    found = {each.id: (each.text, each.metadata["n"]) for each in index}
    wrong = []
    if found not in allowed:
        lost = {key: value for key, value in allowed[0].items() if found.get(key) != value}
        wrong.append((LOST, f"{len(found)} documents, not the {len(allowed[0])} acknowledged; e.g. {lost}"[:300]))
    if len(index) != len(found):
        wrong.append((WRONG, f"counts {len(index)} documents and holds {len(found)}"))
    tree = index.tree
    if tree is not None and len(tree.numbers) != len(tree.hierarchy):
        wrong.append((WRONG, "the tree is damaged"))
    return wrong, found


def _vectors(index: Index, encoder: Encoder) -> list[tuple[str, str]]:
    """Compare vectors with their texts, and searching with looking at all of them."""
    entries = list(index.state.entries())
    if not entries:
        return []
    wrong = []
    vectors = np.stack([entry.vector for entry in entries])
    if not np.allclose(vectors, encoder.encode([entry.document.full_text for entry in entries]), atol=1e-6):
        wrong.append((WRONG, "a vector is not its text's"))
    best = np.sort(encoder.encode(["w1 w2 w3"], "query") @ vectors.T)[0, ::-1][:5]
    # Under a condition, which all fulfil here, any engine is exact.
    scores = [hit.score for hit in index.search("w1 w2 w3", 5, {"n": {"gte": 0}}, "dense")]
    if not np.allclose(scores, best, atol=1e-5):
        wrong.append((WRONG, "searching does not find what exact search finds"))
    return wrong


def _words(index: Index, contents: Contents) -> list[tuple[str, str]]:
    """Name the words by which other documents are found than have them."""
    wrong = []
    for word in LOOKED_FOR:
        having = {doc_id for doc_id, (text, _) in contents.items() if word in text.split()}
        if {hit.id for hit in index.search(word, max(1, len(contents)), mode="words")} != having:
            wrong.append((WRONG, f"searching by words does not find the documents that have {word}"))
    return wrong
