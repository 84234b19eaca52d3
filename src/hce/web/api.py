"""The API: each function of the router is one address, answered from a `ServedIndex`."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from fastapi import APIRouter, Depends, HTTPException, Query, Request

from hce._version import __version__
from hce.data.documents import Document
from hce.data.snippets import QueryWords, snippet_of
from hce.errors import InputError, WriterBusyError
from hce.index.background import DocumentMap, Ranking, Readiness, Untrained
from hce.index.filters import Filter, parse_clauses
from hce.index.index import Index
from hce.index.ranking import Hit, SearchMode
from hce.index.state import ReindexedError
from hce.index.tree import LiveTree
from hce.progress import check_deadline
from hce.training.model_folder import IN_AN_INDEX, Training, read_training
from hce.web.asked import AskedQueries
from hce.web.background import DriftState, DriftWatch, Lane, QueryBatcher
from hce.web.guard import Rules
from hce.web.schemas import (
    CHILDREN_AT_ONCE,
    CONDITION_CHARACTERS,
    CONDITIONS,
    HITS,
    ID_CHARACTERS,
    METADATA_OF_EACH,
    METADATA_SHOWN,
    QUERY_CHARACTERS,
    TITLE_SHOWN,
    TREE_LEVELS_AT_ONCE,
    Before,
    DocumentAnswer,
    ErrorAnswer,
    Facet,
    FieldsAnswer,
    HealthAnswer,
    Json,
    Listed,
    NewDocuments,
    SearchAnswer,
    Shown,
    StatusAnswer,
    TreeAnswer,
    WayAnswer,
    Written,
)

SEARCHES_WAITING = 256
WRITES_WAITING = 16
LISTED_CHARACTERS = 160
SHOWN_AS_FOUND = {each.name for each in fields(Shown) if each.name in Hit._fields} - {"title", "metadata"}
NO_STORE = {"cache-control": "no-store"}
FOLDERS = re.compile(
    r"(?<![\w.~/\\-])(?:[A-Za-z]:)?[/\\](?:[^/\\\s'\":;,()]+[/\\])*(?=[^/\\\s])"
)  # above a path's last name

Text = Annotated[str, Query(min_length=1, max_length=QUERY_CHARACTERS, pattern=r"\S", description="what to look for")]
K = Annotated[int, Query(ge=1, le=HITS, description="how many documents")]
Condition = Annotated[str, Query(max_length=CONDITION_CHARACTERS)]
Facets = Annotated[
    list[Condition], Query(max_length=CONDITIONS, description="fields by whose values to count what `where` leaves")
]
Where = Annotated[
    list[Condition], Query(max_length=CONDITIONS, description="on metadata: lang=en, year>=2000, 'tag in a,b'")
]

router = APIRouter(responses={"4XX": {"model": ErrorAnswer, "description": "what is wrong with the request"}})


class ServedIndex:
    """The parts that requests are answered from.

    Attributes:
        index: the index.
        rules: who may ask for what.
        tree: the index's tree with the documents of now.
        map: the same tree as a map.
        untrained: the ranking to compare with.
        drift: whether it is time to retrain.
        asked: what counts queries, if the server learns from them.
        queries: what encodes queries.
        searches: the threads that search; more than there are cores would only get into each other's way.
        writes: the one that writes, since a store takes one write at a time.
        embeddings: the one that encodes texts for other systems.
        looks: those for everything else, which a full queue of searches does not keep waiting.
    """

    def __init__(self, index: Index, rules: Rules, *, learns: bool = False) -> None:
        self.index = index
        self.rules = rules
        self.tree = LiveTree(index)
        self.map = DocumentMap(self.tree)
        self.untrained = Untrained(index)
        self.drift = DriftWatch(index)
        self.asked = AskedQueries(index.state) if learns else None
        encode = self.asked.encode if self.asked else index.state.encode_queries
        self.queries = QueryBatcher(encode, SEARCHES_WAITING)
        self.searches = Lane(max(2, os.cpu_count() or 2), SEARCHES_WAITING)
        self.writes = Lane(1, WRITES_WAITING)
        self.embeddings = Lane(1, WRITES_WAITING)
        self.looks = Lane(4, SEARCHES_WAITING)

    @property
    def training(self) -> Training | None:
        """What is known of the training of the encoder that the index has now."""
        return read_training(self.index.path / f"{IN_AN_INDEX}{self.index.state.manifest.suffix}")

    def start(self) -> None:
        """Begin what is done in the background."""
        self.untrained.start()

    def stop(self) -> None:
        """End what is done in the background."""
        if self.asked:
            self.asked.flush()
        self.untrained.stop()
        self.map.stop()
        self.drift.stop()
        for lane in (self.searches, self.writes, self.embeddings, self.looks):
            lane.stop()

    def sentence(self, error: Exception) -> str:
        """Return an error's sentence without the index's folder, which whoever asks over a network need not know."""
        return str(error).removeprefix(f"{self.index.path}: ").replace(f"{self.index.path.absolute()}{os.sep}", "")

    def shown(self, text: str) -> str:
        """Return a text without the folders of this machine: of each path in it, the last name is left."""
        specs = (self.index.path.absolute(), Path(self.index.state.manifest.base_encoder or ""))
        known = [str(spec.parent) for spec in specs if spec.is_absolute()]
        for folder in sorted(known, key=len, reverse=True):  # these may have blanks in them
            text = text.replace(f"{folder}{os.sep}", os.sep)
        return FOLDERS.sub("", text)


async def _site(request: Request) -> ServedIndex:
    site: ServedIndex = request.app.state.site
    return site


Served = Annotated[ServedIndex, Depends(_site)]


@router.get("/api/search", response_model=SearchAnswer)
async def search(
    site: Served,
    q: Text,
    k: K = 10,
    where: Where = [],  # noqa: B006
    mode: Annotated[
        SearchMode, Query(description="by words and meaning, by meaning alone, or by words alone")
    ] = "hybrid",
    compare: bool = False,
    unique: Annotated[bool, Query(description="near-equal documents once; a hit tells which were left out")] = False,
    facet: Facets = [],  # noqa: B006
) -> Json:
    """Find documents by words and meaning, or one of them; with `compare`, also as the untrained encoder ranks them."""
    while True:
        fingerprint = site.index.state.present_encoder().fingerprint
        vector = await site.queries.encode(q)
        asked = _Asked(q, vector, fingerprint, k, where, mode, unique, facet)
        try:
            return await rendered(site.searches, _search_answer, site, asked, compare)
        except ReindexedError:  # the index has just got another encoder
            continue


@router.get("/api/fields", response_model=FieldsAnswer)
async def fields_of_metadata(site: Served) -> Json:
    """Name the fields of the metadata, and what values they have."""
    return await rendered(site.looks, lambda: FieldsAnswer(site.index.fields()))


@router.post("/api/documents", response_model=Written, status_code=201)
async def add_documents(site: Served, new: NewDocuments) -> Json:
    """Add documents, all or none; with `update`, in place of those that have their ids."""
    documents = [each.document() for each in new.documents]
    _check(documents)
    write = site.index.update if new.update else site.index.add
    count = await _write(site, 409, write, documents)  # refused where an id is there already
    return Json(Written(await site.looks.run(len, site.index), added=count), 201)


@router.get("/api/documents/{doc_id:path}", response_model=DocumentAnswer)
async def get_document(site: Served, doc_id: str) -> Json:
    """Get a document with all of its text."""
    return await rendered(site.looks, _document_answer, site.index, doc_id)


@router.delete("/api/documents/{doc_id:path}", response_model=Written)
async def remove_document(site: Served, doc_id: str) -> Json:
    """Take a document out."""
    count = await _write(site, 404, site.index.remove, [doc_id])
    return answer(Written(await site.looks.run(len, site.index), removed=count))


@router.get("/api/tree", response_model=TreeAnswer)
async def tree(
    site: Served,
    level: Annotated[int, Query(ge=0)] = 0,
    node: Annotated[int, Query(ge=0)] = 0,
    depth: Annotated[int, Query(ge=0, le=TREE_LEVELS_AT_ONCE, description="levels below it to give")] = 1,
    most: Annotated[int, Query(ge=1, le=CHILDREN_AT_ONCE, description="children of each node, largest first")] = 60,
    offset: Annotated[int, Query(ge=0, description="of the last inner level's documents")] = 0,
) -> Json:
    """Show a node of the tree, the nodes above it, and below it nodes, or in the last inner level documents."""
    return await rendered(site.looks, _tree_answer, site.tree, level, node, depth, most, offset)


@router.get("/api/tree/path", response_model=WayAnswer)
async def tree_path(
    site: Served,
    q: Annotated[str | None, Query(min_length=1, max_length=QUERY_CHARACTERS, description="a query")] = None,
    id: Annotated[str | None, Query(min_length=1, max_length=ID_CHARACTERS, description="or a document")] = None,  # noqa: A002
) -> Json:
    """Show the way of a query down the tree, level by level, or a document's place in it."""
    if (q is None) == (id is None):
        raise HTTPException(400, "give either q, a query, or id, a document")
    if q is not None:
        way = await site.looks.run(site.tree.way_of_query, await site.queries.encode(q))
    else:
        way = await site.looks.run(site.tree.way_of_document, str(id))
    return answer(WayAnswer(q, id, way))


