"""The store: numbers, transactions, sharing, filters, and what it says when SQLite refuses."""

from __future__ import annotations

import gc
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hce.data.text import Document
from hce.errors import FormatError, HceError, InputError, WriterBusyError
from hce.files import new_folder
from hce.index import store as store_module
from hce.index.derived import SharedLock
from hce.index.filters import parse_clauses
from hce.index.store import Store

DIM = 4


def vectors(count: int, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def documents(*ids: str) -> list[Document]:
    return [Document(doc_id, f"text of {doc_id}", metadata={"name": doc_id}) for doc_id in ids]


@pytest.fixture
def store(tmp_path):
    made = Store.create(tmp_path, DIM)
    yield made
    made.close()


def add(store: Store, *ids: str) -> None:
    with store.writing() as writer:
        writer.insert(documents(*ids), vectors(len(ids)))


def remove(store: Store, *ids: str) -> None:
    with store.writing() as writer:
        writer.delete([number for number, _ in writer.present(ids).values()])


def contents(store: Store) -> list[tuple[int, str]]:
    with store.reading() as reader:
        return [(entry.number, entry.document.id) for entry in reader.entries()]


def test_numbers_rise_and_are_never_given_again(store, tmp_path):
    add(store, "a", "b", "c")
    remove(store, "c")  # the highest: SQLite without AUTOINCREMENT would give its number again
    add(store, "c")
    remove(store, "a", "b", "c")
    store.close()
    store = Store(tmp_path, DIM)
    add(store, "a")
    assert contents(store) == [(5, "a")]
    with store.reading() as reader:
        moment = reader.moment()
        assert (moment.change, moment.documents, moment.last) == (5, 1, 5)
        assert sorted(reader.removed_since(0).tolist()) == [1, 2, 3, 4]
        assert sorted(reader.removed_since(2).tolist()) == [1, 2, 4]
        assert reader.removed_up_to(3) == 3
        assert reader.moment_at(moment.change, moment.token) == moment
        assert reader.moment_at(moment.change, "another store's") is None
    store.close()


def test_what_goes_in_comes_out(store):
    awkward = [
        Document("nul\x00id", "a\x00b", "tïtle", {"x": [1, 2.5, None, True], "deep": {"ü": '"quoted"'}}),
        Document("'; DROP TABLE documents; --", "\n\t ", "t", {"half a pair": "\ud800"}),
        Document("nan", "z", "", {"score": float("nan"), "many": [float("inf"), 1.0]}),
    ]
    rows = vectors(3)
    with store.writing() as writer:
        writer.insert(awkward, rows)
    with store.reading() as reader:
        for number, (document, row) in enumerate(zip(awkward[:2], rows, strict=False), start=1):
            assert reader.find(document.id) == document
            assert reader.documents([number]) == {number: document}
            np.testing.assert_array_equal(list(reader.entries())[number - 1].vector, row)
        assert reader.find("nan").metadata == {"score": None, "many": [None, 1.0]}  # JSON has no NaN
        assert reader.find("nowhere") is None
        numbers, matrix = reader.vectors(after=1)
        assert numbers.tolist() == [2, 3]
        np.testing.assert_array_equal(matrix, rows[1:])


def test_an_error_leaves_nothing(store):
    add(store, "a")
    with pytest.raises(RuntimeError), store.writing() as writer:
        writer.insert(documents("b"), vectors(1))
        writer.delete([1])
        raise RuntimeError
    assert contents(store) == [(1, "a")]
    with pytest.raises(InputError, match="id 'a' comes twice"):
        add(store, "x", "y", "a")
    with pytest.raises(InputError, match="id 'y' comes twice"):
        add(store, "x", "y", "y")
    with pytest.raises(InputError, match="metadata of 'c' cannot be written as JSON"), store.writing() as writer:
        writer.insert([Document("c", "t", metadata={("a", "tuple"): 1})], vectors(1))
    assert contents(store) == [(1, "a")]
    add(store, "b")
    assert contents(store) == [(1, "a"), (2, "b")]  # a number that was rolled back was never given


def test_a_reader_sees_one_moment(store):
    add(store, "a")
    with store.reading() as reader:
        before = reader.moment()
        add(store, "b")
        remove(store, "a")
        assert reader.moment() == before
        assert [entry.document.id for entry in reader.entries()] == ["a"]
    assert contents(store) == [(2, "b")]


def test_a_second_writer_waits_and_then_is_told(store, tmp_path):
    other = Store(tmp_path, DIM)
    with store.writing():
        start = time.monotonic()
        with pytest.raises(InputError, match="another process is writing to this index; try again"), other.writing(0.2):
            pass
        assert 0.15 < time.monotonic() - start < 5
        with other._lend() as connection:  # which is as patient again as it was
            assert connection.execute("PRAGMA busy_timeout").fetchone() == (5000,)
    holding = threading.Event()

    def hold() -> None:
        with store.writing() as writer:
            writer.insert(documents("first"), vectors(1))
            holding.set()
            time.sleep(0.2)

    thread = threading.Thread(target=hold)
    thread.start()
    holding.wait()
    add(other, "second")  # waits for the first, and then goes on
    thread.join()
    assert [doc_id for _, doc_id in contents(other)] == ["first", "second"]
    other.close()


def test_many_threads(store):
    add(store, "a")
    failures = []

    def work(name: str) -> None:
        try:
            for round_ in range(5):
                add(store, f"{name}{round_}")
                with store.reading() as reader:
                    assert reader.moment().documents == len(list(reader.entries()))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in "stuvw"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [number for number, _ in contents(store)] == list(range(1, 27))


def test_equal_texts_are_found_and_equal_keys_of_other_texts_are_not(store, monkeypatch):
    rows = vectors(2)
    with store.writing() as writer:
        writer.insert([Document("a", "one two"), Document("b", "two", "one")], rows)
    with store.reading() as reader:
        found = reader.vectors_of(["one two", "three"])
        assert list(found) == ["one two"]
        assert found["one two"].tolist() in rows.tolist()
    monkeypatch.setattr("hce.index.tables.hash64", lambda text, signed: 7)
    with store.writing() as writer:
        writer.insert([Document("c", "three")], rows[:1])
    with store.reading() as reader:
        assert reader.vectors_of(["four"]) == {}
        assert list(reader.vectors_of(["three"])) == ["three"]


def test_a_changed_title_keeps_number_and_vector(store):
    add(store, "a", "b")
    with store.writing() as writer:
        writer.replace([Document("a", "a", "text of", {"new": 1})])
    with store.reading() as reader:
        first = next(reader.entries())
        assert (first.number, first.document.title, first.document.metadata) == (1, "text of", {"new": 1})
        assert reader.moment().change == 2


# ------------------------------------------------------------------------------------------------- filters

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 12),
    st.sampled_from([0.5, 2.5, -1.0]),
    st.sampled_from(["a", "b", "10", "9", "2.5", "x9", ""]),
)
FIELDS = st.sampled_from(["x", "a.b[0] ключ"])
METADATA = st.dictionaries(FIELDS, st.one_of(VALUES, st.lists(VALUES, max_size=3), st.just({"nested": 1})))
NUMBER = st.one_of(st.integers(-3, 12), st.sampled_from([0.5, 2.5]))
RANGES = st.one_of(
    st.dictionaries(st.sampled_from(["gt", "gte", "lt", "lte"]), NUMBER, min_size=1),
    st.dictionaries(st.sampled_from(["gt", "gte", "lt", "lte"]), st.sampled_from(["", "a", "b", "10"]), min_size=1),
)
EXCLUSIONS = st.builds(lambda value, ends: {"ne": value, **ends}, VALUES | st.lists(VALUES), st.just({}) | RANGES)
FILTERS = st.dictionaries(
    st.one_of(FIELDS, st.just("x.nested")), st.one_of(VALUES, st.lists(VALUES, max_size=3), RANGES, EXCLUSIONS)
)
OPERATORS = {
    "gt": lambda value, end: value > end,
    "gte": lambda value, end: value >= end,
    "lt": lambda value, end: value < end,
    "lte": lambda value, end: value <= end,
}


