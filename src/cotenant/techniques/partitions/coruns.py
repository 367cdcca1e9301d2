"""Measured co-runs of a repository, and their file beside its profile.

A co-run compares two loops of a target: beside looping co-runners, each in its own partition, and alone in the same
minute. `measure.corun_measure` measures co-runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from cotenant.errors import InvalidValueError
from cotenant.files import load, save
from cotenant.profiles.device import Device
from cotenant.profiles.profile_file import ProfileError

FORMAT = "cotenant-coruns/1"
ANTAGONIST = "(antagonist)"
"""Name of the co-runner that only copies memory; its batch is its number of cores."""
QUANTILES = ("p50", "p95")


CoRunner = tuple[str, int, int]
"""Model, batch, and size of its partition (percent of a GPU, cores of a CPU)."""


@dataclass(frozen=True, slots=True)
class CoRun:
    """One measured slowdown: `factor` is the latency of `target` beside `others` over that alone, in one partition.

    Raises InvalidValueError without others, or for a factor that is not positive.
    """

    target: CoRunner
    others: tuple[CoRunner, ...]
    factor: float

    def __post_init__(self) -> None:
        where = f"co-run of {self.target}"
        if not self.others:
            raise InvalidValueError(where, "others", self.others, "at least one co-runner")
        if not (isfinite(self.factor) and self.factor > 0):
            raise InvalidValueError(where, "factor", self.factor, "a positive finite number")
        for model, batch, size in (self.target, *self.others):
            if batch < 1 or size < 1:
                raise InvalidValueError(where, f"batch and size of {model!r}", (batch, size), "numbers from 1")


@dataclass(frozen=True, slots=True)
class Timed:
    """Latency quantiles of `runs` launches; `p95_ns` is the longest where they are too few (`highest_quantile`)."""

    p50_ns: int
    p95_ns: int
    runs: int


@dataclass(frozen=True, slots=True)
class CoRunRow:
    """Latencies of a target (tenant, batch, size of its partition) beside `others`, and alone in the same minute.

    `chosen`: why it was measured: "antagonist", "active" (largest information gain) or "random" (held out for tests).
    Raises InvalidValueError without others, and for latencies that are not positive.
    """

    target: CoRunner
    others: tuple[CoRunner, ...]
    alone: Timed
    beside: Timed
    chosen: str

    def __post_init__(self) -> None:
        for timed in (self.alone, self.beside):
            if min(timed.p50_ns, timed.p95_ns, timed.runs) < 1:
                raise InvalidValueError(f"co-run of {self.target}", "latencies and runs", timed, "positive numbers")
        self.corun()

    def corun(self, quantile: str = "p50") -> CoRun:
        """Its slowdown at one of QUANTILES: that quantile beside the others over the same quantile alone."""
        beside, alone = (getattr(timed, f"{quantile}_ns") for timed in (self.beside, self.alone))
        return CoRun(self.target, self.others, beside / alone)


@dataclass(frozen=True, slots=True)
class CoRunProfile:
    """All co-runs of one repository on one device. `digests`: model of each tenant, as in the profile.

    A measurement of k concurrent launches has k consecutive rows.
    """

    device: Device
    created: str
    command: str
    digests: dict[str, str]
    rows: tuple[CoRunRow, ...]
    format: str = FORMAT

    def still_valid(self, digests: Mapping[str, str]) -> tuple[CoRunRow, ...]:
        """The rows of models that have not changed."""
        same = [name for name, digest in self.digests.items() if digests.get(name) == digest]
        same.append(ANTAGONIST)
        return tuple(row for row in self.rows if all(key[0] in same for key in (row.target, *row.others)))


def save_coruns(path: Path, found: CoRunProfile) -> None:
    """Write co-runs atomically."""
    save(path, found)


def load_coruns(path: Path) -> CoRunProfile:
    """Read a file of `save_coruns`. Raises ProfileError for other files."""
    return load(path, CoRunProfile, FORMAT, ProfileError, "make it with 'cotenant profile --corun'")


def runs_of(rows: Sequence[CoRunRow]) -> list[tuple[CoRunRow, ...]]:
    """The rows, grouped by measurement."""
    found: list[tuple[CoRunRow, ...]] = []
    at = 0
    while at < len(rows):
        launches = sorted((rows[at].target, *rows[at].others))
        end = at + 1
        while (
            end < len(rows)
            and end - at < len(launches)
            and sorted((rows[end].target, *rows[end].others)) == launches
            and rows[end].chosen == rows[at].chosen
        ):
            end += 1
        found.append(tuple(rows[at:end]))
        at = end
    return found
