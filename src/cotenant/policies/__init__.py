"""Scheduling policies: pure functions from a snapshot to a decision."""

from __future__ import annotations

from cotenant.policies.clockwork import Clockwork
from cotenant.policies.duty_cycle import DutyCycle
from cotenant.policies.edf import Edf
from cotenant.policies.fcfs import Fcfs
from cotenant.policies.listed import ListPolicy
from cotenant.policies.overlap import Overlap
from cotenant.policies.sjf import Sjf

AnyPolicy = ListPolicy | Overlap | DutyCycle

POLICIES: dict[str, type[ListPolicy] | type[Overlap] | type[DutyCycle]] = {
    "fcfs": Fcfs,
    "sjf": Sjf,
    "edf": Edf,
    "clockwork": Clockwork,
    "overlap": Overlap,
    "duty_cycle": DutyCycle,
}
"""Policies by the name that configuration and the command line use."""
