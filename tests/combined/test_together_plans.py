"""Plans of models that are there together, as data: the section of plan files, what holds of them, and their tables."""

from __future__ import annotations

from dataclasses import replace as dataclass_replace
from pathlib import Path

import msgspec
import pytest

from cotenant.errors import PlanError
from cotenant.plan_file import TENANTS, parse_sections, sections_text
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.repository import together_path
from cotenant.techniques.granularity.joint_plan import Chunk, JointMember, JointPlan, StoredJointPlan, Wait
from cotenant.techniques.granularity.kernel_table import fingerprint_of
from cotenant.techniques.granularity.plan.kept import (
    is_stale,
    plan_faults,
    read_joint_plans,
    store_joint_plan,
    stored_plan_of,
    usable,
)
from cotenant.techniques.granularity.plan.lane_tables import (
    hand_over_ns,
    lane_rules,
    table_of_latencies,
    table_of_tasks,
)
from cotenant.techniques.granularity.plan.planner import Streams
from cotenant.techniques.granularity.plan_section import JOINT_PLANS_KEY
from cotenant.techniques.granularity.predict.evaluator import JointEvaluator
from cotenant.techniques.partitions.plan.file import read_plan
from cotenant.techniques.placement.task_profile import BatchTimes, DeviceTimes
from golden_files import GOLDEN
from task_profiles import US, linear_tasks, tasks_of

A, B = JointMember("a", 4, 4, graph="ga"), JointMember("b", 1, 2, 1, "gb")
PLAN = StoredJointPlan(
    (A, B),
    ((2, 1), (4, 1)),
    (Wait(1, 1, 0, 1),),
    (Chunk(0, 0, 2, (2, 2)),),
    lanes=2,
    makespan_ns=10,
    streams_ns=20,
    sequential_ns=30,
    bound_ns=9,
    profile="f",
)


def test_a_plan_file_holds_them_alone_or_beside_all_else() -> None:
    other = msgspec.structs.replace(PLAN, lanes=4, is_measured=True)
    alone = {JOINT_PLANS_KEY: (PLAN, other)}
    assert parse_sections(sections_text(alone), "x") == alone
    whole = {TENANTS: read_plan(GOLDEN / "plans" / "shared.toml"), JOINT_PLANS_KEY: (PLAN,)}
    assert parse_sections(sections_text(whole), "x") == whole


def test_one_set_has_one_plan_and_a_wrong_number_is_named() -> None:
    with pytest.raises(PlanError, match=r"\[\[together\]\] of a=4, b=1 is there twice"):
        parse_sections(sections_text({JOINT_PLANS_KEY: (PLAN, PLAN)}), "plan.toml")
    text = sections_text({JOINT_PLANS_KEY: (PLAN,)}).replace(
        "barriers = [[2, 1], [4, 1]]", "barriers = [[2, 1], [1, 1]]"
    )
    with pytest.raises(PlanError, match="barrier"):
        parse_sections(text, "plan.toml")


def test_a_repository_keeps_one_of_each_key(tmp_path: Path) -> None:
    assert read_joint_plans(tmp_path) == ()
    store_joint_plan(tmp_path, PLAN, PLAN.key)
    four = msgspec.structs.replace(PLAN, lanes=4)
    store_joint_plan(tmp_path, four, four.key)
    better = msgspec.structs.replace(PLAN, makespan_ns=9)
    store_joint_plan(tmp_path, better, better.key)
    assert read_joint_plans(tmp_path) == (four, better)
    store_joint_plan(tmp_path, None, four.key)
    assert read_joint_plans(tmp_path) == (better,)
    store_joint_plan(tmp_path, None, better.key)
    assert not together_path(tmp_path).exists()


def test_those_are_usable_whose_models_and_lanes_are_as_they_were() -> None:
    there = {"a": ("ga", 4), "b": ("gb", 2), "c": ("gc", 9)}
    assert usable((PLAN,), there, (1, 1)) == [PLAN.plan]
    assert type(usable((PLAN,), there, (1, 1))[0]) is JointPlan
    for wrong in ({"a": ("ga", 4)}, there | {"a": ("other", 4)}, there | {"b": ("gb", 3)}):
        assert usable((PLAN,), wrong, (1, 1)) == []
    assert usable((PLAN,), there, (1, 1, 1)) == usable((PLAN,), there, (2, 2)) == usable((PLAN,), there, (2,)) == []
    three = StoredJointPlan(
        (A, B, JointMember("c", 1, 9, graph="gc")), lanes=2, makespan_ns=1, streams_ns=1, sequential_ns=1, bound_ns=1
    )
    assert usable((three,), {"a": ("ga", 4), "c": ("gc", 9)}, (1, 1)) == [three.plan], "an absent one is empty"
    alone = StoredJointPlan((A,), lanes=2, makespan_ns=1, streams_ns=1, sequential_ns=1, bound_ns=1)
    assert usable((alone,), there, (1, 1)) == [alone.plan]


def test_a_model_is_left_where_the_plan_stops_it() -> None:
    assert PLAN.cuts_of("a", (0, 3, 4)) == (0, 1, 2, 3, 4)
    assert PLAN.cuts_of("b", (0, 2)) == (0, 1, 2)
    assert PLAN.cuts_of("a", (0, 5)) == (0, 5), "of other units"
    assert PLAN.cuts_of("c", (0, 4)) == (0, 4)


