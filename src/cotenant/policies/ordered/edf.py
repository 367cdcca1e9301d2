"""Earliest deadline first within a priority level of tenants (Liu and Layland, 1973)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cotenant.policies.ordered.listed import ListPolicy


@dataclass(frozen=True, slots=True)
class Edf(ListPolicy):
    """Key: (priority, deadline, number). With `preempt`, the choice is repeated at boundaries inside a batch."""

    preempt: bool = True

    name: ClassVar[str] = "edf"
