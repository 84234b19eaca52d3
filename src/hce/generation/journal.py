"""Journal: the finished items of an unfinished run, a JSON line each, so that a kill costs the last few and no more."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hce.errors import FormatError, InputError


class Journal:
    """A file that grows by whole lines; the first one says which run it belongs to.

    Args:
        path: the file.
        identity: what tells this run from another.
    """

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path = path
        self.identity = identity

    def open(self) -> int:
        """Begin, or take up what is there; returns how many items are done.

        Raises:
            InputError: what is there is another run's, or nothing can be written there.
            FormatError: what is there is no journal.
        """
        if not self.path.exists():
            self.append([self.identity])
            return 0
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):  # a kill tore the last line off in its middle
            os.truncate(self.path, len(whole))
        if not whole:
            self.append([self.identity])
            return 0
        self._require_same(whole.partition(b"\n")[0])
        return whole.count(b"\n") - 1

    def append(self, items: Iterable[Any]) -> None:
        """Add items, and have them on the disk when it returns."""
        lines = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
        try:
            with self.path.open("ab") as file:
                file.write(lines.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written ({error.strerror}); check the folder") from error

    def items(self) -> Iterator[Any]:
        """The items that are done, in order."""
        with self.path.open(encoding="utf-8") as file:
            next(file)
            for line in file:
                yield json.loads(line)

    def remove(self) -> None:
        """The run is done."""
        self.path.unlink()

    def _require_same(self, first_line: bytes) -> None:
        try:
            found = dict(json.loads(first_line))
        except (ValueError, TypeError) as error:
            raise FormatError(f"{self.path} is not the journal of a run; move it away") from error
        for name, wanted in self.identity.items():
            if found.get(name) != wanted:
                raise InputError(
                    f"{self.path} holds an unfinished run with {name} {found.get(name)!r}, not {wanted!r}; "
                    "give the same settings to continue it, or delete it"
                )