@router.get("/api/status", response_model=StatusAnswer)
async def status(
    site: Served,
    drift: Annotated[bool, Query(description="also measure whether it is time to retrain, in the background")] = False,
) -> Json:
    """Give counts, names, the training, whether this server takes writes, and whether it is time to retrain."""
    return await rendered(site.looks, _status_answer, site, drift)


@router.get("/health", response_model=HealthAnswer)
async def health(site: Served) -> Json:
    """Say whether the server and its store answer."""
    return answer(HealthAnswer("ok", await site.looks.run(len, site.index)))


@router.get("/ready", response_model=HealthAnswer)
async def ready(site: Served) -> Json:
    """Say whether a search is answered now: 503 while too many wait, or while what keeps the vectors is away."""
    anywhere = np.eye(1, site.index.state.manifest.dim, dtype=np.float32)
    await site.searches.run(site.index.search_vectors, anywhere, 1)
    return answer(HealthAnswer("ready", await site.looks.run(len, site.index)))


async def rendered(lane: Lane, work: Callable[..., Any], *arguments: Any) -> Json:
    """Compute an answer and make JSON of it, both in a thread of a lane.

    The event loop makes one at a time: what others have computed meanwhile would wait in memory, without a budget.
    """
    return await lane.run(lambda: answer(work(*arguments)))


