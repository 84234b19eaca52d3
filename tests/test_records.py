"""Every format to the same fields, and every broken file to one sentence with its place."""

import csv
import gzip
import io
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hce.data import records
from hce.data.corpus import Corpus
from hce.data.judgments import Qrels, read_generated, read_queries
from hce.data.records import STDIN, decode_line, format_suffix, read_lines, read_records
from hce.data.text_files import read_text_folder
from hce.errors import HceError, InputError, MissingPackageError
from hce.evaluation.runs import read_run

ROWS = [{"id": "1", "text": "sea ☃"}, {"id": "2", "text": 'a "quoted" word'}]
JSONL = '{"id": "1", "text": "sea ☃"}\n{"id": "2", "text": "a \\"quoted\\" word"}\n'
CSV = 'id,text\n1,sea ☃\n2,"a ""quoted"" word"\n'
TSV = 'id\ttext\n1\tsea ☃\n2\ta "quoted" word\n'
TEXT_FORMATS = {"jsonl": JSONL, "ndjson": JSONL, "csv": CSV, "tsv": TSV}

any_text = st.text(st.characters(codec="utf-8"))
if sys.version_info < (3, 11):  # csv could not read NUL before
    any_text = st.text(st.characters(codec="utf-8", exclude_characters="\0"))


def fault(path, exception=InputError):
    """The one line that reading `path` to its end raises."""
    with pytest.raises(exception) as caught:
        list(read_records(path))
    message = str(caught.value)
    assert isinstance(caught.value, HceError)
    assert len(message.splitlines()) == 1
    assert str(path) in message
    return message


def fields(path):
    return [record.fields for record in read_records(path)]


def places(path):
    return [record.where for record in read_records(path)]


@pytest.mark.parametrize("suffix", TEXT_FORMATS)
@pytest.mark.parametrize("compressed", [False, True])
def test_text_formats_plain_and_compressed(tmp_path, suffix, compressed):
    path = tmp_path / f"docs.{suffix}{'.gz' if compressed else ''}"
    data = TEXT_FORMATS[suffix].encode()
    path.write_bytes(gzip.compress(data) if compressed else data)
    assert fields(path) == ROWS
    first = 1 if "json" in suffix else 2
    assert places(path) == [f"{path}, line {first}", f"{path}, line {first + 1}"]


@pytest.mark.parametrize("suffix", TEXT_FORMATS)
def test_windows_files_with_byte_order_mark_blank_lines_and_no_last_line_break(tmp_path, suffix):
    path = tmp_path / f"docs.{suffix}"
    text = TEXT_FORMATS[suffix].replace("\n", "\r\n\r\n").rstrip("\r\n")
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert fields(path) == ROWS
    first = 1 if "json" in suffix else 3
    assert places(path) == [f"{path}, line {first}", f"{path}, line {first + 2}"]


@pytest.mark.parametrize("name", ["DOCS.JSONL", "docs.JsonL.GZ"])
def test_suffixes_in_upper_case(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(JSONL.encode()) if name.endswith("GZ") else JSONL.encode())
    assert fields(path) == ROWS


def test_byte_order_mark_before_a_quoted_header_and_inside_a_cell(tmp_path):
    path = tmp_path / "docs.csv"
    path.write_bytes('\ufeff"id","text"\n\ufeff1,"a\n\ufeffb"\n'.encode())
    assert fields(path) == [{"id": "\ufeff1", "text": "a\n\ufeffb"}]


def test_byte_order_marks_inside_joined_jsonl_files(tmp_path):
    path = tmp_path / "docs.jsonl"
    path.write_bytes('\ufeff{"id": "1"}\n\ufeff{"id": "2"}\n'.encode())
    assert fields(path) == [{"id": "1"}, {"id": "2"}]


def test_parquet_names_rows_across_batches(tmp_path):
    path = tmp_path / "docs.parquet"
    pq.write_table(pa.table({"id": range(2500), "text": ["t"] * 2500}), path)
    records = list(read_records(path))
    assert records[0] == (f"{path}, row 1", {"id": 0, "text": "t"})
    assert records[2499] == (f"{path}, row 2500", {"id": 2499, "text": "t"})


