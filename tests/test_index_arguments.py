"""What an index is given that is nothing to search for, to add or to remove: one named error, no change."""

from __future__ import annotations

import numpy as np
import pytest

from hce.data.text import Document
from hce.errors import InputError
from hce.index.index import Index


@pytest.fixture(scope="module")
def index(tmp_path_factory, module_static_encoder):
    documents = [Document(f"d{number}", f"star w{number}", metadata={"year": 2}) for number in range(5)]
    with Index.create(tmp_path_factory.mktemp("a") / "index", documents, module_static_encoder) as made:
        yield made


@pytest.mark.parametrize("mode", ["hybrid", "dense", "words"])
@pytest.mark.parametrize(
    ("queries", "complaint"),
    [
        (None, "not a NoneType"),
        (7, "not a int"),
        (b"star", "not a bytes"),
        (["star", None], "not a NoneType"),
        ([["star"]], "not a list"),
        ("star \ud800", "half a surrogate pair"),
        (["star", "\udcff"], "half a surrogate pair"),
        ("", "the query is empty"),
        (["star", " \n\u3000"], "the query is empty"),
    ],
)
def test_queries_that_are_no_texts(index, queries, complaint, mode):
    with pytest.raises(InputError, match=complaint):
        index.search(queries, mode=mode)


@pytest.mark.parametrize("mode", ["hybrid", "dense", "words"])
@pytest.mark.parametrize("k", [2.5, "3", None, True, 0, -1, float("nan"), np.float32(2)])
def test_k_that_is_no_number_of_hits(index, k, mode):
    with pytest.raises(InputError, match="k = "):
        index.search("star", k, mode=mode)
    with pytest.raises(InputError, match="k = "):
        index.search_vectors(index.state.encode_queries(["star"]), k)


@pytest.mark.parametrize("mode", ["hybrid", "dense", "words"])
@pytest.mark.parametrize("k", [6, 999_999_999_999, 10**30, np.int64(2**62)])
def test_all_documents_are_given_to_who_asks_for_more(index, k, mode):
    assert len(index.search("star", k, mode=mode)) == 5
    assert len(index.search("star", k, {"year": 1}, mode)) == 0


def test_an_empty_list_of_queries_has_no_hits(index):
    assert index.search([]) == []
    assert index.search_vectors(np.empty((0, 32), dtype=np.float32)) == []


@pytest.mark.parametrize(
    ("vectors", "complaint"),
    [
        (np.ones((1, 31)), r"shape \(queries, 32\) in this index, not \(1, 31\)"),
        (np.ones((1, 33)), "shape"),
        (np.ones(32), r"not \(32,\)"),
        (np.ones((1, 1, 32)), "shape"),
        (np.full((1, 32), np.nan), "NaN or infinity"),
        (np.full((1, 32), np.inf), "NaN or infinity"),
        (None, "shape|array of numbers"),
        ("star", "array of numbers"),
        ([["star"] * 32], "array of numbers"),
        ([[1.0] * 32, [1.0]], "array of numbers"),
    ],
)
def test_vectors_that_are_none(index, vectors, complaint):
    with pytest.raises(InputError, match=complaint):
        index.search_vectors(vectors)


def test_vectors_of_any_number_type_are_taken(index):
    encoded = index.state.encode_queries(["star w1", "star w2"])
    expected = [[hit.id for hit in row] for row in index.search_vectors(encoded)]
    for vectors in (encoded.astype(np.float64), encoded.tolist(), np.asfortranarray(encoded)):
        assert [[hit.id for hit in row] for row in index.search_vectors(vectors)] == expected


@pytest.mark.parametrize("conditions", [7, "year", ["year"], {7: 1}, {"year": {"like": 1}}, {"year": object()}])
def test_filters_that_are_none(index, conditions):
    with pytest.raises(InputError):
        index.search("star", 3, conditions)


@pytest.mark.parametrize("doc_id", [None, 7, ["d1"], b"d1"])
def test_ids_that_are_none(index, doc_id):
    with pytest.raises(InputError, match="an id is a string"):
        index.get(doc_id)
    with pytest.raises(InputError, match="an id is a string"):
        index.remove([doc_id])
    assert doc_id not in index


@pytest.mark.parametrize("change", ["add", "update"])
@pytest.mark.parametrize("documents", [None, 7, "text", [None], ["text"], [{"id": "x"}], Document("x", "star")])
def test_documents_that_are_none(index, documents, change):
    with pytest.raises(InputError):
        getattr(index, change)(documents)
    with pytest.raises(InputError, match="remove takes a list of ids"):
        index.remove(None)
    assert len(index) == 5


@pytest.mark.parametrize(
    "arguments",
    [
        {"words_share": float("nan")},
        {"words_share": "half"},
        {"words_share": True},
        {"engine": None},
        {"language": None},
        {"encoder": None},
        {"corpus": None},
        {"hierarchy": "shrink"},
    ],
)
def test_an_index_of_impossible_parts_is_not_made(tmp_path, module_static_encoder, arguments):
    given = {"corpus": [Document("a", "star")], "encoder": module_static_encoder, **arguments}
    with pytest.raises(InputError):
        Index.create(tmp_path / "index", **given)
    assert not list(tmp_path.iterdir())
