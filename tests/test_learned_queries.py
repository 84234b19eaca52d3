"""`hce serve --learn-queries`: the mean of what was asked is kept, and training takes it as a log; no text is kept."""

from __future__ import annotations

import json

import numpy as np
import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hce.cli import app
from hce.encoding.encoder import Encoder
from hce.errors import FormatError, InputError
from hce.index.check import check
from hce.index.index import Index
from hce.training.companion import accompany
from hce.training.query_mean import QueryMean, rows_of_first_part
from hce.training.recipe import Recipe
from hce.training.train import train
from hce.web.app import create_app
from hce.web.background import QueryLearner

ASKED = ["w1 w2", "w7 w9", "w4"]


@pytest.fixture
def index(concept_corpus, bert_folder, tmp_path):
    with Index.create(tmp_path / "index", concept_corpus, Encoder.load(bert_folder)) as made:
        yield made


@pytest.fixture(autouse=True)
def few_are_enough(monkeypatch):
    monkeypatch.setattr("hce.web.background.LEAST_AT_ONCE", 1)


@pytest.fixture
def expected(bert_folder):
    return Encoder.load(bert_folder).encode(ASKED, "query").mean(axis=0)


def test_a_server_keeps_the_mean_of_what_was_asked_and_goes_on_from_it(index, expected):
    for _ in range(2):
        with TestClient(create_app(index, learns=True), base_url="http://127.0.0.1") as client:
            assert all(client.get("/api/search", params={"q": text}).status_code == 200 for text in ASKED)
    kept = QueryMean.find(index.path)
    assert kept.count == 2 * len(ASKED)
    np.testing.assert_allclose(kept.mean, expected, atol=1e-5)
    assert set(json.loads((index.path / "asked.json").read_text())) == {"encoder", "count", "mean", "checksum"}
    assert check(index.path).is_sound


def test_nothing_is_kept_unless_asked_for(index):
    with TestClient(create_app(index), base_url="http://127.0.0.1") as client:
        assert client.get("/api/search", params={"q": "w1"}).status_code == 200
    assert QueryMean.find(index.path) is None


def test_a_killed_server_loses_only_what_came_since_the_last_write(index, monkeypatch):
    monkeypatch.setattr("hce.web.background.MOST_LOST", 2)
    asked = QueryLearner(index.state)
    for text in ASKED:
        asked.encode([text])
    assert QueryMean.find(index.path).count == 2  # and nothing else was done when the server was killed


def test_the_mean_of_few_queries_is_not_written(index, monkeypatch):
    """It would show what single ones asked. They are written with later ones."""
    monkeypatch.setattr("hce.web.background.LEAST_AT_ONCE", 4)
    asked = QueryLearner(index.state)
    asked.encode(ASKED)
    asked.flush()
    assert QueryMean.find(index.path) is None
    asked.encode(ASKED)
    asked.flush()
    assert QueryMean.find(index.path).count == 2 * len(ASKED)


def test_a_disk_that_fails_fails_no_search(index, monkeypatch, caplog):
    def full(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr("hce.web.background.MOST_LOST", 1)
    monkeypatch.setattr("hce.training.query_mean.write_json", full)
    assert len(QueryLearner(index.state).encode(["w1"])) == 1
    assert "was not saved (disk full)" in caplog.text


def test_after_a_reindexing_the_mean_starts_over(index, static_encoder, bert_folder, tmp_path):
    asked = QueryLearner(index.state)
    asked.encode(ASKED)
    given = Encoder.load(bert_folder)
    halved = Encoder.load(bert_folder, prompts={"query": "w5 "})
    halved.save(tmp_path / "other")
    index.reindex(tmp_path / "other")
    asked.encode(["w1"])
    assert QueryMean.find(index.path).encoder == given.fingerprint
    asked.flush()
    kept = QueryMean.find(index.path)
    assert (kept.count, kept.encoder) == (1, halved.fingerprint)


def test_training_takes_what_was_learned_as_it_takes_the_texts(
    index, concept_corpus, bert_folder, monkeypatch, static_encoder
):
    monkeypatch.setattr("hce.encoding.encoder.load_table_of", lambda model, fingerprint: static_encoder.table)
    recipe = Recipe.for_encoder(
        static=True, epochs=1, batch_size=32, span_lengths=(4,), dev_queries=60, fit_static=False
    )
    asked = QueryLearner(index.state)
    asked.encode(ASKED)
    asked.flush()
    by_mean, by_texts = (
        train(concept_corpus, Encoder.load(bert_folder), recipe=recipe, log=log).encoder.centres
        for log in (QueryMean.find(index.path), ASKED)
    )
    np.testing.assert_allclose(by_mean, by_texts, atol=1e-5)
    with pytest.raises(InputError, match="of another encoder"):
        train(concept_corpus, Encoder.load(bert_folder), recipe=recipe, log=QueryMean("0", 1, [0.0] * 8))


def test_what_cannot_be_is_refused(index, concept_corpus, static_encoder, tmp_path):
    with (
        Index.create(tmp_path / "static", concept_corpus, static_encoder) as by_table,
        pytest.raises(InputError, match="static encoder"),
    ):
        create_app(by_table, learns=True)
    (tmp_path / "docs.jsonl").write_text("".join(f'{{"id": "{n}", "text": "w{n} of many"}}\n' for n in range(30)))
    options = ["-o", str(tmp_path / "m"), "--encoder", "static", "--labels", f"log={index.path}"]
    run = CliRunner().invoke(app, ["train", str(tmp_path / "docs.jsonl"), *options])
    assert "serve it with --learn-queries first" in str(run.exception)
    (index.path / "asked.json").write_text('{"encoder": "a", "count": 1, "mean": [0.5]}')
    with pytest.raises(FormatError, match="changed since it was written; delete it"):
        QueryMean.find(index.path)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("has_centers", [False, True])
def test_the_first_part_is_found_again_in_joined_rows(static_encoder, seed, has_centers):
    """Whatever companions and centers did to it."""
    texts = [f"w{seed + n} w{n}" for n in range(5)]
    centers = np.random.default_rng(seed).normal(scale=0.02, size=(2, static_encoder.dim)) if has_centers else None
    together = accompany(static_encoder, [static_encoder], 0.3, centers)
    found = rows_of_first_part(together.encode(texts, "query"), together)
    np.testing.assert_allclose(found, static_encoder.encode(texts, "query"), atol=1e-5)


@given(st.integers(1, 50), st.integers(1, 50))
def test_means_add_up(first, second):
    rows = np.random.default_rng(first).normal(size=(first + second, 4))
    parts = [QueryMean.of_rows(some, "a") for some in (rows[:first], rows[first:])]
    np.testing.assert_allclose(parts[0].and_of(parts[1]).mean, rows.mean(axis=0), atol=1e-9)
