"""The API of `hce serve`: each function of the router answers one route from a `ServedIndex`."""

from __future__ import annotations

import base64
import json
import os
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from hce._version import __version__
from hce.data.text import Document, Mark, QueryWords, is_unicode, snippet_of
from hce.errors import InputError, WriterBusyError
from hce.index.background import DocumentMap, Ranking, Readiness, Untrained
from hce.index.filters import FieldSummary, parse_clauses
from hce.index.index import Index
from hce.index.ranking import Hit, SearchMode
from hce.index.state import ReindexedError
from hce.index.tree import LiveTree, PathNode
from hce.progress import check_deadline
from hce.training.model_folder import IN_AN_INDEX, Training, read_training
from hce.web.background import DriftState, DriftWatch, Lane, QueryBatcher, QueryLearner
from hce.web.guard import Rules

# Limits of one request; the refusal names the limit.
QUERY_CHARACTERS = 2_000
HITS = 1_000
CONDITIONS = 16
CONDITION_CHARACTERS = 500
DOCUMENTS_AT_ONCE = 1_000
ID_CHARACTERS = 512
TITLE_CHARACTERS = 10_000
TEXT_CHARACTERS = 1_000_000
INPUTS = 2048  # texts to encode
EMBEDDINGS = "/v1/embeddings"
# Limits of a document in a list, in characters.
TITLE_SHOWN = 1_000
METADATA_SHOWN = 2_000_000  # of JSON in all k hits; each hit may have 1/k of these characters,
METADATA_OF_EACH = 2_000  # or this many, if 1/k is fewer
# Queue lengths, and the number of texts encoded between two checks of the deadline.
SEARCHES_WAITING = 256
WRITES_WAITING = 16
ENCODED_AT_ONCE = 32
NO_STORE = {"cache-control": "no-store"}
FOLDERS = re.compile(
    r"(?<![\w.~/\\-])(?:[A-Za-z]:)?[/\\](?:[^/\\\s'\":;,()]+[/\\])*(?=[^/\\\s])"
)  # the folders before a path's last name


class ServedIndex:
    """The state shared by all requests: the index and its parts, and threads for each kind of request."""

    def __init__(self, index: Index, rules: Rules, *, learns: bool = False) -> None:
        self.index, self.rules = index, rules
        self.tree, self.untrained, self.drift = LiveTree(index), Untrained(index), DriftWatch(index)
        self.map = DocumentMap(self.tree)
        self.learner = QueryLearner(index.state) if learns else None
        encode = self.learner.encode if self.learner else index.state.encode_queries
        self.queries = QueryBatcher(encode, SEARCHES_WAITING)
        self.searches = Lane(max(2, os.cpu_count() or 2), SEARCHES_WAITING)  # more threads than cores only compete
        self.writes = Lane(1, WRITES_WAITING)  # the store accepts one write at a time
        self.embeddings = Lane(1, WRITES_WAITING)  # for other programs, at `EMBEDDINGS`
        self.looks = Lane(4, SEARCHES_WAITING)  # everything else

    def stop(self) -> None:
        """Stop the work in the background."""
        if self.learner:
            self.learner.flush()
        for each in (self.untrained, self.map, self.drift, self.searches, self.writes, self.embeddings, self.looks):
            each.stop()

    def sentence(self, error: Exception) -> str:
        """Return an error's message without the path of the index."""
        return str(error).removeprefix(f"{self.index.path}: ").replace(f"{self.index.path.absolute()}{os.sep}", "")

    def shown(self, text: str) -> str:
        """Shorten each path in a text to its last name: clients should not see folders."""
        specs = (self.index.path.absolute(), Path(self.index.state.manifest.base_encoder or ""))
        known = [str(spec.parent) for spec in specs if spec.is_absolute()]
        for folder in sorted(known, key=len, reverse=True):  # these may contain spaces, which FOLDERS does not match
            text = text.replace(f"{folder}{os.sep}", os.sep)
        return FOLDERS.sub("", text)

    def readiness(self) -> Readiness:
        """Return whether the untrained ranking is ready."""
        found = self.untrained.readiness()
        return replace(found, encoder=found.encoder and self.shown(found.encoder), reason=self.shown(found.reason))


