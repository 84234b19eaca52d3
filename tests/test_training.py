"""Training: it helps where there is something to learn, does no harm where there is not, and survives a kill."""

from __future__ import annotations

import copy
import json
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers.optimization import Adafactor

import hce.training.co_training
import hce.training.train
from hce.data.corpus import Corpus
from hce.data.judgments import Judgment, Labels, Qrels, Query
from hce.data.text import Document
from hce.encoding.encoder import Encoder
from hce.errors import InputError
from hce.training.co_training import weights_of
from hce.training.companion import with_companions
from hce.training.losses import false_negatives
from hce.training.model_folder import mean_over_kinds
from hce.training.pairs import (
    DevSet,
    InverseCloze,
    LabeledPairs,
    LabelSets,
    Sources,
    documents_to_learn,
    sources_and_devset,
)
from hce.training.recipe import Recipe
from hce.training.steps import Counters, Trainer, _Column
from hce.training.train import improvement, train
from hce.tree.hierarchy import Hierarchy

SMALL = Recipe.for_encoder(
    static=True,
    train="encoder",
    epochs=3,
    batch_size=32,
    learning_rate=0.05,
    span_lengths=(4,),
    dev_queries=40,
    fit_static=False,
)


# ------------------------------------------------------------------------------------------------------- what it does


def test_training_helps_and_reports_it(concept_corpus, static_encoder, tmp_path):
    seen = []
    result = train(concept_corpus, static_encoder, recipe=SMALL, output=tmp_path / "model", on_epoch=seen.append)
    assert mean_over_kinds(result.after) > mean_over_kinds(result.before) + 0.02
    assert seen == result.history
    assert [epoch.epoch for epoch in result.history] == list(range(len(result.history)))
    trained = result.history[1]
    assert set(trained.loss) == {"level_1", "level_2", "document", "neighbours"}
    assert len(trained.accuracy) == 2
    assert trained.reclustered
    assert 0 <= trained.churn <= 1
    assert result.stages == {"training": result.after}
    assert f"training {mean_over_kinds(result.before):.4f} → " in improvement(result)


def test_fitting_and_training_are_told_apart(concept_corpus, static_encoder):
    result = train(concept_corpus, static_encoder, recipe=replace(SMALL, fit_static=True))
    assert list(result.stages) == ["fitting", "training"]
    assert result.stages["fitting"] == result.history[0].dev != result.before
    assert result.stages["training"] == result.after
    values = [mean_over_kinds(each) for each in (result.before, *result.stages.values())]
    assert "fitting {:.4f} → {:.4f}, training → {:.4f}".format(*values) in improvement(result)


def test_the_model_folder_is_whole(concept_corpus, static_encoder, tmp_path):
    result = train(concept_corpus, static_encoder, recipe=SMALL, output=tmp_path / "model")
    texts = list(concept_corpus.texts())[:5]
    loaded = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    np.testing.assert_allclose(loaded.encode(texts), result.encoder.encode(texts), atol=1e-6)
    facts = json.loads((tmp_path / "model" / "hce.json").read_text())
    assert facts["fingerprint"] == result.encoder.fingerprint == Encoder.load(tmp_path / "model").fingerprint
    assert facts["corpus"]["fingerprint"] == concept_corpus.fingerprint
    assert Recipe(**{**facts["recipe"], "span_lengths": (4,)}) == result.recipe
    tree = Hierarchy.load(tmp_path / "model" / "hierarchy")
    assert tree.names is not None
    assert len(tree) == 240
    lines = (tmp_path / "model" / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [epoch.epoch for epoch in result.history]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]  # no state is left behind


def test_no_harm_where_nothing_can_be_learned(concept_corpus, static_encoder):
    """A learning rate of nearly 0 cannot beat F0, which comes back; and whatever a huge one does, none is the worse."""
    before = static_encoder.fingerprint
    wild = train(concept_corpus, deepcopy(static_encoder), recipe=replace(SMALL, learning_rate=1e6, epochs=1))
    assert mean_over_kinds(wild.after) >= mean_over_kinds(wild.before)
    result = train(concept_corpus, static_encoder, recipe=replace(SMALL, learning_rate=1e-12, epochs=1))
    assert result.mix == 0
    assert result.encoder.fingerprint == before
    assert "training did not beat the encoder" in improvement(result)
    assert result.after == result.before


def test_an_unchanged_transformer_has_the_same_measures_before_and_after(concept_corpus, bert_folder, monkeypatch):
    """Also where encoding all documents and encoding the pool, in other batches, differ in the last digits."""
    original = DevSet.measure
    monkeypatch.setattr(
        DevSet,
        "measure",
        lambda self, *given: {kind: value + 1e-3 for kind, value in original(self, *given).items()},
    )
    recipe = Recipe.for_encoder(
        static=False, train="encoder", epochs=1, batch_size=32, learning_rate=1e-12, dev_queries=24
    )
    result = train(concept_corpus, Encoder.load(bert_folder, device="cpu"), recipe=recipe)
    assert result.mix == 0
    assert result.after == result.before
    assert "returned unchanged" in improvement(result)


