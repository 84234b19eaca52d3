"""Strangers: an index or a model in which links, pipes and devices take the places of files and folders.

Each place is replaced in turn, and every command is run: none may hang or end in a traceback, and nothing outside may
be read, listed, written or deleted. inotify watches what is outside. A link may lead to a copy of what it replaces:
without a watch, following it would go unnoticed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hce.index.index import Index
from hce_lab.benchmarks.torture import children
from hce_lab.benchmarks.torture.damage import _live_on
from hce_lab.benchmarks.torture.samples import Samples, documents_of, tiny_transformer
from hce_lab.benchmarks.torture.tally import WRONG, Tally

# Whatever inotify tells but that a file was closed: reading, writing, listing, deleting, changing rights.
WATCHED = 0x0001 | 0x0002 | 0x0004 | 0x0020 | 0x0040 | 0x0080 | 0x0100 | 0x0200 | 0x0400 | 0x0800
KINDS = ("a copy", "the other kind", "a pipe", "a device", "itself", "no link but a pipe", "no link but a device")
ABSENT = (  # what is not there, and would be read or written where it was
    *("documents.sqlite-wal", "documents.sqlite-shm", "documents.sqlite-journal", "milvus.json", "map.safetensors"),
    *("untrained.safetensors", "passages", "model", "README.md"),
)


class Watch:
    """What happens to a folder and all below it, from now on."""

    def __init__(self, folder: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._paths: dict[int, Path] = {}
        for path in (folder, *folder.rglob("*")):
            number = self._libc.inotify_add_watch(self._file, os.fsencode(path), WATCHED)
            self._paths[number] = path

    def seen(self) -> list[str]:
        """Return what has happened since the last call, a line each."""
        lines = []
        try:
            while found := os.read(self._file, 1 << 16):
                at = 0
                while at < len(found):
                    number, mask, _, length = struct.unpack_from("iIII", found, at)
                    name = found[at + 16 : at + 16 + length].rstrip(b"\0").decode(errors="replace")
                    lines.append(f"{self._paths[number]}/{name}: {mask:#x}")
                    at += 16 + length
        except BlockingIOError:
            return lines
        return lines

    def close(self) -> None:
        """Watch no more."""
        os.close(self._file)


def places(whole: Path) -> list[Path]:
    """Return the path of each file and folder of an index or a model, and of what could be there."""
    there = sorted(path.relative_to(whole) for path in whole.rglob("*"))
    return there + [Path(name) for name in ABSENT if not (whole / name).exists()]


def commands(path: Path, *, is_index: bool) -> list[list[str]]:
    """Return the commands that open an index or a model."""
    extra = path.parent / "extra.jsonl"
    extra.write_text('{"_id": "extra", "text": "w1 w2 star"}\n')
    if not is_index:
        out = str(path.parent / "new")
        return [
            *(["check", str(path)], ["report", str(path), "-o", f"{out}.html"], ["tree", str(path)]),
            *(["index", str(extra), "-m", str(path), "-o", out], ["check", str(path), "--repair"]),
        ]
    return [
        *(["search", str(path), "w1"], ["search", str(path), "star", "--mode", "words"], ["status", str(path)]),
        *(["check", str(path)], ["check", str(path), "--repair"], ["tree", str(path)], ["rebuild", str(path)]),
        *(["add", str(path), str(extra)], ["add", str(path), str(extra), "--update"], ["remove", str(path), "d1"]),
        *(
            ["reindex", str(path), "-m", "static"],
            ["reindex", str(path), "--undo"],
            ["serve", str(path), "--port", "0"],
        ),
        ["index", str(path), "-o", str(path.parent / "new")],
    ]


@contextmanager
def replaced(whole: Path, place: Path, kind: str) -> Iterator[Watch]:
    """Put a link, a pipe or a device in the place of a file or folder; yield what watches outside."""
    path = whole / place
    outside = Path(tempfile.mkdtemp(prefix="outside-", dir=whole.parent))
    kept = outside.with_name(f"{outside.name}.kept") if path.exists() else None
    target = _target(path, outside, kind)
    if kept is not None:
        path.rename(kept)
    if kind == "no link but a pipe":
        os.mkfifo(path)
    elif kind == "no link but a device":
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero
    else:
        path.symlink_to(target)
    watch = Watch(outside)
    try:
        yield watch
    finally:
        watch.close()
        if _is_strange(path):
            path.unlink()
        if kept is not None and not os.path.lexists(path):
            kept.rename(path)
        shutil.rmtree(outside)


def _is_strange(path: Path) -> bool:
    """Return whether what was put into a place is there still."""
    return path.is_symlink() or path.is_fifo() or path.is_char_device()


def _target(path: Path, outside: Path, kind: str) -> str:
    """Make what a link leads to."""
    photos = outside / "photos"
    for name in ("2019", "000000000003", ".000000000003.0123abcd.partial"):
        (photos / name).mkdir(parents=True)
        (photos / name / "summer.jpg").write_text("a photo")
    (outside / "secret").write_text("a secret")
    if kind == "a copy":
        if path.is_dir():
            shutil.copytree(path, photos, dirs_exist_ok=True)
            return str(photos)
        if path.exists():
            shutil.copyfile(path, outside / "secret")
        return str(outside / "secret")
    if kind == "the other kind":
        return str(outside / "secret" if path.is_dir() else photos)
    if kind == "a pipe":
        os.mkfifo(outside / "pipe")
        return str(outside / "pipe")
    return "/dev/zero" if kind == "a device" else path.name


def try_place(tally: Tally, whole: Path, place: Path, kind: str, chosen: list[list[str]], *, is_index: bool) -> None:
    """Replace one place in one way, and run some commands."""
    name = f"links in {'an index' if is_index else 'a model'} ({whole.name})" if is_index else "links in a model"
    with replaced(whole, place, kind) as watch:
        for arguments in chosen:
            tally.count(name)
            ending = children.command(*arguments)
            what = f"{place} as {kind}, hce {' '.join(arguments)}"
            if ending.fault:
                tally.fault(name, ending.fault[0], f"{what}: {ending.fault[1]}")
            elif is_index and ending.code != 1:
                tally.fault(name, WRONG, f"{what}: not refused: {ending.said}")
            if seen := watch.seen():
                tally.fault(name, WRONG, f"{what}: outside, {', '.join(seen[:5])}")
            if not _is_strange(whole / place):
                tally.fault(name, WRONG, f"{what}: what stood there is gone")


def run(tally: Tally, samples: Samples, folder: Path, count: int, seed: int) -> None:
    """Replace each place of an index, of a reindexed one and of a model in each way, with so many commands each."""
    index, reindexed, model = (folder / "strange" / name for name in ("index", "reindexed", "model"))
    Index.create(index, documents_of(samples.contents), tiny_transformer(folder / "strange"), "grow").close()
    children.child(lambda: _live_on(index))
    shutil.copytree(samples.index, reindexed)
    children.child(lambda: _live_on(reindexed))
    with Index.open(reindexed) as opened:
        opened.reindex(samples.model)
    shutil.copytree(samples.model, model)
    for whole in (index, reindexed, model) if count else ():
        walk(tally, whole, is_index=whole is not model, each=count, first=seed)


def walk(tally: Tally, whole: Path, *, is_index: bool, each: int, first: int = 0, every: int = 1) -> None:
    """Try every so-manyth place in all ways, with so many commands each, in turn."""
    known = commands(whole, is_index=is_index)
    kinds = KINDS if os.geteuid() == 0 else KINDS[:-1]  # others may not make devices
    chosen = [(place, kind) for place in places(whole) for kind in kinds][first % every :: every]
    for number, (place, kind) in enumerate(chosen):
        some = [known[(first + number * each + more) % len(known)] for more in range(min(each, len(known)))]
        try_place(tally, whole, place, kind, some, is_index=is_index)
