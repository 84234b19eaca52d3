"""Shares: how much each part of a search counts, and the evidence that they were chosen by.

`hce.training.calibration` chooses them; models and indexes keep them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from hce.errors import FormatError

Kind = Literal["labeled", "written", "cut", "titles"]


ASKED = {
    "labeled": "held-out queries",
    "written": "remarks of programmers",
    "cut": "titles and first sentences cut out of documents",
    "titles": "titles cut out of documents",
}


class Shares(NamedTuple):
    """How much each part of a search counts, from 0 to 1; `hce.training.calibration` chooses them.

    Attributes:
        words: of BM25 in the sum of words and meaning.
        tokens: of late interaction in the order of the first hits.
        companions: of an encoder's companions in the cosine.
    """

    words: float
    tokens: float = 0.0
    companions: float = 0.0


FIXED = {"table": Shares(0.5), "transformer": Shares(0.25)}
"""Shares that were best on average, for a hybrid search without calibration: the rival to beat."""


@dataclass(frozen=True)
class Calibration:
    """The shares that were chosen, and what they were chosen by.

    Attributes:
        shares: what was chosen.
        kind: of the questions, see `hce.training.calibration.Questions`; None if there were none.
        asked: how many questions there were.
        ndcg: mean nDCG@10 on the questions, of vectors alone, of words alone, of both by the usual shares, and by the
            chosen shares after each part was added.
        interval: 95 % interval of the difference between the chosen search and the best of the simpler ones.
        curves: for each share the nDCG@10 by its values, the others as chosen.
    """

    shares: Shares
    kind: Kind | None = None
    asked: int = 0
    ndcg: dict[str, float] = field(default_factory=dict)
    interval: tuple[float, float] | None = None
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    @classmethod
    def read(cls, values: dict[str, Any]) -> Calibration:
        """Return a calibration from what `as_dict` gave.

        Raises:
            FormatError: it is damaged.
        """
        try:
            calibration = cls(**{**values, "shares": Shares(**values["shares"])})
            if all(0 <= share <= 1 for share in calibration.shares):
                return calibration
        except (TypeError, KeyError) as error:
            raise FormatError(f"'calibration' is damaged ({error})") from error
        raise FormatError(f"'calibration' has shares that are not between 0 and 1: {values['shares']}")

    def as_dict(self) -> dict[str, Any]:
        """Return the calibration for JSON."""
        return {**asdict(self), "shares": self.shares._asdict()}

    def summary(self) -> str:
        """Return the shares and what the search gains by them, in a sentence.

        >>> print(Calibration(Shares(0.35)).summary())
        words count 0.35 (usual: no questions could be cut out of the documents)
        >>> ndcg = {"vectors": 0.4, "words": 0.3, "both": 0.42, "+ words": 0.43}
        >>> for part in Calibration(Shares(0.25), "cut", 120, ndcg, (-0.01, 0.03)).summary().split(" by "):
        ...     print(part)
        nDCG@10 0.430 (vectors 0.400, words 0.300, both 0.420; 95 % of the gain over these: -0.010 to +0.030)
        120 titles and first sentences cut out of documents; words count 0.25
        """
        counted = ", ".join(f"{name} count {share:.2f}" for name, share in self.shares._asdict().items() if share)
        counted = counted or "vectors alone count"
        if self.kind is None or self.interval is None:
            return f"{counted} (usual: no questions could be cut out of the documents)"
        simple = ", ".join(f"{name} {self.ndcg[name]:.3f}" for name in ("vectors", "words", "both"))
        low, high = self.interval
        gain = f"; 95 % of the gain over these: {low:+.3f} to {high:+.3f}" if high > low else ""
        return f"nDCG@10 {self.value:.3f} ({simple}{gain}) by {self.asked} {ASKED[self.kind]}; {counted}"

    @property
    def value(self) -> float:
        """nDCG@10 of the chosen search."""
        return list(self.ndcg.values())[-1]