@pytest.mark.parametrize(
    "changes",
    [
        {"tree": False},
        {"cotrain": False},
        {"negatives": "fresh-siblings"},
        {"negatives": "mined"},
        {"negatives": "none"},
        {"levels": 1},
        {"levels": 0},
        {"branching": 4},
        {"optimizer": "adafactor"},
        {"centroid_learning_rate": 0.01, "warmup": 0.2, "margin": 0.9},
        {"chunk_size": 10},
    ],
)
def test_every_option_trains(concept_corpus, static_encoder, changes):
    result = train(concept_corpus, static_encoder, recipe=replace(SMALL, epochs=1, **changes))
    assert np.isfinite(list(result.history[1].loss.values())).all()
    assert result.history[1].metric != result.history[0].metric  # something moved
    if changes == {"tree": False}:
        assert set(result.history[1].loss) == {"document"}
    if changes == {"levels": 1}:
        assert set(result.history[1].loss) == {"level_1", "document", "neighbours"}


def test_the_corpus_is_clustered_anew_only_in_co_training(concept_corpus, static_encoder):
    for changes, is_clustered_anew in (({}, True), ({"cotrain": False}, False), ({"tree": False}, False)):
        result = train(concept_corpus, deepcopy(static_encoder), recipe=replace(SMALL, epochs=3, **changes))
        assert any(epoch.reclustered for epoch in result.history) == is_clustered_anew, changes


def test_an_epoch_is_no_longer_than_the_corpus(concept_corpus, static_encoder, concept_labels):
    """Labels may outnumber documents by far; then a pass over them takes several epochs."""
    source = InverseCloze(concept_corpus)
    for pairs, given, expected in ((source, 0, 7), (source, 100, 3), (source, 1000, 31)):
        recipe = replace(SMALL, epoch_pairs=given)
        trainer = Trainer(concept_corpus, static_encoder, Sources(None, pairs), recipe)
        assert trainer.steps_per_epoch == expected
        assert trainer.pairs_per_epoch == expected * 32
    few = LabeledPairs(concept_corpus, concept_labels.queries, concept_labels.qrels)
    trainer = Trainer(concept_corpus, static_encoder, Sources(few), SMALL)
    assert len(few) == 60
    assert trainer.steps_per_epoch == 7  # four turns; of 20 pairs there would be eight
    many = LabeledPairs(
        concept_corpus,
        concept_labels.queries,
        Qrels(Judgment(f"q{q}", f"d{d}", 1) for q in range(60) for d in range(20)),
    )
    trainer = Trainer(concept_corpus, static_encoder, Sources(many), SMALL)
    assert len(many) == 1200
    assert trainer.steps_per_epoch == 7


def test_a_batch_is_as_large_as_was_asked_for_and_the_bar_ends_where_it_said(
    concept_corpus, static_encoder, concept_labels
):
    """Batches were made a little smaller to be all alike, and the bar could end past its end."""
    vectors = static_encoder.encode(list(concept_corpus.texts()))
    spans, labeled = InverseCloze(concept_corpus), LabeledPairs(concept_corpus, *concept_labels)
    for sources in (Sources(None, spans), Sources(labeled, spans), Sources(labeled)):
        recipe = replace(SMALL, batch_size=100)
        trainer = Trainer(concept_corpus, copy.deepcopy(static_encoder), sources, recipe)
        trainer.use_tree(hce.training.co_training.cluster_corpus(vectors, recipe, static_encoder, 0), vectors)
        counts = [count for _, count in trainer.steps(Counters())]
        assert set(counts) == {100 if sources.supervised is None else 60}
        assert sum(counts) == trainer.pairs_per_epoch


def test_all_levels_have_a_loss_in_every_mode_and_size_unless_told_otherwise(
    concept_corpus, static_encoder, concept_labels
):
    vectors = static_encoder.encode(list(concept_corpus.texts()))
    long = {"epoch_pairs": 60_000, "epochs": 2}
    for labels, settings, expected in (
        (None, {}, 2),
        (None, long, 2),
        (None, {**long, "levels": 1}, 1),
        (concept_labels, {}, 2),
        (concept_labels, {"levels": 0}, 0),
    ):
        recipe = replace(SMALL, **{"levels": -1, "mode": "joint", **settings})
        dev = concept_labels.only(["q0"])
        sources, _ = sources_and_devset(concept_corpus, static_encoder, LabelSets(labels, dev=dev), recipe)
        trainer = Trainer(concept_corpus, static_encoder, sources, recipe)
        trainer.use_tree(hce.training.co_training.cluster_corpus(vectors, recipe, static_encoder, 0), vectors)
        assert len(trainer.objective.centroids) == expected


