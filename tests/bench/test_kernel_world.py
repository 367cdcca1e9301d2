"""The world of kernels: by hand, against steps of a fixed time, against bounds, and ahead of itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.papers.gacer._joint_run import JointWorld, KernelSpan
from bench.papers.gacer._kernel_world import SLOTS, Admission, KernelDevice, KernelWorld
from cotenant.core.actions import Launch, Respond
from cotenant.errors import InvalidValueError
from cotenant.policies.ordered.edf import Edf
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.sim.driver import simulate
from cotenant.techniques.granularity.joint_plan import Chunk, JointMember, JointPlan, Wait
from cotenant.techniques.granularity.kernel_table import KernelTable
from cotenant.types import Outcome, Query, Tenant
from cotenant.work import Machine, Share, Work
from kernel_sets import random_plan, random_set
from strict_engine import StrictEngine as Engine

US = 1000
FREE = KernelDevice(Admission.IN_ORDER, 0)
WHOLE = replace(FREE, admission=Admission.WHOLE)
SHARED = replace(FREE, admission=Admission.SHARED)
Kernel = tuple[float, float, float, float]
"""Microseconds, need, shares of operations and of bandwidth, all for one row."""


def table(kernels: Sequence[Kernel], batch: int = 1, join_us: float = 0.0, name: str = "m") -> KernelTable:
    """Kernels of which r rows need r times as much, and as much longer as they have more waves."""
    us, need, compute, bandwidth = (np.array(column, dtype=float) for column in zip(*kernels, strict=True))
    rows = np.arange(1, batch + 1)
    needs = np.outer(need, rows)
    return KernelTable(
        name,
        batch,
        tuple(f"{number}" for number in range(len(kernels))),
        us[:, None] * US * np.ceil(needs - 1e-9),
        needs,
        np.minimum(1.0, np.outer(compute, rows)),
        np.minimum(1.0, np.outer(bandwidth, rows)),
        np.full(len(kernels), join_us * US),
        (tuple(range(len(kernels) + 1)),),
    )


def plan(*models: KernelTable, rows: Sequence[int] = (), **more: object) -> JointPlan:
    batches = rows or [1] * len(models)
    members = tuple(JointMember(each.model, batch, each.size) for each, batch in zip(models, batches, strict=True))
    return JointPlan(members, **more)  # type: ignore[arg-type]


# --- by hand --------------------------------------------------------------------------------------------------------


def test_alone_a_model_takes_its_kernels_and_their_gaps() -> None:
    model = table([(10, 0.5, 0.9, 0.1), (20, 2.5, 0.9, 0.1), (5, 1.0, 0.1, 1.0)])
    for device in (FREE, WHOLE, SHARED):
        world = JointWorld([model], replace(device, gap_ns=2 * US))
        assert world.streams([1]).makespan_ns == world.in_turn([1]).makespan_ns == (10 + 60 + 5 + 4) * US


def test_a_host_that_is_slower_than_the_device_is_waited_for() -> None:
    model = table([(1, 0.5, 0, 0)] * 5)
    device = replace(FREE, launch_ns=8 * US, host_loss=0.5)
    assert JointWorld([model], device).in_turn([1]).makespan_ns == (5 * 8 + 1) * US
    both = JointWorld([model, model], device)
    assert both.in_turn([1, 1]).makespan_ns == (10 * 8 + 1) * US
    assert both.streams([1, 1]).makespan_ns == (5 * 12 + 1) * US  # hosts of their own, each half as slow again


def test_kernels_run_beside_each_other_where_they_fit() -> None:
    half = table([(10, 0.5, 0.4, 0.1)])
    for device in (FREE, WHOLE, SHARED):
        assert JointWorld([half, half], device).streams([1, 1]).makespan_ns == 10 * US
        assert JointWorld([half] * 3, device).streams([1] * 3).makespan_ns == 20 * US


def test_what_is_asked_for_twice_is_shared() -> None:
    heavy, light = table([(10, 0.5, 0.8, 0.1)]), table([(10, 0.5, 0.2, 0.1)])
    same = JointWorld([heavy, heavy], FREE).streams([1, 1]).makespan_ns
    assert same == pytest.approx(16 * US, rel=1e-6)
    assert JointWorld([heavy, light], FREE).streams([1, 1]).makespan_ns == 10 * US
    lossy = replace(FREE, compute_loss=0.2)  # 0.6 are left for the heavy one, 0.2 for the light one
    spans = JointWorld([heavy, light], lossy).run(plan(heavy, light), records=True).spans
    # the light one has its 0.2 for 10 us; by then the heavy one has done 3/4, and goes on alone
    assert [(span.member, round(span.end_ns / US, 3)) for span in spans] == [(1, 10.0), (0, 12.5)]


def test_rules_of_admission_differ() -> None:
    large, small = table([(10, 0.75, 0, 0), (10, 0.75, 0, 0)]), table([(10, 0.5, 0, 0)])
    ends = {
        device.admission: [
            (span.member, span.unit, span.start_ns // US, span.end_ns // US)
            for span in JointWorld([large, small], device).run(plan(large, small), records=True).spans
        ]
        for device in (WHOLE, FREE)
    }
    # The small one waits until all it needs is free; else half of it begins beside the large one.
    assert ends[Admission.WHOLE] == [(0, 0, 0, 10), (1, 0, 10, 20), (0, 1, 20, 30)]
    assert ends[Admission.IN_ORDER] == [(0, 0, 0, 10), (0, 1, 10, 20), (1, 0, 0, 20)]
    wide = table([(10, 4.0, 0, 0)])
    assert JointWorld([wide, wide], FREE).streams([1, 1]).makespan_ns == 80 * US
    spans = JointWorld([wide, small], SHARED).run(plan(wide, small), records=True).spans
    assert [(span.member, span.start_ns // US, span.end_ns // US) for span in spans] == [(1, 0, 10), (0, 0, 50)]


def test_the_last_wave_leaves_slots_where_blocks_come_in_waves() -> None:
    tail, half = table([(10, 1.25, 0, 0)]), table([(10, 0.5, 0, 0)])
    for waves, ends in ((True, 20), (False, 30)):
        device = replace(FREE, waves=waves)
        assert JointWorld([tail, half], device).streams([1, 1]).makespan_ns == ends * US


def test_ranks_go_first() -> None:
    one, two = table([(10, 1, 0, 0)] * 2), table([(10, 1, 0, 0)] * 2)
    members = (JointMember("a", 1, 2, rank=1), JointMember("b", 1, 2))
    spans = JointWorld([one, two], FREE).run(JointPlan(members), records=True).spans
    assert [span.member for span in spans] == [1, 1, 0, 0]


def test_a_barrier_waits_for_all_and_for_the_host() -> None:
    one, two = table([(10, 0.5, 0, 0)] * 2), table([(30, 0.5, 0, 0), (10, 0.5, 0, 0)])
    device = replace(FREE, launch_ns=1 * US, sync_ns=7 * US, gap_ns=2 * US)
    world = JointWorld([one, two], device)
    assert world.streams([1, 1]).makespan_ns == (1 + 30 + 2 + 10) * US
    parted = plan(one, two, barriers=((1, 1),))
    spans = world.run(parted, records=True).spans
    assert spans == (
        KernelSpan(0, 0, 0, 1 * US, 11 * US),
        KernelSpan(1, 0, 0, 1 * US, 31 * US),
        KernelSpan(0, 0, 1, 39 * US, 49 * US),
        KernelSpan(1, 0, 1, 39 * US, 49 * US),
    )
    # Empty segments cost the wait of the host; one behind everything costs nothing that anybody waits for.
    assert world.run(plan(one, two, barriers=((0, 0), (0, 0), (2, 2)))).makespan_ns == (14 + 43) * US


def test_a_wait_binds_two_members_and_no_host() -> None:
    one, two = table([(10, 0.3, 0, 0)] * 2, name="a"), table([(30, 0.3, 0, 0)] * 2, name="b")
    device = replace(FREE, launch_ns=1 * US, sync_ns=100 * US, event_ns=3 * US)
    world = JointWorld([one, two], device)
    spans = world.run(plan(one, two, waits=(Wait(0, 1, 1, 1),)), records=True).spans
    assert [(span.member, span.unit, span.start_ns // US) for span in spans] == [
        (0, 0, 1),
        (1, 0, 1),
        (0, 1, 34),
        (1, 1, 31),
    ]
    circle = plan(one, two, waits=(Wait(0, 0, 1, 1), Wait(1, 0, 0, 1)))
    with pytest.raises(InvalidValueError, match="a circle"):
        world.run(circle)


def test_chunks_run_side_by_side_and_are_joined() -> None:
    model = table([(10, 0.1, 0, 0)] * 4, batch=8, join_us=4)
    device = replace(FREE, launch_ns=1 * US, event_ns=3 * US)
    world = JointWorld([model], device)
    assert world.streams([8]).makespan_ns == (1 + 4 * 10) * US
    chunked = plan(model, rows=[8], chunks=(Chunk(0, 1, 3, (6, 2)),))
    spans = world.run(chunked, records=True).spans
    assert [(each.part, each.unit, each.start_ns // US, each.end_ns // US) for each in spans] == [
        (0, 0, 1, 11),
        (0, 1, 11, 21),
        (1, 1, 14, 24),  # of another stream
        (0, 2, 21, 31),
        (1, 2, 24, 34),
        (0, 3, 37, 41),  # the copy
        (0, 3, 41, 51),
    ]
    assert len(world.run(plan(model, rows=[8], chunks=(Chunk(0, 0, 4, (4, 4)),)), records=True).spans) == 9
    held = plan(model, rows=[8], chunks=(Chunk(0, 1, 3, (6, 2)),), barriers=((2,),))
    spans = world.run(held, records=True).spans
    assert [(each.part, each.unit) for each in spans] == [(0, 0), (0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (0, 3)]


def test_an_absent_member_ends_everything_at_once() -> None:
    one, two = table([(10, 0.3, 0, 0)] * 2), table([(30, 0.3, 0, 0)] * 2)
    made = plan(one, two, waits=(Wait(0, 1, 1, 2),), barriers=((2, 1),))
    assert JointWorld([one, None], FREE).run(made).makespan_ns == 20 * US
    assert JointWorld([None, two], FREE).run(made).makespan_ns == 60 * US
    assert JointWorld([None, None], FREE).run(made).makespan_ns == 0
    assert JointWorld([None, two], FREE).in_turn([1, 1]).makespan_ns == 60 * US


def test_what_does_not_fit_is_refused() -> None:
    model = table([(10, 0.3, 0, 0)] * 2, batch=4)
    world = JointWorld([model], FREE)
    with pytest.raises(InvalidValueError, match="units is 3"):
        world.run(JointPlan((JointMember("m", 4, 3),)))
    with pytest.raises(InvalidValueError, match="rows is 5"):
        world.streams([5])
    with pytest.raises(InvalidValueError, match="members"):
        world.run(plan(model, model))
    mixing = replace(model, splits=((0, 1),))
    with pytest.raises(InvalidValueError, match="treat rows by themselves"):
        JointWorld([mixing], FREE).run(plan(mixing, rows=[4], chunks=(Chunk(0, 0, 2, (2, 2)),)))
    for wrong in ({"launch_ns": -1}, {"compute_loss": 1.0}, {"host_loss": -0.1}):
        with pytest.raises(InvalidValueError, match="kernel device"):
            replace(FREE, **wrong)


# --- properties -----------------------------------------------------------------------------------------------------

kernels = st.lists(
    st.tuples(
        st.integers(1, 40).map(float),
        st.sampled_from((0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)),
        st.floats(0.0, 1.0),
        st.floats(0.0, 1.0),
    ),
    min_size=1,
    max_size=6,
)
devices = st.builds(
    KernelDevice,
    st.sampled_from(Admission),
    st.integers(0, 8000),
    st.integers(0, 3000),
    waves=st.booleans(),
    compute_loss=st.floats(0, 0.2),
    bandwidth_loss=st.floats(0, 0.2),
)


@given(st.lists(kernels, min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_without_contention_it_is_what_steps_of_a_microsecond_find(some: list[list[Kernel]]) -> None:
    quiet = [[(us, need, 0.0, 0.0) for us, need, _, _ in each] for each in some]
    models = [table(each) for each in quiet]
    assert JointWorld(models, WHOLE).streams([1] * len(models)).makespan_ns == US * _stepped(quiet)


def _stepped(models: Sequence[Sequence[Kernel]]) -> int:
    """Kernels that begin when all they need is free, in the order in which they came, followed by the microsecond."""
    slots, now, came = 1.0, 0, len(models)
    at = [0] * len(models)
    queue = list(range(len(models)))  # those whose kernel has not begun
    order = {number: number for number in queue}
    left: dict[int, list[list[float]]] = {}  # waves that run, as slots and microseconds that are left
    waits: dict[int, float] = {}  # slots of those that have not begun
    while any(at[number] < len(each) for number, each in enumerate(models)):
        for number in sorted(left, key=order.__getitem__):  # what has begun goes on
            taken = min(slots, waits[number])
            if taken > 1e-9:
                left[number].append([taken, models[number][at[number]][0]])
                waits[number] -= taken
                slots -= taken
        while queue:
            us, need, _, _ = models[queue[0]][at[queue[0]]]
            if min(1.0, need) > slots + 1e-9:
                break
            number = queue.pop(0)
            taken = min(need, 1.0)
            left[number] = [[taken, us]]
            waits[number] = need - taken
            slots -= taken
        now += 1
        for number in sorted(left):  # of those that come at one instant the first model is the first
            for wave in left[number]:
                wave[1] -= 1
            slots += sum(wave[0] for wave in left[number] if wave[1] <= 0)
            left[number] = [wave for wave in left[number] if wave[1] > 0]
            if not left[number] and waits[number] <= 1e-9:
                del left[number]
                at[number] += 1
                order[number] = came
                came += 1
                if at[number] < len(models[number]):
                    queue.append(number)
    return now


@given(st.lists(kernels, min_size=1, max_size=3), devices)
@settings(max_examples=80, deadline=None)
def test_nothing_is_faster_than_the_card(some: list[list[Kernel]], device: KernelDevice) -> None:
    models = [table(each) for each in some]
    took = JointWorld(models, device).streams([1] * len(models)).makespan_ns
    all_of = [kernel for each in some for kernel in each]
    waves = [max(1, ceil(need - 1e-9)) for _, need, _, _ in all_of]
    for share in (2, 3):
        assert took >= 0.999 * US * sum(kernel[0] * n * kernel[share] for kernel, n in zip(all_of, waves, strict=True))
    area = sum(us * (need if device.waves or need < 1 else ceil(need)) for us, need, _, _ in all_of)
    assert took >= US * area * (1 - len(all_of) / SLOTS)
    for each in some:
        alone = JointWorld([table(each)], device).in_turn([1]).makespan_ns
        assert took >= alone >= US * sum(us * max(1, ceil(need)) for us, need, _, _ in each)


@given(st.lists(st.tuples(kernels, st.integers(0, 60_000)), min_size=1, max_size=4), devices, st.booleans())
@settings(max_examples=60, deadline=None)
def test_looking_ahead_changes_nothing(some: list[tuple[list[Kernel], int]], device: KernelDevice, looks: bool) -> None:
    """A world that is asked what comes next before each start, and one that is not, agree to the nanosecond."""
    starts = sorted((at, number) for number, (_, at) in enumerate(some))
    found = []
    for asks in (looks, False):
        world = KernelWorld({f"m{number}": table(each) for number, (each, _) in enumerate(some)}, device)
        ends = []
        for at, number in starts:
            while asks and (world.next_ns() or at) < at:
                ends.append((world.next_ns(), world.pop().launch))
            world.start(launch(number, f"m{number}", len(some[number][0])), at)
        while (at_ns := world.next_ns()) is not None:
            ends.append((at_ns, world.pop().launch))
        found.append(ends)
    assert found[0] == found[1]
    assert sorted(number for _, number in found[0]) == list(range(len(some)))
    if all(at == 0 for at, _ in starts) and device.launch_ns == 0:
        together = JointWorld([table(each) for each, _ in some], device).streams([1] * len(some))
        assert found[0][-1][0] == together.makespan_ns


@pytest.mark.parametrize("admission", Admission)
def test_plans_are_held_to(admission: Admission) -> None:
    """Whatever the plan: each unit runs once for all its rows, behind the one before, its waits and its barriers."""
    device = KernelDevice(admission, 700, 300, 2000, 900, compute_loss=0.1)
    played = 0
    for seed in range(60):
        tables = random_set(seed)
        made = random_plan(seed, tables)
        try:
            spans = JointWorld(tables, device).run(made, records=True).spans
        except InvalidValueError as error:
            assert "a circle" in str(error)  # noqa: PT017
            continue
        played += 1
        starts: dict[tuple[int, int], int] = {}
        ends: dict[tuple[int, int], int] = {}
        parts: Counter[tuple[int, int]] = Counter()
        joins = {(chunk.member, chunk.end) for chunk in made.chunks if tables[chunk.member].join_ns[chunk.end - 1]}
        for span in sorted(spans, key=lambda span: (span.start_ns, span.end_ns)):
            key = span.member, span.unit
            if key in joins:
                joins.remove(key)  # the copy, which begins first of those with its number
                ends[span.member, span.unit - 1] = max(ends[span.member, span.unit - 1], span.end_ns)
                continue
            parts[key] += 1
            starts[key] = min(starts.get(key, span.start_ns), span.start_ns)
            ends[key] = max(ends.get(key, 0), span.end_ns)
        assert not joins
        wide = {(c.member, unit): len(c.rows) for c in made.chunks for unit in range(c.start, c.end)}
        for member, each in enumerate(tables):
            for unit in range(each.size):
                key = member, unit
                assert parts[key] == wide.get(key, 1)
                inside = any(c.member == member and c.start < unit < c.end for c in made.chunks)
                if unit and not inside:
                    assert starts[key] >= ends[member, unit - 1] + 300
        for wait in made.waits:
            assert starts[wait.member, wait.unit] >= ends[wait.after, wait.after_unit - 1] + 900
        for barrier in made.barriers:
            before = [ends[m, unit] for m, at in enumerate(barrier) for unit in range(at)]
            behind = [starts[m, unit] for m, at in enumerate(barrier) for unit in range(at, tables[m].size)]
            if behind:
                assert min(behind) >= max(before, default=0) + 2000
    assert played > 40


# --- for the simulator ----------------------------------------------------------------------------------------------


def launch(number: int, tenant: str, end: int, *, start: int = 0, rows: int = 1, after: tuple[int, ...] = ()) -> Launch:
    return Launch(
        number, number, (number,), Work(tenant, 0, rows, start, end), True, Share((0,), "gpu"), 1, after=after
    )


def test_launches_run_units_and_rows_beside_each_other() -> None:
    world = KernelWorld({"m": table([(10, 0.25, 0, 0)] * 4, batch=4)}, replace(FREE, event_ns=5 * US, launch_ns=1 * US))
    world.start(launch(1, "m", 4, rows=4), 0)
    world.start(launch(2, "m", 3, start=1, rows=4), 0)  # in turn with the first, a kernel takes all slots
    assert (world.next_ns(), world.pop().launch) == (41 * US, 2)
    world.start(launch(3, "m", 4, start=3, after=(2,)), 41 * US)
    assert (world.next_ns(), world.pop().launch) == (61 * US, 3)
    assert (world.next_ns(), world.pop().launch) == (71 * US, 1)
    slow = KernelWorld({"m": table([(10, 0.25, 0, 0)] * 2)}, replace(FREE, event_ns=5 * US, launch_ns=20 * US))
    slow.start(launch(1, "m", 2), 0)
    assert (slow.next_ns(), slow.pop().launch) == (50 * US, 1)
    slow.start(launch(2, "m", 2, after=(1,)), 50 * US)  # its first kernel was issued meanwhile
    assert slow.next_ns() == 80 * US
    assert world.next_ns() is None
    with pytest.raises(InvalidValueError, match="one that ends"):
        world.pop()


def test_rows_of_parts_are_joined_once_by_what_goes_on_with_others() -> None:
    world = KernelWorld({"m": table([(10, 0.25, 0, 0)] * 4, batch=4, join_us=7)}, FREE)

    def play(number: int, start: int, end: int, *rows: int, at: int) -> int:
        work = Work("m", 0, rows[1] - rows[0] if rows else 4, start, end, rows=rows)
        world.start(Launch(number, 1, (1,), work, end == 4, Share((0,), "gpu"), 1, part=bool(rows)), at)
        ends, _ = world.next_ns(), world.pop()
        assert ends is not None
        return ends - at

    assert play(1, 0, 1, 0, 2, at=0) == play(2, 0, 1, 2, 4, at=100 * US) == 10 * US
    assert play(3, 1, 2, 0, 2, at=200 * US) == play(4, 1, 2, 2, 4, at=300 * US) == 10 * US  # parts go on as they are
    assert play(5, 2, 3, at=400 * US) == 17 * US
    assert play(6, 3, 4, at=500 * US) == 10 * US
    assert play(7, 2, 4, at=600 * US) == 20 * US  # another batch of that number, without parts


def test_launches_of_what_is_not_known_are_refused() -> None:
    world = KernelWorld({"m": table([(10, 0.25, 0, 0)] * 4, batch=4)}, FREE)
    with pytest.raises(InvalidValueError, match="tenant is 'x'"):
        world.start(launch(1, "x", 4), 0)
    with pytest.raises(InvalidValueError, match="up to 4 units"):
        world.start(launch(1, "m", 5), 0)
    with pytest.raises(InvalidValueError, match="1 to 4"):
        world.start(launch(1, "m", 4, rows=5), 0)


def test_the_engine_plays_in_it() -> None:
    """Two models with a lane each on one GPU: what they do not fill, the other one has."""
    models = {name: table([(100, 0.5, 0.4, 0.3)] * 8, batch=2, name=name) for name in ("a", "b")}
    tenants = tuple(Tenant(name, 20_000 * US, cuts=tuple(range(9)), max_batch=2) for name in models)
    believed = TablePredictor(
        {name: LatencyTable((LatencyRow(0, 1, 1, 800 * US),), (1.0,) * 8, 1.0) for name in models}
    )
    queries = [Query(number, "ab"[number % 2], 0, 20_000 * US) for number in range(12)]
    ends = []
    for lanes in (1, 2):
        machine = Machine.of({"gpu": range(lanes)})
        shares = tuple(machine.share((slot,), "gpu") for slot in range(lanes))
        answered: list[int] = []
        engine = Engine(tenants, Edf(shares, preempt=False), believed, machine)
        world = KernelWorld(models, replace(FREE, launch_ns=2 * US, gap_ns=1 * US))

        def respond(action: Respond, now_ns: int, answered: list[int] = answered) -> None:
            assert action.outcome is Outcome.ANSWERED
            answered.append(now_ns)

        simulate(engine, world, queries, respond)
        assert len(answered) == len(queries)
        ends.append(max(answered))
    assert ends[0] == 7 * (2 + 8 * 100 + 7) * US  # the first alone, then batches of two, in turn
    assert ends[1] < 1.01 * ends[0]
