"""Queries and qrels: round trips through every format, and each malformed line by its number."""

import gzip
import json
import pickle
import re
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hce.data.judgments import (
    Dataset,
    Judgment,
    Labels,
    Qrels,
    Query,
    find_split,
    read_generated,
    read_queries,
    splits,
    write_queries,
)
from hce.errors import InputError

JUDGMENTS = [Judgment("q1", "d1", 2), Judgment("q1", "d 2", 0), Judgment("q2", "d1", -1)]
BEIR = "query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\td 2\t0\nq2\td1\t-1\n"
TREC = "q1 0 d1 2\nq1 Q0 d2 0\nq2  0\td1 1\n".replace("\t", " ")


def one_line(caught, *parts):
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    for part in parts:
        assert part in message


def refuses(read, path, *parts):
    with pytest.raises(InputError) as caught:
        read(path)
    one_line(caught, str(path), *parts)


# Qrels


def test_qrels_are_a_mapping_of_grades():
    qrels = Qrels(JUDGMENTS)
    assert qrels == {"q1": {"d1": 2, "d 2": 0}, "q2": {"d1": -1}}
    assert qrels["q1"]["d1"] == 2
    assert list(qrels) == ["q1", "q2"]
    assert len(qrels) == 2
    assert list(qrels.judgments()) == JUDGMENTS
    assert qrels.positives("q1") == ["d1"]
    assert qrels.positives("q2") == qrels.positives("none") == []
    assert repr(qrels) == "Qrels(2 queries, 3 judgments)"
    with pytest.raises(KeyError):
        qrels["none"]


def test_query_is_a_value():
    query = Query("1", "what")
    assert query == Query("1", "what")
    assert {query, Query("1", "what")} == {query}
    assert pickle.loads(pickle.dumps(query)) == query  # noqa: S301  our own
    with pytest.raises(AttributeError):
        query.text = "other"


@pytest.mark.parametrize("change", [str, lambda text: "\ufeff" + text.replace("\n", "\r\n\r\n").rstrip()])
@pytest.mark.parametrize("suffix", ["tsv", "tsv.gz"])
def test_beir_and_trec_files_plain_and_compressed(tmp_path, change, suffix):
    path = tmp_path / f"qrels.{suffix}"
    for text, expected in [(BEIR, Qrels(JUDGMENTS)), (TREC, {"q1": {"d1": 2, "d2": 0}, "q2": {"d1": 1}})]:
        data = change(text).encode()
        path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
        assert Qrels.read(path) == expected


def test_beir_without_header_and_trec_with_tabs(tmp_path):
    path = tmp_path / "qrels"
    path.write_text("q1\td1\t1\nq1\t0\td2\t+2\n")
    assert Qrels.read(path) == {"q1": {"d1": 1, "d2": 2}}


def test_written_files_are_exactly_these(tmp_path):
    Qrels(JUDGMENTS).write(tmp_path / "a.tsv")
    assert (tmp_path / "a.tsv").read_text() == BEIR
    Qrels(JUDGMENTS[:1]).write(tmp_path / "a.trec", form="trec")
    assert (tmp_path / "a.trec").read_text() == "q1 0 d1 2\n"
    Qrels(JUDGMENTS).write(tmp_path / "a.tsv.gz")
    assert gzip.decompress((tmp_path / "a.tsv.gz").read_bytes()).decode() == BEIR
    write_queries(tmp_path / "q.jsonl", [Query("é", 'a "b"')])
    assert (tmp_path / "q.jsonl").read_text(encoding="utf-8") == '{"_id": "é", "text": "a \\"b\\""}\n'
    write_queries(tmp_path / "q.tsv", [Query("1", " a\tb\nc ")])
    assert (tmp_path / "q.tsv").read_text() == "1\ta b c\n"


any_text = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
judgment_lists = st.lists(
    st.builds(Judgment, any_text, any_text, st.integers(-5, 5)), min_size=1, max_size=8, unique_by=lambda j: j[:2]
)


@settings(max_examples=300, deadline=None)
@given(judgments=judgment_lists, form=st.sampled_from(["beir", "trec"]), suffix=st.sampled_from(["", ".gz"]))
def test_qrels_come_back_whole_or_are_refused_and_not_written(judgments, form, suffix):
    qrels = Qrels(judgments)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"qrels.tsv{suffix}"
        try:
            qrels.write(path, form=form)
        except InputError as error:
            assert "rename it" in str(error)
            assert any(re.search(r"\s|^\ufeff|[\x1c-\x1f]", name) for judgment in judgments for name in judgment[:2])
            assert list(Path(folder).iterdir()) == []
        else:
            assert list(Qrels.read(path).judgments()) == list(qrels.judgments())


