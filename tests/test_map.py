"""The map: regions that are regions, neighbours that stay neighbours, and documents that come and go."""

from __future__ import annotations

import shutil
import time

import numpy as np
import pytest
from fastapi.testclient import TestClient
from scipy.spatial import cKDTree

from hce.data.documents import Document
from hce.index.browse import LiveTree, NotThereError
from hce.index.check import check
from hce.index.index import Index
from hce.index.map import MAP_FILE, DocumentMap, MapReadiness
from hce.tree.hierarchy import Hierarchy
from hce.tree.layout import cells, place_beside, place_documents, place_sites, site_level
from hce.web.app import create_app

TOPICS, EACH, DIM = 40, 12, 32


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    generator = np.random.default_rng(0)
    topics = generator.normal(size=(TOPICS, 1, DIM)) + 0.45 * generator.normal(size=(TOPICS, EACH, DIM))
    rows = topics.reshape(-1, DIM)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def tree(vectors) -> Hierarchy:
    return Hierarchy.build(vectors, branching=8)


@pytest.fixture(scope="module")
def sites(tree) -> np.ndarray:
    return place_sites(tree, site_level(tree))


@pytest.fixture(scope="module")
def places(tree, sites, vectors) -> np.ndarray:
    return place_documents(tree, sites, np.arange(len(tree)), vectors)


def test_every_document_is_in_the_cell_of_its_node(tree, sites, places):
    assert np.array_equal(cKDTree(sites).query(places)[1], tree.nodes_at(site_level(tree)))
    assert ((places > 0) & (places < 1)).all()


def test_a_cell_is_where_its_site_is_the_nearest(sites):
    found = cells(sites)
    assert len(found.polygons) == len(sites)
    for site, corners in enumerate(found.polygons):
        inside = 0.98 * found.vertices[corners] + 0.02 * sites[site]
        assert (cKDTree(sites).query(inside)[1] == site).all()


def test_neighbours_stay_neighbours_better_than_by_principal_components(vectors, places):
    def kept(drawn: np.ndarray) -> float:
        cosines = vectors @ vectors.T - 2 * np.eye(len(vectors))
        near = np.argsort(-cosines, axis=1)[:, :10]
        found = cKDTree(drawn).query(drawn, 11)[1][:, 1:]
        return float(np.mean([len(set(a) & set(b)) / 10 for a, b in zip(near.tolist(), found.tolist(), strict=True)]))

    centred = vectors - vectors.mean(axis=0)
    axes = np.linalg.svd(centred, full_matrices=False)[2][:2]
    assert kept(places) > 1.2 * kept(centred @ axes.T)


def test_same_seed_same_places(tree, sites, vectors, places):
    some = np.arange(len(tree))[::-1]  # in whatever order they are given
    assert np.array_equal(place_sites(tree, site_level(tree)), sites)
    again = place_documents(tree, sites, np.arange(len(tree)), vectors)
    assert np.array_equal(again, places)
    assert place_documents(tree, sites, some[:1], vectors[some[:1]]).shape == (1, 2)
    assert place_documents(tree, sites, some[:0], vectors[some[:0]]).shape == (0, 2)


@pytest.mark.parametrize("count", [3, 5, 9])
def test_a_small_tree_has_a_map_too(vectors, count):
    tree = Hierarchy.build(vectors[:count], branching=2)
    sites = place_sites(tree, site_level(tree))
    places = place_documents(tree, sites, np.arange(count), vectors[:count])
    assert np.isfinite(places).all()
    assert np.array_equal(cKDTree(sites).query(places)[1], tree.nodes_at(site_level(tree)))


def test_equal_documents_have_places(vectors):
    same = np.repeat(vectors[:1], 30, axis=0)
    tree = Hierarchy.build(same, branching=4)
    sites = place_sites(tree, site_level(tree))
    assert np.isfinite(place_documents(tree, sites, np.arange(30), same)).all()


def test_what_comes_later_is_put_beside_what_it_is_like():
    there = np.eye(4, dtype=np.float32)
    drawn = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.float32)
    (place,) = place_beside(there[1:2], there[:1], drawn[:1])
    assert place.tolist() == [0, 0]  # where there is but one
    (place,) = place_beside(there[1:2], there, drawn)
    assert np.linalg.norm(place - drawn[1]) < 1e-3


# ------------------------------------------------------------------------------------------------- of an index


@pytest.fixture(scope="module")
def made(tmp_path_factory, planted_corpus, module_static_encoder):
    path = tmp_path_factory.mktemp("map") / "index"
    Index.create(path, planted_corpus, module_static_encoder, "grow").close()
    return path


@pytest.fixture
def index(made, tmp_path):
    shutil.copytree(made, tmp_path / "index")
    with Index.open(tmp_path / "index") as opened:
        yield opened


def ready(drawing: DocumentMap) -> MapReadiness:
    end = time.monotonic() + 30
    while drawing.readiness().state == "preparing" and time.monotonic() < end:
        time.sleep(0.02)
    return drawing.readiness()


@pytest.fixture
def drawing(index):
    made = DocumentMap(LiveTree(index))
    yield made
    made.stop()


