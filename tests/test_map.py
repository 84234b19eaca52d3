"""The map: regions that are regions, neighbours that stay neighbours, and documents that come and go."""

from __future__ import annotations

import shutil
import threading
import time

import numpy as np
import pytest
from fastapi.testclient import TestClient
from scipy.spatial import cKDTree

from hce.data.text import Document
from hce.index.background import MAP_FILE, DocumentMap, MapNow, MapReadiness
from hce.index.check import check
from hce.index.index import Index
from hce.index.tree import LiveTree, NotThereError
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


def now(drawing: DocumentMap) -> MapNow:
    with drawing.live.index.state.reading() as reader:
        return drawing.at(reader)


@pytest.fixture
def drawing(index):
    made = DocumentMap(LiveTree(index))
    yield made
    made.stop()


def test_nothing_is_made_before_somebody_asks(index, drawing):
    with pytest.raises(NotThereError, match="not ready"):
        now(drawing)
    assert not (index.path / MAP_FILE).exists()
    assert ready(drawing) == MapReadiness("ready", 1.0)
    assert (index.path / MAP_FILE).exists()
    assert len(now(drawing).drawn.numbers) == len(index)


def test_documents_come_and_go_and_nothing_else_moves(index, drawing):
    ready(drawing)
    before = now(drawing).drawn
    first, gone, *_ = list(index)
    twin = first
    index.add([Document("later", twin.text, twin.title)])
    index.remove([gone.id])
    later = now(drawing)
    drawn = later.drawn
    stayed = np.intersect1d(before.numbers, drawn.numbers)
    assert len(stayed) == len(before.numbers) - 1
    assert np.array_equal(before.places[np.isin(before.numbers, stayed)], drawn.places[np.isin(drawn.numbers, stayed)])
    with index.state.reading() as reader:
        numbers = np.array([reader.present([each])[each][0] for each in ("later", twin.id)])
        place, like = later.places_of(reader, numbers)
        cell = np.sqrt(1 / len(later.sheet.cells.polygons))
        assert np.linalg.norm(place - like) < cell  # equal texts are neighbours
        vector = index.state.encode_queries([twin.full_text])[0]
        assert np.linalg.norm(later.place_of_query(reader, vector) - like) < cell


def test_the_file_is_read_again_and_made_anew_where_it_is_stale_or_damaged(index, drawing):
    ready(drawing)
    first = now(drawing).drawn.places
    path = index.path / MAP_FILE
    stamp = path.stat().st_mtime_ns

    def again() -> np.ndarray:
        other = DocumentMap(LiveTree(index))
        ready(other)
        places = now(other).drawn.places
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
    assert len(now(drawing).drawn.numbers) == len(index)


def test_the_map_of_one_tree_is_never_drawn_with_another(index, drawing):
    """From a rebuild until somebody asks again there is no map, though the old one is still in memory."""
    ready(drawing)
    index.remove([document.id for document in list(index)[:200]])
    now(drawing)
    index.rebuild()
    with pytest.raises(NotThereError, match="not ready"):
        now(drawing)
    assert ready(drawing).state == "ready"
    assert len(now(drawing).drawn.numbers) == 40


def test_the_map_over_http_while_the_index_is_rebuilt(index):
    """Each answer is a map or says that there is none yet; map, tree and documents of an answer fit each other."""
    numbers = iter(range(1000))

    def change():
        with Index.open(index.path) as other:
            for _ in range(4):
                other.remove([document.id for document in list(other)[:30]])
                other.add(
                    [Document(f"new-{number}", "star red w1") for number, _ in zip(numbers, range(10), strict=False)]
                )
                other.rebuild()

    changing = threading.Thread(target=change)
    states, end = set(), time.monotonic() + 60
    with TestClient(create_app(index), base_url="http://127.0.0.1") as client:
        changing.start()
        while (changing.is_alive() or "ready" not in states) and time.monotonic() < end:
            found = client.get("/api/map")
            assert found.status_code == 200, found.text
            answer = found.json()
            states.add(answer["readiness"]["state"])
            assert {sum(level["sizes"]) for level in answer["levels"]} <= {answer["documents"]}
            if answer["levels"]:
                assert len(answer["polygons"]) == len(answer["levels"][-1]["sizes"])
            for path in ("points", "places?q=star&id=star-red-19", "documents?number=200"):
                assert client.get(f"/api/map/{path}").status_code in (200, 404)
            assert client.get("/api/tree/path?q=star").status_code == 200
        changing.join()
    assert states == {"preparing", "ready"}


def test_an_index_without_a_tree_has_no_map(tmp_path, planted_corpus, module_static_encoder):
    with Index.create(tmp_path / "plain", planted_corpus, module_static_encoder) as plain:
        drawing = DocumentMap(LiveTree(plain))
        assert drawing.readiness().state == "off"
        with TestClient(create_app(plain), base_url="http://127.0.0.1") as client:
            assert client.get("/api/map").json()["readiness"]["state"] == "off"
            assert client.get("/api/map/points").status_code == 404


def test_more_documents_than_are_drawn(index, drawing, monkeypatch):
    monkeypatch.setattr("hce.index.background.MOST_DRAWN", 50)
    ready(drawing)
    drawn = now(drawing).drawn
    assert len(drawn.numbers) == 50
    with index.state.reading() as reader:
        left_out = np.setdiff1d(reader.numbers(), drawn.numbers)[:7]
        places = now(drawing).places_of(reader, left_out)
    assert np.isfinite(places).all()
    assert (places > 0).all()


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