def test_the_three_scenarios(concept_corpus, static_encoder, concept_labels):
    assert train(concept_corpus, static_encoder, recipe=replace(SMALL, epochs=1)).recipe.mode == "unsupervised"
    joint = train(concept_corpus, static_encoder, pairs=concept_labels, recipe=SMALL)
    assert joint.recipe.mode == "joint"
    assert "labeled" in joint.metric
    assert joint.after["labeled"] > joint.before["labeled"]
    supervised = replace(SMALL, epochs=1, mode="supervised", keep="last")
    result = train(concept_corpus, static_encoder, pairs=concept_labels, recipe=supervised)
    assert result.recipe.mode == "supervised"
    assert len(result.history) == 2


def test_a_joint_step_is_the_weighted_sum_of_its_parts(concept_corpus, static_encoder, concept_labels):
    """L_J = L_S + α·L_U (Eq. 7); without labels, L_U alone, whatever α is."""
    pairs, spans = LabeledPairs(concept_corpus, *concept_labels), InverseCloze(concept_corpus, lengths=(4,))
    vectors = static_encoder.encode(list(concept_corpus.texts()))

    def first_loss(alpha: float, *sources) -> float:
        recipe = replace(SMALL, alpha=alpha, levels=1, negatives="none")
        trainer = Trainer(concept_corpus, copy.deepcopy(static_encoder), Sources(*sources), recipe)
        trainer.use_tree(hce.training.co_training.cluster_corpus(vectors, recipe, static_encoder, 0), vectors)
        return next(trainer.steps(Counters()))[0]["total"]

    supervised, unsupervised = first_loss(0.5, pairs), first_loss(0.5, None, spans)
    assert first_loss(0.5, pairs, spans) == pytest.approx(supervised + 0.5 * unsupervised)
    assert first_loss(2.0, pairs, spans) == pytest.approx(supervised + 2.0 * unsupervised)
    assert first_loss(2.0, None, spans) == unsupervised


def test_a_transformer_is_trained_in_bfloat16_if_asked_and_used_as_before(concept_corpus, bert_folder):
    recipe = Recipe.for_encoder(
        static=False, train="encoder", epochs=1, batch_size=32, learning_rate=1e-3, dev_queries=24
    )
    losses = {}
    for precision in ("float32", "bfloat16"):
        encoder = Encoder.load(bert_folder, device="cpu")
        result = train(concept_corpus, encoder, recipe=replace(recipe, precision=precision))
        assert result.recipe.precision == precision
        assert result.encoder.dtype == torch.float32
        assert {weight.dtype for weight in weights_of(result.encoder).values()} == {torch.float32}
        losses[precision] = result.history[1].loss["document"]
    assert losses["bfloat16"] != losses["float32"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02)


def test_precision_is_bfloat16_by_itself_where_it_is_fast(concept_corpus, bert_folder, static_encoder, monkeypatch):
    recipe = Recipe.for_encoder(static=False, train="encoder", epochs=1, batch_size=32, dev_queries=24)
    for fast in (torch.bfloat16, torch.float32):
        monkeypatch.setattr(hce.training.train, "fast_dtype", lambda device, fast=fast: fast)
        result = train(concept_corpus, Encoder.load(bert_folder, device="cpu"), recipe=recipe)
        assert result.recipe.precision == str(fast).removeprefix("torch.")
        assert train(concept_corpus, static_encoder, recipe=SMALL).recipe.precision == "float32"


def test_a_transformer_trains_with_simcse_and_ict(concept_corpus, bert_folder):
    recipe = Recipe.for_encoder(
        static=False, train="encoder", epochs=1, batch_size=32, learning_rate=1e-3, dev_queries=24
    )
    for changes in ({"pseudo": "simcse"}, {"chunk_size": 8}):
        encoder = Encoder.load(bert_folder, device="cpu")
        before = weights_of(encoder)
        result = train(concept_corpus, encoder, recipe=replace(recipe, keep="last", **changes))
        assert np.isfinite(result.history[1].metric)
        assert (
            any(not torch.equal(before[name], tensor) for name, tensor in weights_of(encoder).items()) or not result.mix
        )


def test_same_seed_same_weights(concept_corpus, bert_folder):
    recipe = Recipe.for_encoder(
        static=False, train="encoder", epochs=1, batch_size=32, learning_rate=1e-3, dev_queries=24
    )
    first, second = (train(concept_corpus, Encoder.load(bert_folder, device="cpu"), recipe=recipe) for _ in range(2))
    assert [epoch.dev for epoch in first.history] == [epoch.dev for epoch in second.history]
    assert first.encoder.fingerprint == second.encoder.fingerprint