@pytest.mark.parametrize(("form", "bad"), [("beir", ["a\tb", "a\nb", " a", "a\r", ""]), ("trec", ["a b", "\xa0", ""])])
def test_ids_that_break_columns_keep_the_old_file(tmp_path, form, bad):
    path = tmp_path / "qrels.tsv"
    for name in bad:
        for judgment in (Judgment(name, "d", 1), Judgment("q", name, 1)):
            path.write_text("old")
            with pytest.raises(InputError) as caught:
                Qrels([JUDGMENTS[0], judgment]).write(path, form=form)
            one_line(caught, repr(name), "rename it")
            assert path.read_text() == "old"
            assert [file.name for file in tmp_path.iterdir()] == ["qrels.tsv"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("q1\td1", "2 columns; write 3 (query, document, grade) or TREC's 4 (query, 0, document, grade)"),
        ("q1 0 d1 1 extra", "5 columns"),
        ("alone", "1 columns"),
        ("q1\td1\thigh", "the grade 'high' is not an integer; write 0, 1, 2"),
        ("q1\td1\t1.0", "the grade '1.0' is not an integer"),
        ("q1\td1\t1_0", "the grade '1_0' is not an integer"),
        ("q1\td1\t", "the grade '' is not an integer"),
        ("\td1\t1", "the id of the query is missing; fill it in"),
        ("q1\t \t1", "the id of the document is missing; fill it in"),
        ("q1\td1\tscore", "the grade 'score' is not an integer"),
        ("q0\td0\t2", "grade 2 for ('q0', 'd0'), but 1 at "),
    ],
)
def test_malformed_judgments(tmp_path, line, expected):
    path = tmp_path / "qrels.tsv"
    path.write_text(f"query-id\tcorpus-id\tscore\nq0\td0\t1\n\n{line}\n")
    refuses(Qrels.read, path, f"{path}, line 4: {expected}")


def test_a_contradiction_names_both_lines_and_a_repetition_is_no_fault(tmp_path):
    path = tmp_path / "qrels"
    path.write_text("q 0 d 1\nq 0 d 1\n")
    assert Qrels.read(path) == {"q": {"d": 1}}
    path.write_text("q 0 d 1\nq 0 e 1\nq 0 d 0\n")
    refuses(Qrels.read, path, f"{path}, line 3:", f"but 1 at {path}, line 1; keep one")


@pytest.mark.parametrize("text", ["", "\n\n", "query-id\tcorpus-id\tscore\n"])
def test_qrels_without_judgments(tmp_path, text):
    path = tmp_path / "qrels.tsv"
    path.write_text(text)
    refuses(Qrels.read, path, "no judgments in it; check the path")


def test_unreadable_qrels(tmp_path):
    path = tmp_path / "qrels.tsv"
    refuses(Qrels.read, path, "cannot be read (No such file or directory)")
    path.write_bytes(b"q\td\t1\nq\t\xff\t1\n")
    refuses(Qrels.read, path, f"{path}, line 2: not UTF-8 (byte 0xff at position 3)")
    packed = tmp_path / "qrels.tsv.gz"
    packed.write_bytes(gzip.compress(BEIR.encode())[:-6])
    refuses(Qrels.read, packed, "cut off or damaged after line")


def test_unknown_ids(tmp_path):
    path = tmp_path / "qrels.tsv"
    path.write_text(BEIR)
    assert len(Qrels.read(path, queries={"q1", "q2"}, documents={"d1", "d 2"})) == 2
    refuses(
        lambda p: Qrels.read(p, queries={"q1"}),
        path,
        f"{path}, line 4: query 'q2' is not among the queries; do the files match?",
    )
    refuses(
        lambda p: Qrels.read(p, documents={"d1"}),
        path,
        f"{path}, line 3: document 'd 2' is not in the corpus; do the files match?",
    )


# Queries


@pytest.mark.parametrize("name", ["q.jsonl", "q.jsonl.gz", "q.tsv", "q.tsv.gz", "Q.TSV", "q.ndjson"])
def test_queries_round_trip(tmp_path, name):
    queries = {"1": Query("1", "what is é"), "b c": Query("b c", '"quoted" word')}
    write_queries(tmp_path / name, queries.values())
    assert read_queries(tmp_path / name) == queries
    assert list(read_queries(tmp_path / name)) == ["1", "b c"]
    assert [path.name for path in tmp_path.iterdir()] == [name]


filled_text = any_text.filter(lambda text: text.strip())


