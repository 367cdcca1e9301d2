"""The benchmark of serving sets: its rows on small sets, requests that end once, and its metrics by hand."""

from __future__ import annotations

import numpy as np
import pytest

from bench._data import DATA
from bench.papers.gacer import serving
from bench.papers.gacer._gpus import GPUS
from bench.papers.gacer._judge import Effort
from bench.papers.gacer._kernel_world import Admission, KernelDevice
from bench.papers.gacer._sets import JointSet, paper_sets
from bench.papers.gacer._worlds import draw
from cotenant.core.actions import Respond
from cotenant.techniques.granularity.joint_plan import Chunk, JointPlan
from cotenant.techniques.granularity.kernel_table import KernelTable
from cotenant.types import Outcome, Query

MS = 1_000_000
FREE = KernelDevice(Admission.IN_ORDER, 0)


def table(name: str, ms: float, need: float, units: int = 4, batch: int = 2) -> KernelTable:
    """Equal units that take as long, and need as much, for half of the rows as for all."""
    shape = (units, batch)
    full = np.full(shape, ms * MS / units)
    halved = full * np.arange(1, batch + 1) / batch
    shares = np.zeros(shape)
    names = tuple(f"{name}{unit}" for unit in range(units))
    return KernelTable(
        name, batch, names, halved, np.full(shape, need), shares, shares, np.zeros(units), (tuple(range(units + 1)),)
    )


SET = (table("a", 4.0, 0.4), table("b", 1.0, 0.4))
PLAN = JointPlan(serving.members_of(SET), chunks=(Chunk(0, 0, 4, (1, 1)),))


def served(name: str, requests: list[Query], slo_ns: int, plan: JointPlan | None = PLAN) -> tuple[float, int]:
    server = serving.servers_of(plan, len(SET), {each.model: 1.0 for each in SET})[name]
    beliefs = {each.model: serving.belief(each, plan, FREE) for each in SET}
    engine = serving.engine_of(serving.tenants_of(SET, [slo_ns] * len(SET), plan, segmented=False), server, beliefs)
    return serving.play(serving.Together(engine, [(each.model, each.batch) for each in SET]), SET, FREE, requests)


def requests(count: int, every_ns: int, slo_ns: int) -> list[Query]:
    return [Query(number, "set", at, at + slo_ns) for number, at in enumerate(range(0, count * every_ns, every_ns))]


@pytest.mark.parametrize(
    ("name", "slo_ms", "in_time", "planned"),
    [
        ("edf", 5.2, 100, 0),  # 4 and 1 ms, and two decisions
        ("edf", 5.1, 0, 0),
        ("streams", 4.1, 100, 0),  # beside each other, one decision
        ("streams", 3.9, 0, 0),
        ("clustered", 4.1, 100, 8),  # two halves of 2 ms, and b beside them
        ("clustered", 3.9, 0, 0),  # what is hopeless without its plan is refused
    ],
)
def test_requests_take_what_their_policy_makes_of_them(name: str, slo_ms: float, in_time: float, planned: int) -> None:
    slo_ns = round(slo_ms * MS)
    attained, ran = served(name, requests(4, 20 * MS, slo_ns), slo_ns)
    assert attained == in_time
    assert ran == planned  # in sets


def test_a_member_that_is_dropped_takes_its_request_with_it() -> None:
    server = serving.servers_of(None, len(SET), {})["edf"]
    beliefs = {each.model: serving.belief(each, None, FREE) for each in SET}
    engine = serving.engine_of(serving.tenants_of(SET, [3 * MS] * 2, None, segmented=False), server, beliefs)
    both = serving.Together(engine, [(each.model, each.batch) for each in SET])
    world, ended = serving.ChargedWorld(SET, FREE, 1), list[tuple[int, Outcome]]()

    def responded(respond: Respond, _now_ns: int) -> None:
        ended.append((respond.query, respond.outcome))

    serving.simulate(both, world, requests(3, 10 * MS, 3 * MS), responded)
    assert sorted(number for number, _ in ended) == [0, 1, 2]
    assert all(outcome is not Outcome.ANSWERED for _, outcome in ended)  # a takes 4 ms
    assert both.live == 0


def test_a_chunk_has_a_lane_for_each_part() -> None:
    assert serving.streams_in(None, 3) == 3
    assert serving.streams_in(PLAN, 2) == 3
    many = replace_rows(PLAN, (1,) * 12)
    assert serving.streams_in(many, 2) == 8
    assert [row.items for row in serving.belief(SET[0], PLAN, FREE).rows] == [1, 2]


def replace_rows(plan: JointPlan, rows: tuple[int, ...]) -> JointPlan:
    first, *others = serving.members_of([table("a", 4.0, 0.4, batch=sum(rows)), SET[1]])
    return JointPlan((first, *others), chunks=(Chunk(0, 0, 4, rows),))


def test_rows_of_a_set_in_a_world() -> None:
    joint = next(each for each in paper_sets(DATA, GPUS[1]) if each.name == "R34+LSTM+BST")
    task = serving.ServingTask(
        draw(3), JointSet("BST", joint.models[2:], GPUS[1]), Effort(10, 16, 1), serving.Load(3, 3, (0.01, 1.2), (0.01,))
    )
    rows = serving.judge(task)
    assert [(row["part"], row["rate"]) for row in rows] == [("joint", 0.01), ("joint", 1.2), ("independent", 0.01)]
    for row in (rows[0], rows[2]):  # at hardly any load all are in time
        assert {row[name] for name in serving.POLICIES} == {100.0}
    assert rows == serving.judge(task)


def test_independent_arrivals_have_the_load_that_is_asked_for() -> None:
    alone_ns = [4 * MS, MS]
    queries = list(serving.independent(SET, alone_ns, 0.5, 4000, 1))
    work_ns = sum(alone_ns[query.tenant == "b"] for query in queries)
    assert work_ns / queries[-1].arrival_ns == pytest.approx(0.5, rel=0.05)
    assert {query.deadline_ns - query.arrival_ns for query in queries} == {8 * MS, 2 * MS}


def test_metrics_by_hand() -> None:
    same = dict.fromkeys(serving.POLICIES, 50.0)
    rows = [
        {"world": 0, "part": "joint", "rate": 1.2, **same, "clustered": 60.0, "streams": 0.0},
        {"world": 0, "part": "joint", "rate": 1.2, **same, "streams": 40.0, "streams_naive": 30.0},
        {"world": 0, "part": "joint", "rate": 0.8, **same, "clustered": 0.0},
        {"world": 1, "part": "joint", "rate": 1.2, **same, "edf": 20.0},
        {"world": 0, "part": "independent", "rate": 0.5, **same, "clustered": 49.0},
        {"world": 0, "part": "independent", "rate": 0.8, **same, "clustered": 45.0},
        {"world": 1, "part": "independent", "rate": 0.8, **same, "clustered": 52.0},
    ]
    summary = serving.summary_of(rows)
    assert summary["joint_gain_vs_edf_points"] == pytest.approx((5.0 + 30.0) / 2)
    assert summary["joint_gain_vs_unplanned_points"] == pytest.approx((5.0 + 0.0) / 2)
    earlier = [{name: each for name, each in row.items() if name != serving.UNPLANNED} for row in rows]
    assert "joint_gain_vs_unplanned_points" not in serving.summary_of(earlier)
    assert summary["joint_gain_vs_streams_points"] == pytest.approx((10.0 + 0.0) / 2)
    assert summary["poisson_worst_vs_edf_points"] == pytest.approx((-5.0 + 2.0) / 2)
