"""The same documents and fingerprint from every format; every fault named; any document at any time from any thread."""

import csv
import errno
import functools
import gzip
import io
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hce.data import corpus as corpus_module
from hce.data.corpus import Corpus
from hce.data.records import Record, parse_document
from hce.data.text import Document
from hce.errors import InputError

DOCUMENTS = [
    Document("1", "the sea", "Water", {"lang": "en"}),
    Document("x/2", 'ein "Berg", hoch', "", {"lang": "de"}),
    Document("3", "", "only a title ☃", {"lang": "en"}),
]


def rows(documents):
    return [{"_id": d.id, "title": d.title, "text": d.text, **d.metadata} for d in documents]


def write_jsonl(path, documents):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(documents)))


def write_csv(path, documents):
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["_id", "title", "text", *documents[0].metadata])
        writer.writeheader()
        writer.writerows(rows(documents))


def write_tsv(path, documents):
    table = [rows(documents)[0].keys(), *(row.values() for row in rows(documents))]
    path.write_text("".join("\t".join(cells) + "\n" for cells in table), encoding="utf-8")


def write_parquet(path, documents):
    pq.write_table(pa.Table.from_pylist(rows(documents)), path)


def write_beir(path, documents):
    path.mkdir()
    write_jsonl(path / "corpus.jsonl", documents)


WRITERS = {
    "a.jsonl": write_jsonl,
    "a.ndjson": write_jsonl,
    "A.JSONL": write_jsonl,
    "a.csv": write_csv,
    "a.tsv": write_tsv,
    "a.parquet": write_parquet,
    "folder": write_beir,
}


def compress(path):
    packed = path.with_name(path.name + (".GZ" if path.name.isupper() else ".gz"))
    packed.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    return packed


def jsonl(tmp_path, *lines):
    path = tmp_path / "docs.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def fault(path):
    """The one line that loading `path` raises; nothing may be written anywhere near."""
    folder = Path(path).parent
    before = sorted(folder.rglob("*"))
    with pytest.raises(InputError) as caught:
        Corpus.load(path)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert str(path) in message
    assert sorted(folder.rglob("*")) == before
    return message


# The same from every format


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_documents_and_fingerprint(tmp_path, name):
    path = tmp_path / name
    WRITERS[name](path, DOCUMENTS)
    corpus = Corpus.load(path)
    assert list(corpus) == DOCUMENTS
    assert corpus.fingerprint == Corpus.from_documents(DOCUMENTS).fingerprint
    assert corpus.left_out == frozenset()
    assert list(Corpus.load(str(path))) == DOCUMENTS


@pytest.mark.parametrize("name", ["a.jsonl", "A.JSONL", "a.ndjson", "a.csv", "a.tsv"])
def test_compressed_text_formats(tmp_path, name):
    WRITERS[name](tmp_path / name, DOCUMENTS)
    corpus = Corpus.load(compress(tmp_path / name))
    assert list(corpus) == DOCUMENTS
    assert corpus.fingerprint == Corpus.from_documents(DOCUMENTS).fingerprint


def test_compressed_beir_folder(tmp_path):
    write_beir(tmp_path / "beir", DOCUMENTS)
    compress(tmp_path / "beir" / "corpus.jsonl")
    assert list(Corpus.load(tmp_path / "beir")) == DOCUMENTS


def test_beir_metadata_one_level_down_is_the_same_as_beside(tmp_path):
    path = jsonl(tmp_path, *(document.to_json() for document in DOCUMENTS))
    corpus = Corpus.load(path)
    assert list(corpus) == DOCUMENTS
    assert corpus.fingerprint == Corpus.from_documents(DOCUMENTS).fingerprint


