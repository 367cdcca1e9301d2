"""The world of groups: all members end together, and nothing else runs meanwhile."""

from __future__ import annotations

import math
import statistics

import pytest

from bench.papers.abacus._group_world import GroupWorld, member_of
from cotenant.core.actions import GroupBasis, Launch
from cotenant.core.predictor import Group, Member
from cotenant.errors import ProtocolViolationError
from cotenant.work import Share, Work

ONE, OTHER = Share((0,)), Share((1,))


def launch(number: int, group: int, end: int = 4, partition: Share = ONE) -> Launch:
    return Launch(number, number, (number,), Work("a", 0, 2, 0, end), True, partition, 1, basis=GroupBasis(group))


def units(group: Group) -> float:
    return 10.0 * sum(member.work.end - member.work.start for member in group)


def test_members_of_a_group_end_together_after_the_latency_of_the_group() -> None:
    world = GroupWorld(units)
    world.start(launch(0, 0), 100)
    assert world.next_ns() == 140
    world.start(launch(1, 0, 2, OTHER), 100)
    assert world.next_ns() == 160, "the second member is known now"
    assert [world.pop().launch, world.next_ns(), world.pop().launch, world.next_ns()] == [0, 160, 1, None]


def test_a_group_begins_only_when_the_one_before_has_ended() -> None:
    world = GroupWorld(units)
    world.start(launch(0, 0), 0)
    with pytest.raises(ProtocolViolationError, match="launch 1 starts while group 0 is running"):
        world.start(launch(1, 1, 2, OTHER), 10)
    world.start(launch(2, 0, 2, OTHER), 0)
    world.next_ns()
    world.pop()
    with pytest.raises(ProtocolViolationError, match="launch 3 starts while group 0 is running"):
        world.start(launch(3, 0), 60)


def test_noise_has_the_size_that_was_asked_for_and_one_draw_a_group() -> None:
    world = GroupWorld(lambda _: 1e6, noise=0.045, seed=1)
    logs = []
    for number in range(2000):
        world.start(launch(number, number), 0)
        first = world.next_ns()
        assert first == world.next_ns()
        assert first is not None
        logs.append(math.log(first / 1e6))
        world.pop()
    assert statistics.stdev(logs) == pytest.approx(0.045, rel=0.1)
    assert statistics.mean(logs) == pytest.approx(0.0, abs=0.005)


def test_a_launch_becomes_a_member() -> None:
    assert member_of(launch(5, 0, 3, Share((0, 1)))) == Member(Work("a", 0, 2, 0, 3), 2)