def test_csv_keeps_line_breaks_in_quotes_and_names_the_first_line_of_each_row(tmp_path):
    path = tmp_path / "docs.csv"
    path.write_bytes(b'id,text\r\n1,"one\r\ntwo\nthree\r"\r\n2,last\r\n')
    assert fields(path) == [{"id": "1", "text": "one\r\ntwo\nthree\r"}, {"id": "2", "text": "last"}]
    assert places(path) == [f"{path}, line 2", f"{path}, line 5"]


def test_tsv_takes_quotes_and_carriage_returns_as_they_are(tmp_path):
    path = tmp_path / "docs.tsv"
    path.write_bytes(b'id\ttext\n1\t"open\n2\ta\rb\n')
    assert fields(path) == [{"id": "1", "text": '"open'}, {"id": "2", "text": "a\rb"}]


def test_a_cell_longer_than_the_csv_default_limit(tmp_path):
    path = tmp_path / "docs.csv"
    path.write_text("id,text\n1," + "x" * 300_000 + "\n")
    assert len(fields(path)[0]["text"]) == 300_000


@settings(max_examples=80, deadline=None)
@given(rows=st.lists(st.tuples(any_text, any_text), min_size=1, max_size=5))
def test_whatever_the_csv_writer_writes_is_read_back(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("csv") / "docs.csv"
    buffer = io.StringIO(newline="")
    csv.writer(buffer).writerows([("id", "text"), *rows])
    path.write_bytes(buffer.getvalue().encode())
    assert [tuple(row.values()) for row in fields(path)] == rows


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"id": 1}\n{"id": \n', "line 2, column 8: not valid JSON (Expecting value)"),
        (b'{"id": 1}\n\nnull\n', "line 3: a JSON NoneType, not an object"),
        (b'[{"id": 1}]\n', "line 1: a JSON list, not an object"),
        (b'{"id": 1}\n"x"\n', "line 2: a JSON str, not an object"),
        (b'{"id": 1}\n{"a": "\x00"}\n', "line 2, column 8: not valid JSON (Invalid control character at)"),
        (b"[" * 200_000 + b"\n", "line 1: not valid JSON (too deep or too long)"),
        (b'{"id": ' + b"9" * 5000 + b"}\n", "line 1: not valid JSON (too deep or too long)"),
        (b'{"id": 1}\n{"a": "\xe9t\xe9"}\n', "line 2: not UTF-8 (byte 0xe9 at position 8); save the file as UTF-8"),
        ('{"id": "1"}\n'.encode("utf-16"), "line 1: not UTF-8 (byte 0xff at position 1)"),
    ],
)
def test_broken_jsonl(tmp_path, data, expected):
    if sys.version_info < (3, 10, 7) and b"9" * 5000 in data:
        pytest.skip("this Python reads integers of any length")
    path = tmp_path / "docs.jsonl"
    path.write_bytes(data)
    assert f"{path}, {expected}" in fault(path)


@pytest.mark.parametrize(
    ("suffix", "data", "expected"),
    [
        ("csv", b"id,text\n1,a\n\n2\n", "line 4: the row has 1 cells, the header 2; quote a cell that holds a comma"),
        ("csv", b"id,text\n1,a,b\n", "line 2: the row has 3 cells, the header 2; quote a cell that holds a comma"),
        ("csv", b'id,text\n1,"x\ny"\n2,b,c\n', "line 4: the row has 3 cells, the header 2"),
        (
            "csv",
            b'id,text\n1,a\n2,"open\n3,b\n4,c\n',
            "line 3: not valid CSV (unexpected end of data); check the quotes",
        ),
        ("csv", b'id,text\n1,"a"b\n', "line 2: not valid CSV (',' expected after '\"'); check the quotes"),
        (
            "csv",
            b"id,text,text\n1,a,b\n",
            "line 1: a column name occurs twice in ['id', 'text', 'text']; rename one",
        ),
        ("csv", b'id,text\n1,"a\n\xff"\n', "line 3: not UTF-8 (byte 0xff at position 1)"),
        ("tsv", b"id\ttext\n1\ta\tb\n", "line 2: the row has 3 cells, the header 2; a cell cannot hold a tab"),
        ("tsv", b"id\ttext\n\n1\n", "line 3: the row has 1 cells, the header 2; a cell cannot hold a tab"),
    ],
)
def test_broken_tables(tmp_path, suffix, data, expected):
    path = tmp_path / f"docs.{suffix}"
    path.write_bytes(data)
    assert f"{path}, {expected}" in fault(path)


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
@pytest.mark.parametrize("data", ["", "id,text\n"])
def test_tables_without_rows_have_no_records(tmp_path, suffix, data):
    path = tmp_path / f"docs.{suffix}"
    path.write_text(data)
    assert fields(path) == []


