"""Late interaction: tokens put the first hits of a hybrid search into a better order, whatever is kept of them."""

from __future__ import annotations

import sqlite3
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from test_reranker import save_tiny
from transformers import BertModel

from hce.data.corpus import Corpus
from hce.data.text import Document
from hce.encoding.corpus_vectors import encode_corpus
from hce.encoding.encoder import Encoder
from hce.encoding.reranker import DIM, STEPS, QueryTokens, TokenSpace
from hce.index.check import check
from hce.index.index import Index
from hce.index.ranking import Hit
from hce.index.token_codes import SPACE_FILE, TokenCodes, in_order_of_tokens
from hce.search.fusion import TOKENS_FIRST as FIRST

TEXTS = [
    "ships and the sea",
    "stars of the night",
    "bread and supper",
    "laws of the court",
    "ships of the night",
    "the sea and the stars",
    "court and bread",
    "the number of laws",
]
DOCUMENTS = [Document(str(number), text) for number, text in enumerate(TEXTS)]
SHARE = 0.4


@pytest.fixture(scope="module")
def transformer(tmp_path_factory) -> str:
    """A tiny transformer that pools by the mean, in a directory."""
    tiny = save_tiny(tmp_path_factory.mktemp("tokens") / "bert", kind=BertModel)
    place = tmp_path_factory.mktemp("tokens") / "model"
    module = Transformer(str(tiny))
    SentenceTransformer(modules=[module, Pooling(module.get_embedding_dimension())], device="cpu").save(str(place))
    return str(place)


@pytest.fixture(scope="module")
def encoder(transformer) -> Encoder:
    return Encoder.load(transformer, device="cpu")


@pytest.fixture
def index(tmp_path, transformer):
    with Index.create(tmp_path / "index", DOCUMENTS, transformer) as made:
        yield made


def ids_of(hits: list[Hit]) -> list[str]:
    return [hit.id for hit in hits]


# ------------------------------------------------------------------------------------------------- closeness


def test_closeness_by_hand():
    """Tokens of the query: (1, 0) met best by (.8, .6) with .8, and (0, 1) by (0, 1) with 1; ¾ · .8 + ¼ · 1 = .85."""
    query = QueryTokens(np.array([[1, 0], [0, 1]], np.float32), np.array([0.75, 0.25], np.float32))
    codes = np.array([[0.8, 0.6], [0, 1], [-1, 0]]) * STEPS
    texts = [codes.round().astype(np.int8), np.zeros((0, 2), np.int8), np.array([[0, STEPS]], np.int8)]
    assert query.max_similarities(texts) == pytest.approx([0.85, 0, 0.25], abs=0.01)
    assert query.max_similarities([]).shape == (0,)
    assert QueryTokens(np.zeros((0, 2), np.float32), np.zeros(0, np.float32)).max_similarities(texts) == pytest.approx(
        0
    )


@given(arrays.arrays(np.float32, (5, 6), elements=st.floats(-1, 1, width=32)), st.integers(1, 5))
def test_closeness_is_that_of_plain_loops(states, count):
    space = TokenSpace(np.eye(6, dtype=np.float32), np.arange(1, 9, dtype=np.float32))
    codes, query = (
        space.codes(torch.from_numpy(states)),
        space.query(np.arange(count), torch.from_numpy(states[:count])),
    )
    expected, total = 0.0, sum(range(1, count + 1))
    for row in range(count):
        length = max(float(np.linalg.norm(states[row])), 1e-12)
        best = max(float(states[row] / length @ (codes[other] / STEPS)) for other in range(5))
        expected += (row + 1) / total * best
    assert query.max_similarities([codes[:1], codes])[1] == pytest.approx(expected, abs=1e-4)
    assert (np.abs(codes.astype(int)) <= STEPS).all()


