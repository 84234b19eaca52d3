"""The options of `hce search`, `evaluate` and `status` that work on hits, and `hce reindex`, as they are typed."""

from __future__ import annotations

import json
import sys

import pytest
from test_reindex import table
from test_reranker import save_tiny

import hce.cli
from hce.data.text import Document
from hce.index.index import Index


def words(first, count=12):
    return " ".join(f"w{number}" for number in range(first, first + count))


DOCUMENTS = [
    Document("a", words(0), "w1 of w2", {"year": 2001, "tags": ["x", "y"]}),
    Document("a-again", words(0), "w1 of w2", {"year": 2001}),
    Document("b", f"{words(60, 60)} w5 W6s {words(120, 40)}", metadata={"year": 2002}),
]


@pytest.fixture
def run(capsys, monkeypatch):
    """Call the command line in this process; returns what is on stdout, of an error the line."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["hce", *map(str, arguments)])
        capsys.readouterr()
        try:
            hce.cli.main()
        except SystemExit as stopped:
            shown = capsys.readouterr()
            if stopped.code:
                return next(line for line in shown.err.splitlines() if line.startswith("error: "))
            return shown.out
        return capsys.readouterr().out

    return call


@pytest.fixture
def index(tmp_path, module_static_encoder):
    Index.create(tmp_path / "index", DOCUMENTS, module_static_encoder).close()
    return tmp_path / "index"


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("reranker") / "tiny")


def test_what_is_shown_is_the_part_with_the_querys_words(run, index):
    shown = run("search", index, "w5 w6", "-k", 3)
    line = next(line for line in shown.splitlines() if "W6s" in line)
    assert line.strip().startswith("… w")
    assert line.endswith(" …")
    (hit,) = [hit for hit in json.loads(run("search", index, "w5 w6", "--json"))["hits"] if hit["id"] == "b"]
    assert [hit["snippet"][start:stop] for start, stop in hit["snippet_marks"]] == ["w5", "W6s"]
    assert hit["text"][hit["snippet_start"] :].startswith(hit["snippet"])


def test_unique_and_facets(run, index):
    shown = run("search", index, words(0), "--unique", "--facet", "year", "--facet", "tags")
    assert "and 1 near-equal: a-again" in shown
    assert "year: 2001 2 · 2002 1" in shown
    assert "tags: x 1 · y 1" in shown
    answer = json.loads(run("search", index, words(0), "--unique", "--facet", "year", "--where", "year=2001", "--json"))
    assert [(hit["id"], hit["folded"]) for hit in answer["hits"]] == [("a", ["a-again"])]
    assert answer["facets"] == {"year": [{"value": 2001, "documents": 2}]}
    assert "no document has a field 'colour'" in run("search", index, "w1", "--facet", "colour")


def test_rerank(run, index, reranker, tmp_path):
    answer = json.loads(run("search", index, "w1", "--rerank", reranker, "--json", "-k", 2))
    assert [hit["rank"] for hit in answer["hits"]] == [1, 2]
    assert all(isinstance(hit["first_rank"], int) for hit in answer["hits"])
    assert "  was " in run("search", index, "w1", "--rerank", reranker)
    assert "a folder without a model" in run("search", index, "w1", "--rerank", tmp_path)
    assert "depth = 0" in run("search", index, "w1", "--rerank", reranker, "--depth", 0)


def test_evaluate_with_rerank(run, index, reranker, tmp_path):
    beir = tmp_path / "beir"
    (beir / "qrels").mkdir(parents=True)
    (beir / "corpus.jsonl").write_text("\n".join(document.to_json() for document in DOCUMENTS))
    (beir / "queries.jsonl").write_text(json.dumps({"_id": "q", "text": "w61 w62"}))
    (beir / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\tb\t1\n")
    options = ("evaluate", beir, "-m", index, "--measures", "ndcg@10,recall@1")
    plain = json.loads(run(*options, "--json"))
    ranked = json.loads(run(*options, "--json", "--rerank", reranker))
    assert plain != ranked
    assert str(reranker) in json.dumps(ranked)
    assert "--rerank needs an index" in run("evaluate", beir, "-m", "static", "--rerank", reranker)


def test_reindex(run, index, tmp_path, module_static_encoder):
    assert "give either --model" in run("reindex", index)
    assert "give either --model" in run("reindex", index, "--undo", "-m", "static")
    assert "no earlier encoder is kept" in run("reindex", index, "--undo")
    module_static_encoder.save(tmp_path / "same")
    assert "had this encoder already" in run("reindex", index, "-m", tmp_path / "same")
    table(24, 2).save(tmp_path / "other")
    shown = run("reindex", index, "-m", tmp_path / "other")
    assert f"has the encoder {tmp_path / 'other'}" in shown.replace("\n", " ")
    assert "hce reindex" in run("status", index, "--no-drift")
    facts = json.loads(run("reindex", index, "--undo", "--json"))
    assert (facts["reindexed"], facts["dim"]) == (True, 32)
