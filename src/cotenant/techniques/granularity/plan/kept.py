"""Joint plans that a repository keeps: read for serving, and checked against present measurements.

They are in a plan file of their own. `cotenant co-schedule` replaces its `[[together]]` sections one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from cotenant.errors import CotenantError
from cotenant.files import write_whole
from cotenant.plan_file import read_sections, sections_text
from cotenant.profiles.profile_file import Profile
from cotenant.repository import together_path
from cotenant.techniques.granularity.joint_plan import JointPlan, StoredJointPlan
from cotenant.techniques.granularity.kernel_table import KernelTable, fingerprint_of
from cotenant.techniques.granularity.plan.lane_tables import hand_over_ns, lane_rules, table_of_tasks
from cotenant.techniques.granularity.plan.planner import FoundJointPlan
from cotenant.techniques.granularity.plan_section import JOINT_PLANS_KEY
from cotenant.techniques.granularity.predict.evaluator import JointEvaluator
from cotenant.techniques.granularity.predict.rules import Occupancy
from cotenant.techniques.placement.task_profile import ModelTasks
from cotenant.work import Share

LEAST_GAIN_PCT = 3.0
"""Smallest predicted gain over streams, in percent, at which a plan is kept: times of units are not more precise."""


def read_joint_plans(root: Path) -> tuple[StoredJointPlan, ...]:
    """The plans that a repository keeps; none without a file. Raises PlanError for a file that cannot be read."""
    path = together_path(root)
    found: tuple[StoredJointPlan, ...] = read_sections(path).get(JOINT_PLANS_KEY, ()) if path.exists() else ()
    return found


def store_joint_plan(root: Path, plan: StoredJointPlan | None, key: object) -> None:
    """Replace the plan with this key in a repository; None removes it."""
    kept = [each for each in read_joint_plans(root) if each.key != key]
    kept += [] if plan is None else [plan]
    path = together_path(root)
    if kept:
        path.parent.mkdir(exist_ok=True)
        write_whole(path, sections_text({JOINT_PLANS_KEY: kept}).encode())
    else:
        path.unlink(missing_ok=True)


def usable(
    plans: Iterable[StoredJointPlan], graphs: Mapping[str, tuple[str, int]], lanes: Sequence[int]
) -> list[JointPlan]:
    """The plans that fit the served models and lanes. `graphs` gives digest and number of units by tenant, `lanes` the
    cores of each lane. Members that are not served are absent; at least two have to be served, or the only one."""
    found = []
    for each in plans:
        served = [graphs.get(member.model) == (member.graph, member.units) for member in each.members]
        fits = (each.lanes, (each.lane_cores,) * each.lanes) == (len(lanes), tuple(lanes))
        if fits and sum(served) > min(1, len(served) - 1):
            found.append(each.plan)
    return found


def usable_plans(root: Path, profile: Profile, lanes: Sequence[Share]) -> tuple[JointPlan, ...]:
    """The plans of a repository that fit its profile and these lanes."""
    graphs = {name: (model.digest, model.cuts[-1]) for name, model in profile.models.items()}
    return tuple(usable(read_joint_plans(root), graphs, [lane.size for lane in lanes]))


def stored_plan_of(
    found: FoundJointPlan, tables: Sequence[KernelTable], digests: Sequence[str], lanes: int, lane_cores: int = 1
) -> StoredJointPlan:
    """A plan that was found, as a file holds it. `digests` are those of the members' graphs."""
    plan = found.plan
    members = tuple(
        type(member)(member.model, member.batch, member.units, member.rank, digest)
        for member, digest in zip(plan.members, digests, strict=True)
    )
    return StoredJointPlan(
        members,
        plan.barriers,
        plan.waits,
        plan.chunks,
        lanes=lanes,
        lane_cores=lane_cores,
        makespan_ns=round(found.makespan_ns),
        streams_ns=round(found.streams_ns),
        sequential_ns=round(found.sequential_ns),
        bound_ns=int(found.bound_ns),
        profile=fingerprint_of(tables),
    )


def plan_faults(
    plan: StoredJointPlan, tables: Mapping[str, KernelTable], digests: Mapping[str, str], rules: Occupancy
) -> list[str]:
    """The reasons not to follow a plan, in words. `tables` and `digests` are of the present measurements, by tenant.
    Empty if the models are the measured ones, the plan can run, and it is predicted to be faster than streams."""
    where = "joint plan of " + " and ".join(f"{each.model}={each.batch}" for each in plan.members)
    for member in plan.members:
        table = tables.get(member.model)
        if table is None:
            return [f"{where}: the units of {member.model!r} were not measured; run 'cotenant co-schedule'"]
        if (member.graph, member.units) != (digests[member.model], table.size):
            now = digests[member.model]
            return [f"{where}: {member.model!r} changed: was {member.graph}, is {now}; run 'cotenant co-schedule'"]
    evaluator = JointEvaluator([tables[member.model] for member in plan.members], rules)
    try:
        cost, streams = evaluator.cost(plan.plan), evaluator.cost(evaluator.streams)
    except CotenantError as error:
        return [f"{where}: {error}"]
    if cost.makespan_ns >= streams.makespan_ns:
        taken, before = cost.makespan_ns / 1e6, streams.makespan_ns / 1e6
        return [f"{where}: predicted to take {taken:.3g} ms, and {before:.3g} ms without it"]
    return []


def is_stale(plan: StoredJointPlan, tables: Mapping[str, KernelTable]) -> bool:
    """Whether a plan was made from other figures than these."""
    mine = [tables[member.model] for member in plan.members if member.model in tables]
    return plan.profile != fingerprint_of(mine)


def verdict(plan: StoredJointPlan, measured: Mapping[str, Mapping[int, ModelTasks]]) -> tuple[list[str], bool]:
    """The faults of a plan by the present task measurements, and whether a plan without faults is stale. `measured`
    holds the tasks by tenant and number of cores. A stale plan was made from other measurements of the same models."""
    tasks = {
        member.model: measured[member.model][plan.lanes]
        for member in plan.members
        if plan.lanes in measured.get(member.model, {})
    }
    tables = {
        member.model: table_of_tasks(member.model, tasks[member.model], member.batch, plan.lanes)
        for member in plan.members
        if member.model in tasks
    }
    rules = lane_rules(hand_over_ns(list(tasks.values())) if tasks else 0)
    faults = plan_faults(plan, tables, {name: each.digest for name, each in tasks.items()}, rules)
    return faults, not faults and is_stale(plan, tables)


def words_of(plan: StoredJointPlan) -> str:
    """A plan in a few words."""
    names = " and ".join(f"{each.model}={each.batch}" for each in plan.members)
    before, after = plan.streams_ns / 1e6, plan.makespan_ns / 1e6
    return f"{names} together on {plan.lanes} lanes, {after:.3g} ms instead of {before:.3g}"
