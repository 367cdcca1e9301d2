"""Scheduling policies: pure functions from a snapshot to a decision."""

from __future__ import annotations

from cotenant.policies.edf import Edf
from cotenant.policies.fcfs import Fcfs
from cotenant.policies.listed import ListPolicy
from cotenant.policies.sjf import Sjf

POLICIES: dict[str, type[ListPolicy]] = {"fcfs": Fcfs, "sjf": Sjf, "edf": Edf}
"""Policies by the name that configuration and the command line use."""
