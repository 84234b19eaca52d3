"""hce check: no flipped bit goes unseen, what can be healed is healed, and strangers' folders can do nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hce.cli import app
from hce.data.corpus import Corpus
from hce.data.text import Document
from hce.encoding.encoder import Encoder
from hce.errors import FormatError, HceError, InputError
from hce.files import CHECKSUMS, write_checksums
from hce.index import background
from hce.index.check import check
from hce.index.create import build_parts
from hce.index.derived import LocalPart
from hce.index.index import Index
from hce.index.manifest import Manifest
from hce.index.tables import Reader
from hce.search import engine as engine_module
from hce.search.engine import ENGINES, load_engine, new_engine
from hce.search.words import Words
from hce.tree.hierarchy import Hierarchy

FORMATS = Path(__file__).parent / "data" / "formats-0.2.0"
LONG = Document("long", " ".join(f"star w{number % 90}" for number in range(900)) + " law cell w99", "a long one")


@pytest.fixture(scope="module")
def made(planted_corpus, tmp_path_factory):
    """An index with a tree, passages, and documents that came and went."""
    folder = tmp_path_factory.mktemp("made")
    encoder = Encoder.load(FORMATS / "model", device="cpu")
    with Index.create(folder / "index", planted_corpus, encoder, "grow") as index:
        index.remove([document.id for document in planted_corpus[:3]])
        index.add([LONG, Document("new", "star w1", metadata={"year": 2000})])
        index.rebuild()
        index.remove([planted_corpus[5].id])
    return folder / "index"


@pytest.fixture
def index(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "index"))


def run(folder: Path, *statements: str, bind: tuple = ()) -> list:
    with closing(sqlite3.connect(folder / "documents.sqlite", isolation_level=None)) as connection:
        return [connection.execute(each, bind).fetchall() for each in statements][-1]


def contents(folder: Path) -> object:
    """All that is in a store, whatever pages it is on; what SQLite says where it cannot be read."""
    try:
        with closing(sqlite3.connect(folder / "documents.sqlite")) as connection:
            connection.text_factory = bytes
            tables = ("sqlite_master", "documents", "vectors", "passages", "changes", "removed", "sqlite_sequence")
            rows = [connection.execute(f"SELECT * FROM {table}").fetchall() for table in tables]  # noqa: S608
            return rows, connection.execute("PRAGMA integrity_check").fetchall()
    except sqlite3.Error as error:
        return str(error)


def flip(path: Path, bits: list[int]) -> None:
    """Flip bits, and leave size and time as they were."""
    stat, content = path.stat(), bytearray(path.read_bytes())
    for bit in bits:
        content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def is_told(folder: Path) -> bool:
    try:
        return not check(folder).is_sound
    except HceError:
        return True


def parts(folder: Path) -> set[str]:
    return {finding.part for finding in check(folder).findings}


# ------------------------------------------------------------------------------------------------- damage is seen


def test_what_is_whole_is_sound(index):
    found = check(index)
    assert found.is_sound
    assert found.findings == ()
    assert found.documents == 238
    assert found.as_dict()["sound"] is True


def test_no_flipped_bit_of_the_store_goes_unseen(index):
    """A bit is either told of, or in a place where nothing is written."""
    path, chance = index / "documents.sqlite", random.Random(0)  # noqa: S311
    content, before_it = path.read_bytes(), contents(index)
    told = 0
    for _ in range(60):
        for name in ("documents.sqlite-wal", "documents.sqlite-shm"):
            (index / name).unlink(missing_ok=True)
        path.write_bytes(content)
        flip(path, [chance.randrange(8 * len(content))])
        seen = is_told(index)
        assert seen or contents(index) == before_it
        told += seen
    assert told > 10


def test_no_flipped_bit_of_another_file_goes_unseen(index):
    chance = random.Random(1)  # noqa: S311
    for path in sorted(index.rglob("*")):
        if not path.is_file() or path.name.startswith("documents.sqlite"):
            continue
        content = path.read_bytes()
        for _ in range(4 if len(content) > 2 else 0):
            place = chance.randrange(8 * len(content))
            while content[place // 8] in b" \n":  # which may be white space of JSON
                place = chance.randrange(8 * len(content))
            flip(path, [place])
            assert is_told(index), (path.relative_to(index), place)
            path.write_bytes(content)


@pytest.mark.parametrize("seed", range(5))
def test_a_damaged_encoder_is_never_used(index, seed):
    """2,000 bits with size and time kept: a check tells, and so does whoever loads it."""
    path = max((index / "encoder").rglob("*"), key=lambda each: each.stat().st_size)
    flip(path, random.Random(seed).sample(range(8 * path.stat().st_size), 2000))  # noqa: S311
    assert "encoder" in parts(index)
    with (
        Index.open(index) as opened,
        pytest.raises(FormatError, match=r"encoder: damaged \(.* changed since it was written"),
    ):
        opened.search("star")


@pytest.mark.parametrize("table", ["documents", "vectors", "passages"])
def test_rows_that_are_missing_are_told_of(index, table):
    run(index, f"DELETE FROM {table} WHERE rowid = 9")  # noqa: S608
    assert is_told(index) is (table != "passages")  # that one has none of this number any more, or it is gone
    column = "document" if table == "passages" else "number"
    run(index, f"UPDATE {table} SET {column} = {column} + 100000 WHERE rowid = (SELECT max(rowid) FROM {table})")  # noqa: S608
    assert is_told(index)


def test_a_model(tmp_path):
    model = Path(shutil.copytree(FORMATS / "model", tmp_path / "model"))
    assert check(model).findings == ()
    (model / "checksums.json").unlink()
    (finding,) = check(model).findings
    assert (finding.state, finding.can_heal) == ("unknown", True)
    assert check(model, repair=True).findings == ()
    path = model / "hierarchy" / "hierarchy.safetensors"
    flip(path, [8 * (path.stat().st_size - 1)])
    found = check(model, repair=True)
    assert [each.what for each in found.findings] == [
        "hierarchy/hierarchy.safetensors has changed since it was written"
    ]
    assert not found.is_sound
    with pytest.raises(InputError, match="neither an index nor a model"):
        check(tmp_path)


# ------------------------------------------------------------------------------------------------- and healed


def test_vectors_and_passages_are_encoded_anew(index, planted_corpus):
    with Index.open(index) as opened:
        expected = {entry.document.id: entry.vector for entry in opened.state.entries()}
        hits = [hit.id for hit in opened.search("star red w3", 10)]
    passages = run(index, "SELECT count(*) FROM passages")
    run(index, "UPDATE vectors SET vector = zeroblob(length(vector)) WHERE number IN (50, 51)")
    run(index, "UPDATE passages SET start = start + 1 WHERE number = (SELECT min(number) FROM passages)")
    found = check(index)
    assert parts(index) == {"vectors", "passages"}
    assert all(finding.can_heal for finding in found.findings)
    found = check(index, repair=True)
    assert found.is_sound
    assert len(found.healed) >= 3
    assert check(index).findings == ()
    with Index.open(index) as opened:
        for entry in opened.state.entries():
            np.testing.assert_allclose(entry.vector, expected[entry.document.id], atol=1e-6)
        assert {entry.document.id for entry in opened.state.entries()} == set(expected)
        assert [hit.id for hit in opened.search("star red w3", 10)] == hits
        assert run(index, "SELECT count(*) FROM passages") == passages


def test_a_damaged_text_is_named_and_kept(index):
    run(index, "UPDATE documents SET text = text || '.' WHERE number = 60")
    run(index, "UPDATE documents SET metadata = '{\"year\": 2001}' WHERE id = 'new'")
    text, metadata = sorted((each for each in check(index).findings), key=lambda each: each.number)
    assert "its text is not as written" in text.what
    assert "its text is sound, but" in metadata.what
    assert "document 'new'" in metadata.what
    assert not any(each.can_heal for each in (text, metadata))
    assert not check(index, repair=True).is_sound
    with Index.open(index) as opened:
        opened.update([Document("new", "star w1", metadata={"year": 2000})])
        opened.remove([next(each.document.id for each in opened.state.entries() if each.number == 60)])
    assert check(index).findings == ()


@pytest.mark.parametrize(
    "change",
    [
        "vectors SET vector = x'00'",
        "documents SET metadata = '{'",
        "documents SET text = CAST(x'ff' AS TEXT)",
    ],
)
def test_what_cannot_be_read_is_one_line(index, change):
    run(index, "PRAGMA ignore_check_constraints = ON", f"UPDATE {change} WHERE number = 50")
    shutil.rmtree(index / "engine")
    with Index.open(index) as opened:
        with pytest.raises(FormatError, match="is damaged; 'hce check' names it"):
            list(opened.state.entries())
        with pytest.raises(FormatError, match="is damaged; 'hce check' names it"):
            opened.search_vectors(np.eye(1, opened.state.manifest.dim, dtype=np.float32), 300)
    assert is_told(index)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE vectors SET vector = x'00' WHERE number = (SELECT max(number) FROM vectors)",
        "UPDATE passages SET vector = x'00' WHERE number = (SELECT max(number) FROM passages)",
    ],
)
@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_damaged_vector_that_no_snapshot_has_yet_is_one_line(index, monkeypatch, change, is_loaded):
    loads, loaded = [], LocalPart._loaded

    def counted(part: LocalPart, reader: Reader) -> object:
        loads.append(1)
        if len(loads) > 20:
            pytest.fail("a snapshot is loaded again and again")
        return loaded(part, reader)

    monkeypatch.setattr(LocalPart, "_loaded", counted)
    with Index.open(index) as opened:
        asked = np.eye(1, opened.state.manifest.dim, dtype=np.float32)
        if is_loaded:
            opened.search_vectors(asked, 300)
        opened.add([Document("late", LONG.text)])
        run(index, "PRAGMA ignore_check_constraints = ON", change)
        for _ in range(2):
            with pytest.raises(FormatError, match="a vector is damaged; 'hce check' names it"):
                opened.search_vectors(asked, 300)
    assert is_told(index)


@pytest.mark.parametrize("part", ["engine", "words", "passages", "hierarchy"])
def test_what_is_derived_is_made_anew(index, part):
    folder = next(path for path in index.glob(f"{part}*"))
    path = max((each for each in folder.rglob("*") if each.is_file()), key=lambda each: each.stat().st_size)
    flip(path, [8 * (path.stat().st_size // 2)])
    (finding,) = check(index).findings
    assert finding.can_heal
    assert finding.part == {"hierarchy": "tree"}.get(part, part)
    found = check(index, repair=True)
    assert found.healed == (finding,)
    assert check(index).findings == ()


def test_what_was_counted_is_counted_anew(index, planted_corpus):
    run(index, "UPDATE changes SET documents = documents + 7, last = 3")
    run(index, "UPDATE removed SET number = number + 20 WHERE number = 2")
    assert "changes" in parts(index)
    assert check(index, repair=True).is_sound
    with Index.open(index) as opened:
        assert len(opened) == 238
        assert (opened.status().removed, opened.status().added) == (4, 2)
        opened.add([Document("newest", "star")])
        assert len(list(opened)) == 239
    assert check(index).findings == ()


def test_indexes_of_sqlite_are_made_anew(index):
    """A row is moved back while SQLite takes its index for one of no rows: the row is as it was, the index is not."""
    ((definition,),) = run(index, "SELECT sql FROM sqlite_master WHERE name = 'documents_by_content'")

    def define(sql: str) -> None:
        by_hand = "UPDATE sqlite_master SET sql = ? WHERE name = 'documents_by_content'"
        with closing(sqlite3.connect(index / "documents.sqlite", isolation_level=None)) as connection:
            connection.execute("PRAGMA writable_schema = ON")
            connection.execute(by_hand, (sql,))

    run(index, "UPDATE documents SET content = content + 1 WHERE number = 50")
    define(f"{definition} WHERE 0")
    run(index, "UPDATE documents SET content = content - 1 WHERE number = 50")
    define(definition)
    (finding,) = check(index).findings
    assert (finding.part, finding.state, finding.can_heal) == ("store", "damaged", True)
    assert finding.what.endswith("missing from index documents_by_content")
    found = check(index, repair=True)
    assert (found.findings, found.healed) == ((), (finding,))
    assert run(index, "PRAGMA integrity_check") == [("ok",)]


def test_nothing_is_repaired_without_its_encoder(index):
    run(index, "UPDATE vectors SET vector = zeroblob(length(vector)) WHERE number = 50")
    path = next((index / "encoder").rglob("*.safetensors"))
    flip(path, [800])
    with pytest.raises(
        InputError, match=r"nothing was repaired, since encoder/.* has changed since it was written; first copy"
    ):
        check(index, repair=True)


# ------------------------------------------------------------------------------------------------- lost writes


def test_a_snapshot_that_knows_more_than_the_store_is_told_of(index, caplog):
    shutil.copy(index / "documents.sqlite", index / "older.sqlite")
    with Index.open(index) as opened:
        opened.add([Document("lost", "star w7")])
        build_parts(opened.state)
    (index / "older.sqlite").replace(index / "documents.sqlite")
    for name in ("documents.sqlite-wal", "documents.sqlite-shm"):
        (index / name).unlink(missing_ok=True)
    caplog.clear()
    with Index.open(index) as opened:
        assert "lost" not in opened
    assert "knows of a later write than" in caplog.text
    assert parts(index) == {"log"}
    run(index, "UPDATE vectors SET vector = zeroblob(length(vector)) WHERE number = 50")
    found = check(index, repair=True)  # which makes the snapshots anew, so that only this check can still tell
    assert {each.part for each in found.healed} == {"vectors"}
    assert {each.part for each in found.findings} == {"log"}
    assert check(index).findings == ()


# ------------------------------------------------------------------------------------------------- from a stranger


@pytest.mark.parametrize(
    "name", ["..", "../../etc", "/dev", "hierarchy/../..", "encoder", "hierarchy-", "hierarchy-1\n"]
)
def test_a_manifest_names_no_other_folder(index, name):
    values = json.loads((index / "manifest.json").read_text())
    del values["checksum"]
    (index / "manifest.json").write_text(json.dumps({**values, "hierarchy": name}))
    with pytest.raises(FormatError, match="'hierarchy' has a wrong value"):
        Index.open(index)


@pytest.mark.parametrize(
    ("name", "value"), [("dim", -1), ("dim", 1e9), ("words_share", 7), ("engine", None), ("window", 0), ("format", "2")]
)
def test_a_manifest_has_sound_values(index, name, value):
    values = json.loads((index / "manifest.json").read_text())
    del values["checksum"]
    (index / "manifest.json").write_text(json.dumps({**values, name: value}))
    with pytest.raises(FormatError, match=f"'{name}' has a wrong value"):
        Index.open(index)


def test_a_changed_manifest_is_told_of(index):
    content = (index / "manifest.json").read_text()
    (index / "manifest.json").write_text(content.replace('"english"', '"german"'))
    with pytest.raises(FormatError, match=r"manifest\.json has changed since it was written"):
        Index.open(index)


def test_no_hub_is_asked_for_the_encoder_that_an_index_names(index, monkeypatch):
    manifest = Manifest.read(index)
    Manifest(**{**vars(manifest), "base_encoder": "stranger/tracks-you"}).write(index)
    asked = []

    def load(spec, **options):
        asked.append(options)
        raise InputError("not there")

    monkeypatch.setattr(Encoder, "load", load)
    with Index.open(index) as opened:
        untrained = background.Untrained(opened)
        untrained._catch_up_or_say_why()
        assert "stranger/tracks-you is not on this machine" in untrained.readiness().reason
    assert asked == [{"local": True}]


@pytest.mark.parametrize("name", ENGINES)
def test_checksums_of_an_engine_name_nothing_outside(tmp_path, name):
    rows = np.eye(40, 16, dtype=np.float32)
    rows[16:] = rows[:8].repeat(3, axis=0)
    new_engine(name, 16, numbers=np.arange(1, 41), vectors=rows).save(tmp_path)
    facts = json.loads((tmp_path / CHECKSUMS).read_text())
    (tmp_path / CHECKSUMS).write_text(json.dumps({**facts, "/dev/zero": 0}))
    with pytest.raises(FormatError, match="/dev/zero is missing, or is not a regular file"):
        load_engine(name, tmp_path, 16)


def test_crafted_words_with_right_checksums_are_refused_or_searched(tmp_path):
    chance = random.Random(1)  # noqa: S311
    words = Words.new()
    words.add((number, f"alpha beta w{number % 40}") for number in range(1, 400))
    outcomes = set()
    for turn in range(80):
        (folder := tmp_path / str(turn)).mkdir()
        words.save(folder)
        files = sorted(path for path in folder.iterdir() if path.name != CHECKSUMS and path.stat().st_size)
        path = files[turn % len(files)]
        path.write_bytes(crafted(path, chance))
        write_checksums(folder)
        try:
            Words.load(folder, "english").search("alpha w3 w7", 10)
            outcomes.add("searched")
        except FormatError as error:
            assert "the index of words is damaged" in str(error)
            outcomes.add("refused")
    assert outcomes == {"searched", "refused"}


def crafted(path: Path, chance: random.Random) -> bytes:
    """A file with a few bytes drawn anew."""
    content = bytearray(path.read_bytes())
    for _ in range(chance.randrange(1, 9)):
        content[chance.randrange(len(content))] = chance.choice((0, 1, 127, 255, chance.randrange(256)))
    return bytes(content)


@pytest.mark.parametrize("name", ["exact", "codes", "routed"])
def test_crafted_engines_with_right_checksums_are_refused_or_searched(tmp_path, monkeypatch, name):
    """faiss reads none of it: no crash, no endless loop, nothing larger than its file; at worst other scores."""
    monkeypatch.setattr(engine_module, "CODED_FROM", 100)
    monkeypatch.setattr(engine_module, "ROUTED_FROM", 100 if name == "routed" else 1000)
    chance = random.Random(3)  # noqa: S311
    rows = np.random.default_rng(0).normal(size=(1300, 8)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    numbers, engine_name = np.arange(1, 1301), "exact" if name == "exact" else "codes"
    new_engine(
        engine_name, 8, numbers=numbers, vectors=rows, hierarchy=Hierarchy.build(rows, 4) if name == "routed" else None
    ).save(tmp_path)
    files = [path for path in sorted(tmp_path.iterdir()) if path.name != CHECKSUMS]
    refused = searched = 0
    for turn in range(150):
        path = files[turn % len(files)]
        content = path.read_bytes()
        path.write_bytes(crafted(path, chance))
        write_checksums(tmp_path)
        try:
            engine = load_engine(engine_name, tmp_path, 8)
            found = engine.search(rows[:5], 10)
            engine.add(np.array([10**6]), rows[:1])
            engine.remove(np.arange(1, 20))
            assert found.numbers.shape == (5, 10)
            assert engine.search(rows[:5], 10).numbers.shape == (5, 10)
            searched += 1
        except FormatError:
            refused += 1
        path.write_bytes(content)
    assert refused
    assert searched


# ------------------------------------------------------------------------------------------------- the command


def hce(*arguments: object) -> tuple[int, str]:
    ended = CliRunner().invoke(app, [str(each) for each in arguments])
    return ended.exit_code, ended.stdout


def test_the_command(index):
    code, text = hce("check", index)
    assert (code, text) == (0, f"{index}: 238 documents, no damage\n")
    run(index, "UPDATE vectors SET vector = zeroblob(length(vector)) WHERE number < 40")
    code, text = hce("check", index)
    assert code == 1
    assert text.startswith("damaged    vectors: the vector of document number 4 has changed; --repair heals it\n")
    assert text.count("\n") == 11  # ten of them, and the verdict
    code, text = hce("check", index, "--json")
    assert code == 1
    assert len(json.loads(text)["findings"]) > 30
    code, text = hce("check", index, "--repair")
    assert code == 0
    assert text.startswith("healed     vectors: ")
    assert text.endswith(f"{index}: 238 documents, no damage\n")


@pytest.mark.parametrize("damage", ["cut", "taken away", "flipped"])
def test_a_snapshot_that_cannot_tell_what_it_is_of_is_made_anew_and_that_is_said(
    tmp_path, static_encoder, caplog, damage
):
    documents = [Document(f"d{n}", f"w{n} w{n + 1}") for n in range(20)]
    with Index.create(tmp_path / "index", Corpus.from_documents(documents), static_encoder) as index:
        before = [hit.id for hit in index.search("w3 w4", 3)]
    (label,) = (tmp_path / "index" / "words").glob("[0-9]*/snapshot.json")
    content = label.read_bytes()
    label.unlink()
    if damage != "taken away":
        label.write_bytes(content[: len(content) // 2] if damage == "cut" else content.replace(b'"', b"'", 1))
    with Index.open(tmp_path / "index", static_encoder) as index:
        assert [hit.id for hit in index.search("w3 w4", 3)] == before
    assert "snapshot.json" in caplog.text
    assert "done now from the store" in caplog.text