def test_a_text_meets_itself_best(encoder):
    space = TokenSpace.fit(encoder, Corpus.from_documents(DOCUMENTS))
    assert space.basis.shape == (encoder.dim, min(DIM, encoder.dim))
    codes: dict[str, np.ndarray] = {}
    encoder.encode(TEXTS, on_tokens=lambda text, ids, states: codes.update({text: space.codes(states)}))
    asked: dict[str, QueryTokens] = {}
    encoder.encode(TEXTS, on_tokens=lambda text, ids, states: asked.update({text: space.query(ids, states)}))
    for text in TEXTS:
        assert max(codes, key=lambda other: asked[text].max_similarities([codes[other]])) == text


def test_rare_tokens_count_more(encoder):
    weights = TokenSpace.fit(encoder, Corpus.from_documents(DOCUMENTS)).weights
    the, bread, number, seven = map(encoder.tokenizer.convert_tokens_to_ids, ("the", "bread", "number", "7"))
    assert weights[the] == pytest.approx(np.log(9 / 6.5))  # in 6 of 8
    assert weights[the] < weights[bread] < weights[number] < weights[seven]


def test_prompts_are_no_tokens_of_a_text(encoder):
    prompted = Encoder.load(encoder.name, device="cpu", prompts={"query": "the sea ", "document": "of "})
    for kind in ("query", "document"):
        told: dict[str, list[int]] = {}
        prompted.encode(TEXTS, kind, on_tokens=lambda text, ids, states, told=told: told.update({text: ids.tolist()}))
        assert told == {text: encoder.tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS}
    plain, other = (TokenSpace.fit(each, Corpus.from_documents(DOCUMENTS)).weights for each in (encoder, prompted))
    np.testing.assert_array_equal(plain, other)


def test_states_of_lower_precision_are_kept_too(transformer):
    encoder = Encoder.load(transformer, device="cpu", dtype=torch.bfloat16)
    space = TokenSpace.fit(encoder, Corpus.from_documents(DOCUMENTS))
    asked: list[QueryTokens] = []
    encoder.encode(["ships"], "query", on_tokens=lambda text, ids, states: asked.append(space.query(ids, states)))
    assert asked[0].vectors.dtype == np.float32


def test_states_come_with_the_pass_that_makes_vectors(encoder):
    told: dict[str, tuple[np.ndarray, torch.Tensor]] = {}
    vectors = encoder.encode(TEXTS, on_tokens=lambda text, ids, states: told.update({text: (ids, states)}))
    np.testing.assert_array_equal(vectors, encoder.encode(TEXTS))
    special = set(encoder.tokenizer.all_special_ids)
    for text in TEXTS:
        ids, states = told[text]
        assert ids.tolist() == encoder.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert states.shape == (len(ids), encoder.dim)
        assert special.isdisjoint(ids.tolist())


def test_a_companion_leaves_the_states_as_they_are(encoder):
    both = encoder.beside([Encoder.load("static", device="cpu")], [0.7, 0.3])
    assert both.has_states
    alone, beside = {}, {}
    encoder.encode(TEXTS, on_tokens=lambda text, ids, states: alone.update({text: states}))
    both.encode(TEXTS, on_tokens=lambda text, ids, states: beside.update({text: states}))
    for text in TEXTS:
        torch.testing.assert_close(alone[text], beside[text])


def test_a_table_has_no_states():
    assert not Encoder.load("static", device="cpu").has_states


# ------------------------------------------------------------------------------------------------- order


def hit(number: int, score: float) -> Hit:
    return Hit(number, score, str(number), "", f"text {number}", {}, number, score)