@settings(max_examples=200, deadline=None)
@given(
    queries=st.lists(st.builds(Query, any_text, filled_text), min_size=1, max_size=6, unique_by=lambda query: query.id)
)
def test_any_queries_come_back_from_jsonl_and_from_tsv_but_for_white_space(queries):
    with tempfile.TemporaryDirectory() as folder:
        write_queries(Path(folder) / "q.jsonl", queries)
        assert list(read_queries(Path(folder) / "q.jsonl").values()) == queries
        path = Path(folder) / "q.tsv"
        try:
            write_queries(path, queries)
        except InputError as error:
            assert "rename it" in str(error)
            assert not path.exists()
        else:
            expected = [Query(query.id, " ".join(query.text.split())) for query in queries]
            assert list(read_queries(path).values()) == expected


def test_queries_from_tables_with_a_header(tmp_path):
    (tmp_path / "q.csv").write_text('id,text\n1,"a, b"\n')
    assert read_queries(tmp_path / "q.csv") == {"1": Query("1", "a, b")}
    pq.write_table(pa.table({"_id": [1], "text": ["a"]}), tmp_path / "q.parquet")
    assert read_queries(tmp_path / "q.parquet") == {"1": Query("1", "a")}


def test_a_query_keeps_tabs_after_the_first(tmp_path):
    (tmp_path / "q.tsv").write_text("1\ta\tb\n")
    assert read_queries(tmp_path / "q.tsv") == {"1": Query("1", "a\tb")}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "column 2: not valid JSON"),
        ('{"text": "a"}', "no id (found: 'text'); give each query a field '_id' or 'id'"),
        ('{"id": "1"}', "query '1' has no text (found: 'id'); give it a string field 'text'"),
        ('{"id": "1", "text": " "}', "query '1' has no text (found: 'id', 'text'); give it a string field 'text'"),
        ('{"id": "1", "text": 3}', "the text is a int, not a string; quote it"),
        ('{"id": false, "text": "a"}', "the id is a bool, not a string; quote it"),
        ('{"id": "1", "text": "\\ud800"}', "the text holds half a surrogate pair"),
    ],
)
def test_malformed_jsonl_queries(tmp_path, line, expected):
    path = tmp_path / "q.jsonl"
    path.write_text('{"_id": "0", "text": "a"}\n\n' + line + "\n")
    refuses(read_queries, path, f"{path}, line 3", expected)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("alone", "no tab; a line is an id, a tab and the query"),
        ("\ttext", "no id"),
        ("1\t ", "query '1' has no text"),
    ],
)
def test_malformed_tsv_queries(tmp_path, line, expected):
    path = tmp_path / "q.tsv"
    path.write_text(f"0\ta\n\n{line}\n")
    refuses(read_queries, path, f"{path}, line 3: {expected}")


@pytest.mark.parametrize(("name", "lines"), [("q.tsv", "1\ta\n\n1\ta\n"), ("q.jsonl", '{"id":1,"text":"a"}\n\n' * 2)])
def test_a_duplicate_query_names_both_lines(tmp_path, name, lines):
    path = tmp_path / name
    path.write_text(lines)
    refuses(read_queries, path, f"{path}, line 3: query id '1' is already used at {path}, line 1; make ids unique")


