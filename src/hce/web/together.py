"""Together: queries that come at the same time are encoded at the same time.

An encoder takes one call at a time, and a call with many short texts costs little more than one with a single text.
So whoever comes while a call is under way waits for the next one, together with all others who came meanwhile; who
comes alone does not wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import anyio.to_thread
import numpy as np

from hce.web.lanes import BusyError

TEXTS_AT_ONCE = 32


class Together:
    """Encodes texts for requests that run side by side.

    Args:
        encode: from texts to vectors of shape (texts, n); called in a thread, one call at a time.
        waiting: how many may wait.
    """

    def __init__(self, encode: Callable[[Sequence[str]], np.ndarray], waiting: int) -> None:
        self._encode = encode
        self._most = waiting
        self._waiting: list[tuple[str, asyncio.Future[np.ndarray]]] = []
        self._task: asyncio.Task[None] | None = None

    async def encode(self, text: str) -> np.ndarray:
        """The vector of a text, of shape (n,).

        Raises:
            BusyError: too many are waiting.
        """
        if len(self._waiting) >= self._most:
            raise BusyError
        found: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        self._waiting.append((text, found))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())
        return await found

    async def _work(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:TEXTS_AT_ONCE], self._waiting[TEXTS_AT_ONCE:]
            try:
                vectors = await anyio.to_thread.run_sync(self._encode, [text for text, _ in batch])
            except Exception as error:
                for _, found in batch:
                    if not found.done():  # else nobody waits for it any more
                        found.set_exception(error)
            else:
                for (_, found), vector in zip(batch, vectors, strict=True):
                    if not found.done():
                        found.set_result(vector)