def test_learning_rate_rises_and_falls(concept_corpus, static_encoder):
    recipe = replace(SMALL, epochs=2, warmup=0.5, learning_rate=1.0)
    trainer = Trainer(concept_corpus, static_encoder, Sources(None, InverseCloze(concept_corpus)), recipe)
    rates = []
    for step in range(2 * trainer.steps_per_epoch):
        trainer._set_learning_rate(step)
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    total = len(rates)
    assert rates[0] == pytest.approx(1 / (total / 2))
    assert rates[total // 2 - 1] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(1 / (total / 2))
    assert max(rates) <= 1


@pytest.mark.parametrize(("optimizer", "kind"), [("adamw", torch.optim.AdamW), ("adafactor", Adafactor)])
def test_centroids_move_by_the_encoders_optimizer_and_schedule(concept_corpus, static_encoder, optimizer, kind):
    vectors = static_encoder.encode(list(concept_corpus.texts()))
    settings = {"optimizer": optimizer, "centroid_learning_rate": 0.5, "warmup": 0.5, "epochs": 2}
    recipe = replace(SMALL, learning_rate=0.1, **settings)
    trainer = Trainer(concept_corpus, static_encoder, Sources(None, InverseCloze(concept_corpus)), recipe)
    trainer.use_tree(hce.training.co_training.cluster_corpus(vectors, recipe, static_encoder, 0), vectors)
    assert type(trainer.optimizer) is type(trainer.centroid_optimizer) is kind
    before = [centroids.detach().clone() for centroids in trainer.centroids]
    for _ in trainer.steps(Counters()):
        rates = [each.param_groups[0]["lr"] for each in (trainer.centroid_optimizer, trainer.optimizer)]
        assert rates[0] == pytest.approx(5 * rates[1])
    for old, new in zip(before, trainer.centroids, strict=True):
        assert (old - new).abs().max() > 0.01


def test_a_broken_gradient_of_centroids_reaches_no_weights(concept_corpus, static_encoder):
    vectors = static_encoder.encode(list(concept_corpus.texts()))
    recipe = replace(SMALL, centroid_learning_rate=0.5)
    trainer = Trainer(concept_corpus, static_encoder, Sources(None, InverseCloze(concept_corpus)), recipe)
    trainer.use_tree(hce.training.co_training.cluster_corpus(vectors, recipe, static_encoder, 0), vectors)
    trainer.centroids[-1].register_hook(lambda gradient: gradient * torch.inf)
    before = [*trainer.centroids, *static_encoder.model.parameters()]
    copies = [tensor.detach().clone() for tensor in before]
    counters = Counters()
    losses = [losses["total"] for losses, _ in trainer.steps(counters)]
    assert len(losses) == 1 and np.isnan(losses[0]) and counters.steps_in_all == 0
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(before, copies, strict=True))


def test_cached_gradients_train_the_same_weights(concept_corpus, static_encoder):
    other = copy.deepcopy(static_encoder)
    plain = train(concept_corpus, copy.deepcopy(static_encoder), recipe=replace(SMALL, epochs=1, keep="last"))
    cached = train(concept_corpus, other, recipe=replace(SMALL, epochs=1, keep="last", chunk_size=7))
    for name, tensor in weights_of(plain.encoder).items():
        torch.testing.assert_close(tensor, weights_of(cached.encoder)[name], atol=1e-4, rtol=1e-4)


# -------------------------------------------------------------------------------------------------- when things break


def break_the_loss(monkeypatch, step: int) -> None:
    original, calls = Trainer._step, []

    def breaking(self, parts):
        values = original(self, parts)
        calls.append(1)
        return {**values, "total": float("nan")} if len(calls) == step else values

    monkeypatch.setattr(Trainer, "_step", breaking)


def test_nan_stops_and_keeps_the_best(concept_corpus, static_encoder, monkeypatch, caplog):
    break_the_loss(monkeypatch, 10)
    result = train(concept_corpus, static_encoder, recipe=SMALL)
    assert "the loss is nan at step 10 (epoch 2)" in caplog.text
    assert len(result.history) == 2
    assert mean_over_kinds(result.after) >= mean_over_kinds(result.before)


def test_where_the_loss_breaks_the_best_epoch_counts_as_the_last(concept_corpus, static_encoder, monkeypatch):
    """The best is the start here: it came back, and was said to be of the first epoch."""
    break_the_loss(monkeypatch, 10)
    measures = iter([0.5, 0.4])
    monkeypatch.setattr(hce.training.co_training, "_measure", lambda *_: {"labeled": np.array([next(measures)])})
    before = static_encoder.fingerprint
    result = train(concept_corpus, static_encoder, recipe=replace(SMALL, keep="last"))
    assert result.encoder.fingerprint == before
    assert (result.mix, result.stages, len(result.history)) == (0, {}, 2)
    assert result.after == result.before