def test_folder_of_texts_and_its_fingerprint(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.md").write_text("# Sea\n\nsalt\n")
    (tmp_path / "deep" / "b.txt").write_text("Berg")
    documents = [Document("a.md", "salt", "Sea"), Document("deep/b.txt", "Berg")]
    corpus = Corpus.load(tmp_path)
    assert list(corpus) == documents
    assert corpus.fingerprint == Corpus.from_documents(documents).fingerprint


def test_a_folder_of_texts_may_be_called_like_a_file(tmp_path):
    (tmp_path / "docs.jsonl").mkdir()
    (tmp_path / "docs.jsonl" / "a.txt").write_text("a")
    assert Corpus.load(tmp_path / "docs.jsonl").ids == ["a.txt"]


def test_standard_input(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    code = "from hce.data.corpus import Corpus; c = Corpus.load('-'); print(c.fingerprint, c.name, c.ids, c[-1].title)"
    with (tmp_path / "a.jsonl").open("rb") as file:
        result = subprocess.run(
            [sys.executable, "-X", "utf8", "-c", code], stdin=file, capture_output=True, check=True, timeout=60
        )
    expected = f"{Corpus.load(tmp_path / 'a.jsonl').fingerprint} standard input ['1', 'x/2', '3'] only a title ☃\n"
    assert result.stdout.decode() == expected


@pytest.mark.parametrize(
    "change",
    [
        lambda d: [replace(d[0], id="one"), *d[1:]],
        lambda d: [replace(d[0], title="water"), *d[1:]],
        lambda d: [replace(d[0], text="the  sea"), *d[1:]],
        lambda d: [replace(d[0], metadata={"lang": "fr"}), *d[1:]],
        lambda d: [replace(d[0], metadata={}), *d[1:]],
        lambda d: [replace(d[0], title="the sea", text="Water"), *d[1:]],
        lambda d: [replace(d[0], id="1W", title="ater"), *d[1:]],
        lambda d: d[::-1],
        lambda d: d[:2],
    ],
)
def test_fingerprint_changes_with_content_and_order(change):
    changed = Corpus.from_documents(change(DOCUMENTS))
    assert changed.fingerprint != Corpus.from_documents(DOCUMENTS).fingerprint


def test_fingerprint_is_pinned_since_files_on_disk_hold_it():
    corpus = Corpus.from_documents([Document("1", "sea", "é", {"b": "ß", "a": [1, None]})])
    assert corpus.fingerprint == "388f6378374df9386f0f3f9c49949debaca5aba9942788eac5122ec5b7de8121"


def test_fingerprint_ignores_path_blank_lines_line_ends_key_order_and_escapes(tmp_path):
    lines = ['{"_id": "1", "text": "é", "b": 1, "a": 2}', '{"_id": "2", "text": "x"}']
    one = Corpus.load(jsonl(tmp_path, *lines))
    other_path = tmp_path / "other.jsonl"
    other_path.write_bytes(
        b'\xef\xbb\xbf\r\n  \r\n{"a":2, "text":"\\u00e9", "id":1, "b":1}\r\n\r\n{"_id":"2","title":null,"text":"x"}'
    )
    other = Corpus.load(other_path)
    assert other.fingerprint == one.fingerprint
    assert list(other) == list(one)


any_text = st.text(st.characters(codec="utf-8"), max_size=30)
csv_text = any_text if sys.version_info >= (3, 11) else any_text.filter(lambda text: "\0" not in text)


def document_lists(texts, metadata):
    documents = st.builds(Document, texts.filter(bool), texts, texts, metadata).filter(lambda d: not d.is_empty)
    return st.lists(documents, min_size=1, max_size=6, unique_by=lambda d: d.id)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=6,
)
reserved = ("_id", "id", "title", "text", "metadata")
json_metadata = st.dictionaries(any_text.filter(lambda name: name not in reserved), json_values, max_size=3)


def assert_reads_back(path, documents):
    corpus = Corpus.load(path)
    assert list(corpus) == documents
    assert corpus.fingerprint == Corpus.from_documents(documents).fingerprint


@settings(max_examples=100, deadline=None)
@given(documents=document_lists(any_text, json_metadata), ascii_only=st.booleans(), nested=st.booleans())
def test_any_documents_come_back_from_jsonl(documents, ascii_only, nested):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        lines = [json.dumps(row, ensure_ascii=ascii_only) for row in rows(documents)]
        if nested:
            lines = [document.to_json() for document in documents]
        path.write_bytes("\n".join(lines).encode())
        assert_reads_back(path, documents)
        assert_reads_back(compress(path), documents)


@settings(max_examples=100, deadline=None)
@given(documents=document_lists(csv_text, st.builds(dict, extra=csv_text)))
def test_any_documents_come_back_from_csv(documents):
    with tempfile.TemporaryDirectory() as folder:
        write_csv(Path(folder) / "a.csv", documents)
        assert_reads_back(Path(folder) / "a.csv", documents)


@settings(max_examples=100, deadline=None)
@given(documents=document_lists(any_text, st.builds(dict, extra=any_text, number=st.integers(-(2**63), 2**63 - 1))))
def test_any_documents_come_back_from_parquet(documents):
    with tempfile.TemporaryDirectory() as folder:
        write_parquet(Path(folder) / "a.parquet", documents)
        assert_reads_back(Path(folder) / "a.parquet", documents)


# What a document is


def test_document_is_a_value():
    document = Document("1", "text", "title", {"a": [1]})
    assert document == Document("1", "text", "title", {"a": [1]})
    assert {document, Document("1", "text", "title", {"a": [1]})} == {document}
    assert pickle.loads(pickle.dumps(document)) == document  # noqa: S301  our own
    assert document.full_text == "title text"
    assert Document("1", " text ").full_text == "text"
    with pytest.raises(AttributeError):
        document.text = "other"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"id": 0, "text": "t"}, Document("0", "t")),
        ({"_id": -12345678901234567890, "text": "t"}, Document("-12345678901234567890", "t")),
        ({"_id": "a", "id": "b", "text": "t"}, Document("a", "t", "", {"id": "b"})),
        ({"_id": None, "id": "b", "text": "t", "title": None}, Document("b", "t")),
        ({"_id": "", "id": "b", "text": "t"}, Document("b", "t")),
        ({"id": "1", "text": "t", "metadata": None}, Document("1", "t")),
        ({"id": "1", "text": "t", "metadata": "kept"}, Document("1", "t", "", {"metadata": "kept"})),
        ({"id": "1", "text": "t", "metadata": {"a": 1}, "b": 2}, Document("1", "t", "", {"a": 1, "b": 2})),
        ({"id": "1", "text": "t", "metadata": {"text": 1}}, Document("1", "t", "", {"text": 1})),
        ({"id": "\0", "text": "a\0b"}, Document("\0", "a\0b")),
    ],
)
def test_parse_document(fields, expected):
    original = dict(fields)
    assert parse_document(Record("here", fields)) == expected
    assert fields == original


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_odd_metadata_survives(tmp_path, suffix):
    line = '{"id": "1", "text": "t", "nan": NaN, "half": "\\ud800", "metadata": {"metadata": [1]}, "deep": %s1%s}'
    path = jsonl(tmp_path, line % ("[" * 50, "]" * 50))
    metadata = Corpus.load(compress(path) if suffix.endswith("gz") else path)[0].metadata
    assert metadata["half"] == "\ud800"
    assert metadata["nan"] != metadata["nan"]
    assert metadata["metadata"] == [1]
    assert str(metadata["deep"]).count("[") == 50


