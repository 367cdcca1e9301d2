"""What a policy of blocks knew of a launch beside its predicted time."""

from __future__ import annotations

from msgspec import Struct


class BlockBasis(Struct, frozen=True, gc=False, omit_defaults=True):
    """The basis of a launch of a block.

    `headroom_ns` is what the launch left of the time of the batch's most urgent query. `wanted` is the size of the
    share that it was to have where fewer slots were free; 0 where it has what it was to have. `pressure_pct` is the
    pressure on the memory at which its time was predicted, in per cent.
    """

    headroom_ns: int
    wanted: int = 0
    pressure_pct: int = 0
