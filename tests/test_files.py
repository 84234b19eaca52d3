"""Old or new, never half: after an exception, after kill -9, and nothing left lying about."""

import errno
import gzip
import json
import os
import signal
import subprocess
import sys
from typing import NamedTuple

import pytest
from safetensors import SafetensorError

from hce import files
from hce.errors import FormatError, InputError
from hce.files import (
    checked_fields,
    delete_whole,
    new_folder,
    open_atomically,
    open_text,
    other_identity,
    read_json,
    read_json_value,
    sync_folder,
    unfinished,
    write_json,
)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def mode_of(path):
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize(("mode", "old", "new"), [("w", "old\n", "né\r\n\n"), ("wb", b"old", b"\xff\x00")])
def test_a_file_is_replaced_on_success_and_only_then(tmp_path, mode, old, new):
    path = tmp_path / "a.txt"
    as_bytes = (lambda value: value.encode()) if mode == "w" else bytes
    path.write_bytes(as_bytes(old))
    with open_atomically(path, mode) as file:
        file.write(new)
        file.flush()
        assert path.read_bytes() == as_bytes(old)
    assert path.read_bytes() == as_bytes(new)
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("existed", [True, False])
def test_an_exception_leaves_the_old_file_and_no_other(tmp_path, error, existed):
    path = tmp_path / "a.txt"
    if existed:
        path.write_text("old")
    with pytest.raises(error), open_atomically(path) as file:
        file.write("new")
        raise error
    assert names(tmp_path) == (["a.txt"] if existed else [])
    assert not existed or path.read_text() == "old"


def test_a_failing_rename_leaves_nothing(tmp_path):
    path = tmp_path / "a"
    with (
        pytest.raises(InputError, match=r"cannot be written \((Is a directory|File exists)"),
        open_atomically(path) as file,
    ):
        file.write("new")
        path.mkdir()
    assert names(tmp_path) == ["a"]
    assert names(path) == []


def test_permissions_are_those_of_a_plain_open(tmp_path):
    old = os.umask(0o027)
    try:
        with open_atomically(tmp_path / "file"):
            pass
        with new_folder(tmp_path / "folder"):
            pass
    finally:
        os.umask(old)
    assert mode_of(tmp_path / "file") == 0o640
    assert mode_of(tmp_path / "folder") == 0o750


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match=r"none/a\.txt: there is no folder .*none; make it first"):
        open_atomically(tmp_path / "none" / "a.txt").__enter__()
    with pytest.raises(InputError, match="is a folder; give the name of a file"):
        open_atomically(tmp_path).__enter__()
    with pytest.raises(InputError, match=r"file/new: cannot be written \((Not a directory|File exists)\)"):
        new_folder(tmp_path / "file" / "new").__enter__()
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_devices_and_pipes_are_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to(os.devnull)
    for name in ("pipe", "null"):
        with pytest.raises(InputError, match="is a device or a pipe; give the name of a file"):
            open_atomically(tmp_path / name).__enter__()
    assert names(tmp_path) == ["null", "pipe"]
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "null").is_symlink()


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "error",
    [
        FULL,
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        Exception("No space left on device (os error 28)"),  # tokenizers
        RuntimeError("write error in storage.faiss: 0 != 1 (No space left on device)"),
    ],
)
def test_a_full_disk_is_one_line_whichever_library_meets_it(tmp_path, error):
    for opened in (open_atomically, new_folder):
        one_line = r"^.*/new: cannot be written \(No space left on device\); [^\n]*$"
        with pytest.raises(InputError, match=one_line), opened(tmp_path / "new"):
            raise error
    assert names(tmp_path) == []


def test_what_the_system_did_not_refuse_is_passed_on(tmp_path):
    with pytest.raises(ValueError, match="mine"), new_folder(tmp_path / "new"):
        raise ValueError("mine")
    with pytest.raises(FormatError, match="mine"), open_atomically(tmp_path / "new"):
        raise FormatError("mine")