def test_parquet_types_that_json_lacks_become_strings(tmp_path):
    table = pa.table(
        {"id": [7], "text": ["t"], "when": pa.array([0], pa.timestamp("s")), "gone": pa.array([None], pa.string())}
    )
    pq.write_table(table, tmp_path / "a.parquet")
    assert list(Corpus.load(tmp_path / "a.parquet")) == [
        Document("7", "t", "", {"when": "1970-01-01 00:00:00", "gone": None})
    ]


def test_a_very_long_line(tmp_path):
    text = "wörter " * 500_000
    assert Corpus.load(jsonl(tmp_path, {"id": "1", "text": text}))[0].text == text


# Bad input


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"text": "t"}, "no id (found: 'text'); give each record a field '_id' or 'id'"),
        ({"id": "", "text": "t"}, "no id (found: 'id', 'text'); give"),
        ({"id": None, "text": "t"}, "no id (found: 'id', 'text'); give"),
        ({"id": True, "text": "t"}, "the id is a bool, not a string; quote it"),
        ({"_id": 1.5, "text": "t"}, "the _id is a float, not a string; quote it"),
        ({"_id": ["1"], "text": "t"}, "the _id is a list, not a string; quote it"),
        ({"id": "9"}, "document '9' has no text (found: 'id'); name the field 'text'"),
        ({"id": "9", "body": "t", "a\nb": 1}, r"document '9' has no text (found: 'id', 'body', 'a\nb'); name"),
        ({"id": "9", "text": None, "title": "T"}, "document '9' has no text"),
        ({"id": "9", "text": 5}, "the text is a int, not a string; quote it"),
        ({"id": "9", "text": ["a"]}, "the text is a list, not a string; quote it"),
        ({"id": "9", "text": "t", "title": {}}, "the title is a dict, not a string; quote it"),
        ('{"id": "9", "text": NaN}', "the text is a float, not a string; quote it"),
        ('{"id": "9", "text": "\\ud800"}', "the text holds half a surrogate pair"),
        ('{"id": "9", "text": "t", "title": "\\udfff x"}', "the title holds half a surrogate pair"),
        ('{"id": "\\ud83d", "text": "t"}', "the id holds half a surrogate pair"),
        ("[1]", "a JSON list, not an object"),
    ],
)
def test_bad_documents_are_named_by_file_and_line(tmp_path, line, expected):
    path = jsonl(tmp_path, {"id": "1", "text": "t"}, "", line)
    assert f"{path}, line 3: {expected}" in fault(path)
    assert f"{path}.gz, line 3: {expected}" in fault(compress(path))


