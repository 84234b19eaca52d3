"""The encoder that training starts from: as it is given, and, of a static one, fitted to the corpus."""

from __future__ import annotations

import time

from hce.baselines.base import Built, Task, searched_by_vectors


def build_untrained(task: Task) -> Built:
    """The encoder as given."""
    return searched_by_vectors(task.load_encoder(), task.corpus)


def build_fitted(task: Task) -> Built:
    """A static encoder's table weighted and whitened by the corpus's own token counts; see `hce.encoding.static`."""
    encoder = task.load_encoder()
    start = time.perf_counter()
    fitted = encoder.fitted_to(task.corpus)
    return searched_by_vectors(fitted, task.corpus, time.perf_counter() - start)