@pytest.mark.parametrize("suffix", TEXT_FORMATS)
def test_truncated_gzip(tmp_path, suffix):
    path = tmp_path / f"docs.{suffix}.gz"
    path.write_bytes(gzip.compress(os.urandom(50_000).hex().encode() + b"\n")[:-20_000])
    message = fault(path)
    assert "the gzip data is cut off or damaged after line 0" in message
    assert message.endswith("copy the file again")


def test_gzip_cut_after_readable_lines_tells_how_far_it_came(tmp_path):
    path = tmp_path / "docs.jsonl.gz"
    path.write_bytes(gzip.compress(JSONL.encode())[:-4])
    assert "damaged after line 2" in fault(path)


def test_what_is_no_gzip_at_all(tmp_path):
    path = tmp_path / "docs.jsonl.gz"
    path.write_text(JSONL)
    assert "cut off or damaged after line 0 (Not a gzipped file" in fault(path)


def test_gzip_with_a_wrong_checksum(tmp_path):
    path = tmp_path / "docs.jsonl.gz"
    data = bytearray(gzip.compress(JSONL.encode()))
    data[-8] ^= 1
    path.write_bytes(data)
    assert "damaged after line" in fault(path)


@pytest.mark.parametrize("data", [b"", b"PAR1", b"not parquet at all, however long it may be"])
def test_what_is_no_parquet(tmp_path, data):
    path = tmp_path / "docs.parquet"
    path.write_bytes(data)
    assert f"{path}: not a readable Parquet file (" in fault(path)


def test_damaged_parquet_pages(tmp_path):
    path = tmp_path / "docs.parquet"
    table = pa.table({"id": [str(i) for i in range(999)]})
    pq.write_table(table, path, compression="gzip", use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[60:400] = bytes(340)
    path.write_bytes(data)
    assert "not a readable Parquet file (" in fault(path)


def test_a_missing_parquet_file(tmp_path):
    assert "No such file" in fault(tmp_path / "none.parquet")


def test_parquet_without_pyarrow_gives_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    message = fault(tmp_path / "docs.parquet", MissingPackageError)
    assert "pip install 'hierarchical-corpus-encoder[parquet]'" in message


@pytest.mark.parametrize(
    ("name", "suffix"), [("docs.xml", ".xml"), ("docs", "no suffix"), ("a.gz", "no suffix"), ("a.pdf.gz", ".pdf")]
)
def test_unknown_format(tmp_path, name, suffix):
    message = fault(tmp_path / name)
    assert f"unknown format '{suffix}'; give .jsonl, .csv, .tsv, .parquet" in message


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "tsv", "jsonl.gz"])
def test_missing_file_and_folder_in_its_place(tmp_path, suffix):
    path = tmp_path / f"docs.{suffix}"
    assert f"{path}: cannot be read (No such file or directory); check the path" in fault(path)
    path.mkdir()
    assert f"{path}: cannot be read (Is a directory)" in fault(path)


def test_format_suffix_looks_through_gz():
    assert format_suffix("a/b.tsv.gz") == ".tsv"
    assert format_suffix("a.b/c.JSONL") == ".jsonl"
    assert format_suffix("a.gz/c") == ""


