"""The API: each function is one address. What it does is in the module that it calls; here are names and limits."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request

from hce._version import __version__
from hce.data.documents import Document
from hce.errors import InputError, WriterBusyError
from hce.web.answers import (
    DocumentAnswer,
    ErrorAnswer,
    HealthAnswer,
    Json,
    Listed,
    NewDocuments,
    SearchAnswer,
    StatusAnswer,
    TreeAnswer,
    WayAnswer,
    Written,
)
from hce.web.limits import (
    CHILDREN_AT_ONCE,
    CONDITION_CHARACTERS,
    CONDITIONS,
    HITS,
    ID_CHARACTERS,
    QUERY_CHARACTERS,
    TREE_LEVELS_AT_ONCE,
)
from hce.web.live_tree import LiveTree
from hce.web.searching import answer_search
from hce.web.site import Site
from hce.web.untrained import display_name

router = APIRouter(responses={"4XX": {"model": ErrorAnswer, "description": "what is wrong with the request"}})

LISTED_CHARACTERS = 160

Text = Annotated[str, Query(min_length=1, max_length=QUERY_CHARACTERS, description="what to look for")]
K = Annotated[int, Query(ge=1, le=HITS, description="how many documents")]
Condition = Annotated[str, Query(max_length=CONDITION_CHARACTERS)]
Where = Annotated[
    list[Condition], Query(max_length=CONDITIONS, description="on metadata: lang=en, year>=2000, 'tag in a,b'")
]
Id = Annotated[str, Query(min_length=1, max_length=ID_CHARACTERS)]


def site_of(request: Request) -> Site:
    """What this server serves."""
    site: Site = request.app.state.site
    return site


def answer(value: Any) -> Json:
    """A value as JSON that no cache keeps."""
    return Json(value, headers={"cache-control": "no-store"})


def one_line(error: Exception, site: Site) -> str:
    """An error's sentence without the index's folder, which whoever asks over the network need not know."""
    return str(error).removeprefix(f"{site.index.path}: ")


def _whole(document: Document) -> DocumentAnswer:
    return DocumentAnswer(document.id, document.title, document.text, document.metadata)


@router.get("/api/search", response_model=SearchAnswer)
async def search(request: Request, q: Text, k: K = 10, where: Where = [], compare: bool = False) -> Json:  # noqa: B006
    """Find the documents closest in meaning; with `compare`, also as the untrained encoder ranks them."""
    site = site_of(request)
    vector = await site.queries.encode(q)
    return answer(await site.searches.run(answer_search, site.index, site.untrained, q, vector, k, where, compare))


@router.post("/api/documents", response_model=Written, status_code=201)
async def add_documents(request: Request, new: NewDocuments) -> Json:
    """Add documents, all or none; with `update`, in place of those that have their ids."""
    site = site_of(request)
    documents = [each.document() for each in new.documents]
    _check(documents)
    try:
        count = await site.writes.run(site.index.update if new.update else site.index.add, documents)
    except WriterBusyError:
        raise
    except InputError as error:  # an id is there already
        raise HTTPException(409, one_line(error, site)) from error
    return Json(Written(await site.looks.run(len, site.index), added=count), 201)


def _check(documents: list[Document]) -> None:
    seen: set[str] = set()
    for document in documents:
        if document.is_empty:
            raise InputError(f"document {document.id!r} has neither text nor title; there is nothing to find it by")
        if document.id in seen:
            raise InputError(f"id {document.id!r} comes twice; make ids unique")
        seen.add(document.id)


@router.get("/api/documents/{doc_id:path}", response_model=DocumentAnswer)
async def get_document(request: Request, doc_id: str) -> Json:
    """A document with all of its text."""
    site = site_of(request)
    document = await site.looks.run(site.index.get, doc_id)
    if document is None:
        raise HTTPException(404, f"no document {doc_id[:ID_CHARACTERS]!r} is there")
    return answer(_whole(document))


@router.delete("/api/documents/{doc_id:path}", response_model=Written)
async def remove_document(request: Request, doc_id: str) -> Json:
    """Take a document out."""
    site = site_of(request)
    try:
        count = await site.writes.run(site.index.remove, [doc_id])
    except WriterBusyError:
        raise
    except InputError as error:
        raise HTTPException(404, one_line(error, site)) from error
    return answer(Written(await site.looks.run(len, site.index), removed=count))


@router.get("/api/tree", response_model=TreeAnswer)
async def tree(
    request: Request,
    level: Annotated[int, Query(ge=0)] = 0,
    node: Annotated[int, Query(ge=0)] = 0,
    depth: Annotated[int, Query(ge=0, le=TREE_LEVELS_AT_ONCE, description="levels below it to give")] = 1,
    most: Annotated[int, Query(ge=1, le=CHILDREN_AT_ONCE, description="children of each node, largest first")] = 60,
    offset: Annotated[int, Query(ge=0, description="of the last inner level's documents")] = 0,
) -> Json:
    """A node of the tree, the nodes above it, and what is below it: nodes, or in the last inner level documents."""
    site = site_of(request)
    return answer(await site.looks.run(_tree_answer, site.tree, level, node, depth, most, offset))


def _tree_answer(live: LiveTree, level: int, node: int, depth: int, most: int, offset: int) -> TreeAnswer:
    found = live.node(level, node, depth, most)
    path, levels = live.above(level, node), live.levels
    documents = live.documents(node, offset, most) if level == levels else []
    return TreeAnswer(levels, found, path, [_listed(each) for each in documents], offset)


def _listed(document: Document) -> Listed:
    return Listed(document.id, document.title, document.text[:LISTED_CHARACTERS])


@router.get("/api/tree/path", response_model=WayAnswer)
async def tree_path(
    request: Request,
    q: Annotated[str | None, Query(min_length=1, max_length=QUERY_CHARACTERS, description="a query")] = None,
    id: Annotated[str | None, Query(min_length=1, max_length=ID_CHARACTERS, description="or a document")] = None,  # noqa: A002
) -> Json:
    """The way of a query down the tree, level by level, or a document's place in it."""
    site = site_of(request)
    if (q is None) == (id is None):
        raise HTTPException(400, "give either q, a query, or id, a document")
    if q is not None:
        way = await site.looks.run(site.tree.way_of_query, await site.queries.encode(q))
    else:
        way = await site.looks.run(site.tree.way_of_document, str(id))
    return answer(WayAnswer(q, id, way))


@router.get("/api/status", response_model=StatusAnswer)
async def status(
    request: Request,
    drift: Annotated[bool, Query(description="also measure whether it is time to retrain, in the background")] = False,
) -> Json:
    """Counts, names, the training, whether this server takes writes, and whether it is time to retrain."""
    site = site_of(request)
    return answer(await site.looks.run(_status_answer, site, drift))


def _status_answer(site: Site, drift: bool) -> StatusAnswer:
    facts = site.index.status().as_dict()
    facts.pop("path")
    facts["encoder"] = display_name(facts["encoder"])
    facts["base_encoder"] = site.untrained.name
    return StatusAnswer(
        name=site.index.path.absolute().name,
        index=facts,
        tree_nodes=site.tree.node_counts,
        drift=site.drift.now() if drift else None,
        untrained=site.untrained.readiness(),
        training=site.training,
        writable=site.rules.writable,
        needs_token=site.rules.token is not None,
        version=__version__,
    )


@router.get("/health", response_model=HealthAnswer)
async def health(request: Request) -> Json:
    """Whether the server and its store answer."""
    site = site_of(request)
    return answer(HealthAnswer("ok", await site.looks.run(len, site.index)))
