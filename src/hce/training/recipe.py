"""Recipe: every setting of a training run, documented once; the command line takes its help from here.

A static table and a transformer need different learning rates, batches and spans. `Recipe.for_encoder` returns those
that measured best for each (docs/LOG.md), `Recipe.paper` the paper's.

The setting `train` decides which parts are trained:

- encoder: the encoder, without companions.
- companion: a token table with a transformer's tokens. It and the corpus's word table join the unchanged transformer.
  For a static encoder, which is a table itself, this value is an error.
- both: the encoder and its companions. A static encoder gets the word table, a transformer also a trained token table.
- auto: both for a static encoder; companion for a transformer, fine-tuned first if there are 400 labeled queries.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_type_hints

from hce.data.text import checked_language
from hce.errors import InputError, wrong_type

Supervision = Literal["auto", "unsupervised", "supervised", "joint"]
LevelTarget = Literal["node", "document"]
Pseudo = Literal["ict", "simcse"]
Sampling = Literal["auto", "siblings", "fresh-siblings", "near", "mined", "none"]
SpanUnit = Literal["words", "tokens"]
Clustering = Literal["auto", "exact", "fast", "uniform"]
KeptWeights = Literal["mix", "best", "last"]
Optimizer = Literal["adamw", "adafactor"]
WhatIsTrained = Literal["auto", "companion", "encoder", "both"]
Precision = Literal["auto", "float32", "bfloat16"]

TRUTH = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)

KINDS = {bool: (bool, "True or False"), int: (Integral, "a whole number"), float: (Real, "a number")}  # also NumPy's


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


def _positive(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text, "positive": True})


@dataclass(frozen=True)
class Recipe:
    """How to train. Each field's metadata has its help, which the command line shows too."""

    mode: Supervision = _option("auto", "what to train on; auto: joint with labeled pairs, else unsupervised")
    train: WhatIsTrained = _option(
        "auto",
        "companion: tables of the corpus's tokens and words, next to the unchanged encoder; encoder: the encoder "
        "itself; both; auto: both for a static encoder, whose companion is the words; companion for a transformer, "
        "after fine-tuning it if there are 400 labeled queries",
    )
    language: str = _option(
        "english", "the language whose word endings the table of the corpus's words cuts off, or none"
    )
    most_documents: int = _option(
        131_072,
        "the most documents to learn from; of a larger corpus, a random sample is used, with all documents that labels "
        "name; 0: all",
    )
    epochs: int = _positive(10, "rounds of optimize, measure, re-cluster")
    epoch_pairs: int = _option(
        0,
        "pairs in an epoch; 0: as many as documents, so that re-encoding them costs less than the steps, but at most 8 "
        "turns through the pairs",
    )
    batch_size: int = _positive(256, "pairs in a step, over all processes; at most a quarter of few documents")
    chunk_size: int = _option(
        0, "texts encoded at once, with gradient checkpointing; 0: the entire batch, which needs more memory"
    )
    precision: Precision = _option(
        "auto",
        "the type of a transformer's computations in training, with weights in float32; auto: bfloat16 if the GPU or "
        "the processor has instructions for it",
    )
    frozen: float = _option(
        0.0, "share of a transformer's layers to freeze, from the lowest on; above 0, the embeddings are frozen too"
    )
    dropout: bool = _option(
        True, "train a transformer with its dropout, as simcse does always; off: a step takes less time"
    )
    learning_rate: float = _positive(1e-2, "of the encoder; it rises over the warm-up and then falls linearly to 0")
    centroid_learning_rate: float = _option(
        0.0,
        "of the tree's centroids, with the encoder's optimizer and schedule, as in the paper; 0: they stay where "
        "clustering put them",
    )
    warmup: float = _option(0.0, "share of all steps over which the learning rate rises")
    optimizer: Optimizer = _option("adamw", "adamw, or the paper's adafactor")
    temperature: float = _positive(0.05, "τ of the document loss; the paper has 0.01")
    level_temperature: float = _positive(0.15, "τ_h of the level losses; softer than τ measured better")
    tree: bool = _option(True, "train with the tree; off: plain contrastive training, for comparison")
    cotrain: bool = _option(True, "re-cluster after each epoch that improved (Alg. 3); off: keep the first tree")
    branching: int = _option(
        0,
        "expected children of a node, b; 0: the smallest b with which the tree has depth 3; -1: the next power of two, "
        "as in the paper",
    )
    levels: int = _option(-1, "levels with a level loss, M; -1 or all: all above the documents, L − 1")
    level_target: LevelTarget = _option(
        "document",
        "what a query learns at each level: node, to choose the node above its document (Eq. 5); document, to score "
        "nodes as its document does",
    )
    level_weight: float = _option(1.0, "weight of the level losses next to the document loss")
    negatives: Sampling = _option(
        "auto",
        "siblings: from the same leaf, with the vectors that clustering computed (free); fresh-siblings: encoded again "
        "with gradients, as in the paper; near: wrong documents near the query, found through the tree; mined: the "
        "nearest of all wrong documents (ANCE); none: in-batch only; auto: near with labeled queries, else siblings",
    )
    negative_count: int = _option(2, "sampled negatives for each query, n_NS; the paper has 4")
    neighbours: int = _option(
        8,
        "how many neighbors of a pseudo-query's document, found through the tree, a table learns to rank as BM25 does; "
        "0: none",
    )
    mask: bool = _option(
        True, "do not use other right documents of a query, or documents of equal text, as negatives; off in the paper"
    )
    margin: float = _option(
        0.0, "documents whose inner product with the right one is above this are no negatives; 0: off"
    )
    alpha: float = _option(0.5, "weight of the unsupervised loss next to the supervised one")
    pseudo: Pseudo = _option("ict", "pseudo-queries: spans of the document (ict), or the document again (simcse)")
    span_lengths: tuple[int, ...] = _option((8, 16, 32), "lengths of ICT spans; the paper has 64")
    span_unit: SpanUnit = _option(
        "words", "what spans are counted in: words and marks, or the tokens of the encoder, as in the paper"
    )
    cut_share: float = _option(0.9, "how often the span is cut out of its document; the paper has 0")
    window: int = _option(0, "words and marks from a document's start that a pair uses; 0: all")
    fit_static: bool = _option(True, "fit a static encoder's table to the corpus before training")
    keep: KeptWeights = _option(
        "mix",
        "the weights to return; mix: the mix of the first and the trained ones that dev queries prefer; best: those of "
        "the best epoch, which may be the first ones; last: the last, as in the paper",
    )
    mix_limit: float = _positive(
        1.0, "the largest share of the trained weights in a mix that unlabeled dev queries choose"
    )
    patience: int = _positive(10, "epochs without improvement on dev before stopping")
    dev_queries: int = _positive(
        512,
        "without labels, how many documents give dev queries; with labels and no dev split, how many labeled queries "
        "are held out; at most a tenth of either, but at least 20 labeled queries",
    )
    dev_pool: int = _option(8192, "documents searched when measuring on dev; 0: all")
    hold_out: bool = _option(
        True, "do not train on the documents that give held-out pseudo-queries; off: train on all, as in the paper"
    )
    clustering: Clustering = _option(
        "auto",
        "exact or fast k-means; auto: by the number of documents; uniform: exact, from random assignments, as in the "
        "paper",
    )
    seed: int = _option(0, "same seed, same result")

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(Recipe).items():
            allowed = get_args(hint)
            if allowed and isinstance(allowed[0], str) and getattr(self, name) not in allowed:
                raise InputError(f"{name} {getattr(self, name)!r}: choose one of {', '.join(allowed)}")
        for setting in fields(self):
            value = getattr(self, setting.name)
            kind, what = KINDS.get(type(setting.default), (object, ""))
            if not isinstance(value, kind):
                raise wrong_type(value, f"{setting.name} {value!r}: give {what}")
            if isinstance(value, int | float) and "positive" in setting.metadata and not value > 0:
                raise InputError(f"{setting.name} {value}: has to be above 0")
            if isinstance(value, int | float) and setting.name not in ("levels", "branching") and not value >= 0:
                raise InputError(f"{setting.name} {value}: cannot be below 0")
        checked_language(self.language)
        if self.branching == 1 or self.branching < -1:
            raise InputError(f"branching {self.branching}: a node needs 2 children or more; 0 chooses")
        if not self.span_lengths or min(self.span_lengths) < 1:
            raise InputError(f"span_lengths {self.span_lengths}: give one or more lengths of 1 or more")

    @classmethod
    def for_encoder(cls, *, static: bool, documents: int | None = None, **settings: Any) -> Recipe:
        """Return what measured best for a kind of encoder, changed by `settings`.

        Args:
            static: whether the encoder is a token table. A table's defaults also serve training a companion.
            documents: how many there are. A batch has at most a quarter of them (or of `most_documents`), unless
                `batch_size` is set.
            settings: fields of the recipe, instead of the defaults.

        Raises:
            InputError: an unknown setting or an impossible value.
        """
        trains_table = static or settings.get("train", "auto") in ("auto", "companion")
        return cls._of({} if trains_table else TRANSFORMER, documents, settings)

    @classmethod
    def paper(cls, *, documents: int | None = None, **settings: Any) -> Recipe:
        """Return the paper's settings, else our defaults, changed by `settings`.

        The arguments are those of `for_encoder`. The batch of 512 is encoded in chunks (`chunk_size`) to save memory.
        The gradients are the same, except for other dropout masks.
        """
        return cls._of(PAPER, documents, settings)

    @classmethod
    def _of(cls, defaults: dict[str, Any], document_count: int | None, settings: dict[str, Any]) -> Recipe:
        unknown = sorted(set(settings) - {each.name for each in fields(cls)})
        if unknown:
            raise unknown_setting(unknown[0], [each.name for each in fields(cls)])
        recipe = cls(**{**defaults, **settings})
        if document_count is None or "batch_size" in settings:
            return recipe
        learned_from = min(document_count, recipe.most_documents or document_count)
        return replace(recipe, batch_size=min(recipe.batch_size, max(2, learned_from // 4)))

    @classmethod
    def parsed(cls, name: str, text: str) -> Any:
        """Read a setting's value from text: 8,16 for lengths, all for levels, true, 0.5."""
        defaults: dict[str, Any] = {each.name: each.default for each in fields(cls)}
        if name not in defaults:
            raise unknown_setting(name, defaults)
        return -1 if (name, text) == ("levels", "all") else parsed_value(name, text, defaults[name])

    @property
    def needs_vectors(self) -> bool:
        """Whether training needs vectors of all documents: for a tree, or to mine negatives."""
        return self.tree or self.negatives == "mined"

    def require_documents(self, count: int) -> None:
        """Fail if there are fewer documents than pairs in a batch."""
        if self.batch_size > count:
            raise InputError(
                f"batch_size {self.batch_size} is larger than the corpus ({count} documents); "
                f"give {max(2, count // 4)} or so"
            )

    @classmethod
    def described(cls, name: str) -> tuple[str, str, str]:
        """Return a setting's default, its default for transformers, and its help."""
        setting = next(each for each in fields(cls) if each.name == name)
        other = TRANSFORMER.get(name, setting.default)
        return shown_value(setting.default), shown_value(other), setting.metadata["help"]

    def as_dict(self) -> dict[str, Any]:
        """Return the settings for a manifest, unchanged by a round trip through JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def parsed_settings(items: Iterable[str]) -> dict[str, Any]:
    """Parse `--set` items such as levels=all; recipe=paper is the paper's settings."""
    settings: dict[str, Any] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if not equals:
            raise InputError(f"--set {item}: give name=value, such as epochs=4")
        name = name.replace("-", "_")
        try:
            settings |= PAPER if (name, text) == ("recipe", "paper") else {name: Recipe.parsed(name, text)}
        except InputError as error:
            raise InputError(f"--set {item}: {error}") from error
    return settings


def recipe_of_table(recipe: Recipe, document_count: int) -> Recipe:
    """Return the recipe of a token table next to a transformer that is trained too.

    It shares the transformer's held-out documents and kind of tree.
    """
    shared = ("mode", "seed", "dev_queries", "language", "hold_out", "tree", "cotrain", "branching", "clustering")
    settings = {name: getattr(recipe, name) for name in shared}
    return Recipe.for_encoder(static=True, documents=document_count, train="encoder", precision="float32", **settings)


def recipe_of_tuning(recipe: Recipe, epoch_pairs: int) -> Recipe:
    """Return the recipe to fine-tune a transformer by labels before companions join."""
    shared = ("seed", "dev_queries", "dev_pool", "precision", "clustering", "branching")
    settings = {name: getattr(recipe, name) for name in shared}
    return Recipe.for_encoder(static=False, epoch_pairs=epoch_pairs, **TUNING, **settings)


def unknown_setting(name: str, known: Iterable[str]) -> InputError:
    """Return the error of an unknown setting, with the name probably meant."""
    close = get_close_matches(name, list(known), n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    return InputError(f"unknown setting {name}; {meant}'hce train --help-settings' lists all")


def parsed_value(name: str, text: str, default: Any) -> Any:
    """Read a value from text by the type of the setting's default."""
    try:
        if isinstance(default, bool):
            return TRUTH[text.lower()]
        if isinstance(default, tuple):
            return tuple(int(item) for item in text.split(","))
        return type(default)(text)
    except (ValueError, KeyError):
        raise InputError(f"{name} {text!r}: give a value such as {shown_value(default)}") from None


def shown_value(value: Any) -> str:
    """Return a value as `parsed_value` reads it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


# A strong encoder should move little: few small steps, longer spans, and without labels at most half of the way. Going
# all the way gains recall and loses at the top of the ranking. Pseudo-queries do not show this loss (docs/LOG.md).
TRANSFORMER: dict[str, Any] = {
    "epochs": 2,
    "batch_size": 64,
    "learning_rate": 2e-5,
    "warmup": 0.1,
    "span_lengths": (8, 16, 32, 64),
    "window": 96,
    "neighbours": 0,
    "mix_limit": 0.5,
    "dev_queries": 96,
    "dev_pool": 512,
}

# How labels fine-tune a transformer, in half the time of sentence-transformers' trainer (docs/results/labels.md).
TUNING: dict[str, Any] = {
    "train": "encoder",
    "mode": "supervised",
    "epochs": 1,
    "batch_size": 32,
    "learning_rate": 1e-4,
    "frozen": 0.5,
    "dropout": False,
    "tree": False,
    "negatives": "none",
    "keep": "last",
}

# The paper's settings; what it does not mention is off. Centroids are trained with the encoder; M = L − 1; no
# documents are held out; only the document itself is masked; dev queries search all documents; the last weights are
# returned. The paper does not give the centroids' learning rate, so it is the encoder's.
PAPER: dict[str, Any] = {
    "train": "encoder",
    "most_documents": 0,
    "batch_size": 512,
    "chunk_size": 32,
    "precision": "bfloat16",
    "learning_rate": 1e-4,
    "centroid_learning_rate": 1e-4,
    "warmup": 0.0,
    "optimizer": "adafactor",
    "temperature": 0.01,
    "level_temperature": 0.01,
    "levels": -1,
    "level_target": "node",
    "level_weight": 1.0,
    "negatives": "fresh-siblings",
    "negative_count": 4,
    "neighbours": 0,
    "mask": False,
    "margin": 0.0,
    "alpha": 0.5,
    "pseudo": "ict",
    "span_lengths": (64,),
    "span_unit": "tokens",
    "cut_share": 0.0,
    "window": 0,
    "fit_static": False,
    "keep": "last",
    "hold_out": False,
    "dev_pool": 0,
    "clustering": "uniform",
    "branching": -1,
}
