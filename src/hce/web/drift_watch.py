"""DriftWatch: the drift verdict of an index, measured in the background, since it takes seconds."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from threading import Lock, Thread
from typing import Literal

from hce.errors import HceError
from hce.index.index import Index

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DriftState:
    """What is known of the drift.

    Attributes:
        state: measuring, or done.
        verdict: ok, re-cluster, retrain or unknown, of the last measurement.
        reasons: why, one sentence each.
        outdated: whether documents were written since.
    """

    state: Literal["measuring", "done"]
    verdict: str = "unknown"
    reasons: tuple[str, ...] = ()
    outdated: bool = False


class DriftWatch:
    """Measures at most once for each state of the documents, and only when somebody asks."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._lock = Lock()
        self._measured_at = -1
        self._state = DriftState("measuring")
        self._thread: Thread | None = None

    def now(self) -> DriftState:
        """The last verdict; a newer one is measured in the background if documents were written since."""
        with self.index.reading() as reader:
            change = reader.state().change
        with self._lock:
            outdated = self._measured_at != change
            if outdated and self._thread is None:
                self._thread = Thread(target=self._measure, args=(change,), name="drift", daemon=True)
                self._thread.start()
            return replace(self._state, state="measuring" if outdated else "done", outdated=outdated)

    def stop(self) -> None:
        """Wait for a measurement under way, though not for ever."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout=10)

    def _measure(self, change: int) -> None:
        try:
            drift = self.index.drift()
            found = DriftState("done", drift.verdict, tuple(drift.reasons))
        except HceError as error:
            found = DriftState("done", reasons=(str(error),))
        except Exception:
            logger.exception("the drift could not be measured")
            found = DriftState("done", reasons=("it could not be measured; the server's log says why",))
        with self._lock:
            self._state, self._measured_at, self._thread = found, change, None
