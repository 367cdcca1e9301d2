"""The cost model of a device that runs units of several models at once: admission, issuing, contention and
overheads."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cotenant.errors import InvalidValueError


class Admission(StrEnum):
    """When a unit may start beside others."""

    WHOLE = "whole"
    """When its whole need is free. Source: GACER, Eq. 1."""
    FILL = "fill"
    """At once: its blocks fill the free slots, and its speed is that share of its need."""


class Issuing(StrEnum):
    """Which host threads issue launches. They run ahead of the device, and stop only at barriers."""

    STREAM = "stream"
    """One for each stream, with those of chunks."""
    MEMBER = "member"
    """One for each model; it issues the chunks of a unit one after another."""
    ALL = "all"
    """One for all models; it issues one unit of each in turn."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """The cost model of a device, beside the tables of its models. Times in ns, from 0.

    - `launch_ns`: host time of a launch. `gap_ns`: time between two units of a stream.
    - `barrier_ns`: cost of a host barrier after the last member has arrived (T_SW of GACER, Eq. 8).
    - `event_ns`: cost of a wait on the device, and of the start and the end of each further chunk.
    - `shares_rates`: units that together need more operations or bytes per second than the device has share them
      max-min fairly. GACER has no such limit: without it, and with achieved warps as needs, this is the paper's model.
      Units may then exceed the peak of the device.
    - `keeps_slots`: for CPU lanes. A stream keeps the slots of its first unit until its next wait or barrier, or the
      start or end of a chunk.
    """

    launch_ns: int
    gap_ns: int
    barrier_ns: int
    event_ns: int
    admission: Admission = Admission.WHOLE
    issuing: Issuing = Issuing.STREAM
    shares_rates: bool = True
    keeps_slots: bool = False

    def __post_init__(self) -> None:
        for name in ("launch_ns", "gap_ns", "barrier_ns", "event_ns"):
            if getattr(self, name) < 0:
                raise InvalidValueError("occupancy", name, getattr(self, name), "at least 0")
        if self.keeps_slots and self.admission is Admission.FILL:
            raise InvalidValueError("occupancy", "keeps_slots", True, "admission as a whole")
