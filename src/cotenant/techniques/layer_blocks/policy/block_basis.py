"""The facts on which a block policy based a launch, beside its predicted time."""

from __future__ import annotations

from msgspec import Struct


class BlockBasis(Struct, frozen=True, gc=False, omit_defaults=True):
    """The basis of a launch of a block.

    `headroom_ns` is the time that the launch leaves to its most urgent query. `wanted` is the size of the planned share
    if fewer slots were free; else 0. `pressure_pct` is the memory pressure, in percent, at which its time was
    predicted.
    """

    headroom_ns: int
    wanted: int = 0
    pressure_pct: int = 0
