"""How a device is believed to run the units of several models at once: who may begin, who is slowed, what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cotenant.errors import InvalidValueError


class Admission(StrEnum):
    """When a unit may begin beside others."""

    WHOLE = "whole"
    """When all that it needs is free. Source: GACER, Eq. 1."""
    FILL = "fill"
    """At once: its blocks fill what is free, and it runs at that share of its speed."""


class Issuing(StrEnum):
    """Which threads of the host issue launches. They run ahead of the device, and stop at barriers alone."""

    STREAM = "stream"
    """One for each stream, those of chunks too."""
    MEMBER = "member"
    """One for each model, which issues the chunks of a unit one after another."""
    ALL = "all"
    """One for all models, a unit of each in turn."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What is believed of a device, beside the tables of its models. Times in ns, from 0.

    `launch_ns` is what the host takes to issue a launch, `gap_ns` what lies between two units of a stream, `barrier_ns`
    what a barrier of the host costs when all have come to it (T_SW of GACER, Eq. 8), `event_ns` what a wait on the
    device costs, and so the beginning and the end of a chunk beside the first. Units slow each other down where they
    ask for more operations or bytes a second than there are, shared max-min, if `shares_rates`: GACER has no such
    thing, and with needs that are achieved warps and without it this is the paper's model, in which units may run
    faster than the device can compute. `keeps_slots` is for the lanes of a processor: a stream that has begun keeps the
    slots of the unit with which it began until its next wait or barrier, or the beginning or end of a chunk.
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