def fits(metadata: dict, conditions: dict) -> bool:
    """The filter's meaning, in plain Python."""
    return all(_is_so(_looked_up(metadata, field), wanted) for field, wanted in conditions.items())


def _looked_up(metadata: dict, field: str):
    outer = metadata.get("x")
    return outer.get("nested") if field == "x.nested" and isinstance(outer, dict) else metadata.get(field)


def _is_so(value, wanted) -> bool:
    if not isinstance(wanted, dict) or "ne" not in wanted:
        return _fits(value, wanted)
    ends = {name: end for name, end in wanted.items() if name != "ne"}
    return not _fits(value, wanted["ne"]) and (not ends or _fits(value, ends))


def _fits(value, wanted) -> bool:
    if isinstance(value, dict):
        return False
    if isinstance(value, list):
        return any(_fits(each, wanted) for each in value)
    if isinstance(wanted, dict):
        return all(_in_range(value, OPERATORS[name], end) for name, end in wanted.items())
    values = wanted if isinstance(wanted, list) else [wanted]
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values)


def has_field(metadata: list[dict], field: str) -> bool:
    return any(field in each or (field == "x.nested" and each.get("x") == {"nested": 1}) for each in metadata)


def _in_range(value, operator, end) -> bool:
    if isinstance(end, str):
        return isinstance(value, str) and operator(value, end)
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return False
    return value is not None and operator(value, end)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return Store.create(tmp_path_factory.mktemp("scratch"), DIM)


