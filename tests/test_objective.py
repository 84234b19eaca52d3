"""HCELoss: the equations on encoded columns, in sentence-transformers' trainer, and across processes."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from plain_losses import bools, loop_bidirectional, loop_level, unit

from hce.errors import InputError
from hce.training.losses import HCELoss, bidirectional
from hce.tree.hierarchy import Hierarchy, Level

# --- HCELoss

WORDS = ["red", "blue", "green", "apple", "pear", "plum", "sky", "sea"]
TEXTS = ["red apple", "red plum", "green apple", "green pear", "blue sky", "blue sea"]


@pytest.fixture
def hierarchy():
    """Six documents, two levels of centroids: {0, 1 | 2, 3} under the first node, {4, 5} under the second."""
    generator = np.random.default_rng(0)
    centroids = [generator.standard_normal((k, 16)).astype(np.float32) for k in (2, 3)]
    levels = Level(np.array([0, 0]), centroids[0]), Level(np.array([0, 0, 1]), centroids[1])
    return Hierarchy(levels, np.array([0, 0, 1, 1, 2, 2]), (0.0, 0.0), {})


@pytest.fixture
def encoder():
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, WORDS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=16)], device="cpu")


def columns(encoder, *texts):
    return [encoder.preprocess(list(column)) for column in texts]


def vectors(encoder, *texts):
    with torch.no_grad():
        return [F.normalize(each["sentence_embedding"], dim=-1) for each in map(encoder, columns(encoder, *texts))]


def test_forward_is_the_equations(encoder, hierarchy):
    ids = [0, 3, 4]
    negatives = [1, 2, 5]
    texts = ["red", "pear", "sky"], [TEXTS[i] for i in ids], [TEXTS[i] for i in negatives]
    loss = HCELoss(encoder, hierarchy, temperature=0.1, level_temperature=0.2)
    named = loss(columns(encoder, *texts), torch.tensor([[i, j] for i, j in zip(ids, negatives, strict=True)]))

    queries, documents, sampled = vectors(encoder, *texts)
    for t in (0, 1):
        level = hierarchy.levels[t]
        node = torch.tensor(hierarchy.paths[ids, t])
        expected, _ = loop_level(queries, torch.tensor(level.centroids), node, level.parent, 0.2)
        torch.testing.assert_close(named[f"level_{t + 1}"].detach(), expected)
    nothing = torch.zeros(3, 3, dtype=torch.bool), torch.zeros(3, 1, dtype=torch.bool)
    expected = loop_bidirectional(queries, documents, sampled[:, None], 0.1, *nothing)
    torch.testing.assert_close(named["document"].detach(), expected)
    assert set(named) == {"level_1", "level_2", "document"}


def summands_of(loss, encoder, ids, labels, negatives=()):
    texts = [TEXTS[i] for i in ids], [TEXTS[i] for i in ids], *([TEXTS[i] for i in column] for column in negatives)
    embeddings = [model["sentence_embedding"] for model in map(encoder, columns(encoder, *texts))]
    return loss.summands(embeddings, loss.positions(labels, len(embeddings) - 2))


def test_labels_mask_what_they_name(encoder, hierarchy):
    loss = HCELoss(encoder, hierarchy, temperature=0.1)
    ids, negatives = [0, 3, 4], [[1, 2, 5]]
    unmasked = summands_of(loss, encoder, ids, torch.tensor(ids), negatives).document_loss
    # Query 0 also has document 1 as a known positive: its sample is masked as if it had none.
    masked = summands_of(loss, encoder, ids, torch.tensor([[0, 1, 1], [3, 2, -1], [4, 5, -1]]), negatives).document_loss
    queries, documents, sampled = vectors(encoder, *([TEXTS[i] for i in each] for each in (ids, ids, negatives[0])))
    everywhere = torch.zeros(3, 3, dtype=torch.bool)
    expected = loop_bidirectional(queries, documents, sampled[:, None], 0.1, everywhere, bools([[1], [0], [0]]))
    torch.testing.assert_close(masked.detach(), expected)
    assert masked < unmasked
    # The position alone, a row without known positives, and one with only padding say the same.
    again = summands_of(loss, encoder, ids, torch.tensor([[0, 1, -1], [3, 2, -1], [4, 5, -1]]), negatives).document_loss
    torch.testing.assert_close(again, unmasked)


def test_one_further_known_positive_counts_at_the_levels_too(encoder, hierarchy):
    """However the column `label` is padded."""
    loss = HCELoss(encoder, hierarchy, temperature=0.1, level_temperature=0.2, level_target="node")
    ids = [0, 3, 4]
    narrow, wide, none = (
        summands_of(loss, encoder, ids, torch.tensor(labels)).level_losses
        for labels in ([[0, 5], [3, -1], [4, -1]], [[0, 5, -1], [3, -1, -1], [4, -1, -1]], ids)
    )
    torch.testing.assert_close(narrow, wide)
    assert any(one < other for one, other in zip(narrow, none, strict=True))


def test_groups_and_margin_mask_in_the_batch(encoder, hierarchy):
    ids = torch.tensor([0, 1, 4])
    queries, documents = vectors(encoder, *([TEXTS[i] for i in ids],) * 2)
    # Forbid the pair that happens to lie nearest: by a group of its own, and by a margin just below it.
    likeness = (documents @ documents.T).fill_diagonal_(-1)
    pair = divmod(int(likeness.argmax()), 3)
    second, nearest = likeness[torch.triu_indices(3, 3, 1).unbind()].sort().values[-2:].tolist()
    forbidden = torch.zeros(3, 3, dtype=torch.bool)
    forbidden[pair, pair[::-1]] = True
    nothing = torch.zeros(3, 0, 16), torch.zeros(3, 0, dtype=torch.bool)
    expected = loop_bidirectional(queries, documents, nothing[0], 0.1, forbidden, nothing[1])
    groups = np.arange(6)
    groups[ids[list(pair)]] = 7
    grouped = HCELoss(encoder, hierarchy, temperature=0.1, groups=groups)
    torch.testing.assert_close(summands_of(grouped, encoder, ids, ids).document_loss.detach(), expected)
    apart = HCELoss(encoder, hierarchy, temperature=0.1, margin=(nearest + second) / 2)
    torch.testing.assert_close(summands_of(apart, encoder, ids, ids).document_loss.detach(), expected)
    plain = HCELoss(encoder, hierarchy, temperature=0.1)
    assert summands_of(plain, encoder, ids, ids).document_loss > expected + 1e-3


def test_fewer_levels_more_document_losses(encoder, hierarchy):
    ids = torch.tensor([0, 3, 4])
    loss = HCELoss(encoder, hierarchy, loss_levels=1, temperature=0.1)
    named = loss(
        columns(encoder, *([TEXTS[i] for i in each] for each in ([0, 3, 4], [0, 3, 4], [1, 2, 5], [2, 1, 0]))), ids
    )
    assert set(named) == {"level_1", "document"}
    queries, documents, upper, lower = vectors(
        encoder, *([TEXTS[i] for i in each] for each in ([0, 3, 4], [0, 3, 4], [1, 2, 5], [2, 1, 0]))
    )
    nothing = torch.zeros(3, 3, dtype=torch.bool), torch.zeros(3, 1, dtype=torch.bool)
    expected = sum(
        loop_bidirectional(queries, documents, sampled[:, None], 0.1, *nothing) for sampled in (upper, lower)
    )
    torch.testing.assert_close(named["document"].detach(), expected)
    with pytest.raises(InputError, match="1 columns of sampled negatives cannot be divided evenly among 2"):
        summands_of(loss, encoder, ids, ids, [[1, 2, 5]])


def test_no_levels_is_the_document_loss_over_the_depth(encoder, hierarchy):
    ids = torch.tensor([0, 3, 4])
    queries, documents = vectors(encoder, *([TEXTS[i] for i in ids],) * 2)
    summands = summands_of(HCELoss(encoder, hierarchy, loss_levels=0, temperature=0.1), encoder, ids, ids)
    torch.testing.assert_close(summands.total.detach(), 3 * bidirectional(queries, documents, temperature=0.1))


def test_training_moves_encoder_and_centroids_and_not_the_hierarchy(encoder, hierarchy):
    before = [level.centroids.copy() for level in hierarchy.levels]
    loss = HCELoss(encoder, hierarchy, temperature=0.1)
    names = {name for name, _ in loss.named_parameters()}
    assert names == {"centroids.0", "centroids.1", "model.0.embedding.weight"} == set(loss.state_dict())
    start = [parameter.detach().clone() for parameter in loss.parameters()]
    optimiser = torch.optim.Adam(
        [{"params": loss.model.parameters(), "lr": 0.05}, {"params": loss.centroids, "lr": 0.01}]
    )
    ids = torch.arange(6)
    texts = [text.split()[1] for text in TEXTS], TEXTS
    totals = []
    for _ in range(20):
        total = torch.stack(list(loss(columns(encoder, *texts), ids).values())).sum()
        optimiser.zero_grad()
        total.backward()
        optimiser.step()
        totals.append(total.item())
    assert totals[-1] < 0.7 * totals[0]
    assert all(not torch.equal(a, b) for a, b in zip(start, loss.parameters(), strict=True))
    assert all(np.array_equal(a, level.centroids) for a, level in zip(before, hierarchy.levels, strict=True))


def test_errors_say_what_to_do(encoder, hierarchy):
    loss = HCELoss(encoder, hierarchy)
    features = columns(encoder, TEXTS[:2], TEXTS[:2])
    with pytest.raises(InputError, match="needs a column `label`"):
        loss(features, None)
    with pytest.raises(InputError, match="position 6, not in 0 … 5"):
        loss(features, torch.tensor([0, 6]))
    with pytest.raises(InputError, match="position -1, not in"):
        loss(features, torch.tensor([0, -1]))
    with pytest.raises(InputError, match=r"got 1 column"):
        loss(features[:1], torch.tensor([0, 1]))
    with pytest.raises(InputError, match="2 positions a row for one document and 2 sampled"):
        loss(columns(encoder, *[TEXTS[:2]] * 4), torch.tensor([[0, 1], [1, 0]]))
    with pytest.raises(InputError, match="loss_levels=3: a tree of depth 3 has 2 levels"):
        HCELoss(encoder, hierarchy, loss_levels=3)
    with pytest.raises(InputError, match="groups has 2 entries for 6"):
        HCELoss(encoder, hierarchy, groups=np.array([0, 1]))


def test_config_is_for_the_model_card(encoder, hierarchy):
    config = HCELoss(encoder, hierarchy, loss_levels=1, temperature=0.02, margin=0.9).get_config_dict()
    assert json.loads(json.dumps(config)) == {
        "loss_levels": 1,
        "temperature": 0.02,
        "level_temperature": 0.15,
        "level_target": "node",
        "level_weight": 1.0,
        "mask": True,
        "margin": 0.9,
        "gather_across_devices": False,
    }


def test_the_trainers_own_batches_fit(encoder, hierarchy):
    """What the trainer does to rows before it calls the loss: its collator, and its splitting into columns."""
    from sentence_transformers.base.trainer import BaseTrainer
    from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator

    rows = [
        {"query": TEXTS[i].split()[0], "positive": TEXTS[i], "negative": TEXTS[5 - i], "label": [i, 5 - i]}
        for i in (0, 2, 4)
    ]
    batch = SentenceTransformerDataCollator(preprocess_fn=encoder.preprocess)(rows)
    features, labels = BaseTrainer.collect_features(None, batch)
    loss = HCELoss(encoder, hierarchy)
    named = loss(features, labels)
    texts = ([row[name] for row in rows] for name in ("query", "positive", "negative"))
    expected = loss(columns(encoder, *texts), torch.tensor([row["label"] for row in rows]))
    assert {name: value.item() for name, value in named.items()} == {name: v.item() for name, v in expected.items()}


def test_trains_through_the_trainer(encoder, hierarchy, tmp_path):
    datasets = pytest.importorskip("datasets", reason="the trainer of sentence-transformers needs `datasets`")
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    dataset = datasets.Dataset.from_dict(
        {"query": [text.split()[0] for text in TEXTS], "positive": TEXTS, "label": list(range(6))}
    )
    loss = HCELoss(encoder, hierarchy)
    start = {name: parameter.detach().clone() for name, parameter in loss.named_parameters()}
    trainer = SentenceTransformerTrainer(
        model=encoder,
        args=SentenceTransformerTrainingArguments(
            output_dir=str(tmp_path),
            max_steps=5,
            per_device_train_batch_size=3,
            learning_rate=0.1,
            learning_rate_mapping={r"^centroids\.": 0.01},
            lr_scheduler_type="constant",
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
        ),
        train_dataset=dataset,
        loss=loss,
    )
    trainer.train()
    assert all(not torch.equal(start[name], parameter) for name, parameter in loss.named_parameters())
    # Adam's first steps are as long as the learning rate: the centroids moved at theirs, not at the encoder's.
    moved = max((start[f"centroids.{t}"] - loss.centroids[t]).abs().max().item() for t in (0, 1))
    assert moved <= 5 * 0.01 + 1e-4
    assert {"level_1", "level_2", "document"} <= set(trainer.state.log_history[0])


# --- across processes


def one_of_two(rank, path, results):
    """One process's half of the batch: its gradients, as DistributedDataParallel would average them."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    loss, embeddings, labels = distributed_case()
    mine = slice(3 * rank, 3 * rank + 3)
    summands = loss.summands(
        [loss.model(each[mine]) for each in embeddings], loss.positions(labels[mine], len(embeddings) - 2)
    )
    summands.total.backward()
    weight = loss.model.weight.grad
    dist.all_reduce(weight)
    total = summands.total.detach().clone()
    dist.all_reduce(total)
    torch.save([total / 2, weight / 2, *(each.grad for each in loss.centroids)], f"{results}.{rank}")
    dist.destroy_process_group()


def distributed_case():
    levels = (Level(np.zeros(2, dtype=int), unit(2, 5, seed=8).numpy()),)
    hierarchy = Hierarchy(levels, np.arange(8) % 2, (0.0,), {})
    model = torch.nn.Linear(4, 5, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(unit(5, 4, seed=9))
    loss = HCELoss(model, hierarchy, temperature=0.2, margin=0.95, gather_across_devices=True)
    labels = torch.tensor([[0, 7, 5], [1, 2, -1], [2, 3, 0], [0, 4, -1], [4, 4, 1], [5, 6, -1]])
    return loss.double(), [unit(6, 4, seed=s) for s in range(3)], labels


def test_two_processes_are_one_batch(tmp_path):
    loss, embeddings, labels = distributed_case()
    summands = loss.summands([loss.model(each) for each in embeddings], loss.positions(labels, len(embeddings) - 2))
    summands.total.backward()
    expected = [summands.total.detach(), loss.model.weight.grad, *(each.grad for each in loss.centroids)]
    torch.multiprocessing.spawn(one_of_two, (tmp_path / "store", str(tmp_path / "result")), nprocs=2)
    for rank in (0, 1):
        for ours, theirs in zip(torch.load(tmp_path / f"result.{rank}"), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
