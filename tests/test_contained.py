"""Files of a stranger's folder are opened, listed and deleted without leaving it."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path

import pytest

from hce import files
from hce.errors import FormatError, OutsideError
from hce.files import (
    check_tree,
    delete_file,
    delete_folder,
    is_file,
    is_folder,
    names_in,
    open_file,
    plain_path,
    read_bytes,
)
from hce.index.index import Index


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    (folder / "2019").mkdir(parents=True)
    (folder / "2019" / "summer.jpg").write_text("a photo")
    return folder


@pytest.fixture
def index(tmp_path):
    folder = tmp_path / "index"
    (folder / "words" / "000000000001").mkdir(parents=True)
    (folder / "words" / "000000000001" / "meta.json").write_text("{}")
    (folder / "manifest.json").write_text('{"format": 2}')
    return folder


def photo_of(photos: Path) -> str:
    return (photos / "2019" / "summer.jpg").read_text()


def in_time(function, *arguments):
    """Call a function in a thread that may not take longer than a second; return what it raised."""
    raised = []

    def call():
        try:
            function(*arguments)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(1)
    assert not thread.is_alive(), "it hangs"
    return raised[0] if raised else None


KINDS = {
    "a link": lambda path, photos: path.symlink_to(photos / "2019" / "summer.jpg"),
    "a link to a folder": lambda path, photos: path.symlink_to(photos),
    "a link to itself": lambda path, photos: path.symlink_to(path.name),
    "a link to a pipe": lambda path, photos: (os.mkfifo(photos / "pipe"), path.symlink_to(photos / "pipe")),
    "a link to a device": lambda path, photos: path.symlink_to("/dev/zero"),
    "a pipe": lambda path, photos: os.mkfifo(path),
    "a socket": lambda path, photos: socket.socket(socket.AF_UNIX).bind(str(path)),
    "a folder": lambda path, photos: path.mkdir(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", [open_file, read_bytes, plain_path, is_file, delete_file])
def test_only_a_regular_file_is_opened_or_deleted(index, photos, kind, call):
    """Anything else is one line at once, whichever function is asked, and stays where it is."""
    path = index / "numbers.npy"
    KINDS[kind](path, photos)
    error = in_time(call, path, index)
    assert isinstance(error, OutsideError)
    assert str(path) in str(error)
    assert "\n" not in str(error)
    assert os.path.lexists(path)
    assert photo_of(photos) == "a photo"


@pytest.mark.parametrize("call", [open_file, read_bytes, plain_path, is_file, is_folder, delete_file, delete_folder])
def test_no_folder_on_the_way_may_be_a_link(index, photos, call):
    """What lies behind a link to a folder is neither seen nor deleted, though it is a regular file there."""
    (index / "engine").symlink_to(photos)
    error = in_time(call, index / "engine" / "2019" / "summer.jpg", index)
    assert isinstance(error, OutsideError)
    assert f"{index}/engine is a link" in str(error)
    assert photo_of(photos) == "a photo"


def test_a_name_with_dots_leads_nowhere(index, photos):
    """`..` is refused, even where it comes back."""
    with pytest.raises(OutsideError):
        open_file(index / ".." / "photos" / "2019" / "summer.jpg", index)


def test_the_folder_itself_may_be_a_link(index, tmp_path):
    """People link `current` to the index of the day."""
    (tmp_path / "current").symlink_to(index)
    current = tmp_path / "current"
    assert json.loads(read_bytes(current / "manifest.json", current)) == {"format": 2}
    assert names_in(current) == ["manifest.json", "words"]
    assert list(check_tree(current)) == ["manifest.json", "words/000000000001/meta.json"]
    assert names_in(current / "words", current) == ["000000000001"]


def test_a_link_to_a_folder_is_not_listed(index, photos):
    """A link in the place of a folder is no empty folder either."""
    (index / "engine").symlink_to(photos)
    with pytest.raises(OutsideError):
        names_in(index / "engine", index)
    assert names_in(index / "passages", index) == []


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "a folder"])
def test_a_tree_is_refused_for_anything_in_it(index, photos, kind):
    """A library may only read a folder in which there is nothing but files and folders."""
    KINDS[kind](index / "words" / "000000000001" / "x.term", photos)
    assert isinstance(in_time(check_tree, index), OutsideError)


def test_a_file_that_is_too_large_is_not_read(index, monkeypatch):
    """The size is looked at before anything is read."""
    with (index / "manifest.json").open("wb") as file:
        file.truncate(files.MOST_TEXT + 1)  # a hole: it takes no room
    with pytest.raises(FormatError, match=r"damaged \(134,217,729 bytes"):
        read_bytes(index / "manifest.json", index)
    with pytest.raises(FormatError, match=r"damaged \(134,217,729 bytes"):
        check_tree(index)


def test_what_is_missing_is_missing(index):
    """Nothing at all is no danger."""
    assert not is_file(index / "a", index)
    assert not is_file(index / "a" / "b", index)
    assert plain_path(index / "a", index) == index / "a"
    assert delete_folder(index / "a", index)
    delete_file(index / "a", index)
    with pytest.raises(FileNotFoundError):
        open_file(index / "a", index)


def test_a_snapshot_of_the_hub_is_read(tmp_path):
    """The hub's cache is links to its own blobs, also below the snapshot; a link elsewhere is refused."""
    cache = tmp_path / "models--org--name"
    snapshot = cache / "snapshots" / "0a1b"
    (snapshot / "1_Pooling").mkdir(parents=True)
    (cache / "blobs").mkdir()
    for name, up in (("config.json", "../.."), ("1_Pooling/config.json", "../../..")):
        (cache / "blobs" / name.replace("/", "")).write_text(name)
        (snapshot / name).symlink_to(f"{up}/blobs/{name.replace('/', '')}")
        assert read_bytes(snapshot / name, snapshot).decode() == name
    assert list(check_tree(snapshot)) == ["1_Pooling/config.json", "config.json"]
    (tmp_path / "secret").write_text("secret")
    (snapshot / "vocab.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(OutsideError):
        check_tree(snapshot)
    with pytest.raises(OutsideError):
        read_bytes(snapshot / "vocab.txt", snapshot)


# ------------------------------------------------------------------------------------------------- deleting


def test_a_folder_of_ours_is_deleted(index):
    """Files are known by their names, or by the list beside them."""
    encoder = index / "encoder-3"
    (encoder / "1_Dense").mkdir(parents=True)
    for name in ("modules.json", "1_Dense/config.json", "vocab.txt"):
        (encoder / name).write_text("x")
    (encoder / "checksums.json").write_text('{"modules.json": 1, "1_Dense/config.json": 2, "vocab.txt": 3}')
    assert delete_folder(encoder, index)
    assert delete_folder(index / "words" / "000000000001", index)
    assert names_in(index) == ["manifest.json", "words"]


def test_a_folder_with_anything_else_is_left(index, caplog):
    """Nothing of it is deleted then, and a line says why."""
    (index / "words" / "000000000001" / "notes.txt").write_text("mine")
    assert not delete_folder(index / "words" / "000000000001", index)
    assert names_in(index / "words" / "000000000001") == ["meta.json", "notes.txt"]
    assert "was not deleted (it contains notes.txt, which hce did not write)" in caplog.text


def test_a_link_in_a_folder_keeps_it(index, photos):
    """Not even the link itself is deleted."""
    (index / "words" / "000000000001" / "0123456789abcdef0123456789abcdef.term").symlink_to(photos)
    assert not delete_folder(index / "words" / "000000000001", index)
    assert photo_of(photos) == "a photo"


def test_a_link_is_no_folder_to_delete(index, photos):
    """Neither the link nor what it leads to goes."""
    (index / "words-3").symlink_to(photos)
    with pytest.raises(OutsideError):
        delete_folder(index / "words-3", index)
    assert (index / "words-3").is_symlink()
    assert photo_of(photos) == "a photo"


def test_what_an_earlier_run_seems_to_have_left_may_hold_no_link(tmp_path, planted_corpus, static_encoder):
    """Work that goes on there would write through it."""
    victim = tmp_path / "thesis.txt"
    victim.write_text("years of work")
    (tmp_path / "index.unfinished" / "part").mkdir(parents=True)
    (tmp_path / "index.unfinished" / "part" / "vectors.partial").symlink_to(victim)
    with pytest.raises(OutsideError, match=r"vectors\.partial is a link"):
        Index.create(tmp_path / "index", planted_corpus[:5], static_encoder)
    assert victim.read_text() == "years of work"
    assert not (tmp_path / "index").exists()