def test_order_by_hand():
    """Scores .9 and .5 differ by .4; tokens add at most ⅔ of that: nothing to 1, all of it to 2, half of it to 3.

    So 2 has .7667 and 3 has .6333, and 1 stays first. All is scaled by .6, so that no score is above 1.
    """
    query = QueryTokens(np.array([[1, 0]], np.float32), np.array([1.0], np.float32))
    codes = {"text 1": [[0, 127]], "text 2": [[127, 0]], "text 3": [[64, 110]]}
    found = {text: np.array(rows, np.int8) for text, rows in codes.items()}
    hits = in_order_of_tokens(query, [hit(1, 0.9), hit(2, 0.5), hit(3, 0.5)], found, SHARE)
    assert ids_of(hits) == ["1", "2", "3"]
    assert [each.from_tokens for each in hits] == pytest.approx([0, 0.4 * 0.4, 0.4 * 0.2], abs=0.002)
    assert [each.score for each in hits] == pytest.approx([0.54, 0.46, 0.38], abs=0.002)
    assert [each.rank for each in hits] == [1, 2, 3]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=FIRST + 9), st.randoms(use_true_random=False))
def test_order_is_by_score_and_loses_nothing(scores, random):
    scores = sorted(scores, reverse=True)
    given_hits = [hit(number, score) for number, score in enumerate(scores, 1)]
    query = QueryTokens(np.array([[1, 0]], np.float32), np.array([1.0], np.float32))
    found = {each.text: np.array([[random.randint(-127, 127), 5]], np.int8) for each in given_hits}
    hits = in_order_of_tokens(query, given_hits, found, SHARE)
    assert sorted(ids_of(hits)) == sorted(ids_of(given_hits))
    assert ids_of(hits[FIRST:]) == ids_of(given_hits[FIRST:])
    assert [each.rank for each in hits] == list(range(1, len(hits) + 1))
    assert all(one.score >= other.score - 1e-5 for one, other in pairwise(hits))
    most = SHARE * (scores[0] - scores[min(FIRST, len(scores)) - 1])
    for each in hits:
        assert each.score == pytest.approx(each.from_meaning + each.from_words + each.from_tokens)
        assert -1e-9 <= each.from_tokens <= most + 1e-6
        assert each.score <= 1


# ------------------------------------------------------------------------------------------------- in an index


def test_tokens_tell_documents_apart_that_meaning_does_not(index, tmp_path, transformer):
    """Hits have the parts of their scores, and those of dense and words searches none from tokens."""
    hits = index.search("ships of the night", 8)
    assert hits[0].id == "4"
    assert any(each.from_tokens for each in hits)
    assert index.status().tokens
    for each in hits:
        assert each.score == pytest.approx(each.from_meaning + each.from_words + each.from_tokens)
    for mode in ("dense", "words"):
        assert not any(each.from_tokens for each in index.search("ships of the night", 8, mode=mode))
    with Index.create(tmp_path / "without", DOCUMENTS, transformer, tokens=False) as plain:
        assert not plain.status().tokens
        without = plain.search("ships of the night", 8)
        assert not any(each.from_tokens for each in without)
        assert {each.id: each.from_meaning for each in hits} == pytest.approx(
            {each.id: (1 - SHARE) * each.from_meaning for each in without}
        )


def test_all_codes_come_with_the_first_pass(index, monkeypatch):
    monkeypatch.setattr(TokenCodes, "put", lambda self, codes: pytest.fail("something was not kept"))
    for text in TEXTS:
        assert index.search(text, 3)[0].from_tokens >= 0


def test_what_is_missing_or_damaged_is_made_again(index):
    expected = index.search(TEXTS, 8)
    codes = TokenCodes(index.path / "tokens").file
    with sqlite3.connect(codes) as connection:
        connection.execute("DELETE FROM codes WHERE content % 2 = 0")
        connection.execute("UPDATE codes SET codes = x'00112233445566778899'")
    connection.close()
    assert index.search(TEXTS, 8) == expected
    for ruin in (lambda: codes.write_bytes(b"no database at all, for sure, it is none"), codes.unlink):
        ruin()
        assert index.search(TEXTS, 8) == expected
        assert len(TokenCodes(codes.parent).get(TEXTS)) == len(TEXTS)  # which are kept again