def answer(value: Any) -> Json:
    """Return a value as JSON that no cache keeps."""
    return Json(value, headers=NO_STORE)


async def _write(site: ServedIndex, refused: int, write: Callable[..., int], argument: Any) -> int:
    """Write, and count what was written.

    What the index refuses is answered with the status `refused`.
    """
    try:
        return await site.writes.run(write, argument)
    except WriterBusyError:
        raise
    except InputError as error:
        raise HTTPException(refused, site.sentence(error)) from error


def _check(documents: Iterable[Document]) -> None:
    seen: set[str] = set()
    for document in documents:
        if document.is_empty:
            raise InputError(f"document {document.id!r} has neither text nor title; there is nothing to find it by")
        if document.id in seen:
            raise InputError(f"id {document.id!r} comes twice; make ids unique")
        seen.add(document.id)


class _Asked(NamedTuple):
    """What is searched for: a query, its vector of shape (n,), of which encoder that is, how many, where and how."""

    query: str
    vector: np.ndarray
    fingerprint: str
    k: int
    where: Sequence[str]
    mode: SearchMode
    unique: bool
    facets: Sequence[str]


def _search_answer(site: ServedIndex, asked: _Asked, compare: bool) -> SearchAnswer:
    """Search by a query's vector; compare with the untrained encoder's ranking once that is ready."""
    check_deadline()  # it may have waited for long
    start = time.perf_counter()
    query, vector, fingerprint, k, where, mode, unique, counted_fields = asked
    conditions = parse_clauses(where) if where else None
    (found,) = site.index.state.search([query], vector[None], k, conditions, mode, fingerprint, unique=unique)
    took = round(1000 * (time.perf_counter() - start), 2)
    words = QueryWords(query, k)
    facets = _facets(site.index, counted_fields, conditions)
    good_match = site.index.good_match(query, found, conditions, mode, vector=vector)
    shown = [_shown(hit, words, k) for hit in found]
    answered = SearchAnswer(query, k, took, shown, facets=facets, good_match=good_match)
    if not compare:
        return answered
    check_deadline()
    readiness = _readiness(site)
    if readiness.state != "ready":
        return replace(answered, before=Before(readiness, []))
    ranking = site.untrained.rank(query, conditions)
    ranks = ranking.ranks_of(np.array([hit.number for hit in found], dtype=np.int64))
    hits = [replace(hit, before=rank) for hit, rank in zip(answered.hits, ranks, strict=True)]
    before = [_shown(hit, words, k) for hit in _first(site.index, ranking, k)]
    return replace(answered, hits=hits, before=Before(readiness, before))