def test_nothing_is_made_before_somebody_asks(index, drawing):
    with pytest.raises(NotThereError, match="not ready"):
        drawing.drawn()
    assert not (index.path / MAP_FILE).exists()
    assert ready(drawing) == MapReadiness("ready", 1.0)
    assert (index.path / MAP_FILE).exists()
    assert len(drawing.drawn().numbers) == len(index)


def test_documents_come_and_go_and_nothing_else_moves(index, drawing):
    ready(drawing)
    before = drawing.drawn()
    first, gone, *_ = list(index)
    twin = first
    index.add([Document("later", twin.text, twin.title)])
    index.remove([gone.id])
    now = drawing.drawn()
    stayed = np.intersect1d(before.numbers, now.numbers)
    assert len(stayed) == len(before.numbers) - 1
    assert np.array_equal(before.places[np.isin(before.numbers, stayed)], now.places[np.isin(now.numbers, stayed)])
    with index.state.reading() as reader:
        numbers = np.array([reader.present([each])[each][0] for each in ("later", twin.id)])
    later, like = drawing.places_of(numbers)
    cell = np.sqrt(1 / len(drawing.cells().polygons))
    assert np.linalg.norm(later - like) < cell  # equal texts are neighbours
    vector = index.state.encode_queries([twin.full_text])[0]
    assert np.linalg.norm(drawing.place_of_query(vector) - like) < cell


def test_the_file_is_read_again_and_made_anew_where_it_is_stale_or_damaged(index, drawing):
    ready(drawing)
    first = drawing.drawn().places
    path = index.path / MAP_FILE
    stamp = path.stat().st_mtime_ns

    def again() -> np.ndarray:
        other = DocumentMap(LiveTree(index))
        ready(other)
        places = other.drawn().places
        other.stop()
        return places

    assert np.array_equal(again(), first)
    assert path.stat().st_mtime_ns == stamp
    assert check(index.path).is_sound
    damaged = bytearray(path.read_bytes())
    damaged[-5] ^= 1
    path.write_bytes(damaged)
    (finding,) = [each for each in check(index.path).findings if each.part == "map"]
    assert finding.state == "damaged" and finding.can_heal
    assert np.array_equal(again(), first)  # what is damaged is not used
    path.write_bytes(damaged)
    assert check(index.path, repair=True).is_sound
    index.remove([document.id for document in list(index)[:120]])
    index.rebuild()
    assert len(again()) == len(index)
    assert ready(drawing).state == "ready"  # the one that was there follows too
    assert len(drawing.drawn().numbers) == len(index)


def test_an_index_without_a_tree_has_no_map(tmp_path, planted_corpus, module_static_encoder):
    with Index.create(tmp_path / "plain", planted_corpus, module_static_encoder) as plain:
        drawing = DocumentMap(LiveTree(plain))
        assert drawing.readiness().state == "off"
        with TestClient(create_app(plain), base_url="http://127.0.0.1") as client:
            assert client.get("/api/map").json()["readiness"]["state"] == "off"
            assert client.get("/api/map/points").status_code == 404


def test_more_documents_than_are_drawn(index, drawing, monkeypatch):
    monkeypatch.setattr("hce.index.map.MOST_DRAWN", 50)
    ready(drawing)
    drawn = drawing.drawn()
    assert len(drawn.numbers) == 50
    with index.state.reading() as reader:
        left_out = np.setdiff1d(reader.numbers(), drawn.numbers)[:7]
    assert np.isfinite(drawing.places_of(left_out)).all()
    assert (drawing.places_of(left_out) > 0).all()


def test_the_map_over_http(index):
    with TestClient(create_app(index), base_url="http://127.0.0.1") as client:
        assert client.get("/api/map/points").status_code == 404
        end = time.monotonic() + 30
        while (answer := client.get("/api/map").json())["readiness"]["state"] != "ready" and time.monotonic() < end:
            assert answer["polygons"] == []
            time.sleep(0.02)
        assert (answer["documents"], answer["drawn"]) == (240, 240)
        assert [sum(level["sizes"]) for level in answer["levels"]] == [240] * len(answer["levels"])
        assert len(answer["polygons"]) == len(answer["levels"][-1]["sizes"])
        assert max(map(max, answer["polygons"])) == len(answer["vertices"]) // 2 - 1
        body = client.get("/api/map/points").content
        assert len(body) == 240 * 10
        numbers = np.frombuffer(body, "<u4", 240)
        spots = np.frombuffer(body, "<u2", 480, 960).reshape(-1, 2) / 65535
        (one,) = client.get("/api/map/documents", params={"number": int(numbers[5])}).json()
        found = client.get("/api/map/places", params={"q": "star red", "id": [one["id"], "nobody"]}).json()
        (place,) = found["documents"]
        assert place["number"] == numbers[5]
        assert [place["x"], place["y"]] == pytest.approx(spots[5].tolist(), abs=1e-4)
        assert all(0 < axis < 1 for axis in found["query"])
        assert client.get("/api/map/places").status_code == 400
        for wrong in ({}, {"number": 0}, {"number": 2**40}, {"number": "x"}, {"number": [1] * 101}):
            assert client.get("/api/map/documents", params=wrong).status_code == 422