def test_a_check_finds_damage_and_a_repair_heals_it(index):
    expected = index.search(TEXTS, 8)
    index.close()
    folder = index.path / "tokens"
    assert check(index.path).findings == ()

    def flip() -> None:
        data = bytearray((folder / SPACE_FILE).read_bytes())
        data[-9] ^= 1
        (folder / SPACE_FILE).write_bytes(data)

    def change() -> None:
        with sqlite3.connect(TokenCodes(folder).file) as connection:
            connection.execute("UPDATE codes SET codes = x'00112233445566778899' WHERE content % 2 = 0")
        connection.close()

    for ruin in (
        flip,
        change,
        lambda: TokenCodes(folder).file.write_bytes(b"no database at all, for sure, it is none"),
    ):
        ruin()
        found = check(index.path).findings
        assert [(each.part, each.can_heal) for each in found] == [("tokens", True)]
        assert check(index.path, repair=True).is_sound
        with Index.open(index.path) as opened:
            assert opened.search(TEXTS, 8) == expected


def test_a_rebuild_does_without_what_is_damaged(index):
    expected = index.search(TEXTS, 8)
    TokenCodes(index.path / "tokens").file.write_bytes(b"no database at all, for sure, it is none")
    index.rebuild()
    assert index.search(TEXTS, 8) == expected


def test_a_damaged_space_is_told_in_one_line_and_done_without(index, caplog):
    (index.path / "tokens" / SPACE_FILE).write_bytes(b"damaged")
    with Index.open(index.path) as opened:
        for _ in range(3):
            assert not any(hit.from_tokens for hit in opened.search("ships"))
    (record,) = caplog.records
    assert "'hce rebuild --tokens' makes it again; until then the index ranks without tokens" in record.getMessage()


def test_another_process_notices_what_a_rebuild_changed(index):
    with Index.open(index.path) as other:
        index.rebuild(tokens=False)
        assert not any(hit.from_tokens for hit in other.search("ships of the night"))
        index.rebuild(tokens=True)
        assert any(hit.from_tokens for hit in other.search("ships of the night"))


def test_added_documents_have_tokens_and_removed_ones_none_after_a_rebuild(index, tmp_path, transformer):
    index.add([Document("new", "supper and stars")])
    hits = index.search("supper and stars", 9)
    assert hits[0].id == "new"
    with sqlite3.connect(TokenCodes(index.path / "tokens").file) as connection:
        assert connection.execute("SELECT count(*) FROM codes").fetchone() == (9,)
    connection.close()
    index.remove(["new", "0"])
    index.rebuild()
    with sqlite3.connect(TokenCodes(index.path / "tokens").file) as connection:
        assert connection.execute("SELECT count(*) FROM codes").fetchone() == (7,)
    connection.close()
    assert any(each.from_tokens for each in index.search("supper and stars", 9))


def test_tokens_can_be_given_up_and_taken_up_again(index):
    expected = index.search("ships of the night", 8)
    index.rebuild(tokens=False)
    assert not index.status().tokens
    assert not any(each.from_tokens for each in index.search("ships of the night", 8))
    index.rebuild(tokens=True)
    assert index.status().tokens
    assert index.search("ships of the night", 8) == expected


def test_k_and_batches_change_nothing(index):
    for text, row in zip(TEXTS, index.search(TEXTS, 8), strict=True):
        for k in (1, 3, 8):
            assert ids_of(index.search(text, k)) == ids_of(row)[:k]


def test_filters_hold(tmp_path, transformer):
    documents = [Document(each.id, each.text, metadata={"even": int(each.id) % 2 == 0}) for each in DOCUMENTS]
    with Index.create(tmp_path / "index", documents, transformer) as index:
        assert {each.id for each in index.search("the sea", 8, {"even": True})} == {"0", "2", "4", "6"}


