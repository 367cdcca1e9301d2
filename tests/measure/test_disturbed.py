"""Points of a profile on a machine that others keep busy: processor time on one core, further tries on several."""

from __future__ import annotations

import statistics
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.execute.core_target import CoreTarget
from cotenant.measure import solo
from cotenant.measure.solo import REPEATS, Effort, in_turns, undisturbed
from cotenant.profiles.profile_file import ModelProfile, Point, disturbed_words
from cotenant.work import Share

MS = 1_000_000
EFFORT = Effort(budget_s=0.0, min_runs=9, max_runs=9, warm_up=0)


@dataclass
class Machine:
    """Clocks of a thread that computes for `own_ns` a run, and from which others take `steal_ns` of those runs."""

    own_ns: int
    steal_ns: list[int]
    wall_ns: int = 0
    cpu_ns: int = 0
    runs: int = 0

    def work(self) -> None:
        self.cpu_ns += self.own_ns
        self.wall_ns += self.own_ns + self.steal_ns[self.runs % len(self.steal_ns)]
        self.runs += 1

    def perf_counter_ns(self) -> int:
        return self.wall_ns

    def perf_counter(self) -> float:
        return self.wall_ns / 1e9

    def thread_time_ns(self) -> int:
        return self.cpu_ns


class Others:
    """How busy others are at each try."""

    shares: tuple[float, ...] = ()
    tries = 0

    def __init__(self, cores: Any) -> None:
        self.is_disturbed = Others.shares[min(Others.tries, len(Others.shares) - 1)] > 0.1
        Others.tries += 1

    def __enter__(self) -> Others:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> CoreTarget:
    monkeypatch.setattr(CoreTarget, "at", lambda self, share: nullcontext())
    monkeypatch.setattr(solo, "OthersTime", Others)
    Others.tries, Others.shares = 0, (0.0,)
    return CoreTarget()


@given(own_us=st.integers(1, 10**6), steal_ns=st.lists(st.integers(0, 10**9), min_size=1, max_size=9))
def test_what_others_take_of_the_only_thread_is_in_no_latency(own_us: int, steal_ns: list[int]) -> None:
    machine = Machine(own_us * 1000, steal_ns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solo, "time", machine)
        patch.setattr(solo, "thread_waits", lambda: 0)
        [samples] = in_turns([machine.work], EFFORT, is_inline=True)
        assert all(machine.own_ns <= each <= 1.05 * machine.own_ns + solo.STEAL_NS for each in samples)
        machine.runs = 0
        [walls] = in_turns([machine.work], EFFORT)
        machine.runs = 0
        patch.setattr(solo, "thread_waits", lambda: machine.runs)  # it waits for something: a device, say
        assert in_turns([machine.work], EFFORT, is_inline=True) == [walls]
    assert walls == [machine.own_ns + steal_ns[run % len(steal_ns)] for run in range(EFFORT.min_runs)]


def test_on_several_cores_a_point_is_measured_until_others_leave_them(target: CoreTarget) -> None:
    cores = Share((0, 1))
    for shares, tries in (((0.0,), 1), ((0.5, 0.0), 2), ((0.5, 0.5, 0.0), 3)):
        Others.tries, Others.shares = 0, shares
        samples, is_disturbed = undisturbed(lambda: None, EFFORT, target, cores)
        assert (Others.tries, len(samples), is_disturbed) == (tries, EFFORT.min_runs, False)


def test_where_they_never_leave_the_quickest_try_is_kept_and_marked(
    target: CoreTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    Others.shares = (0.9,)
    rng = Random(1)
    tries = [[MS * rng.randrange(5, 50)] * EFFORT.min_runs for _ in range(1 + REPEATS)]
    left = [*tries]
    monkeypatch.setattr(solo, "in_turns", lambda works, effort, is_inline: [left.pop(0)])
    samples, is_disturbed = undisturbed(lambda: None, EFFORT, target, Share((0, 1)))
    assert is_disturbed
    assert samples == min(tries, key=statistics.median)
    assert not left


def test_one_core_is_measured_once_however_busy_it_is(target: CoreTarget) -> None:
    Others.shares = (0.9,)
    assert undisturbed(lambda: None, EFFORT, target, Share((0,)))[1] is False
    assert Others.tries == 1


def test_a_profile_says_which_points_are_disturbed() -> None:
    point = Point(0, 1, 1, 9, MS, MS, MS, MS)
    model = ModelProfile("digest", (point, replace(point, cores=2, is_disturbed=True)), (MS,), (0, 1), 1.0)
    words = disturbed_words(model, Path("models"))
    assert words.startswith("1 of 2 points were measured while other processes kept the cores busy")
    assert "'cotenant profile models --fresh'" in words
    assert disturbed_words(replace(model, points=(point,)), Path("models")) == ""