def _facets(index: Index, names: Sequence[str], conditions: Filter | None) -> dict[str, list[Facet]]:
    """Count the values of some fields; of texts, those that a condition can be written with."""
    return {
        field: [Facet(value, count) for value, count in counts if len(str(value)) <= CONDITION_CHARACTERS]
        for field, counts in index.facets(names, conditions).items()
    }


def _shown(hit: Hit, words: QueryWords, k: int) -> Shown:
    """Show one of k hits by the passage that was found, or else by a snippet.

    What is too long is cut.
    """
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
        **{name: getattr(hit, name) for name in SHOWN_AS_FOUND},
    )


def _first(index: Index, ranking: Ranking, k: int) -> list[Hit]:
    """Return the untrained encoder's first k hits."""
    best = ranking.first(k)
    with index.state.reading() as reader:
        documents = reader.documents(number for number, _ in best)
    return [
        Hit.of(rank, number, documents[number], score)
        for rank, (number, score) in enumerate(best, start=1)
        if number in documents  # else it was removed this moment
    ]


def _document_answer(index: Index, doc_id: str) -> DocumentAnswer:
    found = index.get(doc_id)
    if found is None:
        raise HTTPException(404, f"no document {doc_id[:ID_CHARACTERS]!r} is there")
    return DocumentAnswer(found.id, found.title, found.text, found.metadata)


def _tree_answer(live: LiveTree, level: int, node: int, depth: int, most: int, offset: int) -> TreeAnswer:
    found = live.node(level, node, depth, most)
    documents = live.documents(node, offset, most) if level == live.levels else []
    listed = [Listed(each.id, each.title[:TITLE_SHOWN], each.text[:LISTED_CHARACTERS]) for each in documents]
    return TreeAnswer(live.levels, found, live.above(level, node), listed, offset)


def _status_answer(site: ServedIndex, drift: bool) -> StatusAnswer:
    facts = site.index.status().as_dict()
    facts.pop("path")
    for name in ("encoder", "base_encoder"):
        facts[name] = facts[name] and site.shown(facts[name])
    return StatusAnswer(
        name=site.index.path.absolute().name,
        index=facts,
        tree_nodes=site.tree.node_counts,
        drift=_drift(site) if drift else None,
        untrained=_readiness(site),
        training=site.training,
        writable=site.rules.writable,
        needs_token=site.rules.token is not None,
        version=__version__,
    )


def _drift(site: ServedIndex) -> DriftState:
    state = site.drift.now()
    return replace(state, reasons=tuple(map(site.shown, state.reasons)))


def _readiness(site: ServedIndex) -> Readiness:
    """Return whether there is a ranking to compare with, under the encoder's name as it is shown."""
    readiness = site.untrained.readiness()
    encoder = readiness.encoder and site.shown(readiness.encoder)
    return replace(readiness, encoder=encoder, reason=site.shown(readiness.reason))
