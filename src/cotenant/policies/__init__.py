"""Scheduling policies: pure functions from a snapshot to a decision."""

from __future__ import annotations

from cotenant.policies.clockwork import Clockwork
from cotenant.policies.edf import Edf
from cotenant.policies.fcfs import Fcfs
from cotenant.policies.listed import ListPolicy
from cotenant.policies.overlap import Overlap
from cotenant.policies.sjf import Sjf

AnyPolicy = ListPolicy | Overlap

POLICIES: dict[str, type[ListPolicy] | type[Overlap]] = {
    "fcfs": Fcfs,
    "sjf": Sjf,
    "edf": Edf,
    "clockwork": Clockwork,
    "overlap": Overlap,
}
"""Policies by the name that configuration and the command line use."""
