"""Encoders as sentence-transformers models, also several encoders in one model.

Several encoders give a text the vector [√s₁·F₁(x); √s₂·F₂(x); …] with Σ sᵢ = 1. The inner product of two such vectors
is Σ sᵢ·⟨Fᵢ(x), Fᵢ(y)⟩, so each part has its share of the score. In this way an encoder gets companions: a
trained token table, and a table of the corpus's words.

The first part may be centered, since its mean query and mean document do not help to match queries to documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

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
    TABLE_FILE,
    WORD_TABLES,
    WORDS_FILE,
    Prompts,
    Table,
    WordRows,
    check_parts,
    damaged_model,
    first_module,
    joined_rows,
    mapped_rows,
    quiet_transformers,
    read_side_by_side,
)
from hce.errors import InputError
from hce.files import new_folder, read_json_value, write_checksums, write_json

if TYPE_CHECKING:
    from hce.encoding.encoder import Encoder

PART_OPTIONS = ("model_kwargs", "processor_kwargs", "config_kwargs", "backend")


class SideBySide(InputModule):
    """Encoders whose unit vectors are concatenated; see `Encoder`.

    Each part's vector is scaled by the root of its share.
    """

    save_in_root = False
    forward_kwargs: ClassVar[set[str]] = {"task"}
    config_file_name, config_keys = SHARES_FILE, ("shares",)
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
        check_parts(shares, [int(part.get_embedding_dimension()) for part in parts], centres, query_map)
        self.parts = nn.ModuleList(parts)  # type: ignore[assignment]
        self.shares = tuple(float(share) for share in shares)
        self.register_buffer("centres", None if centres is None else torch.from_numpy(centres))
        self.register_buffer("query_map", None if query_map is None else torch.from_numpy(query_map))

    @property
    def tokenizer(self) -> Any:
        """The first part's tokenizer."""
        return self.parts[0].tokenizer

    def get_embedding_dimension(self) -> int:
        """Return the sum of the parts' dimensions."""
        return sum(int(part.get_embedding_dimension()) for part in self.parts)

    def preprocess(self, inputs: list[str], prompt: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """Prepare the texts for each part; only the first one gets the prompt."""
        features = {}
        for number, part in enumerate(self.parts):
            own = part.preprocess(inputs, prompt=None if number else prompt, **kwargs)
            features.update({f"{number}.{name}": value for name, value in own.items()})
        return features

    def forward(self, features: dict[str, Any], task: str | None = None) -> dict[str, Any]:
        """Encode with each part, and join the vectors."""
        unit, rows = partial(F.normalize, dim=1), []
        for number, part in enumerate(self.parts):
            start = f"{number}."
            own = {name.removeprefix(start): value for name, value in features.items() if name.startswith(start)}
            rows.append(unit(part(own, task=task)["sentence_embedding"].float()))
        side = "query" if task == "query" else "document"
        if self.query_map is not None and side == "query":
            rows[0] = mapped_rows(rows[0], self.query_map, unit)
        center = None if self.centres is None else self.centres[SIDES.index(side)]
        return {**features, "sentence_embedding": joined_rows(rows, self.shares, center, unit, torch.cat)}

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Write each part into its own subfolder of an existing folder."""
        self.save_config(output_path)
        arrays = {"centres": self.centres, "query_map": self.query_map}
        known = {name: array.cpu().numpy() for name, array in arrays.items() if array is not None}
        if known:
            save_file(known, Path(output_path) / CENTRES_FILE)
        for number, part in enumerate(self.parts):
            part.save(str(Path(output_path) / f"part-{number}"), create_model_card=False)

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any) -> SideBySide:
        """Read what `save` wrote, from a folder or a hub id."""
        folder = Path(cls.load_dir_path(model_name_or_path, subfolder, **hub_options(kwargs)))
        how = {name: kwargs[name] for name in PART_OPTIONS if kwargs.get(name) is not None}
        folders, options = read_side_by_side(folder)
        try:
            return cls([_load_part(each, **how) for each in folders], **options)
        except Exception as error:  # a damaged file can make its reader raise anything
            raise damaged_model(folder, error) from error


class WordTable(InputModule):
    """A table of words as a module of sentence-transformers; NumPy sums the rows."""

    save_in_root = False
    tokenizer = None

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table = table

    def preprocess(self, inputs: list[str], prompt: str | None = None, **kwargs: Any) -> dict[str, Tensor]:
        """Encode the texts, without the prompt."""
        return {"sentence_embedding": torch.from_numpy(self.table.encode(inputs))}

    def forward(self, features: dict[str, Tensor], **kwargs: Any) -> dict[str, Tensor]:
        """Return what `preprocess` has encoded."""
        return features

    def get_embedding_dimension(self) -> int:
        """Return the length n of a vector."""
        return int(self.table.vectors.shape[1])

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Write the words and their vectors into an existing folder."""
        write_json(Path(output_path) / WORDS_FILE, self.table.splitter.as_dict())
        save_file({"table": self.table.vectors}, Path(output_path) / TABLE_FILE)

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any) -> WordTable:
        """Read what `save` wrote, from a folder or a hub id, or fail with FormatError."""
        folder = cls.load_dir_path(model_name_or_path, subfolder=subfolder, **hub_options(kwargs))
        return cls(Table.read_words(Path(folder)))


