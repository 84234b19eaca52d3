"""Bench: where the systems of a comparison are run one at a time, and their results kept.

Each finished system is a file of its own and not run again; a training run that was killed goes on from its last
checkpoint. A file is named after everything that its figures depend on, so that nothing stale is ever shown: other
settings, other data or another version of this program give it another name.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from hce.atomic import write_json
from hce.baselines.base import Task
from hce.baselines.systems import SYSTEMS
from hce.comparing.comparison import Result
from hce.data.judgments import Dataset
from hce.errors import FormatError, InputError
from hce.evaluation.evaluate import Ranked, Searcher, evaluate


class Finished(NamedTuple):
    """A system's result, and whether it was there already."""

    result: Result
    cached: bool


class Bench:
    """Where systems are run one at a time, and their results kept.

    Args:
        folder: of the results.
        dataset: what is measured on.
        task: what every system is given.
        identity: what all results depend on.
        measures: names.
    """

    def __init__(
        self, folder: Path, dataset: Dataset, task: Task, identity: dict[str, Any], measures: tuple[str, ...]
    ) -> None:
        self.folder = folder / "results"
        self.dataset = dataset
        self.task = task
        self.identity = identity
        self.measures = measures
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{folder}: cannot be made a folder ({error.strerror}); choose another place") from error

    def result(self, name: str, seed: int, *, progress: bool) -> Finished:
        """The kept result of a system, or a new one."""
        identity = {**self.identity, "system": name, "seed": seed}
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
        path = self.folder / f"{name}-{seed}-{key}.json"
        if path.is_file():
            return Finished(_read(path), cached=True)
        work = path.with_suffix(".unfinished")
        result = self._run(name, seed, work, progress=progress)
        write_json(path, {"identity": identity, "result": asdict(result)})
        shutil.rmtree(work, ignore_errors=True)
        return Finished(result, cached=False)

    def _run(self, name: str, seed: int, work: Path, *, progress: bool) -> Result:
        work.mkdir(exist_ok=True)
        recipe = replace(self.task.recipe, seed=seed)
        built = SYSTEMS[name].build(replace(self.task, recipe=recipe, folder=work, progress=progress))
        timed = _Timed(built.searcher)
        report = evaluate(timed, self.dataset.queries, self.dataset.qrels, self.measures)
        return Result(
            system=name,
            seed=seed,
            per_query=report.per_query,
            training_seconds=round(built.training_seconds, 3),
            indexing_seconds=round(built.indexing_seconds, 3),
            search_ms=round(1000 * timed.seconds / max(1, timed.queries), 4),
            index_bytes=built.index_bytes,
            facts=dict(built.facts),
        )


class _Timed:
    """A searcher with a watch."""

    def __init__(self, searcher: Searcher) -> None:
        self.searcher = searcher
        self.seconds, self.queries = 0.0, 0

    def search(self, queries: Sequence[str], k: int) -> Sequence[Sequence[Ranked]]:
        start = time.perf_counter()
        found = self.searcher.search(queries, k)
        self.seconds += time.perf_counter() - start
        self.queries += len(queries)
        return found


def _read(path: Path) -> Result:
    try:
        return Result(**json.loads(path.read_text(encoding="utf-8"))["result"])
    except (ValueError, TypeError, KeyError) as error:
        raise FormatError(
            f"{path} is no result of a comparison ({error}); delete it to run that system again"
        ) from error
