"""The tally: how many trials there were of what, and what went wrong in them."""

from __future__ import annotations

from collections import Counter

LOST, WRONG, TRACEBACK, HANG = "lost", "silently wrong", "tracebacks", "hangs"
FAULTS = (LOST, WRONG, TRACEBACK, HANG)
SHOWN = 5  # faults of one kind that are told in full
LONGEST = 1500  # characters of a fault


class Tally:
    """Counts of trials and of faults, by what was tried.

    Attributes:
        trials: of each thing that was tried.
        faults: by thing and kind.
        notes: what else is worth a line under the table.
    """

    def __init__(self) -> None:
        self.trials = Counter[str]()
        self.faults = Counter[tuple[str, str]]()
        self.notes: list[str] = []

    def count(self, tried: str, trials: int = 1) -> None:
        """Count trials."""
        self.trials[tried] += trials

    def fault(self, tried: str, kind: str, line: str) -> None:
        """Count a fault, and tell the first few."""
        self.faults[tried, kind] += 1
        if self.faults[tried, kind] <= SHOWN:
            print(f"{tried}: {kind}: {line[-LONGEST:]}", flush=True)

    def note(self, line: str) -> None:
        """Keep a line for under the table."""
        self.notes.append(line)

    @property
    def is_clean(self) -> bool:
        """Whether nothing went wrong, in one trial at least."""
        return not self.faults and bool(self.trials)

    def table(self) -> str:
        """Return what was tried and what came of it, a line each."""
        width = max(map(len, [*self.trials, "together"]))
        lines = [f"{'':{width}}  {'trials':>7}" + "".join(f"  {kind:>14}" for kind in FAULTS)]
        for tried, trials in self.trials.items():
            lines.append(self._line(tried, trials, [self.faults[tried, kind] for kind in FAULTS], width))
        sums = [sum(count for (_, which), count in self.faults.items() if which == kind) for kind in FAULTS]
        lines.append(self._line("together", self.trials.total(), sums, width))
        return "\n".join([*lines, *self.notes])

    @staticmethod
    def _line(name: str, trials: int, faults: list[int], width: int) -> str:
        return f"{name:{width}}  {trials:>7,}" + "".join(f"  {count:>14,}" for count in faults)
