"""What the API takes and gives, as types: they are also what /openapi.json is written from."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from hce.data.documents import Document
from hce.data.snippets import Mark
from hce.index.background import Readiness
from hce.index.filters import FieldSummary
from hce.index.tree import Node, PathNode, Way
from hce.training.model_folder import Training
from hce.web.background import DriftState

# How much one request may ask for; more is refused with an answer that names the limit.
QUERY_CHARACTERS = 2_000
HITS = 1_000
CONDITIONS = 16
CONDITION_CHARACTERS = 500
DOCUMENTS_AT_ONCE = 1_000
ID_CHARACTERS = 512
TITLE_CHARACTERS = 10_000
TEXT_CHARACTERS = 1_000_000
TITLE_SHOWN = 1_000  # characters of a title in a list
METADATA_SHOWN = 2_000_000  # characters of metadata, as JSON, in all hits together: each may have its share, or
METADATA_OF_EACH = 2_000
TREE_LEVELS_AT_ONCE = 2
CHILDREN_AT_ONCE = 500


class NewDocument(BaseModel):
    """A document to add."""

    model_config = ConfigDict(extra="forbid")

    id: str = Field(min_length=1, max_length=ID_CHARACTERS)
    text: str = Field(max_length=TEXT_CHARACTERS)
    title: str = Field(default="", max_length=TITLE_CHARACTERS)
    metadata: dict[str, Any] = Field(default_factory=dict)

    def document(self) -> Document:
        """Return the document as the index takes it."""
        return Document(self.id, self.text, self.title, self.metadata)


class NewDocuments(BaseModel):
    """Documents to add, all or none; with `update`, in place of those that have their ids."""

    model_config = ConfigDict(extra="forbid")

    documents: list[NewDocument] = Field(min_length=1, max_length=DOCUMENTS_AT_ONCE)
    update: bool = False


@dataclass(frozen=True)
class Shown:
    """A document in a list: what is shown of it, and where the query's words stand in that, in code points.

    Attributes:
        snippet: of a long document the passage that was found; else what holds most of the query's words.
        snippet_start: where it begins in the text.
        snippet_is_whole: whether it is all of the text.
        snippet_marks: where words of the query begin and end in it.
        passage: where the passage that a long document was found by begins and ends in its text; null where no
            passage was found.
        from_meaning: the part of the score that the vectors gave.
        from_words: the part of the score that shared words gave.
        from_tokens: the part of the score that single tokens gave.
        matched: the query's words that the document has, in any form.
        before: of a hit, its rank by the untrained encoder, where that is compared with.
        folded: the ids of near-equal documents that were found below this one and left out, if that was asked for.
        path: of a hit, the nodes of the tree that the document lies under, from the top.
        cut: "title" where only its beginning is given, "metadata" where it is too long and left out;
            /api/documents/ID has all.
    """

    rank: int
    score: float
    id: str
    title: str
    title_marks: list[Mark]
    snippet: str
    snippet_start: int
    snippet_is_whole: bool
    snippet_marks: list[Mark]
    metadata: dict[str, Any]
    from_meaning: float = 0.0
    from_words: float = 0.0
    from_tokens: float = 0.0
    matched: tuple[str, ...] = ()
    passage: Mark | None = None
    before: int | None = None
    folded: tuple[str, ...] = ()
    path: tuple[PathNode, ...] = ()
    cut: tuple[str, ...] = ()


@dataclass(frozen=True)
class Before:
    """The untrained encoder's ranking, once it is ready."""

    readiness: Readiness
    hits: list[Shown]


@dataclass(frozen=True)
class Facet:
    """A value of a metadata field, and how many documents have it, of all that fulfil the conditions."""

    value: str | float | bool
    documents: int


@dataclass(frozen=True)
class FieldsAnswer:
    """The fields of the metadata, as the first and the last documents have them."""

    fields: list[FieldSummary]


@dataclass(frozen=True)
class SearchAnswer:
    """What was found, best first, and how long it took to find once the query was encoded.

    Attributes:
        facets: for each field asked for its most frequent values, counted over all documents that fulfil the
            conditions, whatever was searched for.
        good_match: whether the first hit is a good match; false: nothing in the index is one; null: not known, as with
            conditions, by words alone, or in an index that is older than this judgment.
    """

    query: str
    k: int
    milliseconds: float
    hits: list[Shown]
    before: Before | None = None
    facets: dict[str, list[Facet]] = field(default_factory=dict)
    good_match: bool | None = None


@dataclass(frozen=True)
class DocumentAnswer:
    """A document."""

    id: str
    title: str
    text: str
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Written:
    """What a write did, and how many documents there are now."""

    documents: int
    added: int = 0
    removed: int = 0


@dataclass(frozen=True)
class Listed:
    """A document in a list, with the beginning of its text."""

    id: str
    title: str
    beginning: str


@dataclass(frozen=True)
class TreeAnswer:
    """A node, what is below it, and in the last inner level some of its documents.

    Attributes:
        levels: the number of levels of nodes below the root; documents are one more.
        path: the nodes from the root down to the parent of this one.
    """

    levels: int
    tree: Node
    path: list[Node]
    documents: list[Listed] = field(default_factory=list)
    offset: int = 0


@dataclass(frozen=True)
class WayAnswer:
    """The way of a query or a document down the tree."""

    query: str | None
    id: str | None
    way: Way


@dataclass(frozen=True)
class StatusAnswer:
    """The state of the index and of this server.

    Attributes:
        tree_nodes: the number of nodes of each level of the tree, from the top, without the root.
        drift: whether it is time to retrain, if that was asked for.
    """

    name: str
    index: dict[str, Any]
    tree_nodes: list[int]
    drift: DriftState | None
    untrained: Readiness
    training: Training | None
    writable: bool
    needs_token: bool
    version: str


@dataclass(frozen=True)
class HealthAnswer:
    """Whether the server answers."""

    status: str
    documents: int


@dataclass(frozen=True)
class ErrorAnswer:
    """What went wrong, in one sentence."""

    error: str


class Json(JSONResponse):
    """JSON of the types above; half a surrogate pair, which metadata can hold, is spelled as the escape it came as."""

    def render(self, content: Any) -> bytes:
        """Return the body."""
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_fields)
        return text.encode("utf-8", "backslashreplace")


def _fields(value: Any) -> dict[str, Any]:
    """Do as `dataclasses.asdict` does, without its copies, which took longer than a search."""
    if not is_dataclass(value):
        raise TypeError(f"an answer cannot hold a {type(value).__name__}")
    return vars(value)
