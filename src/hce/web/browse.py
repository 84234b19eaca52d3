"""The API's routes for the tree and the map of the corpus."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Depends, HTTPException, Query
from fastapi.responses import Response

from hce.data.text import Document
from hce.index.background import MapReadiness
from hce.index.tree import Node, NotThereError, Way
from hce.web.api import ID_CHARACTERS, NO_STORE, QUERY_CHARACTERS, REFUSED, TITLE_SHOWN, Served, looking

TREE_LEVELS_AT_ONCE = 2
CHILDREN_AT_ONCE = 500
PLACES_AT_ONCE = 100
LISTED_CHARACTERS = 160
STEPS_OF_A_PLACE = 65_535  # a coordinate is sent as a 16-bit number

Natural = Annotated[int, Query(ge=0)]
Number = Annotated[int, Query(ge=1, le=2**32 - 1)]
Text = Annotated[str | None, Query(min_length=1, max_length=QUERY_CHARACTERS, description="a query")]
Id = Annotated[str, Query(max_length=ID_CHARACTERS)]


async def _encoded(site: Served, q: Text = None) -> np.ndarray | None:
    """Encode the query, if there is one."""
    return None if q is None else await site.queries.encode(q)


Vector = Annotated[np.ndarray | None, Depends(_encoded)]
router = APIRouter(responses=REFUSED)


@dataclass(frozen=True)
class Listed:
    """A document in a list, with the start of its text."""

    id: str
    title: str
    beginning: str


@dataclass(frozen=True)
class TreeAnswer:
    """A node with the nodes below it; a leaf with some of its documents.

    Attributes:
        levels: the number of levels below the root, without the documents.
        path: the nodes from the root to this node's parent.
        documents: documents of a leaf, from `offset` on.
    """

    levels: int
    tree: Node
    path: list[Node]
    documents: list[Listed] = field(default_factory=list)
    offset: int = 0


@dataclass(frozen=True)
class WayAnswer:
    """The path of a query or a document down the tree."""

    query: str | None
    id: str | None
    way: Way


@router.get("/api/tree", response_model=TreeAnswer)
@looking
def tree(
    site: Served,
    level: Natural = 0,
    node: Natural = 0,
    depth: Annotated[int, Query(ge=0, le=TREE_LEVELS_AT_ONCE, description="levels to return below the node")] = 1,
    most: Annotated[
        int, Query(ge=1, le=CHILDREN_AT_ONCE, description="maximum number of children, largest first, or of documents")
    ] = 60,
    offset: Annotated[int, Query(ge=0, description="number of a leaf's documents to skip")] = 0,
) -> TreeAnswer:
    """Return a node of the tree, with the nodes above and below it.

    For a leaf, the answer has some of its documents.
    """
    with site.tree.now(level, node) as (reader, places):
        numbers = places.documents_of(node)[offset : offset + most].tolist() if level == places.levels else []
        documents = reader.documents(numbers)
        listed = [Listed(*_shown(documents[number])) for number in numbers]
        found = places.node(level, node, depth, most)
        return TreeAnswer(places.levels, found, places.above(level, node), listed, offset)


def _shown(document: Document) -> tuple[str, str, str]:
    return document.id, document.title[:TITLE_SHOWN], document.text[:LISTED_CHARACTERS]


@router.get("/api/tree/path", response_model=WayAnswer)
@looking
def tree_path(
    site: Served,
    vector: Vector,
    q: Text = None,
    id: Annotated[str | None, Query(min_length=1, max_length=ID_CHARACTERS, description="a document's id")] = None,  # noqa: A002
) -> WayAnswer:
    """Return the path of a query or a document down the tree, level by level."""
    if (q is None) == (id is None):
        raise HTTPException(400, "give either q (a query) or id (a document)")
    with site.tree.now() as (reader, places):
        way = places.way_of_document(reader, str(id)) if vector is None else places.way_of_query(vector)
        return WayAnswer(q, id, way)


# ----------------------------------------------------------------------------------------------------- the map


@dataclass(frozen=True)
class MapLevel:
    """The nodes of a level: their parents, the words of their names, and their numbers of documents."""

    parents: list[int]
    names: list[list[str]]
    sizes: list[int]


@dataclass(frozen=True)
class MapAnswer:
    """The regions of the map, once it is ready.

    Attributes:
        readiness: whether the map is ready, and its progress.
        documents: the number of documents.
        drawn: the number of documents on the map.
        levels: from level 1 to the level whose nodes are the cells.
        vertices: the corners of the cells: x, y, x, y …, from 0 to 1.
        polygons: for each node of the last level here, the numbers of its cell's corners in `vertices`.
    """

    readiness: MapReadiness
    documents: int = 0
    drawn: int = 0
    levels: list[MapLevel] = field(default_factory=list)
    vertices: list[float] = field(default_factory=list)
    polygons: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class MapDocument(Listed):
    """The document of a point on the map, with its number in /api/map/points."""

    number: int


@dataclass(frozen=True)
class MapPlace:
    """The position of a document on the map; x and y are from 0 to 1."""

    id: str
    number: int
    x: float
    y: float


@dataclass(frozen=True)
class MapPlaces:
    """Positions of documents on the map, and of a query as if it were a document."""

    documents: list[MapPlace]
    query: tuple[float, float] | None = None


@router.get("/api/map", response_model=MapAnswer)
@looking
def regions(site: Served) -> MapAnswer:
    """Return the regions of the map.

    The first request, and the first after a rebuild, starts to draw the map in the background.
    """
    drawing, readiness = site.map, site.map.readiness()
    if readiness.state != "ready":
        return MapAnswer(readiness)
    try:
        with drawing.live.index.state.reading() as reader:
            now = drawing.at(reader)
    except NotThereError:  # a new tree was grown meanwhile
        return MapAnswer(MapReadiness("preparing"))
    hierarchy = now.places.tree.hierarchy
    levels = [
        MapLevel(
            hierarchy.levels[level - 1].parent.tolist(),
            [hierarchy.name(level, node) for node in range(hierarchy.node_count(level))],
            now.places.sizes[level].tolist(),
        )
        for level in range(1, now.sheet.level + 1)
    ]
    return MapAnswer(
        readiness,
        now.places.moment.documents,
        len(now.drawn.numbers),
        levels,
        np.round(now.sheet.cells.vertices, 5).ravel().tolist(),
        [polygon.tolist() for polygon in now.sheet.cells.polygons],
    )


@router.get("/api/map/points", response_class=Response)
@looking
def points(site: Served) -> Response:
    """Return the points of the map as bytes.

    First come all document numbers (uint32), then all x and y (uint16 pairs), then each document's node (uint16).
    """
    site.map.readiness()  # starts to draw the map if needed
    with site.index.state.reading() as reader:
        drawn = site.map.at(reader).drawn
    steps = np.round(np.clip(drawn.places, 0, 1) * STEPS_OF_A_PLACE)
    parts = drawn.numbers.astype("<u4"), steps.astype("<u2"), drawn.nodes.astype("<u2")
    body = b"".join(part.tobytes() for part in parts)
    return Response(body, headers=NO_STORE, media_type="application/octet-stream")


@router.get("/api/map/documents", response_model=list[MapDocument])
@looking
def documents(
    site: Served,
    number: Annotated[
        list[Number], Query(min_length=1, max_length=PLACES_AT_ONCE, description="numbers of /api/map/points")
    ],
) -> list[MapDocument]:
    """Return the documents of some points, without removed ones."""
    with site.index.state.reading() as reader:
        found = reader.documents(number)
    return [MapDocument(*_shown(found[each]), each) for each in number if each in found]


@router.get("/api/map/places", response_model=MapPlaces)
@looking
def places(
    site: Served,
    vector: Vector,
    q: Text = None,
    id: Annotated[list[Id], Query(max_length=PLACES_AT_ONCE, description="documents")] = [],  # noqa: A002, B006
) -> MapPlaces:
    """Return the positions of a query and of documents, without unknown ones."""
    if q is None and not id:
        raise HTTPException(400, "give q (a query), or id (a document), which may be repeated")
    site.map.readiness()  # starts to draw the map if needed
    with site.index.state.reading() as reader:
        now, there = site.map.at(reader), reader.present(id)
        query = None if vector is None else now.place_of_query(reader, vector).tolist()
        numbers = {doc_id: there[doc_id][0] for doc_id in dict.fromkeys(id) if doc_id in there}
        found = now.places_of(reader, np.array(list(numbers.values()), np.int64)).tolist()
    return MapPlaces(
        [MapPlace(doc_id, number, *place) for (doc_id, number), place in zip(numbers.items(), found, strict=True)],
        query,
    )
