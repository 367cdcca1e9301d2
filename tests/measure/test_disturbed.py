"""Points of a profile on a machine that others keep busy: measured again, and marked where that does not help."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.execute.core_target import CoreTarget
from cotenant.measure import busy, solo
from cotenant.measure.solo import QUICK, Effort, in_turns, quantile_ns, undisturbed
from cotenant.profiles.profile_file import ModelProfile, Point, disturbed_words, highest_quantile
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

    def process_time_ns(self) -> int:
        return 2 * self.cpu_ns  # a second thread computes as much

    def monotonic(self) -> float:
        return self.wall_ns / 1e9


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> CoreTarget:
    monkeypatch.setattr(CoreTarget, "at", lambda self, share: nullcontext())
    monkeypatch.setattr(busy, "MOST_OTHERS", 0.1)
    monkeypatch.setattr(solo, "thread_waits", lambda: 0)
    return CoreTarget()


def on(machine: Machine, monkeypatch: pytest.MonkeyPatch, delays_s: Sequence[float] = (0.0,)) -> None:
    """Let the clocks be those of the machine; at each try, threads of this process wait `delays_s` for a core."""
    monkeypatch.setattr(solo, "time", machine)
    monkeypatch.setattr(busy, "time", machine)
    read = [0.0]

    def run_delay_s(thread: int | None) -> float:
        tries, is_end = divmod(len(read) - 1, 2)
        read.append(read[-1] + (delays_s[min(tries, len(delays_s) - 1)] if is_end else 0.0))
        return read[-1]

    monkeypatch.setattr("cotenant.linux.run_delay_s", run_delay_s)


@given(own_us=st.integers(1, 10**6), steal_ns=st.lists(st.integers(0, 10**9), min_size=1, max_size=9))
def test_what_others_take_of_the_only_thread_is_in_no_latency(own_us: int, steal_ns: list[int]) -> None:
    machine = Machine(own_us * 1000, steal_ns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solo, "time", machine)
        patch.setattr(solo, "thread_waits", lambda: 0)
        [runs] = in_turns([machine.work], EFFORT, is_inline=True)
        assert all(machine.own_ns <= each <= 1.05 * machine.own_ns + solo.STEAL_NS for each in runs.latency_ns)
        assert runs.cpu_ns == [machine.own_ns] * EFFORT.min_runs
        assert sum(runs.latency_ns) + runs.preempted_ns == machine.wall_ns
        machine.runs = 0
        [walls] = in_turns([machine.work], EFFORT)
        assert (walls.cpu_ns, walls.preempted_ns) == ([2 * machine.own_ns] * EFFORT.min_runs, 0)
        machine.runs = 0
        patch.setattr(solo, "thread_waits", lambda: machine.runs)  # it waits for something: a device, say
        [waiting] = in_turns([machine.work], EFFORT, is_inline=True)
        assert (waiting.latency_ns, waiting.preempted_ns) == (walls.latency_ns, 0)
    assert walls.latency_ns == [machine.own_ns + steal_ns[run % len(steal_ns)] for run in range(EFFORT.min_runs)]


@pytest.mark.parametrize("disturbed", [0, 1, 2, 3])
def test_one_core_is_measured_again_where_its_thread_was_preempted(
    target: CoreTarget, monkeypatch: pytest.MonkeyPatch, disturbed: int
) -> None:
    machine = Machine(10 * MS, [30 * MS] * (disturbed * EFFORT.min_runs) + [0] * EFFORT.min_runs)
    on(machine, monkeypatch)
    runs, is_disturbed = undisturbed(machine.work, EFFORT, target, Share((0,)))
    assert (machine.runs, is_disturbed) == ((disturbed + 1) * EFFORT.min_runs, False)
    assert (runs.latency_ns, runs.preempted_ns) == ([10 * MS] * EFFORT.min_runs, 0)


def test_several_cores_are_measured_again_where_threads_waited_for_a_core(
    target: CoreTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall_s = EFFORT.min_runs * 0.01
    for delays, tries in (((0.19 * wall_s,), 1), ((0.3 * wall_s, 0.0), 2), ((wall_s, wall_s, 0.1 * wall_s), 3)):
        machine = Machine(10 * MS, [0])
        on(machine, monkeypatch, delays)
        _, is_disturbed = undisturbed(machine.work, EFFORT, target, Share((0, 1)))
        assert (machine.runs, is_disturbed) == (tries * EFFORT.min_runs, False)


def test_where_others_never_leave_the_quietest_try_is_kept_and_marked(
    target: CoreTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes = (50, 20, 5, 30)
    machine = Machine(10 * MS, [each * MS for each in takes for _ in range(EFFORT.min_runs)])
    on(machine, monkeypatch)
    runs, is_disturbed = undisturbed(machine.work, EFFORT, target, Share((0,)))
    assert machine.runs == (1 + EFFORT.repeats) * EFFORT.min_runs == len(takes) * EFFORT.min_runs
    assert is_disturbed
    assert runs.preempted_ns == min(takes) * MS * EFFORT.min_runs


def test_a_quick_measurement_has_one_more_try(target: CoreTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(500 * MS, [500 * MS])
    on(machine, monkeypatch)
    assert undisturbed(machine.work, QUICK, target, Share((0,)))[1]
    assert machine.runs == 2 * (QUICK.warm_up + QUICK.min_runs)


def test_a_profile_says_which_points_are_disturbed() -> None:
    point = Point(0, 1, 1, 9, MS, MS, MS, MS)
    model = ModelProfile("digest", (point, replace(point, cores=2, is_disturbed=True)), (MS,), (0, 1), 1.0)
    words = disturbed_words(model, Path("models"))
    assert words.startswith("1 of 2 points were measured while other processes kept the cores busy")
    assert "'cotenant profile models --fresh'" in words
    assert disturbed_words(replace(model, points=(point,)), Path("models")) == ""


@pytest.mark.parametrize(
    ("runs", "highest"), [(0, 0), (1, 0), (2, 50), (3, 66), (10, 90), (19, 94), (20, 95), (30, 96), (99, 98), (100, 99)]
)
def test_no_quantile_is_given_above_what_the_runs_support(runs: int, highest: int) -> None:
    assert highest_quantile(runs) == highest
    samples = [MS * at for at in range(1, runs + 1)]
    point = Point(0, 1, 1, runs, *[MS] * 4)
    assert [point.supports(each) for each in ("p50", "p90", "p95", "p99")] == [
        each <= highest for each in (50, 90, 95, 99)
    ]
    for percent in (50, 90, 95, 99) if runs else ():
        assert (quantile_ns(samples, percent) == runs * MS) == (percent > highest)
    expected = f"p99 of {runs} runs" if runs >= 100 else f"longest of {runs} runs" if runs else "assumed"
    assert point.origin("p99") == expected