def test_a_name_that_is_no_unicode_goes_into_json_and_back(tmp_path):
    name = os.fsdecode(b"caf\xe9")
    write_json(tmp_path / "a.json", {"name": name, "é": 1})
    assert read_json(tmp_path / "a.json") == {"name": name, "é": 1}


class Told(NamedTuple):
    count: int
    share: float
    names: list[str]
    losses: dict[str, float]
    note: str | None = None


TOLD = {"count": 1, "share": 1, "names": ["a"], "losses": {"a": 0.5}, "unknown": 1}


def test_fields_of_the_right_types_are_taken():
    assert checked_fields(Told, TOLD) == Told(1, 1, ["a"], {"a": 0.5})
    assert checked_fields(Told, {**TOLD, "losses": {"a": None}}, may_be_nan=["losses"]).losses == {"a": None}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("count", value) for value in ("1", 1.5, None, [1], True)),
        *(("share", value) for value in ("1", None, False, {})),
        *(("names", value) for value in ("a", [1], {"a": 1}, None)),
        *(("losses", value) for value in ([1], {"a": "1"}, {"a": None}, 1)),
        ("note", 1),
    ],
)
def test_a_field_of_another_type_is_named(name, value):
    with pytest.raises(FormatError, match=f"'{name}' has a wrong value"):
        checked_fields(Told, {**TOLD, name: value})


def test_missing_fields_and_no_fields_at_all():
    with pytest.raises(FormatError, match="names"):
        checked_fields(Told, {name: value for name, value in TOLD.items() if name != "names"})
    with pytest.raises(FormatError, match="a list where an object should be"):
        checked_fields(Told, [1])


def test_write_json_is_readable_and_ends_with_a_line_break(tmp_path):
    write_json(tmp_path / "a.json", {"é": [1]})
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == '{\n  "é": [\n    1\n  ]\n}\n'


def test_write_json_of_what_is_no_json_keeps_the_old_file(tmp_path):
    write_json(tmp_path / "a.json", 1)
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"a": object()})
    assert json.loads((tmp_path / "a.json").read_text()) == 1
    assert names(tmp_path) == ["a.json"]


@pytest.mark.parametrize("existed", [True, False])
def test_a_folder_appears_whole(tmp_path, existed):
    path = tmp_path / "deep" / "new"
    if existed:
        path.mkdir(parents=True)
    with new_folder(path) as temporary:
        (temporary / "sub").mkdir()
        (temporary / "sub" / "a").write_text("a")
        assert names(path) == [] if existed else not path.exists()
    assert (path / "sub" / "a").read_text() == "a"
    assert names(path.parent) == ["new"]


def test_an_exception_leaves_no_folder(tmp_path):
    path = tmp_path / "new"
    with pytest.raises(KeyboardInterrupt), new_folder(path) as temporary:
        (temporary / "a").write_text("a")
        raise KeyboardInterrupt
    assert names(tmp_path) == []


@pytest.mark.parametrize("kind", ["file", "full folder", "dangling link", "pipe"])
def test_new_folder_refuses_what_is_there(tmp_path, kind):
    path = tmp_path / "new"
    if kind == "file":
        path.write_text("x")
    elif kind == "full folder":
        path.mkdir()
        (path / ".hidden").write_text("x")
    elif kind == "dangling link":
        path.symlink_to(tmp_path / "nowhere")
    else:
        os.mkfifo(path)
    with pytest.raises(InputError, match="new exists and is not an empty folder: choose another place") as caught:
        new_folder(path).__enter__()
    assert len(str(caught.value).splitlines()) == 1
    assert names(tmp_path) == ["new"]


def test_new_folder_that_someone_filled_meanwhile_is_not_overwritten(tmp_path):
    path = tmp_path / "new"
    with pytest.raises(InputError), new_folder(path) as temporary:
        (temporary / "mine").write_text("x")
        path.mkdir()
        (path / "theirs").write_text("x")
    assert names(tmp_path) == ["new"]
    assert names(path) == ["theirs"]


