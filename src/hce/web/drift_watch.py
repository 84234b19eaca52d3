"""DriftWatch: the drift verdict of an index, measured in the background, since it takes seconds."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from threading import Lock, Thread
from typing import Any

from hce.errors import HceError
from hce.index import Index
from hce.web.inside import reading

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DriftState:
    """What is known of the drift.

    Attributes:
        state: measuring, done, or off.
        verdict: ok, re-cluster, retrain or unknown, of the last measurement.
        reasons: why, one sentence each.
        outdated: whether documents were written since.
    """

    state: str
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
        self._busy = False

    def now(self) -> DriftState:
        """The last verdict; a newer one is measured in the background if documents were written since."""
        measure: Any = getattr(self.index, "drift", None)
        if measure is None:
            return DriftState("off", reasons=("this version does not measure it",))
        with reading(self.index) as reader:
            change = reader.state().change
        with self._lock:
            outdated = self._measured_at != change
            if outdated and not self._busy:
                self._busy = True
                Thread(target=self._measure, args=(measure, change), name="drift", daemon=True).start()
            state = "measuring" if outdated else self._state.state
            return DriftState(state, self._state.verdict, self._state.reasons, outdated)

    def _measure(self, measure: Any, change: int) -> None:
        try:
            drift = measure()
            found = DriftState("done", drift.verdict, tuple(drift.reasons))
        except HceError as error:
            found = DriftState("done", reasons=(str(error),))
        except Exception:
            logger.exception("the drift could not be measured")
            found = DriftState("done", reasons=("it could not be measured; the server's log says why",))
        with self._lock:
            self._state, self._measured_at, self._busy = found, change, False
