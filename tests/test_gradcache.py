"""Cached gradients against plain ones, with dropout drawing, in mixed precision, and with parameters in the loss."""

import pytest
import torch
from torch import nn

from hce.errors import InputError
from hce.training.gradcache import RandomState, backward_in_chunks
from hce.training.losses import bidirectional


def network(dropout):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 8))


def in_batch_loss(vectors):
    """The first half are queries, the second half their documents: no row's gradient is independent of the others."""
    queries, documents = torch.nn.functional.normalize(vectors, dim=-1).chunk(2)
    return bidirectional(queries, documents, temperature=0.1)


def drawing_loss(vectors):
    """One that draws random numbers itself, between the two passes."""
    return in_batch_loss(torch.nn.functional.dropout(vectors, 0.1))


def gradients(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def plain(model, chunks, loss_of):
    """One graph over all chunks; dropout draws chunk by chunk, as it does in the cached first pass."""
    model.zero_grad()
    loss = loss_of(torch.cat([model(chunk) for chunk in chunks]))
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("sizes", [[12], [4, 4, 4], [5, 1, 6]])
def test_cached_gradient_is_the_plain_one(dropout, sizes):
    model = network(dropout)
    chunks = torch.randn(12, 6).split(sizes)

    torch.manual_seed(7)
    expected_loss, expected = plain(model, chunks, drawing_loss)
    after = torch.rand(3)

    model.zero_grad()
    torch.manual_seed(7)
    loss = backward_in_chunks(model, chunks, drawing_loss)

    assert expected.abs().max() > 1e-2
    torch.testing.assert_close(loss, expected_loss, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradients(model), expected, rtol=0, atol=1e-5)
    # The generator goes on as after one pass: neither stuck nor drawn from twice.
    assert torch.equal(torch.rand(3), after)


def test_without_the_replay_dropout_would_spoil_it(monkeypatch):
    """That the test above can fail: with the restore switched off, the gradients are far from the plain ones."""
    model = network(0.5)
    chunks = torch.randn(12, 6).split(4)
    torch.manual_seed(7)
    _, expected = plain(model, chunks, in_batch_loss)
    model.zero_grad()
    monkeypatch.setattr(RandomState, "restore", lambda self: None)
    torch.manual_seed(7)
    backward_in_chunks(model, chunks, in_batch_loss)
    assert (gradients(model) - expected).abs().max() > 1e-2


def test_gradients_are_added_to_those_there():
    model = network(0.0)
    chunks = torch.randn(8, 6).split(3)
    _, expected = plain(model, chunks, in_batch_loss)
    backward_in_chunks(model, chunks, in_batch_loss)
    torch.testing.assert_close(gradients(model), 2 * expected, rtol=0, atol=1e-5)


def test_parameters_of_the_loss_get_their_gradient_once():
    model, target = network(0.0), nn.Parameter(torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8]))
    chunks = torch.randn(9, 6).split(2)
    # loss = mean of v·target, so d loss / d target = mean of the vectors
    backward_in_chunks(model, chunks, lambda vectors: (vectors @ target).mean())
    torch.testing.assert_close(target.grad, model(torch.cat(chunks)).mean(dim=0).detach())


def test_under_autocast_the_weights_still_get_gradients():
    """Autocast's cache of cast weights, filled in the first pass, must not serve the second (older torch only)."""
    model = network(0.0)
    chunks = torch.randn(8, 6).split(4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, expected = plain(model, chunks, in_batch_loss)
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        backward_in_chunks(model, chunks, in_batch_loss)
    assert all(parameter.grad is not None for parameter in model.parameters())
    # bfloat16 products, whose gradients are summed in another order
    torch.testing.assert_close(gradients(model), expected, rtol=0.05, atol=0.02)


def test_works_inside_no_grad():
    model = network(0.0)
    chunks = torch.randn(8, 6).split(4)
    _, expected = plain(model, chunks, in_batch_loss)
    model.zero_grad()
    with torch.no_grad():
        backward_in_chunks(model, chunks, in_batch_loss)
    torch.testing.assert_close(gradients(model), expected, rtol=0, atol=1e-5)


def test_only_one_chunk_is_held_for_backward():
    """Never more than one chunk's graph alive: each encode with gradient follows the backward of the one before."""
    events = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            events.append("backward")
            return gradient

    weight = nn.Parameter(torch.ones(2))

    def encode(chunk):
        events.append("encode" if torch.is_grad_enabled() else "look")
        return Watched.apply(chunk * weight)

    backward_in_chunks(encode, torch.randn(4, 2).split(2), torch.sum)
    assert events == ["look", "look", "encode", "backward", "encode", "backward"]


def test_no_chunks():
    with pytest.raises(InputError, match="chunks is empty"):
        backward_in_chunks(network(0.0), [], in_batch_loss)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_cuda_dropout_is_replayed():
    model = network(0.5).cuda()
    chunks = torch.randn(12, 6, device="cuda").split(4)
    torch.manual_seed(7)
    _, expected = plain(model, chunks, in_batch_loss)
    model.zero_grad()
    torch.manual_seed(7)
    backward_in_chunks(model, chunks, in_batch_loss)
    torch.testing.assert_close(gradients(model), expected, rtol=0, atol=1e-5)