def test_the_current_folder_can_be_the_new_one(tmp_path, monkeypatch):
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    with new_folder(".") as temporary:
        (temporary / "a").write_text("x")
    assert names(place) == ["a"]


def test_sync_folder_accepts_a_folder_and_refuses_none(tmp_path):
    sync_folder(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "none")


KILLED_WRITER = """
import sys
from pathlib import Path
from hce.files import new_folder, open_atomically
place = Path(sys.argv[1])
print("ready", flush=True)
number = 0
while True:
    number += 1
    with open_atomically(place / "file") as file:
        for _ in range(200):
            file.write(f"{number}\\n" * 20)
            file.flush()
    with new_folder(place / f"folder{number}") as folder:
        for name in "abcdef":
            (folder / name).write_text("whole")
"""


@pytest.mark.parametrize("seconds", [0.05, 0.11, 0.23])
def test_kill_leaves_old_or_new_but_never_half(tmp_path, seconds):
    process = subprocess.Popen([sys.executable, "-c", KILLED_WRITER, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"ready\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(seconds)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    visible = [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
    for path in visible:
        if path.is_dir():
            assert [(file.name, file.read_text()) for file in sorted(path.iterdir())] == [
                (n, "whole") for n in "abcdef"
            ]
        else:
            lines = path.read_text().splitlines()
            assert len(lines) == 4000
            assert len(set(lines)) == 1


def test_kill_between_writing_and_renaming_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    code = (
        "import os, signal, sys\nfrom hce.files import open_atomically\n"
        "with open_atomically(sys.argv[1]) as file:\n"
        "    file.write('half')\n    file.flush()\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, str(path)], check=False, timeout=60)
    assert result.returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    assert [name for name in names(tmp_path) if not name.startswith(".")] == ["a.txt"]


def test_what_write_json_wrote_is_read(tmp_path):
    write_json(tmp_path / "a.json", {"é": [1, float("nan")], "b": float("inf")})
    assert read_json(tmp_path / "a.json") == {"é": [1, None], "b": None}  # JSON has no NaN
    write_json(tmp_path / "list.json", [["star", "red"]])
    assert read_json_value(tmp_path / "list.json") == [["star", "red"]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1', r"a\.json: damaged \(Expecting"),
        (b"\xff\xfe", r"a\.json: damaged \("),
        (b"[" * 100_000, r"a\.json: damaged \("),
        (b"[1]", "a JSON list where an object should be"),
        (None, r"a\.json: cannot be read \(No such file or directory\)"),
    ],
)
def test_damaged_json_is_one_line(tmp_path, content, message):
    if content is not None:
        (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(FormatError, match=message) as caught:
        read_json(tmp_path / "a.json")
    assert len(str(caught.value).splitlines()) == 1


def test_unfinished_work_is_told_by_what_it_belongs_to(tmp_path):
    assert unfinished(tmp_path / "model") == tmp_path / "model.unfinished"
    wanted = {"corpus": "a", "seed": 1}
    assert other_identity(wanted, {"corpus": "a", "seed": 1, "more": 2}) is None
    assert other_identity(wanted, {"corpus": "b", "seed": 2}) == "corpus"
    assert other_identity(wanted, {"corpus": "a"}) == "seed"


@pytest.mark.parametrize(("name", "opened"), [("a.txt", open), ("a.txt.GZ", gzip.open)])
def test_text_is_compressed_where_the_name_says_so(tmp_path, name, opened):
    with open_text(tmp_path / name) as file:
        file.write("né\r\n")
    with opened(tmp_path / name, "rb") as file:
        assert file.read() == "né\r\n".encode()
    assert names(tmp_path) == [name]


def test_what_libraries_write_gets_the_permissions_of_a_plain_open(tmp_path):
    old = os.umask(0o002)
    try:
        with new_folder(tmp_path / "folder") as folder:
            (folder / "file").touch(0o600)  # as safetensors and tantivy do
            (folder / "sub").mkdir(0o700)
            (folder / "sub" / "file").touch(0o600)
            (folder / "link").symlink_to(tmp_path / "nowhere")
            folder.chmod(0o700)  # as shutil.copytree does
    finally:
        os.umask(old)
    assert mode_of(tmp_path / "folder") == mode_of(tmp_path / "folder" / "sub") == 0o775
    assert mode_of(tmp_path / "folder" / "file") == mode_of(tmp_path / "folder" / "sub" / "file") == 0o664


WORKER = """
import os, sys, time
from pathlib import Path
from hce.files import new_folder, open_atomically
place = Path(sys.argv[1])
with new_folder(place / "folder") as folder, open_atomically(place / "file") as file:
    (folder / "large").write_text("x")
    print("ready", flush=True)
    sys.stdin.readline()
"""


def worker(place):
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


def write_again(place):
    for target in (place / "folder", place / "file"):
        if target.is_dir():
            target.rmdir()
    with new_folder(place / "folder"), open_atomically(place / "file"):
        pass


def test_what_a_killed_process_left_is_deleted_by_the_next(tmp_path):
    killed = worker(tmp_path)
    killed.kill()
    killed.communicate()
    alike = [".folder.0123abcd.partial.txt", ".folder.mine.partial", ".folder2.0123abcd.partial", "folder.partial"]
    for name in alike:  # another's
        (tmp_path / name).mkdir()
    assert len(names(tmp_path)) == 6
    write_again(tmp_path)
    assert names(tmp_path) == sorted([*alike, "file", "folder"])


def test_what_a_living_process_writes_is_left_alone(tmp_path):
    living = worker(tmp_path)
    before = names(tmp_path)
    write_again(tmp_path)
    (tmp_path / "folder").rmdir()
    (tmp_path / "file").unlink()
    assert names(tmp_path) == before
    living.communicate("\n")
    assert living.returncode == 0
    assert names(tmp_path) == ["file", "folder"]
    assert names(tmp_path / "folder") == ["large"]


def test_a_neighbour_that_was_taken_for_stale_before_it_was_locked_is_made_again(tmp_path, monkeypatch):
    made_and_locked, taken = files._made_and_locked, []

    def and_taken(make):
        path = make()
        if not taken:
            taken.append(path)
            files.delete_stale([path])
        return path

    monkeypatch.setattr(files, "_made_and_locked", lambda make: made_and_locked(lambda: and_taken(make)))
    with new_folder(tmp_path / "folder") as folder:
        (folder / "a").write_text("x")
    assert len(taken) == 1
    assert names(tmp_path / "folder") == ["a"]
    assert names(tmp_path) == ["folder"]


def test_a_scratch_folder_is_deleted_with_its_object_and_by_no_fork(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / "hce-test-left"
    left.mkdir()
    (tmp_path / "hce-test-link").symlink_to(tmp_path)
    scratch = files.ScratchFolder("hce-test-")
    assert not left.exists()
    (scratch.path / "a").write_text("x")
    child = os.fork()
    if child == 0:
        del scratch
        os._exit(0)
    os.waitpid(child, 0)
    assert names(scratch.path) == ["a"]
    other = files.ScratchFolder("hce-test-")
    assert scratch.path.is_dir()
    del scratch, other
    assert names(tmp_path) == ["hce-test-link"]


def test_a_folder_disappears_whole(tmp_path, monkeypatch):
    """Killed in the middle, what is left lies under another name, and the next deletion takes it along."""
    folder = tmp_path / "run.unfinished"
    (folder / "state-0").mkdir(parents=True)
    (folder / "LAST").write_text("state-0")
    monkeypatch.setattr("hce.files._delete", lambda path: None)  # as if killed before it
    delete_whole(folder)
    assert not folder.exists()
    (left,) = tmp_path.iterdir()
    assert (left / "LAST").is_file()
    monkeypatch.undo()
    delete_whole(folder)  # is not there
    assert names(tmp_path) == []
    folder.mkdir()
    delete_whole(folder)
    assert names(tmp_path) == []