class RollbackError(Exception):
    """Ends a transaction without leaving anything of it."""


@settings(max_examples=200, deadline=None)
@given(metadata=st.lists(METADATA, min_size=1, max_size=6), conditions=FILTERS)
def test_filters_mean_what_plain_python_means(scratch, metadata, conditions):
    with pytest.raises(RollbackError), scratch.writing() as writer:
        writer.insert([Document(str(i), "t", metadata=each) for i, each in enumerate(metadata)], vectors(len(metadata)))
        try:
            found = writer.numbers_where(conditions).tolist()
        except InputError as error:
            found = str(error)
        raise RollbackError
    expected = [i for i, each in enumerate(metadata, start=1) if fits(each, conditions)]
    if isinstance(found, str):
        assert "no document has a field" in found
        assert not all(has_field(metadata, field) for field in conditions)
    else:
        assert found == expected
        assert expected or all(has_field(metadata, field) for field in conditions)


@pytest.mark.parametrize("evil", ["x' OR 1=1 --", "'); DROP TABLE documents; --", '$."x', "x') OR ('1'='1"])
def test_nothing_of_a_filter_is_sql(store, evil):
    add(store, "a")
    with store.reading() as reader:
        assert reader.numbers_where({"name": evil}).tolist() == []
        assert reader.numbers_where({"name": [evil, "a"]}).tolist() == [1]
        if '"' in evil:
            with pytest.raises(InputError, match="without quotes"):
                reader.numbers_where({evil: 1})
        else:
            for wanted in (1, {"gte": evil}, {"ne": evil}):
                with pytest.raises(InputError, match="known fields: name"):
                    reader.numbers_where({evil: wanted})
    assert contents(store) == [(1, "a")]


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ("lang=en", "a filter is a mapping"),
        ({"x": {"above": 1}}, "a range is made of gt, gte, lt, lte"),
        ({"x": {}}, "a range is made of"),
        ({"x": {"gt": 1, "lt": "b"}}, "both numbers or both texts"),
        ({"x": {"gt": None}}, "both numbers or both texts"),
        ({"x": [[1]]}, "cannot be compared with a list"),
        ({"x": b"1"}, "cannot be compared with a bytes"),
        ({"x": list(range(40_000))}, "40,000 values are too many"),
    ],
)
def test_filters_that_make_no_sense(store, conditions, message):
    with store.reading() as reader, pytest.raises(InputError, match=message):
        reader.numbers_where(conditions)