def test_a_step_with_a_broken_loss_leaves_the_weights_alone(concept_corpus, static_encoder):
    trainer = Trainer(concept_corpus, static_encoder, Sources(None, InverseCloze(concept_corpus)), SMALL)
    vectors = static_encoder.encode(list(concept_corpus.texts()))
    trainer.use_tree(hce.training.co_training.cluster_corpus(vectors, SMALL, static_encoder, 0), vectors)
    vectors[:] = float("nan")
    before = static_encoder.fingerprint
    values, _ = next(trainer.steps(Counters()))
    assert np.isnan(values["total"])
    assert static_encoder.fingerprint == before


def run_and_die(folder: Path, model: Path, steps: int) -> None:
    """Train, and be killed after so many steps."""
    original, calls = Trainer._step, []

    def dying(self, parts):
        if len(calls) == steps:
            os.kill(os.getpid(), signal.SIGKILL)
        calls.append(1)
        return original(self, parts)

    Trainer._step = dying
    hce.training.co_training.SECONDS_BETWEEN_CHECKPOINTS = 0.0  # a checkpoint after every step
    train(Corpus.load(folder / "docs.jsonl"), Encoder.load(model, device="cpu"), recipe=RESUMED, output=folder / "out")


RESUMED = Recipe.for_encoder(
    static=False,
    train="encoder",
    epochs=2,
    batch_size=48,
    learning_rate=1e-3,
    dev_queries=24,
    centroid_learning_rate=1e-3,
)


@pytest.mark.parametrize("steps", [0, 2, 6])
def test_resume_after_kill_9_is_as_if_nothing_had_happened(forkserver, concept_corpus, bert_folder, tmp_path, steps):
    """With dropout, Adam, trained centroids and a tree that changes: the same history and the same weights."""
    (tmp_path / "docs.jsonl").write_text("\n".join(document.to_json() for document in concept_corpus))
    corpus = Corpus.load(tmp_path / "docs.jsonl")
    whole = train(corpus, Encoder.load(bert_folder, device="cpu"), recipe=RESUMED, output=tmp_path / "whole")
    child = forkserver.Process(target=run_and_die, args=(tmp_path, bert_folder, steps))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="add --resume"):
        train(corpus, Encoder.load(bert_folder, device="cpu"), recipe=RESUMED, output=tmp_path / "out")
    again = train(corpus, Encoder.load(bert_folder, device="cpu"), recipe=RESUMED, output=tmp_path / "out", resume=True)
    assert [(e.dev, e.loss, e.churn) for e in again.history] == [(e.dev, e.loss, e.churn) for e in whole.history]
    assert again.encoder.fingerprint == whole.encoder.fingerprint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["docs.jsonl", "out", "whole"]


@pytest.fixture
def unfinished(concept_corpus, static_encoder, tmp_path, monkeypatch) -> Path:
    """The output folder of a run that stopped before its end, on a copy of the encoder."""

    class StopError(Exception):
        pass

    def stop(*arguments, **options):
        raise StopError

    with monkeypatch.context() as patch, pytest.raises(StopError):
        patch.setattr(hce.training.co_training, "_finish", stop)
        train(concept_corpus, copy.deepcopy(static_encoder), recipe=SMALL, output=tmp_path / "out")
    return tmp_path / "out"


def test_checkpoints_have_the_names_that_they_always_had(unfinished):
    (facts,) = unfinished.with_name("out.unfinished").glob("state-*/facts.json")
    assert list(json.loads(facts.read_text())["progress"]) == ["epoch", "batch", "step", "sums"]


def test_resume_after_a_kill_before_vectors_of_nearly_the_same_weights_were_noted(
    concept_corpus, static_encoder, tmp_path, monkeypatch
):
    """Where other processes go on, sums are made in another order, and weights differ in the last digits."""
    original = hce.training.co_training.cluster_corpus

    def killed(vectors, recipe, encoder, clustering_number):
        if clustering_number:
            raise KeyboardInterrupt
        return original(vectors, recipe, encoder, clustering_number)

    whole = train(concept_corpus, copy.deepcopy(static_encoder), recipe=SMALL)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(hce.training.co_training, "cluster_corpus", killed)
        train(concept_corpus, copy.deepcopy(static_encoder), recipe=SMALL, output=tmp_path / "out")
    (left,) = [path for path in tmp_path.glob("out.unfinished/vectors-*/manifest.json") if "vectors-0" not in str(path)]
    left.write_text(json.dumps(json.loads(left.read_text()) | {"encoder": "nearly the same"}))
    resumed = train(concept_corpus, static_encoder, recipe=SMALL, output=tmp_path / "out", resume=True)
    assert resumed.encoder.fingerprint == whole.encoder.fingerprint


