"""Short ways to say launches and to play them in a world."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.core.actions import Launch
from cotenant.work import Share, Work
from cotenant.world.contention import ContentionWorld
from cotenant.world.simulated import TableWorld

CORE = tuple(Share((core,)) for core in range(4))


def launch(
    number: int, tenant: str, units: tuple[int, int] = (0, 1), partition: Share = CORE[0], items: int = 1
) -> Launch:
    return Launch(number, number, (number,), Work(tenant, 0, items, *units), True, partition, 1)


def ends(world: ContentionWorld | TableWorld, starts: Sequence[tuple[int, Launch]]) -> dict[int, int]:
    """Play starts (sorted by time) as a driver does; ends that come before them first."""
    found: dict[int, int] = {}

    def drain(until: int | None) -> None:
        while (at := world.next_ns()) is not None and (until is None or at <= until):
            number, error, expanded = world.pop()
            assert error is None
            assert not expanded
            found[number] = at

    for at, each in starts:
        drain(at)
        world.start(each, at)
    drain(None)
    assert world.next_ns() is None
    return found