async def _site(request: Request) -> ServedIndex:
    site: ServedIndex = request.app.state.site
    return site


Served = Annotated[ServedIndex, Depends(_site)]


class Json(JSONResponse):
    """A JSON response of dataclasses; lone surrogates, which metadata may contain, become escapes."""

    def render(self, content: Any) -> bytes:
        """Return the body of the response."""
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_fields)
        return text.encode("utf-8", "backslashreplace")


def _fields(value: Any) -> dict[str, Any]:
    """Return a dataclass's fields; `asdict`'s copies took longer than a search."""
    if not is_dataclass(value):
        raise TypeError(f"an answer cannot hold a {type(value).__name__}")
    return {name: getattr(value, name) for name in value.__slots__} if hasattr(value, "__slots__") else vars(value)


def answer(value: Any) -> Response:
    """Return a value as JSON that must not be cached; a response stays unchanged."""
    return value if isinstance(value, Response) else Json(value, headers=NO_STORE)


async def rendered(lane: Lane, work: Callable[..., Any], *arguments: Any, **named: Any) -> Response:
    """Compute an answer and render its JSON, both in a thread of a lane.

    If the event loop rendered answers one by one, computed ones would wait in memory without a limit.
    """
    return await lane.run(lambda: answer(work(*arguments, **named)))


def looking(route: Callable[..., Any]) -> Callable[..., Awaitable[Response]]:
    """Run a route in the lane `looks`, and return its value as JSON."""

    @wraps(route)
    async def run(site: ServedIndex, **asked: Any) -> Response:
        return await rendered(site.looks, route, site, **asked)

    return run


@dataclass(frozen=True)
class ErrorAnswer:
    """An error, in one sentence."""

    error: str


REFUSED: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "what is wrong with the request"}
}
router = APIRouter(responses=REFUSED)


# ----------------------------------------------------------------------------------------------------- search

Condition = Annotated[str, Field(max_length=CONDITION_CHARACTERS)]


class SearchQuery(BaseModel):
    """A query and its options."""

    q: str = Field(min_length=1, max_length=QUERY_CHARACTERS, pattern=r"\S", description="the query")
    k: int = Field(default=10, ge=1, le=HITS, description="number of documents")
    where: list[Condition] = Field(
        default=[], max_length=CONDITIONS, description="conditions on metadata: lang=en, year>=2000, 'tag in a,b'"
    )
    mode: SearchMode = Field(default="hybrid", description="hybrid (words and meaning), dense (meaning only) or words")
    compare: bool = Field(default=False, description="also rank with the untrained encoder")
    unique: bool = Field(default=False, description="list near-equal documents once; a hit names the others")
    facet: list[Condition] = Field(
        default=[], max_length=CONDITIONS, description="count values of these fields in all documents matching `where`"
    )


@dataclass(frozen=True)
class Shown:
    """A hit as a list shows it; positions are in code points.

    Attributes:
        title_marks: start and end of each query word in the title.
        snippet: the best passage of a long document, else the part with most of the query's words.
        snippet_start: where the snippet starts in the text.
        snippet_is_whole: whether the snippet is all of the text.
        snippet_marks: start and end of each query word in the snippet.
        passage: start and end of the best passage in the text of a long document.
        from_meaning: the part of the score from vectors.
        from_words: the part of the score from shared words.
        from_tokens: the part of the score from token vectors.
        matched: the query's words in the document, in any form.
        before: the rank by the untrained encoder, with `compare`.
        folded: with `unique`, the ids of near-equal documents of lower rank, which the list leaves out.
        path: the nodes of the tree above the document, from the top.
        cut: "title" if it was shortened, "metadata" if it was too long and left out; /api/documents/ID has all.
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


AS_FOUND = {each.name for each in fields(Shown) if each.name in Hit._fields} - {"title", "metadata"}


@dataclass(frozen=True)
class Before:
    """The untrained encoder's ranking, once it is ready."""

    readiness: Readiness
    hits: list[Shown]


