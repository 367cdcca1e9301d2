"""Plans of models that are there together as a repository keeps them: read for serving, and judged by what is measured.

They lie in a plan file of their own, whose `[[together]]` sections `cotenant co-schedule` replaces one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from cotenant.errors import CotenantError
from cotenant.files import write_whole
from cotenant.plan_file import read_sections, sections_text
from cotenant.profile.profile_file import Profile
from cotenant.repository import together_path
from cotenant.techniques.granularity.joint_plan import JointPlan, TogetherPlan
from cotenant.techniques.granularity.kernel_table import KernelTable, fingerprint_of
from cotenant.techniques.granularity.plan.lane_tables import hand_over_ns, lane_rules, table_of_tasks
from cotenant.techniques.granularity.plan.planner import FoundJointPlan
from cotenant.techniques.granularity.plan_section import TOGETHER
from cotenant.techniques.granularity.predict.evaluator import JointEvaluator
from cotenant.techniques.granularity.predict.rules import Occupancy
from cotenant.techniques.placement.task_profile import ModelTasks
from cotenant.work import Share

LEAST_GAIN_PCT = 3.0
"""What is quicker than streams by less is left alone: times of units are not known better."""


def read_together(root: Path) -> tuple[TogetherPlan, ...]:
    """The plans that a repository keeps; none where there is no file. Raises PlanError for one that is broken."""
    path = together_path(root)
    found: tuple[TogetherPlan, ...] = read_sections(path).get(TOGETHER, ()) if path.exists() else ()
    return found


def keep_together(root: Path, plan: TogetherPlan | None, key: object) -> None:
    """Let a repository keep a plan in place of what it has of the same key; None keeps none."""
    kept = [each for each in read_together(root) if each.key != key]
    kept += [] if plan is None else [plan]
    path = together_path(root)
    if kept:
        path.parent.mkdir(exist_ok=True)
        write_whole(path, sections_text({TOGETHER: kept}).encode())
    else:
        path.unlink(missing_ok=True)


def usable(
    plans: Iterable[TogetherPlan], graphs: Mapping[str, tuple[str, int]], lanes: Sequence[int]
) -> list[JointPlan]:
    """The plans that hold for models as they are served, by tenant what their profile is of and the number of units,
    and for lanes of these sizes. Members that are not served are absent."""
    found = []
    for each in plans:
        served = [graphs.get(member.model) == (member.graph, member.units) for member in each.members]
        fits = (each.lanes, (each.lane_cores,) * each.lanes) == (len(lanes), tuple(lanes))
        if fits and sum(served) > min(1, len(served) - 1):
            found.append(each.plan)
    return found


def usable_plans(root: Path, profile: Profile, lanes: Sequence[Share]) -> tuple[JointPlan, ...]:
    """The plans that a repository keeps, and that hold for its profile and these lanes."""
    graphs = {name: (model.digest, model.cuts[-1]) for name, model in profile.models.items()}
    return tuple(usable(read_together(root), graphs, [lane.size for lane in lanes]))


def together_of(
    found: FoundJointPlan, tables: Sequence[KernelTable], digests: Sequence[str], lanes: int, lane_cores: int = 1
) -> TogetherPlan:
    """What was found, as a file holds it. `digests` say what the profile of each member is of."""
    plan = found.plan
    members = tuple(
        type(member)(member.model, member.batch, member.units, member.rank, digest)
        for member, digest in zip(plan.members, digests, strict=True)
    )
    return TogetherPlan(
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


def together_faults(
    plan: TogetherPlan, tables: Mapping[str, KernelTable], digests: Mapping[str, str], rules: Occupancy
) -> list[str]:
    """What speaks against a plan, in words; `tables` and `digests` are of what is measured now, by tenant.

    Empty where it is of the models that were measured, can be carried out, and is believed quicker than streams.
    """
    where = "plan of " + " and ".join(f"{each.model}={each.batch}" for each in plan.members) + " together"
    for member in plan.members:
        table = tables.get(member.model)
        if table is None:
            return [f"{where}: the units of {member.model!r} were not measured; run 'cotenant co-schedule'"]
        if (member.graph, member.units) != (digests[member.model], table.size):
            return [f"{where}: is of {member.model!r} as it was ({member.graph}), and {digests[member.model]} is there"]
    evaluator = JointEvaluator([tables[member.model] for member in plan.members], rules)
    try:
        cost, streams = evaluator.cost(plan.plan), evaluator.cost(evaluator.streams)
    except CotenantError as error:
        return [f"{where}: {error}"]
    if cost.makespan_ns >= streams.makespan_ns:
        taken, before = cost.makespan_ns / 1e6, streams.makespan_ns / 1e6
        return [f"{where}: takes {taken:.3g} ms by what was measured, all at once without it {before:.3g} ms"]
    return []


def is_stale(plan: TogetherPlan, tables: Mapping[str, KernelTable]) -> bool:
    """Whether it rests on other figures than these."""
    mine = [tables[member.model] for member in plan.members if member.model in tables]
    return plan.profile != fingerprint_of(mine)


def verdict(plan: TogetherPlan, measured: Mapping[str, Mapping[int, ModelTasks]]) -> tuple[list[str], bool]:
    """What speaks against a plan by the tasks that are measured now, by tenant and number of cores; and, if nothing
    does, whether it is stale: made from other measurements of the same models."""
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
    faults = together_faults(plan, tables, {name: each.digest for name, each in tasks.items()}, rules)
    return faults, not faults and is_stale(plan, tables)


def words_of(plan: TogetherPlan) -> str:
    """A plan in a few words."""
    names = " and ".join(f"{each.model}={each.batch}" for each in plan.members)
    before, after = plan.streams_ns / 1e6, plan.makespan_ns / 1e6
    return f"{names} together on {plan.lanes} lanes, {after:.3g} ms instead of {before:.3g}"
