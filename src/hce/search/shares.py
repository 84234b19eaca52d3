"""Shares: how much each part of a search counts, and the evidence that they were chosen by.

`hce.training.calibration` chooses them; models and indexes keep them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from hce.errors import FormatError

Kind = Literal["labeled", "written", "cut", "titles"]


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


@dataclass(frozen=True)
class Calibration:
    """The shares that were chosen, and what they were chosen by.

    Attributes:
        shares: what was chosen.
        kind: of the questions, see `hce.training.questions.Questions`; None if there were none.
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