def hub_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Pick the options that say where a module's files come from."""
    names = ("token", "cache_folder", "revision", "local_files_only")
    return {name: options[name] for name in names if options.get(name) is not None}


def _load_part(folder: Path, **how: Any) -> SentenceTransformer:
    """Load a part without running code from its folder."""
    first, path = first_module(folder)
    if first == SIDE_BY_SIDE:
        return model_of(SideBySide.load(str(folder), path, local_files_only=True, **how), Prompts.read(folder))
    if table := Table.read(folder):
        return model_of_table(table)
    return SentenceTransformer(str(folder), device="cpu", local_files_only=True, **how)


def model_of(module: SideBySide | WordTable | StaticEmbedding, prompts: Prompts) -> SentenceTransformer:
    """Make a model of a module followed by Normalize."""
    model = SentenceTransformer(modules=[module, Normalize()], prompts=dict(prompts.by_name), device="cpu")
    model.default_prompt_name = prompts.default
    return model


def model_of_table(table: Table) -> SentenceTransformer:
    """Make a model of a table; both share the memory of the vectors."""
    if isinstance(table.splitter, WordRows):
        return model_of(WordTable(table), table.prompts)
    return model_of(StaticEmbedding(table.splitter, embedding_weights=table.vectors), table.prompts)


def table_of(model: SentenceTransformer) -> Table | None:
    """Return the table that a model consists of; None for other models."""
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
    """Fetch a hub model that needs a module of this package; None for other models."""
    modules = load_file_path(spec, MODULES, local_files_only=local)
    if modules is None or first_module(Path(modules).parent)[0] not in (SIDE_BY_SIDE, *WORD_TABLES):
        return None
    return Path(load_dir_path(spec, "", local_files_only=local))


def save_plain(encoder: Encoder, folder: str | Path, *, first_alone: bool = False) -> str:
    """Write a model that needs no hce and gives the same vectors; return its kind.

    Fail with InputError if the encoder has no such form, or the folder is not empty. With `first_alone`, write only the
    first encoder, without companions, query map and centers.
    """
    first = encoder.parts[0]
    if encoder is not first and not first_alone:
        count = len(encoder.parts)
        what = f"{count} encoders side by side" if count > 1 else "an encoder whose queries are moved afterwards"
        raise InputError(
            f"{encoder.name}: {what}, which no standard module does; load it with trust_remote_code=True and hce "
            "installed, or export the first encoder by --first-alone"
        )
    if first.table is not None and first.table.tokenizer is None:
        raise InputError(f"{encoder.name}: a table of words, which no standard module reads; load it with hce")
    with new_folder(folder) as new, quiet_transformers():
        first.model.save(str(new), create_model_card=False)
        entries = read_json_value(new / MODULES)
        for entry in entries:  # names that sentence-transformers also knew before version 6
            entry["type"] = f"sentence_transformers.models.{entry['type'].rpartition('.')[2]}"
        write_json(new / MODULES, entries)
        write_checksums(new)
    return "a token table" if first.is_table else "a transformer"
