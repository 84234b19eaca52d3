"""The map of the corpus in the API: its regions as JSON, its points as bytes, and where documents and queries lie."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from fastapi import APIRouter, HTTPException, Query
from fastapi.responses import Response

from hce.index.background import DocumentMap, MapReadiness
from hce.index.tree import LiveTree, NotThereError
from hce.web.api import LISTED_CHARACTERS, NO_STORE, Served, rendered
from hce.web.schemas import ID_CHARACTERS, QUERY_CHARACTERS, TITLE_SHOWN, ErrorAnswer, Json

PLACES_AT_ONCE = 100
STEPS_OF_A_PLACE = 65_535  # a place goes over the wire as two numbers of 16 bits
Number = Annotated[int, Query(ge=1, le=2**32 - 1)]

router = APIRouter(responses={"4XX": {"model": ErrorAnswer, "description": "what is wrong with the request"}})


@dataclass(frozen=True)
class MapLevel:
    """The nodes of a level.

    Attributes:
        parents: the node above each, in the level above.
        names: the words of each one's name.
        sizes: how many documents are under each.
    """

    parents: list[int]
    names: list[list[str]]
    sizes: list[int]


@dataclass(frozen=True)
class MapAnswer:
    """The regions of the map, once it is ready.

    Attributes:
        readiness: how far the map is.
        documents: how many there are.
        drawn: how many of them are on the map.
        levels: from level 1 down to the one whose nodes have cells.
        vertices: the corners of the cells: x, y, x, y …, within 0 and 1.
        polygons: for each node of the last of these levels, the corners of its cell, counted in pairs.
    """

    readiness: MapReadiness
    documents: int = 0
    drawn: int = 0
    levels: list[MapLevel] = field(default_factory=list)
    vertices: list[float] = field(default_factory=list)
    polygons: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class MapDocument:
    """A point of the map: the document's number in the points, and what is shown of the document."""

    number: int
    id: str
    title: str
    beginning: str


@dataclass(frozen=True)
class MapPlace:
    """Where a document lies; x and y are within 0 and 1."""

    id: str
    number: int
    x: float
    y: float


@dataclass(frozen=True)
class MapPlaces:
    """Where documents lie, and where a document that says what a query says would."""

    documents: list[MapPlace]
    query: tuple[float, float] | None = None


@router.get("/api/map", response_model=MapAnswer)
async def regions(site: Served) -> Json:
    """Show the regions of the map.

    It is made in the background when somebody first asks, and after a rebuild.
    """
    return await rendered(site.looks, _regions, site.map)


@router.get("/api/map/points", response_class=Response)
async def points(site: Served) -> Response:
    """Give the points of the map as bytes: all numbers (uint32), all x and y (uint16 pairs), all nodes (uint16)."""
    body = await site.looks.run(_points, site.map)
    return Response(body, headers=NO_STORE, media_type="application/octet-stream")


@router.get("/api/map/documents", response_model=list[MapDocument])
async def documents(
    site: Served,
    number: Annotated[list[Number], Query(min_length=1, max_length=PLACES_AT_ONCE, description="as in the points")],
) -> Json:
    """Return which documents some points are; those that are gone are left out."""
    return await rendered(site.looks, _documents, site.tree, number)


@router.get("/api/map/places", response_model=MapPlaces)
async def places(
    site: Served,
    q: Annotated[str | None, Query(min_length=1, max_length=QUERY_CHARACTERS, description="a query")] = None,
    id: Annotated[  # noqa: A002
        list[Annotated[str, Query(max_length=ID_CHARACTERS)]], Query(max_length=PLACES_AT_ONCE, description="documents")
    ] = [],  # noqa: B006
) -> Json:
    """Return where a query and documents are.

    Documents that are not there are left out.
    """
    if q is None and not id:
        raise HTTPException(400, "give q, a query, or id, a document, which may be given more than once")
    vector = None if q is None else await site.queries.encode(q)
    return await rendered(site.looks, _places, site.map, vector, id)


def _regions(drawing: DocumentMap) -> MapAnswer:
    readiness = drawing.readiness()
    if readiness.state != "ready":
        return MapAnswer(readiness)
    try:
        with drawing.live.index.state.reading() as reader:
            now = drawing.at(reader)
    except NotThereError:  # another tree was grown since
        return MapAnswer(MapReadiness("preparing"))
    hierarchy = now.places.tree.hierarchy
    levels = [
        MapLevel(
            hierarchy.levels[level - 1].parent.tolist(),
            [hierarchy.name(level, node) for node in range(hierarchy.node_count(level))],
            now.places.sizes[level].tolist(),
        )
        for level in range(1, now.level + 1)
    ]
    return MapAnswer(
        readiness,
        now.places.moment.documents,
        len(now.drawn.numbers),
        levels,
        np.round(now.cells.vertices, 5).ravel().tolist(),
        [polygon.tolist() for polygon in now.cells.polygons],
    )


def _points(drawing: DocumentMap) -> bytes:
    drawing.readiness()  # asking has the map made
    with drawing.live.index.state.reading() as reader:
        drawn = drawing.at(reader).drawn
    steps = np.round(np.clip(drawn.places, 0, 1) * STEPS_OF_A_PLACE)
    return drawn.numbers.astype("<u4").tobytes() + steps.astype("<u2").tobytes() + drawn.nodes.astype("<u2").tobytes()


def _documents(live: LiveTree, numbers: list[int]) -> list[MapDocument]:
    with live.index.state.reading() as reader:
        found = reader.documents(numbers)
    there = ((number, found[number]) for number in numbers if number in found)
    return [
        MapDocument(number, each.id, each.title[:TITLE_SHOWN], each.text[:LISTED_CHARACTERS]) for number, each in there
    ]


def _places(drawing: DocumentMap, vector: np.ndarray | None, ids: list[str]) -> MapPlaces:
    drawing.readiness()  # asking has the map made
    with drawing.live.index.state.reading() as reader:
        now, there = drawing.at(reader), reader.present(ids)
        query = None if vector is None else now.place_of_query(reader, vector).tolist()
        numbers = {doc_id: there[doc_id][0] for doc_id in dict.fromkeys(ids) if doc_id in there}
        found = now.places_of(reader, np.array(list(numbers.values()), np.int64)).tolist()
    return MapPlaces(
        [MapPlace(doc_id, number, *place) for (doc_id, number), place in zip(numbers.items(), found, strict=True)],
        query,
    )
