"""Recipe: every setting of a training run, documented once; the command line's help is made of it.

A static table and a transformer want different learning rates, batches and spans; `Recipe.for_encoder` has those that
measured best for each (docs/LOG.md).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_type_hints

from hce.data.terms import checked_language
from hce.errors import InputError

Supervision = Literal["auto", "unsupervised", "supervised", "joint"]
Pseudo = Literal["ict", "simcse"]
Sampling = Literal["siblings", "fresh-siblings", "mined", "none"]
Optimizer = Literal["adamw", "adafactor"]
Learner = Literal["auto", "companion", "encoder", "both"]
Precision = Literal["auto", "float32", "bfloat16"]


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


def _positive(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text, "positive": True})


@dataclass(frozen=True)
class Recipe:
    """How to train. The field docs are in the fields' metadata, where the command line finds them too."""

    mode: Supervision = _option(
        "auto", "what to train on; auto: joint where there are labelled pairs, else unsupervised"
    )
    train: Learner = _option(
        "auto",
        "companion: tables of the corpus's tokens and words, beside the encoder as it is; encoder: the encoder itself; "
        "both; auto: both for a static encoder, whose companion is the words, companion for a transformer",
    )
    language: str = _option("english", "whose word endings are cut off in the table of the corpus's words, or none")
    epochs: int = _positive(10, "rounds of optimise, measure, re-cluster")
    epoch_pairs: int = _option(
        0,
        "pairs in an epoch; 0: as many as documents, so that re-encoding those stays cheaper, or 8 turns through fewer",
    )
    batch_size: int = _positive(256, "pairs in a step, over all processes; at most a quarter of few documents")
    chunk_size: int = _option(
        0, "pairs encoded at once, by gradient caching; 0: the whole batch, which needs more memory"
    )
    precision: Precision = _option(
        "auto",
        "what a transformer computes in while it is trained, with weights in float32; auto: bfloat16 where the GPU or "
        "the processor has instructions for it",
    )
    learning_rate: float = _positive(1e-2, "of the encoder; it rises over the warm-up and then falls linearly to 0")
    centroid_learning_rate: float = _option(0.0, "of the tree's centroids; 0 keeps them where clustering put them")
    warmup: float = _option(0.0, "share of all steps over which the learning rate rises")
    optimizer: Optimizer = _option("adamw", "adamw, or the paper's adafactor")
    temperature: float = _positive(0.05, "τ of the document loss; the paper has 0.01")
    level_temperature: float = _positive(0.15, "τ_h of the level losses; softer than τ measured better")
    tree: bool = _option(True, "train with the tree; off: plain contrastive training, for comparison")
    cotrain: bool = _option(True, "re-cluster after each epoch that improved (Alg. 3); off: keep the first tree")
    branching: int = _option(0, "expected children of a node, b; 0: the power of two that makes three levels")
    levels: int = _option(
        -1,
        "levels with a level loss, M; -1: all above the documents, but none where labelled queries have few right "
        "documents each, or where training without labels is long",
    )
    negatives: Sampling = _option(
        "siblings",
        "siblings: from the same leaf, by the vectors that clustering computed (free); fresh-siblings: encoded anew "
        "with gradients, as in the paper; mined: the nearest wrong documents (ANCE); none: in-batch only",
    )
    negative_count: int = _option(2, "sampled negatives for each query, n_NS; the paper has 4")
    margin: float = _option(0.0, "documents with an inner product above this to the right one are no negatives; 0: off")
    alpha: float = _option(0.5, "weight of the unsupervised loss beside the supervised one")
    pseudo: Pseudo = _option("ict", "pseudo-queries: spans of the document (ict), or the document again (simcse)")
    span_lengths: tuple[int, ...] = _option((8, 16, 32), "lengths of ICT spans in tokens; the paper has 64")
    cut_share: float = _option(0.9, "how often the span is cut out of its document; the paper has 0")
    window: int = _option(0, "tokens from a document's start that an ICT pair is taken from; 0: all")
    fit_static: bool = _option(True, "fit a static encoder's table to the corpus before training")
    interpolate: bool = _option(
        True, "return the best mix of the first and the trained weights on dev, not the trained"
    )
    mix_limit: float = _positive(
        1.0, "the most of the trained weights that a mix may have where no labelled queries say that more is better"
    )
    patience: int = _positive(5, "epochs without improvement on dev before stopping")
    dev_queries: int = _positive(512, "documents (or labelled queries, without a dev split) held out to measure on")
    dev_pool: int = _positive(8192, "documents searched when measuring on dev")
    seed: int = _option(0, "same seed, same result")

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(Recipe).items():
            allowed = get_args(hint)
            if allowed and isinstance(allowed[0], str) and getattr(self, name) not in allowed:
                raise InputError(f"{name} {getattr(self, name)!r}: choose one of {', '.join(allowed)}")
        for setting in fields(self):
            value = getattr(self, setting.name)
            if "positive" in setting.metadata and not value > 0:
                raise InputError(f"{setting.name} {value}: has to be above 0")
            if isinstance(value, int | float) and setting.name != "levels" and not value >= 0:
                raise InputError(f"{setting.name} {value}: cannot be below 0")
        checked_language(self.language)
        if self.branching == 1:
            raise InputError("branching 1: a node needs 2 children or more; 0 chooses")
        if not self.span_lengths or min(self.span_lengths) < 1:
            raise InputError(f"span_lengths {self.span_lengths}: give one or more lengths of 1 or more tokens")

    @classmethod
    def for_encoder(cls, *, static: bool, documents: int | None = None, **settings: Any) -> Recipe:
        """Return the measured defaults for a kind of encoder, with some settings replaced.

        Args:
            static: whether it is a token table; a transformer's companion, where that is trained in its place, is one.
            documents: how many there are; of few, a batch is no more than a quarter, unless its size is set.
            settings: fields of the recipe.

        Raises:
            InputError: a setting that does not exist, or a value that cannot be.
        """
        unknown = set(settings) - {each.name for each in fields(cls)}
        if unknown:
            known = ", ".join(each.name for each in fields(cls))
            raise InputError(f"unknown setting {', '.join(sorted(unknown))}; there are: {known}")
        trains_table = static or settings.get("train", "auto") in ("auto", "companion")
        recipe = replace(cls() if trains_table else cls(**TRANSFORMER), **settings)
        if documents is None or "batch_size" in settings:
            return recipe
        return replace(recipe, batch_size=min(recipe.batch_size, max(2, documents // 4)))

    def require_documents(self, count: int) -> None:
        """Raise an `InputError` where there are fewer documents than a batch has pairs."""
        if self.batch_size > count:
            raise InputError(
                f"batch_size {self.batch_size} is larger than the corpus ({count} documents); "
                f"give {max(2, count // 4)} or so"
            )

    @classmethod
    def explain(cls, name: str) -> str:
        """Return a setting's help with its default, and a transformer's where that is another."""
        setting = next(each for each in fields(cls) if each.name == name)
        default, other = setting.default, TRANSFORMER.get(name, setting.default)
        shown = (
            f"default: {_shown(default)}"
            if other == default
            else f"default: {_shown(default)}; transformer: {_shown(other)}"
        )
        return f"{setting.metadata['help']} [{shown}]"

    def as_dict(self) -> dict[str, Any]:
        """Return the settings for a manifest: what JSON gives back is equal to them."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


# A strong encoder is moved little: small steps, few of them, wider spans, and half of the way without labels: all of it
# costs the top of the ranking what it brings to recall, and pseudo-queries do not see that (docs/LOG.md).
TRANSFORMER: dict[str, Any] = {
    "epochs": 2,
    "batch_size": 64,
    "learning_rate": 2e-5,
    "warmup": 0.1,
    "span_lengths": (8, 16, 32, 64),
    "window": 96,
    "mix_limit": 0.5,
    "dev_queries": 96,
    "dev_pool": 512,
}
