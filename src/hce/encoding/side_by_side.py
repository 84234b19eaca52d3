"""Several encoders of one text, their unit vectors side by side in one: [√s₁·F₁(x); √s₂·F₂(x); …], Σ sᵢ = 1.

The inner product of two such vectors is Σ sᵢ·⟨Fᵢ(x), Fᵢ(y)⟩: each part has its share of the score. So an encoder that
is not trained itself gets a companion that is: a token table trained on the corpus, and the corpus's own words.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import InputModule, Normalize
from torch import Tensor, nn

from hce.errors import FormatError
from hce.files import read_json, read_json_value, write_json

CONFIG = "side_by_side.json"
OURS = ("hce.encoding.side_by_side.SideBySide", "hce.encoding.word_table.WordTable")
NORMALIZE = f"{Normalize.__module__}.Normalize"


class SideBySide(InputModule):
    """Encoders whose unit vectors are concatenated, each scaled by the root of its share.

    Attributes:
        parts: the encoders, the one that was given first.
        shares: how much each part counts in an inner product; they add up to 1.
    """

    save_in_root = False
    forward_kwargs: ClassVar[set[str]] = {"task"}
    parts: Sequence[SentenceTransformer]

    def __init__(self, parts: Sequence[SentenceTransformer], shares: Sequence[float]) -> None:
        super().__init__()
        if len(parts) != len(shares) or min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6:
            raise ValueError(f"shares {tuple(shares)}: give one above 0 for each of the {len(parts)} parts, 1 in all")
        self.parts = nn.ModuleList(parts)  # type: ignore[assignment]
        self.shares = tuple(float(share) for share in shares)

    @property
    def tokenizer(self) -> Any:
        """The first part's tokenizer."""
        return self.parts[0].tokenizer

    @property
    def max_seq_length(self) -> int | None:
        """How many tokens the first part reads."""
        limit: int | None = self.parts[0].max_seq_length
        return limit

    @max_seq_length.setter
    def max_seq_length(self, limit: int | None) -> None:
        self.parts[0].max_seq_length = limit

    def get_embedding_dimension(self) -> int:
        """The sum of the parts' dimensions."""
        return sum(int(part.get_embedding_dimension()) for part in self.parts)

    def preprocess(self, inputs: list[str], prompt: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """Prepare the texts for each part; a feature is named after the number of its part.

        A prompt is for the encoder that was trained with prompts, the first; the companions were not.
        """
        features = {}
        for number, part in enumerate(self.parts):
            own = part.preprocess(inputs, prompt=None if number else prompt, **kwargs)
            features.update({f"{number}.{name}": value for name, value in own.items()})
        return features

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Encode by each part, and put the vectors side by side."""
        vectors: list[Tensor] = []
        for number, (part, share) in enumerate(zip(self.parts, self.shares, strict=True)):
            start = f"{number}."
            own = {name.removeprefix(start): value for name, value in features.items() if name.startswith(start)}
            vectors.append(share**0.5 * F.normalize(part(own, **kwargs)["sentence_embedding"].float(), dim=1))
        return {**features, "sentence_embedding": torch.cat(vectors, dim=1)}

    def get_config_dict(self) -> dict[str, Any]:
        """The shares."""
        return {"shares": list(self.shares)}

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Write each part into a folder of its own, below an existing one."""
        write_json(Path(output_path) / CONFIG, self.get_config_dict())
        for number, part in enumerate(self.parts):
            part.save(str(_folder(output_path, number)), create_model_card=False)

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any) -> SideBySide:
        """Read what `save` wrote, from a folder or a hub id; no code that comes with a part is ever run.

        Raises:
            FormatError: something of it is missing or damaged.
        """
        hub = {name: kwargs.get(name) for name in ("token", "cache_folder", "revision")}
        local = bool(kwargs.get("local_files_only"))
        folder = Path(cls.load_dir_path(model_name_or_path, subfolder=subfolder, local_files_only=local, **hub))
        shares = read_json(folder / CONFIG).get("shares", [])
        try:
            return cls([load_local(_folder(folder, number)) for number in range(len(shares))], shares)
        except (TypeError, ValueError, OSError) as error:
            raise FormatError(f"{folder}: damaged ({error}); train or copy the model again") from error


def joined(parts: Sequence[np.ndarray], shares: Sequence[float]) -> np.ndarray:
    """Put rows that the parts gave one by one side by side, as `SideBySide` and a Normalize after it do.

    Args:
        parts: unit rows of shape (texts, nᵢ) each.
        shares: of the parts.

    Returns:
        Unit rows of shape (texts, Σ nᵢ), float32.
    """
    rows = np.concatenate([np.float32(share**0.5) * part for share, part in zip(shares, parts, strict=True)], axis=1)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.divide(rows, np.where(lengths > 0, lengths, 1), out=rows)


def load_local(folder: str | Path) -> SentenceTransformer:
    """Load a sentence-transformers folder, with modules of hce where it has some."""
    own = is_made_of_ours(Path(folder) / "modules.json")
    return SentenceTransformer(str(folder), device="cpu", local_files_only=True, trust_remote_code=own)


def is_made_of_ours(modules: Path) -> bool:
    """Tell whether a model consists of modules of this package, and perhaps a Normalize, and of nothing else.

    sentence-transformers imports a module that is not its own only for who trusts the model with all it may bring. We
    trust ourselves, and no model in which something else could take advantage of that.
    """
    if not modules.is_file():
        return False
    entries = read_json_value(modules)
    types = [entry.get("type") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    return bool(types) and types[0] in OURS and set(types[1:]) <= {NORMALIZE}


def _folder(parent: str | Path, number: int) -> Path:
    return Path(parent) / f"part-{number}"
