"""The store: numbers, transactions, sharing, filters, and what it says when SQLite refuses."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hce.data.documents import Document
from hce.errors import FormatError, InputError
from hce.index import store as tables
from hce.index.filters import parse_clauses
from hce.index.live import SharedLock
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
        with other._connection() as connection:  # which is as patient again as it was
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
    monkeypatch.setattr(tables, "content_key", lambda text: 7)
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
FILTERS = st.dictionaries(FIELDS, st.one_of(VALUES, st.lists(VALUES, max_size=3), RANGES))
OPERATORS = {
    "gt": lambda value, end: value > end,
    "gte": lambda value, end: value >= end,
    "lt": lambda value, end: value < end,
    "lte": lambda value, end: value <= end,
}


def fits(metadata: dict, conditions: dict) -> bool:
    """The filter's meaning, in plain Python."""
    return all(_fits(metadata.get(field), wanted) for field, wanted in conditions.items())


def _fits(value, wanted) -> bool:
    if isinstance(value, dict):
        return False
    if isinstance(value, list):
        return any(_fits(each, wanted) for each in value)
    if isinstance(wanted, dict):
        return all(_in_range(value, OPERATORS[name], end) for name, end in wanted.items())
    return any(value == each for each in (wanted if isinstance(wanted, list) else [wanted]))


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
        found = writer.numbers_where(conditions).tolist()
        raise RollbackError
    assert found == [i for i, each in enumerate(metadata, start=1) if fits(each, conditions)]


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
            assert reader.numbers_where({evil: 1}).tolist() == []
            assert reader.numbers_where({evil: {"gte": evil}}).tolist() == []
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
    for wrong in ("year", "=3", "year!=3", ""):
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
from hce.data.documents import Document
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
    with store._connection() as connection:
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
    with store._connection() as connection, pytest.raises(sqlite3.IntegrityError):
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