def test_lines_tell_their_size_on_disk(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffé\r\nb".encode())
    assert list(read_lines(path)) == [(f"{path}, line 1", "é", 7), (f"{path}, line 2", "b", 1)]
    assert decode_line(b"x\r\n", "here") == "x"


def test_reading_streams_and_stops_at_the_first_fault(tmp_path):
    path = tmp_path / "docs.jsonl"
    path.write_bytes(JSONL.encode() + b"broken\n" + b"\xff\n")
    records = read_records(path)
    assert [next(records).fields, next(records).fields] == ROWS
    with pytest.raises(InputError, match="line 3, column 1: not valid JSON"):
        next(records)


def test_text_folder_is_read_deep_sorted_and_without_hidden_files(tmp_path):
    for name in ["b.txt", "a.md", "deep/er/c.TXT", "deep/d.txt", ".hidden.txt", ".git/e.txt", "f.png", "g.txt.gz"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = f"text of\r\n{name}\n".encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    records = list(read_text_folder(tmp_path))
    assert [record.fields["id"] for record in records] == ["a.md", "b.txt", "g.txt.gz", "deep/d.txt", "deep/er/c.TXT"]
    assert records[0] == (str(tmp_path / "a.md"), {"id": "a.md", "text": "text of\na.md"})
    assert records[2].fields["text"] == "text of\ng.txt.gz"


def test_symlink_loops_in_a_text_folder_end(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert [record.fields["id"] for record in read_text_folder(tmp_path)] == ["a.txt"]


def test_a_symlink_to_itself_is_refused_by_name(tmp_path):
    (tmp_path / "a.txt").symlink_to(tmp_path / "a.txt")
    with pytest.raises(InputError, match=r"a\.txt: cannot be read \(Too many levels of symbolic links\)"):
        list(read_text_folder(tmp_path))


def test_text_folder_names_file_and_line_that_is_not_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"fine\n\xe9\n")
    with pytest.raises(InputError, match=r"a\.txt, line 2: not UTF-8 \(byte 0xe9"):
        list(read_text_folder(tmp_path))


def test_a_folder_that_vanished_is_refused_not_empty(tmp_path):
    with pytest.raises(InputError, match=r"gone: cannot be read \(No such file or directory\)"):
        list(read_text_folder(tmp_path / "gone"))


def from_stdin(data, code):
    command = [sys.executable, "-c", "from hce.data.records import read_records\n" + code]
    return subprocess.run(command, input=data, capture_output=True, timeout=60, check=False)


def test_standard_input_is_jsonl_and_stays_open():
    code = "import os\nfor r in read_records('-'): print(r.where, r.fields['id'])\nprint(os.fstat(0) is not None)"
    result = from_stdin(JSONL.encode(), code)
    assert result.stdout.decode().split("\n") == ["standard input, line 1 1", "standard input, line 2 2", "True", ""]


def test_faults_of_standard_input_are_named():
    result = from_stdin(b'{"id": 1}\n{', "list(read_records('-'))")
    assert b"standard input, line 2, column 2: not valid JSON" in result.stderr


def test_closed_standard_input():
    result = from_stdin(b"", "import os\nos.close(0)\nlist(read_records('-'))")
    assert b"InputError: standard input: cannot be read (Bad file descriptor)" in result.stderr


def test_standard_input_by_descriptor(tmp_path):
    path = tmp_path / "docs.jsonl"
    path.write_text(JSONL)
    saved = os.dup(0)
    try:
        with path.open("rb") as file:
            os.dup2(file.fileno(), 0)
            assert fields(STDIN) == ROWS
    finally:
        os.dup2(saved, 0)
        os.close(saved)


# ----------------------------------------------------------------------------------------- what is no file, or no end

needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
FORMATS = ("a.jsonl", "a.csv", "a.tsv", "a.parquet", "a.jsonl.gz")


@needs_pipes
@pytest.mark.parametrize("name", FORMATS)
def test_a_pipe_or_a_device_is_refused_at_once(tmp_path, name):
    os.mkfifo(tmp_path / name)  # opening it would wait for a writer that never comes
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / name).symlink_to("/dev/zero")
    for path in (tmp_path / name, tmp_path / "device" / name):
        with pytest.raises(InputError, match=f"{name}: is a pipe or a device, not a file; to read it, give -"):
            list(read_records(path))
        with pytest.raises(InputError, match="is a pipe or a device"):
            Corpus.load(path)


@needs_pipes
def test_a_pipe_among_texts_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(InputError, match=r"a\.txt: is a pipe or a device"):
        list(read_text_folder(tmp_path))


@needs_pipes
def test_pipes_in_the_place_of_queries_judgments_and_runs(tmp_path):
    os.mkfifo(tmp_path / "pipe.tsv")
    for read in (read_queries, Qrels.read, read_run, read_generated):
        with pytest.raises(InputError, match="is a pipe or a device"):
            read(tmp_path / "pipe.tsv")


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that cannot be read")
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.jsonl.gz", "folder/a.txt"])
def test_a_disk_that_fails_while_reading_is_one_line(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / name).symlink_to("/proc/self/mem")  # whose first byte gives EIO
    with pytest.raises(InputError, match=r"^[^\n]*a\.\w+[^\n]*Input/output error[^\n]*$"):
        list(read_lines(tmp_path / name) if "folder" in name else read_records(tmp_path / name))


def test_a_line_without_an_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "LONGEST_RECORD", 2_000_000)
    bomb = tmp_path / "bomb.jsonl.gz"
    with gzip.open(bomb, "wb") as file:
        file.write(b'{"_id": "a", "text": "short"}\n')
        for _ in range(100):
            file.write(b" " * 1_000_000)
    assert bomb.stat().st_size < 200_000
    tracemalloc.start()
    with pytest.raises(InputError, match=r"bomb\.jsonl\.gz, line 2: longer than 2 MB; split it, or check"):
        list(read_records(bomb))
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()