def test_no_queries_and_unknown_formats(tmp_path):
    (tmp_path / "q.jsonl").write_text("\n")
    refuses(read_queries, tmp_path / "q.jsonl", "no queries in it; check the path")
    refuses(read_queries, tmp_path / "q.xml", "unknown format '.xml'")
    refuses(read_queries, tmp_path / "none.tsv", "cannot be read (No such file or directory)")
    refuses(
        lambda path: write_queries(path, [Query("1", "a")]), tmp_path / "q.csv", "written as .jsonl or .tsv; choose"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["q.jsonl"]


def test_a_failing_write_of_queries_keeps_the_old_file(tmp_path):
    path = tmp_path / "q.tsv.gz"
    path.write_bytes(b"old")
    with pytest.raises(InputError, match=r"id 'a\\tb' is empty or holds white space"):
        write_queries(path, [Query("1", "fine"), Query("a\tb", "x")])
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["q.tsv.gz"]


# BEIR folders


@pytest.fixture
def beir(tmp_path):
    folder = tmp_path / "beir"
    (folder / "qrels").mkdir(parents=True)
    documents = [{"_id": "d1", "title": "T", "text": "sea"}, {"_id": "d2", "text": ""}, {"_id": "d3", "text": "x"}]
    queries = [{"_id": "q1", "text": "a", "metadata": {}}, {"_id": "q2", "text": "b"}]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, documents)))
    (folder / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\td2\t1\n")
    return folder


def test_dataset_keeps_judged_queries_and_accepts_judgments_of_left_out_documents(beir):
    dataset = Dataset.load(beir)
    assert dataset.corpus.ids == ["d1", "d3"]
    assert dataset.corpus.left_out == {"d2"}
    assert dataset.queries == {"q1": Query("q1", "a")}
    assert dataset.qrels == {"q1": {"d1": 1, "d2": 1}}


def test_dataset_of_compressed_files(beir):
    for path in [*beir.glob("*.jsonl"), beir / "qrels" / "test.tsv"]:
        Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert Dataset.load(beir, "test").qrels == {"q1": {"d1": 1, "d2": 1}}


@pytest.mark.parametrize(
    ("line", "expected"),
    [("q1\td9\t1", "document 'd9' is not in the corpus"), ("q9\td1\t1", "query 'q9' is not among the queries")],
)
def test_dataset_refuses_unknown_ids(beir, line, expected):
    path = beir / "qrels" / "test.tsv"
    path.write_text(path.read_text() + line + "\n")
    refuses(Dataset.load, beir, f"{path}, line 4: {expected}; do the files match?")


def test_missing_parts_of_a_dataset(beir, tmp_path):
    refuses(Dataset.load, tmp_path / "none", "no such folder; give one that holds corpus.jsonl")
    (beir / "qrels" / "dev.tsv.gz").write_bytes(b"")
    refuses(
        lambda path: Dataset.load(path, "train"),
        beir,
        "no split 'train' (qrels/train.tsv); choose one of these: dev, test",
    )
    (beir / "queries.jsonl").unlink()
    refuses(Dataset.load, beir, "no queries.jsonl; a BEIR folder holds corpus.jsonl, queries.jsonl and qrels/")
    (beir / "corpus.jsonl").unlink()
    refuses(Dataset.load, beir, "no documents with text in it")


def test_splits_are_the_tsv_files_by_their_whole_name(beir):
    for name in ["dev.v2.tsv", "train.tsv.gz", "train.tsv", ".old.tsv", ".test.tsv.1a2b.partial", "x.tsv.bak", "y.txt"]:
        (beir / "qrels" / name).write_text("")
    assert splits(beir) == ["dev.v2", "test", "train"]
    assert find_split(beir, "dev.v2") == beir / "qrels" / "dev.v2.tsv"
    assert find_split(beir, "train") == beir / "qrels" / "train.tsv"


# Labels


@pytest.fixture
def labels():
    """Three queries, of which two are judged."""
    queries = {f"q{i}": Query(f"q{i}", f"text {i}") for i in (1, 2, 3)}
    return Labels(queries, Qrels(JUDGMENTS))


def test_some_labels_and_all_but_some(labels):
    assert labels.only(["q2"]) == ({"q2": Query("q2", "text 2")}, {"q2": {"d1": -1}})
    assert list(labels.only(["q2", "q1"]).qrels) == ["q2", "q1"]
    assert labels.without({"q1": "whatever"}) == labels.only(["q2"])
    assert labels.without([]) == labels.only(["q1", "q2"])
    assert labels.without(labels.qrels) == ({}, {})


def test_labels_are_joined(labels):
    assert labels.only(["q1"]).joined(labels.only(["q2"])) == labels.only(["q1", "q2"])


def test_the_digest_is_of_judgments_and_texts(labels):
    queries, qrels = labels
    assert labels.digest == Labels({**queries, "q3": Query("q3", "never judged")}, qrels).digest
    others = [
        labels.only(["q1"]),
        Labels({**queries, "q1": Query("q1", "another text")}, qrels),
        Labels(queries, Qrels([Judgment("q1", "d1", 1), *JUDGMENTS[1:]])),
        Labels(queries, Qrels([Judgment("q1", "d3", 2), *JUDGMENTS[1:]])),
    ]
    assert len({labels.digest, *(other.digest for other in others)}) == 5


def test_generated_queries_from_a_file(tmp_path):
    path = tmp_path / "generated.jsonl"
    rows = [{"document": "d1", "query": "what is one"}, {"_id": "d1", "text": "one again"}, {"id": 2, "query": "two"}]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    queries, qrels = labels = read_generated(path)
    assert isinstance(labels, Labels)
    assert [query.text for query in queries.values()] == ["what is one", "one again", "two"]
    assert [next(iter(qrels[name])) for name in queries] == ["d1", "d1", "2"]
    path.write_text('{"document": "d1"}')
    with pytest.raises(InputError, match="line 1: a generated query needs"):
        read_generated(path)
