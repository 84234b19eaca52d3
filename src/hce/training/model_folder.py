"""A trained model on disk: a sentence-transformers folder with files about its training.

- `hce.json`: the encoder, the corpus, the settings and the gains. Only this module reads and writes it.
- `history.jsonl`: a line per epoch. An index keeps copies of its model's `history.jsonl` and `hce.json`.
- `dev.jsonl`: each held-out query with its measure before and after training.
- `hierarchy/`: the tree.
- `README.md`: the model card.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from hce._version import __version__
from hce.data.corpus import Corpus
from hce.data.records import USUAL
from hce.errors import AwayError, FormatError, InputError, one_line
from hce.files import (
    CHECKSUMS,
    check_tree,
    checked_fields,
    is_file,
    is_folder,
    new_folder,
    open_atomically,
    open_file,
    read_bytes,
    read_json,
    require_undamaged,
    write_checksums,
    write_json,
)
from hce.search.fusion import Calibration
from hce.tree.hierarchy import Hierarchy

if TYPE_CHECKING:
    from hce.training.co_training import TrainResult

MAY_BE_NAN = ("loss", "accuracy")  # fields of an epoch; a NaN is read as None


def mean_over_kinds(dev: Mapping[str, float]) -> float:
    """Average the dev measure over the kinds of queries."""
    return float(np.mean(list(dev.values())))


@dataclass(frozen=True)
class Epoch:
    """One line of the history; epoch 0 is the encoder before training.

    The mean losses are `level_1` … `level_M`, `document`, `neighbours`. In joint training, `neighbours` comes from
    pseudo-queries, and the others come from labeled pairs.
    """

    epoch: int
    dev: dict[str, float]  # the dev measure by kind of query
    loss: dict[str, float] = field(default_factory=dict)
    accuracy: list[float] = field(default_factory=list)  # share of queries with the right node, by level from the top
    reclustered: bool = False  # whether the tree was grown again afterwards
    churn: float = 0.0  # the share of documents that re-clustering moved to another leaf
    seconds: float = 0.0  # measuring included

    @property
    def metric(self) -> float:
        """The dev measure that epochs are compared by: its mean over kinds of queries."""
        return mean_over_kinds(self.dev)

    def __str__(self) -> str:
        parts = [f"epoch {self.epoch}", f"dev {self.metric:.4f}"]
        if self.loss:
            parts.append("loss " + " ".join(f"{value:.3f}" for value in self.loss.values()))
        if self.accuracy:
            parts.append("accuracy " + " ".join(f"{value:.2f}" for value in self.accuracy))
        if self.reclustered:
            parts.append(f"re-clustered, {self.churn:.0%} of documents moved")
        return " · ".join([*parts, f"{self.seconds:.0f} s"])


def best_epoch(history: Sequence[Epoch]) -> int:
    """Return the epoch with the best dev metric; ties go to the earliest."""
    return max(history, key=lambda epoch: epoch.metric).epoch


FORMAT = 1
FACTS, HISTORY, QUERIES, TREE = "hce.json", "history.jsonl", "dev.jsonl", "hierarchy"
REMEDY = "train or copy the model again"
CARD_FILE = "README.md"
LOGIN = "set HF_TOKEN to a token that may write, or run 'hf auth login'"
IN_AN_INDEX = "model"  # the folder of an index that has the facts and the history of its model
CARD = """---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
tags:
- sentence-transformers
- feature-extraction
- hierarchical-corpus-encoder
---

# {name}

