"""The verdict on merging: whether queries of a model may run as one batch, and the evidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["proven", "tried", "trusted", "refused", "single"]


@dataclass(frozen=True, slots=True)
class Merging:
    """Whether queries may be merged. `reason` is a sentence for operators, "" for `single`.

    `proven`: the operators of the graph treat every row by itself. `tried`: a trial gave equal outputs alone and
    merged. `trusted`: the configuration says so, without a trial. `refused`: neither, so queries run alone. `single`:
    the configuration merges no queries (`max_batch` = 1).
    """

    verdict: Verdict
    reason: str = ""

    @property
    def is_allowed(self) -> bool:
        """Whether queries may be merged."""
        return self.verdict in ("proven", "tried", "trusted")

    @property
    def summary(self) -> str:
        """The verdict with its reason, in one line."""
        return f"{self.verdict}: {self.reason}" if self.reason else self.verdict


SINGLE = Merging("single")