def test_resume_refuses_other_settings(concept_corpus, static_encoder, unfinished):
    with pytest.raises(InputError, match="another setting seed;"):
        train(concept_corpus, static_encoder, recipe=replace(SMALL, seed=5), output=unfinished, resume=True)


def test_resume_refuses_another_encoder(concept_corpus, static_encoder, unfinished):
    with torch.no_grad():
        static_encoder.model[0].embedding.weight += 1
    with pytest.raises(InputError, match="another encoder;"):
        train(concept_corpus, static_encoder, recipe=SMALL, output=unfinished, resume=True)


def test_broken_weights_in_the_first_epoch_give_back_the_first_ones(concept_corpus, static_encoder, monkeypatch):
    before, original = static_encoder.fingerprint, Trainer._step

    def breaking(self, parts):
        values = original(self, parts)
        with torch.no_grad():
            self.encoder.model[0].embedding.weight[:] = float("nan")
        return {**values, "total": float("nan")}

    monkeypatch.setattr(Trainer, "_step", breaking)
    result = train(concept_corpus, static_encoder, recipe=SMALL)
    assert result.mix == 0
    assert result.encoder.fingerprint == before


# ------------------------------------------------------------------------------------------------- what it never does


def test_equal_texts_are_never_negatives(concept_corpus, static_encoder):
    doubled = [*concept_corpus, *(Document(f"again-{d.id}", d.text, d.title) for d in concept_corpus)]
    corpus = Corpus.from_documents(doubled)
    trainer = Trainer(corpus, static_encoder, Sources(None, InverseCloze(corpus)), SMALL)
    assert (trainer.corpus.text_groups[:240] == trainer.corpus.text_groups[240:]).all()
    assert len(set(trainer.corpus.text_groups.tolist())) == 240
    vectors = static_encoder.encode(list(corpus.texts()))
    trainer.use_tree(hce.training.co_training.cluster_corpus(vectors, SMALL, static_encoder, 0), vectors)
    positions = torch.tensor([[0, 240, 0], [1, 5, 1]])  # document, sampled, known
    positives = trainer.objective._documents(positions[:, 0], torch.zeros(2, 32))
    sampled = trainer.objective._documents(positions[:, 1:2], torch.zeros(2, 1, 32))
    assert false_negatives(positives, sampled).tolist() == [[True], [False]]


def test_dev_queries_are_not_trained_on(concept_corpus, static_encoder, concept_labels, caplog, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "hce.training.pairs.LabeledPairs",
        lambda corpus, queries, qrels, **how: seen.append(set(qrels)) or LabeledPairs(corpus, queries, qrels, **how),
    )
    dev = concept_labels.only([f"q{i}" for i in range(20)])
    train(concept_corpus, static_encoder, pairs=concept_labels, dev=dev, recipe=replace(SMALL, epochs=1))
    assert seen == [{f"q{i}" for i in range(20, 60)}]
    assert "20 dev queries are among the pairs too" in caplog.text


def test_generated_queries_are_trained_on_and_not_measured_by(concept_corpus, static_encoder, concept_labels):
    result = train(concept_corpus, static_encoder, generated=concept_labels, recipe=replace(SMALL, epochs=1))
    assert result.recipe.mode == "joint"
    assert "pseudo-queries" in result.metric


def test_nothing_is_learned_of_held_out_documents_from_generated_queries_either(concept_corpus, static_encoder):
    """Not as answers and so not as negatives; without labels, they are what the weights are chosen by."""
    ids = concept_corpus.ids
    queries = {f"g{number}": Query(f"g{number}", f"w{number}") for number in range(len(ids))}
    generated = Labels(queries, Qrels([Judgment(f"g{number}", each, 1) for number, each in enumerate(ids)]))
    sources, _ = sources_and_devset(concept_corpus, static_encoder, LabelSets(None, generated, None), SMALL)
    asked = set(sources.supervised.pairs[:, 1].tolist())
    assert len(sources.held_out)
    assert asked == set(range(len(ids))) - set(sources.held_out.tolist())
    held_out = generated.among({ids[position] for position in sources.held_out.tolist()})
    with pytest.raises(InputError, match=r"all belong to documents held out .*--set hold_out=false"):
        sources_and_devset(concept_corpus, static_encoder, LabelSets(None, held_out, None), SMALL)
    everywhere, _ = sources_and_devset(
        concept_corpus, static_encoder, LabelSets(None, generated, None), replace(SMALL, hold_out=False)
    )
    assert len(everywhere.supervised) == len(ids)


