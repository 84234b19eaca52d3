"""Adapt a text retriever to your corpus: train an encoder and a document tree."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hce._version import __version__

if TYPE_CHECKING:
    from hce.data.corpus import Corpus
    from hce.data.judgments import Dataset, Labels, Qrels, Query
    from hce.data.text import Document
    from hce.encoding.encoder import Encoder
    from hce.errors import HceError
    from hce.evaluation.evaluate import Report, evaluate
    from hce.index.index import Index
    from hce.index.ranking import Hit
    from hce.training.co_training import TrainResult
    from hce.training.recipe import Recipe
    from hce.training.train import train
    from hce.tree.hierarchy import Hierarchy

# Names are imported on first use: torch takes seconds to import, and `hce --version` does not need it.
_HOME = {
    "Corpus": "data.corpus",
    "Dataset": "data.judgments",
    "Document": "data.text",
    "Encoder": "encoding.encoder",
    "HceError": "errors",
    "Hierarchy": "tree.hierarchy",
    "Hit": "index.ranking",
    "Index": "index.index",
    "Labels": "data.judgments",
    "Qrels": "data.judgments",
    "Query": "data.judgments",
    "Recipe": "training.recipe",
    "Report": "evaluation.evaluate",
    "TrainResult": "training.co_training",
    "evaluate": "evaluation.evaluate",
    "train": "training.train",
}

__all__ = [
    "Corpus",
    "Dataset",
    "Document",
    "Encoder",
    "HceError",
    "Hierarchy",
    "Hit",
    "Index",
    "Labels",
    "Qrels",
    "Query",
    "Recipe",
    "Report",
    "TrainResult",
    "__version__",
    "evaluate",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hce' has no attribute {name!r}")
    return getattr(import_module(f"hce.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