@dataclass(frozen=True)
class Facet:
    """A value of a metadata field, and the number of documents with it that match the conditions."""

    value: str | float | bool
    documents: int


@dataclass(frozen=True)
class SearchAnswer:
    """The hits, best first.

    Attributes:
        milliseconds: the time of the search, without encoding the query.
        facets: for each requested field, its most frequent values in the documents that match the conditions.
        good_match: whether the first hit is a good match; if false, no document is one; null if unknown.
    """

    query: str
    k: int
    milliseconds: float
    hits: list[Shown]
    before: Before | None = None
    facets: dict[str, list[Facet]] = field(default_factory=dict)
    good_match: bool | None = None


@router.get("/api/search", response_model=SearchAnswer)
async def search(site: Served, asked: Annotated[SearchQuery, Query()]) -> Response:
    """Search documents by words, by meaning, or by both.

    With `compare`, the answer also has the ranking of the untrained encoder.
    """
    while True:
        fingerprint = site.index.state.present_encoder().fingerprint
        vector = await site.queries.encode(asked.q)
        try:
            return await rendered(site.searches, _search, site, asked, vector, fingerprint)
        except ReindexedError:  # the encoder was switched meanwhile: encode the query again
            continue


def _search(site: ServedIndex, asked: SearchQuery, vector: np.ndarray, fingerprint: str) -> SearchAnswer:
    check_deadline()  # the request may have waited in the queue
    start = time.perf_counter()
    query, k, index = asked.q, asked.k, site.index
    conditions = parse_clauses(asked.where) if asked.where else None
    (found,) = index.state.search([query], vector[None], k, conditions, asked.mode, fingerprint, unique=asked.unique)
    took = round(1000 * (time.perf_counter() - start), 2)
    words = QueryWords(query, k)
    counted = {  # without values that are too long for a condition
        name: [Facet(value, count) for value, count in counts if len(str(value)) <= CONDITION_CHARACTERS]
        for name, counts in index.facets(asked.facet, conditions).items()
    }
    good_match = index.good_match(query, found, conditions, asked.mode, vector=vector)
    hits = [_shown(hit, words, k) for hit in found]
    if not asked.compare:
        return SearchAnswer(query, k, took, hits, None, counted, good_match)
    check_deadline()
    before, readiness = [], site.readiness()
    if readiness.state == "ready":
        ranking = site.untrained.rank(query, conditions)
        ranks = ranking.ranks_of(np.array([hit.number for hit in found], dtype=np.int64))
        hits = [replace(hit, before=rank) for hit, rank in zip(hits, ranks, strict=True)]
        before = [_shown(hit, words, k) for hit in _first(index, ranking, k)]
    return SearchAnswer(query, k, took, hits, Before(readiness, before), counted, good_match)