def test_a_plan_over_stretches_becomes_one_of_units() -> None:
    fine = PLAN.at_units([(0, 2, 5, 6, 9), (0, 4, 7)])
    assert [each.units for each in fine.members] == [9, 7]
    assert (fine.barriers, fine.waits, fine.chunks) == (
        ((5, 4), (9, 4)),
        (Wait(1, 4, 0, 2),),
        (Chunk(0, 0, 5, (2, 2)),),
    )
    assert fine.members[1].rank == 1


# --- tables -----------------------------------------------------------------------------------------------------------


def test_tables_of_tasks_take_what_was_measured_and_go_between_and_beyond() -> None:
    tasks = msgspec.structs.replace(
        tasks_of([10, 40], [6, 30], {0: (1,)}),
        batches={2: times([14, 70]), 4: times([12, 150])},
        splits=((0, 1),),
    )
    table = table_of_tasks("m", tasks, 6, 4)
    assert table.duration_ns.tolist() == [
        [10 * US, 14 * US, 14 * US, 14 * US, 14 * US, 14 * US],  # more rows are never quicker
        [40 * US, 70 * US, 110 * US, 150 * US, 190 * US, 230 * US],
    ]
    assert (table.units, table.splits) == (("0:u0", "1:u1"), ((0, 1),))
    assert set(table.need.ravel()) == {0.25}
    assert not table.join_ns.any(), "where it was not measured"
    wide = tasks_of([1] * 4, [1] * 4, {0: (1,), 1: (2, 3), 2: (3,)})  # of 0, 64 and 128 bytes a row
    joined = table_of_tasks("m", msgspec.structs.replace(wide, join_ns_per_mib=1 << 20), 3, 2).join_ns
    assert joined.tolist() == [0, 3 * 64, 3 * (64 + 128), 0]
    assert table_of_tasks("m", linear_tasks(3), 3, 2).duration_ns[0].tolist() == [800 * US, 1600 * US, 2400 * US]
    assert hand_over_ns([tasks, linear_tasks()]) == 15 * US


def times(core_us: list[int]) -> BatchTimes:
    made = DeviceTimes(tuple(US * each for each in core_us), 5 * US, US * sum(core_us))
    return BatchTimes(made, made)


def test_tables_of_latencies_divide_them_over_the_stretches() -> None:
    table = LatencyTable((LatencyRow(0, 1, 1, 100), LatencyRow(0, 4, 1, 340), LatencyRow(0, 1, 2, 60)), (1.0, 2.0, 1.0))
    made = table_of_latencies("m", table, 2, 2, 1, (0, 1, 3), ((0, 1, 2),))
    assert made.duration_ns.tolist() == [[25, 45], [75, 135]]
    assert made.splits == ((0, 1),), "the second stretch ends where no chunk may"
    assert table_of_latencies("m", table, 1, 2, 1, (0, 1, 2, 3), ((0, 2, 3),)).splits == ((0, 2, 3),)
    assert table_of_latencies("m", table, 1, 2, 1, (0, 2, 3), ((0, 1, 2, 3),)).splits == ((0, 1, 2),)
    assert table_of_latencies("m", table, 1, 2, 2, (0, 3), ()).duration_ns.tolist() == [[60]]


# --- judged -----------------------------------------------------------------------------------------------------------


def test_what_was_found_holds_until_the_models_or_their_times_change() -> None:
    one = msgspec.structs.replace(linear_tasks(4), batches={2: times([1600] * 4)}, splits=(tuple(range(5)),))
    tables = [table_of_tasks("a", one, 2, 2), table_of_tasks("b", tasks_of([10], [10], {}), 1, 2)]
    rules = lane_rules(1000)
    evaluator = JointEvaluator(tables, rules)
    chunked = msgspec.structs.replace(evaluator.streams, chunks=(Chunk(0, 0, 4, (1, 1)),))
    found = dataclass_replace(
        Streams().find(tables, rules), plan=chunked, makespan_ns=evaluator.cost(chunked).makespan_ns
    )
    assert found.makespan_ns < 0.6 * found.streams_ns
    plan = stored_plan_of(found, tables, ("ga", "gb"), 2)
    assert (plan.profile, plan.members[0].graph) == (fingerprint_of(tables), "ga")
    by_name, digests = {each.model: each for each in tables}, {"a": "ga", "b": "gb"}
    assert plan_faults(plan, by_name, digests, rules) == []
    assert not is_stale(plan, by_name)
    slower = {**by_name, "b": table_of_tasks("b", tasks_of([11], [10], {}), 1, 2)}
    assert is_stale(plan, slower)
    assert plan_faults(plan, slower, digests, rules) == []
    [fault] = plan_faults(plan, by_name, digests | {"a": "new"}, rules)
    assert "'a' changed: was ga, is new; run 'cotenant co-schedule'" in fault
    [fault] = plan_faults(plan, {"a": tables[0]}, {"a": "ga"}, rules)
    assert "the units of 'b' were not measured" in fault
    unsplit = dataclass_replace(tables[0], splits=())
    [fault] = plan_faults(plan, by_name | {"a": unsplit}, digests, rules)
    assert "chunk" in fault
    [fault] = plan_faults(plan, by_name, digests, lane_rules(10**8))
    assert "6.4 ms without it" in fault