def test_broken_json_names_the_column(tmp_path):
    path = jsonl(tmp_path, {"id": "1", "text": "t"}, '{"id": "2", "text": "t"')
    assert f"{path}, line 2, column 24: not valid JSON (Expecting ',' delimiter)" in fault(path)


def test_not_utf8(tmp_path):
    path = tmp_path / "docs.jsonl"
    path.write_bytes(b'{"id": "1", "text": "t"}\n{"id": "2", "text": "\xe9"}\n')
    assert f"{path}, line 2: not UTF-8 (byte 0xe9 at position 22); save the file as UTF-8" in fault(path)


def test_truncated_gzip(tmp_path):
    path = jsonl(tmp_path, *({"id": i, "text": random.randbytes(50).hex()} for i in range(1000)))  # noqa: S311
    path = compress(path)
    path.write_bytes(path.read_bytes()[:-9000])
    message = fault(path)
    assert "the gzip data is cut off or damaged after line " in message
    assert 0 < int(message.split("after line ")[1].split()[0]) < 1000


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_nesting_is_either_read_or_refused_in_one_line(tmp_path, suffix):
    refused = []
    for depth in [*range(300, 1010, 3), 100_000]:
        path = jsonl(tmp_path, '{"id": "1", "text": "t", "a": ' + "[" * depth + "]" * depth + "}")
        path = compress(path) if suffix.endswith("gz") else path
        try:
            corpus = Corpus.load(path)
        except InputError as error:
            refused.append(str(error))
        else:
            assert corpus[0].id == "1"
    assert refused
    assert all(message.startswith(f"{path}, line 1: ") and "\n" not in message for message in refused)


DUPLICATES = [Document("a", "1"), Document("b", "2"), Document("c", ""), Document("d", "3"), Document("b", "4")]


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("a.jsonl", "line 2", "line 5"),
        ("a.ndjson", "line 2", "line 5"),
        ("a.csv", "line 3", "line 6"),
        ("a.tsv", "line 3", "line 6"),
        ("a.parquet", "row 2", "row 5"),
    ],
)
def test_a_duplicate_id_names_both_places(tmp_path, name, first, second):
    path = tmp_path / name
    WRITERS[name](path, DUPLICATES)
    assert fault(path) == f"{path}, {second}: id 'b' is already used at {path}, {first}; make ids unique"
    if name in ("a.jsonl", "a.csv"):
        path = compress(path)
        assert fault(path) == f"{path}, {second}: id 'b' is already used at {path}, {first}; make ids unique"


def test_duplicates_across_blank_lines_and_as_number_and_string(tmp_path):
    path = jsonl(tmp_path, "", {"id": 7, "text": "x"}, "", {"_id": "7", "text": "y"})
    assert f"{path}, line 4: id '7' is already used at {path}, line 2;" in fault(path)


def test_a_duplicate_in_standard_input():
    code = "from hce.data.corpus import Corpus; Corpus.load('-')"
    data = b'{"id": 1, "text": "a"}\n\n{"id": 1, "text": "b"}\n'
    result = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=False, timeout=60)
    assert b"standard input, line 3: id '1' is already used at standard input, line 1; make" in result.stderr


@pytest.mark.parametrize("texts", [("", "full"), ("full", ""), ("", "")])
def test_a_duplicate_among_the_left_out_is_refused_too(tmp_path, texts):
    path = jsonl(tmp_path, {"id": "z", "text": "z"}, *({"id": "a", "text": text} for text in texts))
    message = fault(path)
    assert "id 'a' is already used at" in message
    assert f"{path}, line 2" in message
    assert f"{path}, line 3" in message