def test_texts_in_a_range_of_numbers(store):
    texts = ["2001", " 1999.5", "about 2000", "", "2001-01-01", "~"]
    with store.writing() as writer:
        writer.insert([Document(text, "t", metadata={"year": text}) for text in texts], vectors(len(texts)))
    with store.reading() as reader:
        assert reader.numbers_where({"year": {"gte": 1900}}).tolist() == [1, 2]
        assert reader.numbers_where({"year": {"gt": 2000, "lte": 2001}}).tolist() == [1]
        assert reader.numbers_where({"year": {"lt": 2001}}).tolist() == [2]
        assert reader.numbers_where({"year": {"gte": "2001"}}).tolist() == [1, 3, 5, 6]


def test_large_numbers(store):
    with store.writing() as writer:
        writer.insert([Document("a", "t", metadata={"n": 2**70}), Document("b", "t", metadata={"n": 1})], vectors(2))
    with store.reading() as reader:
        assert reader.numbers_where({"n": 2**70}).tolist() == [1]
        assert reader.numbers_where({"n": {"lt": 10**30}}).tolist() == [1, 2]


def test_a_field_that_no_document_has(store):
    with store.reading() as reader:
        assert reader.numbers_where({"year": 1}).tolist() == []  # nor has the store any document
    metadata = [{"year": 1, "meta": {"lang": "en"}}, {"tag": None}]
    with store.writing() as writer:
        writer.insert([Document(str(i), "t", metadata=each) for i, each in enumerate(metadata)], vectors(2))
    with store.reading() as reader:
        for wanted in (1, None, {"ne": 1}, {"gt": 0}):
            with pytest.raises(InputError, match=r"no document has a field 'yaer'.*: meta\.lang, tag, year"):
                reader.numbers_where({"yaer": wanted})
        assert reader.numbers_where({"year": 2}).tolist() == []
        assert reader.numbers_where({"tag": "x"}).tolist() == []
        assert reader.numbers_where({"meta.lang": {"ne": "en"}}).tolist() == [2]


def test_clauses_of_the_command_line():
    read = parse_clauses(
        ["year>=2000", " year < 2010.5", "lang=en", "tag in a, 7", "note=a = b in c", "day>2020-01-31"]
    )
    assert read == {
        "year": {"gte": 2000, "lt": 2010.5},
        "lang": ["en"],
        "tag": ["a", "7", 7],  # a CSV file says "7" where JSON says 7
        "note": ["a = b in c"],
        "day": {"gt": "2020-01-31"},
    }
    for wrong in ("year", "=3", "year!3", ""):
        with pytest.raises(InputError, match="write field=value"):
            parse_clauses([wrong])
    with pytest.raises(InputError, match="'lang' has such a condition already"):
        parse_clauses(["lang=en", "lang=fr"])
    with pytest.raises(InputError, match="'year' has such a condition already"):
        parse_clauses(["year>1", "year>2"])


# ------------------------------------------------------------------------------------------------- trouble


def test_a_full_disk_is_one_line_and_nothing_is_lost(tmp_path):
    Store.create(tmp_path, DIM).close()
    code = """
import resource, sys
import numpy as np
from hce.data.text import Document
from hce.errors import HceError
from hce.index.store import Store
store = Store(sys.argv[1], 4)
def add(name, count):
    with store.writing() as writer:
        rows = [Document(f"{name}{i}", "text " * 100) for i in range(count)]
        writer.insert(rows, np.ones((count, 4), np.float32))
add("a", 10)
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))  # the system refuses to write more, as a full disk does
try:
    add("b", 5000)
except HceError as error:
    print(error)
with store.reading() as reader:
    print(len(list(reader.entries())), reader.moment().documents)
"""
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    message, counts = run.stdout.splitlines()
    assert message.startswith(f"{tmp_path}: ")
    assert "nothing was changed: check the disk's space" in message
    assert counts == "10 10"
    again = Store(tmp_path, DIM)
    assert len(contents(again)) == 10
    again.close()


def test_a_damaged_or_missing_file_is_said(tmp_path):
    store = Store(tmp_path, DIM)
    with pytest.raises(FormatError, match=r"documents\.sqlite is missing"), store.reading():
        pass
    (tmp_path / "documents.sqlite").write_bytes(b"no database at all" * 1000)
    with pytest.raises(FormatError, match="is damaged"), store.reading() as reader:
        reader.moment()


