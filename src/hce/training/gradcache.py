"""Large batches in little memory: the gradient of a whole batch, with only one chunk of it held for backward at a time.

A contrastive loss needs all vectors of a batch together, but the encoder's activations, which fill the memory, only a
chunk at a time (Gao et al. 2021, *Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup*). Costs a
second forward pass. Knows nothing of the loss or of the encoder, not even what a chunk is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from hce.errors import InputError

Chunk = TypeVar("Chunk")


class RandomState(NamedTuple):
    """The state of the random generators that dropout draws from: the CPU's and each CUDA device's."""

    cpu: Tensor
    cuda: list[Tensor]

    @classmethod
    def now(cls) -> RandomState:
        """Take the state of this moment; no CUDA states while CUDA is not in use."""
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])

    def restore(self) -> None:
        """Make this the current state."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Run a block from this state; afterwards the generators go on as if the block had not been."""
        before = RandomState.now()
        self.restore()
        try:
            yield
        finally:
            before.restore()


def backward_in_chunks(
    encode: Callable[[Chunk], Tensor],
    chunks: Sequence[Chunk],
    loss_of: Callable[[Tensor], Tensor],
) -> Tensor:
    """Add the gradients of `loss_of(cat(encode(chunk) for chunk in chunks))` to all parameters; return the loss.

    The same as calling backward on that expression, as long as the rows of `encode` depend on their own chunk only (no
    batch normalisation) and on no randomness but torch's global generators. Those are put back for the second pass, so
    both passes draw the same dropout masks. Parameters inside `loss_of`, such as centroids, get their gradients too.

    Args:
        encode: From a chunk to its vectors, of shape (rows of the chunk, n). Called twice on every chunk.
        chunks: The batch in pieces.
        loss_of: From all vectors, of shape (rows of all chunks, n), to the loss, a scalar. Called once.

    Returns:
        The loss, detached.
    """
    if not chunks:
        raise InputError("chunks is empty: there is nothing to encode.")
    states, parts = [], []
    with torch.no_grad():
        for chunk in chunks:
            states.append(RandomState.now())
            parts.append(encode(chunk))
    # Autocast keeps the weights it has cast. Before pytorch/pytorch#165068, those cast in the first pass, without
    # gradient, would have served the second as well, and the weights would have got none.
    torch.clear_autocast_cache()

    with torch.enable_grad():
        vectors = torch.cat(parts).detach().requires_grad_()  # (B, n)
        loss = loss_of(vectors)
    loss.backward()
    if vectors.grad is None:  # the loss looked at none of the vectors
        return loss.detach()

    gradients = vectors.grad.split([len(part) for part in parts])
    for chunk, state, gradient in zip(chunks, states, gradients, strict=True):
        with state.replayed(), torch.enable_grad():
            encode(chunk).backward(gradient)
    return loss.detach()
