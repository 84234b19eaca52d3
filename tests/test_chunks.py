"""Batches in chunks against plain ones: the same gradient, dropout and mixed precision included, in less memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hce.training.steps
from hce.encoding.encoder import Encoder
from hce.training.losses import bidirectional
from hce.training.pairs import InverseCloze, Sources
from hce.training.recipe import Recipe
from hce.training.steps import Trainer, _Column

RECIPE = Recipe.for_encoder(static=False, train="encoder", batch_size=12)


@pytest.fixture
def make_trainer(concept_corpus, bert_folder):
    """Make a trainer of a two-layer BERT with dropout, and the columns of a batch of it: 12 queries, 12 documents."""

    def make(*, dropout=0.5, device="cpu", dtype=torch.float32):
        encoder = Encoder.load(bert_folder, device=device, dtype=dtype)
        encoder.model.train()
        for module in encoder.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = dropout
        trainer = Trainer(concept_corpus, encoder, Sources(None, InverseCloze(concept_corpus)), RECIPE)
        texts = [concept_corpus[position].full_text for position in range(24)]
        return trainer, [_Column("query", texts[:12]), _Column("document", texts[12:]), _Column("document", [])]

    return make


def in_batch_loss(vectors):
    """No row's gradient is independent of the others; draws random numbers itself, between forward and backward."""
    queries, documents = torch.nn.functional.dropout(vectors, 0.1).chunk(2)
    return bidirectional(queries, documents, temperature=0.1)


def run(trainer, columns, *, chunk_size, loss_of=in_batch_loss):
    """Return the loss, the gradients of all weights, and what the generator draws afterwards."""
    trainer.recipe = replace(RECIPE, chunk_size=chunk_size)
    trainer.encoder.model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    loss = trainer._backward(columns, loss_of)
    weights = [weight for weight in trainer.encoder.model.parameters() if weight.grad is not None]
    return loss.detach(), torch.cat([weight.grad.flatten() for weight in weights]), torch.rand(3)


def plain_in_chunks(trainer, columns, size):
    """Compute as `run` does with one graph over all chunks, so that dropout draws chunk by chunk there too."""
    chunks = [
        _Column(column.side, column.texts[start : start + size])
        for column in columns
        for start in range(0, len(column.texts), size)
    ]
    return run(trainer, chunks, chunk_size=0)


@pytest.mark.parametrize("size", [12, 4, 5, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_that_of_one_graph_with_the_same_dropout(make_trainer, size, dtype):
    trainer, columns = make_trainer(dtype=dtype)
    loss, gradient, drawn = run(trainer, columns, chunk_size=size)
    expected_loss, expected, expected_drawn = plain_in_chunks(trainer, columns, size)
    assert expected.abs().max() > 1e-2
    assert torch.equal(loss, expected_loss)
    assert torch.equal(gradient, expected)
    assert torch.equal(drawn, expected_drawn)  # the generator goes on as after one pass


def test_without_dropout_it_is_that_of_the_whole_batch(make_trainer):
    trainer, columns = make_trainer(dropout=0.0)
    loss, gradient, _ = run(trainer, columns, chunk_size=5)
    expected_loss, expected, _ = run(trainer, columns, chunk_size=0)
    torch.testing.assert_close(loss, expected_loss, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-5)


def test_without_the_same_dropout_it_would_be_another(make_trainer, monkeypatch):
    """That the first test can fail: where the generator is not put back, the gradients are far from the plain ones."""
    monkeypatch.setattr(hce.training.steps, "recomputed", partial(checkpoint, preserve_rng_state=False))
    trainer, columns = make_trainer()
    _, gradient, _ = run(trainer, columns, chunk_size=4)
    _, expected, _ = plain_in_chunks(trainer, columns, 4)
    assert (gradient - expected).abs().max() > 1e-2


def test_parameters_of_the_loss_get_their_gradient_once(make_trainer):
    trainer, columns = make_trainer()
    target, seen = torch.nn.Parameter(torch.ones(32)), []

    def loss_of(vectors):  # mean of v·target, so that its gradient by the target is the mean of the vectors
        seen.append(vectors.detach())
        return (vectors @ target).mean()

    run(trainer, columns, chunk_size=5, loss_of=loss_of)
    torch.testing.assert_close(target.grad, seen[0].mean(dim=0))


def test_only_one_chunk_is_held_for_backward(make_trainer):
    """Each chunk is encoded twice, the second time when its own backward is due, after that of the one before."""
    trainer, columns = make_trainer()
    events = []

    def note(module, features, output):
        events.append("encode")
        output["token_embeddings"].register_hook(lambda gradient: events.append("backward"))

    trainer.encoder.model[0].register_forward_hook(note)
    run(trainer, columns, chunk_size=8)
    assert events == ["encode"] * 4 + ["encode", "backward"] * 4


def test_far_less_is_held_between_forward_and_backward(make_trainer):
    trainer, columns = make_trainer()

    def held(chunk_size):
        sizes = []

        def pack(tensor):
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run(trainer, columns, chunk_size=chunk_size)
        return sum(sizes)

    assert 0 < held(4) < held(0) / 20


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_dropout_is_the_same_too(make_trainer, dtype):
    trainer, columns = make_trainer(device="cuda", dtype=dtype)
    _, gradient, _ = run(trainer, columns, chunk_size=4)
    _, expected, _ = plain_in_chunks(trainer, columns, 4)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-5)
