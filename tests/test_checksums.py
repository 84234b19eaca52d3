"""Checksums of files: what is damaged, missing or not known, and that nothing else than files of the folder is read."""

from __future__ import annotations

import json

import pytest

from hce.errors import FormatError, OutsideError
from hce.files import CHECKSUMS, damage_in, require_undamaged, write_checksums


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "a").write_bytes(b"one")
    (tmp_path / "below" / "b").write_bytes(b"two" * 3_000_000)
    (tmp_path / "README.md").write_text("for people")
    write_checksums(tmp_path)
    return tmp_path


def test_files_as_they_were_written(folder):
    (folder / "README.md").write_text("edited")
    (folder / "new").write_text("nobody knows it")
    read = []
    assert damage_in(folder, read.append) == []
    assert sum(read) == 9_000_003
    require_undamaged(folder, "copy it again")


def test_they_are_written_anew(folder):
    (folder / "a").write_bytes(b"other")
    write_checksums(folder)
    assert damage_in(folder) == []


def test_nothing_is_known_without_the_file(folder):
    (folder / CHECKSUMS).unlink()
    assert damage_in(folder) is None
    require_undamaged(folder, "copy it again")


def test_every_flipped_bit_is_found(folder):
    for bit in range(24):
        content = bytearray(b"one")
        content[bit // 8] ^= 1 << bit % 8
        (folder / "a").write_bytes(content)
        assert damage_in(folder) == ["a has changed since it was written"]
    (folder / "below" / "b").unlink()
    with pytest.raises(FormatError, match=r"damaged \(a has changed .*\) \(and 1 more\); copy it again"):
        require_undamaged(folder, "copy it again")


@pytest.mark.parametrize("content", ['{"a": ', "[]", "", '{"a": "x"}', '{"a": null}'])
def test_a_damaged_list_of_checksums_is_damage(folder, content):
    (folder / CHECKSUMS).write_text(content)
    assert damage_in(folder)


@pytest.mark.parametrize("name", ["/dev/zero", "../outside", "below"])
def test_only_regular_files_of_the_folder_are_read(folder, name):
    (folder.parent / "outside").write_text("x")
    (folder / CHECKSUMS).write_text(json.dumps({name: 0}))
    assert damage_in(folder) == [f"{name} is missing, or is not a regular file in this folder"]


@pytest.mark.parametrize("name", [CHECKSUMS, "endless"])
def test_a_folder_with_a_link_is_refused(folder, name):
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/dev/zero")
    with pytest.raises(OutsideError, match=name):
        damage_in(folder)