def test_a_closed_store_says_so(store):
    store.close()
    with pytest.raises(InputError, match="the index is closed"), store.reading():
        pass


def test_it_is_durable_by_its_settings(store):
    with store._lend() as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL: fsync at each commit


def test_compacting_gives_space_back_and_keeps_numbers(store):
    with store.writing() as writer:
        writer.insert([Document(str(i), "text " * 200) for i in range(500)], np.ones((500, DIM), np.float32))
    remove(store, *map(str, range(499)))
    store.compact()
    size = store.path.stat().st_size
    assert size < 300_000
    assert contents(store) == [(500, "499")]
    add(store, "next")
    assert contents(store)[-1] == (501, "next")


def test_metadata_that_is_no_json_cannot_get_in(store):
    with store._lend() as connection, pytest.raises(sqlite3.IntegrityError):
        connection.execute("INSERT INTO documents (id, content, metadata, title, text) VALUES ('a', 0, 'NaN', '', 't')")


def test_the_shared_lock_keeps_one_alone():
    lock, log = SharedLock(), []
    inside = threading.Barrier(2)

    def share() -> None:
        with lock.shared():
            inside.wait(5)  # both are in at once
            log.append("shared")

    def alone() -> None:
        with lock.alone():
            log.append("in")
            time.sleep(0.02)
            log.append("out")

    for targets in ((share, share), (alone, alone, alone)):
        threads = [threading.Thread(target=target) for target in targets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert log == ["shared", "shared", *["in", "out"] * 3]


# ------------------------------------------------------------------------------------------------- other processes


def in_a_fork(work) -> str:
    """Do some work in a forked process, and return what it returned, or the error that it raised."""
    listen, say = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = str(work())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(say, answer.encode())
        os._exit(0)
    os.close(say)
    os.waitpid(child, 0)
    with os.fdopen(listen) as pipe:
        return pipe.read()


def test_a_forked_process_opens_the_file_anew(store, tmp_path):
    add(store, "a")
    with store.reading():  # a second connection comes and stays idle
        add(store, "b")

    def work() -> str:
        os.read(go, 1)
        add(store, "child's")
        return ids(store)

    def ids(store: Store) -> str:
        return " ".join(doc_id for _, doc_id in contents(store))

    go, gone = os.pipe()
    listen, say = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(say, work().encode())
        os._exit(0)
    store.close()  # the last one of this process: SQLite deletes the log that the child has inherited
    os.write(gone, b"!")
    os.waitpid(child, 0)
    assert os.read(listen, 1000) == b"a b child's"
    for descriptor in (go, gone, listen, say):
        os.close(descriptor)
    again = Store(tmp_path, DIM)
    assert ids(again) == "a b child's"
    again.close()


def test_a_forked_process_leaves_its_parents_connections_alone(store):
    add(store, "a")
    held = store.reading()
    held.__enter__()  # and so does one that is in use when the process forks

    def work() -> str:
        held.__exit__(None, None, None)
        add(store, "child's")
        store.close()
        gc.collect()
        return "done"

    assert in_a_fork(work) == "done"
    held.__exit__(None, None, None)
    add(store, "parent's")
    assert [doc_id for _, doc_id in contents(store)] == ["a", "child's", "parent's"]
    with store._lend() as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_forked_process_cannot_finish_what_its_parent_writes(store):
    def work() -> None:
        writing.__exit__(None, None, None)

    writing = store.writing()
    writer = writing.__enter__()
    writer.insert(documents("a"), vectors(1))
    assert "InputError: " in in_a_fork(work)
    assert contents(store) == []
    writing.__exit__(None, None, None)
    assert contents(store) == [(1, "a")]


@pytest.mark.parametrize("how", ["replaced", "moved", "deleted"])
def test_a_folder_that_is_another_one_by_now_is_not_written_to(tmp_path, how):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        Store.create(tmp_path / name, DIM).close()
    store = Store(tmp_path / "old", DIM)
    add(store, "a")
    if how == "moved":
        (tmp_path / "old").rename(tmp_path / "moved")
    else:
        shutil.rmtree(tmp_path / "old")
    if how == "replaced":
        (tmp_path / "new").rename(tmp_path / "old")
    for work in (lambda: add(store, "b"), lambda: contents(store), store.compact):
        with pytest.raises(HceError, match=r"old: .*(replaced|moved or deleted).* since it was opened; open it again"):
            work()
    store.close()
    if how == "moved":
        assert contents(Store(tmp_path / "moved", DIM)) == [(1, "a")]
    if how == "replaced":
        assert contents(Store(tmp_path / "old", DIM)) == []


def test_a_store_is_not_lost_by_going_to_another_folder(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    store = Store.create(".", DIM)
    add(store, "a")
    monkeypatch.chdir(tmp_path / "elsewhere")
    add(store, "b")
    assert contents(store) == [(1, "a"), (2, "b")]
    store.close()


DESCRIPTORS = Path("/proc/self/fd")


@pytest.mark.skipif(not DESCRIPTORS.is_dir(), reason="needs Linux's list of open files")
def test_stores_that_nobody_closed_leave_no_descriptors(tmp_path):
    Store.create(tmp_path, DIM).close()
    gc.collect()
    before = len(list(DESCRIPTORS.iterdir()))
    gc.disable()
    try:
        for _ in range(5):
            assert contents(Store(tmp_path, DIM)) == []
        assert len(list(DESCRIPTORS.iterdir())) == before
    finally:
        gc.enable()


def test_the_log_is_copied_only_while_nobody_can_write(store, tmp_path, monkeypatch):
    """SQLite before 3.51.3 can lose a write that falls into a copying under way (sqlite.org/wal.html#walresetbug)."""
    monkeypatch.setattr(store_module, "LOG_BYTES", 100_000)
    log = tmp_path / "documents.sqlite-wal"
    other = Store(tmp_path, DIM)
    tried, longest = [], 0

    def watch(statement: str) -> None:
        if "wal_checkpoint" in statement:
            with pytest.raises(WriterBusyError), other.writing(wait=0):
                pass
            tried.append(statement)

    connect = Store._connect

    def watched(self):
        connection = connect(self)
        if self is watched_store:
            connection.set_trace_callback(watch)
        return connection

    monkeypatch.setattr(Store, "_connect", watched)
    watched_store = store = Store(store.path.parent, DIM)
    for number in range(60):
        add(store, f"a{number}")
        longest = max(longest, log.stat().st_size)
    assert len(tried) > 1
    assert 100_000 < longest < 300_000  # the log is begun anew once it is copied
    with store._lend() as connection:
        assert connection.execute("PRAGMA wal_autocheckpoint").fetchone() == (0,)
    store.compact()
    assert log.stat().st_size < 100_000
    assert len(contents(other)) == 60
    other.close()


# ------------------------------------------------------------------------------------------------- read-only

READING = """
import os, sys
from hce.errors import HceError
from hce.index.store import Store
if os.geteuid() == 0:
    os.setuid(65534)  # root may write anywhere
store = Store(sys.argv[1], 4)
try:
    for step in sys.argv[2:]:
        if step == "wait":
            print("ready", flush=True)
            sys.stdin.readline()
        with store.reading() as reader:
            print(*(entry.document.id for entry in reader.entries()), flush=True)
            if step == "hold":
                sys.stdin.readline()
    with store.writing():
        print("locks nobody out")
except HceError as error:
    print(error)
"""


@pytest.fixture
def unwritable():
    """A store in a folder that another user may read, and a way to close it to all writers."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        Store.create(folder, DIM).close()
        yield folder
        folder.chmod(0o755)


def read_without_rights(folder: Path, *steps: str) -> subprocess.Popen:
    folder.chmod(0o555)
    return subprocess.Popen(
        [sys.executable, "-c", READING, str(folder), *steps],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("log", ["none", "in use", "left by a kill"])
def test_reading_needs_no_right_to_write(unwritable, log):
    store = Store(unwritable, DIM)
    add(store, "a", "b")
    if log == "left by a kill":
        in_a_fork(lambda: add(Store(unwritable, DIM), "c"))
    elif log == "none":
        store.close()
    lines = read_without_rights(unwritable, "read", "read").communicate()[0].splitlines()
    store.close()
    expected = "a b c" if log == "left by a kill" else "a b"
    assert lines[:2] == [expected, expected]
    assert lines[2].startswith(f"{unwritable}: attempt to write a readonly database; nothing was changed")


def test_a_log_that_nobody_has_recovered_is_said(unwritable):
    store = Store(unwritable, DIM)
    add(store, "a")
    for name in ("documents.sqlite", "documents.sqlite-wal"):
        shutil.copy(unwritable / name, unwritable / f"copy-{name}")
    store.close()
    for name in ("documents.sqlite", "documents.sqlite-wal"):
        (unwritable / f"copy-{name}").replace(unwritable / name)
    (line,) = read_without_rights(unwritable, "read").communicate()[0].splitlines()
    assert line == (
        f"{unwritable}: there is a log ({unwritable}/documents.sqlite-wal), which needs write permission to be read; "
        "have its owner open the index once"
    )


def test_who_only_reads_sees_what_others_write(unwritable):
    reader = read_without_rights(unwritable, "read", "wait", "hold")
    assert reader.stdout.readline() == "\n"
    assert reader.stdout.readline() == "ready\n"
    unwritable.chmod(0o755)
    store = Store(unwritable, DIM)
    add(store, "a")
    store.close()  # the file is another one than the reader has opened, and there is no log
    reader.stdin.write("\n")
    reader.stdin.flush()
    assert reader.stdout.readline() == "a\n"
    assert reader.stdout.readline() == "a\n"
    add(store := Store(unwritable, DIM), "b")  # while the reader holds what it sees for unchangeable
    store.close()
    output, _ = reader.communicate("\n")
    assert output.splitlines() == [f"{unwritable}: another process wrote to this index while it was read; try again"]


def test_a_full_disk_can_be_read_from(store, tmp_path):
    add(store, "a")
    store.close()
    code = """
import resource, sys
from hce.errors import HceError
from hce.index.store import Store
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # the system refuses to write anything, as a full disk does
store = Store(sys.argv[1], 4)
with store.reading() as reader:
    print(*(entry.document.id for entry in reader.entries()))
"""
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=False)
    assert run.stdout == "a\n"


WRITING = """
import sys
import numpy as np
from hce.data.text import Document
from hce.errors import WriterBusyError
from hce.index import store as tables
tables.LOG_BYTES = 100_000  # so that the log is copied and begun anew every few writes
store = tables.Store(sys.argv[1], 4)
sys.stdin.readline()
for number in range(60):
    with store.writing(wait=60) as writer:
        writer.insert([Document(f"{sys.argv[2]}{number}", "text " * 200)], np.ones((1, 4), np.float32))
    with store.reading() as reader:
        assert reader.moment().documents == len(reader.numbers())
    print(f"{sys.argv[2]}{number}", flush=True)
"""


def test_processes_that_write_at_once_lose_nothing(store, tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WRITING, str(tmp_path), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in "abc"
    ]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    acknowledged = [name for process in processes for name in process.communicate()[0].split()]
    assert len(acknowledged) == 180
    assert sorted(doc_id for _, doc_id in contents(store)) == sorted(acknowledged)
    with store._lend() as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_full_disk_names_the_folder_that_was_to_be_made(tmp_path):
    with pytest.raises(InputError, match=r"^[^\n]*full[^\n]*$") as told, new_folder(tmp_path / "ix") as folder:
        new = Store.create(folder, 2)
        with new.writing() as writer:
            writer._connection.execute("PRAGMA max_page_count = 1")  # as many as there are
            writer.insert([Document("a", "t" * 10**6)], np.ones((1, 2)))
    assert str(told.value).startswith(f"{tmp_path / 'ix'}: ")
    assert not list(tmp_path.iterdir())