@pytest.mark.parametrize("cell", ['\n","', "word\n"])
def test_a_csv_row_without_an_end_is_refused(tmp_path, monkeypatch, cell):
    monkeypatch.setattr(records, "LONGEST_RECORD", 1_000_000)
    (tmp_path / "a.csv").write_text('id,text\n1,"' + cell * 400_000)
    with pytest.raises(InputError, match=r"a\.csv, line \d+: longer than 1 MB"):
        list(read_records(tmp_path / "a.csv"))


def test_long_csv_files_of_short_rows_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "LONGEST_RECORD", 1000)
    (tmp_path / "a.csv").write_text("id,text\n" + "".join(f'{i},"a\nb"\n' for i in range(500)))
    assert len(list(read_records(tmp_path / "a.csv"))) == 500


def test_a_text_without_an_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "LONGEST_RECORD", 1_000_000)
    with gzip.open(tmp_path / "bomb.txt.gz", "wb") as file:
        file.write(b"line\n" * 400_000)
    with pytest.raises(InputError, match=r"bomb\.txt\.gz: longer than 1 MB"):
        list(read_text_folder(tmp_path))


def test_links_out_of_a_folder_are_left_out_with_a_warning(tmp_path, caplog):
    secret, folder = tmp_path / "secret.txt", tmp_path / "texts"
    secret.write_text("secret")
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("star")
    (folder / "deep" / "out.txt").symlink_to(secret)
    (folder / "deep" / "up.txt").symlink_to("../../secret.txt")
    (folder / "gone.txt").symlink_to(tmp_path / "nowhere.txt")
    (folder / "in.txt").symlink_to("a.txt")
    with caplog.at_level("WARNING"):
        found = list(read_text_folder(folder))
    assert [(record.fields["id"], record.fields["text"]) for record in found] == [("a.txt", "star"), ("in.txt", "star")]
    assert f"left out 3 links that lead out of {folder}" in caplog.text


def test_a_folder_that_is_itself_a_link_is_read(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("star")
    (tmp_path / "link").symlink_to("texts")
    assert [record.fields["text"] for record in read_text_folder(tmp_path / "link")] == ["star"]


def test_a_parquet_row_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    """A small file may hold one long text a thousand times; a row has the limit that a line has."""
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), pa.array(["star w1 " * 1000]))
    ids = pa.array([str(number) for number in range(1000)])
    pq.write_table(pa.table({"id": ids, "text": text}), tmp_path / "bomb.parquet")
    assert sum(1 for _ in read_records(tmp_path / "bomb.parquet")) == 1000
    monkeypatch.setattr("hce.data.records.LONGEST_RECORD", 5000)
    with pytest.raises(InputError, match=r"bomb\.parquet, row 1: longer than"):
        list(read_records(tmp_path / "bomb.parquet"))
