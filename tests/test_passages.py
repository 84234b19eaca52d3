"""Long documents: how they are cut into passages, and that each passage can be found, one hit a document."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import WORDS, word_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding

from hce.data.corpus import Corpus
from hce.data.text import OVERLAP, Document, cut_passages
from hce.encoding.encoder import UNLIMITED_WINDOW, Encoder
from hce.errors import FormatError, InputError
from hce.index import create, writing
from hce.index.index import Index
from hce.index.ranking import cosines_of, searched_at
from hce.index.writing import PASSAGE_TOKENS, Cutter, LongDocuments
from hce.search.engine import ENGINES, Found, PassageEngine, new_engine

ODD = f"ship blue {' '.join(f'w{i}' for i in range(175, 193))}."  # sentences of words that nothing else has
OTHER = f"cell red {' '.join(f'w{i}' for i in range(155, 173))}."


def words_of(text):
    return [match.span() for match in re.finditer(r"\w+|[^\w\s]", text)]


def long_text(words=50_000, other=False):
    """So many words in sentences of ten, an odd sentence in the middle, and another one where asked."""
    odd = {0.5: ODD, 0.7: OTHER} if other else {0.5: ODD}
    rng = np.random.default_rng(3)
    sentences = [" ".join(f"w{w}" for w in row) + "." for row in rng.integers(150, size=(words // 10, 10))]
    for place, sentence in odd.items():
        sentences.insert(int(place * len(sentences)), sentence)
    return " ".join(sentences)


def shorts(count=30):
    return [Document(f"short-{i}", f"star green w{i} w{i + 1} w{i + 2}", metadata={"year": i}) for i in range(count)]


# ------------------------------------------------------------------------------------------------- cutting


@given(
    st.text(alphabet="ab .!\n日。-", max_size=400) | st.text(max_size=200),
    st.integers(min_value=1, max_value=40),
)
def test_passages_cover_the_text_in_order_and_overlap(text, most):
    tokens = words_of(text)
    passages = cut_passages(text, tokens, most)
    assert passages[0].start == 0
    assert passages[-1].stop == len(text)
    for before, after in pairwise(passages):
        assert before.start < after.start <= before.stop < after.stop
        shared = sum(after.start <= start and stop <= before.stop for start, stop in tokens)
        assert shared >= most // OVERLAP
    for passage in passages:
        inside = sum(passage.start <= start and stop <= passage.stop for start, stop in tokens)
        assert inside <= most
    assert (len(passages) == 1) == (len(tokens) <= most)


@given(st.lists(st.integers(min_value=1, max_value=4), max_size=80), st.integers(min_value=1, max_value=12))
def test_what_cannot_be_cut_stays_together(sizes, most):
    """Some characters are several tokens, of the same place."""
    text = "x" * len(sizes)
    tokens = [(place, place + 1) for place, size in enumerate(sizes) for _ in range(size)]
    passages = cut_passages(text, tokens, most)
    assert sorted({place for each in passages for place in range(*each)}) == list(range(len(text)))
    for passage in passages:
        assert sum(sizes[slice(*passage)]) <= most or passage.stop - passage.start == 1


def test_passages_end_where_sentences_do():
    text = long_text(2000)
    passages = cut_passages(text, words_of(text), 100)
    assert len(passages) > 20
    for passage in passages:
        piece = text[slice(*passage)]
        assert piece.rstrip().endswith(".")
        assert passage.start == 0 or text[: passage.start].endswith(". ")


def test_words_stay_whole_where_there_are_no_sentences():
    text = " ".join(f"word{i}" for i in range(500))
    halves = [span for start, stop in words_of(text) for span in ((start, start + 2), (start + 2, stop))]
    for passage in cut_passages(text, halves, 50):
        assert text[slice(*passage)].startswith("word")
        assert re.search(r"word\d+\s?$", text[slice(*passage)])


def test_the_last_passage_is_a_full_one():
    text = " ".join(f"w{i}" for i in range(105))
    first, last = cut_passages(text, words_of(text), 100)
    assert len(text[slice(*first)].split()) == 100
    assert len(text[slice(*last)].split()) == 100


# ------------------------------------------------------------------------------------------------- encoders


def test_what_an_encoder_reads(static_encoder, bert_folder, gtr_folder):
    assert static_encoder.window == UNLIMITED_WINDOW
    static_encoder.model.tokenizer.enable_truncation(100)
    assert static_encoder.window == 100
    assert Encoder.load(bert_folder).window == 48 - 2
    assert Encoder.load(gtr_folder).window == 48 - 2 - 2  # "passage : " is two tokens, as "passage" and ":"
    beside = Encoder.load(bert_folder).beside([static_encoder], [0.5, 0.5])
    assert beside.window == 46


@pytest.mark.parametrize("folder", ["bert_folder", "gtr_folder"])
def test_an_encoder_reads_a_passage_to_its_end(folder, request):
    encoder = Encoder.load(request.getfixturevalue(folder))
    document = Document("long", long_text(400), "star blue")
    cutter = Cutter(encoder)
    passages = cutter.cut([document])[0]
    texts = cutter.texts(document, passages)
    assert len(texts) == len(passages) > 8
    assert all(text.startswith("star blue ") for text in texts)
    cut_off = encoder.encode([text.rstrip(" .").rsplit(" ", 1)[0] for text in texts])
    assert (np.abs(encoder.encode(texts) - cut_off).max(axis=1) > 1e-4).all()  # the last word counts
    assert all(len(encoder.tokenize([text], "document")["input_ids"][0]) <= 48 for text in texts)


def test_a_long_title_is_cut_like_a_text(static_encoder):
    document = Document("long", "star.", long_text(2000))
    cutter = Cutter(static_encoder)
    passages = cutter.cut([document])[0]
    assert cutter.texts(document, passages) == [document.full_text[slice(*each)] for each in passages]


def test_a_tokenizer_that_cannot_be_asked(static_encoder):
    cutter = Cutter(static_encoder)
    cutter._tokenizer = None
    text = long_text(2000)
    passages = cutter.cut([Document("long", text), Document("short", "star")])
    assert list(passages) == [0]
    assert (passages[0][0].start, passages[0][-1].stop) == (0, len(text))


def test_a_corpus_without_long_documents_is_encoded_as_it_is(planted_corpus, static_encoder):
    assert LongDocuments(planted_corpus, Cutter(static_encoder)).corpus is planted_corpus


# ------------------------------------------------------------------------------------------------- one hit a document


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("k", [1, 5, 30])
def test_the_nearest_documents_are_those_of_the_best_passages(engine, k):
    """Few documents have most of the passages that are near; the reference compares all."""
    rng = np.random.default_rng(k)
    whole = unit(rng.normal(size=(40, 8))).astype(np.float32)
    owners = np.sort(np.concatenate([np.repeat(3, 200), rng.integers(1, 41, 60)]))
    further = unit(rng.normal(size=(260, 8)))
    further[owners == 3] = unit(whole[7] + 0.1 * rng.normal(size=((owners == 3).sum(), 8)))
    queries, numbers = unit(np.concatenate([whole[7:8], rng.normal(size=(6, 8))])), np.arange(1, 41)
    allowed = np.sort(rng.choice(numbers, 25, replace=False))
    passages = PassageEngine.build(engine, 8, np.arange(1, 261), owners, further)
    own = new_engine("exact", 8, numbers=numbers, vectors=whole)
    for allowed_or_all in (None, allowed):
        found = passages.merged_with(own.search(queries, k, allowed_or_all), queries, k, allowed_or_all)
        for row, query in enumerate(queries):
            best = {n: max([whole[n - 1] @ query, *(further[owners == n] @ query)]) for n in numbers.tolist()}
            there = [n for n in best if allowed_or_all is None or n in allowed]
            expected = sorted(there, key=lambda n: -best[n])[:k]
            got = found.numbers[row][found.numbers[row] > 0].tolist()
            assert got == expected
            np.testing.assert_allclose(found.scores[row, : len(got)], [best[n] for n in got], atol=1e-5)
            for n, passage in zip(got, found.passage_numbers[row].tolist(), strict=False):
                vector = further[passage - 1] if passage else whole[n - 1]
                assert vector @ query == pytest.approx(best[n], abs=1e-5)


def test_passages_are_removed_with_their_document_and_survive_a_save(tmp_path):
    rows = unit(np.random.default_rng(0).normal(size=(6, 8)))
    passages = PassageEngine.build("exact", 8, np.arange(1, 5), np.array([1, 1, 2, 2]), rows[:4])
    passages.add(np.array([5, 6]), np.array([4, 4]), rows[4:])
    passages.remove(np.array([2, 3]))
    passages.save(tmp_path)
    loaded = PassageEngine.load("exact", tmp_path, 8)
    for each in (passages, loaded):
        assert each.documents.tolist() == [1, 1, 4, 4]
        nothing = Found(np.full((1, 3), -1, np.int64), np.full((1, 3), -np.inf, np.float32))
        found = each.merged_with(nothing, rows[4:5], 3)
        assert sorted(found.numbers[0].tolist()) == [-1, 1, 4]
        assert found.passage_numbers[0, 0] == 5
    (tmp_path / "arrays.safetensors").write_bytes(b"no")
    with pytest.raises(FormatError, match="damaged"):
        PassageEngine.load("exact", tmp_path, 8)


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


# ------------------------------------------------------------------------------------------------- in an index


@pytest.fixture(scope="module")
def book():
    return Document("book", long_text(other=True), "Star charts", {"year": 1900})


@pytest.fixture(scope="module")
def encoder():
    """A random token table of so many dimensions that unlike words are far apart."""
    table = np.random.default_rng(2).normal(size=(len(WORDS), 256)).astype(np.float32)
    modules = [StaticEmbedding(word_tokenizer(), embedding_weights=table), Normalize()]
    model = SentenceTransformer(modules=modules, device="cpu")
    return Encoder(model, "wide static", device=torch.device("cpu"), dtype=torch.float32)


def check_found(index, mode="dense", doc_id="book", **options):
    """The document is found by its odd sentences, once, and shows the passage that has the sentence."""
    for sentence in (ODD, OTHER):
        hits = index.search(sentence, 5, mode=mode, **options)
        assert hits[0].id == doc_id
        assert [hit.id for hit in hits].count(doc_id) == 1
        passage = hits[0].text[slice(*hits[0].passage)]
        assert sentence in passage
        assert mode != "dense" or hits[0].score > 0.35
        assert len(passage.split()) <= PASSAGE_TOKENS


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sentence_in_the_middle_of_a_book_is_found(tmp_path, encoder, book, engine):
    documents = [*shorts(), book, *shorts(60)[30:]]
    with Index.create(tmp_path / "index", documents, encoder, engine=engine) as index:
        for mode in ("dense", "hybrid", "words"):
            check_found(index, mode)
        assert len(index) == index.status().documents == 61
        assert index.vectors()[1].shape == (61, 256)
        assert index.status().pending == 0
        hits = index.search(ODD, 100, mode="dense")
        assert len(hits) == len({hit.id for hit in hits}) == 61
        assert [hit.id for hit in hits if hit.passage] == ["book"]
        assert json.loads(json.dumps(hits[0].as_dict()))["passage"] == list(hits[0].passage)
    with Index.open(tmp_path / "index") as index:
        check_found(index)


def test_without_passages_it_is_not_found(tmp_path, encoder, book, monkeypatch):
    """That the other tests can fail: read as a whole, the sentence drowns."""
    monkeypatch.setattr(Cutter, "cut", lambda self, documents: {})
    with Index.create(tmp_path / "index", [*shorts(), book], encoder) as index:
        assert index.search(ODD, 1, mode="dense")[0].score < 0.2


def test_short_documents_are_kept_as_they_were(tmp_path, encoder):
    with Index.create(tmp_path / "index", shorts(), encoder) as index:
        tables = sqlite3.connect(index.path / "documents.sqlite").execute("SELECT name FROM sqlite_master").fetchall()
        assert not any("passages" in name for (name,) in tables)
        assert not (index.path / "passages").exists()
        assert all(hit.passage is None for hit in index.search("star", 50))


def test_documents_that_come_and_go(tmp_path, encoder, book):
    with Index.create(tmp_path / "index", shorts(), encoder) as index, Index.open(tmp_path / "index") as other:
        index.search("star", mode="dense")
        assert index.add([book]) == 1
        for each in (index, other):
            for mode in ("dense", "hybrid", "words"):
                check_found(each, mode)
            assert len(each) == 31
        index.remove(["book"])
        for each in (index, other):
            assert "book" not in [hit.id for hit in each.search(ODD, 50, mode="dense")]
            assert each.search("w177", 50, mode="words") == []
        assert passage_rows(index) == 0
        index.add([Document("again", book.text, book.title)])
        check_found(index, doc_id="again")
        changed = Document("again", book.text.replace(ODD, "law law law."), book.title)
        before = index.search(ODD, 1, mode="dense")[0].score
        index.update([changed])
        assert index.search(ODD, 1, mode="dense")[0].score < before - 0.1
        index.update([Document("again", changed.text, changed.title, {"year": 5})])
        assert index.search(OTHER, 1, mode="dense", filter={"year": 5})[0].passage is not None
        index.update([Document("again", "law", "")])
        assert passage_rows(index) == 0


def test_the_same_vectors_however_a_document_comes(tmp_path, encoder, book):
    """Created, added, or added twice: an equal text has equal passages."""
    with Index.create(tmp_path / "index", [book], encoder) as index:
        index.add([Document("added", book.text, book.title)])
        first, second = index.search(OTHER, 2, mode="dense")
        assert {first.id, second.id} == {"book", "added"}
        assert first.passage == second.passage
        assert first.score == pytest.approx(second.score, abs=1e-5)


def test_filters_hold_for_passages(tmp_path, encoder, book):
    twin = Document("twin", book.text, book.title, {"year": 2000})
    with Index.create(tmp_path / "index", [*shorts(), book, twin], encoder) as index:
        check_found(index, filter={"year": {"lt": 1950}})
        check_found(index, "hybrid", filter={"year": {"lt": 1950}})
        check_found(index, filter={"year": 2000}, doc_id="twin")
        assert len(index.search(ODD, 50, {"year": {"lt": 30}}, "dense")) == 30
        assert [hit.id for hit in index.search(ODD, 2, mode="dense")] == ["book", "twin"]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rebuild_keeps_passages(tmp_path, encoder, book, engine):
    with Index.create(tmp_path / "index", [*shorts(), book], encoder) as index:
        index.remove(["short-3"])
        index.rebuild(engine)
        check_found(index)
    shutil.rmtree(tmp_path / "index" / "passages")
    with Index.open(tmp_path / "index") as index:
        check_found(index)


def test_words_name_the_passage_that_has_them(tmp_path, encoder, book):
    with Index.create(tmp_path / "index", [*shorts(), book], encoder) as index:
        (hit,) = index.search("w177", 5, mode="words")
        assert hit.id == "book"
        assert "w177" in hit.text[slice(*hit.passage)].split()
        (hit,) = index.search("w177", 5, mode="words", filter={"year": 1900})
        assert hit.id == "book"
        assert index.search("w177", 5, mode="words", filter={"year": 5}) == []


def test_a_document_that_only_words_found_is_scored_by_its_nearest_passage(tmp_path, encoder, book):
    with Index.create(tmp_path / "index", [*shorts(), book], encoder) as index:
        hit, query = index.search(ODD, 1, mode="dense")[0], index.state.encode_queries([ODD])[0]
        with index.state.reading() as reader:
            passage_of: dict[int, int] = {}
            with searched_at(reader, index.state.derived, "dense") as searched:
                cosines = cosines_of(searched, query, passage_of, np.array([4, hit.number, 2]))
            np.testing.assert_allclose(cosines[[0, 2]], reader.vectors_at(np.array([4, 2])) @ query, atol=1e-6)
            assert cosines[1] == pytest.approx(hit.score, abs=1e-5)
            ((number, passage),) = passage_of.items()
            assert number == hit.number
            assert ODD in book.full_text[slice(*reader.extents([passage])[passage])]


@pytest.mark.parametrize(("title", "text"), [("", "  \n star w1. "), (" Star ", "w1. "), ("Star", "")])
def test_a_passage_is_a_place_in_the_text_and_not_in_the_title(tmp_path, encoder, title, text):
    document = Document("book", text + long_text(3000), title)
    with Index.create(tmp_path / "index", [document], encoder) as index:
        (hit,) = index.search(ODD, mode="dense")
        piece = hit.text[slice(*hit.passage)]
        assert ODD in piece
        assert piece == piece.lstrip()
        assert piece.rstrip().endswith(".")


def test_an_interrupted_creation_goes_on(tmp_path, encoder, book, monkeypatch):
    """The vectors of passages are kept as those of documents are."""
    whole = Index.create(tmp_path / "whole", [*shorts(), book], encoder)
    small = lambda *a, **o: encode_corpus(*a, **o, chunk_size=16)  # noqa: E731
    encode_corpus, encode, calls = create.encode_corpus, Encoder.encode, []

    def failing(self, texts, *args, **options):
        calls.append(len(texts))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return encode(self, texts, *args, **options)

    monkeypatch.setattr(create, "encode_corpus", small)
    monkeypatch.setattr(Encoder, "encode", failing)
    with pytest.raises(KeyboardInterrupt):
        Index.create(tmp_path / "index", [*shorts(), book], encoder)
    before = sum(calls[:3])
    with Index.create(tmp_path / "index", [*shorts(), book], encoder) as index:
        assert sum(calls[4:]) == 31 + passage_rows(whole) - before
        monkeypatch.setattr(Encoder, "encode", encode)
        check_found(index)
    whole.close()


def test_what_is_not_committed_leaves_no_passage(tmp_path, encoder, book, monkeypatch):
    with Index.create(tmp_path / "index", shorts(), encoder) as index:
        monkeypatch.setattr(writing, "DOCUMENTS_AT_ONCE", 1)
        with pytest.raises(InputError, match="comes twice"):
            index.add([book], [Document("book", "star")])
        assert len(index) == 30
        assert not (tmp_path / "index" / "passages").exists()
        with index.state.reading() as reader:
            assert not reader.has_passages()


def passage_rows(index):
    with sqlite3.connect(index.path / "documents.sqlite") as connection:
        return connection.execute("SELECT count(*) FROM passages").fetchone()[0]


# ------------------------------------------------------------------------------------------------- earlier formats


def test_a_corpus_is_the_same_by_rows(static_encoder, book):
    """All documents come first, as they are; then the passages."""
    corpus = Corpus.from_documents([*shorts(3), book, *shorts(5)[3:]])
    long = LongDocuments(corpus, Cutter(static_encoder))
    texts = list(long.corpus.texts())
    assert texts[:6] == list(corpus.texts())
    assert book.full_text.startswith(texts[6])
    assert texts[7].startswith(f"{book.title} w")
    assert long.corpus.fingerprint != corpus.fingerprint
    ((place, passages),) = long.passages_of(range(2, 6), np.arange(len(texts))[:, None]).items()
    assert place == 1
    assert passages.vectors[:, 0].tolist() == list(range(6, len(texts)))
    assert len(passages.extents) == len(passages.vectors)
    assert sum(ODD in text for text in texts[6:]) in (1, 2)


KILLED = """
import os, sys
from hce.data.text import Document
from hce.index.index import Index
from hce.index.tables import Writer

index = Index.open(sys.argv[1])
Writer.record = lambda self: os.kill(os.getpid(), 9)  # all is written, and nothing is committed
text = open(sys.argv[2]).read()
if sys.argv[3] == "add":
    index.add([Document("second", text)])
else:
    index.remove(["book"])
"""


@pytest.mark.parametrize("change", ["add", "remove"])
def test_kill_9_leaves_a_document_with_all_of_its_passages_or_none(tmp_path, encoder, book, change):
    with Index.create(tmp_path / "index", [*shorts(), book], encoder) as index:
        rows = passage_rows(index)
    (tmp_path / "text").write_text(book.text)
    command = [sys.executable, "-c", KILLED, tmp_path / "index", tmp_path / "text", change]
    assert subprocess.run(command, check=False).returncode == -9
    with Index.open(tmp_path / "index") as index:
        assert passage_rows(index) == rows
        check_found(index)
        assert len(index) == 31