def test_a_duplicate_in_memory_counts_the_left_out():
    with pytest.raises(InputError, match=r"^mine, number 5: id 'b' is already used at mine, number 2; make ids"):
        Corpus.from_documents(DUPLICATES, name="mine")


def test_equal_hashes_of_different_ids_are_no_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "hash64", lambda text: 7)
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [*DOCUMENTS, Document("empty", "")])
    assert list(Corpus.load(path)) == DOCUMENTS
    write_jsonl(path, DUPLICATES)
    assert "id 'b' is already used at" in fault(path)


@pytest.mark.parametrize(
    ("name", "data"),
    [("a.jsonl", ""), ("a.jsonl", "\n \n"), ("a.csv", ""), ("a.csv", "id,text\n"), ("a.tsv", "id\ttext\n")],
)
def test_empty_files(tmp_path, name, data):
    path = tmp_path / name
    path.write_text(data)
    assert fault(path).startswith(f"{path}: no documents with text in it; give .jsonl, .csv")
    path = compress(path)
    assert f"{path}: no documents with text in it" in fault(path)


def test_parquet_without_rows(tmp_path):
    pq.write_table(
        pa.table({"id": pa.array([], pa.string()), "text": pa.array([], pa.string())}), tmp_path / "a.parquet"
    )
    assert "no documents with text in it" in fault(tmp_path / "a.parquet")


def test_folders_without_documents(tmp_path):
    path = tmp_path / "docs.jsonl"
    path.mkdir()
    assert f"{path}: no documents with text in it" in fault(path)
    (path / "a.png").write_text("x")
    (path / ".b.txt").write_text("x")
    assert f"{path}: no documents with text in it" in fault(path)
    (path / "empty.txt").write_text("")
    assert f"{path}: no documents with text in it" in fault(path)


def test_a_beir_folder_with_an_empty_corpus_is_not_taken_for_texts(tmp_path):
    (tmp_path / "corpus.jsonl").write_text("")
    (tmp_path / "readme.md").write_text("about")
    assert f"{tmp_path / 'corpus.jsonl'}: no documents with text" in fault(tmp_path)


@pytest.mark.parametrize("name", ["docs.xml", "docs.txt", "docs"])
def test_unknown_formats(tmp_path, name):
    (tmp_path / name).write_text("x")
    assert "unknown format '" in fault(tmp_path / name)


@pytest.mark.parametrize("name", ["none.jsonl", "none", "none/such.csv", "nul\0.jsonl"])
def test_a_path_that_does_not_exist(tmp_path, name):
    with pytest.raises(InputError, match=r"no such file or folder; give \.jsonl, \.csv"):
        Corpus.load(tmp_path / name)


def test_a_path_too_long_for_the_system(tmp_path):
    with pytest.raises(InputError, match=r"cannot be read \(File name too long\); check the path"):
        Corpus.load(tmp_path / ("x" * 300))


