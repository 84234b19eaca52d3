"""Two processes train as one: same loss, same gradients, same weights; no hang when a batch cannot be shared evenly."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import WORDS, fast_tokenizer, labels_of_concepts
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from transformers import T5Config, T5ForConditionalGeneration

from hce.data.corpus import Corpus
from hce.encoding.corpus_vectors import encode_corpus
from hce.encoding.encoder import Encoder
from hce.processes import _packed, _unpacked, own_rows, share_out, working_together
from hce.training.co_training import cluster_corpus
from hce.training.pairs import InverseCloze, LabeledPairs, Sources
from hce.training.recipe import Recipe
from hce.training.steps import Counters, Trainer
from hce.training.train import train
from hce.tree.hierarchy import Hierarchy
from hce.tree.kmeans import run_all

CPU = torch.device("cpu")
RECIPE = Recipe.for_encoder(
    static=True, epochs=1, batch_size=32, learning_rate=0.05, span_lengths=(4,), dev_queries=16, fit_static=False
)
PAPER = Recipe.paper(
    epochs=1,
    epoch_pairs=64,
    batch_size=32,
    chunk_size=8,
    span_lengths=(4,),
    dev_queries=16,
    precision="float32",
    dropout=False,  # of which each process draws its own
)


def two_steps(corpus: Corpus, encoder: Encoder, recipe: Recipe, *, labeled: bool = False) -> dict[str, object]:
    """Losses of two steps and the weights after them; with labels, negatives are chosen as the queries are encoded."""
    vectors = encode_corpus(encoder, corpus)
    pairs = LabeledPairs(corpus, *labels_of_concepts(60)) if labeled else None
    trainer = Trainer(corpus, encoder, Sources(pairs, InverseCloze(corpus, lengths=(4,))), recipe)
    trainer.use_tree(cluster_corpus(vectors, recipe, encoder, 0), vectors)
    losses = []
    for values, _ in trainer.steps(Counters()):
        losses.append(values)
        if len(losses) == 2:
            break
    weights = torch.cat([weight.detach().flatten() for weight in encoder.model.parameters()])
    return {"losses": losses, "weights": weights.tolist(), "vectors": float(np.abs(vectors).sum())}


def the_papers_steps(corpus: Corpus, folder: Path) -> dict[str, object]:
    """Two steps of HCE-J on a T5."""
    return two_steps(corpus, Encoder.load(folder / "gtr", device="cpu"), PAPER, labeled=True)


def the_papers_training(corpus: Corpus, folder: Path) -> dict[str, object]:
    """HCE-J from a T5 that was never an encoder of sentences: two epochs, trees and dev measures included."""
    encoder = Encoder.load(folder / "t5", device="cpu")
    labels = labels_of_concepts(80)
    recipe = replace(PAPER, epochs=2, learning_rate=1e-2, centroid_learning_rate=1e-2)
    dev = labels.only(list(labels.qrels)[60:])
    result = train(corpus, encoder, pairs=labels.without(dev.qrels), dev=dev, recipe=recipe)
    weights = torch.cat([weight.detach().flatten() for weight in result.encoder.model.parameters()])
    modules = [type(module).__name__ for module in result.encoder.model]
    return {"dev": [epoch.dev for epoch in result.history], "modules": modules, "weights": weights.tolist()}


def trees(vectors: np.ndarray) -> list[dict]:
    """Trees by every way of growing one: parents, and centroids to the last bit."""
    vectors = np.concatenate([vectors, np.random.default_rng(0).normal(size=(1200, 32)).astype(np.float32)])
    grown = []
    for mode in ("exact", "fast"):
        with working_together():
            tree = Hierarchy.build(vectors, 4, mode=mode)
        digests = [hashlib.sha256(level.centroids.tobytes()).hexdigest() for level in tree.levels]
        grown.append({"parents": tree.document_parent.tolist(), "centroids": digests})
    return grown


def results_of_tasks() -> dict[str, object]:
    """What tasks return, among it what adding up over processes would spoil; and which items this process ran."""
    ran: list[int] = []

    def task(item: int) -> tuple[int, list[float], None]:
        ran.append(item)
        return -item, [-1.0] * item, None

    with working_together():
        results = run_all(task, range(7), CPU)
        nested = run_all(lambda item: run_all(lambda inner: inner - item, range(item), CPU), range(3), CPU)
        nothing = run_all(task, [], CPU)
    return {"results": results, "nested": nested, "nothing": nothing, "ran": sorted(ran)}


def member(rank: int, folder: Path, job: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    corpus, encoder = Corpus.load(folder / "docs.jsonl"), Encoder.load(folder / "encoder", device="cpu")
    if job in ("steps", "labeled steps"):
        result: object = two_steps(corpus, encoder, RECIPE, labeled=job == "labeled steps")
    elif job == "the paper's steps":
        result = the_papers_steps(corpus, folder)
    elif job == "the paper's training":
        result = the_papers_training(corpus, folder)
    elif job == "trees":
        result = trees(encode_corpus(encoder, corpus, folder / "vectors"))
    elif job == "tasks":
        result = results_of_tasks()
    else:
        trained = train(corpus, encoder, recipe=replace(RECIPE, batch_size=31, epochs=2))
        result = {"dev": [epoch.dev for epoch in trained.history], "weights": trained.encoder.fingerprint}
    (folder / f"result-{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def run_two(context, folder: Path, job: str) -> list[dict]:
    members = [context.Process(target=member, args=(rank, folder, job)) for rank in range(2)]
    for each in members:
        each.start()
    for each in members:
        each.join(timeout=240)
        assert each.exitcode == 0
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture
def folder(tmp_path, concept_corpus, static_encoder) -> Path:
    (tmp_path / "docs.jsonl").write_text("\n".join(document.to_json() for document in concept_corpus))
    static_encoder.save(tmp_path / "encoder")
    return tmp_path


@pytest.mark.parametrize("job", ["steps", "labeled steps"])
def test_two_processes_take_the_steps_of_one(forkserver, folder, job):
    corpus, encoder = Corpus.load(folder / "docs.jsonl"), Encoder.load(folder / "encoder", device="cpu")
    alone = two_steps(corpus, encoder, RECIPE, labeled=job == "labeled steps")
    first, second = run_two(forkserver, folder, job)
    assert first["losses"] == second["losses"]
    for ours, theirs in zip(alone["losses"], first["losses"], strict=True):
        for name, value in ours.items():
            assert theirs[name] == pytest.approx(value, abs=1e-5), name
    np.testing.assert_allclose(first["weights"], alone["weights"], atol=1e-5)
    np.testing.assert_array_equal(first["weights"], second["weights"])
    assert first["vectors"] == pytest.approx(alone["vectors"], rel=1e-6)


def test_two_processes_take_the_papers_steps_on_a_t5(forkserver, folder, gtr_folder):
    """Adafactor, gradients of chunks, centroids that are trained, fresh siblings and gathered negatives."""
    shutil.copytree(gtr_folder, folder / "gtr")
    alone = the_papers_steps(Corpus.load(folder / "docs.jsonl"), folder)
    first, second = run_two(forkserver, folder, "the paper's steps")
    assert first["losses"] == second["losses"]
    for ours, theirs in zip(alone["losses"], first["losses"], strict=True):
        for name, value in ours.items():
            assert theirs[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
    np.testing.assert_array_equal(first["weights"], second["weights"])
    np.testing.assert_allclose(first["weights"], alone["weights"], atol=1e-4)


def test_two_processes_train_a_plain_t5_by_the_papers_recipe(forkserver, folder):
    """Sentence-transformers makes an encoder of it: its encoder half, the mean of its states, and length 1."""
    torch.manual_seed(0)
    config = T5Config(vocab_size=len(WORDS), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(folder / "t5")
    fast_tokenizer().save_pretrained(folder / "t5")
    alone = the_papers_training(Corpus.load(folder / "docs.jsonl"), folder)
    first, second = run_two(forkserver, folder, "the paper's training")
    assert first == second
    assert first["modules"] == alone["modules"] == ["Transformer", "Pooling", "Normalize"]
    np.testing.assert_allclose(first["weights"], alone["weights"], atol=1e-3)
    given, *_, last = (epoch["labeled"] for epoch in first["dev"])
    assert last > given


def test_two_processes_grow_the_trees_of_one(forkserver, folder):
    """Each encodes and clusters a share, and both have the whole."""
    corpus, encoder = Corpus.load(folder / "docs.jsonl"), Encoder.load(folder / "encoder", device="cpu")
    alone = trees(encode_corpus(encoder, corpus))
    first, second = run_two(forkserver, folder, "trees")
    assert first == second == alone


def test_tasks_return_the_same_to_one_process_and_to_two(forkserver, folder):
    alone = json.loads(json.dumps(results_of_tasks()))
    assert alone["results"][:3] == [[0, [], None], [-1, [-1.0], None], [-2, [-1.0, -1.0], None]]
    assert alone["nested"] == [[], [-1], [-2, -1]]
    first, second = run_two(forkserver, folder, "tasks")
    assert (first.pop("ran"), second.pop("ran"), alone.pop("ran")) == ([0, 2, 4, 6], [1, 3, 5], [*range(7)])
    assert first == second == alone


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
DTYPES = st.sampled_from([np.float32, np.float64, np.int64, np.uint64, np.uint8, np.bool_])
ARRAYS = arrays.arrays(DTYPES, arrays.array_shapes(min_dims=0, min_side=0))


def are_equal(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray):
        return (
            isinstance(other, np.ndarray)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
        )
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(are_equal, one, other))
    return type(one) is type(other) and one == other


@given(st.recursive(PLAIN | ARRAYS, lambda inner: st.lists(inner, max_size=4), max_leaves=8))
def test_what_is_told_arrives_as_it_was(value):
    assert are_equal(value, _unpacked(_packed(value)))


def test_arrays_in_any_order_of_memory_arrive_as_they_were():
    told = np.arange(12).reshape(3, 4)
    for array in (told.T, told[:, ::2], told[::-1]):
        assert are_equal([array], _unpacked(_packed((array,))))


def test_work_is_shared_only_when_asked_for(monkeypatch):
    """A tree grown by one process of many must not wait for the others."""
    monkeypatch.setattr("hce.processes.process_count", lambda: 2)
    assert share_out(list, [1, 2, 3]) == [1, 2, 3]
    with working_together(), pytest.raises(ValueError, match="process group has not been initialized"):
        share_out(list, [1, 2, 3])


def test_uneven_batches_do_not_hang(forkserver, folder):
    first, second = run_two(forkserver, folder, "train")
    assert first == second


def test_shares_are_disjoint_and_equal(monkeypatch):
    monkeypatch.setattr("hce.processes.process_count", lambda: 3)
    shares = []
    for rank in range(3):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        shares.append(list(range(11))[own_rows(11)])
    assert shares == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_alone_a_share_is_everything():
    assert list(range(11))[own_rows(11)] == list(range(11))


def test_a_launcher_starts_two_processes(folder):
    """As `accelerate launch` does for GPUs; for CPUs accelerate needs MPI, and torchrun (its own launcher) does not."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29731"]
    command += ["-m", "hce", "train", str(folder / "docs.jsonl"), "-o", str(folder / "model")]
    command += [
        "--encoder",
        str(folder / "encoder"),
        "--epochs",
        "1",
        "--set",
        "batch_size=32",
        "--set",
        "dev_queries=16",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("the model is in") == 1  # one process speaks
    assert (folder / "model" / "hce.json").is_file()
    encoder = Encoder.load(folder / "model", device="cpu")
    assert encoder.encode(["w1 w2"]).shape == (1, encoder.dim)
    assert torch.isfinite(encoder.parts[0].model[0].embedding.weight).all()
