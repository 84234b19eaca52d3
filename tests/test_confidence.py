"""Whether anything in an index is a good match: own queries find one, foreign ones do not."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from fastapi.testclient import TestClient
from test_client import answering
from typer.testing import CliRunner

from hce.cli import app
from hce.encoding.encoder import Encoder
from hce.index.index import Index
from hce.index.manifest import Manifest
from hce.index.ranking import FARTHEST, LEAST, HitCloseness, MatchThresholds
from hce.index.state import IndexEncoder
from hce.search.words import Words
from hce.web.app import create_app
from hce.web.client import Client

LINE = "nothing here is a good match"
FOREIGN = ("zzyzx qwfp arst", "parliament ratified treaties yesterday")


@pytest.fixture(scope="module")
def made(tmp_path_factory, planted_corpus, module_static_encoder):
    path = tmp_path_factory.mktemp("confidence") / "index"
    Index.create(path, planted_corpus, module_static_encoder).close()
    return path


@pytest.fixture
def index(made):
    with Index.open(made) as opened:
        yield opened


def judged(index, query, **options):
    return index.good_match(query, index.search(query, **options), options.get("filter"), options.get("mode", "hybrid"))


@pytest.mark.parametrize("mode", ["hybrid", "dense"])
@pytest.mark.parametrize("k", [1, 10])
def test_own_queries_are_fine_and_foreign_ones_are_flagged(index, planted_corpus, mode, k):
    own = [" ".join(document.text.split()[2:9]) for document in list(planted_corpus)[::12]]
    assert np.mean([judged(index, query, mode=mode, k=k) for query in own]) >= 0.95
    assert [judged(index, query, mode=mode, k=k) for query in FOREIGN] == [False, False]


def test_what_is_searched_in_part_or_by_words_alone_is_not_judged(index):
    assert index.good_match("w1", []) is None
    assert judged(index, "w1", mode="words") is None
    hits = index.search("w1")
    assert index.good_match("w1", hits, {"year": 2024}) is None
    assert index.good_match("w1", [hits[0]._replace(number=10_000)]) is None  # it was removed meanwhile


def test_the_hit_that_is_judged_is_first_by_words_and_meaning(index, planted_corpus):
    query = " ".join(next(iter(planted_corpus)).text.split()[2:9])
    hits = index.search(query, k=100)
    assert index.good_match(query, hits[:1]) is True
    assert index.good_match(query, hits[-1:]) is False
    assert index.good_match(query, hits[::-1]) is True  # as a cross-encoder might have put them


def test_too_few_documents_are_not_judged_by_until_there_are_more(tmp_path, planted_corpus, static_encoder):
    documents = list(planted_corpus)
    with Index.create(tmp_path / "index", documents[: LEAST - 1], static_encoder) as index:
        assert index.state.manifest.calibration is None
        assert judged(index, FOREIGN[0]) is None
        index.add(documents[LEAST - 1 :])
        assert judged(index, FOREIGN[0]) is None
        index.rebuild()
        assert judged(index, FOREIGN[0]) is False


def test_an_index_from_before_opens_and_rebuild_teaches_it(tmp_path, planted_corpus, static_encoder):
    path = tmp_path / "index"
    Index.create(path, planted_corpus, static_encoder).close()
    values = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    values = {name: value for name, value in values.items() if name not in ("calibration", "checksum")}
    (path / "manifest.json").write_text(json.dumps(values), encoding="utf-8")
    with Index.open(path) as index:
        assert judged(index, FOREIGN[0]) is None
        index.rebuild()
        assert judged(index, FOREIGN[0]) is False
    calibration = Manifest.read(path).calibration
    assert set(calibration) == {"fingerprint", "cosine", "coverage"}
    earlier = {**calibration, "spans": 240, "cosines_with": [0.5]}  # which the first ones told too
    replace(Manifest.read(path), calibration=earlier).write(path)
    with Index.open(path) as index:
        assert judged(index, FOREIGN[0]) is False


def test_cosines_of_another_encoder_say_nothing(tmp_path, planted_corpus, static_encoder):
    with Index.create(tmp_path / "index", planted_corpus, static_encoder) as index:
        stale = {**index.state.manifest.calibration, "fingerprint": "another"}
        replace(index.state.manifest, calibration=stale).write(index.path)
        assert judged(index, FOREIGN[0]) is None


def test_the_query_of_a_search_is_not_encoded_again_unless_the_encoder_is_another(
    tmp_path, planted_corpus, static_encoder, monkeypatch
):
    asked, encode = [], IndexEncoder.encode

    def counting(self, texts, side, *options):
        asked.extend(texts if side == "query" else ())
        return encode(self, texts, side, *options)

    with Index.create(tmp_path / "index", planted_corpus, static_encoder) as index:
        monkeypatch.setattr(IndexEncoder, "encode", counting)
        hits = index.search(FOREIGN[0])
        assert index.good_match(FOREIGN[0], hits) is False
        assert asked == [FOREIGN[0]]
        assert index.good_match("w1 w2", index.search(["w1 w2", "w3"])[0]) is True
        assert asked[1:] == ["w1 w2", "w3", "w1 w2"]
        assert index.good_match(FOREIGN[0], hits, vector=np.ones(index.state.manifest.dim)) is not None
        index.search(FOREIGN[0])
        index.reindex(Encoder.load("static"))
        index.rebuild(refit=False)
        asked.clear()
        index.good_match(FOREIGN[0], hits)
        assert asked == [FOREIGN[0]]


def test_a_search_says_so(made):
    def shown(*arguments):
        result = CliRunner().invoke(app, ["search", str(made), *arguments])
        assert not result.exit_code, result.output
        return result.stdout

    assert shown(FOREIGN[0], "-k", "3").startswith(LINE)
    assert len(shown(FOREIGN[0], "-k", "3").splitlines()) > 3  # the hits are shown all the same
    assert LINE not in shown("w1 w2")
    asked = ([FOREIGN[0]], ["w1 w2"], [FOREIGN[0], "--mode", "words"])
    answers = [json.loads(shown(*arguments, "--json"))["good_match"] for arguments in asked]
    assert answers == [False, True, None]


def test_the_api_says_so(index):
    with TestClient(create_app(index), base_url="http://127.0.0.1:8080") as client:

        def told(**asked):
            return client.get("/api/search", params=asked).json()["good_match"]

        assert [told(q=FOREIGN[0]), told(q="w1 w2"), told(q="w1 w2", mode="words")] == [False, True, None]


@pytest.mark.parametrize(("said", "known"), [({}, None), ({"good_match": False}, False)])
def test_a_server_passes_it_on_if_it_knows(said, known):
    with answering(200, json.dumps({"hits": [], **said}).encode()) as (address, _):
        assert Client(address).search("anything").good_match is known


def test_a_hit_is_good_by_its_cosine_or_by_its_words():
    without = [HitCloseness(place / 100, place / 200) for place in range(101)]
    calibration = MatchThresholds.of("encoder", without)
    assert (calibration.cosine, calibration.coverage) == pytest.approx((FARTHEST, FARTHEST / 2))
    verdicts = [calibration.is_good(HitCloseness(*found)) for found in ((0.15, 0.05), (0.3, 0.05), (0.15, 0.2))]
    assert verdicts == [False, True, True]
    wordless = MatchThresholds.of("encoder", [HitCloseness(0.5, 0.0)] * 50)  # spans without a word of another document
    assert wordless.coverage == 0
    verdicts = [wordless.is_good(HitCloseness(*found)) for found in ((0.1, 0.0), (0.5, 0.0), (0.1, 0.1))]
    assert verdicts == [False, True, True]


def test_a_rare_word_counts_for_more():
    words = Words.new("english")
    words.add([(number, "red shoes" if number % 2 else "shoes") for number in range(10)])
    rarity = words.rarity("Shoe red unheard")
    assert list(rarity) == ["Shoe", "red", "unheard"]
    assert 0 < rarity["Shoe"] < rarity["red"] < rarity["unheard"]
    assert words.rarity("…") == {}


def test_a_word_of_removed_texts_still_counts_for_something():
    words = Words.new("english")
    words.add([(number, "red shoes" if number < 200 else "shoes") for number in range(300)])
    words.remove(np.arange(150))
    assert all(value > 0 for value in words.rarity("red shoes").values())
