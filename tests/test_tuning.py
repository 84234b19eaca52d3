"""Labels fine-tune a transformer before it gets companions: enough of them, and only where held-out ones gain."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import labels_of_concepts

import hce.training.train
from hce.data.corpus import Corpus
from hce.data.judgments import Labels
from hce.encoding.encoder import Encoder
from hce.training.recipe import Recipe
from hce.training.train import memory_needs, train

QUICK = Recipe.for_encoder(static=False, epochs=1, batch_size=32, dev_queries=20, span_lengths=(4,))
LABELS = labels_of_concepts(80)


@pytest.fixture(autouse=True)
def quick(monkeypatch, static_encoder):
    """A random token table stands in for one that is distilled, and 60 labels are enough."""
    monkeypatch.setattr("hce.encoding.encoder.load_table_of", lambda *_: deepcopy(static_encoder.table))
    monkeypatch.setattr(hce.training.train, "LEAST_TO_TUNE", 60)


def tuned(
    corpus: Corpus, folder: Path, recipe: Recipe = QUICK, labels: Labels = LABELS, **options
) -> tuple[bool, list]:
    """Return whether training moved the transformer's weights, and the names of its stages."""
    given = Encoder.load(folder, device="cpu")
    fingerprint = given.fingerprint
    result = train(corpus, given, pairs=labels, recipe=recipe, **options)
    return result.encoder.parts[0].fingerprint != fingerprint, list(result.stages)


def test_enough_labels_fine_tune_a_transformer(concept_corpus, bert_folder, monkeypatch, tmp_path):
    monkeypatch.setattr(hce.training.train, "CLEAR", 99.0)
    moved, stages = tuned(concept_corpus, bert_folder, output=tmp_path / "model")
    assert moved and stages[0] == "fine-tuning"
    facts = json.loads((tmp_path / "model" / "hce.json").read_text())
    assert facts["recipe"]["train"] == "companion" and list(facts["stages"]) == stages
    lines = [json.loads(line) for line in (tmp_path / "model" / "dev.jsonl").read_text().splitlines()]
    assert facts["before"]["labeled"] == pytest.approx(sum(line["before"] for line in lines) / len(lines), abs=1e-4)


@pytest.mark.parametrize(("change", "is_kept"), [(-0.1, False), (0.0, True), (0.1, True)])
def test_what_held_out_labels_are_clearly_against_is_undone(concept_corpus, bert_folder, monkeypatch, change, is_kept):
    rng, ndcg = np.random.default_rng(0), []

    def measured(self, *_, **__):
        ndcg.append(ndcg[0] + change if ndcg else rng.random(len(self.panel[0].texts)))
        return {"labeled": ndcg[-1]}

    original = hce.training.train._Training._fit

    def fit(self, given):
        with monkeypatch.context() as patch:
            if not given.is_table:
                patch.setattr("hce.training.pairs.DevSet.ndcg", measured)
            return original(self, given)

    monkeypatch.setattr(hce.training.train._Training, "_fit", fit)
    moved, stages = tuned(concept_corpus, bert_folder)
    assert moved == is_kept and ("fine-tuning" in stages) == is_kept


@pytest.mark.parametrize(
    ("recipe", "labels"),
    [
        (QUICK, labels_of_concepts(59)),
        (Recipe.for_encoder(static=False, epochs=1, batch_size=32, dev_queries=20, train="companion"), LABELS),
        (Recipe.for_encoder(static=False, epochs=1, batch_size=32, dev_queries=20, mode="unsupervised"), LABELS),
    ],
)
def test_few_labels_and_other_wishes_leave_it_unchanged(concept_corpus, bert_folder, monkeypatch, recipe, labels):
    monkeypatch.setattr(hce.training.train, "CLEAR", 99.0)
    assert not tuned(concept_corpus, bert_folder, recipe, labels)[0]


def test_a_run_that_stopped_after_fine_tuning_ends_the_same(concept_corpus, bert_folder, monkeypatch, tmp_path):
    monkeypatch.setattr(hce.training.train, "CLEAR", 99.0)
    whole = train(concept_corpus, Encoder.load(bert_folder, device="cpu"), pairs=LABELS, recipe=QUICK)
    options = {"pairs": LABELS, "recipe": QUICK, "output": tmp_path / "model"}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(hce.training.train, "with_companions", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        train(concept_corpus, Encoder.load(bert_folder, device="cpu"), **options)
    monkeypatch.setattr("hce.training.steps.Trainer._step", None)  # nothing is trained twice
    again = train(concept_corpus, Encoder.load(bert_folder, device="cpu"), **options, resume=True)
    assert again.encoder.fingerprint == whole.encoder.fingerprint and again.stages == whole.stages


def test_memory_of_fine_tuning_is_counted(concept_corpus, bert_folder):
    """Half of two layers of 32 dimensions, worked out by hand."""
    encoder = Encoder.load(bert_folder, device="cpu")
    layer = 4 * (32 * 32 + 32) + (32 * 64 + 64) + (64 * 32 + 32) + 2 * 2 * 32  # attention, the inner layer, two norms
    pooler = 32 * 32 + 32
    vocabulary = len(encoder.tokenizer)
    weights = (vocabulary + 64 + 2) * 32 + 2 * 32 + 2 * layer + pooler  # words, positions, segments, their norm
    read_and_written = 4 * 64 + 2 * 96 + 64  # by the matrices of a layer, and of the pooler
    tokens = 2 * 32 * (48 - 2)  # 32 queries and 32 documents, each of 48 tokens less the two at its ends
    by_hand = 4 * (3 * weights + 3 * (layer + pooler)) + 6 * read_and_written * tokens

    fixed = 400 * 2**20 + len(concept_corpus) * (4 * 32 + 1200)
    assert memory_needs(concept_corpus, encoder, QUICK, LABELS) == {"training": fixed, "fine-tuning": fixed + by_hand}
    assert memory_needs(concept_corpus, encoder, QUICK) == {"training": fixed}  # no labels
    assert memory_needs(concept_corpus, encoder, replace(QUICK, train="companion"), LABELS) == {"training": fixed}
    whole = memory_needs(concept_corpus, encoder, replace(QUICK, train="encoder", mode="unsupervised"))
    kept = 2 * (4 * 64 + 2 * 96) + 64
    assert whole["fine-tuning"] == fixed + 4 * 6 * weights + 6 * kept * tokens  # both layers


def test_memory_for_a_table_grows_with_its_documents(concept_corpus, static_encoder):
    few = concept_corpus.only(np.arange(len(concept_corpus) // 2))
    one = 4 * static_encoder.dim + 1200
    more, fewer = (memory_needs(each, static_encoder, Recipe())["training"] for each in (concept_corpus, few))
    assert more - fewer == one * (len(concept_corpus) - len(few))
    sampled = memory_needs(concept_corpus, static_encoder, Recipe(most_documents=len(few)))
    assert sampled == {"training": fewer}