@pytest.fixture
def unprivileged():
    """Root may read everything, so become nobody for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet", "folder"])
def test_permission_denied(tmp_path, name, request):
    path = tmp_path / name
    WRITERS[name](path, DOCUMENTS)
    path.chmod(0)
    request.getfixturevalue("unprivileged")
    with pytest.raises(InputError, match="Permission denied") as caught:
        Corpus.load(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_an_unreadable_subfolder_is_not_passed_over(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refuse(path):
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(InputError, match=r"closed: cannot be read \(Permission denied\)"):
        Corpus.load(tmp_path)


def test_metadata_in_memory_that_is_no_json():
    with pytest.raises(InputError, match="mine, number 1: the metadata cannot be written as JSON"):
        Corpus.from_documents([Document("1", "t", "", {(1, 2): "x"})], name="mine")


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (Document("", "t"), "no id"),
        (Document("1", 5), "the text is a int"),
        (Document("1", None), "document '1' has no text"),
        (Document("1", "\ud800"), "half a surrogate pair"),
    ],
)
def test_documents_in_memory_are_checked_as_files_are(document, expected):
    with pytest.raises(InputError, match=f"documents, number 2: .*{expected}"):
        Corpus.from_documents([DOCUMENTS[0], document])


def test_documents_in_memory_get_ids_as_files_do():
    assert Corpus.from_documents([Document(5, "t")]).ids == ["5"]


def test_no_documents_in_memory():
    with pytest.raises(InputError, match="documents: no documents with text"):
        Corpus.from_documents([])


# Documents with nothing in them


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_a_document_without_text_and_title_is_left_out_and_named(tmp_path, suffix, caplog):
    path = jsonl(
        tmp_path,
        {"id": "1", "text": "t"},
        {"id": "2", "text": ""},
        {"id": "3", "text": "", "title": "kept"},
        {"id": "4", "text": " \n", "title": "\t"},
    )
    path = compress(path) if suffix.endswith("gz") else path
    corpus = Corpus.load(path)
    assert corpus.ids == ["1", "3"]
    assert corpus[1].full_text == "kept"
    assert corpus.left_out == {"2", "4"}
    [warning] = caplog.records
    assert warning.levelname == "WARNING"
    assert f"left out 2 documents with neither text nor title: {path}, line 2; {path}, line 4" in warning.getMessage()


def test_many_left_out_make_one_short_warning(tmp_path, caplog):
    path = jsonl(tmp_path, {"id": "x", "text": "t"}, *({"id": i, "text": ""} for i in range(100)))
    assert len(Corpus.load(path).left_out) == 100
    [warning] = caplog.records
    assert warning.getMessage().startswith("left out 100 documents")
    assert warning.getMessage().endswith(f"{path}, line 4; …")


def test_left_out_documents_do_not_count_in_the_fingerprint(tmp_path):
    one = Corpus.load(jsonl(tmp_path, {"id": "1", "text": "t"}))
    two = Corpus.load(jsonl(tmp_path, {"id": "1", "text": "t"}, {"id": "2", "text": ""}))
    assert one.fingerprint == two.fingerprint


# Any document at any time


@pytest.fixture(params=["a.jsonl", "a.csv", "memory"])
def hundred(request, tmp_path):
    documents = [Document(str(i), f"text {i} " + "ü" * (i * 7 % 50)) for i in range(100)]
    if request.param == "memory":
        return Corpus.from_documents(documents)
    WRITERS[request.param](tmp_path / request.param, documents)
    return Corpus.load(tmp_path / request.param)


def test_random_access(hundred):
    assert len(hundred) == 100
    assert hundred[0].id == "0"
    assert hundred[99].id == hundred[-1].id == "99"
    assert hundred[-100].id == "0"
    assert hundred[np.int64(42)].text.startswith("text 42 ")
    assert [d.id for d in hundred[97:]] == ["97", "98", "99"]
    assert [d.id for d in hundred[5:1:-2]] == ["5", "3"]
    assert list(hundred[200:]) == []
    assert hundred.ids == [str(i) for i in range(100)]
    assert list(hundred.texts())[3] == hundred[3].full_text
    assert repr(hundred) == f"Corpus({hundred.name!r}, 100 documents, {hundred.fingerprint[:12]})"
    for index in (100, -101, 10**12):
        with pytest.raises(IndexError):
            hundred[index]
    with pytest.raises(TypeError):
        hundred["1"]


@pytest.mark.parametrize("has_pread", [True, False])
def test_access_from_threads(hundred, monkeypatch, has_pread):
    if not has_pread:
        monkeypatch.delattr(os, "pread")
    indices = random.Random(0).choices(range(100), k=4000)  # noqa: S311
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda i: hundred[i].id, indices)) == [str(i) for i in indices]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_access_from_forked_processes(hundred):
    code = [os.fork() or _read_in_child(hundred, seed) for seed in range(3)]
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in code] == [0, 0, 0]


def _read_in_child(corpus, seed):
    try:
        indices = random.Random(seed).choices(range(100), k=3000)  # noqa: S311
        os._exit(0 if all(corpus[i].id == str(i) for i in indices) else 1)
    except BaseException:
        os._exit(2)


@pytest.mark.parametrize("change", ["append", "same size", "truncate"])
def test_a_file_changed_after_load(tmp_path, change):
    path = tmp_path / "a.jsonl"
    write_jsonl(path, DOCUMENTS)
    corpus = Corpus.load(path)
    assert corpus[1] == DOCUMENTS[1]
    with path.open("r+b") as file:
        if change == "append":
            file.seek(0, io.SEEK_END)
            file.write(b"\n")
        elif change == "truncate":
            file.truncate(5)
        else:
            file.write(b"x")
    if change == "same size":
        os.utime(path, (1, 1))
    with pytest.raises(InputError, match=r"a\.jsonl: changed since it was read; load it again$"):
        corpus[1]
    with pytest.raises(InputError, match="changed since"):
        list(corpus)


def test_a_file_replaced_or_removed_after_load_is_still_read(tmp_path):
    path = tmp_path / "a.jsonl"
    write_jsonl(path, DOCUMENTS)
    corpus = Corpus.load(path)
    path.unlink()
    path.write_text("something else")
    assert list(corpus) == DOCUMENTS


def test_other_formats_are_copied_so_their_source_may_go(tmp_path):
    write_csv(tmp_path / "a.csv", DOCUMENTS)
    corpus = Corpus.load(tmp_path / "a.csv")
    (tmp_path / "a.csv").unlink()
    assert list(corpus) == DOCUMENTS


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_a_corpus_closes_its_file(tmp_path, name):
    WRITERS[name](tmp_path / name, DOCUMENTS)
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else pytest.skip("no /proc")  # noqa: PTH208
    for _ in range(5):
        list(Corpus.load(tmp_path / name))
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_million_lines_in_bounded_memory(tmp_path):
    """12 bytes of text a line would be some 400 MB as Python objects; 24 bytes a document are kept."""
    with (tmp_path / "docs.jsonl").open("w") as file:
        for start in range(0, 1_000_000, 1000):
            file.write("".join(f'{{"_id": "d{i}", "text": "text {i}"}}\n' for i in range(start, start + 1000)))
    code = textwrap.dedent("""
        import resource, sys
        from hce.data.corpus import Corpus
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1 if sys.platform == "linux" else 1024)
        before = peak()
        corpus = Corpus.load(sys.argv[1])
        count = sum(1 for document in corpus if document.text)
        print(len(corpus), count, corpus[-1].id, peak() - before)
    """)
    command = [sys.executable, "-c", code, str(tmp_path / "docs.jsonl")]
    result = subprocess.run(command, capture_output=True, check=True, timeout=300, text=True)
    total, count, last, kilobytes = result.stdout.split()
    assert (total, count, last) == ("1000000", "1000000", "d999999")
    assert int(kilobytes) < 150_000


@pytest.mark.parametrize("where", ["a.csv", "-"])
def test_a_full_folder_for_temporary_files_is_one_line(tmp_path, monkeypatch, where):
    class Full(io.BytesIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "a.csv").write_text("id,text\n1,star\n")
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda prefix: Full())
    path = tmp_path / "a.csv"
    with pytest.raises(
        InputError, match=r"cannot be copied there \(No space left on device\); free some space, [^\n]*TMPDIR"
    ):
        Corpus.load(path) if where != "-" else Corpus.from_records([{"id": "1", "text": "star"}])


def test_no_folder_for_temporary_files_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("id,text\n1,star\n")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(
        InputError, match=r"nowhere: the documents cannot be copied there \(No such file or directory\)"
    ):
        Corpus.load(tmp_path / "a.csv")


@pytest.mark.skipif(not hasattr(os, "pread"), reason="needs pread")
def test_a_disk_that_fails_when_a_document_is_fetched_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"_id": "1", "text": "star"}')
    corpus = Corpus.load(tmp_path / "a.jsonl")

    def failing(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", failing)
    with pytest.raises(InputError, match=r"a\.jsonl: cannot be read \(Input/output error\)"):
        corpus[0]


def nested(depth):
    return functools.reduce(lambda value, _: [value], range(depth - 1), ["x"])


@pytest.mark.parametrize("depth", [100, 400, 900, 100_000])
def test_metadata_that_is_too_deep_is_one_line(tmp_path, depth):
    (tmp_path / "a.jsonl").write_text(f'{{"_id": "1", "text": "t", "deep": {"[" * depth}{"]" * depth}}}')
    with pytest.raises(
        InputError, match=r"a\.jsonl, line 1: (the metadata is nested more than 100 deep|not valid JSON)"
    ):
        Corpus.load(tmp_path / "a.jsonl")


def test_metadata_may_be_deep():
    assert len(Corpus.from_records([{"id": "1", "text": "t", "deep": nested(99)}])) == 1
    with pytest.raises(InputError, match="nested more than 100 deep"):
        Corpus.from_records([{"id": "1", "text": "t", "deep": nested(100)}])
