"""Several encoders of one text, their unit vectors side by side in one: [√s₁·F₁(x); √s₂·F₂(x); …], Σ sᵢ = 1.

The inner product of two such vectors is Σ sᵢ·⟨Fᵢ(x), Fᵢ(y)⟩: each part has its share of the score. So an encoder that
is not trained itself gets a companion that is: a token table trained on the corpus, and the corpus's own words.

The first part may be centered: what all queries have in common, and what all documents have, says nothing about which
document answers which query. The two means are not the same, so each side's own is subtracted. Before that, a linear
map that was learned from labels may move the vectors of queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.numpy import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import InputModule, Normalize, StaticEmbedding
from sentence_transformers.util import load_dir_path, load_file_path
from torch import Tensor, nn

from hce.encoding.tables import (
    CENTRES_FILE,
    MODULES,
    NORMALIZE,
    SHARES_FILE,
    SIDE_BY_SIDE,
    SIDES,
    WORD_TABLE,
    Layout,
    Prompts,
    Table,
    WordRows,
    check_parts,
    damaged_model,
    first_module,
)
from hce.encoding.word_table import WordTable, hub_options
from hce.files import write_json

PART_OPTIONS = ("model_kwargs", "processor_kwargs", "config_kwargs", "backend")


class SideBySide(InputModule):
    """Encoders whose unit vectors are concatenated, each scaled by the root of its share.

    Attributes:
        parts: the encoders, the one that was given first.
        shares: how much each part counts in an inner product; they add up to 1.
        centres: what is subtracted from the first part's unit vectors, of shape (2, n₁): queries' and documents' mean.
        query_map: what moves the first part's queries before that, of shape (n₁, n₁ + 1); see `mapped_rows`.
    """

    save_in_root = False
    forward_kwargs: ClassVar[set[str]] = {"task"}
    parts: Sequence[SentenceTransformer]
    centres: Tensor | None
    query_map: Tensor | None

    def __init__(
        self,
        parts: Sequence[SentenceTransformer],
        shares: Sequence[float],
        centres: np.ndarray | None = None,
        query_map: np.ndarray | None = None,
    ) -> None:
        super().__init__()
        dims = [int(part.get_embedding_dimension()) for part in parts]
        check_parts(shares, dims, centres, query_map)
        self.parts = nn.ModuleList(parts)  # type: ignore[assignment]
        self.shares = tuple(float(share) for share in shares)
        self.register_buffer("centres", None if centres is None else torch.from_numpy(centres))
        self.register_buffer("query_map", None if query_map is None else torch.from_numpy(query_map))

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
        """Return the sum of the parts' dimensions."""
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

    def forward(self, features: dict[str, Any], task: str | None = None) -> dict[str, Any]:
        """Encode by each part, and put the vectors side by side; a text is a document unless called a query."""
        vectors: list[Tensor] = []
        for number, (part, share) in enumerate(zip(self.parts, self.shares, strict=True)):
            start = f"{number}."
            own = {name.removeprefix(start): value for name, value in features.items() if name.startswith(start)}
            vector = F.normalize(part(own, task=task)["sentence_embedding"].float(), dim=1)
            if number == 0 and self.query_map is not None and task == "query":
                moved = vector @ self.query_map[:, :-1].T + self.query_map[:, -1]
                vector = F.normalize(vector + moved, dim=1)
            if number == 0 and self.centres is not None:
                vector = F.normalize(
                    vector - self.centres[SIDES.index("query" if task == "query" else "document")], dim=1
                )
            vectors.append(share**0.5 * vector)
        return {**features, "sentence_embedding": torch.cat(vectors, dim=1)}

    def get_config_dict(self) -> dict[str, Any]:
        """Return the shares, which are saved with the module."""
        return {"shares": list(self.shares)}

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Write each part into a folder of its own, below an existing one."""
        write_json(Path(output_path) / SHARES_FILE, self.get_config_dict())
        arrays = {"centres": self.centres, "query_map": self.query_map}
        known = {name: array.cpu().numpy() for name, array in arrays.items() if array is not None}
        if known:
            save_file(known, Path(output_path) / CENTRES_FILE)
        for number, part in enumerate(self.parts):
            part.save(str(Path(output_path) / f"part-{number}"), create_model_card=False)

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any) -> SideBySide:
        """Read what `save` wrote, from a folder or a hub id; no code that comes with a part is ever run.

        Args:
            model_name_or_path: the folder or the hub id.
            subfolder: of the module, below it.
            kwargs: as sentence-transformers gives them to a module: those that say where files come from, and
                `model_kwargs`, `processor_kwargs`, `config_kwargs` and `backend`, which each part is loaded with.

        Raises:
            FormatError: something of it is missing or damaged.
        """
        folder = Path(cls.load_dir_path(model_name_or_path, subfolder=subfolder, **hub_options(kwargs)))
        how = {name: kwargs[name] for name in PART_OPTIONS if kwargs.get(name) is not None}
        layout = Layout.read(folder)
        try:
            parts = [load_part(each, **how) for each in layout.folders]
            return cls(parts, layout.shares, layout.centres, layout.query_map)
        except Exception as error:  # whatever a damaged file makes its reader raise
            raise damaged_model(folder, error) from error


def load_part(folder: Path, **how: Any) -> SentenceTransformer:
    """Load a model from a folder, one with a module of this package too, and run no code that the folder brings.

    sentence-transformers imports modules that are not its own only for who trusts the model with all it may bring. So
    the model is put together here: of what it names, nothing but the module and a Normalize is looked at.

    Args:
        folder: of the model.
        how: what a transformer is loaded with, see `SideBySide.load`.

    Raises:
        FormatError: something of it is missing or damaged.
    """
    first = first_module(folder)
    ours = first and OURS.get(first.type)
    if not first or not ours:
        return SentenceTransformer(str(folder), device="cpu", local_files_only=True, **how)
    prompts = Prompts.read(folder)
    return model_of(ours.load(str(folder), subfolder=first.path, local_files_only=True, **how), prompts)


def model_of(module: SideBySide | WordTable | StaticEmbedding, prompts: Prompts) -> SentenceTransformer:
    """Make a model of a module and a Normalize."""
    model = SentenceTransformer(modules=[module, Normalize()], prompts=dict(prompts.by_name), device="cpu")
    model.default_prompt_name = prompts.default
    return model


def model_of_table(table: Table) -> SentenceTransformer:
    """Make a model of a table, which looks its vectors up in the same memory."""
    if isinstance(table.splitter, WordRows):
        return model_of(WordTable(table), table.prompts)
    return model_of(StaticEmbedding(table.splitter, embedding_weights=table.vectors), table.prompts)


def table_of(model: SentenceTransformer) -> Table | None:
    """Return the table that a model consists of, as it is now; None where it is made otherwise."""
    first, *rest = model
    if not all(isinstance(each, Normalize) and each.get_config_dict() == NORMALIZE for each in rest):
        return None
    prompts = Prompts(model.prompts, model.default_prompt_name)
    if isinstance(first, WordTable):
        return first.table._replace(prompts=prompts)
    if not isinstance(first, StaticEmbedding):
        return None
    return Table(first.embedding.weight.detach().cpu().numpy(), first.tokenizer, prompts)


def hub_folder(spec: str, *, local: bool) -> Path | None:
    """Return where a model of the hub with a module of this package is on this disk; None where it is another model.

    Args:
        spec: the hub id.
        local: whether to stay off the hub.
    """
    modules = load_file_path(spec, MODULES, local_files_only=local)
    first = None if modules is None else first_module(Path(modules).parent)
    if first is None or first.type not in OURS:
        return None
    return Path(load_dir_path(spec, "", local_files_only=local))


OURS: dict[str, type[SideBySide] | type[WordTable]] = {
    SIDE_BY_SIDE: SideBySide,
    WORD_TABLE: WordTable,
}
