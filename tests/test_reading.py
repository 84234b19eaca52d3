"""Files as people have them: other names of fields, other delimiters and encodings, and parts that cannot be read."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest

from hce.data import records
from hce.data.corpus import Corpus
from hce.data.judgments import Qrels, read_queries
from hce.data.records import Reading
from hce.data.text import Document
from hce.data.text_files import split_heading
from hce.errors import InputError


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.INFO, logger="hce")
    return lambda: "\n".join(caplog.messages)


def written(tmp_path, name: str, text: str, encoding: str = "utf-8"):
    (tmp_path / name).write_bytes(text.encode(encoding))
    return tmp_path / name


@pytest.mark.parametrize(
    ("header", "guessed"),
    [
        ("ID,Text", "the id from 'ID', the text from 'Text'"),
        ("Doc ID,content", "the id from 'Doc ID', the text from 'content'"),
        ("docno,BODY", "the id from 'docno', the text from 'BODY'"),
        ("id,Abstract", "the text from 'Abstract'"),
    ],
)
def test_usual_names_are_guessed_and_told(tmp_path, told, header, guessed):
    corpus = Corpus.load(written(tmp_path, "a.csv", f"{header},year\n1,star,1999\n2,moon,2000\n"))
    assert list(corpus) == [Document("1", "star", "", {"year": "1999"}), Document("2", "moon", "", {"year": "2000"})]
    assert f"a.csv: taking {guessed}" in told()


def test_proper_names_are_taken_in_silence(tmp_path, told):
    corpus = Corpus.load(written(tmp_path, "a.csv", "key,id,content,text,Title\nk,1,c,star,T\n"))
    assert list(corpus) == [Document("1", "star", "T", {"key": "k", "content": "c"})]
    assert "'id'" not in told()
    assert "'text'" not in told()


def test_the_first_record_decides_for_the_whole_file(tmp_path):
    lines = [{"docid": 1, "body": "star"}, {"docid": 2, "contents": "moon"}]
    path = written(tmp_path, "a.jsonl", "\n".join(map(json.dumps, lines)))
    with pytest.raises(InputError, match=r"line 2: document '2' has no text \(found: 'docid', 'contents'\).*'body'"):
        Corpus.load(path)
    path = written(tmp_path, "b.jsonl", json.dumps(lines[0]))
    assert list(Corpus.load(path)) == [Document("1", "star")]  # read again at its place in the file


def test_fields_that_are_named(tmp_path):
    path = written(tmp_path, "a.csv", "id,number,words,text,head\n1,7,star,x,H\n")
    named = Reading(id_field="number", title_field="head", text_field="words")
    assert list(Corpus.load(path, named)) == [Document("7", "star", "H", {"id": "1", "text": "x"})]
    with pytest.raises(InputError, match=r"line 2: no id \(found: 'id', 'number', 'words'"):
        Corpus.load(path, Reading(id_field="Nr"))


def test_one_field_may_be_id_and_title(tmp_path):
    lines = [{"package": "yt-dlp", "description": "fetch videos"}, {"package": 7, "description": "seven"}]
    path = written(tmp_path, "a.jsonl", "\n".join(map(json.dumps, lines)))
    corpus = Corpus.load(path, Reading(id_field="package", title_field="package", text_field="description"))
    assert list(corpus) == [Document("yt-dlp", "fetch videos", "yt-dlp"), Document("7", "seven", "7")]
    assert list(corpus.only(np.array([1]))) == [Document("7", "seven", "7")]


def test_remembered_fields_are_read_where_they_are(tmp_path):
    """A file without them is read the usual way."""
    kept = Reading(id_field="nr", title_field="head", text_field="body", remembered=True)
    own = written(tmp_path, "own.csv", "nr,head,body,id\n7,H,star,x\n")
    assert list(Corpus.load(own, kept)) == [Document("7", "star", "H", {"id": "x"})]
    usual = written(tmp_path, "usual.csv", "id,title,text,head\n7,T,star,x\n")
    assert list(Corpus.load(usual, kept)) == [Document("7", "star", "T", {"head": "x"})]


def test_ids_from_the_numbers_of_rows(tmp_path):
    for name, text in (
        ("a.csv", "text,id\nstar,x\nmoon,y\n"),
        ("a.jsonl", '{"text": "star", "id": "x"}\n{"text": "moon", "id": "y"}\n'),
    ):
        corpus = Corpus.load(written(tmp_path, name, text), Reading(row_ids=True))
        assert list(corpus) == [Document("1", "star", "", {"id": "x"}), Document("2", "moon", "", {"id": "y"})]


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_other_delimiters_of_csv_are_recognised(tmp_path, told, delimiter):
    text = 'id;"a, b; c";text\n1;"x; y";star, bright\n'.replace(";", delimiter)
    (document,) = Corpus.load(written(tmp_path, "a.csv", text))
    assert document.text == "star, bright"
    assert f"cells are separated by {delimiter!r}" in told()


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_a_delimiter_that_is_named(tmp_path, name):
    path = written(tmp_path, name, "id:text\n1:star\n")
    assert list(Corpus.load(path, Reading(delimiter=":"))) == [Document("1", "star")]


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "UTF-8-SIG"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "id,text\n1,é\n2,ü\n"),
        ("a.tsv", "id\ttext\n1\té\n2\tü\n"),
        ("a.jsonl", '{"id": 1, "text": "é"}\n{"id": 2, "text": "ü"}\n'),
        ("a.json", '[{"id": 1, "text": "é"},\n{"id": 2, "text": "ü"}]'),
    ],
)
def test_encodings(tmp_path, name, text, encoding):
    corpus = Corpus.load(written(tmp_path, name, text, encoding), Reading(encoding=encoding))
    assert list(corpus) == [Document("1", "é"), Document("2", "ü")]


@pytest.mark.parametrize(("name", "sign"), [("a.tsv", ";"), ("a.csv", ":")])
def test_a_header_of_one_column_suggests_a_delimiter(tmp_path, name, sign):
    path = written(tmp_path, name, f"id{sign}text\n1{sign}star\n")
    with pytest.raises(InputError, match=f"no id .*; name the separator of cells, as in --delimiter '{sign}'"):
        Corpus.load(path)
    with pytest.raises(InputError, match=f"has no text .*; name the separator of cells, as in --delimiter '{sign}'"):
        Corpus.load(path, Reading(row_ids=True))


def test_a_wrong_encoding_is_one_line(tmp_path):
    path = written(tmp_path, "a.csv", "id,text\n1,é\n", "latin-1")
    with pytest.raises(InputError, match=r"line 2: not UTF-8 .* or give its encoding, as in --encoding latin-1"):
        Corpus.load(path)
    with pytest.raises(InputError, match=r"a\.csv, after line 0: not ascii"):
        Corpus.load(path, Reading(encoding="ascii"))


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        ({"encoding": "klingon"}, "encoding 'klingon': unknown"),
        ({"encoding": "base64"}, "encoding 'base64': unknown"),
        ({"delimiter": "ab"}, "delimiter 'ab': give one character"),
        ({"delimiter": '"'}, "give one character"),
        ({"row_ids": True, "id_field": "x"}, "not from both"),
        ({"text_field": "x", "id_field": "x"}, "'x' of the text cannot be the id or the title as well"),
    ],
)
def test_wishes_that_make_no_sense(wishes, said):
    with pytest.raises(InputError, match=said):
        Reading(**wishes)


ITEMS = [{"id": i, "text": f"star {i} ☃ ] , [", "tags": [i, {"a": "}"}]} for i in range(50)]


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize(
    "text",
    [
        json.dumps(ITEMS),
        json.dumps(ITEMS, indent=2, ensure_ascii=False),
        "\ufeff \n" + json.dumps(ITEMS) + "\n \n",
        "\n".join(map(json.dumps, ITEMS)),
        "".join(json.dumps(item, indent=1) for item in ITEMS),
    ],
)
def test_json_arrays_and_objects_in_a_row(tmp_path, monkeypatch, chunk, text):
    monkeypatch.setattr(records, "CHUNK", chunk)
    corpus = Corpus.load(written(tmp_path, "a.json", text))
    assert [(document.id, document.text) for document in corpus] == [(str(i["id"]), i["text"]) for i in ITEMS]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"id": 1, "text": "a"}, {"id": 2', "item 2: not valid JSON"),
        ('[{"id": 1, "text": "a"}', "item 1: neither a comma nor the array's end follows"),
        ('[{"id": 1, "text": "a"}] x', "item 1: something follows the array's end"),
        ('[{"id": 1, "text": "a"}, 7]', "item 2: a JSON int, not an object"),
        ('[{"id": 1, "text": "a"},]', "item 2: not valid JSON"),
        ("[]", "no documents with text in it"),
        ("", "no documents with text in it"),
        ("[" * 100_000, "item 1: not valid JSON"),
    ],
)
def test_broken_json_is_one_line(tmp_path, text, said):
    with pytest.raises(InputError, match=said) as caught:
        Corpus.load(written(tmp_path, "a.json", text))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "title", "rest"),
    [
        ("# Red *shoes* ##\n\nAre red.", "Red *shoes*", "Are red."),
        ("Red\n===\nshoes", "Red", "shoes"),
        ("First.\n\n## Then\n", "Then", "First.\n\n## Then\n"),
        ("```\n# no heading\n```\n# Yes\n", "Yes", "```\n# no heading\n```\n# Yes\n"),
        ("---\n# a comment\nkey: 1\n---\n# Title\ntext", "Title", "---\n# a comment\nkey: 1\n---\ntext"),
        ("#hashtag\ntext", "", "#hashtag\ntext"),
        ("", "", ""),
    ],
)
def test_the_first_heading_of_markdown(text, title, rest):
    assert split_heading(text) == (title, rest)


def test_a_folder_with_a_bad_file_and_hidden_ones(tmp_path, told):
    for name in ("a.md", ".git/b.txt", ".venv/c.txt", ".d.txt", ".e"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("# Sea\nsalt")
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match=r"bad\.txt, line 1: not UTF-8 .*; --skip-bad leaves such files out"):
        Corpus.load(tmp_path)
    assert list(Corpus.load(tmp_path, Reading(skip_bad=True))) == [Document("a.md", "salt", "Sea")]
    assert "left out 1 unreadable items; the first: " in told()
    assert "bad.txt, line 1: not UTF-8" in told()
    assert "left out 2 hidden folders (.git …) and 1 hidden text file (.d.txt)" in told()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", b'{"id": 1, "text": "star"}\nbroken\n{"id": 2}\n\xff\n{"id": 3, "text": "moon"}\n'),
        ("a.tsv", b"id\ttext\n1\tstar\n2\n\tx\n\xff\tx\n3\tmoon\n"),
        ("a.csv", b"id,text\n1,star\n2\n,x\n3,moon,x\n3,moon\n"),
    ],
)
def test_bad_records_are_left_out_on_request(tmp_path, told, name, text):
    (tmp_path / name).write_bytes(text)
    with pytest.raises(InputError):
        Corpus.load(tmp_path / name)
    corpus = Corpus.load(tmp_path / name, Reading(skip_bad=True))
    assert list(corpus) == [Document("1", "star"), Document("3", "moon")]
    assert f"{name}: left out 3 unreadable items; the first: " in told()


def test_queries_by_usual_names(tmp_path, told):
    path = written(tmp_path, "q.csv", "QID,Question\n7,what is a star?\n")
    assert read_queries(path)["7"].text == "what is a star?"
    assert "the id from 'QID', the text from 'Question'" in told()


def test_judgments_among_some_documents(tmp_path):
    qrels = Qrels.read(written(tmp_path, "q.tsv", "a\t1\t1\na\t9\t1\nb\t9\t1\nb\t1\t0\nc\t1\t0\n"))
    assert {query: dict(grades) for query, grades in qrels.among({"1"}).items()} == {"a": {"1": 1}, "c": {"1": 0}}
