"""The tables of a store: none but these are opened, and each row has a checksum that damage does not fit."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import numpy as np
import pytest

from hce.data.text import Document, Passage
from hce.errors import FormatError
from hce.index.store import Store
from hce.index.tables import STORE_FILE, CutPassages, row_checksum, vector_checksum

DIM = 4


@pytest.fixture
def store(tmp_path):
    made = Store.create(tmp_path, DIM)
    with made.writing() as writer:
        documents = [Document("a", "text", "title", {"year": 2}), Document("b", "long " * 9)]
        long = {1: CutPassages([Passage(0, 5), Passage(5, 9)], np.ones((2, DIM)))}
        writer.insert(documents, np.eye(2, DIM), long)
    yield made
    made.close()


def run(store: Store, *statements: str) -> list[tuple]:
    with closing(sqlite3.connect(store.path, isolation_level=None)) as connection:
        return [connection.execute(each).fetchall() for each in statements][-1]


def checksums(store: Store) -> list[list[tuple]]:
    tables = ("documents", "vectors", "passages", "changes")
    return [run(store, f"SELECT checksum FROM {table} ORDER BY 1") for table in tables]  # noqa: S608


@pytest.mark.parametrize(
    "statements",
    [
        [
            "ALTER TABLE changes RENAME TO hidden",
            "CREATE VIEW changes AS WITH RECURSIVE endless (change, token, at, documents, last, checksum) AS "
            "(SELECT 1, '', '', 0, 0, 0 UNION ALL SELECT change + 1, '', '', 0, 0, 0 FROM endless) "
            "SELECT * FROM endless",
        ],
        ["CREATE VIEW extra AS SELECT 1"],
        ["CREATE TRIGGER t AFTER INSERT ON documents BEGIN DELETE FROM vectors; END"],
        ["CREATE TABLE more (a)"],
        ["CREATE INDEX more ON documents (json_extract(metadata, '$.a'))"],
        ["ALTER TABLE documents ADD COLUMN more TEXT"],
        ["PRAGMA writable_schema = ON", "UPDATE sqlite_master SET sql = replace(sql, 'UNIQUE', '')"],
        ["PRAGMA writable_schema = ON", "UPDATE sqlite_master SET sql = replace(sql, 'TEXT', 'TEXU')"],
    ],
)
def test_other_tables_than_these_are_refused(store, statements):
    run(store, *statements)
    with (
        pytest.raises(FormatError, match=f"{STORE_FILE} is damaged"),
        Store(store.path.parent, DIM).reading() as reader,
    ):
        reader.moment()


@pytest.mark.parametrize("content", [b"", b"SQLite format 3\0" + bytes(4080)])
def test_an_empty_file_is_no_store(tmp_path, content):
    (tmp_path / STORE_FILE).write_bytes(content)
    with pytest.raises(FormatError, match="is damaged"), Store(tmp_path, DIM).reading() as reader:
        reader.moment()


def test_each_row_has_a_checksum_that_nothing_else_fits(store):
    assert all(value is not None for rows in checksums(store) for (value,) in rows)
    before = checksums(store)
    with store.writing() as writer:
        writer.replace([Document("a", "text", "title", {"year": 3})])  # one bit of the metadata
    after = checksums(store)
    assert len(set(before[0]) & set(after[0])) == 1
    assert before[1:3] == after[1:3]
    assert vector_checksum(1, b"abcd") != vector_checksum(2, b"abcd")
    assert row_checksum("ab", "c") != row_checksum("a", "bc")
