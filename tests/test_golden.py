"""One seeded training and its index give the weights and the hits that are kept in tests/data/golden.json.

`HCE_GOLDEN=write pytest tests/test_golden.py` writes that file again, for a change that is meant to change them.
"""

from __future__ import annotations

import json
import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hce.data.corpus import Corpus
from hce.encoding.encoder import Encoder
from hce.index.index import Index
from hce.training.recipe import Recipe
from hce.training.train import train

GOLDEN = Path(__file__).parent / "data" / "golden.json"
RECIPE = Recipe.for_encoder(
    static=True,
    train="encoder",
    epochs=2,
    batch_size=32,
    learning_rate=0.05,
    span_lengths=(4,),
    dev_queries=40,
    seed=3,
)
QUERIES = ("w3 w12", "w41 w90 w7", "w151")


@pytest.fixture(scope="module")
def observed(concept_corpus, module_static_encoder, tmp_path_factory) -> dict[str, Any]:
    seen = observe(concept_corpus, deepcopy(module_static_encoder), tmp_path_factory.mktemp("golden"))
    if os.environ.get("HCE_GOLDEN") == "write":
        GOLDEN.write_text(json.dumps(seen, indent=1) + "\n", encoding="utf-8")
    return seen


def observe(corpus: Corpus, encoder: Encoder, folder: Path) -> dict[str, Any]:
    """Train, index and search; return projections of the vectors, which turn with any weight, and the hits."""
    result = train(corpus, encoder, recipe=RECIPE, output=folder / "model")
    vectors = result.encoder.encode(list(corpus.texts()))
    directions = np.random.default_rng(0).normal(size=(vectors.shape[1], 3))
    with Index.create(folder / "index", corpus, folder / "model", hierarchy=result.hierarchy) as index:
        rows = {mode: index.search(QUERIES, 5, mode=mode) for mode in ("dense", "words", "hybrid")}
    return {
        "dev": [epoch.dev for epoch in result.history],
        "tree": [len(level.centroids) for level in result.hierarchy.levels],
        "vectors": np.round(vectors[::24].astype(float) @ directions, 5).tolist(),
        "hits": {
            mode: [[[hit.id, round(float(hit.score), 5)] for hit in row] for row in each] for mode, each in rows.items()
        },
    }


@pytest.fixture(scope="module")
def golden(observed) -> dict[str, Any]:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def test_weights(observed, golden):
    np.testing.assert_allclose(observed["vectors"], golden["vectors"], atol=1e-3)


def test_tree_and_measures(observed, golden):
    assert observed["tree"] == golden["tree"]
    assert len(observed["dev"]) == len(golden["dev"])
    for seen, kept in zip(observed["dev"], golden["dev"], strict=True):
        assert seen == pytest.approx(kept, abs=1e-3)


@pytest.mark.parametrize("mode", ["dense", "words", "hybrid"])
def test_hits(observed, golden, mode):
    """Scores within rounding; documents whose scores differ by less may change places."""
    for seen, kept in zip(observed["hits"][mode], golden["hits"][mode], strict=True):
        assert [score for _, score in seen] == pytest.approx([score for _, score in kept], abs=2e-3)
        assert {name for name, _ in seen[:-1]} == {name for name, _ in kept[:-1]}