def test_fewer_pairs_than_a_batch_come_as_often_as_is_said(concept_corpus, static_encoder, concept_labels):
    """Up to eight times an epoch, as long as that is no more than there are documents."""
    pairs = LabeledPairs(concept_corpus, *concept_labels.only(list(concept_labels.qrels)[:20]))
    recipe = replace(SMALL, batch_size=64)
    trainer = Trainer(concept_corpus, static_encoder, Sources(pairs), recipe)
    turns = min(8, len(concept_corpus) // len(pairs))
    assert turns > 1
    assert trainer.steps_per_epoch == turns
    assert trainer.pairs_per_epoch == turns * len(pairs)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("hce.training.steps.process_count", lambda: 65)
        with pytest.raises(InputError, match="a batch of 64 pairs cannot be divided among 65 processes; use fewer"):
            Trainer(concept_corpus, static_encoder, Sources(pairs), recipe)


def test_a_better_table_is_not_refitted(concept_corpus, static_encoder):
    """Fitting is kept only where it is better on dev than what was given."""
    trained = train(concept_corpus, static_encoder, recipe=replace(SMALL, epochs=5)).encoder
    fingerprint = trained.fingerprint
    again = train(concept_corpus, trained, recipe=replace(SMALL, epochs=1, learning_rate=1e-9, fit_static=True))
    if mean_over_kinds(again.after) == mean_over_kinds(again.before):
        assert again.encoder.fingerprint == fingerprint
    assert mean_over_kinds(again.after) >= mean_over_kinds(again.before)


# --------------------------------------------------------------------------------------------------------- bad input


def test_bad_input_is_one_line(concept_corpus, static_encoder, concept_labels, tmp_path):
    one = Corpus.from_documents([Document("a", "star red")])

    def start(**changes):
        return train(concept_corpus, static_encoder, recipe=replace(SMALL, **changes))

    cases = [
        (lambda: train(one, static_encoder), "at least 2 documents"),
        (
            lambda: train(concept_corpus, static_encoder, recipe=replace(SMALL, batch_size=999)),
            "larger than the corpus",
        ),
        (
            lambda: train(concept_corpus, static_encoder, recipe=replace(SMALL, mode="supervised")),
            "needs labeled pairs",
        ),
        (lambda: train(concept_corpus, static_encoder, recipe=replace(SMALL, pseudo="simcse")), "has no dropout"),
        (lambda: Recipe(epochs=0), "epochs 0: has to be above 0"),
        (lambda: Recipe(seed=-1), "seed -1: cannot be below 0"),
        (lambda: Recipe(branching=1), "branching 1"),
        (lambda: Recipe(optimizer="sgd"), "choose one of adamw, adafactor"),
        (lambda: Recipe(span_lengths=()), "span_lengths"),
        (lambda: Recipe.for_encoder(static=True, speed=3), "unknown setting speed"),
    ]
    for call, message in cases:
        with pytest.raises(InputError) as caught:
            call()
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis").write_text("precious")
    with pytest.raises(InputError, match="not an empty folder"):
        train(concept_corpus, static_encoder, recipe=SMALL, output=tmp_path / "full")
    assert (tmp_path / "full" / "thesis").read_text() == "precious"
    few = Labels({"a": Query("a", "x")}, Qrels([Judgment("a", concept_corpus[0].id, 1)]))
    with pytest.raises(InputError, match="too few to hold some out"):
        train(concept_corpus, static_encoder, pairs=few, recipe=SMALL)


def test_a_batch_of_few_documents_is_a_quarter_of_them_unless_set():
    assert Recipe.for_encoder(static=True, documents=100).batch_size == 25
    assert Recipe.for_encoder(static=True, documents=3).batch_size == 2
    assert Recipe.for_encoder(static=True, documents=100, batch_size=64).batch_size == 64
    assert Recipe.for_encoder(static=True, documents=10_000).batch_size == 256


def test_fewer_pairs_than_processes_are_refused(concept_corpus, monkeypatch):
    monkeypatch.setattr("hce.training.pairs.process_count", lambda: 3)
    Sources(unsupervised=InverseCloze(concept_corpus, np.arange(3)))
    with pytest.raises(InputError, match="2 pairs cannot be divided among 3 processes"):
        Sources(unsupervised=InverseCloze(concept_corpus, np.arange(2)))


def test_warnings_before_training_on_what_cannot_help(static_encoder, caplog):
    tiny = Corpus.from_documents(Document(f"d{i}", f"star w{i} w{i + 1} red w{i + 2}") for i in range(40))
    train(tiny, static_encoder, recipe=replace(SMALL, epochs=1, batch_size=8))
    assert "only 40 documents" in caplog.text
    assert "fewer than 16 words" in caplog.text


def test_a_full_disk_is_one_line_and_the_run_goes_on(concept_corpus, static_encoder, tmp_path):
    """A real limit on file size stands in for a disk that fills up while vectors, then while a state is written."""
    static_encoder.save(tmp_path / "encoder")
    whole = train(concept_corpus, Encoder.load(tmp_path / "encoder", device="cpu"), recipe=SMALL)
    for limit, complaint in ((20_000, "vectors cannot be written"), (40_000, "state of the run cannot be written")):
        with file_size_limit(limit), pytest.raises(InputError, match=complaint):
            encoder = Encoder.load(tmp_path / "encoder", device="cpu")
            train(concept_corpus, encoder, recipe=SMALL, output=tmp_path / "model", resume=True)
        assert not (tmp_path / "model").exists()
    encoder = Encoder.load(tmp_path / "encoder", device="cpu")
    resumed = train(concept_corpus, encoder, recipe=SMALL, output=tmp_path / "model", resume=True)
    assert resumed.encoder.fingerprint == whole.encoder.fingerprint


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_of_many_documents_a_sample_is_learnt_from_and_all_that_labels_name(concept_corpus, concept_labels):
    assert documents_to_learn(concept_corpus, Recipe(most_documents=240)) is concept_corpus
    assert documents_to_learn(concept_corpus, Recipe(most_documents=0)) is concept_corpus
    some = documents_to_learn(concept_corpus, Recipe(most_documents=50))
    assert len(set(some.ids)) == 50
    assert some.ids == [each for each in concept_corpus.ids if each in set(some.ids)]
    assert some.name == "concepts, 50 of 240 documents"
    assert some.fingerprint == documents_to_learn(concept_corpus, Recipe(most_documents=50)).fingerprint
    assert some.fingerprint != documents_to_learn(concept_corpus, Recipe(most_documents=50, seed=1)).fingerprint
    named = {each.document_id for each in concept_labels.qrels.judgments()}
    with_labels = documents_to_learn(concept_corpus, Recipe(most_documents=len(named) + 9), [concept_labels, None])
    assert named < set(with_labels.ids)
    assert len(with_labels) == len(named) + 9
    assert set(documents_to_learn(concept_corpus, Recipe(most_documents=5), [concept_labels]).ids) == named


@pytest.mark.parametrize("keep", ["mix", "best", "last"])
def test_companions_are_chosen_by_the_vectors_of_the_training(concept_corpus, static_encoder, monkeypatch, keep):
    """Alg. 3 hands on the vectors of the weights that it returns, and nobody encodes the corpus again."""
    handed = []

    def noted(corpus, encoder, fit, *arguments, **options):
        handed.append((fit.vectors, encoder.encode(list(corpus.texts()))))
        return with_companions(corpus, encoder, fit, *arguments, **options)

    monkeypatch.setattr("hce.training.train.with_companions", noted)
    monkeypatch.setattr("hce.training.companion.encode_corpus", lambda *_, **__: pytest.fail("encoded again"))
    train(concept_corpus, static_encoder, recipe=replace(SMALL, train="both", keep=keep, epochs=2))
    ((vectors, encoded),) = handed
    np.testing.assert_allclose(vectors, encoded, atol=1e-6)


# ------------------------------------------------------------------------------------------------- cheaper transformers


def test_frozen_layers_and_embeddings_stay(concept_corpus, bert_folder):
    encoder = Encoder.load(bert_folder, device="cpu")
    before = weights_of(encoder)
    recipe = Recipe.for_encoder(
        static=False, train="encoder", epochs=1, batch_size=32, learning_rate=1e-3, dev_queries=24, frozen=0.5
    )
    result = train(concept_corpus, encoder, recipe=replace(recipe, keep="last", dropout=False))
    moved = {name for name, tensor in weights_of(result.encoder).items() if not torch.equal(before[name], tensor)}
    assert moved and all(".layer.1." in name for name in moved)
    assert all(parameter.requires_grad for parameter in result.encoder.model.parameters())


def test_texts_of_like_length_are_encoded_together_in_their_order(concept_corpus, bert_folder, monkeypatch):
    """Small batches by length give the gradient of one large batch."""
    monkeypatch.setattr("hce.encoding.encoder.CPU_TOKENS", 24)
    encoder = Encoder.load(bert_folder, device="cpu")
    recipe = Recipe.for_encoder(static=False, train="encoder", batch_size=8)
    trainer = Trainer(concept_corpus, encoder, Sources(None, InverseCloze(concept_corpus)), recipe)
    texts = ["w1", "w2 w3 w4 w5 w6 w7 w8", "w9 w10", "w11 w12 w13 w14 w15", ""]
    assert len(list(encoder.batches(texts, "document"))) > 1
    found = trainer._embed(_Column("document", texts))
    np.testing.assert_allclose(found.detach().numpy(), encoder.encode(texts), atol=1e-6)
