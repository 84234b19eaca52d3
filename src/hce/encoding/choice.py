"""Which bundled encoder to take: what the other one would cost here, and what it would bring.

The cost is estimated without loading a model: from the length of some documents, and from how fast this machine
multiplies matrices of the shape that MiniLM has.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

import numpy as np

from hce.encoding.bundled import AUTO, BUNDLED

if TYPE_CHECKING:
    from hce.data.corpus import Corpus

Work = Literal["train", "index"]

PATIENCE = 600  # seconds of encoding up to which `auto` takes MiniLM
SAMPLE = 200  # documents
CHARACTERS_PER_TOKEN = 4.2  # of English, measured
# MiniLM encodes one token in the time of so many operations of a bare product of these shapes. Measured on one core.
OPERATIONS_PER_TOKEN = 31e6
ROWS, COLUMNS, INNER = 256, 1536, 384
WINDOW = 256  # tokens of a text that training reads; an index reads all of a long one

# Mean nDCG@10 of a hybrid search, test queries of six collections (README.md): trained, and as they are.
NDCG: dict[Work, dict[str, float]] = {
    "train": {"static": 0.552, "minilm": 0.604},
    "index": {"static": 0.524, "minilm": 0.601},
}


def chosen_encoder(name: str, corpus: Corpus, work: Work, option: str) -> tuple[str, str | None]:
    """Return the encoder that a name stands for, and a line that says why or what the other one would cost and bring.

    Args:
        name: of an encoder; "auto" is MiniLM where a GPU is there or encoding takes no more than ten minutes, else
            static. The line is None for an encoder that is not bundled.
        corpus: what is to be encoded.
        work: what for.
        option: how the encoder is chosen on the command line.
    """
    if name not in (AUTO, *BUNDLED):
        return name, None
    gpu = _has_gpu()
    seconds = 0.0 if gpu else minilm_seconds(corpus, work)
    takes = "little time on the GPU" if gpu else f"{duration(seconds)} here"
    encoding = f"to encode {len(corpus):,} documents"
    if name == AUTO:
        chosen = "minilm" if gpu or seconds <= PATIENCE else "static"
        return chosen, f"{option} auto: {chosen}, since minilm takes {takes} {encoding}"
    found = {each: f"{value:.3f}".removeprefix("0") for each, value in NDCG[work].items()}
    compared = f"nDCG@10 {found['minilm']} against {found['static']} on the mean of six collections"
    if name == "static":
        return name, f"{option} minilm would take {takes} {encoding}, and finds more: {compared}"
    return name, f"minilm takes {takes} {encoding}; {option} static takes seconds, and finds less: {compared}"


def minilm_seconds(corpus: Corpus, work: Work) -> float:
    """Estimate how long MiniLM takes on the CPU to encode a corpus."""
    positions = np.linspace(0, len(corpus) - 1, min(SAMPLE, len(corpus))).astype(int).tolist()
    lengths = np.array([len(corpus[position].full_text) for position in positions]) / CHARACTERS_PER_TOKEN
    read = np.minimum(lengths, WINDOW) if work == "train" else lengths
    return float(len(corpus) * read.mean() * OPERATIONS_PER_TOKEN / _operations_per_second())


def duration(seconds: float) -> str:
    """Say about how long something takes.

    >>> [duration(seconds) for seconds in (3, 40, 250, 9000)]
    ['a few seconds', 'about 40 s', 'about 4 min', 'about 2.5 h']
    """
    if seconds < 10:
        return "a few seconds"
    if seconds < 90:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


def _operations_per_second() -> float:
    """Measure how fast this machine multiplies matrices, in some 30 ms."""
    one, other = np.ones((ROWS, INNER), np.float32), np.ones((INNER, COLUMNS), np.float32)
    best = float("inf")
    for _ in range(10):  # the first ones warm up; others may be disturbed
        begun = time.perf_counter()
        one @ other
        best = min(best, time.perf_counter() - begun)
    return 2 * ROWS * COLUMNS * INNER / best


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
