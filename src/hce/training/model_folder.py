"""A trained model on disk: an ordinary sentence-transformers directory, and beside the model what is known of it.

`hce.json` (what was trained on what, and what it brought), `history.jsonl` (an entry an epoch), `dev.jsonl` (each
held-out query before and after), `hierarchy/` (the tree), `README.md` (the model card).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hce._version import __version__
from hce.data.corpus import Corpus
from hce.errors import FormatError
from hce.files import new_folder, open_atomically, write_json
from hce.training.co_training import TrainResult
from hce.training.heldout import mean_over_kinds
from hce.training.run import Epoch
from hce.tree.hierarchy import Hierarchy

FORMAT = 1
CARD = """---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
tags:
- sentence-transformers
- feature-extraction
- hierarchical-corpus-encoder
---

# {name}

`{encoder}`, adapted to the {documents:,} documents of {corpus} by [hce](https://pypi.org/project/hierarchical-corpus-encoder/)
{version} ({mode} training).

| {metric} | before | after |
|---|---|---|
{rows}

{mix:.0%} of the way from the first weights to the trained ones. Fingerprint of the corpus: `{fingerprint}`.

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("path/to/this/folder")
```

Settings:

```json
{recipe}
```
"""


class DevQuery(NamedTuple):
    """A held-out query and its NDCG@10 by the encoder that training began with, and by the one it ended with."""

    kind: str
    query: str
    before: float
    after: float


@dataclass(frozen=True)
class ModelFolder:
    """What is known of a trained model.

    Attributes:
        path: its folder.
        facts: what `hce.json` says.
        history: an entry for each epoch.
        queries: held-out queries before and after.
        tree: the tree of the corpus it was trained on, if it was trained with one.
    """

    path: Path
    facts: dict[str, Any]
    history: list[Epoch]
    queries: list[DevQuery]
    tree: Hierarchy | None

    @classmethod
    def read(cls, path: str | Path) -> ModelFolder:
        """Read what `save_model` wrote beside the model.

        Raises:
            FormatError: nothing of hce is there, it is damaged, or a newer version wrote it.
        """
        path = Path(path)
        try:
            facts = json.loads((path / "hce.json").read_text(encoding="utf-8"))
            if facts["format"] > FORMAT:
                raise FormatError(f"{path} was written by a newer version of hce; upgrade to read it")
            history = [Epoch(**entry) for entry in _lines(path / "history.jsonl")]
            queries = [DevQuery(**entry) for entry in _lines(path / "dev.jsonl")]
        except FileNotFoundError as error:
            raise FormatError(f"{path}: no model of hce there (hce.json is missing); 'hce train' writes one") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FormatError(
                f"{path}: what is known of the model is damaged ({error}); train or copy it again"
            ) from error
        tree = path / "hierarchy"
        return cls(path, facts, history, queries, Hierarchy.load(tree) if tree.is_dir() else None)


def save_model(result: TrainResult, corpus: Corpus, path: str | Path, queries: Iterable[DevQuery] = ()) -> None:
    """Write a model's folder; it appears whole or not at all.

    Raises:
        InputError: the folder is there already and not empty.
    """
    facts = {
        "format": FORMAT,
        "hce": __version__,
        "encoder": result.encoder.name,
        "static": result.encoder.is_static,
        "fingerprint": result.encoder.fingerprint,
        "corpus": {"name": corpus.name, "documents": len(corpus), "fingerprint": corpus.fingerprint},
        "recipe": result.recipe.as_dict(),
        "metric": result.metric,
        "before": result.before,
        "after": result.after,
        "mix": result.mix,
        "held_out": [corpus[number].id for number in result.held_out.tolist()],
    }
    with new_folder(path) as folder:
        result.encoder.save(folder / "model")
        for file in list((folder / "model").iterdir()):
            file.replace(folder / file.name)
        (folder / "model").rmdir()
        if result.hierarchy.levels:
            result.hierarchy.save(folder / "hierarchy")
        _write_lines(folder / "history.jsonl", (asdict(epoch) for epoch in result.history))
        _write_lines(folder / "dev.jsonl", (query._asdict() for query in queries))
        with open_atomically(folder / "README.md") as card:
            card.write(model_card(Path(path).name, facts))
        write_json(folder / "hce.json", facts)


def model_card(name: str, facts: dict[str, Any]) -> str:
    """What people read first in a model's folder."""
    measures = (
        {**facts["before"], "mean": mean_over_kinds(facts["before"])},
        {
            **facts["after"],
            "mean": mean_over_kinds(facts["after"]),
        },
    )
    rows = "\n".join(f"| {kind} | {measures[0][kind]:.4f} | {measures[1][kind]:.4f} |" for kind in measures[0])
    return CARD.format(
        name=name,
        encoder=facts["encoder"],
        documents=facts["corpus"]["documents"],
        corpus=facts["corpus"]["name"],
        fingerprint=facts["corpus"]["fingerprint"],
        version=facts["hce"],
        mode=facts["recipe"]["mode"],
        metric=facts["metric"],
        rows=rows,
        mix=facts["mix"],
        recipe=json.dumps(facts["recipe"], indent=2),
    )


def _write_lines(path: Path, entries: Iterable[dict[str, Any]]) -> None:
    with open_atomically(path) as file:
        file.writelines(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


FOLDER = "model"


@dataclass(frozen=True)
class Training:
    """The training of an encoder.

    Attributes:
        metric: what the dev measure is, in words.
        before: it by kind of query, of the encoder that was given.
        after: of the encoder that came out.
        mix: how much of the trained weights is in it; 0 means that training did not help.
        epochs: the history; epoch 0 is the start. Each has `metric`, the mean over kinds.
    """

    metric: str
    before: dict[str, float]
    after: dict[str, float]
    mix: float
    epochs: list[dict[str, Any]]


def read_training(index: Path) -> Training | None:
    """Read it; None where the index was not made from a trained model, or the files are damaged."""
    folder = index / FOLDER
    try:
        facts = _load((folder / "hce.json").read_text(encoding="utf-8"))
        lines = (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()
        history = [Epoch(**_load(line)) for line in lines if line.strip()]
        epochs = [{**asdict(epoch), "metric": epoch.metric} for epoch in history]
        return Training(str(facts["metric"]), facts["before"], facts["after"], float(facts["mix"]), epochs)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _load(text: str) -> dict[str, Any]:
    """JSON without the NaN and infinity that only Python has; a loss may have become one."""
    return dict(json.loads(text, parse_constant=lambda name: None))