def _shown(hit: Hit, words: QueryWords, k: int) -> Shown:
    """Prepare a hit for a list of k: snippet, marks, and cuts of what is too long."""
    check_deadline()
    snippet = snippet_of(hit.text, hit.passage, words)
    title = hit.title[:TITLE_SHOWN]
    is_too_long = len(json.dumps(hit.metadata)) > max(METADATA_OF_EACH, METADATA_SHOWN // k)
    cut = {"title": len(title) < len(hit.title), "metadata": is_too_long}
    return Shown(
        title=title,
        title_marks=words.marks_in(title),
        snippet=snippet.text,
        snippet_start=snippet.start,
        snippet_is_whole=snippet.whole,
        snippet_marks=snippet.marks,
        metadata={} if is_too_long else hit.metadata,
        cut=tuple(name for name, is_cut in cut.items() if is_cut),
        **{name: getattr(hit, name) for name in AS_FOUND},
    )


def _first(index: Index, ranking: Ranking, k: int) -> list[Hit]:
    """Return the untrained encoder's first k hits."""
    best = ranking.first(k)
    with index.state.reading() as reader:
        documents = reader.documents(number for number, _ in best)
    return [
        Hit.of(rank, number, documents[number], score)
        for rank, (number, score) in enumerate(best, start=1)
        if number in documents  # a missing one was just removed
    ]


# ----------------------------------------------------------------------------------------------------- documents


class NewDocument(BaseModel):
    """A document to add."""

    model_config = ConfigDict(extra="forbid")

    id: str = Field(min_length=1, max_length=ID_CHARACTERS)
    text: str = Field(max_length=TEXT_CHARACTERS)
    title: str = Field(default="", max_length=TITLE_CHARACTERS)
    metadata: dict[str, Any] = Field(default_factory=dict)


class NewDocuments(BaseModel):
    """Documents to add, all or none; with `update`, they replace those with the same ids."""

    model_config = ConfigDict(extra="forbid")

    documents: list[NewDocument] = Field(min_length=1, max_length=DOCUMENTS_AT_ONCE)
    update: bool = False


@dataclass(frozen=True)
class Written:
    """The result of a write, and the number of documents now."""

    documents: int
    added: int = 0
    removed: int = 0


@dataclass(frozen=True)
class FieldsAnswer:
    """The metadata fields of 1,000 documents: the first 500 and the last 500."""

    fields: list[FieldSummary]


@router.get("/api/fields", response_model=FieldsAnswer)
@looking
def fields_of_metadata(site: Served) -> FieldsAnswer:
    """List the metadata fields, with examples and ranges of their values."""
    return FieldsAnswer(site.index.fields())


@router.post("/api/documents", response_model=Written, status_code=201)
async def add_documents(site: Served, new: NewDocuments) -> Json:
    """Add documents, all or none; with `update`, replace those with the same ids."""
    documents, seen = [Document(**dict(each)) for each in new.documents], set()
    for document in documents:
        if document.is_empty:
            raise InputError(f"document {document.id!r} has neither text nor title; give one of them")
        if document.id in seen:
            raise InputError(f"id {document.id!r} comes twice; make ids unique")
        seen.add(document.id)
    write = site.index.update if new.update else site.index.add
    count = await _write(site, 409, write, documents)  # 409: an id exists already
    return Json(Written(await site.looks.run(len, site.index), added=count), 201)


@router.get("/api/documents/{doc_id:path}", response_model=Document)
@looking
def get_document(site: Served, doc_id: str) -> Document:
    """Get a document with all of its text."""
    found = site.index.get(doc_id)
    if found is None:
        raise HTTPException(404, f"no document {doc_id[:ID_CHARACTERS]!r} is there")
    return found


@router.delete("/api/documents/{doc_id:path}", response_model=Written)
async def remove_document(site: Served, doc_id: str) -> Response:
    """Remove a document."""
    count = await _write(site, 404, site.index.remove, [doc_id])
    return answer(Written(await site.looks.run(len, site.index), removed=count))


async def _write(site: ServedIndex, refused: int, write: Callable[..., int], argument: Any) -> int:
    """Write to the index and return the count; InputError becomes status `refused`."""
    try:
        return await site.writes.run(write, argument)
    except WriterBusyError:
        raise
    except InputError as error:
        raise HTTPException(refused, site.sentence(error)) from error


# ----------------------------------------------------------------------------------------------------- status


@dataclass(frozen=True)
class StatusAnswer:
    """The state of the index and of this server.

    Attributes:
        tree_nodes: the number of nodes in each level of the tree, from the top, without the root.
        drift: whether it is time to retrain, with `drift=true`.
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
    """The server's health, and its number of documents."""

    status: str
    documents: int


@router.get("/api/status", response_model=StatusAnswer)
@looking
def status(
    site: Served,
    drift: Annotated[bool, Query(description="also measure whether it is time to retrain, in the background")] = False,
) -> StatusAnswer:
    """Return the state of the index, of its training and of this server."""
    index, state = site.index, site.drift.now() if drift else None
    facts = index.status().as_dict()
    facts.pop("path")
    for name in ("encoder", "base_encoder"):
        facts[name] = facts[name] and site.shown(facts[name])
    return StatusAnswer(
        name=index.path.absolute().name,
        index=facts,
        tree_nodes=site.tree.node_counts,
        drift=state and replace(state, reasons=tuple(map(site.shown, state.reasons))),
        untrained=site.readiness(),
        training=read_training(index.path / index.state.manifest.folder_of(IN_AN_INDEX)),
        writable=site.rules.writable,
        needs_token=site.rules.token is not None,
        version=__version__,
    )


@router.get("/health", response_model=HealthAnswer)
@looking
def health(site: Served) -> HealthAnswer:
    """Check that the server and its store answer."""
    return HealthAnswer("ok", len(site.index))


@router.get("/ready", response_model=HealthAnswer)
async def ready(site: Served) -> Response:
    """Run a search as a check.

    The answer is 503 while too many requests wait, or while Milvus is away.
    """
    anywhere = np.eye(1, site.index.state.manifest.dim, dtype=np.float32)
    await site.searches.run(site.index.search_vectors, anywhere, 1)
    return answer(HealthAnswer("ready", await site.looks.run(len, site.index)))


# ----------------------------------------------------------------------------------------------------- embeddings


class EmbeddingsRequest(BaseModel):
    """A request of OpenAI's clients.

    `input_type` says whether the texts are documents or queries.
    """

    input: str | list[str] = Field(description=f"a text, or up to {INPUTS:,} texts")
    model: str = Field(default="", description="ignored: there is one encoder, and the answer names it")
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, description="only the encoder's own dimension is accepted")
    input_type: Literal["document", "query"] = "document"

    def texts(self) -> list[str]:
        """Return the texts; fail if there are none, too many, or one cannot be encoded."""
        texts = [self.input] if isinstance(self.input, str) else self.input
        if not 1 <= len(texts) <= INPUTS:
            raise InputError(f"input has {len(texts):,} texts; send 1 to {INPUTS:,} at once")
        for number, text in enumerate(texts):
            if not text.strip() or not is_unicode(text):
                raise InputError(f"input[{number}] is {'not Unicode' if text.strip() else 'empty'}; leave it out")
            if len(text) > TEXT_CHARACTERS:
                raise InputError(f"input[{number}] has {len(text):,} characters; the limit is {TEXT_CHARACTERS:,}")
        return texts