def test_another_encoder_has_tokens_of_its_own(index, transformer, tmp_path):
    before = index.search("ships of the night", 8)
    assert index.reindex("static")
    assert not index.status().tokens
    assert not any(each.from_tokens for each in index.search("ships of the night", 8))
    index.undo_reindex()
    assert index.search("ships of the night", 8) == before
    prompted = Encoder.load(transformer, device="cpu", prompts={"document": "the "})
    assert index.reindex(prompted)
    assert index.status().tokens
    assert any(each.from_tokens for each in index.search("ships of the night", 8))


def test_long_documents_are_compared_by_the_passage_that_was_found(tmp_path, transformer):
    long = " ".join(["laws of the court and the number"] * 20) + " ships of the sea " + "bread and supper " * 40
    with Index.create(tmp_path / "index", [*DOCUMENTS, Document("long", long)], transformer) as index:
        hits = index.search("ships of the sea", 9)
        assert next(each for each in hits if each.id == "long").passage is not None
        assert any(each.from_tokens for each in hits)


@pytest.mark.parametrize("handed_over", [False, True])
def test_a_temporary_index_ranks_as_one_that_stays(index, encoder, handed_over):
    corpus = Corpus.from_documents(DOCUMENTS)
    vectors = encode_corpus(encoder, corpus) if handed_over else None
    temporary = Index.temporary(corpus, encoder, vectors=vectors)
    for text, row in zip(TEXTS, temporary.search(TEXTS, 8), strict=True):
        hits = index.search(text, 8)
        assert ids_of(hits) == [each.id for each in row]
        assert [each.score for each in hits] == pytest.approx([each.score for each in row], abs=1e-4)
        assert any(each.matched for each in hits) and not any(each.matched for each in row)


def test_passages_of_added_documents_have_tokens(index, monkeypatch):
    long = " ".join(["laws of the court and the number"] * 20) + " ships of the sea " + "bread and supper " * 40
    index.add([Document("long", long, "stars")])
    index.rebuild()
    monkeypatch.setattr(TokenCodes, "put", lambda self, codes: pytest.fail(f"not kept: {list(codes)}"))
    assert next(each for each in index.search("ships of the sea", 9) if each.id == "long").passage is not None


def test_who_has_an_earlier_space_does_not_spoil_a_new_one(index):
    earlier = TokenCodes.find(index.path / "tokens")
    index.add([Document("new", "supper and stars and bread and laws")])
    index.rebuild(tokens=True)
    later = TokenCodes.find(index.path / "tokens")
    assert earlier.file != later.file
    earlier.put({"ships and the sea": np.ones((1, earlier.space.basis.shape[1]), np.int8)})
    assert len(later.get(["ships and the sea"])["ships and the sea"]) == 4
    index.rebuild()
    assert not earlier.file.exists()


def test_odd_queries_and_few_documents_are_no_trouble(tmp_path, transformer):
    with Index.create(tmp_path / "index", DOCUMENTS[:1], transformer) as index:
        for query in ("?", "unknown words only", "ships " * 300, "ships"):
            assert ids_of(index.search(query, 3)) == ["0"]
        assert index.search([], 3) == []
        assert [ids_of(row) for row in index.search(["ships", "ships", "?"], 2)] == [["0"]] * 3
        index.add(DOCUMENTS[1:])
        assert ids_of(index.search("stars of the night", 1)) == ["1"]
        assert len(index.search("stars", 100, unique=True)) == len(DOCUMENTS)


def test_an_encoder_that_tells_of_no_states_is_used_without(tmp_path, transformer, monkeypatch):
    monkeypatch.setattr(Transformer, "forward", without_ids(Transformer.forward))
    with Index.create(tmp_path / "index", DOCUMENTS, transformer) as index:
        assert not index.status().tokens
        assert not any(each.from_tokens for each in index.search("ships of the night"))


def without_ids(forward):
    return lambda self, *a, **o: {key: each for key, each in forward(self, *a, **o).items() if key != "input_ids"}