`{encoder}`, {done} the {documents:,} documents of {corpus} by [hce](https://pypi.org/project/hierarchical-corpus-encoder/)
{version} ({mode} training).

| {metric} | before | after |
|---|---|---|
{rows}

{gains}. {learned}{search} Fingerprint of the corpus: `{fingerprint}`.

{usage}

Settings:

```json
{recipe}
```
"""

USAGE = """```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("path/to/this/folder")
```"""
USAGE_WITH_COMPANIONS = """A module of `hce` concatenates the vectors of the encoder and of its companions. So
`pip install hierarchical-corpus-encoder` is needed. `trust_remote_code` lets sentence-transformers import that module
from the installed package; no code is in this folder.

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("path/to/this/folder", trust_remote_code=True)
queries, documents = model.encode_query(["…"]), model.encode_document(["…"])  # each side has a mean of its own
```"""

Entry = TypeVar("Entry")


class CorpusFacts(NamedTuple):
    """The part of `hce.json` about the documents trained on."""

    name: str
    documents: int
    fingerprint: str
    source: str | None = None  # the argument of `Corpus.load`; None for documents from memory
    reading: dict[str, Any] | None = None  # fields of `Reading` that differ from the default


@dataclass(frozen=True)
class ModelFacts:
    """The content of `hce.json`; `before`, `after` and `stages` have the dev measure by kind of query."""

    format: int
    hce: str  # the version of hce that wrote the file
    encoder: str  # the name of the encoder that training started from
    static: bool  # whether that encoder is a token table
    fingerprint: str  # of the trained encoder
    corpus: dict[str, Any]  # see `CorpusFacts`
    recipe: dict[str, Any]
    metric: str  # the name of the dev measure
    before: dict[str, float]
    after: dict[str, float]
    mix: float  # the share of the trained weights; 0 means that training did not help
    held_out: list[str]  # ids of the documents kept for measuring
    shares: list[float]  # how much the encoder and each of its companions count in a score
    words_share: float | None  # BM25's share of a hybrid score, as hce 0.2.0 chose it; None since then
    stages: dict[str, dict[str, float]]  # the dev measure after each stage, see `TrainResult`
    label_files: dict[str, str] = field(default_factory=dict)  # see `hce.training.train.train`
    calibration: dict[str, Any] | None = None  # see `hce.training.calibration`

    @property
    def base_encoder(self) -> str:
        """The encoder that training started from, as `Encoder.load` takes it."""
        return self.encoder.removesuffix(", fitted")

    @classmethod
    def read(cls, folder: str | Path) -> ModelFacts:
        """Read the facts of a model's folder."""
        path = Path(folder) / FACTS
        if not is_file(path):
            raise FormatError(f"{folder}: no model of hce there ({FACTS} is missing); 'hce train' writes one")
        try:
            facts = read_json(path)
            if not (isinstance(facts.get("format"), int) and facts["format"] > FORMAT):
                return cls._checked(facts)
        except FormatError as error:
            raise FormatError(f"{path}: damaged ({str(error).removeprefix(f'{path}: ')}); {REMEDY}") from error
        raise FormatError(f"{folder} was written by a newer version of hce; upgrade to read it")

    @classmethod
    def _checked(cls, values: dict[str, Any]) -> ModelFacts:
        facts = checked_fields(cls, values)
        checked_fields(CorpusFacts, facts.corpus)
        if not isinstance(facts.recipe.get("mode"), str):
            raise FormatError("'recipe' does not name the mode")
        if not facts.shares or not facts.before or facts.before.keys() != facts.after.keys():
            raise FormatError("'shares', 'before' or 'after' is empty, or they do not go together")
        if any(stage.keys() != facts.before.keys() for stage in facts.stages.values()):
            raise FormatError("'stages' and 'before' do not go together")
        if facts.calibration is not None:
            Calibration.read(facts.calibration)
        return facts

    @classmethod
    def find(cls, folder: str | Path) -> ModelFacts | None:
        """Read the facts of a model's folder; None if hce did not write it."""
        return cls.read(folder) if is_file(Path(folder) / FACTS) else None


class DevQuery(NamedTuple):
    """A held-out query and its NDCG@10: with the encoder as given, and with the encoder returned."""

    kind: str
    query: str
    before: float
    after: float


@dataclass(frozen=True)
class ModelFolder:
    """The content of a trained model's folder; `tree` is None if the model was trained without one."""

    path: Path
    facts: ModelFacts
    history: list[Epoch]
    queries: list[DevQuery]
    tree: Hierarchy | None

    @classmethod
    def read(cls, path: str | Path) -> ModelFolder:
        """Read what `save_model` wrote; errors are those of `ModelFacts.read`."""
        path = Path(path)
        facts = ModelFacts.read(path)
        history, queries = _read_lines(path / HISTORY, Epoch), _read_lines(path / QUERIES, DevQuery)
        tree = path / TREE
        return cls(path, facts, history, queries, Hierarchy.load(tree) if is_folder(tree) else None)


@dataclass(frozen=True)
class Training:
    """An index's record of its encoder's training: some of the `ModelFacts`, and epochs with their `metric`."""

    metric: str
    before: dict[str, float]
    after: dict[str, float]
    mix: float
    stages: dict[str, dict[str, float]]
    epochs: list[dict[str, Any]]


def save_model(
    result: TrainResult, corpus: Corpus, path: str | Path, label_files: Mapping[str, str] | None = None
) -> None:
    """Write a model's folder, atomically."""
    usual = asdict(USUAL)
    reading = {name: value for name, value in asdict(corpus.reading).items() if value != usual[name]}
    of_corpus = CorpusFacts(corpus.name, len(corpus), corpus.fingerprint, corpus.source, reading or None)
    facts = ModelFacts(
        format=FORMAT,
        hce=__version__,
        encoder=result.encoder.name,
        static=result.encoder.parts[0].is_table,
        fingerprint=result.encoder.fingerprint,
        corpus=of_corpus._asdict(),
        recipe=result.recipe.as_dict(),
        metric=result.metric,
        before=result.before,
        after=result.after,
        mix=result.mix,
        held_out=[corpus[position].id for position in result.held_out.tolist()],
        shares=list(result.encoder.shares),
        words_share=None,
        calibration=result.calibration.as_dict() if result.calibration else None,
        stages=result.stages,
        label_files=dict(label_files or {}),
    )
    with new_folder(path) as folder:
        result.encoder.save(folder / "model")
        for file in list((folder / "model").iterdir()):
            file.replace(folder / file.name)
        (folder / "model").rmdir()
        if result.hierarchy.levels:
            result.hierarchy.save(folder / TREE)
        lines = {HISTORY: map(asdict, result.history), QUERIES: (query._asdict() for query in result.dev_queries())}
        for name, entries in lines.items():
            with open_atomically(folder / name) as written:
                written.writelines(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
        with open_atomically(folder / CARD_FILE) as card:
            card.write(model_card(Path(path).name, facts))
        write_json(folder / FACTS, asdict(facts))
        write_checksums(folder)


def model_card(name: str, facts: ModelFacts) -> str:
    """Write the model card, which people read first."""
    before, after = ({**each, "mean": mean_over_kinds(each)} for each in (facts.before, facts.after))
    unchanged = "unchanged, as nothing clearly beat it, after training on"
    return CARD.format(
        name=name,
        encoder=facts.encoder,
        done=unchanged if facts.before == facts.after else "adapted to",
        documents=facts.corpus["documents"],
        corpus=facts.corpus["name"],
        fingerprint=facts.corpus["fingerprint"],
        version=facts.hce,
        mode=facts.recipe["mode"],
        metric=facts.metric,
        rows="\n".join(f"| {kind} | {before[kind]:.4f} | {after[kind]:.4f} |" for kind in before),
        gains=gains(facts.before, facts.stages, facts.after).capitalize(),
        learned=what_was_learned(facts),
        search="" if facts.calibration is None else f" Search: {Calibration.read(facts.calibration).summary()}.",
        usage=USAGE if len(facts.shares) == 1 else USAGE_WITH_COMPANIONS,
        recipe=json.dumps(facts.recipe, indent=2),
    )


def gains(before: Mapping[str, float], stages: Mapping[str, Mapping[str, float]], after: Mapping[str, float]) -> str:
    """Return a line with the mean dev measure after each stage.

    >>> gains({"title": 0.1}, {"fitting": {"title": 0.2}, "training": {"title": 0.3}}, {"title": 0.3})
    'fitting 0.1000 → 0.2000, training → 0.3000'
    >>> gains({"title": 0.1}, {}, {"title": 0.3})
    '0.1000 → 0.3000'
    """
    start = f"{mean_over_kinds(before):.4f} "
    steps = [f"{name} {start * (not i)}→ {mean_over_kinds(each):.4f}" for i, (name, each) in enumerate(stages.items())]
    return ", ".join(steps) or f"{start}→ {mean_over_kinds(after):.4f}"


def what_was_learned(facts: ModelFacts) -> str:
    """Describe the shares of companions in a score and of trained weights in the mix."""
    of = "the companion table's" if facts.recipe.get("train") == "companion" else "the"
    weights = f"{facts.mix:.0%} of the way from {of} first weights to the trained ones."
    if len(facts.shares) == 1:
        return weights
    return f"{1 - facts.shares[0]:.0%} of a score from companions of the corpus's own. {weights}"


def trained_tree(folder: str | Path, corpus: Corpus) -> Hierarchy | None:
    """Load the tree that was trained with a model, if `corpus` is the model's."""
    tree, facts = Path(folder) / TREE, ModelFacts.find(folder)
    is_of_it = facts is not None and facts.corpus["fingerprint"] == corpus.fingerprint
    return Hierarchy.load(tree) if is_of_it and is_folder(tree) else None


def keep_facts(folder: str | Path, kept: Path) -> None:
    """Copy the facts and the history of a model into a new folder of an index."""
    with new_folder(kept) as new:
        for name in (FACTS, HISTORY):
            if is_file(Path(folder) / name):
                with open_file(Path(folder) / name) as given, (new / name).open("wb") as copy:
                    shutil.copyfileobj(given, copy)
        write_checksums(new)


def read_training(folder: Path) -> Training | None:
    """Read what `keep_facts` kept; None if it is missing or damaged."""
    try:
        facts, history = ModelFacts.read(folder), _read_lines(folder / HISTORY, Epoch)
    except FormatError:
        return None
    epochs = [{**asdict(epoch), "metric": epoch.metric} for epoch in history]
    return Training(facts.metric, facts.before, facts.after, facts.mix, facts.stages, epochs)


def _read_lines(path: Path, entry: type[Entry]) -> list[Entry]:
    """Read one entry per line, or none if there is no file; a NaN becomes None."""
    try:
        lines = read_bytes(path).decode().split("\n") if is_file(path) else []
        values = [json.loads(line, parse_constant=lambda name: None) for line in lines if line.strip()]
        return [checked_fields(entry, each, may_be_nan=MAY_BE_NAN) for each in values]
    except (OSError, ValueError, RecursionError, FormatError) as error:
        raise FormatError(f"{path}: damaged ({one_line(error)}); {REMEDY}") from error


# ------------------------------------------------------------------------------------------------- to a model hub


def push(model: str | Path, repository: str, *, public: bool = False) -> tuple[str, list[str]]:
    """Upload a model that hce trained, as one commit.

    Args:
        model: its folder.
        repository: ORG/NAME on the hub; it is created if it does not exist.
        public: whether everybody can read a new repository.

    Returns:
        The address of the repository, and the names of the files.

    Raises:
        InputError: the name is impossible, or the hub refuses the token.
        FormatError: the folder is no model of hce, or it is damaged.
        AwayError: the hub does not answer.
    """
    import httpx
    from huggingface_hub import CommitOperationAdd, HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    def without_token(error: Exception) -> str:
        token = get_token()
        return one_line(error).replace(token, "…") if token else one_line(error)

    contents = uploads_of(Path(model))
    operations = [CommitOperationAdd(name, content) for name, content in contents.items()]
    api = HfApi(library_name="hce", library_version=__version__)
    try:
        if repository.count("/") != 1:
            raise HFValidationError("give ORG/NAME")
        url = api.create_repo(repository, private=not public, exist_ok=True)
        api.create_commit(repository, operations, commit_message=f"Model of hce {__version__}")
    except HFValidationError as error:
        raise InputError(f"{repository!r} is no name of a repository ({one_line(error)})") from error
    except LocalTokenNotFoundError as error:
        raise InputError(f"the hub wants a token; {LOGIN}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        remedy = f"; {LOGIN}" if status in (401, 403) else ""
        raise InputError(f"{repository}: the hub refuses ({status}: {without_token(error)}){remedy}") from None
    except (httpx.HTTPError, OSError) as error:
        raise AwayError(f"the hub does not answer ({without_token(error)}); try again later") from None
    return str(url), list(contents)


def uploads_of(folder: Path) -> dict[str, Path | bytes]:
    """Return what to upload, by name: files with checksums, and the model card.

    Held-out queries are not uploaded, because they quote the corpus. In facts and card, paths are cut to the last part.
    """
    facts = ModelFacts.read(folder)
    require_undamaged(folder, REMEDY)
    found, known = check_tree(folder), read_json(folder / CHECKSUMS)
    if FACTS not in known:
        raise FormatError(f"{folder}: {CHECKSUMS} does not list {FACTS}; {REMEDY}")
    named = [facts.corpus.get("source"), facts.base_encoder, *facts.label_files.values()]
    places = sorted({each for each in named if each and Path(each).name != each and _is_here(each)}, key=len)
    contents: dict[str, Path | bytes] = {name: folder / name for name in known if name != QUERIES}
    for name in (FACTS, *([CARD_FILE] if CARD_FILE in found else [])):
        text = read_bytes(folder / name).decode()
        for place in reversed(places):
            for spelled in (json.dumps(place, ensure_ascii=False)[1:-1], place):
                text = text.replace(spelled, Path(place).name)
        contents[name] = text.encode()
    checksums = {name: value for name, value in known.items() if name != QUERIES}
    checksums[FACTS] = zlib.crc32(contents[FACTS])  # type: ignore[arg-type]
    return {**contents, CHECKSUMS: (json.dumps(checksums, indent=2) + "\n").encode()}


def _is_here(name: str) -> bool:
    """Return whether a name is a path, and not a hub id such as org/name."""
    return Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") != 1 or Path(name).exists()