@router.post(EMBEDDINGS, responses={"4XX": {"description": "an error in the form of OpenAI's API"}})
async def embeddings(site: Served, asked: EmbeddingsRequest) -> Response:
    """Encode texts to unit vectors with the index's encoder, as OpenAI's API does."""
    texts, dim = asked.texts(), site.index.state.manifest.dim
    if asked.dimensions not in (None, dim):
        raise InputError(f"dimensions = {asked.dimensions}: this encoder has {dim}; leave dimensions out")
    vectors = await site.embeddings.run(_encode, site, texts, asked.input_type)
    is_base64 = asked.encoding_format == "base64"
    spelled = [base64.b64encode(each).decode() for each in vectors.astype("<f4")] if is_base64 else vectors.tolist()
    data = [{"object": "embedding", "index": row, "embedding": each} for row, each in enumerate(spelled)]
    words = sum(len(text.split()) for text in texts)  # counting tokens would tokenize everything twice
    usage = {"prompt_tokens": words, "total_tokens": words}
    model = site.shown(site.index.state.manifest.encoder)
    return answer({"object": "list", "model": model, "data": data, "usage": usage})


def _encode(site: ServedIndex, texts: Sequence[str], side: str) -> np.ndarray:
    encode = site.index.state.encode_queries if side == "query" else site.index.encode_documents
    vectors = []
    for start in range(0, len(texts), ENCODED_AT_ONCE):
        check_deadline()
        vectors.append(encode(texts[start : start + ENCODED_AT_ONCE]))
    return np.concatenate(vectors)
