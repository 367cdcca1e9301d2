"""Measured latencies of groups, and the file that holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
from msgspec import structs

from cotenant.core.predictor import Group, Member
from cotenant.errors import CotenantError, InvalidValueError
from cotenant.files import decode, read_bytes, write_whole
from cotenant.work import Work

FORMAT = "cotenant-groups/1"


class SamplesError(CotenantError):
    """A file of samples cannot be used. The message names the file and the expected content."""


@dataclass(frozen=True, slots=True)
class GroupSample:
    """Measured latencies of one group: `runs_ns` are from its common start to the end of its last member.

    Raises InvalidValueError for a group without members, or without runs that took time.
    """

    members: Group
    runs_ns: tuple[int, ...]

    def __post_init__(self) -> None:
        names = [member.work.tenant for member in self.members]
        if not names:
            raise InvalidValueError("group sample", "members", names, "at least one")
        if not self.runs_ns or min(self.runs_ns) <= 0:
            raise InvalidValueError("group sample", "runs_ns", self.runs_ns, "positive latencies, at least one")

    @property
    def median_ns(self) -> float:
        """Median of the runs."""
        return float(median(self.runs_ns))


@dataclass(frozen=True, slots=True)
class SamplesHeader:
    """First line of a file of samples: device, time and command of the measurement.

    `digests` identify the model of each tenant as in the profile.
    """

    fingerprint: str
    created: str
    command: str
    digests: dict[str, str]
    format: str = FORMAT


def save_samples(path: Path, header: SamplesHeader, samples: Sequence[GroupSample]) -> None:
    """Write one JSON line for the header and one a sample, atomically."""
    lines = [
        _Line(tuple((*structs.astuple(work)[:5], size) for work, size in each.members), each.runs_ns)
        for each in samples
    ]
    write_whole(path, b"".join(msgspec.json.encode(line) + b"\n" for line in (header, *lines)))


def load_samples(path: Path) -> tuple[SamplesHeader, list[GroupSample]]:
    """Read a file of `save_samples`. Raises SamplesError for other content."""
    hint = "make it with 'cotenant profile --groups'"
    first, *lines = read_bytes(path, SamplesError, hint).splitlines() or [b""]
    hint = f"remove it and {hint}"
    header = decode(first, SamplesHeader, f"{path}, line 1", SamplesError, hint, FORMAT)
    return header, [
        decode(line, _Line, f"{path}, line {number}", SamplesError, hint).sample()
        for number, line in enumerate(lines, 2)
    ]


class _Line(msgspec.Struct):
    """A sample in the file: tenant, shape, rows, first unit, end and cores of each member."""

    members: tuple[tuple[str, int, int, int, int, int], ...]
    runs_ns: tuple[int, ...]

    def __post_init__(self) -> None:
        self.sample()

    def sample(self) -> GroupSample:
        return GroupSample(tuple(Member(Work(*each[:5]), each[5]) for each in self.members), self.runs_ns)
