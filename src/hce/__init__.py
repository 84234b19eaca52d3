"""Adapt a text retriever to your corpus: a tree of the documents and a better encoder, learned together."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hce._version import __version__

if TYPE_CHECKING:
    from hce.adapting import Labels, train
    from hce.corpus import Corpus
    from hce.documents import Document
    from hce.encoder import Encoder
    from hce.errors import HceError
    from hce.evaluate import Report, evaluate
    from hce.hierarchy import Hierarchy
    from hce.hits import Hit
    from hce.index import Index
    from hce.judgments import Dataset, Qrels, Query
    from hce.recipe import Recipe

# Names are fetched on first use: torch takes seconds to import, and `hce --version` should not.
_HOME = {
    "Corpus": "corpus",
    "Dataset": "judgments",
    "Document": "documents",
    "Encoder": "encoder",
    "HceError": "errors",
    "Hierarchy": "hierarchy",
    "Hit": "hits",
    "Index": "index",
    "Labels": "adapting",
    "Qrels": "judgments",
    "Query": "judgments",
    "Recipe": "recipe",
    "Report": "evaluate",
    "evaluate": "evaluate",
    "train": "adapting",
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


class _Package(ModuleType):
    """Importing the module `hce.evaluate` does not put it in the place of the function that goes by the same name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _HOME or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
