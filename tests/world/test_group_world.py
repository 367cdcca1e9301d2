"""Launches of a group take what is said of the group, all of them; others are left alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cotenant.core.actions import GroupBasis, Launch
from cotenant.core.predictor import Group
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.work import Share, Work
from cotenant.world.groups import GroupWorld
from cotenant.world.simulated import TableWorld, WorldEvent

MS = 1_000_000


class Doubled(TablePredictor):
    """A group takes its number of members times as long as its longest member."""

    def group_ns(self, groups: Sequence[Group]) -> list[int]:
        return [len(group) * max([self.latency_ns(*member) for member in group]) for group in groups]


TABLE = Doubled({name: LatencyTable((LatencyRow(0, 1, 1, ms * MS),)) for name, ms in (("a", 3), ("b", 5), ("c", 7))})


def launch(number: int, tenant: str, group: int) -> Launch:
    share = Share((number,))
    return Launch(number, number, (number,), Work(tenant, 0, 1, 0, 1), True, share, 1, basis=GroupBasis(group))


def ends(world: TableWorld) -> list[tuple[int, WorldEvent]]:
    made = []
    while (at := world.next_ns()) is not None:
        made.append((at, world.pop()))
    return made


def test_members_end_together_and_who_is_alone_by_himself() -> None:
    world = GroupWorld(TABLE)
    for number, (tenant, group) in enumerate([("a", 0), ("b", 0), ("c", 1)]):
        world.start(launch(number, tenant, group), 2 * MS)
    assert ends(world) == [(9 * MS, WorldEvent(2)), (12 * MS, WorldEvent(0)), (12 * MS, WorldEvent(1))]
    world.start(launch(3, "a", 2), 20 * MS)  # what has ended is of no group any more
    world.start(launch(4, "c", 3), 21 * MS)
    assert ends(world) == [(23 * MS, WorldEvent(3)), (28 * MS, WorldEvent(4))]


def test_groups_at_one_time_do_not_touch_each_other() -> None:
    world = GroupWorld(TABLE)
    for number, (tenant, group) in enumerate([("a", 0), ("a", 0), ("b", 1), ("b", 1), ("a", 1)]):
        world.start(launch(number, tenant, group), 0)
    assert [at for at, _ in ends(world)] == [6 * MS] * 2 + [15 * MS] * 3


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_a_group_has_one_factor_and_alone_it_is_the_world_of_the_table(noise: float) -> None:
    world, plain = GroupWorld(TABLE, noise=noise, seed=3), TableWorld(TABLE, noise=noise, seed=3)
    plain.start(launch(0, "b", 0), 0)
    factor = (plain.next_ns() or 0) / (5 * MS)
    world.start(launch(0, "b", 0), 0)
    assert world.next_ns() == plain.next_ns()
    world.start(launch(1, "a", 0), 0)
    assert [at for at, _ in ends(world)] == [pytest.approx(10 * MS * factor, rel=1e-6)] * 2


def test_members_may_fail() -> None:
    world = GroupWorld(TABLE, failure_rate=1.0)
    for number, tenant in enumerate("ab"):
        world.start(launch(number, tenant, 0), 0)
    assert [event.error for _, event in ends(world)] == ["injected fault"] * 2
