"""Language models that write queries for passages: any doc2query (T5) or causal model, and a small bundled one.

A model of the T5 kind is given the passage as it is, because that is what doc2query models are trained on. A causal
model is shown three passages with their queries and goes on from there; small instruction-tuned models do this well
and answer in chat badly.

Queries are sampled, and what is drawn for a passage depends on its own seed alone: not on the others in its batch, and
not on where a run was interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hce.encoding.encoder import device_and_dtype
from hce.encoding.tables import loading, quiet_transformers
from hce_lab.generation.smollm2 import unpacked_smollm2

BUNDLED = "smollm2"
TOP_K, TOP_P = 20, 0.95
# Seq2seq, causal. Of 64 passages of scifact and cranfield, SmolLM2's queries led back to 13 at 1, 19 at 0.5, 24 at 0.3
# (among the 10 best of the fitted static encoder); doc2query models are meant to be sampled as they are.
TEMPERATURE = {True: 1.0, False: 0.3}
MAX_QUERY_TOKENS = 32
MAX_PASSAGE_TOKENS = {True: 384, False: 128}  # seq2seq, causal; of a small causal model's context, examples take half
EXAMPLES = (
    (
        "The Amazon rainforest is home to a tenth of all known species. Cattle ranching is the main cause of its loss, "
        "followed by soy farming and logging.",
        "what causes deforestation in the amazon",
    ),
    (
        "Aspirin irreversibly inhibits cyclooxygenase in platelets, and so low doses of it are given to patients who "
        "have had a heart attack before.",
        "how does aspirin prevent heart attacks",
    ),
    (
        "The method sort() orders a list in place and returns None, whereas the function sorted() leaves its argument "
        "alone and returns a new list.",
        "difference between sort and sorted in python",
    ),
)
SHOWN = "".join(f"Passage: {passage}\nQuery: {query}\n\n" for passage, query in EXAMPLES)


class Generator:
    """A language model and its tokenizer.

    Attributes:
        name: the spec that the model was loaded by, for messages and to tell runs apart.
        device: where the model computes.
        dtype: what the model computes in.
        batch_size: how many passages to read at once, at best.
    """

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.name = name
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.batch_size = 16 if self.device.type == "cpu" else 64
        self.is_seq2seq = bool(model.config.is_encoder_decoder)
        tokenizer.padding_side = "right" if self.is_seq2seq else "left"
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token

    @classmethod
    def load(
        cls, spec: str = BUNDLED, *, device: str | torch.device | None = None, dtype: torch.dtype | None = None
    ) -> Generator:
        """Load "smollm2" (bundled), a directory, or a hub id of a seq2seq or causal model.

        Args:
            spec: which model.
            device: where to compute; by default the first GPU, else the CPU.
            dtype: what to compute in; by default bfloat16 on a GPU that has it, else float32.

        Raises:
            InputError: there is no such model.
            MissingPackageError: the bundled one is asked for and not installed.
        """
        device, dtype = device_and_dtype(device, dtype)
        source = str(unpacked_smollm2()) if spec == BUNDLED else spec
        advice = f"give {BUNDLED!r}, a model directory, or a hub id"
        with loading(source, "query generator", advice), quiet_transformers():
            seq2seq = AutoConfig.from_pretrained(source).is_encoder_decoder
            kind = AutoModelForSeq2SeqLM if seq2seq else AutoModelForCausalLM
            model = kind.from_pretrained(source, dtype=dtype).to(device)
            return cls(model, AutoTokenizer.from_pretrained(source), spec)

    def generate(self, passages: Sequence[str], seeds: Sequence[Sequence[int]]) -> list[str]:
        """Write one query for each passage, sampled by its own seed; a query may come out empty."""
        prompts = [self._prompt(passage) for passage in passages]
        features = self.tokenizer(prompts, padding=True, return_tensors="pt").to(self.device)
        width = 0 if self.is_seq2seq else features["input_ids"].shape[1]
        stops = [] if self.is_seq2seq else [_EndOfLine(self.tokenizer)]
        with torch.inference_mode():
            written = self.model.generate(
                input_ids=features["input_ids"],
                attention_mask=features["attention_mask"],
                max_new_tokens=MAX_QUERY_TOKENS,
                num_beams=1,
                do_sample=False,  # the highest score wins, after _Sampling has added the noise that makes it a draw
                logits_processor=LogitsProcessorList(
                    [
                        TemperatureLogitsWarper(TEMPERATURE[self.is_seq2seq]),
                        TopKLogitsWarper(TOP_K),
                        TopPLogitsWarper(TOP_P),
                        _Sampling(seeds),
                    ]
                ),
                stopping_criteria=StoppingCriteriaList(stops),
                pad_token_id=self.tokenizer.pad_token_id,
            )
        texts = self.tokenizer.batch_decode(written[:, width:], skip_special_tokens=True)
        return [_first_line(text) for text in texts]

    def _prompt(self, passage: str) -> str:
        ids = self.tokenizer(
            passage, add_special_tokens=False, truncation=True, max_length=MAX_PASSAGE_TOKENS[self.is_seq2seq]
        )
        text = self.tokenizer.decode(ids["input_ids"], skip_special_tokens=True)
        return text if self.is_seq2seq else f"{SHOWN}Passage: {' '.join(text.split())}\nQuery:"


class _Sampling(LogitsProcessor):
    """Gumbel's trick: the largest of scores plus Gumbel noise is a draw from their softmax. Each row has its own."""

    def __init__(self, seeds: Sequence[Sequence[int]]) -> None:
        self.generators = [np.random.default_rng(list(seed)) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        noise = np.stack([generator.gumbel(size=scores.shape[1]) for generator in self.generators])
        return scores + torch.from_numpy(noise).to(scores)


class _EndOfLine(StoppingCriteria):
    """Ends a row when its last token holds a line break."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        ends = ["\n" in text for text in self.tokenizer.batch_decode(input_ids[:, -1:])]
        return torch.tensor(ends, device=input_ids.device)


def _first_line(text: str) -> str:
    """Return the query itself, or nothing if it copies an example, which says nothing of the passage."""
    query = " ".join(text.strip().partition("\n")[0].split())
    return "" if query in {example for _, example in EXAMPLES} else query
